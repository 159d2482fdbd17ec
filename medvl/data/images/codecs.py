"""JPEG and PNG decoding and encoding in bounded memory: the header shows what decoding takes before
it begins.

Of a PNG, the decoder sees the chunks with pixels and their palette alone: no text, profile or
animation.

Conventions: alpha is dropped, colour is converted to grey by BT.601 luma. Samples of a 16-bit PNG
are scaled to 8 bits by the smallest of 8, 10, 12, 14 and 16 bits that holds the largest of them, so
12-bit values as exported from DICOM are divided by 4095. `decode_image` ignores EXIF rotation;
`make_upright` applies it.
"""

import struct
import zlib
from collections.abc import Iterator

import cv2
import numpy as np
import simplejpeg

from medvl.data.dicom.codestream import JpegPlan, count_scans, read_jpeg_plan
from medvl.errors import DicomError, ImageError

MAX_PIXELS = 1 << 26
"""Default limit: 67 megapixels, four times the largest radiograph; 200 MB when decoded to
colour.
"""

_BYTES_A_PIXEL = 6
"""Memory that decoding may take for each pixel of the limit: 400 MB in all by default. OpenCV
holds an image twice.
"""
_USUAL_SCANS = 16
_WITHOUT_BLACK = (1, 3)  # components of a JPEG in grey or colour; CMYK has four
_MAX_CHUNKS = 1 << 17
_MAX_SIDE = 1 << 20
_ORIENTATION = 0x0112
_SHORT = 3
_LONG = 4
_DEPTHS = (8, 10, 12, 14, 16)
_JPEG_START = b"\xff\xd8\xff"
_JPEG_END = b"\xff\xd9"
_PNG_START = b"\x89PNG\r\n\x1a\n"
_PNG_END = b"\0\0\0\0IEND\xaeB`\x82"
_HEADER_FIELDS = ((20, 24), (16, 20), (24, 25), (25, 26))  # height, width, bits and kind of samples
_GREY = (0, 4)  # kinds of a PNG's samples without colour


