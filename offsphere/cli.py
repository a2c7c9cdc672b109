"""The `offsphere` command: the only part above the lanes.

    offsphere study configs/studies/small_batch.yaml    a grid of runs, in parallel, resumable
    offsphere reproduce results/symmetry                rows of a table, made again and compared
    offsphere data                                      which named data sets are here
    offsphere report                                    one web page of all studies in results/
    offsphere claims                                    each published claim and what we measured
    offsphere audit --model=... --pretrained=...        does magnitude carry information in a model?
    offsphere export --run=... --out=...                a run's towers as an open_clip checkpoint
    offsphere shards make --source=... --out=...        tar shards and their manifest
    offsphere doctor train_simclr --norm=group          are ranks, micro-batches, resumes exact?

`offsphere COMMAND --help` says more; `offsphere --version` says which one this is.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import offsphere
from offsphere.names import unknown
from offsphere.run.command import one_line_errors

if TYPE_CHECKING:
    from offsphere.run.scripts import Script


def _script(path: str, module: ModuleType) -> Script:
    from offsphere.run.scripts import Script

    return Script(path, module.Config, module.run)


def _train_simclr() -> Script:
    from vision import train_simclr

    return _script("vision/train_simclr.py", train_simclr)


def _train_moco() -> Script:
    from vision import train_moco

    return _script("vision/train_moco.py", train_moco)


def _train_clip() -> Script:
    from crossmodal import train_clip

    return _script("crossmodal/train_clip.py", train_clip)


def _train_retrieval() -> Script:
    from text import train_retrieval

    return _script("text/train_retrieval.py", train_retrieval)


def _train_sts() -> Script:
    from text import train_sts

    return _script("text/train_sts.py", train_sts)


def _matrix_factorization() -> Script:
    from theory import matrix_factorization

    return _script("theory/matrix_factorization.py", matrix_factorization)


def _simplex() -> Script:
    from theory import simplex

    return _script("theory/simplex.py", simplex)


def _norm_growth() -> Script:
    from theory import norm_growth

    return _script("theory/norm_growth.py", norm_growth)


def _planted() -> Script:
    from theory import planted

    return _script("theory/planted.py", planted)


SCRIPTS: dict[str, Callable[[], Script]] = {
    "train_simclr": _train_simclr,
    "train_moco": _train_moco,
    "train_clip": _train_clip,
    "train_retrieval": _train_retrieval,
    "train_sts": _train_sts,
    "matrix_factorization": _matrix_factorization,
    "simplex": _simplex,
    "norm_growth": _norm_growth,
    "planted": _planted,
}
"""Every script that a study can run, each imported when it is asked for."""


def _study(argv: Sequence[str]) -> None:
    from offsphere.study.command import main

    main(argv, SCRIPTS)


def _reproduce(argv: Sequence[str]) -> None:
    from offsphere.study.reproduce import main

    main(argv, SCRIPTS)


def _data(argv: Sequence[str]) -> None:
    from offsphere.data.sets import main

    main(argv)


def _report(argv: Sequence[str]) -> None:
    from offsphere.analysis.report import main

    main(argv)


def _claims(argv: Sequence[str]) -> None:
    from offsphere.analysis.claims import main

    main(argv)


def _audit(argv: Sequence[str]) -> None:
    from crossmodal.audit import main

    main(argv)


def _export(argv: Sequence[str]) -> None:
    from crossmodal.export import main

    main(argv)


def _shards(argv: Sequence[str]) -> None:
    from crossmodal.shards import main

    verb = argv[0] if argv else "nothing"
    if verb not in ("make", "-h", "--help"):
        print(f"offsphere shards: error: expected `make`, got {verb}.", file=sys.stderr)
        raise SystemExit(2)
    main(argv[1:] if verb == "make" else argv)


def _doctor(argv: Sequence[str]) -> None:
    from offsphere.training.doctor import main

    main(argv, SCRIPTS)


COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "study": _study,
    "reproduce": _reproduce,
    "data": _data,
    "report": _report,
    "claims": _claims,
    "audit": _audit,
    "export": _export,
    "shards": _shards,
    "doctor": _doctor,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Hand the arguments to the command they name."""
    argv = sys.argv[1:] if argv is None else argv
    with one_line_errors(" ".join(["offsphere", *argv[:1]]), "The same command starts anew."):
        _main(argv)


def _main(argv: Sequence[str]) -> None:
    if not argv or argv[0] in ("-h", "--help"):
        print((__doc__ or "").strip())
        raise SystemExit(0 if argv else 2)
    if argv[0] == "--version":
        print(f"offsphere {offsphere.__version__}")
        return
    if argv[0] not in COMMANDS:
        print(f"offsphere: error: {unknown('command', argv[0], COMMANDS)}", file=sys.stderr)
        raise SystemExit(2)
    try:
        COMMANDS[argv[0]](argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
