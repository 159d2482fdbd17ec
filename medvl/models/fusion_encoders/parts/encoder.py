"""The two layouts of a fusion-encoder: dual stream and single stream.

Letters: B batch, N tokens, T text tokens, P image tokens, S = P + T, D width.
"""

import abc
import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medvl.models.base import init_weights
from medvl.models.fusion_encoders.parts.transformer import (
    AttentionKind,
    CoAttentionLayer,
    SelfAttentionLayer,
    Sizes,
    attention_mask,
    keep_first,
)

if TYPE_CHECKING:
    from medvl.encoders.text.packing import Packing

_TEXT = 0
_IMAGE = 1
"""Rows of the modality embedding."""


class EntityTokens(NamedTuple):
    """The entities that each text mentions, a sequence of its own beside the text's words (ARL)."""

    states_BND: Tensor
    mask_BN: Tensor
    """bool, True on entities, False on padding."""
    mention_BT: Tensor
    """int64: the entity whose mention a word is part of, -1 for none."""


class Tokens(NamedTuple):
    """A sequence of vectors for each sample."""

    states_BND: Tensor
    mask_BN: Tensor | None
    """bool, True on real tokens. None: all are real, and attention runs without a mask."""
    entities: EntityTokens | None = None
    """Entities of each text, in systems with a knowledge graph."""

    def real_BN(self) -> Tensor:
        """Return the mask, all True if it is None."""
        if self.mask_BN is not None:
            return self.mask_BN
        return self.states_BND.new_ones(self.states_BND.shape[:2], dtype=torch.bool)

    def rows(self, index_M: Tensor) -> "Tokens":
        """Select samples by index."""
        return self._map(lambda tensor: tensor[index_M])

    def to(self, device: torch.device) -> "Tokens":
        """Return the same tokens on a device."""
        return self._map(lambda tensor: tensor.to(device))

    def cut(self, length: int) -> "Tokens":
        """Return the first `length` tokens of every sample."""
        entities = self.entities and self.entities._replace(
            mention_BT=self.entities.mention_BT[:, :length]
        )
        mask_BN = None if self.mask_BN is None else self.mask_BN[:, :length]
        return Tokens(self.states_BND[:, :length], mask_BN, entities)

    def beside(self, other: "Tokens") -> "Tokens":
        """Concatenate two batches of samples, padded to the longer one."""
        return stack([self, other])

    def replaced(self, index_M: Tensor, other: "Tokens") -> "Tokens":
        """Return the same samples with those of `other` in place of some."""
        row_B = torch.arange(len(self.states_BND), device=index_M.device)
        place_M = len(row_B) + torch.arange(len(index_M), device=index_M.device)
        return self.beside(other).rows(row_B.index_copy(0, index_M, place_M))

    def part(self, places: slice) -> "Tokens":
        """Select tokens of all samples."""
        return Tokens(
            self.states_BND[:, places], None if self.mask_BN is None else self.mask_BN[:, places]
        )

    def split(self, sizes: Sequence[int]) -> list["Tokens"]:
        """Return batches of these numbers of samples; the reverse of `beside`."""
        ends = list(itertools.accumulate(sizes))
        return [self._map(operator.itemgetter(rows)) for rows in map(slice, [0, *ends], ends)]

    def _map(self, function: Callable[[Tensor], Tensor]) -> "Tokens":
        mask_BN = None if self.mask_BN is None else function(self.mask_BN)
        entities = None if self.entities is None else EntityTokens(*map(function, self.entities))
        return Tokens(function(self.states_BND), mask_BN, entities)


def join(first: Tokens, second: Tokens) -> Tokens:
    """Concatenate the sequences of the same samples, without entities."""
    states_BND = torch.cat([first.states_BND, second.states_BND], dim=1)
    if first.mask_BN is None and second.mask_BN is None:
        return Tokens(states_BND, None)
    return Tokens(states_BND, torch.cat([first.real_BN(), second.real_BN()], dim=1))


