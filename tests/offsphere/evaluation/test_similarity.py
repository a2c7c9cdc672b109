import math
from typing import Any, cast

import numpy as np
import pytest
import scipy.stats
import sklearn.covariance
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.decomposition import PCA
from sklearn.metrics.pairwise import cosine_similarity, euclidean_distances
from sklearn.preprocessing import StandardScaler

from offsphere import names
from offsphere.evaluation.similarity import (
    SIMILARITIES,
    Augmented,
    CellSimilarity,
    Centred,
    Csls,
    Euclidean,
    QueryZScore,
    RadialAngular,
    Scaled,
    SoftCosine,
    TopRemoved,
    Whitened,
    similarity,
)
from offsphere.names import CORNERS

NEED_FIT = {
    "soft_cosine": SoftCosine(),
    "centred": Centred(),
    "whitened": Whitened(),
    "whitened_pca": Whitened("pca", shrinkage=0.0),
    "top_removed": TopRemoved(),
    "augmented": Augmented(),
    "csls": Csls(),
}
DEFAULTS = {name: NEED_FIT.get(name) or make() for name, make in SIMILARITIES.items()}


def draw(n: int, d: int, seed: int = 0) -> torch.Tensor:
    """Float64 rows with a common mean, correlated features and uneven norms."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(d, d, generator=torch.Generator().manual_seed(d), dtype=torch.float64)
    x = torch.randn(n, d, generator=generator, dtype=torch.float64) @ mix + 0.7
    return x * (0.3 + torch.rand(n, 1, generator=generator, dtype=torch.float64))


def population_covariance(x: torch.Tensor) -> np.ndarray:
    return np.cov(x.numpy(), rowvar=False, ddof=0)


def close(got: torch.Tensor, want, rtol: float = 1e-9, atol: float = 1e-9) -> None:
    np.testing.assert_allclose(got.numpy(), np.asarray(want), rtol=rtol, atol=atol)


def test_names_are_the_agreed_ones():
    assert tuple(SIMILARITIES) == names.SIMILARITIES
    assert similarity("csls") == Csls(k=10)
    assert similarity("qnorm") == CellSimilarity((1.0, 0.0))


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match="Unknown similarity 'centered'.*Did you mean 'centred'"):
        similarity("centered")


@pytest.mark.parametrize("name", CORNERS)
def test_cells_divide_by_the_norms_that_their_name_says(name):
    q, x = draw(5, 4, 1), draw(7, 4, 2)
    left, right = CORNERS[name]
    want = q.numpy() @ x.numpy().T
    want = want / np.linalg.norm(q, axis=1)[:, None] ** left / np.linalg.norm(x, axis=1) ** right
    close(similarity(name).scores(q, x), want)


def test_cosine_and_euclidean_are_scikit_learns():
    q, x = draw(9, 6, 1), draw(11, 6, 2)
    close(similarity("cosine").scores(q, x), cosine_similarity(q, x))
    close(Euclidean().scores(q, x), -euclidean_distances(q, x))


def test_euclidean_keeps_small_differences_of_long_float32_vectors():
    x = torch.full((1, 64), 1000.0)
    near = x + torch.linspace(0.01, 0.5, 64)
    want = -(x.double() - near.double()).norm().item()
    assert Euclidean().scores(x, near).item() == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_scaled_is_the_loop(alpha):
    q, x = draw(4, 3, 1), draw(5, 3, 2)
    want = [
        [
            alpha * float(a @ b / (a.norm() * b.norm())) + (1 - alpha) * float(a.norm() + b.norm())
            for b in x
        ]
        for a in q
    ]
    close(Scaled(alpha).scores(q, x), want)


@pytest.mark.parametrize("angle_weight", [0.0, 1.0, 2.5])
def test_radial_angular_is_the_loop(angle_weight):
    q, x = draw(4, 3, 1), draw(5, 3, 2)
    want = [
        [
            -abs(float(a.norm() - b.norm()))
            - angle_weight * math.acos(float(a @ b / (a.norm() * b.norm())))
            for b in x
        ]
        for a in q
    ]
    close(RadialAngular(angle_weight).scores(q, x), want)


def test_radial_angular_of_a_small_float32_angle():
    angle = 1e-3
    q, x = torch.tensor([[1.0, 0.0]]), torch.tensor([[math.cos(angle), math.sin(angle)]])
    assert RadialAngular().scores(q, x).item() == pytest.approx(-angle, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_radial_angular_of_a_vector_with_itself_is_zero(dtype):
    x = draw(50, 7).to(dtype)
    close(RadialAngular().scores(x, x).diagonal(), np.zeros(50), atol=1e-7)


def test_query_zscore_is_scipys():
    q, x = draw(6, 5, 1), draw(9, 5, 2)
    want = scipy.stats.zscore(cosine_similarity(q, x), axis=1, ddof=0)
    close(QueryZScore().scores(q, x), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_query_zscore_without_spread_is_zero(dtype):
    items = torch.arange(1.0, 6.0, dtype=dtype)[:, None] * torch.tensor([0.1, 0.7, 0.3]).to(dtype)
    assert QueryZScore().scores(draw(3, 3).to(dtype), items).eq(0).all()


def test_centred_is_scikit_learns_scaler_on_each_side():
    reference, references_q = draw(30, 4, 1), draw(20, 4, 2) + 3
    q, x = draw(5, 4, 3), draw(6, 4, 4)
    of_queries = StandardScaler(with_std=False).fit(references_q.numpy()).transform(q.numpy())
    of_items = StandardScaler(with_std=False).fit(reference.numpy()).transform(x.numpy())
    fitted = Centred().fit(reference, references_q)
    close(fitted.scores(q, x), cosine_similarity(of_queries, of_items))
    both = StandardScaler(with_std=False).fit(reference.numpy())
    want = cosine_similarity(both.transform(q.numpy()), of_items)
    close(Centred().fit(reference).scores(q, x), want)


@pytest.mark.parametrize("components", [None, 3])
def test_pca_whitening_is_scikit_learns(components):
    reference, x = draw(50, 6, 1), draw(8, 6, 2)
    peer = PCA(components, whiten=True, svd_solver="full").fit(reference.numpy())
    # scikit-learn's unit variance is the sample form, ours the population form; signs are free.
    want = peer.transform(x.numpy()) * math.sqrt(50 / 49)
    fitted = Whitened("pca", shrinkage=0.0, components=components).fit(reference)
    assert fitted.maps is not None
    close(fitted.maps.items(x).abs(), np.abs(want))
    close(fitted.scores(x, x), cosine_similarity(want))


def test_zca_whitening_is_the_symmetric_inverse_root():
    reference = draw(50, 6, 1)
    fitted = Whitened(shrinkage=0.0).fit(reference)
    assert fitted.maps is not None
    assert fitted.maps.matrix is not None
    matrix = fitted.maps.matrix
    close(matrix, matrix.T)
    close(matrix @ matrix, np.linalg.inv(population_covariance(reference)))
    close(torch.from_numpy(population_covariance(fitted.maps.items(reference))), np.eye(6))


@pytest.mark.parametrize(("n", "d"), [(60, 5), (12, 12), (7, 20), (2, 3), (40, 1)])
def test_the_default_whitens_by_scikit_learns_ledoit_wolf_covariance(n, d):
    reference = draw(n, d, 1)
    want, shrinkage = sklearn.covariance.ledoit_wolf(reference.numpy())
    fitted = Whitened("zca").fit(reference)
    assert fitted.maps is not None
    assert fitted.maps.matrix is not None
    assert (shrinkage > 0) == (n > 2 and d > 1)
    want_inverse = np.linalg.pinv(want, hermitian=True)
    close(fitted.maps.matrix @ fitted.maps.matrix, want_inverse, rtol=1e-6)


def test_a_given_shrinkage_mixes_the_mean_variance_in():
    reference = draw(30, 4, 1)
    want = sklearn.covariance.shrunk_covariance(population_covariance(reference), shrinkage=0.3)
    fitted = Whitened(shrinkage=0.3).fit(reference)
    assert fitted.maps is not None
    assert fitted.maps.matrix is not None
    close(fitted.maps.matrix @ fitted.maps.matrix, np.linalg.inv(want))


def test_full_shrinkage_is_centring():
    reference, q, x = draw(30, 4, 1), draw(5, 4, 2), draw(6, 4, 3)
    want = Centred().fit(reference).scores(q, x)
    close(Whitened(shrinkage=1.0).fit(reference).scores(q, x), want)


def test_two_references_share_one_covariance_about_their_own_means():
    items, queries = draw(30, 4, 1), draw(20, 4, 2) + 5
    fitted = Whitened(shrinkage=0.0).fit(items, queries)
    pooled = (30 * population_covariance(items) + 20 * population_covariance(queries)) / 50
    assert fitted.maps is not None
    assert fitted.maps.matrix is not None
    close(fitted.maps.matrix @ fitted.maps.matrix, np.linalg.inv(pooled))
    close(fitted.maps.items(items).mean(0), np.zeros(4))
    close(fitted.maps.queries(queries).mean(0), np.zeros(4))


def test_a_reference_given_for_both_sides_counts_once():
    reference, q, x = draw(9, 4, 1), draw(5, 4, 2), draw(6, 4, 3)
    want = Whitened().fit(reference).scores(q, x)
    close(Whitened().fit(reference, reference).scores(q, x), want)


@pytest.mark.parametrize("components", [1, 2])
def test_top_removed_leaves_the_residual_of_scikit_learns_pca(components):
    reference, q, x = draw(40, 5, 1), draw(6, 5, 2), draw(7, 5, 3)
    peer = PCA(components, svd_solver="full").fit(reference.numpy())

    def residual(rows: torch.Tensor) -> np.ndarray:
        return rows.numpy() - peer.inverse_transform(peer.transform(rows.numpy()))

    got = TopRemoved(components).fit(reference).scores(q, x)
    close(got, cosine_similarity(residual(q), residual(x)))


def test_soft_cosine_with_a_given_matrix_is_the_loop_fitted_or_not():
    q, x = draw(4, 3, 1), draw(5, 3, 2)
    root = draw(3, 3, 3)
    s = root @ root.T
    want = [[float(a @ s @ b / ((a @ s @ a) * (b @ s @ b)).sqrt()) for b in x] for a in q]
    close(SoftCosine(s).scores(q, x), want)
    close(SoftCosine(s).fit(x).scores(q, x), want)


def test_soft_cosine_with_a_matrix_of_rank_one_is_a_sign():
    q, x, a = draw(4, 5, 1), draw(6, 5, 2), draw(1, 5, 3)
    want = torch.sign(q @ a.T) @ torch.sign(x @ a.T).T
    close(SoftCosine(a.T @ a).scores(q, x), want)


def test_soft_cosine_with_the_identity_is_cosine():
    q, x = draw(4, 3, 1), draw(5, 3, 2)
    close(SoftCosine(torch.eye(3)).scores(q, x), cosine_similarity(q, x))


@pytest.mark.parametrize("power", [1.0, 2.0])
def test_soft_cosine_takes_the_features_correlation_by_default(power):
    reference, q, x = draw(30, 3, 1), draw(4, 3, 2), draw(5, 3, 3)
    s = torch.from_numpy(np.abs(np.corrcoef(reference.numpy(), rowvar=False)) ** power)
    close(SoftCosine(power=power).fit(reference).scores(q, x), SoftCosine(s).scores(q, x))


def test_a_feature_that_is_constant_in_the_reference_is_like_itself_only():
    reference, q, x = draw(30, 3, 1), draw(4, 3, 2), draw(5, 3, 3)
    reference[:, 1] = 0.1
    s = torch.eye(3, dtype=torch.float64)
    s[0, 2] = s[2, 0] = abs(np.corrcoef(reference[:, 0], reference[:, 2])[0, 1])
    close(SoftCosine(power=1).fit(reference).scores(q, x), SoftCosine(s).scores(q, x))


def indefinite_reference() -> torch.Tensor:
    """Four directions in a plane, 45 degrees apart: eigenvalue 1 - sqrt(2) of |correlation|."""
    steps = torch.linspace(0, 2 * math.pi, 9, dtype=torch.float64)[:-1]
    plane = torch.stack([steps.cos(), steps.sin()], 1)
    return plane @ torch.tensor([[1, 1, 0, -1], [0, 1, 1, 1]], dtype=torch.float64)


def test_an_absolute_correlation_that_is_not_semidefinite_is_refused_and_its_square_is_not():
    reference = indefinite_reference()
    absolute = np.abs(np.corrcoef(reference.numpy(), rowvar=False))
    assert np.linalg.eigvalsh(absolute)[0] == pytest.approx(1 - math.sqrt(2))
    with pytest.raises(ValueError, match=r"positive semidefinite.*power=2"):
        SoftCosine(power=1).fit(reference)
    squared = torch.from_numpy(absolute**2)
    q, x = draw(4, 4, 3), draw(5, 4, 4)
    close(SoftCosine(power=2).fit(reference).scores(q, x), SoftCosine(squared).scores(q, x))


def test_augmented_is_the_loop():
    reference, references_q = draw(20, 3, 1), draw(15, 3, 2)
    q, x = draw(4, 3, 3), draw(5, 3, 4)

    def augmented(row: torch.Tensor, side: torch.Tensor) -> torch.Tensor:
        norm = 0.6 * row.norm() / np.linalg.norm(side.numpy(), axis=1).mean()
        return torch.cat([row / row.norm(), norm[None]])

    rows = [augmented(a, references_q) for a in q], [augmented(b, reference) for b in x]
    got = Augmented(0.6).fit(reference, references_q).scores(q, x)
    close(got, cosine_similarity(torch.stack(rows[0]), torch.stack(rows[1])))


def test_augmented_without_weight_is_cosine():
    q, x = draw(4, 3, 1), draw(5, 3, 2)
    close(Augmented(0.0).fit(x).scores(q, x), cosine_similarity(q, x))


@pytest.mark.parametrize("with_queries", [True, False])
def test_csls_is_the_loop(with_queries):
    reference, references_q = draw(20, 3, 1), draw(15, 3, 2)
    q, x, k = draw(4, 3, 3), draw(5, 3, 4), 6

    def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
        return float(a @ b / (a.norm() * b.norm()))

    def around(row: torch.Tensor, others: torch.Tensor) -> float:
        return float(np.mean(sorted(cosine(row, other) for other in others)[-k:]))

    others = references_q if with_queries else reference
    want = [[2 * cosine(a, b) - around(a, reference) - around(b, others) for b in x] for a in q]
    fitted = Csls(k).fit(reference, references_q if with_queries else None)
    close(fitted.scores(q, x), want)


def test_csls_takes_a_hub_off_the_top():
    """Each query's own item has cosine 0.45 with it and 0 with the others; the hub has 0.5."""
    queries = torch.cat([torch.eye(4), torch.zeros(4, 4)], 1).double()
    own = torch.cat([0.45 * torch.eye(4), math.sqrt(1 - 0.45**2) * torch.eye(4)], 1).double()
    hub = queries.sum(0, keepdim=True)
    items = torch.cat([own, hub])
    assert similarity("cosine").scores(queries, items).argmax(1).tolist() == [4, 4, 4, 4]
    around_query, around_own, around_hub = (0.5 + 0.45) / 2, 0.45 / 2, 0.5
    want = torch.full((4, 5), -around_query - around_own).fill_diagonal_(
        2 * 0.45 - around_query - around_own
    )
    want[:, 4] = 2 * 0.5 - around_query - around_hub
    got = Csls(2).fit(items, queries).scores(queries, items)
    close(got, want, atol=1e-6)
    assert got.argmax(1).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("name", DEFAULTS)
