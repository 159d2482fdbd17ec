"""Rule-based labeler of the CheXpert findings in reports: positive, negative or uncertain.

    label_report("Small left effusion. No pneumothorax.")    # {"Pleural Effusion": 1, "Pneumothorax": 0}
    find_mentions("No focal consolidation, effusion or edema.")   # each with its phrase and its cue

A labeler like that of CheXpert and MIMIC-CXR (Irvin et al., arXiv 1901.07031, section 2.2), but without a parser:
phrases are in `medvl.data.reports.labeler_lexicon`, cues in `labeler_cues`, and `labeler_scopes` decides which cue
applies to which phrase. In each sentence,

1. each match of a finding's phrases is a mention;
2. its value comes from a cue within the phrase ("heart is not enlarged"), else from a "versus" beside it, else from the
   nearest cue after it that reaches back, else from the nearest cue before it that reaches it;
3. without a cue it is positive. Mentions of a history ("history of pneumonia") are left out.

Among the mentions of a report, positive takes precedence over uncertain, and uncertain over negative.

Conventions: "consistent with" is positive; old, unchanged and partly resolved findings are present; "no new effusion"
is negative; heart failure is Edema, as in CheXpert; a blunted costophrenic angle is an effusion unless the sentence
names one; "small left, no right effusion" and "no right effusion, small left" name an effusion of the left. Those about
doubt and vascular congestion are options (`Conventions`). The labeler reads English reports of chest radiographs and
does not correct misspellings.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Literal

from medvl.common.checks import check_choice
from medvl.data.reports import labeler_lexicon as lexicon
from medvl.data.reports.labeler_cues import EXTENTS, Table
from medvl.data.reports.labeler_notation import sentence_runs, single_marks, spell
from medvl.data.reports.labeler_scopes import WORD, Cue, Scopes, Span, compile_table
from medvl.data.reports.sentences import split_sentences
from medvl.errors import ConfigError, MedvlError
from medvl.schema import FINDINGS, NEGATIVE, POSITIVE, UNCERTAIN, ConventionsName

_STRENGTH = (NEGATIVE, UNCERTAIN, POSITIVE)
_NO_NOT = rf"(?!not ){WORD}"
_PARTS = "pleural|lung|focal|apical|basal|basilar|upper|middle|lower|lobe"
NAMES = "|".join(compile_table(table).pattern for table in lexicon.MENTIONS.values())
"""Regular expression of the phrases that name a finding."""
_PHRASES = tuple(itertools.chain(*lexicon.MENTIONS.values(), *lexicon.SIGNS.values()))
_NOUN = rf"(?P<noun>(?:(?:{_PARTS}) ){{0,3}}(?:{NAMES}))"
_SIDE, _OTHER_SIDE = (rf"{side}(?:[ -]sided)?" for side in ("(?P<side>left|right)", "(?!(?P=side))(?:left|right)"))
_ON_SIDE, _ON_OTHER_SIDE = (rf"(?:on|at|in) the {side}" for side in (_SIDE, _OTHER_SIDE))
_NEXT = rf"(?:(?:but|and|with) )?(?:an? )?(?:{EXTENTS})"
_SHARED_NOUNS = tuple(map(re.compile, (
    rf"\b(?:{EXTENTS}) {_SIDE}(?=,? (?:(?:and|but) )?no (?:(?:{EXTENTS}) )?{_OTHER_SIDE} {_NOUN})",
    rf"\b{_NOUN} {_ON_SIDE}[,;]? {_NEXT}(?= {_ON_OTHER_SIDE}\b)",
    rf"\b{_SIDE} {_NOUN}[,;] {_NEXT} {_OTHER_SIDE}(?=[.,;]|$)",
    rf"\b{_SIDE} {_NOUN}\b[^.]{{0,60}}? {_OTHER_SIDE}(?= one\b(?! third))",
)))  # fmt: skip
"""The place of a noun that only another side has: "small left, no right effusion", "no effusion on the left, moderate
on the right", "no right effusion, small left", "the right effusion is gone but the left one is unchanged"."""

