"""SimCLR with a normalisation cell.

    python vision/train_simclr.py --cell=dot
    python vision/train_simclr.py --cell=cosine --variance-weight=30 --batch-size=64
    python vision/train_simclr.py --config=configs/cifar10.yaml --cell=qnorm --seed=1

The same command resumes a run that was cut, and says so if it is finished.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from offsphere.names import PAIR_LOSSES, VIEW_LOSSES
from offsphere.run.config import added
from offsphere.run.scripts import Role, Task
from offsphere.training.script import main
from offsphere.training.settings import IMAGE_COLUMNS, ImageSettings

if TYPE_CHECKING:
    from offsphere.data.splits import Handed
    from offsphere.run.record import RunFolder
    from offsphere.training.images import ImageExperiment
    from vision.methods import SimCLR

    LossName = str
else:
    LossName = Literal[(*VIEW_LOSSES, *PAIR_LOSSES)]

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


@dataclass(frozen=True)
class Config(ImageSettings):
    loss: LossName = "nt_xent"
    """nt_xent is SimCLR's own; dcl and dhel are its decoupled kin; the others have no within-view
    negatives."""
    view_norm: Literal["stacked", "separate"] = added("stacked")
    """Batch-norm takes its statistics from both views together (2m images), or, as in the papers'
    code, from each view alone (m), whose running statistics then move twice a step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.view_norm == "separate" and self.norm == "group":
            raise ValueError(
                "--view-norm=separate has no effect with --norm=group: no batch-norm is left."
            )


def make_method(config: Config, population: int) -> SimCLR:
    """Two views of each image through one encoder, and a loss over all of them."""
    from offsphere.training.images import build_encoder, two_views
    from offsphere.training.run import objective_of
    from vision.methods import SimCLR

    objective = objective_of(config, config.loss, population)
    encoder, views = build_encoder(config), two_views(config)
    return SimCLR(encoder, objective, views, config, view_norm=config.view_norm)


def make(config: Config, folder: RunFolder, data: Handed | None = None) -> ImageExperiment:
    """What a run trains and measures."""
    from offsphere.training.images import ImageExperiment

    return ImageExperiment(config, folder, data, make_method)


def run(config: Config, data: Handed | None = None) -> dict[str, object]:
    """Train one encoder and return its metrics; `data` stand in for those that --data names."""
    from offsphere.training.run import train_run

    return train_run(config, "train_simclr", make, data)


if __name__ == "__main__":
    main(Config, run, IMAGE_COLUMNS, __doc__)
