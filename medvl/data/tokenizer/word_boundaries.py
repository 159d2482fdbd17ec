"""Word boundaries in sequences of sub-word ids, for whole-word masking and word features.

Words are the units of the tokenizer's pre-tokenizer. WordPiece: letters and digits between spaces
and punctuation, and each punctuation mark. Byte-level BPE: runs of letters, of digits or of other
marks, and contractions (`'s`) that are one piece in the vocabulary. SentencePiece: text between
spaces. All information is in tables indexed by id, so ids can be on any device.
"""

from collections.abc import Sequence

import torch
from tokenizers import Tokenizer as Backend, models
from torch import Tensor

from medvl.data.tokenizer.files import byte_characters
from medvl.data.tokenizer.wordpiece_trainer import CONTINUED

_BYTE_SPACE = "Ġ"
_SENTENCE_SPACE = "▁"
_END = "</w>"
_LINE_BREAKS = "ĉĊċČč"
"""Tab, line feed and similar characters in byte-level BPE."""
_LETTER, _DIGIT, _OTHER, _BREAK, _JOINS = range(5)


class WordBoundaries:
    """Word boundary tables for a tokenizer's vocabulary; `special` ids (padding, first, last)
    are outside the text.
    """

    def __init__(self, backend: Backend, vocab_size: int, special: Sequence[int]) -> None:
        tokens = [backend.id_to_token(index) or "" for index in range(vocab_size)]
        model = backend.model
        self._special_V = torch.zeros(len(tokens), dtype=torch.bool)
        self._special_V[list(special)] = True
        self._ends_V: Tensor | None = None
        self._kinds_V2: Tensor | None = None
        if isinstance(model, models.WordPiece):
            begins = [not token.startswith(CONTINUED) for token in tokens]
        elif isinstance(model, models.BPE) and model.end_of_word_suffix == _END:
            begins = [False] * len(tokens)
            self._ends_V = torch.tensor([token.endswith(_END) for token in tokens])
        elif isinstance(model, models.BPE):
            begins = [token.startswith(_BYTE_SPACE) for token in tokens]
            texts = [token.removeprefix(_BYTE_SPACE) or _BYTE_SPACE for token in tokens]
            self._kinds_V2 = torch.tensor([(_kind(text[0]), _kind(text[-1])) for text in texts])
        elif isinstance(model, models.Unigram):
            begins = [token.startswith(_SENTENCE_SPACE) for token in tokens]
        else:
            begins = [True] * len(tokens)  # a vocabulary of words
        self._begins_V = torch.tensor(begins)
        self.joins_spaces = self._kinds_V2 is not None
        """Whether a space belongs to the word after it (byte-level BPE)."""

    def starts(self, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """Return (B, T) bool: True on the first sub-word of every word; False on special tokens
        and padding.
        """
        special_BT = _look_up(self._special_V, ids_BT)
        starts_BT = _look_up(self._begins_V, ids_BT)
        starts_BT[:, 1:] |= special_BT[:, :-1]
        if self._ends_V is not None:
            starts_BT[:, 1:] |= _look_up(self._ends_V, ids_BT)[:, :-1]
        if self._kinds_V2 is not None:
            kinds_BT2 = _look_up(self._kinds_V2, ids_BT)
            before_BT = kinds_BT2[:, :-1, 1]
            after_BT = kinds_BT2[:, 1:, 0]
            starts_BT[:, 1:] |= (before_BT != after_BT) & (before_BT != _JOINS)
        starts_BT[:, 0] = True
        return starts_BT & ~special_BT & mask_BT

    def words(self, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """Return (B, T) int64: the index of each token's word, from 0; -1 on special tokens and
        padding.
        """
        number_BT = self.starts(ids_BT, mask_BT).cumsum(dim=1) - 1
        return number_BT.masked_fill(_look_up(self._special_V, ids_BT) | ~mask_BT, -1)


def token_texts(backend: Backend, vocab_size: int, special: Sequence[int]) -> list[str]:
    """Return the text of each id, with spaces between words, "" for special ids.

    The texts of a sequence's ids, joined, have the words of the encoded text, lower-cased by an
    uncased vocabulary. Characters that byte-level BPE splits over tokens, all of them outside
    ASCII, become U+FFFD.
    """
    tokens = [
        "" if index in special else backend.id_to_token(index) or "" for index in range(vocab_size)
    ]
    model = backend.model
    if isinstance(model, models.WordPiece):
        return [
            token.removeprefix(CONTINUED) if token.startswith(CONTINUED) else f" {token}"
            for token in tokens
        ]
    if isinstance(model, models.BPE):
        byte_of = {character: byte for byte, character in byte_characters().items()}
        end = model.end_of_word_suffix or ""
        words = [token.removesuffix(end) for token in tokens]
        decoded = [
            bytes(byte_of[c] for c in word if c in byte_of).decode(errors="replace")
            for word in words
        ]
        return [
            text + " " * (text != "" and end != "" and token.endswith(end))
            for text, token in zip(decoded, tokens, strict=True)
        ]
    if isinstance(model, models.Unigram):
        return [token.replace(_SENTENCE_SPACE, " ") for token in tokens]
    return [f" {token}" for token in tokens]


def _look_up(table_V: Tensor, ids_BT: Tensor) -> Tensor:
    return table_V.to(ids_BT.device)[ids_BT]


def _kind(character: str) -> int:
    """Return the class of a character in byte-level BPE's splitting pattern; a space belongs to
    the following word.
    """
    if character == _BYTE_SPACE:
        return _JOINS
    if character in _LINE_BREAKS:
        return _BREAK
    if character.isdigit():
        return _DIGIT
    return _LETTER if character.isalpha() or not character.isascii() else _OTHER
