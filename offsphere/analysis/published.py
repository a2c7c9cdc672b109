"""The tables of the papers this suite checks, as tidy data frames. Imports no torch.

The files and what is known to be wrong with them: results/published/README.md.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from typing import TYPE_CHECKING

from offsphere.names import unknown
from offsphere.share import PUBLISHED

if TYPE_CHECKING:
    import pandas as pd

# Every column that is not named here is text, and its missing value is the empty string.
NUMBERS: dict[Hashable, str] = {
    "value": "float64",
    "std": "float64",
    "seeds": "Int64",
    "batch_size": "Int64",
    "temperature": "float64",
    "variance_weight": "float64",
    "norm": "float64",
    "start_angle": "float64",
    "read_error": "float64",
}


def names() -> list[str]:
    """The names that `published` accepts, one per table, in alphabetical order."""
    found = sorted(path.stem for path in PUBLISHED.glob("*.csv"))
    if not found:
        raise FileNotFoundError(
            f"Expected the published tables (*.csv) in {PUBLISHED}, found none: the installation "
            "is damaged. Install offsphere again."
        )
    return found


def published(name: str) -> pd.DataFrame:
    """One published table, one row per printed number, such as 'unit_hypersphere_table01'."""
    import pandas as pd

    if name not in (known := names()):
        raise unknown("published table", name, known)
    return pd.read_csv(
        PUBLISHED / f"{name}.csv",
        dtype=defaultdict(lambda: "str", NUMBERS),
        keep_default_na=False,
        na_values={column: [""] for column in NUMBERS},
    )
