"""Rows that are the same thing, masked or positive, beside a float64 loop over single scores."""

from __future__ import annotations

import math
import threading

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from offsphere import streamed, strips, tiles
from offsphere.cells import CELLS, Cell
from offsphere.ids import mean_positives, row_ids
from offsphere.losses import info_nce
from offsphere.objective import Objective
from offsphere.split import Split

N, HARD, WIDTH = 23, 4, 6
IDS = torch.tensor([0, 1, 2, 0, 4, 5, 0, 2, 8, 9, 10, 11, 9, 13, 0, 15, 16, 17, -7, 19, 2**40, 21,
                    -7, 0, 24, 13, 24])  # fmt: skip
"""Of 23 right rows and 4 hard negatives, the first and the third of which repeat right rows."""
# Tile size (None: strips, as on an accelerator), scores that may be held, range without a shift.
PATHS = {
    "plain": (7, 0, math.inf),
    "shifted": (5, 0, -1.0),
    "kept": (64, 2**20, -1.0),
    "plain_kept": (64, 2**20, math.inf),
    "strips": (None, 100, -1.0),
    "strips_plain": (None, 100, math.inf),
    "strips_kept": (None, 2**20, -1.0),
}
HOW = [
    {"both_ways": True},
    {"both_ways": False},
    {"both_ways": True, "hard": True},
    {"both_ways": False, "hard": True},
]


@pytest.fixture(params=PATHS)
def path(request, monkeypatch):
    tile, workspace, plain_range = PATHS[request.param]
    monkeypatch.setattr(streamed, "TILED_DEVICES", () if tile is None else ("cpu",))
    monkeypatch.setattr(tiles, "TILE", tile or 1)
    for module in (tiles, strips):
        monkeypatch.setattr(module, "WORKSPACE", workspace)
        monkeypatch.setattr(module, "PLAIN_RANGE", plain_range)


def loop(left, right, t, equal, both_ways, ids):
    """The definition: one score, one row and one column after the other."""
    n, m = len(left), len(right)
    s = [[left[i] @ right[j] / t for j in range(m)] for i in range(n)]

    def cost(scores: dict[int, torch.Tensor], own: int, names: list[int]) -> torch.Tensor:
        same = [j for j in scores if names[j] == names[own]]
        if equal == "positive":
            seen, positive = list(scores), sum(scores[j] for j in same) / len(same)
        else:
            seen = [j for j in scores if j == own or j not in same]
            positive = scores[own]
        return torch.stack([scores[j] for j in seen]).logsumexp(0) - positive

    costs = [cost(dict(enumerate(s[i])), i, ids) for i in range(n)]
    if both_ways:
        costs += [cost({i: s[i][j] for i in range(n)}, j, ids) for j in range(n)]
    return sum(costs) / len(costs)


def case(cell: Cell, dtype: torch.dtype = torch.float64, scale: float = 2.0):
    g = torch.Generator().manual_seed(1)
    sides = [
        (scale * torch.randn(k, WIDTH, generator=g, dtype=torch.float64)).to(dtype)
        for k in (N, N, HARD)
    ]
    t = torch.tensor(0.3, dtype=dtype)
    return [x.requires_grad_() for x in (*sides, t)], cell.to(dtype)


def value_and_gradients(cell, inputs, equal, both_ways, hard=False, *, reference):
    left, right, extra, t = inputs
    a, b = cell(left, right)
    c = cell.shrink_right(extra) if hard else None
    ids = IDS if hard else IDS[:N]
    if reference:
        candidates = b if c is None else torch.cat([b, c])
        value = loop(a, candidates, t, equal, both_ways, ids.tolist())
    else:
        value = info_nce(
            a, b, t, both_ways=both_ways, hard_negatives=c, ids=ids, false_negatives=equal
        )
    wanted = [*inputs[:2], *([extra] if hard else []), t, *cell.parameters()]
    return value, torch.autograd.grad(value, wanted)


@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("equal", ["mask", "positive"])
@pytest.mark.parametrize("name", [*CELLS, "0.3,0.7"])
def test_every_cell_is_the_loop_over_single_scores(name, equal, how):
    inputs, cell = case(Cell(name))
    value, gradients = value_and_gradients(cell, inputs, equal, **how, reference=False)
    wanted, expected = value_and_gradients(cell, inputs, equal, **how, reference=True)
    torch.testing.assert_close(value, wanted, rtol=1e-12, atol=1e-12)
    for one, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("equal", ["mask", "positive"])
