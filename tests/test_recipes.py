"""Every recipe of configs/ says how it is run, is read by that script, and is listed."""

import re
from pathlib import Path

import open_clip
import pytest

from crossmodal import train_clip
from offsphere.run.config import load_yaml
from text import train_retrieval, train_sts
from vision import train_moco, train_simclr

CONFIGS = Path(__file__).parents[1] / "configs"
SCRIPTS = {
    "vision/train_simclr": train_simclr.Config,
    "vision/train_moco": train_moco.Config,
    "crossmodal/train_clip": train_clip.Config,
    "text/train_retrieval": train_retrieval.Config,
    "text/train_sts": train_sts.Config,
}
COMMAND = re.compile(r"^# python (\w+/train_\w+)\.py --config=configs/(\S+)", re.MULTILINE)
FILES = sorted([*CONFIGS.glob("*.yaml"), *CONFIGS.glob("paper/*.yaml")])
OF_THE_REPORT = ("claims.yaml", "questions.yaml", "pictures.yaml")
RECIPES = [file for file in FILES if file.name not in OF_THE_REPORT]


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_a_recipe_names_its_script_and_is_read_by_it(file: Path):
    name = file.relative_to(CONFIGS).as_posix()
    commands = COMMAND.findall(file.read_text())
    assert commands, "no line says how to run it"
    for script, named in commands:
        assert named == name
        load_yaml(SCRIPTS[script], file)
    assert f"`{name}`" in (CONFIGS / "README.md").read_text()


def test_the_listed_recipes_exist():
    listed = re.findall(r"`([\w/]+\.yaml)`", (CONFIGS / "README.md").read_text())
    assert {CONFIGS / name for name in listed} <= set(FILES) | set(CONFIGS.glob("studies/*.yaml"))


def test_the_six_configurations_of_table_6_are_spelled_out():
    text = (CONFIGS / "paper/magnitude_clip_coco.yaml").read_text()
    flags = re.findall(r"--cell=(\w+)(?: +--direction=(\w+))?(?= |\n)", text.split("data:")[0])
    wanted = {
        ("cosine", ""),
        ("dot", ""),
        ("imgnorm", "image_to_text"),
        ("dot", "image_to_text"),
        ("txtnorm", "text_to_image"),
        ("dot", "text_to_image"),
    }
    assert set(flags) == wanted
    for cell, direction in wanted:
        changes = {"cell": cell, "data_test": "emoji", "direction": direction or "both"}
        assert train_clip.Config(**changes).cell in ("cosine", "dot", "qnorm", "dnorm")


@pytest.mark.parametrize("name", ["clip_cc3m", "clip_cc12m", "magnitude_clip_coco"])
def test_clip_recipes_name_open_clip_models(name: str):
    config = load_yaml(train_clip.Config, CONFIGS / f"paper/{name}.yaml")
    facts = open_clip.get_model_config(config.model)
    assert facts["vision_cfg"]["patch_size"] == 32
