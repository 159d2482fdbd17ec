"""Organs of chest CTs: masks of TotalSegmentator, or of the four organs, as one array of numbers on
the grid of a volume.

A mask belongs to the volume `NAME.nii.gz`, or to the series in the folder `NAME`, where it is
`NAME.nii.gz` (one map of labels) or a folder `NAME` with a file for each structure. Both are looked
for below the root of the masks under the volume's own path first, with as many of its folders as
exist there, then without.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from medvl.common.untrusted import InputFolders
from medvl.data.volumes.nifti import read_nifti
from medvl.data.volumes.options import OrganLabels, VolumeFile, VolumeOptions
from medvl.data.volumes.resampling import crop_or_pad, resample_labels
from medvl.data.volumes.volume import Volume
from medvl.errors import VolumeError
from medvl.schema import ORGANS

STRUCTURES: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "lung": (
        (
            "lung_upper_lobe_left",
            "lung_lower_lobe_left",
            "lung_upper_lobe_right",
            "lung_middle_lobe_right",
            "lung_lower_lobe_right",
        ),
        ("lung",),
    ),
    "heart": (
        (
            "heart_myocardium",
            "heart_atrium_left",
            "heart_ventricle_left",
            "heart_atrium_right",
            "heart_ventricle_right",
        ),
        ("heart", "atrial_appendage_left"),
        ("heart",),
    ),
    "esophagus": (("esophagus",),),
    "aorta": (("aorta",),),
}
"""Files of each organ's structures, as TotalSegmentator 1 and 2 or one file an organ have them; the
first complete set counts.
"""
NUMBERS: Mapping[OrganLabels, tuple[int, Mapping[int, str]]] = {
    "totalsegmentator2": (
        117,
        {**dict.fromkeys(range(10, 15), "lung"), 15: "esophagus", 51: "heart", 52: "aorta"}
        | {61: "heart"},
    ),
    "totalsegmentator1": (
        104,
        {7: "aorta", **dict.fromkeys(range(13, 18), "lung"), 42: "esophagus"}
        | dict.fromkeys(range(44, 49), "heart"),
    ),
    "organs": (len(ORGANS), dict(enumerate(ORGANS, 1))),
}
"""Largest number of a map of labels, and the numbers of each organ: those of TotalSegmentator's
task `total`, or 1 to 4 for `ORGANS`. Other structures of the task are left out.
"""
_SUFFIXES = (".nii.gz", ".nii")
_SAME_SPACING = 0.01  # share
_SAME_PLACE = 0.5  # voxels
_ANY_ANGLE = 90.0
MAP = "map"
"""Name of a map of labels among the files of `find_organ_masks`."""


def volume_name(path: Path) -> str:
    """Return the name of a volume: that of its file without the suffix, or of its folder."""
    return next(
        (path.name.removesuffix(end) for end in (*_SUFFIXES, ".npz") if path.name.endswith(end)),
        path.name,
    )


def find_organ_masks(root: Path, volume: Path) -> dict[str, Path]:
    """Return the files of a volume's masks: one with the name `MAP`, or those of structures by
    name; none where there are none.
    """
    name = volume_name(volume)
    folders = volume.parent.parts[1:] if volume.is_absolute() else volume.parent.parts
    for start in range(max(0, len(folders) - 4), len(folders) + 1):
        place = root.joinpath(*folders[start:])
        for suffix in _SUFFIXES:
            if (file := place / f"{name}{suffix}").is_file():
                return {MAP: file}
        if (place / name).is_dir():
            files = {
                structure: file
                for structure in _structures()
                for suffix in _SUFFIXES
                if (file := place / name / f"{structure}{suffix}").is_file()
            }
            if files:
                return files
    return {}


def _structures() -> list[str]:
    sets = [names for organ in ORGANS for names in STRUCTURES[organ]]
    return list(dict.fromkeys(name for names in sets for name in names))


def read_organs(
    files: Mapping[str, Path],
    volume: Volume,
    file: VolumeFile,
    labels: OrganLabels,
    folders: InputFolders,
) -> np.ndarray:
    """Return the organ of each voxel of a volume, uint8 (D, H, W): its number in `ORGANS` from 1,
    or 0.

    Args:
        files: from `find_organ_masks`.
        volume: as its file has it, before it is resampled or cut.
        file: how it was read; masks of files whose header states no grid are read in the same way.
        labels: numbers of maps.
        folders: folders that the files must be in.

    Raises:
        VolumeError: "mismatch" for a mask on another grid; "unknown_label" for numbers beyond those
            of `labels`; "incomplete" for an organ with some of its files; and as `read_nifti`.
    """
    if MAP in files:
        values_DHW = _read_mask(files[MAP], volume, file, folders)
        most, organ_of = NUMBERS[labels]
        if values_DHW.min() < 0 or values_DHW.max() > most:
            raise VolumeError(
                f"{files[MAP]}: expected labels of {labels} from 0 to {most}, got "
                f"{values_DHW.min()} to {values_DHW.max()}; name the numbers with --organ-labels",
                "unknown_label",
                field="organ_labels",
            )
        table = np.zeros(most + 1, np.uint8)
        for number, organ in organ_of.items():
            table[number] = ORGANS.index(organ) + 1
        numbers_DHW: np.ndarray = table[values_DHW]
        return numbers_DHW
    organs_DHW = np.zeros(volume.hu_DHW.shape, np.uint8)
    for number, organ in enumerate(ORGANS, 1):
        for name in _complete_set(organ, files):
            organs_DHW[_read_mask(files[name], volume, file, folders) != 0] = number
    return organs_DHW


def _complete_set(organ: str, files: Mapping[str, Path]) -> Sequence[str]:
    """Return the structures of an organ, none where it has no file. Raises VolumeError."""
    for names in STRUCTURES[organ]:
        if all(name in files for name in names):
            return names
    file_names = [name for names in STRUCTURES[organ] for name in names if name in files]
    if file_names:
        lacking = [name for name in STRUCTURES[organ][0] if name not in files]
        raise VolumeError(
            f"{files[file_names[0]].parent}: expected all structures of the {organ}, got no "
            f"{', '.join(lacking)}; write them, or remove the others",
            "incomplete",
        )
    return ()


def _read_mask(path: Path, volume: Volume, file: VolumeFile, folders: InputFolders) -> np.ndarray:
    mask = read_nifti(path, max_oblique=_ANY_ANGLE, folders=folders)  # that of its volume
    if file.rescale is not None:  # a volume whose header states no grid either
        if not np.allclose(mask.spacing, 1.0):
            raise _other_grid(path, "a header with a grid", "one without, as that of the volume")
        mask = read_nifti(path, orientation=file.orientation, spacing=file.spacing, folders=folders)
    if mask.hu_DHW.shape != volume.hu_DHW.shape:
        raise _other_grid(path, f"{mask.hu_DHW.shape} voxels", f"{volume.hu_DHW.shape}")
    if not np.allclose(mask.spacing, volume.spacing, rtol=_SAME_SPACING):
        raise _other_grid(path, f"a spacing of {mask.spacing} mm", f"{volume.spacing}")
    if mask.origin is not None and volume.origin is not None:
        away = np.abs(np.subtract(mask.origin, volume.origin)) / volume.spacing
        if away.max() > _SAME_PLACE:
            raise _other_grid(path, f"one {away.max():.1f} voxels away", "the same place")
    return mask.hu_DHW


def _other_grid(path: Path, grid: str, expected: str) -> VolumeError:
    return VolumeError(
        f"{path}: expected a mask on the grid of its volume ({expected}), got {grid}; segment the "
        "file that is converted",
        "mismatch",
        field="organ_masks",
    )


def prepared_organs(organs_DHW: np.ndarray, volume: Volume, options: VolumeOptions) -> np.ndarray:
    """Return organs with the spacing and size that `medvl.data.volumes.reading.prepared` gives the
    volume.
    """
    if options.spacing is not None:
        organs_DHW = resample_labels(organs_DHW, volume, options.spacing)
    if options.size is not None:
        labels = dataclasses.replace(volume, hu_DHW=organs_DHW)
        organs_DHW = crop_or_pad(labels, options.size, value=0).hu_DHW
    return organs_DHW


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class OrganVolume:
    """A volume and the organ of each voxel."""

    hu_DHW: np.ndarray
    """int16 Hounsfield units."""
    organs_DHW: np.ndarray
    """uint8, the number in `ORGANS` from 1, or 0."""


def organ_box(organs_DHW: np.ndarray) -> list[list[int]] | None:
    """Return the first voxel and the one behind the last of all organs along (z, y, x), None
    without any.
    """
    if not organs_DHW.any():
        return None
    box = []
    for others in ((1, 2), (0, 2), (0, 1)):
        places = np.flatnonzero(organs_DHW.any(axis=others))
        box.append([int(places[0]), int(places[-1]) + 1])
    return box
