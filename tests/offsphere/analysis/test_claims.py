import json
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

from offsphere.analysis import claims as claims_module
from offsphere.analysis import exact as module
from offsphere.analysis import page
from offsphere.analysis.claim_file import load_claims
from offsphere.analysis.claims import board, evaluate_claims, main
from offsphere.analysis.exact import names_a_test
from offsphere.analysis.measuring import measure
from offsphere.analysis.stats import contrast, holm, paired_difference
from offsphere.analysis.tables import write_runs
from offsphere.analysis.verdicts import claim_p
from offsphere.run.config import identity_settings as settings_of
from vision.train_simclr import Config as SimClrConfig

ROOT = Path(module.__file__).parents[2]
CLAIMS = ROOT / "configs" / "claims.yaml"
PRIMARY = {
    "id": "dot",
    "kind": "primary",
    "text": "Dot beats cosine.",
    "source": "here",
    "published": None,
    "protocol": "small-scale re-test",
    "study": "cells",
    "metric": "test/probe",
    "effect": {"cell": "dot - cosine"},
    "expect": "greater",
    "margin": 0.05,
    "margin_from": "ours",
}
DESCRIPTIVE = {k: PRIMARY[k] for k in list(PRIMARY)[:9]} | {"id": "figure", "kind": "descriptive"}
EXACT = {k: PRIMARY[k] for k in list(PRIMARY)[:5]} | {"id": "sure", "kind": "exact"}
PROVEN = "tests/offsphere/analysis/test_claims.py::test_the_shipped_board_is_sound"
EXACT["tests"] = [PROVEN]


def write_claims(path: Path, *entries: dict) -> Path:
    path.write_text(yaml.safe_dump(list(entries)))
    return path


def cells(n: int, effect: float, seed: int = 0, **columns: object) -> pd.DataFrame:
    """Runs of cosine and dot whose paired difference is `effect` with spread 0.01."""
    rng = np.random.default_rng(seed)
    rows = []
    for k in range(n):
        base = rng.normal(0.7, 0.05)
        for cell, shift in (("cosine", 0.0), ("dot", effect + rng.normal(0, 0.01))):
            rows.append({"run": f"{cell}-seed{k}-{sorted(columns.items())}", "status": "finished"})
            rows[-1] |= {"cell": cell, "seed": k, "test/probe": base + shift, **columns}
    return pd.DataFrame(rows)


def results(tmp_path: Path, **tables: pd.DataFrame) -> Path:
    for study, table in tables.items():
        (tmp_path / study).mkdir(parents=True, exist_ok=True)
        write_runs(table, tmp_path / study / "runs.csv")
    return tmp_path


def by_cell(table: pd.DataFrame, cell: str, column: str = "test/probe") -> np.ndarray:
    return table[table["cell"] == cell].sort_values("seed")[column].to_numpy()


def claim(path: Path, **changes: object):
    return load_claims(write_claims(path / "c.yaml", {**DESCRIPTIVE, **changes}))[0]


def test_the_shipped_board_is_sound():
    claims = load_claims(CLAIMS)
    primaries = [claim for claim in claims if claim.kind == "primary"]
    headings = [claim.heading for claim in primaries]
    assert set(headings) == {"trained networks", "short runs"}
    assert headings.count("short runs") == 10
    assert headings.count("trained networks") <= 12
    assert all(claim.planned and claim.gates for claim in primaries)
    studies = {path.stem for path in (ROOT / "configs" / "studies").glob("*.yaml")}
    assert {claim.study for claim in claims if claim.study} <= studies
    assert all(re.fullmatch(r"[a-z0-9-]+", claim.id) for claim in claims)
    assert all(claim.text.endswith(".") and claim.text.count(". ") == 0 for claim in claims)


def test_every_test_that_the_shipped_board_names_exists():
    missing = [n for c in load_claims(CLAIMS) for n in c.tests if not names_a_test(n)]
    assert missing == []


def test_image_claims_ask_for_settings_that_exist():
    known = {*settings_of(SimClrConfig()), "arm"}
    for claim in load_claims(CLAIMS):
        if claim.study in ("cells_simclr", "cells_moco", "small_batch", "norm_interventions"):
            factors = [factor.column for factor in (claim.effect, claim.interaction) if factor]
            assert {*factors, *(claim.where or {})} <= known


