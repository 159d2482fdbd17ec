"""Rows of BLURB's score: of an encoder, of the one that it is compared with, and of their difference, with intervals.

The test sets are resampled independently, each by its documents, and the score is taken within each resample.

Letters: N examples, R resamples.
"""

import dataclasses
from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from medvl.eval.core.bootstrap import percentile_interval, resample_counts
from medvl.eval.core.metric_rows import MetricRow
from medvl.eval.core.metrics import Array
from medvl.eval.text_tasks.blurb_score import blurb_score
from medvl.eval.text_tasks.metrics import Summed


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScoredTask:
    """Metrics of a task's test examples, one of each seed."""

    metrics: Sequence[Summed]
    other: Sequence[Summed] | None
    """Metrics of the encoder that is compared with."""
    documents: Sequence[Hashable]
    """Document of each example."""


def score_rows(tasks: Mapping[str, ScoredTask], *, resamples: int, seed: int) -> list[MetricRow]:
    """Return the rows "blurb", none for fewer than two tasks of BLURB; the target names the sets that are left out."""
    score = blurb_score(dict.fromkeys(tasks, 0.0))
    if score is None or score.tasks < 2:
        return []
    counted = sum(len(task.documents) for task in tasks.values())
    own_R = _scores({name: task.metrics for name, task in tasks.items()}, tasks, resamples, seed)
    columns = {score.name: own_R}
    others = {name: task.other for name, task in tasks.items() if task.other is not None}
    if len(others) == len(tasks):
        other_R = _scores(others, tasks, resamples, seed)
        columns |= {f"{score.name}: other encoder": other_R, f"{score.name} - other encoder": own_R - other_R}
    rows = []
    for target, values_R in columns.items():
        row = MetricRow(metric="blurb", target=target, n=counted, value=float(values_R[0]))
        if resamples:
            (low,), (high,) = percentile_interval(values_R[1:, None])
            row = dataclasses.replace(row, low=float(low), high=float(high))
        rows.append(row)
    return rows


def _scores(
    metrics: Mapping[str, Sequence[Summed]], tasks: Mapping[str, ScoredTask], resamples: int, seed: int
) -> Array:
    """Return (1 + resamples,): the score of the test sets, and of each resample of them."""
    values_TR = []
    for number, (name, seeds) in enumerate(metrics.items()):
        documents = tasks[name].documents
        draws = resample_counts(len(documents), resamples, seed + number, documents)
        chunks = [np.ones((len(documents), 1)), *draws]
        by_seed = [[metric.value(counts_NR.T @ metric.sums_NK) for metric in seeds] for counts_NR in chunks]
        values_TR.append(np.concatenate([np.mean(values, axis=0) for values in by_seed]))
    found = [blurb_score(dict(zip(metrics, values, strict=True))) for values in np.array(values_TR).T.tolist()]
    return np.array([score.value for score in found if score is not None])
