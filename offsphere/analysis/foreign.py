"""What a results folder must hold to be read: it may be edited, cut or somebody else's. No torch.

Each check ends in one line that names the file, the place, what was expected and what is there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

MEASURED = ("test/", "train/", "untrained/")
"""Beginnings of the columns that are numbers in every run."""
WHOLE = 2**63
"""Whole numbers of a table stay below it in size."""
EXACT_VERDICTS = ("verified", "proved", "failed", "not run")
EXACT_PARTS: dict[str, type] = {
    "verdict": str,
    "tests": list,
    "passed": int,
    "failed": list,
    "missing": list,
    "when": str,
}
REMEDY = "Run offsphere claims --run-tests"
SHOWN = 3


def check_row(row: Mapping[Any, Any], source: str) -> None:
    """Refuse a run's row that no run can have written."""
    for name, value in row.items():
        if not isinstance(name, str):
            raise ValueError(
                f"{source}: the name of a setting must be a string, got {short(name)}."
            )
        if value is None:
            continue
        if name == "seed" and not is_whole(value):
            raise ValueError(f"{source}: 'seed' must be a whole number, got {short(value)}.")
        if name in ("run", "status", "script") and isinstance(value, list | dict):
            raise ValueError(f"{source}: {name!r} must be a string, got {short(value)}.")
        if (name.startswith(MEASURED) or name == "run/seconds") and not is_number(value):
            raise ValueError(f"{source}: {name!r} must be a number, got {short(value)}.")


def check_seeds(rows: Sequence[Mapping[str, Any]], source: str) -> None:
    """Refuse a study in which a run has no seed: nothing pairs it with another."""
    if without := [str(row["run"]) for row in rows if not is_whole(row.get("seed"))]:
        raise ValueError(f"{source}: the run {short(without[0])} has no seed.")


def check_curve(row: Sequence[Any], source: str) -> None:
    """Refuse a row of curves that is not run, step, name, value."""
    good = len(row) == 4 and is_whole(row[1]) and isinstance(row[2], str) and is_number(row[3])
    if not good:
        raise ValueError(
            f"{source}: expected run, step, name and value in every row, got {short(list(row))}."
        )


def read_json(path: Path) -> dict[str, Any]:
    """A study's own record (plan.json, tuning.json); empty if there is no file."""
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged: expected names and values, got {short(found)}.")
    return found


def text_in(record: Mapping[str, Any], key: str, source: Path) -> str | None:
    """A text of a record, or None where there is none."""
    value = record.get(key)
    if value is None or isinstance(value, str):
        return value
    raise ValueError(f"{source}: {key!r} must be a string, got {short(value)}.")


def tuning_choices(path: Path) -> list[dict[str, Any]]:
    """The choices of tuning.json: for which settings, the candidates and which was chosen."""
    choices = read_json(path).get("choices", [])
    if not _all(choices, dict):
        raise ValueError(f"{path}: 'choices' must be a list of choices, got {short(choices)}.")
    for choice in choices:
        targets, candidates = choice.get("for", []), choice.get("candidates", [])
        settings = [c.get("settings", {}) for c in candidates] if _all(candidates, dict) else None
        if not (_all(targets, dict) and _all(settings, dict)):
            raise ValueError(
                f"{path}: a choice needs 'for' and 'candidates' with their settings, got "
                f"{short(choice)}."
            )
    return choices


def read_exact(path: Path) -> dict[str, dict[str, Any]]:
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
        if problem := _exact_problem(entry):
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


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number of a size that a table can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and value == int(value) and abs(value) < WHOLE


def is_number(value: Any) -> bool:
    """Whether a value is a number, NaN and infinity among them, that a float can hold.

    numpy's integers are: a column of them that has a gap gives its values so.
    """
    try:
        float(value if isinstance(value, Real) else "x")
    except (ValueError, OverflowError):
        return False
    return True


def short(value: Any) -> str:
    """A value in few signs, for a message of one line."""
    text = repr(value)
    return text if len(text) <= 60 else text[:59] + "…"


def _all(values: Any, kind: type) -> bool:
    return isinstance(values, list) and all(isinstance(value, kind) for value in values)


def _exact_problem(entry: Any) -> str | None:
    """What is wrong with one claim's record, if anything."""
    if not isinstance(entry, dict):
        return f"expected {', '.join(EXACT_PARTS)}, got {short(entry)}"
    for name, kind in EXACT_PARTS.items():
        value = entry.get(name)
        if not isinstance(value, kind) or isinstance(value, bool):
            return f"{name!r} must be a {kind.__name__}, got {short(value)}"
        if isinstance(value, list) and not all(isinstance(item, str) for item in value):
            return f"{name!r} must hold strings, got {short(value)}"
    if entry["verdict"] not in EXACT_VERDICTS:
        return (
            f"'verdict' must be one of {', '.join(EXACT_VERDICTS)}, got {short(entry['verdict'])}"
        )
    return None
