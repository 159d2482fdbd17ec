"""Bootstrap intervals compared with scikit-learn per resample, and their rules."""

import numpy as np
import pytest
import torch
from helpers.errors import raises
from hypothesis import given, settings, strategies as st
from sklearn import metrics as reference

import medvl.eval
from medvl.errors import EvaluationError
from medvl.eval import bootstrap_auroc, bootstrap_average_precision, bootstrap_metric
from medvl.eval.core import metrics

RESAMPLES = 60


def test_public_names_exist():
    for name in medvl.eval.__all__:
        assert name.isupper() or callable(getattr(medvl.eval, name)), name
        assert name in dir(medvl.eval)
    with pytest.raises(AttributeError, match="module 'medvl.eval' has no attribute 'bootstrap_f1'"):
        _ = medvl.eval.bootstrap_f1


def tied_scores(n: int, labels: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return scores with many ties, and labels of which 10 % are NaN."""
    rng = np.random.default_rng(seed)
    labels_NL = (rng.random((n, labels)) < np.linspace(0.1, 0.6, labels)).astype(float)
    scores_NL = np.round(rng.normal(size=(n, labels)) + labels_NL, 1)
    labels_NL[rng.random((n, labels)) < 0.1] = np.nan
    return scores_NL, labels_NL


@pytest.mark.parametrize(
    ("metric", "referee"),
    [
        ("auroc_R", reference.roc_auc_score),
        ("average_precision_R", reference.average_precision_score),
    ],
)
def test_each_resample_matches_scikit_learn(metric, referee):
    scores_NL, labels_NL = tied_scores(120, 4)
    indices_RN = metrics.bootstrap_indices(120, RESAMPLES, seed=3)
    (counts_NR,) = metrics.resample_counts(120, RESAMPLES, seed=3)
    for label, column in enumerate(metrics.ranked_columns(scores_NL, labels_NL)):
        values_R = getattr(column, metric)(counts_NR)
        for drawn_N, value in zip(indices_RN, values_R, strict=True):
            known_N = drawn_N[~np.isnan(labels_NL[drawn_N, label])]
            expected = referee(labels_NL[known_N, label], scores_NL[known_N, label])
            assert value == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("ours", "referee"),
    [
        (bootstrap_auroc, reference.roc_auc_score),
        (bootstrap_average_precision, reference.average_precision_score),
    ],
)
def test_values_and_percentiles_match_loop(ours, referee):
    scores_NL, labels_NL = tied_scores(90, 3)
    value_L, low_L, high_L = ours(scores_NL, labels_NL, resamples=RESAMPLES, seed=5)
    indices_RN = metrics.bootstrap_indices(90, RESAMPLES, seed=5)
    for label in range(3):
        known_N = ~np.isnan(labels_NL[:, label])
        assert value_L[label] == pytest.approx(
            referee(labels_NL[known_N, label], scores_NL[known_N, label])
        )
        loop = [
            referee(labels_NL[drawn, label], scores_NL[drawn, label])
            for drawn in (drawn_N[known_N[drawn_N]] for drawn_N in indices_RN)
        ]
        assert (low_L[label], high_L[label]) == pytest.approx(
            tuple(np.percentile(loop, (2.5, 97.5)))
        )


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([-1.0, 0.0, 0.5, 3.0]), st.sampled_from([0.0, 1.0, np.nan])),
        min_size=2,
        max_size=30,
    )
)
def test_small_columns_match_scikit_learn(rows):
    scores_N, labels_N = np.array(rows).T
    known_N = ~np.isnan(labels_N)
    auroc_L, low_L, high_L = bootstrap_auroc(scores_N[:, None], labels_N[:, None], resamples=20)
    if len(set(labels_N[known_N])) < 2:
        assert np.isnan([auroc_L, low_L, high_L]).all()
    else:
        assert auroc_L[0] == pytest.approx(
            reference.roc_auc_score(labels_N[known_N], scores_N[known_N])
        )
        assert np.isnan(low_L[0]) or 0 <= low_L[0] <= high_L[0] <= 1


def test_chunk_size_does_not_change_resamples(monkeypatch):
    scores_NL, labels_NL = tied_scores(70, 3)
    expected = bootstrap_auroc(scores_NL, labels_NL, resamples=50, seed=1)
    monkeypatch.setattr(metrics, "_CHUNK_ELEMENTS", 500)  # 7 resamples at a time
    assert len(list(metrics.resample_counts(70, 50, seed=1))) == 8
    np.testing.assert_array_equal(
        bootstrap_auroc(scores_NL, labels_NL, resamples=50, seed=1), expected
    )


def test_seed_changes_interval_but_not_value():
    scores_NL, labels_NL = tied_scores(100, 3)
    value_L, low_L, _ = bootstrap_auroc(scores_NL, labels_NL, resamples=50, seed=0)
    np.testing.assert_array_equal(
        bootstrap_auroc(scores_NL, labels_NL, resamples=50, seed=0)[1], low_L
    )
    other = bootstrap_auroc(scores_NL, labels_NL, resamples=50, seed=1)
    np.testing.assert_array_equal(other[0], value_L)
    assert (other[1] != low_L).all()


def test_interval_covers_true_auroc_in_95_percent():
    """Compare with two unit normals at distance 1: AUROC = Phi(1 / sqrt 2) = 0.76025."""
    rng = np.random.default_rng(0)
    labels_N1 = np.repeat([0.0, 1.0], 60)[:, None]
    covered = 0
    for seed in range(200):
        _, low_L, high_L = bootstrap_auroc(
            rng.normal(size=(120, 1)) + labels_N1, labels_N1, resamples=200, seed=seed
        )
        covered += low_L[0] <= 0.76025 <= high_L[0]
    assert 182 <= covered <= 199


@pytest.mark.parametrize("resamples", [1, 2, 3, 20, 39])
def test_low_is_at_most_high_for_few_resamples(resamples):
    """CheXzero's index rule gives low > high below 40 resamples."""
    values_R1 = np.random.default_rng(resamples).random((resamples, 1))
    low_K, high_K = metrics.percentile_interval(values_R1)
    assert values_R1.min() <= low_K[0] <= high_K[0] <= values_R1.max()
    if resamples > 2:
        assert low_K[0] < np.median(values_R1) < high_K[0]


def test_zero_resamples_give_nan_intervals():
    auroc_L, low_L, high_L = bootstrap_auroc(
        np.array([[0.0], [1.0]]), np.array([[0.0], [1.0]]), resamples=0
    )
    assert auroc_L[0] == 1.0
    assert np.isnan([low_L, high_L]).all()


@pytest.mark.parametrize(("n", "groups"), [(1, None), (1, ["a"]), (40, ["a"] * 40)])
def test_a_single_unit_has_no_interval(n, groups):
    """Its resamples are all the same; `scipy.stats.bootstrap` refuses fewer than two
    observations.
    """
    estimate = metrics.bootstrap(
        lambda counts_NR: counts_NR.mean(axis=0)[:, None], n, resamples=20, groups=groups
    )
    assert estimate.value_K == [1.0]
    assert np.isnan([estimate.low_K, estimate.high_K]).all()
    two = metrics.bootstrap(
        lambda counts_NR: counts_NR[:1].T, 2, resamples=20, groups=None if n == 1 else ["a", "b"]
    )
    assert two.low_K < two.high_K


def test_single_class_or_unlabelled_columns_give_nan_without_warning(recwarn):
    labels_NL = np.array([[1, 0, np.nan, 1], [1, 0, np.nan, 0], [1, 0, np.nan, np.nan]], float)
    auroc_L, low_L, _ = bootstrap_auroc(np.arange(12.0).reshape(3, 4), labels_NL, resamples=10)
    assert np.isnan(auroc_L[:3]).all()
    assert auroc_L[3] == 0.0
    assert np.isnan(low_L[:3]).all()
    assert not recwarn.list


def test_resamples_without_both_classes_are_left_out():
    nan = np.nan
    values_RK = np.array([[0.1, nan], [0.3, nan], [nan, nan], [0.2, 0.5]])
    low_K, high_K = metrics.percentile_interval(values_RK)
    assert (low_K[0], high_K[0]) == pytest.approx((0.105, 0.295))
    assert np.isnan([low_K[1], high_K[1]]).all()


def test_groups_are_resampled_with_all_items():
    groups = ["b", "a", "b", "c", "a", "b"]
    for counts_NR in metrics.resample_counts(6, 40, seed=0, groups=groups):
        np.testing.assert_array_equal(counts_NR[0], counts_NR[2])
        np.testing.assert_array_equal(counts_NR[0], counts_NR[5])
        np.testing.assert_array_equal(counts_NR[1], counts_NR[4])
        np.testing.assert_array_equal(counts_NR[0] + counts_NR[1] + counts_NR[3], 3)


def test_duplicated_images_do_not_narrow_patient_intervals():
    rng = np.random.default_rng(0)
    labels_N1 = (rng.random((60, 1)) < 0.5).astype(float)
    scores_N1 = rng.normal(size=(60, 1)) + labels_N1
    single = bootstrap_auroc(scores_N1, labels_N1, seed=2)
    copies = (np.repeat(scores_N1, 5, axis=0), np.repeat(labels_N1, 5, axis=0))
    by_patient = bootstrap_auroc(*copies, seed=2, groups=np.repeat(np.arange(60), 5).tolist())
    np.testing.assert_allclose(by_patient, single)
    by_image = bootstrap_auroc(*copies, seed=2)
    assert (by_image[2] - by_image[1]) < 0.6 * (single[2] - single[1])


def test_mean_over_labels_is_over_the_same_labels_in_every_resample():
    nan = np.nan
    values_RL = np.array([[0.5, 0.7, nan], [nan, 0.5, 0.5], [0.1, 0.2, 0.6]])
    first_two, none = np.array([True, True, False]), np.zeros(3, dtype=bool)
    np.testing.assert_allclose(metrics.mean_over_labels(values_RL, first_two), [0.6, nan, 0.15])
    np.testing.assert_allclose(metrics.mean_over_labels(values_RL, none), [nan] * 3)


def test_bootstrap_metric_uses_same_resamples():
    values_N = np.random.default_rng(0).normal(size=50)
    median_K, low_K, high_K = bootstrap_metric(np.median, values_N, resamples=40, seed=7)
    loop = [np.median(values_N[drawn_N]) for drawn_N in metrics.bootstrap_indices(50, 40, seed=7)]
    assert median_K[0] == np.median(values_N)
    assert (low_K[0], high_K[0]) == pytest.approx(tuple(np.percentile(loop, (2.5, 97.5))))
    both = bootstrap_metric(
        lambda a, b: [a.mean(), (a * b).mean()], values_N, 2 * values_N, resamples=5
    )
    assert both[0] == pytest.approx([values_N.mean(), 2 * (values_N**2).mean()])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_tensors_of_any_precision_and_with_a_gradient_are_accepted(dtype):
    rng = np.random.default_rng(0)
    scores = torch.tensor(rng.normal(size=(60, 2)), dtype=dtype, requires_grad=True)
    labels = torch.tensor(rng.integers(0, 2, size=(60, 2)))
    plain = scores.detach().double().numpy()
    for metric in (bootstrap_auroc, bootstrap_average_precision):
        expected = metric(plain, labels.numpy(), resamples=20)
        for given_labels in (labels, labels.to(dtype), labels.bool()):
            np.testing.assert_array_equal(metric(scores, given_labels, resamples=20), expected)
    np.testing.assert_array_equal(
        bootstrap_metric(np.median, scores, resamples=20),
        bootstrap_metric(np.median, plain, resamples=20),
    )


@pytest.mark.parametrize(
    ("scores", "labels", "code", "field"),
    [
        ([[0.1], [0.2]], [[1.0], [-1.0]], "out_of_range", "labels"),
        ([[0.1], [0.2]], [[1.0], [0.5]], "out_of_range", "labels"),
        ([[0.1], [np.nan]], [[1.0], [0.0]], "nonfinite", "scores"),
        ([[0.1], [np.inf]], [[1.0], [0.0]], "nonfinite", "scores"),
        ([[0.1, 0.2]], [[1.0]], "mismatch", "scores"),
        ([0.1, 0.2], [1.0, 0.0], "mismatch", "scores"),
        (np.zeros((0, 3)), np.zeros((0, 3)), "mismatch", "scores"),
    ],
)
def test_bootstrap_auroc_rejects_invalid_scores_and_labels(scores, labels, code, field):
    with raises(EvaluationError, code, field):
        bootstrap_auroc(scores, labels)


def test_bootstrap_rejects_invalid_sizes():
    with raises(EvaluationError, "out_of_range", "resamples"):
        bootstrap_auroc([[0.0], [1.0]], [[0.0], [1.0]], resamples=-1)
    with raises(EvaluationError, "mismatch", "groups"):
        bootstrap_auroc([[0.0], [1.0]], [[0.0], [1.0]], groups=["a"])
    with raises(EvaluationError, "mismatch", "arrays"):
        bootstrap_metric(np.mean, np.zeros(2), np.zeros(3))
