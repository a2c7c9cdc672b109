"""What embeddings look like: norms, alignment, uniformity, modality gap, hubness, rank, isotropy.

Every function takes raw embeddings and returns 0-d tensors (or a dict of them) without reading a
value back from the device, so that training can call the cheap ones every few steps; only
`batch_numbers`, which a logged step calls, reads them all.
A correlation with something constant is undefined and comes back as NaN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from offsphere.cells import shrink
from offsphere.run.progress import track
from offsphere.variance import negative_statistics

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Float, Int

QUANTILES = (0.05, 0.25, 0.50, 0.75, 0.95)
RESOLUTION = 1e-6
"""A smaller spread, over the scale of the values, is rounding: no correlation is told from it."""


def norm_statistics(x: Float[Tensor, "n d"]) -> dict[str, Float[Tensor, ""]]:
    """Mean, population std, CV = std / mean and the 5/25/50/75/95 % quantiles of the row norms."""
    norms = x.detach().norm(dim=-1).float()
    std, mean = torch.std_mean(norms, correction=0)
    levels = torch.tensor(QUANTILES, device=norms.device)
    quantiles = _quantiles(norms, levels)
    named = {f"q{round(100 * q):02d}": quantiles[i] for i, q in enumerate(QUANTILES)}
    tiny = torch.finfo(norms.dtype).tiny
    return {"mean": mean, "std": std, "cv": std / mean.clamp_min(tiny), **named}


def side_norms(**sides: Float[Tensor, "n d"]) -> dict[str, float]:
    """norm_<side>_mean and norm_<side>_cv of each side, as every lane reports them."""
    found = {name: norm_statistics(x) for name, x in sides.items()}
    return {f"norm_{name}_{k}": x[k].item() for name, x in found.items() for k in ("mean", "cv")}


def cohens_d(a: Float[Tensor, " n"], b: Float[Tensor, " m"]) -> Float[Tensor, ""]:
    """(mean a - mean b) / pooled SD, the pooled SD with n + m - 2 degrees of freedom (ddof 1)."""
    if min(len(a), len(b)) < 1 or len(a) + len(b) < 3:
        raise ValueError(
            f"Cohen's d needs two non-empty groups and three values in all, got {len(a)} and "
            f"{len(b)}: pass the norms of both groups."
        )
    a, b = a.detach().double(), b.detach().double()
    mean_a, mean_b = a.mean(), b.mean()
    squares = (a - mean_a).square().sum() + (b - mean_b).square().sum()
    return (mean_a - mean_b) / (squares / (len(a) + len(b) - 2)).sqrt()


def alignment(
    left: Float[Tensor, "n d"], right: Float[Tensor, "n d"], alpha: float = 2.0
) -> Float[Tensor, ""]:
    """Mean |u - v|^alpha over the unit vectors of the positive pairs (Wang and Isola 2020)."""
    _check_pairs(left, right)
    distance = (unit(left) - unit(right)).norm(dim=-1)
    return distance.pow(alpha).mean()


def uniformity(x: Float[Tensor, "n d"], t: float = 2.0, tile: int = 2048) -> Float[Tensor, ""]:
    """log mean exp(-t |u - u'|^2) over the distinct pairs of unit vectors (Wang and Isola 2020)."""
    if len(x) < 2:
        raise ValueError(f"uniformity needs at least two rows, got {len(x)}.")
    u = unit(x)
    total = u.new_full((), -torch.inf)
    for start in range(0, len(u), tile):
        rows = u[start : start + tile]
        cosine = rows @ u[start:].T
        above = torch.ones_like(cosine, dtype=torch.bool).triu_(1)
        exponent = ((2 * t) * (cosine - 1)).masked_fill_(~above, -torch.inf)
        total = torch.logaddexp(total, exponent.flatten().logsumexp(0))
    return total - total.new_full((), len(u) * (len(u) - 1) / 2).log()


def modality_gap(
    left: Float[Tensor, "n d"], right: Float[Tensor, "m d"]
) -> dict[str, Float[Tensor, ""]]:
    """Distance of the two centroids, of unit vectors (Liang et al. 2022) and raw, and norm ratio.

    The norm ratio is the mean norm of the left side over that of the right side.
    """
    _check_width(left, right)
    left, right = left.detach(), right.detach()
    return {
        "gap": (unit(left).mean(0) - unit(right).mean(0)).norm(),
        "gap_raw": (left.mean(0) - right.mean(0)).norm(),
        "norm_ratio": left.norm(dim=-1).mean() / right.norm(dim=-1).mean(),
    }


def hubness(
    queries: Float[Tensor, "q d"],
    items: Float[Tensor, "n d"],
    k: int = 10,
    *,
    item_exponent: float = 1.0,
) -> dict[str, Float[Tensor, ""]]:
    """How unevenly the items share the k-nearest lists of the queries (Radovanovic et al. 2010).

    The score is q . d / |d|**item_exponent: a query's own norm cannot change its list.
    """
    _, nearest = top_items(queries, shrink(items.detach(), float(item_exponent)), k)
    occurrence = torch.bincount(nearest.flatten(), minlength=len(items))
    return occurrence_statistics(occurrence, items.detach().norm(dim=-1))


def occurrence_statistics(
    occurrence: Int[Tensor, " n"], item_norms: Float[Tensor, " n"]
) -> dict[str, Float[Tensor, ""]]:
    """Skewness, Robin Hood index, anti-hub rate and hub shares of the k-occurrence counts N_k.

    A hub has N_k of at least twice the mean (2k, if there are as many queries as items).
    """
    counts = occurrence.double()
    mean, slots = counts.mean(), counts.sum()
    centred = counts - mean
    std = centred.square().mean().sqrt()
    statistics = {
        "skewness": torch.where(std > 0, centred.pow(3).mean() / std.pow(3), torch.zeros_like(std)),
        "robin_hood": centred.abs().sum() / (2 * slots),
        "antihub_rate": (counts == 0).double().mean(),
        "hub_share": (counts * (counts >= 2 * mean)).sum() / slots,
        "largest_hub_share": counts.max() / slots,
    }
    norms = item_norms.double()
    statistics["norm_correlation"] = _pearson(norms / norms.mean(), counts)
    return {name: value.float() for name, value in statistics.items()}


def rankme(x: Float[Tensor, "n d"]) -> Float[Tensor, ""]:
    """exp of the entropy of the singular values' shares p + 1e-7, not centred (RankMe, 2210.02885).

    For the rank of the directions alone pass `unit(x)`. The singular values are the roots of the
    smaller Gram matrix's eigenvalues, in float64.
    """
    x = x.detach().double()
    gram = x.T @ x if len(x) > x.shape[1] else x @ x.T
    singular = torch.linalg.eigvalsh(gram).clamp_min(0).sqrt()
    share = singular / singular.sum().clamp_min(torch.finfo(singular.dtype).tiny) + 1e-7
    return (-(share * share.log()).sum()).exp()


def isotropy(x: Float[Tensor, "n d"]) -> dict[str, Float[Tensor, ""]]:
    """IsoScore (Rudman et al. 2022) and the mean cosine of distinct pairs (Ethayarajh 2019).

    IsoScore is 1 for a covariance with equal eigenvalues and 0 for one direction; its six steps
    come down to (p - 1) / (d - 1) with p = tr(C)^2 / tr(C^2), so no eigenvalues are needed. The
    mean cosine over all pairs comes from the sum of the unit vectors.
    """
    n, d = x.shape
    if n < 2 or d < 2:
        raise ValueError(f"isotropy needs at least 2 rows and 2 columns, got {n} x {d}.")
    x = x.detach().float()
    centred = x - x.mean(0)
    gram = centred.T @ centred if n > d else centred @ centred.T
    trace = gram.diagonal().sum()
    tiny = torch.finfo(x.dtype).tiny
    participation = (trace / gram.norm().clamp_min(tiny)).square().clamp_min(1)
    u = unit(x)
    mean_cosine = (u.sum(0).square().sum() - u.square().sum()) / (n * (n - 1))
    return {"isoscore": (participation - 1) / (d - 1), "mean_cosine": mean_cosine}


def anisotropy(x: Float[Tensor, "n d"]) -> dict[str, Float[Tensor, ""]]:
    """How much of the energy lies in the common mean, and of the variance in one direction.

    `mean_share` is |mean x|^2 / mean |x|^2, what centring takes away; `top_share` is the largest
    principal component's share of the variance. Both are ours as measures of a whole set; the mean
    cosine of `isotropy` is the published one. Rows that do not vary have no `top_share` (NaN), and
    zeros have neither.
    """
    n, d = x.shape
    if n < 2 or d < 2:
        raise ValueError(f"anisotropy needs at least 2 rows and 2 columns, got {n} x {d}.")
    x = x.detach().double()
    mean = x.mean(0)
    centred = x - mean
    gram = centred.T @ centred if n > d else centred @ centred.T
    energy, scatter = x.square().sum(), gram.diagonal().sum()
    mean_share = n * mean.square().sum() / energy
    top_share = torch.linalg.eigvalsh(gram)[-1] / scatter
    top_share = torch.where(scatter > 1e-12 * energy, top_share, torch.nan)
    return {"mean_share": mean_share.float(), "top_share": top_share.float()}


def log_norm_cosine_correlation(
    left: Float[Tensor, "n d"], right: Float[Tensor, "n d"]
) -> Float[Tensor, ""]:
    """Pearson correlation of log(|q| |d|) with cos(q, d) on positive pairs (PACE's diagnostic)."""
    _check_pairs(left, right)
    left, right = left.detach().double(), right.detach().double()
    tiny = torch.finfo(torch.float32).tiny
    log_norms = left.norm(dim=-1).clamp_min(tiny).log() + right.norm(dim=-1).clamp_min(tiny).log()
    return _pearson(log_norms, (unit(left) * unit(right)).sum(-1)).float()


def top_items(
    queries: Float[Tensor, "q d"],
    items: Float[Tensor, "n d"],
    k: int,
    *,
    exclude: Int[Tensor, " q"] | None = None,
    query_tile: int = 1024,
    item_tile: int = 8192,
) -> tuple[Float[Tensor, "q k"], Int[Tensor, "q k"]]:
    """Scores and indices of each query's k items of largest dot product, best first.

    The score matrix is visited in tiles. `exclude` names one item per query that does not count.
    """
    _check_width(queries, items)
    available = len(items) - (exclude is not None)
    if not 1 <= k <= available:
        raise ValueError(
            f"k = {k} neighbours were asked for, but there are {available} items to choose from: "
            "use a k from 1 to that number, or more items."
        )
    dtype = torch.promote_types(queries.dtype, items.dtype)
    queries, items = queries.detach().to(dtype), items.detach().to(dtype)
    scores, indices = [], []
    starts = range(0, len(queries), query_tile)
    for start in track(starts, len(starts), "neighbours", unit="tiles"):
        rows = slice(start, start + query_tile)
        own = None if exclude is None else exclude[rows]
        best = _top_items_of_tile(queries[rows], items, k, own, item_tile)
        scores.append(best[0])
        indices.append(best[1])
    return torch.cat(scores), torch.cat(indices)


def unit(x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d"]:
    """The rows at norm 1; a zero row stays zero."""
    return shrink(x.detach(), 1.0)


@torch.no_grad()
def batch_numbers(
    left: Float[Tensor, "n d"],
    right: Float[Tensor, "n d"],
    exponents: Sequence[float | Tensor],
    temperature: float | Tensor | None,
) -> dict[str, float]:
    """What a logged step says of its batch of raw embeddings, as plain numbers by name."""
    u, v = unit(left.float()), unit(right.float())
    mean, variance = negative_statistics(u, v)
    numbers: dict[str, Tensor | float] = {
        "negative_mean": mean,
        "negative_variance": variance,
        "alignment": alignment(left, right),
        "uniformity": uniformity(left),
        "rankme": rankme(left),
        "rankme_unit": rankme(u),
    }
    for side, x in (("left", left), ("right", right)):
        for name, value in norm_statistics(x).items():
            numbers[f"norm_{side}_{name}"] = value
    powers = [torch.as_tensor(g, device=left.device) for g in exponents]
    numbers["exponent_left"], numbers["exponent_right"] = powers
    if temperature is not None:
        # The temperature that a row's unit vectors would need for the same logits.
        shrunk = left.norm(dim=1).mean() ** (1 - powers[0])
        shrunk = shrunk * right.norm(dim=1).mean() ** (1 - powers[1])
        numbers["temperature"] = temperature
        numbers["effective_temperature"] = temperature / shrunk
    return {name: float(value) for name, value in numbers.items()}


def _top_items_of_tile(
    queries: Tensor, items: Tensor, k: int, exclude: Tensor | None, item_tile: int
) -> tuple[Tensor, Tensor]:
    scores = queries.new_empty(len(queries), 0)
    indices = torch.empty(len(queries), 0, dtype=torch.long, device=queries.device)
    for start in range(0, len(items), item_tile):
        tile = queries @ items[start : start + item_tile].T
        if exclude is not None:
            columns = torch.arange(start, start + tile.shape[1], device=tile.device)
            tile.masked_fill_(columns == exclude[:, None], -torch.inf)
        here = tile.topk(min(k, tile.shape[1]), dim=1)
        scores = torch.cat([scores, here.values], 1)
        indices = torch.cat([indices, here.indices + start], 1)
        kept = scores.topk(min(k, scores.shape[1]), dim=1)
        scores, indices = kept.values, indices.gather(1, kept.indices)
    return scores, indices


def _quantiles(values: Tensor, levels: Tensor) -> Tensor:
    """Linearly interpolated quantiles; torch.quantile refuses more than 16 million values."""
    ordered = values.sort().values
    position = levels * (len(values) - 1)
    below = position.long()
    above = (below + 1).clamp_max(len(values) - 1)
    return torch.lerp(ordered[below], ordered[above], (position - below).to(values.dtype))


def _pearson(a: Tensor, b: Tensor) -> Tensor:
    """Pearson correlation; NaN if either side's spread is below the resolution of its scale."""
    a, b = a - a.mean(), b - b.mean()
    spread = torch.stack([a.square().mean().sqrt(), b.square().mean().sqrt()])
    correlation = (a * b).mean() / spread.prod()
    return torch.where(spread.min() > RESOLUTION, correlation, torch.nan)


def _check_width(left: Tensor, right: Tensor) -> None:
    if left.ndim != 2 or right.ndim != 2 or left.shape[1] != right.shape[1]:
        raise ValueError(
            "Expected two matrices of equal width, got shapes "
            f"{tuple(left.shape)} and {tuple(right.shape)}."
        )


def _check_pairs(left: Tensor, right: Tensor) -> None:
    if left.ndim != 2 or left.shape != right.shape:
        raise ValueError(
            "Expected two matrices of equal shape whose rows are pairs, got shapes "
            f"{tuple(left.shape)} and {tuple(right.shape)}."
        )
