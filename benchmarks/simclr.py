"""Images/s of whole SimCLR and MoCo pipelines beside lightly's stock recipe, in one run.

    python benchmarks/simclr.py                                        # on the embedded emoji set
    python benchmarks/simclr.py --data='wds:cifar10-train-{000000..000004}.tar'

Both sides train the same backbone and head on the same pictures with batches of 256 and 32 pixels.
Ours is the pipeline of vision/train_simclr.py. lightly's is its SimCLRTransform (MoCoV2Transform)
in a DataLoader with the best number of workers for this machine, and its NTXentLoss (with a memory
bank for MoCo). For each side the better of one run on two threads and two runs on one thread each.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from offsphere.data.images import Images, load_images
from offsphere.encoders.images import ImageEncoder
from offsphere.training import images as experiment
from offsphere.training.loop import build_optimizers
from offsphere.training.settings import ImageSettings
from vision.methods import MoCo, SimCLR
from vision.settings import MocoSettings, SimclrSettings

BATCH = 256
WARM_UP = 3


def settings_of(kind: str, data: str, threads: int) -> SimclrSettings | MocoSettings:
    settings_class = SimclrSettings if kind == "simclr" else MocoSettings
    return settings_class(data=data, batch_size=BATCH, threads=threads, data_test=data)


def our_step(images: Images, settings: SimclrSettings | MocoSettings, clock: Clock):
    """One training step of ours; the clock is told where the time goes."""
    make = SimCLR if isinstance(settings, SimclrSettings) else MoCo
    method = make(settings, len(images))  # pyright: ignore[reportArgumentType]
    batches = experiment.TrainingBatches(images, settings)
    (optimizer,) = build_optimizers(method, settings)
    clock.watch("views", method, "two_views")
    clock.watch("encoder", method.encoder, "forward")
    clock.watch("loss", method.objective, "forward")
    if isinstance(method, MoCo):
        clock.watch("encoder", method.twin, "forward")

    def step(number: int) -> None:
        result = method(batches[number], number)
        begin = time.perf_counter()
        result.losses["loss"].backward()
        clock.add("encoder", time.perf_counter() - begin)
        optimizer.step()
        optimizer.zero_grad()
        method.after_step(0.5)

    return step


class Clock:
    """Seconds spent in named parts."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def watch(self, name: str, owner: nn.Module, attribute: str) -> None:
        """Replace a method of `owner` by one that is timed."""
        inner = getattr(owner, attribute)

        def timed(*args, **kwargs):
            begin = time.perf_counter()
            result = inner(*args, **kwargs)
            self.add(name, time.perf_counter() - begin)
            return result

        setattr(owner, attribute, timed)


class Pictures(torch.utils.data.Dataset):
    """PIL pictures for lightly's transforms, as its own datasets give them."""

    def __init__(self, images: Images, transform: Callable) -> None:
        self.images, self.transform = images, transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> list[Tensor]:
        from torchvision.transforms.v2.functional import to_pil_image

        (pixels,) = self.images.batch(torch.tensor([index]))
        return self.transform(to_pil_image(pixels))


def lightly_step(kind: str, images: Images, settings: ImageSettings, workers: int):
    """One training step of the stock recipe, written as lightly's examples write it."""
    from copy import deepcopy

    from lightly.loss import NTXentLoss
    from lightly.models.utils import deactivate_requires_grad, update_momentum
    from lightly.transforms import MoCoV2Transform, SimCLRTransform

    encoder = stock_encoder(settings)
    twin = deepcopy(encoder)
    deactivate_requires_grad(twin)
    queue = (2048, settings.projector_dim) if kind == "moco" else 0
    criterion = NTXentLoss(temperature=settings.temperature, memory_bank_size=queue)
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.06, momentum=0.9, weight_decay=1e-4)
    transform = SimCLRTransform if kind == "simclr" else MoCoV2Transform
    loader = torch.utils.data.DataLoader(
        Pictures(images, transform(input_size=settings.image_size, gaussian_blur=0.0)),
        batch_size=BATCH,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        persistent_workers=workers > 0,
    )

    def forever() -> Iterator[list[Tensor]]:
        while True:
            yield from loader

    batches = forever()

    def step(_number: int) -> None:
        view_a, view_b = next(batches)
        if kind == "simclr":
            loss = criterion(encoder(view_a), encoder(view_b))
        else:
            update_momentum(encoder, twin, m=0.99)
            with torch.no_grad():
                keys = twin(view_b)
            loss = criterion(encoder(view_a), keys)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


