"""Metrics of text tasks, as sums over examples, so that resamples are products of matrices; and
TF-IDF vectors, a baseline without an encoder.

Every metric is a function of sums over examples: true and false positives and negatives, right
answers, or moments. Letters: N examples, K sums, R resamples.

* "entity_f1": exact spans of one type, pooled over the corpus. An I after O opens a span, as in
  seqeval's default mode.
* "macro_word_f1": F1 over words of each element, pooled over the corpus, then the mean over
  elements, as EBM-NLP's scorer; the text of the PubMedBERT paper could be read as F1 within each
  abstract.
* "micro_f1" of relations: from the summed counts of all classes but "no relation".
* "micro_f1" of documents: over all decisions of all labels.
* "pearson": correlation of scores; NaN where one side is constant up to the rounding of float32.
* "accuracy": share of right answers.

The TF-IDF vectors equal those of scikit-learn's `TfidfVectorizer` with its default settings: words
of two or more letters or digits in lower case, counts times log((1 + N) / (1 + n)) + 1 for a word
that n of N texts have, and vectors of length 1. Letters: N texts, V words of the vocabulary.
"""

import collections
import dataclasses
import re
import statistics
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from scipy import sparse

from medvl.data.text_tasks.tasks import BLURB, TextExample, TextTask
from medvl.errors import EvaluationError
from medvl.eval.core.metric_rows import MetricGroup, MetricRow
from medvl.eval.core.metrics import Array, percentile_interval, resample_counts
from medvl.eval.probing.features import comparable_probabilities, fit_logistic

Predicted = Sequence[str | float | tuple[str, ...]]
"""Label or prediction of each example, in the form of `TextExample.label`."""
# scores whose variance is a smaller share of their mean square are equal but for rounding
_CONSTANT = 1e-12


@dataclasses.dataclass(frozen=True, slots=True)
class Summed:
    """Sums of each example, and the metric of their totals."""

    sums_NK: Array
    value: Callable[[Array], Array]
    """totals_RK -> value_R"""

    def __call__(self) -> float:
        """Return the metric over all examples."""
        return float(self.value(self.sums_NK.sum(axis=0, keepdims=True))[0])

    def group(self, row: MetricRow) -> MetricGroup:
        """Return the metric as a row with a statistic for the bootstrap."""
        return MetricGroup([row], lambda counts_NR: self.value(counts_NR.T @ self.sums_NK)[:, None])


def summed_metric(task: TextTask, truth: Predicted, predicted: Predicted) -> Summed:
    """Return the metric of a task for predictions of its examples, in the order of their labels."""
    pairs = list(zip(truth, predicted, strict=True))
    match task.kind:
        case "entities":
            return Summed(
                np.array([_entity_counts(*pair) for pair in pairs], float).reshape(-1, 3), _f1
            )
        case "words":
            return Summed(_class_counts(task.labels[1:], pairs), _macro_f1)
        case "relations":
            return Summed(
                _class_counts(task.labels[1:], pairs).reshape(len(pairs), -1, 3).sum(axis=1), _f1
            )
        case "documents":
            return Summed(
                np.array([_set_counts(*pair) for pair in pairs], float).reshape(-1, 3), _f1
            )
        case "similarity":
            return Summed(_moments(np.array(pairs, float).reshape(-1, 2)), _pearson)
        case "answers":
            return Summed(
                np.array([(truth == guess, 1) for truth, guess in pairs], float).reshape(-1, 2),
                _share,
            )


def entity_spans(tags: Sequence[str]) -> set[tuple[int, int]]:
    """Return [start, end) of the entities of one type in tags B, I, O; an I after O opens one."""
    spans: set[tuple[int, int]] = set()
    start: int | None = None
    for place, tag in enumerate([*tags, "O"]):
        if start is not None and tag != "I":
            spans.add((start, place))
            start = None
        if tag == "B" or (tag == "I" and start is None):
            start = place
    return spans


def mean_over_seeds(metrics: Sequence[Summed], row: MetricRow) -> MetricGroup:
    """Return the mean metric of several runs on the same examples, taken within each resample."""
    return MetricGroup([row], lambda counts_NR: _mean(metrics, counts_NR)[:, None])


