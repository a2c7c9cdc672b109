"""A planted magnitude signal: the positive and the negative control of all other studies.

    python theory/planted.py --carrier=norm
    python theory/planted.py --carrier=angle --task=symmetric --counts=skewed --seed=3

Trains encoders under every cell on a corpus whose relevance is carried by the norm, the angle, both
or neither (`planted_world` has the model), and scores fresh documents and queries with each cell.

The verdict does not compare cells, because cells also differ in how well they train. It asks
whether one trained model ranks better with the documents' magnitudes than with the same magnitudes
dealt out at random among the same documents. Where magnitude means nothing, fresh documents'
magnitudes are exchangeable and the expected difference is exactly zero, however the model trained.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from offsphere.run.scripts import Role, Task
from theory.lab import drawing, main, run_lab
from theory.planted_settings import VERDICT_CELL, Config

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import torch
    from matplotlib.figure import Figure
    from torch import Tensor

    from offsphere.cells import Cell
    from theory.planted_world import Corpus, Encoders

Metrics = dict[str, float | str]
SIDES = "Left is the query, right the candidates."
TASK = Task(
    "planted/detected",
    tuple(
        Role(f"Planted, {kind}", kind, SIDES, when={"task": kind})
        for kind in ("asymmetric", "symmetric")
    ),
)

ALPHA = 0.001
"""Level of the verdict's one-sided test: strict, because a control that cries wolf is useless."""


class Gain(NamedTuple):
    """A mean paired difference, its 95 % t-interval and the one-sided p-value of no gain."""

    mean: float
    low: float
    high: float
    p: float


class HeldOut(NamedTuple):
    """nDCG@10 on each fresh corpus, from one trained model scored in three ways."""

    own: list[float]
    """With its own cell."""
    shuffled: list[float]
    """With its own cell and shuffled magnitudes of the documents."""
    discarded: list[float]
    """With the norms of the document embeddings discarded."""
    kept: list[float]
    """With the norms of the document embeddings kept whole."""


def run(config: Config) -> Metrics:
    """Train every cell on one planted corpus; the metrics and the verdict `planted/detected`."""
    return run_lab(config, "planted", lambda: measure(config))


def measure(config: Config) -> tuple[Metrics, dict[str, Figure]]:
    """The metrics and the figures."""
    corpus, scored = train_and_score(config)
    metrics = {
        **{k: v for cell, found in scored.items() for k, v in _describe(cell, found).items()},
        **_contrast(scored),
        **verdict(config, scored[VERDICT_CELL]),
    }
    figures = {"cells": _draw_cells(config, scored, metrics)}
    if config.counts == "skewed":
        counted, figures["counter"] = relevance_counter(config, corpus)
        metrics |= counted
    return metrics, figures


def train_and_score(config: Config) -> tuple[Corpus, dict[str, HeldOut]]:
    """The training corpus, and each cell's scores on the same fresh corpora."""
    from theory import planted_world as world

    generator = world.stream(config.seed, "data")
    mixing = world.draw_mixing(config, generator)
    corpus = world.draw_corpus(config, mixing, generator)
    fresh = [world.draw_corpus(config, mixing, generator) for _ in range(config.worlds)]
    scored = {}
    for cell in config.cells:
        model = world.train_encoders(config, cell, corpus)
        scored[cell] = score(*model, fresh, config, world.stream(config.seed, "shuffle"))
    return corpus, scored


def score(
    encoders: Encoders,
    cell: Cell,
    corpora: Sequence[Corpus],
    config: Config,
    generator: torch.Generator,
) -> HeldOut:
    """A model's nDCG@10 on fresh corpora, with and without the documents' magnitudes."""
    import torch

    from offsphere.cells import Cell
    from theory import planted_world as world

    keep, discard = Cell("qnorm"), Cell("cosine")
    rows = []
    with torch.no_grad():
        for corpus in corpora:
            queries, documents = encoders.queries(corpus.queries), corpus.documents

            def rank(
                by: Cell, items: Tensor, corpus: Corpus = corpus, queries: Tensor = queries
            ) -> float:
                return world.ndcg(by.scores(queries, encoders.documents(items)), corpus.answer)

            deals = [world.shuffle_salience(documents, generator) for _ in range(config.shuffles)]
            shuffled = sum(rank(cell, deal) for deal in deals) / len(deals)
            others = rank(discard, documents), rank(keep, documents)
            rows.append((rank(cell, documents), shuffled, *others))
    return HeldOut(*(list(column) for column in zip(*rows, strict=True)))


