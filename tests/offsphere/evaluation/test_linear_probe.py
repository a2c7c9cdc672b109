import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from offsphere.evaluation.linear_probe import (
    fit_softmax,
    linear_probe,
    sgd_probe,
    standardise,
)


def blobs(
    n: int, d: int = 12, classes: int = 6, spread: float = 2.0, mixed: bool = True, seed: int = 0
):
    generator = torch.Generator().manual_seed(seed)
    shared = torch.Generator().manual_seed(99)
    centres, mixing = (torch.randn(rows, d, generator=shared) for rows in (classes, d))
    labels = torch.randint(classes, (n,), generator=generator)
    features = centres[labels] + spread * torch.randn(n, d, generator=generator)
    return (features @ mixing if mixed else features), labels


TRAIN, TRAIN_LABELS = blobs(900, seed=1)
TEST, TEST_LABELS = blobs(500, seed=2)


def sklearn_fit(x: torch.Tensor, y: torch.Tensor, weight_decay: float) -> LogisticRegression:
    model = LogisticRegression(C=1 / (weight_decay * len(x)), tol=1e-8, max_iter=5000)
    return model.fit(x.double().numpy(), y.numpy())


@pytest.mark.parametrize("weight_decay", [1e-1, 1e-2, 1e-3])
@pytest.mark.parametrize("classes", [2, 6])
def test_coefficients_and_probabilities_are_sklearns(weight_decay, classes):
    train, test = standardise(TRAIN.double(), TEST.double())
    labels = TRAIN_LABELS % classes
    want = sklearn_fit(train, labels, weight_decay)
    got = fit_softmax(train, labels, classes, weight_decay, tolerance=1e-12)
    probabilities = got.logits(test).softmax(1)
    if classes > 2:
        np.testing.assert_allclose(got.weight, want.coef_, atol=1e-3)
        np.testing.assert_allclose(got.bias - got.bias.mean(), want.intercept_, atol=1e-3)
        np.testing.assert_allclose(probabilities, want.predict_proba(test.numpy()), atol=1e-3)
    else:
        gap = (got.weight[1] - got.weight[0]).numpy()
        halved = sklearn_fit(train, labels, weight_decay / 2)
        np.testing.assert_allclose(gap, halved.coef_[0], atol=1e-3)


@pytest.mark.parametrize("weight_decay", [1e-2, 1e-4])
def test_float32_accuracy_is_sklearns_within_one_example(weight_decay):
    train, test = standardise(TRAIN, TEST)
    want = sklearn_fit(train, TRAIN_LABELS, weight_decay).predict(test.double().numpy())
    got = linear_probe(
        TRAIN, TRAIN_LABELS, TEST, TEST_LABELS, weight_decay=weight_decay, tolerance=1e-7
    )
    hits = (torch.from_numpy(want) == TEST_LABELS).sum().item()
    assert abs(got.correct.sum().item() - hits) <= 1


def test_the_solution_has_no_gradient():
    train, _ = standardise(TRAIN.double(), TEST.double())
    model = fit_softmax(train, TRAIN_LABELS, 6, 1e-3, tolerance=1e-13)
    weight = model.weight.clone().requires_grad_()
    bias = model.bias.clone().requires_grad_()
    loss = torch.nn.functional.cross_entropy(train @ weight.T + bias, TRAIN_LABELS)
    (loss + 1e-3 / 2 * weight.square().sum()).backward()
    assert weight.grad is not None
    assert bias.grad is not None
    assert max(weight.grad.abs().max(), bias.grad.abs().max()) < 1e-5


def test_more_columns_than_rows_and_constant_columns_are_solved():
    train, labels = blobs(60, d=150, seed=1)
    test, test_labels = blobs(200, d=150, seed=2)
    train[:, 7] = test[:, 7] = 3.3
    want = sklearn_fit(standardise(train, test)[0], labels, 1e-2)
    predicted = torch.from_numpy(want.predict(standardise(train, test)[1].double().numpy()))
    got = linear_probe(train, labels, test, test_labels, weight_decay=1e-2, tolerance=1e-8)
    assert abs(int(got.correct.sum()) - int((predicted == test_labels).sum())) <= 1


def test_auto_takes_the_weight_decay_of_best_cross_validated_accuracy():
    train, labels = blobs(150, d=60, spread=4, seed=1)
    test, test_labels = blobs(400, d=60, spread=4, seed=2)
    path = (1e1, 1e-1, 1e-3)
    got = linear_probe(train, labels, test, test_labels, weight_decays=path, tolerance=1e-7)
    order = torch.randperm(150, generator=torch.Generator().manual_seed(0))
    x, y = standardise(train, test)[0][order].double().numpy(), labels[order].numpy()
    hits = []
    for weight_decay in path:
        hit = 0
        for fold in range(3):
            held_out = np.arange(150) // 50 == fold
            model = sklearn_fit(
                torch.from_numpy(x[~held_out]), torch.from_numpy(y[~held_out]), weight_decay
            )
            hit += (model.predict(x[held_out]) == y[held_out]).sum()
        hits.append(hit)
    assert got.weight_decay == path[int(np.argmax(hits))]
    fixed = linear_probe(
        train, labels, test, test_labels, weight_decay=got.weight_decay, tolerance=1e-7
    )
    assert abs(int(got.correct.sum()) - int(fixed.correct.sum())) <= 1


