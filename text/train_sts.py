"""Sentence similarity as a regression with a normalisation cell: the two sides are alike.

    python text/train_sts.py --cell=cosine
    python text/train_sts.py --cell=s1norm --data=stsb:PATH/stsb --score-scale=fixed:0.01
    python text/train_sts.py --cell=s2norm --data=stsb:PATH/stsb --score-scale=learnable

The same command goes on with a run that was cut, and says so if it is finished.
"""

from __future__ import annotations

from offsphere.training.script import main
from text.settings import STS_COLUMNS, StsSettings

Config = StsSettings


def run(config: Config) -> dict[str, object]:
    """Train one regression and return its metrics."""
    from text.experiment import train_sts

    return train_sts(config)


if __name__ == "__main__":
    main(Config, run, STS_COLUMNS, __doc__)
