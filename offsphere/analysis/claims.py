"""The claims board: each published claim, what was measured, the verdict. No torch.

    offsphere claims
    offsphere claims --run-tests
    offsphere claims --json | jq .

Claims and what their keys mean: configs/claims.yaml.
"""

from __future__ import annotations

import ast
import contextlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args
from xml.etree import ElementTree

import numpy as np
import yaml

from offsphere.analysis.foreign import check_may_run, is_number, read_exact
from offsphere.analysis.pictures import figures_by_claim
from offsphere.analysis.stats import (
    EXPECTATIONS,
    Estimate,
    Expectation,
    claim_p_values,
    contrast,
    holm,
    verdict,
)
from offsphere.analysis.tables import NO_FLOOR, AtFloor, at_floor, runs_table
from offsphere.config import parse
from offsphere.names import unknown
from offsphere.record import write_json
from offsphere.share import CONFIGS

if TYPE_CHECKING:
    import pandas as pd

ROOT = Path(__file__).resolve().parents[2]
OWN = CONFIGS / "claims.yaml"
KINDS = ("exact", "primary", "descriptive")
PROTOCOLS = ("replication", "small-scale re-test")
MOST_PRIMARIES = 10
ALPHA = 0.05
EXACT = "exact.json"
THEORY = "theory"
"""The study whose runs draw what claims are about."""


@dataclass(frozen=True)
class Contrast:
    """Which values of a column are compared: the mean of `plus` minus the mean of `minus`."""

    column: str
    plus: tuple[str, ...]
    minus: tuple[str, ...]

    def arms(self) -> list[tuple[str, float]]:
        """Each value with its weight."""
        return [(value, 1 / len(self.plus)) for value in self.plus] + [
            (value, -1 / len(self.minus)) for value in self.minus
        ]


@dataclass(frozen=True)
class Claim:
    """One claim as it was fixed in advance; what the fields mean: configs/claims.yaml."""

    id: str
    kind: str
    text: str
    source: str
    published: str | None
    protocol: str | None = None
    study: str | None = None
    metric: str | None = None
    effect: Contrast | None = None
    interaction: Contrast | None = None
    where: Mapping[str, Any] | None = None
    by: tuple[str, ...] = ("seed",)
    against: float = 0.0
    transform: str | None = None
    expect: Expectation | None = None
    margin: float | None = None
    margin_from: str | None = None
    tests: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """A claim's line on the board."""

    claim: Claim
    verdict: str
    """supported, contradicted, equivalent, inconclusive (primary); measured (descriptive); proved,
    failed (exact); not run, incomplete, unmatched (any)."""
    sentence: str
    measured: Estimate | None = None
    p_adjusted: float | None = None
    """Of the test that the verdict rests on, after Holm over all primary claims."""
    seeds_needed: int | None = None
    figures: tuple[str, ...] = ()
    """What illustrates the claim: study/part/figure, on the report page under the same name."""
    at_floor: AtFloor = NO_FLOOR
    """Of the runs that it rests on."""


@dataclass(frozen=True)
class BoardSettings:
    claims: str = str(OWN)
    """The file of claims."""
    results: str = "results"
    """Where the studies' folders are."""
    run_tests: bool = False
    """Run the tests of the exact claims and record their outcome in results/exact.json."""
    foreign_tests: bool = False
    """Let --run-tests run the tests, which are programs, of somebody else's file of claims."""
    json: bool = False
    """Print JSON instead of lines."""


class Unmatched(Exception):
    """A claim asks for something that the study's table does not hold."""


