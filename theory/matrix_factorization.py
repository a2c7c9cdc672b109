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

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.random import Generator, default_rng

from theory.lab import LabSettings, main, run_lab

if TYPE_CHECKING:
    import torch
    from jaxtyping import Float, Int
    from matplotlib.figure import Figure
    from numpy import ndarray
    from scipy.sparse import csr_array
    from torch import Tensor

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


class Spectrum(NamedTuple):
    """The positive singular values of X, falling, and their right singular vectors."""

    values: Float[ndarray, " k"]
    vectors: Float[ndarray, "items k"]


class Factors(NamedTuple):
    """A and B: X @ users are the users' embeddings, the rows of `items` are the items'."""

    users: Float[ndarray, "items k"]
    items: Float[ndarray, "items k"]


class Ambiguity(NamedTuple):
    """What each rescaling of the columns does to pairs of embeddings."""

    dot_change: Float[ndarray, " s"]
    """Largest change of a dot product, over the largest dot product."""
    pair_overlap: Float[ndarray, " s"]
    """Share of a left row's nearest right rows by cosine that stay."""
    right_overlap: Float[ndarray, " s"]
    """Share of a right row's nearest other right rows by cosine that stay."""


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


def spectrum(matrix: csr_array | Float[ndarray, "n p"], rank: int) -> Spectrum:
    """The top singular values and right singular vectors; from X'X where all are asked for."""
    from scipy.sparse.linalg import svds

    smaller = min(_size(matrix))
    if rank < smaller:
        start = default_rng(0).standard_normal(smaller)
        _, values, rows = svds(matrix, k=rank, v0=start)
        order = np.argsort(values)[::-1]
        return _positive(values[order], np.asarray(rows)[order].T)
    return gram_spectrum(_dense(matrix.T @ matrix), rank)


def gram_spectrum(gram: Float[ndarray, "p p"], rank: int) -> Spectrum:
    """The singular values and right singular vectors of X from X'X."""
    squares, vectors = np.linalg.eigh(gram)
    values = np.sqrt(np.maximum(squares[::-1], 0))
    return _positive(values[:rank], vectors[:, ::-1][:, :rank])


def shrinkage(values: Float[ndarray, " k"], penalty: float) -> Float[ndarray, " k"]:
    """1 / (1 + penalty / s^2): how much of each singular direction Eq. 1 keeps."""
    return values**2 / (values**2 + penalty)


def solve_product(spectrum: Spectrum, penalty: float) -> Factors:
    """The symmetric solution of Eq. 1, A = B = V diag(shrinkage)^(1/2) (Eq. 5)."""
    half = spectrum.vectors * np.sqrt(shrinkage(spectrum.values, penalty))
    return Factors(half, half)


def solve_factors(spectrum: Spectrum, penalty: float) -> Factors:
    """The solution of Eq. 2, unique up to a rotation of the columns (Eq. 6)."""
    values, vectors = spectrum
    kept = np.maximum(1 - penalty / values, 0)
    return Factors(vectors * np.sqrt(kept / values), vectors * np.sqrt(kept * values))


def rescale(factors: Factors, scales: Float[ndarray, " k"]) -> Factors:
    """(A D, B / D): another solution of Eq. 1 with the same predictions (Eq. 3)."""
    if not (np.isfinite(scales).all() and (scales > 0).all()):
        raise ValueError("The scales of the columns must be positive and finite.")
    return Factors(factors.users * scales, factors.items / scales)


def product_objective(gram: Any, users: Any, items: Any, penalty: float) -> Any:
    """|X - X A B'|^2 + penalty |A B'|^2 (Eq. 1), from X'X; numpy and torch alike."""
    overlap = items.T @ items
    penalised = ((users.T @ users) * overlap).sum()
    return _squared_error(gram, users, items) + penalty * penalised


def factors_objective(gram: Any, users: Any, items: Any, penalty: float) -> Any:
    """|X - X A B'|^2 + penalty (|X A|^2 + |B|^2) (Eq. 2), from X'X; numpy and torch alike."""
    penalised = (users * (gram @ users)).sum() + (items**2).sum()
    return _squared_error(gram, users, items) + penalty * penalised


def dropout_objective(
    gram: Float[ndarray, "p p"], factors: Factors, dropped: float
) -> Float[ndarray, ""]:
    """Expected squared error when each entry of the input is dropped with this probability.

    The rest is scaled up to keep the mean. It is Eq. 1 with each item's row of A B' penalised by
    dropped / (1 - dropped) times the squared length of the item's column of X.
    """
    rows = ((factors.users @ (factors.items.T @ factors.items)) * factors.users).sum(1)
    penalty = dropped / (1 - dropped) * np.diagonal(gram)
    return _squared_error(gram, factors.users, factors.items) + (penalty * rows).sum()


