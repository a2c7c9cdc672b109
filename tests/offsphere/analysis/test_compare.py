"""`offsphere compare`, from outside: what it prints, writes and refuses."""

import csv
import json
from pathlib import Path

import pytest

from offsphere import cli
from offsphere.analysis.comparison import Settings, compare

HEAD = "seed,method,dataset,acc"


def table(tmp_path: Path, *lines: str, head: str = HEAD) -> str:
    path = tmp_path / "runs.csv"
    path.write_text("\n".join([head, *lines]) + "\n")
    return str(path)


@pytest.fixture
def runs(tmp_path) -> str:
    gains = (0.9, 1.1, 1.4, 0.7)
    lines = [f"{s},a,x,{70 + s}" for s in range(4)]
    return table(tmp_path, *lines, *(f"{s},b,x,{70 + s + gains[s]}" for s in range(4)))


def refusal(words: list[str], capsys) -> tuple[int, str]:
    with pytest.raises(SystemExit) as end:
        cli.main(["compare", *words])
    assert end.value.code in (1, 2)
    said = capsys.readouterr()
    assert not said.out
    (line,) = said.err.splitlines()
    return end.value.code, line


def test_a_table_is_printed(runs, capsys):
    cli.main(["compare", runs, "--arm", "method", "--metric", "acc", "--margin", "0.5"])
    answer, title, head, line, about = capsys.readouterr().out.splitlines()
    assert answer == "acc beside a: b higher (shown beyond the margin)."
    assert title == "runs.csv: acc minus that of method=a, paired by seed, margin 0.5"
    assert head.split() == [
        "method",
        "verdict",
        "difference",
        "pairs",
        "p",
        "(Holm)",
        "TOST",
        "p",
        "d_z",
        "mean",
        "a",
    ]
    # The differences 0.9, 1.1, 1.4, 0.7: mean 1.025, sd 0.2986, t(3) = 3.182.
    assert line.split("  ")[0] == "b"
    assert "shown beyond the margin  +1.025 [+0.5498, +1.5]  4 " in line
    assert line.split()[-2:] == ["72.525", "71.5"]
    assert "after Holm over this line" in about


def test_the_first_line_has_every_arm_over_all_blocks(tmp_path, capsys):
    arms = {"a": (0.0, 0.0), "low": (-3.0, 0.01), "same": (0.0, 0.01), "wild": (0.0, 4.0)}
    lines = [
        f"{s},{arm},{d},{70 + s + gain + noise * (s % 2 - 0.5)}"
        for d in "xy"
        for s in range(4)
        for arm, (gain, noise) in arms.items()
    ]
    path = table(tmp_path, *lines)
    words = [path, "--arm=method", "--metric=acc", "--block=dataset", "--margin=0.5"]
    cli.main(["compare", *words])
    answer = capsys.readouterr().out.splitlines()[0]
    assert answer.startswith(
        "acc beside a: low lower (shown beyond the margin), same equivalent, wild not settled "
        "(80 % power: n="
    )


def test_json_and_the_written_table_say_the_same(runs, tmp_path, capsys):
    out = tmp_path / "page"
    flags = [runs, "--arm=method", "--metric=acc", "--margin=0.5", f"--out={out}", "--json"]
    cli.main(["compare", *flags])
    printed = json.loads(capsys.readouterr().out)
    with (out / "comparison.csv").open() as file:
        rows = list(csv.DictReader(file))
    (found,) = compare(Settings(runs, "method", "acc", margin=0.5)).lines
    assert len(printed) == len(rows) == 1
    for name, value in printed[0].items():
        assert rows[0][name] == ("" if value is None else str(value))
    assert printed[0]["difference"] == found.difference.value
    assert printed[0]["verdict"] == found.decision.word == "shown beyond the margin"
    assert {file.name for file in out.iterdir()} == {
        *("comparison.csv", "comparison.html"),
        *("forest.svg", "forest.png", "forest.pdf"),
    }
    page = (out / "comparison.html").read_text()
    assert "b minus a." in page
    assert "shown beyond the margin: +1.025 [+0.5498, +1.5]" in page


def test_names_from_a_table_are_escaped_on_the_page(tmp_path, capsys):
    evil = "<script>window.hacked=1</script>"
    lines = [
        f"{s},{arm},x,{s + k * 0.1 * s}" for s in range(3) for k, arm in enumerate(("a", evil))
    ]
    path = table(tmp_path, *lines)
    cli.main(["compare", path, "--arm=method", "--metric=acc", f"--out={tmp_path / 'page'}"])
    page = (tmp_path / "page" / "comparison.html").read_text()
    assert evil not in page
    assert "&lt;script&gt;window.hacked" in page


