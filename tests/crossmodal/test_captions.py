"""Every kind of image-text data: what is loaded, how it is split, and what is said of bad input."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from samples import bomb, damaged_tiff, encoded, random_picture, write_tar
from torch import Tensor

from crossmodal import captions as captions_module
from crossmodal.captions import Captioned, emoji_captions, load_captions
from offsphere.data import emoji as emoji_module
from offsphere.data.emoji import emoji_pictures, load_emoji
from offsphere.data.shards import ShardFacts, checksum, scan_shard, write_manifest
from offsphere.data.splits import in_validation, split_of

CUTS = (0.3, 0.5, 0.77, 0.9)


def png(seed: int) -> bytes:
    return encoded(random_picture(seed))


def captions_json(*captions: str) -> bytes:
    return json.dumps({"captions": captions}).encode()


def pair(i: int) -> list[tuple[str, bytes]]:
    return [
        (f"s{i:04d}.png", png(i)),
        (f"s{i:04d}.json", captions_json(f"text {i}", f"again {i}")),
    ]


def pairs(start: int, stop: int) -> list[tuple[str, bytes]]:
    return [member for i in range(start, stop) for member in pair(i)]


@pytest.fixture
def shards(tmp_path: Path) -> str:
    """Thirty samples in three shards."""
    for number in range(3):
        write_tar(tmp_path / f"train-{number}.tar", pairs(number * 10, number * 10 + 10))
    return f"wds:{tmp_path}/train-{{0..2}}.tar"


def load(data: str, split: str = "all", **named) -> Captioned:
    return load_captions(data, split=split, image_size=8, **named)


def assert_holds(loaded: Captioned, numbers: list[int]) -> None:
    """The samples `pair(i)` for each number, in order."""
    assert loaded.keys == tuple(f"s{i:04d}" for i in numbers)
    assert loaded.captions == tuple((f"text {i}", f"again {i}") for i in numbers)
    expected = torch.stack([random_picture(i) for i in numbers])
    assert torch.equal(loaded.batch(torch.arange(len(numbers))), expected)


@pytest.fixture
def few_emoji(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple:
    """Every thirtieth emoji, cached in a directory of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    some = load_emoji()[::30]
    monkeypatch.setattr(emoji_module, "load_emoji", lambda: some)
    monkeypatch.setattr(captions_module, "load_emoji", lambda: some)
    return some


@pytest.mark.parametrize("data", ["emoji", "openmoji"])
def test_emoji_have_their_names_pictures_and_classes(data: str, few_emoji: tuple) -> None:
    style = {"emoji": "twemoji", "openmoji": "openmoji"}[data]
    pictures = torch.from_numpy(emoji_pictures(8, style))
    seen: list[int] = []
    for split in ("train", "validation", "test"):
        loaded = load(data, split)
        keep = [i for i, e in enumerate(few_emoji) if split_of(e.base) == split]
        assert loaded.keys == tuple(few_emoji[i].name for i in keep)
        assert [captions[0] for captions in loaded.captions] == list(loaded.keys)
        assert torch.equal(loaded.batch(torch.arange(len(keep))), pictures[keep])
        words = [loaded.classes["group"][k] for k in loaded.labels["group"].tolist()]
        plain = [few_emoji[i].group.lower().replace("&", "and") for i in keep]
        assert words == plain
        assert loaded.queries == 1
        seen += keep
    assert sorted(seen) == list(range(len(few_emoji)))
    assert len(load(data, "train+validation")) == len(load(data, "train")) + len(
        load(data, "validation")
    )


def test_class_words_stand_in_captions_of_their_own(few_emoji: tuple) -> None:
    loaded = load("emoji", "all")
    for i, captions in enumerate(loaded.captions):
        for kind in ("group", "subgroup"):
            words = loaded.classes[kind][int(loaded.labels[kind][i])]
            assert f"a picture of {words}" in captions