def descend_product(gram: Float[ndarray, "p p"], rank: int, penalty: float, seed: int) -> Factors:
    """A minimiser of Eq. 1 by gradients from a random start.

    With P = (X'X + penalty)^(1/2) A, Eq. 1 is |T - P B'|^2 plus a constant, in which the
    directions are equally steep; T = (X'X + penalty)^(-1/2) X'X.
    """
    root = _symmetric_power(gram + penalty * np.eye(len(gram)), -0.5)
    users, items = _descend(root @ gram, rank, 0.0, seed, tolerance=1e-7)
    return Factors(root @ users, items)


def descend_factors(gram: Float[ndarray, "p p"], rank: int, penalty: float, seed: int) -> Factors:
    """A minimiser of Eq. 2 by gradients from a random start: |X - P B'|^2 with weight decay.

    P = (X'X)^(1/2) A has the inner products of X A.
    """
    users, items = _descend(_symmetric_power(gram, 0.5), rank, penalty, seed, tolerance=1e-12)
    return Factors(_symmetric_power(gram, -0.5) @ users, items)


def train_denoising(
    matrix: csr_array, rank: int, penalty: float, steps: int, seed: int, batch: int = 256
) -> Factors:
    """Factors trained to predict users from noisy copies of them (Adam, a falling step size).

    Noise of variance penalty / users in every entry has Eq. 1 as its expected squared error.
    """
    import torch

    n, p = _size(matrix)
    rng, draw = default_rng(seed), torch.Generator().manual_seed(seed)
    noise = (penalty / n) ** 0.5
    users, items = (
        x.detach().float().requires_grad_() for x in _random_pair(p, rank, 0.3 / p**0.5, draw)
    )
    adam = torch.optim.Adam([users, items], lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps)
    for _ in range(steps):
        rows = torch.from_numpy(_dense(matrix[rng.integers(n, size=batch)])).float()
        noisy = rows + noise * torch.randn(rows.shape, generator=draw)
        adam.zero_grad()
        ((rows - noisy @ users @ items.T) ** 2).mean(0).sum().backward()
        adam.step()
        schedule.step()
    return Factors(users.detach().double().numpy(), items.detach().double().numpy())


def train_on_cosine(
    matrix: csr_array, start: Factors, steps: int, *, layer_norm: bool
) -> Float[ndarray, "items k"]:
    """Item embeddings from |X - (a cos(X A, B) + b)|^2, minimised with a and b (L-BFGS; ours).

    With `layer_norm` both sides are layer-normalised, so their features are centred as well.
    """
    import torch

    n, p = _size(matrix)
    clicks, transposed = _sparse_rows(matrix), _sparse_rows(matrix.T.tocsr())

    class Clicks(torch.autograd.Function):
        """X times a matrix; autograd's own sparse product would transpose X at every step."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return clicks @ x

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            return transposed @ gradients[0]

    total, squares = float(matrix.sum()), float((matrix.data**2).sum())
    users, items = (torch.from_numpy(x.copy()).requires_grad_() for x in start)
    line = torch.tensor([1.0, total / (n * p)], dtype=torch.float64, requires_grad=True)

    def unit(x: Tensor) -> Tensor:
        x = x - x.mean(1, keepdim=True) if layer_norm else x
        return torch.nn.functional.normalize(x, dim=1)

    def loss() -> Tensor:
        left, right, (slope, level) = unit(Clicks.apply(users)), unit(items), line
        products = Clicks.apply(right) * left
        cosines = left.sum(0) @ right.sum(0)
        fit = slope**2 * ((left.T @ left) * (right.T @ right)).sum()
        fit = fit + 2 * slope * level * cosines + level**2 * n * p
        return (squares - 2 * (slope * products.sum() + level * total) + fit) / squares

    _minimise([users, items, line], loss, steps, tolerance=1e-8)
    return unit(items).detach().numpy()


def cosines(rows: Float[ndarray, "n k"]) -> Float[ndarray, "n n"]:
    """The cosine of every two rows; a row of zeros has cosine 0 with every row."""
    rows = _unit(rows)
    return rows @ rows.T


def reconstructed_cosines(gram: Float[ndarray, "p p"], factors: Factors) -> Float[ndarray, "p p"]:
    """The cosine of every two columns of X A B', which no rescaling of A and B can change."""
    products = factors.items @ (factors.users.T @ gram @ factors.users) @ factors.items.T
    norms = np.sqrt(np.maximum(np.diagonal(products), np.finfo(float).tiny))
    return products / norms / norms[:, None]


def standardised_gram(matrix: csr_array) -> Float[ndarray, "p p"]:
    """X'X after each column of X is centred and divided by its standard deviation."""
    n, _ = _size(matrix)
    mean = np.asarray(matrix.mean(0)).ravel()
    centred = _dense(matrix.T @ matrix) - n * np.outer(mean, mean)
    std = np.sqrt(np.maximum(np.diagonal(centred) / n, np.finfo(float).tiny))
    return centred / std / std[:, None]


