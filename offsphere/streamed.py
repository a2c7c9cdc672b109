"""Exact sums over a score matrix that is never kept: blocks, log-sum-exp, gradients in one go.

Every loss in `offsphere.losses` is one of two sums over the scores s_ij = left_i . right_j:

- `log_partitions`: the logs of the row (and column) sums of exp(s_ij), minus the positives;
- `softplus_sum`: the sum of log(1 + exp(s_ij + bias)), minus the positives.

A sum and its gradient need the same blocks, so the forward pass computes both and the backward
pass only scales: between the two, nothing but the sides and their gradients is kept. The blocks are
tiles here, for CPUs, and strips in `offsphere.strips`, for accelerators; `path` decides.

`_plain_*` are the same sums in torch's own operations on the whole score matrix, for what has to
keep it anyway: gradients that are differentiated again (create_graph), and torch.func.

`split` shares a sum among ranks, each of which has all rows: see `offsphere.split`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise, product
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from offsphere import strips
from offsphere.precision import autocasts, outside_autocast, transformed
from offsphere.split import ALONE, Split
from offsphere.strips import LOWEST, PLAIN_RANGE, diagonals, temperature_gradient

if TYPE_CHECKING:
    from jaxtyping import Float

TILED_DEVICES = ("cpu",)
"""Devices whose scores come in tiles."""
DENSE_SCORES = 2**14
"""Up to this many scores (128 x 128) the dense definition is the faster path on a CPU."""
TILE = 768
"""Most rows and columns of a tile: about 2 MB in float32, which stays in the cache."""
WORKSPACE = 2**24
"""Scores (64 MB in float32) that one call may hold so as not to compute its tiles twice."""
NEAR_ZERO = 2.0**-9
"""A smaller sum, if it cannot be negative, is found by a slower way that keeps its digits."""
EXACT_SOFTPLUS = 40.0
"""From here on log(1 + exp(x)) is x in float64 too (torch's own limit, 20, is for float32)."""

Tile = tuple[slice, slice]


def path(
    left: Tensor, right: Tensor, split: Split = ALONE
) -> Literal["definition", "dense", "tiles", "strips"]:
    """How the sums over these scores are computed.

    - definition: torch.func and forward mode follow torch's own operations only.
    - strips: on an accelerator, where few large kernels are fast. One strip is the dense loss.
    - dense: few scores on a CPU, where a plain matrix costs fewer operations than tiles. Not under
      autocast, which would round its products, nor for ranks, which share the rows.
    - tiles: everything else on a CPU: blocks that stay in its cache.
    """
    if transformed():
        return "definition"
    if _in_strips(left):
        return "strips"
    few = len(left) * len(right) <= DENSE_SCORES
    return "dense" if few and split.count == 1 and not autocasts(left) else "tiles"


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
    largest: float = math.inf,
    split: Split = ALONE,
    found: Float[Tensor, ""] | None = None,
) -> Float[Tensor, ""]:
    """weight * the sum over rows i, and over `columns` columns, of log-sum-exp minus positive.

    The diagonals j - i in `exclude` are left out of the log-sum-exp; those in `positive` hold the
    positives. `own` is one more score per row, its positive, that only this row sees. With `right`
    None both sides are `left`: half the tiles serve, because columns repeat the rows. `largest`
    bounds the size of all scores, if it is known. `found` is the sum, with its gradient, if a dense
    definition has found it already.
    """
    inputs, how = (left, right, temperature, own), (weight, exclude, positive, columns)
    if transformed():
        with outside_autocast(left):
            return _plain_log_partitions(*inputs, *how)
    value: Tensor = (
        _LogPartitions.apply(*inputs, *how, largest, split)  # pyright: ignore
        if found is None
        else found
    )
    # Strips hold a sum that cannot be negative at zero: to look at it would wait for the device.
    looks = not _in_strips(left) and _seen(own, exclude, positive)
    return _with_digits(value, inputs, how) if looks else value


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
    return _SoftplusSum.apply(*inputs, weight, split)  # pyright: ignore


