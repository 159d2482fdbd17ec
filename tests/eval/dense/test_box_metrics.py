"""Matching of detections and average precision against naive implementations of their
definitions.
"""

import functools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from helpers.errors import raises

from medvl.errors import EvaluationError
from medvl.eval.core.metrics import resample_counts
from medvl.eval.dense.detection import match_by_label, precision_group
from medvl.eval.dense.metrics import (
    ALL_OVERLAPS,
    AP_CONVENTIONS,
    OVERLAPS,
    AveragePrecision,
    ImageDetections,
    box_overlap,
    challenge_scores,
    choose_score_threshold,
    match_boxes,
)

NOTHING = np.zeros((0, 4))


def iou(a: Sequence[float], b: Sequence[float]) -> float:
    wide = min(a[2], b[2]) - max(a[0], b[0])
    high = min(a[3], b[3]) - max(a[1], b[1])
    shared = max(wide, 0) * max(high, 0)
    return shared / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - shared)


def hits(image: ImageDetections, threshold: float) -> list[tuple[float, bool]]:
    """Return (score, hit) of each detection of an image, in order of decreasing score."""
    free = [list(box) for box in image.truth_G4]
    out = []
    for index in np.argsort(-image.scores_D, kind="stable"):
        overlaps = [iou(image.boxes_D4[index], box) for box in free]
        best = max(range(len(free)), key=overlaps.__getitem__, default=-1)
        hit = best >= 0 and overlaps[best] >= threshold
        if hit:
            free.pop(best)
        out.append((float(image.scores_D[index]), hit))
    return out


def average_precision(images: Sequence[ImageDetections], threshold: float) -> float:
    """Return the average precision over all detections of all images, at 101 recalls; each score
    is one step.
    """
    pooled = [entry for image in images for entry in hits(image, threshold)]
    boxes = sum(len(image.truth_G4) for image in images)
    points = []
    for score in sorted({score for score, _ in pooled}, reverse=True):
        kept = [hit for other, hit in pooled if other >= score]
        points.append((sum(kept) / boxes, sum(kept) / len(kept)))
    levels = [
        max((p for r, p in points if r >= level / 100 - 1e-9), default=0.0) for level in range(101)
    ]
    return sum(levels) / 101


def random_images(rng: np.random.Generator, count: int, grid: int = 1000) -> list[ImageDetections]:
    """Return random boxes, with detections near some of them and elsewhere; a small `grid` gives
    tied scores.
    """

    def boxes(number: int) -> np.ndarray:
        corner = rng.random((number, 2)) * 80
        return np.concatenate([corner, corner + 5 + rng.random((number, 2)) * 30], axis=1)

    images = []
    for _ in range(count):
        truth = boxes(int(rng.integers(0, 4)) if rng.random() < 0.6 else 0)
        near = truth[rng.random(len(truth)) < 0.8] + rng.normal(size=4) * 2
        detected = np.concatenate([near, boxes(int(rng.integers(0, 4)))])
        scores = np.ceil(rng.random(len(detected)) * grid) / grid
        scores[: len(near)] = np.minimum(1, scores[: len(near)] + 0.2)
        images.append(ImageDetections(detected, scores, truth))
    return images


@pytest.fixture(params=[1000, 4], ids=["distinct scores", "tied scores"])
def images(request: pytest.FixtureRequest) -> list[ImageDetections]:
    return random_images(np.random.default_rng(0), 40, request.param)


def test_box_overlap_is_intersection_over_union() -> None:
    rng = np.random.default_rng(1)
    corner = rng.random((20, 2)) * 10
    boxes = np.concatenate([corner, corner + 1 + rng.random((20, 2)) * 10], axis=1)
    overlaps = box_overlap(boxes[:, None], boxes[None])
    expected = [[iou(a, b) for b in boxes] for a in boxes]
    np.testing.assert_allclose(overlaps, expected)
    assert box_overlap(np.zeros(4), np.zeros(4)) == 0


def test_hits_and_average_precision_match_the_naive_implementation(
    images: list[ImageDetections],
) -> None:
    matched = match_boxes(images)
    for index, threshold in enumerate(ALL_OVERLAPS):
        for row, image in enumerate(images):
            expected = hits(image, threshold)
            assert [bool(hit) for hit in matched.hits_NDT[row, : len(expected), index]] == [
                hit for _, hit in expected
            ]
    values_T = AveragePrecision(matched).precision_RT(np.ones((len(images), 1)))[0]
    np.testing.assert_allclose(
        values_T, [average_precision(images, threshold) for threshold in ALL_OVERLAPS], atol=1e-12
    )
    assert values_T[0] > values_T[-1]


