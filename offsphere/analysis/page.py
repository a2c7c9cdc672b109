"""The report as one self-contained web page: the answer first, then one section per question.

What stands on the page is put together here as plain values; how it looks is said by
`templates/report.html.j2`, which escapes whatever text a run brings along. No torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from offsphere.analysis.answer import answers
from offsphere.analysis.captions import CAPTIONS
from offsphere.analysis.chart_data import controls, datasets
from offsphere.analysis.charts import drawings, level_looks, page_charts
from offsphere.analysis.claims import Verdict, groups, in_group, rests_on
from offsphere.analysis.conditions import all_steps, steps_text
from offsphere.analysis.digest import Comparison, Study
from offsphere.analysis.first_screen import first_screen
from offsphere.analysis.overview import FARTHEST, PICTURES, Plate, forest_row, page_chart
from offsphere.analysis.page_tables import (
    comparisons_table,
    condition_name,
    metrics_table,
    results_table,
    together_table,
    tuning_table,
    unfinished_table,
)
from offsphere.analysis.panels import Panel
from offsphere.analysis.pictures import Picture
from offsphere.analysis.readings import decimals_for
from offsphere.analysis.words import words_of
from offsphere.page.charts import for_page
from offsphere.page.engine import render as render_page
from offsphere.page.numbers import interval, number, plain_number, seed_count
from offsphere.run import safe_yaml
from offsphere.share import CONFIGS

QUESTIONS = CONFIGS / "questions.yaml"
WAITING = ("not run", "running", "incomplete", "unmatched")
SIGNS = {
    "verified": "✓",
    "failed": "✕",
    "equivalent": "≈",
    "not settled": "?",
    "not testable here": "–",
    "measured": "•",
}
KNOWN = {True: ("holds", "✓"), False: ("fails", "✕")}
SEEDS = (3, 5, 10)
STEPS = (100, 1_000, 3_000)
NARROW = 900
"""Pixels of a figure that leaves room for its numbers at its side."""


class Withdrawn(NamedTuple):
    """Studies whose tables are kept and whose sentences are not, and why."""

    studies: Collection[str] = ()
    reason: str = ""


NOTHING = Withdrawn()


class Question(NamedTuple):
    """One section: what is asked, and what was found and measured about it."""

    id: str
    title: str
    overview: list[str]
    studies: list[Study]
    withdrawn: list[str]
    """Studies that are named and not drawn."""
    claims: list[Verdict]
    """Its primary claims; the board has them in full."""
    groups: list[tuple[str, list[Verdict]]]
    """Its other claims, under their titles."""


def render(
    studies: Sequence[Study],
    comparisons: Sequence[Comparison],
    lines: Sequence[Verdict],
    overviews: Mapping[str, Plate],
    *,
    date: str,
    withdrawn: Withdrawn = NOTHING,
    own: bool = False,
) -> str:
    """The whole page; `own` is the page of one study, which starts with its own answer."""
    questions = [] if own else _questions(QUESTIONS, studies, lines, withdrawn.studies)
    drawn = studies if own else [study for question in questions for study in question.studies]
    places = _places(drawn)
    claimed = {line.claim.id for line in lines}
    seen = [study for study in drawn if any(panel.treatment for panel in study.panels)]
    stores = {
        f"{study.name}.{place}": _store(panel)
        for study in seen
        for place, panel in enumerate(study.panels)
        if panel.treatment is not None and panel.primary is not None
    }
    for name, plate in overviews.items():
        for i, overview in enumerate(plate.charts):
            chart = {name: for_page(page_chart(overview))}
            stores[f"plate-{name}-{i}"] = {"data": overview.data, "charts": chart, "tables": {}}
    return render_page(
        "offsphere.analysis",
        "report.html.j2",
        stores,
        own=studies[0] if own else None,
        answers=answers(studies[0]) if own else [],
        answer=None if own else first_screen(PICTURES, lines),
        farthest=f"{FARTHEST:g}",
        facts=_facts(studies, date, own=own),
        summary=_summary(lines),
        board=_board(lines, places, questions, own=own),
        verdicts=Counter(line.verdict for line in lines),
        least={"seeds": SEEDS, "steps": STEPS},
        questions=[_section(question, claimed, places) for question in questions],
        withdrawn=withdrawn.reason,
        alone=[_study(study, claimed) for study in studies] if own else [],
        overviews=overviews,
        comparisons=comparisons_table(comparisons) if comparisons else None,
    )


def picture_id(study: Study, picture: Picture) -> str:
    """The anchor of a figure; claims name it without the word in front."""
    return f"figure-{study.name}/{picture.part}/{picture.name}"


def _places(studies: Sequence[Study]) -> dict[str, str]:
    """What a claim can point to on this page, by its anchor: studies and figures, with titles."""
    places = {f"study-{study.name}": f"study {study.name}" for study in studies}
    for study in studies:
        for picture in (each for found in study.pictures for each in found):
            title = CAPTIONS[picture.script, picture.name].title
            places[picture_id(study, picture)] = f"figure: {title}"
    return places


def _facts(studies: Sequence[Study], date: str, *, own: bool) -> dict[str, str]:
    runs, finished, hours = (
        sum(getattr(s, key) for s in studies) for key in ("runs", "finished", "hours")
    )
    return {
        **({} if own else {"Studies": f"{len(studies)}"}),
        "Runs finished": f"{finished} of {runs}",
        "Training time": f"{hours:.1f} h" if hours >= 1 else f"{60 * hours:.0f} min",
        "Written": date,
    }


def _summary(lines: Sequence[Verdict]) -> list[str]:
    """How the primary claims ended, in one sentence for each heading."""
    said = []
    for kind, heading in groups(lines, ["primary"]):
        found = [line for line in lines if in_group(line.claim, kind, heading)]
        counts = Counter("waiting for runs" if _waits(x) else x.verdict for x in found)
        words = ", ".join(f"{n} {word}" for word, n in counts.most_common())
        said.append(f"{_sentence_case(heading or 'Claims')}: {words}.")
    return said


def _board(
    lines: Sequence[Verdict],
    places: Mapping[str, str],
    questions: Sequence[Question],
    *,
    own: bool,
) -> list[dict[str, Any]]:
    """The primary claims by heading, in the questions' order; on the page of one study, all claims.

    The first heading that has a verdict stands open: it is the answer so far.
    """
    asked = [line.claim.id for question in questions for line in question.claims]
    order = {claim: place for place, claim in enumerate(asked)}
    found, answered = [], False
    for kind, heading in groups(lines, ["primary"] + (["exact", "descriptive"] if own else [])):
        members = [line for line in lines if in_group(line.claim, kind, heading)]
        told = sorted(
            (line for line in members if not _waits(line)),
            key=lambda line: (_rank(line), order.get(line.claim.id, len(order))),
        )
        found.append(
            {
                "title": _sentence_case(heading or f"{kind} claims"),
                "open": bool(told) and not answered,
                "told": [_claim(line, places) for line in told],
                "waiting": [_claim(line, places) for line in members if _waits(line)],
            }
        )
        answered = answered or bool(told)
    return found


def _rank(line: Verdict) -> int:
    """Settled verdicts before open ones, those before what cannot be tested."""
    return 2 if line.measured is None else 1 if line.verdict == "not settled" else 0


def _waits(line: Verdict) -> bool:
    return line.verdict in WAITING


def _claim(line: Verdict, places: Mapping[str, str]) -> dict[str, Any]:
    """A claim's row: its verdict, what was measured in its unit, and where to look further."""
    claim, measured = line.claim, line.measured
    style, sign = line.verdict.replace(" ", "-"), SIGNS.get(line.verdict, "○")
    if line.holds is not None and line.verdict != "equivalent":
        style, sign = KNOWN[line.holds]
    anchors = [f"study-{claim.study}", *(f"figure-{name}" for name in line.figures)]
    study = f"study {claim.study}" if claim.study and anchors[0] not in places else None
    about = [claim.source, claim.protocol, study, claim.metric]
    row = {
        "id": claim.id,
        "text": claim.text,
        "verdict": line.verdict,
        "style": style,
        "sign": sign,
        "published": claim.published or "no figure",
        "about": [str(part) for part in about if part],
        "links": [(anchor, places[anchor]) for anchor in anchors if anchor in places],
        "seeds": measured.n if measured else 0,
        "steps": line.steps[0] if line.steps else 0,
        "reason": line.sentence,
        "size": None,
        "svg": None,
    }
    if measured is None:
        return row
    log = claim.transform == "log"
    words = words_of(claim.terms[0][0]) if claim.terms and not log else words_of("")
    factor = words.factor
    ends = [x * factor for x in (measured.value, measured.low, measured.high)]
    decimals = 2 if factor != 1 else max(decimals_for(ends) - 1, 0)
    more = [rests_on(line)]
    more += [f"margin {claim.margin * factor:g}{words.unit}"] if claim.margin else []
    more += (
        [f"{line.seeds_needed} {measured.unit}s needed for 80 % power"] if line.seeds_needed else []
    )
    more += [f"p {line.p_adjusted:.2g} (Holm)"] if line.p_adjusted is not None else []
    rest = ", ".join(filter(None, [measured.count, steps_text(line.steps)]))
    return row | {
        "size": number(ends[0], decimals, signed=True),
        "ends": f"[{', '.join(number(x, decimals, signed=True) for x in ends[1:])}]",
        "unit": "log ratio" if log else words.unit.strip(),
        "rest": rest,
        "more": "; ".join(more),
        "svg": forest_row(line) if claim.kind == "primary" and claim.margin else None,
    }


