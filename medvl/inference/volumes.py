"""Heat maps of a text through the slices of a volume: values, pictures and NIfTI files."""

import gzip
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from numpy.typing import NDArray

from medvl.common.files import write_atomic
from medvl.data.volumes.organs import OrganVolume, organ_box
from medvl.data.volumes.resampling import apply_window
from medvl.data.volumes.transform import VolumeTransform, embedded_parts
from medvl.data.volumes.volume import Volume
from medvl.errors import EvaluationError, VolumeError
from medvl.eval.grounding.heatmaps import VolumeMaps
from medvl.eval.zero_shot_classification.prompts import ClassPrompts
from medvl.models.base import System, evaluating
from medvl.models.heatmaps import on_volume

_PLANES = ("axial", "coronal", "sagittal")
_PLANE_SIDE = 320
_STRIP = 18
_OPACITY = 0.7
_UNSEEN = 0.35
"""Brightness of voxels that the model did not get."""


def reads_volumes(model: System) -> bool:
    """Return whether a model takes volumes in place of images."""
    transform: Any = model.transform
    return isinstance(transform, VolumeTransform)


def volume_heatmap(
    model: System, volume: Any, text: str, shape: Sequence[int] | None = None
) -> NDArray[np.float32]:
    """Return the heat map of a text in a volume: (D, H, W) float32 over its voxels, in canonical
    orientation (z to the head, y to the back, x to the left), NaN outside of the model's cut.

    Values are those of `VolumeMaps` (`medvl.eval.grounding.heatmaps`): the cosine of each patch in
    most systems, its share of the similarity in fVLM. Larger is warmer; values of two volumes or
    models cannot be compared.

    Args:
        model: a dual-encoder of volumes.
        volume: a NIfTI file, the folder of a DICOM series, a `Volume`, or an int16 array (D, H, W)
            of the shards' spacing; for a model that reads masks of organs, one of both files, or
            an `OrganVolume`.
        text: a phrase.
        shape: number of values along (z, y, x), evenly spread over the volume; None: its voxels.

    Raises EvaluationError ("unsupported") for a model without patches in the space of texts, and as
    the model's transform.
    """
    transform: Any = model.transform
    spacing = None
    if isinstance(volume, np.ndarray | OrganVolume):
        stored = volume
        sides = (volume.hu_DHW if isinstance(volume, OrganVolume) else volume).shape
    else:
        original = transform.original(volume)
        sides, spacing = original.hu_DHW.shape, original.spacing
        stored = transform.read(volume if transform.organs else original)
    box = organ_box(stored.organs_DHW) if isinstance(stored, OrganVolume) else None
    shape = shape or sides
    extents = [
        (start * count / side, length * count / side)
        for (start, length), count, side in zip(
            transform.extents(sides, spacing, box), shape, sides, strict=True
        )
    ]
    with torch.no_grad(), evaluating(model):
        maps = VolumeMaps(model, {text: ClassPrompts((text,))}, normalize=True)
        [patches_dhwE] = maps.patches(*embedded_parts(transform(stored).to(model.device)))
        map_DHW = on_volume(maps.values(patches_dhwE, [text]), extents, shape)[0]
    values: NDArray[np.float32] = map_DHW.cpu().numpy()
    return values


def peak_of(map_DHW: NDArray[np.float32]) -> tuple[int, int, int]:
    """Return the voxel (z, y, x) of the highest value. Raises EvaluationError ("empty") where all
    are NaN.
    """
    if not np.isfinite(map_DHW).any():
        raise EvaluationError("the model's cut shows nothing of the volume", "empty")
    z, y, x = np.unravel_index(int(np.nanargmax(map_DHW)), map_DHW.shape)
    return int(z), int(y), int(x)


