"""What is computed once and kept in the user's cache. Imports no torch.

A cache is never needed: an entry that is not there, damaged or cannot be written is done without.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from offsphere.run.files import atomic_write, cache_directory

if TYPE_CHECKING:
    import numpy as np


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
    import numpy as np

    keep(file, lambda out: np.savez(out, **arrays))  # pyright: ignore[reportArgumentType]


def kept_arrays(file: Path | None) -> dict[str, np.ndarray]:
    """Arrays that were kept, or none; damage is found by the CRC of the zip file."""
    import numpy as np  # here, because every script's --help reads this module

    if file is not None:
        try:
            with file.open("rb") as opened, np.load(opened, allow_pickle=False) as stored:
                return dict(stored)
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            pass
    return {}
