import json
import math
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pandas.testing import assert_frame_equal
from pyarrow.parquet import ParquetFile
from safetensors.numpy import save_file

from offsphere.analysis.tables import (
    CURVES,
    EXAMPLES,
    RUNS,
    append_rows,
    curves_table,
    examples_by_run,
    examples_table,
    is_torn,
    mend,
    read_runs,
    run_folders,
    runs_table,
    stored_rows,
    table_of,
    write_curves,
    write_examples,
    write_runs,
)
from offsphere.run.config import unhashed
from offsphere.run.record import open_run


@dataclass(frozen=True)
class Config:
    cell: str = "cosine"
    seed: int = 0
    lr: float = 0.1
    limit: int | None = None
    head_norm: bool = False
    sizes: tuple[int, ...] = (1, 2)
    note: str | None = None
    out: str = unhashed("results")


def record(folder: Path, config: Config, metrics: dict | None, reason: str = "") -> Path:
    """A real run folder: finished with metrics, failed with a reason, or cut."""
    with open_run(config, script="train.py", out=folder.parent, study=folder.name) as run:
        run.describe_data({"train": {"hash": "abc", "size": 3}})
        for step in (0, 20):
            seen = {"samples": 12_345_678 + step, "train/loss": 1 / (step + 3)}
            run.log_step({"step": step, **seen, "run/note": "text"})
        if metrics is not None:
            run.finish(metrics)
        elif reason:
            run.fail(reason)
    return run.path


@pytest.fixture
def study(tmp_path):
    folder = tmp_path / "study"
    record(folder, Config(seed=0), {"test/probe": 1 / 3, "test/n": 7})
    record(folder, Config(seed=1, limit=5, head_norm=True), {"test/probe": math.nan})
    record(folder, Config("dot", 0, note="a, 'b'\n\"c\""), {"test/probe": 1e-300, "test/n": 8})
    record(folder, Config("dot", 1), None, "loss is nan,\nat step 3")
    record(folder, Config("dot", 2), None)
    return folder


def test_one_row_per_run_folder(study):
    table = runs_table(study).set_index("run")
    assert list(table["status"]) == ["finished", "finished", "finished", "failed", "cut"]
    failed = table[table["status"] == "failed"].iloc[0]
    assert (failed["reason"], failed["cell"], failed["seed"]) == (
        "loss is nan,\nat step 3",
        "dot",
        1,
    )
    first = table[(table["cell"] == "cosine") & (table["seed"] == 0)].iloc[0]
    assert (first["test/probe"], first["test/n"], first["lr"]) == (1 / 3, 7, 0.1)
    assert first["sizes"] == [1, 2]
    assert first["script"] == "train"
    assert table["data_hash"].nunique() == 1
    assert "run/status" not in table.columns
    assert first["run/versions"]["numpy"] == np.__version__
    assert first["run/data"] == {"train": {"hash": "abc", "size": 3}}
    assert first["run/python"] == ".".join(map(str, sys.version_info[:3]))
    assert str(table["limit"].dtype) == "Int64"
    assert str(table["head_norm"].dtype) == "bool"


def test_a_stored_table_is_the_table_of_the_folders(study, tmp_path):
    table = runs_table(study)
    write_runs(table, tmp_path / RUNS)
    assert_frame_equal(read_runs(tmp_path / RUNS), table)
    write_runs(table, study / RUNS)
    assert_frame_equal(runs_table(study), table)


def test_a_folder_is_newer_than_its_row_and_labels_are_kept(study):
    table = runs_table(study)
    table["arm"] = "plain"
    table.loc[0, "test/probe"] = 0.9
    table.loc[4, ["status", "test/knn"]] = ["finished", 0.5]
    again = pd.concat([table, table.iloc[:1].assign(arm="control")], ignore_index=True)
    elsewhere = table.iloc[:1].assign(run="elsewhere", arm=None)
    write_runs(pd.concat([again, elsewhere], ignore_index=True), study / RUNS)
    merged = runs_table(study)
    assert list(merged["arm"]) == ["plain"] * 5 + ["control", None]
    assert list(merged["test/probe"].iloc[[0, 5, 6]]) == [1 / 3, 1 / 3, 0.9]
    assert merged.loc[4, "status"] == "cut"
    assert "test/knn" not in merged.columns or pd.isna(merged.loc[4, "test/knn"])


def test_a_row_that_is_older_than_a_setting_has_its_default(study):
    table = runs_table(study)
    assert "loss_precision" not in table.columns
    newer = table.assign(loss_precision=["fp32", "tf32", None, None, None], limit=None)
    write_runs(newer, study / RUNS)
    stored = [path for path in study.iterdir() if path.is_dir()]
    for path in stored:
        shutil.rmtree(path)
    read = runs_table(study)
    assert list(read["loss_precision"]) == ["fp32", "tf32", "tf32", "tf32", "tf32"]
    assert read["limit"].isna().all()


def test_a_run_that_was_moved_aside_does_not_count(study):
    path = run_folders(study)[0]
    path.rename(path.with_name(path.name + ".before-1"))
    assert len(runs_table(study)) == 4


