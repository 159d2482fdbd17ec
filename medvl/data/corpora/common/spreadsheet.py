"""Reader of the first sheet of an .xlsx workbook: a ZIP file of XML, read without a spreadsheet library."""

import re
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from xml.etree import ElementTree

from medvl.common.untrusted import InputFolders, parse_xml
from medvl.data.corpora.common.tables import MAX_CELL_CHARACTERS, check_columns, malformed, read_table
from medvl.errors import CorpusError

MAX_SHEET_BYTES = 1 << 27
"""Largest accepted unpacked sheet; LViT's tables have under 2 MB."""
_SHEET, _STRINGS = "xl/worksheets/sheet1.xml", "xl/sharedStrings.xml"
_COLUMN = re.compile(r"([A-Z]{1,3})\d+")


def read_sheet(path: Path, required: Iterable[str], folders: InputFolders) -> Iterator[dict[str, str]]:
    """Yield the rows of the first sheet of an .xlsx file, or of a CSV table, by the names in the first row.

    Empty rows and columns without a name are left out; numbers are text as stored. Raises CorpusError when the file
    cannot be read, is too large, or lacks a column.
    """
    required = tuple(required)
    if path.suffix.lower() != ".xlsx":
        yield from read_table(path, required, folders)
        return
    try:
        with folders.open(path, CorpusError) as file, zipfile.ZipFile(file) as book:
            names = set(book.namelist())
            strings = [_text(item) for item in _parse(book, _STRINGS)] if _STRINGS in names else []
            rows = _rows(_parse(book, _SHEET), strings)
    except FileNotFoundError:
        raise CorpusError(f"{path} does not exist", "not_found") from None
    except (zipfile.BadZipFile, KeyError, IndexError, ValueError, NotImplementedError, RuntimeError) as error:
        raise malformed(path, f"not readable as an .xlsx workbook ({type(error).__name__}); save it again") from error
    except ElementTree.ParseError as error:
        raise malformed(path, "not readable as an .xlsx workbook (XML); save it again") from error
    except CorpusError as error:
        raise error.prefixed(f"{path}: ") from None
    header = {column: name.strip() for column, name in (rows[0] if rows else {}).items() if name.strip()}
    check_columns(path, list(header.values()), required)
    for row in rows[1:]:
        if row:
            yield {name: row.get(column, "") for column, name in header.items()}


def _parse(book: zipfile.ZipFile, name: str) -> ElementTree.Element:
    if book.getinfo(name).file_size > MAX_SHEET_BYTES:  # zipfile reads no more than the size that it states
        raise CorpusError(f"{name} has more than {MAX_SHEET_BYTES} bytes; save it as CSV", "too_large")
    return parse_xml(book.read(name))


def _rows(sheet: ElementTree.Element, strings: list[str]) -> list[dict[str, str]]:
    """Return column letters -> text of each row."""
    rows = []
    for row in sheet.iterfind("{*}sheetData/{*}row"):
        cells: dict[str, str] = {}
        for cell in row:
            match = _COLUMN.fullmatch(cell.get("r", ""))
            if match is None:
                raise ValueError("a cell without a place")
            kind, value = cell.get("t"), cell.find("{*}v")
            text = _text(cell) if kind == "inlineStr" else "" if value is None else value.text or ""
            if kind == "s" and text:
                text = strings[int(text)]
            if len(text) > MAX_CELL_CHARACTERS:
                raise CorpusError(f"a cell of more than {MAX_CELL_CHARACTERS} characters; shorten it", "too_large")
            if text:
                cells[match[1]] = text
        rows.append(cells)
    return rows


def _text(element: ElementTree.Element) -> str:
    """Return the text of a string, which may be divided into runs; phonetic guides are left out."""
    phonetic = {id(part) for guide in element.iterfind(".//{*}rPh") for part in guide.iter()}
    return "".join(part.text or "" for part in element.iter() if part.tag.endswith("}t") and id(part) not in phonetic)
