"""The settings that every door of `offsphere audit` has. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from offsphere.names import check_similarities
from offsphere.run.config import check_positive, unhashed
from offsphere.run.files import check_folder
from offsphere.training.settings import canonical_eval_cell


@dataclass(frozen=True)
class AuditSettings:
    eval_cell: str | None = None
    """The cell that decides which answers are right; default: the one trained with, cosine if
    unknown."""
    similarities: tuple[str, ...] = ()
    """Post-hoc similarities such as centred, whitened or csls, instead of the usual choice."""
    resamples: int = 1000
    """Bootstrap samples of the intervals."""
    seed: int = 0
    """Of the bootstrap, of permuted norms, and of the halves that remedies are fitted on."""
    threads: int = unhashed(2)
    out: str = unhashed("results")
    """The folder below which audit/ gets the table, audit.json and the page."""

    def __post_init__(self) -> None:
        if self.eval_cell is not None:
            object.__setattr__(self, "eval_cell", canonical_eval_cell(self.eval_cell))
        check_similarities(self.similarities)
        check_positive("--resamples", self.resamples)
        check_positive("--threads", self.threads)
        check_folder(self.out)
