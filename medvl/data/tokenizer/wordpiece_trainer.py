"""A WordPiece vocabulary from counted words: the same words give the same vocabulary, in the same order, always.

The trainer of the `tokenizers` library breaks ties by the order of a randomly seeded hash table, so that two runs over
one corpus give two vocabularies. Here the most frequent pair of neighbouring pieces is merged first and, among equals,
the alphabetically first.
"""

import collections
import heapq
import itertools
from collections.abc import Iterable, Mapping

from medvl.errors import ConfigError

CONTINUED = "##"
"""Before every piece that does not begin its word."""


def learn_pieces(words: Mapping[str, int], size: int, min_frequency: int) -> list[str]:
    """At most `size` pieces: the characters in alphabetical order, then merged pieces in the order they were merged.

    Args:
        words: how often every word occurs.
        size: most pieces.
        min_frequency: characters and pairs that occur less often are not taken.

    Raises:
        ConfigError: the characters alone are more than `size`.
    """
    counted = sorted(words.items())
    characters = _characters(counted, min_frequency)
    if len(characters) > size:
        raise ConfigError(f"the texts have {len(characters)} different characters: a vocabulary of {size} is too small")
    known = set(characters)
    spelled = [(_spell(word), count) for word, count in counted]
    merger = _Merger([word for word in spelled if known.issuperset(word[0])], min_frequency)
    pieces = list(characters)
    while len(pieces) < size:
        piece = merger.merge()
        if piece is None:
            break
        if piece not in known:
            known.add(piece)
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
    """Words as lists of pieces, and the frequencies of all neighbouring pairs, kept up to date merge by merge."""

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
        """Join the most frequent pair wherever it stands; the new piece, or None when no pair is frequent enough."""
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
        """The best pair. Entries whose frequency has changed since they were pushed are thrown away."""
        while self.heap:
            negative, pair = heapq.heappop(self.heap)
            if -negative < self.min_frequency:
                return None
            if self.frequency.get(pair) == -negative:
                return pair
        return None

    def _merge_in_word(self, index: int, pair: tuple[str, str], piece: str, changed: set[tuple[str, str]]) -> None:
        """Rewrite one word, and note the pairs whose frequency that may have changed.

        `where` may still name words that a pair has left: rewriting those changes nothing.
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
