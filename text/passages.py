"""Collections: documents, queries and who is relevant to whom.

`docstrings` is made on the spot from installed packages; `package:NAME` is one package that is only
measured. `beir:FOLDER` reads corpus.jsonl, queries.jsonl and qrels/*.tsv. `captions:FOLDER` is a
symmetric task, because two captions of one picture are interchangeable: it reads train.jsonl,
dev.jsonl (validation) and test.jsonl, one object with a list `captions` per picture and line.
Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from offsphere.data.bad import BadSamples, check_unique
from offsphere.data.splits import PARTS, hash_share, in_validation, split_of
from offsphere.names import unknown_data
from offsphere.run.catalog import KNOWN, resolve
from offsphere.run.files import read_utf8
from text.docstrings import distinct, package_docstrings

NAMED = tuple(name for name, known in KNOWN.items() if known.kind in ("beir", "captions"))
CAPTION_FILES = {"train": "train.jsonl", "validation": "dev.jsonl", "test": "test.jsonl"}
QRELS = {"train": "train.tsv", "validation": "dev.tsv", "test": "test.tsv"}

PACKAGES = ("numpy", "scipy", "sklearn", "torch")
DISTRACTOR_SHARE = 0.2
"""Share of the docstrings that are documents without a query: relevant to nothing."""

Grades = dict[int, dict[int, int]]
"""The grade (above 0) of each relevant document of each query, both by number."""


class Document(NamedTuple):
    id: str
    title: str
    text: str

    def empty(self) -> bool:
        return not (self.title + self.text).strip()


class Query(NamedTuple):
    id: str
    text: str
    answers: tuple[str, ...] = ()

    def empty(self) -> bool:
        return not self.text.strip()


Item = TypeVar("Item", Document, Query)
Numbers = dict[str, int | None]
"""The number of each id; None for an item that was left out as empty."""


@dataclass(frozen=True)
class Collection:
    """Documents and queries, with the relevant documents of each split's queries."""

    name: str
    documents: tuple[Document, ...]
    queries: tuple[Query, ...]
    relevant: dict[str, Grades]
    source: str = ""
    """What the collection was made from, such as package versions."""
    skipped: int = 0
    """Documents, queries and judgements that were left out as bad."""
    grouped: bool = False
    """Queries are pictures without a text, and the documents relevant to one are its captions."""
    brief: bool = False
    """Whether it is one of many collections, of which only what compares them is reported."""

    def describe(self) -> dict[str, object]:
        """Name, sizes and content hash, for a run's provenance."""
        digest = hashlib.blake2b(digest_size=8)
        parts = (self.documents, self.queries, sorted(self.relevant.items()))
        for part in parts:
            digest.update(json.dumps(part).encode())
        return {
            "data": self.name,
            "documents": len(self.documents),
            **{split: len(self.relevant.get(split, {})) for split in PARTS},
            "hash": digest.hexdigest(),
            "source": self.source,
            "skipped": self.skipped,
        }


def load_collection(
    data: str, *, on_bad_sample: str = "error", data_root: str | None = None
) -> Collection:
    """The collection that a flag such as docstrings or beir:FOLDER names."""
    kind, _, rest = resolve(data, data_root).partition(":")
    if kind == "docstrings":
        return docstrings(tuple(rest.split(",")) if rest else PACKAGES)
    if kind == "package" and rest:
        return package(rest)
    if kind == "beir" and rest:
        return beir_folder(Path(rest).expanduser(), on_bad_sample=on_bad_sample)
    if kind == "captions" and rest:
        return captions_folder(Path(rest).expanduser(), on_bad_sample=on_bad_sample)
    forms = ("docstrings", "docstrings:PACKAGE", "package:NAME", *NAMED)
    raise unknown_data("data", data, (*forms, "beir:FOLDER", "captions:FOLDER"))


def of_pairs(name: str, splits: dict[str, Iterable[tuple[str, str]]]) -> Collection:
    """The collection of (query, document) pairs; equal strings are one query or one document.

    Every pair of a split is relevant there, and no other: a query may have several documents.
    """
    queries: dict[str, int] = {}
    documents: dict[str, int] = {}
    relevant: dict[str, Grades] = {}
    for split, pairs in splits.items():
        for query, document in pairs:
            if not (query.strip() and document.strip()):
                raise ValueError(f"{name} has an empty string in a pair of its {split} split.")
            number = queries.setdefault(query, len(queries))
            grades = relevant.setdefault(split, {}).setdefault(number, {})
            grades[documents.setdefault(document, len(documents))] = 1
    return Collection(
        name,
        tuple(Document(f"d{number}", "", x) for x, number in documents.items()),
        tuple(Query(f"q{number}", x) for x, number in queries.items()),
        relevant,
    )


