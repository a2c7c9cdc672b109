"""Before a study, a reproduction or a script starts: are its data there, and harmless?"""

from __future__ import annotations

import csv
import os
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from offsphere import cli
from offsphere.run.catalog import KNOWN
from offsphere.run.config import parse, to_yaml
from offsphere.run.record import RunFolder
from offsphere.study.command import study_command
from offsphere.study.plan import load_study
from offsphere.training import images, script
from vision import train_simclr

ROOT = Path(__file__).parents[3]
STUDIES = sorted((ROOT / "configs" / "studies").glob("*.yaml"))
PIPED = "data: 'wds:pipe:touch {mark}', data_test: emoji, train_samples: 64"
SMALL = "samples: 64, batch_size: 16, limit: 64"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFSPHERE_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize("file", STUDIES, ids=lambda file: file.stem)
def test_without_data_a_plan_says_what_it_needs(file: Path, capsys):
    assert study_command([str(file), "--dry-run"], cli.SCRIPTS) == 0
    needs = [line for line in capsys.readouterr().out.splitlines() if line.startswith("needs: ")]
    points = [point for part in load_study(file, cli.SCRIPTS).parts for point in part.points]
    values = [value for point in points for value in point.settings.values()]
    named = [name for value in values for name in (value if isinstance(value, list) else [value])]
    assert {line.split()[1] for line in needs} >= {name for name in named if str(name) in KNOWN}
    assert all("docs/data.md" in line for line in needs)
    assert not Path("results").exists()


def test_a_study_without_its_data_is_one_refusal_and_leaves_nothing(capsys):
    file = ROOT / "configs" / "studies" / "cells_simclr.yaml"
    assert study_command([str(file)], cli.SCRIPTS) == 1
    line = one_line(capsys)
    assert "cifar10-shards is not there: no cifar10/cifar10-train-000000.tar and 5 more" in line
    assert "cifar10-shards:test is not there" in line
    assert not Path("results").exists()


def test_a_path_that_is_not_there_is_refused_too(capsys):
    Path("s.yaml").write_text(
        f"script: train_simclr\nseeds: [0, 1]\nfixed: {{data: 'folder:no/such', {SMALL}}}\n"
    )
    assert study_command(["s.yaml"], cli.SCRIPTS) == 1
    assert "folder:no/such cannot be read: No such file or folder: no/such" in one_line(capsys)
    assert not Path("results").exists()


def test_a_script_without_its_data_leaves_nothing(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["train_simclr.py", "--data=cifar10-shards", "--out=r"])
    with pytest.raises(SystemExit) as end:
        script.main(train_simclr.Config, train_simclr.run, (), None)
    assert end.value.code == 1
    assert one_line(capsys).startswith("train_simclr: error: cifar10-shards is not there: no ")
    assert not Path("r").exists()


def test_no_file_gives_a_permission(capsys):
    config = cli.SCRIPTS["train_clip"]().config_class
    Path("k.yaml").write_text("cell: dot\nallow_pipe: true\n")
    with pytest.raises(SystemExit) as end:
        parse(config, ["--config=k.yaml"])
    assert end.value.code == 2
    assert "k.yaml, line 2: allow_pipe may not stand in a file or table" in one_line(capsys)
    Path("k.yaml").write_text("--allow-pipe: yes\n")
    with pytest.raises(SystemExit):
        parse(config, ["--config=k.yaml"])
    assert "--allow-pipe may not stand in a file" in one_line(capsys)
    Path("k.yaml").write_text("allow_pipe: false\n")
    assert not parse(config, ["--config=k.yaml"]).allow_pipe
    allowed = parse(config, ["--config=k.yaml", "--allow-pipe"])
    assert allowed.allow_pipe
    assert "allow_pipe" not in to_yaml(allowed)


@pytest.mark.parametrize("place", ["fixed", "arms: one", "smoke: fixed"])
def test_a_study_file_may_not_permit_commands(place: str, capsys):
    top, _, below = place.partition(": ")
    inside = "{allow_pipe: true}" if not below else f"{{{below}: {{allow_pipe: true}}}}"
    Path("s.yaml").write_text(f"script: train_clip\nseeds: [0]\n{top}: {inside}\n")
    flags = ["--smoke"] if "smoke" in place else []
    assert study_command(["s.yaml", *flags], cli.SCRIPTS) == 2
    assert "only the flag --allow-pipe permits commands" in one_line(capsys)


def test_a_study_runs_no_command_without_leave(capsys, tmp_path: Path):
    mark = tmp_path / "mark"
    fixed = PIPED.format(mark=mark)
    Path("s.yaml").write_text(f"script: train_clip\nseeds: [0]\nfixed: {{{fixed}, {SMALL}}}\n")
    assert study_command(["s.yaml"], cli.SCRIPTS) == 1
    assert f"commands, which would run on this machine: touch {mark}. Give --allow-pipe" in (
        one_line(capsys)
    )
    assert not mark.exists()
    assert not Path("results").exists()
    assert study_command(["s.yaml", "--dry-run"], cli.SCRIPTS) == 0
    assert not mark.exists()


