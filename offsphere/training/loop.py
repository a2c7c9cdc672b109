"""fit(): the one training loop. A run depends on its settings alone: a step's batch, augmentation
and rate are functions of (settings, step), so a run that was cut resumes bit for bit."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterable
from contextlib import closing, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from offsphere.losses import NonFinite
from offsphere.run.command import Stopped, stop_signals
from offsphere.run.progress import Work, say
from offsphere.run.record import RunFolder
from offsphere.training.checkpoint import Best, load_checkpoint, save_checkpoint
from offsphere.training.experiment import Divisible, Experiment, Method, Step, Streamed
from offsphere.training.microbatch import autocast, is_split, prepare_batch_norm, split_step
from offsphere.training.ranks import Ranks, Rows, here, share, take
from offsphere.training.settings import TrainSettings, steps_of
from offsphere.training.streams import stream_seed
from offsphere.training.telemetry import open_loggers, telemetry

ADAM_BETAS = (0.9, 0.98)


class Interrupted(Stopped):
    """The run was told to stop; its checkpoint is written."""

    code = 130


class Diverged(Stopped):
    """The loss is no longer a number; the last good checkpoint is kept."""


def fit(
    experiment: Experiment, settings: TrainSettings, folder: RunFolder, ranks: Ranks | None = None
) -> dict[str, float]:
    """Train to the end of the budget and return the final metrics.

    The experiment is also measured before the first step: that comes back under `untrained/`. On
    several ranks each trains on its own rows of every batch; the first alone evaluates and writes
    into the folder.
    """
    method: Method = experiment.method
    batches, population = experiment.batches, experiment.population
    total = steps_of(settings, population)
    ranks = here(settings) if ranks is None else ranks
    device, first, own = ranks.device, ranks.first, ranks.own(settings.batch_size)
    prepare_batch_norm(method, settings, ranks)
    method.to(device)
    optimizers = build_optimizers(method, settings)

    state = ranks.on_first(lambda: load_checkpoint(folder.checkpoint))
    if state is None:
        ranks.start_alike(method)
        say("Measuring the untrained model.")
        start, facts = 0, {"untrained": ranks.on_first(experiment.evaluate), "clipped": 0}
        if isinstance(batches, Streamed):
            facts["readers"] = _readers(settings, ranks)
    else:
        start, facts = _restore(state, method, optimizers, total)
        if isinstance(batches, Streamed):
            _check_readers(facts, settings, ranks)
        say(f"The run resumes after {start:,} of its {total:,} steps.")
    best = None if settings.keep == "last" else Best(experiment, ranks, state)
    if first:
        folder.rewind(start - 1)

    def checkpoint(next_step: int) -> None:
        _check_weights(method, next_step, settings)
        if not first:
            return
        save_checkpoint(
            folder.checkpoint,
            {
                "step": next_step,
                "method": method.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in optimizers],
                "facts": facts,
                **({} if best is None else {"best": best.kept}),
            },
        )

    samples = f"{total:,} steps of {settings.batch_size:,} samples"
    say(f"Training: {samples}, on {device}, with {settings.threads} thread(s).")
    loader = _loader(batches, start, total, settings, own, pin_memory=device.type == "cuda")
    eval_steps = max(1, settings.eval_every // settings.batch_size) if settings.eval_every else 0
    pieces: Any = {"unit": "steps", "start": start, "per_piece": settings.batch_size}
    loggers = open_loggers(settings, folder, start) if first else nullcontext(lambda _: None)
    with loggers as log:
        with stop_signals() as stops, closing(Work("training", total, **pieces)) as work:
            for step, batch in enumerate(loader, start):
                set_rate(optimizers, rate(step, total, settings.warmup))
                if isinstance(batch, Exception):
                    raise batch
                already = ranks.payload
                try:
                    result = _differentiated(method, _to(batch, device), step, settings, ranks)
                except NonFinite as error:
                    raise _diverged(step, str(error), settings) from None
                last = step + 1 == total
                logs = step % settings.log_every == 0 or last
                if logs or device.type == "cpu":
                    _check_finite(result, step, settings)
                norm = _gradient_norm(method, settings.clip)
                if settings.clip:
                    facts["clipped"] += int(norm > settings.clip)
                row: dict[str, Any] = {}
                if logs:  # before the step: temperature and exponents are those of this loss
                    row = _row(result, method, norm, optimizers[0], facts["clipped"] / (step + 1))
                    if ranks.count > 1:
                        row |= {
                            "train/ranks": ranks.count,
                            "train/payload": ranks.payload - already,
                        }
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                method.after_step((step + 1) / total)

                if eval_steps and (step + 1) % eval_steps == 0 and not last:
                    row |= ranks.on_first(experiment.evaluate)
                    row |= {} if best is None else best.look(step + 1)
                if row and first:
                    row = {
                        "step": step,
                        "samples": (step + 1) * settings.batch_size,
                        "epoch": (step + 1) * settings.batch_size / population,
                        **row,
                    }
                    folder.log_step(row)
                    log(row)
                work.done(step + 1, _loss_and_norm(row))
                if ranks.anyone(bool(stops)):
                    checkpoint(step + 1)
                    raise _interrupted(stops, step + 1, total)
                if (step + 1) % settings.checkpoint_every == 0 and not last:
                    checkpoint(step + 1)
            _check_weights(method, total, settings)
            work.close()
            say("Measuring the trained model.")
            if best is not None:
                best.look(total)
            checkpoint(total)
            if ranks.anyone(bool(stops)):
                raise _interrupted(stops, total, total)
        # From here on a signal ends the run at once, which loses no training.
        kept = {} if best is None else best.restore()
        metrics = ranks.on_first(lambda: _final(folder, facts) | kept | experiment.evaluate())
        log({"step": total - 1, **metrics})
    return metrics


def build_optimizers(method: nn.Module, settings: TrainSettings) -> list[torch.optim.Optimizer]:
    """The main optimiser, and Adam for the learnable cell's exponents if there are any."""
    exponents, decayed, plain = [], [], []
    for name, parameter in method.named_parameters():
        if not parameter.requires_grad:
            continue
        if name.endswith("cell.logits"):
            exponents.append(parameter)
        elif parameter.ndim > 1:
            decayed.append(parameter)
        else:
            plain.append(parameter)
    groups = [
        {"params": decayed, "weight_decay": settings.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    optimizers = [_main(groups, settings)]
    if exponents:
        optimizers.append(torch.optim.Adam(exponents, lr=settings.exponent_lr, betas=ADAM_BETAS))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def peak_lr(settings: TrainSettings) -> float:
    """The learning rate after `lr_rule`."""
    ratio = settings.batch_size / 256
    return settings.lr * {"linear": ratio, "sqrt": math.sqrt(ratio), "none": 1.0}[settings.lr_rule]


def _main(groups: list[dict], settings: TrainSettings) -> torch.optim.Optimizer:
    lr = peak_lr(settings)
    if settings.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=0.9)
    if settings.optimizer == "adamw":
        # Fused: one pass over the weights, five times faster than the loop over tensors.
        return torch.optim.AdamW(groups, lr=lr, betas=ADAM_BETAS, fused=True)
    from lightly.utils.lars import LARS

    return LARS(groups, lr=lr, momentum=0.9)


def rate(step: int, total: int, warmup: float) -> float:
    """The factor on the peak rate: a linear rise over `warmup` of the steps, then a cosine to 0."""
    rise = warmup * total
    if step + 1 <= rise:
        return (step + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * (step + 1 - rise) / (total - rise + 1)))


