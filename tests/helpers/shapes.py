"""The shapes in the signatures, checked: an import hook, for the tests only.

jaxtyping's own hook cannot serve, because the product imports jaxtyping for type checkers only. So
this one makes those imports real, and lets jaxtyping and beartype check the annotations that have
a shape. A function may refuse a wrong shape in its own words; it may not work with it.
"""

import ast
import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import CodeType, ModuleType
from typing import Any

SHAPED = {"Float", "Int", "Bool", "UInt8", "Integer", "Shaped", "Num"}


def install(*packages: str, but: tuple[str, ...] = ()) -> None:
    """Check the functions of these packages, which must not have been imported yet."""
    sys.meta_path.insert(0, _Finder(packages, but))


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with the shapes of its arguments and of its value checked in every call."""
    import torch
    from beartype import BeartypeConf, beartype
    from jaxtyping import TypeCheckError, jaxtyped

    hints = {k: v for k, v in function.__annotations__.items() if _has_shape(v)}
    function.__annotations__ = hints
    checker = beartype(conf=BeartypeConf(is_pep484_tower=True))
    strict = jaxtyped(function, typechecker=checker)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        try:
            return strict(*args, **kwargs)
        except TypeCheckError:
            function(*args, **kwargs)  # its own refusal, if it has one, says more
            raise

    return wrapper


def _has_shape(hint: object) -> bool:
    names = {node.id for node in ast.walk(ast.parse(str(hint))) if isinstance(node, ast.Name)}
    return bool(names & SHAPED)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, packages: Sequence[str], but: tuple[str, ...]) -> None:
        self.packages, self.but = packages, but

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in self.packages or name.startswith(self.but):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(name, spec.loader.path)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType | None:
        source = self.get_data(self.path)
        if b"jaxtyping" not in source:
            return super().get_code(fullname)
        # Compiled anew each time: the file's cached bytecode has no checks.
        tree = ast.fix_missing_locations(_Checks().visit(ast.parse(source)))
        return compile(tree, self.path, "exec", dont_inherit=True)


class _Checks(ast.NodeTransformer):
    """`if TYPE_CHECKING:` becomes true, and functions with a shape are decorated."""

    def visit_Module(self, node: ast.Module) -> ast.AST:
        self.generic_visit(node)
        future = 1 + max(
            i
            for i, line in enumerate(node.body)
            if isinstance(line, ast.ImportFrom) and line.module == "__future__"
        )
        helper = ast.parse("import shapes as _shapes").body
        node.body[future:future] = helper
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING" and not node.orelse:
            node.test = ast.Constant(True)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        hints = [a.annotation for a in (*every, node.args.vararg) if a is not None]
        if any(_has_shape(ast.unparse(h)) for h in (*hints, node.returns) if h is not None):
            node.decorator_list.append(ast.parse("_shapes.checked", mode="eval").body)
        return node
