"""The report as one self-contained web page: tables in HTML, charts drawn by its one script.

Whatever text a run brings along passes through `element`, which escapes it, or through JSON that
the script puts in place as text; a content policy lets no other script run.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from importlib import resources
from typing import Any

from offsphere.analysis.captions import CAPTIONS
from offsphere.analysis.chart_data import comparison_data, embedded, panel_data, short
from offsphere.analysis.claims import Verdict, groups, in_group, rests_on
from offsphere.analysis.digest import Comparison, Study
from offsphere.analysis.markup import (
    Html,
    element,
    interval,
    number,
    plain_number,
    scrolled,
    seed_count,
    table,
)
from offsphere.analysis.panels import (
    HeatMap,
    Metric,
    Panel,
    Steps,
    all_steps,
    decimals_for,
    steps_text,
)
from offsphere.analysis.pictures import Picture
from offsphere.estimate import Estimate

SIGNS = {
    "verified": "✓",
    "failed": "✕",
    "equivalent": "≈",
    "not settled": "?",
    "not testable here": "–",
    "measured": "•",
}
KIND_TITLES = {
    "primary": "Primary claims",
    "exact": "Theorems and identities",
    "descriptive": "Descriptive figures",
}
KIND_NOTES = {
    "primary": "Fixed in advance: one metric, one expectation, one margin and the number of pairs "
    "each; verdicts hold for all of them together (Holm, 5 %). Shaded: the margin. A claim whose "
    "gate is shut is not testable here, and has no figure.",
    "exact": "Verified by tests of this repository.",
    "descriptive": "Figures with 95 % intervals, over seeds and, where it says so, over test "
    "examples; no verdict.",
}
TOGETHER = ("test/probe", "test/knn", "test/probe_embedding", "test/knn_embedding")
NARROW = 900
"""Pixels of a figure that leaves room for its numbers at its side."""
ROLE_TITLES = {
    "asymmetric": "Asymmetric: the sides have different roles",
    "symmetric": "Symmetric: the sides are interchangeable",
    "control": "Control: the candidates' norms are not learned",
}


def render(
    studies: Sequence[Study],
    comparisons: Sequence[Comparison],
    lines: Sequence[Verdict],
    *,
    date: str,
    header: Html | None = None,
) -> str:
    """The whole page; with a `header` of its own it is the page of one study."""
    panels = {
        panel_id(study, place): panel_data(panel)
        for study in studies
        for place, panel in enumerate(study.panels)
    }
    data = {"panels": panels, "comparisons": comparison_data(comparisons)}
    script, style = asset("report.js"), asset("report.css")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'"
    )
    places = _places(studies)
    claims = {line.claim.id for line in lines}
    shown = [_study(study, claims) for study in studies]
    around = [_board(lines, places), _symmetry(comparisons)]
    if header is not None:
        around = [part for part, wanted in zip(around, (lines, comparisons), strict=True) if wanted]
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element(
            "title",
            f"offsphere: {studies[0].name}"
            if header is not None
            else "offsphere: when does embedding magnitude matter?",
        ),
        element("style", Html(style)),
    )
    body = element(
        "body",
        element("a", "Skip to the claims", href="#board", class_="skip")
        if header is None
        else element("a", "Skip to the results", href="#main", class_="skip"),
        header or _header(studies, date),
        element(
            "div",
            _contents(studies) if header is None else None,
            element(
                "main",
                *([*around, *shown] if header is None else [*shown, *around]),
                id="main",
            ),
            class_="layout" if header is None else "alone",
        ),
        element("div", id="tip", role="status", aria_live="polite", hidden=True),
        element("script", embedded(data), type="application/json", id="data"),
        element("script", Html(script)),
    )
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def asset(name: str) -> str:
    """A file that the page carries inside."""
    return (resources.files("offsphere.analysis") / "assets" / name).read_text(encoding="utf-8")


def panel_id(study: Study, place: int) -> str:
    """The name by which the page's script finds a panel."""
    return f"{study.name}.{place}"


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


