"""Why norms grow under a cosine loss, and how a large norm slows learning down.

    python theory/norm_growth.py
    python theory/norm_growth.py --radii 1 2 4 --class-runs=1

"On the Importance of Embedding Norms in Self-Supervised Learning" (Draganov et al., ICML 2025) and
the notebook of its simulations: 500 random pairs in 20 dimensions, both sides of a pair moved by
plain gradient descent on minus the mean cosine until that mean exceeds 1 - 0.001. The gradient of a
cosine is tangent and falls with 1 / norm, so a step turns a vector by an angle that falls with
1 / norm^2, and can only lengthen it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.random import default_rng

from theory.lab import LabSettings, drawing, main, run_lab

if TYPE_CHECKING:
    from jaxtyping import Float, Int, Real
    from matplotlib.figure import Figure
    from numpy import ndarray

NAME = "norm_growth"
# Steps until the mean cosine exceeds 0.999, by the norm of all vectors (the paper's notebook).
PUBLISHED_STEPS = {0.25: 6, 0.5: 24, 0.75: 54, 1.0: 96, 2.0: 385, 3.0: 869, 4.0: 1547}
PUBLISHED_STEPS |= {5.0: 2416, 6.0: 3463, 7.0: 4737, 8.0: 6156, 9.0: 7822, 10.0: 9662}
# Steps at norm 1 for the mixtures -24/25, -23/25 ... 24/25 of `mixed_pairs` (same notebook).
PUBLISHED_MIXTURE_STEPS = (
    *(0, 17, 28, 37, 43, 49, 54, 59, 63, 66, 70, 73, 76, 79, 81, 83, 85, 87, 88, 90, 91, 92, 94),
    *(95, 96, 97, 98, 99, 100, 102, 102, 104, 106, 107, 110, 112, 114, 116, 120, 123, 126, 130),
    *(134, 138, 144, 150, 158, 169, 187),
)
MIXTURES = tuple(k / 25 for k in range(-24, 25))
CLASS_WEIGHTS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Config(LabSettings):
    pairs: int = 500
    dimension: int = 20
    lr: float = 10.0
    """Of plain gradient descent on minus the mean cosine: a pair moves by lr / pairs."""
    tolerance: float = 1e-3
    """The end: a mean cosine above 1 minus this."""
    dot_first: bool = True
    """The first step follows the dot product over the squared norm, as in the paper's notebook:
    vectors that start opposite each other are shortened once and arrive 4 % sooner."""
    radii: tuple[float, ...] = tuple(PUBLISHED_STEPS)
    """Norms that all vectors start with."""
    cut: float = 3.0
    """Cut-initialisation: all vectors are divided by this at the start."""
    decay: float = 0.2
    """Weight decay of the simulation in which a norm settles."""
    class_runs: int = 5
    """Repetitions of the class-imbalance simulation; 0 leaves it out."""
    class_epochs: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.pairs, self.dimension - 1, self.class_epochs) < 1 or self.class_runs < 0:
            raise ValueError(
                "Expected pairs and class_epochs of at least 1, a dimension of at least 2 and "
                f"class_runs of at least 0, got {self.pairs}, {self.class_epochs}, "
                f"{self.dimension} and {self.class_runs}."
            )
        if len(self.radii) < 3 or min(self.radii) <= 0:
            raise ValueError(f"Expected at least three radii above 0, got {self.radii}.")
        if not (self.lr > 0 and 0 < self.tolerance < 1 and self.cut > 0):
            raise ValueError(
                "Expected lr and cut above 0 and a tolerance between 0 and 1, got "
                f"{self.lr}, {self.cut} and {self.tolerance}."
            )
        if not 0 < self.decay * self.lr / self.pairs < 1:
            raise ValueError(
                f"decay * lr / pairs must lie between 0 and 1, got decay={self.decay}."
            )


def cosine_gradient(
    left: Float[ndarray, "n d"], right: Float[ndarray, "n d"]
) -> Float[ndarray, "n d"]:
    """Gradient of -cos(left_i, right_i) in left_i: tangent, and sin(angle) / |left_i| long."""
    norms = np.linalg.norm(left, axis=1, keepdims=True)
    u, v = left / norms, right / np.linalg.norm(right, axis=1, keepdims=True)
    return ((u * v).sum(1, keepdims=True) * u - v) / norms


def info_nce_gradient(
    left: Float[ndarray, "n d"], right: Float[ndarray, "n d"], temperature: float
) -> Float[ndarray, "n d"]:
    """Gradient in left_i of the i-th term of one-way InfoNCE on cosines: tangent as well."""
    norms = np.linalg.norm(left, axis=1, keepdims=True)
    u, v = left / norms, right / np.linalg.norm(right, axis=1, keepdims=True)
    logits = u @ v.T / temperature
    weights = np.exp(logits - logits.max(1, keepdims=True))
    pull = weights / weights.sum(1, keepdims=True) @ v - v
    return (pull - (pull * u).sum(1, keepdims=True) * u) / (temperature * norms)


def random_pairs(
    pairs: int, dimension: int, seed: int
) -> tuple[Float[ndarray, "n d"], Float[ndarray, "n d"]]:
    """Independent directions on the unit sphere, two for each pair."""
    left, right = default_rng(seed).standard_normal((2, pairs, dimension))
    return _unit(left), _unit(right)


def mixed_pairs(
    pairs: int, dimension: int, mixture: float, seed: int
) -> tuple[Float[ndarray, "n d"], Float[ndarray, "n d"]]:
    """Pairs from nearly equal (mixture -1) over random (0) to nearly opposite (1)."""
    left, right = random_pairs(pairs, dimension, seed)
    return left, _unit((1 - abs(mixture)) * right - mixture * left)


def steps_to_align(
    left: Float[ndarray, "n d"],
    right: Float[ndarray, "n d"],
    lr: float,
    tolerance: float = 1e-3,
    *,
    dot_first: bool = False,
    cut: float = 1.0,
    grad_power: float = 0.0,
) -> int:
    """The protocol, step by step: gradient descent on both sides until the mean cosine is near 1.

    `cut` and `grad_power` are the paper's interventions on the norms.
    """
    import torch
    from torch.nn.functional import cosine_similarity

    from offsphere.interventions import cut_initialisation, grad_scale

    sides = torch.nn.ParameterList(torch.from_numpy(x.astype(np.float64)) for x in (left, right))
    cut_initialisation(sides, cut)
    descent = torch.optim.SGD(sides.parameters(), lr=lr)
    for step in range(1_000_000):
        z, w = (grad_scale(side, grad_power) for side in sides)
        cosine = cosine_similarity(z, w).mean()
        if cosine.item() > 1 - tolerance:
            return step
        if dot_first and step == 0:
            cosine = (z * w).sum(1).mean() / (z.detach() ** 2).sum(1).mean()
        loss = -cosine
        descent.zero_grad()
        loss.backward()
        descent.step()
    raise ValueError("The pairs were not aligned after a million steps: raise lr.")


def steps_in_plane(
    angles: Float[ndarray, " n"],
    radii: Sequence[float],
    rate: float,
    tolerance: float = 1e-3,
    *,
    dot_first: bool = False,
    grad_power: float = 0.0,
) -> Int[ndarray, " r"]:
    """`steps_to_align` for pairs of equal norms, exactly and for all radii at once.

    A pair stays in its plane and its norms stay equal: with s = rate |z|**(power - 1) sin(angle), a
    step turns each side by arctan(s / |z|) towards the other and lengthens it to hypot(|z|, s).
    A first step along the dot product adds rate / |z|^2 times the other side to each side.
    """
    norm = np.repeat(np.asarray(radii, dtype=np.float64)[:, None], len(angles), axis=1)
    angle = np.repeat(np.asarray(angles, dtype=np.float64)[None], len(norm), axis=0)
    steps, open_rows = np.zeros(len(norm), dtype=np.int64), np.arange(len(norm))
    for step in range(1_000_000):
        apart = np.cos(angle).mean(1) <= 1 - tolerance
        steps[open_rows[~apart]] = step
        open_rows, angle, norm = open_rows[apart], angle[apart], norm[apart]
        if not len(open_rows):
            return steps
        if dot_first and step == 0:
            pull = rate * norm ** (grad_power - 2)
            across, along = (1 - pull) * np.sin(angle / 2), (1 + pull) * np.cos(angle / 2)
            angle, norm = 2 * np.arctan2(across, along), norm * np.hypot(across, along)
        else:
            stride = rate * np.sin(angle) * norm ** (grad_power - 1)
            angle, norm = angle - 2 * np.arctan(stride / norm), np.hypot(norm, stride)
    raise ValueError("The pairs were not aligned after a million steps: raise lr.")


def settled_norm(rate: float, decay: float, sine: float) -> float:
    """The norm that weight decay settles at when every partner stands at one angle (ours).

    |z|^2 = (1 - rate decay)^2 |z|^2 + (rate sine / |z|)^2; for small rates it is
    (rate sine^2 / (2 decay))^(1/4).
    """
    return float((rate * sine) ** 0.5 / (1 - (1 - rate * decay) ** 2) ** 0.25)


def norms_under_decay(
    starts: Sequence[float],
    rate: float,
    decay: float,
    sine: float,
    steps: int,
    dimension: int,
    seed: int,
) -> Float[ndarray, "steps starts"]:
    """Norms of vectors after each step towards ever new partners at one angle, with decay."""
    rng, norms = default_rng(seed), []
    z = np.zeros((len(starts), dimension))
    z[:, 0] = starts
    for _ in range(steps):
        u = _unit(z)
        across = rng.standard_normal(z.shape)
        across = _unit(across - (across * u).sum(1, keepdims=True) * u)
        partner = (1 - sine**2) ** 0.5 * u + sine * across
        z = (1 - rate * decay) * z - rate * cosine_gradient(z, partner)
        norms.append(np.linalg.norm(z, axis=1))
    return np.array(norms)


def growth_exponent(radii: Sequence[float], steps: Real[ndarray, " r"]) -> float:
    """The power of the norm that steps grow with: the slope of log steps over log norm."""
    return float(np.polyfit(np.log(radii), np.log(np.maximum(steps, 1)), 1)[0])


def quadratic_fit(radii: Sequence[float], steps: Real[ndarray, " r"]) -> tuple[float, float]:
    """The coefficient a of steps = a radius^2, by least squares, and its R^2."""
    squares, steps = np.asarray(radii) ** 2, np.asarray(steps, dtype=np.float64)
    a = (squares @ steps) / (squares @ squares)
    unexplained = ((steps - a * squares) ** 2).sum() / ((steps - steps.mean()) ** 2).sum()
    return float(a), float(1 - unexplained)


def run(config: Config) -> dict[str, float | str]:
    """Measure everything the module is about; figures and metrics go into the run's folder."""
    return run_lab(config, NAME, lambda: measure(config))


