"""Metric rows and the metric groups that evaluators are composed of.

A metric group is a list of rows without values and one statistic that computes all of them.
`measure` evaluates all groups of an evaluation under one bootstrap, so that every row uses the same
resamples.

Shape letters: N items, R resamples, L labels, K rows.
"""

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from medvl.data.annotations import frontal_or_lateral
from medvl.eval.core.metrics import (
    CALIBRATION_METRICS,
    DECISION_METRICS,
    Array,
    DecisionColumn,
    ProbabilityColumn,
    Statistic,
    bootstrap,
    defined_labels,
    mean_over_labels,
    ranked_columns,
)
from medvl.schema import COMPETITION_FINDINGS, Sample


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MetricRow:
    """One metric value with its 95 % interval; NaN if undefined in the data (see `n` and
    `n_positive`).
    """

    metric: str
    """auroc, average_precision, f1, recall@5, ..."""
    target: str
    """Finding, "macro", direction of retrieval, ..."""
    subgroup: str = ""
    """Subgroup such as "sex: F"; empty for all images."""
    value: float = float("nan")
    low: float = float("nan")
    high: float = float("nan")
    n: int = 0
    """Number of items in the metric."""
    n_positive: int | None = None
    """Number of positive items, for metrics of binary labels."""

    @property
    def name(self) -> str:
        """Name, unique in the evaluation, such as "auroc/Edema" or "auroc/Edema (sex: F)"."""
        return f"{self.metric}/{self.target}" + (f" ({self.subgroup})" if self.subgroup else "")


@dataclasses.dataclass(frozen=True, slots=True)
class MetricGroup:
    """Metric rows and the statistic (counts_NR -> values_RK) that computes their values, in
    order.
    """

    rows: Sequence[MetricRow]
    statistic: Statistic


def measure(
    metric_groups: Sequence[MetricGroup],
    n: int,
    *,
    resamples: int = 1000,
    seed: int = 0,
    groups: Sequence[Hashable] | None = None,
) -> tuple[MetricRow, ...]:
    """Return all rows of all metric groups with values and intervals, from one bootstrap.

    Args:
        metric_groups: the metrics.
        n: number of items.
        resamples: bootstrap resamples; 0 for values without intervals.
        seed: seed of the resampling.
        groups: group (patient) of each item, to resample groups instead of items.
    """

    def statistic(counts_NR: Array) -> Array:
        return np.concatenate([group.statistic(counts_NR) for group in metric_groups], axis=1)

    rows = [row for group in metric_groups for row in group.rows]
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
    """Return AUROC ("auroc") or average precision ("average_precision") per label, and means over
    sets of labels.

    `means` maps the target of a mean ("macro") to its labels, of which those with both kinds are in
    the mean.
    """
    columns = ranked_columns(scores_NL, labels_NL)
    statistics = [
        {"auroc": c.auroc_R, "average_precision": c.average_precision_R}[metric] for c in columns
    ]
    means = means or {}
    both_L = (labels_NL == 1).any(axis=0) & (labels_NL == 0).any(axis=0)
    members = [both_L & np.isin(names, list(labels)) for labels in means.values()]
    labelled = _count_labelled(labels_NL)
    rows = [
        label_row(metric, name, labels_N, subgroup)
        for name, labels_N in zip(names, labels_NL.T, strict=True)
    ]
    rows += [
        MetricRow(metric=metric, target=target, subgroup=subgroup, n=labelled) for target in means
    ]

    def statistic(counts_NR: Array) -> Array:
        values_RL = np.stack([column(counts_NR) for column in statistics], axis=1)
        mean_columns = [mean_over_labels(values_RL, fixed_L)[:, None] for fixed_L in members]
        return np.concatenate([values_RL, *mean_columns], axis=1)

    return MetricGroup(rows, statistic)


def means_over(names: Sequence[str], labels_NL: Array) -> dict[str, list[str]]:
    """Return the means over findings with positives and negatives: all, and the five of the
    CheXpert competition.
    """
    both_L = (labels_NL == 1).any(axis=0) & (labels_NL == 0).any(axis=0)
    evaluable = [name for name, both in zip(names, both_L, strict=True) if both]
    means = {"macro": evaluable} if evaluable else {}
    if set(COMPETITION_FINDINGS) <= set(evaluable):
        means["macro_competition"] = list(COMPETITION_FINDINGS)
    return means


