"""Linear probes on cached features: an exact softmax regression, and the papers' SGD."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from offsphere.evaluation.checks import check_classes, check_split
from offsphere.run.progress import track

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

WEIGHT_DECAYS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
ROW_TILE = 2048
MEMORY, MOST_ITERATIONS = 10, 500
FOLDS = 3
SELECTION_TOLERANCE = 10
"""How much less exactly the fits are solved that only choose the weight decay."""
FEW_ROWS = 10_000


class ProbeResult(NamedTuple):
    accuracy: float
    correct: Bool[Tensor, " n"]
    weight_decay: float
    seconds: float
    predictions: Int[Tensor, " n"]
    confidence: Float[Tensor, " n"]
    """The predicted class's probability."""


class SoftmaxModel(NamedTuple):
    weight: Float[Tensor, "c d"]
    bias: Float[Tensor, " c"]

    def logits(self, features: Float[Tensor, "n d"]) -> Float[Tensor, "n c"]:
        return torch.addmm(self.bias[:, None], self.weight, features.T).T


def linear_probe(
    train: Float[Tensor, "m d"],
    train_labels: Int[Tensor, " m"],
    test: Float[Tensor, "n d"],
    test_labels: Int[Tensor, " n"],
    *,
    weight_decay: float | Literal["auto"] = "auto",
    weight_decays: Sequence[float] = WEIGHT_DECAYS,
    tolerance: float = 1e-4,
    seed: int = 0,
) -> ProbeResult:
    """Softmax regression on standardised features, solved by preconditioned L-BFGS.

    The objective is mean cross-entropy + weight_decay / 2 |W|^2 with a free bias. "auto" takes
    the weight decay of best accuracy on held-out training rows (a tenth of them; three folds below
    10,000 rows), on a path from strong to weak where each fit starts at the one before.
    """
    started = time.perf_counter()
    _check(train, train_labels, test, test_labels)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(train), generator=generator).to(train.device)
    train, test = standardise(train[order], test)
    labels, classes = train_labels[order].long(), int(train_labels.max()) + 1
    moments, start = _second_moments(train), None
    if weight_decay == "auto":
        path = sorted(weight_decays, reverse=True)
        weight_decay, start = select_weight_decay(
            train, labels, classes, path, SELECTION_TOLERANCE * tolerance, moments
        )
    model = fit_softmax(
        train, labels, classes, weight_decay, start=start, moments=moments, tolerance=tolerance
    )
    return _result(model.logits(test), test_labels, float(weight_decay), started)


