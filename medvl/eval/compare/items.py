"""Items of a run, read from its `predictions.jsonl`, and the metrics over them and subgroups.

Every line names its item, the bootstrap group of the item (patient) and its "subgroups" (attribute
-> group), which `medvl.eval.core.metric_rows` gives for an image. The evaluation of the protocol
has the metrics. The same metrics are computed for each subgroup, from its lines alone, if the group
has enough items (`smallest_subgroup` of the evaluation, else 10) and, for rows of binary labels, as
many positives.

Rows that need more than the lines (gains of a retrieval, calibration, text overlap of baselines)
have no paired difference.

Shape letters: N items, R resamples, K rows.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from medvl.common.text_files import read_json_objects
from medvl.errors import EvaluationError
from medvl.eval.core.metric_rows import (
    Masks,
    MetricGroup,
    calibration_metrics,
    means_over,
    measure,
    ranking_metrics,
    subgroup_masks,
    subgroup_metrics,
)
from medvl.eval.core.metrics import CALIBRATION_METRICS, Array
from medvl.eval.core.results import Line, Results, ScoredClasses, at_items
from medvl.eval.evaluation import Evaluation
from medvl.eval.registry import evaluation_of

SMALLEST_SUBGROUP = 10
"""Minimum number of items of a subgroup, unless the settings of the evaluation have
`smallest_subgroup`.
"""
# largest difference between a row of results.json and the same row from its predictions
_TOLERANCE = 1e-6


@dataclasses.dataclass(frozen=True, slots=True)
class Items:
    """Items of a run, ordered by name, with the metrics over them."""

    names: tuple[tuple[Any, ...], ...]
    unit: str | None
    """Field of the bootstrap group, such as "patient"; None if the lines have none and items are
    resampled.
    """
    groups: tuple[Any, ...] | None
    """Bootstrap group of each item; None without a `unit`."""
    metric_groups: tuple[MetricGroup, ...]
    scores: tuple[tuple[str, Array, Array], ...] = ()
    """(class, scores_N, labels_N) of each class, for ROC curves."""
    references: tuple[Any, ...] = ()
    """Reference of each item, of protocols whose runs choose it, such as the sections of a
    report; empty for others.
    """

    @property
    def rows(self) -> list[str]:
        """Names of the rows, in the order of `statistic`."""
        return [row.name for group in self.metric_groups for row in group.rows]

    @property
    def without_subgroups(self) -> tuple[MetricGroup, ...]:
        """Metrics over all items."""
        return tuple(
            group for group in self.metric_groups if not any(row.subgroup for row in group.rows)
        )

    def statistic(self, counts_NR: Array) -> Array:
        """Return values_RK with columns as in `rows`."""
        return np.concatenate([group.statistic(counts_NR) for group in self.metric_groups], axis=1)


def read_items(folder: Path, results: Results) -> Items | None:
    """Read the items of an evaluation.

    None if it has no predictions, its protocol has no reader, or the predictions are of an earlier
    version.

    Raises EvaluationError if the lines are malformed, an item is repeated, or the values differ
    from the results.
    """
    path = folder / "predictions.jsonl"
    evaluation = evaluation_of(results.protocol)
    if evaluation is None or not path.is_file():
        return None
    reader = evaluation.lines
    try:
        lines = [line for _, line in read_json_objects(path, EvaluationError, reader.item)]
        if any(field not in line for line in lines for field in reader.needs):
            return None
        named = sorted(
            ((tuple(line[field] for field in reader.item), line) for line in lines),
            key=lambda pair: pair[0],
        )
        names = tuple(name for name, _ in named)
        lines = [line for _, line in named]
        fields = [field for field in (reader.group, reader.earlier_group) if field is not None]
        unit = next((field for field in fields if all(field in line for line in lines)), None)
        groups = None if unit is None else tuple(line[unit] for line in lines)
        ranked = evaluation.scored_classes(lines, results)
        scores = () if ranked is None else tuple(ranked.columns())
        references = tuple(line[reader.reference] for line in lines) if reader.reference else ()
        items = Items(
            names,
            unit,
            groups,
            tuple(_metric_groups(evaluation, lines, results, ranked)),
            scores,
            references,
        )
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        message = f"{path} is not a predictions file of {results.protocol} ({type(error).__name__})"
        raise EvaluationError(message, "malformed") from error
    if not names or len(set(names)) != len(names):
        raise EvaluationError(
            f"expected each item once in {path}, got none or duplicates; evaluate again",
            "malformed",
        )
    _check(items, results, path)
    return items


def with_subgroups(results: Results, items: Items | None, *, resamples: int, seed: int) -> Results:
    """Return the results with the rows of subgroups that their items determine and the results
    do not have.
    """
    if items is None:
        return results
    known = {row.name for row in results.rows}
    missing = [
        _columns(group, columns)
        for group in items.metric_groups
        if (
            columns := [
                n for n, row in enumerate(group.rows) if row.subgroup and row.name not in known
            ]
        )
    ]
    further = measure(
        missing, len(items.names), resamples=resamples, seed=seed, groups=items.groups
    )
    return dataclasses.replace(results, rows=(*results.rows, *further))


def _metric_groups(
    evaluation: type[Evaluation],
    lines: Sequence[Line],
    results: Results,
    ranked: ScoredClasses | None,
) -> Iterator[MetricGroup]:
    masks_of = subgroup_masks([line.get("subgroups", {}) for line in lines])
    smallest = int(results.config.get("smallest_subgroup", SMALLEST_SUBGROUP))
    if ranked is not None:
        yield from _ranking(ranked, masks_of, smallest, results.details.get("means"))
        yield from _calibration(ranked, results)
    yield from evaluation.metric_groups(lines, results)
    for attribute, masks in masks_of.items():
        for name, mask_N in masks.items():
            rows = np.flatnonzero(mask_N).tolist()
            for group in evaluation.metric_groups([lines[row] for row in rows], results):
                yield _within(group, rows, f"{attribute}: {name}", smallest)


def _within(group: MetricGroup, rows: Sequence[int], subgroup: str, smallest: int) -> MetricGroup:
    """Return a group over the items of a subgroup for all items, without the rows of too few of
    them.
    """
    columns = [
        number
        for number, row in enumerate(group.rows)
        if not row.subgroup
        and row.n >= smallest
        and (row.n_positive is None or row.n_positive >= smallest)
    ]

    named = [dataclasses.replace(row, subgroup=subgroup) for row in group.rows]
    return _columns(MetricGroup(named, at_items(group, rows).statistic), columns)


def _columns(group: MetricGroup, columns: Sequence[int]) -> MetricGroup:
    return MetricGroup(
        [group.rows[n] for n in columns], lambda counts_NR: group.statistic(counts_NR)[:, columns]
    )


def _ranking(
    ranked: ScoredClasses, masks_of: Masks, smallest: int, known: Mapping[str, Sequence[str]] | None
) -> Iterator[MetricGroup]:
    """Yield AUROC and average precision of every class, their means, and AUROC in subgroups.

    The means are over the classes that the results name (`known`), in earlier versions all with
    both kinds.
    """
    names, scores_NL, labels_NL, suffix = ranked
    means = {"macro": [], **(means_over(names, labels_NL) if known is None else known)}
    for metric in ("auroc", "average_precision"):
        group = ranking_metrics(metric, scores_NL, labels_NL, names, means=means)
        rows = [dataclasses.replace(row, metric=f"{metric}{suffix}") for row in group.rows]
        yield MetricGroup(rows, group.statistic)
    yield from subgroup_metrics(scores_NL, labels_NL, names, masks_of, smallest)[0]


def _calibration(ranked: ScoredClasses, results: Results) -> Iterator[MetricGroup]:
    """Yield the calibration metrics that the results have, of scores that are probabilities."""
    known = {row.name for row in results.rows if row.metric in CALIBRATION_METRICS}
    if known:
        group = calibration_metrics(ranked.scores_NL, ranked.labels_NL, ranked.names)
        yield _columns(group, [n for n, row in enumerate(group.rows) if row.name in known])


def _check(items: Items, results: Results, path: Path) -> None:
    """Raise EvaluationError unless the rows of the predictions equal those of the results."""
    expected = {row.name: row.value for row in results.rows}
    values = zip(
        items.rows, items.statistic(np.ones((len(items.names), 1)))[0].tolist(), strict=True
    )
    for name, value in values:
        known = expected.get(name, value)
        if not math.isclose(known, value, abs_tol=_TOLERANCE) and not (
            math.isnan(known) and math.isnan(value)
        ):
            message = (
                f"{path} gives {value:.6f} for {name}, but results.json has {known:.6f}; "
                f"evaluate again"
            )
            raise EvaluationError(message, "mismatch")
