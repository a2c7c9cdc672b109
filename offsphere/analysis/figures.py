"""The report's charts as PDF, PNG and SVG for papers, for each part's own metric. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offsphere.analysis.digest import Study
from offsphere.analysis.panels import (
    Histogram,
    Metric,
    Panel,
    all_steps,
    file_name,
    steps_text,
)
from offsphere.analysis.words import plain, spoken, words_of
from offsphere.estimate import Estimate
from offsphere.names import CELLS
from offsphere.run.files import atomic_write
from offsphere.run.progress import track

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = {
    "circle": "o", "triangle-up": "^", "triangle-down": "v", "square": "s", "diamond": "D",
    "cross": "P",
}  # fmt: skip
CELL_LOOKS = {name: (row.colour, MARKERS[row.marker]) for name, row in CELLS.items()}
LEVEL_LOOKS = (
    ("#59626c", "o"),
    ("#0067a5", "^"),
    ("#bf4a0a", "v"),
    ("#00785a", "s"),
    ("#a3477f", "D"),
    ("#806000", "o"),
    ("#5b4fb3", "^"),
    ("#9a2f3c", "v"),
)
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": "#575e67",
    "axes.labelcolor": "#575e67",
    "xtick.color": "#575e67",
    "ytick.color": "#575e67",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e9ebed",
    "legend.frameon": False,
    # A dollar sign in a run's text is a dollar sign; the same figure has the same bytes.
    "text.parse_math": False,
    "svg.fonttype": "none",
    # Letters stay letters: publishers refuse PDF with outlines of type 3.
    "pdf.fonttype": 42,
    "svg.hashsalt": "offsphere",
}
VARIANCE = "train/negative_variance"
DPI = 140
WIDTH = 3.6


def write_figures(study: Study, folder: Path) -> list[Path]:
    """Write every figure that a study's parts have data for; the files."""
    import matplotlib as mpl

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with mpl.rc_context(STYLE):
        drawn = track(enumerate(study.panels), len(study.panels), f"Drawing {study.name}", "parts")
        for place, panel in drawn:
            if panel.primary is None or panel.treatment is None:
                continue
            for kind, draw in FIGURES.items():
                figure = draw(panel)
                if figure is not None:
                    if steps := steps_text(all_steps(panel.steps)):
                        figure.suptitle(f"after {steps}", fontsize=7.5)
                    written += save(figure, folder / f"{file_name(panel, place)}-{kind}")
    return written


def draw_results(panel: Panel) -> Figure | None:
    """Mean and interval of every condition, and its paired difference to the baseline."""
    metric = _own(panel)
    figure = new_figure(2 * WIDTH, 0.9 + 0.24 * (len(panel.conditions) + len(panel.contexts)))
    left, right = figure.subplots(1, 2, sharey=True)
    ticks: list[tuple[int, str]] = []
    row = 0
    for context, title in enumerate(panel.contexts):
        if title:
            ticks.append((row, plain(title)))
            row += 1
        for place, condition in enumerate(panel.conditions):
            if condition.context != context:
                continue
            ticks.append((row, f"   {panel.levels[condition.level]}"))
            _whisker(left, metric.summary[place], row, _look(panel, condition.level))
            difference = metric.difference[place]
            if difference is not None:
                _whisker(right, difference, row, _look(panel, condition.level))
            row += 1
    left.set_yticks([at for at, _ in ticks], [text for _, text in ticks])
    for label in left.get_yticklabels():
        label.set_horizontalalignment("left")
    left.tick_params(axis="y", length=0, pad=8 + 5.2 * max(len(text) for _, text in ticks))
    right.tick_params(axis="y", length=0)
    left.set_ylim(row - 0.5, -0.5)
    for axis in (left, right):
        axis.grid(visible=False, axis="y")
    left.set(title="mean, 95 % interval", xlabel=metric.name)
    right.axvline(0, color="#575e67", linestyle=":", linewidth=1)
    base = panel.levels[panel.baseline or 0]
    unit = words_of(str(panel.primary)).unit.strip()
    right.set(title=f"paired difference to {base}", xlabel=unit or f"change of {metric.name}")
    return figure


def draw_square(panel: Panel) -> Figure | None:
    """The four corner cells by which norm is kept, one square per context."""
    metric = _own(panel)
    if not metric.squares:
        return None
    levels = {panel.corner(level): level for level in range(len(panel.levels))}
    axes = _row_of_axes(len(metric.squares), 2.6)
    for axis, context in zip(axes, metric.squares, strict=True):
        cells = [[levels["cosine"], levels["qnorm"]], [levels["dnorm"], levels["dot"]]]
        found = [[metric.summary[_place(panel, context, x)] for x in row] for row in cells]
        means = [[x.value for x in row] for row in found]
        axis.imshow(means, cmap=_tints(), interpolation="nearest")
        for i, row in enumerate(found):
            for j, x in enumerate(row):
                ends = f"[{x.low:.{metric.decimals}f}, {x.high:.{metric.decimals}f}]"
                text = f"{panel.levels[cells[i][j]]}\n{x.value:.{metric.decimals}f}\n{ends}"
                axis.text(j, i, text, ha="center", va="center", fontsize=8)
        axis.set_xticks([0, 1], ["right discarded", "right kept"])
        axis.set_yticks([0, 1], ["left\ndiscarded", "left\nkept"])
        axis.grid(visible=False)
        axis.set_title(plain(panel.contexts[context]) or metric.name)
    return axes[0].figure  # pyright: ignore[reportReturnType]


