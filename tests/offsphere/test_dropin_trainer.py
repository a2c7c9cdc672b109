"""open_clip's own trainer, as installed, with its ClipLoss and with ours: the same twenty steps."""

from types import SimpleNamespace

import open_clip.loss
import pytest
import torch
from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg
from open_clip_train.train import train_one_epoch

from offsphere import dropin

STEPS, BATCH = 20, 24


class Batches(list):
    """What open_clip's trainer asks of a loader."""

    num_batches, num_samples = STEPS, STEPS * BATCH


def batches():
    g = torch.Generator().manual_seed(0)
    return Batches(
        (
            torch.randn(BATCH, 3, 16, 16, generator=g),
            torch.randint(1, 64, (BATCH, 8), generator=g),
        )
        for _ in range(STEPS)
    )


def trained(loss, bias):
    """The losses that the trainer logs, and the weights it ends with."""
    torch.manual_seed(1)
    vision = CLIPVisionCfg(layers=1, width=32, head_width=16, patch_size=8, image_size=16)
    text = CLIPTextCfg(context_length=8, vocab_size=64, width=32, heads=2, layers=1)
    model = CLIP(16, vision, text, init_logit_bias=bias, output_dict=True)
    args = SimpleNamespace(
        device="cpu", precision="fp32", accum_freq=1, distill=False, skip_scheduler=True,
        log_every_n_steps=1, grad_clip_norm=None, batch_size=BATCH, world_size=1,
        rank=0, wandb=False, horovod=False, log_local=False,
    )  # fmt: skip
    logged = []
    writer = SimpleNamespace(
        add_scalar=lambda name, value, step: logged.append(value) if name == "train/loss" else None
    )
    data = SimpleNamespace(dataloader=batches(), set_epoch=lambda epoch: None)
    # Plain descent: Adam would blow up the rounding of weights whose gradient is zero (key biases).
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    train_one_epoch(model, {"train": data}, loss, 0, optimizer, None, None, None, args, writer)
    return logged, torch.nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize("bias", [None, -10.0])
def test_twenty_steps_on_one_process(bias):
    theirs, weights = trained(open_clip.loss.ClipLoss(cache_labels=True), bias)
    mine, same = trained(dropin.ClipLoss(cache_labels=True), bias)
    assert len(theirs) == STEPS
    assert theirs[0] - theirs[-1] > 0.5
    assert mine == pytest.approx(theirs, abs=1e-5)
    torch.testing.assert_close(same, weights, rtol=0, atol=1e-5)
