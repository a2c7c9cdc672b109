"""The processes that train one run together: who they are, and what they exchange.

Every rank embeds its own rows of the batch, all embeddings are gathered, and each rank computes
its share of the loss of the whole batch (`offsphere.split`). The gradients of the gathered rows are
parts whose mean over the ranks is the whole: a reduce-scatter brings each rank those of its rows.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from offsphere.run.command import Stopped
from offsphere.split import Split
from offsphere.training.settings import TrainSettings

if TYPE_CHECKING:
    from lightning_fabric import Fabric

T = TypeVar("T")
Tensors = dict[str, Tensor]

PATIENCE = timedelta(minutes=30)
"""How long a rank waits for one that is alive but silent, such as rank 0 in an evaluation. The end
of a process is noticed at once."""
MEETING, FAR_MEETING = timedelta(minutes=2), timedelta(minutes=10)
"""How long ranks wait for each other at the start: on one machine, where all are started together
and only their imports take time; and on several machines, or for the processes that Fabric starts
from here and watches."""
BUCKET = 2**23
"""Numbers summed in one exchange: 32 MB in float32."""


class LostContact(Stopped):
    """Another rank has ended; the last checkpoint is kept."""


class NotMet(Stopped):
    """The ranks of a run did not all come together at its start."""


class Rows(NamedTuple):
    """The rows `start` to `stop` - 1 of a batch of `total` rows."""

    start: int
    stop: int
    total: int

    @property
    def all(self) -> bool:
        """Whether these are the whole batch."""
        return self.stop - self.start == self.total

    def parts(self, size: int | None) -> list[Rows]:
        """These rows in parts of at most `size`, in order."""
        size = size or max(1, self.stop - self.start)
        starts = range(self.start, self.stop, size)
        return [Rows(a, min(a + size, self.stop), self.total) for a in starts]


def share(total: int, rank: int, count: int) -> Rows:
    """The rows of one of `count` ranks: contiguous, in rank order, as equal as they can be."""
    return Rows(total * rank // count, total * (rank + 1) // count, total)


def own_rows(total: int) -> range:
    """This process's rows of a batch of all ranks; all of them if it is alone."""
    alone = not dist.is_initialized()
    rows = share(total, *((0, 1) if alone else (dist.get_rank(), dist.get_world_size())))
    return range(rows.start, rows.stop)


