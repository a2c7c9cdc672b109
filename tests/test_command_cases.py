"""Every command of command_cases.tsv ends in one line that says why, and in its exit code.

The commands run in this process, so that hundreds of them cost one import of torch.
"""

import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from offsphere import cli

REPOSITORY = Path(__file__).parent.parent
ROWS = [
    line.split("\t")
    for line in (Path(__file__).parent / "command_cases.tsv").read_text().splitlines()
    if line and not line.startswith("#")
]


def call(words: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Run a command as its user would; its exit code."""
    program, *arguments = words
    try:
        if program == "offsphere":
            monkeypatch.setattr(sys, "argv", words)
            cli.main(arguments)
        elif arguments[0] == "-m":
            monkeypatch.setattr(sys, "argv", arguments[1:])
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            script = REPOSITORY / arguments[0]
            monkeypatch.setattr(sys, "argv", [str(script), *arguments[1:]])
            runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")  # other tests' imports
@pytest.mark.parametrize(("code", "command", "says"), ROWS, ids=[row[1][:80] for row in ROWS])
def test_a_faulty_command_ends_in_one_line(code, command, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    assert call(shlex.split(command), monkeypatch) == int(code)
    errors = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert [line for line in errors if re.search(r"\berror: |diverged: ", line)] == errors[-1:]
    assert says in errors[-1]
    assert not (tmp_path / "out" / "touched").exists(), "no data of anybody's runs a command"
    if "diverged: " not in errors[-1]:
        assert not list(tmp_path.rglob("metrics.json")), "a refused command leaves no result"
