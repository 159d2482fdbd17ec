"""Readers of word vector files: GloVe text, word2vec text (with a header line) and word2vec binary.

Dimension, number of words, and the length of a word and of a line are limited, so that a damaged
file cannot exhaust memory.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

from medvl.common.untrusted import ANYWHERE
from medvl.errors import WeightsError

_MAX_DIMENSION = 4096
_MAX_WORDS = 20_000_000
_MAX_WORD_BYTES = 4096
_MAX_LINE_BYTES = 64 * _MAX_DIMENSION


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Format:
    """Format of a file."""

    dimension: int
    words: int | None
    """Number of words from the header; None without a header."""
    binary: bool


def read_dimension(path: Path) -> int:
    """Return the dimension of the vectors in a file.

    Raises:
        WeightsError: "unreadable", or "malformed" if it is not a file of word vectors.
    """
    with _open(path) as file:
        return _read_format(file, path).dimension


def fill_word_vectors(table: torch.Tensor, path: Path, vocabulary: Mapping[str, int]) -> int:
    """Copy the vectors of the words in `vocabulary` (word -> row) into `table` (V, D); return how
    many.

    Rows of words that are not in the file become zero: a text's mean has the direction of that over
    the words it has.

    Raises:
        WeightsError: "unreadable", "malformed" or "truncated" if the file cannot be read,
            "mismatch" if its vectors do not have the width of the table.
    """
    filled: set[int] = set()
    with _open(path) as file, torch.no_grad():
        file_format = _read_format(file, path)
        if file_format.dimension != table.shape[1]:
            got = f"expected vectors of dimension {table.shape[1]}, got {file_format.dimension}"
            raise WeightsError(f"{path}: {got}", "mismatch")
        table.zero_()
        for word, vector in (
            _read_binary(file, file_format, path)
            if file_format.binary
            else _read_text(file, file_format, path)
        ):
            row = vocabulary.get(word)
            if row is not None and row not in filled:
                if not np.isfinite(vector).all():
                    raise WeightsError(
                        f"{path}: a vector has a number that is not finite", "malformed"
                    )
                table[row] = torch.from_numpy(vector)
                filled.add(row)
    return len(filled)


def _open(path: Path) -> BinaryIO:
    try:
        return ANYWHERE.open(path, WeightsError)
    except FileNotFoundError:
        raise WeightsError(
            f"{path} does not exist: give a file of word vectors", "unreadable"
        ) from None


def _read_format(file: BinaryIO, path: Path) -> _Format:
    """Detect the format and set the file's position to the first word."""
    fields = _read_line(file, path).split()
    if len(fields) == 2 and all(field.isdigit() for field in fields):
        words = int(fields[0])
        dimension = int(fields[1])
        start = file.tell()
        beginning = file.read(_MAX_WORD_BYTES)
        file.seek(start)
        after_word = beginning.partition(b" ")[2][: 4 * min(dimension, 64)]
        binary = any(byte not in b"0123456789+-.eE \t\r\nnaif" for byte in after_word)
    else:
        words = None
        dimension = len(fields) - 1
        binary = False
        file.seek(0)
    if not 1 <= dimension <= _MAX_DIMENSION or (words is not None and words > _MAX_WORDS):
        raise WeightsError(
            f"{path} has no word vectors: its first line implies {dimension} dimensions",
            "malformed",
        )
    return _Format(dimension=dimension, words=words, binary=binary)


def _read_line(file: BinaryIO, path: Path) -> bytes:
    line = file.readline(_MAX_LINE_BYTES)
    if len(line) == _MAX_LINE_BYTES:
        raise WeightsError(
            f"{path} has no word vectors: a line exceeds {_MAX_LINE_BYTES} bytes", "malformed"
        )
    return line


def _read_text(
    file: BinaryIO, file_format: _Format, path: Path
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (word, vector). Words may contain spaces (in GloVe's larger files), so numbers are
    counted from the end.
    """
    for number in range(_MAX_WORDS):
        line = _read_line(file, path)
        if not line:
            break
        fields = line.rstrip().split(b" ")
        try:
            vector = np.array(fields[-file_format.dimension :], dtype=np.float32)
        except ValueError:
            vector = np.empty(0, dtype=np.float32)
        if len(fields) <= file_format.dimension or len(vector) != file_format.dimension:
            expected = f"a word and {file_format.dimension} numbers"
            raise WeightsError(f"{path}: expected {expected} in line {number + 1}", "malformed")
        yield b" ".join(fields[: -file_format.dimension]).decode("utf-8", errors="replace"), vector
    if file_format.words is not None and number != file_format.words:
        raise WeightsError(f"{path}: expected {file_format.words} words, got {number}", "truncated")


def _read_binary(
    file: BinaryIO, file_format: _Format, path: Path
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (word, vector) of a word2vec binary file."""
    for _ in range(file_format.words or 0):
        word = bytearray()
        while (byte := file.read(1)) not in (b" ", b""):
            if byte != b"\n":
                word += byte
            if len(word) > _MAX_WORD_BYTES:
                raise WeightsError(
                    f"{path}: a word has more than {_MAX_WORD_BYTES} bytes", "malformed"
                )
        content = file.read(4 * file_format.dimension)
        if len(content) != 4 * file_format.dimension:
            raise WeightsError(
                f"{path}: expected {file_format.words} words, but the file ends early", "truncated"
            )
        yield word.decode("utf-8", errors="replace"), np.frombuffer(content, dtype="<f4").copy()
