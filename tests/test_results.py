"""What is committed in results/ is what the tables there say."""

from __future__ import annotations

import io
import re
import subprocess
import tarfile
from itertools import zip_longest
from pathlib import Path

import pytest

from offsphere.analysis.claim_file import load_claims
from offsphere.analysis.claims import Verdict, evaluate_claims
from offsphere.analysis.conditions import steps_text
from offsphere.analysis.overview import PICTURES
from offsphere.analysis.page import QUESTIONS
from offsphere.analysis.report import write_report
from offsphere.analysis.tables import runs_table
from offsphere.run import safe_yaml

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def committed(tmp_path_factory) -> Path:
    """results/ as it is committed, without the runs of whoever runs this test."""
    made = subprocess.run(["git", "archive", "HEAD", "results"], cwd=ROOT, capture_output=True)
    assert made.returncode == 0, made.stderr
    folder = tmp_path_factory.mktemp("committed")
    with tarfile.open(fileobj=io.BytesIO(made.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder / "results"


def test_the_page_can_be_made_again_from_the_tables(committed: Path, tmp_path: Path) -> None:
    page = (committed / "report.html").read_text()
    (date,) = re.findall(r"<dt>Written</dt><dd>(\d{4}-\d{2}-\d{2})</dd>", page)
    again = write_report(results=committed, out=tmp_path / "report.html", date=date, figures=False)
    lines = zip_longest(again.read_text().splitlines(), page.splitlines())
    different = next((pair for pair in lines if pair[0] != pair[1]), None)
    assert different is None


@pytest.mark.parametrize(
    ("name", "heading"), [("README.md", "trained networks"), ("short_runs.md", "short runs")]
)
def test_a_page_has_the_verdicts_and_figures_of_the_board(
    committed: Path, board: dict[str, Verdict], name: str, heading: str
) -> None:
    waiting = ("not run", "running", "incomplete")
    primary = [x for x in board.values() if x.claim.kind == "primary"]
    lines = [x for x in primary if x.claim.heading == heading and x.verdict not in waiting]
    page = (committed / name).read_text()
    rows = re.findall(r"^\| ([a-z-]+) \| ([a-z ,-]+) \| (.*) \|$", page, re.M)
    rows = [row for row in rows if set(row[0]) != {"-"}]
    assert [row[0] for row in rows] == [line.claim.id for line in lines]
    for (_, said, figures), line in zip(rows, lines, strict=True):
        assert said == line.verdict
        assert figures == as_in_the_table(line)


def as_in_the_table(line: Verdict) -> str:
    """Figure, n and, of trained networks, steps."""
    found, trained = line.measured, line.claim.heading == "trained networks"
    if found is None:
        return f"{line.sentence} | –" + " | –" * trained
    unit = " log ratio" if line.claim.transform == "log" else ""
    unit = " Fisher's z" if line.claim.correlate else unit
    figures = f"{found.value:+.3f} [{found.low:+.3f}, {found.high:+.3f}]{unit} | {found.n}"
    return figures + (f" | {steps_text(line.steps)}" if trained else "")


def test_every_exact_claim_is_verified(board: dict[str, Verdict]) -> None:
    exact = {name: x.verdict for name, x in board.items() if x.claim.kind == "exact"}
    assert len(exact) == 22
    assert set(exact.values()) == {"verified"}


INTERVAL = re.compile(r"([+-]?\d+\.\d+)[ a-z]* \[([+-]?\d+\.\d+), ([+-]?\d+\.\d+)\]")


@pytest.fixture(scope="module")
def board(committed: Path) -> dict[str, Verdict]:
    lines = evaluate_claims(load_claims(ROOT / "configs" / "claims.yaml"), committed)
    return {line.claim.id: line for line in lines}


def test_every_interval_in_the_prose_is_on_the_board(board: dict[str, Verdict]) -> None:
    """Code blocks hold examples, not results."""
    pages = [ROOT / "README.md", *(ROOT / "results").glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    for page in pages:
        prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        found = INTERVAL.findall(prose)
        assert len(found) > 1 or page.name != "README.md"
        for said in found:
            assert any(is_measured(said, line) for line in board.values()), f"{page}: {said}"


RESTS_ON = re.compile(r"(\d+ (?:seeds|collections)), ([\d,]+(?: to [\d,]+)? steps)")


@pytest.mark.parametrize("name", ["README.md", "results/README.md"])
def test_every_interval_says_its_seeds_and_steps(board: dict[str, Verdict], name: str) -> None:
    """In prose behind each, in a table in the sentence below it; the board's copy has columns."""
    text = (ROOT / name).read_text().partition("\n## The primary claims")[0]
    found = [*INTERVAL.finditer(text)]
    assert found
    for said in found:
        rest = RESTS_ON.search(text, said.end())
        assert rest is not None, said[0]
        in_table = text[text.rfind("\n", 0, said.start()) + 1] == "|"
        assert in_table or INTERVAL.search(text[said.end() : rest.start()]) is None, said[0]
        claims = [x for x in board.values() if is_measured(said.groups(), x)]
        seeds = {(x.measured.count, steps_text(x.steps)) for x in claims if x.measured}
        assert rest.groups() in seeds, f"{said[0]}: {rest[0]}, not {seeds}"


def test_the_advice_on_similarities_rests_on_these_verdicts(board: dict[str, Verdict]) -> None:
    """If one changes, read docs/which_similarity.md and docs/answer.md again."""
    page = (ROOT / "docs" / "which_similarity.md").read_text()
    for name, verdict in {
        "simclr-dot": "non-superior",
        "retrieval-one-sided": "the opposite shown",
        "static-dot": "shown beyond the margin",
    }.items():
        assert f"{{claim}}`{name}`" in page
        assert board[name].verdict == verdict
    for name in ("retrieval-dot", "retrieval-qnorm", "sts-dot", "trained-clip-dot", "scale-fixed"):
        measured = board[name].measured
        assert f"{{claim}}`{name}`" in page
        assert measured is not None
        assert measured.high < 0


def is_measured(said: tuple[str, ...], line: Verdict) -> bool:
    """Whether a claim has this mean and interval: as they are, in points, with the other sign, or
    with what they were compared with put back."""
    found = line.measured
    if found is None:
        return False
    digits = len(said[0].partition(".")[2])
    spelt = [f"{float(x):.{digits}f}" for x in said]
    against = line.claim.against
    return any(
        spelt == [f"{scale * (x + start):.{digits}f}" for x in ends]
        for start in {0.0, against if isinstance(against, float) else 0.0}
        for scale, ends in (
            (1, (found.value, found.low, found.high)),
            (100, (found.value, found.low, found.high)),
            (-1, (found.value, found.high, found.low)),
            (-100, (found.value, found.high, found.low)),
        )
    )


def test_every_row_of_a_picture_is_a_claim(board: dict[str, Verdict]) -> None:
    """A misspelt claim would only be missing: the page of one study leaves out the others'."""
    plates = safe_yaml.load(PICTURES.read_text(), PICTURES)
    rows = [
        next(iter(row.items())) for x in plates for panel in x["panels"] for row in panel["rows"]
    ]
    named = [key for key, _ in rows if key != "heading"]
    assert set(named) <= board.keys()
    assert len(plates) <= 4
    assert max(sum(len(panel["rows"]) for panel in x["panels"]) for x in plates) <= 14


def test_a_question_lists_the_claims_that_it_names(
    committed: Path, board: dict[str, Verdict]
) -> None:
    page = (committed / "report.html").read_text()
    for each in safe_yaml.load(QUESTIONS.read_text(), QUESTIONS):
        section = page.partition(f'id="question-{each["id"]}"')[2].partition("<section")[0]
        for name in each.get("claims", []):
            assert board[name].claim.kind == "primary"
            assert f'href="#claim-{name}"' in section


def test_means_in_the_prose_are_those_of_the_tables(committed: Path) -> None:
    page = (committed / "README.md").read_text()
    term = runs_table(committed / "term_temperature")
    probes = term.groupby(["part", "temperature", "variance_weight"])["test/probe"].mean() * 100
    start = term.groupby("part")["untrained/probe"].mean() * 100
    for part in ("cifar10", "tinyimagenet"):
        without, with_it, untrained = probes[part, 1.0, 0], probes[part, 1.0, 30], start[part]
        assert f"from {without:.1f} to {with_it:.1f} % (untrained {untrained:.1f})" in page
    cold, hot, both = (probes["cifar10", t, w] for t, w in ((0.2, 0), (1.0, 30), (0.2, 30)))
    assert f"reaches {cold:.1f} % at 0.2 without it and {hot:.1f} % at 1.0 with it" in page
    assert f"{both:.1f} % at 0.2 with it" in page
    best = runs_table(committed / "term_best").groupby("part")
    chosen = {
        part: rows[["temperature", "variance_weight"]].drop_duplicates() for part, rows in best
    }
    assert chosen["with"].to_numpy().tolist() == [[0.5, 3]]
    assert chosen["without"].to_numpy().tolist() == [[0.2, 0]]
    assert "(temperature 0.5, weight 3)" in page
    assert "without it (temperature 0.2)" in page
    static = runs_table(committed / "static_cells")
    means = static.groupby(["arm", "cell"])[
        ["test/ndcg10", "test/ndcg10_scored_cosine", "untrained/ndcg10"]
    ].mean()
    cosine, dot = means.loc["calibrated", "cosine"], means.loc["calibrated", "dot"]
    fixed = means.loc["one_temperature", "dot"]
    start = cosine["untrained/ndcg10"]
    assert f"nDCG@10 of {cosine['test/ndcg10']:.3f} (untrained {start:.3f})" in page
    assert f"reach {dot['test/ndcg10_scored_cosine']:.3f} when scored by cosine" in page
    assert f"({dot['untrained/ndcg10']:.3f} against {start:.3f})" in page
    ended = fixed["test/ndcg10"], fixed["untrained/ndcg10"]
    assert "({:.3f}, untrained {:.3f})".format(*ended) in page
    static = static[(static["arm"] == "calibrated") & (static["cell"] == "qnorm")]
    assert f"r = {static['test/norm_gain_r'].mean():.2f} (published 0.57)" in page
    names = [c.split("/")[1] for c in static.columns if re.fullmatch("test/.+/cohens_d", c)]
    gain = {n: static[f"test/{n}/ndcg10_scored_dot"].mean() for n in names}
    gain = {n: x - static[f"test/{n}/ndcg10_scored_cosine"].mean() for n, x in gain.items()}
    assert "on 26 collections" in page
    assert (len(gain), max(gain.values()) < 0) == (26, True)  # keeping norms loses on each
    text = runs_table(committed / "cells_retrieval")
    text = text[(text["part"] == "pretrained") & text["cell"].isin(["cosine", "learnable"])]
    mean = text.groupby("cell")[["test/ndcg10", "train/exponent_left", "train/exponent_right"]]
    mean = mean.mean()
    learned, cosine = mean.loc["learnable"], mean.loc["cosine"]
    left, right = learned["train/exponent_left"], learned["train/exponent_right"]
    assert f"exponents of {left:.2f} and {right:.2f}" in page
    scores = learned["test/ndcg10"], cosine["test/ndcg10"]
    assert "of {:.3f} where cosine has {:.3f} (10 seeds, 156 steps".format(*scores) in page
    assert set(text.groupby("cell")["seed"].nunique()) == {10}
    assert set(text["run/steps"]) == {156}


def test_the_folder_stays_small(committed: Path) -> None:
    files = [path for path in committed.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 30e6
    assert {path.suffix for path in files}.isdisjoint({".pt", ".safetensors"})