def take(batch: Any, part: Rows, of: Rows) -> Any:
    """The rows `part` of a batch that holds the rows `of`.

    A batch is a tensor, or a mapping or named tuple of tensors. One with another number of rows
    than the batch (negatives that belong to no row) is cut at the same shares.
    """
    if isinstance(batch, dict):
        return {name: take(x, part, of) for name, x in batch.items()}
    if isinstance(batch, tuple):
        return type(batch)(*(take(x, part, of) for x in batch))
    size = of.stop - of.start
    cuts = (len(batch) * (place - of.start) // size for place in (part.start, part.stop))
    return batch[slice(*cuts)]


class Ranks(Split):
    """This process among those of its run; alone, it exchanges nothing."""

    def __init__(self, device: torch.device, precision: str = "tf32") -> None:
        alone = not dist.is_initialized()
        place = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
        super().__init__(*place, precision=precision)
        self.device = device

    @property
    def first(self) -> bool:
        """Whether this is the rank that evaluates and writes the record."""
        return self.rank == 0

    def own(self, total: int) -> Rows:
        """This rank's rows of a batch."""
        return share(total, self.rank, self.count)

    def gather(
        self, tensors: Tensors, total: int, ragged: Collection[str] = ()
    ) -> tuple[Tensors, dict[str, tuple[int, ...]]]:
        """The rows of all ranks in rank order, without gradients, and how many each rank has.

        Tensors hold this rank's rows of a batch of `total`. Only of the `ragged` ones do the ranks
        ask each other how many, for which the host waits.
        """
        tensors = {name: x.detach() for name, x in tensors.items()}
        if self.count == 1:
            return tensors, {name: (len(x),) for name, x in tensors.items()}
        counts = {name: self._counts(name, len(x), total, ragged) for name, x in tensors.items()}
        gathered = {}
        for name, x in tensors.items():
            pieces = self._all_gather(_padded(x, max(counts[name])))
            gathered[name] = torch.cat([p[:n] for p, n in zip(pieces, counts[name], strict=True)])
        return gathered, counts

    def _counts(self, name: str, rows: int, total: int, ragged: Collection[str]) -> tuple[int, ...]:
        """How many rows of a tensor each rank has, of which this one has `rows`."""
        if name in ragged:
            told = self._all_gather(torch.tensor(rows, device=self.device))
            return tuple(torch.stack(told).tolist())
        shares = [share(total, rank, self.count) for rank in range(self.count)]
        sizes = [part.stop - part.start for part in shares]
        each, over = divmod(rows, sizes[self.rank])
        if over:
            raise ValueError(
                f"Expected as many rows of {name} for each of the {sizes[self.rank]} rows of this "
                f"rank, got {rows} in all. Name it in the method's `ragged`."
            )
        return tuple(each * size for size in sizes)

    def mean_of_own(self, gradient: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """The mean over the ranks of the gradients of all rows: this rank's own rows of it."""
        if self.count == 1:
            return gradient
        most = max(sizes)
        own = gradient.new_empty(most, *gradient.shape[1:])
        if min(sizes) < most:
            gradient = torch.cat([_padded(piece, most) for piece in gradient.split(sizes)])
        self.exchange(dist.reduce_scatter_tensor, own, gradient.contiguous(), payload=gradient)
        return own[: sizes[self.rank]] / self.count

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Every gradient becomes its sum over the ranks."""
        if self.count == 1:
            return
        for bucket in _buckets([p.grad for p in parameters if p.grad is not None]):
            flat = torch.cat([grad.flatten() for grad in bucket])
            self.exchange(dist.all_reduce, flat, payload=flat)
            for grad, piece in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                grad.copy_(piece.view_as(grad))

    def anyone(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        if self.count == 1:
            return flag
        flags = torch.tensor(int(flag), device=self.device)
        self.exchange(dist.all_reduce, flags, payload=flags)
        return bool(flags)

    def on_first(self, action: Callable[[], T]) -> T:
        """The result of an action that rank 0 alone performs, on every rank.

        If it fails there, the other ranks end too, without a word: rank 0 says why.
        """
        if self.count == 1:
            return action()
        answer: list[Any] = [None, False]
        try:
            if self.first:
                answer[0] = action()
        except BaseException:
            answer[1] = True
            raise
        finally:
            self.exchange(dist.broadcast_object_list, answer, src=0)
            if answer[1] and not self.first:
                raise SystemExit(1)
        return answer[0]

    def start_alike(self, module: nn.Module) -> None:
        """Every rank takes over rank 0's weights."""
        if self.count == 1:
            return
        for x in module.state_dict().values():
            self.exchange(dist.broadcast, x, src=0)

    def _all_gather(self, x: Tensor) -> list[Tensor]:
        pieces = [torch.empty_like(x) for _ in range(self.count)]
        self.exchange(dist.all_gather, pieces, x.contiguous(), payload=x)
        return pieces

    def exchange(
        self,
        collective: Callable[..., object],
        *inputs: Any,
        payload: Tensor | None = None,
        src: int | None = None,
    ) -> None:
        """As any exchange; if another rank has ended, the error says so."""
        try:
            super().exchange(collective, *inputs, payload=payload, src=src)
        except RuntimeError as error:
            raise LostContact(
                f"rank {self.rank} of {self.count} has lost contact with another rank, which has "
                f"ended or was killed ({_reason(error)}). The last checkpoint is kept: the same "
                "command resumes from there, on any number of ranks."
            ) from None


@contextmanager
def connected(settings: TrainSettings, script: str) -> Iterator[Ranks]:
    """The ranks of a run: those torchrun or SLURM started, or --devices that are started here."""
    if _alone(settings):
        yield here(settings)
        return
    fabric = _fabric(settings)
    if fabric.world_size == 1:
        yield Ranks(fabric.device, settings.loss_precision)
        return
    if not _started_outside() and Path(sys.argv[0]).stem != script:
        raise ValueError(
            f"--devices={settings.devices} --nodes={settings.nodes} starts the script {script}.py "
            f"once per device, which {Path(sys.argv[0]).name} cannot: run the script itself, with "
            "--devices or under torchrun."
        )
    _meet(fabric)
    try:
        yield Ranks(fabric.device, settings.loss_precision)
    finally:
        dist.destroy_process_group()


def here(settings: TrainSettings) -> Ranks:
    """This process on the device of the settings, in the process group if one exists already."""
    if not _alone(settings):
        return Ranks(_fabric(settings).device, settings.loss_precision)
    device = choose_device(settings.device)
    _check_precision(settings, device)
    return Ranks(device, settings.loss_precision)


def _alone(settings: TrainSettings) -> bool:
    """Whether no other process has a part in the run.

    Then Fabric is not needed, whose import costs more than all the rest before the first step.
    """
    return not _started_outside() and settings.devices * settings.nodes == 1


def _fabric(settings: TrainSettings) -> Fabric:
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import DDPStrategy

    devices, nodes = _world(settings)
    if nodes > 1 and not (_started_outside() or "NODE_RANK" in os.environ):
        raise ValueError(
            f"--nodes={nodes} needs a launcher on every machine, which tells each where the others "
            f"are: torchrun --nnodes={nodes} --nproc-per-node={devices} --rdzv-endpoint=HOST:PORT "
            f"{Path(sys.argv[0]).name} ..., or srun."
        )
    if settings.batch_size < devices * nodes:
        raise ValueError(
            f"--batch-size={settings.batch_size} is the batch of all {devices * nodes} ranks "
            "together, and each needs at least one row of it."
        )
    together = _started_outside() and nodes == 1
    meeting = DDPStrategy(timeout=MEETING if together else FAR_MEETING)
    strategy = meeting if devices * nodes > 1 else "auto"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            fabric = Fabric(
                accelerator=settings.device, devices=devices, num_nodes=nodes, strategy=strategy
            )
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"--device={settings.device} cannot be used: {error}") from error
    _check_precision(settings, fabric.device)
    return fabric


def _check_precision(settings: TrainSettings, device: torch.device) -> None:
    if settings.precision != "32-true" and device.type == "cpu":
        raise ValueError(
            f"--precision={settings.precision} is for accelerators: on a CPU it is many times "
            "slower than float32. Use --precision=32-true."
        )


def _started_outside() -> bool:
    """Whether torchrun, SLURM or Fabric in another process has started this one."""
    return any(name in os.environ for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"))


def _meet(fabric: Fabric) -> None:
    """Start the ranks that are to be started and wait for all; from then on they are patient."""
    logger = logging.getLogger("lightning_fabric")
    before = logger.level
    logger.setLevel(logging.WARNING)  # without the lines that every rank would print about itself
    try:
        fabric.launch()
    except RuntimeError as error:
        place = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
        raise NotMet(
            f"rank {fabric.global_rank} of {fabric.world_size} did not meet the others at {place} "
            f"({_reason(error)}). A rank has ended at its start, or was not started: see what it "
            "said. If the address is in use, set another MASTER_PORT."
        ) from None
    finally:
        logger.setLevel(before)
    dist.set_timeout(PATIENCE)
    dist.distributed_c10d._get_default_store().set_timeout(PATIENCE)


def _reason(error: RuntimeError) -> str:
    """The first sentence of a collective's error, without its place in the source."""
    return re.sub(r"^\[[^]]*\] ", "", str(error).strip()).splitlines()[0].partition(". ")[0]


def choose_device(name: str) -> torch.device:
    """The device of that name; auto is the accelerator if there is one."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name == "auto":
        return accelerator or torch.device("cpu")
    if name == "gpu" and accelerator is not None:
        return accelerator
    if name not in ("cpu", getattr(accelerator, "type", "cpu")):
        raise ValueError(
            f"--device={name} is not there; this machine has {accelerator or 'only the cpu'}."
        )
    return torch.device(name)


def _world(settings: TrainSettings) -> tuple[int, int]:
    """Devices per node and nodes: torchrun's if it started this process, else the settings'."""
    asked = settings.devices, settings.nodes
    if not dist.is_torchelastic_launched():
        return asked
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    given = local, int(os.environ["WORLD_SIZE"]) // local
    if asked not in ((1, 1), given):
        raise ValueError(
            f"torchrun started {given[0]} processes on {given[1]} nodes, but --devices={asked[0]} "
            f"--nodes={asked[1]} was asked for: leave these two to torchrun."
        )
    return given


def _padded(x: Tensor, rows: int) -> Tensor:
    return x if len(x) == rows else torch.cat([x, x.new_zeros(rows - len(x), *x.shape[1:])])


def _buckets(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors in order, in groups of one type and not much more than BUCKET numbers."""
    bucket: list[Tensor] = []
    for x in tensors:
        full = sum(y.numel() for y in bucket) + x.numel() > BUCKET
        if bucket and (full or bucket[0].dtype != x.dtype):
            yield bucket
            bucket = []
        bucket.append(x)
    if bucket:
        yield bucket
