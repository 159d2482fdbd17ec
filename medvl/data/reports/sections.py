"""Parser for radiology reports: sections, addenda and sentences, in the layouts of MIMIC-CXR and other hospitals.

A MIMIC report is plain text in short lines: FINAL REPORT as a title, sections with a header in capitals at the start
of a line (`FINDINGS:`), masks (`___`) for removed text, and sometimes a wet read or an addendum above a rule of
underscores. Sections may be missing, empty, repeated, or named after the examination (`CHEST, TWO VIEWS:`).
"""

import dataclasses
import re
import string
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from medvl.common.untrusted import ANYWHERE, InputFolders, read_limited
from medvl.data.privacy.deidentify import is_identifying_header
from medvl.data.reports.sentences import split_sentences
from medvl.errors import ReportError

MAX_REPORT_BYTES = 1 << 20
"""Largest accepted report file; the longest report of MIMIC-CXR has under 10 kB."""

_ALIASES = {
    "findings": "findings|finding|findings in detail|radiographic findings|report|results|description|observations"
    "|reference findings|findins|findindgs|findgings|findngs|findnings|finidngs",
    "impression": "impression|impressions|imp|final impression|conclusion|conclusions|opinion|summary|diagnosis"
    "|interpretation|findings and impression|findings/impression|findings / impression|impression and findings"
    "|impression/findings|impression and recommendation|impression and recommendations|findings/ impression|impresson"
    "|imprression|imoression|impressoin|imprssion|impresion|imperssion|mpression|impession",
    "indication": "indication|indications|indication for exam|indication for study|clinical indication"
    "|clinical indications|reason for exam|reason for examination|reason for study|reason for the exam"
    "|reason for this examination|reason|reason for request|chief complaint|idication|ndication",
    "history": "history|clinical history|clinical information|patient history|medical history|past medical history"
    "|pfi|pmh|hx|clinical data|clinical context|clinical statement|presenting history|indication and history"
    "|history and indication|indication/history|history/indication",
    "comparison": "comparison|comparisons|comparison exam|comparison study|comparison studies|comparison film"
    "|comparison films|compared to|prior studies|prior exams|previous examination|reference exam|comparision"
    "|comparisions|comparsion|comparrison",
    "technique": "technique|techniques|technical factors|procedure|procedure comments|protocol|method",
    "examination": "examination|examinations|exam|exams|study|studies|type of exam|type of examination|exam type"
    "|exam description|examination type",
    "recommendation": "recommendation|recommendations|recommendation(s)|follow up|follow-up",
    "notification": "notification|notifications|communication|notice",
    "wet_read": "wet read|wetread|preliminary report|preliminary read",
    "addendum": "addendum|addenda|final addendum",
}
"""Section -> its headers. Misspellings are those of `section_parser.py` in MIT-LCP/mimic-cxr, except that it takes
"ndication" (one report) for the impression."""
_SECTION_OF = {alias: section for section, aliases in _ALIASES.items() for alias in aliases.split("|")}
_WITHIN_HEADER = ("impression", "findings", "history", "comparison", "addendum")
"""Words that assign an unlisted header in capitals to a section, tried in this order (as in `section_parser.py`)."""
_EXAMINATION_NAME = re.compile(
    r"\b(?:chest|thorax|cxr|views?|radiographs?|x-?rays?|films?|portable|bone window|ribs"
    r"|frontal (?:and|upright|semi-upright)|(?:pa|ap|lateral) and (?:pa|ap|lat|lateral))\b"
)
_BEFORE_FINDINGS = frozenset(("indication", "history", "comparison", "technique", "examination"))
CONTEXT_SECTIONS = _BEFORE_FINDINGS | {"notification", "recommendation", "wet_read", "addendum"}
"""Sections that do not describe the image, such as the question that it was taken for."""
DESCRIPTIVE_SECTIONS = ("findings", "impression", "last_paragraph")
"""Sections that describe the image."""