def measure(config: Config) -> tuple[dict[str, float | str], dict[str, Figure]]:
    """The metrics and figures of one set of random pairs."""
    from theory.class_norms import norms_by_class

    rate = config.lr / config.pairs
    left, right = random_pairs(config.pairs, config.dimension, config.seed)
    angles = np.arccos((left * right).sum(1))
    by_power = {
        power: steps_in_plane(
            angles,
            config.radii,
            rate,
            config.tolerance,
            dot_first=config.dot_first,
            grad_power=power,
        )
        for power in (0.0, 1.0, 2.0)
    }
    start_angles, mixture_steps = _mixture_steps(config)
    metrics: dict[str, float | str] = dict(_identities(config))
    metrics |= _radius_metrics(config, by_power)
    metrics |= _mixture_metrics(config, start_angles, mixture_steps)
    uncut, cut = (
        steps_to_align(
            config.cut * left,
            config.cut * right,
            config.lr,
            config.tolerance,
            dot_first=config.dot_first,
            cut=c,
        )
        for c in (1.0, config.cut)
    )
    metrics |= {"cut/steps_before": uncut, "cut/steps_after": cut, "cut/speed_up": uncut / cut}
    settled = settled_norm(rate, config.decay, 1.0)
    starts, steps = [0.3 * settled, settled, 3 * settled], int(8 / (config.decay * rate))
    tracks = norms_under_decay(
        starts, rate, config.decay, 1.0, steps, config.dimension, config.seed
    )
    reached = np.abs(tracks[-1] / settled - 1).max()
    metrics |= {"decay/settled_norm": settled, "decay/largest_deviation": float(reached)}
    classes = norms_by_class(CLASS_WEIGHTS, config.class_runs, config.class_epochs, config.seed)
    metrics |= _class_metrics(classes)
    figures = {
        "steps": _draw_steps(config, by_power, start_angles, mixture_steps),
        "norms": _draw_norms(tracks, settled, classes),
    }
    return metrics, figures


