"""Lifted vectors in a real index: cosine and L2 give the order of the dot product."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch

from offsphere.cells import Cell
from offsphere.cli import main
from offsphere.data.vectors import open_vectors, write_vectors
from offsphere.export.lift import Config, lift, lift_queries, run


def vectors(rows: int, width: int, seed: int, spread: float = 0.5) -> np.ndarray:
    """Directions at random, with lengths that differ a lot."""
    draw = np.random.default_rng(seed)
    lengths = np.exp(draw.normal(0, spread, (rows, 1)))
    return (draw.normal(size=(rows, width)) * lengths).astype(np.float32)


DOCUMENTS, QUERIES = vectors(700, 24, 0), vectors(90, 24, 1)


@pytest.fixture
def files(tmp_path):
    write_vectors(tmp_path / "d.npy", 24, [DOCUMENTS], [f"d{i}" for i in range(700)])
    write_vectors(tmp_path / "q.parquet", 24, [QUERIES], [f"q{i}" for i in range(90)])
    return tmp_path


@pytest.mark.parametrize("cell", ["dot", "qnorm", "0.3,0.7", "0,-0.5"])
def test_a_real_index_gives_the_order_of_the_cell(cell, files):
    faiss = pytest.importorskip("faiss", reason="the extra `interop` is not installed")
    said = run(
        Config(
            documents=f"{files}/d.npy", queries=f"{files}/q.parquet", cell=cell,
            out=str(files / "lifted"),
        )
    )  # fmt: skip
    documents = open_vectors(files / "lifted" / "documents.npy")
    queries = open_vectors(files / "lifted" / "queries.parquet")
    assert documents.ids[3] == "d3"
    assert queries.ids[4] == "q4"
    np.testing.assert_allclose(np.linalg.norm(documents.whole(), axis=1), 1, atol=1e-6)
    exact = Cell(cell).scores(*(torch.from_numpy(x).double() for x in (QUERIES, DOCUMENTS)))
    order = exact.argsort(dim=1, descending=True).numpy()
    for metric in (faiss.METRIC_L2, faiss.METRIC_INNER_PRODUCT):  # of unit vectors: the cosine
        index = faiss.IndexFlat(25, metric)
        index.add(documents.whole())
        found = index.search(queries.whole(), 700)[1]
        assert (found[:, :10] == order[:, :10]).all()
        # To the last document, but for neighbours that float32 cannot tell apart.
        places = exact.gather(1, torch.from_numpy(found))
        tie = 1e-6 * exact.abs().max(1, keepdim=True).values
        assert (places.diff(dim=1) <= tie).all()
    raw = np.pad(QUERIES, ((0, 0), (0, 1)))  # what a user does at query time: append a 0
    index = faiss.IndexFlat(25, faiss.METRIC_L2)
    index.add(documents.whole())
    assert (index.search(raw, 10)[1] == order[:, :10]).all()
    assert "the 10 best documents are the same for 90 under cosine and 90 under L2" in said
    assert "vector_cosine_ops" in said
    longest = json.loads((files / "lifted" / "lift.json").read_text())["longest"]
    shrunk = Cell(cell).shrink_right(torch.from_numpy(DOCUMENTS).double())
    assert longest == pytest.approx(shrunk.norm(dim=1).max().item(), rel=1e-6)


def test_the_scores_are_the_dot_products_over_both_lengths():
    longest = float(np.linalg.norm(DOCUMENTS, axis=1).max()) * 1.5
    cosines = lift_queries(QUERIES) @ lift(DOCUMENTS, longest).T
    lengths = np.linalg.norm(QUERIES, axis=1, keepdims=True)
    np.testing.assert_allclose(cosines, QUERIES @ DOCUMENTS.T / (lengths * longest), atol=1e-6)


def test_what_float32_cannot_hold_is_told(tmp_path):
    """One document of length 1e7 among such of length 3: L2 cannot tell the others apart."""
    rows = vectors(300, 8, 2, spread=0.0)
    rows[0] *= 1e7 / np.linalg.norm(rows[0])
    np.save(tmp_path / "d.npy", rows)
    np.save(tmp_path / "q.npy", vectors(50, 8, 3))
    said = run(
        Config(documents=f"{tmp_path}/d.npy", queries=f"{tmp_path}/q.npy", out=f"{tmp_path}/out")
    )
    kept = said.rpartition("the same for ")[2].split()
    assert int(kept[0]) == 50, "cosine keeps them"
    assert int(kept[4]) < 25, "L2 does not"
    assert "the median document has 2." in said


def test_documents_that_come_later_are_lifted_to_the_same_length(files):
    arguments = [f"--documents={files}/d.npy", "--longest=50"]
    main(["lift", *arguments, f"--out={files}/a"])
    found = open_vectors(files / "a" / "documents.npy").whole()
    np.testing.assert_allclose(found[:, :-1], DOCUMENTS / 50, rtol=1e-6)
    assert sorted(x.name for x in (files / "a").iterdir()) == [
        "documents.npy", "documents.npy.ids.txt", "lift.json",
    ]  # fmt: skip


def test_bad_input_is_one_line_and_nothing_is_written(files, capsys):
    narrow, empty, broken = files / "narrow.npy", files / "empty.npy", files / "broken.npy"
    np.save(narrow, QUERIES[:, :5])
    np.save(empty, QUERIES * (np.arange(90) != 7)[:, None])
    np.save(broken, np.where(np.arange(700)[:, None] == 600, np.nan, DOCUMENTS))
    np.save(files / "zeros.npy", np.zeros((3, 24), np.float32))
    (files / "full").mkdir()
    (files / "full" / "x").touch()
    given = {"documents": f"{files}/d.npy", "out": f"{files}/out"}
    for changed, code, said in (
        ({"queries": str(narrow)}, 1, "of one width, got 24 in .* and 5 in"),
        ({"queries": str(empty)}, 1, "the query 7 is all zeros"),
        ({"documents": str(broken)}, 1, "not finite in float32, the first in row 600"),
        ({"documents": f"{files}/zeros.npy"}, 1, "holds nothing but zeros"),
        ({"documents": f"{files}/absent.npy"}, 1, "is not a file"),
        ({"out": f"{files}/full"}, 1, "full is not empty"),
        ({"longest": "3"}, 1, "the document d[0-9]+ has the length .*, more than --longest=3"),
        ({"longest": "-1"}, 2, "must be a length above 0"),
        ({"cell": "cosine"}, 2, "a store's cosine is its order already"),
        ({"cell": "dnorm"}, 2, "a store's cosine is its order already"),
        ({"cell": "learnable"}, 2, "give them, as 0.3,0.7"),
        ({"cell": "dott"}, 2, "Did you mean 'dot'"),
    ):
        with pytest.raises(SystemExit) as end:
            main(["lift", *(f"--{name}={x}" for name, x in (given | changed).items())])
        error = capsys.readouterr().err
        assert end.value.code == code
        assert error.startswith("offsphere lift: error: ")
        assert error.count("\n") == 1
        assert re.search(said, error), error
        assert not (files / "out").exists()
        assert not [x for x in files.iterdir() if x.name.endswith(".tmp")]
