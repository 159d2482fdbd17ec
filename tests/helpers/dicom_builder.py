"""DICOM files for tests: valid ones written by pydicom, invalid ones byte by byte."""

import io
import struct
from pathlib import Path
from typing import Any

import numpy as np
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import UID, ExplicitVRLittleEndian

DX_IMAGE = UID("1.2.840.10008.5.1.4.1.1.1.1")


def image_dataset(pixels: np.ndarray, **fields: Any) -> Dataset:
    """Return a dataset for a grey (H, W), colour (H, W, 3) or, with NumberOfFrames, multi-frame
    image.
    """
    bits = 8 * pixels.itemsize
    color = pixels.ndim == 3 and pixels.shape[2] == 3 and "NumberOfFrames" not in fields
    data = Dataset()
    data.SOPClassUID, data.SOPInstanceUID = DX_IMAGE, UID("1.2.3")
    data.file_meta = FileMetaDataset()
    data.file_meta.MediaStorageSOPClassUID = data.SOPClassUID
    data.file_meta.MediaStorageSOPInstanceUID = data.SOPInstanceUID
    data.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    data.Modality = "DX"
    data.Rows, data.Columns = pixels.shape[:2] if color else pixels.shape[-2:]
    data.SamplesPerPixel = 3 if color else 1
    data.PhotometricInterpretation = "RGB" if color else "MONOCHROME2"
    if color:
        data.PlanarConfiguration = 0
    data.BitsAllocated = data.BitsStored = bits
    data.HighBit = bits - 1
    data.PixelRepresentation = int(pixels.dtype.kind == "i")
    data.PixelData = pixels.astype(pixels.dtype.newbyteorder("<")).tobytes()
    data["PixelData"].VR = "OW" if bits > 8 else "OB"
    for name, value in fields.items():
        if value is None:
            delattr(data, name)
        else:
            setattr(data, name, value)
    return data


def write_dataset(path: Path, data: Dataset) -> Path:
    """Write `data` as a DICOM file in the transfer syntax of its file meta information."""
    buffer = io.BytesIO()
    data.save_as(buffer, enforce_file_format=True)
    path.write_bytes(buffer.getvalue())
    return path


def element(tag: int, vr: bytes, value: bytes, length: int | None = None) -> bytes:
    """Return an element in explicit little endian; `length` overrides the true length."""
    value += b"\0" * (len(value) % 2)
    length = len(value) if length is None else length
    head = struct.pack("<HH", tag >> 16, tag & 0xFFFF) + vr
    if vr in (b"OB", b"OW", b"SQ", b"UN", b"OF", b"OD"):
        return head + struct.pack("<HL", 0, length) + value
    return head + struct.pack("<H", length) + value


def raw_file(syntax: bytes, body: bytes) -> bytes:
    """Return preamble, transfer syntax and body."""
    return bytes(128) + b"DICM" + element(0x00020010, b"UI", syntax) + body


def layout(
    rows: int, columns: int, *, bits: int = 16, frames: int | None = None, samples: int = 1
) -> bytes:
    """Return the elements of the Image Pixel module."""
    color = b"RGB" if samples == 3 else b"MONOCHROME2"
    parts = [
        element(0x00280002, b"US", struct.pack("<H", samples)),
        element(0x00280004, b"CS", color),
    ]
    if frames is not None:
        parts.append(element(0x00280008, b"IS", str(frames).encode()))
    words = (
        (0x00280010, rows),
        (0x00280011, columns),
        (0x00280100, bits),
        (0x00280101, bits),
        (0x00280103, 0),
    )
    return b"".join(
        [*parts, *(element(tag, b"US", struct.pack("<H", value)) for tag, value in words)]
    )


def fragments(*frames: bytes) -> bytes:
    """Return compressed pixel data with an empty offset table."""
    items = b"".join(
        struct.pack("<HHL", 0xFFFE, 0xE000, len(frame)) + frame for frame in (b"", *frames)
    )
    return (
        element(0x7FE00010, b"OB", b"", 0xFFFFFFFF) + items + struct.pack("<HHL", 0xFFFE, 0xE0DD, 0)
    )
