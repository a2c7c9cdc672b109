"""The figures that runs draw: made small, kept beside the tables, shown with claims and numbers."""

from __future__ import annotations

import html
import io
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image
from safetensors.numpy import save_file

from offsphere.analysis.captions import CAPTIONS
from offsphere.analysis.claim_file import load_claims
from offsphere.analysis.claims import board, evaluate_claims
from offsphere.analysis.digest import read_study
from offsphere.analysis.pictures import drawings, picture_of, write_pictures
from offsphere.analysis.report import CLAIMS, write_report
from offsphere.analysis.tables import RUNS, run_folders, runs_table
from offsphere.run.config import unhashed
from offsphere.run.record import open_run
from offsphere.run.scripts import Script
from offsphere.study.plan import Run
from offsphere.study.tables import write_rest, write_runs_of
from theory.lab import LabSettings, run_lab

DATE = "2026-01-02"
CASES = {"landing": {}, "separation": {}, "band": {"band/2/plain": 0.15, "band/2/least": 1e-17}}


@dataclass(frozen=True)
class Training:
    cell: str = "cosine"
    seed: int = 0
    study: str | None = unhashed(None)
    out: str = unhashed("results")


def draw_theory(out: Path, seed: int = 0) -> Run:
    """A run that drew three figures: lines, and noise in colours."""
    config = LabSettings(seed, study="theory", out=str(out))

    def measure():
        figures = {name: Figure(figsize=(4, 3)) for name in CASES}
        for name, figure in figures.items():
            axes = figure.subplots()
            if name == "separation":
                axes.imshow(np.random.default_rng(0).random((200, 200)), cmap="RdBu")
            else:
                axes.plot([1, 2, 3], label=name)
        return {k: v for numbers in CASES.values() for k, v in numbers.items()}, figures

    run_lab(config, "simplex", measure)
    script = Script("simplex.py", LabSettings, lambda config: {})
    return Run("simplex", script, config, ({"part": "optima"},))


def train(out: Path, cell: str, seed: int) -> Run:
    """A run with curves, per-example outcomes and a record of its data."""
    config = Training(cell, seed, study="cells_simclr", out=str(out))
    rng = np.random.default_rng([seed, len(cell)])
    correct = (rng.random(64) < 0.6).astype(np.float32)
    with open_run(config, script="train_simclr", out=config.out, study=config.study) as run:
        run.describe_data({"train": {"name": "emoji", "hash": "abc", "size": 64}})
        for step in (0, 5):
            run.log_step({"step": step, "train/loss": 2.0 - step / 9})
        examples = {"probe_correct": correct, "norm": rng.random(64).astype(np.float32) + 1}
        save_file(examples, run.path / "examples.safetensors")
        run.finish({"test/probe": float(correct.mean()), "train/loss": 1 / 3})
    return Run("train_simclr", Script("x.py", Training, dict), config, ({"part": "cells"},))


@pytest.fixture
def theory(tmp_path: Path) -> Path:
    folder = tmp_path / "results" / "theory"
    write_runs_of(folder, [draw_theory(tmp_path / "results")])
    write_rest(folder)
    return folder


def without_run_folders(folder: Path) -> None:
    for path in run_folders(folder):
        shutil.rmtree(path)
    assert {path.name for path in folder.iterdir()} <= {
        *(RUNS, "curves.csv.gz", "examples.parquet", "figures")
    }


def test_the_page_needs_committed_files_only(theory):
    results = theory.parent
    trained = [train(results, cell, seed) for cell in ("cosine", "dot") for seed in (0, 1, 42)]
    write_runs_of(results / "cells_simclr", trained)
    write_rest(results / "cells_simclr")
    page = write_report(results=results, date=DATE, figures=False)
    before = page.read_text()
    for folder in (theory, results / "cells_simclr"):
        without_run_folders(folder)
    assert write_report(results=results, date=DATE, figures=False).read_text() == before
    assert before.count("<img ") == len(CASES)
    found = read_study(results / "cells_simclr")
    assert found.provenance["Data, train"] == ["name emoji, hash abc, size 64"]
    assert found.provenance["numpy"] == [np.__version__]
    assert {"Python", "offsphere", "Platform", "CPU", "torch"} <= set(found.provenance)
    crossed = found.panels[0].metrics["test/probe"].crossed
    assert crossed is not None
    assert [each and each.examples for each in crossed] == [None, 64]
    assert "names no versions" not in before


def test_pictures_are_the_figures_in_fewer_bytes(theory):
    files = {file.name: file for file in (theory / "figures" / "optima").iterdir()}
    assert set(files) == {"landing.webp", "separation.webp", "band.webp"}
    (run,) = run_folders(theory)
    for name, file in files.items():
        drawn = run / f"{Path(name).stem}.png"
        assert file.stat().st_size < 0.7 * drawn.stat().st_size
        with Image.open(file) as small, Image.open(drawn) as whole:
            assert small.size == whole.size == (440, 330)
            pair = [np.asarray(x.convert("RGB"), float) for x in (small, whole)]
        assert np.abs(pair[0] - pair[1]).mean() < (10 if name == "separation.webp" else 2)


