"""Whole-word masking of texts for masked language modelling, for any vocabulary.

Words come from `Tokenizer.word_ids`, so whole words are masked with WordPiece, byte-level BPE and
SentencePiece. Code that looks for `##` silently masks single tokens of RoBERTa's vocabulary.

    masking = TextMasking(tokenizer) masked = masking(batch.ids_BT, batch.mask_BT, generator)  #
    masked.ids_BT in, masked.labels_BT for the loss
"""

import dataclasses

import torch
from torch import Tensor

from medvl.data.tokenizer.tokenizer import IGNORED, Tokenizer
from medvl.errors import ConfigError

_MASK_SHARE = 0.8
_RANDOM_SHARE = 0.1


@dataclasses.dataclass(frozen=True, slots=True)
class MaskedText:
    """A batch of masked texts."""

    ids_BT: Tensor
    labels_BT: Tensor
    """int64: the original id at masked tokens, -100 elsewhere."""


@dataclasses.dataclass(frozen=True, slots=True)
class MaskingDraw:
    """Random numbers that mask a batch of texts at any rate; a higher rate masks the same tokens
    and more.
    """

    order_BT: Tensor
    """float32: a token is selected at rates above this; infinity where it never is."""
    masked_BT: Tensor
    """int64: the id in place of each token if it is selected."""

    def at(self, rate: float, ids_BT: Tensor) -> MaskedText:
        """Return the texts masked at a rate."""
        selected_BT = self.order_BT < rate
        return MaskedText(
            torch.where(selected_BT, self.masked_BT, ids_BT),
            ids_BT.masked_fill(~selected_BT, IGNORED),
        )


