"""A loss shared by the ranks of a process group: who computes what, and what is exchanged.

Every rank holds the rows of all (they are gathered), computes its share of the scores, and gets
the whole value. Gradients are parts: **their mean over the ranks is the gradient of the whole
loss**, as for anything else that DDP averages. So a term that every rank computes whole needs no
thought, and a share's gradient is `count` times what it adds.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float

ASKED_DEVICES = ("cpu",)
"""Devices whose ranks can ask each other at every step: the host need not wait for the device."""
PATIENCE = timedelta(minutes=2)
"""How long a rank waits for the others to tell that they too have another number of rows."""
_agreed = {"rows": -1, "times": 0}
"""How many rows each rank had when they were last gathered, and how often that has changed."""


class Split:
    """This process among `count` that share a loss; alone, it exchanges nothing."""

    def __init__(
        self, rank: int = 0, count: int = 1, *, local: bool = False, precision: str = "tf32"
    ) -> None:
        self.rank, self.count = rank, count
        self.precision = precision
        """Of the loss's matrix products on an accelerator: see `precision.outside_autocast`."""
        self.local = local
        """Whether the value of a loss of pairs is that of this rank's rows; the mean over the ranks
        is then the whole, and the gradients are the same."""
        self.payload = 0
        """Bytes that this rank has handed to exchanges so far."""

    def mine(self, total: int) -> slice:
        """This rank's rows of so many: contiguous, in rank order, as equal as they can be."""
        return slice(total * self.rank // self.count, total * (self.rank + 1) // self.count)

    def share_of(self, x: Tensor) -> Tensor:
        """This rank's rows of x: alone x itself, as small batches feel the cost of a view."""
        return x if self.count == 1 else x[self.mine(len(x))]

    def sum_(self, x: Tensor) -> Tensor:
        """The sum over the ranks, in place and without a gradient."""
        if self.count > 1:
            self.exchange(dist.all_reduce, x, payload=x)
        return x

    def log_sum_exp_(self, x: Tensor) -> Tensor:
        """The log-sum-exp over the ranks, in place and without a gradient: a maximum and a sum."""
        if self.count > 1:
            largest = x.clone()
            self.exchange(dist.all_reduce, largest, dist.ReduceOp.MAX, payload=largest)
            self.sum_(x.sub_(largest).exp_()).log_().add_(largest)
        return x

    def summed(self, part: Tensor) -> Tensor:
        """The sum over the ranks; its gradient is this rank's part (see above)."""
        return part if self.count == 1 else _Summed.apply(part, self)  # pyright: ignore

    def exchange(
        self,
        collective: Callable[..., object],
        *inputs: Any,
        payload: Tensor | None = None,
        src: int | None = None,
    ) -> None:
        """One collective of the default process group, its bytes counted."""
        self.payload += 0 if payload is None else payload.numel() * payload.element_size()
        collective(*inputs) if src is None else collective(*inputs, src=src)


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part, split):
        ctx.count = split.count
        return split.sum_(part.clone())

    @staticmethod
    def backward(ctx, *grad_outputs):
        return grad_outputs[0] * ctx.count, None


ALONE = Split()
"""One process that computes everything."""


def gather_with_gradient(x: Float[Tensor, "n d"]) -> Float[Tensor, "rows d"]:
    """The rows of all ranks, in rank order; each rank's gradient flows back to where it belongs."""
    if not dist.is_initialized():
        raise ValueError(
            "Expected an initialised process group, because gathering was asked for. Call "
            "torch.distributed.init_process_group first, or use one process."
        )
    from torch.distributed.nn.functional import all_gather

    _check_equal_rows(x)
    return torch.cat(list(all_gather(x)))


def _check_equal_rows(x: Tensor) -> None:
    """Refuse shares of unequal length, which torch would gather wrongly or not at all.

    On an accelerator the answer of the others would have to be waited for, so there the ranks speak
    through the store by which they met, and only when a rank's number of rows is not the last one.
    """
    rows = [len(x)]
    if x.device.type in ASKED_DEVICES:
        found = [torch.zeros(1, dtype=torch.long) for _ in range(dist.get_world_size())]
        dist.all_gather(found, torch.tensor(rows))
        rows = [int(n) for n in found]
    elif len(x) != _agreed["rows"]:
        rows = _told_by_all(len(x))
    if len(set(rows)) > 1:
        raise ValueError(
            f"Expected as many rows on every rank, got {', '.join(map(str, rows))}. Use "
            "drop_last=True in the loader."
        )
    _agreed["rows"] = len(x)


def _told_by_all(rows: int) -> list[int]:
    """How many rows each rank has, if all of them have now another number than before."""
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    _agreed["times"] += 1
    keys = [f"offsphere/rows/{_agreed['times']}/{k}" for k in range(dist.get_world_size())]
    store.set(keys[rank], str(rows))
    try:
        store.wait(keys, PATIENCE)
    except RuntimeError as error:
        raise ValueError(
            f"Expected as many rows on every rank, got {rows} on rank {rank}, "
            f"{_agreed['rows']} before, and another rank still has as many as before. Use "
            "drop_last=True in the loader."
        ) from error
    return [int(store.get(key)) for key in keys]


def process_count() -> int:
    """As lightly counts: one process where no group is initialised."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
