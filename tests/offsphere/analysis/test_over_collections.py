"""Points over collections are the means of their runs' numbers."""

from __future__ import annotations

from types import SimpleNamespace

import pandas as pd
import pytest

from offsphere.analysis.over_collections import collection_plates
from offsphere.analysis.overview import paper_plate
from offsphere.page.charts import drawn

NAMES = [f"c{i}" for i in range(5)]
CELLS = ("cosine", "qnorm", "dnorm", "dot")


def study(names=NAMES, cells=CELLS) -> SimpleNamespace:
    """Two seeds of each cell; collection i has Cohen's d i and gains 2 i points by its norms."""
    rows = []
    for place, cell in enumerate(cells):
        for seed in (0, 1):
            row = {"run": f"{cell}-{seed}", "status": "finished", "cell": cell, "seed": seed}
            row |= {"run/steps": 1000, "part": "asymmetric", "arm": None}
            for i, name in enumerate(names):
                row |= {
                    f"test/{name}/cohens_d": i + seed - 0.5,
                    f"test/{name}/cohens_d_permuted": 0.0,
                    f"test/{name}/ndcg10": 0.5 - 0.1 * place,
                    f"test/{name}/ndcg10_scored_cosine": 0.4,
                    f"test/{name}/ndcg10_scored_dot": 0.4 + 0.02 * i,
                    f"test/{name}/ndcg10_permuted": 0.3,
                    f"test/{name}/norm_query_cv": 0.1 * (place + 1),
                }
            rows.append(row)
    rows += [  # another part, which was not judged on these collections
        {"run": f"{cell}-{seed}-halves", "status": "finished", "cell": cell, "seed": seed}
        | {"run/steps": 1000, "part": "halves", "arm": None}
        for cell in cells
        for seed in (0, 1)
    ]
    rows.append(rows[0] | {"run": "cut", "status": "cut", "test/c0/cohens_d": 99.0})
    return SimpleNamespace(folder=SimpleNamespace(name="static"), runs=pd.DataFrame(rows))


def test_every_collection_is_a_point_beside_its_permuted_norms():
    (name,) = plates = collection_plates([study()])
    assert name == "collections_static"
    gain, ratio = plates[name].charts
    data = gain.data["collections_gain"]
    points = list(zip(*(data[key] for key in ("cell", "name", "norms", "x", "y")), strict=True))
    for i in range(5):
        assert ("qnorm", f"c{i}", "real norms", i, pytest.approx(2 * i)) in points
        assert ("qnorm", f"c{i}", "permuted norms", 0, pytest.approx(-10)) in points
    assert len(points) == 4 * 5 * 2
    assert gain.controls["cell"][0] == "qnorm"
    assert gain.controls["setting"] == ["asymmetric (2 seeds, 1,000 steps)"]
    found = ratio.data["collections_ratio"]
    assert found["x"] == [pytest.approx(3 / 4)] * 5
    assert found["y"] == [pytest.approx(-10)] * 5
    svg = drawn(*paper_plate(plates[name]))
    assert svg.count('aria-roledescription="point"') == 2 * 5 + 5
    assert "asymmetric (2 seeds, 1,000 steps), qnorm" in svg


def test_few_collections_or_one_cell_make_less():
    assert collection_plates([study(NAMES[:4])]) == {}
    (plate,) = collection_plates([study(cells=("cosine",))]).values()
    assert [chart.title for chart in plate.charts] == ["What keeping the documents' norms is worth"]
