"""Image encoders: a backbone and a projector, whose outputs are raw: only a cell normalises.

Backbones are timm's, by name, or `tiny_resnet`, a small one for the CPU. Weights are drawn from
torch's global generator: call `torch.manual_seed` first.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from offsphere.encoders.weights import read_tensors
from offsphere.names import nearest, unknown

if TYPE_CHECKING:
    from jaxtyping import Float

__all__ = ["NORMS", "STEMS", "ImageEncoder", "TinyResNet", "image_encoder", "projector"]

STEMS = ("auto", "small", "standard")
NORMS = ("batch", "group")
SMALL_IMAGE = 64
"""Up to this side in pixels stem='auto' means 'small'."""
DEFAULT_TAG = "default"
"""pretrained='default' asks for the weights that timm prefers."""
TOKENS_PER_SIDE = 8
"""A small-stem transformer cuts the image into this many patches a side."""
RESNETS = ["resnet"]
TRANSFORMERS = ["vision_transformer", "deit"]
"""timm's modules of the architectures with a small stem."""
WEIGHT_FILES = (".safetensors", ".pt", ".pth", ".bin")

NormLayer = Callable[[int], nn.BatchNorm2d | nn.GroupNorm]


class ImageEncoder(nn.Module):
    """Images to (features, embedding): the backbone's and the projector's output, both raw."""

    def __init__(
        self, backbone: nn.Module, projector: nn.Module, features_dim: int, embedding_dim: int
    ) -> None:
        super().__init__()
        # Convolutions run 15 to 40 % faster in this layout on CPUs, and on GPUs in half precision.
        self.backbone = backbone.to(memory_format=torch.channels_last)
        self.projector = projector
        self.features_dim = features_dim
        self.embedding_dim = embedding_dim

    def forward(
        self, images: Float[Tensor, "n 3 h w"]
    ) -> tuple[Float[Tensor, "n features"], Float[Tensor, "n embedding"]]:
        features = self.backbone(images.contiguous(memory_format=torch.channels_last))
        return features, self.projector(features)


def image_encoder(
    backbone: str = "tiny_resnet",
    *,
    image_size: int,
    stem: str = "auto",
    pretrained: str | None = None,
    projector_dim: int = 128,
    projector_hidden: int | None = None,
    projector_layers: int = 2,
    head_norm: bool = False,
    norm: str = "batch",
    load_pretrained: bool = True,
) -> ImageEncoder:
    """An encoder of square images.

    `stem='small'` fits 32-pixel images. `pretrained` is a local file of weights for the backbone,
    a tag of timm's, or 'default' for timm's preferred tag. `head_norm` ends the projector with a
    batch-norm. With `norm='group'` there is no batch-norm anywhere. `load_pretrained=False` builds
    what `pretrained` implies without reading its weights: others are about to be loaded.
    """
    if stem not in STEMS:
        raise unknown("stem", stem, STEMS)
    if norm not in NORMS:
        raise unknown("norm", norm, NORMS)
    if image_size < 1:
        raise ValueError(f"image_size must be at least 1 pixel, got {image_size}.")
    trunk = build_backbone(backbone, image_size, stem, pretrained, norm, load=load_pretrained)
    features_dim = output_width(trunk, backbone, image_size)
    head = projector(
        features_dim,
        projector_hidden or features_dim,
        projector_dim,
        layers=projector_layers,
        head_norm=head_norm,
        norm=norm,
    )
    return ImageEncoder(trunk, head, features_dim, projector_dim)


