"""YAML from anybody: plain values, a bounded size and depth, errors in one line. No torch.

A few lines of YAML can stand for billions of values (aliases of aliases) or recurse until Python
gives up; both are refused while the file is read, and so is a key that is set twice.
"""

from __future__ import annotations

from typing import Any

import yaml

LARGEST_TEXT = 1_000_000
"""Characters; the largest file of the project has a tenth of them."""
MOST_VALUES = 100_000
"""With every alias written out."""
DEEPEST = 50


class _Bounded(yaml.SafeLoader):
    """YAML's safe loader with bounds, and without keys that are set twice."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.values, self.depth = 0, 0
        self.sizes: dict[int, int] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        alias, before = self.check_event(yaml.AliasEvent), self.values
        self.depth += 1
        if self.depth > DEEPEST:
            raise ValueError(f"is nested deeper than {DEEPEST} levels")
        node = super().compose_node(parent, index)
        self.depth -= 1
        if alias and id(node) not in self.sizes:
            raise ValueError("has an alias that holds itself")
        self.values += self.sizes[id(node)] if alias else 1
        if self.values > MOST_VALUES:
            raise ValueError(f"has more than {MOST_VALUES:,} values, aliases written out")
        self.sizes[id(node)] = self.values - before
        return node


def _mapping(loader: _Bounded, node: yaml.MappingNode) -> dict[Any, Any]:
    seen = set()
    for key, _ in node.value:
        if (name := str(key.value)) in seen:
            line = node.start_mark.line + 1
            raise ValueError(f"{name!r} is set twice in the mapping at line {line}: remove one")
        seen.add(name)
    return loader.construct_mapping(node, deep=True)


_Bounded.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def load(text: str, source: object) -> Any:
    """The plain values of a YAML text; anything wrong is a ValueError of one line."""
    return _read(text, source, lambda loader: loader.get_single_data())


def compose(text: str, source: object) -> yaml.Node | None:
    """The nodes of a YAML text, with their lines; anything wrong is a ValueError of one line."""
    return _read(text, source, lambda loader: loader.get_single_node())


def _read(text: str, source: object, read: Any) -> Any:
    name = f"{source} " if source else ""
    if len(text) > LARGEST_TEXT:
        raise ValueError(f"{name}has {len(text):,} characters: at most {LARGEST_TEXT:,} are read.")
    try:
        loader = _Bounded(text)
        try:
            return read(loader)
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        raise ValueError(f"{name}is not valid YAML: {_said(error)}") from None
    except ValueError as error:
        raise ValueError(f"{name}{error}.") from None


def _said(error: yaml.YAMLError) -> str:
    """A YAML error in one line."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        parts = (error.context, error.problem, f"line {error.problem_mark.line + 1}")
        return ", ".join(part for part in parts if part)
    return " ".join(str(error).split())
