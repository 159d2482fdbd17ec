"""M2I2: ALBEF with masked images (Li et al., arXiv 2211.13594, ISBI 2023)."""

import dataclasses
from typing import Unpack

from torch import Tensor

from medvl.common.config_io import check_within
from medvl.encoders import ImageEncoder, TextEncoder
from medvl.encoders.presets import CLIP_MEAN, CLIP_STD
from medvl.losses.masked import PatchMask
from medvl.models.base import EncoderArguments, Parts
from medvl.models.fusion_encoders.albef import ALBEF, ALBEFConfig
from medvl.models.fusion_encoders.bases.objectives import Corruption, MaskedImageModeling
from medvl.models.fusion_encoders.parts.encoder import Tokens
from medvl.models.fusion_encoders.parts.heads import Patches, PixelDecoder, PixelDecoderConfig
from medvl.models.registry import register_system
from medvl.schema import Batch

# P patches, K kept patches, C numbers of a patch; the other letters as in `medvl.schema`.


@dataclasses.dataclass(frozen=True, kw_only=True)
class M2I2Config(PixelDecoderConfig, ALBEFConfig):
    """Settings of M2I2's released code; the decoder is MAE's."""

    image_encoder: str = "mae_vit_b16"
    image_arguments: EncoderArguments = dataclasses.field(
        default_factory=lambda: {"mean": CLIP_MEAN, "std": CLIP_STD}
    )
    mask_ratio: float = 0.15
    """Share of the patches that are removed from each image and reconstructed."""
    ramp_steps: int = 5_700
    """The first epoch: the 90,920 captions of ImageCLEF 2022 in batches of 16."""
    decoder_width: int = 512
    decoder_layers: int = 8
    decoder_heads: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_decoder()
        check_within(self, "(0, 1)", "mask_ratio")


@register_system("m2i2")
class M2I2(ALBEF):
    """ALBEF's objectives on images without some of their patches, and the pixels of those (ITC,
    ITM, MLM, MIM).

    The released code encodes every image twice, each time without another 15 % of its patches: once
    for ITC, ITM and MLM, once for MIM, whose decoder reads the image encoder. Here one encoding
    serves all four. The pixels to predict are normalised like the encoder's input, but not by patch
    (`norm_pix_loss` off, as published). The teacher removes patches of its own.

    Deviations besides ALBEF's: the position embeddings, sines and cosines in MAE's weights, are
    trained; the decoder's weights start as BERT's, not as MAE's (Xavier, uniform). With a CNN,
    cells of its last grid are removed (`encode_visible`), and batch-norm statistics are computed
    from such images.
    """

    Config = M2I2Config

    def __init__(
        self,
        config: M2I2Config,
        image_encoder: ImageEncoder,
        text_encoder: TextEncoder,
        **parts: Unpack[Parts],
    ) -> None:
        super().__init__(config, image_encoder, text_encoder, **parts)
        self.mim_head = PixelDecoder(
            image_encoder.patch_dim, Patches.of(image_encoder), config, "gelu"
        )
        self.mim = MaskedImageModeling(
            config.mim_weight, self, config.mask_ratio, standardized=False
        )
        self.objectives = (*self.objectives, self.mim)

    def kept_patches(self, batch: Batch, corruption: Corruption) -> Tensor:
        """(B, K): the patches that MIM does not remove, also in validation."""
        return corruption.of(self.mim).kept_BK

    def reconstruct(
        self, image_BCHW: Tensor, image: Tokens, text: Tokens, patches: PatchMask
    ) -> Tensor:
        """(B, P, C): predict the pixels of all patches from the encoded ones; no text is read."""
        pixels_BPC: Tensor = self.mim_head(image.states_BND, patches)
        return pixels_BPC
