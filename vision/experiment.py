"""One run of the vision lane: data, method, training, evaluation, record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from safetensors.torch import save as to_bytes
from torch import Tensor
from torch.utils.data import Dataset

from offsphere.cells import Cell
from offsphere.encoders.images import ImageEncoder, image_encoder
from offsphere.encoders.norm_interventions import cut_initialisation
from offsphere.objective import Objective
from offsphere.record import atomic_write, open_run
from offsphere.training.loop import Diverged, fit
from offsphere.training.plots import plot_run
from offsphere.training.settings import steps_of
from offsphere.training.streams import batch_indices, stream, stream_seed
from vision.evaluate import Evaluator
from vision.images import Images, LazyImages, load_images
from vision.methods import MoCo, SimCLR
from vision.settings import VisionSettings
from vision.views import LightlyViews, Views, gallery, lightly_views


@dataclass(frozen=True)
class Splits:
    """The images of a run: training, what is measured, and what calibrates a confidence."""

    train: Images | LazyImages
    test: Images | LazyImages
    validation: Images | LazyImages | None = None
    ood: Images | LazyImages | None = None

    def describe(self) -> dict[str, object]:
        """Name, size and content hash of each, and how many samples were left out as damaged."""
        named = {f.name: getattr(self, f.name) for f in fields(self)}
        return {
            name: {"data": x.name, "size": len(x), "hash": x.fingerprint, "skipped": len(x.skipped)}
            for name, x in named.items()
            if x is not None
        }


def load_splits(settings: VisionSettings) -> Splits:
    """Everything a run reads; the test split is left alone when validation is measured."""

    def load(data: str, split: str, limit: int | None = None) -> Images | LazyImages:
        return load_images(
            data,
            split=split,
            image_size=settings.image_size,
            download=settings.download,
            root=None if settings.root is None else Path(settings.root),
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
    if len(test.classes) != len(train.classes):
        raise ValueError(
            f"{train.name} has {len(train.classes)} classes and {test.name} {len(test.classes)}: "
            "training and test data must share their classes."
        )
    ood = None if settings.data_ood is None else load(settings.data_ood, "all")
    return Splits(train, test, validation, ood)


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

    def __init__(self, images: Images | LazyImages, settings: VisionSettings) -> None:
        self.images, self.settings = images, settings
        views = make_views(settings)
        self.views = views if isinstance(views, LightlyViews) else None

    def __getitem__(self, step: int) -> Tensor:
        s = self.settings
        batch = self.images.batch(batch_indices(s.seed, step, s.batch_size, len(self.images)))
        if self.views is None:
            return batch
        return self.views(torch.cat([batch, batch]), stream(s.seed, "augment", step))


def two_views(settings: VisionSettings) -> Callable[[Tensor, int], Tensor]:
    """Both views of a batch, stacked, drawn on the training device."""
    views = make_views(settings)
    if isinstance(views, LightlyViews):
        return lambda batch, _step: batch
    return lambda batch, step: views(
        torch.cat([batch, batch]), stream(settings.seed, "augment", step)
    )


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


def build_objective(settings: VisionSettings, loss: str, population: int) -> Objective:
    return Objective(
        settings.cell,
        loss,
        population=population,
        temperature=settings.temperature,
        learnable_temperature=settings.learnable_temperature,
        scale=settings.scale,
        variance_weight=settings.variance_weight,
        variance_on=settings.variance_on,
    )


def fixed_exponents(cell: Cell) -> tuple[float, float]:
    """The cell's exponents as they stand."""
    with torch.no_grad():
        left, right = (float(g) for g in cell.exponents)
    return left, right


def train(
    settings: VisionSettings, script: str, build: Callable[[int], SimCLR | MoCo]
) -> dict[str, object]:
    """The metrics of the method that `build(population)` makes, trained or already finished."""
    torch.set_num_threads(settings.threads)
    with open_run(settings, script=script, out=settings.out, study=settings.study) as folder:
        if folder.state == "finished":
            print(f"{folder.path} is finished; --no-resume starts it anew.")
            return folder.metrics()
        splits = load_splits(settings)
        steps_of(settings, len(splits.train))
        folder.describe_data(splits.describe())
        if settings.save_views:
            some = splits.train.batch(torch.arange(min(8, len(splits.train))))
            gallery(some, make_views(settings), folder.path / "views.png", stream(0, "gallery"))
        method = build(len(splits.train))
        evaluator = Evaluator(splits, settings)

        def evaluate() -> dict[str, float]:
            cell = method.objective.cell if settings.eval_cell is None else Cell(settings.eval_cell)
            return evaluator(method.encoder, fixed_exponents(cell))

        try:
            metrics: dict[str, object] = dict(
                fit(
                    method,
                    TrainingBatches(splits.train, settings),
                    settings,
                    folder,
                    population=len(splits.train),
                    evaluate=evaluate,
                )
            )
        except Diverged as error:
            folder.fail(str(error))
            raise
        save_tensors(folder.path / "examples.safetensors", evaluator.outcomes)
        if settings.save_embeddings and evaluator.features is not None:
            save_tensors(folder.path / "embeddings.safetensors", evaluator.features._asdict())
        save_tensors(folder.path / "encoder.safetensors", method.encoder.state_dict())
        plot_run(folder)
        folder.finish(metrics)
        return folder.metrics()


def save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write named tensors as one safetensors file, whole or not at all."""
    content = to_bytes({name: tensor.contiguous() for name, tensor in tensors.items()})
    atomic_write(path, lambda file: file.write(content))