def decision_metrics(
    predicted_NL: NDArray[np.bool_],
    labels_NL: Array,
    names: Sequence[str],
    *,
    mean_of: Sequence[str] | None = None,
) -> MetricGroup:
    """Return `DECISION_METRICS` per label, and their means over labels (of `mean_of`) as target
    "macro".
    """
    columns = [DecisionColumn(*pair) for pair in zip(predicted_NL.T, labels_NL.T, strict=True)]
    return _multi_metric_group(
        DECISION_METRICS, [column.metrics_RK for column in columns], labels_NL, names, mean_of
    )


def calibration_metrics(
    probability_NL: Array, labels_NL: Array, names: Sequence[str]
) -> MetricGroup:
    """Return `CALIBRATION_METRICS` per label, and their means over labels as target "macro"."""
    columns = [ProbabilityColumn(*pair) for pair in zip(probability_NL.T, labels_NL.T, strict=True)]
    return _multi_metric_group(
        CALIBRATION_METRICS, [column.metrics_RK for column in columns], labels_NL, names
    )


def _multi_metric_group(
    metrics: Sequence[str],
    columns: Sequence[Statistic],
    labels_NL: Array,
    names: Sequence[str],
    mean_of: Sequence[str] | None = None,
) -> MetricGroup:
    columns_of_labels = list(zip(names, labels_NL.T, strict=True))
    rows = [
        label_row(metric, name, labels_N)
        for metric in metrics
        for name, labels_N in columns_of_labels
    ]
    rows += [
        MetricRow(metric=metric, target="macro", n=_count_labelled(labels_NL)) for metric in metrics
    ]

    def of_labels(counts_NR: Array) -> Array:
        return np.stack([column(counts_NR) for column in columns]).transpose(2, 1, 0)

    fixed_KL = ~np.isnan(of_labels(np.ones((len(labels_NL), 1)))[:, 0])
    fixed_KL &= np.isin(names, list(names if mean_of is None else mean_of))

    def statistic(counts_NR: Array) -> Array:
        by_metric_KRL = of_labels(counts_NR)
        means_RK = np.stack([*map(mean_over_labels, by_metric_KRL, fixed_KL)], axis=1)
        return np.concatenate([*by_metric_KRL, means_RK], axis=1)

    return MetricGroup(rows, statistic)


def mean_metrics(
    metric: str, values_NK: Array, targets: Sequence[str], *, subgroup: str = ""
) -> MetricGroup:
    """Return the mean of each column over its items, NaN items left out: accuracy, recall at k,
    ...
    """
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
    """Return the median, the midpoint of the two middle values for an even number of items."""
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
    """Return top-1 accuracy over the images with exactly one positive and no unknown label.

    "top1_accuracy" is the fraction of images whose class scores highest; "top1_balanced_accuracy"
    is the mean of this fraction over the classes that occur. A tie for the highest score counts as
    wrong.
    """
    exclusive_N = (labels_NL == 1).sum(axis=1) == 1
    exclusive_N &= ~np.isnan(labels_NL).any(axis=1)
    truth_N = np.argmax(labels_NL == 1, axis=1)
    of_truth_N = np.take_along_axis(scores_NL, truth_N[:, None], axis=1)
    right_N = (scores_NL >= of_truth_N).sum(axis=1) == 1
    class_NL = exclusive_N[:, None] * (truth_N[:, None] == np.arange(labels_NL.shape[1])).astype(
        np.float64
    )
    right_NL = class_NL * right_N[:, None]
    occurs_L = class_NL.any(axis=0)
    n = int(exclusive_N.sum())
    rows = [
        MetricRow(metric=f"top1_{kind}", target="one class", n=n)
        for kind in ("accuracy", "balanced_accuracy")
    ]

    def statistic(counts_NR: Array) -> Array:
        drawn_RL = counts_NR.T @ class_NL
        right_RL = counts_NR.T @ right_NL
        within_RL = np.where(drawn_RL > 0, right_RL / np.maximum(drawn_RL, 1), np.nan)
        total_R = drawn_RL.sum(axis=1)
        accuracy_R = np.where(total_R > 0, right_RL.sum(axis=1) / np.maximum(total_R, 1), np.nan)
        return np.stack([accuracy_R, mean_over_labels(within_RL, occurs_L)], axis=1)

    return MetricGroup(rows, statistic)


