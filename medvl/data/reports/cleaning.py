"""Cleaning of texts from exports: markup, entities, escaped line breaks, invisible characters,
marks of no text.
"""

import html
import re
from collections import Counter
from collections.abc import Iterable

_SPACES = dict.fromkeys((0xA0, 0x1680, *range(0x2000, 0x200B), 0x202F, 0x205F, 0x3000), " ")
_INVISIBLE = dict.fromkeys(
    (0xAD, 0x180E, *range(0x200B, 0x2010), *range(0x202A, 0x202F), 0x2060, 0xFEFF)
)
_LINE_ENDS = re.compile(r"\r\n?|[\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")

_ENTITY = re.compile(r"&(?:#\d{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,31});")
_BREAK_TAG = re.compile(
    r"</?(?:br|p|div|tr|table|tbody|thead|ul|ol|pre|hr|h[1-6]|html|body|head|section"
    r"|blockquote)(?:\s[^<>]{0,200})?\s*/?>",
    re.IGNORECASE,
)
_ITEM_TAG = re.compile(r"<li(?:\s[^<>]{0,200})?>", re.IGNORECASE)
_CELL_TAG = re.compile(r"</t[dh]>", re.IGNORECASE)
_OTHER_TAG = re.compile(
    r"</?(?:b|i|u|s|em|strong|span|font|sup|sub|small|big|center|li|td|th|a|code|tt|mark"
    r"|label)(?:\s[^<>]{0,200})?>",
    re.IGNORECASE,
)
_EXCEL = re.compile(r"_x([0-9A-Fa-f]{4})_")
_ESCAPED = re.compile(
    r"\\+r\\+n|\\+n(?!(?:u|abla|eq?|ot|eg|ewline)\b)|\\+[rt](?![a-z])|\\\.br\\|\\X0[DdAa]\\"
)
"""Line breaks written as two characters, as JSON and Python write them, and as HL7 does."""
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1f\x7f]")

_NO_TEXT = frozenset((
    "none", "nan", "na", "n/a", "#n/a", "#na", "<na>", "null", "nil", "nat", "undefined",
    "not available", "not applicable", "not provided", "not given", "not dictated", "not reported",
    "not recorded", "not done", "unknown", "unavailable", "no text", "no data", "no report",
    "no report available", "no impression", "no impression provided", "no findings provided",
    "none provided", "none given", "none available", "none dictated", "empty", "blank", "missing",
    r"\n", "#value!", "#ref!", "#name?",
))  # fmt: skip
_MARKS = " \t\n.,;:-–—_/*()[]{}'\"?"
_OPENING = (
    r"(?:(?:please|kindly|none|nil|not|n "
    r"a|separately|dictated|findings?|impressions?|conclusions?|are|is|both|full"
    r"|results?) )*"
)
_POINTER = (
    r"(?:see|refer(?: back)? to|cf|as|same "
    r"as|per|describ(?:ed|e)|stated|reported|detailed|noted|dictated|discussed"
    r"|included|combined|given|listed|above|below|vide|ditto|idem)"
)
_POINTED_AT = (
    r"(?:the|in|to|of|with|per|as|and|under|for|section|sections|findings?|impressions?"
    r"|conclusions?|above|below|supra|infra|report|full|radiology|complete|final|separate|body"
    r"|details?|further|description|discussion|combined|dictated|dictation|described|stated"
    r"|comments?|note|addendum|text|attached|same|narrative|mentioned|detailed|reported|noted"
    r"|listed|results?|this|ct|chest|heading|header|both|given|discussed|please|see|refer|pdf"
    r"|scanned|documents?|attachments?|original|hard|copy|chart|record|pacs|other|next|page"
    r"|paragraph|conclusion|dr|dictating|reading|only|here)"
)
_REFERENCE = re.compile(rf"{_OPENING}{_POINTER}(?: {_POINTED_AT})*")
_LONGEST_REFERENCE = 90


