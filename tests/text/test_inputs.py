"""Runs with encoders that can move: static vectors, top layers, no final LayerNorm; they resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from samples import write_bert

from offsphere.encoders.text import ScratchEncoder, encode
from offsphere.run.record import RunFolder, run_path
from text import experiment, inputs
from text import settings as text_settings
from text.inputs import Inputs
from text.methods import make_towers
from text.train_retrieval import Config, run

WORDS = ["cat", "dog", "sun", "sea", "box", "jar", "owl", "fox", "bee", "ant", "oak", "elm"]
TIMES = ("run/seconds", "run/ended")


@pytest.fixture(scope="module")
def deep_folder(tmp_path_factory) -> Path:
    return write_bert(tmp_path_factory.mktemp("deep"), WORDS, layers=3)


def tiny(data: Path, out: Path, **changes) -> Config:
    settings = {
        "data": f"beir:{data}", "encoder": "static", "tokens": "words", "width": 16,
        "out": str(out), "batch_size": 12, "samples": 24 * 12, "max_length": 16, "threads": 1,
        "log_every": 1, "progress": False, "lr": 1e-2, "lr_rule": "none", "cell": "dnorm",
    }  # fmt: skip
    return Config(**settings | changes)


def changes_of(how: str, deep: Path) -> dict[str, object]:
    model = {"encoder": str(deep), "tokens": "auto"}
    return {
        "words": {},
        "model": {"tokens": "auto", "token_start": str(deep)},
        "top": {**model, "tune": "top:2"},
        "redrawn": {**model, "tune": "top:2", "redraw": 2, "towers": "separate", "head": "linear"},
        "whole": {**model, "tune": "all", "redraw": 1},
    }[how]


@pytest.mark.parametrize("how", ["words", "model", "top", "redrawn", "whole"])
def test_a_cut_run_goes_on_bit_for_bit(
    how: str, collection_folder, deep_folder, tmp_path: Path, monkeypatch
):
    changes = changes_of(how, deep_folder) | {"hard_negatives": 1, "lr": 3e-3}
    whole = tiny(collection_folder, tmp_path / "whole", **changes)
    cut = tiny(collection_folder, tmp_path / "cut", checkpoint_every=5, **changes)
    metrics = run(whole)
    losses = [row["train/loss"] for row in _folder(whole).steps()]
    assert sum(losses[-6:]) < sum(losses[:6])

    class Cut(experiment.PairBatches):
        def __getitem__(self, step: int):
            if step == 13:
                raise KeyboardInterrupt
            return super().__getitem__(step)

    with monkeypatch.context() as patch:
        patch.setattr(experiment, "PairBatches", Cut)
        with pytest.raises(KeyboardInterrupt):
            run(cut)
    assert _folder(cut).steps()[-1]["step"] == 12
    again = run(cut)
    assert len(_folder(cut).provenance()["resumed"]) == 1
    assert _without_times(again) == _without_times(metrics)
    for name in ("encoder.safetensors", "examples.safetensors"):
        ours, theirs = (load_file(_folder(x).path / name) for x in (cut, whole))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[k], theirs[k]) for k in ours), name


def _folder(config: Config) -> RunFolder:
    return RunFolder(run_path(config, script="train_retrieval", out=config.out))


def _without_times(row: dict) -> dict:
    return {k: v for k, v in row.items() if k not in TIMES}


def test_only_the_top_layers_are_trained_and_saved(collection_folder, deep_folder, tmp_path: Path):
    changes = changes_of("redrawn", deep_folder) | {"redraw": 1, "towers": "shared"}
    config = tiny(collection_folder, tmp_path, **changes)
    run(config)
    weights = load_file(_folder(config).path / "encoder.safetensors")
    start = make_towers(Inputs(config).trained, config).state_dict()
    assert weights.keys() == start.keys()
    layers = {name.split("layer.")[1][0] for name in weights if "layer." in name}
    assert layers == {"0", "1"}, "the last two of three"
    assert not any("embeddings" in name or "pooler" in name for name in weights)
    moved = {name for name in weights if not torch.equal(weights[name], start[name])}
    assert moved == weights.keys()
    plain = tiny(collection_folder, tmp_path, **changes | {"redraw": 0})
    intact = make_towers(Inputs(plain).trained, plain).state_dict()
    drawn = {n for n in start if start[n].ndim > 1 and not torch.equal(start[n], intact[n])}
    assert {name.split("layer.")[1][0] for name in drawn} == {"1"}


def test_one_seed_draws_the_same_layers_and_vectors_in_every_cell(
    collection_folder, deep_folder, tmp_path: Path
):
    for how in ("words", "redrawn"):
        changes = changes_of(how, deep_folder)
        first, same, other = (
            make_towers(Inputs(config).trained, config).state_dict()
            for config in (
                tiny(collection_folder, tmp_path, **changes | kind)
                for kind in ({"cell": "dot"}, {"cell": "cosine"}, {"seed": 1})
            )
        )
        assert all(torch.equal(first[name], same[name]) for name in first)
        name = next(n for n in first if n.endswith(("vectors", "layer.1.output.dense.weight")))
        together = torch.stack([first[name].flatten(), other[name].flatten()])
        assert torch.corrcoef(together)[0, 1].abs() < 0.1


def test_without_the_final_norm_every_token_has_a_norm_of_its_own():
    """With it each token's state has the norm sqrt(width) at the start, before the mean."""
    for final, constant in ((True, True), (False, False)):
        torch.manual_seed(0)
        encoder = ScratchEncoder(width=32, layers=2, heads=2, max_length=16, final_norm=final)
        tokens = encoder.tokenize(["a", "b", "c", "d", "e"], 16)
        assert tokens.shape[1] == 1
        norms = encode(encoder, tokens, padding=0).norm(dim=1)
        close = (norms - 32**0.5).abs().max() < 0.01
        assert bool(close) == constant
    assert norms.std() / norms.mean() > 0.02


