"""What a trained text encoder is worth: rankings, norms, hubs, answers; sentence similarity."""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from offsphere.cells import shrink
from offsphere.evaluation.geometry import hubness, side_norms
from offsphere.evaluation.ranking import DEPTH, Ranking, above_floor, outcomes, rank, rank_by
from offsphere.evaluation.relevance import norm_leverage, permuted_norms, relevant_norms_d
from offsphere.evaluation.similarity import similarity
from offsphere.names import CORNERS
from offsphere.objective import Objective
from offsphere.training.run import save_tensors
from offsphere.training.streams import stream
from text.gains import BRIEF, over_collections
from text.lexical import cached_bm25

if TYPE_CHECKING:
    from jaxtyping import Float

    from offsphere.run.record import RunFolder
    from text.inputs import Rows
    from text.methods import DualEncoder, PairRegression
    from text.pairs import PairBatches, Task
    from text.reader import Reader

ANSWER_DEPTHS = (1, 5, 20)
HUBNESS_K = 10
NORMS_KEPT = 10_000
"""Of a larger collection the norms of every second, third ... document are kept one by one."""
SMALLEST_EIGENVALUE = 1e-9
"""Of the Fisher matrix, as a share of its largest; a direction below this holds no gradients."""

Encode = Callable[[nn.Module, "Rows"], Tensor]


@dataclass(frozen=True)
class Collected:
    """One collection as it is measured: its evaluation queries and all its documents, as inputs."""

    name: str
    """Empty for the collection that is trained on."""
    task: Task
    asked: list[str]
    queries: Rows
    documents: Rows
    brief: bool = False
    """Whether only what compares collections is reported."""


class RetrievalEvaluator:
    """Called with a method, gives named numbers; the last call's per-query `outcomes` stay.

    The first call of a fresh run measures the untrained model and keeps its nDCG@10 in the run
    folder, for the verdict `test/floor`: 1 if the mean gain over the untrained model is not above
    two standard errors over queries. A `reader` answers the questions from the best `passages`;
    `similarities` are ranked with as well.
    """

    def __init__(
        self,
        collected: Sequence[Collected],
        batches: PairBatches,
        encode: Encode,
        folder: RunFolder,
        fresh: bool,
        reader: Reader | None = None,
        passages: int = 5,
        similarities: Sequence[str] = (),
    ) -> None:
        self.collected, self.batches, self.encode = collected, batches, encode
        self.reader, self.passages, self.similarities = reader, passages, similarities
        self.file, self.untrained = folder.path / "untrained.safetensors", fresh
        self.outcomes: dict[str, Tensor] = {}
        self.embeddings: dict[str, Tensor] = {}
        self._lexical: dict[str, Tensor] = {}

    def __call__(self, method: DualEncoder, exponents: tuple[float, float]) -> dict[str, float]:
        """Metrics of every collection, ranked with the given exponents and with every corner's."""
        self.outcomes, metrics = {}, {}
        for part in self.collected:
            metrics |= self._measure(part, method, exponents[1])
        metrics |= over_collections(metrics, [x.name for x in self.collected if x.name])
        start = {k: v for k, v in self.outcomes.items() if k.endswith("ndcg10")}
        if self.untrained:
            save_tensors(self.file, start)
            self.untrained = False
            return metrics
        before = load_file(self.file)
        for part in self.collected:
            name = _joined(part.name, "ndcg10")
            if not part.brief:
                self.outcomes[f"untrained_{name}"] = before[name]
            floor = not above_floor(start[name], before[name])
            metrics[f"test/{_joined(part.name, 'floor')}"] = float(floor)
            metrics |= self._bm25(part)
        return metrics | fisher_conditions(method, self.batches, self.encode)

    def _measure(
        self, part: Collected, method: DualEncoder, document_exponent: float
    ) -> dict[str, float]:
        queries = self.encode(method.towers[0], part.queries)
        documents = self.encode(method.towers[-1], part.documents)
        relevant = [part.task.test[q] for q in part.task.measured]
        own, corners = float(document_exponent), {float(g) for _, g in CORNERS.values()}
        ranked = {g: rank(queries, documents, g) for g in corners | {own}}
        worth = {g: outcomes(ranking, relevant) for g, ranking in ranked.items()}
        ranking, found = ranked[own], worth[own]
        metrics = found.means()
        for cell, (_, g) in CORNERS.items():  # two and two tie by construction (Prop. 4.1)
            metrics[f"ndcg10_scored_{cell}"] = worth[float(g)].ndcg10.mean().item()
        metrics |= magnitude(queries, documents, part.task, document_exponent)
        draw = stream(self.batches.settings.seed, f"permute {part.name}")
        metrics |= permuted_norms(queries, documents, relevant, part.task.idle, draw)
        if part.task.answers:
            metrics |= answers_found(ranking, part.task)
        prefix = _joined(part.name, "")
        kept = {**found._asdict(), "norm_query": queries.norm(dim=1)}
        if self.similarities:
            reference = self.encode(method.towers[0], self.batches.stages[-1][1].queries)
            by_name = ndcg_by(self.similarities, reference, queries, documents, relevant)
            metrics |= {name: values.mean().item() for name, values in by_name.items()}
            kept |= by_name
        kept["norm_document"] = documents.norm(dim=1)[:: math.ceil(len(documents) / NORMS_KEPT)]
        if part.task.answers and self.reader is not None:
            read = answers_read(self.reader, ranking, part.task, self.passages)
            metrics |= {name: values.nanmean().item() for name, values in read.items()}
            kept |= read
        if part.brief:
            kept = {"ndcg10": found.ndcg10}
            metrics = {name: x for name, x in metrics.items() if name in BRIEF}
        self.outcomes |= {f"{prefix}{name}": values for name, values in kept.items()}
        self.embeddings |= {f"{prefix}query": queries, f"{prefix}document": documents}
        return {f"test/{prefix}{name}": value for name, value in metrics.items()}

    def _bm25(self, part: Collected) -> dict[str, float]:
        """BM25's nDCG@10, measured once."""
        name = _joined(part.name, "ndcg10")
        if name not in self._lexical:
            ranking = cached_bm25(part.asked, part.task.documents, DEPTH)
            relevant = [part.task.test[q] for q in part.task.measured]
            self._lexical[name] = outcomes(ranking, relevant).ndcg10
        if not part.brief:
            self.outcomes[f"bm25_{name}"] = self._lexical[name]
        return {f"bm25/{name}": self._lexical[name].mean().item()}


