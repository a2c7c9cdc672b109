"""Rows of a table, made again: equal, different, damaged, of other code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from offsphere.study.command import study_command
from offsphere.study.reproduce import main

SMALL = "script: toy\nseeds: [0, 1]\ngrid: {cell: [cosine, dot], lr: [0.1, 0.3]}\n"
TABLE = Path("results/example/runs.csv")


@pytest.fixture
def reproduce(toy, tmp_path: Path, monkeypatch, capfd):
    """Makes rows of a finished study again: exit code, output, errors."""
    monkeypatch.chdir(tmp_path)
    Path("example.yaml").write_text(SMALL)
    assert study_command(["example.yaml"], toy.SCRIPTS) == 0
    capfd.readouterr()

    def reproduce(*flags: str) -> tuple[int, str, str]:
        try:
            main(["results/example", *flags], toy.SCRIPTS)
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        return code, *capfd.readouterr()

    return reproduce


def test_drawn_rows_are_equal_to_the_last_digit(reproduce):
    before = TABLE.read_bytes()
    code, output, _ = reproduce("--rows=3", "--workers=2")
    assert code == 0
    assert "3 of 3 rows are equal to the last digit." in output
    assert output.count(": 2 of 2 numbers are equal\n") == 3
    assert len(re.findall(r"^python toy.py .*--out=results/reproduced$", output, re.M)) == 3
    assert TABLE.read_bytes() == before
    others = reproduce("--rows=3", "--pick=1")[1]
    assert set(re.findall(r"^python.*", others, re.M)) != set(
        re.findall(r"^python.*", output, re.M)
    )
    assert reproduce("--rows=99")[1].endswith("8 of 8 rows are equal to the last digit.\n")


def test_a_number_that_differs_is_named_and_so_is_what_else_changed(reproduce):
    lines = TABLE.read_text().splitlines()
    head, row = lines[0].split(","), lines[1].split(",")
    score, python = head.index("test/score"), head.index("run/python")
    true, row[score], row[python] = row[score], "0.25", "2.7.1"
    TABLE.write_text("\n".join([lines[0], ",".join(row), *lines[2:]]) + "\n")
    code, output, _ = reproduce(f"--run={row[head.index('run')]}")
    assert code == 1
    assert ": 1 of 2 numbers are equal\n" in output
    assert f"  test/score was 0.25 and is {true}\n" in output
    assert "  run/python was 2.7.1 and is 3." in output
    assert "0 of 1 rows are equal to the last digit." in output


def test_what_cannot_be_made_again_is_refused_before_any_run(reproduce):
    assert "Unknown finished run of results/example 'x'" in reproduce("--run=x")[2]
    code, _, errors = reproduce("--workers=0")
    assert code == 2
    assert "--workers must be a whole number above 0, got 0" in errors
    TABLE.write_text(TABLE.read_text().replace("cosine-seed0-", "cosine-seed0-0"))
    code, _, errors = reproduce("--rows=8")
    assert code == 1
    assert "the row was made by other code. Check out its commit" in errors
    TABLE.unlink()
    assert "runs.csv has no finished run: name the folder of a study." in reproduce()[2]
    assert not Path("results/reproduced").exists()
