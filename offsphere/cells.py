"""Cells: the treatment variable. A cell shrinks each side by a power of its own norm.

shrink(x, g) = x / |x|**g, and a score is always left' . right'. The corners of the square of
exponents (g_left, g_right) are cosine (1, 1), qnorm (1, 0), dnorm (0, 1) and dot (0, 0); the name
says which side IS normalised. `learnable` lies inside: g = sigmoid of two scalars, starting at 0.5
("Beyond the Unit Hypersphere", Eq. 7 and 20).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from offsphere.names import CELLS, CORNERS, parse_cell
from offsphere.precision import at_least_float32, compiling, outside_autocast, transformed

if TYPE_CHECKING:
    from jaxtyping import Float

__all__ = ["CELLS", "Cell", "calibrate", "calibration_ratio", "shrink"]

SMALLEST_NORM = 1e-12
"""Shorter vectors count as this long, so that zero stays finite in value and gradient."""
ROUNDED_UP = 1.001
"""No product of two rows that are to have length one is larger."""
SLAB = 2**22
"""Scores that a calibration holds at once (16 MB in float32)."""


def shrink(x: Float[Tensor, "*n d"], exponent: float | Tensor) -> Float[Tensor, "*n d"]:
    """x / |x|**exponent, with the norm in float32 or better; exponent 0.0 returns x itself."""
    if isinstance(exponent, float) and exponent == 0.0:
        return x
    x = at_least_float32(x)
    if isinstance(exponent, float) and exponent == 1.0:
        return _unit_op(x)[0] if _compiled_for_cpu(x) else x / _norms(x)
    return x * _norms(x) ** -exponent


def _compiled_for_cpu(x: Tensor) -> bool:
    """Inductor would add squares up in another order, and the temperature multiply what differs.

    What is exported (`torch.export`) keeps torch's own operations.
    """
    steps = compiling() and not torch.compiler.is_exporting()
    return steps and x.device.type == "cpu" and not transformed()


def _norms(x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n 1"]:
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(SMALLEST_NORM)


@torch.library.custom_op("offsphere::unit", mutates_args=())
def _unit_op(x: Tensor) -> list[Tensor]:
    """x / |x| and |x| in a compiled step, to the bit."""
    norm = _norms(x).contiguous()
    return [(x / norm).contiguous(), norm]


@_unit_op.register_fake
def _(x):
    return [x.new_empty(x.shape), x.new_empty((*x.shape[:-1], 1))]


@torch.library.custom_op("offsphere::unit_backward", mutates_args=())
def _unit_backward_op(x: Tensor, norm: Tensor, grad: Tensor) -> Tensor:
    """As autograd goes, through the quotient and through the norm."""
    of_norm = (-grad * (x / norm / norm)).sum(-1, keepdim=True)
    of_norm = of_norm.masked_fill_(norm <= SMALLEST_NORM, 0.0)
    return (grad / norm + of_norm * (x / norm)).contiguous()


@_unit_backward_op.register_fake
def _(x, norm, grad):
    return x.new_empty(x.shape)


_unit_op.register_autograd(
    lambda ctx, grads: _unit_backward_op(*ctx.saved_tensors, grads[0]),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0], output[1]),
)


class Cell(nn.Module):
    """The normalisation cell: raw left and right sides in, shrunk sides out.

    `Cell("qnorm")` takes a name (see `CELLS`) or a string such as "0.3,0.7";
    `Cell(exponents=(0.3, 0.7))` takes any fixed pair of exponents.
    """

    def __init__(
        self, name: str = "cosine", *, exponents: tuple[float, float] | None = None
    ) -> None:
        super().__init__()
        if exponents is None:
            parsed = parse_cell(name)
            exponents = CORNERS.get(parsed) if isinstance(parsed, str) else parsed
        if exponents is not None and not all(math.isfinite(g) for g in exponents):
            raise ValueError(f"Expected two finite exponents for a cell, got {exponents}.")
        self.name = "learnable" if exponents is None else _name_of(exponents)
        self._fixed = None if exponents is None else (float(exponents[0]), float(exponents[1]))
        if self._fixed is None:
            self.logits = nn.Parameter(torch.zeros(2))
            """sigmoid(logits) are the (left, right) exponents of the learnable cell."""

    @property
    def exponents(self) -> tuple[float, float] | tuple[Tensor, Tensor]:
        """The (left, right) exponents: numbers, or tensors that carry a gradient if learnable."""
        if self._fixed is not None:
            return self._fixed
        left, right = torch.sigmoid(self.logits).unbind()
        return left, right

    @torch.no_grad()
    def numbers(self) -> tuple[float, float]:
        """The (left, right) exponents as they stand, without a gradient."""
        left, right = self.exponents
        return float(left), float(right)

    def shrink_left(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d"]:
        """The left side alone (anchors, images, queries)."""
        return shrink(x, self.exponents[0])

    def shrink_right(self, x: Float[Tensor, "*m d"]) -> Float[Tensor, "*m d"]:
        """The right side alone (candidates, texts, documents, a queue)."""
        return shrink(x, self.exponents[1])

    def forward(
        self, left: Float[Tensor, "*n d"], right: Float[Tensor, "*m d"]
    ) -> tuple[Float[Tensor, "*n d"], Float[Tensor, "*m d"]]:
        """Both sides shrunk; one tensor serves as both where the two are the same by definition."""
        _check_sides(left, right)
        shrunk = self.shrink_left(left)
        if right is left and self._fixed is not None and self._fixed[0] == self._fixed[1]:
            return shrunk, shrunk
        return shrunk, self.shrink_right(right)

    def scores(
        self, left: Float[Tensor, "n d"], right: Float[Tensor, "m d"]
    ) -> Float[Tensor, "n m"]:
        """The whole matrix of scores left'_i . right'_j, for evaluation."""
        left, right = (at_least_float32(x) for x in self(left, right))
        with outside_autocast(left):
            return left @ right.T

    def extra_repr(self) -> str:
        return self.name


@torch.no_grad()
def calibration_ratio(
    cell: Cell,
    left: Float[Tensor, "n d"],
    right: Float[Tensor, "m d"],
    *,
    exclude: tuple[int, ...] = (0,),
    groups: int = 1,
) -> Tensor:
    """Mean within-row spread of the negatives' scores under this cell, over that under cosine.

    Rows and columns are averaged. `exclude` names the diagonals j - i that hold no negatives:
    (0,) for aligned pairs, (0, n, -n) for stacked views, () for none. With `groups` a row's
    negatives are those of its own one of so many equal groups of rows, and `exclude` holds there.
    """
    shrunk_left, shrunk_right = cell(left, right)
    with outside_autocast(left):
        spread = _row_spread(shrunk_left, shrunk_right, exclude, groups)
        reference = _row_spread(shrink(left, 1.0), shrink(right, 1.0), exclude, groups)
    if not (reference > 0 and torch.isfinite(spread) and spread > 0):
        raise ValueError(
            "Cannot calibrate the cell's scale: expected negatives with different scores, got a "
            f"mean within-row spread of {reference.item():.3g} for cosine and {spread.item():.3g} "
            f"for {cell.name}. Use more negatives, an encoder that is not constant, or scale=fixed."
        )
    return spread / reference


def calibrate(
    ratio: Float[Tensor, ""],
    cell: Cell,
    left: Float[Tensor, "n d"],
    right: Float[Tensor, "m d"],
    exclude: tuple[int, ...],
    *,
    training: bool,
) -> None:
    """Write the ratio that the first training batch gives; one that is known stays."""
    if compiling():
        exponents = torch.stack([torch.as_tensor(g) for g in cell.exponents])
        _calibrate_op(ratio, left, right, exponents, list(exclude), training)
    elif ratio.isnan():
        if not training:
            raise ValueError(
                "Expected a calibrated loss, got one before its first training batch. Call it once "
                "in training mode, load a checkpoint, or use scale=fixed."
            )
        ratio.copy_(calibration_ratio(cell, left, right, exclude=exclude))


@torch.library.custom_op("offsphere::calibrate", mutates_args=("ratio",))
def _calibrate_op(
    ratio: Tensor,
    left: Tensor,
    right: Tensor,
    exponents: Tensor,
    exclude: list[int],
    training: bool,
) -> None:
    """The same in a compiled step, whose values are known only when it runs."""
    g_left, g_right = exponents.tolist()
    cell = Cell(exponents=(g_left, g_right))
    calibrate(ratio, cell, left, right, tuple(exclude), training=training)


@_calibrate_op.register_fake
def _(ratio, left, right, exponents, exclude, training):
    return None


def _row_spread(left: Tensor, right: Tensor, exclude: tuple[int, ...], groups: int) -> Tensor:
    """Mean standard deviation of a row's scores, rows and columns averaged."""
    if groups > 1:
        pairs = zip(left.chunk(groups), right.chunk(groups), strict=True)
        return torch.stack([_row_spread(a, b, exclude, 1) for a, b in pairs]).mean()
    backwards = tuple(-offset for offset in exclude)
    one_way = _mean_row_std(left, right, exclude)
    return (one_way + _mean_row_std(right, left, backwards)) / 2


