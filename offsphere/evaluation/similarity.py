"""Post-hoc similarities of raw embeddings: what to do with magnitude after training.

Every similarity is used as `similarity(name).fit(reference).scores(queries, items)`, and larger
always means more similar (distances are negated). `fit` returns a fitted copy; its statistics come
from `reference`, a sample of the item side, and from `queries`, a sample of the query side, where
the two sides differ (images and texts); without it the reference stands for both. Similarities
without statistics can be scored at once, the others refuse to be.

A row of scores depends on its own query alone, so queries may be scored in chunks. A column depends
on its own item alone except for `QueryZScore`, whose candidate set is the items passed.

Statistics are kept in float64; scores have the dtype of the embeddings, at least float32. A zero
vector has cosine 0 with everything. Formulas without another source are those of "Semantics at an
Angle" (arXiv 2504.16318), which gives no parameter values: the defaults here are ours.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal, Self, TypeVar

import torch
from torch import Tensor

from offsphere.cells import shrink
from offsphere.evaluation.checks import (
    both_sides,
    check_available,
    check_count,
    check_share,
    check_weight,
    references,
)
from offsphere.evaluation.moments import (
    SLAB,
    absolute_correlation,
    ledoit_wolf_shrinkage,
    moments_of,
    spectrum,
)
from offsphere.names import CORNERS, unknown

if TYPE_CHECKING:
    from jaxtyping import Float

COSINE = CORNERS["cosine"]

T = TypeVar("T")


class Similarity(ABC):
    """Checks the embeddings for all similarities; each of them says how it is fitted and scored.

    `_fit` is handed the references of the query side and of the item side, or the one that stands
    for both; `_scores` both sides in one dtype.
    """

    def fit(
        self, reference: Float[Tensor, "m d"], queries: Float[Tensor, "p d"] | None = None
    ) -> Self:
        """A copy with the statistics of a reference set of items and, if they differ, queries."""
        return self._fit(references(reference, queries))

    def scores(
        self, queries: Float[Tensor, "q d"], items: Float[Tensor, "n d"]
    ) -> Float[Tensor, "q n"]:
        """How similar each item is to each query; larger is more similar."""
        return self._scores(*both_sides(queries, items))

    def _fit(self, sides: list[Tensor]) -> Self:
        return self

    @abstractmethod
    def _scores(self, queries: Tensor, items: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class CellSimilarity(Similarity):
    """The score of a cell of the square: q . d / (|q|**left |d|**right)."""

    exponents: tuple[float, float] = COSINE

    def _scores(self, queries: Tensor, items: Tensor) -> Tensor:
        return _cell_scores(queries, items, self.exponents)


@dataclass(frozen=True)
class Scaled(Similarity):
    """Scaled similarity: alpha cos(q, d) + (1 - alpha) (|q| + |d|)."""

    alpha: float = 0.5
    """Weight of the cosine, from 0 to 1; the default is ours."""

    def __post_init__(self) -> None:
        check_share("alpha", self.alpha)

    def _scores(self, queries: Tensor, items: Tensor) -> Tensor:
        norms = queries.norm(dim=1)[:, None] + items.norm(dim=1)
        return self.alpha * _cell_scores(queries, items, COSINE) + (1 - self.alpha) * norms


@dataclass(frozen=True)
class RadialAngular(Similarity):
    """Minus the radial-angular distance: -(| |q| - |d| | + angle_weight * arccos cos(q, d)).

    The formula was found without an absolute value; a distance must not be negative, so the
    absolute difference of the norms is our reading.
    """

    angle_weight: float = 1.0
    """Lambda, per radian, not negative; the default is ours."""

    def __post_init__(self) -> None:
        check_weight("angle_weight", self.angle_weight)

    def _scores(self, queries: Tensor, items: Tensor) -> Tensor:
        # arccos loses half the digits near 0: float64 leaves float32 its own precision.
        long_queries, long_items = queries.double(), items.double()
        radial = (long_queries.norm(dim=1)[:, None] - long_items.norm(dim=1)).abs()
        angle = _cell_scores(long_queries, long_items, COSINE).clamp(-1, 1).arccos()
        return -(radial + self.angle_weight * angle).to(queries.dtype)


@dataclass(frozen=True)
class Euclidean(Similarity):
    """Minus the Euclidean distance, computed in float64."""

    def _scores(self, queries: Tensor, items: Tensor) -> Tensor:
        long_queries, long_items = queries.double(), items.double()
        squares = long_queries.square().sum(1)[:, None] + long_items.square().sum(1)
        distance = (squares - 2 * long_queries @ long_items.T).clamp_min(0).sqrt()
        return -distance.to(queries.dtype)


@dataclass(frozen=True)
class QueryZScore(Similarity):
    """(cos(q, d) - mean_q) / std_q, mean and population std over the items passed to `scores`.

    A query's ranking is cosine's; what changes is how scores of different queries compare. All the
    candidates must be passed at once. A query whose cosines do not differ scores 0 everywhere.
    """

    def _scores(self, queries: Tensor, items: Tensor) -> Tensor:
        cosine = _cell_scores(queries, items, COSINE)
        std, mean = torch.std_mean(cosine, dim=1, correction=0, keepdim=True)
        resolution = 16 * torch.finfo(cosine.dtype).eps
        return torch.where(std > resolution, (cosine - mean) / std, torch.zeros_like(cosine))


@dataclass(frozen=True)
class SideMaps:
    """(x - mean of its side) @ matrix: what a fitted similarity does to each side."""

    query_mean: Float[Tensor, " d"]
    item_mean: Float[Tensor, " d"]
    matrix: Float[Tensor, "d k"] | None = None
    """None: the identity."""

    def queries(self, x: Float[Tensor, "q d"]) -> Float[Tensor, "q k"]:
        """The query side, mapped."""
        return self._map(x, self.query_mean)

    def items(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n k"]:
        """The item side, mapped."""
        return self._map(x, self.item_mean)

    def _map(self, x: Tensor, mean: Tensor) -> Tensor:
        if x.shape[1] != len(mean):
            raise ValueError(
                f"Expected embeddings of the {len(mean)} features that were fitted, got "
                f"{x.shape[1]}: fit on a reference of the same encoder."
            )
        mapped = x.double() - mean.to(x.device)
        if self.matrix is not None:
            mapped = mapped @ self.matrix.to(x.device)
        return mapped.to(x.dtype)


@dataclass(frozen=True)
class Mapped(Similarity):
    """A cell's score of sides that were mapped first."""

    NAME: ClassVar[str]
    _: KW_ONLY
    exponents: tuple[float, float] = COSINE
    """The cell in which the mapped sides are compared."""
    maps: SideMaps | None = field(default=None, repr=False, compare=False)

    def _scores(self, queries: Tensor, items: Tensor) -> Tensor:
        return _mapped_scores(_fitted(self.NAME, self.maps), queries, items, self.exponents)


