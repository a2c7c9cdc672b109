"""Where embeddings land at the optimum: the simplex, its bounds, and what small batches change.

    python theory/simplex.py
    python theory/simplex.py --instances=16 --temperature=0.2 --population=24

Checks the theorems of "On the Similarities of Embeddings in Contrastive Learning" (ICML 2025) by
optimising the embeddings themselves, in float64, and by constructions that attain the bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from theory.lab import LabSettings, drawing, main, run_lab

if TYPE_CHECKING:
    import torch
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Metrics = dict[str, float | str]

PARTITIONS = ((4, 2), (12, 4), (12, 3), (60, 10))
"""(n, m) at which both extremes of Thm 5.5 are constructed."""
ARMS = {
    "plain": "InfoNCE",
    "variance_in_batch": "with the variance term, in each batch",
    "variance_over_all": "with the variance term, over all pairs",
}
BIASES = tuple(range(-2, 7))
"""SigLIP's b, in the paper's sign, of the separation figure."""
USUAL_START = (10.0, 10.0)
"""SigLIP's usual initial t and b."""


@dataclass(frozen=True)
class Config(LabSettings):
    instances: int = 8
    """Instances n, each with two views, of the full-batch optima."""
    temperature: float = 0.5
    """Divides the similarities in every loss but SigLIP and the spectral one."""
    siglip_scale: float = 5.0
    """SigLIP's t. The usual start, t = 10 and b = 10, is looked at in closed form only: directly
    optimised, its negatives are pushed so weakly that they take thousands of steps."""
    siglip_b: float = 5.0
    """SigLIP's b in the paper's sign: minus the bias of SigLIP's own code."""
    population: int = 12
    """Instances n of the runs with fixed batches; every divisor above 1 is a batch size."""
    variance_weight: float = 30.0
    """Weight of the variance term where it is on; 30 is the weight of the paper's Table 1."""
    cases: int = 1000
    """Random cases for each inequality."""


def run(config: Config) -> Metrics:
    """Measure every theorem once and draw the three figures."""
    return run_lab(config, "simplex", lambda: measure(config))


def measure(config: Config) -> tuple[Metrics, dict[str, Figure]]:
    """The metrics and the figures."""
    import torch

    generator = torch.Generator().manual_seed(config.seed)
    landing, landing_figure = full_batch_optima(config, generator)
    separation, separation_figure = excessive_separation(config, generator)
    band, band_figure = fixed_batch_variance(config, generator)
    metrics = {
        **landing,
        **similarity_bound(config.cases, generator),
        **separation,
        **variance_extremes(),
        **band,
        **monotone_gradients(config.cases, generator),
        **alignment_and_uniformity(generator),
        **random_partitions(config.cases, generator),
    }
    figures = {"landing": landing_figure, "separation": separation_figure, "band": band_figure}
    return metrics, figures


def full_batch_optima(config: Config, generator: torch.Generator) -> tuple[Metrics, Figure]:
    """Thm 5.1: each loss's optimum from one random start, and its distance to the simplex.

    The spectral loss does not land there at widths of n or more: its psi(x) = x^2 falls below
    zero, where Def. 3.2 asks for an increasing one, so that orthogonal negatives are better still.
    """
    from theory import simplex_theorems as theorems

    n, metrics, landed = config.instances, {}, {}
    start = theorems.random_sides(n, n, generator)
    for name in theorems.FULL_BATCH_LOSSES:
        temperature = 1 / config.siglip_scale if name == "siglip" else config.temperature
        loss = theorems.full_batch_loss(name, temperature, -config.siglip_b)
        u, v = theorems.optimise(loss, *start)
        positive, negative = theorems.positives(u, v), theorems.negatives(u, v)
        landed[name] = (positive.tolist(), negative.flatten().tolist())
        metrics[f"landing/{name}/s_pos"] = positive.mean().item()
        metrics[f"landing/{name}/s_neg"] = negative.mean().item()
        metrics[f"landing/{name}/distance"] = theorems.distance_to_simplex(u, v)
    return metrics, _draw_landing(landed, n)


