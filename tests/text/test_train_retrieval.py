"""Retrieval runs: every cell, frozen and from scratch; rankings, resume, the record, refusals."""

from __future__ import annotations

import dataclasses
import math
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from offsphere.cells import Cell
from offsphere.evaluation.ranking import Ranking, outcomes
from offsphere.names import CELLS
from offsphere.run.config import command, load_yaml, run_name
from offsphere.run.record import RunFolder, run_path
from offsphere.study.measures import unmeasured
from offsphere.training.experiment import objective_of
from offsphere.training.streams import stream
from text import experiment, pairs
from text import settings as text_settings
from text.evaluate import (
    answers_found,
    condition_number,
    fisher_conditions,
    ndcg_by,
    plain_words,
)
from text.experiment import Inputs
from text.lexical import bm25
from text.methods import make_head, make_towers
from text.pairs import make_task
from text.passages import beir_folder
from text.train_retrieval import Config, run

ROOT = Path(__file__).parents[2]
BATCH, STEPS = 12, 24
SIDES = ("query", "document")


def tiny(data: Path, out: Path, encoder: str = "scratch", **changes) -> Config:
    settings = {
        "data": f"beir:{data}", "encoder": encoder, "out": str(out), "batch_size": BATCH,
        "samples": STEPS * BATCH, "width": 16, "layers": 1, "heads": 2, "max_length": 16,
        "threads": 1, "log_every": 1, "progress": False, "lr": 3e-3,
    }  # fmt: skip
    return Config(**settings | changes)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("how", ["frozen", "scratch"])
def test_every_cell_runs_and_learns(how, cell, collection_folder, bert_folder, tmp_path: Path):
    encoder = "scratch" if how == "scratch" else str(bert_folder)
    config = tiny(collection_folder, tmp_path, encoder, cell=cell, pretrain_samples=0)
    metrics = run(config)
    assert metrics["run/status"] == "finished"
    assert metrics["test/floor"] in (0.0, 1.0)
    assert all(math.isfinite(v) for v in metrics.values() if isinstance(v, float))
    rows = RunFolder(run_path(config, script="train_retrieval", out=tmp_path)).steps()
    losses = [row["train/loss"] for row in rows]
    assert sum(losses[-6:]) < sum(losses[:6])
    # Prop. 4.1 on a real ranking: only the document's exponent counts.
    assert metrics["test/ndcg10_scored_qnorm"] == metrics["test/ndcg10_scored_dot"]
    assert metrics["test/ndcg10_scored_dnorm"] == metrics["test/ndcg10_scored_cosine"]
    if cell != "learnable":
        assert metrics["test/ndcg10"] == metrics[f"test/ndcg10_scored_{cell}"]


