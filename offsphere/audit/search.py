"""What is audited: one side asks, the other answers, and it is known which answers are right.

A `Search` knows neither models nor modalities: two matrices of raw vectors, pairs that belong
together, and words for its sides. Only the candidates' exponent can change a ranking, because a
query's own norm multiplies all its scores alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from offsphere.cells import shrink
from offsphere.evaluation.checks import checked_side
from offsphere.evaluation.zero_shot import class_vectors

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

GRADED = ("ndcg10", "recall100", "mrr10")
LEAST_EXAMPLES = 4
"""Two for either half: nothing can be fitted on one."""


@dataclass(frozen=True)
class Direction:
    """Who asks whom, and in which words."""

    data: str
    title: str
    """Such as `image to text`: its last word is what answers."""
    query: str
    """What asks: image, text, query."""
    side: Literal["left", "right"]
    """Which of a cell's two exponents is the candidates'."""
    recalls: Mapping[str, int] = field(default_factory=lambda: {"r1": 1, "r5": 5, "r10": 10})
    """Names of recalls at k: the chance that a right candidate is among the k best."""
    class_recall: str | None = None
    """Name of the recall at 1 that weighs every candidate alike, however many queries it has."""
    graded: bool = False
    """Whether trec_eval's nDCG@10, Recall@100 and MRR@10 come first."""
    examples: str = "images"
    """What is drawn again, in the plural: what makes a query independent of others."""

    @property
    def place(self) -> tuple[str, str]:
        """Where the table has what is measured of it."""
        return self.data, self.title

    @property
    def metrics(self) -> tuple[str, ...]:
        """All of them; the first decides."""
        by_class = () if self.class_recall is None else (self.class_recall,)
        return (*(GRADED if self.graded else ()), *self.recalls, *by_class)

    @property
    def metric(self) -> str:
        """The one that decides."""
        return self.metrics[0]

    @property
    def hit(self) -> str:
        """The recall at 1: whether the first answer is right."""
        return next(iter(self.recalls))

    @property
    def candidates(self) -> str:
        """What answers."""
        return self.title.rpartition(" ")[2]


@dataclass(frozen=True, eq=False)
class Search:
    """The raw vectors of one direction, and which candidate is right for which query.

    Vectors may be tensors or numpy arrays (memory-mapped ones too); they are kept in float64, in
    which equal vectors have equal scores whatever the order in which a kernel adds.
    """

    direction: Direction
    queries: Float[Tensor, "q d"]
    items: Float[Tensor, "n d"]
    pair_query: Int[Tensor, " p"]
    pair_item: Int[Tensor, " p"]
    """Pair p says that this candidate is right for that query."""
    grades: Int[Tensor, " p"] | None = None
    """How right it is; without grades every pair counts 1."""
    query_example: Int[Tensor, " q"] | None = None
    """The independent example a query belongs to (a caption to its image); None: each to its own.
    Bootstrap and halves go by examples."""
    item_example: Int[Tensor, " n"] | None = None
    """None for candidates that belong to no example, such as classes and documents."""
    item_owner: Int[Tensor, " n"] | None = None
    """The candidate each row of `items` is a part of, where several make one: the prompts of a
    class. None: each row is a candidate."""

    def __post_init__(self) -> None:
        words = self.direction
        queries, items = torch.as_tensor(self.queries), torch.as_tensor(self.items)
        queries, items = checked_side(queries, words.query), checked_side(items, words.candidates)
        if queries.shape[1] != items.shape[1]:
            raise ValueError(
                f"{words.data}: the {words.query} embeddings have {queries.shape[1]} columns and "
                f"the {words.candidates} embeddings {items.shape[1]}: both must come from the same "
                "model."
            )
        object.__setattr__(self, "queries", queries)
        object.__setattr__(self, "items", items)
        for name in ("pair_query", "pair_item", "grades", "query_example", "item_example"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, self._numbers(name, torch.as_tensor(value)))
        if self.query_example is None:
            object.__setattr__(self, "query_example", torch.arange(len(queries)))
        self._check_pairs()

    def _numbers(self, name: str, value: Tensor) -> Int[Tensor, " n"]:
        rows = {"query_example": len(self.queries), "item_example": len(self.items)}
        wanted = rows.get(name, len(self.pair_query))
        if value.shape != (wanted,) or value.is_floating_point():
            raise ValueError(
                f"{self.direction.data}: expected {wanted} whole numbers as {name}, got "
                f"{value.dtype} of shape {tuple(value.shape)}."
            )
        return value.long()

    def _check_pairs(self) -> None:
        words = self.direction
        for name, pairs, rows in (
            (words.query, self.pair_query, len(self.queries)),
            (words.candidates, self.pair_item, self.count),
        ):
            if len(pairs) and (int(pairs.min()) < 0 or int(pairs.max()) >= rows):
                raise ValueError(
                    f"{words.data}: expected pairs whose {name} is between 0 and {rows - 1}, got "
                    f"{int(pairs.min())} to {int(pairs.max())}."
                )
        answered = torch.bincount(self.pair_query, minlength=len(self.queries))
        without = (answered == 0).nonzero().flatten()
        if len(without):
            raise ValueError(
                f"{words.data}: {len(without)} of {len(self.queries)} queries ({words.query}) have "
                f"no right {words.candidates} (first: {int(without[0])}): leave them out, nothing "
                "can be found for them."
            )

    @property
    def count(self) -> int:
        """How many candidates there are."""
        return len(self.items) if self.item_owner is None else int(self.item_owner.max()) + 1

    @property
    def example(self) -> Int[Tensor, " q"]:
        """The number of each query's independent example."""
        assert self.query_example is not None
        return self.query_example

    def candidates(self, exponent: float) -> Float[Tensor, "c d"]:
        """The candidates shrunk by the power of their own norm; 0 leaves them raw."""
        if self.item_owner is not None:
            return class_vectors(self.items, self.item_owner, self.count, exponent)
        return shrink(self.items, exponent)

    def pairs(self) -> tuple[Float[Tensor, "p d"], Float[Tensor, "p d"]]:
        """The raw vectors of the pairs that belong together."""
        return self.queries[self.pair_query], self.candidates(0.0)[self.pair_item]

    def relevant(self) -> Sequence[dict[int, int]]:
        """The grades of each query's right candidates, by the candidates' numbers."""
        found: list[dict[int, int]] = [{} for _ in range(len(self.queries))]
        grades = torch.ones_like(self.pair_query) if self.grades is None else self.grades
        rows = (self.pair_query.tolist(), self.pair_item.tolist(), grades.tolist())
        for query, item, grade in zip(*rows, strict=True):
            found[query][item] = grade
        return found

    def among(self, kept: Bool[Tensor, " e"]) -> Search:
        """Only the queries and candidates of some examples; what belongs to none stays."""
        asked = kept[self.example]
        stays = torch.ones(self.count, dtype=torch.bool)
        if self.item_example is not None:
            stays = kept[self.item_example]
        pairs = asked[self.pair_query] & stays[self.pair_item]
        new_query, new_item = asked.cumsum(0) - 1, stays.cumsum(0) - 1
        return replace(
            self,
            queries=self.queries[asked],
            items=self.items if self.item_example is None else self.items[stays],
            pair_query=new_query[self.pair_query[pairs]],
            pair_item=new_item[self.pair_item[pairs]],
            grades=None if self.grades is None else self.grades[pairs],
            query_example=self.example[asked],
            item_example=None if self.item_example is None else self.item_example[stays],
        )
