"""An image-text run's towers for use elsewhere: open_clip, MTEB, or points for the atlas.

open_clip and clip-benchmark always score with cosines. For another cell that is not the score the
model was trained with, so it is refused unless --as-cosine says that this is what is wanted.
"""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import open_clip
import torch
from safetensors.torch import save_file
from torch import nn
from torchvision.transforms.v2.functional import to_pil_image

from crossmodal.captions import Captioned
from crossmodal.evaluate import embed, retrieved
from crossmodal.settings import MODELS
from crossmodal.splits import load_splits
from crossmodal.subjects import Trained, load_run
from offsphere.cells import shrink
from offsphere.encoders.clip import registered_name
from offsphere.evaluation.geometry import top_items
from offsphere.export.atlas import NEAR, Points, check_file, times_found, write_points
from offsphere.export.card import Licence, model_card
from offsphere.export.forms import check_packages, write_form
from offsphere.objective import SIGLIP_BIAS
from offsphere.run.files import whole_folder
from offsphere.run.record import RunFolder, write_json
from offsphere.run.scripts import Export
from offsphere.training.checkpoint import load_checkpoint
from offsphere.training.run import scored_exponents

CONFIG, WEIGHTS = "open_clip_config.json", "open_clip_model.safetensors"
SIDES = ("image", "text")
FIGURES = {
    f"{when}/{way}_r1{suffix}": f"R@1, {words}{said}"
    for when, suffix, said in (
        ("test", "", ""),
        ("untrained", "", ", untrained"),
        ("test", "_scored_cosine", ", if scored with cosine"),
        ("test", "_scored_dot", ", if scored with dot"),
    )
    for way, words in (("i2t", "image to text"), ("t2i", "text to image"))
}


def export(asked: Export) -> str:
    """Write what is asked for, and say how it is used."""
    forms = {"open_clip": _open_clip, "mteb": _mteb, "atlas": _atlas}
    return write_form(asked, forms, "an image-text run")


def _open_clip(asked: Export) -> str:
    trained = load_run(asked.run)
    _check_towers(asked.run, trained)
    cost = _cost(asked.run, trained) if trained.exponents != (1.0, 1.0) else ""
    if cost and not asked.as_cosine:
        raise ValueError(
            f"{asked.run} was trained with the cell {trained.settings.cell}, but open_clip and "
            f"clip-benchmark score with cosines, which loses what its magnitudes say{cost}. Keep "
            "the cell with --as=mteb, measure it with crossmodal/benchmark.py --run, or export it "
            "with --as-cosine all the same."
        )
    with whole_folder(asked.out) as folder:
        _save(asked.run, trained, folder)
    said = f" Scored with cosines{cost}." if cost else ""
    load = f"open_clip.create_model('local-dir:{asked.out}') loads it."
    return f"{asked.out}: {CONFIG}, {WEIGHTS}; {load}{said}"


def _mteb(asked: Export) -> str:
    check_packages("mteb", "mteb")
    from offsphere.export.mteb_model import USE, write_cell

    trained = load_run(asked.run)
    _check_towers(asked.run, trained)
    use = USE.format(out=asked.out)
    with whole_folder(asked.out) as folder:
        _save(asked.run, trained, folder)
        exponents = scored_exponents(trained.settings, trained.exponents)
        write_cell(folder, asked.run.name, SIDES, exponents)
        card = model_card(
            RunFolder(asked.run),
            trained.settings,
            exponents,
            title=f"{trained.settings.model}, {trained.settings.cell}",
            library="open_clip",
            licence=Licence("unknown", "what the settings below say"),
            sides=SIDES,
            use=use,
            figures=FIGURES,
        )
        (folder / "README.md").write_text(card)
    return f"{asked.out}: a model for MTEB.\n\n{use}"


