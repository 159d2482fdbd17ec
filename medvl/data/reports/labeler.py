"""The CheXpert findings that a report names, denies or doubts, by rules that can be read.

    label_report("Small left effusion. No pneumothorax.")    # {"Pleural Effusion": 1, "Pneumothorax": 0}
    find_mentions("No focal consolidation, effusion or edema.")   # each with its phrase and the cue that decided it

A rule labeler of the kind that labelled CheXpert and MIMIC-CXR (Irvin et al., arXiv 1901.07031, section 2.2), without
a parser: phrases and cues are the tables of `medvl.data.reports.labeler_lexicon`. In each sentence,

1. a finding is mentioned where one of its phrases stands;
2. a cue within the phrase decides it ("heart is not enlarged"), else the nearest one behind it in its clause that
   reaches back, else the nearest one before it that reaches forward;
3. without a cue it is asserted.

Of the mentions of a report, asserted goes before doubted before denied. It reads English reports of chest radiographs;
it knows no misspellings, and takes what is old or unchanged for present.
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
    """One place in a text."""

    finding: str
    value: int
    """1 asserted, 0 denied, -1 doubted."""
    sentence: str
    phrase: str
    """The words of the sentence that name the finding."""
    cue: str
    """The words that deny or doubt it; "" where it is asserted."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Span:
    start: int
    end: int
    value: int = POSITIVE


def label_report(text: str) -> dict[str, int]:
    """Label -> 1, 0 or -1 for the findings that a text mentions, in the order of `FINDINGS`; the others are absent.

    No Finding is 1 where no finding but devices is asserted or doubted, as in CheXpert; a text without a word has none.
    """
    labels: dict[str, int] = {}
    for mention in find_mentions(text):
        labels[mention.finding] = max(labels.get(mention.finding, NEGATIVE), mention.value, key=_STRENGTH.index)
    disease = [value for name, value in labels.items() if name != "Support Devices"]
    if text.strip() and all(value == NEGATIVE for value in disease):
        labels["No Finding"] = POSITIVE
    return {name: labels[name] for name in FINDINGS if name in labels}


def find_mentions(text: str) -> list[Mention]:
    """Every mention of a finding but No Finding, sentence by sentence."""
    return [
        mention for sentence in split_sentences(text) for mention in _in_sentence(" ".join(sentence.lower().split()))
    ]


def _in_sentence(sentence: str) -> Iterator[Mention]:
    cues = _Cues(sentence)
    for finding, table in tables.MENTIONS.items():
        for match in _pattern(table).finditer(sentence):
            span = _Span(*match.span())
            cue = cues.of(span)
            value = POSITIVE if cue is None else cue.value
            said = "" if cue is None else sentence[cue.start : cue.end]
            yield Mention(finding, value, sentence, match[0], said)
    for findings, table in tables.NORMAL:
        normal = _pattern(table, _NO_NOT).search(sentence)
        if normal is not None:
            yield from (Mention(finding, NEGATIVE, sentence, normal[0], normal[0]) for finding in findings)


class _Cues:
    """The cues of a sentence, and how far each reaches."""

    def __init__(self, sentence: str) -> None:
        self.sentence = sentence
        self.ends = [match.start() for match in _clause_ends().finditer(sentence)]
        around = [_Span(*match.span(), UNCERTAIN) for match in _pattern(tables.HEDGED_AROUND).finditer(sentence)]
        self.before, self.after = list(around), list(around)
        rest = _blanked(sentence, _pattern(tables.PSEUDO))
        for reaching, table, value in (  # "not excluded" is doubt: what one table finds, the next ones do not see
            (self.after, tables.HEDGED_AFTER, UNCERTAIN),
            (self.after, tables.DENIED_AFTER, NEGATIVE),
            (self.before, tables.HEDGED_BEFORE, UNCERTAIN),
            (self.before, tables.DENIED_BEFORE, NEGATIVE),
        ):
            reaching += [_Span(*match.span(), value) for match in _pattern(table).finditer(rest)]
            rest = _blanked(rest, _pattern(table))

    def of(self, phrase: _Span) -> _Span | None:
        """The cue that decides about a phrase."""
        within = [cue for cue in self.before if phrase.start <= cue.start and cue.end <= phrase.end]
        if within:
            return min(within, key=lambda cue: _STRENGTH.index(cue.value))
        behind = [cue for cue in self.after if cue.start >= phrase.end and self._reaches_back(phrase.end, cue.start)]
        if behind:
            return min(behind, key=lambda cue: cue.start)
        ahead = [
            cue for cue in self.before if cue.end <= phrase.start and not self._ends_between(cue.end, phrase.start)
        ]
        return max(ahead, key=lambda cue: cue.start, default=None)

    def _ends_between(self, start: int, end: int) -> bool:
        return any(start <= place < end for place in self.ends)

    def _reaches_back(self, start: int, end: int) -> bool:
        """Within the clause, and across commas only where they part a list that begins with the phrase."""
        between = self.sentence[start:end]
        return not self._ends_between(start, end) and ("," not in between or _LIST.match(between) is not None)


def _blanked(sentence: str, pattern: re.Pattern[str]) -> str:
    return pattern.sub(lambda match: " " * len(match[0]), sentence)


@functools.cache
def _pattern(table: tables.Table, word: str = _WORD) -> re.Pattern[str]:
    """Any entry of a table; `word` is what ".." may stand for."""
    gap = f" (?:{word} ){{0,5}}?"
    entries = (re.sub(r"(?<=\w)\*", r"\\w*", entry).replace(" .. ", gap) for entry in table)
    return re.compile("|".join(rf"\b(?:{entry})(?!\w)" for entry in entries))


@functools.cache
def _clause_ends() -> re.Pattern[str]:
    openers = _pattern(tables.ITEM_OPENERS).pattern
    return re.compile(rf"[;:]|{_pattern(tables.CLAUSE_ENDS).pattern}|, (?:{openers})(?!.*(?:\bor\b|/))")