def _identities(config: Config) -> dict[str, float]:
    """Largest deviations from the identities of E.1 on random vectors of many norms."""
    rng = default_rng(config.seed)
    left, right = rng.standard_normal((2, config.pairs, config.dimension))
    left *= rng.uniform(0.1, 10, (config.pairs, 1))
    norms = np.linalg.norm(left, axis=1)
    gradient = cosine_gradient(left, right)
    cosine = (_unit(left) * _unit(right)).sum(1)
    lengths = np.linalg.norm(gradient, axis=1)
    grown = np.linalg.norm(left - config.lr * gradient, axis=1) ** 2
    expected = norms**2 + config.lr**2 * lengths**2
    contrastive = info_nce_gradient(left, right, 0.1)
    return {
        "identity/radial_cosine": float(np.abs((gradient * _unit(left)).sum(1)).max()),
        "identity/radial_info_nce": float(np.abs((contrastive * _unit(left)).sum(1)).max()),
        "identity/length": float(np.abs(lengths - np.sqrt(1 - cosine**2) / norms).max()),
        "identity/growth": float(np.abs(grown / expected - 1).max()),
        "identity/shrunk": int((grown < norms**2).sum()),
    }


def _radius_metrics(config: Config, by_power: dict[float, Int[ndarray, " r"]]) -> dict[str, float]:
    steps = by_power[0.0]
    metrics: dict[str, float] = {
        f"steps/r{r:g}": int(count) for r, count in zip(config.radii, steps, strict=True)
    }
    metrics["fit/coefficient"], metrics["fit/r_squared"] = quadratic_fit(config.radii, steps)
    metrics["fit/exponent"] = growth_exponent(config.radii, steps)
    for power in (1.0, 2.0):
        exponent = growth_exponent(config.radii, by_power[power])
        metrics[f"grad_scale/exponent_power{power:g}"] = exponent
    known = [
        (PUBLISHED_STEPS[r], count)
        for r, count in zip(config.radii, steps, strict=True)
        if r in PUBLISHED_STEPS
    ]
    if known and _is_published_protocol(config):
        deviations = [abs(measured / published - 1) for published, measured in known]
        metrics["published/radii"] = len(known)
        metrics["published/largest_deviation"] = float(max(deviations))
        metrics["published/outside_3_percent_and_one_step"] = sum(
            abs(measured - published) > max(0.03 * published, 1) for published, measured in known
        )
    return metrics


