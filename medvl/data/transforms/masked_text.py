"""Whole-word masking of texts for masked language modelling, for any vocabulary.

Words come from `Tokenizer.word_ids`, so whole words are masked with WordPiece, byte-level BPE and
SentencePiece. Code that looks for `##` silently masks single tokens of RoBERTa's vocabulary.

    masking = TextMasking(tokenizer)
    masked = masking(batch.ids_BT, batch.mask_BT, generator)
    # masked.ids_BT for the model, masked.labels_BT for the loss
"""

import dataclasses
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from medvl.data.tokenizer.tokenizer import IGNORED, Tokenizer, pad_rows, row_mask
from medvl.errors import ConfigError
from medvl.schema import Batch

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


# Training sequences for text encoders: windows and pairs of segments of a document, with draws
# for masking.
#
#     [CLS] segment A [SEP]                   pairs "none"
#     [CLS] segment A [SEP] segment B [SEP]   pairs "next" (BERT) and "order" (ALBERT)
#
# A sequence never has tokens of two documents, except for the wrong pairs of "next", whose
# segments attend to each other by design. `TextEncoder.pack` packs the sequences of a batch
# without padding, each with its own attention.

PairTask = Literal["none", "next", "order"]
"""Second objective beside masked words: none; whether segment B follows A, or is of another
document (NSP, Devlin et al.); or whether two consecutive segments are in order, or swapped (SOP,
Lan et al.).
"""
_SENTENCE = re.compile(r"(?:[.!?][)\]\"']*\s|\n)\s*(?=\S)")


@dataclasses.dataclass(kw_only=True, slots=True)
class TextBatch(Batch):
    """A batch of text alone, without pixels; `ids_BT` are not masked."""

    types_BT: Tensor
    """int64: 1 on segment B, 0 elsewhere."""
    order_BT: Tensor
    """float32: a token is masked at rates above this (`MaskingDraw`)."""
    masked_BT: Tensor
    """int64: the id in place of each token if it is masked."""
    pair_B: Tensor
    """int64: 0 where segment B follows A, 1 where it does not; -100 without a second segment."""


@dataclasses.dataclass(frozen=True, slots=True)
class TextSequence:
    """One row of a batch."""

    key: str
    document: str
    ids: list[int]
    types: list[int]
    pair: int
    uniform_3T: np.ndarray
    """Random numbers for masking."""


