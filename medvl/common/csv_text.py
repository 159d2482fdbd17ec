"""CSV files for people: cells that a spreadsheet would compute are written so that it shows them as text.

A spreadsheet evaluates a cell that begins with `=`, `+`, `-` or `@`, also after blanks, a tab or a return, and in the
full-width forms of Unicode. Such texts get an apostrophe in front; numbers stay numbers.
"""

import csv
import io
import re
import unicodedata
from collections.abc import Iterable

_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?%?|[+-]?(?:inf|nan)", re.ASCII)
_FORMULA = frozenset("=+-@")
_CONTROL = frozenset("\t\r\n")


def csv_text(rows: Iterable[Iterable[object]]) -> str:
    """Return rows as CSV with line feeds, each text by `as_shown`; numbers and None are written as by `csv`."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerows([as_shown(cell) if isinstance(cell, str) else cell for cell in row] for row in rows)
    return file.getvalue()


def as_shown(text: str) -> str:
    """Return a text with an apostrophe in front if a spreadsheet would compute it."""
    if _NUMBER.fullmatch(text):
        return text
    for letter in text:
        if letter in _CONTROL or unicodedata.normalize("NFKC", letter) in _FORMULA:
            return f"'{text}"
        if not (letter.isspace() or unicodedata.category(letter) in ("Cc", "Cf")):  # blanks, also those of no width
            return text
    return text
