"""Dice and IoU of masks, and the rules for empty masks."""

import dataclasses
import math
from typing import Any, cast

import numpy as np
import pytest
from helpers.errors import raises

from medvl.errors import EvaluationError
from medvl.eval.dense.metrics import (
    MIN_SHARES,
    THRESHOLDS,
    EmptyRule,
    MaskAreas,
    MaskThreshold,
    choose_mask_threshold,
    dice,
    iou,
    left_empty,
    mask_areas,
    pixel_auroc,
    pooled_metrics,
    stack,
)

RULES: tuple[EmptyRule, ...] = ("one_if_both_empty", "skip_empty")


def random_maps(count: int = 12, seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return random maps and masks; every third mask is empty, and two rows of each map are NaN."""
    rng = np.random.default_rng(seed)
    pairs = []
    for index in range(count):
        truth = np.zeros((20, 15), bool)
        if index % 3:
            truth[3 : 5 + index, 4:9] = True
        map_HW = np.clip(0.5 * truth + rng.random((20, 15)) * 0.6 - 0.1, 0, 1)
        map_HW[:2] = np.nan
        pairs.append((map_HW, truth))
    return pairs


def naive(map_HW: np.ndarray, truth: np.ndarray, rule: MaskThreshold) -> tuple[float, float]:
    """Return (Dice, IoU) by counting pixels; 1 if both masks are empty."""
    predicted = [bool(value >= rule.threshold) for value in map_HW.ravel()]  # False for NaN
    if sum(predicted) < rule.min_share * len(predicted):
        predicted = [False] * len(predicted)
    true = truth.ravel().tolist()
    both = sum(m and t for m, t in zip(predicted, true, strict=True))
    either = sum(m or t for m, t in zip(predicted, true, strict=True))
    if not either:
        return 1.0, 1.0
    return 2 * both / (sum(predicted) + sum(true)), both / either


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_areas_are_those_of_the_masks_at_values_equal_to_thresholds(kind: type) -> None:
    map_HW = np.array([[*THRESHOLDS, np.nan]], kind)
    areas = mask_areas(map_HW, np.ones(map_HW.shape, bool), THRESHOLDS)
    masks = [MaskThreshold(threshold=threshold, min_share=0.0)(map_HW) for threshold in THRESHOLDS]
    assert (
        areas.predicted_NT[0].tolist()
        == [mask.sum() for mask in masks]
        == list(range(len(THRESHOLDS), 0, -1))
    )


@pytest.mark.parametrize("share", [0.0, 0.05, 0.3])
def test_dice_and_iou_match_the_naive_implementation(share: float) -> None:
    pairs = random_maps()
    areas = stack([mask_areas(*pair, THRESHOLDS) for pair in pairs]).drop_small(share)
    dice_NT, iou_NT = dice(areas), iou(areas)
    for row, (map_HW, truth) in enumerate(pairs):
        for index, threshold in enumerate(THRESHOLDS):
            rule = MaskThreshold(threshold=threshold, min_share=share)
            expected = naive(map_HW, truth, rule)
            assert (dice_NT[row, index], iou_NT[row, index]) == pytest.approx(expected)
            assert rule(map_HW).sum() == areas.predicted_NT[row, index]
            assert not rule(map_HW)[:2].any()  # NaN pixels are in no mask


def test_empty_masks_follow_the_named_rule() -> None:
    """Rows: a correct mask; empty, correctly; empty with a predicted pixel; a missed mask."""
    areas = MaskAreas(
        *(
            np.array(x, float)
            for x in ([[4], [0], [0], [0]], [[4], [0], [1], [0]], [4, 0, 0, 4], [16] * 4)
        )
    )
    assert dice(areas)[:, 0].tolist() == [1, 1, 0, 0]  # default; the rule of the SIIM challenge
    np.testing.assert_array_equal(dice(areas, "skip_empty")[:, 0], [1, np.nan, np.nan, 0])
    np.testing.assert_array_equal(iou(areas, "skip_empty")[:, 0], [1, np.nan, np.nan, 0])
    np.testing.assert_array_equal(left_empty(areas)[:, 0], [np.nan, 1, 0, np.nan])
    with raises(EvaluationError, "unknown_name", "empty"):
        dice(areas, cast(Any, "smooth"))


def test_false_positive_in_an_empty_mask_scores_zero() -> None:
    """Dice with a smoothing constant could give such an image almost any value."""
    areas = MaskAreas(np.zeros((1, 1)), np.array([[1.0]]), np.zeros(1), np.array([100.0]))
    assert dice(areas) == 0
    assert iou(areas) == 0


@pytest.mark.parametrize("rule", RULES)
def test_chosen_mask_threshold_is_the_best(rule: EmptyRule) -> None:
    pairs = random_maps(seed=4)
    areas = stack([mask_areas(*pair, THRESHOLDS) for pair in pairs])
    chosen = choose_mask_threshold(areas, THRESHOLDS, rule)

    def value(threshold: MaskThreshold) -> float:
        numbers = [
            naive(*pair, threshold)[0]
            for pair in pairs
            if rule == "one_if_both_empty" or pair[1].any()
        ]
        return float(np.mean(numbers))

    best = max(
        value(MaskThreshold(threshold=t, min_share=a)) for t in THRESHOLDS for a in MIN_SHARES
    )
    assert value(chosen) == pytest.approx(best)
    empty = stack([mask_areas(map_HW, np.zeros_like(truth), THRESHOLDS) for map_HW, truth in pairs])
    assert math.isnan(
        choose_mask_threshold(empty, THRESHOLDS, "skip_empty").threshold
    )  # no image is left to choose on


def test_invalid_maps_are_refused() -> None:
    truth = np.zeros((4, 4), bool)
    with raises(EvaluationError, "mismatch"):
        mask_areas(np.zeros((4, 5)), truth, THRESHOLDS)
    for broken in (np.full((4, 4), np.nan), np.full((4, 4), np.inf)):
        with raises(EvaluationError, "nonfinite"):
            mask_areas(broken, truth, THRESHOLDS)
    with raises(EvaluationError, "empty"):
        stack([])


@pytest.mark.parametrize("kind", [np.uint8, np.int64, np.float32])
def test_masks_of_numbers_are_those_of_booleans(kind: type) -> None:
    for map_HW, truth in random_maps(3):
        expected, actual = (
            mask_areas(map_HW, mask, THRESHOLDS) for mask in (truth, truth.astype(kind))
        )
        for field in dataclasses.fields(MaskAreas):
            np.testing.assert_array_equal(
                getattr(actual, field.name), getattr(expected, field.name)
            )
        np.testing.assert_equal(pixel_auroc(map_HW, truth.astype(kind)), pixel_auroc(map_HW, truth))
    predicted, truth = np.array([[1, 1, 0, 0]], kind), np.array([[1, 0, 1, 0]], bool)
    for values in (predicted, predicted.astype(bool)):
        assert dice(mask_areas(values, truth, THRESHOLDS)).tolist() == [[0.5] * len(THRESHOLDS)]


@pytest.mark.parametrize("value", [255, 0.5, np.nan])
def test_masks_of_other_numbers_are_refused(value: float) -> None:
    truth = np.array([[0.0, value]])
    for metric in (
        lambda mask: mask_areas(np.ones((1, 2)), mask, THRESHOLDS),
        lambda mask: pixel_auroc(mask, mask),
    ):
        with raises(EvaluationError, "out_of_range", "mask"):
            metric(truth)


def test_published_rule_of_lvit_smooths_dice_and_gives_empty_pairs_an_iou_of_zero() -> None:
    areas = MaskAreas(
        *(np.array(x, float) for x in ([[4], [0], [0]], [[6], [0], [1]], [4, 0, 0], [16] * 3))
    )
    np.testing.assert_allclose(
        dice(areas, "lvit")[:, 0], [(8 + 1e-5) / (10 + 1e-5), 1, 1e-5 / (1 + 1e-5)]
    )
    assert iou(areas, "lvit")[:, 0].tolist() == [4 / 6, 0, 0]


def test_pooled_metrics_count_the_pixels_of_all_images() -> None:
    areas = MaskAreas(
        *(np.array(x, float) for x in ([[4], [0], [2]], [[6], [0], [8]], [4, 0, 3], [16] * 3))
    )
    groups = pooled_metrics({"Mass": areas})
    assert [group.rows[0].metric for group in groups] == ["dice_pooled", "iou_pooled"]
    counts_NR = np.array([[1.0, 0, 2], [1, 3, 0], [1, 0, 1]])
    dice_R, iou_R = (group.statistic(counts_NR)[:, 0] for group in groups)
    np.testing.assert_allclose(dice_R, [12 / 21, np.nan, 20 / 31])
    np.testing.assert_allclose(iou_R, [6 / 15, np.nan, 10 / 21])
