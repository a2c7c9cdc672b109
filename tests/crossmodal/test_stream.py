"""Shards that are streamed over http, from files and from commands."""

from __future__ import annotations

import contextlib
import functools
import http.server
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch
from samples import encoded, write_tar
from torch import Tensor

from crossmodal import stream as stream_module
from crossmodal.stream import StreamedPairs, stream_pairs
from offsphere.data.shards import ShardFacts, checksum, scan_shard, write_manifest
from offsphere.data.splits import hash_share
from offsphere.run.config import parse

SAMPLES = (5, 7, 4, 8)
TOTAL = sum(SAMPLES)


def picture(number: int) -> Tensor:
    """A flat picture that tells its number."""
    return torch.full((3, 8, 8), number, dtype=torch.uint8)


def png(number: int) -> bytes:
    return encoded(picture(number))


def pairs(start: int, stop: int) -> list[tuple[str, bytes]]:
    return [
        member
        for i in range(start, stop)
        for member in (
            (f"s{i:03d}.png", png(i)),
            (f"s{i:03d}.json", json.dumps({"captions": [f"{i} a", f"{i} b", f"{i} c"]}).encode()),
        )
    ]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "CHUNK", 3)
    monkeypatch.setattr(stream_module, "SHUFFLE_BUFFER", 6)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four shards of different lengths."""
    start = 0
    for number, count in enumerate(SAMPLES):
        write_tar(tmp_path / f"t-{number}.tar", pairs(start, start + count))
        start += count
    return tmp_path


def with_manifest(folder: Path) -> Path:
    sizes = {f"t-{i}.tar": (folder / f"t-{i}.tar").stat().st_size for i in range(len(SAMPLES))}
    facts = {name: ShardFacts(n, b) for n, (name, b) in zip(SAMPLES, sizes.items(), strict=True)}
    write_manifest(folder, facts)
    return folder


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[str]:
    """The folder over http, on a port of its own."""
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def open_stream(base: str, **named) -> StreamedPairs:
    settings = {"image_size": 8, "batch_size": 4, "seed": 0, **named}
    return stream_pairs(f"wds:{base}/t-{{0..3}}.tar", **settings)


def numbers(batches: Iterator) -> list[int]:
    """The samples of some batches, by what their pictures and their captions say."""
    found: list[int] = []
    for pixels, captions in batches:
        assert pixels.dtype == torch.uint8
        assert pixels.shape[1:] == (3, 8, 8)
        shown = pixels[:, 0, 0, 0].tolist()
        assert shown == [int(caption.split()[0]) for caption in captions]
        found += shown
    return found


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["http", "file"])
def test_epochs_are_complete_repeatable_and_differ(
    kind: str, workers: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with_manifest(folder)
    with serve(folder) as address:
        stream = open_stream(address if kind == "http" else f"file://{folder}", workers=workers)
        assert len(stream) == TOTAL
        steps = 2 * TOTAL // 4
        before = torch.get_rng_state()
        seen = numbers(stream.from_step(0, steps))
        assert torch.equal(torch.get_rng_state(), before), "the global stream is left alone"
        again = numbers(stream.from_step(0, steps))
    assert seen == again
    first, second = seen[:TOTAL], seen[TOTAL:]
    assert sorted(first) == sorted(second) == list(range(TOTAL))
    assert first != second


@pytest.mark.parametrize(("workers", "starts"), [(0, (1, 4, 5, 6, 7, 9)), (2, (4, 7))])
def test_a_resume_goes_on_where_the_stream_was(
    workers: int, starts: tuple[int, ...], folder: Path
) -> None:
    stream = open_stream(f"file://{with_manifest(folder)}", workers=workers)
    whole = list(stream.from_step(0, 10))
    for start in starts:
        rest = list(stream.from_step(start, 10))
        assert len(rest) == 10 - start
        for (pixels, captions), (old_pixels, old_captions) in zip(rest, whole[start:], strict=True):
            assert torch.equal(pixels, old_pixels)
            assert captions == old_captions
    assert list(stream.from_step(5, 5)) == []


def test_a_resume_decodes_only_what_it_needs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = open_stream(f"file://{with_manifest(folder)}")
    decoded = []
    real = stream_module._decode_sample
    monkeypatch.setattr(
        stream_module, "_decode_sample", lambda *a: (decoded.append(a[0]["__key__"]), real(*a))[1]
    )
    numbers(stream.from_step(5, 6))
    # Steps 0 to 4 are 20 samples: six whole chunks of 3 are passed over, then 2 of the seventh.
    assert len(decoded) == TOTAL - 18


def test_captions_are_chosen_by_seed_epoch_and_key(folder: Path) -> None:
    for workers, seed in ((0, 0), (0, 1), (2, 0)):
        stream = open_stream(f"file://{with_manifest(folder)}", workers=workers, seed=seed)
        batches = list(stream.from_step(0, 2 * TOTAL // 4))
        captions = [caption for _, texts in batches for caption in texts]
        for epoch in (0, 1):
            for caption in captions[epoch * TOTAL : (epoch + 1) * TOTAL]:
                number, letter = caption.split()
                share = hash_share(f"{seed}/caption/{epoch}/s{int(number):03d}")
                assert letter == "abc"[int(share * 3)]


def test_ranks_share_the_shards(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_manifest(folder)
    monkeypatch.setenv("WORLD_SIZE", "2")
    seen: Counter = Counter()
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        stream = open_stream(f"file://{folder}", batch_size=2)
        size = stream._epoch_size(0)
        mine = numbers(stream.from_step(0, (size + 1) // 2))[:size]
        seen.update(mine)
        second = stream._epoch_size(1)
        steps = (size + second) // 2
        everything = numbers(stream.from_step(0, steps))
        assert numbers(stream.from_step(size // 2 + 1, steps)) == everything[2 * (size // 2 + 1) :]
    assert seen == Counter(range(TOTAL))
    (folder / "manifest.json").unlink()
    with pytest.raises(ValueError, match="read by 2 processes"):
        open_stream(f"file://{folder}", train_samples=TOTAL)


def cut(path: Path, share: float) -> None:
    last = scan_shard(path).members[-1]
    path.write_bytes(path.read_bytes()[: int((last.offset + last.size) * share)])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("share", [0.3, 0.5, 0.77, 0.9])
def test_a_cut_shard_is_named(share: float, workers: int, folder: Path) -> None:
    with_manifest(folder)
    cut(folder / "t-2.tar", share)
    stream = open_stream(f"file://{folder}", workers=workers)
    with pytest.raises(ValueError, match=r"shard file://.*t-2\.tar cannot be read to its end"):
        list(stream.from_step(0, 3 * TOTAL))


@pytest.mark.parametrize("share", [0.3, 0.5, 0.77, 0.9])
def test_a_cut_shard_is_counted_when_skipping(share: float, folder: Path) -> None:
    cut(folder / "t-2.tar", share)
    whole = scan_shard(folder / "t-2.tar").members
    left = len([m for m in whole if m.name.endswith("json")])
    expected = [*range(12), *range(12, 12 + left), *range(16, 24)]
    stream = open_stream(f"file://{folder}", train_samples=TOTAL, on_bad_sample="skip")
    # Two epochs of fewer samples; the second one says nothing new.
    seen = numbers(stream.from_step(0, 2 * len(expected) // 4))
    assert set(seen) <= set(expected)
    first = seen[: len(expected)]
    assert sorted(first) == expected
    assert len(stream.skipped) == 2
    assert f"{left} samples came" in next(iter(stream.skipped))
    assert f"gave {len(expected)} samples in an epoch, but 24 were" in list(stream.skipped)[1]
    batches = list(stream.from_step(0, 8))
    rest = list(stream.from_step(7, 8))
    assert rest[0][1] == batches[7][1], "a resume is exact here too"


def test_a_tar_without_end_mark_is_named_without_a_manifest(folder: Path) -> None:
    path = folder / "t-1.tar"
    last = scan_shard(path).members[-1]
    path.write_bytes(path.read_bytes()[: -(-(last.offset + last.size) // 512) * 512])
    stream = open_stream(f"file://{folder}", train_samples=TOTAL)
    with pytest.raises(ValueError, match=r"t-1\.tar .*no end-of-archive mark.*7 samples came"):
        list(stream.from_step(0, TOTAL))


def test_a_missing_shard_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    (folder / "t-2.tar").unlink()
    with serve(folder) as address:
        for base in (address, f"file://{folder}"):
            stream = open_stream(base, train_samples=TOTAL)
            with pytest.raises(ValueError, match=rf"shard {base}/t-2\.tar cannot be read"):
                list(stream.from_step(0, TOTAL))


def test_a_key_in_two_shards_is_named_or_counted(folder: Path) -> None:
    write_tar(folder / "t-3.tar", pairs(16, 23) + pairs(0, 1))
    stream = open_stream(f"file:{folder}", train_samples=TOTAL)
    with pytest.raises(ValueError, match="two samples have the key 's000', in two shards"):
        list(stream.from_step(0, 6))
    stream = open_stream(f"file:{folder}", train_samples=TOTAL, on_bad_sample="skip")
    batches = stream.from_step(0, 12)
    assert Counter(numbers(islice(batches, 5))).most_common(1)[0][1] == 1
    assert sum("s000" in message for message in stream.skipped) == 1


def test_what_is_lost_in_a_streamed_shard_is_named(folder: Path) -> None:
    """A member without a suffix, a shard without samples, a byte that flipped in a caption."""
    facts = {
        p.name: ShardFacts(n, None, checksum(p)) for n, p in zip(SAMPLES, tars(folder), strict=True)
    }
    write_manifest(folder, facts)
    base = f"file:{folder}"
    assert len(numbers(open_stream(base).from_step(0, 6))) == TOTAL
    good = (folder / "t-1.tar").read_bytes()
    (folder / "t-1.tar").write_bytes(good.replace(b'"6 b"', b'"6 x"'))
    with pytest.raises(ValueError, match=r"t-1.tar has other bytes than those whose SHA-256"):
        list(open_stream(base).from_step(0, 6))
    (folder / "manifest.json").unlink()
    write_tar(folder / "t-1.tar", [])
    with pytest.raises(ValueError, match=r"t-1.tar holds no samples"):
        list(open_stream(base, train_samples=TOTAL).from_step(0, 6))
    write_tar(folder / "t-1.tar", [*pairs(5, 12), ("picture", png(1))])
    with pytest.raises(ValueError, match=r"t-1.tar: the member 'picture' has no suffix"):
        list(open_stream(base, train_samples=TOTAL).from_step(0, 6))


def tars(folder: Path) -> list[Path]:
    return sorted(folder.glob("t-*.tar"))


def test_a_shard_of_another_length_is_named(folder: Path) -> None:
    write_manifest(folder, {f"t-{i}.tar": ShardFacts(n) for i, n in enumerate((5, 7, 5, 8))})
    stream = open_stream(f"file://{folder}")
    with pytest.raises(ValueError, match=r"t-2\.tar holds 4 samples, but manifest.json says 5"):
        list(stream.from_step(0, TOTAL))


def test_a_wrong_count_is_named(folder: Path) -> None:
    stream = open_stream(f"file://{folder}", train_samples=TOTAL + 1)
    with pytest.raises(ValueError, match="gave 24 samples in an epoch, but 25 were expected"):
        list(stream.from_step(0, TOTAL))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ([("x.png", b""), ("x.txt", b"1 t")], "x has an empty image"),
        ([("x.png", png(1)[:45]), ("x.txt", b"1 t")], "x cannot be decoded"),
        ([("x.png", png(1))], "x has no captions"),
        ([("x.txt", b"1 t")], "x has no image"),
        ([("x.png", png(1)), ("x.json", b'{"text": "t"}')], "json has only text"),
        (pairs(0, 1), "two samples have the key 's000'"),
        ([("x.png", png(1)), ("x.txt", b"1 t"), ("x.txt", b"1 t")], "duplicate file name"),
    ],
)
def test_a_bad_sample_is_named_or_skipped(extra: list, message: str, folder: Path) -> None:
    write_tar(folder / "t-0.tar", pairs(0, 5) + extra)
    stream = open_stream(f"file://{folder}", train_samples=TOTAL)
    with pytest.raises(ValueError, match=rf"file://{folder}/t-0\.tar: .*{message}"):
        list(stream.from_step(0, TOTAL))
    stream = open_stream(f"file://{folder}", train_samples=TOTAL, on_bad_sample="skip")
    assert set(numbers(stream.from_step(0, 2 * TOTAL // 4))) == set(range(TOTAL))
    assert sum(message in skipped for skipped in stream.skipped) == 1, "said once, not per epoch"


def test_a_wrong_layout_is_refused_before_training(folder: Path) -> None:
    write_tar(folder / "t-0.tar", [("x.png", png(0)), ("x.json", b'{"text": "t"}')])
    with pytest.raises(ValueError, match="expected a txt member.*has only text"):
        open_stream(f"file://{folder}", train_samples=TOTAL)
    write_tar(folder / "t-0.tar", [])
    with pytest.raises(ValueError, match="holds no samples"):
        open_stream(f"file://{folder}", train_samples=TOTAL)


def test_what_cannot_be_streamed_is_refused(folder: Path) -> None:
    base = f"file://{folder}"
    with pytest.raises(ValueError, match="4 shard.*5 worker.*at most --workers=4"):
        open_stream(base, workers=5, train_samples=TOTAL)
    with pytest.raises(ValueError, match="Pass --train-samples=N"):
        open_stream(base)
    with pytest.raises(ValueError, match="local shards"):
        open_stream(str(folder))
    with_manifest(folder)
    with pytest.raises(ValueError, match="--train-samples=7, but the manifest.json .* counts 24"):
        open_stream(base, train_samples=7)
    with pytest.raises(ValueError, match=r"does not list t-4\.tar \(1 shards"):
        stream_pairs(f"wds:{base}/t-{{0..4}}.tar", image_size=8, batch_size=2, seed=0)


def test_a_token_in_an_address_is_used_and_written_nowhere(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the same run is found again under another token."""
    from crossmodal import train_clip

    out = tmp_path / "runs"
    with serve(with_manifest(folder)) as base:
        place = base.removeprefix("http://")
        words = [
            f"--data-test=wds:{folder}/t-0.tar",
            "--samples=8",
            "--batch-size=4",
            f"--out={out}",
        ]
        for token in ("TOKEN", "OTHER"):
            data = f"wds:http://user:{token}@{place}/t-{{0..3}}.tar?sig={token}"
            config = parse(train_clip.Config, [f"--data={data}", "--threads=1", *words])
            assert config.data == f"wds:http://{place}/t-{{0..3}}.tar"
            metrics = train_clip.run(config)
            assert metrics["run/samples"] == 8
    (found,) = (out / "train_clip").iterdir()
    assert "is finished" in capsys.readouterr().out
    assert f"data: wds:http://{place}/t-{{0..3}}.tar" in (found / "config.yaml").read_text()
    for file in found.rglob("*"):
        if file.is_file():
            assert not {b"TOKEN", b"OTHER"} & set(re.findall(b"TOKEN|OTHER", file.read_bytes())), (
                file
            )


def test_commands_are_run_only_if_allowed(folder: Path) -> None:
    base = f"pipe:cat {folder}"
    with pytest.raises(ValueError, match="--allow-pipe"):
        open_stream(base, train_samples=TOTAL)
    stream = open_stream(base, train_samples=TOTAL, allow_pipe=True)
    assert sorted(numbers(stream.from_step(0, TOTAL // 4))) == list(range(TOTAL))
    assert len(numbers(stream.from_step(0, 1))) == 4, "a command may be left before its end"


def test_the_fingerprint_follows_the_manifest(folder: Path) -> None:
    base = f"file://{with_manifest(folder)}"
    first = open_stream(base).fingerprint
    assert open_stream(base, seed=1).fingerprint == first
    write_manifest(folder, {f"t-{i}.tar": ShardFacts(n) for i, n in enumerate(SAMPLES)})
    assert open_stream(base).fingerprint != first
