"""n-gram overlap of generated reports and references: BLEU, ROUGE-L, METEOR and CIDEr.

Words are compared in lower case without punctuation and masks, and with composed accents (NFC); a decimal point between
two digits is a word of its own, so that `3.2 cm` differs from `32 cm` whatever the spacing.

Corpus level (one number over all reports, not a mean):

* corpus_bleu_1 .. corpus_bleu_4 (Papineni et al., ACL 2002): clipped n-gram matches and lengths are summed over all
  reports; uniform weights; no smoothing.

Means over reports:

* mean_rouge_l (Lin, ACL 2004): F1 of the longest common subsequence. mean_rouge_l_beta_1.2 weights recall by 1.2, as
  in the COCO caption code that most papers on reports use.
* mean_meteor_exact_stem (Banerjee and Lavie, ACL workshop 2005): nltk's METEOR with exact and Porter stem matches.
  It is lower than METEOR in papers, because it omits WordNet's synonyms, which would require a download.
* mean_cider_d, mean_cider: see `cider`; the rarity of n-grams is that among all references, also in resamples.

Papers on reports, after R2Gen, count the full stop of a sentence as a word, which is easy to write: BLEU-1 of the same
reports is 0.04 to 0.06 higher, ROUGE-L as much. corpus_bleu_1_with_stops .. corpus_bleu_4_with_stops and
mean_rouge_l_beta_1.2_with_stops count them too and are for comparison with published numbers only.

Shape letters: N reports, R resamples, K n-gram orders.
"""

import functools
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence

import numpy as np

from medvl.eval.core.metric_rows import MetricGroup, MetricRow, mean_metrics
from medvl.eval.core.metrics import Array
from medvl.eval.report_generation.cider import Cider

REPORT = "report"
"""Target of the rows."""
ORDERS = 4
WITH_STOPS = "_with_stops"
"""End of the names of metrics in which a full stop is a word."""
_WORD = re.compile(r"[^\W_]+|(?<=\d)\s*\.\s*(?=\d)")
_WORD_OR_STOP = re.compile(rf"{_WORD.pattern}|\.[\s.]*")


def words(text: str) -> list[str]:
    """Return the words of a text that are compared."""
    return [word.strip() for word in _WORD.findall(unicodedata.normalize("NFC", text.lower()))]


def words_and_stops(text: str) -> list[str]:
    """Return the words of a text, and a full stop as a word for each end of a sentence."""
    found = _WORD_OR_STOP.findall(unicodedata.normalize("NFC", text.lower()))
    return ["." if "." in word else word for word in found]


def overlap_metrics(generated: Sequence[str], references: Sequence[str], *, subgroup: str = "") -> list[MetricGroup]:
    """Return all metrics of this module for pairs of texts. An empty text scores zero."""
    pairs = [(words(text), words(reference)) for text, reference in zip(generated, references, strict=True)]
    cider = Cider([reference for _, reference in pairs])
    means_NK = np.array([report_scores(*pair, cider) for pair in pairs])
    means = [
        mean_metrics(name, scores_N[:, None], [REPORT], subgroup=subgroup)
        for name, scores_N in zip(MEANS, means_NK.T, strict=True)
    ]
    with_stops = [(words_and_stops(a), words_and_stops(b)) for a, b in zip(generated, references, strict=True)]
    return [bleu_metrics(pairs, subgroup=subgroup), *means, *stop_metrics(with_stops, subgroup=subgroup)]


def stop_metrics(pairs: Sequence[tuple[list[str], list[str]]], *, subgroup: str = "") -> list[MetricGroup]:
    """Return the metrics in which a full stop is a word, of pairs from `words_and_stops`."""
    rouge_N1 = np.array([[_f_measure(common_subsequence(a, b), len(a), len(b), 1.2)] for a, b in pairs])
    rouge = mean_metrics(f"mean_rouge_l_beta_1.2{WITH_STOPS}", rouge_N1, [REPORT], subgroup=subgroup)
    return [bleu_metrics(pairs, subgroup=subgroup, ending=WITH_STOPS), rouge]


