"""A causal decoder of answers: it reads a question with its image once, and writes or scores any
number of answers.

Letters: B questions, R rows that are written (those of a question side by side), C tokens that are
read, T new tokens, W tokens written before, K = W + T, N positions, H heads, D width, V words; d is
D / H.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medvl.common.config_io import check_choice, check_labels, check_within
from medvl.encoders import TextEncoder
from medvl.errors import ConfigError
from medvl.models.base import LAYER_NORM_EPS, WordHead, init_weights
from medvl.models.downstream.fused_classifier import FusionTaskConfig
from medvl.models.fusion_encoders.bases.base import FusionModel
from medvl.models.fusion_encoders.parts.encoder import Tokens
from medvl.models.fusion_encoders.parts.transformer import (
    Attention,
    FeedForward,
    KeysValues,
    Sizes,
    padding_mask,
)

# Settings of VQA fine-tuning.

Head = Literal["classifier", "product", "ranking", "generation"]
"""Kind of answer head. "classifier": two layers over the vocabulary on the pooled vector (METER,
M3AE, ARL, PTUnifier). "product": MedViLL's, on the product of CLS and its first SEP. "ranking": the
vocabulary's likeliest answer by a trained decoder (ALBEF, M2I2, MUMC, BLIP). "generation": the text
that the decoder writes, in the vocabulary or not (MISS).
"""
HEADS: tuple[Head, ...] = ("classifier", "product", "ranking", "generation")
FirstWord = Literal["once", "twice"]
"""Number of times that an answer's first word counts in its log-likelihood."""
FIRST_WORD: tuple[FirstWord, ...] = ("once", "twice")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A causal Transformer that writes answers, as wide as the fusion-encoder; the sizes are
    ALBEF's.
    """

    layers: int = 6
    heads: int = 12
    intermediate: int = 3072
    dropout: float = 0.1
    """Dropout of hidden states and of attention."""
    max_tokens: int = 32
    """Maximum length of an answer, including its first and its last token; longer ones are cut."""
    shortlist: int = 128
    """For "ranking": number of answers, those with the likeliest first words, that are scored
    completely. Exact if the vocabulary has no more.
    """
    first_word: FirstWord = "once"
    """For "ranking". "once" is the likelihood, as in BLIP. "twice" is as published for ALBEF, M2I2
    and MUMC: the probability of the first word multiplies that of the whole answer, which contains
    it already.
    """
    beams: int = 3
    """For "generation": number of hypotheses; 1 is greedy."""
    alpha: float = 0.0
    """Weight of the soft targets of a moving average of the model (momentum distillation); 0: there
    is none. ALBEF, M2I2 and MUMC fine-tune with 0.4. Takes the memory of a second model, in a
    checkpoint too.
    """
    momentum: float = 0.995
    """Decay of that moving average, updated before every optimiser step."""
    ramp_steps: int = 0
    """Optimiser steps in which alpha grows from 0; as published, those of the first epoch."""

    def __post_init__(self) -> None:
        check_within(self, "(0, inf)", "layers", "heads", "intermediate", "shortlist", "beams")
        check_within(self, "[0, 1)", "dropout", "alpha", "momentum")
        check_within(self, "[0, inf)", "ramp_steps")
        check_within(self, "[3, inf)", "max_tokens")  # a word between two special tokens
        check_choice(self.first_word, FIRST_WORD, "first_word")


@dataclasses.dataclass(frozen=True, kw_only=True)
class VQAConfig(FusionTaskConfig):
    """An answer head on a fusion-encoder."""

    answers: tuple[str, ...]
    """Normalised vocabulary of answers to learn; heads other than "generation" give no other
    answers.
    """
    head: Head = "classifier"
    decoder: DecoderConfig = dataclasses.field(default_factory=DecoderConfig)
    """For the heads "ranking" and "generation"."""
    head_lr_mult: float | None = None
    """Learning rate of the head, as a multiple of the encoders'. None is the published one: 50 for
    "classifier" (M3AE), 1 for "product" (MedViLL) and for a decoder, which starts from the
    fusion-encoder (ALBEF).
    """
    max_tokens: int = 32
    """Maximum length of a question."""
    earlier_image: bool = False
    """Read the patient's earlier image as well, as further tokens with a learned vector of their
    time (`FusionModel.read_earlier_images`), for questions about a difference.
    """
    question_prior: bool = False
    """Add the head's logits to those of a regression from the words of the question
    (`QuestionPrior`), so that training starts from the answers of the question alone. For heads
    that classify.
    """
    frozen_encoders: bool = False
    """Keep the image encoder and the text encoder below a separate fusion-encoder as they are."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_labels(self.answers, "answers", fewest=2)
        check_choice(self.head, HEADS, "head")
        if self.question_prior and self.head not in ("classifier", "product"):
            message = (
                f"expected head classifier or product with question_prior, got {self.head}: it has "
                f"no logits of a vocabulary"
            )
            raise ConfigError(message, "conflict", field="question_prior")

    @property
    def effective_head_lr_mult(self) -> float:
        if self.head_lr_mult is not None:
            return self.head_lr_mult
        return 50.0 if self.head == "classifier" else 1.0


