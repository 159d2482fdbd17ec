"""Heat maps over the regions of a model's input, resized to the pixels of the original image.

    map_KHW = on_image(map_Khw, transform.box(height, width), height, width)  # NaN outside the box
    maps = on_originals(map_Bhw, transform, image_BCHW, original_sizes)  # one (H, W) for each image

h, w cells of the grid; H, W pixels of the image; K maps.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from medvl.data.transforms.image import Box, EvalTransform


def on_image(map_Khw: Tensor, box: Box, height: int, width: int) -> Tensor:
    """Return (K, H, W) float32: the values of a grid, interpolated at the centers of the image's
    pixels.

    Interpolation is linear between the centers of the cells, which divide the box evenly, and
    constant from the last center to the edge of the box. Pixels outside of the box, which the model
    did not get, are NaN.

    Args:
        map_Khw: row-major values over the cells of a model's square input.
        box: the part of the image that the input shows, `EvalTransform.box(height, width)`.
        height, width: size of the image in pixels.
    """
    down_Hh = _weights(height, box.top, box.height, map_Khw.shape[1], map_Khw.device)
    across_Ww = _weights(width, box.left, box.width, map_Khw.shape[2], map_Khw.device)
    return down_Hh @ map_Khw.float() @ across_Ww.T


def on_volume(
    map_Kdhw: Tensor, extents: Sequence[tuple[float, float]], shape: Sequence[int]
) -> Tensor:
    """Return (K, D, H, W) float32, as `on_image`: the values of a grid at the centers of a volume's
    voxels, NaN outside of its extents.

    Args:
        map_Kdhw: values over the cells of a model's input.
        extents: start and length of the input along (z, y, x), in voxels of the volume.
        shape: voxels of the volume along (z, y, x).
    """
    map_K = map_Kdhw.float()
    for axis, ((start, length), side) in enumerate(zip(extents, shape, strict=True), 1):
        weights_Vc = _weights(side, start, length, map_K.shape[axis], map_K.device)
        map_K = torch.tensordot(map_K, weights_Vc, dims=([axis], [1])).movedim(-1, axis)
    return map_K


def on_originals(
    map_Bhw: Tensor,
    transform: EvalTransform,
    image_BCHW: Tensor,
    original_sizes: Sequence[tuple[int, int]] | None,
) -> list[Tensor]:
    """Return one (H, W) float32 map for each image of `transform`, as `on_image`.

    `original_sizes` are (height, width) of the images before `transform`; None gives maps over the
    model's input.
    """
    if original_sizes is None:
        height, width = image_BCHW.shape[2:]
        return list(on_image(map_Bhw, Box(0.0, 0.0, height, width), height, width))
    sizes = zip(map_Bhw, original_sizes, strict=True)
    return [on_image(map_hw[None], transform.box(*size), *size)[0] for map_hw, size in sizes]


@torch.no_grad()
def maps_of_cells(
    model: Any,
    image_BCHW: Tensor,
    texts: Sequence[str],
    original_sizes: Sequence[tuple[int, int]] | None = None,
) -> list[Tensor]:
    """Return the heat map of each text in its image: one (H, W) float32 per pair, in original
    pixels.

    It is the method `attention_maps` of systems with `cell_maps(image_BCHW, texts)`, which returns
    (B, P), the value of each cell of image i for text i. Pixels that `transform` cut off are NaN.
    Call it in eval mode.

    Args:
        model: the system.
        image_BCHW: images from `transform`.
        texts: one text for each image.
        original_sizes: (height, width) of the images before `transform`; None gives maps over
            the model's input.
    """
    grid = model.image_encoder.grid(*image_BCHW.shape[2:])
    map_Bhw = model.cell_maps(image_BCHW, texts).float().unflatten(1, grid)
    return on_originals(map_Bhw, model.transform, image_BCHW, original_sizes)


def _weights(pixels: int, start: float, length: float, cells: int, device: torch.device) -> Tensor:
    """Return (pixels, cells): the weight of each cell for each pixel; rows sum to 1, and are NaN
    outside of the box.
    """
    place_H = (torch.arange(pixels, device=device, dtype=torch.float64) + 0.5 - start) / length
    center_H = (place_H * cells - 0.5).clamp(0, cells - 1)
    cell_h = torch.arange(cells, device=device, dtype=torch.float64)
    weight_Hh = (1 - (center_H[:, None] - cell_h).abs()).clamp(min=0)
    outside_H = (place_H < 0) | (place_H > 1)
    return weight_Hh.masked_fill(outside_H[:, None], torch.nan).float()
