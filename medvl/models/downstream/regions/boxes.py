"""Regions of a detector that medvl has trained.

Shape letters: P cells or regions of an image, L labels.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from medvl.data.shards.regions import Regions
from medvl.encoders.pretrained import weights_sha256
from medvl.models.downstream.detector import Detector
from medvl.models.downstream.regions.selection import (
    PreparedImage,
    RegionSelection,
    in_original,
    prepare,
    stack,
    visible_part,
)

_SAMPLES = 4
"""Points along each side of a box at which the encoder's grid is read and averaged."""


class DetectorRegions:
    """The boxes of a `Detector`; features are the mean of its encoder's patches in each box. A `RegionDetector`.

    Its labels are independent. The distribution gives the background the probability that no label is right, and
    divides the rest in proportion to the labels' probabilities.
    """

    color: bool | None

    def __init__(self, model: Detector, selection: RegionSelection, name: str) -> None:
        self.name, self.selection, self.transform = name, selection, model.transform
        self.color = model.transform.trained_color
        self.model = model.eval().requires_grad_(False)
        self.width = model.image_encoder.patch_dim
        self.class_names = ("background", *model.config.labels)
        self.trained_on = model.image_encoder.trained_on
        self.settings: Mapping[str, Any] = {
            "model": dataclasses.asdict(model.config),
            "selection": dataclasses.asdict(selection),
        }
        self.sha256 = weights_sha256(model, self.settings)

    def prepare(self, pixels: np.ndarray) -> PreparedImage:
        """See `RegionDetector`."""
        return prepare(self.transform, pixels)

    @torch.no_grad()
    def __call__(self, images: Sequence[PreparedImage]) -> list[Regions]:
        """See `RegionDetector`."""
        features = self.model.image_encoder(stack(list(images), self.model.device))
        logits_BPL, boxes_BP4 = self.model.read_cells(self.model.decoder(features.patches_BPD, features.grid))
        map_BDhw = features.patches_BPD.float().transpose(1, 2).unflatten(2, features.grid)
        rows = zip(images, boxes_BP4, logits_BPL.float().sigmoid(), map_BDhw, strict=True)
        return [self._regions(*row) for row in rows]

    def _regions(self, image: PreparedImage, boxes_P4: Tensor, scores_PL: Tensor, map_Dhw: Tensor) -> Regions:
        edges_4 = boxes_P4.new_tensor(visible_part(self.transform, image.size))
        boxes_P4 = torch.maximum(boxes_P4, edges_4[[0, 1, 0, 1]]).minimum(edges_4[[2, 3, 2, 3]])
        seen_P = (boxes_P4[:, 2:] > boxes_P4[:, :2]).all(dim=1)
        if seen_P.any():
            boxes_P4, scores_PL = boxes_P4[seen_P], scores_PL[seen_P]
        chosen = self.selection.choose(boxes_P4[:, None].expand(-1, scores_PL.shape[1], -1), scores_PL)
        boxes_P4, scores_PL = boxes_P4[chosen], scores_PL[chosen]
        return Regions(
            pool_boxes(map_Dhw, boxes_P4 / self.transform.size).cpu().numpy(),
            in_original(boxes_P4.cpu().numpy(), self.transform, image.size),
            with_background(scores_PL).cpu().numpy(),
        )


def pool_boxes(map_Dhw: Tensor, boxes_P4: Tensor) -> Tensor:
    """Return (P, D): the mean of a feature map in boxes, shares of its sides, as RoIAlign with one bin."""
    steps = (torch.arange(_SAMPLES, device=boxes_P4.device) + 0.5) / _SAMPLES
    across_PS, down_PS = (
        boxes_P4[:, axis, None] + steps * (boxes_P4[:, axis + 2] - boxes_P4[:, axis])[:, None] for axis in (0, 1)
    )
    shape = (len(boxes_P4), _SAMPLES, _SAMPLES)
    points = torch.stack([across_PS[:, None].expand(shape), down_PS[:, :, None].expand(shape)], dim=3)
    read_DPS = F.grid_sample(
        map_Dhw[None], points.flatten(1, 2)[None] * 2 - 1, padding_mode="border", align_corners=False
    )[0]
    return read_DPS.mean(dim=2).T


def with_background(scores_PL: Tensor) -> Tensor:
    """Return the distribution (P, 1 + L) over the background and labels of independent probabilities (P, L)."""
    none_P1 = (1 - scores_PL).prod(dim=1, keepdim=True)
    shares_PL = scores_PL / scores_PL.sum(dim=1, keepdim=True).clamp(min=torch.finfo(scores_PL.dtype).tiny)
    return torch.cat([none_P1, (1 - none_P1) * shares_PL], dim=1)
