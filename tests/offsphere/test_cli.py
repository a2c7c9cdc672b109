"""The `offsphere` command: what it knows, how it answers, and that every mistake is one line."""

import dataclasses
import json
import re
import socket

import pytest

from offsphere import cli
from offsphere.run import safe_yaml
from offsphere.share import ADDED, TASKS

MISTAKES = {
    "study s.yaml --worker=2": "offsphere study: error: Unknown setting '--worker'. Did you mean "
    "'--workers'",
    "study s.yaml --engine=rai": "Unknown value of --engine 'rai'. Did you mean 'ray'",
    "study": "offsphere study: error: the following arguments are required: FILE.yaml",
    "study s.yaml --workers=0": "--workers must be a whole number above 0, got 0",
    "study a.yaml b.yaml": "Unexpected 'b.yaml'",
    "study nowhere.yaml": "nowhere.yaml: cannot be read",
    "study --smoke a.yaml --out here b.yaml": "Unexpected 'b.yaml'",
    "reproduce": "offsphere reproduce: error: the following arguments are required: STUDY",
    "reproduce x --row=2": "Did you mean '--rows'",
    "report --date-of=2": "offsphere report: error: Unknown setting '--date-of'",
    "doctor planted": "planted trains nothing: expected one of train_simclr, ",
    "data --chek": "Unknown setting '--chek'.*Did you mean",
    "claims --jsn": "Unknown setting '--jsn'",
}


def test_every_command_is_listed_and_explains_itself(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["--help"])
    assert end.value.code == 0
    told = capsys.readouterr().out
    for name in cli.COMMANDS:
        assert f"offsphere {name}" in told
        with pytest.raises(SystemExit) as end:
            cli.main([name, *(["make"] if name == "shards" else []), "--help"])
        assert end.value.code == 0
        assert "--" in capsys.readouterr().out


def test_an_unknown_command_is_one_line_with_the_nearest(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["studdy"])
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "Unknown command 'studdy'" in line
    assert "Did you mean 'study'" in line


def test_shards_are_made_by_make_alone(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["shards", "--source=csv:x.csv", "--out=y"])
    assert end.value.code == 2
    assert "expected `make`, got --source=csv:x.csv" in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        cli.main(["shards", "make", f"--source=csv:{tmp_path}/x.csv", f"--out={tmp_path}/y"])
    assert end.value.code == 1
    assert "x.csv" in capsys.readouterr().err


@pytest.mark.parametrize("name", cli.SCRIPTS)
def test_every_script_of_a_study_has_settings_with_a_seed_and_a_run(name):
    script = cli.SCRIPTS[name]()
    assert name in script.path
    assert {"seed", "out", "study"} <= {
        field.name for field in dataclasses.fields(script.config_class)
    }
    assert callable(script.run)


def test_every_training_script_declares_its_task_and_old_plans_read_the_same():
    """Plans that were written before tasks were recorded are read with share/tasks.json."""
    scripts = {name: make() for name, make in cli.SCRIPTS.items()}
    declared = {name: dataclasses.asdict(x.task) for name, x in scripts.items() if x.task}
    assert {name for name, x in scripts.items() if x.make} <= set(declared)
    written = json.loads(TASKS.read_text())
    assert written == json.loads(json.dumps(declared))


def test_settings_that_came_later_are_known_to_the_tables():
    configs = [make().config_class for make in cli.SCRIPTS.values()]
    fields = [field for config in configs for field in dataclasses.fields(config)]
    added = {field.name: field.default for field in fields if field.metadata.get("added")}
    assert safe_yaml.load(ADDED.read_text(), ADDED) == added


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_one_line(words: str, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(words.split())
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(MISTAKES[words], line), line


@pytest.mark.parametrize("name", ["matrix_factorization", "simplex", "norm_growth", "planted"])
def test_a_seed_below_zero_is_refused(name: str):
    with pytest.raises(ValueError, match="--seed must be at least 0, got -1"):
        cli.SCRIPTS[name]().config_class(seed=-1)


def test_a_cluster_that_does_not_answer_is_told_at_once(tmp_path, monkeypatch, capsys):
    pytest.importorskip("ray", reason="Ray is the extra `cluster`")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, but nobody listens: refused at once
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{taken.getsockname()[1]}")
        monkeypatch.chdir(tmp_path)
        (tmp_path / "s.yaml").write_text("script: simplex\nseeds: [0]\n")
        with pytest.raises(SystemExit) as end:
            cli.main(["study", "s.yaml", "--engine=ray"])
    assert end.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "No Ray cluster answers at RAY_ADDRESS=127.0.0.1:" in line
    assert "within 10 seconds" in line
