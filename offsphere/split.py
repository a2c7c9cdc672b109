"""A loss shared by the ranks of a process group: who computes what, and what is exchanged.

Every rank holds the rows of all (they are gathered), computes its share of the scores, and gets
the whole value. Gradients are parts: **their mean over the ranks is the gradient of the whole
loss**, as for anything else that DDP averages. So a term that every rank computes whole needs no
thought, and a share's gradient is `count` times what it adds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float


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

    Asked on CPUs only: on an accelerator the answer would have to be waited for.
    """
    if x.device.type != "cpu":
        return
    rows = [torch.zeros(1, dtype=torch.long) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, torch.tensor([len(x)]))
    if len({int(n) for n in rows}) > 1:
        raise ValueError(
            f"Expected as many rows on every rank, got {', '.join(str(int(n)) for n in rows)}. Use "
            "drop_last=True in the loader."
        )


def process_count() -> int:
    """As lightly counts: one process where no group is initialised."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
