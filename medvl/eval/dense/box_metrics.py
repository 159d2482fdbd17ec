"""Detected boxes against the boxes of a data set, over all images, those without any box included.

Detections of an image are taken by falling score. Each one is given the box that it overlaps most among those that are
still free, where that overlap reaches a threshold; else it is a false positive. Whether the image has a box at all
changes nothing in that: a detection on a normal image is a false positive like any other.

* Average precision: all detections of all images in one row by score, precision as the highest at this recall or any
  higher one, averaged over 101 recalls from 0 to 1 (COCO). Equal scores are one step, so the order of images is of no
  consequence.
* The RSNA challenge's precision of an image at a score threshold: hits / (hits + false positives + boxes missed),
  averaged over overlaps; 0 for an image without boxes that has a detection. An image that has neither is not judged, as
  the challenge has it.

Shape letters: N images, D detections of an image, G its boxes, T overlaps, R resamples, K detections of all images.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from medvl.errors import EvaluationError
from medvl.eval.core.metrics import Array

OVERLAPS: Mapping[str, tuple[float, ...]] = {
    "rsna": (0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75),
    "coco": (0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95),
}
"""Overlaps (intersection over union) that a detection must reach: of the RSNA challenge, and of COCO."""
ALL_OVERLAPS = tuple(sorted({overlap for overlaps in OVERLAPS.values() for overlap in overlaps}))
_RECALLS = np.linspace(0, 1, 101)
_ROUNDING = 1e-9
_BLOCK_ELEMENTS = 2_000_000


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """The detections of one label in one image, and the boxes of the data set there; all in pixels of that image."""

    boxes_D4: Array
    """Left, top, right and bottom edge."""
    scores_D: Array
    truth_G4: Array

    def __post_init__(self) -> None:
        if self.boxes_D4.shape != (len(self.scores_D), 4) or self.truth_G4.shape[1:] != (4,):
            raise EvaluationError("detections need four edges and a score each, and boxes four edges")
        if not (np.isfinite(self.boxes_D4).all() and np.isfinite(self.scores_D).all()):
            raise EvaluationError("a detection or its score is not finite: look at the model's weights")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Matched:
    """What became of every detection of one label, images padded to the most detections of any."""

    scores_ND: Array
    """By falling score; -inf where there is no detection."""
    hits_NDT: NDArray[np.bool_]
    """Whether the detection was given a box, for each overlap."""
    boxes_N: NDArray[np.int64]
    """Boxes of the data set in each image."""
    overlaps: tuple[float, ...]

    def of(self, protocol: str) -> list[int]:
        """Places of a protocol's overlaps among all. Raises `EvaluationError` where it is unknown."""
        if protocol not in OVERLAPS:
            raise EvaluationError(f"overlaps are {protocol!r}: choose one of {', '.join(OVERLAPS)}")
        return [self.overlaps.index(overlap) for overlap in OVERLAPS[protocol]]


def box_overlap(first_4: Array, second_4: Array) -> Array:
    """Intersection over union of boxes (..., 4) of left, top, right and bottom edges, with broadcasting; 0 if empty."""
    low, high = np.maximum(first_4[..., :2], second_4[..., :2]), np.minimum(first_4[..., 2:], second_4[..., 2:])
    shared = (high - low).clip(0).prod(axis=-1)
    areas = [(boxes[..., 2:] - boxes[..., :2]).clip(0).prod(axis=-1) for boxes in (first_4, second_4)]
    union = areas[0] + areas[1] - shared
    return np.where(union > 0, shared / np.where(union > 0, union, 1), 0.0)


def match_boxes(images: Sequence[Found], overlaps: Sequence[float] = ALL_OVERLAPS) -> Matched:
    """Give detections to boxes, image by image, for each overlap. Raises `EvaluationError` where there is no image."""
    if not images:
        raise EvaluationError("there is no image whose detections could be judged")
    most = max(len(image.scores_D) for image in images)
    widest = max(len(image.truth_G4) for image in images)
    scores_ND = np.full((len(images), most), -np.inf)
    boxes_ND4, truth_NG4 = np.zeros((len(images), most, 4)), np.zeros((len(images), widest, 4))
    for row, image in enumerate(images):
        order = np.argsort(-image.scores_D, kind="stable")
        scores_ND[row, : len(order)] = image.scores_D[order]
        boxes_ND4[row, : len(order)] = image.boxes_D4[order]
        truth_NG4[row, : len(image.truth_G4)] = image.truth_G4  # what is padded is empty and overlaps with nothing
    needed_T = np.array(overlaps) - _ROUNDING
    hits_NDT = np.zeros((len(images), most, len(needed_T)), np.bool_)
    free_NTG = np.ones((len(images), len(needed_T), widest), np.bool_)
    for place in range(most if widest else 0):  # all images at once: what was taken before decides what is free
        overlap_NTG = np.where(free_NTG, box_overlap(boxes_ND4[:, place, None], truth_NG4)[:, None], 0.0)
        best_NT = overlap_NTG.argmax(axis=2)[:, :, None]
        hit_NT1 = np.take_along_axis(overlap_NTG, best_NT, axis=2) >= needed_T[:, None]
        hits_NDT[:, place] = hit_NT1[:, :, 0]
        np.put_along_axis(free_NTG, best_NT, np.take_along_axis(free_NTG, best_NT, axis=2) & ~hit_NT1, axis=2)
    return Matched(
        scores_ND=scores_ND,
        hits_NDT=hits_NDT & np.isfinite(scores_ND)[:, :, None],
        boxes_N=np.array([len(image.truth_G4) for image in images]),
        overlaps=tuple(overlaps),
    )


