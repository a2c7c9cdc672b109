"""The settings that every training script shares, and those that all methods on images share: field
= flag = YAML key = results column.

Imports no torch, so that `--help` answers at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from offsphere.names import LARGEST_SCALE, parse_cell
from offsphere.run.catalog import KNOWN
from offsphere.run.config import added, canonical_data, data_name, unhashed
from offsphere.run.help import Groups

DEFAULT_SAMPLES = 120_000
LARGEST_SEED = 2**63 - 1  # a larger one is no whole number to a table
WIDEST, LARGEST_IMAGE, LONGEST_RUN, MOST_THREADS = 65_536, 8_192, 10**12, 1_024
"""No layer is wider, no picture larger, no run of more steps and no process of more threads: what
is above is a slip of the pen, and is refused before it fills the memory."""


@dataclass(frozen=True)
class TrainSettings:
    GROUPS: ClassVar[Groups] = {  # of --help: the common flags, then those of --help-all
        "question": (
            ("cell", "temperature", "scale", "variance_weight"),
            ("eval_cell", "learnable_temperature", "batch_mean_norm", "exponent_lr", "variance_on",
             "gor_weight", "norm_penalty", "negatives"),
        ),
        "training": (
            ("batch_size", "samples", "epochs", "lr", "seed"),
            ("optimizer", "lr_rule", "weight_decay", "warmup", "clip", "microbatch",
             "sync_batch_norm"),
        ),
        "data": (("data_root",), ()),
        "measuring": ((), ("eval_every", "keep", "log_every")),
        "machine": (
            ("out", "device", "devices", "workers", "resume"),
            ("study", "nodes", "threads", "precision", "loss_precision", "checkpoint_every",
             "loggers", "progress"),
        ),
    }  # fmt: skip

    cell: str = "cosine"
    """Which side is normalised: cosine, dot, qnorm, dnorm, learnable, or exponents like 0.3,0.7."""
    eval_cell: str | None = None
    """The cell that scores embeddings in evaluation; default: the training cell."""
    temperature: float = 0.2
    """Divides the scores (times the calibration ratio)."""
    learnable_temperature: bool = False
    """Learn the temperature; its scale stays within 1 and 100, over the calibration ratio."""
    scale: Literal["calibrated", "fixed"] = "calibrated"
    """calibrated: every cell starts with cosine's spread of logits; fixed: the papers' protocol."""
    batch_mean_norm: bool = False
    """Divide each side by the batch's mean norm first: the control arm for the scale of dot."""
    exponent_lr: float = 0.05
    """Learning rate of the learnable cell's two exponents (its own; Adam, without decay)."""
    variance_weight: float = 0.0
    """Weight of the negative-similarity variance term."""
    variance_on: Literal["cosine", "score"] = "cosine"
    """Whether the variance term sees cosines or the cell's own scores over the ratio."""
    gor_weight: float = added(0.0)
    """Weight of GOR, the "spread-out" term (global orthogonal regularisation), on cosines."""
    norm_penalty: float = 0.0
    """Weight of the penalty on the spread of embedding norms (norm-sensitive training)."""
    batch_size: int = 256
    """Samples per step (images, not views)."""
    negatives: int | None = added(None)
    """Contrast within groups of this many of the batch's samples, which must divide it; default:
    the whole batch is one group. Steps, gradient noise and batch-norm stay those of the batch."""
    samples: int | None = None
    """Budget in samples seen (images, not views). Without it and epochs: 120,000."""
    epochs: float | None = None
    """Budget in passes over the data, instead of samples."""
    optimizer: Literal["sgd", "lars", "adamw"] = "adamw"
    """adamw (betas 0.9, 0.98) does not depend on a cell's gradient scale; sgd and lars, with
    momentum 0.9, do."""
    lr: float = 1e-3
    """Peak learning rate, before lr_rule."""
    lr_rule: Literal["linear", "sqrt", "none"] = "sqrt"
    """How lr grows with the batch: times batch/256, its square root, or not at all."""
    weight_decay: float = 1e-4
    """Not applied to temperature, exponents, biases and other parameters with one axis."""
    warmup: float = 0.05
    """Share of the steps over which the rate rises; then it follows a cosine to zero."""
    clip: float = 0.0
    """Largest gradient norm; 0 turns clipping off. How often it acts is logged."""
    seed: int = 0
    """Seeds the streams init, order and augment: equal in every cell."""
    threads: int = 2
    """CPU threads. Part of the settings, because another number gives other last bits."""
    precision: Literal["32-true", "bf16-mixed"] = "32-true"
    """bf16-mixed is for accelerators. (float16 is not offered: raw scores overflow it.)"""
    loss_precision: Literal["fp32", "tf32"] = added("tf32")
    """Of the loss's matrix products on a GPU (sums stay float32); on a CPU both are float32."""
    microbatch: int | None = None
    """Rows that pass the towers at a time, to save memory: the loss and its gradients stay those of
    the whole batch. Not with batch-norm."""
    sync_batch_norm: bool = False
    """On several GPUs batch-norm takes its statistics from the batch of all of them."""
    log_every: int = 20
    """Steps between rows of telemetry."""
    eval_every: int = 0
    """Samples between evaluations during training; 0: only at the end."""
    keep: Literal["last", "best"] = added("last")
    """Which weights are measured and saved: the last, or the best of those that eval_every looks
    at, by validation data alone (kNN, mean R@1, nDCG@10 or Spearman)."""
    study: str | None = unhashed(None)
    """Folder below `out`; default: the script's name."""
    out: str = unhashed("results")
    """Where run folders go."""
    device: str = unhashed("auto")
    """auto, cpu, cuda or mps."""
    devices: int = unhashed(1)
    """Processes on this machine, one per device, that share each batch (torchrun sets its own)."""
    nodes: int = unhashed(1)
    """Machines, each with so many devices."""
    workers: int = unhashed(0)
    """Processes that prepare batches; 0 prepares them in this one."""
    checkpoint_every: int = unhashed(200)
    """Steps between checkpoints."""
    data_root: str | None = unhashed(None)
    """Where data with a name lie (cifar10-shards, flickr8k-128, scifact ...: docs/data.md);
    default: OFFSPHERE_DATA, else the user's cache."""
    resume: bool = unhashed(True)
    """Resume a run that was cut. --no-resume moves its folder aside and starts anew."""
    loggers: tuple[Literal["tensorboard", "wandb"], ...] = unhashed(())
    """Further loggers beside steps.jsonl (extra `loggers`)."""
    progress: bool = unhashed(True)
    """Show how far work has come: a bar on a terminal, a line now and then in a log; --no-progress
    shows neither."""

    def __post_init__(self) -> None:
        canonical_data(self)
        object.__setattr__(self, "cell", canonical_cell(self.cell))
        if self.eval_cell is not None:
            object.__setattr__(self, "eval_cell", canonical_eval_cell(self.eval_cell))
        check_setting(self, "batch_size", "at least 2", self.batch_size >= 2)
        check_setting(self, "temperature", "above 0", 0 < self.temperature < math.inf)
        if self.learnable_temperature:
            least = 1 / LARGEST_SCALE
            expected = f"between {least:g} and 1 if it is learned (or --no-learnable-temperature)"
            check_setting(self, "temperature", expected, least <= self.temperature <= 1)
        for name in ("lr", "threads", "log_every", "checkpoint_every", "devices", "nodes"):
            check_setting(self, name, "above 0", 0 < getattr(self, name) < math.inf)
        check_between(self, "threads", 1, MOST_THREADS)
        for name in (
            *("variance_weight", "gor_weight", "norm_penalty"),
            *("weight_decay", "clip", "exponent_lr"),
        ):
            check_setting(self, name, "at least 0", 0 <= getattr(self, name) < math.inf)
        for name in ("eval_every", "workers", "seed"):
            check_setting(self, name, "at least 0", getattr(self, name) >= 0)
        check_setting(self, "seed", f"at most {LARGEST_SEED:,}", self.seed <= LARGEST_SEED)
        for name in ("samples", "epochs"):
            value = getattr(self, name)
            check_setting(self, name, "above 0", value is None or 0 < value < math.inf)
        check_setting(
            self, "microbatch", "at least 1", self.microbatch is None or self.microbatch >= 1
        )
        if self.negatives is not None:
            good = self.negatives >= 2 and self.batch_size % self.negatives == 0
            expected = f"at least 2 and a divisor of --batch-size={self.batch_size}"
            check_setting(self, "negatives", expected, good)
        if self.keep == "best" and not self.eval_every:
            raise ValueError(
                "--keep=best chooses among evaluations: give --eval-every=SAMPLES between them."
            )
        if self.samples is not None and self.epochs is not None:
            raise ValueError("Give the budget as --samples or as --epochs, not both.")
        check_setting(self, "warmup", "a share between 0 and 1", 0 <= self.warmup <= 1)


