"""The sums of `offsphere.streamed` on CPUs: tiles that stay in the cache.

A row's log-sum-exp needs the whole row, and a score's gradient needs the sums of its row and of
its column. So there are two sweeps over the tiles: the first adds up the sums, the second has them
and turns each score into its gradient at once. Where all scores fit into WORKSPACE they are kept in
between; of more, each tile is computed twice, so that the whole matrix is never held.

And, for a batch so small that the bookkeeping counts, the losses on the whole matrix.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import accumulate, pairwise, product

import torch
import torch.nn.functional as F
from torch import Tensor

from offsphere.split import ALONE, Split
from offsphere.strips import PLAIN_RANGE, diagonals

TILE = 768
"""Most rows and columns of a tile: about 2 MB in float32, which stays in the cache."""
WORKSPACE = 2**24
"""Scores (64 MB in float32) that one call may hold so as not to compute its tiles twice."""

Tile = tuple[slice, slice]


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


def dense_pairs(left, right, temperature, weight, columns, needs_grad):
    """The definition of `info_nce`, and its gradients as autograd would find them, to the bit.

    In a small batch autograd's bookkeeping takes longer than the arithmetic.
    """
    scaled = left / temperature
    scores = torch.mm(scaled, right.t())
    diagonal, rows = scores.diagonal(), _log_sum_exp(scores, 1)
    value = (rows - diagonal).mean()
    wider = scores.shape[1] > columns
    among = scores[:, :columns] if wider else scores
    cols = _log_sum_exp(among, 0) if columns else rows
    if columns:
        value = (value + (cols - diagonal).mean()) / 2
    if not any(needs_grad):
        return value, None, None, None, None
    # Each share of its row, or of its column, times weight; minus weight for each positive.
    grad = (scores - rows.unsqueeze(1)).exp_().mul_(weight)
    if columns:
        of_cols = (among - cols).exp_().mul_(weight)
        of_cols.diagonal().sub_(weight).sub_(weight)
        (grad[:, :columns] if wider else grad).add_(of_cols)
    else:
        grad.diagonal().sub_(weight)
    return value, *_of_sides(grad, scaled, right, temperature, needs_grad), None


def dense_rows(left, right, temperature, own, weight, exclude, positive, needs_grad):
    """The definitions of the losses of rows alone, and their gradients, to the bit as above."""
    symmetric = right is None
    right = left if symmetric else right
    scaled = left / temperature
    scores = torch.mm(scaled, right.t())
    # The own score as a first column, as where the definition has it.
    among = scores if own is None else torch.cat([own.unsqueeze(1), scores], 1)
    scores = among if own is None else among[:, 1:]
    at = slice(0, len(left)), slice(0, len(right))
    positives = own if own is not None else torch.cat([*crossing(scores, at, positive)])
    without(scores, at, exclude, -math.inf)
    rows = among.logsumexp(1)
    value = (rows - positives).mean()
    if not any(needs_grad):
        return value, None, None, None, None
    shares = (among - rows.unsqueeze(1)).exp_().mul_(weight)
    grad = shares if own is None else shares[:, 1:]
    for diagonal in crossing(grad, at, positive):
        diagonal.sub_(weight)
    grad_own = None if own is None else shares[:, 0] - weight
    needs = (True, symmetric or needs_grad[1], needs_grad[2])
    grad_left, grad_right, grad_temperature = _of_sides(grad, scaled, right, temperature, needs)
    if symmetric:
        grad_left, grad_right = grad_left + grad_right, None
    return value, grad_left, grad_right, grad_temperature, grad_own


def dense_softplus(left, right, temperature, bias):
    """The definition of `siglip`, and its gradients, to the bit as above."""
    scaled = left / temperature
    logits = torch.mm(scaled, right.t()) + bias
    sign = 2.0 * torch.eye(*logits.shape, dtype=logits.dtype) - 1
    logits *= sign
    terms, buffer = torch.ops.aten.log_sigmoid_forward(logits)
    each = (-1 / terms.new_full((), len(left))).expand_as(terms)
    grad = torch.ops.aten.log_sigmoid_backward(each, logits, buffer) * sign
    grads = _of_sides(grad, scaled, right, temperature, (True,) * 3)
    return -terms.sum() / len(left), *grads, grad.sum()


def _of_sides(grad, scaled, right, temperature, needs_grad):
    """From the gradient of the scores those of left, right and temperature."""
    grad_scaled, grad_right, grad_temperature = torch.mm(grad, right), None, None
    if needs_grad[1]:
        grad_right = torch.mm(grad.t(), scaled)
    if needs_grad[2]:
        grad_temperature = (-grad_scaled * (scaled / temperature)).sum()
    return grad_scaled / temperature, grad_right, grad_temperature


def _log_sum_exp(scores: Tensor, dim: int) -> Tensor:
    """As torch's own, which takes longer because it allows for infinite scores."""
    shift = scores.amax(dim)
    return (scores - (shift.unsqueeze(1) if dim else shift)).exp_().sum(dim).log_().add_(shift)


