"""Every loss against a float64 twin written with explicit masks, in value and gradient."""

import math
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from offsphere import losses, streamed, strips, tiles
from offsphere.cells import CELLS, Cell

EPS32 = torch.finfo(torch.float32).eps
PAIRS = (
    *("info_nce", "info_nce_one_way", "info_nce_hard", "siglip", "spectral"),
    *("info_nce_within", "info_nce_within_one_way", "siglip_within"),
)
VIEWS = ("nt_xent", "dcl", "dhel")
ALL = (*PAIRS, *VIEWS, "moco_nce")
# How a loss may be computed: tile size (0: dense, None: strips, as on an accelerator), scores it
# may hold, range without a shift, scores that are few in strips.
PATHS = {
    "dense": (0, 0, 0.0),
    "plain": (7, 0, math.inf),
    "plain_kept": (7, 2**20, math.inf),
    "shifted": (5, 0, -1.0),
    "shifted_kept": (64, 2**20, -1.0),
    "strips_plain": (None, 100, math.inf),
    "strips_plain_kept": (None, 2**20, math.inf),
    "strips_shifted": (None, 100, -1.0),
    "strips_shifted_kept": (None, 2**20, -1.0),
    "strips_few": (None, 2**20, -1.0, 2**20),
}


@pytest.fixture
def take_path(monkeypatch):
    def choose(tile, workspace, plain_range, few=0):
        monkeypatch.setattr(streamed, "TILED_DEVICES", () if tile is None else ("cpu",))
        monkeypatch.setattr(streamed, "DENSE_SCORES", 0 if tile else 2**40)
        monkeypatch.setattr(tiles, "TILE", tile or 1)
        monkeypatch.setattr(streamed, "SLAB", workspace or 1)
        monkeypatch.setattr(strips, "FEW", few)
        for module in (tiles, strips):
            monkeypatch.setattr(module, "WORKSPACE", workspace)
            monkeypatch.setattr(module, "PLAIN_RANGE", plain_range)

    return choose


def ours(name, cell, left, right, extra, temperature, bias):
    """The loss of raw embeddings, as the objective composes it."""
    if name in VIEWS:
        stacked = torch.cat([left, right])
        return getattr(losses, name)(*cell(stacked, stacked), temperature)
    if name == "moco_nce":
        return losses.moco_nce(*cell(left, right), cell.shrink_right(extra), temperature)
    left, right = cell(left, right)
    if name in ("siglip", "siglip_within"):
        return getattr(losses, name)(left, right, temperature, bias)
    if name == "spectral":
        return losses.spectral(left / temperature, right)
    if name.startswith("info_nce_within"):
        both = not name.endswith("one_way")
        return losses.info_nce_within(left, right, temperature, both_ways=both)
    hard = cell.shrink_right(extra) if name == "info_nce_hard" else None
    both = name != "info_nce_one_way"
    return losses.info_nce(left, right, temperature, both_ways=both, hard_negatives=hard)


