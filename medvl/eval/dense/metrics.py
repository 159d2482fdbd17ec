"""Metrics of predicted boxes and masks against annotated ones."""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from medvl.common.config_io import check_choice
from medvl.errors import EvaluationError
from medvl.eval.core.metric_rows import MetricGroup, MetricRow
from medvl.eval.core.metrics import Array

# Metrics of predicted boxes against annotated boxes, over all images including those without any
# box.
#
# Detections of an image are matched in order of decreasing score. Each is matched with the
# annotated box that it overlaps most, if the overlap (intersection over union) reaches a
# threshold; otherwise it is a false positive. A detection in an image without boxes is a false
# positive like any other.
#
# * Average precision: all detections of all images are ranked by score; precision is the maximum
#   at this or any higher
#   recall, averaged over recalls. The choices that differ between programs are a named
#   `APConvention`; in all of them a
#   recall or an overlap that is equal to its threshold, up to rounding, reaches it.
# * Precision of an image in the RSNA challenge, at a score threshold: hits / (hits + false
#   positives + missed boxes),
#   averaged over overlap thresholds; 0 for an image without boxes that has a detection. As in the
#   challenge, an image
#   with neither boxes nor detections is left out.
#
# Shape letters: N images, D detections of an image, G annotated boxes of an image, T overlap
# thresholds, R resamples, K detections of all images.

