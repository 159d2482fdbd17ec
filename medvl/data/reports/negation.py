"""Negated and uncertain mentions of entities.

    mentions = finder.find("No pleural effusion. Clear lungs.")     # the effusion and the lungs
    mention_values("No pleural effusion. Clear lungs.", mentions)   # [0, 1]

Cues and their scopes are those of `medvl.data.reports.labeler`, for English reports.
"""

import re
from bisect import bisect_left
from collections.abc import Sequence

from medvl.data.reports.labeler import CONTRACTION
from medvl.data.reports.labeler_scopes import Scopes, Span
from medvl.data.reports.sentences import sentence_spans
from medvl.schema import POSITIVE

_WORD = re.compile(r"\S+")


def mention_values(text: str, mentions: Sequence[tuple[int, int, int]]) -> list[int | None]:
    """Return the value of each mention: 1 positive, 0 negative, -1 uncertain; None for a history ("history of ...").

    Args:
        text: a report or a sentence.
        mentions: (start, end, entity) of each in characters, in the order of the text (`EntityFinder.find`). A mention
            that is not within one sentence is positive.
    """
    values: list[int | None] = [POSITIVE] * len(mentions)
    starts = [first for first, _, _ in mentions]
    for start, end in sentence_spans(text):
        places = range(bisect_left(starts, start), bisect_left(starts, end))
        inside = {place: mentions[place] for place in places if mentions[place][1] <= end}
        if inside:
            spans = [Span(first - start, last - start) for first, last, _ in inside.values()]
            sentence, phrases = _spelled(text[start:end], spans)
            cues = map(Scopes(sentence, phrases).find, phrases)
            for place, cue in zip(inside, cues, strict=True):
                values[place] = POSITIVE if cue is None else cue.value
    return values


def _spelled(sentence: str, spans: Sequence[Span]) -> tuple[str, list[Span]]:
    """Return a sentence in lower case with single blanks, as the labeler reads it, and spans within it."""
    plain, place = "", dict[int, int]()
    for match in _WORD.finditer(sentence):
        plain += " " if plain else ""
        place |= {match.start() + offset: len(plain) + offset for offset in range(len(match[0]))}
        plain += CONTRACTION.sub(" not", match[0].lower().replace("\u2019", "'"))
    return plain, [Span(place[span.start], place[span.end - 1] + 1) for span in spans]
