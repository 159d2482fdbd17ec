"""Exchange of left and right in the names of labels, boxes and masks, so that those of a mirrored image stay true.

    mirror_labels(sample)       # {"left effusion": 1, "right_rib": 0} becomes {"right effusion": 1, "left_rib": 0}

Names are exchanged as texts are (`medvl.data.reports.laterality`), with underscores read as blanks.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

from medvl.data.reports.laterality import swap_laterality
from medvl.schema import Sample

_REGIONS = ("boxes", "masks")


def texts_and_names(sample: Sample) -> Iterator[str]:
    """Yield the texts of a sample, and the names of its labels, boxes and masks, which may name a side too."""
    yield from sample.sections.values()
    regions = {entry["label"] for entry in _regions(sample)}
    yield from (name.replace("_", " ") for name in (*sample.labels, *sorted(regions)))


def mirror_labels(sample: Sample) -> Sample:
    """Return the sample with the names of its labels, boxes and masks as in the mirrored image; texts are kept."""
    labels = {_mirror_name(name): value for name, value in sample.labels.items()}
    if not any(_mirror_name(entry["label"]) != entry["label"] for entry in _regions(sample)):
        return dataclasses.replace(sample, labels=labels)
    regions = {
        kind: [{**entry, "label": _mirror_name(entry["label"])} if _is_named(entry) else entry for entry in entries]
        for kind in _REGIONS
        if isinstance(entries := sample.extra.get(kind), list)
    }
    return dataclasses.replace(sample, labels=labels, extra={**sample.extra, **regions})


def _regions(sample: Sample) -> list[Mapping[str, Any]]:
    """Return the boxes and masks that have a name; malformed ones are reported where targets are made of them."""
    found: list[Mapping[str, Any]] = []
    for kind in _REGIONS:
        entries = sample.extra.get(kind)
        found += [entry for entry in entries if _is_named(entry)] if isinstance(entries, list) else []
    return found


def _is_named(entry: Any) -> bool:
    return isinstance(entry, Mapping) and isinstance(entry.get("label"), str)


@functools.lru_cache(1 << 12)
def _mirror_name(name: str) -> str:
    plain = name.replace("_", " ")
    swapped = swap_laterality(plain)
    if swapped == plain:
        return name
    return swapped if " " in name else swapped.replace(" ", "_")
