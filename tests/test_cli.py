"""The `offsphere` command: what it knows, and how it answers."""

import dataclasses
import json

import pytest

from offsphere import cli
from offsphere.share import TASKS


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
