"""Settings: flags, YAML files and records mean the same; mistakes explain themselves."""

import dataclasses
import shlex
import subprocess
import sys
from dataclasses import dataclass
from typing import Literal

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offsphere.run import config as config_module
from offsphere.run.config import (
    LONGEST_NAME,
    added,
    command,
    from_dict,
    load_yaml,
    parse,
    run_name,
    settings_hash,
    telling_name,
    unhashed,
)

SCRIPT = '''
from dataclasses import dataclass
from offsphere.run.config import parse, unhashed

@dataclass(frozen=True)
class Config:
    cell: str = "cosine"
    """Which sides are normalised."""
    batch_size: int = 256
    """Images per step."""
    out: str = unhashed("results")

if __name__ == "__main__":
    import sys
    print(parse(Config, description="Train one run."))
    assert "torch" not in sys.modules and "pandas" not in sys.modules
'''


@dataclass(frozen=True)
class Config:
    cell: str = "cosine"
    loss: Literal["nt_xent", "dcl", "none"] = "nt_xent"
    batch_size: int = 256
    lr: float = 0.1
    resume: bool = unhashed(True)
    download: bool = False
    loggers: tuple[str, ...] = unhashed(())
    layers: tuple[int, int] = (1, 2)
    sides: tuple[Literal["left", "right"], ...] = ("left",)
    samples: int | None = None
    data: str | None = None
    amp: bool | None = None
    eval_loss: Literal["nt_xent", "dcl"] | None = None
    seed: int = 0
    out: str = unhashed("results")

    def __post_init__(self) -> None:
        if self.batch_size < 2:
            raise ValueError(f"batch_size must be at least 2, got {self.batch_size}: raise it.")


@dataclass(frozen=True)
class Required:
    run: str
    keep: bool
    lr: float = 1.0


def refusal(capsys: pytest.CaptureFixture[str], *argv: str, config_class: type = Config) -> str:
    """The one-line message of a refused command line."""
    with pytest.raises(SystemExit) as stop:
        parse(config_class, argv)
    assert stop.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "Traceback" not in said.err
    return said.err


@pytest.mark.parametrize(
    ("argv", "changed"),
    [
        ([], {}),
        (["--batch-size=64", "--lr", "1e-3"], {"batch_size": 64, "lr": 1e-3}),
        (["--batch_size", "64"], {"batch_size": 64}),
        (["--lr=-2", "--seed", "-3"], {"lr": -2.0, "seed": -3}),
        (["--no-resume", "--download"], {"resume": False, "download": True}),
        (["--resume=false", "--download=True"], {"resume": False, "download": True}),
        (["--no-resume", "--resume"], {}),
        (["--amp"], {"amp": True}),
        (["--no-amp"], {"amp": False}),
        (["--samples=5", "--samples=null"], {}),
        (["--loss=none"], {"loss": "none"}),
        (
            ["--loggers", "a", "b", "--layers", "-3", "-4"],
            {"loggers": ("a", "b"), "layers": (-3, -4)},
        ),
        (["--loggers", "a", "--loggers"], {}),
        (["--cell=0.3,0.7", "--data=a=b"], {"cell": "0.3,0.7", "data": "a=b"}),
        (["--sides", "right", "left"], {"sides": ("right", "left")}),
        (["--eval-loss=dcl", "--eval-loss=None"], {}),
    ],
)
def test_flags(argv, changed):
    assert parse(Config, argv) == Config(**changed)


def test_a_yaml_file_in_any_position_and_flags_win(tmp_path):
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("lr: 1e-3\nbatch_size: 1_024\nseed: 3\nresume: off\nloggers: [a, b]\n")
    second.write_text("# ours\nseed: 4\nloggers: []\ndata: ~\namp: yes\n")
    wanted = Config(lr=1e-3, batch_size=8, seed=4, resume=False, amp=True)
    for argv in (
        ["--batch-size=8", f"--config={first}", "--config", str(second)],
        ["--config", str(first), str(second), "--batch-size=8"],
        ["--config", str(first), "--batch-size", "8", f"--config={second}"],
    ):
        assert parse(Config, argv) == wanted


