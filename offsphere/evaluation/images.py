"""What a trained image encoder is worth: neighbours, probes, norms as confidence, clusters."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from offsphere.data.images import Images, ImageSplits, is_labelled
from offsphere.data.pictures import normalised
from offsphere.data.views import IMAGENET_MEAN, IMAGENET_STD
from offsphere.encoders.images import ImageEncoder
from offsphere.evaluation.clustering import clustering
from offsphere.evaluation.confidence import (
    accuracy_per_norm_bucket,
    auroc,
    both_kinds,
    expected_calibration_error,
    logistic_confidence,
    norm_as_ood,
)
from offsphere.evaluation.geometry import norm_statistics, rankme, unit
from offsphere.evaluation.knn import KnnResult, knn
from offsphere.evaluation.linear_probe import ProbeResult, linear_probe, sgd_probe
from offsphere.run.progress import Work, track
from offsphere.variance import negative_statistics

if TYPE_CHECKING:
    from jaxtyping import Float

CHUNK = 512
MOMENTUM = {"sgd": 0.0, "sgd_momentum": 0.9}
PIECES = {"backbone": 6, "embedding": 7}
"""Of the work on each layer's vectors: neighbours, probes, confidence; clustering comes last."""


class Features(NamedTuple):
    backbone: Float[Tensor, "n f"]
    embedding: Float[Tensor, "n d"]


class Encoded(NamedTuple):
    """Every split's features; validation and out-of-distribution data if there are."""

    train: Features
    test: Features
    validation: Features | None
    ood: Features | None


class Layer(NamedTuple):
    """One layer's vectors of every split."""

    train: Float[Tensor, "m d"]
    test: Float[Tensor, "n d"]
    validation: Float[Tensor, "v d"] | None
    ood: Float[Tensor, "o d"] | None


class Evaluator:
    """Called with an encoder, gives named numbers; the last call's per-example `outcomes` stay."""

    def __init__(
        self,
        splits: ImageSplits,
        *,
        k: int = 20,
        probe: str = "lbfgs",
        layer: str = "all",
        workers: int = 0,
    ) -> None:
        self.splits, self.k, self.probe, self.layer = splits, k, probe, layer
        self.workers = workers
        self.outcomes: dict[str, Tensor] = {}
        self.features: Features | None = None

    def __call__(self, encoder: ImageEncoder, exponents: tuple[float, float]) -> dict[str, float]:
        """Metrics on the evaluation split; the eval cell's exponents score the embeddings."""
        splits = self.splits

        def encoded(images: Images) -> Features:
            return extract(encoder, images, self.workers)

        found = Encoded(
            encoded(splits.train),
            encoded(splits.test),
            None if splits.validation is None else encoded(splits.validation),
            None if splits.ood is None else encoded(splits.ood),
        )
        self.features = found.test
        if not is_labelled(splits.train):
            self.outcomes = {"norm": found.test.embedding.norm(dim=1)}
            return _without_classes(found.test, found.ood)
        pieces = sum(n for name, n in PIECES.items() if self.layer in ("all", name)) + 1
        with closing(Work("measuring", pieces, unit="pieces")) as work:
            return self._with_classes(found, exponents, work)

    def _with_classes(
        self, found: Encoded, exponents: tuple[float, float], work: Work
    ) -> dict[str, float]:
        """Everything, one piece of the work after the other."""
        train, test = found.train, found.test
        labels, truth = self.splits.train.labels, self.splits.test.labels
        majority = labels.bincount().argmax()
        metrics = {"test/majority": (truth == majority).double().mean().item()}
        self.outcomes = {}

        def neighbours(name: str, a: Tensor, b: Tensor, exponents: tuple[float, float]):
            k = min(self.k, len(a))
            result = knn(a, labels, b, truth, k=k, exponents=exponents)
            metrics[f"test/{name}"] = result.accuracy
            work.done(work.count + 1)
            return result

        def probed(name: str, a: Tensor, b: Tensor) -> None:
            result = solve_probe(self.probe, a, labels, b, truth)
            metrics[f"test/{name}"] = result.accuracy
            self.outcomes[f"{name}_correct"] = result.correct
            work.done(work.count + 1)

        def confidence(prefix: str, name: str, vote: KnnResult) -> None:
            rest = (None if x is None else getattr(x, name) for x in (found.validation, found.ood))
            layer = Layer(getattr(train, name), getattr(test, name), *rest)
            metrics.update(self._confidence(prefix, layer, vote))
            work.done(work.count + 1)

        if self.layer != "embedding":
            vote = neighbours("knn", train.backbone, test.backbone, (1.0, 1.0))
            self.outcomes["knn_correct"] = vote.correct
            neighbours("knn_raw", train.backbone, test.backbone, (0.0, 0.0))
            probed("probe", unit(train.backbone), unit(test.backbone))
            probed("probe_raw", train.backbone, test.backbone)
            probed("probe_polar", polar(train.backbone), polar(test.backbone))
            confidence("backbone_", "backbone", vote)
        if self.layer != "backbone":
            own = neighbours("knn_embedding", train.embedding, test.embedding, exponents)
            self.outcomes["knn_embedding_correct"] = own.correct
            vote = neighbours("knn_embedding_cosine", train.embedding, test.embedding, (1.0, 1.0))
            neighbours("knn_embedding_dot", train.embedding, test.embedding, (0.0, 0.0))
            probed("probe_embedding", unit(train.embedding), unit(test.embedding))
            probed("probe_embedding_raw", train.embedding, test.embedding)
            probed("probe_embedding_polar", polar(train.embedding), polar(test.embedding))
            confidence("", "embedding", vote)
        metrics["test/nmi"] = clustering(unit(test.backbone), truth)
        work.done(work.count + 1)
        metrics |= _geometry(test)
        self.outcomes |= {"label": truth, "norm": test.embedding.norm(dim=1)}
        return metrics

    def validate(self, encoder: ImageEncoder, held_out: Images) -> float:
        """Accuracy of cosine neighbours among backbone features, on validation images."""
        train = self.splits.train
        seen = extract(encoder, train, self.workers).backbone
        found = extract(encoder, held_out, self.workers).backbone
        k = min(self.k, len(seen))
        return knn(seen, train.labels, found, held_out.labels, k=k).accuracy

    def _confidence(self, prefix: str, layer: Layer, vote: KnnResult) -> dict[str, float]:
        """Does the norm tell right from wrong neighbours, and known from unknown data?

        What cannot be measured because all votes are right, or all are wrong, is left out.
        """
        norms, metrics = layer.test.norm(dim=1), {}
        examples, accuracy = accuracy_per_norm_bucket(norms, vote.correct)
        self.outcomes[f"{prefix}bucket_accuracy"] = accuracy
        self.outcomes[f"{prefix}bucket_count"] = examples
        measurable = both_kinds(vote.correct)
        if measurable:
            metrics[f"test/{prefix}norm_auroc"] = auroc(norms, vote.correct)
        if layer.validation is not None and self.splits.validation is not None:
            labels, truth = self.splits.train.labels, self.splits.validation.labels
            k = min(self.k, len(layer.train))
            seen = knn(layer.train, labels, layer.validation, truth, k=k)
            if measurable and both_kinds(seen.correct):
                held_out = (seen.confidence, layer.validation.norm(dim=1), seen.correct)
                test = (vote.confidence, norms, vote.correct)
                for name, with_norm in (("ece", False), ("ece_with_norm", True)):
                    sure = logistic_confidence(held_out, test, with_norm=with_norm)
                    error = expected_calibration_error(sure, vote.correct)
                    metrics[f"test/{prefix}{name}"] = error
        if layer.ood is not None:
            metrics[f"test/{prefix}ood_auroc"] = norm_as_ood(norms, layer.ood.norm(dim=1))
        return metrics