class _LogPartitions(torch.autograd.Function):
    @staticmethod
    def forward(ctx, left, right, temperature, own, *how):
        inputs = (left, right, temperature, own)
        sweep = strips.sweep_log_partitions if _in_strips(left) else _sweep_log_partitions
        with torch.autocast(left.device.type, enabled=False):
            value, *grads = sweep(*inputs, *how, needs_grad=ctx.needs_input_grad[:4])
        _save(ctx, inputs, grads)
        ctx.how = how[:-2]
        return value

    @staticmethod
    def backward(ctx, *grad_outputs):
        return *_gradients(ctx, _plain_log_partitions, grad_outputs[0]), *[None] * 6


class _SoftplusSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, left, right, temperature, bias, weight, split):
        inputs = (left, right, temperature, bias)
        sweep = strips.sweep_softplus if _in_strips(left) else _sweep_softplus
        with torch.autocast(left.device.type, enabled=False):
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


def _gradients(ctx, plain: Callable[..., Tensor], scale: Tensor) -> list[Tensor | None]:
    """Those of the forward pass, scaled; or, with create_graph, as functions of the inputs."""
    inputs, grads = list(ctx.saved_tensors[:4]), ctx.saved_tensors[4:]
    inputs[2] = ctx.temperature if inputs[2] is None else inputs[2]
    if not torch.is_grad_enabled():
        return [None if grad is None else grad * scale for grad in grads]
    needed = ctx.needs_input_grad[:4]
    # Views, because one tensor may be both sides, and each wants its own part.
    inputs = [x.view_as(x) if isinstance(x, Tensor) else x for x in inputs]
    wanted = [x for x, need in zip(inputs, needed, strict=True) if need]
    with outside_autocast(scale):
        value = plain(*inputs, *ctx.how)
        found = iter(torch.autograd.grad(value, wanted, scale, create_graph=True))
    return [next(found) if need else None for need in needed]


