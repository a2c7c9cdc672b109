"""A text run's model for use elsewhere: sentence-transformers, MTEB, or points for the atlas."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from offsphere.encoders.layers import TopLayers, joined
from offsphere.encoders.text import HuggingFaceEncoder, TextEncoder
from offsphere.evaluation.ranking import rank
from offsphere.export.atlas import Points, check_file, times_found, write_points
from offsphere.export.card import Licence, licence_of_folder, model_card
from offsphere.export.forms import check_packages, write_form
from offsphere.run.files import whole_folder
from offsphere.run.record import RunFolder
from offsphere.run.scripts import Export
from offsphere.training.run import read_run, read_weights, scored_exponents
from text.inputs import Inputs
from text.methods import Residual, make_towers
from text.pairs import make_task
from text.passages import load_collection
from text.settings import RetrievalSettings, StsSettings, TextSettings

if TYPE_CHECKING:
    from sentence_transformers.base.modules import Module

CONFIGS = {"train_retrieval": RetrievalSettings, "train_sts": StsSettings}
LICENCES = {
    "minilm": Licence("apache-2.0", "all-MiniLM-L6-v2, Apache-2.0"),
    "e5-small": Licence("mit", "intfloat/e5-small, MIT"),
    "glove": Licence("pddl", "GloVe 6B, PDDL 1.0"),
    "random": Licence("unknown", "random numbers: only the data can have a say"),
}
FIGURES = {
    "test/ndcg10": "nDCG@10",
    "untrained/ndcg10": "nDCG@10, untrained",
    "bm25/ndcg10": "nDCG@10, BM25",
    "test/recall100": "Recall@100",
    "test/ndcg10_scored_cosine": "nDCG@10 if scored with cosine",
    "test/ndcg10_scored_dot": "nDCG@10 if scored with dot",
    "test/spearman": "Spearman",
    "untrained/spearman": "Spearman, untrained",
    "test/spearman_scored_cosine": "Spearman if scored with cosine",
    "test/spearman_scored_dot": "Spearman if scored with dot",
    "test/norm_document_cv": "CV of the documents' norms",
}
SIDES = ("query", "document")


class TextRun(NamedTuple):
    """A run's settings, the exponents that it is scored with, and what its towers are made of."""

    folder: RunFolder
    settings: TextSettings
    exponents: tuple[float, float]
    inputs: Inputs
    towers: nn.ModuleList

    def prompts(self) -> dict[str, str]:
        """The prompt of each side."""
        settings = self.settings
        if isinstance(settings, RetrievalSettings):
            given = (settings.query_prefix, settings.document_prefix)
        else:
            given = ("query: ",) * 2 if settings.encoder == "e5-small" else ("", "")
        return dict(zip(SIDES, given, strict=True))

    def encoder_and_head(self, tower: nn.Module) -> tuple[TextEncoder, nn.Module]:
        """A tower's whole encoder, trained or frozen layers alike, and its head."""
        if self.settings.tune == "head":
            return self.inputs.encoder, tower
        assert isinstance(tower, nn.Sequential)
        encoder: Any = tower[0]
        if isinstance(encoder, TopLayers):
            assert isinstance(self.inputs.encoder, HuggingFaceEncoder)
            encoder = joined(self.inputs.encoder, encoder)
        return encoder, tower[1]


def load_run(path: Path) -> TextRun:
    """A run of the text lane, finished or cut."""
    folder, settings = read_run(path, CONFIGS)
    script = f"text/{folder.provenance()['script']}.py"
    weights = read_weights(folder, settings, "towers", script, "encoder.safetensors")
    inputs = Inputs(settings)
    towers = make_towers(inputs.trained, settings)
    try:
        towers.load_state_dict(weights.tensors)
    except RuntimeError as error:
        said = str(error).strip().splitlines()[-1].strip()
        raise ValueError(f"The weights of {path} do not fit its config.yaml: {said}") from None
    exponents = scored_exponents(settings, weights.exponents)
    return TextRun(folder, settings, exponents, inputs, towers.eval())


def export(asked: Export) -> str:
    """Write what is asked for, and say how it is used."""
    forms = {
        "sentence-transformers": _sentence_transformers,
        "mteb": _mteb,
        "atlas": _atlas,
    }
    return write_form(asked, forms, "a text run")


def _sentence_transformers(asked: Export) -> str:
    check_packages("sentence-transformers", "sentence_transformers")
    trained = load_run(asked.run)
    with whole_folder(asked.out) as folder:
        _save(trained, trained.exponents, folder)
        use = _use(trained, folder, asked.out)
        (folder / "README.md").write_text(_card(trained, "sentence-transformers", use))
    return f"{asked.out}: a model of sentence-transformers. README.md is its card.\n\n{use}"


def _mteb(asked: Export) -> str:
    check_packages("mteb", "sentence_transformers", "mteb")
    from offsphere.export.mteb_model import USE, write_cell

    trained = load_run(asked.run)
    with whole_folder(asked.out) as folder:
        _save(trained, (0.0, 0.0), folder)
        write_cell(folder, asked.run.name, SIDES, trained.exponents)
        use = USE.format(out=asked.out)
        (folder / "README.md").write_text(_card(trained, "sentence-transformers", use))
    return f"{asked.out}: a model for MTEB.\n\n{use}"


