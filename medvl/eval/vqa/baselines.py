"""Baselines that do not use the image, reported next to every score."""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Hashable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from medvl.data.annotations import Question
from medvl.errors import EvaluationError
from medvl.eval.vqa.predictions import Prediction, constant_predictions, predictions_from_scores
from medvl.eval.vqa.protocol import AnswerVocabulary, VQAProtocol

# Question-only baseline: a classifier without the image, which measures how much a dataset
# reveals by its wording.
#
# Ridge regression onto one-hot answers from counts of words and word pairs, solved exactly in
# dual form. Equal questions are merged into one weighted row, which gives the same solution with
# a smaller system.
#
# Shape letters: N training questions, U unique ones, F features, V answers of the vocabulary, M
# questions to answer.

_WORD = re.compile(r"\w+")
_BLOCK = 512  # questions per dense block


def features_of(question: str) -> Counter[str]:
    """Return counts of words and of pairs of adjacent words."""
    words = _WORD.findall(question.lower())
    return Counter([*words, *(f"{first} {second}" for first, second in itertools.pairwise(words))])


class QuestionOnly:
    """Scores of all answers, linear in the words of the question.

    Minimizes sum_n |W' x_n + b - y_n|^2 + penalty |W|^2 over W (F, V) and b (V), with one-hot y_n.
    With centered X, W = X' A and (X X' + penalty C^-1) A = mean of y for each unique question,
    where C holds the questions' counts.

    Args:
        questions: N training questions.
        answers: index of the answer of each question in the vocabulary.
        classes: size of the vocabulary, V.
        penalty: strength of the regularization.

    Raises EvaluationError if there are no questions, or an index is outside of the vocabulary.
    """

    def __init__(
        self,
        questions: Sequence[str],
        answers: Sequence[int],
        classes: int,
        *,
        penalty: float = 1.0,
    ) -> None:
        if (
            not questions
            or len(questions) != len(answers)
            or not 0 <= min(answers) <= max(answers) < classes
        ):
            message = "a question-only model needs questions, each with an answer of the vocabulary"
            raise EvaluationError(message, "mismatch")
        row_of: dict[str, int] = {}
        rows_N = torch.tensor([row_of.setdefault(question, len(row_of)) for question in questions])
        self._index = {
            name: i
            for i, name in enumerate(sorted({f for text in row_of for f in features_of(text)}))
        }
        self._unique_UF = self._matrix(list(row_of))
        count_U = torch.bincount(rows_N).double()
        target_UV = torch.zeros(len(row_of), classes, dtype=torch.float64)
        target_UV.index_put_(
            (rows_N, torch.tensor(answers)), torch.ones(1, dtype=torch.float64), accumulate=True
        )
        self._bias_V = target_UV.sum(dim=0) / len(questions)
        target_UV = target_UV / count_U[:, None] - self._bias_V
        self._mean_F = torch.mv(self._unique_UF.t(), count_U) / len(questions)
        gram_UU = self._centred_products(self._unique_UF)
        gram_UU.diagonal().add_(penalty / count_U)
        self._dual_UV = torch.cholesky_solve(target_UV, torch.linalg.cholesky(gram_UU))

    def scores(self, questions: Sequence[str]) -> NDArray[np.float64]:
        """Return scores_MV; words that are not in the training questions are ignored."""
        row_of: dict[str, int] = {}
        rows_M = [row_of.setdefault(question, len(row_of)) for question in questions]
        products_QU = self._centred_products(self._matrix(list(row_of)))
        return (products_QU @ self._dual_UV + self._bias_V).numpy()[rows_M]

    def _centred_products(self, other_QF: Tensor) -> Tensor:
        """Return (x - mean) . (u - mean) for the rows x of a matrix and every unique training
        question u: (Q, U).
        """
        blocks = []
        for start in range(0, max(1, other_QF.shape[0]), _BLOCK):
            rows = torch.arange(start, min(start + _BLOCK, other_QF.shape[0]))
            dense_FQ = (other_QF.index_select(0, rows).to_dense() - self._mean_F).T
            products_UQ = torch.sparse.mm(self._unique_UF, dense_FQ) - self._mean_F @ dense_FQ
            blocks.append(products_UQ.T)
        return torch.cat(blocks)

    def _matrix(self, questions: Sequence[str]) -> Tensor:
        entries = [
            (row, self._index[name], count)
            for row, question in enumerate(questions)
            for name, count in features_of(question).items()
            if name in self._index
        ]
        index_2E = (
            torch.tensor([entry[:2] for entry in entries], dtype=torch.int64).reshape(-1, 2).T
        )
        values_E = torch.tensor([entry[2] for entry in entries], dtype=torch.float64)
        size = (len(questions), len(self._index))
        return torch.sparse_coo_tensor(index_2E, values_E, size, check_invariants=True).coalesce()


QUESTION_ONLY = "question_only"


def baselines(
    train: Sequence[Question], test: Sequence[Question], protocol: VQAProtocol
) -> dict[str, dict[str, Prediction]]:
    """Return name -> predictions for the test questions, all fitted on the training questions
    alone.

    * always_yes, always_no, majority: one answer to all; majority is the most frequent one in
      train.
    * majority_by_kind: the most frequent one in train for the same answer type and question type.
    * question_lookup: the most frequent one in train for the identical question, else the majority.
    * question_only: a linear model of the question's words (`QuestionOnly`).

    Raises EvaluationError if train has no answer.
    """
    vocabulary = AnswerVocabulary.build(
        train, VQAProtocol(name=protocol.name, normalizer=protocol.normalizer)
    )
    answered = [question for question in train if protocol.normalize(question.answer)]
    ids = [question.id for question in test]
    majority = vocabulary.answers[0]
    return {
        "always_yes": constant_predictions(ids, "yes"),
        "always_no": constant_predictions(ids, "no"),
        "majority": constant_predictions(ids, majority),
        "majority_by_kind": _by_key(
            answered, test, protocol, majority, lambda q: (q.answer_type, q.kind)
        ),
        "question_lookup": _by_key(
            answered, test, protocol, majority, lambda q: " ".join(q.question.lower().split())
        ),
        QUESTION_ONLY: _question_only(answered, test, protocol, vocabulary),
    }


def _by_key(
    train: Sequence[Question],
    test: Sequence[Question],
    protocol: VQAProtocol,
    default: str,
    key_of: Callable[[Question], Hashable],
) -> dict[str, Prediction]:
    """Return the most frequent answer of the training questions with the same key; ties in
    alphabetical order.
    """
    counts: dict[Hashable, Counter[str]] = {}
    for question in train:
        counts.setdefault(key_of(question), Counter())[protocol.normalize(question.answer)] += 1
    best = {
        key: min(answers, key=lambda answer: (-answers[answer], answer))
        for key, answers in counts.items()
    }
    return {question.id: Prediction(best.get(key_of(question), default)) for question in test}


def _question_only(
    train: Sequence[Question],
    test: Sequence[Question],
    protocol: VQAProtocol,
    vocabulary: AnswerVocabulary,
) -> dict[str, Prediction]:
    index = vocabulary.index()
    classes = [index[protocol.normalize(question.answer)] for question in train]
    model = QuestionOnly([question.question for question in train], classes, len(vocabulary))
    scores_MV = model.scores([question.question for question in test])
    return predictions_from_scores([question.id for question in test], scores_MV, vocabulary)
