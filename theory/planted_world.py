"""Corpora with a planted magnitude signal, and encoders that cannot hide it in the angle.

The generative model is ours. A corpus has documents that are relevant to some queries, and
distractors that are relevant to none; each query has one relevant document. A document's features
are a unit vector times its salience. What leads from a query to its document is the carrier:

    norm     relevant documents are more salient than distractors; directions say nothing
    angle    a query points near its document; salience says nothing
    both     the two together
    neither  directions and salience are noise

Salience always varies: under `angle` and `neither` it is there and means nothing. In the symmetric
task a query is another view of its document, with the same mixing, encoder and law of salience;
in the asymmetric one queries have a mixing and an encoder of their own and meaningless salience.

The encoders are positively homogeneous: twice the features, twice the embedding. The direction of
an embedding therefore cannot hold the salience; its norm is the only way.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from offsphere.cells import Cell, shrink
from offsphere.objective import Objective

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    from theory.planted_settings import Config


def stream(seed: int, name: str) -> torch.Generator:
    """A random stream of its own for each use, so that no use shifts another's numbers."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


class Corpus(NamedTuple):
    """Features of queries and documents; `answer[i]` is the document relevant to query i."""

    queries: Float[Tensor, "q features"]
    documents: Float[Tensor, "d features"]
    answer: Int[Tensor, " q"]
    counts: Int[Tensor, " d"]
    """Relevant queries of each document; 0 for a distractor."""


class Mixing(NamedTuple):
    """How latent directions become features: orthonormal rows, one matrix for each side."""

    queries: Float[Tensor, "latent features"]
    documents: Float[Tensor, "latent features"]


def draw_mixing(config: Config, generator: torch.Generator) -> Mixing:
    """Random mixing matrices; the symmetric task has one for both sides."""
    shape = (2, config.features, config.latent)
    queries, documents = torch.linalg.qr(torch.randn(shape, generator=generator))[0].mT
    return Mixing(documents if config.task == "symmetric" else queries, documents)


def relevance_counts(config: Config) -> Int[Tensor, " d"]:
    """Relevant queries of each document: equal, or falling as 1/rank; distractors have none."""
    ranks = torch.arange(1, config.relevant + 1)
    share = 1 / ranks if config.counts == "skewed" else torch.ones(config.relevant)
    total = config.relevant * config.queries_each
    counts = (total * share / share.sum()).round().long().clamp_min(1)
    return torch.cat([counts, counts.new_zeros(config.distractors)])


def draw_corpus(config: Config, mixing: Mixing, generator: torch.Generator) -> Corpus:
    """Fresh documents and queries under the config's carrier, task and counts."""
    counts = relevance_counts(config)
    answer = torch.repeat_interleave(torch.arange(len(counts)), counts)
    planted = config.shift * (config.carrier in ("norm", "both"))

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def features(directions: Tensor, matrix: Tensor, log_salience: Tensor) -> Tensor:
        mixed = directions @ matrix + config.feature_noise * noise(len(directions), config.features)
        return shrink(mixed, 1.0) * log_salience.exp()[:, None]

    directions = shrink(noise(len(counts), config.latent), 1.0)
    documents = config.spread * noise(len(counts)) + planted * (counts > 0)
    pointed = noise(len(answer), config.latent)
    if config.carrier in ("angle", "both"):
        pointed = directions[answer] + config.query_noise / math.sqrt(config.latent) * pointed
    queries = config.spread * noise(len(answer)) + planted * (config.task == "symmetric")
    return Corpus(
        features(shrink(pointed, 1.0), mixing.queries, queries),
        features(directions, mixing.documents, documents),
        answer,
        counts,
    )


def shuffle_salience(
    documents: Float[Tensor, "d features"], generator: torch.Generator
) -> Float[Tensor, "d features"]:
    """The same directions, with the documents' magnitudes dealt out at random among them."""
    salience = documents.norm(dim=1, keepdim=True)
    return shrink(documents, 1.0) * salience[torch.randperm(len(documents), generator=generator)]


