"""The audit's page on a phone, in a real headless Chromium."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from crossmodal import audit
from crossmodal.audit import Config

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None or importlib.util.find_spec("playwright") is None,
    reason="needs Chromium (apt-get install chromium) and playwright (pip install -e '.[test]')",
)
LONG = "a_name_of_a_run_that_goes_on_and_on_" * 3
# What reaches beyond the window, and is not inside a box that scrolls by itself.
TOO_WIDE = """() => [...document.body.querySelectorAll("*")]
  .filter((node) => !node.closest(".wide table") && !node.closest("svg"))
  .filter((node) => node.getBoundingClientRect().right > window.innerWidth + 0.5)
  .map((node) => node.tagName + " " + node.textContent.slice(0, 60))"""


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    """The page of an audit with retrieval and classes, under a long name."""
    folder = tmp_path_factory.mktemp("phone")
    random = torch.Generator().manual_seed(0)
    images = torch.randn(40, 8, generator=random)
    texts = images + 0.5 * torch.randn(40, 8, generator=random)
    tensors = {"images": images, "texts": texts, "owner": torch.arange(40)}
    tensors |= {"labels": torch.arange(40) % 4, "class_texts": texts[:4].clone()}
    save_file(tensors, folder / f"{LONG}.safetensors")
    file = str(folder / f"{LONG}.safetensors")
    report, scores = audit.measure(Config(embeddings=file, out=str(folder), resamples=20))
    return audit.write(Config(embeddings=file, out=str(folder), resamples=20), report, scores)


@pytest.mark.parametrize("width", [320, 390, 1280])
def test_the_page_does_not_scroll_sideways(page, width):
    from playwright.sync_api import sync_playwright

    with sync_playwright() as browsers:
        browser = browsers.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        shown = browser.new_page(viewport={"width": width, "height": 844})
        shown.goto((page / "audit.html").as_uri())
        assert shown.evaluate(TOO_WIDE) == []
        assert shown.evaluate("document.documentElement.scrollWidth") == width
        first = shown.locator(".headline").bounding_box()
        browser.close()
    assert first is not None
    assert first["y"] < 844
