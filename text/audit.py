"""`offsphere audit --encoder`: a text encoder on queries and documents, or on sentence pairs.

    offsphere audit --encoder=minilm --data scifact stsb
    offsphere audit --encoder=FOLDER --data=beir:my_collection --query-prefix='query: '

The vectors are the raw ones: a Normalize module at the end of a sentence-transformers model is left
out, its pooling and its prompts are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from offsphere.audit.settings import AuditSettings
from offsphere.run.catalog import kind_of
from offsphere.run.config import canonical_data, check_positive, data_name, unhashed

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from offsphere.audit.norms import TextFacts
    from offsphere.audit.report import Data, Report
    from offsphere.encoders.sentence import SentenceModel

E5_PROMPTS = {"query": "query: ", "document": "passage: "}


@dataclass(frozen=True)
class Config(AuditSettings):
    """`--encoder` with `--data`."""

    encoder: str = "minilm"
    """minilm, e5-small, or a Hugging Face or sentence-transformers model: a name or a folder."""
    data: tuple[str, ...] = data_name(())
    """beir:FOLDER, captions:FOLDER, stsb:FOLDER, docstrings, package:NAME, or a data set with a
    name (scifact, npl, cisi, stsb; see `offsphere data`)."""
    split: str = "test"
    """The split whose queries or pairs are taken: train, validation or test."""
    query_prefix: str | None = None
    """Put before each query; default: what the model's files say."""
    document_prefix: str | None = None
    """Put before each document; default: what the model's files say."""
    pooling: Literal["auto", "mean", "cls"] = "auto"
    """How token vectors become one: auto is what the model's own files say, else the mean."""
    max_length: int | None = None
    """Tokens after which a text is cut; default: what the model's files say, else 512."""
    device: Literal["auto", "cpu", "cuda", "mps"] = unhashed("auto")
    data_root: str | None = unhashed(None)
    """Where data with a name lie; default: OFFSPHERE_DATA, else the user's cache."""
    on_bad_sample: Literal["error", "skip"] = "error"
    """A damaged document, query or judgement is an error, or is left out and counted."""

    def __post_init__(self) -> None:
        super().__post_init__()
        canonical_data(self)
        if not self.data:
            raise ValueError(
                "--encoder needs --data, what it is to be measured on: your own texts "
                "(beir:FOLDER), docstrings for a first try, or a set with a name such as scifact."
            )
        check_positive("--max-length", self.max_length)


def run(config: Config) -> Report:
    """Encode, measure, write and show."""
    import torch

    from offsphere.audit.output import finish
    from offsphere.audit.report import audit
    from offsphere.audit.scoring import How, cells_of

    torch.set_num_threads(config.threads)
    texts = [_texts(config, name) for name in config.data]  # mistakes before the encoder is loaded
    model = load(config)
    sets = [part.encoded(config, model) for part in texts]
    how = How(*cells_of((1.0, 1.0), config.eval_cell), config.resamples, config.seed)
    report = audit(config.encoder, model.trained_with, sets, how, config.similarities)
    finish(config, report)
    return report


def load(config: Config) -> SentenceModel:
    """The encoder with its own prompts and length, or those that flags give."""
    from offsphere.encoders.sentence import sentence_model
    from offsphere.training.ranks import choose_device
    from text.inputs import folder_of

    model = sentence_model(folder_of(config.encoder), config.pooling, choose_device(config.device))
    prompts = E5_PROMPTS if config.encoder == "e5-small" else model.prompts
    given = {"query": config.query_prefix, "document": config.document_prefix}
    prompts = prompts | {side: x for side, x in given.items() if x is not None}
    length = config.max_length or model.max_length
    return model._replace(prompts=prompts, max_length=length)


class Collected(NamedTuple):
    """Queries, documents and who is right for whom."""

    name: str
    queries: list[str]
    documents: list[str]
    pairs: list[tuple[int, int, int]]
    """Query, document and grade, by their numbers."""
    idle: list[int]
    skipped: int

    def encoded(self, config: Config, model: SentenceModel) -> Data:
        """The same as vectors, with what the audit tells about it."""
        import torch

        from offsphere.audit.measures import Side
        from offsphere.audit.report import Data
        from offsphere.audit.search import Direction, Search

        words = Direction(
            self.name, "query to document", "query", "right", graded=True, examples="queries"
        )
        queries, asked = encode(model, self.queries, "query")
        documents, answering = encode(model, self.documents, "document")
        pair_query, pair_item, grades = torch.tensor(self.pairs).T
        search = Search(
            words, queries, documents, pair_query, pair_item, grades, idle=torch.tensor(self.idle)
        )
        skipped = f", {self.skipped:,} bad ones left out" if self.skipped else ""
        told = (
            f"{len(queries):,} queries ({config.split}), {len(documents):,} documents, "
            f"{len(self.pairs):,} judgements{skipped}; texts cut at {model.max_length} tokens."
        )
        sides = {
            "query": Side(search.queries, texts=asked),
            "document": Side(search.thinned.candidates(0.0), search.norms, answering),
        }
        return Data(told, sides, [search])


class Paired(NamedTuple):
    """Sentence pairs with scores."""

    name: str
    left: list[str]
    right: list[str]
    score: Tensor

    def encoded(self, config: Config, model: SentenceModel) -> Data:
        """The same as vectors, both sides prompted as queries."""
        from offsphere.audit.measures import Side
        from offsphere.audit.report import Data
        from offsphere.audit.scored import Scored, scored_words

        (left, said), (right, answered) = (
            encode(model, x, "query") for x in (self.left, self.right)
        )
        part = Scored(scored_words(self.name, "sentence"), left, right, self.score)
        told = f"{len(left):,} scored sentence pairs ({config.split})."
        sides = {"left": Side(left, texts=said), "right": Side(right, texts=answered)}
        return Data(told, sides, [part])


def _texts(config: Config, name: str) -> Collected | Paired:
    """The texts of one data set."""
    from text.pairs import make_task
    from text.passages import load_collection
    from text.sentences import load_sentences

    if kind_of(name) == "stsb" or name == "emoji":
        pairs = load_sentences(name, None, config.split, config.data_root)["test"]
        return Paired(name.rpartition("/")[2], pairs.left, pairs.right, pairs.score)
    collection = load_collection(
        name, on_bad_sample=config.on_bad_sample, data_root=config.data_root
    )
    task = make_task(collection, "query", config.split, trained=False)
    pairs = [
        (number, document, grade)
        for number, query in enumerate(task.measured)
        for document, grade in task.test[query].items()
    ]
    queries = [task.queries[query] for query in task.measured]
    idle, skipped = task.idle, collection.skipped
    return Collected(collection.name, queries, task.documents, pairs, idle, skipped)


def encode(
    model: SentenceModel, texts: Sequence[str], side: str
) -> tuple[Float[Tensor, "n d"], TextFacts]:
    """Raw vectors, kept in the user's cache, and what the texts are like without their prompt."""
    import torch

    from offsphere.audit.norms import TextFacts

    prompt = model.prompts.get(side, "")
    vectors = model.encode([prompt + text for text in texts])
    tokens, padding = model.tokenize(texts), model.padding
    mask = tokens != padding
    often = torch.bincount(tokens[mask]).double().clamp_min(1).log()
    length = mask.sum(1)
    frequency = (often[tokens.clamp_max(len(often) - 1)] * mask).sum(1) / length.clamp_min(1)
    return vectors, TextFacts(length, frequency)
