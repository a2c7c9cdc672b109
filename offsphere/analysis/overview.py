"""Three pictures of the answer: symmetry, the variance term, the squares of cells. No torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from offsphere.analysis.digest import Comparison, Study
from offsphere.analysis.figures import STYLE, new_figure, save
from offsphere.analysis.panels import Panel, all_steps, steps_text
from offsphere.estimate import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KINDS = {"asymmetric": "different roles", "symmetric": "interchangeable", "control": "control"}
SQUARE = (("cosine", "qnorm"), ("dnorm", "dot"))
CORNERS = {"qnorm", "dnorm", "dot"}
PUBLISHED_ENCODER = "contriever"
PER_LINE = 4
SPREAD = "train/negative_variance"
SQUARED = ("Two views of an image", "Image and text", "Query and document", "Two halves")


def write_overview(
    studies: Sequence[Study], comparisons: Sequence[Comparison], folder: Path
) -> list[Path]:
    """Write the pictures that the studies have data for; the files."""
    import matplotlib as mpl

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with mpl.rc_context(STYLE):
        for name, figure in (
            ("symmetry", draw_symmetry(comparisons)),
            ("variance", draw_variance(studies)),
            ("squares", draw_squares(comparisons)),
        ):
            if figure is not None:
                written += save(figure, folder / name)
    return written


def draw_symmetry(comparisons: Sequence[Comparison]) -> Figure | None:
    """Dot over cosine in every task, by whether its two sides are interchangeable."""
    dots = [c for c in comparisons if c.cell == "dot" and c.kind in KINDS]
    chosen = _told_apart(_once(dots))
    if not any(c.source == "ours" for c in chosen):
        return None
    labels, places = list[str](), dict[int, Comparison]()
    for kind, title in KINDS.items():
        of_kind = [c for c in chosen if c.kind == kind]
        labels += [title] if of_kind else []
        for task in dict.fromkeys(c.task for c in of_kind):
            for c in (c for c in of_kind if c.task == task):
                places[len(labels)] = c
                labels.append(f"{task} ({_origin(c)})")
    figure = new_figure(9.0, 1.2 + 0.27 * len(labels))
    axis = figure.subplots()
    for row, c in places.items():
        ours = c.source == "ours"
        _whisker(axis, c.ratio, row, "#bf4a0a" if ours else "#59626c", filled=ours)
    axis.axvline(0, color="#575e67", linestyle=":", linewidth=1)
    axis.set_yticks(range(len(labels)), labels)
    for row, label in enumerate(axis.get_yticklabels()):
        label.set_fontweight("normal" if row in places else "bold")
    axis.tick_params(axis="y", length=0)
    axis.set_ylim(len(labels) - 0.5, -0.5)
    axis.grid(visible=False, axis="y")
    settled = [c.ratio for c in chosen if c.ratio.n > 2]
    ends = [c.ratio.value for c in chosen] + [end for x in settled for end in (x.low, x.high)]
    axis.set_xlim(min(ends) - 0.05, max(*ends, 0.0) + 0.05)
    axis.set_title("Keeping both magnitudes (dot) over discarding them (cosine)")
    axis.set_xlabel(
        "ln(dot / cosine): left of 0 magnitude hurts, right of it helps\n"
        "filled: ours, with 95 % intervals; hollow: published, without"
    )
    return figure


def draw_variance(studies: Sequence[Study]) -> Figure | None:
    """What the variance term gains, and what it does to the negatives, by batch size."""
    panels = [p for s in studies for p in s.panels if _by_batch_size(p)]
    if not panels:
        return None
    first = panels[0]
    numbers = sorted(_contexts(first))
    figure = new_figure(7.2, 2.7)
    gain, variance = figure.subplots(1, 2)
    counts = set[int]()
    for level, name in enumerate(first.levels):
        places = [(x, *place) for x in numbers for place in _most_seeds(panels, name, x)]
        colour = "#bf4a0a" if level != first.baseline else "#59626c"
        gains = [(x, panel.metrics[str(panel.primary)].difference[at]) for x, panel, at in places]
        _line(gain, [(x, m) for x, m in gains if m is not None], colour)
        counts |= {m.n for _, m in gains if m is not None}
        spreads = [(x, panel.metrics.get(SPREAD), at) for x, panel, at in places]
        points = [(x, metric.summary[at]) for x, metric, at in spreads if metric is not None]
        _line(variance, points, colour, f"weight {name}")
    gain.axhline(0, color="#575e67", linestyle=":", linewidth=1)
    seeds = " to ".join(str(n) for n in sorted({min(counts), max(counts)}))
    steps = steps_text(all_steps(step for panel in panels for step in panel.steps))
    gain.set_title(f"gain in {first.primary}, {seeds} seeds" + (f",\n{steps}" if steps else ""))
    variance.set_title("variance of negatives")
    variance.set_yscale("log")
    variance.yaxis.set_major_formatter("{x:g}")
    variance.yaxis.set_minor_formatter("{x:g}")
    variance.legend()
    for axis in (gain, variance):
        axis.set_xscale("log", base=2)
        axis.set_xticks(numbers, [f"{x:g}" for x in numbers])
        axis.set_xlabel("batch size")
    return figure


def draw_squares(comparisons: Sequence[Comparison]) -> Figure | None:
    """The square of cells in every task, from its most seeds, beside published retrieval."""
    squares: dict[tuple[str, str], dict[str, Comparison]] = {}
    for c in comparisons:
        published = c.setting == PUBLISHED_ENCODER and c.task.startswith("Query and document")
        if published or (c.source == "ours" and c.task.startswith(SQUARED)):
            squares.setdefault((c.task, c.where), {})[c.cell] = c
    best: dict[tuple[str, str], dict[str, Comparison]] = {}
    for cells in squares.values():
        if cells.keys() >= CORNERS:
            key = cells["dot"].task, cells["dot"].source
            best[key] = max(best.get(key, {}), cells, key=_seeds)
    if all(source != "ours" for _, source in best):
        return None
    found = sorted(best.values(), key=lambda cells: _place_of(cells["dot"]))
    largest = max(abs(cells[cell].ratio.value) for cells in found for cell in CORNERS)
    lines = math.ceil(len(found) / PER_LINE)
    figure = new_figure(2.6 * min(len(found), PER_LINE), 2.7 * lines)
    axes = list(figure.subplots(lines, min(len(found), PER_LINE), squeeze=False).flat)
    for axis in axes[len(found) :]:
        axis.set_axis_off()
    for axis, cells in zip(axes, found, strict=False):
        ratios = {cell: c.ratio for cell, c in cells.items()}
        _square(axis, {"cosine": Estimate(0.0, math.nan, math.nan, 0), **ratios}, largest)
        task = cells["dot"].task.replace(", ", ",\n")
        axis.set_title(f"{task}\n{_origin(cells['dot'])}", fontsize=7.5)
    figure.supxlabel("ln(cell / cosine); [95 % interval over seeds]", fontsize=8)
    return figure


def _place_of(c: Comparison) -> tuple[int, str, str]:
    """Images, image and text, text; a published square stands behind ours of its task."""
    place = next(i for i, start in enumerate(SQUARED) if c.task.startswith(start))
    return place, c.task, "" if c.source == "ours" else c.source


def _square(axis: Axes, cells: Mapping[str, Estimate], largest: float) -> None:
    """Four cells by which norm is kept; the tint is the log ratio to cosine."""
    means = [[cells[cell].value for cell in row] for row in SQUARE]
    # The darkest tint still carries black text.
    axis.imshow(means, cmap="PuOr_r", vmin=-2 * largest, vmax=2 * largest)
    for i, row in enumerate(SQUARE):
        for j, cell in enumerate(row):
            x = cells[cell]
            ends = "" if math.isnan(x.low) else f"\n[{x.low:+.3f}, {x.high:+.3f}]"
            axis.text(j, i, f"{cell}\n{x.value:+.3f}{ends}", ha="center", va="center", fontsize=6.5)
    axis.set_xticks([0, 1], ["right discarded", "right kept"], fontsize=7)
    axis.set_yticks([0, 1], ["left\ndiscarded", "left\nkept"], fontsize=7)
    axis.grid(visible=False)


def _once(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """What several studies or parts compare stands once, with the most seeds."""
    kept: list[Comparison] = []
    for c in sorted(comparisons, key=lambda c: -len(c.runs)):
        if not any(_repeats(c, other) for other in kept):
            kept.append(c)
    return [c for c in comparisons if c in kept]


def _repeats(c: Comparison, other: Comparison) -> bool:
    """Whether the runs are among the other's, or differ only in what else they measured."""
    same = (c.task, c.setting, c.ratio) == (other.task, other.setting, other.ratio)
    return bool(c.runs) and (c.runs <= other.runs or same)


