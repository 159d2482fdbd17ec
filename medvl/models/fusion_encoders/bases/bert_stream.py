"""A BERT that encodes the tokens of a text and of an image jointly.

T text tokens, P image tokens, S all tokens, N masked positions; the other letters as in `medvl.schema`.
"""

from collections.abc import Sequence
from typing import Any, Unpack

from torch import Tensor, nn

from medvl.encoders import TextEncoder
from medvl.encoders.regions import RegionEncoder
from medvl.errors import ConfigError
from medvl.models.base import Parts
from medvl.models.bert_init import init_weights
from medvl.models.fusion_encoders.bases.joint_stream import JointStream
from medvl.models.fusion_encoders.parts.encoder import Tokens
from medvl.models.fusion_encoders.parts.inputs import ImageSource, encode_present
from medvl.models.fusion_encoders.parts.transformer import attention_weights
from medvl.schema import ImageFeatures

IMAGE_TYPE = 1
"""BERT's token type of image tokens; text has type 0."""


class BertStream(JointStream):
    """The sequence `[CLS] text [SEP]`, image tokens through BERT, which is both text encoder and fusion-encoder.

    The pooled token is CLS. Image tokens are the cells of an encoder's grid, or the regions of a detector; a system
    writes `embed_image`, and `make_image_input` if a linear layer is not sufficient.
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
        init_weights(self.image_input)
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

    def encode_sequence(self, sequence: Tokens, mask_BQS: Tensor | None) -> Sequence[Tensor]:
        """See the base class."""
        assert mask_BQS is not None, "texts have a padding mask"
        return self.text_encoder.encode(sequence.states_BND, mask_BQS)

    def last_attention(self, below_BSD: Tensor, mask_BQS: Tensor | None) -> Tensor:
        """See the base class."""
        backbone: Any = self.text_encoder.backbone
        last = backbone.encoder.layer[-1].attention.self
        return attention_weights(last.query(below_BSD), last.key(below_BSD), last.num_attention_heads, mask_BQS)