def decode_image(data: bytes, *, color: bool = False, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """Decode a JPEG or PNG of any colour mode and depth to uint8 (H, W), or with `color` to RGB (H,
    W, 3).

    Raises ImageError with the code "empty", "unknown_format", "too_large" (more than `max_pixels`,
    or than 6 bytes of memory for each of these: 16-bit colour may have half as many pixels),
    "truncated", "malformed" or "unsupported".
    """
    if not data:
        raise ImageError("the image file is empty", "empty")
    if is_jpeg(data):
        return _decode_jpeg(data, color, max_pixels)
    if data.startswith(_PNG_START):
        return _decode_png(data, color, max_pixels)
    if _PNG_START.startswith(data) or _JPEG_START.startswith(data):
        raise ImageError("the image file is truncated within its first bytes", "truncated")
    raise ImageError(
        "expected a JPEG, PNG or DICOM file by its content; convert it to one of them",
        "unknown_format",
    )


class JpegImage:
    """A JPEG that is decoded later, in full or with a half, a quarter or an eighth of its sides.

    libjpeg computes a reduced image from the low frequencies of each block.

    Args:
        data: the file.
        color: RGB in place of grey.
        orientation: EXIF orientation to apply (`make_upright`).

    Attributes:
        data: the file.
        shape: (H, W), or (H, W, 3) in colour, of the upright image in full.

    Raises ImageError as `decode_image`: for the header here, for the pixels in `decode`.
    """

    def __init__(self, data: bytes, *, color: bool = False, orientation: int = 1) -> None:
        self.data = data
        self._color = color
        self._orientation = orientation
        self._sides = _check_jpeg(data, color, MAX_PIXELS)
        height, width = self._sides if orientation < 5 else self._sides[::-1]
        self.shape: tuple[int, ...] = (height, width, 3) if color else (height, width)
        self._decoded: dict[int, np.ndarray] = {}

    def decode(self, factor: int = 1) -> np.ndarray:
        """Return the upright image with its sides divided by `factor` (1, 2, 4 or 8), rounded up.

        A second view of the same size is not decoded again.
        """
        if factor not in self._decoded:
            height, width = self._sides
            sides = (-(-height // factor), -(-width // factor)) if factor > 1 else (0, 0)
            pixels = _read_jpeg(self.data, self._color, sides)
            if self._orientation > 1:
                pixels = make_upright(pixels, self._orientation)
            self._decoded[factor] = pixels
        return self._decoded[factor]

    def suits_device(self) -> bool:
        """Return whether a GPU's decoder is sure to read the file as `decode` does: a whole
        baseline JPEG, upright, grey or Y'CbCr. Damage between its pixels is not looked for.
        """
        plan = _plan_jpeg(self.data)
        if self._orientation > 1 or plan is None or plan.is_held or not plan.is_baseline:
            return False
        if self.data.rfind(_JPEG_END) < plan.scan:  # not among compressed pixels, but in metadata
            return False
        if plan.components == 1:
            return True
        return plan.components == 3 and simplejpeg.decode_jpeg_header(self.data)[2] == "YCbCr"


def is_jpeg(data: bytes) -> bool:
    """Return whether the content of an image file begins as a JPEG."""
    return data.startswith(_JPEG_START)


def open_image(data: bytes, *, color: bool = False, orientation: int = 1) -> np.ndarray | JpegImage:
    """Return a JPEG to be decoded later, and any other image decoded, upright by `orientation`.

    Raises ImageError as `decode_image`.
    """
    if is_jpeg(data):
        return JpegImage(data, color=color, orientation=orientation)
    return make_upright(decode_image(data, color=color), orientation)


def exif_orientation(data: bytes) -> int:
    """Return the EXIF orientation of a JPEG or PNG file, 1 (upright) to 8; 1 where there is none
    or it is damaged.
    """
    if data.startswith(_PNG_START):
        bodies = (data[start:end] for kind, start, end in _png_chunks(data) if kind == b"eXIf")
    else:
        bodies = (data[start + 6 : end] for start, end in _exif_segments(data))
    try:
        return tiff_orientation(next(bodies, b""))
    except ImageError:  # too many chunks
        return 1


def tiff_orientation(tiff: bytes) -> int:
    """Return the orientation in EXIF data, which begin with the byte order; 1 where there is
    none.
    """
    order = ">" if tiff.startswith(b"MM") else "<"
    try:
        (offset,) = struct.unpack_from(f"{order}I", tiff, 4)
        (count,) = struct.unpack_from(f"{order}H", tiff, offset)
        for entry in range(count):
            tag, kind, _ = struct.unpack_from(f"{order}HHI", tiff, offset + 2 + 12 * entry)
            if tag == _ORIENTATION and kind in (_SHORT, _LONG):
                letter = "H" if kind == _SHORT else "I"
                (value,) = struct.unpack_from(f"{order}{letter}", tiff, offset + 10 + 12 * entry)
                return int(value) if 1 <= value <= 8 else 1
    except struct.error:
        return 1
    return 1


def _exif_segments(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield the (start, end) of the EXIF segments of a JPEG, before its pixels."""
    offset = 2
    while data[offset : offset + 1] == b"\xff" and offset + 4 <= len(data):
        marker = data[offset + 1]
        if marker == 0xFF:  # a fill byte
            offset += 1
            continue
        if marker == 0xDA:
            return
        end = offset + 2 + max(2, int.from_bytes(data[offset + 2 : offset + 4], "big"))
        if marker == 0xE1 and data[offset + 4 : offset + 10] == b"Exif\0\0":
            yield offset + 4, end
        offset = end


def make_upright(image: np.ndarray, orientation: int) -> np.ndarray:
    """Turn and mirror `image`, (H, W) or (H, W, 3), by its EXIF orientation, as viewers do."""
    if orientation >= 5:  # rows and columns are exchanged
        image = image.swapaxes(0, 1)
    if orientation in (2, 3, 6, 7):
        image = image[:, ::-1]
    if orientation in (3, 4, 7, 8):
        image = image[::-1]
    return np.ascontiguousarray(image)


def encode_jpeg(image: np.ndarray, quality: int = 95) -> bytes:
    """Encode uint8 (H, W) or RGB (H, W, 3) as JPEG; colour at full resolution (4:4:4)."""
    image_HWC = np.ascontiguousarray(image if image.ndim == 3 else image[:, :, None])
    grey = image_HWC.shape[2] == 1
    return simplejpeg.encode_jpeg(
        image_HWC,
        quality=quality,
        colorspace="GRAY" if grey else "RGB",
        colorsubsampling="Gray" if grey else "444",
        fastdct=False,
    )


def encode_png(image: np.ndarray) -> bytes:
    """Encode uint8 or uint16 (H, W) or RGB (H, W, 3) as PNG."""
    encoded, data = cv2.imencode(
        ".png", image if image.ndim == 2 else cv2.cvtColor(image, cv2.COLOR_RGB2BGR)
    )
    if not encoded:
        raise ImageError(f"cannot write an image of shape {image.shape} as PNG", "unsupported")
    return data.tobytes()


def resize_short_side(image: np.ndarray, size: int, *, enlarge: bool = False) -> np.ndarray:
    """Resize `image`, (H, W) or (H, W, 3), so that its short side has `size` pixels; the aspect
    ratio is kept.

    Shrinking averages over areas, so that fine lines fade instead of aliasing. 2 x 2 means are ten
    times cheaper than other areas, so the image is halved first while a factor of two remains (a
    last odd row or column is dropped); the difference is smaller than that of JPEG at quality 95.
    Smaller images are returned unchanged, or with `enlarge` interpolated bicubically.
    """
    height, width = image.shape[:2]
    short = min(height, width)
    if short == size or (short < size and not enlarge):
        return image
    target = (max(1, round(width * size / short)), max(1, round(height * size / short)))
    while min(image.shape[:2]) >= 4 * size:
        half_height, half_width = (side // 2 for side in image.shape[:2])
        even = image[: 2 * half_height, : 2 * half_width]
        image = cv2.resize(even, (half_width, half_height), interpolation=cv2.INTER_AREA)
    return cv2.resize(
        image, target, interpolation=cv2.INTER_AREA if short > size else cv2.INTER_CUBIC
    )


def encode_stored(image: np.ndarray, short_side: int, image_format: str, quality: int) -> bytes:
    """Encode an image as shards store it: shrunk to a short side, as "jpg" of a quality or as
    "png".
    """
    small = resize_short_side(image, short_side)
    return encode_jpeg(small, quality) if image_format == "jpg" else encode_png(small)


def _check_size(height: int, width: int, max_pixels: int) -> None:
    if height * width == 0:
        raise ImageError(f"the image is empty: {height} x {width} pixels", "malformed")
    if height * width > max_pixels or max(height, width) > _MAX_SIDE:
        limit = f"the limit of {max_pixels} pixels or of {_MAX_SIDE} a side"
        raise ImageError(
            f"the image has {height} x {width} pixels, over {limit}; make it smaller", "too_large"
        )


def _check_memory(height: int, width: int, bytes_a_pixel: float, max_pixels: int) -> None:
    """Raise ImageError if decoding takes more memory than the limit of pixels stands for."""
    limit = _BYTES_A_PIXEL * max_pixels
    size = int(height * width * bytes_a_pixel)
    if size > limit:
        what = (
            f"the image of {height} x {width} pixels takes {size} bytes to decode, over the "
            f"limit of {limit}"
        )
        raise ImageError(f"{what}; make it smaller, or save it with 8 bits a sample", "too_large")


def _damaged(codec: str, truncated: bool) -> ImageError:
    return ImageError(
        f"the {codec} is {'truncated' if truncated else 'damaged'}",
        "truncated" if truncated else "malformed",
    )


def _decode_jpeg(data: bytes, color: bool, max_pixels: int) -> np.ndarray:
    _check_jpeg(data, color, max_pixels)
    return _read_jpeg(data, color)


def _check_jpeg(data: bytes, color: bool, max_pixels: int) -> tuple[int, int]:
    """Return the height and width of a JPEG. Raises ImageError where decoding takes too much."""
    plan = _plan_jpeg(data)
    if plan is not None and plan.precision != 8:
        message = f"the JPEG has {plan.precision} bits a sample, expected 8; save it as a PNG"
        raise ImageError(message, "unsupported")
    if plan is not None and not plan.is_held and plan.components in _WITHOUT_BLACK:
        # As in most files: the decoder takes one pass, and finds the same header.
        _check_size(plan.rows, plan.columns, max_pixels)
        _check_memory(plan.rows, plan.columns, 3.0 if color else 1.0, max_pixels)
        return plan.rows, plan.columns
    try:
        height, width, space, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        raise ImageError("the JPEG header is damaged", "malformed") from None
    _check_size(height, width, max_pixels)
    working = (3.0 if color else 1.0) + (4.0 if space in ("CMYK", "YCCK") else 0.0)
    held = 8.0 if plan is None else 2 * plan.samples_a_pixel if plan.is_held else 0.0
    _check_memory(height, width, working + held, max_pixels)
    scans, excess = count_scans(data)
    if excess:
        raise ImageError(excess, "too_large")
    if scans > _USUAL_SCANS and scans * height * width > _USUAL_SCANS * max_pixels:
        raise ImageError(
            f"the JPEG has {scans} passes over {height} x {width} pixels; save it again",
            "too_large",
        )
    return height, width


def _read_jpeg(data: bytes, color: bool, sides: tuple[int, int] = (0, 0)) -> np.ndarray:
    """Return the pixels of a JPEG, in the smallest of libjpeg's sizes with at least these sides; 0:
    in full.
    """
    try:
        image_HWC = simplejpeg.decode_jpeg(
            data,
            colorspace="RGB" if color else "GRAY",
            fastdct=False,
            min_height=sides[0],
            min_width=sides[1],
        )
    except ValueError as error:  # libjpeg by default fills in grey
        truncated = "premature end" in str(error).lower()
        raise _damaged("JPEG", truncated) from None
    return image_HWC if color else image_HWC[:, :, 0]


def _plan_jpeg(data: bytes) -> JpegPlan | None:
    """Return what a JPEG takes to decode; None where its header is damaged, which libjpeg may
    tolerate.
    """
    try:
        return read_jpeg_plan(data)
    except DicomError:
        return None


def _decode_png(data: bytes, color: bool, max_pixels: int) -> np.ndarray:
    pixel_file = _pixel_chunks(data)
    height, width, bits, kind = (int.from_bytes(data[start:end]) for start, end in _HEADER_FIELDS)
    is_grey = kind in _GREY
    _check_size(height, width, max_pixels)
    _check_memory(height, width, 2 * (1 if is_grey else 3) * (2 if bits == 16 else 1), max_pixels)
    flags = (cv2.IMREAD_GRAYSCALE if is_grey else cv2.IMREAD_COLOR_RGB) | cv2.IMREAD_ANYDEPTH
    try:
        samples = cv2.imdecode(
            np.frombuffer(pixel_file, np.uint8), flags | cv2.IMREAD_IGNORE_ORIENTATION
        )
    except cv2.error:
        samples = None
    if samples is None:
        # OpenCV gives no reason. Where the memory of the pixels is not to be had, numpy raises
        # MemoryError here.
        np.empty(height * width * (1 if is_grey else 3) * (2 if bits == 16 else 1), np.uint8)
        raise _damaged("PNG", truncated=False)
    pixels = to_8_bits(samples) if samples.dtype == np.uint16 else samples
    if is_grey:
        return cv2.cvtColor(pixels, cv2.COLOR_GRAY2RGB) if color else pixels
    return pixels if color else _luma(pixels)


def _pixel_chunks(data: bytes) -> bytes:
    """Return a PNG with the chunks of its pixels and palette alone. Raises ImageError if one is
    damaged or cut off.
    """
    pieces: list[bytes | memoryview] = [_PNG_START]
    view = memoryview(data)
    has_pixels = False
    for kind, start, end in _png_chunks(data):
        if kind not in (b"IHDR", b"PLTE", b"IDAT"):
            continue
        if end + 4 > len(data):
            raise _damaged("PNG", truncated=True)
        if zlib.crc32(view[start - 4 : end]) != int.from_bytes(data[end : end + 4]):
            raise _damaged("PNG", truncated=False)
        has_pixels |= kind == b"IDAT"
        pieces.append(view[start - 8 : end + 4])
    if data[12:16] != b"IHDR" or data[8:12] != b"\0\0\0\r":
        raise _damaged("PNG", truncated=len(data) < 33)
    if not has_pixels:
        raise _damaged("PNG", truncated=True)
    pieces.append(_PNG_END)
    return data if sum(map(len, pieces)) == len(data) else b"".join(pieces)


def _png_chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yield (type, start, end) of the bodies of a PNG's chunks. Raises ImageError if there are
    too many.
    """
    offset = len(_PNG_START)
    for _ in range(_MAX_CHUNKS):
        head = data[offset : offset + 8]
        if len(head) < 8 or head[4:] == b"IEND":
            return
        start = offset + 8
        end = start + int.from_bytes(head[:4])
        yield head[4:], start, end
        offset = end + 4
    raise ImageError(f"the PNG has more than {_MAX_CHUNKS} chunks; save it again", "too_large")


def _luma(image_HWC: np.ndarray) -> np.ndarray:
    """Return BT.601 luma with the rounding of Pillow, of a few rows at a time."""
    height, width, _ = image_HWC.shape
    luma_HW = np.empty((height, width), np.uint8)
    rows = max(1, (1 << 20) // width)
    for row in range(0, height, rows):
        red, green, blue = np.moveaxis(image_HWC[row : row + rows].astype(np.uint32), -1, 0)
        luma_HW[row : row + rows] = (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16
    return luma_HW


def _depth(samples: np.ndarray) -> int:
    """Return the smallest of `_DEPTHS` that holds the largest sample."""
    largest = int(samples.max())
    return next(bits for bits in _DEPTHS if largest < 1 << bits)


def to_8_bits(samples: np.ndarray) -> np.ndarray:
    """Scale 16-bit samples to uint8 by their depth."""
    scale = ((1 << _depth(samples)) - 1) / 255
    table = (
        (np.arange(1 << 16, dtype=np.float32) / np.float32(scale))
        .round()
        .clip(0, 255)
        .astype(np.uint8)
    )
    return cv2.LUT(np.ascontiguousarray(samples, np.uint16), table)