def _save(trained: TextRun, exponents: tuple[float, float], folder: Path) -> None:
    from offsphere.export.sentences import encoder_modules, make_model, save_model

    sides = []
    shared: dict[int, Sequence[Module]] = {}  # a frozen encoder below two heads is written once
    for tower in trained.towers:
        encoder, head = trained.encoder_and_head(tower)
        if id(encoder) not in shared:
            shared[id(encoder)] = encoder_modules(encoder, trained.settings.max_length)
        sides.append([*shared[id(encoder)], *_head_modules(head)])
    save_model(make_model(sides, exponents, trained.prompts()), folder)


@torch.no_grad()
def _head_modules(head: nn.Module) -> list[Module]:
    """A head as dense layers."""
    from sentence_transformers.base.modules import Dense

    if isinstance(head, nn.Identity):
        return []
    if isinstance(head, nn.Linear):
        width = head.in_features
        return [Dense(width, width, False, None, head.weight.detach().clone())]
    assert isinstance(head, Residual)
    first, last = head.layers[0], head.layers[2]
    assert isinstance(first, nn.Linear)
    assert isinstance(last, nn.Linear)
    width, hidden = first.in_features, first.out_features
    # x + W gelu(V x) in two dense layers: gelu(x) - gelu(-x) = x, so that x goes through beside.
    unit = torch.eye(width)
    rows = torch.cat([first.weight, unit, -unit])
    bias = torch.cat([first.bias, torch.zeros(2 * width)])
    columns = torch.cat([last.weight, unit, -unit], dim=1)
    inner = hidden + 2 * width
    return [
        Dense(width, inner, True, nn.GELU(), rows, bias),
        Dense(inner, width, True, None, columns, last.bias.detach().clone()),
    ]


def _use(trained: TextRun, folder: Path, out: Path) -> str:
    """How the exported folder is loaded and scored with."""
    from offsphere.export.sentences import needs_own_code

    package, load, note = "sentence_transformers", "SentenceTransformer", ""
    own = needs_own_code(folder)
    if own is not None:
        package, load = "offsphere.export.sentences", "load_model"
        what = "of the installed offsphere" if own == "offsphere" else "of the file shrink.py here"
        note = (
            f"\n\n`SentenceTransformer(folder, trust_remote_code=True)` loads it too: it imports a "
            f"module {what}, which sentence-transformers does not have."
        )
    return (
        f'```python\nfrom {package} import {load}\n\nmodel = {load}("{out}")\n'
        "queries = model.encode_query([...])\n"
        "documents = model.encode_document([...])\n"
        "scores = model.similarity(queries, documents)  # the run's own cell\n```\n\n"
        f"{_metric(trained.exponents)}{note}"
    )


def _metric(exponents: tuple[float, float]) -> str:
    if exponents == (1.0, 1.0):
        return "The vectors have length 1: in a store, cosine, dot product and L2 rank alike."
    if exponents[1] == 1.0:
        return "The documents have length 1: in a store, dot product, cosine and L2 rank alike."
    return (
        "In a store set the metric to dot product (inner product). One that has only cosine or L2 "
        "ranks alike after `offsphere lift`."
    )


def _card(trained: TextRun, library: str, use: str) -> str:
    settings = trained.settings
    start = settings.token_start if settings.encoder == "static" else settings.encoder
    known = LICENCES.get("random" if start == "scratch" else start)
    return model_card(
        trained.folder,
        settings,
        trained.exponents,
        title=f"{settings.encoder}, {settings.cell}",
        library=library,
        licence=known or licence_of_folder(Path(start).expanduser()),
        sides=SIDES,
        use=use,
        figures=FIGURES,
    )


def _atlas(asked: Export) -> str:
    """The evaluation queries and all documents of a retrieval run."""
    check_file(asked.out)
    trained = load_run(asked.run)
    settings = trained.settings
    if not isinstance(settings, RetrievalSettings):
        raise ValueError(f"{asked.run} has no queries that find anything: --as=atlas needs them.")
    collection = load_collection(
        settings.data, on_bad_sample=settings.on_bad_sample, data_root=settings.data_root
    )
    task = make_task(collection, settings.task, settings.eval_split)
    asking = [task.queries[q] for q in task.measured]
    queries, documents = (
        trained.inputs.encode(tower, trained.inputs(texts, prompt))
        for tower, texts, prompt in zip(
            (trained.towers[0], trained.towers[-1]),
            (asking, task.documents),
            trained.prompts().values(),
            strict=True,
        )
    )
    best = rank(queries, documents, trained.exponents[1]).documents
    first = zip(task.measured, best[:, 0].tolist(), strict=True)
    right = torch.tensor([document in task.test[q] for q, document in first])
    ids = settings.task == "query"  # other tasks have queries and documents of their own
    names = [collection.queries[q].id if ids else str(q) for q in task.measured]
    called = [collection.documents[d].id if ids else str(d) for d in range(len(task.documents))]
    return write_points(
        asked.out,
        [
            Points("query", names, asking, queries, right),
            Points(
                "document",
                called,
                task.documents,
                documents,
                found=times_found(best, len(task.documents)),
            ),
        ],
    )