def mean_ndcg(
    part: Collected, method: DualEncoder, encode: Encode, exponents: tuple[float, float]
) -> float:
    """nDCG@10 of one collection's queries, ranked with the given exponents."""
    queries = encode(method.towers[0], part.queries)
    documents = encode(method.towers[-1], part.documents)
    relevant = [part.task.test[q] for q in part.task.measured]
    return outcomes(rank(queries, documents, exponents[1]), relevant).ndcg10.mean().item()


def _joined(collection: str, name: str) -> str:
    return f"{collection}/{name}" if collection else name


def ndcg_by(
    names: Sequence[str],
    training_queries: Float[Tensor, "p d"],
    queries: Float[Tensor, "q d"],
    documents: Float[Tensor, "n d"],
    relevant: Sequence[dict[int, int]],
) -> dict[str, Float[Tensor, " q"]]:
    """nDCG@10 of each query under post-hoc similarities, which never saw the queries.

    They are fitted on the documents, which are known before anybody asks, and on the training
    queries; NaN where that is refused, such as after a collapse.
    """
    found = {}
    for name in names:
        try:
            fitted = similarity(name).fit(documents, training_queries)
            values = outcomes(rank_by(fitted, queries, documents), relevant).ndcg10
        except ValueError as error:
            print(f"The similarity {name} is left out: {error}", flush=True)
            values = torch.full((len(queries),), math.nan, dtype=torch.float64)
        found[f"ndcg10_by_{name}"] = values
    return found


def magnitude(
    queries: Float[Tensor, "q d"], documents: Float[Tensor, "n d"], task: Task, exponent: float
) -> dict[str, float]:
    """Norms of both sides, what they tell about relevance, and hubs."""
    metrics = side_norms(query=queries, document=documents)
    norms = documents.norm(dim=1)
    metrics |= relevant_norms_d(norms, list(task.test.values()), task.idle)
    metrics["norm_leverage"] = norm_leverage(queries, documents)
    hubs = hubness(queries, documents, min(HUBNESS_K, len(documents)), item_exponent=exponent)
    metrics["hubness_skewness"] = hubs["skewness"].item()
    metrics["hubness_norm_correlation"] = hubs["norm_correlation"].item()
    return metrics


def answers_found(ranking: Ranking, task: Task) -> dict[str, float]:
    """Share of the questions with an answer, word for word, in one of the best k documents."""
    rows = [(row, q) for row, q in enumerate(task.measured) if q in task.answers]
    first = []
    for row, question in rows:
        texts = (plain_words(task.documents[d]) for d in ranking.documents[row].tolist())
        wanted = [plain_words(answer) for answer in task.answers[question]]
        hits = (i for i, text in enumerate(texts) if any(answer in text for answer in wanted))
        first.append(next(hits, math.inf))
    return {f"answer_in_top{k}": sum(at < k for at in first) / len(first) for k in ANSWER_DEPTHS}


def plain_words(text: str) -> str:
    """Small letters, without articles and punctuation, between single spaces."""
    words = re.sub(r"[^\w\s]", " ", text.lower()).split()
    return f" {' '.join(word for word in words if word not in ('a', 'an', 'the'))} "


def answers_read(
    reader: Reader, ranking: Ranking, task: Task, passages: int
) -> dict[str, Float[Tensor, " q"]]:
    """How right the reader's answers from the best passages are; NaN where none is known."""
    scores = {"reader_em": [math.nan] * len(task.measured)}
    scores["reader_f1"] = scores["reader_em"].copy()
    for row, question in enumerate(task.measured):
        if known := task.answers.get(question):
            best = ranking.documents[row, :passages].tolist()
            answer = reader(task.queries[question], [task.documents[d] for d in best])
            scores["reader_em"][row] = exact_match(answer, known)
            scores["reader_f1"][row] = token_f1(answer, known)
    return {name: torch.tensor(values) for name, values in scores.items()}


