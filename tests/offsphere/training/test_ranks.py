"""Gloo ranks against one process: gradients, queues, whole runs; and ranks that die."""

from __future__ import annotations

import io
import math
import os
import re
import runpy
import signal
import socket
import string
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor, nn

from offsphere.data.shards import ShardFacts, write_manifest
from offsphere.names import CELLS, LOSSES, PAIR_LOSSES, VIEW_LOSSES
from offsphere.objective import Objective
from offsphere.run.record import RunFolder
from offsphere.training import ranks as ranks_module
from offsphere.training.doctor import in_double
from offsphere.training.experiment import Method, Streamed
from offsphere.training.microbatch import prepare_batch_norm, split_step
from offsphere.training.ranks import Ranks, Rows, Tensors, connected, share, take
from offsphere.training.settings import TrainSettings
from offsphere.training.streams import stream

ROOT = Path(__file__).parents[3]
ALONE = Ranks(torch.device("cpu"))
BATCH = 22
Gradients = dict[str, Tensor]
Case = tuple[Method, Any, int]
"""A method, a batch, and the rows of that batch."""


class TwoTowers(Method):
    """A linear tower per side, so that every gradient has a short way home."""

    ragged = ("hard",)

    def __init__(self, objective: Objective) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.left, self.right, self.objective = nn.Linear(6, 5), nn.Linear(6, 5), objective
        self.register_buffer("queue", torch.randn(17, 5))

    def inputs(self, batch: Tensors, step: int, rows: Rows | None = None) -> Tensors:
        return batch

    def embed(self, inputs: Tensors) -> Tensors:
        embedded = {"left": self.left(inputs["a"]), "right": self.right(inputs["b"])}
        return embedded | ({"hard": self.right(inputs["hard"])} if "hard" in inputs else {})

    def losses(self, embedded: Tensors) -> Tensors:
        queue = self.queue if self.objective.loss == "moco_nce" else None
        hard = embedded.get("hard")
        return self.objective(embedded["left"], embedded["right"], queue=queue, hard_negatives=hard)


def pairs(rows: int, hard: int = 0) -> Tensors:
    draw = stream(3, "test")
    batch = {name: torch.randn(rows, 6, generator=draw) for name in ("a", "b")}
    return batch | ({"hard": torch.randn(hard, 6, generator=draw)} if hard else {})


def objective_cases() -> Iterator[tuple[str, Callable[[], Case]]]:
    """All losses x cells x variance, and what else makes the loss of a batch."""
    options: dict[str, dict[str, Any]] = {
        f"{loss}, {cell}, variance {weight:g}": {
            "loss": loss, "cell": cell, "variance_weight": weight
        }
        for loss in LOSSES for cell in CELLS for weight in (0.0, 3.0)
    }  # fmt: skip
    for loss in ("info_nce", "siglip"):
        options[f"{loss}, within views"] = {"loss": loss, "cell": "dnorm", "within_view": True}
    for direction in ("left_to_right", "right_to_left"):
        options[direction] = {"loss": "info_nce", "cell": "qnorm", "direction": direction}
    for loss in (*PAIR_LOSSES, *VIEW_LOSSES):  # 11 rows: groups lie across ranks and micro-batches
        options[f"{loss}, groups, GOR"] = {
            "loss": loss, "cell": "learnable", "variance_weight": 3.0, "gor_weight": 2.0,
            "negatives": BATCH // 2,
        }  # fmt: skip
    options["GOR, queue"] = {"loss": "moco_nce", "cell": "qnorm", "gor_weight": 2.0}
    options["batch mean norm"] = {"loss": "nt_xent", "cell": "dot", "batch_mean_norm": True}
    options["variance on scores"] = {
        "loss": "nt_xent", "cell": "learnable", "variance_weight": 3.0, "variance_on": "score"
    }  # fmt: skip

    def build(option: dict[str, Any], rows: int, hard: int) -> Case:
        learnable = option["loss"] != "spectral"
        objective = Objective(population=90, learnable_temperature=learnable, **option)
        batch = {key: x.double() for key, x in pairs(rows, hard).items()}
        return TwoTowers(objective).double(), batch, rows

    for name, option in options.items():
        yield name, lambda option=option: build(option, BATCH, 0)
    streamed = {"loss": "nt_xent", "cell": "learnable", "variance_weight": 3.0}
    yield "streamed", lambda: build(streamed, 150, 0)
    one_way = {"loss": "info_nce", "cell": "qnorm", "direction": "left_to_right"}
    for hard in (1, 2, 31):
        yield f"{hard} hard negatives", lambda hard=hard: build(one_way, BATCH, hard)


