"""A large JSON object, read entry by entry in constant memory."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from medvl.common.untrusted import InputFolders, parse_json
from medvl.data.corpora.common.tables import MAX_LINE_CHARACTERS, malformed, open_text
from medvl.errors import CorpusError

_CHUNK = 1 << 20
_START = re.compile(r"\s*\{")
_KEY = re.compile(r'\s*("(?:[^"\\]|\\.)*+")\s*:\s*(?=\{)')
_SEPARATOR = re.compile(r"\s*([,}])")
_EMPTY = re.compile(r"\s*\}")
_LIST = re.compile(r"\s*\[")
_OBJECT = re.compile(r"\s*(?=\{)")
_NEXT = re.compile(r"\s*([,\]])")
_EMPTY_LIST = re.compile(r"\s*\]")


def read_json_entries(path: Path, folders: InputFolders) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield (number, counted from 1; value) of the entries of a JSON object whose values are
    objects. Raises CorpusError as `read_json_items`.
    """
    for number, _, value in read_json_items(path, folders):
        yield number, value


def read_json_items(
    path: Path, folders: InputFolders
) -> Iterator[tuple[int, str, Mapping[str, Any]]]:
    """Yield (number, counted from 1; key; value) of the entries of a JSON object whose values are
    objects.

    Raises CorpusError as `open_text`, or when the file has another form, an entry is no JSON that
    medvl reads, or has more than `MAX_LINE_CHARACTERS`.
    """
    with open_text(path, folders) as file:
        window = _Window(path, file)
        window.match(_START)
        if window.is_next(_EMPTY):
            return
        number = 0
        separator = ","
        while separator == ",":
            number += 1
            window.number = number
            key: str = window.parsed(window.match(_KEY))
            yield number, key, window.value()
            separator = window.match(_SEPARATOR)


def read_json_list(path: Path, folders: InputFolders) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield (number, counted from 1; value) of the objects of a JSON list. Raises as
    `read_json_items`.
    """
    with open_text(path, folders) as file:
        window = _Window(path, file)
        window.match(_LIST)
        separator = "]" if window.is_next(_EMPTY_LIST) else ","
        while separator == ",":
            window.number += 1
            window.match(_OBJECT)
            yield window.number, window.value()
            separator = window.match(_NEXT)


class _Window:
    """The part of a file that is being read."""

    def __init__(self, path: Path, file: TextIO) -> None:
        self._path = path
        self._file = file
        self._text = ""
        self._decoder = json.JSONDecoder()
        self.number = 0
        """The entry that is being read, for messages."""

    def is_next(self, pattern: re.Pattern[str]) -> bool:
        """Return whether the text goes on with a pattern, which is not taken."""
        if not self._text.strip():
            self._extend("an entry")
        return pattern.match(self._text) is not None

    def match(self, pattern: re.Pattern[str]) -> str:
        """Take a pattern from the text, and return its last group."""
        while (match := pattern.match(self._text)) is None:
            self._extend("entries whose values are objects")
        self._text = self._text[match.end() :]
        return match[match.lastindex or 0]

    def value(self) -> Mapping[str, Any]:
        """Take an object from the text, and return it."""
        while True:
            try:
                _, end = self._decoder.raw_decode(self._text)
                break
            except json.JSONDecodeError:
                self._extend("a JSON object")
            except RecursionError:
                raise malformed(self._where(), "nested too deeply") from None
        value: Mapping[str, Any] = self.parsed(self._text[:end])
        self._text = self._text[end:]
        return value

    def parsed(self, text: str) -> Any:
        """Return the value of some JSON."""
        try:
            return parse_json(text)
        except ValueError as error:
            message = f"expected JSON that medvl reads, got {type(error).__name__}"
            raise malformed(self._where(), message) from None

    def _extend(self, expected: str) -> None:
        chunk = self._file.read(_CHUNK)
        if not chunk:
            raise malformed(self._where(), f"expected {expected}; copy the file again")
        self._text += chunk
        if len(self._text) > MAX_LINE_CHARACTERS:
            message = f"expected entries of at most {MAX_LINE_CHARACTERS} characters"
            raise CorpusError(f"{self._where()}: {message}", "too_large")

    def _where(self) -> str:
        return f"{self._path}, entry {self.number}"
