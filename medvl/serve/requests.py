"""Reading of requests: forms of limited size, kept in memory, and their fields."""

import asyncio
import base64
import dataclasses
import math
from collections.abc import AsyncGenerator, Callable, Mapping
from io import BytesIO
from typing import Any

import cv2
import numpy as np
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request

from medvl.data.dicom.parser import starts_like_dicom
from medvl.data.dicom.reader import DicomHeader, decode_dicom, decode_dicom_values
from medvl.data.dicom.rendering import LinearValues
from medvl.data.images.read import check_sides, read_image
from medvl.inference.models import Expected, describe_doubt
from medvl.serve.config import ServeConfig
from medvl.serve.guard import Refused

MAX_TEXTS = 32
MAX_TEXT_LENGTH = 500
_FIELDS = frozenset(("image", "text", "frame", "center", "width"))
_MOST_FRAMES = 20_000


class _InMemoryParser(MultiPartParser):
    """Starlette's parser, which would write files of more than 1 MB to a temporary file."""

    spool_max_size = 1 << 40


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ImageRequest:
    """Fields of a request about an image."""

    files: tuple[bytes, ...]
    """Content of the file; of a volume, of the files of its series."""
    frame: int
    """Frame of a multi-frame DICOM file."""
    window: tuple[float, float] | None
    """Center and width of the window that the image is rendered with; None: the file's own."""
    texts: tuple[str, ...]
    """Findings, a phrase, or a question."""

    @property
    def data(self) -> bytes:
        """Content of the first file."""
        return self.files[0]


async def read_request(
    request: Request, config: ServeConfig, count: Callable[[int], None], most_files: int = 1
) -> ImageRequest:
    """Read a form with the file `image` and the fields frame, center, width and any number of
    `text`.

    `count` is called with the number of bytes that have arrived. `most_files` are the files that
    `image` may have.

    Raises `Refused`: 413 over the limit, 408 when it takes too long or stops, 415 for another type,
    400 for a damaged form and for another field; and what `count` raises.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "multipart/form-data":
        raise Refused(415, "wrong_type", "expected multipart/form-data with the file `image`")
    length = request.headers.get("content-length", "")
    if length.isdigit() and len(length) < 20 and int(length) > config.max_bytes:
        raise _too_large(config)
    parser = _InMemoryParser(
        request.headers,
        _bounded(request, config, count),
        max_files=most_files,
        max_fields=MAX_TEXTS + 4,
        max_part_size=8192,
    )
    try:
        async with asyncio.timeout(config.upload_seconds):
            form = await parser.parse()
    except TimeoutError:
        limits = (
            f"{config.upload_seconds:g} seconds, and without a pause of {config.stall_seconds:g}"
        )
        raise Refused(408, "slow", f"the request did not arrive within {limits}") from None
    except (MultiPartException, KeyError, ValueError):
        raise Refused(
            400, "malformed", "the form is damaged, or has too many or too long fields"
        ) from None
    except ClientDisconnect:
        raise Refused(400, "truncated", "the connection was closed") from None
    try:
        return await _fields(form)
    finally:
        await form.close()


async def _bounded(
    request: Request, config: ServeConfig, count: Callable[[int], None]
) -> AsyncGenerator[bytes, None]:
    received = 0
    stream = request.stream()
    while True:
        async with asyncio.timeout(config.stall_seconds):
            chunk = await anext(stream, None)
        if chunk is None:
            return
        received += len(chunk)
        if received > config.max_bytes:
            raise _too_large(config)
        count(len(chunk))
        yield chunk


def _too_large(config: ServeConfig) -> Refused:
    return Refused(413, "too_large", f"the upload is over the limit of {config.max_megabytes} MB")


async def _fields(form: FormData) -> ImageRequest:
    unknown = sorted(form.keys() - _FIELDS)
    if unknown:
        message = f"expected the fields {', '.join(sorted(_FIELDS))}, got {unknown[0][:40]!r}"
        raise Refused(400, "unknown_name", message)
    images = [image for image in form.getlist("image") if isinstance(image, UploadFile)]
    if not images:
        raise Refused(400, "missing", "expected a file in the field `image`")
    files = tuple([await image.read() for image in images])
    texts = [
        text.strip() for text in form.getlist("text") if isinstance(text, str) and text.strip()
    ]
    if len(texts) > MAX_TEXTS or any(len(text) > MAX_TEXT_LENGTH for text in texts):
        message = f"expected at most {MAX_TEXTS} texts of {MAX_TEXT_LENGTH} characters"
        raise Refused(413, "too_large", message)
    center, width = (_number(form, name) for name in ("center", "width"))
    if (center is None) != (width is None) or (width is not None and width <= 0):
        raise Refused(400, "out_of_range", "a window needs a center and a width above 0")
    frame = _number(form, "frame") or 0
    if not 0 <= frame < _MOST_FRAMES:
        raise Refused(400, "out_of_range", "expected a frame of 0 or more")
    window = None if center is None or width is None else (center, width)
    return ImageRequest(
        files=files, frame=int(frame), window=window, texts=tuple(dict.fromkeys(texts))
    )


def _number(form: FormData, name: str) -> float | None:
    value = form.get(name)
    if value is None or value == "":
        return None
    try:
        number = float(value) if isinstance(value, str) else math.nan
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise Refused(400, "wrong_type", f"expected a number in the field `{name}`")
    return number


# Uploaded images: pixels for the models, and values for a viewer with an adjustable window.

VIEW_SIDE = 1024
"""Longest side of the pixels that the page shows."""
_SHOWN = (
    "modality",
    "view_position",
    "body_part",
    "laterality",
    "photometric_interpretation",
    "bits_stored",
)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Decoded:
    """An image, rendered with the window of its file or of the request."""

    pixels: Any
    """uint8 (H, W), or (H, W, 3) for a colour photograph; a `Volume` for models of volumes."""
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

    `pixels` is the image as the file renders it, uint8 in `channels`. `window` has its `values`
    before a window, uint16 in little endian: 0 is padding, 1 to 65535 are `low` to `high`; it is
    None for colour, which has no window. Both are in base64, row by row, with the sides `height`
    and `width`.
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


def _values(
    request: ImageRequest, header: DicomHeader | None, shown: np.ndarray
) -> LinearValues | None:
    if header is not None:
        return decode_dicom_values(BytesIO(request.data), frame=request.frame)
    return None if shown.ndim == 3 else LinearValues(shown.astype(np.float32), 127.5, 255.0, False)


def _window(values: LinearValues, size: tuple[int, int]) -> dict[str, Any] | None:
    """Return the values of a frame as 16-bit codes with their range; None where all are padding."""
    present_HW = np.isfinite(values.values_HW)
    if not present_HW.any():
        return None
    low = float(values.values_HW[present_HW].min())
    high = float(values.values_HW[present_HW].max())
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
    return (
        image
        if image.shape[1::-1] == size
        else cv2.resize(image, size, interpolation=cv2.INTER_AREA)
    )


def _base64(array: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
