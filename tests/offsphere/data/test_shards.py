"""Tar shards: patterns, scans against tarfile, the cache of indices, manifests."""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import write_tar

from offsphere.data import shards
from offsphere.data.bad import BadSamples
from offsphere.data.shards import (
    Member,
    ShardFacts,
    ShardIndex,
    check_shard,
    class_names,
    expand,
    fetch_manifest,
    index_shard,
    is_streamed,
    key_and_suffix,
    parse_label,
    parse_manifest,
    read_manifest,
    read_member,
    samples_of,
    scan_shard,
    shard_addresses,
    shard_paths,
    write_manifest,
)


def some_members(count: int) -> list[tuple[str, bytes]]:
    """Two members per sample, of sizes from 0 to beyond one tar block."""
    members = []
    for i in range(count):
        members.append((f"s{i:03d}.jpg", bytes([i % 251 + 1]) * (137 * i % 1600)))
        members.append((f"s{i:03d}.txt", f"caption {i}".encode()))
    return members


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory of the test's own that takes shards of any size."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(shards, "CACHED_MEMBERS", 1)
    return tmp_path / "cache" / "offsphere" / "shards"


def entries(cache: Path) -> list[Path]:
    return sorted(cache.glob("*")) if cache.exists() else []


def test_scan_gives_every_member_where_it_lies(tmp_path: Path) -> None:
    members = some_members(20)
    index = scan_shard(write_tar(tmp_path / "a.tar", members))
    assert index.problem is None
    assert [m.name for m in index.members] == [name for name, _ in members]
    with index.path.open("rb") as file:
        assert [read_member(file, m) for m in index.members] == [content for _, content in members]


def test_long_names_links_and_folders(tmp_path: Path) -> None:
    path, long = tmp_path / "a.tar", "folder/" + "x" * 150 + ".jpg"
    write_tar(path, [(long, b"123")])
    with tarfile.open(path, "a") as archive:
        folder = tarfile.TarInfo("folder")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        link = tarfile.TarInfo("b.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    assert [m.name for m in scan_shard(path).members] == [long]


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.5, 0.77, 0.9, 0.99])
def test_a_cut_shard_keeps_its_whole_members(share: float, tmp_path: Path) -> None:
    members = some_members(40)
    path = write_tar(tmp_path / "a.tar", members)
    whole = scan_shard(path).members
    end = whole[-1].offset + 512
    content = path.read_bytes()[: int(end * share)]
    path.write_bytes(content)
    index = scan_shard(path)
    assert index.problem is not None
    assert "cut short" in index.problem
    # A member whose header was cut off, or whose bytes are not all there, is not listed.
    assert index.members == tuple(m for m in whole if m.offset + m.size <= len(content))


