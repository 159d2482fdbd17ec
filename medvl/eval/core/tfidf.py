"""TF-IDF vectors of texts, a baseline without an encoder.

They equal those of scikit-learn's `TfidfVectorizer` with its default settings: words of two or more
letters or digits in lower case, counts times log((1 + N) / (1 + n)) + 1 for a word that n of N
texts have, and vectors of length 1.

Shape letters: N texts, V words of the vocabulary.
"""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import sparse

from medvl.errors import EvaluationError

_WORD = re.compile(r"\b\w\w+\b")


class TfIdf:
    """Weights of words, from a collection of texts.

    Args:
        texts: the collection. Words that it does not have are ignored.

    Raises EvaluationError where it has no word.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        frequency = Counter(word for text in texts for word in set(_words(text)))
        if not frequency:
            raise EvaluationError("expected texts with words, got none", "empty", field="texts")
        self._place = {word: place for place, word in enumerate(sorted(frequency))}
        count_V = np.array([frequency[word] for word in self._place])
        self._idf_V = np.log((1 + len(texts)) / (1 + count_V)) + 1

    def vectors(self, texts: Sequence[str]) -> Any:
        """Return the vectors (N, V) as a sparse array in rows; zeros for a text without a known
        word.
        """
        counts = [Counter(word for word in _words(text) if word in self._place) for text in texts]
        ends = np.cumsum([0, *map(len, counts)])
        places = np.array([self._place[word] for count in counts for word in count], np.int64)
        values = np.array([float(n) for count in counts for n in count.values()])
        values *= self._idf_V[places]
        rows_NV = sparse.csr_array((values, places, ends), shape=(len(texts), len(self._place)))
        length_N = np.sqrt(rows_NV.multiply(rows_NV).sum(axis=1))
        return sparse.csr_array(rows_NV.multiply(1 / np.where(length_N > 0, length_N, 1)[:, None]))


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())
