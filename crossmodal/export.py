"""A run's towers as a checkpoint that open_clip, and clip-benchmark's own command, can load.

    offsphere export --run=results/train_clip/cosine-seed0-1a2b3c4d --out=my_clip
    clip_benchmark eval --model=local-dir:my_clip --pretrained= --dataset=...

open_clip and clip-benchmark always score with cosines. For another cell that is not the score the
model was trained with, so it is refused unless --as-cosine says that this is what is wanted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crossmodal.settings import MODELS
from offsphere.run.command import one_line_errors
from offsphere.run.config import parse
from offsphere.run.files import atomic_write
from offsphere.run.record import find_run, write_json

CONFIG, WEIGHTS = "open_clip_config.json", "open_clip_model.safetensors"


@dataclass(frozen=True)
class Config:
    run: str
    """The folder of a run of train_clip.py, or the beginning of its name."""
    out: str
    """The folder to write: open_clip_config.json and open_clip_model.safetensors."""
    as_cosine: bool = False
    """Export a cell other than cosine too, although its readers will score it as cosine."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "run", find_run(self.run))


def run(config: Config) -> Path:
    """Write the folder that `local-dir:` names, and return it."""
    import open_clip
    import torch
    from safetensors.torch import save

    from crossmodal.subjects import load_run
    from offsphere.encoders.clip import registered_name
    from offsphere.training.checkpoint import load_checkpoint

    trained, out = load_run(Path(config.run)), Path(config.out)
    if trained.towers.frozen is not None:
        raise ValueError(
            f"{config.run} has the frozen image tower {trained.settings.image_tower}, which "
            "open_clip cannot hold: measure it with crossmodal/benchmark.py --run instead."
        )
    if trained.exponents != (1.0, 1.0) and not config.as_cosine:
        raise ValueError(
            f"{config.run} was trained with the cell {trained.settings.cell}, but open_clip and "
            "clip-benchmark score with cosines, which loses what its magnitudes say. Measure it "
            "with crossmodal/benchmark.py --run, or export it with --as-cosine all the same."
        )
    if out.exists() and any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty: choose another --out.")
    model = trained.towers.model
    state = load_checkpoint(Path(config.run) / "checkpoint")
    scale = torch.tensor(-math.log(trained.settings.temperature))
    if state is not None:
        objective = {k: state["method"][f"objective.{k}"] for k in ("log_scale", "ratio")}
        scale = objective["log_scale"] - torch.log(objective["ratio"])
    with torch.no_grad():  # what open_clip multiplies cosines with
        model.logit_scale.copy_(scale)  # pyright: ignore
    name = registered_name(trained.settings.model, MODELS)
    facts: dict[str, Any] = open_clip.get_model_config(name)  # pyright: ignore
    vision = {**facts["vision_cfg"], "image_size": trained.towers.image_size}
    preprocess = {
        "mean": list(trained.towers.mean),
        "std": list(trained.towers.std),
        "interpolation": "bilinear",
        "resize_mode": "shortest",
    }
    out.mkdir(parents=True, exist_ok=True)
    content = save({key: x.contiguous() for key, x in model.state_dict().items()})
    atomic_write(out / WEIGHTS, lambda file: file.write(content))
    write_json(
        out / CONFIG, {"model_cfg": {**facts, "vision_cfg": vision}, "preprocess_cfg": preprocess}
    )
    return out


def main(argv: Sequence[str] | None = None) -> None:
    """Flags in, a folder out."""
    with one_line_errors("offsphere export", "Nothing was written."):
        config = parse(Config, argv, description=__doc__, name="offsphere export")
        out = run(config)
        print(f"{out}: {CONFIG}, {WEIGHTS}; open_clip.create_model('local-dir:{out}') loads it.")


if __name__ == "__main__":
    main()
