"""Every arm of a table of runs against its baseline, by the code of the claims. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offsphere.analysis.claim_file import Claim, Contrast
from offsphere.analysis.conditions import text_of
from offsphere.analysis.foreign_runs import (
    check_finished,
    find_column,
    read_runs,
    rows_named,
    spelt,
    to_number,
)
from offsphere.analysis.measuring import TEST_SET, Unmatched, matching, measure
from offsphere.analysis.stats import OverSeeds, check_margin, equivalence_p, holm
from offsphere.analysis.tables import Examples, StudyTables
from offsphere.analysis.verdicts import Decision, Expectation, claim_p, verdict
from offsphere.names import unknown
from offsphere.run.files import check_folder

if TYPE_CHECKING:
    import pandas as pd

ALPHA = 0.05
ALL = "all"
"""The line of all blocks together."""


@dataclass(frozen=True)
class Settings:
    table: str
    """TABLE, one row per run, or a study's folder. The flag may be left out."""
    arm: str
    """The column whose values are compared: method, optimizer, cell."""
    metric: str
    """The column with the number of each run."""
    pair: tuple[str, ...] = ("seed",)
    """The columns that runs of different arms share: the seed, or the fold."""
    baseline: str | None = None
    """The arm that the others are compared with; default: the first of the table."""
    block: str | None = None
    """A column such as the data set: arms are compared inside each block, and over all of them."""
    margin: float | None = None
    """The difference that matters, in the metric's unit; without it nothing can be equivalent."""
    where: tuple[str, ...] = ()
    """Which rows count: column=value; several values of a column are alternatives."""
    drop_unpaired: bool = False
    """Leave out pairs that lack an arm, and count them, instead of refusing the table."""
    out: str | None = None
    """A folder for comparison.html, comparison.csv and forest.svg, .png, .pdf."""
    json: bool = False
    """Print JSON instead of a table."""

    def __post_init__(self) -> None:
        if self.margin is not None:
            check_margin(self.margin)
        if self.out is not None:
            check_folder(self.out)


@dataclass(frozen=True)
class Line:
    """One arm against the baseline, in one block or in all."""

    arm: str
    block: str
    mean: float
    baseline_mean: float
    difference: OverSeeds
    p_adjusted: float
    """Two-sided, after Holm over all lines."""
    equivalence_p: float | None
    """TOST's, of this line alone; None without a margin."""
    decision: Decision

    @property
    def word(self) -> str:
        """The verdict as the claims board writes it."""
        if self.decision.word != "not settled":
            return self.decision.word
        seeds = self.decision.seeds_needed
        return f"not settled (80 % power: n={'over 1000' if seeds is None else seeds})"


@dataclass(frozen=True)
class Compared:
    """All lines of a table, and what they compare."""

    source: str
    arm: str
    baseline: str
    metric: str
    pair: tuple[str, ...]
    block: str | None
    margin: float | None
    lines: tuple[Line, ...]


def compare(settings: Settings) -> Compared:
    """Read the table and compare every arm with the baseline."""
    runs, examples = _read(settings)
    arms = list(dict.fromkeys(runs["arm"]))
    baseline = arms[0] if settings.baseline is None else spelt(settings.baseline)
    if baseline not in arms:
        raise unknown(f"baseline in {settings.arm!r}", baseline, arms)
    if len(arms) < 2:
        raise ValueError(f"{settings.table}: {settings.arm!r} is {arms[0]} in every row: no arms.")
    blocks = list(dict.fromkeys(runs["block"]))
    _check_pairs(runs, settings)
    metric = str(runs.columns[-1])
    places = [*([ALL] if len(blocks) > 1 else []), *blocks]
    claims = [
        _claim(metric, arm, baseline, blocks if block == ALL and len(blocks) > 1 else [block])
        for arm in arms
        if arm != baseline
        for block in places
    ]
    try:
        measured = [measure(claim, runs, examples) for claim in claims]
    except Unmatched as reason:
        raise ValueError(f"{settings.table}: {reason}.") from None
    found = _decided(measured, settings.margin)
    return Compared(
        source=Path(settings.table).name,
        arm=settings.arm,
        baseline=baseline,
        metric=settings.metric,
        pair=settings.pair,
        block=settings.block,
        margin=settings.margin,
        lines=tuple(
            Line(arm, block, *_means(runs, metric, claim), difference, p, tost, decision)
            for (arm, block), claim, difference, (p, tost, decision) in zip(
                ((a, b) for a in arms if a != baseline for b in places),
                claims,
                measured,
                found,
                strict=True,
            )
        ),
    )


