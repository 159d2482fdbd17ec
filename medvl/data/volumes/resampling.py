"""Volumes at another spacing and size, and windows of their values."""

import dataclasses
from collections.abc import Sequence

import cv2
import numpy as np

from medvl.data.volumes.volume import AIR, DEFAULT_LIMITS, Volume, padding_of, to_int16
from medvl.errors import ConfigError, VolumeError

_UNFILTERED = 1.5
"""Ratio of spacings up to which no filter is needed."""
_SLAB = 32


def resample_volume(volume: Volume, spacing: Sequence[float], *, antialias: bool = True) -> Volume:
    """Interpolate a volume linearly to another spacing.

    Voxel centres are half a voxel from the border (`align_corners=False`), and sides are
    `int(side * old / new)` as in CT-CLIP and HLIP. Values of CT below -1024 are padding and become
    -1024 first. Works slice by slice: the largest temporary array has the new height and width.

    Args:
        volume: source.
        spacing: millimetres along (z, y, x).
        antialias: smooth an axis before it is shrunk by more than 1.5, by a Gaussian whose standard
            deviation is (ratio - 1) / 2 voxels. False as published (CT-CLIP, HLIP, COLIPRI), which
            drops voxels.

    Returns:
        The volume with its exact spacing, which differs from `spacing` by the rounding of sides.

    Raises:
        ConfigError: "out_of_range" for `spacing`.
        VolumeError: "too_small" for a volume without a voxel at this spacing, "too_large" for one
            with more than `VolumeLimits.voxels`.
    """
    from scipy import ndimage

    shape = volume.hu_DHW.shape
    goal, sides = _sides_at(volume, spacing)
    sigmas = [
        (new / old - 1) / 2 if antialias and new / old > _UNFILTERED else 0.0
        for old, new in zip(volume.spacing, goal, strict=True)
    ]
    depth, height, width = sides
    planes_DHW = np.empty((shape[0], height, width), np.float32)
    least = AIR if volume.modality in (None, "CT") else np.iinfo(np.int16).min
    for source_HW, plane_HW in zip(volume.hu_DHW, planes_DHW, strict=True):
        values_HW = np.maximum(source_HW, least).astype(np.float32)
        for axis, sigma in enumerate(sigmas[1:]):
            if sigma:
                values_HW = ndimage.gaussian_filter1d(values_HW, sigma, axis, mode="nearest")
        plane_HW[:] = cv2.resize(values_HW, (width, height), interpolation=cv2.INTER_LINEAR)
    hu_DHW = np.empty((depth, height, width), np.int16)
    for start in range(0, height, _SLAB):
        slab = planes_DHW[:, start : start + _SLAB]
        if sigmas[0]:
            slab = ndimage.gaussian_filter1d(slab, sigmas[0], 0, mode="nearest")
        hu_DHW[:, start : start + _SLAB] = to_int16(_interpolate_depth(slab, depth))
    exact = [
        old * before / after
        for old, before, after in zip(volume.spacing, shape, sides, strict=True)
    ]
    return dataclasses.replace(
        volume, hu_DHW=hu_DHW, spacing=(exact[0], exact[1], exact[2]), origin=None
    )


def _sides_at(volume: Volume, spacing: Sequence[float]) -> tuple[tuple[float, ...], list[int]]:
    """Return a spacing, and a volume's sides at it. Raises as `resample_volume`."""
    goal = tuple(float(step) for step in spacing)
    if len(goal) != 3 or not all(0 < step < float("inf") for step in goal):
        raise ConfigError(
            f"expected spacing as three numbers of mm above 0, got {tuple(spacing)}",
            "out_of_range",
            field="spacing",
        )
    sides = resampled_sides(volume.hu_DHW.shape, volume.spacing, goal)
    if min(sides) < 1:
        raise VolumeError(
            f"expected a voxel or more along each axis at {goal} mm, got {sides}; leave the volume "
            "out, or choose a smaller spacing",
            "too_small",
            field="spacing",
        )
    depth, height, width = sides
    if max(depth, len(volume.hu_DHW)) * height * width > DEFAULT_LIMITS.voxels:
        raise VolumeError(
            f"a spacing of {volume.spacing} mm gives {sides} voxels at {goal} mm, over the limit "
            f"of {DEFAULT_LIMITS.voxels}; correct the spacing of the file",
            "too_large",
            field="spacing",
        )
    return goal, sides


def resample_labels(labels_DHW: np.ndarray, volume: Volume, spacing: Sequence[float]) -> np.ndarray:
    """Return labels on the grid of a volume as `resample_volume` resamples the volume: of each new
    voxel, those of the old one that holds its centre.

    Raises as `resample_volume`.
    """
    _, sides = _sides_at(volume, spacing)
    places = [
        ((np.arange(after) + 0.5) * before / after).astype(np.int64)
        for before, after in zip(labels_DHW.shape, sides, strict=True)
    ]
    resampled: np.ndarray = labels_DHW[np.ix_(*places)]
    return resampled


