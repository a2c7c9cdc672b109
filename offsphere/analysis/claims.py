"""The claims board: each published claim, what was measured, the verdict. No torch.

    offsphere claims
    offsphere claims --run-tests
    offsphere claims --json | jq .

Claims and what their keys mean: configs/claims.yaml.
"""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from offsphere.analysis.claim_file import KINDS, Claim, load_claims, untrained_twin
from offsphere.analysis.conditions import NO_FLOOR, AtFloor, at_floor, steps_text
from offsphere.analysis.exact import EXACT, run_tests
from offsphere.analysis.foreign import check_may_run, read_exact
from offsphere.analysis.gates import failed_gate
from offsphere.analysis.measuring import (
    Incomplete,
    Unmatched,
    conditions_of,
    ended,
    measure,
    steps_of,
)
from offsphere.analysis.pictures import figures_by_claim
from offsphere.analysis.stats import OverSeeds, holm
from offsphere.analysis.tables import Examples, StudyTables
from offsphere.analysis.verdicts import claim_p, verdict
from offsphere.run.command import one_line_errors
from offsphere.run.config import parse
from offsphere.share import CONFIGS

if TYPE_CHECKING:
    import pandas as pd

OWN = CONFIGS / "claims.yaml"
ALPHA = 0.05
THEORY = "theory"
"""The study whose runs draw what claims are about."""


@dataclass(frozen=True)
class Verdict:
    """A claim's line on the board."""

    claim: Claim
    verdict: str
    """A word of `verdicts` (primary); measured (descriptive); verified, failed (exact); not run,
    incomplete, running, unmatched, not testable here (any)."""
    sentence: str
    measured: OverSeeds | None = None
    holds: bool | None = None
    """Whether what was expected is there; None: not known, or nothing was expected."""
    p_adjusted: float | None = None
    """The p-value of the claim's own question, after Holm over the claims of its family."""
    seeds_needed: int | None = None
    figures: tuple[str, ...] = ()
    """What illustrates the claim: study/part/figure, on the report page under the same name."""
    at_floor: AtFloor = NO_FLOOR
    """How many of the runs that it rests on learned nothing beyond their untrained network."""
    steps: tuple[int, int] | None = None
    """The fewest and the most optimiser steps of those runs."""
    by_training: OverSeeds | None = None
    """The contrast of trained minus untrained, where the conditions differ before training."""


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


def evaluate_claims(
    claims: Sequence[Claim], results_root: str | Path, studies: Iterable[StudyTables] = ()
) -> list[Verdict]:
    """The verdict on every claim, in the order given; `studies` have been read before."""
    root = Path(results_root)
    known = read_exact(root / EXACT)
    tables = {study.folder: study for study in studies}
    lines = []
    for claim in claims:
        if claim.kind == "exact":
            lines.append(_exact_verdict(claim, known))
        elif claim.study is not None:
            folder = root / claim.study
            study = tables.setdefault(folder, StudyTables(folder))
            lines.append(_measured_verdict(claim, study.runs, study.examples))
    drawn = figures_by_claim(root / THEORY)
    for heading in dict.fromkeys(claim.heading for claim in claims):
        lines = _with_primary_verdicts(lines, heading)
    return [
        replace(line, figures=tuple(f"{THEORY}/{name}" for name in drawn.get(line.claim.id, ())))
        for line in lines
    ]


def board(lines: Sequence[Verdict], width: int = 100) -> str:
    """Every claim with its verdict, figure and published figure; then how each family stands."""
    text = []
    for kind, heading in groups(lines):
        of_group = [line for line in lines if in_group(line.claim, kind, heading)]
        text.append(f"# {kind}{f', {heading}' if heading else ''}: {_title(kind, len(of_group))}")
        for line in of_group:
            first, *others = _told(line)
            text.append(_wrapped(first, width, "  "))
            text += [_wrapped(other, width, "    ") for other in others]
    for kind, heading in groups(lines, ["primary"]):
        words = Counter(x.verdict for x in lines if in_group(x.claim, kind, heading))
        told = ", ".join(f"{count} {word}" for word, count in words.items())
        text.append(_wrapped(f"{heading or 'primary claims'}: {told}.", width))
    return "\n".join(text) + "\n"


def _wrapped(text: str, width: int, indent: str = "") -> str:
    return fill(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=f"{indent}  ",
        break_on_hyphens=False,
        break_long_words=False,
    )


def groups(lines: Sequence[Verdict], kinds: Sequence[str] = KINDS) -> list[tuple[str, str | None]]:
    """The kinds and headings under which there are claims; an exact claim needs no heading."""
    headings = list(dict.fromkeys(line.claim.heading for line in lines))
    pairs = [(k, h) for k in kinds for h in (headings if k != "exact" else [None])]
    return [(k, h) for k, h in pairs if any(in_group(line.claim, k, h) for line in lines)]


def in_group(claim: Claim, kind: str, heading: str | None) -> bool:
    """Whether a claim stands under this kind and heading."""
    return claim.kind == kind and (kind == "exact" or claim.heading == heading)