def sweep_log_partitions(
    left, right, temperature, own, weight, exclude, positive, columns, ids, largest, split,
    needs_grad,
):  # fmt: skip
    """The value, and the gradients for left, right, temperature and own (None if not needed)."""
    symmetric = right is None
    right = left if symmetric else right
    two_way = symmetric or columns > 0
    exps = _Plain if largest <= PLAIN_RANGE else _Shifted
    alone, mine = split.count == 1, slice(0, len(left)) if symmetric else split.mine(len(left))
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
    positives = left.new_zeros(()) if own is None else own[mine].sum()
    for number, at in enumerate(tiles):
        i, j = at
        scores = compute(number)
        for diagonal in crossing(scores, at, positive):
            # Off the diagonal of a symmetric matrix a tile stands for its mirror image too.
            positives = positives + diagonal.sum() * (2 if symmetric and i != j else 1)
        tile = without(exps.terms(scores), at, exclude, exps.empty, ids, positive)
        exps.add(rows[i], tile, 1)
        if two_way and not (symmetric and i == j):
            exps.add(cols[j], tile, 0)
    if two_way and not alone:
        exps.exchange(split, cols if symmetric else cols[:columns])
    value, whole = exps.log(rows[mine]).sum(), slice(0, columns)
    if split.local:
        # This rank's rows, and the columns that belong to them.
        value, positives = value * split.count, positives * split.count
        whole = split.mine(columns)
    elif not alone:
        # Of a symmetric matrix every rank has all rows' sums by now.
        parts = split.sum_(torch.stack([positives] if symmetric else [positives, value]))
        positives, value = parts[0], value if symmetric else parts[1]
    of_columns = exps.log(cols[whole]).sum() if columns else 0.0
    value = value + (of_columns * split.count if split.local else of_columns)
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
            tile = without(exps.terms(compute(number)), at, exclude, exps.empty, ids, positive)
        grad = exps.shares(tile, rows[i], cols[j] if two_way else None, times)
        for diagonal in crossing(grad, at, positive):
            diagonal -= 2 * times if two_way else times
        grad_left[i].addmm_(grad, right[j], beta=float(j.start > 0 or not alone))
        if grad_right is not None and not (symmetric and i == j):
            grad_right[j].addmm_(grad.T, left[i], beta=float(i.start > 0 or not alone))
    grad_temperature = grad_own = None
    if needs_grad[2]:
        grad_temperature = _temperature_gradient(left, grad_left, temperature) / (1 + symmetric)
    if own is not None:
        grad_own = torch.zeros_like(own)
        grad_own[mine] = weight * split.count * ((own - exps.log(rows)).exp_() - 1)[mine]
    return value, grad_left, None if symmetric else grad_right, grad_temperature, grad_own


def sweep_softplus(left, right, temperature, bias, weight, split, needs_grad):
    """The value, and the gradients for left, right, temperature and bias (None if not needed)."""
    value, times = torch.zeros_like(bias), weight * split.count / temperature
    grad_left, grad_right = torch.zeros_like(left), torch.zeros_like(right)
    grad_bias = torch.zeros_like(bias)
    for at in _tiles(len(left), len(right), False, split):
        i, j = at
        logits = torch.addmm(bias, left[i] / temperature, right[j].T)
        for diagonal in crossing(logits, at, (0,)):
            diagonal.neg_()  # softplus(x) - x is softplus(-x), which keeps its digits
        value += F.softplus(logits).sum()
        if needs_grad:
            grad = logits.sigmoid_()
            for diagonal in crossing(grad, at, (0,)):
                diagonal.neg_()
            grad_bias += grad.sum()
            grad.mul_(times)
            grad_left[i].addmm_(grad, right[j])
            grad_right[j].addmm_(grad.T, left[i])
    value = weight * split.sum_(value)
    if not needs_grad:
        return value, None, None, None, None
    grad_temperature = _temperature_gradient(left, grad_left, temperature)
    grad_bias *= weight * split.count
    return value, grad_left, grad_right, grad_temperature, grad_bias


def _tiles(rows: int, cols: int, upper_only: bool, split: Split = ALONE) -> Iterator[Tile]:
    """This rank's tiles, of nearly equal size, of the score matrix or of its upper triangle.

    A rank has its share of the rows. In a triangle that would not be its share of the tiles: there
    the first and the last of 2 count bands of rows go together, the second and the last but one.
    """
    if not upper_only:
        yield from product(_slices(split.mine(rows)), _slices(slice(0, cols)))
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


def crossing(tile: Tensor, at: Tile, offsets: tuple[int, ...]) -> Iterator[Tensor]:
    """Views of those diagonals j - i = offset of the whole matrix that cross this tile."""
    return (view for view, _ in diagonals(tile, at[0].start, at[1].start, offsets))


def without(
    terms: Tensor,
    at: Tile,
    exclude: tuple[int, ...],
    empty: float,
    ids: Tensor | None = None,
    positive: tuple[int, ...] = (),
) -> Tensor:
    """The tile with these diagonals filled, and what has equal ids but is no positive."""
    for diagonal in crossing(terms, at, exclude):
        diagonal.fill_(empty)
    if ids is not None:
        equal = ids[at[0], None] == ids[at[1]]
        for diagonal in crossing(equal, at, positive):
            diagonal.fill_(False)
        terms.masked_fill_(equal, empty)
    return terms


def _temperature_gradient(left: Tensor, grad_left: Tensor, temperature: Tensor) -> Tensor:
    """Scores are left . right / temperature: the rate in one is minus the rate in the other."""
    return -torch.linalg.vecdot(left, grad_left).sum() / temperature
