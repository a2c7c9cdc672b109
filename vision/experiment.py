"""One run of the vision lane: data, method, training, evaluation, record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from offsphere.data.views import Views, sample_parameters
from offsphere.encoders.images import ImageEncoder, image_encoder
from offsphere.interventions import cut_initialisation
from offsphere.run.progress import say
from offsphere.run.record import RunFolder
from offsphere.training.ranks import Rows, share
from offsphere.training.run import Experiment, eval_exponents, train_run
from offsphere.training.settings import steps_of
from offsphere.training.streams import batch_indices, stream, stream_seed
from vision.evaluate import Evaluator, is_labelled, validation_knn
from vision.images import Images, load_images
from vision.methods import MoCo, SimCLR, TwoViews
from vision.settings import VisionSettings
from vision.views import LightlyViews, gallery, lightly_views


@dataclass(frozen=True)
class Splits:
    """The images of a run: training, what is measured, and what calibrates a confidence."""

    train: Images
    test: Images
    validation: Images | None = None
    ood: Images | None = None

    def describe(self) -> dict[str, object]:
        """Name, size and content hash of each, and how many samples were left out as damaged."""
        named = {f.name: getattr(self, f.name) for f in fields(self)}
        return {
            name: {"data": x.name, "size": len(x), "hash": x.fingerprint, "skipped": len(x.skipped)}
            for name, x in named.items()
            if x is not None
        }

    def told(self, measured: str) -> str:
        """The data in one line; `measured` is the name of the split that is measured."""
        train, test = self.train, self.test
        classes = f"{len(train.classes):,} classes" if is_labelled(train) else "without classes"
        skipped = sum(len(x.skipped) for x in (train, test))
        left_out = f", {skipped:,} damaged ones left out" if skipped else ""
        return (
            f"Data: {train.name}: {len(train):,} images to train on, {len(test):,} to measure on "
            f"({measured}), {classes}, {train.image_size} x {train.image_size} pixels{left_out}."
        )


LARGE = 48
"""Pictures up to so many pixels may be shrunk without a word."""
kept_images = lru_cache(maxsize=4)(load_images)
"""`load_images`, once per process: the workers of a study share what they have decoded."""


def load_splits(settings: VisionSettings) -> Splits:
    """Everything a run reads; the test split is left alone when validation is measured."""

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
    return Splits(train, test, validation, ood)


def check_same_classes(train: Images, test: Images) -> None:
    """Refuse test data whose labels stand for other classes than those of the training data."""
    if len(test.classes) != len(train.classes):
        raise ValueError(
            f"{train.name} has {len(train.classes)} classes and {test.name} {len(test.classes)}: "
            "training and test data must share their classes."
        )
    if not (has_names(train.classes) and has_names(test.classes)):
        return
    for label, (ours, theirs) in enumerate(zip(train.classes, test.classes, strict=True)):
        if plain_name(ours) != plain_name(theirs):
            raise ValueError(
                f"Class {label} is {ours!r} in {train.name} and {theirs!r} in {test.name}: "
                "training and test data must share their classes, in one order. Give --data-test "
                "with the classes of --data."
            )


def has_names(classes: Sequence[str]) -> bool:
    """Whether classes have names of their own, not just their numbers as in shards without any."""
    return any(name != str(label) for label, name in enumerate(classes))


def plain_name(name: str) -> str:
    """A class name without what data sets spell differently: Aquarium_Fish, aquarium fish."""
    return name.casefold().replace("_", " ")


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


def train(
    settings: VisionSettings, script: str, build: Callable[[int], SimCLR | MoCo]
) -> dict[str, object]:
    """The metrics of the method that `build(population)` makes, trained or already finished."""
    splits = cache(lambda: load_splits(settings))

    def describe() -> dict[str, object]:
        say(splits().told(settings.eval_split))
        if not is_labelled(splits().train):
            say("Norms, rank and variance are measured; kNN, probes and NMI need two classes.")
        native = splits().train.native
        if native is not None and native > max(LARGE, settings.image_size):
            say(
                f"The pictures (the first is {native} pixels wide or high) are shrunk to "
                f"{settings.image_size}: --image-size={min(native, 64)} keeps more, at a cost."
            )
        return splits().describe()

    def experiment(folder: RunFolder) -> Experiment:
        if settings.save_views:
            some = splits().train.batch(torch.arange(min(8, len(splits().train))))
            gallery(some, make_views(settings), folder.path / "views.png", stream(0, "gallery"))
        population = len(splits().train)
        steps_of(settings, population)
        method = build(population)
        evaluator = Evaluator(splits(), settings)

        def evaluate() -> dict[str, float]:
            return evaluator(method.encoder, eval_exponents(settings, method.objective))

        def validate() -> float:
            return validation_knn(method.encoder, splits(), settings)

        def files() -> dict[str, dict[str, Tensor]]:
            kept = {
                "examples.safetensors": evaluator.outcomes,
                "encoder.safetensors": method.encoder.state_dict(),
            }
            if settings.save_embeddings and evaluator.features is not None:
                kept["embeddings.safetensors"] = evaluator.features._asdict()
            return kept

        batches = TrainingBatches(splits().train, settings)
        return Experiment(method, batches, population, evaluate, files, validate)

    return train_run(settings, script, describe, experiment)
