"""`offsphere study FILE.yaml`: a grid of runs, in parallel, resumable at any time."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from offsphere.data.needs import has_changed, refuse_commands, refuse_missing, stamp
from offsphere.run.command import cores, stop_signals
from offsphere.run.config import parse
from offsphere.run.files import Lock
from offsphere.run.record import RunFolder, write_json
from offsphere.run.scripts import Scripts
from offsphere.study.display import Display
from offsphere.study.execution import Engine, execute
from offsphere.study.forecast import StudySettings, Tally, dry_run, here, plan_of, tally_of
from offsphere.study.made import metrics_of, rows_only, take_over
from offsphere.study.plan import (
    Run,
    Study,
    load_study,
    main_runs,
    pilot_runs,
)
from offsphere.study.tables import RUNS, append_run, mend_tables, write_rest, write_runs_of
from offsphere.study.tuning import Choice, choice_for, choices_of, tuning_record

EPILOG = """
A study that was stopped or killed resumes with the same command: finished runs are skipped, cut
ones resume from their checkpoints. In a clone, which has no run folders, the rows of runs.csv say
which runs have ended; --out=ELSEWHERE makes them anew. A run that fails is tried once more, then it
is a failed row of runs.csv. The exit code is 0 if every run finished, 1 if one failed, 2 for a
faulty file or flag, 130 after Ctrl-C. A cluster for --engine=ray is named by RAY_ADDRESS; it must
answer within 10 seconds.
"""


def main(argv: Sequence[str], scripts: Scripts) -> None:
    """Run the study that the command line names; an exit code other than 0 is raised."""
    if code := study_command(argv, scripts):
        raise SystemExit(code)


def study_command(argv: Sequence[str], scripts: Scripts) -> int:
    """Run the study that the command line names; the exit code."""
    settings = parse(
        StudySettings,
        argv,
        description=f"{__doc__}\n{EPILOG}",
        name="offsphere study",
        words=("file", "FILE.yaml"),
    )
    try:
        study = load_study(settings.file, scripts, smoke=settings.smoke)
    except (ValueError, OSError) as error:
        return _error(error, 2)
    try:
        mend_tables(Path(settings.out) / study.name, _locked)
        if settings.dry_run:
            return dry_run(study, scripts, settings)
        _refuse_unready(study, scripts, settings)
        with _locked(Path(settings.out) / study.name), stop_signals(patient=True) as stops:
            code = _run_study(study, scripts, settings, stops.__len__)
    except (ValueError, OSError) as error:
        return _error(error, 1)
    if stops:
        same = shlex.join(["offsphere", "study", *argv])
        print(f"Stopped; runs that were at work are cut. To resume: {same}", file=sys.stderr)
        return 130
    return code


def _error(error: Exception, code: int) -> int:
    print(f"offsphere study: error: {error}", file=sys.stderr)
    return code


def _run_study(
    study: Study, scripts: Scripts, settings: StudySettings, stops_asked: Callable[[], int]
) -> int:
    """Pilots, choices, runs; stopped, it returns early."""
    folder = Path(settings.out) / study.name
    with contextlib.ExitStack() as stack:

        @cache
        def engine() -> Engine:
            started = _engine(study, scripts, settings)
            stack.callback(started.close)
            return started

        def stage(title: str, runs: list[Run]) -> list[Run]:
            if settings.reuse and (taken := take_over(runs, settings.out)):
                print(f"{title}: {taken} runs are taken from other studies in {settings.out}.")
            if elsewhere := rows_only(runs):
                print(
                    f"{title}: {elsewhere} runs have ended elsewhere; their rows are in runs.csv."
                )
            tally = tally_of(runs, retry_failed=settings.retry_failed)
            return _stage(title, runs, tally, engine, stops_asked, study.metric)

        choices: list[Choice] = []
        if pilots := here(pilot_runs(study, scripts, settings.out), settings):
            stage(f"{study.name}, pilots", pilots)
            if stops_asked():
                return 1
            choices = choices_of(study, scripts, settings.out)
            write_json(folder / "tuning.json", tuning_record(choices))
        runs = main_runs(study, scripts, settings.out, lambda _, point: choice_for(choices, point))
        runs = here(runs, settings)
        write_json(folder / "plan.json", _plan_record(study, runs))
        failed = stage(study.name, runs)
    write_rest(folder)
    if stops_asked():
        return 1
    code = _closing(folder, runs, failed, choices)
    _tell_answer(folder)
    return code


def _refuse_unready(study: Study, scripts: Scripts, settings: StudySettings) -> None:
    """Before anything is written: are the data of what is to be done there, and harmless?"""
    tally = plan_of(study, scripts, settings).tally
    to_do = [run.settings for run in tally.to_do]
    refuse_commands(to_do, allowed=settings.allow_pipe)
    refuse_missing(to_do)
    _refuse_changed(tally.finished)


def _refuse_changed(finished: list[Run]) -> None:
    """Refuse to add to finished runs whose data have changed since.

    Sizes and times of files are looked at first; only where they differ are data read again.
    """
    touched = [run for run in finished if has_changed(RunFolder(run.path), run.settings)]
    if not touched:
        return
    from offsphere.training.run import description_of

    print(f"The data files of {len(touched)} finished runs have other times: reading them again.")
    for run in touched:
        assert run.script.make is not None  # only training scripts read data
        found = description_of(run.script.make, run.settings)
        with RunFolder(run.path, lock=True) as folder:
            folder.describe_data(found, stamp(run.settings))


def _engine(study: Study, scripts: Scripts, settings: StudySettings) -> Engine:
    if settings.engine == "ray":
        from offsphere.study.cluster import RayEngine

        return RayEngine(settings.workers, settings.gpus_per_run)
    from offsphere.study.local import LocalEngine

    names = {point.script for part in study.parts for point in part.points}
    return LocalEngine(settings.workers or cores(), [scripts[name]() for name in names])


def _stage(
    title: str,
    runs: list[Run],
    tally: Tally,
    engine: Callable[[], Engine],
    stops_asked: Callable[[], int],
    metric: str | None,
) -> list[Run]:
    """Do what is still to be done; the runs that have failed, now or before."""
    failed = list(tally.failed)
    folders = {run.path.parent for run in runs}
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        write_runs_of(folder, runs)
    if not tally.to_do:
        return failed
    with Display(title, runs, len(tally.finished), len(failed), metric) as display:
        for event in execute(tally.to_do, engine(), stops_asked):
            display.show(event)
            if event.what == "failed":
                failed.append(event.run)
            if event.what not in ("started", "retried"):
                append_run(event.run, runs)
    for folder in folders:
        write_runs_of(folder, runs)
    return failed


def _plan_record(study: Study, runs: list[Run]) -> dict[str, Any]:
    """What a reader of the study's folder needs to know about its file."""
    return {
        "study": study.name,
        "file": study.file.name,
        "describe": study.describe,
        "metric": study.metric,
        "tasks": {run.name: asdict(run.script.task) for run in runs if run.script.task},
        "runs": {run.path.name: {"script": run.name, "labels": list(run.labels)} for run in runs},
    }


