"""Encoded pictures on disk: where each one lies, and how it becomes square RGB pixels."""

from __future__ import annotations

import hashlib
import io
import multiprocessing
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from offsphere.data.bad import GO_ON, BadSamples
from offsphere.data.emoji import on_white
from offsphere.data.splits import SPLITS
from offsphere.names import unknown
from offsphere.run.command import cores
from offsphere.run.progress import track

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from jaxtyping import Float, Int, UInt8
    from PIL.Image import Image
    from torch import Tensor

T = TypeVar("T")

# Larger sets are not kept in memory.
MEMORY_LIMIT = 4 * 10**9
# From this many on, pictures are decoded by several processes, which hand over batches of so many
# pixels (small ones: containers often have little shared memory).
MANY_PICTURES = 4096
DECODE_PIXELS = 2**19
# A picture of one row and a million columns would otherwise be resized to fill the memory.
MOST_PIXELS = 2**28
PICTURE_SUFFIXES = ("jpg", "jpeg", "jpe", "jfif", "png", "webp", "bmp", "gif", "tif", "tiff")
PICTURE_SUFFIXES += ("ppm", "pgm")
# Pictures too, but not everybody's decoder reads them: named instead of passed over.
OTHER_PICTURES = ("heic", "heif", "avif", "jp2", "jxl", "svg", "psd", "dng", "cr2", "nef")
DECODING_ERRORS = (OSError, ValueError)


@dataclass(frozen=True, eq=False)
class Listing:
    """Where each encoded picture lies: a file of its own, or a stretch of a tar shard."""

    files: tuple[Path, ...]
    file: Int[np.ndarray, " n"]
    offsets: Int[np.ndarray, " n"]
    sizes: Int[np.ndarray, " n"]
    members: tuple[str, ...]
    """Name of each picture inside the folder or shard."""

    def __len__(self) -> int:
        return len(self.members)

    def take(self, keep: Int[np.ndarray, " k"]) -> Listing:
        """Some of the pictures."""
        return replace(
            self,
            file=self.file[keep],
            offsets=self.offsets[keep],
            sizes=self.sizes[keep],
            members=tuple(self.members[i] for i in keep),
        )

    def source(self, index: int) -> str:
        """The file, or shard and member, that a picture comes from, for messages."""
        path = self.files[self.file[index]]
        return f"{path}: {self.members[index]}" if path.suffix == ".tar" else str(path)

    def read(self, index: int) -> bytes:
        """The encoded picture."""
        with self.files[self.file[index]].open("rb") as file:
            file.seek(self.offsets[index])
            return file.read(self.sizes[index])

    def digest(self) -> hashlib._Hash:
        """A hash of the pictures' names and sizes, to be fed with what belongs to them."""
        digest = hashlib.sha256("\n".join(self.members).encode())
        digest.update(np.ascontiguousarray(self.sizes, np.int64).data)
        return digest


@dataclass(frozen=True, eq=False, kw_only=True)
class Pictures:
    """Square pictures, in memory or decoded when they are asked for."""

    name: str
    pictures: UInt8[Tensor, "n 3 s s"] | Listing = field(repr=False)
    image_size: int
    """Side in pixels."""
    fingerprint: str
    """Changes when a picture (in memory a pixel, else a name or size) or its labels or texts do."""
    skipped: Mapping[str, int] = field(default_factory=dict, repr=False)
    """What was wrong with each sample or shard left out under on_bad_sample='skip', and how many
    samples it cost."""

    def __len__(self) -> int:
        return len(self.pictures)

    @property
    def in_memory(self) -> bool:
        """Whether the pixels are in memory, so that `batch` needs no worker processes."""
        return not isinstance(self.pictures, Listing)

    @property
    def pixels(self) -> UInt8[Tensor, "n 3 s s"]:
        """All pictures in order."""
        return self.batch(torch.arange(len(self)))

    def batch(self, indices: Int[Tensor, " b"]) -> UInt8[Tensor, "b 3 s s"]:
        """The pictures at these indices."""
        if isinstance(self.pictures, Listing):
            return read_pictures(self.pictures, indices, self.image_size)
        return self.pictures.index_select(0, indices)

    __getitem__ = batch  # for a DataLoader whose sampler gives several rows at a time


