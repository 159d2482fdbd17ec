"""ViLT: a vision Transformer over words and patches, without an image encoder (Kim et al., arXiv
2102.03334).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

from torch import Tensor, nn

from medvl.common.config_io import check_within
from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.encoders import ImageEncoder, TextEncoder
from medvl.errors import ConfigError
from medvl.models.base import EncoderArguments, init_weights
from medvl.models.fusion_encoders.bases.base import FusionConfig
from medvl.models.fusion_encoders.bases.bert_stream import JointStream
from medvl.models.fusion_encoders.bases.objectives import WPA_WEIGHT, WordPatchAlignment
from medvl.models.fusion_encoders.parts.encoder import Tokens
from medvl.models.fusion_encoders.parts.inputs import encode_present, sample_tokens
from medvl.models.fusion_encoders.parts.transformer import attention_weights
from medvl.models.registry import register_system


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViLTConfig(FusionConfig):
    """Published settings of ViLT."""

    image_encoder: str = "timm:vit_base_patch32_384"
    image_arguments: EncoderArguments = dataclasses.field(
        default_factory=lambda: {"pos_drop_rate": 0.1, "proj_drop_rate": 0.1}
    )
    text_encoder: str = "bert"
    text_arguments: EncoderArguments = dataclasses.field(
        default_factory=lambda: {"num_hidden_layers": 0}
    )
    image_size: int = 384
    fusion_lr_mult: float = 1.0
    head_lr_mult: float = 1.0
    image_tokens: int | None = 200
    """Patches sampled for each image in training."""
    max_tokens: int = 40
    former = (("wpa_weight", WPA_WEIGHT),)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_within(self, "(0, inf)", "image_tokens")


@register_system("vilt")
class ViLT(JointStream):
    """Masked whole words, image-text matching and word-patch alignment on one pre-LN Transformer.

    `image_encoder` has the patch embedding and the joint blocks, which start from a ViT; the words'
    embeddings start at random, as published. Images are square, where the paper keeps their aspect.
    """

    Config = ViLTConfig
    image_encoder: ImageEncoder
    image_prefix = 1

    def add_layers(self, config: Any, image_encoder: Any, text_encoder: TextEncoder) -> None:
        width = text_encoder.token_dim
        layers = text_encoder.num_layers
        is_vit = getattr(image_encoder, "has_attention", False)
        if not is_vit or (image_encoder.patch_dim, 0) != (width, layers):
            message = (
                "expected a ViT of timm, and text_arguments with its width as hidden_size "
                "and num_hidden_layers 0"
            )
            raise ConfigError(message, "unsupported", field="image_encoder")
        self.modality = nn.Embedding(2, width).apply(init_weights)
        self.add_heads(width, width)
        self.objectives = (
            *self.objectives,
            WordPatchAlignment(WPA_WEIGHT, text_ends=False, image_prefix=1),
        )

    @classmethod
    def build(cls, config: ViLTConfig, *, pretrained: bool, tokenizer: Tokenizer | None) -> Self:
        model = super().build(config, pretrained=False, tokenizer=tokenizer)
        model.load_encoders(pretrained, text=False)
        return model

    def image_tokens(self, image: Tensor, has_image_B: Tensor | None = None) -> Tokens:
        """Embed the class token and the patches."""
        tokens = encode_present(has_image_B, self.fused_dim, self._embed_patches, image)
        return Tokens(tokens.states_BND + self.modality.weight[1], tokens.mask_BN)

    def _embed_patches(self, image_BCHW: Tensor) -> Tokens:
        count = self.config.image_tokens if self.training else None
        return Tokens(sample_tokens(self.image_encoder.embed(image_BCHW), count, leading=1), None)

    def text_tokens(
        self, ids_BT: Tensor, mask_BT: Tensor, has_text_B: Tensor | None = None
    ) -> Tokens:
        tokens = super().text_tokens(ids_BT, mask_BT, has_text_B)
        return Tokens(tokens.states_BND + self.modality.weight[0], tokens.mask_BN)

    def encode_sequence(self, sequence: Tokens, mask_BQS: Tensor | None) -> Sequence[Tensor]:
        return self.image_encoder.encode_tokens(sequence.states_BND, sequence.mask_BN)

    def last_attention(self, below_BSD: Tensor, mask_BQS: Tensor | None) -> Tensor:
        backbone: Any = self.image_encoder.backbone
        last = backbone.blocks[-1]
        query_BSD, key_BSD, _ = last.attn.qkv(last.norm1(below_BSD)).chunk(3, dim=-1)
        return attention_weights(query_BSD, key_BSD, last.attn.num_heads, mask_BQS)