def load_claims(path: str | Path) -> list[Claim]:
    """The claims of a file, checked."""
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(content, list) or not content:
        raise ValueError(f"{path}: expected a list of claims, each starting with '- id: ...'.")
    claims = []
    for number, entry in enumerate(content, 1):
        name = entry.get("id", number) if isinstance(entry, dict) else number
        try:
            claims.append(_parse_claim(entry))
        except ValueError as error:
            raise ValueError(f"{path}, claim {name}: {error}") from None
    ids = [claim.id for claim in claims]
    if twice := sorted({name for name in ids if ids.count(name) > 1}):
        raise ValueError(f"{path}: the id {twice[0]!r} is used twice.")
    primaries = [claim.id for claim in claims if claim.kind == "primary"]
    if len(primaries) > MOST_PRIMARIES:
        raise ValueError(
            f"{path}: {len(primaries)} primary claims, at most {MOST_PRIMARIES} are allowed: each "
            "one more makes the others harder to show. Make some descriptive."
        )
    return claims


def evaluate_claims(claims: Sequence[Claim], results_root: str | Path) -> list[Verdict]:
    """The verdict on every claim, in the order given."""
    root = Path(results_root)
    recorded = read_exact(root / EXACT)
    tables: dict[str, pd.DataFrame] = {}
    lines = []
    for claim in claims:
        if claim.kind == "exact":
            lines.append(_exact_verdict(claim, recorded))
        elif claim.study is not None:
            if claim.study not in tables:
                tables[claim.study] = runs_table(root / claim.study)
            lines.append(_measured_verdict(claim, tables[claim.study]))
    drawn = figures_by_claim(root / THEORY)
    return [
        replace(line, figures=tuple(f"{THEORY}/{name}" for name in drawn.get(line.claim.id, ())))
        for line in _with_primary_verdicts(lines)
    ]


def measure(claim: Claim, runs: pd.DataFrame) -> Estimate:
    """The claim's contrast over a study's runs, paired by seed."""
    rows = _matching(claim, runs)
    values = [(_arm(claim, part), weight) for part, weight in _parts(claim, rows)]
    keys = sorted(set().union(*(arm for arm, _ in values)))
    arms = [np.array([arm.get(key, math.nan) for key in keys], float) for arm, _ in values]
    weights = [weight for _, weight in values]
    complete = int((~np.isnan(np.stack(arms)).any(axis=0)).sum())
    if complete < 2:
        raise _Incomplete(f"{complete} of {len(keys)} seeds complete, an interval needs 2")
    return contrast([*arms, np.full(len(keys), claim.against)], [*weights, -1.0])


def run_tests(claims: Sequence[Claim], results_root: str | Path) -> None:
    """Run the tests of the exact claims and record how each claim fared."""
    exact = [claim for claim in claims if claim.kind == "exact"]
    named = {node for claim in exact for node in claim.tests}
    wanted = sorted(node for node in named if names_a_test(node))
    if named and not wanted:
        raise ValueError(
            f"None of the {len(named)} tests is in {ROOT}: they are part of the repository, not of "
            "the installed package. Use a checkout with `pip install -e .`."
        )
    outcomes = _pytest(wanted) if wanted else {}
    now = datetime.now(UTC).isoformat(timespec="seconds")
    record = {}
    for claim in exact:
        found = {node: _outcomes_of(node, outcomes) for node in claim.tests}
        missing = [node for node, passed in found.items() if not passed]
        failed = [node for node, passed in found.items() if passed and not all(passed)]
        word = "failed" if failed else "not run" if missing else "proved"
        record[claim.id] = {
            "verdict": word,
            "tests": list(claim.tests),
            "passed": sum(sum(passed) for passed in found.values()),
            "failed": failed,
            "missing": missing,
            "when": now,
        }
    Path(results_root).mkdir(parents=True, exist_ok=True)
    write_json(Path(results_root) / EXACT, record)


def names_a_test(node: str) -> bool:
    """Whether a pytest node id names a test of this repository (without its parameters)."""
    file, *names = node.split("[")[0].split("::")
    path = ROOT / file
    if not path.is_file():
        return False
    scope: Iterable[ast.AST] = ast.parse(path.read_text(encoding="utf-8")).body
    for name in names:
        named = [x for x in scope if isinstance(x, ast.FunctionDef | ast.ClassDef)]
        found = next((x for x in named if x.name == name), None)
        if found is None:
            return False
        scope = found.body
    return True