def similarity_bound(cases: int, generator: torch.Generator) -> Metrics:
    """Thm 5.2 over random sides, of every degree of alignment and off-centredness."""
    import torch

    from offsphere.cells import shrink
    from theory import simplex_theorems as theorems

    smallest, error = math.inf, 0.0
    for _ in range(cases):
        n, width = _integer(2, 30, generator), _integer(1, 20, generator)
        u, v = theorems.random_sides(n, width, generator)
        mix, shift = torch.rand(2, generator=generator).tolist()
        u = shrink(u + shift * u[:1], 1.0)
        v = shrink(mix * u + (1 - mix) * v, 1.0)
        slack = theorems.slack(u, v)
        smallest = min(smallest, slack)
        error = max(error, abs(slack - sum(theorems.slack_parts(u, v))))
    centred = theorems.simplex_etf(9)
    return {
        "bound/cases": float(cases),
        "bound/smallest_slack": smallest,
        "bound/decomposition_error": error,
        "bound/slack_at_equality": theorems.slack(centred, centred),
    }


def excessive_separation(config: Config, generator: torch.Generator) -> tuple[Metrics, Figure]:
    """Thm 5.3 and Example 5.4: SigLIP against its closed-form optimum, and the cure."""
    from theory import simplex_theorems as theorems

    n, scale, landed = config.instances, config.siglip_scale, {}
    start = theorems.random_sides(n, n, generator)
    error, cured = 0.0, 0.0
    for b in BIASES:
        phi, psi = theorems.siglip_functions(n, scale, b)
        expected = theorems.additive_optimum(phi, psi, n)
        for within in (0, 1):
            loss = theorems.additive_family(phi, psi, cross=1, within=within)
            u, v = theorems.optimise(loss, *start)
            found = theorems.positives(u, v).mean().item(), theorems.negatives(u, v).mean().item()
            landed[b, within] = found
            if within:
                cured = max(cured, abs(found[0] - 1), abs(found[1] + 1 / (n - 1)))
            else:
                error = max(error, abs(found[0] - expected[0]), abs(found[1] - expected[1]))
    threshold = theorems.siglip_threshold(*USUAL_START)
    metrics: Metrics = {
        "separation/closed_form_error": error,
        "separation/cured_distance": cured,
        "separation/siglip_threshold_n": float(threshold),
    }
    return metrics, _draw_separation(landed, n, scale, threshold)


def variance_extremes() -> Metrics:
    """Thm 5.5: both ends of the band, constructed; the error is the difference from the bound."""
    from theory import simplex_theorems as theorems

    metrics = {}
    for n, m in PARTITIONS:
        least, largest = theorems.variance_band(n, m)
        ends = {
            "least": (theorems.orthogonal_simplices(n, m), least),
            "largest": (theorems.shared_simplices(n, m), largest),
        }
        for end, (u, bound) in ends.items():
            mean, variance = theorems.negative_spread(u, u)
            metrics[f"extremes/{n}_{m}/{end}"] = variance
            metrics[f"extremes/{n}_{m}/{end}_error"] = abs(variance - bound)
            metrics[f"extremes/{n}_{m}/{end}_mean_error"] = abs(mean + 1 / (n - 1))
    return metrics


def random_partitions(cases: int, generator: torch.Generator) -> Metrics:
    """Thm 5.5 over random optima of fixed batches: how often one leaves the band or the mean."""
    from theory import simplex_theorems as theorems

    outside, error = 0, 0.0
    for _ in range(cases):
        m, batches = _integer(2, 8, generator), _integer(1, 8, generator)
        n, width = m * batches, _integer(m - 1, batches * (m - 1) + 3, generator)
        u = theorems.turned_simplices(n, m, width, generator)
        mean, variance = theorems.negative_spread(u, u)
        least, largest = theorems.variance_band(n, m)
        outside += not least - 1e-12 <= variance <= largest + 1e-12
        error = max(error, abs(mean + 1 / (n - 1)))
    return {
        "partitions/cases": float(cases),
        "partitions/outside_the_band": float(outside),
        "partitions/mean_error": error,
    }


