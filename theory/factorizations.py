"""Matrix factorisations in closed form and by training, and the cosines that they leave.

X is users x items, A and B are items x rank, X A B' predicts X. Eq. 1 (a penalty on the product
A B') and Eq. 2 (a penalty on the factors X A and B) are those of "Is Cosine-Similarity of
Embeddings Really About Similarity?" (Steck, Ekanadham, Kallus 2024).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.random import default_rng

if TYPE_CHECKING:
    import torch
    from jaxtyping import Float, Int
    from numpy import ndarray
    from scipy.sparse import csr_array
    from torch import Tensor

SLAB = 1024
"""Rows whose scores are held at once."""
NOISY_BATCH = 256
"""Users whose noisy copies a step of `train_denoising` sees."""


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


def spectrum(matrix: csr_array | Float[ndarray, "n p"], rank: int) -> Spectrum:
    """The top singular values and right singular vectors; from X'X where all are asked for."""
    from scipy.sparse.linalg import svds

    smaller = min(_size(matrix))
    if rank < smaller:
        start = default_rng(0).standard_normal(smaller)
        _, values, rows = svds(matrix, k=rank, v0=start)
        order = np.argsort(values)[::-1]
        return _positive(values[order], np.asarray(rows)[order].T)
    return gram_spectrum(dense(matrix.T @ matrix), rank)


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


def train_denoising(matrix: csr_array, rank: int, penalty: float, steps: int, seed: int) -> Factors:
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
        rows = torch.from_numpy(dense(matrix[rng.integers(n, size=NOISY_BATCH)])).float()
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
    centred = dense(matrix.T @ matrix) - n * np.outer(mean, mean)
    std = np.sqrt(np.maximum(np.diagonal(centred) / n, np.finfo(float).tiny))
    return centred / std / std[:, None]


def propensity_gram(matrix: csr_array, power: float) -> Float[ndarray, "p p"]:
    """X'X after each column of X is divided by its popularity to this power."""
    popularity = np.maximum(np.asarray(matrix.mean(0)).ravel(), 1 / _size(matrix)[0])
    return dense(matrix.T @ matrix) / popularity**power / popularity[:, None] ** power


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


def _size(matrix: Any) -> tuple[int, int]:
    n, p = matrix.shape
    return n, p


def dense(matrix: Any) -> Float[ndarray, "n p"]:
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


def _pairs(
    similarity: Float[ndarray, "p p"], clusters: Int[ndarray, " p"]
) -> tuple[Float[ndarray, " pairs"], Any]:
    """The similarity of every two items without its rounding noise, and if they share a cluster."""
    above = np.triu_indices(len(clusters), 1)
    return similarity[above].round(12), clusters[above[0]] == clusters[above[1]]


def _nearest(
    left: Float[ndarray, "n d"], right: Float[ndarray, "m d"] | None, k: int
) -> Int[ndarray, "n k"]:
    """The k nearest right rows of each left row by cosine; without right, other left rows."""
    queries, candidates = _unit(left), _unit(left if right is None else right)
    found = []
    for start in range(0, len(queries), SLAB):
        scores = queries[start : start + SLAB] @ candidates.T
        if right is None:
            rows = np.arange(len(scores))
            scores[rows, start + rows] = -np.inf
        found.append(np.argpartition(-scores, k - 1, axis=1)[:, :k])
    return np.concatenate(found)


def _overlap(one: Int[ndarray, "n k"], other: Int[ndarray, "n k"]) -> float:
    """The mean share of a row's entries that are in the same row of the other."""
    return float((one[:, :, None] == other[:, None, :]).sum() / one.size)


def _dot_change(before: Factors, after: Factors) -> float:
    """Largest change of a dot product, over the largest dot product."""
    change, largest = 0.0, 0.0
    for start in range(0, len(before.users), SLAB):
        dots = before.users[start : start + SLAB] @ before.items.T
        moved = after.users[start : start + SLAB] @ after.items.T
        change = max(change, float(np.abs(moved - dots).max()))
        largest = max(largest, float(np.abs(dots).max()))
    return change / largest
