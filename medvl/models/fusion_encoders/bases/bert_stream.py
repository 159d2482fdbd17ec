"""The base of systems in which one Transformer, mostly a BERT, encodes the tokens of a text and of
an image jointly.

T text tokens, P image tokens, S all tokens, Q queries (1: all alike); the other letters as in
`medvl.schema`.
"""

from collections.abc import Sequence
from typing import Any, Unpack

from torch import Tensor, nn

from medvl.encoders import TextEncoder
from medvl.encoders.regions import RegionEncoder
from medvl.errors import ConfigError, WeightsError
from medvl.models.base import Parts, init_weights
from medvl.models.fusion_encoders.bases.base import FusionModel
from medvl.models.fusion_encoders.parts.encoder import AttentionMaps, Fused, Pooler, Tokens, join
from medvl.models.fusion_encoders.parts.inputs import ImageSource, encode_present
from medvl.models.fusion_encoders.parts.transformer import attention_weights, keep_first
from medvl.schema import ImageFeatures

IMAGE_TYPE = 1
"""BERT's token type of image tokens; text has type 0."""


class JointStream(FusionModel):
    """The text, then the image, in one sequence through one Transformer; the text's first token is
    pooled.

    By default the Transformer is a BERT, which is both text encoder and fusion-encoder, on
    `[CLS] text [SEP]` and image tokens. These are the cells of an encoder's grid, or the regions of
    a detector; a system writes `embed_image`, and `make_image_input` if a linear layer is not
    sufficient. A system with another Transformer writes `add_layers`, `image_tokens`,
    `encode_sequence` and `last_attention`.

    Attributes:
        image_prefix: number of image tokens that are not cells of the image.
    """

    image_prefix: int = 0

    def __init__(
        self,
        config: Any,
        image_encoder: ImageSource,
        text_encoder: TextEncoder,
        **parts: Unpack[Parts],
    ) -> None:
        super().__init__(config, image_encoder, text_encoder, **parts)
        self.add_layers(config, image_encoder, text_encoder)

    def add_layers(self, config: Any, image_encoder: Any, text_encoder: TextEncoder) -> None:
        """Create the input of image tokens and the heads. Raises ConfigError for encoders that the
        system cannot join.
        """
        width = text_encoder.token_dim
        if getattr(getattr(text_encoder.backbone, "config", None), "model_type", None) != "bert":
            message = f"text_encoder must be a BERT, got {config.text_encoder}"
            raise ConfigError(message, "unsupported", field="text_encoder")
        self.image_input = self.make_image_input(config, image_encoder, width)
        init_weights(self.image_input)
        self.add_heads(width, width, tied=True)

    def add_heads(self, fused_dim: int, pooled_dim: int, *, tied: bool = False) -> None:
        """Create the layers and the pooler."""
        self.pooler = Pooler(fused_dim)
        init_weights(self.pooler)
        super().add_heads(fused_dim, pooled_dim, tied=tied)

    def make_image_input(self, config: Any, image_encoder: ImageSource, width: int) -> nn.Module:
        """Create the projection of image features to tokens."""
        return nn.Linear(image_encoder.patch_dim, width)

    def embed_image(self, features: ImageFeatures) -> Tensor:
        """(B, P, D): image tokens as BERT's first layer reads them; by default with their type,
        without positions.
        """
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
        embedded_BPD: Tensor = backbone.embeddings.dropout(
            backbone.embeddings.LayerNorm(states_BPD + added)
        )
        return embedded_BPD

    def image_tokens(self, image: Tensor, has_image_B: Tensor | None = None) -> Tokens:
        """Give a sample without an image padding only."""
        tokens = encode_present(has_image_B, self.fused_dim, self._encode_images, image)
        if has_image_B is None:
            return tokens
        # text tokens remain as keys
        return Tokens(tokens.states_BND, tokens.real_BN() & has_image_B[:, None])

    def _encode_images(self, image: Tensor) -> Tokens:
        states_BPD = self.embed_image(self.image_encoder(image))
        source = self.image_encoder
        return Tokens(states_BPD, source.real(image) if isinstance(source, RegionEncoder) else None)

    def text_tokens(
        self, ids_BT: Tensor, mask_BT: Tensor, has_text_B: Tensor | None = None
    ) -> Tokens:
        """Encode the tokens; CLS alone remains of a sample without a text."""
        states_BTD = self.text_encoder.embed(ids_BT, mask_BT)
        return Tokens(states_BTD, keep_first(mask_BT, has_text_B))

    def fuse(self, text: Tokens, image: Tokens) -> Fused:
        sequence, mask_BQS = self.sequence(text, image)
        states_BSD = self.encode_sequence(sequence, mask_BQS)[-1]
        return self.fused(Tokens(states_BSD, sequence.mask_BN), text.states_BND.shape[1])

    def cross_attention(self, text: Tokens, image: Tokens) -> AttentionMaps:
        sequence, mask_BQS = self.sequence(text, image)
        weights_BHSS = self.last_attention(self.encode_sequence(sequence, mask_BQS)[-2], mask_BQS)
        maps_BTP = self.text_to_image(weights_BHSS.mean(dim=1), text.states_BND.shape[1])
        return AttentionMaps(maps_BTP[:, 0], maps_BTP).cells(image, leading=self.image_prefix)

    def sequence(self, text: Tokens, image: Tokens) -> tuple[Tokens, Tensor | None]:
        """Return the joint sequence, and the mask of its attention, (B, 1, S) or (B, S, S);
        None: no mask.
        """
        sequence = join(text, image)
        return sequence, None if sequence.mask_BN is None else sequence.mask_BN[:, None]

    def fused(self, encoded: Tokens, texts: int) -> Fused:
        """Return the parts of the encoded sequence; `texts` is the number of tokens of
        `text_tokens`.
        """
        text = encoded.part(slice(0, texts))
        image = encoded.part(slice(texts, None))
        return Fused(text, image, self.pooler(encoded.states_BND))

    def text_to_image(self, weights_BSS: Tensor, texts: int) -> Tensor:
        """(B, T, P): attention of every token of the text, CLS first, to the image tokens."""
        return weights_BSS[:, :texts, texts:]

    def encode_sequence(self, sequence: Tokens, mask_BQS: Tensor | None) -> Sequence[Tensor]:
        """Return the states (B, S, D) of a sequence: the input of each layer in order, then the
        output.
        """
        assert mask_BQS is not None, "texts have a padding mask"
        return self.text_encoder.encode(sequence.states_BND, mask_BQS)

    def last_attention(self, below_BSD: Tensor, mask_BQS: Tensor | None) -> Tensor:
        """(B, heads, S, S): weights of the last layer's attention, given its input."""
        backbone: Any = self.text_encoder.backbone
        last = backbone.encoder.layer[-1].attention.self
        return attention_weights(
            last.query(below_BSD), last.key(below_BSD), last.num_attention_heads, mask_BQS
        )


