"""Ranks, Holm's correction and standard errors against formulas written out."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from helpers.errors import raises
from scipy.stats import t as student_t, ttest_ind

from medvl.benchmark.ranks import Measured, Resampled, comparable, difference, holm, rank_systems
from medvl.errors import EvaluationError


def naive_holm(p_values: list[float]) -> list[float]:
    """Holm (1979), as in its definition: the k-th smallest times the number of hypotheses that
    are left.
    """
    order = sorted(range(len(p_values)), key=lambda place: p_values[place])
    adjusted = [0.0] * len(p_values)
    for number, place in enumerate(order):
        earlier = [p_values[order[k]] * (len(p_values) - k) for k in range(number + 1)]
        adjusted[place] = min(1.0, max(earlier))
    return adjusted


def measured(
    values: list[float], noise: list[np.ndarray] | None = None, items: str = "a", error: float = 0.1
) -> Measured:
    resampled = (
        [None] * len(values)
        if noise is None
        else [Resampled(items, v + n) for v, n in zip(values, noise, strict=True)]
    )
    return Measured(values=tuple(values), errors=(error,) * len(values), resampled=tuple(resampled))


def test_holm_is_the_naive_formula() -> None:
    rng = np.random.default_rng(0)
    for count in (1, 2, 5, 17):
        p_values = rng.uniform(0, 0.2, count).tolist()
        assert holm(p_values) == pytest.approx(naive_holm(p_values))
    assert holm([0.01, math.nan, 0.04])[::2] == pytest.approx([0.02, 0.04])
    assert math.isnan(holm([0.01, math.nan])[1])


def test_paired_differences_are_those_of_the_shared_resamples() -> None:
    rng = np.random.default_rng(1)
    shared, own = rng.normal(0, 0.1, 4000), rng.normal(0, 0.01, 4000)
    first, second = measured([0.80], [shared]), measured([0.77], [shared + own])
    z = 0.03 / np.std(own, ddof=1)
    assert difference(first, second).p_value == pytest.approx(math.erfc(z / math.sqrt(2)))
    apart = measured([0.77], [shared + own], items="b")  # other items: the variances add up
    z = 0.03 / math.hypot(np.std(shared, ddof=1), np.std(shared + own, ddof=1))
    assert difference(first, apart).p_value == pytest.approx(math.erfc(z / math.sqrt(2)))


def test_without_resamples_the_intervals_count() -> None:
    z = 0.5 / math.hypot(0.1, 0.1)
    assert difference(measured([0.9]), measured([0.4])).p_value == pytest.approx(
        math.erfc(z / math.sqrt(2))
    )
    assert math.isnan(difference(measured([0.9], error=math.nan), measured([0.4])).p_value)


@pytest.mark.parametrize("correlation", [0.5, 0.9, 1.0])
def test_seeds_share_their_test_items_also_without_resamples(correlation: float) -> None:
    """Three seeds of equal errors over the same items: 95 % of the intervals hold the value, or
    more.
    """
    rng, inside = np.random.default_rng(5), 0
    for _ in range(500):
        shared, own = rng.normal(0, 0.1, 1), rng.normal(0, 0.1, 3)
        values = 0.8 + math.sqrt(correlation) * shared + math.sqrt(1 - correlation) * own
        low, high = measured(values.tolist()).interval
        inside += low < 0.8 < high
    assert inside / 500 > 0.93
    assert measured([0.8, 0.8, 0.8]).item_error == pytest.approx(0.1)


def test_several_seeds_add_the_variance_of_their_mean() -> None:
    rng = np.random.default_rng(2)
    noise = [rng.normal(0, 0.1, 2000) for _ in range(3)]
    values = [0.70, 0.74, 0.81]
    one = measured(values, noise)
    of_items = np.std(np.mean([v + n for v, n in zip(values, noise, strict=True)], axis=0), ddof=1)
    assert one.value == pytest.approx(0.75)
    of_seeds = np.std(values, ddof=1) / math.sqrt(3)
    error = math.hypot(of_items, of_seeds)
    wide = student_t.ppf(0.975, 2 * (error / of_seeds) ** 4)
    assert one.interval == pytest.approx((0.75 - wide * error, 0.75 + wide * error))


def test_differences_over_seeds_are_those_of_welchs_t_test() -> None:
    first, second = [0.70, 0.74, 0.81], [0.60, 0.61]
    noise = [np.zeros(10)] * 3
    one, other = measured(first, noise), measured(second, noise[:2])
    result = ttest_ind(first, second, equal_var=False)
    found = difference(one, other)
    assert found.p_value == pytest.approx(result.pvalue)
    interval = result.confidence_interval(0.95)
    assert found.interval == pytest.approx((interval.low, interval.high))


@pytest.mark.parametrize("item_noise", [0.002, 0.01, 0.03])
def test_equal_systems_are_seldom_ranked_with_certainty(item_noise: float) -> None:
    """Eight equal systems of three seeds: at most 5 % of the benchmarks have a certain
    difference.
    """
    rng, wrong = np.random.default_rng(4), 0
    for _ in range(60):
        systems = {}
        for name in "abcdefgh":
            of_items = rng.normal(0, item_noise)
            values = [0.8 + of_items + rng.normal(0, 0.02) for _ in range(3)]
            systems[name] = measured(values, [rng.normal(0, item_noise, 200)] * 3)
        wrong += any(rank.low > 1 for rank in rank_systems(systems).values())
    assert wrong <= 6  # the 95 % quantile of 60 with a probability of 0.05


def test_means_over_different_classes_are_not_compared() -> None:
    one, other = (
        dataclasses.replace(measured([value]), over=frozenset({over}))
        for value, over in ((0.8, "macro of Edema"), (0.9, "macro of Edema, Mass"))
    )
    assert comparable([one, one])
    with raises(EvaluationError, "mismatch", "labels", names="Edema, Mass"):
        difference(one, other)
    with raises(EvaluationError, "mismatch", "labels"):
        rank_systems({"a": one, "b": other})


def test_rank_intervals_count_the_certain_differences() -> None:
    rng = np.random.default_rng(3)
    noise = rng.normal(0, 0.05, 2000)
    values = {"good": 0.90, "middle": 0.60, "close": 0.599, "bad": 0.30}
    systems = {
        name: measured([value], [noise + rng.normal(0, 0.01, 2000)])
        for name, value in values.items()
    }
    ranks = rank_systems(systems)
    assert list(ranks) == ["good", "middle", "close", "bad"]
    assert [(rank.rank, rank.low, rank.high) for rank in ranks.values()] == [
        (1, 1, 1),
        (2, 2, 3),
        (3, 2, 3),
        (4, 4, 4),
    ]
    pairs = list(itertools.combinations(values, 2))
    adjusted = naive_holm([difference(systems[a], systems[b]).p_value for a, b in pairs])
    worse = {
        name: sum(p < 0.05 and pair[1] == name for pair, p in zip(pairs, adjusted, strict=True))
        for name in values
    }
    assert {name: rank.low - 1 for name, rank in ranks.items()} == worse
    lower = rank_systems(systems, higher_is_better=False)
    assert [lower[name].rank for name in values] == [4, 3, 2, 1]
