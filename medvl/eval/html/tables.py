"""Tables of the pages: cells, axes of their interval bars, and files for papers (CSV, Markdown,
LaTeX).
"""

import dataclasses
import math
import re
from collections.abc import Sequence

from medvl.common.text_files import csv_text
from medvl.eval.core.metric_rows import MetricRow
from medvl.eval.core.results import format_value

Interval = tuple[float, float, float]
"""(low, value, high)."""
_STEPS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0)
_MARGIN = 0.04  # space on both sides of the bars, as a share of the axis
_LATEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "–": "--",
    "▲": r"$\uparrow$",
    "▼": r"$\downarrow$",
    "−": "$-$",
    "×": r"$\times$",
    "≥": r"$\geq$",
    "→": r"$\to$",
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """Table cell: text, and optionally a number with its interval."""

    text: str
    small: str = ""
    """Small text after the text: an interval."""
    interval: Interval | None = None
    """The number with its interval, for the bar and for files; NaN ends for a number without an
    interval.
    """
    bar: bool = False
    """Draw a bar, on an axis shared by the column."""
    reference: float | None = None
    """Chance level, drawn as a tick in the bar."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Table whose first column names the row; the first `strong_rows` rows are summaries."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell | str]]
    caption: str = ""
    strong_rows: int = 0
    one_axis: bool | frozenset[int] = False
    """Draw the bars of all columns on one axis, to compare columns; or those of some (numbers of
    columns after the first) on one, and the others on another.
    """
    kind: str = "table"

    def axes(self) -> list[tuple[float, float] | None]:
        """Return (start, end) of the axis of each column after the first; None for a column
        without bars.
        """
        columns = [
            [row[place] for row in self.rows if place < len(row)]
            for place in range(1, max(map(len, self.rows), default=1))
        ]
        bars = [
            [cell for cell in column if isinstance(cell, Cell) and cell.bar] for column in columns
        ]
        if self.one_axis is False:
            return [_axis(column) for column in bars]
        first = frozenset(range(len(bars))) if self.one_axis is True else self.one_axis
        groups = [number in first for number in range(len(bars))]
        shared = {
            group: _axis(
                [
                    cell
                    for column, own in zip(bars, groups, strict=True)
                    if own == group
                    for cell in column
                ]
            )
            for group in (True, False)
        }
        return [
            shared[group] if column else None for column, group in zip(bars, groups, strict=True)
        ]

    def words(self) -> list[bool]:
        """Return whether each column holds words, which are aligned to the left, and no numbers."""
        cells = [
            [cell for cell in column if _text(cell) not in ("", "–")] for column in _columns(self)
        ]
        return [bool(column) and all(_is_word(cell) for cell in column) for column in cells]


def metric_cell(
    row: MetricRow | None, *, reference: float | None = None, bar: bool = False
) -> Cell:
    """Return the cell of a metric with its interval; a dash without a value."""
    text, _, interval = format_value(row).partition(" ")
    if row is None or text == "-":
        return Cell(text="–")
    ends = (row.low, row.value, row.high)
    return Cell(
        text=text, small=interval, interval=ends, bar=bar and bool(interval), reference=reference
    )


def _is_word(cell: Cell | str) -> bool:
    return (isinstance(cell, str) or cell.interval is None) and _text(cell)[0].isalpha()


def _axis(cells: Sequence[Cell]) -> tuple[float, float] | None:
    """Return round ends that hold all intervals and references, within 0 and 1 if these are."""
    numbers = [
        number
        for cell in cells
        if cell.interval
        for number in cell.interval
        if not math.isnan(number)
    ]
    if not numbers:
        return None
    numbers += [cell.reference for cell in cells if cell.reference is not None]
    low = min(numbers)
    high = max(numbers)
    margin = _MARGIN * (high - low or 1)
    step = next(
        (step for step in _STEPS if (high - low) / step <= 10),
        10.0 ** math.ceil(math.log10(high - low or 1)),
    )
    start = math.floor((low - margin) / step) * step
    end = math.ceil((high + margin) / step) * step
    return max(start, 0.0) if low >= 0 else start, min(end, 1.0) if high <= 1 else end


def as_csv(table: Table) -> str:
    """Return the table as CSV. A column of numbers with intervals becomes three: value, low and
    high, in full.
    """
    lines = _complete(table)
    numeric = [
        any(isinstance(cell, Cell) and cell.interval for cell in column)
        for column in zip(*lines, strict=True)
    ]
    header = zip(table.columns, numeric or [False] * len(table.columns), strict=True)
    names = [
        [name or "name", *([f"{name} low", f"{name} high"] if three else [])]
        for name, three in header
    ]
    rows = [[name for group in names for name in group]]
    for line in lines:
        fields: list[str] = []
        for cell, three in zip(line, numeric, strict=True):
            interval = cell.interval if isinstance(cell, Cell) else None
            if interval is not None:
                fields += [_plain(number) for number in (interval[1], interval[0], interval[2])]
            else:
                text = _text(cell).replace("–", "") if three else _text(cell)
                fields += [text, *([""] * (2 * three))]
        rows.append(fields)
    return csv_text(rows)


def as_markdown(table: Table) -> str:
    """Return the table in Markdown, with its title and caption."""
    header = [_cell_markdown(column) or " " for column in table.columns]
    lines = [header, ["---", *("---" if words else "---:" for words in table.words()[1:])]]
    for number, line in enumerate(_complete(table)):
        cells = [_cell_markdown(_text(cell)) for cell in line]
        lines.append(
            [f"**{cell}**" if number < table.strong_rows and cell else cell for cell in cells]
        )
    body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"**{table.title}.** {table.caption}".rstrip() + f"\n\n{body}\n"


def as_text(table: Table, width: int = 120) -> str:
    """Return the table for a terminal: title, caption, and aligned columns; those beyond the
    width in further parts.
    """
    columns = [
        [column, *map(_text, cells)]
        for column, cells in zip(table.columns, _columns(table), strict=True)
    ]
    wide = [max(map(len, column)) for column in columns]  # the first column begins every part
    parts: list[list[int]] = [[]]
    for number in range(1, len(columns)):
        used = wide[0] + sum(wide[other] + 2 for other in [*parts[-1], number])
        if parts[-1] and used > width:
            parts.append([])
        parts[-1].append(number)
    words = table.words()
    texts = [f"{table.title}. {table.caption}".rstrip()]
    for part in parts:
        shown = [
            _aligned(columns[number], left=number == 0 or words[number]) for number in (0, *part)
        ]
        texts.append("\n".join("  ".join(line).rstrip() for line in zip(*shown, strict=True)))
    return "\n\n".join(texts) + "\n"


def _aligned(cells: Sequence[str], *, left: bool) -> list[str]:
    width = max(map(len, cells))
    return [cell.ljust(width) if left else cell.rjust(width) for cell in cells]


def as_latex(table: Table) -> str:
    """Return the table as a LaTeX float with the rules of the package booktabs."""
    lines = []
    for number, line in enumerate(_complete(table)):
        cells = [_cell_latex(cell) for cell in line]
        lines.append(
            [
                rf"\textbf{{{cell}}}" if number < table.strong_rows and cell else cell
                for cell in cells
            ]
        )
    rows = [" & ".join(line) + r" \\" for line in lines]
    if 0 < table.strong_rows < len(rows):
        rows.insert(table.strong_rows, r"\midrule")
    alignment = "l" + "".join("l" if words else "r" for words in table.words()[1:])
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{_latex(f'{table.title}. {table.caption}'.rstrip())}}}",
            rf"\begin{{tabular}}{{{alignment}}}",
            r"\toprule",
            " & ".join(map(_latex, table.columns)) + r" \\",
            r"\midrule",
            *rows,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def _columns(table: Table) -> list[tuple[Cell | str, ...]]:
    return list(zip(*_complete(table), strict=True)) or [() for _ in table.columns]


def _complete(table: Table) -> list[list[Cell | str]]:
    return [[*row, *[""] * (len(table.columns) - len(row))] for row in table.rows]


def _text(cell: Cell | str) -> str:
    return cell if isinstance(cell, str) else f"{cell.text} {cell.small}".strip()


def _plain(number: float) -> str:
    return "" if math.isnan(number) else f"{number:.6g}"


def _cell_markdown(text: str) -> str:
    return re.sub(r"([|*_`<>\[\]\\])", r"\\\1", text.replace("\n", " "))


def _cell_latex(cell: Cell | str) -> str:
    if isinstance(cell, str):
        return _latex(cell)
    return _latex(cell.text) + (rf" {{\scriptsize {_latex(cell.small)}}}" if cell.small else "")


def _latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text.replace("\n", " "))
