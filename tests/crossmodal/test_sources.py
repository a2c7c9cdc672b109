"""Where image-text pairs come from: members of shards, tables, Flickr folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from samples import encoded, random_picture

from crossmodal.captions import Captioned, load_captions
from crossmodal.sources import captions_of, list_table, read_table, read_tokens
from offsphere.data.bad import BadSamples
from offsphere.data.splits import in_validation, split_of


def png(seed: int) -> bytes:
    return encoded(random_picture(seed))


def captions_json(*captions: str) -> bytes:
    return json.dumps({"captions": captions}).encode()


def load(data: str, split: str = "all", **named) -> Captioned:
    return load_captions(data, split=split, image_size=8, **named)


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ({"txt": b" one \n\ntwo\n"}, ("one", "two")),
        ({"json": b'{"captions": ["one", "two "]}'}, ("one", "two")),
        ({"json": b'{"caption": "one\\ntwo"}'}, ("one\ntwo",)),
        ({"json": b'{"url": "x"}', "txt": b"one"}, ("one",)),
        ({"json": b'{"caption": "one  two"}', "txt": b"one\ntwo"}, ("one  two",)),
        ({"txt": "épée".encode()}, ("épée",)),
    ],
)
def test_captions_come_from_txt_or_json(texts: dict, expected: tuple) -> None:
    assert captions_of(texts) == expected


def write_pictures(folder: Path, count: int) -> list[str]:
    folder.mkdir(parents=True)
    names = [f"{i:03d}.png" for i in range(count)]
    for i, name in enumerate(names):
        (folder / name).write_bytes(png(i))
    return names


@pytest.mark.parametrize(
    ("header", "delimiter"), [("image,caption", ","), ("title\tfilepath", "\t")]
)
def test_tables_group_the_rows_of_an_image(header: str, delimiter: str, tmp_path: Path) -> None:
    names = write_pictures(tmp_path / "pics", 30)
    rows = [(f"pics/{n}", f"text {i}{k}") for k in "ab" for i, n in enumerate(names)]
    if header.startswith("title"):
        rows = [row[::-1] for row in rows]
    lines = [header, *(delimiter.join(row) for row in rows)]
    (tmp_path / "pairs.csv").write_text("\n".join(lines) + "\n")
    data = f"csv:{tmp_path}/pairs.csv"
    loaded = load(data)
    assert loaded.keys == tuple(f"pics/{n}" for n in names)
    assert loaded.captions == tuple((f"text {i}a", f"text {i}b") for i in range(30))
    assert torch.equal(loaded.batch(torch.tensor([7])), random_picture(7)[None])
    carved = [name for name in loaded.keys if in_validation(name.removesuffix(".png"))]
    assert load(data, "validation").keys == tuple(carved)
    with pytest.raises(ValueError, match="--data-test=csv:FILE"):
        load(data, "test")


def test_table_cells_with_quotes_and_bare_commas(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text('image,caption\na.png,"one, two"\na.png,three, four\n\nb.png,5" pipe\n')
    assert read_table(file, BadSamples("error")) == {
        "a.png": ("one, two", "three, four"),
        "b.png": ('5" pipe',),
    }


def test_a_name_that_no_file_can_have_is_a_bad_sample(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("image,caption\na\0b.png,one\n")
    with pytest.raises(ValueError, match=r"a\\x00b.png' is no name of a file: embedded null byte"):
        list_table(str(file), "all", BadSamples("error"))
    bad = BadSamples("skip")
    assert len(list_table(str(file), "all", bad)) == 0
    assert bad.count == 1


def test_columns_divided_by_semicolons_are_refused_with_a_remedy(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("image;caption\na.png;one\n")
    with pytest.raises(ValueError, match="names 'image;caption'. Tabs or commas divide columns"):
        read_table(file, BadSamples("error"))


@pytest.mark.parametrize("closed_by", ["the end", "the next quote", "the limit of a cell"])
def test_a_quote_that_is_not_closed_swallows_no_rows(closed_by: str, tmp_path: Path) -> None:
    rows = [f"i{i}.png,cap {i}" for i in range(60)]
    rows[20] = 'i20.png,"cap 20'
    if closed_by == "the next quote":
        rows[40] = 'i40.png,"cap 40"'
    if closed_by == "the limit of a cell":
        rows += [f"i{i}.png,{'long ' * 40}" for i in range(60, 1000)]
    file = tmp_path / "p.csv"
    file.write_text("\n".join(["image,caption", *rows]) + "\n")
    with pytest.raises(ValueError, match=r"p.csv, line 22: a quote is opened and not closed, and"):
        read_table(file, BadSamples("error"))
    bad = BadSamples("skip")
    found = read_table(file, bad)
    assert list(found) == [f"i{i}.png" for i in range(len(rows)) if i != 20]
    assert found["i40.png"] == ("cap 40",)
    assert len(bad.messages) == 1


def test_lines_are_counted_and_several_lines_make_one_cell(tmp_path: Path) -> None:
    file = tmp_path / "p.csv"
    file.write_text('image,caption\na.png,"one\ntwo ""2"""\nb.png,"x" y\n\nc.png,\n')
    bad = BadSamples("skip")
    assert read_table(file, bad) == {"a.png": ('one\ntwo "2"',), "b.png": ("x y",)}
    assert list(bad.messages) == [
        f"{file}, line 6: expected 2 fields with an image and a caption, got ['c.png', '']."
    ]


