import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.cluster import KMeans
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import normalized_mutual_info_score, roc_auc_score
from torchmetrics.functional.classification import binary_calibration_error

from offsphere.evaluation import clustering as clusters
from offsphere.evaluation import confidence


def outcomes(n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores and norms, both telling something of their own about being right."""
    generator = torch.Generator().manual_seed(seed)
    score = torch.rand(n, generator=generator)
    norm = torch.randn(n, generator=generator).mul(0.4).exp()
    chance = (3 * (score - 0.5) + 4 * norm.log()).sigmoid()
    return score, norm, torch.rand(n, generator=generator) < chance


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=2, max_size=40).filter(
        lambda rows: len({positive for _, positive in rows}) == 2
    )
)
def test_auroc_with_ties_is_sklearns(rows):
    scores, positive = (list(column) for column in zip(*rows, strict=True))
    got = confidence.auroc(torch.tensor(scores).float(), torch.tensor(positive))
    assert got == pytest.approx(roc_auc_score(positive, scores), abs=1e-12)


def test_norm_buckets_are_the_loop():
    _, norms, correct = outcomes(2000)
    examples, accuracy = confidence.accuracy_per_norm_bucket(norms, correct)
    share = norms.double() / norms.max()
    for i in range(20):
        upper = 1.01 if i == 19 else (i + 1) / 20
        inside = (share >= i / 20) & (share < upper)
        assert examples[i] == inside.sum()
        if inside.sum() >= 10:
            assert accuracy[i].item() == pytest.approx(correct[inside].double().mean().item())
        else:
            assert accuracy[i].isnan()
    assert examples.sum() == 2000


def test_calibration_error_is_torchmetrics():
    score, _, correct = outcomes(3000)
    want = binary_calibration_error(score, correct.int(), n_bins=15).item()
    got = confidence.expected_calibration_error(score, correct)
    assert got == pytest.approx(want, abs=1e-5)


def test_confidence_is_sklearns_logistic_fit_on_validation():
    validation, test = outcomes(1500, 1), outcomes(1200, 2)

    def fitted(with_norm):
        def columns(split):
            score, norm, _ = (column.double().numpy() for column in split)
            return np.stack([score, np.log(norm)], 1) if with_norm else score[:, None]

        model = LogisticRegression(C=np.inf, tol=1e-10, max_iter=1000)
        model.fit(columns(validation), validation[2].numpy())
        return model.predict_proba(columns(test))[:, 1]

    for with_norm in (False, True):
        got = confidence.logistic_confidence(validation, test, with_norm=with_norm)
        np.testing.assert_allclose(got, fitted(with_norm), atol=1e-3)


def test_a_small_norm_is_out_of_distribution():
    inside, outside = torch.tensor([3.0, 4.0, 5.0]), torch.tensor([1.0, 3.0])
    got = confidence.norm_as_ood(inside, outside)
    want = roc_auc_score([0, 0, 0, 1, 1], [3.0, 4.0, 5.0, 1.0, 3.0])
    assert got == pytest.approx(1 - want)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: confidence.auroc(torch.ones(3), torch.ones(3).bool()), "0 negative"),
        (lambda: confidence.auroc(torch.ones(3), torch.ones(2).bool()), "one length"),
        (lambda: confidence.auroc(torch.ones(0), torch.ones(0).bool()), "got none"),
        (
            lambda: confidence.auroc(torch.tensor([1.0, math.nan]), torch.tensor([True, False])),
            "not finite",
        ),
        (
            lambda: confidence.accuracy_per_norm_bucket(torch.zeros(3), torch.ones(3).bool()),
            "All norms are 0",
        ),
        (
            lambda: confidence.expected_calibration_error(torch.tensor([1.5]), torch.ones(1)),
            r"\[0, 1\]",
        ),
        (
            lambda: confidence.logistic_confidence(
                (torch.rand(5), torch.ones(5), torch.ones(5).bool()), outcomes(10), with_norm=True
            ),
            "All 5 validation predictions are right",
        ),
    ],
)
def test_degenerate_confidence_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=30))
def test_nmi_is_sklearns(rows):
    a, b = (list(column) for column in zip(*rows, strict=True))
    got = clusters.nmi(torch.tensor(a), torch.tensor(b))
    assert got == pytest.approx(normalized_mutual_info_score(a, b), abs=1e-9)


def test_kmeans_finds_separate_blobs_and_sklearns_inertia():
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(400) % 4
    x = 8 * torch.eye(4, 6)[labels] + torch.randn(400, 6, generator=generator)
    assert clusters.clustering(x, labels) == pytest.approx(1)
    want = KMeans(4, n_init=3, random_state=0).fit(x.numpy())
    runs = [clusters.kmeans(x, 4, torch.Generator().manual_seed(0)) for _ in range(2)]
    assert runs[0][2] == pytest.approx(want.inertia_ / 400, rel=1e-5)
    assert torch.equal(runs[0][0], runs[1][0])


def test_kmeans_ends_at_a_fixed_point_with_no_empty_cluster():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(300, 5, generator=generator)
    assignments, centres, _ = clusters.kmeans(x, 20, generator)
    assert len(assignments.unique()) == 20
    for i in range(20):
        torch.testing.assert_close(centres[i], x[assignments == i].mean(0), atol=1e-5, rtol=1e-5)
    assert torch.equal(torch.cdist(x, centres).argmin(1), assignments)


def test_kmeans_of_repeated_rows_ends():
    x = torch.ones(10, 3)
    assert clusters.kmeans(x, 2, torch.Generator().manual_seed(0))[2] == 0


def test_too_many_clusters_are_refused():
    with pytest.raises(ValueError, match="2 to 5 clusters, got 6"):
        clusters.kmeans(torch.rand(5, 2), 6, torch.Generator())
    with pytest.raises(ValueError, match="got 1"):
        clusters.clustering(torch.rand(5, 2), torch.zeros(5, dtype=torch.long))
