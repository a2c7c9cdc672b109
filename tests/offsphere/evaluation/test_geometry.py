import math

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.decomposition import PCA

from offsphere.evaluation import geometry


def draw(n: int, d: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=generator) + 0.3
    return x * torch.rand(n, 1, generator=generator).add(0.1) * 5


def numbers(statistics: dict[str, torch.Tensor]) -> dict[str, float]:
    assert all(value.ndim == 0 for value in statistics.values())
    return {name: value.item() for name, value in statistics.items()}


@pytest.mark.parametrize("n", [1, 2, 7, 500])
def test_norm_statistics_are_numpys(n):
    x = draw(n, 6)
    norms = np.linalg.norm(x.numpy(), axis=1)
    got = numbers(geometry.norm_statistics(x))
    want = {"mean": norms.mean(), "std": norms.std(), "cv": norms.std() / norms.mean()}
    want |= {f"q{q:02d}": np.quantile(norms, q / 100) for q in (5, 25, 50, 75, 95)}
    assert got == pytest.approx(want, rel=1e-5, abs=1e-6)


def test_norm_statistics_of_a_collapsed_encoder_are_finite():
    assert numbers(geometry.norm_statistics(torch.zeros(4, 3)))["cv"] == 0


def test_cohens_d_by_hand():
    a, b = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 4.0])
    pooled = math.sqrt((2 * 1.0 + 1 * 2.0) / 3)
    assert geometry.cohens_d(a, b).item() == pytest.approx((2 - 3) / pooled)
    assert geometry.cohens_d(a, torch.tensor([5.0])).item() == pytest.approx(-3)


def test_cohens_d_is_the_t_statistic_rescaled():
    a, b = draw(40, 1, 1).flatten(), draw(25, 1, 2).flatten()
    t = scipy.stats.ttest_ind(a.numpy(), b.numpy()).statistic
    assert geometry.cohens_d(a, b).item() == pytest.approx(t * math.sqrt(1 / 40 + 1 / 25), rel=1e-5)


def test_alignment_is_the_mean_power_of_the_chord():
    u, v = draw(9, 4, 1), draw(9, 4, 2)
    for alpha in (1.0, 2.0):
        want = np.mean(
            [
                np.linalg.norm(a / np.linalg.norm(a) - b / np.linalg.norm(b)) ** alpha
                for a, b in zip(u.numpy(), v.numpy(), strict=True)
            ]
        )
        assert geometry.alignment(u, v, alpha).item() == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("tile", [1, 3, 64])
def test_uniformity_is_the_loop_over_distinct_pairs(tile):
    x = draw(17, 5)
    u = x.double().numpy() / np.linalg.norm(x.double().numpy(), axis=1, keepdims=True)
    terms = [np.exp(-2 * np.sum((u[i] - u[j]) ** 2)) for i in range(17) for j in range(i)]
    got = geometry.uniformity(x, tile=tile).item()
    assert got == pytest.approx(math.log(np.mean(terms)), rel=1e-5)


def test_uniformity_does_not_underflow_for_opposite_points():
    x = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    assert geometry.uniformity(x, t=100).item() == pytest.approx(-400)


def test_modality_gap_of_two_rays():
    left = torch.tensor([[3.0, 0.0], [1.0, 0.0]])
    right = torch.tensor([[0.0, 1.0], [0.0, 3.0], [0.0, 2.0]])
    want = {"gap": math.sqrt(2), "gap_raw": math.sqrt(8), "norm_ratio": 1.0}
    assert numbers(geometry.modality_gap(left, right)) == pytest.approx(want)


def brute_force_occurrence(scores: np.ndarray, k: int) -> np.ndarray:
    nearest = np.argsort(-scores, axis=1)[:, :k]
    return np.bincount(nearest.ravel(), minlength=scores.shape[1])