def twin(name, cell, left, right, extra, temperature, bias):
    """The definition, row by row over the candidates it names, with cross-entropy."""

    def row(scores, target, candidates):
        others = torch.tensor([j for j in candidates if j != target])
        return torch.cat([scores[target, None], scores[others]]).logsumexp(0) - scores[target]

    g_left, g_right = cell.exponents

    def power(x, g):
        return x * x.square().sum(1, keepdim=True) ** (-g / 2)

    n = len(left)
    if name in VIEWS:
        z = torch.cat([left, right])
        scores = (power(z, g_left) / temperature) @ power(z, g_right).T
        total = 0.0
        for i in range(2 * n):
            p = (i + n) % (2 * n)
            half = range(n) if i < n else range(n, 2 * n)
            if name == "nt_xent":
                total = total + row(scores[i], p, [j for j in range(2 * n) if j != i])
            else:
                among = range(2 * n) if name == "dcl" else half
                kept = torch.tensor([j for j in among if j not in (i, p)])
                total = total + scores[i][kept].logsumexp(0) - scores[i, p]
        return total / (2 * n)
    u, v = power(left, g_left) / temperature, power(right, g_right)
    scores = u @ v.T
    everyone = torch.arange(n)
    if name == "moco_nce":
        queue = u @ power(extra, g_right).T
        return F.cross_entropy(torch.cat([scores.diagonal()[:, None], queue], 1), 0 * everyone)
    if name.endswith(("within", "within_one_way")):
        # Each side keeps its form as a row and as a candidate of its own side.
        one, other = power(left, g_left), power(right, g_right)
        inside = [x @ x.T / temperature for x in (one, other)]
        apart = [torch.tensor([j for j in range(n) if j != i]) for i in range(n)]
        if name == "siglip_within":
            half = [-F.logsigmoid(-s[i][apart[i]] - bias).sum() for s in inside for i in range(n)]
            plain = twin("siglip", cell, left, right, extra, temperature, bias)
            return plain + sum(half) / (2 * n)
        rows = [torch.cat([scores[i], inside[0][i][apart[i]]]) for i in range(n)]
        forth = sum(r.logsumexp(0) - r[i] for i, r in enumerate(rows)) / n
        rows = [torch.cat([scores[:, i], inside[1][i][apart[i]]]) for i in range(n)]
        back = sum(r.logsumexp(0) - r[i] for i, r in enumerate(rows)) / n
        return forth if name.endswith("one_way") else (forth + back) / 2
    if name == "siglip":
        sign = torch.where(torch.eye(n) > 0, 1.0, -1.0)
        return -(F.logsigmoid(sign * (scores + bias))).sum(1).mean()
    if name == "spectral":
        off = scores[torch.eye(n) == 0]
        return off.square().mean() - scores.diagonal().mean()
    to_right = scores
    if name == "info_nce_hard":
        to_right = torch.cat([scores, u @ power(extra, g_right).T], 1)
    forth = F.cross_entropy(to_right, everyone)
    return (
        forth if name == "info_nce_one_way" else (forth + F.cross_entropy(scores.T, everyone)) / 2
    )


def with_gradients(function, name, cell, tensors):
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    cell.zero_grad()
    value = function(name, cell, *leaves)
    value.backward()
    grads = [leaf.grad for leaf in leaves] + [p.grad for p in cell.parameters()]
    return value.detach(), [torch.zeros(1) if g is None else g for g in grads]


def embeddings(n, d, seed, dtype=torch.float64, norm=1.0, spread=0.0, k=9):
    g = torch.Generator().manual_seed(seed)
    sides = []
    for rows in (n, n, k):
        x = torch.randn(rows, d, generator=g, dtype=torch.float64)
        scale = norm * torch.exp(spread * torch.randn(rows, 1, generator=g, dtype=torch.float64))
        sides.append((F.normalize(x) * scale).to(dtype))
    return sides


def assert_twins(name, cell, tensors, tolerance=1e-10):
    value, grads = with_gradients(ours, name, cell, tensors)
    expected, expected_grads = with_gradients(twin, name, cell, tensors)
    assert value.item() == pytest.approx(expected.item(), rel=tolerance, abs=tolerance)
    for got, want in zip(grads, expected_grads, strict=True):
        # Each tensor's error against its own largest entry, or the loss's own size.
        error = (got - want).abs().max().item()
        assert error <= tolerance * max(want.abs().max().item(), expected.abs().item(), 1e-3)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("cell", [*CELLS, "0.3,0.7"])
def test_equals_float64_twin(take_path, path, name, cell):
    take_path(*PATHS[path])
    cell = Cell(cell).double()
    if cell.name == "learnable":
        with torch.no_grad():
            cell.logits.copy_(torch.tensor([0.4, -1.1]))
    for (n, d), temperature in product([(2, 3), (10, 4), (23, 5)], [0.07, 0.5]):
        t = torch.tensor(temperature, dtype=torch.float64)
        bias = torch.tensor(-3.0, dtype=torch.float64)
        tensors = [*embeddings(n, d, seed=n, norm=1.5, spread=0.4), t, bias]
        assert_twins(name, cell, tensors)


@pytest.mark.parametrize("path", ["dense", "real", "shifted", "strips_shifted"])
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("norm", [1e-6, 1.0, 1e4])
@pytest.mark.parametrize("cell", CELLS)
def test_extreme_temperature_and_norms(take_path, path, name, norm, cell):
    # "real" is the shipped choice between plain and shifted sums, on small tiles.
    take_path(*PATHS.get(path, (6, 0, 40.0)))
    t = torch.tensor(0.01, dtype=torch.float64)
    bias = torch.tensor(-10.0, dtype=torch.float64)
    tensors = [*embeddings(15, 6, seed=3, norm=norm, spread=0.3), t, bias]
    assert_twins(name, Cell(cell).double(), tensors)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize(("temperature", "norm"), [(0.5, 1.0), (0.05, 1.0), (0.01, 3.0)])
