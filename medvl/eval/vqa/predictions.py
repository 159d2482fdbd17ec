"""Predicted answers by question id, read from JSON lines or computed from scores over a vocabulary."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from medvl.common.untrusted import parse_json
from medvl.errors import EvaluationError
from medvl.eval.vqa.answer_vocabulary import AnswerVocabulary


@dataclasses.dataclass(frozen=True, slots=True)
class Prediction:
    """An answer of a model."""

    answer: str
    answer_type: str | None = None
    """"closed" or "open", if the model predicts the type of the question."""
    score: float | None = None
    """Score of the answer, if there is one, for the page."""


Predictions = Mapping[str, Prediction]
"""Question id -> prediction."""


def read_predictions(path: str | Path) -> dict[str, Prediction]:
    """Read JSON lines with "id" and "answer", and optionally "answer_type" and "score".

    Raises:
        EvaluationError: the file does not exist, or a line is malformed or repeats an id; the message gives its number.
    """
    path = Path(path)
    if not path.is_file():
        raise EvaluationError(f"{path} does not exist: give a file with one JSON object per line", "not_found")
    predictions: dict[str, Prediction] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
            name, answer = str(row["id"]), row["answer"]
        except (ValueError, KeyError, TypeError) as error:
            message = f"{path}, line {number}: expected an object with id and answer"
            raise EvaluationError(message, "malformed") from error
        if not isinstance(answer, str):
            raise EvaluationError(f"{path}, line {number}: answer must be a string", "wrong_type", field="answer")
        if name in predictions:
            raise EvaluationError(f"{path}, line {number}: question {name} has a second answer", "conflict", field="id")
        predictions[name] = Prediction(answer, row.get("answer_type"), row.get("score"))
    return predictions


def predictions_from_scores(
    ids: Sequence[str], scores_NV: ArrayLike, vocabulary: AnswerVocabulary
) -> dict[str, Prediction]:
    """Return the answer with the highest score for each question; of ties, the first in the vocabulary.

    Raises EvaluationError if the shapes do not fit or a score is NaN.
    """
    scores = np.asarray(scores_NV, dtype=np.float64)
    if scores.shape != (len(ids), len(vocabulary)):
        message = f"expected scores of shape {(len(ids), len(vocabulary))} (questions, answers), got {scores.shape}"
        raise EvaluationError(message, "mismatch")
    if np.isnan(scores).any():
        raise EvaluationError("a score is NaN: check the model's weights", "nonfinite")
    best_N = scores.argmax(axis=1)
    return {
        name: Prediction(vocabulary.answers[best], score=float(row_V[best]))
        for name, best, row_V in zip(ids, best_N.tolist(), scores, strict=True)
    }


def constant_predictions(ids: Iterable[str], answer: str) -> dict[str, Prediction]:
    """Return the same answer to every question."""
    return {name: Prediction(answer) for name in ids}
