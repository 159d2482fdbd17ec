"""Readers of tables that are no CSV, within limits of memory: rows of Parquet files, the first
sheet of an .xlsx workbook, and the entries of a large JSON object.
"""

import dataclasses
import json
import os
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TextIO
from xml.etree.ElementTree import ParseError

from medvl.common.process import memory_limited
from medvl.common.untrusted import InputFolders, parse_json
from medvl.data.corpora.common.parquet_pages import map_file, read_groups
from medvl.data.corpora.common.tables import (
    FREE_BYTES,
    MAX_CELL_CHARACTERS,
    MAX_LINE_CHARACTERS,
    MAX_RATIO,
    check_columns,
    malformed,
    open_text,
    read_table,
)
from medvl.errors import CorpusError

_OVERHEAD = 1 << 16  # bytes of pages and dictionaries of a column in a group of rows
_BUFFER = 1 << 20  # bytes of a column that are read from the file at a time


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ParquetLimits:
    """Limits of reading, so that one cell or a false footer cannot fill the memory."""

    rows: int
    """Rows that are decoded at once."""
    memory: int
    """Bytes that decoding them may allocate."""
    group: int
    """Bytes of a column in a group of rows, as the file states them."""
    cell: int
    """Bytes that a cell may have on average in a group of rows."""
    advice: str
    """What to do about a file above the limits."""

    def check_group(self, path: Path, size: int, rows: int) -> None:
        """Raise CorpusError where a column of a group of rows is above the limits."""
        limit = min(self.cell * rows + _OVERHEAD, self.group)
        if size > limit:
            raise CorpusError(
                f"{path}: expected at most {limit >> 20} MB in a column of a group of {rows} "
                f"rows, got {size >> 20} MB; {self.advice}",
                "too_large",
            )


