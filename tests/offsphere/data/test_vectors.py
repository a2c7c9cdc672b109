"""Vectors in files: every format gives the same numbers and ids, and damage is one line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
import torch
from safetensors.torch import load_file, save_file

from offsphere.data.vectors import FORMATS, ids_file, open_vectors, write_vectors

MATRIX = np.random.default_rng(0).normal(size=(23, 5)).astype(np.float32)
IDS = [f"d{row}" for row in range(23)]


@pytest.mark.parametrize("ending", FORMATS)
def test_what_is_written_is_read_back_to_the_bit_in_blocks_of_any_size(tmp_path, ending):
    path = tmp_path / f"x{ending}"
    write_vectors(path, 5, (MATRIX[i : i + 4] for i in range(0, 23, 4)), IDS)
    vectors = open_vectors(path)
    assert (len(vectors), vectors.width, vectors.ids) == (23, 5, IDS)
    for size in (1, 7, 23, 100, None):
        blocks = dict(vectors.blocks(size))
        assert list(blocks) == list(range(0, 23, size or 23))
        np.testing.assert_array_equal(np.concatenate(list(blocks.values())), MATRIX)
    np.testing.assert_array_equal(vectors.whole(), MATRIX)
    assert vectors.whole().dtype == np.float32
    assert not [file for file in tmp_path.iterdir() if file.name.endswith(".tmp")]


def test_the_files_are_those_of_the_formats_own_libraries(tmp_path):
    for ending in FORMATS:
        write_vectors(tmp_path / f"x{ending}", 5, [MATRIX], IDS)
    np.testing.assert_array_equal(np.load(tmp_path / "x.npy"), MATRIX)
    assert torch.equal(load_file(tmp_path / "x.safetensors")["vectors"], torch.from_numpy(MATRIX))
    table = parquet.read_table(tmp_path / "x.parquet")
    np.testing.assert_array_equal(np.array(table["vector"].to_pylist(), np.float32), MATRIX)
    rows = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    np.testing.assert_array_equal(np.array([row["vector"] for row in rows], np.float32), MATRIX)
    assert [row["id"] for row in rows] == table["id"].to_pylist() == IDS


def test_numbers_of_every_kind_become_float32_and_rows_without_ids_are_numbered(tmp_path):
    np.save(tmp_path / "a.npy", np.asfortranarray(MATRIX.astype(np.float64)))
    np.save(tmp_path / "b.npy", np.arange(6, dtype=np.int8).reshape(3, 2))
    save_file({"x": torch.from_numpy(MATRIX).bfloat16()}, tmp_path / "c.safetensors")
    np.testing.assert_array_equal(open_vectors(tmp_path / "a.npy").whole(), MATRIX)
    numbered = open_vectors(tmp_path / "b.npy")
    np.testing.assert_array_equal(numbered.whole(), [[0, 1], [2, 3], [4, 5]])
    assert numbered.ids == ["0", "1", "2"]
    halved = torch.from_numpy(MATRIX).bfloat16().float().numpy()
    np.testing.assert_array_equal(open_vectors(tmp_path / "c.safetensors").whole(), halved)
    ragged = arrow.table({"_id": [7, 8], "e": arrow.array([[1.0, 2.0], [3.0, 4.0]])})
    parquet.write_table(ragged, tmp_path / "d.parquet")
    found = open_vectors(tmp_path / "d.parquet")
    np.testing.assert_array_equal(found.whole(), [[1, 2], [3, 4]])
    assert found.ids == ["7", "8"]


def test_a_name_chooses_among_several_and_old_ids_beside_a_file_go(tmp_path):
    two = {"query": torch.eye(2), "document": torch.eye(3), "norm": torch.ones(3)}
    save_file(two, tmp_path / "x.safetensors")
    assert open_vectors(f"{tmp_path}/x.safetensors:document").rows == 3
    with pytest.raises(ValueError, match="expected one tensor of vectors, got 2 .*name one"):
        open_vectors(tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="Unknown tensor of vectors 'querry'. Did you mean"):
        open_vectors(f"{tmp_path}/x.safetensors:querry")
    write_vectors(tmp_path / "y.npy", 5, [MATRIX], IDS)
    assert ids_file(tmp_path / "y.npy").is_file()
    write_vectors(tmp_path / "y.npy", 5, [MATRIX[:2]], ["0", "1"])
    assert not ids_file(tmp_path / "y.npy").exists()
    assert open_vectors(tmp_path / "y.npy").ids == ["0", "1"]


class Trap:
    def __reduce__(self):
        return (Path.touch, (Path("trapped"),))


def _bad_files(folder: Path) -> dict[str, str]:
    """file -> what is said about it."""
    np.save(folder / "object.npy", np.array([Trap()], dtype=object), allow_pickle=True)
    np.save(folder / "flat.npy", np.ones(4))
    np.save(folder / "empty.npy", np.ones((0, 4)))
    np.save(folder / "words.npy", np.array([["a"]]))
    np.save(folder / "good.npy", MATRIX)
    cut = (folder / "good.npy").read_bytes()[:200]
    (folder / "cut.npy").write_bytes(cut)
    (folder / "cut.safetensors").write_bytes(b"\x10" + b"\0" * 7 + b"{}")
    (folder / "cut.parquet").write_bytes(b"PAR1")
    parquet.write_table(arrow.table({"id": ["a"]}), folder / "none.parquet")
    (folder / "words.jsonl").write_text('{"vector": ["a"]}\n')
    (folder / "list.jsonl").write_text("[1, 2]\n")
    (folder / "not.jsonl").write_text("nothing\n")
    (folder / "latin.jsonl").write_bytes(b'{"id": "\xe9", "vector": [1, 2]}\n')
    (folder / "empty.jsonl").write_text("")
    (folder / "x.csv").write_text("1,2\n")
    return {
        "object.npy": "holds objects, which could run code",
        "flat.npy": "expected a matrix of numbers",
        "empty.npy": "holds no vectors",
        "words.npy": "expected a matrix of numbers",
        "cut.npy": "is cut, damaged",
        "good.npy:x": "has one array without a name",
        "cut.safetensors": "is cut or damaged",
        "cut.parquet": "cut.parquet is cut or damaged",
        "none.parquet": "expected one column of vectors, got none",
        "words.jsonl": "expected one key of vectors, got none",
        "list.jsonl": "line 1: expected an object",
        "not.jsonl": "line 1 is not JSON",
        "latin.jsonl": "line 1 is not UTF-8",
        "empty.jsonl": "expected one key of vectors, got none",
        "x.csv": "cannot be read as vectors. Expected FILE",
        "absent.npy": "is not a file. Expected FILE",
    }


def test_what_cannot_be_read_is_refused_in_one_line_and_nothing_in_it_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, said in _bad_files(tmp_path).items():
        with pytest.raises((ValueError, OSError), match=said) as error:
            open_vectors(tmp_path / name)
        assert "\n" not in str(error.value)
    assert not (tmp_path / "trapped").exists()


def test_what_is_wrong_inside_is_found_while_reading(tmp_path):
    broken = MATRIX.copy()
    broken[17, 2] = np.nan
    np.save(tmp_path / "nan.npy", broken)
    np.save(tmp_path / "large.npy", np.full((2, 2), 1e300))
    lines = [{"vector": [1, 2]}, {"vector": [1, 2, 3]}]
    (tmp_path / "mixed.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "later.jsonl").write_text('{"vector": [1, 2]}\n{"vector": [1, "2"]}\n')
    parquet.write_table(arrow.table({"v": [[1.0, 2.0], [1.0]]}), tmp_path / "mixed.parquet")
    parquet.write_table(arrow.table({"v": [[1.0, 2.0], None]}), tmp_path / "gone.parquet")
    parquet.write_table(arrow.table({"v": [[1.0, 2.0], [1.0, None]]}), tmp_path / "hole.parquet")
    (tmp_path / "long.jsonl").write_text('{"v": [1, 2]}\n{"v": [1, 1' + "0" * 400 + "]}")
    for name, said in {
        "nan.npy": "1 vectors have numbers that are not finite in float32, the first in row 17",
        "large.npy": "2 vectors have numbers that are not finite",
        "mixed.jsonl": "one width, got 2 first and then 3 .line 2",
        "later.jsonl": "line 2: expected vector as a list of numbers",
        "mixed.parquet": "one width, got 2 first and then 1",
        "gone.parquet": "one width, got 2 first and then nothing .row 1",
        "hole.parquet": "missing numbers",
        "long.jsonl": "line 2: v has numbers too large",
    }.items():
        with pytest.raises(ValueError, match=said):
            open_vectors(tmp_path / name).whole()
    save_file({"v": torch.ones(3, 2, dtype=torch.bool)}, tmp_path / "truths.safetensors")
    with pytest.raises(ValueError, match="expected one tensor of vectors, got none"):
        open_vectors(tmp_path / "truths.safetensors")
    np.save(tmp_path / "x.npy", MATRIX)
    for text, said in (
        ("a\n" * 23, "22 ids come more than once"),
        ("a\nb\n", "has 23 vectors and 2 ids"),
        ("\n" * 23, "line 1: expected an id"),
    ):
        ids_file(tmp_path / "x.npy").write_text(text)
        with pytest.raises(ValueError, match=said):
            _ = open_vectors(tmp_path / "x.npy").ids


def test_a_writer_that_fails_leaves_what_was_there(tmp_path):
    write_vectors(tmp_path / "x.npy", 5, [MATRIX], IDS)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def failing():
        yield MATRIX
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        write_vectors(tmp_path / "x.npy", 5, failing(), IDS * 2)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
