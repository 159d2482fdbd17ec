"""Resizing of uint8 images, (H, W) or (H, W, C)."""

from typing import Literal

import cv2
import numpy as np
from PIL import Image

Kernel = Literal["area", "bicubic", "bilinear", "bicubic_antialias", "bilinear_antialias"]
"""Kernel of a resize. area: averages over areas along sides that shrink, bilinear along those that grow; bicubic and
bilinear: 4 x 4 or 2 x 2 pixels however much an image shrinks, as in torch's `interpolate` and in OpenCV; with
antialias: kernels as wide as the pixels they replace, as in Pillow, torchvision and Hugging Face's processors."""
_PLAIN = {"bicubic": cv2.INTER_CUBIC, "bilinear": cv2.INTER_LINEAR}
_ANTIALIASED = {"bicubic_antialias": Image.Resampling.BICUBIC, "bilinear_antialias": Image.Resampling.BILINEAR}


def resize(image: np.ndarray, height: int, width: int, kernel: Kernel = "area") -> np.ndarray:
    """Return the image with these sides, by this kernel."""
    if kernel in _PLAIN:
        return cv2.resize(image, (width, height), interpolation=_PLAIN[kernel])
    if kernel in _ANTIALIASED:
        flat = image[:, :, 0] if image.ndim == 3 and image.shape[2] == 1 else image
        return np.asarray(Image.fromarray(flat).resize((width, height), _ANTIALIASED[kernel]))
    return _resize_by_area(image, height, width)


def _resize_by_area(image: np.ndarray, height: int, width: int) -> np.ndarray:
    smaller = min(height, image.shape[0]), min(width, image.shape[1])
    if smaller not in (image.shape[:2], (height, width)):  # OpenCV averages areas only where neither side grows
        image = cv2.resize(image, smaller[::-1], interpolation=cv2.INTER_AREA)
    shrinks = height * width < image.shape[0] * image.shape[1]
    return cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR)


def to_square(image: np.ndarray, least: int = 0) -> np.ndarray:
    """Return the image in the middle of a black square as large as its longer side, and at least `least` pixels."""
    height, width = image.shape[:2]
    side = max(height, width, least)
    down, across = side - height, side - width
    sides = down // 2, down - down // 2, across // 2, across - across // 2
    return cv2.copyMakeBorder(image, *sides, cv2.BORDER_CONSTANT, value=(0, 0, 0))


def with_channels(image: np.ndarray) -> np.ndarray:
    """Return the image as (H, W, C)."""
    return image[:, :, None] if image.ndim == 2 else image
