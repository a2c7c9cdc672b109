"""CellRankingLoss beside sentence-transformers' own losses, and in its own trainer."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from offsphere.cells import Cell
from offsphere.ranking_loss import CellRankingLoss, RankingLoss
from offsphere.variance import negative_variance
from offsphere.watch import Telemetry, trainer_callback

WORDS = [f"w{i}" for i in range(40)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """A BERT of one layer with a tokenizer of 40 words, as sentence-transformers reads it."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    path = tmp_path_factory.mktemp("bert")
    vocabulary = {name: i for i, name in enumerate(["[PAD]", "[UNK]", *WORDS])}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="[PAD]", unk_token="[UNK]", model_max_length=16
    ).save_pretrained(path)
    torch.manual_seed(0)
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    small |= {"intermediate_size": 24, "max_position_embeddings": 16}
    plain = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    settings = transformers.BertConfig(vocab_size=len(vocabulary), **small, **plain)
    transformers.BertModel(settings).save_pretrained(path)
    return str(path)


@pytest.fixture
def model(folder):
    library = pytest.importorskip("sentence_transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return library.SentenceTransformer(folder, device="cpu").double()


def texts(rows: int, seed: int) -> list[str]:
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 9, (rows,), generator=g)
    return [" ".join(WORDS[i] for i in torch.randint(40, (n,), generator=g)) for n in lengths]


def batch(model, *columns: list[str]) -> list[dict]:
    return [model.preprocess(column) for column in columns]


def value_and_gradients(model, loss, features, labels=None):
    model.zero_grad()
    value = loss([dict(column) for column in features], labels)
    value.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return value.item(), gradients


@pytest.mark.parametrize("both_ways", [False, True])
@pytest.mark.parametrize(("rows", "negatives"), [(12, 0), (12, 1), (12, 2), (1, 0), (1, 2)])
def test_cosine_is_multiple_negatives_ranking_loss(model, rows, negatives, both_ways):
    """A last batch of one too: its trainer does not drop it."""
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    features = batch(model, *(texts(rows, k) for k in range(2 + negatives)))
    ways = {}
    if both_ways:
        ways = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
    theirs = MultipleNegativesRankingLoss(model, scale=20.0, **ways)
    ours = CellRankingLoss(model, both_ways=both_ways)
    expected, wanted = value_and_gradients(model, theirs, features)
    found, gradients = value_and_gradients(model, ours, features)
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-14)
    assert gradients.keys() == wanted.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-9, atol=1e-14)


def test_dot_and_one_sided_scores_are_those_of_a_similarity_function(model):
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    features = batch(model, *(texts(10, k) for k in range(3)))
    for name in ("dot", "qnorm", "dnorm", "0.3,0.7"):
        cell = Cell(name)
        theirs = MultipleNegativesRankingLoss(model, scale=2.0, similarity_fct=cell.scores)
        ours = CellRankingLoss(model, scale=2.0, cell=name)
        expected, wanted = value_and_gradients(model, theirs, features)
        found, gradients = value_and_gradients(model, ours, features)
        assert found == pytest.approx(expected, rel=1e-12)
        for key, gradient in gradients.items():
            torch.testing.assert_close(gradient, wanted[key], rtol=1e-9, atol=1e-13)


def test_the_two_terms_are_added_on_cosines(model):
    features = batch(model, texts(9, 0), texts(9, 1))
    plain = CellRankingLoss(model)([dict(x) for x in features])
    found = CellRankingLoss(model, variance_weight=3.0, population=50)([dict(x) for x in features])
    u, v = (F.normalize(model(dict(x))["sentence_embedding"], dim=1) for x in features)
    expected = plain + 3.0 * negative_variance(u, v, 50)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def dense(left, right, ids, scale=20.0):
    """One way, without what has a row's id."""
    scores = scale * F.normalize(left, dim=1) @ F.normalize(right, dim=1).T
    for i in range(len(left)):
        for j in range(len(right)):
            if i != j and ids[i] == ids[j]:
                scores[i, j] = -torch.inf
    return F.cross_entropy(scores, torch.arange(len(left)))


def test_equal_texts_are_left_out_negatives_among_them(model):
    positives, negatives = texts(8, 1), texts(8, 2)
    positives[5] = positives[2]
    negatives[6] = positives[0]
    features = batch(model, texts(8, 0), positives, negatives)
    names = {text: k for k, text in enumerate(dict.fromkeys(positives + negatives))}
    loss = CellRankingLoss(model, false_negatives="mask")
    found = loss([dict(x) for x in features])
    left, *right = (model(dict(x))["sentence_embedding"] for x in features)
    wanted = dense(left, torch.cat(right), [names[text] for text in positives + negatives])
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)


def test_labels_name_what_is_equal(model):
    labels = torch.tensor([4, 7, 4, 9, 7, 4])
    features = batch(model, *(texts(6, k) for k in range(3)))
    loss = CellRankingLoss(model, false_negatives="mask")
    found = loss([dict(x) for x in features], labels)
    left, *right = (model(dict(x))["sentence_embedding"] for x in features)
    wanted = dense(left, torch.cat(right), [*labels.tolist(), *range(100, 106)])
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)


