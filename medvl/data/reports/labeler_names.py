"""Names of values in templates, for `medvl.data.reports.labeler`: "pneumothorax: none", "effusion = small".

A name is a phrase, or a list of phrases, before a colon, an equals sign or a question mark. Its cue is that of the
value behind the mark; without any cue it is present ("effusion: small left").
"""

import dataclasses
import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from medvl.data.reports import labeler_cues as tables
from medvl.schema import NEGATIVE, POSITIVE


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """Characters of a sentence."""

    start: int
    end: int


@dataclasses.dataclass(frozen=True, slots=True)
class Cue(Span):
    """A cue in a sentence."""

    value: int | None
    """1 positive, 0 negative, -1 uncertain; None if the phrases in its scope do not describe the image."""
    side: str
    yields: bool = False
    after_events: bool = False
    kind: tables.Kind = "plain"


_MARK = re.compile(r"[:=?]")
_LIST = (
    r"(?:(?:(?:any|acute|new|focal|pleural|pulmonary|lung|rib|left|right|bilateral|evidence of) )*\0++"
    r"(?: ?[,/] ?|,? (?:and|or) | \+ )?)+ ?"
)
_NAMES = re.compile(
    r"(?:^|(?<=[.;|:=,)\]] )|(?<=\byes )|(?<=\bnone )|(?<=\bnil )|(?<=\bseen )|(?<=sent )|(?<=tive ))"
    rf"{_LIST}[:=?](?!>)|(?<=[:=] no ){_LIST}[:=](?= ?(?:yes|no|none|nil|neg|pos|present|absent)\b)"
)
"""Names with their mark, in a sentence whose phrases are replaced by NUL characters."""
_HAS_ADJECTIVE = re.compile(r" (?:is|are|appears|remains) |enlarg|widen|prominen|increas|large|borderline|[:=,(]")
_OPENING = re.compile(r" ?(?:there (?:is|are|was|were) )?(?:a |an )?")
_EXTENTS = re.compile(rf"\b(?:{tables.EXTENTS})\b")


def find_names(
    sentence: str,
    phrases: Iterable[Span],
    starts: Sequence[int],
    before: Iterable[Cue],
    after: Iterable[Cue],
) -> dict[int, Cue | None]:
    """Return start -> cue of the phrases that are names; a name without any value has a cue of the value None.

    Args:
        sentence: as `medvl.data.reports.labeler_notation.spell` writes it.
        phrases: phrases that may be names.
        starts: places of all phrases, in order.
        before: cues of the sentence before their phrases.
        after: cues of the sentence behind their phrases.
    """
    if not _MARK.search(sentence):
        return {}
    spans = [span for span in phrases if not _HAS_ADJECTIVE.search(sentence, span.start, span.end)]
    marked = list(sentence)
    for span in spans:
        marked[span.start : span.end] = "\0" * (span.end - span.start)
    found: dict[int, Cue | None] = {}
    own_starts = sorted(span.start for span in spans)
    words = {span.start: sentence[span.start : span.end] for span in spans}
    first_cues = {cue.start: cue for cue in before}
    after_cues = sorted(after, key=lambda cue: cue.start)
    after_starts = [cue.start for cue in after_cues]
    names = list(_NAMES.finditer("".join(marked)))
    ends = [*(name.start() for name in names), len(sentence)][1:]
    for name, end in zip(names, ends, strict=False):
        mark = name.end() - 1
        own = own_starts[bisect_left(own_starts, name.start()) : bisect_left(own_starts, mark)]
        opening = _OPENING.match(sentence, name.end())
        first = first_cues.get(opening.end() if opening else name.end())
        place = bisect_left(starts, mark)
        named = starts[place] if place < len(starts) and starts[place] < end else None
        if first and first.value != NEGATIVE and named and words.get(named) != words[own[-1]]:
            first = None  # the doubt is about another phrase: "opacity: possible pneumonia"
        inner = after_cues[bisect_left(after_starts, name.start()) : bisect_left(after_starts, end)]
        cue = next((cue for cue in inner if cue.start <= mark < cue.end), first)
        if cue is None and named is None:
            cue = next((cue for cue in inner if cue.value != POSITIVE), None)
            if cue is not None and _EXTENTS.search(sentence, cue.end, end):
                cue = None  # "right: none, left: small"
        if cue is None and not sentence[mark + 1 : end].strip(" .;,"):
            cue = Cue(mark, mark + 1, None, "after")
        found |= dict.fromkeys(own, cue)
    return found
