"""A user's mistakes, through the real scripts: one clear line, an exit code, never a traceback."""

from __future__ import annotations

import re
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from offsphere.run.record import RunFolder
from vision import train_moco

TINY = "--data=emoji --limit=256 --image-size=16 --batch-size=32 --samples=128 --layer=backbone"
TINY += " --threads=1 --log-every=1"


def refusal(
    scripts, name: str, *flags: str, out: Path, code: int = 1, largest_file: int = 0
) -> str:
    """The one line on stderr with which the script ends."""
    script = scripts.run(name, *TINY.split(), f"--out={out}", *flags, largest_file=largest_file)
    assert "Traceback" not in script.stderr
    assert script.code == code, script.stderr
    (line,) = script.stderr.splitlines()
    assert line.startswith(name)
    return line


def run_folder(out: Path) -> Path:
    (config,) = out.glob("*/*/config.yaml")
    return config.parent


def picture_folder(path: Path, classes: int, images: int) -> Path:
    """class<c>/<i>.png below train/ and test/, of random pixels."""
    draw = np.random.default_rng(0)
    for part in ("train", "test"):
        for c in range(classes):
            (path / part / f"class{c}").mkdir(parents=True)
            for i in range(images):
                pixels = draw.integers(256, size=(16, 16, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(path / part / f"class{c}" / f"{i}.png")
    return path


@pytest.mark.parametrize(
    ("name", "flags", "said"),
    [
        (
            "train_simclr",
            ["--bach-size=8"],
            "Unknown setting '--bach-size'.*Did you mean '--batch-s",
        ),
        ("train_simclr", ["--cell=cosin"], "Unknown cell 'cosin'.*Did you mean 'cosine'"),
        ("train_simclr", ["--loss=nt_xnt"], "'nt_xnt'. Did you mean 'nt_xent'"),
        ("train_simclr", ["--temperature=0"], "--temperature must be above 0, got 0"),
        ("train_simclr", ["--lr=inf"], "--lr must be above 0, got inf"),
        ("train_simclr", ["--samples=10", "--epochs=1"], "--samples or as --epochs, not both"),
        ("train_simclr", ["--config=none.yaml"], "none.yaml cannot be read"),
        ("train_simclr", ["--limit=1"], "--limit must be at least 2, got 1"),
        ("train_simclr", ["--cell=nan,1"], "two finite exponents for a cell, as in 0.3,0.7, got"),
        ("train_simclr", ["--eval-cell=1,inf"], "two finite exponents for a cell.*got '1,inf'"),
        ("train_simclr", ["--eval-cell=learnable"], "--eval-cell=learnable has no exponents; give"),
        ("train_simclr", ["--seed=9223372036854775808"], "--seed must be at most 9,223,372"),
        ("train_simclr", ["--knn-k=0"], "--knn-k must be at least 1, got 0"),
        ("train_simclr", ["--projector-dim=0"], "--projector-dim must be at least 1, got 0"),
        ("train_simclr", ["--projector-layers=0"], "--projector-layers must be at least 1, got 0"),
        ("train_simclr", ["--projector-hidden=-1"], "--projector-hidden must be at least 0, got"),
        ("train_simclr", ["--min-scale=2"], "--min-scale must be above 0 and at most 1, got 2"),
        ("train_simclr", ["--cut-init=0"], "--cut-init must be above 0, got 0"),
        ("train_simclr", ["--grad-scale=nan"], "--grad-scale must be a finite number, got nan"),
        ("train_simclr", ["--jitter=-1"], "--jitter must be between 0 and 2.5, got -1"),
        ("train_simclr", ["--jitter=2.6"], "--jitter must be between 0 and 2.5, got 2.6"),
        ("train_simclr", ["--grey=2"], "--grey must be a probability, got 2"),
        ("train_simclr", ["--blur=nan"], "--blur must be a probability, got nan"),
        ("train_simclr", ["--image-size=1"], "--image-size must be at least 2, got 1"),
        (
            "train_simclr",
            ["--learnable-temperature", "--temperature=0.009"],
            r"between 0\.01 and 1 if it is learned .*, got 0\.009",
        ),
        ("train_moco", ["--momentum=2"], "--momentum must be between 0 and 1, got 2"),
        ("train_moco", ["--key-groups=0"], "--key-groups must be at least 1, got 0"),
        ("train_moco", ["--queue-size=32"], "--queue-size=32 must be above --batch-size=32"),
        ("train_moco", ["--queue-size=many"], "queue-size"),
        ("train_moco", ["--loss=nt_xent"], "Unknown setting '--loss'"),
    ],
)
def test_flags_that_cannot_be(scripts, name, flags, said, tmp_path: Path):
    assert re.search(said, refusal(scripts, name, *flags, out=tmp_path, code=2))
    assert list(tmp_path.iterdir()) == []


def test_the_edges_of_what_can_be():
    edges: dict[str, Any] = {
        "image_size": 2,
        "projector_dim": 1,
        "projector_layers": 1,
        "projector_hidden": 0,
    }
    edges |= {"limit": 2, "knn_k": 1, "min_scale": 1.0, "jitter": 2.5, "grey": 1.0, "blur": 1.0}
    edges |= {"cut_init": 0.1, "grad_scale": -1.0, "momentum": 1.0, "key_groups": 1}
    edges |= {"queue_size": 257, "learnable_temperature": True, "temperature": 0.01}
    config = train_moco.Config(**edges)
    assert {name: getattr(config, name) for name in edges} == edges
    zeros = train_moco.Config(jitter=0.0, grey=0.0, blur=0.0, momentum=0.0)
    assert (zeros.jitter, zeros.grey, zeros.blur, zeros.momentum) == (0.0, 0.0, 0.0, 0.0)
    assert train_moco.Config(norm="group", key_groups=0).key_groups == 0


@pytest.mark.parametrize(
    ("name", "flags", "said"),
    [
        ("train_simclr", ["--data=emojis"], "Unknown data set 'emojis'.*Did you mean 'emoji'"),
        ("train_simclr", ["--data=folder:/nowhere/at/all"], "/nowhere/at/all"),
        ("train_simclr", [f"--data=folder:{__file__}"], "read: it is a file, expected a folder"),
        ("train_simclr", ["--data=csv:/"], "csv:/ cannot be read: it is a folder, expected a file"),
        ("train_simclr", ["--data=cifar10", "--root=/nowhere"], "put cifar-10-batches-py/.*--down"),
        (
            "train_simclr",
            [f"--out={__file__}"],
            f"--out=.*: {__file__} is a file, expected a folder",
        ),
        ("train_simclr", ["--batch-size=300"], r"--batch-size=300 is larger.*\(256 samples\)"),
        ("train_simclr", ["--samples=8"], "budget ends before the first step of 32 samples"),
        ("train_simclr", ["--backbone=resnet19"], "resnet19.*resnet1[08]"),
        ("train_simclr", ["--pretrained=no/such.pt"], "No file of weights at no/such.pt"),
        ("train_simclr", ["--device=gpuu"], "--device=gpuu is not there"),
        ("train_simclr", ["--device=cpu", "--precision=bf16-mixed"], "Use --precision=32-true"),
        pytest.param(
            "train_simclr",
            ["--loggers=wandb"],
            "--loggers=wandb needs the extra: pip install",
            marks=pytest.mark.skipif(find_spec("wandb") is not None, reason="wandb is installed"),
        ),
        ("train_moco", ["--queue-size=225"], "--queue-size=225 is too long.*At most 224"),
        ("train_moco", ["--queue-size=64", "--key-groups=20"], "20 groups of 32 images"),
    ],
)
def test_settings_that_the_data_or_the_machine_refuse(scripts, name, flags, said, tmp_path: Path):
    assert re.search(said, refusal(scripts, name, *flags, out=tmp_path))


def test_data_that_is_too_little(scripts, tmp_path: Path):
    few = picture_folder(tmp_path / "few", classes=2, images=4)
    line = refusal(scripts, "train_simclr", f"--data=folder:{few}", out=tmp_path / "out")
    assert "has 0 image(s) in this split: at least 2 are needed. Parts are drawn by a hash" in line
    some = picture_folder(tmp_path / "some", classes=2, images=30)
    flags = [f"--data=folder:{some}", "--batch-size=64"]
    line = refusal(scripts, "train_simclr", *flags, out=tmp_path / "out")
    assert re.search(r"--batch-size=64 is larger than the training data \(\d+ samples\)", line)


def test_a_corrupt_image_is_named_or_skipped_and_counted(scripts, tmp_path: Path):
    data = picture_folder(tmp_path / "data", classes=2, images=40)
    # Validation is carved out of train by a hash of the name; this one stays in train.
    for broken in sorted((data / "train").rglob("*.png"))[:8]:
        broken.write_bytes(broken.read_bytes()[:60])
    flags = [f"--data=folder:{data}", "--samples=64"]
    line = refusal(scripts, "train_simclr", *flags, out=tmp_path / "out")
    assert re.search(r"data/train/class0/\d+\.png", line)
    assert "--on-bad-sample=skip" in line

    flags.append("--on-bad-sample=skip")
    out = tmp_path / "skipped"
    script = scripts.run("train_simclr", *TINY.split(), *flags, f"--out={out}")
    assert script.code == 0, script.stderr
    parts = RunFolder(run_folder(out)).provenance()["data"]
    assert parts["train"]["skipped"] + parts["validation"]["skipped"] == 8
    assert parts["train"]["size"] + parts["validation"]["size"] == 72
    assert parts["test"]["skipped"] == 0


def test_a_full_disk_leaves_the_old_checkpoint_as_it_was(scripts, wait_for_rows, tmp_path: Path):
    flags = ["--samples=100000", "--checkpoint-every=2"]
    script = scripts.start("train_simclr", *TINY.split(), f"--out={tmp_path}", *flags)
    wait_for_rows(script, tmp_path, 4)
    script.signal(signal.SIGTERM)
    assert script.wait() == 130
    checkpoint = run_folder(tmp_path) / "checkpoint" / "last.pt"
    before = checkpoint.read_bytes()
    line = refusal(scripts, "train_simclr", *flags, out=tmp_path, largest_file=200_000)
    assert str(checkpoint) in line
    assert "what was there is intact" in line
    assert checkpoint.read_bytes() == before
    assert [file.name for file in checkpoint.parent.iterdir()] == ["last.pt"]


def test_folders_that_do_not_fit(scripts, tmp_path: Path):
    script = scripts.run("train_simclr", *TINY.split(), f"--out={tmp_path}", "--samples=64")
    assert script.code == 0, script.stderr
    folder = run_folder(tmp_path)
    config = folder / "config.yaml"
    text = config.read_text()
    config.write_text(text.replace("temperature: 0.2", "temperature: 0.5"))
    line = refusal(scripts, "train_simclr", "--samples=64", out=tmp_path)
    assert "temperature is 0.5 there and 0.2 here" in line
    config.write_text(text)

    (folder / "metrics.json").unlink()
    checkpoint = folder / "checkpoint" / "last.pt"
    whole = checkpoint.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", b"not a checkpoint"):
        checkpoint.write_bytes(damaged)
        line = refusal(scripts, "train_simclr", "--samples=64", out=tmp_path)
        assert f"Cannot read the checkpoint {checkpoint}" in line
        assert "Delete it to start the run anew" in line
        assert checkpoint.read_bytes() == damaged


@pytest.mark.parametrize(("cell", "lr"), [("dot", "1e6"), ("cosine", "1e38")])
def test_a_diverged_run_stops_and_is_a_failed_row(scripts, cell: str, lr: str, tmp_path: Path):
    flags = [f"--cell={cell}", f"--lr={lr}", "--samples=3200", "--checkpoint-every=1"]
    flags += ["--optimizer=sgd", "--lr-rule=none", "--warmup=1"]
    line = refusal(scripts, "train_simclr", *flags, out=tmp_path)
    found = re.search(r"the loss is not a number at step (\d+)\. .*Try a lower --lr", line)
    assert found
    folder = RunFolder(run_folder(tmp_path))
    metrics = folder.metrics()
    assert metrics["run/status"] == "failed"
    assert metrics["run/reason"] == line.removeprefix("train_simclr: ")
    assert len(folder.steps()) in (int(found[1]), int(found[1]) + 1)
    file = folder.checkpoint / "last.pt"
    if file.exists():
        state = torch.load(file, weights_only=True)
        assert 0 < state["step"] <= int(found[1])
        values = (v for v in state["method"].values() if v.is_floating_point())
        assert all(torch.isfinite(v).all() for v in values)
