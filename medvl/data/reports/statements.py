"""Canonical statements about findings, "There is [no|possible] X of the Y.", for systems that
compare statements.

    statements_of("Small left effusion. No pneumothorax.")
    # ["There is pleural effusion of the left side.", "There is no pneumothorax."]

In published systems (RadZero, CARZero), a large language model rewrites reports into such
statements. Here the labeler writes one for each mention of a finding, with the side and the zone
that its clause names: reproducible and offline. Statements of a language model are read from a file
(`read_statements`).
"""

import functools
import itertools
import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from medvl.common.files import write_atomic
from medvl.common.label_names import named_as, spoken_name
from medvl.common.text_files import read_json_objects, read_text
from medvl.common.untrusted import parse_json
from medvl.data.reports.cleaning import swap_laterality
from medvl.data.reports.labeler import (
    CHEXPERT,
    NAMES,
    Conventions,
    Mention,
    find_mentions,
    sentence_runs,
    single_marks,
    spell,
)
from medvl.data.reports.labeler_lexicon import LINKS, PREDICATES
from medvl.data.reports.labeler_scopes import BORDER, Scopes, Span, compile_table
from medvl.data.reports.sentences import sentence_spans
from medvl.errors import ConfigError
from medvl.schema import NEGATIVE, POSITIVE, UNCERTAIN

_Read = TypeVar("_Read")
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
SEVERITIES = {
    "mild": "mild(?:ly)?|small|tiny|trace|minimal(?:ly)?|slight(?:ly)?|subtle",
    "moderate": "moderate(?:ly)?|medium",
    "severe": "severe(?:ly)?|large|marked(?:ly)?|massive|extensive|substantial",
}
_SEVERITIES = {name: re.compile(rf"\b(?:{words})\b") for name, words in SEVERITIES.items()}
_PLACES = {name: re.compile(rf"\b(?:{words})\b") for name, words in (SIDES | ZONES).items()}
_ANY_PLACE = re.compile("|".join(pattern.pattern for pattern in _PLACES.values()))
_FINDING = re.compile(NAMES)
_NAME = re.compile(rf"(?:^|(?<=[.;|,] ))(?:pleural |pulmonary |lung )?(?:{NAMES}) ?[:=]")
"""A name of a template with its mark."""
_AND = re.compile(r"\band\b")
_VERB = compile_table((*LINKS, *PREDICATES), prefix="(?<!there )")


