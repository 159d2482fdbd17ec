"""Ranking, decision and calibration metrics as functions of resample counts.

Every metric takes counts_NR (how often resample r drew item n, float64; a column of ones for the
plain value) and returns one value per resample, NaN for a resample without positives or without
negatives.

Shape letters: N items, R resamples, K metrics, Q bins.
"""

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Sequence
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


# Exact bootstrap intervals, vectorised over resamples.
#
# A resample draws N items with replacement and is stored as counts per item, not as a copy of the
# data: a statistic takes `counts_NR` (how often resample r drew item n) and returns its values
# for all resamples at once. A column of ones gives the plain value.
#
# Rules for every metric:
#
# * Intervals are percentiles of the resampled values with linear interpolation.
# * With `groups` (patients), whole groups are drawn with all their items, and else single items.
# * A single item or group has no interval (NaN): its resamples are all the same.
# * A label with a single class has no value (NaN). Resamples without both classes are left out of
#   the label's interval; if fewer than half of the resamples remain, the interval is NaN.
# * A mean over labels is taken within each resample, always over the same labels: those defined in
#   all data. Resamples in which one of them is undefined are left out of the interval of the mean,
#   which would otherwise mix means over different labels. All labels share the resampled images, so
#   that the interval includes their dependence.
#
# Shape letters: N items, R resamples, L labels, U groups (units), K values of a statistic.

Statistic = Callable[[Array], Array]
"""Function from counts_NR to values_RK."""

# elements of counts_NR at a time (16 MB): memory is independent of the resamples
_CHUNK_ELEMENTS = 2_000_000


@dataclasses.dataclass(frozen=True, slots=True)
class Estimate:
    """Values of a statistic with their intervals."""

    value_K: Array
    low_K: Array
    high_K: Array


def bootstrap(
    statistic: Statistic,
    n: int,
    *,
    resamples: int = 1000,
    seed: int = 0,
    groups: Sequence[Hashable] | None = None,
    level: float = 0.95,
) -> Estimate:
    """Return a statistic of `n` items with percentile intervals.

    Args:
        statistic: function from counts_NR (float64) to values_RK.
        n: number of items.
        resamples: number of resamples; with 0 the intervals are NaN.
        seed: seed of the resampling.
        groups: group (patient) of each item, to resample groups instead of items; a single one has
            no interval (NaN).
        level: confidence level.

    Raises EvaluationError if `n`, `resamples`, `level` or the number of groups is out of range.
    """
    if n < 1 or resamples < 0 or not 0 < level < 1:
        message = (
            f"expected n >= 1, resamples >= 0 and 0 < level < 1, got {n}, {resamples} and {level}"
        )
        raise EvaluationError(
            message,
            "out_of_range",
            field="n" if n < 1 else "resamples" if resamples < 0 else "level",
        )
    value_K = statistic(np.ones((n, 1)))[0]
    if resamples == 0 or count_units(n, groups) < 2:
        empty_K = np.full_like(value_K, np.nan)
        return Estimate(value_K, empty_K, empty_K.copy())
    values_RK = np.concatenate(
        [statistic(counts_NR) for counts_NR in resample_counts(n, resamples, seed, groups)]
    )
    low_K, high_K = percentile_interval(values_RK, level)
    return Estimate(value_K, low_K, high_K)


def bootstrap_indices(n: int, resamples: int = 1000, seed: int = 0) -> NDArray[np.int64]:
    """Return indices_RN, the items drawn by each resample of `bootstrap` with the same seed."""
    return np.concatenate(list(_index_chunks(n, resamples, seed)))


def resample_counts(
    n: int, resamples: int, seed: int, groups: Sequence[Hashable] | None = None
) -> Iterator[Array]:
    """Yield counts_NR, how often each item is drawn, for chunks of resamples; the draws do not
    depend on the chunks.
    """
    group_of_N = None if groups is None else _group_numbers(groups, n)
    units = n if group_of_N is None else int(group_of_N.max()) + 1
    for indices_RU in _index_chunks(units, resamples, seed, widest=n):
        rows = len(indices_RU)
        flat = (indices_RU + np.arange(rows)[:, None] * units).ravel()
        counts_RU = np.bincount(flat, minlength=rows * units).reshape(rows, units)
        counts_UR = np.ascontiguousarray(counts_RU.T, dtype=np.float64)
        yield counts_UR if group_of_N is None else counts_UR[group_of_N]


def count_units(n: int, groups: Sequence[Hashable] | None) -> int:
    """Return the number of units of a resample: the groups, or without them the items."""
    return n if groups is None else int(_group_numbers(groups, n).max()) + 1


def _index_chunks(
    n: int, resamples: int, seed: int, widest: int = 0
) -> Iterator[NDArray[np.int64]]:
    rng = np.random.default_rng(seed)
    chunk = max(1, _CHUNK_ELEMENTS // max(n, widest))
    for start in range(0, resamples, chunk):
        yield rng.integers(0, n, size=(min(chunk, resamples - start), n))


def _group_numbers(groups: Sequence[Hashable], n: int) -> NDArray[np.int64]:
    if len(groups) != n:
        message = f"expected one group per item, got {len(groups)} for {n} items"
        raise EvaluationError(message, "mismatch", field="groups")
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(group, len(numbers)) for group in groups])