def set_rate(optimizers: list[torch.optim.Optimizer], factor: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor


def _differentiated(
    method: Method, batch: Any, step: int, settings: TrainSettings, ranks: Ranks
) -> Step:
    """A step's losses and embeddings; every parameter has its gradient."""
    if is_split(settings, ranks):
        return split_step(method, batch, step, settings, ranks)
    torch.manual_seed(stream_seed(settings.seed, "model", step))
    with autocast(settings, ranks.device):
        result = method(batch, step)
    result.losses["loss"].backward()
    return result


def _to(batch: Any, device: torch.device) -> Any:
    """A batch, whatever it is made of, on the device; from pinned memory without waiting."""
    if isinstance(batch, dict):
        return {name: _to(x, device) for name, x in batch.items()}
    if isinstance(batch, list | tuple):
        moved = [_to(x, device) for x in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=device.type == "cuda")
    return batch


def _loader(
    batches: Dataset | Streamed,
    start: int,
    total: int,
    settings: TrainSettings,
    own: Rows,
    pin_memory: bool,
) -> Iterable[Any]:
    """The batches of the steps from `start` on, prepared by worker processes if there are any.

    Those of a data set are this rank's rows; a stream already gives each rank its own.
    """
    if isinstance(batches, Streamed):
        return batches.from_step(start, total)
    return DataLoader(
        _ErrorsAsValues(batches, own),
        sampler=range(start, total),
        batch_size=None,
        num_workers=settings.workers,
        worker_init_fn=_leave_interrupts_to_the_trainer,
        pin_memory=pin_memory,
    )


def _readers(settings: TrainSettings, ranks: Ranks) -> list[int]:
    """Ranks, and processes per rank, that a stream's shards are dealt out to."""
    return [ranks.count, max(1, settings.workers)]


def _check_readers(facts: dict[str, Any], settings: TrainSettings, ranks: Ranks) -> None:
    """Other readers would read a stream in another order: samples would repeat or be missed."""
    now = _readers(settings, ranks)
    before = facts.get("readers", now)
    if before != now:
        raise ValueError(
            "Streamed shards are dealt out to ranks and workers, so a run resumes only with as "
            f"many as it began with: {before[0]} rank(s) and --workers={before[1]} each, not "
            f"{now[0]} and {now[1]}. Use these, or shards on a local disk, which any number reads."
        )


class _ErrorsAsValues(Dataset):
    """This rank's rows; a mistake in the data is returned: a worker's raise would add a trace."""

    def __init__(self, batches: Dataset, own: Rows) -> None:
        self.batches, self.own = batches, own

    def __getitem__(self, step: int) -> Any:
        try:
            return own_part(self.batches, step, self.own)
        except (ValueError, OSError) as error:
            return error


def own_part(batches: Dataset, step: int, rows: Rows) -> Any:
    """These rows of a step's batch, without the cost of the others where that can be had."""
    if rows.all:
        return batches[step]
    if isinstance(batches, Divisible):
        return batches.part(step, rows)
    return take(batches[step], rows, share(rows.total, 0, 1))


def _restore(
    state: dict[str, Any], method: nn.Module, optimizers: list[torch.optim.Optimizer], total: int
) -> tuple[int, dict[str, Any]]:
    if state["step"] > total:
        raise ValueError(
            f"The checkpoint is of step {state['step']:,}, but the run ends after {total:,}: it "
            "belongs to another run. --no-resume moves the run aside and starts anew."
        )
    try:
        method.load_state_dict(state["method"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        return state["step"], state["facts"]
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"The checkpoint does not belong to this method ({reason}). Another version may have "
            "written it: --no-resume moves the run aside and starts anew."
        ) from error


def _interrupted(stops: list[str], steps: int, total: int) -> Interrupted:
    cause = stops[0] if stops else "a signal to another rank"
    return Interrupted(
        f"stopped by {cause} after step {steps} of {total}. The checkpoint is written: the same "
        "command resumes from there."
    )


def _gradient_norm(method: nn.Module, clip: float) -> Tensor:
    """The norm of all gradients, which are scaled down to `clip` if that is above 0."""
    parameters = [p for p in method.parameters() if p.grad is not None]
    return nn.utils.clip_grad_norm_(parameters, clip or math.inf)


def _check_finite(result: Step, step: int, settings: TrainSettings) -> None:
    loss = result.losses["loss"]
    if torch.isfinite(loss):
        return
    parts = ", ".join(f"{name} {value.item():g}" for name, value in result.losses.items())
    norms = ", ".join(
        f"{side} {x.detach().norm(dim=1).max().item():.3g}"
        for side, x in (("left", result.left), ("right", result.right))
    )
    raise _diverged(step, f"{parts}; largest norms: {norms}.", settings)


def _check_weights(method: nn.Module, steps: int, settings: TrainSettings) -> None:
    """A loss can be finite and its step not: such weights are neither saved nor evaluated."""
    for name, value in method.state_dict().items():
        if value.is_floating_point() and not torch.isfinite(value).all():
            raise _diverged(steps, f"{name} is not finite.", settings)


def _diverged(step: int, cause: str, settings: TrainSettings) -> Diverged:
    return Diverged(
        f"diverged: the loss is not a number at step {step}. {cause} The last good checkpoint is "
        f"kept. Try a lower --lr (now {settings.lr:g}), --clip=1 or a higher --temperature."
    )


def _row(
    result: Step, method: Method, norm: Tensor, optimizer: torch.optim.Optimizer, clipped: float
) -> dict[str, float]:
    losses = {f"train/{name}": value.item() for name, value in result.losses.items()}
    extra = {
        "train/lr": optimizer.param_groups[0]["lr"],
        "train/gradient_norm": norm.item(),
        "train/clip_rate": clipped,
    }
    left, right = (
        x.float() if x.dtype == torch.bfloat16 else x
        for x in (result.left.detach(), result.right.detach())
    )
    return losses | telemetry(left, right, method.objective) | method.telemetry(result) | extra


def _final(folder: RunFolder, facts: dict[str, Any]) -> dict[str, float]:
    """The last row's training numbers, and what the untrained method scored."""
    rows = [row for row in folder.steps() if "train/loss" in row]
    last = {name: value for name, value in rows[-1].items() if name.startswith("train/")}
    untrained = {
        f"untrained/{name.removeprefix('test/')}": v for name, v in facts["untrained"].items()
    }
    return (
        {"run/steps": rows[-1]["step"] + 1, "run/samples": rows[-1]["samples"]} | last | untrained
    )


def _leave_interrupts_to_the_trainer(_worker: int) -> None:
    """Ctrl-C and cluster managers signal every process; the trainer still needs its workers."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _loss_and_norm(row: dict[str, Any]) -> str:
    """What a logged step says on the way."""
    if "train/loss" not in row:
        return ""
    return f"loss {row['train/loss']:.3f}, norm {row['train/norm_left_mean']:.3g}"