def difference(metrics: Sequence[Summed], others: Sequence[Summed], row: MetricRow) -> MetricGroup:
    """Return the difference of two means over runs on the same examples, taken within each
    resample.
    """
    return MetricGroup(
        [row], lambda counts_NR: (_mean(metrics, counts_NR) - _mean(others, counts_NR))[:, None]
    )


def _mean(metrics: Sequence[Summed], counts_NR: Array) -> Array:
    values: Array = np.mean(
        [metric.value(counts_NR.T @ metric.sums_NK) for metric in metrics], axis=0
    )
    return values


def _entity_counts(truth: object, guess: object) -> tuple[int, int, int]:
    true = entity_spans(_tags(truth))
    guesses = entity_spans(_tags(guess))
    return len(true & guesses), len(guesses - true), len(true - guesses)


def _tags(value: object) -> tuple[str, ...]:
    return value if isinstance(value, tuple) else ()


def _set_counts(truth: object, guess: object) -> tuple[int, int, int]:
    true = set(_tags(truth))
    guesses = set(_tags(guess))
    return len(true & guesses), len(guesses - true), len(true - guesses)


def _class_counts(classes: Sequence[str], pairs: Sequence[tuple[object, object]]) -> Array:
    """Return (N, 3 x classes): true positives, false positives and false negatives of each
    class.
    """
    rows = []
    for truth, guess in pairs:
        true_W = np.array(truth if isinstance(truth, tuple) else [truth], dtype=object)
        found_W = np.array(guess if isinstance(guess, tuple) else [guess], dtype=object)
        row: list[int] = []
        for name in classes:
            is_true_W = true_W == name
            is_found_W = found_W == name
            row += [
                int((is_true_W & is_found_W).sum()),
                int((~is_true_W & is_found_W).sum()),
                int((is_true_W & ~is_found_W).sum()),
            ]
        rows.append(row)
    return np.array(rows, float).reshape(len(rows), 3 * len(classes))


def _moments(values_N2: Array) -> Array:
    # the correlation does not depend on it; the sums stay small
    centred_N2 = values_N2 - values_N2.mean(axis=0)
    varies_2 = (centred_N2**2).sum(axis=0) > _CONSTANT * (values_N2**2).sum(axis=0)
    centred_N2 = np.where(varies_2, centred_N2, 0.0)
    x_N, y_N = centred_N2.T
    return np.stack([np.ones_like(x_N), x_N, y_N, x_N * x_N, y_N * y_N, x_N * y_N], axis=1)


def _pearson(totals_RK: Array) -> Array:
    n_R, x_R, y_R, xx_R, yy_R, xy_R = totals_RK.T
    x_spread_R = n_R * xx_R - x_R**2
    y_spread_R = n_R * yy_R - y_R**2
    # relative limits: scores may be of any scale
    varies_R = (x_spread_R > _CONSTANT * n_R * xx_R) & (y_spread_R > _CONSTANT * n_R * yy_R)
    roots_R = np.sqrt(np.where(varies_R, x_spread_R, 1)) * np.sqrt(
        np.where(varies_R, y_spread_R, 1)
    )
    return np.where(varies_R, (n_R * xy_R - x_R * y_R) / roots_R, np.nan)


def _f1(totals_R3: Array) -> Array:
    right_R, extra_R, missed_R = totals_R3.T
    total_R = 2 * right_R + extra_R + missed_R
    return np.where(total_R > 0, 2 * right_R / np.maximum(total_R, 1), np.nan)


def _macro_f1(totals_RK: Array) -> Array:
    by_class_RC3 = totals_RK.reshape(len(totals_RK), -1, 3)
    f1_CR = [_f1(by_class_RC3[:, index]) for index in range(by_class_RC3.shape[1])]
    return np.nan_to_num(np.array(f1_CR)).mean(axis=0)


def _share(totals_R2: Array) -> Array:
    return totals_R2[:, 0] / np.maximum(totals_R2[:, 1], 1)


# BLURB's score: the mean of six means (Gu et al. 2021, Section 4.1).


@dataclasses.dataclass(frozen=True, slots=True)
class BlurbScore:
    """A mean over the groups of BLURB, and the sets that it leaves out."""

    value: float
    groups: tuple[float, ...]
    """Mean of each group that has a score."""
    tasks: int
    """Number of sets with a score."""
    missing: tuple[str, ...]
    """Sets without a score, in BLURB's order."""

    @property
    def name(self) -> str:
        """Return "BLURB", or a name that lists the missing sets."""
        return "BLURB" if not self.missing else f"mean without {', '.join(self.missing)}"


