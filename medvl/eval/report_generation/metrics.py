"""Metrics of generated reports: n-gram overlap with the references (BLEU, ROUGE-L, METEOR, CIDEr),
clinical F1, and the contents of a text alone (repeated sentences, contradictions, sides).

Words are compared in lower case without punctuation and masks, and with composed accents (NFC); a
decimal point between two digits is a word of its own, so that `3.2 cm` differs from `32 cm`
whatever the spacing.

Corpus level (one number over all reports, not a mean):

* corpus_bleu_1 .. corpus_bleu_4 (Papineni et al., ACL 2002): clipped n-gram matches and lengths are
  summed over all reports; uniform weights; no smoothing.

Means over reports:

* mean_rouge_l (Lin, ACL 2004): F1 of the longest common subsequence. mean_rouge_l_beta_1.2 weights
  recall by 1.2, as in the COCO caption code that most papers on reports use.
* mean_meteor_exact_stem (Banerjee and Lavie, ACL workshop 2005): nltk's METEOR with exact and
  Porter stem matches. It is lower than METEOR in papers, because it omits WordNet's synonyms, which
  would require a download.
* mean_cider_d, mean_cider: see `cider`; the rarity of n-grams is that among all references, also in
  resamples.

Papers on reports, after R2Gen, count the full stop of a sentence as a word, which is easy to write:
BLEU-1 of the same reports is 0.04 to 0.06 higher, ROUGE-L as much. corpus_bleu_1_with_stops ..
corpus_bleu_4_with_stops and mean_rouge_l_beta_1.2_with_stops count them too and are for comparison
with published numbers only.

Shape letters: N reports, R resamples, K n-gram orders.
"""

import dataclasses
import functools
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from medvl.data.reports.labeler import find_mentions
from medvl.data.reports.sentences import split_sentences
from medvl.data.reports.statements import places_of, severities_of
from medvl.eval.core.metric_rows import MetricGroup, MetricRow, mean_metrics
from medvl.eval.core.metrics import Array, mean_over_labels
from medvl.schema import COMPETITION_FINDINGS, FINDINGS, NEGATIVE, POSITIVE, UNCERTAIN

# CIDEr and CIDEr-D of reports (Vedantam et al., arXiv 1411.5726).
#
# n-grams of 1 to 4 words are weighted by how rare they are among the references (tf-idf); a score
# is the mean cosine over the four lengths, times ten.
#
# * CIDEr: equation 3, the cosine of the weights, with words as they are where the paper stems
#   them.
# * CIDEr-D: section 8, and what pycocoevalcap calls CIDEr: weights are clipped to the
#   reference's, and the cosine is multiplied by a Gaussian of the difference in length, of standard
#   deviation 6. As there, a length is a number of bigrams.
#
# An n-gram's rarity is the logarithm of the number of references over the number of references
# with it (at least 1), so a score depends on the set of references: compare models on equal sets
# only.

ORDERS = 4
_SIGMA = 6.0
_SCALE = 10.0

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
        plain = 0.0
        clipped = 0.0
        for ours, theirs in zip(_ngrams(generated), _ngrams(reference), strict=True):
            weights = self._weights(ours)
            others = self._weights(theirs)
            norms = math.hypot(*weights.values()) * math.hypot(*others.values())
            if norms:
                # in the order of the text: that of a set differs from one process to another
                shared = [ngram for ngram in weights if ngram in others]
                plain += sum(weights[ngram] * others[ngram] for ngram in shared) / norms
                clipped += (
                    sum(min(weights[ngram], others[ngram]) * others[ngram] for ngram in shared)
                    / norms
                )
        difference = max(len(generated) - 1, 0) - max(len(reference) - 1, 0)
        penalty = math.exp(-(difference**2) / (2 * _SIGMA**2))
        return _SCALE * plain / ORDERS, _SCALE * clipped * penalty / ORDERS

    def _weights(self, counts: Ngrams) -> dict[tuple[str, ...], float]:
        return {
            ngram: count * (self._log_references - math.log(max(1, self._containing[ngram])))
            for ngram, count in counts.items()
        }


