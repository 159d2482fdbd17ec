"""Metric rows, and the blocks of metrics that evaluators are put together from.

A block is a list of rows still without values and one statistic that gives all of them. `measure` joins the blocks of
an evaluation under one bootstrap, so that every row is computed on the same draws.

Shape letters: N items, R resamples, L labels, K rows.
"""

import dataclasses
from collections.abc import Hashable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from medvl.eval.core.bootstrap import Statistic, bootstrap, mean_over_labels, ranked_columns
from medvl.eval.core.metrics import (
    CALIBRATION_METRICS,
    DECISION_METRICS,
    Array,
    DecisionColumn,
    ProbabilityColumn,
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MetricRow:
    """One number with its 95 % interval. NaN: not defined in these data (`n` and `n_positive` say why)."""

    metric: str
    """auroc, average_precision, f1, recall@5, ..."""
    target: str
    """What it is of: a finding, "macro", a direction of retrieval, ..."""
    subgroup: str = ""
    """"" for all images, else such as "sex: F"."""
    value: float = float("nan")
    low: float = float("nan")
    high: float = float("nan")
    n: int = 0
    """Items that entered."""
    n_positive: int | None = None
    """Positives among them, where there is such a thing."""

    @property
    def name(self) -> str:
        """Unique in its evaluation: "auroc/Edema", "auroc/Edema (sex: F)"."""
        return f"{self.metric}/{self.target}" + (f" ({self.subgroup})" if self.subgroup else "")


@dataclasses.dataclass(frozen=True, slots=True)
class MetricGroup:
    """Rows to fill, and the statistic (counts_NR -> values_RK) that fills them in order."""

    rows: Sequence[MetricRow]
    statistic: Statistic


def measure(
    blocks: Sequence[MetricGroup],
    n: int,
    *,
    resamples: int = 1000,
    seed: int = 0,
    groups: Sequence[Hashable] | None = None,
) -> tuple[MetricRow, ...]:
    """Every row of every block with value and interval, from one bootstrap over `n` items (or their groups)."""

    def statistic(counts_NR: Array) -> Array:
        return np.concatenate([block.statistic(counts_NR) for block in blocks], axis=1)

    rows = [row for block in blocks for row in block.rows]
    if not rows:
        return ()
    estimate = bootstrap(statistic, n, resamples=resamples, seed=seed, groups=groups)
    values = zip(rows, estimate.value_K, estimate.low_K, estimate.high_K, strict=True)
    return tuple(
        dataclasses.replace(row, value=float(value), low=float(low), high=float(high))
        for row, value, low, high in values
    )


def ranking_metrics(
    metric: str,
    scores_NL: Array,
    labels_NL: Array,
    names: Sequence[str],
    *,
    means: Mapping[str, Sequence[str]] | None = None,
    subgroup: str = "",
) -> MetricGroup:
    """AUROC ("auroc") or average precision ("average_precision") a label, and means over named sets of labels.

    `means` maps a target ("macro") to the labels that it is the mean of.
    """
    columns = ranked_columns(scores_NL, labels_NL)
    statistics = [{"auroc": c.auroc_R, "average_precision": c.average_precision_R}[metric] for c in columns]
    means = means or {}
    members = [[list(names).index(name) for name in labels] for labels in means.values()]
    judged = _judged(labels_NL)
    rows = [label_row(metric, name, labels_N, subgroup) for name, labels_N in zip(names, labels_NL.T, strict=True)]
    rows += [MetricRow(metric=metric, target=target, subgroup=subgroup, n=judged) for target in means]

    def statistic(counts_NR: Array) -> Array:
        values_RL = np.stack([column(counts_NR) for column in statistics], axis=1)
        mean_columns = [mean_over_labels(values_RL[:, chosen])[:, None] for chosen in members]
        return np.concatenate([values_RL, *mean_columns], axis=1)

    return MetricGroup(rows, statistic)


def decision_metrics(predicted_NL: NDArray[np.bool_], labels_NL: Array, names: Sequence[str]) -> MetricGroup:
    """`DECISION_METRICS` a label, and the mean over labels of each under the target "macro"."""
    columns = [DecisionColumn(*pair) for pair in zip(predicted_NL.T, labels_NL.T, strict=True)]
    return _multi_metric_group(DECISION_METRICS, [column.metrics_RK for column in columns], labels_NL, names)


def calibration_metrics(probability_NL: Array, labels_NL: Array, names: Sequence[str]) -> MetricGroup:
    """`CALIBRATION_METRICS` a label, and their means over labels."""
    columns = [ProbabilityColumn(*pair) for pair in zip(probability_NL.T, labels_NL.T, strict=True)]
    return _multi_metric_group(CALIBRATION_METRICS, [column.metrics_RK for column in columns], labels_NL, names)


def _multi_metric_group(
    metrics: Sequence[str], columns: Sequence[Statistic], labels_NL: Array, names: Sequence[str]
) -> MetricGroup:
    columns_of_labels = list(zip(names, labels_NL.T, strict=True))
    rows = [label_row(metric, name, labels_N) for metric in metrics for name, labels_N in columns_of_labels]
    rows += [MetricRow(metric=metric, target="macro", n=_judged(labels_NL)) for metric in metrics]

    def statistic(counts_NR: Array) -> Array:
        values_LRK = np.stack([column(counts_NR) for column in columns])
        by_metric_KRL = values_LRK.transpose(2, 1, 0)
        means_RK = np.stack([mean_over_labels(values_RL) for values_RL in by_metric_KRL], axis=1)
        return np.concatenate([*by_metric_KRL, means_RK], axis=1)

    return MetricGroup(rows, statistic)


def mean_metrics(metric: str, values_NK: Array, targets: Sequence[str], *, subgroup: str = "") -> MetricGroup:
    """The mean of each column over its items (NaN: item left out): accuracy, recall at k, overlap, ..."""
    known_NK = (~np.isnan(values_NK)).astype(np.float64)
    filled_NK = np.nan_to_num(values_NK)
    counts = known_NK.sum(axis=0).astype(int).tolist()
    rows = [
        MetricRow(metric=metric, target=target, subgroup=subgroup, n=n)
        for target, n in zip(targets, counts, strict=True)
    ]

    def statistic(counts_NR: Array) -> Array:
        items_RK = counts_NR.T @ known_NK
        means_RK = (counts_NR.T @ filled_NK) / np.where(items_RK > 0, items_RK, 1)
        return np.where(items_RK > 0, means_RK, np.nan)

    return MetricGroup(rows, statistic)


def median_metric(metric: str, values_N: Array, target: str) -> MetricGroup:
    """The median, half-way between the two middle values where their number is even."""
    order = np.argsort(values_N, kind="stable")
    sorted_N = values_N[order]

    def statistic(counts_NR: Array) -> Array:
        drawn_NR = np.cumsum(counts_NR[order], axis=0)
        total_R = drawn_NR[-1]
        lower_R = (drawn_NR <= (total_R - 1) // 2).sum(axis=0)
        upper_R = (drawn_NR <= total_R // 2).sum(axis=0)
        return ((sorted_N[lower_R] + sorted_N[upper_R]) / 2)[:, None]

    return MetricGroup([MetricRow(metric=metric, target=target, n=len(values_N))], statistic)


def top1_metrics(scores_NL: Array, labels_NL: Array) -> MetricGroup:
    """Share of images whose class scores highest, over the images with exactly one positive and no unknown label.

    "top1_accuracy" over images, and "top1_balanced_accuracy", the mean over the classes that occur (in a resample:
    that were drawn) of the share within the class. Equal scores count as wrong unless the class is the only highest.
    """
    exclusive_N = (labels_NL == 1).sum(axis=1) == 1
    exclusive_N &= ~np.isnan(labels_NL).any(axis=1)
    truth_N = np.argmax(labels_NL == 1, axis=1)
    of_truth_N = np.take_along_axis(scores_NL, truth_N[:, None], axis=1)
    right_N = (scores_NL >= of_truth_N).sum(axis=1) == 1
    class_NL = exclusive_N[:, None] * (truth_N[:, None] == np.arange(labels_NL.shape[1])).astype(np.float64)
    right_NL = class_NL * right_N[:, None]
    n = int(exclusive_N.sum())
    rows = [MetricRow(metric=f"top1_{kind}", target="one class", n=n) for kind in ("accuracy", "balanced_accuracy")]

    def statistic(counts_NR: Array) -> Array:
        drawn_RL, right_RL = counts_NR.T @ class_NL, counts_NR.T @ right_NL
        within_RL = np.where(drawn_RL > 0, right_RL / np.maximum(drawn_RL, 1), np.nan)
        total_R = drawn_RL.sum(axis=1)
        accuracy_R = np.where(total_R > 0, right_RL.sum(axis=1) / np.maximum(total_R, 1), np.nan)
        return np.stack([accuracy_R, mean_over_labels(within_RL)], axis=1)

    return MetricGroup(rows, statistic)


def undefined_metrics(rows: Sequence[MetricRow]) -> MetricGroup:
    """Rows that are reported without a value: their sizes say why."""
    return MetricGroup(rows, lambda counts_NR: np.full((counts_NR.shape[1], len(rows)), np.nan))


def label_row(metric: str, target: str, labels_N: Array, subgroup: str = "") -> MetricRow:
    """A row with the sizes of one label column (1, 0 or NaN)."""
    known, positive = int((~np.isnan(labels_N)).sum()), int((labels_N == 1).sum())
    return MetricRow(metric=metric, target=target, subgroup=subgroup, n=known, n_positive=positive)


def _judged(labels_NL: Array) -> int:
    """Images that have at least one label."""
    return int((~np.isnan(labels_NL).all(axis=1)).sum())
