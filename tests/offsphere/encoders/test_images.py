"""Image encoders: raw outputs, stems, projectors beside lightly's, weights from files."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from offsphere.encoders.images import group_norm, image_encoder, projector

BATCH_NORM = nn.modules.batchnorm._BatchNorm


def has_batch_norm(module: nn.Module) -> bool:
    return any(isinstance(part, BATCH_NORM) for part in module.modules())


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("image_size", [32, 64, 72, 35])
def test_tiny_resnet_encodes_any_size_and_every_parameter_gets_a_gradient(norm, image_size):
    torch.manual_seed(0)
    encoder = image_encoder("tiny_resnet", image_size=image_size, norm=norm, projector_dim=24)
    features, embedding = encoder(torch.randn(4, 3, image_size, image_size))
    assert features.shape == (4, encoder.features_dim) == (4, 128)
    assert embedding.shape == (4, encoder.embedding_dim) == (4, 24)
    embedding.square().sum().backward()
    assert all(parameter.grad is not None for parameter in encoder.parameters())
    assert has_batch_norm(encoder) == (norm == "batch")


def test_outputs_are_raw():
    """Twice the last layer is twice the embedding: nothing after it normalises."""
    torch.manual_seed(0)
    encoder = image_encoder(image_size=32)
    images = torch.randn(6, 3, 32, 32)
    features, embedding = encoder(images)
    with torch.no_grad():
        for parameter in encoder.projector[-1].parameters():
            parameter.mul_(2)
    torch.testing.assert_close(encoder(images)[1], 2 * embedding)
    torch.testing.assert_close(encoder(images)[0], features)
    torch.testing.assert_close(encoder.projector(encoder.backbone(images)), 2 * embedding)


def test_residual_branches_start_at_zero():
    torch.manual_seed(0)
    blocks = image_encoder(image_size=32).backbone.blocks
    x = torch.randn(2, 16, 8, 8)
    assert torch.equal(blocks[0](x), x.relu())
    torch.testing.assert_close(blocks[1](x), blocks[1].shortcut(x).relu())


@pytest.mark.parametrize("backbone", ["tiny_resnet", "resnet18", "test_vit"])
def test_same_seed_same_weights(backbone):
    states = []
    for seed in (7, 7, 8):
        torch.manual_seed(seed)
        states.append(image_encoder(backbone, image_size=32).state_dict())
    first, second, other = states
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["projector.0.weight"], other["projector.0.weight"])


def test_samples_do_not_touch_each_other_without_batch_norm():
    torch.manual_seed(0)
    encoder = image_encoder(image_size=32, norm="group").train()
    images = torch.randn(6, 3, 32, 32)
    together = encoder(images)[1]
    alone = torch.cat([encoder(image[None])[1] for image in images])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


def test_images_in_either_memory_format_give_one_result():
    torch.manual_seed(0)
    encoder = image_encoder(image_size=32).eval()
    images = torch.randn(3, 3, 32, 32)
    assert torch.equal(
        encoder(images)[1], encoder(images.contiguous(memory_format=torch.channels_last))[1]
    )
    assert (
        encoder.backbone.blocks[1].second[0].weight.is_contiguous(memory_format=torch.channels_last)
    )


@pytest.mark.parametrize(
    ("image_size", "stem", "kernel", "cells"),
    [
        (32, "auto", (3, 3), 4),
        (32, "small", (3, 3), 4),
        (32, "standard", (7, 7), 1),
        (64, "auto", (3, 3), 8),
        (96, "auto", (7, 7), 3),
    ],
)
def test_resnet_stems(image_size, stem, kernel, cells):
    backbone = image_encoder("resnet18", image_size=image_size, stem=stem).backbone.eval()
    assert backbone.conv1.kernel_size == kernel
    assert backbone.forward_features(torch.zeros(1, 3, image_size, image_size)).shape == (
        (1, 512, cells, cells)
    )


def test_deep_stem_is_shrunk_too():
    backbone = image_encoder("resnet18d", image_size=32, stem="small").backbone
    assert backbone.forward_features(torch.zeros(1, 3, 32, 32)).shape == (1, 512, 4, 4)


def test_transformers_get_size_and_patch():
    encoder = image_encoder("vit_tiny_patch16_224", image_size=32)
    assert encoder.backbone.patch_embed.patch_size == (4, 4)
    assert encoder.backbone.patch_embed.num_patches == 64
    assert encoder(torch.zeros(2, 3, 32, 32))[0].shape == (2, encoder.features_dim) == (2, 192)
    standard = image_encoder("vit_tiny_patch16_224", image_size=32, stem="standard")
    assert standard.backbone.patch_embed.num_patches == 4


def test_features_dim_is_what_the_backbone_returns():
    encoder = image_encoder("mobilenetv3_small_050", image_size=32)
    features, _ = encoder.eval()(torch.zeros(1, 3, 32, 32))
    assert features.shape == (1, encoder.features_dim) == (1, 1024)


@pytest.mark.parametrize("backbone", ["resnet18", "resnet14t", "convnext_atto"])
def test_group_norm_leaves_no_batch_norm(backbone):
    assert not has_batch_norm(image_encoder(backbone, image_size=32, norm="group"))


@given(st.integers(1, 600))
def test_group_norm_divides_any_width(channels):
    layer = group_norm(channels)
    assert channels % layer.num_groups == 0
    assert channels % 8 or channels // layer.num_groups == 8


@pytest.mark.parametrize("layers", [2, 3, 4])
@pytest.mark.parametrize(("head_norm", "norm"), [(True, "batch"), (False, "group")])
def test_projector_equals_lightlys(layers, head_norm, norm):
    heads = pytest.importorskip("lightly.models.modules.heads")
    peer = heads.SimCLRProjectionHead(12, 20, 8, num_layers=layers, batch_norm=head_norm)
    mine = projector(12, 20, 8, layers=layers, head_norm=head_norm, norm=norm)
    mine.load_state_dict(peer.layers.state_dict())
    x = torch.randn(16, 12)
    assert torch.equal(mine(x), peer(x))


def test_projector_has_hidden_batch_norm_and_a_free_output_by_default():
    head = image_encoder(image_size=32, projector_hidden=40, projector_dim=8).projector
    assert [type(layer).__name__ for layer in head] == ["Linear", "BatchNorm1d", "ReLU", "Linear"]
    assert (head[0].bias is None, head[0].out_features, head[3].bias is None) == (True, 40, False)
    linear = projector(12, 20, 8, layers=1, head_norm=False, norm="batch")
    assert (len(linear), linear[0].in_features, linear[0].out_features) == (1, 12, 8)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backbone": "resnet81"}, "Unknown backbone 'resnet81'. Did you mean '.*resnet"),
        ({"backbone": "tiny_resnt"}, "Did you mean 'tiny_resnet'"),
        ({"backbone": "resnet18.a1_in1k"}, "backbone='resnet18' and pretrained='a1_in1k'"),
        ({"backbone": "convnext_atto", "stem": "small"}, "not for convnext_atto"),
        ({"backbone": "tiny_resnet", "stem": "small"}, "leave stem='auto'"),
        ({"backbone": "tiny_resnet", "pretrained": "default"}, "no published weights"),
        ({"backbone": "resnet18", "stem": "small", "pretrained": "a1_in1k"}, "standard stem"),
        ({"backbone": "resnet18", "pretrained": "a9_in1k"}, "Its tags: .*a1_in1k"),
        ({"backbone": "mobilenetv3_small_050", "norm": "group"}, "norm='group' is not available"),
        ({"backbone": "vit_tiny_patch16_224", "image_size": 36}, "divisible by 8, got 36"),
        (
            {"backbone": "vit_tiny_patch16_224", "image_size": 8, "stem": "standard"},
            "8 pixels",
        ),
        ({"stem": "tiny"}, "Unknown stem 'tiny'"),
        ({"norm": "layer"}, "Unknown norm 'layer'"),
        ({"head_norm": True, "norm": "group"}, "promises none"),
        ({"projector_layers": 0}, "at least 1 layer"),
        ({"image_size": 0}, "image_size must be at least 1"),
    ],
)
def test_bad_settings_name_the_remedy(settings, message):
    with pytest.raises(ValueError, match=message):
        image_encoder(**{"image_size": 32, **settings})


def test_offline_download_says_what_to_get_and_where_to_put_it(monkeypatch):
    import timm

    create = timm.create_model

    def offline(name, pretrained=False, **settings):
        if pretrained:
            raise OSError("no network")
        return create(name, pretrained=pretrained, **settings)

    monkeypatch.setattr(timm, "create_model", offline)
    with pytest.raises(ValueError, match=r"model\.safetensors of .* timm/resnet18\.a1_in1k"):
        image_encoder("resnet18", image_size=32, pretrained="a1_in1k")
    with pytest.raises(ValueError, match=r"pass its path as pretrained=PATH/model\.safetensors"):
        image_encoder("resnet18", image_size=32, pretrained="default")


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
@pytest.mark.parametrize("whole_encoder", [False, True])
def test_weights_come_from_a_file(tmp_path, suffix, whole_encoder):
    from safetensors.torch import save_file

    torch.manual_seed(3)
    trained = image_encoder(image_size=32)
    weights = (trained if whole_encoder else trained.backbone).state_dict()
    weights = {name: value.contiguous() for name, value in weights.items()}
    path = tmp_path / f"weights{suffix}"
    save_file(weights, path) if suffix == ".safetensors" else torch.save(weights, path)
    torch.manual_seed(4)
    if whole_encoder:
        with pytest.warns(UserWarning, match=r"not used: projector\.0\.weight, projector\.1\."):
            encoder = image_encoder(image_size=32, pretrained=str(path))
    else:
        encoder = image_encoder(image_size=32, pretrained=str(path))
    for name, value in trained.backbone.state_dict().items():
        assert torch.equal(encoder.backbone.state_dict()[name], value)


def test_weights_that_do_not_fit_are_named(tmp_path):
    path = tmp_path / "weights.pt"
    weights = image_encoder(image_size=32).backbone.state_dict()
    weights["stem.0.weight"] = weights["stem.0.weight"][..., :1]
    weights["stem.2.weight"] = weights.pop("stem.1.weight")
    torch.save({"state_dict": weights}, path)
    message = (
        r"Missing: stem\.1\.weight\. Other shapes: stem\.0\.weight \(16, 3, 3, 1\) instead of "
        r"\(16, 3, 3, 3\)\. Unexpected: stem\.2\.weight\."
    )
    with pytest.raises(ValueError, match=message):
        image_encoder(image_size=32, pretrained=str(path))


def test_classifier_is_left_out_with_a_warning_and_batch_norm_weights_are_not_group_norm(tmp_path):
    import timm

    path = tmp_path / "resnet.pt"
    classifier = timm.create_model("resnet18", num_classes=10)
    torch.save(classifier.state_dict(), path)
    with pytest.warns(UserWarning, match=r"not used: fc\.bias, fc\.weight\.$"):
        encoder = image_encoder("resnet18", image_size=96, pretrained=str(path))
    images = torch.randn(2, 3, 96, 96)
    features = classifier.eval().forward_head(classifier.forward_features(images), pre_logits=True)
    torch.testing.assert_close(encoder.eval()(images)[0], features, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"Unexpected: bn1\.num_batches_tracked"):
        image_encoder("resnet18", image_size=96, norm="group", pretrained=str(path))


@pytest.mark.parametrize("name", ["weights.pt", "weights.safetensors"])
def test_files_that_are_no_weights_are_refused(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(b"not weights at all")
    with pytest.raises(ValueError, match=f"Cannot read weights from {re.escape(str(path))}"):
        image_encoder(image_size=32, pretrained=str(path))
    with pytest.raises(FileNotFoundError, match="No file of weights at"):
        image_encoder(image_size=32, pretrained=str(tmp_path / "absent" / name))