def propensity_gram(matrix: csr_array, power: float) -> Float[ndarray, "p p"]:
    """X'X after each column of X is divided by its popularity to this power."""
    popularity = np.maximum(np.asarray(matrix.mean(0)).ravel(), 1 / _size(matrix)[0])
    return _dense(matrix.T @ matrix) / popularity**power / popularity[:, None] ** power


def block_contrast(similarity: Float[ndarray, "p p"], clusters: Int[ndarray, " p"]) -> float:
    """Mean similarity of two items of one cluster, minus that of items of two clusters (ours)."""
    values, same = _pairs(similarity, clusters)
    return float(values[same].mean() - values[~same].mean())


def same_cluster_auroc(similarity: Float[ndarray, "p p"], clusters: Int[ndarray, " p"]) -> float:
    """How well similarity tells pairs of one cluster from the others (ours)."""
    values, same = _pairs(similarity, clusters)
    positives, negatives = np.sort(values[same]), np.sort(values[~same])
    below, not_above = (np.searchsorted(negatives, positives, side) for side in ("left", "right"))
    return float((below.mean() + not_above.mean()) / (2 * len(negatives)))


def ambiguity(
    embeddings_left: Float[ndarray, "n d"],
    embeddings_right: Float[ndarray, "m d"],
    scales: Float[ndarray, "s d"],
    neighbours: int = 10,
) -> Ambiguity:
    """Rescale the columns of two sides by D and 1 / D: what happens to dot products and cosines."""
    left, right = (np.asarray(x, dtype=np.float64) for x in (embeddings_left, embeddings_right))
    if left.ndim != 2 or right.ndim != 2 or {left.shape[1], right.shape[1]} != {scales.shape[-1]}:
        raise ValueError(
            "Expected two sides and scales of one width, got left "
            f"{left.shape}, right {right.shape} and scales {scales.shape}."
        )
    if not len(right) > neighbours:
        raise ValueError(f"{neighbours} neighbours need more than {len(right)} right rows.")
    pairs, rights = _nearest(left, right, neighbours), _nearest(right, None, neighbours)
    rows = []
    for scale in scales:
        moved = rescale(Factors(left, right), scale)
        rows.append(
            (
                _dot_change(Factors(left, right), moved),
                _overlap(pairs, _nearest(moved.users, moved.items, neighbours)),
                _overlap(rights, _nearest(moved.items, None, neighbours)),
            )
        )
    return Ambiguity(*np.array(rows).T)


def run(config: Config) -> dict[str, float | str]:
    """Measure everything the module is about; figures and metrics go into the run's folder."""
    return run_lab(config, NAME, lambda: measure(config))


def measure(config: Config) -> tuple[dict[str, float | str], dict[str, Figure]]:
    """The metrics and figures of one simulated data set."""
    encoder = load_embedding(config.embeddings) if config.embeddings else None
    clicks = simulate_clicks(config)
    gram = _dense(clicks.matrix.T @ clicks.matrix)
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


def _size(matrix: Any) -> tuple[int, int]:
    n, p = matrix.shape
    return n, p


def _dense(matrix: Any) -> Float[ndarray, "n p"]:
    return np.asarray(matrix.toarray() if hasattr(matrix, "toarray") else matrix, dtype=np.float64)


def _sparse_rows(matrix: csr_array) -> Tensor:
    import torch

    parts = (matrix.indptr.astype(np.int32), matrix.indices.astype(np.int32), matrix.data)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse (CSR|invariant)")
        return torch.sparse_csr_tensor(*map(torch.from_numpy, parts), size=_size(matrix))


def _positive(values: Float[ndarray, " k"], vectors: Float[ndarray, "p k"]) -> Spectrum:
    """Without the directions in which X is zero."""
    kept = values > values[0] * 1e-7
    return Spectrum(values[kept], np.ascontiguousarray(vectors[:, kept]))


def _squared_error(gram: Any, users: Any, items: Any) -> Any:
    """|X - X A B'|^2 from X'X."""
    shifted = gram @ users
    overlap = ((users.T @ shifted) * (items.T @ items)).sum()
    return gram.diagonal().sum() - 2 * (shifted * items).sum() + overlap


def _symmetric_power(matrix: Float[ndarray, "p p"], power: float) -> Float[ndarray, "p p"]:
    """A power of a symmetric matrix on its range."""
    values, vectors = np.linalg.eigh(matrix)
    kept = values > values[-1] * 1e-14
    return (vectors[:, kept] * values[kept] ** power) @ vectors[:, kept].T


