"""Every cell in SimCLR and MoCo, with a tiny budget; and that cells are compared fairly."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from offsphere.data.images import ImageSplits
from offsphere.names import CELLS
from offsphere.run.config import load_yaml, run_name
from offsphere.run.record import RunFolder, run_path
from offsphere.study.measures import unmeasured
from offsphere.training import images as experiment
from offsphere.training import run as training_run
from offsphere.training.images import evaluator_of, load_splits
from offsphere.training.loop import rate
from offsphere.training.streams import batch_indices
from vision import train_moco, train_simclr

STEPS, BATCH, QUEUE = 32, 64, 128
TINY = {"image_size": 16, "batch_size": BATCH, "limit": 256, "threads": 1, "log_every": 1}
TINY |= {"data": "emoji", "samples": STEPS * BATCH, "layer": "backbone"}
TRAINERS = {
    "simclr": lambda **changes: train_simclr.Config(**TINY | changes),
    "moco": lambda **changes: train_moco.Config(queue_size=QUEUE, **TINY | changes),
}
RUN = {"simclr": train_simclr.run, "moco": train_moco.run}
PROMISED = {"train/loss", "test/probe", "test/knn", "untrained/probe", "untrained/knn"}
CHANCE = math.log(1 + QUEUE)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def loaded() -> ImageSplits:
    return load_splits(TRAINERS["simclr"]())


@pytest.fixture
def quick(monkeypatch, loaded):
    """The data are read once for all runs, and no run is drawn."""
    monkeypatch.setattr(experiment, "load_splits", lambda _settings, _handed: loaded)
    monkeypatch.setattr(training_run, "plot_run", lambda *_: None)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.parametrize("variance_weight", [0, 30])
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("method", TRAINERS)
def test_every_cell_runs_and_learns(method, cell, variance_weight, tmp_path: Path, quick):
    config = TRAINERS[method](cell=cell, variance_weight=variance_weight, out=str(tmp_path))
    metrics = RUN[method](config)
    assert metrics["run/status"] == "finished"
    assert metrics["run/steps"] == STEPS
    assert metrics["run/samples"] == STEPS * BATCH
    assert metrics.keys() >= PROMISED
    assert all(math.isfinite(v) for v in metrics.values() if isinstance(v, float))

    rows = RunFolder(run_path(config, script=f"train_{method}", out=tmp_path)).steps()
    assert [row["step"] for row in rows] == list(range(STEPS))
    losses = [row["train/loss"] for row in rows]
    assert metrics["train/loss"] == losses[-1]
    for row in rows:
        total = row["train/contrastive"] + variance_weight * row["train/variance"]
        assert row["train/loss"] == pytest.approx(total, rel=1e-5)
    if method == "simclr":
        assert mean(losses[-8:]) < mean(losses[:4])
    else:
        # The first negatives are random directions, which are easy; from step 2 on real keys.
        assert mean(losses[-8:]) < mean(losses[3:11])
        assert mean([row["train/contrastive"] for row in rows[-8:]]) < CHANCE
    if cell == "learnable":
        # Adam's first step is the rate itself, up or down.
        moved = config.exponent_lr * rate(0, STEPS, config.warmup)
        logit = torch.logit(torch.tensor(rows[1]["train/exponent_left"])).abs().item()
        assert rows[0]["train/exponent_left"] == 0.5
        assert logit == pytest.approx(moved, rel=1e-3)


def test_a_whole_run_leaves_a_folder_that_explains_itself(tmp_path: Path):
    config = TRAINERS["simclr"](
        cell="0.30,.7",
        eval_cell="dot",
        layer="all",
        log_every=3,
        eval_every=5 * BATCH,
        out=str(tmp_path),
        study="mine",
        save_views=True,
        save_embeddings=True,
        data_ood="openmoji",
    )
    metrics = train_simclr.run(config)
    folder = tmp_path / "mine" / run_name(config)
    assert folder.name.startswith("0.3_0.7-seed0-")
    assert load_yaml(train_simclr.Config, folder / "config.yaml") == config
    for name in ("run.png", "views.png", "checkpoint/last.pt", "provenance.json"):
        assert (folder / name).stat().st_size > 500, name
    rows = RunFolder(folder).steps()
    evaluated = range(4, STEPS, 5)
    expected = sorted({*range(0, STEPS, 3), *evaluated, STEPS - 1})
    assert [row["step"] for row in rows] == expected
    assert [row["step"] for row in rows if "test/knn" in row] == [*evaluated]
    assert rows[0]["train/exponent_left"] == pytest.approx(0.3)
    # Scored with the eval cell, dot; both names are of one vote then.
    assert metrics["test/knn_embedding"] == metrics["test/knn_embedding_dot"]
    assert 0 <= metrics["test/ood_auroc"] <= 1
    assert unmeasured("train_simclr", set(metrics) - {"run/status", "run/ended"}) == []
    provenance = RunFolder(folder).provenance()
    assert provenance["data"]["train"]["size"] == 256

    encoder = experiment.build_encoder(config)
    encoder.load_state_dict(load_file(folder / "encoder.safetensors"))
    embeddings = load_file(folder / "embeddings.safetensors")
    splits = load_splits(config)
    features = evaluator_of(splits, config)(encoder, (0.0, 0.0))
    assert {k: v for k, v in metrics.items() if k.startswith("test/")} == features
    assert len(embeddings["embedding"]) == len(splits.test)
    examples = load_file(folder / "examples.safetensors")
    assert examples["probe_correct"].double().mean().item() == metrics["test/probe"]


def build(method: str, **changes):
    """The method as a run builds it, caught before the first step."""
    config = TRAINERS[method](**changes)
    encoder = experiment.build_encoder(config)
    return config, encoder


@pytest.mark.parametrize("augment", ["batched", "lightly"])
def test_one_seed_is_one_start_one_order_one_augmentation(augment: str, loaded):
    first, weights = build("simclr", cell="cosine", seed=7, augment=augment)
    others = [
        build("simclr", cell="learnable", seed=7, augment=augment, variance_weight=30),
        build("moco", cell="dot", seed=7, augment=augment, temperature=0.5, scale="fixed"),
    ]
    pixels = loaded.train
    for config, encoder in others:
        for name, value in weights.state_dict().items():
            assert torch.equal(value, encoder.state_dict()[name]), name
        for step in (0, 1, 5):
            torch.rand(step + 1)  # what else was drawn must not matter
            mine, theirs = (
                experiment.two_views(c)(experiment.TrainingBatches(pixels, c)[step], step)
                for c in (first, config)
            )
            assert mine.shape == (2 * BATCH, 3, 16, 16)
            assert torch.equal(mine, theirs)


def test_orders_of_two_seeds_and_two_epochs_are_independent():
    population = 103
    orders = {}
    for seed in (0, 1):
        drawn = torch.cat([batch_indices(seed, step, 10, population) for step in range(21)])
        for epoch, order in enumerate(drawn[: 2 * population].split(population)):
            orders[seed, epoch] = order
    # Two independent orders agree in one place on average (Poisson); in ten with chance 1e-7.
    keys = list(orders)
    for i, one in enumerate(keys):
        for other in keys[:i]:
            assert (orders[one] == orders[other]).sum() < 10


def test_other_seeds_give_uncorrelated_weights_and_views(loaded):
    (config_a, a), (config_b, b) = (build("simclr", seed=seed) for seed in (0, 1))
    for (name, x), y in zip(a.named_parameters(), b.parameters(), strict=True):
        if x.ndim > 1:
            correlation = torch.corrcoef(torch.stack([x.flatten(), y.flatten()]))[0, 1]
            assert correlation.abs() < 6 / math.sqrt(x.numel()), name
    batch = loaded.train.batch(torch.arange(BATCH))
    drawn = [experiment.two_views(c)(batch, 0) for c in (config_a, config_b)]
    drawn.append(experiment.two_views(config_a)(batch, 1))
    # Of 128 views hardly one is drawn alike by two seeds or in two steps.
    for i, j in ((0, 1), (0, 2)):
        same = (drawn[i] - drawn[j]).abs().amax((1, 2, 3)) < 1e-6
        assert same.sum() <= 2
