"""Each gate catches a planted case and lets one pass; intervals over seeds and examples."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

from offsphere.analysis.claim_file import Claim, load_claims
from offsphere.analysis.claims import board, evaluate_claims
from offsphere.analysis.measuring import measure, outcome_of
from offsphere.analysis.stats import crossed, paired_difference
from offsphere.analysis.tables import write_examples, write_runs

CLAIM: dict[str, Any] = {
    "id": "gain",
    "kind": "primary",
    "text": "The term gains at batch 32.",
    "source": "here",
    "published": None,
    "protocol": "small-scale re-test",
    "study": "batch",
    "metric": "test/probe",
    "effect": {"weight": "30 - 0"},
    "where": {"batch": 32},
    "expect": "greater",
    "margin": 0.01,
    "margin_from": "ours",
    "planned": 6,
}
GATES: dict[str, dict[str, Any]] = {
    "floor": {},
    "manipulation": {"metric": "test/norm_cv", "at_least": 0.05},
    "assay": {
        "effect": {"batch": "32 - 256"},
        "where": {"weight": 0, "batch": [32, 256]},
        "expect": "less",
    },
}
SIZE = 400


def claim_of(folder: Path, **changes: object) -> Claim:
    path = folder / "claims.yaml"
    path.write_text(yaml.safe_dump([{**CLAIM, **changes}]))
    return load_claims(path)[0]


def study(
    folder: Path, *, floor: float = 0.2, deficit: float = 0.05, cv: float = 0.2, gain: float = 0.1
) -> Path:
    """Six seeds, two weights, two batch sizes; per-example outcomes with the metric's mean."""
    rng = np.random.default_rng(0)
    rows, parts = [], []
    easy = rng.normal(0, 0.2, SIZE)
    for seed in range(6):
        for batch in (32, 256):
            for weight in (0, 30):
                value = 0.7 + rng.normal(0, 0.01) - deficit * (batch == 32)
                value += gain * (batch == 32 and weight == 30)
                spread = easy + rng.normal(0, 0.05, SIZE)
                run = f"seed{seed}-{batch}-{weight}"
                rows.append({"run": run, "status": "finished", "script": "train_simclr"})
                rows[-1] |= {"seed": seed, "batch": batch, "weight": weight, "data_hash": "d"}
                rows[-1] |= {"test/probe": value, "untrained/probe": value - floor}
                rows[-1] |= {"test/norm_cv": cv * (1 + (weight == 0)), "run/steps": 3125}
                about = {"run": run, "outcome": "probe_correct", "example": range(SIZE)}
                parts.append(pd.DataFrame(about | {"value": value + spread - spread.mean()}))
    (folder / "batch").mkdir(parents=True, exist_ok=True)
    write_runs(pd.DataFrame(rows), folder / "batch" / "runs.csv")
    write_examples(pd.concat(parts), folder / "batch" / "examples.parquet")
    return folder


@pytest.mark.parametrize(
    ("gate", "planted", "said"),
    [
        (
            "floor",
            {"floor": 0.01},
            r"floor, test/probe minus untrained \+0.01, standard error 0.01",
        ),
        ("manipulation", {"cv": 0.04}, "manipulation, test/norm_cv 0.04, 0.05 needed, with weight"),
        ("assay", {"deficit": 0.0}, r"assay, batch 32 - 256 in test/probe .* is not below 0"),
    ],
)
def test_a_gate_catches_a_planted_case_and_lets_the_other_pass(tmp_path, gate, planted, said):
    claim = claim_of(tmp_path, gates={gate: GATES[gate]})
    (line,) = evaluate_claims([claim], study(tmp_path))
    assert line.verdict == "shown beyond the margin"
    (line,) = evaluate_claims([claim], study(tmp_path, **planted))
    assert (line.verdict, line.measured, line.p_adjusted) == ("not testable here", None, None)
    shown = board([line], width=300)
    assert re.search(rf"gain: not testable here: {said}", shown)
    # Nothing but the gate's figure.
    assert not re.search(r"[+-]0\.\d", shown.replace(line.sentence, ""))


def test_an_assay_that_runs_the_other_way_is_shut(tmp_path):
    """Batch 32 is the better one: there is no deficit to mend, however sure the difference."""
    claim = claim_of(tmp_path, gates={"assay": GATES["assay"]})
    (line,) = evaluate_claims([claim], study(tmp_path, deficit=-0.05))
    assert line.verdict == "not testable here"
    assert "test/probe +0.0" in line.sentence


def test_the_floor_counts_the_examples_too(tmp_path):
    """A rise that is sure over seeds is not sure over 400 examples as well."""
    folder = study(tmp_path, floor=0.02)
    claim = claim_of(tmp_path, gates={"floor": {}})
    assert evaluate_claims([claim], folder)[0].verdict == "not testable here"
    (folder / "batch" / "examples.parquet").unlink()
    assert evaluate_claims([claim], folder)[0].verdict == "shown beyond the margin"


def test_a_gate_may_ask_for_some_arms_only(tmp_path):
    folder = study(tmp_path, cv=0.03)
    asked = {**GATES["manipulation"], "where": {"weight": 0}}
    claim = claim_of(tmp_path, gates={"manipulation": asked})
    assert evaluate_claims([claim], folder)[0].verdict == "shown beyond the margin"