def to_json(lines: Sequence[Verdict]) -> str:
    """The board as JSON; a number that is not finite is null."""
    return json.dumps([_finite(asdict(line)) for line in lines], indent=2, ensure_ascii=False)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the board; the exit code is 0 unless the file of claims or a table is faulty."""
    settings = parse(BoardSettings, argv, description=__doc__, name="offsphere claims")
    with one_line_errors("offsphere claims", "The same command starts anew."):
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
        width = max(60, shutil.get_terminal_size((100, 0)).columns)
        print(to_json(lines) if settings.json else board(lines, width), end="")


def _measured_verdict(claim: Claim, runs: pd.DataFrame, examples: Examples) -> Verdict:
    if runs.empty:
        path = f"configs/studies/{claim.study}.yaml"
        return Verdict(claim, "not run", f"offsphere study {path}")
    try:
        if claim.planned is not None and (done := ended(claim, runs)) < claim.planned:
            return Verdict(claim, "running", f"{done} of {claim.planned}")
        if (shut := failed_gate(claim, runs, examples)) is not None:
            return Verdict(claim, "not testable here", shut)
        measured = measure(claim, runs, examples)
        steps = steps_of(claim, runs)
    except Incomplete as reason:
        return Verdict(claim, "incomplete", str(reason))
    except Unmatched as reason:
        return Verdict(claim, "unmatched", str(reason))
    names = {run for condition in conditions_of(claim, runs) for run in condition.rows["run"]}
    floor = at_floor(runs, names, str(claim.metric))
    beside = _by_training(claim, runs, examples, measured)
    return Verdict(claim, "measured", "", measured, at_floor=floor, steps=steps, by_training=beside)


def _by_training(
    claim: Claim, runs: pd.DataFrame, examples: Examples, measured: OverSeeds
) -> OverSeeds | None:
    """The claim's contrast of trained minus untrained, unless the conditions start alike."""
    if claim.effect is None or len(claim.terms) > 1 or claim.correlate is not None:
        return None
    metric = claim.terms[0][0]
    twin = untrained_twin(metric)
    if twin == metric or twin not in runs.columns:
        return None
    try:
        found = measure(replace(claim, metric=f"{metric} - {twin}"), runs, examples)
    except Unmatched:
        return None
    return None if math.isclose(found.value, measured.value, abs_tol=1e-9) else found


def _with_primary_verdicts(lines: Sequence[Verdict], heading: str | None) -> list[Verdict]:
    """Decide the primary claims of a heading as one family; those not measured count with p = 1."""
    lines = list(lines)
    # A claim of the family without a figure (its gate is shut, its runs are not done) keeps its
    # place with p = 1: what is still open must not make the others easier to show.
    places = [i for i, line in enumerate(lines) if in_group(line.claim, "primary", heading)]
    raw = []
    for place in places:
        claim, measured = lines[place].claim, lines[place].measured
        if measured is None or claim.expect is None:
            raw.append(1.0)
        else:
            raw.append(claim_p(measured, claim.expect, claim.margin))
    for place, p in zip(places, holm(raw), strict=True):
        line = lines[place]
        if line.measured is None or line.claim.expect is None:
            continue
        decision = verdict(
            line.measured,
            line.claim.expect,
            line.claim.margin,
            published=line.claim.published_size,
            alpha=ALPHA,
            p_adjusted=float(p),
            family=len(places),
        )
        lines[place] = replace(
            line,
            verdict=decision.word,
            sentence=decision.sentence,
            holds=decision.holds,
            p_adjusted=float(p),
            seeds_needed=decision.seeds_needed,
        )
    return lines


def _exact_verdict(claim: Claim, known: Mapping[str, Any]) -> Verdict:
    found = known.get(claim.id)
    if found is None or found.get("tests") != list(claim.tests):
        return Verdict(claim, "not run", "offsphere claims --run-tests")
    # Records written before say "proved" of what tests verify.
    word = "verified" if found["verdict"] == "proved" else str(found["verdict"])
    when = found["when"]
    named = found["failed"] or found["missing"]
    sentence = f"{found['passed']} passed, {when}"
    if named:
        sentence = f"{', '.join(named)}{' failed' if found['failed'] else ' did not run'}, {when}"
    return Verdict(claim, word, sentence)


def _title(kind: str, count: int) -> str:
    what = {
        "exact": "theorems and identities, checked by tests",
        "primary": f"fixed in advance, one Holm family of {count}, alpha {ALPHA:.0%}",
        "descriptive": "figures with their 95 % intervals, no verdict",
    }
    return what[kind]


def _told(line: Verdict) -> list[str]:
    """A claim in lines: its verdict, what is claimed, measured, published and drawn."""
    claim, measured = line.claim, line.measured
    drawn = [f"drawn in: {', '.join(line.figures)}"] if line.figures else []
    published = [f"published: {claim.published}"] if claim.published else []
    claimed = [claim.text] if claim.kind == "primary" else []
    if measured is None:
        return [f"{claim.id}: {line.verdict}: {line.sentence}", *claimed, *published, *drawn]
    figure = f"{_size(claim, measured)}; {rests_on(line)}"
    if claim.kind == "descriptive":
        return [f"{claim.id}: {figure}", *published, *drawn]
    word = line.verdict
    if word == "not settled":
        needed = "over 1000" if line.seeds_needed is None else line.seeds_needed
        word += f" (80 % power: {needed} {measured.unit}s)"
    return [f"{claim.id}: {word}", *claimed, f"measured: {figure}", *published, *drawn]


def _size(claim: Claim, measured: OverSeeds) -> str:
    unit = "log ratio " if claim.transform == "log" else "Fisher's z " * bool(claim.correlate)
    return f"{unit}{measured.value:+.4g} [{measured.low:+.4g}, {measured.high:+.4g}]"


def rests_on(line: Verdict) -> str:
    """Seeds, examples and steps of a line, and what else bears on its figure."""
    claim, measured = line.claim, line.measured
    if measured is None:
        return ""
    parts = [measured.count + (f" ({measured.dropped} dropped)" if measured.dropped else "")]
    parts += [f"{measured.examples:,} examples"] if measured.examples else []
    parts += [steps_text(line.steps)] if line.steps else []
    if line.at_floor.runs:
        parts.append(f"{line.at_floor.runs} of {line.at_floor.measured} runs at the floor")
    if line.by_training is not None:
        parts.append(f"trained minus untrained {_size(claim, line.by_training)}")
    return ", ".join(parts)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    main()
