"""The questions of an evaluation, with their splits and images."""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence

from medvl.data.annotations.questions import Question, questions_of
from medvl.errors import EvaluationError
from medvl.eval.core.subgroups import subgroups_of
from medvl.schema import Sample


@dataclasses.dataclass(frozen=True, slots=True)
class VQAData:
    """All questions of a corpus, in one of its definitions of splits."""

    name: str
    """Name of the corpus."""
    split_id: str
    """Name of the split definition: official, image-disjoint, ..."""
    questions: tuple[Question, ...]
    groups: tuple[str, ...]
    """Image (patient) of each question: the bootstrap unit."""
    subgroups: tuple[Mapping[str, str], ...] = ()
    """Attribute -> group of the image of each question; empty if unknown."""

    @classmethod
    def from_samples(cls, samples: Iterable[Sample]) -> "VQAData":
        """Collect the questions of samples from a converter or from shards.

        `extra["split_id"]` of the samples names the split definition, for corpora with several. Raises EvaluationError
        if there are no questions, or two have the same id.
        """
        questions: list[Question] = []
        groups: list[str] = []
        subgroups: list[Mapping[str, str]] = []
        name, split_id = "", "official"
        for sample in samples:
            name, split_id = sample.corpus, str(sample.extra.get("split_id", split_id))
            of_sample = questions_of(sample)
            questions += of_sample
            groups += [sample.patient] * len(of_sample)
            subgroups += [subgroups_of(sample)] * len(of_sample)
        if not questions:
            raise EvaluationError("the samples have no `questions` in their extra: use shards of a VQA corpus", "empty")
        if len({question.id for question in questions}) < len(questions):
            raise EvaluationError(f"{name}: several questions have the same id", "conflict", field="id")
        return cls(name, split_id, tuple(questions), tuple(groups), tuple(subgroups))

    def part(self, *splits: str) -> "VQAData":
        """Return the questions of these splits. Raises EvaluationError if there are none."""
        kept = [index for index, question in enumerate(self.questions) if question.split in splits]
        if not kept:
            known = sorted({question.split for question in self.questions})
            message = f"{self.name} has no question in {' or '.join(splits)}: its splits are {', '.join(known)}"
            raise EvaluationError(message, "empty", field="split")
        return self.choose(kept)

    def choose(self, indices: Sequence[int]) -> "VQAData":
        """Return the questions at these indices."""
        return dataclasses.replace(
            self,
            questions=tuple(self.questions[index] for index in indices),
            groups=tuple(self.groups[index] for index in indices),
            subgroups=tuple(self.subgroups[index] for index in indices) if self.subgroups else (),
        )

    @property
    def fingerprint(self) -> str:
        """Return the sha256 of questions, answers and splits, sorted by id: independent of the conversion."""
        rows = sorted((question.as_json() for question in self.questions), key=lambda row: row["id"])
        return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()
