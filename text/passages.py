"""Collections: documents, queries and who is relevant to whom.

`docstrings` is made on the spot from the source files of installed packages, which are parsed and
not imported: the query is a docstring's first paragraph, the document the rest under the name of
what it describes. `package:NAME` is one package that is only measured. `beir:FOLDER` reads
corpus.jsonl, queries.jsonl and qrels/*.tsv, `captions:FOLDER` captions of pictures.
Imports no torch.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import distribution, packages_distributions
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from offsphere.data.splits import hash_share, split_of
from offsphere.names import unknown
from offsphere.run.catalog import KNOWN, resolve
from offsphere.run.files import atomic_write, cache_directory

SPLITS = ("train", "validation", "test")
NAMED = tuple(name for name, known in KNOWN.items() if known.kind in ("beir", "captions"))
QRELS = {"train": "train.tsv", "validation": "dev.tsv", "test": "test.tsv"}
VALIDATION_SHARE = 0.1
"""Share of a BEIR folder's training queries that validate, if it has no dev.tsv."""

PACKAGES = ("numpy", "scipy", "sklearn", "torch")
PER_PACKAGE = 800
"""Docstrings per package, the first ones in the order of a hash of their texts."""
DISTRACTOR_SHARE = 0.2
"""Share of the docstrings that are documents without a query: relevant to nothing."""
SHORTEST_QUERY, LONGEST_QUERY, SHORTEST_DOCUMENT = 4, 40, 25
"""Words of a query and of a document."""
OTHER_FOLDERS = ("tests", "testing", "externals", "examples")
DOCSTRINGS_FORMAT = 1

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
    """One of many collections: only what compares collections is reported of it."""

    def describe(self) -> dict[str, object]:
        """Name, sizes and content hash, for a run's provenance."""
        digest = hashlib.blake2b(digest_size=8)
        parts = (self.documents, self.queries, sorted(self.relevant.items()))
        for part in parts:
            digest.update(json.dumps(part).encode())
        return {
            "data": self.name,
            "documents": len(self.documents),
            **{split: len(self.relevant.get(split, {})) for split in SPLITS},
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
        from text.captions import captions_folder

        return captions_folder(Path(rest).expanduser(), on_bad_sample=on_bad_sample)
    forms = ("docstrings", "docstrings:PACKAGE", "package:NAME", *NAMED)
    raise unknown("data", data, (*forms, "beir:FOLDER", "captions:FOLDER"))


@cache
def docstrings(packages: tuple[str, ...] = PACKAGES) -> Collection:
    """Summary lines as queries and the rest of the docstrings as documents; 20 % have no query."""
    places = {name: _installed(name) for name in packages}
    versions = {name: release for name, (_, release) in places.items()}
    found = [item for name in packages for item in _package_docstrings(name, *places[name])]
    documents, queries = [], []
    relevant: dict[str, Grades] = {split: {} for split in SPLITS}
    for number, (title, summary, text) in enumerate(_distinct(found)):
        documents.append(Document(str(number), title, text))
        if hash_share("distractor " + summary) >= DISTRACTOR_SHARE:
            relevant[split_of(summary)][len(queries)] = {number: 1}
            queries.append(Query(str(number), summary))
    source = ", ".join(f"{name} {v}" for name, v in versions.items())
    name = "docstrings" if packages == PACKAGES else "docstrings-" + "-".join(packages)
    return Collection(name, tuple(documents), tuple(queries), relevant, source)


def package(name: str) -> Collection:
    """The docstrings of one package to measure on: a tenth of its queries validates."""
    whole = docstrings((name,))
    pairs = {q: g for grades in whole.relevant.values() for q, g in grades.items()}
    relevant: dict[str, Grades] = {"validation": {}, "test": {}}
    for q, grades in sorted(pairs.items()):
        held = hash_share("held out " + whole.queries[q].text) < VALIDATION_SHARE
        relevant["validation" if held else "test"][q] = grades
    return Collection(name, whole.documents, whole.queries, relevant, whole.source, brief=True)


def beir_folder(folder: Path, *, on_bad_sample: str = "error") -> Collection:
    """A collection in BEIR's layout; a split without a qrels file is not there.

    Without dev.tsv a tenth of the training queries, by a hash of their ids, validates.
    """
    if not folder.is_dir():
        raise OSError(f"{folder} is not a folder: beir:FOLDER needs one with corpus.jsonl.")
    bad = _Bad(on_bad_sample == "skip")
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
        held = {q for q in relevant["train"] if hash_share(queries[q].id) < VALIDATION_SHARE}
        relevant["validation"] = {q: g for q, g in relevant["train"].items() if q in held}
        relevant["train"] = {q: g for q, g in relevant["train"].items() if q not in held}
    return Collection(folder.name, documents, queries, relevant, skipped=bad.count)


class _Bad:
    """Bad data: the first kind is an error that names and counts it, or all is left out."""

    def __init__(self, skip: bool) -> None:
        self.skip, self.count = skip, 0

    def report(self, file: Path, what: str, ids: list[str]) -> None:
        self.count += len(ids)
        if not self.skip:
            shown = ", ".join(repr(i) for i in ids[:3]) + (", ..." if len(ids) > 3 else "")
            raise ValueError(
                f"{file}: {len(ids)} {what} ({shown}). Mend the file, or leave them out with "
                "--on-bad-sample=skip."
            )


def _without_empty(
    file: Path, items: tuple[Item, ...], bad: _Bad
) -> tuple[tuple[Item, ...], Numbers]:
    """The items that have a text, and the number of each id: None for those without."""
    _check_unique(file, [item.id for item in items])
    kept = tuple(item for item in items if not item.empty())
    numbers: Numbers = dict.fromkeys(item.id for item in items)
    numbers |= {item.id: number for number, item in enumerate(kept)}
    if empty := [i for i, number in numbers.items() if number is None]:
        what = "documents" if file.stem == "corpus" else file.stem
        bad.report(file, f"{what} are empty", empty)
    return kept, numbers


def _qrels(file: Path, queries: Numbers, documents: Numbers, bad: _Bad) -> Grades:
    """The judgements above 0 of one tab-separated file with a header."""
    grades: Grades = {}
    lost_queries, lost_documents = [], []
    for line, text in enumerate(_lines(file), 1):
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
            lost_queries.append(cells[0])
        elif cells[1] not in documents:
            lost_documents.append(cells[1])
        else:
            query, document, grade = queries[cells[0]], documents[cells[1]], int(score[0])
            if query is not None and document is not None and grade > 0:
                grades.setdefault(query, {})[document] = grade
    for what, lost in (
        ("judged queries are not in queries.jsonl", lost_queries),
        ("judged documents are not in corpus.jsonl", lost_documents),
    ):
        if lost:
            bad.report(file, what, list(dict.fromkeys(lost)))
    if not grades:
        raise ValueError(f"{file} holds no judgement above 0: expected relevant documents.")
    return grades


def _json_lines(file: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(_lines(file), 1):
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


def _lines(file: Path) -> list[str]:
    """The lines of a file; JSON's texts may hold any other line separator as it is."""
    try:
        return file.read_bytes().decode("utf-8-sig").split("\n")
    except OSError as error:
        raise OSError(
            f"{file} cannot be read ({error.strerror}): BEIR's layout needs it."
        ) from None
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file} is not UTF-8 (byte {error.start:,} is {error.object[error.start]:#x}): "
            "convert it, for instance with iconv -t UTF-8."
        ) from None


def _check_unique(file: Path, ids: list[str]) -> None:
    seen: set[str] = set()
    twice = [i for i in ids if i in seen or seen.add(i)]
    if twice:
        shown = ", ".join(repr(i) for i in twice[:3]) + (", ..." if len(twice) > 3 else "")
        raise ValueError(
            f"{file}: {len(twice)} ids come more than once ({shown}): ids must be unique."
        )
    if not ids:
        raise ValueError(f"{file} is empty: expected one JSON object per line.")


_distributions = cache(packages_distributions)
"""Which distributions a package comes from: found out once, it takes most of a second."""


def _installed(package: str) -> tuple[Path, str]:
    """The folder and the release of an installed package, or of one of its parts: numpy.linalg.

    Found by what is recorded of distributions, because Python's own search would import the
    package of a part, and would find a module of that name in the working folder.
    """
    top, *below = package.split(".")
    named = all(part.isidentifier() for part in (top, *below))
    found = [distribution(name) for name in _distributions().get(top, ())] if named else []
    places = [(Path(str(d.locate_file(top))), d.version) for d in found]
    if named and not places:
        places = [(Path(sysconfig.get_path("stdlib")) / top, "of the standard library")]
    for place, release in places:
        folder = place.joinpath(*below)
        if folder.is_dir() and place.parent.resolve() != Path.cwd().resolve():
            return folder, release
    raise ValueError(
        f"{package!r} is no installed package with a folder of its own: docstrings are taken from "
        "the files of installed packages, such as docstrings:numpy,scipy."
    )


def _package_docstrings(package: str, root: Path, release: str) -> list[list[str]]:
    """[title, summary, text] of the package's docstrings, kept in the user's cache per version."""
    folder = cache_directory()
    key = re.sub(r"[^\w.+-]+", "-", f"docstrings-{DOCSTRINGS_FORMAT}-{package}-{release}")
    file = None if folder is None else folder / f"{key}.json"
    if file is not None:
        with suppress(OSError, ValueError, RecursionError):
            return json.loads(file.read_text(encoding="utf-8"))
    print(f"Reading the docstrings of {package} {release} once; they are cached.", flush=True)
    found = _folder_docstrings(package, root)
    chosen = sorted(_distinct(found), key=lambda item: hash_share("\n".join(item)))[:PER_PACKAGE]
    if file is not None:
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(file, lambda out: out.write(json.dumps(chosen).encode()))
    return chosen


def _folder_docstrings(package: str, root: Path) -> Iterator[list[str]]:
    for file in sorted(root.rglob("*.py")):
        folders = file.relative_to(root).parts[:-1]
        private = any(f.startswith("_") and f != "_core" for f in folders)
        if private or file.name.startswith("test_") or set(folders) & set(OTHER_FOLDERS):
            continue
        # Templates, files in another encoding, and those nested beyond the parser's depth.
        with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            tree = ast.parse(file.read_text(encoding="utf-8"))
            yield from _module_docstrings(package, tree)


def _module_docstrings(
    package: str, node: ast.AST, owner: tuple[str, ...] = ()
) -> Iterator[list[str]]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.ClassDef):
            continue
        if not child.name.startswith("_"):
            name = (*owner, child.name)
            if split := _split_docstring(ast.get_docstring(child) or ""):
                yield [" ".join([package, *name]).replace("_", " "), *split]
            if isinstance(child, ast.ClassDef):
                yield from _module_docstrings(package, child, name)


def _split_docstring(text: str) -> list[str] | None:
    """The first paragraph and the rest as plain words, or None if either is no real text."""
    head, _, rest = text.partition("\n\n")
    rest = re.sub(r"[-=~^.]{3,}", " ", rest)
    summary, body = " ".join(head.split()), " ".join(rest.split())
    words = len(summary.split())
    if not SHORTEST_QUERY <= words <= LONGEST_QUERY or len(body.split()) < SHORTEST_DOCUMENT:
        return None
    return [summary, body]


def _distinct(items: Iterable[list[str]]) -> list[list[str]]:
    """The items whose summary and whose text, in small letters, no earlier one has."""
    seen: set[str] = set()
    kept = []
    for item in items:
        keys = {part.lower() for part in item[1:]}
        if not keys & seen:
            kept.append(item)
        seen |= keys
    return kept
