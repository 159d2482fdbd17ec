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

import torch
from torch import Tensor, nn

from medvl import losses
from medvl.common.config_io import check_within
from medvl.data.loading.dense_targets import DenseBatch
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.data.transforms.image import EvalTransform
from medvl.encoders import ImageEncoder
from medvl.models.base import mean_count
from medvl.models.downstream.dense_base import DenseConfig, DenseModel, init_prior
from medvl.models.downstream.regions.selection import visible_part
from medvl.models.registry import register_system
from medvl.schema import Batch, Losses

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
        """Logits (B, P, L) and boxes (B, P, 4), edges in pixels of the input, of all cells in
        row-major order.
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
        kept = [
            non_maximum_suppression(
                box_BP4,
                score_BP,
                iou_threshold=config.nms_iou_threshold,
                max_boxes=config.max_boxes,
            )
            for score_BP in score_BPL.unbind(dim=2)
        ]
        kept_BLK5 = torch.stack(kept, dim=1)
        places = kept_BLK5.new_tensor([_scale_and_shift(self.transform, size) for size in sizes])
        scale_B = places[:, None, None, :4]
        shift_B = places[:, None, None, 4:]
        return list(torch.cat([kept_BLK5[..., :4] * scale_B + shift_B, kept_BLK5[..., 4:]], dim=3))

    def _centers(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Centers (P, 2) of the cells, x before y, and the sides (2,) of a cell; in pixels of
        the input.
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
    kept = []
    for _ in range(min(max_boxes, score_BP.shape[1])):
        best_B1 = left_BP.argmax(dim=1, keepdim=True)
        best_B14 = box_BP4.gather(1, best_B1[:, :, None].expand(-1, -1, 4))
        kept.append(torch.cat([best_B14, left_BP.gather(1, best_B1)[:, :, None]], dim=2))
        low_BP2 = torch.maximum(box_BP4[:, :, :2], best_B14[:, :, :2])
        high_BP2 = torch.minimum(box_BP4[:, :, 2:], best_B14[:, :, 2:])
        shared_BP = (high_BP2 - low_BP2).clamp(min=0).prod(dim=2)
        union_BP = area_BP + area_BP.gather(1, best_B1) - shared_BP
        left_BP = left_BP.masked_fill(shared_BP > iou_threshold * union_BP, -torch.inf).scatter(
            1, best_B1, -torch.inf
        )
    return torch.cat(kept, dim=1)
