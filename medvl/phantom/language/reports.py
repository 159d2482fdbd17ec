"""Radiology reports as MIMIC-CXR keeps them, and the labels that a labeler would read out of them.

A report never contradicts the truth of its study, but it says less: some mild findings go unmentioned, some are hedged,
and only part of what is absent is said to be absent.
"""

import dataclasses
import textwrap
from collections.abc import Iterable, Mapping

import numpy as np

from medvl.phantom.language import lexicon, report_sections
from medvl.phantom.language.sentences import Sentence, expand, pick, say, state_absent, state_present, state_uncertain
from medvl.phantom.population.findings import CHRONIC, Finding
from medvl.phantom.population.world import Study
from medvl.phantom.seeds import generator
from medvl.schema import FINDINGS, NEGATIVE, POSITIVE, UNCERTAIN

_STREAM = 99  # keeps the report's random numbers apart from those of the views
_ORDER = (
    "Support Devices",
    "Edema",
    "Consolidation",
    "Pneumonia",
    "Atelectasis",
    "Lung Opacity",
    "Lung Lesion",
    "Pleural Effusion",
    "Pneumothorax",
    "Pleural Other",
    "Cardiomegaly",
    "Enlarged Cardiomediastinum",
    "Fracture",
)
_TITLE = " " * 33 + "FINAL REPORT"
_RULE = " " + "_" * 78


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The report of one study."""

    text: str
    """As in `s{study_id}.txt`."""
    findings: str
    """The sentences of the FINDINGS section in one line, or "" where there is none."""
    impression: str
    labels: Mapping[str, int]
    """Label -> 1, 0 or -1 for what the report mentions; the others have no entry."""


def compose_report(study: Study) -> Report:
    """Write the report of a study; always the same for the same study."""
    rng = generator(*study.key, _STREAM)
    stances = {finding.label: _stance(rng, finding) for finding in study.findings}
    findings = _findings_section(rng, study, stances)
    impression = _impression_section(rng, study, stances)
    style = str(rng.choice(["both", "impression", "findings", "combined", "neither"], p=[0.68, 0.12, 0.07, 0.08, 0.05]))
    said = {
        "both": (findings, impression),
        "impression": ([], [*impression, *_negatives(rng, study, 0.35)]),
        "findings": (findings, []),
        "combined": ([], [*findings, *impression[:1]]),
        "neither": (findings, []),
    }[style]
    body = _preamble(rng, study) + _body(rng, style, *said)
    return Report(
        text=_with_extras(rng, body, said[1] or said[0]),
        findings="" if style == "neither" else _joined(said[0]),
        impression=_joined(said[1]),
        labels=report_labels([*said[0], *said[1]]),
    )


def report_labels(sentences: Iterable[Sentence]) -> dict[str, int]:
    """What the sentences say together: present before uncertain before absent, and No Finding where nothing is left."""
    labels: dict[str, int] = {}
    order = (NEGATIVE, UNCERTAIN, POSITIVE)
    for sentence in sentences:
        for label, value in sentence.mentions.items():
            labels[label] = max(labels.get(label, NEGATIVE), value, key=order.index)
    if not any(value != NEGATIVE for label, value in labels.items() if label != "Support Devices"):
        labels["No Finding"] = POSITIVE
    return {label: labels[label] for label in FINDINGS if label in labels}


def _stance(rng: np.random.Generator, finding: Finding) -> str:
    """present, uncertain or omitted."""
    if finding.label == "Support Devices":
        return "present"
    doubt = {"mild": 0.26, "moderate": 0.06, "severe": 0.02}[finding.severity]
    if finding.label == "Pneumonia":
        doubt = 0.45
    missed = 0.06 if finding.severity == "mild" else 0.0
    u = rng.random()
    return "omitted" if u < missed else "uncertain" if u < missed + doubt else "present"


def _findings_section(rng: np.random.Generator, study: Study, stances: Mapping[str, str]) -> list[Sentence]:
    sentences: list[Sentence] = []
    for finding in study.findings:
        sentences += _stated(rng, study, finding, stances[finding.label])
    sentences += _resolved(rng, study)
    absent = [label for label in lexicon.HEDGED if not study.labels[label]]
    hedged: tuple[str, ...] = ()
    if absent and rng.random() < 0.06:
        hedged = (pick(rng, absent),)
        sentences.append(Sentence(say(rng, lexicon.HEDGED[hedged[0]]), {hedged[0]: UNCERTAIN}))
    sentences += _negatives(rng, study, 0.62, hedged)
    if rng.random() < 0.35:
        sentences.append(Sentence(say(rng, lexicon.FILLER), {}))
    return _in_order(rng, sentences)


def _in_order(rng: np.random.Generator, sentences: list[Sentence]) -> list[Sentence]:
    """Devices first, then lungs, pleura, heart and bones, more or less."""
    ranks = [min((_ORDER.index(label) for label in s.mentions), default=rng.integers(13)) for s in sentences]
    return [sentences[i] for i in np.argsort(np.array(ranks) + rng.normal(0, 1.5, len(ranks)))]


def _stated(rng: np.random.Generator, study: Study, finding: Finding, stance: str) -> list[Sentence]:
    if stance == "omitted":
        return []
    if stance == "uncertain":
        return [state_uncertain(rng, finding)]
    return state_present(rng, finding, _change(rng, study, finding))


def _change(rng: np.random.Generator, study: Study, finding: Finding) -> str | None:
    """How the finding differs from the study before, if the radiologist cares to say so."""
    if study.prior is None or rng.random() < 0.5:
        return None
    before = {old.label: old.extent for old in study.prior}.get(finding.label)
    if before is None:
        return "new"
    if finding.label == "Support Devices":  # neither better nor worse
        return None
    if abs(finding.extent - before) < 0.2:
        return "same"
    return "worse" if finding.extent > before else "better"


def _resolved(rng: np.random.Generator, study: Study) -> list[Sentence]:
    """Findings of the study before that are gone."""
    gone = [old.label for old in study.prior or () if not study.labels[old.label] and old.label not in CHRONIC]
    return [
        Sentence(say(rng, [lexicon.RESOLVED], {"name": lexicon.NAMES[label]}), {label: NEGATIVE})
        for label in gone
        if label in lexicon.HEDGED and rng.random() < 0.3
    ]


def _negatives(rng: np.random.Generator, study: Study, share: float, but: tuple[str, ...] = ()) -> list[Sentence]:
    """Sentences about part of what is absent: each fitting one is said with the chance `share`."""
    sentences, covered = [], set(but)
    if study.labels["Lung Opacity"]:
        covered.add("Pneumonia")  # what an opacity is due to stays open
    for i in rng.permutation(len(lexicon.ABSENT)):
        labels, templates = lexicon.ABSENT[i]
        true = not any(study.labels[label] for label in labels)
        if true and not covered.intersection(labels) and rng.random() < share:
            sentences.append(state_absent(rng, labels, templates))
            covered.update(labels)
    return sentences


def _impression_section(rng: np.random.Generator, study: Study, stances: Mapping[str, str]) -> list[Sentence]:
    named = [f for f in study.findings if stances[f.label] != "omitted" and f.label != "Support Devices"]
    if not named:
        return [Sentence(say(rng, lexicon.NORMAL), {})]
    named.sort(key=lambda finding: -finding.extent)
    sentences: list[Sentence] = []
    for finding in named[: 2 + int(rng.integers(3))]:
        sentences += _stated(rng, study, finding, stances[finding.label])
    return sentences


def _preamble(rng: np.random.Generator, study: Study) -> list[str]:
    """The sections before the findings, as paragraphs."""
    kind = "two views" if any(view.lateral for view in study.views) else study.views[0].position
    person = f"[___ year old {'woman' if study.sex == 'F' else 'man'}|___{study.sex}]"
    parts = [
        "EXAMINATION:  " + report_sections.EXAMINATIONS[kind],
        "[INDICATION|HISTORY|REASON FOR EXAM|CLINICAL HISTORY]:  "
        + f"{person} with {pick(rng, report_sections.INDICATIONS)}",
        "TECHNIQUE:  " + report_sections.TECHNIQUES[kind],
        "COMPARISON:  " + ("None." if study.prior is None else report_sections.COMPARISONS),
    ]
    kept = [part for part, chance in zip(parts, (0.7, 0.9, 0.55, 0.75), strict=True) if rng.random() < chance]
    if len(kept) > 2 and rng.random() < 0.2:
        kept[-2:] = kept[:-3:-1]
    return [_wrapped(expand(rng, part)) for part in kept]


def _body(rng: np.random.Generator, style: str, findings: list[Sentence], impression: list[Sentence]) -> list[str]:
    """The findings and the impression as paragraphs."""
    if style == "neither":
        return [_wrapped(_joined(findings))]
    paragraphs = []
    inline = rng.random() < 0.5
    if findings:
        paragraphs += _section("FINDINGS", _wrapped(_joined(findings)), inline)
    if impression:
        header = "FINDINGS AND IMPRESSION" if style == "combined" else pick(rng, ["IMPRESSION"] * 9 + ["CONCLUSION"])
        text = _wrapped(_joined(impression))
        if style != "combined" and len(impression) > 1 and rng.random() < 0.6:
            text = "\n".join(_wrapped(f"{i}. {sentence.text}") for i, sentence in enumerate(impression, 1))
        paragraphs += _section(header, text, inline)
    return paragraphs


def _section(header: str, text: str, inline: bool) -> list[str]:
    """Header and text, on one line or in two paragraphs."""
    if inline and "\n 2." not in text:
        return [_wrapped(f"{header}:  {' '.join(text.split())}")]
    return [f" {header}: ", text]


def _with_extras(rng: np.random.Generator, paragraphs: list[str], gist: list[Sentence]) -> str:
    """The whole file: title, now and then an earlier wet read or a later addendum."""
    text = "\n \n".join([_TITLE, *paragraphs])
    if rng.random() < 0.25:
        text += "\n \n" + _wrapped(pick(rng, report_sections.CLOSINGS))
    u = rng.random()
    if u < 0.05:
        wet = f" WET READ: ___ ___ ___ {int(rng.integers(1, 13))}:{int(rng.integers(60)):02d} PM\n"
        text = wet + _wrapped(_joined(gist[:2])) + "\n" + _RULE + "\n" + text
    elif u < 0.08:
        text = "\n".join([_TITLE, _wrapped(report_sections.ADDENDUM), _RULE, text])
    return text + "\n"


def _joined(sentences: list[Sentence]) -> str:
    return " ".join(sentence.text for sentence in sentences)


def _wrapped(text: str) -> str:
    """Lines of at most 79 characters that start with one space."""
    return "\n".join(" " + line for line in textwrap.wrap(text, 78, break_long_words=False, break_on_hyphens=False))