@pytest.mark.parametrize(
    ("study", "table", "row", "against", "half"),
    [
        ("retrieval-one-sided", "12", {"dataset": "SciFact"}, ["qnorm", "dnorm"], 0.066),
        ("symmetry-text", "12", {"dataset": "SciFact"}, ["dot"], 0.066),
        ("retrieval-scratch", "02", {"dataset": "BEIR(14)"}, ["dot"], 0.300),
    ],
)
def test_margins_are_half_the_published_effect(study, table, row, against, half):
    from offsphere.analysis.published import published

    data = published(f"unit_hypersphere_table{table}")
    data = data[(data["metric"] == "ndcg@10") & (data["dataset"] == row["dataset"])]
    value = data.set_index("cell")["value"]
    effect = np.mean([math.log(value[cell] / value["cosine"]) for cell in against])
    assert abs(effect) / 2 == pytest.approx(half, abs=0.001)
    (found,) = [claim.margin for claim in load_claims(CLAIMS) if claim.id == study]
    assert found == pytest.approx(half)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (PRIMARY | {"metrik": "x"}, r"claim dot: Unknown key 'metrik'.*Did you mean 'metric'"),
        ({k: v for k, v in PRIMARY.items() if k != "margin"}, "needs a 'margin' above 0"),
        (PRIMARY | {"margin": -1}, "needs a 'margin' above 0"),
        (PRIMARY | {"margin": "half"}, "'margin' must be a number"),
        ({k: v for k, v in PRIMARY.items() if k != "margin_from"}, "needs 'margin_from'"),
        ({k: v for k, v in PRIMARY.items() if k != "expect"}, "needs 'expect'"),
        ({k: v for k, v in PRIMARY.items() if k != "published"}, r"'published' is missing \(may"),
        (PRIMARY | {"expect": "grater"}, "Did you mean 'greater'"),
        (PRIMARY | {"kind": "primry"}, "Did you mean 'primary'"),
        (PRIMARY | {"protocol": "guess"}, "Unknown protocol 'guess'"),
        (PRIMARY | {"effect": {"cell": "dot"}}, "compares two sides with ' - '"),
        (PRIMARY | {"effect": "dot - cosine"}, "must name one column"),
        (PRIMARY | {"where": "cell"}, "'where' must hold columns"),
        (PRIMARY | {"transform": "sqrt"}, "Unknown transform"),
        (PRIMARY | {"text": ""}, "'text' must be a string"),
        (DESCRIPTIVE | {"expect": "greater"}, "a descriptive claim gets no verdict"),
        (DESCRIPTIVE | {"tests": [PROVEN]}, "'tests' belong to exact claims"),
        (DESCRIPTIVE | {"effect": None, "interaction": {"a": "b - c"}}, "needs an 'effect'"),
        ({k: v for k, v in EXACT.items() if k != "tests"}, "needs 'tests'"),
        (EXACT | {"study": "cells"}, "no study, metric"),
        ("dot", "expected keys and values"),
    ],
)
def test_a_faulty_claim_is_named(tmp_path, capsys, entry, message):
    path = write_claims(tmp_path / "claims.yaml", entry)
    with pytest.raises(ValueError, match=message):
        load_claims(path)
    with pytest.raises(SystemExit) as end:
        main([f"--claims={path}", f"--results={tmp_path}"])
    assert end.value.code == 1
    assert re.search(message, capsys.readouterr().err)


def test_faults_of_the_whole_file(tmp_path):
    path = tmp_path / "claims.yaml"
    with pytest.raises(ValueError, match="'dot' is used twice"):
        load_claims(write_claims(path, PRIMARY, PRIMARY))
    many = [PRIMARY | {"id": f"claim-{k}"} for k in range(13)]
    with pytest.raises(ValueError, match="13 primary claims, at most 12"):
        load_claims(write_claims(path, *many))
    for text in ("a: [", "", "claims: 3"):
        path.write_text(text)
        with pytest.raises(ValueError, match=re.escape(str(path))):
            load_claims(path)
    with pytest.raises(ValueError, match="cannot be read"):
        load_claims(tmp_path / "nothing.yaml")


