"""Prompt templates: the sentences that name the classes of zero-shot classification."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from offsphere.names import unknown

PROMPTS = Path(__file__).parent / "prompts"


def load_templates(name: str) -> tuple[str, ...]:
    """The templates of a file, or of a name in crossmodal/prompts: one per line, {c} the class."""
    file = Path(name) if Path(name).suffix else PROMPTS / f"{name}.txt"
    if not file.is_file():
        names = [path.stem for path in PROMPTS.glob("*.txt")]
        raise unknown("prompt templates", name, (*sorted(names), "a FILE.txt"))
    lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    templates = tuple(line for line in lines if line)
    wrong = [line for line in templates if line.count("{c}") != 1]
    if wrong or not templates:
        raise ValueError(
            f"{file}: expected one template per line with {{c}} for the class name, got "
            f"{wrong[0] if wrong else 'an empty file'!r}."
        )
    return templates


def prompts_of(
    classes: Sequence[str], templates: Sequence[str] | dict[str, Sequence[str]]
) -> tuple[tuple[str, ...], ...]:
    """The texts of each class: the templates filled in, or its own if they are given by class."""
    if isinstance(templates, dict):
        return tuple(tuple(templates[name]) for name in classes)
    return tuple(tuple(t.replace("{c}", name) for t in templates) for name in classes)
