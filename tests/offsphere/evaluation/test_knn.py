import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offsphere.evaluation.geometry import unit
from offsphere.evaluation.knn import knn, spread_ratio, vote


def blobs(n: int, d: int = 16, classes: int = 5, spread: float = 1.5, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, d, generator=torch.Generator().manual_seed(99))
    labels = torch.randint(classes, (n,), generator=generator)
    features = centres[labels] + spread * torch.randn(n, d, generator=generator)
    return features * torch.rand(n, 1, generator=generator).mul(3).exp(), labels


TRAIN, TRAIN_LABELS = blobs(700, seed=1)
TEST, TEST_LABELS = blobs(300, seed=2)


@pytest.mark.parametrize("k", [1, 20, 200])
def test_cosine_vote_is_lightlys(k):
    from lightly.utils.benchmarking.knn import knn_predict

    want = knn_predict(unit(TEST), unit(TRAIN).T, TRAIN_LABELS, num_classes=5, knn_k=k, knn_t=0.1)
    got = knn(TRAIN, TRAIN_LABELS, TEST, TEST_LABELS, k=k)
    assert torch.equal(got.predictions, want[:, 0])
    assert torch.equal(got.correct, want[:, 0] == TEST_LABELS)
    assert got.accuracy == pytest.approx((want[:, 0] == TEST_LABELS).double().mean().item())


def slow_knn(train, labels, test, k, temperature, exponent):
    norms = np.linalg.norm(train, axis=1, keepdims=True)
    items = train / norms**exponent
    queries = test / np.linalg.norm(test, axis=1, keepdims=True)
    own = train / norms

    def spread(bank):
        rows = []
        for i in range(0, len(train), max(1, len(train) // 512))[:512]:
            scores = np.delete(bank @ own[i], i)
            rows.append(np.sort(scores)[-k:].std())
        return np.mean(rows)

    row_temperature = temperature * spread(items) / spread(own)
    predictions = []
    for query in queries:
        scores = items @ query
        best = np.argsort(-scores)[:k]
        weights = np.exp((scores[best] - scores[best].max()) / row_temperature)
        predictions.append(np.bincount(labels[best], weights, minlength=5).argmax())
    return np.array(predictions)


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0])
def test_every_cell_is_the_slow_reference(exponent):
    want = slow_knn(
        TRAIN.double().numpy(), TRAIN_LABELS.numpy(), TEST.double().numpy(), 20, 0.1, exponent
    )
    train, test = TRAIN.double(), TEST.double()
    got = knn(train, TRAIN_LABELS, test, TEST_LABELS, exponents=(0.0, exponent))
    assert np.array_equal(got.predictions.numpy(), want)


@settings(deadline=None, max_examples=15)
@given(
    left=st.floats(0, 1), right=st.floats(0, 1), log_scale=st.floats(-6, 6), seed=st.integers(0, 99)
)
def test_neither_left_exponent_nor_scales_change_a_prediction(left, right, log_scale, seed):
    train, labels = blobs(90, seed=seed)
    test, test_labels = blobs(40, seed=seed + 1)
    train, test = train.double(), test.double()
    base = knn(train, labels, test, test_labels, exponents=(1.0, right))
    scaled = knn(
        train * 10**log_scale, labels, test * 10**-log_scale, test_labels, exponents=(left, right)
    )
    torch.testing.assert_close(scaled.confidence, base.confidence, rtol=1e-5, atol=1e-7)


def test_weights_of_raw_features_never_overflow():
    huge = TRAIN * 1e6
    got = knn(huge, TRAIN_LABELS, TEST * 1e6, TEST_LABELS, exponents=(0.0, 0.0))
    assert got.confidence.isfinite().all()
    assert len(got.predictions.unique()) > 1


def test_small_integer_labels_and_half_precision_will_do():
    want = knn(TRAIN.half().float(), TRAIN_LABELS, TEST.half().float(), TEST_LABELS)
    labels, test_labels = TRAIN_LABELS.int(), TEST_LABELS.int()
    got = knn(TRAIN.half(), labels, TEST.half(), test_labels)
    assert torch.equal(got.predictions, want.predictions)
    raw = knn(TRAIN.half(), labels, TEST.half(), test_labels, exponents=(0.0, 0.0))
    assert raw.confidence.isfinite().all()


def test_vote_by_hand():
    scores = torch.tensor([[2.0, 1.0, 1.0]])
    votes = vote(scores, torch.tensor([[0, 1, 1]]), 0.5, 3)
    torch.testing.assert_close(votes, torch.tensor([[1.0, 2 * torch.e**-2, 0.0]]))


def test_scale_of_equal_norms_is_the_norm():
    train = unit(TRAIN) * 7
    assert float(spread_ratio(train, 20, 0.0)) == pytest.approx(7, rel=1e-4)
    assert float(spread_ratio(train, 20, 0.5)) == pytest.approx(7**0.5, rel=1e-4)
    assert spread_ratio(train, 20, 1.0) == 1


def test_collapsed_features_give_a_finite_vote():
    train, test = torch.ones(10, 3), torch.ones(4, 3)
    labels = torch.arange(10) % 2
    got = knn(train, labels, test, labels[:4], k=10, exponents=(0.0, 0.0))
    torch.testing.assert_close(got.confidence, torch.full((4,), 0.5))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_labels": torch.zeros(700, dtype=torch.long)}, "at least two classes"),
        ({"k": 701}, "700 items to choose from"),
        ({"train": TRAIN.clone().index_fill(0, torch.tensor([3]), torch.nan)}, "first: row 3"),
        ({"train_labels": TRAIN_LABELS[:-1]}, "expected 700"),
        ({"test_labels": TEST_LABELS[:-1]}, "expected 300"),
        ({"test": TEST[:, :-1]}, "equal width"),
        ({"train_labels": TRAIN_LABELS - 1}, "whole numbers from 0"),
        ({"test": TEST[:0], "test_labels": TEST_LABELS[:0]}, "empty"),
        ({"temperature": 0.0}, "above 0"),
    ],
)
def test_bad_input_is_refused(changes, message):
    inputs = {
        "train": TRAIN,
        "train_labels": TRAIN_LABELS,
        "test": TEST,
        "test_labels": TEST_LABELS,
        **changes,
    }
    with pytest.raises(ValueError, match=message):
        knn(**inputs)
