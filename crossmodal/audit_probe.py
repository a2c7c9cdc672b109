"""The prompt probe: does a text tower hold shared syntax for shared meaning?

Every noun is put into every template. Two texts with one template and different nouns share their
syntax and differ in meaning; two with one noun and different templates the other way round. A score
that is about meaning puts the second kind nearer. Nouns, templates and the measures are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from crossmodal.templates import PROMPTS, load_templates
from offsphere.audit.advice import Advice, Statement
from offsphere.audit.measures import reference_half
from offsphere.audit.report import Report, Section
from offsphere.audit.scoring import LEVEL, How
from offsphere.audit.table import Table
from offsphere.audit.words import percent, points
from offsphere.estimate import Estimate
from offsphere.evaluation.geometry import unit
from offsphere.evaluation.intervals import clustered_mean

if TYPE_CHECKING:
    from jaxtyping import Float

PLACE = ("prompt probe", "text to text")
"""The probe's data set and direction in the table."""
NOUNS, TEMPLATES = PROMPTS / "probe" / "nouns.txt", PROMPTS / "probe" / "templates.txt"


def add_probe(report: Report, encode: Callable[[Sequence[str]], Float[Tensor, "t d"]]) -> Report:
    """The report with the probe of the nouns and templates of crossmodal/prompts/probe."""
    nouns = NOUNS.read_text(encoding="utf-8").split()
    templates = load_templates(str(TEMPLATES))
    texts = [template.replace("{c}", noun) for noun in nouns for template in templates]
    encoded = encode(texts).double().view(len(nouns), len(templates), -1)
    measure_probe(encoded, report.how, report.table)
    return report.adding(recommend(report.table), section(report.table))


def measure_probe(texts: Float[Tensor, "n t d"], how: How, table: Table) -> None:
    """Add the probe's rows, from raw embeddings, with bootstrap intervals over nouns.

    `same_template` and `same_noun` are mean cosines of texts that share one and differ in the
    other, `nearest_...` how often a text's nearest one shares the template, or the noun.
    """
    reference = reference_half(len(texts), how.seed)
    judged, mean = texts[~reference], texts[reference].mean((0, 1))
    n, t, _ = judged.shape

    def add(
        scored_with: str,
        metric: str,
        values: Float[Tensor, " n"],
        kind: Literal["share", "change", "number"] = "number",
    ) -> None:
        found = clustered_mean(values, torch.arange(n), LEVEL, how.resamples, how.seed, kind)
        table.add(*PLACE, scored_with, metric, found)

    by_template, by_noun = mean_cosines(judged)
    add("cosine", "same_template", by_template)
    add("cosine", "same_noun", by_noun)
    add("cosine", "excess", by_template - by_noun)
    u = unit(judged)
    shares = {
        "cosine": nearest_shares(u, u),
        "dot": nearest_shares(u, judged),
        "centred": nearest_shares(unit(judged - mean), unit(judged - mean)),
    }
    for name, (template, noun) in shares.items():
        add(name, "nearest_same_template", template, "share")
        add(name, "nearest_same_noun", noun, "share")
        add(name, "nearest_same_noun_minus_cosine", noun - shares["cosine"][1], "change")
    counts = {"nouns": n, "reference_nouns": len(texts) - n, "templates": t}
    for name, count in counts.items():
        table.add(*PLACE, "", name, Estimate(count))
    table.add(*PLACE, "chance", "nearest_same_template", Estimate((n - 1) / (n * t - 1)))
    table.add(*PLACE, "chance", "nearest_same_noun", Estimate((t - 1) / (n * t - 1)))


def found_in(table: Table, scored_with: str, metric: str) -> Estimate:
    """A row of the probe."""
    found = table.get(*PLACE, scored_with, metric)
    assert found is not None
    return found


def recommend(table: Table) -> Advice:
    """What the prompt probe says of cosine, and of dot and centring beside it."""
    template, noun, excess = (
        found_in(table, "cosine", metric) for metric in ("same_template", "same_noun", "excess")
    )
    evidence = (
        f"mean cosine {template.value:.2f} for the same template with another noun, "
        f"{noun.value:.2f} for the same noun in another template, difference {excess:.2f}"
    )
    if excess.low > 0:
        said = Statement("syntax over meaning", f"Cosine overvalues shared syntax: {evidence}.")
    elif excess.high < 0:
        said = Statement(
            "meaning over syntax", f"Cosine puts shared meaning above shared syntax: {evidence}."
        )
    else:
        said = Statement("inconclusive", f"Syntax and meaning weigh about the same: {evidence}.")
    statements = [said]
    for name, words in (("dot", "Keeping the norms"), ("centred", "Centring")):
        change = found_in(table, name, "nearest_same_noun_minus_cosine")
        if change.low > 0:
            statements.append(
                Statement(
                    "use magnitude" if name == "dot" else "use a remedy",
                    f"{words} makes the nearest text one of the same noun more often than cosine "
                    f"does: {points(change)}.",
                )
            )
    return Advice(*PLACE, tuple(statements))


def section(table: Table) -> Section:
    """The probe's part of the page."""
    names = {"cosine": "cosine", "dot": "dot", "centred": "cosine after centring"}
    metrics = ("nearest_same_template", "nearest_same_noun")
    rows = []
    for name, title in names.items():
        change = points(found_in(table, name, "nearest_same_noun_minus_cosine"))
        shares = (percent(found_in(table, name, metric)) for metric in metrics)
        rows.append((title, *shares, "" if name == "cosine" else change))
    chance = (f"{found_in(table, 'chance', metric).value:.1%}" for metric in metrics)
    nouns, others, templates = (
        f"{found_in(table, '', name).value:.0f}"
        for name in ("nouns", "reference_nouns", "templates")
    )
    template, noun, excess = (
        f"{found_in(table, 'cosine', metric):.2f}"
        for metric in ("same_template", "same_noun", "excess")
    )
    return Section(
        "Prompt probe: shared syntax or shared meaning?",
        (
            f"{nouns} nouns in {templates} templates (the mean for centring comes from {others} "
            f"other nouns). Mean cosine of texts with one template and different nouns: "
            f"{template}; with one noun and different templates: {noun}; difference {excess}. "
            "Intervals over nouns.",
        ),
        (
            "nearest text by",
            "same template, other noun",
            "same noun, other template",
            "same noun minus cosine",
        ),
        (*rows, ("chance", *chance, "")),
    )


def mean_cosines(
    texts: Float[Tensor, "n t d"],
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """Per noun: to other nouns in the same template, and to itself in other templates."""
    n, t, _ = texts.shape
    u = unit(texts)
    own = u.square().sum(-1).sum(1)
    same_template = (torch.einsum("ntd,td->n", u, u.sum(0)) - own) / (t * (n - 1))
    same_noun = (u.sum(1).square().sum(-1) - own) / (t * (t - 1))
    return same_template, same_noun


def nearest_shares(
    queries: Float[Tensor, "n t d"], items: Float[Tensor, "n t d"]
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """Per noun, how often the text of largest product shares the template, or the noun.

    Of several equally near texts each counts its share.
    """
    n, t, _ = queries.shape
    scores = (queries.flatten(0, 1) @ items.flatten(0, 1).T).float()
    scores.fill_diagonal_(-torch.inf)
    nearest = scores == scores.max(1, keepdim=True).values
    noun, template = torch.arange(n).repeat_interleave(t), torch.arange(t).repeat(n)

    def share(key: Tensor) -> Tensor:
        alike = key[:, None] == key
        return ((nearest & alike).sum(1) / nearest.sum(1)).double().view(n, t).mean(1)

    return share(template), share(noun)
