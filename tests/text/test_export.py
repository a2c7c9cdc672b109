"""Exports of text runs: sentence-transformers itself ranks as our own evaluation does."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pyarrow.parquet as parquet
import pytest
import torch
from safetensors.torch import load_file
from samples import write_bert

from offsphere.cells import Cell
from offsphere.cli import SCRIPTS, main
from offsphere.export.command import Config, run
from text import train_retrieval, train_sts
from text.pairs import make_task
from text.passages import beir_folder
from text.sentences import load_sentences

pytest.importorskip("sentence_transformers", reason="the extra `interop` is not installed")

from sentence_transformers import SentenceTransformer

from offsphere.export.sentences import load_model

CELLS = ("cosine", "qnorm", "dnorm", "dot", "0.3,0.7", "0.5,0.5", "learnable")


def train(folder: Path, out: Path, **settings: object) -> Path:
    """A run of a few steps, with its embeddings."""
    given = {
        "data": f"beir:{folder}", "batch_size": 8, "samples": 24, "lr": 0.01, "threads": 1,
        "save_embeddings": True, "max_length": 12, "out": str(out),
    }  # fmt: skip
    train_retrieval.run(train_retrieval.Config(**given | settings))
    return max((out / "train_retrieval").iterdir(), key=lambda path: path.stat().st_mtime)


def texts(folder: Path) -> tuple[list[str], list[str]]:
    task = make_task(beir_folder(folder), "query", "test")
    return [task.queries[q] for q in task.measured], task.documents


def exponents(path: Path) -> tuple[float, float]:
    metrics = json.loads((path / "metrics.json").read_text())
    return metrics["train/exponent_left"], metrics["train/exponent_right"]


def assert_ranks_as_evaluated(model, path: Path, data: Path, atol: float = 1e-5) -> None:
    """Scores of the loaded export are the cell's, and the order is ours to the last document."""
    kept = load_file(path / "embeddings.safetensors")
    cell = Cell(exponents=exponents(path))
    expected = cell.scores(kept["query"], kept["document"])
    queries, documents = texts(data)
    found = model.similarity(
        model.encode_query(queries, convert_to_tensor=True),
        model.encode_document(documents, convert_to_tensor=True),
    )
    scale = expected.abs().max()
    torch.testing.assert_close(found / scale, expected / scale, rtol=1e-4, atol=atol)
    assert_same_order(found, expected, scale * 1e-5)


def assert_same_order(found: torch.Tensor, expected: torch.Tensor, tie: torch.Tensor) -> None:
    """Every document's place is the same, but among scores that differ by less than `tie`."""
    order = found.argsort(dim=1, descending=True, stable=True)
    ours = expected.gather(1, order)
    assert (ours.diff(dim=1) <= tie).all()


@pytest.fixture(scope="module")
def run_of(collection_folder, bert_folder, tmp_path_factory) -> Callable[[str], Path]:
    """A cell's run of a transformer that is trained as a whole, made once."""
    out = tmp_path_factory.mktemp("runs")
    return cache(
        lambda cell: train(
            collection_folder, out, cell=cell, encoder=str(bert_folder), tune="all",
            document_prefix="sun ",
        )
    )  # fmt: skip


@pytest.mark.parametrize("cell", CELLS)
def test_every_cell_of_a_transformer_leaves_exactly(cell, collection_folder, run_of, tmp_path):
    path = run_of(cell)
    said = run(Config(run=str(path), out=str(tmp_path / "model")), SCRIPTS)
    out = tmp_path / "model"
    own = cell in ("0.3,0.7", "0.5,0.5", "learnable")
    assert ("load_model" in said) == own
    assert (out / "shrink.py").is_file() == own
    loaded = [load_model(out)]
    if own:
        with pytest.raises(ValueError, match="trust_remote_code"):
            SentenceTransformer(str(out), device="cpu")
    else:
        loaded.append(SentenceTransformer(str(out), device="cpu"))
    for model in loaded:
        assert model.similarity_fn_name == ("cosine" if cell == "cosine" else "dot")
        assert_ranks_as_evaluated(model, path, collection_folder)
    card = (out / "README.md").read_text()
    assert f"the cell `{cell}`" in card
    assert "license: unknown" in card
    assert ("The document norm is kept: |document| cos" in card) == (cell == "qnorm")
    assert "nDCG@10, BM25" in card
    assert not [file for file in tmp_path.iterdir() if file.name.endswith(".tmp")]


