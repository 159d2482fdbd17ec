"""Sentence splitter for dictated text: decimals, titles, masks, numbered lists and missing spaces."""

import itertools
import re
from collections.abc import Iterable

from medvl.data.reports.cleaning import clean_spaces
from medvl.data.reports.lines import end_statement, units

_STOP = re.compile(r"[.!?]+[)\]\"']*")
_LEADER = re.compile(r"(?:[-*•]+\s*|\(?\d{1,2}[.)]\s*(?=\D)|#\s?\d{1,2}[.:)]?\s+)+")
_SPACES = re.compile(r"\s*")
_LETTER = re.compile(r"[^\W\d_]")
_LONGEST_WORD = 40

_BEFORE_NAMES = re.compile(r"drs?|mrs?|ms|prof|st|vs?|e\.?g|i\.?e|cf|fig|approx|ca|viz")
"""Abbreviations that never end a sentence."""

_SHORT_FORMS = re.compile(
    r"[cm]m|ml|cc|ft|[km]g|yrs?|hrs?|mins?|sec|wks?|mos?|etc|inc|dept|resp|lat|ant|sup|inf|rt|lt|vol|pts?|bilat|al|md|jr|sr"
)
"""Units and abbreviations that end a sentence only before a capital."""

_LONGEST_SHORT = 6
"""Length of the longest entry in the two lists above, to skip the match for longer words."""

_NUMBERED = re.compile(r"grade|type|stage|level|segment|zone|class|category|number|image|series|phase|ribs?")
"""Words whose number is part of the sentence, not of a list."""


def split_sentences(text: str) -> list[str]:
    """Return the sentences of a text in order, with their punctuation.

    Line wraps are undone; blank lines, list items, and statements on lines of their own end sentences, with or without
    a full stop. List numbers and dashes are removed. Masks (`___`, `XXXX`) are kept as words, but sentences of only
    masks and numbers are left out.
    """
    sentences = []
    for unit in units(clean_spaces(text)):
        content = unit.text if unit.keeps_mark else unit.text[unit.mark :].lstrip()
        for sentence in _split_block(content):
            sentence = sentence[_leader_end(sentence) :].strip()
            if _LETTER.search(sentence.replace("XXXX", "")):
                sentences.append(sentence)
    return sentences


def join_texts(texts: Iterable[str], separator: str = " ") -> str:
    """Return texts, such as the sections of a report, as one text in which no two of them share a sentence.

    A text without final punctuation gets a full stop where another one follows. Where that is not enough, as after
    "4 cm." before a small letter, a blank line is between them.
    """
    joined = ""
    for text in texts:
        if not text.strip():
            continue
        if joined:
            joined = end_statement(joined)
            end = " ".join(joined[-_LONGEST_WORD:].split())
            start = " ".join(text[:_LONGEST_WORD].split())
            is_divided = len(end) in itertools.accumulate(map(len, _split_block(f"{end} {start}")))
            joined += separator if is_divided else "\n\n"
        joined += text
    return joined


def sentence_spans(text: str) -> list[tuple[int, int]]:
    """Return (start, end) in characters of the sentences of `split_sentences` within the text."""
    spans, start = [], 0
    for sentence in split_sentences(text):
        place = re.compile(r"\s+".join(map(re.escape, sentence.split()))).search(text, start)
        if place is not None:
            spans.append(place.span())
            start = place.end()
    return spans


def _split_block(text: str) -> list[str]:
    """Split text with single blanks into sentences."""
    pieces, start, leader = [], 0, _leader_end(text)
    for stop in _STOP.finditer(text):
        word = text[max(start, stop.start() - _LONGEST_WORD) : stop.start()].rpartition(" ")[2].lstrip("([\"'")
        if _opens_next_item(text, start, stop, word):
            end = stop.start() - len(word)
        elif _ends_sentence(text, leader, stop, word):
            end = stop.end()
        else:
            continue
        pieces.append(text[start:end])
        start, leader = end, _leader_end(text, end)
    return [*pieces, text[start:]]


def _ends_sentence(text: str, leader: int, stop: re.Match[str], word: str) -> bool:
    """Return whether a sentence with a leader up to `leader` ends with the punctuation `stop`, which follows `word`."""
    after = text[stop.end() : stop.end() + 3]
    if not after:
        return True
    if not word[-1:].isalpha() and leader >= stop.end():
        return False  # the number of a list item
    if not word and stop[0] == "?":
        return False  # a doubt about what follows: "opacity, ? pneumonia"
    if not after.startswith(" "):
        return _lacks_space(word, after)
    if stop[0][0] in "!?" or (len(word) > _LONGEST_SHORT and "." not in word):
        return True
    lower, following = word.lower(), after[1:2]
    if _BEFORE_NAMES.fullmatch(lower) or _is_initial(text, stop, word):
        return False
    if lower in ("no", "nos") and following.isdigit():
        return False
    if _SHORT_FORMS.fullmatch(lower) or _is_dotted(lower):
        return following.isupper() or following.isdigit()
    return True


def _lacks_space(word: str, after: str) -> bool:
    """Return whether a space is missing: `effusion.No pneumothorax`, `3 cm.No`; not `3.2`, `a.m.`, `Ph.D`, `L4.L5`."""
    if not after[0].isupper() or _BEFORE_NAMES.fullmatch(word.lower()):
        return False
    if word[-1:].isdigit():
        return after[1:2].islower()
    return word.endswith(("_", ")")) or (len(word) > 1 and word[-2:].islower() and not _is_dotted(word.lower()))


def _is_dotted(lower: str) -> bool:
    """Return whether a word is single letters with dots: `a.m`, `p.o`, `m.d`."""
    return len(lower) > 1 and all(len(part) == 1 for part in lower.split("."))


def _is_initial(text: str, stop: re.Match[str], word: str) -> bool:
    """Return whether a word is an initial: `Dr. A. Miller`, `A. Miller`; not `hepatitis C. No ...`."""
    if len(word) != 1 or not word.isupper():
        return False
    before = text[max(0, stop.start() - _LONGEST_WORD) : stop.start() - 1].rstrip()
    previous = before.rpartition(" ")[2]
    return bool(re.fullmatch(r"(?:(?:[A-Z]|drs?|mrs?|ms|prof)\.)?", previous, re.IGNORECASE))


def _opens_next_item(text: str, start: int, stop: re.Match[str], word: str) -> bool:
    """Return whether a word is the next number of a list without full stops: `1. No effusion 2. Clear lungs`."""
    if not word.isdecimal():
        return False
    current = re.match(r"\s*\(?(\d{1,2})[.)]\s", text[start : start + 8])
    if current is None or int(word) != int(current[1]) + 1:
        return False
    if not re.match(r" [A-Z_]", text[stop.end() : stop.end() + 2]):
        return False
    previous = text[max(start, stop.start() - _LONGEST_WORD) : stop.start() - len(word)].split()
    return bool(previous) and not _NUMBERED.fullmatch(previous[-1].lower())


def _leader_end(text: str, start: int = 0) -> int:
    """Return the start of the text after the white space, list number or dash at `start`."""
    stripped = _SPACES.match(text, start)
    start = stripped.end() if stripped else start
    leader = _LEADER.match(text, start)
    return leader.end() if leader else start
