"""Questions about one view, with the answers that its truth gives."""

import dataclasses

import numpy as np

from medvl.phantom.language.lexicon import NAMES
from medvl.phantom.language.sentences import pick
from medvl.phantom.population.findings import DRAWN, Finding, truth_labels
from medvl.phantom.population.world import View
from medvl.phantom.seeds import generator

_STREAM = 98  # keeps these random numbers apart from those of the drawing
_ONE_SIDED = ("Atelectasis", "Consolidation", "Fracture", "Pleural Effusion", "Pneumonia", "Pneumothorax")
_GRADED = ("Atelectasis", "Cardiomegaly", "Edema", "Pleural Effusion", "Pneumothorax")
_COUNTABLE = ("Fracture", "Lung Lesion", "Lung Opacity", "Pleural Effusion", "Pneumothorax")
_COUNTED = {"Lung Lesion": "nodules", "Fracture": "fractures", "Support Devices": "devices"}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A question about an image and its one right answer."""

    question: str
    answer: str
    answer_type: str
    """CLOSED (yes or no, or one of two that the question names) or OPEN."""
    content: str
    """What it asks for: view, presence, laterality, severity, location, count or size."""
    label: str | None = None
    """The finding that it is about."""


def questions(view: View) -> tuple[Question, ...]:
    """All questions that this view answers, always the same ones for the same view."""
    rng = generator(*view.key, _STREAM)
    asked = [_about_view(rng, view), *_presence(rng, view)]
    for finding in view.findings:
        if not _hidden(view, finding.label):
            asked += _about_finding(rng, view, finding)
    return tuple(asked)


def _hidden(view: View, label: str) -> bool:
    """Broken ribs do not show from the side."""
    return view.lateral and label == "Fracture"


def _about_view(rng: np.random.Generator, view: View) -> Question:
    if not view.lateral and rng.random() < 0.5:
        text = pick(rng, ["Is this a PA or an AP view?", "Was this image taken PA or AP?"])
        return Question(question=text, answer=view.position, answer_type="CLOSED", content="view")
    text = pick(rng, ["From which direction was this image taken?", "Which projection is this?"])
    answer = "lateral" if view.lateral else "frontal"
    return Question(question=text, answer=answer, answer_type="OPEN", content="view")


def _presence(rng: np.random.Generator, view: View) -> list[Question]:
    """Yes or no for every finding that is there and for as many that are not, at least three."""
    truth = truth_labels(view.findings)
    there = [label for label in DRAWN if truth[label] and not _hidden(view, label)]
    absent = [label for label in DRAWN if not truth[label]]
    chosen = rng.permutation(absent)[: max(3, len(there))].tolist() if absent else []
    templates = ["Is there {}?", "Does this image show {}?", "Is {} present?", "Can {} be seen?"]
    return [
        Question(
            question=pick(rng, templates).format(f"a {NAMES[label]}" if label in _COUNTABLE else NAMES[label]),
            answer="yes" if truth[label] else "no",
            answer_type="CLOSED",
            content="presence",
            label=label,
        )
        for label in [*there, *chosen]
    ]


def _about_finding(rng: np.random.Generator, view: View, finding: Finding) -> list[Question]:
    label, name, asked = finding.label, NAMES[finding.label], []

    def ask(content: str, text: str, answer: str, closed: bool = False) -> None:
        kind = "CLOSED" if closed else "OPEN"
        asked.append(Question(question=text, answer=answer, answer_type=kind, content=content, label=label))

    if label in _ONE_SIDED and not view.lateral:
        if finding.side != "bilateral" and rng.random() < 0.5:
            side = pick(rng, ["left", "right"])
            ask("laterality", f"Is the {name} on the {side}?", "yes" if finding.side == side else "no", closed=True)
        else:
            answer = "both" if finding.side == "bilateral" else finding.side
            ask("laterality", pick(rng, [f"On which side is the {name}?", f"Which side shows the {name}?"]), answer)
    if label in _GRADED:
        ask(
            "severity",
            pick(rng, [f"How severe is the {name}?", f"What is the severity of the {name}?"]),
            finding.severity,
        )
    if label in ("Consolidation", "Lung Opacity") and len(finding.parts) == 1 and not view.lateral:
        ask("location", f"Where is the {name}?", finding.parts[0].zone)
    if label in _COUNTED:
        ask("count", f"How many {_COUNTED[label]} are there?", str(len(finding.parts)))
    if label == "Lung Lesion":
        largest = max(part.size for part in finding.parts)
        ask("size", "How large is the largest nodule?", f"{largest:.1f} cm")
    return asked
