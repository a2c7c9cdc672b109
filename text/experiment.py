"""One run of the text lane: collections or sentence pairs, encoders, and how they are measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from offsphere.data.splits import Handed
from offsphere.objective import Objective
from offsphere.run.progress import say
from offsphere.run.record import RunFolder
from offsphere.training.checkpoint import load_checkpoint
from offsphere.training.experiment import Experiment, objective_of
from offsphere.training.ranks import Tensors
from offsphere.training.settings import steps_of
from text.evaluate import Collected, RetrievalEvaluator, SentenceEvaluator, mean_ndcg
from text.inputs import Inputs, Rows, device_of
from text.lexical import bm25
from text.methods import DualEncoder, PairRegression, make_towers, pair_scores
from text.pairs import PairBatches, Stage, Task, make_task, title_task, without_relevant
from text.passages import Collection, load_collection, of_pairs
from text.reader import Reader, load_reader
from text.sentences import SentenceBatches, SentencePairs, columns, load_sentences
from text.settings import (
    RetrievalSettings,
    StsSettings,
    encoder_line,
    parse_score_scale,
)

kept_collection = lru_cache(maxsize=64)(load_collection)
kept_sentences = lru_cache(maxsize=4)(load_sentences)
"""The loaders, once per process: the workers of a study share what they have read."""
NEAR = 100
"""BM25's best documents from which hard negatives are drawn."""


class RetrievalExperiment(Experiment):
    """A dual encoder of queries and documents: nDCG, recall, norms, also out of domain."""

    method: DualEncoder
    held_out: Collected | None = None

    def __init__(
        self, settings: RetrievalSettings, folder: RunFolder, handed: Handed | None
    ) -> None:
        self.settings, self.folder, self.handed = settings, folder, handed
        self.own = self._collection(settings.data) if handed is None else _handed_pairs(handed)
        self.others = [self._collection(name) for name in settings.eval_data]
        self.task = make_task(self.own, settings.task, settings.eval_split)
        self.population = len(self.task.train)

    def _collection(self, name: str) -> Collection:
        settings = self.settings
        return kept_collection(
            name, on_bad_sample=settings.on_bad_sample, data_root=settings.data_root
        )

    def describe(self) -> dict[str, object]:
        own = self.own.describe()
        if self.handed is not None:
            own["hash"] = self.handed.fingerprint
        others = [collection.describe() for collection in self.others]
        return {"train": own, **({"eval": others} if others else {})}

    def build(self) -> None:
        settings, own, task = self.settings, self.own, self.task
        say(encoder_line(settings))
        say(
            f"Data: {own.name}: {len(task.documents):,} documents, {self.population:,} queries to "
            f"train on, {len(task.measured):,} to measure on ({settings.eval_split})."
        )
        total = steps_of(settings, self.population)
        self.inputs = inputs = Inputs(settings)
        towers = make_towers(inputs.trained, settings)
        direction = settings.direction
        objective = objective_of(settings, "info_nce", self.population, direction=direction)
        self.method = DualEncoder(towers, objective, settings)
        collected = [_collected("", task, inputs, settings)]
        for other in self.others:
            kind = "halves" if settings.task == "halves" else "query"
            measured = make_task(other, kind, settings.eval_split, trained=False)
            part = _collected(other.name, measured, inputs, settings)
            collected.append(replace(part, brief=other.brief))
        _check_names([x.name for x in collected])
        main = _stage(task, collected[0].documents, inputs, settings)
        unseen = set(task.test) if settings.task == "halves" else set[int]()
        stages = _stages(own, unseen, main, total, inputs, settings)
        self.batches = PairBatches(stages, settings, inputs.trim)
        plain = PairBatches([(0, main)], settings, inputs.trim)
        fresh = load_checkpoint(self.folder.checkpoint) is None
        reader = _reader([x.task for x in collected], settings)
        self.evaluator = RetrievalEvaluator(
            collected, plain, inputs.encode, self.folder, fresh, reader, settings.reader_passages,
            settings.similarities,
        )  # fmt: skip
        if settings.keep == "best":
            self.held_out = _collected("", _validation(own, task, settings), inputs, settings)

    def evaluate(self) -> dict[str, float]:
        return self.evaluator(self.method, self.exponents())

    def validate(self) -> float:
        assert self.held_out is not None
        return mean_ndcg(self.held_out, self.method, self.inputs.encode, self.exponents())

    def files(self) -> dict[str, Tensors]:
        kept = {
            "examples.safetensors": self.evaluator.outcomes,
            "encoder.safetensors": self.method.towers.state_dict(),
        }
        if self.settings.save_embeddings:
            kept["embeddings.safetensors"] = self.evaluator.embeddings
        return kept