ENCODERS = {
    "head": {"tune": "head", "head": "linear"},
    "mlp": {"tune": "head", "head": "mlp", "head_hidden": 24},
    "cls": {"tune": "all", "pooling": "cls", "head": "linear"},
    "separate": {"tune": "all", "towers": "separate"},
    "two_heads": {"tune": "head", "towers": "separate"},
    "prefixes": {"tune": "all", "query_prefix": "cat dog ", "document_prefix": "sun "},
    "static": {"encoder": "static", "tokens": "wordpiece", "width": 16},
    "words": {"encoder": "static", "tokens": "words", "width": 16},
    "scratch": {"encoder": "scratch", "width": 16, "heads": 2, "final_norm": False},
}


@pytest.mark.parametrize("name", ENCODERS)
def test_every_kind_of_encoder_and_head_leaves_exactly(
    name, collection_folder, bert_folder, tmp_path
):
    settings = {"encoder": str(bert_folder), "cell": "qnorm", **ENCODERS[name]}
    path = train(collection_folder, tmp_path, **settings)
    main(["export", f"--run={path}", f"--out={tmp_path / 'model'}"])
    assert_ranks_as_evaluated(load_model(tmp_path / "model"), path, collection_folder)


def test_layers_trained_above_frozen_ones_are_joined_again(collection_folder, tmp_path):
    folder = write_bert(
        tmp_path / "bert", ["cat", "dog", "sun", "sea", "box", "jar", "owl"], layers=3
    )
    settings = {"encoder": str(folder), "tune": "top:1", "redraw": 1, "cell": "dot"}
    path = train(collection_folder, tmp_path, **settings)
    run(Config(run=str(path), out=str(tmp_path / "model")), SCRIPTS)
    model = SentenceTransformer(str(tmp_path / "model"), device="cpu")
    assert_ranks_as_evaluated(model, path, collection_folder)


def test_a_cut_run_leaves_with_its_checkpoint_and_another_scoring_cell(
    collection_folder, bert_folder, tmp_path
):
    settings = {"encoder": str(bert_folder), "cell": "dot", "eval_cell": "cosine"}
    path = train(collection_folder, tmp_path, **settings)
    whole = run(Config(run=str(path), out=str(tmp_path / "whole")), SCRIPTS)
    assert "The vectors have length 1" in whole
    (path / "encoder.safetensors").unlink()
    (path / "metrics.json").unlink()
    run(Config(run=str(path), out=str(tmp_path / "cut")), SCRIPTS)
    assert "The run was cut." in (tmp_path / "cut" / "README.md").read_text()
    vectors = [
        load_model(tmp_path / name).encode(["cat dog sun"], convert_to_tensor=True)
        for name in ("whole", "cut")
    ]
    assert torch.equal(*vectors)
    assert vectors[0].norm().item() == pytest.approx(1, abs=1e-6)


def test_a_side_must_be_named_where_the_sides_differ(run_of, tmp_path):
    run(Config(run=str(run_of("qnorm")), out=str(tmp_path / "model")), SCRIPTS)
    model = SentenceTransformer(str(tmp_path / "model"), device="cpu")
    with pytest.raises(ValueError, match="Could not determine route"):
        model.encode(["cat dog"])


