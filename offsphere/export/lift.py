"""Vectors whose cosine and L2 order in a store is the order of the dot product.

    offsphere lift --documents=documents.npy --queries=queries.npy --out=lifted
    offsphere lift --documents=points.parquet:embedding --cell=0.3,0.7 --out=lifted
    offsphere lift --documents=more.npy --longest=31.7 --out=lifted_more

With M the longest document, each becomes (d / M, sqrt(1 - |d|² / M²)), which has length 1, and a
query gets a 0 at its end: the cosine of the two is q·d / (|q| M), and their L2 distance falls as
that rises. So one more dimension is enough (Bachrach et al. 2014). For a cell that shrinks its
documents, d is what it makes of them. Files: npy, safetensors, parquet or JSON lines (FILE or
FILE:NAME), read and written a block at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from offsphere.cells import Cell, shrink
from offsphere.data.vectors import BLOCK, Vectors, open_vectors, write_vectors
from offsphere.names import parse_cell
from offsphere.run.command import one_line_errors
from offsphere.run.config import parse
from offsphere.run.files import whole_folder
from offsphere.run.progress import speaking, track
from offsphere.run.record import write_json

CHECKED, BEST = 100, 10
"""Queries with which the result is tried, and how many of their best documents are compared."""
METRICS = (
    ("pgvector", "vector_cosine_ops, <=> (or vector_l2_ops, <->)", "vector_ip_ops, <#>"),
    ("Qdrant", "Distance.COSINE (or EUCLID)", "Distance.DOT"),
    ("FAISS", "METRIC_L2, such as IndexHNSWFlat(width, 32)", "METRIC_INNER_PRODUCT"),
    ("LanceDB", 'distance_type("cosine") (or "l2")', 'distance_type("dot")'),
    ("Chroma", '{"hnsw": {"space": "cosine"}} (or "l2")', '"space": "ip"'),
)
"""Store, its metric for lifted vectors, and its own dot product for the raw ones."""
WIDEST_INDEXED = 2000
"""What pgvector indexes at most."""


@dataclass(frozen=True)
class Config:
    documents: str
    """FILE or FILE:NAME of raw document vectors."""
    out: str
    """The folder to write; it must not be there yet."""
    queries: str | None = None
    """FILE or FILE:NAME of query vectors; they get a 0, and the result is tried with them."""
    cell: str = "dot"
    """The score whose order is wanted: dot, qnorm (the same order), or exponents such as
    0.3,0.7."""
    longest: float | None = None
    """The length M to divide by, at least that of the longest document; give the same again to add
    documents later. Default: the longest there is."""

    def __post_init__(self) -> None:
        if parse_cell(self.cell) == "learnable":
            raise ValueError("--cell=learnable has no exponents of its own: give them, as 0.3,0.7.")
        if self.exponent == 1.0:
            raise ValueError(
                f"--cell={self.cell} shrinks every document to length 1: a store's cosine is its "
                "order already, without a lift."
            )
        if self.longest is not None and not 0 < self.longest < math.inf:
            raise ValueError(f"--longest must be a length above 0, got {self.longest}.")

    @property
    def exponent(self) -> float:
        """The documents'; a query's own never changes its ranking."""
        return float(Cell(self.cell).exponents[1])


def lift(block: np.ndarray, longest: float) -> np.ndarray:
    """Documents no longer than `longest`, with the coordinate that makes their length 1."""
    scaled = block.astype(np.float64) / longest
    rest = np.sqrt(np.maximum(0.0, 1 - np.square(scaled).sum(1, keepdims=True)))
    return np.concatenate([scaled, rest], axis=1).astype(np.float32)


def lift_queries(block: np.ndarray) -> np.ndarray:
    """Queries of length 1 with a 0 at their end."""
    scaled = block.astype(np.float64)
    scaled /= np.linalg.norm(scaled, axis=1, keepdims=True)
    return np.pad(scaled, ((0, 0), (0, 1))).astype(np.float32)


def run(config: Config) -> str:
    """Write the lifted vectors, and say which metric to set and what float32 costs."""
    documents = open_vectors(config.documents)
    queries = None if config.queries is None else open_vectors(config.queries)
    if queries is not None and queries.width != documents.width:
        raise ValueError(
            f"Expected vectors of one width, got {documents.width} in {config.documents} and "
            f"{queries.width} in {config.queries}."
        )
    lengths = _lengths(documents, config.exponent)
    longest = config.longest or float(lengths.max())
    if longest < lengths.max() * (1 - 1e-6):
        row = int(lengths.argmax())
        raise ValueError(
            f"{config.documents}: the document {documents.ids[row]} has the length "
            f"{lengths[row]:.6g}, more than --longest={config.longest:g}: raise it, and lift those "
            "that are in the store again."
        )
    if longest == 0:
        raise ValueError(f"{config.documents} holds nothing but zeros.")
    sample = None if queries is None else _first(queries)
    trial = None if sample is None else Trial(sample)
    with whole_folder(Path(config.out)) as folder:
        files = {"documents": f"documents{Path(documents.source.partition(':')[0]).suffix}"}
        lifted = _documents(documents, config.exponent, longest, trial)
        write_vectors(folder / files["documents"], documents.width + 1, lifted, documents.ids)
        if queries is not None:
            files["queries"] = f"queries{Path(queries.source.partition(':')[0]).suffix}"
            asked = (lift_queries(_not_zero(queries, s, x)) for s, x in queries.blocks())
            write_vectors(folder / files["queries"], queries.width + 1, asked, queries.ids)
        facts = {"cell": config.cell, "longest": longest, "width": documents.width + 1, **files}
        write_json(folder / "lift.json", facts)
    return _told(config, facts, lengths / longest, trial)


class Trial:
    """The best documents of some queries by the exact score, and by what stores compute."""

    def __init__(self, queries: np.ndarray) -> None:
        self.queries = queries.astype(np.float64)
        self.lifted = lift_queries(queries)
        self.kept = {name: np.empty((2, len(queries), 0)) for name in ("exact", "cosine", "L2")}

    def add(self, block: np.ndarray, lifted: np.ndarray) -> None:
        """Score a block of documents, as they are and lifted."""
        exact = self.queries @ block.astype(np.float64).T
        lengths = np.linalg.norm(lifted, axis=1)
        product = self.lifted @ lifted.T
        scores = {"exact": exact, "cosine": product / lengths, "L2": 2 * product - (1 + lengths**2)}
        for name, values in scores.items():
            both = np.stack([values.astype(np.float64), exact])
            pool = np.concatenate([self.kept[name], both], axis=2)
            best = np.argsort(-pool[0], axis=1, kind="stable")[:, :BEST]
            self.kept[name] = np.take_along_axis(pool, best[None], axis=2)

    def kept_by(self, name: str) -> int:
        """How many queries find documents of the same exact scores as their ten best."""
        right, found = (np.sort(self.kept[x][1], axis=1) for x in ("exact", name))
        return int((right == found).all(axis=1).sum())


def _lengths(documents: Vectors, exponent: float) -> np.ndarray:
    total = math.ceil(documents.rows / max(1, BLOCK // documents.width))
    parts = track(documents.blocks(), total, "reading documents", "blocks")
    return np.concatenate(
        [np.linalg.norm(_shrunk(x, exponent).astype(np.float64), axis=1) for _, x in parts]
    )


def _documents(
    documents: Vectors, exponent: float, longest: float, trial: Trial | None
) -> Iterator[np.ndarray]:
    total = math.ceil(documents.rows / max(1, BLOCK // documents.width))
    for _, raw in track(documents.blocks(), total, "lifting documents", "blocks"):
        block = _shrunk(raw, exponent)
        lifted = lift(block, longest)
        if trial is not None:
            trial.add(block, lifted)
        yield lifted


def _shrunk(block: np.ndarray, exponent: float) -> np.ndarray:
    return shrink(torch.from_numpy(block), exponent).numpy()


def _first(queries: Vectors) -> np.ndarray:
    start, block = next(queries.blocks())
    return _not_zero(queries, start, block)[:CHECKED]


def _not_zero(queries: Vectors, start: int, block: np.ndarray) -> np.ndarray:
    empty = ~block.any(axis=1)
    if empty.any():
        row = start + int(empty.argmax())
        raise ValueError(
            f"{queries.source}: the query {queries.ids[row]} is all zeros and has no direction: "
            "leave it out."
        )
    return block


def _told(config: Config, facts: dict, share: np.ndarray, trial: Trial | None) -> str:
    width = facts["width"]
    lines = [
        f"{config.out}: {len(share):,} documents of width {width} and length 1, ranked by "
        f"{config.cell} under cosine and L2 alike. A query gets a 0 at its end. Later documents "
        f"need --longest={facts['longest']!r} (lift.json has it).",
        "",
        *(f"  {store:9} {metric:52} raw vectors: {dot}" for store, metric, dot in METRICS),
        "",
        "Where a store has a dot product, its raw vectors need no lift; indexes that are made for "
        "distances (HNSW graphs, trees) often find more with it.",
        f"float32: the median document has {np.median(share):.3g} of the longest one's length. "
        f"Under L2 two documents may change places if their dot products with a query q differ by "
        f"less than about {2e-7 * facts['longest']:.2g} |q|; under cosine only if they differ by "
        "less than a part in a million.",
    ]
    if width > WIDEST_INDEXED:
        lines.append(f"pgvector indexes {WIDEST_INDEXED:,} dimensions at most: these have {width}.")
    if trial is not None:
        kept = " and ".join(f"{trial.kept_by(name)} under {name}" for name in ("cosine", "L2"))
        lines.append(
            f"Tried in float32: of {len(trial.queries)} queries the {BEST} best documents are the "
            f"same for {kept}."
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Flags in, a folder out."""
    with one_line_errors("offsphere lift", "Nothing was written."):
        config = parse(Config, argv, description=__doc__, name="offsphere lift")
        with speaking():
            print(run(config))
