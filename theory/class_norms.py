"""Which classes' norms grow most when some are more frequent: a simulation of `norm_growth`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from numpy import ndarray


def norms_by_class(
    weights: tuple[int, ...], runs: int, epochs: int, seed: int
) -> Float[ndarray, "runs times classes"]:
    """Mean norm per class, before training and after each epoch, under class imbalance.

    As in the paper's notebook: 4 x 500 points around class centres on the sphere of 10 dimensions
    (noise 1), seen in 64 dimensions through a random linear map times 10; a 64-64-10 network;
    supervised InfoNCE on random positive pairs at temperature 1; SGD at 0.01, batches of 128.
    """
    per_run = [_train_on_classes(weights, epochs, seed + 1000 * k) for k in range(runs)]
    return np.array(per_run).reshape(runs, epochs + 1, len(weights))


def _train_on_classes(weights: tuple[int, ...], epochs: int, seed: int) -> list[list[float]]:
    draw = torch.Generator().manual_seed(seed)
    classes, samples = len(weights), 500 * len(weights)
    shares = torch.tensor(weights, dtype=torch.float32)
    labels = torch.multinomial(shares, samples, replacement=True, generator=draw)
    centres = normalize(torch.randn(classes, 10, generator=draw))
    points = normalize(centres[labels] + torch.randn(samples, 10, generator=draw))
    data = points @ (10 * torch.randn(10, 64, generator=draw))
    network = _small_network(seed)
    descent = torch.optim.SGD(network.parameters(), lr=0.01)

    @torch.no_grad()
    def norms() -> list[float]:
        lengths = network(data).norm(dim=1)
        return [float(lengths[labels == c].mean()) for c in range(classes)]

    tracked = [norms()]
    for _ in range(epochs):
        for batch in torch.randperm(samples, generator=draw).split(128):
            descent.zero_grad()
            positive = _random_positives(labels[batch], draw)
            _info_nce_on_pairs(network(data[batch]), positive).backward()
            descent.step()
        tracked.append(norms())
    return tracked


def _small_network(seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def _random_positives(labels: Int[Tensor, " n"], draw: torch.Generator) -> Bool[Tensor, "n n"]:
    """Each row draws another row of its class; a pair counts both ways."""
    same = (labels[:, None] == labels).float().fill_diagonal_(0)
    alone = same.sum(1) == 0
    drawn = torch.multinomial(same + alone[:, None], 1, generator=draw)
    chosen = torch.zeros_like(same, dtype=torch.bool).scatter_(1, drawn, True)
    chosen[alone] = False
    return chosen | chosen.T


def _info_nce_on_pairs(z: Float[Tensor, "n d"], positive: Bool[Tensor, "n n"]) -> Float[Tensor, ""]:
    """-log of the positives' share among all other rows on cosines, for rows with a positive."""
    u = normalize(z, dim=1)
    itself = torch.eye(len(z), dtype=torch.bool)
    log_p = (u @ u.T).masked_fill(itself, -torch.inf).log_softmax(1)
    paired = positive.any(1)
    return -log_p[paired].masked_fill(~positive[paired], -torch.inf).logsumexp(1).mean()
