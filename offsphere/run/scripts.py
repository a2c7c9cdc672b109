"""What a script declares of itself, for the study, the doctor and the report. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Role:
    """What the two sides of a task are to each other."""

    task: str
    kind: str
    """asymmetric, symmetric, control, or nothing for a script that trains no pair of sides."""
    sides: str
    """Who is left, who is right and which of them is the query."""
    trained: str | None = None
    """The metric of the trained direction, where a study's own metric takes in another."""
    when: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """The settings with which a run has this role."""


@dataclass(frozen=True)
class Task:
    """A script's TASK: what it is about. A study writes it into its plan, the report reads it."""

    metric: str | None
    """The primary metric, where a study names none."""
    roles: tuple[Role, ...]
    """The first one whose `when` a run's settings meet is the run's, else the last."""


class Export(NamedTuple):
    """What `offsphere export` asks of a script."""

    run: Path
    form: str
    """What --as says; auto: the form in which a script's models usually leave."""
    out: Path
    as_cosine: bool


class Script(NamedTuple):
    """A script that a study can run."""

    path: str
    """As in `python PATH`, for the commands that a plan prints."""
    config_class: type
    run: Callable[[Any], dict]
    make: Callable[..., Any] | None = None
    """How a training script makes its experiment (see offsphere.training.run.Make)."""
    task: Task | None = None
    export: Callable[[Export], str] | None = None
    """Writes a run's model in another form, and says what to do with it."""


Scripts = Mapping[str, Callable[[], Script]]
