"""Detections against boxes: matching and average precision against their definitions written out, over all images."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import pytest

from medvl.errors import EvaluationError
from medvl.eval.core.bootstrap import resample_counts
from medvl.eval.dense.box_metrics import (
    ALL_OVERLAPS,
    OVERLAPS,
    AveragePrecision,
    Found,
    box_overlap,
    challenge_scores,
    choose_score,
    match_boxes,
)

NOTHING = np.zeros((0, 4))


def iou(a: Sequence[float], b: Sequence[float]) -> float:
    wide = min(a[2], b[2]) - max(a[0], b[0])
    high = min(a[3], b[3]) - max(a[1], b[1])
    shared = max(wide, 0) * max(high, 0)
    return shared / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - shared)


def hits(image: Found, needed: float) -> list[tuple[float, bool]]:
    """(score, hit) of each detection of an image, by falling score."""
    free = [list(box) for box in image.truth_G4]
    out = []
    for index in np.argsort(-image.scores_D, kind="stable"):
        overlaps = [iou(image.boxes_D4[index], box) for box in free]
        best = max(range(len(free)), key=overlaps.__getitem__, default=-1)
        hit = best >= 0 and overlaps[best] >= needed
        if hit:
            free.pop(best)
        out.append((float(image.scores_D[index]), hit))
    return out


def average_precision(images: Sequence[Found], needed: float) -> float:
    """Over all detections of all images, at 101 recalls, each score being one step."""
    pooled = [entry for image in images for entry in hits(image, needed)]
    boxes = sum(len(image.truth_G4) for image in images)
    points = []
    for score in sorted({score for score, _ in pooled}, reverse=True):
        kept = [hit for other, hit in pooled if other >= score]
        points.append((sum(kept) / boxes, sum(kept) / len(kept)))
    levels = [max((p for r, p in points if r >= level / 100 - 1e-9), default=0.0) for level in range(101)]
    return sum(levels) / 101


def random_images(rng: np.random.Generator, count: int, grid: int = 1000) -> list[Found]:
    """Boxes, detections near some of them and others anywhere; scores in few steps where `grid` is small."""

    def boxes(number: int) -> np.ndarray:
        corner = rng.random((number, 2)) * 80
        return np.concatenate([corner, corner + 5 + rng.random((number, 2)) * 30], axis=1)

    images = []
    for _ in range(count):
        truth = boxes(int(rng.integers(0, 4)) if rng.random() < 0.6 else 0)
        near = truth[rng.random(len(truth)) < 0.8] + rng.normal(size=4) * 2
        found = np.concatenate([near, boxes(int(rng.integers(0, 4)))])
        scores = np.ceil(rng.random(len(found)) * grid) / grid
        scores[: len(near)] = np.minimum(1, scores[: len(near)] + 0.2)
        images.append(Found(found, scores, truth))
    return images


@pytest.fixture(params=[1000, 4], ids=["scores apart", "scores tied"])
def images(request: pytest.FixtureRequest) -> list[Found]:
    return random_images(np.random.default_rng(0), 40, request.param)


def test_overlaps_are_intersection_over_union() -> None:
    rng = np.random.default_rng(1)
    corner = rng.random((20, 2)) * 10
    boxes = np.concatenate([corner, corner + 1 + rng.random((20, 2)) * 10], axis=1)
    found = box_overlap(boxes[:, None], boxes[None])
    expected = [[iou(a, b) for b in boxes] for a in boxes]
    np.testing.assert_allclose(found, expected)
    assert box_overlap(np.zeros(4), np.zeros(4)) == 0


def test_hits_and_average_precision_are_those_of_their_definition(images: list[Found]) -> None:
    matched = match_boxes(images)
    for number, needed in enumerate(ALL_OVERLAPS):
        for row, image in enumerate(images):
            expected = hits(image, needed)
            assert [bool(hit) for hit in matched.hits_NDT[row, : len(expected), number]] == [hit for _, hit in expected]
    values_T = AveragePrecision(matched).precision_RT(np.ones((len(images), 1)))[0]
    np.testing.assert_allclose(values_T, [average_precision(images, needed) for needed in ALL_OVERLAPS], atol=1e-12)
    assert values_T[0] > values_T[-1]


def test_resamples_are_images_repeated(images: list[Found]) -> None:
    matched = match_boxes(images, (0.5, 0.75))
    counts_NR = np.concatenate(list(resample_counts(len(images), 6, seed=3)))
    found_RT = AveragePrecision(matched).precision_RT(counts_NR)
    for row, counts_N in enumerate(counts_NR.T.astype(int)):
        drawn = [image for image, count in zip(images, counts_N, strict=True) for _ in range(count)]
        np.testing.assert_allclose(found_RT[row], [average_precision(drawn, t) for t in (0.5, 0.75)], atol=1e-12)


def test_the_order_of_images_is_of_no_consequence() -> None:
    images = random_images(np.random.default_rng(5), 30, grid=3)
    ones = np.ones((30, 1))
    forth, back = (AveragePrecision(match_boxes(listed)).precision_RT(ones) for listed in (images, images[::-1]))
    np.testing.assert_array_equal(forth, back)


def test_what_is_drawn_on_a_normal_image_counts() -> None:
    """A peer's code leaves images without boxes out, and images without a detection together with their boxes."""
    box = np.array([[10.0, 10, 30, 30]])
    good, normal = Found(box, np.array([0.8]), box), Found(box, np.array([0.9]), NOTHING)
    missed = Found(NOTHING, np.zeros(0), box)
    one = np.ones((1, 1))
    assert AveragePrecision(match_boxes([good], (0.5,))).precision_RT(one) == 1
    with_normal = AveragePrecision(match_boxes([good, normal], (0.5,))).precision_RT(np.ones((2, 1)))
    assert with_normal == pytest.approx(0.5)
    with_missed = AveragePrecision(match_boxes([good, missed], (0.5,))).precision_RT(np.ones((2, 1)))
    assert with_missed == pytest.approx(51 / 101)  # recalls 0 to 0.5 of 101


