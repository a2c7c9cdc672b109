"""Closed forms against descent and against perturbations, the freedom D, and the remedies."""

import itertools
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from scipy.sparse import csr_array
from sklearn.metrics import roc_auc_score
from sklearn.preprocessing import StandardScaler

from theory import matrix_factorization as mf

PENALTY = 3.0


def small_data(users: int = 40, items: int = 12, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).random((users, items)) < 0.3).astype(float)


def dense_product_objective(x, users, items, penalty):
    product = users @ items.T
    return ((x - x @ product) ** 2).sum() + penalty * (product**2).sum()


def dense_factors_objective(x, users, items, penalty):
    error = ((x - x @ users @ items.T) ** 2).sum()
    return error + penalty * (((x @ users) ** 2).sum() + (items**2).sum())


CASES = [
    (mf.solve_product, mf.descend_product, mf.product_objective, dense_product_objective),
    (mf.solve_factors, mf.descend_factors, mf.factors_objective, dense_factors_objective),
]


@pytest.mark.parametrize("rank", [5, 12])
def test_spectrum_is_numpy_s(rank):
    x = small_data()
    found = mf.spectrum(csr_array(x), rank)
    _, values, rows = np.linalg.svd(x, full_matrices=False)
    np.testing.assert_allclose(found.values, values[:rank], rtol=1e-10)
    signs = np.sign((found.vectors * rows[:rank].T).sum(0))
    np.testing.assert_allclose(found.vectors * signs, rows[:rank].T, atol=1e-8)


def test_directions_without_data_are_left_out():
    x = np.hstack([small_data(), np.zeros((40, 2))])
    assert len(mf.spectrum(csr_array(x), 14).values) == 12


@pytest.mark.parametrize(("solve", "descend", "objective", "dense"), CASES)
def test_objectives_from_the_gram_matrix_are_the_written_out_ones(solve, descend, objective, dense):
    x, rng = small_data(), np.random.default_rng(1)
    users, items = rng.standard_normal((2, 12, 4))
    found = objective(x.T @ x, users, items, PENALTY)
    assert found == pytest.approx(dense(x, users, items, PENALTY), rel=1e-12)


@pytest.mark.parametrize(("solve", "descend", "objective", "dense"), CASES)
@pytest.mark.parametrize("rank", [4, 12])
def test_nothing_near_beats_the_closed_forms(rank, solve, descend, objective, dense):
    x, rng = small_data(), np.random.default_rng(2)
    solved = solve(mf.spectrum(csr_array(x), rank), PENALTY)
    best = dense(x, *solved, PENALTY)
    for size in np.repeat([1e-3, 1e-1, 1.0], 334):
        step = size * rng.standard_normal((2, 12, rank))
        assert dense(x, solved.users + step[0], solved.items + step[1], PENALTY) >= best


@pytest.mark.parametrize(("solve", "descend", "objective", "dense"), CASES)
def test_descent_reaches_the_closed_forms(solve, descend, objective, dense):
    x = small_data(200, 30)
    best = dense(x, *solve(mf.spectrum(csr_array(x), 8), PENALTY), PENALTY)
    for seed in (0, 1):
        found = dense(x, *descend(x.T @ x, 8, PENALTY, seed), PENALTY)
        assert abs(found / best - 1) < 1e-4


def test_both_closed_forms_at_full_rank_are_those_of_the_paper():
    x = small_data()
    top = mf.spectrum(csr_array(x), 12)
    ridge = np.linalg.solve(x.T @ x + PENALTY * np.eye(12), x.T @ x)
    product = mf.solve_product(top, PENALTY)
    np.testing.assert_allclose(product.users @ product.items.T, ridge, atol=1e-10)
    factors = mf.solve_factors(top, PENALTY)
    left, values, rows = np.linalg.svd(x, full_matrices=False)
    kept = left * np.maximum(values - PENALTY, 0) @ rows
    np.testing.assert_allclose(x @ factors.users @ factors.items.T, kept, atol=1e-10)


def test_1000_rescalings_predict_alike_and_solve_eq_1_but_not_eq_2():
    x, rng = small_data(), np.random.default_rng(3)
    top = mf.spectrum(csr_array(x), 5)
    product, factors = mf.solve_product(top, PENALTY), mf.solve_factors(top, PENALTY)
    best = dense_product_objective(x, *product, PENALTY)
    unique = dense_factors_objective(x, *factors, PENALTY)
    for _ in range(1000):
        scales = np.exp(rng.standard_normal(5))
        moved = mf.rescale(product, scales)
        gap = np.abs(moved.users @ moved.items.T - product.users @ product.items.T).max()
        assert gap < 1e-6
        assert dense_product_objective(x, *moved, PENALTY) == pytest.approx(best, rel=1e-6)
        assert dense_factors_objective(x, *mf.rescale(factors, scales), PENALTY) > unique


