"""The settings of CLIP training. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from offsphere.names import LOSSES, PAIR_LOSSES
from offsphere.run.catalog import KNOWN
from offsphere.run.config import added, data_name, keyboard, unhashed
from offsphere.run.help import Groups
from offsphere.share import CONFIGS
from offsphere.training.settings import (
    LARGEST_IMAGE,
    TrainSettings,
    check_between,
    check_setting,
)

MODELS = CONFIGS / "models"
"""The open_clip model configurations that come with the project."""
DIRECTIONS = {
    "both": "both",
    "image_to_text": "left_to_right",
    "text_to_image": "right_to_left",
}
"""What this lane's directions are called in the library: the image is always the left side."""
if TYPE_CHECKING:
    LossName = str
else:
    LossName = Literal[PAIR_LOSSES]

COLUMNS = (  # of the table that closes a run
    ("test/i2t_r1", "R@1 image to text", "{:.1%}"),
    ("untrained/i2t_r1", "before training", "{:.1%}"),
    ("test/t2i_r1", "R@1 text to image", "{:.1%}"),
    ("untrained/t2i_r1", "before training", "{:.1%}"),
    ("test/chance_t2i_r1", "by guessing", "{:.1%}"),
    ("test/zero_shot_group", "zero-shot groups", "{:.1%}"),
    ("test/majority_group", "always the largest group", "{:.1%}"),
    ("test/zero_shot_class", "zero-shot classes", "{:.1%}"),
    ("test/majority_class", "always the largest class", "{:.1%}"),
    ("test/modality_gap", "modality gap", "{:.2f}"),
    ("test/norm_image_cv", "norm CV of images", "{:.3f}"),
    ("test/norm_text_cv", "norm CV of texts", "{:.3f}"),
)


@dataclass(frozen=True)
class ClipSettings(TrainSettings):
    GROUPS: ClassVar[Groups] = {
        "question": (("loss", "direction"), ("within_view", "false_negatives")),
        "data": (
            ("data", "data_test", "limit", "image_size"),
            ("data_style", "judgements", "train_samples", "on_bad_sample", "allow_pipe",
             "min_scale", "flip"),
        ),
        "encoder": (("model", "pretrained"), ("image_tower",)),
        "measuring": (("eval_split",), ("templates", "save_embeddings")),
    }  # fmt: skip

    temperature: float = 0.07
    """Divides the scores (times the calibration ratio)."""
    learnable_temperature: bool = True
    """Learn the temperature, as CLIP does; its scale stays in [1, 100] over the ratio."""
    batch_size: int = 128
    """Image-text pairs per step."""
    samples: int | None = None
    """Budget in pairs seen. Without it and epochs: 80,000."""

    data: str = data_name("emoji")
    """emoji, openmoji, a name below --data-root (flickr8k-128), wds:PATTERN, csv:FILE or
    folder:PATH (Flickr8k's form)."""
    data_test: str | None = data_name(None)
    """Test data if `data` has no test split of its own (wds: and csv:)."""
    data_style: str | None = data_name(None)
    """A second test set in another style, e.g. openmoji after training on emoji."""
    limit: int | None = None
    """Train on this many images, chosen by the seed 0 whatever the run's seed."""
    eval_split: Literal["test", "validation"] = "test"
    """What is measured; tune on validation, report test."""
    judgements: str | None = None
    """A table of human judgements in the form of Flickr8k's ExpertAnnotations.txt."""
    train_samples: int | None = None
    """Pairs per epoch of streamed shards that come without a manifest."""
    on_bad_sample: Literal["error", "skip"] = "error"
    """A damaged sample stops the run, or is left out and counted."""
    allow_pipe: bool = keyboard(False)
    """Let wds:pipe:COMMAND run commands; only as a flag, never from a file."""

    model: str = "tiny"
    """A name in configs/models, a JSON file in open_clip's form, or any open_clip name."""
    pretrained: str | None = None
    """Start from an open_clip tag or a local file of weights."""
    image_size: int | None = None
    """Side of the pictures in pixels; default: the model's own."""
    image_tower: str | None = None
    """A frozen image tower (LiT): efficientnet_lite0, timm:NAME[:FILE], open_clip:NAME:TAG."""

    loss: LossName = "info_nce"
    """info_nce is CLIP's own; siglip judges each pair alone."""
    direction: Literal["both", "image_to_text", "text_to_image"] = "both"
    """Which side has to find the other (info_nce only; both is CLIP's own)."""
    within_view: bool = False
    """Other images, and other texts, are negatives too."""
    false_negatives: Literal["keep", "mask", "positive"] = added("keep")
    """Pairs whose captions are equal: negatives as any, no negatives, or positives (info_nce)."""
    min_scale: float = 0.9
    """Smallest crop as a share of the image; 1 turns cropping off."""
    flip: float = 0.0
    """Probability of a mirrored picture."""
    templates: str | None = None
    """Prompts of the zero-shot classes: a name in crossmodal/prompts or a FILE.txt."""
    save_embeddings: bool = unhashed(False)
    """Save the test set's embeddings."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples is None and self.epochs is None:
            object.__setattr__(self, "samples", 80_000)
        if self.data in KNOWN and self.eval_split == "test" and self.data_test is None:
            object.__setattr__(self, "data_test", KNOWN[self.data].test)
        kind = self.data.partition(":")[0]
        if kind in ("wds", "csv") and self.eval_split == "test" and self.data_test is None:
            raise ValueError(
                f"--data={self.data} has no test split of its own: give --data-test=..., or "
                "measure on a part of it with --eval-split=validation."
            )
        if self.direction != "both" and not LOSSES[self.loss].directed:
            raise ValueError(
                f"--direction={self.direction} goes with info_nce: {self.loss} has none."
            )
        plain = LOSSES[self.loss].directed and not self.within_view and self.negatives is None
        if self.false_negatives != "keep" and not plain:
            raise ValueError(
                f"--false-negatives={self.false_negatives} goes with --loss=info_nce, without "
                "--within-view and --negatives."
            )
        check_between(self, "image_size", 2, LARGEST_IMAGE)
        check_setting(self, "limit", "at least 2", self.limit is None or self.limit >= 2)
        check_setting(self, "min_scale", "above 0 and at most 1", 0 < self.min_scale <= 1)
        check_setting(self, "flip", "a probability", 0 <= self.flip <= 1)
        if self.image_tower is not None and self.pretrained is not None:
            raise ValueError(
                "--image-tower takes the place of the model's image tower: --pretrained weights "
                "for both towers do not go with it."
            )
