"""Gradients on 2 and 3 gloo ranks against those of one process, ours beside open_clip's loss.

    python benchmarks/gradients.py

Every row is the worst relative error of any parameter's gradient, over all cells and variance
weights where it says so. The table of docs/scaling.md comes from here. Float64, but pictures are
augmented in float32.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from ranks import LANES, build
from torch import Tensor, nn

from offsphere.dropin import ClipLoss
from offsphere.names import CELLS, LOSSES
from offsphere.objective import Objective
from offsphere.training.doctor import LIMIT, gradients, on_ranks, worst_error
from offsphere.training.experiment import Method
from offsphere.training.ranks import Ranks, Rows, Tensors, share, take
from offsphere.training.settings import TrainSettings

ROWS, WEIGHTS = 24, (0.0, 30.0)
FLAGS = ("local_loss", "gather_with_grad")


class LinearTowers(Method):
    """A linear tower per side, and random keys for MoCo's loss."""

    def __init__(self, objective: Objective) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right, self.objective = nn.Linear(16, 8), nn.Linear(16, 8), objective
        self.register_buffer("queue", torch.randn(40, 8))

    def inputs(self, batch: Tensors, step: int, rows: Rows | None = None) -> Tensors:
        return batch

    def embed(self, inputs: Tensors) -> Tensors:
        return {"left": self.left(inputs["a"]), "right": self.right(inputs["b"])}

    def losses(self, embedded: Tensors) -> Tensors:
        queue = self.queue if self.objective.loss == "moco_nce" else None
        return self.objective(embedded["left"], embedded["right"], queue=queue)


def pairs() -> Tensors:
    draw = torch.Generator().manual_seed(1)
    return {name: torch.randn(ROWS, 16, generator=draw).double() for name in ("a", "b")}


def of_losses(loss: str, ranks: Ranks | None) -> Tensors:
    """The gradients of one loss with every cell and variance weight."""
    found = {}
    for cell, weight in itertools.product(CELLS, WEIGHTS):
        learnable = loss != "spectral"
        objective = Objective(
            cell, loss, population=90, learnable_temperature=learnable, variance_weight=weight
        )
        settings = TrainSettings(batch_size=ROWS, device="cpu")
        grads = gradients(LinearTowers(objective), pairs(), settings, ranks)
        found |= {f"{cell}, {weight:g}: {name}": x for name, x in grads.items()}
    return found


def of_lane(lane: str, ranks: Ranks | None) -> Tensors:
    """The gradients of a lane's small towers."""
    method, batch, settings = build(lane, None, ROWS)
    return gradients(method, batch, settings, ranks)


def of_clip_loss(loss_of: Callable[..., nn.Module], flags: dict[str, bool], ranks: Ranks | None):
    """The towers' gradients of a CLIP loss on normalised features, averaged as DDP does."""
    towers = LinearTowers(Objective(population=90)).double()
    alone = ranks is None
    own = share(ROWS, 0, 1) if alone else ranks.own(ROWS)
    world = {} if alone else {"rank": ranks.rank, "world_size": ranks.count}
    embedded = towers.embed(take(pairs(), own, share(ROWS, 0, 1)))
    sides = [nn.functional.normalize(x, dim=1) for x in embedded.values()]
    loss_of(**flags, **world)(*sides, torch.tensor(9.0, dtype=torch.float64)).backward()
    if ranks is not None:
        ranks.sum_gradients(towers.parameters())
    scale = 1 if ranks is None else ranks.count
    weights = {"left": towers.left.weight.grad, "right": towers.right.weight.grad}
    return {name: x / scale for name, x in weights.items() if x is not None}


def rows() -> Iterator[tuple[str, Callable[[Ranks | None], dict[str, Tensor]]]]:
    """What is compared, and the gradients of it on ranks or, for None, on one process."""
    from open_clip.loss import ClipLoss as Peer

    for lane in LANES:
        yield f"{lane}.py", lambda ranks, lane=lane: of_lane(lane, ranks)
    for loss in LOSSES:
        title = f"{loss}, {len(CELLS)} cells x {len(WEIGHTS)} variance weights"
        yield title, lambda ranks, loss=loss: of_losses(loss, ranks)
    yield "offsphere.dropin.ClipLoss", lambda ranks: of_clip_loss(ClipLoss, {}, ranks)
    for on in ((), FLAGS[:1], FLAGS[1:], FLAGS):
        flags: dict[str, Any] = dict.fromkeys(on, True)
        title = f"open_clip ClipLoss, {' and '.join(on) or 'as it is by default'}"
        yield title, lambda ranks, flags=flags: of_clip_loss(Peer, flags, ranks)


def compare() -> None:
    torch.set_num_threads(1)
    print(f"| gradients of a batch of {ROWS} | 2 ranks | 3 ranks | verdict |\n|---|---|---|---|")
    for title, work in rows():
        found = [on_ranks(count, work) for count in (2, 3)]
        expected = work(None)
        errors = [worst_error(x, expected)[1] for x in found]
        verdict = "ok" if max(errors) <= LIMIT else "FAULT"
        print(f"| {title} | {errors[0]:.1e} | {errors[1]:.1e} | {verdict} |", flush=True)


if __name__ == "__main__":
    compare()