def statement(finding: str, value: int = POSITIVE, place: str = "") -> str:
    """Return the statement about a finding: 1 is "There is", 0 "There is no", -1 "There is
    possible".

    `place` is appended as "of the PLACE", or as "of both sides". Prompts for zero-shot
    classification are `statement(finding)`.
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
    match = _PRESENT.fullmatch(text)
    return text if match is None else match[1]


def statements_of(text: str, conventions: Conventions = CHEXPERT) -> list[str]:
    """Return the statements of a text, one for each mention of a finding, in order and without
    repetition.

    "There is no finding." is the last one where all findings except devices are negative, and at
    least one is.
    """
    mentions = find_mentions(text, conventions)
    statements = [
        statement(each.finding, each.value, place_of(*places))
        for each, places in zip(mentions, places_of(mentions), strict=True)
    ]
    values = {each.value for each in mentions if each.finding != "Support Devices"}
    return list(
        dict.fromkeys(
            [*statements, statement("No Finding")] if values == {NEGATIVE} else statements
        )
    )


def place_of(sides: Sequence[str], zones: Sequence[str]) -> str:
    """Return the name of a place: "left side", "both sides", "right lower lung", "basal lung";
    "" without any word.
    """
    if zones:
        return " ".join([*sides, " and ".join(zones), "lung"])
    return "" if not sides else "both sides" if list(sides) == ["bilateral"] else f"{sides[0]} side"


def places_of(mentions: Sequence[Mention]) -> list[tuple[list[str], list[str]]]:
    """Return for each mention the side (at most one: left, right or bilateral) and the zones that
    its clause names.

    Mentions of one sentence come one after another, as those of `find_mentions`. The time is
    proportional to the length of the sentences.
    """
    return _by_clause(mentions, _places_in)


def severities_of(mentions: Sequence[Mention]) -> list[str]:
    """Return for each mention its severity, one of `SEVERITIES`, by the words of its clause, or of
    its sentence where the clause has none; "" for none and for several.

    Mentions come as those of `places_of`.
    """
    return _by_clause(mentions, _severity_in)


def _by_clause(
    mentions: Sequence[Mention], read_clause: Callable[[str, int, int], _Read]
) -> list[_Read]:
    """Return what is read from the clause of each mention: its sentence, start and end."""
    readings: list[_Read] = []
    for sentence, group in itertools.groupby(mentions, key=lambda mention: mention.sentence):
        ends = _clause_ends(sentence)
        read = functools.cache(functools.partial(read_clause, sentence))
        for mention in group:
            after = bisect_left(ends, mention.start + len(mention.phrase))
            readings.append(read(ends[bisect_right(ends, mention.start) - 1], ends[after]))
    return readings


def _severity_in(sentence: str, start: int, end: int) -> str:
    for part in ((start, end), (0, len(sentence))):
        names = [name for name, words in _SEVERITIES.items() if words.search(sentence, *part)]
        if names:
            return names[0] if len(names) == 1 else ""
    return ""


def _places_in(sentence: str, start: int, end: int) -> tuple[list[str], list[str]]:
    """Return the side and the zones that a part of a sentence names."""
    names = [name for name, pattern in _PLACES.items() if pattern.search(sentence, start, end)]
    sides = [name for name in names if name in SIDES]
    return ["bilateral"] if len(sides) > 1 else sides, [name for name in names if name in ZONES]


def _clause_ends(sentence: str) -> list[int]:
    """Return the ends of the clauses of a sentence in order, with 0 and its length.

    "And" ends a clause between two findings with places. A name and its value are one clause:
    "effusion: small left".
    """
    marks = [match.span() for match in _CLAUSE_END.finditer(sentence)]
    bounds = [0, *itertools.chain.from_iterable(marks), len(sentence)]
    ends = list(bounds)
    for before, after in itertools.pairwise(bounds):
        joints = [before, *(match.end() for match in _AND.finditer(sentence, before, after)), after]
        placed = [_names_placed_finding(sentence, *part) for part in itertools.pairwise(joints)]
        ends += (
            joint
            for joint, (one, other) in zip(joints[1:-1], itertools.pairwise(placed), strict=True)
            if one and other
        )
    names = {match.end() - 1 for match in _NAME.finditer(sentence)}
    return sorted(end for end in set(ends) if end - 1 not in names and end not in names)


def _names_placed_finding(sentence: str, start: int, end: int) -> bool:
    """Return whether a part of a sentence names a place and a finding; not behind a verb: it may be
    that of the place.

    "Opacity in the right base and the left base represents pneumonia."
    """
    finding = _FINDING.search(sentence, start, end)
    if finding is None or _VERB.search(sentence, start, finding.start()):
        return False
    return _ANY_PLACE.search(sentence, start, end) is not None


@functools.cache
def read_statements(path: Path) -> Mapping[str, tuple[str, ...]]:
    """Return study -> statements from a JSONL file with lines {"study": NAME, "statements": [TEXT,
    ...]}.

    Studies have the names that they have in the shards (`Sample.study`). Blank statements are left
    out.

    Raises ConfigError naming the line: "not_found", "malformed", or "exists" for a study that
    occurs twice.
    """
    statements: dict[str, tuple[str, ...]] = {}
    for where, row in read_json_objects(path, ConfigError, ("study", "statements"), field="file"):
        study = row["study"]
        texts = row["statements"]
        if not (
            isinstance(study, str)
            and isinstance(texts, list)
            and all(isinstance(x, str) for x in texts)
        ):
            message = f'{where}: expected {{"study": NAME, "statements": [TEXT, ...]}}'
            raise ConfigError(message, "malformed", field="file")
        if study in statements:
            raise ConfigError(f"{where}: the study occurs twice", "exists", field="file")
        statements[study] = tuple(
            dict.fromkeys(" ".join(text.split()) for text in texts if text.strip())
        )
    return statements


# Statements from RadGraph's annotations of reports (Jain et al., arXiv 2106.14463), in place of
# the labeler's.
#
#     write_statements(radgraph_statements(Path("MIMIC-CXR_graphs.json")),
#     Path("statements.jsonl"))
#
# The annotations are JSON, made elsewhere: name of a report -> entities with tokens, a label, and
# relations to other entities. Labels of the released graphs (OBS-DP, OBS-DA, OBS-U, ANAT-DP) and
# of later models ("Observation::definitely present") are read. An observation that modifies
# another one is part of its name; the anatomy where it is located, with its modifiers, is its
# place:
#
#     OBS-DP effusion <-modify- small, -located_at-> lung <-modify- left      "There is small
#     effusion of the left lung."

_VALUES = {
    "OBS-DP": POSITIVE,
    "OBS-DA": NEGATIVE,
    "OBS-U": UNCERTAIN,
    "Observation::definitely present": POSITIVE,
    "Observation::definitely absent": NEGATIVE,
    "Observation::uncertain": UNCERTAIN,
}
_ANATOMY = ("ANAT-", "Anatomy::")
_DEPTH = 4
"""Longest chain of modifiers."""
_MIMIC = re.compile(r"(?:.*/)?p(\d+)/s(\d+)(?:\.txt)?")


def radgraph_statements(
    path: Path, study: Callable[[str, str], str] | None = None
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the study and the statements of each report in a file.

    Args:
        path: JSON file of annotations, or one of JSON lines with the field "study" beside
            "entities".
        study: function from patient and study to the study's name in the shards, for names such as
            "p10/p10000032/s50414267.txt" (`Deidentifier.study`); None keeps names as they are.

    Raises ConfigError: "not_found", or "malformed" with the name of the report.
    """
    items = _reports_by_line(path) if path.name.endswith(".jsonl") else _reports_by_name(path)
    for number, (name, report) in enumerate(items, start=1):
        try:
            statements = tuple(dict.fromkeys(_statements(report["entities"])))
        except (KeyError, TypeError, AttributeError, ValueError):
            message = (
                f"{path}, report {number}: expected entities with tokens, label and "
                f"relations to known entities"
            )
            raise ConfigError(message, "malformed", field="file") from None
        yield (name if study is None else name_in_shards(name, study)), statements


