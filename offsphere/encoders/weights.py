"""Files of weights that somebody else made: read without running anything, or refused in a line."""

from __future__ import annotations

import hashlib
import json
import pickle
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


def read_tensors(path: Path) -> Any:
    """What a .safetensors file holds, or torch's own file with nothing but tensors."""
    from safetensors.torch import load_file

    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with warnings.catch_warnings():
            ignore_pickle_warnings()
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # on a file that holds no weights, unpickling raises anything at all
        raise ValueError(f"Cannot read weights from {path}: {why(error)}.") from None


def fingerprint(model: nn.Module, facts: Any) -> str:
    """A hash of a model's weights and of what else decides its outputs."""
    digest = hashlib.blake2b(json.dumps(facts, default=str).encode(), digest_size=16)
    for key, tensor in sorted(model.state_dict().items()):
        digest.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor_bytes(tensor))
    return digest.hexdigest()


def tensor_bytes(x: Tensor) -> memoryview:
    """The bytes of a tensor's numbers, for a hash."""
    return x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def package_folder(name: str) -> Path | None:
    """Where an installed package lies, found without importing it."""
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def ignore_pickle_warnings() -> None:
    """Silence torch's warning of a pickle, which it then refuses with an error."""
    warnings.filterwarnings("ignore", message="Detected pickle protocol")


def why(error: Exception) -> str:
    """Why weights could not be loaded, as a sentence's end.

    torch's own words for what `weights_only` refuses are a page long and end in the advice to load
    the file without it, which would run whatever code the file holds.
    """
    cause: BaseException | None = error
    for _ in range(9):
        if isinstance(cause, pickle.UnpicklingError) or "weights_only" in str(cause):
            return "it is damaged, or holds other things than tensors, which could run code"
        cause = cause and (cause.__cause__ or cause.__context__)
    line = next(iter(str(error).strip().splitlines()), "").partition(". ")[0].rstrip(".:")
    if line and isinstance(error, OSError | RuntimeError | ValueError):
        return line
    said = f"{type(error).__name__}: {line}" if line else type(error).__name__
    return f"it is cut, damaged or no file of weights ({said})"
