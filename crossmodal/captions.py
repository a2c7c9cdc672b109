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

import hashlib
import json
import shutil
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from crossmodal.sources import list_pairs, refuse_test, shard_pairs
from offsphere.data.bad import GO_ON, BadSamples
from offsphere.data.emoji import (
    EMOJI_STYLES,
    emoji_of_split,
    emoji_pictures,
    groups,
    load_emoji,
    subgroups,
)
from offsphere.data.pictures import (
    MEMORY_LIMIT,
    Listing,
    Pictures,
    check_enough,
    check_request,
    limited,
)
from offsphere.data.shards import fetch_manifest, is_streamed, shard_addresses
from offsphere.run.addresses import fetch, keep_secret
from offsphere.run.catalog import resolve

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Int
    from torch import Tensor

    from offsphere.data.samples import Samples

CLASS_SENTENCE = "a picture of {}"


@dataclass(frozen=True, eq=False, kw_only=True)
class Captioned(Pictures):
    """Pictures with one or more captions each."""

    captions: tuple[tuple[str, ...], ...] = field(repr=False)
    classes: dict[str, tuple[str, ...]] = field(default_factory=dict, repr=False)
    """Names of the zero-shot classes by kind; empty if the data have none."""
    labels: dict[str, Int[Tensor, " n"]] = field(default_factory=dict, repr=False)
    keys: tuple[str, ...] = field(default=(), repr=False)
    """Each picture's name: the file's, or the shard's key."""
    queries: int | None = None
    """How many of a picture's captions, from the first on, are retrieval queries; None: all."""


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
    check_request(split, image_size, limit)
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
    return _load_samples(data, pairs, image_size, bad, limit, memory_limit)


def _load_emoji(data: str, split: str, image_size: int, limit: int | None) -> Captioned:
    emoji, inside = load_emoji(), emoji_of_split(split)
    keep = [inside[i] for i in limited(len(inside), limit)]
    classes = {"group": groups(), "subgroup": subgroups()}
    captions = emoji_captions()
    found = Captioned(
        name=data,
        pictures=torch.from_numpy(emoji_pictures(image_size, EMOJI_STYLES[data])[keep]),
        image_size=image_size,
        fingerprint="",
        captions=tuple(captions[i] for i in keep),
        keys=tuple(emoji[i].name for i in keep),
        labels={
            kind: torch.tensor([names.index(getattr(emoji[i], kind)) for i in keep])
            for kind, names in classes.items()
        },
        classes={kind: tuple(map(class_words, names)) for kind, names in classes.items()},
        queries=1,
    )
    return _fingerprinted(found)


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


def _fingerprinted(data: Captioned) -> Captioned:
    """The data set with its fingerprint, if there is enough of it."""
    check_enough(data.name, len(data.captions), data.skipped)
    if isinstance(data.pictures, Listing):
        digest = data.pictures.digest()
    else:
        digest = hashlib.sha256(repr(tuple(data.pictures.shape)).encode())
        digest.update(np.ascontiguousarray(data.pictures.numpy()).data)
    numbers = {kind: values.tolist() for kind, values in data.labels.items()}
    facts = [data.keys, data.captions, data.classes, numbers, data.queries]
    digest.update(json.dumps(facts).encode())
    return replace(data, fingerprint=digest.hexdigest()[:16])


def _load_samples(
    name: str, found: Samples, size: int, bad: BadSamples, limit: int | None, memory_limit: int
) -> Captioned:
    """Decode everything into memory if it fits there."""
    chosen = found.take(limited(len(found), limit))
    pictures, kept = chosen.load(size, bad, memory_limit)
    labelled = kept.labels is not None
    loaded = Captioned(
        name=name,
        pictures=pictures,
        image_size=size,
        fingerprint="",
        captions=kept.captions,
        keys=kept.keys,
        labels={"class": torch.from_numpy(kept.labels)} if labelled else {},
        classes={"class": kept.classes} if labelled else {},
        skipped=bad.messages,
    )
    return _fingerprinted(loaded)


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

        refuse_test(f"The shards {name}", "wds:PATTERN", split)
        for copy, address in copies.items():
            try:
                with fetch(address) as source, copy.open("wb") as target:
                    shutil.copyfileobj(source, target)
            except OSError as error:
                copy.unlink(missing_ok=True)
                bad.add(f"The shard {address} cannot be fetched: {error}", GO_ON)
        try:
            manifest = fetch_manifest(addresses[0])
            facts = {
                copy: manifest.get(address.rpartition("/")[2])
                for copy, address in copies.items()
                if copy.exists()
            }
            pairs = shard_pairs(facts, split, bad)
            loaded = _load_samples(name, pairs, image_size, bad, limit, memory_limit)
        except ValueError as error:
            raise ValueError(named(str(error))) from error
    if not loaded.in_memory:
        raise ValueError(
            f"The {len(loaded)} pictures of {name} take more than {memory_limit / 1e9:g} GB: "
            "download the shards and name the local files."
        )
    return replace(loaded, skipped={named(what): n for what, n in loaded.skipped.items()})
