"""Word frequencies of large texts in bounded memory, and statistics of a vocabulary's pieces per word.

Distinct words grow with the text: names, numbers and misspellings. Counts of more than a limit of them are written to
temporary files in alphabetical order and merged at the end, so the result does not depend on the limit or on the order
of the texts.
"""

import collections
import heapq
import itertools
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import IO

from tokenizers import Tokenizer as Backend, normalizers, pre_tokenizers

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
        kept: distinct words that are returned at most, the most frequent ones (of equal ones the alphabetically first).
    """
    chunks: collections.Counter[str] = collections.Counter()
    count = 0
    with ExitStack() as stack:
        runs: list[IO[str]] = []
        for text in texts:
            count += 1
            chunks.update(text.split())
            if len(chunks) > held:
                runs.append(stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8", newline="\n")))
                _write_run(runs[-1], _split(chunks, lowercase))
                chunks.clear()
        words = _split(chunks, lowercase)
        if runs:
            merged = _merge([*map(_read_run, runs), iter(sorted(words.items()))])
            words = dict(heapq.nsmallest(kept, merged, key=_rank))
    if len(words) > kept:
        words = dict(heapq.nsmallest(kept, words.items(), key=_rank))
    return words, count


def _split(chunks: Mapping[str, int], lowercase: bool) -> dict[str, int]:
    """Return the frequencies of words from chunks and their counts; each chunk is split once."""
    normalizer, splitter = normalizers.BertNormalizer(lowercase=lowercase), pre_tokenizers.BertPreTokenizer()
    words: collections.Counter[str] = collections.Counter()
    for chunk, frequency in chunks.items():
        for part in chunk.split(MASKED_OUT):
            for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(part)):
                words[word] += frequency
    return words


def _write_run(file: IO[str], words: Mapping[str, int]) -> None:
    """Write words and frequencies in alphabetical order, and go back to the beginning of the file."""
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


def pieces_per_word(backend: Backend, words: Mapping[str, int], unknown: str | None) -> tuple[float, float, float]:
    """Return the mean pieces of a word, the share of words that are one piece, and the share with an unknown piece.

    Words weigh by their frequency. `unknown` is the vocabulary's token for unknown words, None where it has none.
    """
    total = pieces = single = unknowns = 0
    for word, frequency in words.items():
        tokens = backend.encode(f" {word}", add_special_tokens=False).tokens
        total += frequency
        pieces += frequency * len(tokens)
        single += frequency * (len(tokens) == 1 and tokens[0] != unknown)
        unknowns += frequency * (unknown in tokens)
    return pieces / max(total, 1), single / max(total, 1), unknowns / max(total, 1)
