"""Radiology reports in the form of MIMIC-CXR, and the labels that a labeler would extract from
them; and reports of chest CTs, with findings by organ and an impression.

A report never contradicts the ground truth of its study, but it is less complete: some mild
findings are omitted, some are hedged, and only some absent findings are negated.
"""

import dataclasses
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from medvl.phantom.language import lexicon, lexicon as report_sections
from medvl.phantom.population.findings import CHRONIC, Finding, Part, change_of
from medvl.phantom.population.volumes import CT_FINDINGS, ChestCT, CTFinding
from medvl.phantom.population.world import Study, generator
from medvl.schema import FINDINGS, NEGATIVE, POSITIVE, UNCERTAIN

# Sentences about findings, from the templates of `lexicon`.

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


def realize(
    rng: np.random.Generator, templates: Sequence[str], slots: Mapping[str, str] | None = None
) -> str:
    """Return a sentence from one of the templates: make its choices, fill its slots, fix
    articles and capitals.
    """
    text = expand(rng, expand(rng, pick(rng, templates)).format_map(slots or {}))
    text = _ARTICLE.sub(r"\1n ", re.sub(r"\s+", " ", text).strip())
    return text[:1].upper() + text[1:]


def present_sentences(
    rng: np.random.Generator, finding: Finding, change: str | None
) -> list[Sentence]:
    """Return sentences that assert a finding, one per device; `change` is a key of
    `lexicon.CHANGES` or None.
    """
    forms = lexicon.PRESENT[finding.label]
    if finding.label == "Support Devices":
        texts = [
            realize(rng, forms[part.kind], template_slots(finding, part)) for part in finding.parts
        ]
    else:
        texts = [
            realize(rng, forms[template_form(finding)], template_slots(finding, finding.parts[0]))
        ]
    if change is not None:
        texts[-1] = texts[-1].removesuffix(".") + realize(rng, lexicon.CHANGES[change])
    return [
        Sentence(text, _with_opacity(text, {finding.label: POSITIVE}, POSITIVE)) for text in texts
    ]


def uncertain_sentence(rng: np.random.Generator, finding: Finding) -> Sentence:
    """Return a sentence that hedges about a finding; an opacity that it names is asserted."""
    text = realize(rng, lexicon.UNCERTAIN[finding.label], template_slots(finding, finding.parts[0]))
    return Sentence(text, _with_opacity(text, {finding.label: UNCERTAIN}, POSITIVE))


def absent_sentence(
    rng: np.random.Generator, labels: Sequence[str], templates: Sequence[str]
) -> Sentence:
    """Return a sentence that negates all of the labels."""
    text = realize(rng, templates)
    return Sentence(text, _with_opacity(text, dict.fromkeys(labels, NEGATIVE), NEGATIVE))


def _with_opacity(text: str, mentions: dict[str, int], value: int) -> dict[str, int]:
    """Add Lung Opacity to the mentions if the text names an opacity, infiltrate or airspace
    disease, as labelers do.
    """
    return {"Lung Opacity": value, **mentions} if _OPACITY.search(text) else mentions


