"""The reader of retrieval-augmented answering: a question and its best passages to an answer.

An extractive model (...ForQuestionAnswering) marks a span of a passage; a generator (sequence to
sequence such as Flan-T5, the paper's reader, or causal) is shown all passages in one prompt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from offsphere.encoders.weights import why

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

LONGEST_ANSWER = 30  # tokens (ours)
WINDOW = 384  # tokens that an extractive reader sees at once; longer passages come in several
INSTRUCTION = "Answer the question in a few words, from the documents below."  # ours

Reader = Callable[[str, Sequence[str]], str]


def load_reader(name: str, device: str | torch.device = "cpu") -> Reader:
    """The reader of a local folder or a cached name, by the kind that its config.json tells."""
    import transformers as hf

    kinds = {
        "ForQuestionAnswering": (hf.AutoModelForQuestionAnswering, extract),
        "ForConditionalGeneration": (hf.AutoModelForSeq2SeqLM, generate),
        "ForCausalLM": (hf.AutoModelForCausalLM, generate),
        "LMHeadModel": (hf.AutoModelForCausalLM, generate),
    }
    hf.utils.logging.disable_progress_bar()
    here = {"local_files_only": True, "trust_remote_code": False}
    try:
        made = (hf.AutoConfig.from_pretrained(name, **here).architectures or ["of no kind"])[0]
        for load, read in (kinds[kind] for kind in kinds if made.endswith(kind)):
            model = load.from_pretrained(name, **here).to(device).eval()
            return partial(read, model, hf.AutoTokenizer.from_pretrained(name, **here))
    except Exception as error:  # on foreign files transformers raises anything
        raise OSError(
            f"--reader={name} cannot be loaded ({why(error)}). Expected a "
            "folder with config.json, tokenizer and weights, or a name after `hf download NAME`."
        ) from error
    raise ValueError(
        f"--reader={name} is {made}, which answers no questions: expected {', '.join(kinds)}."
    )


@torch.inference_mode()
def extract(model: Any, tokenizer: Any, question: str, passages: Sequence[str]) -> str:
    """The span of any passage with the largest sum of start and end logit."""
    limit = min(WINDOW, _limit(model, tokenizer))
    asked = [_cut(tokenizer, question, limit // 4)] * len(passages)
    how = {"truncation": "only_second", "max_length": limit, "stride": limit // 4}
    what = {"return_overflowing_tokens": True, "return_offsets_mapping": True}
    windows = tokenizer(asked, list(passages), **how, **what, padding=True, return_tensors="pt")
    places, passage_of = windows.pop("offset_mapping"), windows.pop("overflow_to_sample_mapping")
    inside = [[side == 1 for side in windows.sequence_ids(row)] for row in range(len(places))]
    found = model(**windows.to(model.device))
    start, end = found.start_logits.float().cpu(), found.end_logits.float().cpu()
    score, row, first, last = best_span(start, end, torch.tensor(inside))
    begin, finish = int(places[row, first, 0]), int(places[row, last, 1])
    return "" if score == -math.inf else passages[int(passage_of[row])][begin:finish]


def best_span(
    start: Float[Tensor, "w t"], end: Float[Tensor, "w t"], inside: Bool[Tensor, "w t"]
) -> tuple[float, int, int, int]:
    """Score, window, first and last token of the best span of at most LONGEST_ANSWER tokens."""
    length = start.shape[1]
    near = torch.ones(length, length, dtype=torch.bool).triu().tril(LONGEST_ANSWER - 1)
    allowed = inside[:, :, None] & inside[:, None, :] & near
    scores = (start[:, :, None] + end[:, None, :]).masked_fill(~allowed, -math.inf)
    row, place = divmod(int(scores.argmax()), length * length)
    first, last = divmod(place, length)
    return scores[row, first, last].item(), row, first, last


@torch.inference_mode()
def generate(model: Any, tokenizer: Any, question: str, passages: Sequence[str]) -> str:
    """The likeliest continuation of the prompt, token by token; passages are cut to fit in."""
    whole = model.config.is_encoder_decoder
    limit = _limit(model, tokenizer) - (0 if whole else LONGEST_ANSWER)
    question = _cut(tokenizer, question, limit // 4)
    frame = len(tokenizer(prompt(question, [""] * len(passages)))["input_ids"])
    share = max(1, (limit - frame) // len(passages))
    shown = tokenizer(prompt(question, [_cut(tokenizer, p, share) for p in passages]))["input_ids"]
    tokens = torch.tensor([shown], device=model.device)
    padding = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    made = model.generate(
        input_ids=tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=LONGEST_ANSWER,
        do_sample=False, num_beams=1, pad_token_id=padding,
    )[0]  # fmt: skip
    answer = tokenizer.decode(made if whole else made[len(shown) :], skip_special_tokens=True)
    return answer.strip().partition("\n")[0]


def prompt(question: str, passages: Sequence[str]) -> str:
    """What a generator is shown, in the paper's order: its words are not published."""
    documents = "\n".join(f"[{number}] {text}" for number, text in enumerate(passages, 1))
    return f"Question: {question}\n{INSTRUCTION}\n{documents}\nAnswer:"


def _limit(model: Any, tokenizer: Any) -> int:
    """Tokens that a model takes; 512 where neither it nor its tokenizer says."""
    said = tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", None)
    return min((n for n in said if n and n < 10**6), default=512)


def _cut(tokenizer: Any, text: str, tokens: int) -> str:
    """The beginning of a text that has at most so many tokens."""
    how = {"truncation": True, "max_length": tokens, "add_special_tokens": False}
    places = tokenizer(text, **how, return_offsets_mapping=True)["offset_mapping"]
    return text[: places[-1][1]] if places else text