def test_descent_leaves_cosines_of_eq_1_open_and_fixes_those_of_eq_2():
    x = small_data(200, 30)
    gram, top = x.T @ x, mf.spectrum(csr_array(x), 8)
    solved = mf.cosines(mf.solve_factors(top, PENALTY).items)
    for seed in (0, 1):
        found = mf.descend_factors(gram, 8, PENALTY, seed)
        np.testing.assert_allclose(mf.cosines(found.items), solved, atol=1e-3)
    one = mf.descend_product(gram, 8, PENALTY, 0)
    other = mf.rescale(one, top.values**-0.5)
    assert np.abs(one.users @ one.items.T - other.users @ other.items.T).max() < 1e-6
    assert np.abs(mf.cosines(one.items) - mf.cosines(other.items)).max() > 0.01
    starts = [mf.cosines(mf.descend_product(gram, 8, PENALTY, seed).items) for seed in (0, 1)]
    assert np.abs(starts[0] - starts[1]).max() > 0.1


def test_rotations_change_no_cosine():
    rows = np.random.default_rng(4).standard_normal((9, 5))
    rotation, _ = np.linalg.qr(np.random.default_rng(5).standard_normal((5, 5)))
    np.testing.assert_allclose(mf.cosines(rows @ rotation), mf.cosines(rows), atol=1e-12)


def test_flat_items_are_similar_to_themselves_only_and_cosine_ranks_like_the_dot_product():
    x = small_data(200, 30)
    top = mf.spectrum(csr_array(x), 30)
    kept = mf.shrinkage(top.values, PENALTY)
    moved = mf.rescale(mf.solve_product(top, PENALTY), mf.SPREADS["items_flat"](top.values, kept))
    np.testing.assert_allclose(mf.cosines(moved.items), np.eye(30), atol=1e-10)
    users = x @ moved.users
    dots = users @ moved.items.T
    unit_users = users / np.linalg.norm(users, axis=1, keepdims=True)
    scores = unit_users @ (moved.items / np.linalg.norm(moved.items, axis=1, keepdims=True)).T
    norms = np.linalg.norm(users, axis=1, keepdims=True)
    np.testing.assert_allclose(scores * norms, dots, atol=1e-10)


def test_flat_users_have_the_cosines_of_the_raw_data():
    x = small_data(200, 30)
    top = mf.spectrum(csr_array(x), 30)
    kept = mf.shrinkage(top.values, PENALTY)
    moved = mf.rescale(mf.solve_product(top, PENALTY), mf.SPREADS["users_flat"](top.values, kept))
    np.testing.assert_allclose(mf.cosines(x @ moved.users), mf.cosines(x), atol=1e-10)
    expected = mf.cosines(top.vectors * kept)
    np.testing.assert_allclose(mf.cosines(moved.items), expected, atol=1e-10)


def test_the_spread_like_eq_2_is_its_shape():
    top = mf.spectrum(csr_array(small_data()), 5)
    kept = mf.shrinkage(top.values, PENALTY)
    moved = mf.rescale(mf.solve_product(top, PENALTY), mf.SPREADS["like_factors"](top.values, kept))
    np.testing.assert_allclose(moved.items, top.vectors * np.sqrt(kept * top.values), atol=1e-12)


def test_noise_in_every_entry_is_eq_1_in_expectation():
    x, rng = small_data(4, 3, seed=7), np.random.default_rng(6)
    users, items = rng.standard_normal((2, 3, 2))
    noise = (PENALTY / 4) ** 0.5
    errors = [
        ((x - (x + noise * np.reshape(signs, x.shape)) @ users @ items.T) ** 2).sum()
        for signs in itertools.product((-1, 1), repeat=12)
    ]
    expected = mf.product_objective(x.T @ x, users, items, PENALTY)
    assert np.mean(errors) == pytest.approx(expected, rel=1e-10)


def test_training_on_noisy_copies_comes_near_eq_1():
    x = csr_array(small_data(400, 20))
    trained = mf.train_denoising(x, 5, 100.0, steps=600, seed=0)
    gram = (x.T @ x).toarray()
    best = mf.product_objective(gram, *mf.solve_product(mf.spectrum(x, 5), 100.0), 100.0)
    assert mf.product_objective(gram, *trained, 100.0) / best - 1 < 0.01


