"""Metrics of one map against the boxes of one phrase: contrast-to-noise ratio, pointing game, IoU at thresholds.

A map is NaN outside of the model's crop. The treatment of these pixels is a named rule:

* "background": they get the lowest value of the map, so a finding outside of the crop counts as missed;
* "drop": they are left out of all metrics; a phrase whose boxes are entirely outside of the crop has no values.

H, W pixels of the image, P those that are compared.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from medvl.common.checks import check_choice
from medvl.data.transforms.image import Box
from medvl.errors import EvaluationError

Unseen = Literal["background", "drop"]
Scale = Literal["unit", "signed", "none"]

_TIE_TOLERANCE = 1e-6
"""Pixels within this share of the map's range below its maximum count as maximal, to be robust to rounding."""

_ROUNDING = 1e-6
"""A map whose range is at most this share of its largest absolute value is constant: interpolation rounds float32."""

_MIN_NOISE = 1e-6  # minimum noise as a share of the contrast, so that the CNR of a map with two values is finite


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MapRules:
    """Rules for comparing a map with boxes."""

    unseen: Unseen = "background"
    scale: Scale = "unit"
    """Scaling before thresholds: "unit" to 0..1, "signed" to -1..1 (MaCo's code), "none" keeps cosines unscaled."""
    thresholds: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4, 0.5)
    """Thresholds of the mean IoU. The default is BioViL's, which applies to unscaled cosines (`protocols`)."""

    def __post_init__(self) -> None:
        check_choice(self.unseen, get_args(Unseen), "unseen", error=EvaluationError)
        check_choice(self.scale, get_args(Scale), "scale", error=EvaluationError)
        if not self.thresholds or len(set(self.thresholds)) != len(self.thresholds):
            message = f"expected one or more distinct thresholds, got {list(self.thresholds)}"
            raise EvaluationError(message, "out_of_range", field="thresholds")

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the values of `map_metrics`, in order."""
        return ("cnr", "signed_cnr", "pointing_game", "miou", *(f"iou@{threshold:g}" for threshold in self.thresholds))


def map_metrics(map_HW: NDArray[np.floating], inside_HW: NDArray[np.bool_], rules: MapRules) -> Mapping[str, float]:
    """Return the values of `rules.metrics` for one map, by name; NaN where one is not defined.

    * "cnr": |m_in - m_out| / sqrt(v_in + v_out), with means and variances inside and outside of the boxes. This is the
      published definition, which is also high for a map that avoids the finding; "signed_cnr" is then negative. It is
      0 for a constant map.
    * "pointing_game": 1 if the maximum is inside the boxes. Ties count by the share of maximal pixels inside, so a
      constant map scores like a random guess.
    * "iou@t": IoU of the boxes and the pixels at or above t, after scaling; "miou" is their mean over thresholds. For a
      constant map it is 0 if maps are scaled; else all pixels or none are above a threshold.

    Raises EvaluationError if the sizes differ, no pixel is inside, or the map is all NaN.
    """
    seen_HW = np.isfinite(map_HW)
    if map_HW.shape != inside_HW.shape or not inside_HW.any() or not seen_HW.any():
        message = f"expected a map and a nonempty region of one size, got {map_HW.shape} and {inside_HW.shape}"
        raise EvaluationError(message, "mismatch")
    if rules.unseen == "drop":
        value_P, inside_P = map_HW[seen_HW].astype(np.float64), inside_HW[seen_HW]
    else:
        value_P = np.where(seen_HW, map_HW, map_HW[seen_HW].min()).ravel().astype(np.float64)
        inside_P = inside_HW.ravel()
    if not inside_P.any():
        return dict.fromkeys(rules.metrics, float("nan"))
    if is_constant(value_P):
        value_P[:] = value_P[0]
    signed = _contrast(value_P, inside_P)
    overlaps = [_overlap(scaled_P, inside_P) for scaled_P in _above(value_P, rules)]
    numbers = (abs(signed), signed, _pointing(value_P, inside_P), float(np.mean(overlaps)), *overlaps)
    return dict(zip(rules.metrics, numbers, strict=True))


def is_constant(value_P: NDArray[np.floating]) -> bool:
    """Return whether all values of a float32 map are equal, up to the rounding of its interpolation."""
    return bool(np.ptp(value_P) <= _ROUNDING * np.abs(value_P).max())


def region_mask(boxes: Sequence[Box], height: int, width: int) -> NDArray[np.bool_]:
    """Return (H, W): True for pixels whose center is inside one of the boxes, given in pixels of that image.

    A box that contains no pixel center gets the pixel at its own center.
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


def _first_center(coordinate: float) -> int:
    """Return the first pixel whose center is at or after a coordinate."""
    return int(np.ceil(coordinate - 0.5))


def _contrast(value_P: NDArray[np.float64], inside_P: NDArray[np.bool_]) -> float:
    if inside_P.all():
        return float("nan")  # the boxes cover the image: there is no outside
    if value_P.min() == value_P.max():
        return 0.0  # the two means differ by rounding
    within, without = value_P[inside_P], value_P[~inside_P]
    difference = within.mean() - without.mean()
    noise = max(np.sqrt(within.var() + without.var()), _MIN_NOISE * abs(difference))
    return float(difference / noise) if noise > 0 else 0.0


def _pointing(value_P: NDArray[np.float64], inside_P: NDArray[np.bool_]) -> float:
    highest = value_P.max()
    return float(inside_P[value_P >= highest - _TIE_TOLERANCE * (highest - value_P.min())].mean())


def _above(value_P: NDArray[np.float64], rules: MapRules) -> list[NDArray[np.bool_]]:
    """Return, for each threshold, which pixels are at or above it."""
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