class Embed(nn.Module):
    """The shipped encoder in the plain memory layout, as a script of lightly's would hold it."""

    def __init__(self, encoder: ImageEncoder) -> None:
        super().__init__()
        self.backbone = encoder.backbone.to(memory_format=torch.contiguous_format)
        self.projector = encoder.projector

    def forward(self, images: Tensor) -> Tensor:
        return self.projector(self.backbone(images))


def stock_encoder(settings: ImageSettings) -> Embed:
    return Embed(experiment.build_encoder(settings))


def child(args: argparse.Namespace) -> None:
    """Print images/s and where the time went; run by the parent in a process of its own."""
    torch.set_num_threads(args.threads)
    settings = settings_of(args.kind, args.data, args.threads)
    images = load_images(args.data, split="train", image_size=settings.image_size)
    clock = Clock()
    if args.side == "ours":
        step = our_step(images, settings, clock)
    else:
        step = lightly_step(args.kind, images, settings, args.workers)
    for number in range(WARM_UP):
        step(number)
    clock.seconds.clear()
    begin, number = time.perf_counter(), WARM_UP
    while time.perf_counter() - begin < args.seconds:
        step(number)
        number += 1
    total = time.perf_counter() - begin
    clock.add("rest", total - sum(clock.seconds.values()) if clock.seconds else 0.0)
    shares = " ".join(f"{name} {seconds / total:.1%}" for name, seconds in clock.seconds.items())
    print(f"{(number - WARM_UP) * BATCH / total} {shares if args.side == 'ours' else ''}")


def measure(args: argparse.Namespace, side: str, kind: str, workers: int) -> tuple[float, str]:
    """The better of one run on two threads and two runs on one thread each, in images/s."""
    best, words = 0.0, ""
    for threads, copies in ((2, 1), (1, 2)):
        command = [sys.executable, __file__, "--child", "--side", side, "--kind", kind]
        command += ["--threads", str(threads), "--workers", str(workers), "--data", args.data]
        command += ["--seconds", str(args.seconds)]
        runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(copies)]
        outputs = [run.communicate()[0].strip().split("\n")[-1] for run in runs]
        if any(run.returncode for run in runs):
            raise SystemExit(f"a run of {side} {kind} failed; its message is above")
        speed = sum(float(output.split()[0]) for output in outputs)
        if speed > best:
            shares = outputs[0].partition(" ")[2]
            best, words = speed, f"{copies} runs on {threads} thread(s) {shares}".rstrip()
    return best, words


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="emoji:subgroup")
    parser.add_argument("--seconds", type=float, default=15.0, help="per measurement")
    parser.add_argument("--kind", choices=("simclr", "moco"))
    for hidden in ("--side", "--threads", "--workers"):
        kind = str if hidden == "--side" else int
        parser.add_argument(hidden, type=kind, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args)
        return
    for kind in (args.kind,) if args.kind else ("simclr", "moco"):
        mine, how = measure(args, "ours", kind, 0)
        print(f"{kind:7} ours    {mine:7.0f} images/s  ({how})", flush=True)
        stock = 0.0
        for workers in (0, 1, 2):
            speed, how = measure(args, "lightly", kind, workers)
            print(f"{kind:7} lightly {speed:7.0f} images/s  ({workers} workers, {how})", flush=True)
            stock = max(stock, speed)
        print(f"{kind:7} ours / lightly = {mine / stock:.2f}", flush=True)


if __name__ == "__main__":
    main()