def _mean_row_std(left: Tensor, right: Tensor, exclude: tuple[int, ...]) -> Tensor:
    left, right = left.float(), right.float()
    slab = max(1, min(1024, SLAB // len(right)))
    stds = []
    for start in range(0, len(left), slab):
        scores = left[start : start + slab] @ right.T
        count = scores.new_full((len(scores), 1), len(right))
        crossing = [start + k for k in exclude if -len(scores) < start + k < len(right)]
        for offset in crossing:
            diagonal = scores.diagonal(offset).zero_()
            first = max(0, -offset)
            count[first : first + len(diagonal)] -= 1
        scores -= scores.sum(1, keepdim=True) / count
        for offset in crossing:
            scores.diagonal(offset).zero_()
        stds.append((scores.square_().sum(1, keepdim=True) / count).sqrt())
    return torch.cat(stds).mean()


def _name_of(exponents: tuple[float, float]) -> str:
    pair = (float(exponents[0]), float(exponents[1]))
    corner = [name for name, at in CORNERS.items() if at == pair]
    return corner[0] if corner else f"{pair[0]:g},{pair[1]:g}"


def _check_sides(left: Tensor, right: Tensor) -> None:
    for side, x in (("left", left), ("right", right)):
        if not x.is_floating_point():
            raise ValueError(
                f"Expected floating-point embeddings, got {side} of {x.dtype}. Use .float()."
            )
    if left.shape[-1] != right.shape[-1]:
        raise ValueError(
            f"Expected two sides of one width, got left {tuple(left.shape)} and right "
            f"{tuple(right.shape)}. Project both to the same number of features."
        )
