"""From embeddings of pictures and texts to searches: what the library's audit is handed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from offsphere.audit.measures import Side
from offsphere.audit.report import Data
from offsphere.audit.search import Direction, Search

if TYPE_CHECKING:
    from jaxtyping import Float, Int

Task = Literal["zeroshot_retrieval", "zeroshot_classification"]
RETRIEVAL, CLASSIFICATION = "zeroshot_retrieval", "zeroshot_classification"
RECALLS = (1, 5, 10)
THEIRS = {
    **{f"i2t_r{k}": f"text_retrieval_recall@{k}" for k in RECALLS},
    **{f"t2i_r{k}": f"image_retrieval_recall@{k}" for k in RECALLS},
    **{"top1": "acc1", "top5": "acc5", "mean_class_recall": "mean_per_class_recall"},
}
"""Our metrics by clip-benchmark's names, which say what is retrieved."""


class Features(NamedTuple):
    """Raw embeddings of one data set: captions and their images, or class texts and labels."""

    images: Float[Tensor, "n d"]
    texts: Float[Tensor, "m d"]
    owner: Int[Tensor, " m"]
    """The image of each caption, or the class of each text."""
    labels: Int[Tensor, " n"] | None = None
    """The class of each image; None for retrieval."""


class Encoded(NamedTuple):
    """The embeddings of one data set for one task."""

    data: str
    task: Task
    features: Features
    skipped: int = 0
    """Damaged pictures that were left out."""

    def searches(self) -> list[Search]:
        """Images ask for captions and captions for images, or images for their class."""
        images, texts, owner, labels = self.features
        rows, captions = torch.arange(len(images)), torch.arange(len(texts))
        if labels is not None:
            many = int(owner.max()) >= 4
            recalls = {"top1": 1, "top5": 5} if many else {"top1": 1}
            words = Direction(
                self.data, "image to class", "image", "right", recalls, "mean_class_recall"
            )
            return [Search(words, images, texts, rows, labels, item_owner=owner)]
        to_text, to_image = (
            {name: k for name, k in zip(THEIRS, RECALLS * 2, strict=False) if name[:3] == way}
            for way in ("i2t", "t2i")
        )
        return [
            Search(
                Direction(self.data, "image to text", "image", "right", to_text),
                *(images, texts, owner, captions),
                query_example=rows,
                item_example=owner,
            ),
            Search(
                Direction(self.data, "text to image", "text", "left", to_image),
                *(texts, images, captions, owner),
                query_example=owner,
                item_example=rows,
            ),
        ]

    def audited(self) -> Data:
        """The same with what the audit tells about it."""
        images, texts = self.features.images, self.features.texts
        skipped = f", {self.skipped} damaged left out" if self.skipped else ""
        told = f"{len(images)} images, {len(texts)} texts{skipped}."
        sides = {"image": Side(images), "text": Side(texts)}
        return Data(told, sides, self.searches())

    def tensors(self) -> dict[str, Tensor]:
        """The raw embeddings, as `--embeddings` reads them."""
        images, texts, owner, labels = self.features
        if self.task == CLASSIFICATION and labels is not None:
            return {"images": images, "labels": labels, "class_texts": texts, "class_owner": owner}
        return {"images": images, "texts": texts, "owner": owner}
