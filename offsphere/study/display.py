"""What a study shows while it runs: a bar on a terminal, else one line per run."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from offsphere.run.catalog import named
from offsphere.run.config import identity_settings
from offsphere.run.record import RunFolder
from offsphere.study.execution import Event
from offsphere.study.plan import Run


class Display(AbstractContextManager):
    """The progress of one stage of a study."""

    def __init__(
        self, title: str, runs: Sequence[Run], finished: int, failed: int, metric: str | None
    ) -> None:
        self.title, self.total, self.metric = title, len(runs), metric
        self.which = which_run(runs)
        self.finished, self.failed, self.begin = finished, failed, time.monotonic()
        self.done_before, self.at_work = finished + failed, 0
        self.bar: Any = None

    def __enter__(self) -> Display:
        print(f"{self.title}: {self.total} runs, {self.finished} finished, {self.failed} failed.")
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
            self.bar = Progress(*columns, console=Console(stderr=True))
            self.bar.start()
            self.task = self.bar.add_task(self.title, total=self.total, completed=self.done_before)
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def show(self, event: Event) -> None:
        """Tell what happened to a run."""
        self.at_work += 1 if event.what == "started" else -1
        self.finished += event.what == "finished"
        self.failed += event.what == "failed"
        done = self.finished + self.failed
        if event.what != "started":
            self._say(f"[{done}/{self.total}] {self._line(event)}")
        if self.bar is not None:
            now, elapsed = done - self.done_before, time.monotonic() - self.begin
            left = elapsed / now * (self.total - done) if now else 0.0
            rest = f", about {duration(left)} left" if now else ""
            state = f"{self.title}: {self.at_work} at work, {self.failed} failed{rest}"
            self.bar.update(self.task, completed=done, description=state)

    def _line(self, event: Event) -> str:
        which = self.which.get(event.run.path)
        name = event.run.path.name + (f" ({which})" if which else "")
        if event.what != "finished":
            what = "tried again" if event.what == "retried" else event.what
            return f"{name} {what}: {event.reason}"
        metrics = RunFolder(event.run.path).metrics()
        value = metrics.get(self.metric or "")
        number = f", {self.metric} {value:.4g}" if isinstance(value, int | float) else ""
        return f"{name} finished in {duration(metrics.get('run/seconds', 0.0))}{number}"

    def _say(self, line: str) -> None:
        if self.bar is None:
            print(line, flush=True)
        else:
            self.bar.console.print(line, markup=False, highlight=False, soft_wrap=True)


def which_run(runs: Sequence[Run]) -> dict[Path, str]:
    """What tells each run from the others: the settings that vary, but for those of its name."""
    every = {run.path: identity_settings(run.settings) for run in runs}
    first = next(iter(every.values()), {})
    names = dict.fromkeys(name for one in every.values() for name in one)
    vary = [
        name
        for name in names
        if name not in ("cell", "seed")
        and any(repr(one.get(name)) != repr(first.get(name)) for one in every.values())
    ]
    return {
        path: ", ".join(f"{name} {_spelt(one[name])}" for name in vary if one.get(name) is not None)
        for path, one in every.items()
    }


def _spelt(value: Any) -> Any:
    """A value as its user writes it: data by their name, of a list the first and the number."""
    if isinstance(value, list | tuple):
        first = " ".join(str(_spelt(each)) for each in value[:1])
        return f"{first} and {len(value) - 1} more" if len(value) > 1 else first or "none"
    return named(value) if isinstance(value, str) else value


def duration(seconds: float) -> str:
    """A time for people: 45 s, 12 min, 3 h 5 min."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"
