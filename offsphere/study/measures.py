"""Whether a script measures what a study's `metric` names, asked before the study's first run.

What each script measures stands in share/measures.yaml, because a study knows no lane.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import cache

from offsphere.run import safe_yaml
from offsphere.share import MEASURES


@cache
def measures() -> dict[str, list[str]]:
    """By script the patterns of the columns that it measures; one that is not listed is not
    checked."""
    table = safe_yaml.load(MEASURES.read_text(encoding="utf-8"), MEASURES)
    return {
        script: [
            f"{group}/{name}"
            for content in (table["sets"][one] for one in sets.split())
            for groups, names in content.items()
            for group in groups.split()
            for name in names.split()
        ]
        for script, sets in table["scripts"].items()
    }


def unmeasured(script: str, names: Iterable[str]) -> list[str]:
    """Those of the names that a script does not measure."""
    known = measures().get(script, ["*"])
    return [name for name in names if not any(fnmatchcase(name, one) for one in known)]


def check_metric(what: str, metric: str, scripts: Iterable[str]) -> None:
    """Refuse a metric that none of the scripts measures, with the nearest ones as the remedy."""
    scripts = sorted(set(scripts))
    if not all(unmeasured(script, [metric]) for script in scripts):
        return
    known = list(dict.fromkeys(name for script in scripts for name in measures()[script]))
    near = difflib.get_close_matches(metric, known, n=3, cutoff=0.5) or known[:3]
    raise ValueError(
        f"{what} {metric!r} is not measured by {', '.join(scripts)}. Did you mean "
        f"{' or '.join(map(repr, near))}?"
    )
