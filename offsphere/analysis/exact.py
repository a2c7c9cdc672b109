"""The tests of the exact claims: run, and recorded in results/exact.json. No torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

from offsphere.analysis.claim_file import Claim
from offsphere.run.record import write_json

ROOT = Path(__file__).resolve().parents[2]
EXACT = "exact.json"


def run_tests(claims: Sequence[Claim], results_root: str | Path) -> None:
    """Run the tests of the exact claims and record how each claim fared."""
    exact = [claim for claim in claims if claim.kind == "exact"]
    named = {node for claim in exact for node in claim.tests}
    wanted = sorted(node for node in named if names_a_test(node))
    if named and not wanted:
        raise ValueError(
            f"None of the {len(named)} tests is in {ROOT}: they are part of the repository, not of "
            "the installed package. Use a checkout with `pip install -e .`."
        )
    # One process for all tests: a claim is verified only if each of its tests ran and passed, so a
    # test that was renamed, skipped or not collected leaves the claim "not run", never verified.
    outcomes = _pytest(wanted) if wanted else {}
    now = datetime.now(UTC).isoformat(timespec="seconds")
    record = {}
    for claim in exact:
        found = {node: _outcomes_of(node, outcomes) for node in claim.tests}
        missing = [node for node, passed in found.items() if not passed]
        failed = [node for node, passed in found.items() if passed and not all(passed)]
        word = "failed" if failed else "not run" if missing else "verified"
        record[claim.id] = {
            "verdict": word,
            "tests": list(claim.tests),
            "passed": sum(sum(passed) for passed in found.values()),
            "failed": failed,
            "missing": missing,
            "when": now,
        }
    Path(results_root).mkdir(parents=True, exist_ok=True)
    write_json(Path(results_root) / EXACT, record)


def names_a_test(node: str) -> bool:
    """Whether a pytest node id names a test of this repository (without its parameters)."""
    file, *names = node.split("[")[0].split("::")
    path = ROOT / file
    if not path.is_file():
        return False
    scope: Iterable[ast.AST] = ast.parse(path.read_text(encoding="utf-8")).body
    for name in names:
        named = [x for x in scope if isinstance(x, ast.FunctionDef | ast.ClassDef)]
        found = next((x for x in named if x.name == name), None)
        if found is None:
            return False
        scope = found.body
    return True


def _pytest(nodes: Sequence[str]) -> dict[str, bool]:
    """The node ids that ran, and whether each passed; a skipped test verifies nothing."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", *nodes, "-q", "-m", "", f"--junitxml={report}"]
        command += ["-o", "junit_family=xunit1", "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if not report.exists():
            last = (done.stderr or done.stdout).strip().splitlines()[-1:]
            raise ValueError(f"pytest did not run: {' '.join(last)}")
        cases = ElementTree.parse(report).getroot().iter("testcase")
        return {_node_id(c): _passed(c) for c in cases if c.find("skipped") is None}


def _node_id(case: ElementTree.Element) -> str:
    file = case.get("file", "")
    module = file.removesuffix(".py").replace("/", ".")
    inside = case.get("classname", "").removeprefix(module).strip(".").split(".")
    return "::".join([file, *filter(None, inside), case.get("name", "")])


def _passed(case: ElementTree.Element) -> bool:
    return not any(case.find(tag) is not None for tag in ("failure", "error"))


def _outcomes_of(node: str, outcomes: Mapping[str, bool]) -> list[bool]:
    """How the tests below a node (a file, a function, one parameter) ended."""
    return [ok for name, ok in outcomes.items() if name == node or re.match(_below(node), name)]


def _below(node: str) -> str:
    return re.escape(node) + r"(::|\[)"
