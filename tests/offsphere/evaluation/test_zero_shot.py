from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planted_vectors import zero_shot
from sklearn.metrics import balanced_accuracy_score

from offsphere.cells import shrink
from offsphere.evaluation.zero_shot import class_vectors

EXPONENTS = [1.0, 0.0, 0.7, -0.5, 1.4]


def prompts(classes: int = 7, templates: int = 3, images: int = 80, d: int = 10, seed: int = 0):
    """Texts around class centres, images around them too, with widely different norms."""
    generator = torch.Generator().manual_seed(seed)

    def noisy(centres: torch.Tensor) -> torch.Tensor:
        x = centres + 0.9 * torch.randn(centres.shape, generator=generator)
        return x * torch.randn(len(x), 1, generator=generator).exp()

    centres = torch.randn(classes, d, generator=generator)
    owner = torch.arange(classes).repeat_interleave(templates)
    labels = torch.randint(classes, (images,), generator=generator)
    return noisy(centres[labels]), noisy(centres[owner]), owner, labels


def slow_vectors(texts, owner, classes, g):
    """Unit mean direction times the mean of |x|^(1-g), class by class in float64."""
    texts, found = texts.double().numpy(), []
    for label in range(classes):
        own = texts[owner.numpy() == label]
        norms = np.linalg.norm(own, axis=1, keepdims=True)
        mean = (own / norms).mean(0)
        found.append(mean / np.linalg.norm(mean) * (norms ** (1 - g)).mean())
    return np.stack(found)


@pytest.mark.parametrize("g", EXPONENTS)
@pytest.mark.parametrize("templates", [1, 3])
def test_class_vectors_are_those_of_the_slow_reference(g, templates):
    _, texts, owner, _ = prompts(templates=templates)
    shuffled = torch.randperm(len(texts), generator=torch.Generator().manual_seed(1))
    got = class_vectors(texts[shuffled].double(), owner[shuffled], 7, g)
    np.testing.assert_allclose(got.numpy(), slow_vectors(texts, owner, 7, g), rtol=1e-12)


@pytest.mark.parametrize("templates", [1, 4])
def test_cosine_class_vectors_are_clip_benchmarks(templates):
    from clip_benchmark.metrics.zeroshot_classification import zero_shot_classifier

    _, texts, owner, _ = prompts(templates=templates)
    rows = {f"{c} {t}": c * templates + t for c in range(7) for t in range(templates)}
    model = SimpleNamespace(encode_text=lambda tokens: texts[tokens])
    want = zero_shot_classifier(
        model,
        lambda lines: torch.tensor([rows[line] for line in lines]),
        [str(c) for c in range(7)],
        [f"{{c}} {t}" for t in range(templates)],
        "cpu",
        amp=False,
    )
    got = class_vectors(texts, owner, 7, 1.0).float()
    torch.testing.assert_close(got, want.T, rtol=1e-6, atol=1e-6)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6), st.floats(-1, 2))
def test_one_text_per_class_is_shrunk_like_any_right_side(seed, g):
    _, texts, owner, _ = prompts(templates=1, seed=seed)
    texts = texts.double()
    torch.testing.assert_close(class_vectors(texts, owner, 7, g), shrink(texts, g))


@pytest.mark.parametrize("g", EXPONENTS)
def test_accuracies_are_those_of_the_slow_reference(g):
    images, texts, owner, labels = prompts()
    scores = images.double().numpy() @ slow_vectors(texts, owner, 7, g).T
    order = np.argsort(-scores, axis=1)
    rank = 1 + (order == labels.numpy()[:, None]).argmax(1)
    got = zero_shot(images, class_vectors(texts, owner, 7, g), labels)
    assert got.metrics["top1"] == pytest.approx(np.mean(rank == 1), abs=1e-12)
    assert got.metrics["top5"] == pytest.approx(np.mean(rank <= 5), abs=1e-12)
    recall = balanced_accuracy_score(labels, order[:, 0])
    assert got.metrics["mean_class_recall"] == pytest.approx(recall, abs=1e-12)
    assert got.metrics["chance"] == pytest.approx(1 / 7)
    assert got.metrics["majority"] == pytest.approx(np.bincount(labels).max() / 80)
    assert got.outcomes["rank"].tolist() == rank.tolist()
    assert got.outcomes["top1"].tolist() == (rank == 1).astype(float).tolist()


def test_a_class_without_images_does_not_count_in_the_mean_recall():
    vectors = torch.eye(3)
    labels = torch.tensor([0, 0, 0, 1])
    images = vectors[torch.tensor([0, 0, 1, 1])]
    got = zero_shot(images, vectors, labels).metrics
    assert got["mean_class_recall"] == pytest.approx((2 / 3 + 1) / 2)
    assert "top5" not in got


def test_a_collapsed_model_gets_chance():
    labels = torch.tensor([0, 0, 0, 5, 5, 2])
    got = zero_shot(torch.ones(6, 4), torch.ones(6, 4), labels).metrics
    assert got["top1"] == pytest.approx(1 / 6)
    assert got["mean_class_recall"] == pytest.approx(1 / 6)
    assert got["top5"] == pytest.approx(5 / 6)
    assert got["majority"] == pytest.approx(1 / 2)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6), st.floats(1e-3, 1e3))
def test_an_images_norm_changes_nothing(seed, scale):
    images, texts, owner, labels = prompts(seed=seed)
    vectors = class_vectors(texts.double(), owner, 7, 0.0)
    stretched = images.double() * torch.logspace(0, scale % 3, len(images))[:, None]
    want, got = (zero_shot(x, vectors, labels) for x in (images.double(), stretched))
    assert want.metrics == got.metrics


def test_zero_texts_stay_finite():
    vectors = class_vectors(torch.zeros(2, 3), torch.arange(2), 2, 1.5)
    assert torch.equal(vectors, torch.zeros_like(vectors))


def test_inputs_that_do_not_fit_are_refused():
    _, texts, owner, _ = prompts()
    with pytest.raises(ValueError, match="1 of 8 classes have no text \\(first: class 7\\)"):
        class_vectors(texts, owner, 8, 1.0)
    with pytest.raises(ValueError, match="between 0 and 5, got 0 to 6"):
        class_vectors(texts, owner, 6, 1.0)
    with pytest.raises(ValueError, match="its class for each of 21 texts"):
        class_vectors(texts, owner[1:], 7, 1.0)
