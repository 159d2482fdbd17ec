"""Segmentation by a small decoder on an image encoder."""

import dataclasses
from typing import Any, Literal, get_args

import torch.nn.functional as F
from torch import Tensor, nn

from medvl import losses
from medvl.common.config_io import check_choice
from medvl.data.loading.dense_targets import DenseBatch
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.data.transforms.image import EvalTransform
from medvl.encoders import ImageEncoder
from medvl.models.downstream.dense_base import DenseConfig, DenseModel, MaskModel, init_prior
from medvl.models.registry import register_system
from medvl.schema import Batch, Losses

Decoding = Literal["conv", "linear"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SegmenterConfig(DenseConfig):
    """Settings of a segmenter."""

    decoder: Decoding = "conv"
    """`linear` is one 1x1 layer on the encoder's patches, and its logits are enlarged bilinearly to
    the input's pixels (linear segmentation of LoVT, arXiv 2112.02889); it has no `width` and no
    `doublings`.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.decoder, get_args(Decoding), "decoder")


class PatchGrid(nn.Module):
    """Patches as a feature map, unchanged."""

    def forward(self, patches_BPD: Tensor, grid: tuple[int, int]) -> Tensor:
        """(B, D, h, w)."""
        return patches_BPD.transpose(1, 2).unflatten(2, grid)


@register_system("segmenter")
class Segmenter(DenseModel, MaskModel):
    """Logits of labels for each cell of the decoder's grid, trained by cross-entropy and soft Dice.

    Attributes:
        grid: (h, w) of the logits: the decoder's grid, or the input's pixels for the linear
            decoder.
    """

    Config = SegmenterConfig

    def __init__(
        self,
        config: SegmenterConfig,
        image_encoder: ImageEncoder,
        transform: EvalTransform,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        super().__init__(config, image_encoder, transform, tokenizer)
        if config.decoder == "linear":
            self.grid = (transform.size, transform.size)
        width = config.width if config.decoder == "conv" else image_encoder.patch_dim
        self.mask_head = init_prior(nn.Conv2d(width, len(config.labels), 1))

    @staticmethod
    def make_decoder(config: Any, patch_dim: int) -> nn.Module:
        return (
            PatchGrid()
            if config.decoder == "linear"
            else DenseModel.make_decoder(config, patch_dim)
        )

    def forward(self, batch: Batch) -> Losses:
        """Return the losses of a `DenseBatch` with masks at the model's grid."""
        assert isinstance(batch, DenseBatch)
        assert batch.masks_BLhw is not None
        entropy, dice = losses.bce_dice(self.mask_logits(batch), batch.masks_BLhw / 255)
        return Losses.sum(cross_entropy=entropy, dice=dice)

    def mask_logits(self, batch: Batch) -> Tensor:
        """(B, L, h, w), labels in the order of `config.labels`."""
        logits_BLhw: Tensor = self.mask_head(self.decode(batch))
        if self.config.decoder == "linear":
            return F.interpolate(logits_BLhw, size=self.grid, mode="bilinear", align_corners=False)
        return logits_BLhw