def test_e5_small_has_its_prefixes_and_they_reach_the_tokens(deep_folder, monkeypatch):
    config = Config(encoder="e5-small")
    assert (config.query_prefix, config.document_prefix) == ("query: ", "passage: ")
    for changes in ({"task": "halves"}, {"data": "captions:x"}):
        config = Config(encoder="e5-small", **changes)
        assert (config.query_prefix, config.document_prefix) == ("query: ", "query: ")
    assert Config(encoder="e5-small", query_prefix="q ").query_prefix == "q "
    monkeypatch.setattr(inputs, "e5_small_folder", lambda: deep_folder)
    seen = []
    monkeypatch.setattr(
        inputs, "cached_features", lambda encoder, tokens, device: seen.append(tokens)
    )
    Inputs(config)(["cat"], "dog ")
    dog, cat = (5 + WORDS.index(word) for word in ("dog", "cat"))
    assert seen[0].tolist() == [[2, dog, cat, 3]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"encoder": "static", "tune": "head"}, "has no weights to freeze"),
        ({"encoder": "static", "tune": "top:2"}, "has no pretrained layers"),
        ({"encoder": "scratch", "redraw": 1}, "has no pretrained layers"),
        ({"encoder": "minilm", "redraw": 2}, r"use --tune=top:2 or all"),
        ({"encoder": "minilm", "tune": "top:1", "redraw": 2}, r"--redraw=2 draws layers anew"),
        ({"encoder": "minilm", "tune": "top:x"}, "must be auto, head, all or top:N, got 'top:x'"),
        ({"encoder": "minilm", "tune": "al"}, "must be auto, head, all or top:N, got 'al'"),
        ({"encoder": "minilm", "final_norm": False}, "is for --encoder=scratch"),
        ({"encoder": "minilm", "tokens": "words"}, "--tokens is for --encoder=static"),
        ({"encoder": "minilm", "token_start": "glove"}, "--token-start is for --encoder=static"),
        ({"encoder": "static", "token_start": "glove", "tokens": "wordpiece"}, "--tokens=words"),
        ({"encoder": "static", "token_start": "minilm", "tokens": "words"}, "--tokens=wordpiece"),
    ],
)
def test_refusals(changes, message):
    with pytest.raises(ValueError, match=message):
        Config(**changes)


def test_defaults_of_static_follow_the_extra(monkeypatch):
    config = Config(encoder="static")
    assert (config.tune, config.head, config.max_length) == ("all", "none", 256)
    assert (config.tokens, config.pretrain_samples) == ("wordpiece", 0)
    assert text_settings.encoder_line(config) == (
        "Encoder: static, trained as a whole (wordpiece, from random)."
    )
    assert Config(encoder="static", token_start="glove").tokens == "words"
    assert Config(encoder="static", token_start="glove", tune="head").head == "linear"
    top = Config(encoder="minilm", tune="top:2", redraw=2)
    assert (top.head, top.top) == ("none", 2)
    assert text_settings.encoder_line(top) == (
        "Encoder: minilm, its last 2 layers trained, 2 drawn anew."
    )
    monkeypatch.setattr(text_settings, "TEXT_EXTRA", ("no_such_package",))
    assert Config(encoder="static").tokens == "words"
