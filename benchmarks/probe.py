"""Time and accuracy of our linear probe beside SGD on cached features and the usual probe.

    python benchmarks/probe.py                                   # the embedded emoji set
    python benchmarks/probe.py --data='wds:DIR/cifar10-train-*.tar' \\
        --data-test='wds:DIR/cifar10-test-*.tar'

The features are those of a small untrained convolutional net, 512 wide like a ResNet-18's. The
usual probe decodes every picture with PIL and runs it through the frozen net in every epoch; two
epochs are timed and the faster one is multiplied, so it has no accuracy of its own: at best it
reaches that of SGD on cached features, which takes the same steps.
"""

from __future__ import annotations

import io
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from offsphere.data.images import Images, load_images
from offsphere.evaluation.geometry import unit
from offsphere.evaluation.linear_probe import ProbeResult, linear_probe, sgd_probe, standardise

if TYPE_CHECKING:
    from jaxtyping import Float, Int, UInt8

WIDTH = 512
SGD_BAR, USUAL_BAR, ACCURACY_BAR = 3.0, 20.0, 0.003


@dataclass(frozen=True)
class Settings:
    data: str = "emoji"
    """Training pictures, as for vision/train_simclr.py."""
    data_test: str | None = None
    """Test pictures; needed with wds: shards."""
    image_size: int = 32
    """Side of the pictures in pixels."""
    limit: int | None = None
    """Use at most this many training pictures."""
    epochs: int = 100
    """Epochs of SGD, on cached features and (extrapolated) of the usual probe."""
    usual_epochs: int = 2
    """Epochs of the usual probe that are really run."""
    batch_size: int = 256
    """Pictures per SGD step."""
    repeats: int = 3
    """Our probe's time is the median of this many runs."""
    workers: int = 2
    """Worker processes that decode pictures for the usual probe."""
    threads: int = 1
    """Threads of the main process."""
    seed: int = 0
    """Seed of the net, the data order and the validation split."""


class Row(NamedTuple):
    probe: str
    accuracy: float | None
    seconds: float
    note: str = ""


class EncodedPictures(Dataset):
    """Pictures as PNG bytes, decoded with PIL whenever they are asked for."""

    def __init__(self, pixels: UInt8[Tensor, "n 3 h w"], labels: Int[Tensor, " n"]) -> None:
        self.encoded = [_png(picture) for picture in pixels]
        self.labels = labels.tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Float[Tensor, "3 h w"], int]:
        from PIL import Image
        from torchvision.transforms.functional import to_tensor

        with Image.open(io.BytesIO(self.encoded[index])) as picture:
            return to_tensor(picture.convert("RGB")) - 0.5, self.labels[index]


def main(settings: Settings) -> None:
    torch.set_num_threads(settings.threads)
    console = Console()
    train, test = _load(settings)
    console.print(
        f"{settings.data}: {len(train)} training and {len(test)} test pictures of "
        f"{train.image_size} px, {WIDTH} features, {settings.threads} thread(s)"
    )
    net = untrained_net(settings.seed)
    started = time.perf_counter()
    features = extract(net, train.pixels)
    extraction = time.perf_counter() - started
    split = (features, train.labels, extract(net, test.pixels), test.labels)
    rows = measure(settings, split, extraction, usual_epoch_seconds(settings, net, train))
    console.print(table(rows))
    for line in verdicts(rows):
        console.print(line)


