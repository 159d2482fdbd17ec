"""JPEG and PNG decoding and encoding in bounded memory: the size in the header is checked before decoding.

Conventions: alpha is dropped, colour is converted to grey by BT.601 luma. Samples of a 16-bit PNG are scaled to 8 bits
by the smallest of 8, 10, 12, 14 and 16 bits that holds the largest of them, so 12-bit values as exported from DICOM are
divided by 4095. `decode_image` ignores EXIF rotation; `make_upright` applies it.
"""

import struct
from io import BytesIO

import cv2
import numpy as np
import simplejpeg
from PIL import Image

from medvl.data.dicom.codestream import excess_of_scans
from medvl.errors import ImageError

MAX_PIXELS = 1 << 26
"""Default limit: 67 megapixels, four times the largest radiograph; 200 MB when decoded to colour."""

_EXIF_BYTES = 1 << 16
_ORIENTATION = 0x0112
_DEPTHS = (8, 10, 12, 14, 16)
_JPEG_START, _PNG_START = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"


def decode_image(data: bytes, *, color: bool = False, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """Decode a JPEG or PNG of any colour mode and depth to uint8 (H, W), or with `color` to RGB (H, W, 3).

    Raises ImageError with the code "empty", "unknown_format", "too_large" (more than `max_pixels`, or
    64 scans), "truncated", "malformed" or "unsupported".
    """
    if not data:
        raise ImageError("the image file is empty", "empty")
    if data.startswith(_JPEG_START):
        return _decode_jpeg(data, color, max_pixels)
    if data.startswith(_PNG_START):
        return _decode_png(data, color, max_pixels)
    if _PNG_START.startswith(data) or _JPEG_START.startswith(data):
        raise ImageError("the image file is truncated within its first bytes", "truncated")
    raise ImageError("expected a JPEG, PNG or DICOM file by its content; convert it to one of them", "unknown_format")


def exif_orientation(data: bytes) -> int:
    """Return the EXIF orientation of a JPEG or PNG file, 1 (upright) to 8; 1 where there is none or it is damaged."""
    head = data[:_EXIF_BYTES]
    marker = b"eXIf" if head.startswith(_PNG_START) else b"Exif\0\0"
    _, found, tiff = head.partition(marker)
    if not found:
        return 1
    order = ">" if tiff.startswith(b"MM") else "<"
    try:
        (offset,) = struct.unpack_from(f"{order}I", tiff, 4)
        (count,) = struct.unpack_from(f"{order}H", tiff, offset)
        entries = (struct.unpack_from(f"{order}HHIH", tiff, offset + 2 + 12 * entry) for entry in range(count))
        orientation = next((value for tag, _, _, value in entries if tag == _ORIENTATION), 1)
    except struct.error:
        return 1
    return orientation if 1 <= orientation <= 8 else 1


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
    encoded, data = cv2.imencode(".png", image if image.ndim == 2 else cv2.cvtColor(image, cv2.COLOR_RGB2BGR))
    if not encoded:
        raise ImageError(f"cannot write an image of shape {image.shape} as PNG", "unsupported")
    return data.tobytes()


def resize_short_side(image: np.ndarray, size: int, *, enlarge: bool = False) -> np.ndarray:
    """Resize `image`, (H, W) or (H, W, 3), so that its short side has `size` pixels; the aspect ratio is kept.

    Shrinking averages over areas, so that fine lines fade instead of aliasing. 2 x 2 means are ten times cheaper than
    other areas, so the image is halved first while a factor of two remains (a last odd row or column is dropped); the
    difference is smaller than that of JPEG at quality 95. Smaller images are returned unchanged, or with `enlarge`
    interpolated bicubically.
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
    return cv2.resize(image, target, interpolation=cv2.INTER_AREA if short > size else cv2.INTER_CUBIC)


def encode_stored(image: np.ndarray, short_side: int, image_format: str, quality: int) -> bytes:
    """Encode an image as shards store it: shrunk to a short side, as "jpg" of a quality or as "png"."""
    small = resize_short_side(image, short_side)
    return encode_jpeg(small, quality) if image_format == "jpg" else encode_png(small)


def _check_size(height: int, width: int, max_pixels: int) -> None:
    if height * width > max_pixels:
        raise ImageError(f"the image has {height} x {width} pixels, over the limit of {max_pixels}", "too_large")
    if height * width == 0:
        raise ImageError(f"the image is empty: {height} x {width} pixels", "malformed")


def _damaged(codec: str, truncated: bool) -> ImageError:
    return ImageError(
        f"the {codec} is {'truncated' if truncated else 'damaged'}", "truncated" if truncated else "malformed"
    )


def _decode_jpeg(data: bytes, color: bool, max_pixels: int) -> np.ndarray:
    try:
        height, width, _, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        raise ImageError("the JPEG header is damaged, or not 8-bit", "malformed") from None
    _check_size(height, width, max_pixels)
    if excess := excess_of_scans(data):
        raise ImageError(excess, "too_large")
    try:
        image_HWC = simplejpeg.decode_jpeg(data, colorspace="RGB" if color else "GRAY", fastdct=False)
    except ValueError as error:  # libjpeg by default fills in grey
        truncated = "premature end" in str(error).lower()
        raise _damaged("JPEG", truncated) from None
    return image_HWC if color else image_HWC[:, :, 0]


def _decode_png(data: bytes, color: bool, max_pixels: int) -> np.ndarray:
    if len(data) < 33:
        raise ImageError("the PNG is truncated within its header", "truncated")
    width, height = struct.unpack(">II", data[16:24])
    _check_size(height, width, max_pixels)
    try:
        with Image.open(BytesIO(data), formats=("PNG",)) as image:
            image.load()
    except Image.DecompressionBombError:
        raise ImageError(f"the image has {height} x {width} pixels, over Pillow's own limit", "too_large") from None
    except (OSError, EOFError, SyntaxError, ValueError, struct.error) as error:
        truncated = "truncated" in str(error).lower()
        raise _damaged("PNG", truncated) from None
    if image.mode.startswith("I"):  # 16-bit grey; Pillow's convert would clip it at 255
        grey_HW = to_8_bits(np.asarray(image))
        return cv2.cvtColor(grey_HW, cv2.COLOR_GRAY2RGB) if color else grey_HW
    if data[24] == 16:  # 16-bit colour, of which Pillow keeps the upper 8 bits
        samples_HWC = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
        if samples_HWC is not None and samples_HWC.dtype == np.uint16 and _depth(samples_HWC[:, :, :3]) < 16:
            rgb_HWC = cv2.cvtColor(to_8_bits(samples_HWC[:, :, :3]), cv2.COLOR_BGR2RGB)
            return rgb_HWC if color else np.array(Image.fromarray(rgb_HWC).convert("L"))
    return np.array(image.convert("RGB" if color else "L"))


def _depth(samples: np.ndarray) -> int:
    """Return the smallest of `_DEPTHS` that holds the largest sample."""
    largest = int(samples.max())
    return next(bits for bits in _DEPTHS if largest < 1 << bits)


def to_8_bits(samples: np.ndarray) -> np.ndarray:
    """Scale 16-bit samples to uint8 by their depth."""
    return (samples.astype(np.float32) / (((1 << _depth(samples)) - 1) / 255)).round().astype(np.uint8)