@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 10_000), step=st.integers(1, 9))
def test_queries_may_be_scored_in_chunks(name, seed, step):
    reference, q, x = draw(25, 4, seed), draw(9, 4, seed + 1), draw(12, 4, seed + 2)
    fitted = DEFAULTS[name].fit(reference)
    chunks = [fitted.scores(rows, x) for rows in q.split(step)]
    close(torch.cat(chunks), fitted.scores(q, x))


@pytest.mark.parametrize("name", [name for name in DEFAULTS if name != "query_zscore"])
def test_items_may_be_scored_in_chunks_except_for_the_zscore(name):
    reference, q, x = draw(25, 4, 1), draw(9, 4, 2), draw(12, 4, 3)
    fitted = DEFAULTS[name].fit(reference)
    chunks = [fitted.scores(q, rows) for rows in x.split(5)]
    close(torch.cat(chunks, 1), fitted.scores(q, x))


@pytest.mark.parametrize(
    "name",
    [name for name in DEFAULTS if name not in ("qnorm", "dnorm", "query_zscore")],
)
@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 10_000))
def test_with_one_reference_the_two_sides_are_interchangeable(name, seed):
    q, x = draw(6, 4, seed), draw(7, 4, seed + 1)
    fitted = DEFAULTS[name].fit(draw(25, 4, seed + 2))
    close(fitted.scores(q, x), fitted.scores(x, q).T)


