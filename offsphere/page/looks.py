"""The colours of pages and figures, and the look of each cell and of each level. No torch."""

from __future__ import annotations

from typing import NamedTuple

from offsphere.names import CELLS

COLOURS = {
    "paper": ("#fcfcfa", "#14171a"),
    "raised": ("#ffffff", "#1b1f24"),
    "ink": ("#1c2024", "#e7e9eb"),
    "muted": ("#575e67", "#a6aeb8"),
    "rule": ("#dcdfe2", "#333a42"),
    "grid": ("#e9ebed", "#272d33"),
    "edge": ("#8a929b", "#6d7681"),
    "accent": ("#0b5c8f", "#7cc0ee"),
    "zone": ("#e3e9ee", "#262d35"),
    "heat": ("#0b6aa8", "#4a9fd4"),
    "blue": ("#0067a5", "#5cb3e8"),
    "green": ("#00785a", "#3cc59b"),
    "pink": ("#a3477f", "#e39ac7"),
    "orange": ("#bf4a0a", "#f08a4b"),
    "yellow": ("#806000", "#dcb63a"),
    "grey": ("#59626c", "#a9b3bd"),
    "violet": ("#5b4fb3", "#a9a0f0"),
    "red": ("#9a2f3c", "#f08f9a"),
    "good": ("#00694f", "#3cc59b"),
    "bad": ("#ab3d02", "#f5955a"),
    **{name: (row.colour, row.dark) for name, row in CELLS.items()},
}
"""Each colour by name, for a light and a dark page; all are readable as text on `paper`."""


class Look(NamedTuple):
    """A colour by its name, and a shape, so that nothing is told by the colour alone."""

    colour: str
    shape: str

    @property
    def paint(self) -> str:
        """The colour as pages and charts name it."""
        return f"var(--{self.colour})"


CELL_LOOKS = {name: Look(name, row.marker) for name, row in CELLS.items()}
"""A cell looks the same everywhere."""
LEVEL_LOOKS = (
    Look("grey", "circle"),
    Look("blue", "triangle-up"),
    Look("orange", "triangle-down"),
    Look("green", "square"),
    Look("pink", "diamond"),
    Look("yellow", "circle"),
    Look("violet", "triangle-up"),
    Look("red", "triangle-down"),
)


def look_of(cell: str | None, level: int) -> Look:
    """The look of a cell, or of a level of another treatment."""
    return CELL_LOOKS.get(cell or "", LEVEL_LOOKS[level % len(LEVEL_LOOKS)])
