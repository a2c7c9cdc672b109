"""Exact sums over a score matrix that is never kept: tiles, log-sum-exp, gradients in one go.

Every loss in `offsphere.losses` is one of two sums over the scores s_ij = left_i . right_j:

- `log_partitions`: the logs of the row (and column) sums of exp(s_ij), minus the positives;
- `softplus_sum`: the sum of log(1 + exp(s_ij + bias)), minus the positives.

A sum and its gradient need the same tiles, so the forward pass computes both and the backward
pass only scales: between the two, nothing but the sides and their gradients is kept.

`_plain_*` are the same sums in torch's own operations on the whole score matrix, for what has to
keep it anyway: gradients that are differentiated again (create_graph), and torch.func.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise, product
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from offsphere.precision import outside_autocast, transformed

if TYPE_CHECKING:
    from jaxtyping import Float

TILE = 768
"""Most rows and columns of a tile: about 2 MB in float32, which stays in the cache."""
WORKSPACE = 2**24
"""Scores (64 MB in float32) that one call may hold so as not to compute its tiles twice."""
NEAR_ZERO = 2.0**-9
"""A smaller sum, if it cannot be negative, is found by a slower way that keeps its digits."""
EXACT_SOFTPLUS = 40.0
"""From here on log(1 + exp(x)) is x in float64 too (torch's own limit, 20, is for float32)."""
LOWEST = -1e30
"""A score that no candidate has: its exp is zero beside any other's."""
PLAIN_RANGE = 40.0
"""Scores in [-40, 40] need no shift: exp stays far from overflow and underflow in float32."""

Tile = tuple[slice, slice]


def log_partitions(
    left: Float[Tensor, "n d"],
    right: Float[Tensor, "m d"] | None,
    temperature: Float[Tensor, ""],
    *,
    weight: float = 1.0,
    exclude: tuple[int, ...] = (),
    positive: tuple[int, ...] = (),
    own: Float[Tensor, " n"] | None = None,
    columns: int = 0,
    largest: float = math.inf,
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
        _LogPartitions.apply(*inputs, *how, largest)  # pyright: ignore
        if found is None
        else found
    )
    return _with_digits(value, inputs, how) if _seen(own, exclude, positive) else value


def softplus_sum(
    left: Float[Tensor, "n d"],
    right: Float[Tensor, "m d"],
    temperature: Float[Tensor, ""],
    bias: Float[Tensor, ""],
    *,
    weight: float = 1.0,
) -> Float[Tensor, ""]:
    """weight * (the sum over i, j of softplus(s_ij + bias), minus the sum of s_ii + bias)."""
    inputs = (left, right, temperature, bias)
    if transformed():
        with outside_autocast(left):
            return _plain_softplus(*inputs, weight)
    return _SoftplusSum.apply(*inputs, weight)  # pyright: ignore


class _LogPartitions(torch.autograd.Function):
    @staticmethod
    def forward(ctx, left, right, temperature, own, *how):
        inputs = (left, right, temperature, own)
        with torch.autocast(left.device.type, enabled=False):
            value, *grads = _sweep_log_partitions(*inputs, *how, needs_grad=ctx.needs_input_grad)
        ctx.save_for_backward(*inputs, *grads)
        ctx.how = how[:-1]
        return value

    @staticmethod
    def backward(ctx, *grad_outputs):
        return *_gradients(ctx, _plain_log_partitions, grad_outputs[0]), *[None] * 5


class _SoftplusSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, left, right, temperature, bias, weight):
        inputs = (left, right, temperature, bias)
        with torch.autocast(left.device.type, enabled=False):
            value, *grads = _sweep_softplus(*inputs, weight, any(ctx.needs_input_grad))
        ctx.save_for_backward(*inputs, *grads)
        ctx.how = (weight,)
        return value

    @staticmethod
    def backward(ctx, *grad_outputs):
        return *_gradients(ctx, _plain_softplus, grad_outputs[0]), None


def _gradients(ctx, plain: Callable[..., Tensor], scale: Tensor) -> list[Tensor | None]:
    """Those of the forward pass, scaled; or, with create_graph, as functions of the inputs."""
    inputs, grads = ctx.saved_tensors[:4], ctx.saved_tensors[4:]
    if not torch.is_grad_enabled():
        return [None if grad is None else grad * scale for grad in grads]
    needed = ctx.needs_input_grad[:4]
    # Views, because one tensor may be both sides, and each wants its own part.
    inputs = [None if x is None else x.view_as(x) for x in inputs]
    wanted = [x for x, need in zip(inputs, needed, strict=True) if x is not None and need]
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


def _seen(own: Tensor | None, exclude: tuple[int, ...], positive: tuple[int, ...]) -> bool:
    """Whether a row's positive is among its candidates, so that the sum cannot be negative."""
    return own is not None or not set(positive) <= set(exclude)


