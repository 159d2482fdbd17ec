"""A model answers the questions of a loader: predictions to be judged, and accuracy while it is being trained."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from medvl.data.loading.vqa_source import QuestionSource
from medvl.data.shards.source import ShardSource
from medvl.errors import EvaluationError
from medvl.eval.vqa.answer_vocabulary import AnswerVocabulary
from medvl.eval.vqa.predictions import Prediction
from medvl.eval.vqa.protocol import PROTOCOL, get_protocol
from medvl.eval.vqa.question_set import VQAData
from medvl.models.downstream.vqa.heads import AnswerPredictions
from medvl.models.eval_mode import evaluating
from medvl.schema import Batch


class Answers(Protocol):
    """A model that answers questions."""

    def predict(self, batch: Batch) -> AnswerPredictions:
        """An answer to each question of a batch, of its vocabulary or in its own words."""

    def modules(self) -> Iterator[torch.nn.Module]:
        """As torch has them."""

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """As torch has them."""


class QuestionLoader(Protocol):
    """Every readable question of `source` exactly once."""

    @property
    def source(self) -> QuestionSource:
        """Where the questions come from."""

    def __iter__(self) -> Iterator[Batch]: ...


def read_answer_vocabulary(folder: Path | str, protocol: str = PROTOCOL) -> AnswerVocabulary:
    """The answers that a model may give: those of the questions in a folder of shards that the protocol learns from.

    Raises ShardError when the folder is damaged, EvaluationError when it has no such question.
    """
    return AnswerVocabulary.build(question_data([ShardSource(folder)]).questions, get_protocol(protocol))


def question_data(sources: Iterable[ShardSource]) -> VQAData:
    """All questions of some folders of one corpus. Raises EvaluationError when they have none."""
    return VQAData.from_samples(source.sample(place) for source in sources for place in range(len(source)))


def answer_questions(model: Answers, loader: QuestionLoader) -> dict[str, Prediction]:
    """The model's answer to every question, by question id, its score between 0 and 1.

    A question whose image cannot be read has no prediction, which a judge counts as wrong. Raises EvaluationError when
    a score is NaN.
    """
    ids = {loader.source.key(n): asked.question.id for n, asked in enumerate(loader.source.questions)}
    device = next(model.parameters()).device
    found: dict[str, Prediction] = {}
    with evaluating(model):
        for batch in loader:
            said = model.predict(batch.to(device))
            if said.score_B.isnan().any():
                raise EvaluationError("a score is NaN: the model that gave it is broken")
            rows = zip(batch.keys, said.answers, said.score_B.tolist(), strict=True)
            found |= {ids[key]: Prediction(answer, score=score) for key, answer, score in rows}
    return found


class AnswerEval:
    """Accuracy while a model is being trained: `AnswerEval(loader)(model)` is a flat mapping of numbers.

    "vqa/accuracy" over all questions of the loader, "vqa/closed" and "vqa/open" where there are such; no intervals. A
    question whose answer is not in the vocabulary is wrong, unless the model writes that answer by itself.
    """

    def __init__(self, loader: QuestionLoader, protocol: str = PROTOCOL) -> None:
        self.loader, self.protocol = loader, get_protocol(protocol)

    def __call__(self, model: Answers) -> Mapping[str, float]:
        """The numbers for the model as it is now."""
        said = answer_questions(model, self.loader)
        questions = [asked.question for asked in self.loader.source.questions]
        credit_N = np.array([self.protocol.credit(said[q.id].answer, q) if q.id in said else 0.0 for q in questions])
        closed_N = np.array([self.protocol.is_closed(question) for question in questions])
        parts = {"accuracy": np.ones_like(closed_N), "closed": closed_N, "open": ~closed_N}
        return {f"vqa/{name}": float(credit_N[part].mean()) for name, part in parts.items() if part.any()}
