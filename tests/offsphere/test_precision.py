"""Float32 under autocast, second derivatives and torch.func at every size, digits near zero."""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from offsphere import dropin, losses, streamed, strips, tiles
from offsphere import precision as precision_module
from offsphere.cells import Cell, calibration_ratio
from offsphere.objective import Objective
from offsphere.variance import negative_variance, spread_out

ALL = (
    *("info_nce", "one_way", "hard", "info_nce_within", "siglip", "siglip_within", "spectral"),
    *("nt_xent", "dcl", "dhel", "moco_nce", "variance", "variance_self", "queue", "gor"),
)


def sides(n, d=8, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [
        (1.5 * torch.randn(rows, d, generator=g, dtype=torch.float64)).to(dtype)
        for rows in (n, n, 7)
    ]


def loss_of(name, cell, a, b, t, queue):
    """The loss behind a cell; the temperature is in all, so that each has a gradient for it."""
    stacked = torch.cat([a, b])
    if name in ("nt_xent", "dcl", "dhel"):
        return getattr(losses, name)(*cell(stacked, stacked), t)
    left, right = cell(a, b)
    hard = cell.shrink_right(queue)
    return {
        "info_nce": lambda: losses.info_nce(left, right, t),
        "one_way": lambda: losses.info_nce(left, right, t, both_ways=False),
        "hard": lambda: losses.info_nce(left, right, t, hard_negatives=hard),
        "info_nce_within": lambda: losses.info_nce_within(left, right, t, both_ways=False),
        "siglip": lambda: losses.siglip(left, right, t, -2.0),
        "siglip_within": lambda: losses.siglip_within(left, right, t, -2.0),
        "spectral": lambda: losses.spectral(left / t, right),
        "moco_nce": lambda: losses.moco_nce(left, right, hard, t),
        "variance": lambda: negative_variance(left / t, right, 50),
        "variance_self": lambda: negative_variance(left / t, left / t, 50),
        "queue": lambda: negative_variance(left / t, hard, 50, paired=False),
        "gor": lambda: spread_out(left / t, left),
    }[name]()


def gradients(name, cell, n, dtype, autocast=None, inside=False, d=32):
    a, b, queue = sides(n, d, dtype)
    t = torch.tensor(0.3, dtype=dtype if dtype == torch.float64 else torch.float32)
    leaves = [x.requires_grad_() for x in (a, b, t)]
    with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        value = loss_of(name, Cell(cell), *leaves, queue)
        if inside:
            value.backward()
    if not inside:
        value.backward()
    return value, [torch.zeros(1) if x.grad is None else x.grad.double() for x in leaves]


@pytest.mark.parametrize("n", [40, 64, 65, 127, 128, 129])
@pytest.mark.parametrize("name", ALL)
def test_autocast_costs_no_digits(name, n):
    """Against float64, the error of a loss inside autocast is that of float32 without it."""
    exact_value, exact = gradients(name, "dot", n, torch.float64)
    _, plain = gradients(name, "dot", n, torch.float32)
    for half in (torch.bfloat16, torch.float16):
        # Calling backward inside autocast, which torch advises against, is safe for the losses.
        for inside in (False, name != "gor"):
            value, got = gradients(name, "dot", n, torch.float32, half, inside)
            assert value.dtype == torch.float32
            assert value.item() == pytest.approx(exact_value.item(), rel=2e-5, abs=1e-5)
            for x, y, want in zip(got, plain, exact, strict=True):
                floor = 2e-6 * want.norm()
                assert (x - want).norm() <= 2 * (y - want).norm() + floor


@pytest.mark.parametrize("cell", ["cosine", "dot", "learnable"])
def test_drop_ins_and_objective_are_float32_under_autocast(cell):
    a, b, queue = sides(20, 16)
    calls = {
        "clip": lambda x, y: dropin.ClipLoss(cell=cell, gor_weight=1.0)(x, y, torch.tensor(3.0)),
        "siglip": lambda x, y: dropin.SigLipLoss(cell=cell)(x, y, torch.tensor(3.0), -2.0),
        "nt_xent": dropin.NTXentLoss(cell=cell, scale="calibrated"),
        "dcl": dropin.DCLLoss(
            cell=cell, weight_fn=lambda u, v: (u * v).sum(1), variance_weight=2.0, population=99
        ),
        "objective": lambda x, y: Objective(cell, "info_nce", population=99, variance_weight=2.0)(
            x, y
        )["loss"],
        "moco": lambda x, y: Objective(cell, "moco_nce", population=99, batch_mean_norm=True)(
            x, y, queue=queue.to(x.dtype)
        )["loss"],
    }
    for name, call in calls.items():
        found = []
        for half in (None, torch.bfloat16, torch.float16):
            x, y = a.clone().requires_grad_(), b.clone().requires_grad_()
            with torch.autocast("cpu", dtype=half or torch.bfloat16, enabled=half is not None):
                value = call(x, y)
            value.backward()
            found.append((value.detach(), x.grad, y.grad))
            assert value.dtype == torch.float32, name
        for other in found[1:]:
            torch.testing.assert_close(other, found[0], rtol=2e-5, atol=2e-6, msg=name)


def test_half_precision_embeddings_are_promoted_everywhere():
    a, b, queue = (x.half() for x in sides(12))
    t = torch.tensor(0.3)
    for name in ALL:
        half = loss_of(name, Cell("dot"), a, b, t, queue)
        assert half.dtype == torch.float32
        if name in ("spectral", "variance", "variance_self", "queue", "gor"):
            continue  # left / t is the test's own, and rounds
        full = loss_of(name, Cell("dot"), a.float(), b.float(), t, queue.float())
        assert half.item() == full.item(), name
    signs = torch.tensor([1, 1, -1, 1]).half()[:, None]
    huge = torch.full((4, 8), 100.0, dtype=torch.float16) * signs
    loss = dropin.ClipLoss(cell="dot")(huge, huge, 1.0)
    # Scores of 80000 are beyond float16; in float32 their last place is 1/128.
    assert loss.item() == pytest.approx(torch.tensor(3.0).log().item() * 0.75, abs=0.01)


def test_scores_and_calibration_are_float32_under_autocast():
    a, b, _ = sides(30, 16)
    for cell in ("cosine", "qnorm", "dot"):
        scores, ratio = Cell(cell).scores(a, b), calibration_ratio(Cell(cell), a, b)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(Cell(cell).scores(a, b), scores)
            assert torch.equal(calibration_ratio(Cell(cell), a, b), ratio)
    half = Cell("qnorm").scores(a.half(), b.half())
    torch.testing.assert_close(half, Cell("qnorm").scores(a.half().float(), b.half().float()))


@pytest.fixture(params=["dense", "streamed"])
def path(request, monkeypatch):
    """The dense definitions, and tiles of 3: every size has one behaviour."""
    monkeypatch.setattr(streamed, "DENSE_SCORES", 2**14 if request.param == "dense" else 0)
    monkeypatch.setattr(tiles, "TILE", 3)
    monkeypatch.setattr(tiles, "WORKSPACE", 20)
    monkeypatch.setattr(streamed, "SLAB", 20)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("name", ALL)
def test_second_derivatives_by_finite_differences(name):
    a, b, queue = sides(5, 3, torch.float64)
    t = torch.tensor(0.9, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (a, b, t)]

    def behind_a_cell(a, b, t):
        return loss_of(name, Cell("qnorm"), a, b, t, queue)

    assert torch.autograd.gradcheck(behind_a_cell, leaves)
    assert torch.autograd.gradgradcheck(behind_a_cell, leaves)


@pytest.mark.parametrize("n", [64, 200])
def test_a_gradient_penalty_is_right_at_every_size(n):
    a, b, _ = sides(n, 6, torch.float64)
    found = []
    for dense in (True, False):
        x = a.clone().requires_grad_()
        left, right = Cell("dnorm")(x, b)
        if dense:
            scores = left @ right.T / 0.3
            labels = torch.arange(n)
            value = (F.cross_entropy(scores, labels) + F.cross_entropy(scores.T, labels)) / 2
        else:
            value = losses.info_nce(left, right, 0.3)
        (first,) = torch.autograd.grad(value, x, create_graph=True)
        first.square().sum().backward()
        found.append(x.grad)
    torch.testing.assert_close(found[1], found[0], rtol=1e-8, atol=1e-14)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("name", ALL)
def test_torch_func_and_forward_mode_equal_backward(name):
    a, b, queue = sides(6, 3, torch.float64)
    t = torch.tensor(0.9, dtype=torch.float64)

    def loss(a, b, t):
        return loss_of(name, Cell("dnorm"), a, b, t, queue)

    x = a.clone().requires_grad_()
    value = loss(x, b, t)
    (want,) = torch.autograd.grad(value, x)
    torch.testing.assert_close(torch.func.grad(loss)(a, b, t), want)
    many = torch.stack([a, 2 * a, b])
    torch.testing.assert_close(
        torch.func.vmap(loss, (0, None, None))(many, b, t),
        torch.stack([loss(row, b, t) for row in many]),
    )
    direction = torch.ones_like(a)
    for push in (
        torch.func.jvp(lambda x: loss(x, b, t), (a,), (direction,))[1],
        forward_mode(lambda x: loss(x, b, t), a, direction),
    ):
        torch.testing.assert_close(push, want.sum())
    twice = torch.func.hessian(loss)(a, b, t)
    torch.testing.assert_close(twice, torch.autograd.functional.hessian(lambda x: loss(x, b, t), a))


def forward_mode(function, at, direction):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(at, direction))).tangent