def board(lines: Sequence[Verdict], width: int | None = None) -> str:
    """One line per claim, grouped by kind; cut to `width` signs if one is given."""
    text = []
    columns = [_columns(line) for line in lines]
    widths = [max(len(row[i]) for row in columns) for i in range(len(columns[0]) - 1)]
    for kind in KINDS:
        rows = [row for row in columns if row[1] == kind]
        if rows:
            text.append(f"# {kind}: {_title(kind, len(rows))}")
        for row in rows:
            padded = (cell.ljust(size) for cell, size in zip(row[:-1], widths, strict=True))
            text.append("  ".join([*padded, row[-1]]).rstrip())
    if width is not None:
        text = [line if len(line) <= width else line[: width - 1] + "…" for line in text]
    return "\n".join(text) + "\n"


def to_json(lines: Sequence[Verdict]) -> str:
    """The board as JSON; a number that is not finite is null."""
    return json.dumps([_finite(asdict(line)) for line in lines], indent=2, ensure_ascii=False)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the board; the exit code is 0 unless the file of claims or a table is faulty."""
    settings = parse(BoardSettings, argv, description=__doc__)
    try:
        claims = load_claims(settings.claims)
        if settings.run_tests:
            if not settings.foreign_tests:
                tests = {node for claim in claims for node in claim.tests}
                check_may_run(settings.claims, OWN, tests)
            run_tests(claims, settings.results)
        elif not Path(settings.results).is_dir():
            raise ValueError(
                f"{settings.results} is no folder: --results names the folder that holds the "
                "studies' folders, such as results."
            )
        lines = evaluate_claims(claims, settings.results)
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        print(to_json(lines) if settings.json else board(lines, width), end="")
        sys.stdout.flush()
    except BrokenPipeError:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as error:
        print(f"claims: error: {error}", file=sys.stderr)
        raise SystemExit(1) from None


class _Incomplete(Unmatched):
    """Too few seeds are finished in every arm."""


def _parse_claim(entry: Any) -> Claim:
    if not isinstance(entry, dict):
        raise ValueError(f"expected keys and values, got {entry!r}.")
    known = [field.name for field in fields(Claim)]
    for key in entry:
        if key not in known:
            raise unknown("key", key, known)
    for key in ("id", "kind", "text", "source", "published"):
        if key not in entry:
            raise ValueError(f"{key!r} is missing" + (" (may be null)." if key[0] == "p" else "."))
    _one_of("kind", entry["kind"], KINDS)
    given = dict(entry)
    for key in ("id", "text", "source", "published", "margin_from"):
        if given.get(key) is not None:
            if not isinstance(given[key], str) or not given[key].strip():
                raise ValueError(f"{key!r} must be a text, got {given[key]!r}.")
            given[key] = " ".join(given[key].split())
    for key in ("effect", "interaction"):
        if given.get(key) is not None:
            given[key] = _parse_contrast(key, given[key])
    for key in ("by", "tests"):
        if key in given:
            given[key] = tuple(_texts(key, given[key]))
    if not isinstance(given.get("where", {}), dict):
        raise ValueError(f"'where' must hold columns and values, got {given['where']!r}.")
    for key in ("against", "margin"):
        if key in given:
            given[key] = _number(key, given[key])
    claim = Claim(**given)
    _check_exact(claim) if claim.kind == "exact" else _check_measured(claim)
    return claim


def _check_exact(claim: Claim) -> None:
    if not claim.tests:
        raise ValueError("an exact claim needs 'tests', the pytest node ids that prove it.")
    if claim.study is not None or claim.metric is not None or claim.expect is not None:
        raise ValueError("an exact claim has tests, no study, metric or expectation.")


def _check_measured(claim: Claim) -> None:
    for key in ("study", "metric"):
        if not isinstance(getattr(claim, key), str):
            raise ValueError(f"a {claim.kind} claim needs {key!r}.")
    if claim.tests:
        raise ValueError("'tests' belong to exact claims.")
    _one_of("protocol", claim.protocol, PROTOCOLS)
    if claim.transform not in (None, "log"):
        raise unknown("transform", claim.transform, ["log"])
    if claim.interaction is not None and claim.effect is None:
        raise ValueError("'interaction' needs an 'effect' that it changes.")
    if claim.kind == "descriptive":
        if claim.expect is not None or claim.margin is not None:
            raise ValueError("a descriptive claim gets no verdict: remove 'expect' and 'margin'.")
        return
    if claim.expect is None:
        raise ValueError(f"a primary claim needs 'expect', one of {', '.join(EXPECTATIONS)}.")
    _one_of("expect", claim.expect, get_args(Expectation))
    if claim.margin is None or not 0 < claim.margin < math.inf:
        raise ValueError(f"a primary claim needs a 'margin' above 0, got {claim.margin}.")
    if claim.margin_from is None:
        raise ValueError("a margin needs 'margin_from': where its number comes from.")


def _one_of(key: str, value: Any, expected: Sequence[str]) -> None:
    if value not in expected:
        raise unknown(key, value, expected)


def _number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{key!r} must be a number, got {value!r}.")
    return float(value)


def _texts(key: str, value: Any) -> list[str]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(item, str) for item in values):
        raise ValueError(f"{key!r} must be a text or a list of texts, got {value!r}.")
    return values


def _parse_contrast(key: str, value: Any) -> Contrast:
    if not isinstance(value, dict) or len(value) != 1:
        raise ValueError(f"{key!r} must name one column, as in '{{cell: dot - cosine}}'.")
    ((column, text),) = value.items()
    sides = str(text).split(" - ")
    if len(sides) != 2 or not all(side.strip() for side in sides):
        raise ValueError(
            f"{key!r} compares two sides with ' - ' between them, as in 'dot - cosine'; got "
            f"{text!r}."
        )
    plus, minus = (tuple(part.strip() for part in side.split(" & ")) for side in sides)
    return Contrast(column, plus, minus)


def _column(runs: pd.DataFrame, name: str) -> pd.Series:
    if name not in runs.columns:
        raise Unmatched(f"the study's table has no column {name!r}")
    return runs.loc[:, name]


def _matching(claim: Claim, runs: pd.DataFrame) -> pd.DataFrame:
    """The rows that the claim is about; runs on validation data are for tuning, not for claims."""
    if "eval_split" in runs.columns:
        runs = runs.loc[~_equals(_column(runs, "eval_split"), "validation")]
    for column, wanted in (claim.where or {}).items():
        series = _column(runs, column)
        keep = np.zeros(len(runs), bool)
        for value in wanted if isinstance(wanted, list) else [wanted]:
            text = value if isinstance(value, str) else ""
            if text.startswith("not "):
                keep |= ~_equals(series, text.removeprefix("not "))
            else:
                keep |= _equals(series, value)
        runs = runs.loc[keep]
    if runs.empty:
        conditions = ", ".join(f"{column}={value}" for column, value in (claim.where or {}).items())
        raise Unmatched(f"no run with {conditions or 'test data'}")
    return runs


def _parts(claim: Claim, runs: pd.DataFrame) -> list[tuple[pd.DataFrame, float]]:
    """The rows of each arm with the arm's weight in the contrast."""
    parts = [(runs, 1.0)]
    for factor in (claim.effect, claim.interaction):
        if factor is None:
            continue
        series = _column(runs, factor.column)
        for value in (*factor.plus, *factor.minus):
            if not _equals(series, value).any():
                raise Unmatched(f"no run with {factor.column}={value}")
        parts = [
            (rows.loc[_equals(_column(rows, factor.column), value)], weight * sign)
            for rows, weight in parts
            for value, sign in factor.arms()
        ]
    return parts


