"""The fusion-encoder in its two layouts: image and text tokens attend to each other.

Letters: B batch, N tokens, T text tokens, P image tokens, S = P + T, D width.
"""

import abc
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from medvl.models.fusion_encoders.config import Attention
from medvl.models.fusion_encoders.layers.attention_masks import attention_mask
from medvl.models.fusion_encoders.layers.transformer import CoAttentionLayer, SelfAttentionLayer, Sizes, init_weights

_TEXT, _IMAGE = 0, 1
"""Rows of the modality embedding."""


class Tokens(NamedTuple):
    """A sequence of vectors a sample."""

    states_BND: Tensor
    mask_BN: Tensor | None
    """bool, True on real tokens. None: all are real, which lets attention run without a mask."""

    def real_BN(self) -> Tensor:
        """The mask, written out where it is None."""
        if self.mask_BN is not None:
            return self.mask_BN
        return self.states_BND.new_ones(self.states_BND.shape[:2], dtype=torch.bool)

    def rows(self, index_M: Tensor) -> "Tokens":
        """The samples of an index, in its order."""
        return Tokens(self.states_BND[index_M], None if self.mask_BN is None else self.mask_BN[index_M])

    def beside(self, other: "Tokens") -> "Tokens":
        """The samples of both, one batch after the other; both have as many tokens."""
        states_BND = torch.cat([self.states_BND, other.states_BND])
        if self.mask_BN is None and other.mask_BN is None:
            return Tokens(states_BND, None)
        return Tokens(states_BND, torch.cat([self.real_BN(), other.real_BN()]))


class Fused(NamedTuple):
    """What a fusion-encoder returns."""

    text: Tokens
    image: Tokens
    pooled_BD: Tensor
    """One vector a pair, of width `pooled_dim`."""


class AttentionMaps(NamedTuple):
    """Where a text looks in its image: attention of the last fusion layer, mean over its heads, float32.

    A row sums to at most 1: what is missing goes to words, and to tokens that stand for no place in the image.
    """

    pooled_BP: Tensor
    """Of the token whose state is pooled for heads."""
    text_BTP: Tensor
    """Of every token of the text, its first one and its padding included."""

    def cells(self, image: Tokens, leading: int) -> "AttentionMaps":
        """Without the image's `leading` tokens, which are no cells; 0 on tokens that are padding."""
        real_BP = image.real_BN()[:, leading:].float()
        return AttentionMaps(self.pooled_BP[:, leading:] * real_BP, self.text_BTP[:, :, leading:] * real_BP[:, None])


class Pooler(nn.Module):
    """The first token's state through a dense layer and tanh."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width)

    def forward(self, states_BND: Tensor) -> Tensor:
        """(B, N, D) to (B, D)."""
        return torch.tanh(self.dense(states_BND[:, 0]))


class FusionEncoder(nn.Module, abc.ABC):
    """Both layouts take and return the same. `pooled_dim` is the width of `Fused.pooled_BD`."""

    pooled_dim: int

    def __init__(self, width: int) -> None:
        super().__init__()
        self.modality = nn.Embedding(2, width)

    @abc.abstractmethod
    def forward(self, text: Tokens, image: Tokens) -> Fused:
        """Tokens of the same B samples, of this encoder's width.

        A sample without an image (or text) has one token there that is nothing but its modality's embedding, so that no
        attention is over nothing.
        """

    @abc.abstractmethod
    def looks(self, text: Tokens, image: Tokens) -> AttentionMaps:
        """Over all of the image's tokens. It takes what `forward` takes, which itself keeps no weights."""

    def mark(self, text: Tokens, image: Tokens) -> tuple[Tensor, Tensor]:
        """(text_BTD, image_BPD) with their modality's embedding added."""
        return text.states_BND + self.modality.weight[_TEXT], image.states_BND + self.modality.weight[_IMAGE]


