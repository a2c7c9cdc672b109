"""Exact sums over a score matrix that is never kept: blocks, log-sum-exp, gradients in one go.

Every loss in `offsphere.losses` is one of two sums over the scores s_ij = left_i . right_j:

- `log_partitions`: the logs of the row (and column) sums of exp(s_ij), minus the positives;
- `softplus_sum`: the sum of log(1 + exp(s_ij + bias)), minus the positives.

A sum and its gradient need the same blocks, so the forward pass computes both and the backward
pass only scales: between the two, nothing but the sides and their gradients is kept. The blocks are
`offsphere.tiles` on CPUs and `offsphere.strips` on accelerators; `path` decides.

`_plain_*` are the same sums in torch's own operations on the whole score matrix, for what has to
keep it anyway: gradients that are differentiated again (create_graph), and torch.func.

`split` shares a sum among ranks, each of which has all rows: see `offsphere.split`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from offsphere import strips, tiles
from offsphere.precision import autocasts, compiling, eagerly, outside_autocast, transformed
from offsphere.split import ALONE, Split
from offsphere.strips import LOWEST

if TYPE_CHECKING:
    from jaxtyping import Float, Int

TILED_DEVICES = ("cpu",)
"""Devices whose scores come in tiles."""
DENSE_SCORES = 2**14
"""Up to this many scores (128 x 128) the dense definition is the faster path on a CPU."""
SLAB = 2**24
"""Scores that a definition computes at once, where only one slab of rows need be kept."""
NEAR_ZERO = 2.0**-9
"""A smaller sum, if it cannot be negative, is found by a slower way that keeps its digits."""
EXACT_SOFTPLUS = 40.0
"""From here on log(1 + exp(x)) is x in float64 too (torch's own limit, 20, is for float32)."""


def path(
    left: Tensor, right: Tensor, split: Split = ALONE
) -> Literal["definition", "dense", "tiles", "strips"]:
    """How the sums over these scores are computed.

    - definition: torch.func and forward mode follow torch's own operations only.
    - strips: on an accelerator, where few large kernels are fast. One strip is the dense loss.
    - dense: few scores on a CPU, where a plain matrix costs fewer operations than tiles. Not under
      autocast, which would round its products, nor for ranks, which share the rows.
    - tiles: everything else on a CPU: blocks that stay in its cache.

    Under torch.compile a sum is one operation, which decides when it runs; that of ranks, who
    exchange something in the middle of it, is not compiled.
    """
    if transformed():
        return "definition"
    if _in_strips(left):
        return "strips"
    return "dense" if dense(left, right.shape[0], split) else "tiles"


def dense(left: Tensor, columns: int, split: Split) -> bool:
    """Whether so many columns are few enough for the whole matrix: see `path`."""
    few = left.shape[0] * columns <= DENSE_SCORES
    return few and split.count == 1 and not compiling() and not autocasts(left)


def log_partitions(
    left: Float[Tensor, "n d"],
    right: Float[Tensor, "m d"] | None,
    temperature: float | Float[Tensor, ""],
    *,
    weight: float = 1.0,
    exclude: tuple[int, ...] = (),
    positive: tuple[int, ...] = (),
    own: Float[Tensor, " n"] | None = None,
    columns: int = 0,
    ids: Int[Tensor, " m"] | None = None,
    largest: float = math.inf,
    split: Split = ALONE,
    found: Float[Tensor, ""] | None = None,
) -> Float[Tensor, ""]:
    """weight * the sum over rows i, and over `columns` columns, of log-sum-exp minus positive.

    The diagonals j - i in `exclude` are left out of the log-sum-exp; those in `positive` hold the
    positives. `own` is one more score per row, its positive, that only this row sees. With `right`
    None both sides are `left`: half the tiles serve, because columns repeat the rows. `ids` name
    the columns, and rows by their place: scores of two equal ids, positives apart, are left out
    too. `largest` bounds the size of all scores, if it is known. `found` is the sum, with its
    gradient, if a dense definition has found it already.
    """
    inputs, how = (left, right, temperature, own), (weight, exclude, positive, columns, ids)
    if transformed():
        with outside_autocast(left):
            return _plain_log_partitions(*inputs, *how)
    if compiling() and split.count == 1:
        needs = [isinstance(x, Tensor) and x.requires_grad for x in inputs]
        t = torch.as_tensor(temperature, dtype=left.dtype, device=left.device)
        lists = (weight, list(exclude), list(positive), columns, ids)
        return _log_partitions_op(left, right, t, own, *lists, largest, split.precision, needs)[0]
    value = found
    if value is None:
        value = eagerly(_LogPartitions.apply, *inputs, *how, largest, split)
    # Strips hold a sum that cannot be negative at zero: to look at it would wait for the device.
    # The slower way finds the whole, which is not what a rank with a local value adds to the mean.
    looks = not (_in_strips(left) or split.local) and _seen(own, exclude, positive)
    return eagerly(_with_digits, value, inputs, how) if looks else value


def dense_pairs(
    left: Float[Tensor, "n d"],
    right: Float[Tensor, "m d"],
    temperature: float | Float[Tensor, ""],
    weight: float,
    columns: int,
) -> Float[Tensor, ""]:
    """`log_partitions` of few pairs (see `dense`), with as few operations as there can be."""
    inputs, how = (left, right, temperature, None), (weight, (), (0,), columns, None)
    value: Tensor = _DensePairs.apply(*inputs, *how, None, None)  # pyright: ignore
    return _with_digits(value, inputs, how)


def softplus_sum(
    left: Float[Tensor, "n d"],
    right: Float[Tensor, "m d"],
    temperature: float | Float[Tensor, ""],
    bias: Float[Tensor, ""],
    *,
    weight: float = 1.0,
    split: Split = ALONE,
) -> Float[Tensor, ""]:
    """weight * (the sum over i, j of softplus(s_ij + bias), minus the sum of s_ii + bias)."""
    inputs = (left, right, temperature, bias)
    if transformed():
        with outside_autocast(left):
            return _plain_softplus(*inputs, weight)
    if compiling() and split.count == 1:
        t = torch.as_tensor(temperature, dtype=left.dtype, device=left.device)
        return _softplus_op(left, right, t, bias, weight, split.precision)[0]
    return eagerly(_SoftplusSum.apply, *inputs, weight, split)


class _LogPartitions(torch.autograd.Function):
    @staticmethod
    def forward(ctx, left, right, temperature, own, *how):
        inputs = (left, right, temperature, own)
        sweep = strips.sweep_log_partitions if _in_strips(left) else tiles.sweep_log_partitions
        with outside_autocast(left, how[-1].precision):
            value, *grads = sweep(*inputs, *how, needs_grad=ctx.needs_input_grad[:4])
        _save(ctx, inputs, grads)
        ctx.how = how[:-2]
        return value

    @staticmethod
    def backward(ctx, *grad_outputs):
        return *_gradients(ctx, _plain_log_partitions, grad_outputs[0]), *[None] * 7


class _DensePairs(_LogPartitions):
    @staticmethod
    def forward(ctx, *inputs):
        left, right, temperature, _, weight, *_, columns = inputs[:8]
        needs = ctx.needs_input_grad
        value, *grads = tiles.dense_pairs(left, right, temperature, weight, columns, needs)
        ctx.temperature, ctx.how = None, inputs[4:9]
        ctx.save_for_backward(*inputs[:4], *grads)
        return value


class _SoftplusSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, left, right, temperature, bias, weight, split):
        inputs = (left, right, temperature, bias)
        sweep = strips.sweep_softplus if _in_strips(left) else tiles.sweep_softplus
        with outside_autocast(left, split.precision):
            value, *grads = sweep(*inputs, weight, split, any(ctx.needs_input_grad))
        _save(ctx, inputs, grads)
        ctx.how = (weight,)
        return value

    @staticmethod
    def backward(ctx, *grad_outputs):
        return *_gradients(ctx, _plain_softplus, grad_outputs[0]), None, None


