"""Volumes as bytes, without loss: chunks of slices, compressed by zstd with low and high bytes
apart.

    data = encode_volume(hu_DHW)
    decode_volume(data)                   # all of it
    decode_volume(data, slice(40, 56))    # reads the chunks of these slices only

A header (magic, version, dtype, slices of a chunk, shape) and a table (bytes and CRC-32 of each
chunk's compressed bytes) precede the chunks. Little-endian.
"""

import math
import struct
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from medvl.data.volumes.volume import DEFAULT_LIMITS, Volume, VolumeLimits, padding_of
from medvl.errors import VolumeError

CHUNK = 16
"""Slices of a chunk."""
_MAGIC = b"MVOL"
_VERSION = 1
_HEADER = struct.Struct("<4sBBHIII")
_ENTRY = struct.Struct("<II")
_TYPES: dict[int, np.dtype[Any]] = {1: np.dtype("<i2"), 2: np.dtype("u1")}
_LEVEL = 3


class VolumeHeader(NamedTuple):
    """Header of an encoded volume."""

    dtype: np.dtype[Any]
    chunk: int
    """Slices of a chunk; the last one may have fewer."""
    shape: tuple[int, int, int]
    chunks: tuple[tuple[int, int, int], ...]
    """(offset, bytes, CRC-32) of each chunk."""


def encode_volume(values_DHW: np.ndarray, *, chunk: int = CHUNK) -> bytes:
    """Return an int16 or uint8 volume as bytes.

    Args:
        values_DHW: not empty.
        chunk: slices of a chunk, 1 to 65535.

    Raises:
        ValueError: another dtype or number of axes, no voxels, or `chunk` out of range.
        ImportError: zstandard is not installed.
    """
    import zstandard

    codes = {np.dtype(np.int16): 1, np.dtype(np.uint8): 2}
    code = codes.get(values_DHW.dtype)
    if code is None or values_DHW.ndim != 3 or not values_DHW.size or not 0 < chunk < 1 << 16:
        raise ValueError(
            f"expected int16 or uint8 (D, H, W) and chunks of 1 to 65535 slices, got "
            f"{values_DHW.dtype} {values_DHW.shape} and {chunk}"
        )
    compressor = zstandard.ZstdCompressor(level=_LEVEL)
    frames = []
    for start in range(0, len(values_DHW), chunk):
        slab = np.ascontiguousarray(values_DHW[start : start + chunk])
        frames.append(compressor.compress(_apart(slab.reshape(-1)).data))
    header = _HEADER.pack(_MAGIC, _VERSION, code, chunk, *values_DHW.shape)
    table = b"".join(_ENTRY.pack(len(frame), zlib.crc32(frame)) for frame in frames)
    return b"".join([header, table, *frames])


def _apart(values_N: np.ndarray) -> np.ndarray:
    """Return the low bytes of int16 values, then the high ones; uint8 values as they are.

    Shifts are ten times as fast as copies with a stride.
    """
    if values_N.dtype == np.uint8:
        return values_N
    bits_N = values_N.view(np.uint16)
    planes = np.empty((2, len(bits_N)), np.uint8)
    np.copyto(planes[0], bits_N, casting="unsafe")
    np.copyto(planes[1], bits_N >> 8, casting="unsafe")
    return planes


