"""Headers in the lines of a report: with a colon, alone on a line, in a table, in Markdown, or
within a line.
"""

import itertools
import re
import string
from typing import NamedTuple

from medvl.data.privacy import is_identifying_header
from medvl.data.reports.headings import (
    COMMON_SECTIONS,
    Heading,
    Kind,
    is_alias,
    known_heading,
    may_stand_alone,
    plain_heading,
    unlisted_heading,
)

_HEADER = re.compile(
    r"[ \t]*(?P<label>[^\W\d_](?:[][\w ()/,&'’+–-]{0,58}[]\w)])?|D\.O\.B|M\.R\.N)(?:[ \t]?#|\.)?"
    r"(?:[ \t]*[:：])+(?P<rest>.*)"
)
_UNLISTED = re.compile(r"[A-Z][A-Z ()/,&'-]*[A-Z)]|D\.O\.B|M\.R\.N")
"""Headings in capitals, whatever their words."""
_DIVIDED = re.compile(
    r"[ \t]*(?P<label>[A-Za-z][A-Za-z&/()' ]{2,40}?)[ \t]*(?P<mark>\t|[ ]{2}|(?<=[ \t])[-–—=]"
    r"|[-–—=](?=[ \t])|[.;](?=[ \t]))"
    r"[ \t]*(?P<rest>\S.*)"
)
"""A heading before a tab, two blanks, a dash or a full stop: `Findings - The lungs are clear`."""
_CAPITALS = re.compile(
    r"[ \t]*(?P<label>[A-Z][A-Z&/]+(?: [A-Z&/]{2,20}){0,3})[ ](?P<rest>[(\"']?(?:A "
    r"|[A-Z]?[a-z]|[0-9_]).*)"
)
"""A heading in capitals before a sentence that is not: `FINDINGS The lungs are clear`."""
_MARKS = re.compile(
    r"[ \t]*(?:[-*•·►▪●=~_#>–—<\[({\"'|]+|\(?(?:\d{1,2}|[ivxIVX]{1,4}|[A-Ha-h])[.)])[ "
    r"\t]*(?=[A-Za-z])"
)
_DECORATED = re.compile(
    r"(?P<label>[A-Za-z][A-Za-z &/,()'’-]{1,58}?)[ \t]*"
    r"(?:(?P<end>[=~*_#>–—\]})\"']*[ \t]*[:：][ \t]*[=~*_#>\]})\"'-]*|\||[\]>=~*_#-]{2,}|[\]]"
    r"|[=~*_#>\]})\"'-]*$)(?P<rest>.*))"
)
"""A heading behind a list mark or between decorations: `1. FINDINGS:`, `== FINDINGS ==`, `|
Findings | Clear |`.
"""
_OWNER = re.compile(
    r"^([ \t]*)(?:Dr|Prof|Mr|Mrs|Ms|DR|PROF)\.? (?:[^\W\d_][\w'’-]* ){0,2}?[^\W\d_][\w-]*['’][sS] "
    r"(?=(?:final |overall )?(?:findings?|impressions?|conclusions?)\b)",
    re.IGNORECASE,
)
"""The name in "Dr. Roe's impression"."""
_COLUMNS = re.compile(r"\t|  ")
_SPACED = re.compile(r"[ \t]*(?:[A-Z] ){3,20}[A-Z](?=[ \t]*:)")
_MARKDOWN_HEADING = re.compile(r"[ \t]*#{1,6}[ \t]+(?=[A-Za-z*])")
_MARKDOWN_LABEL = re.compile(
    r"[ \t]*(?:[-*•+][ \t]+)?(?P<mark>\*{1,3}|_{2})(?P<label>[A-Za-z][^*:_]{0,60})"
    r"(?:(?P<colon>:)[ \t]*(?P=mark)|(?P=mark)[ \t]*(?P<after>:|$))"
)
_SIGNATURE = re.compile(
    r"[ \t]*(?:(?:electronically|digitally) "
    r")?(?:signed|dictated|transcribed|typed|verified|approved|interpreted|read)"
    r" by\b|[ \t]*/s/(?=[ \t]|$)",
    re.IGNORECASE,
)
_RECORD_NUMBER = re.compile(
    r"[ \t]*(?P<label>MRN|(?:medical )?record (?:number|no)|accession(?: (?:number|no))?)\b[ "
    r"\t.#]*(?=\d{4})",
    re.IGNORECASE,
)
_MOST_WORDS = 6
"""Words of a heading in small letters."""
_CORE = re.compile(
    r"findings?|impressions?|(?:final )?impression|findings(?: and |/)impression|impression"
    r"(?: and |/)findings|conclusions?"
)
"""Headings that begin their section anew."""
_DESCRIPTION = ("findings", "impression")

