"""What flags accept, and the nearest name for a misspelt one. Imports no torch."""

import difflib
import math
from collections.abc import Iterable

# (left, right) exponents of each corner of the square; the name says which side IS normalised.
CORNERS = {"cosine": (1.0, 1.0), "dot": (0.0, 0.0), "qnorm": (1.0, 0.0), "dnorm": (0.0, 1.0)}
CELLS = (*CORNERS, "learnable")
# What the same cells are called for image-text pairs and for sentence pairs.
CELL_ALIASES = {"imgnorm": "qnorm", "txtnorm": "dnorm", "s1norm": "qnorm", "s2norm": "dnorm"}

PAIR_LOSSES = ("info_nce", "siglip", "spectral")
VIEW_LOSSES = ("nt_xent", "dcl", "dhel")
LOSSES = (*PAIR_LOSSES, *VIEW_LOSSES, "moco_nce")
DIRECTIONS = ("both", "left_to_right", "right_to_left")
SCALES = ("calibrated", "fixed")
VARIANCE_ON = ("cosine", "score")
LARGEST_SCALE = 100.0
"""A learnable scale (1 / temperature) stays between 1 and 100, as in CLIP, over the ratio r."""
MOST_NAMES = 16
"""Names that an error lists at most."""
# Those of offsphere.evaluation.similarity, which can be scored with after training.
SIMILARITIES = (
    *CORNERS,
    *("scaled", "radial_angular", "soft_cosine", "query_zscore", "euclidean", "centred"),
    *("whitened", "whitened_pca", "top_removed", "augmented", "csls"),
)


def unknown(what: str, got: object, expected: Iterable[str]) -> ValueError:
    """The error for a name that is not one of `expected`: the nearest one, or else all of them."""
    expected = tuple(expected)
    near = nearest(str(got), expected)
    if near is not None:
        return ValueError(f"Unknown {what} {got!r}. Did you mean {near!r}?")
    more = f" and {len(expected) - MOST_NAMES} more" if len(expected) > MOST_NAMES else ""
    names = ", ".join(expected[:MOST_NAMES]) + more
    return ValueError(f"Unknown {what} {got!r}: expected one of {names}.")


def nearest(got: str, expected: Iterable[str]) -> str | None:
    """The name that `got` was probably meant to be, whatever its case and its dashes."""
    plain: dict[str, str] = {}
    for name in expected:
        plain.setdefault(_plain(name), name)
    near = difflib.get_close_matches(_plain(got), plain, n=1, cutoff=0.5)
    return plain[near[0]] if near and near[0] else None


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def check_similarities(names: Iterable[str]) -> None:
    """Refuse a name that is no similarity's."""
    for name in names:
        if name not in SIMILARITIES:
            raise unknown("similarity", name, SIMILARITIES)


def parse_cell(text: str) -> str | tuple[float, float]:
    """A cell's name, or its exponents from a text like '0.3,0.7'; aliases are resolved."""
    name = text.strip().lower()
    name = CELL_ALIASES.get(name, name)
    if name in CELLS:
        return name
    parts = name.split(",")
    try:
        left, right = (float(part) for part in parts)
    except ValueError:
        raise unknown("cell", text, (*CELLS, *CELL_ALIASES)) from None
    if not (math.isfinite(left) and math.isfinite(right)):
        raise ValueError(f"Expected two finite exponents for a cell, as in 0.3,0.7, got {text!r}.")
    return left, right
