"""Reading an image file of a corpus: from a path to pixels, and the foreground of an image."""

import os
from collections import Counter
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, Protocol, runtime_checkable

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from medvl.common.untrusted import ANYWHERE, InputFolders, read_limited
from medvl.data.dicom.parser import starts_like_dicom
from medvl.data.dicom.reader import DicomHeader, DicomImage, decode_dicom
from medvl.data.images.codecs import (
    JpegImage,
    decode_image,
    exif_orientation,
    make_upright,
    tiff_orientation,
    to_8_bits,
)
from medvl.data.privacy import has_burned_in_text
from medvl.errors import DicomError, ImageError
from medvl.schema import FilePart

_MAX_FILE_BYTES = 1 << 30
_MIN_SIDE = 16
_MAX_ASPECT = 50


def read_pixels(
    image: Path | FilePart | None,
    *,
    content: bytes | None = None,
    color: bool = False,
    frame: int | None = None,
    warnings: Counter[str] | None = None,
    folders: InputFolders = ANYWHERE,
) -> tuple[np.ndarray, DicomHeader | None]:
    """Read a DICOM, JPEG or PNG file, recognised by its content; JPEG and PNG are turned upright by
    their EXIF data.

    Args:
        image: `Sample.image`.
        content: bytes of the image where it is a part of a file (`medvl.data.storage.tars`).
        color: return three channels. DICOM images are always grey.
        frame: index of the frame in multi-frame DICOM files, from 0; with None, they are refused.
        warnings: if given, DICOM images are screened for burned-in text, and detections and turned
            images are counted.
        folders: folders that a file must be in, links resolved; default any.

    Returns:
        uint8 pixels, (H, W) or (H, W, 3), and the allow-listed header fields of a DICOM file.

    Raises:
        DicomError, ImageError: the image cannot be read or its file is outside of the folders (the
            message names it), or it is None.
        FileNotFoundError: the file does not exist.
    """
    if image is None:
        raise ImageError("the sample has no image path", "no_image")
    if content is not None:
        return _decode(BytesIO(content), image, color, frame, warnings)
    if isinstance(image, FilePart):
        raise TypeError(f"{image}: expected its content, which medvl.data.storage.tars reads")
    with folders.open(image, ImageError) as file:
        return _decode(file, image, color, frame, warnings)


def _decode(
    file: BinaryIO,
    image: Path | FilePart,
    color: bool,
    frame: int | None,
    warnings: Counter[str] | None,
) -> tuple[np.ndarray, DicomHeader | None]:
    start = file.read(132)
    file.seek(0)
    if not start:
        raise ImageError(f"{image}: the image file is empty", "empty")
    named_dicom = isinstance(image, Path) and image.suffix.lower() in (".dcm", ".dicom")
    if named_dicom or starts_like_dicom(start):
        return _decode_dicom(file, image, frame, warnings)
    data = (
        file.getvalue()
        if isinstance(file, BytesIO)
        else read_limited(file, _MAX_FILE_BYTES, ImageError)
    )
    try:
        pixels = decode_image(data, color=color)
    except ImageError as error:
        raise error.prefixed(f"{image}: ") from error
    orientation = exif_orientation(data)
    if warnings is not None and orientation != 1:
        warnings["turned_by_exif"] += 1
    return make_upright(pixels, orientation), None


def decode_file(file: BinaryIO, *, color: bool = False, frame: int | None = None) -> np.ndarray:
    """Return the pixels of a DICOM, JPEG or PNG file in memory, as `read_pixels`. Raises
    DicomError and ImageError.
    """
    start = file.read(132)
    file.seek(0)
    if starts_like_dicom(start):
        return decode_dicom(file, frame=frame).pixels_HW
    data = file.read()
    return make_upright(decode_image(data, color=color), exif_orientation(data))


def check_sides(pixels: np.ndarray | JpegImage, name: object) -> None:
    """Raise ImageError for strips, which a transform would enlarge to gigabytes."""
    short, long = sorted(pixels.shape[:2])
    if short < _MIN_SIDE or long > _MAX_ASPECT * short:
        expected = (
            f"expected sides of {_MIN_SIDE} pixels or more that differ by a factor of at "
            f"most {_MAX_ASPECT}"
        )
        raise ImageError(
            f"{name}: {expected}, got {pixels.shape[0]} x {pixels.shape[1]}", "too_small"
        )


def _decode_dicom(
    file: BinaryIO, name: object, frame: int | None, warnings: Counter[str] | None
) -> tuple[np.ndarray, DicomHeader]:
    try:
        try:
            image = decode_dicom(file)
        except DicomError as error:
            if error.code != "multi_frame" or frame is None:
                raise
            file.seek(0)
            image = decode_dicom(file, frame=frame)
    except DicomError as error:
        raise error.prefixed(f"{name}: ") from error
    except OSError as error:
        raise DicomError(f"{name} cannot be read ({error.strerror})", "unreadable") from error
    if warnings is not None:
        warnings.update(f"damaged_{keyword}" for keyword in image.header.damaged)
        warnings["says_burned_in"] += image.header.burned_in is True
        warnings["possible_burned_in_text"] += has_burned_in_text(image.pixels_HW)
    return image.pixels_HW, image.header


