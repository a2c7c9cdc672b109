"""`CellRankingLoss`: sentence-transformers' MultipleNegativesRankingLoss with a cell.

    loss = CellRankingLoss(model, scale=20.0, cell="qnorm")
    SentenceTransformerTrainer(model=model, train_dataset=pairs, loss=loss).train()

With cosine it is MultipleNegativesRankingLoss; the scores are never kept as a matrix, and on
several devices every rank computes its share of the whole batch's loss. A model that ends in a
Normalize module has no magnitude left: take that module off first.

A Telemetry sees the embeddings of `loss.contrast` (`offsphere.watch`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from offsphere import losses
from offsphere.cells import Cell
from offsphere.dropin import DropIn, nothing
from offsphere.ids import row_ids
from offsphere.names import FALSE_NEGATIVES, unknown
from offsphere.precision import at_least_float32
from offsphere.split import gather_with_gradient, process_count

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class RankingLoss(DropIn):
    """Each anchor finds its positive among all positives and negatives; on raw embeddings."""

    def __init__(
        self,
        scale: float,
        *,
        cell: str | Cell,
        calibrated: bool,
        both_ways: bool,
        false_negatives: str,
        variance_weight: float,
        population: int | None,
        gor_weight: float,
        gather_across_devices: bool,
        loss_precision: str,
    ) -> None:
        how = "calibrated" if calibrated else "fixed"
        super().__init__(cell, variance_weight, population, gor_weight, how, loss_precision)
        if not scale > 0:
            raise ValueError(f"Expected a scale above 0, got {scale}: it multiplies the scores.")
        if false_negatives not in FALSE_NEGATIVES:
            raise unknown("false_negatives", false_negatives, FALSE_NEGATIVES)
        self.temperature = 1 / scale
        self.both_ways = both_ways
        self.false_negatives = false_negatives
        self.gather_across_devices = gather_across_devices

    def forward(
        self,
        anchors: Float[Tensor, "n d"],
        positives: Float[Tensor, "n d"],
        *negatives: Float[Tensor, "n d"],
        ids: Int[Tensor, " columns"] | None = None,
    ) -> Float[Tensor, ""]:
        """The loss of all ranks; `ids` name this rank's positives and then its negatives."""
        gather = self.gather_across_devices and process_count() > 1
        left, right = self._sides(anchors, positives, gather)
        hard = [at_least_float32(x) for x in negatives]
        if gather:
            hard = [gather_with_gradient(x) for x in hard]
            # Column by column, as the rows are.
            ids = (
                None if ids is None else torch.cat([_gathered(x) for x in ids.split(len(anchors))])
            )
        query, document = self.cell(left, right)
        if len(left) == 1 and not hard:
            return nothing(query, document)
        loss = losses.info_nce(
            query,
            document,
            self._temperature(self.temperature, left, right),
            both_ways=self.both_ways,
            hard_negatives=self.cell.shrink_right(torch.cat(hard)) if hard else None,
            ids=ids,
            false_negatives=self.false_negatives,  # pyright: ignore[reportArgumentType]
            largest=self._largest(1 / self.temperature),
            split=self._split,
        )
        return loss + self._variance(left, right) + self._gor(left, right)


class CellRankingLoss(nn.Module):
    """MultipleNegativesRankingLoss of a sentence-transformers model, with a cell.

    The data have columns anchor, positive and, if there are any, negatives. `scale` is one over the
    temperature; `calibrated` divides it by the cell's spread of scores over cosine's, found on the
    first batch. `both_ways` lets positives find their anchors too. `variance_weight` (with
    `population`, the number of training pairs) and `gor_weight` are the two terms.

    `false_negatives` says what texts that are equal are to each other: negatives (keep), left out
    (mask), or positives too (positive). If the data have a column `label`, rows that share a label
    are equal instead; a negative then equals nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        scale: float = 20.0,
        *,
        cell: str | Cell = "cosine",
        calibrated: bool = False,
        both_ways: bool = False,
        false_negatives: str = "keep",
        variance_weight: float = 0.0,
        population: int | None = None,
        gor_weight: float = 0.0,
        gather_across_devices: bool = False,
        loss_precision: str = "tf32",
    ) -> None:
        super().__init__()
        self.model = model
        self.contrast = RankingLoss(
            scale,
            cell=cell,
            calibrated=calibrated,
            both_ways=both_ways,
            false_negatives=false_negatives,
            variance_weight=variance_weight,
            population=population,
            gor_weight=gor_weight,
            gather_across_devices=gather_across_devices,
            loss_precision=loss_precision,
        )

    def forward(
        self, sentence_features: Iterable[Mapping[str, Any]], labels: Tensor | None = None
    ) -> Float[Tensor, ""]:
        """The loss of a batch as sentence-transformers' trainer gives it."""
        columns = list(sentence_features)
        if len(columns) < 2:
            raise ValueError(
                f"Expected the columns anchor, positive and any negatives, got {len(columns)}."
            )
        ids = None
        if self.contrast.false_negatives != "keep":
            ids = _text_ids(columns[1:]) if labels is None else _label_ids(labels, len(columns) - 1)
        embedded = [self.model(dict(column))["sentence_embedding"] for column in columns]
        return self.contrast(*embedded, ids=ids)

    def get_config_dict(self) -> dict[str, Any]:
        """What a model card says of the loss."""
        loss = self.contrast
        return {
            "scale": 1 / loss.temperature,
            "cell": loss.cell.name,
            "calibrated": loss.scale == "calibrated",
            "both_ways": loss.both_ways,
            "false_negatives": loss.false_negatives,
            "variance_weight": loss.variance_weight,
            "gor_weight": loss.gor_weight,
            "gather_across_devices": loss.gather_across_devices,
        }


def _text_ids(columns: Iterable[Mapping[str, Any]]) -> Tensor:
    """Of positives and negatives: equal for equal texts."""
    ids = []
    for column in columns:
        tokens, mask = column.get("input_ids"), column.get("attention_mask")
        if tokens is None or mask is None or tokens.ndim != 2:
            raise ValueError(
                "Expected texts as rows of tokens to tell which are equal; this model takes them "
                f"as {', '.join(column)}. Give the data a column `label` instead."
            )
        ids.append(row_ids((tokens + 1) * mask))
    return torch.cat(ids)


def _label_ids(labels: Tensor, columns: int) -> Tensor:
    """The rows' labels, and for each negative an id of its own."""
    if labels.is_floating_point():
        raise ValueError(f"Expected whole numbers as labels, got {labels.dtype}.")
    labels = labels.long().reshape(-1)
    count = len(labels) * (columns - 1)
    ranks, rank = process_count(), dist.get_rank() if process_count() > 1 else 0
    # Below every label of any rank, and apart on every rank.
    own = torch.arange(count, device=labels.device) * ranks + rank
    return torch.cat([labels, torch.iinfo(torch.long).min + own])


def _gathered(x: Tensor) -> Tensor:
    pieces = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, x.contiguous())
    return torch.cat(pieces)
