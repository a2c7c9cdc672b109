"""What an audit recommends, from its table, by rules in one place. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from offsphere.audit.table import HALF, Table
from offsphere.audit.words import cost, gain, p_value, percent, points
from offsphere.estimate import Estimate

if TYPE_CHECKING:
    from offsphere.audit.search import Direction

Verdict = Literal[
    "at chance",
    "use magnitude",
    "keep cosine",
    "no difference",
    "already normalised",
    "norms carry relevance",
    "norms carry relevance, reversed",
    "norms say little of relevance",
    "norms reorder",
    "norms hardly reorder",
    "norm tells",
    "norm does not tell",
    "hubs follow norms",
    "hubs leave norms alone",
    "use a remedy",
    "no remedy",
    "int8 is safe",
    "int8 costs",
    "norms follow texts",
    "norms hardly follow texts",
    "syntax over meaning",
    "meaning over syntax",
    "inconclusive",
]


@dataclass(frozen=True)
class Rules:
    """The thresholds of the recommendations, all ours; beside them the intervals decide."""

    margin: float = 0.01
    """A difference below it does not matter."""
    least_examples: int = 100
    """Of fewer examples (an image with its captions, a query), which are drawn again, an interval
    alone decides nothing."""
    exact_level: float = 0.05
    """Fewer choose between cosine and dot if the exact test beside the interval has no larger p."""
    least_of_a_kind: int = 20
    """Fewer right, or fewer wrong answers do not say what tells them apart."""
    constant_cv: float = 0.001
    """Norms that vary by less of their mean are constant."""
    weak_auroc: float = 0.1
    """An AUROC this near to a half is weak."""
    permutation_level: float = 0.01
    """Norms carry relevance if permuted ones are as telling less often than this."""
    least_kept: float = 0.9
    """Norms reorder if dot keeps a smaller share of cosine's nearest, or if ranks of pairs by
    either correlate less."""
    strong_correlation: float = 0.2
    """Correlations below it are called weak."""


RULES = Rules()


@dataclass(frozen=True)
class Statement:
    """One recommendation with its evidence."""

    verdict: Verdict
    text: str
    about: str = ""
    """The cell, relevance, leverage, confidence, hubs, remedies, storage, texts."""


@dataclass(frozen=True)
class Advice:
    """The recommendations for one data set and direction."""

    data: str
    direction: str
    statements: tuple[Statement, ...]


class Evidence:
    """What the table says about one direction, under short names."""

    def __init__(self, table: Table, direction: Direction, own: str) -> None:
        self.table, self.words, self.own = table, direction, own

    @property
    def order(self) -> str:
        """Which of cosine and dot ranks as the cell that decides what is right."""
        if self.own in ("qnorm", "dnorm"):
            return "cosine" if (self.own == "qnorm") == (self.words.side == "left") else "dot"
        return self.own

    def of(self, scored_with: str, metric: str) -> Estimate | None:
        """The estimate, or None where it was not measured."""
        return self.table.get(*self.words.place, scored_with, metric)

    def number(self, metric: str, scored_with: str = "") -> float:
        """A fact of the direction."""
        return self.table.value(*self.words.place, scored_with, metric)

    @property
    def full(self) -> bool:
        """Whether what needs the candidates in memory was measured among all of them."""
        return not self.number("candidates_compared") < self.number("candidates")

    def cells(self) -> dict[str, Estimate]:
        """The metric that decides, scored with each cell."""
        names = self.table.scores(*self.words.place, f"{self.words.metric}_minus_cosine")
        found = {name: self.of(name, self.words.metric) for name in names}
        return {name: x for name, x in found.items() if x is not None}


def recommend(table: Table, direction: Direction, own: str) -> Advice:
    """What to do in one direction: with the candidates' norms, the query's norm, the remedies."""
    found = Evidence(table, direction, own)
    statements = [_about_chance(found)]
    if not at_chance(found):
        rules = {
            "cell": _about_magnitude,
            "relevance": about_relevance,
            "leverage": _about_leverage,
            "confidence": _about_confidence,
            "hubs": _about_hubs,
            "remedies": _about_remedies,
            "storage": _about_storage,
            "texts": _about_texts,
        }
        said = ((about, rule(found)) for about, rule in rules.items())
        statements = [replace(x, about=about) for about, x in said if x is not None]
    return Advice(*direction.place, tuple(statements))


def headline(advice: Sequence[Advice], own: str | None) -> str:
    """The whole audit in one line: what to do with magnitude, and why.

    `own` is the cell that the vectors were trained with, None if that is unknown.
    """
    said = [(x, x.statements[0]) for x in advice]
    by_verdict: dict[str, list[tuple[Advice, Statement]]] = {}
    for each in said:
        by_verdict.setdefault(each[1].verdict, []).append(each)
    use, keep = by_verdict.get("use magnitude", []), by_verdict.get("keep cosine", [])
    if use and keep:
        return f"It depends: score with dot for {_places(use)}, with cosine for {_places(keep)}."
    if use:
        return f"Score with dot for {_places(use)}: {_lower(use[0][1].text)}"
    if keep:
        asked = f"for {_places(keep)}, " if len(said) > 1 else ""
        return f"Score with cosine: {asked}{_lower(keep[0][1].text)}"
    if len(by_verdict.get("at chance", [])) == len(said):
        return f"Nothing can be told: {_lower(said[0][1].text)}"
    if same := by_verdict.get("no difference"):
        return f"Score with cosine: {_lower(same[0][1].text)}"
    if len(by_verdict.get("already normalised", [])) == len(said):
        return f"Score with cosine: {_lower(said[0][1].text)}"
    open_ones = by_verdict.get("inconclusive") or said
    keep_to = "score as the model was trained" if own is None else f"keep scoring with {own}"
    return f"Nothing is settled, {keep_to}: {_lower(open_ones[0][1].text)}"


def at_chance(found: Evidence) -> bool:
    """Whether no score, with any exponent, is shown to answer better than a guess."""
    chance = found.number(found.words.metric, "chance")
    return all(share.low <= chance for share in found.cells().values())


def _about_chance(found: Evidence) -> Statement:
    share = max(found.cells().values(), key=lambda x: x.value).times(100)
    chance = found.number(found.words.metric, "chance")
    return Statement(
        "at chance",
        f"{found.words.metric} is {share.value:.1f} % [{share.low:.1f}, {share.high:.1f}] at best, "
        f"and guessing gives {100 * chance:.1f} %: whatever the norms do here is noise. Take data "
        f"that the model knows, or more of it ({found.number('queries'):.0f} queries).",
    )


def _places(said: Sequence[tuple[Advice, Statement]]) -> str:
    return ", ".join(f"{advice.direction} on {advice.data}" for advice, _ in said)


def _lower(text: str) -> str:
    """A sentence as it goes on after a colon; names such as i2t_r1 stay as they are."""
    return text[0].lower() + text[1:]


def _about_magnitude(found: Evidence) -> Statement:
    """Rules for the difference of the raw and the normalised candidates' scores."""
    words, cv = found.words, found.number("candidate_norm_cv")
    difference = found.of("dot", f"{words.metric}_minus_cosine")
    assert difference is not None
    evidence = f"{points(difference)} of {words.metric} over {found.number('queries'):.0f} queries"
    margin, side = RULES.margin, f"{words.candidates} embeddings"
    if cv < RULES.constant_cv:
        return Statement(
            "already normalised",
            f"The norms of the {side} do not vary (CV {cv:.2g}): dot and cosine are one. If they "
            "were normalised on the way here, audit the raw ones.",
        )
    few = difference.n < RULES.least_examples
    p = found.number(f"{words.metric}_minus_cosine_p", "dot")
    if few and not p <= RULES.exact_level:
        tested = "" if p != p else f" and the exact test has {p_value(p)}"
        return Statement(
            "inconclusive",
            f"{difference.n} {words.examples} are too few to choose between cosine and dot: below "
            f"{RULES.least_examples} an interval over them says little{tested} (dot minus cosine: "
            f"{evidence}).",
        )
    over = f"of {words.metric} over {found.number('queries'):.0f} queries"
    over += f" (so few ask for an exact test: {p_value(p)})" if few else ""
    # If nothing changed for n examples, 3 / n is the largest share of all that may change (95 %).
    if max(-difference.low, difference.high, 3 / difference.n) <= margin:
        return Statement(
            "no difference",
            f"The norms of the {side} change the result by less than {100 * margin:g} point "
            f"({evidence}): cosine is the simpler one.",
        )
    if difference.low > 0:
        return Statement(
            "use magnitude",
            f"Magnitude carries information: keeping the norms of the {side} gains "
            f"{gain(difference)} {over}.",
        )
    if difference.high < 0:
        return Statement(
            "keep cosine",
            f"Magnitude misleads: keeping the norms of the {side} costs {cost(difference)} {over}.",
        )
    return Statement(
        "inconclusive",
        f"The interval of dot minus cosine includes 0 ({evidence}). Score it as it was trained "
        "until there are more examples.",
    )


