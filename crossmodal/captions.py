"""Pictures with captions behind one call: emoji, tar shards, tables and Flickr8k-style folders.

`load_captions("emoji", split="train", image_size=32)` gives pictures, captions, classes and a
fingerprint. Sets too large for memory are decoded batch by batch.

Splits are train, validation, test, train+validation, and all. Emoji are divided by their base,
Flickr8k by its lists, a folder without lists by a hash of each name (70, 10, 20 %). Shards and
tables have no test split: 10 % of them are carved out for validation, by a hash of each key, and
test data are named on their own.

The captions of an emoji (ours): its name; its name and keywords (a skin tone has those of its
base); and, because a class word that stands in no caption cannot be understood in a prompt, "a
picture of GROUP" and "a picture of SUBGROUP". Only the name belongs to one picture alone: it is
the one query for retrieval.
"""

from __future__ import annotations

import csv
import hashlib
import json
import shutil
import tempfile
from collections import defaultdict, deque
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from offsphere.data.emoji import emoji_pictures, groups, load_emoji, subgroups
from offsphere.data.pictures import (
    MEMORY_LIMIT,
    PICTURE_SUFFIXES,
    SPLITS,
    Listing,
    carve,
    limited,
    list_files,
    load_pictures,
    parts_of_split,
    read_pictures,
)
from offsphere.data.shards import (
    IMAGE_SUFFIXES,
    BadSamples,
    Member,
    ShardFacts,
    check_shard,
    class_names,
    existing,
    fetch_manifest,
    index_shard,
    is_streamed,
    parse_label,
    read_manifest,
    read_member,
    samples_of,
    shard_addresses,
    shard_paths,
)
from offsphere.data.splits import split_of
from offsphere.names import unknown
from offsphere.run.addresses import fetch, keep_secret
from offsphere.run.catalog import KNOWN, resolve

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from jaxtyping import Int, UInt8
    from torch import Tensor

EMOJI_STYLES = {"emoji": "twemoji", "openmoji": "openmoji"}
CLASS_SENTENCE = "a picture of {}"
NAMED = tuple(name for name in KNOWN if name.startswith("flickr8k"))
DATA_NAMES = (*EMOJI_STYLES, *NAMED, "wds:PATTERN", "csv:FILE", "folder:PATH")
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


@dataclass(frozen=True, eq=False)
class Captioned:
    """Pictures with one or more captions each, in memory or decoded when they are asked for."""

    name: str
    captions: tuple[tuple[str, ...], ...] = field(repr=False)
    fingerprint: str
    """Changes when a picture (in memory: a pixel; else a size), a caption, key or label does."""
    image_size: int
    skipped: tuple[str, ...] = field(default=(), repr=False)
    """What was wrong with each sample or shard left out under on_bad_sample='skip'."""
    classes: dict[str, tuple[str, ...]] = field(default_factory=dict, repr=False)
    """Names of the zero-shot classes by kind; empty if the data have none."""
    labels: dict[str, Int[Tensor, " n"]] = field(default_factory=dict, repr=False)
    keys: tuple[str, ...] = field(default=(), repr=False)
    """Each picture's name: the file's, or the shard's key."""
    queries: int | None = None
    """How many of a picture's captions, from the first on, are retrieval queries; None: all."""
    pictures: UInt8[Tensor, "n 3 s s"] | Listing = field(kw_only=True, repr=False)

    def __len__(self) -> int:
        return len(self.captions)

    @property
    def in_memory(self) -> bool:
        """Whether the pixels are in memory, so that `batch` needs no worker processes."""
        return not isinstance(self.pictures, Listing)

    def batch(self, indices: Int[Tensor, " b"]) -> UInt8[Tensor, "b 3 s s"]:
        """The pictures at these indices."""
        if isinstance(self.pictures, Listing):
            return read_pictures(self.pictures, indices, self.image_size)
        return self.pictures.index_select(0, indices)


@dataclass(frozen=True, eq=False)
class Pairs:
    """Encoded pictures on disk with their captions, and class indices if they have them."""

    listing: Listing
    keys: tuple[str, ...]
    captions: tuple[tuple[str, ...], ...]
    labels: Int[np.ndarray, " n"] | None = None
    classes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.listing)

    def take(self, keep: Int[np.ndarray, " k"]) -> Pairs:
        """Some of the pairs."""
        return replace(
            self,
            listing=self.listing.take(keep),
            keys=tuple(self.keys[i] for i in keep),
            captions=tuple(self.captions[i] for i in keep),
            labels=None if self.labels is None else self.labels[keep],
        )


