"""Who is trained and measured against whom: tasks on a collection, and the batches of a step.

A batch holds no positive as a negative: no document of the batch is relevant to a query of another
pair. A pair that would break this is left to a later epoch and the next free query, in an order of
the step's own, takes its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.data import Dataset

from offsphere.data.splits import hash_share
from offsphere.training.streams import batch_indices, stream
from text.passages import Collection, Grades, question_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from text.inputs import Rows
    from text.settings import RetrievalSettings

RelevantOf = Sequence[tuple[int, Sequence[int]]]
"""The training queries by number, each with the numbers of its relevant documents."""


@dataclass(frozen=True)
class Task:
    """The texts of both sides, the pairs to train on and the judgements to measure with."""

    queries: list[str]
    documents: list[str]
    train: RelevantOf
    test: Grades
    answers: dict[int, tuple[str, ...]]
    """What a query of a question set asks for."""
    idle: list[int]
    """Documents that are relevant to no query of any split."""
    pool: list[str] = field(default_factory=list)
    """Where a training pair is two of several interchangeable texts: those texts, which `train`
    has by number. They are not among the documents."""

    @property
    def measured(self) -> list[int]:
        """The evaluation queries in order."""
        return sorted(self.test)


def make_task(collection: Collection, kind: str, split: str, *, trained: bool = True) -> Task:
    """The task `query` or `halves` on a collection, measured on one split; captions have one."""
    needed = ["train", split] if trained else [split]
    for name in needed:
        if not collection.relevant.get(name):
            have = ", ".join(s for s, grades in collection.relevant.items() if grades)
            raise ValueError(
                f"{collection.name} has no judgements for the split {name!r}, which this run "
                f"needs (it has: {have}). In BEIR's layout they lie in qrels/: train.tsv, dev.tsv "
                "(validation) and test.tsv."
            )
    if collection.grouped:
        return _captions_task(collection, split)
    used = {d for grades in collection.relevant.values() for r in grades.values() for d in r}
    idle = [d for d in range(len(collection.documents)) if d not in used]
    train, test = collection.relevant.get("train", {}), collection.relevant[split]
    if kind == "halves":
        return _halves_task(collection, train, test, idle)
    return Task(
        queries=[query.text for query in collection.queries],
        documents=[f"{d.title} {d.text}".strip() for d in collection.documents],
        train=[(query, tuple(grades)) for query, grades in sorted(train.items())],
        test=test,
        answers={q: collection.queries[q].answers for q in test if collection.queries[q].answers},
        idle=idle,
    )


def _halves_task(collection: Collection, train: Grades, test: Grades, idle: list[int]) -> Task:
    """Pairs are the halves of the same documents that the queries of each split ask for.

    A document that is measured is not trained on. A document with fewer than two words is in no
    pair; its one half stays among the candidates.
    """
    halves = [two_halves(d.id, d.text or d.title) for d in collection.documents]
    whole = [d for d, (left, right) in enumerate(halves) if left and right]
    measured = _documents_of(test) & set(whole)
    trained = (_documents_of(train) & set(whole)) - measured
    return Task(
        queries=[left for left, _ in halves],
        documents=[right or left for left, right in halves],
        train=[(d, (d,)) for d in sorted(trained)],
        test={d: {d: 1} for d in measured},
        answers={},
        idle=idle,
    )


def _captions_task(collection: Collection, split: str) -> Task:
    """Training pairs are two captions of a picture; one caption of a measured picture asks.

    The candidates are all other captions of the measured pictures. Those of the same picture are
    all relevant, so that none of them counts as wrong.
    """
    queries, documents = [], []
    test: Grades = {}
    for picture, grades in sorted(collection.relevant[split].items()):
        asks = question_of(collection.queries[picture].id, sorted(grades))
        others = [d for d in sorted(grades) if d != asks]
        test[len(queries)] = dict.fromkeys(range(len(documents), len(documents) + len(others)), 1)
        queries.append(collection.documents[asks].text)
        documents += [collection.documents[d].text for d in others]
    pool: list[str] = []
    train = []
    for _, grades in sorted(collection.relevant.get("train", {}).items()):
        train.append((len(train), tuple(range(len(pool), len(pool) + len(grades)))))
        pool += [collection.documents[d].text for d in sorted(grades)]
    return Task(queries, documents, train, test, {}, [], pool)


def _documents_of(grades: Grades) -> set[int]:
    return {d for relevant in grades.values() for d in relevant}


def two_halves(key: str, text: str) -> tuple[str, str]:
    """The two halves of a text in words; a coin that depends on the key says which is the query.

    So neither role is always the beginning: the two are interchangeable.
    """
    words = text.split()
    middle = len(words) // 2
    first, second = " ".join(words[:middle]), " ".join(words[middle:])
    return (second, first) if hash_share("half " + key) < 0.5 else (first, second)


def title_task(collection: Collection, left_out: Set[int] = frozenset()) -> Task:
    """Title -> text of the documents that have both; texts of one title are relevant to it."""
    kept = [d for number, d in enumerate(collection.documents) if number not in left_out]
    whole = [d for d in kept if d.title.strip() and d.text.strip()]
    if not whole:
        raise ValueError(
            f"{collection.name} has no document with a title and a text: use --pretrain-samples=0."
        )
    same: dict[str, list[int]] = {}
    for number, document in enumerate(whole):
        same.setdefault(document.title.lower(), []).append(number)
    titles = [document.title for document in whole]
    train = [(number, same[title.lower()]) for number, title in enumerate(titles)]
    return Task(titles, [d.text for d in whole], train, {}, {}, [])


@dataclass(frozen=True)
class Stage:
    """Part of a training: inputs of both sides, the pairs, and each query's hard negatives."""

    queries: Rows
    documents: Rows
    pairs: RelevantOf
    hard: Sequence[Sequence[int]] | None = None
    """Per training pair, in the order of `pairs`: documents that are near but not relevant."""
    grouped: bool = False
    """Whether a pair's query is drawn as well, from the texts that its document is drawn from."""


