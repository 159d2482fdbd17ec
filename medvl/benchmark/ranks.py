"""Ranks of systems with intervals, from differences that are paired over the same test items.

* The standard error of a difference is that of its bootstrap values, on resamples that both systems
  share; without shared items the two standard errors are added in squares. With several seeds the
  values of a system are the means over its seeds, and the variance of the mean over seeds is added,
  so that the error covers the training too. Seeds share their test items: without resamples the
  error over items is the mean of theirs, its upper bound.
* The p-value is two-sided, of a normal difference with one seed, and of Student's t with several:
  with the degrees of freedom of the seeds (Welch 1947) as if all of the error came from them. With
  two or three seeds their variance is known so badly that few differences are certain after a
  correction for many comparisons. With 1,000 resamples the share of resamples beyond 0 could not
  resolve the small levels that such a correction needs.
* 95 % intervals have Student's t as well; the degrees of freedom are those of the whole error, of
  which the share of the test items is well known (Satterthwaite 1946).
* All pairs of systems of a column are tested together, with the correction of Holm (1979). A
  system's rank lies, with 95 % confidence for all systems at once, between 1 + the number of
  systems that are significantly better and the number of systems - that of significantly worse
  ones.

Shape letters: R resamples, S seeds, P pairs.
"""

import dataclasses
import hashlib
import itertools
import json
import math
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from scipy.stats import t as student_t

from medvl.common.files import new_file
from medvl.errors import EvaluationError
from medvl.eval import read_results
from medvl.eval.compare.items import read_items
from medvl.eval.core.metrics import Array, count_units, resample_counts

# Values of a run's metrics on bootstrap resamples, the same for all runs, so that their
# differences are paired.
#
# Shape letters: N items, R resamples, K rows.

FILE = "resamples.npz"


@dataclasses.dataclass(frozen=True)
class Resampled:
    """Metrics of a run on resamples of its items."""

    items: str
    """Hash of the items, their groups and their references: runs with the same one are paired."""
    values_R: Array


def write_resamples(folder: Path, resamples: int) -> None:
    """Write the resampled metrics of an evaluation of two or more groups, where its predictions
    determine them.
    """
    results = read_results(folder)
    items = read_items(folder, results)
    if items is None or not resamples or count_units(len(items.names), items.groups) < 2:
        return
    whole = dataclasses.replace(items, metric_groups=items.without_subgroups)
    values = [
        whole.statistic(counts_NR)
        for counts_NR in resample_counts(len(items.names), resamples, 0, items.groups)
    ]
    identity = [items.names, items.groups, *([items.references] if items.references else [])]
    content = json.dumps(identity, default=str).encode()
    with new_file(folder / FILE) as file:
        np.savez_compressed(
            file,
            names=np.array(whole.rows),
            values_RK=np.concatenate(values).astype(np.float32),
            items=np.array(hashlib.sha256(content).hexdigest()),
        )


