"""Collections and tasks: what is read, what is refused, and no positive as a negative."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch

from text.lexical import bm25
from text.pairs import PairBatches, Stage, choose_pairs, make_task, title_task, two_halves
from text.passages import beir_folder, load_collection
from text.settings import RetrievalSettings

CORPUS = [{"_id": "a", "title": "T", "text": "one two"}, {"_id": "b", "text": "three four"}]
QUERIES = [{"_id": "1", "text": "one"}, {"_id": "2", "text": "three"}]
QRELS = {"train": [("1", "a", 1)], "test": [("2", "b", 2), ("2", "a", 0)]}


def test_beirs_layout_is_read(tmp_path: Path, write_beir):
    qrels = QRELS | {"dev": QRELS["train"]}
    found = beir_folder(write_beir(tmp_path / "mine", CORPUS, QUERIES, qrels))
    assert found.name == "mine"
    assert found.documents[0] == ("a", "T", "one two")
    assert found.queries[1] == ("2", "three", ())
    assert found.relevant == {"train": {0: {0: 1}}, "validation": {0: {0: 1}}, "test": {1: {1: 2}}}
    task = make_task(found, "query", "test")
    assert task.documents == ["T one two", "three four"]
    assert (list(task.train), task.test, task.idle) == ([(0, (0,))], {1: {1: 2}}, [])


def test_without_dev_a_part_of_the_training_queries_validates(collection_folder: Path):
    found = beir_folder(collection_folder)
    train, validation = found.relevant["train"], found.relevant["validation"]
    assert train.keys() | validation.keys() == set(range(32))
    assert not train.keys() & validation.keys()
    assert 0 < len(validation) < 10


@pytest.mark.parametrize(
    ("corpus", "queries", "qrels", "message"),
    [
        (CORPUS, QUERIES, {}, r"qrels has no judgements: .*train.tsv, dev.tsv, test.tsv"),
        (CORPUS, QUERIES, {"test": [("2", "x", 1), ("2", "y", 1), ("1", "x", 1)]},
         r"test.tsv: 2 judged documents are not in corpus.jsonl \('x', 'y'\)"),
        (CORPUS, QUERIES, {"test": [("9", "a", 1)]},
         r"1 judged queries are not in queries.jsonl \('9'\)"),
        ([*CORPUS, {"_id": "c", "text": " "}], QUERIES, QRELS, r"1 documents are empty \('c'\)"),
        ([*CORPUS, CORPUS[0]], QUERIES, QRELS, r"corpus.jsonl: 1 ids come more than once \('a'\)"),
        (CORPUS, [*QUERIES, QUERIES[1]], QRELS, r"queries.jsonl: 1 ids come more than once"),
        (CORPUS, [*QUERIES, {"_id": "3", "text": None}], QRELS, r"1 queries are empty \('3'\)"),
        ([*CORPUS, {"_id": "c", "text": 5}], QUERIES, QRELS,
         r"corpus.jsonl, line 3: expected text in quotes, got 5"),
        (CORPUS, [{**QUERIES[0], "answers": "Rome"}, QUERIES[1]], QRELS,
         r"queries.jsonl, line 1: expected answers as a list of texts .* got 'Rome'"),
        (CORPUS, QUERIES, {"test": [("2", "b", 0)]}, r"holds no judgement above 0"),
        (CORPUS, QUERIES, {"test": [("2", "b", "yes")]}, r"line 2: expected query-id, corpus-id"),
        ([{"_id": "a"}], QUERIES, QRELS, r"line 1: expected an object with _id and text"),
        ([], QUERIES, QRELS, r"corpus.jsonl is empty"),
    ],
)  # fmt: skip
def test_bad_collections_are_named_and_counted(
    tmp_path, write_beir, corpus, queries, qrels, message
):
    folder = write_beir(tmp_path / "bad", corpus, queries, qrels)
    with pytest.raises((ValueError, OSError), match=message):
        beir_folder(folder)


def test_texts_may_hold_other_line_separators_and_files_a_byte_order_mark(tmp_path, write_beir):
    """U+2028, U+0085 and form feeds are allowed inside JSON's texts; only \\n ends a line."""
    folder = write_beir(tmp_path / "mine", CORPUS, QUERIES, QRELS)
    text = "one\u2028two\x85three"
    row = json.dumps({"_id": "u\u2028", "text": text}, ensure_ascii=False) + "\r\n"
    lines = (folder / "corpus.jsonl").read_bytes()
    (folder / "corpus.jsonl").write_bytes(b"\xef\xbb\xbf" + lines + row.encode())
    with (folder / "qrels" / "test.tsv").open("a", encoding="utf-8", newline="") as file:
        file.write("2\tu\u2028\t1\r\n")
    found = beir_folder(folder)
    assert found.documents[2] == ("u\u2028", "", text)
    assert found.relevant["test"] == {1: {1: 2, 2: 1}}
    (folder / "corpus.jsonl").write_bytes(b'{"_id": "a", "text": "caf\xe9"}')
    with pytest.raises(ValueError, match=r"corpus.jsonl is not UTF-8 \(byte 25 is 0xe9\)"):
        beir_folder(folder)