def check_request(split: str, image_size: int | None, limit: int | None) -> None:
    """Refuse a split, a size or a number of pictures that cannot be had of any data."""
    if split not in SPLITS:
        raise unknown("split", split, SPLITS)
    if image_size is not None and image_size < 2:
        raise ValueError(f"image_size must be at least 2 pixels, got {image_size}.")
    if limit is not None and limit < 2:
        raise ValueError(f"limit must be at least 2 images, got {limit}.")


def check_enough(name: str, count: int, skipped: Mapping[str, int]) -> None:
    """Refuse a data set of which there is nothing to contrast."""
    if count < 2:
        left_out = f" after leaving out {sum(skipped.values())} bad ones" if skipped else ""
        raise ValueError(
            f"{name} has {count} image(s) in this split{left_out}: at least 2 are needed. Parts "
            "are drawn by a hash of each name (10 % of shards and tables are for validation, of "
            "folders 70, 10 and 20 % for train, validation and test): few samples may leave one "
            "empty."
        )


def list_files(folder: Path, files: Iterable[Path], bad: BadSamples) -> tuple[Listing, list[int]]:
    """Pictures in files of their own below a folder, and which of the files these are.

    A file that is missing, empty or cannot be looked at is a bad sample.
    """
    kept, sizes, paths = [], [], []
    for index, file in enumerate(files):
        try:
            size = file.stat().st_size
        except FileNotFoundError:
            bad.add(f"{file} is missing.")
            continue
        except OSError as error:
            bad.add(f"{file} cannot be read: {error.strerror}.")
            continue
        except ValueError as error:
            bad.add(f"{str(file)!r} is no name of a file: {error}.")
            continue
        if size:
            kept.append(index)
            sizes.append(size)
            paths.append(file)
        else:
            bad.add(f"{file} is empty (0 bytes).")
    listing = Listing(
        files=tuple(paths),
        file=np.arange(len(paths)),
        offsets=np.zeros(len(paths), np.int64),
        sizes=np.array(sizes, np.int64),
        members=tuple(relative(file, folder) for file in paths),
    )
    return listing, kept


def pictures_below(folder: Path, bad: BadSamples, *, deep: bool = True) -> list[Path]:
    """The pictures in a folder and, if `deep`, in those below it, linked ones too, in sorted order.

    A folder that cannot be read, and what looks like a picture and is not read, is reported. Hidden
    files and folders (.thumbnails, and the ._ files that macOS leaves on other disks) are passed
    over.
    """
    found: list[Path] = []
    around = frozenset(map(str, Path(os.path.realpath(folder)).parents))
    waiting: list[tuple[Path, frozenset[str]]] = [(folder, around)]
    while waiting:
        here, above = waiting.pop()
        place = os.path.realpath(here)
        if place in above:  # a link to a folder that it lies in
            continue
        try:
            with os.scandir(here) as scan:
                entries = list(scan)
        except OSError as error:
            bad.add(f"The folder {here} cannot be read: {error.strerror}.", GO_ON)
            continue
        for entry in entries:
            if entry.name.startswith("."):
                continue
            path, suffix = here / entry.name, Path(entry.name).suffix[1:].lower()
            is_folder = _is_folder(entry)
            if is_folder and suffix in PICTURE_SUFFIXES:
                bad.add(f"{path} is a folder, not a picture.")
            elif is_folder and deep:
                waiting.append((path, above | {place}))
            elif suffix in OTHER_PICTURES:
                bad.add(f"{path}: {suffix} pictures are not read, convert it to jpg or png.")
            elif suffix in PICTURE_SUFFIXES and not _is_text(entry.name):
                bad.add(f"{str(path)!r}: the name is not UTF-8, rename the file.")
            elif suffix in PICTURE_SUFFIXES:
                found.append(path)
    return sorted(found)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads to itself
        return False


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def relative(file: Path, folder: Path) -> str:
    """A file's name below a folder (its whole path if it lies elsewhere), with slashes."""
    inside = file.is_relative_to(folder)
    return (file.relative_to(folder) if inside else file).as_posix()


