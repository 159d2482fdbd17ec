"""Deterministic trainer of WordPiece vocabularies from word counts.

The trainer of the `tokenizers` library breaks ties by the order of a randomly seeded hash table, so that two runs on
the same corpus give different vocabularies. Here the most frequent pair of adjacent pieces is merged first and, among
equally frequent ones, the alphabetically first.
"""

import collections
import heapq
import itertools
from collections.abc import Iterable, Mapping

from medvl.errors import ConfigError

CONTINUED = "##"
"""Prefix of pieces that do not begin their word."""


def learn_pieces(words: Mapping[str, int], size: int, min_frequency: int) -> list[str]:
    """Return up to `size` pieces: the characters in alphabetical order, then merged pieces in the order of merging.

    `words` has the frequency of each word, and `min_frequency` is the least frequency of characters and pairs. Raises
    ConfigError when there are more than `size` different characters.
    """
    counted = sorted(words.items())
    characters = _characters(counted, min_frequency)
    if len(characters) > size:
        message = f"vocab_size leaves {size} pieces, fewer than the {len(characters)} characters of the texts"
        raise ConfigError(message, "out_of_range", field="vocab_size")
    pieces_seen = set(characters)
    spelled = [(_spell(word), count) for word, count in counted]
    merger = _Merger([word for word in spelled if pieces_seen.issuperset(word[0])], min_frequency)
    pieces = list(characters)
    while len(pieces) < size:
        piece = merger.merge()
        if piece is None:
            break
        if piece not in pieces_seen:
            pieces_seen.add(piece)
            pieces.append(piece)
    return pieces


def _spell(word: str) -> list[str]:
    return [character if index == 0 else CONTINUED + character for index, character in enumerate(word)]


def _characters(counted: Iterable[tuple[str, int]], min_frequency: int) -> list[str]:
    frequency: collections.Counter[str] = collections.Counter()
    for word, count in counted:
        for piece in _spell(word):
            frequency[piece] += count
    return sorted(piece for piece, count in frequency.items() if count >= min_frequency)


class _Merger:
    """Words as lists of pieces, and the frequencies of all adjacent pairs, updated with each merge."""

    def __init__(self, words: list[tuple[list[str], int]], min_frequency: int) -> None:
        self.words = words
        self.min_frequency = min_frequency
        self.frequency: collections.Counter[tuple[str, str]] = collections.Counter()
        self.where: dict[tuple[str, str], set[int]] = collections.defaultdict(set)
        for index, (pieces, count) in enumerate(words):
            for pair in itertools.pairwise(pieces):
                self.frequency[pair] += count
                self.where[pair].add(index)
        self.heap = [(-count, pair) for pair, count in self.frequency.items()]
        heapq.heapify(self.heap)

    def merge(self) -> str | None:
        """Merge the most frequent pair in all words; return the new piece, or None when no pair is frequent enough."""
        pair = self._pop()
        if pair is None:
            return None
        piece = pair[0] + pair[1].removeprefix(CONTINUED)
        changed: set[tuple[str, str]] = set()
        for index in self.where.pop(pair):
            self._merge_in_word(index, pair, piece, changed)
        for other in changed - {pair}:
            if self.frequency[other] >= self.min_frequency:
                heapq.heappush(self.heap, (-self.frequency[other], other))
        del self.frequency[pair]
        return piece

    def _pop(self) -> tuple[str, str] | None:
        """Return the most frequent pair, discarding heap entries with an outdated frequency."""
        while self.heap:
            negative, pair = heapq.heappop(self.heap)
            if -negative < self.min_frequency:
                return None
            if self.frequency.get(pair) == -negative:
                return pair
        return None

    def _merge_in_word(self, index: int, pair: tuple[str, str], piece: str, changed: set[tuple[str, str]]) -> None:
        """Merge the pair in one word, and add pairs whose frequency may have changed to `changed`.

        `where` may still list words that no longer contain the pair; these are unchanged.
        """
        pieces, count = self.words[index]
        first, second = pair
        merged: list[str] = []
        position, last = 0, len(pieces) - 1
        while position <= last:
            if pieces[position] == first and position < last and pieces[position + 1] == second:
                merged.append(piece)
                position += 2
            else:
                merged.append(pieces[position])
                position += 1
        if len(merged) == len(pieces):
            return
        for other in itertools.pairwise(pieces):
            self.frequency[other] -= count
            changed.add(other)
        for other in itertools.pairwise(merged):
            self.frequency[other] += count
            self.where[other].add(index)
            changed.add(other)
        self.words[index] = (merged, count)