def _equals(series: pd.Series, value: Any) -> np.ndarray:
    """Which cells hold a value, whether it was written as a number, as a truth value or as text."""
    import pandas as pd

    if value is None:
        return series.isna().to_numpy(bool)
    if pd.api.types.is_bool_dtype(series):
        wanted = {"true": True, "false": False}.get(str(value).lower())
        same = series.map(lambda cell: cell is not pd.NA and bool(cell) is wanted)
    elif pd.api.types.is_numeric_dtype(series):
        try:
            same = series == float(value)
        except ValueError:
            raise Unmatched(f"the column {series.name!r} holds numbers, not {value!r}") from None
        same = same.fillna(False)
    else:
        same = series.map(lambda cell: cell is not None and str(cell) == str(value))
    return same.to_numpy(bool)


def _arm(claim: Claim, rows: pd.DataFrame) -> dict[tuple[Any, ...], float]:
    """The metric per pairing key; a key with two runs is an error that names what differs."""
    rows = rows.drop_duplicates("run")
    if (gaps := [c for c in claim.by if _column(rows, c).isna().any()]) and len(rows):
        raise Unmatched(f"a run has no {gaps[0]!r}, by which runs are paired")
    keys = list(zip(*(_column(rows, column) for column in claim.by), strict=True))
    if doubled := sorted({key for key in keys if keys.count(key) > 1}):
        twins = rows.loc[[key == doubled[0] for key in keys]]
        settings = [name for name in rows.columns if "/" not in name and name != "run"]
        differ = [name for name in settings if len(set(map(str, _column(twins, name)))) > 1]
        pair = ", ".join(f"{k}={v}" for k, v in zip(claim.by, doubled[0], strict=True))
        raise Unmatched(
            f"{len(twins)} runs with {pair} differ in {', '.join(differ[:4]) or 'nothing'}: the "
            "claim's 'where' must choose"
        )
    return dict(zip(keys, _metric(claim, rows), strict=True))


