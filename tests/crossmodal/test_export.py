"""An exported run in the hands of open_clip and of clip-benchmark's own command."""

from __future__ import annotations

import io
import json
import sys
import tarfile
from pathlib import Path

import open_clip
import pyarrow.parquet as parquet
import pytest
import torch
from clip_benchmark import cli
from open_clip import pretrained
from open_clip.loss import SigLipLoss
from PIL import Image
from torchvision.transforms.v2.functional import to_pil_image

from crossmodal import benchmark
from crossmodal.captions import load_captions
from crossmodal.evaluate import embed
from crossmodal.experiment import build_objective, build_towers
from crossmodal.export import CONFIG, WEIGHTS
from crossmodal.settings import MODELS
from crossmodal.subjects import load_run
from crossmodal.train_clip import Config, run
from offsphere import cli as offsphere_cli
from offsphere.encoders.clip import registered_name
from offsphere.export import command


def exported(folder: Path, out: Path, **settings: object) -> Path:
    command.run(command.Config(run=str(folder), out=str(out), **settings), offsphere_cli.SCRIPTS)
    return out


@pytest.fixture(scope="module")
def runs(table: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A finished run of each of two cells."""
    out = tmp_path_factory.mktemp("runs")
    for cell in ("cosine", "dot"):
        run(
            Config(
                cell=cell,
                data=f"csv:{table}",
                data_test=f"csv:{table}",
                batch_size=12,
                samples=48,
                threads=1,
                out=str(out),
            )
        )
    return {folder.name.split("-")[0]: folder for folder in (out / "train_clip").iterdir()}


@pytest.mark.parametrize("model", ["tiny", "tiny_with_bias"])
def test_a_siglip_run_takes_its_bias_along(model, table, tmp_path):
    """open_clip's sigmoid loss of the exported model is the run's own."""
    if model == "tiny_with_bias":
        config = json.loads((MODELS / "tiny.json").read_text()) | {"init_logit_bias": -3.0}
        model = str(tmp_path / "tiny_with_bias.json")
        Path(model).write_text(json.dumps(config))
    data = f"csv:{table}"
    settings = Config(
        loss="siglip", model=model, data=data, data_test=data, batch_size=12, samples=24, threads=1,
        out=str(tmp_path),
    )  # fmt: skip
    run(settings)
    (folder,) = (tmp_path / "train_clip").iterdir()
    out = exported(folder, tmp_path / "clip")
    peer = open_clip.create_model(f"local-dir:{out}").eval()
    state = torch.load(folder / "checkpoint" / "last.pt", weights_only=True)["method"]
    bias = state["objective.bias"].item()
    assert abs(bias + 10) > 1e-4, "training moved it"
    objective = build_objective(settings, 36)
    kept = {k: x for k, x in state.items() if k.startswith("objective.")}
    objective.load_state_dict({k.removeprefix("objective."): x for k, x in kept.items()})
    image, text = torch.randn(2, 9, 128, generator=torch.Generator().manual_seed(0))
    unit = torch.nn.functional.normalize(image), torch.nn.functional.normalize(text)
    with torch.no_grad():
        expected = objective.eval()(image, text)["contrastive"].item()
        loss = SigLipLoss()(*unit, peer.logit_scale.exp(), peer.logit_bias).item()
    assert loss == pytest.approx(expected, rel=1e-5)


def test_a_fine_tuned_model_keeps_the_mean_and_std_of_its_published_weights(
    table, tmp_path, monkeypatch
):
    """SigLIP's are 0.5; open_clip takes OpenAI's for a file, and for towers without weights."""
    tag = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.2, 0.1)}
    monkeypatch.setitem(pretrained._PRETRAINED, "tiny", {"web": tag})
    torch.manual_seed(0)
    weights = tmp_path / "weights.pt"
    torch.save(open_clip.create_model(registered_name("tiny", MODELS)).state_dict(), weights)
    data = f"csv:{table}"
    settings = Config(
        pretrained=str(weights), data=data, data_test=data, batch_size=12, samples=12, threads=1,
        out=str(tmp_path),
    )  # fmt: skip
    trained = build_towers(settings)
    assert (trained.mean, trained.std) == (tag["mean"], tag["std"])
    run(settings)
    (folder,) = (tmp_path / "train_clip").iterdir()
    out = exported(folder, tmp_path / "clip")
    again = load_run(folder).towers
    assert (again.mean, again.std) == (tag["mean"], tag["std"])
    written = json.loads((out / CONFIG).read_text())["preprocess_cfg"]
    assert (tuple(written["mean"]), tuple(written["std"])) == (tag["mean"], tag["std"])


def test_open_clip_loads_the_same_towers_and_scale(runs, table, tmp_path):
    out = exported(runs["cosine"], tmp_path / "clip")
    model, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{out}")
    model.eval()
    trained = load_run(runs["cosine"])
    data = load_captions(f"csv:{table}", split="all", image_size=32)
    pixels = data.batch(torch.arange(36))
    texts = [text for texts in data.captions for text in texts]
    from torchvision.transforms.v2.functional import to_pil_image

    pictures = torch.stack([preprocess(to_pil_image(x)) for x in pixels])
    tokens = open_clip.get_tokenizer(f"local-dir:{out}")(texts)
    with torch.no_grad():
        torch.testing.assert_close(
            model.encode_image(pictures),
            trained.towers.encode_image(trained.towers.normalise(pixels)),
            rtol=1e-4,
            atol=1e-5,
        )
        torch.testing.assert_close(
            model.encode_text(tokens), trained.towers.encode_text(tokens), rtol=1e-4, atol=1e-5
        )
    metrics = json.loads((runs["cosine"] / "metrics.json").read_text())
    state = torch.load(runs["cosine"] / "checkpoint" / "last.pt", weights_only=True)
    scale = state["method"]["objective.log_scale"].exp() / state["method"]["objective.ratio"]
    assert model.logit_scale.exp().item() == pytest.approx(scale.item(), rel=1e-5)
    assert metrics["run/status"] == "finished"


def test_a_run_and_its_export_score_alike_on_pictures_that_are_no_squares(tmp_path):
    """Sides whose ratios and margins are odd: torchvision's rounding of crops decides on pixels."""
    draw = torch.Generator().manual_seed(0)
    rows = ["image,caption"]
    for number in range(40):
        sides = torch.randint(33, 90, (2,), generator=draw).tolist()
        noise = torch.randint(0, 256, (3, 6, 6), generator=draw, dtype=torch.uint8)
        picture = to_pil_image(noise).resize((sides[0], sides[1]), Image.Resampling.BICUBIC)
        picture.save(tmp_path / f"{number}.png")
        rows.append(f"{number}.png,number {number}")
    (tmp_path / "pairs.csv").write_text("\n".join(rows))
    data = f"csv:{tmp_path}/pairs.csv"
    metrics = run(
        Config(
            data=data, data_test=data, batch_size=20, samples=100, min_scale=1.0, threads=1,
            out=str(tmp_path / "runs"),
        )
    )  # fmt: skip
    (folder,) = (tmp_path / "runs" / "train_clip").iterdir()
    out = exported(folder, tmp_path / "clip")
    model, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{out}")
    model.eval()
    pictures = [Image.open(tmp_path / f"{number}.png") for number in range(40)]
    shown = torch.stack([preprocess(picture) for picture in pictures])
    tokens = open_clip.get_tokenizer(f"local-dir:{out}")([f"number {i}" for i in range(40)])
    with torch.no_grad():
        scores = model.encode_image(shown, normalize=True) @ model.encode_text(tokens, True).T
    right = torch.arange(40)
    for name, rows in (("i2t", scores), ("t2i", scores.T)):
        rank = (rows > rows.diagonal()[:, None]).sum(1)
        for k in (1, 5, 10):
            recall = (rank < k).double().mean().item()
            assert metrics[f"test/{name}_r{k}"] == pytest.approx(recall, abs=1e-9)
        assert 0.1 < metrics[f"test/{name}_r10"] < 0.9, "a score that could differ"
    # Our own pixels are those of its preprocessing, but for PIL's last grey level.
    ours = load_captions(data, split="all", image_size=32).batch(right).float()
    mean, std = (
        torch.tensor(x)[:, None, None]
        for x in (model.visual.preprocess_cfg["mean"], model.visual.preprocess_cfg["std"])
    )
    assert (ours - (shown * std + mean) * 255).abs().max() < 1.01


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_clip_benchmarks_own_command_agrees_with_ours(runs, table, tmp_path, monkeypatch):
    out = exported(runs["cosine"], tmp_path / "clip")
    # The pictures and captions in clip-benchmark's local form.
    root = tmp_path / "shapes"
    (root / "test").mkdir(parents=True)
    (root / "dataset_type.txt").write_text("retrieval")
    (root / "test" / "nshards.txt").write_text("1")
    data = load_captions(f"csv:{table}", split="all", image_size=32)
    with tarfile.open(root / "test" / "0.tar", "w") as archive:
        for row, key in enumerate(data.keys):
            source = table.parent / (key if key.endswith(".png") else f"{key}.png")
            archive.add(source, f"{row:03d}.png")
            text = tmp_path / "captions.txt"
            text.write_text("\n".join(data.captions[row]))
            archive.add(text, f"{row:03d}.txt")
    result = tmp_path / "theirs.json"
    words = f"clip_benchmark eval --model=local-dir:{out} --pretrained= --dataset=wds/shapes"
    words += f" --dataset_root={root} --task=zeroshot_retrieval --recall_k 1 5 --no_amp"
    words += f" --num_workers=0 --batch_size=16 --output={result}"
    monkeypatch.setattr(sys, "argv", words.split())
    cli.main()
    theirs = json.loads(result.read_text())["metrics"]
    ours = benchmark.run(
        benchmark.Config(
            run=str(runs["cosine"]), data=(f"csv:{table}",), cache=False, threads=1, resamples=10
        )
    )
    for name, value in (("i2t_r1", "text"), ("t2i_r1", "image")):
        found = theirs[f"{value}_retrieval_recall@1"]
        assert ours[f"csv:{table}/{name}"] == pytest.approx(found, abs=1e-6)


def test_a_cell_that_cosine_would_misread_is_refused_unless_asked_for(runs, tmp_path):
    said = "trained with the cell dot, but open_clip.*R@1 0.* becomes 0.*--as-cosine"
    with pytest.raises(ValueError, match=said):
        exported(runs["dot"], tmp_path / "a")
    assert not (tmp_path / "a").exists()
    out = exported(runs["dot"], tmp_path / "b", as_cosine=True)
    assert sorted(file.name for file in out.iterdir()) == [CONFIG, WEIGHTS]
    with pytest.raises(FileExistsError, match="is not empty"):
        exported(runs["dot"], out, as_cosine=True)


def test_what_is_missing_is_named(capsys):
    with pytest.raises(SystemExit) as end:
        offsphere_cli.main(["export", "--out=x"])
    said = capsys.readouterr().err
    assert end.value.code == 2
    assert said == (
        "offsphere export: error: the following arguments are required: --run (see --help)\n"
    )


@pytest.mark.filterwarnings("ignore")
def test_mtebs_own_evaluator_scores_pictures_and_texts_with_the_cell(runs, table, tmp_path):
    """Both directions: the text is the query of one task, the picture of the other."""
    mteb = pytest.importorskip("mteb", reason="the extra `interop` is not installed")
    from mteb_tasks import local_task

    from offsphere.export.mteb_model import CellModel

    out = exported(runs["dot"], tmp_path / "model", as_="mteb")
    assert "the score is q·d / (|q|^0 |d|^0)" in (out / "README.md").read_text()
    data = load_captions(f"csv:{table}", split="all", image_size=32)
    pictures = [to_pil_image(data.batch(torch.tensor([row]))[0]) for row in range(36)]
    images = {"id": [f"i{row}" for row in range(36)], "image": pictures}
    texts = [(row, text) for row, captions in enumerate(data.captions) for text in captions]
    captions = {"id": [f"t{k}" for k in range(72)], "text": [text for _, text in texts]}
    found = embed(load_run(runs["dot"]).towers, data)
    dots = found.images @ found.texts.T
    right = found.owner[None] == torch.arange(36)[:, None]
    to_image = {f"t{k}": {f"i{row}": 1} for k, (row, _) in enumerate(texts)}
    to_text: dict[str, dict[str, int]] = {}
    for k, (row, _) in enumerate(texts):
        to_text.setdefault(f"i{row}", {})[f"t{k}"] = 1
    model = CellModel(out)
    for task, scores, mask in (
        (local_task(captions, images, to_image, ("text", "image"), "t2i"), dots.T, right.T),
        (local_task(images, captions, to_text, ("image", "text"), "i2t"), dots, right),
    ):
        (result,) = mteb.evaluate(model, task, cache=None, show_progress_bar=False).task_results
        best = scores.masked_fill(~mask, -torch.inf).amax(1, keepdim=True)
        # Some of the pictures are equal: whom a tie favours is left open.
        above = (scores > best + 1e-4).sum(1)
        beside = ((scores > best - 1e-4) & ~mask).sum(1)
        for k in (1, 5, 10):
            hits = result.scores["test"][0][f"hit_rate_at_{k}"]
            least, most = ((x < k).double().mean().item() for x in (beside, above))
            assert least - 1e-5 <= hits <= most + 1e-5
            assert most - least < 0.1


def test_the_atlas_gets_pictures_norms_and_right_or_wrong(runs, tmp_path):
    out = exported(runs["dot"], tmp_path / "points.parquet", as_="atlas")
    found = parquet.read_table(out).to_pydict()
    assert found["side"] == ["image"] * 36 + ["text"] * 72
    metrics = json.loads((runs["dot"] / "metrics.json").read_text())
    right = torch.tensor(found["right"]).double()
    assert right[:36].mean().item() == pytest.approx(metrics["test/i2t_r1"], abs=1e-9)
    assert right[36:].mean().item() == pytest.approx(metrics["test/t2i_r1"], abs=1e-9)
    vectors = torch.tensor(found["vector"])
    torch.testing.assert_close(torch.tensor(found["norm"]), vectors.norm(dim=1))
    images, texts = vectors[:36].double(), vectors[36:].double()
    near = (texts @ images.T).topk(10).indices
    assert found["found"][:36] == [int((near == row).sum()) for row in range(36)]
    picture = Image.open(io.BytesIO(found["image"][3]["bytes"]))
    assert picture.size == (32, 32)
    assert found["text"][36] == found["text"][0]
