"""Pictures without classes, or of one class, train too; what needs no labels is measured."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import normalize

from offsphere.data.images import load_images
from offsphere.evaluation.images import Features, _without_classes
from offsphere.run.progress import speaking
from vision.train_simclr import Config, run


def picture(number: int, side: int = 64) -> Image.Image:
    pixels = np.random.default_rng(number).integers(0, 256, (side, side, 3), np.uint8)
    return Image.fromarray(pixels)


def settings(data: str, out: Path, **changes: object) -> Config:
    small: dict = {"batch_size": 8, "samples": 16, "threads": 1, "image_size": 16, "log_every": 1}
    return Config(data=data, out=str(out), eval_split="validation", **small | changes)


@pytest.mark.parametrize("place", ["", "only"])
def test_a_folder_without_classes_trains(place: str, tmp_path: Path, capsys):
    folder = tmp_path / "pictures" / place
    folder.mkdir(parents=True)
    for k in range(60):
        picture(k).save(folder / f"{k}.png")
    with speaking():
        metrics = run(settings(f"folder:{tmp_path / 'pictures'}", tmp_path))
    said = capsys.readouterr().out
    assert "without classes, 16 x 16 pixels" in said
    assert "(the first is 64 pixels wide or high) are shrunk to 16: --image-size=64" in said
    measured = {name for name in metrics if name.startswith("test/")}
    assert measured == {
        *(f"test/norm_{x}_{y}" for x in ("backbone", "embedding") for y in ("mean", "cv")),
        *("test/rankme_backbone", "test/rankme_embedding"),
        *("test/negative_mean", "test/negative_variance"),
    }
    assert {"train/alignment", "untrained/rankme_embedding"} <= metrics.keys()
    assert metrics["run/status"] == "finished"


def test_what_needs_no_labels_against_plain_loops():
    x = torch.randn(7, 4, generator=torch.Generator().manual_seed(0))
    found = _without_classes(Features(x, 2 * x), None)
    units = normalize(x, dim=1)
    cosines = [float(units[i] @ units[j]) for i in range(7) for j in range(7) if i != j]
    assert found["test/negative_mean"] == pytest.approx(np.mean(cosines), abs=1e-6)
    assert found["test/negative_variance"] == pytest.approx(np.var(cosines), abs=1e-6)
    assert found["test/norm_embedding_mean"] == pytest.approx(2 * float(x.norm(dim=1).mean()))
    share = torch.linalg.svdvals(x) / torch.linalg.svdvals(x).sum()
    rank = float((-(share * share.log()).sum()).exp())
    assert found["test/rankme_embedding"] == pytest.approx(rank, rel=1e-4)


def write_shard(path: Path, numbers: range, labelled: range = range(0)) -> None:
    with tarfile.open(path, "w") as tar:
        for k in numbers:
            content = io.BytesIO()
            picture(k, 16).save(content, "PNG")
            members = [(f"{k}.png", content.getvalue())]
            members += [(f"{k}.cls", b"1")] if k in labelled else []
            for name, data in members:
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))


def test_shards_without_labels(tmp_path: Path):
    write_shard(tmp_path / "a.tar", range(10))
    write_shard(tmp_path / "b.tar", range(10, 20))
    images = load_images(f"wds:{tmp_path}/*.tar", split="all")
    assert (len(images), images.classes, images.labels.unique().tolist()) == (20, ("",), [0])
    write_shard(tmp_path / "b.tar", range(10, 20), labelled=range(15, 16))
    with pytest.raises(ValueError, match="15 has a label, but those of the first shard have none"):
        load_images(f"wds:{tmp_path}/*.tar", split="all")
