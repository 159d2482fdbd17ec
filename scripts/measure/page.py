"""The rows of PERFORMANCE.md that a call measured."""

import re
from collections.abc import Iterable, Mapping

from measure.line import Device, Line
from measure.records import Record, cells_of

SECTIONS: dict[Device, str] = {"cpu": "## On a CPU", "gpu": "## On a GPU"}
_UNMEASURED = re.compile(r"^Not measured: (.*)\.$", re.MULTILINE)


def with_rows(text: str, lines: Iterable[Line], records: Mapping[str, Record]) -> str:
    """Return the page with the rows of the lines that have a record; all other rows stay.

    A row is found by its first cell, where an asterisk does not count, and a new row becomes the
    last one of its table. Raises ValueError where a section of `SECTIONS` has no table.
    """
    for line in lines:
        record = records.get(line.name)
        if record is None or record.report is None:
            continue
        for row in line.rows:
            if (cells := cells_of(row, record.report)) is not None:
                whole = [row.title, row.target, *cells, f"`{line.command}`"]
                text = _with_row(text, SECTIONS[line.device], whole)
                text = _as_measured(text, line.name)
    return text


def _with_row(text: str, section: str, cells: list[str]) -> str:
    """Return the text with one row of the first table of a section."""
    every = text.split("\n")
    inside = every.index(section) if section in every else len(every)
    tables = [place for place in range(inside, len(every)) if every[place].startswith("|---")]
    if not tables:
        raise ValueError(f"expected a table below {section!r}, got none")
    first = end = tables[0] + 1
    while end < len(every) and every[end].startswith("|"):
        end += 1
    titles = [line.split("|")[1].strip().rstrip("*") for line in every[first:end]]
    found = titles.index(cells[0]) if cells[0] in titles else None
    place = end if found is None else first + found
    filled = "| " + " | ".join(cells).replace("|  |", "| |").replace("|  |", "| |") + " |"
    every[place : place + (found is not None)] = [filled]
    return "\n".join(every)


def _as_measured(text: str, name: str) -> str:
    """Return the text without a name in its sentence of unmeasured lines."""

    def without(found: re.Match[str]) -> str:
        left = [each for each in found[1].split(", ") if each != f"`{name}`"]
        return f"Not measured: {', '.join(left)}." if left else ""

    return _UNMEASURED.sub(without, text)
