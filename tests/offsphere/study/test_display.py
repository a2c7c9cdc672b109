"""What a terminal says of a run."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from offsphere.run.scripts import Script
from offsphere.study.display import duration, which_run
from offsphere.study.plan import Run


@dataclass(frozen=True)
class Config:
    cell: str = "cosine"
    seed: int = 0
    out: str = "results"
    study: str = "s"
    data: str = "scifact"
    eval_data: tuple[str, ...] = ()
    limit: int | None = None


def test_a_run_is_told_by_what_varies_in_few_words():
    configs = [
        Config(eval_data=("npl", "cisi", "scifact")),
        Config("dot", 1, data="beir:x"),
        Config(limit=5, eval_data=("npl",)),
    ]
    script = Script("toy.py", Config, lambda config: {})
    runs = [Run("toy", script, config, ()) for config in configs]
    assert list(which_run(runs).values()) == [
        "data scifact, eval_data npl and 2 more",
        "data beir:x, eval_data none",
        "data scifact, eval_data npl, limit 5",
    ]


@pytest.mark.parametrize(
    ("seconds", "said"), [(45, "45 s"), (100, "2 min"), (720, "12 min"), (11_100, "3 h 5 min")]
)
def test_a_time_is_told_as_people_do(seconds, said):
    assert duration(seconds) == said
