"""What a study's folder says, as plain values for the page, the figures and the tables. No torch.

A study falls into panels, one per part and script: what is compared stands in one panel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from offsphere.analysis.conditions import (
    Steps,
    all_steps,
    corner_of,
    numbers,
    parts_of,
    text_of,
    varying_settings,
)
from offsphere.analysis.foreign import check_seeds, read_json, text_in, tuning_choices
from offsphere.analysis.panels import Panel, read_panel
from offsphere.analysis.pictures import Picture, drawings, picture_of
from offsphere.analysis.readings import mean_of
from offsphere.analysis.tables import ORIGIN, StudyTables, curves_table
from offsphere.analysis.tasks import tasks_of
from offsphere.analysis.words import plain
from offsphere.estimate import Estimate
from offsphere.run import safe_yaml
from offsphere.share import CONFIGS

if TYPE_CHECKING:
    import pandas as pd
    from numpy import ndarray as Array

MADE_WITH = {"offsphere": "offsphere", "python": "Python", "platform": "Platform", "cpu": "CPU"}
TOLD_BY_THE_TASK = ("task ", "direction ")


@dataclass(frozen=True)
class Unfinished:
    run: str
    status: str
    seed: str
    settings: str
    reason: str


@dataclass(frozen=True)
class Study:
    name: str
    question: str
    panels: list[Panel]
    runs: int
    finished: int
    unfinished: list[Unfinished]
    tuning: list[dict[str, Any]]
    provenance: dict[str, list[str]]
    """What the runs recorded about where they come from; several values where they differ."""
    hours: float
    pictures: list[list[Picture]]
    """Per panel the figures that its run drew."""
    published: bool = True
    """Whether figures of papers stand beside its own."""


class Comparison(NamedTuple):
    """A cell against cosine in one task, as the logarithm of a ratio."""

    kind: str
    task: str
    about: str
    """Study, part and context; or encoder, training and data of the paper."""
    setting: str
    """What tells it from others of its task: the rest of the context, or the paper's encoder."""
    source: str
    """ours, or the paper."""
    metric: str
    cell: str
    ratio: Estimate
    runs: frozenset[str] = frozenset()
    """Ours: the cell's."""
    steps: Steps = None
    """Ours: the fewest and the most optimiser steps of the two cells' runs."""
    at_floor: bool = False
    """Most runs of the two cells are not above their untrained model."""


def read_study(
    study: str | Path | StudyTables, claimed: Sequence[str] = (), *, published: bool = True
) -> Study:
    """Everything the page shows about a study's folder; `claimed` metrics are always among it."""
    tables = study if isinstance(study, StudyTables) else StudyTables(study)
    folder, runs = tables.folder, tables.runs
    if runs.empty:
        raise ValueError(f"{folder} holds no runs: expected runs.csv or run folders there.")
    for column in ("status", "script", "seed"):
        if column not in runs.columns:
            raise ValueError(
                f"The runs of {folder} have no {column!r}: the table is not one of a study."
            )
    check_seeds(runs.to_dict(orient="records"), str(folder))
    about = study_file(folder)
    if "eval_split" in runs.columns:
        runs = runs.loc[[text_of(x) != "validation" for x in runs["eval_split"]]]
    curves, examples = curves_table(folder), tables.examples
    parts, tasks = parts_of(runs), tasks_of(folder)
    panels = [
        read_panel(name, script, tasks, part, about.get("metric"), claimed, curves, examples)
        for (name, script), part in parts
    ]
    if not published:
        panels = [replace(panel, reference=[]) for panel in panels]
    pictures = [[picture_of(each) for each in drawings(folder, part)] for _, part in parts]
    once = runs.drop_duplicates(subset="run")
    timed = "run/seconds" in once.columns
    seconds = numbers(once.loc[:, "run/seconds"]) if timed else np.zeros(0)
    return Study(
        name=folder.name,
        question=str(about.get("describe") or ""),
        panels=panels,
        runs=len(once),
        finished=sum(status == "finished" for status in once["status"]),
        unfinished=_unfinished(once),
        tuning=tuning_choices(folder / "tuning.json"),
        provenance=provenance_of(once),
        hours=float(np.nansum(seconds)) / 3600,
        pictures=pictures,
        published=published,
    )


