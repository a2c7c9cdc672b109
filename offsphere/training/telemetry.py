"""What is known of a run while it trains: numbers, loggers beside steps.jsonl, and a picture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from offsphere.evaluation.geometry import batch_numbers
from offsphere.objective import Objective
from offsphere.run.config import to_dict
from offsphere.run.files import atomic_write
from offsphere.run.record import RunFolder
from offsphere.training.settings import TrainSettings

if TYPE_CHECKING:
    from jaxtyping import Float

Log = Callable[[dict[str, Any]], None]
PANELS = (  # title, what its axis measures, series of (metric, label), logarithmic
    ("loss", "nats", (("train/loss", "total"), ("train/contrastive", "contrastive")), False),
    (
        "length of the raw embeddings (5, 50, 95 %)",
        "norm",
        (("train/norm_left_q50", "left"), ("train/norm_right_q50", "right")),
        True,
    ),
    (
        "spread of the lengths",
        "norm CV (standard deviation / mean)",
        (("train/norm_left_cv", "left"), ("train/norm_right_cv", "right")),
        False,
    ),
    (
        "variance of the negatives' cosine",
        "variance",
        (("train/negative_variance", "variance"),),
        True,
    ),
    (
        "alignment and uniformity of the directions",
        "squared distance; log mean potential",
        (("train/alignment", "alignment"), ("train/uniformity", "uniformity")),
        False,
    ),
    ("gradient", "norm, before clipping", (("train/gradient_norm", "gradient norm"),), True),
    ("learning rate", "per step", (("train/lr", "learning rate"),), False),
)
MEASURED = {  # what a lane may measure on its evaluation split: how it is called here
    "test/knn": "kNN",
    "test/probe": "probe",
    "test/i2t_r1": "R@1 image to text",
    "test/t2i_r1": "R@1 text to image",
    "test/ndcg10": "nDCG@10",
    "test/spearman": "Spearman",
}


@torch.no_grad()
def telemetry(
    left: Float[Tensor, "n d"], right: Float[Tensor, "n d"], objective: Objective
) -> dict[str, float]:
    """Named numbers of one batch of raw embeddings (left and right are its two sides)."""
    numbers = batch_numbers(left, right, objective.cell.exponents, objective.temperature)
    numbers["scale_ratio"] = float(objective.ratio)
    return {f"train/{name}": value for name, value in numbers.items()}


def check_loggers(settings: TrainSettings) -> None:
    """Refuse a logger that is not installed."""
    for name in settings.loggers:
        if find_spec(name) is None:
            raise ValueError(f"--loggers={name} needs the extra: pip install -e '.[loggers]'.")


@contextmanager
def open_loggers(settings: TrainSettings, folder: RunFolder, start: int = 0) -> Iterator[Log]:
    """One function that hands each row of telemetry to every logger asked for.

    A resumed run starts again at `start`: what was logged after it is superseded.
    """
    check_loggers(settings)
    openers = {"tensorboard": _tensorboard, "wandb": _wandb}
    with ExitStack() as stack:
        opened = (openers[name](settings, folder, start) for name in settings.loggers)
        logs = [stack.enter_context(logger) for logger in opened]

        def log(row: dict[str, Any]) -> None:
            for one in logs:
                one(row)

        yield log


@contextmanager
def _tensorboard(_settings: TrainSettings, folder: RunFolder, start: int) -> Iterator[Log]:
    from torch.utils.tensorboard import SummaryWriter

    purge_step = start if start else None
    with SummaryWriter(str(folder.path / "tensorboard"), purge_step=purge_step) as writer:

        def log(row: dict[str, Any]) -> None:
            for name, value in row.items():
                if "/" in name and isinstance(value, int | float):
                    writer.add_scalar(name, value, row["step"])

        yield log


@contextmanager
def _wandb(settings: TrainSettings, folder: RunFolder, _start: int) -> Iterator[Log]:
    import wandb  # pyright: ignore

    # The id is the folder's name, so that a resumed run continues the same W&B run.
    name = folder.path.name
    with wandb.init(
        project="offsphere", id=name, name=name, config=to_dict(settings), resume="allow"
    ) as run:
        yield lambda row: run.log(row, step=row["step"])


def plot_run(folder: RunFolder, metrics: Mapping[str, Any] | None = None) -> None:
    """Write run.png into the run's folder; `metrics` are those of the run's end."""
    from matplotlib.figure import Figure

    steps = folder.steps()
    rows = [row for row in steps if "train/loss" in row]
    samples = [row["samples"] for row in rows]
    figure = Figure(figsize=(16, 6.5), layout="constrained")
    figure.suptitle(folder.path.name)
    grid = list(figure.subplots(2, 4).flat)
    for axes, (title, quantity, series, logarithmic) in zip(grid, PANELS, strict=False):
        for metric, label in series:
            if metric not in rows[0]:  # a regression has no contrastive loss
                continue
            axes.plot(samples, [row[metric] for row in rows], label=label)
            if metric.endswith("_q50"):
                low, high = (metric.replace("q50", q) for q in ("q05", "q95"))
                bands = ([row[q] for row in rows] for q in (low, high))
                axes.fill_between(samples, *bands, alpha=0.2)
        axes.set_title(title)
        axes.set_ylabel(quantity)
        axes.set_xlabel("samples seen")
        if logarithmic:
            axes.set_yscale("log")
        if len(series) > 1:
            axes.legend()
    curves = measured(steps, metrics or {}, samples[-1])
    grid[-1].set_visible(bool(curves))
    for label, (seen, values) in curves.items():
        grid[-1].plot(seen, values, marker="o", label=label)
    if curves:
        grid[-1].set(title="measured on held-out data", ylabel="share or score, 0 to 1")
        grid[-1].set_xlabel("samples seen")
        grid[-1].legend()
    atomic_write(folder.path / "run.png", lambda file: figure.savefig(file, format="png", dpi=110))


def measured(
    steps: list[dict[str, Any]], metrics: Mapping[str, Any], end: int
) -> dict[str, tuple[list[int], list[float]]]:
    """Each measured score over the samples seen: untrained, on the way, and at the end."""
    curves = {}
    for metric, label in MEASURED.items():
        points = [(0, metrics.get(metric.replace("test/", "untrained/")))]
        points += [(row["samples"], row[metric]) for row in steps if metric in row]
        points.append((end, metrics.get(metric)))
        known = [(seen, value) for seen, value in points if value is not None]
        if known:
            curves[label] = [x for x, _ in known], [y for _, y in known]
    return curves
