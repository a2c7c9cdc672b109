"""The losses on three cards, counted and modelled here, without a card.

    python benchmarks/accelerator.py               # about a minute
    python benchmarks/accelerator.py --batch 8192 --loss info_nce

Kernels, bytes and flops are counted: a loss and its peer run on tensors without data, forward and
backward, and every operation that would start a kernel is noted. Times are a model of one queue:
the host takes LAUNCH per kernel and VIEW per view, the card takes a kernel when it is free, for as
long as its arithmetic or its bytes need. Matrix products are in tf32 for both. Nothing was timed on
a card: `benchmarks/gpu.py` does that, for anyone who has one.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import linear_cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from offsphere import losses, streamed, strips
from offsphere.cells import shrink

LAUNCH, VIEW, SHORTEST = 5e-6, 1.5e-6, 2e-6
"""Seconds: the host's for a kernel and for a view, and the shortest that a kernel takes."""
TEMPERATURE = 0.1
# Operations that are several kernels on a card.
KERNELS = {"logsumexp": 9, "linalg_vecdot": 2}
IN_PLACE = {"addmm_": torch.ops.aten.addmm}
WITHOUT_KERNEL = {
    "empty",
    "new_empty",
    "empty_like",
    "empty_strided",
    "detach",
    "lift_fresh",
    "device",
}


class Card(NamedTuple):
    """Sustained tf32 and float32 flops per second, and bytes per second."""

    tf32: float
    fp32: float
    memory: float


CARDS = {
    "H100": Card(350e12, 45e12, 2.9e12),
    "A100": Card(110e12, 15e12, 1.7e12),
    "RTX 4090": Card(60e12, 55e12, 0.9e12),
}


class Kernel(NamedTuple):
    flops: int
    bytes: int


@dataclass
class Count:
    """The kernels of one call in order (None: a view), and the most bytes it held at once."""

    events: list[Kernel | None] = field(default_factory=list)
    peak: int = 0

    @property
    def kernels(self) -> list[Kernel]:
        return [x for x in self.events if x is not None]

    def seconds(self, card: Card) -> float:
        """When the card has finished, if the host never waits for it."""
        host = free = 0.0
        for kernel in self.events:
            host += VIEW if kernel is None else LAUNCH
            if kernel is not None:
                work = max(kernel.flops / card.tf32, kernel.bytes / card.memory, SHORTEST)
                free = max(free, host) + work
        return max(host, free)


class Counter(TorchDispatchMode):
    """Notes what each operation would start on a card, and what is alive."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.live, self.paused = Count(), {}, False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        if func is torch.ops.aten.index.Tensor and args[1][0].dtype == torch.bool:
            out = _without_diagonal(*args)
        else:
            out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        written = args[0] if name == "_foreach_mul_" else out
        made = [x for x in tree_leaves(written) if isinstance(x, Tensor)]
        self._note_memory(given, made)
        if self.paused or name in WITHOUT_KERNEL:
            return out
        if func.is_view or name in ("_unsafe_view", "alias"):
            self.count.events.append(None)
            return out
        if name == "_to_copy" and {x.device.type for x in (*given, *made)} > {"cpu"}:
            raise AssertionError("A copy between host and device waits for the device.")
        counts = flop_registry.get(IN_PLACE.get(name, func.overloadpacket))
        flops = counts(*args, **(kwargs or {}), out_val=out) if counts else 0
        size = sum(x.numel() * x.element_size() for x in (*given, *made))
        times = KERNELS.get(name, 1)
        self.count.events += [Kernel(flops, size)] * times
        return out

    def _note_memory(self, given: list[Tensor], made: list[Tensor]) -> None:
        for x in made:
            storage = x.untyped_storage()
            self.live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.live = {key: held for key, held in self.live.items() if not held[0].expired()}
        self.count.peak = max(self.count.peak, sum(size for _, size in self.live.values()))


def counted(call: Callable[..., Tensor], *shapes: tuple[int, int], device: str = "cpu") -> Count:
    """One forward pass and, but for a fake CUDA device, which has none, the backward pass."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = [torch.empty(shape, device=device, requires_grad=True) for shape in shapes]
        with Counter() as counter:
            value = call(*inputs)
            if device == "cpu":
                value.backward()
            del value
    return counter.count


