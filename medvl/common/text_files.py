"""Text files of users: lines, JSON lines and CSV, with errors that name the file and the line.

Files are UTF-8, with or without a byte-order mark, or UTF-16 or UTF-32 with one, as spreadsheets
and editors save them. Other encodings are refused with the line and the way to convert it: a wrong
guess would change words. Lines end with a line feed, a carriage return, or both; other separators
of Unicode are characters of their line.
"""

import codecs
import csv
import io
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from medvl.common.untrusted import ANYWHERE, parse_json, read_limited
from medvl.errors import MedvlError

MAX_TEXT_BYTES = 1 << 32
"""Largest text file that is read at once unless its caller gives another limit."""
_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),  # begins with the mark of UTF-16
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_LINE_END = re.compile(r"\r\n|\r|\n")


def read_text(
    path: Path,
    kind: type[MedvlError],
    *,
    field: str | None = None,
    limit: int = MAX_TEXT_BYTES,
    what: str = "a file",
) -> str:
    """Return the text of a file, with line feeds as the ends of its lines.

    Args:
        path: the file.
        kind: type of the errors.
        field: option that names the file, for the errors.
        limit: largest size in bytes.
        what: what the file is expected to be, for the error where it does not exist.

    Raises `kind` with the code "not_found", "not_a_file", "unreadable", "too_large" or "malformed"
    (encoding).
    """
    try:
        with ANYWHERE.open(path, kind) as file:
            data = read_limited(file, limit, kind)
    except FileNotFoundError:
        raise kind(f"{path} does not exist: give {what}", "not_found", field=field) from None
    except MedvlError as error:
        raise kind(str(error), error.code, field=field) from None
    return _LINE_END.sub("\n", decode_text(data, path, kind, field=field))


def decode_text(
    data: bytes, path: Path, kind: type[MedvlError], *, field: str | None = None
) -> str:
    """Return the text of a file's content. Raises `kind` with the code "malformed", naming the
    line.
    """
    mark, encoding = next(
        ((mark, name) for mark, name in _MARKS if data.startswith(mark)), (b"", "utf-8")
    )
    content = data[len(mark) :]
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        before = content[: error.start].decode(encoding, errors="replace")
        where = f"{path}, line {len(_LINE_END.findall(before)) + 1}"
        name = encoding.upper().removesuffix("-LE").removesuffix("-BE")
        advice = (
            "save it as UTF-8"
            if mark
            else "save it as UTF-8, for example with iconv -f WINDOWS-1252 -t UTF-8"
        )
        raise kind(f"{where}: not {name} text; {advice}", "malformed", field=field) from None
    if "\0" in text:
        where = f"{path}, line {len(_LINE_END.findall(text[: text.index(chr(0))])) + 1}"
        message = (
            f"{where}: NUL bytes: a binary file, or UTF-16 without a byte-order mark; "
            f"save it as UTF-8"
        )
        raise kind(message, "malformed", field=field)
    return text


def read_lines(
    path: Path, kind: type[MedvlError], *, field: str | None = None, what: str = "a file"
) -> list[str]:
    """Return the lines of a text file without their ends, also the blank ones. Raises as
    `read_text`.
    """
    lines = read_text(path, kind, field=field, what=what).split("\n")
    return lines[:-1] if lines[-1] == "" else lines


