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
from medvl.data.volumes.options import OrganLabels, VolumeFile, VolumeOptions
from medvl.data.volumes.organs import OrganVolume, organ_box
from medvl.data.volumes.volume import AIR, Volume, padding_of
from medvl.errors import ConfigError, VolumeError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Shape = tuple[int, int, int]
_IMAGES = (".png", ".jpg", ".jpeg")


class Extent(NamedTuple):
    """Part of an axis that a model sees, in voxels of a volume; it may go beyond its ends."""

    start: float
    length: float


class Cut(NamedTuple):
    """Where the voxels of a cut come from, and where they lie in it, along (z, y, x)."""

    source: tuple[slice, slice, slice]
    target: tuple[slice, slice, slice]


class CutVolume(NamedTuple):
    """A cut of a volume."""

    hu_DHW: np.ndarray
    """int16 Hounsfield units."""
    organs_DHW: np.ndarray | None
    """uint8 organ of each voxel, with `VolumeTransform.organs`."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class OrganVolumes:
    """Volumes for a model with the organ of each voxel, as in a `Batch`."""

    image_BCDHW: "Tensor"
    organ_mask_BDHW: "Tensor"

    def to(self, device: "torch.device | str") -> "OrganVolumes":
        """Return the same volumes and organs on `device`."""
        return OrganVolumes(
            image_BCDHW=self.image_BCDHW.to(device),
            organ_mask_BDHW=self.organ_mask_BDHW.to(device),
        )


def embedded_parts(prepared: "Tensor | OrganVolumes") -> "tuple[Tensor, ...]":
    """Return the arguments of a dual-encoder's `embed_images`, from the output of its transform."""
    if isinstance(prepared, OrganVolumes):
        return prepared.image_BCDHW, prepared.organ_mask_BDHW
    return (prepared,)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class VolumeTransform:
    """Crop to a size; sides that are smaller are padded on both ends, with air in CT, else with the
    least value of the volume.
    """

    size: Shape
    """Voxels along (z, y, x)."""
    shift: Shape = (0, 0, 0)
    """Largest shift of the crop from the centre along (z, y, x), in voxels, drawn anew for each
    sample and epoch; it stays inside of the volume. For training.
    """
    organs: bool = False
    """Add the organ of each voxel (`medvl.data.volumes.organs`), and centre crops on the box of all
    organs.
    """
    organ_masks: Path | None = None
    """Folder of the masks of original files, with `organs`."""
    organ_labels: OrganLabels = "totalsegmentator2"
    """Numbers of these masks."""

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
        return (3 if self.organs else 2) * depth * height * width

    @property
    def stored(self) -> VolumeOptions:
        """Spacing and size of the shards that the model was trained on."""
        return VolumeOptions()

    @property
    def modality(self) -> str:
        """Modality of the shards that the model was trained on, and of files that state none."""
        return "CT"

    def settings(self) -> dict[str, Any]:
        """Return the fields that make up the transform of stored volumes."""
        return {"size": list(self.size), "organs": self.organs}

    def __call__(self, volumes: Any) -> "Tensor | OrganVolumes":
        """Prepare volumes for a model: return int16 (B, 1, D, H, W) of `size`; with `organs`, these
        and their organs.

        Args:
            volumes: one volume or a list of them: NIfTI files, folders of DICOM series, enhanced
                DICOM files, `Volume`, or int16 arrays (D, H, W) of the shards' spacing; with
                `organs`, files, or `OrganVolume` of the shards' spacing.

        Raises VolumeError, DicomError or FileNotFoundError if a volume cannot be read, ConfigError
        for an empty list.
        """
        import torch

        listed = volumes if isinstance(volumes, list | tuple) else [volumes]
        if not listed:
            raise ConfigError(
                "expected at least one volume, got an empty list", "empty", field="images"
            )
        cuts = [self._whole_cut(values) for values in map(self.read, listed)]
        image_BCDHW = torch.from_numpy(np.stack([each.hu_DHW for each in cuts])[:, None])
        if not self.organs:
            return image_BCDHW
        masks_DHW = [each.organs_DHW for each in cuts if each.organs_DHW is not None]
        return OrganVolumes(
            image_BCDHW=image_BCDHW, organ_mask_BDHW=torch.from_numpy(np.stack(masks_DHW))
        )

    def _whole_cut(self, values: np.ndarray | OrganVolume) -> CutVolume:
        """Return the cut of what `read` returns."""
        if not isinstance(values, OrganVolume):
            padding = padding_of(self.modality, values)
            return CutVolume(self.fill(values, self.cut(values.shape), padding), None)
        cut = self.cut(values.hu_DHW.shape, box=organ_box(values.organs_DHW))
        padding = padding_of(self.modality, values.hu_DHW)
        filled_DHW = self.fill(values.hu_DHW, cut, padding)
        return CutVolume(filled_DHW, self.fill(values.organs_DHW, cut, 0))

    def empty(self) -> CutVolume:
        """Return air without organs, for a sample without a volume."""
        organs_DHW = np.zeros(self.size, np.uint8) if self.organs else None
        return CutVolume(np.full(self.size, AIR, np.int16), organs_DHW)

    def read(self, volume: Any, *, frame: int | None = None) -> np.ndarray | OrganVolume:
        """Return the values of an original volume as its shards would store them: int16 (D, H, W),
        or with `organs` an `OrganVolume`.

        `frame`, which transforms of images have, is not used. Raises as a call does.
        """
        from medvl.data.volumes.reading import prepared, read_organ_volume

        if not self.organs and isinstance(volume, str | os.PathLike | Volume):
            return prepared(self.original(volume), self.stored).hu_DHW
        if isinstance(volume, str | os.PathLike):
            path = _volume_path(volume)
            if self.organ_masks is None:
                raise VolumeError(
                    f"{path}: the model needs masks of organs; name their folder (--organ-masks), "
                    "or let it use all of the volume (--all-tokens)",
                    "missing",
                    field="organ_masks",
                )
            file = VolumeFile(modality=self.modality)
            return read_organ_volume(path, file, self.organ_masks, self.organ_labels, self.stored)
        if self.organs:
            if not isinstance(volume, OrganVolume):
                raise VolumeError(
                    f"expected a file or an OrganVolume, got {type(volume).__name__}",
                    "unsupported",
                )
            return volume
        values = np.asarray(volume)
        if values.ndim != 3 or values.dtype != np.int16:
            raise VolumeError(
                f"expected int16 Hounsfield units (D, H, W), got {values.dtype} {values.shape}",
                "unsupported",
            )
        return values

    def original(self, volume: "str | os.PathLike[str] | Volume") -> Volume:
        """Return a volume before it gets the spacing and size of the shards: a NIfTI file, an
        enhanced DICOM file, or the folder of a DICOM series. Raises as a call does.
        """
        from medvl.data.volumes.reading import read_volume

        if isinstance(volume, Volume):
            return volume
        as_is = dataclasses.replace(self.stored, spacing=None, size=None)
        file = VolumeFile(modality=self.modality)
        return read_volume(_volume_path(volume), file, as_is, ANYWHERE)

    def extents(
        self,
        shape: Sequence[int],
        spacing: Sequence[float] | None = None,
        box: Sequence[Sequence[int]] | None = None,
    ) -> tuple[Extent, Extent, Extent]:
        """Return the part of a volume that the model sees, along (z, y, x), in its voxels.

        Args:
            shape: of the volume.
            spacing: of an original volume in mm; None for one as its shards would store it.
            box: of the organs in the stored volume, as for `cut`.
        """
        from medvl.data.volumes.resampling import resampled_sides

        sides = list(shape)
        stored: Sequence[int] = sides
        if spacing is not None:
            if self.stored.spacing is not None:
                sides = resampled_sides(shape, spacing, self.stored.spacing)
            stored = self.stored.size or sides
        cut = self.cut(stored, box=box)
        extents = []
        for axis, (before, side) in enumerate(zip(shape, sides, strict=True)):
            count = min(side, stored[axis])  # shards are cropped or padded around the centre
            start = (side - count) // 2 - (stored[axis] - count) // 2
            start += cut.source[axis].start - cut.target[axis].start
            scale = before / side
            extents.append(Extent(start * scale, self.size[axis] * scale))
        return extents[0], extents[1], extents[2]

    def cut(
        self,
        shape: Sequence[int],
        rng: np.random.Generator | None = None,
        box: Sequence[Sequence[int]] | None = None,
    ) -> Cut:
        """Return the cut of a volume of `shape`, shifted with `rng`; around the middle of `box`,
        its first and last voxels along each axis, in place of that of the volume.
        """
        source = []
        target = []
        sides = box or [(0, before) for before in shape]
        for before, after, most, ends in zip(shape, self.size, self.shift, sides, strict=True):
            count = min(before, after)
            first = min(max((sum(ends) - count) // 2, 0), before - count)
            if rng is not None and most:
                shifted = first + int(rng.integers(-most, most + 1))
                first = min(max(shifted, 0), before - count)
            source.append(slice(first, first + count))
            start = (after - count) // 2
            target.append(slice(start, start + count))
        return Cut((source[0], source[1], source[2]), (target[0], target[1], target[2]))

    def fill(self, slices_DHW: np.ndarray, cut: Cut, value: int = AIR) -> np.ndarray:
        """Return (D, H, W) of `size` from a volume, or its slices `Cut.source[0]`, with `value`
        around it; of the same type.
        """
        out_DHW = np.full(self.size, value, slices_DHW.dtype)
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
    shards_modality: str = "CT"

    @property
    def stored(self) -> VolumeOptions:
        return self.shards

    @property
    def modality(self) -> str:
        return self.shards_modality


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


def _volume_path(volume: "str | os.PathLike[str]") -> Path:
    """Return the path of a volume; raises VolumeError for the file of an image."""
    path = Path(volume)
    if path.suffix.lower() in _IMAGES and path.is_file():
        raise VolumeError(
            f"expected a NIfTI file or the folder of a DICOM series, got {path}; the model reads "
            "volumes",
            "unsupported",
        )
    return path