def _save(ctx, inputs: tuple, grads: list[Tensor | None]) -> None:
    """For the backward pass; a temperature that is a number cannot be saved among tensors."""
    ctx.temperature = None if isinstance(inputs[2], Tensor) else inputs[2]
    tensors = (x if isinstance(x, Tensor) else None for x in inputs)
    ctx.save_for_backward(*tensors, *grads)


def _gradients(ctx, plain: Callable[..., Tensor], upstream: Tensor) -> list[Tensor | None]:
    """What the forward pass found, times the gradient from above.

    With create_graph the gradients are made anew as functions of the inputs, to be differentiated
    again.
    """
    saved, needed = ctx.saved_tensors, ctx.needs_input_grad[:4]
    inputs, grads = list(saved[:4]), saved[4:]
    inputs[2] = ctx.temperature if inputs[2] is None else inputs[2]
    if not torch.is_grad_enabled():
        wanted = [grad for grad, need in zip(grads, needed, strict=True) if need]
        scaled = iter(torch._foreach_mul(wanted, upstream))  # on an accelerator one kernel for all
        return [next(scaled) if need else None for need in needed]
    # Views, because one tensor may be both sides, and each wants its own part.
    inputs = [x.view_as(x) if isinstance(x, Tensor) else x for x in inputs]
    wanted = [x for x, need in zip(inputs, needed, strict=True) if need]
    with outside_autocast(upstream):
        value = plain(*inputs, *ctx.how)
        found = iter(torch.autograd.grad(value, wanted, upstream, create_graph=True))
    return [next(found) if need else None for need in needed]


