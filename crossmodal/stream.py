"""Image-text pairs from shards behind addresses, which can only be read in order."""

from __future__ import annotations

import hashlib
import json
import random
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, TypeVar

import torch

from crossmodal.sources import captions_of, is_complete
from offsphere.data.bad import BadSamples
from offsphere.data.pictures import DECODING_ERRORS, as_it_is, square
from offsphere.data.samples import SampleError
from offsphere.data.shards import (
    END_MARK,
    IMAGE_SUFFIXES,
    MANIFEST,
    WRONG_SUM,
    ShardFacts,
    fetch_manifest,
    is_lost,
    is_streamed,
    key_and_suffix,
    kind_of,
    no_suffix,
    shard_addresses,
)
from offsphere.data.splits import hash_share
from offsphere.run.addresses import fetch, keep_secret, public

if TYPE_CHECKING:
    from jaxtyping import UInt8
    from torch import Tensor

T = TypeVar("T")
# Encoded samples that each worker holds to mix them, and decoded ones that it hands over at once.
SHUFFLE_BUFFER = 1000
CHUNK = 32
# So many keys of an epoch are compared (about 1 GB of memory); what comes after is not.
KEYS_REMEMBERED = 10**7


class Problem(NamedTuple):
    """What was wrong with a streamed shard or sample."""

    message: str


class Chunk(NamedTuple):
    """Decoded samples that a worker hands over."""

    pixels: UInt8[Tensor, "k 3 s s"] | None
    """None where a resume drops the samples anyway."""
    captions: list[str]
    keys: list[str]
    problems: list[str]
    seen: int
    """Samples that were read, bad ones too."""


@dataclass(frozen=True, eq=False)
class StreamedPairs:
    """Batches from shards that can only be read in order.

    An epoch's order is a function of (seed, epoch, workers), and holds every sample once. A shard
    that is cut, missing or of another length than the manifest says is named when it is read.
    """

    name: str
    addresses: tuple[str, ...] = field(repr=False)
    facts: Mapping[str, ShardFacts] = field(repr=False)
    """What the manifest says of each address; empty if there is none."""
    samples_per_epoch: int
    image_size: int
    batch_size: int
    seed: int
    workers: int
    bad: BadSamples = field(repr=False)

    def __len__(self) -> int:
        return self.samples_per_epoch

    @property
    def fingerprint(self) -> str:
        """Changes when an address or a line of the manifest does."""
        content = [self.addresses, self.facts, self.samples_per_epoch]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]

    @property
    def skipped(self) -> dict[str, int]:
        """What was wrong with each shard or sample left out so far, and how many it cost."""
        return self.bad.messages

    def from_step(
        self, start: int, total: int
    ) -> Iterator[tuple[UInt8[Tensor, "b 3 s s"], list[str]]]:
        """The batches of the steps `start` to `total` - 1: the epochs, laid end to end, cut up."""
        epoch, drop = self._position(start * self.batch_size)
        pixels: list[Tensor] = []
        captions: list[str] = []
        while start < total:
            for chunk in self._epoch(epoch, drop):
                dropped = min(drop, len(chunk.captions))
                drop -= dropped
                captions += chunk.captions[dropped:]
                if chunk.pixels is not None:
                    pixels.append(chunk.pixels[dropped:])
                while len(captions) >= self.batch_size and start < total:
                    joined = torch.cat(pixels)
                    yield joined[: self.batch_size], captions[: self.batch_size]
                    pixels, captions = [joined[self.batch_size :]], captions[self.batch_size :]
                    start += 1
                if start == total:
                    return
            epoch += 1

    def _position(self, samples: int) -> tuple[int, int]:
        """The epoch that so many samples lead into, and how many of them lie in that epoch.

        How many good samples an epoch has is not known where bad ones are left out: there,
        everything is read again from the first epoch on.
        """
        epoch = 0
        while not self.bad.skip and samples >= (size := self._epoch_size(epoch)):
            epoch, samples = epoch + 1, samples - size
        return epoch, samples

    def _epoch_size(self, epoch: int) -> int:
        """Samples of an epoch in this process, which shares the shards with the other ranks."""
        from webdataset.utils import pytorch_worker_info

        rank, world, *_ = pytorch_worker_info()
        if world == 1:
            return self.samples_per_epoch
        return sum(self.facts[shard].samples for shard in self.shards_of(epoch, rank, world))

    def shards_of(self, epoch: int, rank: int, world: int) -> Iterator[str]:
        """The shards that a rank reads in an epoch, in their order."""
        mixed = _mixed(self.addresses, len(self.addresses), f"{self.seed}-shards-{epoch}")
        return islice(mixed, rank, None, world)

    def _epoch(self, epoch: int, drop: int) -> Iterator[Chunk]:
        """The chunks of one epoch, after which its length is checked."""
        seen, known = 0, set[str]()
        for chunk in self._loader(epoch, 0 if self.bad.skip else drop):
            for problem in chunk.problems:
                self._report(problem)
            seen += chunk.seen
            yield self._without_known(chunk, known)
        expected = self._epoch_size(epoch)
        if not self.facts and seen != expected:
            self._report(
                f"{self.name} gave {seen} samples in an epoch, but {expected} were expected."
            )
        if not seen:
            raise ValueError(f"{self.name} gave no samples: look at the shards.")

    def _report(self, problem: str) -> None:
        """Report a problem once, not in every epoch."""
        if problem not in self.bad.messages:
            self.bad.add(problem)

    def _without_known(self, chunk: Chunk, known: set[str]) -> Chunk:
        """The chunk without samples whose key an earlier shard of this epoch had."""
        if len(known) > KEYS_REMEMBERED:
            return chunk
        new = [row for row, key in enumerate(chunk.keys) if key not in known]
        if len(new) < len(chunk.keys):
            for key in sorted(known.intersection(chunk.keys)):
                self._report(f"{self.name}: two samples have the key {key!r}, in two shards.")
            pixels = None if chunk.pixels is None else chunk.pixels[new]
            captions = [chunk.captions[row] for row in new]
            keys = [chunk.keys[row] for row in new]
            chunk = Chunk(pixels, captions, keys, chunk.problems, chunk.seen)
        known.update(chunk.keys)
        return chunk

    def _loader(self, epoch: int, undecoded: int) -> Iterable[Chunk]:
        return torch.utils.data.DataLoader(
            _Epoch(self, epoch, undecoded),
            batch_size=None,
            num_workers=self.workers,
            collate_fn=as_it_is,
            # Its own generator: a DataLoader otherwise draws from the global stream.
            generator=torch.Generator(),
        )


