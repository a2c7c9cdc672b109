"""The doctor finds each planted fault, and nothing where there is none."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from experiments import given
from torch import Tensor, nn
from torch.utils.data import Dataset

from offsphere import cli
from offsphere.momentum import MomentumTwin, Queue
from offsphere.objective import Objective
from offsphere.training import doctor, machine, microbatch
from offsphere.training.experiment import Experiment, Method, Step
from offsphere.training.ranks import Ranks, Rows, Tensors, share
from offsphere.training.settings import TrainSettings
from offsphere.training.streams import batch_indices, stream

POPULATION = 100
TABLE = torch.randn(POPULATION, 6, generator=stream(1, "test"))
RANK_CHECKS = {f"{count} ranks against one process" for count in (2, 3)}


@dataclass(frozen=True)
class Config(TrainSettings):
    loss: Literal["info_nce", "moco_nce"] = "info_nce"
    norm: Literal["none", "batch"] = "none"
    data: Literal["table", "table without its end", "shards", "shards but one"] = "table"
    saved: bool = True


BASE = Config(
    batch_size=20, cell="learnable", learnable_temperature=True, variance_weight=3, device="cpu"
)


class Toy(Method):
    """MoCo, or CLIP with one tower, of linear layers."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        torch.manual_seed(0)
        norm = [nn.BatchNorm1d(5)] if config.norm == "batch" else []
        self.tower = nn.Sequential(nn.Linear(6, 5), *norm, nn.Dropout(0.1), nn.Linear(5, 4))
        self.twin = MomentumTwin(self.tower, 0.9)
        self.queue = Queue(30, 4)
        if not config.saved:
            self.queue.register_buffer("rows", self.queue.rows, persistent=False)
        self.objective = Objective(
            config.cell, config.loss, population=POPULATION, variance_weight=3,
            learnable_temperature=True,
        )  # fmt: skip
        self.keys: Tensor | None = None

    def inputs(self, batch: Tensor, step: int, rows: Rows | None = None) -> Tensors:
        return {"a": batch, "b": batch.flip(1)}

    def embed(self, inputs: Tensors) -> Tensors:
        right = {} if self.objective.loss == "moco_nce" else {"right": self.tower(inputs["b"])}
        return {"left": self.tower(inputs["a"])} | right

    def constants(self, inputs: Tensors, step: int) -> Tensors:
        return {"right": self.twin(inputs["b"])} if self.objective.loss == "moco_nce" else {}

    def losses(self, embedded: Tensors) -> Tensors:
        left, right = embedded["left"], embedded["right"]
        if self.objective.loss == "info_nce":
            return self.objective(left, right)
        if not self.queue.filled:
            self.queue.initialise(right, stream(0, "queue"))
        self.keys = right
        return self.objective(left, right, queue=self.queue.keys)

    def after_step(self, progress: float) -> None:
        if self.keys is not None:
            self.queue.enqueue(self.keys)
        self.twin.update(progress)


class Rowwise(Dataset):
    """batches[step]; of parts the rows after the last full third are lost, if so planted."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __getitem__(self, step: int) -> Tensor:
        return self.part(step, share(self.config.batch_size, 0, 1))

    def part(self, step: int, rows: Rows) -> Tensor:
        chosen = batch_indices(0, step, self.config.batch_size, POPULATION)
        end = rows.total - rows.total % 3 if "without" in self.config.data else rows.total
        return TABLE[chosen[rows.start : rows.stop if rows.all else min(rows.stop, end)]]


class Shards:
    """Five shards of 20 rows, read in order epoch after epoch; the last is lost, if so planted."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def from_step(self, start: int, total: int) -> Iterator[Tensor]:
        kept = 80 if self.config.data == "shards but one" else POPULATION
        size = self.config.batch_size
        rows = torch.cat(
            [torch.randperm(kept, generator=stream(0, "order", epoch)) for epoch in range(9)]
        )
        for step in range(start, total):
            yield TABLE[rows[step * size : (step + 1) * size]]


def make(config: Config, _folder: object, _handed: object) -> Experiment:
    batches = Shards(config) if "shards" in config.data else Rowwise(config)
    return given(Toy(config), batches, POPULATION)


def faults(config: Config) -> set[str]:
    found = list(doctor.examine(config, make))
    assert {finding.verdict for finding in found} <= {"ok", "FAULT"}
    return {finding.check for finding in found if finding.verdict == "FAULT"}


