"""What a batch of text pairs becomes in one training step: contrast, or regression."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from offsphere.encoders.layers import TopLayers
from offsphere.encoders.text import TextEncoder
from offsphere.interventions import penalised
from offsphere.objective import Objective
from offsphere.training.experiment import Method, Step
from offsphere.training.ranks import Rows, Tensors

if TYPE_CHECKING:
    from jaxtyping import Float

    from text.settings import TextSettings


class Residual(nn.Module):
    """x + an MLP of x whose last layer starts at zero: the identity at first."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
        for parameter in self.layers[2].parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        return x + self.layers(x)


def make_head(kind: str, width: int, hidden: int) -> nn.Module:
    """A head that starts as the identity."""
    if kind == "none":
        return nn.Identity()
    if kind == "mlp":
        return Residual(width, hidden)
    head = nn.Linear(width, width, bias=False)
    nn.init.eye_(head.weight)
    return head


def make_towers(encoder: TextEncoder | TopLayers, settings: TextSettings) -> nn.ModuleList:
    """One tower, or two that start alike; of a frozen encoder only the heads."""
    head = make_head(settings.head, encoder.features_dim, settings.head_hidden)
    tower = head if settings.tune == "head" else nn.Sequential(encoder, head).train()
    return nn.ModuleList([tower] if settings.towers == "shared" else [tower, copy.deepcopy(tower)])


class DualEncoder(Method):
    """Queries are left and documents right; hard negatives are documents too."""

    ragged = ("hard",)

    def __init__(self, towers: nn.ModuleList, objective: Objective, settings: TextSettings) -> None:
        super().__init__()
        self.towers, self.objective, self.settings = towers, objective, settings

    def inputs(self, batch: Tensors, step: int, rows: Rows | None = None) -> Tensors:
        return batch

    def embed(self, inputs: Tensors) -> Tensors:
        query, document = self.towers[0](inputs["query"]), self.towers[-1](inputs["document"])
        embedded = {"left": query, "right": document}
        if "hard" in inputs:  # of which a part of the batch may have none
            hard = inputs["hard"]
            embedded["hard"] = self.towers[-1](hard) if len(hard) else document[:0]
        return embedded

    def losses(self, embedded: Tensors) -> Tensors:
        query, document = embedded["left"], embedded["right"]
        losses = self.objective(query, document, hard_negatives=embedded.get("hard"))
        return penalised(losses, self.settings.norm_penalty, query, document)


class PairRegression(Method):
    """The cell's score of two sentences, over the temperature, is fitted to their given score.

    The loss is the mean squared error. Of the objective only the cell and the temperature, one
    over the score scale, are used.
    """

    def __init__(self, towers: nn.ModuleList, objective: Objective, settings: TextSettings) -> None:
        super().__init__()
        self.towers, self.objective, self.settings = towers, objective, settings

    def inputs(self, batch: Tensors, step: int, rows: Rows | None = None) -> Tensors:
        return batch

    def embed(self, inputs: Tensors) -> Tensors:
        return {"left": self.towers[0](inputs["left"]), "right": self.towers[-1](inputs["right"])}

    def constants(self, inputs: Tensors, step: int) -> Tensors:
        return {"score": inputs["score"]}

    def losses(self, embedded: Tensors) -> Tensors:
        left, right = embedded["left"], embedded["right"]
        predicted = pair_scores(self.objective, left, right) / self.objective.temperature
        error = (predicted - embedded["score"]).square().mean()
        return penalised({"loss": error, "error": error}, self.settings.norm_penalty, left, right)

    def telemetry(self, step: Step) -> dict[str, float]:
        """The score scale as it stands."""
        return {"train/score_scale": 1 / self.objective.temperature.item()}


def pair_scores(
    objective: Objective, left: Float[Tensor, "n d"], right: Float[Tensor, "n d"]
) -> Float[Tensor, " n"]:
    """The cell's score of each pair, row by row."""
    left, right = objective.cell(left, right)
    return torch.linalg.vecdot(left, right)