def _handed_pairs(handed: Handed) -> Collection:
    """The collection of pairs of strings that were handed in."""
    splits = {"train": handed.train, "validation": handed.validation, "test": handed.test}
    given = {split: pairs for split, pairs in splits.items() if pairs is not None}
    return of_pairs(f"handed:{handed.name}", given)


def _validation(collection: Collection, task: Task, settings: RetrievalSettings) -> Task:
    """The validation side of a collection, without what the task trains on or tests."""
    held_out = make_task(collection, settings.task, "validation", trained=False)
    seen = set(task.pool) or {task.queries[query] for query, _ in task.train}
    if settings.eval_split == "test":
        seen |= {task.queries[query] for query in task.test}
    left = {q: grades for q, grades in held_out.test.items() if held_out.queries[q] not in seen}
    if not left:
        raise ValueError(
            f"--keep=best: {collection.name} has no validation queries that are neither trained "
            "on nor tested. Use --keep=last."
        )
    return replace(held_out, test=left)


def _collected(name: str, task: Task, inputs: Inputs, settings: RetrievalSettings) -> Collected:
    """The evaluation side of a task, with its texts as inputs."""
    asked = [task.queries[q] for q in task.measured]
    return Collected(
        name,
        task,
        asked,
        inputs(asked, settings.query_prefix),
        inputs(task.documents, settings.document_prefix),
    )


def _reader(tasks: Sequence[Task], settings: RetrievalSettings) -> Reader | None:
    """What answers the questions, if it is asked for."""
    if settings.reader is None:
        return None
    if not any(task.answers for task in tasks):
        raise ValueError(
            f"--reader={settings.reader} has nothing to answer: expected a collection whose "
            'queries.jsonl gives "answers": ["...", ...], and --task=query.'
        )
    return load_reader(settings.reader, device_of(settings))


def _stage(task: Task, documents: Rows, inputs: Inputs, settings: RetrievalSettings) -> Stage:
    """The training side of a task; its queries are renumbered to the trained ones."""
    if task.pool:
        asking = inputs(task.pool, settings.query_prefix)
        same = settings.query_prefix == settings.document_prefix
        found = asking if same else inputs(task.pool, settings.document_prefix)
        return Stage(asking, found, task.train, grouped=True)
    asked = [task.queries[query] for query, _ in task.train]
    pairs = [(row, relevant) for row, (_, relevant) in enumerate(task.train)]
    hard = None
    if settings.hard_negatives:
        found = bm25(asked, task.documents, NEAR + max(len(r) for _, r in pairs)).documents
        hard = [
            without_relevant(near, relevant, NEAR)
            for near, (_, relevant) in zip(found.tolist(), pairs, strict=True)
        ]
    return Stage(inputs(asked, settings.query_prefix), documents, pairs, hard)


def _stages(
    collection: Collection,
    unseen: set[int],
    main: Stage,
    total: int,
    inputs: Inputs,
    settings: RetrievalSettings,
) -> list[tuple[int, Stage]]:
    """(first step, stage): titles first, if asked for, then the task itself.

    `unseen` documents have no part in the titles' stage: their halves are measured.
    """
    samples = settings.pretrain_samples
    first = total // 2 if samples is None else samples // settings.batch_size
    if first == 0:
        return [(0, main)]
    if first >= total:
        raise ValueError(
            f"--pretrain-samples={settings.pretrain_samples} leaves nothing of the budget of "
            f"{total} steps of {settings.batch_size} samples: lower it."
        )
    titles = title_task(collection, unseen)
    stage = Stage(
        inputs(titles.queries, settings.query_prefix),
        inputs(titles.documents, settings.document_prefix),
        titles.train,
    )
    if len(titles.train) < settings.batch_size:
        raise ValueError(
            f"{collection.name} has {len(titles.train)} documents with a title and a text, fewer "
            f"than --batch-size={settings.batch_size}: lower it, or use --pretrain-samples=0."
        )
    return [(0, stage), (first, main)]


