"""M3AE: multi-modal masked autoencoders (Chen et al., arXiv 2209.07098, MICCAI 2022)."""

import dataclasses
from typing import Any, Unpack

from torch import Tensor

from medvl.common.config_io import check_within
from medvl.encoders import ImageEncoder, TextEncoder, freeze_batch_norm_statistics
from medvl.losses.masked import PatchMask
from medvl.models.base import Parts
from medvl.models.fusion_encoders.bases.base import check_pixels
from medvl.models.fusion_encoders.bases.objectives import MaskedImageModeling
from medvl.models.fusion_encoders.parts.encoder import DualStream, Tokens
from medvl.models.fusion_encoders.parts.heads import Patches, PixelDecoder, PixelDecoderConfig
from medvl.models.fusion_encoders.parts.inputs import ImageSource
from medvl.models.fusion_encoders.streams import DualStreamConfig, StreamModel
from medvl.models.registry import register_system

# P patches, K kept patches, C numbers of a patch; the other letters as in `medvl.schema`.


@dataclasses.dataclass(frozen=True, kw_only=True)
class M3AEConfig(PixelDecoderConfig, DualStreamConfig):
    """Published settings of M3AE."""

    max_tokens: int = 64
    mask_ratio: float = 0.75
    """Share of the patches that are removed before the image encoder's first block."""
    mim_layer: int = 3
    """Number of co-attention layers after which the pixel decoder reads the image stream."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_within(self, "(0, 1)", "mask_ratio")
        self.check_decoder()
        check_within(self, f"[1, {self.layers}]", "mim_layer")


@register_system("m3ae")
class M3AE(StreamModel):
    """Dual-stream pretraining by masked words, masked patches and image-text matching, with equal
    weights.

    The published step runs the whole model three times. This one encodes every input once: the
    whole image serves words and pairs, the unmasked text serves patches and pairs, the pixel branch
    stops where the decoder reads, and words are predicted at masked positions only. The losses are
    the same, except that negatives are other images of the batch instead of images decoded for the
    purpose.

    With a CNN, which has no tokens to remove, cells of its last grid are masked (`encode_visible`).
    This is not in the paper.

    Other deviations: the modality embedding has the fusion-encoder's learning rate, which the
    released code does not apply because of its name; and parts of that code that are never used are
    left out: of its 391.6 million parameters, 25.3 are CLIP's text embeddings and 0.6 RoBERTa's
    pooler.
    """

    Config = M3AEConfig

    fusion: DualStream
    image_encoder: ImageEncoder

    def __init__(
        self,
        config: M3AEConfig,
        image_encoder: ImageSource,
        text_encoder: TextEncoder,
        **parts: Unpack[Parts],
    ) -> None:
        super().__init__(config, image_encoder, text_encoder, **parts)
        self.mim_head = pixel_decoder(config, image_encoder)
        self.mim = MaskedImageModeling(config.mim_weight, self, config.mask_ratio)
        self.objectives = (self.mim, *self.objectives)

    def reconstruct(
        self, image_BCHW: Tensor, image: Tokens, text: Tokens, patches: PatchMask
    ) -> Tensor:
        """(B, P, C): predict pixels of all patches from the kept ones and the texts; `image`,
        whole, is not read.
        """
        return reconstruct_pixels(self, image_BCHW, text, patches)


# Masked patches, for M3AE and ARL.


def pixel_decoder(config: M3AEConfig, image_encoder: ImageSource) -> PixelDecoder:
    """Return the decoder of the pixels of patches. Raises ConfigError for precomputed regions."""
    patches = Patches.of(check_pixels(image_encoder, config.system))
    return PixelDecoder(config.width, patches, config)


def reconstruct_pixels(model: Any, image_BCHW: Tensor, text: Tokens, patches: PatchMask) -> Tensor:
    """(B, P, C): predict pixels of all patches from the kept ones and the texts, after
    `config.mim_layer` layers of the fusion-encoder.
    """
    with freeze_batch_norm_statistics(model.image_encoder):  # they describe whole images
        visible = model.image_tokens(image_BCHW, keep_BK=patches.kept_BK)
    _, stream = model.fusion.streams(text, visible, model.config.mim_layer)
    pixels_BPC: Tensor = model.mim_head(stream.states_BND, patches)
    return pixels_BPC
