"""Tangent gradients, growing norms, and the published counts of steps."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import linregress

from offsphere.losses import info_nce
from theory import class_norms
from theory import norm_growth as growth

PUBLISHED = Path(__file__).parents[2] / "results/published/embedding_norms_simulation.csv"


def vectors(n: int, d: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Random pairs whose norms span four orders of magnitude."""
    rng = np.random.default_rng(seed)
    left, right = rng.standard_normal((2, n, d))
    return left * 10 ** rng.uniform(-2, 2, (n, 1)), right * 10 ** rng.uniform(-2, 2, (n, 1))


def test_cosine_gradient_is_autograd_s_tangent_and_sine_over_norm_long():
    left, right = vectors(1000, 7)
    z = torch.tensor(left, requires_grad=True)
    (-torch.cosine_similarity(z, torch.tensor(right))).sum().backward()
    gradient, norms = growth.cosine_gradient(left, right), np.linalg.norm(left, axis=1)
    np.testing.assert_allclose(gradient * norms[:, None], z.grad * norms[:, None], atol=1e-12)
    cosine = (left * right).sum(1) / norms / np.linalg.norm(right, axis=1)
    lengths = np.linalg.norm(gradient, axis=1) * norms
    np.testing.assert_allclose(lengths, np.sin(np.arccos(cosine)), atol=1e-10)
    assert np.abs((gradient * left).sum(1)).max() < 1e-10


def test_info_nce_gradient_is_autograd_s_and_tangent():
    left, right = vectors(40, 6, seed=1)
    z = torch.tensor(left, requires_grad=True)
    unit_right = torch.nn.functional.normalize(torch.tensor(right), dim=1)
    loss = info_nce(torch.nn.functional.normalize(z, dim=1), unit_right, 0.3, both_ways=False)
    (40 * loss).backward()
    gradient, norms = growth.info_nce_gradient(left, right, 0.3), np.linalg.norm(left, axis=1)
    np.testing.assert_allclose(gradient * norms[:, None], z.grad * norms[:, None], atol=1e-10)
    assert np.abs((gradient * left).sum(1)).max() < 1e-10


def test_a_step_turns_by_the_sine_over_the_squared_norm():
    """E.1: the effective rate falls as one over the squared norm, over 1,000 pairs."""
    left, right = vectors(1000, 7, seed=4)
    norms, rate = np.linalg.norm(left, axis=1), 1e-7
    moved = left - rate * (norms**2)[:, None] * growth.cosine_gradient(left, right)
    tangent = moved / norms[:, None] - left / norms[:, None]
    cosine = (left * right).sum(1) / norms / np.linalg.norm(right, axis=1)
    expected = rate * np.sin(np.arccos(cosine))
    np.testing.assert_allclose(np.arctan(np.linalg.norm(tangent, axis=1)), expected, rtol=1e-6)


@pytest.mark.parametrize("gradient", [growth.cosine_gradient, growth.info_nce_gradient])
def test_a_step_adds_the_squares_so_that_1000_norms_only_grow(gradient):
    left, right = vectors(1000, 5, seed=2)
    slope = gradient(left, right, *((0.5,) if gradient is growth.info_nce_gradient else ()))
    rate = 10 ** np.random.default_rng(3).uniform(-3, 1, (1000, 1))
    before = (left**2).sum(1)
    after = ((left - rate * slope) ** 2).sum(1)
    np.testing.assert_allclose(after, before + ((rate * slope) ** 2).sum(1), rtol=1e-10)
    assert (after >= before * (1 - 1e-15)).all()


@pytest.mark.parametrize("dot_first", [True, False])
@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
def test_the_plane_gives_the_steps_of_the_real_descent(power, dot_first):
    left, right = growth.random_pairs(50, 6, seed=4)
    angles = np.arccos((left * right).sum(1))
    radii = [0.3, 0.7, 1.5]
    expected = [
        growth.steps_to_align(r * left, r * right, 1.0, dot_first=dot_first, grad_power=power)
        for r in radii
    ]
    found = growth.steps_in_plane(angles, radii, 1 / 50, dot_first=dot_first, grad_power=power)
    assert found.tolist() == expected
    assert max(expected) > 20


def test_the_published_numbers_are_those_of_the_results_folder():
    with PUBLISHED.open() as file:
        rows = list(csv.DictReader(file))
    steps = {float(row["norm"]): int(row["value"]) for row in rows if row["norm"]}
    assert steps == growth.PUBLISHED_STEPS
    by_angle = {float(row["start_angle"]): int(row["value"]) for row in rows if row["start_angle"]}
    at = [growth.MIXTURES.index(mixture) for mixture in (-23 / 25, 0.0, 24 / 25)]
    assert [growth.PUBLISHED_MIXTURE_STEPS[k] for k in at] == list(by_angle.values())


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_published_count_of_steps_within_3_percent_or_one_step(seed):
    left, right = growth.random_pairs(500, 20, seed)
    angles = np.arccos((left * right).sum(1))
    steps = growth.steps_in_plane(angles, list(growth.PUBLISHED_STEPS), 10 / 500, dot_first=True)
    published = np.array(list(growth.PUBLISHED_STEPS.values()))
    assert (np.abs(steps - published) <= np.maximum(0.03 * published, 1)).all()
    assert steps[0] == 6
    coefficient, r_squared = growth.quadratic_fit(list(growth.PUBLISHED_STEPS), steps)
    assert abs(coefficient - 96) < 0.03 * 96
    assert r_squared > 0.9999


