"""Decision metrics, calibration and curves compared with scikit-learn and with formulas."""

import numpy as np
import pytest
from helpers.errors import raises
from sklearn import metrics as reference

from medvl.errors import EvaluationError
from medvl.eval import choose_threshold
from medvl.eval.core import metrics, metrics as curves
from medvl.eval.core.metrics import (
    CALIBRATION_METRICS,
    DECISION_METRICS,
    DecisionColumn,
    ProbabilityColumn,
)

REFEREES = {
    "f1": reference.f1_score,
    "mcc": reference.matthews_corrcoef,
    "accuracy": reference.accuracy_score,
    "balanced_accuracy": reference.balanced_accuracy_score,
    "sensitivity": reference.recall_score,
    "specificity": lambda truth, predicted: reference.recall_score(truth, predicted, pos_label=0),
}


def sample(n: int = 200, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels_N = (rng.random(n) < 0.3).astype(float)
    probability_N = np.round(1 / (1 + np.exp(-rng.normal(size=n) - labels_N)), 2)
    labels_N[rng.random(n) < 0.1] = np.nan
    return probability_N, labels_N


def test_decision_metrics_match_scikit_learn():
    probability_N, labels_N = sample()
    predicted_N = probability_N >= 0.6
    (counts_NR,) = metrics.resample_counts(200, 25, seed=1)
    values_RK = DecisionColumn(predicted_N, labels_N).metrics_RK(counts_NR)
    for drawn_N, values_K in zip(
        metrics.bootstrap_indices(200, 25, seed=1), values_RK, strict=True
    ):
        known_N = drawn_N[~np.isnan(labels_N[drawn_N])]
        expected = [
            REFEREES[name](labels_N[known_N], predicted_N[known_N]) for name in DECISION_METRICS
        ]
        assert values_K == pytest.approx(expected)


def test_decision_metrics_of_constant_decisions_and_single_class():
    constant = DecisionColumn(np.array([True, True]), np.array([1.0, 0.0])).metrics_RK(
        np.ones((2, 1))
    )[0]
    assert dict(zip(DECISION_METRICS, constant, strict=True))["mcc"] == 0
    single = DecisionColumn(np.array([True, False]), np.array([1.0, 1.0])).metrics_RK(
        np.ones((2, 1))
    )
    assert np.isnan(single).all()


def test_calibration_metrics_match_formulas():
    probability_N, labels_N = sample()
    (counts_NR,) = metrics.resample_counts(200, 20, seed=1)
    values_RK = ProbabilityColumn(probability_N, labels_N, bins=15).metrics_RK(counts_NR)
    for drawn_N, values_K in zip(
        metrics.bootstrap_indices(200, 20, seed=1), values_RK, strict=True
    ):
        known_N = drawn_N[~np.isnan(labels_N[drawn_N])]
        probability, positive = probability_N[known_N], labels_N[known_N]
        error = 0.0
        for index in range(15):
            inside = (probability * 15 >= index) & (probability * 15 < index + 1 + (index == 14))
            if inside.any():
                error += inside.mean() * abs(probability[inside].mean() - positive[inside].mean())
        expected = {"brier": reference.brier_score_loss(positive, probability), "ece": error}
        assert values_K == pytest.approx([expected[name] for name in CALIBRATION_METRICS])


def test_calibration_rejects_scores_outside_unit_interval():
    with raises(EvaluationError, "out_of_range", "scores"):
        ProbabilityColumn(np.array([0.2, 1.2]), np.array([0.0, 1.0]))


@pytest.mark.parametrize("rule", ["f1", "mcc", "youden"])
def test_choose_threshold_maximises_rule(rule):
    scores_N, labels_N = sample(80, seed=4)
    known_N = ~np.isnan(labels_N)
    referee = REFEREES[{"youden": "balanced_accuracy"}.get(rule, rule)]
    truth, scores = labels_N[known_N], scores_N[known_N]
    threshold = choose_threshold(scores_N, labels_N, rule)
    best = max(referee(truth, scores >= candidate) for candidate in np.unique(scores))
    assert referee(truth, scores >= threshold) == pytest.approx(best)


def test_choose_threshold_returns_highest_midpoint():
    assert choose_threshold([0.1, 0.4, 0.8, 0.9], [0, 0, 1, 1]) == pytest.approx(0.6)
    assert choose_threshold([0.2, 0.4, 0.6, 0.8], [0, 1, 0, 1], "mcc") == pytest.approx(0.7)
    assert (
        choose_threshold([0.5, 0.5, 0.5], [0, 1, 1]) == 0.5
    )  # only the decision that all are positive is possible
    low = np.nextafter(0.5, 0)
    assert choose_threshold([low, 0.5], [0, 1]) == 0.5  # adjacent floats


def test_choose_threshold_rejects_unknown_rule_and_uncertain_labels():
    assert np.isnan(choose_threshold([0.1, 0.2], [1, 1]))
    assert np.isnan(choose_threshold([0.1, 0.2], [np.nan, 0]))
    with raises(EvaluationError, "unknown_name", "threshold_rule"):
        choose_threshold([0.1, 0.2], [0, 1], "best")
    with raises(EvaluationError, "out_of_range", "labels"):
        choose_threshold([0.1, 0.2], [-1, 1])


def test_roc_curve_matches_scikit_learn_within_band():
    scores_N, labels_N = sample(300, seed=2)
    known_N = ~np.isnan(labels_N)
    curve = curves.roc_curve(scores_N, labels_N, resamples=200)
    false_T, true_T, _ = reference.roc_curve(
        labels_N[known_N], scores_N[known_N], drop_intermediate=False
    )
    np.testing.assert_allclose(curve.false_positive_rate, false_T)
    np.testing.assert_allclose(curve.true_positive_rate, true_T)
    height_G = np.interp(curve.grid_G, false_T, true_T)
    assert (curve.low_G <= height_G).mean() > 0.95
    assert (height_G <= curve.high_G).mean() > 0.95
    assert (curve.high_G - curve.low_G).max() > 0.05


def test_roc_band_matches_loop():
    scores_N, labels_N = sample(60, seed=3)
    labels_N = np.nan_to_num(labels_N)
    curve = curves.roc_curve(scores_N, labels_N, resamples=30, seed=9, grid_points=11)
    heights_RG = []
    for drawn_N in metrics.bootstrap_indices(60, 30, seed=9):
        false_T, true_T, _ = reference.roc_curve(
            labels_N[drawn_N], scores_N[drawn_N], drop_intermediate=False
        )
        heights_RG.append(np.interp(curve.grid_G, false_T, true_T))
    np.testing.assert_allclose(curve.low_G, np.percentile(heights_RG, 2.5, axis=0))
    np.testing.assert_allclose(curve.high_G, np.percentile(heights_RG, 97.5, axis=0))


def test_roc_curve_with_many_thresholds_keeps_corners():
    rng = np.random.default_rng(0)
    labels_N = (rng.random(3000) < 0.5).astype(float)
    curve = curves.roc_curve(rng.normal(size=3000) + labels_N, labels_N, resamples=5)
    assert len(curve.true_positive_rate) == 3001
    assert (curve.false_positive_rate[-1], curve.true_positive_rate[-1]) == (1, 1)
    assert curve.high_G[-1] == 1


def test_roc_band_is_nan_if_most_resamples_have_a_single_class():
    curve = curves.roc_curve(
        np.array([0.1, 0.9]), np.array([0.0, 1.0]), resamples=1, groups=["a", "b"]
    )
    assert curve.true_positive_rate.tolist() == [0, 1, 1]
    assert np.isnan(curve.low_G).all()
    assert np.isnan(curve.high_G).all()


def test_roc_band_of_a_single_patient_is_nan():
    curve = curves.roc_curve(
        np.array([0.1, 0.9, 0.5]), np.array([0.0, 1.0, 0.0]), resamples=20, groups=["a"] * 3
    )
    assert np.isnan(curve.low_G).all()
    assert np.isnan(curve.high_G).all()


def test_roc_curve_of_single_class_is_none():
    assert curves.roc_curve(np.array([0.1, 0.2]), np.array([1.0, np.nan])) is None


def test_calibration_bins_contain_every_item_once():
    probability_N, labels_N = sample(500)
    known_N = ~np.isnan(labels_N)
    bins = curves.calibration_bins(probability_N, labels_N)
    assert bins.count_Q.sum() == known_N.sum()
    assert (bins.count_Q * bins.observed_Q).sum() == pytest.approx(labels_N[known_N].sum())
    assert (bins.count_Q * bins.probability_Q).sum() == pytest.approx(probability_N[known_N].sum())
    assert (np.diff(bins.probability_Q) > 0).all()
    assert bins.count_Q.min() > 0.6 * known_N.sum() / len(bins.count_Q)
    assert ((bins.low_Q < bins.observed_Q) & (bins.observed_Q < bins.high_Q)).all()


def test_calibration_bins_merge_equal_probabilities():
    bins = curves.calibration_bins(np.full(20, 0.4), np.repeat([0.0, 1.0], 10))
    assert bins.count_Q.tolist() == [20]
    assert bins.observed_Q.tolist() == [0.5]


def test_wilson_interval_matches_known_value():
    """Compare with Newcombe (1998), table I: 81 of 263 gives 0.2553 to 0.3662; 0 of 20 gives 0
    to 0.1611.
    """
    low, high = curves.wilson_interval(np.array([81 / 263, 0.0]), np.array([263.0, 20.0]))
    assert low == pytest.approx([0.2553, 0.0], abs=1e-4)
    assert high == pytest.approx([0.3662, 0.1611], abs=1e-4)