def undefined_metrics(rows: Sequence[MetricRow]) -> MetricGroup:
    """Return rows without values, reported for their sizes."""
    return MetricGroup(rows, lambda counts_NR: np.full((counts_NR.shape[1], len(rows)), np.nan))


def label_row(metric: str, target: str, labels_N: Array, subgroup: str = "") -> MetricRow:
    """Return a row with the sizes of one label column (1, 0 or NaN)."""
    known = int((~np.isnan(labels_N)).sum())
    positive = int((labels_N == 1).sum())
    return MetricRow(metric=metric, target=target, subgroup=subgroup, n=known, n_positive=positive)


def _count_labelled(labels_NL: Array) -> int:
    return int((~np.isnan(labels_NL).all(axis=1)).sum())


def label_mean_metrics(metric: str, value_N: Array, labels: Sequence[str]) -> MetricGroup:
    """Return the mean over items ("overall"), over the labels' means ("macro"), and of each
    label, ignoring NaN.
    """
    names = sorted(set(labels))
    of_label_NL = np.array(labels)[:, None] == np.array(names)
    values_NK = np.concatenate(
        [value_N[:, None], np.where(of_label_NL, value_N[:, None], np.nan)], axis=1
    )
    means = mean_metrics(metric, values_NK, ["overall", *names])
    overall, *of_labels = means.rows
    fixed_L = defined_labels(means.statistic, len(value_N))[1:]

    def statistic(counts_NR: Array) -> Array:
        values_RK = means.statistic(counts_NR)
        macro_R1 = mean_over_labels(values_RK[:, 1:], fixed_L)[:, None]
        return np.concatenate([values_RK[:, :1], macro_R1, values_RK[:, 1:]], axis=1)

    return MetricGroup(
        [overall, dataclasses.replace(overall, target="macro"), *of_labels], statistic
    )


# AUROC within subgroups, and gaps between them.
#
# The AUROC of a label in a group needs at least `smallest` positives and as many negatives in the
# group; otherwise its row has no value. The mean of a group is taken over the labels that have a
# value in every group of the attribute, so that groups are compared on the same labels.
#
# A gap ("auroc_gap") is the highest AUROC of a group minus the lowest, for a label or the mean;
# its row names the two groups. They are chosen on all images and kept in the resamples: an
# interval that reaches below zero means that the data do not distinguish the groups. With more
# than two groups the choice biases gaps upwards.

Masks = Mapping[str, Mapping[str, NDArray[np.bool_]]]
"""Attribute -> group -> mask_N."""


def subgroup_metrics(
    scores_NL: Array, labels_NL: Array, names: Sequence[str], masks_of: Masks, smallest: int
) -> tuple[list[MetricGroup], dict[str, list[str]]]:
    """Return the AUROC of every group and the gaps, and attribute -> labels in the mean of its
    groups.

    An empty list of labels means that the attribute has no mean.
    """
    metric_groups: list[MetricGroup] = []
    labels_in_mean = {}
    for attribute, masks in masks_of.items():
        labels_by_group = {
            group: np.where(mask_N[:, None], labels_NL, np.nan) for group, mask_N in masks.items()
        }
        enough = {group: _enough_L(labels, smallest) for group, labels in labels_by_group.items()}
        reported_L = np.any(list(enough.values()), axis=0)
        everywhere_L = np.all(list(enough.values()), axis=0)
        labels_in_mean[attribute] = [
            name for name, has_enough in zip(names, everywhere_L, strict=True) if has_enough
        ]
        means = {"macro": labels_in_mean[attribute]} if everywhere_L.any() else {}
        for group, group_labels_NL in labels_by_group.items():
            subgroup = f"{attribute}: {group}"
            large = np.flatnonzero(enough[group]).tolist()
            small = np.flatnonzero(reported_L & ~enough[group]).tolist()
            if large:
                columns = (
                    scores_NL[:, large],
                    group_labels_NL[:, large],
                    [names[index] for index in large],
                )
                metric_groups.append(
                    ranking_metrics("auroc", *columns, means=means, subgroup=subgroup)
                )
            if small:
                rows = [
                    label_row("auroc", names[index], group_labels_NL[:, index], subgroup)
                    for index in small
                ]
                metric_groups.append(undefined_metrics(rows))
        targets = {
            name: [index]
            for index, name in enumerate(names)
            if sum(enough_L[index] for enough_L in enough.values()) > 1
        }
        if means:
            targets["macro"] = np.flatnonzero(everywhere_L).tolist()
        metric_groups += [
            _gap_metric(attribute, target, columns, scores_NL, labels_by_group, enough)
            for target, columns in targets.items()
        ]
    return metric_groups, labels_in_mean


