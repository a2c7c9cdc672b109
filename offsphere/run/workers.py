"""The worker processes that read data, and what is said when one of them is lost."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class LostWorker(OSError):
    """A worker process was ended from outside; the message says what to do."""


@contextmanager
def loss_in_words() -> Iterator[None]:
    """A worker that the system ended becomes one line that says what to do.

    torch raises in whatever the main process is doing when it hears of it, or the connection to the
    worker breaks first: so this belongs around the whole of the work, not around the loader alone.
    """
    try:
        yield
    except LostWorker:
        raise
    except Exception as error:
        lost = _lost_worker(error)
        if lost is None:
            raise
        raise LostWorker(
            f"A process that reads data was lost ({lost}). Mostly the memory, or the shared memory "
            "of a container, ran out: use fewer --workers (0 reads in the main process), a smaller "
            "--batch-size, or give the container more. The same command resumes from the last "
            "checkpoint."
        ) from error


def _lost_worker(error: Exception) -> str | None:
    """What torch says of the worker that was lost, if this error came of that.

    From then on torch hears no more of its workers: it would raise once more while we end.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL) if main else None
    if isinstance(error, EOFError | ConnectionError):
        time.sleep(0.2)  # a dying process closes its connections before it is dead
    try:
        torch._C._error_if_any_worker_fails()
    except RuntimeError as found:
        error = found
    said = str(error).strip().partition("\n")[0].partition(". ")[0].rstrip(". ")
    if "DataLoader worker (pid" in said:
        return said
    if main and before is not None:
        signal.signal(signal.SIGCHLD, before)
    return None
