"""Settings, checkpoints and records that cannot be meant: one line each."""

from __future__ import annotations

import dataclasses
import json
from itertools import pairwise
from typing import Any

import pytest
import torch

from crossmodal.settings import ClipSettings
from offsphere import cli
from offsphere.run.record import RunFolder
from offsphere.training.checkpoint import load_checkpoint, save_checkpoint
from offsphere.training.loop import _restore
from offsphere.training.ranks import connected
from offsphere.training.settings import LONGEST_RUN, ImageSettings, TrainSettings, steps_of
from text.settings import RetrievalSettings


@pytest.mark.parametrize(
    ("settings", "changes", "said"),
    [
        (ImageSettings, {"image_size": 1_000_000}, "--image-size must be at most 8,192"),
        (ImageSettings, {"projector_dim": 10**11}, "--projector-dim must be at most 65,536"),
        (ImageSettings, {"projector_hidden": 10**11}, "--projector-hidden must be at most 65,536"),
        (ImageSettings, {"projector_layers": 10**6}, "--projector-layers must be at most 100"),
        (ImageSettings, {"threads": 1_000_000}, "--threads must be at most 1,024"),
        (ImageSettings, {"threads": 0}, "--threads must be above 0"),
        (ClipSettings, {"image_size": 1_000_000}, "--image-size must be at most 8,192"),
        (RetrievalSettings, {"max_length": 100_000}, "--max-length must be at most 8,192"),
        (RetrievalSettings, {"width": 10**9}, "--width must be at most 65,536"),
    ],
)
def test_settings_beyond_measure(settings, changes, said):
    with pytest.raises(ValueError, match=said):
        settings(**changes)


@pytest.mark.parametrize(
    ("budget", "said"),
    [
        ({"epochs": 1e308}, "--epochs=1e\\+308 is no budget"),
        ({"samples": 10**40}, "--samples=1000"),
    ],
)
def test_an_endless_budget(budget, said):
    with pytest.raises(ValueError, match=said):
        steps_of(TrainSettings(batch_size=10, **budget), 1000)


def test_the_longest_budget():
    assert steps_of(TrainSettings(batch_size=10, samples=10 * LONGEST_RUN), 1000) == LONGEST_RUN


def test_many_machines_need_a_launcher(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "NODE_RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="--nodes=2 needs a launcher on every machine.*torchrun"):
        connected(TrainSettings(nodes=2), "train_simclr").__enter__()


def test_the_doctor_of_a_script_that_does_not_train(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["doctor", "planted"])
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith("offsphere doctor: error: planted trains nothing")


def good_state() -> dict[str, Any]:
    module = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    facts = {"untrained": {}, "clipped": 0}
    saved = [optimizer.state_dict()]
    return {"step": 3, "method": module.state_dict(), "optimizers": saved, "facts": facts}


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ([1, 2], "it holds a list"),
        (None, "it holds a NoneType"),
        ({"step": 3}, "it lacks method, optimizers, facts"),
        ({**good_state(), "step": "3"}, "its step is '3'"),
        ({**good_state(), "step": True}, "its step is True"),
        ({**good_state(), "step": -1}, "its step is -1"),
        ({**good_state(), "step": None}, "its step is None"),
        ({**good_state(), "method": None}, "its method is odd"),
        ({**good_state(), "facts": {}}, "it lacks the numbers of the untrained model"),
    ],
)
def test_a_foreign_checkpoint(state, said, tmp_path):
    save_checkpoint(tmp_path, state)
    with pytest.raises(ValueError, match=f"is not one that offsphere wrote: {said}"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"step": 11}, "is of step 11, but the run ends after 10"),
        ({"method": {"weight": torch.zeros(3, 3), "bias": torch.zeros(2)}}, "does not belong"),
        ({"method": {"weight": 1, "bias": None}}, "does not belong"),
        ({"optimizers": [None]}, "does not belong"),
        ({"optimizers": []}, "does not belong"),
    ],
)
def test_a_checkpoint_of_another_run(changes, said):
    module = torch.nn.Linear(2, 2)
    optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(module.parameters(), lr=0.1)]
    assert _restore({**good_state(), "step": 10}, module, optimizers, 10)[0] == 10
    with pytest.raises(ValueError, match=said):
        _restore({**good_state(), **changes}, module, optimizers, 10)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("metrics.json", "[1]", "expected names and values"),
        ("metrics.json", "null", "expected names and values"),
        ("metrics.json", '{"run/status": 3}', "run/status is 3"),
        ("metrics.json", "[" * 100_000, "metrics.json is damaged, it is not JSON"),
        ("metrics.json", "\udcff", "is damaged"),
    ],
)
def test_an_edited_record(name, content, said, tmp_path):
    (tmp_path / "config.yaml").write_text("cell: dot\n")
    (tmp_path / name).write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=said):
        RunFolder(tmp_path)


@pytest.mark.parametrize("row", ["[1]", '{"loss": 1}', '{"step": "3"}'])
def test_an_edited_row(row, tmp_path):
    (tmp_path / "steps.jsonl").write_text(json.dumps({"step": 0}) + f"\n{row}\n")
    with pytest.raises(ValueError, match="steps.jsonl, line 2 is damaged"):
        RunFolder(tmp_path).rewind(0)


def test_nested_yaml_is_refused(tmp_path):
    from offsphere.run.config import load_yaml

    (tmp_path / "deep.yaml").write_text("data: " + "[" * 5000)
    (tmp_path / "loop.yaml").write_text("data: &a [*a]\n")
    bomb = ["a: &a [x, x]"] + [f"{b}: &{b} [*{a}, *{a}]" for a, b in pairwise("abcdefghi")]
    (tmp_path / "bomb.yaml").write_text("\n".join(bomb))
    for name in ("deep", "loop", "bomb"):
        with pytest.raises(ValueError, match="nested|not valid YAML|Unknown setting"):
            load_yaml(ImageSettings, tmp_path / f"{name}.yaml")


def test_pictures_too_small_for_a_tower():
    from crossmodal.experiment import build_towers
    from crossmodal.train_clip import Config

    with pytest.raises(ValueError, match="--image-size=7 does not suit the model tiny"):
        build_towers(Config(image_size=7))
    settings = Config(image_size=48)
    towers = build_towers(settings)
    before = {name: x.clone() for name, x in towers.state_dict().items()}
    again = build_towers(dataclasses.replace(settings))
    assert all(torch.equal(x, before[name]) for name, x in again.state_dict().items())
    assert towers.training == again.training