def test_measures_the_paired_difference(tmp_path):
    table = cells(5, 0.03)
    expected = paired_difference(by_cell(table, "dot"), by_cell(table, "cosine"))
    shuffled = table.sample(frac=1, random_state=0)
    found = measure(claim(tmp_path), shuffled)
    assert (found.value, found.low, found.high) == pytest.approx(
        (expected.value, expected.low, expected.high), rel=1e-12
    )


def test_failed_and_missing_runs_are_counted(tmp_path):
    table = cells(6, 0.03)
    table.loc[table["run"].str.startswith("dot-seed2"), "test/probe"] = math.nan
    table = table[~table["run"].str.startswith("cosine-seed4")]
    found = measure(claim(tmp_path), table)
    assert (found.n, found.dropped) == (4, 2)


def test_interactions_filters_averages_and_logarithms(tmp_path):
    query, halves = cells(4, 0.05, 1, task="query"), cells(4, 0.0, 2, task="halves")
    both = pd.concat([query, halves], ignore_index=True)
    sides = [by_cell(t, c) for t in (query, halves) for c in ("dot", "cosine")]
    expected = contrast(list(sides), [1.0, -1.0, -1.0, 1.0])
    found = measure(claim(tmp_path, interaction={"task": "query - halves"}), both)
    assert (found.value, found.p) == pytest.approx((expected.value, expected.p))
    plain = paired_difference(sides[2], sides[3])
    for wanted in ("halves", "not query", ["halves", "other"]):
        assert measure(claim(tmp_path, where={"task": wanted}), both).value == pytest.approx(
            plain.value
        )
    ratio = measure(claim(tmp_path, where={"task": "query"}, transform="log"), both)
    assert ratio.value == pytest.approx(np.log(sides[0] / sides[1]).mean())
    third = query.assign(cell="qnorm", run=query["run"] + "q", **{"test/probe": 0.5})
    three = pd.concat([query, third.drop_duplicates("seed")], ignore_index=True)
    mean = measure(claim(tmp_path, effect={"cell": "dot & qnorm - cosine"}), three)
    assert mean.value == pytest.approx(((sides[0] + 0.5) / 2 - sides[1]).mean())


def test_numbers_and_truth_values_in_contrasts(tmp_path):
    off, on = cells(3, 0.0, 1, weight=0.0, deep=False), cells(3, 0.0, 2, weight=30.0, deep=True)
    both = pd.concat([off, on], ignore_index=True)
    expected = (by_cell(on, "dot") - by_cell(off, "dot")).mean()
    for effect in ({"weight": "30 - 0"}, {"deep": "true - false"}):
        found = measure(claim(tmp_path, effect=effect, where={"cell": "dot"}), both)
        assert found.value == pytest.approx(expected)
    assert measure(claim(tmp_path, where={"deep": True}), both).n == 3
    gaps = both.astype({"weight": "Float64", "deep": "boolean"})
    gaps.loc[0, ["weight", "deep"]] = pd.NA
    assert measure(claim(tmp_path, where={"deep": False}), gaps).dropped == 1


def test_runs_at_the_floor_are_counted_where_the_claim_rests_on_them(tmp_path):
    table = cells(4, 0.2)
    table["test/floor"] = ((table["cell"] == "dot") & (table["seed"] < 3)).astype(float)
    other = cells(4, 0.2).assign(cell="qnorm")
    other["run"] += "-other"
    other["test/floor"] = 1.0
    path = write_claims(tmp_path / "claims.yaml", PRIMARY, DESCRIPTIVE | {"metric": "train/loss"})
    table["train/loss"] = other["train/loss"] = 1.0
    root = results(tmp_path, cells=pd.concat([table, other]))
    first, second = evaluate_claims(load_claims(path), root)
    assert (first.verdict, first.at_floor) == ("shown beyond the margin", (3, 8))
    assert second.at_floor == (0, 0)
    assert "4 seeds, 3 of 8 runs at the floor" in board([first, second], width=200)
    assert "4 seeds, 3 of 8 runs at the floor" in str(page._claim(first, {}))


