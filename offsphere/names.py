"""The cells and the losses, a row each, and the other names that flags accept. Imports no torch.

A new cell is a row of `CELLS`. A new loss is a row of `LOSSES` and a function of the same name in
`offsphere.losses`. Settings, objective, evaluation and page read these tables; no other place
lists them.
"""

import difflib
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

Exponents = tuple[float, float]


class CellRow(NamedTuple):
    """A cell: how it acts, and how it looks wherever it is drawn."""

    exponents: Exponents | None
    """(left, right); None: learned."""
    colour: str
    """On white, then on black: both have at least 4.5 to 1 in contrast."""
    dark: str
    marker: Literal["circle", "triangle-up", "triangle-down", "square", "diamond", "cross"]
    sentence: str
    aliases: tuple[str, ...] = ()
    """What other lanes call it: image-text pairs, sentence pairs."""


# The order of the rows is the order of every table and legend. A name says which side IS
# normalised: q(uery) is the left one, d(ocument) the right one.
CELLS = {
    "cosine": CellRow(
        (1.0, 1.0), "#0067a5", "#5cb3e8", "circle", "Both norms are discarded: cos θ."
    ),
    "qnorm": CellRow(
        (1.0, 0.0), "#00785a", "#3cc59b", "triangle-up", "The right norm is kept: |right| cos θ.",
        ("imgnorm", "s1norm"),
    ),
    "dnorm": CellRow(
        (0.0, 1.0), "#a3477f", "#e39ac7", "triangle-down", "The left norm is kept: |left| cos θ.",
        ("txtnorm", "s2norm"),
    ),
    "dot": CellRow(
        (0.0, 0.0), "#bf4a0a", "#f08a4b", "square", "Both norms are kept: |left| |right| cos θ."
    ),
    "learnable": CellRow(
        None, "#806000", "#dcb63a", "diamond", "Two exponents are learned, from 0.5 each."
    ),
}  # fmt: skip
CORNERS = {name: row.exponents for name, row in CELLS.items() if row.exponents is not None}
"""Exponents of the cells that have fixed ones: what everything can be scored with."""
SQUARE = ("cosine", "qnorm", "dnorm", "dot")
"""The four of the 2x2: left and right norm, each discarded or kept."""
CELL_ALIASES = {alias: name for name, row in CELLS.items() for alias in row.aliases}


class LossRow(NamedTuple):
    """A loss: what it is called with, and what it can do beside that."""

    form: Literal["pairs", "views", "queue"]
    """pairs: left and right, row by row; views: both stacked, on both sides; queue: MoCo's."""
    directed: bool = False
    """Takes `both_ways` and `hard_negatives`."""
    bias: bool = False
    """Takes a learned bias."""
    within_view: bool = False
    """Has a second function, NAME_within, with the other rows of the same side as negatives."""


LOSSES = {
    "nt_xent": LossRow("views"),
    "dcl": LossRow("views"),
    "dhel": LossRow("views"),
    "info_nce": LossRow("pairs", directed=True, within_view=True),
    "siglip": LossRow("pairs", bias=True, within_view=True),
    "spectral": LossRow("pairs"),
    "moco_nce": LossRow("queue"),
}
PAIR_LOSSES = tuple(name for name, row in LOSSES.items() if row.form == "pairs")
VIEW_LOSSES = tuple(name for name, row in LOSSES.items() if row.form == "views")
DIRECTIONS = ("both", "left_to_right", "right_to_left")
SCALES = ("calibrated", "fixed")
LOSS_PRECISIONS = ("fp32", "tf32")
VARIANCE_ON = ("cosine", "score")
FALSE_NEGATIVES = ("keep", "mask", "positive")
"""What rows of one id are to each other: negatives as any, left out, or positives too."""
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


def unknown_data(what: str, data: str, expected: Iterable[str]) -> ValueError:
    """The error for a data set's name; a path that is there was meant as one."""
    if ":" not in data and Path(data or " ").exists():
        return ValueError(f"Unknown {what} {data!r}. Did you mean the path './{data}'?")
    return unknown(what, data, expected)


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


def parse_cell(text: str) -> str | Exponents:
    """A cell's name, or its exponents from a string like '0.3,0.7'; aliases are resolved."""
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