class TextMasking:
    """BERT's masking (Devlin et al., arXiv 1810.04805, section 3.1) of words or tokens.

    Each word is selected independently with probability `rate`, so `rate` is also the expected
    share of tokens; in a text without a selected word, one is selected. Each token of a selected
    word is replaced independently by the mask token (80 %) or a random token (10 %), or kept (10
    %). Special tokens, unknown tokens and padding are never selected. Random tokens are drawn from
    the vocabulary without special tokens; BERT draws from all of it.

    Args:
        tokenizer: tokenizer of the texts.
        rate: probability of a word, within (0, 1).
        whole_words: False selects each token independently.
        mask_end: also select the last token of a text, so that a generative model learns where to
            stop.
        longest_span: above 1, select spans of up to this many words, n of them with P(n)
            proportional to 1 / n, in random order until the rate is reached (ALBERT, Lan et al.,
            arXiv 1909.11942, section 4.1: 3). ALBERT draws the places of spans one by one; here
            they divide the text.

    Attributes:
        mask_id: id of the mask token.

    Raises:
        ConfigError: the vocabulary has no mask token, or the rate is out of range.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        rate: float = 0.15,
        whole_words: bool = True,
        mask_end: bool = False,
        longest_span: int = 1,
    ) -> None:
        if not 0 < rate < 1:
            raise ConfigError(
                f"the masking rate must be between 0 and 1, got {rate}",
                "out_of_range",
                field="rate",
            )
        if tokenizer.mask_id is None:
            message = f"{tokenizer.source} has no mask token: use a WordPiece or RoBERTa vocabulary"
            raise ConfigError(message, "unsupported")
        self.rate = rate
        self.whole_words = whole_words
        self.mask_end = mask_end
        self.longest_span = longest_span
        self._tokenizer = tokenizer
        self.mask_id = tokenizer.mask_id
        roles = (
            tokenizer.pad_id,
            tokenizer.cls_id,
            tokenizer.sep_id,
            tokenizer.unk_id,
            tokenizer.mask_id,
        )
        special = {number for number in roles if number is not None}
        ordinary = sorted(set(tokenizer.vocabulary.values()) - special)
        if not ordinary:
            raise ConfigError(
                f"the vocabulary of {tokenizer.source} has only special tokens", "empty"
            )
        self._ordinary_O = torch.tensor(ordinary)
        self._special_S = torch.tensor(sorted(special))

    def __call__(
        self,
        ids_BT: Tensor,
        mask_BT: Tensor,
        generator: torch.Generator,
        span_BT: Tensor | None = None,
    ) -> MaskedText:
        """Mask a batch.

        Args:
            ids_BT: int64 token ids.
            mask_BT: bool, True on real tokens.
            generator: generator on the CPU or the ids' device. A CPU generator gives the same masks
                on every device. The masks depend on the shape of the batch; to avoid that, mask
                texts one by one with a generator each.
            span_BT: int64: tokens of a text with one number are selected together, such as the
                mention of an entity; -1 on all others.
        """
        if ids_BT.numel() == 0:
            return MaskedText(ids_BT, ids_BT)
        uniform_3BT = torch.stack(
            [
                torch.rand(ids_BT.shape, generator=generator, device=generator.device)
                for _ in range(3)
            ]
        )
        return self.draw(ids_BT, mask_BT, uniform_3BT.to(ids_BT.device), span_BT).at(
            self.rate, ids_BT
        )

    def draw(
        self, ids_BT: Tensor, mask_BT: Tensor, uniform_3BT: Tensor, span_BT: Tensor | None = None
    ) -> "MaskingDraw":
        """Return the draws that mask the texts at any rate, from random numbers in [0, 1)."""
        first_BT, action_BT, choice_BT = uniform_3BT
        other_O = self._ordinary_O.to(ids_BT.device)
        other_BT = other_O[(choice_BT * len(other_O)).long().clamp(max=len(other_O) - 1)]
        masked_BT = torch.where(action_BT < _MASK_SHARE + _RANDOM_SHARE, other_BT, ids_BT)
        masked_BT = masked_BT.masked_fill(action_BT < _MASK_SHARE, self.mask_id)
        unit_BT = self._units(ids_BT, mask_BT, span_BT)
        if self.longest_span > 1:
            return MaskingDraw(_order_spans(unit_BT, first_BT, self.longest_span), masked_BT)
        return MaskingDraw(_order(unit_BT, first_BT), masked_BT)

    def _units(self, ids_BT: Tensor, mask_BT: Tensor, span_BT: Tensor | None) -> Tensor:
        """Return (B, T) int64: the index of the word or token that is selected as a unit; -1
        where never selected.
        """
        position_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device).expand_as(ids_BT)
        unit_BT = self._tokenizer.word_ids(ids_BT, mask_BT) if self.whole_words else position_BT
        excluded_BT = torch.isin(ids_BT, self._special_S.to(ids_BT.device)) | ~mask_BT
        unit_BT = unit_BT.masked_fill(excluded_BT, -1)
        if span_BT is not None:
            unit_BT = _join_spans(unit_BT, span_BT)
        if not self.mask_end:
            return unit_BT
        end_BT = (ids_BT == self._tokenizer.sep_id) & (
            position_BT == mask_BT.sum(dim=1, keepdim=True) - 1
        )
        return torch.where(
            end_BT, position_BT, unit_BT
        )  # no word has this index, as there are fewer words than tokens


def _order(unit_BT: Tensor, draw_BT: Tensor) -> Tensor:
    """Return the rate above which each token is selected: its unit's draw, 0 for the lowest draw
    of a text.
    """
    draw_BT = draw_BT.gather(1, unit_BT.clamp(min=0)).masked_fill(unit_BT < 0, torch.inf)
    is_lowest_BT = (draw_BT == draw_BT.amin(dim=1, keepdim=True)) & (unit_BT >= 0)
    return draw_BT.masked_fill(is_lowest_BT, 0.0)


def _order_spans(unit_BT: Tensor, draw_BT: Tensor, longest: int) -> Tensor:
    """Return the rate above which each token is selected: the share of tokens in spans that come
    before its own.

    The units of a text are divided into consecutive spans of n units with P(n) proportional to 1 /
    n, which come in random order.
    """
    order_BT = torch.full(unit_BT.shape, torch.inf)
    odds_n = 1 / torch.arange(1, longest + 1)
    ends_n = (odds_n / odds_n.sum()).cumsum(0)
    for row, (unit_T, draw_T) in enumerate(zip(unit_BT.cpu(), draw_BT.cpu(), strict=True)):
        place_K = (unit_T >= 0).nonzero()[:, 0]
        if not len(place_K):
            continue
        unit_K = unit_T[place_K].unique(return_inverse=True)[1]
        length_W = 1 + torch.searchsorted(
            ends_n, draw_T[: int(unit_K.max()) + 1], right=True
        ).clamp(max=longest - 1)
        start_W = torch.cat([torch.zeros(1, dtype=torch.int64), length_W.cumsum(0)[:-1]])
        span_K = torch.searchsorted(start_W, unit_K, right=True) - 1
        tokens_S = torch.bincount(span_K)
        rank_S = (draw_T[: len(tokens_S)] * 4096 % 1).argsort()  # the lower half of the random bits
        before_S = torch.empty(len(tokens_S))
        before_S[rank_S] = (tokens_S[rank_S].cumsum(0) - tokens_S[rank_S]) / len(place_K)
        order_BT[row, place_K] = before_S[span_K]
    return order_BT.to(unit_BT.device)


def _join_spans(unit_BT: Tensor, span_BT: Tensor) -> Tensor:
    """Return the units with those of one span replaced by its first one."""
    inside_BT = (span_BT >= 0) & (unit_BT >= 0)
    place_BT = torch.where(inside_BT, span_BT, span_BT.shape[1])  # a column beyond all spans
    first_BS = torch.full_like(unit_BT, unit_BT.shape[1])
    first_BS = torch.cat([first_BS, first_BS[:, :1]], dim=1).scatter_reduce(
        1, place_BT, unit_BT, "amin"
    )
    return torch.where(inside_BT, first_BS.gather(1, place_BT), unit_BT)
