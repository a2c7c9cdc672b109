"""Contrastive losses on two sides that a cell has already shrunk. `temperature` divides.

Each loss has a dense definition, `_dense_*`, to read first: a few lines on the whole score matrix
(that of `info_nce` has its gradients beside it, in `offsphere.streamed`).
It also serves small batches. Others are streamed: the same value and gradients, without keeping the
score matrix; `offsphere.streamed.path` decides. All are float32 or better, under autocast too.

`largest` bounds the scores' size, if the caller knows it (unit rows: 1 / temperature): on an
accelerator, which is not to be waited for, it saves the search for each row's maximum. `split`
shares the work among ranks that all have the rows of all (`offsphere.split`).

Aligned pairs (row i of left belongs to row i of right): `info_nce`, `siglip`, `spectral`, and the
first two with within-view negatives: `info_nce_within`, `siglip_within`.
Stacked views (z = cat(view_a, view_b); left, right = cell(z, z)): `nt_xent`, `dcl`, `dhel`.
Query, key and queue: `moco_nce`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from offsphere import streamed
from offsphere.ids import check_ids, mean_positives
from offsphere.precision import at_least_float32, compiling, row_products, transformed
from offsphere.split import ALONE, Split
from offsphere.streamed import (
    NonFinite as NonFinite,
)
from offsphere.streamed import (
    bad_temperature,
    dense_pairs,
    largest_norm,
    log_partitions,
    scores_bound,
    softplus_sum,
)
from offsphere.variance import mean_square

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


def info_nce(
    left: Float[Tensor, "n d"],
    right: Float[Tensor, "m d"],
    temperature: float | Tensor,
    *,
    both_ways: bool = True,
    hard_negatives: Float[Tensor, "k d"] | None = None,
    ids: Int[Tensor, " columns"] | None = None,
    false_negatives: Literal["keep", "mask", "positive"] = "mask",
    largest: float = math.inf,
    split: Split = ALONE,
) -> Float[Tensor, ""]:
    """InfoNCE on aligned pairs: each left row finds its right row and, `both_ways`, the reverse.

    `hard_negatives`, in the right side's form, are seen by every left row, left to right only.
    One-way, `right` may be longer than `left`: the further rows are negatives too.

    `ids`, a whole number for each right row and hard negative (left row i has that of right row i),
    say what is the same thing: five captions of one picture, equal texts. Row i and column j with
    one id, j not i, are false negatives. With s = scores / temperature and P(i) = {j: id_j = id_i},

        mask       row i costs log(e^s_ii + sum of e^s_ij over j outside P(i)) - s_ii
        positive   row i costs log(sum of e^s_ij over all j) - mean of s_ij over P(i)

    and a column likewise. The second is SupCon's L_out, and cross-entropy with UniCL's targets.
    """
    sides = (left, right) if hard_negatives is None else (left, right, hard_negatives)
    n, width = left.shape[0], sum(x.shape[0] for x in sides[1:])
    same = None if ids is None else check_ids(ids, width, false_negatives, left.device)
    same = None if false_negatives == "keep" else same
    several, columns = same if false_negatives == "positive" else None, n if both_ways else 0
    small = same is None and streamed.dense(left, width, split)
    sides, t, largest = _prepare(temperature, *sides, largest=largest, looks=not small)
    left, right, *hard = sides
    if len(right) < n or (both_ways and len(right) != n):
        raise _sizes(left, right, "as many right rows as left rows (one-way: at least as many)")
    right = torch.cat([right, *hard]) if hard else right
    if width < 2:
        raise _too_few(n)
    weight = 1 / (n + columns)
    if small and not _unseen(left):
        value = dense_pairs(left, right, t, weight, columns)
        if not math.isfinite(value.item()):
            for x in sides:
                largest_norm(x)
        return value
    value = log_partitions(
        left,
        right,
        t,
        weight=weight,
        positive=(0,) if several is None else (),
        columns=columns,
        ids=same if several is None else None,
        largest=largest,
        split=split,
    )
    if several is None:
        return value
    means = mean_positives(left, right, several)
    if both_ways:
        means = means + mean_positives(right[:n], left, several[:n])
    return value - means / t / (n + columns)


def info_nce_within(
    left: Float[Tensor, "n d"],
    right: Float[Tensor, "n d"],
    temperature: float | Tensor,
    *,
    both_ways: bool = True,
    largest: float = math.inf,
    split: Split = ALONE,
) -> Float[Tensor, ""]:
    """InfoNCE whose rows also have the other rows of their own side as negatives.

    Both ways it is `nt_xent` where each side keeps its own form as row and as candidate.
    """
    (left, right, _), t, largest = _prepare(temperature, left, right, left, largest=largest)
    _check_pairs(left, right)
    if both_ways:
        stacked = torch.cat([left, right])
        return nt_xent(stacked, stacked, t, largest=largest, split=split)
    n, candidates = len(left), torch.cat([right, left])
    small = _small(left, candidates, split)
    return log_partitions(
        left,
        candidates,
        t,
        weight=1 / n,
        exclude=(n,),
        positive=(0,),
        largest=largest,
        split=split,
        found=_dense_info_nce_within(left / t, candidates) if small else None,
    )


def nt_xent(
    left: Float[Tensor, "views d"],
    right: Float[Tensor, "views d"],
    temperature: float | Tensor,
    *,
    largest: float = math.inf,
    split: Split = ALONE,
) -> Float[Tensor, ""]:
    """SimCLR's loss: each view finds its partner among all 2n - 1 other views."""
    left, right, t, largest = _prepare_views(left, right, temperature, largest)
    n = len(left) // 2
    found = _dense_views(left / t, right, ~_same(left)) if _small(left, right, split) else None
    how = {"exclude": (0,), "positive": (n, -n)}
    return _stream_views(left, right, t, largest, split, **how, found=found)


