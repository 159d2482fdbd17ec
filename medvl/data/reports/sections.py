"""Parser for radiology reports: sections, addenda and sentences, in the layouts of MIMIC-CXR and
other hospitals.

A MIMIC report is plain text in short lines: FINAL REPORT as a title, sections with a header in
capitals at the start of a line (`FINDINGS:`), masks (`___`) for removed text, and sometimes a wet
read or an addendum above a rule of underscores. Sections may be missing, empty, repeated, or named
after the examination (`CHEST, TWO VIEWS:`).
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from medvl.common.untrusted import ANYWHERE, InputFolders, read_limited
from medvl.data.privacy import is_identifying_header
from medvl.data.reports.cleaning import clean_text, is_no_text, is_reference
from medvl.data.reports.header_lines import Header, divide_lines, find_header
from medvl.data.reports.headings import BEFORE_FINDINGS, CONTEXT_SECTIONS, DESCRIPTIVE_SECTIONS
from medvl.data.reports.sentences import join_texts, one_line, split_sentences
from medvl.errors import ReportError

MAX_REPORT_BYTES = 1 << 20
"""Largest accepted report file; the longest report of MIMIC-CXR has under 10 kB."""

_RULE = re.compile(r"\s*_{10,}\s*")  # a mask has three
_TITLE = re.compile(r"\s*FINAL (?P<kind>REPORT|ADDENDUM)\s*:?\s*")
_ADDENDUM = re.compile(r"\A\s*ADDENDUM\b[\s:]*")
_ADDENDUM_HEADER = re.compile(r"\s*ADDENDUM[\w ()/,&'-]*:")
_LETTER_OR_DIGIT = re.compile(r"[^\W_]")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """A parsed report. Line wraps are undone; texts are never empty."""

    sections: Mapping[str, str]
    """Name -> text, in the order of the report. Common headers have one name each (findings,
    impression, indication, history, comparison, technique, examination, recommendation,
    notification, wet_read); others are lower-cased. Of several sections with the same name, the
    last one with text is kept (see `repeated_sections`).
    """
    empty_sections: tuple[str, ...] = ()
    """Names of dropped sections without text or with masks only, or whose text only refers to
    another one ("See impression.").
    """
    repeated_sections: tuple[str, ...] = ()
    """Names of sections with text that a later section of the same name replaces, one entry for
    each.
    """
    preamble: str | None = None
    """Text before the first header, also below a rule or a title."""
    addenda: tuple[str, ...] = ()
    last_paragraph: str | None = None
    """Last paragraph that describes the image, for reports without findings and impression. It may
    follow a section such as technique or comparison after a blank line.
    """
    administrative_sections: tuple[str, ...] = ()
    """Names of `sections` under headers of people, numbers, dates and the handling of the
    report.
    """
    encoding: str = "utf-8"
    """Encoding of the file; "utf-8" for reports parsed from text."""

    @property
    def has_headers(self) -> bool:
        """Whether the text has any section."""
        return bool(self.sections or self.empty_sections or self.addenda)

    @property
    def findings(self) -> str | None:
        """The findings section, or None."""
        return self.sections.get("findings")

    @property
    def impression(self) -> str | None:
        """The impression section, or None."""
        return self.sections.get("impression")

    def sentences(self, sections: Sequence[str] = ("findings", "impression")) -> list[str]:
        """Return the sentences of the given sections or, if all are missing, of the last
        paragraph.
        """
        texts = [self.sections[name] for name in sections if name in self.sections]
        if not texts and self.last_paragraph:
            texts = [self.last_paragraph]
        return [sentence for text in texts for sentence in split_sentences(text)]


def read_report(path: Path | str, *, folders: InputFolders = ANYWHERE) -> Report:
    """Read a report from a text file in UTF-8, Windows-1252 or Latin-1 (see `Report.encoding`).

    Raises FileNotFoundError when it does not exist; ReportError when the file is outside of
    `folders`, no regular file, too large or not text.
    """
    with folders.open(path, ReportError) as file:
        data = read_limited(file, MAX_REPORT_BYTES, ReportError)
    if b"\0" in data:
        raise ReportError(
            f"{path} contains NUL bytes: binary, or UTF-16; convert it to UTF-8", "malformed"
        )
    text, encoding = _decode(data)
    if (
        sum(character < " " and character not in "\t\n\r\f\v" for character in text)
        > len(text) // 100
    ):
        raise ReportError(f"{path} consists of control characters: not text", "malformed")
    return dataclasses.replace(parse_report(text), encoding=encoding)


def _decode(data: bytes) -> tuple[str, str]:
    for encoding, codec in (("utf-8", "utf-8-sig"), ("cp1252", "cp1252")):
        try:
            return data.decode(codec), encoding
        except UnicodeDecodeError:
            continue
    return data.decode("latin-1"), "latin-1"  # maps every byte


def parse_report(text: str) -> Report:
    """Parse a report. Any text can be parsed; without headers it is preamble and last paragraph.

    A header is at the start of a line and ends with a colon, or is alone on its line. Known headers
    (`medvl.data.reports.headings`) are found in any case and with words such as "radiological" or
    "(PA and lateral)"; so are those that identify a person (`Date of birth:`), signatures
    (`Electronically signed by Jane Doe`) and record numbers (`MRN# 12345`). Other headers count in
    capitals only, and not within findings and impression, whose sub-headings (`CARDIOVASCULAR:`)
    stay in the text. Parts of the findings without a header of their own (`LUNGS:` after TECHNIQUE)
    are findings. Headers may be headings, bold text or cells of a table in Markdown. Common headers
    are also recognised within a line: after a full stop or two blanks, and in a report of one line
    after any blank.

    Markup, escaped line breaks and invisible characters are removed
    (`medvl.data.reports.cleaning.clean_text`).
    """
    text = clean_text(text).strip("\n")
    width = max(map(len, text.split("\n")))
    sections: dict[str, str] = {}
    headings: dict[str, str] = {}
    empty: dict[str, None] = {}
    administrative: dict[str, None] = {}
    addenda: list[str] = []
    repeated: list[str] = []
    preamble: list[str] = []
    parts: list[tuple[str | None, list[str]]] = []
    for is_addendum, lines in _blocks(text):
        if is_addendum:
            content = one_line(_ADDENDUM.sub("", "\n".join(lines)), width)
            addenda += [content] if _has_content(content) else []
            continue
        for header, body in _split_by_header(lines):
            name = None if header is None else header.section
            content = one_line("\n".join(body), width)
            if not _is_text_of(name, content):
                empty |= {name: None} if name else {}
                continue
            parts.append((name, body))
            if header is None or name is None:
                preamble.append(content)
            elif name == "addendum":
                addenda.append(content)
            else:
                earlier = sections.pop(name, None)
                if earlier is not None and _continues(header, headings[name]):
                    content = join_texts([earlier, content])
                elif earlier is not None:
                    repeated.append(name)
                sections[name], headings[name] = content, header.plain
                administrative |= {name: None} if header.is_administrative else {}
    return Report(
        sections=sections,
        empty_sections=tuple(name for name in empty if name not in sections),
        repeated_sections=tuple(repeated),
        administrative_sections=tuple(administrative),
        preamble=" ".join(join_texts(preamble).split()) or None,
        addenda=tuple(addenda),
        last_paragraph=_last_paragraph(parts),
    )


def _is_text_of(section: str | None, content: str) -> bool:
    """Return whether a section has text: more than masks, a mark of no text, or a reference to
    another section.
    """
    if section in CONTEXT_SECTIONS and "_" in content:
        return True  # COMPARISON: ___ is not empty
    if section in DESCRIPTIVE_SECTIONS and (is_no_text(content) or is_reference(content)):
        return False
    return _has_content(content)


def _continues(header: Header, earlier: str) -> bool:
    """Return whether a section is added to the one of the same name, which has the heading
    `earlier`.

    Findings and impression are replaced, as by MIMIC-CXR's own scripts; so is context under the
    same heading.
    """
    if header.continues or header.is_administrative:
        return True
    return header.section in CONTEXT_SECTIONS and header.plain != earlier


def _blocks(text: str) -> Iterable[tuple[bool, list[str]]]:
    """Yield (is an addendum, lines), split at rules and at the titles FINAL REPORT and FINAL
    ADDENDUM.
    """
    is_addendum = False
    lines = list[str]()
    for line in divide_lines(text):
        title = _TITLE.fullmatch(line)
        if title is None and not _RULE.fullmatch(line):
            lines.append(line)
            continue
        yield is_addendum or _opens_addendum(lines), lines
        is_addendum = bool(title and title["kind"] == "ADDENDUM")
        lines = []
    yield is_addendum or _opens_addendum(lines), lines


def _opens_addendum(lines: list[str]) -> bool:
    """Return whether a block begins with ADDENDUM; followed by a colon, that is an ordinary
    header.
    """
    first = next((line for line in lines if line.strip()), "")
    return _ADDENDUM.match(first) is not None and _ADDENDUM_HEADER.match(first) is None


def _split_by_header(lines: list[str]) -> list[tuple[Header | None, list[str]]]:
    """Return (header, its lines), beginning with the lines before the first header, whose header
    is None.
    """
    parts: list[tuple[Header | None, list[str]]] = [(None, [])]
    for line in lines:
        last = parts[-1][0]
        inside = None if last is None else last.section
        is_first = last is None and not any(map(_has_content, parts[-1][1]))
        has_findings = any(
            header is not None and header.section == "findings" for header, _ in parts
        )
        header = find_header(line, inside, is_first=is_first, has_findings=has_findings)
        if header is None:
            parts[-1][1].append(line)
        else:
            parts.append((header, [header.rest]))
    return parts


def _paragraphs(lines: Iterable[str]) -> list[str]:
    """Return the paragraphs, which blank lines divide, without line wraps."""
    paragraphs = "\n".join(line.strip() for line in lines).split("\n\n")
    return [" ".join(paragraph.split()) for paragraph in paragraphs if paragraph.strip()]


def _has_content(text: str) -> bool:
    """Return whether a text has more than masks and punctuation."""
    return _LETTER_OR_DIGIT.search(text) is not None


def _last_paragraph(parts: list[tuple[str | None, list[str]]]) -> str | None:
    for section, lines in reversed(parts):
        paragraphs = _paragraphs(lines)
        if section in CONTEXT_SECTIONS:  # the first paragraph belongs to the section
            paragraphs = paragraphs[1:] if section in BEFORE_FINDINGS else []
        elif section is not None and is_identifying_header(section):
            continue
        paragraphs = list(filter(_has_content, paragraphs))
        if paragraphs:
            return paragraphs[-1]
    return None