def history(folder: str, tmp_path: Path, make_loss) -> list[dict]:
    """What sentence-transformers' own trainer logs in ten steps with this loss."""
    library = pytest.importorskip("sentence_transformers")
    datasets = pytest.importorskip("datasets")
    pytest.importorskip("accelerate")
    arguments = {"max_steps": 10, "per_device_train_batch_size": 8, "learning_rate": 1e-2}
    quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = library.SentenceTransformer(folder, device="cpu")
        loss = make_loss(model)
        trainer = library.SentenceTransformerTrainer(
            model=model,
            args=library.SentenceTransformerTrainingArguments(
                output_dir=str(tmp_path), seed=0, use_cpu=True, **arguments, **quiet
            ),
            train_dataset=datasets.Dataset.from_dict(
                {"anchor": texts(40, 0), "positive": texts(40, 1)}
            ),
            loss=loss,
        )
        if isinstance(loss, CellRankingLoss):
            telemetry = Telemetry().watch(loss.contrast)
            trainer.add_callback(trainer_callback(telemetry, trainer))
        trainer.train()
    return trainer.state.log_history


def test_ten_steps_in_sentence_transformers_own_trainer_are_those_of_its_own_loss(folder, tmp_path):
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    ours, theirs = (
        history(folder, tmp_path, make) for make in (CellRankingLoss, MultipleNegativesRankingLoss)
    )
    found, wanted = ([row["loss"] for row in log if "loss" in row] for log in (ours, theirs))
    assert len(found) == 10
    assert found == pytest.approx(wanted, rel=1e-3)
    norms = [row for row in ours if "train/norm_left_mean" in row]
    assert [row["step"] for row in norms] == list(range(1, 11))
    assert norms[0]["train/temperature"] == pytest.approx(0.05)


def test_its_trainer_trains_the_exponents_too(folder, tmp_path):
    log = history(folder, tmp_path, lambda model: CellRankingLoss(model, cell="learnable"))
    moved = [row["train/exponent_left"] for row in log if "train/exponent_left" in row]
    assert moved[0] == 0.5
    steps = [b - a for a, b in pairwise(moved)]
    assert all(0 < abs(step) < 0.01 for step in steps)  # Adam's rate of 0.01 on their logits


def rank_gradients(rank: int, count: int, port: int, file: str) -> None:
    """Run by each rank as a script: its share of the loss, and its gradients, into a file."""
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=count)
    anchors, positives, negatives, ids = torch.load(file)
    own = slice(rank * 4, rank * 4 + 4)
    sides = [x[own].clone().requires_grad_() for x in (anchors, positives, negatives)]
    loss = ranking_loss(gather_across_devices=True)
    value = loss(*sides, ids=torch.cat([ids[:8][own], ids[8:][own]]))
    value.backward()
    # DDP averages over the ranks what each of them adds to a parameter.
    torch.save((value.detach(), [x.grad / count for x in sides]), f"{file}.{rank}")
    dist.barrier()  # no rank takes the store away while another still needs it
    dist.destroy_process_group()
    # Gloo's threads have aborted an interpreter that was shutting down, once in some hundred runs.
    os._exit(0)


def ranking_loss(**changes) -> RankingLoss:
    settings = {"cell": "dnorm", "calibrated": False, "both_ways": False, "gor_weight": 0.5}
    settings |= {"variance_weight": 2.0, "population": 99, "gather_across_devices": False}
    settings |= {"false_negatives": "mask", "loss_precision": "tf32"}
    return RankingLoss(3.0, **settings | changes)


def test_two_processes_give_the_gradient_of_the_whole_batch(tmp_path, free_port):
    torch.manual_seed(0)
    sides = list(torch.randn(3, 8, 5, dtype=torch.float64))
    ids = torch.tensor([0, 1, 2, 3, 4, 1, 6, 7, 0, 9, 10, 11, 2, 13, 14, 15])
    file, port = str(tmp_path / "batch"), str(free_port())
    torch.save((*sides, ids), file)
    ranks = [
        subprocess.Popen([sys.executable, "-W", "ignore", __file__, str(k), "2", port, file])
        for k in range(2)
    ]
    assert [process.wait(timeout=120) for process in ranks] == [0, 0]
    whole = [x.clone().requires_grad_() for x in sides]
    value = ranking_loss()(*whole, ids=ids)
    value.backward()
    parts = [torch.load(f"{file}.{k}") for k in range(2)]
    for found, _ in parts:
        torch.testing.assert_close(found, value.detach(), rtol=1e-12, atol=0)
    for k, x in enumerate(whole):
        gradient = torch.cat([gradients[k] for _, gradients in parts])
        torch.testing.assert_close(gradient, x.grad, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"scale": 0.0}, "Expected a scale above 0, got 0.0"),
        ({"cell": "cosin"}, "Unknown cell 'cosin'. Did you mean 'cosine'?"),
        ({"false_negatives": "drop"}, "Unknown false_negatives 'drop'"),
        ({"variance_weight": 1.0}, "needs population="),
    ],
)
def test_what_is_refused_when_it_is_made(settings, says):
    with pytest.raises(ValueError, match=says):
        CellRankingLoss(torch.nn.Identity(), **settings)


def test_what_is_refused_of_a_batch():
    class Flat(torch.nn.Module):
        def forward(self, features):
            return {"sentence_embedding": torch.ones(3, 2)}

    with pytest.raises(ValueError, match="Expected the columns anchor, positive .* got 1"):
        CellRankingLoss(Flat())([{}])
    flat = {"input_ids": torch.arange(5), "offsets": torch.tensor([0, 2, 4])}
    loss = CellRankingLoss(Flat(), false_negatives="mask")
    with pytest.raises(ValueError, match="as input_ids, offsets. Give the data a column `label`"):
        loss([flat, flat])
    with pytest.raises(ValueError, match="Expected whole numbers as labels, got torch.float32"):
        loss([flat, flat], torch.ones(3))


if __name__ == "__main__":
    rank_gradients(*(int(word) for word in sys.argv[1:4]), sys.argv[4])
