"""Cleaning of texts from exports: markup, entities, escaped line breaks, invisible characters, marks of no text."""

import html
import re
from collections import Counter
from collections.abc import Iterable

_SPACES = dict.fromkeys((0xA0, 0x1680, *range(0x2000, 0x200B), 0x202F, 0x205F, 0x3000), " ")
_INVISIBLE = dict.fromkeys((0xAD, 0x180E, *range(0x200B, 0x2010), *range(0x202A, 0x202F), 0x2060, 0xFEFF))
_LINE_ENDS = re.compile(r"\r\n?|[\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")

_ENTITY = re.compile(r"&(?:#\d{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,31});")
_BREAK_TAG = re.compile(
    r"</?(?:br|p|div|tr|table|tbody|thead|ul|ol|pre|hr|h[1-6]|html|body|head|section|blockquote)(?:\s[^<>]{0,200})?\s*/?>",
    re.IGNORECASE,
)
_ITEM_TAG = re.compile(r"<li(?:\s[^<>]{0,200})?>", re.IGNORECASE)
_CELL_TAG = re.compile(r"</t[dh]>", re.IGNORECASE)
_OTHER_TAG = re.compile(
    r"</?(?:b|i|u|s|em|strong|span|font|sup|sub|small|big|center|li|td|th|a|code|tt|mark|label)(?:\s[^<>]{0,200})?>",
    re.IGNORECASE,
)
_EXCEL = re.compile(r"_x([0-9A-Fa-f]{4})_")
_ESCAPED = re.compile(r"\\+r\\+n|\\+n(?!(?:u|abla|eq?|ot|eg|ewline)\b)|\\+[rt](?![a-z])|\\\.br\\|\\X0[DdAa]\\")
"""Line breaks written as two characters, as JSON and Python write them, and as HL7 does."""
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1f\x7f]")

_NO_TEXT = frozenset((
    "none", "nan", "na", "n/a", "#n/a", "#na", "<na>", "null", "nil", "nat", "undefined", "not available",
    "not applicable", "not provided", "not given", "not dictated", "not reported", "not recorded", "not done",
    "unknown", "unavailable", "no text", "no data", "no report", "no report available", "no impression",
    "no impression provided", "no findings provided", "none provided", "none given", "none available", "none dictated",
    "empty", "blank", "missing", r"\n", "#value!", "#ref!", "#name?",
))  # fmt: skip
_MARKS = " \t\n.,;:-–—_/*()[]{}'\"?"
_OPENING = (
    r"(?:(?:please|kindly|none|nil|not|n a|separately|dictated|findings?|impressions?|conclusions?|are|is|both|full"
    r"|results?) )*"
)
_POINTER = (
    r"(?:see|refer(?: back)? to|cf|as|same as|per|describ(?:ed|e)|stated|reported|detailed|noted|dictated|discussed"
    r"|included|combined|given|listed|above|below|vide|ditto|idem)"
)
_POINTED_AT = (
    r"(?:the|in|to|of|with|per|as|and|under|for|section|sections|findings?|impressions?|conclusions?|above|below|supra"
    r"|infra|report|full|radiology|complete|final|separate|body|details?|further|description|discussion|combined"
    r"|dictated|dictation|described|stated|comments?|note|addendum|text|attached|same|narrative|mentioned|detailed"
    r"|reported|noted|listed|results?|this|ct|chest|heading|header|both|given|discussed|please|see|refer|pdf|scanned"
    r"|documents?|attachments?|original|hard|copy|chart|record|pacs|other"
    r"|next|page|paragraph|conclusion|dr|dictating|reading|only|here)"
)
_REFERENCE = re.compile(rf"{_OPENING}{_POINTER}(?: {_POINTED_AT})*")
_LONGEST_REFERENCE = 90


def clean_text(text: str) -> str:
    """Return a text without the traces of its export.

    Line breaks become `\\n`, blanks of any width ` `, and invisible characters are removed. HTML's entities (`&lt;`)
    are replaced, its tags of lines (`<br>`, `<p>`, `<li>`) become line breaks, and other tags are removed; `<5 mm` is
    no tag. Escapes of line breaks (`\\n` in two characters, Excel's `_x000D_`, HL7's `\\.br\\`) become line breaks, and
    control characters such as NUL are removed.
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

    "" for marks of no text (`None`, `--`) and for texts that only refer to another one ("See impression."); both are
    counted, and so are texts with markup, entities, escapes or control characters.
    """
    cleaned = clean_text(text).strip()
    if is_no_text(cleaned) or is_reference(cleaned):
        warnings["missing_texts" if is_no_text(cleaned) else "texts_referring_elsewhere"] += bool(text.strip())
        return ""
    warnings["cleaned_texts"] += cleaned != clean_spaces(text).strip()
    return cleaned


def first_text(texts: Iterable[str], warnings: Counter[str]) -> str:
    """Return the first text that is one, as `stored_text`; "" where there is none."""
    return next(filter(None, (stored_text(text, warnings) for text in texts)), "")


def replace_entities(text: str) -> str:
    """Return a text with the characters that HTML's entities (`&lt;`) stand for."""
    return _ENTITY.sub(lambda entity: html.unescape(entity[0]), text)


def clean_spaces(text: str) -> str:
    """Return a text with `\\n` as its line breaks and ` ` as its blanks, without invisible characters."""
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
