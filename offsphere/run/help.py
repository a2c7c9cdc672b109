"""`--help`: the flags of a settings class in groups, the common ones; `--help-all`: all of them.

A settings class says in GROUPS where its flags belong: the name of a group, the flags of it that
`--help` shows, and the further ones. What no group names stands under "further". A subclass adds
its own to those of its bases. Imports no torch and no tyro, so that it answers at once.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from offsphere.run.command import typed

Groups = Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]
ORDER = ("question", "data", "training", "encoder", "measuring", "machine", "further")
MOST = 25
"""Flags that `--help` shows at most."""
INDENT = 26
CONFIG_HELP = "--config=FILE.yaml takes settings from flat YAML files; a later file and flags win."


def help_text(config_class: type, description: str | None, *, everything: bool) -> str:
    """What `--help` or `--help-all` prints."""
    groups = grouped(config_class)
    shown = {
        name: common + (further if everything else ()) for name, (common, further) in groups.items()
    }
    hidden = sum(len(further) for _, further in groups.values()) if not everything else 0
    parts = [f"usage: {typed()} [--flag=value ...]", (description or "").strip()]
    for name, flags in shown.items():
        if flags:
            lines = entries(config_class, flags)
            parts.append(lines if len(shown) == 1 else f"{name}\n{lines}")
    parts.append(CONFIG_HELP + (f"\n--help-all shows {hidden} more." if hidden else ""))
    return "\n\n".join(part for part in parts if part)


def grouped(config_class: type) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """Each group's common and further flags, in the order in which they are shown.

    Without GROUPS the first flags are the common ones.
    """
    names = [field.name for field in dataclasses.fields(config_class)]
    placed: dict[str, tuple[list[str], list[str]]] = {name: ([], []) for name in ORDER}
    for base in reversed(config_class.__mro__):
        for group, lists in vars(base).get("GROUPS", {}).items():
            for place, flags in zip(placed[group], lists, strict=True):
                place += [flag for flag in flags if flag in names and flag not in place]
    known = {flag for lists in placed.values() for place in lists for flag in place}
    rest = [name for name in names if name not in known]
    common, further = placed["further"]
    common += [] if known else rest[:MOST]
    further += rest if known else rest[MOST:]
    found = {group: (tuple(a), tuple(b)) for group, (a, b) in placed.items()}
    return {group: lists for group, lists in found.items() if any(lists)}


def entries(config_class: type, flags: Iterable[str]) -> str:
    """The lines about some flags."""
    return "\n".join(_entry(config_class, flag) for flag in flags)


def _entry(config_class: type, name: str) -> str:
    """One flag: its name and value, what it is for, and its default."""
    field = next(f for f in dataclasses.fields(config_class) if f.name == name)
    hint = get_type_hints(config_class)[name]
    flag, default = name.rstrip("_").replace("_", "-"), field.default
    head = f"  --{flag}" + ("" if hint is bool else f"={_value(hint)}")
    if hint is bool and default is True:
        head = f"  --no-{flag}"
    said = documented(config_class).get(name, "")
    if default not in (None, "", (), dataclasses.MISSING) and hint is not bool:
        said = f"{said} (default: {_spelt(default)})".strip()
    width = max(60, min(100, shutil.get_terminal_size().columns))
    lines = textwrap.wrap(said, width - INDENT) or [""]
    if len(head) < INDENT - 1:
        first, lines = f"{head:{INDENT}}{lines[0]}", lines[1:]
    else:
        first = head
    return "\n".join([first, *(" " * INDENT + line for line in lines)]).rstrip()


def _spelt(value: Any) -> str:
    if isinstance(value, tuple | list):
        return " ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _value(hint: Any) -> str:
    """What a flag takes: its choices, or the kind of its value."""
    origin, parts = get_origin(hint), [part for part in get_args(hint) if part is not NoneType]
    if origin is Literal:
        return "|".join(map(str, parts))
    if origin in (Union, UnionType):
        return "|".join(dict.fromkeys(map(_value, parts)))
    if origin in (tuple, list):
        return f"{_value(parts[0])} ..."
    return {int: "N", float: "X", str: "TEXT", bool: "true|false"}.get(hint, "VALUE")


@cache
def documented(config_class: type) -> dict[str, str]:
    """The docstring under each field, a subclass's before its base's."""
    found: dict[str, str] = {}
    for base in reversed(config_class.__mro__):
        if dataclasses.is_dataclass(base):
            found |= dict(_docstrings(base))
    return found


def _docstrings(config_class: type) -> Iterator[tuple[str, str]]:
    try:
        file = Path(inspect.getfile(config_class))
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (TypeError, OSError):  # made at run time
        return
    for node in ast.walk(tree):
        if not (isinstance(node, ast.ClassDef) and node.name == config_class.__name__):
            continue
        for field, text in zip(node.body, node.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                said = getattr(getattr(text, "value", None), "value", None)
                if isinstance(text, ast.Expr) and isinstance(said, str):
                    yield field.target.id, " ".join(said.split())