def blurb_score(scores: Mapping[str, float]) -> BlurbScore | None:
    """Return the score of the sets of BLURB in `scores`; None if there are none.

    Args:
        scores: task -> score; tasks that are not of BLURB are ignored. The result has their scale.
    """
    present = [[scores[name] for name in group if name in scores] for group in BLURB]
    groups = tuple(statistics.fmean(group) for group in present if group)
    if not groups:
        return None
    missing = tuple(name for group in BLURB for name in group if name not in scores)
    return BlurbScore(statistics.fmean(groups), groups, sum(map(len, present)), missing)


# Rows of BLURB's score: of an encoder, of the one that it is compared with, and of their
# difference, with intervals.
#
# The test sets are resampled independently, each by its documents, and the score is taken within
# each resample.
#
# Letters: N examples, R resamples.


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScoredTask:
    """Metrics of a task's test examples, one of each seed."""

    metrics: Sequence[Summed]
    other: Sequence[Summed] | None
    """Metrics of the encoder that is compared with."""
    documents: Sequence[Hashable]
    """Document of each example."""


def score_rows(tasks: Mapping[str, ScoredTask], *, resamples: int, seed: int) -> list[MetricRow]:
    """Return the rows "blurb", none for fewer than two tasks of BLURB; the target names the sets
    that are left out.
    """
    score = blurb_score(dict.fromkeys(tasks, 0.0))
    if score is None or score.tasks < 2:
        return []
    counted = sum(len(task.documents) for task in tasks.values())
    own_R = _scores({name: task.metrics for name, task in tasks.items()}, tasks, resamples, seed)
    columns = {score.name: own_R}
    others = {name: task.other for name, task in tasks.items() if task.other is not None}
    if len(others) == len(tasks):
        other_R = _scores(others, tasks, resamples, seed)
        columns |= {
            f"{score.name}: other encoder": other_R,
            f"{score.name} - other encoder": own_R - other_R,
        }
    rows = []
    for target, values_R in columns.items():
        row = MetricRow(metric="blurb", target=target, n=counted, value=float(values_R[0]))
        if resamples:
            (low,), (high,) = percentile_interval(values_R[1:, None])
            row = dataclasses.replace(row, low=float(low), high=float(high))
        rows.append(row)
    return rows


def _scores(
    metrics: Mapping[str, Sequence[Summed]],
    tasks: Mapping[str, ScoredTask],
    resamples: int,
    seed: int,
) -> Array:
    """Return (1 + resamples,): the score of the test sets, and of each resample of them."""
    values_TR = []
    for number, (name, seeds) in enumerate(metrics.items()):
        documents = tasks[name].documents
        draws = resample_counts(len(documents), resamples, seed + number, documents)
        chunks = [np.ones((len(documents), 1)), *draws]
        by_seed = [
            [metric.value(counts_NR.T @ metric.sums_NK) for metric in seeds] for counts_NR in chunks
        ]
        values_TR.append(np.concatenate([np.mean(values, axis=0) for values in by_seed]))
    scores = [
        blurb_score(dict(zip(metrics, values, strict=True)))
        for values in np.array(values_TR).T.tolist()
    ]
    return np.array([score.value for score in scores if score is not None])


# Baselines of text tasks that need no encoder.
#
# * "dictionary": the longest match of mentions in the training data (entities), or the most
#   frequent tag of each word.
# * "constant": the most frequent class of the training data (the yes of PubMedQA).
# * "bag of words": logistic regression on the presence of the 2,000 most frequent words, one for
#   each class.
# * "word overlap": the words that two sentences share, as a part of all of theirs.
# * "TF-IDF": the cosine of two sentences, with weights of words from the training data.

_WORD = re.compile(r"\w+|[@$]\w+[$]?")
_VOCABULARY = 2000
_PENALTY = 1e-3


