"""Masked words of a batch and the head that predicts them, for systems that keep masked language modelling.

    words = sample_masked_words(batch, text_masking(model, rate=0.15, whole_words=True))
    logits_NV = head(states_BTD.flatten(0, 1)[words.position_N], table_VD)
    loss = losses.mlm(logits_NV, words.target_N)

Words are sampled before any arithmetic, from torch's CPU generator, which the training step seeds: a batch is masked
alike on every device.

B batch, T text tokens, N masked positions, V vocabulary, D width.
"""

import dataclasses
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medvl.common.cpu_rows import filling_rows
from medvl.data.transforms.mlm_masking import TextMasking
from medvl.losses.masked.mlm import masked_positions
from medvl.models.base import System
from medvl.models.bert_init import LAYER_NORM_EPS, init_weights
from medvl.schema import Batch


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MaskedWords:
    """The texts of a batch with some words masked."""

    ids_BT: Tensor
    labels_BT: Tensor
    """int64: the original id at masked positions, -100 elsewhere."""
    position_N: Tensor
    """int64: the masked positions in the flattened (B * T) batch."""

    @property
    def target_N(self) -> Tensor:
        """The original ids at the masked positions."""
        return self.labels_BT.flatten()[self.position_N]


def sample_masked_words(batch: Batch, masking: TextMasking, span_BT: Tensor | None = None) -> MaskedWords:
    """Mask words of every text, all of a span or none (`TextMasking`); samples without a text have none."""
    mask_BT = batch.mask_BT if batch.has_text_B is None else batch.mask_BT & batch.has_text_B[:, None]
    masked = masking(batch.ids_BT, mask_BT, torch.default_generator, span_BT)
    position_N = masked_positions(masked.labels_BT)
    return MaskedWords(ids_BT=masked.ids_BT, labels_BT=masked.labels_BT, position_N=position_N)


def text_masking(
    model: System, *, rate: float, whole_words: bool, mask_end: bool = False, longest_span: int = 1
) -> TextMasking:
    """Return the masking of a model's texts.

    Raises ConfigError when the model has no tokenizer, or a vocabulary without a mask token.
    """
    tokenizer = model.require_tokenizer("masking words")
    return TextMasking(tokenizer, rate=rate, whole_words=whole_words, mask_end=mask_end, longest_span=longest_span)


class WordHead(nn.Module):
    """BERT's head over the vocabulary: dense, GELU, LayerNorm, a linear layer with a bias for every word.

    Args:
        width: D of the states.
        vocab_size: V.
        tied: use the text encoder's table of word embeddings, passed to `forward`, as the linear layer's matrix.
        table_width: width of that table, where it is another one (ALBERT).
        approximate: "tanh" for the approximation of GELU in ALBERT.
        eps: epsilon of the LayerNorm.
    """

    def __init__(
        self,
        width: int,
        vocab_size: int,
        *,
        tied: bool = False,
        table_width: int | None = None,
        approximate: Literal["none", "tanh"] = "none",
        eps: float = LAYER_NORM_EPS,
    ) -> None:
        super().__init__()
        inner, self.approximate = table_width or width, approximate
        self.dense, self.norm = nn.Linear(width, inner), nn.LayerNorm(inner, eps=eps)
        self.words = None if tied else nn.Linear(inner, vocab_size, bias=False)
        self.bias = nn.Parameter(torch.zeros(vocab_size))
        init_weights(self)

    def forward(self, states_ND: Tensor, table_VD: Tensor | None = None) -> Tensor:
        """(N, V): scores of every word. Pass the states of masked positions only: the head is expensive."""
        count = len(states_ND)
        states_RD = F.pad(states_ND, (0, 0, 0, filling_rows(count, states_ND.device)))
        hidden_RD = self.norm(F.gelu(self.dense(states_RD), approximate=self.approximate))
        if self.words is None:
            assert table_VD is not None, "a tied head needs the table of word embeddings"
            return F.linear(hidden_RD, table_VD, self.bias)[:count]
        scores_RV: Tensor = self.words(hidden_RD) + self.bias
        return scores_RV[:count]
