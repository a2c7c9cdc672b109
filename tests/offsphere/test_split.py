"""What a rank's share of a loss costs: flops that fall with the ranks, bytes by a formula.

That the shares add up is tested with ranks in threads, and on real ones, in training/test_ranks.py
and test_dropin.py.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from offsphere import losses, streamed, strips, tiles
from offsphere.split import Split
from offsphere.variance import negative_variance, spread_out

ROWS, WIDTH, QUEUE = 240, 16, 480


class Alone(Split):
    """A rank whose exchanges reach nobody: they are only counted."""

    def exchange(self, collective, *inputs, payload=None, src=None):
        super().exchange(lambda *_: None, payload=payload)


@pytest.fixture(autouse=True)
def _no_second_look(monkeypatch):
    """A part of a value may be near zero, where the whole is not."""
    monkeypatch.setattr(streamed, "NEAR_ZERO", -math.inf)


def cost(name: str, count: int, rank: int, **known) -> tuple[int, int]:
    """Flops and bytes of a rank's share, forward and backward."""
    g = torch.Generator().manual_seed(0)
    a, b, queue = (torch.randn(n, WIDTH, generator=g) / 4 for n in (ROWS, ROWS, QUEUE))
    a.requires_grad_()
    b.requires_grad_()
    split = Alone(rank, count)
    z = torch.cat([a, b])
    calls = {
        "info_nce": lambda: losses.info_nce(a, b, 0.5, split=split, **known),
        "siglip": lambda: losses.siglip(a, b, 0.5, -1.0, split=split),
        "nt_xent": lambda: losses.nt_xent(z, z, 0.5, split=split, **known),
        "dcl": lambda: losses.dcl(z, z.clone(), 0.5, split=split, **known),
        "moco_nce": lambda: losses.moco_nce(a, b, queue, 0.5, split=split, **known),
        "variance": lambda: negative_variance(a, b, 90, split=split),
        "gor": lambda: spread_out(a, b, split=split),
    }
    with FlopCounterMode(display=False) as counter:
        calls[name]().backward()
    return counter.get_total_flops(), split.payload


@pytest.mark.parametrize("device", ["tiles", "strips"])
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize(
    "name", ["info_nce", "siglip", "nt_xent", "dcl", "moco_nce", "variance", "gor"]
)
def test_flops_fall_with_the_ranks_and_bytes_are_the_formula(monkeypatch, name, count, device):
    monkeypatch.setattr(tiles, "TILE", 40)
    monkeypatch.setattr(streamed, "DENSE_SCORES", 0)
    monkeypatch.setattr(streamed, "TILED_DEVICES", ("cpu",) if device == "tiles" else ())
    # Strips of a few rows, so that no share is one strip that is kept while the whole is not.
    monkeypatch.setattr(strips, "WORKSPACE", 2**12)
    whole, nothing = cost(name, 1, 0)
    assert nothing == 0
    shares = [cost(name, count, rank) for rank in range(count)]
    for flops, _ in shares:
        assert flops == pytest.approx(whole / count, rel=0.1)
    # On a CPU the scores' size is known here and needs no shift; in strips it is not known, and
    # a column's log-sum-exp is a maximum and a sum. Then the value, and in tiles the positives.
    columns = {"info_nce": ROWS, "nt_xent": 2 * ROWS if device == "tiles" else 0}.get(name, 0)
    numbers = columns * (1 if device == "tiles" else 2)
    if name in ("variance", "gor"):
        numbers = 2 * WIDTH**2  # two Gram matrices
    elif device == "strips" or name in ("siglip", "nt_xent"):
        numbers += 1
    else:
        numbers += 2
    assert {payload for _, payload in shares} == {4 * numbers}


def test_more_ranks_than_rows_leave_some_without_work():
    costs = [cost("info_nce", 2 * ROWS, rank) for rank in (0, 1)]
    assert costs[0][0] < costs[1][0] == pytest.approx(cost("info_nce", 1, 0)[0] / ROWS, rel=0.1)
    assert math.isfinite(costs[0][1])


class Thread(Split):
    """A rank in a thread: an exchange is done when all have come to it."""

    def __init__(self, rank: int, all_meet: Barrier, table: list, *, local: bool = False) -> None:
        super().__init__(rank, len(table), local=local)
        self.all_meet, self.table = all_meet, table

    def exchange(self, collective, x, op=dist.ReduceOp.SUM, **rest):
        self.table[self.rank] = x.clone()
        self.all_meet.wait(timeout=60)
        parts = torch.stack(self.table)
        self.all_meet.wait(timeout=60)
        x.copy_(parts.amax(0) if op == dist.ReduceOp.MAX else parts.sum(0))


