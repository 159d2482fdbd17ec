"""Volumes of one size for a model: cut around the centre, or anywhere in training.

Values stay Hounsfield units in int16; the encoder applies its window on the device.
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal, NamedTuple

import numpy as np

from medvl.data.volumes.volume import AIR
from medvl.errors import ConfigError

Shape = tuple[int, int, int]


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

    def cut(self, shape: Shape, rng: np.random.Generator | None = None) -> Cut:
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
        """Return int16 (D, H, W) of `size` from the slices of a cut (`Cut.source[0]`)."""
        out_DHW = np.full(self.size, AIR, np.int16)
        out_DHW[cut.target] = slices_DHW[:, cut.source[1], cut.source[2]]
        return out_DHW


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
