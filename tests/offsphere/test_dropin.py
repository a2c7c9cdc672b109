"""Drop-in losses: the peers' signatures and values, on one process and on two."""

import inspect
import json
import subprocess
import sys

import lightly.loss
import open_clip.loss
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from offsphere import dropin, losses
from offsphere.cells import Cell
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


def rank_gradients(rank, world, port):
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
        loss(*ddp(torch.cat([a, b])).chunk(2), *arguments(name)).backward()
        results[name] = tower.weight.grad.tolist()
    dist.destroy_process_group()
    if rank == 0:
        print(json.dumps(results))


def test_two_ranks_have_the_gradients_of_the_whole_batch(free_port):
    port = str(free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, str(rank), "2", port],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0]
    got = json.loads(outputs[0])
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