def about_relevance(found: Evidence) -> Statement | None:
    """Rules for permuted norms: Cohen's d where some candidates are right for nobody, else the
    ranking by dot."""
    words, level = found.words, RULES.permutation_level
    d, null = found.of("", "cohens_d"), found.of("", "cohens_d_permuted")
    kept = found.of("dot", words.metric)
    permuted = found.of("dot", f"{words.metric}_permuted")
    ranked = ""
    if kept is not None and permuted is not None and found.full:
        ranked = (
            f"by dot {words.metric} is {kept.value:.1%} with these norms, "
            f"{100 * permuted.low:.1f} to {100 * permuted.high:.1f} % with them permuted"
        )
    if d is not None and null is not None:
        right, idle = found.number("candidates_right"), found.number("candidates_idle")
        evidence = (
            f"Cohen's d {d:+.2f}: norms of the {right:,.0f} {words.candidates}s that answer a "
            f"query minus those of the {idle:,.0f} that answer none, over the pooled deviation; "
            f"permuted norms give {null.low:+.2f} to {null.high:+.2f}"
        )
        p, sign = found.number("cohens_d_p"), d.value
        few = min(right, idle) < RULES.least_of_a_kind
        told = ("What answers is {} than chance would have it", "longer", "shorter")
        alike = "What answers is about as long as the rest"
        if ranked and found.number(f"{words.metric}_permuted_p", "dot") <= level:
            assert kept is not None
            assert permuted is not None
            better = "better" if kept.value > permuted.value else "worse"
            alike += f", though dot ranks {better} with these norms than with them permuted"
    elif ranked and kept is not None and permuted is not None:
        evidence, ranked = ranked, ""
        p, sign = found.number(f"{words.metric}_permuted_p", "dot"), kept.value - permuted.value
        few = kept.n < RULES.least_of_a_kind
        told = ("Dot ranks {} with these norms than with any others of their spread",)
        told = (*told, "better", "worse")
        alike = "Dot ranks about as well with the norms permuted"
    else:
        return None
    evidence = f" ({evidence})." + (f" B{ranked[1:]}." if ranked else "")
    if p <= level and sign > 0:
        return Statement("norms carry relevance", told[0].format(told[1]) + evidence)
    if p <= level:
        return Statement("norms carry relevance, reversed", told[0].format(told[2]) + evidence)
    if few:
        return Statement("inconclusive", f"Too few answers to tell norms from chance{evidence}")
    return Statement("norms say little of relevance", alike + evidence)


