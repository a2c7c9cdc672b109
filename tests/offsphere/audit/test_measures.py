"""What norms say and what remedies change, on planted vectors and against slow references."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from planted_vectors import HOW, audited, directions, junk_captions, verdicts
from sklearn.metrics import ndcg_score, roc_auc_score

from offsphere.audit import measures
from offsphere.audit.search import Direction, Search
from offsphere.audit.table import HALF, Table
from offsphere.evaluation.intervals import draws
from offsphere.evaluation.similarity import CellSimilarity

TO_TEXT = ("planted", "image to text")


def test_magnitude_that_helps():
    tensors = junk_captions()
    report = audited(**tensors)
    said = verdicts(report)
    assert said["image to text"][0] == "use magnitude"
    assert said["text to image"][0] == "already normalised"
    images, texts, owner = (x.numpy() for x in tensors.values())
    for exponent, cells in ((1.0, ("cosine", "dnorm")), (0.0, ("dot", "qnorm"))):
        scores = images @ (texts / np.linalg.norm(texts, axis=1, keepdims=True) ** exponent).T
        right = owner[scores.argmax(1)] == np.arange(300)
        nearest = np.argsort(-scores, axis=1)[:, :10]
        counts = np.bincount(nearest.ravel(), minlength=600)
        centred = counts - counts.mean()
        skewness = (centred**3).mean() / counts.std() ** 3
        for cell in cells:
            value = report.table.value(*TO_TEXT, cell, "i2t_r1")
            assert value == pytest.approx(right.mean(), abs=1e-9)
            found = report.table.value(*TO_TEXT, cell, "hubness_skewness")
            assert found == pytest.approx(skewness, rel=1e-5)
    gain = report.table.get(*TO_TEXT, "dot", "i2t_r1_minus_cosine")
    assert gain.value > 0.1
    assert gain.low > 0
    nearest = [
        np.argsort(-images @ (texts / np.linalg.norm(texts, axis=1, keepdims=True) ** g).T, axis=1)
        for g in (1.0, 0.0)
    ]
    kept = [len({*a[:10]} & {*b[:10]}) / 10 for a, b in zip(*nearest, strict=True)]
    found = report.table.get(*TO_TEXT, "dot", "nearest_kept")
    assert found.value == pytest.approx(np.mean(kept))
    assert found.low < found.value < found.high < 0.9
    assert f"gains {100 * gain.value:.1f} points" in report.advice[0].statements[0].text


def test_norms_of_right_and_wrong_answers():
    """Long images are those with little noise: their norm tells, whatever it ranks."""
    texts = directions(300, 8, 0)
    random = torch.Generator().manual_seed(1)
    noise = torch.rand(300, 1, generator=random, dtype=torch.float64)
    images = torch.nn.functional.normalize(texts + 1.2 * noise * directions(300, 8, 2))
    images = images * (2 - noise)
    report = audited(images=images, texts=texts, owner=torch.arange(300))
    assert verdicts(report)["image to text"][:2] == ["already normalised", "norm tells"]
    told = {
        row.metric: report.table.get(*row[:4])
        for row in report.table
        if row[:3] == (*TO_TEXT, "cosine")
    }
    right = ((images @ texts.T).argmax(1) == torch.arange(300)).numpy()
    norms = images.norm(dim=1).numpy()
    counts = [told[f"answers_{kind}"].value for kind in ("right", "wrong", "undecided")]
    assert counts == [right.sum(), (~right).sum(), 0]
    assert "answer_norm_auroc" not in told  # all texts are of one length
    area, effect = told["query_norm_auroc"], told["query_norm_cohens_d"]
    assert area.value == pytest.approx(roc_auc_score(right, norms), abs=1e-9)
    assert effect.value == pytest.approx(cohens_d(norms, right), abs=1e-9)
    (rows,) = draws(300, 200, 0)
    areas = [roc_auc_score(right[row], norms[row]) for row in rows.numpy()]
    effects = [cohens_d(norms[row], right[row]) for row in rows.numpy()]
    for estimate, values in ((area, areas), (effect, effects)):
        want = np.quantile(values, [0.025, 0.975])
        assert [estimate.low, estimate.high] == pytest.approx(want, abs=1e-9)
    shortest = np.argsort(norms)[:30]
    curves = [x for x in report.curves if x.kind == "right by norm" and x.name == "image"]
    assert curves[0].x[0] == pytest.approx(norms[shortest].mean())
    assert curves[0].y[0] == pytest.approx(right[shortest].mean())


def cohens_d(values: np.ndarray, right: np.ndarray) -> float:
    a, b = values[right], values[~right]
    pooled = ((len(a) - 1) * a.var(ddof=1) + (len(b) - 1) * b.var(ddof=1)) / (len(values) - 2)
    return (a.mean() - b.mean()) / np.sqrt(pooled)


def test_captions_are_weighed_with_their_image():
    image = torch.tensor([0, 0, 3, 3, 3, 7])
    (rows,) = draws(3, 50, 2)
    weights = measures.example_weights(image, HOW._replace(resamples=50, seed=2))
    for row, weight in zip(rows.tolist(), weights, strict=True):
        assert weight.tolist() == [row.count(place) for place in (0, 0, 1, 1, 1, 2)]


def test_remedies_are_fitted_on_one_half_and_judged_on_the_other():
    """Each side has a mean of its own, which cosine trips over."""
    base = directions(400, 16, 0)
    offsets = 4 * directions(2, 16, 1)
    images = base + offsets[0]
    texts = base + 0.7 * directions(400, 16, 2) + offsets[1]
    report = audited(images=images, texts=texts, owner=torch.arange(400))
    assert verdicts(report)["image to text"][2] == "use a remedy"
    facts = [
        report.table.value(*TO_TEXT, metric=name)
        for name in ("fitted_on", "judged_on", "remedies_level")
    ]
    assert facts == [200, 200, pytest.approx(1 - 0.05 / 6)]

    def found(name: str, metric: str) -> float:
        return report.table.value(*TO_TEXT, name, f"{metric}{HALF}")

    order = torch.randperm(400, generator=torch.Generator().manual_seed(0))
    fitted, kept = order[:200].numpy(), np.sort(order[200:].numpy())
    left, right = images.numpy(), texts.numpy()

    def hits(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        cosine = (a / np.linalg.norm(a, axis=1, keepdims=True)) @ (
            b / np.linalg.norm(b, axis=1, keepdims=True)
        ).T
        return cosine.argmax(1) == np.arange(len(a))

    plain = hits(left[kept], right[kept])
    centred = hits(left[kept] - left[fitted].mean(0), right[kept] - right[fitted].mean(0))
    assert found("cosine", "i2t_r1") == pytest.approx(plain.mean())
    assert found("centred", "i2t_r1") == pytest.approx(centred.mean())
    assert centred.mean() > plain.mean() + 0.1
    surplus = centred.astype(float) - plain
    (drawn,) = draws(200, 200, 0)
    want = np.quantile(surplus[drawn.numpy()].mean(1), [0.025 / 6, 1 - 0.025 / 6])
    gain = report.table.get(*TO_TEXT, "centred", f"i2t_r1_minus_cosine{HALF}")
    assert [gain.value, gain.low, gain.high] == pytest.approx([surplus.mean(), *want], abs=1e-9)
    assert found("centred", "hubness_skewness") < found("cosine", "hubness_skewness")
    assert np.isnan(found("z-scored queries", "i2t_r1_minus_cosine"))
    for metric in ("i2t_r1", "hubness_skewness", "hubness_hub_share"):
        assert found("z-scored queries", metric) == found("cosine", metric)


def test_remedies_of_graded_answers_are_judged_by_what_decides():
    """nDCG@10 in the remedies' rows as in the cells': the mean of the half by scikit-learn."""
    random = np.random.default_rng(0)
    documents = random.normal(size=(60, 8))
    queries = documents[:40] + 0.8 * random.normal(size=(40, 8))
    gains = np.eye(40, 60) * 2 + np.eye(40, 60, 1)
    asked, right = gains.nonzero()
    words = Direction("set", "query to document", "query", "right", graded=True)
    grades = gains[asked, right].astype(int)
    search, table = Search(words, queries, documents, asked, right, grades), Table()
    measures.measure_remedies(search, HOW, table)
    judged = ~measures.reference_half(40, HOW.seed).numpy()
    unit = documents / np.linalg.norm(documents, axis=1, keepdims=True)
    for name, items in (("cosine", unit), ("dot", documents), ("z-scored queries", unit)):
        want = ndcg_score(gains[judged], (queries @ items.T)[judged], k=10)
        found = table.value(*words.place, name, f"ndcg10{HALF}")
        assert found == pytest.approx(want, abs=1e-9)
    assert table.get(*words.place, "dot", f"ndcg10_minus_cosine{HALF}").value != 0


def test_equal_scores_count_their_share():
    items = torch.eye(3, dtype=torch.float64)[[0, 0, 1]]
    words = Direction("set", "a to b", "a", "right")
    search = Search(words, torch.eye(3, dtype=torch.float64)[:2], items, [0, 1, 1], [0, 1, 2])
    judged = measures.judge(CellSimilarity(), search)
    assert judged.hit.tolist() == [0.5, 1.0]
    assert judged.top_score.tolist() == [1.0, 1.0]


def test_a_remedy_that_cannot_be_fitted_is_a_problem():
    """All texts of all images are one and the same: there is nothing to centre or whiten."""
    images, texts = torch.ones(12, 4), torch.ones(12, 4)
    report = audited(images=images, texts=texts, owner=torch.arange(12))
    problems = {x.scored_with: x.problem for x in report.problems if x[:2] == TO_TEXT}
    assert "do not vary" in problems["whitened"]
    value = report.table.value(*TO_TEXT, "cosine", f"i2t_r1{HALF}")
    assert value == pytest.approx(1 / 6)