def percentile_interval(values_RK: Array, level: float = 0.95) -> tuple[Array, Array]:
    """Return (low_K, high_K) over the values that are not NaN; NaN if these are fewer than half."""
    tail = (1 - level) / 2
    low_K, high_K = np.full((2, values_RK.shape[1]), np.nan)
    for k, values_R in enumerate(values_RK.T):
        defined = values_R[~np.isnan(values_R)]
        if 2 * len(defined) >= len(values_R):
            low_K[k], high_K[k] = np.quantile(defined, (tail, 1 - tail))
    return low_K, high_K


def bootstrap_metric(
    function: Callable[..., ArrayLike],
    *arrays: ArrayLike,
    resamples: int = 1000,
    seed: int = 0,
    groups: Sequence[Hashable] | None = None,
) -> tuple[Array, Array, Array]:
    """Return (value_K, low_K, high_K) of any function of arrays with the same first axis; K = 1 for
    a scalar.

    The function is called once per resample on copies of the drawn rows, in their original order.
    Raises `EvaluationError` if the arrays have different lengths.
    """
    columns = [as_array(array) for array in arrays]
    lengths = {len(column) for column in columns}
    if len(lengths) != 1:
        raise EvaluationError(
            f"expected arrays of the same length, got {sorted(lengths)}", "mismatch", field="arrays"
        )
    n = lengths.pop()

    def statistic(counts_NR: Array) -> Array:
        draws = (np.repeat(np.arange(n), counts_N.astype(np.int64)) for counts_N in counts_NR.T)
        return np.array(
            [np.atleast_1d(function(*(column[drawn] for column in columns))) for drawn in draws],
            float,
        )

    estimate = bootstrap(statistic, n, resamples=resamples, seed=seed, groups=groups)
    return estimate.value_K, estimate.low_K, estimate.high_K


def bootstrap_auroc(
    scores_NL: ArrayLike,
    labels_NL: ArrayLike,
    resamples: int = 1000,
    seed: int = 0,
    groups: Sequence[Hashable] | None = None,
) -> tuple[Array, Array, Array]:
    """Return the area under the ROC curve per label with 95 % intervals: (auroc_L, low_L, high_L).

    Scores and labels are arrays or tensors. Labels are 1, 0 or NaN (left out); equal scores count
    one half. All labels share the same resamples of the N rows. See the rules of this module for
    labels with a single class. Raises `EvaluationError` on other label values or scores that are
    not finite.
    """
    columns = ranked_columns(scores_NL, labels_NL)
    return _bootstrap_columns(
        [column.auroc_R for column in columns], columns[0].n, resamples, seed, groups
    )


def bootstrap_average_precision(
    scores_NL: ArrayLike,
    labels_NL: ArrayLike,
    resamples: int = 1000,
    seed: int = 0,
    groups: Sequence[Hashable] | None = None,
) -> tuple[Array, Array, Array]:
    """Return the average precision per label with 95 % intervals, like `bootstrap_auroc`.

    Average precision is the sum over recall steps of the precision at the step, without
    interpolation; equal scores form one step.
    """
    columns = ranked_columns(scores_NL, labels_NL)
    return _bootstrap_columns(
        [column.average_precision_R for column in columns], columns[0].n, resamples, seed, groups
    )


def _bootstrap_columns(
    columns: Sequence[Statistic],
    n: int,
    resamples: int,
    seed: int,
    groups: Sequence[Hashable] | None,
) -> tuple[Array, Array, Array]:
    def statistic(counts_NR: Array) -> Array:
        return np.stack([column(counts_NR) for column in columns], axis=1)

    estimate = bootstrap(statistic, n, resamples=resamples, seed=seed, groups=groups)
    return estimate.value_K, estimate.low_K, estimate.high_K


def ranked_columns(scores_NL: ArrayLike, labels_NL: ArrayLike) -> list[RankedColumn]:
    """Return one sorted column per label, after checking shapes, scores and label values."""
    scores, labels = check_scores(scores_NL, labels_NL)
    return [
        RankedColumn(scores_N, labels_N)
        for scores_N, labels_N in zip(scores.T, labels.T, strict=True)
    ]


def mean_over_labels(values_RL: Array, fixed_L: NDArray[np.bool_]) -> Array:
    """Return values_R, the mean over a fixed set of labels; NaN in a resample in which one of them
    is undefined.

    Args:
        values_RL: values of all labels.
        fixed_L: whether a label is in the mean, such as from `defined_labels`.
    """
    if not fixed_L.any():
        return np.full(len(values_RL), np.nan)
    values_RF = np.ascontiguousarray(values_RL[:, fixed_L])
    return np.asarray(values_RF.sum(axis=1) / values_RF.shape[1])


