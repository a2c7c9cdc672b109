"""`offsphere audit --vectors`: vectors in files, and which belong together.

Two files and `--relevance`: queries and documents. One file and `--labels`: vectors of classes. Two
files and `--scores`: pairs, row by row. Documents are read block by block, and may be more than fit
into memory.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from offsphere.audit.settings import AuditSettings
from offsphere.data.bad import check_unique, first_few

if TYPE_CHECKING:
    from offsphere.audit.report import Data, Report
    from offsphere.data.vectors import Vectors


@dataclass(frozen=True)
class Config(AuditSettings):
    """`--vectors` with one of `--relevance`, `--labels` and `--scores`."""

    vectors: tuple[str, ...] = ()
    """FILE or FILE:NAME of raw vectors (.npy, .safetensors, .parquet, .jsonl): queries and
    documents, one labelled file, or both sides of pairs. Ids are a column, or in FILE.ids.txt."""
    relevance: str | None = None
    """Which documents are right for which queries: query id, document id and grade a line (tabs
    or spaces; TREC's four columns too)."""
    labels: str | None = None
    """Classes: an id and a label a line, or a label a line in the order of the vectors."""
    scores: str | None = None
    """How alike the vectors of a row are: a number a line, or an id and a number."""

    def __post_init__(self) -> None:
        super().__post_init__()
        files = {"relevance": 2, "labels": 1, "scores": 2}
        given = [name for name in files if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                "--vectors needs one of --relevance=FILE (queries and documents), --labels=FILE "
                f"and --scores=FILE (pairs), got {' and '.join(given) or 'none'}."
            )
        if len(self.vectors) != files[given[0]]:
            raise ValueError(
                f"--{given[0]} goes with {files[given[0]]} of --vectors, got {len(self.vectors)}."
            )


def run(config: Config) -> Report:
    """Read, measure, write and show."""
    import torch

    from offsphere.audit.output import finish
    from offsphere.audit.report import audit
    from offsphere.audit.scoring import How, cells_of
    from offsphere.data.vectors import open_vectors

    torch.set_num_threads(config.threads)
    files = [open_vectors(source) for source in config.vectors]
    name = Path(files[-1].source.partition(":")[0]).stem
    how = How(*cells_of((1.0, 1.0), config.eval_cell), config.resamples, config.seed)
    report = audit(name, "unknown", [read(config, name, files)], how, config.similarities)
    finish(config, report)
    return report


def read(config: Config, name: str, files: Sequence[Vectors]) -> Data:
    """What the files hold, as it is measured."""
    first, last = files[0], files[-1]
    if config.relevance is not None:
        return _search(name, first, last, Path(config.relevance))
    if config.labels is not None:
        return _labelled(name, first, Path(config.labels))
    assert config.scores is not None
    return _scored(name, first, last, Path(config.scores))


def _search(name: str, queries: Vectors, documents: Vectors, file: Path) -> Data:
    import torch

    from offsphere.audit.measures import Side
    from offsphere.audit.report import Data
    from offsphere.audit.search import Direction, Search

    judged = _judgements(file)
    asked = _rows(file, "query", queries, [query for query, _ in judged])
    wanted = _rows(file, "document", documents, [document for _, document in judged])
    right = [(asked[q], wanted[d], grade) for (q, d), grade in judged.items() if grade > 0]
    if not right:
        raise ValueError(f"{file} holds no judgement above 0: expected right documents.")
    rows = sorted({q for q, _, _ in right})
    number = {row: k for k, row in enumerate(rows)}
    words = Direction(name, "query to document", "query", "right", graded=True, examples="queries")
    asking = queries.whole()[rows]
    empty = [row for row, x in zip(rows, asking, strict=True) if not x.any()]
    if empty:
        raise ValueError(
            f"{queries.source}: {len(empty):,} queries are all zeros and have no direction "
            f"({first_few([queries.ids[row] for row in empty])}): leave them out."
        )
    search = Search(
        words,
        torch.from_numpy(asking),
        documents,  # pyright: ignore[reportArgumentType]
        torch.tensor([number[q] for q, _, _ in right]),
        torch.tensor([d for _, d, _ in right]),
        torch.tensor([grade for _, _, grade in right]),
    )
    left = len(queries) - len(rows)
    more = f", {left:,} without a right document left out" if left else ""
    told = f"{len(rows):,} queries{more}, {len(documents):,} documents, {len(right):,} judgements."
    some = search.thinned
    sides = {"query": Side(search.queries), "document": Side(some.candidates(0.0), search.norms)}
    return Data(told, sides, [search])


def _labelled(name: str, vectors: Vectors, file: Path) -> Data:
    import torch

    from offsphere.audit.labelled import Labelled, labelled_words, numbered
    from offsphere.audit.measures import Side
    from offsphere.audit.report import Data

    labels = _by_row(file, vectors, "label")
    if len(set(labels)) == 1:
        raise ValueError(
            f"{file}: all {len(labels):,} vectors are of the class {labels[0]!r}: expected two "
            "classes or more."
        )
    if len(set(labels)) == len(labels):
        raise ValueError(
            f"{file}: each of {len(labels):,} vectors has a class of its own: expected classes of "
            "two vectors or more."
        )
    x = torch.from_numpy(vectors.whole())
    part = Labelled(labelled_words(name), x, numbered(labels))
    told = f"{len(labels):,} vectors of {len(set(labels)):,} classes."
    if len(part.labels) < len(labels):
        told += f" Evenly spaced {len(part.labels):,} of them are compared."
    return Data(told, {"vector": Side(x)}, [part])


def _scored(name: str, left: Vectors, right: Vectors, file: Path) -> Data:
    import torch

    from offsphere.audit.measures import Side
    from offsphere.audit.report import Data
    from offsphere.audit.scored import Scored, scored_words

    if len(left) != len(right):
        raise ValueError(
            f"{left.source} has {len(left):,} vectors and {right.source} {len(right):,}: pairs "
            "stand in the same row of both."
        )
    scores = [_number(file, x) for x in _by_row(file, left, "score")]
    a, b = (torch.from_numpy(x.whole()) for x in (left, right))
    part = Scored(scored_words(name), a, b, torch.tensor(scores, dtype=torch.float64))
    named = {"left": Side(a), "right": Side(b)}
    return Data(f"{len(scores):,} scored pairs.", named, [part])


def _judgements(file: Path) -> dict[tuple[str, str], int]:
    """The grade by query id and document id; a first line that is no judgement is a header.

    Two columns are right pairs; of TREC's four the second means nothing.
    """
    found: dict[tuple[str, str], int] = {}
    for number, line in enumerate(_lines(file), 1):
        cells = line.split("\t") if "\t" in line else line.split()
        cells = [cell.strip() for cell in cells]
        if len(cells) == 4:
            cells = [cells[0], *cells[2:]]
        grade = cells[2] if len(cells) == 3 else "1"
        if len(cells) in (2, 3) and re.fullmatch(r"-?\d{1,9}", grade):
            if not (number == 1 and len(cells) == 2 and "id" in line.lower()):
                pair = cells[0], cells[1]
                if found.setdefault(pair, int(grade)) != int(grade):
                    raise ValueError(
                        f"{file}, line {number}: query {pair[0]} and document {pair[1]} have the "
                        f"grade {found[pair]} above and {grade} here."
                    )
        elif number > 1 or len(cells) not in (2, 3):
            raise ValueError(
                f"{file}, line {number}: expected query id, document id and a whole grade with "
                f"tabs or spaces between, got {line[:80]!r}."
            )
    return found


def _rows(file: Path, what: str, vectors: Vectors, wanted: Sequence[str]) -> dict[str, int]:
    """The rows of the ids that a file names; an error if some have no vector."""
    left = set(wanted)
    found = {name: row for row, name in enumerate(vectors.ids) if name in left}
    lost = [name for name in dict.fromkeys(wanted) if name not in found]
    if lost:
        known = first_few(vectors.ids[:3])
        raise ValueError(
            f"{file} names {len(lost):,} {what} ids without a vector in {vectors.source} "
            f"({first_few(lost)}), whose ids are such as {known}."
        )
    return found


def _by_row(file: Path, vectors: Vectors, what: str) -> list[str]:
    """What a file says of each vector: by its id, or in the order of the rows."""
    lines = _lines(file)
    cells = [[x.strip() for x in line.split("\t")] for line in lines]
    if all(len(row) == 1 for row in cells):
        if len(cells) != len(vectors):
            raise ValueError(
                f"{file} has {len(cells):,} lines and {vectors.source} {len(vectors):,} vectors: "
                f"expected a {what} for each, or an id and a {what} a line."
            )
        return [row[0] for row in cells]
    bad = next((number for number, row in enumerate(cells, 1) if len(row) != 2), None)
    if bad is not None:
        raise ValueError(f"{file}, line {bad}: expected an id, a tab and a {what}.")
    said = {row[0]: row[1] for row in cells}
    check_unique(f"{file}", [row[0] for row in cells])
    without = [name for name in vectors.ids if name not in said]
    if without:
        raise ValueError(
            f"{file} has no {what} for {len(without):,} of {len(vectors):,} vectors in "
            f"{vectors.source} ({first_few(without)})."
        )
    return [said[name] for name in vectors.ids]


def _number(file: Path, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{file}: expected a score as a number, got {text[:40]!r}.") from None


def _lines(file: Path) -> list[str]:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{file} is not UTF-8: expected lines of text.") from None
    except OSError as error:
        raise OSError(f"{file} cannot be read ({error.strerror}).") from None
    lines = [line for line in text.split("\n") if line.strip()]
    if not lines:
        raise ValueError(f"{file} is empty.")
    return lines
