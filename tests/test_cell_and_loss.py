"""A sixth corner and a new loss, added as CONTRIBUTING.md says, from training to the page."""

import csv
import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("offsphere", "vision", "crossmodal", "text", "theory")
FUNCTION = '''

def hinge(left: Tensor, right: Tensor, temperature: float | Tensor) -> Tensor:
    """How far each negative comes within 1 of its row's positive."""
    scores = left @ right.T / temperature
    return (1 + scores - scores.diagonal()[:, None]).clamp_min(0).fill_diagonal_(0).mean()
'''
STUDY = """
metric: test/knn
seeds: [1]
fixed: {{threads: 1, batch_size: 16, log_every: 1}}
parts:
  - name: images
    script: train_simclr
    fixed: {{data: emoji, limit: 64, image_size: 16, samples: 64, loss: hinge}}
    grid: {{cell: [cosine, half]}}
  - name: texts
    script: train_retrieval
    fixed: {{data: "beir:{collection}", encoder: static, tokens: words, width: 16, samples: 64}}
    grid: {{cell: [cosine, half]}}
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """The project with the rows that CONTRIBUTING.md shows, and the loss's function."""
    copy = tmp_path_factory.mktemp("copy")
    for name in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    rows = re.findall(r'^"\w+": \w+Row\(.*\),$', (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    names, losses = (copy / "offsphere" / file for file in ("names.py", "losses.py"))
    source = names.read_text()
    for table, row in zip(("CELLS", "LOSSES"), rows, strict=True):
        assert source.count(f"\n{table} = {{\n") == 1
        source = source.replace(f"\n{table} = {{\n", f"\n{table} = {{\n    {row}\n")
    names.write_text(source)
    losses.write_text(losses.read_text() + FUNCTION)
    return copy


@pytest.fixture(scope="module")
def collection(tmp_path_factory) -> Path:
    """32 documents of words of their own, each with a query; half of the queries train."""
    folder, draw = tmp_path_factory.mktemp("collection"), random.Random(0)
    (folder / "qrels").mkdir()
    words = [f"w{number}" for number in range(200)]
    documents = [draw.choices(words, k=12) for _ in range(32)]
    for file, length in (("corpus", 12), ("queries", 4)):
        rows = [{"_id": str(i), "text": " ".join(x[:length])} for i, x in enumerate(documents)]
        (folder / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for split, ids in (("train", range(24)), ("test", range(24, 32))):
        lines = ["query-id\tcorpus-id\tscore", *(f"{i}\t{i}\t1" for i in ids)]
        (folder / "qrels" / f"{split}.tsv").write_text("\n".join(lines) + "\n")
    return folder


def offsphere(copy: Path, *words: str) -> None:
    """The command, as of the copy."""
    environment = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    code = "import sys, offsphere.cli as c; assert c.__file__.startswith(sys.argv.pop(1)); c.main()"
    command = [sys.executable, "-c", code, str(copy), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=copy)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_new_cell_and_a_new_loss_go_from_training_to_the_page(copy, collection, tmp_path):
    (tmp_path / "sixth.yaml").write_text(STUDY.format(collection=collection))
    offsphere(copy, "study", str(tmp_path / "sixth.yaml"), f"--out={tmp_path}")
    with (tmp_path / "sixth" / "runs.csv").open() as file:
        runs = list(csv.DictReader(file))
    assert [(run["script"], run["cell"], run["status"]) for run in runs].count(
        ("train_simclr", "half", "finished")
    ) == 1
    by_script = {run["script"]: run for run in runs if run["cell"] == "half"}
    assert by_script["train_simclr"]["loss"] == "hinge"
    retrieved = by_script["train_retrieval"]
    # Only the document's exponent can change a ranking, and half shares cosine's.
    assert retrieved["test/ndcg10_scored_half"] == retrieved["test/ndcg10_scored_cosine"]
    offsphere(copy, "report", str(tmp_path / "sixth"))
    page = next((tmp_path / "sixth").glob("*.html")).read_text()
    assert "half" in page
