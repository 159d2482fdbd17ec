"""Metrics of predicted masks against annotated masks: Dice and IoU, with a named rule for images without a mask.

If both the annotated and the predicted mask are empty, Dice is 0 / 0. Its value is given by a rule:

* "one_if_both_empty" (default; the SIIM challenge's rule): an empty mask predicted as empty scores 1, otherwise 0. All
  images are evaluated, so false positives in normal images lower the mean.
* "skip_empty": images whose annotated mask is empty are left out. Published numbers without a stated rule often use
  this one, which ignores false positives in normal images.
* "lvit": LViT's code in training. Dice is smoothed, (2 |both| + 1e-5) / (|prediction| + |truth| + 1e-5), hence 1 if
  both masks are empty; IoU is then 0 (scikit-learn's default). Its test script, from which its numbers are, adds the
  1e-5 below only, so that Dice is 0 as well; where all images have a mask, the two agree.

Pooled Dice and IoU count the pixels of all images together; no rule is needed.

A prediction is a probability map. A threshold turns it into a mask, and a mask that covers less than a minimum share of
the image counts as empty. Both are chosen on validation images.

Shape letters: N images, T thresholds, A minimum shares; H, W pixels of the image.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from medvl.common.checks import check_choice
from medvl.errors import EvaluationError
from medvl.eval.core.metric_rows import MetricGroup, MetricRow
from medvl.eval.core.metrics import Array

EmptyRule = Literal["one_if_both_empty", "skip_empty", "lvit"]
_LVIT_SMOOTHING = 1e-5
THRESHOLDS = tuple(round(0.05 * step, 2) for step in range(1, 20))
MIN_SHARES = (0.0, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02)
"""Shares of the image: 0.001 is 1,049 of the 1024 x 1024 pixels of SIIM."""


@dataclasses.dataclass(frozen=True, slots=True)
class MaskAreas:
    """Pixel counts of the masks of N images at T thresholds."""

    intersection_NT: Array
    predicted_NT: Array
    truth_N: Array
    pixels_N: Array
    """Pixels of the image."""

    def drop_small(self, min_share: float) -> "MaskAreas":
        """Return the areas with predicted masks below that share of the image set to empty."""
        kept_NT = self.predicted_NT >= min_share * self.pixels_N[:, None]
        return MaskAreas(self.intersection_NT * kept_NT, self.predicted_NT * kept_NT, self.truth_N, self.pixels_N)

    def at(self, index: int) -> "MaskAreas":
        """Return the areas at one threshold."""
        column = slice(index, index + 1)
        return MaskAreas(self.intersection_NT[:, column], self.predicted_NT[:, column], self.truth_N, self.pixels_N)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MaskThreshold:
    """Rule that turns a probability map into a mask."""

    threshold: float
    """Pixels at or above it belong to the mask."""
    min_share: float
    """Share of the image; a smaller mask is set to empty."""

    def __call__(self, map_HW: NDArray[np.floating]) -> NDArray[np.bool_]:
        """Return the mask; NaN pixels (outside of the model's crop) do not belong to it."""
        mask_HW = np.nan_to_num(map_HW, nan=-1.0) >= self.threshold
        return mask_HW & (mask_HW.sum() >= self.min_share * mask_HW.size)


def mask_areas(map_HW: NDArray[np.generic], truth_HW: NDArray[np.generic], thresholds: Sequence[float]) -> MaskAreas:
    """Return the areas of one image (N = 1). NaN pixels (outside of the model's crop) are in no mask.

    The annotated mask is bool, or numbers of which all are 0 or 1; so is a map that is a mask already.

    Raises EvaluationError if the sizes differ, the map is all NaN or has infinite values ("nonfinite"), or the mask has
    other values ("out_of_range").
    """
    truth_HW = _as_mask(truth_HW)
    if map_HW.shape != truth_HW.shape:
        raise EvaluationError(f"expected a map of shape {truth_HW.shape}, got {map_HW.shape}", "mismatch")
    if np.isinf(map_HW).any() or np.isnan(map_HW).all():
        raise EvaluationError("the model's maps are not finite: check its weights", "nonfinite")
    if not np.issubdtype(map_HW.dtype, np.floating):  # thresholds would be rounded to whole numbers
        map_HW = _as_mask(map_HW).astype(np.float64)
    threshold_T = np.array(thresholds, map_HW.dtype)  # a float32 probability of 0.7 reaches 0.7, as in `MaskThreshold`
    reached_P = np.searchsorted(threshold_T, np.nan_to_num(map_HW, nan=-1.0).ravel(), side="right")
    bins = len(thresholds) + 1
    # Histogram of how many thresholds a pixel reaches; its reversed cumulative sum counts the pixels per threshold.
    predicted_T, intersection_T = (
        np.bincount(reached, minlength=bins)[::-1].cumsum()[::-1][1:].astype(np.float64)
        for reached in (reached_P, reached_P[truth_HW.ravel()])
    )
    truth, pixels = float(truth_HW.sum()), float(truth_HW.size)
    return MaskAreas(intersection_T[None], predicted_T[None], np.array([truth]), np.array([pixels]))


def _as_mask(values_HW: NDArray[np.generic]) -> NDArray[np.bool_]:
    """Return a mask as bool: as an index, numbers would select rows."""
    mask_HW = values_HW.astype(bool, copy=False)
    if not np.array_equal(mask_HW, values_HW):
        message = (
            "expected a mask of booleans, or of 0 and 1; got other values: compare with a threshold, as in mask > 0"
        )
        raise EvaluationError(message, "out_of_range", field="mask")
    return mask_HW


def pixel_auroc(map_HW: NDArray[np.floating], truth_HW: NDArray[np.generic]) -> float:
    """Return the AUROC of an image's pixels; equal values count one half.

    NaN pixels (outside of the model's crop) are below all others. NaN for an image without pixels of either kind. The
    mask is as for `mask_areas`.
    """
    truth_HW = _as_mask(truth_HW)
    positive, pixels = int(truth_HW.sum()), truth_HW.size
    if positive in (0, pixels):
        return float("nan")
    value_HW = np.where(np.isnan(map_HW), -np.inf, map_HW)
    inside_P, outside_P = np.sort(value_HW[truth_HW]), np.sort(value_HW[~truth_HW])
    below_P, through_P = (np.searchsorted(outside_P, inside_P, side=side) for side in ("left", "right"))
    return float((below_P.sum() + through_P.sum()) / 2 / (positive * (pixels - positive)))


def stack(parts: Sequence[MaskAreas]) -> MaskAreas:
    """Concatenate the areas of images. Raises `EvaluationError` if there is none."""
    if not parts:
        raise EvaluationError("expected images with masks, got none", "empty")
    fields = [[getattr(part, field.name) for part in parts] for field in dataclasses.fields(MaskAreas)]
    return MaskAreas(*(np.concatenate(arrays) for arrays in fields))


def dice(areas: MaskAreas, empty: EmptyRule = "one_if_both_empty") -> Array:
    """Return Dice (N, T): 2 |prediction and truth| / (|prediction| + |truth|); NaN for images that the rule skips."""
    smoothing = _LVIT_SMOOTHING if empty == "lvit" else 0.0
    both_NT = areas.predicted_NT + areas.truth_N[:, None]
    return _ratio(2 * areas.intersection_NT + smoothing, both_NT + smoothing, areas, empty)


def iou(areas: MaskAreas, empty: EmptyRule = "one_if_both_empty") -> Array:
    """Return IoU (N, T): |prediction and truth| / |prediction or truth|; NaN for images that the rule skips."""
    union_NT = areas.predicted_NT + areas.truth_N[:, None] - areas.intersection_NT
    return _ratio(areas.intersection_NT, union_NT, areas, empty, both_empty=0.0 if empty == "lvit" else 1.0)


def pooled_metrics(areas: Mapping[str, MaskAreas]) -> list[MetricGroup]:
    """Return "dice_pooled" and "iou_pooled" of every label at the first threshold, over the pixels of all images."""
    both_NL = np.stack([one.intersection_NT[:, 0] for one in areas.values()], axis=1)
    sum_NL = np.stack([one.predicted_NT[:, 0] + one.truth_N for one in areas.values()], axis=1)

    def group(metric: str, above_NL: Array, below_NL: Array) -> MetricGroup:
        def statistic(counts_NR: Array) -> Array:
            below_RL = counts_NR.T @ below_NL
            return np.where(below_RL > 0, (counts_NR.T @ above_NL) / np.where(below_RL > 0, below_RL, 1), np.nan)

        return MetricGroup([MetricRow(metric=metric, target=label, n=len(both_NL)) for label in areas], statistic)

    return [group("dice_pooled", 2 * both_NL, sum_NL), group("iou_pooled", both_NL, sum_NL - both_NL)]


def _ratio(above_NT: Array, below_NT: Array, areas: MaskAreas, empty: EmptyRule, *, both_empty: float = 1.0) -> Array:
    check_choice(empty, get_args(EmptyRule), "empty", error=EvaluationError)
    ratio_NT = np.where(below_NT > 0, above_NT / np.where(below_NT > 0, below_NT, 1), both_empty)
    if empty == "skip_empty":
        return np.where(areas.truth_N[:, None] > 0, ratio_NT, np.nan)
    return ratio_NT


def left_empty(areas: MaskAreas) -> Array:
    """Return (N, T): 1 if an image without a mask has an empty prediction, else 0; NaN for images with a mask."""
    return np.where(areas.truth_N[:, None] > 0, np.nan, areas.predicted_NT == 0)


def choose_mask_threshold(areas: MaskAreas, thresholds: Sequence[float], empty: EmptyRule) -> MaskThreshold:
    """Return the threshold and minimum share with the best mean Dice, to be called on validation images only.

    Of equally good ones, the highest threshold and the smallest share. Both are NaN if the rule skips all images.
    """
    values_AT = np.full((len(MIN_SHARES), len(thresholds)), np.nan)
    for row, share in enumerate(MIN_SHARES):
        dice_NT = dice(areas.drop_small(share), empty)
        used_N = ~np.isnan(dice_NT[:, 0])
        if used_N.any():
            values_AT[row] = dice_NT[used_N].mean(axis=0)
    if np.isnan(values_AT).all():
        return MaskThreshold(threshold=float("nan"), min_share=float("nan"))
    row, back = divmod(int(values_AT[:, ::-1].argmax()), len(thresholds))
    return MaskThreshold(threshold=thresholds[len(thresholds) - 1 - back], min_share=MIN_SHARES[row])