@given(st.integers(0, 20 * 1024))
def test_every_cut_before_the_end_mark_is_noticed(tmp_path_factory, cut: int) -> None:
    path = write_tar(tmp_path_factory.mktemp("cut") / "a.tar", some_members(6))
    last = scan_shard(path).members[-1]
    end = -(-(last.offset + last.size) // 512) * 512
    path.write_bytes(path.read_bytes()[:cut])
    assert (scan_shard(path).problem is None) == (cut >= end + 1024)


def test_a_damaged_header_is_noticed(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", some_members(4))
    third = scan_shard(path).members[2]
    content = bytearray(path.read_bytes())
    content[third.offset - 512 + 3] ^= 0xFF
    path.write_bytes(content)
    index = scan_shard(path)
    assert index.problem == shards.CUT
    assert len(index.members) == 2


def test_index_comes_from_the_cache_until_the_file_changes(tmp_path: Path, cache: Path) -> None:
    path = write_tar(tmp_path / "a.tar", some_members(5))
    first = index_shard(path)
    assert len(entries(cache)) == 1
    # Other content under the same size and time: only the cache can give the old index.
    times = (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    content = path.read_bytes().replace(b"s001.txt", b"t001.txt")
    path.write_bytes(content)
    os.utime(path, ns=times)
    assert index_shard(path) == first
    os.utime(path, ns=(times[0], times[1] + 1))
    assert index_shard(path).problem == shards.CUT, "the checksum of a changed header is wrong"
    write_tar(path, some_members(7))
    assert len(index_shard(path).members) == 14
    assert len(entries(cache)) == 1, "an entry is replaced, not added to"


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "text"])
def test_a_damaged_cache_entry_is_scanned_anew(damage: str, tmp_path: Path, cache: Path) -> None:
    path = write_tar(tmp_path / "a.tar", some_members(5))
    good = index_shard(path)
    (entry,) = entries(cache)
    content = entry.read_bytes()
    middle = content.index(b"s002")
    flipped = content[:middle] + b"X" + content[middle + 1 :]
    broken = {"cut": content[:-90], "flip": flipped, "empty": b"", "text": b"not a zip file"}
    entry.write_bytes(broken[damage])
    assert index_shard(path) == good
    assert entry.read_bytes() != broken[damage], "the entry is written anew"


def test_cut_and_small_shards_are_not_cached(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tar(tmp_path / "a.tar", some_members(5))
    whole = path.read_bytes()
    path.write_bytes(whole[:3000])
    assert index_shard(path).problem is not None
    path.write_bytes(whole)
    monkeypatch.setattr(shards, "CACHED_MEMBERS", 11)
    assert index_shard(path).problem is None
    assert entries(cache) == []


def test_a_cache_that_cannot_be_written_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(shards, "CACHED_MEMBERS", 1)
    assert len(index_shard(write_tar(tmp_path / "a.tar", some_members(3))).members) == 6


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.jpg", ("a", "jpg")),
        ("x.y/a.b.JPG", ("x.y/a", "b.jpg")),
        ("README", None),
        (".hidden", None),
    ],
)
def test_key_and_suffix_as_webdataset_divides_them(name: str, expected: tuple | None) -> None:
    from webdataset.tariterators import base_plus_ext

    assert key_and_suffix(name) == expected
    key, suffix = base_plus_ext(name)
    assert (None if suffix is None else (key, suffix.lower())) == expected


def test_hidden_files_belong_to_no_sample() -> None:
    assert key_and_suffix("folder/._a.jpg") is None
    assert key_and_suffix("./a.jpg") == ("a", "jpg")


def test_samples_group_members_and_report_each_key_once(tmp_path: Path) -> None:
    members = [Member(n, 0, 1) for n in ("a.jpg", "b.jpg", "a.txt", "a.jpg", "a.txt", "b.png")]
    index = ShardIndex(tmp_path / "x.tar", (*members, Member("README", 0, 1)))
    bad = BadSamples("skip")
    assert dict(samples_of(index, bad)) == {
        "a": {"image": members[0], "txt": members[2]},
        "b": {"image": members[1]},
    }
    assert list(bad.messages) == [
        f"{tmp_path}/x.tar: two samples have the key 'a' (a.jpg).",
        f"{tmp_path}/x.tar: the sample 'b' has two images (b.jpg, b.png).",
        f"{tmp_path}/x.tar: the member 'README' has no suffix such as .jpg, so it belongs to no "
        "sample.",
    ]
    with pytest.raises(ValueError, match="two samples have the key 'a'.*--on-bad-sample=skip"):
        list(samples_of(index, BadSamples("error")))


def test_patterns_expand_and_name_what_is_missing(tmp_path: Path) -> None:
    for number in (0, 2):
        write_tar(tmp_path / f"t-{number}.tar", [])
    pattern = f"{tmp_path}/t-{{0..2}}.tar"
    with pytest.raises(FileNotFoundError, match=r"t-1\.tar"):
        shard_paths(pattern)
    with pytest.raises(ValueError, match=r"shard .*t-1\.tar is missing"):
        shard_paths(pattern, BadSamples("error"))
    bad = BadSamples("skip")
    assert [p.name for p in shard_paths(pattern, bad)] == ["t-0.tar", "t-2.tar"]
    assert list(bad.messages) == [f"The shard {tmp_path}/t-1.tar is missing."]
    with pytest.raises(FileNotFoundError, match="No file matches"):
        shard_paths(f"{tmp_path}/v-*.tar")
    with pytest.raises(ValueError, match="braces"):
        expand("a{0..2.tar")


