"""What the losses would start, hold and wait for on a card, counted on one without data."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from shutil import which

import pytest
import torch

from offsphere import losses, strips

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def accelerator():
    """benchmarks/accelerator.py, which has the counter."""
    spec = importlib.util.spec_from_file_location("accelerator", BENCHMARKS / "accelerator.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def info_nce(temperature, **known):
    return lambda a, b: losses.info_nce(a, b, temperature, **known)


def nt_xent(z):
    return losses.nt_xent(z, z, 0.1)


def moco_nce(query, key, queue):
    return losses.moco_nce(query, key, queue.detach(), 0.1)


def siglip(a, b):
    return losses.siglip(a, b, 0.1, -10.0)


@pytest.mark.parametrize("known", [{}, {"largest": 10.0}])
@pytest.mark.parametrize(
    ("loss", "shapes", "most"),
    [
        ("info_nce", [(8192, 512)] * 2, 60),
        ("info_nce", [(32768, 512)] * 2, 650),
        ("nt_xent", [(2 * 4096, 128)], 60),
        ("moco_nce", [(256, 128), (256, 128), (65536, 128)], 40),
        ("siglip", [(8192, 512)] * 2, 60),
    ],
)
def test_few_kernels_little_memory_and_no_waiting(accelerator, loss, shapes, most, known):
    """A look at a value, or a copy from the host, would raise on the fake device."""
    if known and loss != "info_nce":
        pytest.skip("no shift is searched for where a row is whole")
    call = {"info_nce": info_nce(0.1, **known)}.get(loss) or globals()[loss]
    count = accelerator.counted(call, *shapes, device="cuda")
    assert 10 < len(count.kernels) <= most
    sides = 4 * sum(rows * width for rows, width in shapes)
    # The sides, their gradients (a symmetric loss has two parts), a side over its temperature.
    assert count.peak <= 4 * sides + 4 * strips.WORKSPACE + 2**24


def test_a_learned_temperature_is_not_looked_at(accelerator):
    def learned(a, b, log_scale):
        return losses.info_nce(a, b, 1 / log_scale.sum().exp())

    count = accelerator.counted(learned, (8192, 512), (8192, 512), (1, 1), device="cuda")
    assert len(count.kernels) <= 70


def test_flops_are_those_of_the_formula(accelerator):
    """6 B^2 d where the strip is kept, a third more where it is computed twice."""
    for rows, products in ((4096, 6), (8192, 8)):
        count = accelerator.counted(info_nce(0.1), (rows, 512), (rows, 512), device="cuda")
        assert sum(k.flops for k in count.kernels) == products * rows**2 * 512


@pytest.mark.parametrize("rows", [256, 4096, 16384])
@pytest.mark.parametrize("loss", ["info_nce", "learned", "nt_xent"])
def test_modelled_times_and_memory_beside_the_peers(accelerator, loss, rows):
    """A model, not a measurement: see docs/scaling.md."""
    mine, compiled, *others = (found := accelerator.compare(loss, rows)).values()
    for peer in others:
        for card in accelerator.CARDS.values():
            assert compiled.seconds(card) <= 1.0 * peer.seconds(card)
            assert mine.seconds(card) <= 1.3 * peer.seconds(card)
    dense = [count for who, count in found.items() if who[:4] != "ours" and "chunked" not in who]
    assert len(dense) == (2 if loss == "info_nce" else 1)
    if rows >= 16384:
        assert max(mine.peak, compiled.peak) <= min(peer.peak for peer in dense) / 10


@pytest.mark.parametrize("loss", ["info_nce", "learned"])
@pytest.mark.parametrize("rows", [1024, 8192])
def test_compiled_bodies_hold_no_second_workspace(accelerator, loss, rows):
    compiled = accelerator.compare(loss, rows)["ours, compiled"]
    # The sides, their gradients, a side over its temperature, and the workspace.
    assert compiled.peak <= 5 * 4 * rows * 512 + 4 * min(strips.WORKSPACE, 3 * rows**2) + 2**22


def test_the_workspace_is_a_share_of_the_free_memory(monkeypatch):
    x = torch.zeros(2, 2)
    assert strips.workspace(x) == strips.WORKSPACE
    monkeypatch.setattr(strips, "_free_bytes", lambda _: 2**20)
    assert strips.workspace(x) == 2**20 // strips.FREE_SHARE // 4
    cut = strips._strips(x.new_empty(7, 2), x.new_empty(2**15, 2), 1)
    assert [(rows.start, rows.stop) for rows in cut] == [(0, 2), (2, 4), (4, 6), (6, 7)]


@pytest.mark.slow
@pytest.mark.skipif(which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.filterwarnings("error:.*is not compiled")
@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("body", ["row_shares", "both_sums", "both_shares"])
def test_a_compiled_body_is_the_body(body, plain):
    """Compiled for this CPU, with shapes that change as those of strips do."""
    eager = getattr(strips.EAGER, body)
    compiled = strips._compiled(eager)
    for n, m in ((33, 50), (17, 70)):
        for columns, own in ((m, False), (m - 9, True)):
            found = [_through(call, body, n, m, columns, own, plain) for call in (eager, compiled)]
            for x, y in zip(*found, strict=True):
                torch.testing.assert_close(y, x, rtol=1e-6, atol=0)


def _through(call, body, n, m, columns, own, plain):
    """All that the body writes or returns."""
    g = torch.Generator().manual_seed(n)
    scores = 3 * torch.randn(n, m, generator=g)
    rows, cols = (torch.zeros(1 if plain else 2, size) for size in (n, columns))
    of_rows, of_cols = ((x[0], None if plain else x[1]) for x in (rows, cols))
    if body == "row_shares":
        call(scores, *of_rows, torch.randn(n, generator=g) if own else None)
        return scores, rows
    if body == "both_sums":
        call(scores, *of_rows, *of_cols)
        return scores, rows, cols
    return (call(scores, *(torch.rand(k, generator=g) + 0.5 for k in (n, m)), plain),)
