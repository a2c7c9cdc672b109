"""Sentence pairs and their regression: files, the embedded pairs, correlations, both scales."""

from __future__ import annotations

import gzip
import math
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from scipy import stats

from offsphere.run.record import RunFolder, run_path
from text import sentences
from text.evaluate import correlations
from text.sentences import load_sentences
from text.settings import parse_score_scale
from text.train_sts import Config, run

WORDS = ["cat", "dog", "sun", "sea", "box", "jar", "owl", "fox", "bee", "ant", "oak", "elm"]
ROW = "main-news\tfile\t2012\t0001\t{}\t{}\t{}"


def stsb(folder: Path, rows: dict[str, list[str]]) -> str:
    folder.mkdir()
    for split, lines in rows.items():
        (folder / f"sts-{split}.csv").write_text("\n".join(lines) + "\n")
    return f"stsb:{folder}"


def test_stsb_has_no_quoting_and_sometimes_more_columns(tmp_path: Path):
    train = [ROW.format(5.0, 'He said "no.', "It's") + "\tsource\turl", ROW.format(1, "a", "b")]
    data = stsb(tmp_path / "sts", {"train": train, "dev": [ROW.format(2.5, "c", "d")]})
    found = load_sentences(data, None, "validation")
    assert found["train"].left == ['He said "no.', "a"]
    assert found["train"].score.tolist() == pytest.approx([1.0, 0.2])
    assert found["test"].score.tolist() == [0.5]
    with pytest.raises(OSError, match="sts-test.csv cannot be read"):
        load_sentences(data, None, "test")


@pytest.mark.parametrize(
    ("line", "message"),
    [("a\tb", r"line 1: expected genre.* got 2 columns"), (ROW.format(6, "a", "b"), "from 0 to 5")],
)
def test_bad_rows_are_named(tmp_path: Path, line, message):
    data = stsb(tmp_path / "sts", {"train": [line], "test": [line]})
    with pytest.raises(ValueError, match=message):
        load_sentences(data, None, "test")


def test_files_that_cannot_be_read_are_named(tmp_path: Path):
    whole = gzip.compress(("split\tsentence1\tsentence2\tlabel\n" * 500).encode(), mtime=0)
    damaged = bytearray(whole)
    damaged[12:16] = bytes(4)
    wrong = {
        "cut.tsv.gz": (whole[:-12], "cut.tsv.gz cannot be read .Compressed file ended"),
        "damaged.tsv.gz": (bytes(damaged), "damaged.tsv.gz cannot be read"),
        "latin.tsv": (b"caf\xe9", "latin.tsv is not UTF-8"),
        "header.tsv": (b"split\tsentence1\tsentence2\tlabel\n", "a header and no rows"),
    }
    for name, (content, message) in wrong.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises((OSError, ValueError), match=message):
            list(sentences._nli_pairs(tmp_path / name))


def test_allnli_joins_the_training_pairs(tmp_path: Path):
    rows = {"train": [ROW.format(5, "a", "b")], "test": [ROW.format(0, "c", "d")]}
    data = stsb(tmp_path / "sts", rows)
    file = tmp_path / "AllNLI.tsv.gz"
    lines = ["split\tdataset\tsentence1\tsentence2\tlabel", "train\tx\te\tf\tneutral"]
    lines += ["dev\tx\tg\th\tentailment", "train\tx\ti\tj\tcontradiction"]
    with gzip.open(file, "wt") as out:
        out.write("\n".join(lines))
    train = load_sentences(data, str(file), "test")["train"]
    assert (train.left, train.score.tolist()) == (["a", "e", "i"], [1.0, 0.5, 0.0])


def test_the_embedded_pairs_are_graded_and_split_by_emoji():
    found = {split: sentences._emoji_pairs(split) for split in ("train", "validation", "test")}
    names = {split: {name for pair in pairs for name in pair[:2]} for split, pairs in found.items()}
    assert not names["train"] & names["test"]
    assert len(found["train"]) > 2000
    for pairs in found.values():
        scores = [score for _, _, score in pairs]
        assert 0 <= min(scores) < 0.1
        assert 0.5 < max(scores) <= 1
        assert len({frozenset(pair[:2]) for pair in pairs}) == len(pairs)


