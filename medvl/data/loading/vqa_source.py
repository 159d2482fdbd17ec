"""VQA shards as a source with one sample per question."""

import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from medvl.data.annotations.questions import Question, questions_of
from medvl.data.shards.regions import Regions
from medvl.data.shards.source import ShardSource
from medvl.errors import CorpusError
from medvl.schema import Sample


class ImageQuestion(NamedTuple):
    """A question and the position of its image."""

    image: int
    """Position of the sample in the folder of shards."""
    question: Question


class QuestionSource:
    """The questions of one split, each with its image. Label columns are the answers of a vocabulary.

    A sample's key combines the image key and a hash of the question id, its text is the section "question", and its
    only label is the answer. A question whose answer is not in the vocabulary has no label, and still counts in every
    denominator. Patient, study and corpus are those of the image.

    Args:
        source: shards of a VQA corpus.
        split: split of the questions, which may differ from that of their images
            (`medvl.data.annotations.questions.MIXED`).
        vocabulary: normalized answers.
        normalize: answer normalizer; must be picklable (a module-level function) for the loader's workers.

    Attributes:
        questions: the questions with the positions of their images.
        image_keys: image key of each question; questions about one image are adjacent.

    Raises:
        CorpusError: the shards hold no question of that split.
    """

    def __init__(
        self, source: ShardSource, split: str, vocabulary: Sequence[str], normalize: Callable[[str], str]
    ) -> None:
        self.source, self.split, self.normalize = source, split, normalize
        self.label_names, self.region_manifest = tuple(vocabulary), source.region_manifest
        self._known = frozenset(vocabulary)
        self.questions = questions_in_split(source, split)
        self.image_keys = tuple(source.key(position) for position, _ in self.questions)
        content = "\n".join([source.fingerprint, split, *self.label_names])
        self.fingerprint = hashlib.sha256(content.encode()).hexdigest()

    def __len__(self) -> int:
        return len(self.questions)

    def key(self, position: int) -> str:
        """Return the image key with a hash of the question id, which may contain any character."""
        image, question = self.questions[position]
        return f"{self.source.key(image)}-{hashlib.sha256(question.id.encode()).hexdigest()[:8]}"

    def sample(self, position: int) -> Sample:
        """Return the question at `position` as a sample. Raises ShardError."""
        image_position, question = self.questions[position]
        image = self.source.sample(image_position)
        answer = self.normalize(question.answer)
        return Sample(
            key=self.key(position),
            corpus=image.corpus,
            split=question.split,
            patient=image.patient,
            study=image.study,
            sections={"question": question.question},
            labels={answer: 1} if answer in self._known else {},
            view=image.view,
            sex=image.sex,
            age=image.age,
        )

    def pixels(self, position: int, color: bool | None = None) -> np.ndarray:
        """Return the decoded image of the question at `position`. Raises ImageError or ShardError."""
        return self.source.pixels(self.questions[position].image, color)

    def regions(self, position: int) -> Regions:
        """Return the regions of the image of the question at `position`. Raises ImageError or ShardError."""
        return self.source.regions(self.questions[position].image)


def questions_in_split(source: ShardSource, split: str) -> tuple[ImageQuestion, ...]:
    """Return the questions of a split, in the order of the shards. Raises CorpusError when there are none."""
    everything = [
        ImageQuestion(position, question)
        for position in range(len(source))
        for question in questions_of(source.sample(position))
    ]
    selected = tuple(each for each in everything if each.question.split == split)
    if not selected:
        splits = ", ".join(sorted({each.question.split for each in everything})) or "no questions"
        message = f"{source.folder}: no question has the split {split!r}; found {splits}"
        raise CorpusError(message, "unknown_name", field="split")
    return selected