def test_yaml_values_are_read_as_they_are_written(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text("data: 1.10\ncell: off\nlr: .inf\nseed: 010\nsamples: null\nlayers: [1, 2]\n")
    assert load_yaml(Config, file) == Config(data="1.10", cell="off", lr=float("inf"), seed=10)
    file.write_text("# every setting has its default\n")
    assert load_yaml(Config, file) == Config()


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("lr: 1\nbacth_size: 3\n", ["line 2", "'bacth_size'", "Did you mean 'batch_size'?"]),
        ("loss: ntxent\n", ["line 1", "loss", "Did you mean 'nt_xent'?"]),
        ("sides: [left, rigth]\n", ["line 1", "Did you mean 'right'?"]),
        ("eval_loss: dlc\n", ["line 1", "Did you mean 'dcl'?"]),
        ("\nlr: fast\n", ["line 2", "lr takes a number", "'fast'"]),
        ("batch_size: 2.5\n", ["line 1", "batch_size takes a whole number", "'2.5'"]),
        ("layers: [1]\n", ["line 1", "--layers"]),
        ("lr: [1, 2]\n", ["line 1", "lr takes one value"]),
        ("resume: maybe\n", ["line 1", "expected one of True, False"]),
        ("loggers: [a, --seed, 5]\n", ["line 1", "starts with '--'"]),
        ("lr: null\n", ["line 1", "lr cannot be null"]),
        ("lr: 1\nseed: 2\nlr: 2\n", ["line 3", "'lr' is set twice"]),
        ("optimizer:\n  lr: 1\n", ["line 1", "'optimizer' is nested"]),
        ("- lr\n", ["expected lines such as", "sequence"]),
        ("lr\n", ["expected lines such as", "scalar"]),
        ("lr: [1\n", ["not valid YAML", "line 2"]),
        ("batch_size: 1\n", ["at least 2, got 1"]),
    ],
)
def test_a_bad_yaml_file_is_named(tmp_path, capsys, text, parts):
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    said = refusal(capsys, f"--config={file}")
    assert all(part in said for part in [str(file), *parts]), said


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--bacth-size=3"], ["'--bacth-size'", "Did you mean '--batch-size'?"]),
        (["--loss", "ntxent"], ["--loss", "Did you mean 'nt_xent'?"]),
        (["--resume=fales"], ["--resume", "Did you mean 'False'?"]),
        (["--no-lr"], ["--no-lr"]),
        (["--lr"], ["--lr", "needs a value"]),
        (["--lr=1", "2"], ["--lr takes one value"]),
        (["--seed=x"], ["--seed", "'x'"]),
        (["64"], ["Unexpected '64'", "--name=value"]),
        (["--config"], ["--config needs a file"]),
        (["--config=missing.yaml"], ["missing.yaml cannot be read: No such file or directory ("]),
        (["--batch-size=1"], ["batch_size must be at least 2, got 1: raise it."]),
    ],
)
def test_a_bad_command_line_is_explained(capsys, argv, parts):
    said = refusal(capsys, *argv)
    assert all(part in said for part in parts), said


def test_unreadable_files_are_named(tmp_path, capsys):
    binary = tmp_path / "picture.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "picture.yaml cannot be read" in refusal(capsys, f"--config={binary}")
    assert f"{tmp_path} cannot be read" in refusal(capsys, f"--config={tmp_path}")


def test_required_fields(capsys):
    assert parse(Required, ["--run=a", "--no-keep"]) == Required(run="a", keep=False)
    assert "--keep" in refusal(capsys, "--run=a", config_class=Required)
    assert command("s.py", Required("a", True)) == "python s.py --run=a --keep"


CONFIGS = st.builds(
    Config,
    cell=st.sampled_from(["cosine", "0.3,0.7", "with space", ""]),
    loss=st.sampled_from(["nt_xent", "dcl", "none"]),
    batch_size=st.integers(2, 2**40),
    lr=st.floats(allow_nan=False),
    resume=st.booleans(),
    loggers=st.lists(st.text("abz 'é\"$", max_size=4), max_size=3).map(tuple),
    layers=st.tuples(st.integers(), st.integers()),
    samples=st.none() | st.integers(),
    data=st.none() | st.text(st.characters(categories=["L", "N", "P", "Zs"])),
    amp=st.none() | st.booleans(),
    eval_loss=st.sampled_from([None, "dcl"]),
)


@hypothesis.settings(max_examples=30)
@given(CONFIGS)
def test_every_way_out_leads_back_in(config):
    assert from_dict(Config, config_module.to_dict(config)) == config
    assert parse(Config, shlex.split(command("train.py", config))[2:]) == config