# Conversion of images to uint8 pixels: paths, bytes of files, PIL, numpy, tensors, DICOM
# datasets.


@runtime_checkable
class DicomDataset(Protocol):
    """A pydicom dataset."""

    def save_as(self, filename: Any, /) -> None:
        """Write the dataset as a DICOM file."""


@runtime_checkable
class TensorLike(Protocol):
    """A tensor of torch, which is not imported for it: conversions have no use for its memory."""

    def is_floating_point(self) -> bool:
        """Return whether the values are floats."""

    def detach(self) -> Any:
        """Return the tensor without its gradient."""

    def cpu(self) -> Any:
        """Return the tensor in the memory of the host."""


ImageInput = (
    str
    | os.PathLike[str]
    | bytes
    | np.ndarray
    | TensorLike
    | Image.Image
    | DicomImage
    | DicomDataset
)
"""One image: the path or the bytes of a DICOM, JPEG or PNG file; a PIL image; a numpy array (H, W),
(H, W, C) or (C, H, W); a tensor (H, W), (C, H, W) or (H, W, C); a `DicomImage` or a pydicom
dataset. Arrays hold 8 or 16 bits, or floats from 0 to 1.
"""


def read_image(
    image: ImageInput, *, color: bool | None = None, frame: int | None = None
) -> np.ndarray:
    """Return the pixels of an image, uint8 (H, W) or (H, W, 3).

    JPEG, PNG and PIL images are turned upright by their EXIF data, DICOM images are rendered with
    their window (`medvl.data.read_dicom`). Samples of 16 bits are scaled by the depth of the
    largest, as those of PNG files.

    Args:
        image: see `ImageInput`.
        color: True for three channels, False for grey; None as the image has them, for files three
            where they differ.
        frame: index of the frame in a multi-frame DICOM file, from 0; with None, they are refused.

    Raises:
        ImageError, DicomError: the image cannot be read, or is a strip that a transform would
            enlarge to gigabytes.
        FileNotFoundError: there is no such file.
    """
    name = str(image) if isinstance(image, str | os.PathLike) else "the image"
    pixels = _decoded(image, color is not False, frame)
    if pixels.ndim == 3 and (
        color is False or (color is None and isinstance(image, str | os.PathLike | bytes))
    ):
        pixels = _to_grey(pixels, always=color is False)
    elif pixels.ndim == 2 and color is True:
        pixels = np.repeat(pixels[:, :, None], 3, axis=2)
    check_sides(pixels, name)
    return np.ascontiguousarray(pixels)


def _decoded(image: Any, color: bool, frame: int | None) -> np.ndarray:
    if isinstance(image, str | os.PathLike):
        return read_pixels(Path(image), color=color, frame=frame)[0]
    if isinstance(image, bytes | bytearray):
        return decode_file(BytesIO(image), color=color, frame=frame)
    if isinstance(image, Image.Image):
        return _from_pil(image, color)
    if isinstance(image, TensorLike):
        return _from_array(
            image.detach().cpu().float().numpy()
            if image.is_floating_point()
            else image.cpu().numpy()
        )
    if isinstance(image, np.ndarray):
        return _from_array(image)
    if isinstance(image, DicomImage):
        return _from_array(image.pixels_HW)
    if isinstance(image, DicomDataset):
        return decode_file(BytesIO(_dicom_bytes(image)), color=color, frame=frame)
    message = (
        f"expected a path, bytes, a PIL image, an array, a tensor or a DICOM dataset, got "
        f"{type(image).__name__}"
    )
    raise ImageError(message, "wrong_type", field="image")


def _to_grey(pixels_HWC: np.ndarray, *, always: bool) -> np.ndarray:
    """Return BT.601 luma; unless `always`, only of images whose channels are equal."""
    if all(np.array_equal(pixels_HWC[:, :, 0], pixels_HWC[:, :, channel]) for channel in (1, 2)):
        return pixels_HWC[:, :, 0]
    return cv2.cvtColor(pixels_HWC, cv2.COLOR_RGB2GRAY) if always else pixels_HWC


def _from_pil(image: Image.Image, color: bool) -> np.ndarray:
    orientation = tiff_orientation(image.getexif().tobytes().removeprefix(b"Exif\0\0"))
    if image.mode.startswith("I") or image.mode == "F":
        pixels = _from_array(np.asarray(image))
    else:
        grey = image.mode in ("1", "L", "LA") or not color
        pixels = np.array(image.convert("L" if grey else "RGB"))
    return make_upright(pixels, orientation)


