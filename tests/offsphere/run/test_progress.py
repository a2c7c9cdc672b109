"""What a command says while it works: at once, in logs too, and never nan."""

from __future__ import annotations

import sys

import pytest
import torch

from offsphere.evaluation.geometry import top_items
from offsphere.evaluation.linear_probe import linear_probe, sgd_probe
from offsphere.run import progress
from offsphere.run.progress import Work, clock, say, speaking, track


class Clock:
    """A clock that stands still unless it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def test_silence_unless_a_script_speaks(time, capsys):
    say("a fact")
    work = Work("training", 10, unit="steps")
    time.now += 1000
    work.done(5)
    work.close()
    assert capsys.readouterr() == ("", "")


def test_lines_in_a_log(time, capsys):
    with speaking():
        say("Data: 7 images.")
        work = Work("training", 100, unit="steps", start=10, per_piece=32)
        for step in range(11, 101):
            time.now += 1.0
            work.done(step, f"loss {step}" if step % 20 == 0 else "")
        work.close()
        work.close()
    said = capsys.readouterr()
    assert said.out.splitlines() == [
        "Data: 7 images.",
        "training: 15 of 100 steps, 32 samples/s, 1:25 left",
        "training: 45 of 100 steps, 32 samples/s, 0:55 left, loss 40",
        "training: 75 of 100 steps, 32 samples/s, 0:25 left, loss 60",
        "training: 100 of 100 steps, 32 samples/s, loss 100",
    ]
    assert said.err == ""


def test_the_end_is_told_once_in_a_log(time, capsys):
    with speaking():
        for _ in track(range(2), 2, "encoding"):
            time.now += 3.0
    assert capsys.readouterr().out == "encoding: 2 of 2 batches\n"


def test_quick_work_leaves_no_line(time, capsys):
    with speaking():
        assert list(track([1, 2, 3], 3, "encoding")) == [1, 2, 3]
    with speaking(work=False):
        for _ in track(range(3), 3, "encoding"):
            time.now += 100
    assert capsys.readouterr().out == ""


def test_a_bar_on_a_terminal(time, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(progress, "BAR_WIDTH", 4)
    with speaking():
        work = Work("training", 4, unit="steps", per_piece=8)
        time.now += 2.0
        work.done(1, "loss 3.2")
        work.done(2)  # too soon to be drawn
        time.now += 0.5
        work.close()
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.split("\r\x1b[2K") == [
        "",
        "training ╌╌╌╌ 0/4",
        "training ━╌╌╌ 1/4  4 samples/s  0:06 left  loss 3.2",
        "",
    ]


def test_a_bar_inside_another(time, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(progress, "BAR_WIDTH", 4)
    with speaking():
        outer = Work("measuring", 14, unit="pieces")
        outer.done(7)  # too soon to be drawn
        for _ in track(range(2), 2, "linear probe"):
            time.now += 2.0
        outer.close()
    assert capsys.readouterr().err.split("\r\x1b[2K") == [
        "",
        "measuring ╌╌╌╌ 0/14",
        "measuring 7/14  linear probe ╌╌╌╌ 0/2",
        "measuring 7/14  linear probe ━━╌╌ 1/2  0:02 left",
        "measuring 7/14  linear probe ━━━━ 2/2",
        "",
        "measuring ━━╌╌ 7/14  0:04 left",
        "",
    ]


def test_neighbours_and_probes_tell_how_far_they_are(time, capsys, monkeypatch):
    """Each tile, epoch and weight decay takes ten seconds here."""
    draw = torch.Generator().manual_seed(0)
    x, labels = torch.randn(60, 4, generator=draw), torch.arange(60) % 2
    done = Work.done

    def slowly(self, count: int, note: str = "") -> None:
        time.now += 10
        done(self, count, note)

    monkeypatch.setattr(Work, "done", slowly)
    with speaking():
        top_items(x, x, 3, query_tile=30)
        sgd_probe(x, labels, x, labels, epochs=3)
        linear_probe(x, labels, x, labels, weight_decays=(0.1, 0.01))
    told = capsys.readouterr().out.splitlines()
    assert told[:2] == ["neighbours: 1 of 2 tiles, 0:10 left", "neighbours: 2 of 2 tiles"]
    assert told[2:4] == ["linear probe: 1 of 3 epochs, 0:20 left", "linear probe: 3 of 3 epochs"]
    assert told[4:] == [
        "linear probe: 1 of 2 weight decays, 0:10 left",
        "linear probe: 2 of 2 weight decays",
    ]


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (61.4, "1:01"), (7325, "2:02:05")])
def test_clock(seconds, text):
    assert clock(seconds) == text