def on_threads(loss, count: int, sides: list[torch.Tensor], *, local: bool) -> list[torch.Tensor]:
    """The means over the ranks of the value and of the gradients."""
    all_meet, table = Barrier(count), [None] * count

    def one(rank: int) -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_() for x in sides]
        value = loss(*leaves, Thread(rank, all_meet, table, local=local))
        return [value.detach(), *torch.autograd.grad(value, leaves)]

    with ThreadPoolExecutor(count) as threads:
        found = list(threads.map(one, range(count)))
    return [torch.stack(parts).mean(0) for parts in zip(*found, strict=True)]


def views(loss):
    def stacked(a, b, queue, t, split, **known):
        z = torch.cat([a, b])
        return loss(z, z, t, split=split, **known) + 0 * queue.sum()

    return stacked


def of_pairs(loss, *more, **how):
    def pairs(a, b, queue, t, split, **known):
        return loss(a, b, t, *more, split=split, **how, **known) + 0 * queue.sum()

    return pairs


def hard(a, b, queue, t, split, **known):
    return losses.info_nce(a, b, t, hard_negatives=queue, split=split, **known)


SHARED = {
    "info_nce": of_pairs(losses.info_nce),
    "local": of_pairs(losses.info_nce),
    "one way": of_pairs(losses.info_nce, both_ways=False),
    "hard": hard,
    "ids": of_pairs(losses.info_nce),
    "within": of_pairs(losses.info_nce_within),
    "siglip": of_pairs(losses.siglip, -1.0),
    "siglip_within": of_pairs(losses.siglip_within, -1.0),
    "nt_xent": views(losses.nt_xent),
    "dcl": views(losses.dcl),
    "dhel": views(losses.dhel),
    "moco_nce": lambda a, b, q, t, split, **known: losses.moco_nce(
        a, b, q, t, split=split, **known
    ),
}


@pytest.fixture
def _nan_where_nothing_was_written():
    """torch then fills what `empty` gives."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_nan_where_nothing_was_written")
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("path", ["tiles", "strips"])
@pytest.mark.parametrize(("rows", "count"), [pytest.param(11, 3, marks=pytest.mark.slow), (3, 5)])
@pytest.mark.parametrize("name", SHARED)
def test_shares_add_up_to_the_whole(monkeypatch, name, rows, count, path, known):
    """Of as many ranks as may be, some have no row: they add zero."""
    monkeypatch.setattr(streamed, "DENSE_SCORES", 0)
    monkeypatch.setattr(tiles, "TILE", 2)
    monkeypatch.setattr(streamed, "TILED_DEVICES", ("cpu",) if path == "tiles" else ())
    monkeypatch.setattr(strips, "WORKSPACE", 64)
    how = {} if "siglip" in name else {"largest": 39.0 if known else math.inf}
    how |= {"ids": torch.arange(rows) % 3} if name == "ids" else {}
    g = torch.Generator().manual_seed(rows)
    sides = [torch.randn(n, 4, generator=g, dtype=torch.float64) for n in (rows, rows, 7)]
    sides.append(torch.tensor(0.5, dtype=torch.float64))

    def loss(*inputs):
        return SHARED[name](*inputs, **how)

    expected = on_threads(loss, 1, sides, local=False)
    found = on_threads(loss, count, sides, local=name == "local")
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


def test_a_local_value_near_zero_is_that_of_its_own_rows(monkeypatch):
    """The other ranks' rows, whose loss is large, are no part of it."""
    monkeypatch.undo()  # the second look is wanted here
    n, scale = 4, 30.0
    left = torch.eye(2 * n, dtype=torch.float64)
    right = torch.cat([left[:n], left[n:].roll(1, 0)])

    def loss(a, b, split):
        return losses.info_nce(a, b, 1 / scale, split=split)

    value, *_ = on_threads(loss, 2, [left, right], local=True)
    wanted = torch.nn.functional.cross_entropy(scale * left @ right.T, torch.arange(2 * n))
    torch.testing.assert_close(value, wanted, rtol=1e-10, atol=0)
