"""Tiny collections in BEIR's layout, whose documents share rare words with their queries."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from samples import write_bert

LETTERS = "catdogsunseaboxjarowlfoxbeeantoakelmicefogmudlogmapkeypincup"
WORDS = [LETTERS[i : i + 3] for i in range(0, len(LETTERS), 3)]
Row = dict[str, object]


def beir(
    path: Path, corpus: list[Row], queries: list[Row], qrels: dict[str, list[tuple[str, str, int]]]
) -> Path:
    (path / "qrels").mkdir(parents=True)
    for name, rows in (("corpus", corpus), ("queries", queries)):
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for split, rows in qrels.items():
        lines = ["query-id\tcorpus-id\tscore", *("\t".join(map(str, row)) for row in rows)]
        (path / "qrels" / f"{split}.tsv").write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="session")
def write_beir() -> Callable[..., Path]:
    return beir


@pytest.fixture(scope="session")
def collection_folder(tmp_path_factory) -> Path:
    """60 documents; 48 queries (32 train, 16 test) of four words each, which answer in three."""
    draw = random.Random(0)
    texts = [draw.choices(WORDS, k=14) for _ in range(60)]
    corpus: list[Row] = [
        {"_id": f"d{i}", "title": f"{words[0]} {words[1]}", "text": " ".join(words)}
        for i, words in enumerate(texts)
    ]
    queries: list[Row] = [
        {"_id": f"q{i}", "text": " ".join(texts[i][4:9]), "answers": [" ".join(texts[i][9:12])]}
        for i in range(48)
    ]
    # Every fourth document is relevant to its neighbour's query as well.
    pairs = [(f"q{i}", f"d{i}", 1) for i in range(48)]
    shared = [(f"q{i}", f"d{i + 1}", 1) for i in range(0, 47, 4)]
    both = sorted(pairs + shared, key=lambda row: int(row[0][1:]))
    qrels = {
        "train": [row for row in both if int(row[0][1:]) < 32],
        "test": [row for row in both if int(row[0][1:]) >= 32],
    }
    return beir(tmp_path_factory.mktemp("data") / "tiny", corpus, queries, qrels)


@pytest.fixture(scope="session")
def bert_folder(tmp_path_factory) -> Path:
    """A BERT of 16 random features that knows the words, as transformers saves it."""
    return write_bert(tmp_path_factory.mktemp("bert"), WORDS)


@pytest.fixture(autouse=True)
def quiet(monkeypatch, tmp_path_factory):
    """One thread, a cache of its own, no picture and no network."""
    torch.set_num_threads(1)
    cache = tmp_path_factory.getbasetemp() / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
