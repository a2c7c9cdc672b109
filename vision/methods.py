"""SimCLR and MoCo v2: what a batch of images becomes in one training step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from offsphere.encoders.images import ImageEncoder
from offsphere.encoders.norm_interventions import grad_scale, norm_penalty
from offsphere.momentum import MomentumTwin, Queue, encode_without_leak
from offsphere.objective import Objective
from offsphere.training.loop import Method, Step
from offsphere.training.streams import stream

if TYPE_CHECKING:
    from vision.settings import VisionSettings

TwoViews = Callable[[Tensor, int], Tensor]
"""A batch and its step to both views, stacked (2n, 3, h, w)."""


class SimCLR(Method):
    """Two views of each image through one encoder, whose embeddings go to the objective."""

    def __init__(
        self,
        encoder: ImageEncoder,
        objective: Objective,
        two_views: TwoViews,
        settings: VisionSettings,
    ) -> None:
        super().__init__()
        self.encoder, self.objective = encoder, objective
        self.two_views, self.settings = two_views, settings

    def forward(self, batch: Tensor, step: int) -> Step:
        _, embeddings = self.encoder(self.two_views(batch, step))
        view_a, view_b = grad_scale(embeddings, self.settings.grad_scale).chunk(2)
        losses = self.objective(view_a, view_b)
        return Step(_penalised(losses, embeddings, self.settings.norm_penalty), view_a, view_b)


class MoCo(Method):
    """Queries from the encoder, keys from its momentum twin, negatives from a queue of raw keys."""

    def __init__(
        self,
        encoder: ImageEncoder,
        objective: Objective,
        two_views: TwoViews,
        settings: VisionSettings,
        *,
        queue_size: int,
        momentum: float,
        key_groups: int,
    ) -> None:
        super().__init__()
        self.encoder, self.objective = encoder, objective
        self.two_views, self.settings, self.key_groups = two_views, settings, key_groups
        self.twin = MomentumTwin(encoder, momentum)
        self.queue = Queue(queue_size, encoder.embedding_dim)
        self._keys: Tensor | None = None

    def forward(self, batch: Tensor, step: int) -> Step:
        view_a, view_b = self.two_views(batch, step).chunk(2)
        _, query = self.encoder(view_a)
        query = grad_scale(query, self.settings.grad_scale)
        with torch.no_grad():
            shuffle = stream(self.settings.seed, "shuffle", step)
            _, keys = encode_without_leak(self.twin, view_b, self.key_groups, shuffle)
            if not self.queue.filled:
                self.queue.initialise(keys, stream(self.settings.seed, "queue"))
        losses = self.objective(query, keys, queue=self.queue.keys)
        self._keys = keys
        return Step(_penalised(losses, query, self.settings.norm_penalty), query, keys)

    def after_step(self, progress: float) -> None:
        """The keys join the queue and the twin follows the encoder."""
        if self._keys is not None:
            self.queue.enqueue(self._keys)
        self.twin.update(progress)


def _penalised(losses: dict[str, Tensor], embeddings: Tensor, weight: float) -> dict[str, Tensor]:
    if not weight:
        return losses
    penalty = norm_penalty(embeddings)
    return {**losses, "loss": losses["loss"] + weight * penalty, "norm_penalty": penalty}