@pytest.mark.parametrize("changes", [{}, {"loss": "moco_nce"}, {"data": "shards"}])
def test_the_real_thing_has_no_fault(changes: dict[str, Any]):
    assert faults(replace(BASE, **changes)) == set()


def without_gradient_gather(
    method: Method, batch: Any, step: int, settings: TrainSettings, ranks: Ranks
) -> Step:
    """open_clip's default: others' features are constants, and DDP averages the gradients."""
    inputs = method.inputs(batch, step)
    embedded = method.embed(inputs)
    rows, sizes = ranks.gather(embedded, settings.batch_size)
    for name, x in rows.items():
        pieces = list(x.split(sizes[name]))
        pieces[ranks.rank] = embedded[name]
        rows[name] = torch.cat(pieces)
    losses = method.losses(rows)
    losses["loss"].backward()
    for parameter in method.parameters():
        if parameter.grad is not None:
            parameter.grad /= ranks.count
    ranks.sum_gradients(method.parameters())
    return Step(losses, rows["left"], rows["right"])


def test_it_finds_a_loss_without_gradient_gather(monkeypatch):
    ours = microbatch.split_step

    def planted(method, batch, step, settings, ranks):
        naive = without_gradient_gather if ranks.count > 1 else ours
        return naive(method, batch, step, settings, ranks)

    monkeypatch.setattr(microbatch, "split_step", planted)
    assert faults(BASE) == RANK_CHECKS


def test_it_finds_a_dropped_last_shard():
    assert faults(replace(BASE, data="table without its end")) == {"rows of all ranks"}
    assert faults(replace(BASE, data="shards but one")) == {"samples of an epoch"}


def test_it_finds_an_unsaved_queue():
    config = replace(BASE, loss="moco_nce", saved=False)
    (finding,) = [f for f in doctor.examine(config, make) if f.verdict == "FAULT"]
    assert finding.check == "resumed against undisturbed"
    assert "first queue.rows" in finding.measured
    assert finding.remedy == "save queue.rows in the state dict"


def test_it_finds_a_wrong_accumulation_factor(monkeypatch):
    ours = microbatch._push

    def planted(embedded: Tensors, gradients: Tensors) -> None:
        ours(embedded, {name: 4 * x for name, x in gradients.items()})

    monkeypatch.setattr(microbatch, "_push", planted)
    found = {f.check: f for f in doctor.examine(BASE, make) if f.verdict == "FAULT"}
    assert found.keys() == RANK_CHECKS | {"micro-batches of 2 against 20"}
    assert found["micro-batches of 2 against 20"].measured.startswith("3.0e+00 of tower")


def test_it_finds_a_cpu_torch_beside_a_cuda_torchvision(monkeypatch, capsys):
    versions = {"torch": "2.9.0+cpu", "torchvision": "0.24.0+cu126"}
    finding = machine.builds(versions)
    assert finding.verdict == "FAULT"
    assert finding.remedy.endswith("https://download.pytorch.org/whl/cpu")
    assert machine.builds({"torch": "2.9.0+cu126", "torchvision": "0.24.0+cu126"}).verdict == "ok"
    assert machine.builds({"torch": "2.9.0", "torchvision": "0.24.0+cu126"}).verdict == "ok"
    assert machine.builds({"torch": "2.9.0+cu126", "torchvision": "0.24.0+cpu"}).verdict == "FAULT"
    monkeypatch.setattr(machine, "_build", versions.get)
    # What is at fault is told before anything is imported that would break on it.
    monkeypatch.setattr(doctor, "examine", lambda _settings, _run: pytest.fail("imported torch"))
    with pytest.raises(SystemExit) as end:
        doctor.main(["toy"], {"toy": script})
    assert end.value.code == 1
    assert "FAULT" in capsys.readouterr().out


def test_the_build_is_read_from_the_package_where_the_metadata_is_silent():
    import torchvision

    assert machine._build("torch") == torch.__version__
    assert machine._build("torchvision") == torchvision.__version__
    assert machine._build("numpy") == machine.version("numpy")


