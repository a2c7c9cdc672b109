"""What every module of the theory lane does around its measurement. Imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offsphere.run.command import one_line_errors
from offsphere.run.config import parse, unhashed
from offsphere.run.files import atomic_write
from offsphere.run.record import RunFolder, open_run, run_path
from offsphere.training.settings import check_setting

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    Measurement = tuple[Mapping[str, float | str], Mapping[str, Figure]]


@dataclass(frozen=True)
class LabSettings:
    """The settings that every closed form and simulation shares."""

    seed: int = 0
    """Decides every random number."""
    study: str | None = unhashed(None)
    """The folder under --out that collects the runs of one study; else the module's name."""
    out: str = unhashed("results")
    """The folder of all results."""
    resume: bool = unhashed(True)
    """A finished run is only shown again; --no-resume measures it anew."""

    def __post_init__(self) -> None:
        check_setting(self, "seed", "at least 0", self.seed >= 0)


def run_lab(
    settings: LabSettings, name: str, measure: Callable[[], Measurement]
) -> dict[str, float | str]:
    """The metrics of a run, measured now or already finished; its figures lie in its folder."""
    with open_run(settings, script=name, out=settings.out, study=settings.study) as folder:
        if folder.state == "finished" and settings.resume:
            print(f"{folder.path} is finished; --no-resume measures it anew.")
            return folder.metrics()
        try:
            metrics, figures = measure()
        except ValueError as error:
            folder.fail(str(error))
            raise
        for figure_name, figure in figures.items():
            _save(figure, figure_name, folder)
        folder.finish(dict(metrics))
        return folder.metrics()


def main(
    config_class: type[LabSettings],
    run: Callable[[Any], dict[str, float | str]],
    description: str | None,
) -> None:
    """Flags in, a table and the figures' names out; a user's mistake ends in one line, not 0."""
    name = Path(sys.argv[0]).stem
    with one_line_errors(name, "The same command measures it anew."):
        settings = parse(config_class, description=description)
        metrics = run(settings)
        _show(metrics, run_path(settings, script=name, out=settings.out, study=settings.study))


def drawing(width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Figure, Any]:
    """A figure of this size in inches and its axes: one, or an array of them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns)


def _save(figure: Figure, name: str, folder: RunFolder) -> None:
    """Write PNG and SVG; the same figure gives the same bytes."""
    import matplotlib

    def write(form: str) -> None:
        metadata = {"Date": None} if form == "svg" else None
        atomic_write(
            folder.path / f"{name}.{form}",
            lambda file: figure.savefig(file, format=form, dpi=110, metadata=metadata),
        )

    with matplotlib.rc_context({"svg.hashsalt": name}):
        write("png")
        write("svg")


def _show(metrics: dict[str, float | str], folder: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=folder.name)
    table.add_column("metric")
    table.add_column("value", justify="right")
    for name, value in metrics.items():
        if not name.startswith("run/"):
            table.add_row(name, f"{value:.6g}" if isinstance(value, float) else str(value))
    figures = ", ".join(sorted(file.name for file in folder.glob("*.png")))
    console = Console()
    console.print(table)
    console.print(f"{folder}: config.yaml, metrics.json, {figures}", soft_wrap=True)