class TextSequences:
    """Maker of training sequences. All randomness comes from the generator of a sample.

    Args:
        tokenizer: tokenizer; for pairs with BERT's special tokens.
        masking: masks words of the sequences.
        pairs: task of the second objective.
        max_tokens: length of the sequences; default the tokenizer's.
        short_probability: share of sequences that are cut to a random length, 0.1 in BERT.

    Raises:
        ConfigError: the vocabulary has no special tokens for pairs, or cleans whole texts (CLIP).
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        masking: TextMasking,
        *,
        pairs: PairTask = "none",
        max_tokens: int | None = None,
        short_probability: float = 0.0,
    ) -> None:
        self.tokenizer = tokenizer
        self.masking = masking
        self.pairs = pairs
        self.max_tokens = min(max_tokens or tokenizer.max_tokens, tokenizer.max_tokens)
        self.short_probability = short_probability
        if pairs != "none" and not tokenizer.has_pairs:
            message = (
                f"{tokenizer.source} has no pairs of one [SEP] each; use a BERT or ALBERT "
                f"vocabulary, or pairs 'none'"
            )
            raise ConfigError(message, "unsupported", field="pairs")

    def __call__(
        self, key: str, document: str, text: str, other: Callable[[], str], rng: Any
    ) -> TextSequence:
        """Return a training sequence of a text; `other()` returns the text of another document."""
        ids, starts = self._encode(text)
        room = self.max_tokens - (2 if self.pairs == "none" else 3)
        if rng.random() < self.short_probability:
            room = int(rng.integers(2, room + 1))
        begin, end = _window(len(ids), starts, room, rng)
        if self.pairs == "none" or end - begin < 2:
            first = ids[begin:end]
            second = []
            pair = IGNORED
        else:
            middle = _middle(begin, end, starts, rng)
            first = ids[begin:middle]
            second = ids[middle:end]
            pair = int(rng.random() < 0.5)
            if pair and self.pairs == "order":
                first, second = second, first
            elif pair:
                other_ids, other_starts = self._encode(other())
                place = _window(len(other_ids), other_starts, room - len(first), rng)
                second = other_ids[slice(*place)]
        cls_id = self.tokenizer.cls_id
        sep_id = self.tokenizer.sep_id
        row = [cls_id, *first, sep_id, *([*second, sep_id] if second else [])]
        types = [0] * (len(first) + 2) + [1] * (len(row) - len(first) - 2)
        uniform_3T = rng.random((3, len(row)), dtype=np.float32)
        return TextSequence(key, document, row, types, pair if second else IGNORED, uniform_3T)

    def collate(self, rows: Sequence[TextSequence]) -> TextBatch:
        """Return the batch of some sequences, padded to the longest."""
        ids_BT = pad_rows([row.ids for row in rows], self.tokenizer.pad_id)
        mask_BT = row_mask([row.ids for row in rows])
        uniform_3BT = torch.zeros(3, *ids_BT.shape)
        for number, row in enumerate(rows):
            uniform_3BT[:, number, : len(row.ids)] = torch.from_numpy(row.uniform_3T)
        draw = self.masking.draw(ids_BT, mask_BT, uniform_3BT)
        return TextBatch(
            keys=[row.key for row in rows],
            image_BCHW=torch.zeros(len(rows), 1, 0, 0, dtype=torch.uint8),
            ids_BT=ids_BT,
            mask_BT=mask_BT,
            labels_BL=torch.zeros(len(rows), 0),
            texts=[""] * len(rows),
            studies=[row.document for row in rows],
            has_image_B=torch.zeros(len(rows), dtype=torch.bool),
            types_BT=pad_rows([row.types for row in rows], 0),
            order_BT=draw.order_BT,
            masked_BT=draw.masked_BT,
            pair_B=torch.tensor([row.pair for row in rows]),
        )

    def _encode(self, text: str) -> tuple[list[int], list[int]]:
        """Return the token ids of a whole text without special tokens, and where its sentences
        start.
        """
        ids, offsets = self.tokenizer.encode_whole(text)
        begins = [begin for begin, _ in offsets]
        starts = sorted({bisect_left(begins, match.end()) for match in _SENTENCE.finditer(text)})
        return ids, [start for start in starts if 0 < start < len(ids)]


def _window(length: int, starts: Sequence[int], room: int, rng: Any) -> tuple[int, int]:
    """Return (begin, end) of at most `room` tokens: all, or from a random sentence.

    Windows leave no room empty, and those of sentences longer than `room` follow one another, so
    that all tokens occur.
    """
    if length <= room:
        return 0, length
    candidates = [0]
    for start in [*(start for start in starts if start < length - room), length - room]:
        candidates += [*range(candidates[-1] + room, start, room), start]
    begin = candidates[int(rng.integers(len(candidates)))]
    return begin, begin + room


def _middle(begin: int, end: int, starts: Sequence[int], rng: Any) -> int:
    """Return where segment B begins: at a random sentence within the window, or anywhere if it
    has only one.
    """
    inner = [start for start in starts if begin < start < end]
    return inner[int(rng.integers(len(inner)))] if inner else int(rng.integers(begin + 1, end))


# Pairs of a fact and a name of its concept, for contrast of texts
# (`medvl.data.corpora.concepts`).

SEGMENTS = "\t"
"""Between the segments of a fact."""


@dataclasses.dataclass(frozen=True, slots=True)
class ConceptPair:
    """One row of a batch."""

    key: str
    concept: str
    fact: list[int]
    name: list[int]


class ConceptPairs:
    """Maker of pairs: [CLS] segment [SEP] segment [SEP] of a fact, and [CLS] name [SEP].

    Of several names one is drawn at random.

    Args:
        tokenizer: tokenizer with BERT's special tokens.
        max_tokens: length of both texts; a longer fact loses the end of its last segment.

    Raises ConfigError where the vocabulary has no special tokens for segments.
    """

    def __init__(self, tokenizer: Tokenizer, max_tokens: int) -> None:
        if not tokenizer.has_pairs:
            message = (
                f"{tokenizer.source} has no [SEP] between two segments: use a BERT or "
                f"ALBERT vocabulary"
            )
            raise ConfigError(message, "unsupported", field="tokenizer")
        self.tokenizer = tokenizer
        self.max_tokens = min(max_tokens, tokenizer.max_tokens)

    def __call__(
        self, key: str, document: str, text: str, other: Callable[[], str], rng: Any
    ) -> ConceptPair:
        """Return the pair of a sample. Raises ConfigError for a text that is not a fact of
        `medvl shards concepts`.
        """
        fact, *names = text.split("\n")
        if not names:
            message = (
                f"sample {key} is not a fact with names: make the shards with `medvl "
                f"shards concepts`"
            )
            raise ConfigError(message, "wrong_type", field="data.train")
        name = names[int(rng.integers(len(names)))]
        return ConceptPair(key, document, self._row(fact.split(SEGMENTS)), self._row([name]))

    def collate(self, rows: Sequence[ConceptPair]) -> Batch:
        """Return the batch of some pairs: facts are its texts, names its second texts, concepts
        its studies.
        """
        facts = [row.fact for row in rows]
        names = [row.name for row in rows]
        return Batch(
            keys=[row.key for row in rows],
            image_BCHW=torch.zeros(len(rows), 1, 0, 0, dtype=torch.uint8),
            ids_BT=pad_rows(facts, self.tokenizer.pad_id),
            mask_BT=row_mask(facts),
            labels_BL=torch.zeros(len(rows), 0),
            texts=[""] * len(rows),
            studies=[row.concept for row in rows],
            has_image_B=torch.zeros(len(rows), dtype=torch.bool),
            second_ids_BT=pad_rows(names, self.tokenizer.pad_id),
            second_mask_BT=row_mask(names),
        )

    def _row(self, segments: Sequence[str]) -> list[int]:
        ids = [self.tokenizer.cls_id]
        for segment in segments:
            ids += [*self.tokenizer.encode_whole(segment)[0], self.tokenizer.sep_id]
        return (
            ids
            if len(ids) <= self.max_tokens
            else [*ids[: self.max_tokens - 1], self.tokenizer.sep_id]
        )
