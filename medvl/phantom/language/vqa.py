"""Images with questions in which the wording does not give the answer away: the phantom as VQA-RAD and as SLAKE.

Each patient has radiographs and mostly a CT or MR slice, so that modality, plane and organ have several answers. What
is asked is what can be seen: a mild finding is graded where it is, but nobody is asked whether it is there. Then the
questions of a split are thinned until no answer of a wording is more frequent than the second: a yes for each no.
"""

import dataclasses
import functools
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from medvl.phantom.language.lexicon import NAMES
from medvl.phantom.language.sentences import pick
from medvl.phantom.population.findings import Finding, truth_labels
from medvl.phantom.population.world import Patient, View
from medvl.phantom.rendering.ct_mr_slices import ORGANS, Slice, draw_slice, take_slice
from medvl.phantom.rendering.draw import draw
from medvl.phantom.seeds import generator

KINDS = ("modality", "plane", "organ", "presence", "laterality", "severity", "count", "size")
IMAGES_EACH = 8
"""More images than any patient has: image numbers leave room for so many."""

_STREAM = 93
_SEEN = 0.34  # extent from which a finding cannot be missed: moderate and severe
_ASKED = ("Pleural Effusion", "Pneumothorax", "Edema", "Consolidation", "Support Devices", "Lung Lesion")
_ALIKE = {"Consolidation": ("Pneumonia", "Lung Opacity", "Atelectasis"), "Lung Lesion": ("Pneumonia", "Consolidation")}
"""Finding -> those that look like it: with one of them in the image its absence is not asked for."""
_ONE_SIDED = ("Pleural Effusion", "Pneumothorax", "Consolidation")
_GRADED = ("Cardiomegaly", "Pleural Effusion", "Pneumothorax", "Edema")
_ALWAYS_SEEN = ("Support Devices",)
_NAMED = {"Support Devices": "a support device", "Lung Lesion": "a nodule"}
_SIDES = {"bilateral": "both sides"}
_SLICES = 0.7  # share of the patients that have one


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ImageQuestion:
    """A question about an image with its one right answer."""

    question: str
    answer: str
    closed: bool
    kind: str
    """One of `KINDS`."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class VQAImage:
    """An image and what is asked about it."""

    number: int
    """Unique in its world."""
    organ: str
    modality: str
    plane: str
    draw: Callable[[int], NDArray[np.uint16]]
    """Size -> 12-bit image (H, W)."""
    asked: tuple[ImageQuestion, ...]


def vqa_images(patient: Patient) -> list[VQAImage]:
    """The views of the patient's last study and perhaps a slice, always the same ones with the same questions."""
    study = patient.studies[-1]
    first = patient.subject_id * IMAGES_EACH  # worlds of different seeds share no image name
    images = [_radiograph(first + number, view) for number, view in enumerate(study.views)]
    rng = generator(*study.key, _STREAM)
    if rng.random() < _SLICES:
        images.append(_slice(first + len(images), take_slice((*study.key, _STREAM, 0))))
    return images


def balance(rows: Sequence[tuple[str, str, str]]) -> list[bool]:
    """Which of the rows (group, answer, name) to keep, so that no answer of a group outnumbers the second one.

    A group is a wording within a split; with two answers they end up equal, with one the whole group is left out.
    Rows are left out in the order of a hash of their name, so the choice hangs on nothing else.
    """
    counts: dict[str, Counter[str]] = {}
    for group, answer, _ in rows:
        counts.setdefault(group, Counter())[answer] += 1
    limits = {group: sorted(found.values())[-2] if len(found) > 1 else 0 for group, found in counts.items()}
    taken: Counter[tuple[str, str]] = Counter()
    kept = [False] * len(rows)
    for place in sorted(range(len(rows)), key=lambda place: _hash(rows[place][2])):
        group, answer, _ = rows[place]
        taken[group, answer] += 1
        kept[place] = taken[group, answer] <= limits[group]
    return kept


def _hash(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=8).digest()


def _radiograph(number: int, view: View) -> VQAImage:
    rng = generator(*view.key, _STREAM)
    plane = "lateral" if view.lateral else "frontal"
    asked = [*_about_image(rng, "chest", "X-ray", plane)]
    present = {finding.label for finding in view.findings}
    if view.lateral:  # most findings lie over each other from the side
        asked.append(_yes_no("presence", "Are there any support devices?", "Support Devices" in present))
    else:
        asked += _presence(rng, view)
        for finding in view.findings:
            asked += _about_finding(rng, finding)
    return VQAImage(
        number=number,
        organ="chest",
        modality="X-ray",
        plane=plane,
        draw=functools.partial(draw, view),
        asked=tuple(asked),
    )


