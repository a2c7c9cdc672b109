"""What each figure of the theory lane shows, its numbers and the claims it illustrates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from offsphere.run import safe_yaml
from offsphere.share import FIGURES


class Caption(NamedTuple):
    title: str
    drawn: str
    """What is drawn, as a text for those who do not see it."""
    says: str
    """What to look for."""
    numbers: Mapping[str, str]
    """The metrics that stand beside the figure, each with its name in words."""
    claims: tuple[str, ...]
    """The ids, in configs/claims.yaml, of the claims that the figure illustrates."""


def _read() -> dict[tuple[str, str], Caption]:
    table = safe_yaml.load(FIGURES.read_text(encoding="utf-8"), FIGURES)
    return {
        (script, figure): Caption(**about | {"claims": tuple(about["claims"])})
        for script, figures in table.items()
        for figure, about in figures.items()
    }


CAPTIONS = _read()
"""The caption of each figure, by script and name."""
