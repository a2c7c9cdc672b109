"""Labelled vectors: neighbours that vote, beside the library's own kNN; a planted signal."""

from __future__ import annotations

import pytest
import torch
from planted_vectors import HOW, directions

from offsphere.audit.labelled import (
    Labelled,
    labelled_words,
    leave_one_out,
    measure_labelled,
    numbered,
)
from offsphere.audit.table import Table
from offsphere.evaluation.clustering import clustering
from offsphere.evaluation.geometry import unit
from offsphere.evaluation.knn import knn

PLACE = ("set", "vector to vector")


def classes(rows: int = 160, norms: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.arange(rows) % 4
    x = directions(4, 6, 0)[labels] + 0.6 * directions(rows, 6, 1)
    if norms:  # vectors of one class are long, and near to everything by dot
        x = x * torch.where(labels == 0, 4.0, 1.0)[:, None]
    return x, labels


@pytest.mark.parametrize("exponent", [0.0, 1.0])
def test_leaving_one_out_is_knn_without_it(exponent):
    x, labels = classes(60, norms=True)
    right, nearest = leave_one_out(x, labels, exponent)
    assert not (nearest == torch.arange(60)[:, None]).any()
    for row in range(0, 60, 7):
        rest = torch.arange(60) != row
        scale = {"k": 20, "exponents": (1.0, exponent)}
        want = knn(x[rest], labels[rest], x[[row]], labels[[row]], **scale)
        votes = labels[nearest[row]]
        if exponent == 1:  # the temperature of raw vectors is that of another training set
            assert right[row] == want.accuracy
        assert len(votes) == 20


def test_each_cell_has_its_accuracy_and_the_clustering_its_nmi():
    x, labels = classes(norms=True)
    table = Table()
    (curve,) = measure_labelled(Labelled(labelled_words("set"), x, labels), HOW, table)
    for cell, g in (("cosine", 1.0), ("dnorm", 1.0), ("dot", 0.0), ("qnorm", 0.0)):
        want = leave_one_out(x, labels, g)[0].mean().item()
        assert table.value(*PLACE, cell, "knn") == want
    gain = table.get(*PLACE, "dot", "knn_minus_cosine")
    assert gain.high < 0
    assert table.value(*PLACE, "chance", "knn") == 0.25
    for cell, vectors in (("cosine", unit(x)), ("dot", x)):
        want = clustering(vectors.float(), labels)
        assert table.value(*PLACE, cell, "clustering_nmi") == want
    by_cosine, by_dot = (leave_one_out(x, labels, g)[1][:, :10].tolist() for g in (1.0, 0.0))
    kept = [len({*a} & {*b}) / 10 for a, b in zip(by_cosine, by_dot, strict=True)]
    found = table.value(*PLACE, "dot", "nearest_kept")
    assert found == pytest.approx(sum(kept) / len(kept))
    assert 0 < found < 1
    assert sum(curve.y) / len(curve.y) == pytest.approx(
        table.value(*PLACE, "cosine", "knn"), abs=0.01
    )


def test_labels_of_any_kind_are_numbers_by_name():
    assert numbered(["b", "a", "b", "10"]).tolist() == [2, 1, 2, 0]


@pytest.mark.parametrize(
    ("rows", "labels", "words"),
    [
        (6, [0] * 6, "All 6 training labels are 0: a classifier needs at least two classes"),
        (3, [0, 1, 0], "3 labelled vectors: at least 4 are needed"),
        (4, [0, 1], "one number per row of features: expected 4"),
    ],
)
def test_what_has_no_neighbours_is_refused(rows, labels, words):
    with pytest.raises(ValueError, match=words):
        Labelled(labelled_words("set"), directions(rows, 3, 0), torch.tensor(labels))
