"""Volumes of shards: how they are stored, and the fields of their samples."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from medvl.data.volumes.volume import Volume

ORIENTATION = "LPS"
"""Axes (z, y, x) to the head, the back and the left, in DICOM's letters for x, y and z."""


def volume_fields(volume: Volume) -> dict[str, Any]:
    """Return the fields of `Sample.extra` that describe a stored volume."""
    return {
        "spacing_mm": [round(step, 6) for step in volume.spacing],
        "shape": list(volume.hu_DHW.shape),
        "orientation": ORIENTATION,
        "modality": volume.modality,
    }


def stored_volume(values: np.ndarray, extra: Mapping[str, Any]) -> Volume:
    """Return a decoded volume with the spacing and modality of its sample.

    Raises ValueError where the sample has no spacing of three numbers.
    """
    spacing = [float(step) for step in extra.get("spacing_mm") or ()]
    if len(spacing) != 3:
        raise ValueError("a volume without spacing_mm")
    modality = extra.get("modality")
    return Volume(
        hu_DHW=values,
        spacing=(spacing[0], spacing[1], spacing[2]),
        modality=modality if isinstance(modality, str) else None,
        is_hounsfield=modality == "CT",
    )
