"""A study file becomes a list of runs, every one of them checked before the first starts.

    describe: What the variance term does at small batch.
    metric: test/probe                 # the primary one
    script: train_simclr
    seeds: [0, 42, 1337]
    fixed: {data: cifar10, samples: 80000}
    grid: {cell: [cosine, dot], batch_size: [32, 256]}
    arms:                              # named settings, which win over fixed and grid
      calibrated: {}
      fixed: {scale: fixed}
    tune:                              # per arm and combination of the grid, on validation data
      {metric: test/probe, best: max, seeds: [100, 101], grid: {lr: [0.001, 0.003]}}
    smoke: {seeds: [0], fixed: {samples: 512}, grid: {cell: [dot]}, tune: null}

A value in a grid may be a mapping, which sets several settings together. `tune: fixed:` holds
settings of the pilot runs alone: combinations of the grid that differ only there share one choice.
`parts:` is a list of such mappings, each with a `name`; keys beside it are shared by all parts.
`smoke` is a small edition: `fixed` wins over everything, `grid` replaces axes (null drops one),
`arms` lists those to keep, `seeds` and `tune` replace. An arm may name a `script` of its own.
Imports no torch.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from offsphere.names import unknown
from offsphere.run import safe_yaml
from offsphere.run.config import from_dict
from offsphere.run.record import run_path
from offsphere.run.scripts import Script, Scripts
from offsphere.study.measures import check_metric

PART_KEYS = ("script", "fixed", "grid", "seeds", "arms", "tune", "smoke")
MOST_RUNS = 10_000
"""A grid beyond this is taken for a mistake: reading it alone would take minutes."""
STUDY_KEYS = ("describe", "metric", *PART_KEYS, "parts")
TUNE_KEYS = ("metric", "best", "seeds", "grid", "fixed")
SMOKE_KEYS = ("fixed", "grid", "seeds", "arms", "tune")
# What a study decides itself, and what is therefore not for its file.
RESERVED = {
    "seed": "list them under `seeds`",
    "study": "it is the file's name",
    "out": "use the flag --out",
    "resume": "a study always resumes",
    "progress": "a study shows its own",
    "data_root": "use the flag --data-root or OFFSPHERE_DATA",
    "allow_pipe": "only the flag --allow-pipe permits commands",
}
Settings = dict[str, Any]
Asked = tuple[int, str, Settings, dict[str, str]]
"""A run that is asked for: seed, script, settings and labels."""


@dataclass(frozen=True)
class Run:
    """One run of a study; its settings decide its folder."""

    name: str
    """The script's name."""
    script: Script
    settings: Any
    labels: tuple[dict[str, str], ...]
    """The part and arm it belongs to; several if the same settings occur more than once."""

    @property
    def path(self) -> Path:
        """The run's folder."""
        out, study = self.settings.out, self.settings.study
        return run_path(self.settings, script=self.name, out=out, study=study)


@dataclass(frozen=True)
class Point:
    """One arm at one combination of the grid: everything but the seed and what is tuned."""

    script: str
    settings: Settings
    varying: Settings
    """The settings that come from the grid and the arm."""
    labels: dict[str, str]


@dataclass(frozen=True)
class Tune:
    """A small grid that is searched for each point with pilot seeds on validation data."""

    metric: str
    best: str
    seeds: tuple[int, ...]
    candidates: tuple[Settings, ...]
    fixed: Settings

    def pilot(self, point: Point) -> Settings:
        """The settings of a point's pilot runs, before a candidate's."""
        return {**point.settings, **self.fixed, "eval_split": "validation"}


@dataclass(frozen=True)
class Part:
    points: tuple[Point, ...]
    seeds: tuple[int, ...]
    tune: Tune | None


@dataclass(frozen=True)
class Study:
    """A study file as it is understood: points, seeds and what is tuned."""

    name: str
    file: Path
    describe: str
    metric: str | None
    parts: tuple[Part, ...]


def load_study(file: str | Path, scripts: Scripts, *, smoke: bool = False) -> Study:
    """The study of a file; a faulty one is refused with the key and value at fault."""
    file = Path(file)
    try:
        study = _study(file, _read(file), smoke)
        for part in study.parts:
            _check_part(part, scripts)
        if study.metric is not None:
            named = (point.script for part in study.parts for point in part.points)
            check_metric("metric:", study.metric, named)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    return study