def draw_volume_map(
    volume: Volume, map_DHW: NDArray[np.float32], window: tuple[float, float]
) -> NDArray[np.uint8]:
    """Return a picture (H, W, 3): the axial, coronal and sagittal slice through the highest value,
    above without and below with the map.

    Colour begins at the mean of the map. Slices are drawn as radiologists see them: the patient's
    left on the right, the head up.

    Args:
        volume: values and spacing.
        map_DHW: `volume_heatmap` over the same voxels.
        window: values that are black and white.
    """
    import matplotlib

    peak = peak_of(map_DHW)
    mean = float(np.nanmean(map_DHW))
    high = float(np.nanmax(map_DHW))
    columns = []
    for axis, name in enumerate(_PLANES):
        grey_HW = apply_window(_plane(volume.hu_DHW, axis, peak[axis]), *window)
        map_HW = _plane(map_DHW, axis, peak[axis])
        seen_HW = np.isfinite(map_HW)
        heat_HW = np.clip((np.where(seen_HW, map_HW, mean) - mean) / max(high - mean, 1e-12), 0, 1)
        sides = [step for place, step in enumerate(volume.spacing) if place != axis]
        size = _picture_size(grey_HW.shape, sides)
        grey, heat, seen = (
            cv2.resize(each.astype(np.float32), size, interpolation=cv2.INTER_LINEAR)
            for each in (grey_HW, heat_HW, seen_HW)
        )
        plain_HWC = np.repeat(grey[:, :, None], 3, axis=2)
        shade = (_OPACITY * heat**0.6)[:, :, None]
        colour_HWC = matplotlib.colormaps["YlOrRd"](0.2 + 0.65 * heat)[:, :, :3]
        drawn_HWC = (1 - shade) * plain_HWC + shade * colour_HWC
        drawn_HWC *= (_UNSEEN + (1 - _UNSEEN) * seen)[:, :, None]
        title = f"{name} {peak[axis] + 1}/{volume.hu_DHW.shape[axis]}"
        columns.append(_column(title, (plain_HWC, drawn_HWC)))
    height = max(len(column) for column in columns)
    padded = [np.pad(each, ((0, height - len(each)), (0, 4), (0, 0))) for each in columns]
    picture: NDArray[np.uint8] = np.concatenate(padded, axis=1)
    return picture


def _plane(values_DHW: NDArray[Any], axis: int, place: int) -> NDArray[Any]:
    """Return one slice; coronal and sagittal ones with the head up."""
    plane_HW = values_DHW.take(place, axis)
    return plane_HW if axis == 0 else plane_HW[::-1]


def _picture_size(shape: tuple[int, ...], sides: list[float]) -> tuple[int, int]:
    """Return (width, height) in pixels of a plane with square pixels."""
    height, width = (count * step for count, step in zip(shape, sides, strict=True))
    scale = _PLANE_SIDE / max(height, width)
    return max(1, round(width * scale)), max(1, round(height * scale))


def _column(title: str, pictures: tuple[NDArray[Any], ...]) -> NDArray[np.uint8]:
    width = pictures[0].shape[1]
    strip = np.zeros((_STRIP, width, 3), np.uint8)
    cv2.putText(
        strip, title, (2, 13), cv2.FONT_HERSHEY_SIMPLEX, 0.4, (255, 255, 255), 1, cv2.LINE_AA
    )
    shown = [np.rint(255 * np.clip(each, 0, 1)).astype(np.uint8) for each in pictures]
    return np.concatenate([strip, *shown])


def write_map(
    path: Path, map_DHW: NDArray[np.float32], volume: Volume, source: Path | None = None
) -> None:
    """Write a map as a NIfTI file, float32, NaN outside of the model's cut.

    Args:
        path: ends in .nii.gz.
        map_DHW: `volume_heatmap` over the voxels of `volume`.
        volume: the original volume.
        source: its NIfTI file, whose voxels and affine the map then has; None (a DICOM series):
            axes along the patient's, from the volume's origin; without one, its centre is at 0.

    Raises VolumeError ("malformed") where the header of `source` cannot be read again.
    """
    import nibabel
    from nibabel.orientations import (
        apply_orientation,
        axcodes2ornt,
        io_orientation,
        ornt_transform,
    )

    map_XYZ = map_DHW.transpose(2, 1, 0)
    if source is None:
        x, y, z = volume.spacing[::-1]
        affine = np.diag([-x, -y, z, 1.0])
        if volume.origin is None:
            affine[:3, 3] = -(affine[:3, :3] @ (np.array(map_XYZ.shape) - 1) / 2)
        else:  # DICOM's x and y are those of NIfTI in the opposite direction
            z, y, x = volume.origin
            affine[:3, 3] = -x, -y, z
    else:
        try:
            loaded: Any = nibabel.load(source)
            affine = np.asarray(loaded.affine, np.float64)
        except (nibabel.filebasedimages.ImageFileError, OSError, ValueError) as error:
            raise VolumeError(f"{source}: the header cannot be read", "malformed") from error
        turn = ornt_transform(axcodes2ornt(("L", "P", "S")), io_orientation(affine))
        map_XYZ = apply_orientation(map_XYZ, turn)
    image = nibabel.Nifti1Image(np.ascontiguousarray(map_XYZ, np.float32), affine)
    image.header.set_xyzt_units("mm")
    write_atomic(path, gzip.compress(image.to_bytes(), 3, mtime=0))
