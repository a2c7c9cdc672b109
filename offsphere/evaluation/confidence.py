"""Does an embedding's norm say how sure to be? Accuracy by norm, AUROC, calibration, OOD."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from offsphere.evaluation.linear_probe import fit_softmax, standardise

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


BUCKETS, LEAST_IN_BUCKET = 20, 10
BINS = 15


def accuracy_per_norm_bucket(
    norms: Float[Tensor, " n"], correct: Bool[Tensor, " n"]
) -> tuple[Int[Tensor, " b"], Float[Tensor, " b"]]:
    """Examples and accuracy in buckets of equal width of norm / largest norm (2502.09252).

    The accuracy is NaN where a bucket holds too few examples.
    """
    _check_equal_length(norms=norms, correct=correct)
    largest = norms.max()
    if not largest > 0:
        raise ValueError("All norms are 0: there is nothing to put into buckets.")
    bucket = (norms.double() / largest * BUCKETS).long().clamp_max(BUCKETS - 1)
    count = torch.bincount(bucket, minlength=BUCKETS)
    hits = torch.bincount(bucket, weights=correct.double(), minlength=BUCKETS)
    return count, torch.where(count >= LEAST_IN_BUCKET, hits / count, torch.nan)


def both_kinds(correct: Bool[Tensor, " n"]) -> bool:
    """Whether some are right and some are wrong, so that there is anything to tell apart."""
    return 0 < int(correct.sum()) < len(correct)


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
    confidence: Float[Tensor, " n"], correct: Bool[Tensor, " n"]
) -> float:
    """Mean over examples of |accuracy - mean confidence| of the example's equal-width bin."""
    _check_equal_length(confidence=confidence, correct=correct)
    if confidence.min() < 0 or confidence.max() > 1:
        raise ValueError(
            "Confidences must lie in [0, 1], got "
            f"{confidence.min().item():.3g} to {confidence.max().item():.3g}."
        )
    bin_ = (confidence.double() * BINS).long().clamp_max(BINS - 1)
    surplus = correct.double() - confidence.double()
    gap = torch.bincount(bin_, weights=surplus, minlength=BINS)
    return (gap.abs().sum() / len(confidence)).item()


def norm_as_ood(inside_norms: Float[Tensor, " n"], outside_norms: Float[Tensor, " m"]) -> float:
    """AUROC of a small norm for telling a second data set from the one that was trained on."""
    norms = torch.cat([inside_norms, outside_norms])
    outside = torch.arange(len(norms), device=norms.device) >= len(inside_norms)
    return 1 - auroc(norms, outside)


def logistic_confidence(
    validation: tuple[Float[Tensor, " m"], Float[Tensor, " m"], Bool[Tensor, " m"]],
    test: tuple[Float[Tensor, " n"], Float[Tensor, " n"], Bool[Tensor, " n"]],
    *,
    with_norm: bool,
) -> Float[Tensor, " n"]:
    """P(correct) on test from the score alone, or from score and log norm, fitted on validation.

    Each split is (score, norm, correct), where the score is any confidence of the classifier (a
    vote share, a top probability).
    """
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