APConventionName = Literal["medvl", "coco", "voc2007", "voc2012"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class APConvention:
    """Choices of average precision that differ between programs."""

    edge_pixels: float = 0.0
    """Width of a box beyond right - left: 0 for edges between pixels; 1 in VOC's formula, for
    first and last pixels.
    """
    ties: Literal["one_step", "in_order"] = "one_step"
    """Equal scores are one step of the curve, so that the order of images has no effect; or one
    step each.
    """
    recalls: Literal[101, 11, "all"] = 101
    """Recalls from 0 to 1 that precision is averaged over; "all" is the area under the curve."""
    taken: Literal["next_best", "false_positive"] = "next_best"
    """A detection whose best box is matched already gets the best of the other boxes, or is a
    false positive.
    """
    equal_overlaps: Literal["first", "last"] = "first"
    """Box that a detection is matched with if it overlaps several equally."""
    most: int | None = None
    """Number of detections per image and label that count; None for all."""


AP_CONVENTIONS: Mapping[APConventionName, APConvention] = {
    "medvl": APConvention(),
    "coco": APConvention(ties="in_order", equal_overlaps="last", most=100),
    "voc2007": APConvention(edge_pixels=1.0, ties="in_order", recalls=11, taken="false_positive"),
    "voc2012": APConvention(
        edge_pixels=1.0, ties="in_order", recalls="all", taken="false_positive"
    ),
}
"""Conventions of pycocotools, and of the development kits of Pascal VOC 2007 and of 2010 to 2012.
Both VOC formulas count a last pixel; they are applied to edges as they are, as in code that passes
x + width.
"""


def ap_convention(name: APConventionName) -> APConvention:
    """Return a convention by name. Raises `EvaluationError` if it is unknown."""
    check_choice(name, AP_CONVENTIONS, "convention", error=EvaluationError)
    return AP_CONVENTIONS[name]


OVERLAPS: Mapping[str, tuple[float, ...]] = {
    "rsna": (0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75),
    "coco": (0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95),
}
"""Overlap thresholds of the RSNA challenge and of COCO."""
ALL_OVERLAPS = tuple(sorted({overlap for overlaps in OVERLAPS.values() for overlap in overlaps}))
_ROUNDING = 1e-9
_BLOCK_ELEMENTS = 2_000_000
_FAR = -1e9


@dataclasses.dataclass(frozen=True, slots=True)
class ImageDetections:
    """Detections of one label in one image, and its annotated boxes; all in pixels of that
    image.
    """

    boxes_D4: Array
    """Left, top, right and bottom edge."""
    scores_D: Array
    truth_G4: Array
    """Annotated boxes."""

    def __post_init__(self) -> None:
        if self.boxes_D4.shape != (len(self.scores_D), 4) or self.truth_G4.shape[1:] != (4,):
            raise EvaluationError(
                "expected detections (D, 4), scores (D,) and annotated boxes (G, 4), got "
                f"{self.boxes_D4.shape}, {self.scores_D.shape} and {self.truth_G4.shape}",
                "mismatch",
            )
        if not (np.isfinite(self.boxes_D4).all() and np.isfinite(self.scores_D).all()):
            raise EvaluationError(
                "a detection or its score is not finite: check the model's weights", "nonfinite"
            )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MatchedDetections:
    """Whether each detection of one label matches a box; images are padded to the largest number
    of detections.
    """

    scores_ND: Array
    """In decreasing order; -inf is padding."""
    hits_NDT: NDArray[np.bool_]
    """Whether the detection matches a box, for each overlap threshold."""
    boxes_N: NDArray[np.int64]
    """Number of annotated boxes in each image."""
    overlaps: tuple[float, ...]
    convention: APConvention = APConvention()

    def overlap_indices(self, protocol: str) -> list[int]:
        """Return the indices of a protocol's overlap thresholds. Raises `EvaluationError` if it
        is unknown.
        """
        if protocol not in OVERLAPS:
            raise EvaluationError(
                f"expected one of {', '.join(OVERLAPS)}, got {protocol!r}", "unknown_name"
            )
        return [self.overlaps.index(overlap) for overlap in OVERLAPS[protocol]]


def box_overlap(first_4: Array, second_4: Array, edge_pixels: float = 0.0) -> Array:
    """Return the IoU of boxes (..., 4) of left, top, right and bottom edges, with broadcasting; 0
    for empty boxes.

    `edge_pixels` is added to every width and height.
    """
    low = np.maximum(first_4[..., :2], second_4[..., :2])
    high = np.minimum(first_4[..., 2:], second_4[..., 2:])
    shared = (high - low + edge_pixels).clip(0).prod(axis=-1)
    areas = [
        (boxes[..., 2:] - boxes[..., :2] + edge_pixels).clip(0).prod(axis=-1)
        for boxes in (first_4, second_4)
    ]
    union = areas[0] + areas[1] - shared
    return np.where(union > 0, shared / np.where(union > 0, union, 1), 0.0)


def match_boxes(
    images: Sequence[ImageDetections],
    overlaps: Sequence[float] = ALL_OVERLAPS,
    convention: APConvention = APConvention(),
) -> MatchedDetections:
    """Match detections with boxes in each image, for each overlap. Raises `EvaluationError` if
    there is no image.
    """
    if not images:
        raise EvaluationError("expected images with detections, got none", "empty")
    most = min(max(len(image.scores_D) for image in images), convention.most or sys.maxsize)
    widest = max(len(image.truth_G4) for image in images)
    scores_ND = np.full((len(images), most), -np.inf)
    boxes_ND4 = np.zeros((len(images), most, 4))
    truth_NG4 = np.full((len(images), widest, 4), _FAR)
    for row, image in enumerate(images):
        order = np.argsort(-image.scores_D, kind="stable")[:most]
        scores_ND[row, : len(order)] = image.scores_D[order]
        boxes_ND4[row, : len(order)] = image.boxes_D4[order]
        truth_NG4[row, : len(image.truth_G4)] = image.truth_G4  # padding overlaps with nothing
    threshold_T = np.array(overlaps) - _ROUNDING
    hits_NDT = np.zeros((len(images), most, len(threshold_T)), np.bool_)
    free_NTG = np.ones((len(images), len(threshold_T), widest), np.bool_)
    # all images at once; sequential, because matched boxes are taken
    for rank in range(most if widest else 0):
        overlap_N1G = box_overlap(boxes_ND4[:, rank, None], truth_NG4, convention.edge_pixels)[
            :, None
        ]
        overlap_NTG = np.where(free_NTG | (convention.taken == "false_positive"), overlap_N1G, 0.0)
        if convention.equal_overlaps == "first":
            best_NT1 = overlap_NTG.argmax(axis=2)[:, :, None]
        else:
            best_NT1 = widest - 1 - overlap_NTG[:, :, ::-1].argmax(axis=2)[:, :, None]
        free_NT1 = np.take_along_axis(free_NTG, best_NT1, axis=2)
        hit_NT1 = (
            np.take_along_axis(overlap_NTG, best_NT1, axis=2) >= threshold_T[:, None]
        ) & free_NT1
        hits_NDT[:, rank] = hit_NT1[:, :, 0]
        np.put_along_axis(free_NTG, best_NT1, free_NT1 & ~hit_NT1, axis=2)
    return MatchedDetections(
        scores_ND=scores_ND,
        hits_NDT=hits_NDT & np.isfinite(scores_ND)[:, :, None],
        boxes_N=np.array([len(image.truth_G4) for image in images]),
        overlaps=tuple(overlaps),
        convention=convention,
    )


class AveragePrecision:
    """Average precision of one label at every overlap threshold, for many resamples of the
    images at once.
    """

    def __init__(self, matched: MatchedDetections) -> None:
        image_K, rank_K = np.nonzero(np.isfinite(matched.scores_ND))
        scores_K = matched.scores_ND[image_K, rank_K]
        order_K = np.argsort(-scores_K, kind="stable")
        self._image_K = image_K[order_K]
        self._hits_KT = matched.hits_NDT[image_K, rank_K][order_K]
        scores_K = scores_K[order_K]
        self._step_K = np.arange(len(scores_K))
        if matched.convention.ties == "one_step":
            # the last detection of equal score
            self._step_K = np.searchsorted(-scores_K, -scores_K, side="right") - 1
        self._recalls = matched.convention.recalls
        self._boxes_N = matched.boxes_N.astype(np.float64)

    def precision_RT(self, counts_NR: Array) -> Array:
        """Return average precision (R, T), NaN without any box; counts_NR[n, r] is how often r
        contains image n.
        """
        chunk = max(1, _BLOCK_ELEMENTS // max(1, len(self._image_K)))
        parts = [
            self._precision(counts_NR[:, start : start + chunk])
            for start in range(0, counts_NR.shape[1], chunk)
        ]
        return np.concatenate(parts)

    def _precision(self, counts_NR: Array) -> Array:
        boxes_R = self._boxes_N @ counts_NR
        drawn_KR = counts_NR[self._image_K]
        before_KR = np.cumsum(drawn_KR, axis=0)
        columns = [
            self._at_overlap(hit_K, drawn_KR, before_KR, boxes_R) for hit_K in self._hits_KT.T
        ]
        return np.where(boxes_R[:, None] > 0, np.stack(columns, axis=1), np.nan)

    def _at_overlap(
        self, hit_K: NDArray[np.bool_], drawn_KR: Array, before_KR: Array, boxes_R: Array
    ) -> Array:
        """Return average precision (R,); precision is maximal at a hit, so only hits (M of them)
        are needed.
        """
        hit_M = np.flatnonzero(hit_K)
        if not len(hit_M):
            return np.zeros(len(boxes_R))
        recalled_MR = np.cumsum(drawn_KR[hit_M], axis=0)
        step_M = self._step_K[hit_M]
        recalled_MR = recalled_MR[np.searchsorted(hit_M, step_M, side="right") - 1]
        total_MR = before_KR[step_M]
        precision_MR = recalled_MR / np.where(total_MR > 0, total_MR, 1)
        best_MR = np.maximum.accumulate(precision_MR[::-1], axis=0)[::-1]
        if self._recalls == "all":
            gained_MR = np.diff(recalled_MR, axis=0, prepend=0)
            return np.asarray((gained_MR * best_MR).sum(axis=0) / np.maximum(boxes_R, 1))
        return _mean_over_recalls(recalled_MR, best_MR, boxes_R, np.linspace(0, 1, self._recalls))


def _mean_over_recalls(
    recalled_MR: Array, best_MR: Array, boxes_R: Array, recall_Q: Array
) -> Array:
    """Return the mean over recalls of the precision at the first hit that reaches each; 0 for
    recalls not reached.

    All resamples are searched in one sorted array, each shifted behind the previous one.
    """
    hits, resamples = recalled_MR.shape
    spacing = boxes_R.max() + recalled_MR.max() + 2
    shift_R = spacing * np.arange(resamples)
    target_RQ = boxes_R[:, None] * recall_Q - _ROUNDING * boxes_R.max()
    first_RQ = np.searchsorted(
        (recalled_MR + shift_R).T.ravel(), (target_RQ + shift_R[:, None]).ravel(), side="left"
    )
    first_RQ = first_RQ.reshape(target_RQ.shape) - hits * np.arange(resamples)[:, None]
    padded_MR = np.concatenate([best_MR, np.zeros((1, resamples))])
    precision_RQ = padded_MR[first_RQ.clip(0, hits), np.arange(resamples)[:, None]]
    return np.asarray(precision_RQ.mean(axis=1))


def challenge_scores(matched: MatchedDetections, threshold: float) -> Array:
    """Return the RSNA challenge's score of each image (N,), from detections with a score of
    `threshold` or more.

    NaN for an image with neither boxes nor detections.
    """
    counted_ND = matched.scores_ND >= threshold
    hits_NT = (
        matched.hits_NDT[:, :, matched.overlap_indices("rsna")] & counted_ND[:, :, None]
    ).sum(axis=1)
    either_NT = counted_ND.sum(axis=1)[:, None] + matched.boxes_N[:, None] - hits_NT
    scores_NT = np.where(either_NT > 0, hits_NT / np.maximum(either_NT, 1), np.nan)
    return np.asarray(scores_NT.mean(axis=1))


def choose_score_threshold(matched: MatchedDetections, candidates: int = 200) -> float:
    """Return the score threshold with the best mean of `challenge_scores`, to be called on
    validation images only.

    Candidates are observed scores, spread evenly over their ranks; the highest of equally good ones
    is returned. NaN if there is no box or no detection.

    Raises EvaluationError if there are fewer than two candidates.
    """
    if candidates < 2:
        raise EvaluationError(
            f"expected two or more candidates, got {candidates}", "out_of_range", field="candidates"
        )
    scores = np.unique(matched.scores_ND[np.isfinite(matched.scores_ND)])[::-1]
    if not len(scores) or not matched.boxes_N.any():
        return float("nan")
    thresholds = scores[
        np.unique(np.linspace(0, len(scores) - 1, min(candidates, len(scores))).round().astype(int))
    ]
    means = [
        float(np.nanmean(challenge_scores(matched, threshold))) for threshold in thresholds.tolist()
    ]
    return float(thresholds[int(np.argmax(means))])


# Metrics of predicted masks against annotated masks: Dice and IoU, with a named rule for images
# without a mask.
#
# If both the annotated and the predicted mask are empty, Dice is 0 / 0. Its value is given by a
# rule:
#
# * "one_if_both_empty" (default; the SIIM challenge's rule): an empty mask predicted as empty
#   scores 1, otherwise 0. All
#   images are evaluated, so false positives in normal images lower the mean.
# * "skip_empty": images whose annotated mask is empty are left out. Published numbers without a
#   stated rule often use
#   this one, which ignores false positives in normal images.
# * "lvit": LViT's code in training. Dice is smoothed, (2 |both| + 1e-5) / (|prediction| + |truth|
#   + 1e-5), hence 1 if
#   both masks are empty; IoU is then 0 (scikit-learn's default). Its test script, from which its
#   numbers are, adds the
#   1e-5 below only, so that Dice is 0 as well; where all images have a mask, the two agree.
#
# Pooled Dice and IoU count the pixels of all images together; no rule is needed.
#
# A prediction is a probability map. A threshold turns it into a mask, and a mask that covers less
# than a minimum share of the image counts as empty. Both are chosen on validation images.
#
# Shape letters: N images, T thresholds, A minimum shares; H, W pixels of the image.

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
        large_NT = self.predicted_NT >= min_share * self.pixels_N[:, None]
        return MaskAreas(
            self.intersection_NT * large_NT,
            self.predicted_NT * large_NT,
            self.truth_N,
            self.pixels_N,
        )

    def at(self, index: int) -> "MaskAreas":
        """Return the areas at one threshold."""
        column = slice(index, index + 1)
        return MaskAreas(
            self.intersection_NT[:, column],
            self.predicted_NT[:, column],
            self.truth_N,
            self.pixels_N,
        )


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


def mask_areas(
    map_HW: NDArray[np.generic], truth_HW: NDArray[np.generic], thresholds: Sequence[float]
) -> MaskAreas:
    """Return the areas of one image (N = 1). NaN pixels (outside of the model's crop) are in no
    mask.

    The annotated mask is bool, or numbers of which all are 0 or 1; so is a map that is a mask
    already.

    Raises EvaluationError if the sizes differ, the map is all NaN or has infinite values
    ("nonfinite"), or the mask has other values ("out_of_range").
    """
    truth_HW = _as_mask(truth_HW)
    if map_HW.shape != truth_HW.shape:
        raise EvaluationError(
            f"expected a map of shape {truth_HW.shape}, got {map_HW.shape}", "mismatch"
        )
    if np.isinf(map_HW).any() or np.isnan(map_HW).all():
        raise EvaluationError("the model's maps are not finite: check its weights", "nonfinite")
    if not np.issubdtype(map_HW.dtype, np.floating):  # thresholds would be rounded to whole numbers
        map_HW = _as_mask(map_HW).astype(np.float64)
    # a float32 probability of 0.7 reaches 0.7, as in `MaskThreshold`
    threshold_T = np.array(thresholds, map_HW.dtype)
    reached_P = np.searchsorted(threshold_T, np.nan_to_num(map_HW, nan=-1.0).ravel(), side="right")
    bins = len(thresholds) + 1
    # Histogram of how many thresholds a pixel reaches; its reversed cumulative sum counts the
    # pixels per threshold.
    predicted_T, intersection_T = (
        np.bincount(reached, minlength=bins)[::-1].cumsum()[::-1][1:].astype(np.float64)
        for reached in (reached_P, reached_P[truth_HW.ravel()])
    )
    truth = float(truth_HW.sum())
    pixels = float(truth_HW.size)
    return MaskAreas(intersection_T[None], predicted_T[None], np.array([truth]), np.array([pixels]))


def _as_mask(values_HW: NDArray[np.generic]) -> NDArray[np.bool_]:
    """Return a mask as bool: as an index, numbers would select rows."""
    mask_HW = values_HW.astype(bool, copy=False)
    if not np.array_equal(mask_HW, values_HW):
        message = (
            "expected a mask of booleans, or of 0 and 1; got other values: compare with a "
            "threshold, as in mask > 0"
        )
        raise EvaluationError(message, "out_of_range", field="mask")
    return mask_HW


def pixel_auroc(map_HW: NDArray[np.floating], truth_HW: NDArray[np.generic]) -> float:
    """Return the AUROC of an image's pixels; equal values count one half.

    NaN pixels (outside of the model's crop) are below all others. NaN for an image without pixels
    of either kind. The mask is as for `mask_areas`.
    """
    truth_HW = _as_mask(truth_HW)
    positive = int(truth_HW.sum())
    pixels = truth_HW.size
    if positive in (0, pixels):
        return float("nan")
    value_HW = np.where(np.isnan(map_HW), -np.inf, map_HW)
    inside_P = np.sort(value_HW[truth_HW])
    outside_P = np.sort(value_HW[~truth_HW])
    below_P, through_P = (
        np.searchsorted(outside_P, inside_P, side=side) for side in ("left", "right")
    )
    return float((below_P.sum() + through_P.sum()) / 2 / (positive * (pixels - positive)))


def stack(parts: Sequence[MaskAreas]) -> MaskAreas:
    """Concatenate the areas of images. Raises `EvaluationError` if there is none."""
    if not parts:
        raise EvaluationError("expected images with masks, got none", "empty")
    fields = [
        [getattr(part, field.name) for part in parts] for field in dataclasses.fields(MaskAreas)
    ]
    return MaskAreas(*(np.concatenate(arrays) for arrays in fields))


def dice(areas: MaskAreas, empty: EmptyRule = "one_if_both_empty") -> Array:
    """Return Dice (N, T): 2 |prediction and truth| / (|prediction| + |truth|); NaN for images
    that the rule skips.
    """
    smoothing = _LVIT_SMOOTHING if empty == "lvit" else 0.0
    both_NT = areas.predicted_NT + areas.truth_N[:, None]
    return _ratio(2 * areas.intersection_NT + smoothing, both_NT + smoothing, areas, empty)


def iou(areas: MaskAreas, empty: EmptyRule = "one_if_both_empty") -> Array:
    """Return IoU (N, T): |prediction and truth| / |prediction or truth|; NaN for images that the
    rule skips.
    """
    union_NT = areas.predicted_NT + areas.truth_N[:, None] - areas.intersection_NT
    return _ratio(
        areas.intersection_NT, union_NT, areas, empty, both_empty=0.0 if empty == "lvit" else 1.0
    )


def pooled_metrics(areas: Mapping[str, MaskAreas]) -> list[MetricGroup]:
    """Return "dice_pooled" and "iou_pooled" of every label at the first threshold, over the
    pixels of all images.
    """
    both_NL = np.stack([one.intersection_NT[:, 0] for one in areas.values()], axis=1)
    sum_NL = np.stack([one.predicted_NT[:, 0] + one.truth_N for one in areas.values()], axis=1)

    def group(metric: str, above_NL: Array, below_NL: Array) -> MetricGroup:
        def statistic(counts_NR: Array) -> Array:
            below_RL = counts_NR.T @ below_NL
            return np.where(
                below_RL > 0, (counts_NR.T @ above_NL) / np.where(below_RL > 0, below_RL, 1), np.nan
            )

        return MetricGroup(
            [MetricRow(metric=metric, target=label, n=len(both_NL)) for label in areas], statistic
        )

    return [
        group("dice_pooled", 2 * both_NL, sum_NL),
        group("iou_pooled", both_NL, sum_NL - both_NL),
    ]


def _ratio(
    above_NT: Array, below_NT: Array, areas: MaskAreas, empty: EmptyRule, *, both_empty: float = 1.0
) -> Array:
    check_choice(empty, get_args(EmptyRule), "empty", error=EvaluationError)
    ratio_NT = np.where(below_NT > 0, above_NT / np.where(below_NT > 0, below_NT, 1), both_empty)
    if empty == "skip_empty":
        return np.where(areas.truth_N[:, None] > 0, ratio_NT, np.nan)
    return ratio_NT


def left_empty(areas: MaskAreas) -> Array:
    """Return (N, T): 1 if an image without a mask has an empty prediction, else 0; NaN for
    images with a mask.
    """
    return np.where(areas.truth_N[:, None] > 0, np.nan, areas.predicted_NT == 0)


def choose_mask_threshold(
    areas: MaskAreas, thresholds: Sequence[float], empty: EmptyRule
) -> MaskThreshold:
    """Return the threshold and minimum share with the best mean Dice, to be called on validation
    images only.

    Of equally good ones, the highest threshold and the smallest share. Both are NaN if the rule
    skips all images.
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
    return MaskThreshold(
        threshold=thresholds[len(thresholds) - 1 - back], min_share=MIN_SHARES[row]
    )
