"""The theorems of "On the Similarities of Embeddings in Contrastive Learning", as functions.

Lee, Lim, Lee and Sohn, ICML 2025 (arXiv 2506.09781); the numbers in the docstrings are its own.
n instances have two unit vectors each, u_i and v_i: s_pos are the products u_i . v_i and s_neg
the products u_i . v_j with i != j. Everything is float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import brentq
from torch import Tensor

from offsphere import losses
from offsphere.cells import shrink
from offsphere.names import VIEW_LOSSES
from offsphere.variance import negative_statistics

if TYPE_CHECKING:
    from jaxtyping import Float

Scalar = Callable[[Tensor], Tensor]
"""An elementwise function of one variable, as phi and psi are."""
PairLoss = Callable[[Tensor, Tensor], Tensor]
"""A loss of the two views' unit vectors."""

FULL_BATCH_LOSSES = ("info_nce", "nt_xent", "dcl", "dhel", "siglip", "spectral")


def simplex_etf(n: int) -> Float[Tensor, "n n-1"]:
    """n unit vectors whose products are all -1/(n-1), in n - 1 dimensions."""
    row = torch.arange(1, n, dtype=torch.float64)
    corners = torch.zeros(n, n - 1, dtype=torch.float64)
    corners[:-1] = torch.triu(torch.ones(n - 1, n - 1, dtype=torch.float64))
    corners[1:] -= torch.diag(row)
    corners /= (row * (row + 1)).sqrt()
    return shrink(corners, 1.0)


