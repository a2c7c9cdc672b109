"""What an encoder is worth: neighbours, linear probes, and its norms as confidence.

    python vision/eval_probe.py --run=results/train_simclr/dot-seed0-1a2b3c4d
    python vision/eval_probe.py --run=results/train_moco/... --data-ood=openmoji --eval-cell=cosine
    python vision/eval_probe.py --backbone=resnet18 --pretrained=weights.safetensors --data=cifar10

A run may be finished or cut: then its last checkpoint is measured. The numbers go into a JSON file
named after the settings, so that no evaluation overwrites another one.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from offsphere.run.command import one_line_errors
from offsphere.run.config import parse, settings_hash, to_dict, unhashed
from offsphere.run.progress import say, speaking
from offsphere.run.record import find_run, provenance, write_json
from offsphere.training.settings import (
    LARGEST_IMAGE,
    MOST_THREADS,
    ImageSettings,
    canonical_eval_cell,
    check_between,
    check_setting,
)
from vision import train_moco, train_simclr

if TYPE_CHECKING:
    from offsphere.encoders.images import ImageEncoder

EVALUATION = ("data", "data_test", "data_ood", "limit", "eval_split", "image_size", "eval_cell")
EVALUATION += ("layer", "knn_k", "probe", "threads", "on_bad_sample")
SCRIPTS: dict[str, type[ImageSettings]] = {
    "train_simclr": train_simclr.Config,
    "train_moco": train_moco.Config,
}
FEATURES = (  # of the table: layer, how its vectors are scored, the metrics of kNN and probe
    ("backbone", "normalised", "test/knn", "test/probe"),
    ("backbone", "raw", "test/knn_raw", "test/probe_raw"),
    ("backbone", "direction, norm", None, "test/probe_polar"),
    ("projector", "eval cell", "test/knn_embedding", None),
    ("projector", "normalised", "test/knn_embedding_cosine", "test/probe_embedding"),
    ("projector", "raw", "test/knn_embedding_dot", "test/probe_embedding_raw"),
    ("projector", "direction, norm", None, "test/probe_embedding_polar"),
)
LAYERS = ("backbone", "embedding")
NORMS = (  # of the table: title, the metric of each layer
    ("norm, mean", ("test/norm_backbone_mean", "test/norm_embedding_mean")),
    ("norm, CV", ("test/norm_backbone_cv", "test/norm_embedding_cv")),
    ("norm tells right votes (AUROC)", ("test/backbone_norm_auroc", "test/norm_auroc")),
    ("calibration error", ("test/backbone_ece", "test/ece")),
    ("... with the norm", ("test/backbone_ece_with_norm", "test/ece_with_norm")),
    ("small norm tells OOD (AUROC)", ("test/backbone_ood_auroc", "test/ood_auroc")),
)


@dataclass(frozen=True)
class Config:
    """`--run` or `--backbone`; a setting that is not given is the run's own."""

    run: str | None = None
    """The folder of a run of train_simclr.py or train_moco.py, or the beginning of its name."""
    backbone: str | None = None
    """Instead of a run: tiny_resnet or any timm name; its features are all there is to probe."""
    pretrained: str | None = None
    """The backbone's weights: a local file or a timm tag; without it they are random."""
    stem: Literal["auto", "small", "standard"] = "auto"
    """The backbone's stem, as in train_simclr.py."""
    seed: int = 0
    """Draws the weights of a backbone without `pretrained`."""
    image_size: int | None = None
    """Side of the pictures that a backbone sees, in pixels; default: 32."""
    data: str | None = None
    """Other data than the run's: emoji, openmoji, cifar10, folder:PATH, wds:PATTERN. The run's
    data_test and limit do not apply to it."""
    data_test: str | None = None
    """Test data if `data` is a wds: pattern without a test split of its own."""
    data_ood: str | None = None
    """A second data set, for the norm as out-of-distribution score."""
    limit: int | None = None
    """Fit neighbours and probes on this many training images."""
    eval_split: Literal["test", "validation"] | None = None
    """What is measured; tune on validation, report test."""
    eval_cell: str | None = None
    """The cell that scores the projector's outputs (of a backbone: its features)."""
    layer: Literal["all", "backbone", "embedding"] | None = None
    """Which features are probed, raw and normalised; default for a backbone: backbone."""
    knn_k: int | None = None
    probe: Literal["lbfgs", "sgd", "sgd_momentum"] | None = None
    """How the linear probe is solved: exactly, or as in the papers by 100 epochs of SGD, with the
    momentum 0.9 of their code (sgd_momentum) or without any."""
    threads: int | None = None
    """CPU threads; another number than the run's gives other last bits."""
    on_bad_sample: Literal["error", "skip"] | None = None
    """A damaged image is an error, or is left out and counted."""
    save_embeddings: bool = unhashed(False)
    """Save the test set's features and embeddings."""
    download: bool = unhashed(False)
    """Let torchvision fetch its data."""
    root: str | None = unhashed(None)
    """Where torchvision's data lies; default: the user's cache."""
    device: Literal["auto", "cpu", "cuda", "mps"] = unhashed("auto")
    out: str = unhashed("results")
    """Where the numbers of a backbone go; those of a run go into its own folder."""

    def __post_init__(self) -> None:
        if (self.run is None) == (self.backbone is None):
            raise ValueError("Give either --run=FOLDER or --backbone=NAME.")
        if self.run is not None:
            object.__setattr__(self, "run", find_run(self.run))
        if self.eval_cell is not None:
            object.__setattr__(self, "eval_cell", canonical_eval_cell(self.eval_cell))
        check_between(self, "image_size", 2, LARGEST_IMAGE)
        check_between(self, "threads", 1, MOST_THREADS)
        for name, least in (("limit", 2), ("knn_k", 1)):
            value = getattr(self, name)
            check_setting(self, name, f"at least {least}", value is None or value >= least)
        if self.run is not None:
            for name in ("pretrained", "stem", "seed", "image_size"):
                if getattr(self, name) != getattr(type(self), name):
                    flag = f"--{name.replace('_', '-')}"
                    raise ValueError(f"{flag} goes with --backbone: a run has its own.")