def draw_along(panel: Panel) -> Figure | None:
    """The metric, its gain and the negatives' variance against the batch size or such."""
    if panel.along is None:
        return None
    own, words = _own(panel), words_of(str(panel.primary))
    columns: list[tuple[str, Sequence[Estimate | None]]] = [(own.name, own.summary)]
    if not panel.along.of_levels:
        columns.append((f"gain{words.unit and ' in' + words.unit}, {words.text}", own.difference))
    if (variance := panel.metrics.get(VARIANCE)) is not None:
        columns.append((words_of(VARIANCE).titled, variance.summary))
    groups = panel.along.groups
    figure = new_figure(WIDTH * len(columns), 2.5 * len(groups))
    grid = figure.subplots(len(groups), len(columns), squeeze=False)
    for group, (name, members) in enumerate(groups):
        for axis, (title, values) in zip(grid[group], columns, strict=True):
            levels = [panel.baseline or 0] if panel.along.of_levels else range(len(panel.levels))
            for level in levels:
                pairs = [(group, m) if panel.along.of_levels else (m, level) for _, m in members]
                found = [
                    (i, values[p]) for i, p in enumerate(_places(panel, pairs)) if p is not None
                ]
                _line(axis, [(i, x) for i, x in found if x is not None], _look(panel, level))
            if title == words_of(VARIANCE).titled:
                _reference(axis, panel, [x for x, _ in members])
            if title.startswith("gain"):
                axis.axhline(0, color="#575e67", linestyle=":", linewidth=1)
            axis.set_xticks(range(len(members)), [f"{x:g}" for x, _ in members])
            axis.set_xlabel(plain(panel.along.factor))
            axis.set_title(f"{title}{', ' + plain(name) if name else ''}")
    if not panel.along.of_levels:
        _legend(grid[0][0], panel, published=True)
    return figure


def draw_curves(panel: Panel) -> Figure | None:
    """The first curve of the part over training, one plot per context."""
    if not panel.curves:
        return None
    name, lines = next(iter(panel.curves.items()))
    words = words_of(name)
    contexts = sorted({panel.conditions[line.condition].context for line in lines})
    axes = _row_of_axes(len(contexts), 2.5)
    for axis, context in zip(axes, contexts, strict=True):
        for line in lines:
            condition = panel.conditions[line.condition]
            if condition.context != context:
                continue
            colour, _ = _look(panel, condition.level)
            points = [point.times(words.scale) for point in line.points]
            axis.plot(line.x, [p.value for p in points], color=colour)
            low, high = ([getattr(p, end) for p in points] for end in ("low", "high"))
            axis.fill_between(line.x, low, high, color=colour, alpha=0.15, linewidth=0)
        axis.set_title(plain(panel.contexts[context]) or words.titled)
        over = "samples seen" if panel.curves_over == "samples" else "step"
        axis.set(xlabel=over, ylabel=words.titled)
    _legend(axes[0], panel)
    return axes[0].figure  # pyright: ignore[reportReturnType]


def draw_norms(panel: Panel) -> Figure | None:
    """Histograms of the test examples' norms, one plot per context and kind of norm."""
    from matplotlib.ticker import NullFormatter, StrMethodFormatter

    if not panel.histograms:
        return None
    axes = _row_of_axes(len(panel.histograms), 2.4)
    for axis, found in zip(axes, panel.histograms, strict=True):
        _steps(axis, panel, found)
        context, outcome = plain(panel.contexts[found.context]), plain(found.outcome)
        axis.set_title(f"{outcome}, {context}" if context else outcome)
        axis.set(xlabel=outcome, ylabel="share of examples")
        if found.logarithmic:
            axis.set_xscale("log")
            axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
            axis.xaxis.set_minor_formatter(NullFormatter())
    _legend(axes[0], panel)
    return axes[0].figure  # pyright: ignore[reportReturnType]


def draw_heat_maps(panel: Panel) -> Figure | None:
    """Trained with by scored with; cells that tie by construction share a column."""
    if not panel.heat_maps:
        return None
    axes = _row_of_axes(len(panel.heat_maps), 2.4)
    for axis, found in zip(axes, panel.heat_maps, strict=True):
        rows, words = sorted(found.rows), words_of(found.metric)
        values = [[x.value * words.scale for x in found.rows[level]] for level in rows]
        decimals = 3 if words.scale == 1 else 1
        axis.imshow(values, cmap=_tints(), aspect="auto", interpolation="nearest")
        for i, row in enumerate(values):
            for j, value in enumerate(row):
                text = "" if math.isnan(value) else f"{value:.{decimals}f}"
                axis.text(j, i, text, ha="center", va="center")
        axis.set_xticks(range(len(found.columns)), [" =\n".join(group) for group in found.columns])
        axis.set_yticks(range(len(rows)), [panel.levels[level] for level in rows])
        axis.grid(visible=False)
        context = plain(panel.contexts[found.context])
        axis.set_title(f"{words.titled}, {context}" if context else words.titled)
        axis.set(xlabel="scored with", ylabel="trained with")
    return axes[0].figure  # pyright: ignore[reportReturnType]


