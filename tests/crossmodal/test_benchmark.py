"""Real open_clip towers with random weights, beside unmodified clip-benchmark, on small shards."""

from __future__ import annotations

import csv
import dataclasses
import gc
import io
import json
import pickle
import subprocess
import sys
import tarfile
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from samples import write_tar

from crossmodal import benchmark, features, subjects
from crossmodal.benchmark import Config
from offsphere.encoders.clip import published_preprocessing
from offsphere.encoders.store import Store
from offsphere.names import CORNERS

# webdataset, under clip-benchmark, leaves the closing of its tar files to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
MODEL = {
    "embed_dim": 24,
    "vision_cfg": {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 16},
    "text_cfg": {"context_length": 24, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
}
CLASSES = ("red fox", "blue whale", "tree", "small house", "old car", "cloud", "river")
TEMPLATES = ("a photo of a {c}.", "a drawing of the {c}", "{c}")
PICTURES = 36


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A model as JSON and weights, and the same pictures as retrieval and as classification."""
    import open_clip

    folder = tmp_path_factory.mktemp("benchmark")
    (folder / "bench-tiny.json").write_text(json.dumps(MODEL))
    open_clip.add_model_config(folder / "bench-tiny.json")
    torch.manual_seed(0)
    model = open_clip.create_model("bench-tiny")
    with torch.no_grad():  # random towers hardly tell texts apart: give them something to rank
        model.token_embedding.weight.mul_(30)
        model.visual.conv1.weight.mul_(10)
    torch.save(model.state_dict(), folder / "weights.pt")
    write_data(folder / "pairs", kind="retrieval")
    write_data(folder / "classes", kind="classification")
    return folder


@pytest.fixture(autouse=True)
def own_cache(place, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
    monkeypatch.setenv("COLUMNS", "150")
    yield
    gc.collect()


def write_data(root: Path, kind: str, pictures: int = PICTURES, extra: str | None = None) -> None:
    """clip-benchmark's local wds layout in two shards; pictures of several shapes and colours."""
    random = np.random.default_rng(0)
    (root / "test").mkdir(parents=True)
    (root / "test" / "nshards.txt").write_text("2\n")
    for shard in (0, 1):
        members = []
        for k in range(shard, pictures, 2):
            pixels = random.integers(0, 256, (20 + k % 5, 24 - k % 3, 3)) // (1 + k % 4)
            png = io.BytesIO()
            Image.fromarray(pixels.astype(np.uint8)).save(png, "png")
            sample = {"png": png.getvalue()}
            if kind == "retrieval":
                words = " ".join(random.choice(["sun", "sea", "dog", "box", "hat"], 4))
                lines = [f"picture {k} {words} {j}" for j in range(1 + k % 3)]
                sample["txt"] = "\n".join(lines).encode()
            else:
                sample["cls"] = str(int(random.integers(len(CLASSES)))).encode()
            if extra is not None and k == 0:
                sample[extra] = pickle.dumps({"never": "read"})
            members += [(f"{k:04d}.{suffix}", content) for suffix, content in sample.items()]
        write_tar(root / "test" / f"{shard}.tar", members)
    if kind == "retrieval":
        (root / "dataset_type.txt").write_text("retrieval\n")
    else:
        (root / "classnames.txt").write_text("\n".join(CLASSES))
        (root / "zeroshot_classification_templates.txt").write_text("\n".join(TEMPLATES))


def config(place: Path, **flags) -> Config:
    flags = {"model": str(place / "bench-tiny.json"), "threads": 1, "resamples": 50} | flags
    if "model" in flags and flags["model"] is not None:
        flags.setdefault("pretrained", str(place / "weights.pt"))
    return Config(device="cpu", **flags)


def theirs(place: Path, root: Path, task: str, templates: list[str] | None = None):
    """What unmodified clip-benchmark says."""
    from clip_benchmark.datasets.builder import build_dataset
    from clip_benchmark.metrics import zeroshot_classification, zeroshot_retrieval
    from clip_benchmark.models import load_clip

    model, transform, tokenizer = load_clip(
        "open_clip", "bench-tiny", str(place / "weights.pt"), cache_dir=None, device="cpu"
    )
    model.eval()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*shardshuffle")  # of clip-benchmark's own call
        dataset = build_dataset("wds/x", root=str(root), transform=transform, task=task)
    loader = torch.utils.data.DataLoader(dataset.batched(10), batch_size=None)
    if task == "zeroshot_retrieval":
        return zeroshot_retrieval.evaluate(
            model, loader, tokenizer, device="cpu", amp=False, recall_k_list=[1, 5, 10]
        )
    loader.dataset.classes = dataset.classes
    return zeroshot_classification.evaluate(
        model, loader, tokenizer, dataset.classes, templates, device="cpu", amp=False
    )


def written(out: Path, cell: str) -> list[dict]:
    """The files for clip-benchmark of one cell."""
    found = out.glob(f"benchmark/*/clip_benchmark/*-{cell}.json")
    return [json.loads(file.read_text()) for file in sorted(found)]


def test_cosine_retrieval_is_clip_benchmarks(place, tmp_path):
    want = theirs(place, place / "pairs", "zeroshot_retrieval")
    data, root = ("clip-benchmark:wds/x",), str(place / "pairs")
    benchmark.run(config(place, data=data, root=root, out=str(tmp_path)))
    (found,) = written(tmp_path, "cosine")
    assert found["task"] == "zeroshot_retrieval"
    assert 0.0 < want["text_retrieval_recall@5"] < 1.0
    for name, value in want.items():
        assert found["metrics"][name] == pytest.approx(value, abs=1e-6), name


def test_whole_pictures_of_a_wds_pattern_give_the_same_numbers(place, tmp_path):
    """Read by our own reader, preprocessed by the model's own transform."""
    want = theirs(place, place / "pairs", "zeroshot_retrieval")
    data = (f"wds:{place}/pairs/test/{{0..1}}.tar",)
    benchmark.run(config(place, data=data, out=str(tmp_path)))
    (found,) = written(tmp_path, "cosine")
    for name, value in want.items():
        assert found["metrics"][name] == pytest.approx(value, abs=1e-6), name


@pytest.mark.parametrize("templates", [TEMPLATES[:1], TEMPLATES])
def test_cosine_classification_is_clip_benchmarks(place, tmp_path, templates):
    want = theirs(place, place / "classes", "zeroshot_classification", list(templates))
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(templates))
    data, root = ("clip-benchmark:wds/x",), str(place / "classes")
    flags = {} if len(templates) > 1 else {"templates": str(file)}
    benchmark.run(config(place, data=data, root=root, out=str(tmp_path), **flags))
    (found,) = written(tmp_path, "cosine")
    assert 0.0 < want["acc1"] < 1.0
    for name, value in want.items():
        assert found["metrics"][name] == pytest.approx(value, abs=1e-6), name