@pytest.mark.parametrize("n", [8, 200])
@pytest.mark.parametrize("scale", [4.0, 12.0, 30.0, 90.0])
@pytest.mark.parametrize("name", ["info_nce", "one_way", "info_nce_within", "nt_xent", "moco_nce"])
def test_a_loss_near_zero_keeps_its_digits(name, scale, n):
    """Pairs agree, negatives are orthogonal: log(1 + k exp(-scale)) with k others."""
    others = {"info_nce_within": 2 * n - 2, "nt_xent": 2 * n - 2, "moco_nce": 7}.get(name, n - 1)
    unit = torch.eye(n + 7)
    loss = loss_of(name, Cell("cosine"), 3 * unit[:n], 2 * unit[:n], 1 / scale, unit[n:])
    want = torch.log1p(others * torch.exp(torch.tensor(-scale, dtype=torch.float64))).item()
    # A score's own rounding of half a unit in the last place of `scale` is all that may be lost.
    digits = max(1e-5, 2e-7 * scale) if want < streamed.NEAR_ZERO else 1e-3
    assert loss.item() == pytest.approx(want, rel=digits)
    assert loss.item() > 0


def test_no_loss_of_positives_is_below_zero():
    """As true 9e-7 was 8e-6 and less than zero: random rows at a low temperature."""
    for n in (5, 60, 150):
        for seed in range(6):
            a, b, queue = sides(n, 32, seed=seed)
            b = a + 0.01 * b
            for name in ("info_nce", "one_way", "info_nce_within", "nt_xent", "moco_nce"):
                args = [x.double() for x in (a, b)]
                loss = loss_of(name, Cell("cosine"), a, b, 0.03, queue)
                exact = loss_of(name, Cell("cosine"), *args, 0.03, queue.double())
                assert loss.item() >= 0
                assert loss.item() == pytest.approx(exact.item(), rel=2e-4)