@dataclass(frozen=True)
class Centred(Mapped):
    """The score after each side's mean is taken off."""

    NAME = "centred"

    def _fit(self, sides: list[Tensor]) -> Self:
        means = [side.mean(0, dtype=torch.float64) for side in sides]
        return replace(self, maps=SideMaps(means[0], means[-1]))


@dataclass(frozen=True)
class Whitened(Mapped):
    """The score after each side is centred and the covariance made the identity.

    With two references each side keeps its own mean and the covariance is pooled over both, so that
    one linear map serves both sides. ZCA stays as near to the features as it can, PCA gives
    components in order of variance; the two differ by a rotation, so every score is the same. A
    direction without variance in the reference (fewer rows than features, a constant or redundant
    feature) is left out if the covariance is not shrunk. The covariance is the population form.
    """

    NAME = "whitened"
    kind: Literal["zca", "pca"] = "zca"
    shrinkage: float | Literal["ledoit_wolf"] = "ledoit_wolf"
    """Weight of mean variance times identity, from 0 to 1, or Ledoit and Wolf's rule (2004)."""
    components: int | None = None
    """Keep this many directions of largest variance; None keeps all that vary."""

    def __post_init__(self) -> None:
        if self.kind not in ("zca", "pca"):
            raise unknown("kind of whitening", self.kind, ("zca", "pca"))
        if not isinstance(self.shrinkage, str):
            check_share("shrinkage", self.shrinkage)
        elif self.shrinkage != "ledoit_wolf":
            raise unknown("shrinkage", self.shrinkage, ("ledoit_wolf",))
        if self.components is not None:
            check_count("components", self.components)

    def _fit(self, sides: list[Tensor]) -> Self:
        moments = moments_of(sides)
        shrinkage = self.shrinkage
        if isinstance(shrinkage, str):
            shrinkage = ledoit_wolf_shrinkage(moments)
        variances, directions = spectrum(moments, shrinkage)
        if self.components is not None:
            check_available("components", self.components, len(variances))
            variances = variances[: self.components]
            directions = directions[:, : self.components]
        matrix = directions / variances.sqrt()
        if self.kind == "zca":
            matrix = matrix @ directions.T
        return replace(self, maps=SideMaps(moments.means[0], moments.means[-1], matrix))


