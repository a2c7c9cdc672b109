"""`offsphere compare TABLE`: which of my methods is better, and can my runs tell?

    offsphere compare runs.csv --arm=method --metric=acc --pair=seed --margin=0.5
    offsphere compare runs.csv --arm=method --metric=acc --block=dataset --baseline=adam --out=page
    offsphere compare results/cells_simclr --arm=cell --metric=test/probe --margin=0.01

TABLE has one row per run: CSV, TSV, parquet, JSON lines, an export of W&B or MLflow, or the folder
of a study. Runs that share --pair are compared with each other, each arm with the baseline: paired
differences with 95 % intervals, one Holm family, and the words of the claims board. With --out a
page, a table and the forest plot are written. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from offsphere.analysis.comparison import Settings, as_rows, compare
from offsphere.analysis.comparison_page import FIGURE, PAGE, TABLE, show, write
from offsphere.run.command import one_line_errors
from offsphere.run.config import parse


def main(argv: Sequence[str] | None = None) -> None:
    """Flags in, a table out; a mistake ends in one line."""
    settings = parse(
        Settings, argv, description=__doc__, name="offsphere compare", words=("table", "TABLE")
    )
    with one_line_errors("offsphere compare", "Nothing was written."):
        found = compare(settings)
        if settings.out is not None:
            write(found, Path(settings.out))
        if settings.json:
            print(json.dumps(as_rows(found), indent=2, ensure_ascii=False))
            return
        show(found)
        if settings.out is not None:
            print(f"{settings.out}: {PAGE}, {TABLE}, {FIGURE}.svg, .png, .pdf")


if __name__ == "__main__":
    main()
