"""Protocols of VQA evaluations by name: medvl's, and those of published numbers, each with its flaw.

`mumc` is the evaluator that MUMC's authors released in 2023, with their paper; `mumc_2024` is a later one of theirs,
which compares whole answers.

A protocol defines the normalizer, the source of the answer vocabulary, which questions are included, what closed means
and when an answer is right. Every included question stays in the denominator: one whose answer is not in the
vocabulary, or that has no prediction, is wrong.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Literal

from medvl.common.checks import check_choice
from medvl.data.annotations.questions import Question
from medvl.errors import EvaluationError
from medvl.eval.vqa.answer_normalization import NORMALIZER, get_normalizer

Closed = Literal["field", "yes_no", "predicted"]
Match = Literal["exact", "any_of", "part_of", "llava_med"]
PROTOCOL = "medvl"
"""Protocol of comparable numbers."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class VQAProtocol:
    """Rules of a VQA evaluation."""

    name: str
    version: int = 1
    normalizer: str = NORMALIZER
    vocabulary: tuple[str, ...] = ("train",)
    """Splits whose answers form a classifier's vocabulary; empty for models that generate answers."""
    phrasing: tuple[str, ...] = ()
    """Phrasings of the included questions of VQA-RAD (freeform, para, frame); empty includes all. Other corpora have no
    phrasings, and all of their questions are included."""
    closed: Closed = "field"
    """A question is closed by the dataset's field, if its answer is yes or no, or as predicted by the model."""
    match: Match = "exact"
    """Equal after normalization; equal to any alternative (VQA-Med 2019: separated by `#`, with optional parts in
    brackets); equal to the right answer or to a part of it (MUMC in 2023); or as in LLaVA-Med v1.0."""
    flaw: str = ""
    """Why its numbers are not comparable; empty for comparable ones."""

    def __post_init__(self) -> None:
        get_normalizer(self.normalizer)

    def normalize(self, answer: str) -> str:
        """Return an answer in normalized form."""
        return get_normalizer(self.normalizer)(answer)

    def includes(self, question: Question) -> bool:
        """Return whether the question is in the denominator."""
        has_phrasing = question.phrasing in _RAD_PHRASINGS
        return not (self.phrasing and has_phrasing) or question.phrasing in self.phrasing

    def is_closed(self, question: Question, predicted_type: str | None = None) -> bool:
        """Return whether the question is closed. Raises EvaluationError if a required predicted type is missing."""
        if self.closed == "yes_no":
            return self.normalize(question.answer) in ("yes", "no")
        if self.closed == "predicted":
            if predicted_type not in ("closed", "open"):
                message = (
                    f"protocol {self.name} uses predicted answer types: expected closed or open for question "
                    f"{question.id}, got {predicted_type!r}"
                )
                raise EvaluationError(message, "missing", field="answer_type")
            return predicted_type == "closed"
        return question.answer_type == "closed"

    def accepted(self, question: Question) -> set[str]:
        """Return the right answers, normalized; several if the protocol allows alternatives, none if it is empty."""
        answers = {question.answer}
        if self.match == "any_of":
            alternatives = question.answer.split("#")
            answers = {*alternatives, *(_BRACKETS.sub(" ", answer) for answer in alternatives)}
        return {self.normalize(answer) for answer in answers} - {""}

    def credit(self, answer: str, question: Question) -> float:
        """Return the credit of an answer, 0 to 1; 0 for a question whose reference answer is empty."""
        normalized, accepted = self.normalize(answer), self.accepted(question)
        if self.match == "llava_med" and accepted:
            return _llava_med(normalized, min(accepted), question.answer_type)
        if self.match == "part_of":
            return float(any(normalized in right for right in accepted))
        return float(normalized in accepted)


_BRACKETS = re.compile(r"\([^()]*\)")
_RAD_PHRASINGS = ("freeform", "para", "frame")


def _llava_med(answer: str, right: str, answer_type: str) -> float:
    """Return the credit of an answer as in LLaVA-Med v1.0's `run_eval.py` and `evaluate_metrics.py`.

    Closed: 1 if the output contains "yes" or "no", and the right answer; the released script leaves a wrong answer
    with "yes" or "no" out of its denominator, and here it stays. Open: recall of the right words; a shared word counts
    by its occurrences in the output, and a missed one by its occurrences in the right answer.
    """
    if answer_type == "closed":
        return float(("yes" in answer or "no" in answer) and right in answer)
    given, wanted = answer.split(), right.split()
    found, missed = sum(word in wanted for word in given), sum(word not in given for word in wanted)
    return found / (found + missed)


_EVERY_SPLIT = ("train", "validate", "test")

_ALL = (
    VQAProtocol(name=PROTOCOL),
    VQAProtocol(name="vqa_med_2019", match="any_of"),
    VQAProtocol(name="m3ae", normalizer="vqa_v2", vocabulary=_EVERY_SPLIT, flaw="test answers are in the vocabulary"),
    VQAProtocol(name="mevf", normalizer="mevf", phrasing=("freeform",), flaw="includes freeform questions only"),
    VQAProtocol(
        name="pubmedclip",
        normalizer="mevf",
        vocabulary=("train", "test"),
        closed="predicted",
        flaw="test answers are in the vocabulary; questions are closed or open as the model predicts",
    ),
    VQAProtocol(
        name="mumc",
        version=2,
        normalizer="mumc",
        vocabulary=_EVERY_SPLIT,
        match="part_of",
        flaw='test answers are in the vocabulary; part of the right answer is enough ("no" for "normal"), and so is an '
        "empty answer; the normalizer joins lists and removes decimal points",
    ),
    VQAProtocol(
        name="mumc_2024",
        normalizer="mumc",
        vocabulary=_EVERY_SPLIT,
        flaw="test answers are in the vocabulary; the normalizer joins lists and removes decimal points",
    ),
    VQAProtocol(
        name="m2i2",
        version=2,
        normalizer="vqa_v2",
        vocabulary=_EVERY_SPLIT,
        phrasing=("freeform",),
        flaw="test answers are in the vocabulary; includes freeform questions only",
    ),
    VQAProtocol(
        name="yes_no", closed="yes_no", flaw="counts closed questions with answers other than yes and no as open"
    ),
    VQAProtocol(
        name="llava_med",
        normalizer="vqa_v2",
        vocabulary=(),
        match="llava_med",
        flaw='closed: substrings count ("normal" contains "no"); open: token recall, which favors long outputs',
    ),
)
PROTOCOLS: Mapping[str, VQAProtocol] = {protocol.name: protocol for protocol in _ALL}
PUBLISHED_PROTOCOLS = tuple(protocol.name for protocol in _ALL if protocol.flaw)
"""Protocols for reproducing published numbers."""


def get_protocol(name: str) -> VQAProtocol:
    """Return the protocol of that name. Raises `EvaluationError` if there is none."""
    check_choice(name, PROTOCOLS, "protocol", error=EvaluationError)
    return PROTOCOLS[name]