def study_file(folder: Path) -> dict[str, Any]:
    """`describe` and `metric`, as recorded with the study or else from its file in configs."""
    file = folder / "plan.json"
    if recorded := read_json(file):
        return {key: text_in(recorded, key, file) for key in ("describe", "metric")}
    file = CONFIGS / "studies" / f"{folder.name.removesuffix('_smoke')}.yaml"
    found = safe_yaml.load(file.read_text(encoding="utf-8"), file) if file.exists() else {}
    return found if isinstance(found, dict) else {}


def provenance_of(runs: pd.DataFrame) -> dict[str, list[str]]:
    """Seeds, scripts, commits, data and versions, as the table of runs has them."""
    found: dict[str, list[str]] = {
        "Seeds": [str(x) for x in sorted({int(x) for x in runs["seed"].dropna()})],
        "Scripts": sorted({str(x) for x in runs["script"].dropna()}),
    }
    if "commit" in runs.columns:
        dirty = runs["dirty"] if "dirty" in runs.columns else [False] * len(runs)
        notes = [" with uncommitted changes" if text_of(x) == "true" else "" for x in dirty]
        commits = zip(map(text_of, runs["commit"]), notes, strict=True)
        found["Commit"] = sorted({f"{c[:12]}{note}" for c, note in commits if c != "none"})
    if "data_hash" in runs.columns:
        found["Data record"] = sorted({str(x) for x in runs["data_hash"].dropna()})
    origins = {
        name: [x for x in runs[f"run/{name}"] if text_of(x) != "none"]
        for name in ORIGIN
        if f"run/{name}" in runs.columns
    }
    made: dict[str, set[str]] = {}
    for split, about in _entries(origins.pop("data", [])):
        made.setdefault(f"Data, {split}", set()).add(_spell_data(about))
    versions = _entries(origins.pop("versions", []))
    for name, texts in origins.items():
        made[MADE_WITH[name]] = {str(text) for text in texts}
    for package, version in versions:
        made.setdefault(package, set()).add(str(version))
    found |= {name: sorted(values) for name, values in made.items()}
    return {name: values for name, values in found.items() if values}


def compare_with_cosine(studies: Sequence[Study], *, published: bool = True) -> list[Comparison]:
    """Every cell's log ratio to cosine in every task: our runs, then the papers' tables."""
    panels = [(study, panel) for study in studies for panel in study.panels]
    ours = [found for study, panel in panels for found in _compare_in_panel(study, panel)]
    return ours + (published_comparisons() if published else [])


def _tunes_cells(study: Study, panel: Panel) -> bool:
    """Whether each cell has settings of its own here, chosen on validation data."""
    targets = [target for choice in study.tuning for target in choice.get("for", [])]
    return any("cell" in x and x.get("part", panel.name) == panel.name for x in targets)


def _compare_in_panel(study: Study, panel: Panel) -> Iterator[Comparison]:
    if panel.treatment != "cell" or panel.primary is None:
        return
    for context, role in enumerate(panel.roles):
        metric = role.trained if role.trained in panel.metrics else panel.primary
        values = np.array(panel.metrics[metric].values)
        places = {
            panel.corner(condition.level): place
            for place, condition in enumerate(panel.conditions)
            if condition.context == context
        }
        name = panel.contexts[context]
        about = " · ".join(filter(None, [study.name, panel.name, plain(name)]))
        told = [x for x in name.split(", ") if x and not x.startswith(TOLD_BY_THE_TASK)]
        setting = plain(", ".join([*told, *["tuned"] * _tunes_cells(study, panel)]))
        for cell, ratio in _log_ratios({cell: values[place] for cell, place in places.items()}):
            both = [panel.at_floor[places[each]] for each in (cell, "cosine")]
            steps = all_steps(panel.steps[places[each]] for each in (cell, "cosine"))
            yield Comparison(
                role.kind,
                role.task,
                about,
                setting,
                "ours",
                metric,
                cell,
                ratio,
                runs=frozenset(panel.conditions[places[cell]].runs),
                steps=steps,
                at_floor=2 * sum(x.runs for x in both) > sum(x.measured for x in both),
            )