_LABEL_IN_LINE = r"[^\W\d_][^\s:.!?;|_]*(?:[ ][^\s:.!?;|_]+){0,6}"
_IN_LINE = re.compile(
    rf"(?P<before>[.!?:;_|][ \t]{{1,40}}|[.!?;|],?[ \t]{{0,3}}(?=[A-Z][A-Za-z]{{2}})|[ "
    rf"\t]{{2,40}}|\t)"
    rf"(?P<label>{_LABEL_IN_LINE})(?=[ \t]?[:：])"
)
_IN_ONLY_LINE = re.compile(
    r"(?:^|(?<=[ \t]))(?P<words>(?:[^\s:]{1,25} ){0,4}[^\s:]{1,25})(?=[ ]?[:：])"
)
_BEFORE_CORE = re.compile(
    r"(?:clinical |final |overall |radiological |radiographic |imaging |[a-z]{3,20}(?: and "
    r"|/))?(?P<core>.+)"
)
_ONLY_MARK = re.compile(r"[\W\d_]*[ivxIVXA-Ha-h]{0,4}[\W_]*")
_SIGNATURE_IN_LINE = re.compile(
    r"(?<=[.!?])[ \t]+(?=(?:(?:Electronically|Digitally) "
    r"signed|Signed|SIGNED|Dictated|DICTATED|Transcribed|TRANSCRIBED"
    r"|ELECTRONICALLY SIGNED) (?:by|BY)\b|/s/ )"
)
_CAPITALS_IN_LINE = re.compile(
    r"(?<=[ \t])(?:FINDINGS|IMPRESSION|CONCLUSION|COMPARISON|TECHNIQUE|INDICATION|HISTORY)(?= "
    r"(?:[A-Z][a-z]|\d[.)] ))"
)
_TAG = re.compile(r"<(?P<end>/?)(?P<name>[A-Za-z_]{4,20})>")
_MOST_INDENT = 200


class Header(NamedTuple):
    """A header at the start of a line."""

    section: str
    """Section that it opens."""
    rest: str
    """Rest of the line, behind as many blanks as the header has characters."""
    plain: str
    """The heading (`plain_heading`)."""
    continues: bool = False
    """Whether the text is added to an earlier section of the same name, and does not replace it."""
    is_administrative: bool = False
    """Whether it names a person, a number or a date, or the handling of the report."""


def divide_lines(text: str) -> list[str]:
    """Return the lines of a text, divided before common headers within them.

    They follow a full stop, a bar or two blanks. In a text of one line they may follow any blank.
    """
    if "<" in text:
        text = _TAG.sub(_replace_tag, text)
    is_only = "\n" not in text.strip()
    lines: list[str] = []
    for line in text.split("\n"):
        suffix_at = (
            {match.end(): _common_suffix(match) for match in _IN_ONLY_LINE.finditer(line)}
            if is_only
            else {}
        )
        suffix_at |= {
            match.end("label"): match.start("label")
            for match in _IN_LINE.finditer(line)
            if _is_common_within(match)
        }
        starts = {start for start in suffix_at.values() if start is not None}
        starts |= {match.end() for match in _SIGNATURE_IN_LINE.finditer(line)}
        starts |= (
            {match.start() for match in _CAPITALS_IN_LINE.finditer(line)} if is_only else set()
        )
        places = [0, *sorted(starts - {0}), len(line)]
        for start, end in itertools.pairwise(places):
            lines.append(
                " " * min(start, _MOST_INDENT)
                + line[start:end].rstrip(" \t|," if end < len(line) else None)
            )
    return lines


