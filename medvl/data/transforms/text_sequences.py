"""Training sequences for text encoders: windows and pairs of segments of a document, with draws for
masking.

    [CLS] segment A [SEP]                   pairs "none"
    [CLS] segment A [SEP] segment B [SEP]   pairs "next" (BERT) and "order" (ALBERT)

A sequence never has tokens of two documents, except for the wrong pairs of "next", whose segments
attend to each other by design. `TextEncoder.pack` packs the sequences of a batch without padding,
each with its own attention.
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
from medvl.data.transforms.mlm_masking import TextMasking
from medvl.errors import ConfigError
from medvl.schema import Batch

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
