"""Files of word vectors: GloVe's text, word2vec's text (a line of counts first) and word2vec's binary form.

Reading is bounded whatever a file claims: dimensions, words, the length of a word and of a line all have limits.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

from medvl.errors import WeightsError

_MOST_DIMENSIONS = 4096
_MOST_WORDS = 20_000_000
_LONGEST_WORD = 4096  # bytes
_LONGEST_LINE = 64 * _MOST_DIMENSIONS


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Form:
    dimension: int
    words: int | None
    """As a header says; None without one."""
    binary: bool


def vector_width(path: Path) -> int:
    """Dimension of the vectors in a file. Raises `WeightsError` when it is no file of word vectors."""
    with _open(path) as file:
        return _form(file, path).dimension


def fill_table(table: torch.Tensor, path: Path, vocabulary: Mapping[str, int]) -> int:
    """Copy the vectors of the words of `vocabulary` (word -> row) into `table` (V, D); how many were found.

    Rows of words that the file does not have are left as they are.

    Raises:
        WeightsError: the file is damaged, or its vectors are not as wide as the table.
    """
    filled: set[int] = set()
    with _open(path) as file, torch.no_grad():
        form = _form(file, path)
        if form.dimension != table.shape[1]:
            raise WeightsError(f"{path} holds vectors of {form.dimension} numbers, the table rows of {table.shape[1]}")
        for word, vector in _binary(file, form, path) if form.binary else _text(file, form, path):
            row = vocabulary.get(word)
            if row is not None and row not in filled:
                if not np.isfinite(vector).all():
                    raise WeightsError(f"{path}: a vector holds a number that is not finite")
                table[row] = torch.from_numpy(vector)
                filled.add(row)
    return len(filled)


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise WeightsError(f"{path} cannot be read as a file of word vectors: {error.strerror}") from None


def _form(file: BinaryIO, path: Path) -> _Form:
    """What the file is, with its position set to the first word."""
    fields = _line(file, path).split()
    if len(fields) == 2 and all(field.isdigit() for field in fields):
        words, dimension = int(fields[0]), int(fields[1])
        start = file.tell()
        beginning = file.read(_LONGEST_WORD)
        file.seek(start)
        after_word = beginning.partition(b" ")[2][: 4 * min(dimension, 64)]
        binary = any(byte not in b"0123456789+-.eE \t\r\nnaif" for byte in after_word)
    else:
        words, dimension, binary = None, len(fields) - 1, False
        file.seek(0)
    if not 1 <= dimension <= _MOST_DIMENSIONS or (words is not None and words > _MOST_WORDS):
        raise WeightsError(f"{path} is no file of word vectors: its first line would mean {dimension} dimensions")
    return _Form(dimension=dimension, words=words, binary=binary)


def _line(file: BinaryIO, path: Path) -> bytes:
    line = file.readline(_LONGEST_LINE)
    if len(line) == _LONGEST_LINE:
        raise WeightsError(f"{path} has a line of over {_LONGEST_LINE} bytes: it is no file of word vectors")
    return line


def _text(file: BinaryIO, form: _Form, path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """A word may itself hold spaces (GloVe's larger files have some), so numbers are counted from the end."""
    for number in range(_MOST_WORDS):
        line = _line(file, path)
        if not line:
            break
        fields = line.rstrip().split(b" ")
        try:
            vector = np.array(fields[-form.dimension :], dtype=np.float32)
        except ValueError:
            vector = np.empty(0, dtype=np.float32)
        if len(fields) <= form.dimension or len(vector) != form.dimension:
            raise WeightsError(f"{path}: line {number + 1} is not a word and {form.dimension} numbers")
        yield b" ".join(fields[: -form.dimension]).decode("utf-8", errors="replace"), vector
    if form.words is not None and number != form.words:
        raise WeightsError(f"{path} announces {form.words} words and holds {number}: it is damaged")


def _binary(file: BinaryIO, form: _Form, path: Path) -> Iterator[tuple[str, np.ndarray]]:
    for _ in range(form.words or 0):
        word = bytearray()
        while (byte := file.read(1)) not in (b" ", b""):
            if byte != b"\n":
                word += byte
            if len(word) > _LONGEST_WORD:
                raise WeightsError(f"{path} holds a word of over {_LONGEST_WORD} bytes: it is damaged")
        content = file.read(4 * form.dimension)
        if len(content) != 4 * form.dimension:
            raise WeightsError(f"{path} announces {form.words} words and ends early: it is damaged")
        yield word.decode("utf-8", errors="replace"), np.frombuffer(content, dtype="<f4").copy()
