"""The report: what it makes of a study's tables, what it writes, and that it is one safe page."""

from __future__ import annotations

import base64
import json
import math
import re
import subprocess
import sys
import zlib
from dataclasses import fields, replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special, stats

from crossmodal.train_clip import Config as ClipConfig
from offsphere.analysis import digest
from offsphere.analysis.chart_data import datasets
from offsphere.analysis.charts import drawings, page_charts, paper_charts, write_figures
from offsphere.analysis.conditions import BOOKKEEPING, steps_text, varying_settings
from offsphere.analysis.digest import published_comparisons, read_study
from offsphere.analysis.page_tables import results_table as results_page_table
from offsphere.analysis.page_tables import together_table
from offsphere.analysis.panels import read_panel
from offsphere.analysis.paper_tables import results_table
from offsphere.analysis.readings import decimals_for, mean_of, means_of, tied_columns
from offsphere.analysis.report import main, write_report
from offsphere.analysis.stats import crossed as over_both
from offsphere.analysis.tables import (
    examples_by_run,
    read_runs,
    write_runs,
)
from offsphere.analysis.tasks import outcomes_of, role_of, tasks_of
from offsphere.names import CORNERS
from offsphere.page.numbers import interval, number, plain_number
from text.train_retrieval import Config as RetrievalConfig
from text.train_sts import Config as StsConfig
from vision.train_moco import Config as MocoConfig
from vision.train_simclr import Config as SimClrConfig

DATE = "2026-01-02"
FORMS = ("pdf", "png", "svg")
HOSTILE = "</script><script>window.hacked = 1</script>"


@pytest.fixture(scope="module")
def symmetry(results: Path) -> digest.Study:
    return read_study(results / "symmetry")