_PARTS_OF_FINDINGS = re.compile(
    r"(?:visualized |upper |right |left )?(?:lungs?|pleura|pleural spaces?|heart|heart size|cardiac|cardiac silhouette"
    r"|cardiomediastinal silhouette|mediastinum|hila|airways?|vessels|(?:pulmonary )?vasculature|bones?|chest wall"
    r"|abdomen|diaphragm|soft tissues|osseous structures|(?:support )?devices|lines|tubes|ett?|e[nt]t? tube|ng tube"
    r"|other)(?:(?: and | & |, |/)(?:airways?|pleura|mediastinum|soft tissues|tubes|lines|devices|hila|vessels))*",
    re.IGNORECASE,
)
"""Sub-headings of templates within FINDINGS, which stay in its text."""

_RULE = re.compile(r"\s*_{10,}\s*")  # a mask has three
_TITLE = re.compile(r"\s*FINAL (?P<kind>REPORT|ADDENDUM)\s*:?\s*")
_HEADER = re.compile(
    r"[ \t]*(?P<label>[A-Za-z][A-Za-z ()/,&'-]{0,58}[A-Za-z)]|D\.O\.B|M\.R\.N)(?:[ \t]?#|\.)?[ \t]*:(?P<rest>.*)"
)
_COMMON_HEADER = (
    r"((?:CLINICAL |[A-Z]{3,20}(?: AND | & |/ ?))?(?:FINDINGS|IMPRESSION|CONCLUSION|COMPARISONS?|INDICATION"
    r"|TECHNIQUE|HISTORY|RECOMMENDATIONS?|RECOMMENDATION\(S\)|NOTIFICATION|ADDENDUM):)"
)
_HEADER_IN_LINE = re.compile(rf"([.!?:_][ \t]{{1,40}}|[ \t]{{2,40}}){_COMMON_HEADER}")
_HEADER_IN_ONLY_LINE = re.compile(rf"(^|[ \t]){_COMMON_HEADER}")
_MARKDOWN_HEADING = re.compile(r"[ \t]*#{1,6}[ \t]+(?=[A-Za-z*])")
_MARKDOWN_LABEL = re.compile(
    r"[ \t]*(?P<mark>\*{1,3})(?P<label>[A-Za-z][^*:]{0,60})"
    r"(?:(?P<colon>:)[ \t]*(?P=mark)|(?P=mark)[ \t]*(?P<after>:|$))"
)
_LIST_ITEM = re.compile(r"[ \t]*(?:[-*•][ \t]|\(?\d{1,2}[.)][ \t]+[A-Z_])")
_ADDENDUM = re.compile(r"\s*ADDENDUM\b[\s:]*")
_SIGNATURE = re.compile(
    r"[ \t]*(?:(?:electronically|digitally) )?(?:signed|dictated|transcribed|typed|verified|approved|interpreted|read)"
    r" by\b|[ \t]*/s/(?=[ \t]|$)",
    re.IGNORECASE,
)
_RECORD_NUMBER = re.compile(
    r"[ \t]*(?P<label>MRN|(?:medical )?record (?:number|no)|accession(?: (?:number|no))?)\b[ \t.#]*(?=\d{4})",
    re.IGNORECASE,
)
_LETTER_OR_DIGIT = re.compile(r"[^\W_]")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """A parsed report. Line wraps are undone; texts are never empty."""

    sections: Mapping[str, str]
    """Name -> text, in the order of the report. Common headers have one name each (findings, impression, indication,
    history, comparison, technique, examination, recommendation, notification, wet_read); others are lower-cased. Of
    several sections with the same name, the last one with text is kept (see `repeated_sections`)."""
    empty_sections: tuple[str, ...] = ()
    """Names of dropped sections without text or with masks only."""
    repeated_sections: tuple[str, ...] = ()
    """Names of sections with text that a later section of the same name replaces, one entry for each."""
    preamble: str | None = None
    """Text before the first header, also below a rule or a title."""
    addenda: tuple[str, ...] = ()
    last_paragraph: str | None = None
    """Last paragraph that describes the image, for reports without findings and impression. It may follow a section
    such as technique or comparison after a blank line."""
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
        """Return the sentences of the given sections or, if all are missing, of the last paragraph."""
        texts = [self.sections[name] for name in sections if name in self.sections]
        if not texts and self.last_paragraph:
            texts = [self.last_paragraph]
        return [sentence for text in texts for sentence in split_sentences(text)]


