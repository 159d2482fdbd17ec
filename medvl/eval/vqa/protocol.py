"""How answers are judged, by name: ours, and those behind published numbers, each with what is wrong with it.

A protocol fixes the normaliser, where the answer vocabulary comes from, which questions are judged, what closed means
and when an answer is right. Whatever it is, every question that it judges stays in the denominator: one whose answer is
not in the vocabulary, or that nobody answered, is wrong.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Literal

from medvl.data.annotations.questions import Question
from medvl.errors import EvaluationError
from medvl.eval.vqa.answer_normalization import NORMALIZER, get_normalizer

Closed = Literal["field", "yes_no", "predicted"]
Match = Literal["exact", "any_of", "llava_med"]
PROTOCOL = "medvl"
"""The protocol of numbers that are worth comparing."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class VQAProtocol:
    """A named way to judge answers."""

    name: str
    version: int = 1
    normalizer: str = NORMALIZER
    vocabulary: tuple[str, ...] = ("train",)
    """The splits whose answers a classifier may give; empty for models that write their answers."""
    phrasing: tuple[str, ...] = ()
    """Judge only questions of these phrasings (VQA-RAD: freeform, para); empty judges all."""
    closed: Closed = "field"
    """Closed by the dataset's field, by an answer of yes or no, or by what the model takes the question for."""
    match: Match = "exact"
    """Equal once normalised; equal to any of several (VQA-Med 2019: `#` between alternatives, parts in brackets may be
    left out); or as LLaVA-Med v1.0 counts."""
    flaw: str = ""
    """What keeps its numbers from being comparable; empty for ours."""

    def __post_init__(self) -> None:
        get_normalizer(self.normalizer)

    def normalize(self, answer: str) -> str:
        """An answer in the form in which it is compared."""
        return get_normalizer(self.normalizer)(answer)

    def judges(self, question: Question) -> bool:
        """Whether the question is in this protocol's denominator."""
        return not self.phrasing or question.phrasing in self.phrasing

    def is_closed(self, question: Question, predicted_type: str | None = None) -> bool:
        """Whether it counts as closed. Raises EvaluationError where the type must be predicted and is not."""
        if self.closed == "yes_no":
            return self.normalize(question.answer) in ("yes", "no")
        if self.closed == "predicted":
            if predicted_type not in ("closed", "open"):
                raise EvaluationError(
                    f"protocol {self.name} divides questions by their predicted type: every prediction needs an "
                    f"answer_type, closed or open, and that of question {question.id} has none"
                )
            return predicted_type == "closed"
        return question.answer_type == "closed"

    def accepted(self, question: Question) -> set[str]:
        """The right answers, normalised: one, or several where the protocol knows alternatives; none without one."""
        answers = {question.answer}
        if self.match == "any_of":
            alternatives = question.answer.split("#")
            answers = {*alternatives, *(_BRACKETS.sub(" ", answer) for answer in alternatives)}
        return {self.normalize(answer) for answer in answers} - {""}

    def credit(self, answer: str, question: Question) -> float:
        """What an answer is worth, 0 to 1. A question whose answer is empty is worth nothing to anybody."""
        said, right = self.normalize(answer), self.accepted(question)
        if self.match == "llava_med" and right:
            return _llava_med(said, min(right), question.answer_type)
        return float(said in right)


_BRACKETS = re.compile(r"\([^()]*\)")


def _llava_med(said: str, right: str, answer_type: str) -> float:
    """Closed: an output with "yes" or "no" in it has the right answer as a part. Open: recall of the answer's words."""
    if answer_type == "closed":
        return float(("yes" in said or "no" in said) and right in said)
    words = right.split()
    return sum(word in set(said.split()) for word in words) / len(words)


_EVERY_SPLIT = ("train", "validate", "test")

_ALL = (
    VQAProtocol(name=PROTOCOL),
    VQAProtocol(name="vqa_med_2019", match="any_of"),
    VQAProtocol(
        name="m3ae", normalizer="vqa_v2", vocabulary=_EVERY_SPLIT, flaw="answers of the test are in the vocabulary"
    ),
    VQAProtocol(name="mevf", normalizer="mevf", phrasing=("freeform",), flaw="judges freeform questions only"),
    VQAProtocol(
        name="pubmedclip",
        normalizer="mevf",
        vocabulary=("train", "test"),
        closed="predicted",
        flaw="answers of the test are in the vocabulary; questions are closed or open as the model takes them",
    ),
    VQAProtocol(
        name="mumc",
        normalizer="mumc",
        vocabulary=_EVERY_SPLIT,
        flaw="answers of the test are in the vocabulary; the normaliser joins lists and drops decimal points",
    ),
    VQAProtocol(
        name="m2i2",
        normalizer="mumc",
        vocabulary=_EVERY_SPLIT,
        phrasing=("freeform",),
        flaw="as mumc, and judges freeform questions only",
    ),
    VQAProtocol(
        name="yes_no", closed="yes_no", flaw="takes closed questions with other answers than yes and no for open"
    ),
    VQAProtocol(
        name="llava_med",
        normalizer="vqa_v2",
        vocabulary=(),
        match="llava_med",
        flaw='closed: substrings count ("normal" holds "no"); open: token recall, which long outputs raise',
    ),
)
PROTOCOLS: Mapping[str, VQAProtocol] = {protocol.name: protocol for protocol in _ALL}
PUBLISHED_PROTOCOLS = tuple(protocol.name for protocol in _ALL if protocol.flaw)
"""The protocols that are there to reproduce published numbers with."""


def get_protocol(name: str) -> VQAProtocol:
    """The protocol of that name. Raises `EvaluationError` naming those there are."""
    if name not in PROTOCOLS:
        raise EvaluationError(f"no VQA protocol {name!r}: name one of {', '.join(PROTOCOLS)}")
    return PROTOCOLS[name]