def test_float32_is_as_accurate_as_plain_dense(take_path, name, cell, temperature, norm):
    n, d = 200, 32
    cell64 = Cell(cell).double()
    sides = embeddings(n, d, seed=11, norm=norm, spread=0.2, k=150)
    sides = [x.float().double() for x in sides]
    scalars = [torch.tensor(x, dtype=torch.float32).double() for x in (temperature, -5.0)]
    take_path(0, 0, 0.0)
    exact, exact_grads = with_gradients(ours, name, cell64, [*sides, *scalars])
    cell32 = Cell(cell)
    in32 = [x.float() for x in (*sides, *scalars)]
    _, dense_grads = with_gradients(ours, name, cell32, in32)
    # What rounding the cell's output once already costs, which no loss can undo.
    take_path(64, 0, 40.0)
    value, grads = with_gradients(ours, name, cell32, in32)
    left, right = cell64(*sides[:2])
    largest = (left @ right.T).abs().max().item() / temperature
    if name == "spectral":
        largest = largest**2
    if name.startswith("siglip"):
        largest = (largest + 5) * n
    assert abs(value.item() - exact.item()) <= 8 * EPS32 * (largest + math.log(2 * n))
    for got, plain, want in zip(grads[:2], dense_grads[:2], exact_grads[:2], strict=True):
        floor = EPS32 / 4 * want.norm().item()
        assert (got - want).norm().item() <= 2 * (plain - want).norm().item() + floor


