"""Volumes for tests, written as DICOM series of one file a slice, and as enhanced files."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydicom.dataset import Dataset
from pydicom.uid import UID

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


def write_enhanced(
    path: Path,
    hu_DHW: np.ndarray,
    *,
    step: float = 1.5,
    order: Sequence[int] | None = None,
    slopes: Sequence[float] = (1.0,),
    frames: Mapping[int, Mapping[str, Any]] | None = None,
    shared: Mapping[str, Any] | None = None,
    dimensions: Sequence[int] = (0x00209056, 0x00209057),
    syntax: str | None = None,
    **common: Any,
) -> Path:
    """Write an enhanced CT or MR file, whose frames are slices.

    Args:
        path: written.
        hu_DHW: Hounsfield units, z to the head.
        step: mm between slices.
        order: index of the slice of each frame; None: from feet to head.
        slopes: of the frames, in turns; each has its own intercept.
        frames: elements of the groups of single frames, by the index of their slice; in place of
            the defaults of the same name, None for none.
        shared: elements of the groups of all frames, likewise.
        dimensions: elements that DimensionIndexValues stand for.
        syntax: transfer syntax to compress to.
        common: elements of the file.
    """
    order = range(len(hu_DHW)) if order is None else order
    stored, groups = [], []
    for number, index in enumerate(order):
        slope = slopes[number % len(slopes)]
        intercept = -1024.0 - 8 * number
        stored.append(np.rint((hu_DHW[index] - intercept) / slope).astype(np.uint16))
        elements = {
            "ImagePositionPatient": [-10.0, -20.0, 100 + step * index],
            "RescaleSlope": slope,
            "RescaleIntercept": intercept,
            "RescaleType": "HU",
            "FrameType": ["ORIGINAL", "PRIMARY", "AXIAL", "NONE"],
            "StackID": "1",
            "DimensionIndexValues": [1, index + 1, *[1] * (len(dimensions) - 2)],
        }
        groups.append(_group({**elements, **((frames or {}).get(index) or {})}))
    of_all = {"ImageOrientationPatient": list(AXIAL), "PixelSpacing": [0.7, 0.8]}
    defaults = {
        "Modality": "CT",
        "SeriesInstanceUID": "1.2.826.1",
        "PatientName": "SECRET^NAME",
        "NumberOfFrames": len(stored),
        "SharedFunctionalGroupsSequence": [_group({**of_all, **(shared or {})})],
        "PerFrameFunctionalGroupsSequence": groups,
        "DimensionIndexSequence": [_dataset({"DimensionIndexPointer": tag}) for tag in dimensions],
    }
    data = image_dataset(np.stack(stored), **{**defaults, **common})
    if syntax is not None:
        data.compress(UID(syntax))
    return write_dataset(path, data)


_SEQUENCES = {
    "ImagePositionPatient": "PlanePositionSequence",
    "ImageOrientationPatient": "PlaneOrientationSequence",
    "PixelSpacing": "PixelMeasuresSequence",
    "RescaleSlope": "PixelValueTransformationSequence",
    "RescaleIntercept": "PixelValueTransformationSequence",
    "RescaleType": "PixelValueTransformationSequence",
    "FrameType": "CTImageFrameTypeSequence",
}
"""Sequences of functional groups; of others, FrameContentSequence."""


def _group(elements: Mapping[str, Any]) -> Dataset:
    """Return a functional group with each element in its sequence."""
    items: dict[str, dict[str, Any]] = {}
    for name, value in elements.items():
        if value is not None:
            items.setdefault(_SEQUENCES.get(name, "FrameContentSequence"), {})[name] = value
    return _dataset({name: [_dataset(item)] for name, item in items.items()})


def _dataset(elements: Mapping[str, Any]) -> Dataset:
    data = Dataset()
    for name, value in elements.items():
        setattr(data, name, value)
    return data
