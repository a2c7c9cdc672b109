"""What cosine similarity means after matrix factorisation, in closed form and by training.

    python theory/matrix_factorization.py
    python theory/matrix_factorization.py --users=20000 --items=1000
    python theory/matrix_factorization.py --embeddings=results/.../embeddings.safetensors

"Is Cosine-Similarity of Embeddings Really About Similarity?" (Steck, Ekanadham, Kallus 2024):
X is users x items, A and B are items x rank, X A B' predicts X; a user's embedding is a row of
X A, an item's a row of B. The penalty on the product A B' (Eq. 1) leaves every rescaling
(A D, B / D) free, and with it every cosine; the penalty on the factors X A and B (Eq. 2) does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.random import Generator, default_rng

from theory.factorizations import (
    Ambiguity,
    Factors,
    Spectrum,
    ambiguity,
    block_contrast,
    cosines,
    dense,
    descend_factors,
    descend_product,
    factors_objective,
    gram_spectrum,
    product_objective,
    propensity_gram,
    reconstructed_cosines,
    rescale,
    same_cluster_auroc,
    shrinkage,
    solve_factors,
    solve_product,
    spectrum,
    standardised_gram,
    train_denoising,
    train_on_cosine,
)
from theory.lab import LabSettings, drawing, main, run_lab

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from matplotlib.figure import Figure
    from numpy import ndarray
    from scipy.sparse import csr_array

    Spread = Callable[[Float[ndarray, " k"], Float[ndarray, " k"]], Float[ndarray, " k"]]

NAME = "matrix_factorization"
PAPER_USERS, PAPER_PENALTY_PRODUCT, PAPER_PENALTY_FACTORS = 20_000, 10_000.0, 100.0

# Standard deviations of the logarithm of the columns' scales in the ambiguity test (ours).
COLUMN_SPREADS = (0.25, 0.5, 1.0, 2.0)
# D of (A D, B / D) from the singular values of X and their shrinkage 1 / (1 + penalty / s^2).
# The three D's of the paper's Fig. 1 are not legible; these four are ours.
SPREADS: dict[str, Spread] = {
    "one": lambda values, shrinkage: np.ones_like(values),
    "items_flat": lambda values, shrinkage: shrinkage**0.5,
    "users_flat": lambda values, shrinkage: shrinkage**-0.5,
    "like_factors": lambda values, shrinkage: values**-0.5,
}


@dataclass(frozen=True)
class Config(LabSettings):
    users: int = 3000
    """20,000 in the paper."""
    items: int = 300
    """1,000 in the paper."""
    clusters: int = 5
    """Clusters of items, all equally probable (ours; the paper does not say)."""
    rank: int = 50
    """Width of the embeddings; full rank is measured beside it."""
    preference: float = 0.5
    """Concentration of the Dirichlet distribution of a user's taste over the clusters (ours)."""
    items_per_user: tuple[int, int] = (5, 100)
    """Fewest and most items of a user, k**-0.5 distributed between them (the bounds are ours)."""
    penalty_product: float = PAPER_PENALTY_PRODUCT
    """Lambda of Eq. 1 for 20,000 users; it is scaled with the number of users (ours)."""
    penalty_factors: float = PAPER_PENALTY_FACTORS
    """Lambda of Eq. 2 for 20,000 users; it is scaled with the root of their number (ours)."""
    propensity_power: float = 0.5
    """Inverse propensity divides an item's column by its popularity to this power (ours)."""
    denoising_steps: int = 600
    """Adam steps of training on noisy copies of the data, which leads to Eq. 1."""
    remedy_steps: int = 40
    """L-BFGS steps of the factorisations that are trained on cosines, from Eq. 1's solution."""
    neighbours: int = 10
    """How many cosine neighbours are compared before and after a rescaling."""
    embeddings: str | None = None
    """A safetensors file with an `embedding` matrix, to rescale a trained encoder's columns too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = self.items_per_user
        if not 1 <= low <= high <= self.items:
            raise ValueError(
                f"items_per_user must be two numbers from 1 to items={self.items}, the smaller "
                f"first, got {low} and {high}."
            )
        if not 1 <= self.rank < self.items <= self.users:
            raise ValueError(
                f"Expected rank < items <= users, got rank={self.rank}, items={self.items}, "
                f"users={self.users}."
            )
        if not (self.clusters >= 2 and self.items >= 10 * self.clusters):
            raise ValueError(
                f"Expected at least 2 clusters and 10 items for each, got clusters={self.clusters} "
                f"and items={self.items}."
            )
        if not (self.preference > 0 and self.penalty_product > 0 and self.penalty_factors > 0):
            raise ValueError("preference, penalty_product and penalty_factors must be above 0.")
        if min(self.denoising_steps, self.remedy_steps, self.neighbours) < 1:
            raise ValueError("denoising_steps, remedy_steps and neighbours must be at least 1.")


class Clicks(NamedTuple):
    """Simulated users and items; items are sorted by cluster, then by falling popularity."""

    matrix: csr_array
    """1 where a user has an item."""
    clusters: Int[ndarray, " items"]
    popularity: Float[ndarray, " items"]


def simulate_clicks(config: Config) -> Clicks:
    """The clustered user-item data of section 4; what the paper leaves open is ours."""
    from scipy.sparse import csr_array

    rng = default_rng(config.seed)
    clusters = np.sort(rng.integers(config.clusters, size=config.items))
    slopes = rng.uniform(0.25, 1.5, config.clusters)
    starts = np.searchsorted(clusters, np.arange(config.clusters))
    place = 1 + np.arange(config.items) - starts[clusters]
    popularity = place ** -slopes[clusters]
    counts = _power_law_counts(*config.items_per_user, config.users, rng)
    taste = rng.dirichlet(np.full(config.clusters, config.preference), config.users)
    columns = [
        _draw_without_replacement(taste[u : u + 1000][:, clusters] * popularity, some, rng)
        for u, some in zip(
            range(0, config.users, 1000),
            np.split(counts, range(1000, config.users, 1000)),
            strict=True,
        )
    ]
    edges = np.concatenate([[0], np.cumsum(counts)])
    entries = (np.ones(edges[-1]), np.concatenate(columns), edges)
    return Clicks(csr_array(entries, shape=(config.users, config.items)), clusters, popularity)


def run(config: Config) -> dict[str, float | str]:
    """Measure everything the module is about; figures and metrics go into the run's folder."""
    return run_lab(config, NAME, lambda: measure(config))


