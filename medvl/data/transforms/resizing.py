"""Resizing of uint8 images, (H, W) or (H, W, C)."""

import cv2
import numpy as np


def resize(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Return the image with these sides: averaged over areas where a side shrinks, else bilinear."""
    smaller = min(height, image.shape[0]), min(width, image.shape[1])
    if smaller not in (image.shape[:2], (height, width)):  # OpenCV averages areas only where neither side grows
        image = cv2.resize(image, smaller[::-1], interpolation=cv2.INTER_AREA)
    shrinks = height * width < image.shape[0] * image.shape[1]
    return cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR)


def to_square(image: np.ndarray) -> np.ndarray:
    """Return the image in the middle of a black square as large as its longer side."""
    height, width = image.shape[:2]
    down, across = max(width - height, 0), max(height - width, 0)
    sides = down // 2, down - down // 2, across // 2, across - across // 2
    return cv2.copyMakeBorder(image, *sides, cv2.BORDER_CONSTANT, value=(0, 0, 0))


def with_channels(image: np.ndarray) -> np.ndarray:
    """Return the image as (H, W, C)."""
    return image[:, :, None] if image.ndim == 2 else image
