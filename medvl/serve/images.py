"""Uploaded images: pixels for the models, and values for a viewer with an adjustable window."""

import base64
import dataclasses
from collections.abc import Mapping
from io import BytesIO
from typing import Any

import cv2
import numpy as np

from medvl.data.dicom.reader import DicomHeader, decode_dicom, decode_dicom_values
from medvl.data.dicom.rendering import LinearValues
from medvl.data.images.inputs import read_image
from medvl.data.images.read import check_sides, starts_like_dicom
from medvl.inference.modality import Expected, describe_doubt
from medvl.serve.requests import ImageRequest

VIEW_SIDE = 1024
"""Longest side of the pixels that the page shows."""
_SHOWN = ("modality", "view_position", "body_part", "laterality", "photometric_interpretation", "bits_stored")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Decoded:
    """An image, rendered with the window of its file or of the request."""

    pixels: np.ndarray
    """uint8 (H, W), or (H, W, 3) for a colour photograph."""
    header: DicomHeader | None
    """Allow-listed fields of a DICOM file."""


def decode(request: ImageRequest) -> Decoded:
    """Decode the image of a request by its content: DICOM, JPEG or PNG.

    A window applies to grey images. Raises DicomError, ImageError.
    """
    if starts_like_dicom(request.data[:132]):
        image = decode_dicom(BytesIO(request.data), frame=request.frame, window=request.window)
        check_sides(image.pixels_HW, "the image")
        return Decoded(pixels=image.pixels_HW, header=image.header)
    pixels = read_image(request.data)
    if request.window is not None and pixels.ndim == 2:
        center, width = request.window
        shades = np.clip((np.arange(256) - center) / width + 0.5, 0, 1)
        pixels = cv2.LUT(pixels, np.rint(shades * 255).astype(np.uint8))
    return Decoded(pixels=pixels, header=None)


def view(request: ImageRequest, models: Mapping[str, Expected]) -> dict[str, Any]:
    """Return the data with which the page shows an image and applies windows to it, as JSON values.

    `pixels` is the image as the file renders it, uint8 in `channels`. `window` has its `values` before a window, uint16
    in little endian: 0 is padding, 1 to 65535 are `low` to `high`; it is None for colour, which has no window. Both are
    in base64, row by row, with the sides `height` and `width`.
    """
    decoded = decode(dataclasses.replace(request, window=None))
    rows, columns = decoded.pixels.shape[:2]
    scale = min(1.0, VIEW_SIDE / max(rows, columns))
    size = (max(1, round(columns * scale)), max(1, round(rows * scale)))
    shown = _resized(decoded.pixels, size)
    values = _values(request, decoded.header, shown)
    header = decoded.header
    return {
        "height": size[1],
        "width": size[0],
        "channels": decoded.pixels.ndim if decoded.pixels.ndim == 3 else 1,
        "rows": rows,
        "columns": columns,
        "frames": 1 if header is None else header.frames,
        "format": "image" if header is None else "DICOM",
        "warning": describe_doubt(header, models),
        "burned_in": None if header is None else header.burned_in,
        "header": {} if header is None else {name: getattr(header, name) for name in _SHOWN},
        "pixels": _base64(shown),
        "window": None if values is None else _window(values, size),
    }


def describe(header: DicomHeader | None, models: Mapping[str, Expected]) -> dict[str, str | None]:
    """Return modality, body part and warning (`describe_doubt`) of an image, as JSON values."""
    names = ("modality", "body_part")
    return {
        **{name: None if header is None else getattr(header, name) for name in names},
        "warning": describe_doubt(header, models),
    }


def _values(request: ImageRequest, header: DicomHeader | None, shown: np.ndarray) -> LinearValues | None:
    if header is not None:
        return decode_dicom_values(BytesIO(request.data), frame=request.frame)
    return None if shown.ndim == 3 else LinearValues(shown.astype(np.float32), 127.5, 255.0, False)


def _window(values: LinearValues, size: tuple[int, int]) -> dict[str, Any] | None:
    """Return the values of a frame as 16-bit codes with their range; None where all are padding."""
    present_HW = np.isfinite(values.values_HW)
    if not present_HW.any():
        return None
    low, high = float(values.values_HW[present_HW].min()), float(values.values_HW[present_HW].max())
    filled_HW = _resized(np.where(present_HW, values.values_HW, np.float32(low)), size)
    codes_HW = 1 + np.rint((filled_HW - low) / max(high - low, 1e-6) * 65534).clip(0, 65534)
    present_hw = cv2.resize(present_HW.astype(np.uint8), size, interpolation=cv2.INTER_NEAREST)
    return {
        "values": _base64((codes_HW * present_hw).astype("<u2")),
        "low": low,
        "high": high,
        "center": values.center,
        "width": values.width,
        "inverted": values.inverted,
    }


def _resized(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Return an image with a size of (width, height)."""
    return image if image.shape[1::-1] == size else cv2.resize(image, size, interpolation=cv2.INTER_AREA)


def _base64(array: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