def _header(studies: Sequence[Study], date: str) -> Html:
    runs, finished = (sum(getattr(s, key) for s in studies) for key in ("runs", "finished"))
    hours = sum(study.hours for study in studies)
    facts = [
        ("Studies", f"{len(studies)}"),
        ("Runs finished", f"{finished} of {runs}"),
        ("Training time", f"{hours:.1f} h"),
        ("Written", date),
    ]
    return element(
        "header",
        element(
            "div",
            element("p", "offsphere report", class_="kicker"),
            element("button", "Theme", id="theme", type="button", aria_pressed="false"),
            class_="bar",
        ),
        element("h1", "When does embedding magnitude matter?"),
        element(
            "p",
            "Cosine similarity discards the length of an embedding. Each study below trains the "
            "same model with and without it, seed by seed, and says what follows.",
            class_="lead",
        ),
        element(
            "dl",
            *(element("div", element("dt", name), element("dd", value)) for name, value in facts),
            class_="facts",
        ),
    )


def _contents(studies: Sequence[Study]) -> Html:
    links = [("#board", "Claims"), ("#symmetry", "Symmetric and asymmetric tasks")]
    links += [(f"#study-{study.name}", study.name) for study in studies]
    items = (element("li", element("a", name, href=target)) for target, name in links)
    return element(
        "nav",
        element("details", element("summary", "Contents"), element("ol", *items), open=True),
        aria_label="Contents",
    )


def _board(lines: Sequence[Verdict], places: Mapping[str, str]) -> Html:
    words = list(dict.fromkeys(line.verdict for line in lines))
    counts = [(word, sum(line.verdict == word for line in lines)) for word in words]
    choices = [element("option", f"all ({len(lines)})", value="")]
    choices += [element("option", f"{word} ({count})", value=word) for word, count in counts]
    found = {
        group: [line for line in lines if in_group(line.claim, *group)]
        for group in groups(lines, list(KIND_TITLES))
    }
    intro = "What the papers say, what we measured, and whether the one supports the other."
    if not lines:
        intro = "No file of claims was found; --claims names one."
    return element(
        "section",
        element("h2", "Claims", id="board"),
        element("p", intro),
        element(
            "p",
            element("label", "Show verdict ", for_="verdicts"),
            element("select", *choices, id="verdicts"),
            class_="controls",
        )
        if lines
        else None,
        *(_claims(*group, members, places) for group, members in found.items()),
        aria_labelledby="board",
    )


def _claims(
    kind: str, heading: str | None, lines: Sequence[Verdict], places: Mapping[str, str]
) -> Html:
    names = ("Verdict", "Claim", "Measured, with 95 % interval", "Published")
    head = (element("th", name, scope="col") for name in names)
    rows = element(
        "table",
        element("caption", KIND_NOTES[kind]),
        element("thead", element("tr", *head)),
        element("tbody", *(_claim(line, places) for line in lines)),
        class_="claims",
    )
    where = f", {heading}" if heading else ""
    title = element("summary", f"{KIND_TITLES[kind]}{where} ({len(lines)})")
    return element("details", title, rows, open=kind == "primary")


