"""Answers of a model to the questions of a loader, and their accuracy during training."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from medvl.data.annotations.questions import MIXED, Question
from medvl.data.loading.vqa_source import QuestionSource
from medvl.data.shards.format import MANIFEST
from medvl.data.shards.source import ShardSource
from medvl.errors import EvaluationError
from medvl.eval.vqa.answer_vocabulary import AnswerVocabulary
from medvl.eval.vqa.predictions import Prediction
from medvl.eval.vqa.protocol import PROTOCOL, VQAProtocol, get_protocol
from medvl.eval.vqa.question_set import VQAData
from medvl.models.downstream.vqa.heads import AnswerPredictions
from medvl.models.downstream.vqa.model import VQA
from medvl.models.eval_mode import evaluating
from medvl.schema import Batch


class AnswerModel(Protocol):
    """A model that answers questions."""

    def predict(self, batch: Batch) -> AnswerPredictions:
        """Return an answer to each question of a batch, from a vocabulary or generated."""

    def modules(self) -> Iterator[torch.nn.Module]:
        """Return all submodules, as in torch."""

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Return all parameters, as in torch."""


class QuestionLoader(Protocol):
    """Batches that hold every readable question of `source` exactly once."""

    @property
    def source(self) -> QuestionSource:
        """Source of the questions."""

    def __iter__(self) -> Iterator[Batch]: ...


def read_answer_vocabulary(folder: Path | str, protocol: str = PROTOCOL) -> AnswerVocabulary:
    """Build the answer vocabulary of a protocol from a folder of shards with training questions.

    Splits of the protocol that the folder lacks are read from the folders beside it that have their names. In a corpus
    that has all its splits in one folder there may be no validate split, as in VQA-RAD.

    Raises ShardError if a folder is damaged, and EvaluationError if a split of the protocol is in no folder, or the
    protocol has no vocabulary.
    """
    rules, source = get_protocol(protocol), ShardSource(folder)
    data = question_data([source])
    missing = set(rules.vocabulary) - {question.split for question in data.questions}
    if source.manifest.split == MIXED:
        missing -= {"validate"}
    others = [path for split in sorted(missing) if ((path := source.folder.parent / split) / MANIFEST).is_file()]
    if absent := sorted(missing - {path.name for path in others}):
        message = f"protocol {rules.name} takes answers of {', '.join(absent)} too, and {source.folder} has none"
        advice = f"add the shards of these splits as folders of {source.folder.parent}, or choose protocol {PROTOCOL}"
        raise EvaluationError(f"{message}; {advice}", "missing", field="protocol")
    if others:
        data = question_data([source, *map(ShardSource, others)])
    return AnswerVocabulary.build(data.questions, rules)


def model_vocabulary(model: VQA, protocol: VQAProtocol) -> AnswerVocabulary | None:
    """Return the answers that a model can give, as the protocol compares them; None if it generates them."""
    return None if model.config.head == "generation" else AnswerVocabulary.of_model(model.config.answers, protocol)


def check_answer_types(protocol: VQAProtocol) -> None:
    """Raise EvaluationError for a protocol that needs predicted answer types: models of medvl do not predict them."""
    if protocol.closed == "predicted":
        message = (
            f"protocol {protocol.name} needs a predicted answer type of each question, and the model predicts none"
        )
        raise EvaluationError(f"{message}; choose another protocol", "unsupported", field="protocol")


def questions_beside(folders: Sequence[Path]) -> list[Question]:
    """Return the questions of the splits of a corpus in the folders beside some of its folders, without theirs."""
    own = {folder.resolve() for folder in folders}
    beside = {path.parent.resolve() for folder in folders for path in folder.parent.glob(f"*/{MANIFEST}")}
    corpora = {ShardSource(folder).manifest.corpus for folder in folders}
    sources = [ShardSource(folder) for folder in sorted(beside - own)]
    others = [source for source in sources if source.manifest.corpus in corpora]
    return [*question_data(others).questions] if others else []


def question_data(sources: Iterable[ShardSource]) -> VQAData:
    """Return all questions of folders of one corpus. Raises EvaluationError if there are none."""
    return VQAData.from_samples(source.sample(index) for source in sources for index in range(len(source)))


def answer_questions(model: AnswerModel, loader: QuestionLoader) -> dict[str, Prediction]:
    """Return question id -> the model's answer, with a score between 0 and 1.

    A question whose image cannot be read has no prediction, and counts as wrong. Raises EvaluationError if a score is
    NaN.
    """
    ids = {loader.source.key(n): entry.question.id for n, entry in enumerate(loader.source.questions)}
    device = next(model.parameters()).device
    predictions: dict[str, Prediction] = {}
    with evaluating(model):
        for batch in loader:
            output = model.predict(batch.to(device))
            if output.score_B.isnan().any():
                raise EvaluationError("a score is NaN: check the model's weights", "nonfinite")
            rows = zip(batch.keys, output.answers, output.score_B.tolist(), strict=True)
            predictions |= {ids[key]: Prediction(answer, score=score) for key, answer, score in rows}
    return predictions


class AnswerEval:
    """Accuracy during training: `AnswerEval(loader)(model)` returns a flat mapping of metrics without intervals.

    Its keys are "vqa/accuracy" over all questions of the loader, and "vqa/closed" and "vqa/open" if there are such. A
    question whose answer is not in the vocabulary is wrong, unless the model generates that answer.

    Raises EvaluationError for a protocol that needs predicted answer types.
    """

    def __init__(self, loader: QuestionLoader, protocol: str = PROTOCOL) -> None:
        self.loader, self.protocol = loader, get_protocol(protocol)
        check_answer_types(self.protocol)

    def __call__(self, model: AnswerModel) -> Mapping[str, float]:
        """Return the metrics of the model."""
        predictions = answer_questions(model, self.loader)
        questions = [entry.question for entry in self.loader.source.questions]
        credit_N = np.array(
            [self.protocol.credit(predictions[q.id].answer, q) if q.id in predictions else 0.0 for q in questions]
        )
        closed_N = np.array([self.protocol.is_closed(question) for question in questions])
        parts = {"accuracy": np.ones_like(closed_N), "closed": closed_N, "open": ~closed_N}
        return {f"vqa/{name}": float(credit_N[part].mean()) for name, part in parts.items() if part.any()}
