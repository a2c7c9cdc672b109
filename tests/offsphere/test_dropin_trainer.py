"""open_clip's own trainer, as installed, with its ClipLoss and with ours: the same twenty steps."""

import json
import subprocess
import sys
from types import SimpleNamespace

import open_clip.loss
import pytest
import torch
import torch.distributed as dist
from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg
from open_clip_train.train import train_one_epoch

from offsphere import dropin

STEPS, BATCH, RANKS = 20, 24, 2


class Batches(list):
    """What open_clip's trainer asks of a loader."""

    num_batches, num_samples = STEPS, STEPS * BATCH


def batches(rank, world):
    """This rank's rows of each batch."""
    g = torch.Generator().manual_seed(0)
    whole = (
        (
            torch.randn(BATCH, 3, 16, 16, generator=g),
            torch.randint(1, 64, (BATCH, 8), generator=g),
        )
        for _ in range(STEPS)
    )
    return Batches(tuple(x.chunk(world)[rank] for x in batch) for batch in whole)


def trained(loss, bias, rank=0, world=1):
    """The losses that the trainer logs, and the weights it ends with."""
    torch.manual_seed(1)
    vision = CLIPVisionCfg(layers=1, width=32, head_width=16, patch_size=8, image_size=16)
    text = CLIPTextCfg(context_length=8, vocab_size=64, width=32, heads=2, layers=1)
    model = CLIP(16, vision, text, init_logit_bias=bias, output_dict=True)
    args = SimpleNamespace(
        device="cpu", precision="fp32", accum_freq=1, distill=False, skip_scheduler=True,
        log_every_n_steps=1, grad_clip_norm=None, batch_size=BATCH // world, world_size=world,
        rank=rank, wandb=False, horovod=False, log_local=False,
    )  # fmt: skip
    logged = []
    writer = SimpleNamespace(
        add_scalar=lambda name, value, step: logged.append(value) if name == "train/loss" else None
    )
    data = SimpleNamespace(dataloader=batches(rank, world), set_epoch=lambda epoch: None)
    # Plain descent: Adam would blow up the rounding of weights whose gradient is zero (key biases).
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    tower = model if world == 1 else torch.nn.parallel.DistributedDataParallel(model)
    train_one_epoch(tower, {"train": data}, loss, 0, optimizer, None, None, None, args, writer)
    return logged, torch.nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize("bias", [None, -10.0])
def test_twenty_steps_on_one_process(bias):
    theirs, weights = trained(open_clip.loss.ClipLoss(cache_labels=True), bias)
    mine, same = trained(dropin.ClipLoss(cache_labels=True), bias)
    assert len(theirs) == STEPS
    assert theirs[0] - theirs[-1] > 0.5
    assert mine == pytest.approx(theirs, abs=1e-5)
    torch.testing.assert_close(same, weights, rtol=0, atol=1e-5)


def on_rank(rank, port):
    """Run by each rank as a script: what is logged on the first, as JSON, and the weights' sum."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    found = {}
    for local in (False, True):
        for who, module in (("theirs", open_clip.loss), ("ours", dropin)):
            place = {"local_loss": local, "rank": rank, "world_size": RANKS}
            loss = module.ClipLoss(gather_with_grad=True, cache_labels=True, **place)
            logged, weights = trained(loss, None, rank, RANKS)
            found[f"{who}, local {local}"] = logged, weights.tolist()
    dist.destroy_process_group()
    if rank == 0:
        print(json.dumps(found))


@pytest.mark.slow
def test_twenty_steps_on_two_ranks(free_port):
    port = str(free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, str(rank), port],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    outputs = [process.communicate(timeout=240)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0] * RANKS
    found = json.loads(outputs[0])
    alone, weights = trained(open_clip.loss.ClipLoss(), None)
    assert found["ours, local False"][0] == pytest.approx(alone, abs=1e-5)
    for local in (False, True):
        theirs, mine = (found[f"{who}, local {local}"] for who in ("theirs", "ours"))
        assert len(theirs[0]) == STEPS
        assert mine[0] == pytest.approx(theirs[0], abs=1e-5)
        for other in (theirs, mine):
            torch.testing.assert_close(torch.tensor(other[1]), weights, rtol=0, atol=1e-5)


if __name__ == "__main__":
    on_rank(*(int(word) for word in sys.argv[1:]))
