"""Pretraining on pairs, images alone and texts alone (Wang et al., arXiv 2103.16022)."""

import dataclasses
from typing import Unpack

import torch
from torch import Tensor

from medvl.common.config_io import check_within
from medvl.encoders import ImageEncoder, TextEncoder
from medvl.losses.masked import blank
from medvl.models.base import EncoderArguments, Parts
from medvl.models.fusion_encoders.bases.base import check_pixels
from medvl.models.fusion_encoders.objectives.base import Corruption, Encoded
from medvl.models.fusion_encoders.objectives.patches import MultiScaleMaskedImageModeling
from medvl.models.fusion_encoders.parts.encoder import Tokens
from medvl.models.fusion_encoders.parts.heads import BlockHead, Patches
from medvl.models.fusion_encoders.parts.inputs import ImageSource
from medvl.models.fusion_encoders.streams import DualStreamConfig, StreamModel
from medvl.models.registry import register_system
from medvl.schema import Batch

# P cells of the image's grid; the other letters as in `medvl.schema`.


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixedConfig(DualStreamConfig):
    """Settings of pretraining on mixed data; the paper has no code, and these are medvl's."""

    image_encoder: str = "resnet50"
    image_arguments: EncoderArguments = dataclasses.field(default_factory=dict)
    text_encoder: str = "bert"
    image_size: int = 256
    image_positions: bool = True
    max_tokens: int = 128
    mim_weight: float = 1.0
    mask_ratio: float = 0.25
    """Share of the image's cells that are masked, in whole blocks."""
    scales: tuple[int, ...] = (1, 2, 4)
    """Sides of the blocks that are masked and regenerated, in cells; each must divide the grid."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_within(self, "(0, 1)", "mask_ratio")
        check_within(self, "(0, inf)", "mim_weight")


@register_system("mixed")
class MixedModel(StreamModel):
    """Masked words of all texts, masked cells of all images at several scales, and matching of the
    pairs.

    The abstract describes a Transformer for paired data and for a mixture of paired and unpaired
    data, also of several institutions; masked words; and masked vision modelling at several scales,
    which regenerates patches of the image. No code is published; the other details are choices of
    medvl:

    - Layout: the grid of a CNN and the states of a BERT, each projected and with its modality's
      embedding, in two streams with co-attention.
    - A missing modality is one null token, which holds the learned embedding of its modality; the
      other stream attends to it, and attention to padding is masked.
    - Cells and words are masked in one pass. For each image a scale is drawn, and whole blocks of s
      x s cells are masked: their pixels are the mean before the image encoder, and their tokens a
      learned vector behind it. Batch-norm statistics are thus those of masked images.
    - Every scale has a linear head that regenerates each masked block, averaged over its cells, at
      the resolution of one cell: s times smaller, in the units of the image encoder's input. The
      loss is the mean squared error over the masked blocks of a scale, then the mean over scales.
    - Matching (ITM) compares whole texts with masked images and counts complete samples only; a
      word or block counts wherever its own text or image exists.
    """

    Config = MixedConfig

    def __init__(
        self,
        config: MixedConfig,
        image_encoder: ImageSource,
        text_encoder: TextEncoder,
        **parts: Unpack[Parts],
    ) -> None:
        super().__init__(config, image_encoder, text_encoder, **parts)
        self.patches = Patches.of(check_pixels(image_encoder, "mixed"))
        self.mim_head = BlockHead(config.width, self.patches.values, len(config.scales))
        self.mim = MultiScaleMaskedImageModeling(
            config.mim_weight, self, config.mask_ratio, config.scales
        )
        self.objectives = (*self.objectives, self.mim)

    image_encoder: ImageEncoder

    def encode(self, batch: Batch, corruption: Corruption) -> Encoded:
        """All images are masked."""
        return self.encode_apart(
            batch, corruption, self.masked_image_tokens(batch, corruption.of(self.mim))
        )

    def masked_image_tokens(self, batch: Batch, masked_BP: Tensor) -> Tokens:
        """Encode images without information about the masked cells."""
        pixels_BCHW = self.image_encoder.normalize(batch.image_BCHW)
        image = self.image_tokens(
            blank(pixels_BCHW, masked_BP, self.patches.side), batch.has_image_B
        )
        cells_BPD = image.states_BND[:, 1:]
        if cells_BPD.shape[1] == 0:  # no sample has an image
            return image
        token = self.mim_head.mask_token
        positions_PD = self.image_input.positions
        hidden = token if positions_PD is None else token + positions_PD
        cells_BPD = torch.where(masked_BP[:, :, None], hidden.to(cells_BPD.dtype), cells_BPD)
        return Tokens(torch.cat([image.states_BND[:, :1], cells_BPD], dim=1), image.mask_BN)
