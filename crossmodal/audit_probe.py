"""The prompt probe: does a text tower hold shared syntax for shared meaning?

Every noun is put into every template. Two texts with one template and different nouns share their
syntax and differ in meaning; two with one noun and different templates the other way round. A score
that is about meaning puts the second kind nearer. Nouns, templates and the measures are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from crossmodal.audit_measures import Estimate, clustered_mean, reference_half
from crossmodal.benchmark import LEVEL
from crossmodal.templates import PROMPTS, load_templates
from offsphere.evaluation.geometry import unit

if TYPE_CHECKING:
    from jaxtyping import Float

NOUNS, TEMPLATES = PROMPTS / "probe" / "nouns.txt", PROMPTS / "probe" / "templates.txt"


@dataclass(frozen=True)
class Neighbours:
    """What the nearest other text shares with a text, as shares of all texts."""

    same_template: Estimate
    """Syntax, but not the noun."""
    same_noun: Estimate
    """The noun, but not the syntax."""
    same_noun_minus_cosine: Estimate


@dataclass(frozen=True)
class Probe:
    nouns: int
    """Nouns that are judged; the mean of `centred` comes from the others."""
    reference_nouns: int
    templates: int
    same_template: Estimate
    """Mean cosine of texts with one template and different nouns."""
    same_noun: Estimate
    """Mean cosine of texts with one noun and different templates."""
    excess: Estimate
    """The first minus the second: above 0 shared syntax counts more than shared meaning."""
    nearest: dict[str, Neighbours]
    """By cosine, by dot, and by cosine after centring."""
    chance_same_template: float
    chance_same_noun: float
    """Of a random other text."""


def prompt_probe(
    encode: Callable[[Sequence[str]], Float[Tensor, "t d"]], resamples: int, seed: int
) -> Probe:
    """The probe with the nouns and templates of crossmodal/prompts/probe."""
    nouns = NOUNS.read_text(encoding="utf-8").split()
    templates = load_templates(str(TEMPLATES))
    texts = [template.replace("{c}", noun) for noun in nouns for template in templates]
    encoded = encode(texts).double()
    return measure(encoded.view(len(nouns), len(templates), -1), resamples, seed)


def measure(texts: Float[Tensor, "n t d"], resamples: int, seed: int) -> Probe:
    """The probe from raw embeddings, with bootstrap intervals over nouns."""
    reference = reference_half(len(texts), seed)
    judged, mean = texts[~reference], texts[reference].mean((0, 1))
    n, t, _ = judged.shape

    def over_nouns(
        values: Float[Tensor, " n"], kind: Literal["share", "change", "number"] = "number"
    ) -> Estimate:
        return clustered_mean(values, torch.arange(n), LEVEL, resamples, seed, kind)

    by_template, by_noun = mean_cosines(judged)
    u = unit(judged)
    shares = {
        "cosine": nearest_shares(u, u),
        "dot": nearest_shares(u, judged),
        "centred": nearest_shares(unit(judged - mean), unit(judged - mean)),
    }
    return Probe(
        nouns=n,
        reference_nouns=len(texts) - n,
        templates=t,
        same_template=over_nouns(by_template),
        same_noun=over_nouns(by_noun),
        excess=over_nouns(by_template - by_noun),
        nearest={
            name: Neighbours(
                over_nouns(template, "share"),
                over_nouns(noun, "share"),
                over_nouns(noun - shares["cosine"][1], "change"),
            )
            for name, (template, noun) in shares.items()
        },
        chance_same_template=(n - 1) / (n * t - 1),
        chance_same_noun=(t - 1) / (n * t - 1),
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
