"""A model card: what a model was trained with, how it must be scored, and what that is worth."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

import offsphere
from offsphere.names import CELLS
from offsphere.run.config import to_yaml
from offsphere.run.record import RunFolder

MOST_FIGURES = 12


class Licence(NamedTuple):
    """Under what terms the starting weights came."""

    name: str
    """As the Hugging Face hub spells it."""
    about: str


def licence_of_folder(folder: Path) -> Licence:
    """What the card of a Hugging Face folder says about itself."""
    card = folder / "README.md"
    head = card.read_text(encoding="utf-8", errors="replace")[:4096] if card.is_file() else ""
    found = re.search(r"^license:\s*['\"]?([\w.+-]+)", head, re.MULTILINE)
    if found is None:
        return Licence("unknown", f"{folder.name}, whose folder does not say: ask where it is from")
    return Licence(found[1], f"{folder.name}, {found[1]}")


def model_card(
    run: RunFolder,
    settings: Any,
    exponents: tuple[float, float],
    *,
    title: str,
    library: str,
    licence: Licence,
    sides: tuple[str, str],
    use: str,
    figures: Mapping[str, str],
) -> str:
    """The card as Markdown with the hub's header; `figures` is metric -> what it is called."""
    left, right = exponents
    cell = settings.eval_cell or settings.cell
    sentence = CELLS[cell].sentence if cell in CELLS else "Both sides are shrunk by a fixed power."
    for side, name in zip(("left", "right"), sides, strict=True):  # right is also the word for good
        sentence = sentence.replace(side, name)
    metrics = run.metrics()
    rows = [
        f"| {words} | {metrics[name]:.4g} |"
        for name, words in figures.items()
        if isinstance(metrics.get(name), int | float)
    ][:MOST_FIGURES]
    header = {
        "library_name": library,
        "license": licence.name,
        "tags": ["offsphere", "feature-extraction", cell],
    }
    parts = [
        f"---\n{yaml.safe_dump(header, sort_keys=False)}---",
        f"# {title}",
        f"Trained with the cell `{settings.cell}` and scored with `{cell}`. {sentence} With q the "
        f"{sides[0]} and d the {sides[1]}, as raw vectors, the score is q·d / (|q|^{left:.4g} "
        f"|d|^{right:.4g}).",
        f"## Use\n\n{use}",
        "## Figures\n\n"
        + ("\n".join(["| measure | value |", "|---|---|", *rows]) if rows else "The run was cut."),
        f"## Data\n\n{_data(run)}\n\nThe data have a licence of their own.",
        f"## Licence\n\nThe weights began as {licence.about}.",
        f"## Settings\n\nMade by offsphere {offsphere.__version__}.\n\n"
        f"```yaml\n{to_yaml(settings).strip()}\n```",
    ]
    return "\n\n".join(parts) + "\n"


def _data(run: RunFolder) -> str:
    """What the run recorded of its data: names, sizes, hashes."""
    found = run.provenance().get("data") or {}
    parts = {name: x for name, x in found.items() if isinstance(x, dict)}
    lines = [
        f"- {name}: `{json.dumps(facts)}`" for name, facts in (parts or {"data": found}).items()
    ]
    return "\n".join(lines)
