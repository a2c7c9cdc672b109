"""A results folder that was edited, cut or is somebody else's: one line, no traceback, no page."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from offsphere.analysis import claims, report

RUN = "study/dot-seed1"
DEEP = "[" * 100_000 + "]" * 100_000
CLAIMS = """
- {id: gain, kind: descriptive, text: t, source: s, published: null, study: study,
   metric: test/probe, protocol: replication, effect: {cell: dot - cosine}}
- {id: sure, kind: exact, text: t, source: s, published: null, tests: [tests/test_x.py]}
"""
HEAD = "run,status,script,seed,cell,test/probe\n"
ROW = "a,finished,train_simclr,0,dot,1\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A study of two cells and two seeds, as run folders."""
    for cell in ("cosine", "dot"):
        for seed in (0, 1):
            run = tmp_path / "study" / f"{cell}-seed{seed}"
            run.mkdir(parents=True)
            (run / "config.yaml").write_text(f"cell: {cell}\nseed: {seed}\n")
            (run / "provenance.json").write_text('{"script": "train_simclr"}')
            numbers = {"test/probe": 0.5 + seed / 8, "run/status": "finished"}
            (run / "metrics.json").write_text(json.dumps(numbers))
            (run / "steps.jsonl").write_text('{"step": 0, "train/loss": 1.0}\n')
            save_file({"norm": np.arange(4, dtype="f4")}, run / "examples.safetensors")
    (tmp_path / "claims.yaml").write_text(CLAIMS)
    return tmp_path


def ended(main, folder: Path, capsys) -> tuple[int, str]:
    """Exit code and what was said, of a command on the folder."""
    try:
        flags = [f"--results={folder}", f"--claims={folder}/claims.yaml"]
        main([*flags, *(["--no-figures"] if main is report.main else [])])
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    return code, capsys.readouterr().err


def test_the_folder_as_it_was_written_is_read(folder, capsys):
    assert ended(report.main, folder, capsys)[0] == 0
    assert ended(claims.main, folder, capsys)[0] == 0


BOTH = (report.main, claims.main)
PAGE = (report.main,)