def _reports_by_name(path: Path) -> list[tuple[str, Any]]:
    what = "RadGraph's annotations as JSON"
    try:
        return list(parse_json(read_text(path, ConfigError, field="file", what=what)).items())
    except (ValueError, AttributeError) as error:
        reason = f" ({error})" if isinstance(error, ValueError) else ""
        message = f"{path}: expected JSON of reports by name, such as RadGraph writes it{reason}"
        raise ConfigError(message, "malformed", field="file") from None


def _reports_by_line(path: Path) -> list[tuple[str, Any]]:
    reports: dict[str, Any] = {}
    for where, row in read_json_objects(
        path, ConfigError, {"study": str, "entities": object}, field="file"
    ):
        if row["study"] in reports:
            raise ConfigError(f"{where}: the study occurs twice", "exists", field="file")
        reports[row["study"]] = row
    return list(reports.items())


def name_in_shards(name: str, study: Callable[[str, str], str]) -> str:
    """Return the name that the shards of MIMIC-CXR have for a study, such as
    "p10/p10000032/s50414267.txt".

    `study` makes it from patient and study. Names of another form are returned as they are.
    """
    match = _MIMIC.fullmatch(name)
    return name if match is None else study(*match.groups())


def write_statements(statements: Iterable[tuple[str, tuple[str, ...]]], out: Path) -> int:
    """Write statements by study as `Statements(source="file")` reads them, and return how many
    studies there are.
    """
    lines = [
        json.dumps({"study": study, "statements": list(texts)}) + "\n"
        for study, texts in statements
    ]
    write_atomic(out, "".join(lines))
    return len(lines)