def test_two_metrics_of_one_run_and_a_value_to_compare_with(tmp_path):
    table = cells(4, 0.02)
    table["untrained/probe"] = 0.4
    alone = {"effect": None, "where": {"cell": "dot"}}
    gain = measure(claim(tmp_path, metric="test/probe - untrained/probe", **alone), table)
    assert gain.value == pytest.approx(by_cell(table, "dot").mean() - 0.4)
    above = measure(claim(tmp_path, against=0.5, **alone), table)
    assert above.value == pytest.approx(by_cell(table, "dot").mean() - 0.5)


def test_tuning_runs_never_count(tmp_path):
    tested, tuned = cells(4, 0.02, eval_split="test"), cells(4, 0.5, eval_split="validation")
    found = measure(claim(tmp_path), pd.concat([tested, tuned], ignore_index=True))
    assert found.value == pytest.approx(0.02, abs=0.02)


def test_a_run_that_is_in_two_arms_is_one_run(tmp_path):
    table = cells(4, 0.02, arm="a")
    twice = pd.concat([table, table.assign(arm="b")], ignore_index=True)
    assert measure(claim(tmp_path), twice) == measure(claim(tmp_path), table)


@pytest.mark.parametrize(
    ("change", "word", "sentence"),
    [
        (
            {"metric": "test/knn", "where": {"lr": 0.1}},
            *("unmatched", "the study's table has no column 'test/knn'"),
        ),
        ({"where": {"arm": "a"}}, "unmatched", "the study's table has no column 'arm'"),
        ({"effect": {"cell": "dnorm - cosine"}}, "unmatched", "no run with cell=dnorm"),
        ({"where": {"lr": 3}}, "unmatched", "no run with lr=3"),
        ({"where": {"lr": "high"}}, "unmatched", "the column 'lr' holds numbers, not 'high'"),
        ({"where": {"cell": "dot"}}, "unmatched", "no run with cell=cosine"),
        ({}, "unmatched", "2 runs with seed=0 differ in lr: the claim's 'where' must choose"),
        ({"where": {"lr": 1.0}}, "incomplete", "1 of 1 seeds complete, an interval needs 2"),
        ({"where": {"lr": 0.1}}, "measured", ""),
    ],
)
def test_a_claim_that_does_not_fit_its_study_says_why(tmp_path, change, word, sentence):
    table = pd.concat([cells(3, 0.02, lr=0.1), cells(1, 0.02, lr=1.0)], ignore_index=True)
    (line,) = evaluate_claims([claim(tmp_path, **change)], results(tmp_path, cells=table))
    assert (line.verdict, line.sentence) == (word, sentence)


def test_no_logarithm_of_zero(tmp_path):
    table = cells(3, 0.02)
    table.loc[0, "test/probe"] = 0.0
    (line,) = evaluate_claims([claim(tmp_path, transform="log")], results(tmp_path, cells=table))
    assert line.sentence == "test/probe is 0 or less in a run, so it has no logarithm"


@pytest.mark.parametrize("n", [5, 10])
def test_planted_effects_and_nulls_on_the_board(tmp_path, n):
    claims = load_claims(
        write_claims(
            tmp_path / "claims.yaml",
            PRIMARY | {"id": "effect", "study": "effect"},
            PRIMARY | {"id": "reverse", "study": "effect", "expect": "less"},
            PRIMARY | {"id": "null", "study": "null"},
            PRIMARY | {"id": "same", "study": "null", "expect": "equivalent"},
            PRIMARY | {"id": "absent", "study": "absent"},
            DESCRIPTIVE | {"study": "effect"},
        )
    )
    root = results(tmp_path, effect=cells(n, 0.2, 1), null=cells(n, 0.0, 2))
    lines = {line.claim.id: line for line in evaluate_claims(claims, root)}
    assert {name: line.verdict for name, line in lines.items()} == {
        "effect": "shown beyond the margin",
        "reverse": "the opposite shown",
        "null": "equivalent",
        "same": "equivalent",
        "absent": "not run",
        "figure": "measured",
    }
    assert lines["absent"].sentence == "offsphere study configs/studies/absent.yaml"
    # One family: a claim that is not measured yet counts with p = 1.
    raw = [
        1.0 if line.measured is None else claim_p(line.measured, line.claim.expect, 0.05)
        for line in lines.values()
        if line.claim.expect
    ]
    assert raw[4] == 1.0
    adjusted = holm(raw)
    assert lines["effect"].p_adjusted == pytest.approx(adjusted[0])
    assert lines["same"].p_adjusted == pytest.approx(adjusted[3])