def test_a_whole_run_leaves_a_folder_that_explains_itself(
    collection_folder, bert_folder, write_beir, tmp_path: Path
):
    words = ["sun", "sea"] * 30
    corpus = [{"_id": str(i), "text": f"cat dog {word} {i}"} for i, word in enumerate(words)]
    other = write_beir(
        tmp_path / "other", corpus, [{"_id": "1", "text": "sun cat"}], {"test": [("1", "0", 1)]}
    )
    config = tiny(
        collection_folder,
        tmp_path,
        str(bert_folder),
        cell="qnorm",
        towers="separate",
        head="mlp",
        direction="both",
        hard_negatives=1,
        norm_penalty=0.1,
        pretrain_samples=6 * BATCH,
        eval_every=8 * BATCH,
        eval_data=(f"beir:{other}",),
        save_embeddings=True,
    )
    metrics = run(config)
    assert unmeasured("train_retrieval", set(metrics) - {"run/status", "run/ended"}) == []
    folder = RunFolder(run_path(config, script="train_retrieval", out=tmp_path))
    assert load_yaml(Config, folder.path / "config.yaml") == config
    examples = load_file(folder.path / "examples.safetensors")
    for name in ("ndcg10", "recall100", "mrr10"):
        assert examples[name].mean().item() == pytest.approx(metrics[f"test/{name}"])
        assert examples[f"other/{name}"].mean().item() == metrics[f"test/other/{name}"]
    for name in ("", "other/"):
        before = examples[f"untrained_{name}ndcg10"].mean().item()
        assert before == pytest.approx(metrics[f"untrained/{name}ndcg10"])
        lexical = examples[f"bm25_{name}ndcg10"].mean().item()
        assert lexical == pytest.approx(metrics[f"bm25/{name}ndcg10"])
    gain = examples["ndcg10"] - examples["untrained_ndcg10"]
    error = gain.std() / math.sqrt(len(gain))
    assert metrics["test/floor"] == float(not gain.mean() > 2 * error)
    rows = folder.steps()
    assert [row["step"] for row in rows if "test/ndcg10" in row] == [7, 15]

    vectors = load_file(folder.path / "embeddings.safetensors")
    norms = vectors["document"].norm(dim=1)
    assert metrics["test/norm_document_cv"] == pytest.approx(
        (norms.std(correction=0) / norms.mean()).item()
    )
    task = make_task(beir_folder(collection_folder), "query", "test")
    wanted = sorted({d for r in task.test.values() for d in r})
    asked, idle = norms[wanted].double(), norms[task.idle].double()
    squares = (asked - asked.mean()).square().sum() + (idle - idle.mean()).square().sum()
    pooled = (squares / (len(asked) + len(idle) - 2)).sqrt()
    assert metrics["test/cohens_d"] == pytest.approx(((asked.mean() - idle.mean()) / pooled).item())
    assert folder.provenance()["data"]["eval"][0]["data"] == "other"
    weights = load_file(folder.path / "encoder.safetensors")
    assert {name.split(".")[0] for name in weights} == {"0", "1"}


@pytest.mark.parametrize("direction", ["left_to_right", "both"])
def test_the_settings_reach_the_loss(direction, collection_folder, tmp_path: Path):
    """Dot over the batch's mean norms at temperature 0.5, written out, one-way and two-way."""
    given = {"cell": "dot", "scale": "fixed", "temperature": 0.5, "batch_mean_norm": True}
    settings = tiny(collection_folder, tmp_path, **given)
    objective = objective_of(settings, "info_nce", 90, direction=direction)
    query, document = 3 * torch.randn(2, 7, 5, generator=stream(0, "sides"))
    norms = query.norm(dim=1).mean() * document.norm(dim=1).mean()
    scores = query @ document.T / norms / 0.5
    expected = torch.nn.functional.cross_entropy(scores, torch.arange(7))
    if direction == "both":
        expected = (expected + torch.nn.functional.cross_entropy(scores.T, torch.arange(7))) / 2
    torch.testing.assert_close(objective(query, document)["loss"], expected)


def test_rankings_of_real_embeddings(collection_folder, bert_folder, tmp_path: Path):
    """Prop. 4.1: on the same embeddings qnorm ranks like dot, dnorm like cosine; others do not."""
    config = tiny(collection_folder, tmp_path, str(bert_folder), save_embeddings=True)
    run(config)
    file = run_path(config, script="train_retrieval", out=tmp_path) / "embeddings.safetensors"
    vectors = {name: x.double() for name, x in load_file(file).items()}
    order = {
        cell: Cell(cell).scores(vectors["query"], vectors["document"]).argsort(1, descending=True)
        for cell in ("cosine", "dot", "qnorm", "dnorm")
    }
    assert torch.equal(order["qnorm"], order["dot"])
    assert torch.equal(order["dnorm"], order["cosine"])
    assert (order["dot"] != order["cosine"]).any()


