import json
import math

import pandas as pd
import pytest

from offsphere.analysis.foreign_runs import find_column, read_runs, spelt, to_number

ROWS = [
    {"seed": seed, "method": method, "acc": 0.5 + seed / 10 + gain}
    for seed in (0, 1, 2)
    for method, gain in (("none", 0.0), ("NA", 0.25))
]


def same(table: pd.DataFrame, prefix: tuple[str, str] = ("", "")) -> bool:
    settings, measured = prefix
    found = [
        (int(row[f"{settings}seed"]), row[f"{settings}method"], float(row[f"{measured}acc"]))
        for row in table.to_dict("records")
    ]
    return found == [(row["seed"], row["method"], row["acc"]) for row in ROWS]


@pytest.mark.parametrize("form", ["csv", "tsv", "parquet", "json", "jsonl"])
def test_every_form_gives_the_same_rows(form, tmp_path):
    path, table = tmp_path / f"runs.{form}", pd.DataFrame(ROWS)
    if form in ("csv", "tsv"):
        table.to_csv(path, index=False, sep="\t" if form == "tsv" else ",")
    elif form == "parquet":
        table.to_parquet(path)
    elif form == "json":
        path.write_text(json.dumps(ROWS))
    else:
        path.write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")
    assert same(read_runs(path))


def test_an_export_of_mlflow(tmp_path):
    """The columns of mlflow.search_runs()."""
    rows = [
        {
            "run_id": f"{i:032x}",
            "status": "FINISHED",
            "metrics.acc": row["acc"],
            "params.seed": str(row["seed"]),
            "params.method": row["method"],
        }
        for i, row in enumerate(ROWS)
    ]
    pd.DataFrame(rows).to_csv(tmp_path / "runs.csv", index=False)
    table = read_runs(tmp_path / "runs.csv")
    assert same(table, ("params.", "metrics."))
    assert find_column(table, "acc", "--metric") == "metrics.acc"
    assert find_column(table, "seed", "--pair") == "params.seed"


@pytest.mark.parametrize("spell", [repr, json.dumps])
def test_an_export_of_wandb_whose_cells_are_dictionaries(spell, tmp_path):
    """What W&B's own example of its API writes: summary, config and name, as pandas spells them."""
    rows = [
        {
            "summary": spell({"acc": row["acc"], "loss": math.nan, "_step": 10}),
            "config": spell({"seed": row["seed"], "method": row["method"], "model": {"dim": 8}}),
            "name": f"run-{i}",
        }
        for i, row in enumerate(ROWS)
    ]
    pd.DataFrame(rows).to_csv(tmp_path / "project.csv")
    table = read_runs(tmp_path / "project.csv")
    assert same(table, ("config.", "summary."))
    assert set(table["config.model.dim"]) == {"8"}
    assert math.isnan(to_number(table["summary.loss"][0], "loss"))


def test_levels_have_one_spelling():
    assert [spelt(x) for x in (0, 0.0, "0", "0.0", " 0 ", "+0")] == ["0"] * 6
    assert [spelt(x) for x in ("1e-3", "0.0010", 0.001)] == ["0.001"] * 3
    assert spelt(2**63 - 1) == "9223372036854775807"
    assert [spelt(x) for x in ("none", "NA", "1_000", "nan", "resnet50")] == [
        *("none", "NA", "1_000", "nan", "resnet50"),
    ]


def test_a_name_that_two_places_have_is_asked_for():
    table = pd.DataFrame([{"metrics.lr": 1, "params.lr": 1, "acc": 2}])
    with pytest.raises(ValueError, match="metrics.lr or params.lr: name the one that is meant"):
        find_column(table, "lr", "--arm")
    with pytest.raises(ValueError, match="Unknown column for --metric 'accc'. Did you mean 'acc'?"):
        find_column(table, "accc", "--metric")
