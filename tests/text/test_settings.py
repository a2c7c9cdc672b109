"""The text recipes of configs/ parse, and the published values are in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from offsphere.run.config import load_yaml
from offsphere.training.loop import peak_lr
from text.settings import RetrievalSettings, StsSettings

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize(
    ("name", "encoder", "lr"),
    [
        ("contriever", "facebook/contriever", 2e-6),
        ("retromae", "Shitao/RetroMAE", 5e-6),
        ("e5", "intfloat/e5-base-unsupervised", 5e-6),
    ],
)
def test_retrieval_as_published(name, encoder, lr):
    config = load_yaml(RetrievalSettings, CONFIGS / "paper" / f"magnitude_{name}.yaml")
    assert (config.encoder, config.tune, config.head) == (encoder, "all", "none")
    assert (config.scale, config.temperature, config.direction) == (
        "fixed",
        1 / 20,
        "left_to_right",
    )
    assert (config.batch_size, config.epochs, config.warmup, config.clip) == (256, 100, 0, 1)
    assert (config.optimizer, config.weight_decay) == ("adamw", 0.01)
    assert peak_lr(config) == pytest.approx(lr)
    assert config.eval_every == 500 * config.batch_size


def test_sts_as_published():
    config = load_yaml(StsSettings, CONFIGS / "paper" / "magnitude_sts.yaml")
    assert (config.score_scale, config.batch_size, config.epochs) == ("fixed:0.01", 64, 4)
    assert (config.warmup, peak_lr(config)) == (0.1, pytest.approx(2e-5))


def test_scifact():
    config = load_yaml(RetrievalSettings, CONFIGS / "scifact.yaml")
    assert (config.encoder, config.tune, config.head) == ("minilm", "head", "linear")


def test_static():
    config = load_yaml(RetrievalSettings, CONFIGS / "static.yaml")
    assert (config.encoder, config.tune, config.head) == ("static", "all", "none")
    assert (config.samples, peak_lr(config)) == (330 * 256, 0.01)