def find_header(
    line: str, inside: str | None, *, is_first: bool = False, has_findings: bool = False
) -> Header | None:
    """Return the header that a line begins with, else None.

    Args:
        line: with its indentation.
        inside: section that the line is in; None before the first header.
        is_first: whether no text precedes the line.
        has_findings: whether the report has findings before the line.
    """
    line = _without_markdown(line)
    line = _OWNER.sub(r"\1", line)
    spaced = _SPACED.match(line)
    if spaced is not None:
        line = spaced[0].replace(" ", "") + line[spaced.end() :]
    signature = _SIGNATURE.match(line)
    if signature is not None and signature[0].lstrip()[:1] in string.ascii_uppercase + "/":
        name = " ".join(signature[0].lower().split())
        return Header(
            "signed by" if name == "/s/" else name, line[signature.end() :].lstrip(" \t:"), name
        )
    number = _RECORD_NUMBER.match(line)
    if number is not None:
        name = " ".join(number["label"].lower().split())
        return Header(name, line[number.end() :], name)
    for label, rest, is_listed_only in _labels(line):
        header = _opened(
            label, rest, inside, is_first=is_first, has_findings=has_findings, listed=is_listed_only
        )
        if header is not None:
            indent = " " * min(max(0, len(line) - len(header.rest)), _MOST_INDENT)
            return header._replace(
                rest=header.rest if header.rest == line else indent + header.rest
            )
    return None


def _labels(line: str) -> list[tuple[str, str, bool]]:
    """Return (heading, rest of the line, whether only a listed heading counts) for each form
    that a line may have.
    """
    match = _HEADER.match(line)
    if match is not None:
        spaced = match["rest"][:1].isspace() or not match["rest"] or not match["label"].isupper()
        labels = [(match["label"], match["rest"].removeprefix(" ,"), not spaced)]
    else:
        labels = [] if _COLUMNS.search(line.strip()) else [(line.strip(" \t.;-–"), "", True)]
        divided = _DIVIDED.match(line)
        if divided is not None:
            begins = divided["mark"] != "  " or not divided["rest"][0].islower()
            labels += [(divided["label"], divided["rest"], True)] if begins else []
    capitals = _CAPITALS.match(line)
    if capitals is not None:
        words = capitals["label"].split(" ")
        rest = capitals["rest"]
        labels += [(" ".join(words[:n]), " ".join([*words[n:], rest]), True) for n in (len(words),)]
    marks = _MARKS.match(line)
    decorated = None if marks is None else _DECORATED.match(line, marks.end())
    if decorated is not None:
        labels.append((decorated["label"], (decorated["rest"] or "").strip("| \t"), True))
    return labels


def _opened(
    label: str, rest: str, inside: str | None, *, is_first: bool, has_findings: bool, listed: bool
) -> Header | None:
    """Return the header of a heading; with `listed`, only one whose words are known."""
    plain = plain_heading(label)
    name = " ".join(label.lower().split())
    is_capital = label[:1].isupper()
    if plain == "clinical impression" and is_capital:
        return Header("impression" if has_findings else "indication", rest, plain)
    heading = known_heading(plain) if label.isupper() or len(label.split()) <= _MOST_WORDS else None
    if heading is not None and not is_capital and (listed or not _is_common(heading, plain)):
        heading = None
    if heading is not None:
        return _of_known(heading, label, rest, inside, is_first=is_first, without_colon=listed)
    if not is_capital:
        return None
    if is_identifying_header(name, at_start=not label.isupper()) and not (listed and not rest):
        return Header(name, rest, plain)
    if listed or not _UNLISTED.fullmatch(label):
        return None
    section = unlisted_heading(plain, name)
    if inside in _DESCRIPTION and (section in ("findings", name) or section == inside):
        return None
    return Header(section, rest, plain)


