"""NIfTI-1 and NIfTI-2 files to volumes, plain or gzip.

    volume = read_nifti("scan.nii.gz")
    volume.hu_DHW   # int16, z to the head, y to the back, x to the left
    volume.spacing  # (z, y, x) in mm

nibabel interprets the header; the voxels are read here slice by slice, so that neither a wrong
header nor a gzip bomb takes more memory than `VolumeLimits` allows. Header extensions stay unread:
some hold a whole DICOM header.
"""

import gzip
import io
import logging
import math
import os
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from medvl.common.untrusted import ANYWHERE, InputFolders
from medvl.data.volumes.volume import (
    DEFAULT_LIMITS,
    MAX_OBLIQUE,
    Volume,
    VolumeBuilder,
    VolumeLimits,
    to_canonical,
)
from medvl.errors import ConfigError, VolumeError

_LOG = logging.Logger("nibabel", logging.CRITICAL)  # what it reports is raised or harmless

_SIZES = {348: "Nifti1Header", 540: "Nifti2Header"}
_MAX_OFFSET = 64 << 20  # header extensions, which are skipped
_GZIP_RATIO = 1032  # the largest of deflate
_PIECE = 1 << 20
_OF_SCANNER = 2
"""Largest code of an sform in the space of a scan; those of a template differ from the qform."""
_MILLIMETRES = {"meter": 1000.0, "mm": 1.0, "micron": 0.001, "unknown": 1.0}
_RAS_TO_LPS = np.diag([-1.0, -1.0, 1.0])


def read_nifti(
    path: Path | str,
    *,
    orientation: str | None = None,
    spacing: tuple[float, float, float] | None = None,
    rescale: tuple[float, float] | None = None,
    modality: str | None = None,
    max_oblique: float = MAX_OBLIQUE,
    limits: VolumeLimits = DEFAULT_LIMITS,
    folders: InputFolders = ANYWHERE,
) -> Volume:
    """Read one volume.

    A value is stored * slope + intercept of the header; a slope of 0 or NaN means neither. Values
    are rounded to int16. The orientation is that of the header's sform, else of its qform; a header
    with both for the space of the scan must have one direction and spacing for each axis, because
    programs differ in which one they read.

    Args:
        path: .nii or .nii.gz.
        orientation: directions of the axes (i, j, k) of a file whose header has neither sform nor
            qform, such as "RAS"; None refuses these files.
        spacing: mm along (i, j, k) in place of the header's; then `orientation` is in place of the
            header's too.
        rescale: slope and intercept of files whose header has none and whose values are not
            rescaled yet.
        modality: CT, MR, ..., which files do not state. Values that are not finite become -1024 in
            CT and without a modality, else the least value.
        max_oblique: largest angle between an axis and the patient's nearest one, in degrees.
        limits: limits for untrusted files.
        folders: folders that the file must be in, links resolved; default any.

    Raises:
        FileNotFoundError: the file does not exist.
        VolumeError: "malformed", "truncated", "too_large"; "unsupported": not one volume of real
            numbers (4-D, colour, complex, .hdr/.img pairs), or values that int16 would lose;
            "missing": no orientation; "conflict": a rescale beside that of the header, or an sform
            against the qform; "tilt", "oblique": see `Volume`; and the codes of
            `InputFolders.open`.
        ConfigError: "out_of_range" for `orientation`.
        ImportError: nibabel is not installed.
    """
    axes = None if orientation is None else named_axes(orientation)
    sides = None if spacing is None else np.asarray(spacing, np.float64)
    file = folders.open(path, VolumeError)
    try:
        with file:
            return _read(file, axes, sides, rescale, modality, max_oblique, limits)
    except VolumeError as error:
        raise error.prefixed(f"{path}: ") from error
    except OSError as error:
        raise VolumeError(f"{path} cannot be read ({error})", "unreadable") from error
    except MemoryError as error:
        raise VolumeError(f"{path}: not enough memory for the volume", "too_large") from error


def decode_nifti(
    file: BinaryIO, *, modality: str | None = None, limits: VolumeLimits = DEFAULT_LIMITS
) -> Volume:
    """Read one volume from an open file, or from memory, as `read_nifti`.

    Raises VolumeError as `read_nifti`, without the name of a file.
    """
    try:
        return _read(file, None, None, None, modality, MAX_OBLIQUE, limits)
    except MemoryError as error:
        raise VolumeError("not enough memory for the volume", "too_large") from error


