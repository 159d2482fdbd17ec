"""Rule-based labeler of the CheXpert findings in reports: positive, negative or uncertain.

    label_report("Small left effusion. No pneumothorax.")    # {"Pleural Effusion": 1, "Pneumothorax": 0}
    find_mentions("No focal consolidation, effusion or edema.")   # each with its phrase and its cue

A labeler like that of CheXpert and MIMIC-CXR (Irvin et al., arXiv 1901.07031, section 2.2), but without a parser:
phrases and cues are the tables of `medvl.data.reports.labeler_lexicon`. In each sentence,

1. each match of a finding's phrases is a mention;
2. its value comes from a cue within the phrase ("heart is not enlarged"), else from the nearest cue after it in its
   clause that applies backwards, else from the nearest cue before it that applies forwards;
3. without a cue it is positive.

Among the mentions of a report, positive takes precedence over uncertain, and uncertain over negative. The labeler
reads English reports of chest radiographs, does not correct misspellings, and counts old or unchanged findings as
present.
"""

import dataclasses
import functools
import re
from collections.abc import Iterator

from medvl.data.reports import labeler_lexicon as tables
from medvl.data.reports.sentences import split_sentences
from medvl.schema import FINDINGS, NEGATIVE, POSITIVE, UNCERTAIN

_STRENGTH = (NEGATIVE, UNCERTAIN, POSITIVE)
_WORD = r"[\w'/-]+"
_NO_NOT = rf"(?!not ){_WORD}"
_LIST = re.compile(r"(?: \w+)?,.*\b(?:or|and|nor)\b")


@dataclasses.dataclass(frozen=True, slots=True)
class Mention:
    """A mention of a finding in a text."""

    finding: str
    value: int
    """1 positive, 0 negative, -1 uncertain."""
    sentence: str
    phrase: str
    """Words of the sentence that name the finding."""
    cue: str
    """Words that make it negative or uncertain; "" where it is positive."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Span:
    start: int
    end: int
    value: int = POSITIVE


def label_report(text: str) -> dict[str, int]:
    """Return label -> 1, 0 or -1 for the findings that a text mentions, in the order of `FINDINGS`.

    No Finding is 1 where no finding except devices is positive or uncertain, as in CheXpert; blank texts have no label.
    """
    labels: dict[str, int] = {}
    for mention in find_mentions(text):
        labels[mention.finding] = max(labels.get(mention.finding, NEGATIVE), mention.value, key=_STRENGTH.index)
    disease = [value for name, value in labels.items() if name != "Support Devices"]
    if text.strip() and all(value == NEGATIVE for value in disease):
        labels["No Finding"] = POSITIVE
    return {name: labels[name] for name in FINDINGS if name in labels}


def find_mentions(text: str) -> list[Mention]:
    """Return all mentions of findings, sentence by sentence; No Finding has none."""
    sentences = (" ".join(sentence.lower().split()) for sentence in split_sentences(text))
    return [mention for sentence in sentences for mention in _mentions_in(sentence)]


def _mentions_in(sentence: str) -> Iterator[Mention]:
    cues = _Cues(sentence)
    for finding, table in tables.MENTIONS.items():
        for match in _pattern(table).finditer(sentence):
            span = _Span(*match.span())
            cue = cues.find(span)
            value = POSITIVE if cue is None else cue.value
            words = "" if cue is None else sentence[cue.start : cue.end]
            yield Mention(finding, value, sentence, match[0], words)
    for findings, table in tables.NORMAL.items():
        normal = _pattern(table, _NO_NOT).search(sentence)
        if normal is not None:
            yield from (Mention(finding, NEGATIVE, sentence, normal[0], normal[0]) for finding in findings)


class _Cues:
    """The cues of a sentence and their scopes."""

    def __init__(self, sentence: str) -> None:
        self.sentence = sentence
        self.ends = [match.start() for match in _clause_ends().finditer(sentence)]
        around = [_Span(*match.span(), UNCERTAIN) for match in _pattern(tables.UNCERTAIN_AROUND).finditer(sentence)]
        self.before, self.after = list(around), list(around)
        rest = _blanked(sentence, _pattern(tables.PSEUDO_CUES))
        for cues, table, value in (  # a match of one table is blanked for the next: "not excluded" is uncertain
            (self.after, tables.UNCERTAIN_AFTER, UNCERTAIN),
            (self.after, tables.NEGATIVE_AFTER, NEGATIVE),
            (self.before, tables.UNCERTAIN_BEFORE, UNCERTAIN),
            (self.before, tables.NEGATIVE_BEFORE, NEGATIVE),
        ):
            cues += [_Span(*match.span(), value) for match in _pattern(table).finditer(rest)]
            rest = _blanked(rest, _pattern(table))

    def find(self, phrase: _Span) -> _Span | None:
        """Return the cue that applies to a phrase, or None."""
        within = [cue for cue in self.before if phrase.start <= cue.start and cue.end <= phrase.end]
        if within:
            return min(within, key=lambda cue: _STRENGTH.index(cue.value))
        later = [cue for cue in self.after if cue.start >= phrase.end and self._reaches_back(phrase.end, cue.start)]
        if later:
            return min(later, key=lambda cue: cue.start)
        start = phrase.start
        earlier = [cue for cue in self.before if cue.end <= start and not self._clause_ends_between(cue.end, start)]
        return max(earlier, key=lambda cue: cue.start, default=None)

    def _clause_ends_between(self, start: int, end: int) -> bool:
        return any(start <= position < end for position in self.ends)

    def _reaches_back(self, start: int, end: int) -> bool:
        """Return whether a cue applies backwards: within the clause, across commas only in a list after the phrase."""
        between = self.sentence[start:end]
        return not self._clause_ends_between(start, end) and ("," not in between or _LIST.match(between) is not None)


def _blanked(sentence: str, pattern: re.Pattern[str]) -> str:
    return pattern.sub(lambda match: " " * len(match[0]), sentence)


@functools.cache
def _pattern(table: tables.Table, word: str = _WORD) -> re.Pattern[str]:
    """Compile a pattern of all entries of a table; ".." matches up to five of `word`."""
    gap = f" (?:{word} ){{0,5}}?"
    entries = (re.sub(r"(?<=\w)\*", r"\\w*", entry).replace(" .. ", gap) for entry in table)
    return re.compile("|".join(rf"\b(?:{entry})(?!\w)" for entry in entries))


@functools.cache
def _clause_ends() -> re.Pattern[str]:
    openers = _pattern(tables.ITEM_OPENERS).pattern
    return re.compile(rf"[;:]|{_pattern(tables.CLAUSE_ENDS).pattern}|, (?:{openers})(?!.*(?:\bor\b|/))")
