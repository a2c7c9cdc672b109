"""Every mistake on the command line of `offsphere` is one line with the nearest name."""

import re
import socket

import pytest

from offsphere import cli

MISTAKES = {
    "study s.yaml --worker=2": "offsphere study: error: Unknown setting '--worker'. Did you mean "
    "'--workers'",
    "study s.yaml --engine=rai": "Unknown value of --engine 'rai'. Did you mean 'ray'",
    "study": "offsphere study: error: the following arguments are required: FILE.yaml",
    "study s.yaml --workers=0": "--workers must be a whole number above 0, got 0",
    "study a.yaml b.yaml": "Unexpected 'b.yaml'",
    "study nowhere.yaml": "nowhere.yaml: cannot be read",
    "study --smoke a.yaml --out here b.yaml": "Unexpected 'b.yaml'",
    "reproduce": "offsphere reproduce: error: the following arguments are required: STUDY",
    "reproduce x --row=2": "Did you mean '--rows'",
    "report --date-of=2": "offsphere report: error: Unknown setting '--date-of'",
    "doctor planted": "planted trains nothing: expected one of train_simclr, ",
    "data --chek": "Unknown setting '--chek'.*Did you mean",
    "claims --jsn": "Unknown setting '--jsn'",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_one_line(words: str, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(words.split())
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(MISTAKES[words], line), line


@pytest.mark.parametrize("name", ["matrix_factorization", "simplex", "norm_growth", "planted"])
def test_a_seed_below_zero_is_refused(name: str):
    with pytest.raises(ValueError, match="--seed must be at least 0, got -1"):
        cli.SCRIPTS[name]().config_class(seed=-1)


def test_a_cluster_that_does_not_answer_is_told_at_once(tmp_path, monkeypatch, capsys):
    pytest.importorskip("ray", reason="Ray is the extra `cluster`")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, but nobody listens: refused at once
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{taken.getsockname()[1]}")
        monkeypatch.chdir(tmp_path)
        (tmp_path / "s.yaml").write_text("script: simplex\nseeds: [0]\n")
        with pytest.raises(SystemExit) as end:
            cli.main(["study", "s.yaml", "--engine=ray"])
    assert end.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "No Ray cluster answers at RAY_ADDRESS=127.0.0.1:" in line
    assert "within 10 seconds" in line
