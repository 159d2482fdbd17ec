"""Headers of compressed frames, for checks of the memory that a decoder would allocate.

A frame of a few bytes can claim 65,535 x 65,535 pixels or millions of tiles and code blocks,
whatever the DICOM header claims. JPEG: ISO 10918-1, annex B; JPEG-LS: ISO 14495-1, annex C; JPEG
2000: ISO 15444-1, annex A; RLE: DICOM PS3.5, annex G.
"""

import re
import struct
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from medvl.errors import DicomError

MAX_JPEG_SCANS = 64
"""Limit of passes over a JPEG; libjpeg writes ten for a progressive file. A file of 2 MB can
require 20,000.
"""

_MAX_JPEG_SEGMENTS = 10_000
# in compressed data, 0xFF is followed by 0x00 or a restart
_JPEG_MARKER = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")
_BASELINE = 0xC0
_EXTENDED = 0xC1
_LOSSLESS = 0xC3
_JPEG_LS = 0xF7
_FRAME_STARTS = (
    *range(0xC0, 0xC4),
    *range(0xC5, 0xC8),
    *range(0xC9, 0xCC),
    *range(0xCD, 0xD0),
    _JPEG_LS,
)
_PROGRESSIVE = (0xC2, 0xC6, 0xCA, 0xCE)
_FEW_MARKERS = 16
_START_OF_SCAN = 0xDA
_COMMENT = 0xFE
_APPLICATION = range(0xE0, 0xF0)
_COLOR_MARKS = {0xE0: (b"JFIF\0", 18), 0xEE: (b"Adobe", 16)}  # with their least length
_WITHOUT_LENGTH = (0x00, 0x01, *range(0xD0, 0xDA))


class Codestream(NamedTuple):
    """Size in the header of a compressed frame."""

    rows: int
    columns: int
    samples: int
    precision: int
    """Bits per sample."""
    parts: int = 1
    """Number of tiles and code blocks; a decoder allocates data structures for each."""
    states_color: bool = False
    """Whether a JFIF or Adobe segment or the component names state the colour transform, which
    decoders then invert.
    """


def read_jpeg_header(frame: bytes) -> Codestream:
    """Read the size in the frame header of a JPEG or JPEG-LS file.

    Raises DicomError when it is damaged, and for processes that DICOM does not use (progressive,
    arithmetic): a progressive file can require any number of passes over the image.
    """
    states_color = False
    for marker, start, end in _segments(frame):
        if marker in _FRAME_STARTS:
            if marker not in (_BASELINE, _EXTENDED, _LOSSLESS, _JPEG_LS):
                raise DicomError("progressive and arithmetic JPEG are not supported", "unsupported")
            if end - start < 10:
                break
            precision, rows, columns, samples = struct.unpack(
                ">BHHB", frame[start + 4 : start + 10]
            )
            states_color |= frame[start + 10 : end : 3] == b"RGB"
            return Codestream(rows, columns, samples, precision, states_color=states_color)
        if marker in _COLOR_MARKS:
            name, least = _COLOR_MARKS[marker]
            states_color |= frame[start + 4 : start + 9] == name and end - start >= least
    raise DicomError("the JPEG in the pixel data has no frame header", "malformed")


class JpegPlan(NamedTuple):
    """What a JPEG takes to decode."""

    precision: int
    """Bits per sample."""
    samples_a_pixel: float
    """3 for colour of full resolution, 1.5 where the chroma has a quarter of the pixels."""
    is_held: bool
    """Whether all coefficients stay in memory until the last scan, as in progressive files and
    in those of several. Decoders refuse further scans of other files.
    """
    rows: int
    columns: int
    components: int
    is_baseline: bool
    """Whether every decoder reads it: sequential and Huffman-coded, in its usual form."""
    scan: int
    """Offset of the first scan."""


def read_jpeg_plan(data: bytes) -> JpegPlan:
    """Read the frame header and the first scan of a JPEG. Raises DicomError when they are
    damaged.
    """
    frame: tuple[int, bytes] | None = None
    for marker, start, end in _segments(data):
        if marker in _FRAME_STARTS:
            frame = marker, data[start + 4 : end]
        if marker != _START_OF_SCAN or frame is None:
            continue
        header = frame[1]
        factors = [(factor >> 4, factor & 0xF) for factor in header[7::3]]
        if len(header) < 9 or not factors or not all(min(pair) > 0 for pair in factors):
            break
        largest = max(across for across, _ in factors) * max(down for _, down in factors)
        samples = sum(across * down for across, down in factors) / largest
        is_held = frame[0] in _PROGRESSIVE or data[start + 4] < len(factors)
        rows, columns = struct.unpack(">HH", header[1:5])
        return JpegPlan(
            header[0],
            samples,
            is_held,
            rows,
            columns,
            len(factors),
            is_baseline=frame[0] == _BASELINE,
            scan=start,
        )
    raise DicomError("the JPEG has no frame header before its first scan", "malformed")


def excess_of_scans(data: bytes) -> str:
    """Return why a JPEG takes too long to decode, or an empty string: a dozen bytes require a
    pass over all pixels.
    """
    return count_scans(data)[1]


