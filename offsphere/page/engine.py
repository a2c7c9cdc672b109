"""One HTML engine: templates with every value escaped, in a file that works offline.

    render("offsphere.analysis", "report.html.j2", title="...", stores={...})

A page extends `base.html.j2`, which brings the style, the colours, the script and the chart
library. Charts and what else a section shows later travel in stores: compressed JSON that the
script unpacks when the section is opened, so a page with a hundred charts paints as fast as one
without any. No torch.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from markupsafe import Markup

from offsphere.page.charts import CONFIG
from offsphere.page.looks import COLOURS


def render(package: str, template: str, stores: Mapping[str, Any], **values: Any) -> str:
    """The page that a package's template makes; `stores` are read by its script, by name."""
    script, library = asset("page.js"), chart_library() if stores else ""
    hashes = " ".join(f"'sha256-{_digest(each)}'" for each in (script, library) if each)
    # Vega's expressions are interpreted, never compiled, so no 'unsafe-eval' is needed. The
    # library is unpacked into an inline script: the policy knows it by its hash.
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {hashes}"
    page = _environment(package).get_template(template)
    return page.render(
        policy=policy,
        style=Markup(asset("page.css")),
        script=Markup(script),
        colours=COLOURS,
        stores={
            **({"library": packed(library)} if library else {}),
            **{name: packed(json_of(store)) for name, store in stores.items()},
        },
        **values,
    )


def packed(content: str) -> str:
    """The bytes compressed and written in characters that need no escaping in HTML."""
    return base64.b64encode(zlib.compress(content.encode(), 9)).decode()


def json_of(value: Any) -> str:
    """JSON without spaces; a number that is not finite is refused."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def asset(name: str) -> str:
    """A file that every page carries inside."""
    return (resources.files("offsphere.page") / "assets" / name).read_text(encoding="utf-8")


@cache
def chart_library() -> str:
    """Vega, Vega-Lite and Vega-Embed in one script, of the version that draws the paper figures."""
    import vl_convert  # pyright: ignore[reportMissingImports]

    bundle = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    # A module's top-level names would be global in a plain script.
    return f"(()=>{{{bundle}}})();window.chartConfig={json_of(CONFIG)};"


@cache
def _environment(package: str) -> Any:
    """Templates of the package, then the shared ones; an unknown name is an error."""
    import jinja2

    from offsphere.page import numbers

    homes = [jinja2.PackageLoader(name) for name in dict.fromkeys([package, "offsphere.page"])]
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader(homes),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"minus": numbers.with_minus, "zip": zip}
    return environment


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