def _ngrams(words: Sequence[str]) -> list[Ngrams]:
    return [
        Counter(zip(*(words[start:] for start in range(order)), strict=False))
        for order in range(1, ORDERS + 1)
    ]


REPORT = "report"
"""Target of the rows."""
WITH_STOPS = "_with_stops"
"""End of the names of metrics in which a full stop is a word."""
_WORD = re.compile(r"[^\W_]+|(?<=\d)\s*\.\s*(?=\d)")
_WORD_OR_STOP = re.compile(rf"{_WORD.pattern}|\.[\s.]*")


def words(text: str) -> list[str]:
    """Return the words of a text that are compared."""
    return [word.strip() for word in _WORD.findall(unicodedata.normalize("NFC", text.lower()))]


def words_and_stops(text: str) -> list[str]:
    """Return the words of a text, and a full stop as a word for each end of a sentence."""
    tokens = _WORD_OR_STOP.findall(unicodedata.normalize("NFC", text.lower()))
    return ["." if "." in word else word for word in tokens]


def overlap_metrics(
    generated: Sequence[str], references: Sequence[str], *, subgroup: str = ""
) -> list[MetricGroup]:
    """Return all metrics of this module for pairs of texts. An empty text scores zero."""
    pairs = [
        (words(text), words(reference))
        for text, reference in zip(generated, references, strict=True)
    ]
    cider = Cider([reference for _, reference in pairs])
    means_NK = np.array([report_scores(*pair, cider) for pair in pairs])
    means = [
        mean_metrics(name, scores_N[:, None], [REPORT], subgroup=subgroup)
        for name, scores_N in zip(MEANS, means_NK.T, strict=True)
    ]
    with_stops = [
        (words_and_stops(a), words_and_stops(b)) for a, b in zip(generated, references, strict=True)
    ]
    return [
        bleu_metrics(pairs, subgroup=subgroup),
        *means,
        *stop_metrics(with_stops, subgroup=subgroup),
    ]


def stop_metrics(
    pairs: Sequence[tuple[list[str], list[str]]], *, subgroup: str = ""
) -> list[MetricGroup]:
    """Return the metrics in which a full stop is a word, of pairs from `words_and_stops`."""
    rouge_N1 = np.array(
        [[_f_measure(common_subsequence(a, b), len(a), len(b), 1.2)] for a, b in pairs]
    )
    rouge = mean_metrics(
        f"mean_rouge_l_beta_1.2{WITH_STOPS}", rouge_N1, [REPORT], subgroup=subgroup
    )
    return [bleu_metrics(pairs, subgroup=subgroup, ending=WITH_STOPS), rouge]


MEANS = (
    "mean_rouge_l",
    "mean_rouge_l_beta_1.2",
    "mean_meteor_exact_stem",
    "mean_cider_d",
    "mean_cider",
)


def report_scores(
    generated: Sequence[str], reference: Sequence[str], cider: Cider
) -> tuple[float, ...]:
    """Return `MEANS` of one report, given as words; `cider` is of all references."""
    common = common_subsequence(generated, reference)
    lengths = (len(generated), len(reference))
    rouge = _f_measure(common, *lengths, 1.0), _f_measure(common, *lengths, 1.2)
    plain, clipped = cider.scores(generated, reference)
    return *rouge, _meteor(generated, reference), clipped, plain


