"""The shipped studies: every run's settings are accepted, and every claim finds its runs."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pandas as pd
import pytest

from crossmodal import train_clip
from offsphere.analysis.claim_file import load_claims, untrained_twin
from offsphere.analysis.gates import failed_gate
from offsphere.analysis.measuring import ended, measure
from offsphere.run.config import to_dict
from offsphere.run.scripts import Script
from offsphere.study.plan import Run, load_study, main_runs, pilot_runs
from text import train_retrieval, train_sts
from theory import matrix_factorization, norm_growth, planted, simplex
from vision import train_moco, train_simclr

ROOT = Path(__file__).parents[3]
STUDIES = sorted((ROOT / "configs" / "studies").glob("*.yaml"))
TRAINING = (train_simclr, train_moco, train_clip, train_retrieval, train_sts)
THEORY = (matrix_factorization, norm_growth, planted, simplex)
SCRIPTS = {
    module.__name__.split(".")[-1]: lambda module=module: Script(
        module.__name__, module.Config, module.run
    )
    for module in (*TRAINING, *THEORY)
}
CLAIMS = [claim for claim in load_claims(ROOT / "configs" / "claims.yaml") if claim.study]


def runs_of(file: Path, *, smoke: bool) -> list[Run]:
    study = load_study(file, SCRIPTS, smoke=smoke)
    chosen = main_runs(study, SCRIPTS, "results", lambda tune, _: tune.candidates[0])
    return chosen + pilot_runs(study, SCRIPTS, "results")


@cache
def planned(study: str) -> pd.DataFrame:
    """The table that a study will have, without its metrics."""
    file = ROOT / "configs" / "studies" / f"{study}.yaml"
    return pd.DataFrame(
        [
            {"run": run.path.name, "script": run.name, **to_dict(run.settings), **labels}
            for run in runs_of(file, smoke=False)
            for labels in run.labels
        ]
    )


def test_the_studies_of_the_design_are_there():
    assert {file.stem for file in STUDIES} >= {
        "cells_simclr",
        "cells_tuned",
        "cells_moco",
        "cells_clip",
        "cells_retrieval",
        "symmetry",
        "symmetry_scratch",
        "sts",
        "small_batch",
        "small_batch_tuned",
        "training_length",
        "clip_variance",
        "within_view",
        "variance_weight",
        "temperature",
        "scale_fairness",
        "norm_interventions",
        "theory",
        "planted",
    }


@pytest.mark.parametrize("file", STUDIES, ids=lambda file: file.stem)
def test_a_study_is_accepted_and_its_smoke_edition_needs_no_files(file: Path):
    assert load_study(file, SCRIPTS).describe.endswith(("?", ".", ")"))
    large, small = runs_of(file, smoke=False), runs_of(file, smoke=True)
    assert len(small) <= len(large)
    assert len(small) <= 32
    embedded = re.compile(r"emoji|openmoji|docstrings|None|\(\)")
    for run in small:
        for name in ("data", "data_test", "data_ood", "eval_data", "judgements"):
            assert embedded.match(str(getattr(run.settings, name, None))), run


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.id)
def test_a_claim_finds_one_run_per_seed_on_each_side(claim):
    table = planned(claim.study).copy()
    names = [name for name, _ in claim.terms]
    if claim.correlate is not None:
        starred = [*names, claim.correlate]
        names = [name.replace("*", where) for name in starred for where in "abcdefghijkl"]
    for name in [*names, *(gate.metric for gate in claim.gates if gate.metric)]:
        table[untrained_twin(name)] = 0.1
        table[name] = [1.0 + (0.37 * row + 0.61 * len(table.columns)) % 1 for row in table.index]
    table["status"] = "finished"
    # A gate that asks for what the study does not have would raise.
    failed_gate(claim, table, {})
    if claim.planned is not None:
        assert ended(claim, table) >= claim.planned
    found = measure(claim, table)
    assert found.n >= 3
    if claim.kind == "primary":
        assert found.n >= (claim.planned or 10)
        assert found.dropped == 0
