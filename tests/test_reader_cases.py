"""Inputs that were tried on the readers of all lanes: what is odd is read, what is wrong is named.

Each case writes its files and reads them as a script would; the message, or how many samples come.
"""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from samples import bomb, encoded, random_picture, write_tar

from crossmodal.captions import load_captions
from offsphere.data.images import load_images
from offsphere.data.shards import shard_addresses
from text.passages import load_collection
from text.sentences import load_sentences

PNG = encoded(random_picture(0))
JPG = encoded(random_picture(0), "jpg")
Members = list[tuple[str, bytes]]


def shard(*extra: tuple[str, bytes], label: bool = False) -> Callable[[Path], str]:
    """Four good samples and what else there is, in one shard."""
    kind, text = ("cls", b"1") if label else ("txt", b"a caption")
    good = [m for i in range(4) for m in ((f"k{i}.png", PNG), (f"k{i}.{kind}", text))]
    zero: Members = [("k9.png", PNG), ("k9.cls", b"0")] if label else []

    def write(folder: Path) -> str:
        return f"wds:{write_tar(folder / 's.tar', [*good, *zero, *extra])}"

    return write


def linked_member(kind: bytes) -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        name = shard(("x.txt", b"t"))(folder)
        with tarfile.open(folder / "s.tar", "a") as archive:
            link = tarfile.TarInfo("x.png")
            link.type, link.linkname = kind, "/etc/passwd"
            archive.addfile(link)
        return name

    return write


def changed(change: Callable[[bytes], bytes]) -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        name = shard()(folder)
        content = (folder / "s.tar").read_bytes()
        (folder / "s.tar").write_bytes(change(content))
        return name

    return write


def manifest(text: str) -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        shard()(folder)
        (folder / "manifest.json").write_text(text)
        return f"wds:{folder}/*.tar"

    return write


def table(*rows: str, header: str = "image,caption") -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        for number in range(4):
            (folder / f"i{number}.png").write_bytes(PNG)
        good = [f"i{number}.png,cap {number}" for number in range(4)]
        (folder / "p.csv").write_text("\n".join([header, *good, *rows]) + "\n")
        return f"csv:{folder}/p.csv"

    return write


def pictures(*extra: tuple[str, bytes]) -> Callable[[Path], str]:
    """Three pictures in each of two class folders and what else there is."""

    def write(folder: Path) -> str:
        for name in ("a", "b"):
            (folder / name).mkdir()
            for number in range(3):
                (folder / name / f"{number}.png").write_bytes(PNG)
        for name, content in extra:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)
        return f"folder:{folder}"

    return write


def special(make: Callable[[Path], object], name: str) -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        data = pictures()(folder)
        make(folder / name)
        return data

    return write


def beir(name: str, line: str) -> Callable[[Path], str]:
    """A small collection in whose file a line comes first."""

    def write(folder: Path) -> str:
        (folder / "qrels").mkdir()
        documents = [{"_id": f"d{i}", "title": "t", "text": f"text {i}"} for i in range(4)]
        queries = [{"_id": f"q{i}", "text": f"query {i}"} for i in range(4)]
        files = {
            "corpus.jsonl": [json.dumps(row) for row in documents],
            "queries.jsonl": [json.dumps(row) for row in queries],
            "qrels/train.tsv": [
                "query-id\tcorpus-id\tscore",
                *(f"q{i}\td{i}\t1" for i in range(4)),
            ],
        }
        files[name].insert(1, line)
        for file, lines in files.items():
            (folder / file).write_text("\n".join(lines) + "\n")
        return f"beir:{folder}"

    return write


def stsb(line: str) -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        good = "g\tf\t2012\t1\t2.5\tone\ttwo"
        for split in ("train", "dev"):
            (folder / f"sts-{split}.csv").write_text(f"{good}\n{line}\n{good}\n")
        return f"stsb:{folder}"

    return write


def clip(data: str) -> int:
    return len(load_captions(data, split="all", image_size=8))


def vision(data: str) -> int:
    return len(load_images(data, split="all", image_size=8))


def retrieval(data: str) -> int:
    found = load_collection(data)
    return sum(len(grades) for grades in found.relevant.values())