def _claim(line: Verdict, places: Mapping[str, str]) -> Html:
    claim, measured = line.claim, line.measured
    known = {True: ("holds", "✓"), False: ("fails", "✕")}
    style, sign = line.verdict.replace(" ", "-"), SIGNS.get(line.verdict, "○")
    if line.holds is not None and line.verdict != "equivalent":
        style, sign = known[line.holds]
    badge = element(
        "span",
        element("span", sign, aria_hidden="true"),
        f" {line.verdict}",
        class_=f"badge {style}",
    )
    anchors = [f"study-{claim.study}", *(f"figure-{name}" for name in line.figures)]
    links = [element("a", places[to], href=f"#{to}") for to in anchors if to in places]
    study = f"study {claim.study}" if claim.study and anchors[0] not in places else None
    about = [claim.source, claim.protocol, study, claim.metric]
    if measured is None:
        shown = element("span", line.sentence, class_="muted")
        chart = None
    else:
        found = Estimate(measured.value, measured.low, measured.high, measured.n)
        decimals = max(decimals_for((found.value, found.low, found.high)) - 1, 0)
        unit = "log ratio " if claim.transform == "log" else ""
        seeds = rests_on(line)
        if line.seeds_needed is not None:
            seeds += f"; {line.seeds_needed} needed for 80 % power"
        if line.p_adjusted is not None:
            seeds += f"; p {line.p_adjusted:.2g} (Holm)"
        shown = element(
            "span",
            f"{unit}{number(found.value, decimals, signed=True)} ",
            element("span", interval(found, decimals, signed=True), class_="muted"),
            element("br"),
            element("small", seeds, class_="muted"),
        )
        chart = element(
            "span",
            class_="spark",
            data_mean=short(found.value),
            data_low=short(found.low),
            data_high=short(found.high),
            data_margin=short(claim.margin),
        )
    return element(
        "tr",
        element("td", badge),
        element(
            "td",
            claim.text,
            element(
                "small",
                element("code", claim.id),
                " · ",
                " · ".join(str(part) for part in about if part),
                *(part for link in links for part in (" · ", link)),
                class_="muted block",
            ),
        ),
        element("td", shown, chart, class_="num wide"),
        element("td", claim.published or "no figure", class_="published"),
        id=f"claim-{claim.id}",
        data_verdict=line.verdict,
    )


def _symmetry(comparisons: Sequence[Comparison]) -> Html:
    head = ("Task", "Where", "Source", "Metric", "Cell", "ln(cell / cosine)", "95 % interval")
    head = (*head, "n", "Steps")
    rows = [
        element(
            "tr",
            element("th", found.task, scope="row"),
            element("td", found.where),
            element("td", found.source),
            element("td", found.metric),
            element("td", found.cell),
            element("td", number(found.ratio.value, 3, signed=True), class_="num"),
            element("td", interval(found.ratio, 3, signed=True), class_="num"),
            element("td", str(found.ratio.n or "–"), class_="num"),
            element("td", _plain_steps(found.steps), class_="num"),
        )
        for found in comparisons
    ]
    figures = [
        element(
            "figure",
            element("figcaption", title),
            element("div", class_="chart", data_chart="comparisons", data_kind=kind),
        )
        for kind, title in ROLE_TITLES.items()
        if any(found.kind == kind for found in comparisons)
    ]
    title, words = "Each cell against cosine", "Marks have 95 % intervals."
    if any(found.source != "ours" for found in comparisons):
        title = "Symmetric tasks beside text retrieval"
        words = (
            "Filled marks with 95 % intervals are ours, hollow ones are published figures, which "
            "come without intervals. Data, models and metrics differ between rows: symmetry is not "
            "the only thing that changes."
        )
    return element(
        "section",
        element("h2", title, id="symmetry"),
        element(
            "p",
            "Each cell against cosine, as the natural logarithm of the ratio of their metrics, so "
            f"that tasks of different difficulty share an axis. {words}",
        ),
        element("div", class_="legend", data_legend="cells"),
        *figures,
        element(
            "details",
            element("summary", "The same as a table"),
            scrolled("Every cell against cosine", table(head, rows)),
        ),
        aria_labelledby="symmetry",
    )