def test_bad_samples_can_be_left_out(tmp_path: Path, write_beir):
    corpus = [*CORPUS, {"_id": "c", "title": "", "text": ""}]
    queries = [{"_id": "0", "text": " "}, *QUERIES]
    qrels = {"test": [("2", "b", 1), ("2", "c", 1), ("2", "x", 1), ("0", "a", 1)]}
    folder = write_beir(tmp_path / "bad", corpus, queries, qrels)
    found = beir_folder(folder, on_bad_sample="skip")
    assert found.relevant == {"test": {1: {1: 1}}}
    assert (len(found.documents), found.skipped) == (2, 3)
    with pytest.raises(ValueError, match=r"no judgements for the split 'train'.*it has: test"):
        make_task(found, "query", "test")


def test_what_is_not_there(tmp_path: Path):
    with pytest.raises(OSError, match="is not a folder"):
        load_collection(f"beir:{tmp_path / 'none'}")
    with pytest.raises(OSError, match="corpus.jsonl cannot be read"):
        load_collection(f"beir:{tmp_path}")
    with pytest.raises(ValueError, match="Did you mean 'docstrings'"):
        load_collection("docstring")
    with pytest.raises(ValueError, match="'no_such' is no installed package"):
        load_collection("docstrings:no_such")


@pytest.mark.parametrize(
    ("file", "first_line", "message"),
    [
        ("corpus.jsonl", "[" * 10**5, "corpus.jsonl, line 1: the JSON is nested too deeply"),
        (
            "queries.jsonl",
            '{"_id": "q", "text": "\\ud800"}',
            "queries.jsonl, line 1: half a character",
        ),
        ("qrels/train.tsv", "q0\td0\t1.5", "train.tsv, line 1: expected query-id, corpus-id and a"),
    ],
)
def test_no_line_is_lost(file: str, first_line: str, message: str, collection_folder, tmp_path):
    shutil.copytree(collection_folder, tmp_path / "c")
    rest = (tmp_path / "c" / file).read_text().split("\n", 1)[1]
    (tmp_path / "c" / file).write_text(first_line + "\n" + rest)
    with pytest.raises(ValueError, match=message):
        load_collection(f"beir:{tmp_path}/c")


def test_halves_are_of_the_same_documents_and_interchangeable(collection_folder: Path):
    found = beir_folder(collection_folder)
    task = make_task(found, "halves", "test")
    firsts = 0
    for document, left, right in zip(found.documents, task.queries, task.documents, strict=True):
        words = document.text.split()
        assert {left, right} == {" ".join(words[:7]), " ".join(words[7:])} or left == right
        firsts += left == " ".join(words[:7])
    assert 15 < firsts < 45  # a fair coin of 60
    asked = {d for r in found.relevant["test"].values() for d in r}
    assert task.test == {d: {d: 1} for d in asked}
    trained = {d for r in found.relevant["train"].values() for d in r} - asked
    assert list(task.train) == [(d, (d,)) for d in sorted(trained)]
    assert two_halves("k", "one") in (("", "one"), ("one", ""))


