"""A file or a series as the volume that shards store."""

import dataclasses
from pathlib import Path
from typing import Any

from medvl.common.untrusted import InputFolders
from medvl.data.volumes.codec import encode_volume
from medvl.data.volumes.dicom_series import read_dicom_series
from medvl.data.volumes.nifti import read_nifti
from medvl.data.volumes.resampling import crop_or_pad, resample_volume
from medvl.data.volumes.stored import VolumeOptions, volume_fields
from medvl.data.volumes.volume import check_hounsfield


def encode_stored_volume(
    path: Path, options: VolumeOptions, folders: InputFolders
) -> tuple[bytes, dict[str, Any]]:
    """Read a NIfTI file or the folder of a DICOM series. Return the encoded volume, and what
    `Sample.extra` says about it.

    Raises FileNotFoundError, VolumeError and DicomError as the readers and `check_hounsfield`.
    """
    if path.is_dir():
        volume = read_dicom_series(path, folders=folders)
    else:
        volume = read_nifti(path, folders=folders)
        volume = dataclasses.replace(volume, modality=options.modality)
    if volume.modality == "CT":
        check_hounsfield(volume)
    if options.spacing is not None:
        volume = resample_volume(volume, options.spacing, antialias=options.antialias)
    if options.size is not None:
        volume = crop_or_pad(volume, options.size)
    return encode_volume(volume.hu_DHW), volume_fields(volume)
