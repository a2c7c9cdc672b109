"""Drop-in losses: the peers' signatures and values, on one process and on two."""

import inspect
import json
import math
import subprocess
import sys
import warnings
from datetime import timedelta

import lightly.loss
import open_clip.loss
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from offsphere import dropin, losses, split
from offsphere.cells import Cell, calibration_ratio
from offsphere.variance import negative_variance, spread_out

PEERS = {
    "ClipLoss": open_clip.loss.ClipLoss,
    "SigLipLoss": open_clip.loss.SigLipLoss,
    "NTXentLoss": lightly.loss.NTXentLoss,
    "DCLLoss": lightly.loss.DCLLoss,
}


def pair(n=24, d=8, seed=0):
    g = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(n, d, generator=g).double() for _ in range(2))


def arguments(name):
    scale, bias = torch.tensor(9.0).double(), torch.tensor(-7.0).double()
    return {"ClipLoss": (scale,), "SigLipLoss": (scale, bias)}.get(name, ())


@pytest.mark.parametrize("name", PEERS)
def test_signatures_start_with_the_peers_own(name):
    for method in ("__init__", "forward"):
        theirs = list(inspect.signature(getattr(PEERS[name], method)).parameters.values())
        mine = list(inspect.signature(getattr(getattr(dropin, name), method)).parameters.values())
        for a, b in zip(theirs, mine, strict=False):
            assert a.name == b.name
            assert a.default == b.default
        assert len(mine) >= len(theirs)


@pytest.mark.parametrize("name", PEERS)
def test_cosine_equals_the_peer(name):
    a, b = pair()
    if name in ("ClipLoss", "SigLipLoss"):
        theirs = PEERS[name]()(F.normalize(a), F.normalize(b), *arguments(name))
    else:
        theirs = PEERS[name]()(a, b)
    mine = getattr(dropin, name)()(a, b, *arguments(name))
    assert mine.item() == pytest.approx(theirs.item(), rel=1e-10)


def test_dclw_weights_equal_the_peer():
    a, b = pair()
    theirs = lightly.loss.DCLLoss(0.2, weight_fn=weights)(a, b)
    mine = dropin.DCLLoss(0.2, weight_fn=weights)(a, b)
    assert mine.item() == pytest.approx(theirs.item(), rel=1e-10)


def weights(out0, out1):
    """The weights of the DCLW paper as lightly has them."""
    return 2 - len(out0) * torch.softmax((out0 * out1).sum(1).detach() / 0.5, 0)


def test_cell_and_variance_weight_act():
    a, b = pair()
    loss = dropin.ClipLoss(cell="qnorm", variance_weight=3.0, population=100)
    scale = torch.tensor(0.5).double()
    contrastive = losses.info_nce(*Cell("qnorm")(a, b), 2.0)
    variance = 3.0 * negative_variance(F.normalize(a), F.normalize(b), 100)
    named = loss(a, b, scale, output_dict=True)
    assert named["contrastive_loss"].item() == pytest.approx(contrastive.item(), rel=1e-12)
    assert named["variance_loss"].item() == pytest.approx(variance.item(), rel=1e-12)
    assert loss(a, b, scale).item() == pytest.approx((contrastive + variance).item(), rel=1e-12)
    stacked = torch.cat([a, b])
    dot = dropin.NTXentLoss(2.0, cell="dot", variance_weight=3.0, population=100)(a, b)
    want = losses.nt_xent(stacked, stacked, 2.0) + variance
    assert dot.item() == pytest.approx(want.item(), rel=1e-12)