# The same sums as single operations, so that a compiled training step has one node for a loss.


@torch.library.custom_op("offsphere::log_partitions", mutates_args=())
def _log_partitions_op(
    left: Tensor,
    right: Tensor | None,
    temperature: Tensor,
    own: Tensor | None,
    weight: float,
    exclude: list[int],
    positive: list[int],
    columns: int,
    ids: Tensor | None,
    largest: float,
    precision: str,
    needs_grad: list[bool],
) -> list[Tensor]:
    """The value and four gradients; one that is not needed is empty."""
    how = (weight, tuple(exclude), tuple(positive), columns, ids)
    inputs = (left, right, temperature, own)
    sweep = strips.sweep_log_partitions
    if not _in_strips(left):
        sweep = tiles.sweep_log_partitions
        largest = scores_bound(temperature, *(x for x in (left, right) if x is not None))
    # Few rows as uncompiled, to the bit.
    few = ids is None and path(left, left if right is None else right) == "dense"
    with outside_autocast(left, precision):
        if few and how[1:3] == ((), (0,)) and right is not None:
            value, *grads = tiles.dense_pairs(left, right, temperature, weight, columns, needs_grad)
        elif few and (positive or own is not None):
            value, *grads = tiles.dense_rows(*inputs, *how[:3], needs_grad)
        else:
            value, *grads = sweep(*inputs, *how, largest, ALONE, needs_grad=needs_grad)
    if not _in_strips(left) and _seen(own, how[1], how[2]):
        value = _with_digits(value, inputs, how)
    return _whole(value, grads)


@_log_partitions_op.register_fake
def _(
    left,
    right,
    temperature,
    own,
    weight,
    exclude,
    positive,
    columns,
    ids,
    largest,
    precision,
    needs_grad,
):
    needed = (*needs_grad[:3], own is not None and any(needs_grad))
    inputs = zip((left, right, temperature, own), (any(needs_grad), *needed[1:]), strict=True)
    return [
        left.new_empty(()),
        *(left.new_empty(x.shape if need and x is not None else 0) for x, need in inputs),
    ]


@torch.library.custom_op("offsphere::softplus_sum", mutates_args=())
def _softplus_op(
    left: Tensor, right: Tensor, temperature: Tensor, bias: Tensor, weight: float, precision: str
) -> list[Tensor]:
    """The value and the gradients of the four."""
    sweep = strips.sweep_softplus if _in_strips(left) else tiles.sweep_softplus
    if not _in_strips(left):
        scores_bound(temperature, left, right)
    with outside_autocast(left, precision):
        if path(left, right) == "dense":
            value, *grads = tiles.dense_softplus(left, right, temperature, bias)
        else:
            value, *grads = sweep(left, right, temperature, bias, weight, ALONE, True)
    return _whole(value, grads)


@_softplus_op.register_fake
def _(left, right, temperature, bias, weight, precision):
    return [left.new_empty(x.shape) for x in (bias, left, right, temperature, bias)]


def _whole(value: Tensor, grads: list[Tensor | None]) -> list[Tensor]:
    """As an operation must return them: tensors in order of their rows."""
    return [value, *(value.new_empty(0) if x is None else x.contiguous() for x in grads)]


def _save_outputs(ctx, inputs, output) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.others = [[] if isinstance(x, list) and not x else None for x in inputs[4:]]


