"""What a trained pair of towers is worth: retrieval both ways, zero-shot classes, magnitude."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from crossmodal.captions import EMOJI_STYLES, Captioned
from crossmodal.searches import CLASSIFICATION, RETRIEVAL, Encoded, Features
from crossmodal.settings import ClipSettings
from crossmodal.templates import load_templates, prompts_of
from offsphere.audit.scoring import by_guessing, outcomes
from offsphere.data.pictures import normalised, resize_square
from offsphere.encoders.clip import ClipTowers, FrozenTower
from offsphere.encoders.store import Store, cache_folder
from offsphere.evaluation.geometry import (
    cohens_d,
    hubness,
    log_norm_cosine_correlation,
    modality_gap,
    side_norms,
)
from offsphere.names import CORNERS
from offsphere.run.progress import track

if TYPE_CHECKING:
    from jaxtyping import Float, Int

CHUNK = 256
# Of a frozen tower: on a CPU more than a few spend most of their time in fresh pages of memory.
FROZEN_CPU_CHUNK, FROZEN_CHUNK = 8, 64
NEIGHBOURS = 10
GOOD, BAD = 3.0, 1.5
"""Mean human judgements, from 1 to 4: from 3 on a caption fits, up to 1.5 it does not (ours)."""


class Retrieved(NamedTuple):
    """What both directions are worth under one cell."""

    metrics: dict[str, float]
    """i2t_r<k> and t2i_r<k>, their chance_..., and mean_r1, the mean of both directions."""
    outcomes: dict[str, Tensor]
    """Per image i2t_hit<k> and i2t_rank, per caption t2i_hit<k> and t2i_rank."""


class Evaluator:
    """Called with towers, gives named numbers; the last call's per-example `outcomes` stay."""

    def __init__(
        self,
        settings: ClipSettings,
        test: Captioned,
        distractors: Captioned | None = None,
        style: Captioned | None = None,
    ) -> None:
        self.settings = settings
        self.test, self.distractors, self.style = test, distractors, style
        self.outcomes: dict[str, Tensor] = {}
        self.embedded: Features | None = None
        self.judged = None
        if settings.judgements is not None:
            self.judged = read_judgements(Path(settings.judgements), test)

    def __call__(self, towers: ClipTowers, exponents: tuple[float, float]) -> dict[str, float]:
        """Metrics on the test data, scored with these exponents and with every corner cell."""
        training = towers.training
        towers.eval()
        test = embed(towers, self.test)
        self.embedded, self.outcomes = test, {}
        metrics = self._retrieval(test, exponents)
        metrics |= self._classes(towers, self.test, test.images, exponents, "test")
        metrics |= self._magnitude(test, exponents)
        if self.distractors is not None:
            metrics |= _against(embed(towers, self.distractors), test)
        if self.style is not None:
            style = embed(towers, self.style)
            found = retrieved(style, {"": exponents})[""]
            metrics |= {f"style/{name}": value for name, value in found.metrics.items()}
            metrics |= self._classes(towers, self.style, style.images, exponents, "style")
        if self.judged is not None:
            metrics |= judgements(self.judged, test, exponents)
        towers.train(training)
        return metrics

    def _retrieval(self, test: Features, exponents: tuple[float, float]) -> dict[str, float]:
        found = retrieved(test, {"": exponents} | CORNERS)
        own = found.pop("")
        metrics = {f"test/{name}": value for name, value in own.metrics.items()}
        for cell, result in found.items():
            for name in ("i2t_r1", "t2i_r1"):
                metrics[f"test/{name}_scored_{cell}"] = result.metrics[name]
        self.outcomes |= {name: x.float() for name, x in own.outcomes.items()}
        return metrics

    def _classes(
        self,
        towers: ClipTowers,
        data: Captioned,
        images: Tensor,
        exponents: tuple[float, float],
        split: str,
    ) -> dict[str, float]:
        """Zero-shot accuracy for each kind of class that the data have."""
        metrics: dict[str, float] = {}
        default = "emoji" if data.name in EMOJI_STYLES else "photo"
        templates = load_templates(self.settings.templates or default)
        for kind, names in data.classes.items():
            prompts = prompts_of(names, templates)
            texts = encode_texts(towers, [text for texts in prompts for text in texts])
            owner = torch.tensor([c for c, texts in enumerate(prompts) for _ in texts])
            features = Features(images, texts, owner, data.labels[kind])
            (search,) = Encoded(data.name, CLASSIFICATION, features).searches()
            correct = outcomes(search, exponents[1:])[exponents[1]].values["top1"]
            metrics[f"{split}/zero_shot_{kind}"] = correct.mean().item()
            metrics[f"{split}/chance_{kind}"] = 1 / len(names)
            metrics[f"{split}/majority_{kind}"] = by_guessing(search)["majority"]["top1"]
            if split == "test":
                self.outcomes[f"zero_shot_{kind}_correct"] = correct.float()
        return metrics

    def _magnitude(self, test: Features, exponents: tuple[float, float]) -> dict[str, float]:
        """What the norms of the two modalities look like, and what they tell."""
        numbers: dict[str, Tensor] = {}
        gap = modality_gap(test.images, test.texts)
        numbers["modality_gap"], numbers["modality_gap_raw"] = gap["gap"], gap["gap_raw"]
        numbers["norm_ratio"] = gap["norm_ratio"]
        pairs = test.images[test.owner], test.texts
        numbers["log_norm_cosine_correlation"] = log_norm_cosine_correlation(*pairs)
        directions = (
            ("image", "i2t", test.images, test.texts, exponents[1]),
            ("text", "t2i", test.texts, test.images, exponents[0]),
        )
        for side, direction, queries, items, exponent in directions:
            k = min(NEIGHBOURS, len(items) - 1)
            hubs = hubness(queries, items, k, item_exponent=exponent)
            numbers[f"{direction}_hubness"] = hubs["skewness"]
            numbers[f"{direction}_hub_norm_correlation"] = hubs["norm_correlation"]
            self.outcomes[f"norm_{side}"] = queries.norm(dim=1)
            right = self.outcomes[f"{direction}_hit1"] > 0.5
            if 1 < int(right.sum()) < len(right) - 1:
                length = queries.norm(dim=1)
                numbers[f"cohens_d_{side}_right"] = cohens_d(length[right], length[~right])
        norms = side_norms(image=test.images, text=test.texts)
        return {f"test/{name}": float(value) for name, value in (norms | numbers).items()}


