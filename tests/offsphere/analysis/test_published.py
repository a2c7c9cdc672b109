import itertools
import subprocess
import sys

import pandas as pd
import pytest

from offsphere.analysis import published as module
from offsphere.analysis.published import names, published
from offsphere.names import CELL_ALIASES, CELLS

COLUMNS = ["paper", "table", "encoder", "setting", "dataset", "level", "cell", "scored_with"]
COLUMNS += ["metric", "unit", "value", "std", "seeds", "note"]
NOT_KEYS = ["unit", "value", "std", "seeds", "note", "read_error"]
EXTRAS = {
    "embedding_norms_simulation": ["norm", "start_angle"],
    "embedding_similarities_table01": ["batch_size", "temperature", "variance_weight"],
    "embedding_similarities_table04": ["batch_size", "temperature", "variance_weight"],
    "embedding_similarities_table05": ["batch_size", "temperature", "variance_weight"],
    "embedding_similarities_figures_read_off_plots": [
        *("batch_size", "temperature", "variance_weight", "read_error")
    ],
}
ROWS = {
    "embedding_norms_simulation": 16,
    "embedding_similarities_figures_read_off_plots": 54,
    "embedding_similarities_table01": 10,
    "embedding_similarities_table04": 20,
    "embedding_similarities_table05": 2,
    "unit_hypersphere_table01": 72,
    "unit_hypersphere_table02": 30,
    "unit_hypersphere_table03": 40,
    "unit_hypersphere_table04": 30,
    "unit_hypersphere_table05": 8,
    "unit_hypersphere_table06": 42,
    "unit_hypersphere_table11": 30,
    "unit_hypersphere_table12": 264,
    "unit_hypersphere_table13": 264,
    "unit_hypersphere_table14": 6,
    "unit_hypersphere_table16": 54,
    "unit_hypersphere_table18": 8,
    "unit_hypersphere_table19": 460,
    "unit_hypersphere_table22": 10,
    "unit_hypersphere_table23": 28,
}
MULTI_HOP = ("HotpotQA", "2WikiMHopQA", "MuSiQue", "NovelHopQA")
MEMBERS = {
    "DL(2)": ["DL-19", "DL-20"],
    "BEIR(14)": [
        *("ArguAna", "Climate-FEVER", "CQADupStack", "DBPedia", "FEVER", "FiQA", "HotpotQA"),
        *("NFCorpus", "NQ", "Quora", "SCIDOCS", "SciFact", "TREC-COVID", "Touche-2020"),
    ],
    "BRIGHT(12)": [
        *("AOPS", "Biology", "EarthSci", "Economics", "LeetCode", "Pony", "Psychology"),
        *("Robotics", "StackOverflow", "SustLiving", "TheoremQA-Q", "TheoremQA-T"),
    ],
    "MHop(4)": list(MULTI_HOP),
}
# Half a unit of the last printed digit for the rows, another half for their average.
ROUNDING = 0.01 + 1e-9

