"""Telemetry in the real trainers of others, ten steps each; its values in training/test_loop.py."""

import logging
import warnings

import pytest
import torch
from torch import nn

from offsphere.dropin import ClipLoss, NTXentLoss
from offsphere.evaluation.geometry import batch_numbers
from offsphere.watch import (
    CollapseWarning,
    Telemetry,
    lightning_callback,
    trainer_callback,
)

STEPS, ROWS, WIDTH = 10, 12, 6


class Pairs(torch.utils.data.Dataset):
    def __len__(self):
        return STEPS * ROWS

    def __getitem__(self, index):
        g = torch.Generator().manual_seed(index)
        return {"left": torch.randn(8, generator=g), "right": torch.randn(8, generator=g)}


class TwoTowers(nn.Module):
    """Raw embeddings of both sides, and their loss, as somebody's own model has them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(8, WIDTH), nn.Linear(8, WIDTH)
        self.logit_scale = nn.Parameter(torch.tensor(1.0))
        self.loss = ClipLoss(cell="dot")
        self.embedded = []

    def forward(self, left, right):
        sides = self.left(left), self.right(right)
        self.embedded.append([x.detach().clone() for x in sides])
        return {"loss": self.loss(*sides, self.logit_scale.exp())}

    def temperature(self):
        return 1 / self.logit_scale.detach().exp()


def expected(model: TwoTowers, step: int) -> dict[str, float]:
    numbers = batch_numbers(*model.embedded[step], (0.0, 0.0), None)
    return {f"train/{name}": value for name, value in numbers.items()}


def test_a_plain_loop_has_a_reading_every_third_batch():
    model = TwoTowers()
    telemetry = Telemetry(cell="dot", temperature=0.25, every=3)
    read = []
    for batch in torch.utils.data.DataLoader(Pairs(), ROWS):
        model(**batch)
        read.append(telemetry(*model.embedded[-1]))
    assert [step for step, numbers in enumerate(read) if numbers] == [0, 3, 6, 9]
    for step in (0, 9):
        found = dict(read[step])
        assert found.pop("train/temperature") == 0.25
        norms = [x.norm(dim=1).mean() for x in model.embedded[step]]
        assert found.pop("train/effective_temperature") == pytest.approx(
            0.25 / (norms[0] * norms[1]).item()
        )
        assert found == expected(model, step)
    assert read[0]["train/exponent_left"] == read[0]["train/exponent_right"] == 0.0


def test_lightnings_own_trainer_logs_the_numbers_of_every_step(tmp_path, monkeypatch):
    lightning = pytest.importorskip("pytorch_lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = TwoTowers()

        def training_step(self, batch, _):
            return self.model(**batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.SGD(self.model.parameters(), lr=0.1)

    module, rows = Module(), []
    telemetry = Telemetry(temperature=module.model.temperature).watch(module.model.loss)
    monkeypatch.setattr(
        lightning.loggers.CSVLogger, "log_metrics", lambda self, metrics, step: rows.append(metrics)
    )
    trainer = lightning.Trainer(
        max_steps=STEPS,
        log_every_n_steps=1,
        accelerator="cpu",
        logger=lightning.loggers.CSVLogger(tmp_path),
        callbacks=[lightning_callback(telemetry)],
        default_root_dir=tmp_path,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*num_workers.*|.*does not have many workers.*")
        trainer.fit(module, torch.utils.data.DataLoader(Pairs(), ROWS))
    logged = [row for row in rows if "train/norm_left_mean" in row]
    assert len(logged) == STEPS
    for step, row in enumerate(logged):
        for name, value in expected(module.model, step).items():
            assert float(row[name]) == pytest.approx(value, rel=1e-6), name
    assert logged[0]["train/temperature"] == pytest.approx(1 / torch.e, rel=1e-6)


def test_hugging_faces_own_trainer_has_them_in_its_log(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    model = TwoTowers()
    telemetry = Telemetry(cell="dot", every=2).watch(model.left, model.right)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=STEPS,
        per_device_train_batch_size=ROWS,
        learning_rate=0.01,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
        logging_steps=5,
    )
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Pairs())
    trainer.add_callback(trainer_callback(telemetry, trainer))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*pin_memory.*")
        trainer.train()
    logged = [row for row in trainer.state.log_history if "train/norm_left_mean" in row]
    assert [row["step"] for row in logged] == [1, 3, 5, 7, 9]
    assert [row["step"] for row in trainer.state.log_history if "loss" in row] == [5, 10]
    for row in logged:
        for name, value in expected(model, row["step"] - 1).items():
            assert row[name] == pytest.approx(value, rel=1e-6), name


def test_a_watched_loss_brings_its_cell_and_temperature():
    telemetry = Telemetry().watch(loss := NTXentLoss(temperature=0.3, cell="0.3,0.7"))
    left, right = torch.randn(2, ROWS, WIDTH)
    assert telemetry.read() == {}
    loss(left, right)
    numbers = telemetry.read()
    assert numbers["train/temperature"] == pytest.approx(0.3)
    assert numbers["train/exponent_right"] == pytest.approx(0.7)
    assert telemetry.read() == {}


def test_a_tower_that_serves_both_sides_is_left_first():
    tower = nn.Linear(8, WIDTH)
    telemetry = Telemetry().watch(tower, tower)
    left, right = torch.randn(2, ROWS, 8)
    sides = tower(left).detach(), tower(3 * right).detach()
    assert telemetry.read()["train/norm_right_mean"] == pytest.approx(
        sides[1].norm(dim=1).mean().item()
    )


def test_towers_are_known_by_their_places_whichever_is_called_first():
    model = TwoTowers()
    telemetry = Telemetry().watch(model.left, model.right)
    left, right = torch.randn(2, ROWS, 8)
    last, first = model.right(5 * right), model.left(left)
    numbers = telemetry.read()
    assert numbers["train/norm_left_mean"] == pytest.approx(first.norm(dim=1).mean().item())
    assert numbers["train/norm_right_mean"] == pytest.approx(last.norm(dim=1).mean().item())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda x: 1 + 1e-3 * x, "all embeddings point the same way"),
        (lambda x: x[:, :1] @ torch.randn(1, 40), "embeddings fill 1.0 of 40 directions"),
        (lambda x: 200 * x, "left norms are 200 times what they were at first"),
        (lambda x: x / 1000, "right norms are 0.001 times what they were at first"),
        (lambda x: 0 * x, "all embeddings of a side are zeros"),
        (lambda x: torch.where(torch.arange(64)[:, None] < 3, torch.nan, x), "3 of 64 pairs"),
    ],
)
def test_collapse_is_warned_of_once(change, says):
    torch.manual_seed(0)
    left, right = torch.randn(2, 64, 40)
    telemetry = Telemetry()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        telemetry(left, right)
    changed = change(left), change(right)
    with pytest.warns(CollapseWarning) as caught:
        telemetry(*changed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        telemetry(*changed)
    matching = [str(x.message) for x in caught if says in str(x.message)]
    assert len(matching) == 1
    assert matching[0].startswith("Collapse in batch 2: ")


def test_what_cannot_be_watched_is_refused():
    with pytest.raises(ValueError, match="Expected a reading every 1 or more batches, got every=0"):
        Telemetry(every=0)
    with pytest.raises(ValueError, match="Expected one loss or two towers to watch, got 3."):
        Telemetry().watch(*[nn.Linear(1, 1) for _ in range(3)])
    with pytest.raises(ValueError, match="Unknown cell 'cosin'. Did you mean 'cosine'?"):
        Telemetry(cell="cosin")
    with pytest.raises(ValueError, match="Expected a module to watch, got function"):
        Telemetry().watch(nn.functional.cross_entropy)  # pyright: ignore[reportArgumentType]
    rows = torch.randn(4, 3)
    for other in (rows[:2], rows[:, :2], rows.long(), rows[0]):
        with pytest.raises(ValueError, match="both sides as floating-point matrices of one shape"):
            Telemetry()(rows, other)


def test_a_batch_of_one_row_is_passed_over():
    """The last batch of an epoch may be one; there it is no reason to stop."""
    telemetry, rows = Telemetry(every=2), torch.randn(4, 3)
    found = [bool(telemetry(rows[:n], rows[:n])) for n in (4, 4, 1, 4, 4)]
    assert found == [True, False, False, False, True]