def test_each_heading_is_a_family_of_its_own(tmp_path):
    others = [PRIMARY | {"id": f"other-{k}", "study": "absent"} for k in range(9)]
    entries = [{"heading": "new"}, PRIMARY, {"heading": "old"}, *others]
    path = write_claims(tmp_path / "c.yaml", *entries)
    claims = load_claims(path)
    assert [claim.heading for claim in claims] == ["new"] + ["old"] * 9
    lines = evaluate_claims(claims, results(tmp_path, cells=cells(5, 0.03)))
    assert lines[0].measured is not None
    assert lines[0].p_adjusted == pytest.approx(lines[0].measured.p)
    shown = board(lines)
    assert "# primary, new: fixed in advance, one Holm family of 1, alpha 5%" in shown
    assert "# primary, old: fixed in advance, one Holm family of 9, alpha 5%" in shown
    many = [PRIMARY | {"id": f"more-{k}"} for k in range(12)]
    load_claims(write_claims(path, *many, {"heading": "old"}, PRIMARY))
    with pytest.raises(ValueError, match="13 primary claims under 'old', at most 12"):
        load_claims(write_claims(path, {"heading": "old"}, PRIMARY, *many))


def test_no_figure_before_the_planned_pairs_have_ended(tmp_path):
    table = cells(5, 0.2)
    last = table["run"].str.startswith("dot-seed4")
    table.loc[last, "test/probe"] = math.nan
    table.loc[last, "status"] = "running"
    claims = load_claims(write_claims(tmp_path / "c.yaml", PRIMARY | {"planned": 5}))
    (line,) = evaluate_claims(claims, results(tmp_path, cells=table))
    assert (line.verdict, line.sentence, line.measured) == ("running", "4 of 5", None)
    assert "running: 4 of 5" in board([line])
    # A run that failed has ended: its pair is dropped, and the claim is judged by the others.
    table.loc[last, "status"] = "failed"
    (line,) = evaluate_claims(claims, results(tmp_path, cells=table))
    assert line.verdict == "shown beyond the margin"
    assert line.measured is not None
    assert (line.measured.n, line.measured.dropped) == (4, 1)


def test_a_run_that_failed_leaves_no_steps_and_the_others_keep_theirs(tmp_path):
    table = cells(4, 0.2)
    table["run/steps"] = pd.array([3125] * (len(table) - 1) + [pd.NA], dtype="Int64")
    table.loc[len(table) - 1, ["status", "test/probe"]] = ["failed", math.nan]
    (line,) = evaluate_claims([claim(tmp_path)], results(tmp_path, cells=table))
    assert line.measured is not None
    assert (line.measured.n, line.measured.dropped, line.steps) == (3, 1, (3125, 3125))


def test_the_untrained_network_is_the_baseline_without_information(tmp_path):
    table = cells(4, 0.02)
    table["untrained/probe"] = 0.4 + 0.01 * table["seed"]
    alone = {"effect": None, "where": {"cell": "dot"}}
    found = measure(claim(tmp_path, against="untrained", **alone), table)
    assert found.value == pytest.approx(by_cell(table, "dot").mean() - 0.415)
    with pytest.raises(ValueError, match="'against: untrained' needs one test metric"):
        claim(tmp_path, against="untrained", metric="train/loss", **alone)


