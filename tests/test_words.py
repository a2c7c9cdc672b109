"""What the code and the documents name is there: commands, extras, scripts; what a wheel holds."""

from __future__ import annotations

import ast
import fnmatch
import importlib.metadata
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

import offsphere
from offsphere import cli
from offsphere.share import CONFIGS, PUBLISHED

ROOT = Path(__file__).parents[1]
PACKAGES = ("offsphere", "vision", "crossmodal", "text", "theory", "benchmarks")
CODE = [file for name in PACKAGES for file in sorted((ROOT / name).rglob("*.py"))]
TEXTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted(x for x in (ROOT / "docs").rglob("*.md") if "_build" not in x.parts),
    ROOT / "configs/README.md",
]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]


def strings(file: Path) -> list[str]:
    """Every text in a Python file, docstrings among them; the fixed parts of an f-string joined."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.JoinedStr):
            parts = [x.value if isinstance(x, ast.Constant) else "{}" for x in node.values]
            found.append("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


SAID = [(file, text) for file in CODE for text in strings(file)]
SAID += [(file, file.read_text()) for file in TEXTS]


def named_commands(text: str) -> list[tuple[str, str]]:
    """Words after `offsphere` where it stands as a command: command and what follows it."""
    code = r"(?:^ *|`|: |\(|; |; then |&& |with |Run |run )"
    return re.findall(code + r"offsphere ([a-z]+)(?: ([a-z]+)\b)?", text, re.MULTILINE)


def test_every_command_that_is_named_exists():
    said = [(file, *names) for file, text in SAID for names in named_commands(text)]
    assert len(said) > 40
    assert {command for _, command, _ in said} == set(cli.COMMANDS)
    assert {verb for _, command, verb in said if command == "shards" and verb} == {"make"}
    scripts = {verb for _, command, verb in said if command == "doctor" and verb}
    assert all(name.startswith("train") for name in scripts)


def test_every_extra_that_is_named_exists():
    named = [
        (file.name, name)
        for file, text in SAID
        for names in re.findall(r"\.\[([a-z,]+)\]", text)
        for name in names.split(",")
    ]
    named += [
        (file.name, name) for file, text in SAID for name in re.findall(r"extra `([a-z]+)`", text)
    ]
    assert len(named) > 5
    assert {name for _, name in named} <= set(EXTRAS)


def test_every_file_that_is_named_exists():
    """Names in capitals and `my_` files are the reader's own."""
    top = "docs|configs|benchmarks|examples|tests|results|" + "|".join(PACKAGES)
    file_name = rf"(?<![\w./~{{<-])((?:{top})/[\w./-]*\w\.(?:py|md|yaml|json|csv|txt|css|js|html))"
    named = [(file.name, name) for file, text in SAID for name in re.findall(file_name, text)]
    theirs = re.compile(r"NAME|/my_|benchmarks/gpu.py")  # the last comes with issue 18
    assert len(named) > 80
    missing = [x for x in named if not (ROOT / x[1]).exists() and not theirs.search(x[1])]
    assert missing == []


def test_the_tree_that_is_drawn_is_there():
    tree = (ROOT / "docs" / "house.md").read_text().split("```text")[1].split("```")[0]
    # What a folder's line and the lines below it, which are indented, name inside that folder.
    for folder, said in re.findall(r"^(\w+/)(.*(?:\n {2,}.*)*)", tree, re.MULTILINE):
        assert (ROOT / folder).is_dir()
        for name in re.findall(r"(?<![\w>/])(\w+/|\w+\.(?:py|yaml|html))(?!\w)", said):
            assert (ROOT / folder / name).exists(), folder + name


def refused_imports(file: Path) -> list[tuple[str, str]]:
    """(module, extra) where a failed import is answered with the name of an extra."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if not isinstance(node, ast.Try):
            continue
        said = " ".join(ast.unparse(x) for handler in node.handlers for x in handler.body)
        modules = [x for part in node.body for x in ast.walk(part)]
        names = [alias.name for x in modules if isinstance(x, ast.Import) for alias in x.names]
        names += [str(x.module) for x in modules if isinstance(x, ast.ImportFrom)]
        extras = re.findall(r"\.\[([a-z]+)\]", said)
        found += [(name.split(".")[0], extra) for name in names for extra in extras]
    return found


def test_an_extra_that_is_offered_holds_the_package():
    installed = importlib.metadata.packages_distributions()
    offered = [(file.name, *each) for file in CODE for each in refused_imports(file)]
    assert offered
    for file, module, extra in offered:
        held = {re.split(r"[^A-Za-z0-9_-]", x)[0].lower() for x in EXTRAS[extra]}
        packages = {name.lower().replace("_", "-") for name in installed.get(module, [module])}
        assert packages & held, (file, module, extra)


def test_the_version_is_said(capsys):
    cli.main(["--version"])
    assert capsys.readouterr().out == f"offsphere {offsphere.__version__}\n"


@pytest.mark.parametrize(
    "file", [f for lane in ("vision", "crossmodal", "text") for f in (ROOT / lane).glob("*.py")]
)
def test_what_looks_like_a_script_is_one(file):
    """A lane's module with a `main` runs it when it is started, with the command line's words."""
    tree = ast.parse(file.read_text())
    mains = [x for x in tree.body if isinstance(x, ast.FunctionDef) and x.name == "main"]
    guarded = any(isinstance(x, ast.If) and "__main__" in ast.unparse(x.test) for x in tree.body)
    if mains:
        required = len(mains[0].args.args) - len(mains[0].args.defaults)
        assert guarded
        assert required == 0


def test_a_wheel_holds_every_file_that_the_code_reads():
    """The links of offsphere/share lead to what people edit, and package data names all of it."""
    assert CONFIGS.resolve() == ROOT / "configs"
    assert PUBLISHED.resolve() == ROOT / "results" / "published"
    data = PROJECT["tool"]["setuptools"]["package-data"]
    packages = {"offsphere.share": ROOT / "offsphere" / "share"}
    packages |= {"crossmodal": ROOT / "crossmodal"}
    for room in ("analysis", "audit", "page"):
        packages[f"offsphere.{room}"] = ROOT / "offsphere" / room
    assert set(data) - {"offsphere"} == set(packages)  # the library's own is py.typed
    for name, folder in packages.items():
        held = {file for pattern in data[name] for file in folder.glob(pattern)}
        below = [folder, *(link for link in folder.iterdir() if link.is_symlink())]
        there = {file for each in below for file in each.rglob("*") if file.is_file()}
        needed = {f for f in there if f.suffix in (".yaml", ".json", ".csv", ".txt", ".css", ".js")}
        assert needed <= held, needed - held
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout
    assert fnmatch.filter(tracked.split(), "configs/models/*.json")
