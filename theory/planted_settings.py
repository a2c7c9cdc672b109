"""The settings of planted data. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from theory.lab import LabSettings

VERDICT_CELL = "qnorm"
"""The cell whose model the verdict looks at: it keeps the magnitude of the documents alone."""


@dataclass(frozen=True)
class Config(LabSettings):
    """The sizes and strengths are ours."""

    carrier: Literal["norm", "angle", "both", "neither"] = "both"
    """What leads from a query to its document."""
    task: Literal["asymmetric", "symmetric"] = "asymmetric"
    """Queries and documents of two kinds, or two interchangeable views."""
    counts: Literal["even", "skewed"] = "even"
    """Every relevant document answers equally many queries, or a number that falls as 1/rank."""
    cells: tuple[str, ...] = ("cosine", "dot", "qnorm", "dnorm", "learnable")
    """The cells to train; qnorm is needed for the verdict."""
    relevant: int = 64
    """Documents that are relevant to some query."""
    distractors: int = 192
    """Documents that are relevant to none."""
    queries_each: int = 4
    """Relevant queries per relevant document, on average."""
    shift: float = 0.75
    """By how much relevant documents exceed distractors in log-salience, where it carries."""
    spread: float = 0.5
    """Standard deviation of the log-salience, always."""
    query_noise: float = 0.5
    """Length of the noise that turns a query away from its document's direction of length 1."""
    feature_noise: float = 0.1
    """Standard deviation of the noise in each feature, before the salience."""
    latent: int = 8
    """Dimensions of the directions."""
    features: int = 16
    """Dimensions of what the encoders see."""
    hidden: int = 64
    """Hidden units of an encoder."""
    width: int = 16
    """Dimensions of an embedding."""
    temperature: float = 0.2
    """Cosine's temperature; the others are calibrated to the same spread of logits at the start."""
    learning_rate: float = 0.003
    """Adam's, for the encoders."""
    free_learning_rate: float = 0.1
    """Plain SGD's, for the free documents of the relevance counter."""
    batch_size: int = 64
    """Pairs in a batch."""
    negatives: int = 64
    """Further documents in a batch, drawn evenly from the corpus."""
    steps: int = 150
    """Training steps."""
    worlds: int = 20
    """Fresh corpora to score, each one replication of the paired differences."""
    shuffles: int = 5
    """Shuffles of the magnitudes in each fresh corpus, averaged."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if VERDICT_CELL not in self.cells:
            raise ValueError(
                f"Expected {VERDICT_CELL} among the cells, for the verdict, got {self.cells}."
            )
        at_least = {"relevant": 2, "queries_each": 1, "worlds": 2, "shuffles": 1, "steps": 1}
        at_least |= {"negatives": 1, "batch_size": 2, "latent": 1, "hidden": 1, "width": 1}
        for name, smallest in at_least.items():
            got = getattr(self, name)
            if got < smallest:
                raise ValueError(f"Expected {name} of at least {smallest}, got {got}.")
        for name in ("temperature", "learning_rate", "free_learning_rate", "spread"):
            got = getattr(self, name)
            if not 0 < got < math.inf:
                raise ValueError(f"Expected a finite {name} above 0, got {got}.")
        if self.latent > self.features:
            raise ValueError(
                f"Expected at least as many features as latent dimensions, got {self.features} "
                f"and {self.latent}. Raise --features or lower --latent."
            )
