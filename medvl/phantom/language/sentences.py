"""From a finding to a sentence: filling the templates of `phrases`."""

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
    """One sentence of a report and what a labeler reads out of it: label -> 1, 0 or -1."""

    text: str
    mentions: Mapping[str, int]


def pick(rng: np.random.Generator, options: Sequence[str]) -> str:
    """One of the options, each with the same chance."""
    return options[int(rng.integers(len(options)))]


def expand(rng: np.random.Generator, template: str) -> str:
    """Replace every `[a|b]` by one of its choices, innermost first."""
    while match := _CHOICE.search(template):
        choice = pick(rng, match[1].split("|"))
        template = template[: match.start()] + choice + template[match.end() :]
    return template


def say(rng: np.random.Generator, templates: Sequence[str], slots: Mapping[str, str] | None = None) -> str:
    """A sentence from one of the templates: choices made, slots filled, articles and capitals right."""
    text = expand(rng, expand(rng, pick(rng, templates)).format_map(slots or {}))
    text = _ARTICLE.sub(r"\1n ", re.sub(r"\s+", " ", text).strip())
    return text[:1].upper() + text[1:]


def state_present(rng: np.random.Generator, finding: Finding, change: str | None) -> list[Sentence]:
    """That a finding is there; devices take one sentence each. `change` is a key of `lexicon.CHANGES` or None."""
    forms = lexicon.PRESENT[finding.label]
    if finding.label == "Support Devices":
        texts = [say(rng, forms[part.kind], slots_of(finding, part)) for part in finding.parts]
    else:
        texts = [say(rng, forms[form_of(finding)], slots_of(finding, finding.parts[0]))]
    if change is not None:
        texts[-1] = texts[-1].removesuffix(".") + say(rng, lexicon.CHANGES[change])
    return [Sentence(text, _with_opacity(text, {finding.label: POSITIVE}, POSITIVE)) for text in texts]


def state_uncertain(rng: np.random.Generator, finding: Finding) -> Sentence:
    """That a finding may be there. An opacity that may mean something is itself asserted."""
    text = say(rng, lexicon.UNCERTAIN[finding.label], slots_of(finding, finding.parts[0]))
    return Sentence(text, _with_opacity(text, {finding.label: UNCERTAIN}, POSITIVE))


def state_absent(rng: np.random.Generator, labels: Sequence[str], templates: Sequence[str]) -> Sentence:
    """That none of the labels is there."""
    text = say(rng, templates)
    return Sentence(text, _with_opacity(text, dict.fromkeys(labels, NEGATIVE), NEGATIVE))


def _with_opacity(text: str, mentions: dict[str, int], value: int) -> dict[str, int]:
    """A labeler counts any opacity, infiltrate or airspace disease as a mention of Lung Opacity."""
    return {"Lung Opacity": value, **mentions} if _OPACITY.search(text) else mentions


def form_of(finding: Finding) -> str:
    """Which templates of `lexicon.PRESENT`, or of another table with its forms, fit."""
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


def slots_of(finding: Finding, part: Part) -> dict[str, str]:
    """What a template may say about one part of a finding: slot -> text, itself with choices."""
    side = part.side if finding.label == "Support Devices" else finding.side
    zones = [part.zone] if finding.label == "Lung Lesion" else list(dict.fromkeys(part.zone for part in finding.parts))
    larger, smaller = _by_extent(finding)
    tip = part.size if part.size else 6.0 - 3.0 * part.t  # an endotracheal tube ends that far above the carina
    return {
        "severity": lexicon.SEVERITY_WORDS[finding.severity],
        "severity_adverb": lexicon.SEVERITY_ADVERBS[finding.severity],
        "size": lexicon.SIZE_WORDS[finding.severity],
        "side": side,
        "on_side": "bilaterally" if side == "bilateral" else f"on the {side}",
        "angles": "both costophrenic angles" if side == "bilateral" else f"the {side} costophrenic angle",
        "larger": larger,
        "smaller": smaller,
        "where": _together(zones),
        "basal": _together(zones).replace("lung bases", "bibasilar").replace(" base", " basilar"),
        "cm": f"{tip:.1f}",
        "count": _NUMBERS[min(5, len(finding.parts))],
        "line": "internal jugular [central venous catheter|line]" if part.t > 0.5 and part.side == "right" else "PICC",
    }


def _together(zones: list[str]) -> str:
    """Several places as one noun."""
    if set(zones) == {"right base", "left base"}:
        return "lung bases"
    if len(zones) > 1 and all(zone.endswith(" rib") for zone in zones):
        side = zones[0].split()[0]
        names = [zone.split()[1] for zone in zones]
        return f"{side} {', '.join(names[:-1])} and {names[-1]} ribs"
    return " and ".join(zones)


def _by_extent(finding: Finding) -> tuple[str, str]:
    """The more and the less affected side."""
    worst = max(finding.parts, key=lambda part: part.extent).side
    return worst, "left" if worst == "right" else "right"