def _study(study: Study, claims: Collection[str]) -> Html:
    seeds = sorted({seed for panel in study.panels for seed in panel.seeds})
    failed = study.runs - study.finished
    facts = f"{study.finished} of {study.runs} runs finished · {seed_count(len(seeds))}"
    if failed:
        facts += f" · {failed} without a result"
    if steps := steps_text(all_steps(x for panel in study.panels for x in panel.steps)):
        facts += f" · {steps} of the optimiser"
    return element(
        "section",
        element("h2", study.name, id=f"study-{study.name}"),
        element("p", study.question, class_="question") if study.question else None,
        element("p", facts, class_="muted"),
        *(_panel(study, place, claims) for place in range(len(study.panels))),
        _failed(study),
        _tuning(study),
        _provenance(study),
        class_="study",
        aria_labelledby=f"study-{study.name}",
    )


def _panel(study: Study, place: int, claims: Collection[str]) -> Html:
    panel = study.panels[place]
    body = (
        [_roles(panel), _steps_note(panel), *_comparison(study, panel)]
        if panel.treatment
        else [_picture(study, panel, each, claims) for each in study.pictures[place]]
        + [_metrics_table(panel)]
    )
    return element(
        "article",
        element("h3", panel.name or panel.script) if len(study.panels) > 1 else None,
        *body,
        class_="panel",
        data_panel=panel_id(study, place),
    )


def _steps_note(panel: Panel) -> Html | None:
    """What every chart and table of a part is about: networks after so many steps."""
    steps = steps_text(all_steps(panel.steps))
    note = f"All charts and tables of this part are about networks after {steps} of the optimiser."
    return element("p", note, class_="muted") if steps else None


def _plain_steps(steps: Steps) -> str:
    return steps_text(steps).removesuffix(" steps") or "–"


def _picture(study: Study, panel: Panel, picture: Picture, claims: Collection[str]) -> Html:
    """A figure that a run drew, what it says and the numbers beside it."""
    caption = CAPTIONS[picture.script, picture.name]
    numbers = [
        element("div", element("dt", words), element("dd", plain_number(metric.summary[0].value)))
        for name, words in caption.numbers.items()
        if (metric := panel.metrics.get(name)) is not None
    ]
    links = [element("a", each, href=f"#claim-{each}") for each in caption.claims if each in claims]
    named = (part for place, link in enumerate(links) for part in (", " if place else " ", link))
    image = element(
        "img",
        src=picture.address,
        alt=caption.drawn,
        width=picture.width,
        height=picture.height,
        style=f"--own: {picture.width}px",
    )
    return element(
        "figure",
        element(
            "figcaption",
            element("b", caption.title),
            element("span", caption.says),
            element("span", "On the board:", *named, class_="muted") if links else None,
        ),
        element(
            "div",
            scrolled(f"Figure: {caption.title}", image),
            element("dl", *numbers, class_="numbers") if numbers else None,
            class_="beside" if picture.width <= NARROW else "above",
        ),
        class_="picture",
        id=picture_id(study, picture),
    )


def _roles(panel: Panel) -> Html:
    roles = list(dict.fromkeys(panel.roles))
    title = element("b", "Which side is the query. ")
    if len(roles) == 1:
        return element("p", title, roles[0].sides, class_="roles")
    items = (element("li", f"{role.task}: {role.sides}") for role in roles)
    return element("div", title, element("ul", *items), class_="roles")


def _comparison(study: Study, panel: Panel) -> list[Html | None]:
    if panel.primary is None:
        return [element("p", "No run of this part has a result yet.", class_="muted")]
    base = panel.levels[panel.baseline or 0]
    treatment = panel.treatment
    square = bool(panel.metrics[panel.primary].squares)
    figures = [
        _figure("values", "Each seed (ticks), mean and 95 % interval"),
        _figure("differences", f"Paired difference to {_level(treatment, base)}, 95 % interval"),
        _square_figure(panel) if square else None,
        _figure("effects", "What discarding a norm changes", of_setting=True) if square else None,
        *_along_figures(panel),
        _curves_figure(panel),
        _norms_figure(panel),
    ]
    return [
        _controls(panel),
        element("div", *figures, class_="figures"),
        scrolled(f"{study.name}, results by condition", _results_table(panel)),
        _together(panel),
        _floor(panel),
        _delta_cv(panel, published=study.published),
        _heat_maps(panel),
    ]