def clean_text(text: str) -> str:
    """Return a text without the traces of its export.

    Line breaks become `\\n`, blanks of any width ` `, and invisible characters are removed. HTML's
    entities (`&lt;`) are replaced, its tags of lines (`<br>`, `<p>`, `<li>`) become line breaks,
    and other tags are removed; `<5 mm` is no tag. Escapes of line breaks (`\\n` in two characters,
    Excel's `_x000D_`, HL7's `\\.br\\`) become line breaks, and control characters such as NUL are
    removed.
    """
    text = replace_entities(replace_entities(text))  # "&amp;lt;" was escaped twice
    if "<" in text:
        text = _CELL_TAG.sub("  ", _ITEM_TAG.sub("\n- ", _BREAK_TAG.sub("\n", text)))
        text = _OTHER_TAG.sub("", text)
    if "_x" in text:
        text = _EXCEL.sub(lambda escape: chr(int(escape[1], 16)), text)
    if "\\" in text:
        text = _ESCAPED.sub(lambda escape: "\t" if escape[0].endswith("t") else "\n", text)
    return _CONTROL.sub("", clean_spaces(text))


def stored_text(text: str, warnings: Counter[str]) -> str:
    """Return a report, a section or a caption as shards store it, cleaned as by `clean_text`.

    "" for marks of no text (`None`, `--`) and for texts that only refer to another one ("See
    impression."); both are counted, and so are texts with markup, entities, escapes or control
    characters.
    """
    cleaned = clean_text(text).strip()
    if is_no_text(cleaned) or is_reference(cleaned):
        warnings["missing_texts" if is_no_text(cleaned) else "texts_referring_elsewhere"] += bool(
            text.strip()
        )
        return ""
    warnings["cleaned_texts"] += cleaned != clean_spaces(text).strip()
    return cleaned


def first_text(texts: Iterable[str], warnings: Counter[str]) -> str:
    """Return the first text that is one, as `stored_text`; "" if there is none."""
    return next(filter(None, (stored_text(text, warnings) for text in texts)), "")


def replace_entities(text: str) -> str:
    """Return a text with the characters that HTML's entities (`&lt;`) stand for."""
    return _ENTITY.sub(lambda entity: html.unescape(entity[0]), text)


def clean_spaces(text: str) -> str:
    """Return a text with `\\n` as its line breaks and ` ` as its blanks, without invisible
    characters.
    """
    if text.isascii():
        return _LINE_ENDS.sub("\n", text)
    return _LINE_ENDS.sub("\n", text.translate(_INVISIBLE).translate(_SPACES))


def is_no_text(text: str) -> bool:
    """Return whether a text is a mark of no text: empty, `None`, `nan`, `N/A`, `--`."""
    plain = " ".join(text.lower().split())
    return plain.strip(_MARKS) in ("", *_NO_TEXT) or plain in _NO_TEXT


def is_reference(text: str) -> bool:
    """Return whether a text only refers to another one: `See impression.`, `as above`."""
    if len(text) > _LONGEST_REFERENCE:
        return False
    plain = " ".join(re.sub(r"[^a-z]+", " ", text.lower()).split())
    return _REFERENCE.fullmatch(plain) is not None


# Exchange of left and right in radiology text, so that the report of a mirrored image stays true.
#
# Exchanged: the words (left, right, left-sided, rightward, leftmost), lobes, zones, quadrants and
# lines that begin with their side (RLL and LLL, RIJ and LIJ), a single L or R before a paired
# structure or in a comparison (`R pleural effusion`, `L PICC`, `R > L`), and words with a Latin
# side (dextroscoliosis). A right middle lobe becomes a left middle lobe, which exists only in a
# mirrored image.
#
# Not exchanged: names that contain a side. Chambers, coronary arteries and bundle branches keep
# their names, and heart failure stays left or right. Positions are exchanged, also those of the
# heart: `right heart border` becomes `left heart border`. `left in place` has no side. Anatomy
# that is named without a side (the aortic knob, the gastric bubble, the lingula) is mirrored in
# the image but not in the text.


