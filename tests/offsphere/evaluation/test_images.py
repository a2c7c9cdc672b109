"""What the vision lane measures beside neighbours: probes of direction and norm, rank, variance."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from offsphere.data.images import ImageSplits
from offsphere.evaluation import images as evaluate
from offsphere.training.images import evaluator_of
from vision.train_simclr import Config


class Pictures:
    """Labels, and 'pictures' that are their own features."""

    def __init__(self, features: torch.Tensor, labels: torch.Tensor) -> None:
        self.features, self.labels = features, labels


@pytest.fixture
def measured(monkeypatch):
    """Three classes: the first two differ in direction, the third from the second in norm alone."""
    draw = torch.Generator().manual_seed(0)
    directions = F.normalize(torch.tensor([[1.0, 0, 0, 0], [0, 1, 0, 0], [0, 1, 0, 0]]), dim=1)

    def split(rows: int) -> Pictures:
        labels = torch.arange(rows) % 3
        x = directions[labels] + 0.1 * torch.randn(rows, 4, generator=draw)
        lengths = torch.tensor([5.0, 1.0, 9.0])[labels] + 0.1 * torch.rand(rows, generator=draw)
        return Pictures(F.normalize(x, dim=1) * lengths[:, None], labels)

    def extract(_encoder, images, _workers=0):
        return evaluate.Features(2 * images.features, images.features)

    monkeypatch.setattr(evaluate, "extract", extract)
    splits = ImageSplits(split(300), split(150))  # pyright: ignore
    return splits, lambda **how: evaluator_of(splits, Config(**how))(nn.Identity(), (1, 1))


@pytest.mark.parametrize("how", ["lbfgs", "sgd_momentum"])
def test_a_probe_on_direction_and_norm_sees_both(measured, how):
    metrics = measured[1](probe=how)
    for layer in ("probe", "probe_embedding"):
        assert metrics[f"test/{layer}"] < 0.75  # directions tell two classes of three apart
        assert metrics[f"test/{layer}_polar"] > 0.95


@pytest.mark.parametrize(("layer", "pieces"), [("backbone", 7), ("embedding", 8), ("all", 14)])
def test_the_whole_of_the_work_is_announced(measured, monkeypatch, layer, pieces):
    """Neighbours (2 and 3), three probes and the confidence of each layer, and the clusters."""
    counts = []

    class Seen(evaluate.Work):
        def done(self, count: int, note: str = "") -> None:
            counts.append((count, self.total))
            super().done(count, note)

    monkeypatch.setattr(evaluate, "Work", Seen)
    measured[1](layer=layer)
    assert counts == [(piece, pieces) for piece in range(1, pieces + 1)]


def test_sgd_probes_raw_vectors_as_they_are(measured):
    """The third class has the second's directions, nine times as long."""
    metrics = measured[1](probe="sgd_momentum")
    assert metrics["test/probe_raw"] > 0.95


def test_rank_and_negatives_of_the_test_embeddings(measured):
    splits, measure = measured
    metrics, x = measure(), splits.test.features.double()
    share = torch.linalg.svdvals(x)
    share = share / share.sum()
    rank = torch.exp(-(share * share.log()).sum()).item()
    for layer in ("embedding", "backbone"):  # a scale changes no rank
        assert metrics[f"test/rankme_{layer}"] == pytest.approx(rank, rel=1e-4)
    u = F.normalize(x, dim=1)
    cosines = (u @ u.T)[~torch.eye(len(u), dtype=torch.bool)]
    assert metrics["test/negative_mean"] == pytest.approx(cosines.mean().item(), rel=1e-5)
    variance = cosines.var(correction=0).item()
    assert metrics["test/negative_variance"] == pytest.approx(variance, rel=1e-5)


def test_polar_is_direction_and_norm():
    x = torch.tensor([[3.0, 4.0], [0.0, 2.0]])
    torch.testing.assert_close(evaluate.polar(x), torch.tensor([[0.6, 0.8, 5.0], [0.0, 1.0, 2.0]]))