class DualStream(FusionEncoder):
    """A stream for each modality; every layer of both reads what both were a layer below (METER, LXMERT, M3AE)."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes.width)
        self.pooled_dim = 2 * sizes.width
        self.text_layers = nn.ModuleList(CoAttentionLayer(sizes) for _ in range(sizes.layers))
        self.image_layers = nn.ModuleList(CoAttentionLayer(sizes) for _ in range(sizes.layers))
        self.text_pooler, self.image_pooler = Pooler(sizes.width), Pooler(sizes.width)
        init_weights(self)

    def forward(self, text: Tokens, image: Tokens) -> Fused:
        """See the base class; the vector of a pair is the text's beside the image's."""
        text, image = self.streams(text, image, len(self.text_layers))
        pooled_BD = torch.cat([self.text_pooler(text.states_BND), self.image_pooler(image.states_BND)], dim=-1)
        return Fused(text, image, pooled_BD)

    def looks(self, text: Tokens, image: Tokens) -> AttentionMaps:
        """See the base class; of the two pooled tokens, the text's."""
        text, image = self.streams(text, image, len(self.text_layers) - 1)
        last: Any = self.text_layers[-1]
        weights_BTP = last.cross_weights(text.states_BND, image.states_BND, text.mask_BN, image.mask_BN)
        return AttentionMaps(weights_BTP[:, 0], weights_BTP)

    def streams(self, text: Tokens, image: Tokens, depth: int) -> tuple[Tokens, Tokens]:
        """Both streams after the first `depth` layers; what lies above is not computed."""
        text_BTD, image_BPD = self.mark(text, image)
        for text_layer, image_layer in list(zip(self.text_layers, self.image_layers, strict=True))[:depth]:
            text_BTD, image_BPD = (
                text_layer(text_BTD, image_BPD, text.mask_BN, image.mask_BN),
                image_layer(image_BPD, text_BTD, image.mask_BN, text.mask_BN),
            )
        return Tokens(text_BTD, text.mask_BN), Tokens(image_BPD, image.mask_BN)


class SingleStream(FusionEncoder):
    """One Transformer over the image's tokens and the text's behind them (VisualBERT, UNITER, ViLT)."""

    def __init__(self, sizes: Sizes, attention: Attention = "bidirectional", seq2seq_share: float = 0.5) -> None:
        super().__init__(sizes.width)
        self.pooled_dim = sizes.width
        self.attention: Attention = attention
        self.seq2seq_share = seq2seq_share
        self.layers = nn.ModuleList(SelfAttentionLayer(sizes) for _ in range(sizes.layers))
        self.pooler = Pooler(sizes.width)
        init_weights(self)

    def forward(self, text: Tokens, image: Tokens) -> Fused:
        """See the base class; the vector of a pair is that of the image's first token, which under every mask but
        seq2seq and non_cross has seen the text."""
        states_BSD, _ = self.stream(text, image, len(self.layers))
        images = image.states_BND.shape[1]
        return Fused(
            Tokens(states_BSD[:, images:], text.mask_BN),
            Tokens(states_BSD[:, :images], image.mask_BN),
            self.pooler(states_BSD),
        )

    def looks(self, text: Tokens, image: Tokens) -> AttentionMaps:
        """See the base class; the pooled token is the image's first one."""
        states_BSD, mask_BSS = self.stream(text, image, len(self.layers) - 1)
        last: Any = self.layers[-1]
        weights_BSS = last.attention.weights(states_BSD, states_BSD, mask_BSS).mean(dim=1)
        images = image.states_BND.shape[1]
        return AttentionMaps(weights_BSS[:, 0, :images], weights_BSS[:, images:, :images])

    def stream(self, text: Tokens, image: Tokens, depth: int) -> tuple[Tensor, Tensor | None]:
        """The states (B, S, D) after the first `depth` layers, and the mask that all of them share."""
        text_BTD, image_BPD = self.mark(text, image)
        states_BSD = torch.cat([image_BPD, text_BTD], dim=1)
        mask_BSS = self.mask(text, image)
        for layer in self.layers[:depth]:
            states_BSD = layer(states_BSD, mask_BSS)
        return states_BSD, mask_BSS

    def mask(self, text: Tokens, image: Tokens) -> Tensor | None:
        """(B, S, S); None where everything sees everything."""
        return stream_mask(self.attention, text, image, self.seq2seq_share if self.training else 0.0)


def stream_mask(attention: Attention, text: Tokens, image: Tokens, seq2seq_share: float) -> Tensor | None:
    """(B, S, S) of an image block and the text block behind it; None where everything sees everything.

    A mixed mask is drawn anew at every call, from torch's generator of the tokens' device; a share of zero is
    bidirectional.
    """
    if attention == "bidirectional" and text.mask_BN is None and image.mask_BN is None:
        return None
    text_mask_BT, image_mask_BP = text.real_BN(), image.real_BN()
    seq2seq_B = None
    if attention == "mixed":
        seq2seq_B = torch.rand(len(text_mask_BT), device=text_mask_BT.device) < seq2seq_share
    return attention_mask(attention, image_mask_BP, text_mask_BT, seq2seq_B)
