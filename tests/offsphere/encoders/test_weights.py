"""Files of weights from elsewhere: nothing in them runs, each wrong one is refused in a line."""

from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from samples import write_bert

from crossmodal.settings import MODELS
from crossmodal.subjects import from_open_clip
from offsphere.encoders.clip import clip_towers
from offsphere.encoders.frozen import frozen_tower
from offsphere.encoders.images import image_encoder
from offsphere.encoders.text import hugging_face_encoder
from offsphere.encoders.weights import read_tensors

CUT = "it is cut, damaged or no file of weights|PytorchStreamReader failed|Invalid magic number"
FOREIGN = "it is damaged, or holds other things than tensors, which could run code"


class Evil:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.mark}",)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    torch.save({"a": torch.ones(99)}, folder / "good.pt")
    save_file({"a": torch.ones(99)}, folder / "good.safetensors")
    torch.save({"a": Evil(folder / "EXECUTED")}, folder / "evil.pt")
    wrong = {
        "passwd.pt": b"root:x:0:0:root:/root:/bin/bash\n",
        "empty.pt": b"",
        "cut.pt": (folder / "good.pt").read_bytes()[:-100],
        "pickled.pt": pickle.dumps(Evil(folder / "EXECUTED")),
        "junk.safetensors": b"junk",
        "long.safetensors": struct.pack("<Q", 10**12) + b"{}",
        "cut.safetensors": (folder / "good.safetensors").read_bytes()[:-5],
    }
    for name, content in wrong.items():
        (folder / name).write_bytes(content)
    return folder


WRONG = {
    "passwd.pt": CUT,
    "empty.pt": CUT,
    "cut.pt": CUT,
    "pickled.pt": FOREIGN,
    "evil.pt": FOREIGN,
    "junk.safetensors": CUT,
    "long.safetensors": CUT,
    "cut.safetensors": CUT,
}
READERS: dict[str, Callable[[Path], object]] = {
    "alone": read_tensors,
    "vision": lambda file: image_encoder(image_size=16, pretrained=str(file)),
    "train_clip": lambda file: clip_towers("tiny", pretrained=str(file), models=MODELS),
    "benchmark": lambda file: from_open_clip("tiny", str(file), torch.device("cpu")),
    "frozen": lambda file: frozen_tower(f"timm:resnet18:{file}"),
}


@pytest.mark.parametrize("reader", READERS)
def test_wrong_files_are_refused_in_a_line(reader: str, files: Path) -> None:
    for name, message in WRONG.items():
        with pytest.raises(ValueError, match=message) as caught:
            READERS[reader](files / name)
        said = str(caught.value)
        assert name in said
        assert "\n" not in said
        assert "weights_only" not in said, "torch's advice to load the file unsafely"
    assert not (files / "EXECUTED").exists()


def test_good_files_are_read(files: Path) -> None:
    for name in ("good.pt", "good.safetensors"):
        assert torch.equal(read_tensors(files / name)["a"], torch.ones(99))


def test_a_folder_with_a_hostile_pickle_or_code_is_refused(tmp_path: Path) -> None:
    folder = write_bert(tmp_path / "bert", ["a", "b"])
    (folder / "model.safetensors").unlink()
    torch.save({"a": Evil(tmp_path / "EXECUTED")}, folder / "pytorch_model.bin")
    with pytest.raises(OSError, match=FOREIGN) as caught:
        hugging_face_encoder(str(folder))
    assert "\n" not in str(caught.value)
    coded = write_bert(tmp_path / "coded", ["a", "b"])
    text = (coded / "config.json").read_text()
    names = '{"auto_map": {"AutoConfig": "evil.C", "AutoModel": "evil.M"}, "model_type": "evil",'
    (coded / "config.json").write_text(
        text.replace('"model_type": "bert",', "").replace("{", names, 1)
    )
    (coded / "evil.py").write_text(f"import os; os.system('touch {tmp_path}/EXECUTED')")
    with pytest.raises(OSError, match="cannot be loaded from") as caught:
        hugging_face_encoder(str(coded))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "EXECUTED").exists()


@pytest.mark.parametrize("text", ["[" * 10**5, "{", "3"])
def test_damaged_files_of_sentence_transformers_are_named(text: str, tmp_path: Path) -> None:
    folder = write_bert(tmp_path / "bert", ["a", "b"])
    (folder / "modules.json").write_text(text)
    with pytest.raises(ValueError, match=r"modules.json is damaged: expected a JSON list"):
        hugging_face_encoder(str(folder))
    (folder / "modules.json").unlink()
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config.json is damaged: expected a JSON dict"):
        hugging_face_encoder(str(folder))


def test_a_wrong_model_file_is_refused(tmp_path: Path) -> None:
    for text, message in (
        ("[" * 10**5, "cannot be read: maximum recursion depth"),
        ("[1]", "expected an object in braces"),
        ('{"embed_dim": "x", "vision_cfg": 3, "text_cfg": {}}', "cannot be built"),
    ):
        (tmp_path / "m.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            clip_towers(str(tmp_path / "m.json"))
