"""Pages are escaped, carry their stores, and let no script run but their own."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib

import jinja2
import pytest

from offsphere.page import engine

HOSTILE = "</script><script>alert(1)</script>"


def unpacked(page: str, store: str) -> str:
    (found,) = re.findall(rf'data-store="{store}">([A-Za-z0-9+/=]*)</script>', page)
    return zlib.decompress(base64.b64decode(found)).decode()


def test_a_page_carries_its_stores_and_the_chart_library() -> None:
    page = engine.render("offsphere.page", "base.html.j2", {"one": {"text": HOSTILE, "x": [0.5]}})
    assert json.loads(unpacked(page, "one")) == {"text": HOSTILE, "x": [0.5]}
    assert unpacked(page, "library") == engine.chart_library()
    assert HOSTILE not in page


def test_the_policy_names_the_page_script_and_the_library_by_their_hashes() -> None:
    page = engine.render("offsphere.page", "base.html.j2", {"one": {}})
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.S)
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    wanted = [
        base64.b64encode(hashlib.sha256(each.encode()).digest()).decode()
        for each in (script, unpacked(page, "library"))
    ]
    assert re.findall(r"sha256-([^&]*)&#39;", policy) == wanted
    assert policy.startswith("default-src &#39;none&#39;; ")
    assert "eval" not in policy
    assert engine.render("offsphere.page", "base.html.j2", {"one": {}}) == page


def test_a_page_without_charts_needs_no_library() -> None:
    page = engine.render("offsphere.page", "base.html.j2", {})
    assert '<script type="text/plain"' not in page
    assert len(page) < 60_000


def test_values_are_escaped_and_a_forgotten_one_is_an_error() -> None:
    environment = engine._environment("offsphere.page")
    assert environment.from_string("<b>{{ x }}</b>").render(x="<&>") == "<b>&lt;&amp;&gt;</b>"
    with pytest.raises(jinja2.UndefinedError, match="forgotten"):
        environment.from_string("{{ forgotten }}").render()


def test_a_store_holds_no_number_that_json_has_not() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        engine.json_of({"x": float("nan")})
