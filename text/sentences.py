"""Sentence pairs with a given similarity from 0 to 1.

`stsb:FOLDER` reads STS-B's tab-separated files. `emoji`, the default, is made from what is
installed and serves to learn the tool: two emoji names, scored by the share of their keywords that
they have in common.
"""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.data import Dataset

from offsphere.data.emoji import Emoji, load_emoji
from offsphere.data.splits import hash_share, split_of
from offsphere.names import unknown_data
from offsphere.run.catalog import resolve
from offsphere.training.settings import TrainSettings
from offsphere.training.streams import batch_indices

if TYPE_CHECKING:
    from text.inputs import Rows

STSB_FILES = {"train": "sts-train.csv", "validation": "sts-dev.csv", "test": "sts-test.csv"}
STSB_LARGEST = 5.0
NLI_SCORES = {"entailment": 1.0, "neutral": 0.5, "contradiction": 0.0}

Pair = tuple[str, str, float]


@dataclass(frozen=True)
class SentencePairs:
    """Two sentences and the score of each pair."""

    name: str
    left: list[str]
    right: list[str]
    score: Tensor

    def describe(self) -> dict[str, object]:
        """Name, size and content hash, for a run's provenance."""
        content = repr((self.left, self.right, self.score.tolist())).encode()
        digest = hashlib.blake2b(content, digest_size=8).hexdigest()
        return {"data": self.name, "size": len(self.left), "hash": digest}


class SentenceBatches(Dataset):
    """batches[step]: both sides' inputs and the scores."""

    def __init__(
        self,
        left: Rows,
        right: Rows,
        score: Tensor,
        settings: TrainSettings,
        trim: Callable[[Tensor], Tensor],
    ) -> None:
        self.left, self.right, self.score = left, right, score
        self.settings, self.trim = settings, trim

    def __getitem__(self, step: int) -> dict[str, Tensor]:
        s = self.settings
        rows = batch_indices(s.seed, step, s.batch_size, len(self.score))
        left, right = self.trim(self.left[rows]), self.trim(self.right[rows])
        return {"left": left, "right": right, "score": self.score[rows]}


def load_sentences(
    data: str, nli: str | None, eval_split: str, data_root: str | None = None
) -> dict[str, SentencePairs]:
    """The training pairs and those that are measured, under `train` and `test`."""
    kind, _, rest = resolve(data, data_root).partition(":")
    if kind == "emoji" and not rest:
        read = _emoji_pairs
    elif kind == "stsb" and rest:
        folder = Path(rest).expanduser()

        def read(split: str) -> list[Pair]:
            return list(_stsb_pairs(folder / STSB_FILES[split]))

    else:
        raise unknown_data("data", data, ("emoji", "stsb", "stsb:FOLDER"))
    train = read("train") + ([] if nli is None else list(_nli_pairs(Path(nli).expanduser())))
    name = data if nli is None else f"{data} and AllNLI"
    return {
        "train": columns(f"{Path(name).name} train", train),
        "test": columns(f"{Path(data).name} {eval_split}", read(eval_split)),
    }


def columns(name: str, pairs: list[Pair]) -> SentencePairs:
    """Pairs, each with its score, side by side."""
    left, right, score = (list(column) for column in zip(*pairs, strict=True))
    return SentencePairs(name, left, right, torch.tensor(score, dtype=torch.float32))


def _stsb_pairs(file: Path) -> Iterator[Pair]:
    """genre, file, year, id, score, sentence 1, sentence 2 and sometimes more; no quoting."""
    rows = [line.split("\t") for line in _lines(file)]
    for number, row in enumerate(rows, 1):
        try:
            score, left, right = float(row[4]) / STSB_LARGEST, row[5].strip(), row[6].strip()
        except (IndexError, ValueError):
            raise ValueError(
                f"{file}, line {number}: expected genre, file, year, id, score and two sentences, "
                f"separated by tabs, got {len(row)} columns."
            ) from None
        if not (0 <= score <= 1 and left and right):
            raise ValueError(
                f"{file}, line {number}: expected a score from 0 to 5 and two sentences, got "
                f"{row[4]!r}, {left[:40]!r} and {right[:40]!r}."
            )
        yield left, right, score


def _nli_pairs(file: Path) -> Iterator[Pair]:
    """The training rows of AllNLI.tsv; how labels become scores is ours."""
    lines = _lines(file)
    header = lines[0].split("\t")
    wanted = ("split", "sentence1", "sentence2", "label")
    if not set(wanted) <= set(header):
        raise ValueError(f"{file}: expected a header with {', '.join(wanted)}, got {header}.")
    split, left, right, label = (header.index(name) for name in wanted)
    if len(lines) == 1:
        raise ValueError(f"{file} has a header and no rows: expected sentence pairs.")
    for number, line in enumerate(lines[1:], 2):
        row = line.split("\t")
        if len(row) != len(header) or row[label] not in NLI_SCORES:
            raise ValueError(
                f"{file}, line {number}: expected {len(header)} columns and a label that is one of "
                f"{', '.join(NLI_SCORES)}."
            )
        if row[split] == "train":
            yield row[left], row[right], NLI_SCORES[row[label]]


def _lines(file: Path) -> list[str]:
    opener = gzip.open if file.suffix == ".gz" else open
    try:
        with opener(file, "rt", encoding="utf-8", newline="\n") as text:
            lines = text.read().rstrip("\n").split("\n")
    except (OSError, EOFError, zlib.error) as error:  # the latter two: a cut or damaged .gz
        said = getattr(error, "strerror", None) or error
        raise OSError(f"{file} cannot be read ({said}).") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8: {error}.") from None
    if lines == [""]:
        raise ValueError(f"{file} is empty: expected sentence pairs.")
    return lines


@cache
def _emoji_pairs(split: str) -> list[Pair]:
    """Each emoji with one of its subgroup, one of its group, any one and its nearest by keywords.

    The score is the number of common keywords over that of all keywords of the two. Both emoji of
    a pair are in the same split.
    """
    bases = [e for e in load_emoji() if e.keywords and e.name == e.base]
    pool = [e for e in bases if split_of(e.name) == split]
    alike: dict[str, list[Emoji]] = {}
    for emoji in pool:
        for label in (*emoji.keywords, f"subgroup {emoji.subgroup}", f"group {emoji.group}"):
            alike.setdefault(label, []).append(emoji)
    pairs: dict[tuple[str, str], Pair] = {}
    for emoji in pool:
        near = [e for word in emoji.keywords for e in alike[word]]
        subgroup, group = alike[f"subgroup {emoji.subgroup}"], alike[f"group {emoji.group}"]
        drawn = [_draw(emoji, candidates) for candidates in (subgroup, group, pool)]
        nearest = sorted(
            {e for e in near if e is not emoji},
            key=lambda e: (-_overlap(emoji, e), hash_share(emoji.name + e.name)),
        )
        for partner in [e for e in (*drawn, *nearest[:1]) if e is not emoji]:
            left, right = sorted((emoji.name, partner.name), key=lambda n: hash_share("side " + n))
            pairs[left, right] = (left, right, _overlap(emoji, partner))
    return list(pairs.values())


def _overlap(a: Emoji, b: Emoji) -> float:
    mine, theirs = set(a.keywords), set(b.keywords)
    return len(mine & theirs) / len(mine | theirs)


def _draw(emoji: Emoji, candidates: list[Emoji]) -> Emoji:
    share = hash_share(f"{emoji.name} {len(candidates)}")
    return candidates[int(share * len(candidates))]
