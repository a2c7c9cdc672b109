"""Cached gradients: micro-batches against the whole batch, in gradients, runs and memory."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from experiments import given as experiment_of
from torch import nn

from offsphere.objective import Objective
from offsphere.run.record import open_run
from offsphere.training.experiment import Method, Step
from offsphere.training.loop import fit
from offsphere.training.microbatch import split_step
from offsphere.training.ranks import Ranks, Rows, Tensors
from offsphere.training.settings import TrainSettings
from offsphere.training.streams import batch_indices, stream

HERE = Path(__file__)
ALONE = Ranks(torch.device("cpu"))


def _ranks_tests() -> ModuleType:
    """The cases of the test beside this one."""
    spec = importlib.util.spec_from_file_location("rank_cases", HERE.with_name("test_ranks.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["rank_cases"] = module
    spec.loader.exec_module(module)
    return module


cases = _ranks_tests()


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 8, 21])
def test_micro_batches_have_the_gradients_of_the_whole_batch(size: int):
    """All losses x cells x variance, and every lane's method, in parts of `size` of 22 rows."""
    every = cases.all_cases() if size == 8 else dict(cases.lane_cases())
    for name, build in every.items():
        expected, got = cases.gradients(build(), ALONE), cases.gradients(build(), ALONE, size)
        cases.assert_alike(got, expected, f"{name}, micro-batch {size}")


class Noisy(Method):
    """Towers with dropout: both passes must draw the same masks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tower = nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.5), nn.Linear(32, 4))
        self.objective = Objective("dot", "info_nce", population=64, learnable_temperature=True)
        self.seen: list[torch.Tensor] = []

    def inputs(self, batch: torch.Tensor, step: int, rows: Rows | None = None) -> Tensors:
        return {"x": batch}

    def embed(self, inputs: Tensors) -> Tensors:
        left, right = self.tower(inputs["x"]), self.tower(inputs["x"])
        self.seen.append(left.detach())
        return {"left": left, "right": right}

    def losses(self, embedded: Tensors) -> Tensors:
        return self.objective(embedded["left"], embedded["right"])


def test_both_passes_drop_the_same_units_and_steps_drop_others():
    method, batch = Noisy(), torch.randn(64, 6, generator=stream(0, "test"))
    settings = TrainSettings(batch_size=64, microbatch=8)
    result = split_step(method, batch, 0, settings, ALONE)
    first, second = method.seen[:8], method.seen[8:]
    assert torch.equal(torch.cat(first), result.left.detach())
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
    # One batch eight times over: no two parts share their masks, nor do two steps.
    method.seen = []
    split_step(method, batch[:8].repeat(8, 1), 0, settings, ALONE)
    split_step(method, batch[:8].repeat(8, 1), 1, settings, ALONE)
    distinct = {x.numpy().tobytes() for x in method.seen}
    assert len(distinct) == 16


def test_dropout_gradients_are_those_of_the_masks_that_were_drawn():
    """Finite differences along a random direction, with the step's masks held by its seed."""
    method = Noisy().double()
    batch = torch.randn(24, 6, generator=stream(0, "test"), dtype=torch.float64)
    settings = TrainSettings(batch_size=24, microbatch=7)

    def loss() -> torch.Tensor:
        method.zero_grad()
        return split_step(method, batch, 3, settings, ALONE).losses["loss"].detach()

    loss()
    parameters = list(method.parameters())
    directions = [torch.randn_like(p) for p in parameters]
    slope = sum(
        (p.grad * d).sum().item()
        for p, d in zip(parameters, directions, strict=True)
        if p.grad is not None
    )
    ends = []
    for sign in (1, -1):
        with torch.no_grad():
            for p, d in zip(parameters, directions, strict=True):
                p.add_(d, alpha=sign * 1e-6)
        ends.append(loss())
        with torch.no_grad():
            for p, d in zip(parameters, directions, strict=True):
                p.sub_(d, alpha=sign * 1e-6)
    assert slope == pytest.approx(((ends[0] - ends[1]) / 2e-6).item(), rel=1e-6)


class Rowwise(torch.utils.data.Dataset):
    """batches[step]: rows of one table."""

    table = torch.randn(80, 6, generator=stream(1, "test"))

    def __getitem__(self, step: int) -> dict[str, torch.Tensor]:
        rows = self.table[batch_indices(0, step, 20, len(self.table))]
        return {"a": rows, "b": rows.flip(1)}


