"""CSV cells that a spreadsheet would compute are shown as text."""

import csv
import io

import pytest

from medvl.common.text_files import as_shown, csv_text

HOSTILE = [
    "=1+1",
    '=HYPERLINK("http://example.org","open")',
    "+1+1",
    "-1+1",
    "-cmd|' /C calc'!A0",
    "@SUM(A1)",
    "\t=1+1",
    "\r=1+1",
    "\n=1+1",
    "\ttext",
    "  =1+1",
    "\u00a0=1+1",
    "\u200b=1+1",
    "\ufeff=1+1",
    "\x00=1+1",
    "\uff1d1+1",
    "\uff0b1",
    "\uff0d1+1",
    "\uff20SUM(A1)",
    "\ufe661+1",
    "-0.5 [-0.6, -0.4]",
    "=",
]
HARMLESS = [
    "",
    "0.5",
    "-0.5",
    "+3",
    "1e-05",
    "-1.5E+10",
    "-12%",
    "nan",
    "-inf",
    "a=b",
    "Edema",
    "a-b",
    "–",
    "'",
    " x",
    "−5",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_a_cell_that_would_be_computed_is_text(text: str) -> None:
    assert as_shown(text) == f"'{text}"


@pytest.mark.parametrize("text", HARMLESS)
def test_other_cells_and_numbers_are_unchanged(text: str) -> None:
    assert as_shown(text) == text


def test_rows() -> None:
    rows = [["image", "=a"], ["-x.png", -0.5], ["b, c.png", None]]
    assert list(csv.reader(io.StringIO(csv_text(rows)))) == [
        ["image", "'=a"],
        ["'-x.png", "-0.5"],
        ["b, c.png", ""],
    ]
