"""SimCLR and MoCo v2: what a batch of images becomes in one training step."""

from __future__ import annotations

import torch
from torch import Tensor

from offsphere.interventions import grad_scale, penalised
from offsphere.momentum import MomentumTwin, Queue, encode_without_leak
from offsphere.training.experiment import objective_of
from offsphere.training.images import ImageMethod
from offsphere.training.ranks import Tensors
from offsphere.training.streams import stream
from vision.settings import MocoSettings, SimclrSettings


class SimCLR(ImageMethod):
    """Two views of each image through one encoder, whose embeddings go to the objective."""

    settings: SimclrSettings

    def __init__(self, settings: SimclrSettings, population: int) -> None:
        """`population` is the number of training images."""
        super().__init__(settings)
        self.objective = objective_of(settings, settings.loss, population)

    def embed(self, inputs: Tensors) -> Tensors:
        views = inputs["views"]
        if self.settings.view_norm == "separate":
            view_a, view_b = (self.encoder(view)[1] for view in views.chunk(2))
        else:
            view_a, view_b = self.encoder(views)[1].chunk(2)
        return {"left": view_a, "right": view_b}

    def losses(self, embedded: Tensors) -> Tensors:
        embeddings = torch.cat([embedded["left"], embedded["right"]])
        view_a, view_b = grad_scale(embeddings, self.settings.grad_scale).chunk(2)
        losses = self.objective(view_a, view_b)
        return penalised(losses, self.settings.norm_penalty, embeddings)


class MoCo(ImageMethod):
    """Queries from the encoder, keys from its momentum twin, negatives from a queue of raw keys."""

    def __init__(self, settings: MocoSettings, population: int) -> None:
        """`population` is the number of training images."""
        room = population - settings.batch_size
        if settings.queue_size > room:
            raise ValueError(
                f"--queue-size={settings.queue_size} is too long for {population} training images "
                f"in batches of {settings.batch_size}: keys would meet their own image. At most "
                f"{room}."
            )
        super().__init__(settings)
        self.objective = objective_of(settings, "moco_nce", population)
        self.key_groups = 1 if settings.norm == "group" else settings.key_groups
        self.twin = MomentumTwin(self.encoder, settings.momentum)
        self.queue = Queue(settings.queue_size, self.encoder.embedding_dim)
        self._keys: Tensor | None = None
        self._queue_is_full = False

    def embed(self, inputs: Tensors) -> Tensors:
        query, _ = inputs["views"].chunk(2)
        return {"left": self.encoder(query)[1]}

    def constants(self, inputs: Tensors, step: int) -> Tensors:
        _, key = inputs["views"].chunk(2)
        shuffle = stream(self.settings.seed, "shuffle", step)
        _, keys = encode_without_leak(self.twin, key, self.key_groups, shuffle)
        return {"right": keys}

    def losses(self, embedded: Tensors) -> Tensors:
        query, keys = grad_scale(embedded["left"], self.settings.grad_scale), embedded["right"]
        if not self._queue_is_full:  # looked at once: on a GPU the host waits for the answer
            if not self.queue.filled:
                self.queue.initialise(keys, stream(self.settings.seed, "queue"))
            self._queue_is_full = True
        self._keys = keys
        losses = self.objective(query, keys, queue=self.queue.rows)
        return penalised(losses, self.settings.norm_penalty, query)

    def after_step(self, progress: float) -> None:
        """The keys join the queue and the twin follows the encoder."""
        if self._keys is not None:
            self.queue.enqueue(self._keys)
        self.twin.update(progress)