def test_texts_of_one_title_are_relevant_to_it(tmp_path: Path, write_beir):
    corpus = [{"_id": str(i), "title": t, "text": f"x{i}"} for i, t in enumerate("AbaB")]
    corpus.append({"_id": "9", "text": "no title"})
    qrels = {"train": [("1", "0", 1)]}
    task = title_task(beir_folder(write_beir(tmp_path / "t", corpus, QUERIES, qrels)))
    assert task.documents == ["x0", "x1", "x2", "x3"]
    assert list(task.train) == [(0, [0, 2]), (1, [1, 3]), (2, [0, 2]), (3, [1, 3])]


def test_documents_may_be_left_out_of_the_titles(tmp_path: Path, write_beir):
    corpus = [{"_id": str(i), "title": t, "text": f"x{i}"} for i, t in enumerate("AbaB")]
    found = beir_folder(write_beir(tmp_path / "t", corpus, QUERIES, {"train": [("1", "0", 1)]}))
    task = title_task(found, {0, 3})
    assert (task.queries, task.documents) == (["b", "a"], ["x1", "x2"])
    assert list(task.train) == [(0, [0]), (1, [1])]


def batches_of(folder: Path, **changes) -> tuple[PairBatches, Stage]:
    """Batches whose inputs are the numbers of the texts."""
    task = make_task(beir_folder(folder), "query", "test")
    pairs = [(row, relevant) for row, (_, relevant) in enumerate(task.train)]
    numbers = torch.arange(len(task.documents))[:, None]
    hard = [[d for d in range(60) if d not in relevant] for _, relevant in pairs]
    stage = Stage(torch.arange(len(pairs))[:, None], numbers, pairs, hard)
    settings = RetrievalSettings(encoder="scratch", samples=960, **changes)
    return PairBatches([(0, stage)], settings, lambda x: x), stage


def test_no_positive_is_a_negative(collection_folder: Path):
    batches, stage = batches_of(collection_folder, batch_size=12, hard_negatives=2)
    seen = set()
    for step in range(40):
        batch = batches[step]
        queries, documents, hard = (batch[k][:, 0].tolist() for k in ("query", "document", "hard"))
        assert len(set(queries)) == len(set(documents)) == 12
        assert len(hard) == len(set(hard)) == 24
        for query, document in zip(queries, documents, strict=True):
            relevant = set(stage.pairs[query][1])
            assert relevant & set(documents) == {document}
            assert not relevant & set(hard)
        seen |= set(zip(queries, documents, strict=True))
        again = batches[step]
        assert all(torch.equal(batch[k], again[k]) for k in batch)
    # Every pair of the training judgements has its turn.
    assert seen == {(q, d) for q, relevant in stage.pairs for d in relevant}


def test_other_seeds_draw_other_batches_and_cells_do_not(collection_folder: Path):
    batches, stage = batches_of(collection_folder, batch_size=12, cell="dot", seed=3)
    settings = dataclasses.replace(batches.settings, cell="learnable", temperature=0.1)
    assert choose_pairs(stage.pairs, batches.settings, 5) == choose_pairs(stage.pairs, settings, 5)
    other = dataclasses.replace(settings, seed=4)
    assert choose_pairs(stage.pairs, settings, 5) != choose_pairs(stage.pairs, other, 5)


def test_a_batch_that_cannot_be_filled():
    pairs = [(0, (0,)), (1, (0,)), (2, (1,))]
    settings = RetrievalSettings(encoder="scratch", batch_size=3, samples=3, pretrain_samples=0)
    with pytest.raises(ValueError, match=r"Only 2 of 3 training queries fit .*--batch-size=3"):
        choose_pairs(pairs, settings, 0)


def test_bm25_finds_the_rare_word():
    documents = ["the cat sat", "the dog sat on a zebra", "a dog ran", "a dog swam"]
    ranking = bm25(["zebra dog", "cat"], documents, 10)
    assert ranking.documents.shape == (2, 4)
    assert ranking.documents[:, 0].tolist() == [1, 0]
    assert (ranking.scores.diff(dim=1) <= 0).all()