def test_every_path_is_the_loop(path, equal, how):
    inputs, cell = case(Cell("dnorm"))
    value, gradients = value_and_gradients(cell, inputs, equal, **how, reference=False)
    wanted, expected = value_and_gradients(cell, inputs, equal, **how, reference=True)
    torch.testing.assert_close(value, wanted, rtol=1e-12, atol=1e-12)
    for one, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("equal", ["mask", "positive"])
def test_a_false_negative_far_above_its_positive_costs_no_digits(equal):
    """In float32 a masked score of 200 would drown a positive of 2 if it were taken off a sum."""
    left = torch.eye(4)
    right = torch.eye(4).clone()
    right[1, 0] = 100.0  # row 0 scores 200 with column 1, which has its id
    ids = torch.tensor([0, 0, 1, 2])
    found = info_nce(left, right, 0.5, ids=ids, false_negatives=equal)
    wanted = loop(left.double(), right.double(), 0.5, equal, True, ids.tolist())
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("equal", ["mask", "positive"])
def test_ids_that_all_differ_change_nothing(equal):
    inputs, cell = case(Cell("cosine"))
    left, right = cell(*inputs[:2])
    found = info_nce(left, right, inputs[3], ids=torch.arange(N), false_negatives=equal)
    torch.testing.assert_close(found, info_nce(left, right, inputs[3]), rtol=1e-12, atol=0)


def test_one_thing_alone_has_nothing_to_be_told_from():
    inputs, _ = case(Cell("cosine"))
    same = torch.zeros(N, dtype=torch.long)
    assert info_nce(*inputs[:2], inputs[3], ids=same).item() == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("equal", ["mask", "positive"])
def test_gradients_of_gradients_and_torch_func(equal):
    inputs, _ = case(Cell("cosine"), scale=0.5)
    left, right, _, t = inputs
    ids = IDS[:N]

    def penalised(loss):
        (grad,) = torch.autograd.grad(loss, left, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), right)[0]

    found = penalised(info_nce(left, right, t, ids=ids, false_negatives=equal))
    wanted = penalised(loop(left, right, t, equal, True, ids.tolist()))
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-12)
    by_func = torch.func.grad(lambda x: info_nce(x, right, t, ids=ids, false_negatives=equal))(left)
    (expected,) = torch.autograd.grad(loop(left, right, t, equal, True, ids.tolist()), left)
    torch.testing.assert_close(by_func, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("equal", ["mask", "positive"])
def test_compiled_without_a_break(equal):
    inputs, _ = case(Cell("cosine"))
    left, right, _, t = inputs

    def step(left, right, t, ids):
        return info_nce(left, right, t, ids=ids, false_negatives=equal)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(left, right, t, IDS[:N]), (left, right, t))
    wanted = torch.autograd.grad(step(left, right, t, IDS[:N]), (left, right, t))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


class Threads(Split):
    """Ranks that are threads of this process: what they exchange is reduced in a list."""

    def __init__(self, rank: int, count: int, parts: list, barrier: threading.Barrier) -> None:
        super().__init__(rank, count)
        self.parts, self.barrier = parts, barrier

    def exchange(self, collective, *inputs, payload=None, src=None):
        x, *op = inputs
        self.parts[self.rank] = x.clone()
        self.barrier.wait()
        stacked = torch.stack(self.parts)
        reduced = stacked.amax(0) if op == [dist.ReduceOp.MAX] else stacked.sum(0)
        self.barrier.wait()
        x.copy_(reduced)