def test_post_hoc_similarities_are_fitted_on_documents_and_training_queries(
    collection_folder, bert_folder, tmp_path: Path
):
    names = ("centred", "query_zscore", "dot", "csls")
    given = {"similarities": names, "save_embeddings": True, "cell": "cosine"}
    config = tiny(collection_folder, tmp_path, str(bert_folder), **given)
    plain = tiny(collection_folder, tmp_path, str(bert_folder), cell="cosine")
    assert run_name(config) == run_name(plain)  # they change what is reported, not the run
    metrics = run(config)
    assert metrics["test/ndcg10_by_query_zscore"] == metrics["test/ndcg10_scored_cosine"]
    assert metrics["test/ndcg10_by_dot"] == metrics["test/ndcg10_scored_dot"]
    folder = run_path(config, script="train_retrieval", out=tmp_path)
    vectors = load_file(folder / "embeddings.safetensors")
    queries, documents = vectors["query"].double(), vectors["document"].double()
    inputs = Inputs(config)
    towers = make_towers(inputs.encoder, config)
    towers.load_state_dict(load_file(folder / "encoder.safetensors"))
    task = make_task(beir_folder(collection_folder), "query", "test")
    trained = inputs.encode(towers[0], inputs([task.queries[q] for q, _ in task.train])).double()
    scores = Cell("cosine").scores(queries - trained.mean(0), documents - documents.mean(0))
    ranking = Ranking(*scores.sort(descending=True))
    expected = outcomes(ranking, [task.test[q] for q in task.measured]).ndcg10
    torch.testing.assert_close(
        load_file(folder / "examples.safetensors")["ndcg10_by_centred"], expected
    )
    assert metrics["test/ndcg10_by_centred"] == pytest.approx(expected.mean().item())
    assert metrics["test/ndcg10_by_centred"] != metrics["test/ndcg10"]
    assert math.isfinite(metrics["test/ndcg10_by_csls"])


def test_a_similarity_that_cannot_be_fitted_is_told_and_left_out(capsys):
    same, queries = torch.ones(12, 4), torch.randn(3, 4, generator=stream(0, "q"))
    found = ndcg_by(["whitened", "cosine"], same, queries, same, [{0: 1}] * 3)
    assert found["ndcg10_by_whitened"].isnan().all()
    assert found["ndcg10_by_cosine"].isfinite().all()
    assert "The similarity whitened is left out: " in capsys.readouterr().out


def test_the_symmetric_twin_and_whole_fine_tuning(collection_folder, bert_folder, tmp_path: Path):
    config = tiny(
        collection_folder,
        tmp_path,
        str(bert_folder),
        task="halves",
        direction="both",
        tune="all",
        variance_weight=1.0,
        pooling="cls",
    )
    assert config.head == "none"
    metrics = run(config)
    assert metrics["run/status"] == "finished"
    weights = load_file(
        run_path(config, script="train_retrieval", out=tmp_path) / "encoder.safetensors"
    )
    start = make_towers(Inputs(config).encoder, config).state_dict()
    moved = [name for name in weights if not torch.equal(weights[name], start[name])]
    assert any("embeddings.word" in name for name in moved)


@pytest.mark.parametrize("kind", ["linear", "mlp", "none"])
def test_heads_start_as_the_identity(kind):
    x = torch.randn(5, 7, generator=stream(0, "x"))
    torch.testing.assert_close(make_head(kind, 7, 11)(x), x)


def test_one_seed_is_one_start_in_every_cell():
    def weights(**changes) -> dict[str, torch.Tensor]:
        config = Config(encoder="scratch", width=16, layers=1, heads=2, **changes)
        return make_towers(Inputs(config).encoder, config).state_dict()

    first, same, other = weights(cell="cosine"), weights(cell="dot"), weights(seed=1)
    assert all(torch.equal(first[name], same[name]) for name in first)
    name = "0.0.embedding.weight"
    correlation = torch.corrcoef(torch.stack([first[name].flatten(), other[name].flatten()]))[0, 1]
    assert correlation.abs() < 0.02


def test_the_condition_number_is_of_the_subspace_that_holds_the_gradients():
    basis = torch.linalg.qr(torch.randn(4, 4, generator=stream(0, "q"), dtype=torch.float64)).Q
    signs = torch.tensor([[1.0, 1, 1], [1, -1, 1], [1, 1, -1], [1, -1, -1]]).double()
    gradients = (signs * torch.tensor([1.0, 2.0, 4.0])) @ basis[:3]
    assert condition_number(gradients) == pytest.approx(16)


