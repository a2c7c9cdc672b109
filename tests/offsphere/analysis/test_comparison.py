"""Comparisons of anybody's runs: beside scipy and statsmodels, and beside the claims board."""

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats as scipy_stats
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.power import TTestPower
from statsmodels.stats.weightstats import ttost_paired

from offsphere.analysis import comparison
from offsphere.analysis.claim_file import Claim, load_claims
from offsphere.analysis.claims import OWN, Verdict, evaluate_claims
from offsphere.analysis.comparison import Settings, compare
from offsphere.analysis.tables import StudyTables

RESULTS = Path(__file__).parents[3] / "results"


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    rng = np.random.default_rng(3)
    rows = []
    for dataset in ("cifar", "flowers"):
        for seed in range(7):
            start = 80 + rng.normal()
            for method, gain in (("adam", 0.0), ("muon", 1.0), ("sgd", 0.1), ("none", -0.3)):
                acc = start + gain + 0.3 * rng.normal()
                rows.append({"method": method, "dataset": dataset, "seed": seed, "acc": acc})
    return pd.DataFrame(rows).sample(frac=1, random_state=0)


def written(table: pd.DataFrame, folder: Path, name: str = "runs.csv") -> str:
    path = folder / name
    table.to_csv(path, index=False)
    return str(path)


def values(table: pd.DataFrame, **where: object) -> np.ndarray:
    for name, value in where.items():
        table = table.loc[table[name] == value]
    return table.sort_values("seed")["acc"].to_numpy()


def test_a_hand_made_table_is_scipys_and_statsmodels(table, tmp_path):
    rows = table.loc[table["dataset"] == "cifar"]
    found = compare(Settings(written(rows, tmp_path), "method", "acc", baseline="adam", margin=0.5))
    base = values(rows, method="adam")
    assert sorted(line.arm for line in found.lines) == ["muon", "none", "sgd"]
    raw = []
    for line in found.lines:
        own = values(rows, method=line.arm)
        expected = scipy_stats.ttest_rel(own, base)
        bounds = expected.confidence_interval(0.95)
        assert line.mean == pytest.approx(own.mean(), rel=1e-12)
        assert line.baseline_mean == pytest.approx(base.mean(), rel=1e-12)
        assert line.difference.value == pytest.approx((own - base).mean(), rel=1e-10)
        assert (line.difference.low, line.difference.high) == pytest.approx(tuple(bounds), rel=1e-9)
        assert line.difference.p == pytest.approx(expected.pvalue, rel=1e-9)
        tost = ttost_paired(own, base, -0.5, 0.5)[0]
        assert line.equivalence_p == pytest.approx(tost, rel=1e-9)
        raw.append(expected.pvalue)
    adjusted = multipletests(raw, method="holm")[1]
    assert [line.p_adjusted for line in found.lines] == pytest.approx(list(adjusted), rel=1e-9)


def test_all_blocks_is_the_mean_over_blocks_seed_by_seed(table, tmp_path):
    found = compare(
        Settings(written(table, tmp_path), "method", "acc", baseline="adam", block="dataset")
    )
    lines = {(line.arm, line.block): line for line in found.lines}
    assert len(lines) == 9
    for arm in ("muon", "sgd", "none"):
        apart = [
            values(table, method=arm, dataset=name) - values(table, method="adam", dataset=name)
            for name in ("cifar", "flowers")
        ]
        expected = scipy_stats.ttest_1samp(np.mean(apart, axis=0), 0.0)
        size = lines[arm, "all"].difference
        bounds = expected.confidence_interval(0.95)
        assert (size.value, size.low, size.high) == pytest.approx(
            (np.mean(apart), bounds.low, bounds.high), rel=1e-9
        )
        assert size.p == pytest.approx(expected.pvalue, rel=1e-9)
        for name, differences in zip(("cifar", "flowers"), apart, strict=True):
            assert lines[arm, name].difference.value == pytest.approx(differences.mean(), rel=1e-9)


def test_the_words_follow_the_interval_and_the_margin(tmp_path):
    rng = np.random.default_rng(0)
    noise = rng.normal(size=10)
    noise = (noise - noise.mean()) / noise.std(ddof=1)
    sizes = {"far": (2.0, 0.1), "near": (0.05, 0.1), "loose": (0.3, 0.6)}
    rows = [{"seed": i, "arm": "base", "acc": 0.0} for i in range(10)]
    for arm, (mean, sd) in sizes.items():
        rows += [{"seed": i, "arm": arm, "acc": mean + sd * noise[i]} for i in range(10)]
    path = written(pd.DataFrame(rows), tmp_path)
    found = compare(Settings(path, "arm", "acc", margin=0.5))
    words = {line.arm: line.decision.word for line in found.lines}
    assert words == {
        "far": "shown beyond the margin",
        "near": "equivalent",
        "loose": "not settled",
    }
    (loose,) = compare(Settings(path, "arm", "acc", where=("arm=base", "arm=loose"))).lines
    needed = TTestPower().solve_power(effect_size=0.3 / 0.6, alpha=0.05, power=0.8)
    assert loose.decision.seeds_needed == int(np.ceil(needed))
    assert loose.word == f"not settled (80 % power: n={loose.decision.seeds_needed})"


def test_a_study_compared_is_the_claims_board(monkeypatch):
    tables: dict[Path, StudyTables] = {}

    def once(folder: Path) -> StudyTables:
        return tables.setdefault(folder, StudyTables(folder))

    monkeypatch.setattr(comparison, "StudyTables", once)
    claims = load_claims(OWN)
    for study in {claim.study for claim in claims if claim.study is not None}:
        once(RESULTS / study)
    board = [x for x in evaluate_claims(claims, RESULTS, tables.values()) if one_to_one(x)]
    for line in board:
        (own,) = compare(as_flags(line.claim)).lines
        for name, expected in asdict(line.measured).items():
            value = getattr(own.difference, name)
            if isinstance(expected, float):
                expected = pytest.approx(expected, rel=1e-9, abs=1e-15, nan_ok=True)
            assert value == expected, f"{line.claim.id}: {name}"
    assert len(board) >= 30
    assert any(line.measured.examples for line in board)
    assert any(line.measured.dropped for line in board)


def one_to_one(line: Verdict) -> bool:
    """Whether a claim has a figure and compares one arm with one other."""
    effect = line.claim.effect
    plain = line.claim.interaction is None and line.claim.transform is None
    one = effect is not None and len(effect.plus) == len(effect.minus) == 1
    return line.measured is not None and plain and one


def as_flags(claim: Claim) -> Settings:
    """The claim's contrast, as `offsphere compare` is asked for it."""
    effect = claim.effect
    wanted = {**(claim.where or {}), effect.column: [*effect.plus, *effect.minus]}
    return Settings(
        str(RESULTS / claim.study),
        effect.column,
        claim.metric,
        pair=claim.by,
        baseline=effect.minus[0],
        where=tuple(
            f"{name}={value}"
            for name, values in wanted.items()
            for value in (values if isinstance(values, list) else [values])
        ),
        drop_unpaired=True,
    )
