"""Mentions of entities in texts, found by a dictionary of names.

    finder = EntityFinder.of([("pleural effusion", 0), ("effusion", 1), ("lung", 2)])
    finder.find("No pleural effusion.")          # [Mention(start=3, end=19, entity=0)]

- If names overlap, the first one in the text is used, and the longest of those that start at the
  same word.
- Names match whole words only. A word is a run of letters and digits; every other character but
  white space is a word of its own, so that "x-ray" matches "x - ray", which is how WordPiece spells
  it.
- Case and accents are ignored, because uncased vocabularies lose them. Names that a text without
  case cannot tell from an English function word ("ALL", "AS", "IT") are therefore left out, and so
  are names of a single character, without a letter, or of more than `MAX_WORDS` words.
- Negated mentions count like others, as in ARL: "no effusion" mentions an effusion.
  `medvl.data.mention_values` has the value of each.

A finder keeps 16 bytes for each name, a hash of its words and its entity, and no strings; the time
to search a text is linear in its length. Two different names have one hash with a probability of
5e-20.
"""

import functools
import hashlib
import itertools
import re
import unicodedata
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from medvl.data.tokenizer.tokenizer import Tokenizer
from medvl.schema import FindsEntities

MAX_WORDS = 10
"""Maximum number of words of a name, punctuation included."""
_WORD = re.compile(r"[^\W_]+|[^\w\s]|_")
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_FUNCTION_WORDS = """
a about after all also am an and any are as at be been both but by can could did do does each few
for from had has have he her here him his how i if in into is it its may me might more most my no
nor not now of on one or our out over own per same she so some such than that the their them then
there these they this those to too two under up us very was we were what when where which while who
will with would you
"""


class Mention(NamedTuple):
    """An entity in a text."""

    start: int
    end: int
    """Characters of the text, the end excluded."""
    entity: int


