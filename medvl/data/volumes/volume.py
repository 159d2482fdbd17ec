"""Volumes in one orientation, and the checks that all their readers share.

Axes are (z, y, x): z to the head, y to the back, x to the patient's left, the order in which DICOM
draws axial slices. Volumes are permuted and flipped to it by the nearest axes; none is resampled.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from medvl.errors import VolumeError

AIR = -1024
"""Value of padding of CT, in Hounsfield units: what a scanner writes outside of its circle."""
MAX_TILT = 0.5
"""Degrees by which the axes of a volume may deviate from right angles."""
MAX_OBLIQUE = 20.0
"""Degrees between an axis of a volume and the nearest axis of the patient."""

_SOFT = (-200, 300)
_LUNG = (-950, -600)
_DENSE = 800
"""Hounsfield units above which little of a body is: cortical bone, teeth and metal."""
_MOST_DENSE = 0.2
_INT16 = np.iinfo(np.int16)
_LEAST_RANGE = 16
"""Range of values with fractions below which rounding to int16 would lose the picture."""
_MOST_BEYOND = 0.001
"""Share of values above the range of int16 that may be cut: single bright voxels."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class VolumeLimits:
    """Limits for untrusted files."""

    file_bytes: int = 4 << 30
    """Size of a file."""
    files: int = 20_000
    """Files in the folder of a series."""
    voxels: int = 1 << 30
    """Voxels of a volume: 2 GiB at 16 bits, such as 1,024 slices of 1,024 x 1,024."""


DEFAULT_LIMITS = VolumeLimits()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Volume:
    """One scan, in canonical orientation."""

    hu_DHW: np.ndarray
    """int16: Hounsfield units of a CT. Other modalities have the values of their file, after its
    rescale.
    """
    spacing: tuple[float, float, float]
    """Millimetres between voxels along (z, y, x)."""
    origin: tuple[float, float, float] | None = None
    """Place of the first voxel along (z, y, x) in mm, in DICOM's coordinates of the patient; None
    where the file states none, and once the volume is resampled or cut.
    """
    modality: str | None = None
    """CT, MR, ... as in DICOM; None where the file has none (NIfTI)."""
    is_hounsfield: bool | None = None
    """Whether the file declares Hounsfield units; None where it cannot (NIfTI)."""
    angle: float = 0.0
    """Largest angle between an axis of the volume and the axis of the patient that it stands for,
    in degrees.
    """
    dropped: Mapping[str, int] = dataclasses.field(default_factory=lambda: MappingProxyType({}))
    """Number of files of the folder, or of frames of enhanced ones, that are no slice of the
    volume, by kind: localizer, derived, duplicate, no_position, not_dicom, no_pixels, color,
    multi_frame, no_scan, other_stack, beyond_gap.
    """


def padding_of(modality: str | None, values: np.ndarray) -> int:
    """Return the value of padding: `AIR` for CT and files that state no modality, for others the
    least of `values`, which are theirs.
    """
    return AIR if modality in (None, "CT") else int(values.min())


class VolumeBuilder:
    """An int16 volume that is filled slice by slice.

    Values that are not finite are padding, `padding_of` the volume.
    """

    def __init__(self, shape: tuple[int, int, int], modality: str | None) -> None:
        self.shape = shape
        self._values_DHW = np.empty(shape, np.int16)
        self._is_ct = modality in (None, "CT")
        self._missing: dict[int, np.ndarray] = {}  # slice: packed bits
        self._low = math.inf
        self._high = -math.inf
        self._has_fractions = False
        self._beyond = 0

    def put(self, index: int, values_HW: np.ndarray) -> None:
        """Round a slice of real numbers, and store it."""
        values = values_HW
        if values_HW.dtype.kind == "f":
            is_finite_HW = np.isfinite(values_HW)
            values = values_HW[is_finite_HW]
            if values.size != values_HW.size and not self._is_ct:
                self._missing[index] = np.packbits(~is_finite_HW)
            if not self._has_fractions:
                self._has_fractions = bool((np.rint(values) != values).any())
        if values.size:
            self._low = min(self._low, float(values.min()))
            self._high = max(self._high, float(values.max()))
        if self._high > _INT16.max:
            self._beyond += int(np.count_nonzero(values > _INT16.max))
        self._values_DHW[index] = to_int16(values_HW)

    def volume(self) -> np.ndarray:
        """Return the volume, int16 (D, H, W).

        Raises VolumeError ("unsupported") for fractions that int16 would lose, and for values
        above its range.
        """
        if self._has_fractions and self._high - self._low < _LEAST_RANGE:
            raise VolumeError(
                f"the values are fractions from {self._low:.3g} to {self._high:.3g}, which int16 "
                "would lose; multiply them first, such as by 1,000",
                "unsupported",
            )
        if self._beyond > _MOST_BEYOND * self._values_DHW.size:
            share = 100 * self._beyond / self._values_DHW.size
            raise VolumeError(
                f"{share:.1f} % of the values are above {_INT16.max}, which int16 would cut; "
                "divide them first, such as by 10",
                "unsupported",
            )
        least = to_int16(np.array(self._low)) if math.isfinite(self._low) else 0
        for index, bits in self._missing.items():
            slice_HW = self._values_DHW[index]
            is_missing_HW = np.unpackbits(bits, count=slice_HW.size).reshape(slice_HW.shape)
            slice_HW[is_missing_HW.astype(bool)] = least
        return self._values_DHW


