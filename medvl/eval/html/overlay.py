"""Heatmaps over the grid of a model's input, drawn on the original image.

H, W pixels of the image; h, w cells of the grid.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from medvl.data.transforms.image import Box
from medvl.models.heatmaps import on_image

_OUTSIDE_BRIGHTNESS = 0.35  # brightness of pixels outside the model's input
_OPACITY = 0.62  # overlay opacity at the maximum
_FULL_COLOR_PEAK = 2.0  # lowest peak, in units of the mean, that is drawn in full color; flatter maps stay pale


def to_pixels(map_hw: NDArray[np.floating], box: Box, height: int, width: int) -> NDArray[np.float64]:
    """Return the map (H, W) on the pixels of the image (`medvl.models.heatmaps.on_image`), 0 outside the box."""
    map_HW = on_image(torch.from_numpy(np.asarray(map_hw, dtype=np.float64))[None], box, height, width)[0]
    return map_HW.nan_to_num(0.0).double().numpy()


def peak_ratio(map_hw: NDArray[np.floating]) -> float:
    """Return the maximum divided by the mean of the cells; 0 for a map of zeros."""
    mean = float(map_hw.mean())
    return float(map_hw.max()) / mean if mean > 0 else 0.0


def color_ends(map_hw: NDArray[np.floating]) -> tuple[float, float]:
    """Return the values at which color starts and is full: the mean, and the maximum or twice the mean if higher."""
    mean = float(map_hw.mean())
    return mean, mean * max(peak_ratio(map_hw), _FULL_COLOR_PEAK)


def mark_peak(image_HWC: NDArray[np.uint8], row: int, column: int) -> NDArray[np.uint8]:
    """Return the image (H, W, 3) with a ring, white with black edges, around a pixel."""
    import cv2

    marked_HWC = np.ascontiguousarray(image_HWC)
    radius = max(4, round(max(marked_HWC.shape[:2]) / 40))
    for gray, width in ((0, 4), (255, 2)):
        cv2.circle(marked_HWC, (column, row), radius, (gray, gray, gray), width, cv2.LINE_AA)
    return marked_HWC


def draw_map(
    pixels: NDArray[np.uint8], map_hw: NDArray[np.floating], box: Box, *, peak: bool = False
) -> NDArray[np.uint8]:
    """Return the image (H, W, 3) with the heatmap on it, darkened outside the model's input.

    Color starts at the mean of the map and is full at its maximum, or at twice the mean if that is higher.

    Args:
        pixels: image (H, W) or (H, W, 3).
        map_hw: non-negative map.
        box: part of the image that the map covers (`EvalTransform.box`).
        peak: mark the center of the highest cell with a ring.
    """
    import matplotlib

    height, width = pixels.shape[:2]
    image_HWC = np.repeat(pixels[:, :, None], 3, axis=2) if pixels.ndim == 2 else pixels
    mean = map_hw.mean() or 1.0
    excess_HW = to_pixels(map_hw / mean, box, height, width) - 1
    heat_HW = np.clip(excess_HW / (max(peak_ratio(map_hw), _FULL_COLOR_PEAK) - 1), 0, 1)
    color_HWC = matplotlib.colormaps["YlOrRd"](0.2 + 0.65 * heat_HW)[:, :, :3] * 255
    opacity_HW1 = (_OPACITY * heat_HW**0.6)[:, :, None]
    overlay_HWC = (1 - opacity_HW1) * image_HWC + opacity_HW1 * color_HWC
    inside_HW = to_pixels(np.ones((1, 1)), box, height, width)[:, :, None]
    overlay_HWC *= _OUTSIDE_BRIGHTNESS + (1 - _OUTSIDE_BRIGHTNESS) * inside_HW
    drawn_HWC = np.asarray(overlay_HWC.round().astype(np.uint8))
    if not peak:
        return drawn_HWC
    row, column = np.unravel_index(np.argmax(map_hw), map_hw.shape)
    top = box.top + (row + 0.5) / map_hw.shape[0] * box.height
    left = box.left + (column + 0.5) / map_hw.shape[1] * box.width
    return mark_peak(drawn_HWC, int(top), int(left))
