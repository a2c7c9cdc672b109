"""What an audit recommends, by rules in one place. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from crossmodal.audit_measures import Confidence, DirectionAudit, Estimate, Remedies
    from crossmodal.audit_probe import Probe

Verdict = Literal[
    "at chance",
    "use magnitude",
    "keep cosine",
    "no difference",
    "already normalised",
    "norm tells",
    "norm does not tell",
    "use a remedy",
    "no remedy",
    "syntax over meaning",
    "meaning over syntax",
    "inconclusive",
]


@dataclass(frozen=True)
class Rules:
    """The thresholds of the recommendations, all ours; beside them the intervals decide."""

    margin: float = 0.01
    """A difference below it does not matter."""
    least_images: int = 100
    """Fewer decide nothing: images, with their captions, are what is drawn again."""
    least_of_a_kind: int = 20
    """Fewer right, or fewer wrong answers do not say what tells them apart."""
    constant_cv: float = 0.001
    """Norms that vary by less of their mean are constant."""
    weak_auroc: float = 0.1
    """An AUROC this near to a half is weak."""


RULES = Rules()
PROBE = "prompt probe"


@dataclass(frozen=True)
class Statement:
    """One recommendation with its evidence."""

    verdict: Verdict
    text: str


@dataclass(frozen=True)
class Advice:
    """The recommendations for one data set and direction."""

    data: str
    direction: str
    statements: tuple[Statement, ...]


def recommend(found: DirectionAudit) -> tuple[Statement, ...]:
    """What to do in one direction: with the candidates' norms, the query's norm, the remedies."""
    if at_chance(found):
        return (_about_chance(found),)
    return (
        _about_magnitude(found),
        _about_confidence(found.confidence, found.query),
        _about_remedies(found.remedies),
    )


def headline(advice: Sequence[Advice], own: str) -> str:
    """The whole audit in one line: what to do with magnitude, and why."""
    said = [(x, x.statements[0]) for x in advice if x.data != PROBE]
    by_verdict: dict[str, list[tuple[Advice, Statement]]] = {}
    for each in said:
        by_verdict.setdefault(each[1].verdict, []).append(each)
    use, keep = by_verdict.get("use magnitude", []), by_verdict.get("keep cosine", [])
    if use and keep:
        return (
            f"It depends: use magnitude for {_places(use)}, keep normalising for {_places(keep)}."
        )
    if use:
        return f"Use magnitude for {_places(use)}: {_lower(use[0][1].text)}"
    if keep:
        return f"Keep normalising: {_lower(keep[0][1].text)}"
    if len(by_verdict.get("at chance", [])) == len(said):
        return f"Nothing can be told: {_lower(said[0][1].text)}"
    if same := by_verdict.get("no difference"):
        return f"Keep normalising: {_lower(same[0][1].text)}"
    if len(by_verdict.get("already normalised", [])) == len(said):
        return f"Keep normalising: {_lower(said[0][1].text)}"
    open_ones = by_verdict.get("inconclusive") or said
    return f"Keep scoring with {own}, nothing is settled: {_lower(open_ones[0][1].text)}"


def at_chance(found: DirectionAudit) -> bool:
    """Whether no score, with any exponent, is shown to answer better than a guess."""
    chance = found.chance[found.metric]
    return all(row.metrics[found.metric].low <= chance for row in found.scored)


def _about_chance(found: DirectionAudit) -> Statement:
    best = max(found.scored, key=lambda row: row.metrics[found.metric].value)
    share, chance = best.metrics[found.metric], found.chance[found.metric]
    return Statement(
        "at chance",
        f"{found.metric} is {100 * share.value:.1f} % [{100 * share.low:.1f}, "
        f"{100 * share.high:.1f}] at best, and guessing gives {100 * chance:.1f} %: whatever the "
        f"norms do here is noise. Take data that the model knows, or more of it "
        f"({found.queries} queries).",
    )


def _places(said: Sequence[tuple[Advice, Statement]]) -> str:
    return ", ".join(f"{advice.direction} on {advice.data}" for advice, _ in said)


def _lower(text: str) -> str:
    """A sentence as it goes on after a colon; names such as i2t_r1 stay as they are."""
    return text[0].lower() + text[1:]


def _about_magnitude(found: DirectionAudit) -> Statement:
    """Rules for the difference of the raw and the normalised candidates' scores."""
    difference = found.with_exponent(0.0).minus_cosine[found.metric]
    evidence = f"{points(difference)} of {found.metric} over {found.queries} queries"
    margin, images, side = RULES.margin, found.images, f"{found.candidates} embeddings"
    if found.candidate_cv < RULES.constant_cv:
        return Statement(
            "already normalised",
            f"The norms of the {side} do not vary (CV {found.candidate_cv:.2g}): dot and cosine "
            "are one. If they were normalised on the way here, audit the raw ones.",
        )
    if images < RULES.least_images:
        return Statement(
            "inconclusive",
            f"{images} images are too few to choose between cosine and dot (dot minus cosine: "
            f"{evidence}).",
        )
    # If nothing changed for n images, 3 / n is the largest share of all that may change (95 %).
    if max(-difference.low, difference.high, 3 / images) <= margin:
        return Statement(
            "no difference",
            f"The norms of the {side} change the result by less than {100 * margin:g} point "
            f"({evidence}): cosine is the simpler one.",
        )
    if difference.low > 0:
        return Statement(
            "use magnitude",
            f"Magnitude carries information: keeping the norms of the {side} gains {evidence}.",
        )
    if difference.high < 0:
        return Statement(
            "keep cosine",
            f"Magnitude misleads: keeping the norms of the {side} costs {evidence}.",
        )
    return Statement(
        "inconclusive",
        f"The interval of dot minus cosine includes 0 ({evidence}). Score it as it was trained "
        "until there are more examples.",
    )


