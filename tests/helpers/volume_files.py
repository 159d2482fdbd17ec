"""Volumes for tests, written as NIfTI files and as DICOM series."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from helpers.dicom_builder import image_dataset, write_dataset

AXIAL = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)


def canonical(shape: tuple[int, int, int] = (5, 6, 7), seed: int = 0) -> np.ndarray:
    """Return int16 values without any symmetry, in -1000..1000."""
    return np.random.default_rng(seed).integers(-1000, 1000, shape).astype(np.int16)


def write_slice(
    path: Path, values_HW: np.ndarray, position: tuple[float, float, float], **fields: Any
) -> Path:
    """Write one CT slice of Hounsfield units, stored with an intercept of -1024."""
    slope = float(fields.get("RescaleSlope", 1))
    intercept = float(fields.get("RescaleIntercept", -1024))
    stored = np.rint((values_HW - intercept) / slope).astype(np.uint16)
    defaults = {
        "Modality": "CT",
        "SeriesInstanceUID": "1.2.826.1",
        "ImageOrientationPatient": list(AXIAL),
        "ImagePositionPatient": [float(x) for x in position],
        "PixelSpacing": [0.7, 0.8],
        "SliceThickness": 5,
        "RescaleSlope": slope,
        "RescaleIntercept": intercept,
    }
    return write_dataset(path, image_dataset(stored, **{**defaults, **fields}))


def write_series(
    folder: Path,
    hu_DHW: np.ndarray,
    *,
    step: float = 1.5,
    fields: Mapping[int, Mapping[str, Any]] | None = None,
    seed: int = 0,
    **common: Any,
) -> list[Path]:
    """Write slices (z to the head) under names in random order; InstanceNumber falls with z.

    Args:
        folder: made if it does not exist.
        hu_DHW: Hounsfield units.
        step: mm between slices.
        fields: header fields of single slices, by their index.
        seed: of the order of the names.
        common: header fields of all slices.

    Returns:
        The path of each slice, in the order of `hu_DHW`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = np.random.default_rng(seed).permutation(len(hu_DHW))
    return [
        write_slice(
            folder / f"{names[index]:03d}.dcm",
            values_HW,
            (-10.0, -20.0, 100 + step * index),
            **{
                "InstanceNumber": len(hu_DHW) - index,
                **common,
                **((fields or {}).get(index) or {}),
            },
        )
        for index, values_HW in enumerate(hu_DHW)
    ]