def check_hounsfield(volume: Volume) -> None:
    """Check that the values of a CT can be Hounsfield units.

    The median of an elliptic cylinder at the centre must be that of soft tissue, or most of its
    voxels must be soft tissue or lung; few may be denser than bone usually is, as soft tissue is
    where lung has the values of soft tissue. A CT that was rescaled twice, or never, fails.

    Raises:
        VolumeError: "not_hu".
    """
    depth, height, width = volume.hu_DHW.shape
    slab_DHW = volume.hu_DHW[depth // 4 : max(depth - depth // 4, depth // 4 + 1)]
    y_H = (np.arange(height) + 0.5) / height * 2 - 1
    x_W = (np.arange(width) + 0.5) / width * 2 - 1
    inside_HW = (y_H[:, None] ** 2 + x_W**2) <= 0.25  # half of the height and of the width
    values = slab_DHW[:, inside_HW]
    median = float(np.median(values))
    body = sum(float(np.mean((values >= low) & (values <= high))) for low, high in (_SOFT, _LUNG))
    dense = float(np.mean(values > _DENSE))
    if not (_SOFT[0] <= median <= _SOFT[1] or body > 0.5) or dense > _MOST_DENSE:
        message = (
            f"the values are not Hounsfield units: expected a median of {_SOFT[0]} to {_SOFT[1]} "
            f"at the centre, or over 50 % soft tissue and lung, and at most "
            f"{100 * _MOST_DENSE:.0f} % above {_DENSE}, got {median:g}, {100 * body:.0f} % and "
            f"{100 * dense:.0f} %; rescale the stored values exactly once"
        )
        raise VolumeError(message, "not_hu")


class Canonical(NamedTuple):
    """A volume in canonical orientation."""

    array: np.ndarray
    """Contiguous."""
    spacing: tuple[float, float, float]
    angle: float
    """Largest angle between an axis and the one that it becomes, in degrees."""
    origin: tuple[float, float, float] | None


def to_canonical(
    array: np.ndarray,
    axes: np.ndarray,
    max_oblique: float = MAX_OBLIQUE,
    origin: np.ndarray | None = None,
) -> Canonical:
    """Permute and flip an array to (z to the head, y to the back, x to the left).

    Args:
        array: three-dimensional.
        axes: (3, 3): column i is the step in mm from one voxel to the next along axis i of the
            array, in DICOM's coordinates of the patient (x to the left, y to the back, z to the
            head).
        max_oblique: largest angle in degrees between an axis and the one that it becomes.
        origin: (x, y, z) of the first voxel in the same coordinates; None: unknown.

    Raises:
        VolumeError: "malformed" for steps that are not finite or 0; "tilt" for axes that are not at
            right angles; "oblique".
    """
    spacing = np.linalg.norm(axes, axis=0)
    if not np.isfinite(axes).all() or not (spacing > 0).all():
        raise VolumeError(
            "expected steps between voxels above 0 mm along three axes, got others", "malformed"
        )
    directions = axes / spacing
    cosines = directions.T @ directions
    off = max(abs(cosines[0, 1]), abs(cosines[0, 2]), abs(cosines[1, 2]))
    tilt = math.degrees(math.asin(min(1.0, off)))
    if tilt > MAX_TILT:
        raise tilted(tilt)
    # Row r of `directions` is patient axis x, y, z: order[r] is the array's axis nearest to it.
    order = max(
        itertools.permutations(range(3)),
        key=lambda order: sum(abs(directions[row, axis]) for row, axis in enumerate(order)),
    )
    nearest = [float(directions[row, axis]) for row, axis in enumerate(order)]
    angle = max(math.degrees(math.acos(min(1.0, abs(cosine)))) for cosine in nearest)
    if angle > max_oblique:
        message = (
            f"an axis of the volume is {angle:.1f} degrees from the nearest axis of the patient, "
            f"over {max_oblique:g}; raise it (the option max_oblique), or leave the volume out"
        )
        raise VolumeError(message, "oblique", field="max_oblique")
    x, y, z = order
    turned = array.transpose(z, y, x)
    flips = tuple(slice(None, None, -1 if cosine < 0 else 1) for cosine in reversed(nearest))
    sides = (float(spacing[z]), float(spacing[y]), float(spacing[x]))
    first = None
    if origin is not None:
        for axis, cosine in zip(order, nearest, strict=True):
            if cosine < 0:
                origin = origin + axes[:, axis] * (array.shape[axis] - 1)
        first = (float(origin[2]), float(origin[1]), float(origin[0]))
    return Canonical(np.ascontiguousarray(turned[flips]), sides, angle, first)


def tilted(degrees: float) -> VolumeError:
    """Return the error for slices that are not stacked at a right angle."""
    message = (
        f"the slices are stacked {degrees:.1f} degrees off a right angle (gantry tilt), over "
        f"{MAX_TILT}; correct the shear (of DICOM series: the option tilt), or leave the volume out"
    )
    return VolumeError(message, "tilt")


def to_int16(values: np.ndarray) -> np.ndarray:
    """Round to int16 and clip to its range; values that are not finite become `AIR`."""
    if values.dtype.kind == "f":
        values = np.rint(np.where(np.isfinite(values), values, AIR))
        return np.clip(values, _INT16.min, _INT16.max).astype(np.int16)
    own = np.iinfo(values.dtype)
    low = max(own.min, _INT16.min)
    high = min(own.max, _INT16.max)
    if (low, high) == (own.min, own.max):
        return values.astype(np.int16, copy=False)
    return np.clip(values, low, high).astype(np.int16)
