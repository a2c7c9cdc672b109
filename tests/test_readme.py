"""Every command and every piece of code in README.md runs, on small data and few samples."""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import open_clip
import pytest
import torch
import yaml
from PIL import Image
from samples import write_tar

from crossmodal.settings import MODELS
from offsphere.dropin import ClipLoss
from offsphere.encoders.clip import registered_name

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL)
SNIPPETS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
# Blocks of commands that take a minute even when small.
LONG = re.compile("doctor|ray|theory|moco")
TINY_TEXT = "--encoder=scratch --width=16 --layers=1 --max-length=16 --samples=64"
# What makes a command small; flags that come later win.
SMALL = {
    "vision/train_simclr.py": "--limit=96 --image-size=16 --batch-size=16 --samples=64",
    "vision/train_moco.py": "--limit=96 --batch-size=16 --samples=64 --queue-size=32",
    "vision/eval_probe.py": "",
    "crossmodal/train_clip.py": "--limit=96 --batch-size=16 --samples=64",
    "crossmodal/benchmark.py": "--limit=24 --resamples=20",
    "text/train_retrieval.py": f"{TINY_TEXT} --batch-size=16",
    "text/train_sts.py": TINY_TEXT,
    "theory.matrix_factorization": (
        "--users=200 --items=60 --items-per-user 5 30 --denoising-steps=20 --rank=20"
    ),
    "theory.simplex": "--instances=4 --population=6 --cases=20",
    "theory.norm_growth": "--pairs=60 --radii 0.25 0.5 1 --class-runs=1 --class-epochs=3",
    "theory.planted": "--relevant=16 --distractors=16 --cells cosine dot",
    "offsphere audit": "--limit=24 --resamples=20",
    "offsphere doctor": "--limit=96 --batch-size=16",
    "offsphere study": "--workers=1",
    "offsphere reproduce": "",
    "offsphere shards": "",
    "offsphere export": "",
    "offsphere report": "",
    "offsphere claims": "",
}
# What a command takes unless it says otherwise.
BEFORE = {"text/train_retrieval.py": ["--data=docstrings:numpy"]}
SWAPPED = {
    "--microbatch=64": "--microbatch=4",
    "--model=ViT-B-32": "--model=configs/models/tiny.json",
}


def commands(block: str) -> list[str]:
    """The commands of a block, but for installations, which .ci/run makes."""
    lines = [line.partition("  #")[0] for line in block.splitlines()]
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


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(n, marks=pytest.mark.slow if LONG.search(block) else ())
        for n, block in enumerate(BLOCKS)
    ],
)
def test_the_commands_run(number: int, home: Path, scripts) -> None:
    for command in commands(BLOCKS[number]):
        words = small(command, home)
        if words[0] == "torchrun":
            program = str(Path(sys.executable).with_name("torchrun"))
            ended = subprocess.run(
                [program, *words[1:]], cwd=home, capture_output=True, check=False
            )
            assert ended.returncode == 0, f"{command}\n{ended.stderr.decode()}"
            continue
        if words[0] == "offsphere":
            script = scripts.run("cli", *words[1:], cwd=home)
        else:
            path = words[1:] if words[1] != "-m" else [words[2].replace(".", "/"), *words[3:]]
            name = path[0].removesuffix(".py").partition("/")[2]
            script = scripts.run(name, *path[1:], cwd=home)
        assert script.code == 0, f"{shlex.join(words)}\n{script.stdout}\n{script.stderr}"


@pytest.mark.parametrize("code", SNIPPETS, ids=lambda code: code.split()[-1][:20])
def test_the_code_runs(code: str) -> None:
    towers = open_clip.create_model(registered_name("tiny", MODELS))
    draw = torch.Generator().manual_seed(0)
    names = {
        "model": towers,
        "dataset": range(500),
        "ClipLoss": ClipLoss,
        "optimizer": torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1),
        "images": torch.rand(4, 3, 32, 32, generator=draw),
        "tokens": torch.randint(1, 400, (4, 32), generator=draw),
        "projector": torch.nn.Linear(6, 5),
        "view_a": torch.randn(4, 6, generator=draw),
        "view_b": torch.randn(4, 6, generator=draw),
        "image": torch.randn(4, 6, generator=draw, requires_grad=True),
        "text": torch.randn(4, 6, generator=draw),
    }
    exec(code, names)
    loss = names["loss"]
    loss.backward()
    assert torch.isfinite(loss)


def test_every_named_file_exists() -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", TEXT) + re.findall(
        r'src="([^"]+)"', TEXT
    ):
        assert (ROOT / target).exists(), target
