"""Text encoders: real Hugging Face loading of a tiny model, pooling, the scratch one, the cache."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from samples import write_bert

from offsphere.encoders import text
from offsphere.encoders.text import (
    ScratchEncoder,
    cached_features,
    encode,
    hugging_face_encoder,
    mean_pool,
    minilm_folder,
)
from offsphere.evaluation.geometry import unit

WORDS = ["a", "cat", "dog", "sat", "ran", "##s"]
TEXTS = ["a cat sat", "dogs", "", "a a a a cat ran ran ran"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_bert(tmp_path_factory.mktemp("bert"), WORDS, layers=2, positions=12)


def with_modules(folder: Path, path: Path, kinds: list[str], pooling: dict) -> Path:
    """The model with sentence-transformers' files beside it."""
    path.mkdir()
    for file in folder.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    modules = [{"type": f"sentence_transformers.models.{kind}"} for kind in kinds]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return path


def test_both_poolings_are_those_of_the_hidden_states(folder: Path):
    encoder = hugging_face_encoder(str(folder), "mean")
    tokens = encoder.tokenize(TEXTS, 8)
    assert tokens.shape == (4, 8)  # the longest text is cut at eight
    mean = encode(encoder, tokens, padding=encoder.padding)
    encoder.pooling = "cls"
    first = encode(encoder, tokens, padding=encoder.padding)
    for row, of_mean, of_first in zip(tokens, mean, first, strict=True):
        alone = row[row != encoder.padding][None]
        with torch.no_grad():
            hidden = encoder.backbone.eval()(input_ids=alone).last_hidden_state[0]
        torch.testing.assert_close(of_mean, hidden.mean(0), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(of_first, hidden[0], atol=1e-5, rtol=1e-4)
    assert encoder.tokenize(TEXTS, 500).shape[1] <= 12  # the model's own limit


def test_a_trailing_normalize_is_left_out_and_the_pooling_is_read(folder: Path, tmp_path: Path):
    kinds = ["Transformer", "Pooling", "Normalize"]
    pooling = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    marked = with_modules(folder, tmp_path / "cls", kinds, pooling)
    encoder = hugging_face_encoder(str(marked))
    assert encoder.pooling == "cls"
    found = encode(encoder, encoder.tokenize(TEXTS, 8), padding=encoder.padding)
    plain = hugging_face_encoder(str(folder), "cls")
    assert torch.equal(found, encode(plain, plain.tokenize(TEXTS, 8), padding=plain.padding))
    assert (found.norm(dim=1) - 1).abs().min() > 0.1
    assert hugging_face_encoder(str(folder)).pooling == "mean"


def test_other_sentence_modules_are_refused(folder: Path, tmp_path: Path):
    dense = with_modules(folder, tmp_path / "dense", ["Transformer", "Pooling", "Dense"], {})
    with pytest.raises(ValueError, match="lists the modules Transformer, Pooling, Dense"):
        hugging_face_encoder(str(dense))
    maximum = {"pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": False}
    odd = with_modules(folder, tmp_path / "max", ["Transformer", "Pooling"], maximum)
    with pytest.raises(ValueError, match="give --pooling=mean or cls"):
        hugging_face_encoder(str(odd))
    with pytest.raises(ValueError, match="Did you mean 'mean'"):
        hugging_face_encoder(str(folder), "means")


def test_a_model_that_is_not_there(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(OSError, match=r"'no/such' is neither a folder .* --encoder=minilm"):
        hugging_face_encoder("no/such")
    with pytest.raises(OSError, match=r"cannot be loaded from .*Expected a folder with config"):
        hugging_face_encoder(str(tmp_path))


def test_minilm_is_raw_and_at_norm_one_what_sentence_transformers_gives():
    from sentence_transformers import SentenceTransformer

    folder = minilm_folder()
    assert folder is not None
    encoder = hugging_face_encoder(str(folder))
    assert (encoder.pooling, encoder.features_dim) == ("mean", 384)
    texts = ["A man is eating food.", "A cheetah is running.", ""]
    vectors = encode(encoder, encoder.tokenize(texts, 64), padding=encoder.padding)
    assert vectors.norm(dim=1).min() > 1.5
    peer = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    expected = peer.encode(texts, convert_to_tensor=True, show_progress_bar=False)
    torch.testing.assert_close(unit(vectors), expected, atol=1e-5, rtol=1e-4)


def test_the_scratch_encoder_pads_without_a_trace():
    torch.manual_seed(0)
    encoder = ScratchEncoder(width=32, layers=2, heads=2, max_length=16)
    long = "the quick brown fox jumps over the lazy dog <start_of_text> " * 3
    tokens = encoder.tokenize(["fox", long, "", "zzyzx!"], 99)
    assert tokens.shape[1] == 16
    assert tokens.max() <= text.VOCABULARY
    assert (tokens[2] != 0).sum() == 1
    together = encode(encoder, tokens, padding=0)
    for row, vector in zip(tokens, together, strict=True):
        alone = encode(encoder, row[None, row != 0], padding=0)[0]
        torch.testing.assert_close(vector, alone, atol=1e-5, rtol=1e-4)
    # The rows come back in their own order, whatever their lengths.
    backwards = encode(encoder, tokens.flip(0), padding=0)
    torch.testing.assert_close(backwards.flip(0), together, atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="multiple of the 3 heads"):
        ScratchEncoder(width=32, heads=3)


def test_mean_pool_by_hand():
    hidden = torch.tensor([[[1.0, 2.0], [3.0, 4.0], [50.0, 60.0]]])
    assert mean_pool(hidden, torch.tensor([[True, True, False]])).tolist() == [[2.0, 3.0]]


def test_features_are_computed_once_per_weights_and_texts(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    torch.manual_seed(0)
    encoder = ScratchEncoder(width=16, layers=1, heads=2, max_length=8)
    tokens = encoder.tokenize(TEXTS, 8)

    def features(tokens=tokens) -> tuple[torch.Tensor, bool]:
        found = cached_features(encoder, tokens)
        return found, "Encoding" in capsys.readouterr().out

    first, computed = features()
    assert computed
    torch.testing.assert_close(first, encode(encoder, tokens, padding=0))
    again, computed = features()
    assert not computed
    assert torch.equal(first, again)
    _, computed = features(encoder.tokenize([*TEXTS[:3], "another"], 8))
    assert computed
    (file,) = [f for f in tmp_path.rglob("*.safetensors") if len(f.read_bytes()) > 0][:1]
    for cached in tmp_path.rglob("*.safetensors"):
        cached.write_bytes(file.read_bytes()[:50])  # a damaged file counts as none
    again, computed = features()
    assert computed
    assert torch.equal(first, again)
    with torch.no_grad():
        encoder.positions.mul_(2)
    _, computed = features()
    assert computed


def test_interrupted_encoding_goes_on_after_the_last_chunk(tmp_path: Path, monkeypatch):
    """Of five chunks two are done when the key is pressed: three are left, to the same bits."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    encoder = ScratchEncoder(width=16, layers=1, heads=2, max_length=8)
    texts = [f"a cat {'sat ' * (k % 7)}{k}" for k in range(4 * text.CHUNK + 1)]
    tokens = encoder.tokenize(texts, 8)
    want, forward, asked = encode(encoder, tokens, padding=0), encoder.forward, []

    def interrupted(chunk: torch.Tensor) -> torch.Tensor:
        asked.append(len(chunk))
        if len(asked) == 3:
            raise KeyboardInterrupt
        return forward(chunk)

    monkeypatch.setattr(encoder, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cached_features(encoder, tokens)
    assert torch.equal(cached_features(encoder, tokens), want)
    assert asked == [1] + [text.CHUNK] * 5, "the longest first; the third is asked for twice"
    assert len(list(tmp_path.rglob("*.safetensors"))) == 1, "the chunks are gone when all is there"


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    encoder = ScratchEncoder(width=16, layers=1, heads=2, max_length=8)
    tokens = encoder.tokenize(TEXTS, 8)
    torch.testing.assert_close(cached_features(encoder, tokens), encode(encoder, tokens, padding=0))
    assert capsys.readouterr().err.count("The features are not cached") == 1