def lane_cases() -> Iterator[tuple[str, Callable[[], Case]]]:
    """SimCLR, MoCo, CLIP, retrieval and sentence regression, as their scripts build them."""

    def vision(kind: str) -> Case:
        from vision.methods import MoCo, SimCLR
        from vision.settings import MocoSettings, SimclrSettings

        shared = {"batch_size": BATCH, "norm": "group", "cell": "learnable"}
        shared |= {"variance_weight": 3, "norm_penalty": 0.1}
        pixels = torch.randint(0, 256, (BATCH, 3, 32, 32), generator=stream(0, "test"))
        if kind == "simclr":
            method = SimCLR(SimclrSettings(**shared), 90)
        else:
            method = MoCo(MocoSettings(**shared, queue_size=50, momentum=0.9), 90)
        return method, pixels.to(torch.uint8), BATCH

    def clip() -> Case:
        from crossmodal import experiment
        from crossmodal.methods import Clip, PairBatch
        from crossmodal.train_clip import Config

        settings = Config(
            batch_size=BATCH, cell="learnable", variance_weight=3, min_scale=0.5, model="tiny_vit"
        )
        towers = experiment.build_towers(settings)
        look = experiment.random_look(towers, settings)
        side = towers.image_size
        pixels = torch.randint(0, 256, (BATCH, 3, side, side), generator=stream(0, "test"))
        tokens = towers.trim(towers.tokenize([f"picture number {k}" for k in range(BATCH)]))
        objective = experiment.build_objective(settings, 90)
        return (
            Clip(towers, objective, look, settings),
            PairBatch(pixels.to(torch.uint8), tokens),
            BATCH,
        )

    def text(kind: str) -> Case:
        from offsphere.encoders.text import ScratchEncoder
        from text.methods import DualEncoder, PairRegression, make_towers
        from text.settings import RetrievalSettings

        settings = RetrievalSettings(
            batch_size=BATCH, encoder="scratch", tune="all", towers="separate"
        )
        torch.manual_seed(2)
        encoder = ScratchEncoder(width=16, layers=1, heads=2, max_length=12)
        towers = make_towers(encoder, settings)
        draw = stream(0, "test")
        tokens = {
            name: torch.randint(1, 900, (rows, 12), generator=draw)
            for name, rows in (("query", BATCH), ("document", BATCH), ("hard", BATCH + 3))
        }
        objective = Objective(
            "learnable", "info_nce", population=90, learnable_temperature=True,
            direction="left_to_right", variance_weight=3.0,
            scale="calibrated" if kind == "retrieval" else "fixed",
        )  # fmt: skip
        if kind == "retrieval":
            return DualEncoder(towers, objective, settings), tokens, BATCH
        scores = {"score": torch.rand(BATCH, generator=draw)}
        sides = {"left": tokens["query"], "right": tokens["document"]}
        return PairRegression(towers, objective, settings), sides | scores, BATCH

    def doubled(build: Callable[[], Case]) -> Case:
        method, batch, rows = build()
        return in_double(method), batch, rows

    builders = {
        "simclr": lambda: vision("simclr"),
        "moco": lambda: vision("moco"),
        "clip": clip,
        "retrieval": lambda: text("retrieval"),
        "sentences": lambda: text("sentences"),
    }
    for name, build in builders.items():
        yield name, lambda build=build: doubled(build)


def all_cases() -> dict[str, Callable[[], Case]]:
    return dict([*objective_cases(), *lane_cases()])


def gradients(case: Case, ranks: Ranks, microbatch: int | None = None) -> Gradients:
    """Every parameter's gradient in the second of two steps, and the buffers after it."""
    method, batch, rows = case
    settings = TrainSettings(batch_size=rows, microbatch=microbatch)
    for step in range(2):
        method.zero_grad()
        if ranks.count == 1 and microbatch is None:
            method(batch, step).losses["loss"].backward()
        else:
            own = ranks.own(rows)
            split_step(method, take(batch, own, share(rows, 0, 1)), step, settings, ranks)
        method.after_step(0.5)
    return state_of(method)


