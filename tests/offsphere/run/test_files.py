"""Folders that appear whole or not at all."""

from __future__ import annotations

import pytest

from offsphere.run.files import whole_folder


def test_a_folder_appears_when_it_is_whole(tmp_path):
    out = tmp_path / "a" / "b"
    with whole_folder(out) as folder:
        (folder / "x").write_text("1")
        assert not out.exists()
    assert (out / "x").read_text() == "1"
    with (
        pytest.raises(FileExistsError, match="b is not empty: choose another --out"),
        whole_folder(out),
    ):
        pytest.fail("nothing may be written")
    empty = tmp_path / "empty"
    empty.mkdir()
    with whole_folder(empty) as folder:
        (folder / "y").touch()
    assert [file.name for file in empty.iterdir()] == ["y"]


def test_of_a_failure_nothing_is_left(tmp_path):
    def fail() -> None:
        with whole_folder(tmp_path / "out") as folder:
            (folder / "x").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert list(tmp_path.iterdir()) == []
