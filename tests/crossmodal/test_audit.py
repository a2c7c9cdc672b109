"""From flags to a page: embeddings in a file, a real open_clip model, and mistakes."""

from __future__ import annotations

import csv
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from planted_vectors import directions, junk_captions, verdicts
from safetensors.torch import save_file

from crossmodal import audit, audit_probe, benchmark
from crossmodal.audit import Config
from offsphere import cli
from offsphere.audit.measures import reference_half
from offsphere.audit.report import Report
from offsphere.audit.table import HALF

MODEL = {
    "embed_dim": 24,
    "vision_cfg": {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 16},
    "text_cfg": {"context_length": 24, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "150")


def planted(folder: Path, **tensors: torch.Tensor) -> Config:
    """The settings for an audit of such an embeddings file."""
    file = folder / "planted.safetensors"
    save_file({key: x.contiguous() for key, x in tensors.items()}, file)
    return Config(embeddings=str(file), out=str(folder), threads=1, resamples=200)


def audited(folder: Path, **tensors: torch.Tensor) -> Report:
    config = planted(folder, **tensors)
    return audit.report_of(config, benchmark.encode(config))


def rows_of(file: Path) -> dict[tuple[str, ...], dict[str, str]]:
    """The table by direction, score and metric."""
    with file.open() as lines:
        rows = list(csv.DictReader(lines))
    return {(row["direction"], row["scored_with"], row["metric"]): row for row in rows}


def test_all_right_and_all_wrong_have_intervals(tmp_path):
    """Twenty of twenty: the bootstrap would say 100 % [100, 100]."""
    from statsmodels.stats.proportion import proportion_confint

    images = torch.eye(20, dtype=torch.float64)
    report = audited(tmp_path, images=images, texts=images * 2, owner=torch.arange(20))
    place = ("planted", "image to text")
    low, _ = proportion_confint(20, 20, 0.05, method="wilson")
    share = report.table.get(*place, "cosine", "i2t_r1")
    assert (share.value, share.low, share.high) == pytest.approx((1.0, low, 1.0))
    change = report.table.get(*place, "dot", "i2t_r1_minus_cosine")
    assert (change.value, change.low, change.high) == pytest.approx((0.0, low - 1, 1 - low))


def test_a_model_of_ones_own_has_no_default_data(capsys):
    code, said = refusal(capsys, "--model=ViT-B-32", "--pretrained=weights.pt")
    assert code == 2
    assert "--model needs --data" in said
    assert "csv:FILE" in said


def test_named_similarities_in_the_benchmark_and_in_the_audit(tmp_path, capsys):
    """Fitted on one half of the images and judged on the other, written out for centring."""
    names = ("centred", "dot", "dnorm", "query_zscore", "csls")
    tensors = junk_captions(60)
    tensors["texts"] += 0.5
    config = dataclasses.replace(planted(tmp_path, **tensors), similarities=names)
    kept = {f.name: getattr(config, f.name) for f in dataclasses.fields(benchmark.Config)}
    benchmark.run(benchmark.Config(**kept))
    assert "Post-hoc similarities" in capsys.readouterr().out
    (file,) = tmp_path.glob("benchmark/*/results.csv")
    rows = rows_of(file)

    def found(name: str, metric: str = "i2t_r1") -> str:
        return rows["image to text", name, f"{metric}{HALF}"]["value"]

    fitted = reference_half(60, config.seed).numpy()
    images, texts, owner = (x.numpy() for x in tensors.values())
    judged = ~fitted[owner]
    queries = images[~fitted] - images[fitted].mean(0)
    items = texts[judged] - texts[~judged].mean(0)
    items /= np.linalg.norm(items, axis=1, keepdims=True)
    right = owner[judged][(queries @ items.T).argmax(1)] == np.flatnonzero(~fitted)
    assert float(found("centred")) == pytest.approx(right.mean())
    gain = float(found("centred")) - float(found("cosine"))
    assert float(found("centred", "i2t_r1_minus_cosine")) == pytest.approx(gain)
    for name in ("dnorm", "query_zscore"):  # they rank as cosine does
        assert found(name) == found("cosine")
        assert ("image to text", name, f"i2t_r1_minus_cosine{HALF}") not in rows
    facts = [
        float(rows["image to text", "", name]["value"])
        for name in ("remedies_level", "fitted_on", "judged_on")
    ]
    assert facts == [pytest.approx(1 - 0.05 / 3), 30, 30]
    report = audit.report_of(config, benchmark.encode(config))
    for name in ("cosine", *names):
        value = report.table.value("planted", "image to text", name, f"i2t_r1{HALF}")
        assert value == pytest.approx(float(found(name)))
    with pytest.raises(ValueError, match="Did you mean 'centred'"):
        benchmark.Config(embeddings="x", similarities=("centered",))


def test_classes_have_one_direction(tmp_path):
    """Three templates per class; the class with the long texts takes what it should not."""
    classes, images = 5, 200
    means = directions(classes, 6, 0)
    labels = torch.arange(images) % classes
    pictures = means[labels] + 0.8 * directions(images, 6, 1)
    texts = means.repeat_interleave(3, 0) + 0.1 * directions(3 * classes, 6, 2)
    texts[:3] *= 4
    report = audited(
        tmp_path,
        images=pictures,
        labels=labels,
        class_texts=texts,
        class_owner=torch.arange(classes).repeat_interleave(3),
    )
    assert verdicts(report).keys() == {"image to class"}
    assert verdicts(report)["image to class"][0] == "keep cosine"
    unit = torch.nn.functional.normalize
    vectors = unit(unit(texts).view(classes, 3, 6).mean(1))
    norms = texts.norm(dim=1).view(classes, 3).mean(1)
    place = ("planted", "image to class")
    for cell, items in (("cosine", vectors), ("dot", vectors * norms[:, None])):
        chosen = (pictures @ items.T).argmax(1)
        accuracy = (chosen == labels).double().mean().item()
        assert report.table.value(*place, cell, "top1") == pytest.approx(accuracy)
        counts = torch.bincount(chosen, minlength=classes).double()
        share = (counts.max() / images).item()
        found = report.table.value(*place, cell, "hubness_largest_hub_share")
        assert found == pytest.approx(share)
    right = (pictures @ vectors.T).argmax(1) == labels
    assert report.table.value(*place, "cosine", "answers_right") == int(right.sum())


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """open_clip towers with random weights, and 24 pictures with one or two captions."""
    import open_clip

    folder = tmp_path_factory.mktemp("audit")
    (folder / "audit-tiny.json").write_text(json.dumps(MODEL))
    open_clip.add_model_config(folder / "audit-tiny.json")
    torch.manual_seed(0)
    towers = open_clip.create_model("audit-tiny")
    torch.save(towers.state_dict(), folder / "weights.pt")
    random = np.random.default_rng(0)
    with (folder / "pairs.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["image", "caption"])
        for k in range(24):
            pixels = random.integers(0, 256, (32, 32, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"{k}.png")
            table.writerows([[f"{k}.png", f"picture {k} take {j}"] for j in range(1 + k % 2)])
    return folder


def test_a_real_model_from_flags_to_page(model, tmp_path, capsys):
    import open_clip

    flags = [f"--model={model / 'audit-tiny.json'}", f"--pretrained={model / 'weights.pt'}"]
    flags += [f"--data=csv:{model / 'pairs.csv'}", f"--out={tmp_path}", "--device=cpu"]
    flags += ["--threads=1", "--resamples=20", "--save-embeddings"]
    cli.main(["audit", *flags])
    (folder,) = tmp_path.glob("audit/*")
    assert str(folder) in capsys.readouterr().out.replace("\n", "")
    content = json.loads((folder / "audit.json").read_text())
    assert (content["data"], content["own"]) == (["24 images, 36 texts."], "cosine")
    said = [statement["verdict"] for statement in content["advice"][0]["statements"]]
    assert said == ["at chance"]  # towers of random weights
    assert content["headline"].startswith("Nothing can be told: ")
    assert content["headline"] in (folder / "audit.html").read_text()

    towers = open_clip.create_model("audit-tiny", str(model / "weights.pt")).eval()
    tokenize = open_clip.get_tokenizer("audit-tiny")
    nouns = audit_probe.NOUNS.read_text().split()
    lines = audit_probe.TEMPLATES.read_text().splitlines()
    texts = [line.format(c=noun) for noun in nouns for line in lines]
    with torch.no_grad():
        raw = towers.encode_text(tokenize(texts)).double().view(len(nouns), len(lines), -1)
    judged = raw[~reference_half(len(nouns), 0)]
    cosines = audit_probe.mean_cosines(judged)[0].mean().item()
    rows = rows_of(folder / "results.csv")
    same_template = rows["text to text", "cosine", "same_template"]["value"]
    assert float(same_template) == pytest.approx(cosines, abs=1e-5)
    assert len(content["table"]) == len(rows)

    (saved,) = folder.glob("embeddings-*.safetensors")
    again = audit.run(Config(embeddings=str(saved), out=str(tmp_path), threads=1, resamples=20))
    cv = rows["image to text", "", "norm_text_cv"]["value"]
    found = again.table.value(saved.stem, "image to text", metric="norm_text_cv")
    assert found == pytest.approx(float(cv), rel=1e-6)
    assert again.sections == ()  # there is no text tower to probe


def refusal(capsys, *flags: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as end:
        cli.main(["audit", *flags])
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return end.value.code, said


def test_mistakes_end_in_one_line(tmp_path, capsys):
    code, said = refusal(capsys)
    assert code == 2
    assert "Give one of --vectors, --encoder, --model, --run, --embeddings, got none" in said
    code, said = refusal(capsys, f"--embeddings={tmp_path / 'no.npz'}")
    assert code == 1
    assert said.startswith("offsphere audit: error: ")
    file = tmp_path / "three.safetensors"
    sides = {"images": torch.eye(3), "texts": torch.eye(3), "owner": torch.arange(3)}
    save_file(sides, file)
    code, said = refusal(capsys, f"--embeddings={file}", f"--out={tmp_path}")
    assert code == 1
    assert "three has 3 images: at least 4 are needed" in said
    assert not (tmp_path / "audit").exists()


def test_help_needs_no_torch():
    code = "import crossmodal.audit, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["False"]
