"""Rows of a table: their cells, checks over all rows, counts, and records in a temporary file."""

import dataclasses
import math
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from medvl.common.untrusted import parse_json
from medvl.data.reports.cleaning import stored_text
from medvl.data.reports.headings import column_section
from medvl.errors import CorpusError, SplitError
from medvl.schema import Sample

# Cells of a table from any program: texts of CSV, numbers, booleans and lists of JSON and
# Parquet.

_MISSING = {"nan", "NaN", "NA", "<NA>", "N/A", "n/a", "#N/A", "null", "NULL"}
"""Cells that pandas, R and spreadsheets write for a missing value."""
_ROUNDED = re.compile(r"\d(?:\.\d+)?[eE]\+\d+")
_LARGEST_EXACT = 1 << 53
"""Floating-point numbers above have lost digits."""
_LABEL_VALUES = {"1": 1, "0": 0, "-1": -1, "1.0": 1, "0.0": 0, "-1.0": -1, "true": 1, "false": 0}
_LABEL_VALUES |= {"1,0": 1, "0,0": 0, "-1,0": -1}  # decimal commas


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


def text_sections(text_columns: Iterable[str]) -> list[tuple[str, str]]:
    """Return section and column of each text column, given as COLUMN or as SECTION=COLUMN."""
    parts = [column.rpartition("=") for column in text_columns]
    return [(section or column_section(column), column) for section, _, column in parts]


def cell_id(value: object) -> str:
    """Return the text of an id; the number 7.0 is 7, as JSON and Parquet have 7.0 where the column
    has empty cells.

    Raises ValueError for a number that a program has rounded, such as 2.16840113668637E+38: several
    ids are one then.
    """
    if isinstance(value, float) and value.is_integer() and abs(value) < _LARGEST_EXACT:
        value = int(value)
    text = cell_text(value)
    if _ROUNDED.fullmatch(text):
        raise ValueError("a rounded number")
    return text


def cell_label(value: object) -> int | None:
    """Return the label of a cell: 1 or true, 0 or false, -1 (uncertain), None for a missing value.

    Raises ValueError for another value.
    """
    text = cell_text(value)
    if not text or text == "None":
        return None
    if text.lower() not in _LABEL_VALUES:
        raise ValueError("not a label")
    return _LABEL_VALUES[text.lower()]


def is_like_decimal(text: str) -> bool:
    """Return whether an id such as 7.0 was probably a whole number before a program read it."""
    return text.endswith(".0") and text[:-2].isdecimal()


def equals(value: object, text: str) -> bool:
    """Return whether a cell equals a text; booleans of JSON or Parquet equal true or 1, false or
    0.
    """
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


_NAME = r"'[^']*'|\"[^\"]*\"|nan|None"
_NAMES = re.compile(rf"\[[\s,]*+(?:(?:{_NAME})[\s,]*+)*+\]")
_QUOTED = re.compile(r"'([^']*)'|\"([^\"]*)\"")


def python_names(text: str) -> list[str]:
    """Return the distinct names of a list as Python prints it, or as NumPy does, without commas.

    White space is collapsed; blank names, `nan` and `None` are left out. Raises ValueError for
    another text.
    """
    if not _NAMES.fullmatch(text):
        raise ValueError("not a list of names")
    return quoted_names(text)


def quoted_names(text: str) -> list[str]:
    """Return the distinct quoted names of a text, white space collapsed, without blank ones."""
    names = (" ".join((one or other).split()) for one, other in _QUOTED.findall(text))
    return list(dict.fromkeys(filter(None, names)))


# Checks over all rows of a table, whose messages name rows: repeated images and shared patients.

_SHOWN = 10


class RowChecks:
    """Collects the rows of a table; `finish` raises for all of them at once. Takes 28 bytes of
    memory per row.
    """

    def __init__(self, table: Path) -> None:
        self._table = table
        self._rows = array("q")
        self._images = array("Q")
        self._patients = array("Q")
        self._splits = array("i")
        self._split_numbers: dict[str, int] = {}

    def add(self, row: int, sample: Sample) -> None:
        """Add the sample of a row."""
        self._rows.append(row)
        self._images.append(_hash(str(sample.image or sample.key)))
        self._patients.append(_hash(sample.patient))
        self._splits.append(self._split_numbers.setdefault(sample.split, len(self._split_numbers)))

    def finish(self) -> None:
        """Raise CorpusError for images in two rows, SplitError for patients in two splits."""
        if not self._rows:
            return
        row_N = np.frombuffer(self._rows, np.int64)
        split_N = np.frombuffer(self._splits, np.intc)
        names = list(self._split_numbers)
        one_P, other_P = _equal_pairs(self._images)
        if len(one_P):
            pairs = (
                f"rows {row_N[one]} and {row_N[other]}"
                for one, other in zip(one_P, other_P, strict=True)
            )
            advice = "keep one row of each, also where its path is spelled in two ways"
            message = (
                f"{self._table} lists an image file twice in "
                f"{_listed(pairs, len(one_P), 'pair')}; {advice}"
            )
            raise CorpusError(message, "conflict", field="image")
        one_P, other_P = _equal_pairs(self._patients)
        leaked_P = split_N[one_P] != split_N[other_P]
        if leaked_P.any():
            one_P = one_P[leaked_P]
            other_P = other_P[leaked_P]
            pairs = (
                f"rows {row_N[one]} ({names[split_N[one]]}) and {row_N[other]} "
                f"({names[split_N[other]]})"
                for one, other in zip(one_P, other_P, strict=True)
            )
            advice = "correct the split column, or leave it out to split by patient hash"
            message = (
                f"{self._table}: splits share patients: "
                f"{_listed(pairs, len(one_P), 'pair')}; {advice}"
            )
            raise SplitError(message, "leak", field="split")