def _check_names(names: list[str]) -> None:
    if len(set(names)) < len(names):
        raise ValueError(
            f"--eval-data names two collections alike ({', '.join(names[1:])}): metrics are told "
            "apart by the folder's name, so rename one."
        )


class SentenceExperiment(Experiment):
    """A regression on the similarity of two sentences: Spearman's correlation."""

    method: PairRegression
    held_out: SentenceEvaluator | None = None

    def __init__(self, settings: StsSettings, handed: Handed | None) -> None:
        self.settings, self.handed = settings, handed
        self.train, self.test = self._pairs("train"), self._pairs(settings.eval_split)
        self.population = len(self.train.score)

    def _pairs(self, split: str) -> SentencePairs:
        """One split; as many as are asked for are read once per process."""
        s, handed = self.settings, self.handed
        if handed is not None:
            content = handed.train if split == "train" else handed.measured(split)
            return columns(f"handed:{handed.name} {split}", list(content))
        measured = s.eval_split if split == "train" else split
        found = kept_sentences(s.data, s.nli, measured, s.data_root)
        return found["train" if split == "train" else "test"]

    def describe(self) -> dict[str, object]:
        hashed = {} if self.handed is None else {"hash": self.handed.fingerprint}
        both = {"train": self.train, "test": self.test}
        return {name: pairs.describe() | hashed for name, pairs in both.items()}

    def build(self) -> None:
        settings, train = self.settings, self.train
        say(encoder_line(settings))
        say(
            f"Data: {settings.data}: {self.population:,} pairs of sentences to train on, "
            f"{len(self.test.score):,} to measure on ({settings.eval_split})."
        )
        self.inputs = inputs = Inputs(settings)
        towers = make_towers(inputs.trained, settings)
        learnable, value = parse_score_scale(settings.score_scale)
        objective = Objective(
            settings.cell,
            "info_nce",
            population=self.population,
            temperature=1.0 if learnable else 1 / (value or 1.0),
            learnable_temperature=learnable,
            scale="fixed",
        )
        self.method = PairRegression(towers, objective, settings)
        sides = self._sides(train)
        self.batches = SentenceBatches(*sides, train.score, settings, inputs.trim)
        if learnable:
            scale = value or _least_squares_scale(self.method, self.batches[0])
            with torch.no_grad():
                objective.log_scale.fill_(math.log(scale))
        self.evaluator = self._evaluator(self.test)
        can_validate = self.handed is None or self.handed.validation is not None
        if settings.keep == "best" and can_validate:
            self.held_out = self._evaluator(self._pairs("validation"))

    def _sides(self, pairs: SentencePairs) -> tuple[Rows, Rows]:
        prefix = "query: " if self.settings.encoder == "e5-small" else ""
        return self.inputs(pairs.left, prefix), self.inputs(pairs.right, prefix)

    def _evaluator(self, pairs: SentencePairs) -> SentenceEvaluator:
        return SentenceEvaluator(*self._sides(pairs), pairs.score, self.inputs.encode)

    def evaluate(self) -> dict[str, float]:
        return self.evaluator(self.method, self.exponents())

    def validate(self) -> float:
        assert self.held_out is not None
        return self.held_out(self.method, self.exponents())["test/spearman"]

    def files(self) -> dict[str, Tensors]:
        return {
            "examples.safetensors": self.evaluator.outcomes,
            "encoder.safetensors": self.method.towers.state_dict(),
        }


@torch.no_grad()
def _least_squares_scale(method: PairRegression, batch: dict[str, Tensor]) -> float:
    """The scale that fits the first batch's scores best, so that every cell starts alike."""
    method.eval()
    left, right = method.towers[0](batch["left"]), method.towers[-1](batch["right"])
    method.train()
    scores = pair_scores(method.objective, left, right).double()
    scale = (scores @ batch["score"].double() / scores.square().sum()).item()
    if not (0 < scale < math.inf):
        raise ValueError(
            f"The first batch's scores fit its targets with a scale of {scale:.3g}, which is not "
            "above 0: give a start with --score-scale=learnable:NUMBER."
        )
    return scale
