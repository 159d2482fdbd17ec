"""Scopes of cues in a sentence for `medvl.data.reports.labeler`: which cue applies to which phrase.

A cue reaches from its own place to the next stop. Stops are the ends of clauses, and further

* for negations before a phrase: `SCOPE_ENDS` ("no effusion | with an enlarged heart");
* for cues after a phrase: commas, except in a list that ends with "and" or "or", and for doubts
  `LINKS` ("opacity consistent | with pneumonia in the appropriate clinical setting") and, for nouns
  such as removal, `EVENTS`;
* for "versus": commas, "and", predicates, `LINKS` and `SCOPE_ENDS`.

Ends of clauses are `BORDER` (semicolons, colons, dashes, bars, bullets) and `CLAUSE_ENDS`.
Parentheses end a scope where they hold a phrase ("no effusion | (small nodule)"), unless they
continue it ("no disease (pneumonia, edema)"). Names of a template have the value behind their mark
(`medvl.data.reports.labeler_scopes`).

A comma or "and" ends a clause if what follows begins with one of `CLAUSE_OPENERS`, or has a
predicate where something before it has one too ("no effusion is seen | and the heart is enlarged"),
or has one of `PERSISTENCE` after a negation such as "resolution of"; not in a list that goes on
with "or".

All positions are sorted and found by bisection, so that the time is proportional to the length of
the sentence.
"""

import dataclasses
import functools
import itertools
import re
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from medvl.data.reports import labeler_lexicon as tables
from medvl.schema import NEGATIVE, POSITIVE, UNCERTAIN

# Names of values in templates, for `medvl.data.reports.labeler`: "pneumothorax: none", "effusion
# = small".
#
# A name is a phrase, or a list of phrases, before a colon, an equals sign or a question mark. Its
# cue is that of the value behind the mark; without any cue it is present ("effusion: small
# left").


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """Characters of a sentence."""

    start: int
    end: int


@dataclasses.dataclass(frozen=True, slots=True)
class Cue(Span):
    """A cue in a sentence."""

    value: int | None
    """1 positive, 0 negative, -1 uncertain; None if the phrases in its scope do not describe the
    image.
    """
    side: str
    yields: bool = False
    after_events: bool = False
    kind: tables.Kind = "plain"


_MARK = re.compile(r"[:=?]")
_LIST = (
    r"(?:(?:(?:any|acute|new|focal|pleural|pulmonary|lung|rib|left|right|bilateral|evidence of) "
    r")*\0++"
    r"(?: ?[,/] ?|,? (?:and|or) | \+ )?)+ ?"
)
_NAMES = re.compile(
    r"(?:^|(?<=[.;|:=,)\]] )|(?<=\byes )|(?<=\bnone )|(?<=\bnil )|(?<=\bseen )|(?<=sent "
    r")|(?<=tive ))"
    rf"{_LIST}[:=?](?!>)|(?<=[:=] no ){_LIST}[:=](?= ?(?:yes|no|none|nil|neg|pos|present|absent)\b)"
)
"""Names with their mark, in a sentence whose phrases are replaced by NUL characters."""
_HAS_ADJECTIVE = re.compile(
    r" (?:is|are|appears|remains) |enlarg|widen|prominen|increas|large|borderline|[:=,(]"
)
_OPENING = re.compile(r" ?(?:there (?:is|are|was|were) )?(?:a |an )?")
_EXTENTS = re.compile(rf"\b(?:{tables.EXTENTS})\b")


