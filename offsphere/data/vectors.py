"""Vectors in a file, read and written a block at a time: npy, safetensors, parquet, JSON lines.

`FILE` or `FILE:NAME` says where they are; NAME is a tensor, a column or a key, and may be left out
where only one holds vectors. Ids are the column or key `id` or `_id`; npy and safetensors have them
a line each in `FILE.ids.txt` beside. Without ids a row's number is its id. Nothing that a file
holds is ever run: npy files with objects are refused.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

import numpy as np

from offsphere.data.bad import check_unique, first_few
from offsphere.names import unknown
from offsphere.run.files import atomic_write, read_utf8

FORMATS = (".npy", ".safetensors", ".parquet", ".jsonl")
ID_NAMES = ("id", "_id")
BLOCK = 2**22
"""Numbers that a block has at most (16 MB in float32)."""
HINT = f"Expected FILE or FILE:NAME with a file that ends in {', '.join(FORMATS)}."


@dataclass(frozen=True)
class Vectors:
    """So many rows of one width in a file; nothing is read until it is asked for."""

    source: str
    rows: int
    width: int
    _blocks: Callable[[int], Iterator[np.ndarray]]
    _ids: Callable[[], list[str] | None]

    def __len__(self) -> int:
        return self.rows

    @cached_property
    def ids(self) -> list[str]:
        """The rows' ids, each once; their numbers where the file gives none."""
        found = self._ids()
        if found is None:
            return [str(row) for row in range(self.rows)]
        if len(found) != self.rows:
            raise ValueError(f"{self.source} has {self.rows:,} vectors and {len(found):,} ids.")
        check_unique(self.source, found)
        return found

    def blocks(self, rows: int | None = None) -> Iterator[tuple[int, np.ndarray]]:
        """(first row, float32 matrix) of every so many rows, in order; each is finite."""
        start = 0
        for raw in self._blocks(rows or max(1, BLOCK // self.width)):
            with np.errstate(over="ignore"):  # too large for float32 is named below
                block = np.ascontiguousarray(raw, dtype=np.float32)
            bad = ~np.isfinite(block).all(axis=1)
            if bad.any():
                row = start + int(bad.argmax())
                raise ValueError(
                    f"{self.source}: {int(bad.sum())} vectors have numbers that are not finite "
                    f"in float32, the first in row {row:,}. Leave them out, or mend the encoder."
                )
            yield start, block
            start += len(block)
        if start != self.rows:
            raise ValueError(f"{self.source} ends after {start:,} of {self.rows:,} vectors.")

    def whole(self) -> np.ndarray:
        """All rows as one float32 matrix in memory."""
        found = np.empty((self.rows, self.width), np.float32)
        for start, block in self.blocks():
            found[start : start + len(block)] = block
        return found


def open_vectors(source: str | Path) -> Vectors:
    """The vectors that `FILE` or `FILE:NAME` names; anything else is refused in one line."""
    path, name = _split(str(source))
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file. {HINT}")
    read = {".npy": _npy, ".safetensors": _safetensors, ".parquet": _parquet, ".jsonl": _jsonl}
    try:
        vectors = read[path.suffix](path, name)
    except (ValueError, OSError):
        raise
    except Exception as error:  # each format's library has errors of its own
        raise ValueError(f"{path} cannot be read as {path.suffix[1:]}: {_line(error)}.") from None
    if not (vectors.rows and vectors.width):
        raise ValueError(f"{source} holds no vectors: {vectors.rows} rows of {vectors.width}.")
    return vectors


def write_vectors(path: Path, width: int, blocks: Iterable[np.ndarray], ids: Sequence[str]) -> None:
    """Write blocks of float32 rows, whole or not at all, in the format of the path's ending.

    npy and safetensors have their ids in a file beside, unless these are the rows' numbers.
    """
    if path.suffix not in FORMATS:
        raise ValueError(f"{path} cannot be written. {HINT}")
    beside = ids_file(path)
    inside = path.suffix in (".parquet", ".jsonl")
    numbered = all(i == str(row) for row, i in enumerate(ids))
    if not inside and not numbered and any("\n" in i or i != i.strip() for i in ids):
        raise ValueError(f"{beside} cannot hold ids with line ends or spaces around: use .parquet.")

    def write(file: BinaryIO) -> None:
        left = iter(ids)
        if path.suffix == ".npy":
            header = {"descr": "<f4", "fortran_order": False, "shape": (len(ids), width)}
            np.lib.format.write_array_header_1_0(file, header)
        elif path.suffix == ".safetensors":
            size = 4 * len(ids) * width
            facts = {"dtype": "F32", "shape": [len(ids), width], "data_offsets": [0, size]}
            header = json.dumps({"vectors": facts}).encode()
            header += b" " * (-len(header) % 8)
            file.write(struct.pack("<Q", len(header)) + header)
        elif path.suffix == ".parquet":
            _write_parquet(file, width, blocks, left)
            return
        for block in blocks:
            if path.suffix == ".jsonl":
                for i, row in zip(islice(left, len(block)), block, strict=True):
                    line = json.dumps({"id": i, "vector": [float(x) for x in row]})
                    file.write(line.encode() + b"\n")
            else:
                file.write(np.ascontiguousarray(block, dtype="<f4").data)

    atomic_write(path, write)
    if not inside and not numbered:
        atomic_write(beside, lambda file: file.writelines(f"{i}\n".encode() for i in ids))
    elif not inside:
        beside.unlink(missing_ok=True)  # another file's, which was here before


def ids_file(path: Path) -> Path:
    """Where the ids of an npy or safetensors file are, a line each."""
    return path.with_name(f"{path.name}.ids.txt")


def _split(source: str) -> tuple[Path, str | None]:
    for ending in FORMATS:
        path, found, name = source.rpartition(f"{ending}:")
        if found and name:
            return Path(path + ending).expanduser(), name
    path = Path(source).expanduser()
    if path.suffix not in FORMATS:
        raise ValueError(f"{source} cannot be read as vectors. {HINT}")
    return path, None


def _npy(path: Path, name: str | None) -> Vectors:
    if name is not None:
        raise ValueError(f"{path} has one array without a name, got {path}:{name}.")
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        raise ValueError(
            f"{path} is cut, damaged or holds objects, which could run code ({_line(error)}): "
            "save a plain matrix of numbers with numpy.save."
        ) from None
    if array.dtype.kind not in "fiu" or array.ndim != 2:
        raise ValueError(
            f"{path} has shape {array.shape} of {array.dtype}: expected a matrix of numbers, a "
            "vector per row."
        )

    def blocks(rows: int) -> Iterator[np.ndarray]:
        # Mapped anew for each block: pages of a mapping count as this process's memory.
        for start in range(0, height, rows):
            mapped = np.load(path, mmap_mode="r", allow_pickle=False)
            yield np.array(mapped[start : start + rows])

    height, width = array.shape
    return Vectors(str(path), height, width, blocks, lambda: _lines_beside(path))


def _safetensors(path: Path, name: str | None) -> Vectors:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
            shapes = {k: tuple(x.get_shape()) for k, x in slices.items() if x.get_dtype() != "BOOL"}
    except SafetensorError as error:
        raise ValueError(f"{path} is cut or damaged ({_line(error)}).") from None
    key = _chosen(path, "tensor", name, [k for k, shape in shapes.items() if len(shape) == 2])
    height, width = shapes[key]

    def blocks(rows: int) -> Iterator[np.ndarray]:
        for start in range(0, height, rows):  # mapped anew, as above
            with safe_open(path, framework="pt") as file:
                part = file.get_slice(key)[start : start + rows]
            yield part.float().numpy()

    return Vectors(f"{path}:{key}", height, width, blocks, lambda: _lines_beside(path))


def _parquet(path: Path, name: str | None) -> Vectors:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    def is_vector(kind: Any) -> bool:
        types, listed = arrow.types, (arrow.types.is_list, arrow.types.is_large_list)
        if not (types.is_fixed_size_list(kind) or any(test(kind) for test in listed)):
            return False
        return types.is_floating(kind.value_type) or types.is_integer(kind.value_type)

    try:
        file = parquet.ParquetFile(path, memory_map=True)
    except arrow.ArrowException as error:
        raise ValueError(f"{path} is cut or damaged ({_line(error)}).") from None
    with file:
        schema, rows = file.schema_arrow, file.metadata.num_rows
        column = _chosen(path, "column", name, [x.name for x in schema if is_vector(x.type)])
        first = next(file.iter_batches(batch_size=1, columns=[column]), None)
    width = 0 if first is None else len(first.column(0)[0].as_py() or ())
    source = f"{path}:{column}"

    def blocks(most: int) -> Iterator[np.ndarray]:
        start = 0
        with parquet.ParquetFile(path, memory_map=True) as file:
            for batch in file.iter_batches(batch_size=most, columns=[column]):
                found = batch.column(0)
                lengths = found.value_lengths().to_numpy(zero_copy_only=False)
                values = found.flatten()
                other = np.flatnonzero(~(lengths == width))  # NaN for a row that is missing
                if len(other):
                    row = start + int(other[0])
                    found = "nothing" if np.isnan(lengths[other[0]]) else int(lengths[other[0]])
                    raise ValueError(_mixed(source, width, found, f"row {row:,}"))
                if values.null_count:
                    raise ValueError(f"{source} has vectors with missing numbers: mend the table.")
                yield values.to_numpy(zero_copy_only=False).reshape(-1, width)
                start += len(found)

    def ids() -> list[str] | None:
        named = next((x for x in ID_NAMES if x in schema.names), None)
        if named is None:
            return None
        found = parquet.read_table(path, columns=[named], memory_map=True).column(0).to_pylist()
        return [_id(source, f"row {row:,}", x) for row, x in enumerate(found)]

    return Vectors(source, rows, width, blocks, ids)


def _jsonl(path: Path, name: str | None) -> Vectors:
    def lines() -> Iterator[tuple[int, dict[str, Any]]]:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except UnicodeDecodeError:
                    raise ValueError(f"{path}, line {number} is not UTF-8.") from None
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"{path}, line {number} is not JSON: {error}") from None
                if not isinstance(row, dict):
                    raise ValueError(f"{path}, line {number}: expected an object with a vector.")
                yield number, row

    first = next((row for _, row in lines()), {})
    key = _chosen(path, "key", name, [k for k, value in first.items() if _is_numbers(value)])
    width = len(first[key])
    with path.open("rb") as file:
        rows = sum(1 for line in file if line.strip())

    def blocks(most: int) -> Iterator[np.ndarray]:
        part: list[list[float]] = []
        for number, row in lines():
            vector = row.get(key)
            if not _is_numbers(vector):
                raise ValueError(f"{path}, line {number}: expected {key} as a list of numbers.")
            if len(vector) != width:
                raise ValueError(_mixed(f"{path}:{key}", width, len(vector), f"line {number}"))
            try:
                part.append([float(x) for x in vector])
            except OverflowError:
                raise ValueError(f"{path}, line {number}: {key} has numbers too large.") from None
            if len(part) == most:
                yield np.array(part, dtype=np.float64)
                part = []
        if part:
            yield np.array(part, dtype=np.float64)

    def ids() -> list[str] | None:
        named = next((x for x in ID_NAMES if x in first), None)
        if named is None:
            return None
        return [_id(path, f"line {number}", row.get(named)) for number, row in lines()]

    return Vectors(f"{path}:{key}", rows, width, blocks, ids)


def _write_parquet(
    file: BinaryIO, width: int, blocks: Iterable[np.ndarray], ids: Iterator[str]
) -> None:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    kind = arrow.list_(arrow.float32(), width)
    schema = arrow.schema([("id", arrow.string()), ("vector", kind)])
    with parquet.ParquetWriter(file, schema) as writer:
        for block in blocks:
            flat = arrow.array(np.ascontiguousarray(block, np.float32).reshape(-1))
            column = arrow.FixedSizeListArray.from_arrays(flat, width)
            named = arrow.array(list(islice(ids, len(block))), arrow.string())
            writer.write_batch(arrow.record_batch([named, column], schema=schema))


def _chosen(path: Path, what: str, asked: str | None, found: list[str]) -> str:
    """The name that was asked for, or the only one there is."""
    if asked is not None and asked in found:
        return asked
    if asked is not None:
        raise ValueError(f"{path}: {unknown(f'{what} of vectors', asked, found or ['(none)'])}")
    if len(found) != 1:
        named = (
            f"{len(found)} ({first_few(found)}): name one, as in {path}:{found[0]}"
            if found
            else "none"
        )
        raise ValueError(f"{path}: expected one {what} of vectors, got {named}.")
    return found[0]


def _lines_beside(path: Path) -> list[str] | None:
    file = ids_file(path)
    if not file.is_file():
        return None
    found = read_utf8(file).split("\n")
    lines = found[:-1] if found[-1] == "" else found
    return [_id(file, f"line {number}", x.strip()) for number, x in enumerate(lines, 1)]


def _id(source: object, row: object, found: object) -> str:
    if isinstance(found, bool) or not isinstance(found, str | int) or found == "":
        raise ValueError(f"{source}, {row}: expected an id (a string or a number), got {found!r}.")
    return str(found)


def _is_numbers(value: object) -> TypeGuard[list[float]]:
    kinds = {int, float}
    return isinstance(value, list) and bool(value) and {type(x) for x in value} <= kinds


def _mixed(source: str, width: int, got: object, row: object) -> str:
    return f"{source}: expected vectors of one width, got {width} first and then {got} ({row})."


def _line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")
