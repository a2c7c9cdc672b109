"""SimCLR with a normalisation cell.

    python vision/train_simclr.py --cell=dot
    python vision/train_simclr.py --cell=cosine --variance-weight=30 --batch-size=64
    python vision/train_simclr.py --config=configs/cifar10.yaml --cell=qnorm --seed=1

The same command goes on with a run that was cut, and says so if it is finished.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from offsphere.training.script import main
from vision.settings import COLUMNS, VisionSettings


@dataclass(frozen=True)
class Config(VisionSettings):
    loss: Literal["nt_xent", "dcl", "dhel", "info_nce"] = "nt_xent"
    """nt_xent is SimCLR's own; dcl and dhel are its decoupled kin; info_nce has no within-view
    negatives."""


def run(config: Config) -> dict[str, object]:
    """Train one encoder and return its metrics."""
    from offsphere.training.run import objective_of
    from vision import experiment
    from vision.methods import SimCLR

    def build(population: int) -> SimCLR:
        encoder = experiment.build_encoder(config)
        objective = objective_of(config, config.loss, population)
        return SimCLR(encoder, objective, experiment.two_views(config), config)

    return experiment.train(config, "train_simclr", build)


if __name__ == "__main__":
    main(Config, run, COLUMNS, __doc__)
