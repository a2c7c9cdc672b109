"""Settings from one frozen dataclass: field = flag = YAML key = results column. Imports no torch.

Every way in (flags, YAML files, records) becomes one set of flags, so tyro is the one validator.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import itertools
import json
import math
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import yaml

from offsphere.names import unknown
from offsphere.run.addresses import keep_secret, public
from offsphere.run.catalog import identity, named
from offsphere.run.help import help_text
from offsphere.run.safe_yaml import compose

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ConfigT = TypeVar("ConfigT", bound="DataclassInstance")
# A setting as it was given: its name or flag, its values as text (None: null), file and line.
Item = tuple[str, Sequence[str | None], str]
Given = dict[str, tuple[Sequence[str], str]]

BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
LONGEST_NAME = 120
"""Characters of a run folder's name."""


def unhashed(default: Any) -> Any:
    """A field that says where or how a run runs (out, workers, device): left out of its hash."""
    return dataclasses.field(default=default, metadata={"unhashed": True})


def added(default: Any) -> Any:
    """A field that came after tables were committed: left out of the hash while at its default.

    So the runs that were made before the field existed keep their names. Its default must not
    change afterwards: a run that took the old one would then be taken for one of the new.
    """
    return dataclasses.field(default=default, metadata={"added": True})


def data_name(default: Any) -> Any:
    """A field that names data: committed rows call some sets by an old place (see catalog)."""
    return dataclasses.field(default=default, metadata={"data": True})


def keyboard(default: Any) -> Any:
    """A permission: only the person at the keyboard gives it, as a flag. No file may, no record
    keeps it, and a run's hash leaves it out."""
    return dataclasses.field(default=default, metadata={"unhashed": True, "keyboard": True})


def canonical_data(settings: DataclassInstance) -> None:
    """Give data one spelling, for a frozen dataclass to call when it is made."""
    for field in fields(settings):
        if field.metadata.get("data"):
            value = _each(lambda text: named(_with_kind(text)), getattr(settings, field.name))
            object.__setattr__(settings, field.name, value)


def _with_kind(data: str) -> str:
    """A bare path that exists, as the data it plainly is; a folder without a slash at its end."""
    kind, _, place = data.partition(":")
    if kind in ("folder", "beir", "stsb", "captions") and place.strip("/"):
        return f"{kind}:{place.rstrip('/')}"
    path = Path(data).expanduser()
    if not data.startswith(("/", ".", "~")) or not path.exists():
        return data
    if path.is_file():
        return {".csv": "csv:", ".tsv": "csv:", ".tar": "wds:"}.get(path.suffix, "") + str(path)
    if any(path.glob("*.tar")):
        return f"wds:{path}/*.tar"
    marks = {"corpus.jsonl": "beir", "sts-train.csv": "stsb"}
    kind = next((kind for name, kind in marks.items() if (path / name).exists()), "folder")
    return f"{kind}:{path}"


def _each(change: Callable[[str], str], value: Any) -> Any:
    """A data field's value with each name changed."""
    if isinstance(value, tuple | list):
        return type(value)(change(name) for name in value)
    return value if value is None else change(value)


def parse(
    config_class: type[ConfigT],
    argv: Sequence[str] | None = None,
    *,
    description: str | None = None,
    name: str | None = None,
    words: tuple[str, str] | None = None,
) -> ConfigT:
    """The settings from flags and `--config` files; a mistake ends in one line, exit 2.

    `name` is the command's, where it is not the program's. `words` is the field that words without
    a flag give, and what a reader calls it: ("file", "FILE.yaml").
    """
    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help", "--help-all"} & set(argv):
        print(help_text(config_class, description, everything="--help-all" in argv))
        raise SystemExit(0)
    try:
        items = list(_argv_items(argv if words is None else _flagged(config_class, argv, *words)))
        files = [str(file) for flag, values, _ in items if flag == "--config" for file in values]
        recipes = [item for file in files for item in _yaml_items(_read(file), file)]
        _refuse_permissions(config_class, recipes)
        flags = [item for item in items if item[0] != "--config"]
        return _build(config_class, recipes + flags, files)
    except (ValueError, OSError) as error:
        more = "" if "Did you mean" in str(error) else " (see --help)"
        print(f"{name or Path(sys.argv[0]).name}: error: {error}{more}", file=sys.stderr)
        raise SystemExit(2) from None