def _of_known(
    heading: Heading,
    label: str,
    rest: str,
    inside: str | None,
    *,
    is_first: bool,
    without_colon: bool,
) -> Header | None:
    plain = plain_heading(label)
    if without_colon and (
        heading.kind is Kind.ORGAN or (rest and heading.kind is not Kind.SECTION)
    ):
        return None
    if without_colon and not may_stand_alone(plain):
        return None  # "History of asthma"
    if heading.kind is Kind.ADMINISTRATIVE:
        if without_colon:
            return None
        return Header(" ".join(label.lower().split()), rest, plain, is_administrative=True)
    if heading.kind is Kind.ORGAN:
        if inside in (*_DESCRIPTION, "wet_read", "addendum") or (
            inside is None and not (is_first or label.isupper())
        ):
            return None
        return Header("findings", f"{label}:{rest}", plain, continues=True)
    if heading.kind is Kind.PART:
        return (
            None if inside in _DESCRIPTION else Header(heading.section, rest, plain, continues=True)
        )
    if heading.section == inside and inside in _DESCRIPTION and not _CORE.fullmatch(plain):
        return None  # "Radiographic findings" within the findings
    return Header(heading.section, rest, plain)


def _is_common(heading: Heading, plain: str) -> bool:
    """Return whether a heading is one of those that are recognised in small letters and within a
    line.
    """
    return (
        heading.kind is Kind.SECTION
        and heading.section in COMMON_SECTIONS
        and is_alias(plain, common=True)
    )


def _is_common_within(match: re.Match[str]) -> bool:
    label = match["label"]
    before = match["before"]
    if _ONLY_MARK.fullmatch(match.string, 0, match.start("label")):
        return False  # "2. FINDINGS:"
    plain = plain_heading(label)
    heading = known_heading(plain)
    if heading is not None and _is_common(heading, plain):
        return True
    if not label[0].isupper() or before[0] in ":;_":
        return False  # "TECHNIQUE: AP FINDINGS:"
    if heading is not None and heading.kind is Kind.SECTION:
        return heading.section in _DESCRIPTION and not is_alias(plain)
    return is_identifying_header(plain, at_start=True) or (
        heading is not None and heading.kind is Kind.ADMINISTRATIVE
    )


def _common_suffix(match: re.Match[str]) -> int | None:
    """Return the place of the longest common heading that ends the words before a colon."""
    parts = match["words"].split(" ")
    for first in range(len(parts)):
        label = " ".join(parts[first:])
        if label[:1].isupper() and _is_common_in_only_line(label):
            return match.start("words") + len(" ".join(parts[:first])) + (first > 0)
    return None


def _is_common_in_only_line(label: str) -> bool:
    """Return whether words are a common heading, alone or behind a word such as "radiological"."""
    plain = plain_heading(label)
    heading = known_heading(plain)
    if heading is not None and _is_common(heading, plain) and not plain.endswith(" findings"):
        return True  # "COMPARE TO PREVIOUS FINDINGS:" ends with a heading
    core = _BEFORE_CORE.fullmatch(plain)
    heading = None if core is None else known_heading(core["core"])
    is_uniform = label.isupper() == label.rpartition(" ")[2].isupper()
    return (
        core is not None
        and heading is not None
        and _is_common(heading, core["core"])
        and is_uniform
    )


def _replace_tag(tag: re.Match[str]) -> str:
    heading = known_heading(plain_heading(tag["name"]))
    if heading is None or heading.kind is not Kind.SECTION:
        return tag[0]
    return "\n" if tag["end"] else f"\n{tag['name'].upper().replace('_', ' ')}: "


def _without_markdown(line: str) -> str:
    """Return a line without the marks of a heading, and without asterisks around what could be a
    header.
    """
    heading = _MARKDOWN_HEADING.match(line)
    if heading is not None:
        line = line[heading.end() :].rstrip("# \t")
    label = _MARKDOWN_LABEL.match(line)
    if label is None:
        return line
    return label["label"].rstrip() + (label["colon"] or label["after"] or "") + line[label.end() :]
