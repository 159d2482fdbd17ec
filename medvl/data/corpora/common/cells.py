"""Cells of a table from any program: texts of CSV, numbers, booleans and lists of JSON and Parquet."""

import math
import re
from collections import Counter

from medvl.common.untrusted import parse_json
from medvl.data.reports.cleaning import stored_text

_MISSING = {"nan", "NaN", "NA", "<NA>", "N/A", "n/a", "#N/A", "null", "NULL"}
"""Cells that pandas, R and spreadsheets write for a missing value."""
_ROUNDED = re.compile(r"\d(?:\.\d+)?[eE]\+\d+")
_LARGEST_EXACT = 1 << 53
"""Floating-point numbers above have lost digits."""


def raw_text(value: object) -> str:
    """Return the text of a cell, also of the usual marks of a missing value."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, bool):
        return str(int(value))
    return str(value).strip()


def cell_text(value: object) -> str:
    """Return the text of a cell; "" for the usual marks of a missing value."""
    text = raw_text(value)
    return "" if text in _MISSING else text


def report_text(value: object, warnings: Counter[str]) -> str:
    """Return the text of a cell with a report, a section or a caption, as `stored_text`."""
    return stored_text(raw_text(value), warnings)


def cell_id(value: object) -> str:
    """Return the text of an id; the number 7.0 is 7, as JSON and Parquet have 7.0 where the column has empty cells.

    Raises ValueError for a number that a program has rounded, such as 2.16840113668637E+38: several ids are one then.
    """
    if isinstance(value, float) and value.is_integer() and abs(value) < _LARGEST_EXACT:
        value = int(value)
    text = cell_text(value)
    if _ROUNDED.fullmatch(text):
        raise ValueError("a rounded number")
    return text


def is_like_decimal(text: str) -> bool:
    """Return whether an id such as 7.0 was probably a whole number before a program read it."""
    return text.endswith(".0") and text[:-2].isdecimal()


def equals(value: object, text: str) -> bool:
    """Return whether a cell equals a text; booleans of JSON or Parquet equal true or 1, false or 0."""
    if isinstance(value, bool):
        return text.lower() in (str(value).lower(), str(int(value)))
    return raw_text(value) == text


def json_value(value: object) -> object:
    """Return a cell as a JSON value: dates, bytes and other values as texts, also within lists."""
    if isinstance(value, dict):
        return {str(name): json_value(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(part) for part in value]
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


def cell_list(value: object) -> list[str]:
    """Return the entries of a list, in JSON or separated by bars; none for a missing value.

    Raises ValueError for a list of another form, such as Python's ['a', 'b'].
    """
    if isinstance(value, list | tuple):
        return [text for entry in value if (text := raw_text(entry))]
    text = cell_text(value)
    if text.startswith("[") and text.endswith("]"):
        return cell_list(parse_json(text))
    return [part.strip() for part in text.split("|") if part.strip()]
