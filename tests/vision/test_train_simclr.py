"""--view-norm: which images batch-norm takes its statistics from."""

import pytest
import torch
from torch import nn

from vision.methods import SimCLR
from vision.train_simclr import Config

ROWS, WIDTH = 6, 4


class Normed(nn.Module):
    """An encoder that is one batch-norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, eps=1e-30).double()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, self.norm(x)


def standardised(x: torch.Tensor) -> torch.Tensor:
    return (x - x.mean(0)) / x.std(0, correction=0)


def method(view_norm: str) -> SimCLR:
    built = SimCLR(Config(cell="dot", scale="fixed", view_norm=view_norm), 50).double()
    built.encoder = Normed()  # pyright: ignore
    built.two_views = lambda batch, _step, _rows=None: batch
    return built


@pytest.mark.parametrize("view_norm", ["stacked", "separate"])
def test_statistics_are_those_of_both_views_or_of_each(view_norm):
    draw = torch.Generator().manual_seed(0)
    views = torch.randn(2 * ROWS, WIDTH, generator=draw).double()
    views[ROWS:] = 3 * views[ROWS:] + 1  # the two views differ as a whole
    trained = method(view_norm)
    step = trained(views, 0)
    a, b = views.chunk(2)
    if view_norm == "separate":
        want = standardised(a), standardised(b)
        running = 0.9 * 0.1 * a.mean(0) + 0.1 * b.mean(0)
    else:
        want = standardised(views).chunk(2)
        running = 0.1 * views.mean(0)
    torch.testing.assert_close((step.left, step.right), want)
    torch.testing.assert_close(trained.encoder.norm.running_mean, running)


def test_it_is_refused_where_no_batch_norm_is_left():
    with pytest.raises(ValueError, match="no effect with --norm=group"):
        Config(view_norm="separate", norm="group")
