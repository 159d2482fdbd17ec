"""Rule-based labeler of the CheXpert findings in reports: positive, negative or uncertain.

    # {"Pleural Effusion": 1, "Pneumothorax": 0}
    label_report("Small left effusion. No pneumothorax.")
    find_mentions("No focal consolidation, effusion or edema.")   # each with its phrase and its cue

A labeler like that of CheXpert and MIMIC-CXR (Irvin et al., arXiv 1901.07031, section 2.2), but
without a parser: phrases are in `medvl.data.reports.labeler_lexicon`, cues in `labeler_cues`, and
`labeler_scopes` decides which cue applies to which phrase. In each sentence,

1. each match of a finding's phrases is a mention;
2. its value comes from a cue within the phrase ("heart is not enlarged"), else from a "versus"
   beside it, else from the nearest cue after it that reaches back, else from the nearest cue before
   it that reaches it;
3. without a cue it is positive. Mentions of a history ("history of pneumonia") are left out.

Among the mentions of a report, positive takes precedence over uncertain, and uncertain over
negative.

Conventions: "consistent with" is positive; old, unchanged and partly resolved findings are present;
"no new effusion" is negative; heart failure is Edema, as in CheXpert; a blunted costophrenic angle
is an effusion unless the sentence names one; "small left, no right effusion" and "no right
effusion, small left" name an effusion of the left. Those about doubt and about words that are no
name of a finding are options (`Conventions`). The labeler reads English reports of chest
radiographs and does not correct misspellings.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from medvl.common.config_io import check_choice
from medvl.data.reports import labeler_lexicon as lexicon
from medvl.data.reports.labeler_lexicon import EXTENTS, SEEN, Table
from medvl.data.reports.labeler_scopes import WORD, Cue, Scopes, Span, compile_table
from medvl.data.reports.sentences import split_sentences
from medvl.errors import ConfigError, MedvlError
from medvl.schema import FINDINGS, NEGATIVE, POSITIVE, UNCERTAIN, ConventionsName

# Spelling of a sentence as `medvl.data.reports.labeler` reads it: marks, tick boxes and answers.
#
# spell("No  pneumothorax (−)")[0]           # "no pneumothorax none;" spell("[ ] Pneumothorax [x]
# Effusion")[0]       # "no pneumothorax; effusion;" sentence_runs(["Pneumothorax?", "No."])
# # [(0, 2)], one statement

_SAME = str.maketrans(
    {
        **dict.fromkeys("\u2018\u2019\u02bc\u00b4`", "'"),
        **dict.fromkeys("\u2010\u2011\u2212\uff0d", "-"),
        **dict.fromkeys("\u2015\u2e3a", "\u2014"),
        **dict.fromkeys("\u2205\u2300", "\u00f8"),
        **dict(zip("\uff1a\uff1b\uff0c\uff08\uff09\uff1d\uff1f", ":;,()=?", strict=True)),
    }
)
"""Characters with the same meaning in a report: apostrophes, hyphens, dashes, signs of absence,
wide punctuation.
"""

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

_EMPTY = "\\[[ _]?\\]|\\( \\)|[\u2610\u25a1\u25fb\u2b1c\u274f\u2717\u2718\u274c]"
_TICK = "\\[[xv*\u2713\u2714]\\]|\\(x\\)|[\u2611\u2612\u2713\u2714\u25a0\u25fc\u2705]\ufe0f?"
_BOX = re.compile(
    rf"(?P<empty>{_EMPTY}|(?P<minus>\(-\)(?!ve)))|(?P<tick>{_TICK}|(?P<plus>\(\+\)(?!ve)))"
)
_SIGN = re.compile(r"(?<=\w) ?(?:(?P<empty>-)|\+)(?= *(?:[,;.]|$))")
_NO_WORDS = re.compile(r"[^a-z]*")
_OPTION = re.compile(
    r"\W*(?:(?:yes|no|none|nil|present|absent|positive|negative|normal|abnormal|y|n|unknown"
    r"|small|moderate|large|mild|severe|trace|tiny|left|right|bilateral|both)\W*)+"
)
_ANSWER = re.compile(
    rf"[-\s]*(?:no|none|nil|neg|negative|absent|not {SEEN}|yes|present|positive)(?: "
    rf"{SEEN})?\s*(?:[.,;!]|$)",
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

    It is in lower case, with single blanks and one spelling of each mark. An empty box before or
    behind an item becomes "no" or "none", and the box of an item that is present disappears.
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
    """Return (first, behind the last) of sentences that are one statement: a question or a name,
    and its answer.
    """
    runs: list[tuple[int, int]] = []
    for place, sentence in enumerate(sentences):
        before = sentences[place - 1].rstrip() if place else ""
        if _UNFINISHED.search(before) or (
            before.endswith(("?", "...", "\u2026")) and _ANSWER.match(sentence)
        ):
            runs[-1] = runs[-1][0], place + 1
        else:
            runs.append((place, place + 1))
    return runs


def _edited(text: str, places: Sequence[int], edits: Iterable[_Edit]) -> tuple[str, list[int]]:
    """Return a text after edits in the order of their places, and the new places of its original
    characters.
    """
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
    """Yield the edits that write out boxes; nothing where it is open which words they are for
    ("the [ ] lobe").
    """
    before = text[: boxes[0].start()]
    behind = text[boxes[-1].end() :]
    if (
        not _NO_WORDS.fullmatch(before)
        and re.search(r"[:=]\s*$", before)
        and not _NO_WORDS.fullmatch(behind)
    ):
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
    """Yield the edits of "NAME: [ ] yes [x] no": values without a tick are left out, other items
    are negative.
    """
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


_STRENGTH = (NEGATIVE, UNCERTAIN, POSITIVE)
_NO_NOT = rf"(?!not ){WORD}"
_PARTS = "pleural|lung|focal|apical|basal|basilar|upper|middle|lower|lobe"
NAMES = "|".join(compile_table(table).pattern for table in lexicon.MENTIONS.values())
"""Regular expression of the phrases that name a finding."""
_PHRASES = tuple(itertools.chain(*lexicon.MENTIONS.values(), *lexicon.SIGNS.values()))
_NOUN = rf"(?P<noun>(?:(?:{_PARTS}) ){{0,3}}(?:{NAMES}))"
_SIDE, _OTHER_SIDE = (
    rf"{side}(?:[ -]sided)?" for side in ("(?P<side>left|right)", "(?!(?P=side))(?:left|right)")
)
_ON_SIDE, _ON_OTHER_SIDE = (rf"(?:on|at|in) the {side}" for side in (_SIDE, _OTHER_SIDE))
_NEXT = rf"(?:(?:but|and|with) )?(?:an? )?(?:{EXTENTS})"
_SHARED_NOUNS = tuple(map(re.compile, (
    rf"\b(?:{EXTENTS}) {_SIDE}(?=,? (?:(?:and|but) )?no (?:(?:{EXTENTS}) )?{_OTHER_SIDE} {_NOUN})",
    rf"\b{_NOUN} {_ON_SIDE}[,;]? {_NEXT}(?= {_ON_OTHER_SIDE}\b)",
    rf"\b{_SIDE} {_NOUN}[,;] {_NEXT} {_OTHER_SIDE}(?=[.,;]|$)",
    rf"\b{_SIDE} {_NOUN}\b[^.]{{0,60}}? {_OTHER_SIDE}(?= one\b(?! third))",
)))  # fmt: skip
"""The place of a noun that only another side has: "small left, no right effusion", "no effusion on
the left, moderate on the right", "no right effusion, small left", "the right effusion is gone but
the left one is unchanged".
"""

Doubt = Literal["present", "doubtful"]
Choice = Literal["present", "left out"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Conventions:
    """What counts as present (1) and what as doubtful (-1). The defaults are those of CheXpert's
    released labeler.
    """

    borderline: Literal["present", "enlarged", "doubtful"] = "enlarged"
    """"enlarged": "borderline cardiomegaly" is present, "borderline heart size" is doubtful."""
    probable: Doubt = "doubtful"
    """"Probable", "likely", "favored"; "possible", "suggestive of" and "cannot be excluded" are
    always doubtful.
    """
    alternative: Doubt = "doubtful"
    """The first side of "versus"; the second one, and both behind another doubt ("may represent
    edema versus scarring"), are always doubtful.
    """
    congestion: Literal["present", "doubtful", "left out"] = "doubtful"
    """Vascular congestion, as Edema."""
    silhouette: Choice = "present"
    """An enlarged cardiac silhouette or shadow, as Cardiomegaly."""
    heart_failure: Choice = "present"
    """Heart failure, as Edema."""
    infection: Choice = "present"
    """An infection or infectious process, as Pneumonia."""
    pneumonitis: Choice = "left out"
    """Pneumonitis, as Pneumonia. "left out": also where it is absent or doubtful."""

    def value_of(self, cue: Cue | None, phrase: str) -> int | None:
        """Return the value of a phrase with a cue: 1, 0 or -1; None if it does not describe the
        image.
        """
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

    def value_of_present(self, phrase: str) -> int | None:
        """Return the value of a phrase that is present, which may be a sign or another word of a
        finding instead of its name.
        """
        for name, pattern in _WORDINGS.items():
            if pattern.search(phrase):
                choice: str = getattr(self, name)
                return _VALUES[choice]
        return POSITIVE

    def reads(self, phrase: str) -> bool:
        """Return whether a phrase names a finding."""
        return self.pneumonitis == "present" or phrase != lexicon.PNEUMONITIS


CONVENTIONS: Mapping[ConventionsName, Conventions] = {
    "chexpert": Conventions(),
    "doubtful": Conventions(borderline="doubtful"),
    "indexed": Conventions(
        probable="present",
        alternative="present",
        congestion="left out",
        silhouette="left out",
        heart_failure="left out",
        infection="left out",
        pneumonitis="present",
    ),
}
"""Name -> conventions: of CheXpert's released labeler; with any borderline finding as doubtful; of
people who index reports with MeSH terms, as those of Open-i.
"""
CHEXPERT = CONVENTIONS["chexpert"]


def conventions_named(
    name: ConventionsName, *, error: type[MedvlError] = ConfigError
) -> Conventions:
    """Return conventions by name. Raises `error` if it is unknown."""
    check_choice(name, CONVENTIONS, "conventions", error=error)
    return CONVENTIONS[name]


_VALUES = {"present": POSITIVE, "doubtful": UNCERTAIN, "left out": None}
_WORDINGS: Mapping[str, re.Pattern[str]] = {
    "congestion": compile_table((lexicon.CONGESTION,)),
    "silhouette": re.compile(r"\b(?:cardiac|heart) (?:silhouette|shadow|contour)"),
    "heart_failure": compile_table((lexicon.HEART_FAILURE,)),
    "infection": compile_table((lexicon.INFECTION,)),
}
"""Field of `Conventions` -> the phrases that it is about."""
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

    No Finding is 1 where no finding except devices is positive or uncertain, as in CheXpert; blank
    texts have no label.
    """
    labels: dict[str, int] = {}
    for mention in find_mentions(text, conventions):
        labels[mention.finding] = max(
            labels.get(mention.finding, NEGATIVE), mention.value, key=_STRENGTH.index
        )
    disease = [value for name, value in labels.items() if name != "Support Devices"]
    if text.strip() and all(value == NEGATIVE for value in disease):
        labels["No Finding"] = POSITIVE
    return {name: labels[name] for name in FINDINGS if name in labels}


def find_mentions(text: str, conventions: Conventions = CHEXPERT) -> list[Mention]:
    """Return all mentions of findings, sentence by sentence; No Finding has none."""
    sentences = split_sentences(single_marks(text))
    statements = (" ".join(sentences[first:end]) for first, end in sentence_runs(sentences))
    return [
        mention
        for each in statements
        for mention in _mentions_in(_rewrite(spell(each)[0]), conventions)
    ]


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
    names = [
        span for finding, spans in named.items() if finding != "Support Devices" for span in spans
    ]
    scopes = Scopes(sentence, everything, names) if everything else None
    for finding, spans in named.items():
        last = max((span.start for span in spans), default=0)
        for span in spans:
            cue = scopes.find(span) if scopes else None
            phrase = sentence[span.start : span.end]
            value = conventions.value_of(cue, phrase) if conventions.reads(phrase) else None
            if value == POSITIVE:
                value = conventions.value_of_present(phrase)
            is_title = cue is None and scopes and scopes.is_heading(span) and span.start < last
            if value is not None and not is_title:
                words = (
                    ""
                    if cue is None or value == POSITIVE
                    else sentence[cue.start : cue.end].strip(" ,:=?|([-")
                )
                yield Mention(finding, value, sentence, phrase, span.start, words)
    for findings, table in lexicon.NORMAL.items():
        normal = compile_table(table, _NO_NOT).search(sentence)
        if normal is not None:
            for finding in findings:
                yield Mention(finding, NEGATIVE, sentence, normal[0], normal.start(), normal[0])


def _spans(table: Table, sentence: str) -> list[Span]:
    return [Span(*match.span()) for match in compile_table(table).finditer(sentence)]
