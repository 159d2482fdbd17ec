"""Deterministic trainer of WordPiece vocabularies from word counts.

The trainer of the `tokenizers` library breaks ties by the order of a randomly seeded hash table, so
that two runs on the same corpus give different vocabularies. Here the most frequent pair of
adjacent pieces is merged first and, among equally frequent ones, the alphabetically first.
"""

import collections
import heapq
import itertools
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import IO

import torch
from tokenizers import Tokenizer as Backend, models, normalizers, pre_tokenizers
from torch import Tensor

from medvl.data.tokenizer.files import byte_characters
from medvl.errors import ConfigError

CONTINUED = "##"
"""Prefix of pieces that do not begin their word."""


def learn_pieces(words: Mapping[str, int], size: int, min_frequency: int) -> list[str]:
    """Return up to `size` pieces: the characters in alphabetical order, then merged pieces in the
    order of merging.

    `words` has the frequency of each word, and `min_frequency` is the least frequency of characters
    and pairs. Raises ConfigError when there are more than `size` different characters.
    """
    counts = sorted(words.items())
    characters = _characters(counts, min_frequency)
    if len(characters) > size:
        message = (
            f"vocab_size leaves {size} pieces, fewer than the {len(characters)} "
            f"characters of the texts"
        )
        raise ConfigError(message, "out_of_range", field="vocab_size")
    pieces_seen = set(characters)
    spelled = [(_spell(word), count) for word, count in counts]
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
    return [
        character if index == 0 else CONTINUED + character for index, character in enumerate(word)
    ]


def _characters(counted: Iterable[tuple[str, int]], min_frequency: int) -> list[str]:
    frequency: collections.Counter[str] = collections.Counter()
    for word, count in counted:
        for piece in _spell(word):
            frequency[piece] += count
    return sorted(piece for piece, count in frequency.items() if count >= min_frequency)


class _Merger:
    """Words as lists of pieces, and the frequencies of all adjacent pairs, updated with each
    merge.
    """

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
        """Merge the most frequent pair in all words; return the new piece, or None when no pair
        is frequent enough.
        """
        pair = self._pop()
        if pair is None:
            return None
        piece = pair[0] + pair[1].removeprefix(CONTINUED)
        pairs: set[tuple[str, str]] = set()
        for index in self.where.pop(pair):
            self._merge_in_word(index, pair, piece, pairs)
        for other in pairs - {pair}:
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

    def _merge_in_word(
        self, index: int, pair: tuple[str, str], piece: str, changed: set[tuple[str, str]]
    ) -> None:
        """Merge the pair in one word, and add pairs whose frequency may have changed to `changed`.

        `where` may still list words that no longer contain the pair; these are unchanged.
        """
        pieces, count = self.words[index]
        first, second = pair
        new_pieces: list[str] = []
        position = 0
        last = len(pieces) - 1
        while position <= last:
            if pieces[position] == first and position < last and pieces[position + 1] == second:
                new_pieces.append(piece)
                position += 2
            else:
                new_pieces.append(pieces[position])
                position += 1
        if len(new_pieces) == len(pieces):
            return
        for other in itertools.pairwise(pieces):
            self.frequency[other] -= count
            changed.add(other)
        for other in itertools.pairwise(new_pieces):
            self.frequency[other] += count
            self.where[other].add(index)
            changed.add(other)
        self.words[index] = (new_pieces, count)


# Word frequencies of large texts in bounded memory, and statistics of a vocabulary's pieces per
# word.
#
# Distinct words grow with the text: names, numbers and misspellings. Counts of more than a limit
# of them are written to temporary files in alphabetical order and merged at the end, so the
# result does not depend on the limit or on the order of the texts.

MASKED_OUT = "___"
"""MIMIC's mask for removed words, a token of its own in trained vocabularies."""
_HELD = 2_000_000
"""Distinct pieces of text between spaces in memory: about 400 MB."""
_KEPT = 1_000_000
"""Distinct words from which a vocabulary is learned: the most frequent ones."""


