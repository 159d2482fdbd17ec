"""Two encoders and a separate fusion-encoder in either layout, pretrained by MLM and ITM.

The dual-stream layout is METER (Dou et al., arXiv 2111.02387); M3AE extends it.
"""

import dataclasses
from typing import Any, Unpack

from torch import Tensor, nn

from medvl.common.config_io import check_within
from medvl.encoders import TextEncoder
from medvl.encoders.regions import RegionEncoder
from medvl.models.base import EncoderArguments, Parts, init_weights
from medvl.models.fusion_encoders.bases.base import (
    FusionModel,
    StreamConfig,
    check_attention,
)
from medvl.models.fusion_encoders.parts.encoder import (
    AttentionMaps,
    DualStream,
    Fused,
    FusionEncoder,
    SingleStream,
    Tokens,
)
from medvl.models.fusion_encoders.parts.inputs import (
    ImageInput,
    ImageSource,
    encode_present,
    encode_visible,
)
from medvl.models.fusion_encoders.parts.transformer import AttentionKind, Sizes
from medvl.models.registry import register_system


@dataclasses.dataclass(frozen=True, kw_only=True)
class DualStreamConfig(StreamConfig):
    """Two streams with co-attention: METER by default, LXMERT-like by options."""

    image_arguments: EncoderArguments = dataclasses.field(default_factory=lambda: {"layers": 11})
    """METER omits the last block of CLIP's image tower."""
    max_tokens: int = 50


@dataclasses.dataclass(frozen=True, kw_only=True)
class SingleStreamConfig(StreamConfig):
    """One Transformer over image and text tokens, on any two encoders (VisualBERT, UNITER, ViLT
    by options).
    """

    image_encoder: str = "resnet50"
    text_encoder: str = "bert"
    image_positions: bool = True
    image_tokens: int | None = None
    """Grid cells that are sampled for each image in training (ViLT: 200, PixelBERT: 100); None, and
    in eval mode: all.
    """
    attention: AttentionKind = "bidirectional"
    seq2seq_share: float = 0.5
    """With attention "mixed": share of batches that are trained with the sequence-to-sequence
    mask.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        check_attention(self, unmatched=("seq2seq", "non_cross"))
        check_within(self, "(0, inf)", "image_tokens")


class StreamModel(FusionModel):
    """Two encoders below a fusion-encoder: a stream for each modality, unless `make_fusion` returns
    another one.

    METER decodes images to serve as negatives of ITM; here they are other images of the batch.
    """

    def __init__(
        self,
        config: StreamConfig,
        image_encoder: ImageSource,
        text_encoder: TextEncoder,
        **parts: Unpack[Parts],
    ) -> None:
        super().__init__(config, image_encoder, text_encoder, **parts)
        self.image_input = self.make_image_input(config, image_encoder)
        self.text_input = nn.Linear(text_encoder.token_dim, config.width)
        self.fusion = self.make_fusion(config)
        init_weights(self.text_input)
        self.add_heads(config.width, self.fusion.pooled_dim)

    def make_image_input(self, config: Any, image_encoder: ImageSource) -> ImageInput:
        """Create the projection of image features to tokens."""
        return ImageInput(image_encoder, config.width, positions=config.image_positions)

    def make_fusion(self, config: Any) -> FusionEncoder:
        """Create the fusion-encoder."""
        return DualStream(Sizes.of(config, config.width))

    def image_tokens(
        self, image: Tensor, has_image_B: Tensor | None = None, keep_BK: Tensor | None = None
    ) -> Tokens:
        """Encode images; with `keep_BK`, only these patches (`encode_visible`)."""
        return encode_present(has_image_B, self.config.width, self._encode_images, image, keep_BK)

    def _encode_images(self, image: Tensor, keep_BK: Tensor | None) -> Tokens:
        encoder: Any = self.image_encoder
        if isinstance(encoder, RegionEncoder):
            return self.image_input(encoder(image), real_BP=encoder.real(image))
        if keep_BK is None:
            return self.image_input(encoder(image))
        return self.image_input(encode_visible(encoder, image, keep_BK), keep_BK=keep_BK)

    def text_tokens(
        self, ids_BT: Tensor, mask_BT: Tensor, has_text_B: Tensor | None = None
    ) -> Tokens:
        return encode_present(has_text_B, self.config.width, self._encode_texts, ids_BT, mask_BT)

    def _encode_texts(self, ids_BT: Tensor, mask_BT: Tensor) -> Tokens:
        features = self.text_encoder(ids_BT, mask_BT)
        return Tokens(self.text_input(features.tokens_BTD), features.mask_BT)

    def fuse(self, text: Tokens, image: Tokens) -> Fused:
        fused: Fused = self.fusion(text, image)
        return fused

    def cross_attention(self, text: Tokens, image: Tokens) -> AttentionMaps:
        return self.fusion.cross_attention(text, image).cells(image, leading=1)


@register_system("dual_stream")
class DualStreamModel(StreamModel):
    """A stream for each modality, with co-attention."""

    Config = DualStreamConfig


@register_system("single_stream")
class SingleStreamModel(StreamModel):
    """One Transformer over the tokens of both modalities."""

    Config = SingleStreamConfig

    def make_image_input(
        self, config: SingleStreamConfig, image_encoder: ImageSource
    ) -> ImageInput:
        return ImageInput(
            image_encoder,
            config.width,
            positions=config.image_positions,
            sampled=config.image_tokens,
        )

    def make_fusion(self, config: SingleStreamConfig) -> FusionEncoder:
        return SingleStream(Sizes.of(config, config.width), config.attention, config.seq2seq_share)
