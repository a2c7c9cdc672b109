"""Metrics and settings in words, shares in points: how papers, figures and answers name them.

A column name such as `test/i2t_r1` is for programs; a reader gets "image-to-text R@1". No torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from offsphere.analysis.panels import Metric, Square, decimals_for
from offsphere.estimate import Estimate

SHARE = re.compile(
    r"(probe|knn|zero_shot|majority|chance)(_.*)?|(i2t|t2i|mean)_r\d+|(ndcg|recall|mrr|top|acc)@?\d+"
    r"|accuracy|mean_class_recall|answer_.*|exact_match|f1"
)
"""Metrics between 0 and 1 that are written in points."""
NAMES = {
    "probe": "linear probe accuracy",
    "probe_raw": "linear probe accuracy, raw features",
    "probe_embedding": "linear probe accuracy on embeddings",
    "probe_embedding_raw": "linear probe accuracy on raw embeddings",
    "knn": "kNN accuracy",
    "knn_raw": "kNN accuracy, raw features",
    "knn_embedding": "kNN accuracy on embeddings",
    "nmi": "clustering NMI",
    "ece": "calibration error (ECE)",
    "mean_r1": "R@1, mean of both directions",
    "spearman": "Spearman correlation",
    "pearson": "Pearson correlation",
    "mse": "squared error",
    "cohens_d": "Cohen's d of norms, relevant minus others",
    "hubness_skewness": "hubness (skewness)",
    "modality_gap": "modality gap",
    "rankme": "effective rank (RankMe)",
    "loss": "loss",
    "contrastive": "contrastive loss",
    "negative_variance": "variance of negatives' similarities",
    "negative_mean": "mean similarity of negatives",
    "alignment": "alignment",
    "uniformity": "uniformity",
    "ood_auroc": "AUROC of unknown images",
    "norm_auroc": "AUROC of the norm for right answers",
}
PATTERNS = (
    (r"i2t_r(\d+)", r"image-to-text R@\1"),
    (r"t2i_r(\d+)", r"text-to-image R@\1"),
    (r"ndcg@?(\d+)", r"nDCG@\1"),
    (r"mrr@?(\d+)", r"MRR@\1"),
    (r"recall@?(\d+)", r"recall@\1"),
    (r"zero_shot_(\w+)", r"zero-shot accuracy (\1)"),
    (r"norm_(\w+)_mean", r"mean norm (\1)"),
    (r"norm_(\w+)_cv", r"variation of norms (CV, \1)"),
    (r"exponent_(\w+)", r"exponent (\1)"),
)
MOMENTS = {"train": "in training", "untrained": "untrained"}


class Words(NamedTuple):
    """What a metric is called, and what its numbers are multiplied with to be written."""

    text: str
    scale: float

    @property
    def unit(self) -> str:
        """The unit of a difference, with a space before it."""
        return " points" if self.scale != 1 else ""

    @property
    def titled(self) -> str:
        """The name with the unit of its values."""
        return f"{self.text} (%)" if self.scale != 1 else self.text


def words_of(metric: str) -> Words:
    """A column's name in words; one that is not known keeps its own words."""
    moment, *places, name = metric.split("/") if "/" in metric else ("", metric)
    text = NAMES.get(name)
    for pattern, said in PATTERNS if text is None else ():
        if re.fullmatch(pattern, name):
            text = re.sub(pattern, said, name)
            break
    about = [*places, MOMENTS.get(moment, "" if moment == "test" else moment)]
    whole = ", ".join([plain(text or name), *(plain(x) for x in about if x)])
    return Words(whole, 100.0 if SHARE.fullmatch(name) else 1.0)


def plain(text: str) -> str:
    """A name, or names with their values, without the underscores of programs."""
    return text.replace("_", " ")


def spoken(metric: Metric) -> Metric:
    """The metric as it is written: named in words, shares in points with one decimal."""
    words = words_of(metric.name)
    shown = [end for found in metric.summary for end in _ends(found.times(words.scale))]
    return replace(
        metric,
        name=words.titled,
        decimals=1 if words.scale != 1 else max(decimals_for(shown) - 1, 0),
        summary=[found.times(words.scale) for found in metric.summary],
        difference=[found and found.times(words.scale) for found in metric.difference],
        smallest=[found and found * words.scale for found in metric.smallest],
        squares={
            context: Square(*(found.times(words.scale) for found in square))
            for context, square in metric.squares.items()
        },
    )


def mean_and_interval(found: Estimate | None, decimals: int, *, signed: bool = False) -> str:
    """One cell of a paper's table: `mean [low, high]`, or the mean where there is no interval."""
    if found is None or not math.isfinite(found.value):
        return ""
    sign = "+" if signed else ""
    mean, low, high = (_rounded(x, decimals, sign) for x in _ends(found))
    return f"{mean} [{low}, {high}]" if found.bounded else mean


def _ends(found: Estimate) -> tuple[float, float, float]:
    return found.value, found.low, found.high


def _rounded(value: float, decimals: int, sign: str) -> str:
    """Never -0.0 or +0.0: what rounds to nothing has no sign."""
    text = f"{value:{sign}.{decimals}f}"
    return text.lstrip("+-") if not text.strip("+-0.") else text


def listed(names: Sequence[str]) -> str:
    """a, b and c."""
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
