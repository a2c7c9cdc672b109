"""CLIP training with a normalisation cell: the image is the left side, the text the right one.

    python crossmodal/train_clip.py --cell=cosine
    python crossmodal/train_clip.py --cell=imgnorm --direction=image_to_text
    python crossmodal/train_clip.py --config=configs/flickr8k.yaml --cell=dot --seed=1

The same command resumes a run that was cut, and says so if it is finished.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from crossmodal.settings import COLUMNS, ClipSettings
from offsphere.run.scripts import Role, Task
from offsphere.training.script import main

if TYPE_CHECKING:
    from crossmodal.experiment import ClipExperiment
    from offsphere.data.splits import Handed
    from offsphere.run.record import RunFolder
    from offsphere.run.scripts import Export

SIDES = (
    "Left is the image, right the text. {} In scoring the image is the query of i2t, the text that "
    "of t2i."
)
TASK = Task(
    "test/mean_r1",
    (
        Role(
            "Image and text, image as query",
            "asymmetric",
            SIDES.format("The loss is one-way: the image is the query."),
            trained="test/i2t_r1",
            when={"direction": "image_to_text"},
        ),
        Role(
            "Image and text, text as query",
            "asymmetric",
            SIDES.format("The loss is one-way: the text is the query."),
            trained="test/t2i_r1",
            when={"direction": "text_to_image"},
        ),
        Role(
            "Image and text, two-way loss",
            "symmetric",
            SIDES.format("The loss is two-way: each side is the query once."),
        ),
    ),
)
Config = ClipSettings


def make(config: Config, folder: RunFolder, data: Handed | None = None) -> ClipExperiment:
    """What a run trains and measures."""
    from crossmodal.experiment import ClipExperiment

    return ClipExperiment(config, data)


def run(config: Config, data: Handed | None = None) -> dict[str, object]:
    """Train a pair of towers and return its metrics; `data` stand in for what --data names."""
    from offsphere.training.run import train_run

    return train_run(config, "train_clip", make, data)


def export(asked: Export) -> str:
    """Write a run's towers in another form."""
    from crossmodal.export import export

    return export(asked)


if __name__ == "__main__":
    main(Config, run, COLUMNS, __doc__)