def test_findings_are_told_one_by_one_and_no_name_is_cut_off(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    name = "encoder.backbone.blocks.0.0.a_layer_with_a_very_long_name_indeed.weight"

    def found() -> Iterator[doctor.Finding]:
        yield doctor.Finding("2 ranks", f"1.0e-09 of {name}", "ok")
        assert name in capsys.readouterr().out  # before the next check has begun
        yield doctor.Finding("shared memory", "little", "warning", "give it more " * 9)

    assert [finding.verdict for finding in doctor.printed(found())] == ["ok", "warning"]
    first, *remedy = capsys.readouterr().out.splitlines()
    assert first == "warning   shared memory: little"
    assert " ".join(" ".join(remedy).split()) == ("give it more " * 9).strip()
    assert max(map(len, remedy)) <= 80


def test_packages_are_compared_with_what_is_asked_for():
    import importlib.metadata

    wanted = ["torch>=2.14", "numpy>=2,<2.4", "ray; extra == 'cluster'"]
    installed = {"torch": "2.15.0+cpu", "numpy": "2.3.1"}
    assert machine.versions(wanted, installed.__getitem__).measured == "2 packages as asked for"
    installed["numpy"] = "2.4.0"
    finding = machine.versions(wanted, installed.__getitem__)
    assert finding[1:] == ("numpy 2.4.0", "warning", "pip install 'numpy<2.4,>=2'")

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    assert machine.versions(["rich>=13"], missing).measured == "rich is missing"


def test_a_rank_that_fails_ends_the_others(capfd):
    """The first rank waits for an exchange that the second one never comes to."""
    import time

    def work(ranks: Ranks) -> Tensors:
        if not ranks.first:
            raise ValueError("a planted fault")
        time.sleep(60)
        return {}

    begin = time.monotonic()
    with pytest.raises(OSError, match=r"2 gloo ranks .* exit codes \[-15, 1\]"):
        doctor.on_ranks(2, work)
    assert time.monotonic() - begin < 30
    assert "a planted fault" in capfd.readouterr().err


def script() -> Any:
    return SimpleNamespace(path="toy.py", config_class=Config, make=make)


def test_the_command_tells_its_findings_and_says_by_its_exit_code(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = ["--batch-size=20", "--norm=batch", "--device=cpu", "--keep=best", "--eval-every=20"]
    doctor.main(["toy", *flags], {"toy": script})
    said = capsys.readouterr().out
    # 2 and 3 ranks and micro-batches, with batch-norm
    assert len(re.findall("^refused ", said, re.MULTILINE)) == 3
    assert said.splitlines()[-1].endswith("3 refused.")
    assert "--norm=group" in said
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(SystemExit) as end:
        doctor.main(["toi"], {"toy": script})
    assert end.value.code == 2
    assert "Did you mean 'toy'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("finding", "verdict"),
    [
        (lambda: machine.shared_memory(2**26, 2), "warning"),
        (lambda: machine.shared_memory(2**26, 0), "ok"),
        (lambda: machine.disk(2**29), "warning"),
        (lambda: machine.disk(2**31), "ok"),
        (lambda: machine.threads(8, 1, 4), "warning"),
        (lambda: machine.threads(2, 2, 4), "ok"),
        (lambda: machine.pinned(["numpy", "torch==2.9.0"], "2.9.0+cpu"), "ok"),
        (lambda: machine.pinned(["numpy", "torch==2.9.0"], "2.8.0"), "FAULT"),
    ],
)
def test_the_machine_is_judged_with_a_remedy(finding: Callable[[], doctor.Finding], verdict: str):
    assert finding().verdict == verdict
    assert (finding().remedy != "") == (verdict != "ok")


@pytest.mark.parametrize(
    ("each", "ranks", "cpus", "remedy"),
    [
        (8, 1, 4, "--threads=4"),
        (8, 2, 4, "--threads=2"),
        (1, 8, 4, "--threads=1 --devices=4"),
    ],
)
def test_the_threads_that_fit(each: int, ranks: int, cpus: int, remedy: str):
    assert machine.threads(each, ranks, cpus).remedy == remedy


@pytest.mark.slow
def test_simclr_as_it_is_by_default_is_sound(capsys):
    from offsphere.cli import SCRIPTS

    doctor.main([], SCRIPTS)
    said = capsys.readouterr().out
    assert "FAULT" not in said
    assert "refused" not in said


def test_gradients_that_are_not_numbers_are_never_the_same():
    expected = {"good": torch.tensor([3.0, 4.0]), "bad": torch.tensor([1.0, float("nan")])}
    found = {"good": torch.tensor([3.0, 4.5]), "bad": torch.tensor([1.0, float("nan")])}
    assert doctor.worst_error(found, expected) == ("bad", float("inf"))
    good = ({"good": found["good"]}, {"good": expected["good"]})
    assert doctor.worst_error(*good) == ("good", pytest.approx(0.1))


def test_the_doctor_of_a_script_that_does_not_train(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["doctor", "planted"])
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith("offsphere doctor: error: planted trains nothing")