def measure(config: Config) -> tuple[dict[str, float | str], dict[str, Figure]]:
    """The metrics and figures of one simulated data set."""
    encoder = load_embedding(config.embeddings) if config.embeddings else None
    clicks = simulate_clicks(config)
    gram = dense(clicks.matrix.T @ clicks.matrix)
    share = config.users / PAPER_USERS
    product, factors = config.penalty_product * share, config.penalty_factors * share**0.5
    top, full = (spectrum(clicks.matrix, rank) for rank in (config.rank, config.items))
    truth = (clicks.clusters[:, None] == clicks.clusters).astype(float)
    metrics: dict[str, float | str] = {"data/clicks_per_user": clicks.matrix.nnz / config.users}
    maps = {}
    for name, found in (("truncated", top), ("full", full)):
        similarities = _similarities(found, product, factors)
        metrics[f"{name}/rank"] = len(found.values)
        metrics[f"{name}/factors/rank"] = int((found.values > factors).sum())
        metrics |= _judge(name, similarities, clicks.clusters)
        maps[f"{name}: truth"] = truth
        maps |= {f"{name}: {label}": values for label, values in similarities.items()}
    metrics |= _descent(config, gram, top, product, factors)
    metrics |= _denoising(config, clicks.matrix, gram, top, product)
    remedies, ranges = _remedies(config, clicks, gram, top, product)
    metrics |= _judge("remedy", remedies, clicks.clusters)
    metrics |= {f"remedy/{name}/auroc_range": value for name, value in ranges.items()}
    solved = solve_product(top, product)
    pairs = {"factorisation": (clicks.matrix[:2000] @ solved.users, solved.items)}
    if encoder is not None:
        pairs["encoder"] = (encoder, encoder)
    tests = _ambiguities(config, pairs)
    metrics |= {
        f"ambiguity/{name}/{field}_{spread:g}": float(value)
        for name, test in tests.items()
        for field, values in test._asdict().items()
        for spread, value in zip(COLUMN_SPREADS, values, strict=True)
    }
    figures = {
        "heat_maps": _heat_maps(maps, rows=2),
        "remedies": _heat_maps({"truth": truth, **remedies}, rows=1),
        "ambiguity": _draw_ambiguity(tests, config.neighbours),
    }
    return metrics, figures


