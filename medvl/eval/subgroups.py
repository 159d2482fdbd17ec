"""Who is in the test set: masks by view, projection, sex and age band, and AUROC within each.

A cell (label and group) is reported when the group holds at least `smallest` positives and as many negatives of the
label; otherwise its row stands there without a value. The mean of a group is taken over the labels that can be
reported in every group of the attribute, so that groups are compared on the same labels.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from medvl.eval.metrics import Array
from medvl.eval.rows import Block, empty_block, label_row, ranking_block
from medvl.schema import Sample

_LATERAL = ("LATERAL", "LL", "RL", "LLD", "RLD")
_FRONTAL = ("FRONTAL", "PA", "AP")
_AGE_BANDS = ((40, "under 40"), (60, "40-59"), (80, "60-79"))


def _view(sample: Sample) -> str | None:
    words = (sample.view or "").upper().split()
    if any(word in _LATERAL for word in words):
        return "lateral"
    return "frontal" if any(word in _FRONTAL for word in words) else None


def _projection(sample: Sample) -> str | None:
    words = (sample.view or "").upper().split()
    return next((projection for projection in ("PA", "AP") if projection in words), None)


def _age_band(sample: Sample) -> str | None:
    if sample.age is None:
        return None
    return next((band for end, band in _AGE_BANDS if sample.age < end), "80 and over")


ATTRIBUTES: Mapping[str, Callable[[Sample], str | None]] = {
    "view": _view,
    "projection": _projection,
    "sex": lambda sample: sample.sex,
    "age": _age_band,
}


def subgroups(samples: Sequence[Sample]) -> dict[str, dict[str, NDArray[np.bool_]]]:
    """Attribute -> group -> mask_N, for the attributes that split these samples into two groups or more."""
    result = {}
    for attribute, group_of in ATTRIBUTES.items():
        of_sample = np.array([group_of(sample) or "" for sample in samples])
        names = sorted(set(of_sample.tolist()) - {""}, key=_age_order)
        if len(names) > 1:
            result[attribute] = {name: of_sample == name for name in names}
    return result


def _age_order(name: str) -> tuple[bool, str]:
    return not name.startswith("under"), name


def subgroup_blocks(
    scores_NL: Array, labels_NL: Array, names: Sequence[str], samples: Sequence[Sample], smallest: int
) -> tuple[list[Block], dict[str, list[str]]]:
    """AUROC rows of every group, and attribute -> labels in the mean of its groups (empty: no mean)."""
    blocks: list[Block] = []
    labels_in_mean = {}
    for attribute, masks in subgroups(samples).items():
        judged = {group: np.where(mask_N[:, None], labels_NL, np.nan) for group, mask_N in masks.items()}
        enough = {group: _enough_L(labels, smallest) for group, labels in judged.items()}
        reported_L = np.any(list(enough.values()), axis=0)
        everywhere_L = np.all(list(enough.values()), axis=0)
        labels_in_mean[attribute] = [name for name, kept in zip(names, everywhere_L, strict=True) if kept]
        means = {"macro": labels_in_mean[attribute]} if everywhere_L.any() else {}
        for group, group_labels_NL in judged.items():
            subgroup = f"{attribute}: {group}"
            kept = np.flatnonzero(enough[group]).tolist()
            small = np.flatnonzero(reported_L & ~enough[group]).tolist()
            if kept:
                columns = scores_NL[:, kept], group_labels_NL[:, kept], [names[index] for index in kept]
                blocks.append(ranking_block("auroc", *columns, means=means, subgroup=subgroup))
            if small:
                rows = [label_row("auroc", names[index], group_labels_NL[:, index], subgroup) for index in small]
                blocks.append(empty_block(rows))
    return blocks, labels_in_mean


def _enough_L(labels_NL: Array, smallest: int) -> NDArray[np.bool_]:
    return ((labels_NL == 1).sum(axis=0) >= smallest) & ((labels_NL == 0).sum(axis=0) >= smallest)