def paired_gain(better: Sequence[float], worse: Sequence[float]) -> Gain:
    """How much `better` exceeds `worse`, pair by pair, by a t-test on the differences."""
    import numpy as np
    from scipy import stats

    differences = np.subtract(better, worse)
    mean, error = float(differences.mean()), float(stats.sem(differences))
    if error == 0:
        return Gain(mean, mean, mean, 0.0 if mean > 0 else 1.0)
    low, high = stats.t.interval(0.95, len(differences) - 1, mean, error)
    p = stats.t.sf(mean / error, len(differences) - 1)
    return Gain(mean, float(low), float(high), float(p))


def verdict(config: Config, held_out: HeldOut) -> Metrics:
    """Does magnitude carry relevance? 1 or 0, what was planted, and the p-value."""
    p = paired_gain(held_out.own, held_out.shuffled).p
    return {
        "planted/expected": float(config.carrier in ("norm", "both")),
        "planted/detected": float(p < ALPHA),
        "planted/p": p,
    }


def relevance_counter(config: Config, corpus: Corpus) -> tuple[Metrics, Figure]:
    """Do documents that answer many queries grow long? ("Beyond the Unit Hypersphere", App. T.2)

    Rank correlation cannot tell the cells apart: where the documents are normalised, each step at
    a right angle lengthens them a little too. The slope of log-norm on log-count can.
    """
    import numpy as np
    from scipy import stats

    from theory import planted_world as world

    counts = corpus.counts[: config.relevant].numpy()
    metrics, norms = {}, {}
    for cell in config.cells:
        norms[cell] = world.train_free_documents(config, cell, corpus)[: config.relevant].numpy()
        slope, _ = np.polyfit(np.log(counts), np.log(norms[cell]), 1)
        metrics[f"{cell}/counter_slope"] = float(slope)
        correlation = stats.spearmanr(counts, norms[cell]).statistic  # pyright: ignore
        metrics[f"{cell}/counter_correlation"] = float(correlation)
    return metrics, _draw_counter(counts, norms)


def _describe(cell: str, found: HeldOut) -> Metrics:
    import numpy as np

    gain = paired_gain(found.own, found.shuffled)
    return {
        f"{cell}/ndcg@10": float(np.mean(found.own)),
        f"{cell}/ndcg@10_shuffled": float(np.mean(found.shuffled)),
        f"{cell}/gain": gain.mean,
        f"{cell}/gain_low": gain.low,
        f"{cell}/gain_high": gain.high,
        f"{cell}/keep_minus_discard": paired_gain(found.kept, found.discarded).mean,
    }


def _contrast(scored: dict[str, HeldOut]) -> Metrics:
    """The difference between two cells: descriptive, since they also train differently."""
    if "cosine" not in scored:
        return {}
    gain = paired_gain(scored[VERDICT_CELL].own, scored["cosine"].own)
    name = f"contrast/{VERDICT_CELL}_minus_cosine"
    return {name: gain.mean, f"{name}_low": gain.low, f"{name}_high": gain.high}


def _draw_cells(config: Config, scored: dict[str, HeldOut], metrics: Metrics) -> Figure:
    import numpy as np

    figure, axes = drawing(10, 4)
    places = np.arange(len(scored))
    ways = {
        "own": "its own cell",
        "shuffled": "magnitudes shuffled",
        "discarded": "norms discarded",
    }
    for offset, (way, label) in zip((-0.27, 0, 0.27), ways.items(), strict=True):
        values = [getattr(found, way) for found in scored.values()]
        errors = [_half_interval(v) for v in values]
        axes.bar(places + offset, np.mean(values, 1), 0.25, yerr=errors, capsize=2, label=label)
    axes.set_xticks(places, list(scored))
    axes.set_ylabel("held-out nDCG@10, 95 % t-interval")
    found = "detected" if metrics["planted/detected"] else "not detected"
    axes.set_title(
        f"Relevance carried by {config.carrier}, {config.task}, {config.counts} counts: "
        f"magnitude signal {found}"
    )
    figure.legend(title="scored with", fontsize="small", loc="outside right upper")
    return figure


def _half_interval(values: Sequence[float]) -> float:
    return (gain := paired_gain(values, [0.0] * len(values))).high - gain.mean


def _draw_counter(counts: np.ndarray, norms: dict[str, np.ndarray]) -> Figure:
    figure, axes = drawing(6, 4)
    for cell, values in norms.items():
        axes.plot(counts, values, "o", ms=4, alpha=0.6, label=cell)
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:.2g}")
    axes.set_xlabel("relevant queries of a document")
    axes.set_ylabel("norm of its free vector, from 1")
    axes.set_title("The relevance counter")
    axes.legend(fontsize="small")
    return figure


if __name__ == "__main__":
    main(Config, run, __doc__)
