"""Embeddings of a benchmark's pictures and texts: read, encoded once, kept in the user's cache."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from crossmodal.captions import EMOJI_STYLES, Captioned, load_captions
from crossmodal.searches import CLASSIFICATION, RETRIEVAL, Features, Task
from crossmodal.subjects import Subject
from crossmodal.templates import load_templates, prompts_of
from offsphere.data.pictures import DECODING_ERRORS, MEMORY_LIMIT, Listing, decode
from offsphere.data.shards import existing, index_shard, is_streamed, key_and_suffix
from offsphere.encoders.store import Store
from offsphere.names import unknown
from offsphere.run.addresses import public, real
from offsphere.run.progress import track

if TYPE_CHECKING:
    from jaxtyping import Int
    from PIL.Image import Image

CLIP_BENCHMARK = "clip-benchmark:"
EMOJI_SIDE = 72
# What turns a file into pixels; another version may give other pixels.
DECODERS = ("pillow", "torchvision", "torch")


Batch = tuple[Tensor, Sequence[Any]]
"""Raw embeddings and, of each picture, its captions or its label (nothing if known already)."""


@dataclass(frozen=True, eq=False)
class Examples:
    """One data set for one task, ready to be encoded."""

    name: str
    task: Task
    fingerprint: str | None
    """Of the pictures and what comes with them; None if it cannot be known without reading."""
    batches: Callable[[], Iterable[Batch]]
    targets: Sequence[Any] | None = None
    """The captions or the label of each picture, if they do not come with the batches."""
    prompts: tuple[tuple[str, ...], ...] = ()
    """The texts of each class."""
    count: int | None = None
    """How many pictures there must be."""
    skipped: Mapping[str, int] = field(default_factory=dict)
    """What was wrong with those left out, and how many each fault cost."""


@dataclass(frozen=True)
class Reading:
    """How data is read."""

    split: str | None = None
    root: str | None = None
    language: str = "en"
    templates: str | None = None
    captions_per_image: int | None = None
    limit: int | None = None
    batch_size: int = 64
    workers: int = 0
    download: bool = False
    on_bad_sample: str = "error"


def load_examples(data: str, subject: Subject, reading: Reading) -> list[Examples]:
    """The tasks that a data set holds: retrieval, and zero-shot classes if it has any."""
    if data.startswith(CLIP_BENCHMARK):
        return [_from_clip_benchmark(data.removeprefix(CLIP_BENCHMARK), subject, reading)]
    first, _, kind = data.partition(":")
    embedded, squares = first in EMOJI_STYLES, subject.encode_squares is not None
    size = subject.image_size
    if embedded and not squares:
        size = min(size, EMOJI_SIDE)  # as they are drawn, for the model to enlarge
    captioned = load_captions(
        first if embedded else data,
        split=reading.split or ("all" if first in ("wds", "csv") else "test"),
        image_size=size,
        on_bad_sample=reading.on_bad_sample,
        limit=reading.limit,
        memory_limit=MEMORY_LIMIT if squares or is_streamed(kind) else 0,
    )
    kinds = [kind] if embedded and kind else [None, *(() if embedded else captioned.classes)]
    return [_examples(captioned, kind, data, subject, reading) for kind in kinds]


def encode(subject: Subject, examples: Examples, store: Store) -> Features:
    """Every picture and every text through its tower, raw, unless the store has them."""
    decoders = [f"{package}={version(package)}" for package in DECODERS]
    about = [subject.fingerprint, subject.image_size, subject.device.type]
    if subject.encode_squares is not None:
        about.append("encoded as in training")
    pictures = store.get(
        [*about, decoders, examples.fingerprint], lambda: _encode_pictures(examples)
    )
    targets: Sequence[Any] = examples.targets or json.loads(pictures["targets"].numpy().tobytes())
    per_row = targets if examples.task == RETRIEVAL else examples.prompts
    texts = [text for of_row in per_row for text in of_row]
    owner = [row for row, of_row in enumerate(per_row) for _ in of_row]
    if not texts:
        raise ValueError(f"{examples.name} holds no captions.")
    encoded = store.get([*about, texts], lambda: {"texts": subject.encode_texts(texts)})
    labels = torch.tensor(targets) if examples.task == CLASSIFICATION else None
    return Features(pictures["images"], encoded["texts"], torch.tensor(owner), labels)


def _encode_pictures(examples: Examples) -> dict[str, Tensor]:
    """The image embeddings and, if they came with the pictures, the targets as JSON."""
    images: list[Tensor] = []
    targets: list[Any] = []
    for embedded, found in examples.batches():
        images.append(embedded)
        targets.extend(found)
    seen = sum(map(len, images))
    if examples.count not in (None, seen):
        raise ValueError(f"{examples.name}: expected {examples.count} pictures, but {seen} came.")
    if not seen:
        raise ValueError(f"{examples.name} holds no pictures.")
    if examples.targets is not None:
        return {"images": torch.cat(images)}
    if examples.task == CLASSIFICATION:
        targets = [_label(target, examples.name) for target in targets]
    content = bytearray(json.dumps(targets).encode())
    return {"images": torch.cat(images), "targets": torch.frombuffer(content, dtype=torch.uint8)}


def read_embeddings(file: Path) -> dict[Task, Features]:
    """Precomputed embeddings from .safetensors or .npz, by the task they serve.

    Retrieval needs images, texts and owner (the image of each text); classification needs images,
    labels, class_texts and, unless there is one text per class, class_owner.
    """
    tensors = _read_tensors(existing(file))
    found: dict[Task, Features] = {}
    if {"images", "texts", "owner"} <= tensors.keys():
        found[RETRIEVAL] = Features(tensors["images"], tensors["texts"], tensors["owner"])
    if {"images", "labels", "class_texts"} <= tensors.keys():
        texts = tensors["class_texts"]
        owner = tensors.get("class_owner", torch.arange(len(texts)))
        found[CLASSIFICATION] = Features(tensors["images"], texts, owner, tensors["labels"])
    if not found:
        raise ValueError(
            f"{file} holds {', '.join(sorted(tensors)) or 'nothing'}: expected images, texts and "
            "owner (the image of each text) for retrieval, or images, labels and class_texts (and "
            "class_owner) for zero-shot classification."
        )
    return found


def _examples(
    captioned: Captioned, kind: str | None, data: str, subject: Subject, reading: Reading
) -> Examples:
    """The classes of a kind or, without one, retrieval."""
    task: Task = RETRIEVAL if kind is None else CLASSIFICATION
    prompts = ()
    if kind is None:
        # Of emoji by their names alone, because keywords and groups fit many pictures.
        queries = reading.captions_per_image or captioned.queries
        targets = [texts[:queries] for texts in captioned.captions]
    elif kind not in captioned.classes:
        raise unknown(f"kind of classes of {data}", kind, captioned.classes)
    else:
        default = "emoji" if captioned.name in EMOJI_STYLES else "photo"
        templates = load_templates(reading.templates or default)
        prompts = prompts_of(captioned.classes[kind], templates)
        targets = captioned.labels[kind].tolist()
    return Examples(
        name=data,
        task=task,
        fingerprint=_fingerprint(captioned),
        batches=lambda: _batches(captioned, subject, reading.batch_size),
        targets=targets,
        prompts=prompts,
        count=len(captioned),
        skipped=captioned.skipped,
    )


def _fingerprint(captioned: Captioned) -> str:
    """A hash of the pictures, or of the files that hold them."""
    pictures = captioned.pictures
    files = pictures.files if isinstance(pictures, Listing) else ()
    facts = [(str(file.absolute()), *_size_and_time(file)) for file in files]
    text = json.dumps([captioned.fingerprint, captioned.image_size, facts])
    return hashlib.blake2b(text.encode()).hexdigest()


def _batches(captioned: Captioned, subject: Subject, size: int) -> Iterator[Batch]:
    if subject.encode_squares is not None:
        yield subject.encode_squares(captioned), ()
        return
    chunks = torch.arange(len(captioned)).split(size)
    for rows in track(chunks, len(chunks), "encoding images"):
        pixels = [subject.preprocess(picture) for picture in _pictures(captioned, rows)]
        yield subject.encode_images(torch.stack(pixels)), ()


def _pictures(captioned: Captioned, rows: Int[Tensor, " b"]) -> Iterator[Image]:
    """Whole pictures from disk, or the squares in memory."""
    from PIL import Image

    pictures = captioned.pictures
    for row in rows.tolist():
        if isinstance(pictures, Listing):
            try:
                pixels = decode(pictures.read(row))
            except DECODING_ERRORS as error:
                raise ValueError(f"{pictures.source(row)} cannot be decoded: {error}.") from error
        else:
            pixels = pictures[row]
        yield Image.fromarray(pixels.permute(1, 2, 0).numpy())


def _from_clip_benchmark(name: str, subject: Subject, reading: Reading) -> Examples:
    """A data set as clip-benchmark builds it, with its class names, prompts and preprocessing."""
    from clip_benchmark.datasets import builder
    from torch.utils.data import DataLoader

    root = reading.root
    if root is None:
        raise ValueError(f"{CLIP_BENCHMARK}{name} needs --root=FOLDER, where its data lies.")
    remote = is_streamed(root)
    if not remote:
        existing(Path(root))
    split = reading.split or "test"
    shards = name.startswith("wds/")
    task = _task(name, root)
    count = _check_shards(Path(root) / split) if shards and not remote else None
    with _explained(name, root), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*shardshuffle")
        dataset: Any = builder.build_dataset(
            name,
            root=real(root),
            transform=subject.preprocess,
            split=split,
            download=reading.download,
            language=reading.language,
            task=task,
        )
    if shards:
        loader = DataLoader(dataset.batched(reading.batch_size, collation_fn=_columns), None)
    else:
        count = len(dataset)
        # A list collates captions and labels alike; its own generator leaves the global one alone.
        loader = DataLoader(
            dataset,
            reading.batch_size,
            num_workers=reading.workers,
            collate_fn=_columns,
            generator=torch.Generator(),
        )
    prompts = ()
    if task == CLASSIFICATION:
        if not dataset.classes or not dataset.templates:
            raise ValueError(
                f"{name} has no class names or templates: expected classnames.txt and "
                f"zeroshot_classification_templates.txt in {root}."
            )
        templates = dataset.templates
        if reading.templates is not None:
            templates = load_templates(reading.templates)
        prompts = prompts_of(dataset.classes, templates)

    def batches() -> Iterator[Batch]:
        with _explained(name, root), _no_pickles():
            for pixels, targets in _limited(loader, reading.limit):
                yield subject.encode_images(pixels), targets

    if reading.limit is not None and count is not None:
        count = min(count, reading.limit)
    facts = [name, split, reading.language, reading.limit, None if remote else _files(Path(root))]
    digest = hashlib.blake2b(json.dumps(facts).encode()).hexdigest()
    return Examples(
        name=f"{CLIP_BENCHMARK}{name}",
        task=task,
        fingerprint=None if remote else digest,
        batches=batches,
        prompts=prompts,
        count=count,
    )


def _task(name: str, root: str) -> Task:
    from clip_benchmark.datasets import builder

    kind = builder.get_dataset_default_task(name.removeprefix("wds/"))
    said = Path(root) / "dataset_type.txt"
    if name.startswith("wds/") and said.is_file():
        stored = said.read_text().strip().lower()
        kind = {"retrieval": RETRIEVAL, "multilabel": "multilabel"}.get(stored, CLASSIFICATION)
    if kind not in (RETRIEVAL, CLASSIFICATION) or name == "voc2007_multilabel":
        raise ValueError(
            f"{name} is for another task ({kind}): only zero-shot classification with one label "
            "per image and image-text retrieval are measured."
        )
    return kind


def _check_shards(folder: Path) -> int:
    """How many samples a local wds layout holds; a cut or missing shard is an error."""
    file = existing(folder / "nshards.txt")
    text = file.read_text().strip()
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{file}: expected the number of shards, got {text[:40]!r}.")
    samples = 0
    for number in range(int(text)):
        index = index_shard(existing(folder / f"{number}.tar"))
        if index.problem is not None:
            raise index.error()
        keys = (key_and_suffix(member.name) for member in index.members)
        samples += len({found[0] for found in keys if found is not None})
    return samples


def _files(root: Path) -> list[tuple[str, int, int]]:
    """Name, size and time of change of every file below a folder."""
    found = []
    for folder, _, names in os.walk(root):
        for name in names:
            file = Path(folder) / name
            found.append((file.relative_to(root).as_posix(), *_size_and_time(file)))
    return sorted(found)


def _size_and_time(file: Path) -> tuple[int, int]:
    facts = file.stat()
    return facts.st_size, facts.st_mtime_ns


def _columns(samples: Sequence[Sequence[Any]]) -> tuple[Tensor, list[Any]]:
    pictures, targets = zip(*samples, strict=True)
    return torch.stack(pictures), list(targets)


def _limited(
    batches: Iterable[tuple[Tensor, Any]], limit: int | None
) -> Iterator[tuple[Tensor, Any]]:
    left = limit
    for pixels, targets in batches:
        if left is None:
            yield pixels, targets
            continue
        yield pixels[:left], targets[:left]
        left -= len(pixels)
        if left <= 0:
            return


def _label(target: Any, name: str) -> int:
    if isinstance(target, int):
        return target
    if getattr(target, "ndim", None) == 0:
        return int(target)
    raise ValueError(
        f"{name}: expected one class number per picture, got {target!r}; data with several labels "
        "per picture is not measured."
    )


@contextlib.contextmanager
def _explained(name: str, root: str) -> Iterator[None]:
    """Turn what clip-benchmark and its readers raise, or their exit, into one error."""
    from webdataset.autodecode import DecodingError

    try:
        yield
    except DecodingError as error:
        where = f"{error.url}: {error.key}.{str(error.k).lstrip('.')}"
        raise ValueError(f"{where} cannot be decoded: {error.__cause__}") from error
    except (Exception, SystemExit) as error:  # its many readers raise anything
        said = public(str(error)) or type(error).__name__
        raise ValueError(
            f"clip-benchmark cannot read {name} from {root}: {said} (--download lets torchvision "
            "fetch what it can.)"
        ) from error


@contextlib.contextmanager
def _no_pickles() -> Iterator[None]:
    """webdataset refuses to unpickle members of a shard."""
    import webdataset.utils

    utils: Any = webdataset.utils
    before, utils.enforce_security = utils.enforce_security, True
    try:
        yield
    finally:
        utils.enforce_security = before


def _read_tensors(file: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if file.suffix == ".safetensors":
        try:
            return load_file(file)
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged or no safetensors file: {error}.") from None
    if file.suffix != ".npz":
        raise ValueError(f"{file}: expected embeddings in a .safetensors or .npz file.")
    import numpy as np

    try:
        with np.load(file, allow_pickle=False) as stored:
            return {name: torch.from_numpy(stored[name]) for name in stored.files}
    except Exception as error:  # zip, zlib, struct and numpy each raise their own
        said = str(error) or type(error).__name__
        raise ValueError(f"{file} cannot be read as arrays of numbers: {said}.") from None
