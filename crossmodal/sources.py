"""Image-text pairs on disk, listed without decoding: tar shards, tables, Flickr folders."""

from __future__ import annotations

import csv
import json
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from offsphere.data.emoji import EMOJI_STYLES
from offsphere.data.pictures import PICTURE_SUFFIXES, list_files
from offsphere.data.samples import (
    Facts,
    Parts,
    Rows,
    Sample,
    SampleError,
    Samples,
    listed,
    read_shards,
    shard_facts,
)
from offsphere.data.shards import existing
from offsphere.data.splits import carve, parts_of_split, split_of
from offsphere.names import unknown_data
from offsphere.run.catalog import KNOWN
from offsphere.run.files import read_utf8

if TYPE_CHECKING:
    from offsphere.data.bad import BadSamples

NAMED = tuple(name for name in KNOWN if name.startswith("flickr8k"))
DATA_NAMES = (*EMOJI_STYLES, *NAMED, "wds:PATTERN", "csv:FILE", "folder:PATH")
CAPTION_KINDS = ("txt", "json")
CAPTION_KEYS = ("captions", "caption")
IMAGE_COLUMNS = ("image", "filepath")
CAPTION_COLUMNS = ("caption", "title")
# As the archives of Flickr8k (one of them misspelt) and Flickr30k name them.
IMAGE_FOLDERS = ("images", "Images", "Flickr8k_Dataset", "Flicker8k_Dataset", "flickr30k_images")
TEXT_FOLDERS = (".", "Flickr8k_text")
CAPTION_TABLE = "captions.txt"
TOKEN_FILES = ("Flickr8k.token.txt", "results_20130124.token")
SPLIT_LISTS = {
    "train": "Flickr_8k.trainImages.txt",
    "validation": "Flickr_8k.devImages.txt",
    "test": "Flickr_8k.testImages.txt",
}


def list_pairs(data: str, split: str, bad: BadSamples) -> Samples:
    """The pairs of local shards, a table or a folder, without decoding any picture."""
    kind, _, rest = data.partition(":")
    listers = {"wds": list_shards, "csv": list_table, "folder": list_folder}
    if kind not in listers:
        raise unknown_data("image-text data set", data, DATA_NAMES)
    if not rest:
        example = {"wds": "wds:train-{000000..000004}.tar", "csv": "csv:pairs.csv"}
        wanted = example.get(kind, "folder:flickr8k")
        raise ValueError(f"{data!r} names no files: expected something like {wanted}.")
    return listers[kind](rest, split, bad)


def refuse_test(what: str, form: str, split: str) -> None:
    """Refuse the test split of data that have none of their own."""
    if split == "test":
        raise ValueError(
            f"{what} have no test split of their own: name the test data with "
            f"--data-test={form} (all of them are read)."
        )


def list_shards(pattern: str, split: str, bad: BadSamples) -> Samples:
    """Pairs in local tar shards: an image and a txt or json member, and a cls member or none."""
    refuse_test(f"The shards {pattern}", "wds:PATTERN", split)
    return shard_pairs(shard_facts(pattern, bad), split, bad)


def shard_pairs(shards: Facts, split: str, bad: BadSamples) -> Samples:
    """The pairs of shards, each with what its manifest says of it."""
    paths = tuple(shards)
    if not paths:
        raise ValueError(f"None of the shards is there: {'; '.join(list(bad.messages)[:3])}")
    rows = _labelled(paths, read_shards(shards, _pair, bad, complete=is_complete), bad)
    pairs = listed(paths, rows)
    return pairs.take(carve(pairs.keys, split))


def _labelled(paths: Sequence[Path], rows: Rows, bad: BadSamples) -> Rows:
    """The samples that have a label if any of them has one."""
    if all(sample.label is None for _, sample in rows):
        return rows
    for number, sample in rows:
        if sample.label is None:
            bad.add(f"{paths[number]}: {sample.key} has no label (a cls member), but others have.")
    return [row for row in rows if row[1].label is not None]


def is_complete(members: Mapping[str, object]) -> bool:
    """Whether a sample has a picture and captions."""
    return "image" in members and ("txt" in members or "json" in members)


def _pair(parts: Parts) -> Sample:
    """A picture with its captions, and its class index if it has one."""
    image = parts.image()
    if image.size == 0:
        raise SampleError(f"{parts.key} has an empty image ({image.name}, 0 bytes).")
    texts = {k: parts.read(member) for k, member in parts.members.items() if k in CAPTION_KINDS}
    label = parts.label()
    try:
        return Sample(parts.key, image, label, captions_of(texts))
    except SampleError as error:
        raise SampleError(f"{parts.key} {error}") from None


