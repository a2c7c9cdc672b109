"""The page in a real headless Chromium: its controls by mouse and keyboard, widths, themes.

Screenshots go to the folder OFFSPHERE_SCREENSHOTS, or to a temporary one.
"""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from offsphere.analysis.digest import read_study
from offsphere.analysis.markup import interval, number
from offsphere.analysis.report import write_report
from offsphere.estimate import Estimate

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
        page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
        page.on("request", lambda r: None if r.url == address else errors.append(r.url))
        page.goto(address)
        return page

    yield open_
    for context in contexts:
        context.close()
    assert errors == []


def panel_of(page: Page, name: str = "symmetry.0") -> Locator:
    return page.locator(f'[data-panel="{name}"]')


def cell_texts(panel: Locator, kind: str) -> list[str]:
    return panel.locator(f"tr[data-condition] .{kind}").all_inner_texts()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", list(WIDTHS))
def test_it_fits_its_window_and_can_be_read(open_page, width, scheme, tmp_path):
    page = open_page(width, scheme)
    folder = Path(os.environ.get("OFFSPHERE_SCREENSHOTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    shot = folder / f"{width}-{scheme}.png"
    page.screenshot(path=shot, full_page=True)
    assert shot.stat().st_size > 50_000
    for detail in page.locator("main details").all():
        detail.evaluate("node => { node.open = true; }")
    assert page.evaluate("document.documentElement.scrollWidth") == WIDTHS[width][0]
    contrasts = page.evaluate(CONTRASTS)
    assert len(contrasts) > 500
    assert [found for found in contrasts if found[0] < 4.5] == []


def test_choosing_a_metric_puts_its_numbers_everywhere(open_page, results):
    page = open_page()
    panel = panel_of(page)
    metrics = read_study(results / "symmetry").panels[0].metrics
    label = panel.locator('[data-chart="values"] svg').get_attribute
    first = label("aria-label")
    assert first is not None
    assert first.startswith("test/ndcg10: cosine, task query 0.5")
    for name in (*list(metrics)[1:], "test/ndcg10"):
        panel.locator('[data-control="metric"]').select_option(name)
        metric = metrics[name]
        d = metric.decimals
        assert panel.locator(".metric-name").inner_text() == name
        assert cell_texts(panel, "mean") == [number(x.value, d) for x in metric.summary]
        assert cell_texts(panel, "interval") == [interval(x, d) for x in metric.summary]
        signed = [number(x and x.value, d, signed=True) for x in metric.difference]
        assert cell_texts(panel, "difference") == signed
        ends = [interval(x, d, signed=True) for x in metric.difference]
        assert cell_texts(panel, "difference-interval") == ends
        none = Estimate(math.nan, math.nan, math.nan, 0)
        both = [
            Estimate(x.value, x.low, x.high, x.n) if x else none
            for x in metric.crossed or [None] * len(metric.summary)
        ]
        assert cell_texts(panel, "crossed") == [interval(x, d, signed=True) for x in both]
        sizes = [number(x, 2, signed=True) for x in metric.effect_size]
        assert cell_texts(panel, "effect") == sizes
        assert cell_texts(panel, "smallest") == [number(x, d) for x in metric.smallest]
        assert str(label("aria-label")).startswith(f"{name}: ")
        corners = [number(metric.summary[i].value, d) for i in (0, 1, 2, 3)]
        assert panel.locator(".square .value").all_inner_texts() == corners
    assert label("aria-label") == first


def test_a_cell_can_be_hidden_and_shown_by_keyboard(open_page):
    page = open_page()
    panel = panel_of(page)
    button = panel.get_by_role("button", name="dot", exact=True)
    marks = panel.locator('[data-chart="values"] polygon, [data-chart="values"] circle:not(.halo)')
    rows = panel.locator("tr[data-condition]:visible")
    lines = panel.locator('[data-chart="curves"] path')
    assert (marks.count(), rows.count(), lines.count()) == (8, 8, 8)
    button.focus()
    page.keyboard.press("Space")
    assert button.get_attribute("aria-pressed") == "false"
    assert (marks.count(), rows.count(), lines.count()) == (6, 6, 6)
    assert "dot" not in str(panel.locator('[data-chart="norms"] svg').get_attribute("aria-label"))
    page.keyboard.press("Enter")
    assert button.get_attribute("aria-pressed") == "true"
    assert (marks.count(), rows.count(), lines.count()) == (8, 8, 8)


def test_the_last_cell_stays(open_page):
    page = open_page()
    panel = panel_of(page)
    for name in ("cosine", "qnorm", "dnorm", "dot"):
        panel.get_by_role("button", name=name, exact=True).click()
    assert panel.locator('button[aria-pressed="true"]').all_inner_texts() == ["dot"]


def test_choosing_a_setting_changes_the_square_and_the_map(open_page, results):
    page = open_page()
    panel = panel_of(page)
    metric = read_study(results / "symmetry").panels[0].metrics["test/ndcg10"]
    panel.locator('[data-control="context"]').select_option(label="task halves")
    shown = panel.locator(".square .value").all_inner_texts()
    assert shown == [number(metric.summary[4 + i].value, metric.decimals) for i in range(4)]
    assert panel.locator(".map:visible caption b").all_inner_texts() == ["test/ndcg10, task halves"]
    effect = metric.squares[1].interaction
    spoken = panel.locator('[data-chart="effects"] svg').get_attribute("aria-label")
    assert f"interaction: {number(effect.value, metric.decimals, signed=True)}" in str(spoken)


def test_values_by_pointer_and_by_arrow_keys(open_page, results):
    page = open_page()
    panel = panel_of(page)
    metric = read_study(results / "symmetry").panels[0].metrics["test/ndcg10"]
    texts = [
        f"{name}, task query\n{number(x.value, metric.decimals)} {interval(x, metric.decimals)}"
        for name, x in zip(("cosine", "qnorm", "dnorm", "dot"), metric.summary, strict=False)
    ]
    tip = page.locator("#tip")
    panel.locator('[data-chart="values"] circle:not(.halo)').first.hover(force=True)
    assert tip.inner_text() == f"{texts[0]}\n4 seeds"
    page.mouse.move(0, 0)
    assert tip.is_hidden()
    panel.locator('[data-chart="values"] svg').focus()
    for text in texts:
        page.keyboard.press("ArrowRight")
        assert tip.inner_text() == f"{text}\n4 seeds"
    page.keyboard.press("ArrowLeft")
    assert tip.inner_text().startswith("dnorm, task query")
    page.keyboard.press("Escape")
    assert tip.is_hidden()


def test_batch_size_against_gain_and_variance(open_page, results):
    page = open_page()
    panel = panel_of(page, "small_batch.0")
    metrics = read_study(results / "small_batch").panels[0].metrics
    gains = [x for x in metrics["test/probe"].difference if x is not None]
    decimals = metrics["test/probe"].decimals
    spoken = str(panel.locator('[data-chart="along-gain"] svg').get_attribute("aria-label"))
    for batch, gain in zip((32, 128, 512), gains, strict=True):
        assert f"{batch} {number(gain.value, decimals, signed=True)}" in spoken
    variance = panel.locator('[data-chart="along-variance"]')
    spoken = str(variance.locator("svg").get_attribute("aria-label"))
    assert "variance_weight 0: 32 0.1500, 128 0.1500, 512 0.1500" in spoken
    assert "table 1): 32 0.1649, 64 0.1505" in spoken
    assert "2506.09781v2 table 1" in variance.locator(".note").inner_text()


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


def test_claims_can_be_chosen_by_verdict(open_page):
    page = open_page()
    rows = page.locator("tr[data-verdict]")
    total = rows.count()
    page.locator("#verdicts").select_option("not run")
    shown = [row for row in rows.all() if row.is_visible()]
    assert 0 < len(shown) < total
    assert {row.get_attribute("data-verdict") for row in shown} == {"not run"}
    page.locator("#verdicts").select_option("")
    hidden = page.evaluate("document.querySelectorAll('tr[data-verdict][hidden]').length")
    assert hidden == 0


def test_hostile_texts_are_shown_and_do_nothing(open_page):
    page = open_page()
    panel = panel_of(page, "hostile.0")
    assert "</script><script>window.hacked = 1</script>" in panel.inner_text()
    assert page.evaluate("window.hacked") is None
    assert page.locator("img:not([src^='data:image/'])").count() == 0


def test_a_claim_leads_to_its_figure_and_back(open_page):
    page = open_page(reduced_motion="reduce")
    claim = page.locator("#claim-mini-batch-variance")
    claim.evaluate("row => { row.closest('details').open = true; }")
    claim.get_by_role("link", name="figure:").click()
    figure = page.locator('[id="figure-theory/optima/band"]')
    assert 0 <= figure.bounding_box()["y"] < 900
    image = figure.get_by_role("img")
    assert image.evaluate("img => [img.complete, img.naturalWidth]") == [True, 770]
    assert str(image.get_attribute("alt")).startswith("The variance of negative similarities")
    figure.get_by_role("link", name="mini-batch-variance").click()
    assert 0 <= claim.bounding_box()["y"] < 900


def test_a_figure_stays_readable_on_a_phone(open_page):
    figure = open_page("phone", "dark").locator('[id="figure-theory/optima/band"]')
    assert figure.get_by_role("img").bounding_box()["width"] == 640
    region = figure.get_by_role("region")
    assert region.bounding_box()["width"] <= 390
    assert region.evaluate("node => getComputedStyle(node).backgroundColor") == "rgb(255, 255, 255)"


def test_everything_has_a_name_and_a_focus_ring(open_page):
    page = open_page(reduced_motion="reduce")
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll("main svg")].filter((svg) =>
             !svg.ariaLabel && svg.getAttribute("aria-hidden") !== "true").length"""
    )
    assert unnamed == 0
    for control in page.locator("select, button").all():
        labels = "[...(c.labels || [])].map(l => l.textContent).join('')"
        name = control.evaluate(f"c => c.ariaLabel || {labels} || c.textContent")
        assert name.strip()
    without_head = "table => !table.querySelector('th[scope]')"
    assert not any(table.evaluate(without_head) for table in page.locator("table").all())
    for _ in range(6):
        page.keyboard.press("Tab")
        ring = page.evaluate("getComputedStyle(document.activeElement).outlineWidth")
        assert ring == "2px"
    motion = page.evaluate("getComputedStyle(document.documentElement).scrollBehavior")
    assert motion == "auto"
