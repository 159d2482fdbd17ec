"""Tables as spreadsheets, databases and hands write them, and tables that would take minutes or
all memory.
"""

import gzip
import io
import zipfile
from collections.abc import Mapping

HEADER = ("image", "patient", "age", "effusion", "text")
ROWS = (
    ("a.png", "7", "65,5", "1,0", "Größe normal.\nKein Erguss."),
    ("b.png", "8", "44", "0", 'Text with "quotes"; and, separators'),
    ("c.png", "9", "", "", "Plain"),
)
VALUES = [(65, 1, ROWS[0][4]), (44, 0, ROWS[1][4]), (None, None, ROWS[2][4])]
"""Age, label and text of each row."""


def rows_of(separator: str, end: str = "\r\n", trailing: str = "", pad: str = "") -> str:
    """Return the table with each cell quoted."""
    lines = [separator.join(f"{pad}{name}" for name in HEADER)]
    lines += [separator.join('"' + cell.replace('"', '""') + '"' for cell in row) for row in ROWS]
    return "".join(line + trailing + end for line in lines)


READ: Mapping[str, bytes] = {
    "of Excel in Europe": rows_of(";").encode("utf-8-sig"),
    "with a separator line": ("sep=;\r\n" + rows_of(";")).encode(),
    "with a quoted separator line": ('"sep=|"\n' + rows_of("|", "\n")).encode(),
    "Unicode text of Excel": rows_of("\t").encode("utf-16"),
    "big-endian": b"\xfe\xff" + rows_of("\t").encode("utf-16-be"),
    "tabs": rows_of("\t", "\n").encode(),
    "of an old Mac": rows_of(",", "\r").replace("\nKein", "\nKein").encode(),
    "empty columns at the end": rows_of(";", trailing=";;").encode(),
    "blanks in the header": rows_of(",", pad=" ").encode(),
    "blank lines": ("\n\n" + rows_of(",", "\n").replace('"c.png"', '\n"c.png"') + "\n\n").encode(),
    "bars": rows_of("|").encode(),
    "a column twice that is not read": rows_of(",").replace("text\r\n",
    "text,x,x\r\n").replace('"\r\n', '",1,2\r\n').encode(),
}  # fmt: skip
"""Name -> bytes of a CSV table with the rows above."""

PLAIN = "image,patient,age,effusion,text\na.png,7,65,1,Text\n"
REFUSED: Mapping[str, tuple[bytes, str]] = {
    "Windows-1252": (rows_of(";").encode("cp1252"), "iconv -f WINDOWS-1252"),
    "UTF-16 without a mark": (PLAIN.encode("utf-16-le"), "iconv -f UTF-16LE"),
    "UTF-32": (PLAIN.encode("utf-32"), "not UTF-8"),
    "cut in UTF-16": (rows_of("\t").encode("utf-16")[:-3], "UTF-16"),
    "a title above": (
        ("Export of 2020-01-02,,,,\n" + PLAIN).encode(),
        "column names are in line 2",
    ),
    "a title and a blank line": (("Export\n\n;;\n" + PLAIN).encode(), "column names are in line 4"),
    "a row too short": (
        PLAIN.encode() + b"b.png,8,44\n",
        "line 3: expected 5 fields as in the header, got 3",
    ),
    "a row too long": (
        PLAIN.encode() + b"b.png,8,44,0,a,b\n",
        "line 3: expected 5 fields as in the header, got 6",
    ),
    "an open quote": (PLAIN.encode() + b'b.png,8,44,0,"a\nc.png,9,44,0,b\n', "close each quote"),
    "a column twice": (PLAIN.replace("age", "patient").encode(), "patient 2 times"),
    "no header": (PLAIN.partition("\n")[2].encode(), "none of the columns"),
    "nothing": (b"", "lacks the columns"),
    "many columns": (
        b"image,patient,age,effusion,text" + b",x" * 20_000 + b"\n",
        "at most 16384 columns",
    ),
    "an endless row": (PLAIN.encode() + b'"x\n",' * 3_500_000, "a row of 16777216"),
}
"""Name -> bytes of a CSV table, and a part of the message."""


