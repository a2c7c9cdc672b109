"""A run's model, ready to be used elsewhere with the cell it was trained with.

    offsphere export --run=results/train_retrieval/qnorm-seed0-1a2b --out=my_model
    offsphere export --run=results/train_clip/cosine-seed0-3c4d --out=my_clip
    offsphere export --run=results/train_clip/dot-seed0-5e6f --out=my_clip --as-cosine
    offsphere export --run=results/train_retrieval/dot-seed0-7a8b --as=mteb --out=for_mteb
    offsphere export --run=results/train_clip/dot-seed0-9c0d --as=atlas --out=points.parquet

Without --as a text run leaves for sentence-transformers and an image-text run for open_clip.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from offsphere.run.command import one_line_errors
from offsphere.run.config import parse
from offsphere.run.progress import speaking
from offsphere.run.record import find_run
from offsphere.run.scripts import Export, Scripts


@dataclass(frozen=True)
class Config:
    run: str
    """The folder of a run, or the beginning of its name."""
    out: str
    """What to write: a folder that is not there yet, or for the atlas a file NAME.parquet."""
    as_: Literal["auto", "sentence-transformers", "open_clip", "mteb", "atlas"] = "auto"
    """sentence-transformers (text runs), open_clip (image-text runs), mteb (an adapter for MTEB's
    evaluator), or atlas (vectors, norms and right or wrong, for embedding-atlas). auto: the first
    of these that fits the run."""
    as_cosine: bool = False
    """With --as=open_clip, which scores with cosines: export another cell too."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "run", find_run(self.run))


def run(config: Config, scripts: Scripts) -> str:
    """Let the run's script export it; what to do with the result, in a few lines."""
    from offsphere.training.run import script_of

    folder, name = script_of(Path(config.run))
    export = scripts[name]().export if name in scripts else None
    if export is None:
        can = ", ".join(x for x, script in scripts.items() if script().export is not None)
        raise ValueError(f"{folder.path} is a run of {name}: expected one of {can}.")
    return export(Export(Path(config.run), config.as_, Path(config.out), config.as_cosine))


def main(argv: Sequence[str] | None, scripts: Scripts) -> None:
    """Flags in, a folder or a file out."""
    with one_line_errors("offsphere export", "Nothing was written."):
        config = parse(Config, argv, description=__doc__, name="offsphere export")
        with speaking():
            print(run(config, scripts))
