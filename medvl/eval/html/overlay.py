"""Maps over the cells of a model's input, drawn onto the image that the input was cut from.

H, W pixels of the image; h, w cells of the grid.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from medvl.data.transforms.image import Box
from medvl.models.heatmaps import on_image

_UNSEEN = 0.35
"""Brightness that is left of what the model was not given."""
_OPACITY = 0.62
"""Of the hottest place."""
_LEAST_PEAK = 2.0
"""Times the mean. A map with a lower peak is not stretched to full color: it hardly points anywhere."""


def spread(map_hw: NDArray[np.floating], box: Box, height: int, width: int) -> NDArray[np.float64]:
    """(H, W): the map over the image's pixels (`medvl.models.heatmaps.on_image`), 0 outside of the box."""
    map_HW = on_image(torch.from_numpy(np.asarray(map_hw, dtype=np.float64))[None], box, height, width)[0]
    return map_HW.nan_to_num(0.0).double().numpy()


def peak(map_hw: NDArray[np.floating]) -> float:
    """The highest cell, in units of the mean over the cells; 0 for a map of zeros."""
    mean = float(map_hw.mean())
    return float(map_hw.max()) / mean if mean > 0 else 0.0


def draw_map(pixels: NDArray[np.uint8], map_hw: NDArray[np.floating], box: Box) -> NDArray[np.uint8]:
    """The image (H, W, 3) with the map as heat over it, and darkened where the model did not see it.

    Color begins at the map's mean and is full at its highest cell, but never below twice the mean.

    Args:
        pixels: (H, W) or (H, W, 3).
        map_hw: not negative.
        box: the part of the image that the map is of (`EvalTransform.box`).
    """
    import matplotlib

    height, width = pixels.shape[:2]
    image_HWC = np.repeat(pixels[:, :, None], 3, axis=2) if pixels.ndim == 2 else pixels
    mean = map_hw.mean() or 1.0
    excess_HW = spread(map_hw / mean, box, height, width) - 1
    heat_HW = np.clip(excess_HW / (max(peak(map_hw), _LEAST_PEAK) - 1), 0, 1)
    color_HWC = matplotlib.colormaps["YlOrRd"](0.2 + 0.65 * heat_HW)[:, :, :3] * 255
    opacity_HW1 = (_OPACITY * heat_HW**0.6)[:, :, None]
    drawn_HWC = (1 - opacity_HW1) * image_HWC + opacity_HW1 * color_HWC
    seen_HW = spread(np.ones((1, 1)), box, height, width)[:, :, None]
    drawn_HWC *= _UNSEEN + (1 - _UNSEEN) * seen_HW
    return np.asarray(drawn_HWC.round().astype(np.uint8))