def test_a_run_in_micro_batches_follows_the_run_in_whole_batches(tmp_path: Path):
    losses = {}
    base = TrainSettings(batch_size=20, samples=20 * 30, threads=1, log_every=1, device="cpu")
    for size in (None, 20, 50, 6):
        settings = replace(base, microbatch=size, clip=0.5, out=str(tmp_path))
        objective = Objective(
            "learnable", "info_nce", population=80, learnable_temperature=True, variance_weight=3
        )
        method = cases.TwoTowers(objective)
        with open_run(settings, script="toy", out=tmp_path) as folder:
            fit(experiment_of(method, Rowwise(), 80), settings, folder)
            rows = folder.steps()
        names = ("train/loss", "train/gradient_norm", "train/temperature", "train/exponent_left")
        losses[size] = [row[name] for row in rows for name in names]
    assert losses[20] == losses[50] == losses[None]  # nothing to divide: the same bits
    assert losses[6] == pytest.approx(losses[None], rel=1e-4)


class ForwardOnly(Method):
    """A method as a user may first write it: nothing but a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tower, self.objective = nn.Linear(6, 4), Objective("dot", "info_nce", population=80)

    def forward(self, batch: Tensors, step: int) -> Step:
        left, right = self.tower(batch["a"]), self.tower(batch["b"])
        return Step(self.objective(left, right), left, right)


class InParts(ForwardOnly):
    """The same in its parts."""

    forward = Method.forward

    def inputs(self, batch: Tensors, step: int, rows: Rows | None = None) -> Tensors:
        return batch

    def embed(self, inputs: Tensors) -> Tensors:
        return {"left": self.tower(inputs["a"]), "right": self.tower(inputs["b"])}

    def losses(self, embedded: Tensors) -> Tensors:
        return self.objective(embedded["left"], embedded["right"])


def test_a_method_with_only_a_forward_trains_whole_and_is_not_divided(tmp_path: Path):
    base = TrainSettings(batch_size=20, samples=20 * 3, threads=1, log_every=1, device="cpu")

    def losses(method: Method, name: str, microbatch: int | None = None) -> list[float]:
        settings = replace(base, microbatch=microbatch)
        with open_run(settings, script=name, out=tmp_path) as folder:
            fit(experiment_of(method, Rowwise(), 80), settings, folder)
            return [row["train/loss"] for row in folder.steps()]

    assert losses(ForwardOnly(), "whole") == losses(InParts(), "parts")
    advice = "ForwardOnly has only a forward pass: .* micro-batches, give it inputs, embed and loss"
    with pytest.raises(NotImplementedError, match=advice):
        losses(ForwardOnly(), "refused", microbatch=5)
    two = Ranks(torch.device("cpu"))
    two.count = 2
    with pytest.raises(NotImplementedError, match=advice):
        split_step(ForwardOnly(), Rowwise()[0], 0, base, two)


PEAK = """
import sys, torch
from pathlib import Path
from vision import train_simclr
from vision.methods import SimCLR
from offsphere.training.loop import _differentiated
from offsphere.training.ranks import Ranks
torch.set_num_threads(1)
batch, micro = (int(word) for word in sys.argv[1:])
config = train_simclr.Config(
    batch_size=batch, microbatch=micro or None, norm="group", cell="learnable", variance_weight=3,
    projector_hidden=512, image_size=64,
)
method = SimCLR(config, 5000)
pixels = torch.zeros(batch, 3, 64, 64, dtype=torch.uint8).random_(generator=torch.Generator())

def kilobytes(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))

before = kilobytes("VmRSS")
for step in range(2):
    method.zero_grad()
    _differentiated(method, pixels, step, config, Ranks(torch.device("cpu")))
print(kilobytes("VmHWM") - before)
"""


def peak_kilobytes(batch: int, micro: int) -> int:
    """What two steps add to the memory of a fresh process, at the most."""
    command = [sys.executable, "-W", "ignore", "-c", PEAK, str(batch), str(micro)]
    # Without this the allocator keeps what is freed, and the mark would be of that.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return int(done.stdout)


@pytest.mark.slow
def test_memory_is_that_of_a_micro_batch_plus_the_embeddings():
    """Batch 1,024 in micro-batches of 32 against a batch of 32, and against 1,024 at once."""
    small, large = peak_kilobytes(32, 0), peak_kilobytes(1024, 32)
    embeddings = 2 * 1024 * 128 * 4 // 1024
    print(f"batch 32: {small} kB; 1024 in 32s: {large} kB; embeddings: {embeddings} kB")
    assert large <= 1.3 * small + embeddings
    assert peak_kilobytes(1024, 0) > 3 * large
