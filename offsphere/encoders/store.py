"""Features that are computed once and kept in the user's cache."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from offsphere.run.files import cache_file, write_whole

Tensors = dict[str, Tensor]


def cache_folder() -> Path | None:
    """Where features are kept, or None when there is no home directory."""
    return cache_file("features")


class Store:
    """Tensors by key: of this process in memory, of earlier ones in files below a folder."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.kept: dict[str, Tensors] = {}

    def get(self, facts: Sequence[Any], make: Callable[[], Tensors]) -> Tensors:
        """The tensors that belong to these facts: the kept ones, or else made now and kept.

        If a fact is None, something cannot be told by its content: then they are made each time.
        """
        if None in facts:
            return make()
        key = _key(facts)
        if key not in self.kept:
            file = self._file(key)
            stored = None if file is None else _read(file, key)
            self.kept[key] = make() if stored is None else stored
            if stored is None:
                self._write(key)
        return self.kept[key]

    def drop(self, facts: Sequence[Any]) -> None:
        """Forget what belongs to these facts, in memory and in the file."""
        key = _key(facts)
        self.kept.pop(key, None)
        if (file := self._file(key)) is not None:
            file.unlink(missing_ok=True)

    def _file(self, key: str) -> Path | None:
        return None if self.folder is None else self.folder / f"{key}.safetensors"

    def _write(self, key: str) -> None:
        """Keep the tensors in one step; a cache that cannot be written is done without."""
        if (file := self._file(key)) is None:
            return
        tensors = {name: tensor.contiguous() for name, tensor in self.kept[key].items()}
        content = save(tensors, {"key": key, "digest": _digest(tensors)})
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, content)
        except OSError as error:
            print(f"The features are not cached: {error}", file=sys.stderr)
            self.folder = None


def _key(facts: Sequence[Any]) -> str:
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()


def _read(file: Path, key: str) -> Tensors | None:
    """The tensors of a file, or None if it is not there or damaged."""
    try:
        with safe_open(file, "pt") as stored:
            names, about = stored.keys(), stored.metadata() or {}
            tensors = {name: stored.get_tensor(name) for name in names}
    except (OSError, SafetensorError):
        return None
    whole = about.get("key") == key and about.get("digest") == _digest(tensors)
    return tensors if whole else None


def _digest(tensors: Tensors) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, x in sorted(tensors.items()):
        digest.update(f"{name} {x.dtype} {tuple(x.shape)}".encode())
        digest.update(x.contiguous().numpy().data)
    return digest.hexdigest()
