"""The runs of a study through an engine: retried once, then recorded as failed."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from offsphere.run.command import Stopped
from offsphere.run.record import RunFolder, open_run
from offsphere.study.plan import Run

ATTEMPTS = 2
OUTPUT = "output.txt"
# A study that was killed takes its workers along, but not in the same instant.
SECONDS_FOR_A_LOCK = 30.0


class Ended(NamedTuple):
    run: Run
    reason: str | None
    """Why it did not finish; None if it did."""


class Engine(Protocol):
    """What runs a study's runs: at most `slots` at a time."""

    slots: int

    def start(self, run: Run) -> None:
        """Begin a run."""
        ...

    def wait(self, seconds: float) -> list[Ended]:
        """The runs that have ended, after at most so many seconds."""
        ...

    def stop(self) -> None:
        """Ask the runs to write their checkpoints and end; asked again, to end at once."""
        ...

    def close(self) -> None:
        """End the workers."""
        ...


class Event(NamedTuple):
    """Something that happened to a run, and why."""

    what: Literal["started", "finished", "retried", "failed", "cut"]
    run: Run
    reason: str = ""


def execute(runs: Sequence[Run], engine: Engine, stops_asked: Callable[[], int]) -> Iterator[Event]:
    """Run them all; after a stop is asked for no run starts, and those at work are cut."""
    waiting, attempts, busy, told = deque(runs), Counter[Path](), 0, 0
    while busy or (waiting and not stops_asked()):
        while waiting and busy < engine.slots and not stops_asked():
            run = waiting.popleft()
            attempts[run.path] += 1
            engine.start(run)
            busy += 1
            yield Event("started", run)
        while told < stops_asked():
            engine.stop()
            told += 1
        for run, reason in engine.wait(0.2):
            busy -= 1
            if reason is None or RunFolder(run.path).state == "finished":
                yield Event("finished", run)
            elif stops_asked():
                yield Event("cut", run, reason)
            elif attempts[run.path] < ATTEMPTS:
                waiting.appendleft(run)
                yield Event("retried", run, reason)
            else:
                yield Event("failed", run, record_failure(run, reason))


def record_failure(run: Run, reason: str) -> str:
    """Give a run its failed row, unless it wrote that itself; the reason, as it may be shown."""
    own = run.settings
    try:
        with open_run(own, script=run.name, out=own.out, study=own.study) as folder:
            if folder.metrics().get("run/reason") != reason:
                folder.fail(reason)
    except (ValueError, OSError) as error:
        return f"{reason} (which could not be recorded: {error})"
    return reason


def perform(run: Run) -> str | None:
    """Do a run in this process; why it did not finish, or None. What it prints is kept."""
    run.path.mkdir(parents=True, exist_ok=True)
    _wait_until_free(run.path)
    with _output_to(run.path / OUTPUT):
        try:
            run.script.run(run.settings)
        except (Stopped, ValueError, OSError) as error:
            traceback.print_exc()
            return str(error)
        except KeyboardInterrupt:
            return "interrupted"
        except BaseException as error:
            traceback.print_exc()
            return f"{type(error).__name__}: {error}"
    if RunFolder(run.path).state != "finished":
        return f"{run.name} returned, but {run.path} has no recorded end"
    return None


def _wait_until_free(path: Path) -> None:
    """Wait for a process of a killed study to let its run go; what still holds it is an error."""
    end = time.monotonic() + SECONDS_FOR_A_LOCK
    while time.monotonic() < end:
        with contextlib.suppress(ValueError), RunFolder(path, lock=True):
            return
        time.sleep(0.1)


@contextlib.contextmanager
def _output_to(file: Path) -> Iterator[None]:
    """What this process and its libraries print goes to the end of a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    before = {number: os.dup(number) for number in (1, 2)}
    output = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        for number in before:
            os.dup2(output, number)
        faulthandler.enable(2)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, old in before.items():
            os.dup2(old, number)
            os.close(old)
        os.close(output)
