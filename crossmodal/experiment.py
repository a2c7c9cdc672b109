"""One run of the image-text lane: data, towers, training, evaluation, record."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from typing import TYPE_CHECKING

import open_clip
import torch
from torch import Tensor
from torch.utils.data import Dataset

from crossmodal.captions import Captioned, load_captions
from crossmodal.evaluate import Evaluator, mean_recall
from crossmodal.frozen import frozen_features
from crossmodal.methods import Clip, Look, Pairs
from crossmodal.settings import DIRECTIONS, MODELS, ClipSettings
from crossmodal.stream import StreamedPairs, stream_pairs
from offsphere.data.pictures import MEMORY_LIMIT
from offsphere.data.shards import is_streamed
from offsphere.data.views import Views, sample_parameters
from offsphere.encoders.clip import ClipTowers, clip_towers
from offsphere.encoders.frozen import FrozenTower, frozen_tower
from offsphere.objective import Objective
from offsphere.run.command import memory_need
from offsphere.run.progress import say
from offsphere.run.record import RunFolder
from offsphere.training.ranks import Rows, own_rows, share
from offsphere.training.run import (
    Experiment,
    eval_exponents,
    objective_of,
    train_run,
)
from offsphere.training.settings import steps_of
from offsphere.training.streams import batch_indices, stream, stream_seed

if TYPE_CHECKING:
    from jaxtyping import Int

TOKENS_IN_MEMORY = 500_000
"""Up to this many captions are tokenised once; more are when they are drawn."""


@dataclass(frozen=True)
class Splits:
    """The pairs of a run: training, what is measured, and what the measured ones are beside."""

    train: Captioned | StreamedPairs
    test: Captioned
    distractors: Captioned | None = None
    """Held-out pairs that match nothing in the test data."""
    style: Captioned | None = None

    def describe(self) -> dict[str, object]:
        """Name, size and content hash of each, and how many samples were left out as damaged."""
        named = {f.name: getattr(self, f.name) for f in fields(self)}
        return {
            name: {"data": x.name, "size": len(x), "hash": x.fingerprint, "skipped": len(x.skipped)}
            for name, x in named.items()
            if x is not None
        }

    def told(self, measured: str, image_size: int) -> str:
        """The data in one line; `measured` is the name of the split that is measured."""
        train, test = self.train, self.test
        skipped = sum(len(x.skipped) for x in (train, test))
        left_out = f", {skipped:,} damaged ones left out" if skipped else ""
        return (
            f"Data: {train.name}: {len(train):,} images with captions to train on, {len(test):,} "
            f"to measure on ({measured}), {image_size} x {image_size} pixels{left_out}."
        )


kept_captions = lru_cache(maxsize=4)(load_captions)
"""`load_captions`, once per process: the workers of a study share what they have decoded."""


def load_splits(settings: ClipSettings, image_size: int, *, frozen: bool) -> Splits:
    """Everything a run reads; the test split is left alone when validation is measured."""

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
    return Splits(train, test, validation, style)


class CaptionTokens:
    """Each picture's captions as tokens; which one a step shows is drawn by the caller."""

    def __init__(self, data: Captioned, towers: ClipTowers) -> None:
        self.captions, self.towers = data.captions, towers
        self.counts = torch.tensor([len(texts) for texts in data.captions])
        self.first = self.counts.cumsum(0) - self.counts
        few = int(self.counts.sum()) <= TOKENS_IN_MEMORY
        self.tokens = tokenised(data, towers.tokenizer_name) if few else None

    def __call__(self, rows: Int[Tensor, " b"], draw: torch.Generator) -> Int[Tensor, "b c"]:
        """The tokens of one caption per row."""
        share = torch.rand(len(rows), generator=draw, dtype=torch.float64)
        which = (share * self.counts[rows]).long()
        if self.tokens is not None:
            chosen = self.tokens[self.first[rows] + which].long()
        else:
            pairs = zip(rows.tolist(), which.tolist(), strict=True)
            chosen = self.towers.tokenize([self.captions[row][k] for row, k in pairs])
        return self.towers.trim(chosen)


@lru_cache(maxsize=4)
def tokenised(data: Captioned, tokenizer: str) -> Int[Tensor, "m c"]:
    """All captions in order as tokens, once per process."""
    texts = [text for texts in data.captions for text in texts]
    return open_clip.get_tokenizer(tokenizer)(texts).to(torch.int32)


class TrainingBatches(Dataset):
    """batches[step]: the pictures (or their frozen features) and caption tokens of a step."""

    def __init__(self, data: Captioned, towers: ClipTowers, settings: ClipSettings) -> None:
        self.data, self.settings = data, settings
        self.tokens = CaptionTokens(data, towers)
        self.features = None if towers.frozen is None else frozen_features(towers.frozen, data)

    def __getitem__(self, step: int) -> Pairs:
        return self.part(step, share(self.settings.batch_size, 0, 1))

    def part(self, step: int, rows: Rows) -> Pairs:
        """These rows of a step's batch."""
        s, own = self.settings, slice(rows.start, rows.stop)
        chosen = batch_indices(s.seed, step, s.batch_size, len(self.data))
        tokens = self.tokens(chosen, stream(s.seed, "caption", step))[own]
        chosen = chosen[own]
        images = self.data.batch(chosen) if self.features is None else self.features[chosen]
        return Pairs(images, tokens)