def read_resamples(folder: Path, name: str) -> Resampled | None:
    """Return the resampled values of a row, such as "auroc/macro"; None where the evaluation has
    none.

    Raises EvaluationError where the file is damaged.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            names = stored["names"].tolist()
            if name not in names:
                return None
            values_R = stored["values_RK"][:, names.index(name)].astype(np.float64)
            return Resampled(items=str(stored["items"]), values_R=values_R)
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        message = (
            f"{path} is damaged ({error}); remove {folder}, and the same command evaluates again"
        )
        raise EvaluationError(message, "malformed", field="out") from None


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
    over: frozenset[str] = frozenset()
    """What the values are over, such as "all", or "macro" with the classes of the mean. Other
    systems are compared only where it is equal.
    """

    @property
    def value(self) -> float:
        """Mean over the seeds."""
        return math.fsum(self.values) / len(self.values)

    @property
    def items(self) -> str | None:
        """Hash of the test items; None unless all seeds have resamples of the same ones."""
        items = {None if one is None else one.items for one in self.resampled}
        return items.pop() if len(items) == 1 else None

    @property
    def mean_R(self) -> Array:
        """Resampled values, as means over the seeds."""
        return np.mean([one.values_R for one in self.resampled if one is not None], axis=0)

    @property
    def item_error(self) -> float:
        """Standard error of the mean over the test items; without resamples its upper bound, the
        mean of the seeds'.
        """
        if self.items is not None:
            return float(np.nanstd(self.mean_R, ddof=1))
        return math.fsum(self.errors) / len(self.errors)

    @property
    def seed_variance(self) -> float:
        """Squared standard error of the mean over the seeds; 0 for a single one."""
        return (
            0.0 if len(self.values) < 2 else float(np.var(self.values, ddof=1)) / len(self.values)
        )

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the mean: that of the only seed, or one of Student's t."""
        if len(self.ends) == 1:
            return self.ends[0]
        return Estimated.of(self.value, self.item_error, [self]).interval


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimated:
    """A mean or a difference of means, with its errors."""

    value: float
    item_error: float
    """Standard error over test items."""
    seed_error: float
    """Standard error over seeds; 0 for a single one."""
    seed_freedom: float
    """Degrees of freedom of `seed_error`; infinite for a single seed."""

    @classmethod
    def of(cls, value: float, item_error: float, systems: Sequence[Measured]) -> "Estimated":
        """Return the estimate from these systems, whose seeds are independent of each other."""
        several = [
            (system.seed_variance, len(system.values) - 1)
            for system in systems
            if len(system.values) > 1
        ]
        total = math.fsum(variance for variance, _ in several)
        parts = math.fsum(variance**2 / freedom for variance, freedom in several)
        least = min((freedom for _, freedom in several), default=math.inf)
        freedom = total**2 / parts if parts else least
        return cls(
            value=value, item_error=item_error, seed_error=math.sqrt(total), seed_freedom=freedom
        )

    @property
    def error(self) -> float:
        """Standard error over test items and seeds."""
        return math.hypot(self.item_error, self.seed_error)

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval."""
        if math.isinf(self.seed_freedom) or not self.seed_error:
            wide = 1.96
        else:
            wide = float(
                student_t.ppf(0.975, self.seed_freedom * (self.error / self.seed_error) ** 4)
            )
        return self.value - wide * self.error, self.value + wide * self.error

    @property
    def p_value(self) -> float:
        """Two-sided p-value of the value 0; NaN without an error."""
        if math.isnan(self.error):
            return math.nan
        if self.error == 0:
            return 1.0 if self.value == 0 else 0.0
        return 2 * float(student_t.sf(abs(self.value) / self.error, self.seed_freedom))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rank:
    """Rank of a system in a column, with its simultaneous 95 % interval."""

    rank: int
    low: int
    high: int


def comparable(systems: Iterable[Measured]) -> bool:
    """Return whether the systems are measured over the same, such as means over the same
    classes.
    """
    return len({system.over for system in systems}) < 2


def difference(first: Measured, second: Measured) -> Estimated:
    """Return the difference of two systems, paired where they share their test items.

    Raises EvaluationError where they are means over different classes.
    """
    if not comparable((first, second)):
        one, other = ("; ".join(sorted(system.over)) for system in (first, second))
        message = (
            f"means over different classes cannot be compared: {one} against {other}; "
            f"evaluate the same classes"
        )
        raise EvaluationError(message, "mismatch", field="labels")
    if first.items is None or first.items != second.items:
        of_items = math.hypot(first.item_error, second.item_error)
    else:
        of_items = float(np.nanstd(first.mean_R - second.mean_R, ddof=1))
    return Estimated.of(first.value - second.value, of_items, [first, second])


def holm(p_P: Sequence[float]) -> list[float]:
    """Return the p-values adjusted for many comparisons by Holm's step-down method; NaN stays
    and is not counted.
    """
    order = sorted((p, place) for place, p in enumerate(p_P) if not math.isnan(p))
    adjusted = [math.nan] * len(p_P)
    highest = 0.0
    for number, (p, place) in enumerate(order):
        highest = max(highest, min(1.0, (len(order) - number) * p))
        adjusted[place] = highest
    return adjusted


def rank_systems(
    systems: Mapping[str, Measured], *, higher_is_better: bool = True, level: float = 0.05
) -> dict[str, Rank]:
    """Return the rank of each system, best first, with intervals that hold for all of them
    together.

    Raises EvaluationError where they are means over different classes.
    """
    sign = 1 if higher_is_better else -1
    ordered = sorted(
        (name for name in systems if not math.isnan(systems[name].value)),
        key=lambda name: -sign * systems[name].value,
    )
    pairs = list(itertools.combinations(ordered, 2))
    adjusted = holm(
        [difference(systems[better], systems[worse]).p_value for better, worse in pairs]
    )
    certain = [pair for pair, p in zip(pairs, adjusted, strict=True) if p < level]
    return {
        name: Rank(
            rank=1
            + sum(sign * systems[other].value > sign * systems[name].value for other in ordered),
            low=1 + sum(worse == name for _, worse in certain),
            high=len(ordered) - sum(better == name for better, _ in certain),
        )
        for name in ordered
    }
