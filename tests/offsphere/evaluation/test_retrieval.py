import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planted_vectors import pair_retrieval

from offsphere.cells import shrink
from offsphere.evaluation import retrieval
from offsphere.evaluation.retrieval import (
    CORNERS,
    Standing,
    cells_to_score,
    same_ranking,
    standings,
)

CELLS = [*CORNERS.values(), (0.3, 0.7), (-0.5, 1.4)]


def pairs(images: int = 37, texts: int = 90, d: int = 12, seed: int = 0):
    """Noisy pairs with widely different norms, captions in no order, one to six per image."""
    generator = torch.Generator().manual_seed(seed)
    rest = torch.randint(images, (texts - images,), generator=generator)
    owner = torch.cat([torch.arange(images), rest])
    owner = owner[torch.randperm(texts, generator=generator)]
    x = torch.randn(images, d, generator=generator)
    y = x[owner] + 0.8 * torch.randn(texts, d, generator=generator)
    lengths = [torch.randn(len(z), 1, generator=generator).exp() for z in (x, y)]
    return x * lengths[0], y * lengths[1], owner


def slow_recalls(images, texts, owner, exponents, ks):
    """Both directions from the whole matrix of scores, one query at a time, in float64."""
    images, texts, owner = images.double().numpy(), texts.double().numpy(), owner.numpy()
    left = images / np.linalg.norm(images, axis=1, keepdims=True) ** exponents[0]
    right = texts / np.linalg.norm(texts, axis=1, keepdims=True) ** exponents[1]
    scores = left @ right.T
    found = {}
    ranks = {"i2t": [], "t2i": []}
    for i, row in enumerate(scores):
        order = np.argsort(-row)
        ranks["i2t"].append(1 + min(np.flatnonzero(owner[order] == i)))
    for j, column in enumerate(scores.T):
        order = np.argsort(-column)
        ranks["t2i"].append(1 + list(order).index(owner[j]))
    for name, of_direction in ranks.items():
        found |= {f"{name}_r{k}": np.mean(np.array(of_direction) <= k) for k in ks}
    return found, ranks


@pytest.mark.parametrize("exponents", CELLS)
def test_recalls_and_ranks_are_those_of_the_slow_reference(exponents):
    images, texts, owner = pairs()
    got = pair_retrieval(images, texts, owner, exponents, ks=(1, 3, 5, 10))
    want, ranks = slow_recalls(images, texts, owner, exponents, (1, 3, 5, 10))
    for name, value in want.items():
        assert got.metrics[name] == pytest.approx(value, abs=1e-12), name
    assert got.outcomes["i2t_rank"].tolist() == ranks["i2t"]
    assert got.outcomes["t2i_rank"].tolist() == ranks["t2i"]
    hits = (got.outcomes["t2i_rank"] <= 5).double()
    assert torch.equal(got.outcomes["t2i_r5"], hits)


def lifted(x: torch.Tensor, other: int) -> torch.Tensor:
    """Unit vectors with the same products up to a factor: [x / M, rest, 0] or [x / M, 0, rest]."""
    x = x.double() / x.double().norm(dim=1).max()
    rest = (1 - x.square().sum(1, keepdim=True)).clamp_min(0).sqrt()
    zero = torch.zeros_like(rest)
    return torch.cat([x, rest, zero] if other == 0 else [x, zero, rest], 1)


@pytest.mark.parametrize("exponents", CELLS)
def test_unmodified_clip_benchmark_agrees_by_the_norm_preserving_lift(exponents):
    """clip-benchmark knows cosine only; lifted vectors carry any cell's products through it."""
    from clip_benchmark.metrics import zeroshot_retrieval

    images, texts, owner = pairs(seed=3)
    owner, order = owner.sort(stable=True)
    texts = texts[order]
    left = shrink(images.double(), exponents[0])
    right = shrink(texts.double(), exponents[1])
    lifted_texts = lifted(right, 1)
    towers = SimpleNamespace(encode_image=lambda x: x, encode_text=lambda rows: lifted_texts[rows])
    captions = [[int(j) for j in (owner == i).nonzero().flatten()] for i in range(len(images))]
    batches = list(zip(lifted(left, 0).split(10), _chunks(captions, 10), strict=True))
    want = zeroshot_retrieval.evaluate(
        towers, batches, torch.tensor, device="cpu", amp=False, recall_k_list=[1, 5, 10]
    )
    got = pair_retrieval(images, texts, owner, exponents).metrics
    for k in (1, 5, 10):
        assert got[f"i2t_r{k}"] == pytest.approx(want[f"text_retrieval_recall@{k}"], abs=1e-6)
        assert got[f"t2i_r{k}"] == pytest.approx(want[f"image_retrieval_recall@{k}"], abs=1e-6)


