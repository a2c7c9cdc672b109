"""The tidy tables of a study folder: runs, curves, per-example outcomes.

A study folder holds run folders, or the committed files that stand for them (runs.csv,
curves.csv.gz, examples.parquet), or both: then a run's folder is newer than its row, while
columns that only the file has (such as `arm`) are kept. No torch.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from offsphere.analysis.foreign import check_curve, check_row
from offsphere.run import safe_yaml
from offsphere.run.catalog import identity, with_names
from offsphere.run.files import write_whole
from offsphere.run.record import RunFolder
from offsphere.share import ADDED

if TYPE_CHECKING:
    import pandas as pd
    from jaxtyping import Float
    from numpy import ndarray as Array

Examples = Mapping[str, Mapping[str, "Array"]]
"""Per run the vectors that it kept, by their names: one number per test example."""
RUNS, CURVES, EXAMPLES = "runs.csv", "curves.csv.gz", "examples.parquet"
SMALL_PARQUET: dict[str, Any] = {
    "compression": "zstd",
    "compression_level": 12,
    "use_dictionary": ["run", "outcome", "value"],
    "column_encoding": {"example": "DELTA_BINARY_PACKED"},
    # One page for all runs: what every run repeats, such as labels, takes its space once.
    "max_rows_per_page": 2**31 - 1,
}
NORM_BITS = 8
"""The leading bits that per-example norms keep in a table (0.4 %); a run's folder has them all."""
CURVE_DIGITS = 6
"""The significant digits that curves keep in a table; a run's folder has them all."""
CURVE_ROWS = 40
"""Steps of a run that a table keeps, beside its evaluations; a run's folder has them all."""
CURVE_COLUMNS = ("run", "step", "name", "value")
# What stands in other columns, or says nothing about the run.
LEFT_OUT = ("run/status", "run/reason")
# What a run records about where it was made, beyond the commit; versions and data are JSON.
ORIGIN = ("offsphere", "python", "platform", "cpu", "versions", "data")
# Which columns name data: settings, and what runs record about them.
DATA_COLUMNS = ("data", "eval_data", "run/data")
JSON_WORDS = ("true", "false", "null", "NaN", "Infinity")


class StudyTables:
    """The tables of a study's folder, each read once, when it is first asked for."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    @cached_property
    def runs(self) -> pd.DataFrame:
        """One row per run, and per arm that it is in."""
        return runs_table(self.folder)

    @cached_property
    def examples(self) -> Examples:
        """Per run its per-example vectors, with the digits of a table."""
        return examples_by_run(self.folder)


def run_folders(folder: str | Path) -> list[Path]:
    """The run folders of a study, by name; runs that were moved aside are left out."""
    found = (file.parent for file in Path(folder).glob("*/config.yaml"))
    return sorted(path for path in found if not re.search(r"\.before-\d+$", path.name))


def runs_table(folder: str | Path) -> pd.DataFrame:
    """One row per run: its name, status, reason, origin, settings and metrics.

    A stored table may give a run several rows, one per arm it belongs to; they are kept, in order.
    """
    fresh = {path.name: run_row(path) for path in run_folders(folder)}
    rows = []
    for row in stored_rows(Path(folder) / RUNS):
        if row["run"] in fresh:
            labels = {name: value for name, value in row.items() if "/" not in name}
            row = labels | fresh[row["run"]]
        rows.append(row)
    stored = {row["run"] for row in rows}
    rows += [row for name, row in fresh.items() if name not in stored]
    return table_of(_with_later_settings(rows))


def _with_later_settings(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows; where a setting is newer than a row, the row gets what the code did before it."""
    later = safe_yaml.load(ADDED.read_text(encoding="utf-8"), ADDED)
    known = {name for row in rows for name in later if row.get(name) is not None}
    added = {name: later[name] for name in known}
    return [row | {k: v for k, v in added.items() if row.get(k) is None} for row in rows]


def run_row(path: str | Path) -> dict[str, Any]:
    """One run's row, from the files in its folder."""
    run = RunFolder(path)
    settings = _settings_of(run.path / "config.yaml")
    metrics, origin = run.metrics(), run.provenance()
    facts = {
        "run": run.path.name,
        "status": run.state,
        "reason": metrics.get("run/reason"),
        "script": origin.get("script"),
        "commit": origin.get("commit"),
        "dirty": origin.get("dirty"),
        "data_hash": _data_hash(origin.get("data")),
    }
    settings = {name: value for name, value in settings.items() if name not in facts}
    measured = {name: value for name, value in metrics.items() if name not in LEFT_OUT}
    made_with = {f"run/{name}": origin.get(name) for name in ORIGIN if origin.get(name)}
    row = _with_names(facts | settings | measured | made_with)
    check_row(row, str(run.path))
    return row


