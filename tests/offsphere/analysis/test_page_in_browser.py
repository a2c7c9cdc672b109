"""The page in a real headless Chromium: its controls by mouse and keyboard, widths, themes.

Screenshots go to the folder OFFSPHERE_SCREENSHOTS, or to a temporary one.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from offsphere.analysis.digest import read_study
from offsphere.analysis.page_tables import results_table
from offsphere.analysis.report import write_report

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
REASON = "no Chromium is installed (apt-get install chromium)"
if CHROMIUM and importlib.util.find_spec("playwright") is None:
    REASON = "playwright is not installed (pip install -e '.[test]')"
pytestmark = pytest.mark.skipif(
    CHROMIUM is None or importlib.util.find_spec("playwright") is None, reason=REASON
)
WIDTHS = {"desktop": (1280, 900), "phone": (390, 844)}
# For each visible text: its contrast with what is painted behind it, as WCAG defines it.
CONTRASTS = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = ([r, g, b]) => [r, g, b]
    .map((x) => x / 255)
    .map((x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4))
    .reduce((sum, x, i) => sum + x * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const colour = rgba(getComputedStyle(at).backgroundColor);
      if (colour[3] === 255) return colour;
    }
    return [255, 255, 255, 255];
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || !node.checkVisibility()) continue;
    if (["SCRIPT", "TITLE", "title"].includes(node.tagName)) continue;
    const style = getComputedStyle(node);
    const [a, b] = [light(rgba(node.namespaceURI.endsWith("svg") ? style.fill : style.color)),
      light(behind(node))].sort((x, y) => y - x);
    found.push([(a + 0.05) / (b + 0.05), walker.currentNode.textContent.trim()]);
  }
  return found;
}"""

LONG_TASKS = """window.longTasks = [];
new PerformanceObserver((list) => {
  for (const { startTime, duration } of list.getEntries()) longTasks.push([startTime, duration]);
}).observe({ type: "longtask", buffered: true });"""
MARKS = '[role="graphics-symbol"][aria-label]'


@pytest.fixture(scope="module")
def address(results: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("browser") / "report.html"
    write_report(results=results, out=out, date="2026-01-02", figures=False)
    return out.as_uri()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        # Chromium's own sandbox needs rights that a container may not have; the page is our own.
        options: dict[str, Any] = {"executable_path": CHROMIUM, "args": ["--no-sandbox"]}
        browser = driver.chromium.launch(**options)
        yield browser
        browser.close()


Open = Callable[..., "Page"]


@pytest.fixture
def open_page(browser: Browser, address: str) -> Iterator[Open]:
    """Opens the page at a width and in a theme; at the end it must have had no error."""
    contexts, errors = [], []

    def open_(width: str = "desktop", scheme: str = "light", **options: Any) -> Page:
        size = dict(zip(("width", "height"), WIDTHS[width], strict=True))
        context = browser.new_context(viewport=size, color_scheme=scheme, **options)  # pyright: ignore
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda said: errors.append(said.text) if said.type != "log" else None)
        page.on("request", lambda r: None if r.url == address else errors.append(r.url))
        page.add_init_script(LONG_TASKS)
        page.goto(address)
        return page

    yield open_
    for context in contexts:
        context.close()
    assert errors == []


def opened(page: Page, name: str = "symmetry") -> Locator:
    """A study's first panel, unfolded, its charts drawn."""
    page.evaluate("name => { document.getElementById(name).open = true; }", f"study-{name}")
    panel = page.locator(f'[data-panel="{name}.0"]')
    for chart in panel.locator("[data-chart]").all():
        chart.scroll_into_view_if_needed()
        page.wait_for_function("chart => chart.dataset.drawn", arg=chart.element_handle())
    return panel


def marks(panel: Locator, kind: str) -> list[str]:
    """What the marks of a chart say, in order."""
    found = panel.locator(f'[data-chart="{kind}"] {MARKS}').all()
    return [str(mark.get_attribute("aria-label")) for mark in found]