class ImageTimes(nn.Module):
    """Learned vectors that tell tokens of the current image from those of an earlier one.

    Args:
        width: D, of the tokens.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.vectors = nn.Embedding(2, width)
        init_weights(self)

    def join(self, current: Tokens, earlier: Tokens) -> Tokens:
        """Concatenate the tokens of both images of each sample, each plus the vector of its
        time.
        """
        current_D, earlier_D = self.vectors.weight
        return join(
            Tokens(current.states_BND + current_D, current.mask_BN),
            Tokens(earlier.states_BND + earlier_D, earlier.mask_BN),
        )


def stack(parts: Sequence[Tokens]) -> Tokens:
    """Concatenate batches of samples, padded to the longest sequence."""
    states_BND = _stack([part.states_BND for part in parts])
    lengths = {part.states_BND.shape[1] for part in parts}
    all_real = all(part.mask_BN is None for part in parts) and len(lengths) == 1
    entities = [part.entities for part in parts if part.entities is not None]
    return Tokens(
        states_BND,
        None if all_real else _stack([part.real_BN() for part in parts]),
        EntityTokens(
            _stack([part.states_BND for part in entities]),
            _stack([part.mask_BN for part in entities]),
            _stack([part.mention_BT for part in entities], -1),
        )
        if entities
        else None,
    )


def _stack(parts: Sequence[Tensor], value: float = 0) -> Tensor:
    """Concatenate tensors (B, N, ...) along B, padded along N."""
    longest = max(part.shape[1] for part in parts)
    padding = [[0, 0] * (part.ndim - 2) + [0, longest - part.shape[1]] for part in parts]
    padded = [
        F.pad(part, pad, value=value) if pad[-1] else part
        for part, pad in zip(parts, padding, strict=True)
    ]
    return torch.cat(padded)


class Fused(NamedTuple):
    """Output of a fusion-encoder."""

    text: Tokens
    image: Tokens
    pooled_BD: Tensor
    """One vector for each pair, of width `pooled_dim`."""

    def split(self, sizes: Sequence[int]) -> list["Fused"]:
        """Return the outputs of batches that were fused together, of these numbers of samples."""
        parts = zip(
            self.text.split(sizes),
            self.image.split(sizes),
            self.pooled_BD.split(list(sizes)),
            strict=True,
        )
        return [Fused(*part) for part in parts]


class AttentionMaps(NamedTuple):
    """Attention of a text to its image in the last fusion layer, mean over the heads, float32.

    A row sums to at most 1: the rest goes to words, and to tokens without a place in the image.
    """

    pooled_BP: Tensor
    """From the token that is pooled for heads."""
    text_BTP: Tensor
    """From every token of the text, including the first one and padding."""

    def cells(self, image: Tokens, leading: int) -> "AttentionMaps":
        """Drop the first `leading` image tokens, which are not grid cells; set padding to 0."""
        real_BP = image.real_BN()[:, leading:].float()
        return AttentionMaps(
            self.pooled_BP[:, leading:] * real_BP, self.text_BTP[:, :, leading:] * real_BP[:, None]
        )


class Pooler(nn.Module):
    """Dense layer and tanh on the state of the first token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width)

    def forward(self, states_BND: Tensor) -> Tensor:
        """(B, N, D) to (B, D)."""
        return torch.tanh(self.dense(states_BND[:, 0]))


class FusionEncoder(nn.Module, abc.ABC):
    """Base of both layouts. `pooled_dim` is the width of `Fused.pooled_BD`."""

    pooled_dim: int

    def __init__(self, width: int) -> None:
        super().__init__()
        self.modality = nn.Embedding(2, width)

    @abc.abstractmethod
    def forward(self, text: Tokens, image: Tokens) -> Fused:
        """Fuse tokens of the same B samples, of this encoder's width.

        A sample without an image (or text) has one token there that holds only the modality
        embedding, so that attention always has a key.
        """

    @abc.abstractmethod
    def cross_attention(self, text: Tokens, image: Tokens) -> AttentionMaps:
        """Return attention to all image tokens. Same inputs as `forward`, which keeps no
        weights.
        """

    def mark(self, text: Tokens, image: Tokens) -> tuple[Tensor, Tensor]:
        """Return (text_BTD, image_BPD) with their modality embeddings added."""
        return text.states_BND + self.modality.weight[
            _TEXT
        ], image.states_BND + self.modality.weight[_IMAGE]