def _joined(planes: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """Return the values of `_apart`."""
    if dtype.itemsize == 1:
        return planes
    low, high = planes.reshape(2, -1)
    bits_N = high.astype(np.uint16)
    bits_N <<= 8
    bits_N |= low
    return bits_N.view(np.int16)


def read_volume_header(data: bytes, limits: VolumeLimits = DEFAULT_LIMITS) -> VolumeHeader:
    """Return the header of an encoded volume.

    Raises:
        VolumeError: "malformed", "truncated", "version", or "too_large".
    """
    if len(data) < _HEADER.size:
        raise VolumeError("the encoded volume ends within its header", "truncated")
    magic, version, code, chunk, *sides = _HEADER.unpack_from(data)
    if magic != _MAGIC or code not in _TYPES or not chunk or not all(sides):
        raise VolumeError("not an encoded volume", "malformed")
    if version != _VERSION:
        raise VolumeError(
            f"expected an encoded volume of version {_VERSION}, got {version}; convert the corpus "
            "again",
            "version",
        )
    if math.prod(sides) > limits.voxels:
        raise VolumeError(
            f"the header describes {math.prod(sides)} voxels, over the limit of {limits.voxels}",
            "too_large",
            field="voxels",
        )
    count = math.ceil(sides[0] / chunk)
    offset = _HEADER.size + count * _ENTRY.size
    if len(data) < offset:
        raise VolumeError("the encoded volume ends within its table of chunks", "truncated")
    chunks = []
    for size, checksum in _ENTRY.iter_unpack(data[_HEADER.size : offset]):
        chunks.append((offset, size, checksum))
        offset += size
    if len(data) != offset:
        code_of_error = "truncated" if len(data) < offset else "malformed"
        raise VolumeError(
            f"expected {offset} bytes of an encoded volume, got {len(data)}", code_of_error
        )
    return VolumeHeader(_TYPES[code], chunk, (sides[0], sides[1], sides[2]), tuple(chunks))


def decode_volume(
    data: bytes, slices: slice | None = None, *, limits: VolumeLimits = DEFAULT_LIMITS
) -> np.ndarray:
    """Return the voxels (D, H, W), or those of some slices in a row.

    Args:
        data: from `encode_volume`; untrusted.
        slices: a slice along z with a step of 1; None: all.
        limits: limits for untrusted files.

    Raises:
        VolumeError: as `read_volume_header`; "mismatch" for a chunk with another checksum,
            "undecodable" for a damaged one.
        ValueError: a step other than 1.
        ImportError: zstandard is not installed.
    """
    import zstandard

    header = read_volume_header(data, limits)
    depth, height, width = header.shape
    start, stop, step = (slices or slice(None)).indices(depth)
    if step != 1:
        raise ValueError(f"expected slices with a step of 1, got {step}")
    out_DHW = np.empty((max(0, stop - start), height, width), header.dtype.newbyteorder("="))
    decompressor = zstandard.ZstdDecompressor()
    view = memoryview(data)
    for number in range(start // header.chunk, math.ceil(stop / header.chunk)):
        offset, size, checksum = header.chunks[number]
        first = number * header.chunk
        last = min(first + header.chunk, depth)
        low, high = max(first, start), min(last, stop)
        if low >= high:
            continue
        frame = view[offset : offset + size]
        if zlib.crc32(frame) != checksum:
            raise VolumeError(f"chunk {number} has another checksum than its table", "mismatch")
        count = (last - first) * height * width * header.dtype.itemsize
        try:
            # a frame states its size, which is checked before anything is unpacked
            if zstandard.frame_content_size(frame) != count:
                raise VolumeError(f"chunk {number} has another size than its slices", "malformed")
            planes = np.frombuffer(decompressor.decompress(frame), np.uint8)
        except zstandard.ZstdError:
            raise VolumeError(f"chunk {number} is damaged", "undecodable") from None
        slab = _joined(planes, header.dtype).reshape(last - first, height, width)
        out_DHW[low - start : high - start] = slab[low - first : high - first]
    return out_DHW


ORIENTATION = "LPS"
"""Axes (z, y, x) to the head, the back and the left, in DICOM's letters for x, y and z."""


def volume_fields(volume: Volume) -> dict[str, Any]:
    """Return the fields of `Sample.extra` that describe a stored volume; `padding` of other
    modalities than CT, whose padding is `AIR`.
    """
    fields: dict[str, Any] = {
        "spacing_mm": [round(step, 6) for step in volume.spacing],
        "shape": list(volume.hu_DHW.shape),
        "orientation": ORIENTATION,
        "modality": volume.modality,
    }
    if volume.modality not in (None, "CT"):
        fields["padding"] = padding_of(volume.modality, volume.hu_DHW)
    return fields


def stored_padding(volume: Volume, extra: Mapping[str, Any]) -> int:
    """Return the value of padding of a decoded volume, or of some of its slices."""
    padding = extra.get("padding")
    if volume.modality not in (None, "CT") and isinstance(padding, int) and abs(padding) < 1 << 15:
        return padding
    return padding_of(volume.modality, volume.hu_DHW)


def stored_volume(values: np.ndarray, extra: Mapping[str, Any]) -> Volume:
    """Return a decoded volume with the spacing and modality of its sample.

    Raises ValueError where the sample has no spacing of three numbers.
    """
    spacing = [float(step) for step in extra.get("spacing_mm") or ()]
    if len(spacing) != 3:
        raise ValueError("a volume without spacing_mm")
    modality = extra.get("modality")
    return Volume(
        hu_DHW=values,
        spacing=(spacing[0], spacing[1], spacing[2]),
        modality=modality if isinstance(modality, str) else None,
        is_hounsfield=modality == "CT",
    )