def settled(page: Page, condition: str, *values: Any) -> None:
    """Wait until the charts have been drawn anew."""
    page.wait_for_function(condition, arg=list(values))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", list(WIDTHS))
def test_it_fits_its_window_and_can_be_read(open_page, width, scheme, tmp_path):
    page = open_page(width, scheme)
    folder = Path(os.environ.get("OFFSPHERE_SCREENSHOTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("symmetry", "small_batch"):
        opened(page, name)
    page.evaluate("document.querySelectorAll('details').forEach((node) => { node.open = true; })")
    shot = folder / f"{width}-{scheme}.png"
    page.screenshot(path=shot, full_page=True)
    assert shot.stat().st_size > 50_000
    assert page.evaluate("document.documentElement.scrollWidth") == WIDTHS[width][0]
    contrasts = page.evaluate(CONTRASTS)
    assert len(contrasts) > 500
    assert [found for found in contrasts if found[0] < 4.5] == []


def test_nothing_is_drawn_or_unpacked_before_it_is_looked_at(open_page):
    page = open_page("phone")
    page.wait_for_timeout(500)
    assert page.locator("[data-drawn]").count() == 0
    assert page.evaluate("typeof window.vegaEmbed") == "undefined"
    panel = opened(page)
    assert page.evaluate("typeof window.vegaEmbed") == "function"
    assert panel.locator("[data-drawn]").count() == panel.locator("[data-chart]").count() == 7
    assert page.locator('[data-panel="small_batch.0"] [data-drawn]').count() == 0


def test_the_policy_lets_no_string_and_no_foreign_script_run(browser, address):
    page = browser.new_page()
    page.goto(address)
    page.evaluate(
        """() => {
          setTimeout("window.evaluated = 1");
          const script = document.createElement("script");
          script.textContent = "window.foreign = 1";
          document.head.append(script);
        }"""
    )
    page.wait_for_timeout(200)
    assert page.evaluate("[window.evaluated, window.foreign]") == [None, None]
    page.close()


def test_choosing_a_metric_puts_its_numbers_everywhere(open_page, results):
    page = open_page()
    panel = opened(page)
    found = read_study(results / "symmetry").panels[0]
    first = marks(panel, "values")
    assert first[0].startswith("cosine, task query\n51.")
    select = panel.locator('[data-signal="metric"]')
    assert select.locator("option").count() == len(found.metrics)
    for name in (*list(found.metrics)[1:], "test/ndcg10"):
        select.select_option(name)
        table = results_table(found, name)
        title = panel.locator(".metric-name")
        same = "([node, text]) => node.textContent === text"
        settled(page, same, title.element_handle(), table.name)
        rows = panel.locator(".results tr[data-level]").all()
        shown = [row.locator("td").all_inner_texts() for row in rows]
        assert shown == [row.cells[1:] for row in table.rows if row.level]
    settled(
        page,
        "([text]) => document.querySelector('[data-chart=values] ' + "
        "'[role=graphics-symbol][aria-label]').ariaLabel === text",
        first[0],
    )
    assert marks(panel, "values") == first


def test_a_cell_can_be_hidden_and_shown_by_keyboard(open_page):
    page = open_page()
    panel = opened(page)
    button = panel.get_by_role("button", name="dot", exact=True)
    rows = panel.locator(".results tr[data-level]:visible")
    shown = f'[data-panel="symmetry.0"] [data-chart=values] {MARKS}'
    count = f"([n]) => document.querySelectorAll('{shown}').length === n"
    settled(page, count, 8)
    assert rows.count() == 8
    button.focus()
    page.keyboard.press("Space")
    assert button.get_attribute("aria-pressed") == "false"
    settled(page, count, 6)
    assert rows.count() == 6
    assert not any(text.startswith("dot") for text in marks(panel, "values"))
    page.keyboard.press("Enter")
    assert button.get_attribute("aria-pressed") == "true"
    settled(page, count, 8)
    assert rows.count() == 8


def test_the_last_cell_stays(open_page):
    page = open_page()
    panel = opened(page)
    for name in ("cosine", "qnorm", "dnorm", "dot"):
        panel.get_by_role("button", name=name, exact=True).click()
    assert panel.locator('button[aria-pressed="true"]').all_inner_texts() == ["dot"]


def test_choosing_a_setting_changes_the_square_and_the_map(open_page, results):
    page = open_page()
    panel = opened(page)
    metric = read_study(results / "symmetry").panels[0].metrics["test/ndcg10"]
    panel.locator('[data-signal="setting"]').select_option(label="task halves")
    for kind, first in (("square", "cosine, task halves"), ("scored", "trained with cosine")):
        settled(
            page,
            "([kind]) => document.querySelector(`[data-chart=${kind}] [role=graphics-symbol]`)"
            ".ariaLabel.includes('task halves')",
            kind,
        )
        assert marks(panel, kind)[0].startswith(first)
    means = [float(text.split("\n")[1].split()[0]) for text in marks(panel, "square")]
    assert means == [float(f"{100 * x.value:.4g}") for x in metric.summary[4:]]
    effects = [text.split("\n") for text in marks(panel, "effects")]
    assert effects[2][0] == "interaction, task halves"
    shown = effects[2][1].split()[0].replace("−", "-")
    assert float(shown) == float(f"{100 * metric.squares[1].interaction.value:.4g}")


def test_values_by_pointer_and_by_arrow_keys(open_page):
    page = open_page()
    panel = opened(page)
    texts = marks(panel, "values")
    tip = page.locator("#tip")
    chart = panel.locator('[data-chart="values"]')
    chart.locator(MARKS).first.hover(force=True)
    assert tip.inner_text() == texts[0]
    page.mouse.move(0, 0)
    assert tip.is_hidden()
    chart.focus()
    for text in texts:
        page.keyboard.press("ArrowRight")
        assert tip.inner_text() == text
    page.keyboard.press("ArrowRight")
    assert tip.inner_text() == texts[0]
    page.keyboard.press("ArrowLeft")
    assert tip.inner_text() == texts[-1]
    page.keyboard.press("Escape")
    assert tip.is_hidden()
    assert texts[0].endswith("\n4 seeds")


def test_batch_size_against_gain_and_variance(open_page, results):
    page = open_page()
    panel = opened(page, "small_batch")
    metrics = read_study(results / "small_batch").panels[0].metrics
    gains = [100 * x.value for x in metrics["test/probe"].difference if x is not None]
    said = [text.split("\n") for text in marks(panel, "along-gain")]
    assert [line[0].split(",")[1] for line in said] == [f" batch size {n}" for n in (32, 128, 512)]
    shown = [float(line[1].split()[0].replace("−", "-")) for line in said]
    assert shown == pytest.approx(gains, rel=5e-3)
    variance = marks(panel, "along-variance")
    assert variance[0].startswith("0, batch size 32")
    assert "\n0.1500" in variance[0]
    published = [text for text in variance if "2506.09781v2 table 1" in text]
    assert any(text.endswith("32: 0.1649") for text in published)


def test_the_theme_can_be_changed_and_is_kept(open_page):
    page = open_page(scheme="light")
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    button = page.locator("#theme")
    assert button.inner_text() == "Dark theme"
    button.click()
    assert (button.inner_text(), button.get_attribute("aria-pressed")) == ("Light theme", "true")
    dark = page.evaluate(background)
    assert (light, dark) == ("rgb(252, 252, 250)", "rgb(20, 23, 26)")
    page.reload()
    assert page.evaluate(background) == dark
    button.click()
    assert page.evaluate(background) == light


def test_a_chart_follows_the_theme_without_being_drawn_anew(open_page):
    page = open_page(scheme="light")
    mark = opened(page).locator(f'[data-chart="values"] {MARKS}').first
    fill = "node => getComputedStyle(node).fill"
    assert mark.evaluate(fill) == "rgb(0, 103, 165)"
    handle = mark.element_handle()
    page.locator("#theme").click()
    assert handle.evaluate(fill) == "rgb(92, 179, 232)"


def test_claims_can_be_chosen_by_verdict_seeds_and_steps(open_page):
    page = open_page()
    rows = page.locator("tr[data-claim]")
    total = rows.count()
    hidden = "document.querySelectorAll('tr[data-claim][hidden]').length"
    page.locator("[data-equal=verdict]").select_option("not run")
    kept = [row for row in rows.all() if row.get_attribute("hidden") is None]
    assert 0 < len(kept) < total
    assert {row.get_attribute("data-verdict") for row in kept} == {"not run"}
    page.locator("[data-equal=verdict]").select_option("")
    assert page.evaluate(hidden) == 0
    for name in ("seeds", "steps"):
        select = page.locator(f"[data-least={name}]")
        least = str(select.locator("option").nth(1).get_attribute("value"))
        select.select_option(least)
        few = [
            row for row in rows.all() if int(str(row.get_attribute(f"data-{name}"))) < int(least)
        ]
        assert page.evaluate(hidden) == len(few) > 0
        select.select_option("")
        assert page.evaluate(hidden) == 0


def test_hostile_texts_are_shown_and_do_nothing(open_page):
    page = open_page()
    panel = opened(page, "hostile")
    assert "</script><script>window.hacked = 1</script>" in panel.inner_text()
    assert page.evaluate("window.hacked") is None
    assert page.locator("img:not([src^='data:image/'])").count() == 0


def test_a_claim_leads_to_its_figure_and_back(open_page):
    page = open_page(reduced_motion="reduce")
    claim = page.locator("#claim-mini-batch-variance")
    claim.evaluate("row => { row.closest('details').open = true; }")
    claim.locator("summary").click()
    claim.get_by_role("link", name="figure:").click()
    figure = page.locator('[id="figure-theory/optima/band"]')
    page.wait_for_timeout(300)
    assert 0 <= figure.bounding_box()["y"] < 900
    image = figure.get_by_role("img")
    image.evaluate("img => img.decode()")
    assert image.evaluate("img => [img.complete, img.naturalWidth]") == [True, 770]
    assert str(image.get_attribute("alt")).startswith("The variance of negative similarities")
    figure.get_by_role("link", name="mini-batch-variance").click()
    page.wait_for_timeout(300)
    assert 0 <= claim.bounding_box()["y"] < 900


def test_a_figure_stays_readable_on_a_phone(open_page):
    page = open_page("phone", "dark")
    page.evaluate("document.getElementById('study-theory').open = true")
    figure = page.locator('[id="figure-theory/optima/band"]')
    assert figure.get_by_role("img").bounding_box()["width"] == 640
    region = figure.get_by_role("region")
    assert region.bounding_box()["width"] <= 390
    assert region.evaluate("node => getComputedStyle(node).backgroundColor") == "rgb(255, 255, 255)"


def test_everything_has_a_name_and_a_focus_ring(open_page):
    page = open_page(reduced_motion="reduce")
    opened(page)
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll("main svg")].filter((svg) => {
             const named = svg.closest("[aria-label], [aria-hidden=true]");
             return !named;
           }).length"""
    )
    assert unnamed == 0
    for control in page.locator("select, button").all():
        labels = "[...(c.labels || [])].map(l => l.textContent).join('')"
        name = control.evaluate(f"c => c.ariaLabel || {labels} || c.textContent")
        assert name.strip()
    without_head = "table => !table.querySelector('th[scope]')"
    assert not any(table.evaluate(without_head) for table in page.locator("table").all())
    page.evaluate("window.scrollTo(0, 0)")
    page.keyboard.press("Tab")
    for _ in range(6):
        page.keyboard.press("Tab")
        ring = page.evaluate("getComputedStyle(document.activeElement).outlineWidth")
        assert ring == "2px"
    motion = page.evaluate("getComputedStyle(document.documentElement).scrollBehavior")
    assert motion == "auto"
