"""Image files of the figures of case reports."""

import cv2
import numpy as np
from numpy.typing import NDArray

from medvl.phantom.language.case_reports import Figure
from medvl.phantom.rendering.draw import draw_image
from medvl.phantom.rendering.encode import encode_jpeg, encode_png


def figure_bytes(figure: Figure, size: int, suffix: str) -> bytes | None:
    """Return the content of a figure's file (".jpg" or ".png") with `size` pixels on the longer side.

    It is empty for an empty file, and None for a missing one.
    """
    if figure.file != "intact":
        return b"" if figure.file == "empty" else None
    source = figure.view or figure.ct_mr_slice
    image_HW = _chart(figure.number, size) if source is None else draw_image(source, size)
    return encode_jpeg(image_HW) if suffix == ".jpg" else encode_png(image_HW)


def _chart(number: int, size: int) -> NDArray[np.uint16]:
    """Draw a curve in a frame, as a 12-bit image."""
    chart_HW = np.full((max(16, 3 * size // 4), size), 255, np.uint8)
    height, width = chart_HW.shape
    left, right, top, bottom = width // 8, width - width // 16, height // 10, height - height // 6
    cv2.rectangle(chart_HW, (left, top), (right, bottom), 0, max(1, size // 200))
    x = np.linspace(left, right, 24)
    y = (top + bottom) / 2 + 0.3 * (bottom - top) * np.sin(np.arange(24) * (0.4 + 0.1 * number))
    points = np.stack([x, y], axis=1).round().astype(np.int32)
    cv2.polylines(chart_HW, [points], False, 60, max(1, size // 120), cv2.LINE_AA)
    return chart_HW.astype(np.uint16) * np.uint16(16)
