"""Lines of `predictions.jsonl`: their fields, and metrics that are computed from them.

Shape letters: N items, L classes, M items of a part.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from medvl.eval.core.metric_rows import MetricGroup
from medvl.eval.core.metrics import Array
from medvl.eval.core.results import Results

Line = Mapping[str, Any]
Lines = Sequence[Line]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LineFields:
    """Names of the fields of an evaluation's lines."""

    item: tuple[str, ...] = ("key",)
    """Fields that identify an item."""
    group: str = "patient"
    """Field of the bootstrap group."""
    earlier_group: str | None = None
    """Field of the bootstrap group in lines of earlier versions, which do not have `group`."""
    needs: tuple[str, ...] = ()
    """Fields that lines of earlier versions do not have."""
    reference: str = ""
    """Field of what the item is compared with, where the settings of a run choose it."""


class ScoredClasses(NamedTuple):
    """Scores and labels of classes."""

    names: list[str]
    scores_NL: Array
    labels_NL: Array
    """1, 0 or NaN."""
    suffix: str = ""
    """Suffix of the metrics in the results, such as "@100%"."""

    def columns(self) -> Iterator[tuple[str, Array, Array]]:
        """Yield (class, scores_N, labels_N) of each class."""
        yield from zip(self.names, self.scores_NL.T, self.labels_NL.T, strict=True)


def classes_of_lines(lines: Lines, results: Results) -> ScoredClasses:
    """Return the scores and labels of lines with the fields "scores" and "labels"."""
    names = list(lines[0]["scores"])
    return ScoredClasses(
        names, number_table(lines, "scores", names), number_table(lines, "labels", names)
    )


def number_table(lines: Lines, field: str, names: Sequence[str]) -> Array:
    """Return the numbers that a field of each line has under names: one row a line."""
    return np.array([[number(line[field][name]) for name in names] for line in lines])


def number(value: float | None) -> float:
    """Return a number as it was before it became JSON: NaN for null."""
    return math.nan if value is None else float(value)


def at_items(group: MetricGroup, index_M: Sequence[int] | np.ndarray) -> MetricGroup:
    """Return a group over some of the items for all items; NaN in resamples without any of them."""

    def statistic(counts_NR: Array) -> Array:
        drawn_MR = counts_NR[index_M]
        any_R = drawn_MR.sum(axis=0) > 0
        values_RK = group.statistic(np.where(any_R, drawn_MR, 1.0))
        return np.where(any_R[:, None], values_RK, np.nan)

    return MetricGroup(group.rows, statistic)
