"""Texts of evaluation sets, to leave out documents that share a run of words with them.

A run is 12 words, lower-cased and without punctuation. Runs are compared by 64-bit hashes, eight bytes of memory each.
"""

import csv
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np

from medvl.common.untrusted import ANYWHERE, parse_json, parse_xml
from medvl.data.corpora.common.tables import malformed, open_text, read_lines
from medvl.errors import ConfigError, CorpusError

RUN = 12
"""Words of a run."""
_WORD = re.compile(r"\w+")
_FACTOR = 0x9E3779B97F4A7C15
_POWERS_R = np.array([pow(_FACTOR, power, 2**64) for power in range(RUN)], np.uint64)
_JSON_LINES, _JSON, _XML, _TEXTS = (".jsonl", ".ndjson"), (".json",), (".xml",), (".txt", ".tokens")
_TABLES = (".tsv", ".csv", ".conll", ".iob", ".iob2")
_MERGE = 1 << 18


def words_of(text: str) -> list[str]:
    """Return the words of a text: lower-cased runs of letters and digits."""
    return _WORD.findall(text.lower())


def run_hashes(words: Sequence[str]) -> np.ndarray:
    """Return the hash of each run of 12 words, uint64; none for a shorter text."""
    if len(words) < RUN:
        return np.zeros(0, np.uint64)
    word_N = np.array([zlib.crc32(word.encode()) for word in words], np.uint64) * np.uint64(_FACTOR)
    word_N ^= word_N >> np.uint64(29)
    runs = len(words) - RUN + 1
    total_N = np.zeros(runs, np.uint64)
    for place, power in enumerate(_POWERS_R):
        total_N += word_N[place : place + runs] * power
    return total_N


class HashSet:
    """A set of 64-bit numbers in eight bytes each."""

    def __init__(self) -> None:
        self._sorted_N = np.zeros(0, np.uint64)
        self._new: set[int] = set()

    def add(self, number: int) -> bool:
        """Add a number; return whether it is new."""
        if number in self._new:
            return False
        place = int(np.searchsorted(self._sorted_N, np.uint64(number)))
        if place < len(self._sorted_N) and int(self._sorted_N[place]) == number:
            return False
        self._new.add(number)
        if len(self._new) == _MERGE:
            self._sorted_N = np.union1d(self._sorted_N, np.fromiter(self._new, np.uint64, _MERGE))
            self._new.clear()
        return True


class HeldOutTexts:
    """Runs of words of named evaluation sets.

    Args:
        texts: name of a set -> its texts.
    """

    def __init__(self, texts: Mapping[str, Iterable[str]]) -> None:
        self._runs: dict[str, np.ndarray] = {}
        for name, of_set in texts.items():
            hashes = [run_hashes(words_of(text)) for text in of_set]
            self._runs[name] = np.unique(np.concatenate(hashes)) if hashes else np.zeros(0, np.uint64)
            if not len(self._runs[name]):
                message = f"the evaluation set {name} has no text of {RUN} words; check its path"
                raise ConfigError(message, "empty", field="held_out")

    def find(self, words: Sequence[str]) -> str | None:
        """Return the name of the first set that shares a run with a text, given its words; None if there is none."""
        hash_N = run_hashes(words)
        for name, run_M in self._runs.items():
            place_N = np.searchsorted(run_M, hash_N).clip(max=len(run_M) - 1)
            if (run_M[place_N] == hash_N).any():
                return name
        return None


def read_texts(path: Path) -> Iterator[str]:
    """Yield all texts of an evaluation set: a file, or all files in a folder.

    From JSON and JSON lines, every string, and lists of strings joined by spaces (given words); from tables (.tsv,
    .csv, .conll, .iob, .iob2), every column from top to bottom; from .xml, all text and the attributes of every element
    (DDI's sentences); from .txt and .tokens (EBM PICO), the whole text. All of them also gzipped.

    Raises CorpusError when a file is damaged, or there is none.
    """
    paths = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
    readers = {**dict.fromkeys(_JSON_LINES, _read_json_lines), **dict.fromkeys(_JSON, _read_json)}
    readers |= {**dict.fromkeys(_TABLES, _read_columns), **dict.fromkeys(_TEXTS, _read_whole)}
    readers |= dict.fromkeys(_XML, _read_xml)
    known = [(each, readers[suffix]) for each in paths if (suffix := plain_suffix(each)) in readers]
    if not known:
        message = f"{path} has no text of an evaluation set: expected {', '.join(readers)}, also as .gz"
        raise CorpusError(message, "not_found", field="held_out")
    for each, read in known:
        yield from read(each)


def plain_suffix(path: Path) -> str:
    """Return the suffix of a file's name in lower case, of `x.jsonl.gz` that before `.gz`."""
    return Path(path.name.removesuffix(".gz")).suffix.lower()


def _read_json_lines(path: Path) -> Iterator[str]:
    for number, line in enumerate(read_lines(path, ANYWHERE), start=1):
        if line.strip():
            yield from _strings(_parse(line, f"{path}, row {number}"))


def _read_json(path: Path) -> Iterator[str]:
    with open_text(path, ANYWHERE) as file:
        yield from _strings(_parse(file.read(), str(path)))


def _read_columns(path: Path) -> Iterator[str]:
    columns: dict[int, list[str]] = {}
    for row in _read_csv(path) if plain_suffix(path) == ".csv" else _read_cells(path):
        for number, cell in enumerate(row):
            columns.setdefault(number, []).append(cell)
    yield from (" ".join(cells) for cells in columns.values())


def _read_csv(path: Path) -> Iterator[list[str]]:
    try:
        yield from csv.reader(read_lines(path, ANYWHERE))
    except csv.Error as error:
        raise malformed(path, f"not readable as a table ({error})") from error


def _read_cells(path: Path) -> Iterator[list[str]]:
    """Yield the cells of each line; a quotation mark is a word. Words and tags can also be separated by spaces."""
    spaced = plain_suffix(path) != ".tsv"
    for line in read_lines(path, ANYWHERE):
        yield line.split() if spaced and "\t" not in line else line.split("\t")


def _read_xml(path: Path) -> Iterator[str]:
    with open_text(path, ANYWHERE) as file:
        text = file.read()
    try:
        root = parse_xml(text.encode())
    except ElementTree.ParseError as error:
        raise malformed(path, f"not well-formed XML ({error})") from error
    yield " ".join(root.itertext())
    for element in root.iter():
        yield from element.attrib.values()


def _read_whole(path: Path) -> Iterator[str]:
    yield " ".join(read_lines(path, ANYWHERE))


def _parse(data: str, where: str) -> Any:
    try:
        return parse_json(data)
    except ValueError as error:
        raise CorpusError(f"{where}: cannot be read as JSON ({type(error).__name__})", "malformed") from error


def _strings(value: Any) -> Iterator[str]:
    """Yield the strings of a JSON value; a list of strings is one text."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _strings(part)
    elif isinstance(value, list):
        if value and all(isinstance(part, str) for part in value):
            yield " ".join(value)
        else:
            for part in value:
                yield from _strings(part)
