"""A file or a series as the volume that shards store."""

import dataclasses
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from medvl.common.untrusted import ANYWHERE, InputFolders
from medvl.data.dicom.parser import starts_like_dicom
from medvl.data.volumes.codec import encode_volume, volume_fields
from medvl.data.volumes.dicom_series import read_dicom_series
from medvl.data.volumes.nifti import read_nifti
from medvl.data.volumes.npz import read_npz
from medvl.data.volumes.options import OrganLabels, VolumeFile, VolumeOptions
from medvl.data.volumes.organs import (
    OrganVolume,
    find_organ_masks,
    organ_box,
    prepared_organs,
    read_organs,
    volume_name,
)
from medvl.data.volumes.resampling import crop_or_pad, resample_volume
from medvl.data.volumes.volume import Volume, check_hounsfield
from medvl.errors import VolumeError

NPZ_ARRAY = "ct"
"""Name of the array in NumPy archives, as in RAD-ChestCT."""


def read_volume(
    path: Path, file: VolumeFile, options: VolumeOptions, folders: InputFolders
) -> Volume:
    """Read a NIfTI file, a NumPy archive (.npz), an enhanced DICOM file or the folder of a DICOM
    series, with the spacing and size of `options`.

    Raises FileNotFoundError, VolumeError and DicomError as the readers and `check_hounsfield`.
    """
    return prepared(read_original(path, file, options, folders), options)


def read_original(
    path: Path, file: VolumeFile, options: VolumeOptions, folders: InputFolders
) -> Volume:
    """Read a volume as `read_volume`, with the spacing and size of its file."""
    path = _inside(path)
    if path.is_dir() or _is_dicom(path, folders):
        volume = read_dicom_series(
            path,
            stack=0 if options.stacks == "largest" else None,
            gaps=options.gaps,
            tilt=options.tilt,
            max_oblique=options.max_oblique,
            folders=folders,
        )
        volume = dataclasses.replace(volume, modality=volume.modality or file.modality)
    elif path.suffix == ".npz":
        if file.orientation is None or file.spacing is None:
            raise VolumeError(
                f"{path}: a NumPy archive states neither orientation nor spacing; convert it to "
                "NIfTI",
                "missing",
                field="orientation",
            )
        volume = read_npz(
            path,
            NPZ_ARRAY,
            orientation=file.orientation,
            spacing=file.spacing,
            folders=folders,
        )
        volume = dataclasses.replace(volume, modality=file.modality)
    else:
        volume = read_nifti(
            path,
            orientation=file.orientation,
            spacing=file.spacing,
            rescale=file.rescale,
            modality=file.modality,
            max_oblique=options.max_oblique,
            folders=folders,
        )
    if volume.modality == "CT":
        check_hounsfield(volume)
    return volume


def _inside(path: Path) -> Path:
    """Return the only file of a folder that has the name of a NIfTI file, as some archives unpack
    to `scan.nii/scan.nii`; other paths as they are.
    """
    if path.name.lower().endswith((".nii", ".nii.gz")) and path.is_dir():
        files = [*itertools.islice(path.iterdir(), 2)]
        if len(files) == 1:
            return files[0]
    return path


def _is_dicom(path: Path, folders: InputFolders) -> bool:
    """Return whether a file is a DICOM file, as those of enhanced CT and MR. Raises as
    `InputFolders.open`.
    """
    with folders.open(path, VolumeError) as file:
        return starts_like_dicom(file.read(132))


def prepared(volume: Volume, options: VolumeOptions) -> Volume:
    """Return a volume with the spacing and size of `options`."""
    if options.spacing is not None:
        volume = resample_volume(volume, options.spacing, antialias=options.antialias)
    if options.size is not None:
        volume = crop_or_pad(volume, options.size)
    return volume


def read_organ_volume(
    path: Path, file: VolumeFile, masks: Path, labels: OrganLabels, options: VolumeOptions
) -> OrganVolume:
    """Return a volume and the organ of each voxel, with the spacing and size of `options`.

    Raises VolumeError "missing" where the folder `masks` has none of the volume, and as
    `read_volume` and `read_organs`.
    """
    files = find_organ_masks(masks, path.absolute())
    if not files:
        raise VolumeError(
            f"{path}: {masks} has no mask of it; expected {volume_name(path)}.nii.gz, or a folder "
            f"{volume_name(path)} with a file for each structure",
            "missing",
            field="organ_masks",
        )
    volume = read_original(path, file, options, ANYWHERE)
    organs_DHW = read_organs(files, volume, file, labels, ANYWHERE)
    return OrganVolume(
        hu_DHW=prepared(volume, options).hu_DHW,
        organs_DHW=prepared_organs(organs_DHW, volume, options),
    )


class StoredVolume(NamedTuple):
    """What shards hold of a volume."""

    volume: bytes
    organs: bytes
    """The organ of each voxel (`medvl.data.volumes.organs`); empty without masks."""
    fields: dict[str, Any]
    """Fields of `Sample.extra`."""
    box: list[list[int]] | None
    """Voxels of all organs, as `organ_box`."""
    dropped: Mapping[str, int]
    """`Volume.dropped`."""


def encode_stored_volume(
    path: Path,
    file: VolumeFile,
    options: VolumeOptions,
    folders: InputFolders,
    masks: Mapping[str, Path],
    labels: OrganLabels,
) -> StoredVolume:
    """Read a volume as `read_volume`, and its masks as `read_organs`.

    Raises VolumeError "mismatch" for a series of another modality than that of `file`, and as both.
    """
    original = read_original(path, file, options, folders)
    if original.modality != file.modality:
        raise VolumeError(
            f"{path}: expected {file.modality}, got {original.modality}; leave the series out, or "
            "convert it with its own --modality",
            "mismatch",
            field="modality",
        )
    organs, box = b"", None
    if masks:
        organs_DHW = read_organs(masks, original, file, labels, folders)
        organs_DHW = prepared_organs(organs_DHW, original, options)
        organs, box = encode_volume(organs_DHW), organ_box(organs_DHW)
    volume = prepared(original, options)
    data = encode_volume(volume.hu_DHW)
    return StoredVolume(data, organs, volume_fields(volume), box, original.dropped)
