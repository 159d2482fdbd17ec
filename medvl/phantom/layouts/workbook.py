"""Workbooks (.xlsx) of the phantom's releases."""

import io
import zipfile
from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape


def workbook_bytes(header: Sequence[str], rows: Iterable[Sequence[object]]) -> bytes:
    """Return an .xlsx workbook with one sheet of text cells."""
    lines = []
    for number, row in enumerate([header, *rows], start=1):
        cells = "".join(
            f'<c r="{chr(65 + column)}{number}" t="inlineStr"><is><t>{escape(str(value))}</t></is></c>'
            for column, value in enumerate(row)
        )
        lines.append(f'<row r="{number}">{cells}</row>')
    main, package = (
        f"http://schemas.openxmlformats.org/{name}" for name in ("spreadsheetml/2006/main", "package/2006")
    )
    office = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
    kind = "application/vnd.openxmlformats-officedocument.spreadsheetml"
    parts = {
        "[Content_Types].xml": f'<Types xmlns="{package}/content-types"><Default Extension="rels" '
        'ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
        '<Default Extension="xml" ContentType="application/xml"/>'
        f'<Override PartName="/xl/workbook.xml" ContentType="{kind}.sheet.main+xml"/>'
        f'<Override PartName="/xl/worksheets/sheet1.xml" ContentType="{kind}.worksheet+xml"/></Types>',
        "_rels/.rels": f'<Relationships xmlns="{package}/relationships"><Relationship Id="rId1" Type="{office}/'
        'officeDocument" Target="xl/workbook.xml"/></Relationships>',
        "xl/workbook.xml": f'<workbook xmlns="{main}" xmlns:r="{office}"><sheets><sheet name="Sheet1" sheetId="1" '
        'r:id="rId1"/></sheets></workbook>',
        "xl/_rels/workbook.xml.rels": f'<Relationships xmlns="{package}/relationships"><Relationship Id="rId1" Type="'
        f'{office}/worksheet" Target="worksheets/sheet1.xml"/></Relationships>',
        "xl/worksheets/sheet1.xml": f'<worksheet xmlns="{main}"><sheetData>{"".join(lines)}</sheetData></worksheet>',
    }
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as book:
        for name, text in parts.items():
            part = zipfile.ZipInfo(name)  # with a fixed date: the same seed gives the same bytes
            book.writestr(part, f'<?xml version="1.0" encoding="UTF-8" standalone="yes"?>\n{text}')
    return content.getvalue()
