"""Docstrings of installed packages: what is read, what is not, and what becomes of it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

import pytest

from text import docstrings as docstrings_module
from text.passages import docstrings


@pytest.mark.parametrize("name", ["evil", "evil.sub", "nosuch.sub", ".x", "../../x", "", "numpy."])
def test_docstrings_import_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Neither a module of the working folder, nor one that claims to be installed there."""
    for package in ("evil", "evil/sub"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(f"open('{tmp_path}/EXECUTED', 'w')")
    about = tmp_path / "evil-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")
    (about / "top_level.txt").write_text("evil\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match="is no installed package with a folder of its own"):
        docstrings_module._installed(name)
    assert not (tmp_path / "EXECUTED").exists()


def test_a_part_of_a_package_and_the_standard_library_have_docstrings():
    numpy = Path(importlib.util.find_spec("numpy").origin).parent  # pyright: ignore
    assert docstrings_module._installed("numpy") == (numpy, importlib.metadata.version("numpy"))
    assert docstrings_module._installed("numpy.linalg")[0] == numpy / "linalg"
    assert docstrings_module._installed("json")[1] == "of the standard library"


def test_docstrings_of_a_package(capsys):
    """tyro is small; its docstrings are read from its sources, once, and split by a hash."""
    found = docstrings.__wrapped__(("tyro",))
    assert "Reading the docstrings of tyro" in capsys.readouterr().out
    assert docstrings.__wrapped__(("tyro",)) == found
    assert capsys.readouterr().out == ""
    texts = [document.text.lower() for document in found.documents]
    queries = [query.text.lower() for query in found.queries]
    assert len(set(texts)) == len(texts) > 10
    assert len(set(queries)) == len(queries)
    assert all(len(text.split()) >= docstrings_module.SHORTEST_DOCUMENT for text in texts)
    asked = [d for grades in found.relevant.values() for r in grades.values() for d in r]
    assert len(set(asked)) == len(asked) == len(queries) < len(texts)
    assert found.source.startswith("tyro ")


def test_a_docstring_becomes_a_query_and_a_document():
    body = "Parameters\n----------\nx : array\n    " + "word " * 30
    assert docstrings_module._split_docstring(f"Sum the\nelements of x.\n\n{body}") == [
        "Sum the elements of x.",
        "Parameters x : array " + " ".join(["word"] * 30),
    ]
    assert docstrings_module._split_docstring("Sum x.\n\n" + body) is None
    assert docstrings_module._split_docstring("Sum the elements of x.\n\nShort.") is None
