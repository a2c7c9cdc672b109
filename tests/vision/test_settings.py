"""Every recipe of configs/ builds its model and takes one step; the published values are in it."""

import dataclasses
import math
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from offsphere.run.config import identity_settings, load_yaml, parse, settings_hash
from offsphere.run.help import grouped
from offsphere.training import images as experiment
from offsphere.training.loop import build_optimizers, peak_lr
from offsphere.training.streams import stream
from vision import train_moco, train_simclr
from vision.methods import MoCo, SimCLR

CONFIGS = Path(__file__).parents[2] / "configs"
SCRIPTS = {"train_simclr": train_simclr.Config, "train_moco": train_moco.Config}
COMMAND = re.compile(r"^# python vision/(train_\w+)\.py --config=configs/(\S+)", re.MULTILINE)
WIDTHS = {"tiny_resnet": 128, "resnet18": 512, "resnet50": 2048}
POPULATION = 1000


def recipes() -> list[tuple[str, str]]:
    """(script, file) of each recipe whose first lines say how this lane runs it."""
    files = [*CONFIGS.glob("*.yaml"), *CONFIGS.glob("paper/*.yaml")]
    return sorted(found for file in files for found in COMMAND.findall(file.read_text()))


def load(script: str, file: str):
    return load_yaml(SCRIPTS[script], CONFIGS / file)


def paper(name: str):
    return load("train_simclr", f"paper/{name}.yaml")


def build(script: str, config) -> SimCLR | MoCo:
    if script == "train_simclr":
        return SimCLR(config, POPULATION)
    return MoCo(dataclasses.replace(config, queue_size=32, key_groups=2), POPULATION)


@pytest.mark.parametrize(("script", "file"), recipes())
def test_one_step(script, file):
    """Views, losses and gradients are finite, and the last layer moves as its optimiser says."""
    torch.set_num_threads(1)
    config = parse(SCRIPTS[script], [f"--config={CONFIGS / file}", "--batch-size=4"])
    method = build(script, config)
    assert method.encoder.features_dim == WIDTHS[config.backbone]
    assert method.encoder.embedding_dim == config.projector_dim
    (optimizer,) = build_optimizers(method, config)
    shape = (4, 3, config.image_size, config.image_size)
    pixels = torch.randint(256, shape, dtype=torch.uint8, generator=stream(0, "pixels"))
    result = method(pixels, 0)
    result.losses["loss"].backward()
    assert all(math.isfinite(x.item()) for x in result.losses.values())
    for name, parameter in method.encoder.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name

    last = method.encoder.projector[-1].weight
    before, gradient = last.detach().clone(), last.grad.clone()
    optimizer.step()
    lr, decay = peak_lr(config), config.weight_decay
    if config.optimizer == "sgd":
        expected = before - lr * (gradient + decay * before)
    else:  # Adam's first step divides the gradient by its own size.
        expected = before * (1 - lr * decay) - lr * gradient / (gradient.abs() + 1e-8)
    torch.testing.assert_close(last.detach(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_default_recipe_is_the_default_run(script):
    config = load(script, "default.yaml")
    assert settings_hash(config) == settings_hash(SCRIPTS[script]())
    written = (CONFIGS / "default.yaml").read_text()
    own = {field.name for field in dataclasses.fields(SCRIPTS[script])} - set(
        experiment.ImageSettings.__dataclass_fields__
    )
    own |= {"lr"}  # the scripts have different ones; the recipe says so in a comment
    for name in identity_settings(config).keys() - own:
        assert re.search(rf"^{name}: ", written, re.MULTILINE), name


@pytest.mark.parametrize("batch", [32, 64, 128, 256, 512])
@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("variance_cifar10", 0.3),
        ("variance_cifar100", 0.3),
        ("variance_imagenet100", 0.1),
        ("variance_imagenet", 0.1),
    ],
)
def test_the_variance_papers_rate_grows_with_the_batch(name, rate, batch):
    config = dataclasses.replace(paper(name), batch_size=batch)
    assert peak_lr(config) == pytest.approx(rate * batch / 256)


@pytest.mark.parametrize(
    ("name", "backbone", "epochs", "warm_epochs", "temperature", "weight", "decay", "peak"),
    [
        ("variance_cifar10", "resnet18", 200, 10, 0.2, 30, 1e-4, 0.3),
        ("variance_cifar100", "resnet18", 200, 10, 0.2, 30, 1e-4, 0.3),
        ("variance_imagenet100", "resnet50", 200, 10, 0.2, 30, 1e-4, 0.05),
        ("variance_imagenet", "resnet50", 100, 10, 0.2, 40, 1e-4, 0.05),
        ("norms_resnet18", "resnet18", 512, 10, 0.5, 0, 1e-6, 0.6**2),
        ("norms_resnet50", "resnet50", 512, 10, 0.5, 0, 1e-6, 0.6**2),
        ("norms_cut_init", "resnet18", 512, 10, 0.5, 0, 1e-6, 0.6**2),
        ("norms_grad_scale", "resnet18", 512, 100, 0.5, 0, 1e-6, 0.1**2),
    ],
)
def test_published_settings(name, backbone, epochs, warm_epochs, temperature, weight, decay, peak):
    config = paper(name)
    assert (config.cell, config.scale, config.optimizer) == ("cosine", "fixed", "sgd")
    assert (config.backbone, config.epochs) == (backbone, epochs)
    assert config.warmup * config.epochs == pytest.approx(warm_epochs)
    assert (config.temperature, config.variance_weight) == (temperature, weight)
    assert (config.weight_decay, peak_lr(config)) == pytest.approx((decay, peak))
    assert (config.projector_layers, config.projector_dim) == (2, 128)


@pytest.mark.parametrize("name", ["variance_cifar10", "variance_imagenet100", "norms_resnet50"])
def test_stem_and_jitter(name):
    config = paper(name)
    first = experiment.build_encoder(config).backbone.conv1
    assert isinstance(first, nn.Conv2d)
    small = config.image_size == 32
    assert (first.kernel_size, first.stride) == (((3, 3), (1, 1)) if small else ((7, 7), (2, 2)))
    jitter = (0.4, 0.4, 0.4, 0.1) if small else (0.8, 0.8, 0.8, 0.2)
    views = experiment.make_views(config)
    assert views.jitter == pytest.approx(jitter)
    assert (views.jitter_prob, views.flip, views.grey) == (0.8, 0.5, 0.2)


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_flag_stands_in_a_group_of_the_help(script):
    """A flag that no group names would end up under "further", behind those of the machine."""
    groups = grouped(SCRIPTS[script])
    assert "further" not in groups
    assert {"negatives", "gor_weight"} <= set(groups["question"][1])
    assert "keep" in groups["measuring"][1]