def captions_of(texts: Mapping[str, bytes]) -> tuple[str, ...]:
    """The captions of a sample from its json or txt member; of both, if they say the same."""
    given = {kind: _decoded(texts[kind], kind) for kind in ("txt", "json") if kind in texts}
    lines = _checked(_lines(given["txt"]), "txt") if "txt" in given else None
    listed, found = (None, "") if "json" not in given else _json_captions(given["json"])
    if listed is None and lines is None:
        raise SampleError(
            "has no captions: expected a txt member, or a json member with the key "
            f"'captions' (a list) or 'caption'{found}."
        )
    if listed is None or lines is None:
        return listed or lines or ()
    # txt has all of json's captions, a line each, or the first alone, as open_clip wants it.
    if " ".join(lines).split() not in (" ".join(listed).split(), listed[0].split()):
        raise SampleError(
            f"has two captions files that differ (txt: {lines[0][:40]!r}, json: "
            f"{listed[0][:40]!r}): keep one of them."
        )
    return listed


def _decoded(content: bytes, kind: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SampleError(f"has a {kind} member that is not UTF-8 ({error}).") from None


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


def _json_captions(text: str) -> tuple[tuple[str, ...] | None, str]:
    """The captions of a json member, or None and what it has instead."""
    try:
        content = json.loads(text)
    except ValueError as error:
        raise SampleError(f"has a json member that is not JSON ({error}).") from None
    except RecursionError:
        raise SampleError("has a json member that is nested too deeply.") from None
    if not isinstance(content, dict):
        raise SampleError(f"has a json member that is a {type(content).__name__}, not an object.")
    key = next((key for key in CAPTION_KEYS if key in content), None)
    if key is None:
        return None, f"; its json has only {', '.join(sorted(content)) or 'no keys'}"
    value = content[key]
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or not all(isinstance(item, str) for item in listed):
        raise SampleError(f"has a json member whose {key!r} is no text or list of texts.")
    return _checked(listed, "json"), ""


def _checked(captions: Sequence[str], kind: str) -> tuple[str, ...]:
    stripped = tuple(caption.strip() for caption in captions)
    if not stripped or not all(stripped):
        raise SampleError(f"has an empty caption ({kind}).")
    if any("\ud800" <= letter <= "\udfff" for text in stripped for letter in text):
        raise SampleError(f"has a caption with half a character, a lone surrogate ({kind}).")
    return stripped


def list_table(file: str, split: str, bad: BadSamples) -> Samples:
    """Pairs in a table with a header, divided by tabs or commas; rows of one image belong together.

    Image paths are relative to the table's folder.
    """
    refuse_test(f"The rows of {file}", "csv:FILE", split)
    path = existing(Path(file))
    pairs = _file_pairs(path.parent, read_table(path, bad), bad)
    return pairs.take(carve(map(_without_suffix, pairs.keys), split))


def read_table(path: Path, bad: BadSamples) -> dict[str, tuple[str, ...]]:
    """The captions of each image of a table, in the order of the file."""
    captions: dict[str, list[str]] = defaultdict(list)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            header = file.readline()
            delimiter = "\t" if "\t" in header else ","
            names = next(csv.reader([header], delimiter=delimiter), [])
            image_at, caption_at = (
                _column(path, names, wanted) for wanted in (IMAGE_COLUMNS, CAPTION_COLUMNS)
            )
            for line, row in _records(file, path, delimiter, bad):
                if len(row) > len(names) == caption_at + 1:  # a caption with bare delimiters
                    row[caption_at:] = [delimiter.join(row[caption_at:])]
                cells = [row[at].strip() if at < len(row) else "" for at in (image_at, caption_at)]
                if len(row) > len(names) or not all(cells):
                    bad.add(
                        f"{path}, line {line}: expected {len(names)} fields with an image and a "
                        f"caption, got {row}."
                    )
                else:
                    captions[cells[0]].append(cells[1])
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}. Save it as UTF-8.") from None
    return {image: tuple(texts) for image, texts in captions.items()}


class _Lines:
    """The lines of a file, some of which may be put back to be read again."""

    def __init__(self, file: Iterable[str]) -> None:
        self.file, self.again = iter(file), deque[str]()
        self.taken: list[str] = []
        self.number = 1
        """Of the last line that was taken; the header is the first."""

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = self.again.popleft() if self.again else next(self.file)
        self.taken.append(line)
        self.number += 1
        return line

    def put_back(self) -> None:
        """Give all lines but the first of those taken once more."""
        self.number -= len(self.taken) - 1
        self.again.extendleft(reversed(self.taken[1:]))


def _records(
    file: Iterable[str], path: Path, delimiter: str, bad: BadSamples
) -> Iterator[tuple[int, list[str]]]:
    """Each row of a table and its last line's number.

    csv reads on from a quote that is not closed, through whole rows, to the next quote or the end:
    a row of several lines must be well formed, or its first line is bad and the others are read
    again.
    """
    lines = _Lines(file)
    rows = csv.reader(lines, delimiter=delimiter)
    while True:
        lines.taken = []
        try:
            row = next(rows, None)
            if len(lines.taken) > 1:
                next(csv.reader(lines.taken, delimiter=delimiter, strict=True))
        except csv.Error as error:
            first, swallowed = lines.number - len(lines.taken) + 1, len(lines.taken) - 1
            why = f"a quote is opened and not closed, and {swallowed} more lines would be lost"
            bad.add(f"{path}, line {first}: {why if swallowed else error}.")
            lines.put_back()
            continue
        if row is None:
            return
        if row:
            yield lines.number, row