def test_digits_near_zero_leave_the_gradient_alone():
    unit = torch.eye(6, dtype=torch.float64)
    left = unit.clone().requires_grad_()
    loss = losses.info_nce(left, unit, 0.05)
    assert loss.item() < streamed.NEAR_ZERO
    loss.backward()
    scores = unit.clone().requires_grad_()
    F.cross_entropy(scores / 0.05, torch.arange(6)).backward()
    both = (scores.grad + scores.grad.T) / 2
    torch.testing.assert_close(left.grad, both @ unit, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("n", [100, 140])
def test_siglip_near_zero_keeps_its_digits(n):
    unit = torch.eye(n)
    loss = losses.siglip(unit, unit, 1 / 60, torch.tensor(-30.0))
    want = torch.log1p(torch.exp(torch.tensor(-30.0, dtype=torch.float64))).item() * n
    assert loss.item() == pytest.approx(want, rel=1e-5)


class Multiplied(TorchDispatchMode):
    """Notes how torch multiplies in each matrix product."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in ("mm", "addmm", "addmm_", "bmm"):
            self.seen.append(torch.backends.cuda.matmul.fp32_precision)
        return func(*args, **(kwargs or {}))


def objective(**options):
    return Objective("dot", population=90, scale="fixed", variance_weight=1.0, **options)


PRECISE = {  # each with how many matrix products, forward and backward, of 150 and 9 rows
    "info_nce": (lambda p: objective(loss="info_nce", loss_precision=p), 3 + 4),
    "siglip": (lambda p: objective(loss="siglip", loss_precision=p), 3 + 4),
    "nt_xent": (lambda p: objective(loss="nt_xent", loss_precision=p), 3 + 4),
    "ClipLoss": (lambda p: dropin.ClipLoss(loss_precision=p), 3),
    "SigLipLoss": (lambda p: dropin.SigLipLoss(loss_precision=p), 3),
    "NTXentLoss": (lambda p: dropin.NTXentLoss(loss_precision=p), 3),
    "DCLLoss": (lambda p: dropin.DCLLoss(loss_precision=p), 3),
    "bank": (lambda p: dropin.NTXentLoss(memory_bank_size=(9, 8), loss_precision=p), 2),
}


@pytest.mark.parametrize("torchs_own", ["highest", "high"])
@pytest.mark.parametrize("name", PRECISE)
@pytest.mark.parametrize(("precision", "setting"), [("fp32", "ieee"), ("tf32", "tf32")])
def test_products_have_the_precision_of_the_loss_and_torch_its_own_again(
    monkeypatch, name, precision, setting, torchs_own
):
    """As on a CUDA device: here the setting changes nothing, but it is there."""
    monkeypatch.setattr(streamed, "TILED_DEVICES", ())
    monkeypatch.setattr(precision_module, "TF32_DEVICES", ("cpu",))
    build, products = PRECISE[name]
    loss, (a, b, _) = build(precision), sides(150)
    more = {"ClipLoss": (9.0,), "SigLipLoss": (9.0, -3.0)}.get(name, ())
    was = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(torchs_own)
    try:
        before = torch.backends.cuda.matmul.fp32_precision
        with Multiplied() as products_of:
            value = loss(a.requires_grad_(), b.requires_grad_(), *more)
            value = value["loss"] if isinstance(value, dict) else value
            value.backward()
        assert products_of.seen == [setting] * products
        assert torch.backends.cuda.matmul.fp32_precision == before
        assert torch.get_float32_matmul_precision() == torchs_own

        def fail(*_, **__):
            raise RuntimeError("out of memory")

        monkeypatch.setattr(strips, "FEW", 0)
        monkeypatch.setattr(strips, "_strips", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            loss(a, b, *more)
        assert torch.backends.cuda.matmul.fp32_precision == before
    finally:
        torch.set_float32_matmul_precision(was)


def test_on_a_cpu_the_precision_of_the_loss_sets_nothing(monkeypatch):
    before = torch.backends.cuda.matmul.fp32_precision
    a, b, _ = sides(150)
    found = []
    for precision in ("fp32", "tf32"):
        with Multiplied() as products:
            found.append(dropin.ClipLoss(loss_precision=precision)(a, b, 9.0))
        assert set(products.seen) == {before}
    assert torch.equal(*found)


def test_unknown_precisions_are_refused():
    for build in (dropin.ClipLoss, lambda **o: Objective(population=9, **o)):
        with pytest.raises(ValueError, match="loss_precision"):
            build(loss_precision="bf16")
