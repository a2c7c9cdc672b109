"""What is audited: pairs that fit, halves that stay whole, inputs that are refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from planted_vectors import directions, junk_captions, searches

from offsphere.audit.search import Direction, Search

WORDS = Direction("set", "query to document", "query", "right")


def test_halves_take_their_captions_along():
    tensors = junk_captions(6)
    to_text, to_image = searches(**tensors)
    kept = torch.tensor([True, False, True, True, False, False])
    for search in (to_text.among(kept), to_image.among(kept)):
        assert len(search.queries), len(search.items) in ((3, 6), (6, 3))
        left, right = search.pairs()
        want = tensors["images"][[0, 2, 3]], tensors["texts"][[0, 2, 3, 6, 8, 9]]
        images, texts = (left, right) if search.direction.query == "image" else (right, left)
        assert torch.equal(images, want[0].repeat(2, 1))
        assert torch.equal(texts, want[1])


def test_what_belongs_to_no_example_serves_both_halves():
    documents = directions(9, 4, 1)
    search = Search(WORDS, directions(4, 4, 0), documents, [0, 1, 2, 3], [8, 0, 5, 0])
    half = search.among(torch.tensor([False, True, False, True]))
    assert torch.equal(half.items, documents)
    assert (half.pair_query.tolist(), half.pair_item.tolist()) == ([0, 1], [0, 0])


def test_arrays_of_numpy_are_vectors_too(tmp_path):
    queries, documents = directions(3, 4, 0).numpy(), directions(5, 4, 1).numpy()
    np.save(tmp_path / "documents.npy", documents.astype(np.float32))
    mapped = np.load(tmp_path / "documents.npy", mmap_mode="c")
    search = Search(WORDS, queries, mapped, np.arange(3), np.array([4, 0, 0]))
    assert torch.equal(search.items, torch.from_numpy(documents.astype(np.float32)).double())
    assert search.relevant() == [{4: 1}, {0: 1}, {0: 1}]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"items": directions(5, 3, 1)}, "query embeddings have 4 columns and the document.* 3"),
        ({"pair_item": [0, 1, 5]}, "pairs whose document is between 0 and 4, got 0 to 5"),
        ({"pair_query": [0, 0, 1]}, "1 of 3 queries .query. have no right document .first: 2"),
        (
            {"pair_query": [0.0, 1.0, 2.0]},
            "expected 3 whole numbers as pair_query, got torch.fl",
        ),
        ({"pair_item": [0, 1]}, "expected 3 whole numbers as pair_item, got .* shape .2,."),
        ({"query_example": [0]}, "expected 3 whole numbers as query_example"),
        ({"queries": torch.full((3, 4), torch.nan)}, "3 of 3 query embeddings are not finite"),
        ({"queries": torch.ones(3, dtype=torch.float64)}, "query embeddings must be .* matrix"),
    ],
)
def test_what_does_not_fit_is_refused(changes, words):
    given = {
        "queries": directions(3, 4, 0),
        "items": directions(5, 4, 1),
        "pair_query": [0, 1, 2],
        "pair_item": [0, 1, 2],
    }
    with pytest.raises(ValueError, match=words):
        Search(WORDS, **{**given, **changes})
