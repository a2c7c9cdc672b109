"""SimCLR with a normalisation cell.

    python vision/train_simclr.py --cell=dot
    python vision/train_simclr.py --cell=cosine --variance-weight=30 --batch-size=64
    python vision/train_simclr.py --config=configs/cifar10.yaml --cell=qnorm --seed=1

The same command resumes a run that was cut, and says so if it is finished.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from offsphere.run.scripts import Role, Task
from offsphere.training.script import main
from offsphere.training.settings import IMAGE_COLUMNS
from vision.settings import SimclrSettings

if TYPE_CHECKING:
    from offsphere.data.splits import Handed
    from offsphere.run.record import RunFolder
    from offsphere.training.images import ImageExperiment

TASK = Task(
    "test/probe",
    (
        Role(
            "Two views of an image",
            "symmetric",
            "Left is the anchor (the query), right its candidates; each view is the anchor once.",
        ),
    ),
)

Config = SimclrSettings


def make(config: Config, folder: RunFolder, data: Handed | None = None) -> ImageExperiment:
    """What a run trains and measures."""
    from offsphere.training.images import ImageExperiment
    from vision.methods import SimCLR

    return ImageExperiment(config, folder, data, SimCLR)


def run(config: Config, data: Handed | None = None) -> dict[str, object]:
    """Train one encoder and return its metrics; `data` stand in for those that --data names."""
    from offsphere.training.run import train_run

    return train_run(config, "train_simclr", make, data)


if __name__ == "__main__":
    main(Config, run, IMAGE_COLUMNS, __doc__)