def stream_pairs(
    data: str,
    *,
    image_size: int,
    batch_size: int,
    seed: int,
    workers: int = 0,
    train_samples: int | None = None,
    allow_pipe: bool = False,
    on_bad_sample: str = "error",
) -> StreamedPairs:
    """Open `wds:` addresses for training; what can be wrong is checked before the first step."""
    from webdataset.utils import pytorch_worker_info

    pattern = keep_secret(data.removeprefix("wds:"))
    data = f"wds:{pattern}"
    if not is_streamed(pattern):
        raise ValueError(f"{data!r} names local shards: they are read by offset, not streamed.")
    bad = BadSamples(on_bad_sample)
    addresses = shard_addresses(pattern, allow_pipe=allow_pipe)
    manifest = fetch_manifest(addresses[0])
    facts = _facts(data, addresses, manifest) if manifest else {}
    _, world, *_ = pytorch_worker_info()
    if max(workers, 1) * world > len(addresses):
        raise ValueError(
            f"{data} has {len(addresses)} shard(s) for {world} process(es) with {workers} "
            f"worker(s) each: streamed shards cannot be shared. Use at most "
            f"--workers={len(addresses) // world}, or make smaller shards."
        )
    if world > 1 and not facts:
        raise ValueError(
            f"{data} is read by {world} processes: the length of an epoch can only be checked "
            f"with a {MANIFEST} beside the shards."
        )
    samples = _samples_per_epoch(data, facts, train_samples)
    _check_first(addresses[0], image_size)
    return StreamedPairs(
        data, addresses, facts, samples, image_size, batch_size, seed, workers, bad
    )


def _facts(
    data: str, addresses: Sequence[str], manifest: Mapping[str, ShardFacts]
) -> dict[str, ShardFacts]:
    """What the manifest says of each address."""
    names = {address: address.rpartition("/")[2] for address in addresses}
    unlisted = [name for name in names.values() if name not in manifest]
    if unlisted:
        raise ValueError(
            f"The {MANIFEST} beside {data} does not list {unlisted[0]} ({len(unlisted)} shards "
            "are not in it): correct the pattern, or make the manifest anew."
        )
    return {address: manifest[name] for address, name in names.items()}