def fixed_batch_variance(config: Config, generator: torch.Generator) -> tuple[Metrics, Figure]:
    """Var[s_neg] of embeddings optimised in batches that never change, inside Thm 5.5's band.

    The band holds for the loss alone. The variance term in each batch sees only pairs of that
    batch, over all pairs it sees the rest as well; both leave the theorem's assumptions.
    """
    from offsphere.variance import negative_variance
    from theory import simplex_theorems as theorems

    n, weight = config.population, config.variance_weight
    sizes = [m for m in range(2, n + 1) if n % m == 0]
    start = theorems.random_sides(n, n, generator)
    base = theorems.full_batch_loss("info_nce", config.temperature, 0.0)

    def with_term(loss: theorems.PairLoss) -> theorems.PairLoss:
        return lambda u, v: loss(u, v) + weight * negative_variance(u, v, n)

    metrics, found = {}, {arm: [] for arm in ARMS}
    for m in sizes:
        plain = theorems.fixed_batches(base, m)
        arms = {
            "plain": plain,
            "variance_in_batch": theorems.fixed_batches(with_term(base), m),
            "variance_over_all": with_term(plain),
        }
        for arm, loss in arms.items():
            u, v = theorems.optimise(loss, *start)
            mean, variance = theorems.negative_spread(u, v)
            found[arm].append(variance)
            metrics[f"band/{m}/{arm}"] = variance
            if arm == "plain":
                off = max(abs(mean + 1 / (n - 1)), 1 - theorems.positives(u, v).min().item())
                metrics[f"band/{m}/mean_error"] = off
        metrics[f"band/{m}/least"], metrics[f"band/{m}/largest"] = theorems.variance_band(n, m)
    return metrics, _draw_band(sizes, found, n)


def monotone_gradients(cases: int, generator: torch.Generator) -> Metrics:
    """Thm 5.6 over random nested batches: how often a larger batch pushes a negative harder.

    Two readings: the gradient of a batch's own mean, and of the mean over an epoch's batches,
    where a batch of m counts m times; the second is the stricter.
    """
    import torch

    from theory import simplex_theorems as theorems

    broken = {"batch_mean": 0, "epoch_mean": 0, "negative": 0}
    for _ in range(cases):
        large = _integer(3, 32, generator)
        small = _integer(2, large - 1, generator)
        temperature = 0.05 + 0.95 * torch.rand((), generator=generator).item()
        u, v = theorems.random_sides(large, _integer(2, 16, generator), generator)
        scores = u @ v.T
        apart = ~torch.eye(small, dtype=torch.bool)
        of_large = theorems.score_gradients(scores, temperature)[:small, :small][apart]
        of_small = theorems.score_gradients(scores[:small, :small], temperature)[apart]
        within_rounding = of_small * (1 + 1e-12)
        broken["batch_mean"] += bool((of_large > within_rounding).any())
        broken["epoch_mean"] += bool((of_large * large > within_rounding * small).any())
        broken["negative"] += bool((of_large < 0).any() or (of_small < 0).any())
    return {
        "gradient/cases": float(cases),
        **{f"gradient/violations_{name}": float(count) for name, count in broken.items()},
    }


def alignment_and_uniformity(generator: torch.Generator) -> Metrics:
    """The similarities' relation to Wang and Isola's two measures, on 512 random pairs."""
    from offsphere.evaluation.geometry import alignment
    from theory import simplex_theorems as theorems

    u, v = theorems.random_sides(512, 64, generator)
    mean, variance = theorems.negative_spread(u, v)
    identity = alignment(u, v).item() - (2 - 2 * theorems.positives(u, v).mean().item())
    return {
        "uniformity/alignment_error": abs(identity),
        "uniformity/exact": theorems.cross_uniformity(u, v),
        "uniformity/from_moments": 2 * (mean + variance - 1),
    }


def _integer(low: int, high: int, generator: torch.Generator) -> int:
    """A random integer from low to high, both included."""
    import torch

    return int(torch.randint(low, high + 1, (), generator=generator).item())