def read_json_objects(
    path: Path,
    kind: type[MedvlError],
    required: Mapping[str, type] | Sequence[str],
    *,
    field: str | None = None,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield ("FILE, line N", object) of the lines of a file of JSON lines that are not blank.

    Args:
        path: the file.
        kind: type of the errors.
        required: fields that each object must have, with their type, or any.
        field: option that names the file, for the errors; a missing field or one of another type is
            named itself.

    Raises `kind` as `read_text`, "malformed" for a line that is not a JSON object or lacks a field,
    and "wrong_type".
    """
    expected = " and ".join(required)
    types = required if isinstance(required, Mapping) else {}
    what = f"a file with one JSON object with {expected} per line"
    for number, line in enumerate(read_lines(path, kind, field=field, what=what), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = parse_json(line)
        except ValueError as error:
            advice = (
                "remove the comma at its end; each line is one object" if _has_comma(line) else ""
            )
            message = f"{where}: expected an object with {expected}, got no JSON ({_reason(error)})"
            raise kind(
                "; ".join(filter(None, (message, advice))), "malformed", field=field
            ) from None
        if not isinstance(row, dict):
            advice = "write one object per line, without brackets around them"
            raise kind(
                f"{where}: expected an object with {expected}; {advice}", "malformed", field=field
            )
        missing = [name for name in required if name not in row]
        if missing:
            message = f"{where}: expected an object with {expected}, got none with {missing[0]}"
            raise kind(message, "malformed", field=missing[0])
        for name, field_type in types.items():
            if not isinstance(row[name], field_type):
                message = (
                    f"{where}: {name} must be {_TYPES.get(field_type, field_type.__name__)}, got "
                    f"another type"
                )
                raise kind(message, "wrong_type", field=name)
        yield where, row


_TYPES: Mapping[type, str] = {str: "a string", list: "a list", dict: "an object"}


def _has_comma(line: str) -> bool:
    return line.rstrip().endswith(",")


def _reason(error: ValueError) -> str:
    """Return why a line is no JSON, without its content."""
    return str(getattr(error, "msg", None) or error)


def read_csv_rows(
    path: Path, kind: type[MedvlError], *, field: str | None = None
) -> list[dict[str, str]]:
    """Return the rows of a CSV file with a header; cells that a short row lacks are "".

    Raises `kind` as `read_text`, and "malformed" for a row with more cells than the header, a
    repeated column, or quotes that are not closed.
    """
    lines = read_text(path, kind, field=field, what="a CSV file with a header").split("\n")
    reader = csv.reader((f"{line}\n" for line in lines), strict=True)
    columns: list[str] = []
    rows = []
    try:
        for cells in reader:
            if len(cells) < 2 and not "".join(cells).strip():
                continue  # a blank line
            if not columns:
                columns = [cell.strip() for cell in cells]
                duplicates = sorted(
                    name for name in set(columns) if name and columns.count(name) > 1
                )
                if duplicates:
                    raise kind(
                        f"{path}: the column {duplicates[0]} is there twice",
                        "malformed",
                        field=field,
                    )
                continue
            if len(cells) > len(columns):
                message = (
                    f"{path}, line {reader.line_num}: more cells than the header; quote "
                    f"texts with commas"
                )
                raise kind(message, "malformed", field=field)
            padded = [*cells, *[""] * (len(columns) - len(cells))]
            rows.append({name: cell for name, cell in zip(columns, padded, strict=True) if name})
    except csv.Error as error:
        message = f"{path}, line {reader.line_num}: not readable as a CSV table ({error})"
        raise kind(message, "malformed", field=field) from None
    return rows


# CSV files for people: cells that a spreadsheet would compute are written so that it shows them
# as text.
#
# A spreadsheet evaluates a cell that begins with `=`, `+`, `-` or `@`, also after blanks, a tab
# or a return, and in the full-width forms of Unicode. Such texts get an apostrophe in front;
# numbers stay numbers.

_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?%?|[+-]?(?:inf|nan)", re.ASCII)
_FORMULA = frozenset("=+-@")
_CONTROL = frozenset("\t\r\n")


def csv_text(rows: Iterable[Iterable[object]]) -> str:
    """Return rows as CSV with line feeds, each text by `as_shown`; numbers and None are written
    as by `csv`.
    """
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerows(
        [as_shown(cell) if isinstance(cell, str) else cell for cell in row] for row in rows
    )
    return file.getvalue()


def as_shown(text: str) -> str:
    """Return a text with an apostrophe in front if a spreadsheet would compute it."""
    if _NUMBER.fullmatch(text):
        return text
    for letter in text:
        if letter in _CONTROL or unicodedata.normalize("NFKC", letter) in _FORMULA:
            return f"'{text}"
        # blanks, also those of no width
        if not (letter.isspace() or unicodedata.category(letter) in ("Cc", "Cf")):
            return text
    return text