def test_the_contrast_of_trained_minus_untrained_stands_beside_it(tmp_path):
    table = cells(4, 0.03)
    table["untrained/probe"] = 0.3 + 0.02 * (table["cell"] == "dot")
    table["run/steps"] = [3125, 78] * 4
    (line,) = evaluate_claims([claim(tmp_path)], results(tmp_path, cells=table))
    assert line.by_training is not None
    assert line.measured is not None
    assert line.by_training.value == pytest.approx(line.measured.value - 0.02)
    said = f"trained minus untrained {line.by_training.value:+.4g} ["
    assert f"4 seeds, 78 to 3,125 steps, {said}" in board([line], width=200)
    on_the_page = str(page._claim(line, {}))
    assert said in on_the_page
    assert "78 to 3,125 steps" in on_the_page
    alike = table.assign(**{"untrained/probe": 0.3})
    (line,) = evaluate_claims([claim(tmp_path)], results(tmp_path, cells=alike))
    assert line.by_training is None


def test_a_folder_that_is_not_there_is_no_empty_board(tmp_path, capsys):
    with pytest.raises(SystemExit, match="1"):
        main([f"--claims={write_claims(tmp_path / 'c.yaml', PRIMARY)}", "--results=nowhere"])
    assert "claims: error: nowhere is no folder" in capsys.readouterr().err


def test_holm_takes_back_what_one_claim_alone_would_show(tmp_path):
    values = np.array([0.10, 0.30, 0.25, 0.12])
    assert 0.005 < paired_difference(values, np.zeros(4)).p < 0.05
    table = cells(4, 0.0)
    table["test/probe"] = 0.0
    table.loc[table["cell"] == "dot", "test/probe"] = values
    root = results(tmp_path, cells=table)
    alone = load_claims(write_claims(tmp_path / "1.yaml", PRIMARY))
    assert evaluate_claims(alone, root)[0].verdict == "shown"
    others = [PRIMARY | {"id": f"other-{k}", "study": "absent"} for k in range(9)]
    family = load_claims(write_claims(tmp_path / "2.yaml", PRIMARY, *others))
    assert evaluate_claims(family, root)[0].verdict == "not settled"


def test_the_board_has_a_block_per_claim_and_ends_with_a_count(tmp_path):
    path = write_claims(
        tmp_path / "claims.yaml",
        DESCRIPTIVE | {"published": "a long figure " * 30},
        PRIMARY,
        EXACT,
    )
    root = results(tmp_path, cells=cells(5, 0.03))
    command = [sys.executable, "-m", "offsphere.analysis.claims", f"--claims={path}"]
    command.append(f"--results={root}")
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path)
    lines = done.stdout.splitlines()
    blocks = [line for line in lines if not line.startswith("    ")]
    assert [line.split()[0] for line in blocks] == [
        "#",
        "sure:",
        "#",
        "dot:",
        "#",
        "figure:",
        "primary",
    ]
    assert blocks[1] == "  sure: not run: offsphere claims --run-tests"
    assert blocks[3] == "  dot: shown, inside the margin"
    claimed, measured = lines[4:6]
    assert claimed.strip() == PRIMARY["text"]
    assert re.fullmatch(r"    measured: \+0\.0\d+ \[\+0\.0\d+, \+0\.0\d+\]; 5 seeds", measured)
    assert re.fullmatch(r"  figure: \+0\.0\d+ \[\+0\.0\d+, \+0\.0\d+\]; 5 seeds", blocks[5])
    published = " ".join(line.strip() for line in lines[8:-1])
    assert published == "published: " + " ".join(["a long figure"] * 30)
    assert lines[-1] == "primary claims: 1 shown, inside the margin."


def test_the_board_is_wrapped_not_cut(tmp_path):
    text = "word " * 60
    claims = load_claims(write_claims(tmp_path / "c.yaml", PRIMARY | {"published": text.strip()}))
    shown = board(evaluate_claims(claims, tmp_path), width=80)
    assert max(map(len, shown.splitlines())) <= 80
    assert shown.count("word") == 60


def test_json(tmp_path, capsys):
    path = write_claims(tmp_path / "claims.yaml", PRIMARY, DESCRIPTIVE | {"study": "same"})
    table = cells(3, 0.0)
    table["test/probe"] = 0.5
    root = results(tmp_path, cells=cells(5, 0.2), same=table)
    main([f"--claims={path}", f"--results={root}", "--json"])
    first, second = json.loads(capsys.readouterr().out)
    assert (first["claim"]["id"], first["verdict"], first["measured"]["n"]) == (
        "dot",
        "shown beyond the margin",
        5,
    )
    assert second["measured"]["low"] is None