def _statements(entities: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield the statement of each observation that modifies no other one."""
    modifiers: dict[str, list[str]] = {}
    for number, entity in entities.items():
        for kind, other in entity.get("relations") or ():
            if kind == "modify":
                modifiers.setdefault(str(other), []).append(number)
    for number, entity in entities.items():
        value = _VALUES.get(entity["label"])
        relations = [(kind, str(other)) for kind, other in entity.get("relations") or ()]
        modifies = any(
            kind == "modify" and entities[other]["label"] in _VALUES for kind, other in relations
        )
        if value is None or modifies:
            if value is None and not str(entity["label"]).startswith(_ANATOMY):
                raise ValueError("unknown label")
            continue
        place = next(
            (
                _phrase(other, entities, modifiers)
                for kind, other in relations
                if kind == "located_at"
            ),
            "",
        )
        yield statement(_phrase(number, entities, modifiers), value, place)


def _phrase(
    number: str,
    entities: Mapping[str, Mapping[str, Any]],
    modifiers: Mapping[str, list[str]],
    depth: int = _DEPTH,
) -> str:
    """Return an entity's tokens behind those of its modifiers, in the order of the text."""
    words = [
        _phrase(each, entities, modifiers, depth - 1) for each in modifiers.get(number, ()) if depth
    ]
    return " ".join([*words, " ".join(str(entities[number]["tokens"]).lower().split())])


# Negated and uncertain mentions of entities.
#
#     mentions = finder.find("No pleural effusion. Clear lungs.")     # the effusion and the lungs
#     mention_values("No pleural effusion. Clear lungs.", mentions)   # [0, 1]
#
# Cues and their scopes are those of `medvl.data.reports.labeler`, for English reports.


def mention_values(
    text: str, mentions: Sequence[tuple[int, int, int]], conventions: Conventions = CHEXPERT
) -> list[int | None]:
    """Return the value of each mention: 1 positive, 0 negative, -1 uncertain; None for a history
    ("history of ...").

    Args:
        text: a report or a sentence.
        mentions: (start, end, entity) of each in characters, in the order of the text
            (`EntityFinder.find`). A mention that is not within one sentence is positive. A name of
            a template whose value mentions the entity again ("effusion: no effusion") has the value
            None.
        conventions: what counts as present and what as doubtful.
    """
    values: list[int | None] = [POSITIVE] * len(mentions)
    starts = [first for first, _, _ in mentions]
    text = single_marks(text)
    sentences = sentence_spans(text)
    for first, behind in sentence_runs([text[start:end] for start, end in sentences]):
        start = sentences[first][0]
        end = sentences[behind - 1][1]
        places = range(bisect_left(starts, start), bisect_left(starts, end))
        inside = {place: mentions[place] for place in places if mentions[place][1] <= end}
        if inside:
            sentence, moved = spell(text[start:end])
            spans = [
                Span(moved[one - start], moved[other - start - 1] + 1)
                for one, other, _ in inside.values()
            ]
            scopes = Scopes(sentence, spans, spans)
            last = {
                entity: span.start
                for (_, _, entity), span in zip(inside.values(), spans, strict=True)
            }
            for (place, (_, _, entity)), span in zip(inside.items(), spans, strict=True):
                cue = scopes.find(span)
                is_title = cue is None and scopes.is_heading(span) and span.start < last[entity]
                values[place] = (
                    None if is_title else conventions.value_of(cue, sentence[span.start : span.end])
                )
    return values


# Descriptions of findings and classes of places, for systems with a query for each entity of a
# list.
#
#     describe("Pneumothorax")      # "Air between the lung and the chest wall ..."
#     positions_of(text, FINDINGS)  # class of the place of each finding, of PLACES; -1 for none
#
# A place is a side and a zone, as in `medvl.data.reports.statements`. Mirrored images exchange
# the classes of sides (`mirrored_positions`).

_DESCRIPTIONS = {
    "Atelectasis": "Part of a lung has lost air and volume: linear or triangular opacities, "
    "displaced fissures.",
    "Cardiomegaly": "The heart is enlarged: its shadow is wider than half of the chest.",
    "Consolidation": "Airspaces are filled with fluid, pus or cells: a dense opacity with air "
    "bronchograms.",
    "Edema": "Fluid in the interstitium and airspaces of the lungs: hazy vessels, septal lines, "
    "perihilar opacity.",
    "Enlarged "
    "Cardiomediastinum": "The shadow of the heart and great vessels in the middle of the chest "
    "is widened.",
    "Fracture": "A break in a bone such as a rib, a clavicle or a vertebra.",
    "Lung Lesion": "A nodule or mass: a round opacity in a lung with distinct borders.",
    "Lung Opacity": "An area of a lung that is whiter than normal, of any cause.",
    "No Finding": "The heart, the lungs and the pleura are normal, without any disease.",
    "Pleural "
    "Effusion": "Fluid between the lung and the chest wall, which blunts the costophrenic angle.",
    "Pleural Other": "Thickening, scars or plaques of the pleura.",
    "Pneumonia": "An infection of a lung, seen as a patchy or lobar opacity.",
    "Pneumothorax": "Air between the lung and the chest wall: a thin pleural line without "
    "vessels beyond it.",
    "Support Devices": "Tubes, lines, wires, pacemakers and other equipment in or on the patient.",
}
PLACES: tuple[str, ...] = tuple(
    name
    for side, zone in itertools.product(("", *SIDES), ("", *ZONES))
    if (name := place_of([side] if side else [], [zone] if zone else []))
)
"""Names of the classes of places: sides alone, zones alone, and zones of a side."""
_MIRRORED = [PLACES.index(swap_laterality(name)) for name in PLACES]


def describe(finding: str) -> str:
    """Return a sentence that describes a finding; of an unknown one, the statement that it is
    there.
    """
    return _DESCRIPTIONS.get(finding, statement(finding))


def positions_of(
    text: str, findings: Sequence[str], conventions: Conventions = CHEXPERT
) -> list[int]:
    """Return the class of the place of each finding that is positive in a text and whose clause
    names a place, else -1.

    Of several places of a finding the first one counts; of several zones, the first one.
    """
    position_of: dict[str, int] = {}
    mentions = find_mentions(text, conventions)
    for mention, (sides, zones) in zip(mentions, places_of(mentions), strict=True):
        if mention.value == POSITIVE and (sides or zones):
            position_of.setdefault(mention.finding, PLACES.index(place_of(sides, zones[:1])))
    return [position_of.get(name, -1) for name in findings]


def mirrored_positions(positions: Sequence[int]) -> list[int]:
    """Return the classes in a mirrored image: left and right are exchanged."""
    return [position if position < 0 else _MIRRORED[position] for position in positions]


# Descriptions of findings by visual aspects, for systems with a query for each aspect of an
# entity (MAVL).
#
#     describe_aspects("Pneumothorax")     # (description, "The opacity is ...", "The shape is
#     ...", ...), 8 sentences
#
# In MAVL, a language model writes a sentence for each aspect of an entity. These sentences are
# written by hand.

ASPECTS = ("opacity", "shape", "texture", "pattern", "border", "location", "fluid")
"""Visual aspects; an entity's description comes before them."""
_ASPECT_VALUES = {
    "Atelectasis": "increased|linear, plate-like or triangular|homogeneous|focal|straight, "
    "along a fissure|often the "
    "lung base|absent",
    "Cardiomegaly": "that of soft tissue|globular and wide|homogeneous|single|smooth|the middle "
    "and left of the lower "
    "chest|sometimes present around the heart",
    "Consolidation": "white|lobar or patchy|homogeneous with dark air "
    "bronchograms|confluent|ill-defined, sharp at a "
    "fissure|a lobe or a segment|present in the airspaces",
    "Edema": "hazy|like bat wings|ground glass with fine lines|diffuse and on both "
    "sides|ill-defined|perihilar and at "
    "the bases|present in the interstitium and the airspaces",
    "Enlarged "
    "Cardiomediastinum": "that of soft tissue|wide|homogeneous|single|smooth or lobulated|the "
    "middle of the "
    "chest|absent",
    "Fracture": "a dark line through white bone|a break or a step|sharp|focal, sometimes in a "
    "row|an interrupted "
    "cortex|ribs, clavicles or vertebrae|absent",
    "Lung Lesion": "white|round or oval|homogeneous, sometimes with calcium or a cavity|single or "
    "several|distinct, "
    "smooth or spiculated|anywhere in a lung|absent",
    "Lung Opacity": "increased|of any form|hazy or dense|focal or diffuse|ill-defined or "
    "sharp|anywhere in a lung|"
    "sometimes present",
    "No Finding": "dark in both lungs|normal|fine vessels|symmetric|sharp at heart and "
    "diaphragm|none|absent",
    "Pleural "
    "Effusion": "white|a meniscus|homogeneous|layered|curved and sharp above|the costophrenic "
    "angle and the "
    "lung base|present in the pleural space",
    "Pleural "
    "Other": "increased, sometimes calcified|a band or a plaque|homogeneous|focal or along the "
    "chest wall|sharp"
    "|the pleura, often the apex|absent",
    "Pneumonia": "increased|patchy or lobar|heterogeneous with air bronchograms|focal or in "
    "several places|ill-defined|"
    "one lobe, often a lower one|present in the airspaces",
    "Pneumothorax": "dark|a crescent|without any lung markings|along the chest wall|a thin "
    "white pleural line|the apex "
    "and the side of a lung|absent",
    "Support "
    "Devices": "very white|thin tubes, lines or wires|uniform|continuous|very sharp|the neck, "
    "the chest or the "
    "upper abdomen|absent",
}
"""Finding -> values of the aspects, in their order, separated by `|`."""


def describe_aspects(finding: str) -> tuple[str, ...]:
    """Return the description of a finding and a sentence for each aspect; of an unknown finding,
    repeat the first.
    """
    if finding not in _ASPECT_VALUES:
        return (describe(finding),) * (1 + len(ASPECTS))
    values = _ASPECT_VALUES[finding].split("|")
    sentences = [
        f"The {aspect} of {finding.lower()} is {value}."
        for aspect, value in zip(ASPECTS, values, strict=True)
    ]
    return describe(finding), *sentences