class PairBatches(Dataset):
    """batches[step]: queries and documents row by row, and hard negatives if there are."""

    def __init__(
        self,
        stages: Sequence[tuple[int, Stage]],
        settings: RetrievalSettings,
        trim: Callable[[Tensor], Tensor],
    ) -> None:
        """`stages` are (first step, stage) in order; `trim` cuts padding off a batch."""
        self.stages, self.settings, self.trim = stages, settings, trim

    def __getitem__(self, step: int) -> dict[str, Tensor]:
        first, stage = [item for item in self.stages if item[0] <= step][-1]
        rows, documents = choose_pairs(stage.pairs, self.settings, step - first)
        queries = torch.tensor([stage.pairs[row][0] for row in rows])
        if stage.grouped:
            queries = self._askers(stage, rows, documents, step - first)
        batch = {
            "query": self.trim(stage.queries[queries]),
            "document": self.trim(stage.documents[torch.tensor(documents)]),
        }
        if stage.hard is not None:
            hard = self._hard(stage, rows, step - first)
            if hard:
                batch["hard"] = self.trim(stage.documents[torch.tensor(hard)])
        return batch

    def _askers(self, stage: Stage, rows: list[int], documents: list[int], step: int) -> Tensor:
        """For each document another text of its group."""
        draw = stream(self.settings.seed, "query", step)
        chosen = []
        for row, document in zip(rows, documents, strict=True):
            others = [d for d in stage.pairs[row][1] if d != document]
            chosen.append(others[int(torch.randint(len(others), (), generator=draw))])
        return torch.tensor(chosen)

    def _hard(self, stage: Stage, rows: list[int], step: int) -> list[int]:
        """So many per query, none twice and none that is relevant to a query of the batch."""
        assert stage.hard is not None
        taken = {d for row in rows for d in stage.pairs[row][1]}
        draw = stream(self.settings.seed, "hard", step)
        chosen: list[int] = []
        for row in rows:
            near = stage.hard[row]
            order = torch.randperm(len(near), generator=draw).tolist()
            free = [near[i] for i in order if near[i] not in taken]
            chosen += free[: self.settings.hard_negatives]
            taken |= set(free[: self.settings.hard_negatives])
        return chosen


def choose_pairs(
    pairs: RelevantOf, settings: RetrievalSettings, step: int
) -> tuple[list[int], list[int]]:
    """The pairs of a step by their numbers, and the document drawn for each."""
    size = settings.batch_size
    draw = stream(settings.seed, "positive", step)
    own, drawn, blocked, chosen = set(), set(), set(), []
    for row in _candidates(settings.seed, step, size, len(pairs)):
        if row in own:
            continue
        relevant = pairs[row][1]
        document = relevant[int(torch.randint(len(relevant), (), generator=draw))]
        if document not in blocked and drawn.isdisjoint(relevant):
            own.add(row)
            drawn.add(document)
            blocked |= set(relevant)
            chosen.append((row, document))
            if len(chosen) == size:
                return [row for row, _ in chosen], [document for _, document in chosen]
    raise ValueError(
        f"Only {len(chosen)} of {len(pairs)} training queries fit into one batch without one "
        f"query's relevant document as another's negative: --batch-size={size} must be lower."
    )


def _candidates(seed: int, step: int, size: int, population: int) -> Iterator[int]:
    """The step's own samples, then all others in an order of the step's own."""
    yield from batch_indices(seed, step, size, population).tolist()
    yield from torch.randperm(population, generator=stream(seed, "refill", step)).tolist()


def without_relevant(near: Iterable[int], relevant: Iterable[int], count: int) -> list[int]:
    """The first `count` documents that are not relevant."""
    known = set(relevant)
    return [d for d in near if d not in known][:count]
