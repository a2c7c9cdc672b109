"""Bytes, flops and memory of one training step on 1, 2 and 3 ranks, beside the formulas.

    python benchmarks/ranks.py                     # every lane; each rank is a fresh process
    python benchmarks/ranks.py --towers            # flops and weights of the towers in the docs

The numbers of docs/scaling.md come from here. Bytes are counted where they are handed to the
exchange; memory is the kernel's high-water mark (VmHWM) less what the process held before the step;
flops are what torch counts in matrix products and convolutions.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from offsphere.training.experiment import Method
from offsphere.training.microbatch import is_split, split_step
from offsphere.training.ranks import Ranks, share, take
from offsphere.training.settings import TrainSettings

BATCH = 192
LANES = ("train_simclr", "train_moco", "train_clip", "train_retrieval")


def build(
    lane: str, microbatch: int | None, rows: int = BATCH
) -> tuple[Method, Any, TrainSettings]:
    """A lane's small method without batch-norm, and a batch of noise."""
    draw = torch.Generator().manual_seed(0)
    if lane == "train_clip":
        from crossmodal import experiment
        from crossmodal.methods import Clip, PairBatch
        from crossmodal.train_clip import Config

        settings = Config(batch_size=rows, model="tiny_vit", microbatch=microbatch)
        towers = experiment.build_towers(settings)
        pixels = torch.randint(0, 256, (rows, 3, 32, 32), generator=draw).to(torch.uint8)
        tokens = towers.tokenize([f"picture number {k}" for k in range(rows)])
        look, objective = (
            experiment.random_look(towers, settings),
            experiment.build_objective(settings, 5000),
        )
        return Clip(towers, objective, look, settings), PairBatch(pixels, tokens), settings
    if lane == "train_retrieval":
        from offsphere.encoders.text import ScratchEncoder
        from offsphere.objective import Objective
        from text.methods import DualEncoder, make_towers
        from text.settings import RetrievalSettings

        settings = RetrievalSettings(
            batch_size=rows, encoder="scratch", tune="all", microbatch=microbatch
        )
        encoder = ScratchEncoder(max_length=64)
        names = ("query", "document")
        batch = {name: torch.randint(1, 8000, (rows, 64), generator=draw) for name in names}
        objective = Objective("cosine", "info_nce", population=5000, direction="left_to_right")
        return DualEncoder(make_towers(encoder, settings), objective, settings), batch, settings
    from vision.methods import MoCo, SimCLR
    from vision.settings import MocoSettings, SimclrSettings

    pixels = torch.randint(0, 256, (rows, 3, 32, 32), generator=draw).to(torch.uint8)
    if lane == "train_simclr":
        settings = SimclrSettings(batch_size=rows, norm="group", microbatch=microbatch)
        return SimCLR(settings, 5000), pixels, settings
    settings = MocoSettings(batch_size=rows, norm="group", microbatch=microbatch)
    return MoCo(settings, 5000), pixels, settings


def one_rank(lane: str, rank: int, count: int, store: str, microbatch: int | None) -> None:
    """Two steps; prints what the second one exchanged and the most memory that both needed."""
    torch.set_num_threads(1)
    if count > 1:
        dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=count)
    ranks = Ranks(torch.device("cpu"))
    method, batch, settings = build(lane, microbatch)
    own = take(batch, ranks.own(BATCH), share(BATCH, 0, 1))
    before, payload = kilobytes("VmRSS"), 0
    for step in range(2):
        method.zero_grad()
        payload = ranks.payload
        if is_split(settings, ranks):
            split_step(method, own, step, settings, ranks)
        else:
            method(own, step).losses["loss"].backward()
        payload = ranks.payload - payload
        method.after_step(0.5)
    weights = sum(p.grad.numel() for p in method.parameters() if p.grad is not None)
    found = {"payload": payload, "weights": weights, "peak": kilobytes("VmHWM") - before}
    found |= flops(method, own, settings, ranks)
    print(json.dumps(found))
    if count > 1:
        dist.destroy_process_group()


def flops(method: Method, own: Any, settings: TrainSettings, ranks: Ranks) -> dict[str, int]:
    """Flops of a step on this rank, as counted and by the formula of the towers.

    That is three passes forward with gradient, one without, and with micro-batches one more."""

    def step() -> None:
        if is_split(settings, ranks):
            split_step(method, own, 2, settings, ranks)
        else:
            method(own, 2).losses["loss"].backward()

    with torch.no_grad():
        inputs = method.inputs(own, 2, ranks.own(BATCH))
        with_gradient = counted(lambda: method.embed(inputs))
        without = counted(lambda: method.constants(inputs, 2))
    again = with_gradient if settings.microbatch else 0
    return {"flops": counted(step), "formula": 3 * with_gradient + without + again}


