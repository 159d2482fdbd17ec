"""Questions and answers about images, in the form of the VQA corpora.

A sample is an image; its questions are JSON objects in `Sample.extra["questions"]`. Each question has its own split,
because some releases split questions instead of images (VQA-RAD). If the questions of one image are in several splits,
all samples of the release have the split `MIXED`, and readers must select questions by their own split.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from medvl.errors import CorpusError
from medvl.schema import Sample

AnswerType = Literal["closed", "open"]
MIXED = "mixed"
"""Split of every sample of a release that divides the questions about one image among splits."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A question about an image and its answer as released (repaired, not normalized)."""

    id: str
    """Unique in its corpus."""
    question: str
    answer: str
    """Empty where the release has none; such a question counts in every denominator and no answer matches it."""
    answer_type: AnswerType
    """From the dataset's own field, or inferred from yes/no where it has none (see the data card)."""
    kind: str = ""
    """Question type of the dataset; several are joined by ", " in alphabetical order."""
    organ: str = ""
    split: str
    phrasing: str = ""
    """freeform, para or frame in VQA-RAD; vqa or kvqa in SLAKE."""

    def as_json(self) -> dict[str, str]:
        """Return the entry for `Sample.extra["questions"]`, without empty fields except the answer."""
        values = dataclasses.asdict(self)
        return {name: value for name, value in values.items() if value or name == "answer"}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Question":
        """Parse an entry; unknown fields are ignored. Raises CorpusError when a field is missing or not a string."""
        names = [field.name for field in dataclasses.fields(cls) if field.name in data]
        try:
            question = cls(**{name: data[name] for name in names})
        except TypeError:
            expected = "a question with id, question, answer, answer_type and split"
            raise CorpusError(f"expected {expected}, got {', '.join(names)}", "missing") from None
        for name in names:
            if not isinstance(getattr(question, name), str):
                raise CorpusError(f"question {question.id}: expected a string for {name}", "wrong_type", field=name)
        if question.answer_type not in ("closed", "open"):
            message = f"question {question.id}: expected answer_type closed or open, got {question.answer_type!r}"
            raise CorpusError(message, "unknown_name", field="answer_type")
        return question


def questions_of(sample: Sample) -> tuple[Question, ...]:
    """Return the questions of a sample, empty if it has none. Raises CorpusError when they are malformed."""
    entries = sample.extra.get("questions", [])
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        raise CorpusError("a sample's questions must be a list of objects", "wrong_type", field="questions")
    return tuple(Question.from_json(entry) for entry in entries)