def _both_ways(*pairs: tuple[str, str]) -> dict[str, str]:
    """Return a table of words to their counterparts, in lower case, title case and capitals."""
    table: dict[str, str] = {}
    for one, other in (*pairs, *((other, one) for one, other in pairs)):
        table |= {one: other, one.title(): other.title(), one.upper(): other.upper()}
    return table


_COUNTERPART = _both_ways(("left", "right"), ("lt", "rt"), ("dextro", "levo"), ("l", "r"))

# Matched after the side. Both sides are treated alike, so that swapping twice returns the original
# text.
_NAMES = (
    r"ventric\w+|atri(?:al|um|a)\b|auric\w+|bundle|coronar\w+|main coronar\w+|(?:anterior "
    r")?fascic\w+"
    r"|anterior descending|circumflex|shunt|to[- ](?:left|right)[- ]shunt"
    r"|(?:heart|cardiac) "
    r"(?:failure|strain|catheter\w*|disease|enlargement|dysfunction|dilat\w+|chambers?|pressures?)"
)
_NO_SIDE = (
    r"(?:in|as) (?:place|situ|is)\b|against|ama\b|now\b|away\b|the (?:hospital|emergency|ward)\b"
)
_TWO_SIDED = (
    r"sided?|lungs?|lobes?|lower|upper|mid|middle|bas(?:e|es|al|ilar)|hil(?:um|ar)|apex|apical"
    r"|apices|hemi\w+|pleural|effusions?|pneumothora\w+|ptx|chest|costophrenic|cpa?|internal|ij"
    r"|subclavian|sc|picc|port|pacer|pacemaker|axill\w+|clavic\w+|shoulder|ribs?|humer\w+|breast"
    r"|paratracheal|perihilar|retrocardiac|infrahilar|suprahilar|main|arm|pigtail|lateral|anterior"
    r"|posterior|medial|diaphragm\w*|pneumonia|consolidation|atelectasis|opacit\w+"
)
_SIDE = re.compile(
    r"\b(?P<word>(?i:left|right))(?=(?:wards?|most|sided|hand)?\b)"
    rf"(?![- ]?(?i:sided)?[- ](?i:(?:(?:and|or) (?:left|right) )?(?:{_NAMES})|{_NO_SIDE}))"
    r"|\b(?P<latin>(?i:dextro|levo))(?=-?(?i:scoli|rotoscoli|rotat|curv|conv|cardia|posit))"
    r"|\b(?P<part>[LR])(?=(?:[UML]L|[UML]Z|[UL]Q|[UL]E|IJV?|SCV?|LD)\b)"
    r"|\b(?P<small>[lr])(?=[uml]l\b)"
    rf"|\b(?P<short>[LR]t?|[lr]t)(?=\.?[- ](?i:{_TWO_SIDED})\b)"
    r"|(?<=\()(?P<marker>[LR])(?=\))"
    r"|\b(?P<more>[LR])(?= ?[<>=/] ?[LR]\b)|(?:(?<=[LR][<>=/])|(?<=[LR] [<>=] ))(?P<less>[LR])\b"
)


_PLACE = re.compile(
    r"\b(?:upper|lower|middle|mid|top|bottom|superior\w*|inferior\w*|api(?:x|cal|ces)|bas(?:al|ilar"
    r"|e|es|ally)|above|below|clockwise|horizontal\w*|vertical\w*)\b",
    re.IGNORECASE,
)


def names_side(text: str) -> bool:
    """Return whether a text names a side, so that it contradicts a mirrored image."""
    return _SIDE.search(text) is not None


def names_place(text: str) -> bool:
    """Return whether a text names a side or a height, so that it contradicts an image turned by
    a right angle.
    """
    return names_side(text) or _PLACE.search(text) is not None


def swap_laterality(text: str) -> str:
    """Return `text` with left and right exchanged (see the module docstring). Swapping twice
    returns `text`.
    """
    return _SIDE.sub(lambda match: _COUNTERPART.get(match[0], match[0]), text)