def test_training_on_cosines_lowers_the_written_out_error():
    x = small_data(100, 20)
    start = mf.solve_product(mf.spectrum(csr_array(x), 4), PENALTY)
    seen = []
    for steps in (1, 30):
        items = mf.train_on_cosine(csr_array(x), start, steps, layer_norm=False)
        np.testing.assert_allclose(np.linalg.norm(items, axis=1), 1, atol=1e-12)
        seen.append(best_error_on_cosines(x, items))
    assert seen[1] < seen[0]
    centred = mf.train_on_cosine(csr_array(x), start, 5, layer_norm=True)
    np.testing.assert_allclose(centred.mean(1), 0, atol=1e-12)


def best_error_on_cosines(x: np.ndarray, items: np.ndarray) -> float:
    """Squared error of the rows' least squares on the given unit items: any user may be chosen."""
    design = np.hstack([items, np.ones((len(items), 1))])
    return float(((x.T - design @ np.linalg.lstsq(design, x.T, rcond=None)[0]) ** 2).sum())


def test_no_rescaling_moves_the_reconstructed_cosines():
    x = small_data()
    top = mf.spectrum(csr_array(x), 5)
    solved = mf.solve_product(top, PENALTY)
    expected = mf.cosines((x @ solved.users @ solved.items.T).T)
    for scales in np.exp(np.random.default_rng(9).standard_normal((20, 5))):
        found = mf.reconstructed_cosines(x.T @ x, mf.rescale(solved, scales))
        np.testing.assert_allclose(found, expected, atol=1e-10)


def test_standardised_gram_is_scikit_learn_s():
    x = small_data()
    scaled = StandardScaler().fit_transform(x)
    np.testing.assert_allclose(mf.standardised_gram(csr_array(x)), scaled.T @ scaled, atol=1e-9)


def test_propensity_gram_divides_the_columns():
    x = small_data()
    weighted = x / x.mean(0) ** 0.7
    found = mf.propensity_gram(csr_array(x), 0.7)
    np.testing.assert_allclose(found, weighted.T @ weighted, rtol=1e-12)


def test_contrast_and_auroc_against_their_definitions():
    rng = np.random.default_rng(10)
    rows, clusters = rng.standard_normal((30, 3)).round(1), rng.integers(3, size=30)
    similarity = mf.cosines(rows)
    pairs = list(itertools.combinations(range(30), 2))
    values = np.array([similarity[i, j] for i, j in pairs])
    same = np.array([clusters[i] == clusters[j] for i, j in pairs])
    contrast = values[same].mean() - values[~same].mean()
    assert mf.block_contrast(similarity, clusters) == pytest.approx(contrast, abs=1e-12)
    found = mf.same_cluster_auroc(similarity, clusters)
    assert found == pytest.approx(roc_auc_score(same, values.round(12)), abs=1e-12)
    assert mf.same_cluster_auroc(np.eye(30), clusters) == 0.5


def test_simulated_clicks_follow_the_design():
    config = mf.Config(users=4000, items=100, rank=10, items_per_user=(3, 20), seed=1)
    clicks = mf.simulate_clicks(config)
    counts = np.diff(clicks.matrix.indptr)
    assert clicks.matrix.shape == (4000, 100)
    assert (clicks.matrix.toarray().sum(1) == counts).all()  # no item twice
    assert (counts.min(), counts.max()) == (3, 20)
    shares = np.bincount(counts, minlength=21)[3:] / 4000
    expected = np.arange(3, 21) ** -0.5 / (np.arange(3, 21) ** -0.5).sum()
    assert np.abs(shares - expected).max() < 4 * (expected.max() / 4000) ** 0.5
    assert (np.diff(clicks.clusters) >= 0).all()
    falls = np.diff(clicks.popularity)[np.diff(clicks.clusters) == 0]
    assert (falls < 0).all()
    again = mf.simulate_clicks(config)
    np.testing.assert_array_equal(again.matrix.toarray(), clicks.matrix.toarray())


def test_draws_without_replacement_have_the_successive_probabilities():
    weights, rng = np.array([5.0, 3.0, 2.0]), np.random.default_rng(11)
    drawn = mf._draw_without_replacement(np.tile(weights, (40_000, 1)), np.full(40_000, 2), rng)
    pairs, counts = np.unique(drawn.reshape(-1, 2), axis=0, return_counts=True)
    share = weights / 10
    expected = [share[i] * share[j] / (1 - share[i]) for i, j in pairs]
    np.testing.assert_allclose(counts / 40_000, expected, atol=0.01)


