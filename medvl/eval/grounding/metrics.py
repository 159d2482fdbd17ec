"""One map against the boxes of one phrase: contrast to noise, the pointing game, overlap at thresholds.

A map is NaN where the model was not shown the image. What becomes of these pixels is a named rule:

* "background": they hold the lowest value of the map, so that a finding which was cut off counts as not found;
* "drop": they are left out of everything; a phrase whose boxes were cut off whole has no values.

H, W pixels of the image.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from medvl.data.transforms.image import Box
from medvl.errors import EvaluationError

Unseen = Literal["background", "drop"]
Scale = Literal["unit", "signed", "none"]

_TIED = 1e-6
"""Of the range of a map: pixels that close to its maximum are the maximum, however a sum was rounded."""

_LEAST_NOISE = 1e-6
"""Of the difference: a map of two values has a contrast, and not an infinite one."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MapRules:
    """How a map is judged."""

    unseen: Unseen = "background"
    scale: Scale = "unit"
    """What thresholds are shares of: "unit" brings each map to 0..1, "signed" to -1..1 (as MaCo's code does), "none"
    leaves it as it is (cosines)."""
    thresholds: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4, 0.5)
    """Of the mean overlap: those of BioViL."""

    def __post_init__(self) -> None:
        for name, value, known in (("unseen", self.unseen, Unseen), ("scale", self.scale, Scale)):
            if value not in get_args(known):
                raise EvaluationError(f"{name} is {value!r}: choose one of {', '.join(get_args(known))}")
        if not self.thresholds or len(set(self.thresholds)) != len(self.thresholds):
            raise EvaluationError(f"thresholds are {list(self.thresholds)}: give one or more, each once")

    @property
    def metrics(self) -> tuple[str, ...]:
        """What `judge_map` gives, in order."""
        return ("cnr", "signed_cnr", "pointing_game", "miou", *(f"iou@{threshold:g}" for threshold in self.thresholds))


def judge_map(map_HW: NDArray[np.floating], inside_HW: NDArray[np.bool_], rules: MapRules) -> Mapping[str, float]:
    """`rules.metrics` of one map, by name; NaN where one is not defined.

    * "cnr": |m_in - m_out| / sqrt(v_in + v_out), with means and variances inside and outside of the boxes. It is the
      published one, and praises a map that spares the finding; "signed_cnr" does not. An even map has 0.
    * "pointing_game": 1 where the maximum lies inside; equal maxima count by the share of them that do, so that an even
      map has what a blind guess has.
    * "iou@t": overlap of the boxes with the pixels at t or above, once scaled; "miou" is their mean over thresholds. An
      even map, which points nowhere, has none.

    Raises `EvaluationError` when there is no pixel inside, or the map has no number at all.
    """
    seen_HW = np.isfinite(map_HW)
    if map_HW.shape != inside_HW.shape or not inside_HW.any() or not seen_HW.any():
        raise EvaluationError("a map needs numbers, and boxes with pixels, of one size")
    if rules.unseen == "drop":
        value_P, inside_P = map_HW[seen_HW].astype(np.float64), inside_HW[seen_HW]
    else:
        value_P = np.where(seen_HW, map_HW, map_HW[seen_HW].min()).ravel().astype(np.float64)
        inside_P = inside_HW.ravel()
    if not inside_P.any():
        return dict.fromkeys(rules.metrics, float("nan"))
    signed = _contrast(value_P, inside_P)
    overlaps = [_overlap(scaled_P, inside_P) for scaled_P in _above(value_P, rules)]
    numbers = (abs(signed), signed, _pointing(value_P, inside_P), float(np.mean(overlaps)), *overlaps)
    return dict(zip(rules.metrics, numbers, strict=True))


def inside(boxes: Sequence[Box], height: int, width: int) -> NDArray[np.bool_]:
    """(H, W): the pixels whose center lies in one of the boxes, which are in pixels of that image.

    A box that is too small for that has the pixel in which its own center lies.
    """
    inside_HW = np.zeros((height, width), np.bool_)
    for box in boxes:
        rows, columns = _span(box.top, box.height, height), _span(box.left, box.width, width)
        inside_HW[rows, columns] = True
    return inside_HW


def _span(start: float, length: float, pixels: int) -> slice:
    first, last = _first_center(start), _first_center(start + length)
    if last <= first:
        first = int(start + length / 2)
        last = first + 1
    first = min(max(first, 0), pixels - 1)
    return slice(first, max(min(last, pixels), first + 1))


def _first_center(place: float) -> int:
    """The first pixel whose center is at `place` or beyond."""
    return int(np.ceil(place - 0.5))


def _contrast(value_P: NDArray[np.float64], inside_P: NDArray[np.bool_]) -> float:
    if inside_P.all():
        return float("nan")  # the boxes fill the image: there is nothing to contrast with
    within, without = value_P[inside_P], value_P[~inside_P]
    difference = within.mean() - without.mean()
    noise = max(np.sqrt(within.var() + without.var()), _LEAST_NOISE * abs(difference))
    return float(difference / noise) if noise > 0 else 0.0


def _pointing(value_P: NDArray[np.float64], inside_P: NDArray[np.bool_]) -> float:
    highest = value_P.max()
    return float(inside_P[value_P >= highest - _TIED * (highest - value_P.min())].mean())


def _above(value_P: NDArray[np.float64], rules: MapRules) -> list[NDArray[np.bool_]]:
    """For each threshold, the pixels at or above it."""
    lowest, highest = value_P.min(), value_P.max()
    if rules.scale == "none":
        return [value_P >= threshold for threshold in rules.thresholds]
    if highest == lowest:
        return [np.zeros(len(value_P), np.bool_) for _ in rules.thresholds]
    scaled_P = (value_P - lowest) / (highest - lowest)
    if rules.scale == "signed":
        scaled_P = 2 * scaled_P - 1
    return [scaled_P >= threshold for threshold in rules.thresholds]


def _overlap(above_P: NDArray[np.bool_], inside_P: NDArray[np.bool_]) -> float:
    return float((above_P & inside_P).sum() / (above_P | inside_P).sum())
