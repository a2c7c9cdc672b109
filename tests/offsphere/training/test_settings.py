"""Settings that cannot be meant: refused before anything begins, by the name of their flag."""

import pytest

from crossmodal.settings import ClipSettings
from offsphere.training.settings import LONGEST_RUN, ImageSettings, TrainSettings, steps_of
from text.settings import RetrievalSettings


@pytest.mark.parametrize(
    ("settings", "changes", "said"),
    [
        (ImageSettings, {"image_size": 1_000_000}, "--image-size must be at most 8,192"),
        (ImageSettings, {"projector_dim": 10**11}, "--projector-dim must be at most 65,536"),
        (ImageSettings, {"projector_hidden": 10**11}, "--projector-hidden must be at most 65,536"),
        (ImageSettings, {"projector_layers": 10**6}, "--projector-layers must be at most 100"),
        (ImageSettings, {"threads": 1_000_000}, "--threads must be at most 1,024"),
        (ImageSettings, {"threads": 0}, "--threads must be above 0"),
        (ClipSettings, {"image_size": 1_000_000}, "--image-size must be at most 8,192"),
        (RetrievalSettings, {"max_length": 100_000}, "--max-length must be at most 8,192"),
        (RetrievalSettings, {"width": 10**9}, "--width must be at most 65,536"),
    ],
)
def test_settings_beyond_measure(settings, changes, said):
    with pytest.raises(ValueError, match=said):
        settings(**changes)


@pytest.mark.parametrize(
    ("budget", "said"),
    [
        ({"epochs": 1e308}, "--epochs=1e\\+308 is no budget"),
        ({"samples": 10**40}, "--samples=1000"),
    ],
)
def test_an_endless_budget(budget, said):
    with pytest.raises(ValueError, match=said):
        steps_of(TrainSettings(batch_size=10, **budget), 1000)


def test_the_longest_budget():
    assert steps_of(TrainSettings(batch_size=10, samples=10 * LONGEST_RUN), 1000) == LONGEST_RUN
