"""An audit: what is measured of given vectors, in one table, and what follows from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from offsphere.audit import measures
from offsphere.audit.advice import RULES, Advice, headline, recommend
from offsphere.audit.labelled import Labelled, measure_labelled
from offsphere.audit.measures import Side
from offsphere.audit.norms import measure_permuted, measure_relevance
from offsphere.audit.quantised import measure_quantised
from offsphere.audit.scored import Scored, measure_scored
from offsphere.audit.scoring import LEVEL, How, score
from offsphere.audit.search import Direction, Search
from offsphere.audit.table import Problem, Table
from offsphere.run.progress import track


class Data(NamedTuple):
    """One data set to be audited: the vectors of its two sides, and who asks whom."""

    told: str
    """What it holds, in words."""
    sides: Mapping[str, Side]
    parts: Sequence[Search | Labelled | Scored]


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
    for part in (part for data in sets for part in data.parts):
        if isinstance(part, Search):
            measures.check_enough(part)
    for data in sets:
        first = data.parts[0]
        curves += measures.measure_sides(data.sides, first.direction.place, _pairs(first), table)
        title = f"auditing {first.direction.data}"
        for part in track(data.parts, len(data.parts), title, "directions"):
            if isinstance(part, Labelled):
                curves += measure_labelled(part, how, table)
            elif isinstance(part, Scored):
                measure_scored(part, how, table)
            else:
                found = _search(part, how, table, similarities)
                curves += found[0]
                problems += found[1]
    directions = tuple(tuple(part.direction for part in data.parts) for data in sets)
    advice = tuple(recommend(table, x, how.own) for of_data in directions for x in of_data)
    return Report(
        name=name,
        trained_with=trained_with,
        how=how,
        headline=headline(advice, None if trained_with == "unknown" else how.own),
        advice=advice,
        table=table,
        told=tuple(data.told for data in sets),
        directions=directions,
        curves=tuple(curves),
        problems=tuple(problems),
    )


def _search(
    search: Search, how: How, table: Table, similarities: Sequence[str]
) -> tuple[list[measures.Curve], list[Problem]]:
    """All that is measured of a search; what needs its candidates in memory, among some of them."""
    outcomes = score(search, how, table)
    chosen = measures.measure_hubness(search, outcomes, how, table)[how.own]
    curves = [measures.measure_confidence(search, outcomes[how.own], chosen, how, table)]
    for name, norms in measure_relevance(search, how, table):
        x, y = measures.histogram(norms)
        curves.append(measures.Curve(*search.direction.place, "norms by relevance", name, x, y))
    measure_permuted(search.thinned, how, table)
    measure_quantised(search.thinned, how, table)
    return curves, measures.measure_remedies(search.thinned, how, table, similarities)


def _pairs(part: Search | Labelled | Scored) -> tuple[Tensor, Tensor] | None:
    """The raw vectors that belong together."""
    if isinstance(part, Labelled):
        return None
    return (part.left, part.right) if isinstance(part, Scored) else part.thinned.pairs()
