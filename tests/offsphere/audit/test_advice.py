"""The rules: from a table to what to do, in a first line and in sentences."""

from __future__ import annotations

import re

import pytest
import torch
from planted_vectors import audited, directions, junk_captions, noisy_norms, verdicts

from offsphere.audit.advice import Advice, Statement, headline, recommend
from offsphere.audit.search import Direction
from offsphere.audit.table import Table
from offsphere.estimate import Estimate


def test_magnitude_that_hurts():
    found = verdicts(audited(**noisy_norms()))
    assert found["image to text"] == ["keep cosine", "norm does not tell", "no remedy"]
    assert found["text to image"][0] == "keep cosine"


def test_magnitude_that_does_nothing():
    images = directions(400, 64, 0)
    random = torch.Generator().manual_seed(1)
    norms = 1 + 0.05 * torch.rand(400, 1, generator=random, dtype=torch.float64)
    texts = (images + 0.3 * directions(400, 64, 2)) * norms
    report = audited(images=images * norms.flip(0), texts=texts, owner=torch.arange(400))
    for said in verdicts(report).values():
        assert said[0] == "no difference"


def test_at_chance_nothing_can_be_told():
    """Random directions with norms that vary: dot and cosine differ, and neither knows anything."""
    random = torch.Generator().manual_seed(5)
    norms = torch.randn(2, 400, 1, generator=random, dtype=torch.float64).exp()
    sides = {
        "images": directions(400, 16, 0) * norms[0],
        "texts": directions(400, 16, 1) * norms[1],
    }
    report = audited(**sides, owner=torch.arange(400))
    assert set(map(tuple, verdicts(report).values())) == {("at chance",)}
    (said,) = report.advice[0].statements
    assert "guessing gives 0.3 %" in said.text
    assert report.headline == f"Nothing can be told: {said.text}"


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (["keep cosine"], "Score with cosine: evidence 0"),
        (["keep cosine", "inconclusive"], "Score with cosine: for way 0 on set, evidence 0"),
        (["use magnitude", "inconclusive"], "Score with dot for way 0 on set: evidence 0"),
        (
            ["keep cosine", "use magnitude"],
            "It depends: score with dot for way 1 on set",
        ),
        (["no difference", "already normalised"], "Score with cosine: evidence 0"),
        (["already normalised"], "Score with cosine: evidence 0"),
        (["at chance", "at chance"], "Nothing can be told: evidence 0"),
        (["at chance", "inconclusive"], "Nothing is settled, keep scoring with dot: evidence 1"),
        (["inconclusive"], "Nothing is settled, keep scoring with dot: evidence 0"),
    ],
)
def test_the_first_line_says_what_to_do(found, words):
    advice = [
        Advice("set", f"way {k}", (Statement(verdict, f"Evidence {k}."),))
        for k, verdict in enumerate(found)
    ]
    assert headline(advice, "dot").startswith(words)


def test_vectors_of_unknown_training_are_not_advised_when_nothing_can_be_told():
    advice = [Advice("set", "way", (Statement("inconclusive", "Evidence."),))]
    told = "Nothing is settled, score as the model was trained: evidence."
    assert headline(advice, None) == told
    assert audited(**junk_captions(60), trained="unknown").headline.startswith(told[:50])


def test_norms_that_find_the_answers_carry_relevance_and_reorder():
    """Every text is right for some image, so that rankings alone tell; the mean cosine is 0, so
    that norms make nothing of the variance of all scores."""
    said = {x.about: x for x in audited(**junk_captions()).advice[0].statements}
    assert said["relevance"].verdict == "norms carry relevance"
    assert said["leverage"].verdict == "norms reorder"
    assert "make about 0%" in said["leverage"].text
    assert said["remedies"].text.startswith("Dot gains the most over cosine by itself")


@pytest.mark.parametrize(("p", "said"), [(0.001, True), (0.2, False)])
def test_norms_that_only_the_ranking_knows_are_spoken_of(p, said):
    """Right documents are as long as others, and yet dot gains by these norms."""
    table = table_with((0.02, 0.001, 0.04), 1000)
    place = ("set", "image to text")
    numbers = {"cohens_d": Estimate(0.05, -0.1, 0.2, 1000), "cohens_d_p": Estimate(0.6)}
    numbers["cohens_d_permuted"] = Estimate(0, -0.2, 0.2, 999)
    numbers |= {"candidates_right": Estimate(300), "candidates_idle": Estimate(700)}
    for name, value in numbers.items():
        table.add(*place, "", name, value)
    table.add(*place, "dot", "r1_permuted", Estimate(0.1, 0.05, 0.15, 99))
    table.add(*place, "dot", "r1_permuted_p", Estimate(p))
    found = recommend(table, Direction("set", "image to text", "image", "right"), "cosine")
    (statement,) = (x for x in found.statements if x.about == "relevance")
    assert statement.verdict == "norms say little of relevance"
    assert ("though dot ranks better with these norms than with them" in statement.text) == said


