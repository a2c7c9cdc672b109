"""Float32 whatever the trainer's precision is, and whether torch transforms the computation.

Only the matrix products of a loss are rounded to tf32, on CUDA devices and if `loss_precision` says
so: their operands then have 10 bits after the point, and sums stay float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

TF32_DEVICES = ("cuda",)
"""Devices that multiply in tf32; others have no such setting."""


def at_least_float32(x: Tensor) -> Tensor:
    """Half precision becomes float32; everything else stays what it is."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def autocasts(x: Tensor) -> bool:
    """Whether autocast would now round what is computed on x's device."""
    device = x.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def outside_autocast(x: Tensor, products: str | None = None) -> AbstractContextManager[object]:
    """A context in which x's device computes in the precision of its tensors.

    `products` (see `names.LOSS_PRECISIONS`) is that of its float32 matrix products; without it they
    are as torch is set.
    """
    plain = torch.autocast(x.device.type, enabled=False) if autocasts(x) else nullcontext()
    if products is None or x.device.type not in TF32_DEVICES:
        return plain
    return _multiplying(products, plain)


@contextmanager
def _multiplying(products: str, around: AbstractContextManager[object]) -> Iterator[None]:
    """torch has one such setting for all its threads: it is put back, whatever happens."""
    setting = torch.backends.cuda.matmul
    before = setting.fp32_precision
    setting.fp32_precision = "tf32" if products == "tf32" else "ieee"
    try:
        with around:
            yield
    finally:
        setting.fp32_precision = before


def row_products(a: Tensor, b: Tensor) -> Tensor:
    """a_i . b_i. To autocast vecdot is a matrix product, whose value and gradient it rounds."""
    return (a * b).sum(-1) if autocasts(a) else torch.linalg.vecdot(a, b)


def compiling() -> bool:
    """Whether torch.compile is tracing: there are no values to look at."""
    return torch.compiler.is_compiling()


def eagerly(function: Callable[..., Tensor], *inputs: object) -> Tensor:
    """What the function gives; torch.compile leaves it alone and compiles what surrounds it."""
    if compiling():
        # Not as a decorator, which would load the compiler with the library.
        return torch.compiler.disable(function)(*inputs)  # pyright: ignore
    return function(*inputs)


def transformed() -> bool:
    """Whether torch.func or forward-mode differentiation is at work.

    They follow torch's own operations only, and their tensors may have no values to look at.
    """
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
