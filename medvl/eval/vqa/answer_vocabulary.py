"""Answer vocabulary of a classifier."""

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Iterable

from medvl.data.annotations.questions import Question
from medvl.errors import EvaluationError
from medvl.eval.vqa.protocol import VQAProtocol


@dataclasses.dataclass(frozen=True, slots=True)
class AnswerVocabulary:
    """Normalized answers by decreasing frequency; ties in alphabetical order."""

    answers: tuple[str, ...]
    normalizer: str
    splits: tuple[str, ...]
    """Splits that the answers come from; empty for those of a model, which has no record of them."""

    @classmethod
    def build(cls, questions: Iterable[Question], protocol: VQAProtocol, *, min_count: int = 1) -> "AnswerVocabulary":
        """Build the vocabulary from the splits that the protocol names, by default train alone.

        `splits` are those of them that have questions.

        Raises EvaluationError if they have no answer, or the protocol names none because answers are generated.
        """
        if not protocol.vocabulary:
            message = f"protocol {protocol.name} has no vocabulary, because answers are generated"
            raise EvaluationError(f"{message}; choose another protocol", "unsupported", field="protocol")
        chosen = [question for question in questions if question.split in protocol.vocabulary]
        counts = Counter(protocol.normalize(question.answer) for question in chosen)
        counts.pop("", None)
        kept = [answer for answer, count in counts.items() if count >= min_count]
        if not kept:
            raise EvaluationError(f"{', '.join(protocol.vocabulary)} has no answers for a vocabulary", "empty")
        answers = sorted(kept, key=lambda answer: (-counts[answer], answer))
        found = {question.split for question in chosen}
        splits = tuple(split for split in protocol.vocabulary if split in found)
        return cls(tuple(answers), protocol.normalizer, splits)

    @classmethod
    def of_model(cls, answers: Iterable[str], protocol: VQAProtocol) -> "AnswerVocabulary":
        """Return the answers of a model, in its order, as the protocol compares them."""
        normalized = dict.fromkeys(map(protocol.normalize, answers))
        return cls(tuple(answer for answer in normalized if answer), protocol.normalizer, ())

    def leaked(self, questions: Iterable[Question], split: str, protocol: VQAProtocol) -> tuple[str, ...]:
        """Return the answers that are right for a question of a split and for none of the other splits."""
        evaluated: set[str] = set()
        others: set[str] = set()
        for question in questions:
            (evaluated if question.split == split else others).update(protocol.accepted(question))
        return tuple(answer for answer in self.answers if answer in evaluated - others)

    def __len__(self) -> int:
        return len(self.answers)

    def index(self) -> dict[str, int]:
        """Return normalized answer -> class."""
        return {answer: number for number, answer in enumerate(self.answers)}

    @property
    def fingerprint(self) -> str:
        """Return the sha256 of the answers in order."""
        return hashlib.sha256(json.dumps(self.answers).encode()).hexdigest()