def test_ambiguity_keeps_dot_products_and_counts_kept_neighbours():
    rng = np.random.default_rng(12)
    left, right = rng.standard_normal((30, 6)), rng.standard_normal((25, 6))
    scales = np.exp(np.outer([0.0, 1.0], rng.standard_normal(6)))
    found = mf.ambiguity(left, right, scales, neighbours=4)
    assert found.dot_change.max() < 1e-12
    assert found.pair_overlap[0] == found.right_overlap[0] == 1

    def neighbours(one, other, skip_self):
        unit = [x / np.linalg.norm(x, axis=1, keepdims=True) for x in (one, other)]
        order = np.argsort(-unit[0] @ unit[1].T, axis=1)
        return [[j for j in row if not (skip_self and i == j)][:4] for i, row in enumerate(order)]

    def overlap(one, other):
        return np.mean([len(set(a) & set(b)) / 4 for a, b in zip(one, other, strict=True)])

    moved_left, moved_right = left * scales[1], right / scales[1]
    before, after = neighbours(left, right, False), neighbours(moved_left, moved_right, False)
    assert found.pair_overlap[1] == pytest.approx(overlap(before, after))
    before, after = neighbours(right, right, True), neighbours(moved_right, moved_right, True)
    assert found.right_overlap[1] == pytest.approx(overlap(before, after))


def test_ambiguity_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="more than 5 right rows"):
        mf.ambiguity(np.ones((5, 3)), np.ones((5, 3)), np.ones((1, 3)))
    with pytest.raises(ValueError, match="positive and finite"):
        mf.ambiguity(np.ones((20, 3)), np.ones((20, 3)), np.array([[1.0, 0.0, 1.0]]))


SMALL = {"users": 400, "items": 60, "rank": 10, "items_per_user": (5, 20)}
SMALL |= {"denoising_steps": 5, "remedy_steps": 3}


def test_run_leaves_figures_and_metrics(tmp_path):
    file = tmp_path / "embeddings.safetensors"
    save_file({"embedding": torch.randn(50, 8, generator=torch.Generator().manual_seed(0))}, file)
    metrics = mf.run(mf.Config(**SMALL, embeddings=str(file), out=str(tmp_path)))
    (folder,) = (tmp_path / "matrix_factorization").iterdir()
    names = itertools.product(("heat_maps", "remedies", "ambiguity"), ("png", "svg"))
    figures = {".".join(name) for name in names}
    assert figures <= {path.name for path in folder.iterdir()}
    assert abs(float(metrics["descent/product_excess"])) < 1e-4
    assert abs(float(metrics["descent/factors_excess"])) < 1e-4
    assert float(metrics["descent/rescaled_prediction_gap"]) < 1e-6
    assert metrics["full/items_flat/contrast"] == pytest.approx(0, abs=1e-12)
    assert metrics["full/items_flat/auroc"] == 0.5
    assert metrics["remedy/reconstructed/auroc_range"] == pytest.approx(0, abs=1e-6)
    assert float(metrics["ambiguity/encoder/dot_change_2"]) < 1e-6
    assert float(metrics["ambiguity/encoder/right_overlap_2"]) < 0.9


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 60}, "rank < items"),
        ({"items_per_user": (5, 100)}, "items_per_user"),
        ({"clusters": 1}, "clusters"),
        ({"preference": 0.0}, "preference"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        mf.Config(**{**SMALL, **settings})


def test_a_wrong_embedding_file_is_one_line_and_exit_1(tmp_path):
    file = tmp_path / "weights.safetensors"
    save_file({"backbone": torch.ones(3, 2)}, file)
    with pytest.raises(ValueError, match="needs a matrix 'embedding', it holds \\['backbone'\\]"):
        mf.load_embedding(str(file))
    file.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="is not a safetensors file"):
        mf.load_embedding(str(file))
    command = [sys.executable, "-m", "theory.matrix_factorization", f"--out={tmp_path}"]
    command += [f"--embeddings={tmp_path}/none"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("matrix_factorization: error: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_the_paper_s_size_reaches_both_closed_forms(tmp_path):
    metrics = mf.run(mf.Config(users=20_000, items=1000, out=str(tmp_path)))
    assert float(metrics["descent/product_excess"]) < 1e-4
    assert float(metrics["descent/factors_excess"]) < 1e-4
    assert metrics["full/rank"] == 1000
    assert metrics["full/items_flat/auroc"] == 0.5