def _told_apart(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Where the setting does not tell two comparisons of a task apart, study and part do."""
    names = Counter((c.source, c.task, c.setting) for c in comparisons)
    return [
        c._replace(setting=c.where) if names[c.source, c.task, c.setting] > 1 else c
        for c in comparisons
    ]


def _most_seeds(panels: Sequence[Panel], level: str, number: float) -> list[tuple[Panel, int]]:
    """The first panel's condition, or the one of another part that repeats it with more runs."""
    best: list[tuple[Panel, int]] = []
    for panel in panels:
        context = _contexts(panel).get(number)
        if context is None or level not in panel.levels:
            continue
        at = panel.condition(context, panel.levels.index(level))
        if at is not None and all(_runs(*place) < _runs(panel, at) for place in best):
            best = [(panel, at)]
    return best


def _contexts(panel: Panel) -> dict[float, int]:
    return dict(panel.along.groups[0][1]) if panel.along else {}


def _runs(panel: Panel, place: int) -> set[str]:
    return set(panel.conditions[place].runs)


def _seeds(cells: Mapping[str, Comparison]) -> float:
    """The fewest seeds of a square's cells; a published square counts as more than none."""
    return min((c.ratio.n + 0.5 for c in cells.values()), default=0.0)


def _origin(c: Comparison) -> str:
    """Where a comparison comes from, in few words."""
    seeds = f"{c.ratio.n} seed" + "s" * (c.ratio.n != 1)
    origin = seeds if c.source == "ours" else c.source.rpartition(", ")[2]
    floor = "at the floor" if c.at_floor else ""
    return ", ".join(filter(None, [c.setting, origin, steps_text(c.steps), floor]))


def _by_batch_size(panel: Panel) -> bool:
    along = panel.along
    return (
        along is not None
        and not along.of_levels
        and along.factor == "batch_size"
        and panel.treatment == "variance_weight"
        and panel.primary is not None
    )


def _whisker(axis: Axes, x: Estimate, row: float, colour: str, *, filled: bool) -> None:
    if not math.isnan(x.low):
        axis.plot([x.low, x.high], [row, row], color=colour, linewidth=1.6)
    face = colour if filled else "white"
    axis.plot([x.value], [row], marker="s", color=colour, markerfacecolor=face, markersize=5)


def _line(
    axis: Axes, points: Sequence[tuple[float, Estimate]], colour: str, label: str | None = None
) -> None:
    at = [x for x, _ in points]
    axis.plot(at, [m.value for _, m in points], color=colour, marker="o", markersize=4, label=label)
    axis.fill_between(
        at, [m.low for _, m in points], [m.high for _, m in points], color=colour, alpha=0.18
    )