def test_the_manifest_tells_which_files_a_star_stands_for(tmp_path: Path) -> None:
    write_tar(tmp_path / "t-0.tar", [])
    write_manifest(tmp_path, {"t-0.tar": ShardFacts(0), "t-1.tar": ShardFacts(7)})
    assert [p.name for p in shard_paths(f"{tmp_path}/t-0*.tar")] == ["t-0.tar"]
    with pytest.raises(FileNotFoundError, match=r"t-1\.tar"):
        shard_paths(f"{tmp_path}/*.tar")
    with pytest.raises(ValueError, match=r"t-1\.tar is missing, and 7 samples with it"):
        shard_paths(f"{tmp_path}/*.tar", BadSamples("error"))


def test_commands_and_addresses() -> None:
    assert is_streamed("pipe:cat a.tar")
    assert is_streamed("https://host/a.tar")
    assert is_streamed("file:/data/a.tar")
    assert not is_streamed("/data/a.tar")
    with pytest.raises(ValueError, match="commands are not run"):
        shard_paths("pipe:cat a.tar")
    with pytest.raises(ValueError, match="only local tar files"):
        shard_paths("https://host/a.tar")
    with pytest.raises(ValueError, match="--allow-pipe"):
        shard_addresses("pipe:cat a{0..1}.tar", allow_pipe=False)
    with pytest.raises(ValueError, match="'pipe:cat a.tar' would run a command"):
        shard_addresses("{https://host/,pipe:cat }a.tar", allow_pipe=False)
    assert shard_addresses("pipe:cat a{0..1}.tar", allow_pipe=True) == (
        "pipe:cat a0.tar",
        "pipe:cat a1.tar",
    )
    with pytest.raises(ValueError, match=r"cannot be listed with \*"):
        shard_addresses("https://host/*.tar", allow_pipe=False)


def test_manifest_goes_out_and_comes_back(tmp_path: Path) -> None:
    facts = {"a.tar": ShardFacts(3, 1024, "ab"), "b.tar": ShardFacts(4)}
    write_manifest(tmp_path, facts)
    assert read_manifest(tmp_path) == facts
    assert json.loads((tmp_path / "manifest.json").read_text())["samples"] == 7
    assert fetch_manifest(f"file://{tmp_path}/b.tar") == facts
    assert fetch_manifest(f"file://{tmp_path}/no/b.tar") == {}
    assert fetch_manifest("pipe:cat b.tar") == {}
    assert read_manifest(tmp_path / "no") == {}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b'{"shards": [1]}',
        b'{"shards": {"a": {}}}',
        b'{"shards": {"a": {"samples": "3"}}}',
        b'{"shards": {"a": {"samples": 3, "bytes": "9"}}}',
        b'{"shards": {"a": {"samples": 3, "sha256": 9}}}',
        b"[" * 10**5,
    ],
)
def test_a_damaged_manifest_is_named(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"here/manifest.json is no manifest .*make it anew"):
        parse_manifest(content, "here/manifest.json")


def test_a_shard_is_checked_against_its_manifest(tmp_path: Path) -> None:
    index = scan_shard(write_tar(tmp_path / "a.tar", some_members(5)))
    size = index.path.stat().st_size
    assert check_shard(index, None, 5) is None
    assert check_shard(index, ShardFacts(5, size), 5) is None
    for facts, message in (
        (ShardFacts(6, size), "holds 5 samples, but manifest.json says 6"),
        (ShardFacts(5, size + 1), f"has {size:,} bytes, but manifest.json says {size + 1:,}"),
    ):
        assert message in (check_shard(index, facts, 5) or "")
    cut = ShardIndex(index.path, index.members[:4], shards.CUT)
    assert "2 complete samples are left, 3 of 5 are missing" in (
        check_shard(cut, ShardFacts(5, size), 2) or ""
    )