def _questions(
    file: Path, studies: Sequence[Study], lines: Sequence[Verdict], withdrawn: Collection[str]
) -> list[Question]:
    """The sections that have a study or a claim, and one for what no question names."""
    asked = safe_yaml.load(file.read_text(encoding="utf-8"), file) if file.exists() else []
    by_name = {study.name: study for study in studies}
    named = {name for each in asked for name in each["studies"]}
    about = {line.claim.study for line in lines} | by_name.keys()
    rest = sorted(str(name) for name in about - named if name)
    if rest:
        asked = [*asked, {"id": "other", "title": "Other studies", "studies": rest}]
    found = []
    for each in asked:
        wanted = [name for name in each["studies"] if name in by_name]
        exact = each.get("exact", False)
        own = [
            line
            for line in lines
            if line.claim.study in each["studies"]
            or line.claim.id in each.get("claims", [])
            or (exact and line.claim.kind == "exact")
        ]
        if not wanted and not own:
            continue
        rest_of = [("Theorems and identities, verified by tests", "exact")]
        rest_of.append(("Descriptive figures, with 95 % intervals and no verdict", "descriptive"))
        found.append(
            Question(
                each["id"],
                each["title"],
                each.get("overview", []),
                [by_name[name] for name in wanted if name not in withdrawn],
                [name for name in wanted if name in withdrawn],
                [line for line in own if line.claim.kind == "primary"],
                [(title, [x for x in own if x.claim.kind == kind]) for title, kind in rest_of],
            )
        )
    return found


