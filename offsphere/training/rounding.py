"""What rounded matrix products do to the gradient of a loss, emulated where none are rounded.

tf32 gives a product's operands 10 bits after the point and adds in float32. bf16 gives operands and
results 7 bits: so torch's autocast makes the logits of a loss that does not step out of it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

OPERANDS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "addmm_": (1, 2), "baddbmm": (1, 2)}
"""The places of the two that an operation multiplies."""
MANTISSA = 23


def rounded(x: Tensor, bits: int) -> Tensor:
    """Float32 to the nearest number with so many bits after the point, ties to the even one."""
    dropped = MANTISSA - bits
    whole = x.contiguous().view(torch.int32)
    half = (1 << (dropped - 1)) - 1 + ((whole >> dropped) & 1)
    return ((whole + half) & -(1 << dropped)).view(torch.float32)


class Rounded(TorchDispatchMode):
    """Matrix products with operands, and with `results` those too, of so many bits."""

    def __init__(self, bits: int, *, results: bool = False) -> None:
        super().__init__()
        self.bits, self.results = bits, results

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        places = OPERANDS.get(func.overloadpacket.__name__, ())
        args = [rounded(x, self.bits) if k in places else x for k, x in enumerate(args)]
        out = func(*args, **(kwargs or {}))
        # In place, because an operation may have been told where to write.
        return out.copy_(rounded(out, self.bits)) if places and self.results else out