def test_all_emoji_captions() -> None:
    by_name = {e.name: c for e, c in zip(load_emoji(), emoji_captions(), strict=True)}
    assert len(by_name) == len(load_emoji()), "names are distinct: retrieval has one answer"
    assert by_name["lobster"] == (
        "lobster",
        "lobster: animal, bisque, claws, nature, seafood",
        "a picture of animals and nature",
        "a picture of animal marine",
    )
    tone, base = by_name["waving hand: dark skin tone"], by_name["waving hand"]
    assert tone[1] == "waving hand: dark skin tone: " + base[1].removeprefix("waving hand: ")
    assert len(by_name["flag: Syria"]) == 3, "no keywords, no second caption"


def test_shards_hold_their_pictures_and_captions(shards: str) -> None:
    loaded = load(shards)
    assert_holds(loaded, list(range(30)))
    assert loaded.classes == loaded.labels == {}
    assert loaded.queries is None
    assert not loaded.skipped


def test_shards_divide_by_key_into_train_and_validation(shards: str) -> None:
    carved = [in_validation(f"s{i:04d}") for i in range(30)]
    assert_holds(load(shards, "train"), [i for i in range(30) if not carved[i]])
    assert_holds(load(shards, "validation"), [i for i in range(30) if carved[i]])
    assert_holds(load(shards, "train+validation"), list(range(30)))


def test_larger_than_memory_is_the_same_read_lazily(shards: str) -> None:
    eager, lazy = load(shards), load(shards, memory_limit=100)
    assert eager.in_memory
    assert not lazy.in_memory
    assert_holds(lazy, list(range(30)))
    order = torch.tensor([29, 3, 3])
    assert torch.equal(lazy.batch(order), eager.batch(order))


class Steps(torch.utils.data.Dataset):
    """Batches of five in a fixed random order, as a training loop asks for them."""

    def __init__(self, data: Captioned) -> None:
        self.data = data
        self.order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.data) // 5

    def __getitem__(self, step: int) -> Tensor:
        return self.data.batch(self.order[step * 5 : step * 5 + 5])


@pytest.mark.parametrize("workers", [0, 2])
def test_any_number_of_workers_reads_one_shard(workers: int, tmp_path: Path) -> None:
    write_tar(tmp_path / "one.tar", pairs(0, 30))
    steps = Steps(load(f"wds:{tmp_path}/one.tar", memory_limit=100))
    loader = torch.utils.data.DataLoader(steps, batch_size=None, num_workers=workers)
    expected = torch.stack([random_picture(i) for i in steps.order.tolist()])
    assert torch.equal(torch.cat(list(loader)), expected)


