"""One training run from its settings to its record, for every lane."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes

from offsphere.cells import Cell
from offsphere.data.needs import has_changed, stamp
from offsphere.data.shards import existing
from offsphere.data.splits import Handed
from offsphere.run.command import loss_in_words
from offsphere.run.config import command, load_yaml
from offsphere.run.files import write_whole
from offsphere.run.record import RunFolder, open_run
from offsphere.training.checkpoint import load_checkpoint
from offsphere.training.experiment import Experiment
from offsphere.training.loop import Diverged, Interrupted, fit
from offsphere.training.ranks import Ranks, Tensors, connected
from offsphere.training.settings import TrainSettings, steps_of
from offsphere.training.telemetry import check_loggers, plot_run

SettingsT = TypeVar("SettingsT", bound=TrainSettings)


class Make(Protocol):
    """How a script makes what it trains: from its settings, the run's folder, and data that were
    handed in from Python instead of being named."""

    def __call__(
        self, settings: Any, folder: RunFolder, handed: Handed | None, /
    ) -> Experiment: ...


def description_of(make: Make, settings: TrainSettings) -> dict[str, object]:
    """What a script's run would record about its data, which are read for it."""
    with tempfile.TemporaryDirectory() as folder:
        return make(settings, RunFolder(folder), None).describe()


def train_run(
    settings: TrainSettings, script: str, make: Make, handed: Handed | None = None
) -> dict[str, object]:
    """The metrics of a run, trained now or already finished."""
    if handed is not None:  # its name stands for the data in the run's identity
        settings = replace(settings, data=f"handed:{handed.name}")  # pyright: ignore
    with loss_in_words(), connected(settings, script) as ranks, ExitStack() as stack:
        torch.set_num_threads(settings.threads)
        folder, ended = _open(settings, script, ranks, stack)
        if ended is not None:
            if ranks.first and (handed is not None or has_changed(folder, settings)):
                _record_data(make(settings, folder, handed), settings, folder)
            return ended
        try:
            check_loggers(settings)
            experiment = make(settings, folder, handed)
            ranks.on_first(lambda: _record_data(experiment, settings, folder))
            steps_of(settings, experiment.population)
            experiment.build()
            if settings.keep == "best" and experiment.held_out is None:
                raise ValueError(
                    "--keep=best needs validation data, and this run has none: use data with a "
                    "validation part (streamed shards have none), or --keep=last."
                )
        except (ValueError, OSError, KeyboardInterrupt):  # nothing has begun
            if ranks.first:
                folder.discard()
            raise
        try:
            metrics = fit(experiment, settings, folder, ranks)
        except (Diverged, Interrupted) as error:
            if not ranks.first:  # rank 0 says why
                raise SystemExit(error.code) from None
            if isinstance(error, Diverged):
                folder.fail(str(error))
            raise
        return ranks.on_first(lambda: _finish(experiment, metrics, folder))


def _record_data(experiment: Experiment, settings: TrainSettings, folder: RunFolder) -> None:
    folder.describe_data(experiment.describe(), stamp(settings))


def _finish(
    experiment: Experiment, metrics: dict[str, float], folder: RunFolder
) -> dict[str, object]:
    """Write what is kept of a run; metrics.json comes last, because it says that the run ended."""
    for name, tensors in experiment.files().items():
        save_tensors(folder.path / name, tensors)
    plot_run(folder, metrics)
    folder.finish(metrics)
    return folder.metrics()


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
    if not opened:
        opened.append(RunFolder(stack.enter_context(tempfile.TemporaryDirectory())))
    return opened[0], ended


def script_of(path: Path) -> tuple[RunFolder, str]:
    """A run's folder and its script's name, or an error that says what the folder is instead."""
    if not (path / "config.yaml").is_file():
        existing(path)
        inside = sorted(file.parent for file in path.glob("**/config.yaml"))[:3]
        hint = f" Runs below it: {', '.join(map(str, inside))}." if inside else ""
        raise ValueError(f"{path} is not a run: it has no config.yaml.{hint}")
    folder = RunFolder(path)
    return folder, str(folder.provenance().get("script", "an unknown script"))


def read_run(path: Path, configs: Mapping[str, type[SettingsT]]) -> tuple[RunFolder, SettingsT]:
    """A run of one of these scripts and its settings."""
    folder, script = script_of(path)
    if script not in configs:
        raise ValueError(f"{path} is a run of {script}: expected one of {', '.join(configs)}.")
    return folder, load_yaml(configs[script], path / "config.yaml")


class Weights(NamedTuple):
    """A run's trained module, and its cell's exponents as they stand, learned or fixed."""

    tensors: Tensors
    exponents: tuple[float, float]
    steps: int


def read_weights(
    folder: RunFolder, settings: TrainSettings, module: str, script: str, file_name: str = ""
) -> Weights:
    """What `<module>.safetensors` of a finished run holds, or what its last checkpoint keeps."""
    file = folder.path / (file_name or f"{module}.safetensors")
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
    return Weights(tensors, cell.numbers(), state["step"])


def scored_exponents(settings: TrainSettings, trained: tuple[float, float]) -> tuple[float, float]:
    """The exponents that score a run that is over, whose cell ended with these ones."""
    return trained if settings.eval_cell is None else Cell(settings.eval_cell).numbers()


def save_tensors(path: Path, tensors: Tensors) -> None:
    """Write named tensors as one safetensors file, whole or not at all."""
    content = to_bytes({name: tensor.contiguous() for name, tensor in tensors.items()})
    write_whole(path, content)
