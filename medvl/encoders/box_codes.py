"""Codes of the boxes of regions, as fusion-encoders read them.

All are pure functions that return new tensors: a released implementation normalises its cached boxes in place in every
epoch, so that they drift towards zero. Rows of zeros, which are padding, stay zero.
"""

from typing import Literal

import torch
from torch import Tensor

from medvl.errors import ConfigError

BoxCode = Literal[4, 7]
"""Numbers of a box: 4 for VisualBERT and LXMERT, 7 for UNITER."""


def relative_boxes(boxes_P4: Tensor, height: int, width: int) -> Tensor:
    """Return boxes (left, top, right, bottom) in pixels as float32 shares of the image's width and height, in 0..1."""
    scale_4 = torch.tensor([width, height, width, height], dtype=torch.float32, device=boxes_P4.device)
    return (boxes_P4.float() / scale_4).clamp(0, 1)


def box_code(boxes_P4: Tensor, numbers: BoxCode) -> Tensor:
    """Return the code (..., numbers) of relative boxes (..., 4), which are (left, top, right, bottom) in 0..1.

    4: the boxes themselves (VisualBERT, arXiv 1908.03557; LXMERT, arXiv 1908.07490, section 2.1). 7: left, top, right,
    bottom, width, height, area (UNITER, arXiv 1909.11740, section 3.1).

    Raises ConfigError for another number, and for a tensor of another width.
    """
    if numbers not in (4, 7):
        raise ConfigError(f"expected a box code of 4 or 7 numbers, got {numbers}", "out_of_range", field="numbers")
    if boxes_P4.shape[-1] != 4:
        message = f"expected boxes (..., 4), got {tuple(boxes_P4.shape)}"
        raise ConfigError(message, "mismatch", field="region_boxes_BP4")
    if numbers == 4:
        return boxes_P4.clone()
    size_P2 = boxes_P4[..., 2:] - boxes_P4[..., :2]
    return torch.cat([boxes_P4, size_P2, size_P2.prod(dim=-1, keepdim=True)], dim=-1)