@pytest.mark.parametrize(
    ("change", "verdict"),
    [((0, -0.02, 0.02), "inconclusive"), ((0, -0.009, 0.02), "int8 is safe")],
)
def test_storage_that_is_open_says_what_is_open(change, verdict):
    table = table_with((0.02, 0.001, 0.04), 1000)
    for cell in ("cosine", "dot"):
        for kind in ("int8", "binary"):
            estimate = Estimate(*change, 1000)
            table.add("set", "image to text", cell, f"r1_{kind}_minus_full", estimate)
    found = recommend(table, Direction("set", "image to text", "image", "right"), "cosine")
    (statement,) = (x for x in found.statements if x.about == "storage")
    assert statement.verdict == verdict
    opened = statement.text.startswith("Whether int8 costs 1 point is open. Stored smaller, r1 by")
    assert opened == (verdict == "inconclusive")


@pytest.mark.parametrize(
    ("own", "verdict"), [("qnorm", "int8 costs"), ("dot", "int8 costs"), ("dnorm", "int8 is safe")]
)
def test_storage_is_judged_by_the_cell_that_is_used(own, verdict):
    """Documents ask for the right exponent: qnorm keeps their norms as dot does."""
    table = table_with((0.02, 0.001, 0.04), 1000)
    place = ("set", "image to text")
    for cell, cost in (("cosine", 0.0), ("dot", -0.05)):
        for kind in ("int8", "binary"):
            change = Estimate(cost, cost - 0.001, cost + 0.001, 1000)
            table.add(*place, cell, f"r1_{kind}_minus_full", change)
    found = recommend(table, Direction("set", "image to text", "image", "right"), own)
    assert [x.verdict for x in found.statements if x.about == "storage"] == [verdict]


def test_no_sentence_says_no_twice():
    """Every verdict with its sentence, of four audits."""
    nothing = {"images": directions(150, 8, 0), "texts": directions(150, 8, 1)}
    reports = [
        audited(**noisy_norms()),
        audited(**junk_captions(120)),
        audited(**junk_captions(60)),
        audited(**nothing, owner=torch.arange(150)),
    ]
    no = re.compile(r"\b(?:no|not|none|never|neither|nothing|cannot)\b", re.IGNORECASE)
    for report in reports:
        said = [f"{x.verdict}. {x.text}" for advice in report.advice for x in advice.statements]
        for text in [*said, report.headline]:
            assert len(no.findall(text)) < 2, text


def test_few_images_decide_nothing_but_what_an_exact_test_tells_too():
    report = audited(**noisy_norms(images=60))
    assert verdicts(report)["image to text"] == ["keep cosine", "inconclusive", "inconclusive"]
    assert "so few ask for an exact test: p < 0.0001" in report.headline
    report = audited(**junk_captions(images=60))
    assert verdicts(report)["image to text"] == ["inconclusive"] * 3
    assert "an interval over them says little and the exact test has p = 0.2" in report.headline


@pytest.mark.parametrize(
    ("estimate", "p", "verdict"),
    [
        ((0.5, 0.4, 0.6), 0.05, "use magnitude"),
        ((-0.5, -0.6, -0.4), 0.049, "keep cosine"),
        ((-0.5, -0.6, -0.4), 0.051, "inconclusive"),
        ((-0.5, -0.6, 0.01), 0.01, "inconclusive"),
    ],
)
def test_few_need_an_interval_and_an_exact_test(estimate, p, verdict):
    table = table_with(estimate, 99)
    table.add("set", "image to text", "dot", "r1_minus_cosine_p", Estimate(p))
    words = Direction("set", "image to text", "image", "right")
    assert recommend(table, words, "cosine").statements[0].verdict == verdict


def table_with(estimate: tuple[float, float, float], images: int, cv: float = 0.1) -> Table:
    """A direction whose other facts decide nothing."""
    table, place = Table(), ("set", "image to text")
    for cell, difference in (("cosine", (0.0, 0.0, 0.0)), ("dot", estimate)):
        table.add(*place, cell, "r1", Estimate(0.5, 0.4, 0.6, images))
        table.add(*place, cell, "r1_minus_cosine", Estimate(*difference, images))
    facts = {"candidate_norm_cv": cv, "queries": images, "fitted_on": 9, "judged_on": 9}
    for name, value in facts.items():
        table.add(*place, "", name, Estimate(value))
    for name in ("right", "wrong"):
        table.add(*place, "cosine", f"answers_{name}", Estimate(3))
    table.add(*place, "chance", "r1", Estimate(0.01))
    return table


@pytest.mark.parametrize(
    ("estimate", "images", "verdict"),
    [
        ((0.02, 0.001, 0.04), 1000, "use magnitude"),
        ((-0.02, -0.04, -0.001), 1000, "keep cosine"),
        ((0.02, 0.0, 0.04), 1000, "inconclusive"),
        ((0.0, -0.009, 0.009), 1000, "no difference"),
        ((0.005, 0.001, 0.009), 1000, "no difference"),
        ((0.0, 0.0, 0.0), 299, "inconclusive"),
        ((0.0, 0.0, 0.0), 300, "no difference"),
        ((0.5, 0.4, 0.6), 99, "inconclusive"),
    ],
)
def test_the_rules_of_magnitude(estimate, images, verdict):
    words = Direction("set", "image to text", "image", "right")
    found = recommend(table_with(estimate, images), words, "cosine")
    assert [x.verdict for x in found.statements] == [verdict, "inconclusive", "inconclusive"]
    assert ("below 100 an interval" in found.statements[0].text) == (images < 100)
    constant = recommend(table_with(estimate, images, cv=0.0005), words, "cosine")
    assert constant.statements[0].verdict == "already normalised"