@hypothesis.settings(max_examples=30)
@given(CONFIGS)
def test_yaml_leads_back_in(config):
    text = config_module.to_yaml(config)
    assert config_module._build(Config, config_module._yaml_items(text, "config.yaml")) == config


def test_command_says_only_what_differs():
    config = Config(cell="0.3,0.7", batch_size=64, resume=False, loggers=("a b", "c"), lr=0.1)
    wanted = "python vision/train.py --cell=0.3,0.7 --batch-size=64 --no-resume --loggers 'a b' c"
    assert command("vision/train.py", config) == wanted


def test_from_dict_checks_as_flags_do():
    assert from_dict(Config, {"lr": 1, "layers": (3, 4), "amp": True}).lr == 1.0
    assert from_dict(Config, {}) == Config()
    with pytest.raises(ValueError, match=r"Unknown setting 'bacth_size'.*mean 'batch_size'"):
        from_dict(Config, {"bacth_size": 3})
    with pytest.raises(ValueError, match="batch_size takes a whole number"):
        from_dict(Config, {"batch_size": 2.0})
    with pytest.raises(ValueError, match="at least 2, got 1"):
        from_dict(Config, {"batch_size": 1})
    with pytest.raises(ValueError, match="plain values"):
        from_dict(Config, {"lr": object()})


def test_the_hash_is_the_settings_and_nothing_else():
    base = settings_hash(Config(lr=1.0))
    assert base == settings_hash(Config(lr=1)) == settings_hash(Config(lr=1.0, out="elsewhere"))
    assert base == settings_hash(Config(lr=1.0, resume=False, loggers=("wandb",)))
    shuffled = dataclasses.make_dataclass(
        "Shuffled",
        [(f.name, f.type, f) for f in reversed(dataclasses.fields(Config))],
        frozen=True,
    )
    assert settings_hash(shuffled(lr=1.0)) == base
    one_change = [{"lr": 2}, {"seed": 1}, {"cell": "dot"}, {"samples": 0}, {"layers": (2, 1)}]
    assert len({base, *(settings_hash(Config(**{"lr": 1, **c})) for c in one_change)}) == 6


def test_a_field_added_later_changes_no_name_until_it_is_used():
    before = dataclasses.make_dataclass("Before", [("seed", int, 3)], frozen=True)
    later = ("negatives", int | None, added(None))
    after = dataclasses.make_dataclass("After", [("seed", int, 3), later], frozen=True)
    assert run_name(after()) == run_name(before())
    assert run_name(after(negatives=32)) != run_name(before())


def test_the_hash_is_pinned_across_versions_and_processes():
    tiny = dataclasses.make_dataclass("Tiny", [("cell", str, "dot"), ("seed", int, 0)])
    # The first 8 digits of: printf '{"cell": "dot", "seed": 0}' | sha256sum
    assert run_name(tiny()) == "dot-seed0-66b24323"
    assert run_name(Config(cell="0.3,0.7", seed=42)).startswith("0.3_0.7-seed42-")
    # Without a cell: printf '{"seed": 0}' | sha256sum
    seeded = dataclasses.make_dataclass("Seeded", [("seed", int, 0)])
    assert run_name(seeded()) == "seed0-de7d7744"
    with pytest.raises(ValueError, match="needs a 'seed'"):
        run_name(Required("a", True))


@pytest.mark.parametrize(
    ("changes", "middle"),
    [
        ({}, ""),
        ({"data": "folder:/data/me/my images/"}, "-folder_my_images"),
        ({"data": "folder:my_images", "lr": 0.004}, "-folder_my_images-lr0.004"),
        ({"lr": 1e-05, "batch_size": 64, "loss": "dcl"}, "-loss_dcl-batch_size64-lr1e-05"),
        ({"data": "wds:shards/train-{000..001}.tar"}, "-wds_train-_000..001"),
        ({"download": True, "sides": ("left", "right")}, "-download-sides_left_right"),
        ({"data": "wds:https://me:TOKEN@host/a/x.tar?key=TOKEN/TOKEN"}, "-wds_x"),
        ({"data": "wds:https://me:TOKEN@host"}, "-wds_host"),
        ({"data": "wds:pipe:curl -H TOKEN https://host/x.tar"}, "-wds_pipe"),
        ({"data": "wds:../../x/.."}, "-wds_.."),
        ({"out": "elsewhere", "resume": False}, ""),
    ],
)
def test_a_telling_name(changes, middle):
    config = Config(seed=3, cell="dot", **changes)
    assert telling_name(config) == f"dot-seed3{middle}-{settings_hash(config)}"
    assert "TOKEN" not in telling_name(config)


