"""What a rank's share of a loss costs: flops that fall with the ranks, bytes by a formula.

That the shares add up is tested on real ranks, in training/test_ranks.py and test_dropin.py.
"""

from __future__ import annotations

import math

import pytest
import torch
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
