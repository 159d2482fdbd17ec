"""Encoded pairs of texts, and encoded words that a corpus has tokenized already."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Truncation = Literal["longest_first", "only_first", "only_second"]
"""Which text of a pair is shortened at its end: token by token whichever is longer at that moment, as in BERT; the
first; or the second, as in question answering with a context. Names as in transformers."""
IGNORED = -100
"""Label of tokens without one, which torch's cross-entropy ignores."""


@dataclasses.dataclass(frozen=True, slots=True)
class EncodedPairs:
    """Pairs of texts as single sequences, such as `[CLS] first [SEP] second [SEP]`."""

    ids_BT: Tensor
    """int64 token ids, padded on the right."""
    mask_BT: Tensor
    """bool, True on real tokens."""
    types_BT: Tensor
    """int64: 0 for the first text with its special tokens, 1 for the second; all 0 for RoBERTa; 0 on padding."""


@dataclasses.dataclass(frozen=True, slots=True)
class EncodedWords:
    """Sequences of given words, each encoded apart."""

    ids_BT: Tensor
    """int64 token ids, padded on the right."""
    mask_BT: Tensor
    """bool, True on real tokens."""
    word_BT: Tensor
    """int64: index of the given word that a token is a piece of; -1 on special tokens and padding. Words that were
    truncated, or have no piece (control characters), are missing."""

    @property
    def first_BT(self) -> Tensor:
        """Return (B, T) bool: True on the first piece of each word."""
        before_BT = torch.nn.functional.pad(self.word_BT[:, :-1], (1, 0), value=-1)
        return (self.word_BT >= 0) & (self.word_BT != before_BT)

    def labels(self, labels: Sequence[Sequence[int]]) -> Tensor:
        """Return (B, T) int64: the label of each given word at its first piece, -100 elsewhere.

        Raises ValueError when a sequence has fewer labels than encoded words.
        """
        labels_BT = torch.full_like(self.word_BT, IGNORED)
        for row, of_row in enumerate(labels):
            place_N = self.first_BT[row].nonzero()[:, 0]
            word_N = self.word_BT[row, place_N]
            if len(word_N) and int(word_N.max()) >= len(of_row):
                raise ValueError(f"expected a label for each word of sequence {row}, got {len(of_row)}")
            labels_BT[row, place_N] = torch.tensor(of_row, dtype=torch.int64)[word_N]
        return labels_BT


def pad_rows(rows: Sequence[Sequence[int]], value: int) -> Tensor:
    """Return (B, T) int64, padded on the right to the longest row."""
    width = max(map(len, rows), default=0)
    return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows], dtype=torch.int64).view(
        len(rows), width
    )


def row_mask(rows: Sequence[Sequence[int]]) -> Tensor:
    """Return (B, T) bool: True where `pad_rows` has no padding."""
    length_B = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    return torch.arange(max(map(len, rows), default=0)) < length_B[:, None]
