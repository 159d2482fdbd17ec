"""Volumes of one size for a model: cut around the centre, or anywhere in training.

Values stay Hounsfield units in int16; the encoder applies its window on the device.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from medvl.common.untrusted import ANYWHERE
from medvl.data.volumes.options import VolumeFile, VolumeOptions
from medvl.data.volumes.volume import AIR, Volume
from medvl.errors import ConfigError, VolumeError

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, int, int]
_IMAGES = (".png", ".jpg", ".jpeg", ".dcm", ".dicom")


class Cut(NamedTuple):
    """Where the voxels of a cut come from, and where they lie in it, along (z, y, x)."""

    source: tuple[slice, slice, slice]
    target: tuple[slice, slice, slice]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class VolumeTransform:
    """Crop to a size; sides that are smaller are padded with air on both ends."""

    size: Shape
    """Voxels along (z, y, x)."""
    shift: Shape = (0, 0, 0)
    """Largest shift of the crop from the centre along (z, y, x), in voxels, drawn anew for each
    sample and epoch; it stays inside of the volume. For training.
    """

    def __post_init__(self) -> None:
        for name, least in (("size", 1), ("shift", 0)):
            sides = getattr(self, name)
            if len(sides) != 3 or min(sides) < least:
                raise ConfigError(
                    f"expected {name} as three numbers of {least} or more, got {sides}",
                    "out_of_range",
                    field=name,
                )

    @property
    def flip(self) -> Literal["off"]:
        """Handling of horizontal flips: none, because reports name sides."""
        return "off"

    @property
    def trained_color(self) -> bool | None:
        """Volumes have no colour."""
        return False

    @property
    def bytes(self) -> int:
        """Bytes of one volume in a batch."""
        depth, height, width = self.size
        return 2 * depth * height * width

    @property
    def stored(self) -> VolumeOptions:
        """Spacing and size of the shards that the model was trained on."""
        return VolumeOptions()

    def __call__(self, volumes: Any) -> "Tensor":
        """Prepare volumes for a model: return int16 (B, 1, D, H, W) of `size`.

        Args:
            volumes: one volume or a list of them: NIfTI files, folders of DICOM series, `Volume`,
                or int16 arrays (D, H, W) of the shards' spacing.

        Raises VolumeError, DicomError or FileNotFoundError if a volume cannot be read, ConfigError
        for an empty list.
        """
        import torch

        listed = volumes if isinstance(volumes, list | tuple) else [volumes]
        if not listed:
            raise ConfigError(
                "expected at least one volume, got an empty list", "empty", field="images"
            )
        cuts = [self.fill(values, self.cut(values.shape)) for values in map(self.read, listed)]
        return torch.from_numpy(np.stack(cuts))[:, None]

    def read(self, volume: Any, *, frame: int | None = None) -> np.ndarray:
        """Return the values of an original volume as its shards would store them: int16 (D, H, W).

        `frame`, which transforms of images have, is not used. Raises as a call does.
        """
        from medvl.data.volumes.reading import prepared, read_volume

        if isinstance(volume, str | os.PathLike):
            path = Path(volume)
            if path.suffix.lower() in _IMAGES and path.is_file():
                raise VolumeError(
                    f"expected a NIfTI file or the folder of a DICOM series, got {path}; the model "
                    "reads volumes",
                    "unsupported",
                )
            return read_volume(path, VolumeFile(), self.stored, ANYWHERE).hu_DHW
        if isinstance(volume, Volume):
            return prepared(volume, self.stored).hu_DHW
        values = np.asarray(volume)
        if values.ndim != 3 or values.dtype != np.int16:
            raise VolumeError(
                f"expected int16 Hounsfield units (D, H, W), got {values.dtype} {values.shape}",
                "unsupported",
            )
        return values

    def cut(self, shape: Sequence[int], rng: np.random.Generator | None = None) -> Cut:
        """Return the cut of a volume of `shape`, shifted with `rng`."""
        source = []
        target = []
        for before, after, most in zip(shape, self.size, self.shift, strict=True):
            count = min(before, after)
            first = (before - count) // 2
            if rng is not None and most:
                shifted = first + int(rng.integers(-most, most + 1))
                first = min(max(shifted, 0), before - count)
            source.append(slice(first, first + count))
            start = (after - count) // 2
            target.append(slice(start, start + count))
        return Cut((source[0], source[1], source[2]), (target[0], target[1], target[2]))

    def fill(self, slices_DHW: np.ndarray, cut: Cut) -> np.ndarray:
        """Return int16 (D, H, W) of `size` from a volume, or its slices `Cut.source[0]`."""
        out_DHW = np.full(self.size, AIR, np.int16)
        if len(slices_DHW) > cut.source[0].stop - cut.source[0].start:  # of a whole volume
            slices_DHW = slices_DHW[cut.source[0]]
        out_DHW[cut.target] = slices_DHW[:, cut.source[1], cut.source[2]]
        return out_DHW


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OriginalVolumeTransform(VolumeTransform):
    """The transform of a model that was trained on shards; it prepares original files as conversion
    to shards does.
    """

    shards: VolumeOptions = dataclasses.field(default_factory=VolumeOptions)

    @property
    def stored(self) -> VolumeOptions:
        return self.shards


def stored_shape(extra: Mapping[str, object]) -> Shape:
    """Return the voxels along (z, y, x) of a stored volume, from the sample's `extra`.

    Raises ValueError where the sample has none.
    """
    sides = extra.get("shape")
    if not (
        isinstance(sides, list)
        and len(sides) == 3
        and all(isinstance(side, int) and side > 0 for side in sides)
    ):
        raise ValueError("a volume without shape")
    return sides[0], sides[1], sides[2]