def _samples_per_epoch(
    data: str, facts: Mapping[str, ShardFacts], train_samples: int | None
) -> int:
    listed = sum(shard.samples for shard in facts.values())
    if not facts and train_samples is None:
        raise ValueError(
            f"How many samples {data} holds is not known: there is no {MANIFEST} beside the "
            "shards. Pass --train-samples=N, or put the manifest there."
        )
    if facts and train_samples not in (None, listed):
        raise ValueError(
            f"--train-samples={train_samples}, but the {MANIFEST} of {data} counts {listed}: "
            "leave the flag out, or correct it."
        )
    samples = listed if train_samples is None else train_samples
    if samples < 2:
        raise ValueError(f"{data} has {samples} sample(s): at least 2 are needed.")
    return samples


def _check_first(address: str, image_size: int) -> None:
    """Read one sample, so that shards of a wrong layout are refused before training."""
    first = next(read_stream(address, None), None)
    if first is None:
        raise ValueError(f"The shard {address} holds no samples.")
    if not isinstance(first, Problem):
        first = _decode_sample(first, image_size)
    if isinstance(first, Problem):
        raise ValueError(first.message)


Sample = dict[str, Any]
"""A sample as webdataset groups it: members by suffix, beside __key__ and __url__."""


def read_stream(address: str, facts: ShardFacts | None) -> Iterator[Sample | Problem]:
    """The samples of one streamed shard, then what was wrong with it."""
    problems: list[Problem] = []
    keys: set[str] = set()
    reason = None
    try:
        for sample in _whole_samples(address, problems, facts):
            if sample["__key__"] in keys:
                problems.append(
                    Problem(f"{address}: two samples have the key {sample['__key__']!r}.")
                )
            else:
                keys.add(sample["__key__"])
                yield sample
    except (OSError, tarfile.TarError) as error:
        reason = public(str(error)).rstrip(".")
    yield from problems
    expected = "" if facts is None else f" of {facts.samples}"
    if reason is not None:
        yield Problem(
            f"The shard {address} cannot be read to its end ({reason}): "
            f"{len(keys)}{expected} samples came."
        )
    elif facts is not None and len(keys) != facts.samples:
        yield Problem(
            f"The shard {address} holds {len(keys)} samples, but {MANIFEST} says {facts.samples}."
        )
    elif not keys and not problems:
        yield Problem(f"The shard {address} holds no samples.")


def _whole_samples(
    address: str, problems: list[Problem], facts: ShardFacts | None
) -> Iterator[Sample]:
    """The samples of a streamed tar; one without its end mark raises after the last whole one."""
    from webdataset.tariterators import group_by_keys, tar_file_iterator

    def note(error: Exception) -> bool:
        problems.append(Problem(f"{address}: {error.args[0]}."))
        return True

    failures: list[Exception] = []

    def files(stream: _Tail) -> Iterator[dict[str, Any]]:
        try:
            for file in tar_file_iterator(stream):  # pyright: ignore[reportArgumentType]
                if key_and_suffix(file["fname"]) is None and is_lost(file["fname"]):
                    problems.append(Problem(f"{address}: {no_suffix(file['fname'])}"))
                yield {**file, "__url__": address}
            if not stream.ends_whole():
                failures.append(tarfile.ReadError("it has no end-of-archive mark"))
            elif facts is not None and facts.sha256 not in (None, stream.digest.hexdigest()):
                problems.append(Problem(f"The shard {address} has {WRONG_SUM}."))
        except (OSError, tarfile.TarError) as error:
            failures.append(error)

    with fetch(address) as source:
        last = None
        for sample in group_by_keys(files(_Tail(source)), keys=_divided, handler=note):
            if last is not None:
                yield last
            last = sample
        if last is not None and (not failures or is_complete(_by_kind(last))):
            yield last
        if failures:
            raise failures[0]


def _divided(name: str) -> tuple[str, str] | tuple[None, None]:
    return key_and_suffix(name) or (None, None)