def _slice(number: int, part: Slice) -> VQAImage:
    rng = generator(*part.key, _STREAM)
    asked = [*_about_image(rng, part.organ, part.modality, "axial"), *_about_masses(rng, part)]
    return VQAImage(
        number=number,
        organ=part.organ,
        modality=part.modality,
        plane="axial",
        draw=functools.partial(draw_slice, part),
        asked=tuple(asked),
    )


def _yes_no(kind: str, question: str, truth: bool) -> ImageQuestion:
    return ImageQuestion(question=question, answer="yes" if truth else "no", closed=True, kind=kind)


def _open(kind: str, question: str, answer: str) -> ImageQuestion:
    return ImageQuestion(question=question, answer=answer, closed=False, kind=kind)


def _about_image(rng: np.random.Generator, organ: str, modality: str, plane: str) -> Iterator[ImageQuestion]:
    """Modality, plane and organ: an open and a closed question each."""
    yield _open("modality", pick(rng, ["What modality is this?", "How was this image taken?"]), modality)
    yield _open("plane", pick(rng, ["In which plane is this image?", "What is the plane?"]), plane)
    yield _open("organ", pick(rng, ["Which part of the body is shown?", "What does this image show?"]), organ)
    named = {"X-ray": "an X-ray", "CT": "a CT scan", "MRI": "an MRI"}
    guess = _guess(rng, modality, named)
    yield _yes_no("modality", f"Is this {named[guess]}?", guess == modality)
    guess = _guess(rng, plane, ("frontal", "lateral", "axial"))
    yield _yes_no("plane", f"Is this {'an' if guess == 'axial' else 'a'} {guess} image?", guess == plane)
    guess = _guess(rng, organ, ORGANS)
    yield _yes_no("organ", f"Is this an image of the {guess}?", guess == organ)


def _guess(rng: np.random.Generator, truth: str, options: Iterable[str]) -> str:
    """The truth or something else, each with the same chance."""
    return truth if rng.random() < 0.5 else pick(rng, [option for option in options if option != truth])


def _presence(rng: np.random.Generator, view: View) -> Iterator[ImageQuestion]:
    """Whether a finding is there, where it is plain to see or plainly not there."""
    truth = truth_labels(view.findings)
    plain = {finding.label for finding in view.findings if finding.extent >= _SEEN or finding.label in _ALWAYS_SEEN}
    for label in _ASKED:
        if label in plain or not any(truth[name] for name in (label, *_ALIKE.get(label, ()))):
            text = pick(rng, ["Is there {}?", "Does this image show {}?"]).format(_NAMED.get(label, NAMES[label]))
            yield _yes_no("presence", text, label in plain)
    if "Cardiomegaly" in plain or not truth["Cardiomegaly"]:
        enlarged = "Cardiomegaly" in plain
        yield _yes_no("size", "Is the heart enlarged?", enlarged)
        yield _open("size", "What is the size of the heart?", "enlarged" if enlarged else "normal")


def _about_finding(rng: np.random.Generator, finding: Finding) -> Iterator[ImageQuestion]:
    """Side and severity of what is there."""
    name = NAMES[finding.label]
    if finding.label in _ONE_SIDED and finding.extent >= _SEEN:
        yield _open("laterality", f"On which side is the {name}?", _SIDES.get(finding.side, finding.side))
        if finding.side in ("left", "right"):
            side = pick(rng, ["left", "right"])
            yield _yes_no("laterality", f"Is the {name} on the {side}?", finding.side == side)
    if finding.label in _GRADED:
        yield _open("severity", f"How severe is the {name}?", finding.severity)
    if finding.label == "Lung Lesion" and finding.extent >= _SEEN:
        yield _open("count", "How many nodules are there?", str(len(finding.parts)))


def _about_masses(rng: np.random.Generator, part: Slice) -> Iterator[ImageQuestion]:
    """Presence, number, side and size of the masses of a slice."""
    yield _yes_no("presence", pick(rng, ["Is there a mass?", "Does this image show a mass?"]), bool(part.masses))
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
