"""Reading an image file of a corpus: from a path to pixels."""

from collections import Counter
from pathlib import Path
from typing import BinaryIO

import numpy as np

from medvl.common.untrusted import ANYWHERE, InputFolders, read_limited
from medvl.data.dicom.reader import DicomHeader, decode_dicom, read_dicom
from medvl.data.images.codecs import decode_image, exif_orientation, make_upright
from medvl.data.privacy.burned_in_text import has_burned_in_text
from medvl.errors import DicomError, ImageError

_MAX_FILE_BYTES = 1 << 30
_MIN_SIDE, _MAX_ASPECT = 16, 50


def read_pixels(
    path: Path | None,
    *,
    color: bool = False,
    frame: int | None = None,
    warnings: Counter[str] | None = None,
    folders: InputFolders = ANYWHERE,
) -> tuple[np.ndarray, DicomHeader | None]:
    """Read a DICOM, JPEG or PNG file, recognised by its content; JPEG and PNG are turned upright by their EXIF data.

    Args:
        path: `Sample.image`.
        color: return three channels. DICOM images are always grey.
        frame: index of the frame in multi-frame DICOM files, from 0; with None, they are refused.
        warnings: if given, DICOM images are screened for burned-in text, and detections and turned images are counted.
        folders: folders that the file must be in, links resolved; default any.

    Returns:
        uint8 pixels, (H, W) or (H, W, 3), and the allow-listed header fields of a DICOM file.

    Raises:
        DicomError, ImageError: the file cannot be read or is outside of the folders (the message names it), or the path
            is None.
        FileNotFoundError: the file does not exist.
    """
    if path is None:
        raise ImageError("the sample has no image path", "no_image")
    with folders.open(path, ImageError) as file:
        named_dicom = path.suffix.lower() in (".dcm", ".dicom")
        if named_dicom or starts_like_dicom(file.read(132)):
            return _read_dicom(path, frame, warnings, folders)
        file.seek(0)
        data = read_limited(file, _MAX_FILE_BYTES, ImageError)
    try:
        pixels = decode_image(data, color=color)
    except ImageError as error:
        raise error.prefixed(f"{path}: ") from error
    orientation = exif_orientation(data)
    if warnings is not None and orientation != 1:
        warnings["turned_by_exif"] += 1
    return make_upright(pixels, orientation), None


def decode_file(file: BinaryIO, *, color: bool = False, frame: int | None = None) -> np.ndarray:
    """Return the pixels of a DICOM, JPEG or PNG file in memory, as `read_pixels`. Raises DicomError and ImageError."""
    start = file.read(132)
    file.seek(0)
    if starts_like_dicom(start):
        return decode_dicom(file, frame=frame).pixels_HW
    data = file.read()
    return make_upright(decode_image(data, color=color), exif_orientation(data))


def check_sides(pixels: np.ndarray, name: object) -> None:
    """Raise ImageError for strips, which a transform would enlarge to gigabytes."""
    short, long = sorted(pixels.shape[:2])
    if short < _MIN_SIDE or long > _MAX_ASPECT * short:
        expected = f"expected sides of {_MIN_SIDE} pixels or more that differ by a factor of at most {_MAX_ASPECT}"
        raise ImageError(f"{name}: {expected}, got {pixels.shape[0]} x {pixels.shape[1]}", "too_small")


def starts_like_dicom(data: bytes) -> bool:
    """Return whether a file has DICOM's preamble, or begins with an element of group 2 or 8."""
    return data[128:132] == b"DICM" or data[:2] in (b"\x02\0", b"\x08\0", b"\0\x08")


def _read_dicom(
    path: Path, frame: int | None, warnings: Counter[str] | None, folders: InputFolders
) -> tuple[np.ndarray, DicomHeader]:
    try:
        image = read_dicom(path, folders=folders)
    except DicomError as error:
        if error.code != "multi_frame" or frame is None:
            raise
        image = read_dicom(path, frame=frame, folders=folders)
    if warnings is not None:
        warnings.update(f"damaged_{keyword}" for keyword in image.header.damaged)
        warnings["says_burned_in"] += image.header.burned_in is True
        warnings["possible_burned_in_text"] += has_burned_in_text(image.pixels_HW)
    return image.pixels_HW, image.header
