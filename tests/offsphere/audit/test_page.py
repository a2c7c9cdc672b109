"""The page: whole by itself, every name escaped, every chart in words; on a phone too."""

from __future__ import annotations

import importlib.util
import shutil
from html.parser import HTMLParser

import pytest
from planted_vectors import HOW, audited, junk_captions

from offsphere.audit.output import write_report
from offsphere.audit.page import page

HOSTILE = "<img src=x onerror=alert(1)>&\"'"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
LONG = "a_name_of_a_run_that_goes_on_and_on_" * 3
BACKGROUND = "getComputedStyle(document.body).backgroundColor"
# What reaches beyond the window, and is not inside a box that scrolls by itself.
TOO_WIDE = """() => [...document.body.querySelectorAll("*")]
  .filter((node) => !node.closest(".scroll table") && !node.closest("svg"))
  .filter((node) => node.getBoundingClientRect().right > window.innerWidth + 0.5)
  .map((node) => node.tagName + " " + node.textContent.slice(0, 60))"""


class Page(HTMLParser):
    """Tags that are open, addresses that a browser would fetch, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.fetched, self.tags, self.labels, self.text = [], [], [], [], ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        named = dict(attrs)
        for name in ("src", "href", "xlink:href", "data"):
            if not named.get(name, "#").startswith("#"):
                self.fetched.append(named[name])
        if named.get("role") == "img" and tag == "div":
            self.labels.append(named["aria-label"])
        if tag not in ("meta", "link", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_data(self, data):
        self.text += data


def test_the_page_needs_nothing_else_and_escapes_names():
    report = audited(**junk_captions(images=120), data=HOSTILE)
    text = page(report)
    found = Page(text)
    assert found.open == []
    assert found.fetched == []
    assert not {"link", "img", "iframe"} & set(found.tags)
    assert "default-src &#39;none&#39;" in text
    assert "@import" not in text
    assert "url(http" not in text
    assert HOSTILE in found.text
    assert 'name="viewport"' in text
    assert len(found.labels) == 5
    assert all(found.labels)
    gain = report.table.get(HOSTILE, "image to text", "dot", "i2t_r1_minus_cosine")
    assert f"qnorm = dot {100 * gain.value:+.1f} points" in found.labels[3]
    for advice in report.advice:
        for said in advice.statements:
            assert said.text in found.text


@pytest.mark.skipif(
    CHROMIUM is None or importlib.util.find_spec("playwright") is None,
    reason="needs Chromium (apt-get install chromium) and playwright (pip install -e '.[test]')",
)
def test_the_page_does_not_scroll_sideways(tmp_path):
    from playwright.sync_api import sync_playwright

    how = HOW._replace(resamples=20)
    write_report(tmp_path, audited(**junk_captions(images=40), how=how, data=LONG))
    with sync_playwright() as browsers:
        browser = browsers.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for width in (320, 390, 1280):
            shown = browser.new_page(viewport={"width": width, "height": 844})
            errors: list[str] = []
            shown.on("pageerror", lambda error, errors=errors: errors.append(str(error)))
            shown.goto((tmp_path / "audit.html").as_uri())
            before = shown.evaluate(BACKGROUND)
            shown.click("#theme")
            assert shown.evaluate(BACKGROUND) != before
            assert errors == []
            assert shown.evaluate(TOO_WIDE) == []
            assert shown.evaluate("document.documentElement.scrollWidth") == width
            first = shown.locator(".headline").bounding_box()
            assert first is not None
            assert first["y"] < 844
        browser.close()
