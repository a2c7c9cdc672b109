"""Data with a name: below a root that is no part of a run, and called as committed rows call it."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from offsphere.analysis.tables import stored_rows
from offsphere.cli import SCRIPTS
from offsphere.data.needs import data_names
from offsphere.run import catalog
from offsphere.run.config import from_dict, identity_settings, run_name
from offsphere.study.reproduce import settings_in
from offsphere.training.settings import ImageSettings
from text.passages import load_collection
from text.settings import RetrievalSettings

ROOT = Path(__file__).parents[3]
TABLES = sorted(ROOT.glob("results/**/runs.csv"))
OLD_TRAIN = "wds:../shared/data/cifar10/cifar10-train-{000000..000004}.tar"
OLD_TEST = "wds:../shared/data/cifar10/cifar10-test-000000.tar"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OFFSPHERE_DATA", str(tmp_path))
    return tmp_path


def put_scifact(root: Path) -> None:
    (root / "scifact/qrels").mkdir(parents=True)
    rows = {"corpus": ("a", "one text"), "queries": ("q", "one question")}
    for file, (key, text) in rows.items():
        (root / f"scifact/{file}.jsonl").write_text(json.dumps({"_id": key, "text": text}) + "\n")
    for split in ("train", "test"):
        (root / f"scifact/qrels/{split}.tsv").write_text("query-id\tcorpus-id\tscore\nq\ta\t1\n")


def test_a_name_and_its_old_place_are_one_run_with_the_old_name() -> None:
    by_name = ImageSettings(data="cifar10-shards", data_test="cifar10-shards:test")
    by_place = ImageSettings(data=OLD_TRAIN, data_test=OLD_TEST)
    assert by_place == by_name
    assert by_name.data == "cifar10-shards"
    assert identity_settings(by_name)["data"] == OLD_TRAIN
    assert identity_settings(by_name)["data_test"] == OLD_TEST
    several = RetrievalSettings(eval_data=("beir:../shared/data/scifact", "docstrings", "npl"))
    assert several.eval_data == ("scifact", "docstrings", "npl")
    assert identity_settings(several)["eval_data"] == [
        "beir:../shared/data/scifact",
        "docstrings",
        "npl",
    ]


def test_the_root_is_no_part_of_a_run() -> None:
    here = ImageSettings(data="cifar10-shards")
    assert run_name(here) == run_name(replace(here, data_root="/elsewhere"))


def test_test_data_of_a_name_are_its_own() -> None:
    assert ImageSettings(data="tinyimagenet32").data_test == "tinyimagenet32:test"
    assert ImageSettings(data="tinyimagenet32", eval_split="validation").data_test is None


@pytest.mark.parametrize("table", TABLES, ids=lambda table: "-".join(table.parts[-3:-1]))
def test_every_committed_row_keeps_its_name(table: Path) -> None:
    """One row of each kind is read as flags are; seeds and numbers go in directly."""
    made: dict[str, object] = {}
    for row in stored_rows(table):
        config_class = SCRIPTS[row["script"]]().config_class
        known = settings_in(row, config_class)
        kind = json.dumps([row["script"], {**known, "seed": 0}], sort_keys=True)
        if kind not in made:
            made[kind] = from_dict(config_class, known)
        assert run_name(replace(made[kind], seed=row["seed"])) == row["run"]


def test_committed_tables_name_no_other_data_than_the_catalog_knows() -> None:
    for table in TABLES:
        with table.open(newline="") as file:
            for row in csv.DictReader(file):
                for column in ("data", "data_test", "data_ood"):
                    assert "../" not in catalog.named(row.get(column) or "")


def test_what_is_not_there_is_said_with_its_place_and_its_making(root: Path) -> None:
    with pytest.raises(FileNotFoundError) as refusal:
        load_collection("scifact")
    said = str(refusal.value)
    assert said.startswith(f"scifact is not there: no scifact/corpus.jsonl and 3 more in {root} ")
    assert "--data-root or OFFSPHERE_DATA" in said
    assert "scifact.zip: docs/data.md" in said


def test_flag_then_variable_then_cache(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert catalog.data_root("/flag") == Path("/flag")
    assert catalog.data_root() == root
    monkeypatch.delenv("OFFSPHERE_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert catalog.data_root() == Path("/cache/offsphere/data")


def test_a_name_is_read_below_the_root(root: Path) -> None:
    put_scifact(root)
    found = load_collection("scifact")
    assert (found.name, len(found.documents)) == ("scifact", 1)
    assert found == load_collection("beir:../shared/data/scifact")
    assert found == load_collection("scifact", data_root=str(root))
    before = catalog.fingerprint("scifact")
    (root / "scifact/queries.jsonl").write_text('{"_id": "q", "text": "another"}\n')
    assert catalog.fingerprint("scifact") != before


def test_names_do_not_collide_with_what_lanes_read_themselves() -> None:
    from offsphere.data.images import EMOJI_STYLES, TORCHVISION_FILES

    assert not set(catalog.KNOWN) & {*TORCHVISION_FILES, *EMOJI_STYLES, "docstrings"}
    for name, known in catalog.KNOWN.items():
        assert known.test is None or known.test in catalog.KNOWN
        assert len(known.fingerprint) == 16
        assert f"| `{name}` | " in (ROOT / "docs/data.md").read_text()
        assert f"| {known.fingerprint} |" in (ROOT / "docs/data.md").read_text()


def test_the_data_of_settings() -> None:
    config = ImageSettings(data="cifar10-shards", data_ood="emoji")
    assert data_names(config) == ["cifar10-shards", "cifar10-shards:test", "emoji"]