def _closing(folder: Path, runs: list[Run], failed: list[Run], choices: list[Choice]) -> int:
    print(
        f"{folder.name}: {len(runs)} runs, {len(runs) - len(failed)} finished, "
        f"{len(failed)} failed. Table: {folder / 'runs.csv'}"
    )
    for run in failed:
        print(f"failed: {run.path}: {metrics_of(run.path).get('run/reason')}")
    untuned = [choice for choice in choices if choice.chosen is None]
    for choice in untuned:
        where = [point.labels | point.varying for point in choice.points]
        print(f"not run: every candidate failed in the pilot runs of {where}")
    if failed:
        print("--retry-failed tries the failed runs again.")
    planned = {run.path.name for run in runs}
    others = [file.parent for file in folder.glob("*/config.yaml")]
    if others := [path for path in others if path.name not in planned]:
        print(f"{len(others)} other runs in {folder} are in the table, but not in the plan.")
    return 1 if failed or untuned else 0


def _tell_answer(folder: Path) -> None:
    """What was found, and what to do next; nothing where every pilot failed and no run began."""
    if not (folder / RUNS).exists():
        return
    from offsphere.analysis.answer import answer_lines
    from offsphere.analysis.digest import read_study

    for line in answer_lines(read_study(folder, published=False)):
        print(line)
    print(f"Next: {shlex.join(['offsphere', 'report', str(folder)])}")


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """The study's folder is this process's alone; the kernel lets it go if the process dies."""
    folder.mkdir(parents=True, exist_ok=True)
    in_use = "is in use by the study of process {pid}: wait for its end, end it, or choose another"
    lock = Lock(folder / ".study.lock", f"{folder} {in_use} --out.")
    try:
        yield
    finally:
        lock.release()
