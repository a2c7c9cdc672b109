"""The house: rooms and arrows, no cycle, files of a readable size, a mirror of tests."""

import ast
import importlib.metadata
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LANES = ("vision", "crossmodal", "text", "theory")
PRODUCT = ("offsphere", *LANES)
LONGEST_FILE, MOST_JAVASCRIPT = 500, 200
CROSS_CUTTING = {
    "offsphere/analysis/test_page_in_browser": "the report in Chromium",
    "offsphere/study/test_ready": "what a study looks at before its first run",
    "offsphere/study/test_shipped": "configs/studies as they are shipped",
    "offsphere/test_dropin_trainer": "dropin.py inside open_clip's own trainer",
    "offsphere/test_groups": "groups of negatives in losses, terms and calibration",
    "test_cell_and_loss": "a new cell and a new loss, from training to the page",
    "test_command_cases": "every command, right and wrong",
    "test_documents": "README.md and docs/: commands, code, links",
    "test_examples": "examples/",
    "test_house": "this file",
    "test_kill_resume": "every training script, killed",
    "test_reader_cases": "every reader of data, with damaged data",
    "test_recipes": "configs/",
    "test_results": "results/ as committed",
    "test_words": "the English of messages and documents",
    "text/test_scifact": "a public collection, scored beside trec_eval",
    "theory/test_cell_propositions": "the papers' propositions on cells",
    "vision/test_bad_input": "what the vision scripts refuse",
}
"""Tests of more than one module: what each is about, because no module has its name."""


def run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout


def test_arrows_point_down_only():
    from importlinter.cli import lint_imports

    assert lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True) == 0


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports() -> dict[str, set[str]]:
    """Each module's imports of others of the house, wherever they stand in it: at the top, in a
    function, or for type checking only."""
    files = {module_of(file): file for name in PRODUCT for file in (ROOT / name).rglob("*.py")}
    found: dict[str, set[str]] = {}
    for module, file in files.items():
        named = set()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                named |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                inside = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
                named |= {full if full in files else node.module for full in inside.values()}
        found[module] = (named & files.keys()) - {module}
    return found


def test_no_module_imports_itself_by_way_of_others():
    graph = {module: set(others) for module, others in imports().items()}
    # Take away, again and again, what imports nothing that is left: cycles remain.
    while free := [module for module, others in graph.items() if not others & graph.keys()]:
        for module in free:
            del graph[module]
    # And what no one that is left imports: it only leads to a cycle.
    while loose := graph.keys() - set().union(*graph.values()):
        for module in loose:
            del graph[module]
    assert not graph


def test_no_file_is_too_long_to_read():
    files = [file for name in PRODUCT for file in (ROOT / name).rglob("*.py")]
    long = {module_of(file) for file in files if len(file.read_text().splitlines()) > LONGEST_FILE}
    assert not long
    scripts = (ROOT / "offsphere").rglob("*.js")
    written = sum(len(file.read_text().splitlines()) for file in scripts)
    assert written <= MOST_JAVASCRIPT


def test_tests_mirror_the_packages():
    """tests/offsphere/run/test_config.py tests offsphere/run/config.py."""
    for file in (ROOT / "tests").rglob("test_*.py"):
        test = file.relative_to(ROOT / "tests").with_suffix("")
        tested = ROOT / test.parent / f"{file.stem.removeprefix('test_')}.py"
        assert tested.is_file() or test.as_posix() in CROSS_CUTTING, f"{file} mirrors no module"


def test_lane_modules_shadow_neither_the_standard_library_nor_a_dependency():
    installed = {name.lower() for name in importlib.metadata.packages_distributions()}
    for lane in LANES:
        for file in (ROOT / lane).glob("*.py"):
            if file.stem != "__init__":
                assert file.stem not in sys.stdlib_module_names
                assert file.stem not in installed, f"{file} shadows the package {file.stem}"


@pytest.mark.parametrize(
    "module", ["offsphere", "offsphere.names", "offsphere.run.config", "offsphere.run.record"]
)
def test_imports_no_torch(module):
    heavy = ("torch", "numpy", "pandas", "timm", "lightly", "open_clip", "matplotlib")
    loaded = run(f"import {module}, sys; print([m for m in {heavy} if m in sys.modules])")
    assert loaded.strip() == "[]"


def test_the_core_imports_nothing_heavy_beside_torch():
    code = (
        "import sys, torch, torch.distributed; before = set(sys.modules)\n"
        "import offsphere.cells, offsphere.losses, offsphere.objective\n"
        "print({m.split('.')[0] for m in set(sys.modules) - before})"
    )
    third_party = ast.literal_eval(run(code)) - set(sys.stdlib_module_names)
    assert third_party <= {"offsphere", "torch"}


def test_one_version():
    import offsphere

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == offsphere.__version__
    assert f"version: {offsphere.__version__}" in (ROOT / "CITATION.cff").read_text()


def test_shapes_in_signatures_are_checked_while_tests_run():
    import torch
    from jaxtyping import TypeCheckError

    from offsphere.interventions import grad_scale

    with pytest.raises(TypeCheckError, match="n d"):
        grad_scale(torch.ones(2, 3, 4), 0.0)
    assert grad_scale(torch.ones(3, 4), 0.0).shape == (3, 4)
