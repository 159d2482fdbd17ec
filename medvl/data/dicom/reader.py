"""DICOM files to grey images, rendered as a viewer shows them, with de-identified header fields.

    image = read_dicom("study/image.dcm")
    image.pixels_HW  # uint8, black is 0
    image.header.view_position  # "PA"

Modality LUT or rescale, then VOI LUT or window (the first of several), else the range between the
0.5th and the 99.5th percentile, then the inversion of MONOCHROME1. Pixel padding is excluded from
the percentiles and shown black. Plain 8-bit samples without a window are kept unchanged. Colour
becomes luma.

Header values are read where their meaning is certain (`medvl.data.dicom.parser`): a slope of `0,5`
is 0.5. A damaged value that changes pixels raises DicomError with the keyword of its element in
`field`. It never becomes a default; absent and empty values have that of the standard.

Files are untrusted and checked against `DicomLimits`. Of the header, only `DicomHeader` is
returned, whose texts come from closed lists: it cannot contain a name, date, identifier or free
text.
"""

import dataclasses
import math
import re
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np

from medvl.common.untrusted import ANYWHERE, InputFolders
from medvl.data.dicom.parser import DicomFile, DicomLimits, Elements, damaged, open_dicom
from medvl.data.dicom.pixels import PixelLayout, decode_frame
from medvl.data.dicom.rendering import Display, LinearValues, Shading, Window, linear_values, render
from medvl.data.dicom.tags import Tag
from medvl.data.privacy import cap_age
from medvl.errors import ConfigError, DicomError

__all__ = [
    "DicomHeader", "DicomImage", "DicomLimits", "decode_dicom", "decode_dicom_header",
    "decode_dicom_values", "read_dicom",
]  # fmt: skip

DEFAULT_LIMITS = DicomLimits()

_MODALITIES = re.compile(
    r"CR|DX|RG|RF|CT|MR|US|NM|PT|MG|XA|XC|OT|SC|SEG|RTDOSE|RTIMAGE|ES|GM|SM|OP|OPT|IO|PX|IVUS|OCT"
    r"|BI|TG|DG|BMD|CFM|DMS|LS"
)
_VIEWS = re.compile(
    r"(?:AP|PA)(?: (?:LLD|RLD|AXIAL))?|LL|RL|LATERAL|XTABLE "
    r"LATERAL|LLD|RLD|LLO|RLO|LAO|RAO|LPO|RPO|SWIMMERS"
    r"|CC|MLO|ML|LM|LMO|FB|SIO|ISO|XCCL|XCCM"
)
_BODY_PARTS = re.compile(
    r"(?:PORT )?CHEST|THORAX|LUNG|HEART|RIBS?|STERNUM|CLAVICLE|SCAPULA|SHOULDER|ARM|HUMERUS|ELBOW"
    r"|FOREARM|WRIST|HAND|FINGER|EXTREMITY|[CTLS]?SPINE|COCCYX|PELVIS|HIP|LEG|FEMUR|THIGH|KNEE"
    r"|PATELLA|CALF|TIBIA|ANKLE|FOOT|CALCANEUS|TOE|HEAD|SKULL|BRAIN|ORBIT|SINUS|NOSE|EAR|EYE|FACE"
    r"|JAW|MANDIBLE|MAXILLA|ZYGOMA|NECK|THYROID|BREAST|ABDOMEN|LIVER|PANCREAS|SPLEEN|KIDNEY|BLADDER"
    r"|PROSTATE|UTERUS|OVARY|AORTA|WHOLE ?BODY"
)
_LATERALITIES = re.compile(r"[LRBU]")
_SEXES = re.compile(r"[FM]")
_SYNTAXES = re.compile(r"1\.2\.840\.10008\.1\.2(?:\.\d{1,3}){0,3}")  # those of the standard


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DicomHeader:
    """Header fields that are kept. Texts that are missing or not in their list are None."""

    rows: int
    columns: int
    frames: int
    bits_stored: int
    photometric_interpretation: str
    transfer_syntax: str | None
    modality: str | None
    view_position: str | None
    body_part: str | None
    laterality: str | None
    """L, R, B (both) or U (unpaired)."""
    patient_sex: str | None
    """F or M."""
    burned_in: bool | None
    """Whether the file declares identifying text in its pixels; None where it does not."""
    patient_age: int | None
    """Years; 90 means 90 and above."""
    pixel_spacing: tuple[float, float] | None
    """Millimetres between rows and between columns, at the patient or, if missing, at the
    detector.
    """
    damaged: tuple[str, ...] = ()
    """Keywords of fields that are None because their value is damaged. Values that change pixels
    raise instead.
    """


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class DicomImage:
    """One rendered frame and its header."""

    pixels_HW: np.ndarray
    """uint8, or uint16 with bits=16; 0 is black."""
    header: DicomHeader
    shading: Shading
    """How the grey range was chosen: voi_lut, window, percentiles, full_range, palette or color."""


