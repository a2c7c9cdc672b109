"""The table: what is in it is found again, and a file holds it whole."""

from __future__ import annotations

import csv
import io
import math

import pytest

from offsphere.audit.table import Row, Table
from offsphere.estimate import Estimate


def test_rows_are_found_by_what_they_are_about():
    table = Table()
    table.add("set", "a to b", "cosine", "r1", Estimate(0.5, 0.4, 0.6, 30))
    table.add("set", "a to b", "chance", "r1", Estimate(0.1))
    table.add("set", "b to a", "dot", "r1", Estimate(0.2))
    assert table.get("set", "a to b", "cosine", "r1") == Estimate(0.5, 0.4, 0.6, 30)
    assert table.get("set", "a to b", "dot", "r1") is None
    assert math.isnan(table.value("set", "a to b", "dot", "r1"))
    assert table.scores("set", "a to b", "r1") == ["cosine", "chance"]
    with pytest.raises(ValueError, match="two rows for set, a to b, cosine, r1"):
        table.add("set", "a to b", "cosine", "r1", Estimate(0.0))
    rows = list(csv.DictReader(io.StringIO(table.csv().decode())))
    assert tuple(rows[0]) == Row._fields
    assert [float(rows[0][key]) for key in ("value", "low", "high", "n")] == [0.5, 0.4, 0.6, 30]
    assert (rows[1]["value"], rows[1]["low"], rows[1]["high"]) == ("0.1", "", "")