def dcl(
    left: Float[Tensor, "views d"],
    right: Float[Tensor, "views d"],
    temperature: float | Tensor,
    *,
    largest: float = math.inf,
    split: Split = ALONE,
) -> Float[Tensor, ""]:
    """Decoupled contrastive loss: as nt_xent, with the positive left out of the log-sum-exp."""
    left, right, t, largest = _prepare_views(left, right, temperature, largest)
    n = len(left) // 2
    if _small(left, right, split):
        return _dense_views(left / t, right, ~_same(left) & ~_same(left).roll(n, 0))
    return _stream_views(left, right, t, largest, split, exclude=(0, n, -n), positive=(n, -n))


def dhel(
    left: Float[Tensor, "views d"],
    right: Float[Tensor, "views d"],
    temperature: float | Tensor,
    *,
    largest: float = math.inf,
    split: Split = ALONE,
) -> Float[Tensor, ""]:
    """Decoupled hyperspherical energy loss: the negatives are the other rows of the same view."""
    left, right, t, largest = _prepare_views(left, right, temperature, largest)
    n = len(left) // 2
    if _small(left, right, split):
        view = torch.arange(2 * n, device=left.device) // n
        return _dense_views(left / t, right, ~_same(left) & (view[:, None] == view))
    positives = row_products(left, right.roll(n, 0)) / t
    energies = [
        _stream_views(a, a if right is left else b, t, largest, split, exclude=(0,), positive=())
        for a, b in zip(left.split(n), right.split(n), strict=True)
    ]
    return (energies[0] + energies[1]) / 2 - positives.mean()


def moco_nce(
    query: Float[Tensor, "n d"],
    key: Float[Tensor, "n d"],
    queue: Float[Tensor, "k d"],
    temperature: float | Tensor,
    *,
    largest: float = math.inf,
    split: Split = ALONE,
) -> Float[Tensor, ""]:
    """MoCo's loss: each query finds its key among the queue; key and queue are the right side."""
    (query, key, queue), t, largest = _prepare(temperature, query, key, queue, largest=largest)
    if len(query) != len(key):
        raise _sizes(query, key, "as many keys as queries")
    if not len(queue):
        raise ValueError("Expected a queue of at least one key, got an empty one. Fill it first.")
    positive = row_products(query, key) / t
    return log_partitions(
        query,
        queue,
        t,
        weight=1 / len(query),
        own=positive,
        largest=largest,
        split=split,
        found=_dense_moco(query / t, queue, positive) if _small(query, queue, split) else None,
    )


def siglip(
    left: Float[Tensor, "n d"],
    right: Float[Tensor, "n d"],
    temperature: float | Tensor,
    bias: float | Tensor,
    *,
    split: Split = ALONE,
) -> Float[Tensor, ""]:
    """SigLIP's loss on logits s/temperature + bias: the sum over columns, the mean over rows."""
    (left, right), t, _ = _prepare(temperature, left, right)
    if len(right) != len(left):
        raise _sizes(left, right, "as many right rows as left rows")
    bias = one_value(bias, "bias", left)
    if _small(left, right, split):
        return _dense_siglip(left / t, right, bias)
    return softplus_sum(left, right, t, bias, weight=1 / len(left), split=split)