def test_run_tests_records_what_was_verified(tmp_path, capsys, monkeypatch):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_sums.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('x', [1, 2])\n"
        "def test_good(x):\n    assert x + x == 2 * x\n"
        "def test_bad():\n    assert 1 + 1 == 3\n"
        "def test_skipped():\n    pytest.skip('not here')\n"
        "class TestMore:\n    def test_in_class(self):\n        assert True\n"
    )
    monkeypatch.setattr(module, "ROOT", tmp_path)
    nodes = {
        "whole-test": ["tests/test_sums.py::test_good"],
        "one-case": ["tests/test_sums.py::test_good[1]"],
        "in-class": ["tests/test_sums.py::TestMore::test_in_class"],
        "wrong": ["tests/test_sums.py::test_bad", "tests/test_sums.py::test_good"],
        "skipped": ["tests/test_sums.py::test_skipped"],
        "absent": ["tests/test_sums.py::test_goo"],
        "no-file": ["tests/test_nothing.py"],
    }
    entries = [EXACT | {"id": name, "tests": tests} for name, tests in nodes.items()]
    path = write_claims(tmp_path / "claims.yaml", *entries)
    flags = [f"--claims={path}", f"--results={tmp_path / 'results'}"]
    main([*flags, "--run-tests", "--foreign-tests"])
    capsys.readouterr()
    record = json.loads((tmp_path / "results" / "exact.json").read_text())
    assert {name: (found["verdict"], found["passed"]) for name, found in record.items()} == {
        "whole-test": ("verified", 2),
        "one-case": ("verified", 1),
        "in-class": ("verified", 1),
        "wrong": ("failed", 2),
        "skipped": ("not run", 0),
        "absent": ("not run", 0),
        "no-file": ("not run", 0),
    }
    main(flags)
    shown = capsys.readouterr().out
    assert re.search(r"  whole-test: verified: 2 passed, \d{4}-", shown)
    assert "failed: tests/test_sums.py::test_bad failed, " in shown
    assert "not run: tests/test_nothing.py did not run, " in shown
    entries[0]["tests"] = nodes["in-class"]
    changed = load_claims(write_claims(path, *entries))
    assert evaluate_claims(changed, tmp_path / "results")[0].verdict == "not run"


def test_names_a_test():
    here = "tests/offsphere/analysis/test_claims.py"
    assert names_a_test(f"{here}::test_json")
    assert names_a_test(here)
    assert not names_a_test(f"{here}::test_jso")
    assert not names_a_test("tests/test_nowhere.py::test_json")


def test_a_closed_pipe_is_no_error(tmp_path):
    command = f"{sys.executable} -m offsphere.analysis.claims --results={tmp_path} | true"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (141, "")


def test_somebody_elses_tests_are_not_run_unasked(tmp_path, capsys):
    mark = tmp_path / "executed"
    evil = tmp_path / "evil.py"
    evil.write_text(f"import pathlib\npathlib.Path({str(mark)!r}).touch()\ndef test_x(): pass\n")
    path = write_claims(tmp_path / "claims.yaml", EXACT | {"tests": [f"{evil}::test_x"]})
    with pytest.raises(SystemExit) as end:
        main([f"--claims={path}", f"--results={tmp_path / 'results'}", "--run-tests"])
    said = capsys.readouterr().err
    assert end.value.code == 1
    assert said.count("\n") == 1
    for words in ("not this repository's own file of claims", f"{evil}::test_x", "--foreign-tests"):
        assert words in said
    assert not mark.exists()
    assert not (tmp_path / "results").exists()


def test_without_the_tests_nothing_is_recorded(tmp_path, capsys, monkeypatch):
    path = write_claims(tmp_path / "claims.yaml", EXACT)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(claims_module, "OWN", path)
    with pytest.raises(SystemExit) as end:
        main([f"--claims={path}", f"--results={tmp_path / 'results'}", "--run-tests"])
    assert end.value.code == 1
    assert "part of the repository, not of the installed package" in capsys.readouterr().err
    assert not (tmp_path / "results").exists()
