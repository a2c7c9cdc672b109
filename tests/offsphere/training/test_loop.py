"""The parts of the loop: streams, optimisers, rates, checkpoints, telemetry, settings, loggers."""

from __future__ import annotations

import hashlib
import math
import os
import re
import resource
import subprocess
import sys
import textwrap
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from experiments import given as experiment_of
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import nn

from offsphere.cells import Cell
from offsphere.objective import Objective
from offsphere.run.record import RunFolder, open_run
from offsphere.training import streams
from offsphere.training.checkpoint import FILE, load_checkpoint, save_checkpoint
from offsphere.training.experiment import Experiment, Method, Step
from offsphere.training.loop import Diverged, build_optimizers, fit, peak_lr, rate, set_rate
from offsphere.training.settings import TrainSettings, canonical_cell, steps_of
from offsphere.training.streams import batch_indices, stream, stream_seed
from offsphere.training.telemetry import open_loggers, telemetry


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


class Line(Method):
    """Two linear sides under the learnable cell: small, with every kind of parameter."""

    def __init__(self, cell: str = "learnable", bomb: int = -1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4))
        self.objective = Objective(cell, "info_nce", population=64, learnable_temperature=True)
        self.bomb = bomb

    def forward(self, batch: torch.Tensor, step: int) -> Step:
        left, right = self.encoder(batch), self.encoder(batch + 0.1 * torch.randn_like(batch))
        losses = self.objective(left, right)
        if step == self.bomb:
            losses = {**losses, "loss": losses["loss"] * math.inf}
        return Step(losses, left, right)


def batches(count: int, size: int = 8) -> list[torch.Tensor]:
    return [torch.randn(size, 6, generator=stream(0, "order", step)) for step in range(count)]


def small(out: Path, **changes) -> TrainSettings:
    base = TrainSettings(batch_size=8, samples=80, threads=1, log_every=1, device="cpu")
    return replace(base, out=str(out), **changes)


def trained(method: Method, settings: TrainSettings, data, **changes):
    with open_run(settings, script="line", out=settings.out) as folder:
        options = {"population": 64, "evaluate": lambda: {"test/knn": 0.25}} | changes
        return fit(experiment_of(method, data, **options), settings, folder), folder


# Streams


@given(st.integers(0, 2**40), st.sampled_from(["init", "order", "augment"]), st.integers(0, 10**9))
def test_a_stream_seed_is_the_first_63_bits_of_a_hash(seed: int, name: str, step: int):
    digest = hashlib.sha256(f"{seed}/{name}/{step}".encode()).hexdigest()
    assert stream_seed(seed, name, step) == int(digest[:16], 16) // 2
    assert torch.equal(
        torch.rand(3, generator=stream(seed, name, step)),
        torch.rand(3, generator=torch.Generator().manual_seed(stream_seed(seed, name, step))),
    )