def mean_recall(towers: ClipTowers, data: Captioned, exponents: tuple[float, float]) -> float:
    """R@1 of images for texts and of texts for images, the mean of both."""
    training = towers.training
    towers.eval()
    found = retrieved(embed(towers, data), {"": exponents})[""]
    towers.train(training)
    return found.metrics["mean_r1"]


def retrieved(embedded: Features, cells: Mapping[str, tuple[float, float]]) -> dict[str, Retrieved]:
    """Recalls both ways by cell; cells that tie by construction are measured once."""
    to_text, to_image = Encoded("test", RETRIEVAL, embedded).searches()
    by_text = outcomes(to_text, list({float(text) for _, text in cells.values()}))
    by_image = outcomes(to_image, list({float(image) for image, _ in cells.values()}))
    by_guess = by_guessing(to_text)["chance"]
    # Every text has one image: k / images exactly, which the general formula gives but rounded.
    by_guess |= {x: min(k / to_image.count, 1.0) for x, k in to_image.direction.recalls.items()}
    chance = {f"chance_{name}": value for name, value in by_guess.items()}
    found = {}
    for name, (image, text) in cells.items():
        texts, images = by_text[float(text)], by_image[float(image)]
        hits = texts.values | images.values
        metrics = {metric: x.mean().item() for metric, x in hits.items()}
        metrics["mean_r1"] = (metrics["i2t_r1"] + metrics["t2i_r1"]) / 2
        kept = {metric.replace("_r", "_hit"): x for metric, x in hits.items()}
        ranks = {"i2t_rank": texts.rank, "t2i_rank": images.rank}
        found[name] = Retrieved(metrics | chance, kept | ranks)
    return found


def _against(distractors: Features, test: Features) -> dict[str, float]:
    """Cohen's d of the norms of items that have a match against those that match nothing."""
    return {
        f"test/cohens_d_{side}_distractors": float(cohens_d(a.norm(dim=1), b.norm(dim=1)))
        for side, a, b in (
            ("image", test.images, distractors.images),
            ("text", test.texts, distractors.texts),
        )
    }


def embed(towers: ClipTowers, data: Captioned) -> Features:
    """All pictures, unaugmented, and all captions that are queries."""
    captions = [texts[: data.queries] for texts in data.captions]
    owner = [image for image, texts in enumerate(captions) for _ in texts]
    texts = encode_texts(towers, [text for texts in captions for text in texts])
    return Features(encode_pictures(towers, data), texts, torch.tensor(owner))


@torch.no_grad()
def encode_pictures(towers: ClipTowers, data: Captioned) -> Float[Tensor, "n d"]:
    """Raw embeddings of the pictures in order, on the CPU."""
    device = next(towers.parameters()).device
    if towers.frozen is not None:
        features = frozen_features(towers.frozen, data)
        parts = [towers.encode_features(rows.to(device)) for rows in features.split(CHUNK)]
    else:
        chunks = torch.arange(len(data)).split(CHUNK)
        parts = [
            towers.encode_image(towers.normalise(data.batch(rows).to(device)))
            for rows in track(chunks, len(chunks), "encoding images")
        ]
    return torch.cat([part.float().cpu() for part in parts])


