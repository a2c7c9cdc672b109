"""The optional reader: its scores by hand, its spans and texts against slow references."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from offsphere.run.config import run_name
from offsphere.run.record import run_path
from text.evaluate import answer_words, answers_read, exact_match, token_f1
from text.lexical import bm25
from text.pairs import make_task
from text.passages import beir_folder
from text.reader import LONGEST_ANSWER, best_span, load_reader, prompt
from text.train_retrieval import Config, run

POSITIONS = 32
SPECIAL = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}


def saved(path: Path, model: Any, bert_folder: Path) -> str:
    """A model with the words of the tiny BERT, as transformers saves both."""
    from transformers import AutoTokenizer

    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(bert_folder).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def words(bert_folder: Path) -> list[str]:
    return (bert_folder / "vocab.txt").read_text().split("\n")[5:]


@pytest.fixture(scope="module")
def extractive(bert_folder: Path, tmp_path_factory) -> str:
    from transformers import BertConfig, BertForQuestionAnswering

    torch.manual_seed(1)
    config = BertConfig.from_pretrained(bert_folder, initializer_range=1.0)
    return saved(tmp_path_factory.mktemp("qa"), BertForQuestionAnswering(config), bert_folder)


def generator(kind: str, bert_folder: Path, folder: Path) -> str:
    from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

    torch.manual_seed(2)
    size = len((bert_folder / "vocab.txt").read_text().split("\n"))
    common = {"vocab_size": size, **SPECIAL}
    if kind == "causal":
        sizes = {"n_positions": 128, "n_embd": 16, "n_layer": 1, "n_head": 2}
        config = GPT2Config.from_dict({**common, **sizes, "initializer_range": 1.0})
        return saved(folder, GPT2LMHeadModel(config), bert_folder)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    start = {"decoder_start_token_id": 2, "initializer_factor": 4.0}
    config = T5Config.from_dict({**common, **sizes, **start})
    return saved(folder, T5ForConditionalGeneration(config), bert_folder)


# Exact match and F1


def test_scores_of_hand_made_answers():
    assert answer_words("The U.S.A.'s  a-team, an END") == ["usas", "ateam", "end"]
    assert exact_match("the Eiffel tower!", ["Big Ben", "Eiffel Tower"]) == 1
    assert exact_match("Eiffel", ["Big Ben", "Eiffel Tower"]) == 0
    # Two of three and two of four words; one of three and one of one.
    assert token_f1("in new york", ["the New York city hall"]) == pytest.approx(4 / 7)
    assert token_f1("in new york", ["Paris", "York"]) == pytest.approx(2 / 4)
    assert token_f1("paris paris", ["Paris"]) == pytest.approx(2 / 3)
    assert token_f1("london", ["Paris"]) == 0
    assert (token_f1("the", ["a"]), token_f1("the", ["Paris"])) == (1, 0)


@given(st.text("ab .,", max_size=8), st.text("ab .,", max_size=8))
def test_f1_is_symmetric_and_one_only_for_the_same_words(one: str, other: str):
    assert token_f1(one, [other]) == token_f1(other, [one])
    same = sorted(answer_words(one)) == sorted(answer_words(other))
    assert (token_f1(one, [other]) == 1) == same
    assert exact_match(one, [other]) <= token_f1(one, [other])


def test_scores_of_a_reader_that_says_what_it_was_shown(collection_folder: Path):
    """Three words of the best document, from where its query's answer stands."""
    task = make_task(beir_folder(collection_folder), "query", "test")
    ranking = bm25([task.queries[q] for q in task.measured], task.documents, 60)
    unknown = task.measured[3]
    del task.answers[unknown]
    shown = []

    def reader(question: str, passages: Sequence[str]) -> str:
        shown.append((question, len(passages)))
        return " ".join(passages[0].split()[11:14])

    read = answers_read(reader, ranking, task, 4)
    assert shown == [(task.queries[q], 4) for q in task.measured if q != unknown]
    for row, question in enumerate(task.measured):
        em, f1 = (read[name][row].item() for name in ("reader_em", "reader_f1"))
        if question == unknown:
            assert math.isnan(em)
            assert math.isnan(f1)
            continue
        said = task.documents[int(ranking.documents[row, 0])].split()[11:14]
        wanted = task.answers[question][0].split()
        common = sum(min(said.count(word), wanted.count(word)) for word in set(said))
        assert em == (said == wanted)
        assert f1 == pytest.approx(common / 3)
    assert 0 < read["reader_em"].nanmean() < read["reader_f1"].nanmean() < 1