def load_captions(
    data: str,
    *,
    split: str,
    image_size: int,
    on_bad_sample: str = "error",
    limit: int | None = None,
    allow_pipe: bool = False,
    data_root: str | None = None,
    memory_limit: int = MEMORY_LIMIT,
) -> Captioned:
    """One split of an image-text data set, as square pictures of side `image_size`.

    Everything that is wrong with shards, captions and files is found here. Damaged pictures are
    too, except in sets larger than memory under on_bad_sample='error': there, when they are read.
    Shards behind addresses are copied for the time of decoding and must fit into memory.
    """
    if split not in SPLITS:
        raise unknown("split", split, SPLITS)
    if image_size < 2:
        raise ValueError(f"image_size must be at least 2 pixels, got {image_size}.")
    if limit is not None and limit < 2:
        raise ValueError(f"limit must be at least 2 images, got {limit}.")
    bad = BadSamples(on_bad_sample)
    data = keep_secret(data)
    place = resolve(data, data_root)
    kind, _, rest = place.partition(":")
    if data in EMOJI_STYLES:
        return _load_emoji(data, split, image_size, limit)
    if kind == "wds" and is_streamed(rest):
        addresses = shard_addresses(rest, allow_pipe=allow_pipe)
        return _load_remote(data, addresses, split, image_size, bad, limit, memory_limit)
    pairs = list_pairs(place, split, bad)
    return _load_pairs(data, pairs, image_size, bad, limit, memory_limit)


def list_pairs(data: str, split: str, bad: BadSamples) -> Pairs:
    """The pairs of local shards, a table or a folder, without decoding any picture."""
    kind, _, rest = data.partition(":")
    listers = {"wds": list_shards, "csv": list_table, "folder": list_folder}
    if kind not in listers:
        raise unknown("image-text data set", data, DATA_NAMES)
    if not rest:
        example = {"wds": "wds:train-{000000..000004}.tar", "csv": "csv:pairs.csv"}
        wanted = example.get(kind, "folder:flickr8k")
        raise ValueError(f"{data!r} names no files: expected something like {wanted}.")
    return listers[kind](rest, split, bad)


def _load_emoji(data: str, split: str, image_size: int, limit: int | None) -> Captioned:
    emoji, wanted = load_emoji(), parts_of_split(split)
    inside = [i for i, e in enumerate(emoji) if e.split in wanted]
    keep = [inside[i] for i in limited(len(inside), limit)]
    classes = {"group": groups(), "subgroup": subgroups()}
    labels = {
        kind: torch.tensor([names.index(getattr(emoji[i], kind)) for i in keep])
        for kind, names in classes.items()
    }
    captions = emoji_captions()
    return _captioned(
        data,
        torch.from_numpy(emoji_pictures(image_size, EMOJI_STYLES[data])[keep]),
        tuple(captions[i] for i in keep),
        tuple(emoji[i].name for i in keep),
        image_size,
        labels=labels,
        classes={kind: tuple(map(class_words, names)) for kind, names in classes.items()},
        queries=1,
    )


def emoji_captions() -> tuple[tuple[str, ...], ...]:
    """The captions of every emoji, in the order of `load_emoji`; the first is its name."""
    emoji = load_emoji()
    keywords = {e.name: e.keywords for e in emoji}
    captions = []
    for e in emoji:
        words = e.keywords or keywords.get(e.base, ())
        described = (f"{e.name}: {', '.join(words)}",) if words else ()
        sentences = (CLASS_SENTENCE.format(class_words(c)) for c in (e.group, e.subgroup))
        captions.append((e.name, *described, *sentences))
    return tuple(captions)


def class_words(name: str) -> str:
    """A group's or subgroup's name as words: 'Animals & Nature' is 'animals and nature'."""
    return name.replace("&", "and").replace("-", " ").lower()


