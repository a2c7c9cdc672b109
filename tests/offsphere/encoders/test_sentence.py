"""Sentence encoders as their files describe them, beside sentence-transformers itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from samples import write_bert

from offsphere.encoders.sentence import sentence_model

WORDS = ["a", "cat", "dog", "sat", "ran", "##s"]
TEXTS = ["a cat sat", "dogs", "a a a a cat ran ran ran"]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> Path:
    return write_bert(tmp_path_factory.mktemp("bert"), WORDS, layers=2, positions=12)


def saved(folder: Path, bert: Path, *, dense: bool, normalize: bool) -> Path:
    """A model as sentence-transformers saves it, with prompts of its own."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Dense, Normalize, Pooling, Transformer

    transformer = Transformer(str(bert), max_seq_length=8)
    width = transformer.get_word_embedding_dimension()
    modules = [transformer, Pooling(width, pooling_mode="cls")]
    modules += [Dense(width, 5)] if dense else []
    modules += [Normalize()] if normalize else []
    prompts = {"query": "cat ", "passage": "dog "}
    SentenceTransformer(modules=modules, device="cpu", prompts=prompts).save(str(folder))
    return folder


@pytest.mark.parametrize("dense", [False, True])
def test_vectors_are_those_before_the_normalize(tmp_path, bert, dense):
    from sentence_transformers import SentenceTransformer

    folder = saved(tmp_path / "model", bert, dense=dense, normalize=True)
    model = sentence_model(str(folder), "auto", CPU)
    assert (model.max_length, model.trained_with) == (8, "cosine")
    assert model.prompts == {"query": "cat ", "document": "dog "}
    vectors = model.encode(TEXTS)
    assert vectors.shape == (3, 5 if dense else 16)
    assert (vectors.norm(dim=1) - 1).abs().min() > 0.05
    peer = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    want = peer.encode(TEXTS, convert_to_tensor=True, show_progress_bar=False)
    got = vectors / vectors.norm(dim=1, keepdim=True)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
    raw = saved(tmp_path / "raw", bert, dense=dense, normalize=False)
    assert sentence_model(str(raw), "auto", CPU).trained_with == "unknown"


def test_a_plain_transformer_has_no_prompts_and_a_usual_length(bert):
    model = sentence_model(str(bert), "auto", CPU)
    assert model.encoder.tokenizer.model_max_length > 10**9  # nothing is said
    assert (model.prompts, model.max_length, model.trained_with) == ({}, 512, "unknown")


def test_what_begins_otherwise_is_refused(tmp_path, bert):
    folder = tmp_path / "static"
    folder.mkdir()
    modules = [{"type": "sentence_transformers.models.StaticEmbedding", "path": ""}]
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ValueError, match="begins with the module StaticEmbedding.*--vectors"):
        sentence_model(str(folder), "auto", CPU)