def count_scans(data: bytes) -> tuple[int, str]:
    """Return the number of scans of a JPEG (0 where they are few), and why they are too many, or
    an empty string.
    """
    byte_N = np.frombuffer(data, np.uint8)
    # all markers, as in most files
    if np.count_nonzero((byte_N[:-1] == 0xFF) & (byte_N[1:] != 0)) <= _FEW_MARKERS:
        return 0, ""
    offset = 2
    scans = 0
    for _ in range(_MAX_JPEG_SEGMENTS):
        match = _JPEG_MARKER.search(data, offset)
        if match is None or match[0] == b"\xff\xd9":
            return scans, ""
        scans += match[0] == b"\xff\xda"
        if scans > MAX_JPEG_SCANS:
            return scans, f"the JPEG has more than {MAX_JPEG_SCANS} scans"
        length = (
            0
            if match[0] in (b"\xff\x01", b"\xff\xd8")
            else int.from_bytes(data[match.end() : match.end() + 2])
        )
        offset = match.end() + length
    return scans, f"the JPEG has more than {_MAX_JPEG_SEGMENTS} segments"


def strip_metadata(frame: bytes) -> bytes:
    """Return the JPEG without application segments and comments; GDCM aborts the process on some
    malformed ones.
    """
    segments = [b"\xff\xd8"]
    for marker, start, end in _segments(frame):
        if marker == _START_OF_SCAN:
            return b"".join([*segments, frame[start:]])
        if marker != _COMMENT and marker not in _APPLICATION:
            segments.append(frame[start:end])
    raise DicomError("the JPEG in the pixel data has no scan", "malformed")


def _segments(frame: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield (marker, start, end) of the segments up to the first scan."""
    if frame[:2] != b"\xff\xd8":
        raise DicomError("the compressed pixel data are not JPEG", "malformed")
    offset = 2
    while offset + 4 <= len(frame):
        marker = frame[offset + 1]
        if frame[offset] == marker == 0xFF:  # fill bytes before a marker
            offset += 1
            continue
        end = offset + 2 + int.from_bytes(frame[offset + 2 : offset + 4], "big")
        if (
            frame[offset] != 0xFF
            or marker in _WITHOUT_LENGTH
            or end < offset + 4
            or end > len(frame)
        ):
            break
        yield marker, offset, end
        if marker == _START_OF_SCAN:
            return
        offset = end
    raise DicomError("the header of the JPEG in the pixel data is damaged", "malformed")


def read_jpeg2000_header(frame: bytes) -> Codestream:
    """Read the size in the SIZ marker of a JPEG 2000, bare or in a JP2. Raises DicomError if
    damaged or subsampled.
    """
    start = frame.find(b"\xff\x4f\xff\x51", 0, 1 << 16)
    siz = frame[start + 4 : start + 42]
    if start < 0 or len(siz) < 38:
        raise DicomError("the compressed pixel data are not JPEG 2000", "malformed")
    length, _, x1, y1, x0, y0, tile_x, tile_y, tile_x0, tile_y0, samples = struct.unpack(
        ">HH8LH", siz
    )
    components = frame[start + 42 : start + 42 + 3 * samples]
    if not (
        x1 > x0
        and y1 > y0
        and tile_x
        and tile_y
        and tile_x0 <= x0
        and tile_y0 <= y0
        and 0 < samples <= 4
    ):
        raise DicomError("the header of the JPEG 2000 codestream is damaged", "malformed")
    if (
        any(step != 1 for index, step in enumerate(components) if index % 3)
        or len(components) < 3 * samples
    ):
        raise DicomError("subsampled JPEG 2000 components are not supported", "unsupported")
    tiles = -(-(x1 - tile_x0) // tile_x) * -(-(y1 - tile_y0) // tile_y)
    blocks = samples * (x1 - x0) * (y1 - y0) // _smallest_block(frame, start + 4 + length)
    return Codestream(y1 - y0, x1 - x0, samples, (components[0] & 0x7F) + 1, 64 * tiles + blocks)


def _smallest_block(frame: bytes, offset: int) -> int:
    """Return the samples per code block in the default coding style (COD) of the main header."""
    while offset + 12 <= len(frame) and frame[offset] == 0xFF and frame[offset + 1] != 0x90:
        if frame[offset + 1] == 0x52:
            width = (frame[offset + 10] & 0xF) + 2
            height = (frame[offset + 11] & 0xF) + 2
            return 1 << (width + height)
        offset += 2 + max(int.from_bytes(frame[offset + 2 : offset + 4], "big"), 2)
    raise DicomError("the header of the JPEG 2000 codestream is damaged", "malformed")


def check_rle_header(frame: bytes, segments: int) -> None:
    """Raise DicomError unless `frame` has `segments` segments within it; decoders do not check
    this header.
    """
    if len(frame) < 64:
        raise DicomError("the run-length encoded pixel data end within their header", "truncated")
    count, *offsets = struct.unpack("<16L", frame[:64])
    used = offsets[:count]
    if count != segments or used != sorted(used) or not 64 <= used[0] <= used[-1] < len(frame):
        raise DicomError("the header of the run-length encoded pixel data is damaged", "malformed")
