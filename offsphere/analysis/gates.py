"""Gates: what must hold before a claim can be tested here at all. No torch.

floor         every condition is above its own untrained network by two standard errors
manipulation  what was to differ does: a column's mean is at least so large in every condition
assay         the effect that is to be changed exists: its interval lies on the expected side of 0

A contrast between networks that have not left their start, or between conditions that do not differ
in what they are named after, says nothing about a claim, whatever its interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from offsphere.analysis.claim_file import Claim, Gate, untrained_twin
from offsphere.analysis.measuring import (
    Condition,
    Unmatched,
    column_of,
    conditions_of,
    equals,
    matching,
    measure,
    numbers,
    outcome_of,
)
from offsphere.analysis.tables import Examples

if TYPE_CHECKING:
    import pandas as pd

STANDARD_ERRORS = 2.0


def failed_gate(claim: Claim, runs: pd.DataFrame, examples: Examples) -> str | None:
    """The first gate that is shut, with its figure; None: all are open."""
    checks = {"floor": _floor, "manipulation": _manipulation, "assay": _assay}
    for gate in claim.gates:
        figure = checks[gate.name](claim, gate, runs, examples)
        if figure is not None:
            return f"{gate.name}, {figure}"
    return None


def _floor(claim: Claim, gate: Gate, runs: pd.DataFrame, examples: Examples) -> str | None:
    # Every condition must have left its start: a contrast of a trained with an untrained one would
    # measure the training. So the condition that is least above its own start decides.
    metric = gate.metric or claim.terms[0][0]
    worst: tuple[float, str] | None = None
    for condition in _chosen(claim, gate, runs):
        found = _above_untrained(claim, condition, metric, examples)
        gap, error = found
        score = gap / error if error > 0 else math.copysign(math.inf, gap)
        if worst is None or score < worst[0]:
            name = f" with {condition.name}" if condition.name else ""
            worst = score, f"{metric} minus untrained {gap:+.3g}, standard error {error:.2g}{name}"
    return worst[1] if worst is not None and worst[0] < STANDARD_ERRORS else None


def _above_untrained(
    claim: Claim, condition: Condition, metric: str, examples: Examples
) -> tuple[float, float]:
    """(trained minus untrained, its standard error over seeds and examples) of a condition.

    Where only the trained network's outcomes were kept, the untrained one's are taken to vary as
    much and on their own, which is more than the difference of both does.
    """
    plain = replace(
        claim, metric=f"{metric} - {untrained_twin(metric)}", effect=None, interaction=None,
        where=None, transform=None, against=0.0, correlate=None,
    )  # fmt: skip
    found = measure(plain, condition.rows, examples)
    error = found.standard_error
    if not found.examples:
        kept = [outcome_of(examples.get(str(run), {}), metric) for run in condition.rows["run"]]
        sizes = {len(x) for x in kept if x is not None}
        if len(sizes) == 1:
            mean = np.mean([x for x in kept if x is not None], axis=0)
            error = math.hypot(error, math.sqrt(2 * float(mean.var(ddof=1)) / len(mean)))
    return found.value, error


def _manipulation(claim: Claim, gate: Gate, runs: pd.DataFrame, examples: Examples) -> str | None:
    del examples
    means = []
    for condition in _chosen(claim, gate, runs):
        values = numbers(condition.rows, str(gate.metric))
        if np.isfinite(values).any():
            means.append((float(np.nanmean(values)), condition.name))
    if not means:
        raise Unmatched(f"no run has {gate.metric}, which a gate asks for")
    least, name = min(means)
    if least >= float(gate.at_least or 0.0):
        return None
    return f"{gate.metric} {least:.3g}, {gate.at_least:g} needed" + (f", with {name}" * bool(name))


def _assay(claim: Claim, gate: Gate, runs: pd.DataFrame, examples: Examples) -> str | None:
    plain = replace(
        claim, metric=gate.metric or claim.metric, effect=gate.effect, against=0.0,
        interaction=gate.interaction, where=_where(claim, gate),
        transform=gate.transform or (claim.transform if gate.metric is None else None),
    )  # fmt: skip
    # The whole interval must lie on the expected side: a claim that something mends a deficit says
    # nothing where the deficit itself cannot be seen.
    found = measure(plain, runs, examples)
    if found.low > 0 if gate.expect == "greater" else found.high < 0:
        return None
    side = "above" if gate.expect == "greater" else "below"
    contrasts = [f"{x.column} {_spelt(x)}" for x in (gate.effect, gate.interaction) if x]
    return (
        f"{', '.join(contrasts)} in {plain.metric} {found.value:+.3g} [{found.low:+.3g}, "
        f"{found.high:+.3g}] is not {side} 0"
    )


def _where(claim: Claim, gate: Gate) -> Mapping[str, Any]:
    """A gate's rows are the claim's, but for what the gate says itself."""
    return {**(claim.where or {}), **(gate.where or {})}


def _chosen(claim: Claim, gate: Gate, runs: pd.DataFrame) -> list[Condition]:
    """The claim's conditions, as far as the gate asks for them."""
    conditions = []
    for condition in conditions_of(claim, runs):
        rows = condition.rows
        for column, wanted in (gate.where or {}).items():
            values = wanted if isinstance(wanted, list) else [wanted]
            series = column_of(rows, column)
            rows = rows.loc[np.any([equals(series, value) for value in values], axis=0)]
        if not rows.empty:
            conditions.append(condition._replace(rows=rows))
    if not conditions:
        # Rows that no condition holds, such as those of another weight: taken as one.
        conditions = [Condition(matching(_where(claim, gate), runs), 1.0, "")]
    return conditions


def _spelt(contrast: Any) -> str:
    return f"{' & '.join(contrast.plus)} - {' & '.join(contrast.minus)}"