# Initialisation of fusion layers from the layers of a pretrained BERT.

_BERT_NAMES = {
    "attention.query": "attention.self.query",
    "attention.key": "attention.self.key",
    "attention.value": "attention.self.value",
    "attention.out": "attention.output.dense",
    "attention.norm": "attention.output.LayerNorm",
    "feed_forward.inner": "intermediate.dense",
    "feed_forward.outer": "output.dense",
    "feed_forward.norm": "output.LayerNorm",
}
"""Submodule of a `CoAttentionLayer` -> submodule of a BERT layer, which has no cross-attention."""


def init_from_bert(fusion: nn.ModuleList, bert: TextEncoder) -> None:
    """Copy the last layers of a BERT into the layers of a fusion-encoder; cross-attention keeps its
    weights.

    Raises ConfigError if the encoder is not a BERT, WeightsError if its layers have other sizes.
    """
    backbone: Any = bert.backbone
    blocks = getattr(getattr(backbone, "encoder", None), "layer", None)
    if not isinstance(blocks, nn.ModuleList) or any(
        name not in dict(blocks[0].named_modules()) for name in _BERT_NAMES.values()
    ):
        message = (
            f"the fusion-encoder starts from the upper layers of a BERT; {bert.name} is not a BERT"
        )
        raise ConfigError(message, "unsupported", field="text_encoder")
    for layer, block in zip(fusion, blocks[-len(fusion) :], strict=True):
        for name, bert_name in _BERT_NAMES.items():
            try:
                layer.get_submodule(name).load_state_dict(
                    block.get_submodule(bert_name).state_dict()
                )
            except RuntimeError as error:
                raise WeightsError(
                    f"the layers of {bert.name} have other sizes: {error}", "mismatch"
                ) from error