def limited(count: int, limit: int | None) -> Int[np.ndarray, " k"]:
    """Indices of at most `limit` of `count` samples, in order: the same ones in every run."""
    if limit is None or limit >= count:
        return np.arange(count)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    return np.sort(order[:limit].numpy())


def native_size(listing: Listing) -> int:
    """Short side of the first picture that can be read."""
    for index in range(len(listing)):
        try:
            return min(decode(listing.read(index)).shape[1:])
        except DECODING_ERRORS:
            continue
    return 1


def load_pictures(
    listing: Listing, size: int, bad: BadSamples, memory_limit: int = MEMORY_LIMIT
) -> tuple[UInt8[Tensor, "k 3 s s"] | None, Int[np.ndarray, " k"]]:
    """All pixels if they fit into memory, and which pictures could be decoded.

    Pictures that do not fit into memory are decoded here only to find the bad ones to skip.
    """
    if len(listing) * 3 * size * size <= memory_limit:
        pixels = torch.empty((len(listing), 3, size, size), dtype=torch.uint8)
        keep = _readable(listing, size, bad, pixels)
        return pixels if len(keep) == len(listing) else pixels[torch.from_numpy(keep)], keep
    keep = _readable(listing, size, bad) if bad.skip else np.arange(len(listing))
    return None, keep


def _readable(
    listing: Listing, size: int, bad: BadSamples, out: UInt8[Tensor, "n 3 s s"] | None = None
) -> Int[np.ndarray, " k"]:
    """Decode every picture, into `out` if given, and tell which could be decoded."""
    keep = np.ones(len(listing), bool)
    batches = _decoded(listing, size)
    for indices, pictures, problems in track(batches, len(batches), "decoding pictures"):
        for index, problem in problems:
            bad.add(problem)
            keep[index] = False
        if out is not None:
            out[indices] = pictures
    return np.flatnonzero(keep)


Decoded = tuple[list[int], "UInt8[Tensor, 'b 3 s s']", list[tuple[int, str]]]


@dataclass(frozen=True, eq=False)
class _Attempts(torch.utils.data.Dataset):
    """Decodes batches in worker processes; what cannot be decoded comes back as a message."""

    listing: Listing
    size: int

    def __len__(self) -> int:
        return len(self.listing)

    def __getitems__(self, indices: list[int]) -> Decoded:
        pictures = torch.zeros((len(indices), 3, self.size, self.size), dtype=torch.uint8)
        problems = []
        for row, index in enumerate(indices):
            try:
                pictures[row] = read_picture(self.listing, index, self.size)
            except ValueError as error:
                problems.append((index, str(error)))
        return indices, pictures, problems


