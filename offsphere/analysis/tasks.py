"""The lanes' tasks: who is left, who is right, which is the query; and what papers printed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Role(NamedTuple):
    """What the two sides of a task are to each other."""

    task: str
    kind: str
    """asymmetric, symmetric or control."""
    sides: str
    """Who is left, who is right and which of them is the query."""
    trained: str | None = None
    """The metric of the trained direction, where a study's own metric takes in another."""


class Reference(NamedTuple):
    """A published line beside ours."""

    name: str
    level: str
    points: list[tuple[float, float]]


def role_of(script: str, settings: Mapping[str, Any]) -> Role:
    """What left and right are in a script's task, and which of them is the query."""
    task, direction = settings.get("task"), settings.get("direction")
    if script == "train_simclr":
        return Role(
            "Two views of an image",
            "symmetric",
            "Left is the anchor (the query), right its candidates; each view is the anchor once.",
        )
    if script == "train_moco":
        return Role(
            "Two views of an image, momentum keys",
            "control",
            "Left is the query, right the keys and the queue, which get no gradient.",
        )
    if script == "train_clip":
        query = {
            "image_to_text": "The loss is one-way: the image is the query.",
            "text_to_image": "The loss is one-way: the text is the query.",
        }.get(str(direction), "The loss is two-way: each side is the query once.")
        way = {"image_to_text": "image as query", "text_to_image": "text as query"}
        return Role(
            f"Image and text, {way.get(str(direction), 'two-way loss')}",
            "asymmetric" if direction in way else "symmetric",
            f"Left is the image, right the text. {query} In scoring the image is the query of i2t, "
            "the text that of t2i.",
            {"image_to_text": "test/i2t_r1", "text_to_image": "test/t2i_r1"}.get(str(direction)),
        )
    if script == "train_retrieval":
        kinds = {"scratch": ", from scratch", "static": ", static vectors"}
        start = kinds.get(str(settings.get("encoder")), "")
        if task == "captions":
            return Role(
                f"Two captions of a picture{start}",
                "symmetric",
                "Left and right are captions of the same picture; left is the query in scoring.",
            )
        if task == "halves":
            return Role(
                f"Two halves of a document{start}",
                "symmetric",
                "Left and right are halves of the same documents; left is the query in scoring.",
            )
        return Role(
            f"Query and document{start}",
            "asymmetric",
            "Left is the query, right the document it finds.",
        )
    if script == "train_sts":
        return Role(
            "Two sentences, graded similarity",
            "symmetric",
            "Left and right are the two sentences of a pair; neither is a query.",
        )
    if task in ("asymmetric", "symmetric"):
        return Role(f"Planted, {task}", str(task), "Left is the query, right the candidates.")
    return Role(script, "", "No query: the script trains no pair of sides.")


def outcomes_of(metric: str) -> tuple[str, ...]:
    """The per-example outcomes whose mean a metric of the lanes is; of several, their mean."""
    if metric.startswith("untrained/"):
        after = outcomes_of(metric.replace("untrained/", "test/", 1))
        return tuple(f"untrained_{name}" for name in after)
    name = metric.removeprefix("test/")
    if name == "mean_r1":
        return ("i2t_hit1", "t2i_hit1")
    if name.startswith(("i2t_r", "t2i_r")):
        return (name.replace("_r", "_hit"),)
    if name.startswith(("probe", "knn", "zero_shot_")):
        return (f"{name}_correct",)
    return (name,)


def unit_of(outcome: str) -> str:
    """The outcome that has one number per independent example: several captions share an image."""
    return "i2t_hit1" if outcome.startswith(("i2t", "t2i")) else outcome


def published_variance() -> list[Reference]:
    """The variance of negative similarities by batch size, as the paper's table 1 has it."""
    from offsphere.analysis.published import published

    try:
        table = published("embedding_similarities_table01")
    except FileNotFoundError:
        return []
    return [
        Reference(
            f"published, weight {weight:g} (CIFAR-100, 2506.09781v2 table 1)",
            f"{weight:g}",
            list(zip(part["batch_size"].astype(float), part["value"], strict=True)),
        )
        for weight, part in table.groupby("variance_weight")
    ]
