"""`offsphere data`: which data with a name are on this machine, and are they the committed ones?

    offsphere data                             every set: there, or what is missing
    offsphere data --check                     also: are they what results/ was made with?

docs/data.md says how to get each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from offsphere.run.catalog import KNOWN, data_root, fingerprint, missing
from offsphere.run.config import parse


@dataclass(frozen=True)
class SetsSettings:
    data_root: str | None = None
    """Where data with a name lie; default: OFFSPHERE_DATA, else the user's cache."""
    check: bool = False
    """Read every file and compare its fingerprint."""


def main(argv: Sequence[str] | None = None) -> None:
    """Print a line for every set."""
    settings = parse(SetsSettings, argv, description=__doc__)
    print(f"Below {data_root(settings.data_root)}:")
    for line in lines(settings):
        print(line)


def lines(settings: SetsSettings) -> Iterator[str]:
    """What is there of each set."""
    for name, known in KNOWN.items():
        if missing(name, settings.data_root):
            yield f"{name:20} missing: {known.make}"
        elif not settings.check:
            yield f"{name:20} there, in {known.place}"
        elif (found := fingerprint(name, settings.data_root)) == known.fingerprint:
            yield f"{name:20} as committed results had it ({found})"
        else:
            yield f"{name:20} other bytes: {found}, committed results had {known.fingerprint}"
