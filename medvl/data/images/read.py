"""Reading an image file of a corpus: from a path to pixels."""

import errno
from collections import Counter
from pathlib import Path

import numpy as np

from medvl.data.dicom.reader import DicomHeader, read_dicom
from medvl.data.images.codecs import decode_image
from medvl.data.privacy.burned_in_text import has_burned_in_text
from medvl.errors import ImageError

_MAX_FILE_BYTES = 1 << 30


def read_pixels(
    path: Path | None, *, color: bool = False, warnings: Counter[str] | None = None
) -> tuple[np.ndarray, DicomHeader | None]:
    """Read a DICOM, JPEG or PNG file.

    Args:
        path: `Sample.image`.
        color: return three channels. DICOM images are always grey.
        warnings: if given, DICOM images are screened for burned-in text and the detections are counted here.

    Returns:
        uint8 pixels, (H, W) or (H, W, 3), and the allow-listed header fields of a DICOM file.

    Raises:
        DicomError, ImageError: the file cannot be read, or the path is None.
        FileNotFoundError: the file does not exist.
    """
    if path is None:
        raise ImageError("the sample has no image path", "no_image")
    if path.suffix.lower() in (".dcm", ".dicom"):
        if not path.is_file():
            raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
        image = read_dicom(path)
        if warnings is not None:
            warnings["says_burned_in"] += image.header.burned_in is True
            warnings["possible_burned_in_text"] += has_burned_in_text(image.pixels_HW)
        return image.pixels_HW, image.header
    if path.stat().st_size > _MAX_FILE_BYTES:
        raise ImageError(f"{path} is larger than {_MAX_FILE_BYTES >> 20} MiB", "too_large")
    return decode_image(path.read_bytes(), color=color), None