def _captioned(
    name: str,
    pictures: UInt8[Tensor, "n 3 s s"] | Listing,
    captions: tuple[tuple[str, ...], ...],
    keys: tuple[str, ...],
    image_size: int,
    *,
    skipped: tuple[str, ...] = (),
    labels: dict[str, Int[Tensor, " n"]],
    classes: dict[str, tuple[str, ...]],
    queries: int | None = None,
) -> Captioned:
    if len(captions) < 2:
        left_out = f" after leaving out {len(skipped)} bad ones" if skipped else ""
        raise ValueError(
            f"{name} has {len(captions)} image(s) in this split{left_out}: at least 2 are needed."
        )
    if isinstance(pictures, Listing):
        digest = pictures.digest()
    else:
        digest = hashlib.sha256(repr(tuple(pictures.shape)).encode())
        digest.update(np.ascontiguousarray(pictures.numpy()).data)
    numbers = {kind: values.tolist() for kind, values in labels.items()}
    digest.update(json.dumps([keys, captions, classes, numbers, queries]).encode())
    return Captioned(
        name,
        captions,
        digest.hexdigest()[:16],
        image_size,
        skipped,
        classes,
        labels,
        keys,
        queries,
        pictures=pictures,
    )


def _load_pairs(
    name: str, pairs: Pairs, image_size: int, bad: BadSamples, limit: int | None, memory_limit: int
) -> Captioned:
    """Decode everything into memory if it fits there."""
    pairs = pairs.take(limited(len(pairs), limit))
    pixels, keep = load_pictures(pairs.listing, image_size, bad, memory_limit)
    pairs = pairs.take(keep)
    labelled = pairs.labels is not None
    return _captioned(
        name,
        pairs.listing if pixels is None else pixels,
        pairs.captions,
        pairs.keys,
        image_size,
        skipped=tuple(bad.messages),
        labels={"class": torch.from_numpy(pairs.labels)} if labelled else {},
        classes={"class": pairs.classes} if labelled else {},
    )


def _load_remote(
    name: str,
    addresses: Sequence[str],
    split: str,
    image_size: int,
    bad: BadSamples,
    limit: int | None,
    memory_limit: int,
) -> Captioned:
    """Copy shards to a temporary folder, decode them into memory, and drop the copies."""
    with tempfile.TemporaryDirectory(prefix="offsphere-") as folder:
        copies = {Path(folder) / f"{i:06d}.tar": address for i, address in enumerate(addresses)}

        def named(text: str) -> str:
            for copy, address in copies.items():
                text = text.replace(str(copy), address)
            return text

        _refuse_test(f"The shards {name}", "wds:PATTERN", split)
        for copy, address in copies.items():
            try:
                with fetch(address) as source, copy.open("wb") as target:
                    shutil.copyfileobj(source, target)
            except OSError as error:
                copy.unlink(missing_ok=True)
                bad.add(f"The shard {address} cannot be fetched: {error}", "goes on without it")
        try:
            manifest = fetch_manifest(addresses[0])
            facts = {
                copy: manifest.get(address.rpartition("/")[2])
                for copy, address in copies.items()
                if copy.exists()
            }
            pairs = _shard_pairs(facts, split, bad)
            loaded = _load_pairs(name, pairs, image_size, bad, limit, memory_limit)
        except ValueError as error:
            raise ValueError(named(str(error))) from error
    if not loaded.in_memory:
        raise ValueError(
            f"The {len(loaded)} pictures of {name} take more than {memory_limit / 1e9:g} GB: "
            "download the shards and name the local files."
        )
    return replace(loaded, skipped=tuple(map(named, loaded.skipped)))


def _refuse_test(what: str, form: str, split: str) -> None:
    if split == "test":
        raise ValueError(
            f"{what} have no test split of their own: name the test data with "
            f"--data-test={form} (all of them are read)."
        )


class Pair(NamedTuple):
    """One sample of a shard."""

    key: str
    image: Member
    captions: tuple[str, ...]
    label: int | None


def list_shards(pattern: str, split: str, bad: BadSamples) -> Pairs:
    """Pairs in local tar shards: an image and a txt or json member, and a cls member or none."""
    _refuse_test(f"The shards {pattern}", "wds:PATTERN", split)
    paths = shard_paths(pattern, bad)
    manifests = {folder: read_manifest(folder) for folder in {path.parent for path in paths}}
    facts = {path: manifests[path.parent].get(path.name) for path in paths}
    return _shard_pairs(facts, split, bad)


