"""A classifier that reads the question and never sees the image: what a dataset gives away by its wording.

Ridge regression onto one-hot answers from the counts of words and word pairs, solved exactly in its dual form. Equal
questions are one row with a weight, which gives the same solution and keeps the system as small as the wording is.

Shape letters: N training questions, U unique ones, F features, V answers of the vocabulary, M questions to answer.
"""

import itertools
import re
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from medvl.errors import EvaluationError

_WORD = re.compile(r"\w+")
_BLOCK = 512  # questions that are made dense at a time


def features_of(question: str) -> Counter[str]:
    """Counts of the words and of the pairs of neighbouring words."""
    words = _WORD.findall(question.lower())
    return Counter([*words, *(f"{first} {second}" for first, second in itertools.pairwise(words))])


class QuestionOnly:
    """Scores of all answers, linear in the words of the question.

    It minimises sum_n |W' x_n + b - y_n|^2 + penalty |W|^2 over W (F, V) and b (V), y_n being one-hot. With X centred,
    W = X' A and (X X' + penalty C^-1) A = mean of the y of each unique question, C being how often it stands there.

    Args:
        questions: N texts to learn from.
        answers: the index of each one's answer in a vocabulary.
        classes: size of that vocabulary, V.
        penalty: see above.

    Raises:
        EvaluationError: no questions, or an index outside the vocabulary.
    """

    def __init__(self, questions: Sequence[str], answers: Sequence[int], classes: int, *, penalty: float = 1.0) -> None:
        if not questions or len(questions) != len(answers) or not 0 <= min(answers) <= max(answers) < classes:
            raise EvaluationError("a question-only model needs questions, and for each an answer of the vocabulary")
        row_of: dict[str, int] = {}
        rows_N = torch.tensor([row_of.setdefault(question, len(row_of)) for question in questions])
        self._index = {name: i for i, name in enumerate(sorted({f for text in row_of for f in features_of(text)}))}
        self._unique_UF = self._matrix(list(row_of))
        count_U = torch.bincount(rows_N).double()
        target_UV = torch.zeros(len(row_of), classes, dtype=torch.float64)
        target_UV.index_put_((rows_N, torch.tensor(answers)), torch.ones(1, dtype=torch.float64), accumulate=True)
        self._bias_V = target_UV.sum(dim=0) / len(questions)
        target_UV = target_UV / count_U[:, None] - self._bias_V
        self._mean_F = torch.mv(self._unique_UF.t(), count_U) / len(questions)
        gram_UU = self._centred_products(self._unique_UF)
        gram_UU.diagonal().add_(penalty / count_U)
        self._dual_UV = torch.cholesky_solve(target_UV, torch.linalg.cholesky(gram_UU))

    def scores(self, questions: Sequence[str]) -> NDArray[np.float64]:
        """scores_MV; words that were never seen do not count."""
        row_of: dict[str, int] = {}
        rows_M = [row_of.setdefault(question, len(row_of)) for question in questions]
        products_QU = self._centred_products(self._matrix(list(row_of)))
        return (products_QU @ self._dual_UV + self._bias_V).numpy()[rows_M]

    def _centred_products(self, other_QF: Tensor) -> Tensor:
        """(x - mean) . (u - mean) for the rows x of a matrix and every unique training question u: (Q, U)."""
        blocks = []
        for start in range(0, max(1, other_QF.shape[0]), _BLOCK):
            rows = torch.arange(start, min(start + _BLOCK, other_QF.shape[0]))
            dense_FQ = (other_QF.index_select(0, rows).to_dense() - self._mean_F).T
            products_UQ = torch.sparse.mm(self._unique_UF, dense_FQ) - self._mean_F @ dense_FQ
            blocks.append(products_UQ.T)
        return torch.cat(blocks)

    def _matrix(self, questions: Sequence[str]) -> Tensor:
        """Counts, sparse (Q, F)."""
        entries = [
            (row, self._index[name], count)
            for row, question in enumerate(questions)
            for name, count in features_of(question).items()
            if name in self._index
        ]
        places_2E = torch.tensor([entry[:2] for entry in entries], dtype=torch.int64).reshape(-1, 2).T
        values_E = torch.tensor([entry[2] for entry in entries], dtype=torch.float64)
        size = (len(questions), len(self._index))
        return torch.sparse_coo_tensor(places_2E, values_E, size, check_invariants=True).coalesce()