class _Tail:
    """A stream that remembers its last bytes, which a tar's end mark should be, and their hash."""

    def __init__(self, source: BinaryIO) -> None:
        self.source, self.tail, self.digest = source, b"", hashlib.sha256()

    def read(self, size: int) -> bytes:
        content = self.source.read(size)
        self.tail = (self.tail + content)[-len(END_MARK) :]
        self.digest.update(content)
        return content

    def ends_whole(self) -> bool:
        """Read to the end, and tell whether the end mark stands there."""
        while self.read(2**20):
            pass
        return self.tail == END_MARK


def _by_kind(sample: Sample) -> dict[str, bytes]:
    return {kind_of(name): value for name, value in sample.items() if not name.startswith("__")}


class Decoded(NamedTuple):
    """One sample with all its captions."""

    key: str
    picture: UInt8[Tensor, "3 s s"]
    captions: tuple[str, ...]


def _decode_sample(sample: Sample, image_size: int) -> Decoded | Problem:
    """The picture and all captions of a sample, or what is wrong with it."""
    place, parts = f"{sample['__url__']}: {sample['__key__']}", _by_kind(sample)
    try:
        captions = captions_of(parts)
    except SampleError as error:
        return Problem(f"{place} {error}")
    if not parts.get("image"):
        what = "an empty image" if "image" in parts else f"no image ({', '.join(IMAGE_SUFFIXES)})"
        return Problem(f"{place} has {what}.")
    try:
        return Decoded(sample["__key__"], square(parts["image"], image_size), captions)
    except DECODING_ERRORS as error:
        return Problem(f"{place} cannot be decoded: {error}.")


@dataclass(frozen=True, eq=False)
class _Epoch(torch.utils.data.IterableDataset):
    """One epoch as a process and its worker see it: chunks of decoded samples, well mixed."""

    pairs: StreamedPairs
    epoch: int
    undecoded: int
    """So many samples from the epoch's start on are dropped: they need not be decoded."""

    def __iter__(self) -> Iterator[Chunk]:
        from webdataset.utils import pytorch_worker_info

        rank, world, worker, workers = pytorch_worker_info()
        mine = islice(self.pairs.shards_of(self.epoch, rank, world), worker, None, workers)
        facts = self.pairs.facts
        samples = (found for shard in mine for found in read_stream(shard, facts.get(shard)))
        mixed = _mixed(samples, SHUFFLE_BUFFER, f"{self.pairs.seed}-samples-{self.epoch}")
        number = 0
        while items := list(islice(mixed, CHUNK)):
            # Chunks come from the workers in turn, so this one ends here at the latest.
            end = (number * workers + worker + 1) * CHUNK
            yield self.skip(items) if end <= self.undecoded else self.decode(items)
            number += 1

    def skip(self, items: Sequence[Sample | Problem]) -> Chunk:
        """A chunk that is only counted."""
        problems = [item.message for item in items if isinstance(item, Problem)]
        keys = [item["__key__"] for item in items if not isinstance(item, Problem)]
        return Chunk(None, [""] * len(keys), keys, problems, len(keys))

    def decode(self, items: Sequence[Sample | Problem]) -> Chunk:
        """A chunk with its pictures, each with one caption of the epoch's."""
        size = self.pairs.image_size
        decoded = [x if isinstance(x, Problem) else _decode_sample(x, size) for x in items]
        good = [sample for sample in decoded if not isinstance(sample, Problem)]
        nothing = torch.empty((0, 3, size, size), dtype=torch.uint8)
        return Chunk(
            torch.stack([sample.picture for sample in good]) if good else nothing,
            [self.choose(sample.key, sample.captions) for sample in good],
            [sample.key for sample in good],
            [sample.message for sample in decoded if isinstance(sample, Problem)],
            sum(not isinstance(item, Problem) for item in items),
        )

    def choose(self, key: str, captions: Sequence[str]) -> str:
        """A sample's caption in this epoch, whatever the order and the workers."""
        share = hash_share(f"{self.pairs.seed}/caption/{self.epoch}/{key}")
        return captions[int(share * len(captions))]


def _mixed(source: Iterable[T], buffer: int, seed: str) -> Iterator[T]:
    """The items, mixed through a buffer that is full before the first one leaves it."""
    from webdataset.filters import shuffle

    return iter(shuffle(buffer, initial=buffer, rng=random.Random(seed))(iter(source)))
