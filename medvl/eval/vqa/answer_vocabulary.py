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
    """Splits that the answers come from."""

    @classmethod
    def build(cls, questions: Iterable[Question], protocol: VQAProtocol, *, min_count: int = 1) -> "AnswerVocabulary":
        """Build the vocabulary from the splits that the protocol names, by default train alone.

        Raises EvaluationError if they have no answer.
        """
        counts = Counter(
            protocol.normalize(question.answer) for question in questions if question.split in protocol.vocabulary
        )
        counts.pop("", None)
        kept = [answer for answer, count in counts.items() if count >= min_count]
        if not kept:
            raise EvaluationError(f"{', '.join(protocol.vocabulary)} has no answers for a vocabulary", "empty")
        answers = sorted(kept, key=lambda answer: (-counts[answer], answer))
        return cls(tuple(answers), protocol.normalizer, protocol.vocabulary)

    def __len__(self) -> int:
        return len(self.answers)

    def index(self) -> dict[str, int]:
        """Return normalized answer -> class."""
        return {answer: number for number, answer in enumerate(self.answers)}

    @property
    def fingerprint(self) -> str:
        """Return the sha256 of the answers in order."""
        return hashlib.sha256(json.dumps(self.answers).encode()).hexdigest()