FAULTS = {
    "zero-byte image": ([("x.png", b""), ("x.txt", b"t")], "x has an empty image"),
    "undecodable image": ([("x.png", png(1)[:70]), ("x.txt", b"t")], "x.png cannot be decoded"),
    "noise as image": ([("x.jpg", b"no picture"), ("x.txt", b"t")], "x.jpg cannot be decoded"),
    "image only": ([("x.png", png(1))], "x has no captions"),
    "caption only": ([("x.txt", b"t")], "x has no image"),
    "wrong key": ([("x.png", png(1)), ("x.json", b'{"text": "t"}')], "json has only text"),
    "empty caption": ([("x.png", png(1)), ("x.txt", b" \n")], "x has an empty caption"),
    "one empty caption": (
        [("x.png", png(1)), ("x.json", captions_json("t", " "))],
        "x has an empty caption",
    ),
    "no captions in the list": ([("x.png", png(1)), ("x.json", captions_json())], "x has an"),
    "captions of a wrong type": (
        [("x.png", png(1)), ("x.json", b'{"captions": [1]}')],
        "'captions' is no text or list of texts",
    ),
    "json that is none": ([("x.png", png(1)), ("x.json", b"{")], "is not JSON"),
    "json list": ([("x.png", png(1)), ("x.json", b'["t"]')], "is a list, not an object"),
    "not UTF-8": ([("x.png", png(1)), ("x.txt", b"\xff\xfe")], "not UTF-8"),
    "bomb": (
        [("x.png", bomb()), ("x.txt", b"t")],
        "x.png cannot be decoded: Image size .900000000",
    ),
    "damaged TIFF": ([("x.png", damaged_tiff()), ("x.txt", b"t")], "x.png cannot be decoded: 'IFD"),
    "nested json": (
        [("x.png", png(1)), ("x.json", b"[" * 10**5)],
        "x has a json member that is nes",
    ),
    "nested json, whole": (
        [("x.png", png(1)), ("x.json", b'{"a":' * 5000 + b"1" + b"}" * 5000)],
        "x has a json member that is nested too deeply",
    ),
    "half a character": (
        [("x.png", png(1)), ("x.json", b'{"caption": "a\\ud800"}')],
        "x has a caption with half a character",
    ),
    "no suffix": ([("x", png(1))], "the member 'x' has no suffix"),
    "label over int64": (
        [("x.png", png(1)), ("x.txt", b"t"), ("x.cls", b"9" * 30)],
        "x.cls should hold a class index below 1,000,000",
    ),
    "two captions files": (
        [("x.png", png(1)), ("x.txt", b"t"), ("x.json", captions_json("u"))],
        "x has two captions files that differ",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_sample_is_named_or_skipped_and_counted(fault: str, tmp_path: Path) -> None:
    extra, message = FAULTS[fault]
    path = write_tar(tmp_path / "a.tar", pairs(0, 3) + extra + pairs(3, 6))
    with pytest.raises(ValueError, match=message) as caught:
        load(f"wds:{path}")
    assert str(path) in str(caught.value)
    loaded = load(f"wds:{path}", on_bad_sample="skip")
    assert_holds(loaded, list(range(6)))
    assert len(loaded.skipped) == 1
    assert re.search(message, next(iter(loaded.skipped)))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (pair(1), "two samples have the key 's0001'"),
        ([("s0001.jpg", png(1))], r"'s0001' has two images \(s0001.png, s0001.jpg\)"),
        ([("s0001.en.json", b"{}")], r"'s0001' has two captions files"),
    ],
)
def test_a_key_that_comes_twice_counts_once(
    extra: list[tuple[str, bytes]], message: str, tmp_path: Path
) -> None:
    path = write_tar(tmp_path / "a.tar", pairs(0, 4) + extra)
    with pytest.raises(ValueError, match=message):
        load(f"wds:{path}")
    loaded = load(f"wds:{path}", on_bad_sample="skip")
    assert_holds(loaded, list(range(4)))
    assert len(loaded.skipped) == 1


def test_one_key_in_two_shards_is_named(shards: str, tmp_path: Path) -> None:
    write_tar(tmp_path / "train-2.tar", [*pair(7), *pairs(21, 30)])
    with pytest.raises(ValueError, match=r"key 's0007': in .*train-0.tar and in .*train-2.tar"):
        load(shards)
    loaded = load(shards, on_bad_sample="skip")
    assert_holds(loaded, [*range(20), *range(21, 30)])
    assert len(loaded.skipped) == 1


def cut(path: Path, share: float) -> int:
    """Cut a tar at a share of its content; how many samples are still whole."""
    members = scan_shard(path).members
    end = int((members[-1].offset + members[-1].size) * share)
    path.write_bytes(path.read_bytes()[:end])
    whole = [m for m in members if m.offset + m.size <= end]
    return len(whole) // 2


