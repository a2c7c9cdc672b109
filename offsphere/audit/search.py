"""What is audited: one side asks, the other answers, and it is known which answers are right.

A `Search` knows neither models nor modalities: two matrices of raw vectors, pairs that belong
together, and words for its sides. Only the candidates' exponent can change a ranking, because a
query's own norm multiplies all its scores alike. The candidates may be more than fit into memory:
`blocks` reads them piece by piece, and `thinned` is the same search among a share of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from offsphere.cells import shrink
from offsphere.data.vectors import Vectors
from offsphere.evaluation.checks import checked_rows, checked_side
from offsphere.evaluation.zero_shot import class_vectors
from offsphere.run.progress import Work

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

GRADED = ("ndcg10", "recall100", "mrr10")
LEAST_EXAMPLES = 4
"""Two for either half: nothing can be fitted on one."""
NUMBERS_AT_ONCE = 2**22
"""Of one block of candidates."""
NUMBERS_IN_MEMORY = 2**25
"""Of the candidates of a thinned search, but for the right ones (268 MB in float64)."""


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
    further: tuple[str, ...] = ()
    """Metrics that are no recall."""
    ask: Literal["queries", "items", "pairs"] = "queries"
    """Whether queries ask, labelled items ask one another, or pairs are scored: among pairs both
    norms count and no cells tie."""
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
        return (*(GRADED if self.graded else ()), *self.recalls, *by_class, *self.further)

    @property
    def metric(self) -> str:
        """The one that decides."""
        return self.metrics[0]

    @property
    def hit(self) -> str:
        """The recall at 1: whether the first answer is right; without one, what decides."""
        return next(iter(self.recalls), self.metric)

    @property
    def candidates(self) -> str:
        """What answers."""
        return self.title.rpartition(" ")[2]


@dataclass(frozen=True, eq=False)
class Search:
    """The raw vectors of one direction, and which candidate is right for which query.

    Vectors may be tensors or numpy arrays (memory-mapped ones too), the candidates also a file that
    is read block by block. What is compared is computed in float64, in which equal vectors have
    equal scores whatever the order in which a kernel adds.
    """

    direction: Direction
    queries: Float[Tensor, "q d"]
    items: Float[Tensor, "n d"] | Vectors
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
    idle: Int[Tensor, " i"] | None = None
    """Candidates that are right for nobody, where there are queries besides these; None: all that
    no pair names."""
    item_owner: Int[Tensor, " n"] | None = None
    """The candidate each row of `items` is a part of, where several make one: the prompts of a
    class. None: each row is a candidate."""

    def __post_init__(self) -> None:
        words = self.direction
        queries, items = checked_side(torch.as_tensor(self.queries), words.query), self.items
        if not isinstance(items, Vectors):
            items = checked_rows(f"{words.candidates} embeddings", torch.as_tensor(items))
        width = items.width if isinstance(items, Vectors) else items.shape[1]
        if queries.shape[1] != width:
            raise ValueError(
                f"{words.data}: the {words.query} embeddings have {queries.shape[1]} columns and "
                f"the {words.candidates} embeddings {width}: both must come from the same model."
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

    def blocks(self, what: str) -> Iterator[tuple[int, Float[Tensor, "b d"]]]:
        """(first row, raw rows) of all candidates, in order; `what` is done with them."""
        work = Work(f"{what} {self.direction.candidates}s", self.count, unit="vectors")
        rows = max(1, NUMBERS_AT_ONCE // self.queries.shape[1])
        try:
            if isinstance(self.items, Vectors):
                for start, block in self.items.blocks(rows):
                    own = block if block.flags.writeable else block.copy()  # not a map of a file
                    yield start, torch.from_numpy(own)
                    work.done(start + len(block))
            else:
                found = self.items if self.item_owner is None else self.candidates(0.0)
                for number, block in enumerate(found.split(rows)):
                    yield number * rows, block
        finally:
            work.close()

    @cached_property
    def norms(self) -> Float[Tensor, " c"]:
        """The candidates' norms, of all of them."""
        found = torch.empty(self.count, dtype=torch.float64)  # in place, as below
        for start, x in self.blocks("measuring"):
            found[start : start + len(x)] = torch.linalg.vector_norm(x.double(), dim=1)
        return found

    @cached_property
    def thinned(self) -> Search:
        """The same with no more candidates than fit into memory: all right ones, and of the others
        evenly spaced ones."""
        step = -(-self.count * self.queries.shape[1] // NUMBERS_IN_MEMORY)
        if step <= 1 and not isinstance(self.items, Vectors):
            return self
        kept = torch.zeros(self.count, dtype=torch.bool)
        kept[::step] = True
        kept[self.pair_item] = True
        number = kept.cumsum(0) - 1
        # Filled in place: parts kept between blocks would split the heap that the blocks reuse.
        kind = torch.float32 if isinstance(self.items, Vectors) else torch.float64
        some = torch.empty(int(kept.sum()), self.queries.shape[1], dtype=kind)
        for start, x in self.blocks("reading"):
            rows = slice(start, start + len(x))
            some[number[rows][kept[rows]]] = x[kept[rows]].to(kind)
        example = None if self.item_example is None else self.item_example[kept]
        return replace(self, items=some, pair_item=number[self.pair_item], item_example=example)

    def candidates(self, exponent: float) -> Float[Tensor, "c d"]:
        """The candidates in memory, shrunk by the power of their own norm; 0 leaves them raw."""
        if isinstance(self.items, Vectors):
            raise TypeError("Candidates in a file are read by `blocks`, or thinned first.")
        if self.item_owner is not None:
            return class_vectors(self.items, self.item_owner, self.count, exponent)
        return shrink(self.items.double(), exponent)

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

    @cached_property
    def _graded_pairs(self) -> tuple[Int[Tensor, " p"], Int[Tensor, " p"]]:
        """The pairs as sorted numbers, and their grades."""
        keys, order = (self.pair_query * self.count + self.pair_item).sort()
        return keys, torch.ones_like(keys) if self.grades is None else self.grades[order]

    def grades_of(
        self, candidates: Int[Tensor, "r k"], queries: Int[Tensor, " r"] | None = None
    ) -> Int[Tensor, "r k"]:
        """How right candidates are for all queries, or for some; 0 for wrong ones."""
        keys, grades = self._graded_pairs
        rows = torch.arange(len(candidates)) if queries is None else queries
        asked = rows[:, None] * self.count + candidates
        place = torch.searchsorted(keys, asked).clamp_max(len(keys) - 1)
        return grades[place].where(keys[place] == asked, 0)

    @cached_property
    def ideal(self) -> Float[Tensor, " q"]:
        """The gains of the ten best places if they held the best candidates: nDCG@10 is 1 then."""
        discount = 1 / torch.arange(2, 12).double().log2()
        best = [sorted(x.values(), reverse=True)[:10] for x in self.relevant()]
        gained = [(torch.tensor(x).double() * discount[: len(x)]).sum() for x in best]
        return torch.stack(gained)

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
            items=self.items if self.item_example is None else self.items[stays],  # pyright: ignore
            pair_query=new_query[self.pair_query[pairs]],
            pair_item=new_item[self.pair_item[pairs]],
            grades=None if self.grades is None else self.grades[pairs],
            query_example=self.example[asked],
            item_example=None if self.item_example is None else self.item_example[stays],
        )
