"""The towers of a run, and pictures that do not suit them."""

import dataclasses

import pytest
import torch

from crossmodal.experiment import build_towers
from crossmodal.train_clip import Config


def test_pictures_too_small_for_a_tower():
    with pytest.raises(ValueError, match="--image-size=7 does not suit the model tiny"):
        build_towers(Config(image_size=7))
    settings = Config(image_size=48)
    towers = build_towers(settings)
    before = {name: x.clone() for name, x in towers.state_dict().items()}
    again = build_towers(dataclasses.replace(settings))
    assert all(torch.equal(x, before[name]) for name, x in again.state_dict().items())
    assert towers.training == again.training
