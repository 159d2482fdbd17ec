"""Ranks of systems with intervals, from differences that are paired over the same test items.

* The standard error of a difference is that of its bootstrap values, on resamples that both systems share; without
  shared items the two standard errors are added in squares. With several seeds the values of a system are the means
  over its seeds, and the variance of the mean over seeds is added, so that the error covers the training too.
* The p-value is that of a normal difference, two-sided. With 1,000 resamples the share of resamples beyond 0 could not
  resolve the small levels that many comparisons need.
* All pairs of systems of a column are tested together, with the correction of Holm (1979). A system's rank lies, with
  95 % confidence for all systems at once, between 1 + the number of systems that are significantly better and the
  number of systems - that of significantly worse ones.

Shape letters: R resamples, S seeds, P pairs.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from medvl.benchmark.resamples import Resampled
from medvl.eval.core.metrics import Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """A metric of one system, over its seeds."""

    values: tuple[float, ...]
    """Value of each seed."""
    errors: tuple[float, ...]
    """Standard error over test items of each seed; NaN where it has no interval."""
    resampled: tuple[Resampled | None, ...]
    ends: tuple[tuple[float, float], ...] = ()
    """Ends of each seed's own 95 % interval, from percentiles."""

    @property
    def value(self) -> float:
        """Mean over the seeds."""
        return math.fsum(self.values) / len(self.values)

    @property
    def items(self) -> str | None:
        """Hash of the test items; None unless all seeds have resamples of the same ones."""
        found = {None if one is None else one.items for one in self.resampled}
        return found.pop() if len(found) == 1 else None

    @property
    def mean_R(self) -> Array:
        """Resampled values, as means over the seeds."""
        return np.mean([one.values_R for one in self.resampled if one is not None], axis=0)

    @property
    def error(self) -> float:
        """Standard error of the mean, over test items and seeds."""
        if self.items is not None:
            of_items = float(np.nanstd(self.mean_R, ddof=1))
        else:
            of_items = math.sqrt(sum(error**2 for error in self.errors)) / len(self.errors)
        return math.hypot(of_items, _seed_error(self.values))

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the mean: that of the only seed, or a normal one."""
        if len(self.ends) == 1:
            return self.ends[0]
        return self.value - 1.96 * self.error, self.value + 1.96 * self.error


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rank:
    """Rank of a system in a column, with its simultaneous 95 % interval."""

    rank: int
    low: int
    high: int


def difference_error(first: Measured, second: Measured) -> float:
    """Return the standard error of the difference of two systems, paired where they share their test items."""
    if first.items is None or first.items != second.items:
        return math.hypot(first.error, second.error)
    of_items = float(np.nanstd(first.mean_R - second.mean_R, ddof=1))
    if len(first.values) == len(second.values) > 1:
        return math.hypot(
            of_items, _seed_error([a - b for a, b in zip(first.values, second.values, strict=True)])
        )  # fmt: skip
    return math.hypot(of_items, _seed_error(first.values), _seed_error(second.values))


def p_value(first: Measured, second: Measured) -> float:
    """Return the two-sided p-value of the difference of two systems; NaN without intervals."""
    difference, error = first.value - second.value, difference_error(first, second)
    if math.isnan(error):
        return math.nan
    if error == 0:
        return 1.0 if difference == 0 else 0.0
    return math.erfc(abs(difference) / error / math.sqrt(2))


def holm(p_P: Sequence[float]) -> list[float]:
    """Return the p-values adjusted for many comparisons by Holm's step-down method; NaN stays and is not counted."""
    order = sorted((p, place) for place, p in enumerate(p_P) if not math.isnan(p))
    adjusted, highest = [math.nan] * len(p_P), 0.0
    for number, (p, place) in enumerate(order):
        highest = max(highest, min(1.0, (len(order) - number) * p))
        adjusted[place] = highest
    return adjusted


def rank_systems(
    systems: Mapping[str, Measured], *, higher_is_better: bool = True, level: float = 0.05
) -> dict[str, Rank]:
    """Return the rank of each system, best first, with intervals that hold for all of them together."""
    sign = 1 if higher_is_better else -1
    ordered = sorted(
        (name for name in systems if not math.isnan(systems[name].value)),
        key=lambda name: -sign * systems[name].value,
    )
    pairs = list(itertools.combinations(ordered, 2))
    adjusted = holm([p_value(systems[better], systems[worse]) for better, worse in pairs])
    certain = [pair for pair, p in zip(pairs, adjusted, strict=True) if p < level]
    return {
        name: Rank(
            rank=1 + sum(sign * systems[other].value > sign * systems[name].value for other in ordered),
            low=1 + sum(worse == name for _, worse in certain),
            high=len(ordered) - sum(better == name for better, _ in certain),
        )
        for name in ordered
    }


def _seed_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean over seeds; 0 for a single one."""
    return 0.0 if len(values) < 2 else float(np.std(values, ddof=1)) / math.sqrt(len(values))