def _section(
    question: Question, claimed: Collection[str], places: Mapping[str, str]
) -> dict[str, Any]:
    return {
        "id": question.id,
        "title": question.title,
        "overview": question.overview,
        "studies": [_study(study, claimed) for study in question.studies],
        "withdrawn": question.withdrawn,
        "verdicts": [(line.claim.id, line.claim.text, line.verdict) for line in question.claims],
        "groups": [
            (title, [_claim(line, places) for line in members])
            for title, members in question.groups
            if members
        ],
    }


def _study(study: Study, claimed: Collection[str]) -> dict[str, Any]:
    seeds = sorted({seed for panel in study.panels for seed in panel.seeds})
    failed = study.runs - study.finished
    facts = [f"{study.finished} of {study.runs} runs finished", seed_count(len(seeds))]
    facts += [f"{failed} without a result"] if failed else []
    if steps := steps_text(all_steps(x for panel in study.panels for x in panel.steps)):
        facts.append(f"{steps} of the optimiser")
    return {
        "name": study.name,
        "question": study.question,
        "facts": " · ".join(facts),
        "panels": [_panel(study, place, claimed) for place in range(len(study.panels))],
        "unfinished": unfinished_table(study),
        "tuning": tuning_table(study),
        "provenance": study.provenance,
    }


