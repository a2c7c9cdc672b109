"""The planted signal: the model that plants it, the test that finds it, and both error rates."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from sklearn.metrics import ndcg_score

from offsphere.names import CORNERS
from theory import planted_world as world
from theory.planted import (
    Config,
    measure,
    paired_gain,
    run,
    train_and_score,
    verdict,
)

CARRIERS = ("norm", "angle", "both", "neither")
QUICK = Config(cells=("qnorm",), steps=100, worlds=12)


def corpus_of(config):
    generator = world.stream(config.seed, "data")
    return world.draw_corpus(config, world.draw_mixing(config, generator), generator)


def test_counts_are_even_or_fall_as_one_over_the_rank():
    config = Config(relevant=4, distractors=2, queries_each=25)
    assert world.relevance_counts(config).tolist() == [25, 25, 25, 25, 0, 0]
    harmonic = 1 + 1 / 2 + 1 / 3 + 1 / 4
    expected = [round(100 / harmonic / rank) for rank in (1, 2, 3, 4)]
    skewed = world.relevance_counts(replace(config, counts="skewed"))
    assert skewed.tolist() == [*expected, 0, 0]


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("task", ["asymmetric", "symmetric"])
def test_the_carrier_alone_tells_relevant_from_irrelevant(carrier, task):
    """4,000 documents: the means of log-salience and of the latent cosine are the planted ones."""
    config = Config(
        carrier=carrier,
        task=task,
        relevant=2000,
        distractors=2000,
        queries_each=1,
        shift=0.6,
        feature_noise=0.0,
    )
    generator = world.stream(0, "data")
    mixing = world.draw_mixing(config, generator)
    corpus = world.draw_corpus(config, mixing, generator)
    salience = corpus.documents.norm(dim=1).log()
    planted = 0.6 if carrier in ("norm", "both") else 0.0
    gap = salience[:2000].mean() - salience[2000:].mean()
    assert gap.item() == pytest.approx(planted, abs=4 * 0.5 * math.sqrt(2 / 2000))
    of_queries = corpus.queries.norm(dim=1).log().mean().item()
    expected = planted if task == "symmetric" else 0.0
    assert of_queries == pytest.approx(expected, abs=4 * 0.5 / math.sqrt(2000))
    directions = F.normalize(corpus.queries @ mixing.queries.T)
    answers = F.normalize(corpus.documents[corpus.answer] @ mixing.documents.T)
    cosine = (directions * answers).sum(1).mean().item()
    # A unit vector plus noise of length h at about a right angle has a cosine of 1/sqrt(1 + h^2).
    near = 1 / math.sqrt(1 + 0.5**2) if carrier in ("angle", "both") else 0.0
    assert cosine == pytest.approx(near, abs=0.03)
    assert torch.equal(torch.bincount(corpus.answer, minlength=4000), corpus.counts)


def test_shuffling_moves_only_the_magnitudes():
    documents = corpus_of(Config()).documents
    shuffled = world.shuffle_salience(documents, torch.Generator().manual_seed(1))
    torch.testing.assert_close(F.normalize(shuffled), F.normalize(documents))
    before, after = documents.norm(dim=1), shuffled.norm(dim=1)
    torch.testing.assert_close(after.sort().values, before.sort().values)
    assert ((before - after).abs() > 1e-3).float().mean() > 0.9


@pytest.mark.parametrize("task", ["asymmetric", "symmetric"])
def test_encoders_cannot_hold_salience_in_the_direction(task):
    config = Config(task=task)
    encoders = world.Encoders(config, torch.Generator().manual_seed(0))
    features = corpus_of(config).documents
    with torch.no_grad():
        for encoder in (encoders.queries, encoders.documents):
            torch.testing.assert_close(encoder(3.7 * features), 3.7 * encoder(features))
    assert (encoders.queries is encoders.documents) == (task == "symmetric")


def test_ndcg_equals_scikit_learn_and_shares_ties():
    scores = torch.randn(50, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    answer = torch.arange(50) % 30
    relevance = F.one_hot(answer, 30)
    expected = ndcg_score(relevance.numpy(), scores.numpy(), k=10)
    assert world.ndcg(scores, answer) == pytest.approx(expected, abs=1e-7)
    # All five tie: on average two of the other four are ahead.
    assert world.ndcg(torch.zeros(3, 5), torch.tensor([0, 2, 4])) == pytest.approx(1 / math.log2(4))


def test_paired_gain_equals_scipy():
    rng = np.random.default_rng(0)
    a, b = rng.normal(0.3, 1, 15), rng.normal(0, 1, 15)
    expected = stats.ttest_rel(a, b, alternative="greater")
    interval = stats.ttest_rel(a, b).confidence_interval(0.95)
    got = paired_gain(a.tolist(), b.tolist())
    assert got.mean == pytest.approx((a - b).mean())
    assert got.p == pytest.approx(expected.pvalue)
    assert (got.low, got.high) == pytest.approx((interval.low, interval.high))


def test_paired_gain_without_spread_is_decided_by_the_sign():
    assert paired_gain([1.0, 1.0], [1.0, 1.0]) == (0, 0, 0, 1)
    assert paired_gain([2.0, 2.0], [1.0, 1.0]) == (1, 1, 1, 0)


def test_one_run_shows_the_square():
    """Magnitude planted: kept, it helps; normalised away, shuffling it cannot matter."""
    metrics, figures = measure(Config(carrier="norm", counts="skewed", steps=100, worlds=12))
    for cell in ("cosine", "dnorm"):
        assert metrics[f"{cell}/gain"] == pytest.approx(0, abs=1e-4)
    for cell in ("dot", "qnorm"):
        assert metrics[f"{cell}/gain_low"] > 0
        assert metrics[f"{cell}/keep_minus_discard"] > 0.01
    assert metrics["contrast/qnorm_minus_cosine_low"] > 0
    # The relevance counter: norms grow with the count only where documents keep their magnitude.
    for cell, (_, document_exponent) in CORNERS.items():
        slope = metrics[f"{cell}/counter_slope"]
        assert slope > 0.03 if document_exponent == 0 else 0 <= slope < 0.01
        if document_exponent == 0:
            assert metrics[f"{cell}/counter_correlation"] > 0.3
    assert set(figures) == {"cells", "counter"}


@pytest.mark.parametrize("carrier", CARRIERS)
def test_finds_what_is_planted_and_nothing_else(carrier):
    for task in ("asymmetric", "symmetric"):
        metrics, _ = measure(replace(QUICK, carrier=carrier, task=task))
        assert metrics["planted/detected"] == metrics["planted/expected"]
        assert metrics["planted/expected"] == (carrier in ("norm", "both"))


@pytest.mark.slow
@pytest.mark.parametrize("counts", ["even", "skewed"])
@pytest.mark.parametrize("task", ["asymmetric", "symmetric"])
@pytest.mark.parametrize("carrier", CARRIERS)
def test_error_rates_over_twenty_seeds(carrier, task, counts):
    """At least 18 of 20 detections where magnitude is planted, at most 1 where it is not."""
    base = Config(carrier=carrier, task=task, counts=counts, cells=("qnorm",))
    runs = []
    for seed in range(20):
        _, scored = train_and_score(replace(base, seed=seed))
        runs.append(verdict(base, scored["qnorm"]))
    detections = sum(metrics["planted/detected"] for metrics in runs)
    ps = [metrics["planted/p"] for metrics in runs]
    print(f"{carrier} {task} {counts}: {detections:.0f} of 20, p {min(ps):.1e} to {max(ps):.1e}")
    assert detections >= 18 if carrier in ("norm", "both") else detections <= 1


def test_a_run_is_a_folder_and_is_not_measured_twice(tmp_path, capsys):
    config = replace(QUICK, steps=2, worlds=2, out=str(tmp_path))
    metrics = run(config)
    (folder,) = (tmp_path / "planted").iterdir()
    assert {"metrics.json", "cells.png", "cells.svg"} <= {file.name for file in folder.iterdir()}
    assert run(config) == metrics
    assert "is finished" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"cells": ("cosine",)}, "qnorm among the cells"),
        ({"latent": 20}, "at least as many features"),
        ({"worlds": 1}, "worlds of at least 2"),
        ({"cells": ("qnorm", "cosin")}, "Did you mean 'cosine'"),
    ],
)
def test_bad_settings_are_refused(bad, message):
    with pytest.raises(ValueError, match=message):
        measure(replace(QUICK, steps=1, **bad))