def bleu_metrics(
    pairs: Sequence[tuple[list[str], list[str]]], *, subgroup: str = "", ending: str = ""
) -> MetricGroup:
    """Return corpus BLEU of pairs of generated and reference words; `ending` is appended to the
    names.
    """
    matches_NK = np.array(
        [[ngram_matches(*pair, order) for order in range(1, ORDERS + 1)] for pair in pairs], float
    )
    generated_N, reference_N = (
        np.array([len(pair[side]) for pair in pairs], float) for side in (0, 1)
    )
    total_NK = np.maximum(generated_N[:, None] - np.arange(ORDERS), 0)
    rows = [
        MetricRow(
            metric=f"corpus_bleu_{order}{ending}", target=REPORT, subgroup=subgroup, n=len(pairs)
        )
        for order in range(1, ORDERS + 1)
    ]

    def statistic(counts_NR: Array) -> Array:
        matches_RK = counts_NR.T @ matches_NK
        total_RK = counts_NR.T @ total_NK
        generated_R1 = counts_NR.T @ generated_N[:, None]
        reference_R1 = counts_NR.T @ reference_N[:, None]
        with np.errstate(divide="ignore"):
            # -inf without a match, so BLEU is 0
            log_precision_RK = np.log(matches_RK / np.maximum(total_RK, 1))
        brevity_R1 = np.minimum(1 - reference_R1 / np.maximum(generated_R1, 1), 0)
        return np.exp(brevity_R1 + np.cumsum(log_precision_RK, axis=1) / np.arange(1, ORDERS + 1))

    return MetricGroup(rows, statistic)


PERPLEXITY = {
    "tokens": "perplexity_by_token",
    "words": "perplexity_by_word",
    "bytes": "perplexity_by_byte",
}
"""Unit -> name of the perplexity whose exponent is a mean over it: exp(loss of all tokens / number
of units). Those of words and bytes do not depend on the tokenizer, but for unknown words.
"""


def perplexity_metrics(
    likelihoods: Sequence[Mapping[str, float] | None], other: str
) -> list[MetricGroup]:
    """Return the perplexities of references, and behind images and prompts of other patients, of
    which `other` is the subgroup; nothing without likelihoods.
    """
    groups = []
    for name, subgroup in (("loss", ""), ("loss_of_other_image", other)):
        known = [each if each is not None and name in each else None for each in likelihoods]
        count = sum(each is not None for each in known)
        if not count:
            continue
        loss_N, *units = (
            np.array([0.0 if each is None else each[key] for each in known])
            for key in (name, *PERPLEXITY)
        )
        rows = [
            MetricRow(metric=metric, target=REPORT, subgroup=subgroup, n=count)
            for metric in PERPLEXITY.values()
        ]
        groups.append(MetricGroup(rows, _perplexity(loss_N, np.stack(units, axis=1))))
    return groups


def _perplexity(loss_N: Array, units_NU: Array) -> Callable[[Array], Array]:
    def statistic(counts_NR: Array) -> Array:
        units_RU = counts_NR.T @ units_NU
        with np.errstate(over="ignore"):
            value_RU = np.exp((counts_NR.T @ loss_N)[:, None] / np.maximum(units_RU, 1))
        return np.where(units_RU > 0, value_RU, np.nan)

    return statistic


def ngram_matches(generated: Sequence[str], reference: Sequence[str], order: int) -> int:
    """Return the number of n-grams of a text that are in its reference, clipped to their count
    there.
    """
    generated_counts, reference_counts = (
        Counter(zip(*(text[start:] for start in range(order)), strict=False))
        for text in (generated, reference)
    )
    return (generated_counts & reference_counts).total()


def common_subsequence(generated: Sequence[str], reference: Sequence[str]) -> int:
    """Return the length of the longest common subsequence; the table is computed one row at a
    time.
    """
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
    precision = common / generated
    recall = common / reference
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
    return float(
        single_meteor_score(reference, generated, stemmer=_stemmer(), wordnet=_NoSynonyms())
    )


@functools.cache
def _stemmer() -> object:
    from nltk.stem.porter import PorterStemmer

    return PorterStemmer()


# Clinical F1: findings asserted by a generated report and by its reference, according to the
# rule-based labeler.
#
# A finding of a report is positive or not. Precision, recall and F1 are computed from counts over
# reports: for each finding; micro, from the counts of all findings together; macro, as the mean
# over findings. A finding that is in no report has no value and is left out of the mean; if only
# the references or only the generated reports assert it, all three are 0.
#
# Shape letters: N reports, R resamples, L findings.

