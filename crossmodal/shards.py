"""Make tar shards of image-text pairs.

    offsphere shards make --source=folder:flickr8k --split=train --out=shards/train
    offsphere shards make --source=csv:pairs.tsv --out=shards/pairs --shard-size=10000

The encoded pictures are copied as they are. Beside each, a txt member holds its first caption, as
open_clip and img2dataset have it, and a json member all of them. manifest.json says what each shard
holds.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from offsphere.data.bad import BadSamples
from offsphere.data.shards import IMAGE_SUFFIXES, ShardFacts, checksum, write_manifest
from offsphere.data.splits import hash_share
from offsphere.run.command import one_line_errors
from offsphere.run.config import parse
from offsphere.run.files import whole_folder
from offsphere.run.progress import speaking, track
from offsphere.run.record import write_json
from offsphere.training.settings import check_setting

if TYPE_CHECKING:
    from offsphere.data.samples import Samples


@dataclass(frozen=True)
class Config:
    source: str
    """What to read: folder:PATH (like Flickr8k's) or csv:FILE."""
    out: str
    """The folder to make; it must not be there yet."""
    shard_size: int = 1000
    """Samples per shard."""
    split: Literal["train", "validation", "test", "train+validation", "all"] = "all"
    """Which part of the source to write."""
    name: str | None = None
    """What the shards are called, before their number; default: the split."""
    shuffle: bool = False
    """Write the samples in the order of a hash of their keys, for shards that are streamed."""
    on_bad_sample: Literal["error", "skip"] = "error"
    """Stop at a sample that cannot be read, or leave it out and count it."""

    def __post_init__(self) -> None:
        check_setting(self, "shard_size", "at least 1", self.shard_size >= 1)
        if not self.source.startswith(("folder:", "csv:")):
            raise ValueError(f"--source must be folder:PATH or csv:FILE, got {self.source!r}.")
        if self.name is not None and (not self.name or "/" in self.name):
            raise ValueError(f"--name must be a file name without '/', got {self.name!r}.")


def main(argv: Sequence[str] | None = None) -> None:
    """The command `offsphere shards make`."""
    with one_line_errors("shards make", "Nothing was written."), speaking():
        config = parse(Config, argv, description=__doc__)
        summary = run(config)
        skipped = f", {summary['skipped']} bad samples left out" if summary["skipped"] else ""
        print(
            f"{summary['samples']:,} samples in {summary['shards']} shards, "
            f"{summary['bytes']:,} bytes{skipped}.\n"
            f"Read them with --data={summary['data']}"
        )


def run(config: Config) -> dict[str, Any]:
    """Write shards and manifest, all of them or nothing, and tell how much there is."""
    from crossmodal.sources import list_pairs

    out = Path(config.out)
    if out.exists():
        raise FileExistsError(f"{out} is there already: remove it, or choose another --out.")
    bad = BadSamples(config.on_bad_sample)
    pairs = list_pairs(config.source, config.split, bad)
    keys = _shard_keys(pairs.keys)
    order = range(len(pairs))
    order = sorted(order, key=lambda i: hash_share(keys[i])) if config.shuffle else order
    name = config.name or config.split
    with whole_folder(out) as folder:
        samples = _encoded(pairs, keys, order, bad)
        shards = write_shards(folder, name, samples, config.shard_size)
        if not shards:
            raise ValueError(f"{config.source} has no samples in the split {config.split}.")
        write_manifest(folder, shards)
        # open_clip's name for the number of samples of each shard.
        write_json(folder / "sizes.json", {name: f.samples for name, f in shards.items()})
    numbers = f"{{000000..{len(shards) - 1:06d}}}" if len(shards) > 1 else "000000"
    return {
        "shards": len(shards),
        "samples": sum(facts.samples for facts in shards.values()),
        "bytes": sum(facts.bytes or 0 for facts in shards.values()),
        "skipped": bad.count,
        "data": f"wds:{out}/{name}-{numbers}.tar",
    }


class Encoded(NamedTuple):
    """One sample as it is written into a shard."""

    key: str
    suffix: str
    image: bytes
    captions: tuple[str, ...]


def _shard_keys(names: Sequence[str]) -> list[str]:
    """A key for each picture: its name without suffix, and without the dots that end a key."""
    keys: dict[str, str] = {}
    for name in names:
        path = PurePosixPath(name.lstrip("/"))
        parts = [part for part in path.with_suffix("").parts if part != ".."]
        key = "/".join(parts).replace(".", "_")
        if key in keys:
            raise ValueError(
                f"The pictures {keys[key]} and {name} would both have the key {key!r} in a shard: "
                "rename one of them."
            )
        keys[key] = name
    return list(keys)


def _encoded(
    pairs: Samples, keys: Sequence[str], order: Iterable[int], bad: BadSamples
) -> Iterator[Encoded]:
    """The samples that can be decoded."""
    from offsphere.data.pictures import DECODING_ERRORS, decode

    for i in track(order, len(keys), "writing shards", unit="pictures"):
        suffix = PurePosixPath(pairs.keys[i]).suffix[1:].lower()
        if suffix not in IMAGE_SUFFIXES:
            expected = ", ".join(IMAGE_SUFFIXES)
            bad.add(f"{pairs.listing.source(i)}: shards hold {expected} pictures only.")
            continue
        content = pairs.listing.read(i)
        try:
            decode(content)
        except DECODING_ERRORS as error:
            bad.add(f"{pairs.listing.source(i)} cannot be decoded: {error}.")
            continue
        yield Encoded(keys[i], suffix, content, pairs.captions[i])


def write_shards(
    folder: Path, name: str, samples: Iterable[Encoded], shard_size: int
) -> dict[str, ShardFacts]:
    """Write samples into numbered tars; equal samples give equal bytes."""
    shards: dict[str, ShardFacts] = {}
    samples = iter(samples)
    while members := list(islice(samples, shard_size)):
        file = folder / f"{name}-{len(shards):06d}.tar"
        with tarfile.open(file, "w") as archive:
            for sample in members:
                _add(archive, f"{sample.key}.{sample.suffix}", sample.image)
                first = sample.captions[0]
                _add(archive, f"{sample.key}.txt", first.encode())
                text = {"caption": first, "captions": sample.captions}
                content = json.dumps(text, ensure_ascii=False).encode()
                _add(archive, f"{sample.key}.json", content)
        shards[file.name] = ShardFacts(len(members), file.stat().st_size, checksum(file))
    return shards


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    archive.addfile(info, io.BytesIO(content))


if __name__ == "__main__":
    main()
