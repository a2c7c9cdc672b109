"""CLIP training: every cell and direction, open_clip as the reference, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import open_clip
import pytest
import torch
from open_clip.loss import ClipLoss, SigLipLoss
from scipy.stats import spearmanr

from crossmodal import evaluate, experiment
from crossmodal.captions import Captioned, load_captions
from crossmodal.experiment import build_objective, build_towers, random_look
from crossmodal.methods import Clip, PairBatch
from crossmodal.settings import MODELS
from crossmodal.subjects import load_run
from crossmodal.train_clip import Config, run
from offsphere.cells import CELLS, Cell
from offsphere.encoders.clip import clip_towers, registered_name
from offsphere.encoders.frozen import frozen_tower
from offsphere.evaluation.geometry import cohens_d
from offsphere.study.measures import unmeasured
from offsphere.training import run as training_run
from offsphere.training.loop import build_optimizers
from offsphere.training.streams import batch_indices, stream


@pytest.fixture(autouse=True)
def no_plots(monkeypatch):
    monkeypatch.setattr(training_run, "plot_run", lambda *_: None)


def config(table: Path, out: Path | None = None, **changes) -> Config:
    settings = {
        "data": f"csv:{table}",
        "data_test": f"csv:{table}",
        "batch_size": 12,
        "samples": 48,
        "threads": 1,
        "log_every": 1,
        "out": str(out or table.parent / "out"),
    }
    return Config(**{**settings, **changes})


@pytest.mark.parametrize("direction", ["both", "image_to_text", "text_to_image"])
@pytest.mark.parametrize("cell", CELLS)
def test_every_cell_and_direction_trains_and_evaluates(table, tmp_path, cell, direction):
    metrics = run(config(table, tmp_path, cell=cell, direction=direction, variance_weight=1.0))
    assert metrics["run/status"] == "finished"
    assert metrics["run/steps"] == 4
    assert unmeasured("train_clip", set(metrics) - {"run/status", "run/ended"}) == []
    # Chance of 36 images is 1/36; recall at 10 of 36 can only rise with k.
    assert metrics["test/chance_t2i_r1"] == pytest.approx(1 / 36)
    assert metrics["test/i2t_r1"] <= metrics["test/i2t_r5"] <= metrics["test/i2t_r10"] <= 1
    # A query's own norm never changes its ranking: cells tie on the candidate's exponent.
    assert metrics["test/i2t_r1_scored_dot"] == metrics["test/i2t_r1_scored_qnorm"]
    assert metrics["test/t2i_r1_scored_dot"] == metrics["test/t2i_r1_scored_dnorm"]
    if cell != "learnable":
        assert metrics["test/i2t_r1"] == metrics[f"test/i2t_r1_scored_{cell}"]
    (folder,) = (tmp_path / "train_clip").iterdir()
    trained = load_run(folder)
    exponents = metrics["train/exponent_left"], metrics["train/exponent_right"]
    assert trained.exponents == exponents
    again = evaluate.embed(
        trained.towers, load_captions(f"csv:{table}", split="all", image_size=32)
    )
    found = evaluate.retrieved(again, {"": trained.exponents})[""]
    assert found.metrics["i2t_r1"] == pytest.approx(metrics["test/i2t_r1"], abs=1e-9)
    assert found.metrics["t2i_r1"] == pytest.approx(metrics["test/t2i_r1"], abs=1e-9)


def plain_batches(settings: Config, data: Captioned, towers, steps: int):
    batches = experiment.TrainingBatches(data, towers, settings)
    return [batches[step] for step in range(steps)]


@pytest.mark.parametrize("loss", ["info_nce", "siglip"])
def test_five_steps_equal_open_clip_with_its_own_loss(table, loss):
    """The cosine cell against open_clip's towers, loss and logit scale, trained by plain AdamW."""
    settings = config(table, cell="cosine", loss=loss, min_scale=1.0, weight_decay=0.0)
    data = load_captions(f"csv:{table}", split="all", image_size=32)
    towers = build_towers(settings).double()
    look = random_look(towers, settings)
    objective = build_objective(settings, len(data)).double()
    method = Clip(
        towers, objective, lambda x, step, rows=None: look(x, step, rows).double(), settings
    )
    # The peer: the same initial weights, open_clip's forward pass with full-length texts.
    peer = open_clip.create_model(registered_name("tiny", MODELS)).double()
    peer.load_state_dict(towers.model.state_dict())
    peer.logit_scale = torch.nn.Parameter(torch.tensor(-math.log(0.07)).double())
    peer.logit_bias = torch.nn.Parameter(torch.tensor(-10.0).double())
    if loss == "info_nce":
        peer.logit_bias.requires_grad_(False)
    (ours,) = build_optimizers(method, settings)
    theirs = torch.optim.AdamW(
        [p for p in peer.parameters() if p.requires_grad],
        lr=ours.param_groups[0]["lr"],
        betas=(0.9, 0.98),
        weight_decay=0.0,
    )
    for step, (images, tokens) in enumerate(plain_batches(settings, data, towers, 5)):
        result = method(PairBatch(images, tokens), step)
        result.losses["loss"].backward()
        full = torch.zeros(len(tokens), towers.model.context_length, dtype=torch.long)
        full[:, : tokens.shape[1]] = tokens
        pixels = towers.normalise(images).double()
        image = torch.nn.functional.normalize(peer.encode_image(pixels), dim=1)
        text = torch.nn.functional.normalize(peer.encode_text(full), dim=1)
        scale = peer.logit_scale.exp()
        if loss == "info_nce":
            expected = ClipLoss()(image, text, scale)
        else:
            expected = SigLipLoss()(image, text, scale, peer.logit_bias)
        expected.backward()
        assert result.losses["loss"].item() == pytest.approx(expected.item(), rel=1e-9)
        for name, q in peer.named_parameters():
            if name not in ("logit_scale", "logit_bias"):
                got = towers.model.get_parameter(name).grad
                torch.testing.assert_close(got, q.grad, rtol=1e-6, atol=1e-10)
        torch.testing.assert_close(method.objective.log_scale.grad, peer.logit_scale.grad)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for name, q in peer.named_parameters():
        if name not in ("logit_scale", "logit_bias"):
            got = towers.model.get_parameter(name)
            torch.testing.assert_close(got, q, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(method.objective.log_scale, peer.logit_scale)


def test_pairs_whose_captions_are_equal_are_no_negatives(table):
    settings = config(table, cell="dot", scale="fixed", min_scale=1.0, false_negatives="mask")
    data = load_captions(f"csv:{table}", split="all", image_size=32)
    towers = build_towers(settings)
    objective = build_objective(settings, len(data))
    method = Clip(towers, objective, random_look(towers, settings), settings)
    (images, tokens), *_ = plain_batches(settings, data, towers, 1)
    tokens = tokens.clone()
    tokens[[7, 3]] = tokens[[2, 2]]
    found = method(PairBatch(images, tokens), 0)
    scores = found.left @ found.right.T / method.objective.temperature
    for i, j in ((2, 3), (2, 7), (3, 7)):
        scores[i, j] = scores[j, i] = -math.inf
    both = [torch.nn.functional.cross_entropy(x, torch.arange(12)) for x in (scores, scores.T)]
    assert found.losses["loss"].item() == pytest.approx(sum(both).item() / 2, rel=1e-5)


@pytest.mark.parametrize("model", ["tiny", "small"])
def test_trimmed_texts_give_the_same_embeddings(model):
    torch.manual_seed(0)
    towers = clip_towers(model, models=MODELS).double().eval()
    tokens = towers.tokenize(["a dog", "two birds on a very long branch in the rain", "x"])
    short = towers.trim(tokens)
    assert short.shape[1] == 12 < tokens.shape[1]
    with torch.no_grad():
        expected = towers.model.encode_text(tokens)
        torch.testing.assert_close(towers.encode_text(short), expected, rtol=1e-9, atol=1e-12)


def test_texts_are_trimmed_behind_the_end_token_that_the_tower_pools_at(tmp_path):
    """MetaCLIP 2: its end token is 2, so the highest number of a row is some word before it."""
    config = json.loads((MODELS / "tiny.json").read_text())
    config["text_cfg"] |= {"context_length": 8, "pool_type": "eos", "eos_id": 2}
    (tmp_path / "tiny_with_end.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    towers = clip_towers(str(tmp_path / "tiny_with_end.json")).double().eval()
    tokens = torch.tensor(
        [[0, 900, 8, 9, 2, 1, 1, 1], [0, 7, 2, 1, 1, 1, 1, 1], [0, 50, 2, 1, 1, 1, 1, 1]]
    )
    short = towers.trim(tokens)
    assert torch.equal(short, tokens[:, :5])
    with torch.no_grad():
        expected = towers.model.encode_text(tokens)
        torch.testing.assert_close(towers.encode_text(short), expected, rtol=1e-9, atol=1e-12)


def test_captions_are_drawn_evenly_and_by_the_step_alone(table):
    settings = config(table)
    data = load_captions(f"csv:{table}", split="all", image_size=32)
    towers = build_towers(settings)
    batches = experiment.TrainingBatches(data, towers, settings)
    tokens = experiment.CaptionTokens(data, towers)
    rows = torch.zeros(2000, dtype=torch.long)
    drawn = tokens(rows, stream(0, "caption", 3))
    which = drawn.unique(dim=0, return_counts=True)[1]
    assert len(which) == 2
    assert abs(int(which[0]) - 1000) < 4 * math.sqrt(500)
    one, other = batches[7], experiment.TrainingBatches(data, towers, settings)[7]
    assert torch.equal(one.tokens, other.tokens)
    assert torch.equal(one.images, data.batch(batch_indices(0, 7, 12, 36)))


def test_tokens_drawn_one_by_one_are_those_in_memory(table, monkeypatch):
    data = load_captions(f"csv:{table}", split="all", image_size=32)
    towers = build_towers(config(table))
    rows = torch.arange(36)
    kept = experiment.CaptionTokens(data, towers)(rows, stream(0, "caption", 0))
    monkeypatch.setattr(experiment, "TOKENS_IN_MEMORY", 0)
    lazy = experiment.CaptionTokens(data, towers)
    assert lazy.tokens is None
    assert torch.equal(lazy(rows, stream(0, "caption", 0)), kept)


def test_a_frozen_tower_gets_features_and_is_not_trained(table, tmp_path, monkeypatch):
    """LiT with a small open_clip image tower from a local file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    torch.manual_seed(1)
    source = open_clip.create_model(registered_name("tiny", MODELS))
    weights = tmp_path / "clip.pt"
    torch.save(source.state_dict(), weights)
    settings = config(table, tmp_path, cell="dnorm", image_tower=f"open_clip:tiny:{weights}")
    metrics = run(settings)
    assert metrics["run/status"] == "finished"
    (folder,) = (tmp_path / "train_clip").iterdir()
    trained = load_run(folder)
    assert not any("visual" in name for name in trained.towers.state_dict())
    data = load_captions(f"csv:{table}", split="all", image_size=32)
    pixels = trained.towers.normalise(data.batch(torch.arange(36)))
    source.eval()
    with torch.no_grad():
        expected = trained.towers.head(source.encode_image(pixels))
        got = evaluate.encode_pictures(trained.towers, data)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert len(list((tmp_path / "cache").rglob("features/*.safetensors"))) >= 1


def test_the_installable_tower_is_the_packages_own_network():
    """Its features under the package's classifier are the package's own logits."""
    tower = frozen_tower("efficientnet_lite0")
    network = tower.backbone[0].model.eval()
    assert (tower.width, tower.image_size) == (1280, 224)
    pixels = torch.randn(2, 3, 224, 224, generator=stream(0, "pixels"))
    with torch.no_grad():
        torch.testing.assert_close(network._fc(tower(pixels)), network(pixels))


def test_norms_of_right_and_wrong_queries_and_human_judgements(table, tmp_path):
    lines = []
    draw = torch.Generator().manual_seed(3)
    for _ in range(60):
        image, caption = torch.randint(0, 36, (2,), generator=draw).tolist()
        scores = torch.randint(1, 5, (3,), generator=draw).tolist()
        lines.append(f"{image}.png\t{caption}.png#1\t" + "\t".join(map(str, scores)))
    lines.append("elsewhere.png\t1.png#0\t1\t1\t1")
    judged = tmp_path / "judged.txt"
    judged.write_text("\n".join(lines))
    metrics = run(config(table, tmp_path, cell="dot", judgements=str(judged)))
    assert metrics["test/judged_pairs"] == 60
    (folder,) = (tmp_path / "train_clip").iterdir()
    trained = load_run(folder)
    data = load_captions(f"csv:{table}", split="all", image_size=32)
    images, texts, *_ = evaluate.embed(trained.towers, data)
    rows = [line.split("\t") for line in lines[:60]]
    means = torch.tensor([sum(map(float, r[2:])) / 3 for r in rows])
    pairs = [(int(r[0].split(".")[0]), 2 * int(r[1].split(".")[0]) + 1) for r in rows]
    left = torch.stack([images[i] for i, _ in pairs])
    right = torch.stack([texts[j] for _, j in pairs])
    dots = (left * right).sum(1)
    assert metrics["test/judgement_spearman"] == pytest.approx(
        spearmanr(dots.numpy(), means.numpy())[0], abs=1e-6
    )
    cosines = dots / left.norm(dim=1) / right.norm(dim=1)
    assert metrics["test/judgement_spearman_scored_cosine"] == pytest.approx(
        spearmanr(cosines.numpy(), means.numpy())[0], abs=1e-6
    )
    norms = right.norm(dim=1)
    expected = cohens_d(norms[means >= 3], norms[means <= 1.5]).item()
    assert metrics["test/cohens_d_text_judged"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data_test": None}, "no test split of its own: give --data-test"),
        ({"loss": "siglip", "direction": "image_to_text"}, "siglip has none"),
        ({"loss": "siglip", "false_negatives": "mask"}, "--false-negatives=mask goes with"),
        ({"negatives": 4, "false_negatives": "positive"}, "without --within-view and --negatives"),
        ({"min_scale": 0.0}, "--min-scale must be above 0"),
        ({"flip": 2.0}, "--flip must be a probability"),
        ({"temperature": 2.0}, r"--temperature must be between 0\.01 and 1 .*, got 2\.0"),
        ({"limit": 1}, "--limit must be at least 2, got 1"),
        ({"image_size": 1}, "--image-size must be at least 2, got 1"),
        ({"image_tower": "x", "pretrained": "y"}, "--pretrained weights for both towers"),
    ],
)
def test_settings_that_cannot_be(table, changes, said):
    with pytest.raises(ValueError, match=said):
        config(table, **changes)


@pytest.mark.parametrize("flag", ["--temperature=2", "--image-size=1", "--cell=nan,1"])
def test_a_faulty_flag_leaves_no_folder(scripts, tmp_path, flag):
    script = scripts.run("train_clip", flag, f"--out={tmp_path}")
    assert script.code == 2
    (line,) = script.stderr.splitlines()
    assert line.startswith("train_clip.py: error: ")
    assert list(tmp_path.iterdir()) == []


def test_a_fixed_temperature_may_be_high(table):
    assert config(table, temperature=2.0, learnable_temperature=False).temperature == 2.0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": "tinny"}, "Unknown model 'tinny'.*Did you mean 'tiny'"),
        ({"model": "no.json"}, "no.json cannot be read"),
        ({"image_tower": "resnet"}, "Unknown frozen image tower 'resnet'.*timm:NAME"),
        ({"image_tower": "timm:resnet18:none.pt"}, "there is no file none.pt"),
        ({"pretrained": "none.pt"}, "tiny with none.pt cannot be built"),
        ({"judgements": "none.txt"}, "there is no file none.txt"),
        ({"batch_size": 100}, "--batch-size=100 is larger than the training data"),
        ({"templates": "phto"}, "Unknown prompt templates 'phto'.*Did you mean 'photo'"),
    ],
)
def test_what_the_models_and_the_data_refuse(table, tmp_path, changes, said):
    with pytest.raises((ValueError, OSError), match=said):
        run(config(table, tmp_path, **changes))


def test_the_cell_is_named_by_modality():
    assert Config(cell="imgnorm").cell == "qnorm"
    assert Config(cell="txtnorm").cell == "dnorm"
    assert Cell("qnorm").exponents == (1.0, 0.0)