# Spans


@pytest.mark.parametrize("length", [5, 50])
def test_the_best_span_is_that_of_all_valid_ones(length: int):
    for seed in range(5):
        draw = torch.Generator().manual_seed(seed)
        start, end = torch.randn(2, 3, length, generator=draw)
        inside = torch.rand(3, length, generator=draw) < 0.7
        valid = {
            (w, i, j): (start[w, i] + end[w, j]).item()
            for w, i in itertools.product(range(3), range(length))
            for j in range(i, min(length, i + LONGEST_ANSWER))
            if inside[w, i] and inside[w, j]
        }
        expected = max(valid, key=lambda place: valid[place])
        score, *place = best_span(start, end, inside)
        assert tuple(place) == expected
        assert score == pytest.approx(valid[expected])


def test_there_is_no_span_outside_the_passage():
    nothing = torch.zeros(2, 4, dtype=torch.bool)
    assert best_span(torch.ones(2, 4), torch.ones(2, 4), nothing)[0] == -math.inf


def spans(model: Any, tokenizer: Any, question: str, passage: str) -> Iterator[tuple[float, str]]:
    """Every span of a passage of known words with its score, window by window, one at a time."""
    asked = tokenizer(question, add_special_tokens=False)["input_ids"][: POSITIONS // 4]
    known = passage.split()
    room, before = POSITIONS - len(asked) - 3, len(asked) + 2
    for begin in range(0, max(1, len(known) - POSITIONS // 4), room - POSITIONS // 4):
        seen = known[begin : begin + room]
        tokens = [2, *asked, 3, *tokenizer.convert_tokens_to_ids(seen), 3]
        kinds = [0] * before + [1] * (len(tokens) - before)
        with torch.no_grad():
            out = model(torch.tensor([tokens]), token_type_ids=torch.tensor([kinds]))
        start, end = out.start_logits[0, before:], out.end_logits[0, before:]
        for i, j in itertools.combinations_with_replacement(range(len(seen)), 2):
            yield (start[i] + end[j]).item(), " ".join(seen[i : j + 1])


def test_an_extractive_reader_marks_the_best_span_of_all_passages(extractive: str, words):
    from transformers import AutoModelForQuestionAnswering, AutoTokenizer

    model = AutoModelForQuestionAnswering.from_pretrained(extractive).eval()
    tokenizer = AutoTokenizer.from_pretrained(extractive)
    reader = load_reader(extractive)
    draw = random.Random(0)
    places = []
    for asked, *lengths in ((3, 9, 12), (4, 60), (5, 1, 30, 70), (40, 20, 45), (0, 2)):
        question = " ".join(draw.choices(words, k=asked))
        passages = [" ".join(draw.choices(words, k=length)) for length in lengths]
        found = [spans(model, tokenizer, question, passage) for passage in passages]
        expected = max(itertools.chain(*found))
        assert reader(question, passages) == expected[1], (asked, lengths)
        places.append(passages[-1].find(expected[1]))
    assert max(places) > 4 * POSITIONS  # one lies where only a later window sees it
    assert reader("cat", ["", " "]) == ""


# Generated answers


@pytest.mark.parametrize("kind", ["sequence", "causal"])
def test_a_generator_says_the_likeliest_words_after_the_prompt(
    kind: str, bert_folder: Path, words: list[str], tmp_path: Path
):
    import transformers as hf

    name = generator(kind, bert_folder, tmp_path)
    reader = load_reader(name)
    tokenizer = hf.AutoTokenizer.from_pretrained(name)
    causal = kind == "causal"
    auto = hf.AutoModelForCausalLM if causal else hf.AutoModelForSeq2SeqLM
    model = auto.from_pretrained(name).eval()
    draw = random.Random(1)
    for lengths in ((3, 5), (200, 7, 300)):
        question = " ".join(draw.choices(words, k=4))
        passages = [" ".join(draw.choices(words, k=length)) for length in lengths]
        room = 128 - LONGEST_ANSWER if causal else 512
        frame = len(tokenizer(prompt(question, [""] * len(passages)))["input_ids"])
        cut = [" ".join(p.split()[: (room - frame) // len(passages)]) for p in passages]
        shown = tokenizer(prompt(question, cut))["input_ids"]
        assert len(shown) <= room
        said: list[int] = []
        while len(said) < LONGEST_ANSWER and said[-1:] != [SPECIAL["eos_token_id"]]:
            said.append(int(next_logits(model, shown, said, causal).argmax()))
        expected = tokenizer.decode(said, skip_special_tokens=True).strip()
        assert reader(question, passages) == expected
        assert set(expected.split()) <= {*words, "[UNK]", "[MASK]"}


@torch.no_grad()
def next_logits(model: Any, shown: list[int], said: list[int], causal: bool) -> Tensor:
    if causal:
        return model(torch.tensor([[*shown, *said]])).logits[0, -1]
    begun = torch.tensor([[2, *said]])
    return model(torch.tensor([shown]), decoder_input_ids=begun).logits[0, -1]


def test_a_prompt_has_the_order_of_the_paper():
    lines = prompt("who?", ["one", "two"]).split("\n")
    assert lines[0] == "Question: who?"
    assert lines[2:] == ["[1] one", "[2] two", "Answer:"]


# Runs


def test_a_run_reports_what_its_reader_answers(collection_folder, extractive, tmp_path: Path):
    given: dict[str, Any] = {
        "data": f"beir:{collection_folder}", "out": str(tmp_path), "encoder": "scratch",
        "width": 16, "layers": 1, "heads": 2, "batch_size": 8, "samples": 16,
        "pretrain_samples": 0, "threads": 1, "device": "cpu", "cell": "dot",
    }  # fmt: skip
    config = Config(**given, reader=extractive, reader_passages=2)
    assert run_name(config) == run_name(Config(**given))  # it measures, and changes no run
    metrics: dict[str, Any] = run(config)
    kept = load_file(
        run_path(config, script="train_retrieval", out=tmp_path) / "examples.safetensors"
    )
    for name in ("reader_em", "reader_f1"):
        assert len(kept[name]) == 16
        assert metrics[f"test/{name}"] == pytest.approx(kept[name].mean().item())
        assert 0 <= metrics[f"untrained/{name}"] <= 1
    assert 0 < metrics["test/reader_f1"] < 1
    with pytest.raises(ValueError, match=r"nothing to answer: .*--task=query"):
        run(Config(**given, reader=extractive, task="halves"))


def test_what_is_no_reader_is_refused(bert_folder: Path, extractive: str, tmp_path: Path):
    with pytest.raises(ValueError, match="is BertModel, which answers no questions"):
        load_reader(str(bert_folder))
    with pytest.raises(OSError, match=r"cannot be loaded .*Expected a folder with config.json"):
        load_reader(str(tmp_path))
    (tmp_path / "config.json").write_text((Path(extractive) / "config.json").read_text())
    with pytest.raises(OSError, match="cannot be loaded"):  # no weights
        load_reader(str(tmp_path))
    with pytest.raises(OSError, match="--reader=no/such cannot be loaded"):
        load_reader("no/such")
    with pytest.raises(ValueError, match="--reader-passages must be above 0"):
        Config(reader_passages=0)