class EntityFinder:
    """Dictionary from names to entities. It can be pickled.

    Args:
        hash_N: uint64, sorted: the hash of each name.
        entity_N: int64: the entity of each name.
        longest: number of words of the longest name.
    """

    def __init__(self, hash_N: np.ndarray, entity_N: np.ndarray, longest: int) -> None:
        self.hash_N = hash_N
        self.entity_N = entity_N
        self.longest = longest

    @classmethod
    def of(cls, names: Iterable[tuple[str, int]]) -> Self:
        """Return the finder of (name, entity) pairs, read once. Of equal names the first one is
        kept.
        """
        hashes = array("Q")
        entities = array("q")
        longest = 0
        for name, entity in names:
            words = name_words(name)
            if words:
                hashes.append(int(_windows(words, len(words))[-1][0]))
                entities.append(entity)
                longest = max(longest, len(words))
        hash_N, first_N = np.unique(np.frombuffer(hashes, np.uint64), return_index=True)
        return cls(hash_N, np.frombuffer(entities, np.int64)[first_N], longest)

    def __len__(self) -> int:
        return len(self.hash_N)

    def find(self, text: str) -> list[Mention]:
        """Return the mentions in a text, which do not overlap, in their order."""
        spans = [match.span() for match in _WORD.finditer(text)]
        if not spans or not len(self):
            return []
        length_W, entity_W = self._longest_names([text[start:end] for start, end in spans])
        mentions = []
        free = 0
        for word in np.flatnonzero(length_W).tolist():
            if word >= free:
                free = word + int(length_W[word])
                mentions.append(Mention(spans[word][0], spans[free - 1][1], int(entity_W[word])))
        return mentions

    def _longest_names(self, words: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return for each word the length in words of the longest name that starts there, or 0,
        and its entity.
        """
        length_W = np.zeros(len(words), np.int64)
        entity_W = np.zeros(len(words), np.int64)
        windows = _windows(words, self.longest)
        place_Q = np.searchsorted(self.hash_N, np.concatenate(windows)).clip(max=len(self) - 1)
        known_Q = self.hash_N[place_Q] == np.concatenate(windows)
        end = 0
        for count, window in enumerate(windows, start=1):  # longer names replace shorter ones
            indices = np.flatnonzero(known_Q[end : end + len(window)])
            length_W[indices], entity_W[indices] = count, self.entity_N[place_Q[end + indices]]
            end += len(window)
        return length_W, entity_W


def name_words(name: str) -> list[str]:
    """Return the words of a name; none if the name is left out of dictionaries."""
    words = _WORD.findall(name)
    if (
        len(words) > MAX_WORDS
        or len(name.strip()) < 2
        or not any(character.isalpha() for character in name)
    ):
        return []
    return [] if len(words) == 1 and name.strip().lower() in _FUNCTION_WORDS.split() else words


def _windows(words: Sequence[str], longest: int) -> list[np.ndarray]:
    """Return the hashes of all runs of 1, 2, ... `longest` words."""
    hash_W = np.array([_word_hash(word) for word in words], np.uint64)
    windows = [hash_W]
    for count in range(1, min(longest, len(words))):
        windows.append(windows[-1][:-1] * _MULTIPLIER + hash_W[count:])
    return windows


@functools.lru_cache(maxsize=1 << 16)
def _word_hash(word: str) -> int:
    plain = "".join(
        c for c in unicodedata.normalize("NFD", word.lower()) if unicodedata.category(c) != "Mn"
    )
    return int.from_bytes(hashlib.blake2b(plain.encode(errors="replace"), digest_size=8).digest())


# Entities of tokenized texts, and the tokens that mention them. B texts, T tokens, N entities of
# a text.


MAX_ENTITIES = 24
"""Entities of a text that a model reads at most, as in ARL's released code."""


class LinkedEntities(NamedTuple):
    """Entities of a batch of texts."""

    entity_BN: Tensor
    """int64: entities in the order of the text, once for each mention; -1 is padding. N is at
    least 1.
    """
    mention_BT: Tensor
    """int64: the column of `entity_BN` that a token is part of, -1 for none."""


class EntityLinker:
    """Finder of entities in token ids, for any vocabulary.

    Texts are spelled from their tokens, so that truncation and every cleaning of the tokenizer are
    respected, and a model finds the same entities in ids as a loader. A mention has all tokens that
    share a character with it; words with an unknown token are not found.

    Args:
        finder: dictionary of the entities.
        tokenizer: the texts' tokenizer.
        most: maximum number of entities of a text; later ones are left out.
    """

    def __init__(
        self, finder: FindsEntities, tokenizer: Tokenizer, most: int = MAX_ENTITIES
    ) -> None:
        self.finder = finder
        self.tokenizer = tokenizer
        self.most = most

    def __call__(self, ids_BT: Tensor, mask_BT: Tensor) -> LinkedEntities:
        """Return the entities of a batch, on the CPU."""
        lengths = mask_BT.sum(dim=1).tolist()
        spelling = self.tokenizer.token_texts
        rows = [
            self._link([spelling[number] for number in ids[:length]])
            for ids, length in zip(ids_BT.tolist(), lengths, strict=True)
        ]
        mention_BT = np.full(tuple(ids_BT.shape), -1, np.int64)
        for row, (_, mention_T) in enumerate(rows):
            mention_BT[row, : len(mention_T)] = mention_T
        return LinkedEntities(
            pad_entities([entities for entities, _ in rows]), torch.from_numpy(mention_BT)
        )

    def _link(self, pieces: Sequence[str]) -> tuple[list[int], np.ndarray]:
        """Return the entities of one text and the mention of each of its tokens."""
        text = "".join(pieces)
        mentions = self.finder.find(text)[: self.most]
        if not mentions:
            return [], np.full(len(pieces), -1, np.int64)
        ends = list(itertools.accumulate(map(len, pieces)))
        end_T = np.array(
            [
                end - len(piece) + len(piece.rstrip())
                for end, piece in zip(ends, pieces, strict=True)
            ]
        )
        start_T = np.array(
            [end - len(piece.lstrip()) for end, piece in zip(ends, pieces, strict=True)]
        )
        start_M, end_M, _ = np.array(mentions).T
        # the first that ends behind the token's start
        mention_T = np.searchsorted(end_M, start_T, side="right")
        inside_T = (mention_T < len(mentions)) & (
            start_M[mention_T.clip(max=len(mentions) - 1)] < end_T
        )
        return [entity for _, _, entity in mentions], np.where(
            inside_T & (start_T < end_T), mention_T, -1
        )


def pad_entities(entities: Sequence[Sequence[int]]) -> Tensor:
    """Return (B, N) int64 from the entities of each row, padded with -1; N is at least 1."""
    width = max([1, *map(len, entities)])
    padded = [[*of_row, *[-1] * (width - len(of_row))] for of_row in entities]
    return torch.tensor(padded, dtype=torch.int64).view(len(entities), width)
