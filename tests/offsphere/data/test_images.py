"""Every kind of image data: what is loaded, how it is split, and what is said of bad input."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from samples import bomb, damaged_tiff, encoded, random_picture, write_tar
from torchvision import datasets
from torchvision.transforms import v2 as transforms

from offsphere.data import emoji as emoji_module
from offsphere.data import images as images_module
from offsphere.data import pictures as pictures_module
from offsphere.data.emoji import emoji_pictures, load_emoji
from offsphere.data.images import Images, ImageSplits, load_images
from offsphere.data.pictures import decode, resize_square
from offsphere.data.shards import ShardFacts, checksum, shard_paths, write_manifest
from offsphere.data.splits import SPLITS, in_validation, split_of
from offsphere.training.images import load_splits
from offsphere.training.settings import ImageSettings


def write_folder(folder: Path, classes: tuple[str, ...], per_class: int) -> list[tuple[str, int]]:
    """A folder of class folders; the relative names and labels in sorted order."""
    listed = []
    for label, name in enumerate(sorted(classes)):
        (folder / name).mkdir(parents=True)
        for index in range(per_class):
            file = folder / name / f"{index:03d}.png"
            file.write_bytes(encoded(random_picture(label * 1000 + index)))
            listed.append((f"{name}/{index:03d}.png", label))
    return listed


def sample_members(start: int, stop: int, kind: str = "png") -> list[tuple[str, bytes]]:
    members = []
    for i in range(start, stop):
        members.append((f"s{i:04d}.{kind}", encoded(random_picture(i), kind)))
        members.append((f"s{i:04d}.cls", str(i % 3).encode()))
    return members


def in_memory(data: str, **named) -> Images:
    images = load_images(data, **named)
    assert isinstance(images, Images)
    return images


@pytest.fixture
def shards(tmp_path: Path) -> str:
    """Thirty samples in three shards."""
    for number in range(3):
        write_tar(
            tmp_path / f"train-{number:06d}.tar", sample_members(number * 10, number * 10 + 10)
        )
    return f"wds:{tmp_path}/train-{{000000..000002}}.tar"


@pytest.fixture
def few_emoji(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple:
    """Every fortieth emoji, cached in a directory of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    some = load_emoji()[::40]
    monkeypatch.setattr(emoji_module, "load_emoji", lambda: some)
    monkeypatch.setattr(images_module, "load_emoji", lambda: some)
    return some


@pytest.mark.parametrize("data", ["emoji", "openmoji", "emoji:subgroup"])
def test_emoji_splits_are_disjoint_and_labelled(data: str, few_emoji: tuple) -> None:
    style = "openmoji" if data == "openmoji" else "twemoji"
    pictures = torch.from_numpy(emoji_pictures(12, style))
    label = "subgroup" if data.endswith("subgroup") else "group"
    for split in ("train", "validation", "test"):
        images = in_memory(data, split=split, image_size=12)
        keep = [i for i, e in enumerate(few_emoji) if split_of(e.base) == split]
        assert torch.equal(images.pixels, pictures[keep])
        names = [images.classes[label] for label in images.labels.tolist()]
        assert names == [getattr(few_emoji[i], label) for i in keep]
    everything = in_memory(data, split="all", image_size=12)
    assert torch.equal(everything.pixels, pictures)


def test_emoji_label_is_checked(few_emoji: tuple) -> None:
    with pytest.raises(ValueError, match="Did you mean 'subgroup'"):
        load_images("emoji:subgroups", split="train", image_size=8)


def write_idx(path: Path, array: np.ndarray) -> None:
    header = struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    path.write_bytes(header + array.astype(np.uint8).tobytes())


