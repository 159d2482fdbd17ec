"""Predicted masks against the masks of a data set: Dice and overlap, with a named rule for images without a mask.

Where neither the data set nor the prediction has a pixel, Dice is 0 / 0. What that counts is a rule with a name:

* "one_if_both_empty" (the default, and the SIIM challenge's): an empty mask that was left empty counts 1, one in which
  something was marked counts 0. All images are judged, so that marking normal ones costs;
* "skip_empty": images whose true mask is empty are left out, whatever was marked in them. Published figures that do
  not say are often of this kind; nothing that is marked in a normal image costs anything.

A prediction is a map of probabilities; a threshold makes a mask of it, and a mask that covers less than a least share
of the image counts as empty. Both are chosen on validation images.

Shape letters: N images, T thresholds, A least shares; H, W pixels of the image.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from medvl.errors import EvaluationError
from medvl.eval.core.metrics import Array

EmptyRule = Literal["one_if_both_empty", "skip_empty"]
THRESHOLDS = tuple(round(0.05 * step, 2) for step in range(1, 20))
LEAST_SHARES = (0.0, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02)
"""Of the image: 0.001 is 1,049 of the 1024 x 1024 pixels of SIIM."""


@dataclasses.dataclass(frozen=True, slots=True)
class Areas:
    """Pixels of the masks of N images at T thresholds."""

    shared_NT: Array
    marked_NT: Array
    true_N: Array
    pixels_N: Array
    """Of the whole image."""

    def cut(self, least_share: float) -> "Areas":
        """The same, but a mask that covers less than that share of its image is empty."""
        kept_NT = self.marked_NT >= least_share * self.pixels_N[:, None]
        return Areas(self.shared_NT * kept_NT, self.marked_NT * kept_NT, self.true_N, self.pixels_N)

    def at(self, place: int) -> "Areas":
        """Those at one threshold alone."""
        chosen = slice(place, place + 1)
        return Areas(self.shared_NT[:, chosen], self.marked_NT[:, chosen], self.true_N, self.pixels_N)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MaskThreshold:
    """What makes a mask of a map of probabilities."""

    threshold: float
    """Pixels at it or above are marked."""
    least_share: float
    """Of the image: what covers less is empty."""

    def __call__(self, map_HW: NDArray[np.floating]) -> NDArray[np.bool_]:
        """The mask; what is NaN, because the model was not shown it, is not marked."""
        mask_HW = np.nan_to_num(map_HW, nan=-1.0) >= self.threshold
        return mask_HW & (mask_HW.sum() >= self.least_share * mask_HW.size)


def areas_of(map_HW: NDArray[np.floating], truth_HW: NDArray[np.bool_], thresholds: Sequence[float]) -> Areas:
    """Of one image (N = 1). NaN pixels, which the model was not shown, are marked at no threshold.

    Raises `EvaluationError` when the two are of other sizes, or the map holds no number or an infinite one.
    """
    if map_HW.shape != truth_HW.shape:
        raise EvaluationError(f"a map of {map_HW.shape} pixels cannot be judged by a mask of {truth_HW.shape}")
    if np.isinf(map_HW).any() or np.isnan(map_HW).all():
        raise EvaluationError("the model's maps are not finite: look at its weights")
    reached_P = np.searchsorted(np.array(thresholds), np.nan_to_num(map_HW, nan=-1.0).ravel(), side="right")
    bins = len(thresholds) + 1
    # How many thresholds a pixel reaches, counted; from the top down, that many pixels reach each of them.
    marked_T, shared_T = (
        np.bincount(reached, minlength=bins)[::-1].cumsum()[::-1][1:].astype(np.float64)
        for reached in (reached_P, reached_P[truth_HW.ravel()])
    )
    true, pixels = float(truth_HW.sum()), float(truth_HW.size)
    return Areas(shared_T[None], marked_T[None], np.array([true]), np.array([pixels]))


def stack(parts: Sequence[Areas]) -> Areas:
    """Those of all images. Raises `EvaluationError` where there is none."""
    if not parts:
        raise EvaluationError("there is no image whose mask could be judged")
    fields = [[getattr(part, field.name) for part in parts] for field in dataclasses.fields(Areas)]
    return Areas(*(np.concatenate(arrays) for arrays in fields))


def dice(areas: Areas, empty: EmptyRule = "one_if_both_empty") -> Array:
    """(N, T): 2 |marked and true| / (|marked| + |true|); NaN where the rule leaves an image out."""
    return _ratio(2 * areas.shared_NT, areas.marked_NT + areas.true_N[:, None], areas, empty)


def overlap(areas: Areas, empty: EmptyRule = "one_if_both_empty") -> Array:
    """(N, T): |marked and true| / |marked or true|; NaN where the rule leaves an image out."""
    return _ratio(areas.shared_NT, areas.marked_NT + areas.true_N[:, None] - areas.shared_NT, areas, empty)


def _ratio(above_NT: Array, below_NT: Array, areas: Areas, empty: EmptyRule) -> Array:
    if empty not in get_args(EmptyRule):
        raise EvaluationError(f"the rule for empty masks is {empty!r}: choose one of {', '.join(get_args(EmptyRule))}")
    ratio_NT = np.where(below_NT > 0, above_NT / np.where(below_NT > 0, below_NT, 1), 1.0)
    if empty == "skip_empty":
        return np.where(areas.true_N[:, None] > 0, ratio_NT, np.nan)
    return ratio_NT


def left_empty(areas: Areas) -> Array:
    """(N, T): 1 where an image without a mask has no pixel marked, 0 where it has; NaN for images with a mask."""
    return np.where(areas.true_N[:, None] > 0, np.nan, areas.marked_NT == 0)


def choose_cut(areas: Areas, thresholds: Sequence[float], empty: EmptyRule) -> MaskThreshold:
    """The threshold and the least share with the best mean Dice; on validation images, and nowhere else.

    Of equally good ones the highest threshold and the smallest share. NaN twice where the rule leaves all images out.
    """
    values_AT = np.full((len(LEAST_SHARES), len(thresholds)), np.nan)
    for row, least in enumerate(LEAST_SHARES):
        dice_NT = dice(areas.cut(least), empty)
        judged_N = ~np.isnan(dice_NT[:, 0])
        if judged_N.any():
            values_AT[row] = dice_NT[judged_N].mean(axis=0)
    if np.isnan(values_AT).all():
        return MaskThreshold(threshold=float("nan"), least_share=float("nan"))
    row, back = divmod(int(values_AT[:, ::-1].argmax()), len(thresholds))
    return MaskThreshold(threshold=thresholds[len(thresholds) - 1 - back], least_share=LEAST_SHARES[row])