@contextlib.contextmanager
def _opened() -> Iterator[None]:
    """torch's chunked linear_cross_entropy, one operation, as those that it is made of."""
    module, name = linear_cross_entropy, "_linear_cross_entropy_batch_chunked"
    whole = getattr(module, name)

    class Opened(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            value, *grads = whole._init_fn(*inputs)
            ctx.save_for_backward(*grads[:2])
            return value

        @staticmethod
        def backward(ctx, *grad_outputs):
            return *(x * grad_outputs[0] for x in ctx.saved_tensors), *[None] * 13

    setattr(module, name, lambda *inputs: [Opened.apply(*inputs)])
    try:
        yield
    finally:
        setattr(module, name, whole)


def _without_diagonal(square: Tensor, _mask: list[Tensor]) -> Tensor:
    """What lightly's `logits[~diagonal]` keeps. How many that are a card finds out by waiting; a
    tensor without data cannot, so it is told. The wait is not modelled, in the peer's favour."""
    return square.new_empty(square.numel() - len(square))


@contextlib.contextmanager
def in_strips(compiled: bool = False) -> Iterator[None]:
    """Our losses as on an accelerator, with compiled bodies if asked for: those are modelled."""
    before = streamed.TILED_DEVICES, strips.bodies
    streamed.TILED_DEVICES = ()
    if compiled:
        strips.bodies = lambda _: _modelled()
    try:
        yield
    finally:
        streamed.TILED_DEVICES, strips.bodies = before


def _modelled() -> strips.Bodies:
    """The bodies as compiled ones would pass over a strip."""

    def of(
        body: Callable[..., Any], *passes: int, shifted: tuple[int, ...] = ()
    ) -> Callable[..., Any]:
        def call(scores: Tensor, *rest: Any) -> Any:
            counter = _get_current_dispatch_mode()
            assert isinstance(counter, Counter)
            held, before = counter.live, counter.count.peak
            counter.paused = True
            out = body(scores, *rest)
            counter.paused, counter.live, counter.count.peak = False, held, before
            size = scores.numel() * scores.element_size()
            searches = shifted and rest[1] is not None
            counter.count.events += [Kernel(0, n * size) for n in (shifted if searches else passes)]
            return out

        return call

    # Rows: maximum, sum of exp, and shares are three readings and one writing of one kernel.
    # Both ways: a kernel for the rows' sums, which writes exp, and one for the columns'. Where it
    # is not known how large scores are, each reads them twice, for the maximum and for the sum.
    eager = strips.EAGER
    sums = of(eager.both_sums, 2, 1, shifted=(2, 2))
    return strips.Bodies(of(eager.row_shares, 4), sums, of(eager.both_shares, 2), buffers=1)


def ours(name: str) -> Callable[..., Tensor]:
    """As a cosine cell with a number for a temperature calls it.

    `learned` is info_nce with the scale that open_clip's models learn: no bound is known.
    `nt_xent` takes raw rows, which the cell normalises, since its peer does that too.
    """
    largest: dict[str, Any] = {"largest": 1 / TEMPERATURE}
    if name == "learned":
        return lambda a, b, scale: losses.info_nce(a, b, scale.squeeze().exp().reciprocal())
    if name == "info_nce":
        return lambda a, b: losses.info_nce(a, b, TEMPERATURE, **largest)
    if name == "moco_nce":
        return lambda a, b, q: losses.moco_nce(a, b, q.detach(), TEMPERATURE, **largest)

    def nt_xent(a: Tensor, b: Tensor) -> Tensor:
        z = shrink(torch.cat([a, b]), 1.0)
        return losses.nt_xent(z, z, TEMPERATURE, **largest)

    return nt_xent


def peers(name: str) -> dict[str, Callable[..., Tensor]]:
    from lightly.loss import NTXentLoss
    from open_clip.loss import ClipLoss
    from torch.nn import LinearCrossEntropyOptions
    from torch.nn.functional import linear_cross_entropy

    def both_ways(a: Tensor, b: Tensor) -> Tensor:
        labels = torch.arange(len(a), device=a.device)
        one = linear_cross_entropy(a / TEMPERATURE, b, labels)
        return (one + linear_cross_entropy(b / TEMPERATURE, a, labels)) / 2

    def in_chunks(a: Tensor, b: Tensor) -> Tensor:
        """It never has all scores at once, as ours."""
        labels, options = torch.arange(len(a), device=a.device), LinearCrossEntropyOptions()
        one = linear_cross_entropy(a / TEMPERATURE, b, labels, options=options)
        other = linear_cross_entropy(b / TEMPERATURE, a, labels, options=options)
        return (one + other) / 2

    def moco(a: Tensor, b: Tensor, queue: Tensor) -> Tensor:
        """MoCo's own lines."""
        positive = torch.einsum("nc,nc->n", a, b)[:, None]
        logits = torch.cat([positive, a @ queue.detach().T], 1) / TEMPERATURE
        labels = torch.zeros(len(a), dtype=torch.long, device=a.device)
        return torch.nn.functional.cross_entropy(logits, labels)

    if name == "info_nce":
        clip = ClipLoss()
        return {
            "open_clip": lambda a, b: clip(a, b, 1 / TEMPERATURE),
            "linear_cross_entropy": both_ways,
            "linear_cross_entropy, chunked": in_chunks,
        }
    if name == "learned":
        clip = ClipLoss()
        return {"open_clip": lambda a, b, scale: clip(a, b, scale.squeeze().exp())}
    return {"moco's own": moco} if name == "moco_nce" else {"lightly": NTXentLoss(TEMPERATURE)}


def shapes_of(name: str, batch: int) -> list[tuple[int, int]]:
    """Both sides, and MoCo's queue of 65,536 keys or the learned scale."""
    if name in ("info_nce", "learned"):
        return [(batch, 512)] * 2 + ([(1, 1)] if name == "learned" else [])
    return [(batch, 128)] * 2 + ([(65_536, 128)] if name == "moco_nce" else [])


def compare(name: str, batch: int) -> dict[str, Count]:
    """The counts of ours, uncompiled and compiled, and of the peers."""
    shapes = shapes_of(name, batch)
    found = {}
    for title, compiled in (("ours", False), ("ours, compiled", True)):
        with in_strips(compiled):
            found[title] = counted(ours(name), *shapes)
    for title, peer in peers(name).items():
        try:
            with _opened():
                found[title] = counted(peer, *shapes)
        except Exception as error:  # a peer that cannot run without data is left out, and said
            print(f"| {name} | {batch:,} | {title} | not counted: {type(error).__name__} |")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--batch", type=int, nargs="+", default=[256, 1024, 4096, 8192, 16384, 32768, 65536]
    )
    parser.add_argument("--loss", nargs="+", default=["info_nce", "learned", "nt_xent", "moco_nce"])
    args = parser.parse_args()
    print(f"| loss | batch | who | kernels | GB moved | TFLOP | MB held | {' | '.join(CARDS)} |")
    print("|---" * (7 + len(CARDS)) + "|")
    for name in args.loss:
        for batch in [256] if name == "moco_nce" else args.batch:
            for who, count in compare(name, batch).items():
                times = (f"{1e3 * count.seconds(card):.3g} ms" for card in CARDS.values())
                moved = sum(k.bytes for k in count.kernels) / 1e9
                flops = sum(k.flops for k in count.kernels) / 1e12
                print(
                    f"| {name} | {batch:,} | {who} | {len(count.kernels)} | {moved:.3g} | "
                    f"{flops:.3g} | {count.peak / 2**20:.0f} | {' | '.join(times)} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