def projector(
    features_dim: int, hidden: int, dim: int, *, layers: int, head_norm: bool, norm: str
) -> nn.Sequential:
    """Linear, batch-norm and ReLU for each hidden layer, then Linear; SimCLR's with `head_norm`.

    With norm='group' hidden layers have no norm (MoCo v2's head): a group-norm would rescale every
    sample by itself and take away the magnitude that is studied here.
    """
    if layers < 1 or hidden < 1 or dim < 1:
        raise ValueError(
            "A projector needs at least 1 layer, 1 hidden unit and 1 output, got "
            f"{layers} layers, {hidden} hidden units and {dim} outputs."
        )
    if head_norm and norm == "group":
        raise ValueError(
            "head_norm puts a batch-norm at the head's output, and norm='group' promises none "
            "(a group-norm there would normalise each embedding). Use norm='batch' or no head_norm."
        )
    batch_norm = norm == "batch"
    *hidden_inputs, last_input = [features_dim, *[hidden] * (layers - 1)]
    modules: list[nn.Module] = []
    for width in hidden_inputs:
        modules.append(nn.Linear(width, hidden, bias=not batch_norm))
        modules += [nn.BatchNorm1d(hidden)] if batch_norm else []
        modules.append(nn.ReLU(inplace=True))
    modules.append(nn.Linear(last_input, dim, bias=not head_norm))
    modules += [nn.BatchNorm1d(dim)] if head_norm else []
    return nn.Sequential(*modules)