@pytest.mark.parametrize("tile", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", ["nt_xent", "dcl", "dhel", "info_nce", "info_nce_within"])
def test_diagonals_that_cross_a_tile_in_its_corner_count(take_path, name, tile):
    """Every size beside every tile: a diagonal may meet a tile in one score, or pass it by one."""
    t = torch.tensor(0.4, dtype=torch.float64)
    bias = torch.tensor(0.0, dtype=torch.float64)
    for n, plain_range in product(range(2, 9), (math.inf, -1.0)):
        take_path(tile, 0, plain_range)
        for cell in ("dot", "qnorm"):  # one tensor for both sides, and two
            assert_twins(name, Cell(cell).double(), [*embeddings(n, 3, seed=n), t, bias])


def test_no_gradient_is_computed_unless_asked(take_path):
    take_path(7, 0, math.inf)
    left, right, _ = embeddings(20, 5, seed=0)
    frozen = right.clone()
    left.requires_grad_()
    losses.info_nce(left, right, 0.1).backward()
    right.requires_grad_()
    scores, labels = left.detach() @ frozen.T / 0.1, torch.arange(20)
    reference = (F.cross_entropy(scores, labels) + F.cross_entropy(scores.T, labels)) / 2
    with torch.no_grad():
        assert losses.info_nce(left, right, 0.1).item() == pytest.approx(
            reference.item(), rel=1e-12
        )
    assert right.grad is None


def test_upstream_gradient_scales_and_can_be_used_twice(take_path):
    take_path(7, 0, math.inf)
    left, right, _ = embeddings(20, 5, seed=0)
    left.requires_grad_()
    loss = losses.info_nce(left, right, 0.1)
    (once,) = torch.autograd.grad(loss, left, retain_graph=True)
    (thrice,) = torch.autograd.grad(3 * loss, left)
    torch.testing.assert_close(thrice, 3 * once, rtol=1e-12, atol=0)


def test_longer_right_side_adds_negatives_one_way():
    left, right, more = embeddings(12, 5, seed=4)
    gallery = torch.cat([right, more])
    expected = F.cross_entropy((left / 0.2) @ gallery.T, torch.arange(12))
    assert losses.info_nce(left, gallery, 0.2, both_ways=False).item() == pytest.approx(
        expected.item(), rel=1e-12
    )


def test_half_precision_is_computed_in_float32():
    left, right, _ = embeddings(16, 8, seed=5)
    left, right = left.bfloat16(), right.bfloat16()
    for name in ("info_nce", "siglip", "nt_xent"):
        half = ours(name, Cell("dot"), left, right, None, 0.1, -1.0)
        full = ours(name, Cell("dot"), left.float(), right.float(), None, 0.1, -1.0)
        assert half.dtype == torch.float32
        assert half.item() == full.item()


# Peer libraries: the cosine cell is what they compute.


@pytest.mark.parametrize("n", [16, 300])
def test_cosine_equals_open_clip_and_lightly(n):
    from lightly.loss import DCLLoss, NTXentLoss
    from open_clip.loss import ClipLoss, SigLipLoss

    left, right, _ = embeddings(n, 24, seed=n, dtype=torch.float64, norm=3.0, spread=0.5)
    u, v = F.normalize(left), F.normalize(right)
    scale, bias = torch.tensor(12.0, dtype=torch.float64), torch.tensor(-8.0, dtype=torch.float64)
    peers = {
        "info_nce": lambda a, b: ClipLoss()(F.normalize(a), F.normalize(b), scale),
        "siglip": lambda a, b: SigLipLoss()(F.normalize(a), F.normalize(b), scale, bias),
        "nt_xent": NTXentLoss(temperature=1 / 12.0),
        "dcl": DCLLoss(temperature=1 / 12.0),
    }
    assert u.shape == v.shape
    for name, peer in peers.items():
        a, b = left.clone().requires_grad_(), right.clone().requires_grad_()
        c, d = left.clone().requires_grad_(), right.clone().requires_grad_()
        mine = ours(name, Cell("cosine"), a, b, None, 1 / 12.0, -8.0)
        theirs = peer(c, d)
        mine.backward()
        theirs.backward()
        assert mine.item() == pytest.approx(theirs.item(), rel=1e-9), name
        torch.testing.assert_close(a.grad, c.grad, rtol=1e-7, atol=1e-12)
        torch.testing.assert_close(b.grad, d.grad, rtol=1e-7, atol=1e-12)


# Properties.

sizes = st.tuples(st.integers(2, 30), st.integers(1, 8), st.integers(0, 10**6))


@given(sizes, st.sampled_from(ALL), st.sampled_from(list(CELLS)))
@settings(max_examples=60, deadline=None)
def test_permuting_the_batch_changes_nothing(size, name, cell):
    n, d, seed = size
    left, right, extra = embeddings(n, d, seed, spread=0.3)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    before = ours(name, Cell(cell), left, right, extra, 0.3, -2.0)
    after = ours(name, Cell(cell), left[order], right[order], extra, 0.3, -2.0)
    assert after.item() == pytest.approx(before.item(), rel=1e-9, abs=1e-9)


@given(sizes, st.sampled_from((*PAIRS[:2], "siglip", "spectral")))
@settings(max_examples=60, deadline=None)
def test_qnorm_of_swapped_sides_is_dnorm(size, name):
    """For aligned pairs L_qnorm(a, b) = L_dnorm(b, a), the direction swapped with the sides."""
    n, d, seed = size
    a, b, _ = embeddings(n, d, seed, spread=0.5)
    if name == "info_nce_one_way":
        left, right = Cell("qnorm")(a, b)
        mirrored = Cell("dnorm")(b, a)
        one = losses.info_nce(left, right, 0.2, both_ways=False)
        other = losses.info_nce(mirrored[1], mirrored[0], 0.2, both_ways=False)
    else:
        one = ours(name, Cell("qnorm"), a, b, None, 0.2, -2.0)
        other = ours(name, Cell("dnorm"), b, a, None, 0.2, -2.0)
    assert one.item() == pytest.approx(other.item(), rel=1e-9, abs=1e-9)


@given(sizes, st.sampled_from(ALL), st.sampled_from(["cosine", "qnorm", "dnorm"]))
@settings(max_examples=80, deadline=None)
def test_radial_gradient_vanishes_on_normalised_sides(size, name, cell):
    n, d, seed = size
    raw_left, raw_right, extra = embeddings(n, d, seed, norm=2.0, spread=0.5)
    if name in VIEWS:
        raw_left, raw_right = (torch.cat([raw_left, raw_right]) for _ in range(2))
    left, right = raw_left.clone().requires_grad_(), raw_right.clone().requires_grad_()
    cell = Cell(cell)
    if name in VIEWS:
        value = getattr(losses, name)(*cell(left, right), 0.3)
    else:
        value = ours(name, cell, left, right, extra, 0.3, -2.0)
    value.backward()
    for side, exponent in zip((left, right), cell.exponents, strict=True):
        if exponent == 1.0:
            radial = torch.linalg.vecdot(side.grad, side.detach()).abs().max().item()
            assert radial <= 1e-10 * max(1.0, side.grad.abs().max().item())


# Bad input: what was expected, what came, what to do.


@pytest.mark.parametrize("name", ALL)
def test_refuses_bad_input(name):
    good = torch.randn(4, 3)
    cell = Cell("dot")

    def loss(left=good, right=good, extra=good, temperature=0.1):
        return ours(name, cell, left, right, extra, temperature, 0.0)

    with pytest.raises(ValueError, match="finite.*1 of"):
        loss(left=torch.tensor([[1.0, 2.0, math.nan]] + [[1.0, 2.0, 3.0]] * 3))
    with pytest.raises(ValueError, match="finite.*1 of"):
        loss(right=torch.tensor([[1.0, 2.0, math.inf]] + [[1.0, 2.0, 3.0]] * 3))
    with pytest.raises(ValueError, match="finite.*lengths beyond float32"):
        loss(left=1e30 * good, right=1e30 * good)
    with pytest.raises(ValueError, match="floating-point"):
        loss(left=torch.ones(4, 3, dtype=torch.long), right=torch.ones(4, 3, dtype=torch.long))
    with pytest.raises(ValueError, match=r"matrices of one width, got \([12], "):
        loss(good[None], good[None], good[None])
    if name != "spectral":
        with pytest.raises(ValueError, match="one temperature, got 2 values"):
            loss(temperature=torch.tensor([0.1, 0.2]))
    with pytest.raises(ValueError, match="batch of 0|at least 2 pairs"):
        loss(left=good[:0], right=good[:0])
    if name not in VIEWS:
        with pytest.raises(ValueError, match="one dtype, got torch.float32 and torch.float64"):
            loss(right=good.double())
        with pytest.raises(ValueError, match="one width"):
            loss(right=torch.randn(4, 5))
        with pytest.raises(ValueError, match=r"[Ee]xpected .*got 4 and 3"):
            loss(right=torch.randn(3, 3))
    if name != "spectral":
        for temperature in (0.0, -1.0, math.nan):
            with pytest.raises(ValueError, match="temperature above 0"):
                loss(temperature=temperature)
    if name not in ("moco_nce", "siglip", "info_nce_hard"):  # there one row has negatives
        with pytest.raises(ValueError, match="larger batch"):
            loss(left=good[:1], right=good[:1])


@pytest.mark.parametrize("how", ["strips", "strips_few", "torch.func"])
@pytest.mark.parametrize("name", [name for name in ALL if name != "spectral"])
def test_a_temperature_that_cannot_be_looked_at_makes_the_loss_nan(name, how, take_path):
    """Where a refusal would wait for the device, or there is nothing to look at."""
    if how != "torch.func":
        take_path(*PATHS["strips_shifted_kept" if how == "strips" else how])
    sides = torch.randn(3, 4, 3, dtype=torch.float64)

    def loss(temperature):
        return ours(name, Cell("dot"), *sides, temperature, 0.0)

    for temperature, bad in ((-1.0, True), (0.0, True), (math.nan, True), (1e-3, False)):
        t = torch.tensor(temperature, dtype=torch.float64)
        value = torch.func.grad_and_value(loss)(t)[1] if how == "torch.func" else loss(t)
        assert value.isnan().item() == bad


@pytest.mark.parametrize("name", ["info_nce", "siglip", "siglip_within", "info_nce_within"])
def test_refuses_more_right_rows_than_left_rows(name):
    with pytest.raises(ValueError, match="as many right rows as left rows.*got 4 and 6"):
        ours(name, Cell("dot"), torch.randn(4, 3), torch.randn(6, 3), None, 0.1, 0.0)


def test_refuses_two_biases():
    with pytest.raises(ValueError, match="one bias, got 2 values"):
        losses.siglip(torch.randn(4, 3), torch.randn(4, 3), 0.1, torch.zeros(2))


def test_refuses_an_odd_stack_and_an_empty_queue():
    with pytest.raises(ValueError, match="two stacked views"):
        losses.nt_xent(torch.randn(5, 3), torch.randn(5, 3), 0.1)
    with pytest.raises(ValueError, match="empty"):
        losses.moco_nce(torch.randn(5, 3), torch.randn(5, 3), torch.randn(0, 3), 0.1)