def test_the_fisher_matrix_is_of_each_embeddings_own_gradient(collection_folder, tmp_path: Path):
    """Against the sum over pairs of outer products, one per training pair, side by side."""
    settings = tiny(collection_folder, tmp_path, cell="qnorm", scale="fixed", temperature=0.5)
    objective = objective_of(settings, "info_nce", 90, direction="left_to_right").double()
    batches = [
        {side: torch.randn(8, 5, generator=stream(i, side), dtype=torch.float64) for side in SIDES}
        for i in range(2)
    ]
    method = SimpleNamespace(towers=[None, None], objective=objective)
    found = fisher_conditions(method, batches, lambda tower, rows: rows)
    parts = {side: [] for side in SIDES}
    for batch in batches:
        q, d = (batch[side].requires_grad_() for side in SIDES)
        scores = (q / q.norm(dim=1, keepdim=True)) @ d.T / 0.5
        loss = torch.nn.functional.cross_entropy(scores, torch.arange(8), reduction="sum")
        for side, gradient in zip(SIDES, torch.autograd.grad(loss, (q, d)), strict=True):
            parts[side].append(gradient)
    for side in SIDES:
        g = torch.cat(parts[side])
        values = torch.linalg.eigvalsh(sum(torch.outer(row, row) for row in g) / len(g))
        assert found[f"train/fisher_{side}"] == pytest.approx((values[-1] / values[0]).item())


def test_answers_are_found_word_for_word(collection_folder):
    assert plain_words("The  Cat, a dog!") == " cat dog "
    task = make_task(beir_folder(collection_folder), "query", "test")
    ranking = bm25([task.queries[q] for q in task.measured], task.documents, 60)
    found = answers_found(ranking, task)
    places = []
    for row, q in enumerate(task.measured):
        answer = plain_words(task.answers[q][0])
        texts = [plain_words(task.documents[d]) for d in ranking.documents[row].tolist()]
        places.append(next(i for i, text in enumerate(texts) if answer in text))
    for k in (1, 5, 20):
        assert found[f"answer_in_top{k}"] == sum(p < k for p in places) / len(places)
    assert found["answer_in_top20"] > 0.9


@pytest.mark.slow
def test_a_killed_run_goes_on_bit_for_bit(collection_folder, tmp_path: Path):
    def config(name: str) -> Config:
        return tiny(
            collection_folder,
            tmp_path / name,
            cell="learnable",
            samples=120 * BATCH,
            checkpoint_every=5,
            eval_every=15 * BATCH,
            hard_negatives=1,
        )

    whole, cut = config("whole"), config("cut")
    run(whole)
    folder = run_path(cut, script="train_retrieval", out=tmp_path / "cut")
    # A process of its own, killed after its first checkpoint.
    words = shlex.split(command(str(ROOT / "text" / "train_retrieval.py"), cut))
    child = subprocess.Popen([sys.executable, *words[1:]], stdout=subprocess.DEVNULL)
    while not (folder / "checkpoint" / "last.pt").exists():
        assert child.poll() is None, "it ended before its first checkpoint"
        time.sleep(0.005)
    child.kill()
    assert child.wait() == -signal.SIGKILL, "it ended before the kill: give it more steps"
    assert RunFolder(folder).metrics() == {}
    run(cut)
    assert len(RunFolder(folder).provenance()["resumed"]) == 1
    other = run_path(whole, script="train_retrieval", out=tmp_path / "whole")
    for name in ("encoder.safetensors", "examples.safetensors"):
        ours, theirs = load_file(folder / name), load_file(other / name)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[k], theirs[k]) for k in ours), name
    times = ("run/seconds", "run/ended")
    numbers = [_without(RunFolder(f).metrics(), times) for f in (folder, other)]
    assert numbers[0] == numbers[1]
    steps = [[_without(row, times) for row in RunFolder(f).steps()] for f in (folder, other)]
    assert steps[0] == steps[1]


def _without(row: dict, names: tuple[str, ...]) -> dict:
    return {k: v for k, v in row.items() if k not in names}