def test_a_figure_that_is_drawn_anew_takes_the_place_of_the_old_one(theory):
    home = theory / "figures" / "optima"
    (run,) = run_folders(theory)
    shutil.copy(run / "separation.png", run / "landing.png")
    (run / "band.png").rename(run / "without_caption.png")
    write_pictures(theory)
    assert sorted(file.name for file in home.iterdir()) == ["landing.webp", "separation.webp"]


def test_only_where_nothing_is_compared_and_only_one_run(tmp_path):
    results = tmp_path / "results"
    runs = [draw_theory(results, seed=seed) for seed in (3, 1)]
    write_runs_of(results / "theory", runs)
    write_rest(results / "theory")
    table = runs_table(results / "theory")
    shown = drawings(results / "theory", table)
    assert [each.name for each in shown] == ["landing", "separation", "band"]
    assert {each.file.parent.name for each in shown} == {runs[0].path.name}
    table["instances"] = [4, 8]
    assert drawings(results / "theory", table) == []
    table["instances"] = 4
    table.loc[0, "status"] = "failed"
    assert {x.file.parent.name for x in drawings(results / "theory", table)} == {runs[1].path.name}


def test_a_damaged_picture_is_named(theory):
    (run,) = run_folders(theory)
    (run / "band.png").write_bytes(b"no picture")
    damaged = drawings(theory, runs_table(theory))[-1]
    with pytest.raises(ValueError, match=r"band\.png cannot be read as a picture"):
        picture_of(damaged)


def test_the_page_carries_the_picture_its_caption_and_its_numbers(theory):
    text = write_report(results=theory.parent, date=DATE, figures=False).read_text()
    (figure,) = (
        part for part in text.split("<figure")[1:] if "figure-theory/optima/band" in part[:99]
    )
    caption = CAPTIONS["simplex", "band"]
    for words in (caption.title, caption.drawn, caption.says, "Batch size 2, InfoNCE"):
        assert words in html.unescape(figure)
    assert "<dd>0.15</dd>" in figure
    assert "<dd>1.0 × 10⁻¹⁷</dd>" in figure
    assert '<a href="#claim-mini-batch-variance">' in figure
    (row,) = (part for part in text.split("<tr ") if part.startswith('id="claim-mini-batch-var'))
    assert '<a href="#figure-theory/optima/band">' in row


def test_the_board_names_what_is_drawn(theory):
    claims = load_claims(CLAIMS)
    lines = {line.claim.id: line for line in evaluate_claims(claims, theory.parent)}
    assert lines["mini-batch-variance"].figures == ("theory/optima/band",)
    assert lines["variance-term"].figures == ()
    text = board([lines["mini-batch-variance"]])
    assert text.endswith("    drawn in: theory/optima/band\n")
    nothing = evaluate_claims(claims, theory.parent / "none")
    assert not any(line.figures for line in nothing)


def test_captions_speak_of_claims_that_exist_and_fit_the_page():
    exact = {claim.id for claim in load_claims(CLAIMS) if claim.kind == "exact"}
    for caption in CAPTIONS.values():
        assert set(caption.claims) <= exact
        assert len(caption.title) < 60
        assert caption.drawn.endswith(".")


@pytest.mark.slow
@pytest.mark.parametrize("module", ["matrix_factorization", "simplex", "norm_growth"])
def test_every_figure_of_the_theory_lane_has_a_caption_with_numbers(module, tmp_path):
    from theory import matrix_factorization, norm_growth, simplex

    small = {"users": 400, "items": 60, "rank": 10, "items_per_user": (5, 20)}
    small |= {"denoising_steps": 2, "remedy_steps": 2}
    growth = {"radii": (0.25, 0.5, 1.0), "class_runs": 1, "class_epochs": 1}
    measured = {
        "matrix_factorization": lambda: matrix_factorization.measure(
            matrix_factorization.Config(**small)
        ),
        "simplex": lambda: simplex.measure(simplex.Config(instances=4, population=6, cases=5)),
        "norm_growth": lambda: norm_growth.measure(norm_growth.Config(**growth)),
    }
    metrics, figures = measured[module]()
    assert set(figures) == {name for script, name in CAPTIONS if script == module}
    for name in figures:
        assert set(CAPTIONS[module, name].numbers) <= set(metrics)


def test_pictures_are_read_as_they_were_stored(theory):
    without_run_folders(theory)
    for drawing in drawings(theory, runs_table(theory)):
        picture = picture_of(drawing)
        assert picture.content == drawing.file.read_bytes()
        with Image.open(io.BytesIO(picture.content)) as image:
            assert image.size == (picture.width, picture.height)
        assert picture.address.startswith("data:image/webp;base64,")
