"""Spelling of a sentence as `medvl.data.reports.labeler` reads it: marks, tick boxes and answers.

spell("No  pneumothorax (\u2212)")[0]           # "no pneumothorax none;"
spell("[ ] Pneumothorax [x] Effusion")[0]       # "no pneumothorax; effusion;"
sentence_runs(["Pneumothorax?", "No."])         # [(0, 2)], one statement
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from medvl.data.reports.labeler_cues import SEEN

_SAME = str.maketrans(
    {
        **dict.fromkeys("\u2018\u2019\u02bc\u00b4`", "'"),
        **dict.fromkeys("\u2010\u2011\u2212\uff0d", "-"),
        **dict.fromkeys("\u2015\u2e3a", "\u2014"),
        **dict.fromkeys("\u2205\u2300", "\u00f8"),
        **dict(zip("\uff1a\uff1b\uff0c\uff08\uff09\uff1d\uff1f", ":;,()=?", strict=True)),
    }
)
"""Characters with the same meaning in a report: apostrophes, hyphens, dashes, signs of absence, wide punctuation."""

_SPELLINGS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"(?<=\S)\*+|\*+(?=\S)"), ""),  # bold of Markdown
    (re.compile(r"(?<=[a-z])\u2013(?=[a-z])"), "-"),
    (re.compile(r"(?<=\w)(?<!\bca)n't\b"), " not"),  # "can't" has cues of its own
    (re.compile(r"(?<=[a-z])\(e?s\)"), ""),
    (re.compile(r"\bnon-(?=enlarg|widen|infect|consolidat|pneumon)"), "non"),
    (re.compile(r"\s{2,}|[^\S ]"), " "),
    (re.compile(r"\A | \Z"), ""),
)

_RARE = re.compile(r"[^ -~]|[*\[]|  |\A | \Z|\((?:[-+ x]|e?s)\)|[-+] *(?:[,;.]|\Z)|n't|non-")
"""What a sentence contains that has something to rewrite; most have nothing."""

_EMPTY, _TICK = (
    "\\[[ _]?\\]|\\( \\)|[\u2610\u25a1\u25fb\u2b1c\u274f\u2717\u2718\u274c]",
    "\\[[xv*\u2713\u2714]\\]|\\(x\\)|[\u2611\u2612\u2713\u2714\u25a0\u25fc\u2705]\ufe0f?",
)
_BOX = re.compile(rf"(?P<empty>{_EMPTY}|(?P<minus>\(-\)(?!ve)))|(?P<tick>{_TICK}|(?P<plus>\(\+\)(?!ve)))")
_SIGN = re.compile(r"(?<=\w) ?(?:(?P<empty>-)|\+)(?= *(?:[,;.]|$))")
_NO_WORDS = re.compile(r"[^a-z]*")
_OPTION = re.compile(
    r"\W*(?:(?:yes|no|none|nil|present|absent|positive|negative|normal|abnormal|y|n|unknown"
    r"|small|moderate|large|mild|severe|trace|tiny|left|right|bilateral|both)\W*)+"
)
_ANSWER = re.compile(
    rf"[-\s]*(?:no|none|nil|neg|negative|absent|not {SEEN}|yes|present|positive)(?: {SEEN})?\s*(?:[.,;!]|$)",
    re.IGNORECASE,
)
_UNFINISHED = re.compile(r"[:=]\s*$|\b(?:neg|pos|poss|prob|susp|equiv|quest)\.$", re.IGNORECASE)


class _Edit(NamedTuple):
    """Replacement of the characters from start to end."""

    start: int
    end: int
    text: str


def spell(sentence: str) -> tuple[str, list[int]]:
    """Return a sentence as the labeler reads it, and the place there of each of its characters.

    It is in lower case, with single blanks and one spelling of each mark. An empty box before or behind an item becomes
    "no" or "none", and the box of an item that is present disappears.
    """
    text = sentence.lower()
    if not _RARE.search(text):
        return text, list(range(len(text)))
    if len(text) != len(sentence):  # some capitals have a lower-case form of two characters
        text = "".join(letter.lower()[:1] for letter in sentence)
    text = text.translate(_SAME)
    places = list(range(len(text)))
    boxes = list(_BOX.finditer(text))
    if boxes:
        text, places = _edited(text, places, _without_boxes(text, boxes))
    signs = list(_SIGN.finditer(text))
    if len(signs) > 1:  # "effusion +, pneumothorax -"
        values = (_Edit(*sign.span(), " none" if sign["empty"] else "") for sign in signs)
        text, places = _edited(text, places, values)
    for pattern, replacement in _SPELLINGS:
        edits = [_Edit(*match.span(), replacement) for match in pattern.finditer(text)]
        if edits:
            text, places = _edited(text, places, edits)
    return text, places


def single_marks(text: str) -> str:
    """Return a text of the same length with "?" for "??", which would end a sentence."""
    return text.replace("??", " ?")


def sentence_runs(sentences: Sequence[str]) -> list[tuple[int, int]]:
    """Return (first, behind the last) of sentences that are one statement: a question or a name, and its answer."""
    runs: list[tuple[int, int]] = []
    for place, sentence in enumerate(sentences):
        before = sentences[place - 1].rstrip() if place else ""
        if _UNFINISHED.search(before) or (before.endswith(("?", "...", "\u2026")) and _ANSWER.match(sentence)):
            runs[-1] = runs[-1][0], place + 1
        else:
            runs.append((place, place + 1))
    return runs


def _edited(text: str, places: Sequence[int], edits: Iterable[_Edit]) -> tuple[str, list[int]]:
    """Return a text after edits in the order of their places, and the new places of its original characters."""
    pieces: list[str] = []
    moved: list[int] = []
    end = length = 0
    for edit in edits:
        pieces += [text[end : edit.start], edit.text]
        moved += range(length, length + edit.start - end)
        length += edit.start - end
        last = max(0, len(edit.text) - 1)
        moved += (length + min(offset, last) for offset in range(edit.end - edit.start))
        length += len(edit.text)
        end = edit.end
    pieces.append(text[end:])
    moved += range(length, length + len(text) - end)
    last_place = max(0, length + len(text) - end - 1)
    return "".join(pieces), [min(moved[place], last_place) for place in places]


def _without_boxes(text: str, boxes: Sequence[re.Match[str]]) -> Iterator[_Edit]:
    """Yield the edits that write out boxes; nothing where it is open which words they are for ("the [ ] lobe")."""
    before, behind = text[: boxes[0].start()], text[boxes[-1].end() :]
    if not _NO_WORDS.fullmatch(before) and re.search(r"[:=]\s*$", before) and not _NO_WORDS.fullmatch(behind):
        yield from _options(text, boxes)
    elif _NO_WORDS.fullmatch(before):
        for box, following in zip(boxes, [*boxes[1:], None], strict=True):
            end = following.start() if following else len(text)
            yield _Edit(*box.span(), " no " if box["empty"] else " ")
            yield _Edit(end, end, "; ")
    elif _NO_WORDS.fullmatch(behind) or any(box["minus"] or box["plus"] for box in boxes):
        for box in boxes:
            yield _Edit(*box.span(), " none; " if box["empty"] else " yes; ")


def _options(text: str, boxes: Sequence[re.Match[str]]) -> Iterator[_Edit]:
    """Yield the edits of "NAME: [ ] yes [x] no": values without a tick are left out, other items are negative."""
    ticks = 0
    for box, following in zip(boxes, [*boxes[1:], None], strict=True):
        end = following.start() if following else len(text)
        if box["tick"]:
            ticks += 1
            yield _Edit(*box.span(), " ")
        elif _OPTION.fullmatch(text, box.end(), end):
            yield _Edit(box.start(), end, " none " if following is None and not ticks else " ")
        else:
            yield _Edit(*box.span(), "; no ")
