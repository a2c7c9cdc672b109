"""Files: read as UTF-8, written whole or not at all, locked; the user's cache. Imports no torch."""

from __future__ import annotations

import os
import shutil
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

try:
    import fcntl
except ImportError:  # the first thing that a script or `offsphere` imports and Windows lacks
    raise SystemExit(
        "offsphere: error: Windows is not supported (run folders are locked as on Linux and "
        "macOS). Use it inside WSL 2."
    ) from None

_locks: set[int] = set()


def read_utf8(file: Path) -> str:
    """What somebody's file says, its line ends as they are; another encoding is named."""
    try:
        return file.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise OSError(f"{file} cannot be read ({error.strerror}).") from None
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file} is not UTF-8 (byte {error.start:,} is {error.object[error.start]:#x}): "
            "convert it, for instance with iconv -t UTF-8."
        ) from None


def atomic_write(path: str | Path, write: Callable[[BinaryIO], object]) -> None:
    """Replace a file whole or not at all: on any error the old one is intact, no rest is left."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        reason = f"{error.strerror or error}; it could not be written, what was there is intact"
        raise OSError(error.errno, reason, str(path)) from error
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def check_folder(out: str) -> None:
    """Refuse an --out in which no folder can be made because a file is in its way."""
    path = Path(out)
    if (file := next((x for x in (path, *path.parents) if x.is_file()), None)) is not None:
        raise ValueError(f"--out={out}: {file} is a file, expected a folder.")


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """A folder to fill, which takes its place at `out` when all went well; else nothing is left.

    `out` must not be there yet, or be empty.
    """
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise FileExistsError(f"{out} is not empty: choose another --out.")
    out.parent.mkdir(parents=True, exist_ok=True)
    made = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    made.mkdir()
    try:
        yield made
        made.replace(out)  # an empty folder is replaced too
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise


def cache_directory() -> Path | None:
    """The user's cache directory for offsphere, or None when there is no home directory."""
    configured = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(configured or Path.home() / ".cache") / "offsphere"
    except RuntimeError:
        return None


class Lock:
    """A file that is this process's until `release`; the kernel lets it go if the process dies.

    `in_use` is what to say if another process has it, with {pid} for that process.
    """

    def __init__(self, file: Path, in_use: str) -> None:
        lock = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise ValueError(in_use.replace("{pid}", file.read_text())) from None
        os.truncate(lock, 0)
        os.write(lock, str(os.getpid()).encode())
        _locks.add(lock)
        self.release = weakref.finalize(self, _unlock, lock)


def _unlock(lock: int) -> None:
    if lock in _locks:
        _locks.remove(lock)
        os.close(lock)


def _unlock_in_child() -> None:
    """A forked data worker that outlives a killed trainer must not keep the trainer's lock."""
    for lock in tuple(_locks):
        _unlock(lock)


os.register_at_fork(after_in_child=_unlock_in_child)