def published_comparisons() -> list[Comparison]:
    """The papers' own log ratios, without intervals; none where the tables are not installed."""
    from offsphere.analysis.published import published

    try:
        retrieval, scratch, sts, clip = (
            published(f"unit_hypersphere_table{number}") for number in ("01", "02", "05", "06")
        )
    except FileNotFoundError:
        return []
    clip = clip.loc[clip["metric"] == "recall@1_image_to_text"]
    clip = clip.loc[(clip["setting"] == "symmetric loss") & (clip["scored_with"] == clip["cell"])]
    found = []
    for table, dataset, number, kind, task in (
        (retrieval, "BEIR(14)", 1, "asymmetric", "Query and document"),
        (scratch, "BEIR(14)", 2, "asymmetric", "Query and document, from scratch"),
        (clip, "MS-COCO", 6, "symmetric", "Image and text, two-way loss"),
        (sts, "STS-B test", 5, "symmetric", "Two sentences, graded similarity"),
    ):
        rows = table.loc[(table["dataset"] == dataset) & (table["cell"] != "")]
        for key, part in rows.groupby(["encoder", "setting"], sort=False):
            encoder, setting = (str(x) for x in key)  # pyright: ignore[reportGeneralTypeIssues]
            by_cell = dict(zip(map(corner_of, part["cell"]), part["value"], strict=True))
            about = f"{encoder}, {setting}, {dataset}"
            source = f"2602.09229v1, table {number}"
            metric = str(part["metric"].iloc[0])
            for cell, value in by_cell.items():
                if cell not in (None, "cosine"):
                    ratio = math.log(value / by_cell["cosine"])
                    exact = Estimate(ratio, math.nan, math.nan, 0)
                    found.append(
                        Comparison(kind, task, about, encoder, source, metric, cell, exact)
                    )
    return found


def _log_ratios(by_cell: Mapping[str | None, Array]) -> list[tuple[str, Estimate]]:
    cosine = by_cell.get("cosine")
    if cosine is None:
        return []
    found = []
    for cell, values in by_cell.items():
        if cell in (None, "cosine"):
            continue
        both = np.isfinite(values) & np.isfinite(cosine)
        # A cell that collapsed has no log ratio; without its bad seeds it would look better.
        if both.any() and (np.minimum(values, cosine)[both] > 0).all():
            found.append((cell, mean_of(np.log(values[both] / cosine[both]))))
    return found


def _unfinished(runs: pd.DataFrame) -> list[Unfinished]:
    found = []
    shown = [c for c in ("part", "arm", *varying_settings(runs)) if c in runs.columns]
    for row in runs.loc[runs["status"] != "finished"].to_dict(orient="records"):
        settings = [(c, text_of(row[c])) for c in dict.fromkeys(shown)]
        found.append(
            Unfinished(
                run=str(row["run"]),
                status=text_of(row["status"]),
                seed=text_of(row["seed"]),
                settings=", ".join(f"{c} {value}" for c, value in settings if value != "none"),
                reason="" if text_of(row.get("reason")) == "none" else str(row["reason"]),
            )
        )
    return found


def _entries(recorded: Sequence[Any]) -> list[tuple[str, Any]]:
    """The keys and values of every mapping among what the runs recorded."""
    return [entry for each in recorded if isinstance(each, dict) for entry in each.items()]


def _spell_data(about: Any) -> str:
    if not isinstance(about, dict):
        return text_of(about)
    return ", ".join(f"{key} {text_of(value)}" for key, value in about.items() if value)
