"""Base of models that predict masks: a probability map for each label, at the pixels of the original image."""

import abc
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from medvl.models.base import System
from medvl.models.heatmaps import on_image
from medvl.schema import Batch


class MaskModel(System):
    """A system with a plane of logits for each label. A model that reads text has a tokenizer.

    Attributes:
        grid: (h, w) of the logits for images of `transform`.
    """

    config: Any
    """Settings with `labels`."""
    grid: tuple[int, int]

    @abc.abstractmethod
    def mask_logits(self, batch: Batch) -> Tensor:
        """(B, L, h, w), labels in the order of `config.labels`."""

    @torch.no_grad()
    def maps(self, batch: Batch, sizes: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Return probabilities (L, H, W) for each image at the pixels of the original, NaN where it was cropped.

        Args:
            batch: images prepared by `transform`, with their texts for a model that reads text.
            sizes: (height, width) of the original images.
        """
        probability_BLhw = torch.sigmoid(self.mask_logits(batch.to(self.device)).float())
        boxes = [self.transform.box(*size) for size in sizes]
        return [
            on_image(map_Lhw, box, *size) for map_Lhw, box, size in zip(probability_BLhw, boxes, sizes, strict=True)
        ]
