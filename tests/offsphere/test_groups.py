"""`negatives`: contrast within groups of rows, against a loop over groups in float64."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from offsphere.cells import CELLS, Cell, shrink
from offsphere.losses import NonFinite, in_groups, nt_xent
from offsphere.names import PAIR_LOSSES, VIEW_LOSSES
from offsphere.objective import Objective
from offsphere.training.settings import TrainSettings
from text.settings import RetrievalSettings, StsSettings
from vision.train_moco import Config as MocoConfig

POPULATION, TEMPERATURE, WEIGHT, GOR = 50, 0.3, 4.0, 2.5
VARIANTS = (
    *((loss, {}) for loss in (*PAIR_LOSSES, *VIEW_LOSSES)),
    ("info_nce", {"direction": "left_to_right"}),
    ("info_nce", {"direction": "right_to_left"}),
    ("info_nce", {"within_view": True}),
    ("info_nce", {"within_view": True, "direction": "left_to_right"}),
    ("siglip", {"within_view": True}),
)
names = [" ".join([loss, *map(str, more.values())]) for loss, more in VARIANTS]
every_loss = pytest.mark.parametrize(("loss", "more"), VARIANTS, ids=names)


def sides(n, d=6, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [3 * torch.randn(n, d, generator=g, dtype=torch.float64) for _ in range(2)]


def objective(cell, loss, **more):
    more = {"population": POPULATION, "temperature": TEMPERATURE} | more
    made = Objective(cell, loss, **more).double()
    if cell == "learnable":
        with torch.no_grad():
            made.cell.logits.copy_(torch.tensor([0.3, -0.8]))
    return made


def log_ratio(scores, positives, candidates):
    """Mean over rows of the log-sum-exp over each row's candidates, minus its positive."""
    rows = [
        torch.logsumexp(torch.stack([scores[i, j] for j in chosen]), 0) - scores[i, positives[i]]
        for i, chosen in enumerate(candidates)
    ]
    return torch.stack(rows).mean()


def contrast(cell, loss, left, right, t, bias, direction="both", within_view=False):
    """The loss of one group, score by score."""
    k = len(left)
    if loss in VIEW_LOSSES:
        z = torch.cat([left, right])
        scores = cell.shrink_left(z) @ cell.shrink_right(z).T / t
        partner = [(i + k) % (2 * k) for i in range(2 * k)]
        candidates = {
            "nt_xent": [[j for j in range(2 * k) if j != i] for i in range(2 * k)],
            "dcl": [[j for j in range(2 * k) if j not in (i, partner[i])] for i in range(2 * k)],
            "dhel": [
                [j for j in range(2 * k) if j != i and j // k == i // k] for i in range(2 * k)
            ],
        }
        return log_ratio(scores, partner, candidates[loss])
    u, v = cell.shrink_left(left), cell.shrink_right(right)
    scores = u @ v.T / t
    off = [(i, j) for i in range(k) for j in range(k) if i != j]
    if loss == "spectral":
        return torch.stack([scores[i, j] ** 2 for i, j in off]).mean() - scores.trace() / k
    if loss == "siglip":
        value = -sum(F.logsigmoid(scores[i, i] + bias) for i in range(k))
        tables = [(1, scores)] + [(0.5, x @ x.T / t) for x in (u, v) if within_view]
        for weight, table in tables:
            value -= weight * sum(F.logsigmoid(-table[i, j] - bias) for i, j in off)
        return value / k
    ways = []
    for way, a, b in (("left_to_right", u, v), ("right_to_left", v, u)):
        if direction in ("both", way):
            both = torch.cat([b, a]) if within_view else b
            seen = [[j for j in range(len(both)) if j != i + k] for i in range(k)]
            ways.append(log_ratio(a @ both.T / t, list(range(k)), seen))
    return torch.stack(ways).mean()


def variance(cell, left, right, ratio, on):
    u, v = (shrink(left, 1.0), shrink(right, 1.0))
    if on == "score":
        u, v = cell.shrink_left(left) / ratio, cell.shrink_right(right)
    shifted = (u @ v.T + 1 / (POPULATION - 1)) ** 2
    return shifted[~torch.eye(len(left), dtype=torch.bool)].mean()


def gor(left, right):
    """Each side's own off-diagonal cosines: the mean's square, and what is above 1/d."""
    values = []
    for x in (shrink(left, 1.0), shrink(right, 1.0)):
        cosines = (x @ x.T)[~torch.eye(len(x), dtype=torch.bool)]
        excess = (cosines**2).mean() - 1 / x.shape[1]
        values.append(cosines.mean() ** 2 + (excess if excess > 0 else 0 * excess))
    return (values[0] + values[1]) / 2


def spread(cell, loss, left, right):
    """Mean standard deviation of a row's and of a column's negatives in one group."""
    k = len(left)
    if loss in VIEW_LOSSES:
        left = right = torch.cat([left, right])
    scores = cell.shrink_left(left) @ cell.shrink_right(right).T
    stds = [
        torch.stack([table[i, j] for j in range(len(table)) if (i - j) % k]).std(correction=0)
        for table in (scores, scores.T)
        for i in range(len(table))
    ]
    return torch.stack(stds).mean()


def gradients(value, of):
    return torch.autograd.grad(value, of, allow_unused=True)


def check_equals_the_loop(cell, loss, n, k, d=6, **more):
    left, right = (x.requires_grad_() for x in sides(n, d))
    made = objective(cell, loss, negatives=k, variance_weight=WEIGHT, gor_weight=GOR, **more)
    got = made(left, right)
    groups = list(zip(left.split(k), right.split(k), strict=True))
    with torch.no_grad():
        wanted = torch.stack([spread(made.cell, loss, *group) for group in groups]).mean()
        cosine = torch.stack([spread(Cell("cosine"), loss, *group) for group in groups]).mean()
    # The calibration is made in float32.
    assert made.ratio.item() == pytest.approx((wanted / cosine).item(), rel=1e-5)
    how = {name: more[name] for name in ("direction", "within_view") if name in more}
    bias = getattr(made, "bias", None)
    parts = [contrast(made.cell, loss, *group, made.temperature, bias, **how) for group in groups]
    on = more.get("variance_on", "cosine")
    terms = [variance(made.cell, *group, made.ratio, on) for group in groups]
    want = {"contrastive": torch.stack(parts).mean(), "variance": torch.stack(terms).mean()}
    want["gor"] = torch.stack([gor(*group) for group in groups]).mean()
    want["loss"] = want["contrastive"] + WEIGHT * want["variance"] + GOR * want["gor"]
    inputs = [left, right, *made.parameters()]
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-10, atol=1e-12)
    found = zip(gradients(got["loss"], inputs), gradients(want["loss"], inputs), strict=True)
    for ours, theirs in found:
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