@pytest.mark.parametrize(
    ("lines", "flags", "says"),
    [
        (["0,a,x,1", "0,b,x,2", "1,a,x,1"], [], "no acc with seed=1, method=b, though another arm"),
        (["0,a,x,1", "0,b,x,2", "1,a,x,1", "1,b,x,"], [], "no acc with seed=1, method=b"),
        (
            ["0,a,x,1", "0,b,x,2", "0,b,y,3", "1,a,x,1"],
            [],
            "2 rows with seed=0, method=b (rows 2, 3) differ in dataset. --where",
        ),
        (["0,a,x,1", "0,a,x,1", "0,b,x,1"], [], "differ in nothing that could tell them apart"),
        (["0,a,x,1", "0,b,x,2"], [], "1 of 1 seeds complete, an interval needs 2"),
        (["0,a,x,1", "0,b,x,inf"], [], "acc of row 2 is infinite: leave the cell of a diverged"),
        (["0,a,x,1", "0,b,x,1e300"], [], "acc of row 2 is 1e+300: leave the cell of a diverged"),
        (["0,a,x,1", "0,b,x,2"], ["--block=method"], "'method' is named twice: --arm, --metric"),
        (["0,a,x,1", "0,b,x,2"], ["--pair=acc"], "'acc' is named twice"),
        (["0,a,x,1,9", "0,b,x,2,9"], [], "Expected 4 fields in line 2, saw 5"),
        (["0,a,x,1", "0,b,x,good"], [], "acc of row 2 must be a number, got 'good'."),
        (["0,a,x,1", "0,,x,2"], [], "row 2 without method."),
        (["0,a,x,1", "1,a,x,2"], [], "'method' is a in every row: no arms."),
        (["0,a,x,1", "0,b,x,2"], ["--baseline=c"], "Unknown baseline in 'method' 'c'"),
        (["0,a,x,1", "0,b,x,2"], ["--metric=accc"], "Did you mean 'acc'?"),
        (["0,a,x,1", "0,b,x,2"], ["--block=data"], "Unknown column for --block 'data'"),
        (["0,a,x,1", "0,b,x,2"], ["--where=dataset"], "--where takes column=value, got 'dataset'"),
        (["0,a,x,1", "0,b,x,2"], ["--where=dataset=z"], "no run with dataset=['z']"),
        (["0,a,x,1", "0,b,all,2"], ["--block=dataset"], "a block cannot be called 'all'"),
        (["0,a,x,1", "0,b,x,2"], ["--margin=0"], "A margin must be above 0, got 0.0."),
        (["0,a,x,1", "0,b,x,2"], ["--margin=big"], "--margin takes a number, got 'big'."),
        ([], [], "holds no rows: expected one for each run."),
    ],
)  # fmt: skip
def test_what_is_refused(lines, flags, says, tmp_path, capsys):
    path = table(tmp_path, *lines)
    words = [path, "--arm=method", "--metric=acc", *flags, f"--out={tmp_path / 'page'}"]
    _, said = refusal(words, capsys)
    assert says in said
    assert not (tmp_path / "page").exists()


def test_a_run_that_did_not_finish_is_refused_by_its_row(tmp_path, capsys):
    lines = [f"{s},{m},{'crashed' if (s, m) == (1, 'b') else 'finished'},{s}" for s in (0, 1, 2)
             for m in "ab"]  # fmt: skip
    path = table(tmp_path, *lines, head="seed,method,State,acc")
    _, said = refusal([path, "--arm=method", "--metric=acc"], capsys)
    assert "1 of the runs have not finished (row 4: State=crashed)." in said
    assert "--where State=finished leaves them out." in said
    flags = ["--arm=method", "--metric=acc", "--where=State=finished", "--drop-unpaired"]
    cli.main(["compare", path, *flags])
    assert "2 (1 dropped)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("runs.xlsx", b"", "expected a table of runs (.csv, .tsv, .parquet, .json, .jsonl) or"),
        ("runs.csv", b"seed,m\xe9thode\n0,a\n", "runs.csv is not UTF-8 (byte 6 is 0xe9)"),
        ("runs.jsonl", b'{"a": "\xe9"}', "runs.jsonl is not UTF-8"),
        ("runs.tsv", b"", "cannot be read: No columns"),
        ("runs.parquet", b"PAR1", "cannot be read: "),
        ("runs.csv", b"seed,acc,acc\n0,1,2\n", "the header has 'acc' more than once: rename one"),
        ("runs.csv", b"seed;method;acc\n0;a;1\n", "expected ',' between columns, got ';'"),
        ("runs.json", b'{"a": 1}', 'expected rows such as {"seed": 0'),
        ("runs.jsonl", b'{"a": 1}\n{', "cannot be read: "),
    ],
)
def test_a_file_that_is_no_table(name, content, says, tmp_path, capsys):
    (tmp_path / name).write_bytes(content)
    _, said = refusal([str(tmp_path / name), "--arm=method", "--metric=acc"], capsys)
    assert says in said


def test_a_table_that_is_not_there(tmp_path, capsys):
    flags = ["--arm=method", "--metric=acc"]
    said = refusal([f"{tmp_path}/nowhere.csv", *flags], capsys)[1]
    assert "nowhere.csv cannot be read (No such file or directory)." in said
    (tmp_path / "taken").write_text("mine")
    said = refusal([f"{tmp_path}/x.csv", *flags, f"--out={tmp_path}/taken"], capsys)[1]
    assert "taken is a file, expected a folder." in said
    said = refusal([f"{tmp_path}/x.csv", *flags, "--out="], capsys)[1]
    assert "--out is empty: expected a folder's name." in said
    assert "holds no runs" in refusal([str(tmp_path), *flags], capsys)[1]
    assert refusal(flags, capsys)[0] == 2
    assert "required: --arm" in refusal([f"{tmp_path}/x.csv", "--metric=acc"], capsys)[1]
