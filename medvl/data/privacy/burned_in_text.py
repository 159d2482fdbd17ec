"""Screen for burned-in text: names and dates that a scanner or workstation has written over an image.

A burned-in letter is a small, sharp patch of the brightest shade, and text is a line of many letters. Markers of the
technologist (L, R, PA, SUPINE) are text too, but short. Only the upper and lower quarter are searched, where scanners
write.
"""

import cv2
import numpy as np
from numpy.typing import NDArray

_LONGEST_SIDE = 1536
"""Larger images are reduced to about this size, at which readable text is preserved."""
_BAND = 0.25
_MIN_LETTERS = 9
"""Least number of letters of a line; `PORTABLE` has eight."""
_HEIGHTS = (6, 64)


def has_burned_in_text(image: NDArray[np.uint8]) -> bool:
    """Return whether the upper or lower quarter of an image has a line of at least nine letters.

    A screen for warnings, with misses (dark text on white, handwriting) and false alarms. Images are (H, W) or
    (H, W, C); the brightest channel of each pixel is used.
    """
    image_HW = image if image.ndim == 2 else image.max(axis=2)
    height = int(len(image_HW) * _BAND)
    factor = max(1, round(max(image_HW.shape) / _LONGEST_SIDE))
    bands = (image_HW[:height], image_HW[-height:]) if height >= factor else ()
    return any(_longest_line(_letters(_reduce(band, factor))) >= _MIN_LETTERS for band in bands)


def _reduce(band_HW: NDArray[np.uint8], factor: int) -> NDArray[np.uint8]:
    """Reduce by an integer factor, which takes a tenth of the time of other factors."""
    if factor == 1:
        return band_HW
    height, width = (side // factor for side in band_HW.shape)
    cropped = band_HW[: height * factor, : width * factor]
    return np.asarray(cv2.resize(cropped, (width, height), interpolation=cv2.INTER_AREA), np.uint8)


def _letters(band_HW: NDArray[np.uint8]) -> NDArray[np.int32]:
    """Return (N, 4) left, top, width, height of bright patches of letter size, from left to right."""
    bright_HW = (band_HW >= 224).view(np.uint8)
    # There are at most as many patches as bright pixels; 16-bit labels take half the time.
    numbers = cv2.CV_16U if np.count_nonzero(bright_HW) < 1 << 16 else cv2.CV_32S
    _, _, stats, _ = cv2.connectedComponentsWithStats(bright_HW, connectivity=8, ltype=numbers)
    width, height, area = stats[1:, cv2.CC_STAT_WIDTH], stats[1:, cv2.CC_STAT_HEIGHT], stats[1:, cv2.CC_STAT_AREA]
    fits = (height >= _HEIGHTS[0]) & (height <= _HEIGHTS[1]) & (width <= 1.5 * height) & (area >= 0.12 * width * height)
    boxes = stats[1:, :4][fits].astype(np.int32)
    return boxes[np.argsort(boxes[:, 0], kind="stable")]


def _longest_line(boxes: NDArray[np.int32]) -> int:
    """Return the letters of the longest line: of similar height, on one baseline, and close to each other."""
    length = np.ones(len(boxes), int)
    for i, (x, y, width, height) in enumerate(boxes):
        near = boxes[i + 1 : i + 64]
        follows = (
            (np.abs(near[:, 1] + near[:, 3] - y - height) <= 0.3 * height)
            & (np.abs(near[:, 3] - height) <= 0.5 * height)
            & (near[:, 0] - x - width <= 1.8 * height)
            & (near[:, 0] - x >= 0.5 * width)
        )
        later = np.flatnonzero(follows) + i + 1
        length[later] = np.maximum(length[later], length[i] + 1)
    return int(length.max(initial=0))