@pytest.mark.parametrize("item_exponent", [0.0, 0.4, 1.0])
def test_hubness_is_the_brute_force_count(item_exponent):
    queries, items, k = draw(60, 5, 1), draw(45, 5, 2), 4
    norms = np.linalg.norm(items.numpy(), axis=1)
    scores = queries.numpy() @ (items.numpy() / norms[:, None] ** item_exponent).T
    counts = brute_force_occurrence(scores, k)
    want = {
        "skewness": scipy.stats.skew(counts),
        "robin_hood": np.abs(counts - counts.mean()).sum() / (2 * counts.sum()),
        "antihub_rate": np.mean(counts == 0),
        "hub_share": counts[counts >= 2 * counts.mean()].sum() / counts.sum(),
        "largest_hub_share": counts.max() / (60 * k),
        "norm_correlation": np.corrcoef(norms, counts)[0, 1],
    }
    got = numbers(geometry.hubness(queries, items, k, item_exponent=item_exponent))
    assert got == pytest.approx(want, rel=1e-5)


def test_norm_correlation_of_unit_items_is_undefined():
    got = geometry.hubness(draw(40, 8, 1), geometry.unit(draw(30, 8, 2)), 5)
    assert got["norm_correlation"].isnan()


def test_even_occurrence_has_no_skew():
    got = numbers(geometry.occurrence_statistics(torch.full((6,), 3), torch.arange(1.0, 7.0)))
    assert math.isnan(got.pop("norm_correlation"))
    assert got == pytest.approx(
        {
            "skewness": 0,
            "robin_hood": 0,
            "antihub_rate": 0,
            "hub_share": 0,
            "largest_hub_share": 1 / 6,
        }
    )


@pytest.mark.parametrize(("n", "d"), [(300, 24), (24, 24), (10, 40)])
def test_rankme_is_the_svd_definition(n, d):
    x = draw(n, d)
    sigma = np.linalg.svd(x.double().numpy(), compute_uv=False)
    p = sigma / sigma.sum() + 1e-7
    want = math.exp(-(p * np.log(p)).sum())
    assert geometry.rankme(x).item() == pytest.approx(want, rel=1e-6)


def test_rankme_of_low_rank_features_is_the_svd_definition():
    x = draw(200, 3, 1) @ draw(3, 32, 2)
    sigma = np.linalg.svd(x.double().numpy(), compute_uv=False)
    p = sigma / sigma.sum() + 1e-7
    assert geometry.rankme(x).item() == pytest.approx(math.exp(-(p * np.log(p)).sum()), rel=1e-5)


def six_step_isoscore(x: np.ndarray) -> float:
    d = x.shape[1]
    variances = np.linalg.eigvalsh(np.cov(x, rowvar=False))
    scaled = math.sqrt(d) * variances / np.linalg.norm(variances)
    defect = np.linalg.norm(scaled - 1) / math.sqrt(2 * (d - math.sqrt(d)))
    share = (d - defect**2 * (d - math.sqrt(d))) ** 2 / d**2
    return (d * share - 1) / (d - 1)


@pytest.mark.parametrize(("n", "d"), [(200, 12), (8, 12)])
def test_isotropy_is_the_published_algorithm_and_the_loop_over_pairs(n, d):
    x = draw(n, d)
    cosines = [
        float(torch.nn.functional.cosine_similarity(x[i], x[j], dim=0))
        for i in range(8)
        for j in range(i)
    ]
    got = numbers(geometry.isotropy(x))
    assert got["isoscore"] == pytest.approx(six_step_isoscore(x.double().numpy()), rel=1e-4)
    pairs = numbers(geometry.isotropy(x[:8]))
    assert pairs["mean_cosine"] == pytest.approx(np.mean(cosines), abs=1e-6)


def test_isoscore_ends():
    basis = torch.cat([torch.eye(5), -torch.eye(5)])
    assert geometry.isotropy(basis)["isoscore"].item() == pytest.approx(1, abs=1e-6)
    line = torch.linspace(-1, 1, 9)[:, None] * torch.ones(5)
    assert geometry.isotropy(line)["isoscore"].item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(("n", "d"), [(200, 6), (5, 12)])
def test_anisotropy_is_the_share_of_the_mean_and_scikit_learns_first_component(n, d):
    x = draw(n, d) + 2
    rows = x.double().numpy()
    mean_share = (rows.mean(0) ** 2).sum() / (rows**2).sum(1).mean()
    want = {"mean_share": mean_share, "top_share": PCA().fit(rows).explained_variance_ratio_[0]}
    assert numbers(geometry.anisotropy(x)) == pytest.approx(want, rel=1e-5)