def _draw_landing(landed: dict[str, tuple[list[float], list[float]]], n: int) -> Figure:
    figure, axes = drawing(7, 4)
    for place, (positive, negative) in enumerate(landed.values()):
        axes.plot([place] * len(negative), negative, "o", color="tab:blue", alpha=0.4)
        axes.plot([place] * len(positive), positive, "s", color="tab:orange", alpha=0.4)
    axes.axhline(1, color="tab:orange", lw=0.8, label="positive pairs; theory 1")
    axes.axhline(-1 / (n - 1), color="tab:blue", lw=0.8, label="negative pairs; theory -1/(n-1)")
    axes.set_xticks(range(len(landed)), list(landed))
    axes.set_ylabel("cosine similarity at the optimum")
    axes.set_title(f"Full-batch optima, n = {n} instances in {n} dimensions")
    axes.legend(loc="center right")
    return figure


def _draw_separation(
    landed: dict[tuple[int, int], tuple[float, float]], n: int, scale: float, threshold: int
) -> Figure:
    import numpy as np

    from theory import simplex_theorems as theorems

    figure, (by_bias, by_size) = drawing(11, 4, 1, 2)
    biases = np.linspace(BIASES[0], BIASES[-1], 200).tolist()
    optima = [theorems.additive_optimum(*theorems.siglip_functions(n, scale, b), n) for b in biases]
    _draw_similarities(by_bias, biases, optima)
    for within, marker in ((0, "o"), (1, "x")):
        points = [landed[b, within] for b in BIASES]
        label = "optimised" + (", with within-view negatives" if within else "")
        by_bias.plot(BIASES, [p for p, _ in points], marker, color="tab:orange", label=label)
        by_bias.plot(BIASES, [q for _, q in points], marker, color="tab:blue")
    by_bias.set_xlabel("b, which is minus SigLIP's bias")
    by_bias.set_title(f"SigLIP, n = {n}, t = {scale:g}")
    by_bias.legend(fontsize="small")
    sizes = np.geomspace(16, 1e7, 200).round().astype(int).tolist()
    usual = [theorems.siglip_functions(k, *USUAL_START) for k in sizes]
    optima = [theorems.additive_optimum(*pair, k) for pair, k in zip(usual, sizes, strict=True)]
    _draw_similarities(by_size, sizes, optima)
    by_size.axvline(threshold, color="grey", ls=":", label=f"threshold n = {threshold:,}")
    by_size.set_xscale("log")
    by_size.set_xlabel("n, all instances in one batch")
    by_size.set_title("SigLIP at its usual start, t = {:g}, b = {:g}".format(*USUAL_START))
    by_size.legend(fontsize="small")
    return figure


def _draw_similarities(axes: Axes, x: list[float], optima: list[tuple[float, float]]) -> None:
    axes.plot(x, [p for p, _ in optima], color="tab:orange", label="positive pairs, closed form")
    axes.plot(x, [q for _, q in optima], color="tab:blue", label="negative pairs, closed form")
    axes.set_ylabel("cosine similarity at the optimum")


def _draw_band(sizes: list[int], found: dict[str, list[float]], n: int) -> Figure:
    from theory.simplex_theorems import variance_band

    figure, axes = drawing(7, 4.5)
    partial = [m for m in sizes if m < n]
    least, largest = zip(*(variance_band(n, m) for m in partial), strict=True)
    axes.fill_between(partial, least, largest, color="0.85", label="theory, for InfoNCE alone")
    for arm, marker in zip(ARMS, "osv", strict=True):
        axes.plot(partial, found[arm][: len(partial)], marker=marker, label=ARMS[arm])
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(partial, [str(m) for m in partial])
    axes.minorticks_off()
    axes.set_xlabel("batch size m of a fixed partition")
    axes.set_ylabel("variance of the negatives' similarities")
    axes.set_title(f"Optimised embeddings, n = {n} instances in {n} dimensions")
    axes.legend(fontsize="small")
    return figure


if __name__ == "__main__":
    main(Config, run, __doc__)
