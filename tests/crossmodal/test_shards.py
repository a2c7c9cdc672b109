"""Shards that are made, and what reads them."""

from __future__ import annotations

import json
import tarfile
import warnings
from pathlib import Path

import pytest
import torch
from PIL import Image
from samples import encoded
from torch import Tensor

from crossmodal.captions import load_captions
from crossmodal.shards import Config, main, run
from offsphere.data.shards import read_manifest
from offsphere.data.splits import hash_share


def picture(number: int) -> Tensor:
    """A flat picture that tells its number."""
    return torch.full((3, 8, 8), number, dtype=torch.uint8)


def png(number: int) -> bytes:
    return encoded(picture(number))


@pytest.fixture
def table(tmp_path: Path) -> str:
    """Twelve pictures with two captions each, in a table."""
    (tmp_path / "pics").mkdir()
    for i in range(12):
        (tmp_path / "pics" / f"p.{i:02d}.png").write_bytes(png(i))
    rows = [f"pics/p.{i:02d}.png,{i} {k}" for k in "ab" for i in range(12)]
    (tmp_path / "pairs.csv").write_text("\n".join(["image,caption", *rows]))
    return f"csv:{tmp_path}/pairs.csv"


def test_made_shards_hold_the_source(table: str, tmp_path: Path) -> None:
    out = tmp_path / "new" / "shards"
    summary = run(Config(source=table, out=str(out), shard_size=5))
    assert {k: summary[k] for k in ("shards", "samples", "skipped")} == {
        "shards": 3,
        "samples": 12,
        "skipped": 0,
    }
    assert summary["data"] == f"wds:{out}/all-{{000000..000002}}.tar"
    assert sorted(p.name for p in out.parent.rglob("*")) == [
        *(f"all-{i:06d}.tar" for i in range(3)),
        "manifest.json",
        "shards",
        "sizes.json",
    ]
    made = load_captions(summary["data"], split="all", image_size=8)
    source = load_captions(table, split="all", image_size=8)
    assert made.captions == source.captions
    assert made.keys == tuple(f"pics/p_{i:02d}" for i in range(12))
    assert torch.equal(made.batch(torch.arange(12)), source.batch(torch.arange(12)))
    with tarfile.open(out / "all-000002.tar") as archive:
        assert archive.extractfile("pics/p_11.png").read() == png(11)  # pyright: ignore


