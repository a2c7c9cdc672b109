"""What a trained image encoder is worth: neighbours, probes, norms as confidence, clusters."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from offsphere.encoders.images import ImageEncoder
from offsphere.evaluation.clustering import clustering
from offsphere.evaluation.confidence import (
    accuracy_per_norm_bucket,
    auroc,
    calibration,
    norm_as_ood,
)
from offsphere.evaluation.knn import knn
from offsphere.evaluation.linear_probe import linear_probe, sgd_probe
from offsphere.geometry import norm_statistics, unit
from vision.views import IMAGENET_MEAN, IMAGENET_STD

if TYPE_CHECKING:
    from jaxtyping import Float

    from vision.experiment import Splits
    from vision.images import Images, LazyImages
    from vision.settings import VisionSettings

CHUNK = 512


class Features(NamedTuple):
    backbone: Float[Tensor, "n f"]
    embedding: Float[Tensor, "n d"]


class Evaluator:
    """Called with an encoder, gives named numbers; the last call's per-example `outcomes` stay."""

    def __init__(self, splits: Splits, settings: VisionSettings) -> None:
        self.splits, self.settings = splits, settings
        self.outcomes: dict[str, Tensor] = {}
        self.features: Features | None = None

    def __call__(self, encoder: ImageEncoder, exponents: tuple[float, float]) -> dict[str, float]:
        """Metrics on the evaluation split; the eval cell's exponents score the embeddings."""
        splits, settings = self.splits, self.settings
        train = extract(encoder, splits.train)
        test = extract(encoder, splits.test)
        labels, truth = splits.train.labels, splits.test.labels
        self.features = test
        majority = labels.bincount().argmax()
        metrics = {"test/majority": (truth == majority).double().mean().item()}

        def neighbours(name: str, a: Tensor, b: Tensor, exponents: tuple[float, float]):
            k = min(settings.knn_k, len(a))
            result = knn(a, labels, b, truth, k=k, exponents=exponents)
            metrics[f"test/{name}"] = result.accuracy
            return result

        def probed(name: str, a: Tensor, b: Tensor) -> None:
            solve = linear_probe if settings.probe == "lbfgs" else sgd_probe
            result = solve(a, labels, b, truth)
            metrics[f"test/{name}"] = result.accuracy
            self.outcomes[f"{name}_correct"] = result.correct

        if settings.layer != "embedding":
            vote = neighbours("knn", train.backbone, test.backbone, (1.0, 1.0))
            self.outcomes["knn_correct"] = vote.correct
            neighbours("knn_raw", train.backbone, test.backbone, (0.0, 0.0))
            probed("probe", unit(train.backbone), unit(test.backbone))
            probed("probe_raw", train.backbone, test.backbone)
        if settings.layer != "backbone":
            own = neighbours("knn_embedding", train.embedding, test.embedding, exponents)
            self.outcomes["knn_embedding_correct"] = own.correct
            vote = neighbours("knn_embedding_cosine", train.embedding, test.embedding, (1.0, 1.0))
            neighbours("knn_embedding_dot", train.embedding, test.embedding, (0.0, 0.0))
            probed("probe_embedding", unit(train.embedding), unit(test.embedding))
            probed("probe_embedding_raw", train.embedding, test.embedding)
            metrics |= self._confidence(encoder, train, test, vote)
        found = clustering(unit(test.backbone), truth, clusters=len(truth.unique()))
        metrics["test/nmi"] = found.nmi
        for name, x in (("backbone", test.backbone), ("embedding", test.embedding)):
            norms = norm_statistics(x)
            metrics[f"test/norm_{name}_mean"] = norms["mean"].item()
            metrics[f"test/norm_{name}_cv"] = norms["cv"].item()
        self.outcomes |= {"label": truth, "norm": test.embedding.norm(dim=1)}
        return metrics

    def _confidence(self, encoder, train: Features, test: Features, vote) -> dict[str, float]:
        """Does the embedding's norm tell right from wrong neighbours, and known from unknown?"""
        norms = test.embedding.norm(dim=1)
        metrics: dict[str, float] = {}
        if 0 < vote.correct.sum() < len(vote.correct):
            metrics["test/norm_auroc"] = auroc(norms, vote.correct)
        buckets = accuracy_per_norm_bucket(norms, vote.correct)
        self.outcomes["bucket_accuracy"] = buckets.accuracy
        self.outcomes["bucket_count"] = buckets.examples
        held_out = self.splits.validation
        if held_out is not None:
            held = extract(encoder, held_out)
            k = min(self.settings.knn_k, len(train.embedding))
            seen = knn(
                train.embedding, self.splits.train.labels, held.embedding, held_out.labels, k=k
            )
            result = calibration(
                (seen.confidence, held.embedding.norm(dim=1), seen.correct),
                (vote.confidence, norms, vote.correct),
            )
            metrics["test/ece"] = result.ece
            metrics["test/ece_with_norm"] = result.ece_with_norm
        if self.splits.ood is not None:
            outside = extract(encoder, self.splits.ood).embedding.norm(dim=1)
            metrics["test/ood_auroc"] = norm_as_ood(norms, outside).auroc_small_norm_is_ood
        return metrics


@torch.no_grad()
def extract(encoder: ImageEncoder, images: Images | LazyImages) -> Features:
    """Raw features and embeddings of unaugmented images, on the CPU."""
    device = next(encoder.parameters()).device
    mean = torch.tensor(IMAGENET_MEAN, device=device)[:, None, None] * 255
    std = torch.tensor(IMAGENET_STD, device=device)[:, None, None] * 255
    training = encoder.training
    encoder.eval()
    parts = []
    for indices in torch.arange(len(images)).split(CHUNK):
        pixels = images.batch(indices).to(device).float()
        parts.append(tuple(x.float().cpu() for x in encoder((pixels - mean) / std)))
    encoder.train(training)
    backbone, embedding = (torch.cat(x) for x in zip(*parts, strict=True))
    return Features(backbone, embedding)
