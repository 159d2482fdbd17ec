"""From a grid of regions to the pixels of the image that it was made of, for every way to make an image square.

    map_KHW = on_image(map_Khw, transform.box(height, width), height, width)    # NaN where the model saw nothing

h, w cells of the grid; H, W pixels of the image; K maps.
"""

import torch
from torch import Tensor

from medvl.data.transforms.image import Box


def on_image(map_Khw: Tensor, box: Box, height: int, width: int) -> Tensor:
    """(K, H, W) float32: the values of a grid at the centers of an image's pixels.

    Linear between the centers of the cells, which divide the box evenly; from the last center to the edge of the box
    the value stays. What lies outside of the box was cut off before the model saw it: it is NaN, and no number.

    Args:
        map_Khw: row-major values over the cells of a model's square input.
        box: the part of the image that the input shows, `EvalTransform.box(height, width)`.
        height, width: of the image.
    """
    down_Hh = _shares(height, box.top, box.height, map_Khw.shape[1], map_Khw.device)
    across_Ww = _shares(width, box.left, box.width, map_Khw.shape[2], map_Khw.device)
    return down_Hh @ map_Khw.float() @ across_Ww.T


def _shares(pixels: int, start: float, length: float, cells: int, device: torch.device) -> Tensor:
    """(pixels, cells): what each cell gives to each pixel, in sum 1; rows of NaN outside."""
    place_H = (torch.arange(pixels, device=device, dtype=torch.float64) + 0.5 - start) / length
    center_H = (place_H * cells - 0.5).clamp(0, cells - 1)
    cell_h = torch.arange(cells, device=device, dtype=torch.float64)
    shares_Hh = (1 - (center_H[:, None] - cell_h).abs()).clamp(min=0)
    outside_H = (place_H < 0) | (place_H > 1)
    return shares_Hh.masked_fill(outside_H[:, None], torch.nan).float()