def read_dicom(
    path: Path | str,
    *,
    bits: Literal[8, 16] = 8,
    frame: int | None = None,
    limits: DicomLimits = DEFAULT_LIMITS,
    folders: InputFolders = ANYWHERE,
) -> DicomImage:
    """Read one image.

    Args:
        path: a DICOM file, with or without preamble and transfer syntax.
        bits: bits of the returned grey values: 8 (uint8) or 16 (uint16).
        frame: index of the frame in a multi-frame file, from 0. With None, such files raise
            DicomError.
        limits: limits for untrusted files.
        folders: folders that the file must be in, links resolved; default any.

    Raises:
        FileNotFoundError: the file does not exist.
        DicomError: with one of the codes "unreadable", "not_a_file", "outside_folder": the file
            cannot or must not be opened; see `InputFolders`. "not_dicom": not a DICOM file.
            "no_pixels": a DICOM file without an image (a report, a plan, a directory). "truncated":
            the file ends too early. "malformed": the file contradicts itself or the standard.
            "unsupported": valid DICOM, but not supported. "multi_frame": several frames and `frame`
            is None, or no frame with this index. "too_large": over `limits`. "no_codec": the
            compression needs a package that is not installed; the message names it. "undecodable":
            the compressed data are damaged.
        ConfigError: `bits` or `frame` is out of range.
    """
    if bits not in (8, 16):
        raise ConfigError(f"bits must be 8 or 16, got {bits}", "out_of_range", field="bits")
    if frame is not None and frame < 0:
        raise ConfigError(f"frame must be 0 or more, got {frame}", "out_of_range", field="frame")
    file = folders.open(path, DicomError)
    try:
        with file:
            return decode_dicom(file, bits=bits, frame=frame, limits=limits)
    except DicomError as error:
        raise error.prefixed(f"{path}: ") from error
    except OSError as error:
        raise DicomError(f"{path} cannot be read ({error.strerror})", "unreadable") from error
    except MemoryError as error:
        raise DicomError(f"{path}: not enough memory to decode the image", "too_large") from error


def decode_dicom(
    stream: BinaryIO,
    *,
    bits: Literal[8, 16] = 8,
    frame: int | None = None,
    limits: DicomLimits = DEFAULT_LIMITS,
    window: tuple[float, float] | None = None,
) -> DicomImage:
    """Read one image from an open file.

    Args:
        stream: content of a DICOM file.
        bits, frame, limits: as in `read_dicom`.
        window: center and width, in values after the modality LUT, of a linear window in place of
            the file's own VOI LUT or window. Colour has none and stays as it is.

    Raises:
        DicomError: as `read_dicom`.
        ConfigError: the width of the window is not positive.
    """
    if window is not None and not (all(map(math.isfinite, window)) and window[1] > 0):
        raise ConfigError(
            "expected a finite center and a width above 0", "out_of_range", field="window"
        )
    try:
        return _read(open_dicom(stream, limits), bits, frame, window)
    except MemoryError as error:
        raise DicomError("not enough memory to decode the image", "too_large") from error