def _together(panel: Panel) -> Html | None:
    """The paired differences of several accuracies side by side: they are not equally sensitive."""
    found = [panel.metrics[name] for name in TOGETHER if name in panel.metrics]
    if len(found) < 3:
        return None
    base = _level(panel.treatment, panel.levels[panel.baseline or 0])
    rows = []
    for place, condition in enumerate(panel.conditions):
        differences = [metric.difference[place] for metric in found]
        if all(x is None for x in differences):
            continue
        level = _level(panel.treatment, panel.levels[condition.level])
        cells = []
        for metric, x in zip(found, differences, strict=True):
            mean = number(x and x.value, metric.decimals, signed=True)
            ends = element("span", interval(x, metric.decimals, signed=True), class_="muted")
            cells.append(element("td", f"{mean} ", ends, class_="num"))
        where = panel.contexts[condition.context]
        name = f"{level}, {where}" if where else level
        steps = element("td", _plain_steps(panel.steps[place]), class_="num")
        rows.append(element("tr", element("th", name, scope="row"), *cells, steps))
    head = (f"Minus {base}", *(metric.name for metric in found), "Steps")
    title = "Accuracies side by side, paired differences with 95 % intervals over seeds"
    return element(
        "details",
        element("summary", title),
        scrolled(title, table(head, rows, numbers_from=1)),
    )


def _delta_cv(panel: Panel, *, published: bool) -> Html | None:
    """The ratio of the queries' variation between two cells, and what was published."""
    if not panel.delta_cv:
        return None
    lines = (
        element(
            "li",
            f"{panel.contexts[context]}: " if panel.contexts[context] else None,
            f"{number(found.value, 3)} ",
            element("span", interval(found, 3), class_="muted"),
            f", {seed_count(found.n)}",
        )
        for context, found in panel.delta_cv.items()
    )
    return element(
        "div",
        element("b", "Delta-CV. "),
        "The coefficient of variation of the test queries' norms after dnorm training over that "
        "after dot training, paired by seed.",
        " Published for SciFact: 1.3 (Contriever, which prefers qnorm) and 7.4 (RetroMAE, which "
        "prefers dnorm; 2602.09229v1, table 19)."
        if published
        else None,
        element("ul", *lines),
        class_="roles delta-cv",
    )


def _floor(panel: Panel) -> Html | None:
    """Which conditions learned nothing that their untrained model does not do as well."""
    lines = []
    for condition, found in zip(panel.conditions, panel.at_floor, strict=True):
        if found.runs:
            context = panel.contexts[condition.context]
            level = _level(panel.treatment, panel.levels[condition.level])
            where = f"{level}, {context}" if context else level
            lines.append(element("li", f"{where}: {found.runs} of {found.measured} runs"))
    if not lines:
        return None
    return element(
        "div",
        element("b", "At the floor. "),
        "These runs are not above their own untrained model, scored with the same cell, by two "
        "standard errors over the test queries: differences between them may be those of the "
        "untrained model.",
        element("ul", *lines),
        class_="roles floor",
    )


def _level(treatment: str | None, level: str) -> str:
    return level if treatment in ("cell", "arm") else f"{treatment} {level}"


def _controls(panel: Panel) -> Html:
    metrics = (element("option", each, value=each) for each in panel.metrics)
    contexts = (element("option", each, value=i) for i, each in enumerate(panel.contexts))
    buttons = (
        element(
            "button",
            element("span", class_="key", data_level=level),
            text,
            type="button",
            aria_pressed="true",
            data_level=level,
        )
        for level, text in enumerate(panel.levels)
    )
    return element(
        "div",
        element(
            "label", "Metric ", element("select", *metrics, data_control="metric"), class_="field"
        ),
        element(
            "label",
            "Setting ",
            element("select", *contexts, data_control="context"),
            class_="field",
        )
        if len(panel.contexts) > 1 and _by_setting(panel)
        else None,
        element(
            "div",
            element("span", panel.treatment, class_="muted"),
            *buttons,
            class_="levels",
            role="group",
            aria_label=f"Show or hide {panel.treatment}",
        ),
        class_="controls",
    )


