"""Reader of the first sheet of an .xlsx workbook."""

import os
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO
from xml.etree.ElementTree import ParseError

from medvl.common.untrusted import InputFolders
from medvl.data.corpora.common.tables import (
    FREE_BYTES,
    MAX_CELL_CHARACTERS,
    MAX_RATIO,
    check_columns,
    malformed,
    read_table,
)
from medvl.errors import CorpusError

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
    with zipfile.ZipFile(
        file
    ) as book:  # zipfile reads no more of a part than the size that it states
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
        if row.count(None) < len(
            row
        ):  # before a row with a large number, openpyxl yields empty ones
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
