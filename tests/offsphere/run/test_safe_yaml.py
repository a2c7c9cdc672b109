"""YAML from anybody: bombs, depth, doubled keys and nonsense are one line, and quick."""

from __future__ import annotations

import re
import time
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from offsphere.analysis.claims import load_claims
from offsphere.analysis.tables import run_row
from offsphere.cli import SCRIPTS
from offsphere.run import safe_yaml
from offsphere.run.config import load_yaml
from offsphere.study.plan import load_study
from offsphere.training.settings import ImageSettings

ALIASES = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
FAULTS = {
    ALIASES: "has more than 100,000 values, aliases written out.",
    "a: &a [*a]": "has an alias that holds itself.",
    "a: " + "[" * 5000: "is nested deeper than 50 levels.",
    "".join(" " * i + "a:\n" for i in range(1100)): "is nested deeper than 50 levels.",
    "a: 1\nb: 2\na: 3\n": "'a' is set twice in the mapping at line 1: remove one.",
    "a: [1": "is not valid YAML: while parsing a flow sequence, expected ',' or ']', but got "
    "'<stream end>', line 1",
    "x" * 1_000_001: "has 1,000,001 characters: at most 1,000,000 are read.",
    "a: !!python/object/apply:os.getcwd []": "is not valid YAML: could not determine a "
    "constructor for the tag 'tag:yaml.org,2002:python/object/apply:os.getcwd', line 1",
}


@pytest.mark.parametrize("text", FAULTS, ids=range(len(FAULTS)))
def test_a_fault_is_one_line_at_once(text: str):
    begin = time.process_time()
    with pytest.raises(ValueError, match=f"^f.yaml {re.escape(FAULTS[text])}$"):
        safe_yaml.load(text, "f.yaml")
    assert time.process_time() - begin < 2


@pytest.mark.parametrize("text", [list(FAULTS)[i] for i in (0, 2, 3)], ids=["bomb", "flow", "map"])
def test_every_way_in_is_guarded(text: str, tmp_path: Path):
    """Recipes, studies (also inside settings), the record of a run, claims."""
    file = tmp_path / "config.yaml"
    file.write_text(text)
    for read in (
        lambda: load_yaml(ImageSettings, file),
        lambda: load_study(file, SCRIPTS),
        lambda: run_row(tmp_path),
        lambda: load_claims(file),
    ):
        with pytest.raises(ValueError, match="nested deeper|more than 100,000 values") as refusal:
            read()
        assert "\n" not in str(refusal.value)
    inside = "".join(f"  {line}\n" for line in text.splitlines())
    file.write_text(f"script: train_simclr\nseeds: [0]\nfixed:\n{inside}")
    with pytest.raises(ValueError, match="nested deeper|more than 100,000 values"):
        load_study(file, SCRIPTS)


def test_what_is_well_is_read_as_yaml_reads_it():
    for file in sorted(Path(__file__).parents[3].glob("configs/**/*.yaml")):
        text = file.read_text()
        assert safe_yaml.load(text, file) == yaml.safe_load(text)
    text = "a: &p {x: 1}\nb: *p\nc: {<<: *p, y: 2}\n"
    assert safe_yaml.load(text, "") == {"a": {"x": 1}, "b": {"x": 1}, "c": {"x": 1, "y": 2}}


def test_a_record_of_other_than_plain_values_is_refused(tmp_path: Path):
    for text in ("cell: {a: 1}", "cell: 2020-01-01", "cell: [[1]]"):
        (tmp_path / "config.yaml").write_text(text)
        with pytest.raises(ValueError, match="'cell' is no plain value: it was edited"):
            run_row(tmp_path)


def test_nested_yaml_is_refused(tmp_path):
    (tmp_path / "deep.yaml").write_text("data: " + "[" * 5000)
    (tmp_path / "loop.yaml").write_text("data: &a [*a]\n")
    bomb = ["a: &a [x, x]"] + [f"{b}: &{b} [*{a}, *{a}]" for a, b in pairwise("abcdefghi")]
    (tmp_path / "bomb.yaml").write_text("\n".join(bomb))
    for name in ("deep", "loop", "bomb"):
        with pytest.raises(ValueError, match="nested|not valid YAML|Unknown setting"):
            load_yaml(ImageSettings, tmp_path / f"{name}.yaml")
