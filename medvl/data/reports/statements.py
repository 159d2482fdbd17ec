"""Canonical statements about findings, "There is [no|possible] X of the Y.", for systems that compare statements.

    statements_of("Small left effusion. No pneumothorax.")
    # ["There is pleural effusion of the left side.", "There is no pneumothorax."]

In published systems (RadZero, CARZero), a large language model rewrites reports into such statements. Here the labeler
writes one for each mention of a finding, with the side and the zone that its clause names: reproducible and offline.
Statements of a language model are read from a file (`read_statements`).
"""

import functools
import itertools
import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path

from medvl.common.label_names import named_as, spoken_name
from medvl.common.text_files import read_json_objects
from medvl.data.reports.labeler import CHEXPERT, NAMES, Conventions, Mention, find_mentions
from medvl.data.reports.labeler_cues import LINKS, PREDICATES
from medvl.data.reports.labeler_scopes import BORDER, compile_table
from medvl.errors import ConfigError
from medvl.schema import NEGATIVE, POSITIVE, UNCERTAIN

_WORDS = {POSITIVE: "", NEGATIVE: "no ", UNCERTAIN: "possible "}
_NAMES = {"Pleural Other": "pleural thickening", "Support Devices": "support device"}
"""Findings whose names are not nouns of a sentence."""
_PRESENT = re.compile(r"There is (?!no |possible )(.+)\.")
_CLAUSE_END = re.compile(rf"[:,.]|{BORDER}|\b(?:but|while|whereas|although|with|and there)\b")
SIDES = {
    "left": "left|lt|l[ul]l",
    "right": "right|rt|r[uml]l",
    "bilateral": "bilateral(?:ly)?|both|bibasilar|biapical",
}
ZONES = {
    "upper": "upper|[lr]ul",
    "middle": "mid|middle|rml",
    "lower": "lower|[lr]ll",
    "apical": "apical|apex|apices|biapical",
    "basal": "basal|basilar|bases?|bibasilar",
    "hilar": "hilum|hilar|hila|perihilar",
    "retrocardiac": "retrocardiac",
    "lingular": "lingular?",
}
_PLACES = {name: re.compile(rf"\b(?:{words})\b") for name, words in (SIDES | ZONES).items()}
_ANY_PLACE = re.compile("|".join(pattern.pattern for pattern in _PLACES.values()))
_FINDING = re.compile(NAMES)
_NAME = re.compile(rf"(?:^|(?<=[.;|,] ))(?:pleural |pulmonary |lung )?(?:{NAMES}) ?[:=]")
"""A name of a template with its mark."""
_AND = re.compile(r"\band\b")
_VERB = compile_table((*LINKS, *PREDICATES), prefix="(?<!there )")


def statement(finding: str, value: int = POSITIVE, place: str = "") -> str:
    """Return the statement about a finding: 1 is "There is", 0 "There is no", -1 "There is possible".

    `place` is appended as "of the PLACE", or as "of both sides". Prompts for zero-shot classification are
    `statement(finding)`.
    """
    name = _noun(finding)
    article = "" if place.startswith("both ") else "the "
    return f"There is {_WORDS[value]}{name}{f' of {article}{place}' if place else ''}."


@functools.lru_cache(maxsize=4096)
def _noun(finding: str) -> str:
    (known,) = named_as((finding,), tuple(_NAMES), synonyms=False)
    return _NAMES.get(known) or spoken_name(finding)


def stated_name(text: str) -> str:
    """Return X of a text "There is X.", and any other text as it is."""
    found = _PRESENT.fullmatch(text)
    return text if found is None else found[1]


def statements_of(text: str, conventions: Conventions = CHEXPERT) -> list[str]:
    """Return the statements of a text, one for each mention of a finding, in order and without repetition.

    "There is no finding." is the last one where all findings except devices are negative, and at least one is.
    """
    mentions = find_mentions(text, conventions)
    found = [
        statement(each.finding, each.value, place_of(*places))
        for each, places in zip(mentions, places_of(mentions), strict=True)
    ]
    values = {each.value for each in mentions if each.finding != "Support Devices"}
    return list(dict.fromkeys([*found, statement("No Finding")] if values == {NEGATIVE} else found))


