"""Clinical F1: findings asserted by a generated report and by its reference, according to the rule-based labeler.

A finding of a report is positive or not. Precision, recall and F1 are computed from counts over reports: for each
finding; micro, from the counts of all findings together; macro, as the mean over findings. A finding that is in no
report has no value and is left out of the mean; if only the references or only the generated reports assert it, all
three are 0.

Shape letters: N reports, R resamples, L findings.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from medvl.eval.core.bootstrap import mean_over_labels
from medvl.eval.core.metric_rows import MetricGroup, MetricRow
from medvl.eval.core.metrics import Array
from medvl.schema import COMPETITION_FINDINGS, FINDINGS, POSITIVE, UNCERTAIN

METRICS = ("precision", "recall", "f1")
Uncertain = Literal["negative", "positive"]
"""Label of findings that a report mentions as uncertain."""
_SETS: Mapping[str, Sequence[str]] = {"": FINDINGS, " of five": COMPETITION_FINDINGS}
"""Suffix of micro and macro -> their findings."""


def positive_findings(labels: Sequence[Mapping[str, int]], uncertain: Uncertain) -> NDArray[np.bool_]:
    """Return positive_NL from outputs of `medvl.data.reports.labeler.label_report`, columns as in `FINDINGS`."""
    positive = {POSITIVE, UNCERTAIN} if uncertain == "positive" else {POSITIVE}
    return np.array([[row.get(name) in positive for name in FINDINGS] for row in labels], dtype=np.bool_)


def clinical_metrics(
    generated_NL: NDArray[np.bool_], reference_NL: NDArray[np.bool_], *, subgroup: str = ""
) -> MetricGroup:
    """Return `METRICS` of each finding, micro and macro; `n_positive` counts positives of the references."""
    both_NL, sum_NL = (generated_NL & reference_NL).astype(float), generated_NL.astype(float) + reference_NL
    positives_L = reference_NL.sum(axis=0)
    members = [[FINDINGS.index(name) for name in names] for names in _SETS.values()]
    sizes = dict(zip(FINDINGS, positives_L.tolist(), strict=True))
    for suffix, columns in zip(_SETS, members, strict=True):
        sizes |= {f"{kind}{suffix}": int(positives_L[columns].sum()) for kind in ("micro", "macro")}
    rows = [
        MetricRow(metric=metric, target=target, subgroup=subgroup, n=len(generated_NL), n_positive=positive)
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
    """Return precision, recall and F1 in a new last axis; `total` is the sum of `generated` and `reference`."""
    precision, recall = both / np.maximum(generated, 1), both / np.maximum(reference, 1)
    values = np.stack([precision, recall, 2 * both / np.maximum(total, 1)], -1)
    return np.where(total[..., None] > 0, values, np.nan)
