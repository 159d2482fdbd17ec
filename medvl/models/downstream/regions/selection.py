"""Selection of an image's regions by confidence, and their position in the original image.

Shape letters: P regions or proposals of an image, K classes.
"""

import dataclasses

import numpy as np
import torch
from torch import Tensor

from medvl.common.config_io import check_within
from medvl.data.transforms.image import EvalTransform

_CANDIDATES = 3000
"""Pairs of a region and a class, best first, that take part in non-maximum suppression."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RegionSelection:
    """Number of regions of an image: as many as are confident, within bounds.

    VisualBERT and LXMERT read 36, the default. UNITER has `min_regions=10, max_regions=100`.
    """

    max_regions: int = 36
    min_regions: int | None = None
    """None: as many as `max_regions`, whatever their confidence. An image with fewer proposals
    has fewer.
    """
    confidence: float = 0.2
    nms_iou_threshold: float = 0.3

    def __post_init__(self) -> None:
        check_within(self, "[1, inf)", "max_regions")
        check_within(self, f"[1, {self.max_regions}]", "min_regions")
        check_within(self, "[0, 1]", "confidence")
        check_within(self, "(0, 1]", "nms_iou_threshold")

    def choose(self, boxes_PK4: Tensor, scores_PK: Tensor) -> Tensor:
        """Return the indices of the regions of one image, most confident first.

        The rule of bottom-up attention (Anderson et al., arXiv 1707.07998, released code): the
        confidence of a region is its best score among the classes for which its box survives
        non-maximum suppression; regions that survive for none come last.

        Args:
            boxes_PK4: box of each region for each class.
            scores_PK: scores in 0..1 of the classes, without the background.
        """
        classes = scores_PK.shape[1]
        top = scores_PK.flatten().topk(min(_CANDIDATES, scores_PK.numel()))
        region = top.indices // classes
        label = top.indices % classes
        kept = suppress(boxes_PK4[region, label], top.values, label, self.nms_iou_threshold)
        confidence_P = scores_PK.amax(dim=1) - 1  # of regions that are suppressed: below all others
        confidence_P = confidence_P.scatter_reduce(0, region[kept], top.values[kept], "amax")
        least = self.max_regions if self.min_regions is None else self.min_regions
        count = max(int((confidence_P >= self.confidence).sum()), least)
        return confidence_P.argsort(descending=True, stable=True)[: min(count, self.max_regions)]


def suppress(boxes_N4: Tensor, scores_N: Tensor, group_N: Tensor, iou_threshold: float) -> Tensor:
    """Return the boxes that no better box of their group overlaps by more, best first (non-maximum
    suppression).

    As torchvision's `batched_nms`, also where its compiled operators are missing (a CPU build of
    torch).
    """
    from torchvision.extension import _has_ops
    from torchvision.ops import batched_nms, box_iou

    if _has_ops() or not len(boxes_N4):
        kept: Tensor = (
            batched_nms(boxes_N4, scores_N, group_N, iou_threshold) if len(boxes_N4) else group_N
        )
        return kept
    order_N = scores_N.argsort(descending=True, stable=True)
    same_NN = group_N[order_N][:, None] == group_N[order_N]
    overlaps_NN = (
        (box_iou(boxes_N4[order_N], boxes_N4[order_N]) > iou_threshold) & same_NN
    ).numpy()
    removed_N = np.zeros(len(order_N), bool)
    best = []
    for row in range(len(order_N)):
        if not removed_N[row]:
            best.append(row)
            removed_N |= overlaps_NN[row]
    return order_N[best]


def in_original(
    boxes_P4: np.ndarray, transform: EvalTransform, size: tuple[int, int]
) -> np.ndarray:
    """Return boxes in pixels of a transform's output as shares of the image (height, width) that
    it was made from.
    """
    (height, width), seen = size, transform.box(*size)
    scale = np.array([seen.width, seen.height] * 2) / transform.size
    edges_P4 = boxes_P4 * scale + np.array([seen.left, seen.top] * 2)
    shares_P4 = (edges_P4 / np.array([width, height] * 2)).clip(0, 1)
    return shares_P4.astype(np.float32)


def visible_part(
    transform: EvalTransform, size: tuple[int, int]
) -> tuple[float, float, float, float]:
    """Return the rectangle of a transform's output that shows an image (height, width): left,
    top, right, bottom.
    """
    (height, width), seen = size, transform.box(*size)
    across = transform.size / seen.width
    down = transform.size / seen.height
    left = max(0.0, -seen.left * across)
    top = max(0.0, -seen.top * down)
    right = (width - seen.left) * across
    bottom = (height - seen.top) * down
    return left, top, min(right, float(transform.size)), min(bottom, float(transform.size))


@dataclasses.dataclass(frozen=True, slots=True)
class PreparedImage:
    """An image of an encoder's size, and (height, width) of the original."""

    pixels_CHW: np.ndarray
    size: tuple[int, int]


def prepare(transform: EvalTransform, pixels: np.ndarray) -> PreparedImage:
    """Return an image, uint8 (H, W) or (H, W, 3), as an encoder reads it."""
    square_HWC = transform.build()(pixels, np.random.default_rng(0)).image_HWC
    return PreparedImage(square_HWC.transpose(2, 0, 1), (pixels.shape[0], pixels.shape[1]))


def stack(images: list[PreparedImage], device: torch.device) -> Tensor:
    """Return (B, C, H, W) on a device."""
    return torch.from_numpy(np.stack([image.pixels_CHW for image in images])).to(device)