def _decoded(listing: Listing, size: int) -> torch.utils.data.DataLoader[Decoded]:
    """All pictures in batches, by one process per core when there are many."""
    # A daemonic process, as a pool's worker is, may not start processes of its own.
    alone = len(listing) < MANY_PICTURES or multiprocessing.current_process().daemon
    return torch.utils.data.DataLoader(
        _Attempts(listing, size),
        batch_size=max(1, min(512, DECODE_PIXELS // size**2)),
        num_workers=0 if alone else min(cores(), 8),
        collate_fn=as_it_is,
        # Its own generator: a DataLoader otherwise draws from the global stream.
        generator=torch.Generator(),
    )


def as_it_is(batch: T) -> T:
    """The batch itself: the collate function for data sets that give whole batches."""
    return batch


def read_pictures(
    listing: Listing, indices: Int[Tensor, " b"], size: int
) -> UInt8[Tensor, "b 3 size size"]:
    """Read and decode the pictures at these indices."""
    out = torch.empty((len(indices), 3, size, size), dtype=torch.uint8)
    for row, index in enumerate(indices.tolist()):
        out[row] = read_picture(listing, index, size)
    return out


def read_picture(listing: Listing, index: int, size: int) -> UInt8[Tensor, "3 size size"]:
    """Read, decode, resize and centre-crop one picture; an error names its place."""
    try:
        return square(listing.read(index), size)
    except DECODING_ERRORS as error:
        raise ValueError(f"{listing.source(index)} cannot be decoded: {error}.") from error


def square(content: bytes, size: int) -> UInt8[Tensor, "3 size size"]:
    """Decode, resize and centre-crop one encoded picture."""
    return resize_square(decode(content)[None], size)[0]


def decode(content: bytes) -> UInt8[Tensor, "3 h w"]:
    """The RGB pixels of an encoded picture; transparent parts become white."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(content)) as picture:
            return to_pixels(picture)
    except UnidentifiedImageError:
        raise ValueError("it is no picture of a known kind") from None
    except Exception as error:  # a decoder raises anything at all on damaged or hostile bytes
        raise ValueError(f"{error}".rstrip(".") or type(error).__name__) from error


def to_pixels(picture: Image) -> UInt8[Tensor, "3 h w"]:
    """The RGB pixels of an opened picture; transparent parts become white."""
    return torch.from_numpy(np.array(_to_rgb(picture))).permute(2, 0, 1)


def _to_rgb(picture: Image) -> Image:
    if picture.mode == "RGB":
        return picture
    if picture.mode == "F":
        raise ValueError("its pixels are fractions of an unknown range, convert it to 8 bits")
    if picture.mode.startswith("I"):
        from PIL import Image

        values = np.asarray(picture)
        if values.min() < 0 or values.max() > 65535:
            raise ValueError("its pixels do not fit into 16 bits, convert it to 8 or 16 bits")
        picture = Image.fromarray((values // 256).astype(np.uint8))
    if "A" in picture.mode.upper() or "transparency" in picture.info:
        return on_white(picture)
    return picture.convert("RGB")


def resize_square(
    pixels: UInt8[Tensor, "n 3 h w"], size: int | None
) -> UInt8[Tensor, "n 3 size size"]:
    """Resize so that the short side is `size` (default: as it is), and crop the centre.

    The sides are rounded as torchvision's Resize and CenterCrop round them, which is what open_clip
    does to a picture: a run and its export see the same pixels.
    """
    height, width = pixels.shape[2:]
    size = size or min(height, width)
    if height == width == size or not len(pixels):
        return pixels
    short = min(height, width)
    if short != size:
        shape = (int(size * height / short), int(size * width / short))
        if shape[0] * shape[1] > MOST_PIXELS:
            raise ValueError(f"{width} x {height} pixels are too narrow for a square of {size}")
        pixels = torch.cat([_resize(chunk, shape) for chunk in pixels.split(4096)])
        height, width = shape
    top, left = round((height - size) / 2), round((width - size) / 2)
    return pixels[:, :, top : top + size, left : left + size].contiguous()


def _resize(
    pixels: UInt8[Tensor, "n 3 h w"], shape: tuple[int, int]
) -> UInt8[Tensor, "n 3 height width"]:
    return torch.nn.functional.interpolate(
        pixels, shape, mode="bilinear", antialias=True, align_corners=False
    )


def normalised(
    pixels: UInt8[Tensor, "n 3 h w"], mean: Sequence[float], std: Sequence[float]
) -> Float[Tensor, "n 3 h w"]:
    """Bytes as floats, normalised per channel; mean and std are those of values from 0 to 1."""
    centre, spread = (
        torch.tensor(x, device=pixels.device)[:, None, None] * 255 for x in (mean, std)
    )
    return (pixels.float() - centre) / spread


def square_pixels(images: Iterable[Any], size: int, name: str) -> UInt8[Tensor, "n 3 size size"]:
    """Images in memory: PIL pictures, or (3, h, w) bytes as tensors or arrays."""
    from PIL.Image import Image

    squares = []
    for row, image in enumerate(images):
        pixels = to_pixels(image) if isinstance(image, Image) else torch.as_tensor(image)
        if pixels.ndim != 3 or pixels.shape[0] != 3 or pixels.dtype != torch.uint8:
            raise ValueError(
                f"Image {row} of the handed data {name}: expected a PIL picture or (3, h, w) bytes "
                f"from 0 to 255, got {tuple(pixels.shape)} of {pixels.dtype}."
            )
        squares.append(resize_square(pixels[None], size))
    if len(squares) < 2:
        raise ValueError(f"A split of the handed data {name} has fewer than 2 images.")
    return torch.cat(squares)