def raw_embeddings(place: Path, root: Path):
    """Every picture and caption or label, one at a time, through the towers themselves."""
    import open_clip

    model, _, transform = open_clip.create_model_and_transforms(
        "bench-tiny", str(place / "weights.pt")
    )
    model.eval()
    tokenizer = open_clip.get_tokenizer("bench-tiny")
    pictures, texts, owner, labels = [], [], [], []
    for shard in (0, 1):
        with tarfile.open(root / "test" / f"{shard}.tar") as tar, torch.no_grad():
            for member in tar.getmembers():
                content = tar.extractfile(member).read()
                if member.name.endswith("png"):
                    pixels = transform(Image.open(io.BytesIO(content)).convert("RGB"))
                    pictures.append(model.encode_image(pixels[None])[0])
                elif member.name.endswith("txt"):
                    for line in content.decode().splitlines():
                        texts.append(model.encode_text(tokenizer([line]))[0])
                        owner.append(len(pictures) - 1)
                else:
                    labels.append(int(content))
    if labels:
        with torch.no_grad():
            lines = [template.format(c=name) for name in CLASSES for template in TEMPLATES]
            texts = [model.encode_text(tokenizer([line]))[0] for line in lines]
    stacked = [torch.stack(x).double().numpy() for x in (pictures, texts)]
    return *stacked, np.array(owner), np.array(labels)


