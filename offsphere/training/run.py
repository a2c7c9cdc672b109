"""One training run from its settings to its record, for every lane."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch import Tensor
from torch.utils.data import Dataset

from offsphere.cells import Cell
from offsphere.data.needs import has_changed, stamp
from offsphere.data.shards import existing
from offsphere.objective import Objective
from offsphere.run.config import command, load_yaml
from offsphere.run.files import atomic_write
from offsphere.run.record import RunFolder, open_run
from offsphere.run.workers import loss_in_words
from offsphere.training.checkpoint import load_checkpoint
from offsphere.training.loop import Diverged, Interrupted, Method, Streamed, fit
from offsphere.training.plots import plot_run
from offsphere.training.ranks import Ranks, connected
from offsphere.training.settings import TrainSettings, steps_of

Tensors = dict[str, Tensor]
SettingsT = TypeVar("SettingsT", bound=TrainSettings)


@dataclass(frozen=True)
class Experiment:
    """What a lane brings to a run."""

    method: Method
    batches: Dataset | Streamed
    """batches[step] is the batch of a step."""
    population: int
    """Training samples."""
    evaluate: Callable[[], dict[str, float]]
    files: Callable[[], dict[str, Tensors]]
    """What is kept beside the record when the run ends: file names and their named tensors."""
    validate: Callable[[], float] | None = None
    """One number on validation data alone, higher being better, for --keep=best."""


_examined: ContextVar[list[Experiment] | None] = ContextVar("_examined", default=None)
_described: ContextVar[list[dict[str, object]] | None] = ContextVar("_described", default=None)


def experiment_of(run: Callable[[SettingsT], object], settings: SettingsT) -> Experiment:
    """What a script's `run(settings)` would train: built on its data, and left untrained."""
    built: list[Experiment] = []
    token = _examined.set(built)
    try:
        run(settings)
    finally:
        _examined.reset(token)
    if not built:
        raise ValueError("Expected a script that trains, got one that does not call train_run.")
    return built[0]


def description_of(run: Callable[[SettingsT], object], settings: SettingsT) -> dict[str, object]:
    """What a script's `run(settings)` would record about its data, which is read for it."""
    described: list[dict[str, object]] = []
    token = _described.set(described)
    try:
        run(settings)
    finally:
        _described.reset(token)
    return described[0] if described else {}


def train_run(
    settings: TrainSettings,
    script: str,
    describe: Callable[[], dict[str, object]],
    build: Callable[[RunFolder], Experiment],
) -> dict[str, object]:
    """The metrics of a run, trained now or already finished.

    `describe` loads the data and gives its fingerprint, which must be that of the run's first
    start; `build` then makes what is trained.
    """
    if (described := _described.get()) is not None:
        described.append(describe())
        return {}
    if (built := _examined.get()) is not None:
        with tempfile.TemporaryDirectory() as folder:
            describe()
            built.append(build(RunFolder(folder)))
        return {}
    with loss_in_words(), connected(settings, script) as ranks, ExitStack() as stack:
        torch.set_num_threads(settings.threads)
        folder, ended = _open(settings, script, ranks, stack)
        if ended is not None:
            if ranks.first and has_changed(folder, settings):
                folder.describe_data(describe(), stamp(settings))
            return ended
        try:
            description = describe()
            ranks.on_first(lambda: folder.describe_data(description, stamp(settings)))
            experiment = build(folder)
            steps_of(settings, experiment.population)
        except (ValueError, OSError):  # a faulty path or setting: nothing has begun
            if ranks.first:
                folder.discard()
            raise
        try:
            metrics: dict[str, object] = dict(
                fit(
                    experiment.method,
                    experiment.batches,
                    settings,
                    folder,
                    population=experiment.population,
                    evaluate=experiment.evaluate,
                    validate=experiment.validate,
                    ranks=ranks,
                )
            )
        except (Diverged, Interrupted) as error:
            if not ranks.first:  # rank 0 says why
                raise SystemExit(error.code) from None
            if isinstance(error, Diverged):
                folder.fail(str(error))
            raise

        def finish() -> dict[str, object]:
            for name, tensors in experiment.files().items():
                save_tensors(folder.path / name, tensors)
            plot_run(folder, metrics)
            folder.finish(metrics)
            return folder.metrics()

        return ranks.on_first(finish)


