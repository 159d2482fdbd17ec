"""Words that a generated report has in common with its reference, from counts that are kept for each report.

Words are compared in lower case without punctuation and masks; a decimal point is a word of its own between two digits,
so that `3.2 cm` is never `32 cm`, however a tokenizer spaces it.

Corpus-level (one number of all reports, not a mean over them):

* corpus_bleu_1 .. corpus_bleu_4 (Papineni et al., ACL 2002): clipped n-gram matches and lengths are summed over all
  reports first; orders weigh the same; no smoothing.

Means over reports:

* mean_rouge_l (Lin, ACL 2004): F1 of the longest common subsequence. mean_rouge_l_beta_1.2 weighs recall 1.2 times, as
  the COCO caption code that most papers on reports used.
* mean_meteor_exact_stem (Banerjee and Lavie, ACL workshop 2005): nltk's, with matches of words and of Porter stems.
  WordNet's synonyms, which would be a download, are left out, so that it is lower than the METEOR of papers.

Shape letters: N reports, R resamples, K orders of n-grams.
"""

import functools
import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

from medvl.eval.core.metric_rows import MetricGroup, MetricRow, mean_metrics
from medvl.eval.core.metrics import Array

REPORT = "report"
"""Target of the rows."""
ORDERS = 4
_WORD = re.compile(r"[^\W_]+|(?<=\d)\s*\.\s*(?=\d)")


def words(text: str) -> list[str]:
    """The words that are compared."""
    return [word.strip() for word in _WORD.findall(text.lower())]


def overlap_blocks(generated: Sequence[str], references: Sequence[str], *, subgroup: str = "") -> list[MetricGroup]:
    """The rows of this module, of pairs of texts. An empty text has no word in common with anything: it scores zero."""
    pairs = [(words(said), words(meant)) for said, meant in zip(generated, references, strict=True)]
    means_NK = np.array([report_scores(*pair) for pair in pairs])
    columns = [
        mean_metrics(name, scores_N[:, None], [REPORT], subgroup=subgroup)
        for name, scores_N in zip(MEANS, means_NK.T, strict=True)
    ]
    return [_bleu_block(pairs, subgroup), *columns]


MEANS = ("mean_rouge_l", "mean_rouge_l_beta_1.2", "mean_meteor_exact_stem")


def report_scores(said: Sequence[str], meant: Sequence[str]) -> tuple[float, ...]:
    """`MEANS` of one report."""
    common = common_subsequence(said, meant)
    return _f_measure(common, said, meant, 1.0), _f_measure(common, said, meant, 1.2), _meteor(said, meant)


def _bleu_block(pairs: Sequence[tuple[list[str], list[str]]], subgroup: str) -> MetricGroup:
    matches_NK = np.array([[ngram_matches(*pair, order) for order in range(1, ORDERS + 1)] for pair in pairs], float)
    said_N, meant_N = (np.array([len(pair[side]) for pair in pairs], float) for side in (0, 1))
    total_NK = np.maximum(said_N[:, None] - np.arange(ORDERS), 0)
    rows = [
        MetricRow(metric=f"corpus_bleu_{order}", target=REPORT, subgroup=subgroup, n=len(pairs))
        for order in range(1, ORDERS + 1)
    ]

    def statistic(counts_NR: Array) -> Array:
        matches_RK, total_RK = counts_NR.T @ matches_NK, counts_NR.T @ total_NK
        said_R1, meant_R1 = counts_NR.T @ said_N[:, None], counts_NR.T @ meant_N[:, None]
        with np.errstate(divide="ignore"):
            log_precision_RK = np.log(matches_RK / np.maximum(total_RK, 1))  # no match: minus infinity, so BLEU is 0
        brevity_R1 = np.minimum(1 - meant_R1 / np.maximum(said_R1, 1), 0)
        return np.exp(brevity_R1 + np.cumsum(log_precision_RK, axis=1) / np.arange(1, ORDERS + 1))

    return MetricGroup(rows, statistic)


def ngram_matches(said: Sequence[str], meant: Sequence[str], order: int) -> int:
    """N-grams of a text that are in its reference, each as often as it is there at most."""
    said_counts, meant_counts = (
        Counter(zip(*(side[start:] for start in range(order)), strict=False)) for side in (said, meant)
    )
    return (said_counts & meant_counts).total()


def common_subsequence(said: Sequence[str], meant: Sequence[str]) -> int:
    """Length of the longest common subsequence, one vectorised row of the table a word."""
    ids: dict[str, int] = {}
    meant_M = np.array([ids.setdefault(word, len(ids)) for word in meant], np.int64)
    longest_M = np.zeros(len(meant) + 1, np.int64)
    for word in said:
        with_word_M = longest_M[:-1] + (meant_M == ids.get(word, -1))
        longest_M[1:] = np.maximum.accumulate(np.maximum(longest_M[1:], with_word_M))
    return int(longest_M[-1])


def _f_measure(common: int, said: Sequence[str], meant: Sequence[str], beta: float) -> float:
    if not common:
        return 0.0
    precision, recall = common / len(said), common / len(meant)
    return (1 + beta**2) * precision * recall / (recall + beta**2 * precision)


class _NoSynonyms:
    """Stands where nltk takes WordNet."""

    def synsets(self, word: str) -> list[object]:
        return []


def _meteor(said: Sequence[str], meant: Sequence[str]) -> float:
    from nltk.translate.meteor_score import single_meteor_score

    if not said or not meant:
        return 0.0
    return float(single_meteor_score(meant, said, stemmer=_stemmer(), wordnet=_NoSynonyms()))


@functools.cache
def _stemmer() -> object:
    from nltk.stem.porter import PorterStemmer

    return PorterStemmer()
