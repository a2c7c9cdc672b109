"""Vectors with a known answer, as an audit takes them."""

from __future__ import annotations

import torch
from torch import Tensor

from offsphere.audit.report import Data, Report, audit
from offsphere.audit.scoring import How
from offsphere.audit.search import Direction, Search
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


def searches(images, texts, owner, data: str = "planted") -> list[Search]:
    """Images ask for their texts, and texts for their image."""
    rows, captions = torch.arange(len(images)), torch.arange(len(texts))
    to_text, to_image = ({f"{way}_r{k}": k for k in (1, 5, 10)} for way in ("i2t", "t2i"))
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


def audited(images, texts, owner, how: How = HOW, data: str = "planted") -> Report:
    sides = {"image": torch.as_tensor(images), "text": torch.as_tensor(texts)}
    found = Data(f"{len(images)} images.", sides, searches(images, texts, owner, data))
    return audit(data, "cosine", [found], how)


def verdicts(report: Report) -> dict[str, list[str]]:
    """Of each direction: on magnitude, on the query's norm, on remedies."""
    return {x.direction: [said.verdict for said in x.statements] for x in report.advice}
