"""One run of the vision lane: what is trained on a script's images, and how it is measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from offsphere.data.handed import Handed
from offsphere.data.views import Views, sample_parameters
from offsphere.encoders.images import ImageEncoder, image_encoder
from offsphere.interventions import cut_initialisation
from offsphere.run.progress import say
from offsphere.run.record import RunFolder
from offsphere.training.experiment import Experiment
from offsphere.training.ranks import Rows, Tensors, share
from offsphere.training.run import eval_exponents
from offsphere.training.settings import steps_of
from offsphere.training.streams import batch_indices, stream, stream_seed
from vision.evaluate import Evaluator, validation_knn
from vision.images import Images
from vision.methods import MoCo, SimCLR, TwoViews
from vision.settings import VisionSettings
from vision.splits import is_labelled, load_splits
from vision.views import LightlyViews, gallery, lightly_views

LARGE = 48
"""Pictures up to so many pixels may be shrunk without a word."""


def make_views(settings: VisionSettings) -> Views | LightlyViews:
    s = settings.jitter
    views = Views(
        settings.image_size,
        min_scale=settings.min_scale,
        jitter=(0.8 * s, 0.8 * s, 0.8 * s, 0.2 * s),
        grey=settings.grey,
        blur=settings.blur,
        memory_format=torch.channels_last,
    )
    return views if settings.augment == "batched" else lightly_views(views)


class TrainingBatches(Dataset):
    """batches[step]: the images of a step, already augmented if that is done image by image."""

    def __init__(self, images: Images, settings: VisionSettings) -> None:
        self.images, self.settings = images, settings
        views = make_views(settings)
        self.views = views if isinstance(views, LightlyViews) else None

    def __getitem__(self, step: int) -> Tensor:
        return self.part(step, share(self.settings.batch_size, 0, 1))

    def part(self, step: int, rows: Rows) -> Tensor:
        """These rows of a step's batch; (n, 2, 3, s, s) if both views are made here."""
        s = self.settings
        chosen = batch_indices(s.seed, step, s.batch_size, len(self.images))
        if self.views is None:
            return self.images.batch(chosen[rows.start : rows.stop])
        # lightly draws image after image: those before a row decide what it gets.
        batch = self.images.batch(chosen)
        views = self.views(torch.cat([batch, batch]), stream(s.seed, "augment", step))
        return torch.stack(views.chunk(2), 1)[rows.start : rows.stop]


def two_views(settings: VisionSettings) -> TwoViews:
    """Both views of a batch, stacked, drawn on the training device."""
    views = make_views(settings)

    def ready_made(batch: Tensor, step: int, rows: Rows | None = None) -> Tensor:
        return batch.transpose(0, 1).flatten(0, 1)

    def drawn(batch: Tensor, step: int, rows: Rows | None = None) -> Tensor:
        assert isinstance(views, Views)
        rows = share(len(batch), 0, 1) if rows is None else rows
        size = (batch.shape[2], batch.shape[3])
        draw = stream(settings.seed, "augment", step)
        parameters = sample_parameters(views, 2 * rows.total, size, draw)
        both = torch.arange(2 * rows.total).view(2, -1)[:, rows.start : rows.stop].flatten()
        return views.render(torch.cat([batch, batch]), parameters.take(both))

    return ready_made if isinstance(views, LightlyViews) else drawn


def build_encoder(settings: VisionSettings, *, load_pretrained: bool = True) -> ImageEncoder:
    """The encoder with the weights that the stream `init` draws: one seed, one encoder."""
    torch.manual_seed(stream_seed(settings.seed, "init"))
    encoder = image_encoder(
        settings.backbone,
        image_size=settings.image_size,
        stem=settings.stem,
        pretrained=settings.pretrained,
        projector_dim=settings.projector_dim,
        projector_hidden=settings.projector_hidden,
        projector_layers=settings.projector_layers,
        head_norm=settings.head_norm,
        norm=settings.norm,
        load_pretrained=load_pretrained,
    )
    if settings.cut_init != 1.0:
        cut_initialisation(encoder, settings.cut_init)
    return encoder


class VisionExperiment(Experiment):
    """An encoder of images: the script's method, its augmented batches, kNN and probes."""

    method: SimCLR | MoCo
    held_out: Images | None

    def __init__(
        self,
        settings: VisionSettings,
        folder: RunFolder,
        handed: Handed | None,
        make_method: Callable[[Any, int], SimCLR | MoCo],
    ) -> None:
        """`make_method` makes the script's method from its settings and the number of images."""
        self.settings, self.folder, self.make_method = settings, folder, make_method
        self.splits = load_splits(settings, handed)
        self.population = len(self.splits.train)
        self.held_out = self.splits.held_out(settings.eval_split)

    def describe(self) -> dict[str, object]:
        return self.splits.describe()

    def build(self) -> None:
        settings, images = self.settings, self.splits.train
        say(self.splits.told(settings.eval_split))
        if not is_labelled(images):
            say("Norms, rank and variance are measured; kNN, probes and NMI need two classes.")
        if images.native is not None and images.native > max(LARGE, settings.image_size):
            say(
                f"The pictures (the first is {images.native} pixels wide or high) are shrunk to "
                f"{settings.image_size}: --image-size={min(images.native, 64)} keeps more, at a "
                "cost."
            )
        if settings.save_views:
            some = images.batch(torch.arange(min(8, len(images))))
            path = self.folder.path / "views.png"
            gallery(some, make_views(settings), path, stream(0, "gallery"))
        steps_of(settings, self.population)
        self.method = self.make_method(settings, self.population)
        self.batches = TrainingBatches(images, settings)
        self.evaluator = Evaluator(self.splits, settings)

    def evaluate(self) -> dict[str, float]:
        exponents = eval_exponents(self.settings, self.method.objective)
        return self.evaluator(self.method.encoder, exponents)

    def validate(self) -> float:
        assert self.held_out is not None
        return validation_knn(self.method.encoder, self.splits.train, self.held_out, self.settings)

    def files(self) -> dict[str, Tensors]:
        kept = {
            "examples.safetensors": self.evaluator.outcomes,
            "encoder.safetensors": self.method.encoder.state_dict(),
        }
        if self.settings.save_embeddings and self.evaluator.features is not None:
            kept["embeddings.safetensors"] = self.evaluator.features._asdict()
        return kept
