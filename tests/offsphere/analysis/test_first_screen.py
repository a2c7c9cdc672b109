"""The first screen says of each task what was measured, in the reader's words."""

from __future__ import annotations

import math

import pytest

from offsphere.analysis.claim_file import Claim
from offsphere.analysis.claims import Verdict
from offsphere.analysis.first_screen import first_screen
from offsphere.analysis.stats import OverSeeds, estimate

PICTURES = """
- id: roles
  title: By task
  panels:
  - title: A panel that asks nothing
    rows: [hurt: not here]
  - title: Dot against cosine
    asks: Does dot help?
    rows:
    - heading: different roles
    - hurt: query and document
    - unknown: not on the board
    - heading: interchangeable
    - waits: two captions
    - heading: others
    - helped: two views
    - open: two halves
"""


def line(name: str, measured: OverSeeds | None, transform: str | None = None) -> Verdict:
    claim = Claim(
        id=name,
        kind="descriptive",
        text="...",
        source="ours",
        published=None,
        protocol="small-scale re-test",
        study="x",
        metric="test/ndcg10" if transform else "test/probe",
        transform=transform,
    )
    return Verdict(claim, "measured" if measured else "not run", "", measured, steps=(1000, 1000))


@pytest.fixture
def lines() -> list[Verdict]:
    log = estimate([math.log(0.5) + shift for shift in (-0.01, 0.0, 0.01)])
    return [
        line("hurt", log, "log"),
        line("waits", None),
        line("helped", estimate([0.019, 0.020, 0.021])),
        line("open", estimate([0.01, -0.02, 0.03])),
    ]


def test_rows_have_words_per_cent_and_what_they_rest_on(lines, tmp_path):
    file = tmp_path / "pictures.yaml"
    file.write_text(PICTURES)
    found = first_screen(file, lines)
    assert found is not None
    assert found.question == "Does dot help?"
    # A heading whose rows wait for their runs is left out, and so is a claim of another board.
    assert [(row.task, row.word) for row in found.rows] == [
        ("different roles", ""),
        ("query and document", "costs"),
        ("others", ""),
        ("two views", "helps"),
        ("two halves", "no difference shown"),
    ]
    halves, points = found.rows[1], found.rows[3]
    # Three values 0.01 apart: the mean, and t(0.975, 2) = 4.303 standard errors of 0.00577.
    ends = [
        100 * math.expm1(math.log(0.5) + sign * 4.303 * 0.01 / math.sqrt(3)) for sign in (-1, 1)
    ]
    assert halves.size == "−50 %"
    low, high = (f"−{abs(end):.0f}" for end in ends)
    assert halves.rest == f"[{low}, {high}] of cosine's nDCG@10, 3 seeds, 1,000 steps"
    assert points.size == "+2.00 points"
    assert points.rest == "[+1.75, +2.25] linear probe accuracy, 3 seeds, 1,000 steps"


def test_without_a_measured_row_there_is_no_answer(lines, tmp_path):
    file = tmp_path / "pictures.yaml"
    assert first_screen(file, lines) is None
    file.write_text(PICTURES)
    assert first_screen(file, lines[1:2]) is None
    file.write_text(PICTURES.replace("asks", "ask"))
    assert first_screen(file, lines) is None
