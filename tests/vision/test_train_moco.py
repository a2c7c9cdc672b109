"""SimCLR and MoCo, step by step, beside plain references written out here."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from experiments import given as experiment_of
from torch import Tensor, nn

from offsphere.training import images as experiment
from offsphere.training.loop import build_optimizers, peak_lr, rate, set_rate
from offsphere.training.streams import batch_indices, stream
from vision import train_moco, train_simclr
from vision.methods import MoCo, SimCLR

STEPS, BATCH, QUEUE, POPULATION = 5, 16, 40, 64
TIGHT = {"rtol": 1e-9, "atol": 1e-12}


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def pixels() -> Tensor:
    shape = (POPULATION, 3, 16, 16)
    return torch.randint(256, shape, dtype=torch.uint8, generator=stream(0, "pixels"))


def settings(config_class: type, **changes):
    sgd = {"optimizer": "sgd", "lr": 0.3, "lr_rule": "linear", "threads": 1, "seed": 3}
    budget = {"image_size": 16, "batch_size": BATCH, "samples": STEPS * BATCH}
    return config_class(scale="fixed", **sgd | budget | changes)


def double_views(config):
    views = experiment.two_views(config)
    return lambda batch, step, rows=None: views(batch, step, rows).double()


def batch_of(pixels: Tensor, config, step: int) -> Tensor:
    return pixels[batch_indices(config.seed, step, BATCH, POPULATION)]


def in_double(method_class: type, config):
    method = method_class(config, POPULATION).double()
    method.two_views = double_views(config)
    return method


def sgd_by_hand(encoder: nn.Module, velocity: dict[str, Tensor], config, step: int) -> None:
    """v <- 0.9 v + (gradient + decay w), w <- w - rate v; no decay on parameters with one axis."""
    lr = peak_lr(config) * rate(step, STEPS, config.warmup)
    with torch.no_grad():
        for name, weight in encoder.named_parameters():
            decay = config.weight_decay if weight.ndim > 1 else 0.0
            step_towards = weight.grad + decay * weight
            velocity[name] = 0.9 * velocity.get(name, torch.zeros_like(weight)) + step_towards
            weight -= lr * velocity[name]
            weight.grad = None


def our_step(method: SimCLR | MoCo, optimizers, pixels: Tensor, config, step: int) -> Tensor:
    set_rate(optimizers, rate(step, STEPS, config.warmup))
    loss = method(batch_of(pixels, config, step), step).losses["loss"]
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    method.after_step((step + 1) / STEPS)
    return loss.detach()


def assert_same_state(ours: nn.Module, reference: nn.Module) -> None:
    for (name, mine), theirs in zip(
        ours.state_dict().items(), reference.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(mine, theirs, **TIGHT, msg=lambda m, n=name: f"{n}: {m}")


def keys_in_groups(encoder: nn.Module, images: Tensor, order: Tensor, groups: int) -> Tensor:
    """Row order[i] of the result was encoded in the company of its own group only."""
    keys = torch.empty(len(images), encoder.embedding_dim, dtype=images.dtype)
    size = len(images) // groups
    with torch.no_grad():
        for g in range(groups):
            chosen = order[g * size : (g + 1) * size]
            keys[chosen] = encoder(images[chosen])[1]
    return keys


def first_queue(keys: Tensor, config) -> list[Tensor]:
    """Random directions with norms of the first keys."""
    generator = stream(config.seed, "queue")
    norms = keys.norm(dim=1)[torch.randint(len(keys), (QUEUE,), generator=generator)]
    directions = torch.randn(QUEUE, keys.shape[1], generator=generator).double()
    rows = directions / directions.norm(dim=1, keepdim=True) * norms[:, None]
    return list(rows.unbind())


@pytest.mark.parametrize(
    "changes", [{"norm": "group"}, {"norm": "batch", "key_groups": 4}], ids=["group", "batch"]
)
def test_moco_equals_a_dense_reference_for_five_steps(pixels, changes):
    config = settings(train_moco.Config, momentum=0.9, queue_size=QUEUE, **changes)
    method = in_double(MoCo, config)
    optimizers = build_optimizers(method, config)
    query_encoder = experiment.build_encoder(config).double()
    key_encoder = copy.deepcopy(query_encoder)
    views = double_views(config)
    queue: list[Tensor] = []
    velocity: dict[str, Tensor] = {}
    oldest = 0
    for step in range(STEPS):
        loss = our_step(method, optimizers, pixels, config, step)

        view_a, view_b = views(batch_of(pixels, config, step), step).chunk(2)
        query = query_encoder(view_a)[1]
        order = torch.randperm(BATCH, generator=stream(config.seed, "shuffle", step))
        groups = 1 if config.norm == "group" else config.key_groups
        keys = keys_in_groups(key_encoder, view_b, order, groups)
        if not queue:
            queue = first_queue(keys, config)
        unit_query, unit_keys = (nn.functional.normalize(x, dim=1) for x in (query, keys))
        unit_queue = nn.functional.normalize(torch.stack(queue), dim=1)
        positive = (unit_query * unit_keys).sum(1, keepdim=True)
        logits = torch.cat([positive, unit_query @ unit_queue.T], 1) / config.temperature
        expected = nn.functional.cross_entropy(logits, torch.zeros(BATCH, dtype=torch.long))
        expected.backward()
        sgd_by_hand(query_encoder, velocity, config, step)
        for key in keys:
            queue[oldest] = key
            oldest = (oldest + 1) % QUEUE
        with torch.no_grad():
            for mine, theirs in zip(
                [*key_encoder.parameters(), *key_encoder.buffers()],
                [*query_encoder.parameters(), *query_encoder.buffers()],
                strict=True,
            ):
                averaged = 0.9 * mine + 0.1 * theirs if mine.is_floating_point() else theirs
                mine.copy_(averaged)

        # The temperature and the first queue's directions are float32's.
        tolerance = {"rtol": 1e-6, "atol": 1e-7}
        torch.testing.assert_close(loss, expected.detach(), **tolerance)
        torch.testing.assert_close(method.queue.rows, torch.stack(queue), **tolerance)
        assert int(method.queue.pointer) == oldest
        for ours, reference in ((method.encoder, query_encoder), (method.twin.module, key_encoder)):
            for name, value in ours.state_dict().items():
                torch.testing.assert_close(
                    value, reference.state_dict()[name], **tolerance, msg=f"{name}, step {step}"
                )
    assert oldest == STEPS * BATCH % QUEUE


def test_simclr_equals_lightly_and_torch_for_five_steps(pixels):
    from lightly.loss import NTXentLoss

    config = settings(train_simclr.Config, weight_decay=0.01)
    method = in_double(SimCLR, config)
    optimizers = build_optimizers(method, config)
    reference = experiment.build_encoder(config).double()
    # The temperature is kept in float32.
    criterion = NTXentLoss(temperature=method.objective.temperature.item())
    matrices = [p for p in reference.parameters() if p.ndim > 1]
    rest = [p for p in reference.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=config.lr * BATCH / 256, momentum=0.9)
    views = double_views(config)
    for step in range(STEPS):
        loss = our_step(method, optimizers, pixels, config, step)
        for group in optimizer.param_groups:
            group["lr"] = config.lr * BATCH / 256 * rate(step, STEPS, config.warmup)
        out_a, out_b = reference(views(batch_of(pixels, config, step), step))[1].chunk(2)
        expected = criterion(out_a, out_b)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(loss, expected.detach(), **TIGHT)
        assert_same_state(method.encoder, reference)


def test_the_loop_takes_exactly_these_steps(pixels, tmp_path: Path):
    """fit() on the same batches ends with the weights of the bare steps above, bit for bit."""
    from offsphere.run.record import open_run
    from offsphere.training.loop import fit

    config = settings(train_moco.Config, queue_size=QUEUE, norm="group", out=str(tmp_path))
    bare, looped = MoCo(config, POPULATION), MoCo(config, POPULATION)
    optimizers = build_optimizers(bare, config)
    losses = [our_step(bare, optimizers, pixels, config, step).item() for step in range(STEPS)]
    batches = [batch_of(pixels, config, step) for step in range(STEPS)]
    with open_run(config, script="train_moco", out=tmp_path) as folder:
        whole = experiment_of(looped, batches, POPULATION, evaluate=lambda: {"test/x": 0.5})
        metrics = fit(whole, config, folder)
    assert metrics["train/loss"] == losses[-1]
    assert metrics["untrained/x"] == metrics["test/x"] == 0.5
    for name, value in bare.state_dict().items():
        assert torch.equal(value, looped.state_dict()[name]), name