def _read(settings: Settings) -> tuple[pd.DataFrame, Examples]:
    """The rows that count, in columns of their own names: run, pair, arm, block, and the metric.

    A study keeps the outcomes of its test examples, over which the interval then goes too, as on
    the claims board: they are found by the metric's name and by what the runs were tested on.
    """
    import pandas as pd

    path = Path(settings.table)
    study = StudyTables(path) if path.is_dir() else None
    table = read_runs(path) if study is None else study.runs
    if study is not None and table.empty:
        raise ValueError(f"{path} holds no runs: expected a study's folder, or a table's file.")
    columns = {
        flag: find_column(table, name, f"--{flag}")
        for flag, name in (("arm", settings.arm), ("metric", settings.metric))
    }
    pair = [find_column(table, name, "--pair") for name in settings.pair]
    block = [find_column(table, name, "--block") for name in (settings.block,) if name is not None]
    roles = [*columns.values(), *pair, *block]
    if doubled := [name for name in roles if roles.count(name) > 1]:
        raise ValueError(
            f"{doubled[0]!r} is named twice: --arm, --metric, --pair and --block need columns of "
            "their own."
        )
    try:
        rows = matching(_where(table, settings.where), table)
    except Unmatched as reason:
        raise ValueError(f"{path}: {reason}.") from None
    if study is None:
        check_finished(rows)
    levels = [*pair, columns["arm"], *block]
    for name in levels:
        empty = rows.loc[[str(cell) == "" for cell in rows[name]]]
        if len(empty):
            raise ValueError(f"{path}: {rows_named(empty)} without {name}.")
    named = {name: [_level(cell) for cell in rows[name]] for name in levels}
    names = rows["run"] if study else [str(number) for number in rows.index]
    metric = columns["metric"] if study else "metric"
    numbers = [
        to_number(cell, f"{path}: {settings.metric} of row {row + 1}")
        for row, cell in zip(rows.index, rows[columns["metric"]], strict=True)
    ]
    frame = {
        "run": list(names),
        **{name: list(rows[name]) for name in TEST_SET if study and name in rows.columns},
        "pair": [", ".join(parts) for parts in zip(*(named[name] for name in pair), strict=True)],
        "arm": named[columns["arm"]],
        "block": named[levels[-1]] if settings.block is not None else [ALL] * len(rows),
        metric: numbers,
    }
    found = pd.DataFrame(frame, index=rows.index)
    if settings.block is not None and ALL in set(found["block"]):
        raise ValueError(f"{path}: a block cannot be called {ALL!r}, as their sum is: rename it.")
    _check_doubled(found, rows, settings)
    return found, study.examples if study else {}


def _level(cell: Any) -> str:
    """A value as flags name it; a study's `none` is one too."""
    whole = isinstance(cell, float) and not math.isnan(cell)
    return spelt(cell if whole else text_of(cell))


def _where(table: pd.DataFrame, conditions: Sequence[str]) -> dict[str, list[str]]:
    """column=value, as the claims' `where` has them."""
    found: dict[str, list[str]] = {}
    for condition in conditions:
        name, equals, value = condition.partition("=")
        if not equals:
            raise ValueError(f"--where takes column=value, got {condition!r}.")
        column = find_column(table, name, "--where")
        no = "not " * value.startswith("not ")
        found.setdefault(column, []).append(no + spelt(value.removeprefix("not ")))
    return found


def _check_doubled(runs: pd.DataFrame, rows: pd.DataFrame, settings: Settings) -> None:
    """Refuse a pair that has two runs of one arm: nobody knows which one counts."""
    once = runs.drop_duplicates(["run", "arm", "block"])
    twice = once.loc[once.duplicated(["pair", "arm", "block"], keep=False)]
    if twice.empty:
        return
    first = twice.iloc[0]
    same = (twice[["pair", "arm", "block"]] == first[["pair", "arm", "block"]]).all(axis=1)
    twins = rows.loc[twice.index[same]]
    about = {settings.metric, "run", "Name", "ID", "run_id"}
    differ = [
        str(name)
        for name in rows.columns
        if name not in about and "/" not in str(name) and len(set(map(str, twins[name]))) > 1
    ]
    raise ValueError(
        f"{settings.table}: {len(twins)} rows with {_named(first, settings)} ({rows_named(twins)}) "
        f"differ in {', '.join(differ[:4]) or 'nothing that could tell them apart'}. "
        "--where column=value chooses, --block or one more --pair column keeps them apart."
    )