def _descend(
    target: Float[ndarray, "p p"], rank: int, decay: float, seed: int, *, tolerance: float
) -> tuple[Float[ndarray, "p k"], Float[ndarray, "p k"]]:
    """P and B of the smallest |T - P B'|^2 + decay (|P|^2 + |B|^2) that L-BFGS finds."""
    import torch

    goal = torch.from_numpy(target)
    draw = torch.Generator().manual_seed(seed)
    width = float(np.linalg.norm(target) / len(target)) ** 0.5
    left, right = _random_pair(len(target), rank, width / rank**0.25, draw)
    squares = (goal**2).sum()

    def loss() -> Tensor:
        fit = ((left.T @ left) * (right.T @ right)).sum() - 2 * ((goal.T @ left) * right).sum()
        return (squares + fit + decay * ((left**2).sum() + (right**2).sum())) / squares

    _minimise([left, right], loss, 1000, tolerance)
    return left.detach().numpy(), right.detach().numpy()


def _random_pair(
    rows: int, rank: int, width: float, draw: torch.Generator
) -> tuple[Tensor, Tensor]:
    import torch

    pair = width * torch.randn(2, rows, rank, dtype=torch.float64, generator=draw)
    return pair[0].clone().requires_grad_(), pair[1].clone().requires_grad_()


def _minimise(
    variables: list[Tensor], loss: Callable[[], Tensor], steps: int, tolerance: float
) -> None:
    """At most so many L-BFGS steps in place, fewer once a step gains less than the tolerance."""
    import torch

    lbfgs = torch.optim.LBFGS(
        variables,
        max_iter=steps,
        max_eval=2 * steps,
        history_size=20,
        tolerance_grad=1e-9,
        tolerance_change=tolerance,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        lbfgs.zero_grad()
        value = loss()
        value.backward()
        return value

    lbfgs.step(closure)


def _unit(rows: Float[ndarray, "n k"]) -> Float[ndarray, "n k"]:
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.divide(rows, norms, out=np.zeros_like(rows), where=norms > 0)


def _cosine_gap(one: Factors, other: Factors) -> float:
    """Largest difference between the item-item cosines of two solutions."""
    return float(np.abs(cosines(one.items) - cosines(other.items)).max())


def _pairs(
    similarity: Float[ndarray, "p p"], clusters: Int[ndarray, " p"]
) -> tuple[Float[ndarray, " pairs"], Any]:
    """The similarity of every two items without its rounding noise, and if they share a cluster."""
    above = np.triu_indices(len(clusters), 1)
    return similarity[above].round(12), clusters[above[0]] == clusters[above[1]]


def _nearest(
    left: Float[ndarray, "n d"], right: Float[ndarray, "m d"] | None, k: int, slab: int = 1024
) -> Int[ndarray, "n k"]:
    """The k nearest right rows of each left row by cosine; without right, other left rows."""
    queries, candidates = _unit(left), _unit(left if right is None else right)
    found = []
    for start in range(0, len(queries), slab):
        scores = queries[start : start + slab] @ candidates.T
        if right is None:
            rows = np.arange(len(scores))
            scores[rows, start + rows] = -np.inf
        found.append(np.argpartition(-scores, k - 1, axis=1)[:, :k])
    return np.concatenate(found)


def _overlap(one: Int[ndarray, "n k"], other: Int[ndarray, "n k"]) -> float:
    """The mean share of a row's entries that are in the same row of the other."""
    return float((one[:, :, None] == other[:, None, :]).sum() / one.size)


def _dot_change(before: Factors, after: Factors, slab: int = 1024) -> float:
    """Largest change of a dot product, over the largest dot product."""
    change, largest = 0.0, 0.0
    for start in range(0, len(before.users), slab):
        dots = before.users[start : start + slab] @ before.items.T
        moved = after.users[start : start + slab] @ after.items.T
        change = max(change, float(np.abs(moved - dots).max()))
        largest = max(largest, float(np.abs(dots).max()))
    return change / largest


def _heat_maps(maps: dict[str, Float[ndarray, "p p"]], rows: int) -> Figure:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

    columns = len(maps) // rows
    figure = Figure(figsize=(2.4 * columns + 0.8, 2.6 * rows), layout="constrained")
    grid = figure.subplots(rows, columns)
    colours = ScalarMappable(Normalize(-1, 1), "RdBu_r")
    for axes, (name, values) in zip(grid.flat, maps.items(), strict=True):
        axes.imshow(values, norm=colours.norm, cmap=colours.cmap)
        axes.set_title(name, fontsize=8)
        axes.set_xticks([])
        axes.set_yticks([])
    figure.colorbar(colours, ax=grid, label="item-item cosine", shrink=0.8)
    return figure


def _draw_ambiguity(tests: dict[str, Ambiguity], neighbours: int) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5, 4), layout="constrained")
    axes = figure.subplots()
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
