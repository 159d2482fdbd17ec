"""Foreground of an image: the largest bright object on a dark background, such as a breast."""

import cv2
import numpy as np
from numpy.typing import NDArray

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
