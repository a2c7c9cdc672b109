"""Bad samples: the first is an error that says what to do, or all are kept as messages."""

from __future__ import annotations

import pytest

from offsphere.data.bad import GO_ON, BadSamples


def test_the_first_bad_sample_is_an_error_with_its_remedy() -> None:
    with pytest.raises(ValueError, match="a.png") as caught:
        BadSamples("error").add("a.png is empty.")
    assert str(caught.value) == ("a.png is empty. (--on-bad-sample=skip leaves such samples out.)")
    with pytest.raises(ValueError, match=r"b. \(--on-bad-sample=skip goes on without it.\)$"):
        BadSamples("error").add("b.", GO_ON)


def test_bad_samples_are_collected() -> None:
    bad = BadSamples("skip")
    bad.add("one.")
    bad.add_ids("corpus.jsonl", "documents are empty", ["d1", "d2"])
    assert list(bad.messages) == [
        "one.",
        "corpus.jsonl: documents are empty ('d1')",
        "corpus.jsonl: documents are empty ('d2')",
    ]


def test_samples_of_one_fault_are_counted_and_the_first_three_named() -> None:
    bad = BadSamples("error")
    bad.add_ids("f.tsv", "ids are lost", [])
    with pytest.raises(ValueError, match="f.tsv") as caught:
        bad.add_ids("f.tsv", "ids are lost", list("abcd"))
    assert str(caught.value) == (
        "f.tsv: 4 ids are lost ('a', 'b', 'c', ...). Mend the file, or leave them out with "
        "--on-bad-sample=skip."
    )


def test_other_answers_are_refused() -> None:
    with pytest.raises(ValueError, match="on_bad_sample"):
        BadSamples("ignore")