def _check_pairs(runs: pd.DataFrame, settings: Settings) -> None:
    """Refuse a pair that lacks an arm, or its number there, by name."""
    if settings.drop_unpaired:
        return
    arms = dict.fromkeys(runs["arm"])
    for _, rows in runs.groupby("block", sort=False):
        present = rows.loc[rows[rows.columns[-1]].notna()]
        for arm in arms:
            having = present.loc[present["arm"] == arm, "pair"]
            lacking = rows.loc[~rows["pair"].isin(having)]
            if len(lacking):
                named = _named({**lacking.iloc[0], "arm": arm}, settings)
                raise ValueError(
                    f"{settings.table}: there is no {settings.metric} with {named}, though another "
                    "arm has that pair. --drop-unpaired leaves such pairs out, and counts them."
                )


def _named(row: Any, settings: Settings) -> str:
    """A run by what it is compared by."""
    block = f", {settings.block}={row['block']}" if settings.block is not None else ""
    return f"{'+'.join(settings.pair)}={row['pair']}, {settings.arm}={row['arm']}{block}"


def _claim(metric: str, arm: str, baseline: str, blocks: Sequence[str]) -> Claim:
    """The comparison as a claim: one code measures both.

    Over all blocks, a pair's difference is the mean of its differences in the blocks.
    """
    return Claim(
        id=arm,
        kind="primary",
        text="",
        source="",
        published=None,
        metric=metric,
        effect=Contrast("arm", (arm,), (baseline,)),
        interaction=Contrast("block", tuple(blocks), ()),
        by=("pair",),
    )


def _decided(
    measured: Sequence[OverSeeds], margin: float | None
) -> list[tuple[float, float | None, Decision]]:
    """Adjusted p, TOST's p and the verdict of each line; all lines are one family.

    The p-values are two-sided, so the side that a verdict is about may be read off the data.
    """
    expected: list[Expectation] = ["less" if x.value < 0 else "greater" for x in measured]
    raw = [claim_p(x, expect, margin) for x, expect in zip(measured, expected, strict=True)]
    found = []
    for x, expect, p in zip(measured, expected, holm(raw), strict=True):
        decision = verdict(
            x, expect, margin, alpha=ALPHA, p_adjusted=float(p), family=len(measured)
        )
        tost = None if margin is None else equivalence_p(x, margin)
        found.append((float(p), tost, decision))
    return found


def _means(runs: pd.DataFrame, metric: str, claim: Claim) -> tuple[float, float]:
    """The mean of the arm and of the baseline, over the pairs that have both in every block."""
    assert claim.effect is not None
    assert claim.interaction is not None
    rows = runs.loc[runs["block"].isin(claim.interaction.plus)]
    rows = rows.drop_duplicates(["run", "arm", "block"])
    arms = (*claim.effect.plus, *claim.effect.minus)
    wide = rows.loc[rows["arm"].isin(arms)].pivot(
        index="pair", columns=["arm", "block"], values=metric
    )
    wide = wide.dropna()
    plus, minus = (float(wide[arm].to_numpy().mean()) for arm in arms)
    return plus, minus


def as_rows(found: Compared) -> list[dict[str, Any]]:
    """One row per line, as comparison.csv and --json have them; what is not finite is None."""
    return [
        {
            found.arm: line.arm,
            "baseline": found.baseline,
            found.block or "block": line.block,
            "metric": found.metric,
            "mean": line.mean,
            "baseline_mean": line.baseline_mean,
            "difference": line.difference.value,
            "low": _finite(line.difference.low),
            "high": _finite(line.difference.high),
            "pairs": line.difference.n,
            "dropped": line.difference.dropped,
            "examples": line.difference.examples,
            "p": line.difference.p,
            "p_holm": line.p_adjusted,
            "p_equivalent": line.equivalence_p,
            "effect_size": _finite(line.difference.effect_size),
            "margin": found.margin,
            "verdict": line.decision.word,
            "pairs_needed": line.decision.seeds_needed,
        }
        for line in found.lines
    ]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
