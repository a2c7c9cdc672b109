"""Study files: what they mean, and what is refused before the first run."""

from __future__ import annotations

import itertools
import textwrap
from pathlib import Path

import pytest

from offsphere.run.config import identity_settings
from offsphere.study.plan import Study, load_study, main_runs, pilot_runs

GOOD = """
script: toy
seeds: [0, 1]
grid: {cell: [cosine, dot]}
"""


@pytest.fixture
def load(toy, tmp_path: Path):
    """The study of a YAML text."""

    def load(text: str, *, smoke: bool = False) -> Study:
        file = tmp_path / "example.yaml"
        file.write_text(textwrap.dedent(text))
        return load_study(file, toy.SCRIPTS, smoke=smoke)

    return load


@pytest.fixture
def runs_of(load, toy):
    """The runs of a YAML text, with the first candidate where something is tuned."""

    def runs_of(text: str, *, smoke: bool = False):
        study = load(text, smoke=smoke)
        return main_runs(study, toy.SCRIPTS, "out", lambda tune, _: tune.candidates[0])

    return runs_of


def test_a_grid_is_every_combination_and_seeds_come_first(runs_of):
    runs = runs_of(
        """
        script: toy
        seeds: [0, 42]
        fixed: {steps: 5}
        grid: {cell: [cosine, dot], lr: [0.1, 1e-3]}
        """
    )
    found = [(r.settings.seed, r.settings.cell, r.settings.lr) for r in runs]
    assert found == list(itertools.product((0, 42), ("cosine", "dot"), (0.1, 0.001)))
    assert {r.settings.steps for r in runs} == {5}
    assert {r.settings.threads for r in runs} == {1}
    assert {r.path.parent for r in runs} == {Path("out/example")}
    assert len({r.path for r in runs}) == 8


def test_a_mapping_in_a_grid_sets_several_settings_together(runs_of):
    runs = runs_of(
        """
        script: toy
        seeds: [0]
        grid:
          budget: [{batch_size: 8, steps: 4}, {batch_size: 16, steps: 2}]
          cell: [cosine, dot]
        """
    )
    found = [(r.settings.batch_size, r.settings.steps, r.settings.cell) for r in runs]
    assert found == [(8, 4, "cosine"), (8, 4, "dot"), (16, 2, "cosine"), (16, 2, "dot")]


def test_an_arm_wins_over_fixed_and_grid_and_the_same_settings_are_one_run(runs_of):
    runs = runs_of(
        """
        script: toy
        seeds: [0]
        fixed: {steps: 5}
        grid: {cell: [cosine, dot]}
        arms:
          plain: {}
          short: {steps: 1}
          control: {cell: cosine}
        """
    )
    found = [(r.settings.cell, r.settings.steps, [one["arm"] for one in r.labels]) for r in runs]
    assert found == [
        ("cosine", 5, ["plain", "control"]),
        ("dot", 5, ["plain"]),
        ("cosine", 1, ["short"]),
        ("dot", 1, ["short"]),
    ]


def test_parts_share_what_stands_beside_them(runs_of):
    runs = runs_of(
        """
        script: toy
        seeds: [0]
        fixed: {steps: 5, lr: 0.2}
        parts:
          - {name: one, grid: {cell: [cosine]}}
          - {name: two, fixed: {lr: 0.7}, seeds: [1], arms: {late: {cell: dot}}}
        """
    )
    found = [
        (r.settings.cell, r.settings.seed, r.settings.steps, r.settings.lr, *r.labels) for r in runs
    ]
    assert found == [
        ("cosine", 0, 5, 0.2, {"part": "one"}),
        ("dot", 1, 5, 0.7, {"part": "two", "arm": "late"}),
    ]


def test_an_arm_may_have_a_script_of_its_own(runs_of):
    runs = runs_of("seeds: [0]\nscript: toy\narms: {a: {}, b: {script: train_simclr, loss: dcl}}\n")
    assert [(r.name, getattr(r.settings, "loss", None)) for r in runs] == [
        ("toy", None),
        ("train_simclr", "dcl"),
    ]
    assert runs[1].settings.progress is False