@given(st.integers(2, 60), st.data())
def test_every_epoch_is_a_permutation_and_no_batch_holds_a_sample_twice(population: int, data):
    batch = data.draw(st.integers(1, population))
    epochs = data.draw(st.integers(1, 7))
    steps = -(-epochs * population // batch)
    drawn = [batch_indices(4, step, batch, population) for step in range(steps)]
    assert all(len(b) == batch == len(b.unique()) for b in drawn)
    for epoch in torch.cat(drawn)[: epochs * population].reshape(epochs, population):
        assert torch.equal(epoch.sort().values, torch.arange(population))


@given(st.integers(2, 40), st.integers(0, 60))
def test_a_batch_does_not_depend_on_what_was_drawn_before(population: int, step: int):
    batch = max(1, population * 2 // 3)
    walked = [batch_indices(7, s, batch, population) for s in range(step + 1)][-1]
    for cached in (streams._order, streams._chained_order):
        cached.cache_clear()
    assert torch.equal(batch_indices(7, step, batch, population), walked)


def test_orders_are_uniform():
    # 3,000 seeds: how often sample 0 opens the second epoch, whose first batch spans two epochs.
    first = torch.stack([batch_indices(seed, 1, 4, 6)[2] for seed in range(3000)])
    counts = first.bincount(minlength=6)
    chi2 = ((counts - 500.0) ** 2 / 500).sum()
    assert chi2 < 20.5  # 5 degrees of freedom, one in a thousand


# Rates and optimisers


@given(st.integers(1, 400), st.floats(0, 1))
def test_the_rate_rises_in_a_line_and_falls_in_a_cosine(total: int, warmup: float):
    rates = [rate(step, total, warmup) for step in range(total)]
    assert all(0 < r <= 1 for r in rates)
    rise = math.floor(warmup * total)
    assert rates[:rise] == sorted(rates[:rise])
    assert rates[rise:] == sorted(rates[rise:], reverse=True)


def test_the_rate_without_warm_up_is_torchs_cosine():
    total = 12
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    peer = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=total + 1)
    for step in range(total):
        optimizer.step()
        peer.step()
        assert rate(step, total, 0.0) == pytest.approx(peer.get_last_lr()[0], abs=1e-12)


def test_warm_up_in_closed_form():
    assert [rate(step, 10, 0.4) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    after = [0.5 * (1 + math.cos(math.pi * k / 7)) for k in range(1, 7)]
    assert [rate(step, 10, 0.4) for step in range(4, 10)] == pytest.approx(after)


@pytest.mark.parametrize("name", ["sgd", "lars", "adamw"])
def test_groups_and_steps_equal_the_plain_optimiser(name: str, tmp_path: Path):
    settings = small(tmp_path, optimizer=name, lr=0.4, weight_decay=0.3)
    settings = replace(settings, lr_rule="linear", exponent_lr=0.07)
    method, twin = Line(), Line()
    main, exponents = build_optimizers(method, settings)
    names = {id(p): n for n, p in method.named_parameters()}
    grouped = [[names[id(p)] for p in group["params"]] for group in main.param_groups]
    matrices = ["encoder.0.weight", "encoder.2.weight"]
    vectors = ["encoder.0.bias", "encoder.1.weight", "encoder.1.bias", "encoder.2.bias"]
    assert grouped[0] == matrices
    assert sorted(grouped[1]) == sorted([*vectors, "objective.log_scale"])
    assert [group["weight_decay"] for group in main.param_groups] == [0.3, 0.0]
    assert [names[id(p)] for p in exponents.param_groups[0]["params"]] == ["objective.cell.logits"]
    assert exponents.param_groups[0]["weight_decay"] == 0

    others = dict(twin.named_parameters())
    logits = others.pop("objective.cell.logits")
    groups = [
        {"params": [p for p in others.values() if p.ndim > 1], "weight_decay": 0.3},
        {"params": [p for p in others.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    lr = 0.4 * 8 / 256 * 0.5
    peers = [_peer(name, groups, lr), torch.optim.Adam([logits], lr=0.07 * 0.5, betas=(0.9, 0.98))]
    for step, batch in enumerate(batches(3)):
        set_rate([main, exponents], 0.5)
        for model, optimizers in ((method, [main, exponents]), (twin, peers)):
            torch.manual_seed(step)
            model(batch, step).losses["loss"].backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for key, value in method.state_dict().items():
            assert torch.equal(value, twin.state_dict()[key]), key


def _peer(name: str, groups: list[dict], lr: float) -> torch.optim.Optimizer:
    from lightly.utils.lars import LARS

    if name == "adamw":
        return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98), fused=True)
    return {"sgd": torch.optim.SGD, "lars": LARS}[name](groups, lr=lr, momentum=0.9)


def test_a_fixed_cell_has_one_optimiser(tmp_path: Path):
    assert len(build_optimizers(Line("dot"), small(tmp_path))) == 1


# The loop


def test_a_run_cut_at_any_step_equals_the_whole_one(tmp_path: Path):
    whole = Line()
    expected, folder = trained(whole, small(tmp_path / "whole", clip=0.5), batches(10))
    rows = folder.steps()
    clipped = sum(row["train/gradient_norm"] > 0.5 for row in rows)
    assert expected["train/clip_rate"] == clipped / 10
    assert expected["run/steps"], expected["run/samples"] == (10, 80)
    assert [row["epoch"] for row in rows] == [(k + 1) / 8 for k in range(10)]

    settings = small(tmp_path / "cut", clip=0.5, checkpoint_every=3)
    for cut in (1, 4, 5, 9):

        class Stops(list):
            def __getitem__(self, step, cut=cut):
                if step == cut:
                    raise RuntimeError("cut")
                return super().__getitem__(step)

        with pytest.raises(RuntimeError, match="cut"):
            trained(Line(), settings, Stops(batches(10)))
    method = Line()
    metrics, folder = trained(method, settings, batches(10))
    assert metrics == expected
    seconds = "run/seconds"
    assert [{**row, seconds: 0} for row in folder.steps()] == [{**row, seconds: 0} for row in rows]
    for name, value in whole.state_dict().items():
        assert torch.equal(value, method.state_dict()[name]), name


def test_a_loss_that_is_no_number_stops_with_step_and_cause(tmp_path: Path):
    settings = small(tmp_path, checkpoint_every=2)
    with pytest.raises(Diverged, match=r"step 5\. loss inf, contrastive [\d.]+, variance .*left"):
        trained(Line(bomb=5), settings, batches(10))
    (folder,) = (RunFolder(path) for path in tmp_path.glob("*/*"))
    state = load_checkpoint(folder.checkpoint)
    assert state is not None
    assert state["step"] == 4
    assert len(folder.steps()) == 5


def test_weights_that_overflow_are_never_saved(tmp_path: Path):
    class Overflows(Line):
        def after_step(self, progress: float) -> None:
            if progress == 0.4:
                with torch.no_grad():
                    self.encoder[2].bias[0] = math.inf

    with pytest.raises(Diverged, match=r"step 4\. encoder\.2\.bias is not finite"):
        trained(Overflows(), small(tmp_path, checkpoint_every=1), batches(10))
    (path,) = tmp_path.glob("*/*")
    state = load_checkpoint(path / "checkpoint")
    assert state is not None
    assert state["step"] == 3
    assert torch.isfinite(state["method"]["encoder.2.bias"]).all()


class Spoilt(list):
    def __getitem__(self, step):
        if step == 2:
            raise ValueError("pictures/7.png is damaged.")
        return super().__getitem__(step)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_batch_is_one_line_with_workers_too(workers: int, tmp_path: Path):
    with pytest.raises(ValueError, match=r"^pictures/7\.png is damaged\.$"):
        trained(Line(), small(tmp_path, workers=workers), Spoilt(batches(10)))


def test_evaluation_comes_before_between_and_at_the_end(tmp_path: Path):
    calls = iter(range(10))
    metrics, folder = trained(
        Line(),
        small(tmp_path, eval_every=24, log_every=4),
        batches(10),
        evaluate=lambda: {"test/knn": float(next(calls))},
    )
    assert metrics["untrained/knn"] == 0.0
    assert {row["step"]: row["test/knn"] for row in folder.steps() if "test/knn" in row} == {
        2: 1.0,
        5: 2.0,
        8: 3.0,
    }
    assert metrics["test/knn"] == 4.0
    assert [row["step"] for row in folder.steps()] == [0, 2, 4, 5, 8, 9]


def test_mixed_precision_on_a_cpu_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="Use --precision=32-true"):
        trained(Line(), small(tmp_path, precision="bf16-mixed"), batches(10))


# Checkpoints


def test_a_checkpoint_comes_back_bit_for_bit(tmp_path: Path):
    assert load_checkpoint(tmp_path) is None
    x = torch.tensor([math.nan, -0.0, 1e-45])
    facts = {"untrained": {"a": 0.1 + 0.2}}
    state = {"step": 3, "method": {"x": x}, "optimizers": [], "facts": facts}
    save_checkpoint(tmp_path / "new", state)
    back = load_checkpoint(tmp_path / "new")
    assert back is not None
    assert (back["step"], back["facts"]) == (3, facts)
    assert torch.equal(back["method"]["x"].view(torch.int32), x.view(torch.int32))


def test_a_checkpoint_that_fails_half_way_leaves_the_old_one(tmp_path: Path):
    save_checkpoint(tmp_path, {"step": 1})
    before = (tmp_path / FILE).read_bytes()

    class Unsaved:
        def __reduce__(self):
            raise ValueError("half way")

    with pytest.raises(ValueError, match="half way"):
        save_checkpoint(tmp_path, {"step": 2, "x": torch.zeros(10_000), "bad": Unsaved()})
    assert (tmp_path / FILE).read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == [FILE]


def test_a_full_disk_is_an_os_error_that_names_the_file(tmp_path: Path):
    """In a process of its own, whose files may hold 50,000 bytes."""
    save_checkpoint(tmp_path, {"step": 1})
    before = (tmp_path / FILE).read_bytes()
    code = f"""
    import resource, torch
    from pathlib import Path
    from offsphere.training.checkpoint import save_checkpoint
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
    try:
        save_checkpoint(Path({str(tmp_path)!r}), {{"x": torch.zeros(100_000)}})
    except OSError as error:
        print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert "it could not be written, what was there is intact" in done.stdout
    assert str(tmp_path / FILE) in done.stdout
    assert (tmp_path / FILE).read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == [FILE]
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 50_000


@pytest.mark.parametrize("damage", [b"", b"garbage", None])
def test_a_damaged_checkpoint_is_named(damage: bytes | None, tmp_path: Path):
    save_checkpoint(tmp_path, {"x": torch.zeros(1000)})
    file = tmp_path / FILE
    file.write_bytes(file.read_bytes()[:2000] if damage is None else damage)
    with pytest.raises(ValueError, match=re.escape(f"Cannot read the checkpoint {file}")) as caught:
        load_checkpoint(tmp_path)
    assert "\n" not in str(caught.value)


# Telemetry


@hypothesis_settings(deadline=None, max_examples=15)
@given(st.sampled_from(["cosine", "dot", "qnorm", "0.3,0.7"]), st.integers(0, 100))
def test_telemetry_is_what_a_plain_loop_counts(cell: str, seed: int):
    left, right = torch.randn(2, 9, 4, generator=stream(seed, "x"), dtype=torch.float64)
    objective = Objective(cell, "info_nce", population=64, temperature=0.25, scale="fixed")
    found = telemetry(left, right, objective)
    u, v = (x / x.norm(dim=1, keepdim=True) for x in (left, right))
    negatives = torch.stack([u[i] @ v[j] for i in range(9) for j in range(9) if i != j])
    apart = torch.stack([(u[i] - u[j]).square().sum() for i in range(9) for j in range(i)])
    spectrum = torch.linalg.svdvals(left)
    shares = spectrum / spectrum.sum()
    norms = left.norm(dim=1)
    g_left, g_right = (float(g) for g in Cell(cell).exponents)
    expected = {
        "negative_mean": negatives.mean(),
        "negative_variance": negatives.var(correction=0),
        "alignment": (u - v).square().sum(1).mean(),
        "uniformity": torch.exp(-2 * apart).mean().log(),
        "rankme": torch.exp(-(shares * shares.log()).sum()),
        "norm_left_mean": norms.mean(),
        "norm_left_cv": norms.std(correction=0) / norms.mean(),
        "norm_left_q50": norms.median(),
        "norm_right_q95": right.norm(dim=1).quantile(0.95),
        "temperature": 0.25,
        "effective_temperature": 0.25
        / (norms.mean() ** (1 - g_left) * right.norm(dim=1).mean() ** (1 - g_right)),
        "exponent_left": g_left,
        "exponent_right": g_right,
        "scale_ratio": 1.0,
    }
    for name, value in expected.items():
        assert found[f"train/{name}"] == pytest.approx(float(value), rel=1e-4), name
    assert all(isinstance(value, float) for value in found.values())


# Settings


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cell": "cosinus"}, "Did you mean 'cosine'"),
        ({"eval_cell": "dott"}, "Did you mean 'dot'"),
        (
            {"cell": "learnable", "eval_cell": " Learnable"},
            "--eval-cell=learnable has no exponents; give two, as in 0.3,0.7. Without --eval-cell "
            "a learnable run is scored with what it learned.",
        ),
        ({"cell": "nan,1"}, "two finite exponents for a cell, as in 0.3,0.7, got 'nan,1'"),
        ({"cell": "1e400,1"}, "two finite exponents for a cell, as in 0.3,0.7, got '1e400,1'"),
        (
            {"temperature": 1.01, "learnable_temperature": True},
            "--temperature must be between 0.01 and 1 if it is learned "
            "(or --no-learnable-temperature), got 1.01",
        ),
        ({"batch_size": 1}, "--batch-size must be at least 2, got 1"),
        ({"temperature": 0.0}, "--temperature must be above 0, got 0.0"),
        ({"temperature": math.inf}, "--temperature must be above 0, got inf"),
        ({"lr": -1.0}, "--lr must be above 0, got -1.0"),
        ({"lr": math.nan}, "--lr must be above 0, got nan"),
        ({"lr": math.inf}, "--lr must be above 0, got inf"),
        ({"epochs": math.inf}, "--epochs must be above 0, got inf"),
        ({"epochs": 0.0}, "--epochs must be above 0, got 0.0"),
        ({"samples": 0}, "--samples must be above 0, got 0"),
        ({"threads": 0}, "--threads must be above 0, got 0"),
        ({"workers": -1}, "--workers must be at least 0, got -1"),
        ({"variance_weight": -1.0}, "--variance-weight must be at least 0"),
        ({"clip": math.nan}, "--clip must be at least 0, got nan"),
        ({"warmup": 1.5}, "--warmup must be a share between 0 and 1, got 1.5"),
        ({"samples": 5, "epochs": 1.0}, "--samples or as --epochs, not both"),
        ({"gor_weight": -1.0}, "--gor-weight must be at least 0, got -1.0"),
        ({"keep": "best"}, "--keep=best chooses among evaluations: give --eval-every=SAMPLES"),
    ],
)
def test_settings_are_checked(changes: dict, said: str):
    with pytest.raises(ValueError, match=re.escape(said)):
        TrainSettings(**changes)


def test_every_setting_but_the_plainest_explains_itself():
    source = Path(str(sys.modules[TrainSettings.__module__].__file__)).read_text()
    for field in fields(TrainSettings):
        assert re.search(rf'\n    {field.name}: .*\n    """', source), field.name


def test_one_cell_has_one_spelling():
    assert canonical_cell(" DOT ") == "dot"
    assert canonical_cell("imgnorm") == "qnorm"
    assert canonical_cell("0.30,.7") == canonical_cell("0.3,0.70") == "0.3,0.7"


@pytest.mark.parametrize(
    ("eval_cell", "expected"), [(None, (0.25, 0.8)), ("qnorm", (1.0, 0.0)), ("0.3,2", (0.3, 2.0))]
)
def test_without_an_eval_cell_the_learned_exponents_score(eval_cell, expected):
    objective = Objective("learnable", population=9)
    with torch.no_grad():
        objective.cell.logits.copy_(torch.logit(torch.tensor([0.25, 0.8])))
    experiment = Experiment()
    experiment.settings = TrainSettings(cell="learnable", eval_cell=eval_cell)
    experiment.method = SimpleNamespace(objective=objective)
    assert experiment.exponents() == pytest.approx(expected, abs=1e-6)


def test_steps_and_peak_rate_in_closed_form():
    settings = TrainSettings(batch_size=64, samples=1000, lr=0.2, lr_rule="linear")
    assert steps_of(settings, 200) == 15
    assert steps_of(TrainSettings(batch_size=64, epochs=2.5), 200) == 8
    assert steps_of(TrainSettings(batch_size=256), 1000) == 468
    assert peak_lr(settings) == pytest.approx(0.05)
    assert peak_lr(replace(settings, lr_rule="sqrt")) == pytest.approx(0.1)
    assert peak_lr(replace(settings, lr_rule="none")) == 0.2
    with pytest.raises(ValueError, match=r"--batch-size=64 is larger.*\(63 samples\).*at most 63"):
        steps_of(settings, 63)
    with pytest.raises(ValueError, match="ends before the first step of 64 samples"):
        steps_of(replace(settings, samples=63), 200)


# Loggers


def test_tensorboard_reads_back_what_was_logged_also_after_a_resume(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = small(tmp_path, loggers=("tensorboard",))
    for start, loss in ((0, 0.5), (1, 2.0)):
        with open_loggers(settings, RunFolder(tmp_path), start) as log:
            for step in range(start, 3):
                log({"step": step, "samples": 32, "train/loss": loss, "run/status": "finished"})
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Tags()["scalars"] == ["train/loss"]
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(0, 0.5), (1, 2), (2, 2)]


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_logger_that_is_not_installed_is_named(name: str, tmp_path: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with (
        pytest.raises(ValueError, match=re.escape("pip install -e '.[loggers]'")),
        open_loggers(small(tmp_path, loggers=(name,)), RunFolder(tmp_path)),
    ):
        pass
