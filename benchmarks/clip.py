"""Pairs/s of the whole CLIP pipeline beside the plain open_clip recipe, in one run.

    python benchmarks/clip.py                                              # the embedded emoji set
    python benchmarks/clip.py --data='wds:flickr8k-128-train.tar' --image-size=64

Both sides train the shipped tiny towers on the same pairs with batches of 128. Ours is the
pipeline of crossmodal/train_clip.py: pictures decoded once, crops drawn for a whole batch,
captions tokenised once. The plain recipe is open_clip's preprocess and tokenizer in a DataLoader
with the best number of workers for this machine, ClipLoss and AdamW; shards are read as webdataset
users read them, and emoji, which have no files, are pictures in memory. For each side the better
of one run on two threads and two runs on one thread each.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from crossmodal import experiment
from crossmodal.captions import Captioned, load_captions
from crossmodal.methods import Clip
from crossmodal.settings import MODELS, ClipSettings
from offsphere.encoders.clip import registered_name
from offsphere.training.loop import build_optimizers

BATCH = 128
WARM_UP = 3


def our_step(settings: ClipSettings, data: Captioned) -> Callable[[int], None]:
    """One training step of ours."""
    towers = experiment.build_towers(settings)
    look = experiment.random_look(towers, settings)
    method = Clip(towers, experiment.build_objective(settings, len(data)), look, settings)
    batches = experiment.TrainingBatches(data, towers, settings)
    (optimizer,) = build_optimizers(method, settings)

    def step(number: int) -> None:
        method(batches[number], number).losses["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


class Pictures(torch.utils.data.Dataset):
    """PIL pictures in memory with a random caption, through open_clip's preprocess."""

    def __init__(self, data: Captioned, preprocess: Any, tokenizer: Any) -> None:
        self.data, self.preprocess, self.tokenizer = data, preprocess, tokenizer

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        from torchvision.transforms.v2.functional import to_pil_image

        (pixels,) = self.data.batch(torch.tensor([index]))
        caption = random.choice(self.data.captions[index])
        return self.preprocess(to_pil_image(pixels)), self.tokenizer([caption])[0]


def shard_pairs(pattern: str, preprocess: Any, tokenizer: Any) -> Any:
    """Shards as webdataset's users read them."""
    from webdataset.compat import WebDataset

    def pair(sample: dict[str, Any]) -> tuple[Tensor, Tensor]:
        caption = random.choice(sample["json"]["captions"])
        return preprocess(sample["jpg"]), tokenizer([caption])[0]

    shards = WebDataset(pattern, shardshuffle=False, empty_check=False)
    return shards.shuffle(1000).decode("pil").map(pair)


def plain_step(args: argparse.Namespace, settings: ClipSettings) -> Callable[[int], None]:
    """One training step of the plain recipe."""
    import open_clip
    from open_clip.loss import ClipLoss

    name = registered_name(settings.model, MODELS)
    model, preprocess, _ = open_clip.create_model_and_transforms(
        name, force_image_size=settings.image_size
    )
    tokenizer, criterion = open_clip.get_tokenizer(name), ClipLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=0.1)
    kind, _, pattern = settings.data.partition(":")
    if kind == "wds":
        pairs, shuffle = shard_pairs(pattern, preprocess, tokenizer), False
    else:
        data = load_captions(settings.data, split="train", image_size=settings.image_size or 32)
        pairs, shuffle = Pictures(data, preprocess, tokenizer), True
    loader = torch.utils.data.DataLoader(
        pairs,
        batch_size=BATCH,
        shuffle=shuffle or None,
        drop_last=True,
        num_workers=args.workers,
        persistent_workers=args.workers > 0,
    )

    def forever() -> Iterator[list[Tensor]]:
        while True:
            yield from loader

    batches = forever()

    def step(_number: int) -> None:
        images, texts = next(batches)
        loss = criterion(
            model.encode_image(images, normalize=True),  # pyright: ignore
            model.encode_text(texts, normalize=True),  # pyright: ignore
            model.logit_scale.exp(),  # pyright: ignore
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model.logit_scale.clamp_(0, 4.6052)  # pyright: ignore

    return step


def child(args: argparse.Namespace) -> None:
    """Print pairs/s; run by the parent in a process of its own."""
    torch.set_num_threads(args.threads)
    settings = ClipSettings(
        data=args.data,
        data_test=args.data,
        image_size=args.image_size,
        batch_size=BATCH,
        threads=args.threads,
    )
    if args.side == "ours":
        size = args.image_size or experiment.build_towers(settings).image_size
        split = "all" if args.data.startswith("wds:") else "train"
        step = our_step(settings, load_captions(args.data, split=split, image_size=size))
    else:
        step = plain_step(args, settings)
    for number in range(WARM_UP):
        step(number)
    begin, number = time.perf_counter(), WARM_UP
    while time.perf_counter() - begin < args.seconds:
        step(number)
        number += 1
    print((number - WARM_UP) * BATCH / (time.perf_counter() - begin))


def measure(args: argparse.Namespace, side: str, workers: int) -> tuple[float, str]:
    """The better of one run on two threads and two runs on one thread each, in pairs/s."""
    best, words = 0.0, ""
    for threads, copies in ((2, 1), (1, 2)):
        command = [sys.executable, __file__, "--child", "--side", side, "--data", args.data]
        command += ["--threads", str(threads), "--workers", str(workers)]
        command += ["--seconds", str(args.seconds)]
        if args.image_size:
            command += ["--image-size", str(args.image_size)]
        runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(copies)]
        outputs = [run.communicate()[0].strip().split("\n")[-1] for run in runs]
        if any(run.returncode for run in runs):
            raise SystemExit(f"a run of {side} failed; its message is above")
        speed = sum(map(float, outputs))
        if speed > best:
            best, words = speed, f"{copies} run(s) on {threads} thread(s)"
    return best, words


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="emoji")
    parser.add_argument("--image-size", type=int, help="default: the model's own")
    parser.add_argument("--seconds", type=float, default=15.0, help="per measurement")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    for hidden in ("--threads", "--workers"):
        parser.add_argument(hidden, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args)
        return
    mine, how = measure(args, "ours", 0)
    print(f"ours      {mine:7.0f} pairs/s  ({how})", flush=True)
    plain = 0.0
    for workers in (0, 1, 2):
        speed, how = measure(args, "plain", workers)
        print(f"open_clip {speed:7.0f} pairs/s  ({workers} workers, {how})", flush=True)
        plain = max(plain, speed)
    print(f"ours / open_clip = {mine / plain:.2f}", flush=True)


if __name__ == "__main__":
    main()
