"""Vectors with a known answer, as an audit takes them."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from offsphere.audit.measures import Side
from offsphere.audit.report import Data, Report, audit
from offsphere.audit.scoring import How, by_guessing, outcomes, score
from offsphere.audit.search import Direction, Search
from offsphere.audit.table import Table
from offsphere.names import CORNERS

HOW = How(dict(CORNERS), "cosine", resamples=200)


def directions(rows: int, width: int, seed: int) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(
        torch.randn(rows, width, generator=random, dtype=torch.float64)
    )


def junk_captions(images: int = 300) -> dict[str, Tensor]:
    """Each image has a long caption near to it and a short one that points anywhere."""
    pictures = directions(images, 8, 0)
    good = torch.nn.functional.normalize(pictures + 0.5 * directions(images, 8, 1)) * 3
    junk = directions(images, 8, 2) * 0.3
    owner = torch.arange(images)
    return {
        "images": pictures,
        "texts": torch.cat([good, junk]),
        "owner": torch.cat([owner, owner]),
    }


def noisy_norms(images: int = 300) -> dict[str, Tensor]:
    """Directions that fit, and norms that have nothing to do with anything."""
    pictures = directions(images, 8, 0)
    texts = torch.nn.functional.normalize(pictures + 0.7 * directions(images, 8, 1))
    random = torch.Generator().manual_seed(3)
    norms = torch.randn(2, images, 1, generator=random, dtype=torch.float64).exp()
    return {
        "images": pictures * norms[0],
        "texts": texts * norms[1],
        "owner": torch.arange(images),
    }


def searches(
    images, texts, owner, data: str = "planted", ks: tuple[int, ...] = (1, 5, 10)
) -> list[Search]:
    """Images ask for their texts, and texts for their image."""
    rows, captions = torch.arange(len(images)), torch.arange(len(texts))
    to_text, to_image = ({f"{way}_r{k}": k for k in ks} for way in ("i2t", "t2i"))
    return [
        Search(
            Direction(data, "image to text", "image", "right", to_text),
            *(images, texts, owner, captions),
            query_example=rows,
            item_example=owner,
        ),
        Search(
            Direction(data, "text to image", "text", "left", to_image),
            *(texts, images, captions, owner),
            query_example=owner,
            item_example=rows,
        ),
    ]


def audited(
    images, texts, owner, how: How = HOW, data: str = "planted", trained: str = "cosine"
) -> Report:
    sides = {"image": Side(torch.as_tensor(images)), "text": Side(torch.as_tensor(texts))}
    found = Data(f"{len(images)} images.", sides, searches(images, texts, owner, data))
    return audit(data, trained, [found], how)


def verdicts(report: Report) -> dict[str, list[str]]:
    """Of each direction: on magnitude, on the query's norm, on remedies."""
    wanted = ("", "cell", "confidence", "remedies")
    return {
        x.direction: [said.verdict for said in x.statements if said.about in wanted]
        for x in report.advice
    }


def pair_retrieval(images, texts, owner, exponents, ks=(1, 5, 10)) -> SimpleNamespace:
    """Metrics and outcomes of both directions under a cell's two exponents."""
    metrics, found = {}, {}
    for search, exponent in zip(
        searches(images, texts, owner, ks=ks), exponents[::-1], strict=True
    ):
        got = outcomes(search, [exponent])[exponent]
        metrics |= {name: x.mean().item() for name, x in got.values.items()}
        chance = by_guessing(search)["chance"]
        metrics |= {f"chance_{name}": x for name, x in chance.items()}
        found |= got.values | {f"{search.direction.hit[:3]}_rank": got.rank}
    return SimpleNamespace(metrics=metrics, outcomes=found)


def zero_shot(images, vectors, labels) -> SimpleNamespace:
    """Metrics and outcomes of naming the class whose vector has the largest product."""
    recalls = {"top1": 1, "top5": 5} if len(vectors) >= 5 else {"top1": 1}
    words = Direction("set", "image to class", "image", "right", recalls, "mean_class_recall")
    search = Search(words, images, vectors, torch.arange(len(images)), labels)
    table = Table()
    found = score(search, How({"dot": (0.0, 0.0), "cosine": (1.0, 1.0)}, "dot", 1), table)["dot"]
    place = ("set", "image to class")
    metrics = {name: table.value(*place, "dot", name) for name in words.metrics}
    metrics |= {name: table.value(*place, name, "top1") for name in ("chance", "majority")}
    return SimpleNamespace(metrics=metrics, outcomes=found.values | {"rank": found.rank})