def test_open_clips_own_loader_reads_made_shards(table: str, tmp_path: Path) -> None:
    """Its trainer's: every picture with its first caption, and the size that sizes.json gives."""
    from argparse import Namespace

    from open_clip_train.data import get_dataset_size, get_wds_dataset

    summary = run(Config(source=table, out=f"{tmp_path}/made", shard_size=5))
    settings = Namespace(
        val_data=summary["data"].removeprefix("wds:"), val_num_samples=None, batch_size=4, workers=1
    )  # fmt: skip

    def first_pixel(image: Image.Image) -> Tensor:
        return torch.tensor(image.getpixel((0, 0)))

    def as_numbers(text: str) -> Tensor:
        return torch.tensor([list(text.encode().ljust(8))])

    loader = get_wds_dataset(settings, first_pixel, False, tokenizer=as_numbers).dataloader
    seen = [
        (picture[0].item(), bytes(text.tolist()).decode().strip())
        for pictures, texts in loader
        for picture, text in zip(pictures, texts, strict=True)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # it leaves closing to the collector
        assert get_dataset_size(settings.val_data) == (12, 3)
    assert sorted(seen) == [(i, f"{i} a") for i in range(12)]


def test_members_of_made_shards(table: str, tmp_path: Path) -> None:
    run(Config(source=table, out=f"{tmp_path}/made"))
    with tarfile.open(tmp_path / "made" / "all-000000.tar") as archive:
        assert archive.getnames()[:3] == ["pics/p_00.png", "pics/p_00.txt", "pics/p_00.json"]
        assert archive.extractfile("pics/p_00.txt").read() == b"0 a"  # pyright: ignore
        text = archive.extractfile("pics/p_00.json").read()  # pyright: ignore
        assert json.loads(text) == {"caption": "0 a", "captions": ["0 a", "0 b"]}


def test_the_manifest_of_made_shards_is_true(table: str, tmp_path: Path) -> None:
    import hashlib

    run(Config(source=table, out=f"{tmp_path}/a", shard_size=5))
    run(Config(source=table, out=f"{tmp_path}/b", shard_size=5))
    manifest = read_manifest(tmp_path / "a")
    assert [facts.samples for facts in manifest.values()] == [5, 5, 2]
    for name, facts in manifest.items():
        content = (tmp_path / "a" / name).read_bytes()
        assert facts.bytes == len(content)
        assert facts.sha256 == hashlib.sha256(content).hexdigest()
        assert content == (tmp_path / "b" / name).read_bytes(), "equal sources, equal bytes"


def test_shuffled_shards_follow_the_hash(table: str, tmp_path: Path) -> None:
    summary = run(Config(source=table, out=f"{tmp_path}/a", shuffle=True))
    keys = load_captions(summary["data"], split="all", image_size=8).keys
    assert keys == tuple(sorted(keys, key=hash_share))
    assert len(keys) == 12


def test_a_split_of_a_flickr_folder(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    for i in range(6):
        (tmp_path / "images" / f"{i}.png").write_bytes(png(i))
    rows = "\n".join(f"{i}.png#0\ttext {i}" for i in range(6))
    (tmp_path / "Flickr8k.token.txt").write_text(rows)
    (tmp_path / "Flickr_8k.devImages.txt").write_text("4.png\n1.png\n")
    config = Config(source=f"folder:{tmp_path}", out=f"{tmp_path}/dev", split="validation")
    made = load_captions(run(config)["data"], split="all", image_size=8)
    assert made.keys == ("4", "1")
    assert made.captions == (("text 4",), ("text 1",))


def test_nothing_is_left_of_a_failure(table: str, tmp_path: Path) -> None:
    (tmp_path / "pics" / "p.07.png").write_bytes(png(7)[:45])
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"p\.07\.png cannot be decoded"):
        run(Config(source=table, out=f"{tmp_path}/a", shard_size=5))
    assert sorted(tmp_path.iterdir()) == before
    summary = run(Config(source=table, out=f"{tmp_path}/a", shard_size=5, on_bad_sample="skip"))
    assert (summary["samples"], summary["skipped"]) == (11, 1)
    with pytest.raises(FileExistsError, match="is there already"):
        run(Config(source=table, out=f"{tmp_path}/a"))


def test_other_formats_and_equal_keys_are_refused(table: str, tmp_path: Path) -> None:
    (tmp_path / "pics" / "p.07.png").rename(tmp_path / "pics" / "p.07.gif")
    text = (tmp_path / "pairs.csv").read_text()
    (tmp_path / "pairs.csv").write_text(text.replace("p.07.png", "p.07.gif"))
    with pytest.raises(ValueError, match=r"p\.07\.gif: shards hold jpg, jpeg, png, webp pictures"):
        run(Config(source=table, out=f"{tmp_path}/a"))
    (tmp_path / "pics" / "p.07.gif").rename(tmp_path / "pics" / "p.07.png")
    (tmp_path / "pics" / "p_01.png").write_bytes(png(1))
    (tmp_path / "pairs.csv").write_text(text + "\npics/p_01.png,x\n")
    with pytest.raises(ValueError, match=r"p\.01\.png and pics/p_01\.png would both have the key"):
        run(Config(source=table, out=f"{tmp_path}/a"))


def test_the_command_says_how_to_read_the_shards(
    table: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    flags = [f"--source={table}", f"--out={tmp_path}/a", "--name=toys"]
    main(flags)
    out = capsys.readouterr().out
    assert "12 samples in 1 shards" in out
    assert f"--data=wds:{tmp_path}/a/toys-000000.tar" in out
    with pytest.raises(SystemExit) as ended:
        main(flags)
    assert ended.value.code == 1
    assert "is there already" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main([f"--source={tmp_path}", "--out=x"])
    assert ended.value.code == 2
    assert "must be folder:PATH or csv:FILE" in capsys.readouterr().err
