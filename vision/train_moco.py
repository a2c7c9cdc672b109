"""MoCo v2 with a normalisation cell: query is left; key and queue, which get no gradient, right.

    python vision/train_moco.py --cell=cosine --variance-weight=30
    python vision/train_moco.py --config=configs/cifar10.yaml --cell=dnorm --queue-size=4096

The same command resumes a run that was cut, and says so if it is finished.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from offsphere.run.help import Groups
from offsphere.run.scripts import Role, Task
from offsphere.training.script import main
from offsphere.training.settings import IMAGE_COLUMNS, ImageSettings, check_setting

if TYPE_CHECKING:
    from offsphere.data.splits import Handed
    from offsphere.run.record import RunFolder
    from offsphere.training.images import ImageExperiment
    from vision.methods import MoCo

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


@dataclass(frozen=True)
class Config(ImageSettings):
    GROUPS: ClassVar[Groups] = {"question": (("queue_size",), ("momentum", "key_groups"))}

    queue_size: int = 2048
    """Keys in the queue; at most the training images less one batch."""
    momentum: float = 0.99
    """How slowly the key encoder follows (0.999 for long training)."""
    key_groups: int = 4
    """Keys pass batch-norm in this many shuffled groups, so that it cannot give them away."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_setting(self, "momentum", "between 0 and 1", 0 <= self.momentum <= 1)
        good = self.norm == "group" or self.key_groups >= 1  # without batch-norm it is not used
        check_setting(self, "key_groups", "at least 1", good)
        if self.negatives is not None:
            raise ValueError(
                f"--negatives={self.negatives} divides a batch into groups, but MoCo's negatives "
                "come from its queue: change --queue-size."
            )
        if self.queue_size <= self.batch_size:
            raise ValueError(
                f"--queue-size={self.queue_size} must be above --batch-size={self.batch_size}: "
                "the queue would hold nothing but the keys of its own batch."
            )


def make_method(config: Config, population: int) -> MoCo:
    """Queries from the encoder, keys from its momentum twin, negatives from the queue."""
    from offsphere.training.images import build_encoder, two_views
    from offsphere.training.run import objective_of
    from vision.methods import MoCo

    room = population - config.batch_size
    if config.queue_size > room:
        raise ValueError(
            f"--queue-size={config.queue_size} is too long for {population} training images in "
            f"batches of {config.batch_size}: keys would meet their own image. At most {room}."
        )
    return MoCo(
        build_encoder(config),
        objective_of(config, "moco_nce", population),
        two_views(config),
        config,
        queue_size=config.queue_size,
        momentum=config.momentum,
        key_groups=1 if config.norm == "group" else config.key_groups,
    )


def make(config: Config, folder: RunFolder, data: Handed | None = None) -> ImageExperiment:
    """What a run trains and measures."""
    from offsphere.training.images import ImageExperiment

    return ImageExperiment(config, folder, data, make_method)


def run(config: Config, data: Handed | None = None) -> dict[str, object]:
    """Train one encoder and return its metrics; `data` stand in for those that --data names."""
    from offsphere.training.run import train_run

    return train_run(config, "train_moco", make, data)


if __name__ == "__main__":
    main(Config, run, IMAGE_COLUMNS, __doc__)