def count_words(
    texts: Iterable[str], *, lowercase: bool = True, held: int = _HELD, kept: int = _KEPT
) -> tuple[dict[str, int], int]:
    """Return (word -> frequency, number of texts), with words split as by BERT's tokenizer.

    Args:
        texts: read once.
        lowercase: lower-case words, and strip their accents.
        held: distinct chunks of text in memory; beyond it, counts are moved to temporary files.
        kept: distinct words that are returned at most, the most frequent ones (of equal ones the
            alphabetically first).
    """
    chunks: collections.Counter[str] = collections.Counter()
    count = 0
    with ExitStack() as stack:
        runs: list[IO[str]] = []
        for text in texts:
            count += 1
            chunks.update(text.split())
            if len(chunks) > held:
                runs.append(
                    stack.enter_context(
                        tempfile.TemporaryFile("w+", encoding="utf-8", newline="\n")
                    )
                )
                _write_run(runs[-1], _split(chunks, lowercase))
                chunks.clear()
        words = _split(chunks, lowercase)
        if runs:
            counts = _merge([*map(_read_run, runs), iter(sorted(words.items()))])
            words = dict(heapq.nsmallest(kept, counts, key=_rank))
    if len(words) > kept:
        words = dict(heapq.nsmallest(kept, words.items(), key=_rank))
    return words, count


def _split(chunks: Mapping[str, int], lowercase: bool) -> dict[str, int]:
    """Return the frequencies of words from chunks and their counts; each chunk is split once."""
    normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    splitter = pre_tokenizers.BertPreTokenizer()
    words: collections.Counter[str] = collections.Counter()
    for chunk, frequency in chunks.items():
        for part in chunk.split(MASKED_OUT):
            for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(part)):
                words[word] += frequency
    return words


def _write_run(file: IO[str], words: Mapping[str, int]) -> None:
    """Write words and frequencies in alphabetical order, and go back to the beginning of the
    file.
    """
    for word, frequency in sorted(words.items()):
        file.write(f"{word}\t{frequency}\n")  # words have no spaces
    file.seek(0)


def _read_run(file: IO[str]) -> Iterator[tuple[str, int]]:
    for line in file:
        word, _, frequency = line.rpartition("\t")
        yield word, int(frequency)


def _merge(runs: list[Iterator[tuple[str, int]]]) -> Iterator[tuple[str, int]]:
    for word, group in itertools.groupby(heapq.merge(*runs), key=lambda pair: pair[0]):
        yield word, sum(frequency for _, frequency in group)


def _rank(pair: tuple[str, int]) -> tuple[int, str]:
    return -pair[1], pair[0]


def pieces_per_word(
    backend: Backend, words: Mapping[str, int], unknown: str | None
) -> tuple[float, float, float]:
    """Return the mean pieces of a word, the share of words that are one piece, and the share with
    an unknown piece.

    Words weigh by their frequency. `unknown` is the vocabulary's token for unknown words, None
    where it has none.
    """
    total = pieces = single = unknowns = 0
    for word, frequency in words.items():
        tokens = backend.encode(f" {word}", add_special_tokens=False).tokens
        total += frequency
        pieces += frequency * len(tokens)
        single += frequency * (len(tokens) == 1 and tokens[0] != unknown)
        unknowns += frequency * (unknown in tokens)
    return pieces / max(total, 1), single / max(total, 1), unknowns / max(total, 1)


# Word boundaries in sequences of sub-word ids, for whole-word masking and word features.
#
# Words are the units of the tokenizer's pre-tokenizer. WordPiece: letters and digits between
# spaces and punctuation, and each punctuation mark. Byte-level BPE: runs of letters, of digits or
# of other marks, and contractions (`'s`) that are one piece in the vocabulary. SentencePiece:
# text between spaces. All information is in tables indexed by id, so ids can be on any device.

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
        texts = [
            bytes(byte_of[c] for c in word if c in byte_of).decode(errors="replace")
            for word in words
        ]
        return [
            text + " " * (text != "" and end != "" and token.endswith(end))
            for text, token in zip(texts, tokens, strict=True)
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