A, B = "unit_hypersphere_table", "embedding_similarities_"
CELLS_BY_HAND = [
    (A + "01", "encoder=contriever dataset=BRIGHT(12) cell=qnorm", 12.74, 0.20),
    (A + "01", "encoder=contriever dataset=MSM-Dev setting=pretrained", 19.45, None),
    (A + "01", "encoder=retromae dataset=DL-19 cell=dnorm", 59.95, 2.01),
    (A + "02", "dataset=BEIR(14) cell=cosine", 24.38, 0.54),
    (A + "03", "dataset=BRIGHT(12) cell=qnorm metric=cohens_d setting=fine-tuned~80K", 1.02, None),
    (A + "04", "dataset=TriviaQA cell=qnorm metric=exact_match", 40.2, None),
    (A + "05", "encoder=contriever cell=s2norm", 0.371, None),
    (
        A + "06",
        "cell=txtnorm scored_with=dot metric=recall@1_text_to_image setting=text-to-image~loss",
        *(23.4, None),
    ),
    (A + "06", "cell=imgnorm metric=cohens_d_image", 5.72, None),
    (A + "11", "encoder=e5 cell=dnorm metric=best_epoch", 70.4, None),
    (A + "12", "dataset=TREC-COVID cell=qnorm", 55.06, None),
    (A + "12", "dataset=BEIR(14) cell=dot metric=recall@100", 64.34, None),
    (A + "13", "dataset=Pony cell=cosine", 0.56, None),
    (A + "13", "dataset=DL(2) cell=learnable metric=mrr@10", 89.40, None),
    (A + "14", "dataset=MHop(4)", 55.54, None),
    (A + "16", "dataset=BRIGHT(12) cell=dnorm setting=fine-tuned~500K", 11.71, None),
    (A + "18", "encoder=retromae scored_with=cosine", 0.899, None),
    (A + "19", "encoder=retromae dataset=Pony metric=delta_percent", 513, None),
    (A + "19", "encoder=retromae dataset=NFCorpus cell=dnorm metric=query_norm_cv", 7.89, None),
    (A + "22", "encoder=contriever cell=qnorm", 92.87, 1.02),
    (A + "23", "dataset=BEIR(14) cell=dnorm metric=p_value", 0.059, None),
    (B + "table01", "batch_size=32 setting=simclr+vrns", 0.1008, None),
    (B + "table04", "temperature=0.3 setting=simclr+vrns metric=top5", 93.24, None),
    (B + "table05", "setting=simclr", 51.79, None),
    (
        B + "figures_read_off_plots",
        "table=fig4 dataset=CIFAR-100 setting=dhel batch_size=256",
        *(61.7, None),
    ),
    ("embedding_norms_simulation", "norm=7", 4737, None),
]


def pick(name: str, where: str) -> pd.Series:
    """The one row of a table where `column=text` holds; ~ stands for a space, nDCG by default."""
    conditions = dict(item.split("=", 1) for item in where.split())
    frame = published(name)
    if "metric" not in conditions and "ndcg@10" in set(frame.metric):
        conditions["metric"] = "ndcg@10"
    for column, text in conditions.items():
        wanted = float(text) if column in module.NUMBERS else text.replace("~", " ")
        frame = frame[(frame[column] == wanted).fillna(False)]
    assert len(frame) == 1, f"{len(frame)} rows of {name} where {where}"
    return frame.iloc[0]


def ndcg(name: str) -> pd.DataFrame:
    """Datasets and averages down, pre-trained model and cells across."""
    frame = published(name).query("metric == 'ndcg@10'")
    return frame.pivot(index="dataset", columns=["setting", "cell"], values="value")


@pytest.mark.parametrize(("name", "where", "value", "std"), CELLS_BY_HAND)
def test_cells_checked_by_hand(name, where, value, std):
    row = pick(name, where)
    assert row.value == value
    assert pd.isna(row["std"]) if std is None else row["std"] == std


@pytest.mark.parametrize("name", ["unit_hypersphere_table12", "unit_hypersphere_table13"])
@pytest.mark.parametrize("average", MEMBERS)
def test_printed_averages_are_the_means_of_their_rows(name, average):
    table = ndcg(name)
    assert table.shape == (36, 6)
    members = MEMBERS[average]
    assert len(set(members)) == int(average.partition("(")[2].rstrip(")"))
    assert (table.loc[members].mean() - table.loc[average]).abs().max() <= ROUNDING


@pytest.mark.parametrize("name", ["unit_hypersphere_table12", "unit_hypersphere_table13"])
def test_only_one_set_of_four_gives_the_multi_hop_average(name):
    table = ndcg(name)
    rows = table.drop(index=list(MEMBERS))
    target = table.loc["MHop(4)"].to_numpy()
    values = {dataset: row.to_numpy() for dataset, row in rows.iterrows()}
    fits = [
        four
        for four in itertools.combinations(sorted(values), 4)
        if abs(sum(values[dataset] for dataset in four) / 4 - target).max() <= ROUNDING
    ]
    assert fits == [tuple(sorted(MULTI_HOP))]


def test_every_dataset_row_but_ms_marco_belongs_to_an_average():
    table = published("unit_hypersphere_table12").query("level == 'dataset'")
    assert set(table.dataset) - set().union(*MEMBERS.values()) == {"MSM-Dev"}
    assert set(MEMBERS["BEIR(14)"]) & set(MEMBERS["MHop(4)"]) == {"HotpotQA"}