def _about_leverage(found: Evidence) -> Statement | None:
    """Rules for how far norms reorder candidates, which their CV alone does not say.

    The share of the variance is that of all scores. The nearest may change much where it is small:
    where cosines are 0 in the mean those of the nearest are not. So the nearest decide.
    """
    leverage, cv = found.number("norm_leverage"), found.number("candidate_norm_cv")
    kept = found.of("dot", "nearest_kept") or found.of("dot", "ranks_with_cosine")
    if kept is None or leverage != leverage or cv < RULES.constant_cv:
        return None
    share = leverage**2 / (1 + leverage**2)
    nearest = found.number("hubness_neighbours")
    said = f"Of the {nearest:.0f} nearest by cosine dot keeps {percent(kept)}"
    if found.words.ask == "pairs":
        said = f"Ranks of pairs by dot and by cosine correlate at {kept:.2f}"
    return Statement(
        "norms reorder" if kept.value < RULES.least_kept else "norms hardly reorder",
        f"{said}. Of the variance of all scores by dot norms make about {share:.0%} (CV {cv:.3f} x "
        f"mean cosine / deviation of cosines = {leverage:.2f}).",
    )


def _about_hubs(found: Evidence) -> Statement | None:
    """Rules for candidates that come up too often."""
    cosine, dot = (found.number("hubness_skewness", cell) for cell in ("cosine", "dot"))
    tie = found.number("hubness_norm_correlation", "dot")
    if cosine != cosine or dot != dot:
        return None
    follow = abs(tie) >= RULES.strong_correlation
    told = "" if tie != tie else f", where counts go with norms at r = {tie:+.2f}"
    return Statement(
        "hubs follow norms" if follow else "hubs leave norms alone",
        f"How often each {found.words.candidates} is among the "
        f"{found.number('hubness_neighbours'):.0f} nearest has skewness {cosine:.1f} by cosine and "
        f"{dot:.1f} by dot{told}.",
    )