@pytest.fixture(scope="module")
def written(results: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("page") / "report.html"
    return write_report(results=results, out=out, date=DATE, figures=False)


def values_of(runs: pd.DataFrame, task: str, cell: str, metric: str) -> np.ndarray:
    rows = runs.loc[(runs["task"] == task) & (runs["cell"] == cell)].sort_values(by="seed")
    return rows[metric].to_numpy(float)


class Elements(HTMLParser):
    """The elements of a page with their attributes and texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_means_differences_and_effect_sizes_are_scipys(symmetry, results):
    runs = read_runs(results / "symmetry" / "runs.csv")
    (panel,) = symmetry.panels
    metric = panel.metrics["test/ndcg10"]
    assert panel.contexts == ["task query", "task halves"]
    assert panel.levels == ["cosine", "qnorm", "dnorm", "dot"]
    assert panel.seeds == [0, 1, 42, 1337]
    for place, condition in enumerate(panel.conditions):
        task = ("query", "halves")[condition.context]
        cell = panel.levels[condition.level]
        own = values_of(runs, task, cell, "test/ndcg10")
        seen = own[~np.isnan(own)]
        expected = stats.t.interval(0.95, len(seen) - 1, seen.mean(), stats.sem(seen))
        found = metric.summary[place]
        assert (found.value, found.low, found.high) == pytest.approx(
            (seen.mean(), *expected), rel=1e-12
        )
        assert (found.n, metric.missing[place]) == (len(seen), len(own) - len(seen))
        difference = metric.difference[place]
        if cell == "cosine":
            assert difference is None
            continue
        base = values_of(runs, task, "cosine", "test/ndcg10")[~np.isnan(own)]
        interval = stats.ttest_rel(seen, base).confidence_interval(0.95)
        assert difference is not None
        bounds = (difference.low, difference.high)
        assert bounds == pytest.approx((interval.low, interval.high), rel=1e-9)
        gap = seen - base
        f = len(gap) - 1
        hedges = special.gamma(f / 2) / (math.sqrt(f / 2) * special.gamma((f - 1) / 2))
        size = metric.effect_size[place]
        assert size == pytest.approx(gap.mean() / gap.std(ddof=1) * hedges, rel=1e-9)


def test_the_square_is_the_mean_of_each_seeds_contrast(symmetry, results):
    runs = read_runs(results / "symmetry" / "runs.csv")
    square = symmetry.panels[0].metrics["test/ndcg10"].squares[1]
    cells = (
        values_of(runs, "halves", c, "test/ndcg10") for c in ("cosine", "qnorm", "dnorm", "dot")
    )
    cosine, qnorm, dnorm, dot = (x[[0, 1, 3]] for x in cells)  # dot failed for the third seed
    assert square.left.n == 3
    assert square.left.value == pytest.approx(((cosine + qnorm - dnorm - dot) / 2).mean())
    assert square.right.value == pytest.approx(((cosine + dnorm - qnorm - dot) / 2).mean())
    assert square.interaction.value == pytest.approx((cosine - qnorm - dnorm + dot).mean())


def test_differences_over_seeds_and_examples_are_crossed(symmetry, results):
    examples = examples_by_run(results / "symmetry")
    panel = symmetry.panels[0]
    metric = panel.metrics["test/ndcg10"]
    crossed = metric.crossed
    assert crossed is not None
    for place, condition in enumerate(panel.conditions):
        task, cell = ("query", "halves")[condition.context], panel.levels[condition.level]
        if cell == "cosine":
            assert crossed[place] is None
            continue
        pair = [
            np.stack(
                [
                    examples.get(f"{c}-seed{s}-{task}", {"ndcg10": np.full(50, math.nan)})["ndcg10"]
                    for s in panel.seeds
                ]
            )
            for c in (cell, "cosine")
        ]
        expected = over_both([pair[0] - pair[1]])
        assert crossed[place] == expected
        difference = metric.difference[place]
        assert difference is not None
        assert (expected.n, expected.examples) == (difference.n, 50)
        assert expected.value == pytest.approx(difference.value, abs=1e-9)
        # Another test set would move the difference too, so its standard error is larger.
        assert expected.standard_error > expected.sd / math.sqrt(expected.n)
    assert panel.metrics["test/recall100"].crossed is None


def test_an_outcome_with_another_mean_is_not_the_metric():
    seeds = [0, 1, 2]
    runs = pd.DataFrame(
        [
            {"run": f"{cell}{seed}", "status": "finished", "script": "train_simclr", "cell": cell}
            | {"seed": seed, "test/probe": 0.5}
            for cell in ("cosine", "dot")
            for seed in seeds
        ]
    )
    half = {run: {"probe_correct": np.array([0.0, 1.0] * 4)} for run in runs["run"]}
    none = pd.DataFrame({name: [] for name in ("run", "step", "name", "value")})

    def crossed(examples):
        panel = read_panel(
            "", "train_simclr", tasks_of(Path("none")), runs, None, [], none, examples
        )
        return panel.metrics["test/probe"].crossed

    found = crossed(half)
    assert [each and (each.n, each.value) for each in found or []] == [None, (3, 0.0)]
    assert crossed(half | {"dot1": {"probe_correct": np.ones(8)}}) is None
    shorter = {"dot1": {"probe_correct": np.array([0.0, 1.0])}}
    assert crossed(half | shorter) is None
    fewer = crossed({run: half[run] for run in half if run != "dot1"})
    assert [each and (each.n, each.dropped) for each in fewer or []] == [None, (2, 1)]
    assert crossed({}) is None


def test_the_mean_of_both_directions_is_a_mean_of_pairs():
    assert outcomes_of("test/mean_r1") == ("i2t_hit1", "t2i_hit1")
    assert outcomes_of("test/i2t_r5") == ("i2t_hit5",)
    assert outcomes_of("test/zero_shot_group") == ("zero_shot_group_correct",)
    assert outcomes_of("test/ndcg10") == ("ndcg10",)


def test_delta_cv_is_the_paired_ratio_of_the_queries_variation(symmetry, results):
    runs = read_runs(results / "symmetry" / "runs.csv")
    (panel,) = symmetry.panels
    for context, task in enumerate(panel.contexts):
        cv = {
            cell: values_of(runs, task.split()[1], cell, "test/norm_query_cv")
            for cell in ("dnorm", "dot")
        }
        logs = np.log(cv["dnorm"] / cv["dot"])
        logs = logs[np.isfinite(logs)]  # one run of dot failed
        reach = stats.t.ppf(0.975, len(logs) - 1) * stats.sem(logs)
        expected = np.exp([logs.mean(), logs.mean() - reach, logs.mean() + reach])
        found = panel.delta_cv[context]
        assert (found.value, found.low, found.high) == pytest.approx(expected)
        assert panel.delta_cv[context].n == len(logs)


def test_a_failed_run_is_listed_with_its_reason(symmetry):
    (failed,) = symmetry.unfinished
    assert (failed.run, failed.status, failed.seed) == ("dot-seed42-halves", "failed", "42")
    assert failed.reason.startswith("the loss is nan at step 7")
    assert (symmetry.runs, symmetry.finished) == (32, 31)


def test_ties_by_construction_share_a_column_and_name_the_query(symmetry):
    first = symmetry.panels[0].heat_maps[0]
    assert (first.metric, first.query) == ("test/ndcg10", "left")
    assert first.columns == [("cosine", "dnorm"), ("qnorm", "dot")]
    rng = np.random.default_rng(0)
    by_left = {g: rng.random((3, 2)) for g in (0.0, 1.0)}
    columns, query = tied_columns({cell: by_left[left] for cell, (left, _) in CORNERS.items()})
    assert (columns, query) == ([("cosine", "qnorm"), ("dnorm", "dot")], "right")
    free = {cell: rng.random((3, 2)) for cell in CORNERS}
    assert tied_columns(free)[1] is None
    # Two cells that happen to agree in every run do not tie by construction.
    free["dnorm"] = free["cosine"]
    assert len(tied_columns(free)[0]) == 4


def test_curves_are_means_over_seeds_against_samples(symmetry, results):
    from offsphere.analysis.tables import curves_table

    panel = symmetry.panels[0]
    table = curves_table(results / "symmetry")
    line = panel.curves["train/loss"][0]
    members = panel.conditions[line.condition].runs
    rows = table.loc[(table["name"] == "train/loss") & table["run"].isin(members)]
    means = [rows.loc[rows["step"] == step, "value"].mean() for step in (0, 10, 20)]
    assert line.x == [0.0, 80.0, 160.0]
    assert [p.value for p in line.points] == pytest.approx(means)
    assert panel.curves_over == "samples"


def test_histograms_count_every_example_of_every_seed(symmetry, results):
    panel = symmetry.panels[0]
    found = [h for h in panel.histograms if h.context == 0]
    assert [h.outcome for h in found] == ["norm_document"]
    norms = examples_by_run(results / "symmetry")
    for level, shares in found[0].shares.items():
        runs = panel.conditions[panel.condition(0, level) or 0].runs
        pooled = np.concatenate([norms[run]["norm_document"] for run in runs])
        clipped = np.clip(pooled, found[0].edges[0], found[0].edges[-1])
        counts, _ = np.histogram(clipped, found[0].edges)
        assert shares == pytest.approx(counts / 200)
        assert sum(shares) == pytest.approx(1)
        each = [norms[run]["norm_document"] for run in runs]
        cv = np.mean([x.std() / x.mean() for x in each])
        assert found[0].variation[level] == pytest.approx(cv)


def test_parts_are_compared_apart_and_batch_sizes_in_order(results):
    study = read_study(results / "small_batch")
    first, second = study.panels
    assert (first.name, second.name) == ("batch_size", "losses")
    assert (first.treatment, first.levels, first.baseline) == ("variance_weight", ["0", "30"], 0)
    assert first.contexts == ["batch_size 32", "batch_size 128", "batch_size 512"]
    assert first.along is not None
    assert first.along.factor == "batch_size"
    assert first.along.groups == [("", [(32.0, 0), (128.0, 1), (512.0, 2)])]
    gains = [x.value for x in first.metrics["test/probe"].difference if x is not None]
    assert gains == pytest.approx([0.08, 0.03, 0.0], abs=0.01)
    # The paper's line was measured with NT-Xent: it stands beside that loss only.
    table = {line.level: dict(line.points) for line in first.reference}
    assert table["0"][32.0] == 0.1649
    assert table["30"][512.0] == 0.0917
    assert second.reference == []
    assert study.hours == pytest.approx(48 * 36 / 3600)


def test_what_says_where_a_run_ran_is_no_factor():
    """Older rows of a table lack settings that came later; that must not part them."""
    for config in (SimClrConfig, MocoConfig, ClipConfig, RetrievalConfig, StsConfig):
        unhashed = {f.name for f in fields(config) if f.metadata.get("unhashed")}
        assert unhashed <= BOOKKEEPING, config


def test_a_setting_that_follows_from_others_is_no_factor():
    runs = pd.DataFrame(
        {
            "run": list("abcdef"),
            "seed": [0, 1, 0, 1, 0, 1],
            "commit": list("xyzxyz"),
            "lr": [1.0, 1.0, 2.0, 2.0, 1.0, 1.0],
            "arm": ["p", "p", "q", "q", "r", "r"],
            "decay": [0, 0, 0, 0, 1, 1],
            "data": ["cifar"] * 6,
        }
    )
    assert varying_settings(runs) == ["arm"]
    assert varying_settings(runs.drop(columns="arm")) == ["lr", "decay"]


@given(st.lists(st.lists(st.floats(-1e3, 1e3), min_size=3, max_size=3), min_size=1, max_size=5))
def test_bands_over_training_are_the_t_intervals_of_each_step(rows):
    values = np.array(rows)
    for found, column in zip(means_of(values), values.T, strict=True):
        expected = mean_of(column)
        assert (found.n, found.value) == (expected.n, pytest.approx(expected.value, abs=1e-9))
        if len(column) > 1 and column.std() > 1e-6:
            assert found.low == pytest.approx(expected.low, rel=1e-6, abs=1e-9)


def test_measures_leave_out_what_is_missing():
    values = np.array([[1.0, np.nan, np.inf], [3.0, 2.0, np.nan]])
    first, second, third = means_of(values)
    assert (first.value, first.n) == (2.0, 2)
    assert (second.value, second.n, math.isnan(second.low)) == (2.0, 1, True)
    assert (math.isnan(third.value), third.n) == (True, 0)


def test_published_ratios_are_those_of_the_printed_tables():
    found = {(c.task, c.about, c.cell): c.ratio.value for c in published_comparisons()}
    clip = ("Image and text, two-way loss", "CLIP from scratch, symmetric loss, MS-COCO", "dot")
    assert found[clip] == pytest.approx(math.log(25.1 / 38.4))
    sts = "contriever, AllNLI + STS-B, MSE with scale 0.01, STS-B test"
    assert found["Two sentences, graded similarity", sts, "qnorm"] == pytest.approx(
        math.log(0.413 / 0.788)
    )
    scratch = ("Query and document, from scratch", "contriever, from scratch 80K, BEIR(14)", "dot")
    assert found[scratch] == pytest.approx(math.log(13.37 / 24.38))


def test_ours_beside_the_papers_are_paired_log_ratios(symmetry, results):
    runs = read_runs(results / "symmetry" / "runs.csv")
    ours = [c for c in digest.compare_with_cosine([symmetry]) if c.source == "ours"]
    found = next(c for c in ours if (c.kind, c.cell) == ("asymmetric", "dot"))
    dot, cosine = (values_of(runs, "query", c, "test/ndcg10") for c in ("dot", "cosine"))
    logs = np.log(dot / cosine)
    expected = stats.t.interval(0.95, 3, logs.mean(), stats.sem(logs))
    ratio = found.ratio
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((logs.mean(), *expected))
    assert {c.kind for c in ours} == {"asymmetric", "symmetric"}


@pytest.mark.parametrize(
    ("script", "settings", "kind", "words"),
    [
        ("train_simclr", {}, "symmetric", "Left is the anchor (the query)"),
        ("train_moco", {}, "control", "no gradient"),
        ("train_clip", {"direction": "both"}, "symmetric", "each side is the query once"),
        ("train_clip", {"direction": "text_to_image"}, "asymmetric", "the text is the query"),
        ("train_retrieval", {"task": "query"}, "asymmetric", "Left is the query"),
        ("train_retrieval", {"task": "halves"}, "symmetric", "halves of the same documents"),
        ("train_retrieval", {"task": "captions"}, "symmetric", "captions of the same picture"),
        ("train_sts", {}, "symmetric", "neither is a query"),
    ],
)
def test_the_page_can_say_which_side_is_the_query(script, settings, kind, words, tmp_path):
    role = role_of(tasks_of(tmp_path), script, settings)
    assert role.kind == kind
    assert words in role.sides


def test_a_one_way_loss_is_compared_on_its_own_direction(tmp_path):
    rows = [
        {"run": f"{cell}-{direction}-{seed}", "status": "finished", "script": "train_clip"}
        | {"cell": cell, "direction": direction, "seed": seed}
        | {"test/mean_r1": 0.5, "test/i2t_r1": i2t, "test/t2i_r1": t2i}
        for cell, i2t, t2i in (("cosine", 0.4, 0.4), ("dot", 0.2, 0.1), ("qnorm", 0.5, 0.5))
        for direction in ("both", "image_to_text", "text_to_image")
        for seed in (0, 1)
    ]
    # One seed of qnorm collapsed: the other alone would make it look good.
    rows[-3]["test/i2t_r1"] = rows[-1]["test/t2i_r1"] = rows[-6]["test/mean_r1"] = 0.0
    write_runs(pd.DataFrame(rows), tmp_path / "runs.csv")
    found = {
        c.task: (c.metric, math.exp(c.ratio.value), c.setting, len(c.runs))
        for c in digest.compare_with_cosine([read_study(tmp_path)])
        if c.source == "ours"
    }
    assert found == {
        "Image and text, two-way loss": ("test/mean_r1", 1.0, "", 2),
        "Image and text, image as query": ("test/i2t_r1", pytest.approx(0.5), "", 2),
        "Image and text, text as query": ("test/t2i_r1", pytest.approx(0.25), "", 2),
    }


def test_cells_that_were_tuned_say_so(tmp_path):
    rows = [
        {"run": f"{part}-{cell}-{seed}", "status": "finished", "script": "train_simclr"}
        | {"part": part, "cell": cell, "seed": seed, "test/probe": 0.5}
        for part in ("tuned", "plain")
        for cell in ("cosine", "dot")
        for seed in (0, 1)
    ]
    write_runs(pd.DataFrame(rows), tmp_path / "runs.csv")
    choices = [
        {"for": [{"part": "tuned", "cell": cell}], "candidates": []} for cell in ("cosine", "dot")
    ]
    (tmp_path / "tuning.json").write_text(json.dumps({"choices": choices}))
    ours = digest.compare_with_cosine([read_study(tmp_path)], published=False)
    assert [(c.about, c.setting) for c in ours] == [
        (f"{tmp_path.name} · tuned", "tuned"),
        (f"{tmp_path.name} · plain", ""),
    ]


def test_numbers_have_a_real_minus_and_no_negative_zero():
    assert number(-0.12345, 3) == "−0.123"
    assert number(0.5, 2, signed=True) == "+0.50"
    assert number(0.53125, 4) == "0.5313"  # as JavaScript rounds a tie
    assert number(1.5e30, 0) == str(int(1.5e30))
    assert number(-0.0001, 2, signed=True) == "0.00"
    assert number(math.nan, 2) == number(None, 2) == number(math.inf, 2) == "–"
    assert [decimals_for([x]) for x in (0.54321, 5.4, 543.2, 54321.0, 0.001234)] == [4, 3, 1, 0, 6]


def test_numbers_by_themselves_keep_their_digits():
    assert [plain_number(x) for x in (0.0, 0.15, -2.00263, 22040.0, 1000.0)] == [
        *("0", "0.15", "−2.003", "22,040", "1000")
    ]
    assert plain_number(-2.7755e-17) == "−2.8 × 10⁻¹⁷"
    assert plain_number(3.04e12) == "3.0 × 10¹²"
    assert plain_number(math.nan) == "–"


def store(text: str, name: str) -> dict:
    (found,) = re.findall(rf'data-store="{re.escape(name)}">([^<]*)</script>', text)
    return json.loads(zlib.decompress(base64.b64decode(found)))


def test_hostile_texts_are_texts(written):
    text = written.read_text()
    found = Elements(text)
    scripts = [attributes for tag, attributes in found.found if tag == "script"]
    assert {attributes.get("type") for attributes in scripts[:-1]} == {"text/plain"}
    assert scripts[-1] == {}
    assert not any("onerror" in attributes for _, attributes in found.found)
    assert "<script>window.hacked" not in text
    levels = store(text, "hostile.0")["data"]["conditions"]["level"]
    assert levels == ["cosine", HOSTILE]
    assert text.count("window.hacked = 1&lt;/script&gt;") >= 3


def test_the_page_stands_alone_and_runs_only_its_own_script(written):
    text = written.read_text()
    found = Elements(text)
    for tag, attributes in found.found:
        assert tag not in ("link", "iframe", "object")
        assert tag == "img" or "src" not in attributes
        assert (attributes.get("src") or "data:image/").startswith("data:image/")
        assert all(not name.startswith("on") for name in attributes)
        assert (attributes.get("href") or "#").startswith("#")
    assert "url(" not in text
    assert "http://" not in re.sub(r"http://www.w3.org/(2000/svg|1999/xlink)", "", text)
    assert len(text) < 1_000_000


def test_the_page_has_what_a_reader_looks_for(written):
    found = Elements(written.read_text())
    texts = " ".join(" ".join(found.texts).split())
    for words in (
        "Does magnitude help only where the two sides play different roles?",
        "Short runs (10",
        "Is the variance term more than a temperature?",
        "Which side is the query.",
        "tie by construction: where left is the query",
        "the loss is nan at step 7 <img",
        "At the floor. These runs are not above their own untrained model",
        "dot, task halves: 3 of 3 runs",
        "qnorm, task halves: 4 of 4 runs",
        "Delta-CV. The coefficient of variation of the test queries' norms",
        "0123456789ab with uncommitted changes",
        "31 of 32 runs finished",
        "0; 1; 42; 1337",
        DATE,
    ):
        assert words in texts, words
    ids = [attributes["id"] for _, attributes in found.found if attributes.get("id")]
    assert len(ids) == len(set(ids))
    targets = [a["href"] for t, a in found.found if t == "a"]
    assert {str(target)[1:] for target in targets} <= set(ids)


def files_below(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    # A PDF has its parts, and so its table of contents, in any order.
    return {
        str(path.relative_to(folder)): b"PDF" if path.suffix == ".pdf" else path.read_bytes()
        for path in files
    }


def test_the_same_files_give_the_same_report(results, written, tmp_path):
    again = write_report(results=results, out=tmp_path / "report.html", date=DATE, figures=False)
    assert files_below(tmp_path) == files_below(written.parent)
    other = write_report(
        results=results, out=tmp_path / "other.html", date="2027-03-04", figures=False
    )
    assert other.read_text() == again.read_text().replace(DATE, "2027-03-04")


def test_tables_are_written_beside_the_page(written, symmetry):
    table = pd.read_csv(written.parent / "tables" / "symmetry" / "1-text.csv")
    metric = symmetry.panels[0].metrics["test/ndcg10"]
    assert list(table["mean"]) == [x.value for x in metric.summary]
    assert list(table["missing"]) == metric.missing
    assert list(table["difference"].dropna()) == [x.value for x in metric.difference if x]
    latex = (written.parent / "tables" / "symmetry" / "1-text.tex").read_text()
    assert latex.startswith(r"\begin{tabular}")
    assert r"nDCG@10 (\%) & nDCG@10 minus cosine (points) & seeds" in latex
    markdown = written.parent / "tables" / "symmetry" / "1-text.md"
    assert markdown.read_text().startswith("| setting | cell | nDCG@10 (%) |")


def test_the_same_study_gives_the_same_figures(symmetry, tmp_path):
    for name in ("a", "b"):
        write_figures(symmetry, tmp_path / name)
    first = files_below(tmp_path / "a")
    kinds = ("results", "square", "curves", "norms", "scored")
    assert set(first) == {f"1-text-{kind}.{form}" for kind in kinds for form in FORMS}
    assert first == files_below(tmp_path / "b")
    drawn = first["1-text-square.svg"].decode()
    metric = symmetry.panels[0].metrics["test/ndcg10"]
    for found in metric.summary:
        assert f">{100 * found.value:.2f}<" in drawn


def test_a_line_against_the_batch_size_is_drawn(results, tmp_path):
    study = read_study(results / "small_batch")
    paths = write_figures(replace(study, panels=study.panels[:1]), tmp_path)
    assert "1-batch_size-along.svg" in {path.name for path in paths}
    drawn = (tmp_path / "1-batch_size-along.svg").read_text()
    assert "Gain against batch size, paired, 95 % interval" in drawn
    assert "after 78 to 1,250 steps" in drawn
    assert "test/probe" not in drawn
    assert "hollow, dashed: published, weight 0 (CIFAR-100, 2506.09781v2 table 1)" in drawn


def test_page_and_paper_draw_from_the_same_definition(symmetry):
    (panel,) = symmetry.panels
    charts = page_charts(panel, drawings(panel))
    paper = paper_charts(panel)["results"]["hconcat"]
    assert [part["layer"] for part in paper] == [
        charts[kind]["layer"] for kind in ("values", "differences")
    ]
    data = datasets(panel)["conditions"]
    shown = [m == "test/ndcg10" for m in data["metric"]]
    means = [x for x, own in zip(data["mean"], shown, strict=True) if own]
    assert means == [float(f"{100 * x.value:.4g}") for x in panel.metrics["test/ndcg10"].summary]
    # Rows of a context stand below its heading.
    assert [x for x, own in zip(data["row"], shown, strict=True) if own] == [1, 2, 3, 4, 6, 7, 8, 9]


def test_a_table_of_another_metric_has_the_same_rows_and_columns(symmetry):
    (panel,) = symmetry.panels
    first = results_page_table(panel, "test/ndcg10")
    metric = panel.metrics["test/ndcg10"]
    assert first.name == "nDCG@10 (%)"
    rows = [row.cells for row in first.rows if row.level]
    assert [row[1] for row in rows] == [number(100 * x.value, 1) for x in metric.summary]
    both = [interval(x and x.times(100), 1, signed=True) for x in metric.crossed or []]
    assert [row[7] for row in rows] == both
    for name in panel.metrics:
        other = results_page_table(panel, name)
        assert [len(row.cells) for row in other.rows] == [len(row.cells) for row in first.rows]
        assert other.head == first.head


def test_without_claims_there_is_no_board(results, tmp_path, monkeypatch):
    monkeypatch.setattr("offsphere.analysis.report.CLAIMS", tmp_path / "none.yaml")
    out = write_report(results=results, out=tmp_path / "page.html", figures=False)
    assert "No file of claims was found" in out.read_text()


def test_the_command_writes_one_named_study(results, tmp_path, capsys):
    out = tmp_path / "one.html"
    main([str(results / "small_batch"), f"--out={out}", "--no-figures", f"--date={DATE}"])
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"{out} (")
    ids = [attributes.get("id") for _, attributes in Elements(out.read_text()).found]
    assert "study-small_batch" in ids
    assert "study-symmetry" not in ids


def test_out_may_be_a_folder(results, tmp_path):
    folder = tmp_path / "pages"
    folder.mkdir()
    out = write_report([results / "small_batch"], out=folder, figures=False)
    assert out == folder / "report.html"
    assert out.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--results={}"], "holds no study"),
        (["{}/nothing"], "nothing holds no runs"),
        (["--results={}", "--claims={}/none.yaml"], ""),
    ],
)
def test_mistakes_are_one_line_and_leave_no_page(tmp_path, argv, words, capsys):
    with pytest.raises(SystemExit) as ended:
        main([word.format(tmp_path) for word in argv])
    said = capsys.readouterr().err
    assert ended.value.code == 1
    assert said.startswith("offsphere report: error: ")
    assert words in said
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_report_imports_no_torch():
    code = (
        "import sys, offsphere.analysis.report, offsphere.analysis.page; "
        "heavy = ('torch', 'matplotlib', 'pandas', 'jinja2', 'vl_convert'); "
        "print([m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


def test_every_table_says_how_many_steps_its_figures_come_from(results, written):
    study = read_study(results / "small_batch")
    panel = study.panels[0]
    by_batch = {"32": (1250, 1250), "128": (312, 312), "512": (78, 78)}
    members = zip(panel.conditions, panel.steps, strict=True)
    assert [(panel.contexts[c.context], steps) for c, steps in members] == [
        (f"batch_size {batch}", steps) for batch, steps in by_batch.items() for _ in range(2)
    ]
    text = " ".join(" ".join(Elements(written.read_text()).texts).split())
    assert "are about networks after 78 to 1,250 steps of the optimiser" in text
    assert "4 seeds · 78 to 1,250 steps of the optimiser" in text
    table = results_table(panel, [str(panel.primary)])
    assert table["steps"].tolist() == ["1,250"] * 2 + ["312"] * 2 + ["78"] * 2
    assert steps_text(None) == ""


def test_accuracies_stand_side_by_side(results):
    panel = read_study(results / "small_batch").panels[0]
    table = together_table(panel)
    assert table is not None
    gain = panel.metrics["test/probe"].difference[1]
    assert gain is not None
    name, *cells, steps = table.rows[0].cells
    assert (name, steps) == ("variance weight 30, batch size 32", "1,250")
    assert cells == [f"{100 * gain.value:+.1f} {interval(gain.times(100), 1, signed=True)}"] * 3


@pytest.mark.parametrize(("cell", "drawn"), [("learnable", True), ("dot", False)])
def test_exponents_over_training_are_drawn_where_they_are_learned(cell, drawn):
    runs = pd.DataFrame(
        [
            {"run": f"{each}{seed}", "status": "finished", "script": "train_simclr", "seed": seed}
            | {"cell": each, "test/probe": 0.5}
            for each in ("cosine", cell)
            for seed in (0, 1)
        ]
    )
    curves = pd.DataFrame(
        [
            (f"{cell}{seed}", step, "train/exponent_left", 0.5 - 0.01 * step - 0.1 * seed)
            for seed in (0, 1)
            for step in (0, 10)
        ],
        columns=["run", "step", "name", "value"],
    )
    panel = read_panel("", "train_simclr", tasks_of(Path("none")), runs, None, [], curves, {})
    assert ("train/exponent_left" in panel.curves) == drawn
    if drawn:
        (line,) = panel.curves["train/exponent_left"]
        assert [point.value for point in line.points] == pytest.approx([0.45, 0.35])