@pytest.mark.parametrize(
    ("data", "folder"), [("mnist", "MNIST"), ("fashion-mnist", "FashionMNIST")]
)
def test_mnist_files_are_read_as_three_channels(data: str, folder: str, tmp_path: Path) -> None:
    raw = tmp_path / folder / "raw"
    raw.mkdir(parents=True)
    rng = np.random.default_rng(0)
    pixels = {part: rng.integers(0, 256, (n, 28, 28)) for part, n in (("train", 40), ("t10k", 7))}
    for part, values in pixels.items():
        write_idx(raw / f"{part}-images-idx3-ubyte", values)
        write_idx(raw / f"{part}-labels-idx1-ubyte", np.arange(len(values)) % 10)
    test = in_memory(data, split="test", root=tmp_path)
    assert test.pixels.shape == (7, 3, 28, 28)
    assert np.array_equal(test.pixels[:, 1].numpy(), pixels["t10k"])
    assert test.labels.tolist() == list(range(7))
    assert len(test.classes) == 10
    train = in_memory(data, split="train", root=tmp_path)
    validation = in_memory(data, split="validation", root=tmp_path)
    carved = [in_validation(str(i)) for i in range(40)]
    assert np.array_equal(train.pixels[:, 0].numpy(), pixels["train"][~np.array(carved)])
    assert np.array_equal(validation.pixels[:, 0].numpy(), pixels["train"][np.array(carved)])
    resized = in_memory(data, split="test", root=tmp_path, image_size=14)
    assert resized.pixels.shape == (7, 3, 14, 14)


def test_cifar10_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    rows = np.random.default_rng(0).integers(0, 256, (6, 3072), dtype=np.uint8)
    batch = {"data": rows, "labels": [3, 1, 4, 1, 5, 9]}
    (folder / "test_batch").write_bytes(pickle.dumps(batch))
    meta = {"label_names": [f"class {i}" for i in range(10)]}
    (folder / "batches.meta").write_bytes(pickle.dumps(meta))
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    images = in_memory("cifar10", split="test", root=tmp_path)
    assert np.array_equal(images.pixels.numpy(), rows.reshape(6, 3, 32, 32))
    assert images.labels.tolist() == batch["labels"]
    assert images.classes == tuple(meta["label_names"])


