"""The sums of `offsphere.streamed` on accelerators: strips of whole rows, few and large kernels.

On a card a kernel costs some microseconds to start, whatever its size, and must be large to fill
the processors: the tiles that suit a CPU's cache would cost more to start than to compute. So the
scores come as strips: all columns, by as many rows as the workspace allows. A strip that holds all
of them is kept, and the loss costs what a dense one does.

One way, a strip's gradients follow its sums at once, since its rows are whole. With columns too,
the strips are computed a second time, as a column's sum is known only after the last of them.
Where the scores are so few that starting kernels is all that costs, `_few_pairs` starts fewer.

Nothing here looks at a value, so the host never waits for the device.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache, wraps
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from offsphere.split import Split

WORKSPACE = 2**26
"""Most scores that a call holds at once, temporaries included: 256 MB in float32."""
FREE_SHARE = 4
"""The workspace is at most one part in so many of the memory that is free on the device."""
PLAIN_RANGE = 40.0
"""Scores in [-40, 40] need no shift: exp stays far from overflow and underflow in float32."""
FEW = 2**22
"""Up to this many scores (2,048 x 2,048) a kernel takes longer to start than to run."""
LOWEST = -1e30
"""A score that no candidate has: its exp is zero beside any other's."""


def sweep_log_partitions(
    left, right, temperature, own, weight, exclude, positive, columns, ids, largest, split,
    needs_grad,
):  # fmt: skip
    """The value, and the gradients for left, right, temperature and own (None if not needed).

    A symmetric matrix (`right` None) is computed whole: its rows alone say everything.
    """
    symmetric, grad = right is None, any(needs_grad)
    right, needs_right = (left, grad) if symmetric else (right, needs_grad[1])
    pairs = columns and positive == (0,) and not exclude and ids is None and split.count == 1
    if pairs and largest > PLAIN_RANGE and _few(left, right):
        return _few_pairs(left, right, temperature, weight, columns, needs_grad)
    plain, mine = largest <= PLAIN_RANGE, split.mine(len(left))
    ours, our_own = left[mine], None if own is None else own[mine]
    n, excluded, paired = len(ours), *([k + mine.start for k in at] for at in (exclude, positive))
    body = bodies(left.device)
    strips = list(_strips(ours, right, body.buffers if columns else 1))
    scores = buffer = left.new_empty(strips[0].stop if strips else 0, len(right))
    scaled = ours / temperature
    sums = _Sums(left, n, columns, len(strips), plain)
    positives = left.new_empty(n) if our_own is None else our_own
    grad_left = torch.empty_like(left) if split.count == 1 else torch.zeros_like(left)
    # The first strip writes it. A rank without rows has no strip, and adds zero.
    grad_right = (torch.empty_like if strips else torch.zeros_like)(right) if needs_right else None

    def compute(i: slice, positives: Tensor | None = None) -> Tensor:
        scores = torch.mm(scaled[i], right.T, out=buffer[: i.stop - i.start])
        if positives is not None:
            for diagonal, at in _diagonals(scores, i, paired):
                positives[at] = diagonal
        for diagonal, _ in _diagonals(scores, i, excluded):
            diagonal.fill_(LOWEST)
        if ids is not None:
            equal = ids[mine][i][:, None] == ids
            for diagonal, _ in _diagonals(equal, i, paired):
                diagonal.fill_(False)
            scores.masked_fill_(equal, LOWEST)
        return scores

    def differentiate(shares: Tensor, i: slice) -> None:
        for diagonal, _ in _diagonals(shares, i, paired):
            diagonal -= 2 if columns else 1
        torch.mm(shares, right, out=grad_left[mine][i])
        if grad_right is not None:
            grad_right.addmm_(shares.T, ours[i], beta=float(i.start > 0))

    for number, i in enumerate(strips):
        scores = compute(i, positives)
        if columns:
            body.both_sums(scores, *sums.of_rows(i), *sums.of_columns(number))
        else:
            body.row_shares(scores, *sums.of_rows(i), None if our_own is None else our_own[i])
            if grad:
                differentiate(scores, i)
    logs = sums.logs(split)
    if columns and grad:
        rows, cols = sums.ends(logs, len(right))
        for i in strips:
            if len(strips) > 1:
                scores = compute(i).exp_() if plain else compute(i)
            differentiate(body.both_shares(scores, rows[i], cols, plain), i)
    # Ranks have parts of the rows' sums, and by now all the columns'.
    value = logs.sum() if split.count == 1 else logs[:n].sum()
    if split.local:
        value = value + logs[n:][split.mine(columns)].sum()
    if positive or our_own is not None:
        value = torch.sub(value, positives.sum(), alpha=2 if columns else 1)
    if split.local:
        value = value * split.count
    elif split.count > 1:
        value = split.sum_(value) + logs[n:].sum()
    # A row's positive, where it is a candidate, is not above the log-sum-exp: only rounding is.
    if own is not None or not set(positive) <= set(exclude):
        value = value.clamp_min(0)
    if not grad:
        return weight * value, None, None, None, None
    weight_of_part = weight * split.count
    if symmetric:
        grad_left += grad_right  # pyright: ignore
        grad_right = None
    grad_temperature = _scale(left, grad_left, grad_right, weight_of_part, temperature, needs_grad)
    if symmetric and grad_temperature is not None:
        grad_temperature /= 2
    grad_own = None
    if own is not None and our_own is not None:
        grad_own = torch.zeros_like(own)
        torch.mul(torch.expm1(our_own - logs), weight_of_part, out=grad_own[mine])
    return weight * value, grad_left, grad_right, grad_temperature, grad_own