def test_anisotropy_ends():
    basis = torch.cat([torch.eye(5), -torch.eye(5)])
    want = {"mean_share": 0, "top_share": 1 / 5}
    assert numbers(geometry.anisotropy(basis)) == pytest.approx(want, abs=1e-6)
    line = torch.linspace(-1, 1, 9)[:, None] * torch.ones(5) + 3
    assert geometry.anisotropy(line)["top_share"].item() == pytest.approx(1, abs=1e-6)


def test_anisotropy_of_a_collapsed_encoder_is_all_mean_and_no_variance():
    got = numbers(geometry.anisotropy(torch.full((7, 4), 0.1)))
    assert got["mean_share"] == pytest.approx(1)
    assert math.isnan(got["top_share"])


def test_log_norm_cosine_correlation_is_scipys():
    left, right = draw(50, 6, 1), draw(50, 6, 2)
    cosine = torch.nn.functional.cosine_similarity(left.double(), right.double())
    log_norms = (left.double().norm(dim=1) * right.double().norm(dim=1)).log()
    want = scipy.stats.pearsonr(log_norms.numpy(), cosine.numpy()).statistic
    got = geometry.log_norm_cosine_correlation(left, right).item()
    assert got == pytest.approx(want, abs=1e-6)


def test_log_norm_cosine_correlation_of_unit_vectors_is_undefined():
    left, right = geometry.unit(draw(50, 6, 1)), geometry.unit(draw(50, 6, 2))
    assert geometry.log_norm_cosine_correlation(left, right).isnan()


@settings(deadline=None, max_examples=25)
@given(
    queries=st.integers(1, 20),
    items=st.integers(2, 30),
    k=st.integers(1, 30),
    query_tile=st.integers(1, 8),
    item_tile=st.integers(1, 12),
)
def test_top_items_does_not_depend_on_the_tiles(queries, items, k, query_tile, item_tile):
    k = min(k, items)
    q, x = draw(queries, 4, 1).double(), draw(items, 4, 2).double()
    scores, indices = geometry.top_items(q, x, k, query_tile=query_tile, item_tile=item_tile)
    want = (q @ x.T).topk(k, dim=1)
    torch.testing.assert_close(scores, want.values)
    torch.testing.assert_close((q @ x.T).gather(1, indices), want.values)


@settings(deadline=None, max_examples=25)
@given(scale=st.floats(1e-3, 1e3), seed=st.integers(0, 1000))
def test_directions_only_metrics_ignore_the_scale(scale, seed):
    left, right = draw(12, 4, seed).double(), draw(12, 4, seed + 1).double()
    row_scales = torch.linspace(1, scale, 12, dtype=torch.float64)[:, None]
    for metric in (geometry.uniformity, lambda x: geometry.isotropy(x)["mean_cosine"]):
        torch.testing.assert_close(metric(left * row_scales), metric(left), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        geometry.alignment(left * row_scales, right), geometry.alignment(left, right)
    )
    torch.testing.assert_close(geometry.rankme(left * scale), geometry.rankme(left))


def test_no_metric_keeps_a_graph():
    x = draw(20, 4).requires_grad_()
    values = [geometry.alignment(x, x), geometry.uniformity(x), geometry.rankme(x)]
    values += geometry.norm_statistics(x).values()
    values += geometry.isotropy(x).values()
    values += geometry.anisotropy(x).values()
    values += geometry.modality_gap(x, x).values()
    values += geometry.hubness(x, x, 3).values()
    assert not any(value.requires_grad for value in values)


@pytest.mark.parametrize(
    "call",
    [
        lambda: geometry.alignment(torch.ones(3, 2), torch.ones(4, 2)),
        lambda: geometry.uniformity(torch.ones(1, 2)),
        lambda: geometry.modality_gap(torch.ones(3, 2), torch.ones(3, 5)),
        lambda: geometry.hubness(torch.ones(3, 2), torch.ones(4, 2), k=5),
        lambda: geometry.hubness(torch.ones(3, 2), torch.ones(4, 2), k=0),
        lambda: geometry.isotropy(torch.ones(1, 4)),
        lambda: geometry.anisotropy(torch.ones(1, 4)),
        lambda: geometry.cohens_d(torch.ones(2), torch.ones(0)),
    ],
)
def test_degenerate_input_is_refused(call):
    with pytest.raises(ValueError, match=r"got|asked for"):
        call()