def sgd_probe(
    train: Float[Tensor, "m d"],
    train_labels: Int[Tensor, " m"],
    test: Float[Tensor, "n d"],
    test_labels: Int[Tensor, " n"],
    *,
    momentum: float = 0.0,
    epochs: int = 100,
    batch_size: int = 256,
    seed: int = 0,
) -> ProbeResult:
    """The papers' protocol on cached features as they are given: SGD at 0.1, cosine schedule.

    The papers do not state a momentum; their code has 0.9.
    """
    started = time.perf_counter()
    _check(train, train_labels, test, test_labels)
    train, test, train_labels = train.detach(), test.detach(), train_labels.long()
    generator = torch.Generator().manual_seed(seed)
    classes = int(train_labels.max()) + 1
    head = torch.nn.Linear(train.shape[1], classes, device=train.device, dtype=train.dtype)
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1, momentum=momentum)
    steps = epochs * -(-len(train) // batch_size)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in track(range(epochs), epochs, "linear probe", unit="epochs"):
        order = torch.randperm(len(train), generator=generator).to(train.device)
        for rows in order.split(batch_size):
            optimizer.zero_grad()
            cross_entropy(head(train[rows]), train_labels[rows]).backward()
            optimizer.step()
            schedule.step()
    with torch.no_grad():
        logits = head(test)
    return _result(logits, test_labels, 0.0, started)


def standardise(
    train: Float[Tensor, "m d"], test: Float[Tensor, "n d"]
) -> tuple[Float[Tensor, "m d"], Float[Tensor, "n d"]]:
    """Both splits with the training split's mean 0 and std 1 per column; constant columns are 0."""
    train, test = train.detach(), test.detach()
    std, mean = torch.std_mean(train, dim=0, correction=0)
    noise = 10 * torch.finfo(train.dtype).eps * train.abs().amax(0)
    gain = torch.where(std > noise, 1 / std, torch.zeros_like(std))
    return (train - mean) * gain, (test - mean) * gain


def select_weight_decay(
    features: Float[Tensor, "n d"],
    labels: Int[Tensor, " n"],
    classes: int,
    path: Sequence[float],
    tolerance: float,
    moments: Float[Tensor, "d d"],
) -> tuple[float, SoftmaxModel]:
    """The weight decay of best held-out accuracy and its model; rows must be in random order.

    The path ends early at a weight decay that is worse than the one before in held-out accuracy
    and in held-out loss.
    """
    folds = [
        _fold(features, labels, moments, held_out) for held_out in _held_out_rows(len(features))
    ]
    starts: list[SoftmaxModel | None] = [None] * len(folds)
    tried: list[tuple[int, float, SoftmaxModel]] = []
    for weight_decay in track(path, len(path), "linear probe", unit="weight decays"):
        models = [
            fit_softmax(
                fold.features,
                fold.labels,
                classes,
                weight_decay,
                start=start,
                moments=fold.moments,
                tolerance=tolerance,
            )
            for fold, start in zip(folds, starts, strict=True)
        ]
        starts = [*models]
        tried.append((*_held_out_outcome(folds, models), models[-1]))
        if len(tried) > 1 and tried[-1][0] < tried[-2][0] and tried[-1][1] > tried[-2][1]:
            break
    best = max(range(len(tried)), key=lambda i: tried[i][0])
    return path[best], tried[best][2]


def fit_softmax(
    features: Float[Tensor, "n d"],
    labels: Int[Tensor, " n"],
    classes: int,
    weight_decay: float,
    *,
    start: SoftmaxModel | None = None,
    moments: Float[Tensor, "d d"] | None = None,
    tolerance: float = 1e-4,
) -> SoftmaxModel:
    """Minimise mean cross-entropy + weight_decay / 2 |W|^2 by preconditioned L-BFGS.

    The preconditioner is the Hessian at equal class probabilities, p(1 - p) X'X/n + weight_decay
    with p = 1/c. Ends when the next step promises to lower the objective by less than `tolerance`
    nats. Features should be centred and of similar scale.
    """
    if weight_decay < 0:
        raise ValueError(f"The weight decay must not be negative, got {weight_decay}.")
    moments = _second_moments(features) if moments is None else moments
    precondition = _preconditioner(moments, weight_decay, classes)
    point = features.new_zeros(classes, features.shape[1] + 1)
    if start is not None:
        point = torch.cat([start.weight, start.bias[:, None]], 1)

    def objective(point: Tensor) -> tuple[float, Tensor]:
        return _softmax_objective(point, features, labels, weight_decay)

    point = _lbfgs(objective, point, precondition, tolerance)
    return SoftmaxModel(point[:, :-1].contiguous(), point[:, -1].contiguous())


def _softmax_objective(
    point: Float[Tensor, "c columns"], features: Tensor, labels: Tensor, weight_decay: float
) -> tuple[float, Float[Tensor, "c columns"]]:
    """The objective and its gradient in one pass over the rows, class-major for fast products."""
    weight, bias = point[:, :-1].contiguous(), point[:, -1:].contiguous()
    loss = torch.zeros((), dtype=torch.float64, device=point.device)
    slope, bias_slope = torch.zeros_like(weight), torch.zeros_like(bias)
    for rows, target in zip(features.split(ROW_TILE), labels.split(ROW_TILE), strict=True):
        log_p = torch.addmm(bias, weight, rows.T).log_softmax(0)
        loss -= log_p.gather(0, target[None]).sum(dtype=torch.float64)
        residual = log_p.exp_()
        residual.scatter_add_(0, target[None], residual.new_full((1, len(target)), -1))
        slope.addmm_(residual, rows)
        bias_slope += residual.sum(1, keepdim=True)
    penalty = weight_decay / 2 * weight.double().square().sum()
    gradient = torch.cat(
        [slope / len(features) + weight_decay * weight, bias_slope / len(features)], 1
    )
    return (loss / len(features) + penalty).item(), gradient


def _second_moments(features: Float[Tensor, "n d"]) -> Float[Tensor, "d d"]:
    """X'X/n over all rows: one from a sample needs five times the iterations on real features."""
    return features.T @ features / len(features)


def _preconditioner(
    moments: Float[Tensor, "d d"], weight_decay: float, classes: int
) -> Callable[[Tensor], Tensor]:
    """Solves with the block-diagonal model Hessian of one class row (weights, bias)."""
    curvature = (1 - 1 / classes) / classes
    floor = weight_decay + 1e-5 * curvature * moments.diagonal().mean() + 1e-12
    hessian = curvature * moments + floor * torch.eye(
        len(moments), dtype=moments.dtype, device=moments.device
    )
    factor = torch.linalg.cholesky(hessian)

    def solve(gradient: Tensor) -> Tensor:
        weights = torch.cholesky_solve(gradient[:, :-1].T, factor).T
        return torch.cat([weights, gradient[:, -1:] / curvature], 1)

    return solve


def _lbfgs(
    objective: Callable[[Tensor], tuple[float, Tensor]],
    point: Tensor,
    precondition: Callable[[Tensor], Tensor],
    tolerance: float,
) -> Tensor:
    """L-BFGS whose initial inverse Hessian is the preconditioner, with step halving (Armijo)."""
    value, gradient = objective(point)
    history: list[tuple[Tensor, Tensor, Tensor]] = []
    for _ in range(MOST_ITERATIONS):
        direction = _two_loop(gradient, history, precondition)
        decrease = (gradient * direction).sum().item()
        if decrease / 2 < tolerance:
            break
        accepted = _halve_until_lower(objective, point, value, direction, decrease)
        if accepted is None:
            break
        moved, value, slope = accepted
        step, change = moved - point, slope - gradient
        curvature = (step * change).sum()
        if curvature > 0:
            history = [*history[1 - MEMORY :], (step, change, curvature)]
        point, gradient = moved, slope
    return point


def _two_loop(
    gradient: Tensor,
    history: list[tuple[Tensor, Tensor, Tensor]],
    precondition: Callable[[Tensor], Tensor],
) -> Tensor:
    """The L-BFGS inverse Hessian times the gradient (Nocedal and Wright, algorithm 7.4)."""
    q, alphas = gradient.clone(), []
    for step, change, curvature in reversed(history):
        alphas.append((step * q).sum() / curvature)
        q -= alphas[-1] * change
    direction = precondition(q)
    if history:
        _, change, curvature = history[-1]
        direction *= curvature / (change * precondition(change)).sum()
    for (step, change, curvature), alpha in zip(history, reversed(alphas), strict=True):
        direction += step * (alpha - (change * direction).sum() / curvature)
    return direction


def _halve_until_lower(
    objective: Callable[[Tensor], tuple[float, Tensor]],
    point: Tensor,
    value: float,
    direction: Tensor,
    decrease: float,
) -> tuple[Tensor, float, Tensor] | None:
    """The first of the steps 1, 1/2, 1/4 ... that lowers the objective, or None."""
    for halvings in range(20):
        length = 0.5**halvings
        moved = point - length * direction
        lower, slope = objective(moved)
        if lower <= value - 1e-4 * length * decrease:
            return moved, lower, slope
    return None


def _held_out_rows(rows: int) -> list[slice]:
    """The last tenth of many rows; each third of few rows."""
    if rows >= FEW_ROWS:
        return [slice(rows - rows // 10, rows)]
    edges = [rows * i // FOLDS for i in range(FOLDS + 1)]
    return [slice(a, b) for a, b in itertools.pairwise(edges) if b > a and b - a < rows]


class _Fold(NamedTuple):
    features: Float[Tensor, "n d"]
    labels: Int[Tensor, " n"]
    moments: Float[Tensor, "d d"]
    held_out: Float[Tensor, "h d"]
    held_out_labels: Int[Tensor, " h"]


def _fold(features: Tensor, labels: Tensor, moments: Tensor, left_out: slice) -> _Fold:
    """The rows to fit and those left out; the moments of the first follow from those of all."""
    held_out = features[left_out]
    rest = len(features) - len(held_out)
    kept = (moments * len(features) - held_out.T @ held_out) / rest
    fit, fit_labels = _without(features, left_out), _without(labels, left_out)
    return _Fold(fit, fit_labels, kept, held_out, labels[left_out])


def _without(values: Tensor, left_out: slice) -> Tensor:
    before, after = values[: left_out.start], values[left_out.stop :]
    return before if len(after) == 0 else torch.cat([before, after])


def _held_out_outcome(folds: Sequence[_Fold], models: Sequence[SoftmaxModel]) -> tuple[int, float]:
    """Right predictions and summed cross-entropy over the held-out rows of all folds."""
    right, loss = 0, 0.0
    for fold, model in zip(folds, models, strict=True):
        logits = model.logits(fold.held_out)
        right += int((logits.argmax(1) == fold.held_out_labels).sum())
        loss += cross_entropy(logits, fold.held_out_labels, reduction="sum").item()
    return right, loss


def _check(train: Tensor, train_labels: Tensor, test: Tensor, test_labels: Tensor) -> None:
    check_split(train, train_labels, "train")
    check_split(test, test_labels, "test")
    check_classes(train_labels)
    if train.shape[1] != test.shape[1]:
        raise ValueError(
            f"Train features have {train.shape[1]} columns and test features {test.shape[1]}: "
            "both must come from the same encoder and layer."
        )


def _result(
    scores: Float[Tensor, "n c"], labels: Tensor, weight_decay: float, started: float
) -> ProbeResult:
    confidence, predictions = scores.softmax(1).max(1)
    correct = predictions == labels
    return ProbeResult(
        accuracy=correct.double().mean().item(),
        correct=correct,
        weight_decay=weight_decay,
        seconds=time.perf_counter() - started,
        predictions=predictions,
        confidence=confidence,
    )
