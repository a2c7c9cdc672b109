"""The negative-similarity variance term, its rival GOR, and statistics, without a score matrix.

Over i != j the sum of (u_i . v_j)**2 is <U'U, V'V> minus the diagonal, and the sum of u_i . v_j is
(sum u) . (sum v) minus the diagonal: O(m d**2) time and O(d**2) memory. Nothing here normalises:
pass unit vectors for cosines. `split` shares the work among ranks that all have the rows of all
(`offsphere.split`): Gram matrices of shares are summed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from offsphere.precision import (
    at_least_float32,
    compiling,
    outside_autocast,
    row_products,
    transformed,
)
from offsphere.split import ALONE, Split

if TYPE_CHECKING:
    from jaxtyping import Float


def negative_variance(
    u: Float[Tensor, "m d"],
    v: Float[Tensor, "k d"],
    population: int,
    *,
    paired: bool = True,
    group: int | None = None,
    split: Split = ALONE,
) -> Float[Tensor, ""]:
    """Mean over negatives of (u_i . v_j + 1/(population - 1))**2 (VRNS, Def. 5.7).

    `population` is the size of the training set. Row i of `u` and row i of `v` are a positive pair
    and left out, unless `paired=False` (a queue). For the within-view form pass one view twice.
    `group` is as in `mean_square`.
    """
    if population < 2:
        raise ValueError(
            f"Expected a population of at least 2, got {population}. Pass the number of training "
            "instances, not the batch size."
        )
    shift = 1.0 / (population - 1)
    return mean_square(u, v, shift, paired=paired, group=group, split=split)


def mean_square(
    u: Float[Tensor, "m d"],
    v: Float[Tensor, "k d"],
    shift: float = 0.0,
    *,
    paired: bool = True,
    group: int | None = None,
    split: Split = ALONE,
) -> Float[Tensor, ""]:
    """Mean over negatives of (u_i . v_j + shift)**2.

    With `group` only rows of the same group of so many, in order, are each other's negatives.
    """
    _check(u, v, paired)
    u, v = at_least_float32(u), at_least_float32(v)
    if group is not None and group != len(u):
        return _mean_square_in_groups(u, v, shift, group, paired, split)
    if transformed() or compiling():
        with outside_autocast(u):
            return _plain_mean_square(u, v, shift, paired)
    method = _FromProduct if max(len(u), len(v)) < 2 * u.shape[1] else _FromGrams
    return method.apply(u, v, shift, paired, split)  # pyright: ignore


def spread_out(
    u: Float[Tensor, "m d"],
    v: Float[Tensor, "k d"],
    *,
    paired: bool = True,
    group: int | None = None,
    split: Split = ALONE,
) -> Float[Tensor, ""]:
    """GOR: (mean of u_i . v_j)**2 + relu(mean of (u_i . v_j)**2 - 1/d) over negatives.

    Global orthogonal regularisation (Zhang et al. 2017): directions that are uniform on the
    sphere have mean 0 and second moment 1/d. As it is deployed, each side is spread by itself: pass
    it twice. `paired` and `group` are as in `mean_square`; with groups, the mean over them.
    """
    _check(u, v, paired)
    u, v = at_least_float32(u), at_least_float32(v)
    if group is not None and group != len(u):
        u, v = _groups(u, v, group, paired)
    count = u.shape[-2] * v.shape[-2] - (u.shape[-2] if paired else 0)
    with torch.autocast(u.device.type, enabled=False):
        first = (u.sum(-2) * v.sum(-2)).sum(-1)
        # A rank's share of the rows, inside a group too.
        ours, theirs = (x[..., split.mine(x.shape[-2]), :] for x in (u, v))
        if max(u.shape[-2], v.shape[-2]) < 2 * u.shape[-1]:
            second = split.summed((ours @ v.mT).square().sum((-2, -1)))
        else:
            grams = (split.summed(x.mT @ x) for x in (ours, theirs))
            second = torch.mul(*grams).sum((-2, -1))
        if paired:
            positives = (u * v).sum(-1)
            first, second = first - positives.sum(-1), second - positives.square().sum(-1)
    return ((first / count).square() + (second / count - 1 / u.shape[-1]).relu()).mean()


def _groups(u: Tensor, v: Tensor, group: int, paired: bool) -> list[Tensor]:
    """Both sides as blocks of `group` rows, in order."""
    if not paired or group < 2 or len(u) % group:
        raise ValueError(
            f"Expected aligned pairs in groups of at least 2 that fill the batch, got {len(u)} and "
            f"{len(v)} rows in groups of {group}. Use a size that divides the batch."
        )
    return [x.unflatten(0, (-1, group)) for x in (u, v)]


def _mean_square_in_groups(
    u: Tensor, v: Tensor, shift: float, group: int, paired: bool, split: Split
) -> Tensor:
    """All groups at once while a group's scores are few; large groups one after the other."""
    u, v = _groups(u, v, group, paired)
    if group >= 2 * u.shape[-1]:
        values = [mean_square(a, b, shift, split=split) for a, b in zip(u, v, strict=True)]
        return torch.stack(values).mean()
    count, mine = len(u) * group * (group - 1), split.mine(len(u))
    with torch.autocast(u.device.type, enabled=False):
        squares = (u[mine] @ v[mine].mT + shift).square()
        negatives = squares.sum() - squares.diagonal(dim1=-2, dim2=-1).sum()
    return split.summed(negatives) / count


