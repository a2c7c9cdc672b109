"""One step's gradients with the towers run on parts of the batch: micro-batches, ranks, or both.

Gradients are cached at the embeddings (Gao et al. 2021, "Scaling deep contrastive learning batch
size under memory limited setup"): the loss of the whole batch is differentiated once with respect
to all embeddings, then each part is embedded again and takes its own rows' gradients back through
the towers. Nothing is approximated: towers, temperature, bias and exponents get the gradients of
the whole batch, provided that a tower treats each row alone.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from offsphere.objective import Objective
from offsphere.training.experiment import Method, Step
from offsphere.training.ranks import Ranks, Rows, Tensors, take
from offsphere.training.settings import TrainSettings
from offsphere.training.streams import stream_seed

WITHOUT_IT = "towers without it (--norm=group, or a transformer such as --model=tiny_vit)"


def is_split(settings: TrainSettings, ranks: Ranks) -> bool:
    """Whether no tower sees the whole batch at once."""
    return ranks.count > 1 or (settings.microbatch or settings.batch_size) < settings.batch_size


def split_step(
    method: Method, batch: Any, step: int, settings: TrainSettings, ranks: Ranks
) -> Step:
    """The step of the whole batch, of which `batch` holds this rank's rows; gradients are added."""
    own = ranks.own(settings.batch_size)
    parts = own.parts(settings.microbatch)
    again = len(parts) > 1  # with one part its graph is kept instead

    def inputs_of(part: Rows) -> Tensors:
        """The same draws each time, whatever the other parts are."""
        name = "model" if part.all else f"model {part.start}"
        torch.manual_seed(stream_seed(settings.seed, name, step))
        return method.inputs(take(batch, part, own), step, part)

    embedded, constants = [], []
    for part in parts:
        with torch.set_grad_enabled(not again), autocast(settings, ranks.device):
            inputs = inputs_of(part)
            embedded.append(method.embed(inputs))
        with torch.no_grad(), autocast(settings, ranks.device):
            constants.append(method.constants(inputs, step))
        del inputs
    ours = _joined(embedded)
    all_rows, sizes = ranks.gather(ours, own.total, method.ragged)
    fixed, _ = ranks.gather(_joined(constants), own.total, method.ragged)
    for x in all_rows.values():
        x.requires_grad_()
    for module in method.modules():
        if isinstance(module, Objective):
            module.split = ranks
    with autocast(settings, ranks.device):
        losses = method.losses(all_rows | fixed)
    losses["loss"].backward()
    # The mean over the ranks is the whole gradient: of the objective's parameters, which are summed
    # with the towers' below, and of each row, which goes back to where it was embedded.
    for parameter in method.parameters():
        if parameter.grad is not None:
            parameter.grad /= ranks.count
    gradients = {
        name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in all_rows.items()
    }
    gradients = {name: ranks.mean_of_own(x, sizes[name]) for name, x in gradients.items()}
    for part in parts:
        if again:
            with torch.enable_grad(), autocast(settings, ranks.device):
                ours = method.embed(inputs_of(part))
        _push(ours, take(gradients, part, own))
    ranks.sum_gradients(method.parameters())
    return Step(losses, all_rows["left"], (all_rows | fixed)["right"])


def autocast(settings: TrainSettings, device: torch.device) -> AbstractContextManager:
    """The arithmetic of the settings' precision."""
    if settings.precision == "32-true":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


def prepare_batch_norm(method: nn.Module, settings: TrainSettings, ranks: Ranks) -> None:
    """Make batch-norm see the batch of all ranks where that can be done; refuse it elsewhere."""
    kind = nn.modules.batchnorm._BatchNorm
    present = any(isinstance(m, kind) and m.training for m in method.modules())
    if not (present and is_split(settings, ranks)):
        return
    if settings.microbatch and settings.microbatch < settings.batch_size:
        raise ValueError(
            f"--microbatch={settings.microbatch}: batch-norm's statistics would be those of a "
            f"micro-batch, so gradients would not be those of the whole batch. Use {WITHOUT_IT}."
        )
    if settings.sync_batch_norm and ranks.device.type == "cuda":
        nn.SyncBatchNorm.convert_sync_batchnorm(method)
        return
    sync = ", or --sync-batch-norm" if ranks.device.type == "cuda" else ""
    gpu = " (--sync-batch-norm exists for GPUs only)" if settings.sync_batch_norm else ""
    raise ValueError(
        f"On {ranks.count} ranks batch-norm's statistics would be those of one rank's rows, so the "
        f"run would depend on the number of ranks{gpu}. Use {WITHOUT_IT}{sync}."
    )


def _joined(parts: list[Tensors]) -> Tensors:
    if len(parts) == 1:
        return parts[0]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _push(embedded: Tensors, gradients: Tensors) -> None:
    """Take the gradients of embeddings back through the towers that made them.

    The sum of x * gradient has these very gradients. To hand them to torch as they are would make
    it import its symbolic shapes, whose 40 MB are most of what a small micro-batch takes.
    """
    ways = [(x * gradients[name]).sum() for name, x in embedded.items() if x.requires_grad]
    torch.autograd.backward(ways)
