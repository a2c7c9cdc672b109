"""Every cell's metrics against slow references, trec_eval and closed forms; the bootstrap too."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from planted_vectors import HOW, directions, junk_captions, searches

from offsphere.audit import scoring
from offsphere.audit.scoring import cells_of, score
from offsphere.audit.search import Direction, Search
from offsphere.audit.table import Table
from offsphere.evaluation import ranking
from offsphere.evaluation.intervals import draws
from offsphere.evaluation.zero_shot import class_vectors
from offsphere.names import CORNERS


def test_intervals_are_the_metric_of_drawn_images_with_all_their_captions():
    tensors, table = junk_captions(40), Table()
    (_, to_image) = searches(**tensors)
    found = score(to_image, HOW, table)
    owner, hits = tensors["owner"], {}
    for cell in ("cosine", "dot"):
        hits[cell] = found[cell].values["t2i_r1"].numpy()
    drawn: dict[str, list[float]] = {"cosine": [], "dot": []}
    for row in torch.cat(list(draws(40, HOW.resamples, HOW.seed))).tolist():
        captions = [j for i in row for j in (owner == i).nonzero().flatten().tolist()]
        for cell, values in drawn.items():
            values.append(hits[cell][captions].mean())
    place = ("planted", "text to image")
    share = table.get(*place, "cosine", "t2i_r1")
    assert (share.low, share.high) == pytest.approx(np.quantile(drawn["cosine"], [0.025, 0.975]))
    gain = table.get(*place, "dot", "t2i_r1_minus_cosine")
    assert gain.value == pytest.approx(hits["dot"].mean() - hits["cosine"].mean())
    assert gain.n == share.n == 40
    # Images are of one length: nothing can change, and closed intervals say so.
    assert (gain.value, gain.low) == (0.0, pytest.approx(-gain.high))


def classes(images: int = 80) -> Search:
    random = torch.Generator().manual_seed(0)
    owner = torch.arange(7).repeat_interleave(3)
    labels = torch.randint(7, (images,), generator=random)
    centres = directions(7, 10, 1)
    texts = (centres[owner] + 0.5 * directions(21, 10, 2)) * torch.rand(21, 1, generator=random)
    words = Direction(
        "planted", "image to class", "image", "right", {"top1": 1, "top5": 5}, "mean_class_recall"
    )
    pictures = centres[labels] + 4 * directions(images, 10, 3)
    return Search(words, pictures, texts, torch.arange(images), labels, item_owner=owner)


def slow_accuracies(search: Search, vectors: np.ndarray, rows: np.ndarray) -> dict[str, float]:
    """Of some images, drawn perhaps more than once."""
    labels = search.pair_item.numpy()[rows]
    order = np.argsort(-(search.queries.numpy()[rows] @ vectors.T), axis=1)
    rank = (order == labels[:, None]).argmax(1)
    recalls = [np.mean(rank[labels == label] == 0) for label in np.unique(labels)]
    accuracies = {"top1": np.mean(rank == 0), "top5": np.mean(rank < 5)}
    return {**accuracies, "mean_class_recall": np.mean(recalls)}


def test_classes_have_the_numbers_of_a_slow_reference():
    search, table = classes(), Table()
    score(search, HOW, table)
    drawn = torch.cat(list(draws(80, HOW.resamples, HOW.seed))).numpy()
    for cell, (_, g) in CORNERS.items():
        vectors = class_vectors(search.items, search.item_owner, 7, g).numpy()
        want = slow_accuracies(search, vectors, np.arange(80))
        again = [slow_accuracies(search, vectors, rows) for rows in drawn]
        for metric, value in want.items():
            found = table.get("planted", "image to class", cell, metric)
            assert found.value == pytest.approx(value, abs=1e-12)
            ends = np.quantile([x[metric] for x in again], [0.025, 0.975])
            assert (found.low, found.high) == pytest.approx(ends, abs=1e-9)
    place = ("planted", "image to class")
    assert table.value(*place, "chance", "top5") == pytest.approx(5 / 7)
    largest = torch.bincount(search.pair_item).max().item() / 80
    assert table.value(*place, "majority", "top1") == largest


def graded(queries: int = 12, documents: int = 30, seed: int = 0) -> Search:
    random = torch.Generator().manual_seed(seed)
    q = directions(queries, 6, seed)
    d = directions(documents, 6, seed + 1) * (0.5 + torch.rand(documents, 1, generator=random))
    d[:queries] += q
    pairs = [(i, i) for i in range(queries)] + [(i, i + queries) for i in range(queries)]
    pair_query, pair_item = torch.tensor(pairs).T
    grades = torch.tensor([2] * queries + [1] * queries)
    words = Direction("set", "query to document", "query", "right", graded=True, examples="queries")
    return Search(words, q, d, pair_query, pair_item, grades)


def test_graded_relevance_is_trec_evals():
    search, table = graded(), Table()
    found = score(search, HOW, table)
    relevant = [{i: 2, i + 12: 1} for i in range(12)]
    for cell, (_, g) in CORNERS.items():
        want = ranking.outcomes(ranking.rank(search.queries, search.items, g), relevant)
        for metric, values in want._asdict().items():
            assert torch.equal(found[cell].values[metric], values)
            assert table.value("set", "query to document", cell, metric) == values.mean().item()


def test_graded_chance_is_the_mean_over_all_orders():
    """Of five documents, two right with grades 2 and 1, all 120 orders."""
    words = Direction("set", "query to document", "query", "right", graded=True)
    search = Search(words, torch.ones(1, 2), torch.ones(5, 2), [0, 0], [3, 1], grades=[2, 1])
    chance = scoring.by_guessing(search)["chance"]
    discount = 1 / np.log2(np.arange(2, 7))
    gains = np.array([0, 1, 0, 2, 0])
    ndcg, mrr = [], []
    for order in itertools.permutations(range(5)):
        ndcg.append((gains[list(order)] * discount).sum() / (2 * discount[0] + discount[1]))
        mrr.append(1 / (1 + min(order.index(3), order.index(1))))
    assert chance["ndcg10"] == pytest.approx(np.mean(ndcg))
    assert chance["mrr10"] == pytest.approx(np.mean(mrr))
    assert (chance["recall100"], chance["r1"]) == (1.0, pytest.approx(0.4))


def test_cells_that_tie_by_construction_are_equal_to_the_bit():
    table = Table()
    for search in searches(**junk_captions(30)):
        score(search, HOW, table)
    rows = {row[:4]: row[4:] for row in table}
    for way, ties in (
        ("image to text", (("cosine", "dnorm"), ("dot", "qnorm"))),
        ("text to image", (("cosine", "qnorm"), ("dot", "dnorm"))),
    ):
        for a, b in ties:
            of_a = {key[3]: x for key, x in rows.items() if key[1:3] == (way, a)}
            assert of_a == {key[3]: x for key, x in rows.items() if key[1:3] == (way, b)}


def test_an_own_cell_inside_the_square_is_scored_too():
    cells, own = cells_of((0.3, 0.7), None)
    assert (own, cells[own]) == ("0.3,0.7", (0.3, 0.7))
    cells, own = cells_of((1.0, 1.0), "dot")
    assert (own, cells) == ("dot", CORNERS)
    how = HOW._replace(cells=cells_of((0.3, 0.7), None)[0])
    table = Table()
    (to_text, _) = searches(**junk_captions(20))
    score(to_text, how, table)
    images, texts, owner = (x.numpy() for x in junk_captions(20).values())
    scores = images @ (texts / np.linalg.norm(texts, axis=1, keepdims=True) ** 0.7).T
    want = (owner[scores.argmax(1)] == np.arange(20)).mean()
    assert table.value("planted", "image to text", "0.3,0.7", "i2t_r1") == pytest.approx(want)
