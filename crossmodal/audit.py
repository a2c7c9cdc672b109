"""`offsphere audit` of a run, an open_clip model or embeddings of pictures and texts.

    offsphere audit --run=results/train_clip/dot-seed0-1a2b3c4d
    offsphere audit --model=ViT-B-32 --pretrained=weights.pt --data='wds:test-*.tar'
    offsphere audit --embeddings=features.safetensors

Beside what every audit measures: whether the text tower holds shared syntax for shared meaning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from crossmodal import benchmark

if TYPE_CHECKING:
    from offsphere.audit.report import Report


@dataclass(frozen=True)
class Config(benchmark.Config):
    """`--run`, `--model` with `--pretrained`, or `--embeddings`."""

    eval_cell: str | None = None
    """The cell that decides which answers are right; default: the one trained with, cosine if
    unknown."""
    seed: int = 0
    """Of the bootstrap, and of the halves on which remedies are fitted and judged."""
    probe: bool = True
    """Ask the text tower whether it holds shared syntax for shared meaning."""


def run(config: Config) -> Report:
    """Measure, write and show."""
    import torch

    from offsphere.audit.output import show_report, write_report

    torch.set_num_threads(config.threads)
    found = benchmark.encode(config)
    report = report_of(config, found)
    folder = benchmark.folder_of(config, "audit", found)
    write_report(folder, report)
    benchmark.write_origin(config, found, folder)
    show_report(report, folder)
    return report


def report_of(config: Config, found: benchmark.Benchmarked) -> Report:
    """The library's audit of the embeddings and, where there is a text tower, the prompt probe."""
    from crossmodal.audit_probe import add_probe
    from offsphere.audit.report import audit

    name = f"{found.model} {found.pretrained}"
    sets = [encoded.audited() for encoded in found.sets]
    report = audit(name, found.trained_with, sets, found.how, config.similarities)
    if config.probe and found.subject is not None:
        return add_probe(report, found.subject.encode_texts)
    return report
