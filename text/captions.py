"""Captions of pictures as a symmetric task: two captions of one picture are interchangeable.

`captions:FOLDER` reads train.jsonl, dev.jsonl (validation) and test.jsonl, one object with a list
`captions` per picture and line. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from offsphere.data.splits import hash_share
from text.passages import Collection, Document, Grades, Query

FILES = {"train": "train.jsonl", "validation": "dev.jsonl", "test": "test.jsonl"}


def captions_folder(folder: Path, *, on_bad_sample: str = "error") -> Collection:
    """All captions as documents; the queries are pictures, which have no text of their own."""
    if not any((folder / name).is_file() for name in FILES.values()):
        raise OSError(
            f"{folder} has no captions: captions:FOLDER needs one with {', '.join(FILES.values())}."
        )
    documents: list[Document] = []
    pictures: list[Query] = []
    relevant: dict[str, Grades] = {}
    skipped = 0
    for split, name in FILES.items():
        if not (folder / name).is_file():
            continue
        relevant[split] = {}
        for line, captions in _pictures(folder / name):
            if len(captions) < 2:
                if on_bad_sample == "error":
                    raise ValueError(
                        f"{folder / name}, line {line} has {len(captions)} captions: a pair needs "
                        "two. Mend the file, or leave such pictures out with --on-bad-sample=skip."
                    )
                skipped += 1
                continue
            first = len(documents)
            documents += [Document(f"{split}-{line}-{i}", "", x) for i, x in enumerate(captions)]
            relevant[split][len(pictures)] = dict.fromkeys(range(first, len(documents)), 1)
            pictures.append(Query(f"{split}-{line}", ""))
    return Collection(
        folder.name, tuple(documents), tuple(pictures), relevant, skipped=skipped, grouped=True
    )


def question_of(picture: str, captions: list[int]) -> int:
    """The caption that asks for the others of its picture, by a coin that depends on its id."""
    return captions[int(hash_share("caption " + picture) * len(captions))]


def _pictures(file: Path) -> Iterator[tuple[int, list[str]]]:
    """(line, the different captions that are not empty) of each picture."""
    try:
        lines = file.read_bytes().decode("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise OSError(f"{file} cannot be read as UTF-8: {error}") from None
    for number, line in enumerate(lines, 1):
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