def state_of(method: Method) -> Gradients:
    """A copy of every gradient and buffer."""
    found = {name: p.grad for name, p in method.named_parameters() if p.grad is not None}
    kept = {f"buffer {name}": x for name, x in method.named_buffers()}
    return {name: x.clone() for name, x in (found | kept).items()}


def relative_error(got: Tensor, expected: Tensor) -> float:
    difference = (got.double() - expected.double()).norm()
    return (difference / expected.double().norm().clamp_min(1e-12)).item()


def assert_alike(got: Gradients, expected: Gradients, context: str) -> None:
    """Relative errors of at most 1e-10; of 1e-5 with pictures, which are drawn in float32."""
    assert got.keys() == expected.keys(), context
    scale = max(x.norm().item() for name, x in expected.items() if "buffer" not in name)
    assert 0 < scale < math.inf, context
    for name, x in expected.items():
        if torch.equal(got[name], x):
            continue
        limit = 1e-5 if context.startswith(("simclr", "moco,", "moco on", "clip")) else 1e-10
        # A gradient that is zero in exact arithmetic (a bias before a softmax) has no digits.
        size = max(x.double().norm().item(), 1e-4 * scale)
        error = (got[name].double() - x.double()).norm().item() / size
        assert error <= limit, f"{context}: {name} is {error:.2g} off"


# What the ranks do: this file as a script, in processes forked from the warm one.


def connect(rank: int, count: int, port: int) -> Ranks:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=count)
    return Ranks(torch.device("cpu"))


def gradients_on_ranks(ranks: Ranks, out: str) -> None:
    """What this rank finds, and on the first one beside it what one process does."""
    compare_on_ranks(ranks, out, all_cases())


def objectives_on_ranks(ranks: Ranks, out: str) -> None:
    """The same of the losses alone, without the lanes' towers."""
    compare_on_ranks(ranks, out, dict(objective_cases()))


def compare_on_ranks(ranks: Ranks, out: str, cases: dict[str, Callable[[], Case]]) -> None:
    found = {name: gradients(build(), ranks) for name, build in cases.items()}
    if ranks.first:
        expected = {name: gradients(build(), ALONE) for name, build in cases.items()}
        torch.save(expected, f"{out}.expected")
    torch.save(found, out)


SHARDS, IN_SHARD, STREAMED_STEPS = 4, 6, 4