def main_runs(
    study: Study,
    scripts: Scripts,
    out: str,
    choose: Callable[[Tune, Point], Settings | None],
) -> list[Run]:
    """The runs of a study, one per settings, seed after seed.

    `choose` gives a tuned point its settings; a point without a choice has no runs.
    """
    found = []
    for part in study.parts:
        for point in part.points:
            chosen = choose(part.tune, point) if part.tune else {}
            if chosen is not None:
                settings = point.settings | chosen
                found += [(seed, point.script, settings, point.labels) for seed in part.seeds]
    # By seed: a study that is cut has all its cells for the first seeds.
    found.sort(key=lambda run: _seed_rank(study, run[0]))
    return _merge(found, scripts, out, study.name)


def equipped(runs: Iterable[Run], *, data_root: str | None, allow_pipe: bool) -> list[Run]:
    """The runs with what the command line says about this machine; their names stay."""
    said = {"data_root": data_root, "allow_pipe": allow_pipe}
    return [
        replace(run, settings=replace(run.settings, **_known(type(run.settings), said)))
        for run in runs
    ]


def pilot_runs(study: Study, scripts: Scripts, out: str) -> list[Run]:
    """The runs that tuning needs, in a folder of their own below the study's."""
    found = [
        (seed, point.script, settings, point.labels)
        for part in study.parts
        if part.tune
        for seed in part.tune.seeds
        for point in part.points
        for settings in pilot_settings(part.tune, point)
    ]
    return _merge(found, scripts, out, f"{study.name}/tuning")


def pilot_settings(tune: Tune, point: Point) -> Iterator[Settings]:
    """The settings of a point's pilot runs, one per candidate."""
    return (tune.pilot(point) | candidate for candidate in tune.candidates)


def pilot_run(
    study: Study, scripts: Scripts, out: str, point: Point, settings: Settings, seed: int
) -> Run:
    """One pilot run of a point."""
    asked = (seed, point.script, settings, point.labels)
    return _run(asked, scripts, out, f"{study.name}/tuning")


def _run(asked: Asked, scripts: Scripts, out: str, study: str) -> Run:
    seed, name, settings, labels = asked
    script = scripts[name]()
    checked = _checked(script.config_class, json.dumps(settings, default=str))
    return Run(name, script, replace(checked, seed=seed, study=study, out=out), (labels,))


@cache
def _checked(config_class: type, settings: str) -> Any:
    """The settings as the script reads them, with one thread and no progress bar.

    Kept, because flags are slow to read and only seeds differ between most runs.
    """
    ours = _known(config_class, {"threads": 1, "progress": False})
    return from_dict(config_class, ours | json.loads(settings))


def _known(config_class: type, given: Settings) -> Settings:
    """What a script knows of these settings."""
    return {f.name: given[f.name] for f in fields(config_class) if f.name in given}


def _seed_rank(study: Study, seed: int) -> int:
    return next(part.seeds.index(seed) for part in study.parts if seed in part.seeds)


def _merge(found: Sequence[Asked], scripts: Scripts, out: str, study: str) -> list[Run]:
    """One run per settings, with the labels of all that asked for it."""
    runs: dict[Path, Run] = {}
    for asked in found:
        run = _run(asked, scripts, out, study)
        same = runs.get(run.path, run)
        if same.name != run.name:
            raise ValueError(f"{run.name} and {same.name} give the same run folder {run.path}.")
        labels = [one for one in run.labels if one not in same.labels]
        runs[run.path] = replace(same, labels=(*same.labels, *labels))
    return list(runs.values())


