"""`--help` shows the common flags in groups, `--help-all` every one."""

from __future__ import annotations

import dataclasses
import importlib
import re
from dataclasses import dataclass
from typing import ClassVar, Literal

import pytest

from offsphere.names import nearest, unknown
from offsphere.run.config import unhashed
from offsphere.run.help import MOST, ORDER, Groups, grouped, help_text

SCRIPTS = (
    *("vision.train_simclr", "vision.train_moco", "vision.eval_probe", "crossmodal.train_clip"),
    *("crossmodal.benchmark", "crossmodal.audit", "offsphere.export.command", "crossmodal.shards"),
    *(
        "text.train_retrieval",
        "text.train_sts",
        "text.audit",
        "offsphere.audit.vectors",
        "offsphere.export.lift",
    ),
    *("theory.matrix_factorization", "theory.simplex"),
    *("theory.norm_growth", "theory.planted"),
)
FLAG = re.compile(r"^  --(?:no-)?([\w-]+)", re.MULTILINE)


@dataclass(frozen=True)
class Base:
    GROUPS: ClassVar[Groups] = {"question": (("cell",), ("power",)), "machine": (("resume",), ())}

    cell: str = "cosine"
    """Which sides are
    normalised."""
    power: float = 0.5
    resume: bool = unhashed(True)
    """Go on."""


@dataclass(frozen=True)
class Derived(Base):
    GROUPS: ClassVar[Groups] = {"question": (("loss",), ())}

    loss: Literal["dcl", "info_nce"] = "dcl"
    """How it is scored."""
    power: float = 0.25
    """A share."""
    layers: tuple[int, ...] = ()
    """Belongs to no group."""
    limit: int | None = None


HELP = """\
usage: python train.py [--flag=value ...]

Train.

question
  --cell=TEXT             Which sides are normalised. (default: cosine)
  --loss=dcl|info_nce     How it is scored. (default: dcl)
  --power=X               A share. (default: 0.25)

machine
  --no-resume             Go on.

further
  --layers=N ...          Belongs to no group.
  --limit=N

--config=FILE.yaml takes settings from flat YAML files; a later file and flags win."""


def test_the_whole_help(monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py", "--help-all"])
    monkeypatch.setenv("COLUMNS", "100")
    assert help_text(Derived, "Train.\n", everything=True) == HELP


def test_the_common_flags(monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py", "--help"])
    said = help_text(Derived, None, everything=False)
    assert FLAG.findall(said) == ["cell", "loss", "resume"]
    assert said.endswith("--help-all shows 3 more.")


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_shows_a_few_flags_and_has_all(name):
    config_class = importlib.import_module(name).Config
    names = {field.name.rstrip("_").replace("_", "-") for field in dataclasses.fields(config_class)}
    common = FLAG.findall(help_text(config_class, None, everything=False))
    everything = FLAG.findall(help_text(config_class, None, everything=True))
    assert 0 < len(common) <= MOST
    assert sorted(everything) == sorted(names)  # each once
    declared = {
        flag
        for base in config_class.__mro__
        for group in vars(base).get("GROUPS", {}).values()
        for flag in (*group[0], *group[1])
    }
    lane = {field.name for field in dataclasses.fields(config_class)}
    if name.startswith(("vision.train", "crossmodal.train")):
        assert declared - lane <= {"loss"}  # a group names no flag that is none
    assert list(grouped(config_class)) == [x for x in ORDER if x in grouped(config_class)]


@pytest.mark.parametrize(
    ("got", "names", "expected"),
    [
        ("ViT-B32", ("ViT-B-16", "ViT-B-32", "RN50"), "ViT-B-32"),
        ("vit_b_16", ("ViT-B-16", "ViT-B-32"), "ViT-B-16"),
        ("--bach-size", ("--lr", "--batch-size"), "--batch-size"),
        ("zzz", ("cosine", "dot"), None),
        ("", ("cosine", "dot"), None),
        ("--", ("--lr",), None),
    ],
)
def test_the_nearest_name(got, names, expected):
    assert nearest(got, names) == expected


def test_did_you_mean_stands_alone():
    assert str(unknown("cell", "cosin", ["cosine", "dot"])) == (
        "Unknown cell 'cosin'. Did you mean 'cosine'?"
    )
    assert str(unknown("cell", "zz", ["cosine", "dot"])) == (
        "Unknown cell 'zz': expected one of cosine, dot."
    )
    many = [f"model{k}" for k in range(99)]
    assert str(unknown("model", "zz", many)).endswith("model15 and 83 more.")