def resampled_sides(shape: Sequence[int], old: Sequence[float], new: Sequence[float]) -> list[int]:
    """Return the voxels along each axis after `resample_volume`, of spacings in mm."""
    # 1e-6: 3.0 / 0.1 voxels are 30, not 29
    return [
        int(side * before / after + 1e-6)
        for side, before, after in zip(shape, old, new, strict=True)
    ]


def _interpolate_depth(slab_DHW: np.ndarray, depth: int) -> np.ndarray:
    """Interpolate along the first axis, with half-voxel centres."""
    before = len(slab_DHW)
    places = np.clip((np.arange(depth) + 0.5) * before / depth - 0.5, 0, before - 1)
    lower = np.minimum(places.astype(np.int64), max(before - 2, 0))
    upper = np.minimum(lower + 1, before - 1)
    share = (places - lower).astype(np.float32)[:, None, None]
    mixed: np.ndarray = slab_DHW[lower] * (1 - share) + slab_DHW[upper] * share
    return mixed


def crop_or_pad(volume: Volume, size: Sequence[int], *, value: int | None = None) -> Volume:
    """Cut a volume around its centre, or pad it, to a number of voxels along (z, y, x).

    Args:
        volume: source.
        size: voxels along (z, y, x).
        value: that of padding; None: -1024 for CT and volumes without a modality, else the least
            value of the volume.

    Raises:
        ConfigError: "out_of_range" for `size`.
    """
    if len(size) != 3 or min(size) < 1:
        raise ConfigError(
            f"expected size as three numbers above 0, got {tuple(size)}",
            "out_of_range",
            field="size",
        )
    fill = padding_of(volume.modality, volume.hu_DHW) if value is None else value
    out_DHW = np.full(tuple(size), fill, volume.hu_DHW.dtype)
    source = []
    target = []
    for before, after in zip(volume.hu_DHW.shape, size, strict=True):
        count = min(before, after)
        first = (before - count) // 2
        source.append(slice(first, first + count))
        first = (after - count) // 2
        target.append(slice(first, first + count))
    out_DHW[tuple(target)] = volume.hu_DHW[tuple(source)]
    return dataclasses.replace(volume, hu_DHW=out_DHW, origin=None)


def apply_window(hu: np.ndarray, low: float, high: float) -> np.ndarray:
    """Return float32 values in 0..1: 0 up to `low`, 1 from `high`, linear between.

    Raises:
        ConfigError: "out_of_range" unless `low` is below `high`.
    """
    if not low < high:
        raise ConfigError(
            f"expected a window with low below high, got ({low}, {high})",
            "out_of_range",
            field="window",
        )
    share: np.ndarray = (hu.astype(np.float32) - np.float32(low)) / np.float32(high - low)
    return np.clip(share, 0, 1)


Window = tuple[float, float]


PERCENTILES = (0.5, 99.5)
"""Percentiles that are black and white where values have no unit."""
CHEST_WINDOWS: tuple[Window, Window, Window] = ((-1150, 350), (-160, 240), (-200, 1200))
"""Lung, soft tissue and bone in Hounsfield units, as red, green and blue."""


def rgb_slices(
    volume: Volume,
    places: Sequence[int] | None = None,
    *,
    windows: tuple[Window, Window, Window] | None = None,
) -> np.ndarray:
    """Return axial slices as uint8 RGB (N, H, W, 3), a window for each channel, front upwards.

    Args:
        volume: source.
        places: indices along z; None: the middle one.
        windows: values that become 0 and 255 in each channel; None: `CHEST_WINDOWS` for CT and
            volumes without a modality; for others, which have no unit, the range between the
            0.5th and the 99.5th percentile of `volume`.

    Raises:
        ConfigError: "out_of_range" for a place outside of the volume, or for a window.
    """
    depth = len(volume.hu_DHW)
    indices = [depth // 2] if places is None else list(places)
    if not all(0 <= place < depth for place in indices):
        raise ConfigError(
            f"expected places from 0 to {depth - 1}, got {indices}", "out_of_range", field="places"
        )
    slices_NHW = volume.hu_DHW[indices]
    if windows is None:
        windows = CHEST_WINDOWS
        if volume.modality not in (None, "CT"):
            low, high = np.percentile(volume.hu_DHW, PERCENTILES)
            windows = ((float(low), max(float(high), float(low) + 1)),) * 3
    channels = [apply_window(slices_NHW, low, high) for low, high in windows]
    return np.rint(np.stack(channels, axis=-1) * 255).astype(np.uint8)
