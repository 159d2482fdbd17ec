"""Dice and overlap of masks, and what an empty mask counts."""

import math
from typing import Any, cast

import numpy as np
import pytest

from medvl.errors import EvaluationError
from medvl.eval.dense.mask_metrics import (
    LEAST_SHARES,
    THRESHOLDS,
    Areas,
    EmptyRule,
    MaskThreshold,
    areas_of,
    choose_cut,
    dice,
    left_empty,
    overlap,
    stack,
)

RULES: tuple[EmptyRule, ...] = ("one_if_both_empty", "skip_empty")


def random_maps(count: int = 12, seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    """Maps and masks; every third mask is empty, and a part of the pixels was not shown."""
    rng = np.random.default_rng(seed)
    pairs = []
    for number in range(count):
        truth = np.zeros((20, 15), bool)
        if number % 3:
            truth[3 : 5 + number, 4:9] = True
        map_HW = np.clip(0.5 * truth + rng.random((20, 15)) * 0.6 - 0.1, 0, 1)
        map_HW[:2] = np.nan
        pairs.append((map_HW, truth))
    return pairs


def naive(map_HW: np.ndarray, truth: np.ndarray, cut: MaskThreshold) -> tuple[float, float]:
    """(Dice, IoU) by counting pixels; both empty is 1."""
    marked = [bool(value >= cut.threshold) for value in map_HW.ravel()]  # False for NaN
    if sum(marked) < cut.least_share * len(marked):
        marked = [False] * len(marked)
    true = truth.ravel().tolist()
    both = sum(m and t for m, t in zip(marked, true, strict=True))
    either = sum(m or t for m, t in zip(marked, true, strict=True))
    if not either:
        return 1.0, 1.0
    return 2 * both / (sum(marked) + sum(true)), both / either


@pytest.mark.parametrize("least", [0.0, 0.05, 0.3])
def test_numbers_are_those_of_counting_pixels(least: float) -> None:
    pairs = random_maps()
    areas = stack([areas_of(*pair, THRESHOLDS) for pair in pairs]).cut(least)
    dice_NT, iou_NT = dice(areas), overlap(areas)
    for row, (map_HW, truth) in enumerate(pairs):
        for place, threshold in enumerate(THRESHOLDS):
            cut = MaskThreshold(threshold=threshold, least_share=least)
            expected = naive(map_HW, truth, cut)
            assert (dice_NT[row, place], iou_NT[row, place]) == pytest.approx(expected)
            assert cut(map_HW).sum() == areas.marked_NT[row, place]
            assert not cut(map_HW)[:2].any()  # what was not shown is not marked


def test_empty_masks_follow_the_named_rule() -> None:
    """Rows: a good mask; normal and left alone; normal with a pixel marked; a mask that was missed."""
    areas = Areas(*(np.array(x, float) for x in ([[4], [0], [0], [0]], [[4], [0], [1], [0]], [4, 0, 0, 4], [16] * 4)))
    assert dice(areas)[:, 0].tolist() == [1, 1, 0, 0]  # the challenge's, and the default
    np.testing.assert_array_equal(dice(areas, "skip_empty")[:, 0], [1, np.nan, np.nan, 0])
    np.testing.assert_array_equal(overlap(areas, "skip_empty")[:, 0], [1, np.nan, np.nan, 0])
    np.testing.assert_array_equal(left_empty(areas)[:, 0], [np.nan, 1, 0, np.nan])
    with pytest.raises(EvaluationError, match="choose one of one_if_both_empty, skip_empty"):
        dice(areas, cast(Any, "smooth"))


def test_no_smoothing_makes_empty_masks_worth_anything_else() -> None:
    """Dice with a constant in both parts gives a normal image with marks almost any value; here it is 0."""
    areas = Areas(np.zeros((1, 1)), np.array([[1.0]]), np.zeros(1), np.array([100.0]))
    assert dice(areas) == 0
    assert overlap(areas) == 0


@pytest.mark.parametrize("rule", RULES)
def test_the_cut_is_the_best_of_all(rule: EmptyRule) -> None:
    pairs = random_maps(seed=4)
    areas = stack([areas_of(*pair, THRESHOLDS) for pair in pairs])
    chosen = choose_cut(areas, THRESHOLDS, rule)

    def value(cut: MaskThreshold) -> float:
        numbers = [naive(*pair, cut)[0] for pair in pairs if rule == "one_if_both_empty" or pair[1].any()]
        return float(np.mean(numbers))

    best = max(value(MaskThreshold(threshold=t, least_share=a)) for t in THRESHOLDS for a in LEAST_SHARES)
    assert value(chosen) == pytest.approx(best)
    empty = stack([areas_of(map_HW, np.zeros_like(truth), THRESHOLDS) for map_HW, truth in pairs])
    assert math.isnan(choose_cut(empty, THRESHOLDS, "skip_empty").threshold)  # no image is left to choose on


def test_what_cannot_be_judged_is_named() -> None:
    truth = np.zeros((4, 4), bool)
    with pytest.raises(EvaluationError, match="cannot be judged by a mask of"):
        areas_of(np.zeros((4, 5)), truth, THRESHOLDS)
    for broken in (np.full((4, 4), np.nan), np.full((4, 4), np.inf)):
        with pytest.raises(EvaluationError, match="not finite"):
            areas_of(broken, truth, THRESHOLDS)
    with pytest.raises(EvaluationError, match="no image"):
        stack([])