class DualStream(FusionEncoder):
    """A stream for each modality; each layer of both reads the states of the layer below (METER,
    LXMERT, M3AE).

    `text_layers` replaces the layers of the text's stream.
    """

    def __init__(self, sizes: Sizes, text_layers: Iterable[nn.Module] | None = None) -> None:
        super().__init__(sizes.width)
        self.pooled_dim = 2 * sizes.width
        self.text_layers = nn.ModuleList(
            text_layers or (CoAttentionLayer(sizes) for _ in range(sizes.layers))
        )
        self.image_layers = nn.ModuleList(CoAttentionLayer(sizes) for _ in range(sizes.layers))
        self.text_pooler = Pooler(sizes.width)
        self.image_pooler = Pooler(sizes.width)
        self._packing: type[Packing] | None = None
        init_weights(self)

    def pack(self, enabled: bool = True) -> None:
        """Let the text's stream compute real tokens only, as `TextEncoder.pack` does."""
        from medvl.encoders.text.packing import Packing  # imports torch's compiler: seconds

        self._packing = Packing if enabled else None

    def packing_of(self, text: Tokens) -> "Packing | None":
        """Return the packing of the text's stream; None where it is not packed.

        A text without tokens keeps the first one, which stands for the row of equal null tokens
        that is read padded.
        """
        if self._packing is None or text.mask_BN is None:
            return None
        return self._packing.from_mask(keep_first(text.mask_BN, None))

    def forward(self, text: Tokens, image: Tokens) -> Fused:
        """Concatenate the vectors of text and image to the pair's."""
        text, image = self.streams(text, image, len(self.text_layers))
        pooled_BD = torch.cat(
            [self.text_pooler(text.states_BND), self.image_pooler(image.states_BND)], dim=-1
        )
        return Fused(text, image, pooled_BD)

    def cross_attention(self, text: Tokens, image: Tokens) -> AttentionMaps:
        """Use the text's of the two pooled tokens."""
        text, image = self.streams(text, image, len(self.text_layers) - 1)
        last: Any = self.text_layers[-1]
        weights_BTP = last.cross_weights(
            text.states_BND, image.states_BND, text.mask_BN, image.mask_BN
        )
        return AttentionMaps(weights_BTP[:, 0], weights_BTP)

    def streams(self, text: Tokens, image: Tokens, depth: int) -> tuple[Tokens, Tokens]:
        """Return both streams after the first `depth` layers; layers above are not computed."""
        text_BTD, image_BPD = self.mark(text, image)
        packing = self.packing_of(text)
        mask_BT = text.mask_BN
        if packing is not None:
            text_BTD = packing.pack(text_BTD)
            mask_BT = packing.mask_BT
        for text_layer, image_layer in list(zip(self.text_layers, self.image_layers, strict=True))[
            :depth
        ]:
            text_BTD, image_BPD = (
                text_layer(text_BTD, image_BPD, mask_BT, image.mask_BN, packing),
                image_layer(image_BPD, text_BTD, image.mask_BN, mask_BT, None, packing),
            )
        text_BTD = text_BTD if packing is None else packing.unpack(text_BTD)
        return Tokens(text_BTD, text.mask_BN), Tokens(image_BPD, image.mask_BN)


class SingleStream(FusionEncoder):
    """One Transformer over the image tokens followed by the text tokens (VisualBERT, UNITER,
    ViLT).
    """

    def __init__(
        self, sizes: Sizes, attention: AttentionKind = "bidirectional", seq2seq_share: float = 0.5
    ) -> None:
        super().__init__(sizes.width)
        self.pooled_dim = sizes.width
        self.attention: AttentionKind = attention
        self.seq2seq_share = seq2seq_share
        self.layers = nn.ModuleList(SelfAttentionLayer(sizes) for _ in range(sizes.layers))
        self.pooler = Pooler(sizes.width)
        init_weights(self)

    def forward(self, text: Tokens, image: Tokens) -> Fused:
        """Take the vector of the first image token, which attends to the text under every mask but
        seq2seq and non_cross.
        """
        states_BSD, _ = self.stream(text, image, len(self.layers))
        images = image.states_BND.shape[1]
        return Fused(
            Tokens(states_BSD[:, images:], text.mask_BN),
            Tokens(states_BSD[:, :images], image.mask_BN),
            self.pooler(states_BSD),
        )

    def cross_attention(self, text: Tokens, image: Tokens) -> AttentionMaps:
        """Use the first image token, which is the pooled one."""
        states_BSD, mask_BSS = self.stream(text, image, len(self.layers) - 1)
        last: Any = self.layers[-1]
        weights_BSS = last.attention.weights(states_BSD, states_BSD, mask_BSS).mean(dim=1)
        images = image.states_BND.shape[1]
        return AttentionMaps(weights_BSS[:, 0, :images], weights_BSS[:, images:, :images])

    def stream(self, text: Tokens, image: Tokens, depth: int) -> tuple[Tensor, Tensor | None]:
        """Return the states (B, S, D) after the first `depth` layers, and the mask of all
        layers.
        """
        text_BTD, image_BPD = self.mark(text, image)
        states_BSD = torch.cat([image_BPD, text_BTD], dim=1)
        mask_BSS = stream_mask(
            self.attention, text, image, self.seq2seq_share if self.training else 0.0
        )
        for layer in self.layers[:depth]:
            states_BSD = layer(states_BSD, mask_BSS)
        return states_BSD, mask_BSS


def stream_mask(
    attention: AttentionKind, text: Tokens, image: Tokens, seq2seq_share: float
) -> Tensor | None:
    """(B, S, S) for an image block followed by a text block; None if everything attends to
    everything.

    A mixed mask is sampled for each row (MedViLL's code), at every call, from torch's generator of
    the tokens' device; with a share of zero it is bidirectional.
    """
    if attention == "bidirectional" and text.mask_BN is None and image.mask_BN is None:
        return None
    text_mask_BT = text.real_BN()
    image_mask_BP = image.real_BN()
    seq2seq_B = None
    if attention == "mixed":
        seq2seq_B = torch.rand(len(text_mask_BT), device=text_mask_BT.device) < seq2seq_share
    return attention_mask(attention, image_mask_BP, text_mask_BT, seq2seq_B)