METRICS = ("precision", "recall", "f1")
Uncertain = Literal["negative", "positive"]
"""Label of findings that a report mentions as uncertain."""
_SETS: Mapping[str, Sequence[str]] = {"": FINDINGS, " of five": COMPETITION_FINDINGS}
"""Suffix of micro and macro -> their findings."""


def positive_findings(
    labels: Sequence[Mapping[str, int]], uncertain: Uncertain
) -> NDArray[np.bool_]:
    """Return positive_NL from outputs of `medvl.data.reports.labeler.label_report`, columns as
    in `FINDINGS`.
    """
    positive = {POSITIVE, UNCERTAIN} if uncertain == "positive" else {POSITIVE}
    return np.array(
        [[row.get(name) in positive for name in FINDINGS] for row in labels], dtype=np.bool_
    )


def clinical_metrics(
    generated_NL: NDArray[np.bool_], reference_NL: NDArray[np.bool_], *, subgroup: str = ""
) -> MetricGroup:
    """Return `METRICS` of each finding, micro and macro; `n_positive` counts positives of the
    references.
    """
    both_NL = (generated_NL & reference_NL).astype(float)
    sum_NL = generated_NL.astype(float) + reference_NL
    positives_L = reference_NL.sum(axis=0)
    members = [[FINDINGS.index(name) for name in names] for names in _SETS.values()]
    sizes = dict(zip(FINDINGS, positives_L.tolist(), strict=True))
    for suffix, columns in zip(_SETS, members, strict=True):
        sizes |= {f"{kind}{suffix}": int(positives_L[columns].sum()) for kind in ("micro", "macro")}
    rows = [
        MetricRow(
            metric=metric,
            target=target,
            subgroup=subgroup,
            n=len(generated_NL),
            n_positive=positive,
        )
        for target, positive in sizes.items()
        for metric in METRICS
    ]

    fixed_L = np.asarray(sum_NL.sum(axis=0) > 0)

    def statistic(counts_NR: Array) -> Array:
        counts_RL = [counts_NR.T @ x_NL for x_NL in (both_NL, generated_NL, reference_NL, sum_NL)]
        parts = [_metrics(*counts_RL)]
        for columns in members:
            sums = (x_RL[:, columns].sum(axis=1, keepdims=True) for x_RL in counts_RL)
            values_KRL = np.moveaxis(parts[0][:, columns], 2, 0)
            macro = (mean_over_labels(values_RL, fixed_L[columns]) for values_RL in values_KRL)
            parts += [_metrics(*sums), np.stack(list(macro), axis=1)[:, None]]
        return np.concatenate(parts, axis=1).reshape(counts_NR.shape[1], -1)

    return MetricGroup(rows, statistic)


def _metrics(both: Array, generated: Array, reference: Array, total: Array) -> Array:
    """Return precision, recall and F1 in a new last axis; `total` is the sum of `generated` and
    `reference`.
    """
    precision = both / np.maximum(generated, 1)
    recall = both / np.maximum(reference, 1)
    values = np.stack([precision, recall, 2 * both / np.maximum(total, 1)], -1)
    return np.where(total[..., None] > 0, values, np.nan)


# Contents, which overlap and clinical F1 do not show.
#
#     repeated_sentences   sentences that an earlier one of the report equals, a report
#     contradictions       findings that a report both asserts and denies, a report
#     equal_sides          of the findings that a report and its reference both assert and place on
#                          a side, the share whose sides are equal
#     opposite_sides       of the same, the share that is left in one and right in the other
#     equal_severities     of the findings that both assert as mild, moderate or severe, the share
#                          whose severities are equal
#
# "Bilateral" is left and right. Findings, sides and severities are read by the labeler.

REPEATED = "repeated_sentences"
CONTRADICTIONS = "contradictions"
EQUAL_SIDES = "equal_sides"
OPPOSITE_SIDES = "opposite_sides"
EQUAL_SEVERITIES = "equal_severities"
CONTENTS = (REPEATED, CONTRADICTIONS, EQUAL_SIDES, OPPOSITE_SIDES, EQUAL_SEVERITIES)
"""Names of the metrics."""
_BOTH = frozenset(("left", "right"))