def measure(
    settings: Settings,
    split: tuple[Tensor, Tensor, Tensor, Tensor],
    extraction: float,
    usual_epoch: float,
) -> list[Row]:
    """One row per probe; the first is ours."""
    runs = [linear_probe(*split, seed=settings.seed) for _ in range(settings.repeats)]
    ours = sorted(runs, key=lambda run: run.seconds)[len(runs) // 2]
    spread = f"{min(r.seconds for r in runs):.2f} to {max(r.seconds for r in runs):.2f} s"
    given = linear_probe(*split, weight_decay=ours.weight_decay, seed=settings.seed)
    train, labels, test, test_labels = split
    standardised, normalised = (
        sgd_probe(
            *(a, labels, b, test_labels),
            epochs=settings.epochs,
            batch_size=settings.batch_size,
            seed=settings.seed,
        )
        for a, b in (standardise(train, test), (unit(train), unit(test)))
    )
    decay = f"weight decay {ours.weight_decay:g}, {spread}"
    extrapolated = f"extrapolated: fastest of {settings.usual_epochs} epochs x {settings.epochs}"
    return [
        _row("ours", ours, decay),
        _row("ours, weight decay given", given, "nothing to choose, as for SGD"),
        _row(f"SGD {settings.epochs} epochs, standardised", standardised, "cached, lr 0.1"),
        _row(f"SGD {settings.epochs} epochs, normalised", normalised, "cached, papers' protocol"),
        Row("ours with feature extraction", ours.accuracy, ours.seconds + extraction),
        Row("usual probe, PIL each epoch", None, usual_epoch * settings.epochs, extrapolated),
    ]


def usual_epoch_seconds(settings: Settings, net: nn.Module, train: Images) -> float:
    """Seconds of the fastest epoch of decoding, encoding and one linear SGD step per batch."""
    head = nn.Linear(WIDTH, len(train.classes))
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    loader = DataLoader(
        EncodedPictures(train.pixels, train.labels),
        batch_size=settings.batch_size,
        shuffle=True,
        num_workers=settings.workers,
        persistent_workers=settings.workers > 0,
        generator=torch.Generator().manual_seed(settings.seed),
    )
    seconds = []
    for _ in range(settings.usual_epochs):
        started = time.perf_counter()
        for pictures, labels in loader:
            with torch.no_grad():
                features = nn.functional.normalize(net(pictures))
            optimizer.zero_grad()
            nn.functional.cross_entropy(head(features), labels).backward()
            optimizer.step()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def untrained_net(seed: int) -> nn.Module:
    """Three strided convolutions and a mean over positions, with weights drawn from the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for inputs, outputs in ((3, 32), (32, 128), (128, WIDTH)):
            layers += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.ReLU()]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()


@torch.no_grad()
def extract(net: nn.Module, pixels: UInt8[Tensor, "n 3 h w"]) -> Float[Tensor, "n d"]:
    """The net's features, batch by batch."""
    return torch.cat([net(batch / 255 - 0.5) for batch in pixels.split(512)])


def table(rows: list[Row]) -> Table:
    """The rows with each time relative to ours (with feature extraction where theirs has it)."""
    shown = Table("probe", "accuracy", "seconds", "times ours", "note")
    cached, whole = rows[0].seconds, rows[5].seconds
    for row in rows:
        reference = whole if row in rows[5:] else cached
        accuracy = "" if row.accuracy is None else f"{100 * row.accuracy:.2f} %"
        shown.add_row(
            row.probe, accuracy, f"{row.seconds:.2f}", f"{row.seconds / reference:.2f}", row.note
        )
    return shown


def verdicts(rows: list[Row]) -> list[str]:
    """The three bars, each met or missed."""
    ours, _, _, standardised, normalised, whole, usual = rows
    best = max((standardised, normalised), key=lambda row: row.accuracy or 0)
    gain = (ours.accuracy or 0) - (best.accuracy or 0)
    checks = [
        (f"times faster than {best.probe}", best.seconds / ours.seconds, SGD_BAR),
        ("times faster than the usual probe", usual.seconds / whole.seconds, USUAL_BAR),
        ("points of accuracy against the best SGD", 100 * gain, -100 * ACCURACY_BAR),
    ]
    return [
        f"{'met' if value >= bar else 'MISSED'}: {value:.1f} {what} (bar {bar:g})"
        for what, value, bar in checks
    ]


def _load(settings: Settings) -> tuple[Images, Images]:
    train = load_images(
        settings.data,
        split="train+validation",
        image_size=settings.image_size,
        limit=settings.limit,
    )
    if settings.data_test is None:
        test = load_images(settings.data, split="test", image_size=settings.image_size)
    else:
        test = load_images(settings.data_test, split="all", image_size=settings.image_size)
    if not (train.in_memory and test.in_memory):
        raise ValueError(f"{settings.data} does not fit into memory: use --limit.")
    return train, test


def _row(probe: str, result: ProbeResult, note: str) -> Row:
    return Row(probe, result.accuracy, result.seconds, note)


def _png(picture: UInt8[Tensor, "3 h w"]) -> bytes:
    from torchvision.io import encode_png

    return encode_png(picture).numpy().tobytes()


if __name__ == "__main__":
    main(tyro.cli(Settings))
