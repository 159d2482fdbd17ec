"""Volumes in NumPy archives (.npz), which state neither spacing nor orientation."""

import ast
import math
import os
import zipfile
from pathlib import Path
from typing import IO, Any

import numpy as np

from medvl.common.untrusted import ANYWHERE, ZIP_ERRORS, InputFolders
from medvl.data.volumes.nifti import named_axes
from medvl.data.volumes.volume import DEFAULT_LIMITS, Volume, VolumeLimits, to_canonical, to_int16
from medvl.errors import VolumeError

_MAGIC = b"\x93NUMPY"
_MAX_HEADER = 10_000
_KINDS = "iuf"


def read_npz(
    path: Path | str,
    name: str,
    *,
    orientation: str,
    spacing: tuple[float, float, float],
    limits: VolumeLimits = DEFAULT_LIMITS,
    folders: InputFolders = ANYWHERE,
) -> Volume:
    """Read one array of an archive; pickled arrays are refused.

    Args:
        path: .npz.
        name: name of the array.
        orientation: directions of the array's axes, such as "IPL".
        spacing: mm along the array's axes.
        limits: limits for untrusted files.
        folders: folders that the file must be in, links resolved; default any.

    Raises:
        FileNotFoundError: the file does not exist.
        VolumeError: "malformed", "truncated", "too_large"; "missing": no such array; "unsupported":
            not three axes of real numbers; and the codes of `InputFolders.open`.
        ConfigError: "out_of_range" for `orientation`.
    """
    axes = named_axes(orientation) * np.asarray(spacing)
    try:
        with folders.open(path, VolumeError) as file:
            if os.fstat(file.fileno()).st_size > limits.file_bytes:
                raise VolumeError("the file is over the limit", "too_large", field="file_bytes")
            with zipfile.ZipFile(file) as archive:
                if f"{name}.npy" not in archive.namelist():
                    raise VolumeError(f"the archive has no array {name}", "missing", field=name)
                with archive.open(f"{name}.npy") as member:
                    values = _read(member, limits)
    except VolumeError as error:
        raise error.prefixed(f"{path}: ") from error
    except FileNotFoundError:
        raise
    except ZIP_ERRORS as error:
        raise VolumeError(f"{path} is damaged: copy it again", "malformed") from error
    canonical = to_canonical(values, axes)
    return Volume(hu_DHW=canonical.array, spacing=canonical.spacing, angle=canonical.angle)


def _read(member: IO[bytes], limits: VolumeLimits) -> np.ndarray:
    shape, dtype = _header(member, limits)
    out = np.empty(shape, np.int16)
    for plane in out:
        size = plane.size * dtype.itemsize
        data = member.read(size)
        if len(data) < size:
            raise VolumeError("the array ends too early: copy the file again", "truncated")
        values = np.frombuffer(data, dtype)
        plane[:] = to_int16(values.astype(dtype.newbyteorder("="))).reshape(plane.shape)
    return out


def _header(member: IO[bytes], limits: VolumeLimits) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Read the header of an array, without the evaluation of NumPy's reader."""
    start = member.read(8)
    wide = start[6:7] != b"\x01"
    length = int.from_bytes(member.read(4 if wide else 2), "little")
    if start[:6] != _MAGIC or length > _MAX_HEADER:
        raise VolumeError("not a NumPy array", "malformed")
    try:
        header = ast.literal_eval(member.read(length).decode("latin1"))
        dtype = np.dtype(header["descr"])
        shape = tuple(int(side) for side in header["shape"])
        fortran = bool(header["fortran_order"])
    except (ValueError, SyntaxError, TypeError, KeyError, MemoryError, RecursionError):
        raise VolumeError("the header of the array is damaged", "malformed") from None
    if len(shape) != 3 or min(shape) < 1 or dtype.kind not in _KINDS or fortran:
        raise VolumeError(
            f"expected three axes of real numbers, got {dtype} {shape}", "unsupported"
        )
    if math.prod(shape) > limits.voxels:
        raise VolumeError(
            f"the array has {math.prod(shape)} voxels, over the limit of {limits.voxels}",
            "too_large",
            field="voxels",
        )
    return shape, dtype