@pytest.mark.parametrize("seed", [0, 1])
def test_opposite_halves_cost_the_published_steps(seed):
    config = growth.Config(seed=seed)
    angles, steps = growth._mixture_steps(config)
    assert np.abs(np.array(steps) - growth.PUBLISHED_MIXTURE_STEPS).max() <= 2
    assert angles[1] == pytest.approx(0.0844, abs=0.002)
    assert angles[-1] == pytest.approx(3.1010, abs=0.002)


def test_a_cut_of_3_is_a_third_of_the_norm():
    left, right = growth.random_pairs(100, 8, seed=0)
    cut = growth.steps_to_align(1.5 * left, 1.5 * right, 10.0, cut=3.0)
    assert cut == growth.steps_to_align(0.5 * left, 0.5 * right, 10.0)
    whole = growth.steps_to_align(1.5 * left, 1.5 * right, 10.0)
    assert whole / cut == pytest.approx(9, rel=0.1)


def test_gradients_times_a_power_of_the_norm_take_it_off_the_exponent():
    left, right = growth.random_pairs(200, 20, seed=0)
    angles, radii = np.arccos((left * right).sum(1)), [0.5, 1.0, 2.0, 4.0, 8.0]
    for power in (0.0, 1.0, 2.0):
        steps = growth.steps_in_plane(angles, radii, 0.01, grad_power=power)
        exponent = growth.growth_exponent(radii, steps)
        assert exponent == pytest.approx(2 - power, abs=0.02)
        assert exponent == pytest.approx(linregress(np.log(radii), np.log(steps))[0], rel=1e-9)


@pytest.mark.parametrize("sine", [1.0, 0.3])
def test_weight_decay_settles_every_norm_at_the_closed_form(sine):
    rate, decay = 0.05, 0.3
    settled = growth.settled_norm(rate, decay, sine)
    norms = growth.norms_under_decay([0.1, settled, 3.0], rate, decay, sine, 1500, 4, seed=0)
    np.testing.assert_allclose(norms[-1], settled, rtol=1e-8)
    np.testing.assert_allclose(norms[:, 1], settled, rtol=1e-10)
    assert settled == pytest.approx((rate * sine**2 / (2 * decay)) ** 0.25, rel=0.01)


def test_each_row_draws_one_positive_of_its_class():
    labels = torch.tensor([0, 0, 0, 1, 1, 2])
    positive = class_norms._random_positives(labels, torch.Generator().manual_seed(0))
    assert torch.equal(positive, positive.T)
    assert not positive[labels[:, None] != labels].any()
    assert not positive.diagonal().any()
    assert positive.any(1).tolist() == [True] * 5 + [False]


def test_info_nce_on_pairs_is_its_sum_written_out():
    z = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    positive = torch.zeros(5, 5, dtype=torch.bool)
    for i, j in ((0, 1), (1, 0), (1, 2), (2, 1)):
        positive[i, j] = True
    terms = []
    for i, partners in ((0, [1]), (1, [0, 2]), (2, [1])):
        scores = [float(torch.cosine_similarity(z[i], z[j], dim=0)) for j in range(5)]
        others = sum(np.exp(scores[j]) for j in range(5) if j != i)
        terms.append(-np.log(sum(np.exp(scores[j]) for j in partners) / others))
    loss = class_norms._info_nce_on_pairs(z, positive)
    assert float(loss) == pytest.approx(np.mean(terms), abs=1e-12)


def test_run_leaves_figures_and_metrics_and_is_not_measured_twice(tmp_path, capsys):
    config = growth.Config(
        pairs=50, lr=1.0, radii=(0.5, 1.0, 2.0), class_runs=1, class_epochs=1, out=str(tmp_path)
    )
    metrics = growth.run(config)
    (folder,) = (tmp_path / "norm_growth").iterdir()
    files = {file.name for file in folder.iterdir()}
    assert {"steps.png", "steps.svg", "norms.png", "norms.svg", "metrics.json"} <= files
    assert float(metrics["steps/r1"]) == pytest.approx(96, rel=0.08)
    assert float(metrics["fit/exponent"]) == pytest.approx(2, abs=0.05)
    assert "published/radii" not in metrics
    assert growth.run(config) == metrics
    assert "is finished" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("field", "value"),
    [("pairs", 0), ("radii", (1.0, 2.0)), ("radii", (0.0, 1.0, 2.0)), ("decay", 1000.0)],
)
def test_settings_that_make_no_sense_are_refused(field, value):
    with pytest.raises(ValueError, match=field):
        growth.Config(**{field: value})