def read_report(path: Path | str, *, folders: InputFolders = ANYWHERE) -> Report:
    """Read a report from a text file in UTF-8, Windows-1252 or Latin-1 (see `Report.encoding`).

    Raises FileNotFoundError when it does not exist; ReportError when the file is outside of `folders`, no regular file,
    too large or not text.
    """
    with folders.open(path, ReportError) as file:
        data = read_limited(file, MAX_REPORT_BYTES, ReportError)
    if b"\0" in data:
        raise ReportError(f"{path} contains NUL bytes: binary, or UTF-16; convert it to UTF-8", "malformed")
    text, encoding = _decode(data)
    if sum(character < " " and character not in "\t\n\r\f\v" for character in text) > len(text) // 100:
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

    A header is at the start of a line and ends with a colon. In capitals, any words are a header; in lower case, only
    the names in this module's table and those that identify a person (`Date of birth:`), so that `Dr. X:` and `at 3:00`
    are not. Signatures (`Electronically signed by Jane Doe`, `/s/ Jane Doe`) and record numbers (`MRN# 12345`) need no
    colon. A header may be a heading or bold in Markdown (`## Findings`, `**FINDINGS:**`). Common headers in capitals
    are also recognised within a line, for reports that have lost their line breaks: after a full stop or two blanks,
    and in a report of one line after any blank.
    """
    sections: dict[str, str] = {}
    empty: dict[str, None] = {}
    addenda: list[str] = []
    repeated: list[str] = []
    preamble: list[str] = []
    parts: list[tuple[str | None, list[str]]] = []
    for is_addendum, lines in _blocks(text):
        if is_addendum:
            addenda += filter(_has_content, [_ADDENDUM.sub("", _join(lines))])
            continue
        for name, body in _split_by_header(lines):
            content = _join(body)
            is_masked = name in CONTEXT_SECTIONS and "_" in content  # COMPARISON: ___ is not empty
            if not _has_content(content) and not is_masked:
                empty |= {name: None} if name else {}
                continue
            parts.append((name, body))
            if name is None:
                preamble.append(content)
            elif name == "addendum":
                addenda.append(content)
            else:
                repeated += [name] if sections.pop(name, None) else []
                sections[name] = content
    return Report(
        sections=sections,
        empty_sections=tuple(name for name in empty if name not in sections),
        repeated_sections=tuple(repeated),
        preamble=" ".join(preamble) or None,
        addenda=tuple(addenda),
        last_paragraph=_last_paragraph(parts),
    )


def section_name(header: str) -> str:
    """Return the section of a header or of a column (`REASON_FOR_EXAM`); the header itself where it has none."""
    return _SECTION_OF.get(" ".join(header.lower().replace("_", " ").split()), header)


def _blocks(text: str) -> Iterable[tuple[bool, list[str]]]:
    """Yield (is an addendum, lines), split at rules and at the titles FINAL REPORT and FINAL ADDENDUM."""
    is_addendum, lines = False, list[str]()
    text = text.replace("\ufeff", "").strip()
    within = _HEADER_IN_LINE if "\n" in text else _HEADER_IN_ONLY_LINE
    for line in within.sub(r"\1\n\2", text).splitlines():
        title = _TITLE.fullmatch(line)
        if title is None and not _RULE.fullmatch(line):
            lines.append(line)
            continue
        yield is_addendum or _opens_addendum(lines), lines
        is_addendum, lines = bool(title and title["kind"] == "ADDENDUM"), []
    yield is_addendum or _opens_addendum(lines), lines


def _opens_addendum(lines: list[str]) -> bool:
    """Return whether a block begins with ADDENDUM; followed by a colon, that is an ordinary header."""
    first = next((line for line in lines if line.strip()), "")
    return _ADDENDUM.match(first) is not None and _HEADER.match(first) is None


def _split_by_header(lines: list[str]) -> list[tuple[str | None, list[str]]]:
    """Return (section, its lines), beginning with the lines before the first header, whose section is None."""
    parts: list[tuple[str | None, list[str]]] = [(None, [])]
    for line in lines:
        header = _header(line, inside=parts[-1][0])
        if header is None:
            parts[-1][1].append(line)
        else:
            parts.append((header[0], [header[1]]))
    return parts


def _without_markdown(line: str) -> str:
    """Return a line without the marks of a heading, and without asterisks around what could be a header."""
    heading = _MARKDOWN_HEADING.match(line)
    if heading is not None:
        line = line[heading.end() :].rstrip("# \t")
    label = _MARKDOWN_LABEL.match(line)
    if label is None:
        return line
    return label["label"].rstrip() + (label["colon"] or label["after"] or "") + line[label.end() :]


def _header(line: str, inside: str | None) -> tuple[str, str] | None:
    """Return (section, rest of the line) when `line` begins with a header, else None."""
    line = _without_markdown(line)
    signature = _SIGNATURE.match(line)
    if signature is not None and signature[0].lstrip()[:1] in string.ascii_uppercase + "/":
        name = " ".join(signature[0].lower().split())
        return "signed by" if name == "/s/" else name, line[signature.end() :].lstrip(" \t:")
    number = _RECORD_NUMBER.match(line)
    if number is not None:
        return " ".join(number["label"].lower().split()), line[number.end() :]
    match = _HEADER.match(line)
    label, rest = (match["label"], match["rest"]) if match else (line.strip(), "")
    plain = " ".join(label.lower().split())
    known = _SECTION_OF.get(plain)
    if match is None:  # a header alone on its line may have no colon: Findings, FINDINGS, but not "findings"
        return (known, "") if known and label[:1].isupper() else None
    if known and (label[:1].isupper() or plain == known):
        return known, rest
    if label[:1].isupper() and is_identifying_header(plain, at_start=not label.isupper()):
        return plain, rest
    if not label.isupper() or not (rest[:1].isspace() or not rest):
        return None
    if _PARTS_OF_FINDINGS.fullmatch(plain) and inside in ("findings", "impression"):
        return None
    within = next((section for section in _WITHIN_HEADER if section in plain), None)
    return within or ("findings" if _EXAMINATION_NAME.search(plain) else plain), rest


def _is_part_of_findings(line: str) -> bool:
    header = _HEADER.match(line)
    return header is not None and _PARTS_OF_FINDINGS.fullmatch(header["label"]) is not None


def _paragraphs(lines: Iterable[str], *, items: bool) -> list[str]:
    """Return unwrapped paragraphs; with `items`, also split before list items and sub-headings."""
    paragraphs: list[list[str]] = [[]]
    for line in lines:
        if not line.strip():
            paragraphs.append([])
        elif items and (_LIST_ITEM.match(line) or _is_part_of_findings(line)):
            paragraphs.append([line])
        else:
            paragraphs[-1].append(line)
    return [" ".join(" ".join(paragraph).split()) for paragraph in paragraphs if paragraph]


def _join(lines: Iterable[str]) -> str:
    """Join lines into one, with a full stop after each paragraph or list item that has no final punctuation."""
    paragraphs = _paragraphs(lines, items=True)
    ended = [paragraph if paragraph[-1] in ".!?:;," else paragraph + "." for paragraph in paragraphs[:-1]]
    return " ".join([*ended, *paragraphs[-1:]])


def _has_content(text: str) -> bool:
    """Return whether a text has more than masks and punctuation."""
    return _LETTER_OR_DIGIT.search(text) is not None


def _last_paragraph(parts: list[tuple[str | None, list[str]]]) -> str | None:
    for section, lines in reversed(parts):
        paragraphs = _paragraphs(lines, items=False)
        if section in CONTEXT_SECTIONS:  # the first paragraph belongs to the section
            paragraphs = paragraphs[1:] if section in _BEFORE_FINDINGS else []
        elif section is not None and is_identifying_header(section):
            continue
        paragraphs = list(filter(_has_content, paragraphs))
        if paragraphs:
            return paragraphs[-1]
    return None
