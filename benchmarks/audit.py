"""How long an audit takes to rank a million documents in a file, beside a plain numpy scan.

    python benchmarks/audit.py                               # 1,000,000 x 768: a file of 3 GB
    python benchmarks/audit.py --documents=100000 --whole    # the whole audit too

Both read the same .npy block by block and keep each query's 100 best under cosine and under dot.
The scan multiplies, divides by norms and partitions (`numpy.argpartition`) each block. The two
take turns, and the lists are compared. Peak memory is what each process needs beyond its start,
without pages of the file, which the system takes back when it needs them.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from offsphere.run.config import parse

DEPTH = 100
BLOCK = 5461


@dataclass(frozen=True)
class Config:
    documents: int = 1_000_000
    queries: int = 1_000
    width: int = 768
    rounds: int = 1
    """How often either takes its turn."""
    threads: int = 2
    whole: bool = False
    """Also time the whole audit (remedies, permuted norms, int8, the page)."""
    folder: str | None = None
    """Where the vectors are made; default: a temporary folder."""


def make(folder: Path, config: Config) -> None:
    """Documents around 1,000 centres with norms that vary; queries are near to one each."""
    random = np.random.default_rng(0)
    centres = random.normal(size=(1000, config.width)).astype(np.float32)
    shape = (config.documents, config.width)
    found = np.lib.format.open_memmap(folder / "documents.npy", "w+", np.float32, shape)
    for start in range(0, config.documents, BLOCK):
        rows = min(BLOCK, config.documents - start)
        block = random.standard_normal((rows, config.width), np.float32)
        block += centres[random.integers(0, 1000, rows)]
        found[start : start + rows] = block * random.lognormal(0, 0.2, (rows, 1))
    wanted = np.linspace(0, config.documents - 1, config.queries).astype(int)
    noise = random.standard_normal((config.queries, config.width), np.float32)
    np.save(folder / "queries.npy", found[wanted] + 3 * noise)
    lines = (f"{query}\t{document}\t1\n" for query, document in enumerate(wanted))
    (folder / "qrels.tsv").write_text("".join(lines))
    found.flush()


def numpy_scan(folder: Path) -> dict[float, np.ndarray]:
    """Each query's best documents by exponent, as one would write it with numpy alone."""
    queries = np.load(folder / "queries.npy")
    documents = np.load(folder / "documents.npy", mmap_mode="r")
    best: dict[float, tuple[np.ndarray, np.ndarray]] = {}
    for start in range(0, len(documents), BLOCK):
        block = documents[start : start + BLOCK]
        products = queries @ block.T
        norms = np.linalg.norm(block, axis=1)
        for exponent, scores in ((0.0, products), (1.0, products / norms)):
            rows = np.argpartition(-scores, DEPTH - 1, axis=1)[:, :DEPTH]
            values, rows = np.take_along_axis(scores, rows, 1), rows + start
            if exponent in best:
                values = np.concatenate([best[exponent][0], values], 1)
                rows = np.concatenate([best[exponent][1], rows], 1)
                kept = np.argpartition(-values, DEPTH - 1, axis=1)[:, :DEPTH]
                values = np.take_along_axis(values, kept, 1)
                rows = np.take_along_axis(rows, kept, 1)
            best[exponent] = (values, rows)
    return {exponent: np.sort(rows, axis=1) for exponent, (_, rows) in best.items()}


def our_scan(folder: Path) -> dict[float, np.ndarray]:
    """The same by the audit's own pass over the file."""
    import torch

    from offsphere.audit.scan import scan
    from offsphere.data.vectors import open_vectors

    documents = open_vectors(folder / "documents.npy")
    queries = torch.from_numpy(open_vectors(folder / "queries.npy").whole())

    def read():
        for start, block in documents.blocks(BLOCK):
            yield start, torch.from_numpy(block.copy())

    found = scan(queries, read, (0.0, 1.0), DEPTH)
    return {g: np.sort(best.documents.numpy(), axis=1) for g, best in found.items()}


def whole_audit(folder: Path) -> None:
    """Everything, from the files to the page."""
    from offsphere.audit.vectors import Config as Audit
    from offsphere.audit.vectors import run
    from offsphere.run.progress import speaking

    files = (str(folder / "queries.npy"), str(folder / "documents.npy"))
    with speaking():
        run(Audit(vectors=files, relevance=str(folder / "qrels.tsv"), out=str(folder)))


def measured(
    work: Callable[[Path], dict[float, np.ndarray] | None], folder: Path, threads: int
) -> tuple[float, float, dict[float, np.ndarray] | None]:
    """Seconds, peak extra MB and the result of some work in a fresh process."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(work, folder, threads, theirs))
    process.start()
    theirs.close()
    found = ours.recv()
    process.join()
    return found


def _work(work, folder: Path, threads: int, pipe) -> None:
    import torch

    torch.set_num_threads(threads)
    start, peak, over = _own_memory(), [0.0], threading.Event()

    def watch() -> None:
        while not over.wait(0.02):
            peak[0] = max(peak[0], _own_memory() - start)

    watcher = threading.Thread(target=watch)
    watcher.start()
    begun = time.perf_counter()
    found = work(folder)
    seconds = time.perf_counter() - begun
    over.set()
    watcher.join()
    pipe.send((seconds, peak[0], found))


def _own_memory() -> float:
    """MB of this process that are no pages of a file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(x.split()[1]) for x in lines if x.startswith("RssAnon")) / 1024


def main() -> None:
    """Make the vectors, let both take turns, print a table."""
    config = parse(Config, description=__doc__)
    with tempfile.TemporaryDirectory(dir=config.folder) as scratch:
        folder = Path(scratch)
        make(folder, config)
        size = f"{config.documents:,} x {config.width}, {config.queries:,} queries"
        print(f"{size}, cosine and dot, {DEPTH} best of each")
        for _ in range(config.rounds):
            scan = measured(numpy_scan, folder, config.threads)
            ours = measured(our_scan, folder, config.threads)
            assert scan[2] is not None
            assert ours[2] is not None
            same = np.mean([(scan[2][g] == ours[2][g]).mean() for g in (0.0, 1.0)])
            print(f"numpy scan   {scan[0]:7.1f} s  {scan[1]:7.0f} MB extra")
            print(f"audit's pass {ours[0]:7.1f} s  {ours[1]:7.0f} MB extra  {same:.4%} the same")
            print(f"ratio        {scan[0] / ours[0]:7.2f} times as fast", flush=True)
        if config.whole:
            seconds, extra, _ = measured(whole_audit, folder, config.threads)
            print(f"whole audit  {seconds:7.1f} s  {extra:7.0f} MB extra")


if __name__ == "__main__":
    main()
