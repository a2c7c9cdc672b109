"""Captions of pictures: the symmetric task by hand, its batches, its refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from offsphere.run.record import RunFolder, run_path
from text import pairs, passages
from text.pairs import PairBatches, Stage, make_task
from text.passages import captions_folder
from text.train_retrieval import Config, run

PICTURES = {
    "train": [["a cat", "the cat", "one cat"], ["a dog", "some dog"], ["sun", "the sun", "a sun"]],
    "test": [["red fox", "a fox", "the fox"], ["blue sea", "a sea"]],
}


def write(folder: Path, pictures: dict[str, list[list[str]]]) -> Path:
    folder.mkdir()
    for split, rows in pictures.items():
        lines = [json.dumps({"captions": row}) + "\n" for row in rows]
        (folder / f"{split}.jsonl").write_text("".join(lines))
    return folder


def test_one_caption_asks_and_all_others_of_its_picture_are_right(tmp_path: Path, monkeypatch):
    shares = {"caption test-1": 0.5, "caption test-2": 0.0}
    monkeypatch.setattr(passages, "hash_share", shares.__getitem__)
    collection = captions_folder(write(tmp_path / "tiny", PICTURES))
    task = make_task(collection, "captions", "test")
    assert task.queries == ["a fox", "blue sea"]
    assert task.documents == ["red fox", "the fox", "a sea"]
    assert task.test == {0: {0: 1, 1: 1}, 1: {2: 1}}
    assert task.pool == ["a cat", "the cat", "one cat", "a dog", "some dog", "sun", "the sun",
                         "a sun"]  # fmt: skip
    assert task.train == [(0, (0, 1, 2)), (1, (3, 4)), (2, (5, 6, 7))]
    with pytest.raises(ValueError, match="tiny has no judgements for the split 'validation'"):
        make_task(collection, "captions", "validation")


def test_a_batch_is_two_captions_of_each_picture_and_every_pair_comes_up():
    groups = [(0, (0, 1, 2)), (1, (3, 4)), (2, (5, 6, 7))]
    numbers = torch.arange(8)[:, None]
    stage = Stage(numbers, numbers, groups, grouped=True)
    settings = Config(data="captions:x", encoder="static", batch_size=3, seed=5)
    batches = PairBatches([(0, stage)], settings, lambda rows: rows)
    seen = set()
    for step in range(120):
        batch = batches[step]
        sides = (batch[side].flatten().tolist() for side in ("query", "document"))
        couples = list(zip(*sides, strict=True))
        assert all(asks != found for asks, found in couples)
        owners = [g for pair in couples for g, members in groups if set(pair) <= set(members)]
        assert sorted(owners) == [0, 1, 2], "each picture once"
        seen |= set(couples)
    assert len(seen) == 6 + 2 + 6, "ordered pairs of each picture"


def test_a_run_learns_captions_and_measures_other_collections(
    collection_folder, tmp_path: Path, monkeypatch
):
    words = ["cat", "dog", "sun", "sea", "box", "jar", "owl", "fox", "bee", "ant", "oak", "elm"]
    rows = [[f"{a} {b}", f"{b} {a} x", f"the {a} {b}"] for a in words for b in words if a < b]
    folder = write(tmp_path / "words", {"train": rows[:50], "dev": rows[50:58], "test": rows[58:]})
    config = Config(
        data=f"captions:{folder}", encoder="static", tokens="words", width=16, batch_size=25,
        samples=25 * 40, lr=0.02, lr_rule="none", threads=1, progress=False, out=str(tmp_path),
        eval_data=(f"beir:{collection_folder}",), direction="both",
    )  # fmt: skip
    assert (config.task, config.pretrain_samples) == ("captions", 0)
    metrics = run(config)
    assert metrics["test/ndcg10"] > 0.9
    assert metrics["test/recall100"] == 1.0
    assert "test/cohens_d" not in metrics, "every candidate is relevant to a query"
    assert 0 < metrics["test/tiny/ndcg10"] < 1
    described = RunFolder(run_path(config, script="train_retrieval", out=tmp_path)).provenance()[
        "data"
    ]
    assert [described["train"][split] for split in ("train", "validation", "test")] == [50, 8, 8]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"captions": ["one"]}', "line 2 has 1 captions: a pair needs two"),
        ('{"captions": ["one", " one", ""]}', "line 2 has 1 captions"),
        ('{"captions": "one"}', r"line 2: expected \{\"captions\": \[\"...\", ...\]\}, got"),
        ('{"caption": []}', "line 2: expected"),
        ("[1, 2]", "line 2: expected"),
        ("oops", "line 2: expected"),
    ],
)
def test_bad_lines(line: str, message: str, tmp_path: Path):
    folder = write(tmp_path / "bad", {"train": [["a", "b"]]})
    with (folder / "train.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=message):
        captions_folder(folder)


def test_short_pictures_can_be_left_out_and_are_counted(tmp_path: Path):
    folder = write(tmp_path / "bad", {"train": [["a"], ["b", "c"], []]})
    found = captions_folder(folder, on_bad_sample="skip")
    assert (found.skipped, len(found.documents)) == (2, 2)


def test_refusals(tmp_path: Path, monkeypatch):
    with pytest.raises(OSError, match=r"has no captions: captions:FOLDER needs one with train"):
        captions_folder(tmp_path)
    for changes in ({"task": "captions"}, {"data": "captions:x", "task": "halves"}):
        with pytest.raises(ValueError, match="need each other"):
            Config(**changes)
    with pytest.raises(ValueError, match="which captions are not"):
        Config(data="captions:x", hard_negatives=1)
    assert pairs.question_of("p", [7, 8, 9]) in (7, 8, 9)