@pytest.mark.parametrize("encoder", ["contriever", "retromae"])
def test_table_1_agrees_with_the_per_dataset_table_only_where_the_readme_says(encoder):
    number = {"contriever": "12", "retromae": "13"}[encoder]
    first = published(A + "01").query("encoder == @encoder")
    both = first.merge(published(A + number), on=["setting", "dataset", "cell", "metric"])
    assert len(both) == 36
    equal = (both.value_x == both.value_y).groupby(both.cell).sum()
    assert equal.to_dict() == {"": 6, "cosine": 0, "dnorm": 0, "dot": 0, "learnable": 6, "qnorm": 0}


def test_the_clip_difference_is_dot_minus_cosine_in_the_trained_direction():
    table = published(A + "06").set_index(["setting", "cell", "metric", "scored_with"]).value
    trained = {"text-to-image loss": "recall@1_text_to_image"}
    for (setting, cell), rows in table.groupby(level=["setting", "cell"]):
        rows = rows.loc[setting, cell]
        metric = trained.get(setting, "recall@1_image_to_text")
        printed = rows["recall@1_dot_minus_cosine", ""]
        assert rows[metric, "dot"] - rows[metric, "cosine"] == pytest.approx(printed, abs=1e-9)


def test_tables_1_and_23_agree():
    means = published(A + "23").query("metric == 'ndcg@10' and dataset != 'DL(2)'")
    first = published(A + "01").query("encoder == 'contriever'")
    both = means.merge(first, on=["setting", "dataset", "cell"])
    assert len(both) == 12
    assert both.value_x.to_list() == both.value_y.to_list()
    assert both.std_x.to_list() == both.std_y.to_list()


def test_steps_of_the_norm_simulation_are_quadratic():
    table = published("embedding_norms_simulation").query("setting == 'norm sweep'")
    assert (table.value / (96 * table.norm**2)).between(0.99, 1.02).all()


def test_the_files_are_the_expected_ones():
    assert {name: len(published(name)) for name in names()} == ROWS


@pytest.mark.parametrize("name", ROWS)
def test_columns_types_and_keys(name):
    table = published(name)
    extras = EXTRAS.get(name, [])
    assert list(table.columns) == [*COLUMNS[:8], *extras, *COLUMNS[8:]]
    for column in table.columns:
        dtype = module.NUMBERS.get(column)
        if dtype is None:
            assert pd.api.types.is_string_dtype(table[column])
            assert table[column].notna().all()
        else:
            assert str(table[column].dtype) == dtype
    assert table.value.notna().all()
    assert not table.duplicated([c for c in table.columns if c not in NOT_KEYS]).any()
    for column in ("paper", "table", "encoder", "setting", "dataset", "metric", "unit"):
        assert (table[column].str.strip() != "").all()
    assert set(table.level) <= {"dataset", "average"}
    assert set(table.cell) | set(table.scored_with) <= {"", *CELLS, *CELL_ALIASES}
    assert set(table.unit) <= {"1", "percent", "points", "epochs", "steps"}


@pytest.mark.parametrize("name", ROWS)
def test_values_lie_where_their_metric_can(name):
    table = published(name)
    ratios = table.metric.isin(["spearman", "p_value", "negative_similarity_variance"])
    bounded = table.metric.str.contains("ndcg|recall|mrr|exact|f1|top") & (table.unit != "points")
    top = table.unit.map({"percent": 100.0}).fillna(1.0)
    assert table.value[bounded | ratios].between(0, top[bounded | ratios]).all()
    assert (table["std"].dropna() > 0).all()
    assert set(table.seeds.dropna()) <= {1, 3}


def test_values_read_off_a_plot_carry_their_error_and_stand_alone():
    for name in names():
        table = published(name)
        read_off = "read_off_plots" in name
        assert table.table.str.startswith("fig").all() == read_off
        assert ("read_error" in table) == read_off
    figures = published("embedding_similarities_figures_read_off_plots")
    assert (figures.read_error == 1).all()


def test_a_misspelt_name_gets_the_nearest_one():
    with pytest.raises(ValueError, match=r"Did you mean 'unit_hypersphere_table12'"):
        published("unit_hypersphere_tabel12")


def test_without_the_tables_the_error_says_where_they_should_be(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "PUBLISHED", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"found none.*Install offsphere again"):
        published(A + "01")


def test_reading_imports_no_torch():
    code = (
        "import sys; from offsphere.analysis.published import published; "
        "assert 'pandas' not in sys.modules; published('unit_hypersphere_table05'); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
