"""Predicted answers: by question id, never by position; from JSON lines or from scores over a vocabulary."""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from medvl.errors import EvaluationError
from medvl.eval.vqa.answer_vocabulary import AnswerVocabulary


@dataclasses.dataclass(frozen=True, slots=True)
class Prediction:
    """An answer, as the model gave it."""

    answer: str
    answer_type: str | None = None
    """closed or open, where the model says what it takes the question for."""
    score: float | None = None
    """Of the answer, where there is one; kept for the page."""


Predictions = Mapping[str, Prediction]
"""Question id -> prediction."""


def read_predictions(path: str | Path) -> dict[str, Prediction]:
    """From JSON lines with "id" and "answer", and "answer_type" or "score" where they are known.

    Raises EvaluationError that names the line which is none of that, or repeats an id.
    """
    path = Path(path)
    if not path.is_file():
        raise EvaluationError(f"{path} is not there: name a file of predictions, a JSON object a line")
    found: dict[str, Prediction] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            name, answer = str(row["id"]), row["answer"]
        except (ValueError, KeyError, TypeError) as error:
            raise EvaluationError(f"{path}, line {number} is no object with id and answer") from error
        if not isinstance(answer, str):
            raise EvaluationError(f"{path}, line {number}: answer must be a text")
        if name in found:
            raise EvaluationError(f"{path}, line {number}: question {name} is answered a second time")
        found[name] = Prediction(answer, row.get("answer_type"), row.get("score"))
    return found


def predictions_from_scores(
    ids: Sequence[str], scores_NV: ArrayLike, vocabulary: AnswerVocabulary
) -> dict[str, Prediction]:
    """The answer with the highest score; of equal ones the more frequent in the vocabulary's splits.

    Raises EvaluationError when the shapes do not fit or a score is NaN.
    """
    scores = np.asarray(scores_NV, dtype=np.float64)
    if scores.shape != (len(ids), len(vocabulary)):
        raise EvaluationError(
            f"scores of shape {scores.shape} for {len(ids)} questions and {len(vocabulary)} answers do not fit"
        )
    if np.isnan(scores).any():
        raise EvaluationError("a score is NaN: the model that gave it is broken")
    best_N = scores.argmax(axis=1)
    return {
        name: Prediction(vocabulary.answers[best], score=float(row_V[best]))
        for name, best, row_V in zip(ids, best_N.tolist(), scores, strict=True)
    }


def constant_predictions(ids: Iterable[str], answer: str) -> dict[str, Prediction]:
    """The same answer to every question."""
    return {name: Prediction(answer) for name in ids}