def counted(work: Callable[[], object]) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


def loss_formula(lane: str, count: int, width: int = 128, queue: int = 2048) -> float:
    """Flops of a rank's share of the loss."""
    products = {"train_simclr": 12 * BATCH, "train_moco": 4 * queue}.get(lane, 6 * BATCH)
    return products * BATCH * width / count


def kilobytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def measured(lane: str, count: int, microbatch: int | None) -> list[dict[str, int]]:
    """What each rank found."""
    command = [sys.executable, "-W", "ignore", __file__, "--one-rank"]
    # Without this the allocator keeps what is freed, and the mark would be of that.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        words = [lane, str(count), f"{folder}/store", str(microbatch or 0)]
        started = [
            subprocess.Popen(
                [*command, str(rank), *words], stdout=subprocess.PIPE, text=True, env=environment
            )
            for rank in range(count)
        ]
        outputs = [process.communicate()[0] for process in started]
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def payload_formula(lane: str, weights: int, count: int, width: int = 128, sides: int = 2) -> int:
    """Bytes: a rank's rows of both sides, the gradients of all rows (MoCo's keys have none) and of
    the weights, and what the loss and the variance term sum over the ranks."""
    if count == 1:
        return 0
    rows, trained = -(-BATCH // count), 1 if lane == "train_moco" else 2
    # SimCLR's rows have one sum each, CLIP's columns too; then the value and its positives. The
    # variance term is one number, or two Gram matrices if a queue is longer than twice the width.
    loss = {"train_simclr": 2 * BATCH + 1, "train_clip": BATCH + 2}.get(lane, 2)
    variance = 2 * width**2 if lane == "train_moco" else 1
    return 4 * ((sides + trained * count) * rows * width + weights + loss + variance)


def compare(lanes: list[str]) -> None:
    print(f"batch {BATCH}, width 128; bytes per rank and step; MB = 2**20 bytes")
    print(
        f"{'lane':16} ranks micro    weights    bytes found  bytes formula    peak MB   "
        "GFLOP found  GFLOP formula"
    )
    for lane in lanes:
        for count, microbatch in ((1, None), (2, None), (3, None), (1, 16), (2, 16)):
            found = measured(lane, count, microbatch)
            first, peak = found[0], max(x["peak"] for x in found) / 2**10
            formula = payload_formula(lane, first["weights"], count)
            print(
                f"{lane:16} {count:5} {microbatch or '-':>5} {first['weights']:10} "
                f"{first['payload']:14} {formula:14} {peak:10.1f} {first['flops'] / 1e9:13.3f} "
                f"{(first['formula'] + loss_formula(lane, count)) / 1e9:14.3f}",
                flush=True,
            )


def towers() -> None:
    """Flops of one sample's forward pass, as torch counts them (a product is two), and weights."""
    import open_clip
    import timm
    from torch.utils.flop_counter import FlopCounterMode

    def clip_pass(model: Any) -> Callable[[], object]:
        tokens = torch.zeros(1, model.context_length, dtype=torch.long)
        side = model.visual.image_size
        picture = torch.zeros(1, 3, *(side if isinstance(side, tuple) else (side, side)))
        return lambda: (model.encode_image(picture), model.encode_text(tokens))

    models: dict[str, tuple[Any, Callable[[], object]]] = {}
    resnet = timm.create_model("resnet50").eval()
    models["resnet50"] = resnet, lambda: resnet(torch.zeros(1, 3, 224, 224))
    for name in ("ViT-B-32", "ViT-B-16"):
        model = open_clip.create_model(name).eval()
        models[f"CLIP {name}"] = model, clip_pass(model)
    for name, (model, forward) in models.items():
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            forward()
        weights = sum(p.numel() for p in model.parameters())
        print(f"{name:16} {counter.get_total_flops() / 1e9:7.2f} GFLOP {weights / 1e6:7.1f} M")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lanes", nargs="+", default=list(LANES), choices=LANES)
    parser.add_argument("--towers", action="store_true")
    parser.add_argument("--one-rank", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one_rank:
        rank, lane, count, store, micro = args.one_rank
        one_rank(lane, int(rank), int(count), store, int(micro) or None)
    elif args.towers:
        towers()
    else:
        compare(args.lanes)
