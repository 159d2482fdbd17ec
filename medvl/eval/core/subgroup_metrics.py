"""AUROC within subgroups, and gaps between them.

The AUROC of a label in a group needs at least `smallest` positives and as many negatives in the group; otherwise its
row has no value. The mean of a group is taken over the labels that have a value in every group of the attribute, so
that groups are compared on the same labels.

A gap ("auroc_gap") is the highest AUROC of a group minus the lowest, for a label or the mean; its row names the two
groups. They are chosen on all images and kept in the resamples: an interval that reaches below zero means that the
data do not distinguish the groups. With more than two groups the choice biases gaps upwards.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from medvl.eval.core.bootstrap import mean_over_labels, ranked_columns
from medvl.eval.core.metric_rows import MetricGroup, MetricRow, label_row, ranking_metrics, undefined_metrics
from medvl.eval.core.metrics import Array

Masks = Mapping[str, Mapping[str, NDArray[np.bool_]]]
"""Attribute -> group -> mask_N."""


def subgroup_metrics(
    scores_NL: Array, labels_NL: Array, names: Sequence[str], masks_of: Masks, smallest: int
) -> tuple[list[MetricGroup], dict[str, list[str]]]:
    """Return the AUROC of every group and the gaps, and attribute -> labels in the mean of its groups.

    An empty list of labels means that the attribute has no mean.
    """
    metric_groups: list[MetricGroup] = []
    labels_in_mean = {}
    for attribute, masks in masks_of.items():
        labels_by_group = {group: np.where(mask_N[:, None], labels_NL, np.nan) for group, mask_N in masks.items()}
        enough = {group: _enough_L(labels, smallest) for group, labels in labels_by_group.items()}
        reported_L = np.any(list(enough.values()), axis=0)
        everywhere_L = np.all(list(enough.values()), axis=0)
        labels_in_mean[attribute] = [name for name, kept in zip(names, everywhere_L, strict=True) if kept]
        means = {"macro": labels_in_mean[attribute]} if everywhere_L.any() else {}
        for group, group_labels_NL in labels_by_group.items():
            subgroup = f"{attribute}: {group}"
            kept = np.flatnonzero(enough[group]).tolist()
            small = np.flatnonzero(reported_L & ~enough[group]).tolist()
            if kept:
                columns = scores_NL[:, kept], group_labels_NL[:, kept], [names[index] for index in kept]
                metric_groups.append(ranking_metrics("auroc", *columns, means=means, subgroup=subgroup))
            if small:
                rows = [label_row("auroc", names[index], group_labels_NL[:, index], subgroup) for index in small]
                metric_groups.append(undefined_metrics(rows))
        targets = {
            name: [index] for index, name in enumerate(names) if sum(kept[index] for kept in enough.values()) > 1
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
    """Return the gap of one label, or of the mean over several, between the groups with enough images of all."""

    def mean_of(labels_NL: Array) -> Callable[[Array], Array]:
        ranked = ranked_columns(scores_NL[:, columns], labels_NL[:, columns])
        all_L = np.ones(len(ranked), dtype=np.bool_)
        return lambda counts_NR: mean_over_labels(np.stack([c.auroc_R(counts_NR) for c in ranked], axis=1), all_L)

    groups = {group: mean_of(labels) for group, labels in labels_by_group.items() if enough[group][columns].all()}
    values = {group: float(statistic(np.ones((len(scores_NL), 1)))[0]) for group, statistic in groups.items()}
    best, worst = max(values, key=values.__getitem__), min(values, key=values.__getitem__)
    both_NL = np.concatenate([labels_by_group[best][:, columns], labels_by_group[worst][:, columns]])
    row = MetricRow(
        metric="auroc_gap",
        target=target,
        subgroup=f"{attribute}: {best} - {worst}",
        n=int((~np.isnan(both_NL).all(axis=1)).sum()),
        n_positive=int((both_NL == 1).sum()) if len(columns) == 1 else None,
    )
    return MetricGroup([row], lambda counts_NR: (groups[best](counts_NR) - groups[worst](counts_NR))[:, None])


def _enough_L(labels_NL: Array, smallest: int) -> NDArray[np.bool_]:
    return ((labels_NL == 1).sum(axis=0) >= smallest) & ((labels_NL == 0).sum(axis=0) >= smallest)
