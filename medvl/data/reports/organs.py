"""Texts of chest CTs by organ, and whether a text states that all is normal.

    texts = organ_texts({"findings": "The heart is enlarged. No nodule is seen in the lungs."})
    texts["heart"]  # {"description": "The heart is enlarged.", "normal": False}

A sentence belongs to each organ that it names; one that names a finding of the lung and no organ
belongs to the lung. fVLM's texts come from a language model and are read from a file.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from medvl.data.reports.sentences import join_texts, split_sentences
from medvl.schema import ORGANS

PARTS: Mapping[str, str] = {"conclusion": "impression", "description": "findings"}
"""Parts of an organ's text, in their order, and the sections of reports that they are from."""
_NAMED: Mapping[str, re.Pattern[str]] = {
    organ: re.compile(words, re.IGNORECASE)
    for organ, words in {
        "lung": r"\blungs?\b|\bpulmonary\b(?! (?:arter|trunk|vein|conus))|pleura|bronch|trache|"
        r"\blob(?:e|es|ar|ule|ules)\b|hemithora|alveol|emphysem|atelecta|parenchym|lingula",
        "heart": r"\bheart\b|cardi(?:ac|omegaly|othoracic)|coronary|ventric|\batri(?:um|al?)\b|"
        r"myocard",
        "esophagus": r"esophag|hiatal",
        "aorta": r"\baort|arterial wall|atheroscler",
    }.items()
}
_OF_LUNG = re.compile(
    r"nodul|opaci|consolid|infiltrat|pneumon|ground.glass|interstiti|septal|fibro|mosaic|"
    r"honeycomb|\bcysts?\b|bulla|effusion",
    re.IGNORECASE,
)
"""Findings of the lung in sentences that name no organ."""
_ABNORMAL = re.compile(
    r"abnormal|nodul|\bmass(?:es)?\b|lesion|tumou?r|metasta|malignan|opaci|consolid|infiltrat|"
    r"pneumon|ground.glass|densit|emphysem|bulla|\bcysts?\b|bronchiecta|thicken|atelecta|fibro|"
    r"sequel|scar|honeycomb|mosaic|septal|effusion|fluid|edema|congest|calcif|plaque|"
    r"atheroscler|sclero|stent|graft|prosthe|pacemaker|cathet|hernia|dilat|aneurysm|ectas|tortuo|"
    r"stenos|narrow|enlarg|increase|decrease|cardiomegaly|lymphadeno|adenopath|diverticul|"
    r"displac|deviat|collapse|embol|thromb",
    re.IGNORECASE,
)
_NORMAL = re.compile(
    r"\b(?:normal|unremarkable|clear|natural|open|patent|intact|regular|preserved|midline|no|not|"
    r"without|free)\b",
    re.IGNORECASE,
)
_NEGATION = re.compile(
    r"\b(?:no|not|without|absence of|absent|free of|negative for|neither|nor|never)\b",
    re.IGNORECASE,
)
_VERB = re.compile(
    r"\b(?:is|are|was|were|has|have|had|shows?|seen|observed|noted|detected|present|there)\b",
    re.IGNORECASE,
)
_DENIED = re.compile(
    r"\b(?:(?:is|are|was|were|has been|have been)\s+(?:not|absent|ruled out|excluded)|cannot be)\b",
    re.IGNORECASE,
)
_LISTED = re.compile(r"\b(?:and|or)\b", re.IGNORECASE)
_CONTRAST = re.compile(
    r";|:|\b(?:but|however|except|although|though|while|whereas|(?:apart|aside) from|"
    r"other than)\b",
    re.IGNORECASE,
)


def organs_named(text: str) -> tuple[str, ...]:
    """Return the organs that a sentence names, in the order of `ORGANS`."""
    named = tuple(organ for organ in ORGANS if _NAMED[organ].search(text))
    # "pericardial effusion": the lung's findings count where no organ is named
    if not named and "pericard" in text.lower():
        return ("heart",)
    return named or (("lung",) if _OF_LUNG.search(text) else ())


def split_by_organ(text: str) -> dict[str, str]:
    """Return the sentences of a text by the organ that they name; others are left out."""
    sentences_of: dict[str, list[str]] = {}
    for sentence in split_sentences(text):
        for organ in organs_named(sentence):
            sentences_of.setdefault(organ, []).append(sentence)
    return {organ: join_texts(sentences_of[organ]) for organ in ORGANS if organ in sentences_of}


def is_normal(text: str) -> bool:
    """Return whether a text states that all is normal: each part of its sentences denies every
    finding that it names, or else denies something or calls it normal.

    What the rule does not understand counts as a finding, because texts of normal organs are all
    positives of each other.
    """
    sentences = split_sentences(text)
    parts = [part for each in sentences for part in _CONTRAST.split(each) if _has_words(part)]
    return bool(parts) and all(map(_is_normal_part, parts))


def _has_words(part: str) -> bool:
    return any(letter.isalpha() for letter in part)


def _is_normal_part(part: str) -> bool:
    """Denial reaches from "no" to the next verb, and from a list to the verb that denies it."""
    findings = list(_ABNORMAL.finditer(part))
    if not findings:
        return bool(_NORMAL.search(part))
    verbs = [match.start() for match in _VERB.finditer(part)]
    negations = [match.end() for match in _NEGATION.finditer(part)]
    denials = {match.start() for match in _DENIED.finditer(part)}
    return all(_is_denied(part, match.span(), verbs, negations, denials) for match in findings)


def _is_denied(
    part: str,
    finding: tuple[int, int],
    verbs: Sequence[int],
    negations: Sequence[int],
    denials: set[int],
) -> bool:
    start, end = finding
    before = max((place for place in negations if place <= start), default=None)
    if before is not None and not any(before <= verb < start for verb in verbs):
        return True
    verb = min((place for place in verbs if place >= end), default=-1)
    if verb not in denials:
        return False
    between = part[end:verb]
    return "," not in between or bool(_LISTED.search(between))


def organ_texts(
    sections: Mapping[str, str], given: Mapping[str, Mapping[str, Any]] | None = None
) -> dict[str, dict[str, Any]]:
    """Return the parts of each organ's text and whether they state that it is normal.

    Args:
        sections: of a report.
        given: part -> organ -> text, or {"text": text, "normal": bool}, in place of the sentences
            of the report.

    Organs without a text are left out: the report states nothing about them.
    """
    texts_of: dict[str, dict[str, Any]] = {}
    for part, section in PARTS.items():
        if given is not None and part in given:
            texts: Mapping[str, Any] = given[part]
        else:
            texts = split_by_organ(sections.get(section, ""))
        for organ in ORGANS:
            entry = texts.get(organ)
            text = entry["text"] if isinstance(entry, Mapping) else entry
            if not text:
                continue
            stated = entry.get("normal") if isinstance(entry, Mapping) else None
            normal = is_normal(text) if stated is None else stated
            known = texts_of.setdefault(organ, {"normal": True})
            known |= {part: text, "normal": known["normal"] and normal}
    return texts_of


def template_of(organ: str) -> str:
    """Return the text of an organ of which a report states nothing."""
    return f"{organ} shows no significant abnormalities."
