"""An audit: what is measured of given vectors, in one table, and what follows from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from offsphere.audit import measures
from offsphere.audit.advice import RULES, Advice, headline, recommend
from offsphere.audit.scoring import LEVEL, How, score
from offsphere.audit.search import Direction, Search
from offsphere.audit.table import Problem, Table
from offsphere.run.progress import track


class Data(NamedTuple):
    """One data set to be audited: the vectors of its two sides, and who asks whom."""

    told: str
    """What it holds, in words."""
    sides: Mapping[str, Tensor]
    searches: Sequence[Search]


@dataclass(frozen=True)
class Section:
    """A part of the page that a lane adds: sentences and a table."""

    title: str
    paragraphs: tuple[str, ...]
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, eq=False)
class Report:
    """All of an audit; what is not in the table are words, and numbers for charts."""

    name: str
    trained_with: str
    how: How
    headline: str
    """What to do, in one line."""
    advice: tuple[Advice, ...]
    table: Table
    told: tuple[str, ...]
    """What each data set holds."""
    directions: tuple[tuple[Direction, ...], ...]
    """Of each data set, in the same order."""
    curves: tuple[measures.Curve, ...]
    problems: tuple[Problem, ...]
    sections: tuple[Section, ...] = ()

    def adding(self, advice: Advice, section: Section) -> Report:
        """The same with what a lane measured besides, which leaves the headline as it is."""
        return replace(self, advice=(*self.advice, advice), sections=(*self.sections, section))

    def content(self) -> dict[str, Any]:
        """What audit.json holds."""
        return {
            "name": self.name,
            "trained_with": self.trained_with,
            **self.how._asdict(),
            "level": LEVEL,
            "rules": asdict(RULES),
            "headline": self.headline,
            "advice": [asdict(x) for x in self.advice],
            "data": self.told,
            "problems": [x._asdict() for x in self.problems],
            "curves": [asdict(x) for x in self.curves],
            "table": [row._asdict() for row in self.table],
        }


def audit(
    name: str,
    trained_with: str,
    sets: Sequence[Data],
    how: How,
    similarities: Sequence[str] = (),
) -> Report:
    """Everything that vectors and relevance say about magnitude."""
    table = Table()
    curves: list[measures.Curve] = []
    problems: list[Problem] = []
    for data in sets:
        curves += measures.measure_sides(data.sides, data.searches[0], table)
        title = f"auditing {data.searches[0].direction.data}"
        for search in track(data.searches, len(data.searches), title, "directions"):
            outcomes = score(search, how, table)
            chosen = measures.measure_hubness(search, how, table)[how.own]
            own = outcomes[how.own]
            curves.append(measures.measure_confidence(search, own, chosen, how, table))
            problems += measures.measure_remedies(search, how, table, similarities)
    directions = tuple(tuple(search.direction for search in data.searches) for data in sets)
    advice = tuple(recommend(table, x, how.own) for of_data in directions for x in of_data)
    return Report(
        name=name,
        trained_with=trained_with,
        how=how,
        headline=headline(advice, how.own),
        advice=advice,
        table=table,
        told=tuple(data.told for data in sets),
        directions=directions,
        curves=tuple(curves),
        problems=tuple(problems),
    )
