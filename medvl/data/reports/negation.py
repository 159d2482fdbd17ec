"""Negated and uncertain mentions of entities.

    mentions = finder.find("No pleural effusion. Clear lungs.")     # the effusion and the lungs
    mention_values("No pleural effusion. Clear lungs.", mentions)   # [0, 1]

Cues and their scopes are those of `medvl.data.reports.labeler`, for English reports.
"""

from bisect import bisect_left
from collections.abc import Sequence

from medvl.data.reports.labeler import CHEXPERT, Conventions
from medvl.data.reports.labeler_notation import sentence_runs, single_marks, spell
from medvl.data.reports.labeler_scopes import Scopes, Span
from medvl.data.reports.sentences import sentence_spans
from medvl.schema import POSITIVE


def mention_values(
    text: str, mentions: Sequence[tuple[int, int, int]], conventions: Conventions = CHEXPERT
) -> list[int | None]:
    """Return the value of each mention: 1 positive, 0 negative, -1 uncertain; None for a history ("history of ...").

    Args:
        text: a report or a sentence.
        mentions: (start, end, entity) of each in characters, in the order of the text (`EntityFinder.find`). A mention
            that is not within one sentence is positive. A name of a template whose value mentions the entity again
            ("effusion: no effusion") has the value None.
        conventions: what counts as present and what as doubtful.
    """
    values: list[int | None] = [POSITIVE] * len(mentions)
    starts = [first for first, _, _ in mentions]
    text = single_marks(text)
    sentences = sentence_spans(text)
    for first, behind in sentence_runs([text[start:end] for start, end in sentences]):
        start, end = sentences[first][0], sentences[behind - 1][1]
        places = range(bisect_left(starts, start), bisect_left(starts, end))
        inside = {place: mentions[place] for place in places if mentions[place][1] <= end}
        if inside:
            sentence, moved = spell(text[start:end])
            spans = [Span(moved[one - start], moved[other - start - 1] + 1) for one, other, _ in inside.values()]
            scopes = Scopes(sentence, spans, spans)
            last = {entity: span.start for (_, _, entity), span in zip(inside.values(), spans, strict=True)}
            for (place, (_, _, entity)), span in zip(inside.items(), spans, strict=True):
                cue = scopes.find(span)
                is_title = cue is None and scopes.is_heading(span) and span.start < last[entity]
                values[place] = None if is_title else conventions.value_of(cue, sentence[span.start : span.end])
    return values
