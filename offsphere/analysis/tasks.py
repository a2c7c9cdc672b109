"""The scripts' tasks, as they declare them: who is left, who is right, what was measured how."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from offsphere.analysis.foreign import read_json
from offsphere.run import safe_yaml
from offsphere.run.scripts import Role, Task
from offsphere.share import MEASURES, TASKS


class Reference(NamedTuple):
    """A published line beside ours."""

    name: str
    level: str
    points: list[tuple[float, float]]


Tasks = dict[str, Task]
"""What scripts declare of themselves, by their names."""


def tasks_of(folder: Path) -> Tasks:
    """What the study's plan says of its scripts; for older plans, what was true of these then."""
    file = folder / "plan.json"
    try:
        return _read(TASKS) | _tasks(read_json(file))
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{file} is damaged: its tasks are not as a study writes them.") from error


@cache
def _read(file: Path) -> Tasks:
    return _tasks({"tasks": read_json(file)})


def _tasks(plan: Mapping[str, Any]) -> Tasks:
    return {
        script: Task(task["metric"], tuple(Role(**role) for role in task["roles"]))
        for script, task in plan.get("tasks", {}).items()
    }


def role_of(tasks: Tasks, script: str, settings: Mapping[str, Any]) -> Role:
    """What left and right are in a run of a script: the first role that its settings meet."""
    if script not in tasks:
        return Role(script, "", "No query: the script trains no pair of sides.")
    *conditional, last = tasks[script].roles
    meets = (
        role
        for role in conditional
        if all(settings.get(name) == value for name, value in role.when.items())
    )
    return next(meets, last)


@cache
def outcomes_of(metric: str) -> tuple[str, ...]:
    """The per-example outcomes whose mean a metric is; of several, their mean."""
    before = "untrained_" if metric.startswith("untrained/") else ""
    name = metric.removeprefix("untrained/" if before else "test/")
    return tuple(f"{before}{outcome}" for outcome in _said("outcomes", name).split())


def unit_of(outcome: str) -> str:
    """The outcome that has one number per independent example of another one's test set."""
    return _said("units", outcome)


def _said(table: str, name: str) -> str:
    """The entry for a name in a table of patterns; the name itself if none matches."""
    found = ((re.fullmatch(pattern, name), said) for pattern, said in _measures()[table].items())
    return next((match.expand(said) for match, said in found if match), name)


@cache
def _measures() -> dict[str, Any]:
    return safe_yaml.load(MEASURES.read_text(encoding="utf-8"), MEASURES)


def published_variance() -> list[Reference]:
    """The variance of negative similarities by batch size, as the paper's table 1 has it."""
    from offsphere.analysis.published import published

    try:
        table = published("embedding_similarities_table01")
    except FileNotFoundError:
        return []
    return [
        Reference(
            f"published, weight {weight:g} (CIFAR-100, 2506.09781v2 table 1)",
            f"{weight:g}",
            list(zip(part["batch_size"].astype(float), part["value"], strict=True)),
        )
        for weight, part in table.groupby("variance_weight")
    ]