def sts(data: str) -> int:
    return len(load_sentences(data, None, "validation")["train"].left)


def address(pattern: str) -> Callable[[Path], str]:
    return lambda _folder: pattern


def addresses(pattern: str) -> int:
    return len(shard_addresses(pattern, allow_pipe=False))


CASES: dict[str, tuple[Callable[[str], int], Callable[[Path], str], int | str]] = {
    "d00 as it should be": (clip, shard(), 4),
    "d01 half of it": (clip, changed(lambda c: c[: len(c) // 2]), "cut short or damaged"),
    "d02 its first block": (clip, changed(lambda c: c[:700]), "cut short"),
    "d09 empty": (clip, changed(lambda _: b""), "empty file"),
    "d31 noise": (clip, changed(lambda c: b"no tar" * 999), "no uncompressed tar file"),
    "d11 absolute and .. members": (
        clip,
        shard(("/etc/x.png", PNG), ("/etc/x.txt", b"t"), ("../y.png", PNG), ("../y.txt", b"t")),
        6,
    ),
    "d12 a link as image": (clip, linked_member(tarfile.SYMTYPE), "x has no image"),
    "d13 a hard link as image": (clip, linked_member(tarfile.LNKTYPE), "x has no image"),
    "d17 JPEG named png": (clip, shard(("x.png", JPG), ("x.txt", b"t")), 5),
    "d23 caption in no encoding": (clip, shard(("x.png", PNG), ("x.txt", b"\xff")), "not UTF-8"),
    "d25 a caption of a megabyte": (clip, shard(("x.png", PNG), ("x.txt", b"word " * 200_000)), 5),
    "d26 emoji and control characters": (
        clip,
        shard(("x.png", PNG), ("x.txt", "\U0001f600 \x07 \u202e".encode())),
        5,
    ),
    "hidden members": (clip, shard(("._k0.png", b"x"), ("__MACOSX/._k1", b"x"), (".x", b"x")), 4),
    "further members": (clip, shard(("k0.mp3", b"x"), ("k0.json", b'{"caption": "a caption"}')), 4),
    "d27 one sample more": (
        clip,
        manifest('{"shards": {"s.tar": {"samples": 5}}}'),
        "holds 4 samples, but manifest.json says 5",
    ),
    "a manifest that says less": (clip, manifest('{"shards": {"s.tar": {"samples": 4}}}'), 4),
    "d28 half a manifest": (clip, manifest('{"shards": {"s'), "no manifest of shards"),
    "d29 a shard that is not there": (
        clip,
        manifest('{"shards": {"t.tar": {"samples": 5}}}'),
        "t.tar is missing, and 5 samples with it",
    ),
    "d30 a manifest that leads elsewhere": (
        clip,
        manifest('{"shards": {"../../s-1.tar": {"samples": 5}}}'),
        "is missing",
    ),
    "d32 one label": (clip, shard(("k3.cls", b"1")), "k0 has no label"),
    "v00 as it should be": (vision, shard(label=True), 5),
    "v03 a label below 0": (
        vision,
        shard(("x.png", PNG), ("x.cls", b"-1"), label=True),
        "such as 3",
    ),
    "v09 no label": (vision, shard(("x.png", PNG), label=True), "x has no label"),
    "v10 no image": (vision, shard(("x.cls", b"1"), label=True), "x has no image"),
    "v13 a GIF": (vision, shard(("x.gif", b"GIF"), ("x.cls", b"1"), label=True), "x has no image"),
    "t60 as it should be": (clip, table(), 4),
    "t61 a cell of two lines": (clip, table('i0.png,"two', 'lines"'), 4),
    "t62 no caption": (clip, table("i3.png"), "line 6: expected 2 fields"),
    "t63 no image": (clip, table(",x"), "line 6: expected 2 fields"),
    "t64 no picture": (
        clip,
        table("/etc/passwd,x"),
        "/etc/passwd cannot be decoded: it is no pict",
    ),
    "t65 an empty line": (clip, table("", "i0.png,again"), 4),
    "t67 a cell over csv's limit": (clip, table("i0.png," + "x" * 140_000), "line 6: field larger"),
    "t68 bare commas": (clip, table("i0.png,one, two, three"), 4),
    "t69 a path upwards": (
        clip,
        table("../../../../../../etc/hostname,x"),
        "cannot be decoded|miss",
    ),
    "a byte-order mark": (clip, table(header="\ufeffimage,caption"), 4),
    "f00 as it should be": (vision, pictures(), 6),
    "f01 an empty picture": (vision, pictures(("a/z.png", b"")), "z.png is empty"),
    "f03 a link to nothing": (
        vision,
        special(lambda p: p.symlink_to("nothing"), "a/z.png"),
        "z.png is missing",
    ),
    "f04 a link to itself": (vision, special(lambda p: p.symlink_to("loop"), "a/loop"), 6),
    "f06 a pipe": (vision, special(lambda p: os.mkfifo(p), "a/z.png"), "z.png is empty"),
    "f07 a bomb": (vision, pictures(("a/z.png", bomb())), "exceeds limit"),
    "f09 a class with one picture": (vision, pictures(("c/0.png", PNG)), 7),
    "f22 other names of JPEG": (vision, pictures(("a/z.jpe", JPG), ("a/z.JFIF", JPG)), 8),
    "f24 an empty class": (vision, special(lambda p: p.mkdir(), "c"), 6),
    "files that are no pictures": (vision, pictures(("a/.DS_Store", b"x"), ("README.md", b"x")), 6),
    "w00 an empty line": (retrieval, beir("corpus.jsonl", ""), 4),
    "w01 no JSON": (retrieval, beir("corpus.jsonl", "{x}"), "corpus.jsonl, line 2 is not JSON"),
    "w02 no object": (
        retrieval,
        beir("corpus.jsonl", "[1]"),
        "expected an object with _id and text",
    ),
    "w04 a number as text": (retrieval, beir("corpus.jsonl", '{"_id": 1, "text": 5}'), "in quotes"),
    "w05 an id twice": (
        retrieval,
        beir("corpus.jsonl", '{"_id": "d0", "text": "x"}'),
        "more than on",
    ),
    "w06 a document that is not there": (retrieval, beir("qrels/train.tsv", "q0\tdX\t1"), "'dX'"),
    "w07 half a grade": (retrieval, beir("qrels/train.tsv", "q0\td0\t1.5"), "train.tsv, line 2"),
    "w10 a grade over int64": (retrieval, beir("qrels/train.tsv", f"q0\td1\t{'9' * 30}"), 4),
    "a grade of 0": (retrieval, beir("qrels/train.tsv", "q0\td1\t0"), 4),
    "w22 no score": (
        sts,
        stsb("g\tf\t2012\t1\tnan\tx y\tz"),
        "line 2: expected a score from 0 to 5",
    ),
    "w23 a score of 9": (sts, stsb("g\tf\t2012\t1\t9\tx y\tz"), "line 2: expected a score"),
    "w24 three columns": (sts, stsb("a\tb\tc"), "line 2: expected genre"),
    "bare quotes and more columns": (sts, stsb('g\tf\t2012\t1\t1\tsaid "x\ty"\tmore\tmore'), 3),
    "c09 a command": (addresses, address("pipe:touch x"), "would run a command"),
    "c10 PIPE": (addresses, address("PIPE:touch x #://"), "written as pipe:COMMAND"),
    "c13 quotes and spaces": (addresses, address("http://h/x'; touch y; '.tar"), "holds a space"),
    "c19 half an address": (addresses, address("http://[::1/x.tar"), "Invalid IPv6 URL"),
    "c21 10^11 shards": (addresses, address("http://h/{0..99999999999}.tar"), "names more than"),
    "c22 half a brace": (addresses, address("http://h/x-{.tar"), "do not pair up"),
    "many shards": (addresses, address("https://h/{00000..41455}.tar"), 41456),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_odd_is_read_and_what_is_wrong_is_named(case: str, tmp_path: Path) -> None:
    read, write, expected = CASES[case]
    data = write(tmp_path)
    if isinstance(expected, int):
        assert read(data) == expected
        return
    with pytest.raises((ValueError, OSError), match=expected) as caught:
        read(data)
    assert "\n" not in str(caught.value), "one line"
