"""Text retrieval with a normalisation cell: query is left, document right.

    python text/train_retrieval.py --cell=qnorm
    python text/train_retrieval.py --cell=dot --data=beir:PATH/scifact --eval-data docstrings
    python text/train_retrieval.py --cell=dnorm --task=halves --direction=both
    python text/train_retrieval.py --encoder=scratch --no-final-norm --cell=cosine
    python text/train_retrieval.py --config=configs/static.yaml --cell=dot
    python text/train_retrieval.py --encoder=minilm --tune=top:2 --redraw=2 --cell=dot

The same command goes on with a run that was cut, and says so if it is finished.
"""

from __future__ import annotations

from offsphere.training.script import main
from text.settings import RETRIEVAL_COLUMNS, RetrievalSettings

Config = RetrievalSettings


def run(config: Config) -> dict[str, object]:
    """Train one dual encoder and return its metrics."""
    from text.experiment import train_retrieval

    return train_retrieval(config)


if __name__ == "__main__":
    main(Config, run, RETRIEVAL_COLUMNS, __doc__)