def named_axes(orientation: str) -> np.ndarray:
    """Return the unit steps (3, 3) of axis codes such as "RAS", as columns in LPS coordinates.

    Raises ConfigError ("out_of_range") for other codes.
    """
    letters = {"L": (0, 1), "R": (0, -1), "P": (1, 1), "A": (1, -1), "S": (2, 1), "I": (2, -1)}
    places = [letters.get(letter) for letter in orientation.upper()]
    rows = sorted(place[0] for place in places if place)
    if rows != [0, 1, 2] or len(places) != 3:
        message = f"expected orientation as three letters such as RAS or LPI, got {orientation!r}"
        raise ConfigError(message, "out_of_range", field="orientation")
    axes = np.zeros((3, 3))
    for column, place in enumerate(places):
        if place:
            axes[place[0], column] = place[1]
    return axes


def _read(
    file: BinaryIO,
    axes: np.ndarray | None,
    sides: np.ndarray | None,
    rescale: tuple[float, float] | None,
    modality: str | None,
    max_oblique: float,
    limits: VolumeLimits,
) -> Volume:
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    if size > limits.file_bytes:
        raise VolumeError(
            f"the file has {size} bytes, over the limit", "too_large", field="file_bytes"
        )
    is_packed = file.read(2) == b"\x1f\x8b"
    file.seek(0)
    stream = _Stream(gzip.GzipFile(fileobj=file) if is_packed else file)
    header = _header(stream)
    shape = _shape(header, limits)
    dtype = header.get_data_dtype()
    if dtype.kind not in "iuf" or dtype.itemsize > 8:
        raise VolumeError(
            "expected voxels that are real numbers of up to 64 bits, got colour, complex numbers "
            "or others",
            "unsupported",
            field="datatype",
        )
    origin = None
    if axes is None or sides is None:
        steps, origin = _steps(header, axes)
    else:
        steps = axes * sides
    most = size * _GZIP_RATIO if is_packed else size
    if math.prod(shape) * dtype.itemsize > most:
        raise VolumeError(
            f"the header describes {math.prod(shape) * dtype.itemsize} bytes of voxels, the file "
            "has fewer: copy it again",
            "truncated",
        )
    builder = VolumeBuilder(shape[::-1], modality)
    _read_voxels(stream, header, dtype, rescale, builder)
    canonical = to_canonical(builder.volume(), steps[:, ::-1], max_oblique, origin)
    return Volume(
        hu_DHW=canonical.array,
        spacing=canonical.spacing,
        origin=canonical.origin,
        modality=modality,
        angle=canonical.angle,
    )


class _Stream:
    """Exact reads of a plain or packed file, with the errors of both as VolumeError."""

    def __init__(self, file: BinaryIO | gzip.GzipFile) -> None:
        self._file = file
        self.position = 0

    def read(self, size: int) -> bytes:
        """Read exactly `size` bytes."""
        data = self.read_up_to(size)
        if len(data) < size:
            raise VolumeError("the file ends too early: copy it again", "truncated")
        return data

    def read_up_to(self, size: int) -> bytes:
        """Read `size` bytes, fewer at the end of the file."""
        try:
            data = self._file.read(size)
        except EOFError:
            raise VolumeError(
                "the gzip data end too early: copy the file again", "truncated"
            ) from None
        except (zlib.error, gzip.BadGzipFile):
            raise VolumeError(
                "the gzip data are damaged: copy the file again", "malformed"
            ) from None
        self.position += len(data)
        return data

    def skip_to(self, offset: int) -> None:
        """Read up to a position."""
        while self.position < offset:
            self.read(min(_PIECE, offset - self.position))


def _header(stream: _Stream) -> Any:
    """Read and check the header; the stream is left behind it."""
    import nibabel
    from nibabel.spatialimages import HeaderDataError

    start = stream.read(4)
    orders = {int.from_bytes(start, order): order for order in ("little", "big")}
    header_size = next((size for size in _SIZES if size in orders), None)
    if header_size is None:
        raise VolumeError("not a NIfTI file", "malformed")
    block = start + stream.read(header_size - 4)
    kind = getattr(nibabel, _SIZES[header_size])
    header = kind(block, "<" if orders[header_size] == "little" else ">", check=False)
    magic = bytes(header["magic"])[:3]
    if magic != (b"n+1" if header_size == 348 else b"n+2"):
        raise VolumeError(
            "expected a NIfTI file with header and voxels in one (.nii), got an Analyze file or a "
            ".hdr/.img pair; convert it",
            "unsupported",
        )
    try:
        header.check_fix(logger=_LOG, error_level=40)
        header.get_data_dtype()
    except (HeaderDataError, KeyError):
        raise VolumeError("a field of the header is damaged", "malformed") from None
    return header