def _panel(study: Study, place: int, claimed: Collection[str]) -> dict[str, Any]:
    panel = study.panels[place]
    view: dict[str, Any] = {
        "id": f"{study.name}.{place}",
        "title": panel.name or panel.script if len(study.panels) > 1 else None,
        "treatment": panel.treatment,
        "measured": panel.primary is not None,
        "pictures": [_picture(study, panel, x, claimed) for x in study.pictures[place]],
        "metrics": None,
    }
    if panel.treatment is None:
        return view | {"metrics": metrics_table(panel)}
    if panel.primary is None:
        return view
    steps = steps_text(all_steps(panel.steps))
    roles = [x for place, x in enumerate(panel.roles) if x not in panel.roles[:place]]
    return view | {
        "steps": steps,
        "roles": [x.sides if len(roles) == 1 else f"{x.task}: {x.sides}" for x in roles],
        "levels": list(zip(panel.levels, level_looks(panel), strict=True)),
        "controls": {name: found for name, found in controls(panel).items() if len(found) > 1},
        "drawings": drawings(panel),
        "results": results_table(panel, panel.primary),
        "together": together_table(panel),
        "floor": _floor(panel),
        "delta_cv": _delta_cv(panel),
        "published": study.published,
        "ties": _ties(panel),
        "variation": _variation(panel),
    }


def _store(panel: Panel) -> dict[str, Any]:
    """What the script of the page shows of a panel when it is looked at."""
    tables = {name: results_table(panel, name) for name in panel.metrics}
    return {
        "data": datasets(panel),
        "charts": page_charts(panel, drawings(panel)),
        "tables": {
            name: {"name": table.name, "rows": [row.cells for row in table.rows if row.level]}
            for name, table in tables.items()
        },
    }


def _picture(
    study: Study, panel: Panel, picture: Picture, claimed: Collection[str]
) -> dict[str, Any]:
    """A figure that a run drew, what it says and the numbers beside it."""
    caption = CAPTIONS[picture.script, picture.name]
    return {
        "id": picture_id(study, picture),
        "picture": picture,
        "caption": caption,
        "numbers": {
            words: plain_number(panel.metrics[name].summary[0].value)
            for name, words in caption.numbers.items()
            if name in panel.metrics
        },
        "claims": [claim for claim in caption.claims if claim in claimed],
        "narrow": picture.width <= NARROW,
    }


def _floor(panel: Panel) -> list[str]:
    """Which conditions learned nothing that their untrained model does not do as well."""
    return [
        f"{condition_name(panel, place)}: {found.runs} of {found.measured} runs"
        for place, found in enumerate(panel.at_floor)
        if found.runs
    ]


def _delta_cv(panel: Panel) -> list[str]:
    """The ratio of the queries' variation between two cells, by setting."""
    return [
        ": ".join(filter(None, [panel.contexts[context], f"{number(x.value, 3)} {interval(x, 3)}"]))
        + f", {seed_count(x.n)}"
        for context, x in panel.delta_cv.items()
    ]


def _ties(panel: Panel) -> list[str]:
    """What is said about columns of the trained-with by scored-with maps that tie."""
    queries: Iterable[str] = dict.fromkeys(x.query for x in panel.heat_maps if x.query)
    return [
        f"Columns joined by = tie by construction: where {query} is the query, its own norm cannot "
        "change its ranking."
        for query in queries
    ]


def _variation(panel: Panel) -> list[str]:
    """The coefficients of variation beside the histograms of norms."""
    found = []
    for each in panel.histograms:
        about = ", ".join(x for x in (each.outcome, panel.contexts[each.context]) if x)
        values = (f"{panel.levels[level]} {x:.3g}" for level, x in each.variation.items())
        found.append(f"{about}: {', '.join(values)}")
    return found


def _sentence_case(text: str) -> str:
    return text[:1].upper() + text[1:]
