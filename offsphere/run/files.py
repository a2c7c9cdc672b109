"""Files written whole or not at all, and where the user's cache is. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


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


def cache_directory() -> Path | None:
    """The user's cache directory for offsphere, or None when there is no home directory."""
    configured = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(configured or Path.home() / ".cache") / "offsphere"
    except RuntimeError:
        return None
