"""One run of the image-text lane: towers, their batches, and how they are measured."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, lru_cache
from typing import TYPE_CHECKING

import open_clip
import torch
from torch import Tensor
from torch.utils.data import Dataset

from crossmodal.captions import Captioned
from crossmodal.evaluate import Evaluator, frozen_features, mean_recall
from crossmodal.methods import Clip, Look, PairBatch
from crossmodal.settings import DIRECTIONS, MODELS, ClipSettings
from crossmodal.splits import CaptionSplits, load_splits
from crossmodal.stream import StreamedPairs
from offsphere.data.splits import Handed
from offsphere.data.views import Views
from offsphere.encoders.clip import ClipTowers, clip_towers
from offsphere.encoders.frozen import frozen_tower
from offsphere.objective import Objective
from offsphere.run.command import memory_need
from offsphere.run.progress import say
from offsphere.training.experiment import Experiment, objective_of
from offsphere.training.images import random_views
from offsphere.training.ranks import Rows, Tensors, share
from offsphere.training.streams import batch_indices, stream, stream_seed

if TYPE_CHECKING:
    from jaxtyping import Int

TOKENS_IN_MEMORY = 500_000
"""Up to this many captions are tokenised once; more are when they are drawn."""


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

    def __getitem__(self, step: int) -> PairBatch:
        return self.part(step, share(self.settings.batch_size, 0, 1))

    def part(self, step: int, rows: Rows) -> PairBatch:
        """These rows of a step's batch."""
        s, own = self.settings, slice(rows.start, rows.stop)
        chosen = batch_indices(s.seed, step, s.batch_size, len(self.data))
        tokens = self.tokens(chosen, stream(s.seed, "caption", step))[own]
        chosen = chosen[own]
        images = self.data.batch(chosen) if self.features is None else self.features[chosen]
        return PairBatch(images, tokens)


class StreamedBatches:
    """The batches of shards that can only be read in order."""

    def __init__(self, data: StreamedPairs, towers: ClipTowers) -> None:
        self.data, self.towers = data, towers

    def from_step(self, start: int, total: int) -> Iterable[PairBatch]:
        """The batches of the steps `start` to `total` - 1."""
        for pixels, captions in self.data.from_step(start, total):
            images = pixels
            if self.towers.frozen is not None:
                images = self.towers.frozen(self.towers.normalise(pixels))
            yield PairBatch(images, self.towers.trim(self.towers.tokenize(captions)))


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
        return random_views(views, pixels, stream(settings.seed, "augment", step), rows)

    return plain if settings.min_scale == 1 and settings.flip == 0 else drawn


load_frozen = cache(frozen_tower)
"""`frozen_tower`, once per process."""


def build_towers(settings: ClipSettings, *, load_pretrained: bool = True) -> ClipTowers:
    """The towers with the weights that the stream `init` draws: one seed, one pair of towers."""
    frozen = None
    if settings.image_tower is not None:
        frozen = load_frozen(settings.image_tower, image_size=settings.image_size)
    torch.manual_seed(stream_seed(settings.seed, "init"))
    towers = clip_towers(
        settings.model,
        pretrained=settings.pretrained,
        load_pretrained=load_pretrained,
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
        false_negatives=settings.false_negatives,
    )


class ClipExperiment(Experiment):
    """A pair of towers for pictures and captions: retrieval both ways, zero-shot classes."""

    method: Clip
    splits: CaptionSplits
    held_out: Captioned | None

    def __init__(self, settings: ClipSettings, handed: Handed | None) -> None:
        self.settings, self.towers = settings, build_towers(settings)
        frozen = settings.image_tower is not None
        self.splits = load_splits(settings, self.towers.image_size, handed, frozen=frozen)
        self.population = len(self.splits.train)
        on_validation = settings.eval_split == "validation"
        self.held_out = self.splits.test if on_validation else self.splits.distractors

    def build(self) -> None:
        settings, towers, data = self.settings, self.towers, self.splits.train
        say(self.splits.in_words(settings.eval_split, towers.image_size))
        objective = build_objective(settings, self.population)
        self.method = Clip(towers, objective, random_look(towers, settings), settings)
        splits = self.splits
        self.evaluator = Evaluator(settings, splits.test, splits.distractors, splits.style)
        if isinstance(data, StreamedPairs):
            self.batches = StreamedBatches(data, towers)
        else:
            self.batches = TrainingBatches(data, towers, settings)

    def evaluate(self) -> dict[str, float]:
        return self.evaluator(self.towers, self.exponents())

    def validate(self) -> float:
        assert self.held_out is not None
        return mean_recall(self.towers, self.held_out, self.exponents())

    def files(self) -> dict[str, Tensors]:
        kept = {
            "examples.safetensors": self.evaluator.outcomes,
            "towers.safetensors": self.towers.state_dict(),
        }
        if self.settings.save_embeddings and self.evaluator.embedded is not None:
            images, texts, owner, _ = self.evaluator.embedded
            kept["embeddings.safetensors"] = {"images": images, "texts": texts, "owner": owner}
        return kept