@pytest.mark.parametrize("name", PEERS)
def test_gor_is_added_with_its_weight(name):
    a, b = pair()
    u, v = F.normalize(a), F.normalize(b)
    gor = 3.0 * (spread_out(u, u) + spread_out(v, v)) / 2
    make = getattr(dropin, name)
    without = make(cell="dnorm")(a, b, *arguments(name))
    got = make(cell="dnorm", gor_weight=3.0)(a, b, *arguments(name))
    assert got.item() == pytest.approx((without + gor).item(), rel=1e-12)
    if name in ("ClipLoss", "SigLipLoss"):
        named = make(gor_weight=3.0)(a, b, *arguments(name), output_dict=True)
        assert named.keys() == {"contrastive_loss", "gor_loss"}
        assert named["gor_loss"].item() == pytest.approx(gor.item(), rel=1e-12)


def test_refusals_name_the_remedy():
    with pytest.raises(ValueError, match="gor_weight of at least 0, got -1"):
        dropin.NTXentLoss(gor_weight=-1.0)
    with pytest.raises(ValueError, match="needs population="):
        dropin.ClipLoss(variance_weight=1.0)
    with pytest.raises(ValueError, match="at least 0"):
        dropin.ClipLoss(variance_weight=-1.0)
    for size in (64, -1, (64,), (-1, 8), (1, 2, 3)):
        with pytest.raises(ValueError, match=r"0 or \(rows, features\), got"):
            dropin.NTXentLoss(memory_bank_size=size)
    with pytest.raises(ValueError, match="torch.distributed"):
        dropin.ClipLoss(use_horovod=True)
    with pytest.raises(ValueError, match="init_process_group"):
        dropin.ClipLoss(world_size=2)(*pair(), 1.0)


# What lightly's and open_clip's own tests check, and what their users rely on.


