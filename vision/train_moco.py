"""MoCo v2 with a normalisation cell: query is left; key and queue, which get no gradient, right.

    python vision/train_moco.py --cell=cosine --variance-weight=30
    python vision/train_moco.py --config=configs/cifar10.yaml --cell=dnorm --queue-size=4096

The same command resumes a run that was cut, and says so if it is finished.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from offsphere.run.scripts import Role, Task
from offsphere.training.script import main
from offsphere.training.settings import IMAGE_COLUMNS
from vision.settings import MocoSettings

if TYPE_CHECKING:
    from offsphere.data.splits import Handed
    from offsphere.run.record import RunFolder
    from offsphere.training.images import ImageExperiment

TASK = Task(
    "test/probe",
    (
        Role(
            "Two views of an image, momentum keys",
            "control",
            "Left is the query, right the keys and the queue, which get no gradient.",
        ),
    ),
)

Config = MocoSettings


def make(config: Config, folder: RunFolder, data: Handed | None = None) -> ImageExperiment:
    """What a run trains and measures."""
    from offsphere.training.images import ImageExperiment
    from vision.methods import MoCo

    return ImageExperiment(config, folder, data, MoCo)


def run(config: Config, data: Handed | None = None) -> dict[str, object]:
    """Train one encoder and return its metrics; `data` stand in for those that --data names."""
    from offsphere.training.run import train_run

    return train_run(config, "train_moco", make, data)


if __name__ == "__main__":
    main(Config, run, IMAGE_COLUMNS, __doc__)
