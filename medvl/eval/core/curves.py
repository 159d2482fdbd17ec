"""ROC curves with bootstrap bands, and calibration curves.

Shape letters: N items, R resamples, G grid points, Q bins.
"""

import dataclasses
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from medvl.eval.core.bootstrap import count_units, percentile_interval, resample_counts
from medvl.eval.core.metrics import Array

_MAX_THRESHOLDS = 512
"""Maximum number of thresholds of the ROC band, whose cost grows with them; more are not visible in a plot."""


@dataclasses.dataclass(frozen=True, slots=True)
class RocCurve:
    """Corners of the ROC curve of one label, and the pointwise band of its true positive rate on a grid."""

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
    """Return the ROC curve with a 95 % band at fixed false positive rates; None if a class is absent.

    `labels_N` are 1, 0 or NaN (left out). The band uses the resamples of `bootstrap` with the same seed and groups;
    with more than 512 distinct scores it uses 512 quantiles of them, while the curve keeps every corner. It is NaN if
    fewer than half of the resamples have both classes, and for a single group.
    """
    known = ~np.isnan(labels_N)
    if len(np.unique(labels_N[known])) < 2:
        return None
    order = np.flatnonzero(known)[np.argsort(-scores_N[known], kind="stable")]
    positive_NR = (labels_N[order] == 1).astype(np.float64)[:, None]
    ends = np.flatnonzero(np.append(np.diff(scores_N[order]) != 0, True))
    false_1, true_1 = _rates(positive_NR, 1 - positive_NR, ends)
    grid_G, unknown_G = np.linspace(0, 1, grid_points), np.full(grid_points, np.nan)
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
    """Return false and true positive rates, from (0, 0) to (1, 1), at the ends of runs of equal scores."""

    def rate(weights_NR: Array) -> Array:
        sums_NR = np.cumsum(weights_NR, axis=0)
        total_R = np.where(sums_NR[-1] > 0, sums_NR[-1], np.nan)
        return np.concatenate([np.zeros((1, weights_NR.shape[1])), sums_NR[ends] / total_R])

    return rate(negative_NR), rate(positive_NR)


@dataclasses.dataclass(frozen=True, slots=True)
class CalibrationBins:
    """Mean probability and fraction of positives (with Wilson intervals) in bins of about equal size."""

    probability_Q: Array
    observed_Q: Array
    count_Q: Array
    low_Q: Array
    high_Q: Array


def calibration_bins(probability_N: Array, labels_N: Array, bins: int = 10) -> CalibrationBins:
    """Return the calibration curve; NaN labels are left out. Equal probabilities share a bin, so bins may be fewer."""
    known = ~np.isnan(labels_N)
    probability, positive = probability_N[known], labels_N[known]
    inner_edges = np.unique(np.quantile(probability, np.linspace(0, 1, bins + 1)[1:-1]))
    bin_of_N = np.searchsorted(inner_edges, probability, side="right")
    count = np.bincount(bin_of_N).astype(np.float64)
    kept = count > 0
    mean = np.bincount(bin_of_N, probability)[kept] / count[kept]
    share = np.bincount(bin_of_N, positive)[kept] / count[kept]
    low, high = wilson_interval(share, count[kept])
    return CalibrationBins(mean, share, count[kept], low, high)


def wilson_interval(share: Array, count: Array, z: float = 1.959964) -> tuple[Array, Array]:
    """Return (low, high) of Wilson's score interval for fractions of counts, 95 % by default."""
    center = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z / (1 + z**2 / count) * np.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    return np.maximum(center - half, 0), np.minimum(center + half, 1)
