"""Post-LN Transformer layers as in BERT (Devlin et al., arXiv 1810.04805), over torch's
scaled_dot_product_attention.

A sequence may be packed: its real tokens in one row (R, D) instead of (B, N, D), with the `Packing`
of its mask. Padding then costs arithmetic in attention only.

Letters: B batch, Q queries, K keys, N tokens, D width.
"""

import dataclasses
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medvl.models.base import LAYER_NORM_EPS

if TYPE_CHECKING:
    from medvl.encoders.text.packing import Packing


# Boolean attention masks: True where a query may attend to a key.
#
# A single stream is an image block followed by a text block. Its masks are built from both blocks
# and their padding, which is excluded from every mask, so that no row attends to a padded key.
#
# Letters: B batch, Q queries, K keys, I tokens of the image block, T tokens of the text block, S
# = I + T.

AttentionKind = Literal["bidirectional", "seq2seq", "bar", "mixed", "non_cross"]
"""Attention mask of a single stream, see `attention_mask`."""
ATTENTIONS: tuple[AttentionKind, ...] = ("bidirectional", "seq2seq", "bar", "mixed", "non_cross")
CAUSAL_ATTENTIONS: tuple[AttentionKind, ...] = ("seq2seq", "bar", "mixed")
"""Masks under which text is predicted from the image and earlier words, as writing a report
needs.
"""


def attention_mask(
    attention: AttentionKind,
    image_mask_BI: Tensor,
    text_mask_BT: Tensor,
    seq2seq_B: Tensor | None = None,
) -> Tensor:
    """(B, S, S): whether the query of a row may attend to the key of a column.

    Args:
        attention: "bidirectional": everything attends to everything (BERT). "seq2seq": image rows
            attend to the image, text rows to the image and to the text up to themselves (UniLM).
            "bar": as seq2seq, but image rows attend to the text too (MedViLL's bidirectional
            auto-regressive mask). "non_cross": each block attends to itself only. "mixed": seq2seq
            or bidirectional, by sample.
        image_mask_BI, text_mask_BT: bool, True on real tokens.
        seq2seq_B: bool, the samples of "mixed" with the sequence-to-sequence mask.

    Raises ValueError for an unknown kind, and for "mixed" without `seq2seq_B`.
    """
    if attention not in ATTENTIONS:
        raise ValueError(f"attention must be one of {', '.join(ATTENTIONS)}, got {attention!r}")
    images = image_mask_BI.shape[1]
    texts = text_mask_BT.shape[1]
    place_S = torch.arange(images + texts, device=image_mask_BI.device)
    is_text_S = place_S >= images
    earlier_SS = place_S[None, :] <= place_S[:, None]
    seq2seq_SS = ~is_text_S[None, :] | (is_text_S[:, None] & earlier_SS)
    real_B1S = torch.cat([image_mask_BI, text_mask_BT], dim=1)[:, None, :]
    if attention == "seq2seq":
        return seq2seq_SS & real_B1S
    if attention == "bar":
        return (seq2seq_SS | ~is_text_S[:, None]) & real_B1S
    if attention == "non_cross":
        return (is_text_S[:, None] == is_text_S[None, :]) & real_B1S
    if attention == "mixed":
        if seq2seq_B is None:
            raise ValueError("attention 'mixed' needs seq2seq_B")
        return (seq2seq_SS | ~seq2seq_B[:, None, None]) & real_B1S
    return real_B1S.expand(-1, len(place_S), -1)


def padding_mask(mask_BK: Tensor | None) -> Tensor | None:
    """(B, 1, K): every query attends to the real keys; None if all are real."""
    return None if mask_BK is None else mask_BK[:, None, :]


def open_empty_rows(mask_BQK: Tensor) -> Tensor:
    """Return the mask with empty rows set to True: a softmax over no keys is NaN.

    The output of such a row is meaningless and must be ignored.
    """
    return mask_BQK | ~mask_BQK.any(dim=-1, keepdim=True)


