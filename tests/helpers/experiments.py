"""Experiments whose parts are given one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from offsphere.training.experiment import Experiment, Method


def given(
    method: Method,
    batches: Any,
    population: int,
    evaluate: Callable[[], dict[str, float]] = dict,
    validate: Callable[[], float] | None = None,
) -> Experiment:
    """An experiment that is built already."""
    found = Experiment()
    found.method, found.batches, found.population = method, batches, population
    found.evaluate = evaluate
    if validate is not None:
        found.held_out, found.validate = "given", validate
    return found