SMOKE = """
script: toy
seeds: [0, 1, 2]
fixed: {steps: 50}
grid: {cell: [cosine, dot], lr: [0.1, 0.2]}
arms: {a: {}, b: {batch_size: 64}}
tune: {metric: test/score, best: max, seeds: [9], grid: {threads: [1, 2]}}
smoke:
  seeds: [0]
  fixed: {steps: 2, batch_size: 4}
  grid: {cell: [dot], lr: null}
  arms: [b]
  tune: null
"""


def test_smoke_is_a_small_edition_with_a_folder_of_its_own(runs_of):
    (run,) = runs_of(SMOKE, smoke=True)
    config = run.settings
    assert (config.cell, config.steps, config.batch_size, config.lr) == ("dot", 2, 4, 0.1)
    assert run.labels == ({"arm": "b"},)
    assert run.path.parent == Path("out/example_smoke")
    assert len(runs_of(SMOKE)) == 3 * 2 * 2 * 2


def test_null_in_a_part_takes_the_shared_setting_back(load):
    text = """
script: train_simclr
seeds: [0]
fixed: {limit: 256, lr: 0.3}
grid: {cell: [cosine, dot]}
tune: {metric: test/probe, best: max, seeds: [9], grid: {temperature: [0.1, 0.2]}}
parts:
  - name: tuned
  - name: plain
    fixed: {limit: null}
    grid: null
    tune: null
"""
    tuned, plain = load(text).parts
    assert (tuned.tune is None, plain.tune is None) == (False, True)
    assert [point.settings for point in plain.points] == [{"limit": None, "lr": 0.3}]
    assert len(tuned.points) == 2


def test_pilots_run_each_candidate_on_validation_data_with_their_own_seeds(load, toy):
    study = load(
        """
        script: toy
        seeds: [0]
        grid: {cell: [cosine, dot], batch_size: [8, 16, 32]}
        tune:
          {metric: test/score, best: max, seeds: [7, 8], grid: {lr: [0.1, 0.3]},
           fixed: {batch_size: 8}}
        """
    )
    pilots = pilot_runs(study, toy.SCRIPTS, "out")
    found = [(r.settings.seed, r.settings.cell, r.settings.lr) for r in pilots]
    assert found == list(itertools.product((7, 8), ("cosine", "dot"), (0.1, 0.3)))
    assert {(r.settings.eval_split, r.settings.batch_size) for r in pilots} == {("validation", 8)}
    assert {r.path.parent for r in pilots} == {Path("out/example/tuning")}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("grdi: {cell: [dot]}", "Unknown key in a study 'grdi'. Did you mean 'grid'"),
        ("grid: {}", "grid is empty"),
        ("grid: {lr: []}", r"grid: lr needs a list of values, got \[\]"),
        ("grid: {lr: 0.1}", r"grid: lr needs a list of values, got 0.1"),
        ("fixed: {lrr: 0.1}", "lrr: 0.1 is refused by toy.py: Unknown setting 'lrr'.*mean 'lr'"),
        ("fixed: {lr: -1}", "lr: -1 is refused by toy.py: --lr must be above 0, got -1"),
        ("grid: {lr: [0.1, fast]}", "lr: fast is refused by toy.py: .*lr"),
        ("arms: {a: {fault: fire}}", "fault: fire is refused by toy.py: Unknown value of fault"),
        ("fixed: {steps: [1, 2]}", r"steps: \[1, 2\] is refused by toy.py: steps takes one value"),
        ("fixed: {lr: 1}\ngrid: {lr: [1]}", "'lr' is under fixed and under grid"),
        ("grid: {lr: [1], b: [{lr: 2}]}", "grid: 'lr' is set by two axes"),
        ("script: tyo", "Unknown script 'tyo'. Did you mean 'toy'"),
        ("seeds: []", "seeds must be a list of different whole numbers"),
        ("seeds: [0, 0]", "seeds must be a list of different whole numbers"),
        ("seeds: [0.5]", "seeds must be a list of different whole numbers"),
        ("fixed: {seed: 3}", "fixed: 'seed' is not for a study file: list them under `seeds`"),
        ("fixed: {out: x}", "fixed: 'out' is not for a study file"),
        ("fixed: 3", "fixed must be a mapping of names and values, got 3"),
        ("arms: {}", "arms is empty"),
        ("describe: [a]", r"describe must be a string, got \['a'\]"),
        ("parts: []", "parts must be a list of mappings"),
        ("parts: [{fixed: {lr: 1}}]", "part 1 needs a name of its own, got None"),
        ("parts: [{name: a, fixd: {}}]", "Unknown key in part 1 'fixd'"),
        ("parts: [{name: a, grid: {lr: []}}]", "part 'a': grid: lr needs a list"),
        ("lr: 3", "Unknown key in a study 'lr'"),
        ("fixed: {lr: 1, lr: 2}", "'lr' is set twice in the mapping at line"),
        ("tune: {metric: m, best: max, seeds: [5]}", "tune needs 'grid'"),
        (
            "tune: {metric: m, best: top, seeds: [5], grid: {lr: [1]}}",
            "Unknown value of tune: best",
        ),
        (
            "tune: {metric: m, best: max, seeds: [0], grid: {lr: [1]}}",
            r"\[0\] are also under seeds",
        ),
        ("tune: {metric: m, best: max, seeds: [5], grid: {lr: [0]}}", "lr: 0 is refused"),
        (
            "fixed: {lr: 2}\ntune: {metric: m, best: max, seeds: [5], grid: {lr: [1]}}",
            "'lr' is tuned, but it is also set elsewhere",
        ),
        ("grid: {cell: [a", "is not valid YAML"),
    ],
)
def test_a_faulty_file_is_refused_with_its_name(load, tmp_path: Path, text: str, message: str):
    given = {line.split(":")[0] for line in text.splitlines()}
    rest = [line for line in GOOD.strip().splitlines() if line.split(":")[0] not in given]
    with pytest.raises(ValueError, match=f"example.yaml: .*{message}"):
        load("\n".join([*rest, text]))