def canonical_cell(text: str) -> str:
    """One spelling per cell, so that one cell has one run folder."""
    parsed = parse_cell(text)
    return parsed if isinstance(parsed, str) else f"{parsed[0]:g},{parsed[1]:g}"


def canonical_eval_cell(text: str) -> str:
    """One spelling per cell that can score; `learnable` names no exponents to score with."""
    cell = canonical_cell(text)
    if cell == "learnable":
        raise ValueError(
            "--eval-cell=learnable has no exponents; give two, as in 0.3,0.7. Without --eval-cell "
            "a learnable run is scored with what it learned."
        )
    return cell


def check_setting(settings: object, name: str, expected: str, good: bool) -> None:
    """Refuse a setting that is not as expected, by the name of its flag."""
    if not good:
        got = getattr(settings, name)
        raise ValueError(f"--{name.replace('_', '-')} must be {expected}, got {got}.")


def check_between(settings: object, name: str, low: int, high: int) -> None:
    """Refuse a number outside these bounds; a setting that is left open (None) is inside."""
    value = getattr(settings, name)
    check_setting(settings, name, f"at least {low}", value is None or value >= low)
    check_setting(settings, name, f"at most {high:,}", value is None or value <= high)


def steps_of(settings: TrainSettings, population: int) -> int:
    """The steps of a run on `population` samples."""
    if settings.batch_size > population:
        raise ValueError(
            f"--batch-size={settings.batch_size} is larger than the training data ({population} "
            f"samples). Use at most {population}."
        )
    budget = settings.epochs or 0.0
    longest = LONGEST_RUN * settings.batch_size
    if budget * population > longest or (settings.samples or 0) > longest:
        given = f"--epochs={budget:g}" if budget else f"--samples={settings.samples}"
        raise ValueError(f"{given} is no budget: expected at most {LONGEST_RUN:,} steps.")
    total = (settings.samples or DEFAULT_SAMPLES) // settings.batch_size
    if settings.epochs is not None:  # whole epochs miss no sample: the last batch looks ahead
        total = math.ceil(round(settings.epochs * population) / settings.batch_size)
    if total < 1:
        raise ValueError(
            f"The budget ends before the first step of {settings.batch_size} samples. "
            "Raise --samples or --epochs, or lower --batch-size."
        )
    return total


IMAGE_COLUMNS = (  # of the table that closes a run on images
    ("test/knn", "kNN", "{:.1%}"),
    ("untrained/knn", "kNN before training", "{:.1%}"),
    ("test/probe", "linear probe", "{:.1%}"),
    ("untrained/probe", "probe before training", "{:.1%}"),
    ("test/majority", "always the largest class", "{:.1%}"),
    ("test/rankme_embedding", "rank of the embeddings", "{:.1f}"),
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
    download: bool = unhashed(False)
    """Let torchvision fetch its data."""
    root: str | None = unhashed(None)
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
    save_views: bool = unhashed(False)
    """Save a picture of the augmented views."""
    save_embeddings: bool = unhashed(False)
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
