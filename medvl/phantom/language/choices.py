"""Questions with four options about a radiograph, balanced so that only the image reveals the
answer.

Each form has fixed options. Among the questions of a form and split, every option is the right one
equally often, under every letter equally often: a system that reads the text alone is at 1/4.
"""

import dataclasses
import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from medvl.phantom.language.lexicon import NAMES
from medvl.phantom.population.findings import truth_labels
from medvl.phantom.population.world import View

LETTERS = "ABCD"
_VISIBLE_EXTENT = 0.34  # extent from which a finding is clearly visible: moderate and severe
_FINDINGS = {
    "Pleural Effusion": "pleural effusion",
    "Pneumothorax": "pneumothorax",
    "Cardiomegaly": "enlarged heart",
    "Edema": "pulmonary edema",
}
_SIDES = ("right", "left", "bilateral")
_SEVERITIES = ("mild", "moderate", "severe")
_GRADED = ("Pleural Effusion", "Cardiomegaly")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ChoiceQuestion:
    """A question with four options."""

    question: str
    options: tuple[str, ...]
    """In the same order for all questions of the same form."""
    right: int
    kind: str
    """presence, laterality or severity."""


def choice_questions(view: View) -> Iterator[ChoiceQuestion]:
    """Yield the questions about a frontal view; none about a lateral one.

    Which of four findings is shown, where exactly one of them is clearly visible and no other is
    present; on which side the effusion is; how severe effusion and cardiomegaly are.
    """
    if view.lateral:
        return
    truth = truth_labels(view.findings)
    found = {finding.label: finding for finding in view.findings}
    shown = [label for label in _FINDINGS if truth[label]]
    if len(shown) == 1 and found[shown[0]].extent >= _VISIBLE_EXTENT:
        yield ChoiceQuestion(
            question="Which of these findings does the radiograph show?",
            options=tuple(_FINDINGS.values()),
            right=list(_FINDINGS).index(shown[0]),
            kind="presence",
        )
    effusion = found.get("Pleural Effusion")
    if effusion is None or effusion.extent >= _VISIBLE_EXTENT:
        side = None if effusion is None else effusion.side
        yield _graded(side, "Pleural Effusion", _SIDES, "laterality")
    for label in _GRADED:
        finding = found.get(label)
        severity = None if finding is None else finding.severity
        yield _graded(severity, label, _SEVERITIES, "severity")


def _graded(value: str | None, label: str, words: tuple[str, ...], kind: str) -> ChoiceQuestion:
    """Return the question which of a finding's degrees or sides is right; None: it is absent."""
    name = NAMES[label]
    asked = "Where is the" if kind == "laterality" else "How severe is the"
    return ChoiceQuestion(
        question=f"{asked} {name} on this radiograph, if there is any?",
        options=(*(f"{word} {name}" for word in words), f"no {name}"),
        right=len(words) if value is None else words.index(value),
        kind=kind,
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AskedChoice:
    """A question that is kept, with its options in the order of their letters."""

    place: int
    """Place of the candidate."""
    options: tuple[str, ...]
    right: int


def balanced_choices(
    candidates: Sequence[tuple[str, str, ChoiceQuestion]],
) -> Iterator[AskedChoice]:
    """Yield the candidates (split, name, question) that are kept, with the places of their options.

    For each form within a split, every option is right as often as the rarest, and letters take
    turns; in a small corpus, a form that lacks an answer keeps one question of each. Candidates are
    kept in the order of a hash of their name, so that the result does not depend on their order.
    """
    forms: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for place, (split, _, question) in enumerate(candidates):
        forms[split, question.question].append(place)
    for places in forms.values():
        right = Counter(candidates[place][2].right for place in places)
        limit = min(right[option] for option in range(len(LETTERS))) or 1
        used: Counter[int] = Counter()
        for place in sorted(places, key=lambda place: _hash(candidates[place][1])):
            _, name, question = candidates[place]
            number = used[question.right]
            used[question.right] += 1
            if number >= limit:
                continue
            letter = (number + question.right) % len(LETTERS)
            others = [n for n in range(len(LETTERS)) if n != question.right]
            others.sort(key=lambda option: _hash(f"{name} {option}"))
            others.insert(letter, question.right)
            options = tuple(question.options[option] for option in others)
            yield AskedChoice(place=place, options=options, right=letter)


def _hash(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=8).digest()
