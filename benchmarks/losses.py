"""Speed and memory of the losses beside their peers, in one run.

    python benchmarks/losses.py                    # the whole table, about 20 minutes on two cores
    python benchmarks/losses.py --batch 256 4096 --width 128 --no-memory

Time is the best of several forward+backward calls, ours and the peer's taking turns. Memory, from
4096 rows on, is the growth of the maximum resident size of a fresh process, warmed at 64 rows,
gradients included; its limit is the machine's memory.
The floor is what our algorithm cannot do without: its matrix products and exponentials alone.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import LinearCrossEntropyOptions

from offsphere import losses, streamed, tiles
from offsphere.variance import negative_variance

TEMPERATURE = 0.1
BARS = {  # (loss, batch): peer/ours at width 128
    ("info_nce", 64): 1.0,
    ("info_nce", 256): 1.0,
    ("info_nce", 4096): 2.2,
    ("info_nce", 16384): 2.2,
    ("nt_xent", 256): 2.5,
    ("nt_xent", 4096): 5.0,
    ("variance", 256): 1.5,
    ("variance", 4096): 60.0,
}
SIDES = ("ours", "peer")
Loss = Callable[[Tensor, Tensor], Tensor]


def ours() -> dict[str, Loss]:
    def views(loss) -> Loss:
        def stacked(a: Tensor, b: Tensor) -> Tensor:
            z = torch.cat([a, b])
            return loss(z, z, TEMPERATURE)

        return stacked

    return {
        "info_nce": lambda a, b: losses.info_nce(a, b, TEMPERATURE),
        "linear_ce": lambda a, b: losses.info_nce(a, b, TEMPERATURE),
        "chunked": lambda a, b: losses.info_nce(a, b, TEMPERATURE),
        "nt_xent": views(losses.nt_xent),
        "dcl": views(losses.dcl),
        "variance": lambda a, b: negative_variance(a, b, 50_000),
    }


def peer(name: str) -> Loss:
    """open_clip and lightly as they come, torch's own linear_cross_entropy in both directions, as
    it comes and in chunks, and the variance term as its definition is written."""
    if name in ("linear_ce", "chunked"):
        return functools.partial(both_ways, chunked=name == "chunked")
    if name == "info_nce":
        from open_clip.loss import ClipLoss

        clip = ClipLoss()
        return lambda a, b: clip(a, b, 1 / TEMPERATURE)
    if name == "variance":
        return masked_variance
    from lightly.loss import DCLLoss, NTXentLoss

    return {"nt_xent": NTXentLoss, "dcl": DCLLoss}[name](TEMPERATURE)


def both_ways(a: Tensor, b: Tensor, *, chunked: bool) -> Tensor:
    """In chunks it never has all scores at once, as ours."""
    linear, labels = torch.nn.functional.linear_cross_entropy, torch.arange(len(a))
    options = LinearCrossEntropyOptions() if chunked else None
    one = linear(a / TEMPERATURE, b, labels, options=options)
    return (one + linear(b / TEMPERATURE, a, labels, options=options)) / 2


def masked_variance(a: Tensor, b: Tensor) -> Tensor:
    negatives = ~torch.eye(len(a), dtype=torch.bool)
    return ((a @ b.T)[negatives] + 1 / 49_999).square().mean()


def floor(name: str, n: int, d: int) -> Callable[[], None]:
    """The matrix products and exponentials of our own path, on tiles of the same size."""
    if name == "variance":
        x = torch.randn(n, d)
        if n < 2 * d:
            scores = torch.randn(n, n)

            def of_product() -> None:
                torch.mm(x, x.T)
                torch.mm(scores, x)
                torch.mm(scores.T, x)

            return of_product
        gram = torch.randn(d, d)

        def of_grams() -> None:
            for _ in range(2):
                torch.mm(x.T, x)
                torch.mm(x, gram)

        return of_grams
    symmetric = name in ("nt_xent", "dcl")
    rows = 2 * n if symmetric else n
    dense = rows * rows <= streamed.DENSE_SCORES
    blocks = list(tiles._tiles(rows, rows, symmetric and not dense))
    sizes = [tiles._size(at) for at in blocks]
    again = not dense and sum(sizes) > tiles.WORKSPACE
    x, out = torch.randn(rows, d) / math.sqrt(d), torch.zeros(rows, d)

    def of_tiles() -> None:
        for i, j in blocks:
            scores = (x[i] @ x[j].T).exp_()
            if again:
                scores = (x[i] @ x[j].T).exp_()
            out[i].addmm_(scores, x[j])
            if not symmetric or i != j:
                out[j].addmm_(scores.T, x[i])

    return of_tiles


def pair(n: int, d: int) -> tuple[Tensor, Tensor]:
    """Unit vectors, made in place: temporaries would raise the mark memory is measured from."""
    g = torch.Generator().manual_seed(n + d)
    a, b = (torch.randn(n, d, generator=g) for _ in range(2))
    for x in (a, b):
        x.div_(torch.linalg.vector_norm(x, dim=1, keepdim=True))
    return a.requires_grad_(), b.requires_grad_()


def once(loss: Loss, a: Tensor, b: Tensor) -> None:
    a.grad = b.grad = None
    loss(a, b).backward()


def best_of(calls: list[Callable[[], object]], seconds: float) -> list[float]:
    """The shortest time of each call, taking turns for about `seconds` in all, at least twice."""
    best = [math.inf] * len(calls)
    for call in calls:
        call()
    start, turns = time.perf_counter(), 0
    while turns < 2 or (time.perf_counter() - start < seconds and turns < 200):
        for k, call in enumerate(calls):
            begin = time.perf_counter()
            call()
            best[k] = min(best[k], time.perf_counter() - begin)
        turns += 1
    return best


def in_fresh_process(who: str, name: str, n: int, d: int) -> tuple[float | None, float]:
    """MiB of extra resident memory (None if it ran out of memory) and seconds of one call."""
    command = [sys.executable, __file__, "--child", who, name, str(n), str(d)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return tuple(json.loads(done.stdout)) if done.returncode == 0 else (None, math.nan)


def child(who: str, name: str, n: int, d: int) -> None:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    loss = ours()[name] if who == "ours" else peer(name)
    a, b = pair(n, d)
    once(loss, *pair(64, d))
    before, begin = largest_resident_mib(), time.perf_counter()
    once(loss, a, b)
    print(json.dumps([largest_resident_mib() - before, time.perf_counter() - begin]))


def largest_resident_mib() -> float:
    """The high-water mark of this process's own memory (getrusage's would include its parent's)."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 256, 1024, 4096, 16384, 65536])
    parser.add_argument("--width", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--seconds", type=float, default=6.0, help="per row of the table")
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        who, name, n, d = args.child
        child(who, name, int(n), int(d))
        return
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    print(
        f"{'loss':9}{'batch':>7}{'width':>6}{'ours ms':>10}{'peer ms':>10}{'peer/ours':>10}"
        f"{'bar':>6}{'floor ms':>10}{'ours/floor':>11}{'ours MiB':>10}{'peer MiB':>10}{'share':>8}"
    )
    mine = ours()
    for d in args.width:
        for n in args.batch:
            for name in mine:
                if n > 16384 and name not in ("info_nce", "variance"):
                    continue
                row(name, n, d, mine[name], peer(name) if n <= 16384 else None, args)


def row(name: str, n: int, d: int, mine: Loss, theirs: Loss | None, args) -> None:
    a, b = pair(n, d)
    weigh = args.memory and n >= 4096  # below that, memory is nobody's concern
    if theirs is None:
        # Alone and large: one call in a process of its own is time and memory enough.
        mib, seconds = in_fresh_process("ours", name, n, d)
        weight = f"{mib:10.0f}" if mib is not None else f"{'memory':>10}"
        print(f"{name:9}{n:7}{d:6}{1e3 * seconds:10.0f}{'-':>10}" + " " * 37 + weight, flush=True)
        return
    calls: list[Callable[[], object]] = [lambda: once(mine, a, b), floor(name, n, d)]
    memory = [in_fresh_process(who, name, n, d)[0] if weigh else math.nan for who in SIDES]
    # A peer that dies of memory in its own process is not run in this one.
    if memory[1] is not None:
        calls.append(lambda: once(theirs, a, b))
    times = best_of(calls, args.seconds)
    t, at_least = times[0], times[1]
    peer = times[2] if len(times) > 2 else None
    bar = BARS.get((name, n)) if d == 128 else (1.0 if peer else None)
    mib, peer_mib = memory
    share = mib / peer_mib if mib is not None and peer_mib else math.nan
    print(
        f"{name:9}{n:7}{d:6}{1e3 * t:10.2f}"
        + (f"{1e3 * peer:10.2f}{peer / t:10.2f}" if peer else f"{'memory':>10}{'-':>10}")
        + (f"{bar:6g}" if bar else f"{'-':>6}")
        + f"{1e3 * at_least:10.2f}{t / at_least:11.2f}"
        + (f"{mib:10.0f}" if mib is not None else f"{'memory':>10}")
        + (f"{peer_mib:10.0f}" if peer_mib is not None else f"{'memory':>10}")
        + f"{share:8.3f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
