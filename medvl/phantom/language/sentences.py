"""Sentences about findings, from the templates of `lexicon`."""

import dataclasses
import re
from collections.abc import Mapping, Sequence

import numpy as np

from medvl.phantom.language import lexicon
from medvl.phantom.population.finding_sites import Part
from medvl.phantom.population.findings import Finding
from medvl.schema import NEGATIVE, POSITIVE, UNCERTAIN

_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_ARTICLE = re.compile(r"\b([Aa]) (?=[aeiou])")
_OPACITY = re.compile(r"opaci|infiltrate|airspace", re.IGNORECASE)
_NUMBERS = {1: "one", 2: "two", 3: "three", 4: "four", 5: "five"}


@dataclasses.dataclass(frozen=True, slots=True)
class Sentence:
    """A sentence of a report, with the labels that it mentions (label -> 1, 0 or -1)."""

    text: str
    mentions: Mapping[str, int]


def pick(rng: np.random.Generator, options: Sequence[str]) -> str:
    """Return one of the options, all with equal probability."""
    return options[int(rng.integers(len(options)))]


def expand(rng: np.random.Generator, template: str) -> str:
    """Replace every `[a|b]` of a template by one of its choices, innermost first."""
    while match := _CHOICE.search(template):
        choice = pick(rng, match[1].split("|"))
        template = template[: match.start()] + choice + template[match.end() :]
    return template


def realize(rng: np.random.Generator, templates: Sequence[str], slots: Mapping[str, str] | None = None) -> str:
    """Return a sentence from one of the templates: make its choices, fill its slots, fix articles and capitals."""
    text = expand(rng, expand(rng, pick(rng, templates)).format_map(slots or {}))
    text = _ARTICLE.sub(r"\1n ", re.sub(r"\s+", " ", text).strip())
    return text[:1].upper() + text[1:]


def present_sentences(rng: np.random.Generator, finding: Finding, change: str | None) -> list[Sentence]:
    """Return sentences that assert a finding, one per device; `change` is a key of `lexicon.CHANGES` or None."""
    forms = lexicon.PRESENT[finding.label]
    if finding.label == "Support Devices":
        texts = [realize(rng, forms[part.kind], template_slots(finding, part)) for part in finding.parts]
    else:
        texts = [realize(rng, forms[template_form(finding)], template_slots(finding, finding.parts[0]))]
    if change is not None:
        texts[-1] = texts[-1].removesuffix(".") + realize(rng, lexicon.CHANGES[change])
    return [Sentence(text, _with_opacity(text, {finding.label: POSITIVE}, POSITIVE)) for text in texts]


def uncertain_sentence(rng: np.random.Generator, finding: Finding) -> Sentence:
    """Return a sentence that hedges about a finding; an opacity that it names is asserted."""
    text = realize(rng, lexicon.UNCERTAIN[finding.label], template_slots(finding, finding.parts[0]))
    return Sentence(text, _with_opacity(text, {finding.label: UNCERTAIN}, POSITIVE))


def absent_sentence(rng: np.random.Generator, labels: Sequence[str], templates: Sequence[str]) -> Sentence:
    """Return a sentence that negates all of the labels."""
    text = realize(rng, templates)
    return Sentence(text, _with_opacity(text, dict.fromkeys(labels, NEGATIVE), NEGATIVE))


def _with_opacity(text: str, mentions: dict[str, int], value: int) -> dict[str, int]:
    """Add Lung Opacity to the mentions if the text names an opacity, infiltrate or airspace disease, as labelers do."""
    return {"Lung Opacity": value, **mentions} if _OPACITY.search(text) else mentions


def template_form(finding: Finding) -> str:
    """Return the form of a finding in `lexicon.PRESENT` and in tables with the same forms."""
    first, count = finding.parts[0], len(finding.parts)
    if finding.label == "Pleural Effusion":
        return "both" if finding.side == "bilateral" else "one"
    if finding.label == "Pneumothorax":
        return "tension" if finding.extent > 0.8 else "any"
    if finding.label == "Lung Lesion":
        return "several" if count > 1 else "mass" if first.size >= 3 else "nodule"
    if first.kind == "rib":
        return "ribs" if count > 1 else "rib"
    return first.kind if first.kind in lexicon.PRESENT[finding.label] else "any"


def template_slots(finding: Finding, part: Part) -> dict[str, str]:
    """Return the slots of a template for one part of a finding: slot -> text, which may contain choices."""
    side = part.side if finding.label == "Support Devices" else finding.side
    zones = [part.zone] if finding.label == "Lung Lesion" else list(dict.fromkeys(part.zone for part in finding.parts))
    larger, smaller = _by_extent(finding)
    tip = part.size if part.size else 6.0 - 3.0 * part.t  # distance of an endotracheal tube's tip above the carina
    return {
        "severity": lexicon.SEVERITY_WORDS[finding.severity],
        "severity_adverb": lexicon.SEVERITY_ADVERBS[finding.severity],
        "size": lexicon.SIZE_WORDS[finding.severity],
        "side": side,
        "on_side": "bilaterally" if side == "bilateral" else f"on the {side}",
        "angles": "both costophrenic angles" if side == "bilateral" else f"the {side} costophrenic angle",
        "larger": larger,
        "smaller": smaller,
        "where": _join_zones(zones),
        "basal": _join_zones(zones).replace("lung bases", "bibasilar").replace(" base", " basilar"),
        "cm": f"{tip:.1f}",
        "count": _NUMBERS[min(5, len(finding.parts))],
        "line": "internal jugular [central venous catheter|line]" if part.t > 0.5 and part.side == "right" else "PICC",
    }


def _join_zones(zones: list[str]) -> str:
    """Return several places as one noun."""
    if set(zones) == {"right base", "left base"}:
        return "lung bases"
    if len(zones) > 1 and all(zone.endswith(" rib") for zone in zones):
        side = zones[0].split()[0]
        names = [zone.split()[1] for zone in zones]
        return f"{side} {', '.join(names[:-1])} and {names[-1]} ribs"
    return " and ".join(zones)


def _by_extent(finding: Finding) -> tuple[str, str]:
    """Return the more and the less affected side."""
    worst = max(finding.parts, key=lambda part: part.extent).side
    return worst, "left" if worst == "right" else "right"
