"""Questions as items: a source that the loader reads like any other, one question with its image an item."""

import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from medvl.data.annotations.questions import Question, questions_of
from medvl.data.shards.format import ShardSource
from medvl.errors import CorpusError
from medvl.schema import Sample


class ImageQuestion(NamedTuple):
    """A question and the image that it is about."""

    image: int
    """Position of the sample in the folder of shards."""
    question: Question


class QuestionSource:
    """The questions of one split, each with its image; the columns of the labels are the answers of a vocabulary.

    A sample's key is its question's id within the image's key; its text stands in the section "question", and its one
    label is the answer, where the vocabulary has it: a question with another answer has no label, and stays in every
    denominator. Patient, study and corpus are the image's own.

    Args:
        source: shards of a VQA corpus.
        split: of the questions, which may differ from their images' (`medvl.data.annotations.questions.MIXED`).
        vocabulary: the answers that can be given, normalised.
        normalize: makes answers comparable; it must be a function of a module, so that workers can be handed it.

    Attributes:
        image_keys: of the image of each question; questions about one image follow one another.

    Raises:
        CorpusError: the shards hold no question of that split.
    """

    def __init__(
        self, source: ShardSource, split: str, vocabulary: Sequence[str], normalize: Callable[[str], str]
    ) -> None:
        self.source, self.split, self.normalize = source, split, normalize
        self.label_names = tuple(vocabulary)
        self._known = frozenset(vocabulary)
        self.asked = asked_in(source, split)
        self.image_keys = tuple(source.key(place) for place, _ in self.asked)
        told = "\n".join([source.fingerprint, split, *self.label_names])
        self.fingerprint = hashlib.sha256(told.encode()).hexdigest()

    def __len__(self) -> int:
        return len(self.asked)

    def key(self, position: int) -> str:
        """Key of the question at that position: its image's, and a hash of its id, which may hold any character."""
        place, question = self.asked[position]
        return f"{self.source.key(place)}-{hashlib.sha256(question.id.encode()).hexdigest()[:8]}"

    def sample(self, position: int) -> Sample:
        """The question at that position. Raises ShardError as `ShardSource.sample` does."""
        place, question = self.asked[position]
        image = self.source.sample(place)
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

    def pixels(self, position: int, color: bool = False) -> np.ndarray:
        """The image of that question, as `ShardSource.pixels` gives it."""
        return self.source.pixels(self.asked[position].image, color)


def asked_in(source: ShardSource, split: str) -> tuple[ImageQuestion, ...]:
    """The questions of a split, in the order of the shards. Raises CorpusError when there is none."""
    everything = [
        ImageQuestion(place, question)
        for place in range(len(source))
        for question in questions_of(source.sample(place))
    ]
    found = tuple(asked for asked in everything if asked.question.split == split)
    if not found:
        splits = sorted({asked.question.split for asked in everything})
        has = f"it has questions of {', '.join(splits)}" if splits else "its samples have no questions"
        raise CorpusError(f"{source.folder} holds no question of the split {split!r}: {has}")
    return found
