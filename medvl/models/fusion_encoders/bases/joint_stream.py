"""The base of systems in which one Transformer encodes the tokens of a text and of an image jointly.

T text tokens, P image tokens, S all tokens, Q queries (1: all alike); the other letters as in `medvl.schema`.
"""

import abc
from collections.abc import Sequence

from torch import Tensor

from medvl.models.bert_init import init_weights
from medvl.models.fusion_encoders.bases.masked_matching import MaskedMatchingModel
from medvl.models.fusion_encoders.parts.attention_masks import keep_first
from medvl.models.fusion_encoders.parts.encoder import AttentionMaps, Fused, Pooler, Tokens, join


class JointStream(MaskedMatchingModel):
    """The text, then the image, in one sequence; the text's first token is pooled.

    Attributes:
        image_prefix: number of image tokens that are not cells of the image.
    """

    image_prefix: int = 0

    def make_heads(self, fused_dim: int, pooled_dim: int, *, tied: bool = False) -> None:
        """See the base class; also creates the pooler."""
        self.pooler = Pooler(fused_dim)
        init_weights(self.pooler)
        super().make_heads(fused_dim, pooled_dim, tied=tied)

    @abc.abstractmethod
    def encode_sequence(self, sequence: Tokens, mask_BQS: Tensor | None) -> Sequence[Tensor]:
        """Return the states (B, S, D) of a sequence: the input of each layer in order, then the output."""

    @abc.abstractmethod
    def last_attention(self, below_BSD: Tensor, mask_BQS: Tensor | None) -> Tensor:
        """(B, heads, S, S): weights of the last layer's attention, given its input."""

    def text_tokens(self, ids_BT: Tensor, mask_BT: Tensor, has_text_B: Tensor | None = None) -> Tokens:
        """See the base class; of a sample without a text, CLS remains."""
        states_BTD = self.text_encoder.embed(ids_BT, mask_BT)
        return Tokens(states_BTD, keep_first(mask_BT, has_text_B))

    def fuse(self, text: Tokens, image: Tokens) -> Fused:
        """See the base class."""
        sequence, mask_BQS = self.sequence(text, image)
        states_BSD = self.encode_sequence(sequence, mask_BQS)[-1]
        return self.fused(Tokens(states_BSD, sequence.mask_BN), text.states_BND.shape[1])

    def cross_attention(self, text: Tokens, image: Tokens) -> AttentionMaps:
        """See the base class."""
        sequence, mask_BQS = self.sequence(text, image)
        weights_BHSS = self.last_attention(self.encode_sequence(sequence, mask_BQS)[-2], mask_BQS)
        maps_BTP = self.text_to_image(weights_BHSS.mean(dim=1), text.states_BND.shape[1])
        return AttentionMaps(maps_BTP[:, 0], maps_BTP).cells(image, leading=self.image_prefix)

    def sequence(self, text: Tokens, image: Tokens) -> tuple[Tokens, Tensor | None]:
        """Return the joint sequence, and the mask of its attention, (B, 1, S) or (B, S, S); None: no mask."""
        sequence = join(text, image)
        return sequence, None if sequence.mask_BN is None else sequence.mask_BN[:, None]

    def fused(self, encoded: Tokens, texts: int) -> Fused:
        """Return the parts of the encoded sequence; `texts` is the number of tokens of `text_tokens`."""
        text, image = encoded.part(slice(0, texts)), encoded.part(slice(texts, None))
        return Fused(text, image, self.pooler(encoded.states_BND))

    def text_to_image(self, weights_BSS: Tensor, texts: int) -> Tensor:
        """(B, T, P): attention of every token of the text, CLS first, to the image tokens."""
        return weights_BSS[:, :texts, texts:]
