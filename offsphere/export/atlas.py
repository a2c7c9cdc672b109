"""Points for embedding-atlas: a parquet file of vectors, their norms, and right or wrong.

    embedding-atlas points.parquet --vector vector --text text

The atlas shows directions; `norm` and `right` are columns by which it can colour and filter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet
import torch
from torch import Tensor

from offsphere.run.files import atomic_write

NEAR = 10


@dataclass(frozen=True)
class Points:
    """One side of a run's evaluation data."""

    side: str
    ids: Sequence[str]
    texts: Sequence[str]
    vectors: Tensor
    """Raw ones: their norms are what this is about."""
    right: Tensor | None = None
    """Of a query: whether the best that it finds is right."""
    found: Tensor | None = None
    """Of an item: how many queries find it among their ten best."""
    pictures: Sequence[bytes] | None = None
    """PNG files."""


def times_found(best: Tensor, items: int) -> Tensor:
    """How often each item's number is among the ten best, a row of numbers per query."""
    return torch.bincount(best[:, :NEAR].flatten(), minlength=items)


def check_file(out: Path) -> None:
    """Refuse what is no new parquet file."""
    if out.suffix != ".parquet":
        raise ValueError(f"--as=atlas writes a file: expected --out=NAME.parquet, got {out}.")
    if out.exists():
        raise FileExistsError(f"{out} is there already: choose another --out.")


def write_points(out: Path, sides: Sequence[Points]) -> str:
    """Write the points of all sides, whole or not at all, and say how they are looked at."""
    check_file(out)
    table = arrow.concat_tables([_table(side) for side in sides])
    out.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(out, lambda file: parquet.write_table(table, file))
    counts = " and ".join(f"{len(side.ids):,} of the side {side.side}" for side in sides)
    return (
        f"{out}: {table.num_rows:,} points, {counts}. To look at them: pip install embedding-atlas "
        f"&& embedding-atlas {out} --vector vector --text text; colour by norm, right or side."
    )


def _table(side: Points) -> arrow.Table:
    count, width = side.vectors.shape
    vectors = np.ascontiguousarray(side.vectors.float().numpy())
    nothing = [None] * count

    def column(values: Tensor | None) -> list:
        return nothing if values is None else values.tolist()

    pictures = [{"bytes": x} for x in side.pictures] if side.pictures is not None else nothing
    return arrow.table(
        {
            "id": arrow.array(side.ids, arrow.string()),
            "side": arrow.array([side.side] * count, arrow.string()),
            "text": arrow.array(side.texts, arrow.string()),
            "vector": arrow.FixedSizeListArray.from_arrays(arrow.array(vectors.reshape(-1)), width),
            "norm": arrow.array(np.linalg.norm(vectors, axis=1)),
            "right": arrow.array(column(side.right), arrow.bool_()),
            "found": arrow.array(column(side.found), arrow.int64()),
            "image": arrow.array(pictures, arrow.struct([("bytes", arrow.binary())])),
        }
    )