def write_shards(folder: Path) -> Path:
    """Shards of flat pictures that tell their number, captioned with one letter each."""
    folder.mkdir()
    facts = {}
    for shard in range(SHARDS):
        path = folder / f"t-{shard}.tar"
        with tarfile.open(path, "w") as archive:
            for number in range(shard * IN_SHARD, (shard + 1) * IN_SHARD):
                picture = io.BytesIO()
                Image.new("RGB", (32, 32), (10 * number, 0, 99)).save(picture, "png")
                letter = string.ascii_lowercase[number].encode()
                for suffix, content in (("png", picture.getvalue()), ("txt", letter)):
                    member = tarfile.TarInfo(f"s{number:02d}.{suffix}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
        facts[path.name] = ShardFacts(IN_SHARD, path.stat().st_size)
    write_manifest(folder, facts)
    return folder


def streamed_clip(shards: Path) -> tuple[Method, Streamed, TrainSettings]:
    """CLIP on shards that can only be read in order, as its script builds it."""
    from crossmodal import experiment
    from crossmodal.methods import Clip
    from crossmodal.splits import load_splits
    from crossmodal.stream import StreamedPairs
    from crossmodal.train_clip import Config

    settings = Config(
        batch_size=9, model="tiny_vit", cell="learnable", variance_weight=3, min_scale=0.5,
        data=f"wds:file://{shards}/t-{{0..{SHARDS - 1}}}.tar", data_test=f"wds:{shards}/t-0.tar",
    )  # fmt: skip
    towers = experiment.build_towers(settings)
    data = load_splits(settings, towers.image_size, frozen=False).train
    assert isinstance(data, StreamedPairs)
    objective = experiment.build_objective(settings, len(data))
    method = Clip(towers, objective, experiment.random_look(towers, settings), settings)
    return in_double(method), experiment.StreamedBatches(data, towers), settings


def streams_on_ranks(ranks: Ranks, out: str) -> None:
    """The batches that this rank reads of an epoch and a half, and the last step's gradients."""
    method, batches, settings = streamed_clip(Path(out).parent / "shards")
    read = []
    for step, batch in enumerate(batches.from_step(0, STREAMED_STEPS)):
        method.zero_grad()
        split_step(method, batch, step, settings, ranks)
        read.append(tuple(batch))
    torch.save({"read": read, "state": state_of(method)}, out)


def open_clip_on_ranks(ranks: Ranks, out: str) -> None:
    """open_clip's loss as it is by default, its gradients averaged as DDP does."""
    from open_clip.loss import ClipLoss

    from offsphere import dropin

    found = {}
    for name, loss in (
        ("open_clip", ClipLoss(rank=ranks.rank, world_size=ranks.count)),
        ("offsphere", dropin.ClipLoss(rank=ranks.rank, world_size=ranks.count)),
    ):
        towers = TwoTowers(Objective(population=90))
        own = ranks.own(24)
        loss(*features(towers, take(pairs(24), own, share(24, 0, 1))), torch.tensor(9.0)).backward()
        ranks.sum_gradients(towers.parameters())
        weights = towers.left.weight.grad, towers.right.weight.grad
        found[name] = [x / ranks.count for x in weights if x is not None]
    torch.save(found, out)


def features(towers: TwoTowers, batch: Tensors) -> list[Tensor]:
    return [nn.functional.normalize(x, dim=1) for x in towers.embed(batch).values()]


def script_on_ranks(rank: int, count: int, port: int, script: str, *flags: str) -> None:
    """A training script as torchrun starts it."""
    as_torchrun(rank, count, port)
    sys.argv = [str(ROOT / script), *flags]
    runpy.run_path(sys.argv[0], run_name="__main__")


def as_torchrun(rank: int, count: int, port: int) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count), "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "test",
    }  # fmt: skip


def impatient_script_on_ranks(rank: int, count: int, port: int, *words: str) -> None:
    """A script whose ranks do not wait long for each other at the start."""
    ranks_module.MEETING = timedelta(seconds=5)
    script_on_ranks(rank, count, port, *words)


def slow_ranks(rank: int, count: int, port: int) -> None:
    """Ranks that meet within their time, and then are silent for longer than that."""
    as_torchrun(rank, count, port)
    ranks_module.MEETING = timedelta(seconds=5)
    with connected(TrainSettings(device="cpu"), "slow") as ranks:
        for silent in range(count):
            if rank == silent:
                time.sleep(7)
            assert ranks.anyone(rank == silent)


class Launched:
    """This file's functions on ranks, each a process that is forked from the warm one."""

    def __init__(self, scripts: Any, folder: Path, free_port: Callable[[], int]) -> None:
        self.scripts, self.folder, self.free_port = scripts, folder, free_port
        self.pids: list[int] = []

    def start(self, what: str, count: int, *words: str) -> None:
        self.pids, port = [], str(self.free_port())
        for rank in range(count):
            here = self.folder / str(rank)
            here.mkdir(parents=True, exist_ok=True)
            argv = [__file__, what, str(rank), str(count), port, *words]
            files = {name: str(here / name) for name in ("stdout", "stderr")}
            job = {"argv": argv, "folder": str(here), **files, "largest_file": 0}
            self.pids.append(self.scripts.ask(job))

    def wait(self) -> list[int]:
        return [self.scripts.ask({"pid": pid, "wait": True}) for pid in self.pids]

    def wait_for_rows(self, out: Path, rows: int, seconds: float = 300) -> None:
        """Until so many rows are written; what the ranks said if one of them ends before."""
        end = time.monotonic() + seconds
        while rows_below(out) < rows:
            for rank, pid in enumerate(self.pids):
                ended = self.scripts.ask({"pid": pid, "wait": False}) is not None
                assert not ended, f"rank {rank} ended: {self.said(rank)}"
            assert time.monotonic() < end, [self.said(rank) for rank in range(len(self.pids))]
            time.sleep(0.01)

    def said(self, rank: int) -> str:
        return (self.folder / str(rank) / "stderr").read_text()


