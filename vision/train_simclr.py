"""SimCLR with a normalisation cell.

    python vision/train_simclr.py --cell=dot
    python vision/train_simclr.py --cell=cosine --variance-weight=30 --batch-size=64
    python vision/train_simclr.py --config=configs/cifar10.yaml --cell=qnorm --seed=1

The same command goes on with a run that was cut, and says so if it is finished.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from offsphere.names import PAIR_LOSSES, VIEW_LOSSES
from offsphere.run.config import added
from offsphere.training.script import main
from vision.settings import COLUMNS, VisionSettings

if TYPE_CHECKING:
    LossName = str
else:
    LossName = Literal[(*VIEW_LOSSES, *PAIR_LOSSES)]


@dataclass(frozen=True)
class Config(VisionSettings):
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


def run(config: Config) -> dict[str, object]:
    """Train one encoder and return its metrics."""
    from offsphere.training.run import objective_of
    from vision import experiment
    from vision.methods import SimCLR

    def build(population: int) -> SimCLR:
        encoder = experiment.build_encoder(config)
        objective = objective_of(config, config.loss, population)
        views = experiment.two_views(config)
        return SimCLR(encoder, objective, views, config, view_norm=config.view_norm)

    return experiment.train(config, "train_simclr", build)


if __name__ == "__main__":
    main(Config, run, COLUMNS, __doc__)
