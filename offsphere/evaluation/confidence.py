"""Does an embedding's norm say how sure to be? Accuracy by norm, AUROC, calibration, OOD."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from offsphere.evaluation.linear_probe import fit_softmax, standardise

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


class NormBuckets(NamedTuple):
    lower: Float[Tensor, " b"]
    """Lower edge of each bucket, as a share of the largest norm."""
    examples: Int[Tensor, " b"]
    accuracy: Float[Tensor, " b"]
    """NaN where the bucket holds fewer examples than asked for."""


class Calibration(NamedTuple):
    ece: float
    """Expected calibration error on test of a logistic confidence from the score alone."""
    ece_with_norm: float
    auroc: float
    """How well that confidence tells right from wrong on test."""
    auroc_with_norm: float
    confidence: Float[Tensor, " n"]
    confidence_with_norm: Float[Tensor, " n"]


class NormAsOod(NamedTuple):
    auroc_small_norm_is_ood: float
    auroc_large_norm_is_ood: float
    """One minus the other direction: both are given so that the reader need not guess."""


def accuracy_per_norm_bucket(
    norms: Float[Tensor, " n"], correct: Bool[Tensor, " n"], buckets: int = 20, minimum: int = 10
) -> NormBuckets:
    """Accuracy in buckets of equal width of norm / largest norm (2502.09252: 20 of 0.05)."""
    _check_equal_length(norms=norms, correct=correct)
    largest = norms.max()
    if not largest > 0:
        raise ValueError("All norms are 0: there is nothing to put into buckets.")
    bucket = (norms.double() / largest * buckets).long().clamp_max(buckets - 1)
    count = torch.bincount(bucket, minlength=buckets)
    hits = torch.bincount(bucket, weights=correct.double(), minlength=buckets)
    accuracy = torch.where(count >= minimum, hits / count, torch.nan)
    lower = torch.arange(buckets, device=norms.device) / buckets
    return NormBuckets(lower, count, accuracy)


def auroc(scores: Float[Tensor, " n"], positive: Bool[Tensor, " n"]) -> float:
    """Chance that a positive scores above a negative, ties counted as half (Mann-Whitney)."""
    _check_equal_length(scores=scores, positive=positive)
    positive = positive.bool()
    positives = int(positive.sum())
    negatives = len(positive) - positives
    if positives == 0 or negatives == 0:
        raise ValueError(
            f"AUROC needs both kinds of example, got {positives} positive and {negatives} negative."
        )
    _, group, size = scores.unique(return_inverse=True, return_counts=True)
    highest = size.cumsum(0).double()
    mean_rank = highest - (size - 1) / 2
    rank_sum = mean_rank[group][positive].sum()
    return ((rank_sum - positives * (positives + 1) / 2) / (positives * negatives)).item()


def expected_calibration_error(
    confidence: Float[Tensor, " n"], correct: Bool[Tensor, " n"], bins: int = 15
) -> float:
    """Mean over examples of |accuracy - mean confidence| of the example's equal-width bin."""
    _check_equal_length(confidence=confidence, correct=correct)
    if confidence.min() < 0 or confidence.max() > 1:
        raise ValueError(
            "Confidences must lie in [0, 1], got "
            f"{confidence.min().item():.3g} to {confidence.max().item():.3g}."
        )
    bin_ = (confidence.double() * bins).long().clamp_max(bins - 1)
    surplus = correct.double() - confidence.double()
    gap = torch.bincount(bin_, weights=surplus, minlength=bins)
    return (gap.abs().sum() / len(confidence)).item()


def calibration(
    validation: tuple[Float[Tensor, " m"], Float[Tensor, " m"], Bool[Tensor, " m"]],
    test: tuple[Float[Tensor, " n"], Float[Tensor, " n"], Bool[Tensor, " n"]],
    *,
    bins: int = 15,
) -> Calibration:
    """Calibration error of P(correct) from the score alone, and from score and log norm.

    Each split is (score, norm, correct), where the score is any confidence of the classifier (a
    vote share, a top probability). Both logistic models are fitted on validation and measured on
    test.
    """
    correct = test[2].bool()
    plain = _logistic_confidence(validation, test, with_norm=False)
    normed = _logistic_confidence(validation, test, with_norm=True)
    return Calibration(
        ece=expected_calibration_error(plain, correct, bins),
        ece_with_norm=expected_calibration_error(normed, correct, bins),
        auroc=auroc(plain, correct),
        auroc_with_norm=auroc(normed, correct),
        confidence=plain,
        confidence_with_norm=normed,
    )


def norm_as_ood(inside_norms: Float[Tensor, " n"], outside_norms: Float[Tensor, " m"]) -> NormAsOod:
    """AUROC of the norm for telling a second data set from the one the model was trained on."""
    norms = torch.cat([inside_norms, outside_norms])
    outside = torch.arange(len(norms), device=norms.device) >= len(inside_norms)
    large = auroc(norms, outside)
    return NormAsOod(auroc_small_norm_is_ood=1 - large, auroc_large_norm_is_ood=large)


def _logistic_confidence(
    validation: tuple[Tensor, Tensor, Tensor],
    test: tuple[Tensor, Tensor, Tensor],
    with_norm: bool,
) -> Float[Tensor, " n"]:
    fitted, measured = standardise(
        _columns(*validation, with_norm=with_norm), _columns(*test, with_norm=with_norm)
    )
    correct = validation[2].long()
    if bool((correct == correct[0]).all()):
        raise ValueError(
            f"All {len(correct)} validation predictions are "
            f"{'right' if correct[0] else 'wrong'}: a confidence cannot be fitted; use more "
            "validation examples."
        )
    model = fit_softmax(fitted, correct, 2, 1e-6, tolerance=1e-9)
    return model.logits(measured).softmax(1)[:, 1].contiguous()


def _columns(score: Tensor, norm: Tensor, correct: Tensor, with_norm: bool) -> Tensor:
    """The score, and the log norm beside it, as columns of a float64 matrix."""
    _check_equal_length(score=score, norm=norm, correct=correct)
    log_norm = norm.double().clamp_min(torch.finfo(torch.float32).tiny).log()
    columns = [score.double(), log_norm] if with_norm else [score.double()]
    return torch.stack(columns, 1)


def _check_equal_length(**vectors: Tensor) -> None:
    shapes = {name: tuple(vector.shape) for name, vector in vectors.items()}
    if any(len(shape) != 1 for shape in shapes.values()) or len(set(shapes.values())) != 1:
        raise ValueError(f"Expected vectors of one length, got shapes {shapes}.")
    if shapes[next(iter(shapes))] == (0,):
        raise ValueError(f"Expected at least one example, got none in {', '.join(shapes)}.")
    for name, vector in vectors.items():
        if vector.is_floating_point() and not bool(vector.isfinite().all()):
            bad = int((~vector.isfinite()).sum())
            raise ValueError(f"{bad} of {len(vector)} values of {name} are not finite.")