def template_form(finding: Finding) -> str:
    """Return the form of a finding in `lexicon.PRESENT` and in tables with the same forms."""
    first = finding.parts[0]
    count = len(finding.parts)
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
    """Return the slots of a template for one part of a finding: slot -> text, which may contain
    choices.
    """
    side = part.side if finding.label == "Support Devices" else finding.side
    zones = (
        [part.zone]
        if finding.label == "Lung Lesion"
        else list(dict.fromkeys(part.zone for part in finding.parts))
    )
    larger, smaller = _by_extent(finding)
    # distance of an endotracheal tube's tip above the carina
    tip = part.size if part.size else 6.0 - 3.0 * part.t
    return {
        "severity": lexicon.SEVERITY_WORDS[finding.severity],
        "severity_adverb": lexicon.SEVERITY_ADVERBS[finding.severity],
        "size": lexicon.SIZE_WORDS[finding.severity],
        "side": side,
        "on_side": "bilaterally" if side == "bilateral" else f"on the {side}",
        "angles": "both costophrenic angles"
        if side == "bilateral"
        else f"the {side} costophrenic angle",
        "larger": larger,
        "smaller": smaller,
        "where": _join_zones(zones),
        "basal": _join_zones(zones).replace("lung bases", "bibasilar").replace(" base", " basilar"),
        "cm": f"{tip:.1f}",
        "count": _NUMBERS[min(5, len(finding.parts))],
        "line": "internal jugular [central venous catheter|line]"
        if part.t > 0.5 and part.side == "right"
        else "PICC",
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


_STREAM = 99  # separates the random numbers of the report from those of the views
_ORDER = (
    "Support Devices", "Edema", "Consolidation", "Pneumonia", "Atelectasis", "Lung Opacity",
    "Lung Lesion", "Pleural Effusion", "Pneumothorax", "Pleural Other", "Cardiomegaly",
    "Enlarged Cardiomediastinum", "Fracture",
)  # fmt: skip
_TITLE = " " * 33 + "FINAL REPORT"
_RULE = " " + "_" * 78


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The report of one study."""

    text: str
    """Content of `s{study_id}.txt`."""
    findings: str
    """Sentences of the FINDINGS section in one line; "" without this section."""
    impression: str
    labels: Mapping[str, int]
    """Label -> 1, 0 or -1 for mentioned labels; other labels have no entry."""


def compose_report(study: Study) -> Report:
    """Compose the report of a study; always the same for the same study."""
    rng = generator(*study.key, _STREAM)
    stances = {finding.label: _sample_stance(rng, finding) for finding in study.findings}
    findings = _findings_section(rng, study, stances)
    impression = _impression_section(rng, study, stances)
    style = str(
        rng.choice(
            ["both", "impression", "findings", "combined", "neither"],
            p=[0.68, 0.12, 0.07, 0.08, 0.05],
        )
    )
    sections = {
        "both": (findings, impression),
        "impression": ([], [*impression, *_negative_sentences(rng, study, 0.35)]),
        "findings": (findings, []),
        "combined": ([], [*findings, *impression[:1]]),
        "neither": (findings, []),
    }[style]
    body = _preamble(rng, study) + _body(rng, style, *sections)
    return Report(
        text=_with_extras(rng, body, sections[1] or sections[0]),
        findings="" if style == "neither" else _joined(sections[0]),
        impression=_joined(sections[1]),
        labels=report_labels([*sections[0], *sections[1]]),
    )


def report_labels(sentences: Iterable[Sentence]) -> dict[str, int]:
    """Return the labels of a report: present outweighs uncertain, uncertain outweighs absent; or
    No Finding.
    """
    labels: dict[str, int] = {}
    order = (NEGATIVE, UNCERTAIN, POSITIVE)
    for sentence in sentences:
        for label, value in sentence.mentions.items():
            labels[label] = max(labels.get(label, NEGATIVE), value, key=order.index)
    if not any(value != NEGATIVE for label, value in labels.items() if label != "Support Devices"):
        labels["No Finding"] = POSITIVE
    return {label: labels[label] for label in FINDINGS if label in labels}


def _sample_stance(rng: np.random.Generator, finding: Finding) -> str:
    """Sample whether a finding is reported as present or uncertain, or omitted."""
    if finding.label == "Support Devices":
        return "present"
    uncertain = {"mild": 0.26, "moderate": 0.06, "severe": 0.02}[finding.severity]
    if finding.label == "Pneumonia":
        uncertain = 0.45
    omitted = 0.06 if finding.severity == "mild" else 0.0
    u = rng.random()
    return "omitted" if u < omitted else "uncertain" if u < omitted + uncertain else "present"


def _findings_section(
    rng: np.random.Generator, study: Study, stances: Mapping[str, str]
) -> list[Sentence]:
    sentences: list[Sentence] = []
    for finding in study.findings:
        sentences += _finding_sentences(rng, study, finding, stances[finding.label])
    sentences += _resolved_sentences(rng, study)
    absent = [label for label in lexicon.HEDGED if not study.labels[label]]
    hedged: tuple[str, ...] = ()
    if absent and rng.random() < 0.06:
        hedged = (pick(rng, absent),)
        sentences.append(Sentence(realize(rng, lexicon.HEDGED[hedged[0]]), {hedged[0]: UNCERTAIN}))
    sentences += _negative_sentences(rng, study, 0.62, hedged)
    if rng.random() < 0.35:
        sentences.append(Sentence(realize(rng, lexicon.FILLER), {}))
    return _ordered(rng, sentences)


def _ordered(rng: np.random.Generator, sentences: list[Sentence]) -> list[Sentence]:
    """Return the sentences approximately in the order devices, lungs, pleura, heart, bones."""
    ranks = [
        min((_ORDER.index(label) for label in s.mentions), default=rng.integers(13))
        for s in sentences
    ]
    return [sentences[i] for i in np.argsort(np.array(ranks) + rng.normal(0, 1.5, len(ranks)))]


def _finding_sentences(
    rng: np.random.Generator, study: Study, finding: Finding, stance: str
) -> list[Sentence]:
    if stance == "omitted":
        return []
    if stance == "uncertain":
        return [uncertain_sentence(rng, finding)]
    return present_sentences(rng, finding, _change(rng, study, finding))


def _change(rng: np.random.Generator, study: Study, finding: Finding) -> str | None:
    """Return the change of a finding since the previous study, or None if it is not reported."""
    if study.prior is None or rng.random() < 0.5:
        return None
    change = change_of(finding.label, study.prior, study.findings)
    if finding.label == "Support Devices" and change != "new":  # devices do not improve or worsen
        return None
    return change


def _resolved_sentences(rng: np.random.Generator, study: Study) -> list[Sentence]:
    """Return sentences about findings of the previous study that have resolved."""
    gone = [
        old.label
        for old in study.prior or ()
        if not study.labels[old.label] and old.label not in CHRONIC
    ]
    return [
        Sentence(
            realize(rng, [lexicon.RESOLVED], {"name": lexicon.NAMES[label]}), {label: NEGATIVE}
        )
        for label in gone
        if label in lexicon.HEDGED and rng.random() < 0.3
    ]


def _negative_sentences(
    rng: np.random.Generator, study: Study, share: float, excluded: tuple[str, ...] = ()
) -> list[Sentence]:
    """Return sentences that negate some absent findings; each true sentence is used with
    probability `share`.
    """
    sentences = []
    covered = set(excluded)
    if study.labels["Lung Opacity"]:
        covered.add("Pneumonia")  # the cause of an opacity remains open
    negations = list(lexicon.ABSENT.items())
    for i in rng.permutation(len(negations)):
        labels, templates = negations[i]
        is_true = not any(study.labels[label] for label in labels)
        if is_true and not covered.intersection(labels) and rng.random() < share:
            sentences.append(absent_sentence(rng, labels, templates))
            covered.update(labels)
    return sentences


def _impression_section(
    rng: np.random.Generator, study: Study, stances: Mapping[str, str]
) -> list[Sentence]:
    named = [
        f for f in study.findings if stances[f.label] != "omitted" and f.label != "Support Devices"
    ]
    if not named:
        return [Sentence(realize(rng, lexicon.NORMAL), {})]
    named.sort(key=lambda finding: -finding.extent)
    sentences: list[Sentence] = []
    for finding in named[: 2 + int(rng.integers(3))]:
        sentences += _finding_sentences(rng, study, finding, stances[finding.label])
    return sentences


def _preamble(rng: np.random.Generator, study: Study) -> list[str]:
    """Return the sections before the findings, as paragraphs."""
    kind = "two views" if any(view.lateral for view in study.views) else study.views[0].position
    person = f"[___ year old {'woman' if study.sex == 'F' else 'man'}|___{study.sex}]"
    parts = [
        "EXAMINATION:  " + report_sections.EXAMINATIONS[kind],
        "[INDICATION|HISTORY|REASON FOR EXAM|CLINICAL HISTORY]:  "
        + f"{person} with {pick(rng, report_sections.INDICATIONS)}",
        "TECHNIQUE:  " + report_sections.TECHNIQUES[kind],
        "COMPARISON:  " + ("None." if study.prior is None else report_sections.COMPARISONS),
    ]
    headers = [
        part
        for part, chance in zip(parts, (0.7, 0.9, 0.55, 0.75), strict=True)
        if rng.random() < chance
    ]
    if len(headers) > 2 and rng.random() < 0.2:
        headers[-2:] = headers[:-3:-1]
    return [_wrapped(expand(rng, part)) for part in headers]


def _body(
    rng: np.random.Generator, style: str, findings: list[Sentence], impression: list[Sentence]
) -> list[str]:
    """Return the findings and the impression as paragraphs."""
    if style == "neither":
        return [_wrapped(_joined(findings))]
    paragraphs = []
    inline = rng.random() < 0.5
    if findings:
        paragraphs += _section("FINDINGS", _wrapped(_joined(findings)), inline)
    if impression:
        header = (
            "FINDINGS AND IMPRESSION"
            if style == "combined"
            else pick(rng, ["IMPRESSION"] * 9 + ["CONCLUSION"])
        )
        text = _wrapped(_joined(impression))
        if style != "combined" and len(impression) > 1 and rng.random() < 0.6:
            text = "\n".join(
                _wrapped(f"{i}. {sentence.text}") for i, sentence in enumerate(impression, 1)
            )
        paragraphs += _section(header, text, inline)
    return paragraphs


def _section(header: str, text: str, inline: bool) -> list[str]:
    """Return header and text, on one line or as two paragraphs."""
    if inline and "\n 2." not in text:
        return [_wrapped(f"{header}:  {' '.join(text.split())}")]
    return [f" {header}: ", text]


def _with_extras(rng: np.random.Generator, paragraphs: list[str], summary: list[Sentence]) -> str:
    """Return the file's text: title, paragraphs, and sometimes a wet read or an addendum."""
    text = "\n \n".join([_TITLE, *paragraphs])
    if rng.random() < 0.25:
        text += "\n \n" + _wrapped(pick(rng, report_sections.CLOSINGS))
    u = rng.random()
    if u < 0.05:
        wet = f" WET READ: ___ ___ ___ {int(rng.integers(1, 13))}:{int(rng.integers(60)):02d} PM\n"
        text = wet + _wrapped(_joined(summary[:2])) + "\n" + _RULE + "\n" + text
    elif u < 0.08:
        text = "\n".join([_TITLE, _wrapped(report_sections.ADDENDUM), _RULE, text])
    return text + "\n"


def _joined(sentences: list[Sentence]) -> str:
    return " ".join(sentence.text for sentence in sentences)


def _wrapped(text: str) -> str:
    """Return the text in lines of at most 79 characters that start with a space."""
    return "\n".join(
        " " + line
        for line in textwrap.wrap(text, 78, break_long_words=False, break_on_hyphens=False)
    )


_CT_STREAM = 72
_PRESENT: Mapping[str, tuple[str, ...]] = {
    "Lung nodule": (
        "There is a {size} mm nodule in the {side} lung.",
        "A nodule of {size} mm is seen in the {side} lung.",
    ),
    "Pleural effusion": (
        "There is a {side} pleural effusion.",
        "Fluid is seen in the {side} pleural space.",
    ),
    "Consolidation": (
        "There is consolidation in the {side} lung.",
        "A consolidation is seen in the {side} lung.",
    ),
    "Emphysema": ("There is emphysema of the {side} upper lobe.",),
    "Cardiomegaly": ("The heart is enlarged.", "There is cardiomegaly."),
    "Pericardial effusion": ("There is a pericardial effusion.",),
    "Arterial wall calcification": (
        "Calcifications are seen in the wall of the aorta.",
        "The wall of the aorta is calcified.",
    ),
}
_ABSENT: Mapping[str, str] = {
    "Lung nodule": "No lung nodule is seen.",
    "Pleural effusion": "There is no pleural effusion.",
    "Consolidation": "There is no consolidation.",
    "Emphysema": "There is no emphysema.",
    "Cardiomegaly": "The heart is of normal size.",
    "Pericardial effusion": "There is no pericardial effusion.",
    "Arterial wall calcification": "There are no calcifications of the aorta.",
}


def compose_ct_report(chest: ChestCT) -> dict[str, str]:
    """Return the sections `findings` and `impression`. Some absent findings are not mentioned."""
    rng = generator(*chest.key, _CT_STREAM)
    present = {finding.name: finding for finding in chest.findings}
    sentences = []
    for name in CT_FINDINGS:
        if name in present:
            forms = _PRESENT[name]
            sentences.append(_sentence(forms[int(rng.integers(len(forms)))], present[name]))
        elif rng.random() < 0.7:
            sentences.append(_ABSENT[name])
    main = [_sentence(_PRESENT[finding.name][0], finding) for finding in chest.findings]
    return {
        "findings": " ".join(sentences),
        "impression": " ".join(main) or "Normal CT of the chest.",
    }


def _sentence(form: str, finding: CTFinding) -> str:
    return form.format(side=finding.side, size=round(finding.diameter_mm))