def sweep_softplus(left, right, temperature, bias, weight, split, needs_grad):
    """The value, and the gradients for left, right, temperature and bias (None if not needed)."""
    mine = split.mine(len(left))
    ours, paired = left[mine], (mine.start,)
    strips = list(_strips(ours, right, buffers=2))
    buffer = left.new_empty(len(ours[strips[0]]) if strips else 0, len(right))
    scaled, values, slopes = ours / temperature, [torch.zeros_like(bias)], [torch.zeros_like(bias)]
    grad_left, grad_right = torch.zeros_like(left), torch.zeros_like(right)
    for i in strips:
        logits = torch.addmm(bias, scaled[i], right.T, out=buffer[: i.stop - i.start])
        for diagonal, _ in _diagonals(logits, i, paired):
            diagonal.neg_()  # softplus(x) - x is softplus(-x), which keeps its digits
        values.append(F.softplus(logits).sum())
        if needs_grad:
            grad = logits.sigmoid_()
            for diagonal, _ in _diagonals(grad, i, paired):
                diagonal.neg_()
            slopes.append(grad.sum())
            torch.mm(grad, right, out=grad_left[mine][i])
            grad_right.addmm_(grad.T, ours[i])
    value = weight * split.sum_(torch.stack(values).sum())
    if not needs_grad:
        return value, None, None, None, None
    weight_of_part = weight * split.count
    grad_temperature = _scale(left, grad_left, grad_right, weight_of_part, temperature)
    grad_bias = weight_of_part * torch.stack(slopes).sum()
    return value, grad_left, grad_right, grad_temperature, grad_bias