def _about_storage(found: Evidence) -> Statement | None:
    """Rules for int8 and binary vectors, under cosine and dot."""
    told, own = [], None
    for cell in ("cosine", "dot"):
        changes = [
            found.of(cell, f"{found.words.metric}_{kind}_minus_full") for kind in ("int8", "binary")
        ]
        if None in changes:
            return None
        int8, binary = (x for x in changes if x is not None)
        told.append(f"{cell}: int8 {points(int8)}, binary {points(binary)}")
        if found.order == cell or own is None:
            own = int8
    assert own is not None
    evidence = f"Stored smaller, {found.words.metric} by {'; by '.join(told)}."
    if own.low > -RULES.margin:
        return Statement("int8 is safe", evidence)
    if own.high < 0:
        return Statement("int8 costs", evidence)
    least = f"{100 * RULES.margin:g} point"
    return Statement("inconclusive", f"Whether int8 costs {least} is open. {evidence}")


def _about_texts(found: Evidence) -> Statement | None:
    """Rules for how norms go with what texts are like."""
    told, strong = [], False
    for side in dict.fromkeys((found.words.query, found.words.candidates)):
        for name, words in (("length", "length"), ("frequency", "how common its tokens are")):
            rho = found.of("", f"norm_{side}_with_{name}")
            if rho is not None:
                told.append(f"{side} norms with {words} {rho:+.2f}")
                strong = strong or abs(rho.value) >= RULES.strong_correlation
    if not told:
        return None
    return Statement(
        "norms follow texts" if strong else "norms hardly follow texts",
        f"Rank correlation of {'; '.join(told)}.",
    )


def _about_confidence(found: Evidence) -> Statement | None:
    """Rules for the AUROC of the query's norm: a ranking cannot use it, a confidence can."""
    query = found.words.query
    right, wrong = (found.number(f"answers_{kind}", found.own) for kind in ("right", "wrong"))
    if right != right:
        return None
    if min(right, wrong) < RULES.least_of_a_kind:
        return Statement(
            "inconclusive",
            f"There are too few answers of a kind to say whether the {query}'s norm tells right "
            f"from wrong: {right:.0f} right and {wrong:.0f} wrong.",
        )
    area = found.of(found.own, "query_norm_auroc")
    effect = found.of(found.own, "query_norm_cohens_d")
    if area is None or effect is None:
        return Statement(
            "norm does not tell", f"The {query}'s norm is the same for right and wrong answers."
        )
    evidence = f"AUROC {area:.2f}, Cohen's d {effect:.2f}"
    if not area.excludes(0.5):
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


def _about_remedies(found: Evidence) -> Statement | None:
    """Rules for the remedies: the best of those whose gain on the judged half is sure."""
    words, judged = found.words, found.number("judged_on")
    if judged != judged:
        return None
    on = (
        f"fitted on {found.number('fitted_on'):.0f} {words.examples}, judged on {judged:.0f} others"
    )
    if judged < RULES.least_examples:
        return Statement("inconclusive", f"Too few {words.examples} to judge remedies ({on}).")
    metric = f"{words.metric}_minus_cosine{HALF}"
    gains = {name: found.of(name, metric) for name in found.table.scores(*words.place, metric)}
    sure = {name: gain for name, gain in gains.items() if gain is not None and gain.low > 0}
    if not sure:
        return Statement(
            "no remedy",
            f"Every remedy's gain over plain cosine may be 0 or less ({on}).",
        )
    name, best = max(sure.items(), key=lambda row: row[1].value)
    best_of = f"{found.number('remedies_level'):.1%} because it is the best of several"
    on = f"{on}; the interval is at {best_of}"
    if name == "dot":
        return Statement(
            "no remedy", f"Dot gains the most over cosine by itself: {points(best)} ({on})."
        )
    what = {"centred": "Centre first", "centred, then dot": "Centre first, then use dot"}
    beside = f", dot alone {points(sure['dot'])}" if "dot" in sure else ""
    return Statement(
        "use a remedy",
        f"{what.get(name, f'Try {name}')}: {points(best)} of {words.metric} against plain cosine"
        f"{beside} ({on}).",
    )
