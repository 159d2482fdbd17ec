"""Ranking, decision and calibration metrics as functions of resample counts.

Every metric takes counts_NR (how often resample r drew item n, float64; a column of ones for the
plain value) and returns one value per resample, NaN for a resample without positives or without
negatives.

Shape letters: N items, R resamples, K metrics, Q bins.
"""

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from medvl.common.config_io import check_choice
from medvl.errors import EvaluationError

Array = NDArray[np.float64]

DECISION_METRICS = ("f1", "mcc", "accuracy", "balanced_accuracy", "sensitivity", "specificity")
CALIBRATION_METRICS = ("brier", "ece")
ECE_BINS = 15
"""Number of equal-width bins over [0, 1] for the calibration error (Guo et al., 2017)."""


def as_array(values: ArrayLike) -> NDArray[np.generic]:
    """Return an array. A tensor may be on any device, need a gradient, or be bfloat16: its
    decimals become float64.
    """
    if not hasattr(values, "detach"):
        return np.asarray(values)
    tensor = values.detach().cpu()
    return np.asarray((tensor.double() if tensor.is_floating_point() else tensor).numpy())


def check_scores(scores_NL: ArrayLike, labels_NL: ArrayLike) -> tuple[Array, Array]:
    """Return scores and labels, arrays or tensors, as float64 arrays of the same (N, L) shape.

    Raises `EvaluationError` unless shapes agree, scores are finite and labels are 1, 0 or NaN.
    """
    scores, labels = (
        as_array(values).astype(np.float64, copy=False) for values in (scores_NL, labels_NL)
    )
    if scores.ndim != 2 or scores.shape != labels.shape or scores.size == 0:
        message = (
            f"expected equal non-empty shapes of scores and labels, got {scores.shape} "
            f"and {labels.shape}"
        )
        raise EvaluationError(message, "mismatch", field="scores")
    if not np.isfinite(scores).all():
        bad = int((~np.isfinite(scores)).sum())
        message = (
            f"expected finite scores, got {bad} of {scores.size} that are not; check the "
            f"model's outputs"
        )
        raise EvaluationError(message, "nonfinite", field="scores")
    if not np.isin(labels[~np.isnan(labels)], (0.0, 1.0)).all():
        message = (
            "expected labels of 1, 0 or NaN; apply a LabelPolicy to uncertain (-1) labels first"
        )
        raise EvaluationError(message, "out_of_range", field="labels")
    return scores, labels


class RankedColumn:
    """AUROC and average precision of one label.

    The scores are sorted once; each resample then needs only sums of counts. Ties are handled
    exactly.

    Args:
        scores_N: finite scores.
        labels_N: 1, 0 or NaN (left out).
    """

    def __init__(self, scores_N: Array, labels_N: Array) -> None:
        self.n = len(scores_N)
        positives = np.flatnonzero(labels_N == 1)
        negatives = np.flatnonzero(labels_N == 0)
        self.positives = positives[np.argsort(scores_N[positives], kind="stable")]
        self.negatives = negatives[np.argsort(scores_N[negatives], kind="stable")]
        positive_scores = scores_N[self.positives]
        negative_scores = scores_N[self.negatives]
        self._positives_below = np.searchsorted(positive_scores, positive_scores, side="left")
        self._negatives_below = np.searchsorted(negative_scores, positive_scores, side="left")
        self._negatives_through = np.searchsorted(negative_scores, positive_scores, side="right")

    def auroc_R(self, counts_NR: Array) -> Array:
        """Return the probability that a positive scores above a negative, where equal scores
        count one half.
        """
        positive_PR = counts_NR[self.positives]
        negatives_so_far = _cumulative_sums(counts_NR[self.negatives])
        wins_R = np.einsum("pr,pr->r", positive_PR, negatives_so_far[self._negatives_below])
        wins_R += np.einsum("pr,pr->r", positive_PR, negatives_so_far[self._negatives_through])
        return _divide(wins_R / 2, positive_PR.sum(axis=0) * negatives_so_far[-1])

    def average_precision_R(self, counts_NR: Array) -> Array:
        """Return the mean over positives of the precision among all items that score at least as
        high.
        """
        positive_PR = counts_NR[self.positives]
        positives_so_far = _cumulative_sums(positive_PR)
        negatives_so_far = _cumulative_sums(counts_NR[self.negatives])
        true_PR = positives_so_far[-1] - positives_so_far[self._positives_below]
        false_PR = negatives_so_far[-1] - negatives_so_far[self._negatives_below]
        precision_PR = true_PR / np.maximum(true_PR + false_PR, 1)  # 0/1 where no item is drawn
        total_R = np.einsum("pr,pr->r", positive_PR, precision_PR)
        return _divide(total_R, np.where(negatives_so_far[-1] > 0, positives_so_far[-1], 0))


def _cumulative_sums(counts_MR: Array) -> Array:
    """Return the sums of the first m rows, for m = 0 to M."""
    sums = np.zeros((len(counts_MR) + 1, counts_MR.shape[1]))
    np.cumsum(counts_MR, axis=0, out=sums[1:])
    return sums


def _divide(numerator_R: Array, denominator_R: Array) -> Array:
    """Return the quotient, NaN where the denominator is not positive."""
    result_R = np.full_like(numerator_R, np.nan)
    np.divide(numerator_R, denominator_R, out=result_R, where=denominator_R > 0)
    return result_R