def _metric(claim: Claim, rows: pd.DataFrame) -> np.ndarray:
    """The claim's metric per row, or the difference of two metrics of the same run."""
    total = np.zeros(len(rows))
    for name, sign in zip(str(claim.metric).split(" - "), (1.0, -1.0), strict=False):
        column = _column(rows, name.strip())
        if not all(is_number(value) for value in column.dropna()):
            raise Unmatched(f"the column {name.strip()!r} holds no numbers")
        values = column.to_numpy(dtype=float, na_value=np.nan)
        if claim.transform == "log":
            if (values <= 0).any():
                raise Unmatched(f"{name} is 0 or less in a run, so it has no logarithm")
            values = np.log(values)
        total = total + sign * values
    return total


def _measured_verdict(claim: Claim, runs: pd.DataFrame) -> Verdict:
    if runs.empty:
        path = f"configs/studies/{claim.study}.yaml"
        return Verdict(claim, "not run", f"offsphere study {path}")
    try:
        measured = measure(claim, runs)
    except _Incomplete as reason:
        return Verdict(claim, "incomplete", str(reason))
    except Unmatched as reason:
        return Verdict(claim, "unmatched", str(reason))
    rows = (part["run"] for part, _ in _parts(claim, _matching(claim, runs)))
    floor = at_floor(runs, {run for part in rows for run in part}, str(claim.metric))
    return Verdict(claim, "measured", "", measured, at_floor=floor)


def _with_primary_verdicts(lines: list[Verdict]) -> list[Verdict]:
    """Decide the primary claims as one family; those not measured yet count with p = 1."""
    places = [i for i, line in enumerate(lines) if line.claim.kind == "primary"]
    raw: list[tuple[int, int, float]] = []
    for place in places:
        claim, measured = lines[place].claim, lines[place].measured
        pair = (1.0, None) if measured is None else _p_values(claim, measured)
        raw += [(place, which, p) for which, p in enumerate(pair) if p is not None]
    adjusted = holm([p for _, _, p in raw], most_true=len(places))
    family = {(place, which): float(p) for (place, which, _), p in zip(raw, adjusted, strict=True)}
    lines = list(lines)
    for place in places:
        line = lines[place]
        if line.measured is None or line.claim.expect is None:
            continue
        first, second = family[place, 0], family.get((place, 1))
        decision = verdict(
            line.measured,
            line.claim.expect,
            line.claim.margin,
            alpha=ALPHA,
            p_values=(first, second),
            family=len(places),
        )
        rests_on_first = second is None or first <= ALPHA or (second > ALPHA and first <= second)
        p = first if rests_on_first else second
        lines[place] = replace(
            line,
            verdict=decision.word,
            sentence=decision.sentence,
            p_adjusted=p,
            seeds_needed=decision.seeds_needed,
        )
    return lines


