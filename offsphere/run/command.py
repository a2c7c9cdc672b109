"""How every command speaks and ends: at once, in one line, and quietly where nobody listens.

`offsphere` and all scripts share this. Imports no torch.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import NoReturn, TextIO

from offsphere.run.addresses import public

NOBODY_LISTENS = 141
"""The exit code of a command whose reader has gone: 128 + SIGPIPE, as a shell reports it."""
MEMORY_HINT = (
    "Lower --batch-size or --image-size, take a narrower or smaller model, or pass rows through it "
    "a few at a time (--microbatch)."
)


class Stopped(Exception):
    """A run ended early, for a reason its user should read; `code` is the exit code."""

    code = 1


@contextmanager
def one_line_errors(name: str, if_interrupted: str) -> Iterator[None]:
    """What goes wrong inside ends in one line and an exit code, without a traceback.

    That is a user's mistake, an early stop, too little memory, Ctrl-C, SIGTERM, and a reader of the
    output that has gone (`| head`), about whom nothing is said.
    """
    lost = None
    try:
        try:
            with _terminated_as_interrupted(), loss_in_words():
                yield
        finally:
            lost = _flush()  # a reader that has gone is met here, not at the interpreter's end
    except Stopped as stop:
        _end(f"{name}: {stop}", stop.code)
    except (MemoryError, RuntimeError) as error:
        if (need := memory_need(error)) is None:
            raise
        _end(f"{name}: error: not enough memory: {need}. {MEMORY_HINT}", 1)
    except (ValueError, OSError) as error:
        if not (isinstance(error, BrokenPipeError) and (lost or _reader_has_gone())):
            _end(f"{name}: error: {error}", 1)
        lost = error
    except KeyboardInterrupt:
        if is_first_process():  # a launcher ends the other ranks, which have nothing to add
            _end(f"{name}: interrupted. {if_interrupted}", 130)
        raise SystemExit(130) from None
    except SystemExit:
        if not lost:
            raise
    if isinstance(lost, BrokenPipeError):
        raise SystemExit(NOBODY_LISTENS)
    if lost:
        _end(f"{name}: error: what was printed could not be written: {lost}", 1)


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM, which would end the process on the spot, is Ctrl-C inside: nothing half-written is
    left, and a line is said. A process forked meanwhile still ends on the spot.
    """
    own = os.getpid()

    def interrupt(number: int, _frame: object) -> None:
        if os.getpid() != own:
            os._exit(128 + number)
        raise KeyboardInterrupt

    taken = False
    with suppress(ValueError):  # not the main thread: signals belong to somebody else
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, interrupt)
            taken = True
    try:
        yield
    finally:
        if taken:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


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


@contextmanager
def stop_signals(*, patient: bool = False) -> Iterator[list[str]]:
    """The SIGTERM and Ctrl-C that have come, by name; the work inside ends when it is ready.

    A second one is obeyed at once, unless `patient`: then whoever counts them decides.
    """
    received: list[str] = []

    def remember(number: int, _frame: object) -> None:
        if received and not patient:
            raise KeyboardInterrupt
        received.append(signal.Signals(number).name)

    before = {}
    with suppress(ValueError):  # not the main thread: signals belong to somebody else
        for number in (signal.SIGTERM, signal.SIGINT):
            before[number] = signal.signal(number, remember)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def memory_need(error: BaseException) -> str | None:
    """What could not be had, if the error is about memory (numpy's, or torch's on any device)."""
    lines = str(error).strip().splitlines() or ["an allocation failed"]
    said = lines[0].rpartition("DefaultCPUAllocator: ")[2].rstrip(".")
    about_memory = isinstance(error, MemoryError) or any(
        words in lines[0] for words in ("can't allocate memory", "out of memory")
    )
    return said if about_memory else None


def typed() -> str:
    """The command as it was typed, without its flags."""
    program = Path(sys.argv[0])
    if program.suffix != ".py":
        return " ".join(
            [program.name, *takewhile(lambda word: not word.startswith("-"), sys.argv[1:])]
        )
    words = sys.orig_argv
    module = words[words.index("-m") + 1] if "-m" in words[:-1] else ""
    by_module = module and program.with_suffix("").parts[-len(module.split(".")) :] == tuple(
        module.split(".")
    )
    return f"python -m {module}" if by_module else f"python {program}"


def is_first_process() -> bool:
    """Whether this is rank 0 of a launcher's processes (torchrun, SLURM, Fabric), or alone."""
    numbers = ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID")
    return all(os.environ.get(name, "0") == "0" for name in numbers)


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _end(message: str, code: int) -> NoReturn:
    with suppress(OSError):  # met again by the flush
        print(public(message), file=sys.stderr)
    _flush()
    raise SystemExit(code)


def _flush() -> OSError | None:
    """Write what is left to write; why it could not be, after which nothing is tried any more."""
    lost = None
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None: closed from the start (`>&-`)
        try:
            stream.flush()
        except OSError as error:
            lost = error
            _silence(stream)
    return lost


def _reader_has_gone() -> bool:
    """Whether stdout or stderr is a pipe that nobody reads any more."""
    poll = select.poll()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, AttributeError):  # no real file, or closed from the start
            poll.register(stream.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _silence(stream: TextIO) -> None:
    """Let the stream lead nowhere, so that the interpreter's own last flush cannot fail."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    with suppress(OSError):  # not a real file, as in a test
        os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


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