Doubt = Literal["present", "doubtful"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Conventions:
    """What counts as present (1) and what as doubtful (-1). The defaults are those of CheXpert's released labeler."""

    borderline: Literal["present", "enlarged", "doubtful"] = "enlarged"
    """"enlarged": "borderline cardiomegaly" is present, "borderline heart size" is doubtful."""
    probable: Doubt = "doubtful"
    """"Probable", "likely", "favored"; "possible", "suggestive of" and "cannot be excluded" are always doubtful."""
    alternative: Doubt = "doubtful"
    """The first side of "versus"; the second one is always doubtful."""
    congestion: Literal["present", "doubtful", "left out"] = "doubtful"
    """Vascular congestion, as Edema."""
    silhouette: Literal["present", "left out"] = "present"
    """An enlarged cardiac silhouette or shadow, as Cardiomegaly."""

    def value_of(self, cue: Cue | None, phrase: str) -> int | None:
        """Return the value of a phrase with a cue: 1, 0 or -1; None if it does not describe the image."""
        if cue is None:
            return POSITIVE
        kinds: dict[str, str] = {
            "borderline": self.borderline,
            "probable": self.probable,
            "alternative": self.alternative,
        }
        choice = kinds.get(cue.kind)
        if choice is None:
            return cue.value
        is_present = choice == "present" or (choice == "enlarged" and _ENLARGED.search(phrase))
        return POSITIVE if is_present else UNCERTAIN

    def value_of_sign(self, phrase: str) -> int | None:
        """Return the value of a phrase without a cue, which may be a sign of a finding instead of its name."""
        choice: str = self.congestion if _CONGESTION.fullmatch(phrase) else "present"
        choice = self.silhouette if _SILHOUETTE.search(phrase) else choice
        return _VALUES[choice]


CONVENTIONS: Mapping[ConventionsName, Conventions] = {
    "chexpert": Conventions(),
    "doubtful": Conventions(borderline="doubtful"),
    "indexed": Conventions(probable="present", alternative="present", congestion="left out", silhouette="left out"),
}
"""Name -> conventions: of CheXpert's released labeler; with any borderline finding as doubtful; of people who index
reports with MeSH terms, as those of Open-i."""
CHEXPERT = CONVENTIONS["chexpert"]


def conventions_named(name: ConventionsName, *, error: type[MedvlError] = ConfigError) -> Conventions:
    """Return conventions by name. Raises `error` if it is unknown."""
    check_choice(name, CONVENTIONS, "conventions", error=error)
    return CONVENTIONS[name]


_VALUES = {"present": POSITIVE, "doubtful": UNCERTAIN, "left out": None}
_CONGESTION = compile_table((lexicon.CONGESTION,))
_SILHOUETTE = re.compile(r"\b(?:cardiac|heart) (?:silhouette|shadow|contour)")
_ENLARGED = re.compile("cardiomegaly|enlarge|widen|prominen|large")


@dataclasses.dataclass(frozen=True, slots=True)
class Mention:
    """A mention of a finding in a text."""

    finding: str
    value: int
    """1 positive, 0 negative, -1 uncertain."""
    sentence: str
    phrase: str
    """Words of the sentence that name the finding."""
    start: int
    """Place of the phrase in the sentence."""
    cue: str
    """Words that make it negative or uncertain; "" where it is positive."""


def label_report(text: str, conventions: Conventions = CHEXPERT) -> dict[str, int]:
    """Return label -> 1, 0 or -1 for the findings that a text mentions, in the order of `FINDINGS`.

    No Finding is 1 where no finding except devices is positive or uncertain, as in CheXpert; blank texts have no label.
    """
    labels: dict[str, int] = {}
    for mention in find_mentions(text, conventions):
        labels[mention.finding] = max(labels.get(mention.finding, NEGATIVE), mention.value, key=_STRENGTH.index)
    disease = [value for name, value in labels.items() if name != "Support Devices"]
    if text.strip() and all(value == NEGATIVE for value in disease):
        labels["No Finding"] = POSITIVE
    return {name: labels[name] for name in FINDINGS if name in labels}


def find_mentions(text: str, conventions: Conventions = CHEXPERT) -> list[Mention]:
    """Return all mentions of findings, sentence by sentence; No Finding has none."""
    sentences = split_sentences(single_marks(text))
    statements = (" ".join(sentences[first:end]) for first, end in sentence_runs(sentences))
    return [mention for each in statements for mention in _mentions_in(_rewrite(spell(each)[0]), conventions)]


def _rewrite(sentence: str) -> str:
    """Return the sentence with nouns that two sides share behind each of them."""
    if "left" in sentence and "right" in sentence:
        for pattern in _SHARED_NOUNS:
            sentence = pattern.sub(r"\g<0> \g<noun>", sentence)
    return sentence


def _mentions_in(sentence: str, conventions: Conventions) -> Iterator[Mention]:
    named: dict[str, list[Span]] = {}
    if compile_table(_PHRASES).search(sentence):
        named = {finding: _spans(table, sentence) for finding, table in lexicon.MENTIONS.items()}
        for finding, table in lexicon.SIGNS.items():
            named[finding] = named[finding] or _spans(table, sentence)
    everything = [span for spans in named.values() for span in spans]
    names = [span for finding, spans in named.items() if finding != "Support Devices" for span in spans]
    scopes = Scopes(sentence, everything, names) if everything else None
    for finding, spans in named.items():
        last = max((span.start for span in spans), default=0)
        for span in spans:
            cue = scopes.find(span) if scopes else None
            phrase = sentence[span.start : span.end]
            value = conventions.value_of(cue, phrase) if cue else conventions.value_of_sign(phrase)
            is_title = cue is None and scopes and scopes.is_heading(span) and span.start < last
            if value is not None and not is_title:
                words = "" if cue is None or value == POSITIVE else sentence[cue.start : cue.end].strip(" ,:=?|([-")
                yield Mention(finding, value, sentence, phrase, span.start, words)
    for findings, table in lexicon.NORMAL.items():
        normal = compile_table(table, _NO_NOT).search(sentence)
        if normal is not None:
            for finding in findings:
                yield Mention(finding, NEGATIVE, sentence, normal[0], normal.start(), normal[0])


def _spans(table: Table, sentence: str) -> list[Span]:
    return [Span(*match.span()) for match in compile_table(table).finditer(sentence)]