@pytest.mark.parametrize("name", ["cosine", "soft_cosine", "query_zscore", "csls"])
@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 10_000), scale=st.floats(1e-3, 1e3))
def test_directions_alone_count(name, seed, scale):
    reference, q, x = draw(25, 4, seed), draw(6, 4, seed + 1), draw(7, 4, seed + 2)
    scales = torch.linspace(1, scale, 7, dtype=torch.float64)[:, None]
    fitted = DEFAULTS[name].fit(reference)
    close(fitted.scores(q * scales[:6], x * scales), fitted.scores(q, x), rtol=1e-7)


@pytest.mark.parametrize(
    "name", ["centred", "whitened", "whitened_pca", "top_removed", "augmented"]
)
@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 10_000), scale=st.floats(1e-3, 1e3))
def test_a_common_unit_of_length_does_not_count(name, seed, scale):
    reference, q, x = draw(25, 4, seed), draw(6, 4, seed + 1), draw(7, 4, seed + 2)
    want = DEFAULTS[name].fit(reference).scores(q, x)
    close(DEFAULTS[name].fit(scale * reference).scores(scale * q, scale * x), want, rtol=1e-7)


@pytest.mark.parametrize("name", ["centred", "whitened", "whitened_pca", "top_removed"])
@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 10_000))
def test_centring_forgets_where_each_side_lies(name, seed):
    reference, references_q = draw(25, 4, seed), draw(25, 4, seed + 1)
    q, x, gap = draw(6, 4, seed + 2), draw(7, 4, seed + 3), draw(2, 4, seed + 4)
    want = DEFAULTS[name].fit(reference, references_q).scores(q, x)
    fitted = DEFAULTS[name].fit(reference + gap[0], references_q + gap[1])
    close(fitted.scores(q + gap[1], x + gap[0]), want, rtol=1e-7)