@pytest.fixture
def launched(scripts, tmp_path: Path, free_port) -> Launched:
    return Launched(scripts, tmp_path / "ranks", free_port)


# Shares of a batch


@given(st.integers(1, 200), st.integers(1, 9), st.integers(1, 50))
def test_shares_and_parts_hold_every_row_once(total: int, count: int, size: int):
    shares = [share(total, rank, count) for rank in range(count)]
    parts = [part for one in shares for part in one.parts(size)]
    assert [row for part in parts for row in range(part.start, part.stop)] == list(range(total))
    assert all(0 < part.stop - part.start <= size for part in parts)
    sizes = [one.stop - one.start for one in shares]
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 20), st.integers(0, 90))
def test_what_belongs_to_no_row_is_shared_without_loss(total: int, count: int, size: int, more):
    batch, whole = {"x": torch.arange(total), "hard": torch.arange(more)}, share(total, 0, 1)
    found: list[Tensors] = []
    for rank in range(count):
        own = share(total, rank, count)
        mine = take(batch, own, whole) if own.stop > own.start else None
        found += [take(mine, part, own) for part in own.parts(size)] if mine else []
    for name, x in batch.items():
        assert torch.equal(torch.cat([part[name] for part in found]), x)


# Gradients


@pytest.mark.parametrize(
    ("count", "cases"),
    [
        (2, "all"),
        pytest.param(3, "objectives", marks=pytest.mark.slow),
        *(pytest.param(count, "all", marks=pytest.mark.slow) for count in (3, 4)),
    ],
)
def test_gradients_on_ranks_are_those_of_one_process(launched, count, cases, tmp_path: Path):
    """The ranks of a row share one process group; lanes on three and four of them take longer."""
    launched.start("gradients" if cases == "all" else cases, count, str(tmp_path / "found"))
    assert launched.wait() == [0] * count, launched.said(0)
    found = [torch.load(f"{tmp_path / 'found'}.{rank}") for rank in range(count)]
    expected = torch.load(f"{tmp_path / 'found'}.0.expected")
    assert len(expected) == len(LOSSES) * len(CELLS) * 2 + 13 + 4 + (5 if cases == "all" else 0)
    for name in expected:
        assert_alike(found[0][name], expected[name], f"{name} on {count} ranks")
        for other in found[1:]:  # not one bit apart, or weights and queues would drift
            assert all(torch.equal(other[name][k], x) for k, x in found[0][name].items()), name


def test_streams_on_ranks_give_every_sample_once_and_one_process_gradients(launched, tmp_path):
    """Two ranks read two of four shards each, in batches of 4 and 5 rows."""
    from crossmodal.methods import PairBatch

    shards = write_shards(tmp_path / "shards")
    launched.start("streams", 2, str(tmp_path / "found"))
    assert launched.wait() == [0, 0], launched.said(0) + launched.said(1)
    found = [torch.load(f"{tmp_path / 'found'}.{rank}") for rank in (0, 1)]
    epoch = SHARDS * IN_SHARD // 2
    seen = []
    for rank, size in enumerate((4, 5)):
        assert {len(images) for images, _ in found[rank]["read"]} == {size}
        numbers = [
            n // 10 for images, _ in found[rank]["read"] for n in images[:, 0, 0, 0].tolist()
        ]
        assert len(set(numbers[:epoch])) == epoch
        seen += numbers[:epoch]
    assert sorted(seen) == list(range(SHARDS * IN_SHARD))

    method, _, _ = streamed_clip(shards)
    for step, parts in enumerate(zip(found[0]["read"], found[1]["read"], strict=True)):
        method.zero_grad()
        whole = PairBatch(*(torch.cat(both) for both in zip(*parts, strict=True)))
        method(whole, step).losses["loss"].backward()
    for part in found:
        assert_alike(part["state"], state_of(method), "clip on a stream, on 2 ranks")