def solve_probe(
    how: str,
    train: Float[Tensor, "m d"],
    labels: Tensor,
    test: Float[Tensor, "n d"],
    truth: Tensor,
) -> ProbeResult:
    """The linear probe as `--probe` names it, on vectors as they are given."""
    if how == "lbfgs":
        return linear_probe(train, labels, test, truth)
    return sgd_probe(train, labels, test, truth, momentum=MOMENTUM[how])


def polar(x: Float[Tensor, "n d"]) -> Float[Tensor, "n d+1"]:
    """Direction and norm, [x/|x|; |x|]: a probe can use the one without paying for the other."""
    return torch.cat([unit(x), x.norm(dim=1, keepdim=True)], 1)


def _geometry(test: Features) -> dict[str, float]:
    """What needs no labels: norms, rank, and how the embeddings spread."""
    metrics = {}
    for name, x in test._asdict().items():
        norms = norm_statistics(x)
        metrics[f"test/norm_{name}_mean"] = norms["mean"].item()
        metrics[f"test/norm_{name}_cv"] = norms["cv"].item()
        metrics[f"test/rankme_{name}"] = rankme(x).item()
    if len(test.embedding) > 1:
        u = unit(test.embedding)
        mean, variance = negative_statistics(u, u)
        metrics |= {"test/negative_mean": mean.item()}
        metrics |= {"test/negative_variance": variance.item()}
    return metrics


def _without_classes(test: Features, outside: Features | None) -> dict[str, float]:
    metrics = _geometry(test)
    if outside is not None:
        norms = [x.embedding.norm(dim=1) for x in (test, outside)]
        metrics["test/ood_auroc"] = norm_as_ood(*norms)
    return metrics


@torch.no_grad()
def extract(encoder: ImageEncoder, images: Images, workers: int = 0) -> Features:
    """Raw features and embeddings of unaugmented images, on the CPU; workers decode lazy images."""
    device = next(encoder.parameters()).device
    loader = DataLoader(
        images,  # pyright: ignore[reportArgumentType]
        batch_size=None,
        sampler=torch.arange(len(images)).split(CHUNK),
        num_workers=0 if images.in_memory else workers,
    )
    training = encoder.training
    encoder.eval()
    parts = []
    for pixels in track(loader, len(loader), "encoding images"):
        outputs = encoder(normalised(pixels.to(device), IMAGENET_MEAN, IMAGENET_STD))
        parts.append(tuple(x.float().cpu() for x in outputs))
    encoder.train(training)
    backbone, embedding = (torch.cat(x) for x in zip(*parts, strict=True))
    return Features(backbone, embedding)