def read_parquet(
    path: Path,
    required: Sequence[str],
    folders: InputFolders,
    limits: ParquetLimits,
    *,
    bytes_column: str | None = None,
    check_schema: Callable[[Any], None] | None = None,
    check_batch: Callable[[Any, int], None] | None = None,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (row number, counted from 1; row) of a Parquet file; other columns are not read.

    Args:
        path: the file.
        required: names of the columns.
        folders: folders that the file must be in.
        limits: limits of memory.
        bytes_column: required column of bytes, or of a struct or list with bytes, which are not
            decoded: of a struct or list, only the field `path` is in the rows.
        check_schema: raises for columns of a wrong type; gets the file's `pyarrow.Schema`.
        check_batch: raises for rows that take too much memory as Python objects; gets a
            `pyarrow.RecordBatch` and the number of the row before it.

    Raises CorpusError when the file does not exist, is damaged or above the limits, or lacks a
    column or has it twice.
    """
    import pyarrow.parquet

    number = 0
    names = sorted(set(required))
    try:
        with folders.open(path, CorpusError) as opened:
            file = pyarrow.parquet.ParquetFile(opened, pre_buffer=False, buffer_size=_BUFFER)
            check_columns(path, file.schema_arrow.names, required)
            for group in read_groups(map_file(opened)):
                for chunk in group.chunks:
                    if chunk.path[0] in names:
                        limits.check_group(path, chunk.unpacked, group.rows)
            if check_schema is not None:
                check_schema(file.schema_arrow)
            # One thread: the stacks of others would count towards the memory limit.
            columns = _without_bytes(file.schema, names, bytes_column)
            batches = file.iter_batches(limits.rows, columns=columns, use_threads=False)
            while (batch := _next_batch(batches, limits.memory)) is not None:
                if check_batch is not None:
                    check_batch(batch, number)
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except FileNotFoundError:
        raise CorpusError(f"{path} does not exist", "not_found") from None
    except MemoryError:
        limit = f"at most {limits.memory >> 20} MB to decode {limits.rows} rows"
        raise CorpusError(
            f"{path}, after row {number}: expected {limit}; {limits.advice}", "too_large"
        ) from None
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise CorpusError(
            f"{path} cannot be read as Parquet ({type(error).__name__})", "malformed"
        ) from error


def _without_bytes(schema: Any, names: Sequence[str], bytes_column: str | None) -> list[str]:
    """Return the columns to decode: `names`, and of `bytes_column` the paths."""
    leaves = [schema.column(number).path for number in range(len(schema))]
    paths = [
        path for path in leaves if path.startswith(f"{bytes_column}.") and path.endswith(".path")
    ]
    return [name for name in names if name != bytes_column] + paths


def _next_batch(batches: Iterator[Any], memory: int) -> Any:
    """Return the next batch of rows, None at the end. Raises MemoryError where decoding it takes
    too much memory.
    """
    with memory_limited(memory):
        return next(batches, None)


def check_text_lengths(path: Path, batch: Any, number: int, longest: int) -> None:
    """Raise CorpusError where a text of a `pyarrow.RecordBatch` has more than `longest` bytes.

    A text that rows share would be copied for each of them. `number` is the row before the batch.
    """
    import pyarrow.compute

    for name in batch.schema.names:
        if is_text(batch.schema.field(name).type):
            column = batch.column(name)
            lengths = pyarrow.compute.binary_length(getattr(column, "dictionary", column))
            if (pyarrow.compute.max(lengths).as_py() or 0) > longest:
                limit = f"at most {longest} bytes in a text of {name}"
                raise CorpusError(f"{path}, after row {number}: expected {limit}", "too_large")


def is_text(kind: Any) -> bool:
    """Return whether an Arrow type holds texts, plain or dictionary-encoded."""
    from pyarrow import types

    value = kind.value_type if types.is_dictionary(kind) else kind
    return bool(types.is_string(value) or types.is_large_string(value))


def entry_type(kind: Any) -> Any:
    """Return the type of a list's entries; other types as they are."""
    from pyarrow import types

    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return kind.value_type if is_list else kind


def has_bytes(kind: Any) -> bool:
    """Return whether an Arrow type holds bytes, in a struct or a list or plain."""
    from pyarrow import types

    kind = entry_type(kind)
    if types.is_struct(kind):
        place = kind.get_field_index("bytes")
        return bool(place >= 0 and is_binary(kind.field(place).type))
    return is_binary(kind)


def is_binary(kind: Any) -> bool:
    """Return whether an Arrow type is that of bytes."""
    from pyarrow import types

    return bool(types.is_binary(kind) or types.is_large_binary(kind))


MAX_UNPACKED_BYTES = 1 << 26
"""Largest accepted unpacked workbook; LViT's tables have under 2 MB."""
MAX_ROWS = 1 << 20
MAX_COLUMNS = 256
"""Rows of the largest sheet that spreadsheets write; columns that are read."""
FREE_CELLS = 1 << 17
"""Cells with content that any workbook may have: two seconds of reading. A larger one may have one
for every two of its bytes; spreadsheets write five bytes and more for a cell.
"""
TAGS_A_CELL = 10
"""Tags that a workbook may have for each of these cells: a cell with a shared string has eight.
Empty cells and unknown elements take as long to read as others.
"""


def read_sheet(
    path: Path, required: Iterable[str], folders: InputFolders
) -> Iterator[dict[str, str]]:
    """Yield the rows of the first sheet of an .xlsx file, or of a CSV table, by the names in the
    first row.

    Empty rows and columns without a name are left out. Raises CorpusError when the file cannot be
    read, is too large, or lacks a column.
    """
    required = tuple(required)
    if path.suffix.lower() != ".xlsx":
        yield from read_table(path, required, folders)
        return
    try:
        with folders.open(path, CorpusError) as file:
            _check_size(path, file)
            rows = list(_rows(path, file))
    except FileNotFoundError:
        raise CorpusError(f"{path} does not exist", "not_found") from None
    except (zipfile.BadZipFile, ParseError, *_FAILURES) as error:
        raise malformed(
            path, f"not readable as an .xlsx workbook ({type(error).__name__}); save it again"
        ) from error
    header = {
        column: name.strip() for column, name in (rows[0] if rows else {}).items() if name.strip()
    }
    check_columns(path, list(header.values()), required)
    for row in rows[1:]:
        if max(map(len, row.values())) > MAX_CELL_CHARACTERS:
            message = f"{path}: a cell of more than {MAX_CELL_CHARACTERS} characters; shorten it"
            raise CorpusError(message, "too_large")
        yield {name: row.get(column, "") for column, name in header.items()}


_FAILURES = (
    AttributeError,
    IndexError,
    KeyError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Errors of openpyxl for damaged workbooks; those of defusedxml are ValueErrors."""


def _check_size(path: Path, file: BinaryIO) -> None:
    # zipfile reads no more of a part than the size that it states
    with zipfile.ZipFile(file) as book:
        parts = book.infolist()
        size = sum(part.file_size for part in parts)
        limit = min(
            MAX_UNPACKED_BYTES, FREE_BYTES // 2 + MAX_RATIO * os.fstat(file.fileno()).st_size
        )
        if size > limit:
            message = (
                f"{path} has {size} bytes when unpacked, over the limit of {limit} for "
                f"its size; save it as CSV"
            )
            raise CorpusError(message, "too_large")
        tags = sum(book.read(part).count(b"<") for part in parts)
    most = TAGS_A_CELL * _most_cells(file)
    if tags > most:
        raise CorpusError(
            f"{path} has more than {most} tags of XML, too many for its size; save it as CSV",
            "too_large",
        )


def _most_cells(file: BinaryIO) -> int:
    return max(FREE_CELLS, os.fstat(file.fileno()).st_size // 2)


def _rows(path: Path, file: BinaryIO) -> Iterator[dict[int, str]]:
    """Yield number of the column -> text of each row that is not empty."""
    import openpyxl

    book: Any = openpyxl.load_workbook(file, read_only=True, data_only=True, keep_links=False)
    sheet = book.worksheets[0]
    sheet.reset_dimensions()  # the file states them, and may be wrong
    cells = 0
    most = _most_cells(file)
    for row in sheet.iter_rows(max_row=MAX_ROWS, max_col=MAX_COLUMNS, values_only=True):
        # before a row with a large number, openpyxl yields empty ones
        if row.count(None) < len(row):
            texts = {
                column: str(value) for column, value in enumerate(row) if value not in (None, "")
            }
            cells += len(texts)
            if cells > most:
                raise CorpusError(
                    f"{path} has more than {most} cells, too many for its size; save it as CSV",
                    "too_large",
                )
            yield from [texts] if texts else []


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
