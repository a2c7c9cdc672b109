"""Sentence similarity as a regression with a normalisation cell: the two sides are alike.

    python text/train_sts.py --cell=cosine
    python text/train_sts.py --cell=s1norm --data=stsb:PATH/stsb --score-scale=fixed:0.01
    python text/train_sts.py --cell=s2norm --data=stsb:PATH/stsb --score-scale=learnable

The same command resumes a run that was cut, and says so if it is finished.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from offsphere.run.scripts import Role, Task
from offsphere.training.script import main
from text.settings import STS_COLUMNS, StsSettings

if TYPE_CHECKING:
    from offsphere.data.splits import Handed
    from offsphere.run.record import RunFolder
    from offsphere.run.scripts import Export
    from text.experiment import SentenceExperiment

TASK = Task(
    "test/spearman",
    (
        Role(
            "Two sentences, graded similarity",
            "symmetric",
            "Left and right are the two sentences of a pair; neither is a query.",
        ),
    ),
)
Config = StsSettings


def make(config: Config, folder: RunFolder, data: Handed | None = None) -> SentenceExperiment:
    """What a run trains and measures."""
    from text.experiment import SentenceExperiment

    return SentenceExperiment(config, data)


def run(config: Config, data: Handed | None = None) -> dict[str, object]:
    """Train one regression and return its metrics; `data` stand in for what --data names."""
    from offsphere.training.run import train_run

    return train_run(config, "train_sts", make, data)


def export(asked: Export) -> str:
    """Write a run's model in another form."""
    from text.export import export

    return export(asked)


if __name__ == "__main__":
    main(Config, run, STS_COLUMNS, __doc__)
