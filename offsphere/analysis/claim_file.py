"""The claims of a file, checked; what their keys mean: configs/claims.yaml. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from offsphere.analysis.verdicts import EXPECTATIONS, Expectation
from offsphere.names import unknown
from offsphere.run import safe_yaml

KINDS = ("exact", "primary", "descriptive")
PROTOCOLS = ("replication", "small-scale re-test")
MOST_PRIMARIES = 12
UNTRAINED = "untrained"
GATES = ("floor", "manipulation", "assay")
GATE_KEYS = {
    "floor": ("metric", "where"),
    "manipulation": ("metric", "where", "at_least"),
    "assay": ("metric", "where", "transform", "effect", "interaction", "expect"),
}


@dataclass(frozen=True)
class Contrast:
    """Which values of a column are compared: the mean of `plus` minus the mean of `minus`."""

    column: str
    plus: tuple[str, ...]
    minus: tuple[str, ...]

    def weights(self) -> list[tuple[str, float]]:
        """Each value with its weight."""
        return [(value, 1 / len(self.plus)) for value in self.plus] + [
            (value, -1 / len(self.minus)) for value in self.minus
        ]


@dataclass(frozen=True)
class Gate:
    """What must hold before a claim can be tested."""

    name: Literal["floor", "manipulation", "assay"]
    metric: str | None = None
    where: Mapping[str, Any] | None = None
    at_least: float | None = None
    effect: Contrast | None = None
    interaction: Contrast | None = None
    transform: str | None = None
    expect: Expectation | None = None


@dataclass(frozen=True)
class Claim:
    """One claim as it was fixed in advance; what the fields mean: configs/claims.yaml."""

    id: str
    kind: str
    text: str
    source: str
    published: str | None
    heading: str | None = None
    """The heading that the claim stands under; its primary claims are one family."""
    published_size: float | None = None
    protocol: str | None = None
    study: str | None = None
    metric: str | None = None
    correlate: str | None = None
    effect: Contrast | None = None
    interaction: Contrast | None = None
    where: Mapping[str, Any] | None = None
    by: tuple[str, ...] = ("seed",)
    against: float | str = 0.0
    transform: str | None = None
    expect: Expectation | None = None
    margin: float | None = None
    margin_from: str | None = None
    planned: int | None = None
    gates: tuple[Gate, ...] = ()
    tests: tuple[str, ...] = ()

    @property
    def terms(self) -> list[tuple[str, float]]:
        """The columns that make the metric, each with its sign."""
        names = [name.strip() for name in str(self.metric).split(" - ")]
        if self.against == UNTRAINED:
            names.append(untrained_twin(names[0]))
        return list(zip(names, (1.0, -1.0), strict=False))


def untrained_twin(metric: str) -> str:
    """The column that has a test metric of the network before training."""
    return metric.replace("test/", f"{UNTRAINED}/", 1)


def load_claims(path: str | Path) -> list[Claim]:
    """The claims of a file, checked."""
    try:
        content = safe_yaml.load(Path(path).read_text(encoding="utf-8"), path)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(content, list) or not content:
        raise ValueError(f"{path}: expected a list of claims, each starting with '- id: ...'.")
    claims, heading = [], None
    for number, entry in enumerate(content, 1):
        if isinstance(entry, dict) and set(entry) == {"heading"}:
            heading = str(entry["heading"])
            continue
        name = entry.get("id", number) if isinstance(entry, dict) else number
        try:
            claims.append(replace(_parse_claim(entry), heading=heading))
        except ValueError as error:
            raise ValueError(f"{path}, claim {name}: {error}") from None
    ids = [claim.id for claim in claims]
    if twice := sorted({name for name in ids if ids.count(name) > 1}):
        raise ValueError(f"{path}: the id {twice[0]!r} is used twice.")
    for heading in dict.fromkeys(claim.heading for claim in claims):
        count = sum(c.kind == "primary" and c.heading == heading for c in claims)
        if count > MOST_PRIMARIES:
            where = f" under {heading!r}" if heading else ""
            raise ValueError(
                f"{path}: {count} primary claims{where}, at most {MOST_PRIMARIES} are allowed: "
                "each one more makes the others harder to show. Make some descriptive."
            )
    return claims


def _parse_claim(entry: Any) -> Claim:
    if not isinstance(entry, dict):
        raise ValueError(f"expected keys and values, got {entry!r}.")
    known = [field.name for field in fields(Claim) if field.name != "heading"]
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
                raise ValueError(f"{key!r} must be a string, got {given[key]!r}.")
            given[key] = " ".join(given[key].split())
    _parse_contrasts(given)
    for key in ("by", "tests"):
        if key in given:
            given[key] = tuple(_texts(key, given[key]))
    _check_where(given)
    for key in ("against", "margin", "published_size"):
        if key in given and given[key] != UNTRAINED:
            given[key] = _number(key, given[key])
    planned = given.get("planned")
    if planned is not None and (type(planned) is not int or planned < 2):
        raise ValueError(f"'planned' is a number of pairs, 2 or more, got {planned!r}.")
    given["gates"] = _parse_gates(given.get("gates") or {})
    claim = Claim(**given)
    _check_exact(claim) if claim.kind == "exact" else _check_measured(claim)
    return claim


def _parse_contrasts(given: dict[str, Any]) -> None:
    for key in ("effect", "interaction"):
        if given.get(key) is not None:
            given[key] = _parse_contrast(key, given[key])


def _check_where(given: Mapping[str, Any]) -> None:
    if not isinstance(given.get("where", {}), dict):
        raise ValueError(f"'where' must hold columns and values, got {given['where']!r}.")


def _parse_gates(entry: Any) -> tuple[Gate, ...]:
    if not isinstance(entry, dict):
        raise ValueError(f"'gates' must hold {', '.join(GATES)} and what they ask for.")
    gates = []
    for name, asked in entry.items():
        _one_of("gate", name, GATES)
        given = dict(asked or {})
        for key in given:
            if key not in GATE_KEYS[name]:
                raise unknown(f"key of the gate {name}", key, GATE_KEYS[name])
        _parse_contrasts(given)
        _check_where(given)
        if name == "manipulation":
            if "metric" not in given or "at_least" not in given:
                raise ValueError("the gate manipulation needs 'metric' and 'at_least'.")
            given["at_least"] = _number("at_least", given["at_least"])
        whole = given.get("effect") is not None and given.get("expect") in ("greater", "less")
        if name == "assay" and not whole:
            raise ValueError("the gate assay needs 'effect', and 'expect': greater or less.")
        gates.append(Gate(name=name, **given))
    return tuple(gates)


def _check_exact(claim: Claim) -> None:
    if not claim.tests:
        raise ValueError("an exact claim needs 'tests', the pytest node ids that check it.")
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
    if claim.against == UNTRAINED and not _has_a_twin(str(claim.metric)):
        raise ValueError(f"'against: untrained' needs one test metric, got {claim.metric!r}.")
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


def _has_a_twin(metric: str) -> bool:
    return metric.startswith("test/") and " - " not in metric


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
        raise ValueError(f"{key!r} must be a string or a list of strings, got {value!r}.")
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
