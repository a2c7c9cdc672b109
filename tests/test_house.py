"""The house: floors and lanes, names that shadow nothing, light imports, one version."""

import ast
import importlib.metadata
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LANES = ("vision", "crossmodal", "text", "theory")


def run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout


def test_arrows_point_down_only():
    from importlinter.cli import lint_imports

    assert lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True) == 0


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