def _shape(header: Any, limits: VolumeLimits) -> tuple[int, int, int]:
    """Return (i, j, k), with further axes of length 1 dropped."""
    count = int(header["dim"][0])
    if not 1 <= count <= 7:
        raise VolumeError("expected 1 to 7 dimensions in the header", "malformed", field="dim")
    sides = [int(side) for side in header["dim"][1 : count + 1]]
    if any(side < 1 for side in sides):
        raise VolumeError("expected sides of 1 or more in the header", "malformed", field="dim")
    if count < 3 or math.prod(sides[3:]) > 1:
        raise VolumeError(
            f"expected one volume, got {count} dimensions; split the file into its volumes",
            "unsupported",
            field="dim",
        )
    if math.prod(sides) > limits.voxels:
        raise VolumeError(
            f"the header describes {math.prod(sides)} voxels, over the limit of {limits.voxels}",
            "too_large",
            field="voxels",
        )
    return sides[0], sides[1], sides[2]


def _steps(header: Any, axes: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the steps along (i, j, k) in mm, in LPS coordinates, and the place of the first voxel,
    None where the header has none.
    """
    from nibabel.spatialimages import HeaderDataError

    try:
        unit = _MILLIMETRES[header.get_xyzt_units()[0]]
        affine, code = header.get_sform(coded=True)
        if not code:
            affine, code = header.get_qform(coded=True)
        elif code <= _OF_SCANNER and not _agree(affine, _qform(header)):
            raise VolumeError(
                "the sform and the qform of the header differ in the direction or the spacing of "
                "an axis, so left and right are uncertain; correct the header, or give orientation "
                "and spacing",
                "conflict",
                field="orientation",
            )
    except (KeyError, HeaderDataError, ValueError):
        raise VolumeError("the orientation of the header is damaged", "malformed") from None
    if code and not np.isfinite(affine).all():
        raise VolumeError("the orientation of the header is damaged", "malformed")
    if code:
        placed_34 = _RAS_TO_LPS @ np.asarray(affine, np.float64)[:3] * unit
        return placed_34[:, :3], placed_34[:, 3]
    if axes is None:
        raise VolumeError(
            "the header has neither sform nor qform, so left and right are unknown; give the "
            "option orientation, such as RAS",
            "missing",
            field="orientation",
        )
    return axes * np.asarray(header["pixdim"][1:4], np.float64) * unit, None


def _qform(header: Any) -> np.ndarray | None:
    """Return the affine of the qform, None where there is none or it is damaged."""
    from nibabel.spatialimages import HeaderDataError

    try:
        affine: np.ndarray | None = header.get_qform(coded=True)[0]
    except HeaderDataError:
        return None
    return affine


def _agree(sform: np.ndarray, qform: np.ndarray | None) -> bool:
    """Return whether two affines have the same directions, up to 10 degrees, and spacings, up to
    2 %; True without a second one.
    """
    if qform is None:
        return True
    one, other = sform[:3, :3], qform[:3, :3]
    lengths = np.linalg.norm(one, axis=0), np.linalg.norm(other, axis=0)
    cosines = (one * other).sum(axis=0) / np.maximum(lengths[0] * lengths[1], 1e-12)
    is_near = np.allclose(lengths[0], lengths[1], rtol=0.02, atol=0)
    return bool((cosines > 0.985).all()) and is_near


def _read_voxels(
    stream: _Stream,
    header: Any,
    dtype: np.dtype[Any],
    rescale: tuple[float, float] | None,
    builder: VolumeBuilder,
) -> None:
    """Read the voxels (k, j, i), slice by slice."""
    from nibabel.spatialimages import HeaderDataError

    try:
        slope, intercept = header.get_slope_inter()
    except HeaderDataError:
        raise VolumeError(
            "the intercept is not a finite number", "malformed", field="scl_inter"
        ) from None
    scales = slope is not None and (slope, intercept) != (1.0, 0.0)
    if rescale is not None:
        if scales:
            raise VolumeError(
                "the header has a rescale of its own beside the given one; values are rescaled "
                "once: leave one out",
                "conflict",
                field="rescale",
            )
        slope, intercept = rescale
        scales = True
    offset = float(header["vox_offset"])
    if not stream.position <= offset <= _MAX_OFFSET or offset % 1:
        raise VolumeError(
            "the voxels do not begin behind the header", "malformed", field="vox_offset"
        )
    stream.skip_to(int(offset))
    depth, height, width = builder.shape
    size = height * width * dtype.itemsize
    for index in range(depth):
        data = bytearray()
        while len(data) < size:
            data += stream.read(min(_PIECE, size - len(data)))
        stored_JI = np.frombuffer(data, dtype).reshape(height, width)
        values_JI = stored_JI * slope + intercept if scales else stored_JI
        builder.put(index, values_JI.astype(values_JI.dtype.newbyteorder("=")))
    stream.read_up_to(io.DEFAULT_BUFFER_SIZE)  # gzip compares its checksum at the end
