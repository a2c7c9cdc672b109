"""What pilot runs chose, by arm and combination of the grid: on validation data, other seeds."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass
from typing import Any

from offsphere.run.scripts import Scripts
from offsphere.study.made import metrics_of
from offsphere.study.plan import (
    Point,
    Settings,
    Study,
    Tune,
    pilot_run,
    pilot_settings,
)


@dataclass(frozen=True)
class Choice:
    """The candidates that one or more points share, what each scored, and the best one."""

    points: tuple[Point, ...]
    tune: Tune
    scores: tuple[dict[int, float], ...]
    """Per candidate: the metric of each pilot seed that finished."""

    @property
    def means(self) -> list[float]:
        """Per candidate; NaN unless every pilot finished with a number."""
        full = [len(scores) == len(self.tune.seeds) for scores in self.scores]
        return [
            statistics.fmean(scores.values()) if every else math.nan
            for scores, every in zip(self.scores, full, strict=True)
        ]

    @property
    def chosen(self) -> Settings | None:
        """The best candidate, the first of equals; None if all of them failed."""
        sign = 1 if self.tune.best == "max" else -1
        means = [-math.inf if math.isnan(mean) else sign * mean for mean in self.means]
        best = max(range(len(means)), key=means.__getitem__)
        return None if math.isnan(self.means[best]) else self.tune.candidates[best]


def choices_of(study: Study, scripts: Scripts, out: str) -> list[Choice]:
    """Every choice, as far as the pilot runs in the study's folder are finished."""
    choices = []
    for part in study.parts:
        tune, shared = part.tune, dict[str, list[Point]]()
        if tune is None:
            continue
        for point in part.points:
            pilot = json.dumps(tune.pilot(point), sort_keys=True, default=str)
            shared.setdefault(point.script + pilot, []).append(point)
        for points in shared.values():
            scores = tuple(
                _scores(study, scripts, out, tune, points[0], settings)
                for settings in pilot_settings(tune, points[0])
            )
            choices.append(Choice(tuple(points), tune, scores))
    return choices


def choice_for(choices: list[Choice], point: Point) -> Settings | None:
    """What was chosen for a point."""
    return next(choice.chosen for choice in choices if point in choice.points)


def tuning_record(choices: list[Choice]) -> dict[str, Any]:
    """The choices as tuning.json keeps them."""
    return {"choices": [_record(choice) for choice in choices]}


def _scores(
    study: Study, scripts: Scripts, out: str, tune: Tune, point: Point, settings: Settings
) -> dict[int, float]:
    scores = {}
    for seed in tune.seeds:
        path = pilot_run(study, scripts, out, point, settings, seed).path
        metrics = metrics_of(path)
        if metrics.get("run/status") != "finished":
            continue
        if tune.metric not in metrics:
            raise ValueError(
                f"{study.file}: tune: metric {tune.metric!r} is not measured by {point.script}: "
                f"expected one of {', '.join(sorted(metrics))}."
            )
        if math.isfinite(metrics[tune.metric]):
            scores[seed] = metrics[tune.metric]
    return scores


def _record(choice: Choice) -> dict[str, Any]:
    tune = choice.tune
    rows = zip(tune.candidates, choice.scores, choice.means, strict=True)
    return {
        "for": [point.labels | point.varying for point in choice.points],
        "metric": tune.metric,
        "best": tune.best,
        "eval_split": "validation",
        "seeds": list(tune.seeds),
        "pilot_settings": tune.fixed,
        "candidates": [
            {"settings": settings, "mean": mean, "scores": {str(k): v for k, v in scores.items()}}
            for settings, scores, mean in rows
        ],
        "chosen": choice.chosen,
    }
