"""Segmentation on a frozen image encoder: a map of probabilities for each label, at the pixels of any image."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from medvl import losses
from medvl.data.loading.dense_targets import DenseBatch
from medvl.data.transforms.image import EvalTransform
from medvl.encoders import ImageEncoder
from medvl.models.downstream.dense_base import DenseModel, rare
from medvl.models.downstream.dense_config import SegmenterConfig
from medvl.models.heatmaps import on_image
from medvl.models.registry import register_system
from medvl.schema import Batch, Losses


@register_system("segmenter")
class Segmenter(DenseModel):
    """Logits of labels for each cell of the decoder's grid, trained by cross-entropy and soft Dice."""

    Config = SegmenterConfig

    def __init__(self, config: SegmenterConfig, image_encoder: ImageEncoder, transform: EvalTransform) -> None:
        super().__init__(config, image_encoder, transform)
        self.mask_head = rare(nn.Conv2d(config.width, len(config.labels), 1))

    def forward(self, batch: Batch) -> Losses:
        """`batch` is a `DenseBatch` with masks at the model's own grid."""
        assert isinstance(batch, DenseBatch)
        assert batch.masks_BLhw is not None
        entropy, dice = losses.bce_dice(self.mask_logits(batch.image_BCHW), batch.masks_BLhw / 255)
        return Losses.sum(cross_entropy=entropy, dice=dice)

    def mask_logits(self, image_BCHW: Tensor) -> Tensor:
        """(B, L, h, w), labels in the order of `config.labels`."""
        logits_BLhw: Tensor = self.mask_head(self.decode(image_BCHW))
        return logits_BLhw

    @torch.no_grad()
    def maps(self, image_BCHW: Tensor, sizes: Sequence[tuple[int, int]]) -> list[Tensor]:
        """One (L, H, W) an image: probabilities at the pixels of the image before `transform`, NaN where it was cut.

        Args:
            image_BCHW: as `transform` made them.
            sizes: (height, width) of each before that.
        """
        probability_BLhw = torch.sigmoid(self.mask_logits(image_BCHW.to(self.device)).float())
        boxes = [self.transform.box(*size) for size in sizes]
        return [
            on_image(map_Lhw, box, *size) for map_Lhw, box, size in zip(probability_BLhw, boxes, sizes, strict=True)
        ]
