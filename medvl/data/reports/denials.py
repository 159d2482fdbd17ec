"""Reports with their findings denied, as hard negatives of a text.

    turn_findings("There is a small left pleural effusion. No pneumothorax.").text
    # "There is no small left pleural effusion. No pneumothorax."
    turn_findings("No pneumothorax.").text      # "Pneumothorax."

Of a text that affirms findings, these are denied and all others stay, so that the two texts differ
by what an image without the findings shows. Of a text that only denies findings, these are
affirmed.

A sentence is reworded: "There is no", "is not", a "no" before it, or without these words. The
labeler reads the result. Where it does not read every finding with the other value, and of
sentences with other findings too, the statements of the findings take the sentence's place ("There
is no pleural effusion of the left side."). Doubtful findings, and sentences without a finding,
stay.
"""

import functools
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from medvl.data.reports.labeler import find_mentions, sentence_runs, single_marks
from medvl.data.reports.sentences import sentence_spans
from medvl.data.reports.statements import place_of, places_of, statement
from medvl.schema import FINDINGS, NEGATIVE, POSITIVE

_OTHER = {POSITIVE: NEGATIVE, NEGATIVE: POSITIVE}
_THERE_IS = re.compile(r"^(there (?:is|are|was|were)) (?:(?:an?|some|the) )?", re.IGNORECASE)
_NO_SUCH = re.compile(
    r"^(?:(there (?:is|are|was|were)) )?no (?:(?:definite |convincing |radiographic )?"
    r"(?:evidence|signs?) (?:of|for) )?",
    re.IGNORECASE,
)
_ARTICLE = re.compile(r"^(?:an?|some) ", re.IGNORECASE)
_VERB = re.compile(r"\b(is|are|was|were|has|have)\b", re.IGNORECASE)
_NOT = re.compile(r"\bnot ", re.IGNORECASE)
_WITHOUT = re.compile(r"\b(?:without(?: evidence of)?|free of)\b", re.IGNORECASE)


class Denial(NamedTuple):
    """A text with its findings turned."""

    text: str
    turned: tuple[int, ...]
    """A number for each finding in `FINDINGS`: 1 if it changed from affirmed to denied, -1 if it
    changed from denied to affirmed, else 0.
    """


@functools.lru_cache(maxsize=8192)
def turn_findings(text: str) -> Denial:
    """Return a text in which the findings that it affirms are denied; of a text that affirms none,
    those that it denies are affirmed. The text itself where it names no finding.

    Only sentences change; white space between them stays.
    """
    marked = single_marks(text)
    spans = sentence_spans(marked)
    runs = [
        (spans[first][0], spans[behind - 1][1])
        for first, behind in sentence_runs([marked[start:stop] for start, stop in spans])
    ]
    values = {each.value for start, stop in runs for each in find_mentions(text[start:stop])}
    value = POSITIVE if POSITIVE in values else NEGATIVE
    pieces: list[str] = []
    turned: set[str] = set()
    end = 0
    for start, stop in runs:
        sentence, findings = _turn_sentence(text[start:stop], value)
        pieces += [text[end:start], sentence]
        turned |= findings
        end = stop
    sign = 1 if value == POSITIVE else -1
    return Denial(
        "".join([*pieces, text[end:]]), tuple(sign * (name in turned) for name in FINDINGS)
    )


@functools.lru_cache(maxsize=8192)
def _turn_sentence(sentence: str, value: int) -> tuple[str, frozenset[str]]:
    """Return a sentence in which the findings of a value have the other one, and these findings."""
    mentions = find_mentions(sentence)
    findings = frozenset(each.finding for each in mentions if each.value == value)
    if not findings:
        return sentence, findings
    expected = {(each.finding, _turned(each.value, value)) for each in mentions}
    if all(each.value == value for each in mentions):
        words = _deny(sentence) if value == POSITIVE else _affirm(sentence)
        for text in words:
            if {(each.finding, each.value) for each in find_mentions(text)} == expected:
                return text, findings
    statements = [
        statement(each.finding, _turned(each.value, value), place_of(*places))
        for each, places in zip(mentions, places_of(mentions), strict=True)
    ]
    return " ".join(dict.fromkeys(statements)), findings


def _turned(own: int, value: int) -> int:
    return _OTHER[own] if own == value else own


def _deny(sentence: str) -> Iterator[str]:
    """Yield denials of a sentence whose findings are present."""
    if _THERE_IS.match(sentence):
        yield _THERE_IS.sub(r"\1 no ", sentence)
    elif not sentence.lower().startswith("the "):
        yield f"No {_with_initial(_ARTICLE.sub('', sentence), str.lower)}"
    yield _VERB.sub(r"\1 not", sentence, count=1)


def _affirm(sentence: str) -> Iterator[str]:
    """Yield statements without the denial of a sentence whose findings are absent."""
    start = _NO_SUCH.match(sentence)
    if start is not None:
        rest = sentence[start.end() :]
        yield f"{start[1]} {rest}" if start[1] else _with_initial(rest, str.upper)
    yield _NOT.sub("", sentence)
    yield _WITHOUT.sub("with", sentence)


def _with_initial(text: str, case: Callable[[str], str]) -> str:
    """Return a text whose first letter has a case; of an abbreviation, as it is."""
    return text if text[:2].isupper() else case(text[:1]) + text[1:]