def test_a_telling_name_is_bounded():
    kinds = [(f"a_rather_long_setting_{k}", int, 0) for k in range(20)]
    many = dataclasses.make_dataclass("Many", [("seed", int, 0), *kinds])
    config = many(0, *range(1, 21))
    name = telling_name(config)
    kept = "-".join(f"a_rather_long_setting_{k}{k + 1}" for k in range(3))
    assert name == f"seed0-{kept}-and_17_more-{settings_hash(config)}"
    assert len(telling_name(Config(seed=3, data="folder:" + "x" * 500))) <= LONGEST_NAME


def test_a_bare_path_is_the_data_it_plainly_is(tmp_path, monkeypatch):
    from offsphere.training.settings import ImageSettings

    monkeypatch.chdir(tmp_path)
    for name in ("pictures", "shards", "beir", "sts"):
        (tmp_path / name).mkdir()
    for name in ("shards/a.tar", "beir/corpus.jsonl", "sts/sts-train.csv", "pairs.csv", "x.txt"):
        (tmp_path / name).touch()

    def data(text: str) -> str:
        return ImageSettings(data=text, eval_split="validation").data

    assert data(f"{tmp_path}/pictures/") == f"folder:{tmp_path}/pictures"
    assert data("./pictures") == data("folder:pictures/") == "folder:pictures"
    assert data("folder:/") == "folder:/"
    assert data(f"{tmp_path}/shards") == f"wds:{tmp_path}/shards/*.tar"
    assert data(f"{tmp_path}/shards/a.tar") == f"wds:{tmp_path}/shards/a.tar"
    assert data(f"{tmp_path}/beir") == f"beir:{tmp_path}/beir"
    assert data(f"{tmp_path}/sts") == f"stsb:{tmp_path}/sts"
    assert data(f"{tmp_path}/pairs.csv") == f"csv:{tmp_path}/pairs.csv"
    for as_given in (f"{tmp_path}/x.txt", "/no/such/path", "pictures", "emoji", "folder:/a"):
        assert data(as_given) == as_given


def test_help_is_complete_and_imports_nothing_heavy(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-X", "importtime", script, "--help"]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    for part in ("Train one run.", "--batch-size", "Images per step.", "256", "--config=FILE.yaml"):
        assert part in told.stdout
    imported = {line.split("|")[-1].strip() for line in told.stderr.splitlines()}
    assert "yaml" in imported
    assert not imported & {"torch", "numpy", "pandas", "scipy", "matplotlib", "torchvision"}
    done = subprocess.run([sys.executable, script, "--cell=dot"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (
        0,
        "Config(cell='dot', batch_size=256, out='results')\n",
    )


@dataclass(frozen=True)
class Worded:
    file: str
    run: tuple[str, ...] = ()
    rows: int = 5
    smoke: bool = False


@pytest.mark.parametrize(
    "words",
    [
        "a.yaml --smoke --run=x --run=y --rows=2",
        "--smoke a.yaml --run x y --rows 2",
        "--rows 2 a.yaml --run x --smoke --run y",
        "--run=x --rows=2 --smoke --file=a.yaml --run y",
    ],
)
def test_words_without_a_flag_may_stand_anywhere(words):
    found = parse(Worded, words.split(), words=("file", "FILE.yaml"))
    assert found == Worded("a.yaml", ("x", "y"), 2, smoke=True)


def test_a_flag_that_is_a_word_of_python_has_a_field_with_an_underscore(capsys):
    @dataclass(frozen=True)
    class Export:
        as_: Literal["auto", "mteb"] = "auto"
        """The form."""
        as_cosine: bool = False

    assert parse(Export, ["--as=mteb", "--as-cosine"]) == Export("mteb", True)
    with pytest.raises(SystemExit):
        parse(Export, ["--as=mtep"], name="x")
    assert "Unknown value of --as 'mtep'. Did you mean 'mteb'?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse(Export, ["--help"])
    assert "  --as=auto|mteb" in capsys.readouterr().out
