"""Docstrings of installed packages, whose source files are parsed and not imported.

The query is a docstring's first paragraph, the document the rest under the name of what it
describes. Imports no torch.
"""

from __future__ import annotations

import ast
import json
import re
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

from offsphere.data.splits import hash_share
from offsphere.run.files import cache_file, keep, kept_string

PER_PACKAGE = 800
"""Docstrings per package, the first ones in the order of a hash of their texts."""
SHORTEST_QUERY, LONGEST_QUERY, SHORTEST_DOCUMENT = 4, 40, 25
"""Words of a query and of a document."""
OTHER_FOLDERS = ("tests", "testing", "externals", "examples")
DOCSTRINGS_FORMAT = 1

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


def package_docstrings(package: str) -> tuple[str, list[list[str]]]:
    """A package's release and [title, summary, text] of its docstrings, cached per release."""
    root, release = _installed(package)
    key = re.sub(r"[^\w.+-]+", "-", f"docstrings-{DOCSTRINGS_FORMAT}-{package}-{release}")
    file = cache_file(f"{key}.json")
    with suppress(ValueError, RecursionError):
        return release, json.loads(kept_string(file))
    print(f"Reading the docstrings of {package} {release} once; they are cached.", flush=True)
    found = distinct(_folder_docstrings(package, root))
    chosen = sorted(found, key=lambda item: hash_share("\n".join(item)))[:PER_PACKAGE]
    keep(file, lambda out: out.write(json.dumps(chosen).encode()))
    return release, chosen


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


def distinct(items: Iterable[list[str]]) -> list[list[str]]:
    """The items whose summary and whose text, in small letters, no earlier one has."""
    seen: set[str] = set()
    kept = []
    for item in items:
        keys = {part.lower() for part in item[1:]}
        if not keys & seen:
            kept.append(item)
        seen |= keys
    return kept
