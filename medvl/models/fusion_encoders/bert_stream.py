"""A BERT that encodes the tokens of a text and of an image jointly.

T text tokens, P image tokens, S all tokens, N masked positions; the other letters as in `medvl.schema`.
"""

from typing import Any, Unpack

import torch
from torch import Tensor, nn

from medvl.encoders import TextEncoder
from medvl.errors import ConfigError
from medvl.models.base import Parts
from medvl.models.bert_init import init_weights
from medvl.models.fusion_encoders.layers.encoder import AttentionMaps, Fused, Pooler, Tokens, join
from medvl.models.fusion_encoders.layers.inputs import ImageSource, RegionEncoder, encode_present
from medvl.models.fusion_encoders.layers.transformer import attention_weights
from medvl.models.fusion_encoders.masked_matching import MaskedMatchingModel
from medvl.schema import ImageFeatures

IMAGE_TYPE = 1
"""BERT's token type of image tokens; text has type 0."""


class BertStream(MaskedMatchingModel):
    """The sequence `[CLS] text [SEP]`, image tokens through BERT, which is both text encoder and fusion-encoder.

    The pooled token is CLS. Image tokens are the cells of an encoder's grid, or the regions of a detector; a system
    writes `embed_image`, and `make_image_input` where a linear layer is not all that it needs.
    """

    def __init__(
        self, config: Any, image_encoder: ImageSource, text_encoder: TextEncoder, **parts: Unpack[Parts]
    ) -> None:
        super().__init__(config, image_encoder, text_encoder, **parts)
        width = text_encoder.token_dim
        if getattr(getattr(text_encoder.backbone, "config", None), "model_type", None) != "bert":
            message = f"text_encoder must be a BERT, got {config.text_encoder}"
            raise ConfigError(message, "unsupported", field="text_encoder")
        self.image_input = self.make_image_input(config, image_encoder, width)
        self.pooler = Pooler(width)
        for module in (self.image_input, self.pooler):
            init_weights(module)
        self.make_heads(width, width, tied=True)

    def make_image_input(self, config: Any, image_encoder: ImageSource, width: int) -> nn.Module:
        """Create the projection of image features to tokens."""
        return nn.Linear(image_encoder.patch_dim, width)

    def embed_image(self, features: ImageFeatures) -> Tensor:
        """(B, P, D): image tokens as BERT's first layer reads them; by default with their type, without positions."""
        return self.embed_like_words(self.image_input(features.patches_BPD), self.type_of_images)

    @property
    def type_of_images(self) -> Tensor:
        """(D,): the embedding of BERT's second token type."""
        backbone: Any = self.text_encoder.backbone
        type_D: Tensor = backbone.embeddings.token_type_embeddings.weight[IMAGE_TYPE]
        return type_D

    def embed_like_words(self, states_BPD: Tensor, added: Tensor) -> Tensor:
        """Add embeddings to projected features; normalise and drop out as BERT does for words."""
        backbone: Any = self.text_encoder.backbone
        embedded_BPD: Tensor = backbone.embeddings.dropout(backbone.embeddings.LayerNorm(states_BPD + added))
        return embedded_BPD

    def image_tokens(self, image: Tensor, has_image_B: Tensor | None = None) -> Tokens:
        """See the base class; a sample without an image has padding only."""
        tokens = encode_present(has_image_B, self.fused_dim, self._encode_images, image)
        if has_image_B is None:
            return tokens
        return Tokens(tokens.states_BND, tokens.real_BN() & has_image_B[:, None])  # text tokens remain as keys

    def _encode_images(self, image: Tensor) -> Tokens:
        states_BPD = self.embed_image(self.image_encoder(image))
        source = self.image_encoder
        return Tokens(states_BPD, source.real(image) if isinstance(source, RegionEncoder) else None)

    def text_tokens(self, ids_BT: Tensor, mask_BT: Tensor, has_text_B: Tensor | None = None) -> Tokens:
        """See the base class; of a sample without a text, CLS remains."""
        states_BTD = self.text_encoder.embed(ids_BT, mask_BT)
        real_BT = mask_BT if has_text_B is None else mask_BT & has_text_B[:, None]
        is_cls_T = torch.arange(real_BT.shape[1], device=real_BT.device) == 0
        return Tokens(states_BTD, real_BT | is_cls_T)

    def fuse(self, text: Tokens, image: Tokens) -> Fused:
        """See the base class."""
        sequence, mask_BQS = self.sequence(text, image)
        states_BSD = self.text_encoder.encode(sequence.states_BND, mask_BQS)[-1]
        return self.fused(states_BSD, sequence.real_BN(), text.states_BND.shape[1])

    def cross_attention(self, text: Tokens, image: Tokens) -> AttentionMaps:
        """See the base class; the pooled token is CLS."""
        sequence, mask_BQS = self.sequence(text, image)
        below_BSD = self.text_encoder.encode(sequence.states_BND, mask_BQS)[-2]
        backbone: Any = self.text_encoder.backbone
        last = backbone.encoder.layer[-1].attention.self
        weights_BHSS = attention_weights(last.query(below_BSD), last.key(below_BSD), last.num_attention_heads, mask_BQS)
        maps_BTP = self.text_to_image(weights_BHSS.mean(dim=1), text.states_BND.shape[1])
        return AttentionMaps(maps_BTP[:, 0], maps_BTP).cells(image, leading=0)

    def sequence(self, text: Tokens, image: Tokens) -> tuple[Tokens, Tensor]:
        """Return the joint sequence, and the attention mask of its tokens, (B, 1, S) or (B, S, S)."""
        sequence = join(text, image)
        return sequence, sequence.real_BN()[:, None]

    def fused(self, states_BSD: Tensor, real_BS: Tensor, texts: int) -> Fused:
        """Return the parts of the encoded sequence; `texts` is the number of tokens of `text_tokens`."""
        return Fused(
            Tokens(states_BSD[:, :texts], real_BS[:, :texts]),
            Tokens(states_BSD[:, texts:], real_BS[:, texts:]),
            self.pooler(states_BSD),
        )

    def text_to_image(self, weights_BSS: Tensor, texts: int) -> Tensor:
        """(B, T, P): attention of every token of the text, CLS first, to the image tokens."""
        return weights_BSS[:, :texts, texts:]
