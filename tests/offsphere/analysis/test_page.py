"""The page of one study: its own answer first, in its own folder, and nothing else touched."""

from __future__ import annotations

import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest

from offsphere.analysis.answer import answers, sentence
from offsphere.analysis.digest import read_study
from offsphere.analysis.page import _facts
from offsphere.analysis.paper_tables import as_latex, paper_table
from offsphere.analysis.report import main, write_report
from offsphere.analysis.tables import write_runs
from offsphere.analysis.words import mean_and_interval, plain, spoken, words_of
from offsphere.estimate import Estimate
from offsphere.run import progress

DATE = "2026-01-02"


def study(folder: Path, gains: dict[str, list[float]]) -> Path:
    """A study of cells whose probe accuracies differ from cosine's by these numbers, by seed."""
    rows = [
        {"run": f"{cell}{seed}", "status": "finished", "script": "train_simclr", "cell": cell}
        | {"seed": seed, "test/probe": 0.5 + 0.1 * seed + gain, "test/knn": 0.25, "train/loss": 2.5}
        for cell, found in ({"cosine": [0.0] * len(next(iter(gains.values())))} | gains).items()
        for seed, gain in enumerate(found)
    ]
    folder.mkdir(parents=True)
    write_runs(pd.DataFrame(rows), folder / "runs.csv")
    return folder


def test_data_keep_their_underscores():
    given = "batch_size 16, data folder:my_images, limit none"
    assert plain(given) == "batch size 16, data folder:my_images, limit none"


@pytest.mark.parametrize(("hours", "text"), [(0.2, "12 min"), (1.25, "1.2 h")])
def test_the_time_of_a_short_study_is_told_in_minutes(hours, text):
    facts = _facts([SimpleNamespace(runs=2, finished=1, hours=hours)], DATE, own=True)  # type: ignore
    assert facts == {"Runs finished": "1 of 2", "Training time": text, "Written": DATE}