class DecisionColumn:
    """`DECISION_METRICS` of one label, computed from the four confusion counts."""

    def __init__(self, predicted_N: NDArray[np.bool_], labels_N: Array) -> None:
        positive = labels_N == 1
        negative = labels_N == 0
        cells = (
            predicted_N & positive,
            predicted_N & negative,
            ~predicted_N & positive,
            ~predicted_N & negative,
        )
        self._cells_N4 = np.stack(cells, axis=1).astype(np.float64)

    def metrics_RK(self, counts_NR: Array) -> Array:
        """Return one column per metric, in the order of `DECISION_METRICS`."""
        return confusion_metrics(*(self._cells_N4.T @ counts_NR))


def confusion_metrics(tp: ArrayLike, fp: ArrayLike, fn: ArrayLike, tn: ArrayLike) -> Array:
    """Return `DECISION_METRICS` as values_RK from confusion counts of shape R, NaN where a class is
    absent.

    The Matthews correlation of a constant decision is 0.
    """
    tp_R, fp_R, fn_R, tn_R = (
        np.atleast_1d(np.asarray(cell, dtype=np.float64)) for cell in (tp, fp, fn, tn)
    )
    positives_R = tp_R + fn_R
    negatives_R = fp_R + tn_R
    sensitivity_R = _divide(tp_R, positives_R)
    specificity_R = _divide(tn_R, negatives_R)
    f1_R = _divide(2 * tp_R, 2 * tp_R + fp_R + fn_R)
    spread_R = np.sqrt((tp_R + fp_R) * (fn_R + tn_R) * positives_R * negatives_R)
    mcc_R = (tp_R * tn_R - fp_R * fn_R) / np.where(spread_R > 0, spread_R, 1)
    accuracy_R = _divide(tp_R + tn_R, positives_R + negatives_R)
    balanced_R = (sensitivity_R + specificity_R) / 2
    values_RK = np.stack(
        (f1_R, mcc_R, accuracy_R, balanced_R, sensitivity_R, specificity_R), axis=1
    )
    values_RK[(positives_R == 0) | (negatives_R == 0)] = np.nan
    return values_RK


class ProbabilityColumn:
    """Brier score and expected calibration error of one label.

    The calibration error is the mean over items of |mean probability - fraction of positives| in
    the item's bin, with `bins` equal-width bins over [0, 1] (Naeini et al., 2015; Guo et al.,
    2017).
    """

    def __init__(self, probability_N: Array, labels_N: Array, bins: int = ECE_BINS) -> None:
        known = ~np.isnan(labels_N)
        probability = np.where(known, probability_N, 0.0)
        positive = np.where(known, labels_N, 0.0)
        if ((probability < 0) | (probability > 1)).any():
            raise EvaluationError(
                "expected probabilities in [0, 1] for calibration", "out_of_range", field="scores"
            )
        bin_of_N = np.minimum((probability * bins).astype(np.int64), bins - 1)
        self._gap_NQ = np.zeros((len(probability), bins))
        self._gap_NQ[np.arange(len(probability)), bin_of_N] = probability - positive
        self._items_N3 = np.stack(
            (known * (probability - positive) ** 2, positive, known * 1.0), axis=1
        )

    def metrics_RK(self, counts_NR: Array) -> Array:
        """Return one column per metric, in the order of `CALIBRATION_METRICS`."""
        squares_R, positives_R, items_R = self._items_N3.T @ counts_NR
        gaps_R = np.abs(self._gap_NQ.T @ counts_NR).sum(axis=0)
        defined_R = np.where((positives_R > 0) & (positives_R < items_R), items_R, 0)
        return np.stack((_divide(squares_R, defined_R), _divide(gaps_R, defined_R)), axis=1)


def choose_threshold(
    scores: ArrayLike, labels: ArrayLike, rule: Literal["f1", "mcc", "youden"] = "f1"
) -> float:
    """Return the threshold at which the decision "score >= threshold" is best by `rule`; for
    validation data only.

    The threshold is the midpoint of two neighbouring scores; among equally good ones the highest.
    NaN labels are left out; the result is NaN if a class is absent. "youden" (sensitivity +
    specificity - 1) ranks thresholds as balanced accuracy does. Raises `EvaluationError` on an
    unknown rule.
    """
    metrics = {"f1": "f1", "mcc": "mcc", "youden": "balanced_accuracy"}
    check_choice(rule, metrics, "threshold_rule", error=EvaluationError)
    scores_NL, labels_NL = check_scores(
        np.atleast_2d(as_array(scores)).T, np.atleast_2d(as_array(labels)).T
    )
    scores_N = scores_NL[:, 0]
    labels_N = labels_NL[:, 0]
    known = ~np.isnan(labels_N)
    order = np.argsort(-scores_N[known], kind="stable")
    scores_N = scores_N[known][order]
    positive_N = labels_N[known][order] == 1
    if positive_N.all() or not positive_N.any():
        return float("nan")
    last_of_tie = np.flatnonzero(np.append(np.diff(scores_N) != 0, True))
    tp = np.cumsum(positive_N)[last_of_tie]
    fp = np.cumsum(~positive_N)[last_of_tie]
    values_RK = confusion_metrics(tp, fp, positive_N.sum() - tp, (~positive_N).sum() - fp)
    best = int(np.argmax(values_RK[:, DECISION_METRICS.index(metrics[rule])]))
    highest = float(scores_N[last_of_tie[best]])
    if best + 1 == len(last_of_tie):  # all items are positive
        return highest
    below = float(scores_N[last_of_tie[best + 1]])
    middle = below + (highest - below) / 2
    return middle if middle > below else highest  # adjacent floats have no midpoint
