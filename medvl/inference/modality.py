"""Whether an image is what chest models are trained on: modality and body part of its DICOM header."""

import os
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

from medvl.data.dicom.reader import DicomHeader, DicomImage, decode_dicom_header
from medvl.data.images.read import starts_like_dicom
from medvl.errors import DicomError

RADIOGRAPHS = ("CR", "DX", "RG")
"""Modalities of projection radiographs."""

_CHEST = ("CHEST", "PORT CHEST", "THORAX", "LUNG", "HEART")


def header_of(image: Any) -> DicomHeader | None:
    """Return the allow-listed header of a DICOM file, given by its path or bytes; None for other images."""
    try:
        if isinstance(image, DicomImage):
            return image.header
        if isinstance(image, bytes | bytearray):
            return _header(BytesIO(image))
        if isinstance(image, str | os.PathLike) and Path(image).is_file():
            with Path(image).open("rb") as file:
                return _header(file)
    except (DicomError, OSError):  # reading the pixels reports it
        return None
    return None


def _header(file: BinaryIO) -> DicomHeader | None:
    is_dicom = starts_like_dicom(file.read(132))
    file.seek(0)
    return decode_dicom_header(file) if is_dicom else None


def doubt_of(header: DicomHeader | None) -> str | None:
    """Return why an image is no radiograph of the chest, such as "MR, HEAD"; None where the header does not show it.

    JPEG and PNG files have no such header, and DICOM files need not state the part of the body.
    """
    if header is None:
        return None
    doubts = [] if header.modality in RADIOGRAPHS else [header.modality or "no known modality"]
    if header.body_part is not None and header.body_part not in _CHEST:
        doubts.append(header.body_part)
    return ", ".join(doubts) or None


def warn_of_other_images(images: Iterable[Any]) -> None:
    """Issue a UserWarning if DICOM files are no radiographs of the chest."""
    doubts = [doubt_of(header_of(image)) for image in images]
    message = describe_doubts(doubts)
    if message:
        warnings.warn(message, UserWarning, stacklevel=4)


def describe_doubts(doubts: Sequence[str | None]) -> str | None:
    """Return the warning about images, given the doubt of each; None if there is none."""
    kinds = Counter(doubt for doubt in doubts if doubt is not None)
    if not kinds:
        return None
    counts = "; ".join(f"{count} {kind}" for kind, count in kinds.most_common(5)) + ("; ..." if len(kinds) > 5 else "")
    return (
        f"{kinds.total()} of {len(doubts)} images are no chest radiographs by their header ({counts}): "
        "a model trained on chest radiographs gives meaningless results for them"
    )