@torch.no_grad()
def negative_statistics(
    u: Float[Tensor, "m d"], v: Float[Tensor, "k d"], *, paired: bool = True
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Mean and variance (ddof 0) of the negatives' similarities u_i . v_j, in float64.

    With both sides centred, u_i . v_j minus the product of the means is a short vector product
    again, the mean terms being two more columns. So nearly collapsed embeddings, whose variance a
    difference of raw sums would drown in rounding, keep their digits.
    """
    u, v = u.double(), v.double()
    mean_u, mean_v = u.mean(0), v.mean(0)
    u, v = u - mean_u, v - mean_v
    one_u, one_v = u.new_ones(len(u), 1), v.new_ones(len(v), 1)
    u, v = (
        torch.cat([u, u @ mean_v[:, None], one_u], 1),
        torch.cat([v, one_v, v @ mean_u[:, None]], 1),
    )
    second = mean_square(u, v, paired=paired)
    first = u.sum(0) @ v.sum(0)
    if paired:
        first = first - torch.linalg.vecdot(u, v).sum()
    mean = first / _count(u, v, paired)
    return mean_u @ mean_v + mean, (second - mean**2).clamp_min(0)


def _plain_mean_square(u: Tensor, v: Tensor, shift: float, paired: bool) -> Tensor:
    """The definition, from Gram matrices, for torch.func and for second derivatives."""
    total = ((u.T @ u) * (v.T @ v)).sum() + 2 * shift * (u.sum(0) * v.sum(0)).sum()
    total = total + len(u) * len(v) * shift**2
    if paired:
        total = total - (row_products(u, v) + shift).square().sum()
    return total / _count(u, v, paired)


def _plain_gradients(ctx, upstream: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients as functions of u and v: with create_graph they are differentiated again."""
    # Views, because one tensor may be both sides, and each wants its own part.
    sides, needed = [x.view_as(x) for x in ctx.saved_tensors[:2]], ctx.needs_input_grad[:2]
    wanted = [x for x, need in zip(sides, needed, strict=True) if need]
    with outside_autocast(upstream):
        value = _plain_mean_square(sides[0], sides[1], ctx.shift, ctx.paired)
        found = iter(torch.autograd.grad(value, wanted, upstream, create_graph=True))
    return *(next(found) if need else None for need in needed), None, None, None


class _FromGrams(torch.autograd.Function):
    """O(m d**2): the sum of squares is <U'U, V'V> plus what the shift adds, minus the diagonal."""

    @staticmethod
    def forward(ctx, u, v, shift, paired, split):
        ours, theirs = split.share_of(u), split.share_of(v)
        with outside_autocast(u, split.precision):
            gram_u = split.sum_(ours.T @ ours)
            gram_v = gram_u if v is u else split.sum_(theirs.T @ theirs)
            sum_u, sum_v = u.sum(0), v.sum(0)
            total = torch.dot(gram_u.flatten(), gram_v.flatten()) + 2 * shift * (sum_u @ sum_v)
            total += len(u) * len(v) * shift**2
            positives = torch.linalg.vecdot(u, v).add_(shift)[:, None] if paired else None
            if positives is not None:
                total -= positives.square().sum()
        _keep(ctx, shift, paired, split, u, v, gram_u, gram_v, sum_u, sum_v, positives)
        return total / ctx.count

    @staticmethod
    def backward(ctx, *grad_outputs):
        if torch.is_grad_enabled():
            return _plain_gradients(ctx, grad_outputs[0])
        u, v, gram_u, gram_v, sum_u, sum_v, positives = ctx.saved_tensors
        split, weight = ctx.split, 2 * ctx.split.count * grad_outputs[0] / ctx.count
        ours, theirs = split.share_of(u), split.share_of(v)
        of_pairs = None if positives is None else weight * split.share_of(positives)

        def gradient(x: Tensor, own: Tensor, other: Tensor, gram: Tensor, mean: Tensor) -> Tensor:
            with outside_autocast(u, split.precision):
                part = torch.addmm(weight * ctx.shift * mean, own, weight * gram)
            if of_pairs is not None:
                part.addcmul_(of_pairs, other, value=-1)
            return _among(part, x, split)

        of_u, of_v = ctx.needs_input_grad[:2]
        grad_u = gradient(u, ours, theirs, gram_v, sum_v) if of_u else None
        grad_v = gradient(v, theirs, ours, gram_u, sum_u) if of_v else None
        return grad_u, grad_v, None, None, None


class _FromProduct(torch.autograd.Function):
    """O(m**2 d), for fewer rows than twice the width: the score matrix itself, which is small."""

    @staticmethod
    def forward(ctx, u, v, shift, paired, split):
        with outside_autocast(u, split.precision):
            scores = (split.share_of(u) @ v.T).add_(shift)
            if paired:
                scores.diagonal(split.mine(len(u)).start).zero_()
            total = split.sum_(torch.dot(scores.flatten(), scores.flatten()))
        _keep(ctx, shift, paired, split, u, v, scores)
        return total / ctx.count

    @staticmethod
    def backward(ctx, *grad_outputs):
        if torch.is_grad_enabled():
            return _plain_gradients(ctx, grad_outputs[0])
        u, v, scores = ctx.saved_tensors
        split, (of_u, of_v) = ctx.split, ctx.needs_input_grad[:2]
        scores = scores * (2 * split.count * grad_outputs[0] / ctx.count)
        with outside_autocast(u, split.precision):
            grad_u = _among(scores @ v, u, split) if of_u else None
            grad_v = scores.T @ split.share_of(u) if of_v else None
        return grad_u, grad_v, None, None, None


def _keep(ctx, shift: float, paired: bool, split: Split, u: Tensor, v: Tensor, *found) -> None:
    """What both ways back need; a side that takes no gradient, such as a queue, gets none."""
    ctx.save_for_backward(u, v, *found)
    ctx.shift, ctx.paired, ctx.split, ctx.count = shift, paired, split, _count(u, v, paired)


def _among(part: Tensor, all_rows: Tensor, split: Split) -> Tensor:
    """A rank's rows among those of all, the others' zero."""
    if split.count == 1:
        return part
    whole = torch.zeros_like(all_rows)
    whole[split.mine(len(all_rows))] = part
    return whole


def _count(u: Tensor, v: Tensor, paired: bool) -> int:
    return len(u) * len(v) - (len(u) if paired else 0)


def _check(u: Tensor, v: Tensor, paired: bool) -> None:
    if not (u.is_floating_point() and v.is_floating_point()):
        raise ValueError(
            f"Expected floating-point embeddings, got {u.dtype} and {v.dtype}. Use .float()."
        )
    if u.ndim != 2 or v.ndim != 2 or u.shape[1] != v.shape[1]:
        raise ValueError(
            f"Expected two matrices of one width, got {tuple(u.shape)} and {tuple(v.shape)}."
        )
    if paired and len(u) != len(v):
        raise ValueError(
            f"Expected as many rows on both sides, got {len(u)} and {len(v)}. "
            "Use paired=False for a queue or a gallery."
        )
    if (paired and len(u) < 2) or not len(u) or not len(v):
        raise ValueError(
            f"Expected at least one negative, got {len(u)} and {len(v)} rows. Use a larger batch."
        )
