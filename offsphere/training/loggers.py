"""Further loggers beside steps.jsonl, behind one small seam: a function that takes a row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from offsphere.config import to_dict
from offsphere.record import RunFolder
from offsphere.training.settings import TrainSettings

Log = Callable[[dict[str, Any]], None]


@contextmanager
def open_loggers(settings: TrainSettings, folder: RunFolder) -> Iterator[Log]:
    """One function that hands each row of telemetry to every logger asked for."""
    openers = {"tensorboard": _tensorboard, "wandb": _wandb}
    with ExitStack() as stack:
        logs = [stack.enter_context(openers[name](settings, folder)) for name in settings.loggers]

        def log(row: dict[str, Any]) -> None:
            for one in logs:
                one(row)

        yield log


@contextmanager
def _tensorboard(_settings: TrainSettings, folder: RunFolder) -> Iterator[Log]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise _missing("tensorboard") from None
    with SummaryWriter(str(folder.path / "tensorboard")) as writer:

        def log(row: dict[str, Any]) -> None:
            for name, value in row.items():
                if "/" in name and isinstance(value, int | float):
                    writer.add_scalar(name, value, row["step"])

        yield log


@contextmanager
def _wandb(settings: TrainSettings, folder: RunFolder) -> Iterator[Log]:
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