def _similarities(
    found: Spectrum, product: float, factors: float
) -> dict[str, Float[ndarray, "p p"]]:
    """Item-item cosines of Eq. 1 for each D, and of Eq. 2."""
    solved, kept = solve_product(found, product), shrinkage(found.values, product)
    similarities = {
        name: cosines(rescale(solved, spread(found.values, kept)).items)
        for name, spread in SPREADS.items()
    }
    return {**similarities, "factors": cosines(solve_factors(found, factors).items)}


def _judge(
    prefix: str, similarities: dict[str, Float[ndarray, "p p"]], clusters: Int[ndarray, " p"]
) -> dict[str, float]:
    metrics = {}
    for name, similarity in similarities.items():
        metrics[f"{prefix}/{name}/contrast"] = block_contrast(similarity, clusters)
        metrics[f"{prefix}/{name}/auroc"] = same_cluster_auroc(similarity, clusters)
    return metrics


def _descent(
    config: Config, gram: Float[ndarray, "p p"], top: Spectrum, product: float, factors: float
) -> dict[str, float]:
    """How close gradients come to both closed forms, and what two random starts agree on."""
    metrics = {}
    cases = (
        ("product", descend_product, product_objective, solve_product(top, product), product),
        ("factors", descend_factors, factors_objective, solve_factors(top, factors), factors),
    )
    for name, descend, objective, solved, penalty in cases:
        starts = [descend(gram, config.rank, penalty, config.seed + k) for k in (0, 1)]
        best = objective(gram, *solved, penalty)
        excess = max(objective(gram, *found, penalty) / best - 1 for found in starts)
        metrics[f"descent/{name}_excess"] = float(excess)
        metrics[f"descent/{name}_cosine_gap"] = _cosine_gap(*starts)
        if name == "product":
            kept = shrinkage(top.values, product)
            moved = rescale(starts[0], SPREADS["like_factors"](top.values, kept))
            gap = np.abs(moved.users @ moved.items.T - starts[0].users @ starts[0].items.T)
            metrics["descent/rescaled_prediction_gap"] = float(gap.max())
            metrics["descent/rescaled_cosine_gap"] = _cosine_gap(starts[0], moved)
    return metrics


def _denoising(
    config: Config, matrix: csr_array, gram: Float[ndarray, "p p"], top: Spectrum, penalty: float
) -> dict[str, float]:
    """How close training on noisy copies comes to the closed form of Eq. 1."""
    trained = train_denoising(matrix, config.rank, penalty, config.denoising_steps, config.seed)
    solved = solve_product(top, penalty)
    best = product_objective(gram, *solved, penalty)
    return {
        "denoising/excess": float(product_objective(gram, *trained, penalty) / best - 1),
        "denoising/cosine_gap": _cosine_gap(trained, solved),
    }


def _remedies(
    config: Config, clicks: Clicks, gram: Float[ndarray, "p p"], top: Spectrum, penalty: float
) -> tuple[dict[str, Float[ndarray, "p p"]], dict[str, float]]:
    """Item-item similarities of each remedy at D = 1, and how far D can move their AUROC.

    Standardised and reweighted data keep the penalty's share of their sum of squares (ours).
    """
    remedies, ranges, start = {}, {}, solve_product(top, penalty)
    for name, layer_norm in (("cosine_trained", False), ("layer_norm", True)):
        remedies[name] = cosines(
            train_on_cosine(clicks.matrix, start, config.remedy_steps, layer_norm=layer_norm)
        )
    debiased = {
        "standardised": standardised_gram(clicks.matrix),
        "inverse_propensity": propensity_gram(clicks.matrix, config.propensity_power),
    }
    spaces = {"reconstructed": (gram, top)}
    spaces |= {name: (g, gram_spectrum(g, config.rank)) for name, g in debiased.items()}
    for name, (space, found) in spaces.items():
        share = penalty * float(np.trace(space) / np.trace(gram))
        solved, kept = solve_product(found, share), shrinkage(found.values, share)
        moved = [rescale(solved, spread(found.values, kept)) for spread in SPREADS.values()]
        if name == "reconstructed":
            similar = [reconstructed_cosines(space, factors) for factors in moved]
        else:
            similar = [cosines(factors.items) for factors in moved]
        aurocs = [same_cluster_auroc(values, clicks.clusters) for values in similar]
        remedies[name], ranges[name] = similar[0], max(aurocs) - min(aurocs)
    return remedies, ranges


