"""eval_probe: a run's own numbers again, timm models by name, and clear errors."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from offsphere.data.images import load_images
from offsphere.data.views import IMAGENET_MEAN, IMAGENET_STD
from offsphere.evaluation.knn import knn
from offsphere.run.config import from_dict
from offsphere.training.images import build_encoder
from offsphere.training.settings import ImageSettings
from offsphere.training.streams import stream_seed
from vision import eval_probe, train_moco, train_simclr

TINY = {
    "samples": 96,
    "batch_size": 16,
    "image_size": 16,
    "threads": 1,
    "knn_k": 5,
    "log_every": 4,
    "device": "cpu",
    "lr": 1e-3,
    "optimizer": "adamw",
    "lr_rule": "none",
}


def draw(folder, classes: int, seed: int):
    """Class folders of noisy pictures, each class around a colour of its own."""
    from PIL import Image

    rng = np.random.default_rng(seed)
    for label in range(classes):
        (folder / f"class{label}").mkdir(parents=True)
        colour = rng.uniform(60, 190, 3)
        for k in range(60):
            noise = rng.normal(0, 60, (16, 16, 3))
            pixels = (colour + rng.normal(0, 25, 3) + noise).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"class{label}" / f"{seed}-{k}.png")
    return f"folder:{folder}"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("data")
    return {"data": draw(folder / "known", 3, 0), "data_ood": draw(folder / "other", 3, 1)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, data) -> dict[str, object]:
    """One finished run of each script, by name."""
    out = tmp_path_factory.mktemp("results")
    settings = TINY | data | {"out": str(out)}
    learnable = from_dict(train_simclr.Config, settings | {"cell": "learnable"})
    dot = from_dict(train_moco.Config, settings | {"cell": "dot", "queue_size": 64})
    train_simclr.run(learnable)
    train_moco.run(dot)
    return {name: next((out / name).iterdir()) for name in ("train_simclr", "train_moco")}


def measure(**flags) -> dict:
    return eval_probe.run(eval_probe.Config(device="cpu", **flags))


def on_test(metrics: dict) -> dict:
    return {name: value for name, value in metrics.items() if name.startswith("test/")}


def recorded(folder) -> dict:
    return on_test(json.loads((folder / "metrics.json").read_text()))


@pytest.mark.parametrize("script", ["train_simclr", "train_moco"])
def test_a_finished_run_gives_its_own_numbers_again(runs, script):
    folder = runs[script]
    found = measure(run=str(folder), save_embeddings=True)
    assert len(recorded(folder)) > 15
    assert on_test(found) == recorded(folder)
    file = Path(found["probe/file"])
    assert file in folder.glob("probe-????????.json"), "other tests may have left others there"
    assert on_test(json.loads(file.read_text())) == recorded(folder)
    examples = load_file(folder / "examples.safetensors")
    again = load_file(folder / f"{file.stem}-examples.safetensors")
    assert examples.keys() == again.keys()
    for name in examples:
        torch.testing.assert_close(again[name], examples[name], rtol=0, atol=0, equal_nan=True)
    embeddings = load_file(folder / f"{file.stem}-embeddings.safetensors")["embedding"]
    assert torch.equal(embeddings.norm(dim=1), examples["norm"])


def test_a_cut_run_is_measured_at_its_checkpoint(runs, tmp_path):
    """The last checkpoint of a finished run holds its final weights and learned exponents."""
    folder = tmp_path / "cut"
    shutil.copytree(runs["train_simclr"], folder)
    expected = recorded(folder)
    for name in ("metrics.json", "encoder.safetensors"):
        (folder / name).unlink()
    found = measure(run=str(folder))
    assert on_test(found) == expected
    assert found["run/status"] == "cut"
    assert len(list(folder.glob("probe-step6-????????.json"))) == 1


def test_the_eval_cell_scores_the_embeddings(runs):
    folder = runs["train_simclr"]
    own = recorded(folder)
    for cell, same in (("dot", "dot"), ("qnorm", "dot"), ("dnorm", "cosine"), ("1,1", "cosine")):
        found = measure(run=str(folder), eval_cell=cell, layer="embedding")
        assert found["test/knn_embedding"] == own[f"test/knn_embedding_{same}"]
        assert "test/knn" not in found
    assert len(list(folder.glob("probe-????????.json"))) >= 4


def test_other_data_replaces_the_runs(runs, data):
    found = measure(
        run=str(runs["train_moco"]), data=data["data_ood"], data_ood=data["data"], knn_k=3
    )
    described = found["probe/provenance"]["data"]
    assert described["train"]["data"] == described["test"]["data"] == data["data_ood"]
    assert described["ood"]["data"] == data["data"]
    assert found["probe/settings"]["knn_k"] == 3


def test_the_pretrained_file_of_a_run_is_no_longer_needed(runs, data, tmp_path):
    weights = load_file(runs["train_simclr"] / "encoder.safetensors")
    file = tmp_path / "start.safetensors"
    save_file({k: x for k, x in weights.items() if k.startswith("backbone.")}, file)
    settings = TINY | data | {"out": str(tmp_path), "pretrained": str(file), "samples": 32}
    train_simclr.run(from_dict(train_simclr.Config, settings))
    file.unlink()
    (folder,) = (tmp_path / "train_simclr").iterdir()
    assert on_test(measure(run=str(folder))) == recorded(folder)


def test_a_timm_model_by_name_beside_timm_itself(data, tmp_path):
    import timm

    found = measure(
        backbone="resnet18",
        data=data["data"],
        image_size=32,
        stem="standard",
        seed=3,
        knn_k=5,
        threads=1,
        out=str(tmp_path),
    )
    torch.manual_seed(stream_seed(3, "init"))
    model = timm.create_model("resnet18", pretrained=False, num_classes=0).eval()
    mean, std = (torch.tensor(x)[:, None, None] for x in (IMAGENET_MEAN, IMAGENET_STD))

    def features(split):
        images = load_images(data["data"], split=split, image_size=32)
        pixels = images.batch(torch.arange(len(images))) / 255
        with torch.no_grad():
            return model((pixels - mean) / std), images.labels

    expected = knn(*features("train"), *features("test"), k=5).accuracy
    assert found["test/knn"] == pytest.approx(expected, abs=1e-9)
    assert "test/knn_embedding" not in found
    assert "test/backbone_norm_auroc" in found
    (folder,) = (tmp_path / "eval_probe").iterdir()
    assert folder.name.startswith("resnet18-")
    assert recorded(folder) == on_test(found)


def refusal(monkeypatch, capsys, *flags: str) -> tuple[int, str]:
    """Exit code and the one line that the script says."""
    monkeypatch.setattr(sys, "argv", ["eval_probe.py", *flags])
    with pytest.raises(SystemExit) as stop:
        eval_probe.main()
    said = capsys.readouterr().err.strip()
    assert "\n" not in said
    return stop.value.code, said


def test_folders_that_cannot_be_measured(runs, tmp_path, monkeypatch, capsys):
    code, said = refusal(monkeypatch, capsys, f"--run={tmp_path}/nowhere")
    assert code == 1
    assert "No such file or folder" in said
    assert f"nearest one that exists is {tmp_path}" in said

    code, said = refusal(monkeypatch, capsys, f"--run={tmp_path}")
    assert code == 1
    assert "is not a run: it has no config.yaml" in said

    results = runs["train_simclr"].parent
    code, said = refusal(monkeypatch, capsys, f"--run={results}")
    assert code == 1
    assert f"Runs below it: {runs['train_simclr']}" in said

    folder = tmp_path / "unfinished"
    shutil.copytree(runs["train_moco"], folder)
    for name in ("metrics.json", "encoder.safetensors", "checkpoint/last.pt"):
        (folder / name).unlink()
    code, said = refusal(monkeypatch, capsys, f"--run={folder}")
    assert code == 1
    assert "is cut and has no checkpoint" in said
    assert "python vision/train_moco.py --cell=dot" in said

    provenance = json.loads((folder / "provenance.json").read_text())
    (folder / "provenance.json").write_text(json.dumps(provenance | {"script": "train_clip"}))
    code, said = refusal(monkeypatch, capsys, f"--run={folder}")
    assert code == 1
    assert "is a run of train_clip: expected one of train_simclr, train_moco" in said


def test_flags_that_do_not_fit(runs, monkeypatch, capsys):
    run = f"--run={runs['train_simclr']}"
    code, said = refusal(monkeypatch, capsys)
    assert code == 2
    assert "either --run=FOLDER or --backbone=NAME" in said
    code, said = refusal(monkeypatch, capsys, run, "--image-size=8")
    assert code == 2
    assert "--image-size goes with --backbone" in said
    code, said = refusal(monkeypatch, capsys, run, "--eval-cell=cosin")
    assert code == 2
    assert "Did you mean 'cosine'" in said
    code, said = refusal(monkeypatch, capsys, run, "--eval-cell=learnable")
    assert code == 2
    assert "--eval-cell=learnable has no exponents; give two, as in 0.3,0.7." in said
    assert "Without --eval-cell a learnable run is scored with what it learned." in said
    code, said = refusal(monkeypatch, capsys, run, "--knn-k=0")
    assert code == 2
    assert "--knn-k must be at least 1, got 0" in said
    code, said = refusal(monkeypatch, capsys, run, "--eval-cell=dot", "--layer=backbone")
    assert code == 1
    assert "add --layer=all" in said
    code, said = refusal(monkeypatch, capsys, "--backbone=resnet1")
    assert code == 1
    assert "resnet18" in said


def test_the_tables(runs, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    folder = runs["train_moco"]
    monkeypatch.setattr(sys, "argv", ["eval_probe.py", f"--run={folder}", "--device=cpu"])
    eval_probe.main()
    said = capsys.readouterr().out
    assert str(folder) in said.splitlines()  # whole, however long
    own = recorded(folder)
    for name in ("test/knn", "test/probe", "test/knn_embedding", "test/probe_embedding_raw"):
        assert f"{own[name]:.1%}" in said
    assert f"{own['test/ood_auroc']:.3f}" in said
    assert "exponents 0 (query) and 0 (training item)" in said


def test_help_needs_no_torch():
    code = "import vision.eval_probe, sys; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.parametrize(("pretrained", "kernel"), [("a1_in1k", 7), ("gone/start.pt", 3)])
def test_the_architecture_that_pretrained_implies_is_built_without_its_weights(pretrained, kernel):
    """timm's published weights have the large stem; a file's may have the small one."""
    config = ImageSettings(backbone="resnet18", pretrained=pretrained, image_size=32)
    encoder = build_encoder(config, load_pretrained=False)
    assert encoder.backbone.conv1.kernel_size == (kernel, kernel)


def test_norms_of_a_perfect_classifier_are_left_out_not_an_error(tmp_path):
    """With every vote right there is nothing for a norm to tell apart."""
    from PIL import Image

    for label, grey in enumerate((0, 255)):
        folder = tmp_path / "data" / f"class{label}"
        folder.mkdir(parents=True)
        for k in range(40):
            pixels = np.full((8, 8, 3), grey, np.uint8)
            pixels[k % 8, k // 8] = 128
            Image.fromarray(pixels).save(folder / f"{k}.png")
    found = measure(
        backbone="tiny_resnet",
        data=f"folder:{tmp_path / 'data'}",
        image_size=8,
        knn_k=3,
        threads=1,
        out=str(tmp_path),
    )
    assert found["test/knn"] == found["test/probe"] == 1.0
    assert not {"test/backbone_norm_auroc", "test/backbone_ece"} & found.keys()