@pytest.mark.parametrize("kind", ["zca", "pca"])
@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 10_000))
def test_whitened_scores_do_not_change_under_an_invertible_linear_map(kind, seed):
    reference, q, x = draw(25, 4, seed), draw(6, 4, seed + 1), draw(7, 4, seed + 2)
    generator = torch.Generator().manual_seed(seed)
    rotation, _ = torch.linalg.qr(torch.randn(4, 4, generator=generator, dtype=torch.float64))
    stretch = rotation * (0.2 + torch.rand(4, generator=generator, dtype=torch.float64))
    whitened = Whitened(kind, shrinkage=0.0)
    want = whitened.fit(reference).scores(q, x)
    close(whitened.fit(reference @ stretch).scores(q @ stretch, x @ stretch), want, rtol=1e-7)


@pytest.mark.parametrize("shrinkage", [0.0, 0.2, "ledoit_wolf"])
@pytest.mark.parametrize("exponents", [(1.0, 1.0), (0.0, 0.0), (1.0, 0.0)])
def test_zca_and_pca_differ_by_a_rotation_that_no_score_sees(shrinkage, exponents):
    reference, q, x = draw(25, 4, 1), draw(6, 4, 2), draw(7, 4, 3)
    zca, pca = (
        Whitened(kind, shrinkage, exponents=exponents).fit(reference) for kind in ("zca", "pca")
    )
    close(zca.scores(q, x), pca.scores(q, x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_unshrunk_whitening_leaves_out_redundant_directions(dtype):
    """A repeated and a constant feature change nothing but the repeated one's weight."""
    base, q, x = draw(40, 3, 1).to(dtype), draw(5, 3, 2).to(dtype), draw(6, 3, 3).to(dtype)

    def padded(rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([rows, rows[:, :1], torch.full_like(rows[:, :1], 7.0)], 1)

    fitted = Whitened("pca", shrinkage=0.0).fit(padded(base))
    assert fitted.maps is not None
    assert fitted.maps.items(padded(x)).shape == (6, 3)
    want = Whitened("pca", shrinkage=0.0).fit(base).scores(q, x)
    close(fitted.scores(padded(q), padded(x)), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_unshrunk_whitening_of_few_rows_makes_them_a_simplex(dtype):
    reference = draw(5, 12, 1).to(dtype)
    got = Whitened(shrinkage=0.0).fit(reference).scores(reference, reference)
    want = torch.full((5, 5), -1 / 4).fill_diagonal_(1)
    close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("unfitted", [Whitened(), Whitened(shrinkage=0.0), TopRemoved()])
def test_a_reference_that_varies_by_rounding_alone_is_refused(unfitted):
    reference = torch.full((9, 4), 0.1)
    reference[2, 1] = torch.nextafter(reference[2, 1], torch.tensor(1.0))
    with pytest.raises(ValueError, match="9 reference rows do not vary"):
        unfitted.fit(reference)


def test_half_precision_is_scored_in_float32():
    reference, q, x = (draw(n, 4, n).bfloat16() for n in (30, 5, 6))
    for name, s in DEFAULTS.items():
        got = s.fit(reference).scores(q, x)
        assert got.dtype == torch.float32, name
        close(got, s.fit(reference.float()).scores(q.float(), x.float()))


def test_float32_scores_are_the_float64_scores():
    reference, q, x = (draw(n, 4, n).float() for n in (30, 5, 6))
    for s in DEFAULTS.values():
        want = s.fit(reference.double()).scores(q.double(), x.double())
        close(s.fit(reference).scores(q, x), want, rtol=1e-4, atol=1e-4)


def test_fitting_returns_a_copy_and_keeps_no_graph():
    reference = draw(25, 4).requires_grad_()
    for name, s in DEFAULTS.items():
        fitted = s.fit(reference)
        assert not fitted.scores(reference, reference).requires_grad
        if name in NEED_FIT:
            assert fitted is not s
            with pytest.raises(ValueError, match=rf"{name.removesuffix('_pca')} needs.*fit"):
                s.scores(reference, reference)


@pytest.mark.parametrize("name", DEFAULTS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite_are_refused(name, value):
    good, bad = draw(25, 4, 1), draw(25, 4, 2)
    bad[3, 1] = value
    fitted = DEFAULTS[name].fit(good)
    with pytest.raises(ValueError, match="1 of 25 rows of queries.*row 3"):
        fitted.scores(bad, good)
    with pytest.raises(ValueError, match="1 of 25 rows of items.*row 3"):
        fitted.scores(good, bad)
    if name in NEED_FIT:
        with pytest.raises(ValueError, match="1 of 25 rows of reference are not finite"):
            DEFAULTS[name].fit(bad)
        with pytest.raises(ValueError, match="1 of 25 rows of reference queries are not"):
            DEFAULTS[name].fit(good, bad)


@pytest.mark.parametrize("name", DEFAULTS)
def test_zero_vectors_score_finite(name):
    x = draw(8, 4)
    x[2] = 0
    assert DEFAULTS[name].fit(draw(25, 4, 1)).scores(x, x).isfinite().all()


@pytest.mark.parametrize("name", [name for name in NEED_FIT if name != "augmented"])
def test_a_reference_of_another_width_is_refused(name):
    fitted = DEFAULTS[name].fit(draw(25, 4))
    with pytest.raises(ValueError, match="the 4 features that were fitted, got 5"):
        fitted.scores(draw(3, 5), draw(3, 5))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Scaled(1.5), "alpha from 0 to 1, got 1.5"),
        (lambda: Scaled(math.nan), "alpha from 0 to 1"),
        (lambda: RadialAngular(-1.0), "angle_weight to be finite and not negative"),
        (lambda: Augmented(math.inf), "weight to be finite"),
        (lambda: SoftCosine(power=-1.0), "power to be finite"),
        (lambda: Csls(0), "k of at least 1"),
        (lambda: TopRemoved(0), "components of at least 1"),
        (lambda: Whitened(components=0), "components of at least 1"),
        (lambda: Whitened(cast(Any, "zcq")), "Unknown kind of whitening.*Did you mean 'zca'"),
        (lambda: Whitened(shrinkage=-0.1), "shrinkage from 0 to 1"),
        (
            lambda: Whitened(shrinkage=cast(Any, "ledoit")),
            "Unknown shrinkage.*Did you mean 'ledoit_wolf'",
        ),
        (lambda: Whitened(components=5).fit(draw(25, 4)), "5 components.*allows 4"),
        (lambda: TopRemoved(4).fit(draw(25, 4)), "4 components to remove.*allows 3"),
        (lambda: Csls(26).fit(draw(25, 4)), "26 neighbours.*allows 25"),
        (lambda: Csls(20).fit(draw(25, 4), draw(15, 4)), "20 neighbours.*allows 15"),
        (lambda: Whitened().fit(draw(1, 4)), "at least two reference rows per side, got 1"),
        (lambda: Whitened().fit(draw(9, 4), draw(1, 4)), "at least two reference rows"),
        (lambda: Whitened().fit(torch.full((9, 4), 0.1)), "9 reference rows do not vary"),
        (lambda: TopRemoved().fit(torch.full((9, 4), 0.1)), "9 reference rows do not vary"),
        (lambda: Whitened().fit(torch.full((9, 4), 0.1).double()), "reference rows do not vary"),
        (lambda: Augmented().fit(torch.zeros(9, 4)), "every reference vector of a side is zero"),
        (lambda: Centred().fit(draw(9, 4), draw(9, 5)), "of one width, got 5 and 4"),
        (lambda: Centred().fit(torch.ones(9, 4, dtype=torch.long)), "floating-point matrix"),
        (lambda: Centred().fit(torch.ones(0, 4)), "at least one row of reference, got none"),
        (lambda: Euclidean().scores(draw(3, 4), draw(3, 5)), "of one width, got 5 and 4"),
        (lambda: Euclidean().scores(draw(3, 4)[0], draw(3, 4)), "queries as a floating-point"),
        (lambda: SoftCosine(torch.ones(2, 3)).fit(draw(3, 2)), "must be a square matrix"),
        (lambda: SoftCosine(torch.zeros(2, 2)).fit(draw(3, 2)), "not zero"),
        (lambda: SoftCosine(torch.eye(2) * math.nan).fit(draw(3, 2)), "must be finite"),
        (lambda: SoftCosine(-torch.eye(2)).fit(draw(3, 2)), "semidefinite.*from -1 to -1"),
        (
            lambda: SoftCosine(torch.tensor([[1.0, 1.0], [0.0, 1.0]])).fit(draw(3, 2)),
            "must be symmetric",
        ),
    ],
)
def test_what_cannot_be_done_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
