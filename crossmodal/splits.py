"""The pairs of a run: training, what is measured, and what is beside it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from crossmodal.captions import Captioned, load_captions
from crossmodal.settings import ClipSettings
from crossmodal.stream import StreamedPairs, stream_pairs
from offsphere.data.pictures import MEMORY_LIMIT, square_pixels
from offsphere.data.shards import is_streamed
from offsphere.data.splits import Handed, Splits
from offsphere.training.ranks import own_rows


@dataclass(frozen=True)
class CaptionSplits(Splits):
    """The pairs of a run: training, what is measured, and what the measured ones are beside."""

    train: Captioned | StreamedPairs
    test: Captioned
    distractors: Captioned | None = None
    """Held-out pairs that match nothing in the test data."""
    style: Captioned | None = None

    def in_words(self, measured: str, image_size: int) -> str:
        """The data in one line; `measured` is the name of the split that is measured."""
        train, test = self.train, self.test
        return (
            f"Data: {train.name}: {len(train):,} images with captions to train on, {len(test):,} "
            f"to measure on ({measured}), {image_size} x {image_size} pixels{self.left_out}."
        )


kept_captions = lru_cache(maxsize=4)(load_captions)
"""`load_captions`, once per process: the workers of a study share what they have decoded."""


def load_splits(
    settings: ClipSettings, image_size: int, handed: Handed | None = None, *, frozen: bool
) -> CaptionSplits:
    """Everything a run reads; the test split is left alone when validation is measured."""
    if handed is not None:
        return _handed_splits(settings, handed, image_size)

    def load(data: str, split: str, limit: int | None = None) -> Captioned:
        return kept_captions(
            data,
            split=split,
            image_size=image_size,
            on_bad_sample=settings.on_bad_sample,
            limit=limit,
            allow_pipe=settings.allow_pipe,
            data_root=settings.data_root,
            # A frozen tower sees each picture once: no need to keep the pixels.
            memory_limit=0 if frozen else MEMORY_LIMIT,
        )

    kind, _, pattern = settings.data.partition(":")
    streamed = kind == "wds" and is_streamed(pattern)
    if streamed and settings.eval_split == "validation":
        raise ValueError(
            f"{settings.data} is read in order, so no validation part can be carved out of it: "
            "give --data-test=... and --eval-split=test."
        )
    if streamed:
        train = stream_pairs(
            settings.data,
            image_size=image_size,
            batch_size=len(own_rows(settings.batch_size)),
            seed=settings.seed,
            workers=settings.workers,
            train_samples=settings.train_samples,
            on_bad_sample=settings.on_bad_sample,
            allow_pipe=settings.allow_pipe,
        )
    else:
        train = load(settings.data, "train", settings.limit)
    validation = None if streamed else load(settings.data, "validation")
    if settings.eval_split == "validation" and validation is not None:
        test, validation = validation, None
    elif settings.data_test is not None:
        test = load(settings.data_test, "all")
    else:
        test = load(settings.data, "test")
    style = None
    if settings.data_style is not None:
        style = load(settings.data_style, settings.eval_split)
    return CaptionSplits(train, test, validation, style)


def _handed_splits(settings: ClipSettings, handed: Handed, image_size: int) -> CaptionSplits:
    train = pairs_of(handed.train, handed, image_size)
    test = pairs_of(handed.measured(settings.eval_split), handed, image_size)
    if handed.validation is None or settings.eval_split == "validation":
        return CaptionSplits(train, test)
    return CaptionSplits(train, test, pairs_of(handed.validation, handed, image_size))


def pairs_of(dataset: Any, handed: Handed, image_size: int) -> Captioned:
    """A Dataset of (image, caption) or of (image, captions), in memory."""
    items = [dataset[row] for row in range(len(dataset))]
    captions = tuple((x,) if isinstance(x, str) else tuple(x) for _, x in items)
    if bad := [row for row, texts in enumerate(captions) if not all(texts) or not texts]:
        raise ValueError(f"Item {bad[0]} of the handed data {handed.name} has an empty caption.")
    return Captioned(
        name=f"handed:{handed.name}",
        captions=captions,
        fingerprint=handed.fingerprint,
        image_size=image_size,
        pictures=square_pixels((image for image, _ in items), image_size, handed.name),
    )