@cache
def docstrings(packages: tuple[str, ...] = PACKAGES) -> Collection:
    """Summary lines as queries and the rest of the docstrings as documents; 20 % have no query."""
    found = {name: package_docstrings(name) for name in packages}
    items = [item for _, items in found.values() for item in items]
    documents, queries = [], []
    relevant: dict[str, Grades] = {split: {} for split in PARTS}
    for number, (title, summary, text) in enumerate(distinct(items)):
        documents.append(Document(str(number), title, text))
        if hash_share("distractor " + summary) >= DISTRACTOR_SHARE:
            relevant[split_of(summary)][len(queries)] = {number: 1}
            queries.append(Query(str(number), summary))
    source = ", ".join(f"{name} {release}" for name, (release, _) in found.items())
    name = "docstrings" if packages == PACKAGES else "docstrings-" + "-".join(packages)
    return Collection(name, tuple(documents), tuple(queries), relevant, source)


def package(name: str) -> Collection:
    """The docstrings of one package to measure on: a tenth of its queries validates."""
    whole = docstrings((name,))
    pairs = {q: g for grades in whole.relevant.values() for q, g in grades.items()}
    relevant: dict[str, Grades] = {"validation": {}, "test": {}}
    for q, grades in sorted(pairs.items()):
        held = in_validation("held out " + whole.queries[q].text)
        relevant["validation" if held else "test"][q] = grades
    return Collection(name, whole.documents, whole.queries, relevant, whole.source, brief=True)


def beir_folder(folder: Path, *, on_bad_sample: str = "error") -> Collection:
    """A collection in BEIR's layout; a split without a qrels file is not there.

    Without dev.tsv a tenth of the training queries, by a hash of their ids, validates.
    """
    if not folder.is_dir():
        raise OSError(f"{folder} is not a folder: beir:FOLDER needs one with corpus.jsonl.")
    bad = BadSamples(on_bad_sample)
    documents = tuple(
        Document(row["_id"], row.get("title") or "", row.get("text") or "")
        for row in _json_lines(folder / "corpus.jsonl")
    )
    queries = tuple(
        Query(row["_id"], row["text"] or "", tuple(row.get("answers") or ()))
        for row in _json_lines(folder / "queries.jsonl")
    )
    documents, document_numbers = _without_empty(folder / "corpus.jsonl", documents, bad)
    queries, query_numbers = _without_empty(folder / "queries.jsonl", queries, bad)
    relevant = {
        split: _qrels(folder / "qrels" / name, query_numbers, document_numbers, bad)
        for split, name in QRELS.items()
        if (folder / "qrels" / name).exists()
    }
    if not relevant:
        raise OSError(
            f"{folder}/qrels has no judgements: expected at least one of "
            f"{', '.join(QRELS.values())} with the columns query-id, corpus-id and score."
        )
    if "train" in relevant and "validation" not in relevant:
        held = {q for q in relevant["train"] if in_validation(queries[q].id)}
        relevant["validation"] = {q: g for q, g in relevant["train"].items() if q in held}
        relevant["train"] = {q: g for q, g in relevant["train"].items() if q not in held}
    return Collection(folder.name, documents, queries, relevant, skipped=bad.count)


def _without_empty(
    file: Path, items: tuple[Item, ...], bad: BadSamples
) -> tuple[tuple[Item, ...], Numbers]:
    """The items that have a text, and the number of each id: None for those without."""
    if not items:
        raise ValueError(f"{file} is empty: expected one JSON object per line.")
    check_unique(file, [item.id for item in items])
    kept = tuple(item for item in items if not item.empty())
    numbers: Numbers = dict.fromkeys(item.id for item in items)
    numbers |= {item.id: number for number, item in enumerate(kept)}
    what = "documents" if file.stem == "corpus" else file.stem
    empty = [i for i, number in numbers.items() if number is None]
    bad.add_ids(file, f"{what} are empty", empty)
    return kept, numbers


