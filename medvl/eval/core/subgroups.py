"""Subgroups by view, projection, sex and age band.

Every line of a `predictions.jsonl` about an image holds its groups as "subgroups" (attribute -> group), from which
`medvl compare` computes the metrics of subgroups. `medvl.eval.core.subgroup_metrics` has those of classifiers.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from medvl.data.views import frontal_or_lateral
from medvl.schema import Sample

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
    """Return attribute -> group -> mask_N of items, for the attributes that split them into two or more groups."""
    result = {}
    for attribute in dict.fromkeys([*ATTRIBUTES, *(name for of_item in groups for name in of_item)]):
        of_item_N = np.array([of_item.get(attribute, "") for of_item in groups])
        names = sorted(set(of_item_N.tolist()) - {""}, key=_age_order)
        if len(names) > 1:
            result[attribute] = {name: of_item_N == name for name in names}
    return result


def _age_order(name: str) -> tuple[bool, str]:
    return not name.startswith("under"), name