@dataclass(frozen=True)
class TopRemoved(Mapped):
    """The score after centring and removal of the top principal components of the reference.

    With two references the components are those of the pooled covariance, as in `Whitened`.
    """

    NAME = "top_removed"
    components: int = 1
    """How many to remove; the default is ours."""

    def __post_init__(self) -> None:
        check_count("components", self.components)

    def _fit(self, sides: list[Tensor]) -> Self:
        moments = moments_of(sides)
        variances, directions = spectrum(moments, shrinkage=0.0)
        check_available("components to remove", self.components, len(variances) - 1)
        top = directions[:, : self.components]
        matrix = torch.eye(len(top), dtype=top.dtype, device=top.device) - top @ top.T
        return replace(self, maps=SideMaps(moments.means[0], moments.means[-1], matrix))


@dataclass(frozen=True)
class SoftCosine(Similarity):
    """q' S d / sqrt(q' S q  d' S d), where S says how similar two features are.

    S must be symmetric and positive semidefinite. Without a given S it is |correlation|**power of
    the features over the item reference (ours); a feature that is constant there is like itself
    only. An absolute correlation need not be positive semidefinite, and is then refused; its square
    always is (Schur).
    """

    features: Float[Tensor, "d d"] | None = field(default=None, repr=False, compare=False)
    """A given S: no fit is needed then, but it saves decomposing S at every call."""
    power: float = 2.0
    maps: SideMaps | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_weight("power", self.power)

    def _fit(self, sides: list[Tensor]) -> Self:
        if self.features is not None:
            return replace(self, maps=_soft_maps(self.features, "The given S"))
        similar = absolute_correlation(sides[-1]) ** self.power
        name = f"S = |correlation|**{self.power:g} of the reference's features"
        return replace(self, maps=_soft_maps(similar, name))

    def _scores(self, queries: Tensor, items: Tensor) -> Tensor:
        maps = self.maps
        if maps is None and self.features is not None:
            maps = _soft_maps(self.features, "The given S")
        return _mapped_scores(_fitted("soft_cosine", maps), queries, items, COSINE)


@dataclass(frozen=True)
class Augmented(Similarity):
    """The score of [x / |x|, weight |x| / mean norm], the direction with the norm as a feature.

    The source gives only the features. The norm in units of its side's mean over the reference and
    the comparison by cosine are ours: a vector is nearest to those of its direction and norm.
    """

    weight: float = 1.0
    """Weight of the norm, not negative; the default is ours."""
    exponents: tuple[float, float] = COSINE
    """The cell in which the augmented sides are compared."""
    mean_norms: tuple[float, float] | None = field(default=None, repr=False, compare=False)
    """Of the query side and of the item side."""

    def __post_init__(self) -> None:
        check_weight("weight", self.weight)

    def _fit(self, sides: list[Tensor]) -> Self:
        norms = [torch.linalg.vector_norm(x, dim=1, dtype=torch.float64) for x in sides]
        means = [x.mean().item() for x in norms]
        if not min(means) > 0:
            raise ValueError(
                "The norm cannot be measured in units of its mean: every reference vector of a "
                "side is zero. Fit on embeddings of an encoder that has not collapsed."
            )
        return replace(self, mean_norms=(means[0], means[-1]))

    def _scores(self, queries: Tensor, items: Tensor) -> Tensor:
        query_norm, item_norm = _fitted("augmented", self.mean_norms)
        return _cell_scores(
            self._augment(queries, query_norm), self._augment(items, item_norm), self.exponents
        )

    def _augment(self, x: Tensor, mean_norm: float) -> Tensor:
        norm = x.norm(dim=1, keepdim=True) * (self.weight / mean_norm)
        return torch.cat([shrink(x, 1.0), norm], dim=1)


