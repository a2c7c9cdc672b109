"""The site: `sphinx-build -n -W docs docs/_build`. It needs no network.

A page says `{claim}` and a claim's name; the build writes what the committed tables say of it, by
the code of `offsphere claims`. So no figure of a study is typed into a page that is built here.
"""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective, SphinxRole

import offsphere
from offsphere.analysis.claim_file import load_claims
from offsphere.analysis.claims import Verdict, evaluate_claims
from offsphere.analysis.conditions import steps_text
from offsphere.analysis.words import words_of

ROOT = Path(__file__).parents[1]

project = "offsphere"
release = offsphere.__version__
html_title = "offsphere"
html_theme = "furo"
html_show_copyright = False
extensions = ["myst_nb", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]

myst_heading_anchors = 3
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 600

autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
autodoc_preserve_defaults = True
autodoc_type_aliases = {
    "Split": "offsphere.split.Split",
    "Objective": "offsphere.objective.Objective",
}
autodoc_typehints_format = "short"
# What other packages document; nothing is fetched at build.
OTHERS = (
    "torch|numpy|np|pandas|Tensor|nn|Array|Float|Int|Bool|pathlib|Path|collections|abc|jaxtyping"
)
# Types that public names mention and that are no names of the public surface.
INNER = (
    r"Exponents|Temperature|Side|Labelled|Scored|Curve|offsphere\.audit\..*|(.*\.)?ranking\.Ranking"
)
nitpick_ignore_regex = [("py:.*", rf"({OTHERS})(\..*)?"), ("py:class", INNER)]

COPIED = {
    "contributing": "CONTRIBUTING.md",
    "changelog": "CHANGELOG.md",
    "recipes": "configs/README.md",
    "results": "results/README.md",
    "short_runs": "results/short_runs.md",
}
"""Pages whose text stands elsewhere in the tree, where people look for it."""


def copied(app: Sphinx, page: str, source: list[str]) -> None:
    """Put the text of its file in a page's place, with links that lead there from docs/."""
    if page not in COPIED:
        return
    file = ROOT / COPIED[page]
    pages = {(ROOT / original).resolve(): f"{name}.md" for name, original in COPIED.items()}

    def from_docs(link: re.Match[str]) -> str:
        target, hash_sign, place = link[1].partition("#")
        path = (file.parent / target).resolve()
        return f"]({pages.get(path, os.path.relpath(path, ROOT / 'docs'))}{hash_sign}{place})"

    source[0] = re.sub(r"\]\((?!https?:|#)([^)]+)\)", from_docs, file.read_text())


@cache
def board() -> dict[str, Verdict]:
    """Every claim's line, by its name."""
    lines = evaluate_claims(load_claims(ROOT / "configs" / "claims.yaml"), ROOT / "results")
    return {line.claim.id: line for line in lines}


def told(line: Verdict) -> str:
    """Verdict, value, interval, metric, seeds and steps of a claim, in plain words."""
    found, claim = line.measured, line.claim
    if found is None:
        return f"{line.verdict} ({line.sentence})"
    metric = words_of(claim.terms[0][0])
    in_logs = claim.transform == "log"
    factor, digits = (1.0, 3) if in_logs or metric.factor == 1 else (metric.factor, 2)
    value, *ends = (f"{factor * x:+.{digits}f}" for x in (found.value, found.low, found.high))
    unit = " in the logarithm of" if in_logs else " points of" if metric.factor != 1 else " in"
    verdict = "" if line.verdict == "measured" else f"{line.verdict}: "
    rests_on = ", ".join(filter(None, [found.count, steps_text(line.steps)]))
    return f"{verdict}{value} [{', '.join(ends)}]{unit} {metric.text} ({rests_on})"


class ClaimRole(SphinxRole):
    """`{claim}` and a name: what the committed tables say."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        if (line := board().get(self.text)) is None:
            logging.getLogger(__name__).warning(
                "No claim %r in configs/claims.yaml.", self.text, location=self.get_location()
            )
            return [], []
        return [nodes.inline(self.rawtext, told(line), classes=["claim"])], []


class Board(SphinxDirective):
    """`{board}` and a heading of configs/claims.yaml: its primary claims, a row each."""

    required_arguments, final_argument_whitespace = 1, True

    def run(self) -> list[nodes.Node]:
        heading = self.arguments[0]
        lines = [
            line
            for line in board().values()
            if (line.claim.kind, line.claim.heading) == ("primary", heading)
        ]
        if not lines:
            raise self.error(f"No primary claim under {heading!r} in configs/claims.yaml.")
        rows = "".join(f"| {x.claim.text.strip()} | {told(x)} |\n" for x in lines)
        return self.parse_text_to_nodes(f"| claim | found |\n|---|---|\n{rows}")


def plain(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Docstrings are plain English with code in single backticks: no other mark is meant."""
    lines[:] = [
        "".join(
            f"``{part}``" if inside else re.sub(r"([*|\\_])", r"\\\1", part)
            for inside, part in zip([False, True] * len(line), line.split("`"), strict=False)
        )
        for line in lines
    ]


def setup(app: Sphinx) -> None:
    app.add_role("claim", ClaimRole())
    app.add_directive("board", Board)
    app.connect("source-read", copied)
    app.connect("autodoc-process-docstring", plain)