def find_names(
    sentence: str,
    phrases: Iterable[Span],
    starts: Sequence[int],
    before: Iterable[Cue],
    after: Iterable[Cue],
) -> dict[int, Cue | None]:
    """Return start -> cue of the phrases that are names; a name without any value has a cue of the
    value None.

    Args:
        sentence: as `medvl.data.reports.labeler.spell` writes it.
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
    cues: dict[int, Cue | None] = {}
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
        cues |= dict.fromkeys(own, cue)
    return cues


WORD = r"[\w'/-]+"
_OPENER = "|".join(tables.CLAUSE_OPENERS)
_NO_VALUE = (
    r"(?<!\bof)(?<!\bfor)(?<!\bno)(?<!\bfollowing)(?<!\bwithout)(?<!\babsent)(?<!\bnegatives)"
    r"(?<!\bexcludes)(?<!\bddx)(?<!\bdiagnosis)"
)
"""Words before a colon that opens a list of phrases in the scope of a cue: "no evidence of:
edema, effusion".
"""
BORDER = "|".join((
    # ellipsis, dash, bullets, arrows
    "[;=|\\[\\]\u2026\u2014\u2022\u00b7\u25cf\u25aa\u25ba\u25b8\u2023\u2192]",
    r" ?[-=]+>",
    rf"{_NO_VALUE}:(?!\d)",
    r"\.{2,}|(?<=[a-z]{3})\.(?=[a-z]{3})",  # "no edema.left effusion"
    " [*~\u2013] | // ",
    "(?<!left)(?<!right)(?<! l)(?<! r) > ",
    # not "right- and left-sided"
    r" -{1,3} | -(?=[a-z])(?!-?ve\b)|(?<=[a-z])- (?!and\b|or\b|to\b)",
    rf"(?<=[a-z]{{4}})(?<!left)(?<!right)[-\u2013](?=(?:{_OPENER})\b)",  # "no edema-small effusion"
))  # fmt: skip
"""Regular expression of marks between two clauses."""
_SEPARATOR = re.compile(
    rf"(?P<end>{BORDER}|[()]|\b(?:{'|'.join(tables.CLAUSE_ENDS)})\b)"
    r"|(?P<or>,? \(?(?:or|nor)\b)|(?P<slash> / | ?\+ (?=[a-z])|(?<!\b\w)/)"
    r"|(?P<and>,? (?:and\b|& ?))|(?P<comma>,)"
)
_PARENTHESES = re.compile(r"[(\[]([^()\[\]]*)[)\]]")
_NO_LINK_WORD = re.compile(r"\b(?!(?:or|and|pleural|focal|acute|pulmonary|new)\b)\w+")
_CONTINUES = re.compile(
    r"\W*(?:or|nor|and|e\.?g\b|i\.?e\b|such as|including|namely|specifically)\b"
)
_NEGATION = re.compile(rf"\b(?:no|not|nor|neither|without|{tables.NEGATIVE_OF})\b")
_NEGATIVE_OF = re.compile(rf"\b{tables.NEGATIVE_OF}\b")
_NEAR = 80
"""Characters before parentheses in which a negation is looked for."""
_SAME_SUBJECT = re.compile(r" (?:now |since )?(?:is|are|was|were|has|have|had|no longer|not)\b")
_NEAR_COMMA = re.compile(r"(?: \w{1,20})?,")
_AFTER_MARK = (
    "(?: ?(?:[,:=|(]|-{1,2}|[\u2013\u2014\u2026]|\\.{2,3}) ?(?:which |that |now "
    "|since |there (?:is|are) )*)?"
)


@functools.cache
def compile_table(table: tables.Table, word: str = WORD, prefix: str = "") -> re.Pattern[str]:
    """Compile a pattern of all entries of a table; ".." matches up to five of `word`, "~" up to
    four qualifiers.
    """
    own = (
        rf"(?: {word}){{0,2}}? ?(?:[:=(]|[-\u2013\u2014]) "
        rf"?(?:(?!aort|lung|hil|vasc|pulm|vess){word} ){{0,2}}?"
    )
    gaps = {
        " .. ": f"(?: (?:{word} ){{0,5}}?|{own})",
        " ~ ": f" (?:(?:{tables.QUALIFIERS}) ){{0,4}}?",
    }
    runs = []
    for has_own_bounds, entries in itertools.groupby(
        table, key=lambda entry: entry.startswith("\\")
    ):
        pattern = re.sub(r"(?<=\w)\*", r"\\w*", "|".join(entries))
        for sign, gap in gaps.items():
            pattern = pattern.replace(sign, gap)
        runs.append(pattern if has_own_bounds else rf"\b(?:{pattern})(?!\w)")
    return re.compile(prefix + "(?:" + "|".join(runs) + ")")


class _Cues:
    """Cues in the order of the sentence, and the stops of their scopes."""

    def __init__(self, cues: Iterable[Cue], stops: Iterable[int]) -> None:
        self._cues = sorted(cues, key=lambda cue: cue.start)
        self._starts = [cue.start for cue in self._cues]
        self._ends = [cue.end for cue in self._cues]
        self._stops = sorted(stops)

    def before(self, position: int) -> Cue | None:
        """Return the last cue before a position that reaches it."""
        index = bisect_right(self._ends, position) - 1
        return (
            None
            if index < 0 or _has(self._stops, self._ends[index], position)
            else self._cues[index]
        )

    def after(self, position: int) -> Cue | None:
        """Return the first cue after a position that reaches it."""
        index = bisect_left(self._starts, position)
        if index == len(self._cues) or _has(self._stops, position, self._starts[index]):
            return None
        return self._cues[index]

    def inside(self, span: Span) -> list[Cue]:
        """Return the cues within a span."""
        cues = self._cues[
            bisect_left(self._starts, span.start) : bisect_left(self._starts, span.end)
        ]
        return [cue for cue in cues if cue.end <= span.end]


class Scopes:
    """The cues of a sentence and their scopes.

    Args:
        sentence: a sentence as `medvl.data.reports.labeler.spell` writes it.
        phrases: all phrases that may be negated.
        names: those of the phrases that a template may have as names of its values.
    """

    def __init__(self, sentence: str, phrases: Collection[Span], names: Collection[Span]) -> None:
        self._sentence = sentence
        starts = sorted(phrase.start for phrase in phrases)
        clauses = _split_clauses(sentence, starts)
        explained = _starts(tables.LINKS, sentence)
        pseudo = _starts(tables.PSEUDO_CUES, sentence)
        scope_ends = [*clauses.ends, *_starts(tables.SCOPE_ENDS, sentence), *pseudo]
        self._commas = clauses.commas

        cues = _find_cues(
            _blanked(sentence, compile_table(tables.PSEUDO_CUES)),
            ("before", "after", "either", "between"),
        )
        negations = _Cues(
            (cue for cue in cues if cue.side == "before" and cue.value == NEGATIVE), scope_ends
        )
        cues = [cue for cue in cues if not (cue.yields and negations.before(cue.start))]
        cues = _choose_sides(
            sentence, cues, starts, sorted([*scope_ends, *clauses.loose_commas]), negations
        )
        before = [cue for cue in cues if cue.side == "before"]
        self._doubts = _Cues((cue for cue in before if cue.value == UNCERTAIN), clauses.ends)
        self._negations = _Cues((cue for cue in before if cue.value != UNCERTAIN), scope_ends)
        after = [cue for cue in cues if cue.side == "after"]
        ends = [*clauses.ends, *clauses.loose_commas]
        self._doubts_after = _Cues(
            (cue for cue in after if cue.value == UNCERTAIN), [*ends, *explained]
        )
        negative = [cue for cue in after if cue.value == NEGATIVE]
        self._negations_after = _Cues((cue for cue in negative if not cue.after_events), ends)
        events = _starts(tables.EVENTS, sentence)
        self._removals_after = _Cues(
            (cue for cue in negative if cue.after_events), [*ends, *events]
        )
        self._positives_after = _Cues((cue for cue in after if cue.value == POSITIVE), ends)
        self._headings = find_names(sentence, names, starts, before, after)
        predicates = _starts(tables.PREDICATES, sentence)
        between = (cue for cue in cues if cue.side == "between")
        self._between = _Cues(between, [*scope_ends, *clauses.joints, *explained, *predicates])

    @functools.cached_property
    def _inside(self) -> _Cues:
        return _Cues(_find_cues(self._sentence, ("before", "either", "between")), ())

    def find(self, phrase: Span) -> Cue | None:
        """Return the cue that applies to a phrase: within it, between it and another, after it, or
        before it.

        The cue of a name in a template is that of its value; a name without any value has a cue of
        the value None.
        """
        inside = (
            self._inside.inside(phrase) if " " in self._sentence[phrase.start : phrase.end] else []
        )
        if inside:
            return max(inside, key=lambda cue: cue.value == NEGATIVE)
        if phrase.start in self._headings:
            return self._headings[phrase.start]
        between = self._between.after(phrase.end)
        doubt = self._doubts.before(phrase.start) if between else None
        if between and doubt and doubt.kind == "plain":
            between = dataclasses.replace(between, kind="plain")
        if between is None and (other := self._between.before(phrase.start)):
            between = dataclasses.replace(other, kind="other alternative")
        return between or self._find_after(phrase) or self._find_before(phrase)

    def is_heading(self, phrase: Span) -> bool:
        """Return whether a phrase is the name of a value that follows: "effusion: small left"."""
        return phrase.start in self._headings

    def _find_after(self, phrase: Span) -> Cue | None:
        """Return the next cue after a phrase; across commas only if a comma follows the phrase
        or its next word.
        """
        parts = (
            self._positives_after,
            self._doubts_after,
            self._negations_after,
            self._removals_after,
        )
        cues = [part.after(phrase.end) for part in parts]
        cue = min((cue for cue in cues if cue), key=lambda cue: cue.start, default=None)
        if cue is None or not _has(self._commas, phrase.end, cue.start):
            return cue
        return cue if _NEAR_COMMA.match(self._sentence, phrase.end) else None

    def _find_before(self, phrase: Span) -> Cue | None:
        cues = (self._doubts.before(phrase.start), self._negations.before(phrase.start))
        return max((cue for cue in cues if cue), key=lambda cue: cue.start, default=None)


def _find_cues(sentence: str, sides: Sequence[str]) -> list[Cue]:
    """Return the cues of a sentence, table by table; a match is blanked for the tables that
    follow.
    """
    cues = []
    for table in tables.CUES:
        # fast without the optional prefix
        if table.side in sides and compile_table(table.entries).search(sentence):
            pattern = compile_table(
                table.entries, prefix=_AFTER_MARK if table.side in ("after", "either") else ""
            )
            cues += [
                Cue(
                    *match.span(),
                    table.value,
                    table.side,
                    table.yields,
                    table.after_events,
                    table.kind,
                )
                for match in pattern.finditer(sentence)
            ]
            sentence = _blanked(sentence, pattern)
    return cues


def _choose_sides(
    sentence: str, cues: list[Cue], phrases: Sequence[int], stops: Sequence[int], negations: _Cues
) -> list[Cue]:
    """Give cues on either side the side "before" if a phrase is next, without a stop or cue
    between, else "after".

    Of the latter, doubts are left out that belong to a noun ("possible hernia") or are negated ("no
    edema suspected").
    """
    others = sorted(cue.start for cue in cues)
    predicate = compile_table(tables.PREDICATE_ENDS, prefix=" *(?:[^ \\w]|$)| ")
    sides = []
    for cue in cues:
        if cue.side == "either":
            index = bisect_left(phrases, cue.end)
            end = phrases[index] if index < len(phrases) else -1
            if end >= 0 and not _has(stops, cue.end, end) and not _has(others, cue.end, end):
                cue = dataclasses.replace(cue, side="before")
            elif cue.value == NEGATIVE or (
                predicate.match(sentence, cue.end) and not negations.before(cue.start)
            ):
                cue = dataclasses.replace(cue, side="after")
            else:
                continue
        sides.append(cue)
    return sides


@dataclasses.dataclass(slots=True)
class _Clauses:
    """Positions in a sentence."""

    ends: list[int] = dataclasses.field(default_factory=list)
    """Ends of clauses."""
    commas: list[int] = dataclasses.field(default_factory=list)
    loose_commas: list[int] = dataclasses.field(default_factory=list)
    """Commas that are not part of a list with "and" or "or"."""
    joints: list[int] = dataclasses.field(default_factory=list)
    """All commas and "and", and other ends of clauses."""


class _Piece(NamedTuple):
    """Part of a sentence between two separators."""

    separator: str
    """Kind of the separator before it: "end", "or", "slash", "and" or "comma"."""
    position: int
    """Start of the separator."""
    text: str
    has_predicate: bool
    persists: bool
    """Whether its predicate is one of `PERSISTENCE`."""
    is_negated: bool
    is_negative_of: bool
    """Whether the negation is one with an object, such as "resolution of"."""


def _split_pieces(sentence: str) -> Iterator[_Piece]:
    tests = (
        compile_table(tables.PREDICATES),
        compile_table(tables.PERSISTENCE),
        _NEGATION,
        _NEGATIVE_OF,
    )
    start = 0
    separator = "end"
    position = 0
    for match in itertools.chain(_SEPARATOR.finditer(sentence), (None,)):
        text = sentence[start : match.start() if match else None]
        yield _Piece(separator, position, text, *(test.search(text) is not None for test in tests))
        if match:
            start = match.end()
            separator = match.lastgroup or "end"
            position = match.start()


def _split_clauses(sentence: str, phrases: Sequence[int]) -> _Clauses:
    pieces = list(_split_pieces(_without_parentheses(sentence, phrases)))
    # From the end: whether a piece is in a list that goes on with "or", or with "or" or "and".
    in_or_list = [False] * len(pieces)
    in_list = [False] * len(pieces)
    for index in range(len(pieces) - 2, -1, -1):
        piece = pieces[index]
        following = pieces[index + 1]
        goes_on = (
            following.separator == "comma" and not piece.has_predicate and not following.is_negated
        )
        in_or_list[index] = following.separator in ("or", "slash") or (
            goes_on and in_or_list[index + 1]
        )
        in_list[index] = following.separator in ("or", "and", "slash") or (
            goes_on and in_list[index + 1]
        )

    clauses = _Clauses()
    predicate = pieces[0].has_predicate
    negated = pieces[0].is_negated
    negative_of = pieces[0].is_negative_of
    after_or = False
    for index, piece in enumerate(pieces[1:], start=1):
        is_joint = piece.separator in ("and", "comma")
        has_comma = sentence[piece.position] == ","
        opens_like_comma = has_comma or piece.separator == "slash"
        ends = piece.separator == "end"
        if (is_joint or piece.separator == "slash") and not in_or_list[index]:
            named = _has(phrases, clauses.ends[-1] if clauses.ends else 0, piece.position)
            start = len(piece.text) - len(piece.text.lstrip())
            opens = (
                compile_table(_openers(opens_like_comma, named)).match(piece.text, start)
                is not None
            )
            shared = piece.separator == "and" and _SAME_SUBJECT.match(piece.text) is not None
            own = predicate or (has_comma and negated) or (piece.persists and negative_of)
            own = own and piece.has_predicate and not shared
            ends = opens or own or (has_comma and after_or)
        if ends:
            clauses.ends.append(piece.position)
            predicate = negated = negative_of = after_or = False
        if has_comma:
            clauses.commas.append(piece.position)
            if piece.separator == "comma" and not in_list[index]:
                clauses.loose_commas.append(piece.position)
        if is_joint or ends:
            clauses.joints.append(piece.position)
        predicate = predicate or piece.has_predicate
        negated = negated or piece.is_negated
        negative_of = negative_of or piece.is_negative_of
        after_or = after_or or piece.separator in ("or", "slash")
    return clauses


def _without_parentheses(sentence: str, phrases: Sequence[int]) -> str:
    """Return a sentence with blanks for parentheses that end no scope."""

    def blank(match: re.Match[str]) -> str:
        negations = list(_NEGATION.finditer(sentence, max(0, match.start() - _NEAR), match.start()))
        explains = bool(negations) and not _has(phrases, negations[-1].end(), match.start())
        opens = compile_table(tables.CLAUSE_OPENERS).match(match[1]) is not None
        named = bisect_left(phrases, match.end()) - bisect_left(phrases, match.start())
        lists = len(_NO_LINK_WORD.findall(match[1])) == named
        if lists or not named or _CONTINUES.match(match[1]) or (explains and not opens):
            return f" {match[1]} "
        return match[0]

    return _PARENTHESES.sub(blank, sentence)


def _openers(has_comma: bool, named: bool) -> tables.Table:
    return (
        tables.CLAUSE_OPENERS
        if has_comma
        else tables.AND_OPENERS
        if named
        else tables.AND_OPENERS[:1]
    )


def _starts(table: tables.Table, sentence: str) -> list[int]:
    return [match.start() for match in compile_table(table).finditer(sentence)]


def _has(positions: Sequence[int], start: int, end: int) -> bool:
    """Return whether a sorted sequence has a value in [start, end)."""
    index = bisect_left(positions, start)
    return index < len(positions) and positions[index] < end


def _blanked(sentence: str, pattern: re.Pattern[str]) -> str:
    return pattern.sub(lambda match: " " * len(match[0]), sentence)