def test_average_precision_of_a_resample_equals_repeated_images(
    images: list[ImageDetections],
) -> None:
    matched = match_boxes(images, (0.5, 0.75))
    counts_NR = np.concatenate(list(resample_counts(len(images), 6, seed=3)))
    values_RT = AveragePrecision(matched).precision_RT(counts_NR)
    for row, counts_N in enumerate(counts_NR.T.astype(int)):
        drawn = [image for image, count in zip(images, counts_N, strict=True) for _ in range(count)]
        np.testing.assert_allclose(
            values_RT[row], [average_precision(drawn, t) for t in (0.5, 0.75)], atol=1e-12
        )


def test_average_precision_does_not_depend_on_the_order_of_images() -> None:
    images = random_images(np.random.default_rng(5), 30, grid=3)
    ones = np.ones((30, 1))
    forward, backward = (
        AveragePrecision(match_boxes(ordered)).precision_RT(ones)
        for ordered in (images, images[::-1])
    )
    np.testing.assert_array_equal(forward, backward)


def ranked(
    images: Sequence[ImageDetections], most: int | None
) -> list[tuple[float, int, np.ndarray]]:
    """Return (score, image, box) of all detections by decreasing score; equal scores stay in
    order.
    """
    out = []
    for number, image in enumerate(images):
        order = np.argsort(-image.scores_D, kind="stable")[:most]
        out += [(float(image.scores_D[index]), number, image.boxes_D4[index]) for index in order]
    return sorted(out, key=lambda entry: -entry[0])


def coco_average_precision(images: Sequence[ImageDetections], threshold: float) -> float:
    """As pycocotools: the best free box, every detection a step, precision at 101 recalls."""
    taken: list[set[int]] = [set() for _ in images]
    boxes, found, points = sum(len(image.truth_G4) for image in images), 0, []
    for position, (_, number, box) in enumerate(ranked(images, 100)):
        best, best_overlap = -1, threshold
        for index, truth in enumerate(images[number].truth_G4):
            if index not in taken[number] and iou(box, truth) >= best_overlap:
                best, best_overlap = index, iou(box, truth)
        if best >= 0:
            taken[number].add(best)
            found += 1
        points.append((found / boxes, found / (position + 1)))
    levels = [
        max((p for r, p in points if r >= level / 100 - 1e-9), default=0.0) for level in range(101)
    ]
    return sum(levels) / 101


def voc_average_precision(
    images: Sequence[ImageDetections], threshold: float, *, points: bool
) -> float:
    """As VOC's kits: last pixels count, the best box of all, a second detection of it is false;
    11 points or area.
    """

    def overlap(a: np.ndarray, b: np.ndarray) -> float:
        wide, high = min(a[2], b[2]) - max(a[0], b[0]) + 1, min(a[3], b[3]) - max(a[1], b[1]) + 1
        areas = [(box[2] - box[0] + 1) * (box[3] - box[1] + 1) for box in (a, b)]
        return wide * high / (sum(areas) - wide * high) if wide > 0 and high > 0 else 0.0

    taken: set[tuple[int, int]] = set()
    boxes, found, recall, precision = sum(len(image.truth_G4) for image in images), 0, [0.0], [0.0]
    for position, (_, number, box) in enumerate(ranked(images, None)):
        overlaps = [overlap(box, truth) for truth in images[number].truth_G4]
        best = int(np.argmax(overlaps)) if overlaps else -1
        if overlaps and overlaps[best] >= threshold and (number, best) not in taken:
            taken.add((number, best))
            found += 1
        recall.append(found / boxes)
        precision.append(found / (position + 1))
    if points:
        reached = [
            [p for r, p in zip(recall, precision, strict=True) if r >= t / 10 - 1e-9]
            for t in range(11)
        ]
        return sum(max(values, default=0.0) for values in reached) / 11
    envelope = np.maximum.accumulate(np.array([*precision, 0.0])[::-1])[::-1]
    steps = np.diff([*recall, 1.0])
    return float((steps * envelope[1:]).sum())


