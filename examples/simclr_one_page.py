"""SimCLR with a normalisation cell and the variance term, whole, on one page.

    python examples/simclr_one_page.py
    python examples/simclr_one_page.py dot 0        # the cell, the weight of the variance term

The pictures are the emoji that come with the installation; the label is the emoji's group. What
vision/train_simclr.py adds: the calibrated scale, checkpoints, ranks, records, intervals.
"""

import sys

import torch
from torch import Tensor, nn

from offsphere.cells import Cell, shrink
from offsphere.data.emoji import emoji_of_split, emoji_pictures, groups, load_emoji
from offsphere.data.views import Views
from offsphere.encoders.images import image_encoder
from offsphere.evaluation.knn import knn
from offsphere.losses import nt_xent
from offsphere.variance import negative_variance

SIZE, BATCH, STEPS, TEMPERATURE = 32, 64, 80, 0.2


def load(split: str) -> tuple[Tensor, Tensor]:
    """Pictures of a split (bytes, n x 3 x 32 x 32) and the group of each."""
    rows = emoji_of_split(split)
    labels = [groups().index(load_emoji()[row].group) for row in rows]
    return torch.from_numpy(emoji_pictures(SIZE)[rows]), torch.tensor(labels)


def train(encoder: nn.Module, cell: Cell, weight: float, images: Tensor) -> list[float]:
    """The loss of each step."""
    views, draw = Views(SIZE, min_scale=0.5), torch.Generator().manual_seed(0)
    parameters = [*encoder.parameters(), *cell.parameters()]  # a learnable cell has two
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    losses = []
    for _ in range(STEPS):
        batch = images[torch.randint(len(images), (BATCH,), generator=draw)]
        both = torch.cat([views(batch, draw), views(batch, draw)])
        _, z = encoder(both)  # raw: only the cell normalises
        left, right = cell(z, z)
        loss = nt_xent(left, right, TEMPERATURE)
        if weight:  # on cosines, whatever the cell
            a, b = shrink(z, 1.0).chunk(2)
            loss = loss + weight * negative_variance(a, b, population=len(images))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def features(encoder: nn.Module, images: Tensor) -> Tensor:
    """The backbone's output for unchanged pictures, by the mean and spread that views have."""
    mean, std = (torch.tensor(x).view(3, 1, 1) for x in (Views.mean, Views.std))
    encoder.eval()
    return torch.cat([encoder((x / 255 - mean) / std)[0] for x in images.split(256)])


def main(cell: str = "cosine", weight: str = "30") -> tuple[list[float], float]:
    torch.manual_seed(0)
    (images, labels), (test, test_labels) = load("train"), load("test")
    encoder = image_encoder("tiny_resnet", image_size=SIZE)
    losses = train(encoder, Cell(cell), float(weight), images)
    found = knn(features(encoder, images), labels, features(encoder, test), test_labels)
    majority = test_labels.bincount().max() / len(test)
    print(f"{cell}: loss {losses[0]:.3f} to {losses[-1]:.3f} in {STEPS} steps; ", end="")
    print(f"kNN {found.accuracy:.1%} of {len(test)} test emoji (largest group: {majority:.1%})")
    return losses, found.accuracy


if __name__ == "__main__":
    main(*sys.argv[1:])