def place_of(sides: Sequence[str], zones: Sequence[str]) -> str:
    """Return the name of a place: "left side", "both sides", "right lower lung", "basal lung"; "" without any word."""
    if zones:
        return " ".join([*sides, " and ".join(zones), "lung"])
    return "" if not sides else "both sides" if list(sides) == ["bilateral"] else f"{sides[0]} side"


def places_of(mentions: Sequence[Mention]) -> list[tuple[list[str], list[str]]]:
    """Return for each mention the side (at most one: left, right or bilateral) and the zones that its clause names.

    Mentions of one sentence come one after another, as those of `find_mentions`. The time is proportional to the length
    of the sentences.
    """
    found: list[tuple[list[str], list[str]]] = []
    for sentence, group in itertools.groupby(mentions, key=lambda mention: mention.sentence):
        ends = _clause_ends(sentence)
        read = functools.cache(functools.partial(_places_in, sentence))
        for mention in group:
            after = bisect_left(ends, mention.start + len(mention.phrase))
            found.append(read(ends[bisect_right(ends, mention.start) - 1], ends[after]))
    return found


def _places_in(sentence: str, start: int, end: int) -> tuple[list[str], list[str]]:
    """Return the side and the zones that a part of a sentence names."""
    names = [name for name, pattern in _PLACES.items() if pattern.search(sentence, start, end)]
    sides = [name for name in names if name in SIDES]
    return ["bilateral"] if len(sides) > 1 else sides, [name for name in names if name in ZONES]


def _clause_ends(sentence: str) -> list[int]:
    """Return the ends of the clauses of a sentence in order, with 0 and its length.

    "And" ends a clause between two findings with places. A name and its value are one clause: "effusion: small left".
    """
    marks = [match.span() for match in _CLAUSE_END.finditer(sentence)]
    bounds = [0, *itertools.chain.from_iterable(marks), len(sentence)]
    ends = list(bounds)
    for before, after in itertools.pairwise(bounds):
        joints = [before, *(match.end() for match in _AND.finditer(sentence, before, after)), after]
        placed = [_names_placed_finding(sentence, *part) for part in itertools.pairwise(joints)]
        ends += (
            joint for joint, (one, other) in zip(joints[1:-1], itertools.pairwise(placed), strict=True) if one and other
        )
    names = {match.end() - 1 for match in _NAME.finditer(sentence)}
    return sorted(end for end in set(ends) if end - 1 not in names and end not in names)


def _names_placed_finding(sentence: str, start: int, end: int) -> bool:
    """Return whether a part of a sentence names a place and a finding; not behind a verb: it may be that of the place.

    "Opacity in the right base and the left base represents pneumonia."
    """
    finding = _FINDING.search(sentence, start, end)
    if finding is None or _VERB.search(sentence, start, finding.start()):
        return False
    return _ANY_PLACE.search(sentence, start, end) is not None


@functools.cache
def read_statements(path: Path) -> Mapping[str, tuple[str, ...]]:
    """Return study -> statements from a JSONL file with lines {"study": NAME, "statements": [TEXT, ...]}.

    Studies have the names that they have in the shards (`Sample.study`). Blank statements are left out.

    Raises ConfigError naming the line: "not_found", "malformed", or "exists" for a study that occurs twice.
    """
    found: dict[str, tuple[str, ...]] = {}
    for where, row in read_json_objects(path, ConfigError, ("study", "statements"), field="file"):
        study, texts = row["study"], row["statements"]
        if not (isinstance(study, str) and isinstance(texts, list) and all(isinstance(x, str) for x in texts)):
            message = f'{where}: expected {{"study": NAME, "statements": [TEXT, ...]}}'
            raise ConfigError(message, "malformed", field="file")
        if study in found:
            raise ConfigError(f"{where}: the study occurs twice", "exists", field="file")
        found[study] = tuple(dict.fromkeys(" ".join(text.split()) for text in texts if text.strip()))
    return found