@pytest.mark.parametrize("own", ["0.3,0.7", "dot"])
def test_every_cell_has_the_recalls_of_a_slow_reference(place, tmp_path, own):
    images, texts, owner, _ = raw_embeddings(place, place / "pairs")
    data, root = ("clip-benchmark:wds/x",), str(place / "pairs")
    returned = benchmark.run(config(place, data=data, root=root, out=str(tmp_path), eval_cell=own))
    cells = dict(CORNERS) | ({"0.3,0.7": (0.3, 0.7)} if own not in CORNERS else {})
    for cell, (g, h) in cells.items():
        left = images / np.linalg.norm(images, axis=1, keepdims=True) ** g
        right = texts / np.linalg.norm(texts, axis=1, keepdims=True) ** h
        scores = left @ right.T
        found = written(tmp_path, cell.replace(",", "_"))[0]["metrics"]
        for k in (1, 5, 10):
            best = np.argsort(-scores, axis=1)[:, :k]
            to_text = np.mean([i in owner[row] for i, row in enumerate(best)])
            best = np.argsort(-scores.T, axis=1)[:, :k]
            to_image = np.mean([owner[j] in row for j, row in enumerate(best)])
            assert found[f"text_retrieval_recall@{k}"] == pytest.approx(to_text, abs=1e-9)
            assert found[f"image_retrieval_recall@{k}"] == pytest.approx(to_image, abs=1e-9)
            if cell == own:
                assert returned[f"clip-benchmark:wds/x/t2i_r{k}"] == pytest.approx(to_image)


def test_every_cell_has_the_accuracies_of_a_slow_reference(place, tmp_path):
    images, texts, _, labels = raw_embeddings(place, place / "classes")
    data, root = ("clip-benchmark:wds/x",), str(place / "classes")
    benchmark.run(config(place, data=data, root=root, out=str(tmp_path), eval_cell="0.3,0.7"))
    texts = texts.reshape(len(CLASSES), len(TEMPLATES), -1)
    norms = np.linalg.norm(texts, axis=2, keepdims=True)
    direction = (texts / norms).mean(1)
    direction /= np.linalg.norm(direction, axis=1, keepdims=True)
    for cell, (_, g) in (CORNERS | {"0.3,0.7": (0.3, 0.7)}).items():
        vectors = direction * (norms ** (1 - g)).mean(1)
        rank = (np.argsort(-(images @ vectors.T), axis=1) == labels[:, None]).argmax(1)
        found = written(tmp_path, cell.replace(",", "_"))[0]["metrics"]
        assert found["acc1"] == pytest.approx(np.mean(rank == 0), abs=1e-9)
        assert found["acc5"] == pytest.approx(np.mean(rank < 5), abs=1e-9)


def test_the_csv_has_every_cell_and_chance(place, tmp_path):
    data, root = ("clip-benchmark:wds/x",), str(place / "pairs")
    benchmark.run(config(place, data=data, root=root, out=str(tmp_path), eval_cell="dot"))
    (file,) = tmp_path.glob("benchmark/*/results.csv")
    with file.open() as lines:
        rows = {
            (row["metric"], row["scored_with"]): row
            for row in csv.DictReader(lines)
            if row["direction"] == "text to image" or row["metric"].startswith("i2t")
        }
    # Two cells tie with cosine; the exact test of the others' R@1 has a p in each direction.
    assert len(rows) == 6 * (2 * 4 + 1) + 2 * 2

    def value(metric: str, scored_with: str) -> float:
        return float(rows[metric, scored_with]["value"])

    assert value("t2i_r1", "chance") == pytest.approx(1 / PICTURES)
    row, difference = rows["t2i_r1", "dot"], value("t2i_r1", "dot") - value("t2i_r1", "cosine")
    assert value("t2i_r1_minus_cosine", "dot") == pytest.approx(difference)
    change = rows["t2i_r1_minus_cosine", "dot"]
    assert float(change["low"]) <= difference <= float(change["high"])
    assert float(row["low"]) <= float(row["value"]) <= float(row["high"])
    tied = rows["i2t_r1_minus_cosine", "dnorm"]
    assert [float(tied[end]) for end in ("value", "low", "high")] == [0, 0, 0]
    assert row["n"] == str(PICTURES)
    (file,) = tmp_path.glob("benchmark/*/examples.safetensors")
    from safetensors.torch import load_file

    hits = load_file(file)["clip-benchmark:wds/x/text to image/dot/t2i_r1"]
    assert hits.mean().item() == pytest.approx(float(row["value"]), abs=1e-6)