def test_an_empty_study_is_an_empty_table(tmp_path):
    assert runs_table(tmp_path / "nothing").empty
    assert curves_table(tmp_path / "nothing").empty
    assert examples_table(tmp_path / "nothing").empty


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
TEXTS |= st.sampled_from(["12", "1e5", "true", "null", "NaN", "nan", '"x"', "[1]", "", "0.3,0.7"])
COLUMNS = st.sampled_from(
    [
        st.integers(-(2**63), 2**63 - 1),
        st.floats(allow_nan=False),
        st.booleans(),
        TEXTS,
        st.lists(st.integers(0, 9), max_size=3),
        st.integers(0, 5) | TEXTS,
        st.integers(-5, 5) | st.floats(-5, 5),
    ]
)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_table_comes_back_to_the_last_digit(tmp_path_factory, data):
    from offsphere.analysis.tables import table_of

    rows = [{"run": f"run{i}"} for i in range(data.draw(st.integers(1, 4)))]
    for name in ("a", "b/c", "d,e"):
        values = data.draw(COLUMNS)
        for row in rows:
            row[name] = data.draw(st.none() | values)
    table = table_of(rows)
    path = tmp_path_factory.mktemp("round") / RUNS
    write_runs(table, path)
    assert_frame_equal(read_runs(path), table, check_exact=True)


def test_damaged_tables_are_named(study):
    (study / RUNS).write_text("run,seed\na,1\nb\n")
    with pytest.raises(ValueError, match=r"runs\.csv, row 3 has 1 cells, the head 2"):
        runs_table(study)
    (study / RUNS).write_text("cell,seed\na,1\n")
    with pytest.raises(ValueError, match="no column 'run'"):
        runs_table(study)
    (study / RUNS).unlink()
    (run_folders(study)[0] / "config.yaml").write_text("cell: [")
    with pytest.raises(ValueError, match=r"config\.yaml is not valid YAML"):
        runs_table(study)


def test_curves_are_long_and_come_back(study, tmp_path):
    curves = curves_table(study)
    assert len(curves) == 5 * 2 * 3
    loss = curves[(curves["name"] == "train/loss") & (curves["step"] == 20)]
    assert list(loss["value"]) == [0.0434783] * 5, "six digits of 1 / 23"
    seen = curves[(curves["name"] == "samples") & (curves["step"] == 20)]
    assert set(seen["value"]) == {12_345_698}, "whole numbers keep all digits"
    write_curves(curves, tmp_path / CURVES)
    assert_frame_equal(curves_table(tmp_path), curves, check_exact=True)
    first = (tmp_path / CURVES).read_bytes()
    write_curves(curves, tmp_path / CURVES)
    assert (tmp_path / CURVES).read_bytes() == first


def test_long_curves_are_thinned_evenly_and_keep_evaluations(tmp_path):
    folder = tmp_path / "study"
    path = record(folder, Config(seed=0), {"test/probe": 0.5})
    lines = [{"step": step, "train/loss": step / 7} for step in range(400)]
    lines.insert(123, {"step": 122, "test/probe": 0.25})
    (path / "steps.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    table = curves_table(folder)
    loss = table[table["name"] == "train/loss"]["step"].tolist()
    assert len(loss) == 40
    assert (loss[0], loss[-1]) == (0, 399)
    assert set(np.diff(loss)) <= {10, 11}
    assert table[table["name"] == "test/probe"]["value"].tolist() == [0.25]


def test_rows_are_added_at_the_end_and_the_last_of_a_run_counts(tmp_path):
    file = tmp_path / RUNS
    first = {"run": "a", "arm": "x", "status": "failed", "reason": "two\nlines", "test/m": None}
    second = {"run": "b", "arm": "x", "status": "finished", "reason": None, "test/m": 0.25}
    assert not append_rows([first], file), "there is no table yet"
    write_runs(table_of([first, second]), file)
    before = file.read_bytes()
    assert before.count(b"\n") == 3, "a row is one line"
    again = first | {"status": "finished", "reason": None, "test/m": 0.5}
    assert append_rows([again, again | {"arm": "y"}], file)
    assert file.read_bytes().startswith(before)
    assert stored_rows(file) == [again, second, again | {"arm": "y"}]
    assert not append_rows([again | {"test/new": 1}], file), "a new column: written anew"
    whole = file.read_bytes()
    for end in range(len(whole) - 3, len(before), -7):
        file.write_bytes(whole[:end])
        torn = not whole[:end].endswith(b"\n")
        assert is_torn(file) == torn
        if torn:
            mend(file)
        assert file.read_bytes() == whole[: whole[:end].rfind(b"\n") + 1]


def test_per_example_outcomes(study, tmp_path):
    rng = np.random.default_rng(0)
    one, two, *_ = run_folders(study)
    correct = rng.random((2, 30)) < 0.5
    norms = rng.random(30).astype(np.float32)
    save_file(
        {"knn_correct": correct[0], "norm": norms, "m": np.eye(2)}, one / "examples.safetensors"
    )
    save_file({"knn_correct": correct[1]}, two / "examples.safetensors")
    examples = examples_table(study)
    assert sorted(examples["outcome"].unique()) == ["knn_correct", "norm"]
    found = examples_by_run(study)
    for path, expected in ((one, correct[0]), (two, correct[1])):
        np.testing.assert_array_equal(found[path.name]["knn_correct"], expected)
    kept = found[one.name]["norm"]
    np.testing.assert_allclose(kept, norms, rtol=2**-8)
    assert (np.frexp(kept)[0] * 2**8 % 1 == 0).all()
    write_examples(examples, tmp_path / EXAMPLES)
    assert_frame_equal(examples_table(tmp_path), examples, check_exact=True)
    assert ParquetFile(tmp_path / EXAMPLES).num_row_groups == 2


@pytest.mark.parametrize("module", ["stats", "tables", "claims"])
def test_imports_neither_torch_nor_pandas(module):
    code = f"import offsphere.analysis.{module}, sys\n"
    code += "print([m for m in ('torch', 'pandas', 'statsmodels') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