def _scale_outputs(ctx, grad_outputs):
    needed = ctx.needs_input_grad[:4]
    grads = zip(ctx.saved_tensors, needed, strict=True)
    return *(x * grad_outputs[0] if need else None for x, need in grads), *ctx.others


for _op in (_log_partitions_op, _softplus_op):
    _op.register_autograd(_scale_outputs, setup_context=_save_outputs)


def _plain_log_partitions(left, right, temperature, own, weight, exclude, positive, columns, ids):
    """The definition of `log_partitions`, a slab of rows after the other.

    Where the positive is a candidate it adds 1 to exp(gap), the others' log-sum-exp being `gap`
    above it. Near zero log(1 + exp(gap)) keeps the digits that the log-sum-exp of all candidates
    minus the positive, two large numbers, has lost.
    """
    right = left if right is None else right
    height = max(1, SLAB // len(right))
    rows, cols, positives = [], [], []
    for start in range(0, len(left), height):
        at = slice(start, min(start + height, len(left))), slice(0, len(right))
        scores = (left[at[0]] / temperature) @ right.T
        # In the order (n, -n) of the offsets, the diagonals come in the order of the rows.
        positives += [diagonal.clone() for diagonal in tiles.crossing(scores, at, positive)]
        # Finite, because a column without candidates in this slab would have no derivative.
        tiles.without(scores, at, (*exclude, *positive), LOWEST, ids)
        rows.append(scores.logsumexp(1))
        if columns:
            cols.append(scores[:, :columns].logsumexp(0))
    gaps = torch.cat(rows)
    if columns:
        gaps = torch.stack([gaps, torch.stack(cols).logsumexp(0)])
    if own is not None or positive:
        gaps = gaps - (torch.cat(positives) if own is None else own)
    if _seen(own, exclude, positive):
        gaps = F.softplus(gaps, threshold=EXACT_SOFTPLUS)
    return weight * gaps.sum()


def _plain_softplus(left, right, temperature, bias, weight):
    """The definition of `softplus_sum`."""
    logits = (left / temperature) @ right.T + bias
    logits.diagonal().neg_()
    return weight * F.softplus(logits, threshold=EXACT_SOFTPLUS).sum()


class NonFinite(ValueError):
    """Embeddings hold NaN or infinity: training has diverged, or an input is bad."""


def scores_bound(temperature: Tensor, left: Tensor, *others: Tensor) -> float:
    """A bound of |scores|, by Cauchy and Schwarz; what is not finite or not positive is refused."""
    norms = [largest_norm(x) for x in (left, *others)]
    value = temperature.item()
    if not 0 < value < math.inf:
        raise bad_temperature(value)
    return norms[0] * max(norms[1:] or norms) / value


def largest_norm(x: Tensor) -> float:
    """The length of the longest row."""
    largest = torch.linalg.vector_norm(x.detach(), dim=1).amax().item() if len(x) else 0.0
    if not math.isfinite(largest):
        bad = (~torch.isfinite(x)).any(1).sum().item()
        got = f"NaN or infinity in {bad} of {len(x)} rows" if bad else "lengths beyond float32"
        raise NonFinite(
            f"Expected finite embeddings, got {got}. Lower the learning rate, clip gradients, or "
            "look for a bad input."
        )
    return largest


def bad_temperature(value: float) -> ValueError:
    """The refusal of a temperature that cannot divide."""
    return ValueError(
        f"Expected a temperature above 0, got {value:g}. It divides the scores: common values are "
        "0.05 to 0.5."
    )


def _in_strips(left: Tensor) -> bool:
    return left.device.type not in TILED_DEVICES


def _seen(own: Tensor | None, exclude: tuple[int, ...], positive: tuple[int, ...]) -> bool:
    """Whether a row's positive is among its candidates, so that the sum cannot be negative."""
    return own is not None or not set(positive) <= set(exclude)


def _with_digits(found: Tensor, inputs: tuple, how: tuple) -> Tensor:
    """The sum, with the digits of one near zero; its gradient is left as it is."""
    value = found.detach()
    if not value.item() < NEAR_ZERO:
        return found
    with torch.no_grad(), outside_autocast(value):
        exact = _plain_log_partitions(*inputs, *how)
    return found + (exact - value)