def _qrels(file: Path, queries: Numbers, documents: Numbers, bad: BadSamples) -> Grades:
    """The judgements above 0 of one tab-separated file with a header."""
    grades: Grades = {}
    lost_queries: dict[str, None] = {}  # ordered, each id once
    lost_documents: dict[str, None] = {}
    for line, text in enumerate(read_utf8(file).split("\n"), 1):
        cells = text.split("\t")
        score = re.fullmatch(r"-?\d+", cells[2].strip()) if len(cells) == 3 else None
        if score is None:
            if (line == 1 and not text.strip()[-1:].isdecimal()) or not text.strip():
                continue
            raise ValueError(
                f"{file}, line {line}: expected query-id, corpus-id and a whole score, separated "
                f"by tabs, got {text[:80]!r}."
            )
        if cells[0] not in queries:
            lost_queries[cells[0]] = None
        elif cells[1] not in documents:
            lost_documents[cells[1]] = None
        else:
            query, document, grade = queries[cells[0]], documents[cells[1]], int(score[0])
            if query is not None and document is not None and grade > 0:
                grades.setdefault(query, {})[document] = grade
    bad.add_ids(file, "judged queries are not in queries.jsonl", list(lost_queries))
    bad.add_ids(file, "judged documents are not in corpus.jsonl", list(lost_documents))
    if not grades:
        raise ValueError(f"{file} holds no judgement above 0: expected relevant documents.")
    return grades


def _json_lines(file: Path) -> Iterator[dict[str, Any]]:
    # Not splitlines: a string in JSON may hold any other line separator as it is.
    for number, line in enumerate(read_utf8(file).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{file}, line {number} is not JSON: {error}") from None
        except RecursionError:
            raise ValueError(f"{file}, line {number}: the JSON is nested too deeply.") from None
        if not isinstance(row, dict) or "_id" not in row or "text" not in row:
            raise ValueError(f"{file}, line {number}: expected an object with _id and text.")
        for key in ("text", "title"):
            if not isinstance(row.get(key), str | None):
                raise ValueError(
                    f"{file}, line {number}: expected {key} in quotes, got {row[key]!r:.60}."
                )
        if "\\ud" in line and not _is_text(row):
            raise ValueError(
                f"{file}, line {number}: half a character, a lone surrogate (\\ud...)."
            )
        answers = row.get("answers") or []
        if not (isinstance(answers, list) and all(isinstance(x, str) for x in answers)):
            raise ValueError(
                f"{file}, line {number}: expected answers as a list of texts such as "
                f'["...", "..."], got {answers!r:.60}.'
            )
        yield {**row, "_id": str(row["_id"])}


def _is_text(row: dict[str, Any]) -> bool:
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def captions_folder(folder: Path, *, on_bad_sample: str = "error") -> Collection:
    """All captions as documents; the queries are pictures, which have no text of their own."""
    if not any((folder / name).is_file() for name in CAPTION_FILES.values()):
        names = ", ".join(CAPTION_FILES.values())
        raise OSError(f"{folder} has no captions: captions:FOLDER needs one with {names}.")
    documents: list[Document] = []
    pictures: list[Query] = []
    relevant: dict[str, Grades] = {}
    bad = BadSamples(on_bad_sample)
    for split, name in CAPTION_FILES.items():
        if not (folder / name).is_file():
            continue
        relevant[split] = {}
        for line, captions in _pictures(folder / name):
            if len(captions) < 2:
                bad.add(
                    f"{folder / name}, line {line} has {len(captions)} captions: a pair needs two.",
                    "Mend the file, or leave such pictures out with --on-bad-sample=skip.",
                )
                continue
            first = len(documents)
            documents += [Document(f"{split}-{line}-{i}", "", x) for i, x in enumerate(captions)]
            relevant[split][len(pictures)] = dict.fromkeys(range(first, len(documents)), 1)
            pictures.append(Query(f"{split}-{line}", ""))
    return Collection(
        folder.name,
        tuple(documents),
        tuple(pictures),
        relevant,
        skipped=bad.count,
        grouped=True,
    )


def question_of(picture: str, captions: list[int]) -> int:
    """The caption that asks for the others of its picture, by a coin that depends on its id."""
    return captions[int(hash_share("caption " + picture) * len(captions))]


def _pictures(file: Path) -> Iterator[tuple[int, list[str]]]:
    """(line, the different captions that are not empty) of each picture."""
    for number, line in enumerate(read_utf8(file).split("\n"), 1):
        if not line.strip():
            continue
        try:
            captions = json.loads(line)["captions"]
        except (ValueError, TypeError, KeyError, RecursionError):
            captions = None
        if not (isinstance(captions, list) and all(isinstance(x, str) for x in captions)):
            raise ValueError(
                f'{file}, line {number}: expected {{"captions": ["...", ...]}}, got {line!r:.60}.'
            )
        yield number, list(dict.fromkeys(x.strip() for x in captions if x.strip()))
