"""A causal decoder of answers: it reads a question with its image once, and writes or scores any number of answers.

Letters: B questions, R rows that are written (those of a question side by side), C tokens that are read, T new tokens,
W tokens written before, K = W + T, N places, H heads, D width, V words; d is D / H.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medvl.encoders import TextEncoder
from medvl.errors import ConfigError
from medvl.models.downstream.vqa.config import DecoderConfig
from medvl.models.fusion_encoders.albef import ALBEF
from medvl.models.fusion_encoders.base import FusionModel
from medvl.models.fusion_encoders.layers.attention_masks import padding_mask
from medvl.models.fusion_encoders.layers.encoder import Tokens
from medvl.models.fusion_encoders.layers.heads import WordHead
from medvl.models.fusion_encoders.layers.transformer import (
    LAYER_NORM_EPS,
    Attention,
    FeedForward,
    KeysValues,
    Sizes,
    init_weights,
)


class Memory(NamedTuple):
    """What a decoder keeps, layer by layer, so that nothing is computed twice."""

    read: tuple[KeysValues, ...]
    """Of what is answered: B rows, whatever the number of answers."""
    read_mask_B1C: Tensor | None
    written: tuple[KeysValues, ...] | None
    """Of the answers so far: R rows. None: nothing is written."""

    def rows(self, index_R: Tensor) -> "Memory":
        """The answers of an index, in its order; each stays with its question."""
        if self.written is None:
            return self
        chosen = tuple((keys[index_R], values[index_R]) for keys, values in self.written)
        return self._replace(written=chosen)


class DecoderLayer(nn.Module):
    """Attention to the answer so far, to what is answered, feed-forward: a `CoAttentionLayer` that keeps and writes."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention, self.cross_attention = Attention(sizes), Attention(sizes)
        self.feed_forward = FeedForward(sizes)

    def forward(
        self,
        states_RTD: Tensor,
        written: KeysValues | None,
        mask_RTK: Tensor | None,
        read: KeysValues,
        read_mask_B1C: Tensor | None,
    ) -> tuple[Tensor, KeysValues]:
        """(states (R, T, D), keys and values of all that is written now)."""
        new = self.attention.keys_values(states_RTD)
        if written is not None:
            new = torch.cat([written[0], new[0]], dim=2), torch.cat([written[1], new[1]], dim=2)
        attended_RTD = self.attention.attend(states_RTD, new, mask_RTK)
        rows, tokens, width = attended_RTD.shape
        questions = len(read[0])
        # queries do not see each other here: all rows of a question attend to its one set of keys and values
        together_BQD = attended_RTD.reshape(questions, rows // max(questions, 1) * tokens, width)
        crossed_BQD = self.cross_attention.attend(together_BQD, read, read_mask_B1C)
        fed_RTD: Tensor = self.feed_forward(crossed_BQD.view(rows, tokens, width))
        return fed_RTD, new


class AnswerDecoder(nn.Module):
    """BERT with attention to what is answered in each layer, each word seeing those before it (ALBEF, section 5).

    Args:
        config: its sizes.
        width: D, also of the tokens that it reads.
        vocab_size: V.

    Raises ConfigError when the heads do not divide the width.
    """

    def __init__(self, config: DecoderConfig, width: int, vocab_size: int) -> None:
        super().__init__()
        if width % config.heads:
            raise ConfigError(f"the fusion-encoder is {width} wide: no multiple of decoder.heads {config.heads}")
        self.sizes = Sizes(
            width=width,
            layers=config.layers,
            heads=config.heads,
            intermediate=config.intermediate,
            dropout=config.dropout,
        )
        self.words = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(config.max_tokens - 1, width)  # behind the last token nothing is written
        self.norm = nn.LayerNorm(width, eps=LAYER_NORM_EPS)
        self.layers = nn.ModuleList(DecoderLayer(self.sizes) for _ in range(config.layers))
        self.word_head = WordHead(width, vocab_size, tied=True)
        init_weights(self)

    def read(self, tokens: Tokens) -> Memory:
        """Questions with their images, (B, C, D), ready to be answered."""
        layers: Any = self.layers
        read = tuple(layer.cross_attention.keys_values(tokens.states_BND) for layer in layers)
        return Memory(read, padding_mask(tokens.mask_BN), None)

    def forward(
        self, ids_RT: Tensor, place_RT: Tensor, memory: Memory, mask_RTK: Tensor | None = None
    ) -> tuple[Tensor, Memory]:
        """Go on writing.

        Args:
            ids_RT: the next tokens, as many rows for each question.
            place_RT: their positions in the answer, from 0; (T,) where they are the same for all rows.
            memory: what is read, and what is written before.
            mask_RTK: bool, what of the answer a new token sees, the tokens written before and then the new ones; with R
                of 1 for all rows alike. None: everything.

        Returns (states (R, T, D), the memory with the new tokens).
        """
        embedded_RTD = self.norm(self.words(ids_RT) + self.positions(place_RT))
        states_RTD = F.dropout(embedded_RTD, self.sizes.dropout, self.training)
        before = memory.written or (None,) * len(self.layers)
        written = []
        for layer, old, read in zip(self.layers, before, memory.read, strict=True):
            states_RTD, new = layer(states_RTD, old, mask_RTK, read, memory.read_mask_B1C)
            written.append(new)
        return states_RTD, memory._replace(written=tuple(written))

    def score_words(self, states_ND: Tensor) -> Tensor:
        """(N, V): scores of the word behind each of these tokens."""
        scores_NV: Tensor = self.word_head(states_ND, self.words.weight)
        return scores_NV


class AnswerWriter:
    """An `AnswerDecoder` in the middle of writing: a `NextToken` for `medvl.models.text_decoding.search`."""

    def __init__(self, decoder: AnswerDecoder, memory: Memory, first_id: int) -> None:
        self._decoder, self._memory, self._first_id = decoder, memory, first_id
        self._place = 0

    def first(self) -> Tensor:
        """See `NextToken`."""
        keys_BHCd = self._memory.read[0][0]
        return self._step(torch.full((len(keys_BHCd), 1), self._first_id, device=keys_BHCd.device))

    def next(self, ids_R: Tensor, parent_R: Tensor) -> Tensor:
        """See `NextToken`."""
        self._memory = self._memory.rows(parent_R)
        return self._step(ids_R[:, None])

    def _step(self, ids_R1: Tensor) -> Tensor:
        place_1 = torch.tensor([self._place], device=ids_R1.device)
        states_R1D, self._memory = self._decoder(ids_R1, place_1, self._memory)
        self._place += 1
        return self._decoder.score_words(states_R1D[:, 0])


@torch.no_grad()
def start_from(decoder: AnswerDecoder, model: FusionModel) -> None:
    """Give a fresh decoder what its fusion model knows already.

    Words, positions and their norm are those of a BERT's or a RoBERTa's embeddings, where those are as wide. On ALBEF
    the layers and the head over words are those of its fusion-encoder, as published (section 5); so is the attention to
    what is answered, where ALBEF's images are as wide as its words. On other systems, for which no decoder was
    published, the layers start at random.

    Raises ConfigError when the decoder has more layers than ALBEF's fusion-encoder, or layers of other sizes.
    """
    _start_embeddings(decoder, model.text_encoder)
    if not isinstance(model, ALBEF):
        return
    ours, theirs = decoder.sizes, model.config
    if ours.layers > theirs.layers or (ours.heads, ours.intermediate) != (theirs.heads, theirs.intermediate):
        raise ConfigError(
            f"albef's answer decoder starts from its fusion-encoder, of {theirs.layers} layers, {theirs.heads} heads "
            f"and intermediate {theirs.intermediate}: it cannot have {ours.layers}, {ours.heads} and "
            f"{ours.intermediate}"
        )
    layers: Any = decoder.layers
    fusion: Any = model.fusion
    for layer, fused in zip(layers, fusion[-ours.layers :], strict=True):
        layer.attention.load_state_dict(fused.attention.state_dict())
        layer.feed_forward.load_state_dict(fused.feed_forward.state_dict())
        if model.image_encoder.patch_dim == ours.width:
            layer.cross_attention.load_state_dict(fused.cross_attention.state_dict())
    decoder.word_head.load_state_dict(model.mlm_head.state_dict())


def _start_embeddings(decoder: AnswerDecoder, text_encoder: TextEncoder) -> None:
    embeddings: Any = getattr(text_encoder.backbone, "embeddings", None)
    words = getattr(embeddings, "word_embeddings", None)
    positions = getattr(embeddings, "position_embeddings", None)
    if words is None or positions is None or words.weight.shape != decoder.words.weight.shape:
        return
    first = 0 if positions.padding_idx is None else positions.padding_idx + 1  # RoBERTa counts from behind its padding
    types = getattr(embeddings, "token_type_embeddings", None)
    decoder.words.weight.copy_(words.weight)
    known_TD = positions.weight[first : first + decoder.positions.num_embeddings]
    decoder.positions.weight[: len(known_TD)] = known_TD if types is None else known_TD + types.weight[0]
    decoder.norm.load_state_dict(embeddings.LayerNorm.state_dict())