def _mixture_steps(config: Config) -> tuple[list[float], list[int]]:
    """For each mixture, the angle of the mean cosine and the steps to align at norm 1."""
    rate, angles, steps = config.lr / config.pairs, [], []
    for mixture in MIXTURES:
        left, right = mixed_pairs(config.pairs, config.dimension, mixture, config.seed)
        cosine = np.clip((left * right).sum(1), -1, 1)
        angles.append(float(np.arccos(cosine.mean())))
        counts = steps_in_plane(
            np.arccos(cosine), [1.0], rate, config.tolerance, dot_first=config.dot_first
        )
        steps.append(int(counts[0]))
    return angles, steps


def _mixture_metrics(config: Config, angles: list[float], steps: list[int]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for name, mixture in (("near", -23 / 25), ("right", 0.0), ("opposite", 24 / 25)):
        at = MIXTURES.index(mixture)
        metrics[f"angle/{name}"], metrics[f"angle/{name}_steps"] = angles[at], steps[at]
    if _is_published_protocol(config):
        off = np.abs(np.array(steps) - PUBLISHED_MIXTURE_STEPS)
        metrics["published/angle_largest_gap_in_steps"] = int(off.max())
    return metrics


def _is_published_protocol(config: Config) -> bool:
    own = (config.pairs, config.dimension, config.lr, config.tolerance, config.dot_first)
    return own == (500, 20, 10.0, 1e-3, True)


def _class_metrics(classes: Float[ndarray, "runs times classes"]) -> dict[str, float]:
    """The norms at the end, their growth, and how often the most frequent class grew most."""
    if not len(classes):
        return {}
    growth = classes[:, -1] / classes[:, 0]
    metrics = {}
    for k, weight in enumerate(CLASS_WEIGHTS):
        metrics[f"class/norm_weight{weight}"] = float(classes[:, -1, k].mean())
        metrics[f"class/growth_weight{weight}"] = float(growth[:, k].mean())
    metrics["class/frequent_grew_most"] = float((growth.argmax(1) == growth.shape[1] - 1).mean())
    metrics["class/frequent_outgrew_rare"] = float((growth[:, -1] > growth[:, 0]).mean())
    return metrics


def _unit(x: Float[ndarray, "n d"]) -> Float[ndarray, "n d"]:
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def _draw_steps(
    config: Config,
    by_power: dict[float, Int[ndarray, " r"]],
    angles: list[float],
    steps: list[int],
) -> Figure:
    figure, (norms, starts) = drawing(10, 4, 1, 2)
    for power, counts in by_power.items():
        label = "plain" if power == 0 else f"gradient times norm^{power:g}"
        norms.loglog(config.radii, counts, "o-", label=label)
    a, _ = quadratic_fit(config.radii, by_power[0.0])
    norms.loglog(config.radii, [a * r**2 for r in config.radii], ":k", label=f"{a:.1f} norm^2")
    norms.set(xlabel="norm at the start", ylabel="steps until the mean cosine is near 1")
    starts.plot(angles, steps, "o-", label="measured, norm 1")
    if _is_published_protocol(config):
        norms.loglog(*zip(*PUBLISHED_STEPS.items(), strict=True), "kx", label="published")
        starts.plot(angles, PUBLISHED_MIXTURE_STEPS, "kx", label="published")
    starts.set(xlabel="angle at the start", ylabel="steps")
    norms.legend(fontsize=8)
    starts.legend(fontsize=8)
    return figure


def _draw_norms(
    tracks: Float[ndarray, "steps starts"],
    settled: float,
    classes: Float[ndarray, "runs times classes"],
) -> Figure:
    figure, (decay, by_class) = drawing(10, 4, 1, 2)
    decay.plot(tracks / settled)
    decay.axhline(1, color="k", linestyle=":")
    decay.set(xlabel="step", ylabel="norm under weight decay / settled norm")
    if len(classes):
        for k, weight in enumerate(CLASS_WEIGHTS):
            by_class.plot(classes[:, :, k].mean(0), label=f"class of weight {weight}")
        by_class.legend(fontsize=8)
    by_class.set(xlabel="epoch", ylabel="mean embedding norm")
    return figure


if __name__ == "__main__":
    main(Config, run, __doc__)