class Subject(NamedTuple):
    """What is measured, how its embeddings are scored, on what, and where the numbers go."""

    encoder: ImageEncoder
    exponents: tuple[float, float]
    settings: ImageSettings
    facts: dict[str, Any]
    """What else goes into the record."""
    file: Path


def run(config: Config) -> dict[str, Any]:
    """Measure the encoder, write the numbers and return them."""
    import torch

    from offsphere.training.images import evaluator_of, load_splits
    from offsphere.training.ranks import choose_device
    from offsphere.training.run import save_tensors

    subject = from_backbone(config) if config.run is None else from_run(config, Path(config.run))
    torch.set_num_threads(subject.settings.threads)
    splits = load_splits(subject.settings)
    say(splits.in_words(subject.settings.eval_split))
    evaluator = evaluator_of(splits, subject.settings)
    metrics = evaluator(subject.encoder.to(choose_device(config.device)), subject.exponents)
    chosen = to_dict(subject.settings)
    found = {
        **metrics,
        **subject.facts,
        "probe/exponents": subject.exponents,
        "probe/settings": {name: chosen[name] for name in EVALUATION},
        "probe/provenance": provenance(splits.describe()),
    }
    file = subject.file
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, found)
    save_tensors(file.with_name(f"{file.stem}-examples.safetensors"), evaluator.outcomes)
    if config.save_embeddings and evaluator.features is not None:
        features = evaluator.features._asdict()
        save_tensors(file.with_name(f"{file.stem}-embeddings.safetensors"), features)
    return {**found, "probe/file": str(file)}


