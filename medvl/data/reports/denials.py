"""Reports with the polarity of their findings exchanged, as hard negatives of a text.

    turn_findings("There is a small left pleural effusion. No pneumothorax.")
    # "There is no small left pleural effusion. Pneumothorax."

A sentence whose findings are all present, or all absent, is reworded: "There is no", "is not", a
"no" before it, or without these words. The labeler reads the result. Where it does not read every
finding with the other value, and of sentences with both, the statements of the findings take the
sentence's place ("There is no pleural effusion of the left side."). Doubtful findings, and
sentences without a finding, stay.
"""

import functools
import re
from collections.abc import Callable, Iterator

from medvl.data.reports.labeler import find_mentions, sentence_runs, single_marks
from medvl.data.reports.sentences import sentence_spans
from medvl.data.reports.statements import place_of, places_of, statement
from medvl.schema import NEGATIVE, POSITIVE, UNCERTAIN

_OTHER = {POSITIVE: NEGATIVE, NEGATIVE: POSITIVE, UNCERTAIN: UNCERTAIN}
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


def turn_findings(text: str) -> str:
    """Return a text in which the findings that it affirms are denied, and those that it denies are
    affirmed; the text itself where it names no finding.

    Only sentences change; white space between them stays.
    """
    marked = single_marks(text)
    spans = sentence_spans(marked)
    pieces: list[str] = []
    end = 0
    for first, behind in sentence_runs([marked[start:stop] for start, stop in spans]):
        start, stop = spans[first][0], spans[behind - 1][1]
        pieces += [text[end:start], _turn_sentence(text[start:stop])]
        end = stop
    return "".join([*pieces, text[end:]])


@functools.lru_cache(maxsize=8192)
def _turn_sentence(sentence: str) -> str:
    mentions = find_mentions(sentence)
    values = {mention.value for mention in mentions}
    if not values & {POSITIVE, NEGATIVE}:
        return sentence
    wanted = {(each.finding, _OTHER[each.value]) for each in mentions}
    if len(values) == 1:
        words = _deny(sentence) if values == {POSITIVE} else _affirm(sentence)
        for each in words:
            if {(found.finding, found.value) for found in find_mentions(each)} == wanted:
                return each
    turned = [
        statement(each.finding, _OTHER[each.value], place_of(*places))
        for each, places in zip(mentions, places_of(mentions), strict=True)
    ]
    return " ".join(dict.fromkeys(turned))


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