@pytest.mark.parametrize("equal", ["mask", "positive"])
@pytest.mark.parametrize("count", [2, 3])
def test_ranks_share_the_work_and_their_mean_gradient_is_the_whole(path, equal, count):
    inputs, _ = case(Cell("cosine"))
    left, right, hard, t = inputs
    parts, barrier = [None] * count, threading.Barrier(count)
    found = [None] * count

    def rank(k: int) -> None:
        split = Threads(k, count, parts, barrier)
        value = info_nce(
            left, right, t, hard_negatives=hard, ids=IDS, false_negatives=equal, split=split
        )
        found[k] = value, torch.autograd.grad(value, inputs)

    threads = [threading.Thread(target=rank, args=(k,)) for k in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    whole = info_nce(left, right, t, hard_negatives=hard, ids=IDS, false_negatives=equal)
    expected = torch.autograd.grad(whole, inputs)
    for value, _ in found:
        torch.testing.assert_close(value, whole, rtol=1e-12, atol=1e-12)
    for k, other in enumerate(expected):
        mean = sum(gradients[k] for _, gradients in found) / count
        torch.testing.assert_close(mean, other, rtol=1e-9, atol=1e-12)


class Largest(TorchDispatchMode):
    """The most numbers that one tensor of a computation has."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(found) if isinstance(x, torch.Tensor)]
        self.numel = max(self.numel, *sizes, 0)
        return found


@pytest.mark.parametrize("equal", ["mask", "positive"])
def test_no_matrix_of_all_scores_or_ids_is_made(equal, monkeypatch):
    monkeypatch.setattr(tiles, "TILE", 64)
    monkeypatch.setattr(tiles, "WORKSPACE", 0)
    rows, width = 1000, 16
    left, right = torch.randn(2, rows, width)
    left.requires_grad_()
    with Largest() as mode:
        info_nce(left, right, 1.0, ids=torch.arange(rows) // 5, false_negatives=equal).backward()
    assert mode.numel == rows * width


def test_mean_positives_by_hand():
    left = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    right = torch.tensor([[3.0, 1.0], [1.0, 5.0], [5.0, 1.0]])
    # Row 0 has columns 0 and 2 (products 3 and 5), row 1 has column 1 (10).
    assert mean_positives(left, right, torch.tensor([8, -3, 8])).item() == 4 + 10


@pytest.mark.parametrize(
    ("ids", "equal", "says"),
    [
        (torch.arange(5), "mask", r"Expected ids as 4 whole numbers, .* got \(5,\) of torch.int64"),
        (torch.ones(4), "mask", r"got \(4,\) of torch.float32"),
        (torch.ones(4, 4).long(), "positive", r"got \(4, 4\) of torch.int64"),
        (
            torch.arange(4),
            "drop",
            "Unknown value of false_negatives 'drop': expected one of keep, mask, positive",
        ),
    ],
)
def test_ids_that_are_none_are_refused(ids, equal, says):
    with pytest.raises(ValueError, match=says):
        info_nce(torch.randn(4, 3), torch.randn(4, 3), 1.0, ids=ids, false_negatives=equal)


def test_rows_of_tokens_have_one_id_exactly_if_they_are_equal():
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 3, (400, 4), generator=g)  # 81 possible rows
    ids = row_ids(tokens)
    equal = (tokens[:, None] == tokens).all(-1)
    assert torch.equal(ids[:, None] == ids, equal)
    assert not equal.all()


def test_padding_is_no_part_of_a_text():
    row = torch.arange(1, 78)[None]
    for width in (78, 500):
        longer = torch.zeros(2, width, dtype=torch.int32)
        longer[:, :77] = row
        longer[1, 77] = 9
        found = row_ids(longer)
        assert found[0] == row_ids(row)[0]
        assert found[1] != found[0]


@pytest.mark.parametrize("direction", ["both", "left_to_right", "right_to_left"])
@pytest.mark.parametrize("false_negatives", ["keep", "mask", "positive"])
def test_the_objective_takes_ids(false_negatives, direction):
    objective = Objective(
        "qnorm", "info_nce", population=99, temperature=0.4, scale="fixed", direction=direction,
        false_negatives=false_negatives,
    )  # fmt: skip
    left, right = torch.randn(2, 9, 4, dtype=torch.float64)
    ids = torch.tensor([3, 1, 3, 4, 5, 1, 3, 8, 9])
    found = objective.double()(left, right, ids=ids)["contrastive"]
    a, b = objective.cell(left, right)
    names = list(range(9)) if false_negatives == "keep" else ids.tolist()
    sides = (b, a) if direction == "right_to_left" else (a, b)
    # The objective keeps its temperature as a logarithm in float32.
    t = objective.temperature
    wanted = loop(*sides, t, false_negatives, direction == "both", names)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"loss": "siglip"}, "Expected false_negatives=mask with info_nce, .* got siglip"),
        ({"within_view": True}, "without within_view and groups of negatives"),
        ({"negatives": 4}, "without within_view and groups of negatives"),
        ({"false_negatives": "drop"}, "Unknown false_negatives 'drop': expected one of keep, mask"),
    ],
)
def test_an_objective_that_cannot_leave_them_out_says_so(settings, says):
    with pytest.raises(ValueError, match=says):
        Objective(**{"loss": "info_nce", "population": 9, "false_negatives": "mask"} | settings)
    with pytest.raises(ValueError, match="Expected ids for false_negatives=mask, got none."):
        Objective(loss="info_nce", population=9, false_negatives="mask")(*torch.randn(2, 4, 3))
