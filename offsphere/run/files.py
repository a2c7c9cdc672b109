"""Files: read as UTF-8, written whole or not at all, locked; the user's cache. Imports no torch.

A cache is never needed: an entry that is not there, damaged or cannot be written is done without.
"""

from __future__ import annotations

import os
import shutil
import weakref
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    import numpy as np

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


def write_whole(path: str | Path, content: bytes | memoryview | str) -> None:
    """Replace a file's content, a string as UTF-8, whole or not at all."""
    content = content.encode() if isinstance(content, str) else content
    atomic_write(path, lambda file: file.write(content))


def check_folder(out: str) -> None:
    """Refuse an --out that is empty, or in which a file is in a new folder's way."""
    if not out:
        raise ValueError("--out is empty: expected a folder's name.")
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


def cache_file(*parts: str) -> Path | None:
    """A file of the user's cache, or None when there is no home directory."""
    folder = cache_directory()
    return None if folder is None else folder.joinpath(*parts)


def keep(file: Path | None, write: Callable[[BinaryIO], object]) -> None:
    """Write an entry whole or not at all."""
    if file is not None:
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(file, write)


def kept_string(file: Path | None) -> str:
    """A string that was kept, or an empty one."""
    if file is not None:
        with suppress(OSError, ValueError):
            return file.read_text(encoding="utf-8")
    return ""


def keep_arrays(file: Path | None, **arrays: np.ndarray) -> None:
    """Write arrays whole or not at all."""
    import numpy as np  # here, because every script's --help reads this module

    keep(file, lambda out: np.savez(out, **arrays))  # pyright: ignore[reportArgumentType]


def kept_arrays(file: Path | None) -> dict[str, np.ndarray]:
    """Arrays that were kept, or none; damage is found by the CRC of the zip file."""
    import numpy as np

    if file is not None:
        try:
            with file.open("rb") as opened, np.load(opened, allow_pickle=False) as stored:
                return dict(stored)
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            pass
    return {}


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