@pytest.mark.parametrize("data", images_module.TORCHVISION_FILES)
def test_missing_torchvision_files_are_explained(data: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        load_images(data, split="train", root=tmp_path)
    for part in (images_module.TORCHVISION_FILES[data], str(tmp_path), "--download", "emoji"):
        assert part in str(caught.value)


def test_failed_download_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(self: object) -> None:
        raise OSError("Network is unreachable")

    monkeypatch.setattr(datasets.CIFAR10, "download", offline)
    with pytest.raises(FileNotFoundError, match=r"could not be downloaded \(Network is unreach"):
        load_images("cifar10", split="train", root=tmp_path, download=True)


def test_folder_without_splits_is_divided_by_a_hash(tmp_path: Path) -> None:
    listed = write_folder(tmp_path, ("dog", "cat"), 30)
    found: list[int] = []
    for split in ("train", "validation", "test"):
        images = in_memory(f"folder:{tmp_path}", split=split)
        keep = [i for i, (name, _) in enumerate(listed) if emoji_module.split_of(name) == split]
        assert images.labels.tolist() == [listed[i][1] for i in keep]
        expected = [random_picture(listed[i][1] * 1000 + int(listed[i][0][4:7])) for i in keep]
        assert torch.equal(images.pixels, torch.stack(expected))
        assert images.classes == ("cat", "dog")
        found += keep
    assert sorted(found) == list(range(60))
    assert len(in_memory(f"folder:{tmp_path}", split="all")) == 60


def test_folder_with_three_splits_uses_them(tmp_path: Path) -> None:
    for part, count in (("train", 6), ("val", 3), ("test", 2)):
        write_folder(tmp_path / part, ("a", "b"), count)
    sizes = {split: len(in_memory(f"folder:{tmp_path}", split=split)) for split in SPLITS}
    assert sizes == {
        "train": 12,
        "validation": 6,
        "test": 4,
        "train+validation": 18,
        "all": 22,
    }


def test_folder_in_imagenet_layout_tests_on_val_and_carves_validation(tmp_path: Path) -> None:
    write_folder(tmp_path / "train", ("a", "b"), 40)
    write_folder(tmp_path / "val", ("a", "b"), 3)
    carved = sum(in_validation(f"train/{c}/{i:03d}.png") for c in "ab" for i in range(40))
    assert carved > 1
    data = f"folder:{tmp_path}"
    assert len(in_memory(data, split="test")) == 6
    assert len(in_memory(data, split="validation")) == carved
    assert len(in_memory(data, split="train")) == 80 - carved
    assert len(in_memory(data, split="train+validation")) == 80


def test_folder_with_train_only_has_no_test_split(tmp_path: Path) -> None:
    write_folder(tmp_path / "train", ("a", "b"), 3)
    with pytest.raises(ValueError, match="neither test/ nor val/"):
        load_images(f"folder:{tmp_path}", split="test")


def test_missing_folder_names_the_nearest_parent(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        load_images(f"folder:{tmp_path}/no/such", split="train")
    assert f"{tmp_path}/no/such" in str(caught.value)
    assert f"exists is {tmp_path})" in str(caught.value)


def test_one_class_is_fine(tmp_path: Path) -> None:
    write_folder(tmp_path, ("only",), 20)
    images = load_images(f"folder:{tmp_path}", split="all")
    assert (len(images), images.classes) == (20, ("only",))


def test_too_few_images_are_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, ("a", "b"), 1)
    with pytest.raises(ValueError, match="at least 2 are needed"):
        load_images(f"folder:{tmp_path}", split="test")


@pytest.mark.parametrize("unreadable", ["a", "a/below"])
def test_a_folder_that_cannot_be_read_is_named_or_counted(
    unreadable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path / "f", ("a", "b", "c"), 9)
    (tmp_path / "f" / "a" / "below").mkdir()
    scandir = os.scandir

    def refuse(path):  # as for somebody who is not root
        if str(path) == f"{tmp_path}/f/{unreadable}":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr("os.scandir", refuse)
    message = f"The folder {tmp_path}/f/{unreadable} cannot be read: Permission denied."
    with pytest.raises(ValueError, match=message):
        load_images(f"folder:{tmp_path}/f", split="all")
    images = load_images(f"folder:{tmp_path}/f", split="all", on_bad_sample="skip")
    assert images.skipped == {message: 1}
    assert len(images) == (18 if unreadable == "a" else 27)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a/z.png", bomb(), "z.png cannot be decoded: Image size .900000000 pixels. exceeds"),
        ("a/z.tif", damaged_tiff(), "z.tif cannot be decoded: 'IFDRational' object"),
        ("a/z.heic", b"x", "z.heic: heic pictures are not read"),
        ("z.png", b"x", "z.png lies outside the class folders .a, b, ...."),
        ("a/z.png/", b"", "z.png is a folder, not a picture"),
        (b"a/z\xff.png", b"x", "the name is not UTF-8"),
    ],
)
def test_what_is_no_picture_in_a_folder_is_named_or_counted(
    name: str | bytes, content: bytes, message: str, tmp_path: Path
) -> None:
    write_folder(tmp_path / "f", ("a", "b"), 6)
    file = tmp_path / "f" / os.fsdecode(name)
    if str(name).endswith("/"):
        file.mkdir()
    else:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_images(f"folder:{tmp_path}/f", split="all")
    images = load_images(f"folder:{tmp_path}/f", split="all", on_bad_sample="skip")
    assert len(images) == 12
    assert len(images.skipped) == 1


def test_linked_folders_are_followed_and_loops_are_not(tmp_path: Path) -> None:
    write_folder(tmp_path / "f", ("a", "b"), 4)
    write_folder(tmp_path / "elsewhere", ("c",), 5)
    (tmp_path / "f" / "a" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "f" / "a" / "loop").symlink_to(tmp_path / "f" / "a")
    (tmp_path / "f" / "a" / "up").symlink_to(tmp_path / "f")
    (tmp_path / "f" / "b" / "itself").symlink_to(tmp_path / "f" / "b" / "itself")
    (tmp_path / "f" / "b" / "notes.txt").write_text("no picture")
    images = load_images(f"folder:{tmp_path}/f", split="all")
    assert torch.bincount(images.labels).tolist() == [9, 4]
    assert not images.skipped