def _with_digits(found: Tensor, inputs: tuple[Tensor | None, ...], how: tuple) -> Tensor:
    """The sum, with the digits of one near zero; its gradient is left as it is.

    On an accelerator a look at the value would wait for the device: there it is held at zero.
    """
    value = found.detach()
    if value.device.type != "cpu":
        return found + (value.clamp_min(0) - value)
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
    def log(total: Tensor) -> Tensor:
        return total

    @staticmethod
    def shares(terms: Tensor, rows: Tensor, cols: Tensor | None, times: Tensor) -> Tensor:
        share = (terms - rows[:, None]).exp_()
        share = share if cols is None else share.add_(terms.sub_(cols).exp_())
        return share.mul_(times)


def _sweep_log_partitions(
    left, right, temperature, own, weight, exclude, positive, columns, largest, *, needs_grad
):
    """The value, and the gradients for left, right, temperature and own (None if not needed)."""
    symmetric = right is None
    right = left if symmetric else right
    two_way = symmetric or columns > 0
    exps = _Plain if largest <= PLAIN_RANGE else _Shifted
    tiles = list(_tiles(len(left), len(right), upper_only=symmetric))
    sizes = [_size(at) for at in tiles]
    keep = any(needs_grad) and sum(sizes) <= WORKSPACE
    # One buffer: a tile that is computed again lands where it was, so it has the same bits again.
    buffer = left.new_empty(sum(sizes) if keep else max(sizes))
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
    value = exps.log(rows).sum() + (exps.log(cols[:columns]).sum() if columns else 0.0)
    value = weight * (value - positives * (2 if columns else 1))
    if not any(needs_grad):
        return value, None, None, None, None

    # Second sweep: the gradient of each score, and from it those of the two sides.
    if columns:
        cols[columns:] = math.inf
    times = weight / temperature
    grad_left = torch.empty_like(left)
    grad_right = None
    if symmetric:
        grad_right = grad_left
    elif needs_grad[1]:
        grad_right = torch.empty_like(right)
    for number, at in enumerate(tiles):
        i, j = at
        if keep:
            tile = place(number)
        else:
            tile = _without(exps.terms(compute(number)), at, exclude, exps.empty)
        grad = exps.shares(tile, rows[i], cols[j] if two_way else None, times)
        for diagonal in _diagonals(grad, at, positive):
            diagonal -= 2 * times if two_way else times
        # The first tile that reaches a block of rows writes it, the others add to it.
        grad_left[i].addmm_(grad, right[j], beta=float(j.start > 0))
        if grad_right is not None and not (symmetric and i == j):
            grad_right[j].addmm_(grad.T, left[i], beta=float(i.start > 0))
    grad_temperature = grad_own = None
    if needs_grad[2]:
        grad_temperature = _temperature_gradient(left, grad_left, temperature) / (1 + symmetric)
    if own is not None:
        grad_own = weight * ((own - exps.log(rows)).exp_() - 1)
    return value, grad_left, None if symmetric else grad_right, grad_temperature, grad_own


def _sweep_softplus(left, right, temperature, bias, weight, needs_grad):
    """The value, and the gradients for left, right, temperature and bias (None if not needed)."""
    value, times = torch.zeros_like(bias), weight / temperature
    grad_left, grad_right = torch.zeros_like(left), torch.zeros_like(right)
    grad_bias = torch.zeros_like(bias)
    for at in _tiles(len(left), len(right)):
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
    if not needs_grad:
        return weight * value, None, None, None, None
    grad_temperature = _temperature_gradient(left, grad_left, temperature)
    return weight * value, grad_left, grad_right, grad_temperature, weight * grad_bias


def _temperature_gradient(left: Tensor, grad_left: Tensor, temperature: Tensor) -> Tensor:
    """Scores are left . right / temperature: the rate in one is minus the rate in the other."""
    return -torch.linalg.vecdot(left, grad_left).sum() / temperature


def _tiles(rows: int, cols: int, upper_only: bool = False) -> Iterator[Tile]:
    """Tiles of nearly equal size that cover the score matrix, or its upper triangle."""
    for i, j in product(_slices(rows), _slices(cols)):
        if not upper_only or i.start <= j.start:
            yield i, j


def _slices(length: int) -> list[slice]:
    count = max(1, math.ceil(length / TILE))
    return [slice(a, b) for a, b in pairwise(length * k // count for k in range(count + 1))]


def _size(at: Tile) -> int:
    return (at[0].stop - at[0].start) * (at[1].stop - at[1].start)


def _diagonals(tile: Tensor, at: Tile, offsets: tuple[int, ...]) -> Iterator[Tensor]:
    """Views of those diagonals j - i = offset of the whole matrix that cross this tile."""
    for offset in offsets:
        local = offset + at[0].start - at[1].start
        if -tile.shape[0] < local < tile.shape[1]:
            yield tile.diagonal(local)


def _without(terms: Tensor, at: Tile, exclude: tuple[int, ...], empty: float) -> Tensor:
    for diagonal in _diagonals(terms, at, exclude):
        diagonal.fill_(empty)
    return terms
