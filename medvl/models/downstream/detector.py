"""Anchor-free detection: boxes with labels and scores.

Every cell of the decoder's grid predicts the probability that it lies in the inner part of a box of
each label, and that box: the offset of its center from the cell's and the logarithms of its sides,
in units of a cell. This is FCOS (Tian et al., arXiv 1904.01355) on one grid with center sampling.
Offsets instead of distances to edges also work for boxes smaller than a cell; center-ness is
omitted because only inner cells are trained as positives.

Shape letters: N boxes of an image, P cells, L labels, K boxes that are kept.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from medvl import losses
from medvl.common.config_io import check_within
from medvl.data.loading.dense_targets import DenseBatch
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.data.transforms.image import EvalTransform
from medvl.encoders import ImageEncoder
from medvl.models.base import mean_count
from medvl.models.downstream.dense import DenseConfig, DenseModel, init_prior
from medvl.models.registry import register_system
from medvl.schema import Batch, Losses

# Selection of an image's regions by confidence, and their position in the original image.
#
# Shape letters: P regions or proposals of an image, K classes.

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
        index_K = suppress(boxes_PK4[region, label], top.values, label, self.nms_iou_threshold)
        confidence_P = scores_PK.amax(dim=1) - 1  # of regions that are suppressed: below all others
        confidence_P = confidence_P.scatter_reduce(0, region[index_K], top.values[index_K], "amax")
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
        index_K: Tensor = (
            batched_nms(boxes_N4, scores_N, group_N, iou_threshold) if len(boxes_N4) else group_N
        )
        return index_K
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
    (height, width), part = size, transform.box(*size)
    scale = np.array([part.width, part.height] * 2) / transform.size
    edges_P4 = boxes_P4 * scale + np.array([part.left, part.top] * 2)
    shares_P4 = (edges_P4 / np.array([width, height] * 2)).clip(0, 1)
    return shares_P4.astype(np.float32)


def visible_part(
    transform: EvalTransform, size: tuple[int, int]
) -> tuple[float, float, float, float]:
    """Return the rectangle of a transform's output that shows an image (height, width): left,
    top, right, bottom.
    """
    (height, width), part = size, transform.box(*size)
    across = transform.size / part.width
    down = transform.size / part.height
    left = max(0.0, -part.left * across)
    top = max(0.0, -part.top * down)
    right = (width - part.left) * across
    bottom = (height - part.top) * down
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


_LARGEST_LOG = 6.0
"""Maximum logarithm of a side in cells, some 400 of them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DetectorConfig(DenseConfig):
    """Settings of a detector."""

    inner_share: float = 0.4
    """Share of a box's sides that makes up its inner part, whose cells are positives."""
    nms_iou_threshold: float = 0.4
    """IoU above which the box with the lower score of two boxes of a label is removed."""
    max_boxes: int = 20
    """Maximum number of boxes of a label in an image."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_within(self, "(0, 1]", "inner_share", "nms_iou_threshold")
        check_within(self, "(0, inf)", "max_boxes")


@dataclasses.dataclass(frozen=True, slots=True)
class Targets:
    """Training targets of all cells."""

    label_BPL: Tensor
    """1 if the cell lies in the inner part of a box of the label."""
    box_BP4: Tensor
    """Edges of its box, the smallest one if there are several; undefined outside of boxes."""
    inner_BP: Tensor
    """bool: whether the cell lies in the inner part of any box."""


@register_system("detector")
class Detector(DenseModel):
    """Boxes from the decoder's grid, trained by focal loss and generalised IoU."""

    Config = DetectorConfig

    def __init__(
        self,
        config: DetectorConfig,
        image_encoder: ImageEncoder,
        transform: EvalTransform,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        super().__init__(config, image_encoder, transform, tokenizer)
        self.label_head = init_prior(nn.Conv2d(config.width, len(config.labels), 1))
        self.place_head = nn.Conv2d(config.width, 4, 1)

    def forward(self, batch: Batch) -> Losses:
        """Return the losses of a `DenseBatch` with boxes."""
        assert isinstance(batch, DenseBatch)
        assert batch.boxes_BN5 is not None
        logits_BPL, box_BP4 = self.cells(batch)
        targets = self.targets(batch.boxes_BN5)
        label, place = losses.detection(
            logits_BPL,
            box_BP4,
            targets.label_BPL,
            targets.box_BP4,
            targets.inner_BP,
            mean_count(batch),
        )
        return Losses.sum(label=label, place=place)

    def loss_counts(self, batch: Batch) -> Tensor:
        """Return (1,) float32: the number of cells with a box, by which both losses are divided."""
        assert isinstance(batch, DenseBatch)
        assert batch.boxes_BN5 is not None
        return self.inner_cells(batch.boxes_BN5).any(dim=2).sum().float()[None]

    def cells(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return logits (B, P, L) and boxes (B, P, 4), edges in pixels of the input, of all cells
        in row-major order.
        """
        return self.read_cells(self.decode(batch))

    def read_cells(self, features_BWhw: Tensor) -> tuple[Tensor, Tensor]:
        """Return what `cells` does, from the decoder's output."""
        logits_BPL = self.label_head(features_BWhw).flatten(2).transpose(1, 2)
        place_BP4 = self.place_head(features_BWhw).flatten(2).transpose(1, 2).float()
        center_P2, cell_2 = self._centers(place_BP4.device)
        middle_BP2 = center_P2 + place_BP4[:, :, :2] * cell_2
        half_BP2 = place_BP4[:, :, 2:].clamp(max=_LARGEST_LOG).exp() * cell_2 / 2
        return logits_BPL, torch.cat([middle_BP2 - half_BP2, middle_BP2 + half_BP2], dim=2)

    def targets(self, boxes_BN5: Tensor) -> Targets:
        """Assign boxes (B, N, 5), in pixels of the input, to cells; rows of NaN are padding."""
        low_BN2 = boxes_BN5[:, :, :2]
        high_BN2 = boxes_BN5[:, :, 2:4]
        label_BN = boxes_BN5[:, :, 4]
        inner_BPN = self.inner_cells(boxes_BN5)
        number_L = torch.arange(len(self.config.labels), device=boxes_BN5.device)
        has_label_BNL = label_BN[:, :, None] == number_L
        label_BPL = inner_BPN.float() @ has_label_BNL.float() > 0
        inner_BP = inner_BPN.any(dim=2)
        if not boxes_BN5.shape[1]:
            return Targets(label_BPL.float(), boxes_BN5.new_zeros(*inner_BP.shape, 4), inner_BP)
        area_BN = (high_BN2 - low_BN2).prod(dim=2)
        smallest_BP = torch.where(inner_BPN, area_BN[:, None], torch.inf).argmin(dim=2)
        box_BP4 = boxes_BN5[:, :, :4].gather(1, smallest_BP[:, :, None].expand(-1, -1, 4))
        return Targets(label_BPL.float(), box_BP4, inner_BP)

    def inner_cells(self, boxes_BN5: Tensor) -> Tensor:
        """(B, P, N) bool: whether a cell belongs to a box, False for padding.

        A cell belongs to a box if its center lies in the inner part, which is at least as large as
        a cell, so that every box has a cell.
        """
        center_P2, cell_2 = self._centers(boxes_BN5.device)
        low_BN2 = boxes_BN5[:, :, :2]
        high_BN2 = boxes_BN5[:, :, 2:4]
        reach_BN2 = torch.maximum((high_BN2 - low_BN2) * self.config.inner_share, cell_2) / 2
        apart_BPN2 = (center_P2[:, None] - ((low_BN2 + high_BN2) / 2)[:, None]).abs()
        return (apart_BPN2 <= reach_BN2[:, None]).all(dim=3)

    @torch.no_grad()
    def detect(self, batch: Batch, sizes: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Return (L, K, 5) for each image: edges in pixels of the original image, and the score,
        highest first.

        Boxes are cut to the part of the image that the input shows, and left out where they lie
        outside of it. K is `max_boxes`, or the number of cells if that is smaller; rows without a
        box have a score of -inf.

        Args:
            batch: images prepared by `transform`.
            sizes: (height, width) of the original images.
        """
        logits_BPL, box_BP4 = self.cells(batch.to(self.device))
        edges_B14 = box_BP4.new_tensor([visible_part(self.transform, size) for size in sizes])[
            :, None
        ]
        box_BP4 = torch.maximum(box_BP4, edges_B14[..., [0, 1, 0, 1]]).minimum(
            edges_B14[..., [2, 3, 2, 3]]
        )
        seen_BP = (box_BP4[:, :, 2:] > box_BP4[:, :, :2]).all(dim=2)
        score_BPL = torch.sigmoid(logits_BPL.float()).masked_fill(~seen_BP[:, :, None], -torch.inf)
        config = self.config
        boxes = [
            non_maximum_suppression(
                box_BP4,
                score_BP,
                iou_threshold=config.nms_iou_threshold,
                max_boxes=config.max_boxes,
            )
            for score_BP in score_BPL.unbind(dim=2)
        ]
        box_BLK5 = torch.stack(boxes, dim=1)
        places = box_BLK5.new_tensor([_scale_and_shift(self.transform, size) for size in sizes])
        scale_B = places[:, None, None, :4]
        shift_B = places[:, None, None, 4:]
        return list(torch.cat([box_BLK5[..., :4] * scale_B + shift_B, box_BLK5[..., 4:]], dim=3))

    def _centers(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return centers (P, 2) of the cells, x before y, and the sides (2,) of a cell; in pixels
        of the input.
        """
        rows, columns = self.grid
        cell_2 = torch.tensor(
            [self.transform.size / columns, self.transform.size / rows], device=device
        )
        y, x = torch.meshgrid(
            torch.arange(rows, device=device), torch.arange(columns, device=device), indexing="ij"
        )
        return (torch.stack([x, y], dim=2).flatten(0, 1) + 0.5) * cell_2, cell_2


def _scale_and_shift(transform: EvalTransform, size: tuple[int, int]) -> tuple[float, ...]:
    """Scale and shift of the four edges, from pixels of the input to those of an image of that
    size.
    """
    visible = transform.box(*size)
    across = visible.width / transform.size
    down = visible.height / transform.size
    return across, down, across, down, visible.left, visible.top, visible.left, visible.top


def non_maximum_suppression(
    box_BP4: Tensor, score_BP: Tensor, *, iou_threshold: float, max_boxes: int
) -> Tensor:
    """(B, K, 5): the best boxes of each image with their scores, without boxes that overlap a
    better one by more.

    Greedy, for all images at once. Once no box is left, scores are -inf.
    """
    left_BP = score_BP.clone()
    area_BP = (box_BP4[:, :, 2:] - box_BP4[:, :, :2]).prod(dim=2)
    boxes = []
    for _ in range(min(max_boxes, score_BP.shape[1])):
        best_B1 = left_BP.argmax(dim=1, keepdim=True)
        best_B14 = box_BP4.gather(1, best_B1[:, :, None].expand(-1, -1, 4))
        boxes.append(torch.cat([best_B14, left_BP.gather(1, best_B1)[:, :, None]], dim=2))
        low_BP2 = torch.maximum(box_BP4[:, :, :2], best_B14[:, :, :2])
        high_BP2 = torch.minimum(box_BP4[:, :, 2:], best_B14[:, :, 2:])
        shared_BP = (high_BP2 - low_BP2).clamp(min=0).prod(dim=2)
        union_BP = area_BP + area_BP.gather(1, best_B1) - shared_BP
        left_BP = left_BP.masked_fill(shared_BP > iou_threshold * union_BP, -torch.inf).scatter(
            1, best_B1, -torch.inf
        )
    return torch.cat(boxes, dim=1)
