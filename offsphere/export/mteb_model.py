"""A run as a model of MTEB, whose evaluator then ranks with the run's own cell.

    from offsphere.export.mteb_model import CellModel
    mteb.evaluate(CellModel("for_mteb"), tasks=mteb.get_tasks(tasks=["SciFact"]))

`offsphere export --as=mteb` writes the folder. In a text run the sides of a cell are query and
document: vectors stay raw, and `similarity(query, document)` is the cell's score. In an image-text
run they are image and text, either of which may be the query, so that vectors are shrunk as they
are encoded and `similarity` is their dot product.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from mteb.models.model_meta import ModelMeta
from mteb.types import PromptType
from torch import Tensor

from offsphere.cells import Cell, shrink

if TYPE_CHECKING:
    import numpy as np

FILE = "offsphere_cell.json"
USE = """```python
import mteb
from offsphere.export.mteb_model import CellModel

model = CellModel("{out}")
mteb.evaluate(model, tasks=mteb.get_tasks(tasks=[...]))
```"""
Batch = dict[str, Any]


class CellModel:
    """What MTEB calls an encoder; the folder is one that `offsphere export --as=mteb` wrote.

    A text without a role, as in classification, clustering and sentence similarity, is encoded as
    a query.
    """

    def __init__(self, model_name: str | Path, revision: str | None = None, **_unused: Any) -> None:
        folder = Path(model_name)
        if not (folder / FILE).is_file():
            raise ValueError(
                f"{folder} has no {FILE}: expected a folder of `offsphere export --as=mteb`."
            )
        facts = json.loads((folder / FILE).read_text())
        exponents = (float(facts["exponents"][0]), float(facts["exponents"][1]))
        pictures = facts["sides"] == ["image", "text"]
        self._cell = Cell(exponents=(0.0, 0.0) if pictures else exponents)
        self._embed = _image_text(folder, exponents) if pictures else _text(folder)
        self.mteb_model_meta = ModelMeta.create_empty(
            {
                "name": f"offsphere/{facts['run']}",
                "revision": revision or facts["hash"],
                "modalities": ["image", "text"] if pictures else ["text"],
            }
        )

    @torch.inference_mode()
    def encode(
        self,
        inputs: Iterable[Batch],
        *,
        task_metadata: Any,
        hf_split: str,
        hf_subset: str,
        prompt_type: PromptType | None = None,
        **_unused: Any,
    ) -> np.ndarray:
        """Float32 vectors of MTEB's batches of texts or pictures."""
        role = "document" if prompt_type == PromptType.document else "query"
        return torch.cat([self._embed(batch, role).float().cpu() for batch in inputs]).numpy()

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Tensor:
        """The cell's score of each of the first (left) with each of the second (right)."""
        return self._cell.scores(*(_rows(x) for x in (embeddings1, embeddings2)))

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Tensor:
        """The cell's score of each pair."""
        left, right = self._cell(_rows(embeddings1), _rows(embeddings2))
        return torch.linalg.vecdot(left, right)


def write_cell(
    folder: Path, run: str, sides: tuple[str, str], exponents: tuple[float, float]
) -> None:
    """Write what `CellModel` reads beside the model's own files."""
    name, _, digest = run.rpartition("-")
    facts = {"run": name or run, "hash": digest, "sides": sides, "exponents": exponents}
    (folder / FILE).write_text(json.dumps(facts, indent=2) + "\n")


def _rows(embeddings: Any) -> Tensor:
    x = torch.as_tensor(embeddings)
    return x[None] if x.ndim == 1 else x


def _text(folder: Path) -> Callable[[Batch, str], Tensor]:
    from offsphere.export.sentences import load_model

    model = load_model(folder)

    def embed(batch: Batch, role: str) -> Tensor:
        encode = model.encode_query if role == "query" else model.encode_document
        return encode(list(batch["text"]), convert_to_tensor=True, show_progress_bar=False)

    return embed


def _image_text(folder: Path, exponents: tuple[float, float]) -> Callable[[Batch, str], Tensor]:
    import open_clip

    from offsphere.encoders.clip import quiet_open_clip

    model: Any
    preprocess: Any
    with quiet_open_clip():
        model, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{folder}")
        tokenize = open_clip.get_tokenizer(f"local-dir:{folder}")
    model.eval()

    def embed(batch: Batch, _role: str) -> Tensor:
        if "image" in batch and "text" in batch:
            raise ValueError("The cell scores a picture with a text: an item cannot be both.")
        if "image" in batch:
            pixels = torch.stack([preprocess(picture) for picture in batch["image"]])
            return shrink(model.encode_image(pixels).float(), exponents[0])
        return shrink(model.encode_text(tokenize(list(batch["text"]))).float(), exponents[1])

    return embed
