"""Dot or cosine? Does magnitude carry information in what you already have? No training.

    offsphere audit --vectors queries.npy documents.npy --relevance=qrels.tsv
    offsphere audit --vectors items.parquet --labels=labels.tsv
    offsphere audit --vectors left.npy right.npy --scores=scores.tsv
    offsphere audit --encoder=minilm --data=beir:FOLDER
    offsphere audit --model=ViT-B-32 --pretrained=weights.pt --data=csv:pairs.csv
    offsphere audit --run=results/train_clip/dot-seed0-1a2b3c4d
    offsphere audit --embeddings=features.safetensors

It says, one line first and with intervals over queries: which cell to score with and what the
others would cost, whether norms carry relevance (beside the same norms permuted), how far they
reorder, hubs, what centring, whitening or CSLS would give, what int8 and bits cost. The same as a
table (results.csv), as audit.json and as a page, audit.html. docs/audit.md has more.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence

from offsphere.run.command import one_line_errors
from offsphere.run.config import as_written, parse
from offsphere.run.help import CONFIG_HELP, entries, grouped
from offsphere.run.progress import say, speaking

NAME = "offsphere audit"
TITLES = {
    "vectors": "vectors in files",
    "encoder": "a text encoder",
    "model": "a model of pictures and texts",
}


def main(argv: Sequence[str] | None, doors: Mapping[str, str]) -> None:
    """Flags in, a recommendation out.

    `doors` has, by the flag that opens it, the module with a door's `Config` and `run`.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    with one_line_errors(NAME, "Nothing was written."), speaking():
        given = _given(words)
        named = [flag for flag in doors if flag in given]
        if {"-h", "--help", "--help-all"} & set(words) and not named:
            print(_help(doors))
            raise SystemExit(0)
        modules = {doors[flag] for flag in named}
        if len(modules) != 1:
            flags = ", ".join(f"--{flag}" for flag in doors)
            got = " and ".join(f"--{flag}" for flag in named) or "none of them"
            print(f"{NAME}: error: Give one of {flags}, got {got} (see --help).", file=sys.stderr)
            raise SystemExit(2)
        door = importlib.import_module(modules.pop())
        config = parse(door.Config, words, description=__doc__, name=NAME)
        say("Loading torch and the data ...")
        door.run(config)


def _given(words: Sequence[str]) -> set[str]:
    """The settings that flags and `--config` files give."""
    found = set()
    for number, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag == "--config":
            files = [value] if equals else list(words[number + 1 : number + 2])
            for file in files:
                try:
                    found |= set(as_written(file))
                except (OSError, ValueError):
                    continue  # whoever parses the flags says what is wrong with it
        elif flag.startswith("--"):
            found.add(flag[2:].replace("-", "_"))
    return found


def _help(doors: Mapping[str, str]) -> str:
    """The flags of all doors: what each has of its own, and what they have in common."""
    classes = {flag: importlib.import_module(doors[flag]).Config for flag in TITLES}
    names = {flag: _common_flags(config_class) for flag, config_class in classes.items()}
    shared = [x for x in names["vectors"] if all(x in others for others in names.values())]
    parts = [f"usage: {NAME} [--flag=value ...]", (__doc__ or "").strip()]
    for flag, title in TITLES.items():
        own = [x for x in names[flag] if x not in shared]
        parts.append(f"{title}\n{entries(classes[flag], own)}")
    parts.append(f"every door\n{entries(classes['vectors'], shared)}")
    return "\n\n".join([*parts, CONFIG_HELP])


def _common_flags(config_class: type) -> list[str]:
    return [flag for common, further in grouped(config_class).values() for flag in common + further]
