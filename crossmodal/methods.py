"""CLIP: what a batch of pictures and captions becomes in one training step."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from crossmodal.settings import ClipSettings
from offsphere.encoders.clip import ClipTowers
from offsphere.evaluation.geometry import log_norm_cosine_correlation, modality_gap
from offsphere.ids import row_ids
from offsphere.interventions import penalised
from offsphere.objective import Objective
from offsphere.training.experiment import Method, Step
from offsphere.training.ranks import Rows, Tensors


class Look(Protocol):
    """Turns the pictures of a step into the random, normalised crops that the image tower sees.

    With `rows` the pictures are only these rows of the step's batch.
    """

    def __call__(self, pixels: Tensor, step: int, rows: Rows | None = None) -> Tensor: ...


class PairBatch(NamedTuple):
    """A batch: pictures (or a frozen tower's features) and the tokens of their captions."""

    images: Tensor
    tokens: Tensor


class Clip(Method):
    """Images and texts through their towers, whose raw embeddings go to the objective."""

    def __init__(
        self, towers: ClipTowers, objective: Objective, look: Look, settings: ClipSettings
    ) -> None:
        super().__init__()
        self.towers, self.objective = towers, objective
        self.look, self.settings = look, settings

    def inputs(self, batch: PairBatch, step: int, rows: Rows | None = None) -> Tensors:
        images = batch.images
        if self.towers.frozen is None:
            images = self.look(images, step, rows)
        return {"images": images, "tokens": batch.tokens}

    def embed(self, inputs: Tensors) -> Tensors:
        towers = self.towers
        encode_image = towers.encode_image if towers.frozen is None else towers.encode_features
        image = encode_image(inputs["images"])
        return {"left": image, "right": towers.encode_text(inputs["tokens"])}

    def constants(self, inputs: Tensors, step: int) -> Tensors:
        """Which captions are equal, if that is asked for."""
        asked = self.settings.false_negatives != "keep"
        return {"ids": row_ids(inputs["tokens"])} if asked else {}

    def losses(self, embedded: Tensors) -> Tensors:
        image, text = embedded["left"], embedded["right"]
        losses = self.objective(image, text, ids=embedded.get("ids"))
        return penalised(losses, self.settings.norm_penalty, image, text)

    @torch.no_grad()
    def telemetry(self, step: Step) -> dict[str, float]:
        """The gap between the modalities, and whether long pairs are close pairs."""
        image, text = step.left.detach().float(), step.right.detach().float()
        gap = {f"train/{name}": float(x) for name, x in modality_gap(image, text).items()}
        correlation = log_norm_cosine_correlation(image, text)
        return gap | {"train/log_norm_cosine_correlation": float(correlation)}