def _ambiguities(
    config: Config, pairs: dict[str, tuple[Float[ndarray, "n d"], Float[ndarray, "m d"]]]
) -> dict[str, Ambiguity]:
    """The ambiguity test on each pair of sides, the same random direction at every spread."""
    rng = default_rng(config.seed)
    return {
        name: ambiguity(
            left,
            right,
            np.exp(np.outer(COLUMN_SPREADS, rng.standard_normal(right.shape[1]))),
            config.neighbours,
        )
        for name, (left, right) in pairs.items()
    }


def load_embedding(file: str) -> Float[ndarray, "n d"]:
    """The `embedding` matrix of a safetensors file, such as a run's embeddings.safetensors."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{file} is not a safetensors file: {error}.") from None
    if "embedding" not in tensors or tensors["embedding"].ndim != 2:
        raise ValueError(
            f"{Path(file).name} needs a matrix 'embedding', it holds {sorted(tensors)}. "
            "Use the embeddings.safetensors of a run."
        )
    return tensors["embedding"].double().numpy()


def _power_law_counts(low: int, high: int, n: int, rng: Generator) -> Int[ndarray, " n"]:
    """n numbers from low to high, k with probability in proportion to k**-0.5."""
    numbers = np.arange(low, high + 1)
    weights = numbers**-0.5
    return rng.choice(numbers, size=n, p=weights / weights.sum())


def _draw_without_replacement(
    weights: Float[ndarray, "n p"], counts: Int[ndarray, " n"], rng: Generator
) -> Int[ndarray, " total"]:
    """The columns that each row draws one after another with these weights (Gumbel top-k)."""
    with np.errstate(divide="ignore"):
        keys = np.log(weights) + rng.gumbel(size=weights.shape)
    order = np.argsort(-keys, axis=1)[:, : counts.max()]
    return order[np.arange(order.shape[1]) < counts[:, None]]


def _cosine_gap(one: Factors, other: Factors) -> float:
    """Largest difference between the item-item cosines of two solutions."""
    return float(np.abs(cosines(one.items) - cosines(other.items)).max())


def _heat_maps(maps: dict[str, Float[ndarray, "p p"]], rows: int) -> Figure:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    columns = len(maps) // rows
    figure, grid = drawing(2.4 * columns + 0.8, 2.6 * rows, rows, columns)
    colours = ScalarMappable(Normalize(-1, 1), "RdBu_r")
    for axes, (name, values) in zip(grid.flat, maps.items(), strict=True):
        axes.imshow(values, norm=colours.norm, cmap=colours.cmap)
        axes.set_title(name, fontsize=8)
        axes.set_xticks([])
        axes.set_yticks([])
    figure.colorbar(colours, ax=grid, label="item-item cosine", shrink=0.8)
    return figure


def _draw_ambiguity(tests: dict[str, Ambiguity], neighbours: int) -> Figure:
    figure, axes = drawing(5.5, 4)
    for name, test in tests.items():
        axes.plot(COLUMN_SPREADS, test.pair_overlap, "o-", label=f"{name}: left to right")
        axes.plot(COLUMN_SPREADS, test.right_overlap, "s--", label=f"{name}: right to right")
    axes.set_xlabel("spread of the columns' log scales")
    axes.set_ylabel(f"shared among {neighbours} cosine neighbours")
    axes.set_ylim(0, 1.02)
    axes.legend(fontsize=8)
    return figure


if __name__ == "__main__":
    main(Config, run, __doc__)
