"""Further loggers beside steps.jsonl, behind one small seam: a function that takes a row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from offsphere.run.config import to_dict
from offsphere.run.record import RunFolder
from offsphere.training.settings import TrainSettings

Log = Callable[[dict[str, Any]], None]


@contextmanager
def open_loggers(settings: TrainSettings, folder: RunFolder, start: int = 0) -> Iterator[Log]:
    """One function that hands each row of telemetry to every logger asked for.

    A resumed run starts again at `start`: what was logged after it is superseded.
    """
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
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise _missing("tensorboard") from None
    purge_step = start if start else None
    with SummaryWriter(str(folder.path / "tensorboard"), purge_step=purge_step) as writer:

        def log(row: dict[str, Any]) -> None:
            for name, value in row.items():
                if "/" in name and isinstance(value, int | float):
                    writer.add_scalar(name, value, row["step"])

        yield log


@contextmanager
def _wandb(settings: TrainSettings, folder: RunFolder, _start: int) -> Iterator[Log]:
    try:
        import wandb  # pyright: ignore
    except ImportError:
        raise _missing("wandb") from None
    # The id is the folder's name, so that a resumed run goes on in the same W&B run.
    name = folder.path.name
    with wandb.init(
        project="offsphere", id=name, name=name, config=to_dict(settings), resume="allow"
    ) as run:
        yield lambda row: run.log(row, step=row["step"])


def _missing(name: str) -> ValueError:
    return ValueError(f"--loggers={name} needs the extra: pip install -e '.[loggers]'.")
