"""One run on images: a script's method, its augmented batches, and what is measured of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset

from offsphere.data.images import (
    Images,
    ImageSplits,
    check_same_classes,
    handed_splits,
    is_labelled,
    load_images,
)
from offsphere.data.lightly_views import LightlyViews, gallery, lightly_views
from offsphere.data.splits import Handed
from offsphere.data.views import Views, sample_parameters
from offsphere.encoders.images import ImageEncoder, image_encoder
from offsphere.evaluation.images import Evaluator
from offsphere.interventions import cut_initialisation
from offsphere.run.progress import say
from offsphere.run.record import RunFolder
from offsphere.training.experiment import Experiment, Method
from offsphere.training.ranks import Rows, Tensors, share
from offsphere.training.settings import ImageSettings
from offsphere.training.streams import batch_indices, stream, stream_seed

LARGE = 48
"""Pictures of at most this side are shrunk without telling the user."""


kept_images = lru_cache(maxsize=4)(load_images)
"""`load_images`, once per process: the workers of a study share what they have decoded."""


def load_splits(settings: ImageSettings, handed: Handed | None = None) -> ImageSplits:
    """Everything a run reads; the test split is left alone when validation is measured."""
    if handed is not None:
        return handed_splits(handed, settings.eval_split, settings.image_size)

    def load(data: str, split: str, limit: int | None = None) -> Images:
        return kept_images(
            data,
            split=split,
            image_size=settings.image_size,
            download=settings.download,
            root=None if settings.root is None else Path(settings.root),
            data_root=settings.data_root,
            on_bad_sample=settings.on_bad_sample,
            limit=limit,
        )

    train = load(settings.data, "train", settings.limit)
    validation = load(settings.data, "validation")
    if settings.eval_split == "validation":
        test, validation = validation, None
    elif settings.data_test is not None:
        test = load(settings.data_test, "all")
    else:
        test = load(settings.data, "test")
    check_same_classes(train, test)
    ood = None if settings.data_ood is None else load(settings.data_ood, "all")
    return ImageSplits(train, test, validation, ood)


def make_views(settings: ImageSettings) -> Views | LightlyViews:
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

    def __init__(self, images: Images, settings: ImageSettings) -> None:
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


class TwoViews(Protocol):
    """Turns the batch of a step into both views of each image, stacked (2n, 3, h, w).

    With `rows` the batch holds only these rows of the step's batch.
    """

    def __call__(self, batch: Tensor, step: int, rows: Rows | None = None) -> Tensor: ...


def two_views(settings: ImageSettings) -> TwoViews:
    """Both views of a batch, stacked, drawn on the training device."""
    views = make_views(settings)

    def ready_made(batch: Tensor, step: int, rows: Rows | None = None) -> Tensor:
        return batch.transpose(0, 1).flatten(0, 1)

    def drawn(batch: Tensor, step: int, rows: Rows | None = None) -> Tensor:
        assert isinstance(views, Views)
        return random_views(views, batch, stream(settings.seed, "augment", step), rows, copies=2)

    return ready_made if isinstance(views, LightlyViews) else drawn


def random_views(
    views: Views,
    pixels: Tensor,
    draw: torch.Generator,
    rows: Rows | None = None,
    *,
    copies: int = 1,
) -> Tensor:
    """`copies` random views of each picture, stacked (copies * n, 3, h, w).

    With `rows` the pictures are only these of the step's. What is drawn for a picture depends on
    its row in the whole batch, so that no division of the batch changes a view.
    """
    rows = share(len(pixels), 0, 1) if rows is None else rows
    size = (pixels.shape[2], pixels.shape[3])
    parameters = sample_parameters(views, copies * rows.total, size, draw)
    own = torch.arange(copies * rows.total).view(copies, -1)[:, rows.start : rows.stop].flatten()
    return views.render(torch.cat([pixels] * copies), parameters.take(own))


def build_encoder(settings: ImageSettings, *, load_pretrained: bool = True) -> ImageEncoder:
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


def evaluator_of(splits: ImageSplits, settings: ImageSettings) -> Evaluator:
    """What measures an encoder as the settings say."""
    return Evaluator(
        splits,
        k=settings.knn_k,
        probe=settings.probe,
        layer=settings.layer,
        workers=settings.workers,
    )


class ImageMethod(Method):
    """A method that trains an encoder of images on two random views of each."""

    def __init__(self, settings: ImageSettings) -> None:
        super().__init__()
        self.settings = settings
        self.encoder = build_encoder(settings)
        self.two_views = two_views(settings)

    def inputs(self, batch: Tensor, step: int, rows: Rows | None = None) -> Tensors:
        return {"views": self.two_views(batch, step, rows)}


class ImageExperiment(Experiment):
    """An encoder of images: the script's method, its augmented batches, kNN and probes."""

    method: ImageMethod
    splits: ImageSplits
    held_out: Images | None

    def __init__(
        self,
        settings: ImageSettings,
        folder: RunFolder,
        handed: Handed | None,
        make_method: Callable[[Any, int], ImageMethod],
    ) -> None:
        """`make_method` is the script's method, made from settings and the number of images."""
        self.settings, self.folder, self.make_method = settings, folder, make_method
        self.splits = load_splits(settings, handed)
        self.population = len(self.splits.train)
        on_validation = settings.eval_split == "validation"
        self.held_out = self.splits.test if on_validation else self.splits.validation

    def build(self) -> None:
        settings, images = self.settings, self.splits.train
        say(self.splits.in_words(settings.eval_split))
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
        self.method = self.make_method(settings, self.population)
        self.batches = TrainingBatches(images, settings)
        self.evaluator = evaluator_of(self.splits, settings)

    def evaluate(self) -> dict[str, float]:
        return self.evaluator(self.method.encoder, self.exponents())

    def validate(self) -> float:
        assert self.held_out is not None
        return self.evaluator.validate(self.method.encoder, self.held_out)

    def files(self) -> dict[str, Tensors]:
        kept = {
            "examples.safetensors": self.evaluator.outcomes,
            "encoder.safetensors": self.method.encoder.state_dict(),
        }
        if self.settings.save_embeddings and self.evaluator.features is not None:
            kept["embeddings.safetensors"] = self.evaluator.features._asdict()
        return kept
