"""What measures of vectors refuse: what is no matrix of finite rows, widths that differ, labels
that fit no rows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

SHORTEST, LONGEST = 1e-9, 1e15
"""What the longest vector of a side may measure."""


def checked_side(x: Tensor, name: str) -> Tensor:
    """Raw embeddings in float64 where there is such; an error if they are no finite matrix."""
    if x.ndim != 2 or len(x) == 0 or not x.is_floating_point():
        raise ValueError(
            f"The {name} embeddings must be a floating-point matrix with at least one row, got "
            f"{x.dtype} of shape {tuple(x.shape)}."
        )
    check_finite(f"{name} embeddings", x)
    return x.detach().to(torch.float32 if x.device.type == "mps" else torch.float64)


def both_sides(queries: Tensor, items: Tensor) -> tuple[Tensor, Tensor]:
    """Both sides checked, detached, in one dtype of at least float32."""
    queries, items = checked_rows("queries", queries), checked_rows("items", items)
    check_equal_width("items", items, "queries", queries)
    dtype = torch.promote_types(queries.dtype, items.dtype)
    return queries.to(dtype), items.to(dtype)


def references(reference: Tensor, queries: Tensor | None) -> list[Tensor]:
    """The references of the query side and of the item side, or the one that stands for both."""
    items = checked_rows("reference", reference)
    if queries is None or queries is reference:
        return [items]
    queries = checked_rows("reference queries", queries)
    check_equal_width("reference queries", queries, "reference", items)
    return [queries, items]


def checked_rows(name: str, x: Tensor) -> Tensor:
    """Rows of vectors, finite, at least in float32."""
    if x.ndim != 2 or not x.is_floating_point() or x.shape[1] == 0:
        raise ValueError(
            f"Expected {name} as a floating-point matrix whose rows are embeddings, got {x.dtype} "
            f"of shape {tuple(x.shape)}."
        )
    if len(x) == 0:
        raise ValueError(f"Expected at least one row of {name}, got none.")
    check_finite(f"rows of {name}", x)
    x = x.detach()
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def check_finite(name: str, x: Tensor) -> None:
    """Refuse rows that are not finite."""
    bad = (~x.isfinite().all(1)).nonzero().flatten()
    if len(bad):
        raise ValueError(
            f"{len(bad)} of {len(x)} {name} are not finite (first: row {int(bad[0])}): the encoder "
            "diverged or its input was bad; fix that first."
        )


def check_lengths(name: str, norms: Tensor) -> None:
    """Refuse vectors whose lengths or their squares float32 cannot hold: scores would be wrong."""
    longest = norms.max().item()
    if not SHORTEST <= longest <= LONGEST:
        raise ValueError(
            f"The longest of {len(norms):,} {name} vectors has the length {longest:.3g}: expected "
            f"one between {SHORTEST:g} and {LONGEST:g}, which float32 can score. Multiply all "
            "vectors of this side by one number."
        )


def check_split(features: Tensor, labels: Tensor, name: str) -> None:
    """Refuse features that are not a finite matrix and labels that do not fit them."""
    if features.ndim != 2 or not features.is_floating_point():
        raise ValueError(
            f"The {name} features must be a floating-point matrix (rows are examples), got "
            f"{features.dtype} of shape {tuple(features.shape)}."
        )
    if labels.ndim != 1 or len(labels) != len(features):
        raise ValueError(
            f"The {name} labels must be one number per row of features: expected {len(features)}, "
            f"got shape {tuple(labels.shape)}."
        )
    if len(features) == 0:
        raise ValueError(f"The {name} split is empty: pass at least one example.")
    if labels.is_floating_point() or labels.is_complex() or labels.min() < 0:
        raise ValueError(
            f"The {name} labels must be whole numbers from 0, got {labels.dtype} with smallest "
            f"value {labels.min().item()}."
        )
    check_finite(f"{name} feature rows", features)


def check_classes(labels: Tensor) -> None:
    """Refuse training labels of one class only."""
    if bool((labels == labels[0]).all()):
        raise ValueError(
            f"All {len(labels)} training labels are {int(labels[0])}: a classifier needs at least "
            "two classes."
        )


def check_equal_width(name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    """Refuse two sides of different widths."""
    if x.shape[1] != other.shape[1]:
        raise ValueError(
            f"Expected {name} and {other_name} of one width, got {x.shape[1]} and "
            f"{other.shape[1]} features."
        )


def check_share(name: str, value: float) -> None:
    """Refuse a number outside 0 and 1."""
    if not 0 <= value <= 1:
        raise ValueError(f"Expected {name} from 0 to 1, got {value}.")


def check_weight(name: str, value: float) -> None:
    """Refuse a weight that is negative or not finite."""
    if not 0 <= value < math.inf:
        raise ValueError(f"Expected {name} to be finite and not negative, got {value}.")


def check_count(name: str, value: int) -> None:
    """Refuse a count below 1."""
    if value < 1:
        raise ValueError(f"Expected {name} of at least 1, got {value}.")


def check_available(name: str, asked: int, available: int) -> None:
    """Refuse to take more than there is."""
    if asked > available:
        raise ValueError(
            f"{asked} {name} were asked for, but the reference allows {available}: ask for fewer "
            "or fit on more varied data."
        )
