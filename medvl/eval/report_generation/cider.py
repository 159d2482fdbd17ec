"""CIDEr and CIDEr-D of reports (Vedantam et al., arXiv 1411.5726).

n-grams of 1 to 4 words are weighted by how rare they are among the references (tf-idf); a score is the mean cosine over
the four lengths, times ten.

* CIDEr: equation 3, the cosine of the weights, with words as they are where the paper stems them.
* CIDEr-D: section 8, and what pycocoevalcap calls CIDEr: weights are clipped to the reference's, and the cosine is
  multiplied by a Gaussian of the difference in length, of standard deviation 6. As there, a length is a number of
  bigrams.

An n-gram's rarity is the logarithm of the number of references over the number of references with it (at least 1), so a
score depends on the set of references: compare models on equal sets only.
"""

import math
from collections import Counter
from collections.abc import Sequence

ORDERS = 4
_SIGMA, _SCALE = 6.0, 10.0

Ngrams = Counter[tuple[str, ...]]


class Cider:
    """Scores against a set of references, given as words; each report has one reference."""

    def __init__(self, references: Sequence[Sequence[str]]) -> None:
        self._log_references = math.log(len(references))
        self._containing: Counter[tuple[str, ...]] = Counter()
        for reference in references:
            for counts in _ngrams(reference):
                self._containing.update(counts.keys())

    def scores(self, generated: Sequence[str], reference: Sequence[str]) -> tuple[float, float]:
        """Return (CIDEr, CIDEr-D) of one report."""
        plain, clipped = 0.0, 0.0
        for ours, theirs in zip(_ngrams(generated), _ngrams(reference), strict=True):
            weights, others = self._weights(ours), self._weights(theirs)
            norms = math.hypot(*weights.values()) * math.hypot(*others.values())
            if norms:
                shared = weights.keys() & others.keys()
                plain += sum(weights[ngram] * others[ngram] for ngram in shared) / norms
                clipped += sum(min(weights[ngram], others[ngram]) * others[ngram] for ngram in shared) / norms
        difference = max(len(generated) - 1, 0) - max(len(reference) - 1, 0)
        penalty = math.exp(-(difference**2) / (2 * _SIGMA**2))
        return _SCALE * plain / ORDERS, _SCALE * clipped * penalty / ORDERS

    def _weights(self, counts: Ngrams) -> dict[tuple[str, ...], float]:
        return {
            ngram: count * (self._log_references - math.log(max(1, self._containing[ngram])))
            for ngram, count in counts.items()
        }


def _ngrams(words: Sequence[str]) -> list[Ngrams]:
    return [Counter(zip(*(words[start:] for start in range(order)), strict=False)) for order in range(1, ORDERS + 1)]
