"""The questions of an evaluation, with their splits and the images that they are about."""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Sequence

from medvl.data.annotations.questions import Question, questions_of
from medvl.errors import EvaluationError
from medvl.schema import Sample


@dataclasses.dataclass(frozen=True, slots=True)
class VQAData:
    """All questions of a corpus in one of its splits."""

    name: str
    """Of the corpus."""
    split_id: str
    """Which of its splits: official, image-disjoint, ..."""
    questions: tuple[Question, ...]
    groups: tuple[str, ...]
    """The image (patient) of each question: what bootstrap intervals are drawn over."""

    @classmethod
    def from_samples(cls, samples: Iterable[Sample]) -> "VQAData":
        """From the samples of a converter or of shards. Raises EvaluationError when they have no questions.

        Which split it is, the samples of a corpus that has several say in `extra["split_id"]`.
        """
        questions: list[Question] = []
        groups: list[str] = []
        name, split_id = "", "official"
        for sample in samples:
            name, split_id = sample.corpus, str(sample.extra.get("split_id", split_id))
            found = questions_of(sample)
            questions += found
            groups += [sample.patient] * len(found)
        if not questions:
            raise EvaluationError("there is no question to judge: the samples have no `questions` in their extra")
        if len({question.id for question in questions}) < len(questions):
            raise EvaluationError(f"{name}: questions share an id, so predictions cannot be told apart")
        return cls(name, split_id, tuple(questions), tuple(groups))

    def part(self, *splits: str) -> "VQAData":
        """The questions of these splits only. Raises EvaluationError when there is none."""
        kept = [number for number, question in enumerate(self.questions) if question.split in splits]
        if not kept:
            known = sorted({question.split for question in self.questions})
            raise EvaluationError(f"{self.name} has no question in {' or '.join(splits)}: its splits are {known}")
        return self.choose(kept)

    def choose(self, numbers: Sequence[int]) -> "VQAData":
        """The questions at these places."""
        questions = tuple(self.questions[number] for number in numbers)
        return dataclasses.replace(self, questions=questions, groups=tuple(self.groups[number] for number in numbers))

    @property
    def fingerprint(self) -> str:
        """sha256 of questions, answers and splits in order of id: equal wherever and however they were converted."""
        rows = sorted((question.as_json() for question in self.questions), key=lambda row: row["id"])
        return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()