@pytest.mark.parametrize(
    ("gates", "message"),
    [
        ({"flor": {}}, "Did you mean 'floor'"),
        ({"floor": {"metrik": "x"}}, "Did you mean 'metric'"),
        ({"manipulation": {"metric": "x"}}, "needs 'metric' and 'at_least'"),
        ({"assay": {"effect": {"a": "b - c"}}}, "needs 'effect', and 'expect'"),
        ({"assay": {"effect": {"a": "b"}, "expect": "less"}}, "compares two sides"),
        (["floor"], "'gates' must hold"),
    ],
)
def test_a_faulty_gate_is_named(tmp_path, gates, message):
    with pytest.raises(ValueError, match=message):
        claim_of(tmp_path, gates=gates)


@pytest.mark.parametrize("planned", [1, 2.5, "ten", True])
def test_a_faulty_plan_is_named(tmp_path, planned):
    with pytest.raises(ValueError, match="'planned' is a number of pairs"):
        claim_of(tmp_path, planned=planned)


def arms(seeds: int = 5, size: int = 80) -> tuple[pd.DataFrame, dict, np.ndarray]:
    rng = np.random.default_rng(1)
    x = rng.random((2, seeds, size)) + 0.3
    rows = [
        {"run": f"{arm}{seed}", "seed": seed, "weight": weight, "task": "query"}
        | {"test/ndcg10": x[arm, seed].mean()}
        for arm, weight in ((0, 0), (1, 30))
        for seed in range(seeds)
    ]
    kept = {f"{arm}{seed}": {"ndcg10": x[arm, seed]} for arm in (0, 1) for seed in range(seeds)}
    return pd.DataFrame(rows), kept, x


def test_a_claims_interval_is_over_seeds_and_examples(tmp_path):
    table, kept, x = arms()
    claim = claim_of(tmp_path, metric="test/ndcg10", where={})
    found, expected = measure(claim, table, kept), crossed([x[1] - x[0]])
    assert (found.low, found.high, found.p, found.examples) == pytest.approx(
        (expected.low, expected.high, expected.p, 80)
    )
    plain = paired_difference(x[1].mean(axis=1), x[0].mean(axis=1))
    assert measure(claim, table).high == pytest.approx(plain.high)
    # Without the outcomes of one run, or with those of another metric, it is over seeds.
    part = {run: found for run, found in kept.items() if run != "00"}
    other = {run: {"ndcg10": found["ndcg10"] + 0.1} for run, found in kept.items()}
    for examples in (part, other):
        assert measure(claim, table, examples).high == pytest.approx(plain.high)


def test_the_logarithm_of_a_mean_over_examples(tmp_path):
    """With examples that matter more than anything else its error is that of resampled ones."""
    rng = np.random.default_rng(1)
    hard = rng.gamma(1.0, 0.3, (2, 1, 300))
    x = hard + rng.normal(0, 0.01, (2, 8, 300)) + 0.2
    table, kept, _ = arms(seeds=8, size=300)
    for run, row in zip(table["run"], x.reshape(16, 300), strict=True):
        kept[run] = {"ndcg10": row}
    table["test/ndcg10"] = x.mean(axis=2).ravel()
    claim = claim_of(tmp_path, metric="test/ndcg10", where={}, transform="log")
    found = measure(claim, table, kept)
    assert found.value == pytest.approx(np.log(x[1].mean(1) / x[0].mean(1)).mean())
    drawn = [
        np.log(x[1][:, e].mean(1) / x[0][:, e].mean(1)).mean()
        for e in rng.integers(0, 300, (4000, 300))
    ]
    assert found.standard_error == pytest.approx(np.std(drawn), rel=0.05)
    assert found.example_error == pytest.approx(found.standard_error, rel=0.01)


def test_two_tasks_have_examples_of_their_own(tmp_path):
    table, kept, x = arms()
    both = pd.concat([table, table.assign(task="halves", run=table["run"] + "h")])
    kept |= {f"{run}h": found for run, found in list(kept.items())}
    changes = {"metric": "test/ndcg10", "where": {}, "interaction": {"task": "query - halves"}}
    found = measure(claim_of(tmp_path, **changes), both, kept)
    per_example = (x[1] - x[0]).mean(axis=0)
    assert found.value == pytest.approx(0.0, abs=1e-12)
    # The seeds cancel, the two sets of queries do not.
    assert found.standard_error == pytest.approx(math.sqrt(2 * per_example.var(ddof=1) / 80))


def test_captions_of_one_picture_are_one_example():
    kept = {"i2t_hit1": np.array([1.0, 0.0]), "t2i_hit1": np.array([1.0, 0, 0, 1.0, 1.0, 1.0])}
    found = outcome_of(kept, "test/mean_r1")
    assert found is not None
    assert found.tolist() == pytest.approx([(1 + 1 / 3) / 2, (0 + 1) / 2])
    alone = outcome_of(kept, "test/t2i_r1")
    assert alone is not None
    assert alone.tolist() == pytest.approx([1 / 3, 1.0])
    assert outcome_of(kept, "test/ndcg10") is None