def _few(left: Tensor, right: Tensor) -> bool:
    return len(left) * len(right) <= min(FEW, workspace(left) // 3)


def _few_pairs(left, right, temperature, weight, columns, needs_grad):
    """The sums of pairs, both ways, from two softmaxes: more memory passes, but fewer kernels."""
    scores = (left / temperature) @ right.T
    rows, cols = scores.log_softmax(1), scores[:, :columns].log_softmax(0)
    value = (rows.diagonal().sum() + cols.diagonal().sum()) * -weight
    if not any(needs_grad):
        return value, None, None, None, None
    shares = rows.exp_()
    shares[:, :columns].add_(cols.exp_())
    shares.diagonal().sub_(2)
    grad_left, grad_right = shares @ right, shares.T @ left if needs_grad[1] else None
    grad_temperature = _scale(left, grad_left, grad_right, weight, temperature, needs_grad)
    return value, grad_left, grad_right, grad_temperature, None


def _scale(
    left: Tensor,
    grad_left: Tensor,
    grad_right: Tensor | None,
    weight: float,
    temperature: float | Tensor,
    needs_grad: Sequence[bool] = (True,) * 3,
) -> Tensor | None:
    """Sums of shares become, in place, the gradients of both sides; that of the temperature."""
    grads = [grad_left] if grad_right is None else [grad_left, grad_right]
    torch._foreach_mul_(grads, weight / temperature)  # one kernel for both
    # Scores are left . right / temperature: the rate in one is minus the rate in the other.
    return torch.dot(left.flatten(), grad_left.flatten()) / -temperature if needs_grad[2] else None


class _Sums:
    """The sums of exp of a matrix along its rows and, after them, along its first columns.

    Unless they are `plain`, each has a shift of its own: a sum is that of exp(score - shift). Those
    of columns come in one part per strip.
    """

    def __init__(self, like: Tensor, rows: int, columns: int, strips: int, plain: bool) -> None:
        def empty(*shape: int) -> tuple[Tensor, Tensor | None]:
            return like.new_empty(shape), None if plain else like.new_empty(shape)

        self.rows = rows
        self.sums, self.shifts = empty(rows + columns)
        self.parts = empty(strips, columns) if strips != 1 and columns else None

    def of_rows(self, at: slice) -> tuple[Tensor, Tensor | None]:
        """Where these rows' sums, and their shifts, are to be written."""
        return self.sums[at], None if self.shifts is None else self.shifts[at]

    def of_columns(self, strip: int) -> tuple[Tensor, Tensor | None]:
        """Where a strip's columns' sums, and their shifts, are to be written."""
        if self.parts is None:
            return self.of_rows(slice(self.rows, None))
        sums, shifts = self.parts
        return sums[strip], None if shifts is None else shifts[strip]

    def logs(self, split: Split) -> Tensor:
        """The logs of the rows' sums and, over all strips and ranks, of the columns'."""
        cols = slice(self.rows, None)
        if self.shifts is None:
            if self.parts is not None:
                torch.sum(self.parts[0], 0, out=self.sums[cols])
            split.sum_(self.sums[cols])
            return self.sums.log()
        logs = self.sums.log().add_(self.shifts)
        if self.parts is not None:
            parts = self.parts[0].log_().add_(self.parts[1])  # pyright: ignore
            logs[cols] = _log_sum_exp(parts) if len(parts) else LOWEST
        split.log_sum_exp_(logs[cols])
        return logs

    def ends(self, logs: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """For rows and for `width` columns: the factor of exp(score), or what to take off a score.

        Columns past those that are summed have no share.
        """
        plain = self.shifts is None
        ends = self.sums.reciprocal() if plain else logs
        rows, cols = ends[: self.rows], ends[self.rows :]
        more = width - len(cols)
        return rows, F.pad(cols, (0, more), value=0.0 if plain else math.inf) if more else cols


def _log_sum_exp(parts: Tensor) -> Tensor:
    """That of each column."""
    if len(parts) == 2:
        return torch.logaddexp(parts[0], parts[1])
    largest = parts.amax(0)
    return (parts - largest).exp_().sum(0).log_().add_(largest)


# The elementwise bodies: what a strip's scores go through between the matrix products.


def _row_shares(scores: Tensor, sums: Tensor, shift: Tensor | None, own: Tensor | None) -> None:
    """Scores become shares of their row's sum of exp."""
    if shift is not None:
        torch.amax(scores, 1, out=shift)
        if own is not None:
            torch.maximum(shift, own, out=shift)
        scores -= shift[:, None]
    torch.sum(scores.exp_(), 1, out=sums)
    if own is not None:
        sums += (own if shift is None else own - shift).exp()
    scores /= sums[:, None]


def _both_sums(
    scores: Tensor, rows: Tensor, row_shift: Tensor | None, cols: Tensor, col_shift: Tensor | None
) -> None:
    """Sums along rows and columns; without shifts the scores become their exp."""
    if row_shift is None:
        torch.sum(scores.exp_(), 1, out=rows)
        torch.sum(scores[:, : len(cols)], 0, out=cols)
        return
    torch.amax(scores, 1, out=row_shift)
    torch.sum((scores - row_shift[:, None]).exp_(), 1, out=rows)
    scores = scores[:, : len(cols)]
    assert col_shift is not None
    torch.amax(scores, 0, out=col_shift)
    torch.sum((scores - col_shift).exp_(), 0, out=cols)


def _both_shares(terms: Tensor, rows: Tensor, cols: Tensor, plain: bool) -> Tensor:
    """The share of its row plus that of its column: the gradient of both logs in a score."""
    if plain:
        return terms.mul_(rows[:, None] + cols)
    share = (terms - rows[:, None]).exp_()
    # Written where the scores were: compiled, it needs no second strip.
    return terms.sub_(cols).exp_().add_(share)


class Bodies(NamedTuple):
    """The three, and how many strips' worth of memory those for both ways need."""

    row_shares: Callable[..., None]
    both_sums: Callable[..., None]
    both_shares: Callable[..., Tensor]
    buffers: int


EAGER = Bodies(_row_shares, _both_sums, _both_shares, buffers=2)


@cache
def bodies(device: torch.device) -> Bodies:
    """Compiled where torch can compile for that device: each is one or two passes, in place."""
    from torch.utils._triton import has_triton

    if device.type == "cpu" or not torch.accelerator.is_available() or not has_triton():
        return EAGER
    return Bodies(*(_compiled(body) for body in EAGER[:3]), buffers=1)


def _compiled(body: Callable) -> Callable:
    """The compiled body; if it turns out that it cannot be compiled, the body itself."""
    from torch._dynamo.exc import TorchDynamoException

    chosen = [torch.compile(body, dynamic=True)]

    @wraps(body)
    def call(*inputs):
        try:
            return chosen[0](*inputs)
        except TorchDynamoException as error:
            warnings.warn(f"{body.__name__} is not compiled: {error}", stacklevel=2)
            chosen[0] = body
            return body(*inputs)

    return call


# Where the strips lie, and how large they are.


def _strips(left: Tensor, right: Tensor, buffers: int) -> Iterator[slice]:
    """The rows of `left`, cut so that a strip's scores fill their part of the workspace."""
    height = max(1, workspace(left) // buffers // len(right))
    for start in range(0, len(left), height):
        yield slice(start, min(start + height, len(left)))


def workspace(like: Tensor) -> int:
    """Scores that a call on this device may hold."""
    return min(WORKSPACE, _free_bytes(like.device) // (FREE_SHARE * like.element_size()))


@cache
def _free_bytes(device: torch.device) -> int:
    """Asked once, at the first loss: the driver is slow to answer."""
    if device.type == "cpu" or not torch.accelerator.is_available():
        return 2**62
    return torch.accelerator.get_memory_info(device)[0]


def diagonals(
    block: Tensor, row: int, col: int, offsets: Sequence[int]
) -> Iterator[tuple[Tensor, int]]:
    """Those diagonals j - i = offset of a matrix that cross this block of it, and their first row.

    The block begins at this row and column of the matrix; the diagonals are views.
    """
    for offset in offsets:
        local = offset + row - col
        if -block.shape[0] < local < block.shape[1]:
            yield block.diagonal(local), row + max(0, -local)


def _diagonals(
    block: Tensor, rows: slice, offsets: Sequence[int]
) -> Iterator[tuple[Tensor, slice]]:
    for diagonal, first in diagonals(block, rows.start, 0, offsets):
        yield diagonal, slice(first, first + len(diagonal))