FIGURES: dict[str, Callable[[Panel], Any]] = {
    "results": draw_results,
    "square": draw_square,
    "along": draw_along,
    "curves": draw_curves,
    "norms": draw_norms,
    "scored": draw_heat_maps,
}


def save(figure: Figure, stem: Path) -> list[Path]:
    kinds: dict[str, dict[str, Any]] = {
        "png": {"dpi": DPI, "metadata": {"Software": None}},
        "svg": {"metadata": {"Date": None, "Creator": None}},
        "pdf": {"metadata": {"CreationDate": None, "Creator": None, "Producer": None}},
    }
    paths = []
    for kind, options in kinds.items():
        path = stem.with_name(f"{stem.name}.{kind}")
        atomic_write(path, lambda file, k=kind, o=options: figure.savefig(file, format=k, **o))
        paths.append(path)
    return paths


def new_figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _row_of_axes(count: int, height: float) -> list[Axes]:
    """Plots in rows of up to three."""
    across = min(count, 3)
    rows = -(-count // across)
    figure = new_figure(WIDTH * across, height * rows)
    axes = list(figure.subplots(rows, across, squeeze=False).flat)
    for spare in axes[count:]:
        spare.remove()
    return axes[:count]


def _own(panel: Panel) -> Metric:
    """The metric of a part, in words and points."""
    return spoken(panel.metrics[str(panel.primary)])


def _look(panel: Panel, level: int) -> tuple[str, str]:
    corner = panel.corner(level)
    return CELL_LOOKS[corner] if corner in CELL_LOOKS else LEVEL_LOOKS[level % len(LEVEL_LOOKS)]


def _place(panel: Panel, context: int, level: int) -> int:
    place = panel.condition(context, level)
    if place is None:
        raise ValueError(f"No run of {panel.levels[level]} in {panel.contexts[context]}.")
    return place


def _places(panel: Panel, pairs: Iterable[tuple[int, int]]) -> list[int | None]:
    return [panel.condition(context, level) for context, level in pairs]


def _whisker(axis: Axes, found: Estimate, row: float, look: tuple[str, str]) -> None:
    colour, marker = look
    if math.isfinite(found.low) and math.isfinite(found.high):
        axis.plot([found.low, found.high], [row, row], color=colour, linewidth=1.6)
    axis.plot([found.value], [row], color=colour, marker=marker, markersize=5)


def _line(axis: Axes, points: Sequence[tuple[int, Estimate]], look: tuple[str, str]) -> None:
    colour, marker = look
    if not points:
        return
    x, means = [i for i, _ in points], [found.value for _, found in points]
    axis.plot(x, means, color=colour, marker=marker, linewidth=1.2, markersize=5)
    for i, found in points:
        if math.isfinite(found.low) and math.isfinite(found.high):
            axis.plot([i, i], [found.low, found.high], color=colour, linewidth=1.6)


def _reference(axis: Axes, panel: Panel, numbers: Sequence[float]) -> None:
    """The published line at the numbers that the plot has, hollow."""
    for line in panel.reference:
        if line.level not in panel.levels:
            continue
        colour, marker = _look(panel, panel.levels.index(line.level))
        points = [(numbers.index(x), y) for x, y in line.points if x in numbers]
        if points:
            axis.plot(
                *zip(*points, strict=True),
                color=colour,
                marker=marker,
                markerfacecolor="white",
                linestyle="--",
                linewidth=1,
            )


def _legend(axis: Axes, panel: Panel, *, published: bool = False) -> None:
    """One legend for the whole figure, below the plots."""
    from matplotlib.lines import Line2D

    handles = []
    for level, name in enumerate(panel.levels):
        colour, marker = _look(panel, level)
        label = (
            name if panel.treatment in ("cell", "arm") else f"{plain(str(panel.treatment))} {name}"
        )
        handles.append(Line2D([], [], color=colour, marker=marker, label=label))
    if published and panel.reference:
        look: dict[str, Any] = {"color": "#575e67", "marker": "o", "linestyle": "--"}
        look["markerfacecolor"] = "white"
        names = "; ".join(line.name for line in panel.reference)
        handles.append(Line2D([], [], label=names, **look))
    axis.figure.legend(  # pyright: ignore[reportAttributeAccessIssue]
        handles=handles, loc="outside lower center", ncols=min(len(handles), 4), fontsize=8
    )


def _tints() -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("tints", ["#f4f8fb", "#9fc6e0"])


def _steps(axis: Axes, panel: Panel, found: Histogram) -> None:
    for level, shares in found.shares.items():
        colour, _ = _look(panel, level)
        axis.stairs(shares, found.edges, color=colour, linewidth=1.3)