class StreamedBatches:
    """The batches of shards that can only be read in order."""

    def __init__(self, data: StreamedPairs, towers: ClipTowers) -> None:
        self.data, self.towers = data, towers

    def from_step(self, start: int, total: int) -> Iterable[Pairs]:
        """The batches of the steps `start` to `total` - 1."""
        for pixels, captions in self.data.from_step(start, total):
            images = pixels
            if self.towers.frozen is not None:
                images = self.towers.frozen(self.towers.normalise(pixels))
            yield Pairs(images, self.towers.trim(self.towers.tokenize(captions)))


def random_look(towers: ClipTowers, settings: ClipSettings) -> Look:
    """Random crops drawn on the training device, normalised as the tower wants them."""
    views = Views(
        towers.image_size,
        min_scale=settings.min_scale,
        flip=settings.flip,
        jitter_prob=0.0,
        grey=0.0,
        mean=(towers.mean[0], towers.mean[1], towers.mean[2]),
        std=(towers.std[0], towers.std[1], towers.std[2]),
        memory_format=torch.channels_last,
    )

    def plain(pixels: Tensor, step: int, rows: Rows | None = None) -> Tensor:
        return towers.normalise(pixels)

    def drawn(pixels: Tensor, step: int, rows: Rows | None = None) -> Tensor:
        rows = share(len(pixels), 0, 1) if rows is None else rows
        size = (pixels.shape[2], pixels.shape[3])
        draw = stream(settings.seed, "augment", step)
        parameters = sample_parameters(views, rows.total, size, draw)
        return views.render(pixels, parameters.take(slice(rows.start, rows.stop)))

    return plain if settings.min_scale == 1 and settings.flip == 0 else drawn


@cache
def load_frozen(name: str, image_size: int | None) -> FrozenTower:
    """A frozen tower, loaded once per process."""
    return frozen_tower(name, image_size=image_size)


def build_towers(settings: ClipSettings, *, load_pretrained: bool = True) -> ClipTowers:
    """The towers with the weights that the stream `init` draws: one seed, one pair of towers."""
    frozen = None
    if settings.image_tower is not None:
        frozen = load_frozen(settings.image_tower, settings.image_size)
    torch.manual_seed(stream_seed(settings.seed, "init"))
    towers = clip_towers(
        settings.model,
        pretrained=settings.pretrained if load_pretrained else None,
        image_size=None if frozen is not None else settings.image_size,
        frozen=frozen,
        models=MODELS,
    )
    if frozen is None and settings.image_size is not None:
        _check_image_size(towers, settings)
    return towers


@torch.no_grad()
def _check_image_size(towers: ClipTowers, settings: ClipSettings) -> None:
    """Refuse pictures that are too small for the tower: one is passed through it."""
    training = towers.training
    try:
        towers.eval().encode_image(torch.zeros(1, 3, towers.image_size, towers.image_size))
    except RuntimeError as error:
        if memory_need(error) is not None:
            raise
        raise ValueError(
            f"--image-size={settings.image_size} does not suit the model {settings.model} "
            f"({str(error).strip().splitlines()[0]}): take a larger one."
        ) from None
    towers.train(training)


def build_objective(settings: ClipSettings, population: int) -> Objective:
    return objective_of(
        settings,
        settings.loss,
        population,
        direction=DIRECTIONS[settings.direction],
        within_view=settings.within_view,
    )


def train(settings: ClipSettings, script: str) -> dict[str, object]:
    """The metrics of a run, trained now or already finished."""
    towers = cache(lambda: build_towers(settings))
    splits = cache(
        lambda: load_splits(settings, towers().image_size, frozen=settings.image_tower is not None)
    )

    def describe() -> dict[str, object]:
        say(splits().told(settings.eval_split, towers().image_size))
        return splits().describe()

    def experiment(_folder: RunFolder) -> Experiment:
        data = splits().train
        population = len(data)
        steps_of(settings, population)
        look = random_look(towers(), settings)
        method = Clip(towers(), build_objective(settings, population), look, settings)
        evaluator = Evaluator(settings, splits().test, splits().distractors, splits().style)
        on_validation = settings.eval_split == "validation"
        held_out = splits().test if on_validation else splits().distractors

        def evaluate() -> dict[str, float]:
            return evaluator(method.towers, eval_exponents(settings, method.objective))

        def validate() -> float:
            assert held_out is not None
            return mean_recall(towers(), held_out, eval_exponents(settings, method.objective))

        def files() -> dict[str, dict[str, Tensor]]:
            kept = {
                "examples.safetensors": evaluator.outcomes,
                "towers.safetensors": method.towers.state_dict(),
            }
            if settings.save_embeddings and evaluator.embedded is not None:
                kept["embeddings.safetensors"] = evaluator.embedded._asdict()
            return kept

        if isinstance(data, StreamedPairs):
            batches = StreamedBatches(data, towers())
        else:
            batches = TrainingBatches(data, towers(), settings)
        chooses = None if held_out is None else validate
        return Experiment(method, batches, population, evaluate, files, chooses)

    return train_run(settings, script, describe, experiment)