class Encoders(nn.Module):
    """A two-layer network without biases for each side; one for both in the symmetric task."""

    def __init__(self, config: Config, generator: torch.Generator) -> None:
        super().__init__()
        self.queries = _homogeneous(config, generator)
        shared = config.task == "symmetric"
        self.documents = self.queries if shared else _homogeneous(config, generator)


class FreeDocuments(nn.Module):
    """Queries through a network, documents as free vectors of one length: the relevance counter."""

    def __init__(self, config: Config, generator: torch.Generator) -> None:
        super().__init__()
        self.queries = _homogeneous(config, generator)
        count = config.relevant + config.distractors
        start = torch.randn(count, config.width, generator=generator)
        self.documents = nn.Parameter(shrink(start, 1.0))


def train_encoders(config: Config, cell: str, corpus: Corpus) -> tuple[Encoders, Cell]:
    """Encoders trained under a cell; every cell has the same start and the same batches."""
    generator = stream(config.seed, "training")
    encoders = Encoders(config, generator)
    objective = _objective(config, cell, corpus)
    optimiser = torch.optim.Adam(
        [*encoders.parameters(), *objective.parameters()], lr=config.learning_rate
    )
    for pairs, others in _batches(config, corpus, generator):
        query = encoders.queries(corpus.queries[pairs])
        document = encoders.documents(corpus.documents[corpus.answer[pairs]])
        if config.task == "symmetric":
            swap = (torch.rand(len(pairs), 1, generator=generator) < 0.5).expand_as(query)
            query, document = query.where(swap, document), document.where(swap, query)
        negatives = encoders.documents(corpus.documents[others])
        optimiser.zero_grad()
        objective(query, document, hard_negatives=negatives)["loss"].backward()
        optimiser.step()
    return encoders, objective.cell


def train_free_documents(config: Config, cell: str, corpus: Corpus) -> Float[Tensor, " d"]:
    """Norms of free document vectors after plain SGD, whose steps add up (Prop. 4.2's setting)."""
    generator = stream(config.seed, "training")
    model = FreeDocuments(config, generator)
    objective = _objective(config, cell, corpus)
    optimiser = torch.optim.SGD(model.parameters(), lr=config.free_learning_rate)
    for pairs, others in _batches(config, corpus, generator):
        query = model.queries(corpus.queries[pairs])
        optimiser.zero_grad()
        losses = objective(
            query, model.documents[corpus.answer[pairs]], hard_negatives=model.documents[others]
        )
        losses["loss"].backward()
        optimiser.step()
    return model.documents.detach().norm(dim=1)


@torch.no_grad()
def ndcg(scores: Float[Tensor, "q d"], answer: Int[Tensor, " q"]) -> float:
    """Mean nDCG@10 for one relevant document per query; a tie counts as half a place lost."""
    own = scores.gather(1, answer[:, None])
    ahead = (scores > own).sum(1) + ((scores == own).sum(1) - 1) / 2
    gain = 1 / torch.log2(2 + ahead)
    return gain.where(ahead < 10, 0.0).mean().item()


def _objective(config: Config, cell: str, corpus: Corpus) -> Objective:
    return Objective(
        cell,
        "info_nce",
        population=len(corpus.queries),
        temperature=config.temperature,
        direction="both" if config.task == "symmetric" else "left_to_right",
    )


def _batches(
    config: Config, corpus: Corpus, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """Random pairs and, drawn evenly from the whole corpus, documents that serve as negatives.

    Evenly, because in-batch negatives are as frequent as the documents are relevant, and InfoNCE
    then divides that frequency out of the scores.
    """
    for _ in range(config.steps):
        pairs = torch.randint(len(corpus.queries), (config.batch_size,), generator=generator)
        others = torch.randint(len(corpus.documents), (config.negatives,), generator=generator)
        yield pairs, others


def _homogeneous(config: Config, generator: torch.Generator) -> nn.Sequential:
    sizes = (config.features, config.hidden), (config.hidden, config.width)
    first, second = (nn.Linear(*size, bias=False) for size in sizes)
    for layer in (first, second):
        nn.init.kaiming_normal_(layer.weight, generator=generator)
    return nn.Sequential(first, nn.ReLU(), second)