@pytest.mark.parametrize("manifest", [False, True])
@pytest.mark.parametrize("share", CUTS)
def test_a_cut_shard_is_named_or_counted(
    share: float, manifest: bool, shards: str, tmp_path: Path
) -> None:
    path = tmp_path / "train-1.tar"
    if manifest:
        sizes = {p.name: p.stat().st_size for p in tmp_path.glob("*.tar")}
        write_manifest(tmp_path, {name: ShardFacts(10, size) for name, size in sizes.items()})
    left = cut(path, share)
    assert 0 < left < 10
    with pytest.raises(ValueError, match=r"shard .*train-1\.tar is cut short"):
        load(shards)
    loaded = load(shards, on_bad_sample="skip")
    assert_holds(loaded, [*range(10 + left), *range(20, 30)])
    (message,) = loaded.skipped
    assert f"{left} complete samples are left" in message
    assert (f", {10 - left} of 10 are missing" in message) == manifest
    assert loaded.skipped[message] == (10 - left if manifest else 1)


def test_a_tar_without_its_end_mark_is_cut(shards: str, tmp_path: Path) -> None:
    path = tmp_path / "train-1.tar"
    last = scan_shard(path).members[-1]
    path.write_bytes(path.read_bytes()[: -(-(last.offset + last.size) // 512) * 512])
    with pytest.raises(ValueError, match=r"train-1\.tar .*no end-of-archive mark"):
        load(shards)
    assert_holds(load(shards, on_bad_sample="skip"), list(range(30)))


def test_a_missing_shard_is_named_or_counted(shards: str, tmp_path: Path) -> None:
    write_manifest(tmp_path, {f"train-{i}.tar": ShardFacts(10) for i in range(3)})
    (tmp_path / "train-1.tar").unlink()
    for data in (shards, f"wds:{tmp_path}/train-*.tar"):
        with pytest.raises(ValueError, match=r"train-1\.tar is missing, and 10 samples with it"):
            load(data)
        loaded = load(data, on_bad_sample="skip")
        assert_holds(loaded, [*range(10), *range(20, 30)])
        assert list(loaded.skipped.values()) == [10]


def test_a_shorter_shard_than_the_manifest_says_is_named(shards: str, tmp_path: Path) -> None:
    write_manifest(tmp_path, {f"train-{i}.tar": ShardFacts(10 + (i == 2)) for i in range(3)})
    with pytest.raises(ValueError, match=r"train-2\.tar holds 10 samples, but manifest.json says"):
        load(shards)


def test_an_empty_shard_is_named(shards: str, tmp_path: Path) -> None:
    write_tar(tmp_path / "train-1.tar", [])
    with pytest.raises(ValueError, match=r"train-1\.tar holds no samples"):
        load(shards)


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    """A pickle that would leave a file behind is refused as a caption and as a picture."""
    import pickle

    class Trap:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "trapped",))

    trap = pickle.dumps(Trap())
    members = [("x.png", png(0)), ("x.json", trap), ("y.png", trap), ("y.txt", b"t")]
    path = write_tar(tmp_path / "a.tar", [*members, ("y.pyd", trap), *pairs(0, 2)])
    assert len(load(f"wds:{path}", on_bad_sample="skip").skipped) == 2
    assert not (tmp_path / "trapped").exists()


def test_labels_and_class_names_beside_captions(tmp_path: Path) -> None:
    members = [m for i in range(4) for m in (*pair(i), (f"s{i:04d}.cls", str(i % 2).encode()))]
    path = write_tar(tmp_path / "a.tar", members)
    loaded = load(f"wds:{path}")
    assert loaded.labels["class"].tolist() == [0, 1, 0, 1]
    assert loaded.classes == {"class": ("0", "1")}
    (tmp_path / "classnames.txt").write_text("cat\ndog\n")
    assert load(f"wds:{path}").classes == {"class": ("cat", "dog")}
    write_tar(path, members + pair(4))
    with pytest.raises(ValueError, match="s0004 has no label"):
        load(f"wds:{path}")
    write_tar(path, [*members, *pair(4), ("s0004.cls", b"cow")])
    with pytest.raises(ValueError, match=r"s0004\.cls should hold a class index"):
        load(f"wds:{path}")
    assert len(load(f"wds:{path}", on_bad_sample="skip")) == 4


def test_flipped_bytes_that_decode_are_found(shards: str, tmp_path: Path) -> None:
    """A letter of a caption, under the manifest's checksum: named, or counted and read."""
    paths = [tmp_path / f"train-{i}.tar" for i in range(3)]
    write_manifest(tmp_path, {p.name: ShardFacts(10, None, checksum(p)) for p in paths})
    assert len(load(shards)) == 30
    paths[1].write_bytes(paths[1].read_bytes().replace(b"text 15", b"text 16"))
    with pytest.raises(ValueError, match=r"train-1.tar has other bytes .*skip reads what can be"):
        load(shards)
    loaded = load(shards, on_bad_sample="skip")
    assert len(loaded) == 30
    assert len(loaded.skipped) == 1


def test_shards_behind_file_addresses_are_loaded(shards: str, tmp_path: Path) -> None:
    data = shards.replace("wds:", "wds:file://")
    assert_holds(load(data), list(range(30)))
    cut(tmp_path / "train-1.tar", 0.5)
    with pytest.raises(ValueError, match=rf"shard file://{tmp_path}/train-1\.tar is cut short"):
        load(data)
    with pytest.raises(ValueError, match="take more than .* GB: download"):
        load(data, on_bad_sample="skip", memory_limit=100)


def test_commands_are_run_only_if_allowed(shards: str, tmp_path: Path) -> None:
    data = shards.replace("wds:", "wds:pipe:cat ")
    with pytest.raises(ValueError, match="--allow-pipe"):
        load(data)
    assert_holds(load(data, allow_pipe=True), list(range(30)))
    (tmp_path / "train-1.tar").unlink()
    with pytest.raises(ValueError, match=r"train-1\.tar cannot be fetched"):
        load(data, allow_pipe=True)


def test_fingerprint_follows_pictures_and_captions(tmp_path: Path) -> None:
    def print_of(members: list[tuple[str, bytes]], **named) -> str:
        path = write_tar(tmp_path / "a.tar", members)
        return load(f"wds:{path}", **named).fingerprint

    members = pairs(0, 4)
    assert print_of(members) == print_of(members)
    others = [
        [("s0000.png", png(9)), *members[1:]],
        [members[0], ("s0000.json", captions_json("other")), *members[2:]],
        [("t0000.png", png(0)), ("t0000.json", members[1][1]), *members[2:]],
        [*members[2:], *members[:2]],
    ]
    assert len({print_of(m) for m in (members, *others)}) == 5
    assert print_of(members, memory_limit=1) != print_of(others[1], memory_limit=1)


def test_limit_is_a_sorted_subset(shards: str) -> None:
    order = torch.randperm(30, generator=torch.Generator().manual_seed(0))
    assert_holds(load(shards, limit=7), sorted(order[:7].tolist()))


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"data": "emojy"}, "Did you mean 'emoji'"),
        ({"data": "wds:"}, "names no files: expected something like wds:train-"),
        ({"data": "csv:"}, "names no files"),
        ({"data": "wds:no/such/*.tar"}, "No such file or folder: no/such"),
        ({"split": "valid"}, "Did you mean 'validation'"),
        ({"on_bad_sample": "ignore"}, "expected one of error, skip"),
        ({"limit": 1}, "limit must be at least 2"),
        ({"image_size": 1}, "image_size must be at least 2"),
    ],
)
def test_wrong_arguments_are_explained(named: dict, message: str) -> None:
    arguments = {"data": "emoji", "split": "train", "image_size": 8, **named}
    with pytest.raises((ValueError, OSError), match=message):
        load_captions(arguments.pop("data"), **arguments)


def test_shards_have_no_test_split(shards: str) -> None:
    for data in (shards, shards.replace("wds:", "wds:file://")):
        with pytest.raises(ValueError, match="--data-test=wds:PATTERN"):
            load(data, "test")