def test_clip_benchmark_builds_its_table_from_our_files(place, tmp_path, monkeypatch):
    from clip_benchmark import cli

    for name in ("pairs", "classes"):
        data, root = ("clip-benchmark:wds/x",), str(place / name)
        benchmark.run(config(place, data=data, root=root, out=str(tmp_path)))
    folders = [str(folder) for folder in tmp_path.glob("benchmark/*/clip_benchmark")]
    argv = ["clip_benchmark", "build", *folders, "--output", str(tmp_path / "all.csv")]
    monkeypatch.setattr(sys, "argv", argv)
    cli.main()
    with (tmp_path / "all.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    assert len(rows) == 2 * 4
    assert {row["model_fullname"] for row in rows} == {f"bench-tiny {place / 'weights.pt'}"}
    cosine = {row["task"]: row for row in rows if row["scored_with"] == "cosine"}
    want = theirs(place, place / "pairs", "zeroshot_retrieval")["image_retrieval_recall@5"]
    got = float(cosine["zeroshot_retrieval"]["image_retrieval_recall@5"])
    assert got == pytest.approx(want, abs=1e-6)
    assert float(cosine["zeroshot_classification"]["acc1_chance"]) == pytest.approx(1 / 7)


@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_precomputed_embeddings(tmp_path, suffix):
    from safetensors.torch import save_file

    random = torch.Generator().manual_seed(4)
    images, texts = torch.randn(9, 5, generator=random), torch.randn(9, 5, generator=random)
    tensors = {"images": images, "texts": texts, "owner": torch.arange(9)}
    tensors |= {"labels": torch.arange(9) % 3, "class_texts": torch.randn(3, 5, generator=random)}
    file = tmp_path / f"mine{suffix}"
    if suffix == ".npz":
        np.savez(file, **{name: x.numpy() for name, x in tensors.items()})
    else:
        save_file(tensors, file)
    found = benchmark.run(
        Config(embeddings=str(file), eval_cell="txtnorm", out=str(tmp_path), threads=1)
    )
    scores = images @ torch.nn.functional.normalize(texts).T
    top = scores.argmax(1) == torch.arange(9)
    assert found["mine/i2t_r1"] == pytest.approx(top.double().mean().item())
    top = scores.argmax(0) == torch.arange(9)
    assert found["mine/t2i_r1"] == pytest.approx(top.double().mean().item())
    scores = images @ torch.nn.functional.normalize(tensors["class_texts"]).T
    top = scores.argmax(1) == tensors["labels"]
    assert found["mine/top1"] == pytest.approx(top.double().mean().item())
    assert found["mine/t2i_r10"] == 1.0  # more than there are


def test_saved_embeddings_can_be_scored_again(place, tmp_path):
    data, root = ("clip-benchmark:wds/x",), str(place / "classes")
    out = str(tmp_path)
    first = benchmark.run(config(place, data=data, root=root, out=out, save_embeddings=True))
    (file,) = tmp_path.glob("benchmark/*/embeddings-*.safetensors")
    again = benchmark.run(Config(embeddings=str(file), out=out, threads=1))
    assert again[f"{file.stem}/top1"] == first["clip-benchmark:wds/x/top1"]
    assert again[f"{file.stem}/top5"] == first["clip-benchmark:wds/x/top5"]


def counting(subject: subjects.Subject) -> tuple[subjects.Subject, list[int]]:
    """The same subject, and how many pictures it has seen."""
    seen: list[int] = []

    def tower(pixels: torch.Tensor) -> torch.Tensor:
        seen.append(len(pixels))
        return subject.image_tower(pixels)

    return dataclasses.replace(subject, image_tower=tower), seen


def test_features_are_computed_once_and_never_for_other_weights_data_or_damage(place, tmp_path):
    device = torch.device("cpu")
    weights = str(place / "weights.pt")
    subject, seen = counting(subjects.from_open_clip("bench-tiny", weights, device))
    root = tmp_path / "pairs"
    write_data(root, "retrieval")
    reading = features.Reading(root=str(root))

    def encode(subject: subjects.Subject) -> features.Features:
        (examples,) = features.load_examples("clip-benchmark:wds/x", subject, reading)
        return features.encode(subject, examples, Store(tmp_path / "kept"))

    first = encode(subject)
    assert sum(seen) == PICTURES
    again = encode(subject)
    assert sum(seen) == PICTURES
    for a, b in zip(first[:3], again[:3], strict=True):
        assert torch.equal(a, b)

    for file in (tmp_path / "kept").iterdir():  # one flipped bit
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    assert torch.equal(encode(subject).images, first.images)
    assert sum(seen) == 2 * PICTURES

    state = torch.load(weights)
    state["visual.proj"] = state["visual.proj"] * 2
    torch.save(state, tmp_path / "other.pt")
    other, seen_by_other = counting(
        subjects.from_open_clip("bench-tiny", str(tmp_path / "other.pt"), device)
    )
    assert other.fingerprint != subject.fingerprint
    torch.testing.assert_close(encode(other).images, 2 * first.images)
    assert sum(seen_by_other) == PICTURES

    tar = root / "test" / "0.tar"
    tar.write_bytes((root / "test" / "1.tar").read_bytes())
    changed = encode(subject)
    assert sum(seen) == 3 * PICTURES
    assert torch.equal(changed.images[: PICTURES // 2], changed.images[PICTURES // 2 :])


def test_one_set_of_pictures_is_encoded_once_for_all_its_tasks(place):
    device = torch.device("cpu")
    subject, seen = counting(
        subjects.from_open_clip("bench-tiny", str(place / "weights.pt"), device)
    )
    store = Store(None)
    reading = features.Reading(limit=20)
    for data in ("emoji", "emoji:group", "emoji:subgroup"):
        (examples,) = features.load_examples(data, subject, reading)
        found = features.encode(subject, examples, store)
        assert len(found.images) == 20
        assert len(found.texts) == {"emoji": 20, "emoji:group": 9, "emoji:subgroup": 98}[data]
    assert sum(seen) == 20


def refusal(monkeypatch, capsys, *flags: str) -> tuple[int, str]:
    """Exit code and the one line that the script says."""
    monkeypatch.setattr(sys, "argv", ["benchmark.py", *flags])
    with pytest.raises(SystemExit) as stop:
        benchmark.main()
    said = capsys.readouterr().err.strip()
    assert "\n" not in said
    return stop.value.code, said


def test_weights_that_are_not_there_and_cannot_be_fetched(monkeypatch, capsys, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    code, said = refusal(
        monkeypatch, capsys, "--model=ViT-B-32", "--pretrained=laion2b_s34b_b79k", "--data=emoji"
    )
    assert code == 1
    assert "ViT-B-32, laion2b_s34b_b79k are not on this machine" in said
    assert "https://huggingface.co/laion/CLIP-ViT-B-32-laion2B-s34B-b79K" in said
    assert "--model=local-dir:DIR" in said
    assert str(tmp_path / "hub") in said
    _, said = refusal(monkeypatch, capsys, "--model=RN50", "--pretrained=yfcc15m", "--data=emoji")
    assert "rn50-quickgelu-yfcc15m-455df137.pt and pass --model=RN50-quickgelu" in said
    _, said = refusal(monkeypatch, capsys, "--model=hf-hub:nobody/nothing", "--data=emoji")
    assert "`hf download nobody/nothing --local-dir DIR`" in said


def test_a_local_folder_is_loaded_offline(place, tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    preprocess = {"mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25]}
    content = {"model_cfg": MODEL, "preprocess_cfg": preprocess}
    (folder / "open_clip_config.json").write_text(json.dumps(content))
    (folder / "open_clip_pytorch_model.bin").write_bytes((place / "weights.pt").read_bytes())
    device = torch.device("cpu")
    local = subjects.from_open_clip(f"local-dir:{folder}", None, device)
    named = subjects.from_open_clip("bench-tiny", str(place / "weights.pt"), device)
    assert local.fingerprint != named.fingerprint  # the preprocessing differs
    texts = ["a fox", "two whales"]
    assert torch.equal(local.encode_texts(texts), named.encode_texts(texts))
    grey = local.preprocess(Image.new("RGB", (32, 32), (255, 0, 0)))
    torch.testing.assert_close(grey[:, 0, 0], torch.tensor([2.0, -2.0, -2.0]))


def test_weights_in_a_file_are_preprocessed_as_their_tags_are():
    """open_clip would give a file OpenAI's mean and std, whatever the model."""
    file = __file__  # any file that is there
    asked = published_preprocessing("ViT-B-16-SigLIP", file)
    assert asked["mean"] == asked["std"] == (0.5, 0.5, 0.5)
    assert asked["resize_mode"] == "squash"
    assert published_preprocessing("bench-tiny", file) == {}


def test_models_that_cannot_be_loaded(place, tmp_path, monkeypatch, capsys):
    model = f"--model={place / 'bench-tiny.json'}"
    code, said = refusal(
        monkeypatch, capsys, "--model=ViT-B-33", "--pretrained=x.pt", "--data=emoji"
    )
    assert code == 1
    assert "Did you mean" in said
    _, said = refusal(monkeypatch, capsys, "--model=ViT-B-32", "--data=emoji")
    assert "needs --pretrained=FILE or a tag, its weights would be random" in said
    assert "laion400m_e32" in said
    _, said = refusal(
        monkeypatch, capsys, "--model=ViT-B-32", "--pretrained=laion400m_e33", "--data=emoji"
    )
    assert "Did you mean 'laion400m_e32'?" in said
    _, said = refusal(
        monkeypatch, capsys, model, "--data=emoji", f"--pretrained={tmp_path}/gone.pt"
    )
    assert f"No such file: {tmp_path}/gone.pt" in said
    (tmp_path / "junk.pt").write_bytes(b"junk")
    _, said = refusal(
        monkeypatch, capsys, model, "--data=emoji", f"--pretrained={tmp_path}/junk.pt"
    )
    assert f"{tmp_path}/junk.pt does not hold weights of bench-tiny" in said
    torch.save({"a": torch.zeros(1)}, tmp_path / "other.pt")
    _, said = refusal(
        monkeypatch, capsys, model, "--data=emoji", f"--pretrained={tmp_path}/other.pt"
    )
    assert f"{tmp_path}/other.pt does not hold weights of bench-tiny" in said
    _, said = refusal(monkeypatch, capsys, f"--model=local-dir:{tmp_path}", "--data=emoji")
    assert f"{tmp_path} has no open_clip_config.json" in said
    _, said = refusal(
        monkeypatch, capsys, f"--model=local-dir:{tmp_path}", "--pretrained=x", "--data=emoji"
    )
    assert "--pretrained=x would be ignored" in said


def test_data_that_cannot_be_read(place, tmp_path, monkeypatch, capsys):
    flags = [f"--model={place / 'bench-tiny.json'}", f"--pretrained={place / 'weights.pt'}"]
    flags += ["--threads=1", f"--out={tmp_path / 'out'}"]

    def said(*more: str) -> str:
        code, line = refusal(monkeypatch, capsys, *flags, *more)
        assert code == 1
        return line

    assert "needs --root=FOLDER" in said("--data=clip-benchmark:wds/x")
    gone = said("--data=clip-benchmark:cifar10", f"--root={tmp_path}/gone")
    assert f"No such file or folder: {tmp_path}/gone" in gone
    none = said("--data=clip-benchmark:cifar10", f"--root={tmp_path}")
    assert "clip-benchmark cannot read cifar10" in none
    assert "--download" in none
    choice = said("--data=clip-benchmark:winoground", f"--root={tmp_path}")
    assert "is for another task (image_caption_selection)" in choice
    assert "Did you mean 'group'?" in said("--data=emoji:groups")
    assert "Did you mean 'openmoji'?" in said("--data=openmojy")
    prompts = said("--data=emoji:group", "--templates=emojis")
    assert "Did you mean 'emoji'?" in prompts
    (tmp_path / "bad.txt").write_text("a photo of a {}\n")
    bad = said("--data=emoji:group", f"--templates={tmp_path}/bad.txt")
    assert "one template per line with {c} for the class name, got 'a photo of a {}'" in bad

    root = tmp_path / "cut"
    write_data(root, "retrieval")
    content = (root / "test" / "1.tar").read_bytes()
    for share in (0.3, 0.5, 0.77, 0.9):
        (root / "test" / "1.tar").write_bytes(content[: int(share * len(content))])
        cut = said("--data=clip-benchmark:wds/x", f"--root={root}")
        assert f"The shard {root}/test/1.tar" in cut
    (root / "test" / "1.tar").unlink()
    assert f"{root}/test/1.tar" in said("--data=clip-benchmark:wds/x", f"--root={root}")
    (root / "test" / "nshards.txt").write_text("many")
    assert "expected the number of shards" in said("--data=clip-benchmark:wds/x", f"--root={root}")
    (root / "dataset_type.txt").write_text("multilabel")
    several = said("--data=clip-benchmark:wds/x", f"--root={root}")
    assert "one label per image" in several
    pickled = tmp_path / "pickled"
    write_data(pickled, "retrieval", extra="pkl")
    refused = said("--data=clip-benchmark:wds/x", f"--root={pickled}")
    assert f"{pickled}/test/0.tar: 0000.pkl cannot be decoded: Unpickling is not all" in refused
    assert not (tmp_path / "out").exists()


def test_flags_and_files_that_do_not_fit(tmp_path, monkeypatch, capsys):
    code, said = refusal(monkeypatch, capsys)
    assert code == 2
    assert "one of --run=FOLDER, --model=NAME and --embeddings=FILE" in said
    code, said = refusal(monkeypatch, capsys, "--run=x", "--pretrained=y")
    assert code == 2
    assert "--pretrained goes with --model" in said
    code, said = refusal(monkeypatch, capsys, "--run=x", "--eval-cell=imgnor")
    assert code == 2
    assert "Did you mean 'imgnorm'?" in said
    code, said = refusal(monkeypatch, capsys, "--run=x", "--eval-cell=learnable")
    assert code == 2
    assert "has no exponents" in said
    code, said = refusal(monkeypatch, capsys, "--run=x", "--captions-per-image=0")
    assert code == 2
    assert "--captions-per-image must be at least 1, got 0" in said
    np.savez(tmp_path / "half.npz", images=np.ones((3, 2), np.float32))
    code, said = refusal(monkeypatch, capsys, f"--embeddings={tmp_path}/half.npz")
    assert code == 1
    assert "half.npz holds images: expected images, texts and owner" in said
    np.savez(tmp_path / "objects.npz", images=np.array([{}], dtype=object))
    code, said = refusal(monkeypatch, capsys, f"--embeddings={tmp_path}/objects.npz")
    assert code == 1
    assert "cannot be read as arrays of numbers" in said
    (tmp_path / "junk.safetensors").write_bytes(b"junk")
    code, said = refusal(monkeypatch, capsys, f"--embeddings={tmp_path}/junk.safetensors")
    assert code == 1
    assert "damaged or no safetensors file" in said


def test_tables_show_chance_and_ties_as_one_row(place, tmp_path, capsys):
    data, root = ("clip-benchmark:wds/x",), str(place / "pairs")
    found = benchmark.run(config(place, data=data, root=root, out=str(tmp_path)))
    said = capsys.readouterr().out
    assert "image to text, the image is the query" in said
    assert "cosine = dnorm" in said
    assert "cosine = qnorm" in said
    assert f"{found['clip-benchmark:wds/x/i2t_r1']:.1%} [" in said
    assert "i2t_r1 minus cosine" in " ".join(said.split())
    assert "chance" in said


def test_help_needs_no_torch():
    code = "import crossmodal.benchmark, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["False"]


def test_a_run_is_scored_with_its_own_cell(tmp_path):
    """The same numbers as the run recorded at its end, and the square beside them."""
    from crossmodal import train_clip

    settings = {"samples": 256, "batch_size": 64, "limit": 200, "threads": 1, "device": "cpu"}
    metrics = train_clip.run(
        train_clip.Config(cell="learnable", out=str(tmp_path), progress=False, **settings)
    )
    (folder,) = (tmp_path / "train_clip").iterdir()
    found = benchmark.run(Config(run=str(folder), threads=1, device="cpu", resamples=20))
    for name in ("i2t_r1", "i2t_r10", "t2i_r5"):
        assert found[f"emoji/{name}"] == pytest.approx(metrics[f"test/{name}"], abs=1e-9), name
    got = found["emoji:group/top1"]
    assert got == pytest.approx(metrics["test/zero_shot_group"], abs=1e-9)
    (file,) = folder.glob("benchmark-*/provenance.json")
    said = json.loads(file.read_text())
    left, right = (metrics[f"train/exponent_{side}"] for side in ("left", "right"))
    assert (said["trained_with"], said["own"]) == ("learnable", f"{left:.4g},{right:.4g}")
