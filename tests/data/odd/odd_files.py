"""JSON lines, prompts, tables and text files as editors, spreadsheets and other programs save
them.
"""

import codecs
import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence

from medvl.schema import FINDINGS

TEXTS = (
    "Kein Pleuraerguß – Herz groß.",
    "Épanchement pleural à gauche.",
    "Zeile\u2028mit Trenner, “zitiert”.",
)
"""Texts with letters outside of ASCII, of which cp1252 has all but U+2028."""

READ: Mapping[str, Callable[[str], bytes]] = {
    "utf-8": lambda text: text.encode(),
    "utf-8 with a byte-order mark": lambda text: text.encode("utf-8-sig"),
    "utf-16, little-endian": lambda text: codecs.BOM_UTF16_LE + text.encode("utf-16-le"),
    "utf-16, big-endian": lambda text: codecs.BOM_UTF16_BE + text.encode("utf-16-be"),
    "utf-32": lambda text: text.encode("utf-32"),
    "lines of Windows": lambda text: text.replace("\n", "\r\n").encode(),
    "lines of Windows in utf-16": lambda text: (
        codecs.BOM_UTF16_LE + text.replace("\n", "\r\n").encode("utf-16-le")
    ),
    "lines of an old Mac": lambda text: text.replace("\n", "\r").encode(),
    "blank lines": lambda text: ("\n\n" + text.replace("\n", "\n \t\n") + "\n\n").encode(),
    "no end of the last line": lambda text: text.removesuffix("\n").encode(),
}
"""Encodings and ends of lines that are read as the same text."""

REFUSED: Mapping[str, Callable[[str], bytes]] = {
    "cp1252": lambda text: text.replace("\u2028", " ").encode("cp1252"),
    "latin-1": lambda text: text.translate(
        {0x2013: "-", 0x201C: '"', 0x201D: '"', 0x2028: " "}
    ).encode("latin-1"),
    "utf-16 without a mark": lambda text: text.encode("utf-16-le"),
    "mac-roman": lambda text: text.replace("\u2028", " ").encode("mac-roman"),
    "cut within a letter": lambda text: text.encode()[: text.encode().index("ß".encode()) + 1],
    "binary": lambda text: b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + text.encode(),
}
"""Encodings that cannot be known: refused with the line, never guessed."""


def json_lines(rows: Sequence[Mapping[str, object]]) -> str:
    """Return rows as JSON lines."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def reports() -> list[dict[str, object]]:
    """Return generated reports with their references."""
    return [
        {"key": f"r{number}", "generated": text, "reference": text}
        for number, text in enumerate(TEXTS)
    ]


def answers() -> list[dict[str, object]]:
    """Return answers to questions."""
    return [{"id": f"q{number}", "answer": text} for number, text in enumerate(TEXTS)]


BROKEN_LINES: Mapping[str, tuple[str, int]] = {
    "a comma at the end": ('{"id": "a", "answer": "x"}\n{"id": "b", "answer": "y"},\n', 2),
    "a list": ('[{"id": "a", "answer": "x"}]\n', 1),
    "a list over lines": ('[\n{"id": "a", "answer": "x"}\n]\n', 1),
    "a missing field": ('{"id": "a", "answer": "x"}\n\n{"id": "b"}\n', 3),
    "another case of a field": ('{"ID": "a", "answer": "x"}\n', 1),
    "an id twice": ('{"id": "a", "answer": "x"}\n{"id": "a", "answer": "y"}\n', 2),
    "a number and its text as ids": ('{"id": 1, "answer": "x"}\n{"id": "1", "answer": "y"}\n', 2),
    "a key twice": ('{"id": "a", "answer": "x", "answer": "y"}\n', 1),
    "an answer that is no text": ('{"id": "a", "answer": 3}\n', 1),
    "an answer that is null": ('{"id": "a", "answer": null}\n', 1),
    "a score that is text": ('{"id": "a", "answer": "x", "score": "0.5"}\n', 1),
    "NaN": ('{"id": "a", "answer": "x", "score": NaN}\n', 1),
    "single quotes": ("{'id': 'a', 'answer': 'x'}\n", 1),
    "a line that is cut off": ('{"id": "a", "answer": "x"}\n{"id": "b", "ans', 2),
    "a value alone": ('"yes"\n', 1),
    "two objects on a line": ('{"id": "a", "answer": "x"} {"id": "b", "answer": "y"}\n', 1),
}
"""Name -> lines of answers, and the number of the line that is wrong."""


def chexbert_table(texts: Sequence[str]) -> str:
    """Return a table as CheXbert's label.py writes it: no finding is positive."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["Report Impression", *FINDINGS])
    writer.writerows([text, *("" for _ in FINDINGS)] for text in texts)
    return file.getvalue()


def prompt_file() -> str:
    """Return a prompt set with letters outside of ASCII."""
    sides = {"positive": ["Ein Ödem ist zu sehen."], "negative": ["Kein Ödem."]}
    return json.dumps({"name": "german", "scoring": "margin", "temperature": 1,
        "classes": {"Edema": sides}},
                      ensure_ascii=False, indent=1) + "\n"  # fmt: skip
