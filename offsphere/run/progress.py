"""What a command is doing while it does it: facts as lines, work as a bar or a line now and then.

A script switches it on (`speaking`). A study's runs, tests and whoever calls `run(config)` are left
in peace. Imports no torch.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from offsphere.run.command import is_first_process

T = TypeVar("T")

REDRAW_SECONDS = 0.1
LOG_SECONDS = (5.0, 30.0)
"""In a log: until the first line about some work, and between the later ones."""
BAR_WIDTH = 24
_facts, _work = False, False
_bars: list[Work] = []
"""Those on the terminal's line, each inside the one before: the last is drawn."""


@contextmanager
def speaking(*, work: bool = True) -> Iterator[None]:
    """Facts are printed inside, and unless `work` is false how far it has come."""
    global _facts, _work
    before = _facts, _work
    _facts = is_first_process()
    _work = work and _facts
    try:
        yield
    finally:
        _facts, _work = before


def say(line: str) -> None:
    """One fact, at once, also into a file or a pipe."""
    if _facts:
        _clear()
        print(line, flush=True)


class Work:
    """So many pieces to do: `done(k)` shows how far it is, how fast and how long it still takes.

    On a terminal that is a bar, which is gone when the work has ended (`close`); in a log it is a
    line now and then, and one at the end of work that had a line before. Work inside other work
    shows how far that is, too.
    """

    def __init__(
        self, what: str, total: int, *, unit: str, start: int = 0, per_piece: int | None = None
    ) -> None:
        self.what, self.total, self.unit, self.per_piece = what, total, unit, per_piece
        self.start = self.count = start
        self.begun = self.drawn = self.logged = time.monotonic()
        self.patience, self.later = LOG_SECONDS
        self.note, self.last = "", -1
        self.bar = _work and sys.stderr is not None and sys.stderr.isatty()
        self.log = _work and sys.stdout is not None and not sys.stdout.isatty()
        if self.bar:
            _bars.append(self)
            self._draw()

    def done(self, count: int, note: str = "") -> None:
        """`count` pieces are done; a note replaces the one before."""
        self.count, self.note = count, note or self.note
        if not (self.bar or self.log):
            return
        now = time.monotonic()
        if self.bar and now - self.drawn >= REDRAW_SECONDS:
            self.drawn = now
            self._draw()
        if self.log and now - self.logged >= self.patience:
            self.logged, self.patience = now, self.later
            self._log()

    def close(self) -> None:
        """The work has ended, or is broken off."""
        if self.bar:
            _bars.remove(self)
            _clear()
            if _bars:
                _bars[-1]._draw()
        if self.log and self.patience == self.later and self.last != self.count:
            self._log()
        self.bar = self.log = False

    def pace(self) -> list[str]:
        """How fast, how long still, and the note; of these what is known."""
        seconds, pieces = time.monotonic() - self.begun, self.count - self.start
        words = []
        if pieces and seconds > 0 and self.per_piece:
            words.append(f"{pieces * self.per_piece / seconds:,.0f} samples/s")
        if pieces and self.count < self.total:
            words.append(f"{clock(seconds / pieces * (self.total - self.count))} left")
        return [*words, self.note] if self.note else words

    def _draw(self) -> None:
        full = BAR_WIDTH * self.count // max(self.total, 1)
        bar = "━" * full + "╌" * (BAR_WIDTH - full)
        around = [f"{x.what} {x.count:,}/{x.total:,}" for x in _bars[: _bars.index(self)][-1:]]
        words = [*around, f"{self.what} {bar} {self.count:,}/{self.total:,}", *self.pace()]
        line = "  ".join(words)[: shutil.get_terminal_size().columns - 1]
        print(f"\r\x1b[2K{line}", end="", file=sys.stderr, flush=True)

    def _log(self) -> None:
        self.last = self.count
        words = [f"{self.count:,} of {self.total:,} {self.unit}", *self.pace()]
        print(f"{self.what}: {', '.join(words)}", flush=True)


def track(items: Iterable[T], total: int, what: str, unit: str = "batches") -> Iterator[T]:
    """The items, with a bar for how many of them are done."""
    work = Work(what, total, unit=unit)
    try:
        for count, item in enumerate(items, 1):
            yield item
            work.done(count)
    finally:
        work.close()


def clock(seconds: float) -> str:
    """Minutes and seconds, or hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _clear() -> None:
    if _work and sys.stderr is not None and sys.stderr.isatty():
        print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