class AveragePrecision:
    """Average precision of one label at every overlap, for many resamples of the images at once."""

    def __init__(self, matched: Matched) -> None:
        image_K, place_K = np.nonzero(np.isfinite(matched.scores_ND))
        scores_K = matched.scores_ND[image_K, place_K]
        order_K = np.argsort(-scores_K, kind="stable")
        self._image_K = image_K[order_K]
        self._hits_KT = matched.hits_NDT[image_K, place_K][order_K]
        scores_K = scores_K[order_K]
        self._step_K = np.searchsorted(-scores_K, -scores_K, side="right") - 1  # the last one of an equal score
        self._boxes_N = matched.boxes_N.astype(np.float64)

    def precision_RT(self, counts_NR: Array) -> Array:
        """(R, T), given how often resample r drew image n; NaN where there is no box."""
        block = max(1, _BLOCK_ELEMENTS // max(1, len(self._image_K)))
        parts = [self._block(counts_NR[:, start : start + block]) for start in range(0, counts_NR.shape[1], block)]
        return np.concatenate(parts)

    def _block(self, counts_NR: Array) -> Array:
        boxes_R = self._boxes_N @ counts_NR
        drawn_KR = counts_NR[self._image_K]
        before_KR = np.cumsum(drawn_KR, axis=0)
        columns = [self._at_overlap(hit_K, drawn_KR, before_KR, boxes_R) for hit_K in self._hits_KT.T]
        return np.where(boxes_R[:, None] > 0, np.stack(columns, axis=1), np.nan)

    def _at_overlap(self, hit_K: NDArray[np.bool_], drawn_KR: Array, before_KR: Array, boxes_R: Array) -> Array:
        """Precision is highest where a hit was just added, so that only hits (M of them) are looked at."""
        hit_M = np.flatnonzero(hit_K)
        if not len(hit_M):
            return np.zeros(len(boxes_R))
        found_MR = np.cumsum(drawn_KR[hit_M], axis=0)
        step_M = self._step_K[hit_M]
        found_MR = found_MR[np.searchsorted(hit_M, step_M, side="right") - 1]
        total_MR = before_KR[step_M]
        precision_MR = found_MR / np.where(total_MR > 0, total_MR, 1)
        best_MR = np.maximum.accumulate(precision_MR[::-1], axis=0)[::-1]
        return _over_recalls(found_MR, best_MR, boxes_R)


def _over_recalls(found_MR: Array, best_MR: Array, boxes_R: Array) -> Array:
    """The mean over 101 recalls of the precision at the first place that reaches each; 0 for one that is not reached.

    All resamples are looked up in one row, each behind the one before it.
    """
    hits, resamples = found_MR.shape
    apart = boxes_R.max() + found_MR.max() + 2
    shift_R = apart * np.arange(resamples)
    wanted_RQ = boxes_R[:, None] * _RECALLS - _ROUNDING * boxes_R.max()
    first_RQ = np.searchsorted((found_MR + shift_R).T.ravel(), (wanted_RQ + shift_R[:, None]).ravel(), side="left")
    first_RQ = first_RQ.reshape(wanted_RQ.shape) - hits * np.arange(resamples)[:, None]
    padded_MR = np.concatenate([best_MR, np.zeros((1, resamples))])
    taken_RQ = padded_MR[first_RQ.clip(0, hits), np.arange(resamples)[:, None]]
    return np.asarray(taken_RQ.mean(axis=1))


def challenge_scores(matched: Matched, threshold: float) -> Array:
    """(N,): the RSNA challenge's score of each image, its detections being those at the threshold or above.

    NaN where an image has neither box nor detection.
    """
    kept_ND = matched.scores_ND >= threshold
    hits_NT = (matched.hits_NDT[:, :, matched.of("rsna")] & kept_ND[:, :, None]).sum(axis=1)
    either_NT = kept_ND.sum(axis=1)[:, None] + matched.boxes_N[:, None] - hits_NT
    scores_NT = np.where(either_NT > 0, hits_NT / np.maximum(either_NT, 1), np.nan)
    return np.asarray(scores_NT.mean(axis=1))


def choose_score(matched: Matched, candidates: int = 200) -> float:
    """The score threshold with the best mean of `challenge_scores`; on validation images, and nowhere else.

    Candidates are scores that occur, spread evenly over their ranks; of equally good ones the highest is taken. NaN
    where there is no box or no detection. Raises `EvaluationError` on fewer than two candidates.
    """
    if candidates < 2:
        raise EvaluationError(f"a threshold is chosen among two candidates or more, got {candidates}")
    scores = np.unique(matched.scores_ND[np.isfinite(matched.scores_ND)])[::-1]
    if not len(scores) or not matched.boxes_N.any():
        return float("nan")
    tried = scores[np.unique(np.linspace(0, len(scores) - 1, min(candidates, len(scores))).round().astype(int))]
    means = [float(np.nanmean(challenge_scores(matched, threshold))) for threshold in tried.tolist()]
    return float(tried[int(np.argmax(means))])
