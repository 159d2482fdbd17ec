"""A file or a series as the volume that shards store."""

import dataclasses
from pathlib import Path
from typing import Any

from medvl.common.untrusted import InputFolders
from medvl.data.volumes.codec import encode_volume
from medvl.data.volumes.dicom_series import read_dicom_series
from medvl.data.volumes.nifti import read_nifti
from medvl.data.volumes.npz import read_npz
from medvl.data.volumes.options import VolumeFile, VolumeOptions
from medvl.data.volumes.resampling import crop_or_pad, resample_volume
from medvl.data.volumes.stored import volume_fields
from medvl.data.volumes.volume import Volume, check_hounsfield

NPZ_ARRAY = "ct"
"""Name of the array in NumPy archives, as in RAD-ChestCT."""


def read_volume(
    path: Path, file: VolumeFile, options: VolumeOptions, folders: InputFolders
) -> Volume:
    """Read a NIfTI file, a NumPy archive (.npz) or the folder of a DICOM series, with the spacing
    and size of `options`.

    Raises FileNotFoundError, VolumeError and DicomError as the readers and `check_hounsfield`.
    """
    if path.is_dir():
        volume = read_dicom_series(path, gaps=options.gaps, tilt=options.tilt, folders=folders)
    elif path.suffix == ".npz":
        volume = read_npz(
            path,
            NPZ_ARRAY,
            orientation=file.orientation or "",
            spacing=file.spacing or (0, 0, 0),
            folders=folders,
        )
        volume = dataclasses.replace(volume, modality=file.modality)
    else:
        volume = read_nifti(
            path,
            orientation=file.orientation,
            spacing=file.spacing,
            rescale=file.rescale,
            folders=folders,
        )
        volume = dataclasses.replace(volume, modality=file.modality)
    if volume.modality == "CT":
        check_hounsfield(volume)
    return prepared(volume, options)


def prepared(volume: Volume, options: VolumeOptions) -> Volume:
    """Return a volume with the spacing and size of `options`."""
    if options.spacing is not None:
        volume = resample_volume(volume, options.spacing, antialias=options.antialias)
    if options.size is not None:
        volume = crop_or_pad(volume, options.size)
    return volume


def encode_stored_volume(
    path: Path, file: VolumeFile, options: VolumeOptions, folders: InputFolders
) -> tuple[bytes, dict[str, Any]]:
    """Read a volume as `read_volume`. Return the encoded one, and what `Sample.extra` says about
    it.
    """
    volume = read_volume(path, file, options, folders)
    return encode_volume(volume.hu_DHW), volume_fields(volume)