def _open(
    settings: TrainSettings, script: str, ranks: Ranks, stack: ExitStack
) -> tuple[RunFolder, dict[str, object] | None]:
    """The run's folder, and its metrics if it is finished.

    The first rank holds the folder; what the others write goes to one that is thrown away.
    """
    opened: list[RunFolder] = []

    def first() -> dict[str, object] | None:
        folder = open_run(settings, script=script, out=settings.out, study=settings.study)
        opened.append(stack.enter_context(folder))
        if folder.state != "finished":
            return None
        print(f"{folder.path} is finished; --no-resume starts it anew.")
        return folder.metrics()

    ended = ranks.on_first(first)
    if not ranks.first:
        opened.append(RunFolder(stack.enter_context(tempfile.TemporaryDirectory())))
    return opened[0], ended


def read_run(path: Path, configs: Mapping[str, type[SettingsT]]) -> tuple[RunFolder, SettingsT]:
    """A run of one of these scripts, or an error that says what the folder is instead."""
    if not (path / "config.yaml").is_file():
        existing(path)
        inside = sorted(file.parent for file in path.glob("**/config.yaml"))[:3]
        hint = f" Runs below it: {', '.join(map(str, inside))}." if inside else ""
        raise ValueError(f"{path} is not a run: it has no config.yaml.{hint}")
    folder = RunFolder(path)
    script = str(folder.provenance().get("script", "an unknown script"))
    if script not in configs:
        raise ValueError(f"{path} is a run of {script}: expected one of {', '.join(configs)}.")
    return folder, load_yaml(configs[script], path / "config.yaml")


class Weights(NamedTuple):
    """A run's trained module, and its cell's exponents as they stand, learned or fixed."""

    tensors: Tensors
    exponents: tuple[float, float]
    steps: int


def read_weights(folder: RunFolder, settings: TrainSettings, module: str, script: str) -> Weights:
    """What `<module>.safetensors` of a finished run holds, or what its last checkpoint keeps."""
    file = folder.path / f"{module}.safetensors"
    if folder.state == "finished" and file.exists():
        metrics = folder.metrics()
        try:
            tensors = load_file(file)
        except SafetensorError as error:
            raise ValueError(
                f"Cannot read {file}: {error}. Delete it to use the checkpoint."
            ) from None
        needed = ("train/exponent_left", "train/exponent_right", "run/steps")
        if not all(isinstance(metrics.get(name), int | float) for name in needed):
            raise ValueError(
                f"{folder.path / 'metrics.json'} is damaged: expected the numbers "
                f"{', '.join(needed)}. Delete it to measure the checkpoint."
            )
        left, right, steps = (metrics[name] for name in needed)
        return Weights(tensors, (left, right), steps)
    state = load_checkpoint(folder.checkpoint)
    if state is None:
        raise ValueError(
            f"{folder.path} is {folder.state} and has no checkpoint to measure. To train it: "
            f"{command(script, settings)}"
        )
    state = state.get("best") or state  # --keep=best: the kept weights, not the last
    method: Tensors = state["method"]
    cell = Cell(settings.cell)
    if cell.name == "learnable" and "objective.cell.logits" not in method:
        raise ValueError(f"The checkpoint of {folder.path} has no exponents of a learnable cell.")
    if cell.name == "learnable":
        cell.load_state_dict({"logits": method["objective.cell.logits"]})
    tensors = {
        key.removeprefix(f"{module}."): x
        for key, x in method.items()
        if key.startswith(f"{module}.")
    }
    return Weights(tensors, fixed_exponents(cell), state["step"])


def objective_of(
    settings: TrainSettings,
    loss: str,
    population: int,
    *,
    direction: str = "both",
    within_view: bool = False,
) -> Objective:
    """The objective that the shared settings describe."""
    return Objective(
        settings.cell,
        loss,
        population=population,
        temperature=settings.temperature,
        learnable_temperature=settings.learnable_temperature,
        scale=settings.scale,
        direction=direction,
        within_view=within_view,
        batch_mean_norm=settings.batch_mean_norm,
        variance_weight=settings.variance_weight,
        variance_on=settings.variance_on,
        gor_weight=settings.gor_weight,
        negatives=settings.negatives,
    )


def eval_exponents(settings: TrainSettings, objective: Objective) -> tuple[float, float]:
    """The exponents that score in evaluation: the eval cell's, or those trained so far."""
    return fixed_exponents(
        objective.cell if settings.eval_cell is None else Cell(settings.eval_cell)
    )


def fixed_exponents(cell: Cell) -> tuple[float, float]:
    """The cell's exponents as they stand."""
    with torch.no_grad():
        left, right = (float(g) for g in cell.exponents)
    return left, right


def save_tensors(path: Path, tensors: Tensors, metadata: dict[str, str] | None = None) -> None:
    """Write named tensors as one safetensors file, whole or not at all."""
    content = to_bytes({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata)
    atomic_write(path, lambda file: file.write(content))
