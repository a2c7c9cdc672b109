"""From files of vectors to a page: every format, documents in blocks, labels, pairs, mistakes."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from offsphere import cli
from offsphere.audit import search as searching
from offsphere.audit import vectors
from offsphere.audit.vectors import Config
from offsphere.data.vectors import write_vectors
from offsphere.evaluation.geometry import cohens_d, hubness
from offsphere.evaluation.ranking import outcomes, rank
from offsphere.evaluation.relevance import norm_leverage
from offsphere.names import CORNERS

PLACE = ("documents", "query to document")


def world(queries: int = 120, documents: int = 300) -> tuple[np.ndarray, np.ndarray]:
    """float32 vectors; query k wants document 2 k, whose vector is longer than others."""
    random = np.random.default_rng(0)
    answering = random.normal(size=(documents, 12)).astype(np.float32)
    asked = answering[::2][:queries] + 1.5 * random.normal(size=(queries, 12)).astype(np.float32)
    answering[: 2 * queries : 2] *= 1.4
    return asked, answering


def written(folder: Path, ending: str = ".npy") -> dict[str, str]:
    """The flags for these vectors in files of one format, and their judgements."""
    asked, answering = world()
    for name, x, letter in (("queries", asked, "q"), ("documents", answering, "d")):
        ids = [f"{letter}{row}" for row in range(len(x))]
        write_vectors(folder / f"{name}{ending}", 12, [x], ids)
    lines = [f"q{k}\td{2 * k}\t{1 + k % 2}" for k in range(len(asked))]
    (folder / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\n" + "\n".join(lines) + "\n")
    files = (str(folder / f"{name}{ending}") for name in ("queries", "documents"))
    return {"vectors": tuple(files), "relevance": str(folder / "qrels.tsv")}


def settings(folder: Path, **given) -> Config:
    return Config(out=str(folder / "out"), threads=1, resamples=100, **given)


def rows_of(folder: Path) -> dict[tuple[str, ...], float]:
    (file,) = (folder / "out").glob("audit/*/results.csv")
    with file.open() as lines:
        rows = list(csv.DictReader(lines))
    return {
        tuple(row[k] for k in ("direction", "scored_with", "metric")): float(row["value"] or "nan")
        for row in rows
    }


@pytest.mark.parametrize("ending", [".npy", ".safetensors", ".parquet", ".jsonl"])
def test_every_format_has_the_text_lanes_numbers(tmp_path, ending, capsys):
    """nDCG, recall and MRR to the last digit but rounding; norms there are in float32."""
    report = vectors.run(settings(tmp_path, **written(tmp_path, ending)))
    said = capsys.readouterr().out
    assert said.startswith("Score with dot for query to document on documents: magnitude carries")
    asked, answering = (torch.from_numpy(x) for x in world())
    relevant = [{2 * k: 1 + k % 2} for k in range(120)]
    for cell, (_, g) in CORNERS.items():
        for metric, value in outcomes(rank(asked, answering, g), relevant).means().items():
            assert report.table.value(*PLACE, cell, metric) == pytest.approx(value, abs=1e-9)
        hubs = hubness(asked, answering, 10, item_exponent=g)
        found = report.table.value(*PLACE, cell, "hubness_skewness")
        assert found == pytest.approx(hubs["skewness"].item(), abs=1e-6)
    norms = answering.norm(dim=1)
    wanted = torch.arange(300) % 2 == 0
    wanted[240:] = False
    d = cohens_d(norms[wanted], norms[~wanted]).item()
    assert report.table.value(*PLACE, metric="cohens_d") == pytest.approx(d, abs=1e-6)
    leverage = norm_leverage(asked, answering)
    assert report.table.value(*PLACE, metric="norm_leverage") == pytest.approx(leverage, abs=1e-9)
    names = {file.name for file in next((tmp_path / "out" / "audit").iterdir()).iterdir()}
    assert names == {"audit.html", "audit.json", "provenance.json", "results.csv"}


def test_documents_in_blocks_give_the_same_and_thinned_ones_say_so(tmp_path, monkeypatch):
    flags = written(tmp_path)
    whole = vectors.run(settings(tmp_path, **flags))
    monkeypatch.setattr(searching, "NUMBERS_AT_ONCE", 12 * 17)
    blocks = vectors.run(settings(tmp_path, **flags))
    for row in whole.table:
        other = blocks.table.get(*row[:4])
        assert (other.value, other.low) == pytest.approx(row[4:6], abs=1e-12, nan_ok=True)
    monkeypatch.setattr(searching, "NUMBERS_IN_MEMORY", 12 * 60)
    some = vectors.run(settings(tmp_path, **flags))
    assert some.table.value(*PLACE, metric="candidates") == 300
    assert some.table.value(*PLACE, metric="candidates_compared") == 120 + 30 // 5 * 2 + 24
    for metric in ("ndcg10", "recall100", "hubness_skewness", "r1"):
        for cell in CORNERS:
            same = whole.table.value(*PLACE, cell, metric)
            assert some.table.value(*PLACE, cell, metric) == same
    assert some.table.value(*PLACE, metric="cohens_d") == whole.table.value(
        *PLACE, metric="cohens_d"
    )
    (page,) = (tmp_path / "out").glob("audit/*/audit.html")
    assert "of 300: all that are right" in page.read_text()


def test_ids_may_be_rows_and_judgements_trecs(tmp_path):
    asked, answering = world()
    np.save(tmp_path / "queries.npy", asked)
    save_file({"documents": answering}, tmp_path / "all.safetensors")
    lines = [f"{k} 0 {2 * k} 1" for k in range(100)] + ["0 0 7 0"]
    (tmp_path / "qrels.txt").write_text("\n".join(lines))
    files = (str(tmp_path / "queries.npy"), f"{tmp_path / 'all.safetensors'}:documents")
    given = {"vectors": files, "relevance": str(tmp_path / "qrels.txt")}
    report = vectors.run(settings(tmp_path, **given))
    assert report.told == (
        "100 queries, 20 without a right document left out, 300 documents, 100 judgements.",
    )
    relevant = [{2 * k: 1} for k in range(100)]
    best = rank(torch.from_numpy(asked[:100]), torch.from_numpy(answering), 1.0)
    want = outcomes(best, relevant).means()["ndcg10"]
    found = report.table.value("all", "query to document", "cosine", "ndcg10")
    assert found == pytest.approx(want, abs=1e-9)


def test_labelled_vectors_and_scored_pairs_have_pages_of_their_own(tmp_path, capsys):
    asked, answering = world()
    np.save(tmp_path / "left.npy", asked)
    np.save(tmp_path / "right.npy", answering[:120])
    names = [f"{row}\t{'long' if row % 2 == 0 and row < 240 else 'short'}" for row in range(300)]
    (tmp_path / "labels.tsv").write_text("\n".join(names[:120]))
    given = {"vectors": (str(tmp_path / "right.npy"),), "labels": str(tmp_path / "labels.tsv")}
    report = vectors.run(settings(tmp_path, **given))
    assert report.told == ("120 vectors of 2 classes.",)
    assert "knn" in capsys.readouterr().out
    (page,) = (tmp_path / "out").glob("audit/right-*/audit.html")
    assert "of their information (NMI)" in page.read_text()
    scores = [str(float(a @ b)) for a, b in zip(asked, answering, strict=False)]
    (tmp_path / "scores.txt").write_text("\n".join(scores))
    files = (str(tmp_path / "left.npy"), str(tmp_path / "right.npy"))
    given = {"vectors": files, "scores": str(tmp_path / "scores.txt")}
    report = vectors.run(settings(tmp_path, **given))
    place = ("right", "vector to vector")
    assert report.table.value(*place, "dot", "spearman") == pytest.approx(1, abs=1e-5)
    assert report.headline.startswith("Score with dot for vector to vector on right: magnitude")
    content = json.loads(next((tmp_path / "out").glob("audit/right-*/audit.json")).read_text())
    assert content["advice"]


def change(folder: Path, name: str, content: object) -> None:
    if isinstance(content, np.ndarray):
        np.save(folder / name, content)
    else:
        (folder / name).write_text(str(content))


NAN = np.full((120, 12), np.nan, np.float32)
ZERO = np.arange(120)[:, None] - np.full((120, 12), 7.0)
HUGE = np.full((300, 12), 1e20, np.float32)
MISTAKES = {
    "mixed widths": ("queries.npy", np.ones((120, 11), np.float32), "have 11 columns and the doc"),
    "nan": ("queries.npy", NAN, "120 vectors have numbers that are not finite"),
    "one dimension": ("documents.npy", np.ones(5, np.float32), "expected a matrix of numbers"),
    "no matrix": ("documents.npy", "x", "is cut, damaged or holds objects"),
    "ids of others": ("documents.npy.ids.txt", "\n".join(f"x{k}" for k in range(300)), "without a"),
    "too few ids": ("documents.npy.ids.txt", "d0\nd1\n", "has 300 vectors and 2 ids"),
    "double ids": ("documents.npy.ids.txt", "d0\n" * 300, "ids come more than once"),
    "unknown query": ("qrels.tsv", "q0\td0\t1\nq999\td0\t1\n", "1 query ids without a vector"),
    "no judgement": ("qrels.tsv", "q0\td0\t0\n", "holds no judgement above 0"),
    "a grade in words": ("qrels.tsv", "a\tb\tc\nq0\td0\tgood\n", "line 2: expected query id"),
    "one query": ("qrels.tsv", "q0\td0\t1\n", "has 1 queries: at least 4 are needed"),
    "two grades": ("qrels.tsv", "q0\td0\t1\nq0\td0\t2\n", "line 2: query q0 and document d0 have"),
    "a grade beyond int64": (
        "qrels.tsv",
        "q0\td0\t1\nq1\td2\t1" + "0" * 30,
        "line 2: expected query",
    ),
    "commas": ("qrels.tsv", "q0,d0,1\n", "with tabs or spaces between"),
    "zero query": ("queries.npy", ZERO, "1 queries are all zeros and have no direction ('q7')"),
    "overflow": ("documents.npy", HUGE, "vectors has the length 3.46e+20: expected one between"),
    "nothing but zeros": ("documents.npy", 0 * HUGE, "vectors has the length 0: expected one"),
    "empty": ("qrels.tsv", "\n", "is empty"),
    "no utf-8": ("qrels.tsv", "q\udcff", "is not UTF-8"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_bad_files_end_in_one_line_and_nothing_is_written(tmp_path, capsys, mistake):
    flags = written(tmp_path)
    name, content, words = MISTAKES[mistake]
    if mistake == "no utf-8":
        (tmp_path / name).write_bytes(b"q0\td\xff\t1\n")
    else:
        change(tmp_path, name, content)
    code, said = refusal(
        capsys, tmp_path, "--vectors", *flags["vectors"], f"--relevance={flags['relevance']}"
    )
    assert code == 1
    assert words in said


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), "Give one of --vectors, --encoder, --model, --run, --embeddings, got none"),
        (("--vectors=a.npy",), "needs one of --relevance=FILE"),
        (("--vectors=a.npy", "--relevance=q"), "--relevance goes with 2 of --vectors, got 1"),
        (("--vectors", "a", "b", "--labels=q"), "--labels goes with 1 of --vectors, got 2"),
        (("--vectors=a.npy", "--labels=l", "--scores=s"), "got labels and scores"),
        (("--vectors=a.npy", "--encoder=minilm"), "got --vectors and --encoder"),
        (("--vectors=a.npy", "--labels=l", "--eval-cell=cosin"), "Did you mean 'cosine'"),
        (("--vectors=a.npy", "--labels=l", "--similarities=whiten"), "Did you mean 'whitened'"),
        (("--vectors=a.npy", "--labels=l", "--resamples=0"), "--resamples must be a whole number"),
        (("--vectors=a.npy", "--labels=l", "--metric=acc"), "metric"),
    ],
)
def test_bad_flags_end_in_one_line(tmp_path, capsys, flags, words):
    code, said = refusal(capsys, tmp_path, *flags)
    assert code == 2
    assert words in said


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ("a\n" * 119, "has 119 lines and"),
        ("a\n" * 120, "all 120 vectors are of the class 'a'"),
        ("q0\ta\nq1\tb\n", "no label for 118 of 120 vectors"),
        ("q0\ta\nq0\tb\n", "1 ids come more than once ('q0')"),
        ("\n".join(map(str, range(120))), "each of 120 vectors has a class of its own"),
        ("q0\ta\tb\n" * 120, "line 1: expected an id, a tab and a label"),
    ],
)
def test_bad_labels_end_in_one_line(tmp_path, capsys, labels, words):
    flags = written(tmp_path)
    change(tmp_path, "labels.tsv", labels)
    code, said = refusal(
        capsys, tmp_path, f"--vectors={flags['vectors'][0]}", f"--labels={tmp_path / 'labels.tsv'}"
    )
    assert code == 1
    assert words in said


def test_a_file_where_the_results_should_go_is_refused_before_anything_is_read(tmp_path, capsys):
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(SystemExit) as end:
        cli.main(["audit", "--vectors=a.npy", "--labels=l", f"--out={tmp_path / 'taken' / 'deep'}"])
    said = capsys.readouterr().err
    assert (end.value.code, said.count("\n")) == (2, 1)
    assert "taken is a file, expected a folder" in said


def test_bad_scores_end_in_one_line(tmp_path, capsys):
    flags, asked = written(tmp_path), world()[0]
    change(tmp_path, "other.npy", asked[:, :5])
    for content, file, words in (
        ("1\n" * 120, "queries.npy", "scores that differ"),
        ("x\n" * 120, "queries.npy", "expected a score as a number, got 'x'"),
        ("1\n" * 120, "documents.npy", "pairs stand in the same row"),
        ("\n".join(map(str, range(120))), "other.npy", "of one width, got 12 and 5"),
    ):
        change(tmp_path, "scores.txt", content)
        pair = (flags["vectors"][0], str(tmp_path / file))
        code, said = refusal(
            capsys, tmp_path, "--vectors", *pair, f"--scores={tmp_path / 'scores.txt'}"
        )
        assert code == 1
        assert words in said


def refusal(capsys, folder: Path, *flags: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as end:
        cli.main(["audit", *flags, f"--out={folder / 'out'}"])
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("offsphere audit: error: ")
    assert not (folder / "out").exists()
    return end.value.code, said
