"""Questions about images for the layouts of VQA-RAD and SLAKE, balanced so that the wording does
not reveal the answer.

Each patient has radiographs and mostly a CT or MR slice, so that modality, plane and organ have
several answers. Questions concern what is visible: a mild finding is graded if present, but there
is no question about its presence. The questions of a split are then reduced until no answer of a
wording is more frequent than the second one.
"""

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from medvl.phantom.language.lexicon import NAMES
from medvl.phantom.language.reports import pick
from medvl.phantom.population.findings import Finding, truth_labels
from medvl.phantom.population.volumes import ORGANS, Slice, sample_slice
from medvl.phantom.population.world import Patient, View, generator

KINDS = ("modality", "plane", "organ", "presence", "laterality", "severity", "count", "size")
MAX_IMAGES_PER_PATIENT = 8
"""Limit that keeps image numbers of patients apart."""

_STREAM = 93
_MIN_VISIBLE_EXTENT = 0.34  # extent from which a finding is clearly visible: moderate and severe
_PRESENCE_LABELS = (
    "Pleural Effusion",
    "Pneumothorax",
    "Edema",
    "Consolidation",
    "Support Devices",
    "Lung Lesion",
)
_SIMILAR_LABELS = {
    "Consolidation": ("Pneumonia", "Lung Opacity", "Atelectasis"),
    "Lung Lesion": ("Pneumonia", "Consolidation"),
}
"""Label -> similar labels; with one of them in the image there is no question about its absence."""
_ONE_SIDED = ("Pleural Effusion", "Pneumothorax", "Consolidation")
_GRADED = ("Cardiomegaly", "Pleural Effusion", "Pneumothorax", "Edema")
_ALWAYS_VISIBLE = ("Support Devices",)
_NAMED = {"Support Devices": "a support device", "Lung Lesion": "a nodule"}
_SIDES = {"bilateral": "both sides"}
_SLICE_SHARE = 0.7  # of patients


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ImageQuestion:
    """A question about an image with its only correct answer."""

    question: str
    answer: str
    closed: bool
    kind: str
    """One of `KINDS`."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class VQAImage:
    """An image with its questions."""

    number: int
    """Unique in its world."""
    organ: str
    modality: str
    plane: str
    source: View | Slice
    """Description of the image, to be drawn with `medvl.phantom.rendering.draw.draw_image`."""
    questions: tuple[ImageQuestion, ...]


def vqa_images(patient: Patient) -> list[VQAImage]:
    """Return the views of a patient's last study and possibly a slice, with their questions;
    reproducible.
    """
    study = patient.studies[-1]
    first = patient.subject_id * MAX_IMAGES_PER_PATIENT  # unique among worlds of different seeds
    images = [_radiograph(first + number, view) for number, view in enumerate(study.views)]
    rng = generator(*study.key, _STREAM)
    if rng.random() < _SLICE_SHARE:
        images.append(_slice(first + len(images), sample_slice((*study.key, _STREAM, 0))))
    return images


def balanced_rows(rows: Sequence[tuple[str, str, str]]) -> list[bool]:
    """Return which rows (group, answer, name) to keep so that no answer of a group outnumbers the
    second most frequent.

    A group is a wording within a split. Two answers become equally frequent; a group with one
    answer is removed. Rows are kept in the order of a hash of their name, independent of their
    order.
    """
    counts: dict[str, Counter[str]] = {}
    for group, answer, _ in rows:
        counts.setdefault(group, Counter())[answer] += 1
    limits = {
        group: sorted(answers.values())[-2] if len(answers) > 1 else 0
        for group, answers in counts.items()
    }
    used: Counter[tuple[str, str]] = Counter()
    keep = [False] * len(rows)
    for position in sorted(range(len(rows)), key=lambda position: _hash(rows[position][2])):
        group, answer, _ = rows[position]
        used[group, answer] += 1
        keep[position] = used[group, answer] <= limits[group]
    return keep


def _hash(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=8).digest()


def _radiograph(number: int, view: View) -> VQAImage:
    rng = generator(*view.key, _STREAM)
    plane = "lateral" if view.lateral else "frontal"
    questions = [*_image_questions(rng, "chest", "X-ray", plane)]
    present = {finding.label for finding in view.findings}
    if view.lateral:  # most findings overlap in lateral views
        questions.append(
            _yes_no("presence", "Are there any support devices?", "Support Devices" in present)
        )
    else:
        questions += _presence_questions(rng, view)
        for finding in view.findings:
            questions += _finding_questions(rng, finding)
    return VQAImage(
        number=number,
        organ="chest",
        modality="X-ray",
        plane=plane,
        source=view,
        questions=tuple(questions),
    )


def _slice(number: int, part: Slice) -> VQAImage:
    rng = generator(*part.key, _STREAM)
    questions = [
        *_image_questions(rng, part.organ, part.modality, "axial"),
        *_mass_questions(rng, part),
    ]
    return VQAImage(
        number=number,
        organ=part.organ,
        modality=part.modality,
        plane="axial",
        source=part,
        questions=tuple(questions),
    )


def _yes_no(kind: str, question: str, is_true: bool) -> ImageQuestion:
    return ImageQuestion(
        question=question, answer="yes" if is_true else "no", closed=True, kind=kind
    )


def _open(kind: str, question: str, answer: str) -> ImageQuestion:
    return ImageQuestion(question=question, answer=answer, closed=False, kind=kind)


def _image_questions(
    rng: np.random.Generator, organ: str, modality: str, plane: str
) -> Iterator[ImageQuestion]:
    """Yield an open and a closed question about modality, plane and organ."""
    yield _open(
        "modality", pick(rng, ["What modality is this?", "How was this image taken?"]), modality
    )
    yield _open("plane", pick(rng, ["In which plane is this image?", "What is the plane?"]), plane)
    yield _open(
        "organ",
        pick(rng, ["Which part of the body is shown?", "What does this image show?"]),
        organ,
    )
    named = {"X-ray": "an X-ray", "CT": "a CT scan", "MRI": "an MRI"}
    guess = _guess(rng, modality, named)
    yield _yes_no("modality", f"Is this {named[guess]}?", guess == modality)
    guess = _guess(rng, plane, ("frontal", "lateral", "axial"))
    yield _yes_no(
        "plane", f"Is this {'an' if guess == 'axial' else 'a'} {guess} image?", guess == plane
    )
    guess = _guess(rng, organ, ORGANS)
    yield _yes_no("organ", f"Is this an image of the {guess}?", guess == organ)


def _guess(rng: np.random.Generator, truth: str, options: Iterable[str]) -> str:
    """Return the correct or another option, with equal probability."""
    return (
        truth
        if rng.random() < 0.5
        else pick(rng, [option for option in options if option != truth])
    )


def _presence_questions(rng: np.random.Generator, view: View) -> Iterator[ImageQuestion]:
    """Yield questions about the presence of findings that are clearly visible or clearly absent."""
    truth = truth_labels(view.findings)
    visible = {
        finding.label
        for finding in view.findings
        if finding.extent >= _MIN_VISIBLE_EXTENT or finding.label in _ALWAYS_VISIBLE
    }
    for label in _PRESENCE_LABELS:
        if label in visible or not any(
            truth[name] for name in (label, *_SIMILAR_LABELS.get(label, ()))
        ):
            text = pick(rng, ["Is there {}?", "Does this image show {}?"]).format(
                _NAMED.get(label, NAMES[label])
            )
            yield _yes_no("presence", text, label in visible)
    if "Cardiomegaly" in visible or not truth["Cardiomegaly"]:
        enlarged = "Cardiomegaly" in visible
        yield _yes_no("size", "Is the heart enlarged?", enlarged)
        yield _open("size", "What is the size of the heart?", "enlarged" if enlarged else "normal")


def _finding_questions(rng: np.random.Generator, finding: Finding) -> Iterator[ImageQuestion]:
    """Yield questions about side, severity and number of a finding."""
    name = NAMES[finding.label]
    if finding.label in _ONE_SIDED and finding.extent >= _MIN_VISIBLE_EXTENT:
        yield _open(
            "laterality", f"On which side is the {name}?", _SIDES.get(finding.side, finding.side)
        )
        if finding.side in ("left", "right"):
            side = pick(rng, ["left", "right"])
            yield _yes_no("laterality", f"Is the {name} on the {side}?", finding.side == side)
    if finding.label in _GRADED:
        yield _open("severity", f"How severe is the {name}?", finding.severity)
    if finding.label == "Lung Lesion" and finding.extent >= _MIN_VISIBLE_EXTENT:
        yield _open("count", "How many nodules are there?", str(len(finding.parts)))


def _mass_questions(rng: np.random.Generator, part: Slice) -> Iterator[ImageQuestion]:
    """Yield questions about presence, number, side and size of masses."""
    yield _yes_no(
        "presence",
        pick(rng, ["Is there a mass?", "Does this image show a mass?"]),
        bool(part.masses),
    )
    if not part.masses:
        return
    several = len(part.masses) > 1
    yield _open("count", "How many masses are there?", str(len(part.masses)))
    yield _yes_no("count", "Is there more than one mass?", several)
    yield _open("laterality", "On which side of the body is a mass?", part.side)
    side = pick(rng, ["left", "right"])
    yield _yes_no("laterality", f"Is there a mass on the {side}?", part.side == side)
    yield _open("size", "How large is a mass?", f"{part.diameter:g} cm")
    yield _yes_no("size", "Is there a mass larger than 3 cm?", part.diameter > 3)