@pytest.mark.parametrize("classes", [("a", "b"), ()])
def test_what_is_hidden_in_a_folder_is_passed_over(classes: tuple, tmp_path: Path) -> None:
    """A .thumbnails is no class, nor does a .git turn pictures without classes into strays."""
    for name in classes or ("",):
        write_folder(tmp_path / "f", (name,), 6)
    write_folder(tmp_path / "f", (".thumbnails",), 3)
    inside = tmp_path / "f" / "".join(classes[:1])
    (inside / "._000.png").write_bytes(b"of macOS")
    images = load_images(f"folder:{tmp_path}/f", split="all")
    assert (len(images), images.classes) == ((12, ("a", "b")) if classes else (6, ("",)))


def test_a_folder_without_pictures_says_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "notes.txt").write_text("hello")
    with pytest.raises(ValueError, match=f"No pictures in {tmp_path}: expected jpg, jpeg, .*png"):
        load_images(f"folder:{tmp_path}", split="train")


def test_the_data_tell_how_many_classes_have_pictures(tmp_path: Path) -> None:
    write_folder(tmp_path, ("a", "c"), 20)
    (tmp_path / "b").mkdir()
    train, test = (load_images(f"folder:{tmp_path}", split=x) for x in ("train", "test"))
    assert ", 2 of 3 classes, 8 x 8 pixels." in ImageSplits(train, test).in_words("test")


def test_corrupt_picture_in_a_folder_is_named_or_skipped(tmp_path: Path) -> None:
    write_folder(tmp_path, ("a", "b"), 4)
    (tmp_path / "a" / "001.png").write_bytes(encoded(random_picture(1))[:60])
    (tmp_path / "b" / "002.png").write_bytes(b"")
    with pytest.raises(ValueError, match=r"b/002.png is empty .*--on-bad-sample=skip"):
        load_images(f"folder:{tmp_path}", split="all")
    images = in_memory(f"folder:{tmp_path}", split="all", on_bad_sample="skip")
    assert len(images) == 6
    assert images.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert torch.equal(images.pixels[1], random_picture(2))
    assert len(images.skipped) == 2
    assert any("a/001.png cannot be decoded" in message for message in images.skipped)


def test_shards_hold_their_pictures_and_labels(shards: str) -> None:
    images = in_memory(shards, split="all")
    assert torch.equal(images.pixels, torch.stack([random_picture(i) for i in range(30)]))
    assert images.labels.tolist() == [i % 3 for i in range(30)]
    assert images.classes == ("0", "1", "2")
    assert images.image_size == 8


def test_shards_divide_into_train_and_validation(shards: str) -> None:
    carved = [in_validation(f"train-{i // 10:06d}.tar/s{i:04d}.png") for i in range(30)]
    train = in_memory(shards, split="train")
    assert torch.equal(
        train.pixels, torch.stack([random_picture(i) for i in range(30) if not carved[i]])
    )
    assert len(in_memory(shards, split="train+validation")) == 30


def test_shards_have_no_test_split(shards: str) -> None:
    with pytest.raises(ValueError, match="--data-test=wds:PATTERN"):
        load_images(shards, split="test")