@lru_cache(maxsize=8)
def frozen_features(tower: FrozenTower, data: Captioned) -> Float[Tensor, "n f"]:
    """The tower's features of all pictures in order, on the CPU."""
    facts = [tower.fingerprint(), data.fingerprint]
    kept = Store(cache_folder()).get(facts, lambda: {"features": _encode_frozen(tower, data)})
    return kept["features"]


def _encode_frozen(tower: FrozenTower, data: Captioned) -> Float[Tensor, "n f"]:
    print(f"Encoding {len(data):,} pictures once; their features are cached.", flush=True)
    device = next(tower.parameters()).device
    parts = []
    size = FROZEN_CPU_CHUNK if device.type == "cpu" else FROZEN_CHUNK
    chunks = torch.arange(len(data)).split(size)
    for rows in track(chunks, len(chunks), "encoding pictures"):
        pixels = resize_square(data.batch(rows), tower.image_size).to(device)
        pixels = normalised(pixels, tower.mean, tower.std)
        pixels = pixels.contiguous(memory_format=torch.channels_last)
        parts.append(tower(pixels).float().cpu())
    return torch.cat(parts)


@torch.no_grad()
def encode_texts(towers: ClipTowers, texts: Sequence[str]) -> Float[Tensor, "m d"]:
    """Raw embeddings of texts in order, on the CPU; texts of like length go together."""
    device = next(towers.parameters()).device
    tokens = towers.tokenize(texts)
    order = tokens.ne(0).sum(1).argsort(stable=True)
    chunks = order.split(CHUNK)
    parts = [
        towers.encode_text(towers.trim(tokens[rows]).to(device)).float().cpu()
        for rows in track(chunks, len(chunks), "encoding texts")
    ]
    return torch.cat(parts)[order.argsort()]


class Judged(NamedTuple):
    """Pairs of a picture and a caption, and what people thought of them."""

    image: Int[Tensor, " p"]
    text: Int[Tensor, " p"]
    """Which of the test data's captions, counted through all pictures."""
    score: Float[Tensor, " p"]
    """Mean judgement, from 1 (unrelated) to 4 (describes it)."""


def read_judgements(file: Path, data: Captioned) -> Judged:
    """The pairs of Flickr8k's ExpertAnnotations whose picture and caption are in the data."""
    if not file.is_file():
        raise FileNotFoundError(f"--judgements: there is no file {file}.")
    row_of = {Path(key).stem: row for row, key in enumerate(data.keys)}
    first = torch.tensor([0, *(len(texts[: data.queries]) for texts in data.captions)]).cumsum(0)
    pairs, total = [], 0
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        try:
            image, caption, *scores = line.split("\t")
            described, _, which = caption.partition("#")
            score = sum(float(x) for x in scores) / len(scores)
            index = int(which)
        except (ValueError, ZeroDivisionError):
            raise ValueError(
                f"{file}, line {number}: expected image, caption#number and judgements between "
                f"tabs, got {line[:60]!r}."
            ) from None
        total += 1
        row, owner = row_of.get(Path(image).stem), row_of.get(Path(described).stem)
        if row is None or owner is None or index >= len(data.captions[owner]):
            continue
        pairs.append((row, int(first[owner]) + index, score))
    if len(pairs) < 3:
        raise ValueError(
            f"{file}: only {len(pairs)} of {total} judged pairs are in {data.name}. Name the test "
            "data that the judgements are about, or leave --judgements away."
        )
    image, text, score = zip(*pairs, strict=True)
    return Judged(torch.tensor(image), torch.tensor(text), torch.tensor(score))


def judgements(judged: Judged, test: Features, exponents: tuple[float, float]) -> dict[str, float]:
    """Do scores follow human judgements, and are fitting items longer than unfitting ones?"""
    from scipy.stats import spearmanr

    from offsphere.cells import shrink

    image, text = test.images[judged.image], test.texts[judged.text]
    metrics: dict[str, float] = {"test/judged_pairs": float(len(judged.score))}
    for name, (left, right) in ({"": exponents} | CORNERS).items():
        scores = torch.linalg.vecdot(shrink(image, left), shrink(text, right))
        suffix = f"_scored_{name}" if name else ""
        correlation, _ = spearmanr(scores.numpy(), judged.score.numpy())
        metrics[f"test/judgement_spearman{suffix}"] = float(correlation)  # pyright: ignore
    good, bad = judged.score >= GOOD, judged.score <= BAD
    for side, x in (("image", image), ("text", text)):
        if min(int(good.sum()), int(bad.sum())) > 1:
            d = cohens_d(x[good].norm(dim=1), x[bad].norm(dim=1))
            metrics[f"test/cohens_d_{side}_judged"] = float(d)
    return metrics