def answer_words(text: str) -> list[str]:
    """SQuAD's normalisation: small letters, then no punctuation, then no articles."""
    bare = text.lower().translate(str.maketrans("", "", string.punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()


def exact_match(answer: str, known: Sequence[str]) -> float:
    """1 if the answer is one of the known ones after normalisation."""
    return float(any(answer_words(answer) == answer_words(one) for one in known))


def token_f1(answer: str, known: Sequence[str]) -> float:
    """Harmonic mean of the shares of words in common; the best over the known answers."""
    return max(_f1(answer_words(answer), answer_words(one)) for one in known)


def _f1(found: list[str], wanted: list[str]) -> float:
    if not (found and wanted):
        return float(found == wanted)
    return 2 * (Counter(found) & Counter(wanted)).total() / (len(found) + len(wanted))


def fisher_conditions(
    method: DualEncoder, batches: PairBatches, encode: Encode
) -> dict[str, float]:
    """Condition number of the empirical Fisher matrix of each side's embeddings (our definition).

    F is the mean of g g' over training pairs, with g the gradient of the mean contrastive loss of a
    batch with respect to one embedding, times the batch size. The published one's definition is
    not known to us.
    """
    gradients: dict[str, list[Tensor]] = {"query": [], "document": []}
    step, rows, width = 0, 0, 1
    while rows < 2 * width:
        batch = batches[step]
        left = encode(method.towers[0], batch["query"])
        right = encode(method.towers[-1], batch["document"])
        parts = _row_gradients(method.objective, left, right)
        for side, gradient in zip(gradients, parts, strict=True):
            gradients[side].append(gradient)
        step, rows, width = step + 1, rows + len(left), left.shape[1]
    return {
        f"train/fisher_{side}": condition_number(torch.cat(parts))
        for side, parts in gradients.items()
    }


def condition_number(gradients: Float[Tensor, "n d"]) -> float:
    """Largest over smallest eigenvalue of mean g g' in the subspace that holds the gradients.

    The outputs of a layer-norm lie in a hyperplane, and so do differences of their means: without
    that restriction the number would be infinite for most transformers.
    """
    g = gradients.double()
    values = torch.linalg.eigvalsh(g.T @ g / len(g))
    held = values[values > SMALLEST_EIGENVALUE * values[-1]]
    return (held[-1] / held[0]).item() if len(held) else math.nan


def _row_gradients(objective: Objective, left: Tensor, right: Tensor) -> tuple[Tensor, ...]:
    device = objective.log_scale.device
    sides = [x.to(device).requires_grad_() for x in (left, right)]
    training = objective.training
    with torch.enable_grad():
        loss = objective.eval()(*sides)["contrastive"]
    objective.train(training)
    return tuple(g.cpu() * len(left) for g in torch.autograd.grad(loss, sides))


class SentenceEvaluator:
    """Correlation of the predicted with the given similarity; `outcomes` keeps both per pair."""

    def __init__(self, left: Rows, right: Rows, score: Tensor, encode: Encode) -> None:
        self.left, self.right, self.score, self.encode = left, right, score, encode
        self.outcomes: dict[str, Tensor] = {}

    def __call__(self, method: PairRegression, exponents: tuple[float, float]) -> dict[str, float]:
        """Pearson and Spearman, scored with the given exponents and with every corner's."""
        left = self.encode(method.towers[0], self.left)
        right = self.encode(method.towers[-1], self.right)
        scores = scores_with(left, right, exponents)
        predicted = scores / method.objective.temperature.detach().cpu()
        metrics = correlations(predicted, self.score)
        metrics["mse"] = (predicted - self.score).square().mean().item()
        for cell, corner in CORNERS.items():
            found = correlations(scores_with(left, right, corner), self.score)
            metrics[f"spearman_scored_{cell}"] = found["spearman"]
        metrics |= side_norms(left=left, right=right)
        self.outcomes = {"predicted": predicted, "score": self.score}
        return {f"test/{name}": value for name, value in metrics.items()}


def scores_with(left: Tensor, right: Tensor, exponents: tuple[float, float]) -> Tensor:
    """The score of each pair under a cell's exponents."""
    return torch.linalg.vecdot(shrink(left, exponents[0]), shrink(right, exponents[1]))


def correlations(a: Float[Tensor, " n"], b: Float[Tensor, " n"]) -> dict[str, float]:
    """scipy's Pearson and Spearman correlation; NaN where one side is constant."""
    from scipy import stats

    x, y = a.double().numpy(), b.double().numpy()
    if (x == x[0]).all() or (y == y[0]).all():
        return {"pearson": math.nan, "spearman": math.nan}
    found = {"pearson": stats.pearsonr(x, y), "spearman": stats.spearmanr(x, y)}
    return {name: float(np.asarray(result)[0]) for name, result in found.items()}