def _from_array(array: np.ndarray) -> np.ndarray:
    """Return uint8 (H, W) or (H, W, 3). Raises ImageError for other shapes, and for values out
    of range.
    """
    pixels = array
    if pixels.ndim == 3:
        first = pixels.shape[0] in (1, 3)
        last = pixels.shape[2] in (1, 3)
        pixels = pixels.transpose(1, 2, 0) if first and not last else pixels
        pixels = pixels[:, :, 0] if pixels.shape[2] == 1 else pixels
    if pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[2] != 3) or not pixels.size:
        message = (
            f"expected an array of (H, W), (H, W, 3) or (3, H, W), got the shape "
            f"{tuple(array.shape)}"
        )
        raise ImageError(message, "mismatch", field="image")
    if pixels.dtype == np.uint8:
        return pixels
    if pixels.dtype == bool:
        return pixels.astype(np.uint8) * 255
    if np.issubdtype(pixels.dtype, np.integer):
        if pixels.min() < 0 or pixels.max() > 0xFFFF:
            raise ImageError(
                "expected integers from 0 to 65535; scale the image first",
                "out_of_range",
                field="image",
            )
        return pixels.astype(np.uint8) if pixels.max() <= 0xFF else to_8_bits(pixels)
    if not np.issubdtype(pixels.dtype, np.floating) or not (
        pixels.min() >= 0 and pixels.max() <= 1
    ):  # also NaN
        message = (
            f"expected floats from 0 to 1, or integers of 8 or 16 bits, got "
            f"{pixels.dtype}; scale the image first"
        )
        raise ImageError(message, "out_of_range", field="image")
    return np.asarray((pixels * 255).round().astype(np.uint8))


def _dicom_bytes(dataset: DicomDataset) -> bytes:
    """Return the file of a pydicom dataset."""
    buffer = BytesIO()
    try:
        dataset.save_as(buffer)
    except (
        Exception
    ) as error:  # of any type, for datasets without a transfer syntax or with bad values
        message = (
            f"the DICOM dataset cannot be written ({type(error).__name__}); give the path "
            f"of its file"
        )
        raise DicomError(message, "malformed", field="image") from None
    return buffer.getvalue()


def stack_images(images_CHW: Iterable[np.ndarray]) -> np.ndarray:
    """Return one array (N, C, H, W); grey images get three channels where others have them."""
    images = list(images_CHW)
    channels = max(image.shape[0] for image in images)
    return np.stack([np.broadcast_to(image, (channels, *image.shape[1:])) for image in images])


Area = tuple[int, int, int, int]
"""Left, top, width and height in pixels."""

_LONGEST_SIDE = 512
"""The object is looked for in a copy of this size, where markers and noise are small."""
_ABOVE_BACKGROUND = 8
"""Grey levels between the background and the faintest pixel of the object."""
_MIN_SHARE = 0.02
_MARGIN = 0.01
"""Border around the object, as a part of the longer side."""


def cut_background(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the area of the foreground of an image, or the whole where none is found."""
    area = find_foreground(pixels)
    if area is None:
        return pixels
    left, top, width, height = area
    return pixels[top : top + height, left : left + width]


def find_foreground(pixels: NDArray[np.uint8]) -> Area | None:
    """Return the area of the largest bright object of an image (H, W) or (H, W, C).

    The background is the most frequent of the darker half of the grey levels. An object is an area
    of connected pixels that are brighter. Returns None where the largest covers less than 2% of the
    image.
    """
    grey_HW = pixels if pixels.ndim == 2 else pixels.max(axis=2)
    height, width = grey_HW.shape
    scale = max(1.0, max(height, width) / _LONGEST_SIDE)
    size = (max(1, round(width / scale)), max(1, round(height / scale)))
    small_HW = cv2.resize(grey_HW, size, interpolation=cv2.INTER_AREA)
    background = int(np.bincount(small_HW[small_HW < 128], minlength=1).argmax())
    bright_HW = (small_HW > background + _ABOVE_BACKGROUND).astype(np.uint8)
    opened_HW = cv2.morphologyEx(bright_HW, cv2.MORPH_OPEN, np.ones((3, 3), np.uint8))
    _, _, stats, _ = cv2.connectedComponentsWithStats(opened_HW, connectivity=4)
    objects = stats[1:]
    if not len(objects):
        return None
    largest = objects[objects[:, cv2.CC_STAT_AREA].argmax()]
    if largest[cv2.CC_STAT_AREA] < _MIN_SHARE * small_HW.size:
        return None
    margin = _MARGIN * max(height, width)
    x, y, w, h = (float(value) * scale for value in largest[:4])
    left, top = max(0, int(x - margin)), max(0, int(y - margin))
    right, bottom = min(width, int(x + w + margin) + 1), min(height, int(y + h + margin) + 1)
    return left, top, right - left, bottom - top