def _check_towers(run: Path, trained: Trained) -> None:
    if trained.towers.frozen is not None:
        raise ValueError(
            f"{run} has the frozen image tower {trained.settings.image_tower}, which "
            "open_clip cannot hold: measure it with crossmodal/benchmark.py --run instead."
        )


def _cost(run: Path, trained: Trained) -> str:
    """What scoring with cosines does to the run's own figures, as far as it has them."""
    metrics = RunFolder(run).metrics()
    pairs = [
        (words, metrics.get(f"test/{way}_r1"), metrics.get(f"test/{way}_r1_scored_cosine"))
        for way, words in (("i2t", "image to text"), ("t2i", "text to image"))
    ]
    known = [f"{words} R@1 {own:.3f} becomes {cosine:.3f}" for words, own, cosine in pairs if own]
    return f" ({', '.join(known)})" if known else f", and not with {trained.settings.cell}"


def _save(run: Path, trained: Trained, folder: Path) -> None:
    """The files that `local-dir:` names."""
    model = trained.towers.model
    state = load_checkpoint(run / "checkpoint")
    name = registered_name(trained.settings.model, MODELS)
    facts: dict[str, Any] = open_clip.get_model_config(name)  # pyright: ignore
    log_scale, bias = torch.tensor(-math.log(trained.settings.temperature)), None
    if state is not None:
        log_scale, ratio = (state["method"][f"objective.{k}"] for k in ("log_scale", "ratio"))
        log_scale, bias = log_scale - torch.log(ratio), state["method"].get("objective.bias")
    with torch.no_grad():  # what open_clip multiplies cosines with
        model.logit_scale.copy_(log_scale)  # pyright: ignore
    if bias is not None:  # and what it adds to them, after the loss siglip
        model.logit_bias = nn.Parameter(bias)
        facts["init_logit_bias"] = SIGLIP_BIAS
    vision = {**facts["vision_cfg"], "image_size": trained.towers.image_size}
    preprocess = {
        "mean": list(trained.towers.mean),
        "std": list(trained.towers.std),
        "interpolation": "bilinear",
        "resize_mode": "shortest",
    }
    save_file({key: x.contiguous() for key, x in model.state_dict().items()}, folder / WEIGHTS)
    write_json(
        folder / CONFIG,
        {"model_cfg": {**facts, "vision_cfg": vision}, "preprocess_cfg": preprocess},
    )


def _atlas(asked: Export) -> str:
    check_file(asked.out)
    trained = load_run(asked.run)
    towers, settings = trained.towers, trained.settings
    exponents = scored_exponents(settings, trained.exponents)
    data = load_splits(settings, towers.image_size, frozen=towers.frozen is not None).test
    found = embed(towers, data)
    hits = retrieved(found, {"": exponents})[""].outcomes
    images, texts = (
        shrink(x, g) for x, g in zip((found.images, found.texts), exponents, strict=True)
    )
    keys = data.keys or tuple(map(str, range(len(data))))
    owner = found.owner.tolist()
    asked_texts = [text for texts in data.captions for text in texts[: data.queries]]
    near_texts = top_items(images, texts, min(NEAR, len(texts)))[1]
    near_images = top_items(texts, images, min(NEAR, len(images)))[1]
    sides = (
        Points(
            "image",
            keys,
            [texts[0] for texts in data.captions],
            found.images,
            hits["i2t_hit1"] > 0.5,
            times_found(near_images, len(images)),
            _png(data),
        ),
        Points(
            "text",
            [f"{keys[image]}#{row}" for row, image in enumerate(owner)],
            asked_texts,
            found.texts,
            hits["t2i_hit1"] > 0.5,
            times_found(near_texts, len(texts)),
        ),
    )
    return write_points(asked.out, sides)


def _png(data: Captioned) -> list[bytes]:
    found = []
    for row in range(len(data)):
        file = io.BytesIO()
        to_pil_image(data.batch(torch.tensor([row]))[0]).save(file, "png")
        found.append(file.getvalue())
    return found
