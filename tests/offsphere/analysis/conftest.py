"""A results folder of four small studies with known effects, for the report and its page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

SEEDS = (0, 1, 42, 1337)
HOSTILE = "</script><script>window.hacked = 1</script>"
CORNERS = {"cosine": (1, 1), "qnorm": (1, 0), "dnorm": (0, 1), "dot": (0, 0)}
REASON = "the loss is nan at step 7 <img src=x onerror='window.hacked = 1'>"


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report") / "results"
    _symmetry(folder / "symmetry")
    _small_batch(folder / "small_batch")
    _hostile(folder / "hostile")
    _theory(folder / "theory")
    return folder


def _run(name: str, script: str, cell: str, seed: int, **settings: Any) -> dict[str, Any]:
    origin = {"script": script, "commit": "0123456789abcdef", "dirty": True, "data_hash": "abc123"}
    start = {"run": name, "status": "finished", "reason": None, **origin}
    return {**start, "cell": cell, "seed": seed, "out": f"/tmp/{seed}", **settings}


def _symmetry(folder: Path) -> None:
    """Text retrieval in two tasks, four cells; dot of halves fails for one seed."""
    import numpy as np

    rng = np.random.default_rng(0)
    rows, curves, examples = [], [], []
    for task, gain in (("query", 0.05), ("halves", -0.02)):
        for cell, (left, right) in CORNERS.items():
            for seed in SEEDS:
                name = f"{cell}-seed{seed}-{task}"
                row = _run(name, "train_retrieval", cell, seed, task=task, scale="calibrated")
                row |= {"part": "text", "derived": f"from {task}"}
                if (task, cell, seed) == ("halves", "dot", 42):
                    rows.append(row | {"status": "failed", "reason": REASON})
                    continue
                value = 0.5 + 0.01 * SEEDS.index(seed) + gain * (1 - left * right)
                row["test/ndcg10"] = value + rng.normal(0, 0.004)
                row["test/norm_query_cv"] = (0.3 if cell == "dnorm" else 0.2) + 0.01 * seed % 0.03
                row["test/floor"] = float(task == "halves" and cell in ("dot", "qnorm"))
                row["test/recall100"] = 0.8 + rng.normal(0, 0.01)
                row["train/loss"] = 123.4 + rng.normal()
                scored = {g: row["test/ndcg10"] - 0.03 * abs(g - right) for g in (0, 1)}
                for other, (_, g) in CORNERS.items():
                    row[f"test/ndcg10_scored_{other}"] = scored[g]
                rows.append(row)
                for step in (0, 10, 20):
                    loss = 2.0 - step / 20 + rng.normal(0, 0.1)
                    curves += [
                        (name, step, "train/loss", loss),
                        (name, step, "samples", 8.0 * step),
                    ]
                size = 4.0 ** (2 - left - right)
                norms = size * np.exp(rng.normal(0, 0.2, 50))
                examples.append((name, "norm_document", norms))
                gains = rng.random(50)
                examples.append((name, "ndcg10", gains - gains.mean() + row["test/ndcg10"]))
    _write(folder, rows, curves, examples)


def _small_batch(folder: Path) -> None:
    """A variance term that gains 0.08 at batch 32 and nothing at 512; another loss beside it."""
    import numpy as np

    rng = np.random.default_rng(1)
    rows = []
    for loss, part in (("nt_xent", "batch_size"), ("dcl", "losses")):
        for batch in (32, 128, 512):
            for weight in (0.0, 30.0):
                for seed in SEEDS:
                    name = f"cosine-seed{seed}-{loss}{batch}w{weight:g}"
                    row = _run(name, "train_simclr", "cosine", seed, part=part, arm="equal_samples")
                    row |= {"loss": loss, "batch_size": batch, "variance_weight": weight}
                    gain = {32: 0.08, 128: 0.03, 512: 0.0}[batch] * (weight > 0)
                    row["test/probe"] = 0.6 + 0.01 * seed % 0.05 + gain + rng.normal(0, 0.003)
                    row["test/knn"] = row["test/probe_embedding"] = row["test/probe"] - 0.1
                    row["run/steps"] = 40_000 // batch
                    row["train/negative_variance"] = 0.15 - 0.05 * (weight > 0)
                    rows.append(row | {"run/seconds": 36.0})
    _write(folder, rows, [], [])


def _hostile(folder: Path) -> None:
    rows = [
        _run(f"run{place}", HOSTILE, cell, 0) | {"test/probe": 0.25, HOSTILE: f"<b>{place}</b>"}
        for place, cell in enumerate(("cosine", HOSTILE))
    ]
    _write(folder, rows, [], [])


def _theory(folder: Path) -> None:
    """A part in which nothing is compared, and the figure that stands for its run's."""
    from PIL import Image

    row = {"run": "seed0-1", "status": "finished", "reason": None, "script": "simplex", "seed": 0}
    _write(folder, [row | {"part": "optima", "band/2/plain": 0.15, "bound/slack": 1e-17}], [], [])
    home = folder / "figures" / "optima"
    home.mkdir(parents=True)
    Image.new("RGB", (770, 330), "#ffffff").save(home / "band.webp")


def _write(folder: Path, rows: list, curves: list, examples: list) -> None:
    import pandas as pd

    from offsphere.analysis import tables

    folder.mkdir(parents=True)
    tables.write_runs(pd.DataFrame(rows), folder / tables.RUNS)
    frame = pd.DataFrame(curves, columns=list(tables.CURVE_COLUMNS))
    if curves:
        tables.write_curves(frame, folder / tables.CURVES)
    parts = [
        pd.DataFrame({"run": run, "outcome": name, "example": range(len(x)), "value": x})
        for run, name, x in examples
    ]
    if parts:
        tables.write_examples(pd.concat(parts), folder / tables.EXAMPLES)
