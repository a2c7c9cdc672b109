"""The settings that every method on images shares. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from offsphere.run.catalog import KNOWN
from offsphere.run.config import data_name, where
from offsphere.run.help import Groups
from offsphere.training.settings import (
    LARGEST_IMAGE,
    WIDEST,
    TrainSettings,
    check_between,
    check_setting,
)

COLUMNS = (  # of the table that closes a run
    ("test/knn", "kNN", "{:.1%}"),
    ("test/probe", "probe", "{:.1%}"),
    ("untrained/probe", "probe before", "{:.1%}"),
    ("test/majority", "largest class", "{:.1%}"),
    ("test/rankme_embedding", "rank", "{:.1f}"),
    ("train/norm_left_cv", "norm CV", "{:.3f}"),
    ("train/negative_variance", "negative variance", "{:.4f}"),
)


@dataclass(frozen=True)
class ImageSettings(TrainSettings):
    GROUPS: ClassVar[Groups] = {
        "question": (("loss",), ("cut_init", "grad_scale")),
        "data": (
            ("data", "data_test", "limit", "image_size"),
            ("data_ood", "on_bad_sample", "download", "root", "augment", "min_scale", "jitter",
             "grey", "blur"),
        ),
        "encoder": (
            ("backbone", "pretrained", "projector_dim"),
            ("stem", "norm", "projector_hidden", "projector_layers", "head_norm"),
        ),
        "measuring": (
            ("eval_split", "probe"),
            ("layer", "knn_k", "save_views", "save_embeddings"),
        ),
    }  # fmt: skip

    data: str = data_name("emoji:subgroup")
    """emoji, emoji:subgroup, openmoji, a torchvision set (cifar10), a name below --data-root
    (cifar10-shards, tinyimagenet32), folder:PATH or wds:PATTERN."""
    data_test: str | None = data_name(None)
    """Test data if `data` is a wds: pattern without a test split of its own."""
    data_ood: str | None = data_name(None)
    """A second data set, for the norm as out-of-distribution score."""
    limit: int | None = None
    """Train on this many images, chosen by the seed 0 whatever the run's seed."""
    eval_split: Literal["test", "validation"] = "test"
    """What is measured; tune on validation, report test."""
    image_size: int = 32
    """Side of the pictures in pixels."""
    on_bad_sample: Literal["error", "skip"] = "error"
    """A damaged image stops the run, or is left out and counted."""
    download: bool = where(False)
    """Let torchvision fetch its data."""
    root: str | None = where(None)
    """Where torchvision's data lies; default: the user's cache."""

    backbone: str = "tiny_resnet"
    """tiny_resnet (made for a CPU), or any timm name."""
    stem: Literal["auto", "small", "standard"] = "auto"
    """small: 3x3 first convolution without max-pool, for 32-pixel images."""
    pretrained: str | None = None
    """A local file of backbone weights, or a timm tag (`default` for timm's choice)."""
    norm: Literal["batch", "group"] = "batch"
    """group: no batch-norm anywhere."""
    projector_dim: int = 128
    """Width of the embeddings."""
    projector_hidden: int | None = None
    """Width of the projector's hidden layers; default: the backbone's."""
    projector_layers: int = 2
    """Layers of the projector."""
    head_norm: bool = False
    """End the projector with a batch-norm, which rescales the magnitude that is studied."""

    augment: Literal["batched", "lightly"] = "batched"
    """batched: on the training device; lightly: its own transform, image by image."""
    min_scale: float = 0.2
    """Smallest crop as a share of the image."""
    jitter: float = 0.5
    """Strength of the colour jitter: 0.8, 0.8, 0.8 and 0.2 times this."""
    grey: float = 0.2
    """Probability of a grey view."""
    blur: float = 0.0
    """Probability of a blurred view."""

    cut_init: float = 1.0
    """Divide all initial weights by this (cut-initialisation; 1 = off)."""
    grad_scale: float = 0.0
    """Multiply each embedding's gradient by its norm to this power (0 = off)."""

    knn_k: int = 20
    """Neighbours that vote."""
    probe: Literal["lbfgs", "sgd", "sgd_momentum"] = "lbfgs"
    """How the linear probe is solved: exactly, or as in the papers by 100 epochs of SGD, with the
    momentum 0.9 of their code (sgd_momentum) or without any."""
    layer: Literal["all", "backbone", "embedding"] = "all"
    """Which features are probed, raw and normalised."""
    save_views: bool = where(False)
    """Save a picture of the augmented views."""
    save_embeddings: bool = where(False)
    """Save the test set's features and embeddings."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_between(self, "image_size", 2, LARGEST_IMAGE)
        check_between(self, "projector_dim", 1, WIDEST)
        check_between(self, "projector_hidden", 0, WIDEST)
        check_between(self, "projector_layers", 1, 100)
        check_setting(self, "limit", "at least 2", self.limit is None or self.limit >= 2)
        check_setting(self, "knn_k", "at least 1", self.knn_k >= 1)
        check_setting(self, "min_scale", "above 0 and at most 1", 0 < self.min_scale <= 1)
        check_setting(self, "jitter", "between 0 and 2.5", 0 <= self.jitter <= 2.5)
        for name in ("grey", "blur"):
            check_setting(self, name, "a probability", 0 <= getattr(self, name) <= 1)
        check_setting(self, "cut_init", "above 0", 0 < self.cut_init < math.inf)
        check_setting(self, "grad_scale", "a finite number", math.isfinite(self.grad_scale))
        if self.data in KNOWN and self.eval_split == "test" and self.data_test is None:
            object.__setattr__(self, "data_test", KNOWN[self.data].test)
        if self.data.startswith("wds:") and self.eval_split == "test" and self.data_test is None:
            raise ValueError(
                f"--data={self.data} has no test split of its own: give --data-test=wds:..., or "
                "measure on a part of it with --eval-split=validation."
            )