def test_many_rows_hold_out_a_tenth_and_agree_with_sklearn_and_sgd():
    train, labels = blobs(10_500, mixed=False, seed=3)
    test, test_labels = blobs(2000, mixed=False, seed=4)
    ours = linear_probe(train, labels, test, test_labels)
    x, x_test = standardise(train, test)
    model = sklearn_fit(x, labels, ours.weight_decay)
    peer = (torch.from_numpy(model.predict(x_test.double().numpy())) == test_labels).double()
    sgd = sgd_probe(x, labels, x_test, test_labels, epochs=20)
    assert ours.accuracy == pytest.approx(peer.mean().item(), abs=0.003)
    assert ours.accuracy == pytest.approx(sgd.accuracy, abs=0.005)


def test_standardise_uses_training_moments_and_zeroes_constant_columns():
    train = torch.tensor([[0.0, 5.0, 1e6], [2.0, 5.0, 1e6]])
    test = torch.tensor([[3.0, 9.0, 1e6]])
    a, b = standardise(train, test)
    torch.testing.assert_close(a, torch.tensor([[-1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]))
    torch.testing.assert_close(b, torch.tensor([[2.0, 0.0, 0.0]]))


def test_one_full_batch_sgd_step_by_hand():
    got = sgd_probe(TRAIN, TRAIN_LABELS, TEST, TEST_LABELS, epochs=1, batch_size=900)
    one_hot = torch.nn.functional.one_hot(TRAIN_LABELS).float()
    residual = one_hot - 1 / 6
    logits = 0.1 * (TEST @ (residual.T @ TRAIN).T / 900 + residual.mean(0))
    assert torch.equal(got.predictions, logits.argmax(1))
    torch.testing.assert_close(got.confidence, logits.softmax(1).amax(1))


def test_results_repeat_and_outcomes_agree_with_the_aggregate():
    first, second = (linear_probe(TRAIN, TRAIN_LABELS, TEST, TEST_LABELS) for _ in range(2))
    assert torch.equal(first.confidence, second.confidence)
    assert first.accuracy == first.correct.double().mean().item()
    assert torch.equal(first.correct, first.predictions == TEST_LABELS)


@pytest.mark.parametrize("probe", [linear_probe, sgd_probe])
def test_two_examples_and_small_integer_labels_will_do(probe):
    x, y = torch.tensor([[-1.0, 0.0], [1.0, 0.5]]), torch.tensor([0, 1], dtype=torch.int32)
    assert probe(x, y, x * 2, y).accuracy == 1


@pytest.mark.parametrize("probe", [linear_probe, sgd_probe])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_labels": torch.ones(900, dtype=torch.long)}, "at least two classes"),
        ({"train": TRAIN.clone().index_fill(0, torch.tensor([5]), torch.inf)}, "first: row 5"),
        ({"train_labels": TRAIN_LABELS[:-1]}, "expected 900"),
        ({"test": TEST[:, :-1]}, "same encoder and layer"),
    ],
)
def test_bad_input_is_refused(probe, changes, message):
    inputs = {
        "train": TRAIN,
        "train_labels": TRAIN_LABELS,
        "test": TEST,
        "test_labels": TEST_LABELS,
        **changes,
    }
    with pytest.raises(ValueError, match=message):
        probe(**inputs)


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="must not be negative"):
        linear_probe(TRAIN, TRAIN_LABELS, TEST, TEST_LABELS, weight_decay=-1.0)


def test_momentum_of_the_official_code_by_hand():
    """Two full-batch steps: the second moves along its gradient plus 0.9 of the first."""
    got = sgd_probe(
        *(TRAIN, TRAIN_LABELS, TEST, TEST_LABELS),
        **{"epochs": 2, "batch_size": 900, "momentum": 0.9},
    )
    inputs = torch.cat([TRAIN, torch.ones(900, 1)], 1).double()
    one_hot = torch.nn.functional.one_hot(TRAIN_LABELS).double()
    weight, step = torch.zeros(6, inputs.shape[1]).double(), 0.0
    for rate in (0.1, 0.05):  # a cosine over two steps
        gradient = ((inputs @ weight.T).softmax(1) - one_hot).T @ inputs / 900
        step = 0.9 * step + gradient
        weight = weight - rate * step
    logits = torch.cat([TEST, torch.ones(len(TEST), 1)], 1).double() @ weight.T
    assert torch.equal(got.predictions, logits.argmax(1))
    confidence = logits.softmax(1).amax(1).float()
    torch.testing.assert_close(got.confidence, confidence, rtol=1e-4, atol=1e-6)
