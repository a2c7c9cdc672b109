"""The tables of a study's folder, with the part and arm that its plan gives each run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from offsphere.study.plan import Run

if TYPE_CHECKING:
    import pandas as pd

RUNS = "runs.csv"


def write_runs_of(folder: Path, runs: Sequence[Run]) -> None:
    """Write runs.csv as the folder stands: a row per run, and one per arm if it is in several."""
    from offsphere.analysis.tables import runs_table, write_runs

    table = runs_table(folder)
    if len(table):
        write_runs(labelled(table, folder, runs), folder / RUNS)


def append_run(run: Run, runs: Sequence[Run]) -> None:
    """Add a run that has ended to runs.csv; one that was stopped before it began has no row.

    Reading all run folders again for every run would take longer and longer. What was added in the
    order of the clock is put in the order of the plan by `write_runs_of`, at the stage's end.
    """
    from offsphere.analysis.tables import append_rows, run_row

    if not (run.path / "config.yaml").exists():
        return
    row, folder = run_row(run.path), run.path.parent
    if not append_rows([row | labels for labels in run.labels], folder / RUNS):
        write_runs_of(folder, runs)


def mend_tables(folder: Path, lock: Callable[[Path], AbstractContextManager[None]]) -> None:
    """Mend what a kill left of the study's tables of runs, when nobody else is at work there."""
    from offsphere.analysis.tables import is_torn, mend

    torn = [file for file in (folder / RUNS, folder / "tuning" / RUNS) if is_torn(file)]
    if torn:
        with lock(folder):
            for file in torn:
                mend(file)


def write_rest(folder: Path) -> None:
    """Write what stands beside runs.csv: curves, per-example outcomes and figures of the runs."""
    from offsphere.analysis import tables
    from offsphere.analysis.pictures import write_pictures

    tables.write_curves(tables.curves_table(folder), folder / tables.CURVES)
    examples = tables.examples_table(folder)
    if len(examples):
        tables.write_examples(examples, folder / tables.EXAMPLES)
    write_pictures(folder)


def labelled(table: pd.DataFrame, folder: Path, runs: Sequence[Run]) -> pd.DataFrame:
    """The table in the order of the plan, with its parts and arms; then what is not in the plan."""
    import pandas as pd

    here = [run for run in runs if run.path.parent == folder]
    labels = [{"run": run.path.name, **one} for run in here for one in run.labels]
    columns = [name for name in ("part", "arm") if any(name in one for one in labels)]
    plan = pd.DataFrame(labels, columns=["run", *columns], dtype=object)
    known = table["run"].isin(plan["run"]).to_numpy(bool)
    bare = table.loc[known].drop(columns=["part", "arm"], errors="ignore")
    joined = plan.merge(bare.loc[~bare["run"].duplicated()], on="run")
    if known.all():
        return joined
    return pd.concat([joined, table.loc[~known]], ignore_index=True)


def copy_rows(source: Path, runs: Sequence[Run]) -> None:
    """Copy what another study's tables hold of these runs into the tables of their own study.

    runs.csv comes last, because a row of it says that the rest is there.
    """
    from offsphere.analysis import tables

    target, study = runs[0].path.parent, runs[0].settings.study
    names = {run.path.name for run in runs}
    target.mkdir(parents=True, exist_ok=True)
    for read, write, file in (
        (tables.curves_table, tables.write_curves, tables.CURVES),
        (tables.examples_table, tables.write_examples, tables.EXAMPLES),
    ):
        ours = read(target).query("run not in @names")
        theirs = read(source).query("run in @names")
        if len(theirs):
            write(tables.joined([ours, theirs]), target / file)
    rows = [row for row in tables.stored_rows(target / RUNS) if row["run"] not in names]
    taken = {
        row["run"]: {k: v for k, v in row.items() if k not in ("part", "arm")} | {"study": study}
        for row in tables.stored_rows(source / RUNS)
        if row["run"] in names
    }
    tables.write_runs(tables.table_of([*rows, *taken.values()]), target / RUNS)