def _chunks(items: list, size: int) -> list[list]:
    return [items[i : i + size] for i in range(0, len(items), size)]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=6),
    st.integers(1, 8),
)
def test_ties_count_with_their_mean_over_all_orders(candidates, k):
    """Against every permutation of the candidates, sorted stably by score."""
    candidates = [*candidates, (1, True)]
    hits, ranks = [], []
    for order in itertools.permutations(candidates):
        ranked = [right for _, right in sorted(order, key=lambda c: -c[0])]
        ranks.append(1 + ranked.index(True))
        hits.append(True in ranked[:k])
    scores = torch.tensor([[float(score) for score, _ in candidates]])
    right = torch.tensor([right for _, right in candidates]).nonzero().flatten()
    standing = standings(torch.ones(1, 1), scores.T, torch.zeros_like(right), right)
    assert standing.hit(k).item() == pytest.approx(np.mean(hits), abs=1e-9)
    assert standing.rank().item() == pytest.approx(np.mean(ranks), abs=1e-9)


@pytest.mark.parametrize("exponents", CELLS)
def test_a_collapsed_model_gets_chance(exponents):
    _, _, owner = pairs()
    got = pair_retrieval(torch.ones(37, 8), 2 * torch.ones(90, 8), owner, exponents).metrics
    for name in ("i2t_r1", "i2t_r5", "i2t_r10", "t2i_r1", "t2i_r5", "t2i_r10"):
        assert got[name] == pytest.approx(got[f"chance_{name}"], abs=1e-9)
    captions = torch.bincount(owner).double()
    assert got["chance_i2t_r1"] == pytest.approx((captions / 90).mean().item())
    assert got["chance_t2i_r10"] == pytest.approx(10 / 37)


def test_a_recall_at_more_than_there_is_is_one():
    images, texts, owner = pairs(3, 4)
    got = pair_retrieval(images, texts, owner, (1.0, 1.0), ks=(1, 10)).metrics
    assert got["i2t_r10"] == got["t2i_r10"] == 1
    assert got["chance_i2t_r10"] == got["chance_t2i_r10"] == 1


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10**6), st.sampled_from(list(CELLS)), st.integers(1, 200))
def test_tiles_do_not_change_a_number(seed, exponents, scores_at_once):
    images, texts, owner = pairs(9, 23, 5, seed)
    want = pair_retrieval(images.double(), texts.double(), owner, exponents)
    before, retrieval.SCORES_AT_ONCE = retrieval.SCORES_AT_ONCE, scores_at_once
    try:
        got = pair_retrieval(images.double(), texts.double(), owner, exponents)
    finally:
        retrieval.SCORES_AT_ONCE = before
    assert got.metrics == want.metrics
    assert torch.equal(got.outcomes["i2t_rank"], want.outcomes["i2t_rank"])


def test_cells_that_tie_by_construction_are_grouped():
    cells = cells_to_score((0.3, 0.7))
    assert same_ranking(cells, "right") == [("0.3,0.7",), ("cosine", "dnorm"), ("qnorm", "dot")]
    assert same_ranking(cells, "left") == [("0.3,0.7",), ("cosine", "qnorm"), ("dnorm", "dot")]


def test_a_corner_is_not_scored_twice():
    assert cells_to_score((1.0, 0.0)) == CORNERS
    assert list(cells_to_score((0.25, 0.5))) == ["0.25,0.5", *CORNERS]


def test_half_precision_is_scored_in_float32():
    images, texts, owner = pairs()
    images, texts = images.bfloat16(), texts.bfloat16()
    got = pair_retrieval(images, texts, owner, (0.0, 0.0)).metrics
    assert got == pair_retrieval(images.float(), texts.float(), owner, (0.0, 0.0)).metrics


def test_a_certain_hit_has_no_rounding():
    sure = Standing(torch.tensor([0, 4]), torch.tensor([1, 1]), torch.tensor([1, 1]))
    assert sure.hit(1).tolist() == [1.0, 0.0]
    assert sure.hit(5).tolist() == [1.0, 1.0]