def _p_values(claim: Claim, measured: Estimate) -> tuple[float, float | None]:
    if claim.expect is None:
        raise ValueError(f"{claim.id} has no expectation.")
    return claim_p_values(measured, claim.expect, claim.margin)


def _exact_verdict(claim: Claim, recorded: Mapping[str, Any]) -> Verdict:
    found = recorded.get(claim.id)
    if found is None or found.get("tests") != list(claim.tests):
        return Verdict(claim, "not run", "offsphere claims --run-tests")
    word, when = found["verdict"], found["when"]
    named = found["failed"] or found["missing"]
    sentence = f"{found['passed']} passed, {when}"
    if named:
        sentence = f"{', '.join(named)}{' failed' if found['failed'] else ' did not run'}, {when}"
    return Verdict(claim, word, sentence)


def _pytest(nodes: Sequence[str]) -> dict[str, bool]:
    """The node ids that ran, and whether each passed; a skipped test proves nothing."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", *nodes, "-q", "-m", "", f"--junitxml={report}"]
        command += ["-o", "junit_family=xunit1", "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if not report.exists():
            last = (done.stderr or done.stdout).strip().splitlines()[-1:]
            raise ValueError(f"pytest did not run: {' '.join(last)}")
        cases = ElementTree.parse(report).getroot().iter("testcase")
        return {_node_id(c): _passed(c) for c in cases if c.find("skipped") is None}


def _node_id(case: ElementTree.Element) -> str:
    file = case.get("file", "")
    module = file.removesuffix(".py").replace("/", ".")
    inside = case.get("classname", "").removeprefix(module).strip(".").split(".")
    return "::".join([file, *filter(None, inside), case.get("name", "")])


def _passed(case: ElementTree.Element) -> bool:
    return not any(case.find(tag) is not None for tag in ("failure", "error"))


def _outcomes_of(node: str, outcomes: Mapping[str, bool]) -> list[bool]:
    """How the tests below a node (a file, a function, one parameter) ended."""
    return [ok for name, ok in outcomes.items() if name == node or re.match(_below(node), name)]


def _below(node: str) -> str:
    return re.escape(node) + r"(::|\[)"


def _title(kind: str, count: int) -> str:
    what = {
        "exact": "theorems and identities, verdict from tests",
        "primary": f"fixed in advance, one Holm family of {count}, alpha {ALPHA:.0%}",
        "descriptive": "figures with their 95 % intervals, no verdict",
    }
    return what[kind]


def _columns(line: Verdict) -> tuple[str, ...]:
    """id, kind, verdict, measured with interval, seeds, published and drawn."""
    claim, measured = line.claim, line.measured
    published = f"published: {claim.published or 'no figure'}"
    if line.figures:
        published += f"; drawn in {', '.join(line.figures)}"
    if measured is None:
        return claim.id, claim.kind, f"{line.verdict}: {line.sentence}", "", "", published
    unit = "log ratio " if claim.transform == "log" else ""
    value = f"{unit}{measured.mean:+.4g} [{measured.low:+.4g}, {measured.high:+.4g}]"
    seeds = f"n={measured.n}"
    if measured.dropped:
        seeds += f" ({measured.dropped} dropped)"
    if line.at_floor.runs:
        seeds += f", {line.at_floor.runs} of {line.at_floor.measured} runs at the floor"
    word = (
        line.verdict
        if line.seeds_needed is None
        else f"{line.verdict} (n={line.seeds_needed} would settle it)"
    )
    return claim.id, claim.kind, word, value, seeds, published


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    main()