def keep_first(mask_BT: Tensor, has_text_B: Tensor | None) -> Tensor:
    """(B, T) bool: the mask of texts; of a sample without a text, the first token (CLS) remains.

    Layers that normalise a token of zeros would have gradients near 1 / epsilon.
    """
    real_BT = mask_BT if has_text_B is None else mask_BT & has_text_B[:, None]
    is_first_T = torch.arange(mask_BT.shape[1], device=mask_BT.device) == 0
    return real_BT | is_first_T


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a Transformer's layers."""

    width: int
    layers: int
    heads: int
    intermediate: int
    dropout: float = 0.0
    """Dropout of hidden states and of attention."""

    @classmethod
    def of(cls, config: Any, width: int) -> Self:
        """Return the sizes in a configuration's fields of these names, with the given width."""
        return cls(width, config.layers, config.heads, config.intermediate, config.dropout)


def split_heads(states_BND: Tensor, heads: int) -> Tensor:
    """(B, heads, N, D / heads)."""
    return states_BND.unflatten(2, (heads, -1)).transpose(1, 2)


def attention_weights(
    query_BQD: Tensor, key_BKD: Tensor, heads: int, mask_BQK: Tensor | None
) -> Tensor:
    """(B, heads, Q, K): softmax of scaled products over the keys that the mask allows, as in
    `Attention`.
    """
    query_BHQD = split_heads(query_BQD, heads)
    key_BHKD = split_heads(key_BKD, heads)
    scores_BHQK = query_BHQD @ key_BHKD.transpose(2, 3) / query_BHQD.shape[-1] ** 0.5
    if mask_BQK is not None:
        scores_BHQK = scores_BHQK.masked_fill(~open_empty_rows(mask_BQK)[:, None], float("-inf"))
    return scores_BHQK.softmax(dim=-1)


KeysValues = tuple[Tensor, Tensor]
"""Keys and values of an attention, (rows, heads, tokens, D / heads) each."""


class Attention(nn.Module):
    """Multi-head attention of one sequence to another (or to itself), residual and LayerNorm.

    `context_width` is the width of the other sequence if it differs.
    """

    def __init__(self, sizes: Sizes, context_width: int | None = None) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.dropout = sizes.dropout
        context = context_width or sizes.width
        self.query = nn.Linear(sizes.width, sizes.width)
        self.key = nn.Linear(context, sizes.width)
        self.value = nn.Linear(context, sizes.width)
        self.out = nn.Linear(sizes.width, sizes.width)
        self.norm = nn.LayerNorm(sizes.width, eps=LAYER_NORM_EPS)

    def forward(
        self,
        states_BQD: Tensor,
        context_BKD: Tensor,
        mask_BQK: Tensor | None,
        packing: "Packing | None" = None,
        context_packing: "Packing | None" = None,
    ) -> Tensor:
        """(B, Q, D). `mask_BQK` is True where a query may attend, with Q = 1 for all queries alike;
        None: no mask.

        A query with an empty mask attends to everything. With a `packing` the states are packed,
        and so is the result; with a `context_packing` the other sequence is.
        """
        return self.attend(
            states_BQD, self.keys_values(context_BKD, context_packing), mask_BQK, packing
        )

    def keys_values(self, context_BKD: Tensor, packing: "Packing | None" = None) -> KeysValues:
        """Project the other tokens to keys and values, which can be cached and attended to
        again.
        """
        return self._split(self.key(context_BKD), packing), self._split(
            self.value(context_BKD), packing
        )

    def attend(
        self,
        states_BQD: Tensor,
        keys_values: KeysValues,
        mask_BQK: Tensor | None,
        packing: "Packing | None" = None,
    ) -> Tensor:
        """Attend to cached keys and values; the rest of `forward`."""
        attended_BHQd = F.scaled_dot_product_attention(
            self._split(self.query(states_BQD), packing),
            *keys_values,
            attn_mask=None if mask_BQK is None else open_empty_rows(mask_BQK)[:, None],
            dropout_p=self.dropout if self.training else 0.0,
        )
        attended_BQD = attended_BHQd.transpose(1, 2).flatten(2)
        attended_BQD = self.out(attended_BQD if packing is None else packing.pack(attended_BQD))
        added_BQD: Tensor = self.norm(
            states_BQD + F.dropout(attended_BQD, self.dropout, self.training)
        )
        return added_BQD

    def weights(self, states_BQD: Tensor, context_BKD: Tensor, mask_BQK: Tensor | None) -> Tensor:
        """(B, heads, Q, K): the attention weights of `forward` without dropout, for plots."""
        return attention_weights(
            self.query(states_BQD), self.key(context_BKD), self.heads, mask_BQK
        )

    def _split(self, states_BND: Tensor, packing: "Packing | None" = None) -> Tensor:
        return split_heads(
            states_BND if packing is None else packing.unpack(states_BND), self.heads
        )