def test_the_peer_halves_the_gradient_on_two_ranks(launched, tmp_path: Path):
    """open_clip.loss.ClipLoss by default: no gradient comes back from the other rank's loss."""
    from open_clip.loss import ClipLoss

    launched.start("open_clip", 2, str(tmp_path / "found"))
    assert launched.wait() == [0, 0], launched.said(0)
    found = torch.load(f"{tmp_path / 'found'}.0")
    towers = TwoTowers(Objective(population=90))
    ClipLoss()(*features(towers, pairs(24)), torch.tensor(9.0)).backward()
    expected = [towers.left.weight.grad, towers.right.weight.grad]
    errors = {
        name: [relative_error(x, e) for x, e in zip(xs, expected, strict=True) if e is not None]
        for name, xs in found.items()
    }
    assert errors["offsphere"] == pytest.approx([0, 0], abs=1e-5)
    assert errors["open_clip"] == pytest.approx([0.5, 0.5], rel=1e-5)


def test_rows_that_the_others_cannot_know_must_be_named():
    ranks = Ranks(torch.device("cpu"))
    ranks.rank, ranks.count = 1, 3
    assert ranks._counts("views", 8, 11, ()) == (6, 8, 8)
    message = "as many rows of hard for each of the 4 rows of this rank, got 7 in all. Name it in"
    with pytest.raises(ValueError, match=message):
        ranks.gather({"hard": torch.zeros(7, 2)}, 11)


def test_batch_norm_is_refused_where_it_would_see_a_part_of_the_batch():
    method = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    prepare_batch_norm(method, TrainSettings(batch_size=8), ALONE)
    prepare_batch_norm(nn.Sequential(nn.GroupNorm(1, 2)), TrainSettings(microbatch=2), ALONE)
    with pytest.raises(ValueError, match=r"--microbatch=4: batch-norm.*--norm=group"):
        prepare_batch_norm(method, TrainSettings(batch_size=8, microbatch=4), ALONE)
    two = Ranks(torch.device("cpu"))
    two.count = 2
    for asked in (False, True):
        with pytest.raises(ValueError, match=r"On 2 ranks batch-norm.*--norm=group"):
            prepare_batch_norm(method, TrainSettings(sync_batch_norm=asked), two)


def test_on_gpus_batch_norm_can_take_the_batch_of_all_ranks():
    """What is trained there is made here: the exchange itself needs GPUs."""
    method = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2)))
    two = Ranks(torch.device("cuda"))
    two.count = 2
    with pytest.raises(ValueError, match=r"On 2 ranks batch-norm.*or --sync-batch-norm\."):
        prepare_batch_norm(method, TrainSettings(), two)
    before = method.state_dict()
    prepare_batch_norm(method, TrainSettings(sync_batch_norm=True), two)
    assert [type(m).__name__ for m in method.modules()][-1] == "SyncBatchNorm"
    assert not any(type(m) is nn.BatchNorm1d for m in method.modules())
    assert all(torch.equal(x, before[name]) for name, x in method.state_dict().items())
    sliced = TrainSettings(sync_batch_norm=True, microbatch=4)
    with pytest.raises(ValueError, match="--microbatch=4: batch-norm"):
        prepare_batch_norm(method, sliced, two)


# Whole runs

SIMCLR = "--data=emoji --limit=120 --batch-size=31 --image-size=16 --layer=backbone --norm=group"
SIMCLR += " --log-every=1 --threads=1 --cell=learnable --variance-weight=3 --clip=1 --device=cpu"
SIMCLR += " --lr=0.0003 --warmup=0.5"


def flags(out: Path, steps: int) -> list[str]:
    return [*SIMCLR.split(), f"--samples={31 * steps}", f"--out={out}"]


def only_run(out: Path) -> RunFolder:
    (config,) = out.glob("*/*/config.yaml")
    return RunFolder(config.parent)


def rows_below(out: Path) -> int:
    return sum(file.read_bytes().count(b"\n") for file in out.glob("*/*/steps.jsonl"))