@pytest.mark.parametrize(
    ("commands", "file", "content", "words"),
    [
        (BOTH, f"{RUN}/metrics.json", "[1]", "expected names and values, got [1]"),
        (BOTH, f"{RUN}/metrics.json", DEEP, "is damaged"),
        (BOTH, f"{RUN}/metrics.json", '{"test/probe": "abc"}', "'test/probe' must be a number"),
        (BOTH, f"{RUN}/metrics.json", '{"test/probe": {"a": 1}}', "'test/probe' must be a number"),
        (BOTH, f"{RUN}/metrics.json", f'{{"test/probe": {"9" * 400}}}', "must be a number"),
        (BOTH, f"{RUN}/metrics.json", '{"run/seconds": [1]}', "'run/seconds' must be a number"),
        (BOTH, f"{RUN}/metrics.json", '{"run/status": [1]}', "status"),
        (BOTH, f"{RUN}/provenance.json", '{"script": {}}', "'script' must be a string"),
        (BOTH, f"{RUN}/config.yaml", "cell: dot\nseed: [1]\n", "'seed' must be a whole number"),
        (BOTH, f"{RUN}/config.yaml", "cell: dot\nseed: .inf\n", "'seed' must be a whole number"),
        (
            BOTH,
            f"{RUN}/config.yaml",
            "1: 2\nseed: 1\n",
            "name of a setting must be a string, got 1",
        ),
        (BOTH, f"{RUN}/config.yaml", "? [a]\n: 1\n", "config.yaml"),
        (BOTH, f"{RUN}/config.yaml", "a: " + "[" * 3000, "config.yaml"),
        (BOTH, f"{RUN}/config.yaml", b"\x00\xff", "config.yaml"),
        (PAGE, f"{RUN}/config.yaml", "cell: dot\n", "the run 'dot-seed1' has no seed"),
        (PAGE, f"{RUN}/steps.jsonl", '{"a": 1}\n', "line 1 is damaged: expected a row with its"),
        (PAGE, f"{RUN}/steps.jsonl", "[1]\n", "line 1 is damaged"),
        (PAGE, f"{RUN}/steps.jsonl", f'{{"step": {10**20}}}\n', "line 1 is damaged"),
        (PAGE, f"{RUN}/examples.safetensors", b"\x10\x00", "examples.safetensors is damaged"),
        (PAGE, f"{RUN}/examples.safetensors", b"\xff" * 64, "examples.safetensors is damaged"),
        (PAGE, "study/tuning.json", '{"choices": 5}', "'choices' must be a list"),
        (PAGE, "study/tuning.json", '{"choices": [{"for": [3]}]}', "a choice needs 'for'"),
        (PAGE, "study/tuning.json", DEEP, "tuning.json is damaged"),
        (PAGE, "study/plan.json", '{"metric": [1]}', "'metric' must be a string"),
        (PAGE, "other/runs.csv", f"{HEAD}a,finished,x,abc,dot,1\n", "row 2: 'seed' must be"),
        (
            PAGE,
            "other/runs.csv",
            f"{HEAD}[1],finished,x,0,dot,1\n",
            "row 2: 'run' must be a string",
        ),
        (PAGE, "other/runs.csv", f"{HEAD}a,finished,x,0,dot,abc\n", "row 2: 'test/probe' must be"),
        (BOTH, "exact.json", '{"sure": "x"}', "claim 'sure': expected verdict, tests"),
        (BOTH, "exact.json", '{"sure": {"tests": ["x"]}}', "'verdict' must be a str, got None"),
        (BOTH, "exact.json", '{"sure": [1]}', "claim 'sure': expected verdict, tests"),
        (BOTH, "exact.json", "[1]", "expected claims by their ids, got [1]"),
        (BOTH, "exact.json", DEEP, "exact.json is damaged"),
        (BOTH, "claims.yaml", "[" * 3000, "claims.yaml is nested deeper than 50 levels"),
        (BOTH, "claims.yaml", CLAIMS.replace("{cell:", "{[1]:"), "claims.yaml is not valid YAML"),
    ],
)
def test_damage_is_one_line(folder, capsys, commands, file, content, words):
    path = folder / file
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    before = {each: each.read_bytes() for each in folder.rglob("*") if each.is_file()}
    for main in commands:
        code, said = ended(main, folder, capsys)
        assert code == 1
        assert words in said
        assert said.count("\n") == 1
    assert {each: each.read_bytes() for each in folder.rglob("*") if each.is_file()} == before


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (b"run,step\na,1\n", "expected run, step, name and value"),
        (b"run,step,name,value\na,x,train/loss,1\n", "expected run, step, name and value"),
        (b"run,step,name,value\na,1,train/loss,y\n", "expected run, step, name and value"),
    ],
)
def test_damaged_curves_are_one_line(folder, capsys, table, words):
    (folder / "other").mkdir()
    (folder / "other" / "runs.csv").write_text(HEAD + ROW)
    (folder / "other" / "curves.csv.gz").write_bytes(gzip.compress(table))
    code, said = ended(report.main, folder, capsys)
    assert (code, said.count("\n")) == (1, 1)
    assert words in said


def test_a_table_of_something_else_is_no_table_of_outcomes(folder, capsys):
    import pandas as pd

    (folder / "other").mkdir()
    (folder / "other" / "runs.csv").write_text(HEAD + ROW)
    pd.DataFrame({"run": ["a"], "x": [1]}).to_parquet(folder / "other" / "examples.parquet")
    code, said = ended(report.main, folder, capsys)
    assert code == 1
    assert said.endswith("lacks example, outcome, value: it is no table of outcomes.\n")


def test_a_claim_about_a_column_of_words_is_unmatched(folder, capsys):
    text = CLAIMS.replace("metric: test/probe", "metric: cell")
    (folder / "claims.yaml").write_text(text)
    claims.main([f"--results={folder}", f"--claims={folder}/claims.yaml"])
    assert "unmatched: the column 'cell' holds no numbers" in capsys.readouterr().out