def defined_labels(statistic: Statistic, n: int) -> NDArray[np.bool_]:
    """Return whether each value of a statistic of `n` items is defined on all data, each item
    once.
    """
    return np.asarray(~np.isnan(statistic(np.ones((n, 1)))[0]))


# ROC curves with bootstrap bands, and calibration curves.
#
# Shape letters: N items, R resamples, G grid points, Q bins.

_MAX_THRESHOLDS = 512
"""Maximum number of thresholds of the ROC band, whose cost grows with them; more are not visible
in a plot.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class RocCurve:
    """Corners of the ROC curve of one label, and the pointwise band of its true positive rate on
    a grid.
    """

    false_positive_rate: Array
    true_positive_rate: Array
    grid_G: Array
    low_G: Array
    high_G: Array


def roc_curve(
    scores_N: Array,
    labels_N: Array,
    *,
    resamples: int = 1000,
    seed: int = 0,
    groups: Sequence[Hashable] | None = None,
    grid_points: int = 101,
) -> RocCurve | None:
    """Return the ROC curve with a 95 % band at fixed false positive rates; None if a class is
    absent.

    `labels_N` are 1, 0 or NaN (left out). The band uses the resamples of `bootstrap` with the same
    seed and groups; with more than 512 distinct scores it uses 512 quantiles of them, while the
    curve keeps every corner. It is NaN if fewer than half of the resamples have both classes, and
    for a single group.
    """
    known = ~np.isnan(labels_N)
    if len(np.unique(labels_N[known])) < 2:
        return None
    order = np.flatnonzero(known)[np.argsort(-scores_N[known], kind="stable")]
    positive_NR = (labels_N[order] == 1).astype(np.float64)[:, None]
    ends = np.flatnonzero(np.append(np.diff(scores_N[order]) != 0, True))
    false_1, true_1 = _rates(positive_NR, 1 - positive_NR, ends)
    grid_G = np.linspace(0, 1, grid_points)
    unknown_G = np.full(grid_points, np.nan)
    if resamples == 0 or count_units(len(scores_N), groups) < 2:
        return RocCurve(false_1[:, 0], true_1[:, 0], grid_G, unknown_G, unknown_G)
    if len(ends) > _MAX_THRESHOLDS:
        ends = ends[np.linspace(0, len(ends) - 1, _MAX_THRESHOLDS).astype(np.int64)]
    heights_RG = []
    for counts_NR in resample_counts(len(scores_N), resamples, seed, groups):
        drawn_NR = counts_NR[order]
        false_TR, true_TR = _rates(drawn_NR * positive_NR, drawn_NR * (1 - positive_NR), ends)
        both_R = ~np.isnan(false_TR[-1] + true_TR[-1])
        heights_RG += [
            np.interp(grid_G, false_T, true_T) if both else unknown_G
            for false_T, true_T, both in zip(false_TR.T, true_TR.T, both_R, strict=True)
        ]
    low_G, high_G = percentile_interval(np.array(heights_RG))
    return RocCurve(false_1[:, 0], true_1[:, 0], grid_G, low_G, high_G)


def _rates(positive_NR: Array, negative_NR: Array, ends: NDArray[np.int64]) -> tuple[Array, Array]:
    """Return false and true positive rates, from (0, 0) to (1, 1), at the ends of runs of equal
    scores.
    """

    def rate(weights_NR: Array) -> Array:
        sums_NR = np.cumsum(weights_NR, axis=0)
        total_R = np.where(sums_NR[-1] > 0, sums_NR[-1], np.nan)
        return np.concatenate([np.zeros((1, weights_NR.shape[1])), sums_NR[ends] / total_R])

    return rate(negative_NR), rate(positive_NR)


@dataclasses.dataclass(frozen=True, slots=True)
class CalibrationBins:
    """Mean probability and fraction of positives (with Wilson intervals) in bins of about equal
    size.
    """

    probability_Q: Array
    observed_Q: Array
    count_Q: Array
    low_Q: Array
    high_Q: Array


def calibration_bins(probability_N: Array, labels_N: Array, bins: int = 10) -> CalibrationBins:
    """Return the calibration curve; NaN labels are left out. Equal probabilities share a bin, so
    bins may be fewer.
    """
    known = ~np.isnan(labels_N)
    probability = probability_N[known]
    positive = labels_N[known]
    inner_edges = np.unique(np.quantile(probability, np.linspace(0, 1, bins + 1)[1:-1]))
    bin_of_N = np.searchsorted(inner_edges, probability, side="right")
    count = np.bincount(bin_of_N).astype(np.float64)
    filled = count > 0
    mean = np.bincount(bin_of_N, probability)[filled] / count[filled]
    share = np.bincount(bin_of_N, positive)[filled] / count[filled]
    low, high = wilson_interval(share, count[filled])
    return CalibrationBins(mean, share, count[filled], low, high)


def wilson_interval(share: Array, count: Array, z: float = 1.959964) -> tuple[Array, Array]:
    """Return (low, high) of Wilson's score interval for fractions of counts, 95 % by default."""
    center = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z / (1 + z**2 / count) * np.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    return np.maximum(center - half, 0), np.minimum(center + half, 1)
