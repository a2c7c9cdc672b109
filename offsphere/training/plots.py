"""A picture of one run: loss, accuracy, norms, negatives and rates over the samples seen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offsphere.run.files import atomic_write
from offsphere.run.record import RunFolder

PANELS = (  # title, what its axis measures, series of (metric, label), logarithmic
    ("loss", "nats", (("train/loss", "total"), ("train/contrastive", "contrastive")), False),
    (
        "length of the raw embeddings (5, 50, 95 %)",
        "norm",
        (("train/norm_left_q50", "left"), ("train/norm_right_q50", "right")),
        True,
    ),
    (
        "spread of the lengths",
        "norm CV (standard deviation / mean)",
        (("train/norm_left_cv", "left"), ("train/norm_right_cv", "right")),
        False,
    ),
    (
        "variance of the negatives' cosine",
        "variance",
        (("train/negative_variance", "variance"),),
        True,
    ),
    (
        "alignment and uniformity of the directions",
        "squared distance; log mean potential",
        (("train/alignment", "alignment"), ("train/uniformity", "uniformity")),
        False,
    ),
    ("gradient", "norm, before clipping", (("train/gradient_norm", "gradient norm"),), True),
    ("learning rate", "per step", (("train/lr", "learning rate"),), False),
)
MEASURED = {  # what a lane may measure on its evaluation split: how it is called here
    "test/knn": "kNN",
    "test/probe": "probe",
    "test/i2t_r1": "R@1 image to text",
    "test/t2i_r1": "R@1 text to image",
    "test/ndcg10": "nDCG@10",
    "test/spearman": "Spearman",
}


def plot_run(folder: RunFolder, metrics: Mapping[str, Any] | None = None) -> None:
    """Write run.png into the run's folder; `metrics` are those of the run's end."""
    from matplotlib.figure import Figure

    steps = folder.steps()
    rows = [row for row in steps if "train/loss" in row]
    samples = [row["samples"] for row in rows]
    figure = Figure(figsize=(16, 6.5), layout="constrained")
    figure.suptitle(folder.path.name)
    grid = list(figure.subplots(2, 4).flat)
    for axes, (title, unit, series, logarithmic) in zip(grid, PANELS, strict=False):
        for metric, label in series:
            if metric not in rows[0]:  # a regression has no contrastive loss
                continue
            axes.plot(samples, [row[metric] for row in rows], label=label)
            if metric.endswith("_q50"):
                low, high = (metric.replace("q50", q) for q in ("q05", "q95"))
                bands = ([row[q] for row in rows] for q in (low, high))
                axes.fill_between(samples, *bands, alpha=0.2)
        axes.set_title(title)
        axes.set_ylabel(unit)
        axes.set_xlabel("samples seen")
        if logarithmic:
            axes.set_yscale("log")
        if len(series) > 1:
            axes.legend()
    curves = measured(steps, metrics or {}, samples[-1])
    grid[-1].set_visible(bool(curves))
    for label, (seen, values) in curves.items():
        grid[-1].plot(seen, values, marker="o", label=label)
    if curves:
        grid[-1].set(title="measured on held-out data", ylabel="share or score, 0 to 1")
        grid[-1].set_xlabel("samples seen")
        grid[-1].legend()
    atomic_write(folder.path / "run.png", lambda file: figure.savefig(file, format="png", dpi=110))


def measured(
    steps: list[dict[str, Any]], metrics: Mapping[str, Any], end: int
) -> dict[str, tuple[list[int], list[float]]]:
    """Each measured score over the samples seen: untrained, on the way, and at the end."""
    curves = {}
    for metric, label in MEASURED.items():
        points = [(0, metrics.get(metric.replace("test/", "untrained/")))]
        points += [(row["samples"], row[metric]) for row in steps if metric in row]
        points.append((end, metrics.get(metric)))
        known = [(seen, value) for seen, value in points if value is not None]
        if known:
            curves[label] = [x for x, _ in known], [y for _, y in known]
    return curves