def test_a_box_is_found_once_and_by_the_best_overlap() -> None:
    truth = np.array([[0.0, 0, 10, 10], [0, 0, 10, 8]])
    twice = Found(np.array([[0.0, 0, 10, 8], [0, 0, 10, 8.1], [0, 0, 10, 8.2]]), np.array([0.9, 0.8, 0.7]), truth)
    assert match_boxes([twice], (0.5,)).hits_NDT[0, :, 0].tolist() == [True, True, False]
    assert match_boxes([twice], (0.95,)).hits_NDT[0, :, 0].tolist() == [True, False, False]


def test_without_a_box_there_is_no_precision_and_without_a_detection_it_is_nothing() -> None:
    empty, box = Found(NOTHING, np.zeros(0), NOTHING), np.array([[0.0, 0, 5, 5]])
    assert np.isnan(AveragePrecision(match_boxes([empty])).precision_RT(np.ones((1, 1)))).all()
    assert (AveragePrecision(match_boxes([Found(NOTHING, np.zeros(0), box)])).precision_RT(np.ones((1, 1))) == 0).all()
    false = Found(box, np.array([0.4]), NOTHING)
    assert np.isnan(AveragePrecision(match_boxes([false])).precision_RT(np.ones((1, 1)))).all()


def test_the_challenge_score_is_that_of_its_rules(images: list[Found]) -> None:
    matched = match_boxes(images)
    for threshold in (0.0, 0.3, 0.6, 2.0):
        found = challenge_scores(matched, threshold)
        for image, score in zip(images, found, strict=True):
            kept = [[hit for value, hit in hits(image, needed) if value >= threshold] for needed in OVERLAPS["rsna"]]
            if not len(image.truth_G4) and not kept[0]:
                assert math.isnan(score)
                continue
            parts = [sum(k) / (sum(k) + k.count(False) + len(image.truth_G4) - sum(k)) for k in kept]
            assert score == pytest.approx(np.mean(parts))


def test_the_score_threshold_is_the_best_one() -> None:
    images = random_images(np.random.default_rng(2), 30)
    matched = match_boxes(images)
    chosen = choose_score(matched)
    tried = np.unique(np.concatenate([image.scores_D for image in images]))
    best = max(np.nanmean(challenge_scores(matched, threshold)) for threshold in tried)
    assert np.nanmean(challenge_scores(matched, chosen)) == pytest.approx(best)
    assert math.isnan(choose_score(match_boxes([Found(NOTHING, np.zeros(0), NOTHING)])))
    with pytest.raises(EvaluationError, match="two candidates"):
        choose_score(matched, candidates=1)


def test_what_cannot_be_judged_is_named() -> None:
    with pytest.raises(EvaluationError, match="four edges"):
        Found(np.zeros((2, 4)), np.zeros(1), NOTHING)
    with pytest.raises(EvaluationError, match="not finite"):
        Found(np.full((1, 4), np.nan), np.zeros(1), NOTHING)
    with pytest.raises(EvaluationError, match="no image"):
        match_boxes([])
    matched = match_boxes([Found(NOTHING, np.zeros(0), NOTHING)])
    with pytest.raises(EvaluationError, match="choose one of rsna, coco"):
        matched.of("voc")
    assert dataclasses.replace(matched).of("coco") == [ALL_OVERLAPS.index(overlap) for overlap in OVERLAPS["coco"]]