@pytest.mark.parametrize("task", ["query", "halves"])
def test_documents_whose_halves_are_measured_are_never_trained_on(
    task, collection_folder, tmp_path: Path, monkeypatch
):
    collection, left_out, stages = beir_folder(collection_folder), [], []

    def titles(found, unseen):
        left_out.append(unseen)
        return pairs.title_task(found, unseen)

    def batches(given, *others):
        stages.append(given)
        return pairs.PairBatches(given, *others)

    monkeypatch.setattr(experiment, "title_task", titles)
    monkeypatch.setattr(experiment, "PairBatches", batches)
    run(tiny(collection_folder, tmp_path, task=task, samples=None, epochs=4))
    measured = make_task(collection, "halves", "test").test
    assert left_out == [set(measured) if task == "halves" else set()]
    (_, first), (start, second) = stages[0]
    assert len(first.pairs) == len(collection.documents) - len(left_out[0])
    steps = 4 * len(second.pairs) // BATCH
    assert start == steps // 2, "half of the budget, also where it is given in epochs"


def test_defaults_are_recorded_and_follow_the_extra(monkeypatch):
    config = Config()
    assert (config.encoder, config.tune, config.head) == ("minilm", "head", "linear")
    assert (config.max_length, config.samples, config.pretrain_samples) == (128, 60_000, 0)
    assert text_settings.encoder_line(config) == "Encoder: minilm, frozen, with a trainable head."
    monkeypatch.setattr(text_settings, "TEXT_EXTRA", ("no_such_package",))
    config = Config()
    assert (config.encoder, config.tune, config.head) == ("scratch", "all", "linear")
    assert (config.max_length, config.pretrain_samples) == (64, 30_000)
    line = text_settings.encoder_line(config)
    assert line.endswith("pip install -e '.[text]' (missing: no_such_package).")
    assert dataclasses.replace(config) == config
    assert Config(epochs=2).pretrain_samples is None, "half of what the epochs come to"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"encoder": "scratch", "tune": "head"}, "has no weights to freeze"),
        ({"encoder": "minilm", "head": "none"}, "leaves nothing to train"),
        ({"pretrain_samples": 70_000}, "below the budget of 60000 samples"),
        ({"hard_negatives": -1}, "--hard-negatives must be at least 0"),
        ({"similarities": ("centered",)}, "Did you mean 'centred'"),
        ({"max_length": -3}, "--max-length must be at least 1, got -3"),
    ],
)
def test_settings_that_contradict_each_other(changes, message):
    with pytest.raises(ValueError, match=message):
        Config(**changes)


def test_refusals_of_a_run(collection_folder, tmp_path: Path):
    with pytest.raises(OSError, match="'no/such' is neither a folder nor in the Hugging Face"):
        run(tiny(collection_folder, tmp_path, "no/such"))
    same = (f"beir:{collection_folder}",) * 2
    with pytest.raises(ValueError, match="names two collections alike"):
        run(tiny(collection_folder, tmp_path, eval_data=same))


def test_the_scripts_answer_and_refuse_in_one_line(tmp_path: Path, collection_folder):
    """Real processes: --help without torch, a wrong flag, missing judgements."""
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("corpus.jsonl", "queries.jsonl"):
        (bare / name).write_bytes((collection_folder / name).read_bytes())

    def script(name: str, *flags: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-X", "importtime", str(ROOT / "text" / name), *flags]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)

    def said(result: subprocess.CompletedProcess[str]) -> list[str]:
        return [x for x in result.stderr.splitlines() if not x.startswith("import time:")]

    for name in ("train_retrieval.py", "train_sts.py"):
        answer = script(name, "--help")
        assert answer.returncode == 0
        assert "--cell" in answer.stdout
        assert not any(x.split("|")[-1].strip() == "torch" for x in answer.stderr.splitlines())
    (line,) = said(wrong := script("train_sts.py", "--score-scale=free"))
    assert wrong.returncode == 2
    assert "expected fixed:NUMBER" in line
    (line,) = said(missing := script("train_retrieval.py", f"--data=beir:{bare}"))
    assert missing.returncode == 1
    assert line.startswith("train_retrieval: error: ")
    assert "qrels has no judgements" in line
    assert not list((tmp_path / "results").glob("*/*")), "a run that cannot begin leaves nothing"