@pytest.mark.parametrize("kind", ["jpg", "webp"])
def test_lossy_members_decode_as_pil_does(kind: str, tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", sample_members(0, 4, kind))
    images = in_memory(f"wds:{tmp_path}/*.tar", split="all")
    content = encoded(random_picture(2), kind)
    expected = np.asarray(Image.open(io.BytesIO(content)).convert("RGB")).transpose(2, 0, 1)
    assert np.array_equal(images.pixels[2].numpy(), expected)


def test_class_names_stand_beside_the_shards(shards: str, tmp_path: Path) -> None:
    (tmp_path / "classnames.txt").write_text("ant\nbee\ncow\n")
    assert in_memory(shards, split="all").classes == ("ant", "bee", "cow")
    (tmp_path / "classnames.txt").write_text("ant\nbee\n")
    with pytest.raises(ValueError, match="names 2 classes, but the shards hold class index 2"):
        load_images(shards, split="all")


def folders(path: Path, train: tuple[str, ...], test: tuple[str, ...]) -> ImageSettings:
    """Settings of two image folders; the one of --data-test is read as a whole."""
    write_folder(path / "tr", train, 30)
    write_folder(path / "te", test, 2)
    return ImageSettings(
        data=f"folder:{path}/tr", data_test=f"folder:{path}/te", image_size=8, batch_size=2
    )


def test_train_and_test_folders_share_their_class_names(tmp_path: Path) -> None:
    splits = load_splits(folders(tmp_path / "same", ("cat", "big_dog"), ("cat", "Big dog")))
    assert splits.train.classes == ("big_dog", "cat")
    assert splits.test.classes == ("Big dog", "cat")
    assert splits.test.labels.tolist() == [0, 0, 1, 1]
    with pytest.raises(ValueError, match=r"Class 0 is 'cat' in folder:.*/tr and 'dog' in .*/te: "):
        load_splits(folders(tmp_path / "shifted", ("cat", "dog"), ("dog", "fox")))
    with pytest.raises(ValueError, match=r"Class 1 is 'dog' in folder:.*/tr and 'fox' in .*/te: "):
        load_splits(folders(tmp_path / "second", ("cat", "dog"), ("cat", "fox")))
    with pytest.raises(ValueError, match=r"/tr has 2 classes and folder:.*/te 3: training and"):
        load_splits(folders(tmp_path / "more", ("cat", "dog"), ("cat", "dog", "fox")))


def test_numbered_classes_are_compared_by_their_count(
    shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offsphere.training.images.kept_images", load_images)

    def load(classes: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        folder = tmp_path / "_".join(classes)
        write_folder(folder, classes, 2)
        splits = load_splits(ImageSettings(data=shards, data_test=f"folder:{folder}"))
        return splits.train.classes, splits.test.classes

    assert load(("ant", "bee", "cow")) == (("0", "1", "2"), ("ant", "bee", "cow"))
    with pytest.raises(ValueError, match=r"tar has 3 classes and folder:.*/ant_bee 2: training"):
        load(("ant", "bee"))
    (tmp_path / "classnames.txt").write_text("ant\nbee\nfox\n")
    with pytest.raises(ValueError, match=r"Class 2 is 'fox' in wds:.*\.tar and 'cat' in folder:"):
        load(("ant", "bee", "cat"))


@pytest.mark.parametrize("label", ["group", "subgroup"])
def test_both_emoji_styles_share_their_classes(
    label: str, few_emoji: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offsphere.training.images.kept_images", load_images)
    settings = ImageSettings(
        data=f"emoji:{label}", data_test=f"openmoji:{label}", image_size=8, batch_size=2
    )
    splits = load_splits(settings)
    assert splits.test.classes == splits.train.classes
    assert len(splits.test) == len(few_emoji)


@pytest.mark.parametrize("missing", [1024, 5000, 10_300])
def test_cut_shard_is_an_error_even_when_skipping(missing: int, tmp_path: Path) -> None:
    path = write_tar(tmp_path / "cut.tar", sample_members(0, 10))
    with tarfile.open(path) as archive:
        end = max(m.offset_data + m.size for m in archive)
    content = path.read_bytes()
    cut = -(-end // 512) * 512 + 1024 - missing
    path.write_bytes(content[:cut])
    with pytest.raises(ValueError, match=r"shard .*cut.tar is cut short"):
        load_images(f"wds:{path}", split="all", on_bad_sample="skip")


def test_compressed_shard_is_refused(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", sample_members(0, 3))
    path.write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(ValueError, match="no uncompressed tar file"):
        load_images(f"wds:{path}", split="all")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ([("s0001.png", encoded(random_picture(1)))], "two samples have the key 's0001'"),
        ([("lonely.cls", b"1")], "lonely has no image"),
        ([("lonely.png", encoded(random_picture(1)))], "lonely has no label"),
        ([("empty.png", b""), ("empty.cls", b"1")], "empty.png is empty"),
        (
            [("bad.png", encoded(random_picture(1))[:70]), ("bad.cls", b"1")],
            "bad.png cannot be decoded",
        ),
        (
            [("bad.jpg", encoded(random_picture(1, 64, 64), "jpg")[:900]), ("bad.cls", b"1")],
            "bad.jpg cann",
        ),
        ([("noise.jpg", b"not a picture"), ("noise.cls", b"1")], "noise.jpg cannot be decoded"),
        (
            [("word.png", encoded(random_picture(1))), ("word.cls", b"cat")],
            "word.cls should hold a class",
        ),
        (
            [("far.png", encoded(random_picture(1))), ("far.cls", b"3000000000")],
            "far.cls should hold a class index below 1,000,000",
        ),
        ([("bomb.png", bomb()), ("bomb.cls", b"1")], "bomb.png cannot be decoded: Image size"),
        ([("x.jpg", damaged_tiff()), ("x.cls", b"1")], "x.jpg cannot be decoded: 'IFDRational'"),
        ([("picture", encoded(random_picture(1)))], "the member 'picture' has no suffix"),
    ],
)
def test_bad_sample_is_named_or_skipped_and_counted(
    extra: list[tuple[str, bytes]], message: str, tmp_path: Path
) -> None:
    path = write_tar(tmp_path / "train.tar", sample_members(0, 6) + extra)
    with pytest.raises(ValueError, match=message) as caught:
        load_images(f"wds:{path}", split="all")
    assert str(path) in str(caught.value)
    images = in_memory(f"wds:{path}", split="all", on_bad_sample="skip")
    assert torch.equal(images.pixels, torch.stack([random_picture(i) for i in range(6)]))
    assert len(images.skipped) == 1
    assert message in next(iter(images.skipped))


def test_keys_in_two_shards_are_named_or_counted(shards: str, tmp_path: Path) -> None:
    write_tar(tmp_path / "train-000001.tar", sample_members(8, 18))
    first, second = tmp_path / "train-000000.tar", tmp_path / "train-000001.tar"
    with pytest.raises(ValueError, match=f"Two samples have the key 's0008': in {first} and in"):
        load_images(shards, split="all")
    images = in_memory(shards, split="all", on_bad_sample="skip")
    assert len(images) == 28
    assert images.skipped == {
        f"Two samples have the key 's000{k}': in {first} and in {second}.": 1 for k in (8, 9)
    }


def test_a_shard_with_nothing_but_end_marks_is_named(shards: str, tmp_path: Path) -> None:
    write_tar(tmp_path / "train-000001.tar", [])
    with pytest.raises(ValueError, match=r"train-000001.tar holds no samples"):
        load_images(shards, split="all")
    assert len(load_images(shards, split="all", on_bad_sample="skip")) == 20


def test_the_manifest_is_heeded(shards: str, tmp_path: Path) -> None:
    paths = [tmp_path / f"train-{i:06d}.tar" for i in range(3)]
    facts = {p.name: ShardFacts(10, p.stat().st_size, checksum(p)) for p in paths}
    write_manifest(tmp_path, facts)
    whole = in_memory(shards, split="all")
    for change, message in (
        ({"samples": 11}, "train-000001.tar holds 10 samples, but manifest.json says 11"),
        ({"bytes": 5}, "train-000001.tar has .* bytes, but manifest.json says 5"),
        ({"sha256": "0" * 64}, "train-000001.tar has other bytes than those whose SHA-256"),
    ):
        changed = facts[paths[1].name]._replace(**change)
        write_manifest(tmp_path, {**facts, paths[1].name: changed})
        with pytest.raises(ValueError, match=message):
            load_images(shards, split="all")
        images = in_memory(shards, split="all", on_bad_sample="skip")
        assert images.fingerprint == whole.fingerprint
        assert len(images.skipped) == 1


def test_missing_shard_is_named(shards: str, tmp_path: Path) -> None:
    (tmp_path / "train-000001.tar").unlink()
    with pytest.raises(FileNotFoundError, match=r"train-000001\.tar"):
        load_images(shards, split="all")


@pytest.mark.parametrize(
    ("pattern", "message"),
    [("pipe:cat a.tar", "commands are not run"), ("https://x.org/a.tar", "only local")],
)
def test_pipes_and_addresses_are_refused(pattern: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shard_paths(pattern)


def test_worker_processes_decode_the_same(shards: str, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = in_memory(shards, split="all")
    monkeypatch.setattr(pictures_module, "MANY_PICTURES", 1)
    monkeypatch.setattr(pictures_module, "DECODE_PIXELS", 8 * 8 * 4)
    before = torch.get_rng_state()
    assert in_memory(shards, split="all").fingerprint == alone.fingerprint
    assert torch.equal(torch.get_rng_state(), before), "the global stream is left alone"


def test_lazy_images_equal_those_in_memory(shards: str) -> None:
    eager = in_memory(shards, split="all", image_size=6)
    lazy = load_images(shards, split="all", image_size=6, memory_limit=100)
    assert not lazy.in_memory
    assert len(lazy) == len(eager)
    assert lazy.classes == eager.classes
    assert torch.equal(lazy.labels, eager.labels)
    chosen = torch.tensor([5, 29, 0])
    assert torch.equal(lazy.batch(chosen), eager.batch(chosen))
    assert torch.equal(lazy.pixels, eager.pixels)


def test_lazy_images_find_corrupt_pictures_first_when_skipping(tmp_path: Path) -> None:
    extra = [("bad.png", encoded(random_picture(1))[:70]), ("bad.cls", b"1")]
    path = write_tar(tmp_path / "train.tar", extra + sample_members(0, 6))
    lazy = load_images(f"wds:{path}", split="all", on_bad_sample="skip", memory_limit=100)
    assert not lazy.in_memory
    assert torch.equal(
        lazy.batch(torch.arange(6)), torch.stack([random_picture(i) for i in range(6)])
    )
    assert len(lazy.skipped) == 1
    strict = load_images(f"wds:{path}", split="all", memory_limit=100)
    with pytest.raises(ValueError, match=r"train.tar: bad.png cannot be decoded"):
        strict.batch(torch.tensor([0]))


def test_fingerprint_changes_with_content_only(tmp_path: Path) -> None:
    first = write_tar(tmp_path / "a.tar", sample_members(0, 4))
    second = write_tar(tmp_path / "b.tar", sample_members(0, 4))
    members = sample_members(0, 4)
    members[1] = (members[1][0], b"2")
    third = write_tar(tmp_path / "c.tar", members)
    members[0] = (members[0][0], encoded(random_picture(99)))
    fourth = write_tar(tmp_path / "d.tar", members)
    prints = [
        in_memory(f"wds:{p}", split="all").fingerprint for p in (first, second, third, fourth)
    ]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


def test_limit_takes_a_seeded_subset_in_order(shards: str) -> None:
    everything = in_memory(shards, split="all")
    order = torch.randperm(30, generator=torch.Generator().manual_seed(0))
    keep = order[:7].sort().values
    limited = in_memory(shards, split="all", limit=7)
    assert torch.equal(limited.pixels, everything.pixels[keep])
    assert torch.equal(limited.labels, everything.labels[keep])
    assert len(in_memory(shards, split="all", limit=100)) == 30


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"data": "emojy"}, "Did you mean 'emoji'"),
        ({"data": "cifar-10"}, "Did you mean 'cifar10'"),
        ({"data": "folder:"}, "Unknown data set"),
        ({"split": "valid"}, "Did you mean 'validation'"),
        ({"on_bad_sample": "ignore"}, "expected one of error, skip"),
        ({"limit": 1}, "limit must be at least 2"),
        ({"image_size": 0}, "image_size must be at least 2"),
    ],
)
def test_wrong_arguments_are_explained(named: dict, message: str) -> None:
    arguments = {"data": "emoji", "split": "train", **named}
    with pytest.raises(ValueError, match=message):
        load_images(arguments.pop("data"), **arguments)


def test_a_folder_without_its_kind_is_recognised(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "emojis").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"Unknown data set 'emojis'\. .* the path '\./emojis'\?"):
        load_images("emojis", split="train")


@given(st.integers(2, 60), st.integers(2, 60), st.integers(2, 30), st.integers(0, 99))
def test_resize_square_equals_torchvision(height: int, width: int, size: int, seed: int) -> None:
    """Resize and CenterCrop on tensors: equal; on PIL pictures, as open_clip: one grey level."""
    resize_and_crop = transforms.Compose([transforms.Resize(size), transforms.CenterCrop(size)])
    pixels = random_picture(seed, height, width)
    out = resize_square(pixels[None], size)[0]
    assert torch.equal(out, resize_and_crop(pixels))
    image = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
    expected = np.asarray(resize_and_crop(image)).astype(int).transpose(2, 0, 1)
    assert np.abs(out.numpy().astype(int) - expected).max() <= 1


@given(st.integers(2, 60), st.integers(2, 60), st.integers(0, 99))
def test_squares_are_resized_as_ever(side: int, size: int, seed: int) -> None:
    """Committed results are of square pictures: they must not change by a bit."""
    pixels = random_picture(seed, side, side)[None]
    resized = torch.nn.functional.interpolate(
        pixels, (size, size), mode="bilinear", antialias=True, align_corners=False
    )
    assert torch.equal(resize_square(pixels, size), pixels if side == size else resized)


def test_a_picture_of_one_row_is_refused_instead_of_filling_the_memory() -> None:
    with pytest.raises(ValueError, match="200000 x 1 pixels are too narrow for a square of 224"):
        resize_square(torch.zeros((1, 3, 1, 200_000), dtype=torch.uint8), 224)


def test_resize_square_crops_the_long_side() -> None:
    pixels = random_picture(0, 4, 10)[None]
    assert torch.equal(resize_square(pixels, None), pixels[:, :, :, 3:7])


@pytest.mark.parametrize(
    ("mode", "colour", "rgb"),
    [
        ("L", 77, (77, 77, 77)),
        ("RGBA", (255, 0, 0, 0), (255, 255, 255)),
        ("LA", (0, 255), (0, 0, 0)),
        ("P", 0, (0, 0, 0)),
        ("I;16", 25_700, (100, 100, 100)),
    ],
)
def test_decode_makes_every_mode_rgb(mode: str, colour: object, rgb: tuple[int, ...]) -> None:
    buffer = io.BytesIO()
    Image.new(mode, (2, 3), colour).save(buffer, "png")  # pyright: ignore[reportArgumentType]
    pixels = decode(buffer.getvalue())
    assert pixels.shape == (3, 3, 2)
    assert pixels[:, 1, 1].tolist() == list(rgb)


@pytest.mark.parametrize(
    ("mode", "colour", "message"),
    [
        ("F", 0.5, "its pixels are fractions of an unknown range, convert it to 8 bits"),
        ("I", 65_536, "its pixels do not fit into 16 bits, convert it to 8 or 16 bits"),
        ("I", -1, "its pixels do not fit into 16 bits"),
    ],
)
def test_numbers_whose_white_is_unknown_are_refused(mode: str, colour: float, message: str) -> None:
    buffer = io.BytesIO()
    Image.new(mode, (2, 3), colour).save(buffer, "tiff")
    with pytest.raises(ValueError, match=message):
        decode(buffer.getvalue())
