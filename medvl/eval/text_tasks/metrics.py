"""Metrics of text tasks, as sums over examples, so that resamples are products of matrices.

Every metric is a function of sums over examples: true and false positives and negatives, right answers, or moments.
Letters: N examples, K sums, R resamples.

* "entity_f1": exact spans of one type, pooled over the corpus. An I after O opens a span, as in seqeval's default mode.
* "macro_word_f1": F1 over words of each element, pooled over the corpus, then the mean over elements, as EBM-NLP's
  scorer; the text of the PubMedBERT paper could be read as F1 within each abstract.
* "micro_f1" of relations: from the summed counts of all classes but "no relation".
* "micro_f1" of documents: over all decisions of all labels.
* "pearson": correlation of scores; NaN where one side is constant up to the rounding of float32.
* "accuracy": share of right answers.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from medvl.data.text_tasks.tasks import TextTask
from medvl.eval.core.metric_rows import MetricGroup, MetricRow
from medvl.eval.core.metrics import Array

Predicted = Sequence[str | float | tuple[str, ...]]
"""Label or prediction of each example, in the form of `TextExample.label`."""
_CONSTANT = 1e-12  # scores whose variance is a smaller share of their mean square are equal but for rounding


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
            return Summed(np.array([_entity_counts(*pair) for pair in pairs], float).reshape(-1, 3), _f1)
        case "words":
            return Summed(_class_counts(task.labels[1:], pairs), _macro_f1)
        case "relations":
            return Summed(_class_counts(task.labels[1:], pairs).reshape(len(pairs), -1, 3).sum(axis=1), _f1)
        case "documents":
            return Summed(np.array([_set_counts(*pair) for pair in pairs], float).reshape(-1, 3), _f1)
        case "similarity":
            return Summed(_moments(np.array(pairs, float).reshape(-1, 2)), _pearson)
        case "answers":
            return Summed(np.array([(truth == guess, 1) for truth, guess in pairs], float).reshape(-1, 2), _share)


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
    """Return the difference of two means over runs on the same examples, taken within each resample."""
    return MetricGroup([row], lambda counts_NR: (_mean(metrics, counts_NR) - _mean(others, counts_NR))[:, None])


def _mean(metrics: Sequence[Summed], counts_NR: Array) -> Array:
    values: Array = np.mean([metric.value(counts_NR.T @ metric.sums_NK) for metric in metrics], axis=0)
    return values


def _entity_counts(truth: object, guess: object) -> tuple[int, int, int]:
    true, found = entity_spans(_tags(truth)), entity_spans(_tags(guess))
    return len(true & found), len(found - true), len(true - found)


def _tags(value: object) -> tuple[str, ...]:
    return value if isinstance(value, tuple) else ()


def _set_counts(truth: object, guess: object) -> tuple[int, int, int]:
    true, found = set(_tags(truth)), set(_tags(guess))
    return len(true & found), len(found - true), len(true - found)


def _class_counts(classes: Sequence[str], pairs: Sequence[tuple[object, object]]) -> Array:
    """Return (N, 3 x classes): true positives, false positives and false negatives of each class."""
    rows = []
    for truth, guess in pairs:
        true_W = np.array(truth if isinstance(truth, tuple) else [truth], dtype=object)
        found_W = np.array(guess if isinstance(guess, tuple) else [guess], dtype=object)
        row: list[int] = []
        for name in classes:
            is_true_W, is_found_W = true_W == name, found_W == name
            row += [
                int((is_true_W & is_found_W).sum()),
                int((~is_true_W & is_found_W).sum()),
                int((is_true_W & ~is_found_W).sum()),
            ]
        rows.append(row)
    return np.array(rows, float).reshape(len(rows), 3 * len(classes))


def _moments(values_N2: Array) -> Array:
    centred_N2 = values_N2 - values_N2.mean(axis=0)  # the correlation does not depend on it; the sums stay small
    varies_2 = (centred_N2**2).sum(axis=0) > _CONSTANT * (values_N2**2).sum(axis=0)
    centred_N2 = np.where(varies_2, centred_N2, 0.0)
    x_N, y_N = centred_N2.T
    return np.stack([np.ones_like(x_N), x_N, y_N, x_N * x_N, y_N * y_N, x_N * y_N], axis=1)


def _pearson(totals_RK: Array) -> Array:
    n_R, x_R, y_R, xx_R, yy_R, xy_R = totals_RK.T
    x_spread_R, y_spread_R = n_R * xx_R - x_R**2, n_R * yy_R - y_R**2
    # relative limits: scores may be of any scale
    varies_R = (x_spread_R > _CONSTANT * n_R * xx_R) & (y_spread_R > _CONSTANT * n_R * yy_R)
    roots_R = np.sqrt(np.where(varies_R, x_spread_R, 1)) * np.sqrt(np.where(varies_R, y_spread_R, 1))
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