def _column(path: Path, names: Sequence[str], wanted: Sequence[str]) -> int:
    spelt = [name.strip().lower() for name in names]
    found = next((spelt.index(name) for name in wanted if name in spelt), None)
    if found is None:
        raise ValueError(
            f"{path} has no column {' or '.join(map(repr, wanted))}: its first line, the header, "
            f"names {', '.join(map(repr, names)) or 'nothing'}. Tabs or commas divide columns."
        )
    return found


def _file_pairs(folder: Path, captions: Mapping[str, tuple[str, ...]], bad: BadSamples) -> Samples:
    names = list(captions)
    listing, kept = list_files(folder, (folder / name for name in names), bad)
    keys = tuple(names[i] for i in kept)
    return Samples(listing, keys, tuple(captions[key] for key in keys))


def _without_suffix(name: str) -> str:
    return str(PurePosixPath(name).with_suffix(""))


def list_folder(folder: str, split: str, bad: BadSamples) -> Samples:
    """Pairs in a folder like Flickr8k's: pictures, a captions file, and lists of the splits."""
    path = existing(Path(folder))
    images = _one_of(path, IMAGE_FOLDERS, "folder of pictures")
    captions = _folder_captions(path, bad)
    present = (f.name for f in images.iterdir() if f.suffix[1:].lower() in PICTURE_SUFFIXES)
    uncaptioned = sorted(set(present) - set(captions))
    lists = _split_lists(path)
    wanted = parts_of_split(split)
    if lists and split != "all":
        chosen = _listed(path, lists, wanted, captions, bad)
    else:
        for name in uncaptioned:
            bad.add(f"{images / name} has no caption.")
        chosen = [n for n in captions if split == "all" or split_of(_without_suffix(n)) in wanted]
    return _file_pairs(images, {name: captions[name] for name in chosen}, bad)


def _one_of(path: Path, names: Iterable[str], what: str) -> Path:
    names = tuple(names)
    found = next((path / name for name in names if (path / name).exists()), None)
    if found is None:
        raise FileNotFoundError(f"{path} has no {what}: expected one of {', '.join(names)}.")
    return found


def _folder_captions(path: Path, bad: BadSamples) -> dict[str, tuple[str, ...]]:
    names = [
        str(PurePosixPath(folder) / name)
        for folder in TEXT_FOLDERS
        for name in (CAPTION_TABLE, *TOKEN_FILES)
    ]
    file = _one_of(path, names, "captions file")
    others = [name for name in names if (path / name).exists() and path / name != file]
    if others:
        raise ValueError(f"{path} has two captions files, {file.name} and {others[0]}: keep one.")
    return read_table(file, bad) if file.name == CAPTION_TABLE else read_tokens(file, bad)


def read_tokens(path: Path, bad: BadSamples) -> dict[str, tuple[str, ...]]:
    """The captions of each image of a Flickr token file: 'name.jpg#0', a tab, the caption."""
    captions: dict[str, list[str]] = defaultdict(list)
    for number, line in enumerate(read_utf8(path).splitlines(), 1):
        place, _, caption = line.partition("\t")
        name, hash_sign, _ = place.rpartition("#")
        if hash_sign and caption.strip():
            captions[name].append(caption.strip())
        elif line.strip():
            bad.add(
                f"{path}, line {number}: expected 'name.jpg#0', a tab, a caption; got {line!r}."
            )
    return {image: tuple(texts) for image, texts in captions.items()}


def _split_lists(path: Path) -> dict[str, Path]:
    """The file that lists the images of each part, where there is one."""
    places = {
        part: next((path / f / name for f in TEXT_FOLDERS if (path / f / name).exists()), None)
        for part, name in SPLIT_LISTS.items()
    }
    return {part: place for part, place in places.items() if place is not None}


def _listed(
    path: Path,
    lists: Mapping[str, Path],
    wanted: Sequence[str],
    captions: Mapping[str, tuple[str, ...]],
    bad: BadSamples,
) -> list[str]:
    """The images that the lists name for some parts, each with captions."""
    chosen: list[str] = []
    for part in wanted:
        if part not in lists:
            raise FileNotFoundError(
                f"{path} has lists of splits, but none for {part}: expected {SPLIT_LISTS[part]}."
            )
        for name in lists[part].read_text(encoding="utf-8").split():
            if name in captions:
                chosen.append(name)
            else:
                bad.add(f"{lists[part]} names {name}, which has no caption.")
    return list(dict.fromkeys(chosen))
