"""What surrounds a measurement: folder, figures, failure, a second look."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from offsphere.run.record import RunFolder
from theory.lab import LabSettings, run_lab


@dataclass(frozen=True)
class Config(LabSettings):
    slope: float = 1.0


def measure_line(config: Config, calls: list[float]):
    def measure():
        calls.append(config.slope)
        if config.slope < 0:
            raise ValueError("slope must not be negative")
        figure = Figure()
        figure.subplots().plot([0, 1], [0, config.slope])
        return {"line/slope": config.slope}, {"line": figure}

    return measure


def folder_of(out: Path) -> Path:
    (folder,) = (out / "line").iterdir()
    return folder


def test_a_finished_run_is_only_shown_again_unless_resume_is_off(tmp_path):
    calls: list[float] = []
    config = Config(out=str(tmp_path))
    metrics = run_lab(config, "line", measure_line(config, calls))
    assert metrics["line/slope"] == 1.0
    assert metrics["run/status"] == "finished"
    assert run_lab(config, "line", measure_line(config, calls)) == metrics
    assert calls == [1.0]
    before = {kind: (folder_of(tmp_path) / f"line.{kind}").read_bytes() for kind in ("png", "svg")}
    anew = Config(out=str(tmp_path), resume=False)
    run_lab(anew, "line", measure_line(anew, calls))
    assert calls == [1.0, 1.0]
    for kind, content in before.items():
        assert (folder_of(tmp_path) / f"line.{kind}").read_bytes() == content


def test_a_failed_measurement_is_recorded_and_can_be_repeated(tmp_path):
    config = Config(slope=-1.0, out=str(tmp_path))
    for _ in range(2):
        with pytest.raises(ValueError, match="must not be negative"):
            run_lab(config, "line", measure_line(config, []))
    run = RunFolder(folder_of(tmp_path))
    assert run.state == "failed"
    assert run.metrics()["run/reason"] == "slope must not be negative"