@pytest.mark.parametrize("name", ["NTXentLoss", "DCLLoss"])
@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("temperature", [0.1, 1, 10])
def test_gathering_without_a_process_group_is_one_process(name, n, temperature):
    a, b = pair(n, d=3)
    loss = getattr(dropin, name)(temperature=temperature, gather_distributed=True)
    if name == "DCLLoss" and n == 1:
        with pytest.raises(ValueError, match="at least 2 pairs for DCL"):
            loss(a, b)
        return
    theirs = PEERS[name](temperature=temperature, gather_distributed=True)(a, b)
    assert loss(a, b).item() == pytest.approx(theirs.item(), rel=1e-9, abs=1e-12)
    assert loss(b, a).item() == pytest.approx(theirs.item(), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", ["ClipLoss", "SigLipLoss", "NTXentLoss"])
def test_a_last_batch_of_one_costs_what_the_peer_says(name):
    a, b = (x.requires_grad_() for x in pair(1))
    loss = getattr(dropin, name)(variance_weight=2.0, population=9, gor_weight=2.0)
    value = loss(a, b, *arguments(name))
    value.backward()
    u, v = (x.detach().clone().requires_grad_() for x in (a, b))
    theirs = PEERS[name]()(F.normalize(u), F.normalize(v), *arguments(name))
    theirs.backward()
    assert value.item() == pytest.approx(theirs.item(), rel=1e-10, abs=1e-15)
    torch.testing.assert_close(a.grad, u.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("bank", "n"), [(16, 4), (16, 16), (8, 1), (12, 6), (1, 1)])
def test_the_memory_bank_equals_lightlys(bank, n):
    """Where batches fill the bank evenly: ours is a ring, lightly drops what does not fit."""
    torch.manual_seed(3)
    mine = dropin.NTXentLoss(0.3, memory_bank_size=(bank, 8))
    torch.manual_seed(3)
    theirs = lightly.loss.NTXentLoss(0.3, memory_bank_size=(bank, 8))
    for step in range(9):
        a, b = (x.float() for x in pair(n, seed=step))
        a.requires_grad_(step != 4)  # without a gradient the bank stays as it is
        u = a.detach().clone().requires_grad_(step != 4)
        got, want = mine(a, b), theirs(u, b)
        assert got.item() == pytest.approx(want.item(), rel=1e-5)
        if step != 4:
            got.backward()
            want.backward()
            torch.testing.assert_close(a.grad, u.grad, rtol=1e-4, atol=1e-6)


def test_the_bank_keeps_raw_keys_and_is_in_the_state_dict():
    loss = dropin.NTXentLoss(0.3, memory_bank_size=(6, 8), cell="dnorm")
    seen = []
    for step in range(5):
        a, b = (x.float().requires_grad_() for x in pair(4, seed=step))
        before = loss.memory_bank.rows.clone()
        value = loss(a, b)
        if step:
            left, right = Cell("dnorm")(a, b)
            queue = F.normalize(before)
            want = losses.moco_nce(left, right, queue, 0.3)
            assert value.item() == pytest.approx(want.item(), rel=1e-6)
        value.backward()
        seen += b.detach().tolist()
    assert sorted(loss.memory_bank.rows.tolist()) == sorted(seen[-6:])
    again = dropin.NTXentLoss(0.3, memory_bank_size=(6, 8), cell="dnorm")
    again.load_state_dict(loss.state_dict())
    a, b = (x.float() for x in pair(4, seed=9))
    assert again(a, b).item() == loss(a, b).item()


def test_a_new_bank_has_the_norms_of_the_first_keys():
    loss = dropin.NTXentLoss(0.3, memory_bank_size=(5, 8), cell="dot")
    a, b = (x.float() for x in pair(3))
    loss(10 * a, 10 * b)
    norms = (10 * b).norm(dim=1)
    torch.testing.assert_close(
        loss.memory_bank.rows.norm(dim=1), norms[[0, 1, 2, 0, 1]], rtol=1e-5, atol=0
    )
    fresh = dropin.NTXentLoss(0.3, memory_bank_size=(5, 8), cell="dot")
    loss.load_state_dict(fresh.state_dict())
    loss(a, b)
    torch.testing.assert_close(
        loss.memory_bank.rows.norm(dim=1), norms[[0, 1, 2, 0, 1]] / 10, rtol=1e-5, atol=0
    )


def test_the_bank_takes_part_in_both_terms():
    torch.manual_seed(0)
    loss = dropin.NTXentLoss(
        0.3, (6, 8), cell="dot", variance_weight=3.0, population=50, gor_weight=2.0
    )
    plain = dropin.NTXentLoss(0.3, (6, 8), cell="dot")
    plain.load_state_dict(loss.state_dict())
    a, b = (x.float() for x in pair(4))
    got, without = loss(a, b), plain(a, b)
    u, v = F.normalize(a), F.normalize(loss.memory_bank.rows)
    terms = 3.0 * negative_variance(u, v, 50, paired=False) + 2.0 * spread_out(u, v, paired=False)
    assert got.item() == pytest.approx((without + terms).item(), rel=1e-6)


def test_clip_loss_honours_a_bias_with_a_gradient_of_zero():
    a, b = pair()
    scale = torch.tensor(9.0).double().requires_grad_()
    bias = torch.tensor([-7.0]).double().requires_grad_()
    loss = dropin.ClipLoss()(a, b, scale, logit_bias=bias, output_dict=True)["contrastive_loss"]
    loss.backward()
    theirs = open_clip.loss.ClipLoss()(F.normalize(a), F.normalize(b), 9.0, -7.0)
    assert loss.item() == pytest.approx(theirs.item(), rel=1e-10)
    assert bias.grad.tolist() == [0.0]
    one = dropin.ClipLoss()(*pair(1), scale, logit_bias=bias)
    assert torch.autograd.grad(one, (scale, bias))[1].tolist() == [0.0]


def test_siglip_loss_takes_no_bias_as_the_peer_does():
    a, b = pair()
    theirs = open_clip.loss.SigLipLoss()(F.normalize(a), F.normalize(b), 9.0, None)
    mine = dropin.SigLipLoss()(a, b, 9.0, None)
    assert mine.item() == pytest.approx(theirs.item(), rel=1e-10)


def test_attributes_that_open_clip_and_its_users_read():
    given = {"local_loss": True, "gather_with_grad": True, "cache_labels": True, "rank": 1}
    for make, theirs in (
        (lambda c: c(**given, world_size=2), ("ClipLoss", open_clip.loss.ClipLoss)),
        (lambda c: c(True, 1, 2, "gather"), ("SigLipLoss", open_clip.loss.SigLipLoss)),
        (lambda c: c(), ("SigLipLoss", open_clip.loss.SigLipLoss)),
    ):
        name, peer = theirs
        mine, want = make(getattr(dropin, name)), make(peer)
        plain = {k: v for k, v in vars(want).items() if not k.startswith("_") and k != "training"}
        assert {k: getattr(mine, k) for k in plain} == plain
    assert dropin.SigLipLoss(chunk_size=7).chunk_size == 7
    with pytest.raises(ValueError, match="Unknown dist_impl 'shft'.*Did you mean 'shift'"):
        dropin.SigLipLoss(dist_impl="shft")


@pytest.mark.parametrize("name", PEERS)
def test_calibration_multiplies_the_temperature_by_the_cells_ratio(name):
    a, b = (3 * x.float() for x in pair())
    make = getattr(dropin, name)
    loss = make(cell="dot", scale="calibrated")
    with pytest.raises(ValueError, match="before its first training batch"):
        loss.eval()(a, b, *arguments(name))
    value = loss.train()(a, b, *arguments(name)).item()
    cell, stacked = Cell("dot"), torch.cat([a, b])
    views = name in ("NTXentLoss", "DCLLoss")
    ratio = calibration_ratio(
        cell, *((stacked, stacked) if views else (a, b)), exclude=(0, 24, -24) if views else (0,)
    )
    assert loss.ratio.item() == pytest.approx(ratio.item(), rel=1e-6)
    if views:
        want = make(make().temperature * ratio.item(), cell="dot")(a, b)
    else:
        scale, *bias = arguments(name)
        want = make(cell="dot")(a, b, scale / ratio, *bias)
    assert value == pytest.approx(want.item(), rel=1e-5)
    again = make(cell="dot", scale="calibrated")
    again.load_state_dict(loss.state_dict())
    two = again(5 * a, b, *arguments(name)), loss(5 * a, b, *arguments(name))
    assert two[0].item() == two[1].item()
    assert not make(cell="dot").state_dict()
    with pytest.raises(ValueError, match="Did you mean 'calibrated'"):
        make(scale="calibrate")


@pytest.mark.parametrize("name", PEERS)
def test_a_cell_that_is_fed_unit_rows_says_so_once(name):
    a, b = (x.float().requires_grad_() for x in pair())
    u, v = F.normalize(a).bfloat16(), F.normalize(b).bfloat16()
    loss = getattr(dropin, name)(cell="dot")
    with pytest.warns(UserWarning, match="dot keeps the magnitude of the left and the right side"):
        loss(u, v, *arguments(name))
    quiet = [
        (loss, u, v),
        (getattr(dropin, name)(), u, v),
        (getattr(dropin, name)(cell="dot"), a, b),
    ]
    if name in ("ClipLoss", "SigLipLoss"):
        with pytest.warns(UserWarning, match="dnorm keeps the magnitude of the left side"):
            getattr(dropin, name)(cell="dnorm")(u, b, *arguments(name))
        with pytest.warns(UserWarning, match="learnable keeps"):
            getattr(dropin, name)(cell="learnable")(u, v, *arguments(name))
        quiet.append((getattr(dropin, name)(cell="dnorm"), a, v))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for made, x, y in quiet:
            made(x, y, *arguments(name))


def test_exponents_that_no_optimizer_has_are_told_once(monkeypatch):
    monkeypatch.setattr(dropin, "PATIENCE", 5)
    a, b = pair()
    orphan, kept = (dropin.ClipLoss(cell="learnable").double() for _ in range(2))
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    optimizer.add_param_group({"params": kept.parameters(), "weight_decay": 0.0})
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(12):
            orphan(a, b, 5.0).backward()
        assert ["add_param_group" in str(x.message) for x in told] == [True]
        told.clear()
        for _ in range(12):
            optimizer.zero_grad()
            kept(a, b, 5.0).backward()
            optimizer.step()
        assert not told
    assert orphan.cell.exponents[0].item() == 0.5
    assert kept.cell.exponents[0].item() != 0.5


@pytest.mark.parametrize("name", PEERS)
def test_bad_input_is_refused_in_one_sentence(name):
    a, b = (x.float() for x in pair(6))
    loss, rest = getattr(dropin, name)(), arguments(name)
    for left, right, message in (
        (a, b[:4], "as many rows on both sides, got 6 and 4"),
        (a[:4], b, "as many rows on both sides, got 4 and 6"),
        (a, b.double(), "one dtype, got torch.float32 and torch.float64"),
        (a[None], b[None], r"matrices of one width, got \(1, 6, 8\)"),
        (a, b[:, :5], r"one width, got \(6, 8\) and \(6, 5\)"),
        (a.long(), b.long(), "floating-point"),
        (a[:0], b[:0], "empty batch"),
        (torch.full_like(a, torch.nan), b, "finite embeddings"),
    ):
        with pytest.raises(ValueError, match=message):
            loss(left, right, *rest)
    if rest:
        for scale in (torch.tensor([1.0, 2.0]), 0.0, -1.0, torch.tensor(torch.nan), torch.inf):
            with pytest.raises(ValueError, match="logit_scale"):
                loss(a, b, scale, *rest[1:])
        with pytest.raises(ValueError, match="one bias, got 2 values"):
            loss(a, b, rest[0], torch.zeros(2))
    else:
        for temperature in (0.0, -1.0, torch.nan, torch.inf, 0):
            with pytest.raises(ValueError, match="temperature above 0"):
                getattr(dropin, name)(temperature)


@pytest.mark.parametrize(("name", "rest"), [("ClipLoss", ()), ("SigLipLoss", (-3.0,))])
def test_under_torch_func_a_scale_that_is_not_above_zero_makes_the_loss_nan(name, rest):
    """As on an accelerator, nobody can look at it."""
    loss = getattr(dropin, name)()
    for scale, bad in ((-1.0, True), (math.nan, True), (9.0, False)):
        of_scale = torch.func.grad_and_value(lambda s: loss(*pair(), s, *rest))
        assert of_scale(torch.tensor(scale))[1].isnan().item() == bad


@pytest.mark.parametrize("scale", ["fixed", "calibrated"])
@pytest.mark.parametrize(
    ("name", "loss", "bounds"),
    [
        ("ClipLoss", "info_nce", {(9.0,): 9.009, (torch.tensor(9.0),): math.inf}),
        ("NTXentLoss", "nt_xent", {(): 1.001 / 0.5}),
        ("DCLLoss", "dcl", {(): 1.001 / 0.1}),
    ],
)
def test_the_largest_score_is_known_of_unit_rows_and_numbers(
    monkeypatch, name, loss, bounds, scale
):
    found, function = [], getattr(losses, loss)

    def noted(*sides, largest, **rest):
        found.append(largest)
        return function(*sides, largest=largest, **rest)

    monkeypatch.setattr(losses, loss, noted)
    a, b = pair()
    for more, bound in bounds.items():
        getattr(dropin, name)(scale=scale)(a, b, *more)
        assert found.pop() == pytest.approx(bound, rel=1e-6)
        getattr(dropin, name)(scale=scale, cell="qnorm")(a, b, *more)
        assert found.pop() == math.inf


def rank_gradients(rank, world, port, compiled):
    """Run by each rank as a script: the gradients of a DDP tower, from rank 0 as JSON."""
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    results = {}
    for name in PEERS:
        torch.manual_seed(0)
        tower = torch.nn.Linear(8, 4).double()
        ddp = torch.nn.parallel.DistributedDataParallel(tower)
        a, b = (x.chunk(world)[rank] for x in pair())
        of_clip = name in ("ClipLoss", "SigLipLoss")
        kwargs = {"world_size": world} if of_clip else {"gather_distributed": True}
        loss = getattr(dropin, name)(
            cell="dnorm", variance_weight=2.0, population=100, gor_weight=2.0, **kwargs
        )
        loss = torch.compile(loss, backend="aot_eager") if compiled else loss
        loss(*ddp(torch.cat([a, b])).chunk(2), *arguments(name)).backward()
        results[name] = tower.weight.grad.tolist()
    results |= {"local": local_losses(rank, world)}
    with pytest.raises(ValueError, match=r"as many rows on every rank, got 3, 4\."):
        dropin.NTXentLoss(gather_distributed=True)(*(torch.randn(3 + rank, 4) for _ in range(2)))
    rows_as_on_an_accelerator(rank)
    dist.destroy_process_group()
    if rank == 0:
        print(json.dumps(results))


def rows_as_on_an_accelerator(rank):
    """Where nobody is asked at each step: unequal shares are refused there too."""
    split.ASKED_DEVICES, split.PATIENCE = (), timedelta(seconds=2)
    split._agreed.update(rows=-1, times=0)
    for rows in (3, 3, 5):
        gathered = split.gather_with_gradient(torch.full((rows, 2), float(rank)))
        assert gathered.tolist() == [[0.0, 0.0]] * rows + [[1.0, 1.0]] * rows
    assert split._agreed == {"rows": 5, "times": 2}
    with pytest.raises(ValueError, match=r"as many rows on every rank, got 6, 7\."):
        split.gather_with_gradient(torch.zeros(6 + rank, 2))
    if rank:  # the other has its 5 rows again, and waits for them in vain
        with pytest.raises(ValueError, match="got 4 on rank 1, 5 before, and another rank still"):
            split.gather_with_gradient(torch.zeros(4, 2))


def local_losses(rank, world):
    """Value and gradient of `local_loss`, ours and open_clip's."""
    from open_clip.loss import ClipLoss

    found = []
    place = {"local_loss": True, "gather_with_grad": True, "rank": rank, "world_size": world}
    # The cell that leaves unit rows alone: open_clip's loss does not normalise.
    for loss in (dropin.ClipLoss(**place, cell="dot"), ClipLoss(**place)):
        sides = [F.normalize(x.chunk(world)[rank]).requires_grad_() for x in pair()]
        value = loss(*sides, torch.tensor(7.0, dtype=torch.float64))
        value.backward()
        found.append([value.item(), *(x.grad.tolist() for x in sides)])
    return found


@pytest.mark.parametrize("compiled", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_two_ranks_have_the_gradients_of_the_whole_batch(free_port, compiled):
    """Compiled too, where the graph ends before an exchange and another begins after it."""
    port = str(free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, str(rank), "2", port, str(compiled)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=300)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0]
    got = json.loads(outputs[0])
    mine, theirs = got.pop("local")
    assert mine[0] == pytest.approx(theirs[0], rel=1e-12)
    for x, y in zip(mine[1:], theirs[1:], strict=True):
        torch.testing.assert_close(torch.tensor(x), torch.tensor(y), rtol=1e-6, atol=1e-9)
    for name in PEERS:
        torch.manual_seed(0)
        tower = torch.nn.Linear(8, 4).double()
        loss = getattr(dropin, name)(
            cell="dnorm", variance_weight=2.0, population=100, gor_weight=2.0
        )
        a, b = (tower(x) for x in pair())
        loss(a, b, *arguments(name)).backward()
        gradient = torch.tensor(got[name], dtype=torch.float64)
        torch.testing.assert_close(gradient, tower.weight.grad, rtol=1e-10, atol=1e-12)


if __name__ == "__main__":
    rank_gradients(*(int(word) for word in sys.argv[1:]))