def siglip_within(
    left: Float[Tensor, "n d"],
    right: Float[Tensor, "n d"],
    temperature: float | Tensor,
    bias: float | Tensor,
    *,
    split: Split = ALONE,
) -> Float[Tensor, ""]:
    """SigLIP plus half the same negative terms inside each side (Def. 3.2 with c1 = c2 = 1)."""
    sides, t, _ = _prepare(temperature, left, right)
    _check_pairs(left, right)
    value = siglip(left, right, t, bias, split=split)
    for side in sides:
        # A side beside itself has its diagonal as positives, which are no pairs here.
        positives = -F.logsigmoid(row_products(side, side) / t + bias)
        value = value + (siglip(side, side, t, bias, split=split) - positives.mean()) / 2
    return value


def spectral(
    left: Float[Tensor, "n d"],
    right: Float[Tensor, "n d"],
    *,
    group: int | None = None,
    split: Split = ALONE,
) -> Float[Tensor, ""]:
    """Spectral contrastive loss, -mean s_ii + mean over i != j of s_ij**2, from Gram matrices.

    `group` is as in `mean_square`: only rows of the same group are negatives.
    """
    (left, right), _, _ = _prepare(1.0, left, right)
    return mean_square(left, right, group=group, split=split) - row_products(left, right).mean()


def in_groups(
    loss: Callable[[Tensor, Tensor], Tensor],
    left: Float[Tensor, "n d"],
    right: Float[Tensor, "n d"],
    size: int,
    *,
    stacked: bool = False,
    split: Split = ALONE,
) -> Float[Tensor, ""]:
    """The mean of loss(left, right) over groups of `size` rows: other groups' are no negatives.

    Groups follow the order of the rows; of `stacked` views a group has its rows of both. Small
    groups are computed side by side, as one batch of dense blocks; large ones, which the losses
    stream, one after the other.
    """
    # One look at all rows, because vmap allows none inside; equal sides stay one tensor.
    sides, _, _ = _prepare(1.0, left, *(() if right is left else (right,)))
    blocks = [_blocks(x, size, stacked) for x in sides]

    def one(*group: Tensor) -> Tensor:
        return loss(group[0], group[-1])

    with torch.autocast(left.device.type, enabled=False):
        count, mine = len(blocks[0]), [x[split.mine(len(x))] for x in blocks]
        if not len(mine[0]):
            # Without a group of its own a rank adds zero, with a gradient for every parameter.
            values = 0 * one(*(x[0] for x in blocks)).reshape(1)
        elif (2 * size) ** 2 <= streamed.DENSE_SCORES:
            values = torch.vmap(one)(*mine)
        else:
            values = torch.stack([one(*group) for group in zip(*mine, strict=True)])
    return values.mean() if split.count == 1 else split.summed(values.sum()) / count


def _blocks(x: Tensor, size: int, stacked: bool) -> Float[Tensor, "g k d"]:
    views = 2 if stacked else 1
    if len(x) % (views * size):
        raise ValueError(
            f"Expected groups that fill the batch, got {len(x) // views} rows in groups of {size}. "
            "Use a size that divides the batch."
        )
    return x.unflatten(0, (views, -1, size)).transpose(0, 1).flatten(1, 2)


# The definitions. `left` has been divided by the temperature.


def _dense_info_nce_within(left: Tensor, candidates: Float[Tensor, "views d"]) -> Tensor:
    scores = left @ candidates.T
    itself = _same(candidates)[len(left) :]
    return (scores.masked_fill(itself, -math.inf).logsumexp(1) - scores.diagonal()).mean()


def _dense_views(left: Tensor, right: Tensor, candidates: Bool[Tensor, "views views"]) -> Tensor:
    scores = left @ right.T
    n = len(scores) // 2
    positive = torch.cat([scores.diagonal(n), scores.diagonal(-n)])
    return (scores.masked_fill(~candidates, -math.inf).logsumexp(1) - positive).mean()


def _dense_moco(query: Tensor, queue: Tensor, positive: Float[Tensor, " n"]) -> Tensor:
    scores = torch.cat([positive[:, None], query @ queue.T], 1)
    return (scores.logsumexp(1) - positive).mean()


def _dense_siglip(left: Tensor, right: Tensor, bias: Tensor) -> Tensor:
    logits = left @ right.T + bias
    sign = 2.0 * torch.eye(*logits.shape, dtype=logits.dtype, device=logits.device) - 1
    return -F.logsigmoid(sign * logits).sum() / len(left)


def _same(rows: Tensor) -> Bool[Tensor, "n n"]:
    return torch.eye(len(rows), dtype=torch.bool, device=rows.device)


def _small(left: Tensor, right: Tensor, split: Split) -> bool:
    """Whether the dense definition serves."""
    return streamed.path(left, right, split) == "dense"