MEANS = ("mean_rouge_l", "mean_rouge_l_beta_1.2", "mean_meteor_exact_stem", "mean_cider_d", "mean_cider")


def report_scores(generated: Sequence[str], reference: Sequence[str], cider: Cider) -> tuple[float, ...]:
    """Return `MEANS` of one report, given as words; `cider` is of all references."""
    common, lengths = common_subsequence(generated, reference), (len(generated), len(reference))
    rouge = _f_measure(common, *lengths, 1.0), _f_measure(common, *lengths, 1.2)
    plain, clipped = cider.scores(generated, reference)
    return *rouge, _meteor(generated, reference), clipped, plain


def bleu_metrics(pairs: Sequence[tuple[list[str], list[str]]], *, subgroup: str = "", ending: str = "") -> MetricGroup:
    """Return corpus BLEU of pairs of generated and reference words; `ending` is appended to the names."""
    matches_NK = np.array([[ngram_matches(*pair, order) for order in range(1, ORDERS + 1)] for pair in pairs], float)
    generated_N, reference_N = (np.array([len(pair[side]) for pair in pairs], float) for side in (0, 1))
    total_NK = np.maximum(generated_N[:, None] - np.arange(ORDERS), 0)
    rows = [
        MetricRow(metric=f"corpus_bleu_{order}{ending}", target=REPORT, subgroup=subgroup, n=len(pairs))
        for order in range(1, ORDERS + 1)
    ]

    def statistic(counts_NR: Array) -> Array:
        matches_RK, total_RK = counts_NR.T @ matches_NK, counts_NR.T @ total_NK
        generated_R1, reference_R1 = counts_NR.T @ generated_N[:, None], counts_NR.T @ reference_N[:, None]
        with np.errstate(divide="ignore"):
            log_precision_RK = np.log(matches_RK / np.maximum(total_RK, 1))  # -inf without a match, so BLEU is 0
        brevity_R1 = np.minimum(1 - reference_R1 / np.maximum(generated_R1, 1), 0)
        return np.exp(brevity_R1 + np.cumsum(log_precision_RK, axis=1) / np.arange(1, ORDERS + 1))

    return MetricGroup(rows, statistic)


def ngram_matches(generated: Sequence[str], reference: Sequence[str], order: int) -> int:
    """Return the number of n-grams of a text that are in its reference, clipped to their count there."""
    generated_counts, reference_counts = (
        Counter(zip(*(text[start:] for start in range(order)), strict=False)) for text in (generated, reference)
    )
    return (generated_counts & reference_counts).total()


def common_subsequence(generated: Sequence[str], reference: Sequence[str]) -> int:
    """Return the length of the longest common subsequence; the table is computed one row at a time."""
    ids: dict[str, int] = {}
    reference_M = np.array([ids.setdefault(word, len(ids)) for word in reference], np.int64)
    longest_M = np.zeros(len(reference) + 1, np.int64)
    for word in generated:
        with_word_M = longest_M[:-1] + (reference_M == ids.get(word, -1))
        longest_M[1:] = np.maximum.accumulate(np.maximum(longest_M[1:], with_word_M))
    return int(longest_M[-1])


def _f_measure(common: int, generated: int, reference: int, beta: float) -> float:
    if not common:
        return 0.0
    precision, recall = common / generated, common / reference
    return (1 + beta**2) * precision * recall / (recall + beta**2 * precision)


class _NoSynonyms:
    """Replacement of WordNet for nltk: no word has synonyms."""

    def synsets(self, word: str) -> list[object]:
        """Return an empty list."""
        return []


def _meteor(generated: Sequence[str], reference: Sequence[str]) -> float:
    from nltk.translate.meteor_score import single_meteor_score

    if not generated or not reference:
        return 0.0
    return float(single_meteor_score(reference, generated, stemmer=_stemmer(), wordnet=_NoSynonyms()))


@functools.cache
def _stemmer() -> object:
    from nltk.stem.porter import PorterStemmer

    return PorterStemmer()
