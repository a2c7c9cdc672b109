"""The documents are true: what they tell a reader to type runs, and what they link to is there.

A page's blocks run from top to bottom, in one folder, which has the data that the commands name,
and in one namespace. `bash` and `python` run, on small data and few samples. A comment in the line
above a block says what else it is:

    <!-- not run: WHY -->     a reader needs something that is not here
    <!-- slow: WHY -->        runs with `pytest -m slow` only
    <!-- file: NAME -->       written to NAME, for the blocks below it
    <!-- printed -->          lines that the block above it prints; `...` stands for anything
"""

from __future__ import annotations

import contextlib
import html
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import open_clip
import pytest
import torch
import yaml
from PIL import Image
from samples import write_tar

from crossmodal.settings import MODELS
from offsphere.encoders.clip import registered_name

ROOT = Path(__file__).parents[1]
BUILT = ROOT / "docs" / "_build"
DOCS = sorted(x for x in (ROOT / "docs").rglob("*.md") if BUILT not in x.parents)
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "configs" / "README.md", *DOCS]
BLOCK = re.compile(r"^(?:<!-- ([^\n]*) -->\n)?```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHOWN = ("text", "{toctree}", "{eval-rst}", "{board}")
"""First words of blocks that are no code: drawings, and what Sphinx reads."""


class Block(NamedTuple):
    mark: str
    language: str
    content: str


def blocks(page: Path) -> list[Block]:
    return [Block(*found) for found in BLOCK.findall(page.read_text())]


TINY_TEXT = "--encoder=scratch --width=16 --layers=1 --max-length=16 --samples=64"
# What makes a command small; flags that come later win.
SMALL = {
    "configs/static.yaml": "--width=16 --samples=64 --batch-size=16",
    "vision/train_simclr.py": "--limit=96 --image-size=16 --batch-size=16 --samples=64",
    "vision/train_moco.py": "--limit=96 --batch-size=16 --samples=64 --queue-size=32",
    "vision/eval_probe.py": "",
    "crossmodal/train_clip.py": "--limit=96 --batch-size=16 --samples=64",
    "crossmodal/benchmark.py": "--limit=24 --resamples=20",
    "text/train_retrieval.py": f"{TINY_TEXT} --batch-size=16",
    "text/train_sts.py": TINY_TEXT,
    "theory/matrix_factorization.py": (
        "--users=200 --items=60 --items-per-user 5 30 --denoising-steps=20 --rank=20"
    ),
    "theory/simplex.py": "--instances=4 --population=6 --cases=20",
    "theory/norm_growth.py": "--pairs=60 --radii 0.25 0.5 1 --class-runs=1 --class-epochs=3",
    "theory/planted.py": "--relevant=16 --distractors=16 --cells cosine dot",
    "offsphere audit --model": "--limit=24 --resamples=20",
    "offsphere audit": "--resamples=20",
    "offsphere doctor": "--limit=96 --batch-size=16",
    "offsphere study": "--workers=1",
    "offsphere ": "",
}
# What a command takes unless it says otherwise.
BEFORE = {"text/train_retrieval.py": ["--data=docstrings:numpy"]}
SWAPPED = {
    "--microbatch=64": "--microbatch=4",
    "--model=ViT-B-32": "--model=configs/models/tiny.json",
}


def commands(block: str) -> list[str]:
    """The commands of a block, but for installations, which .ci/run makes."""
    lines = [line.partition("  #")[0] for line in block.replace("\\\n", " ").splitlines()]
    found = [part.strip() for line in lines for part in line.split("&&")]
    return [
        part for part in found if part and not part.startswith("pip install") and part != "pytest"
    ]


def picture(number: int) -> bytes:
    buffer = io.BytesIO()
    colour = (40 * (number % 6), 60 * (number % 4), 20 * (number % 12))
    Image.new("RGB", (32, 32), colour).save(buffer, "PNG")
    return buffer.getvalue()


def shard(path: Path, numbers: range) -> None:
    members = []
    for number in numbers:
        members += [(f"{number}.png", picture(number)), (f"{number}.cls", b"%d" % (number % 2))]
    write_tar(path, members)


def collection(path: Path) -> None:
    """40 documents in BEIR's layout, each answering the query that holds its own number."""
    (path / "qrels").mkdir(parents=True)
    rows = [
        {"_id": str(n), "title": f"number {n}", "text": f"the page of number {n} alone"}
        for n in range(40)
    ]
    for name in ("corpus", "queries"):
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for split, numbers in (("train", range(30)), ("test", range(30, 40))):
        lines = ["query-id\tcorpus-id\tscore", *(f"{n}\t{n}\t1" for n in numbers)]
        (path / "qrels" / f"{split}.tsv").write_text("\n".join(lines) + "\n")


def vectors(path: Path) -> None:
    """120 queries and 200 documents; document i answers query i."""
    draw = np.random.default_rng(0)
    documents = draw.normal(size=(200, 16)).astype("float32")
    np.save(path / "documents.npy", documents)
    np.save(path / "queries.npy", documents[:120] + draw.normal(size=(120, 16)).astype("float32"))
    (path / "qrels.tsv").write_text("".join(f"{n}\t{n}\t1\n" for n in range(120)))


def shorten(study: Path) -> None:
    """Leave a study one part, one seed and two runs of its small edition."""
    content = yaml.safe_load(study.read_text())
    part = {**content["parts"][0], "seeds": [0], "smoke": {"fixed": {"samples": 64}}}
    part["grid"] = {
        name: values[:2] for name, values in part["grid"].items() if name != "batch_size"
    }
    small = content["smoke"]["fixed"] | {"limit": 96, "batch_size": 16, "samples": 64}
    study.write_text(yaml.safe_dump(content | {"parts": [part], "smoke": {"fixed": small}}))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A checkout beside the data that the commands name."""
    for name in ("vision", "crossmodal", "text", "offsphere"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    (tmp_path / "results").mkdir()
    for name in ("small_batch", "cells_simclr"):
        shorten(tmp_path / "configs" / "studies" / f"{name}.yaml")
    for label in ("cat", "dog"):
        (tmp_path / "my_images" / label).mkdir(parents=True)
        for number in range(48):
            (tmp_path / "my_images" / label / f"{number}.png").write_bytes(picture(number))
    (tmp_path / "shards").mkdir()
    for name, numbers in (
        ("train-000", range(40)),
        ("train-001", range(40, 80)),
        ("test", range(80, 100)),
    ):
        shard(tmp_path / "shards" / f"{name}.tar", numbers)
    lines = ["image,caption"]
    for number in range(60):
        (tmp_path / f"{number}.png").write_bytes(picture(number))
        lines.append(f"{number}.png,picture number {number}")
    (tmp_path / "pairs.csv").write_text("\n".join(lines) + "\n")
    vectors(tmp_path)
    collection(tmp_path / "my_collection")
    collection(tmp_path / "another")
    torch.save(
        open_clip.create_model(registered_name("tiny", MODELS)).state_dict(),
        tmp_path / "weights.pt",
    )
    return tmp_path


def small(command: str, home: Path) -> list[str]:
    """The words of a command, with globs expanded as a shell does, made small."""
    words = []
    for word in shlex.split(command):
        word = SWAPPED.get(word, word)
        words += sorted(str(path.relative_to(home)) for path in home.glob(word)) or [word]
    key = next((key for key in SMALL if key in command), None)
    assert key is not None, f"no test knows how to run: {command}"
    return [*words[:2], *BEFORE.get(words[1], []), *words[2:], *shlex.split(SMALL[key])]


def run_command(command: str, home: Path, scripts) -> str:
    """What a command prints; it must end well."""
    words = small(command, home)
    if words[0] == "torchrun":
        program = str(Path(sys.executable).with_name("torchrun"))
        ended = subprocess.run([program, *words[1:]], cwd=home, capture_output=True, text=True)
        assert ended.returncode == 0, f"{command}\n{ended.stderr}"
        return ended.stdout
    name, flags = ("cli", words[1:]) if words[0] == "offsphere" else (words[1], words[2:])
    script = scripts.run(Path(name).stem, *flags, cwd=home)
    assert script.code == 0, f"{shlex.join(words)}\n{script.stdout}\n{script.stderr}"
    return script.stdout


def at_hand() -> dict[str, object]:
    """What a reader of our snippets has: towers, a batch, an optimizer, data."""
    draw = torch.Generator().manual_seed(0)
    pictures = torch.randint(256, (96, 3, 32, 32), generator=draw, dtype=torch.uint8)
    labelled = [(picture, number % 2) for number, picture in enumerate(pictures)]
    return {
        "model": open_clip.create_model(registered_name("tiny", MODELS)),
        "dataset": range(500),
        "optimizer": torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1),
        "images": torch.rand(4, 3, 32, 32, generator=draw),
        "tokens": torch.randint(1, 400, (4, 32), generator=draw),
        "projector": torch.nn.Linear(6, 5),
        "view_a": torch.randn(4, 6, generator=draw),
        "view_b": torch.randn(4, 6, generator=draw),
        "image": torch.randn(4, 6, generator=draw, requires_grad=True),
        "text": torch.randn(4, 6, generator=draw),
        "train_set": labelled[:64],
        "test_set": labelled[64:],
    }


def run_code(code: str, names: dict[str, object]) -> str:
    """What a snippet prints; a loss that it makes is finite and has gradients."""
    names.pop("loss", None)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, names)
    if isinstance(loss := names.get("loss"), torch.Tensor):
        loss.backward()
        assert torch.isfinite(loss)
    return printed.getvalue()


def check_printed(expected: str, printed: str) -> None:
    """Each line is one of those printed, in this order; `...` stands for anything."""
    said = iter(printed.splitlines())
    for line in expected.splitlines():
        pattern = re.escape(line.rstrip()).replace(r"\.\.\.", ".*")
        assert any(re.fullmatch(pattern, each.rstrip()) for each in said), f"{line}\n\n{printed}"


def is_slow(block: Block) -> bool:
    return block.mark.startswith("slow: ")


def runnable(page: Path) -> list[pytest.ParameterSet]:
    """The page without its slow blocks, and, if it has some, whole."""
    name = page.relative_to(ROOT).as_posix()
    found = [
        x for x in blocks(page) if x.language in ("bash", "python") and "not run" not in x.mark
    ]
    cases = [pytest.param(page, False, id=name)] if not all(map(is_slow, found)) else []
    if any(map(is_slow, found)):
        cases.append(pytest.param(page, True, id=f"{name}, whole", marks=pytest.mark.slow))
    return cases


@pytest.mark.parametrize(("page", "whole"), [case for page in PAGES for case in runnable(page)])
def test_a_page_runs(page: Path, whole: bool, home: Path, scripts, monkeypatch) -> None:
    monkeypatch.chdir(home)
    names, printed = at_hand(), ""
    for mark, language, content in blocks(page):
        kind, _, rest = mark.partition(": ")
        if kind == "file":
            (home / rest).write_text(content)
        elif kind == "printed":
            check_printed(content, printed)
        elif kind == "not run" or (kind == "slow" and not whole):
            continue
        elif language == "python":
            printed = run_code(content, names)
        elif language == "bash":
            printed = "".join(run_command(x, home, scripts) for x in commands(content))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_block_is_run_or_says_why_not(page: Path) -> None:
    assert page.read_text().count("\n```") == 2 * len(blocks(page)), "a fence that is not closed"
    for mark, language, _ in blocks(page):
        kind, _, reason = mark.partition(": ")
        if kind in ("not run", "slow"):
            assert language in ("bash", "python")
            assert len(reason.split()) > 2, f"{mark}: why?"
        elif kind == "file":
            assert reason
        elif kind != "printed":
            assert language.split()[0] in ("bash", "python", *SHOWN), f"{language}: is it run?"


def anchor(heading: str) -> str:
    """What a heading is called in links, on GitHub as on the site."""
    plain = re.sub(r"[`*]|\]\(.*?\)|\[", "", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    outside = BLOCK.sub("", page.read_text())
    return {anchor(x) for x in re.findall(r"^#+ (.*)$", outside, re.MULTILINE)}


LINKED = [*PAGES, ROOT / "CHANGELOG.md", *sorted((ROOT / "results").glob("*.md"))]


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(page: Path) -> None:
    text = BLOCK.sub("", page.read_text())
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", text):
        file, _, place = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), link
        if place:
            assert place in anchors(target), link


def test_the_readme_is_one_page() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    for command in (
        "pip install -e . && python vision/train_simclr.py --cell=dot\n",
        "pip install -e '.[test]' && pytest\n",
    ):
        assert command in text


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Links, names of the API and claims are all there; the notebooks run."""
    command = [sys.executable, "-m", "sphinx", "-n", "-W", "--keep-going", "-q"]
    ended = subprocess.run(
        [*command, ROOT / "docs", tmp_path / "site"], capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    shown = {
        page: html.unescape(re.sub("<[^>]+>", "", (tmp_path / "site" / page).read_text()))
        for page in ("answer.html", "api/core.html", "notebooks/magnitude_in_my_vectors.html")
    }
    # As on the board, where tests/test_results.py looks it up for the README.
    figure = "non-superior: -0.87 [-1.42, -0.31] points of linear probe accuracy"
    assert f"{figure} (10 seeds, 156 steps)" in shown["answer.html"]
    assert "x / |x|**exponent, with the norm in float32" in shown["api/core.html"]
    # Only the norms of what is searched can change an order.
    rows = re.findall(r"^  (\w+) +(\S+) \[", shown["notebooks/magnitude_in_my_vectors.html"], re.M)
    (_, signal), (_, none), (_, dot) = rows[:3]
    assert [cell for cell, _ in rows] == ["qnorm", "dnorm", "dot"] * 2
    assert none == "+0.0"
    assert signal == dot
    assert float(dot) > 10 > -10 > float(rows[5][1])