@pytest.mark.parametrize(
    ("smoke", "message"),
    [
        ("{gird: {}}", "Unknown key in smoke 'gird'"),
        ("{grid: {lr: [1]}}", "Unknown axis in smoke: grid 'lr'"),
        ("{arms: [x]}", "Unknown arm in smoke: arms 'x'"),
        ("{fixed: {lr: -2}}", "lr: -2 is refused by toy.py"),
    ],
)
def test_a_faulty_smoke_edition_is_refused(load, smoke: str, message: str):
    with pytest.raises(ValueError, match=message):
        load(f"{GOOD}smoke: {smoke}", smoke=True)


def test_a_refusal_that_needs_two_settings_names_them_all(load):
    text = "script: train_simclr\nseeds: [0]\nfixed: {samples: 64}\ngrid: {epochs: [1]}\n"
    with pytest.raises(
        ValueError, match="samples: 64, epochs: 1 is refused by vision/train_simclr"
    ):
        load(text)


def test_the_settings_of_a_run_do_not_depend_on_how_they_were_written(runs_of):
    one = runs_of("script: toy\nseeds: [0]\nfixed: {lr: 1e-1, batch_size: 4}\n")
    other = runs_of("script: toy\nseeds: [0]\ngrid: {batch_size: [4]}\narms: {x: {lr: 0.1}}\n")
    ours, theirs = ([identity_settings(r.settings) for r in runs] for runs in (one, other))
    assert ours == theirs
    assert [r.path for r in one] == [r.path for r in other]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("grid: {lr: LONG, batch_size: LONG, steps: LONG}", "grid makes 125,000,000 runs"),
        (
            "tune: {metric: m, best: max, seeds: [9], grid: {lr: LONG, steps: LONG}}",
            "tune: grid ma",
        ),
        (
            "grid: {lr: LONG, steps: [1, 2, 3, 4, 5, 6, 7, 8]}\narms: {a: {}, b: {}, c: {}}",
            "12,000",
        ),
    ],
)
def test_an_impossible_grid_is_refused_at_once(toy, tmp_path, text, said):
    file = tmp_path / "vast.yaml"
    file.write_text(f"script: toy\nseeds: [0]\n{text}\n".replace("LONG", str(list(range(1, 501)))))
    with pytest.raises(ValueError, match=said):
        load_study(file, toy.SCRIPTS)
