"""The drop-in losses under torch.compile beside their peers: time to compile, distance from eager.

    python benchmarks/compiled.py          # about two minutes; needs a C++ compiler

Each loss is compiled by inductor, in an empty cache, forward and backward, on raw rows that both
sides normalise: ours as one graph, lightly's in pieces, since its mask cannot be compiled whole.
The distance is that of the gradient from the same loss's own in eager mode, in ulps of its largest
number: inductor adds up norms in another order, which moves what a loss is given by an ulp or so,
and the temperature multiplies that. Ours normalises rows in an operation of its own.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch._inductor.utils import fresh_cache
from torch.nn.functional import normalize

SCALE, BIAS = torch.tensor(7.0), torch.tensor(-3.0)
NAMES = ("ClipLoss", "SigLipLoss", "NTXentLoss", "DCLLoss")
Loss = Callable[[Tensor, Tensor], Tensor]


class Compiled(NamedTuple):
    seconds: float
    """From the first call to its gradients, compiling included."""
    ulps: float


def ours(name: str, cell: str = "cosine") -> Loss:
    from offsphere import dropin

    loss, more = getattr(dropin, name)(cell=cell), _more(name)
    return lambda a, b: loss(a, b, *more)


def peer(name: str) -> Loss:
    import lightly.loss
    import open_clip.loss

    if name in ("NTXentLoss", "DCLLoss"):
        return getattr(lightly.loss, name)()
    loss, more = getattr(open_clip.loss, name)(), _more(name)
    return lambda a, b: loss(normalize(a, dim=1), normalize(b, dim=1), *more)


def _more(name: str) -> tuple[Tensor, ...]:
    return {"ClipLoss": (SCALE,), "SigLipLoss": (SCALE, BIAS)}.get(name, ())


def compiled(loss: Loss, *, whole: bool) -> Compiled:
    """Compiled from nothing, `whole` or in as many graphs as it takes, set beside eager."""
    torch._dynamo.reset()
    start = time.perf_counter()
    with fresh_cache():
        found = gradient(torch.compile(loss, fullgraph=whole, backend="inductor"), sides())
    return Compiled(time.perf_counter() - start, ulps(found, gradient(loss, sides())))


def load_compiler() -> None:
    """Once, and for neither side."""
    compiled(lambda a, b: (a * b).sum(), whole=True)


def sides(rows: int = 150, width: int = 16) -> Tensor:
    return torch.randn(2, rows, width, generator=torch.Generator().manual_seed(0))


def gradient(loss: Loss, sides: Tensor) -> Tensor:
    a, b = (x.clone().requires_grad_() for x in sides)
    return torch.stack(torch.autograd.grad(loss(a, b), (a, b)))


def ulps(found: Tensor, expected: Tensor) -> float:
    """The largest distance, in ulps of the largest number."""
    ulp = torch.finfo(expected.dtype).eps * expected.abs().max()
    return ((found - expected).abs().max() / ulp).item()


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    load_compiler()
    print("| loss | ours compiles in | peer | ours / peer | ours, ulps | peer's |")
    print("|---|---|---|---|---|---|")
    for name in NAMES:
        mine, theirs = compiled(ours(name), whole=True), compiled(peer(name), whole=False)
        print(
            f"| {name} | {mine.seconds:.1f} s | {theirs.seconds:.1f} s | "
            f"{mine.seconds / theirs.seconds:.2f} | {mine.ulps:.1f} | {theirs.ulps:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
