"""Predicted answers by question id, read from JSON lines or computed from scores over a vocabulary."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from medvl.common.text_files import read_json_objects
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
    predictions: dict[str, Prediction] = {}
    fields = {"id": object, "answer": str}
    for where, row in read_json_objects(Path(path), EvaluationError, fields, field="predictions"):
        name, score = str(row["id"]), row.get("score")
        if name in predictions:
            raise EvaluationError(f"{where}: question {name} has a second answer", "conflict", field="id")
        if score is not None and (isinstance(score, bool) or not isinstance(score, int | float)):
            raise EvaluationError(f"{where}: score must be a number", "wrong_type", field="score")
        predictions[name] = Prediction(row["answer"], row.get("answer_type"), score)
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
