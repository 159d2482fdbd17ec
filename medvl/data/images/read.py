"""Reading an image file of a corpus: DICOM, JPEG or PNG, from a path to pixels."""

import dataclasses
import errno
from collections import Counter

import numpy as np

from medvl.data.dicom.reader import DicomHeader, read_dicom
from medvl.data.images.codecs import decode_image
from medvl.data.privacy.burned_in_text import has_burned_in_text
from medvl.errors import ImageError
from medvl.schema import Sample

_MAX_FILE_BYTES = 1 << 30


def read_pixels(
    sample: Sample, *, color: bool = False, warnings: Counter[str] | None = None
) -> tuple[np.ndarray, Sample]:
    """Read the image at `sample.image`.

    Args:
        sample: sample with an image path.
        color: return three channels. DICOM images are always grey.
        warnings: if given, DICOM images are screened for burned-in text and the findings are counted here.

    Returns:
        uint8 pixels, (H, W) or (H, W, 3), and the sample with view, sex and age filled in from a DICOM header.

    Raises:
        DicomError, ImageError: the file cannot be read.
        FileNotFoundError: the file does not exist.
    """
    path = sample.image
    if path is None:
        raise ImageError("the sample has no image path", "no_image")
    if path.suffix.lower() in (".dcm", ".dicom"):
        if not path.is_file():
            raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
        image = read_dicom(path)
        if warnings is not None:
            warnings["says_burned_in"] += image.header.burned_in is True
            warnings["possible_burned_in_text"] += has_burned_in_text(image.pixels_HW)
        return image.pixels_HW, _fill_in(sample, image.header)
    if path.stat().st_size > _MAX_FILE_BYTES:
        raise ImageError(f"{path} is larger than {_MAX_FILE_BYTES >> 20} MiB", "too_large")
    return decode_image(path.read_bytes(), color=color), sample


def _fill_in(sample: Sample, header: DicomHeader) -> Sample:
    """Return `sample` with its missing fields filled in from the allow-listed header fields."""
    return dataclasses.replace(
        sample,
        view=sample.view or header.view_position,
        sex=sample.sex or (header.patient_sex if header.patient_sex in ("F", "M") else None),
        age=sample.age if sample.age is not None else header.patient_age,
    )