class TinyResNet(nn.Module):
    """A ResNet with one block per stage, for small images on a CPU."""

    def __init__(self, norm: NormLayer) -> None:
        super().__init__()
        widths = (16, 32, 64, 128)
        self.stem = nn.Sequential(_conv(3, widths[0], stride=2), norm(widths[0]), nn.ReLU(True))
        pairs = zip((widths[0], *widths), widths, strict=False)
        self.blocks = nn.Sequential(*(Block(before, after, norm) for before, after in pairs))

    def forward(self, images: Float[Tensor, "n 3 h w"]) -> Float[Tensor, "n features"]:
        return self.blocks(self.stem(images)).mean((2, 3))


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut; halves the picture where it widens it."""

    def __init__(self, before: int, after: int, norm: NormLayer) -> None:
        super().__init__()
        widens = after != before
        self.first = nn.Sequential(
            _conv(before, after, stride=1 + widens), norm(after), nn.ReLU(True)
        )
        last_norm = norm(after)
        nn.init.zeros_(last_norm.weight)
        self.second = nn.Sequential(_conv(after, after), last_norm)
        self.shortcut = nn.Identity()
        if widens:
            pool = nn.AvgPool2d(2, ceil_mode=True)
            self.shortcut = nn.Sequential(pool, _conv(before, after, size=1), norm(after))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu_(self.second(self.first(x)) + self.shortcut(x))


def _conv(before: int, after: int, *, size: int = 3, stride: int = 1) -> nn.Conv2d:
    conv = nn.Conv2d(before, after, size, stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv


def group_norm(
    channels: int, device: torch.device | None = None, dtype: torch.dtype | None = None
) -> nn.GroupNorm:
    """Groups of eight channels where they divide evenly; timm hands over device and dtype."""
    groups = channels // math.gcd(channels, 8)
    return nn.GroupNorm(groups, channels, device=device, dtype=dtype)


def build_backbone(
    name: str, image_size: int, stem: str, pretrained: str | None, norm: str, *, load: bool = True
) -> nn.Module:
    """A backbone without classifier, with the weights of `pretrained` if given and wanted."""
    norm_layer = group_norm if norm == "group" else nn.BatchNorm2d
    file = _weight_file(pretrained, must_exist=load)
    if name == "tiny_resnet":
        if stem != "auto":
            raise ValueError(f"tiny_resnet has a single stem: leave stem='auto', got {stem!r}.")
        if pretrained is not None and file is None:
            raise ValueError(
                f"tiny_resnet has no published weights: expected a local file, got {pretrained!r}."
            )
        backbone = TinyResNet(norm_layer)
    else:
        tag = None if file is not None else pretrained
        backbone = _timm_backbone(name, image_size, stem, tag, norm, load)
    if file is not None and load:
        load_backbone(backbone, file)
    return backbone


def _timm_backbone(
    name: str, image_size: int, stem: str, tag: str | None, norm: str, load: bool
) -> nn.Module:
    from timm.models import is_model_in_modules

    _check_name(name)
    resnet = is_model_in_modules(name, RESNETS)
    transformer = is_model_in_modules(name, TRANSFORMERS)
    small = _is_small(name, image_size, stem, tag, resnet=resnet, transformer=transformer)
    settings: dict[str, Any] = {}
    if transformer:
        settings["img_size"] = image_size
    if transformer and small:
        settings["patch_size"] = _small_patch(name, image_size)
    if resnet and norm == "group" and tag is None and not name.endswith("_gn"):
        settings["norm_layer"] = group_norm
    backbone = _create(name, tag, settings, load)
    if resnet and small:
        _shrink_stem(backbone)
    if norm == "group":
        _check_no_batch_norm(backbone, name)
    return backbone


def _is_small(
    name: str, image_size: int, stem: str, tag: str | None, *, resnet: bool, transformer: bool
) -> bool:
    """Whether the stem for small images is wanted; published ResNet weights have the large one."""
    if stem == "small" and not (resnet or transformer):
        raise ValueError(
            f"stem='small' has a meaning for ResNets (3x3 stem, no max-pool) and vision "
            f"transformers (smaller patches), not for {name}. Use stem='standard'."
        )
    if stem == "small" and resnet and tag is not None:
        raise ValueError(
            f"timm's weights {tag!r} belong to the standard stem of {name} and do not fit "
            "stem='small'. Use stem='standard', or a file of weights trained with the small stem."
        )
    fits = transformer or (resnet and tag is None)
    return stem == "small" or (stem == "auto" and image_size <= SMALL_IMAGE and fits)


def _small_patch(name: str, image_size: int) -> int:
    if image_size % TOKENS_PER_SIDE:
        raise ValueError(
            f"The small stem of {name} needs an image size divisible by {TOKENS_PER_SIDE}, got "
            f"{image_size}. Use another image_size or stem='standard'."
        )
    return image_size // TOKENS_PER_SIDE


def _create(name: str, tag: str | None, settings: dict[str, Any], load: bool) -> nn.Module:
    """timm's model without classifier; `tag` names published weights, which are loaded if asked."""
    import timm

    if tag is None:
        return timm.create_model(name, pretrained=False, num_classes=0, **settings)
    tagged = name if tag == DEFAULT_TAG else f"{name}.{tag}"
    tags = [known.partition(".")[2] for known in timm.list_pretrained(f"{name}.*")]
    if not tags or tag not in (DEFAULT_TAG, *tags):
        raise ValueError(
            f"timm has no weights {tag!r} for {name}, and no such file exists. Its tags: "
            f"{', '.join(tags) or 'none'}. Or give a local {' or '.join(WEIGHT_FILES)} file."
        )
    try:
        return timm.create_model(tagged, pretrained=load, num_classes=0, **settings)
    except OSError as error:
        known = timm.get_pretrained_cfg(tagged, allow_unregistered=False)
        repository = known.hf_hub_id if known is not None else f"timm/{tagged}"
        raise ValueError(
            f"Could not download the weights of {tagged} ({type(error).__name__}). On a machine "
            "with network, get model.safetensors of the Hugging Face repository "
            f"{repository}, copy it here and pass its path as pretrained=PATH/model.safetensors."
        ) from error


def _check_name(name: str) -> None:
    import timm

    known = ["tiny_resnet", *timm.list_models()]
    if name in known:
        return
    architecture, _, tag = name.partition(".")
    if tag and architecture in known:
        raise ValueError(
            f"Expected an architecture as backbone, got {name!r}: use backbone={architecture!r} "
            f"and pretrained={tag!r}."
        )
    if (near := nearest(name, known)) is not None:
        raise ValueError(f"Unknown backbone {name!r}. Did you mean {near!r}?")
    raise ValueError(
        f"Unknown backbone {name!r}: expected tiny_resnet or one of timm's {len(known) - 1} models;"
        " see timm.list_models()."
    )