def _read(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise ValueError(f"cannot be read: {reason}") from None
    return _is_mapping("a study", safe_yaml.load(text, ""), STUDY_KEYS)


def _study(file: Path, content: dict[str, Any], smoke: bool) -> Study:
    describe, metric = content.get("describe"), content.get("metric")
    for name, value in (("describe", describe), ("metric", metric)):
        if value is not None and not isinstance(value, str):
            raise ValueError(f"{name} must be a string, got {value!r}.")
    shared = {key: value for key, value in content.items() if key in PART_KEYS}
    if "parts" not in content:
        parts = [_part(shared, {}, smoke)]
    else:
        parts = _named_parts(content["parts"], shared, smoke)
    _refuse_vast("parts", sum(len(part.points) * len(part.seeds) for part in parts))
    name = f"{file.stem}_smoke" if smoke else file.stem
    return Study(name, file, describe or "", metric, tuple(parts))


def _named_parts(listed: Any, shared: dict[str, Any], smoke: bool) -> list[Part]:
    if not isinstance(listed, list) or not listed:
        raise ValueError(f"parts must be a list of mappings, each with a name, got {listed!r}.")
    parts: dict[str, Part] = {}
    for number, content in enumerate(listed, 1):
        part = dict(_is_mapping(f"part {number}", content, ("name", *PART_KEYS)))
        name = part.pop("name", None)
        if not isinstance(name, str) or name in parts:
            raise ValueError(f"part {number} needs a name of its own, got {name!r}.")
        try:
            parts[name] = _part(_joined(shared, part), {"part": name}, smoke)
        except ValueError as error:
            raise ValueError(f"part {name!r}: {error}") from None
    return list(parts.values())


def _joined(shared: Any, own: Any) -> Any:
    """A part's own value, null too; where both are mappings, entry by entry."""
    if not (isinstance(shared, dict) and isinstance(own, dict)):
        return own
    both = {key: _joined(shared[key], own[key]) for key in shared.keys() & own.keys()}
    return {**shared, **own, **both}


def _part(content: dict[str, Any], labels: dict[str, str], smoke: bool) -> Part:
    small = _is_mapping("smoke", content.get("smoke") or {}, SMOKE_KEYS)
    wins: Settings = {}
    if smoke:
        wins = _settings("smoke: fixed", small.get("fixed") or {})
        content = _smaller(content, small)
    fixed = _settings("fixed", content.get("fixed") or {})
    seeds = _seeds("seeds", content.get("seeds"))
    tune = _tune(content["tune"], seeds) if content.get("tune") else None
    if tune is not None:
        tune = replace(tune, fixed=tune.fixed | wins)
    grid = content.get("grid")
    combinations = [{}] if grid is None else list(_combinations("grid", grid))
    arms = _arms(content.get("arms"))
    _refuse_vast("grid, arms and seeds", len(combinations), len(arms), len(seeds))
    if tune is not None:
        pilots = (len(tune.candidates), len(tune.seeds))
        _refuse_vast("tune", len(combinations), len(arms), *pilots)
    points = []
    for arm, own in arms.items():
        own = dict(own)
        script = own.pop("script", content.get("script"))
        for combination in combinations:
            varying = {**combination, **own}
            _no_clash(fixed, combination, tune, {**varying, **wins})
            named = {**labels, "arm": arm} if arm else labels
            settings = {**fixed, **varying, **wins}
            varying = {name: settings[name] for name in varying}
            points.append(Point(script, settings, varying, named))
    return Part(tuple(points), seeds, tune)


def _smaller(content: dict[str, Any], small: dict[str, Any]) -> dict[str, Any]:
    """A part as its smoke edition has it, but for `smoke: fixed`."""
    content = content | {key: small[key] for key in ("seeds",) if key in small}
    if "tune" in small:
        content["tune"] = _joined(content.get("tune"), small["tune"]) if small["tune"] else None
    if "grid" in small:
        grid = content.pop("grid", None) or {}
        _all_known("axis in smoke: grid", _is_mapping("smoke: grid", small["grid"]), grid)
        kept = {k: v for k, v in {**grid, **small["grid"]}.items() if v is not None}
        content |= {"grid": kept} if kept else {}
    if "arms" in small:
        arms = content.get("arms") or {}
        if not isinstance(small["arms"], list):
            raise ValueError(f"smoke: arms lists the names to keep, got {small['arms']!r}.")
        _all_known("arm in smoke: arms", small["arms"], arms)
        content["arms"] = {arm: arms[arm] for arm in small["arms"]}
    return content


def _arms(content: Any) -> dict[str, Settings]:
    if content is None:
        return {"": {}}
    arms = _is_mapping("arms", content)
    if not arms:
        raise ValueError("arms is empty: name at least one, or leave the key out.")
    return {str(name): _settings(f"arm {name!r}", own or {}) for name, own in arms.items()}


def _tune(content: Any, seeds: Sequence[int]) -> Tune:
    tune = _is_mapping("tune", content, TUNE_KEYS)
    for key in ("metric", "best", "seeds", "grid"):
        if key not in tune:
            raise ValueError(f"tune needs {key!r}.")
    if not isinstance(tune["metric"], str):
        raise ValueError(f"tune: metric must be a string, got {tune['metric']!r}.")
    if tune["best"] not in ("max", "min"):
        raise unknown("value of tune: best", tune["best"], ("max", "min"))
    pilots = _seeds("tune: seeds", tune["seeds"])
    if both := set(pilots) & set(seeds):
        raise ValueError(f"tune: seeds {sorted(both)} are also under seeds: pilots need others.")
    candidates = tuple(_combinations("tune: grid", tune["grid"]))
    fixed = _settings("tune: fixed", tune.get("fixed") or {})
    return Tune(tune["metric"], tune["best"], pilots, candidates, fixed)


def _combinations(where: str, content: Any) -> Iterator[Settings]:
    """Every combination of a grid's values, in the file's order."""
    grid = _is_mapping(where, content)
    if not grid:
        raise ValueError(f"{where} is empty: list values under it, or leave the key out.")
    axes = [_axis(f"{where}: {name}", name, values) for name, values in grid.items()]
    _refuse_vast(where, *(len(axis) for axis in axes))
    set_by = Counter(key for axis in axes for key in {key for level in axis for key in level})
    if twice := {key for key, count in set_by.items() if count > 1}:
        raise ValueError(f"{where}: {min(twice)!r} is set by two axes: keep one.")
    for levels in itertools.product(*axes):
        yield {key: value for level in levels for key, value in level.items()}


def _refuse_vast(where: str, *counts: int) -> None:
    """Refuse a study that nobody can have meant, before it is written out."""
    if (runs := math.prod(counts)) > MOST_RUNS:
        raise ValueError(
            f"{where} makes {runs:,} runs: at most {MOST_RUNS:,} are allowed. List fewer values, "
            "or divide the study."
        )


def _axis(where: str, name: str, values: Any) -> list[Settings]:
    if not isinstance(values, list) or not values:
        raise ValueError(f"{where} needs a list of values, got {values!r}.")
    levels = [value if isinstance(value, dict) else {name: value} for value in values]
    return [_settings(where, level) for level in levels]


def _seeds(where: str, values: Any) -> tuple[int, ...]:
    good = isinstance(values, list) and all(type(seed) is int and seed >= 0 for seed in values)
    if not good or not values or len(set(values)) < len(values):
        raise ValueError(f"{where} must be a list of different whole numbers, got {values!r}.")
    return tuple(values)


def _settings(where: str, content: Any) -> Settings:
    """A mapping of settings, without those that a study decides itself."""
    for name in _is_mapping(where, content):
        if name in RESERVED:
            raise ValueError(f"{where}: {name!r} is not for a study file: {RESERVED[name]}.")
    return content


def _no_clash(fixed: Settings, combination: Settings, tune: Tune | None, given: Settings) -> None:
    if both := set(fixed) & set(combination):
        raise ValueError(f"{min(both)!r} is under fixed and under grid: keep one.")
    tuned = {key for candidate in tune.candidates for key in candidate} if tune else set()
    if tune and (both := tuned & {*fixed, *given, *tune.fixed}):
        raise ValueError(f"{min(both)!r} is tuned, but it is also set elsewhere: keep one.")


def _is_mapping(where: str, content: Any, keys: Sequence[str] | None = None) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise ValueError(f"{where} must be a mapping of names and values, got {content!r}.")
    if keys is not None:
        _all_known(f"key in {where}", content, keys)
    return content


def _all_known(what: str, names: Iterable[Any], expected: Iterable[str]) -> None:
    expected = tuple(expected)
    for name in names:
        if name not in expected:
            raise unknown(what, name, expected)


def _check_part(part: Part, scripts: Scripts) -> None:
    """Read the settings of every point once, so that no run is refused later."""
    for point in part.points:
        _all_known("script", [point.script], scripts)
        script = scripts[point.script]()
        if part.tune is None:
            _check_settings(script, point.settings)
            continue
        check_metric("tune: metric", part.tune.metric, [point.script])
        if "eval_split" not in {field.name for field in fields(script.config_class)}:
            raise ValueError(f"tune: {point.script} has no eval_split: it cannot be tuned.")
        for candidate, pilot in zip(
            part.tune.candidates, pilot_settings(part.tune, point), strict=True
        ):
            _check_settings(script, point.settings | candidate)
            _check_settings(script, pilot)


def _check_settings(script: Script, settings: Settings) -> None:
    try:
        _checked(script.config_class, json.dumps(settings, default=str))
    except ValueError as error:
        culprit = _culprit(script, settings, str(error))
        given = culprit or ", ".join(f"{name}: {value}" for name, value in settings.items())
        raise ValueError(f"{given} is refused by {script.path}: {error}") from None


def _culprit(script: Script, settings: Settings, message: str) -> str | None:
    """The setting that is refused with the same words when it stands alone."""
    for name, value in settings.items():
        try:
            from_dict(script.config_class, {name: value})
        except ValueError as error:
            if str(error) == message:
                return f"{name}: {value}"
    return None
