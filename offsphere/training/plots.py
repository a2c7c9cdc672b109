"""A picture of one run: loss, norms, negatives and learning rate over the samples seen."""

from __future__ import annotations

from offsphere.record import RunFolder, atomic_write

PANELS = (  # title, series of (metric, label), logarithmic
    ("loss", (("train/loss", "total"), ("train/contrastive", "contrastive")), False),
    (
        "embedding norm (5, 50, 95 %)",
        (("train/norm_left_q50", "left"), ("train/norm_right_q50", "right")),
        True,
    ),
    ("norm CV", (("train/norm_left_cv", "left"), ("train/norm_right_cv", "right")), False),
    ("negatives' cosine", (("train/negative_variance", "variance"),), True),
    (
        "alignment, uniformity",
        (("train/alignment", "alignment"), ("train/uniformity", "uniformity")),
        False,
    ),
    ("gradient norm", (("train/gradient_norm", "gradient norm"),), True),
)


def plot_run(folder: RunFolder) -> None:
    """Write run.png into the run's folder."""
    from matplotlib.figure import Figure

    rows = [row for row in folder.steps() if "train/loss" in row]
    samples = [row["samples"] for row in rows]
    figure = Figure(figsize=(12, 6.5), layout="constrained")
    figure.suptitle(folder.path.name)
    for axes, (title, series, logarithmic) in zip(figure.subplots(2, 3).flat, PANELS, strict=True):
        for metric, label in series:
            if metric not in rows[0]:  # a regression has no contrastive loss
                continue
            axes.plot(samples, [row[metric] for row in rows], label=label)
            if metric.endswith("_q50"):
                low, high = (metric.replace("q50", q) for q in ("q05", "q95"))
                bands = ([row[q] for row in rows] for q in (low, high))
                axes.fill_between(samples, *bands, alpha=0.2)
        axes.set_title(title)
        axes.set_xlabel("samples seen")
        if logarithmic:
            axes.set_yscale("log")
        if len(series) > 1:
            axes.legend()
    atomic_write(folder.path / "run.png", lambda file: figure.savefig(file, format="png", dpi=110))