def _shrink_stem(resnet: nn.Module) -> None:
    """A 3x3 stride-1 first convolution and no max-pool, in place."""
    stem = resnet.conv1
    deep = isinstance(stem, nn.Sequential)
    first = stem[0] if deep else stem
    assert isinstance(first, nn.Conv2d)
    small = _conv(first.in_channels, first.out_channels)
    if deep:
        stem[0] = small
    else:
        resnet.conv1 = small
    resnet.maxpool = nn.Identity()


def _check_no_batch_norm(backbone: nn.Module, name: str) -> None:
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in backbone.modules()):
        raise ValueError(
            f"norm='group' is not available for {name} with these weights or this architecture: it "
            "has batch-norm of its own. Use an untrained ResNet or tiny_resnet, resnet50_gn, a ViT "
            "or a ConvNeXt, or norm='batch'."
        )


@torch.no_grad()
def output_width(backbone: nn.Module, name: str, image_size: int) -> int:
    """The number of features, found by encoding one blank image."""
    backbone.eval()
    try:
        width = backbone(torch.zeros(1, 3, image_size, image_size)).shape[1]
    except (AssertionError, RuntimeError) as error:
        raise ValueError(
            f"{name} cannot encode images of {image_size} pixels: {error} Use another image_size."
        ) from error
    backbone.train()
    return width


def _weight_file(pretrained: str | None, *, must_exist: bool) -> Path | None:
    """The path that `pretrained` names, or None if it is a tag."""
    if pretrained is None:
        return None
    path = Path(pretrained).expanduser()
    if path.is_file():
        return path
    if path.suffix in WEIGHT_FILES or path.parent != Path():
        if not must_exist:
            return path
        raise FileNotFoundError(
            f"No file of weights at {path}. Give an existing {' or '.join(WEIGHT_FILES)} file, "
            "a tag of timm's such as a1_in1k, or 'default'."
        )
    return None


def load_backbone(backbone: nn.Module, path: Path) -> None:
    """Fill the backbone from a file: every weight must fit, and what is left out is in a warning.

    The file may hold the backbone, with a classifier or without, or an encoder with `backbone.`
    before the names; only classifiers and the encoder's other parts are left out.
    """
    weights = _read_weights(path)
    prefix = "backbone." if any(key.startswith("backbone.") for key in weights) else ""
    mine = {key.removeprefix(prefix): weights[key] for key in weights if key.startswith(prefix)}
    expected = backbone.state_dict()
    missing = sorted(expected.keys() - mine.keys())
    strange = sorted(key for key in mine.keys() - expected.keys() if not _is_classifier(key))
    shapes = [
        f"{key} {tuple(mine[key].shape)} instead of {tuple(value.shape)}"
        for key, value in expected.items()
        if key in mine and mine[key].shape != value.shape
    ]
    if missing or strange or shapes:
        raise ValueError(
            f"The weights in {path} do not fit this backbone. Missing: {_some(missing)}. Other "
            f"shapes: {_some(shapes)}. Unexpected: {_some(strange)}. Check the backbone's name, "
            "stem, norm and image_size."
        )
    backbone.load_state_dict({key: mine[key] for key in expected})
    unused = sorted(key for key in weights if key.removeprefix(prefix) not in expected)
    if unused:
        warnings.warn(f"Entries of {path} that were not used: {_some(unused)}.", stacklevel=2)


def _is_classifier(key: str) -> bool:
    return key.startswith(("fc.", "head.", "classifier."))


def _read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a file by name; nothing in it is executed."""
    content = read_tensors(path)
    for wrapper in ("state_dict", "model"):
        if isinstance(content, dict) and isinstance(content.get(wrapper), dict):
            content = content[wrapper]
    if not isinstance(content, dict) or not all(isinstance(v, Tensor) for v in content.values()):
        raise ValueError(
            f"Expected a dictionary of tensors in {path}: save the model's state_dict()."
        )
    return content


def _some(names: Iterable[str]) -> str:
    names, most = list(names), 5
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more or "none"