def test_a_regression_on_sentences_leaves_with_its_scores(tmp_path):
    config = train_sts.Config(
        cell="s1norm", encoder="scratch", width=16, heads=2, samples=320, batch_size=32, threads=1,
        out=str(tmp_path), score_scale="learnable",
    )  # fmt: skip
    train_sts.run(config)
    (path,) = (tmp_path / "train_sts").iterdir()
    run(Config(run=str(path), out=str(tmp_path / "model")), SCRIPTS)
    pairs = load_sentences("emoji", None, "test")["test"]
    model = load_model(tmp_path / "model")
    scores = model.similarity_pairwise(
        model.encode_query(list(pairs.left), convert_to_tensor=True),
        model.encode_document(list(pairs.right), convert_to_tensor=True),
    )
    kept = load_file(path / "examples.safetensors")["predicted"]
    scale = json.loads((path / "metrics.json").read_text())["train/score_scale"]
    torch.testing.assert_close(scores * scale, kept, rtol=1e-4, atol=1e-6)


def test_the_atlas_gets_vectors_norms_and_right_or_wrong(collection_folder, run_of, tmp_path):
    path = run_of("dot")
    run(Config(run=str(path), out=str(tmp_path / "x.parquet"), as_="atlas"), SCRIPTS)
    table = parquet.read_table(tmp_path / "x.parquet").to_pydict()
    kept = load_file(path / "embeddings.safetensors")
    vectors = torch.cat([kept["query"], kept["document"]])
    torch.testing.assert_close(torch.tensor(table["vector"]), vectors)
    torch.testing.assert_close(torch.tensor(table["norm"]), vectors.norm(dim=1))
    best = (kept["query"] @ kept["document"].T).argsort(dim=1, descending=True)
    task = make_task(beir_folder(collection_folder), "query", "test")
    right = [int(row[0]) in task.test[q] for q, row in zip(task.measured, best, strict=True)]
    assert table["right"] == right + [None] * 60
    found = [int((best[:, :10] == document).sum()) for document in range(60)]
    assert table["found"] == [None] * 16 + found
    assert table["id"] == [f"q{i}" for i in range(32, 48)] + [f"d{i}" for i in range(60)]
    assert table["side"] == ["query"] * 16 + ["document"] * 60
    assert table["text"][16:] == task.documents


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cell", ["cosine", "qnorm", "dnorm", "dot"])
def test_mtebs_own_evaluator_gives_our_ndcg(cell, collection_folder, run_of, tmp_path, monkeypatch):
    """A local task, no hub: the model's `similarity` decides, and ours is the run's cell."""
    mteb = pytest.importorskip("mteb", reason="the extra `interop` is not installed")
    from mteb.types import PromptType
    from mteb_tasks import local_task

    from offsphere.export.mteb_model import CellModel

    path = run_of(cell)
    said = run(Config(run=str(path), out=str(tmp_path / "model"), as_="mteb"), SCRIPTS)
    assert "CellModel(" in said
    model = CellModel(tmp_path / "model")
    asked, documents = texts(collection_folder)
    judged = make_task(beir_folder(collection_folder), "query", "test")
    numbers = [str(q) for q in judged.measured]
    relevant = {str(q): {f"d{d}": g for d, g in judged.test[q].items()} for q in judged.measured}
    corpus = {"id": [f"d{i}" for i in range(len(documents))], "text": documents}
    task = local_task({"id": numbers, "text": asked}, corpus, relevant)
    # MTEB rounds its means to five digits: without that they are compared to the sixth.
    rounding = "mteb._evaluators.retrieval_metrics.round"
    monkeypatch.setattr(rounding, lambda x, digits=0: x if digits else round(x), raising=False)
    (result,) = mteb.evaluate(model, task, cache=None, show_progress_bar=False).task_results
    metrics = json.loads((path / "metrics.json").read_text())
    assert result.scores["test"][0]["ndcg_at_10"] == pytest.approx(metrics["test/ndcg10"], abs=1e-6)
    kept = load_file(path / "embeddings.safetensors")
    expected = Cell(cell).scores(kept["query"], kept["document"])
    batches = [{"text": asked}], [{"text": documents}]
    roles = (PromptType.query, PromptType.document)
    where = {"task_metadata": task.metadata, "hf_split": "test", "hf_subset": "default"}
    sides = [model.encode(b, prompt_type=r, **where) for b, r in zip(batches, roles, strict=True)]
    torch.testing.assert_close(model.similarity(*sides), expected, rtol=1e-4, atol=1e-4)
    both = [side[:16] for side in sides]
    pairs = model.similarity_pairwise(*both)
    torch.testing.assert_close(pairs, expected[:16, :16].diagonal(), rtol=1e-4, atol=1e-4)


