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


def draw_map(pixels: NDArray[np.uint8], map_hw: NDArray[np.floating], box: Box) -> NDArray[np.uint8]:
    """Return the image (H, W, 3) with the heatmap on it, darkened outside the model's input.

    Color starts at the mean of the map and is full at its maximum, or at twice the mean if that is higher.

    Args:
        pixels: image (H, W) or (H, W, 3).
        map_hw: non-negative map.
        box: part of the image that the map covers (`EvalTransform.box`).
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
    return np.asarray(overlay_HWC.round().astype(np.uint8))