def baselines(
    task: TextTask, train: Sequence[TextExample], test: Sequence[TextExample]
) -> Mapping[str, Predicted]:
    """Return the predictions of each baseline that fits the task, by name."""
    match task.kind:
        case "entities":
            return {"dictionary": _dictionary(train, test)}
        case "words":
            return {"dictionary": _frequent_tags(train, test)}
        case "similarity":
            return {
                "word overlap": [_overlap(*example.texts) for example in test],
                "TF-IDF": _tfidf_cosines(train, test),
            }
        case "documents":
            return {"bag of words": _bag_of_words(task, train, test)}
        case "relations" | "answers":
            constant, _ = collections.Counter(str(example.label) for example in train).most_common(
                1
            )[0]
            if task.kind == "relations":  # the most frequent relation: "no relation" scores 0
                names = collections.Counter(str(e.label) for e in train if e.label != task.negative)
                constant = names.most_common(1)[0][0] if names else constant
            return {
                "constant": [constant] * len(test),
                "bag of words": _bag_of_words(task, train, test),
            }


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case."""
    return _WORD.findall(text.lower())


def _dictionary(train: Sequence[TextExample], test: Sequence[TextExample]) -> Predicted:
    mentions = {
        tuple(word.lower() for word in example.texts[start:end])
        for example in train
        for start, end in entity_spans(example.label if isinstance(example.label, tuple) else ())
    }
    longest = max(map(len, mentions), default=0)
    return [
        _matched(tuple(word.lower() for word in example.texts), mentions, longest)
        for example in test
    ]


def _matched(
    words: tuple[str, ...], mentions: set[tuple[str, ...]], longest: int
) -> tuple[str, ...]:
    tags = ["O"] * len(words)
    place = 0
    while place < len(words):
        lengths = range(min(longest, len(words) - place), 0, -1)
        length = next((n for n in lengths if words[place : place + n] in mentions), 0)
        if length:
            tags[place : place + length] = ["B", *["I"] * (length - 1)]
        place += max(length, 1)
    return tuple(tags)


def _frequent_tags(train: Sequence[TextExample], test: Sequence[TextExample]) -> Predicted:
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for example in train:
        for word, tag in zip(
            example.texts, example.label if isinstance(example.label, tuple) else (), strict=True
        ):
            counts[word.lower()][tag] += 1
    tag_of = {word: of_word.most_common(1)[0][0] for word, of_word in counts.items()}
    return [tuple(tag_of.get(word.lower(), "O") for word in example.texts) for example in test]


def _overlap(first: str, second: str) -> float:
    a = set(words_of(first))
    b = set(words_of(second))
    return len(a & b) / max(len(a | b), 1)


def _tfidf_cosines(train: Sequence[TextExample], test: Sequence[TextExample]) -> Predicted:
    """Return the cosine of the two texts of each test example; the weights of the words are those
    of the training texts.
    """
    tfidf = TfIdf([text for example in train for text in example.texts])
    first_NV, second_NV = (tfidf.vectors([one.texts[side] for one in test]) for side in (0, 1))
    cosines: list[float] = first_NV.multiply(second_NV).sum(axis=1).tolist()
    return cosines


def _bag_of_words(
    task: TextTask, train: Sequence[TextExample], test: Sequence[TextExample]
) -> Predicted:
    counts = collections.Counter(
        word for example in train for word in set(words_of(" ".join(example.texts)))
    )
    index = {word: number for number, (word, _) in enumerate(counts.most_common(_VOCABULARY))}
    labels = [
        example.label if isinstance(example.label, tuple) else (example.label,) for example in train
    ]
    y_NL = np.array([[float(name in of_example) for name in task.labels] for of_example in labels])
    probe = fit_logistic(_presence(train, index), y_NL, _PENALTY)
    scores_NL = comparable_probabilities(probe, _presence(test, index), y_NL)
    if task.kind == "documents":
        return [
            tuple(name for name, p in zip(task.labels, row, strict=True) if p > 0.5)
            for row in scores_NL
        ]
    return [task.labels[int(row.argmax())] for row in scores_NL]


def _presence(examples: Sequence[TextExample], index: Mapping[str, int]) -> torch.Tensor:
    x_ND = torch.zeros(len(examples), len(index), dtype=torch.float64)
    for row, example in enumerate(examples):
        columns = {index[word] for word in words_of(" ".join(example.texts)) if word in index}
        x_ND[row, list(columns)] = 1
    return x_ND


_TFIDF_WORD = re.compile(r"\b\w\w+\b")


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
    return _TFIDF_WORD.findall(text.lower())