def check_positive(flag: str, value: int | None) -> None:
    """Refuse a number of things below 1."""
    if value is not None and value < 1:
        raise ValueError(f"{flag} must be a whole number above 0, got {value}.")


def from_dict(config_class: type[ConfigT], mapping: Mapping[str, Any]) -> ConfigT:
    """The settings from plain values, checked as flags are; a missing field takes its default."""
    try:
        text = yaml.safe_dump(dict(mapping))
    except yaml.YAMLError as error:
        raise ValueError(f"Settings must be plain values, lists or null: {error}") from None
    return _from_yaml(config_class, text, "")


def load_yaml(config_class: type[ConfigT], path: str | Path) -> ConfigT:
    """The settings of one YAML file, such as a run's config.yaml."""
    return _from_yaml(config_class, _read(path), path)


def _from_yaml(config_class: type[ConfigT], text: str, source: str | Path) -> ConfigT:
    items = list(_yaml_items(text, source))
    _refuse_permissions(config_class, items)
    return _build(config_class, items)


def as_written(path: str | Path) -> dict[str, str]:
    """The settings of a YAML file as they are written there, unchecked, to compare runs by."""
    items = _yaml_items(_read(path), path)
    return {name: ", ".join(str(value) for value in values) for name, values, _ in items}


def to_yaml(settings: DataclassInstance) -> str:
    """The settings as a YAML text that `--config` and `load_yaml` read back."""
    return yaml.safe_dump(to_dict(settings), sort_keys=False, allow_unicode=True)


def to_dict(settings: DataclassInstance) -> dict[str, Any]:
    """The settings as plain values that YAML and JSON can write, in field order."""
    return {
        field.name: _plain(field.name, getattr(settings, field.name))
        for field in fields(settings)
        if not field.metadata.get("keyboard")
    }


def identity_settings(settings: DataclassInstance) -> dict[str, Any]:
    """The settings that make the run what it is, in one spelling (1.0 is 1).

    No `unhashed` fields, and no `added` fields that have their default. Data that committed rows
    call by an old place go by that.
    """
    data = {field.name for field in fields(settings) if field.metadata.get("data")}
    left_out = {
        field.name
        for field in fields(settings)
        if field.metadata.get("unhashed")
        or (field.metadata.get("added") and getattr(settings, field.name) == field.default)
    }
    kept = {k: v for k, v in to_dict(settings).items() if k not in left_out}
    return {k: _each(identity, v) if k in data else _canonical(v) for k, v in kept.items()}