def _with_names(row: dict[str, Any]) -> dict[str, Any]:
    """A row in which each named data set goes by its name, also in rows that had its old place."""
    return {k: with_names(v) if k.startswith(DATA_COLUMNS) else v for k, v in row.items()}


def _settings_of(file: Path) -> dict[str, Any]:
    try:
        settings = safe_yaml.load(file.read_text(encoding="utf-8"), file)
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is damaged: {error}.") from None
    if not isinstance(settings, dict):
        raise ValueError(f"{file} holds no settings.")
    check_row(settings, str(file))
    for name, value in settings.items():
        several = value if isinstance(value, list) else [value]
        if not all(isinstance(one, str | int | float | None) for one in several):
            raise ValueError(f"{file}: {name!r:.40} is no plain value: it was edited.")
    return settings


def write_runs(table: pd.DataFrame, path: str | Path) -> None:
    """Write a runs table so that `read_runs` gives back the very same one."""
    _write_rows(path, table.columns, _plain_rows(table))


def append_rows(rows: Sequence[dict[str, Any]], path: Path) -> bool:
    """Add rows to the end of runs.csv, on the disk when this returns; False where the table lacks
    a column of theirs, or is not there: it must be written anew then.

    A row is one line, and all lines go out in one write: a kill leaves at most a torn last line.
    """
    if not path.exists():
        return False
    with path.open(encoding="utf-8", newline="") as file:
        head = next(csv.reader(file), [])
    if not {name for row in rows for name in row} <= set(head):
        return False
    _append(path, csv_lines([_spell(row.get(name)) for name in head] for row in rows).encode())
    return True


def _append(path: Path, content: bytes) -> None:
    with path.open("ab", buffering=0) as file:
        file.write(content)
        os.fsync(file.fileno())


def mend(path: Path) -> None:
    """Take off the torn last line that a kill in the middle of an append left."""
    content = path.read_bytes()
    os.truncate(path, content.rfind(b"\n") + 1)


def is_torn(path: Path) -> bool:
    """Whether the last line of a table has no end."""
    if not path.exists() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def read_runs(path: str | Path) -> pd.DataFrame:
    """A runs table as `write_runs` wrote it."""
    rows = stored_rows(Path(path))
    if not rows:
        raise ValueError(f"{path} does not exist or has no rows.")
    return table_of(rows)


def stored_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of runs.csv or of curves.csv.gz as they stand there; none if there is no file."""
    if not path.exists():
        return []
    try:
        content = path.read_bytes()
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
        lines = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    head, *body = lines or [[]]
    if "run" not in head:
        raise ValueError(f"{path} has no column 'run': it is not a table of runs.")
    for number, line in enumerate(body, 2):
        if len(line) != len(head):
            raise ValueError(
                f"{path}, row {number} has {len(line)} cells, the head {len(head)}: it was cut or "
                "edited."
            )
    rows = [dict(zip(head, map(_read_cell, line), strict=True)) for line in body]
    for number, row in enumerate(rows, 2):
        check_row(row, f"{path}, row {number}")
    if path.suffix != ".csv":
        return rows
    # A run that ended again (it had been cut, or had failed) was added again: the last row counts.
    last = {(row["run"], row.get("part"), row.get("arm")): row for row in rows}
    return [_with_names(row) for row in last.values()]


def table_of(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Rows as a table with one type per column: int, float, bool or, if mixed, Python objects."""
    import pandas as pd

    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {name: _column([row.get(name) for row in rows]) for name in names}
    return pd.DataFrame(columns, columns=names or ["run"])