def from_run(config: Config, path: Path) -> Subject:
    """The encoder of a run, finished or cut."""
    from offsphere.training.images import build_encoder
    from offsphere.training.run import read_run, read_weights, scored_exponents

    folder, own = read_run(path, SCRIPTS)
    script = f"vision/{folder.provenance()['script']}.py"
    trained = read_weights(folder, own, "encoder", script)
    settings = dataclasses.replace(own, **flags(config))
    if settings.layer == "backbone" and config.eval_cell is not None:
        raise ValueError(
            f"--eval-cell={config.eval_cell} scores the projector's outputs, but the layer is "
            "backbone: add --layer=all."
        )
    exponents = scored_exponents(settings, trained.exponents)
    encoder = build_encoder(own, load_pretrained=False)
    try:
        encoder.load_state_dict(trained.tensors)
    except RuntimeError as error:
        raise ValueError(f"The weights of {path} do not fit its config.yaml: {error}") from None
    cut = "" if folder.state == "finished" else f"step{trained.steps}-"
    file = path / f"probe-{cut}{settings_hash(settings)}.json"
    facts = {"run/status": folder.state, "run/steps": trained.steps}
    return Subject(encoder, exponents, settings, facts, file)


def from_backbone(config: Config) -> Subject:
    """A timm model, or tiny_resnet, whose features stand for its embeddings too."""
    from torch import nn

    from offsphere.cells import Cell
    from offsphere.training.images import build_encoder

    given = {"layer": "backbone" if config.eval_cell is None else "all", **flags(config)}
    settings = ImageSettings(
        backbone=str(config.backbone),
        pretrained=config.pretrained,
        stem=config.stem,
        seed=config.seed,
        **given,
    )
    encoder = build_encoder(settings)
    encoder.projector, encoder.embedding_dim = nn.Identity(), encoder.features_dim
    exponents = Cell(settings.eval_cell or "cosine").numbers()
    name = f"{settings.backbone}-{settings_hash(settings)}"
    file = Path(config.out) / "eval_probe" / name / "metrics.json"
    facts = {"probe/backbone": settings.backbone, "probe/pretrained": settings.pretrained}
    return Subject(encoder, exponents, settings, facts, file)


def flags(config: Config) -> dict[str, Any]:
    """The settings that the flags decide; the others are the run's, or their defaults."""
    names = [name for name in EVALUATION if getattr(config, name) is not None]
    given = {name: getattr(config, name) for name in names}
    if config.data is not None:
        given |= {"data_test": config.data_test, "limit": config.limit}
    if config.root is not None:
        given["root"] = config.root
    return {**given, "download": config.download}


def show(config: Config, metrics: dict[str, Any]) -> None:
    """Two tables, accuracies and norms, and where the numbers are."""
    from rich.console import Console
    from rich.table import Table

    def text(name: str | None, form: str) -> str:
        return form.format(metrics[name]) if name in metrics else ""

    accuracy = Table("layer", "vectors")
    for title in ("kNN", "probe"):
        accuracy.add_column(title, justify="right")
    for layer, vectors, knn, probe in FEATURES:
        if knn in metrics or probe in metrics:
            accuracy.add_row(layer, vectors, text(knn, "{:.1%}"), text(probe, "{:.1%}"))
    accuracy.add_row("largest class", "", text("test/majority", "{:.1%}"), "")
    layer = metrics["probe/settings"]["layer"]
    shown = [i for i, name in enumerate(LAYERS) if layer in ("all", name)]
    norms = Table("")
    for i in shown:
        norms.add_column(("backbone", "projector")[i], justify="right")
    for title, names in NORMS:
        values = [text(names[i], "{:.3f}") for i in shown]
        if any(values):
            norms.add_row(title, *values)
    console = Console()
    console.print(str(config.run or config.backbone), soft_wrap=True)
    console.print(accuracy, norms)
    if layer != "backbone":
        left, right = metrics["probe/exponents"]
        console.print(f"Eval cell: exponents {left:g} (query) and {right:g} (training item).")
    console.print(metrics["probe/file"], soft_wrap=True)


def main() -> None:
    """Flags in, tables out."""
    with one_line_errors("eval_probe", "Nothing was written."), speaking():
        config = parse(Config, description=__doc__)
        metrics = run(config)
        show(config, metrics)


if __name__ == "__main__":
    main()
