"""Which exact claims were proved: the record that `offsphere claims --run-tests` writes. No torch.

A record, like a file of claims, may come from somebody else: it is checked before it is believed,
and tests that a foreign file of claims names are somebody else's programs.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from offsphere.analysis.foreign import short

VERDICTS = ("verified", "proved", "failed", "not run")
PARTS: dict[str, type] = {
    "verdict": str,
    "tests": list,
    "passed": int,
    "failed": list,
    "missing": list,
    "when": str,
}
REMEDY = "Run offsphere claims --run-tests"
SHOWN = 3


def read_record(path: Path) -> dict[str, dict[str, Any]]:
    """What was recorded about each claim, by its id; nothing if there is no file."""
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}. {REMEDY}.") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected claims by their ids, got {short(content)}. {REMEDY}.")
    for name, entry in content.items():
        if problem := _problem(entry):
            raise ValueError(f"{path}, claim {short(name)}: {problem}. {REMEDY}.")
    return content


def check_may_run(claims: str | Path, own: Path, tests: Collection[str]) -> None:
    """Refuse to run tests that somebody else's file of claims names."""
    if Path(claims).resolve() == own.resolve():
        return
    named = ", ".join(sorted(tests)[:SHOWN]) + (", ..." if len(tests) > SHOWN else "")
    raise ValueError(
        f"{claims} is not this repository's own file of claims ({own.resolve()}), and --run-tests "
        f"would run the {len(tests)} tests that it names: {named or 'none'}. Read them first; "
        "--foreign-tests then runs them."
    )


def _problem(entry: Any) -> str | None:
    """What is wrong with one claim's record, if anything."""
    if not isinstance(entry, dict):
        return f"expected {', '.join(PARTS)}, got {short(entry)}"
    for name, kind in PARTS.items():
        value = entry.get(name)
        if not isinstance(value, kind) or isinstance(value, bool):
            return f"{name!r} must be a {kind.__name__}, got {short(value)}"
        if isinstance(value, list) and not all(isinstance(item, str) for item in value):
            return f"{name!r} must hold texts, got {short(value)}"
    if entry["verdict"] not in VERDICTS:
        return f"'verdict' must be one of {', '.join(VERDICTS)}, got {short(entry['verdict'])}"
    return None