class FeedForward(nn.Module):
    """Linear, GELU, Linear; residual and LayerNorm."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.dropout = sizes.dropout
        self.inner = nn.Linear(sizes.width, sizes.intermediate)
        self.outer = nn.Linear(sizes.intermediate, sizes.width)
        self.norm = nn.LayerNorm(sizes.width, eps=LAYER_NORM_EPS)

    def forward(self, states_BND: Tensor) -> Tensor:
        """(B, N, D) to the same shape."""
        changed_BND = F.dropout(
            self.outer(F.gelu(self.inner(states_BND))), self.dropout, self.training
        )
        added_BND: Tensor = self.norm(states_BND + changed_BND)
        return added_BND


class SelfAttentionLayer(nn.Module):
    """A BERT layer, for single streams."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention = Attention(sizes)
        self.feed_forward = FeedForward(sizes)

    def forward(self, states_BND: Tensor, mask_BNN: Tensor | None) -> Tensor:
        """(B, N, D) to the same shape; the mask as in `Attention`."""
        output_BND: Tensor = self.feed_forward(self.attention(states_BND, states_BND, mask_BNN))
        return output_BND


class CoAttentionLayer(nn.Module):
    """A layer of one stream: self-attention, attention to the other stream, feed-forward (METER,
    figure 2).
    """

    def __init__(self, sizes: Sizes, context_width: int | None = None) -> None:
        super().__init__()
        self.attention = Attention(sizes)
        self.cross_attention = Attention(sizes, context_width)
        self.feed_forward = FeedForward(sizes)

    def forward(
        self,
        states_BND: Tensor,
        other_BKD: Tensor,
        mask_BN: Tensor | None,
        other_mask_BK: Tensor | None,
        packing: "Packing | None" = None,
        other_packing: "Packing | None" = None,
    ) -> Tensor:
        """(B, N, D) to the same shape. Masks are True on real tokens; None: all are real.

        With a `packing` the states are packed, with an `other_packing` those of the other stream.
        """
        attended_BND = self.attention(
            states_BND, states_BND, padding_mask(mask_BN), packing, packing
        )
        crossed_BND = self.cross_attention(
            attended_BND, other_BKD, padding_mask(other_mask_BK), packing, other_packing
        )
        output_BND: Tensor = self.feed_forward(crossed_BND)
        return output_BND

    def cross_weights(
        self,
        states_BND: Tensor,
        other_BKD: Tensor,
        mask_BN: Tensor | None,
        other_mask_BK: Tensor | None,
    ) -> Tensor:
        """(B, N, K): attention weights of `forward` to the other stream, mean over the heads."""
        attended_BND = self.attention(states_BND, states_BND, padding_mask(mask_BN))
        return self.cross_attention.weights(
            attended_BND, other_BKD, padding_mask(other_mask_BK)
        ).mean(dim=1)
