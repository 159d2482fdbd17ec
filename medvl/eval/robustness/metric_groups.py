"""Metric groups of the robustness tests; `medvl.eval.robustness.evaluate` defines the metrics.

Letters: N items, R resamples, L findings, K prompt sets.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from medvl.eval.core.bootstrap import defined_labels, mean_over_labels, ranked_columns
from medvl.eval.core.metric_rows import MetricGroup, MetricRow, mean_metrics
from medvl.eval.core.metrics import Array, RankedColumn
from medvl.eval.robustness.image_versions import Version

Value = Callable[[Array], Array]
"""Function from counts_NR to values_R."""
ALL = "all corruptions"


def macro_auroc(scores_NL: Array, labels_NL: Array) -> Value:
    """Return the mean over findings of the AUROC; items without labels are left out."""
    columns = ranked_columns(np.where(np.isnan(labels_NL), 0.0, scores_NL), labels_NL)

    def of_findings(counts_NR: Array) -> Array:
        return np.stack([column.auroc_R(counts_NR) for column in columns], axis=1)

    fixed_L = defined_labels(of_findings, len(labels_NL))
    return lambda counts_NR: mean_over_labels(of_findings(counts_NR), fixed_L)


def share(values_N: Array) -> Value:
    """Return the mean over items, NaN items left out."""
    group = mean_metrics("", values_N[:, None], [""])
    return lambda counts_NR: group.statistic(counts_NR)[:, 0]


def corruption_metrics(
    metric: str, target: str, n: int, clean: Value, versions: Mapping[Version, Value]
) -> MetricGroup:
    """Return a metric under every version, its means over strengths and over all, and paired changes from clean."""
    names = list(dict.fromkeys(version.name for version in versions))
    numbers = {name: [at for at, version in enumerate(versions) if version.name == name] for name in names}
    subgroups = [*map(str, versions), *names, ALL]
    rows = [
        MetricRow(metric=kind, target=target, subgroup=subgroup, n=n)
        for kind in (metric, f"{metric}_change")
        for subgroup in subgroups
    ]

    def statistic(counts_NR: Array) -> Array:
        values_RV = np.stack([value(counts_NR) for value in versions.values()], axis=1)
        means_RC = np.stack([values_RV[:, numbers[name]].mean(axis=1) for name in names], axis=1)
        all_RK = np.concatenate([values_RV, means_RC, means_RC.mean(axis=1, keepdims=True)], axis=1)
        return np.concatenate([all_RK, all_RK - clean(counts_NR)[:, None]], axis=1)

    return MetricGroup(rows, statistic)


def prompt_metrics(kind: str, values: Mapping[str, Value], n: int, items: int) -> MetricGroup:
    """Return the macro AUROC of every prompt set and, of two or more, the widest gap and the standard deviation.

    The two sets of the gap are chosen on all items and kept in the resamples. `n` items of all `items` count.
    """

    def row(metric: str, subgroup: str) -> MetricRow:
        return MetricRow(metric=metric, target="macro", subgroup=f"{kind}: {subgroup}", n=n)

    def table(counts_NR: Array) -> Array:
        return np.stack([value(counts_NR) for value in values.values()], axis=1)

    rows = [row("auroc", name) for name in values]
    if len(values) < 2:
        return MetricGroup(rows, table)
    names, once_K = list(values), table(np.ones((items, 1)))[0]
    best, worst = int(np.argmax(once_K)), int(np.argmin(once_K))
    rows += [row("auroc_gap", f"{names[best]} - {names[worst]}"), row("auroc_sd", f"{len(names)} sets")]

    def statistic(counts_NR: Array) -> Array:
        values_RK = table(counts_NR)
        gap_R1 = (values_RK[:, best] - values_RK[:, worst])[:, None]
        return np.concatenate([values_RK, gap_R1, values_RK.std(axis=1, ddof=1, keepdims=True)], axis=1)

    return MetricGroup(rows, statistic)


def negation_metrics(statements_NL2: Array, labels_NL: Array, names: Sequence[str]) -> MetricGroup:
    """Return how often an image of a finding prefers the statement, and one without it the denial.

    Args:
        statements_NL2: score of each statement and its denial.
        labels_NL: 1, 0 or NaN (left out); each column has both.
        names: findings.
    """
    above_NL = (np.sign(statements_NL2[:, :, 0] - statements_NL2[:, :, 1]) + 1) / 2
    present, absent = (
        mean_metrics("", np.where(labels_NL == label, right_NL, np.nan), names)
        for label, right_NL in ((1, above_NL), (0, 1 - above_NL))
    )
    known_N = (~np.isnan(labels_NL)).any(axis=1)
    all_L = np.ones(len(names), dtype=np.bool_)
    rows = [
        MetricRow(metric="negation", target=name, n=first.n + second.n, n_positive=first.n)
        for name, first, second in zip(names, present.rows, absent.rows, strict=True)
    ]
    rows += [
        MetricRow(metric=metric, target="macro", n=int(known_N.sum()))
        for metric in ("negation", "negation_present", "negation_absent")
    ]

    def statistic(counts_NR: Array) -> Array:
        present_RL, absent_RL = present.statistic(counts_NR), absent.statistic(counts_NR)
        both_RL = (present_RL + absent_RL) / 2
        means = [mean_over_labels(values_RL, all_L)[:, None] for values_RL in (both_RL, present_RL, absent_RL)]
        return np.concatenate([both_RL, *means], axis=1)

    return MetricGroup(rows, statistic)


def outside_metrics(name: str, inside_N: Array, outside_N: Array) -> MetricGroup:
    """Return how often an image of the data has more confidence than one of another kind, and the latter's mean.

    An item may have both values, of an image and of a version of it; NaN: it has none.
    """
    scores, labels = np.concatenate([inside_N, outside_N]), np.repeat([1.0, 0.0], len(inside_N))
    column = RankedColumn(np.nan_to_num(scores), np.where(np.isnan(scores), np.nan, labels))
    means = mean_metrics("confidence", outside_N[:, None], ["all"], subgroup=name)
    row = MetricRow(metric="ood_auroc", target="all", subgroup=name, n=means.rows[0].n)

    def statistic(counts_NR: Array) -> Array:
        auroc_R = column.auroc_R(np.concatenate([counts_NR, counts_NR]))
        return np.concatenate([auroc_R[:, None], means.statistic(counts_NR)], axis=1)

    return MetricGroup([row, *means.rows], statistic)
