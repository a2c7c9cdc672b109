"""offsphere: when does embedding magnitude matter?

    python vision/train_simclr.py --cell=dot            train one run; also train_moco, train_clip,
                                                        train_retrieval, train_sts and theory/
    offsphere study configs/studies/small_batch.yaml    a grid of runs, in parallel, resumable
    offsphere reproduce results/symmetry                rows of a table, made again and compared
    offsphere data                                      which named data sets are here
    offsphere report                                    one web page of all studies in results/
    offsphere claims                                    each published claim and what we measured
    offsphere compare runs.csv --arm=method ...         anybody's runs: which method is better?
    offsphere audit --vectors ... (--encoder, --model)  dot or cosine, for what you already have?
    offsphere export --run=... --out=...                a run's model for use elsewhere
    offsphere lift --documents=... --out=...            dot's order in a store of cosines or L2
    offsphere shards make --source=... --out=...        tar shards and their manifest
    offsphere doctor train_simclr --norm=group          are ranks, micro-batches, resumes exact?

`offsphere COMMAND --help` says more; `offsphere --version` says which one this is.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from functools import partial

import offsphere
from offsphere.names import unknown
from offsphere.run.command import one_line_errors
from offsphere.run.scripts import Script


def _script(module: str) -> Script:
    found = importlib.import_module(module)
    path = f"{module.replace('.', '/')}.py"
    more = (getattr(found, name, None) for name in ("make", "TASK", "export"))  # a lab has none
    return Script(path, found.Config, found.run, *more)


SCRIPTS: dict[str, Callable[[], Script]] = {
    module.rpartition(".")[2]: partial(_script, module)
    for module in (
        "vision.train_simclr",
        "vision.train_moco",
        "crossmodal.train_clip",
        "text.train_retrieval",
        "text.train_sts",
        "theory.matrix_factorization",
        "theory.simplex",
        "theory.norm_growth",
        "theory.planted",
    )
}
"""Every script that a study can run, each imported when it is asked for. This module alone stands
above the lanes: what is below is handed a script and knows none."""

COMMANDS = {
    "study": "offsphere.study.command",
    "reproduce": "offsphere.study.reproduce",
    "data": "offsphere.data.sets",
    "report": "offsphere.analysis.report",
    "claims": "offsphere.analysis.claims",
    "compare": "offsphere.analysis.compare",
    "audit": "offsphere.audit.command",
    "export": "offsphere.export.command",
    "lift": "offsphere.export.lift",
    "shards": "crossmodal.shards",
    "doctor": "offsphere.training.doctor",
}
"""The module whose `main(argv)` a command is."""
DOORS = {
    "vectors": "offsphere.audit.vectors",
    "encoder": "text.audit",
    "model": "crossmodal.audit",
    "run": "crossmodal.audit",
    "embeddings": "crossmodal.audit",
}
"""What can be audited: the flag that names it, and the module that reads it."""
HANDED = {
    "study": SCRIPTS,
    "reproduce": SCRIPTS,
    "doctor": SCRIPTS,
    "export": SCRIPTS,
    "audit": DOORS,
}
"""What their `main` takes too, because it may not import the lanes itself."""


def main(argv: Sequence[str] | None = None) -> None:
    """Hand the arguments to the command they name."""
    argv = sys.argv[1:] if argv is None else argv
    with one_line_errors(" ".join(["offsphere", *argv[:1]]), "The same command starts anew."):
        _main(argv)


def _main(argv: Sequence[str]) -> None:
    if not argv or argv[0] in ("-h", "--help"):
        print((__doc__ or "").strip())
        raise SystemExit(0 if argv else 2)
    name, *flags = argv
    if name == "--version":
        print(f"offsphere {offsphere.__version__}")
        return
    if name not in COMMANDS:
        print(f"offsphere: error: {unknown('command', name, COMMANDS)}", file=sys.stderr)
        raise SystemExit(2)
    if name == "shards":
        flags = _after_make(flags)
    command = importlib.import_module(COMMANDS[name])
    command.main(flags, *([HANDED[name]] if name in HANDED else []))


def _after_make(words: list[str]) -> list[str]:
    """The flags of `offsphere shards make`, its only verb so far."""
    verb = words[0] if words else "nothing"
    if verb not in ("make", "-h", "--help"):
        print(f"offsphere shards: error: expected `make`, got {verb}.", file=sys.stderr)
        raise SystemExit(2)
    return words[1:] if verb == "make" else words


if __name__ == "__main__":
    main()
