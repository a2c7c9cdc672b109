"""Parts of data sets by a hash: fixed for ever, a partition, of the shares that are said. And data
that a caller brings along: through every lane to metrics, recorded, resumable."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset

from crossmodal import train_clip
from offsphere.data.pictures import square_pixels
from offsphere.data.splits import (
    Handed,
    Splits,
    carve,
    hash_share,
    in_validation,
    parts_of_split,
    split_of,
)
from offsphere.run.config import settings_hash
from offsphere.run.record import RunFolder
from offsphere.training import images as experiment
from text import train_retrieval, train_sts
from vision import train_simclr

SMALL = {"batch_size": 8, "samples": 32, "threads": 1, "device": "cpu", "log_every": 1}
COLOURS = ("red", "green", "blue")


class Squares(Dataset):
    """Noisy squares of three colours, as the lane wants them."""

    def __init__(self, count: int, seed: int, caption: bool = False) -> None:
        self.count, self.seed, self.caption = count, seed, caption

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: int):
        draw = np.random.default_rng([self.seed, row])
        colour = row % 3
        pixels = draw.integers(0, 60, (20, 24, 3), dtype=np.uint8)
        pixels[:, :, colour] += 180
        label = [f"a {COLOURS[colour]} square", f"square {row}"] if self.caption else colour
        return Image.fromarray(pixels), label


def only_run(out: Path) -> RunFolder:
    (file,) = out.rglob("metrics.json")
    return RunFolder(file.parent)


def squares(fingerprint: str = "v1", *, caption: bool = False, **more) -> Handed:
    train, test = Squares(24, 0, caption), Squares(12, 1, caption)
    return Handed("squares", fingerprint, train, test, **more)


def test_images_of_a_dataset_are_trained_on_and_classified(tmp_path: Path):
    config = train_simclr.Config(**SMALL, image_size=16, out=str(tmp_path), knn_k=3)
    metrics = train_simclr.run(config, squares(classes=COLOURS))
    assert metrics["test/knn"] == 1.0  # a colour is plain to see
    assert metrics["test/majority"] == pytest.approx(1 / 3)
    folder = only_run(tmp_path)
    assert folder.path.name.endswith(settings_hash(train_simclr.Config(
        **SMALL, image_size=16, knn_k=3, data="handed:squares")))  # fmt: skip
    recorded = folder.provenance()["data"]
    about = {"data": "handed:squares", "hash": "v1", "skipped": 0}
    assert recorded == {"train": {**about, "size": 24}, "test": {**about, "size": 12}}
    assert "data: handed:squares" in (folder.path / "config.yaml").read_text()
    # The same name again is the same run; with another fingerprint it is other data.
    assert train_simclr.run(config, squares(classes=COLOURS)) == metrics
    with pytest.raises(ValueError, match="was made with other data: train was .* v1 and is .* v2"):
        train_simclr.run(config, squares("v2", classes=COLOURS))


def test_a_run_on_handed_images_resumes(tmp_path: Path, monkeypatch):
    more = {**SMALL, "image_size": 16, "checkpoint_every": 1, "keep": "best", "eval_every": 16}
    whole = train_simclr.Config(**more, out=str(tmp_path / "whole"))
    with pytest.raises(ValueError, match="--keep=best needs validation data"):
        train_simclr.run(whole, squares())
    validated = squares(validation=Squares(9, 2))
    expected = train_simclr.run(whole, validated)
    assert 0 <= expected["validation/score"] <= 1
    cut = train_simclr.Config(**more, out=str(tmp_path / "cut"))
    ours = experiment.TrainingBatches.part

    def until_the_cut(batches, step, rows):
        if step == 2:
            raise KeyboardInterrupt
        return ours(batches, step, rows)

    monkeypatch.setattr(experiment.TrainingBatches, "part", until_the_cut)
    with pytest.raises(KeyboardInterrupt):
        train_simclr.run(cut, validated)
    monkeypatch.undo()
    again = train_simclr.run(cut, validated)
    assert {k: v for k, v in again.items() if not k.startswith("run/")} == {
        k: v for k, v in expected.items() if not k.startswith("run/")
    }


def test_images_and_captions_of_a_dataset_are_retrieved(tmp_path: Path):
    config = train_clip.Config(**SMALL, out=str(tmp_path))
    metrics = train_clip.run(config, squares(caption=True))
    assert metrics["test/chance_t2i_r1"] == pytest.approx(1 / 12)
    assert 0 <= metrics["test/i2t_r1"] <= 1
    assert math.isfinite(metrics["train/loss"])
    recorded = only_run(tmp_path).provenance()["data"]
    assert recorded["train"] == {
        "data": "handed:squares", "size": 24, "hash": "v1", "skipped": 0
    }  # fmt: skip


def sentences(count: int, seed: int) -> list[tuple[str, str]]:
    draw = np.random.default_rng(seed)
    words = [[f"w{n}" for n in draw.integers(0, 500, 6)] for _ in range(count)]
    return [(" ".join(x[:3]), " ".join(x)) for x in words]


def test_an_iterable_of_text_pairs_is_retrieved(tmp_path: Path):
    config = train_retrieval.Config(
        **SMALL, out=str(tmp_path), encoder="static", tokens="words", width=16
    )
    handed = Handed("queries", "2024-05", iter(sentences(40, 0)), sentences(10, 1))
    metrics = train_retrieval.run(config, handed)
    # A query's words are half of its document's and of nearly no other's.
    assert metrics["test/ndcg10"] > 0.8
    recorded = only_run(tmp_path).provenance()["data"]["train"]
    assert (recorded["data"], recorded["hash"]) == ("handed:queries", "2024-05")
    assert (recorded["documents"], recorded["train"], recorded["test"]) == (50, 40, 10)


def test_scored_sentences_are_regressed_on(tmp_path: Path):
    pairs = [(a, b, 1.0) for a, b in sentences(20, 0)]
    pairs += [
        (a, b, 0.0) for (a, _), (_, b) in zip(sentences(20, 2), sentences(20, 3), strict=True)
    ]
    config = train_sts.Config(
        **SMALL, out=str(tmp_path), encoder="static", tokens="words", width=16
    )
    metrics = train_sts.run(config, Handed("scored", "a", pairs[::2], pairs[1::2]))
    assert metrics["test/spearman"] > 0.8
    assert only_run(tmp_path).provenance()["data"]["train"]["hash"] == "a"


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"name": "my data"}, "need a name of letters"),
        ({"fingerprint": ""}, "need a fingerprint"),
    ],
)
def test_handed_data_have_a_name_and_a_fingerprint(change: dict, error: str):
    with pytest.raises(ValueError, match=error):
        Handed(**{"name": "x", "fingerprint": "y", "train": []} | change)


def test_what_was_not_handed_in_is_refused(tmp_path: Path):
    config = train_simclr.Config(**SMALL, data="handed:squares", out=str(tmp_path))
    with pytest.raises(ValueError, match=r"call run\(config, data=Handed\(name='squares'"):
        train_simclr.run(config)
    only_train = Handed("squares", "v1", Squares(24, 0))
    with pytest.raises(ValueError, match="have no test split, which is measured"):
        train_simclr.run(train_simclr.Config(**SMALL, out=str(tmp_path)), only_train)
    assert list(tmp_path.iterdir()) == []  # nothing is left behind


def test_pictures_and_bytes_become_the_same_square():
    picture, _ = Squares(3, 0)[0]
    pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)
    found = square_pixels([picture, pixels, pixels.numpy()], 10, "x")
    assert found.shape == (3, 3, 10, 10)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    with pytest.raises(ValueError, match=r"Image 1 of the handed data x: .* torch.float32"):
        square_pixels([picture, pixels / 255], 10, "x")


def test_hash_never_changes() -> None:
    """Published splits depend on these numbers."""
    assert hash_share("grinning face") == pytest.approx(0.21958033970878077, abs=1e-12)
    assert split_of("grinning face") == "train"


def test_carving_is_a_partition_by_name_alone() -> None:
    keys = [f"key {i}" for i in range(2000)]
    train, validation = carve(keys, "train"), carve(iter(keys), "validation")
    assert sorted([*train, *validation]) == list(range(2000))
    assert all(in_validation(keys[i]) for i in validation)
    # Binomial with share 0.1: four standard deviations are 54.
    assert abs(len(validation) - 200) < 54
    assert carve(keys, "all") == carve(keys, "train+validation")
    assert len(carve(keys, "all")) == 2000


def test_samples_are_counted_not_faults_and_once_for_two_parts_of_the_same_shards() -> None:
    def part(**skipped: int) -> SimpleNamespace:
        return SimpleNamespace(skipped=skipped)

    assert Splits(part(cut=6), part(cut=6)).left_out == ", 6 damaged ones left out"
    assert Splits(part(cut=6, a=1), part(b=1)).left_out == ", 8 damaged ones left out"
    assert Splits(part(), part()).left_out == ""


def test_parts_of_splits() -> None:
    assert parts_of_split("test") == ("test",)
    assert parts_of_split("train+validation") == ("train", "validation")
    assert parts_of_split("all") == ("train", "validation", "test")