def bytes_below(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    # A PDF has its parts, and so its table of contents, in any order.
    return {
        str(path.relative_to(folder)): b"PDF" if path.suffix == ".pdf" else path.read_bytes()
        for path in files
    }


def test_a_study_has_its_page_in_its_own_folder_and_nothing_else_changes(results, tmp_path):
    root = tmp_path / "results"
    shutil.copytree(results, root)
    for name in ("report.html", "README.md", "figures/symmetry.png", "tables/x.csv"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("committed")
    before = bytes_below(root)
    page = write_report([root / "small_batch"], date=DATE)
    assert page == root / "small_batch" / "report.html"
    after = bytes_below(root)
    assert {name: after[name] for name in before} == before
    new = set(after) - set(before)
    assert all(name.startswith("small_batch/") for name in new)
    kinds = {Path(name).suffix for name in new}
    assert kinds == {".html", ".csv", ".md", ".tex", ".pdf", ".png", ".svg"}
    assert (root / "small_batch" / "tables" / "1-batch_size.tex").is_file()
    assert (root / "small_batch" / "figures" / "1-batch_size-along.pdf").is_file()
    # Made again, from a folder that now holds a page, it is the same.
    write_report([root / "small_batch"], date=DATE)
    assert bytes_below(root) == after


def test_its_answer_comes_first_and_papers_only_when_asked_for(results, tmp_path):
    out = tmp_path / "page.html"
    text = write_report([results / "small_batch"], out=out, date=DATE, figures=False).read_text()
    first = text[text.index("<header") : text.index("</header>")]
    assert "<h1>small_batch</h1>" in first
    assert "variance weight 30 is above variance weight 0: +8." in first
    assert text.index("</header>") < text.index('id="study-small_batch"')
    for absent in ("2506.09781v2", "2602.09229v1", 'id="board"', "When does embedding magnitude"):
        assert absent not in text, absent
    asked = write_report([results / "small_batch"], out=out, figures=False, published=True)
    assert "2506.09781v2" in asked.read_text()
    assert 'id="board"' in asked.read_text()
    retrieval = write_report([results / "symmetry"], out=out, figures=False).read_text()
    assert "Delta-CV" in retrieval
    assert "Published for SciFact" not in retrieval
    assert "2602.09229v1" not in retrieval


def test_withdrawn_studies_are_named_and_not_drawn(results, tmp_path):
    root = tmp_path / "results"
    shutil.copytree(results, root)
    whole = write_report(results=root, out=tmp_path / "whole.html", date=DATE, figures=False)
    assert "symmetry · text" in whole.read_text()
    (root / "withdrawn.yaml").write_text("reason: Begun only\nstudies: [symmetry, unknown]\n")
    text = write_report(results=root, date=DATE).read_text()
    assert (root / "figures" / "small_batch").is_dir()
    assert not (root / "figures" / "symmetry").exists()
    assert "Withdrawn, not drawn here: symmetry. Begun only." in text
    assert 'id="study-symmetry"' not in text
    assert 'data-store="symmetry.0"' not in text
    assert 'id="study-small_batch"' in text
    assert "symmetry · text" not in text  # nor is it among the cells of all studies
    # Its tables are made, and its own page has it.
    assert (root / "tables" / "symmetry" / "1-text.csv").is_file()
    own = write_report([root / "symmetry"], date=DATE, figures=False).read_text()
    assert 'id="study-symmetry"' in own
    (root / "withdrawn.yaml").write_text("[symmetry]")
    with pytest.raises(ValueError, match="must have `studies`"):
        write_report(results=root, date=DATE, figures=False)


def test_the_sentence_says_what_is_shown_and_what_is_not(tmp_path):
    gains = {"dot": [-0.03, -0.02, -0.04], "qnorm": [0.011, -0.012, 0.001]}
    found = read_study(study(tmp_path / "x", gains))
    (answer,) = answers(found)
    dot = r"dot is below cosine: -3\.0 \[-5\.5, -0\.5\] points, 3 seeds"
    assert re.search(dot, answer.text)
    assert "no difference to cosine is shown for qnorm" in answer.text
    assert re.search(r"3 seeds would show \d+\.\d points or more, with 80 % power", answer.text)
    assert answer.text.startswith("linear probe accuracy: ")


def test_one_seed_shows_nothing(tmp_path):
    found = read_study(study(tmp_path / "x", {"dot": [0.1]}))
    assert sentence(found.panels[0], 0) == (
        "linear probe accuracy: dot against cosine: +10.0 points, 1 seed; an interval needs two "
        "seeds or more."
    )
    alone = replace(found.panels[0], treatment=None)
    assert sentence(alone, 0).startswith("Nothing is compared: linear probe accuracy (%) 50.0")


def test_several_studies_need_a_place_for_their_page(results, capsys):
    with pytest.raises(SystemExit) as ended:
        main([str(results / "small_batch"), str(results / "symmetry")])
    assert ended.value.code == 1
    assert "--out=FILE.html" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["configs/studies/sts.yaml"])
    assert "expected the folder with a study's runs, such as results/sts" in capsys.readouterr().err


def test_an_interrupt_is_one_line_and_leaves_the_old_page(results, tmp_path, capsys, monkeypatch):
    out = tmp_path / "page.html"
    out.write_text("old")

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("offsphere.analysis.report.write_figures", interrupted)
    with pytest.raises(SystemExit) as ended:
        main([str(results / "hostile"), f"--out={out}"])
    assert ended.value.code == 130
    assert capsys.readouterr().err == "offsphere report: interrupted. No page was written.\n"
    assert out.read_text() == "old"
    assert not list(tmp_path.rglob(".*"))


def test_a_papers_table_has_one_cell_per_number_in_points(tmp_path):
    gains = {"dot": [-0.03, -0.02, -0.04]}
    panel = read_study(study(tmp_path / "x", gains)).panels[0]
    latex = as_latex(paper_table(panel, ["test/probe", "train/loss"])).splitlines()
    head = r"cell & linear probe accuracy (\%) & linear probe accuracy minus cosine (points) & "
    assert latex[0] == r"\begin{tabular}{lllllll}"
    assert (
        latex[2] == head + r"loss, in training & loss, in training minus cosine & seeds & steps \\"
    )
    # 50, 60, 70: t(2) = 4.3027, s / sqrt(3) = 5.7735; 47, 58, 66: s = 9.5394.
    cosine, dot = latex[4], latex[5]
    assert cosine.startswith(r"cosine & 60.0 [35.2, 84.8] &  & 2.50")
    assert dot.startswith(r"dot & 57.0 [33.3, 80.7] & $-$3.0 [$-$5.5, $-$0.5] & 2.50")
    assert re.search(r"& 3 & [\d,]* \\\\$", dot)


def test_chosen_metrics_are_those_of_the_tables(tmp_path, capsys):
    folder = study(tmp_path / "x", {"dot": [0.01, 0.02]})
    main([str(folder), "--no-figures", "--metrics=test/knn,train/loss"])
    table = pd.read_csv(folder / "tables" / "1-train_simclr.csv")
    assert list(table["metric"]) == ["test/knn"] * 2 + ["train/loss"] * 2
    assert "kNN accuracy" in (folder / "tables" / "1-train_simclr.tex").read_text()
    with pytest.raises(SystemExit) as ended:
        main([str(folder), "--no-figures", "--metrics=test/kn"])
    assert ended.value.code == 1
    assert "Unknown metric 'test/kn'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("metric", "titled", "unit"),
    [
        ("test/probe", "linear probe accuracy (%)", " points"),
        ("test/i2t_r5", "image-to-text R@5 (%)", " points"),
        ("test/docstrings/ndcg10", "nDCG@10, docstrings (%)", " points"),
        ("test/zero_shot_group", "zero-shot accuracy (group) (%)", " points"),
        ("train/negative_variance", "variance of negatives' similarities, in training", ""),
        ("test/norm_query_cv", "variation of norms (CV, query)", ""),
        ("untrained/probe", "linear probe accuracy, untrained (%)", " points"),
        ("band/2/plain", "plain, 2, band", ""),
        ("test/probes", "probes", ""),
    ],
)
def test_metrics_in_words(metric, titled, unit):
    assert (words_of(metric).titled, words_of(metric).unit) == (titled, unit)


