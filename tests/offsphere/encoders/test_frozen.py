"""Frozen towers of timm, with timm's own models as the reference."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file

from offsphere.encoders.frozen import frozen_tower


@pytest.mark.parametrize(
    ("name", "width", "fixed"),
    # MobileNetV3's features pass one more layer: timm's num_features is 288 there.
    [("mobilenetv3_small_050", 1024, {}), ("vit_tiny_patch16_224", 192, {"img_size": 32})],
)
def test_a_timm_tower_takes_pictures_of_any_size(
    name: str, width: int, fixed: dict[str, int], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    file = tmp_path / "weights.safetensors"
    save_file(timm.create_model(name).state_dict(), file)
    tower = frozen_tower(f"timm:{name}:{file}", image_size=32)
    assert (tower.width, tower.image_size) == (width, 32)
    peer = timm.create_model(
        name, pretrained=True, num_classes=0, pretrained_cfg_overlay={"file": str(file)}, **fixed
    ).eval()
    pixels = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(tower(pixels), peer(pixels), rtol=0, atol=0)