def _shard_pairs(shards: Mapping[Path, ShardFacts | None], split: str, bad: BadSamples) -> Pairs:
    """The pairs of shards, each with what its manifest says of it."""
    paths = tuple(shards)
    if not paths:
        raise ValueError(f"None of the shards is there: {'; '.join(bad.messages[:3])}")
    rows: list[tuple[int, Pair]] = []
    homes: dict[str, Path] = {}
    for number, path in enumerate(paths):
        for pair in read_shard(path, shards[path], bad):
            home = homes.setdefault(pair.key, path)
            if home is path:
                rows.append((number, pair))
            else:
                bad.add(f"Two samples have the key {pair.key!r}: in {home} and in {path}.")
    rows = _labelled(paths, rows, bad)
    numbers = np.array([(n, p.image.offset, p.image.size) for n, p in rows], np.int64)
    file, offsets, sizes = (np.ascontiguousarray(c) for c in numbers.reshape(len(rows), 3).T)
    listing = Listing(paths, file, offsets, sizes, tuple(p.image.name for _, p in rows))
    labels = [pair.label for _, pair in rows if pair.label is not None]
    pairs = Pairs(
        listing,
        tuple(pair.key for _, pair in rows),
        tuple(pair.captions for _, pair in rows),
        np.array(labels, np.int64) if labels else None,
        class_names(paths[0].parent, max(labels)) if labels else (),
    )
    return pairs.take(carve(pairs.keys, split))


def _labelled(
    paths: Sequence[Path], rows: list[tuple[int, Pair]], bad: BadSamples
) -> list[tuple[int, Pair]]:
    """The samples that have a label if any of them has one."""
    if all(pair.label is None for _, pair in rows):
        return rows
    for number, pair in rows:
        if pair.label is None:
            bad.add(f"{paths[number]}: {pair.key} has no label (a cls member), but others have.")
    return [row for row in rows if row[1].label is not None]


def read_shard(path: Path, facts: ShardFacts | None, bad: BadSamples) -> Iterator[Pair]:
    """The good samples of a shard in order; what is wrong with it or with others is reported."""
    index = index_shard(path)
    samples = list(samples_of(index, bad))
    if index.problem is not None and samples and not _complete(samples[-1][1]):
        samples.pop()
    problem = check_shard(index, facts, len(samples))
    if problem is not None:
        bad.add(problem, "reads what can be read of it")
    with path.open("rb") as file:
        for key, members in samples:
            texts = {
                kind: read_member(file, members[kind])
                for kind in ("txt", "json", "cls")
                if kind in members
            }
            try:
                image = _image_member(members)
                label = parse_label(texts["cls"]) if "cls" in texts else None
                yield Pair(key, image, captions_of(texts), label)
            except SampleError as error:
                bad.add(f"{path}: {key} {error}")
            except ValueError as error:
                bad.add(f"{path}: {members['cls'].name} {error}")


class SampleError(ValueError):
    """What is wrong with one sample, as a sentence's end."""


def _complete(members: Mapping[str, Member]) -> bool:
    return "image" in members and ("txt" in members or "json" in members)


def _image_member(members: Mapping[str, Member]) -> Member:
    image = members.get("image")
    if image is None:
        raise SampleError(f"has no image ({', '.join(IMAGE_SUFFIXES)}).")
    if image.size == 0:
        raise SampleError(f"has an empty image ({image.name}, 0 bytes).")
    return image


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


def list_table(file: str, split: str, bad: BadSamples) -> Pairs:
    """Pairs in a table with a header, divided by tabs or commas; rows of one image belong together.

    Image paths are relative to the table's folder.
    """
    _refuse_test(f"The rows of {file}", "csv:FILE", split)
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
        raise ValueError(f"{path} is not UTF-8: {error}.") from None
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
            f"names {', '.join(map(repr, names)) or 'nothing'}."
        )
    return found


def _file_pairs(folder: Path, captions: Mapping[str, tuple[str, ...]], bad: BadSamples) -> Pairs:
    names = list(captions)
    listing, kept = list_files(folder, (folder / name for name in names), bad)
    keys = tuple(names[i] for i in kept)
    return Pairs(listing, keys, tuple(captions[key] for key in keys))


def _without_suffix(name: str) -> str:
    return str(PurePosixPath(name).with_suffix(""))


def list_folder(folder: str, split: str, bad: BadSamples) -> Pairs:
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
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}.") from None
    for number, line in enumerate(lines, 1):
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