def _about_confidence(found: Confidence, query: str) -> Statement:
    """Rules for the AUROC of the query's norm: a ranking cannot use it, a confidence can."""
    if min(found.right, found.wrong) < RULES.least_of_a_kind:
        return Statement(
            "inconclusive",
            f"There are too few answers of a kind to say whether the {query}'s norm tells right "
            f"from wrong: {found.right} right and {found.wrong} wrong.",
        )
    if found.query_norm is None:
        return Statement(
            "norm does not tell", f"The {query}'s norm is the same for right and wrong answers."
        )
    area, effect = found.query_norm.auroc, found.query_norm.cohens_d
    evidence = f"AUROC {spread(area)}, Cohen's d {spread(effect)}"
    if area.low <= 0.5 <= area.high:
        return Statement(
            "norm does not tell",
            f"The {query}'s norm is about as large for right answers as for wrong ({evidence}).",
        )
    strength = " weakly" if abs(area.value - 0.5) < RULES.weak_auroc else ""
    which = "longer" if area.value > 0.5 else "shorter"
    return Statement(
        "norm tells",
        f"The {query}'s norm{strength} tells right answers from wrong: {which} ones are answered "
        f"right more often ({evidence}). It cannot change a ranking, but it can serve as a "
        "confidence.",
    )


def _about_remedies(found: Remedies) -> Statement:
    """Rules for the remedies: the best of those whose gain on the judged half is sure."""
    where = f"fitted on {found.reference} images, judged on {found.judged} others"
    if found.judged < RULES.least_images:
        return Statement("inconclusive", f"Too few images to judge remedies ({where}).")
    sure = [
        (row.minus_cosine.value, row.name, row.minus_cosine)
        for row in found.rows
        if row.minus_cosine is not None and row.minus_cosine.low > 0
    ]
    if not sure:
        return Statement(
            "no remedy",
            f"Every remedy's gain over plain cosine may be 0 or less ({where}).",
        )
    _, name, gain = max(sure, key=lambda row: row[0])
    what = {"centred": "Centre first", "centred, then dot": "Centre first, then use dot"}
    return Statement(
        "use a remedy",
        f"{what.get(name, f'Try {name}')}: {points(gain)} against plain cosine ({where}; the "
        f"interval is at {found.level:.0%} because it is the best of several).",
    )


def recommend_from_probe(found: Probe) -> tuple[Statement, ...]:
    """What the prompt probe says of cosine, and of dot and centring beside it."""
    evidence = (
        f"mean cosine {found.same_template.value:.2f} for the same template with another noun, "
        f"{found.same_noun.value:.2f} for the same noun in another template, difference "
        f"{spread(found.excess)}"
    )
    if found.excess.low > 0:
        said = Statement("syntax over meaning", f"Cosine overvalues shared syntax: {evidence}.")
    elif found.excess.high < 0:
        said = Statement(
            "meaning over syntax", f"Cosine puts shared meaning above shared syntax: {evidence}."
        )
    else:
        said = Statement("inconclusive", f"Syntax and meaning weigh about the same: {evidence}.")
    statements = [said]
    for name, words in (("dot", "Keeping the norms"), ("centred", "Centring")):
        change = found.nearest[name].same_noun_minus_cosine
        if change.low > 0:
            statements.append(
                Statement(
                    "use magnitude" if name == "dot" else "use a remedy",
                    f"{words} makes the nearest text one of the same noun more often than cosine "
                    f"does: {points(change)}.",
                )
            )
    return tuple(statements)


def points(difference: Estimate) -> str:
    """A difference of shares in percentage points, with its interval."""
    return (
        f"{100 * difference.value:+.1f} points "
        f"[{100 * difference.low:+.1f}, {100 * difference.high:+.1f}]"
    )


def spread(found: Estimate) -> str:
    """A value with its interval."""
    return f"{found.value:.2f} [{found.low:.2f}, {found.high:.2f}]"
