"""Times of the losses on your card beside the peers': a table to paste into docs/scaling.md.

    python benchmarks/gpu.py                       # needs an accelerator; about a minute
    python benchmarks/gpu.py --batch 8192 --loss info_nce

Forward and backward, the median of several calls that the device has finished; tf32 products for
both. The first call of a loss compiles its bodies and is not counted.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from accelerator import ours, peers, shapes_of
from torch import Tensor

CALLS = 20


def measured(call: Callable[..., Tensor], inputs: list[Tensor]) -> tuple[float, float]:
    """Median seconds of a call, and the most bytes that it held beside its inputs."""
    times, before = [], 0
    for number in range(CALLS + 3):
        for x in inputs:
            x.grad = None
        torch.accelerator.synchronize()
        if number == 3:
            torch.accelerator.reset_peak_memory_stats()
            before = torch.accelerator.memory_allocated()
        begin = time.perf_counter()
        call(*inputs).backward()
        torch.accelerator.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[3:]), torch.accelerator.max_memory_allocated() - before


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[256, 1024, 4096, 8192, 32768])
    parser.add_argument("--loss", nargs="+", default=["info_nce", "learned", "nt_xent", "moco_nce"])
    args = parser.parse_args()
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        raise SystemExit("gpu.py: this machine has no accelerator. See benchmarks/accelerator.py.")
    torch.set_float32_matmul_precision("high")
    name = torch.cuda.get_device_name() if device.type == "cuda" else str(device)
    print(f"{name}, torch {torch.__version__}\n\n| loss | batch | who | ms | MB |")
    print("|---" * 5 + "|")
    for loss in args.loss:
        for batch in [256] if loss == "moco_nce" else args.batch:
            inputs = [
                torch.nn.functional.normalize(torch.randn(shape, device=device)).requires_grad_()
                for shape in shapes_of(loss, batch)
            ]
            for who, call in {"ours": ours(loss), **peers(loss)}.items():
                try:
                    seconds, held = measured(call, inputs)
                    row = f"{1e3 * seconds:.2f} | {held / 2**20:.0f}"
                except torch.OutOfMemoryError:
                    row = "out of memory | -"
                print(f"| {loss} | {batch:,} | {who} | {row} |", flush=True)


if __name__ == "__main__":
    main()
