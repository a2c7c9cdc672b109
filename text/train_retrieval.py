"""Text retrieval with a normalisation cell: query is left, document right.

    python text/train_retrieval.py --cell=qnorm
    python text/train_retrieval.py --cell=dot --data=beir:PATH/scifact --eval-data docstrings
    python text/train_retrieval.py --cell=dnorm --task=halves --direction=both
    python text/train_retrieval.py --encoder=scratch --no-final-norm --cell=cosine
    python text/train_retrieval.py --config=configs/static.yaml --cell=dot
    python text/train_retrieval.py --encoder=minilm --tune=top:2 --redraw=2 --cell=dot

The same command resumes a run that was cut, and says so if it is finished.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from offsphere.run.scripts import Role, Task
from offsphere.training.script import main
from text.settings import RETRIEVAL_COLUMNS, RetrievalSettings

if TYPE_CHECKING:
    from offsphere.data.splits import Handed
    from offsphere.run.record import RunFolder
    from offsphere.run.scripts import Export
    from text.experiment import RetrievalExperiment

SIDES = {
    "captions": (
        "Two captions of a picture",
        "symmetric",
        "Left and right are captions of the same picture; left is the query in scoring.",
    ),
    "halves": (
        "Two halves of a document",
        "symmetric",
        "Left and right are halves of the same documents; left is the query in scoring.",
    ),
    "query": (
        "Query and document",
        "asymmetric",
        "Left is the query, right the document it finds.",
    ),
}
STARTS = {"scratch": ", from scratch", "static": ", static vectors", None: ""}
TASK = Task(
    "test/ndcg10",
    tuple(
        Role(
            f"{name}{start}",
            kind,
            sides,
            when={"task": task} | ({"encoder": encoder} if encoder else {}),
        )
        for task, (name, kind, sides) in SIDES.items()
        for encoder, start in STARTS.items()
    ),
)
Config = RetrievalSettings


def make(config: Config, folder: RunFolder, data: Handed | None = None) -> RetrievalExperiment:
    """What a run trains and measures."""
    from text.experiment import RetrievalExperiment

    return RetrievalExperiment(config, folder, data)


def run(config: Config, data: Handed | None = None) -> dict[str, object]:
    """Train one dual encoder and return its metrics; `data` stand in for what --data names."""
    from offsphere.training.run import train_run

    return train_run(config, "train_retrieval", make, data)


def export(asked: Export) -> str:
    """Write a run's model in another form."""
    from text.export import export

    return export(asked)


if __name__ == "__main__":
    main(Config, run, RETRIEVAL_COLUMNS, __doc__)