def test_flipped_bytes_are_found_by_the_checksum(tmp_path: Path) -> None:
    index = scan_shard(write_tar(tmp_path / "a.tar", some_members(5)))
    content = index.path.read_bytes()
    facts = ShardFacts(5, len(content), hashlib.sha256(content).hexdigest())
    assert check_shard(index, facts, 5) is None
    assert check_shard(index, facts._replace(sha256=facts.sha256.upper()), 5) is None  # pyright: ignore
    index.path.write_bytes(content.replace(b"caption 3", b"caption 8"))
    said = check_shard(scan_shard(index.path), facts, 5) or ""
    assert "a.tar has other bytes than those whose SHA-256 manifest.json gives" in said


def test_a_checksum_is_computed_once(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "CACHED_BYTES", 1)
    path = write_tar(tmp_path / "a.tar", some_members(3))
    good = hashlib.sha256(path.read_bytes()).hexdigest()
    assert shards.checksum(path) == good
    assert entries(cache) == [], "a file that has just been written may change within its time"
    os.utime(path, ns=(10**18, 10**18))
    assert shards.checksum(path) == good
    (entry,) = entries(cache)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"caption 1", b"caption 2"))
    os.utime(path, ns=(10**18, 10**18))
    assert shards.checksum(path) == good, "the same size and time: only the cache gives this"
    entry.write_text("damaged")
    changed = hashlib.sha256(path.read_bytes()).hexdigest()
    assert shards.checksum(path) == changed
    os.utime(path, ns=(10**18, 10**18 + 1))
    path.write_bytes(content)
    assert shards.checksum(path) == good


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    """A pipe would be waited for without end, and so would a manifest that is one."""
    os.mkfifo(tmp_path / "a.tar")
    (tmp_path / "folder.tar").mkdir()
    for path in (tmp_path / "a.tar", tmp_path / "folder.tar", Path("/dev/zero")):
        with pytest.raises(ValueError, match=f"{path} is no regular file"):
            index_shard(path)
    with pytest.raises(ValueError, match=r"named with a star: '.*/folder.tar/\*.tar'"):
        index_shard(tmp_path / "folder.tar")
    os.mkfifo(tmp_path / "manifest.json")
    with pytest.raises(ValueError, match=r"manifest.json is no regular file"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    "pattern",
    [
        "x-{0..99999999999}.tar",
        "x-{0..1" + "0" * 5000 + "}.tar",
        "x-{0..9999}-{0..9999}.tar",
        "{a,b}" * 40,
    ],
)
def test_more_shards_than_anybody_has_are_refused(
    pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "MOST_SHARDS", 10**4)
    with pytest.raises(ValueError, match="names more than 10,000 shards"):
        expand(pattern)


def test_many_shards_are_accepted() -> None:
    assert len(expand("laion-{00000..41455}-{a..b}.tar")) == 82912


def test_labels_and_class_names(tmp_path: Path) -> None:
    assert parse_label(b" 12\n") == 12
    for wrong in (b"", b"-1", b"cat", "²".encode(), b"1.0"):
        with pytest.raises(ValueError, match="class index such as 3"):
            parse_label(wrong)
    assert parse_label(b"000999999") == 999_999
    for large in (b"1000000", b"3000000000", b"9" * 30, b"1" + b"0" * 5000):
        with pytest.raises(ValueError, match="class index below 1,000,000, got"):
            parse_label(large)
    assert class_names(tmp_path, 2) == ("0", "1", "2")
    (tmp_path / "classnames.txt").write_text("ant\nbee\n\n")
    assert class_names(tmp_path, 1) == ("ant", "bee")
    with pytest.raises(ValueError, match="names 2 classes, but the shards hold class index 2"):
        class_names(tmp_path, 2)
    (tmp_path / "classnames.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=r"classnames.txt is not UTF-8"):
        class_names(tmp_path, 0)