def test_tables_and_lists_in_another_encoding_are_named(tmp_path: Path) -> None:
    for name, read in (("p.csv", read_table), ("p.token", read_tokens)):
        (tmp_path / name).write_bytes(b"image,caption\na.png,caf\xe9\n")
        with pytest.raises(ValueError, match=f"{name} is not UTF-8"):
            read(tmp_path / name, BadSamples("error"))


def test_txt_with_the_first_of_jsons_captions(tmp_path: Path) -> None:
    """open_clip wants one caption in txt; ours are all in json."""
    both = {"txt": b"one\n", "json": captions_json("one", "two")}
    assert captions_of(both) == ("one", "two")
    assert captions_of({**both, "txt": b"one\ntwo\n"}) == ("one", "two")
    with pytest.raises(ValueError, match="two captions files that differ"):
        captions_of({**both, "txt": b"two"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("image,text\na.png,x\n", "has no column 'caption' or 'title'.*'image', 'text'"),
        ("", "has no column 'image' or 'filepath'.*names nothing"),
        ("image,caption\na.png,\n", "line 2: expected 2 fields"),
        ("caption,image\nx,a.png,more\n", "line 2: expected 2 fields"),
        ("image,caption\nno.png,x\n", r"no\.png is missing"),
    ],
)
def test_bad_tables_are_explained(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        load(f"csv:{tmp_path}/a.csv")


def write_flickr(folder: Path, *, images: str = "Flicker8k_Dataset", count: int = 40) -> list[str]:
    names = write_pictures(folder / images, count)
    rows = [f"{n}#{k}\ttext {i} {k}" for i, n in enumerate(names) for k in range(2)]
    (folder / "Flickr8k.token.txt").write_text("\n".join(rows) + "\n")
    return names


def test_flickr_folder_with_lists(tmp_path: Path) -> None:
    names = write_flickr(tmp_path)
    parts = {"train": names[::4], "dev": names[1::4], "test": names[2::4]}
    for part, listed in parts.items():
        (tmp_path / f"Flickr_8k.{part}Images.txt").write_text("\n".join(listed) + "\n")
    data = f"folder:{tmp_path}"
    assert load(data, "train").keys == tuple(parts["train"])
    assert load(data, "validation").keys == tuple(parts["dev"])
    assert load(data, "train+validation").keys == (*parts["train"], *parts["dev"])
    test = load(data, "test")
    assert test.keys == tuple(parts["test"])
    assert test.captions[1] == ("text 6 0", "text 6 1")
    assert torch.equal(test.batch(torch.tensor([1])), random_picture(6)[None])
    assert len(load(data)) == 40
    (tmp_path / "Flickr_8k.testImages.txt").unlink()
    with pytest.raises(FileNotFoundError, match="none for test"):
        load(data, "test")
    (tmp_path / "Flickr_8k.testImages.txt").write_text("other.jpg\n")
    with pytest.raises(ValueError, match=r"names other\.jpg, which has no caption"):
        load(data, "test")


@pytest.mark.parametrize("images", ["images", "Images", "Flickr8k_Dataset"])
def test_flickr_folder_without_lists_is_divided_by_a_hash(images: str, tmp_path: Path) -> None:
    names = write_pictures(tmp_path / images, 40)
    rows = [f"{n},text {i}" for i, n in enumerate(names)]
    (tmp_path / "captions.txt").write_text("image,caption\n" + "\n".join(rows) + "\n")
    for split in ("train", "validation", "test"):
        expected = tuple(n for n in names if split_of(n.removesuffix(".png")) == split)
        assert load(f"folder:{tmp_path}", split).keys == expected


def test_flickr_folder_faults(tmp_path: Path) -> None:
    names = write_flickr(tmp_path)
    data, images = f"folder:{tmp_path}", tmp_path / "Flicker8k_Dataset"
    (images / "extra.png").write_bytes(png(1))
    with pytest.raises(ValueError, match=r"extra\.png has no caption"):
        load(data)
    (images / "extra.png").unlink()
    (images / names[3]).unlink()
    (images / names[5]).write_bytes(b"")
    loaded = load(data, on_bad_sample="skip")
    assert len(loaded) == 38
    assert loaded.skipped == {
        f"{images / names[3]} is missing.": 1,
        f"{images / names[5]} is empty (0 bytes).": 1,
    }
    (tmp_path / "captions.txt").write_text("image,caption\n")
    with pytest.raises(ValueError, match="two captions files"):
        load(data)
    with pytest.raises(FileNotFoundError, match="no folder of pictures"):
        load(f"folder:{images}")