def positives(u: Float[Tensor, "n d"], v: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
    """s_pos of each instance."""
    return torch.linalg.vecdot(u, v)


def negatives(u: Float[Tensor, "n d"], v: Float[Tensor, "n d"]) -> Float[Tensor, "n n-1"]:
    """s_neg of each instance: row i holds u_i . v_j for the j != i."""
    scores = u @ v.T
    apart = ~torch.eye(len(u), dtype=torch.bool, device=u.device)
    return scores[apart].reshape(len(u), len(u) - 1)


def distance_to_simplex(u: Float[Tensor, "n d"], v: Float[Tensor, "n d"]) -> float:
    """The largest deviation from Thm 5.1's optimum, s_pos = 1 and s_neg = -1/(n-1)."""
    worst = torch.stack(
        [(positives(u, v) - 1).abs().max(), (negatives(u, v) + 1 / (len(u) - 1)).abs().max()]
    )
    return worst.max().item()


def full_batch_loss(name: str, temperature: float, bias: float) -> PairLoss:
    """A loss of `offsphere.losses` on two views of unit vectors; `bias` is SigLIP's own."""
    if name == "siglip":
        return lambda u, v: losses.siglip(u, v, temperature, bias)
    if name == "spectral":
        return losses.spectral
    if name not in VIEW_LOSSES:
        return lambda u, v: losses.info_nce(u, v, temperature)
    of_views = {"nt_xent": losses.nt_xent, "dcl": losses.dcl, "dhel": losses.dhel}[name]

    def on_stacked_views(u: Tensor, v: Tensor) -> Tensor:
        stacked = torch.cat([u, v])
        return of_views(stacked, stacked, temperature)

    return on_stacked_views


def additive_family(phi: Scalar, psi: Scalar, *, cross: int, within: int) -> PairLoss:
    """Def. 3.2: -mean phi(s_pos) + c1 mean psi(s_neg) + c2 mean psi of within-view negatives."""

    def loss(u: Tensor, v: Tensor) -> Tensor:
        same_view = (psi(negatives(u, u)).mean() + psi(negatives(v, v)).mean()) / 2
        across = psi(negatives(u, v)).mean()
        return cross * across + within * same_view - phi(positives(u, v)).mean()

    return loss


def siglip_functions(n: int, scale: float, b: float) -> tuple[Scalar, Scalar]:
    """SigLIP's phi and psi for Def. 3.2. The paper's b is minus the bias of SigLIP's own code."""
    return (
        lambda x: -F.softplus(b - scale * x),
        lambda x: (n - 1) * F.softplus(scale * x - b),
    )


def siglip_separates_in_excess(n: int, scale: float, b: float) -> bool:
    """Example 5.4: (1 + exp(t/(n-1) + b)) / (1 + exp(t - b)) < (n - 2) / 2, in logarithms."""
    left = np.logaddexp(0, scale / (n - 1) + b) - np.logaddexp(0, scale - b)
    return n > 2 and bool(left < math.log((n - 2) / 2))


def siglip_threshold(scale: float, b: float) -> int:
    """The smallest n at which SigLIP separates in excess: its condition, once true, stays true."""
    above = 4
    while not siglip_separates_in_excess(above, scale, b):
        above *= 2
    below = 2
    while above - below > 1:
        middle = (above + below) // 2
        if siglip_separates_in_excess(middle, scale, b):
            above = middle
        else:
            below = middle
    return above


def additive_optimum(phi: Scalar, psi: Scalar, n: int) -> tuple[float, float]:
    """(s_pos, s_neg) at the optimum of an additive loss with cross-view negatives only, d >= n.

    With mean s_pos = 1 - 2 x the mean s_neg is at least -1/(n-1) - x (n-2)/(n-1), because
    E[u] . E[v] >= -E|u - v|^2 / 4; two simplices moved apart along a further axis reach that
    (the test has them). By Jensen's inequality the optimum is the best x in [0, 1], a convex
    problem in one variable (our derivation; its solution leaves x = 0 exactly under Thm 5.3).
    """

    def slope(x: float) -> float:
        at_positive, at_negative = _opposed(x, n)
        return 2 * _slope(phi, at_positive) - (n - 2) / (n - 1) * _slope(psi, at_negative)

    if slope(0.0) >= 0:
        return _opposed(0.0, n)
    if slope(1.0) <= 0:
        return _opposed(1.0, n)
    best = float(brentq(slope, 0.0, 1.0, xtol=1e-15))  # pyright: ignore[reportArgumentType]
    return _opposed(best, n)


def slack(u: Float[Tensor, "n d"], v: Float[Tensor, "n d"]) -> float:
    """1 + E[s_neg] + 1/(n-1) - E[s_pos], never negative (Thm 5.2)."""
    means = negatives(u, v).mean() - positives(u, v).mean()
    return 1 + 1 / (len(u) - 1) + means.item()


def slack_parts(u: Float[Tensor, "n d"], v: Float[Tensor, "n d"]) -> tuple[float, float, float]:
    """Three squares whose sum is the slack: tr Var[u - v] / 2, |E[u - v]|^2 / 4, |E[u + v]|^2 / 4.

    Each is multiplied by n/(n-1) (our derivation). Thm 5.2 names the first and the third; the
    second is zero where the two views are exchangeable.
    """
    n = len(u)
    apart, middle = u - v, (u + v).mean(0)
    spread = apart.var(0, correction=0).sum() / 2
    squares = (spread, apart.mean(0).square().sum() / 4, middle.square().sum() / 4)
    first, second, third = (part.item() * n / (n - 1) for part in squares)
    return first, second, third


def variance_band(n: int, m: int) -> tuple[float, float]:
    """The least and the largest Var[s_neg] at the optimum of fixed batches of m (Thm 5.5)."""
    least = (n - m) / ((m - 1) * (n - 1) ** 2)
    return least, n * least


def shared_simplices(n: int, m: int) -> Float[Tensor, "n d"]:
    """Every batch of m on one and the same simplex: Thm 5.5's largest variance."""
    return simplex_etf(m).repeat(n // m, 1)


def orthogonal_simplices(n: int, m: int) -> Float[Tensor, "n d"]:
    """Each batch of m on a simplex of its own dimensions: Thm 5.5's least variance."""
    return torch.block_diag(*[simplex_etf(m)] * (n // m))


def turned_simplices(
    n: int, m: int, width: int, generator: torch.Generator
) -> Float[Tensor, "n width"]:
    """Each batch of m on a simplex turned at random: any optimum of fixed batches (Thm 5.5)."""
    corners = simplex_etf(m)
    frames = torch.randn(n // m, width, m - 1, generator=generator, dtype=torch.float64)
    return torch.cat([corners @ torch.linalg.qr(frame).Q.T for frame in frames])


def negative_spread(u: Float[Tensor, "n d"], v: Float[Tensor, "n d"]) -> tuple[float, float]:
    """E[s_neg] and Var[s_neg] over all n (n-1) pairs, of whichever batches."""
    mean, variance = negative_statistics(u, v)
    return mean.item(), variance.item()


def cross_uniformity(u: Float[Tensor, "n d"], v: Float[Tensor, "n d"]) -> float:
    """log mean exp(-|u_i - v_j|^2) over all i != j: Wang and Isola's measure between two sides."""
    exponent = 2 * (shrink(u, 1.0) @ shrink(v, 1.0).T - 1)
    total = exponent.fill_diagonal_(-torch.inf).flatten().logsumexp(0)
    return (total - total.new_tensor(len(u) * (len(u) - 1)).log()).item()


def fixed_batches(loss: PairLoss, m: int) -> PairLoss:
    """The mean of `loss` over consecutive batches of m rows that never change."""

    def partitioned(u: Tensor, v: Tensor) -> Tensor:
        batches = zip(u.split(m), v.split(m), strict=True)
        return torch.stack([loss(a, b) for a, b in batches]).mean()

    return partitioned


def score_gradients(scores: Float[Tensor, "m m"], temperature: float) -> Float[Tensor, "m m"]:
    """dL / d(u_i . v_j) of two-way InfoNCE at any matrix of similarities (Thm 5.6)."""
    scores = scores.detach().requires_grad_()
    value = losses.info_nce(scores, torch.eye(len(scores), dtype=scores.dtype), temperature)
    return torch.autograd.grad(value, scores)[0]


def optimise(
    loss: PairLoss, u: Float[Tensor, "n d"], v: Float[Tensor, "n d"], iterations: int = 1000
) -> tuple[Float[Tensor, "n d"], Float[Tensor, "n d"]]:
    """Where the embeddings themselves land under a loss, from a start: L-BFGS on the sphere."""
    sides = [x.detach().clone().requires_grad_() for x in (u, v)]
    lbfgs = torch.optim.LBFGS(
        sides,
        max_iter=iterations,
        max_eval=4 * iterations,
        tolerance_grad=1e-12,
        tolerance_change=1e-16,
        history_size=50,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        lbfgs.zero_grad()
        value = loss(shrink(sides[0], 1.0), shrink(sides[1], 1.0))
        value.backward()
        return value

    lbfgs.step(closure)  # pyright: ignore[reportArgumentType]
    a, b = (shrink(x.detach(), 1.0) for x in sides)
    return a, b


def random_sides(
    n: int, width: int, generator: torch.Generator
) -> tuple[Float[Tensor, "n d"], Float[Tensor, "n d"]]:
    """Two independent sides of unit vectors, uniform on the sphere."""
    u, v = torch.randn(2, n, width, generator=generator, dtype=torch.float64)
    return shrink(u, 1.0), shrink(v, 1.0)


def _opposed(x: float, n: int) -> tuple[float, float]:
    """s_pos and s_neg of two simplices moved apart by x."""
    return 1 - 2 * x, -1 / (n - 1) - x * (n - 2) / (n - 1)


def _slope(function: Scalar, at: float) -> float:
    x = torch.tensor(at, dtype=torch.float64, requires_grad=True)
    return torch.autograd.grad(function(x), x)[0].item()