def test_a_run_goes_from_two_ranks_to_one_to_two_and_is_the_same(
    scripts, launched, wait_for_rows, tmp_path: Path
):
    """Each session is told to stop; the losses, step by step, are those of one process."""
    whole, out, script = tmp_path / "whole", tmp_path / "out", "vision/train_simclr.py"
    assert scripts.run("train_simclr", *flags(whole, 40)).code == 0
    launched.start("script", 2, script, *flags(out, 40))
    launched.wait_for_rows(out, 2)
    os.kill(launched.pids[1], signal.SIGTERM)  # the other one learns of it
    assert launched.wait() == [130, 130]
    message = "train_simclr: stopped by a signal to another rank after step [0-9]+ of 40. "
    assert re.fullmatch(message + "The checkpoint is written: .*\n", launched.said(0))
    assert launched.said(1) == ""
    first = rows_below(out)
    alone = scripts.start("train_simclr", *flags(out, 40))
    wait_for_rows(alone, out, first + 2)
    alone.signal(signal.SIGTERM)
    assert alone.wait() == 130
    assert first < rows_below(out) < 40
    launched.start("script", 2, script, *flags(out, 40))
    assert launched.wait() == [0, 0], launched.said(0)

    one, other = only_run(whole), only_run(out)
    assert one.path.name == other.path.name
    assert [row["step"] for row in other.steps()] == list(range(40))
    ranks = [row.get("train/ranks", 1) for row in other.steps()]
    assert (ranks[0], ranks[first], ranks[-1]) == (2, 1, 2)
    for mine, theirs in zip(other.steps(), one.steps(), strict=True):
        for name in ("train/loss", "train/variance", "train/exponent_left", "train/norm_left_mean"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-3), (name, mine["step"])
    assert other.metrics().keys() - one.metrics().keys() == {"train/ranks", "train/payload"}
    # In four bytes: two embeddings of 128 numbers for each of a rank's 16 rows, their gradients for
    # all 32, every weight's gradient, the loss with its positives and the variance term. Whether to
    # stop is told after the row is made.
    state = torch.load(other.checkpoint / "last.pt", weights_only=True)["optimizers"]
    weights = sum(s["exp_avg"].numel() for one in state for s in one["state"].values())
    assert other.steps()[-1]["train/payload"] == 4 * (2 * 48 * 128 + weights + 3)


def test_a_killed_rank_ends_the_job_with_a_message_and_the_run_goes_on(launched, tmp_path: Path):
    out, script = tmp_path / "out", "vision/train_simclr.py"
    often = "--checkpoint-every=1"
    launched.start("script", 2, script, *flags(out, 400), often)
    launched.wait_for_rows(out, 3)
    os.kill(launched.pids[1], signal.SIGKILL)
    begin = time.monotonic()
    assert launched.wait() == [1, -signal.SIGKILL]
    assert time.monotonic() - begin < 60
    (line,) = launched.said(0).splitlines()
    assert line.startswith("train_simclr: rank 0 of 2 has lost contact with another rank")
    assert line.endswith("the same command resumes from there, on any number of ranks.")
    assert only_run(out).metrics() == {}
    step = torch.load(only_run(out).checkpoint / "last.pt", weights_only=True)["step"]
    launched.start("script", 2, script, *flags(out, 400), often)
    launched.wait_for_rows(out, step + 2)
    os.kill(launched.pids[0], signal.SIGKILL)
    assert launched.wait() == [-signal.SIGKILL, 1]
    assert "rank 1 of 2 has lost contact" in launched.said(1)


def test_a_rank_that_fails_at_its_start_ends_the_others_with_a_message(launched, tmp_path: Path):
    """The first rank finds its port taken, as by a job that still runs: both end."""
    script, out = "vision/train_simclr.py", tmp_path / "out"
    with socket.socket() as taken:
        port = launched.free_port()
        taken.bind(("127.0.0.1", port))
        launched.free_port = lambda: port
        launched.start("impatient", 2, script, *flags(out, 4))
        begin = time.monotonic()
        assert launched.wait() == [1, 1]
        assert time.monotonic() - begin < 60
    for rank in (0, 1):
        *_, line = launched.said(rank).splitlines()  # torch may tell its own story before
        meeting = f"train_simclr: rank {rank} of 2 did not meet the others at 127.0.0.1:"
        assert line.startswith(f"{meeting}{port} (The "), line
        assert line.endswith("If the address is in use, set another MASTER_PORT.")
    assert "socket has failed to listen" in launched.said(0)
    assert "has timed out after 5000ms while trying to connect" in launched.said(1)
    assert not out.exists()


@pytest.mark.slow
def test_ranks_that_have_met_are_patient(launched):
    launched.start("slow", 2)
    assert launched.wait() == [0, 0], launched.said(0) + launched.said(1)