def _stream_views(
    left: Tensor,
    right: Tensor,
    temperature: float | Tensor,
    largest: float,
    split: Split,
    exclude: tuple[int, ...],
    positive: tuple[int, ...],
    found: Tensor | None = None,
) -> Tensor:
    return log_partitions(
        left,
        None if right is left else right,
        temperature,
        weight=1 / len(left),
        exclude=exclude,
        positive=positive,
        largest=largest,
        split=split,
        found=found,
    )


# Checks.


def _prepare_views(
    left: Tensor, right: Tensor, temperature: float | Tensor, largest: float
) -> tuple[Tensor, Tensor, float | Tensor, float]:
    """As `_prepare`; equal sides stay one tensor."""
    same = right is left
    sides = (left,) if same else (left, right)
    sides, temperature, largest = _prepare(temperature, *sides, largest=largest)
    left, right = sides[0], sides[-1]
    if len(left) != len(right) or len(left) % 2:
        raise _sizes(left, right, "two stacked views on both sides: an even, equal number of rows")
    if len(left) < 4:
        raise _too_few(len(left) // 2)
    return left, right, temperature, largest


def _prepare(
    temperature: float | Tensor,
    left: Tensor,
    *others: Tensor,
    largest: float = math.inf,
    looks: bool = True,
) -> tuple[list[Tensor], float | Tensor, float]:
    """Checked sides in float32 or better, the temperature, and a bound of |scores|.

    The bound is that of Cauchy and Schwarz. It costs one look at the norms, which also finds what
    is not finite. On an accelerator the look would wait for the device, and under torch.func there
    is nothing to look at, so there the bound is the caller's, a temperature that is not above 0
    makes the loss NaN, and the training loop checks the loss.
    A caller that looks at the loss instead (not `looks`) gets an infinite bound.
    """
    check_sides(left, *others)
    if not len(left):
        raise _too_few(0)
    sides = [at_least_float32(x) for x in (left, *others)]
    if _unseen(left):
        # A number stays one: it needs no kernel, and nobody has to ask the device for it.
        if isinstance(temperature, Tensor):
            temperature = one_value(temperature, "temperature", sides[0])
            temperature = F.threshold(temperature, 0.0, math.nan)  # one kernel: NaN unless above 0
        elif not 0 < temperature < math.inf:
            raise bad_temperature(temperature)
        return sides, temperature, largest
    temperature = one_value(temperature, "temperature", sides[0])
    # A bad temperature is looked into: embeddings that are not finite are named first.
    if looks or not 0 < temperature.item() < math.inf:
        return sides, temperature, scores_bound(temperature, *sides)
    return sides, temperature, math.inf


def _unseen(x: Tensor) -> bool:
    """Whether values cannot be looked at now, or only by waiting for the device."""
    return x.device.type not in streamed.TILED_DEVICES or compiling() or transformed()


def check_sides(*sides: Tensor) -> None:
    """Refuse what is not a matrix of numbers of one width and, half precision apart, one dtype."""
    first = sides[0]
    for x in sides:
        if not x.is_floating_point():
            raise ValueError(f"Expected floating-point embeddings, got {x.dtype}. Use .float().")
        if x.ndim != 2 or x.shape[1] != first.shape[1]:
            raise ValueError(
                f"Expected matrices of one width, got {tuple(first.shape)} and {tuple(x.shape)}. "
                "Give every side the same number of features, one row for each sample."
            )
        if (x.dtype == torch.float64) != (first.dtype == torch.float64):
            raise ValueError(
                f"Expected embeddings of one dtype, got {first.dtype} and {x.dtype}. "
                "Convert one side with .to()."
            )


def one_value(value: float | Tensor, name: str, like: Tensor) -> Float[Tensor, ""]:
    """The number as a tensor of `like`'s dtype and device; refused if it is several numbers."""
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"Expected one {name}, got {value.numel()} values. Use one for all rows.")
    if not isinstance(value, Tensor) and like.device.type != "cpu":
        return like.new_full((), value)  # written there: a copy from here would wait for the device
    if not isinstance(value, Tensor):
        return torch.scalar_tensor(value, dtype=like.dtype)
    value = value.to(like)
    return value if value.ndim == 0 else value.reshape(())


def _check_pairs(left: Tensor, right: Tensor) -> None:
    if len(left) != len(right):
        raise _sizes(left, right, "as many right rows as left rows")
    if len(left) < 2:
        raise _too_few(len(left))


def _sizes(left: Tensor, right: Tensor, expected: str) -> ValueError:
    return ValueError(f"Expected {expected}, got {len(left)} and {len(right)}.")


def _too_few(n: int) -> ValueError:
    return ValueError(
        f"Expected at least 2 pairs, because a batch of {n} has no negatives. Use a larger batch "
        "(and drop_last=True in the loader)."
    )