def _hash(text: str) -> int:
    """Return 64 bits: two of a million texts collide with a probability of about 3e-8."""
    return int.from_bytes(
        blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "little"
    )


def _equal_pairs(values: "array[int]") -> tuple[np.ndarray, np.ndarray]:
    """Return positions (one_P, other_P) of equal values, each value with its next occurrence, in
    the order of one_P.
    """
    value_N = np.frombuffer(values, np.uint64)
    order_N = np.argsort(value_N, kind="stable")
    equal_N = value_N[order_N[1:]] == value_N[order_N[:-1]]
    one_P = order_N[:-1][equal_N]
    other_P = order_N[1:][equal_N]
    order_P = np.argsort(one_P)
    return one_P[order_P], other_P[order_P]


def _listed(texts: Iterable[str], count: int, noun: str) -> str:
    """Join the first texts, and count the others."""
    shown = [text for text, _ in zip(texts, range(_SHOWN), strict=False)]
    more = count - len(shown)
    return "; ".join(shown) + (f"; and {more} more {noun}{'s' if more > 1 else ''}" if more else "")


# Counts of the rows of a corpus: read, kept, excluded by a rule, and skipped because they cannot
# be used.

T = TypeVar("T")

IMAGES = "images"
"""Unit of a corpus that lists one image in each row."""
MAX_MESSAGES = 10_000
"""Messages that are kept; further rows are counted only."""


@dataclasses.dataclass(slots=True)
class RowCounts:
    """Rows of a corpus by what became of them. `read` equals `kept` and `left_out` together.

    A corpus counts each row once while it plans; conversion, manifest and `medvl verify` repeat the
    counts.
    """

    unit: str = IMAGES
    """What a row is: images, questions, boxes, documents, ..."""
    read: int = 0
    kept: int = 0
    excluded: Counter[str] = dataclasses.field(default_factory=Counter)
    """Rows left out by an option or a published rule, by reason. No budget limits them."""
    skipped: Counter[str] = dataclasses.field(default_factory=Counter)
    """Rows left out because they cannot be used, by reason. `--max-skipped` limits them."""
    messages: list[tuple[str, str]] = dataclasses.field(default_factory=list, compare=False)
    """Reason and message of skipped rows, where a message names file and row. Not stored in the
    manifest.
    """

    def reading(self, rows: Iterable[T]) -> Iterator[T]:
        """Yield the rows, and count them as read."""
        for row in rows:
            self.read += 1
            yield row

    def exclude(self, reason: str, rows: int = 1) -> None:
        """Count rows as left out by an option or a rule."""
        self.excluded[reason] += rows

    def skip(self, reason: str, rows: int = 1, *, message: str = "") -> None:
        """Count rows as left out because they cannot be used; a message names file, row and
        problem.
        """
        self.skipped[reason] += rows
        if message and len(self.messages) < MAX_MESSAGES:
            self.messages.append((reason, message))

    def describe_skipped(self) -> str:
        """Return the messages of the first skipped rows and the number of the others; "" without
        messages.
        """
        shown = [message for _, message in self.messages[:_SHOWN]]
        more = self.skipped.total() - len(shown)
        return "; ".join([*shown, f"and {more} more"] if shown and more else shown)

    def excluding(self, excluded: Counter[str]) -> "RowCounts":
        """Return the counts after rows that were kept are left out by a further rule."""
        kept = max(self.kept - excluded.total(), 0)
        return dataclasses.replace(self, kept=kept, excluded=self.excluded + excluded)

    @property
    def left_out(self) -> Counter[str]:
        """All rows left out, by reason."""
        return self.excluded + self.skipped

    def __str__(self) -> str:
        """Return one line, such as `read 12 images: kept 9, left out 3 (2 view, 1 duplicate)`."""
        reasons = f" ({listed(self.left_out)})" if self.left_out else ""
        return (
            f"read {self.read} {self.unit}: kept {self.kept}, left out "
            f"{self.left_out.total()}{reasons}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the counts as a manifest stores them; nothing where no row was counted."""
        if not self.read:
            return {}
        skipped = {reason: count for reason, count in sorted(self.skipped.items()) if count}
        return {"unit": self.unit, "read": self.read, "kept": self.kept, "skipped": skipped}

    @classmethod
    def from_json(
        cls, content: Mapping[str, Any], excluded: Mapping[str, int]
    ) -> "RowCounts | None":
        """Return the counts of a manifest, None where it has none."""
        if not content:
            return None
        return cls(
            unit=str(content["unit"]),
            read=int(content["read"]),
            kept=int(content["kept"]),
            excluded=Counter(excluded),
            skipped=Counter(content["skipped"]),
        )


def listed(counts: Mapping[str, int]) -> str:
    """Return counts by reason as text, the most frequent first."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count} {reason}" for reason, count in ordered if count)