@pytest.mark.parametrize("grid", [1000, 4], ids=["distinct scores", "tied scores"])
def test_named_conventions_match_the_programs_written_out(grid: int) -> None:
    images = random_images(np.random.default_rng(7), 60, grid)
    references = {
        "coco": coco_average_precision,
        "voc2007": functools.partial(voc_average_precision, points=True),
        "voc2012": functools.partial(voc_average_precision, points=False),
    }
    counts_NR = np.concatenate([np.ones((60, 1)), *resample_counts(60, 3, seed=1)], axis=1)
    drawn = [
        [i for i, n in zip(images, counts, strict=True) for _ in range(int(n))]
        for counts in counts_NR.T
    ]
    values = {}
    for name, convention in AP_CONVENTIONS.items():
        matched = match_boxes(images, (0.5, 0.75), convention)
        values[name] = AveragePrecision(matched).precision_RT(counts_NR)
        if name in references:
            expected_RT = [
                [references[name](resample, t) for t in (0.5, 0.75)] for resample in drawn
            ]
            np.testing.assert_allclose(values[name], expected_RT, atol=1e-9)
    different = {tuple(values[name][0].round(6)) for name in values}
    assert len(different) == 4


def test_coco_takes_the_last_of_equally_overlapped_boxes() -> None:
    """As in pycocotools: the first box stays free for the next detection, which overlaps no
    other.
    """
    truth = np.array([[0.0, 0, 10, 10], [10, 0, 20, 10]])
    image = ImageDetections(
        np.array([[5.0, 0, 15, 10], [0, 0, 10, 10]]), np.array([0.9, 0.8]), truth
    )
    assert coco_average_precision([image], 0.3) == 1
    hits = {
        name: match_boxes([image], (0.3,), convention).hits_NDT
        for name, convention in AP_CONVENTIONS.items()
    }
    assert hits["coco"][0, :, 0].tolist() == [True, True]
    assert hits["medvl"][0, :, 0].tolist() == hits["voc2012"][0, :, 0].tolist() == [True, False]


def test_coco_counts_a_hundred_detections_per_image() -> None:
    box, far = np.array([[0.0, 0, 9, 9]]), np.array([[50.0, 50, 59, 59]])
    many = ImageDetections(
        np.concatenate([np.repeat(far, 100, 0), box]), np.linspace(1, 0.1, 101), box
    )
    values = {
        name: match_boxes([many], (0.5,), convention) for name, convention in AP_CONVENTIONS.items()
    }
    assert AveragePrecision(values["coco"]).precision_RT(np.ones((1, 1))) == 0
    assert AveragePrecision(values["medvl"]).precision_RT(np.ones((1, 1))) == pytest.approx(1 / 101)


def test_detection_in_a_normal_image_is_a_false_positive() -> None:
    """Some published code leaves out normal images, and images without a detection together with
    their boxes.
    """
    box = np.array([[10.0, 10, 30, 30]])
    good, normal = (
        ImageDetections(box, np.array([0.8]), box),
        ImageDetections(box, np.array([0.9]), NOTHING),
    )
    missed = ImageDetections(NOTHING, np.zeros(0), box)
    one = np.ones((1, 1))
    assert AveragePrecision(match_boxes([good], (0.5,))).precision_RT(one) == 1
    with_normal = AveragePrecision(match_boxes([good, normal], (0.5,))).precision_RT(
        np.ones((2, 1))
    )
    assert with_normal == pytest.approx(0.5)
    with_missed = AveragePrecision(match_boxes([good, missed], (0.5,))).precision_RT(
        np.ones((2, 1))
    )
    assert with_missed == pytest.approx(51 / 101)  # recalls 0 to 0.5 of 101


def test_box_is_matched_once_and_by_the_best_overlap() -> None:
    truth = np.array([[0.0, 0, 10, 10], [0, 0, 10, 8]])
    twice = ImageDetections(
        np.array([[0.0, 0, 10, 8], [0, 0, 10, 8.1], [0, 0, 10, 8.2]]),
        np.array([0.9, 0.8, 0.7]),
        truth,
    )
    assert match_boxes([twice], (0.5,)).hits_NDT[0, :, 0].tolist() == [True, True, False]
    assert match_boxes([twice], (0.95,)).hits_NDT[0, :, 0].tolist() == [True, False, False]