def test_spearman_and_pearson():
    a, b = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1.0, 4.0, 3.0, 20.0])
    found = correlations(a, b)
    assert found["spearman"] == pytest.approx(1 - 6 * 2 / (4 * 15))  # two ranks differ by one
    assert found["pearson"] == pytest.approx(torch.corrcoef(torch.stack([a, b]))[0, 1].item())
    assert math.isnan(correlations(a, torch.ones(4))["spearman"])


@pytest.mark.parametrize("text", ["fixed", "fixed:0", "fixed:x", "free:1", "learnable:-1"])
def test_bad_scales(text):
    with pytest.raises(ValueError, match="expected fixed:NUMBER, learnable or learnable:NUMBER"):
        parse_score_scale(text)


def test_settings_without_effect_are_refused():
    with pytest.raises(ValueError, match="--temperature has no effect on a regression"):
        Config(temperature=0.1)


@pytest.fixture(scope="module")
def overlaps(tmp_path_factory) -> str:
    """Pairs of four words, scored by how many they share."""
    draw = random.Random(0)
    rows = []
    for _ in range(240):
        words = draw.sample(WORDS, 8)
        shared = draw.randint(0, 4)
        left, right = words[:4], words[:shared] + words[4 : 8 - shared]
        rows.append(ROW.format(5 * shared / 4, " ".join(left), " ".join(draw.sample(right, 4))))
    return stsb(tmp_path_factory.mktemp("sts") / "x", {"train": rows[:160], "test": rows[160:]})


def tiny(bert_folder: Path, data: str, out: Path, **changes) -> Config:
    settings = {"encoder": str(bert_folder), "data": data, "lr": 3e-3, "log_every": 1}
    settings |= {"samples": 160 * 20, "batch_size": 160}
    return Config(**settings | {"out": str(out), "threads": 1, "progress": False} | changes)


@pytest.mark.parametrize("scale", ["fixed:0.01", "learnable"])
@pytest.mark.parametrize("cell", ["cosine", "dot", "s1norm", "s2norm"])
def test_every_cell_and_scale_runs_and_learns(cell, scale, bert_folder, overlaps, tmp_path: Path):
    config = tiny(bert_folder, overlaps, tmp_path, cell=cell, score_scale=scale)
    metrics = run(config)
    folder = run_path(config, script="train_sts", out=tmp_path)
    kept = load_file(folder / "examples.safetensors")
    expected = stats.spearmanr(kept["predicted"].numpy(), kept["score"].numpy()).statistic
    assert metrics["test/spearman"] == pytest.approx(expected)
    own = {"s1norm": "qnorm", "s2norm": "dnorm"}.get(cell, cell)
    # Dividing by the temperature may round two scores to a tie.
    assert metrics[f"test/spearman_scored_{own}"] == pytest.approx(expected, abs=2e-3)
    error = (kept["predicted"] - kept["score"]).square().mean().item()
    assert metrics["test/mse"] == pytest.approx(error)
    losses = [row["train/loss"] for row in RunFolder(folder).steps()]
    assert losses[-1] < losses[0]  # every batch holds all pairs
    if scale == "fixed:0.01":
        assert metrics["train/score_scale"] == pytest.approx(0.01)


def test_a_learnable_scale_starts_at_the_least_squares_fit(bert_folder, overlaps, tmp_path: Path):
    metrics = run(tiny(bert_folder, overlaps, tmp_path, samples=160, cell="dot"))
    # At the fit no other scale is better: the error's slope there is zero.
    config = tiny(bert_folder, overlaps, tmp_path, samples=160, cell="dot", study="near")
    start = metrics["train/score_scale"]
    losses = []
    for factor in (0.99, 1.0, 1.01):
        near = {**config.__dict__, "score_scale": f"fixed:{start * factor}"}
        losses.append(run(Config(**near))["train/loss"])
    assert losses[1] == pytest.approx(metrics["train/loss"], rel=1e-4)
    assert losses[1] < min(losses[0], losses[2])