def foreign_table(row: dict[str, str]) -> None:
    """A runs.csv of somebody else, whose row has the name that its settings give."""
    from offsphere.run.config import from_dict, run_name

    config = cli.SCRIPTS[row["script"]]().config_class
    name = run_name(from_dict(config, {k: row[k] for k in ("data", "data_test") if k in row}))
    row = {"run": name, "status": "finished", **row}
    Path("st").mkdir()
    with Path("st/runs.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(row))
        writer.writeheader()
        writer.writerow(row)


def reproduce(*flags: str) -> int:
    with pytest.raises(SystemExit) as end:
        cli.main(["reproduce", "st", "--rows=1", "--out=again/x", *flags])
    return int(str(end.value.code))


@pytest.mark.parametrize("data", ["wds:pipe:touch {}", "wds:{{https://host/,pipe:touch }}{}"])
@pytest.mark.parametrize("allow", ["true", "false"])
def test_a_foreign_row_runs_no_command(allow: str, data: str, capsys, tmp_path: Path):
    row = {"script": "train_clip", "data": data.format(tmp_path / "mark"), "data_test": "emoji"}
    foreign_table({**row, "allow_pipe": allow, "study": "../escaped"})
    assert reproduce() == 1
    said = "may not stand in a file or table" if allow == "true" else "would run on this machine"
    assert said in one_line(capsys)
    assert sorted(tmp_path.iterdir()) == [tmp_path / "st"]


def test_a_foreign_row_leads_nowhere(capsys, monkeypatch, tmp_path: Path):
    """Where a row says it ran does not matter: the run goes below --out."""
    places = {"study": "../escaped", "out": str(tmp_path / "out"), "data_root": "/etc"}
    foreign_table({"script": "train_simclr", "data": "emoji", "root": "/etc", **places})
    runs = []
    monkeypatch.setattr(
        "offsphere.study.reproduce._made_again", lambda found, rows, workers: runs.extend(found)
    )
    with pytest.raises(TypeError):  # nothing was compared
        cli.main(["reproduce", "st", "--out=again"])
    (run,) = runs
    assert run.path.parent == Path("again/st")
    assert (run.settings.root, run.settings.data_root) == (None, None)


def test_what_a_foreign_row_would_run_is_printed_first(capsys):
    foreign_table({"script": "train_simclr", "data": "folder:nowhere", "study": ""})
    assert reproduce() == 1
    out, err = capsys.readouterr()
    assert out == ("python vision/train_simclr.py --study=st --out=again/x --data=folder:nowhere\n")
    assert "folder:nowhere cannot be read" in err


def test_progress_tells_runs_apart_by_what_varies(toy, tmp_path: Path, capfd):
    Path("s.yaml").write_text(
        "script: toy\nseeds: [0]\ngrid: {lr: [0.1, 0.3], cell: [cosine, dot]}\n"
    )
    assert study_command(["s.yaml", "--workers=1"], toy.SCRIPTS) == 0
    lines = capfd.readouterr().out
    for cell in ("cosine", "dot"):
        for lr in (0.1, 0.3):
            assert re.search(rf"{cell}-seed0-\w+ \(lr {lr}\) finished in", lines)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """A folder of two classes, of random pixels."""
    draw = np.random.default_rng(0)
    for part, count in (("train", 60), ("test", 8)):
        for label in ("a", "b"):
            (tmp_path / "mine" / part / label).mkdir(parents=True)
            for i in range(count):
                pixels = draw.integers(256, size=(16, 16, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / f"mine/{part}/{label}/{i}.png")
    return tmp_path / "mine"


def small(**changes: object) -> train_simclr.Config:
    given = {"data": "folder:mine", "image_size": 16, "batch_size": 16, "samples": 32}
    given |= {"layer": "backbone", "threads": 1, "progress": False}
    return train_simclr.Config(**(given | changes))  # pyright: ignore


def test_data_that_changed_since_a_run_ended_are_refused(pictures: Path, capsys):
    config = small(out="r", study="s")
    metrics = train_simclr.run(config)
    folder = RunFolder(next(Path("r/s").iterdir()))
    before = folder.provenance()["data"]["train"]["hash"]
    assert train_simclr.run(config) == metrics
    picture = pictures / "train/a/0.png"
    os.utime(picture, (1, 1))  # other times alone, as in a copy: the contents decide
    assert train_simclr.run(config) == metrics
    pixels = np.asarray(Image.open(picture)) // 2
    Image.fromarray(pixels).save(picture)
    images.kept_images.cache_clear()
    with pytest.raises(
        ValueError, match=f"made with other data: train was folder:mine {before} and "
    ):
        train_simclr.run(config)
    assert RunFolder(folder.path).metrics() == metrics
    study = "script: train_simclr\nseeds: [0, 1]\nfixed: {data: 'folder:mine', image_size: 16, "
    study += "batch_size: 16, samples: 32, layer: backbone, threads: 1}\n"
    Path("s.yaml").write_text(study)
    assert study_command(["s.yaml", "--out=r"], cli.SCRIPTS) == 1
    assert f"train was folder:mine {before} and is folder:mine " in capsys.readouterr().err
    assert [path.name for path in Path("r/s").iterdir()] == [folder.path.name]


@pytest.mark.parametrize(
    "changes", [{"pretrained": "no/such.pt"}, {"data": "folder:no/such"}, {"samples": 8}]
)
def test_a_run_that_cannot_begin_leaves_no_folder(pictures: Path, changes):
    with pytest.raises((ValueError, OSError)):
        train_simclr.run(small(out="r", **changes))
    assert list(Path("r").rglob("*")) == []


def test_which_sets_are_here(capsys, tmp_path: Path):
    (tmp_path / "data/stsb").mkdir(parents=True)
    for part in ("train", "dev", "test"):
        (tmp_path / f"data/stsb/sts-{part}.csv").write_text("x")
    cli.main(["data", "--check"])
    lines = capsys.readouterr().out.splitlines()
    assert "missing: unpack BEIR's scifact.zip" in next(x for x in lines if "scifact" in x)
    assert "other bytes: " in next(x for x in lines if x.startswith("stsb"))