def _plain_log_partitions(left, right, temperature, own, weight, exclude, positive, columns):
    """The definition of `log_partitions`, a slab of rows after the other.

    Where the positive is a candidate it adds 1 to exp(gap), the others' log-sum-exp being `gap`
    above it. Near zero log(1 + exp(gap)) keeps the digits that the log-sum-exp of all candidates
    minus the positive, two large numbers, has lost.
    """
    right = left if right is None else right
    height = max(1, WORKSPACE // len(right))
    rows, cols, positives = [], [], []
    for start in range(0, len(left), height):
        at = slice(start, min(start + height, len(left))), slice(0, len(right))
        scores = (left[at[0]] / temperature) @ right.T
        # In the order (n, -n) of the offsets, the diagonals come in the order of the rows.
        positives += [diagonal.clone() for diagonal in _diagonals(scores, at, positive)]
        # Finite, because a column without candidates in this slab would have no derivative.
        _without(scores, at, (*exclude, *positive), LOWEST)
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


def _in_strips(left: Tensor) -> bool:
    return left.device.type not in TILED_DEVICES


def _seen(own: Tensor | None, exclude: tuple[int, ...], positive: tuple[int, ...]) -> bool:
    """Whether a row's positive is among its candidates, so that the sum cannot be negative."""
    return own is not None or not set(positive) <= set(exclude)


def _with_digits(found: Tensor, inputs: tuple, how: tuple) -> Tensor:
    """The sum, with the digits of one near zero; its gradient is left as it is."""
    value = found.detach()
    if value.item() >= NEAR_ZERO:
        return found
    with torch.no_grad(), outside_autocast(value):
        exact = _plain_log_partitions(*inputs, *how)
    return found + (exact - value)


class _Plain:
    """Running sums of exp(score), where no score can overflow: one exp serves rows and columns."""

    empty = 0.0

    @staticmethod
    def terms(scores: Tensor) -> Tensor:
        return scores.exp_()

    @staticmethod
    def add(total: Tensor, terms: Tensor, dim: int) -> None:
        total += terms.sum(dim)

    @staticmethod
    def exchange(split: Split, total: Tensor) -> None:
        split.sum_(total)

    @staticmethod
    def log(total: Tensor) -> Tensor:
        return total.log()

    @staticmethod
    def shares(terms: Tensor, rows: Tensor, cols: Tensor | None, times: Tensor) -> Tensor:
        share = (times / rows)[:, None]
        return terms.mul_(share if cols is None else share + times / cols)


class _Shifted:
    """Running log-sum-exps, for scores of any size: each line has its own shift."""

    empty = -math.inf

    @staticmethod
    def terms(scores: Tensor) -> Tensor:
        return scores

    @staticmethod
    def add(total: Tensor, terms: Tensor, dim: int) -> None:
        torch.logaddexp(total, terms.logsumexp(dim), out=total)

    @staticmethod
    def exchange(split: Split, total: Tensor) -> None:
        split.log_sum_exp_(total)

    @staticmethod
    def log(total: Tensor) -> Tensor:
        return total

    @staticmethod
    def shares(terms: Tensor, rows: Tensor, cols: Tensor | None, times: Tensor) -> Tensor:
        share = (terms - rows[:, None]).exp_()
        share = share if cols is None else share.add_(terms.sub_(cols).exp_())
        return share.mul_(times)


def _sweep_log_partitions(
    left, right, temperature, own, weight, exclude, positive, columns, largest, split, needs_grad
):
    """The value, and the gradients for left, right, temperature and own (None if not needed)."""
    symmetric = right is None
    right = left if symmetric else right
    two_way = symmetric or columns > 0
    exps = _Plain if largest <= PLAIN_RANGE else _Shifted
    alone, mine = split.count == 1, slice(0, len(left)) if symmetric else split.own(len(left))
    tiles = list(_tiles(len(left), len(right), symmetric, split))
    sizes = [_size(at) for at in tiles]
    keep = any(needs_grad) and sum(sizes) <= WORKSPACE
    # One buffer: a tile that is computed again lands where it was, so it has the same bits again.
    buffer = left.new_empty(sum(sizes) if keep else max(sizes, default=0))
    starts = list(accumulate(sizes, initial=0)) if keep else [0] * len(tiles)

    def place(number: int) -> Tensor:
        i, j = tiles[number]
        start = starts[number]
        return buffer[start : start + sizes[number]].view(i.stop - i.start, j.stop - j.start)

    def compute(number: int) -> Tensor:
        i, j = tiles[number]
        scores = torch.mm(left[i] / temperature, right[j].T, out=place(number))
        if symmetric and i == j and exps is _Shifted:
            # Rounding tells s_ij from s_ji; where scores are large, exp would tell them apart too.
            scores.copy_(scores.triu() + scores.triu(1).T)
        return scores

    # First sweep: the sum of every row and, both ways, of every column.
    rows = left.new_full((len(left),), exps.empty) if own is None else exps.terms(own.clone())
    cols = rows if symmetric else left.new_full((len(right),), exps.empty)
    positives = left.new_zeros(()) if own is None else own.sum()
    for number, at in enumerate(tiles):
        i, j = at
        scores = compute(number)
        for diagonal in _diagonals(scores, at, positive):
            # Off the diagonal of a symmetric matrix a tile stands for its mirror image too.
            positives = positives + diagonal.sum() * (2 if symmetric and i != j else 1)
        tile = _without(exps.terms(scores), at, exclude, exps.empty)
        exps.add(rows[i], tile, 1)
        if two_way and not (symmetric and i == j):
            exps.add(cols[j], tile, 0)
    if two_way and not alone:
        exps.exchange(split, cols if symmetric else cols[:columns])
    value = exps.log(rows[mine]).sum()
    if not alone:
        # Of a symmetric matrix every rank has all rows' sums by now.
        parts = torch.stack([positives, 0 * value if symmetric else value])
        positives, others = split.sum_(parts).unbind()
        value = value if symmetric else others
    value = value + (exps.log(cols[:columns]).sum() if columns else 0.0)
    value = weight * (value - positives * (2 if columns else 1))
    if not any(needs_grad):
        return value, None, None, None, None

    # Second sweep: the gradient of each score, and from it those of the two sides.
    if columns:
        cols[columns:] = math.inf
    times = weight * split.count / temperature
    # Alone, the first tile that reaches a block of rows writes it, and the others add to it; of
    # ranks, some may have no tile there.
    grad_of = torch.empty_like if alone else torch.zeros_like
    grad_left = grad_of(left)
    grad_right = None
    if symmetric:
        grad_right = grad_left
    elif needs_grad[1]:
        grad_right = grad_of(right)
    for number, at in enumerate(tiles):
        i, j = at
        if keep:
            tile = place(number)
        else:
            tile = _without(exps.terms(compute(number)), at, exclude, exps.empty)
        grad = exps.shares(tile, rows[i], cols[j] if two_way else None, times)
        for diagonal in _diagonals(grad, at, positive):
            diagonal -= 2 * times if two_way else times
        grad_left[i].addmm_(grad, right[j], beta=float(j.start > 0 or not alone))
        if grad_right is not None and not (symmetric and i == j):
            grad_right[j].addmm_(grad.T, left[i], beta=float(i.start > 0 or not alone))
    grad_temperature = grad_own = None
    if needs_grad[2]:
        grad_temperature = temperature_gradient(left, grad_left, temperature) / (1 + symmetric)
    if own is not None:
        grad_own = torch.zeros_like(own)
        grad_own[mine] = weight * split.count * ((own - exps.log(rows)).exp_() - 1)[mine]
    return value, grad_left, None if symmetric else grad_right, grad_temperature, grad_own


def _sweep_softplus(left, right, temperature, bias, weight, split, needs_grad):
    """The value, and the gradients for left, right, temperature and bias (None if not needed)."""
    value, times = torch.zeros_like(bias), weight * split.count / temperature
    grad_left, grad_right = torch.zeros_like(left), torch.zeros_like(right)
    grad_bias = torch.zeros_like(bias)
    for at in _tiles(len(left), len(right), False, split):
        i, j = at
        logits = torch.addmm(bias, left[i] / temperature, right[j].T)
        for diagonal in _diagonals(logits, at, (0,)):
            diagonal.neg_()  # softplus(x) - x is softplus(-x), which keeps its digits
        value += F.softplus(logits).sum()
        if needs_grad:
            grad = logits.sigmoid_()
            for diagonal in _diagonals(grad, at, (0,)):
                diagonal.neg_()
            grad_bias += grad.sum()
            grad.mul_(times)
            grad_left[i].addmm_(grad, right[j])
            grad_right[j].addmm_(grad.T, left[i])
    value = weight * split.sum_(value)
    if not needs_grad:
        return value, None, None, None, None
    grad_temperature = temperature_gradient(left, grad_left, temperature)
    grad_bias *= weight * split.count
    return value, grad_left, grad_right, grad_temperature, grad_bias


def _tiles(rows: int, cols: int, upper_only: bool, split: Split = ALONE) -> Iterator[Tile]:
    """This rank's tiles, of nearly equal size, of the score matrix or of its upper triangle.

    A rank has its share of the rows. In a triangle that would not be its share of the tiles: there
    the first and the last of 2 count bands of rows go together, the second and the last but one.
    """
    if not upper_only:
        yield from product(_slices(split.own(rows)), _slices(slice(0, cols)))
        return
    bands = 2 * split.count
    slices = _slices(slice(0, rows), 1 if split.count == 1 else bands)
    for number, i in enumerate(slices):
        if number % bands in (split.rank, bands - 1 - split.rank):
            yield from ((i, j) for j in slices[number:])


def _slices(span: slice, multiple: int = 1) -> list[slice]:
    """The span in parts of nearly equal length, at most TILE; their number is such a multiple."""
    length = span.stop - span.start
    count = multiple * max(1, math.ceil(length / TILE / multiple))
    ends = (span.start + length * k // count for k in range(count + 1))
    return [slice(a, b) for a, b in pairwise(ends) if b > a]


def _size(at: Tile) -> int:
    return (at[0].stop - at[0].start) * (at[1].stop - at[1].start)


def _diagonals(tile: Tensor, at: Tile, offsets: tuple[int, ...]) -> Iterator[Tensor]:
    return (view for view, _ in diagonals(tile, at[0].start, at[1].start, offsets))


def _without(terms: Tensor, at: Tile, exclude: tuple[int, ...], empty: float) -> Tensor:
    for diagonal in _diagonals(terms, at, exclude):
        diagonal.fill_(empty)
    return terms