def test_average_precision_is_nan_without_boxes_and_zero_without_detections() -> None:
    empty, box = ImageDetections(NOTHING, np.zeros(0), NOTHING), np.array([[0.0, 0, 5, 5]])
    assert np.isnan(AveragePrecision(match_boxes([empty])).precision_RT(np.ones((1, 1)))).all()
    assert (
        AveragePrecision(match_boxes([ImageDetections(NOTHING, np.zeros(0), box)])).precision_RT(
            np.ones((1, 1))
        )
        == 0
    ).all()
    false = ImageDetections(box, np.array([0.4]), NOTHING)
    assert np.isnan(AveragePrecision(match_boxes([false])).precision_RT(np.ones((1, 1)))).all()


def test_challenge_score_matches_the_naive_implementation(images: list[ImageDetections]) -> None:
    matched = match_boxes(images)
    for threshold in (0.0, 0.3, 0.6, 2.0):
        scores = challenge_scores(matched, threshold)
        for image, score in zip(images, scores, strict=True):
            kept = [
                [hit for value, hit in hits(image, overlap) if value >= threshold]
                for overlap in OVERLAPS["rsna"]
            ]
            if not len(image.truth_G4) and not kept[0]:
                assert math.isnan(score)
                continue
            parts = [
                sum(k) / (sum(k) + k.count(False) + len(image.truth_G4) - sum(k)) for k in kept
            ]
            assert score == pytest.approx(np.mean(parts))


def test_chosen_score_threshold_is_the_best() -> None:
    images = random_images(np.random.default_rng(2), 30)
    matched = match_boxes(images)
    chosen = choose_score_threshold(matched)
    candidates = np.unique(np.concatenate([image.scores_D for image in images]))
    best = max(np.nanmean(challenge_scores(matched, threshold)) for threshold in candidates)
    assert np.nanmean(challenge_scores(matched, chosen)) == pytest.approx(best)
    assert math.isnan(
        choose_score_threshold(match_boxes([ImageDetections(NOTHING, np.zeros(0), NOTHING)]))
    )
    with raises(EvaluationError, "out_of_range", "candidates"):
        choose_score_threshold(matched, candidates=1)


def test_labels_without_boxes_are_left_out_of_the_mean_of_average_precision() -> None:
    box_14, nothing = (
        np.array([[0.0, 0.0, 10.0, 10.0]]),
        ImageDetections(NOTHING, np.zeros(0), NOTHING),
    )
    found, false = (
        ImageDetections(box_14, np.ones(1), box_14),
        ImageDetections(box_14, np.ones(1), NOTHING),
    )
    missed = ImageDetections(NOTHING, np.zeros(0), box_14)
    images = [(found, nothing, false), (found, missed, nothing)]
    group = precision_group(match_by_label(images, ["Nodule", "Mass", "Fracture"]))
    counts_NR = np.array([[1.0, 2.0], [1.0, 0.0]])  # the second resample has no box of Mass
    values_KR = dict(
        zip([row.name for row in group.rows], group.statistic(counts_NR).T, strict=True)
    )
    for metric in ("ap_rsna", "ap_coco", "ap@0.5", "ap_rsna_boxed"):
        assert np.isnan(values_KR[f"{metric}/Fracture"]).all()
        of_all, without_mass = values_KR[f"{metric}/macro"].tolist()
        assert of_all == pytest.approx(0.5)
        assert np.isnan(without_mass)  # a mean over other labels than of all images


def test_invalid_detections_are_refused() -> None:
    with raises(EvaluationError, "mismatch"):
        ImageDetections(np.zeros((2, 4)), np.zeros(1), NOTHING)
    with raises(EvaluationError, "nonfinite"):
        ImageDetections(np.full((1, 4), np.nan), np.zeros(1), NOTHING)
    with raises(EvaluationError, "empty"):
        match_boxes([])
    matched = match_boxes([ImageDetections(NOTHING, np.zeros(0), NOTHING)])
    with raises(EvaluationError, "unknown_name", names="rsna, coco"):
        matched.overlap_indices("voc")
    assert matched.overlap_indices("coco") == [
        ALL_OVERLAPS.index(overlap) for overlap in OVERLAPS["coco"]
    ]
