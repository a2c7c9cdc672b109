"""--keep=best: which weights are kept, what of them is measured and saved, and after a cut."""

from __future__ import annotations

import json
import math
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from experiments import given
from torch import nn

from crossmodal import train_clip
from offsphere.objective import Objective
from offsphere.run.record import RunFolder, open_run
from offsphere.training.checkpoint import load_checkpoint, save_checkpoint
from offsphere.training.experiment import Experiment, Method, Step
from offsphere.training.loop import Interrupted, _restore, fit
from offsphere.training.run import read_weights, train_run
from offsphere.training.settings import TrainSettings
from offsphere.training.streams import stream
from text import train_retrieval, train_sts
from vision import train_simclr

STEPS, BATCH = 10, 8
BEST = 6


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


class Line(Method):
    """Two linear sides under the learnable cell, with batch-norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4))
        self.objective = Objective("learnable", "info_nce", population=64)

    def forward(self, batch: torch.Tensor, step: int) -> Step:
        left, right = self.encoder(batch), self.encoder(batch + 0.1 * torch.randn_like(batch))
        return Step(self.objective(left, right), left, right)


class Cut(RuntimeError):
    """Somebody pulled the plug."""


class Batches(list):
    """The batches of a run, without that of the step `without`."""

    def __init__(self, without: int = -1) -> None:
        self.without = without
        draws = [stream(0, "order", step) for step in range(STEPS)]
        super().__init__(torch.randn(BATCH, 6, generator=draw) for draw in draws)

    def __getitem__(self, step):
        if step == self.without:
            raise Cut
        return super().__getitem__(step)


def settings(out: Path, **changes) -> TrainSettings:
    base = TrainSettings(batch_size=BATCH, samples=STEPS * BATCH, threads=1, log_every=3)
    return replace(base, out=str(out), device="cpu", checkpoint_every=3, **changes)


def number(method: Method) -> float:
    return method.encoder[0].weight.double().sum().item()


def trained(out: Path, validate=None, without: int = -1, end=None, **changes):
    """The metrics, the method and the folder of a run whose test metric is `number`."""
    method, options = Line(), settings(out, eval_every=2 * BATCH, **changes)
    calls = []

    def evaluate() -> dict[str, float]:
        calls.append(number(method))
        if len(calls) == end:
            raise Cut
        return {"test/number": calls[-1]}

    with open_run(options, script="line", out=options.out) as folder:
        score = None if validate is None else lambda: validate(method)
        metrics = fit(given(method, Batches(without), 64, evaluate, score), options, folder)
    return metrics, method, folder


@pytest.fixture
def planted(tmp_path: Path):
    """A validation score whose best is after BEST steps, and those weights."""
    states = {}

    def watch(method: Method) -> float:
        copies = {name: x.clone() for name, x in method.state_dict().items()}
        states[2 * (len(states) + 1)] = copies, number(method)
        return 0.0

    trained(tmp_path / "watched", watch, keep="best")
    assert list(states) == [2, 4, 6, 8, 10]
    weights, target = states[BEST]
    return (lambda method: -abs(number(method) - target)), weights, states[STEPS][0]


def same(state, wanted) -> bool:
    return state.keys() == wanted.keys() and all(torch.equal(state[k], wanted[k]) for k in wanted)


def test_the_best_weights_are_measured_and_saved_and_the_last_train_on(planted, tmp_path: Path):
    validate, weights, last = planted
    metrics, method, folder = trained(tmp_path, validate, keep="best")
    assert metrics["run/kept_steps"] == BEST
    assert metrics["run/steps"] == STEPS
    assert metrics["validation/score"] == 0.0
    assert same(method.state_dict(), weights)
    assert metrics["test/number"] == number(method)
    rows = {row["step"] + 1: row for row in folder.steps()}
    scores = {step: row["validation/score"] for step, row in rows.items() if "test/number" in row}
    assert list(scores) == [2, 4, 6, 8]  # the last one is looked at too, after the last row
    assert scores[BEST] == 0.0
    assert max(score for step, score in scores.items() if step != BEST) < 0
    left, right = torch.sigmoid(weights["objective.cell.logits"]).tolist()
    learned = metrics["train/exponent_left"], metrics["train/exponent_right"]
    assert learned == pytest.approx((left, right))
    state = load_checkpoint(folder.checkpoint)
    assert state is not None
    assert same(state["method"], last)
    assert same(state["best"]["method"], weights)
    found = read_weights(folder, settings(tmp_path, cell="learnable"), "encoder", "line.py")
    assert found.steps == BEST
    assert same({f"encoder.{k}": x for k, x in found.tensors.items()}, {
        k: x for k, x in weights.items() if k.startswith("encoder.")
    })  # fmt: skip


def test_a_run_cut_at_any_step_keeps_the_same_weights(planted, tmp_path: Path):
    validate, weights, _ = planted
    expected, _, _ = trained(tmp_path / "whole", validate, keep="best")
    for cut in (1, 4, 6, 7, 9):  # also after the best was found and before it was saved
        with pytest.raises(Cut):
            trained(tmp_path / "cut", validate, without=cut, keep="best")
    with pytest.raises(Cut):  # in the last evaluation: 9 is trained, then 10 is measured
        trained(tmp_path / "cut", validate, end=1, keep="best")
    metrics, method, _ = trained(tmp_path / "cut", validate, keep="best")
    assert metrics == expected
    assert same(method.state_dict(), weights)


def test_a_signal_after_the_last_step_is_obeyed_and_costs_no_training(planted, tmp_path: Path):
    """While the weights are chosen it waits for the checkpoint, while they are measured it does
    not wait; either way the same command has only to measure."""
    validate, _, _ = planted
    expected, _, whole = trained(tmp_path / "whole", validate, keep="best")
    asked = []

    def interrupting(method: Method) -> float:
        asked.append(1)
        if len(asked) == STEPS // 2:
            signal.raise_signal(signal.SIGTERM)
        return validate(method)

    with pytest.raises(Interrupted, match=f"stopped by SIGTERM after step {STEPS} of {STEPS}"):
        trained(tmp_path / "cut", interrupting, keep="best")
    method, options = Line(), settings(tmp_path / "cut", eval_every=2 * BATCH, keep="best")

    def evaluate() -> dict[str, float]:
        signal.raise_signal(signal.SIGINT)
        return {}

    experiment = given(method, Batches(without=0), 64, evaluate, lambda: validate(method))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with (
            open_run(options, script="line", out=options.out) as folder,
            pytest.raises(KeyboardInterrupt),
        ):
            fit(experiment, options, folder)
    finally:
        signal.signal(signal.SIGINT, before)
    metrics, _, cut = trained(tmp_path / "cut", validate, without=0, keep="best")
    assert metrics == expected
    states = [load_checkpoint(folder.checkpoint) for folder in (whole, cut)]
    assert all(state is not None and state["step"] == STEPS for state in states)


def test_the_last_weights_are_kept_by_default(planted, tmp_path: Path):
    validate, _, last = planted
    metrics, method, folder = trained(tmp_path, validate)
    assert same(method.state_dict(), last)
    state = load_checkpoint(folder.checkpoint)
    assert state is not None
    assert state.keys() == {"step", "method", "optimizers", "facts"}
    assert not {"run/kept_steps", "validation/score"} & metrics.keys()


def test_of_equal_scores_the_first_wins_and_no_number_loses(tmp_path: Path):
    for scores, kept in (((math.nan, 0.5, 0.5, math.nan, 0.1), 4), ((math.nan,) * 5, 2)):
        given = iter(scores)
        metrics, _, _ = trained(tmp_path / str(kept), lambda _: next(given), keep="best")  # noqa: B023
        assert metrics["run/kept_steps"] == kept


def test_a_run_without_validation_data_is_refused(tmp_path: Path):
    options = settings(tmp_path, eval_every=2 * BATCH, keep="best")
    with pytest.raises(ValueError, match="--keep=best needs validation data"):
        train_run(options, "line", lambda *_: given(Line(), Batches(), 64, dict))
    assert not (tmp_path / "line").exists()  # nothing has begun


def write_collection(folder: Path) -> Path:
    """40 documents in BEIR's layout, each the answer to one query of the three splits."""
    words = [f"w{k}" for k in range(40)]
    texts = [" ".join(words[(k * step) % 40] for step in range(1, 9)) for k in range(40)]
    (folder / "qrels").mkdir(parents=True)
    for name, part in (("corpus", 1), ("queries", 3)):
        pieces = [" ".join(text.split()[::part]) for text in texts]
        rows = [{"_id": f"{name}{k}", "title": "", "text": text} for k, text in enumerate(pieces)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for split, numbers in (("train", range(16)), ("dev", range(16, 27)), ("test", range(27, 40))):
        lines = [f"queries{k}\tcorpus{k}\t1" for k in numbers]
        (folder / "qrels" / f"{split}.tsv").write_text("\n".join(["q\td\tscore", *lines]) + "\n")
    return folder


SMALL = {"batch_size": 8, "samples": 64, "eval_every": 32, "threads": 1, "seed": 3}
SCRATCH = {"encoder": "scratch", "width": 16, "layers": 1}
LANES = {
    "simclr": (train_simclr, {"data": "emoji", "image_size": 16, "limit": 64}, ["knn"]),
    "clip": (train_clip, {"limit": 64}, ["i2t_r1", "t2i_r1"]),
    "retrieval": (train_retrieval, {**SCRATCH, "pretrain_samples": 0}, ["ndcg10"]),
    "halves": (train_retrieval, {**SCRATCH, "pretrain_samples": 0, "task": "halves"}, ["ndcg10"]),
    "sts": (train_sts, SCRATCH, ["spearman"]),
}


@pytest.mark.parametrize("lane", LANES)
def test_every_lane_chooses_by_its_validation_split(lane: str, tmp_path: Path):
    """The score of a run that is measured on test data is what another measures on validation."""
    script, more, names = LANES[lane]
    common = {**SMALL, **more, "out": str(tmp_path)}
    if script is train_retrieval:
        common["data"] = f"beir:{write_collection(tmp_path / 'tiny')}"

    def built(**changes: str) -> Experiment:
        found = script.make(script.Config(**common, **changes), RunFolder(tmp_path), None)
        found.build()
        return found

    def measured(split: str) -> float:
        metrics = built(eval_split=split).evaluate()
        return sum(metrics[f"test/{name}"] for name in names) / len(names)

    wanted = measured("validation")
    for split in ("test", "validation"):
        score = built(keep="best", eval_split=split).validate()
        assert score == pytest.approx(wanted, rel=1e-6)
    assert measured("test") != pytest.approx(wanted)


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
