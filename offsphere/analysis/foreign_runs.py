"""Anybody's table of runs: one row per run, whatever wrote it. No torch.

CSV and TSV, parquet, JSON (a list of rows) and JSON lines. A cell that holds names and values, as
in W&B's API (`config`, `summary`) or in JSON, becomes columns `config.seed`, `summary.acc`; MLflow
writes such columns itself (`params.seed`, `metrics.acc`). Every cell is read as a string, so that
an arm called `none` or `NA` is an arm.
"""

from __future__ import annotations

import ast
import io
import json
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offsphere.analysis.foreign import short
from offsphere.names import unknown
from offsphere.run.files import read_utf8

if TYPE_CHECKING:
    import pandas as pd

FORMS = (".csv", ".tsv", ".parquet", ".json", ".jsonl")
PLACES = ("metrics", "summary", "params", "config", "tags")
"""Where trackers put names: `acc` is found as `metrics.acc` if there is no column `acc`."""
STATES = ("state", "status")
FINISHED = ("finished", "")
WHOLE_DIGITS = 40
"""A longer whole number is a name, such as a hash."""
LARGEST = 1e100
"""Squares of larger numbers overflow."""
MISSING = ("", "nan", "none", "null", "na", "n/a")


def read_runs(path: str | Path) -> pd.DataFrame:
    """The table as strings, missing cells empty; a file that is no table is refused in one line."""
    import pandas as pd

    path = Path(path)
    form = path.suffix.lower()
    if form not in FORMS:
        raise ValueError(
            f"{path}: expected a table of runs ({', '.join(FORMS)}) or a study's folder, got "
            f"{form or 'a file without an ending'}."
        )
    text = "" if form == ".parquet" else read_utf8(path)
    try:
        if form == ".parquet":
            rows = pd.read_parquet(path).to_dict("records")
        elif form in (".csv", ".tsv"):
            rows = _csv_rows(text, "\t" if form == ".tsv" else ",")
        else:
            rows = _json_rows(text, lines=form == ".jsonl")
    except (ValueError, OSError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    if not rows:
        raise ValueError(f"{path} holds no rows: expected one for each run.")
    return pd.DataFrame([_flat(row) for row in rows], dtype=object).fillna("")


def find_column(runs: pd.DataFrame, name: str, flag: str) -> str:
    """The column of this name, or the only one that a tracker made of it."""
    if name in runs.columns:
        return name
    found = [f"{place}.{name}" for place in PLACES if f"{place}.{name}" in runs.columns]
    if len(found) > 1:
        raise ValueError(f"{flag}={name} may be {' or '.join(found)}: name the one that is meant.")
    if not found:
        raise unknown(f"column for {flag}", name, map(str, runs.columns))
    return found[0]


def check_finished(runs: pd.DataFrame) -> None:
    """Refuse runs whose tracker says that they did not end: their last value is no result."""
    for column in runs.columns:
        if str(column).lower() in STATES:
            words = runs[column].map(lambda cell: str(cell).lower())
            open_runs = runs.loc[~words.isin(FINISHED)]
            if len(open_runs):
                state = open_runs[column].iloc[0]
                raise ValueError(
                    f"{len(open_runs)} of the runs have not finished (row {_row(open_runs)}: "
                    f"{column}={state}). --where {column}={_finished_word(runs[column])} leaves "
                    "them out."
                )


def to_number(cell: Any, place: str) -> float:
    """A metric's cell as a float, missing as NaN; words and infinity are refused."""
    if _is_missing(cell) or str(cell).strip().lower() in MISSING:
        return math.nan
    try:
        value = float(cell)
    except ValueError:
        raise ValueError(f"{place} must be a number, got {short(cell)}.") from None
    if abs(value) > LARGEST:
        size = "infinite" if math.isinf(value) else f"{value:g}"
        raise ValueError(f"{place} is {size}: leave the cell of a diverged run empty.")
    return value


def spelt(value: Any) -> str:
    """One spelling for a level: 0, 0.0 and "0" are the same seed."""
    text = str(value).strip()
    if not re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", text, re.IGNORECASE):
        return text
    if re.fullmatch(r"[-+]?\d+", text):
        return str(int(text)) if len(text) < WHOLE_DIGITS else text
    number = float(text)
    return str(int(number)) if number.is_integer() and abs(number) < 2**53 else repr(number)


def _csv_rows(text: str, sep: str) -> list[dict[Any, Any]]:
    """The rows below the header, which is read as a row: pandas would rename and shift columns."""
    import pandas as pd

    cells = pd.read_csv(
        io.StringIO(text), sep=sep, dtype=str, header=None, index_col=False, keep_default_na=False
    )
    cells.columns = cells.iloc[0]
    if cells.shape[1] == 1 and (other := re.search(r"[;\t|]", str(cells.columns[0]))):
        raise ValueError(f"expected {sep!r} between columns, got {other[0]!r}")
    cells = cells.loc[:, cells.columns != ""]  # the numbers that pandas puts before its rows
    twice = cells.columns[cells.columns.duplicated()]
    if len(twice):
        raise ValueError(f"the header has {twice[0]!r} more than once: rename one.")
    return cells.iloc[1:].to_dict("records")


def _json_rows(text: str, *, lines: bool) -> list[Any]:
    if lines:
        rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    else:
        rows = json.loads(text)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError('expected rows such as {"seed": 0, "method": "a", "acc": 0.5}')
    return rows


def _flat(row: dict[Any, Any], prefix: str = "") -> dict[str, str]:
    """A row whose cells are strings; those that hold names and values are columns."""
    flat: dict[str, str] = {}
    for name, cell in row.items():
        inner = cell if isinstance(cell, dict) else _mapping(cell)
        if inner is not None:
            flat |= _flat(inner, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = "" if _is_missing(cell) else spelt(cell)
    return flat


def _is_missing(cell: Any) -> bool:
    import pandas as pd

    lost = cell is None or cell is pd.NA or cell is pd.NaT
    return lost or (isinstance(cell, float) and math.isnan(cell))


def _mapping(cell: Any) -> dict[Any, Any] | None:
    """The dictionary that a cell of a CSV file spells in JSON or, as pandas does, in Python."""
    if not isinstance(cell, str) or not (cell.startswith("{") and cell.endswith("}")):
        return None
    try:
        found = json.loads(cell)
    except (ValueError, RecursionError):
        try:
            found = ast.literal_eval(re.sub(r"(?<=: )(nan|-?inf)(?=[,}])", "None", cell))
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return None
    return found if isinstance(found, dict) else None


def _row(rows: pd.DataFrame) -> int:
    """The number of the first of these rows, as a reader counts them."""
    return int(rows.index[0]) + 1


def _finished_word(states: Iterable[Any]) -> str:
    """How this tracker spells it."""
    return next((str(x) for x in states if str(x).lower() == FINISHED[0]), FINISHED[0])


def rows_named(rows: pd.DataFrame) -> str:
    """The first three rows by their numbers, as in `rows 3, 7`."""
    numbers: Sequence[str] = [str(int(i) + 1) for i in rows.index[:3]]
    more = f" and {len(rows) - 3} more" if len(rows) > 3 else ""
    return f"row{'s' if len(rows) > 1 else ''} {', '.join(numbers)}{more}"