def test_mistakes_end_every_rank_and_are_told_once(launched, tmp_path: Path):
    for wrong, said in (
        ("--queue-size=2000", "--queue-size=2000 is too long"),
        ("--norm=batch", "On 2 ranks batch-norm"),
        ("--batch-size=1", None),
    ):
        queue = [] if wrong.startswith("--queue") else ["--queue-size=40"]
        launched.start("script", 2, "vision/train_moco.py", *flags(tmp_path, 4), *queue, wrong)
        codes = launched.wait()
        assert codes == ([2, 2] if said is None else [1, 1]), launched.said(0)
        if said is not None:
            assert said in launched.said(0)


@pytest.mark.slow
def test_a_streamed_run_goes_on_with_as_many_ranks_as_it_began_with(scripts, launched, tmp_path):
    shards, script = write_shards(tmp_path / "shards"), "crossmodal/train_clip.py"
    common = f"--data=wds:file://{shards}/t-{{0..3}}.tar --data-test=wds:{shards}/t-0.tar"
    common += " --model=tiny_vit --batch-size=9 --samples=180 --log-every=1 --threads=1"
    common += " --device=cpu --lr=0.0003"

    def words(name: str) -> list[str]:
        return [*common.split(), f"--out={tmp_path / name}"]

    launched.start("script", 2, script, *words("whole"))
    assert launched.wait() == [0, 0], launched.said(0)
    launched.start("script", 2, script, *words("cut"))
    launched.wait_for_rows(tmp_path / "cut", 2)
    os.kill(launched.pids[0], signal.SIGTERM)
    assert launched.wait() == [130, 130], launched.said(0)
    alone = scripts.run("train_clip", *words("cut"))
    assert alone.code == 1
    assert "began with: 2 rank(s) and --workers=1 each, not 1 and 1." in alone.stderr
    launched.start("script", 2, script, *words("cut"), "--workers=2")
    assert launched.wait() == [1, 1]
    assert "--workers=1 each, not 2 and 2." in launched.said(0)
    launched.start("script", 2, script, *words("cut"))
    assert launched.wait() == [0, 0], launched.said(0)
    mine, theirs = only_run(tmp_path / "cut").steps(), only_run(tmp_path / "whole").steps()
    assert [row["train/loss"] for row in mine] == [row["train/loss"] for row in theirs]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "--devices=2"])
def test_both_launchers_train_the_same_run(launcher: str, scripts, tmp_path: Path):
    assert scripts.run("train_simclr", *flags(tmp_path / "whole", 6)).code == 0
    script = [str(ROOT / "vision/train_simclr.py"), *flags(tmp_path / "out", 6)]
    command = [sys.executable, *script, launcher]
    if launcher == "torchrun":
        run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command = [sys.executable, *run, *script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("config.yaml, steps.jsonl, metrics.json, run.png") == 1
    mine, theirs = only_run(tmp_path / "out").steps(), only_run(tmp_path / "whole").steps()
    assert [row["train/ranks"] for row in mine] == [2] * 6
    losses = [[row["train/loss"] for row in rows] for rows in (mine, theirs)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_devices_are_not_started_from_within_another_program(tmp_path: Path, monkeypatch):
    from offsphere.training.run import train_run

    monkeypatch.setattr(sys, "argv", ["offsphere", "study"])
    settings = TrainSettings(devices=2, out=str(tmp_path), device="cpu")
    with pytest.raises(ValueError, match=r"--devices=2 .* run the script itself"):
        train_run(settings, "toy", lambda *_: pytest.fail("made"))
    assert list(tmp_path.iterdir()) == []


if __name__ == "__main__":
    job, rank, count, port, *words = sys.argv[1:]
    place = int(rank), int(count), int(port)
    scripts = {"script": script_on_ranks, "impatient": impatient_script_on_ranks}
    if job in scripts:
        scripts[job](*place, *words)
    elif job == "slow":
        slow_ranks(*place)
    else:
        jobs = {
            "gradients": gradients_on_ranks,
            "objectives": objectives_on_ranks,
            "open_clip": open_clip_on_ranks,
            "streams": streams_on_ranks,
        }
        jobs[job](connect(*place), f"{words[0]}.{rank}")
        dist.destroy_process_group()


def test_many_machines_need_a_launcher(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "NODE_RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="--nodes=2 needs a launcher on every machine.*torchrun"):
        connected(TrainSettings(nodes=2), "train_simclr").__enter__()