def _by_setting(panel: Panel) -> bool:
    """Whether a chart of the panel shows one setting at a time."""
    square = panel.primary is not None and panel.metrics[panel.primary].squares
    return bool(square or panel.curves or panel.histograms or panel.heat_maps)


def _figure(
    kind: str,
    caption: str,
    *,
    select: Html | None = None,
    group: int | None = None,
    of_setting: bool = False,
) -> Html:
    """A chart's place; `of_setting` names the chosen setting in the caption."""
    setting = element("span", class_="where") if of_setting else None
    return element(
        "figure",
        element("figcaption", element("span", caption, setting), select),
        element("div", class_="chart", data_chart=kind, data_group=group),
    )


def _square_figure(panel: Panel) -> Html:
    """The square of the four corner cells; the numbers are filled in for the chosen metric."""
    places = {panel.corner(level): level for level in range(len(panel.levels))}

    def cell(name: str) -> Html:
        return element(
            "td",
            element("b", panel.levels[places[name]]),
            element("span", class_="value"),
            element("span", class_="range muted"),
            data_square=places[name],
        )

    head = element(
        "tr",
        element("td"),
        element("th", "right norm discarded", scope="col"),
        element("th", "right norm kept", scope="col"),
    )
    rows = (
        element("tr", element("th", title, scope="row"), cell(discarded), cell(kept))
        for title, discarded, kept in (
            ("left norm discarded", "cosine", "qnorm"),
            ("left norm kept", "dnorm", "dot"),
        )
    )
    return element(
        "figure",
        element(
            "figcaption",
            element("span", "The square: which norm is kept", element("span", class_="where")),
        ),
        element("table", element("thead", head), element("tbody", *rows), class_="square"),
        class_="square-figure",
    )


def _along_figures(panel: Panel) -> list[Html]:
    """The metric, its gain and the negatives' variance against a number, per group of contexts."""
    if panel.along is None:
        return []
    factor = panel.along.factor
    kinds = {"along-value": f"Against {factor}, 95 % interval"}
    if not panel.along.of_levels:
        kinds["along-gain"] = f"Gain against {factor}, paired, 95 % interval"
    if "train/negative_variance" in panel.metrics:
        kinds["along-variance"] = f"Variance of negative similarities against {factor}"
    return [
        _figure(kind, f"{title}, {name}" if name else title, group=group)
        for group, (name, _) in enumerate(panel.along.groups)
        for kind, title in kinds.items()
    ]


def _curves_figure(panel: Panel) -> Html | None:
    if not panel.curves:
        return None
    options = (element("option", each, value=each) for each in panel.curves)
    select = element("select", *options, data_control="curve", aria_label="Curve to draw")
    caption = "Over training, mean and 95 % band"
    return _figure("curves", caption, select=select, of_setting=True)


def _norms_figure(panel: Panel) -> Html | None:
    if not panel.histograms:
        return None
    outcomes = list(dict.fromkeys(found.outcome for found in panel.histograms))
    options = (element("option", each, value=each) for each in outcomes)
    select = element("select", *options, data_control="outcome", aria_label="Norms to draw")
    return _figure("norms", "Norms of the test examples", select=select, of_setting=True)


