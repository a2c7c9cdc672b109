"""One run of the text lane: data, encoder, method, training, evaluation, record."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, lru_cache

import torch
from torch import Tensor

from offsphere.objective import Objective
from offsphere.run.progress import say
from offsphere.run.record import RunFolder
from offsphere.training.checkpoint import load_checkpoint
from offsphere.training.run import Experiment, eval_exponents, objective_of, train_run
from offsphere.training.settings import steps_of
from text.evaluate import Collected, RetrievalEvaluator, SentenceEvaluator, mean_ndcg
from text.inputs import Inputs, Rows, device_of
from text.lexical import bm25
from text.methods import DualEncoder, PairRegression, make_towers, pair_scores
from text.pairs import PairBatches, Stage, Task, make_task, title_task, without_relevant
from text.passages import Collection, load_collection
from text.reader import Reader, load_reader
from text.sentences import SentenceBatches, SentencePairs, load_sentences
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


def train_retrieval(settings: RetrievalSettings) -> dict[str, object]:
    """The metrics of a dual encoder, trained now or already finished."""

    @cache
    def collections() -> list[Collection]:
        names = (settings.data, *settings.eval_data)
        return [
            kept_collection(x, on_bad_sample=settings.on_bad_sample, data_root=settings.data_root)
            for x in names
        ]

    def describe() -> dict[str, object]:
        own, *others = (collection.describe() for collection in collections())
        return {"train": own, **({"eval": others} if others else {})}

    def build(folder: RunFolder) -> Experiment:
        say(encoder_line(settings))
        own, *others = collections()
        task = make_task(own, settings.task, settings.eval_split)
        population = len(task.train)
        say(
            f"Data: {own.name}: {len(task.documents):,} documents, {population:,} queries to train "
            f"on, {len(task.measured):,} to measure on ({settings.eval_split})."
        )
        total = steps_of(settings, population)
        inputs = Inputs(settings)
        towers = make_towers(inputs.trained, settings)
        objective = objective_of(settings, "info_nce", population, direction=settings.direction)
        method = DualEncoder(towers, objective, settings)
        collected = [_collected("", task, inputs, settings)]
        for other in others:
            kind = "halves" if settings.task == "halves" else "query"
            measured = make_task(other, kind, settings.eval_split, trained=False)
            part = _collected(other.name, measured, inputs, settings)
            collected.append(replace(part, brief=other.brief))
        _check_names([x.name for x in collected])
        main = _stage(task, collected[0].documents, inputs, settings)
        unseen = set(task.test) if settings.task == "halves" else set[int]()
        stages = _stages(own, unseen, main, total, inputs, settings)
        batches = PairBatches(stages, settings, inputs.trim)
        plain = PairBatches([(0, main)], settings, inputs.trim)
        fresh = load_checkpoint(folder.checkpoint) is None
        reader = _reader([x.task for x in collected], settings)
        evaluator = RetrievalEvaluator(
            collected, plain, inputs.encode, folder, fresh, reader, settings.reader_passages,
            settings.similarities,
        )  # fmt: skip

        def evaluate() -> dict[str, float]:
            return evaluator(method, eval_exponents(settings, objective))

        held_out = None
        if settings.keep == "best":
            held_out = _collected("", _validation(own, task, settings), inputs, settings)

        def validate() -> float:
            assert held_out is not None
            return mean_ndcg(held_out, method, inputs.encode, eval_exponents(settings, objective))

        def files() -> dict[str, dict[str, Tensor]]:
            kept = {
                "examples.safetensors": evaluator.outcomes,
                "encoder.safetensors": towers.state_dict(),
            }
            if settings.save_embeddings:
                kept["embeddings.safetensors"] = evaluator.embeddings
            return kept

        return Experiment(method, batches, population, evaluate, files, validate)

    return train_run(settings, "train_retrieval", describe, build)


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


def train_sts(settings: StsSettings) -> dict[str, object]:
    """The metrics of a regression on sentence pairs, trained now or already finished."""

    @cache
    def pairs() -> dict[str, SentencePairs]:
        return kept_sentences(settings.data, settings.nli, settings.eval_split, settings.data_root)

    def describe() -> dict[str, object]:
        return {name: x.describe() for name, x in pairs().items()}

    def build(folder: RunFolder) -> Experiment:
        say(encoder_line(settings))
        train, test = pairs()["train"], pairs()["test"]
        say(
            f"Data: {settings.data}: {len(train.score):,} pairs of sentences to train on, "
            f"{len(test.score):,} to measure on ({settings.eval_split})."
        )
        steps_of(settings, len(train.score))
        inputs = Inputs(settings)
        towers = make_towers(inputs.trained, settings)
        learnable, value = parse_score_scale(settings.score_scale)
        objective = Objective(
            settings.cell,
            "info_nce",
            population=len(train.score),
            temperature=1.0 if learnable else 1 / (value or 1.0),
            learnable_temperature=learnable,
            scale="fixed",
        )
        method = PairRegression(towers, objective, settings)
        prefix = "query: " if settings.encoder == "e5-small" else ""
        batches = SentenceBatches(
            inputs(train.left, prefix), inputs(train.right, prefix), train.score, settings,
            inputs.trim,
        )  # fmt: skip
        if learnable:
            scale = value or _least_squares_scale(method, batches[0])
            with torch.no_grad():
                objective.log_scale.fill_(math.log(scale))
        sides = inputs(test.left, prefix), inputs(test.right, prefix)
        evaluator = SentenceEvaluator(*sides, test.score, inputs.encode)

        def evaluate() -> dict[str, float]:
            return evaluator(method, eval_exponents(settings, objective))

        held_out = None
        if settings.keep == "best":
            name, nli, root = settings.data, settings.nli, settings.data_root
            dev = kept_sentences(name, nli, "validation", root)["test"]
            sides = inputs(dev.left, prefix), inputs(dev.right, prefix)
            held_out = SentenceEvaluator(*sides, dev.score, inputs.encode)

        def validate() -> float:
            assert held_out is not None
            return held_out(method, eval_exponents(settings, objective))["test/spearman"]

        def files() -> dict[str, dict[str, Tensor]]:
            return {
                "examples.safetensors": evaluator.outcomes,
                "encoder.safetensors": towers.state_dict(),
            }

        return Experiment(method, batches, len(train.score), evaluate, files, validate)

    return train_run(settings, "train_sts", describe, build)


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