def curves_table(folder: str | Path) -> pd.DataFrame:
    """The numbers of every run's steps.jsonl over `CURVE_ROWS` steps: a row per run, step and name.

    Numbers that are not whole have `CURVE_DIGITS`: the rest would be most of the file.
    """
    import pandas as pd

    folders = run_folders(folder)
    fresh = {path.name for path in folders}
    rows = [tuple(row.values()) for row in stored_rows(Path(folder) / CURVES)]
    for row in rows:
        check_curve(row, str(Path(folder) / CURVES))
    rows = [row for row in rows if row[0] not in fresh]
    for path in folders:
        for step in _even(RunFolder(path).steps()):
            rows += [
                (path.name, step["step"], name, _as_drawn(value))
                for name, value in step.items()
                if name != "step" and isinstance(value, int | float)
            ]
    columns = zip(*rows, strict=True) if rows else ([], [], [], [])
    types = (object, "int64", object, "float64")
    table = {
        name: pd.Series(list(values), dtype=kind)
        for name, values, kind in zip(CURVE_COLUMNS, columns, types, strict=True)
    }
    return joined([pd.DataFrame(table)])


def _even(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Some of the logged steps, the first and the last among them, and every evaluation."""
    logged = [i for i, step in enumerate(steps) if not any(n.startswith("test/") for n in step)]
    some = np.linspace(0, len(logged) - 1, min(CURVE_ROWS, len(logged))).round().astype(int)
    dropped = set(logged) - {logged[i] for i in some}
    return [step for i, step in enumerate(steps) if i not in dropped]


def write_curves(table: pd.DataFrame, path: str | Path) -> None:
    """Write a curves table, compressed; the same table gives the same bytes."""
    _write_rows(path, table.columns, _plain_rows(table))


def examples_table(folder: str | Path) -> pd.DataFrame:
    """Every vector of every run's examples.safetensors: run, outcome, example, value.

    Norms are rounded to `NORM_BITS`: all digits of them would be most of the file; those of further
    collections stay in the run's folder.
    """
    folders = [p for p in run_folders(folder) if (p / "examples.safetensors").exists()]
    fresh = [path.name for path in folders]
    parts = []
    if (Path(folder) / EXAMPLES).exists():
        stored = read_examples(Path(folder) / EXAMPLES)
        parts.append(stored[~stored["run"].isin(fresh)])
    for path in folders:
        vectors = {name: x for name, x in run_vectors(path).items() if "/norm_" not in name}
        parts += [_examples_part(path.name, name, x) for name, x in vectors.items()]
    return joined(parts or [_examples_part("", "", np.zeros(0))])


def run_vectors(path: Path) -> dict[str, Float[Array, " n"]]:
    """The per-example vectors of a run's folder, by name."""
    from safetensors import SafetensorError, safe_open

    file = path / "examples.safetensors"
    try:
        with safe_open(file, framework="numpy") as content:
            found = {name: content.get_tensor(name) for name in sorted(content.keys())}
    except (SafetensorError, TypeError, ValueError) as error:
        raise ValueError(
            f"{file} is damaged: {error}. Make the run again (--no-resume), or remove the file."
        ) from None
    return {name: vector for name, vector in found.items() if vector.ndim == 1}


def examples_by_run(folder: str | Path) -> Examples:
    """Per run its per-example vectors, with the digits of a table."""
    found: dict[str, dict[str, Array]] = {}
    if (Path(folder) / EXAMPLES).exists():
        table = read_examples(Path(folder) / EXAMPLES)
        for key, values in table.groupby(["run", "outcome"], observed=True)["value"]:
            run, outcome = (str(part) for part in key)  # pyright: ignore[reportGeneralTypeIssues]
            found.setdefault(run, {})[outcome] = values.to_numpy(float)
    for path in run_folders(folder):
        if (path / "examples.safetensors").exists():
            vectors = run_vectors(path)
            found[path.name] = {name: as_stored(name, x) for name, x in vectors.items()}
    return found


def joined(parts: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Curves, or per-example outcomes, as one table in its order."""
    import pandas as pd

    table = pd.concat(parts, ignore_index=True)
    if "outcome" not in table.columns:
        return table.sort_values(["run", "step"], kind="stable", ignore_index=True)
    table = table.astype({"run": "category", "outcome": "category"})
    return table.sort_values(["outcome", "run", "example"], kind="stable", ignore_index=True)


def write_examples(table: pd.DataFrame, path: str | Path) -> None:
    """Write per-example outcomes as parquet (needs pyarrow).

    An outcome has a row group of its own: hits and misses, one bit each, are not among norms.
    """
    _need_pyarrow()
    from pyarrow import Table
    from pyarrow.parquet import ParquetWriter

    rows, buffer = Table.from_pandas(table, preserve_index=False), io.BytesIO()
    counts = table["outcome"].value_counts(sort=False)
    with ParquetWriter(buffer, rows.schema, **SMALL_PARQUET) as writer:
        for end, count in zip(counts.cumsum(), counts, strict=True):
            writer.write_table(rows.slice(end - count, count), row_group_size=max(count, 1))
    write_whole(path, buffer.getvalue())


def read_examples(path: str | Path) -> pd.DataFrame:
    """Per-example outcomes as `write_examples` wrote them (needs pyarrow)."""
    import pandas as pd

    _need_pyarrow()
    try:
        table = pd.read_parquet(path, engine="pyarrow")
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} is damaged: {' '.join(str(error).split())}") from None
    if missing := {"run", "outcome", "example", "value"} - set(table.columns):
        raise ValueError(f"{path} lacks {', '.join(sorted(missing))}: it is no table of outcomes.")
    return table


def csv_lines(lines: Iterable[Sequence[str]]) -> str:
    """Rows of cells as CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()


def is_missing(value: Any) -> bool:
    """Whether a cell holds nothing."""
    import pandas as pd

    return value is None or value is pd.NA or (isinstance(value, float) and value != value)


def _plain_rows(table: pd.DataFrame) -> Iterable[list[Any]]:
    """The cells as Python values, so that their spelling does not depend on the column's type."""
    for row in table.itertuples(index=False, name=None):
        yield [value.item() if isinstance(value, np.generic) else value for value in row]


def _write_rows(path: str | Path, columns: Iterable[Any], rows: Iterable[list[Any]]) -> None:
    spelt = ([_spell(value) for value in row] for row in rows)
    content = csv_lines([[str(column) for column in columns], *spelt]).encode()
    if str(path).endswith(".gz"):
        content = gzip.compress(content, mtime=0)
    write_whole(path, content)


def _spell(value: Any) -> str:
    """A cell's text: numbers, true, false and lists as JSON, missing as nothing, text as it is.

    A string that would be read as something else is put in JSON's quotes, and so is one with a line
    break, because a row is one line.
    """
    if is_missing(value):
        return ""
    if not isinstance(value, str):
        return json.dumps(value)
    quoted = value == "" or "\r" in value or "\n" in value or _read_cell(value) != value
    return json.dumps(value) if quoted else value


def _read_cell(text: str) -> Any:
    if text == "":
        return None
    if text[0].isalpha() and text not in JSON_WORDS:
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _column(values: list[Any]) -> pd.Series:
    import pandas as pd

    present = [value for value in values if not is_missing(value)]
    gaps = len(present) < len(values)
    kinds = {type(value) for value in present}
    if kinds == {bool}:
        return pd.Series(values, dtype="boolean" if gaps else "bool")
    if kinds == {int} and all(-(2**63) <= value < 2**63 for value in present):
        return pd.Series(values, dtype="Int64" if gaps else "int64")
    if kinds and kinds <= {int, float}:
        floats = [np.nan if is_missing(value) else float(value) for value in values]
        return pd.Series(floats, dtype="float64")
    return pd.Series([None if is_missing(value) else value for value in values], dtype=object)


def _examples_part(run: str, outcome: str, vector: Array) -> pd.DataFrame:
    import pandas as pd

    size = len(vector)
    return pd.DataFrame(
        {
            "run": pd.Series([run] * size, dtype=object),
            "outcome": pd.Series([outcome] * size, dtype=object),
            "example": np.arange(size, dtype=np.int32),
            "value": as_stored(outcome, vector),
        }
    )


def as_stored(outcome: str, vector: Array) -> Array:
    """A per-example vector with the digits that a table keeps of it."""
    if "norm" not in outcome:
        return vector.astype(float)
    mantissa, exponent = np.frexp(vector.astype(float))
    return np.ldexp(np.round(mantissa * 2**NORM_BITS) / 2**NORM_BITS, exponent)


def _as_drawn(value: float) -> float:
    """A number of a curve with the digits that a table keeps of it."""
    return float(value if value == value // 1 else f"{value:.{CURVE_DIGITS}g}")


def _data_hash(data: Any) -> str | None:
    """Twelve hexadecimal digits of what a run recorded about its data."""
    if data is None:
        return None
    text = json.dumps(_as_committed(data), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _as_committed(data: Any) -> Any:
    """A record of data in which each named set goes by the place that committed rows have."""
    if isinstance(data, dict):
        return {key: _as_committed(item) for key, item in data.items()}
    return identity(data) if isinstance(data, str) else data


def _need_pyarrow() -> None:
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise ValueError(
            "Per-example outcomes are kept as parquet: install pyarrow (pip install pyarrow)."
        ) from None
