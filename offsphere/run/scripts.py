"""The scripts that a study, the doctor and `reproduce` can run. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Script(NamedTuple):
    """A script that a study can run."""

    path: str
    """As in `python PATH`, for the commands that a plan prints."""
    config_class: type
    run: Callable[[Any], dict]


Scripts = Mapping[str, Callable[[], Script]]