@every_loss
@pytest.mark.parametrize("cell", CELLS)
def test_value_and_gradients_equal_a_loop_over_groups(cell, loss, more):
    check_equals_the_loop(cell, loss, 12, 4, learnable_temperature=True, **more)


@pytest.mark.parametrize("loss", ["nt_xent", "siglip"])
def test_the_variance_of_scores_is_that_of_each_group(loss):
    check_equals_the_loop("dnorm", loss, 12, 3, variance_on="score")


@pytest.mark.parametrize(("k", "d"), [(6, 3), (4, 1)])
def test_groups_of_more_rows_than_twice_the_width(k, d):
    check_equals_the_loop("dot", "nt_xent", 12, k, d)


@every_loss
@pytest.mark.parametrize("k", [66, 130])
def test_large_groups_are_streamed_and_equal_the_whole_loss_of_each(loss, more, k):
    """Beyond 64 rows groups follow one another: each is the plain objective of its own rows."""
    left, right = (x.requires_grad_() for x in sides(2 * k))
    common = {"scale": "fixed", "variance_weight": WEIGHT, "gor_weight": GOR, **more}
    got = objective("qnorm", loss, negatives=k, **common)(left, right)["loss"]
    plain = objective("qnorm", loss, **common)
    groups = zip(left.split(k), right.split(k), strict=True)
    want = torch.stack([plain(*group)["loss"] for group in groups]).mean()
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    pairs = zip(gradients(got, [left, right]), gradients(want, [left, right]), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


@every_loss
@pytest.mark.parametrize("cell", CELLS)
def test_one_group_is_the_plain_loss_bit_for_bit(cell, loss, more):
    left, right = (x.float() for x in sides(20))
    results = []
    for k in (None, 20):
        made = objective(cell, loss, negatives=k, gor_weight=GOR, **more).float()
        a, b = left.clone().requires_grad_(), right.clone().requires_grad_()
        named = made(a, b)
        results.append((*named.values(), *gradients(named["loss"], [a, b])))
    for plain, grouped in zip(*results, strict=True):
        assert torch.equal(plain, grouped)


@given(st.integers(2, 5), st.integers(1, 4), st.integers(0, 100))
@hypothesis_settings(deadline=None, max_examples=20)
def test_rows_of_other_groups_do_not_matter(k, groups, seed):
    """The loss of one group repeated is that of the group; the order of groups changes nothing."""
    left, right = sides(k, seed=seed)
    made = objective("dot", "nt_xent", negatives=k, scale="fixed")
    one = made(left, right)["loss"]
    many = made(left.repeat(groups, 1), right.repeat(groups, 1))["loss"]
    torch.testing.assert_close(many, one, rtol=1e-10, atol=1e-12)


def test_small_groups_also_work_under_autocast_and_in_half_precision():
    left, right = (x.float() for x in sides(16))
    made = objective("cosine", "nt_xent", negatives=4, scale="fixed").float()
    want = made(left, right)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = made(left.bfloat16(), right.bfloat16())
    for name, value in want.items():
        assert got[name].dtype == torch.float32
        torch.testing.assert_close(got[name], value, rtol=2e-2, atol=2e-2)


def test_bad_rows_and_sizes_are_refused_in_words():
    left, right = (x.float() for x in sides(12))
    with pytest.raises(ValueError, match="groups of 5 fill, got 12 rows"):
        objective("dot", "nt_xent", negatives=5)(left, right)
    with pytest.raises(ValueError, match="12 rows in groups of 5"):
        in_groups(lambda a, b: nt_xent(a, b, 0.5), left, right, 5)
    with pytest.raises(ValueError, match="at least 2 negatives"):
        objective("dot", "nt_xent", negatives=1)
    with pytest.raises(ValueError, match="from the queue"):
        objective("dot", "moco_nce", negatives=4)
    with pytest.raises(ValueError, match="hard_negatives together with groups"):
        objective("dot", "info_nce", negatives=4)(left, right, hard_negatives=right)
    left[3] = math.nan
    with pytest.raises(NonFinite, match="in 1 of 24 rows"):
        objective("dot", "nt_xent", negatives=4, scale="fixed").float()(left, right)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TrainSettings(negatives=100), "a divisor of --batch-size=256, got 100"),
        (lambda: TrainSettings(negatives=1), "at least 2"),
        (lambda: MocoConfig(negatives=32), "change --queue-size"),
        (lambda: StsSettings(negatives=32), "--negatives has no effect on a regression"),
        (lambda: RetrievalSettings(negatives=32, hard_negatives=1), "--hard-negatives=1 does not"),
    ],
)
def test_settings_refuse_groups_that_cannot_be(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()