def test_cells_have_no_negative_zero_and_no_interval_that_is_not_there():
    assert mean_and_interval(Estimate(-0.04, -0.2, 0.01, 3), 1, signed=True) == "0.0 [-0.2, 0.0]"
    assert mean_and_interval(Estimate(1.0, math.nan, math.nan, 1), 2) == "1.00"
    assert mean_and_interval(Estimate(math.nan, math.nan, math.nan, 0), 2) == ""
    assert mean_and_interval(None, 2) == ""


def test_figures_have_words_for_labels(results, tmp_path):
    found = read_study(results / "symmetry")
    from offsphere.analysis.charts import write_figures

    write_figures(found, tmp_path)
    for kind in ("results", "square", "curves", "scored", "norms"):
        drawn = (tmp_path / f"1-text-{kind}.svg").read_text()
        texts = re.findall(r"<text[^>]*>([^<]*)</text>", drawn)
        assert texts
        assert not [text for text in texts if "_" in text or "test/" in text or "train/" in text]
        assert (tmp_path / f"1-text-{kind}.pdf").read_bytes().startswith(b"%PDF")
    metric = spoken(found.panels[0].metrics["test/ndcg10"])
    assert metric.summary[0].value == 100 * found.panels[0].metrics["test/ndcg10"].summary[0].value


def test_a_report_tells_how_far_it_is(results, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(progress, "LOG_SECONDS", (0.0, 0.0))
    main([f"--results={results}", f"--out={tmp_path / 'page.html'}", "--no-figures"])
    said = capsys.readouterr().out
    assert "Reading: 1 of 4 studies" in said
    assert "Reading: 4 of 4 studies" in said
