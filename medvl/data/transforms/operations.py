"""Operations of `ConVIRTAugmentation` on the CPU, with the parameters that albumentations draws.

Each gives the pixels of albumentations' operation bit for bit, without its checks and copies, which
take a fifth of the time of the augmentation.
"""

from typing import Any, Literal, NamedTuple

import cv2
import numpy as np

from medvl.data.images.codecs import JpegImage

_IDENTITY_33 = np.eye(3)
_TOLERANCE_33 = 1e-8 + 1e-5 * _IDENTITY_33
"""As in `np.allclose`, by which albumentations leaves an image as it is."""


Decode = Literal["full", "reduced"]
"""Decoding of JPEG images before a random crop. full: every pixel; reduced: a half, a quarter or an
eighth of both sides where the crop still has the pixels of the output. The draws are the same, and
the edges of the crop are moved to whole pixels of the reduced image. Other formats are decoded in
full.
"""


class Crop(NamedTuple):
    """A rectangle in whole pixels of an image, which may extend beyond the image."""

    left: int
    top: int
    right: int
    bottom: int

    def mirrored(self, width: int) -> "Crop":
        """Return the same part of the mirrored image."""
        return Crop(width - self.right, self.top, width - self.left, self.bottom)

    def reduction(self, size: int) -> int:
        """Return the largest of 8, 4, 2 and 1 by which the sides can be divided and still have
        `size` pixels.
        """
        side = min(self.right - self.left, self.bottom - self.top)
        return next((factor for factor in (8, 4, 2) if side >= factor * size), 1)

    def divided(self, factor: int) -> "Crop":
        """Return the same part of a reduced image, to the nearest whole pixel."""
        return Crop(*((side + factor // 2) // factor for side in self))


def draw(transform: Any, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return the parameters that one of albumentations' transforms draws for an image's shape."""
    parameters: dict[str, Any] = transform.get_params() | {"shape": shape}
    return parameters | transform.get_params_dependent_on_data(parameters, {})


def cut(image: np.ndarray, crop: Crop) -> np.ndarray:
    """Return the pixels of a crop, black beyond the image."""
    height, width = image.shape[:2]
    top, bottom = max(0, crop.top), min(height, crop.bottom)
    left, right = max(0, crop.left), min(width, crop.right)
    if bottom <= top or right <= left:
        sides = crop.bottom - crop.top, crop.right - crop.left
        return np.zeros((*sides, *image.shape[2:]), np.uint8)
    inside = image[top:bottom, left:right]
    borders = top - crop.top, crop.bottom - bottom, left - crop.left, crop.right - right
    if not any(borders):
        return inside
    return cv2.copyMakeBorder(inside, *borders, cv2.BORDER_CONSTANT, value=(0, 0, 0))


def crop_and_resize(
    image: np.ndarray | JpegImage, crop: Crop, size: int, *, mirror: bool
) -> np.ndarray:
    """Return a crop as a square of `size`: areas are averaged where a side shrinks.

    A JPEG is decoded here, at the smallest size that still has `size` pixels in the crop. Raises
    ImageError where it is damaged.
    """
    if isinstance(image, JpegImage):
        factor = crop.reduction(size)
        image = image.decode(factor)
        crop = crop.divided(factor)
    pixels = cut(image, crop)
    if mirror:
        pixels = cv2.flip(pixels, 1)
    height, width = pixels.shape[:2]
    if (height, width) == (size, size):
        return np.ascontiguousarray(pixels)
    shrinks = height > size or width > size
    kernel = cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR
    return cv2.resize(pixels, (size, size), interpolation=kernel)


def warp(image: np.ndarray, parameters: dict[str, Any]) -> np.ndarray:
    """Return the image under the map of albumentations' Affine, black beyond the image."""
    matrix_33 = parameters["matrix"]
    if (np.abs(matrix_33 - _IDENTITY_33) <= _TOLERANCE_33).all():
        return image
    return cv2.warpAffine(image, matrix_33[:2], image.shape[1::-1], flags=cv2.INTER_LINEAR)