def decode_dicom_values(
    stream: BinaryIO, *, frame: int | None = None, limits: DicomLimits = DEFAULT_LIMITS
) -> LinearValues | None:
    """Return the values that a viewer applies a window to; None for colour, which has no window.

    Raises DicomError as `read_dicom`.
    """
    file = open_dicom(stream, limits)
    try:
        layout, index = _layout(file, frame)
        display = Display.from_elements(file.elements, layout, index)
        return linear_values(decode_frame(file, layout, index), display, layout)
    except MemoryError as error:
        raise DicomError("not enough memory to decode the image", "too_large") from error


def decode_dicom_header(stream: BinaryIO, *, limits: DicomLimits = DEFAULT_LIMITS) -> DicomHeader:
    """Return the header of a DICOM image without decoding its pixels. Raises DicomError as
    `read_dicom`.
    """
    file = open_dicom(stream, limits)
    return _header(file, PixelLayout.from_file(file))


def _read(
    file: DicomFile, bits: int, frame: int | None, window: tuple[float, float] | None = None
) -> DicomImage:
    layout, index = _layout(file, frame)
    header = _header(file, layout)
    display = Display.from_elements(file.elements, layout, index)
    if window is not None:
        display = dataclasses.replace(display, voi=Window(*window, "LINEAR_EXACT"))
    pixels_HW, shading = render(decode_frame(file, layout, index), display, layout, bits)
    return DicomImage(pixels_HW, header, shading)


def _layout(file: DicomFile, frame: int | None) -> tuple[PixelLayout, int]:
    """Return the layout of the file and the index of the frame to read."""
    layout = PixelLayout.from_file(file)
    if frame is None and layout.frames > 1:
        message = f"the file has {layout.frames} frames; select one with the option frame"
        raise DicomError(message, "multi_frame", field="frame")
    index = frame or 0
    if index >= layout.frames:
        raise DicomError(
            f"frame must be below {layout.frames}, got {index}", "multi_frame", field="frame"
        )
    return layout, index


def _header(file: DicomFile, layout: PixelLayout) -> DicomHeader:
    elements = file.elements
    spacing, damaged_fields = _spacing(elements)
    return DicomHeader(
        rows=layout.rows,
        columns=layout.columns,
        frames=layout.frames,
        bits_stored=layout.bits_stored,
        photometric_interpretation=layout.photometric,
        transfer_syntax=_listed(file.transfer_syntax, _SYNTAXES),
        modality=listed_modality(elements),
        view_position=_listed(elements.text(Tag.VIEW_POSITION), _VIEWS),
        body_part=_listed(elements.text(Tag.BODY_PART), _BODY_PARTS),
        laterality=_listed(
            elements.text(Tag.IMAGE_LATERALITY) or elements.text(Tag.LATERALITY), _LATERALITIES
        ),
        patient_sex=_listed(elements.text(Tag.PATIENT_SEX), _SEXES),
        burned_in={"YES": True, "NO": False}.get(
            (elements.text(Tag.BURNED_IN) or "").strip().upper()
        ),
        patient_age=cap_age(elements.text(Tag.PATIENT_AGE)),
        pixel_spacing=spacing,
        damaged=damaged_fields,
    )


def listed_modality(elements: Elements) -> str | None:
    """Return the modality; None where it is missing or not in the list."""
    return _listed(elements.text(Tag.MODALITY), _MODALITIES)


def _listed(text: str | None, known: re.Pattern[str]) -> str | None:
    text = (text or "").upper()
    return text if known.fullmatch(text) else None


def _spacing(elements: Elements) -> tuple[tuple[float, float] | None, tuple[str, ...]]:
    """Return the spacing, and the keyword of the element if it is damaged."""
    for tag in (Tag.PIXEL_SPACING, Tag.IMAGER_PIXEL_SPACING):
        try:
            numbers = [number for number in elements.numbers(tag) if number is not None]
            if numbers and not (
                len(numbers) == 2 and all(math.isfinite(side) and side > 0 for side in numbers)
            ):
                raise damaged(tag)
        except DicomError as error:
            if error.code != "malformed":
                raise
            return None, (str(error.field),)
        if numbers:
            return (numbers[0], numbers[1]), ()
    return None, ()