def test_bad_input_is_one_line_and_nothing_is_written(run_of, tmp_path, capsys):
    path = run_of("dot")
    full = tmp_path / "full"
    full.mkdir()
    (full / "x").touch()
    broken = {name: tmp_path / name for name in ("cut", "other", "none", "lab", "pickle")}
    for folder in broken.values():
        shutil.copytree(path, folder)
    (broken["cut"] / "encoder.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    config = (broken["other"] / "config.yaml").read_text()
    (broken["other"] / "config.yaml").write_text(config.replace("head: none", "head: linear"))
    (broken["none"] / "config.yaml").unlink()
    lab = json.loads((broken["lab"] / "provenance.json").read_text()) | {"script": "simplex"}
    (broken["lab"] / "provenance.json").write_text(json.dumps(lab))
    (broken["pickle"] / "metrics.json").unlink()
    (broken["pickle"] / "checkpoint" / "last.pt").write_bytes(pickle.dumps(Trap(tmp_path)))
    before = sorted(file.name for file in tmp_path.iterdir())
    for run_folder, more, code, said in (
        (path, ["--as=open_clip"], 1, "is a text run, which --as=open_clip cannot hold"),
        (path, ["--as=opnclip"], 2, "Unknown value of --as 'opnclip'. Did you mean 'open_clip'"),
        (path, ["--as-cosine"], 1, "--as-cosine is for --as=open_clip"),
        (path, [f"--out={full}"], 1, "full is not empty"),
        (path, ["--as=atlas"], 1, "expected --out=NAME.parquet"),
        (broken["cut"], [], 1, "Cannot read .*encoder.safetensors"),
        (broken["other"], [], 1, "do not fit its config.yaml"),
        (broken["none"], [], 1, "is not a run: it has no config.yaml"),
        (broken["lab"], [], 1, "is a run of simplex: expected one of train_clip, train_retrieval"),
        (broken["pickle"], [], 1, "Cannot read the checkpoint"),
        (tmp_path / "absent", [], 1, "No such file or folder"),
    ):
        with pytest.raises(SystemExit) as end:
            main(["export", f"--run={run_folder}", f"--out={tmp_path / 'out'}", *more])
        error = capsys.readouterr().err
        assert end.value.code == code, error
        assert re.search(said, error), error
        assert error.count("\n") == 1
        assert sorted(file.name for file in tmp_path.iterdir()) == before


class Trap:
    """Unpickling it, or importing what it stands for, leaves a file."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "trapped"

    def __reduce__(self) -> tuple:
        return (Path.touch, (self.file,))


def test_nothing_in_an_export_of_somebody_else_is_run(run_of, tmp_path):
    out = tmp_path / "model"
    run(Config(run=str(run_of("0.3,0.7")), out=str(out)), SCRIPTS)
    trap = f"from pathlib import Path\nPath({str(tmp_path / 'trapped')!r}).touch()\n"
    (out / "shrink.py").write_text(trap)
    model = load_model(out)
    assert model.encode_query(["cat"]).shape == (1, 16)
    (out / "evil.py").write_text(trap)
    router = json.loads((out / "router_config.json").read_text())
    router["types"] = dict.fromkeys(router["types"], "evil.Evil")
    (out / "router_config.json").write_text(json.dumps(router))
    with pytest.raises(ValueError, match="not part of Sentence Transformers"):
        load_model(out)
    modules = [{"idx": 0, "name": "0", "path": "", "type": "evil.Evil"}]
    (out / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ValueError, match="not part of Sentence Transformers"):
        load_model(out)
    (out / "modules.json").unlink()
    with pytest.raises(ValueError, match="is no export for sentence-transformers"):
        load_model(out)
    assert not (tmp_path / "trapped").exists()