def _results_table(panel: Panel) -> Html:
    """Every condition's numbers for the study's metric; another metric is put in their place."""
    metric = panel.metrics[str(panel.primary)]
    base = _level(panel.treatment, panel.levels[panel.baseline or 0])
    names = [panel.treatment or "", "Mean", "95 % interval", "Seeds", "Steps", f"Minus {base}"]
    crossed = next((each for each in panel.metrics.values() if each.crossed is not None), None)
    names += ["95 % interval", *(["Seeds and examples"] if crossed else [])]
    names += ["Effect size", "Seen from"]
    bodies = []
    for context, title in enumerate(panel.contexts):
        rows = [
            _result_row(panel, metric, place, crossed=crossed is not None)
            for place, condition in enumerate(panel.conditions)
            if condition.context == context
        ]
        header = element("th", title, colspan=len(names), scope="rowgroup")
        bodies.append(element("tbody", element("tr", header) if title else None, *rows))
    return element(
        "table",
        element(
            "caption",
            element("b", metric.name, class_="metric-name"),
            ". Means over seeds with t-intervals; differences are paired by seed. Effect size: "
            "mean difference over its standard deviation (Hedges' correction). Seen from: the "
            "smallest true difference that these seeds show with 80 % power. ",
            _crossed_note(crossed) if crossed else None,
            "All columns are in runs.csv.",
        ),
        element(
            "thead",
            element(
                "tr",
                *(
                    element("th", title, scope="col", class_="num" if place else None)
                    for place, title in enumerate(names)
                ),
            ),
        ),
        *bodies,
        class_="results",
    )


def _crossed_note(metric: Metric) -> str:
    found = [each for each in metric.crossed or [] if each]
    examples = f"{found[0].examples:,}"
    return (
        f"Seeds and examples: the difference of {metric.name} with both drawn anew, so that the "
        f"interval also covers other test examples of this kind than these {examples}. "
    )


def _result_row(panel: Panel, metric: Metric, place: int, *, crossed: bool) -> Html:
    level = panel.conditions[place].level
    found, difference = metric.summary[place], metric.difference[place]
    decimals = metric.decimals
    seeds = f"{found.n}" + (f" ({metric.missing[place]} missing)" if metric.missing[place] else "")
    cells = (
        ("mean", number(found.value, decimals)),
        ("interval", interval(found, decimals)),
        ("seeds", seeds),
        ("steps", _plain_steps(panel.steps[place])),
        ("difference", number(difference and difference.value, decimals, signed=True)),
        ("difference-interval", interval(difference, decimals, signed=True)),
        *([("crossed", _crossed_text(metric, place))] if crossed else []),
        ("effect", number(metric.effect_size[place], 2, signed=True)),
        ("smallest", number(metric.smallest[place], decimals)),
    )
    key = element("span", class_="key", data_level=level)
    return element(
        "tr",
        element("th", key, panel.levels[level], scope="row"),
        *(element("td", text, class_=f"num {style}") for style, text in cells),
        data_condition=place,
    )


def _crossed_text(metric: Metric, place: int) -> str:
    found = metric.crossed[place] if metric.crossed is not None else None
    ends = Estimate(found.value, found.low, found.high, found.n) if found else None
    return interval(ends, metric.decimals, signed=True)


def _metrics_table(panel: Panel) -> Html:
    """All metrics of a part in which nothing is compared; intervals if there are seeds for any."""
    found = {name: metric.summary[0] for name, metric in panel.metrics.items()}
    if not found:
        return element("p", "No run of this part has a result yet.", class_="muted")
    many = any(each.n > 1 for each in found.values())
    rows = [
        element(
            "tr",
            element("th", name, scope="row"),
            element("td", plain_number(each.value), class_="num"),
            element("td", interval(each, panel.metrics[name].decimals), class_="num")
            if many
            else None,
            element("td", str(each.n), class_="num") if many else None,
        )
        for name, each in found.items()
    ]
    head = ("Metric", "Mean", "95 % interval", "Seeds") if many else ("Metric", "Value")
    return element(
        "details",
        element("summary", f"All numbers ({len(rows)})"),
        scrolled("All numbers", table(head, rows, numbers_from=1)),
    )


