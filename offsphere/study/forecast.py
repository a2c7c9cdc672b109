"""A study before it runs: its flags, what is still to be done, and how long that may take.

Imports no torch.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from offsphere.data.needs import lacking
from offsphere.run.catalog import identity
from offsphere.run.command import cores
from offsphere.run.config import check_positive, command, identity_settings, keyboard
from offsphere.run.scripts import Scripts
from offsphere.study.display import duration
from offsphere.study.made import finished_below, made_elsewhere, state_of
from offsphere.study.plan import Run, Settings, Study, equipped, main_runs, pilot_runs
from offsphere.study.tuning import choice_for, choices_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True)
class StudySettings:
    file: str
    """FILE.yaml, the study; the flag may be left out."""
    smoke: bool = False
    """The small edition, in <study>_smoke."""
    dry_run: bool = False
    """Print the plan and its cost."""
    workers: int | None = None
    """Runs at a time; default: one per core."""
    engine: Literal["local", "ray"] = "local"
    gpus_per_run: float = 0.0
    """What a run asks Ray for."""
    out: str = "results"
    """Where the study's folder goes."""
    reuse: bool = False
    """Take finished runs of the same settings from other studies in --out."""
    data_root: str | None = None
    """Where data with a name lie; default: OFFSPHERE_DATA."""
    allow_pipe: bool = keyboard(False)
    """Let wds:pipe: data run the commands that they are."""
    retry_failed: bool = False
    """Try failed runs once more."""

    def __post_init__(self) -> None:
        check_positive("--workers", self.workers)


class Tally(NamedTuple):
    """The runs of a stage by what is to be done with them."""

    finished: list[Run]
    failed: list[Run]
    to_do: list[Run]


def tally_of(runs: Iterable[Run], *, retry_failed: bool) -> Tally:
    """The runs by their states; a failed one is to be done again where that is asked for."""
    found = Tally([], [], [])
    for run in runs:
        state = state_of(run.path)
        if state == "failed" and not retry_failed:
            found.failed.append(run)
        else:
            (found.finished if state == "finished" else found.to_do).append(run)
    return found


def here(runs: list[Run], settings: StudySettings) -> list[Run]:
    """The runs with what the flags say about this machine."""
    return equipped(runs, data_root=settings.data_root, allow_pipe=settings.allow_pipe)


class Plan(NamedTuple):
    """Every run of a study as far as it can be told before its pilots have run."""

    pilots: list[Run]
    runs: list[Run]
    taken: set[Path]
    """Those that --reuse takes from another study."""
    undecided: int
    """Points that still stand for what pilots will choose."""
    tally: Tally


def plan_of(study: Study, scripts: Scripts, settings: StudySettings) -> Plan:
    """All runs; a point whose pilots have not decided stands with its first candidate."""
    choices = choices_of(study, scripts, settings.out)
    undecided = 0

    def choose(tune: Any, point: Any) -> Settings:
        nonlocal undecided
        chosen = choice_for(choices, point)
        undecided += chosen is None
        return tune.candidates[0] if chosen is None else chosen

    pilots = here(pilot_runs(study, scripts, settings.out), settings)
    runs = here(main_runs(study, scripts, settings.out, choose), settings)
    planned = [*pilots, *runs]
    taken = {run.path for run in planned if settings.reuse and made_elsewhere(run, settings.out)}
    left = [run for run in planned if run.path not in taken]
    return Plan(pilots, runs, taken, undecided, tally_of(left, retry_failed=settings.retry_failed))


def dry_run(study: Study, scripts: Scripts, settings: StudySettings) -> int:
    """Print every run's command, how many there are, how long they may take, what they lack."""
    pilots, runs, taken, undecided, tally = plan_of(study, scripts, settings)
    if study.describe:
        print(study.describe)
    for run in [*pilots, *runs]:
        labels = "; ".join(", ".join(f"{k} {v}" for k, v in one.items()) for one in run.labels)
        state = "taken from another study" if run.path in taken else state_of(run.path)
        print(f"{state}: {labels + ': ' if labels else ''}{command(run.script.path, run.settings)}")
    if undecided:
        print(f"{undecided} of the settings above stand for what the pilot runs will choose.")
    first = f"{len(pilots)} pilot runs and " if pilots else ""
    others = f"{len(taken)} taken from other studies, " if taken else ""
    print(
        f"{study.name}: {first}{len(runs)} runs; {len(tally.finished)} finished, {others}"
        f"{len(tally.failed)} failed, {len(tally.to_do)} to do."
    )
    workers = settings.workers or cores()
    for name in dict.fromkeys(run.name for run in tally.to_do):
        of_script = [run for run in tally.to_do if run.name == name]
        finished = list(finished_below(Path(settings.out), name))
        guesses = [guess_of(run.settings, finished) for run in of_script]
        known = [guess for guess in guesses if guess is not None]
        if len(known) < len(guesses):
            lack = "the finished ones are too short" if finished else "no finished run"
            print(f"{name}: {len(of_script)} to do; {lack} to estimate the time from.")
            continue
        others = dict.fromkeys(name for guess in known for name in guess.unlike)
        unlike = f"; the most alike differ in {', '.join(others)}" if others else ""
        took = duration(sum(guess.seconds for guess in known) / workers)
        print(
            f"{name}: {len(of_script)} to do, about {took} with {workers} at a time "
            f"(from {len(finished)} finished runs{unlike})."
        )
    for lack in lacking(run.settings for run in tally.to_do):
        print(f"needs: {lack}")
    return 0


class Guess(NamedTuple):
    """How long a run may take, and in which settings the runs it goes by differ from it."""

    seconds: float
    unlike: list[str]


def guess_of(settings: DataclassInstance, finished: Sequence[dict[str, Any]]) -> Guess | None:
    """How long a run will take, by the finished runs whose settings are the most like its own.

    That is their median time per sample times its samples or, where it states none, their median
    time. Runs of less than a tenth of its samples do not count, because measuring takes most of
    their time; None if no other run is left.
    """
    own = {name: value for name, value in identity_settings(settings).items() if name != "seed"}
    samples = own.pop("samples", None)
    least = (samples or 0) / 10
    finished = [row for row in finished if row.get("run/samples", least) >= least]
    if not finished:
        return None
    unlike = [
        [name for name, value in own.items() if _identity(row.get(name, value)) != value]
        for row in finished
    ]
    fewest = min(len(names) for names in unlike)
    nearest = [row for row, names in zip(finished, unlike, strict=True) if len(names) == fewest]
    names = next(names for names in unlike if len(names) == fewest)
    rates = [row["run/seconds"] / row["run/samples"] for row in nearest if row.get("run/samples")]
    if samples and rates:
        return Guess(samples * statistics.median(rates), names)
    return Guess(statistics.median(row["run/seconds"] for row in nearest), names)


def _identity(value: Any) -> Any:
    """A table's value as `identity_settings` spells it: data by their committed place."""
    return identity(value) if isinstance(value, str) else value