def _gap_metric(
    attribute: str,
    target: str,
    columns: Sequence[int],
    scores_NL: Array,
    labels_by_group: Mapping[str, Array],
    enough: Mapping[str, NDArray[np.bool_]],
) -> MetricGroup:
    """Return the gap of one label, or of the mean over several, between the groups with enough
    images of all.
    """

    def mean_of(labels_NL: Array) -> Callable[[Array], Array]:
        ranked = ranked_columns(scores_NL[:, columns], labels_NL[:, columns])
        all_L = np.ones(len(ranked), dtype=np.bool_)
        return lambda counts_NR: mean_over_labels(
            np.stack([c.auroc_R(counts_NR) for c in ranked], axis=1), all_L
        )

    groups = {
        group: mean_of(labels)
        for group, labels in labels_by_group.items()
        if enough[group][columns].all()
    }
    values = {
        group: float(statistic(np.ones((len(scores_NL), 1)))[0])
        for group, statistic in groups.items()
    }
    best = max(values, key=values.__getitem__)
    worst = min(values, key=values.__getitem__)
    both_NL = np.concatenate(
        [labels_by_group[best][:, columns], labels_by_group[worst][:, columns]]
    )
    row = MetricRow(
        metric="auroc_gap",
        target=target,
        subgroup=f"{attribute}: {best} - {worst}",
        n=int((~np.isnan(both_NL).all(axis=1)).sum()),
        n_positive=int((both_NL == 1).sum()) if len(columns) == 1 else None,
    )
    return MetricGroup(
        [row], lambda counts_NR: (groups[best](counts_NR) - groups[worst](counts_NR))[:, None]
    )


def _enough_L(labels_NL: Array, smallest: int) -> NDArray[np.bool_]:
    return ((labels_NL == 1).sum(axis=0) >= smallest) & ((labels_NL == 0).sum(axis=0) >= smallest)


# Subgroups by view, projection, sex and age band.
#
# Every line of a `predictions.jsonl` about an image holds its groups as "subgroups" (attribute ->
# group), from which `medvl compare` computes the metrics of subgroups.
# `medvl.eval.core.metric_rows` has those of classifiers.

_AGE_BANDS = ((40, "under 40"), (60, "40-59"), (80, "60-79"))


def _projection(sample: Sample) -> str | None:
    words = (sample.view or "").upper().split()
    return next((projection for projection in ("PA", "AP") if projection in words), None)


def _age_band(sample: Sample) -> str | None:
    if sample.age is None:
        return None
    return next((band for end, band in _AGE_BANDS if sample.age < end), "80 and over")


ATTRIBUTES: Mapping[str, Callable[[Sample], str | None]] = {
    "view": lambda sample: frontal_or_lateral(sample.view),
    "projection": _projection,
    "sex": lambda sample: sample.sex,
    "age": _age_band,
}


def subgroups_of(sample: Sample) -> dict[str, str]:
    """Return attribute -> group of a sample, without the attributes that it does not have."""
    groups = {attribute: group_of(sample) for attribute, group_of in ATTRIBUTES.items()}
    return {attribute: group for attribute, group in groups.items() if group is not None}


def subgroup_masks(groups: Sequence[Mapping[str, str]]) -> dict[str, dict[str, NDArray[np.bool_]]]:
    """Return attribute -> group -> mask_N of items, for the attributes that split them into two
    or more groups.
    """
    result = {}
    for attribute in dict.fromkeys(
        [*ATTRIBUTES, *(name for of_item in groups for name in of_item)]
    ):
        of_item_N = np.array([of_item.get(attribute, "") for of_item in groups])
        names = sorted(set(of_item_N.tolist()) - {""}, key=_age_order)
        if len(names) > 1:
            result[attribute] = {name: of_item_N == name for name in names}
    return result


def _age_order(name: str) -> tuple[bool, str]:
    return not name.startswith("under"), name