class Memory(NamedTuple):
    """Cached keys and values of a decoder, layer by layer."""

    read: tuple[KeysValues, ...]
    """Keys and values of the questions: B rows, for any number of answers."""
    read_mask_B1C: Tensor | None
    written: tuple[KeysValues, ...] | None
    """Keys and values of the answers so far: R rows. None: nothing is written."""

    def rows(self, index_R: Tensor) -> "Memory":
        """Select answers by index; each must stay with its question."""
        if self.written is None:
            return self
        keys_values = tuple((keys[index_R], values[index_R]) for keys, values in self.written)
        return self._replace(written=keys_values)


class DecoderLayer(nn.Module):
    """Attention to the answer so far and to the question, feed-forward: a `CoAttentionLayer`
    with a cache.
    """

    forward_methods = ("read",)
    """Methods that are called beside `forward`: sharded weights are gathered for them too."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention = Attention(sizes)
        self.cross_attention = Attention(sizes)
        self.feed_forward = FeedForward(sizes)

    def read(self, states_BCD: Tensor) -> KeysValues:
        """Return the keys and values of the tokens to read."""
        return self.cross_attention.keys_values(states_BCD)

    def forward(
        self,
        states_RTD: Tensor,
        written: KeysValues | None,
        mask_RTK: Tensor | None,
        read: KeysValues,
        read_mask_B1C: Tensor | None,
    ) -> tuple[Tensor, KeysValues]:
        """Return the states (R, T, D), and the keys and values of all tokens written so far."""
        new = self.attention.keys_values(states_RTD)
        if written is not None:
            new = torch.cat([written[0], new[0]], dim=2), torch.cat([written[1], new[1]], dim=2)
        attended_RTD = self.attention.attend(states_RTD, new, mask_RTK)
        rows, tokens, width = attended_RTD.shape
        questions = len(read[0])
        # Queries do not attend to each other here, so all rows of a question share its keys and
        # values.
        together_BQD = attended_RTD.reshape(questions, rows // max(questions, 1) * tokens, width)
        crossed_BQD = self.cross_attention.attend(together_BQD, read, read_mask_B1C)
        output_RTD: Tensor = self.feed_forward(crossed_BQD.view(rows, tokens, width))
        return output_RTD, new


class AnswerDecoder(nn.Module):
    """Causal BERT with cross-attention to the question in each layer (ALBEF, section 5).

    Args:
        config: sizes.
        width: D, also of the tokens that it reads.
        vocab_size: V.

    Raises ConfigError if the width is not a multiple of the heads.
    """

    def __init__(self, config: DecoderConfig, width: int, vocab_size: int) -> None:
        super().__init__()
        if width % config.heads:
            message = f"decoder.heads must divide the width {width}, got {config.heads}"
            raise ConfigError(message, "conflict", field="decoder.heads")
        self.sizes = Sizes.of(config, width)
        self.words = nn.Embedding(vocab_size, width)
        # nothing is written after the last token
        self.positions = nn.Embedding(config.max_tokens - 1, width)
        self.norm = nn.LayerNorm(width, eps=LAYER_NORM_EPS)
        self.layers = nn.ModuleList(DecoderLayer(self.sizes) for _ in range(config.layers))
        self.word_head = WordHead(width, vocab_size, tied=True)
        init_weights(self)

    def read(self, tokens: Tokens) -> Memory:
        """Cache the keys and values of questions with their images, (B, C, D)."""
        layers: Any = self.layers
        read = tuple(layer.read(tokens.states_BND) for layer in layers)
        return Memory(read, padding_mask(tokens.mask_BN), None)

    def forward(
        self, ids_RT: Tensor, place_RT: Tensor, memory: Memory, mask_RTK: Tensor | None = None
    ) -> tuple[Tensor, Memory]:
        """Append tokens to the answers.

        Args:
            ids_RT: the next tokens, equally many rows for each question.
            place_RT: their positions in the answer, from 0; (T,) if they are the same for all rows.
            memory: cached keys and values.
            mask_RTK: bool, the answer tokens that a new token attends to, the earlier ones and then
                the new ones; R = 1 for all rows alike. None: everything.

        Returns the states (R, T, D) and the memory including the new tokens.
        """
        embedded_RTD = self.norm(self.words(ids_RT) + self.positions(place_RT))
        states_RTD = F.dropout(embedded_RTD, self.sizes.dropout, self.training)
        before = memory.written or (None,) * len(self.layers)
        keys_values = []
        for layer, old, context in zip(self.layers, before, memory.read, strict=True):
            states_RTD, new = layer(states_RTD, old, mask_RTK, context, memory.read_mask_B1C)
            keys_values.append(new)
        return states_RTD, memory._replace(written=tuple(keys_values))

    def score_words(self, states_ND: Tensor) -> Tensor:
        """(N, V): scores of the word after each of these tokens."""
        scores_NV: Tensor = self.word_head(states_ND, self.words.weight)
        return scores_NV


class AnswerWriter:
    """A `NextToken` of an `AnswerDecoder`, for `medvl.models.text_decoding.search`."""

    def __init__(self, decoder: AnswerDecoder, memory: Memory, first_id: int) -> None:
        self._decoder = decoder
        self._memory = memory
        self._first_id = first_id
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
def init_decoder(decoder: AnswerDecoder, model: FusionModel) -> None:
    """Initialise a decoder from a fusion-encoder.

    Words, positions and their norm are copied from BERT or RoBERTa embeddings of the same width.
    The layers are copied where the system does so (`FusionModel.init_decoder`), and are random
    otherwise.

    Raises ConfigError as `FusionModel.init_decoder`.
    """
    _copy_embeddings(decoder, model.text_encoder)
    model.init_decoder(decoder)


def _copy_embeddings(decoder: AnswerDecoder, text_encoder: TextEncoder) -> None:
    embeddings: Any = getattr(text_encoder.backbone, "embeddings", None)
    words = getattr(embeddings, "word_embeddings", None)
    positions = getattr(embeddings, "position_embeddings", None)
    if words is None or positions is None or words.weight.shape != decoder.words.weight.shape:
        return
    # RoBERTa counts after its padding index
    first = 0 if positions.padding_idx is None else positions.padding_idx + 1
    types = getattr(embeddings, "token_type_embeddings", None)
    decoder.words.weight.copy_(words.weight)
    known_TD = positions.weight[first : first + decoder.positions.num_embeddings]
    decoder.positions.weight[: len(known_TD)] = (
        known_TD if types is None else known_TD + types.weight[0]
    )
    decoder.norm.load_state_dict(embeddings.LayerNorm.state_dict())