@dataclass(frozen=True)
class Csls(Similarity):
    """Cross-domain similarity local scaling: 2 cos(q, d) - r(q) - r(d) (Conneau et al. 2018).

    r(q) is the mean cosine of q to its k nearest items of the reference, r(d) that of d to its k
    nearest queries of the query reference: items near to everything (hubs) lose. A vector that is
    itself in the other side's reference counts as its own neighbour, so where the two sides differ
    pass both. Each call compares its items with the whole query reference: prefer large chunks.
    """

    k: int = 10
    references: tuple[Tensor, Tensor] | None = field(default=None, repr=False, compare=False)
    """The unit vectors of the query side and of the item side."""

    def __post_init__(self) -> None:
        check_count("k", self.k)

    def _fit(self, sides: list[Tensor]) -> Self:
        units = [shrink(side, 1.0) for side in sides]
        check_available("neighbours", self.k, min(len(side) for side in units))
        return replace(self, references=(units[0], units[-1]))

    def _scores(self, queries: Tensor, items: Tensor) -> Tensor:
        query_reference, item_reference = _fitted("csls", self.references)
        around_queries = mean_nearest_cosine(queries, item_reference, self.k)
        around_items = mean_nearest_cosine(items, query_reference, self.k)
        return 2 * _cell_scores(queries, items, COSINE) - around_queries[:, None] - around_items


SIMILARITIES: dict[str, Callable[[], Similarity]] = {
    **{name: partial(CellSimilarity, exponents) for name, exponents in CORNERS.items()},
    "scaled": Scaled,
    "radial_angular": RadialAngular,
    "soft_cosine": SoftCosine,
    "query_zscore": QueryZScore,
    "euclidean": Euclidean,
    "centred": Centred,
    "whitened": Whitened,
    # Without shrinkage, as scikit-learn's PCA(whiten=True); with it, it would score as `whitened`.
    "whitened_pca": partial(Whitened, kind="pca", shrinkage=0.0),
    "top_removed": TopRemoved,
    "augmented": Augmented,
    "csls": Csls,
}


def similarity(name: str) -> Similarity:
    """The similarity of this name with its default settings."""
    if name not in SIMILARITIES:
        raise unknown("similarity", name, SIMILARITIES)
    return SIMILARITIES[name]()


def mean_nearest_cosine(
    x: Float[Tensor, "n d"], unit_reference: Float[Tensor, "m d"], k: int
) -> Float[Tensor, " n"]:
    """Mean cosine of each row to its k nearest rows of a reference of unit vectors."""
    if x.shape[1] != unit_reference.shape[1]:
        raise ValueError(
            f"Expected embeddings of the {unit_reference.shape[1]} features that were fitted, got "
            f"{x.shape[1]}: fit on a reference of the same encoder."
        )
    other = unit_reference.to(x)
    means = [
        (shrink(rows, 1.0) @ other.T).topk(k, dim=1).values.mean(1) for rows in x.split(SLAB // 4)
    ]
    return torch.cat(means)


def _cell_scores(queries: Tensor, items: Tensor, exponents: tuple[float, float]) -> Tensor:
    left, right = exponents
    return shrink(queries, float(left)) @ shrink(items, float(right)).T


def _mapped_scores(
    maps: SideMaps, queries: Tensor, items: Tensor, exponents: tuple[float, float]
) -> Tensor:
    return _cell_scores(maps.queries(queries), maps.items(items), exponents)


def _soft_maps(similar: Tensor, name: str) -> SideMaps:
    """Maps by a square root of S: soft cosine is the cosine of the mapped sides."""
    if similar.ndim != 2 or similar.shape[0] != similar.shape[1]:
        raise ValueError(f"{name} must be a square matrix, got shape {tuple(similar.shape)}.")
    similar = similar.detach().double()
    if not bool(similar.isfinite().all()):
        raise ValueError(f"{name} must be finite, got NaN or infinity.")
    if not torch.allclose(similar, similar.T, rtol=1e-6, atol=1e-9):
        raise ValueError(f"{name} must be symmetric: pass (S + S.T) / 2 if that is meant.")
    weights, directions = torch.linalg.eigh((similar + similar.T) / 2)
    floor = 1e-10 * weights.abs().max()
    if not weights[-1] > 0 or weights[0] < -floor:
        raise ValueError(
            f"{name} must be positive semidefinite, not zero, but its eigenvalues go from "
            f"{weights[0].item():.3g} to {weights[-1].item():.3g}. Pass another matrix "
            "as features, or use power=2: a squared correlation is always positive semidefinite."
        )
    kept = weights > floor
    zero = torch.zeros_like(weights)
    return SideMaps(zero, zero, directions[:, kept] * weights[kept].sqrt())


def _fitted(name: str, statistics: T | None) -> T:
    if statistics is None:
        raise ValueError(
            f"The similarity {name} needs the statistics of a reference set: call "
            "fit(reference) and score with what it returns."
        )
    return statistics
