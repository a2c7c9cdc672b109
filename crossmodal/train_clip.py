"""CLIP training with a normalisation cell: the image is the left side, the text the right one.

    python crossmodal/train_clip.py --cell=cosine
    python crossmodal/train_clip.py --cell=imgnorm --direction=image_to_text
    python crossmodal/train_clip.py --config=configs/flickr8k.yaml --cell=dot --seed=1

The same command goes on with a run that was cut, and says so if it is finished.
"""

from __future__ import annotations

from dataclasses import dataclass

from crossmodal.settings import COLUMNS, ClipSettings
from offsphere.training.script import main


@dataclass(frozen=True)
class Config(ClipSettings):
    """The flags are those of crossmodal/settings.py."""


def run(config: Config) -> dict[str, object]:
    """Train one pair of towers and return its metrics."""
    from crossmodal.experiment import train

    return train(config, "train_clip")


if __name__ == "__main__":
    main(Config, run, COLUMNS, __doc__)