def _repeated_sentences(text: str) -> int:
    """Return how many sentences of a text equal an earlier one, in their words."""
    sentences = [tuple(words(sentence)) for sentence in split_sentences(text)]
    known = [sentence for sentence in sentences if sentence]
    return len(known) - len(set(known))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Contents:
    """What a text repeats, contradicts, and says of the findings that it asserts."""

    repeated: int
    """Sentences that equal an earlier one, in their words."""
    contradictions: int
    """Findings that are asserted and also denied, on no side or on the same one."""
    sides: Mapping[str, frozenset[str]]
    """Left and right of each asserted finding that is placed on a side."""
    grades: Mapping[str, frozenset[str]]
    """Severities (`medvl.data.reports.statements.SEVERITIES`) of each finding that has one."""


def read_contents(text: str) -> Contents:
    """Return the contents of a text."""
    mentions = list(find_mentions(text))
    contents: dict[int, set[tuple[str, str]]] = {POSITIVE: set(), NEGATIVE: set()}
    sides_of: dict[str, frozenset[str]] = {}
    grades: dict[str, frozenset[str]] = {}
    for mention, (sides, _), severity in zip(
        mentions, places_of(mentions), severities_of(mentions), strict=True
    ):
        finding = mention.finding
        if mention.value in contents:
            contents[mention.value].add((finding, " ".join(sides)))
        if mention.value != POSITIVE:
            continue
        if named := _BOTH if "bilateral" in sides else _BOTH & {*sides}:
            sides_of[finding] = sides_of.get(finding, frozenset()) | named
        if severity:
            grades[finding] = grades.get(finding, frozenset()) | {severity}
    denied = contents[NEGATIVE]
    both = {name for name, side in contents[POSITIVE] if {(name, side), (name, "")} & denied}
    return Contents(
        repeated=_repeated_sentences(text), contradictions=len(both), sides=sides_of, grades=grades
    )


def content_metrics(
    texts: Sequence[Contents], references: Sequence[Contents], *, subgroup: str = ""
) -> list[MetricGroup]:
    """Return the metrics of this module of pairs of texts."""
    counts_N2 = np.array([[float(text.repeated), float(text.contradictions)] for text in texts])
    sides_N3 = np.zeros((len(texts), 3))  # placed in both, equal, opposite
    grades_N2 = np.zeros((len(texts), 2))  # graded in both, equal
    for row, (text, reference) in enumerate(zip(texts, references, strict=True)):
        for finding in text.sides.keys() & reference.sides.keys():
            ours, theirs = text.sides[finding], reference.sides[finding]
            sides_N3[row] += (1, ours == theirs, not ours & theirs)
        for finding in text.grades.keys() & reference.grades.keys():
            grades_N2[row] += (1, text.grades[finding] == reference.grades[finding])
    return [
        mean_metrics(REPEATED, counts_N2[:, :1], [REPORT], subgroup=subgroup),
        mean_metrics(CONTRADICTIONS, counts_N2[:, 1:], [REPORT], subgroup=subgroup),
        _shares((EQUAL_SIDES, OPPOSITE_SIDES), sides_N3, subgroup),
        _shares((EQUAL_SEVERITIES,), grades_N2, subgroup),
    ]


def _shares(metrics: Sequence[str], counts_NC: Array, subgroup: str) -> MetricGroup:
    """Return the sums of the columns behind the first one over that of the first."""
    reports = int((counts_NC[:, 0] > 0).sum())
    rows = [
        MetricRow(metric=metric, target=REPORT, subgroup=subgroup, n=reports) for metric in metrics
    ]

    def statistic(counts_NR: Array) -> Array:
        total_RC = counts_NR.T @ counts_NC
        known_R1 = total_RC[:, :1]
        return np.where(known_R1 > 0, total_RC[:, 1:] / np.maximum(known_R1, 1), np.nan)

    return MetricGroup(rows, statistic)
