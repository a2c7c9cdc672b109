"""The objective: what it composes, how it starts, what a checkpoint brings back."""

import math
from functools import wraps

import pytest
import torch
import torch.nn.functional as F

from offsphere import losses, streamed, strips
from offsphere.cells import CELLS, Cell, calibration_ratio, shrink
from offsphere.names import LOSSES, VIEW_LOSSES
from offsphere.objective import Objective
from offsphere.variance import negative_variance


def views(n=20, d=6, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [3 * torch.randn(rows, d, generator=g) for rows in (n, n, 3 * n)]


def call(objective, left, right, queue):
    return objective(left, right, queue=queue if objective.loss == "moco_nce" else None)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("variance_on", ["cosine", "score"])
def test_composes_cell_loss_temperature_and_variance(loss, cell, variance_on):
    left, right, queue = views()
    objective = Objective(
        cell, loss, population=50, temperature=0.3, variance_weight=4.0, variance_on=variance_on
    )
    named = call(objective, left, right, queue)
    cell = Cell(cell)
    stacked = torch.cat([left, right])
    if loss in VIEW_LOSSES:
        r = calibration_ratio(cell, stacked, stacked, exclude=(0, 20, -20))
        a, b = cell(stacked, stacked)
        contrastive = getattr(losses, loss)(a, b, 0.3 * r)
        a, b = a[:20], b[20:]
    elif loss == "moco_nce":
        r = calibration_ratio(cell, left, right)
        (a, key), b = cell(left, right), cell.shrink_right(queue)
        contrastive = losses.moco_nce(a, key, b, 0.3 * r)
    else:
        r = calibration_ratio(cell, left, right)
        a, b = cell(left, right)
        if loss == "siglip":
            contrastive = losses.siglip(a, b, 0.3 * r, -10.0)
        elif loss == "spectral":
            contrastive = losses.spectral(a / (0.3 * r), b)
        else:
            contrastive = losses.info_nce(a, b, 0.3 * r)
    u, v = (a / r, b) if variance_on == "score" else (shrink(a, 1.0), shrink(b, 1.0))
    variance = negative_variance(u, v, 50, paired=loss != "moco_nce")
    torch.testing.assert_close(named["contrastive"], contrastive)
    torch.testing.assert_close(named["variance"], variance, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(named["loss"], contrastive + 4 * variance, rtol=1e-5, atol=1e-6)
    assert objective.ratio.item() == pytest.approx(r.item())


@pytest.mark.parametrize("cell", CELLS)
def test_calibrated_cells_start_with_the_logit_spread_of_cosine(cell):
    left, right, _ = views(64)
    objective = Objective(cell, "info_nce", population=64, temperature=0.1)
    objective(left, right)
    logits = objective.cell.scores(left, right) / objective.temperature
    reference = Cell("cosine").scores(left, right) / 0.1
    off = ~torch.eye(64, dtype=torch.bool)

    def spread(scores):
        rows = scores[off].view(64, 63).std(1, correction=0).mean()
        cols = scores.T[off].view(64, 63).std(1, correction=0).mean()
        return ((rows + cols) / 2).item()

    assert spread(logits) == pytest.approx(spread(reference), rel=1e-5)


def test_variance_is_logged_at_weight_zero_but_not_trained():
    left, right, _ = views()
    left.requires_grad_()
    named = Objective("cosine", "info_nce", population=50)(left, right)
    expected = negative_variance(F.normalize(left), F.normalize(right), 50)
    assert named["variance"].item() == pytest.approx(expected.item())
    assert not named["variance"].requires_grad
    assert named["loss"] is named["contrastive"]


def test_one_direction_only():
    left, right, hard = views()
    kwargs = {"population": 50, "scale": "fixed", "temperature": 0.5}
    forth = Objective("dot", "info_nce", direction="left_to_right", **kwargs)(left, right)
    back = Objective("dot", "info_nce", direction="right_to_left", **kwargs)(left, right)
    both = Objective("dot", "info_nce", **kwargs)(left, right)
    scores = left @ right.T / 0.5
    rows = F.cross_entropy(scores, torch.arange(20))
    cols = F.cross_entropy(scores.T, torch.arange(20))
    assert forth["loss"].item() == pytest.approx(rows.item(), rel=1e-5)
    assert back["loss"].item() == pytest.approx(cols.item(), rel=1e-5)
    assert both["loss"].item() == pytest.approx((rows + cols).item() / 2, rel=1e-5)
    more = torch.cat([scores, left @ hard.T / 0.5], 1)
    hard_rows = F.cross_entropy(more, torch.arange(20))
    got = Objective("dot", "info_nce", direction="left_to_right", **kwargs)(
        left, right, hard_negatives=hard
    )
    assert got["loss"].item() == pytest.approx(hard_rows.item(), rel=1e-5)


def test_learnable_scale_is_clamped_to_1_and_100_over_the_ratio():
    left, right, _ = views()
    objective = Objective(
        "dot", "info_nce", population=50, temperature=0.07, learnable_temperature=True
    )
    objective(left, right)
    r = objective.ratio.item()
    assert objective.temperature.item() == pytest.approx(0.07 * r, rel=1e-6)
    for log_scale, scale in ((9.0, 100.0), (-9.0, 1.0)):
        with torch.no_grad():
            objective.log_scale.fill_(log_scale)
        objective(left, right)["loss"].backward()
        assert 1 / objective.temperature.item() == pytest.approx(scale / r, rel=1e-5)
        assert objective.log_scale.grad.abs() > 0  # never stuck at the edge
        objective.zero_grad()


def test_a_checkpoint_brings_the_calibration_back():
    left, right, _ = views()
    first = Objective("dnorm", "info_nce", population=50)
    first(left, right)
    second = Objective("dnorm", "info_nce", population=50)
    second.load_state_dict(first.state_dict())
    torch.testing.assert_close(second(2 * left, right), first(2 * left, right), rtol=0, atol=0)
    assert second.ratio.item() == first.ratio.item()
    uncalibrated = Objective("dnorm", "info_nce", population=50)
    second.load_state_dict(uncalibrated.state_dict())
    second(5 * left, right)
    assert second.ratio.item() == pytest.approx(5 * first.ratio.item(), rel=1e-5)


def test_bad_settings_are_refused():
    left, right, queue = views()
    with pytest.raises(ValueError, match="Did you mean 'nt_xent'"):
        Objective("dot", "nt_xnet", population=9)
    with pytest.raises(ValueError, match="Did you mean 'calibrated'"):
        Objective("dot", scale="calibrate", population=9)
    with pytest.raises(ValueError, match="population of at least 2"):
        Objective("dot", population=1)
    with pytest.raises(ValueError, match="temperature above 0"):
        Objective("dot", population=9, temperature=0)
    with pytest.raises(ValueError, match=r"start in \[0.01, 1\]"):
        Objective("dot", population=9, temperature=2.0, learnable_temperature=True)
    with pytest.raises(ValueError, match="variance_weight of at least 0"):
        Objective("dot", population=9, variance_weight=-1)
    with pytest.raises(ValueError, match="Expected a queue"):
        Objective("dot", "moco_nce", population=9)(left, right)
    with pytest.raises(ValueError, match="Expected no queue"):
        Objective("dot", "info_nce", population=9)(left, right, queue=queue)
    with pytest.raises(ValueError, match="hard_negatives"):
        Objective("dot", "nt_xent", population=9)(left, right, hard_negatives=queue)
    with pytest.raises(ValueError, match="hard_negatives"):
        Objective("dot", "info_nce", population=9, direction="right_to_left")(
            left, right, hard_negatives=queue
        )
    with pytest.raises(ValueError, match="before its first training batch"):
        Objective("dot", "info_nce", population=9).eval()(left, right)
    assert math.isnan(Objective("dot", population=9).ratio.item())


@pytest.mark.parametrize("direction", ["both", "left_to_right", "right_to_left"])
@pytest.mark.parametrize("cell", CELLS)
def test_within_view_negatives_keep_each_side_in_its_own_form(cell, direction):
    left, right, _ = views()
    objective = Objective(
        cell, "info_nce", population=50, scale="fixed", direction=direction, within_view=True
    )
    a, b = Cell(cell)(left, right)
    if direction == "right_to_left":
        a, b = b, a
    expected = losses.info_nce_within(a, b, 0.2, both_ways=direction == "both")
    torch.testing.assert_close(objective(left, right)["loss"], expected)
    objective = Objective(cell, "siglip", population=50, scale="fixed", within_view=True)
    expected = losses.siglip_within(*Cell(cell)(left, right), 0.2, -10.0)
    torch.testing.assert_close(objective(left, right)["loss"], expected)


def test_within_view_is_refused_where_it_means_nothing():
    with pytest.raises(ValueError, match="within_view with info_nce or siglip, got nt_xent"):
        Objective("cosine", "nt_xent", population=50, within_view=True)
    left, right, extra = views()
    objective = Objective("cosine", "info_nce", population=50, within_view=True)
    with pytest.raises(ValueError, match="no hard_negatives together with within_view"):
        objective(left, right, hard_negatives=extra)


@pytest.mark.parametrize("loss", LOSSES)
def test_over_the_batch_mean_norm_the_overall_scale_is_gone(loss):
    """Scaling all embeddings changes nothing; a single long one still counts."""
    left, right, queue = (x.double() for x in views())
    values = []
    for factor in (1.0, 7.0):
        objective = Objective("dot", loss, population=50, scale="fixed", batch_mean_norm=True)
        values.append(call(objective, factor * left, factor * right, factor * queue)["loss"].item())
    assert values[1] == pytest.approx(values[0], rel=1e-9)
    plain = Objective("dot", loss, population=50, scale="fixed")
    scaled = [x / x.norm(dim=1).mean() for x in (left, right, queue)]
    if loss in VIEW_LOSSES:
        mean = torch.cat([left, right]).norm(dim=1).mean()
        scaled = [left / mean, right / mean, queue]
    if loss == "moco_nce":
        scaled[1] = right / queue.norm(dim=1).mean()
    assert values[0] == pytest.approx(call(plain, *scaled)["loss"].item(), rel=1e-9)


def test_the_defaults_are_those_of_the_document():
    """SimCLR at temperature 0.2 on cosines, calibrated, both ways, without terms or arms."""
    left, right, _ = views()
    named = Objective(population=50)(left, right)
    stacked = torch.cat([F.normalize(left), F.normalize(right)])
    contrastive = losses.nt_xent(stacked, stacked, 0.2)
    variance = negative_variance(F.normalize(left), F.normalize(right), 50)
    assert named.keys() == {"loss", "contrastive", "variance"}
    torch.testing.assert_close(named["loss"], contrastive)
    torch.testing.assert_close(named["variance"], variance)
    objective = Objective("dot", "info_nce", population=50)
    got = objective(left, right)
    ratio = calibration_ratio(Cell("dot"), left, right)
    torch.testing.assert_close(objective.temperature, 0.2 * ratio)
    scores, everyone = left @ right.T / (0.2 * ratio), torch.arange(20)
    both = (F.cross_entropy(scores, everyone) + F.cross_entropy(scores.T, everyone)) / 2
    torch.testing.assert_close(got["loss"], both)
    torch.testing.assert_close(got["variance"], variance)
    assert not list(objective.parameters())


@pytest.mark.parametrize("loss", LOSSES)
def test_sides_that_do_not_fit_are_refused(loss):
    left, right, queue = views()

    def with_sides(a, b):
        return call(Objective("dot", loss, population=50), a, b, queue)

    for a, b, message in (
        (left, right.double(), "one dtype"),
        (left[None], right[None], "matrices of one width"),
        (left, right[:, :4], "one width"),
        (left[:18], right[:16], "as many"),
        (left[:0], right[:0], "empty batch"),
    ):
        with pytest.raises(ValueError, match=message):
            with_sides(a, b)


def told(monkeypatch, loss):
    """What losses are told of the scores' size."""
    found, function = [], getattr(losses, loss)

    @wraps(function)
    def noted(*sides, largest, **rest):
        found.append(largest)
        return function(*sides, largest=largest, **rest)

    monkeypatch.setattr(losses, loss, noted)
    return found


@pytest.mark.parametrize("loss", ["info_nce", "nt_xent", "moco_nce"])
@pytest.mark.parametrize("scale", ["fixed", "calibrated"])
def test_a_loss_is_told_the_largest_score_where_the_host_knows_it(monkeypatch, loss, scale):
    found = told(monkeypatch, loss)
    a, b, queue = views()
    more = {"queue": queue} if loss == "moco_nce" else {}
    known = {"cosine": 1.001 / 0.1, "dnorm": math.inf, "learnable": math.inf}
    for cell, bound in known.items():
        options = {"population": 50, "temperature": 0.1, "scale": scale}
        for learned in (False, True):
            objective = Objective(cell, loss, learnable_temperature=learned, **options)
            objective(a, b, **more)
            assert found.pop() == pytest.approx(math.inf if learned else bound, rel=1e-6)
    objective = Objective("cosine", loss, **options)
    other = Objective("cosine", loss, **options | {"temperature": 0.5})
    other(a, b, **more)
    objective.load_state_dict(other.state_dict())
    objective(a, b, **more)
    assert found.pop() == pytest.approx(1.001 / 0.5, rel=1e-6)


def test_the_bound_holds_and_saves_the_search_for_a_maximum(monkeypatch):
    """In strips, as on an accelerator: the same loss, and no row is searched."""
    monkeypatch.setattr(streamed, "TILED_DEVICES", ())
    monkeypatch.setattr(strips, "FEW", 0)
    a, b, _ = views(150)
    value = Objective("cosine", "info_nce", population=50, temperature=0.03)(a, b)["loss"]
    u, v = (F.normalize(x.double(), dim=1) for x in (a, b))
    scores, labels = u @ v.T / 0.03, torch.arange(150)
    expected = (F.cross_entropy(scores, labels) + F.cross_entropy(scores.T, labels)) / 2
    torch.testing.assert_close(value.double(), expected, rtol=1e-6, atol=0)
    amax, searched = torch.amax, []
    monkeypatch.setattr(torch, "amax", lambda *x, **o: searched.append(x[1]) or amax(*x, **o))
    for cell in ("cosine", "dot"):
        Objective(cell, "info_nce", population=50, temperature=0.03, scale="fixed")(a, b)
        assert searched == ([] if cell == "cosine" else [1, 0])