def _heat_maps(panel: Panel) -> Html | None:
    if not panel.heat_maps:
        return None
    return element(
        "div",
        element("h4", "Trained with one cell, scored with another"),
        element("div", *(_heat_map(panel, found) for found in panel.heat_maps), class_="maps"),
    )


def _heat_map(panel: Panel, found: HeatMap) -> Html:
    values = [x.value for row in found.rows.values() for x in row if math.isfinite(x.value)]
    low, high = min(values), max(values)
    decimals = 3 if max(abs(low), abs(high)) < 10 else 1
    head = element(
        "tr",
        element("th", "trained with", scope="col"),
        *(element("th", " = ".join(group), scope="col", class_="num") for group in found.columns),
    )

    def cell(x: Estimate) -> Html:
        share = (x.value - low) / (high - low) if high > low and math.isfinite(x.value) else 0.0
        title = f"95 % interval {interval(x, decimals)}, {seed_count(x.n)}"
        return element(
            "td",
            number(x.value, decimals),
            class_="num heat",
            style=f"--share: {share:.3f}",
            title=title,
        )

    rows = (
        element("tr", element("th", panel.levels[level], scope="row"), *map(cell, row))
        for level, row in sorted(found.rows.items())
    )
    note = (
        f"Columns joined by = tie by construction: here {found.query} is the query, and a query's "
        "own norm cannot change its ranking."
        if found.query
        else "No column ties by construction."
    )
    context = panel.contexts[found.context]
    title = f"{found.metric}, {context}" if context else found.metric
    members = zip(panel.conditions, panel.steps, strict=True)
    steps = steps_text(all_steps(x for c, x in members if c.context == found.context))
    after = f", after {steps}" if steps else ""
    cells = element(
        "table",
        element("caption", element("b", title), f", by the cell in scoring{after}. {note}"),
        element("thead", head),
        element("tbody", *rows),
        class_="heat-map",
    )
    return element("div", scrolled(title, cells), data_context=found.context, class_="map")


def _failed(study: Study) -> Html | None:
    if not study.unfinished:
        return element("p", "No run failed.", class_="muted")
    head = ("Run", "Status", "Seed", "Settings", "Reason")
    rows = [
        element(
            "tr",
            element("th", element("code", each.run), scope="row"),
            *(element("td", x) for x in (each.status, each.seed, each.settings, each.reason)),
        )
        for each in study.unfinished
    ]
    return element(
        "details",
        element("summary", f"Runs without a result ({len(rows)})"),
        scrolled("Runs without a result", table(head, rows)),
        open=True,
        class_="failed",
    )


def _tuning(study: Study) -> Html | None:
    if not study.tuning:
        return None
    rows = []
    for choice in study.tuning:
        targets = "; ".join(_settings(one) for one in choice.get("for", []))
        for candidate in choice.get("candidates", []):
            chosen = candidate.get("settings") == choice.get("chosen")
            mean = candidate.get("mean")
            rows.append(
                element(
                    "tr",
                    element("td", targets),
                    element("td", _settings(candidate.get("settings", {}))),
                    element(
                        "td", number(mean, 4) if isinstance(mean, float) else "–", class_="num"
                    ),
                    element("td", "chosen" if chosen else ""),
                )
            )
    head = ("For", "Candidate", "Mean on validation data", "")
    return element(
        "details",
        element("summary", "Settings tuned on validation data"),
        scrolled("Tuning", table(head, rows)),
    )


def _settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())


def _provenance(study: Study) -> Html:
    rows = [
        element("div", element("dt", name), element("dd", "; ".join(values)))
        for name, values in study.provenance.items()
    ]
    note = None
    if "Python" not in study.provenance:
        note = element(
            "p",
            "The table of this study's runs names no versions: an older offsphere wrote it. "
            "The study's command, run again beside the run folders, adds them.",
            class_="muted",
        )
    return element(
        "details",
        element("summary", "Provenance"),
        element("dl", *rows, class_="provenance"),
        note,
    )