def packed_rows(rows: int) -> bytes:
    """Return a gzip file of rows that are all the same: 100 times smaller and more."""
    return gzip.compress(PLAIN.partition("\n")[0].encode() + b"\n" + b"a.png,7,65,1,x\n" * rows)


JSON_REFUSED: Mapping[str, tuple[bytes, str]] = {
    "a key twice": (
        b'{"image": "a.png", "patient": 1, "patient": 2, "text": "x"}\n',
        "'patient' twice",
    ),
    "beyond float64": (
        b'{"image": "a.png", "patient": 1, "age": 1e400, "text": "x"}\n',
        "beyond the range",
    ),
    "NaN": (b'{"image": "a.png", "patient": 1, "age": NaN, "text": "x"}\n', "write null"),
    "Infinity": (
        b'{"image": "a.png", "patient": 1, "age": -Infinity, "text": "x"}\n',
        "write null",
    ),
}


def workbook(rows: str, strings: str = "") -> bytes:
    """Return a workbook whose only sheet has these rows in XML."""
    main = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
    office = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
    package = "http://schemas.openxmlformats.org/package/2006"
    kind = "application/vnd.openxmlformats-officedocument.spreadsheetml"
    parts = {
        "[Content_Types].xml": f'<Types xmlns="{package}/content-types"><Default Extension="rels" '
        'ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
        f'<Override PartName="/xl/workbook.xml" ContentType="{kind}.sheet.main+xml"/>'
        f'<Override PartName="/xl/worksheets/sheet1.xml" '
        f'ContentType="{kind}.worksheet+xml"/></Types>',
        "_rels/.rels": f'<Relationships xmlns="{package}/relationships"><Relationship Id="rId1" '
        f'Type="{office}/officeDocument" Target="xl/workbook.xml"/></Relationships>',
        "xl/workbook.xml": f'<workbook xmlns="{main}" xmlns:r="{office}"><sheets>'
        '<sheet name="a" sheetId="1" r:id="rId1"/></sheets></workbook>',
        "xl/_rels/workbook.xml.rels": f"<Relationships "
        f'xmlns="{package}/relationships"><Relationship Id="rId1" '
        f'Type="{office}/worksheet" Target="worksheets/sheet1.xml"/></Relationships>',
        "xl/worksheets/sheet1.xml": f'<worksheet xmlns="{main}"><dimension ref="A1:XFD1048576"/>'
        f"<sheetData>{rows}</sheetData></worksheet>",
    }
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in parts.items():
            archive.writestr(name, content + strings)
    return file.getvalue()


def row(number: int, *cells: str) -> str:
    """Return a row of a sheet in XML."""
    texts = "".join(f'<c t="inlineStr"><is><t>{cell}</t></is></c>' for cell in cells)
    return f'<row r="{number}">{texts}</row>'


SPARSE = workbook(row(1, "Image", "Description") + row(1_048_576, "a.png", "A text."))
"""Two rows, a million apart."""
MANY_CELLS = workbook(
    row(1, "Image", "Description") + "".join(row(n, *"x" * 200) for n in range(2, 1400))
)
MANY_BYTES = workbook(row(1, "Image", "Description") + row(2, "a", "b") * 200_000)
MANY_TAGS: Mapping[str, str] = {
    "empty cells": "<row>" + "<c/>" * 1_320_000 + "</row>",
    "unknown elements": "<x/>" * 1_320_000,
    "empty runs of text": "<row>"
    + '<c t="inlineStr"><is><r/><r/><r/></is></c>' * 190_000
    + "</row>",
}
"""Name -> rows in XML that take as long to read as cells with content, and have none."""