def settings_hash(settings: DataclassInstance) -> str:
    """Eight hexadecimal digits of the settings, the same in every process and field order."""
    text = json.dumps(identity_settings(settings), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def run_name(settings: DataclassInstance) -> str:
    """`<cell>-seed<k>-<hash>`, without the cell if there is none: the settings alone decide."""
    values = to_dict(settings)
    if "seed" not in values:
        raise ValueError(f"{type(settings).__name__} needs a 'seed' for a run's name.")
    cell = re.sub(r"[^A-Za-z0-9._+-]+", "_", str(values["cell"])) + "-" if "cell" in values else ""
    return f"{cell}seed{values['seed']}-{settings_hash(settings)}"


def telling_name(settings: DataclassInstance) -> str:
    """The run's name, with what differs from the default between seed and hash.

    As in `dot-seed0-folder_my_images-lr0.004-1a2b3c4d`. It is for people: the hash says which run
    it is. Of paths and addresses only the last part is told.
    """
    start, _, digest = run_name(settings).rpartition("-")
    told = {k: v for k, v in differing(settings).items() if k not in ("cell", "seed")}
    words = [_name_word(name, value) for name, value in told.items()]
    ends = [0, *itertools.accumulate(len(word) + 1 for word in words)]
    room = LONGEST_NAME - len(start) - len(digest) - len("-and_99_more-")
    kept = max(k for k, end in enumerate(ends) if end <= max(room, 0))
    more = [f"and_{len(words) - kept}_more"] if kept < len(words) else []
    return "-".join([start, *words[:kept], *more, digest])


def differing(settings: DataclassInstance) -> dict[str, Any]:
    """The settings that make this run another one than the script's default, `data` first."""
    try:
        usual = to_dict(type(settings)())
    except (TypeError, ValueError):  # some settings have no default
        usual = {field.name: field.default for field in fields(settings)}
    usual = {name: _canonical(value) for name, value in usual.items()}
    given = identity_settings(settings)
    names = sorted(given, key=lambda name: name != "data")
    return {name: given[name] for name in names if given[name] != usual[name]}


def differing_flags(settings: DataclassInstance) -> list[str]:
    """The flags that make this run another one than the script's default, without secrets."""
    given = ((name.replace("_", "-"), value) for name, value in differing(settings).items())
    return [word for name, value in given for word in _flag_words(name, value)]


def _name_word(name: str, value: Any) -> str:
    """One setting as a part of a file's name."""
    if isinstance(value, bool) or value is None:
        return name if value else f"no_{name}"
    if isinstance(value, int | float):
        return f"{name}{value:g}" if isinstance(value, float) else f"{name}{value}"
    parts = [_last_part(str(part)) for part in (value if isinstance(value, list) else [value])]
    return "_".join(parts if name == "data" else [name, *parts])[:60]


def _last_part(text: str) -> str:
    """A string as a part of a file's name: of a path or an address its kind and its end.

    What may hold a secret (a user's part, a query, a command) is left out.
    """
    kind, colon, rest = text.partition(":")
    if rest.lower().lstrip().startswith("pipe:"):
        rest = "pipe"
    path = re.sub(r"[?#].*", "", rest) if "//" in rest else rest if colon else text
    end = path.rstrip("/").rpartition("/")[2].rpartition("@")[2]
    end = re.sub(r"\.(tar|csv|ya?ml|safetensors|pt|pth|bin)$", "", end)
    words = f"{kind}_{end}" if colon and end else end or kind
    return re.sub(r"[^A-Za-z0-9.+-]+", "_", words).strip("_")


def command(script: str, settings: DataclassInstance) -> str:
    """The shell command that gives these settings again; defaults are left out."""
    words = ["python", script]
    for field in fields(settings):
        value = getattr(settings, field.name)
        if value != field.default:
            words += _flag_words(field.name.replace("_", "-"), _plain(field.name, value))
    return shlex.join(words)


def _flag_words(flag: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    values = [str(item) for item in (value if isinstance(value, list) else [value])]
    return [f"--{flag}={values[0]}"] if len(values) == 1 else [f"--{flag}", *values]


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(name, item) for item in value]
    for plain in (bool, int, float):
        if isinstance(value, plain):
            return plain(value)
    if value is None or isinstance(value, str | Path):
        return None if value is None else public(str(value))
    raise ValueError(f"{name} is a {type(value).__name__}: settings are plain values or tuples.")


def _canonical(value: Any) -> Any:
    if isinstance(value, list):
        return [_canonical(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _leaves(hint: Any) -> Sequence[Any]:
    """What a field accepts: types, literal choices as strings, and `tuple` if it takes a list."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Literal:
        return [str(choice) for choice in parts]
    leaves = [leaf for part in parts if part is not Ellipsis for leaf in _leaves(part)]
    return [*leaves, tuple] if origin in (tuple, list) else leaves or [hint]


def _flagged(
    config_class: type[DataclassInstance], argv: Sequence[str], name: str, called: str
) -> list[str]:
    """A command line whose words without a flag have one, `name`; one of them must be there unless
    the field has a default. After a switch, and after a flag's one value, a word has no flag."""
    hints = get_type_hints(config_class)
    kinds = {f"--{field.replace('_', '-')}": _leaves(hint) for field, hint in hints.items()}
    lists = {flag: list[str]() for flag, kind in kinds.items() if tuple in kind}
    own, rest = list[str](), list[str]()
    taker, room = own, math.inf
    for word in argv:
        flag, equals, value = word.partition("=")
        if flag in lists:  # a list may be given piece by piece
            lists[flag] += [value] if equals else []
            taker, room = (own if equals else lists[flag]), math.inf
        elif word.startswith("-"):
            rest.append(word)
            takes = not equals and bool not in kinds.get(flag, (bool,))
            taker, room = (rest, 1) if takes else (own, math.inf)
        else:
            taker.append(word)
            room -= 1
            taker, room = (taker, room) if room else (own, math.inf)
    rest += [word for flag, values in lists.items() if values for word in (flag, *values)]
    if len(own) > 1 and tuple not in _leaves(hints[name]):
        raise ValueError(f"Unexpected {own[1]!r}: settings are flags such as --name=value.")
    given = own or any(word.partition("=")[0] == f"--{name}" for word in rest)
    if not given and any(f.name == name and f.default is MISSING for f in fields(config_class)):
        raise ValueError(f"the following arguments are required: {called}")
    return [*rest, *([f"--{name}", *own] if own else [])]


def _argv_items(argv: Sequence[str]) -> Iterator[Item]:
    """(flag, its values, no origin) for each flag of a command line."""
    starts = [i for i, word in enumerate(argv) if word.startswith("--")]
    if argv and starts[:1] != [0]:
        raise ValueError(f"Unexpected {argv[0]!r}: settings are flags such as --name=value.")
    for start, end in itertools.pairwise([*starts, len(argv)]):
        flag, equals, first = argv[start].partition("=")
        values = ([first] if equals else []) + list(argv[start + 1 : end])
        if flag == "--config" and not values:
            raise ValueError("--config needs a file, as in --config=FILE.yaml.")
        yield flag, values, ""


def _yaml_items(text: str, source: str | Path) -> Iterator[Item]:
    """(key, its values as written, file and line) for each line of a flat YAML mapping."""
    root = compose(text, source)
    if not isinstance(root, yaml.MappingNode | None):
        kind = "sequence" if isinstance(root, yaml.SequenceNode) else "scalar"
        raise ValueError(f"{source}: expected lines such as 'batch_size: 256', not a {kind}.")
    names: set[str] = set()
    for key, value in root.value if root else ():
        origin = f"{source}, line {key.start_mark.line + 1}: " if source else ""
        nodes = value.value if isinstance(value, yaml.SequenceNode) else [value]
        if not all(isinstance(node, yaml.ScalarNode) for node in (key, *nodes)):
            raise ValueError(f"{origin}{key.value!r} is nested: settings are flat 'name: value'.")
        if key.value in names:
            raise ValueError(f"{origin}{key.value!r} is set twice: remove one of the lines.")
        names.add(key.value)
        yield key.value, [_as_written(node) for node in nodes], origin


def _as_written(node: yaml.ScalarNode) -> str | None:
    if node.tag.endswith(":float"):
        return re.sub(r"\.(?=inf|nan)", "", node.value.lower())
    return None if node.tag.endswith(":null") else node.value


def _refuse_permissions(config_class: type[DataclassInstance], items: Iterable[Item]) -> None:
    """Refuse a file or table that gives what only a flag may give; saying no is fine."""
    asked = {field.name for field in fields(config_class) if field.metadata.get("keyboard")}
    for name, values, origin in items:
        no = len(values) == 1 and BOOLEANS.get(str(values[0]).lower(), True) is False
        if name.removeprefix("--").replace("-", "_") in asked and not no:
            flag = name.removeprefix("--").replace("_", "-")
            raise ValueError(
                f"{origin}{name} may not stand in a file or table: it is a permission, which only "
                f"the flag --{flag} gives. Take it out, and give the flag if you trust the data."
            )


def _collect(config_class: type[DataclassInstance], items: Iterable[Item]) -> Given:
    """The values of each field, spelt as tyro wants them; the last one wins."""
    hints = get_type_hints(config_class)
    kinds = {field.name: _leaves(hints[field.name]) for field in fields(config_class)}
    given: Given = {}
    for label, values, origin in items:
        name = label.removeprefix("--").replace("-", "_") if label.startswith("--") else label
        name = f"{name}_" if f"{name}_" in kinds else name  # --as: a field cannot be called so
        if label.startswith("--no-") and not values and bool in kinds.get(name[3:], ()):
            name, values = name[3:], ["false"]
        try:
            if name not in kinds:
                raise unknown("setting", label, _flags(kinds) if label.startswith("--") else kinds)
            if not values and not {bool, tuple} & set(kinds[name]):
                raise ValueError(f"{label} needs a value, as in {label}=VALUE.")
            given[name] = [_spell(label, v, kinds[name]) for v in values], origin
            if bool in kinds[name] and not values:
                given[name] = ["True"], origin
            if len(values) > 1 and tuple not in kinds[name]:
                raise ValueError(f"{label} takes one value, but {len(values)} came: {values}.")
            if len(values) > 1 and any(v and v.startswith("--") for v in values):
                raise ValueError(f"{label} cannot hold a value that starts with '--': {values}.")
        except ValueError as error:
            raise ValueError(f"{origin}{error}") from None
    return given


def _spell(label: str, value: str | None, leaves: Sequence[Any]) -> str:
    """One value as tyro spells it; what tyro would misread or explain badly is an error here."""
    choices = [leaf for leaf in leaves if isinstance(leaf, str)]
    if value is not None and (str in leaves or value in choices):
        return keep_secret(value)
    if value is None or value.lower() in ("none", "null"):
        if NoneType not in leaves:
            raise ValueError(f"{label} cannot be null: leave it out to take its default.")
        return "None"
    if bool in leaves:
        value = str(BOOLEANS.get(value.lower(), value))
        choices += ["True", "False"]
    if value not in choices and {NoneType, bool, tuple, *choices}.issuperset(leaves):
        raise unknown(f"value of {label}", value, choices)
    if value not in choices and not _is_number(value, leaves):
        kind = "a number" if float in leaves else "a whole number, written with digits"
        raise ValueError(f"{label} takes {kind}, got {value!r}.")
    return value


def _is_number(value: str, leaves: Sequence[Any]) -> bool:
    """Whether a value is such a number as the field takes; true if it takes none."""
    kinds = [leaf for leaf in leaves if leaf in (int, float)]
    for kind in kinds:
        with contextlib.suppress(ValueError):
            kind(value)
            return True
    return not kinds


def _flags(names: Iterable[str]) -> list[str]:
    return [f"--{name.rstrip('_').replace('_', '-')}" for name in names]


def _read(file: str | Path) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise ValueError(f"{file} cannot be read: {reason}") from None


def _build(
    config_class: type[ConfigT], items: Iterable[Item], files: Sequence[str] = ()
) -> ConfigT:
    """Hand the flags to tyro, and turn its refusal into a ValueError that names the origin."""
    import tyro

    given = _collect(config_class, items)
    required = [f.name for f in fields(config_class) if f.default is MISSING]
    if missing := [f"--{x.replace('_', '-')}" for x in required if x not in given]:
        raise ValueError(f"the following arguments are required: {', '.join(missing)}")
    args = [word for name, (values, _) in given.items() for word in _flag_words(name, values)]
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(config_class, args=args, config=(tyro.conf.FlagConversionOff,))
    except SystemExit as refusal:
        if isinstance(refusal.__context__, ValueError):
            source = f" (settings from {', '.join(files)} and the flags)" if files else ""
            raise ValueError(f"{refusal.__context__}{source}") from None
        message = _message(said.getvalue())
        flag = re.search(r"--([\w-]+)", message)
        _, origin = given.get(flag[1].replace("-", "_") if flag else "", ((), ""))
        raise ValueError(f"{origin}{message}") from None


def _message(box: str) -> str:
    """What tyro's error box says between its first two rules."""
    parts = re.split(r"(?m)^[\s│╭╮╰╯]*[-─]{3}.*$", box)
    return " ".join(parts[1].replace("│", " ").split()) if len(parts) > 2 else box.strip()
