"""Findings that a generated report and its reference both assert, as the rule labeler reads them.

A finding of a report is positive or not. Precision, recall and F1 come from counts over reports: of each finding;
micro, of the counts of all findings together; macro, the mean over findings. A finding that neither side asserts
anywhere has no value and is left out of the mean; for one that a single side asserts, all three are 0.

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
Doubt = Literal["negative", "positive"]
"""What a finding that a report doubts counts as."""
_SETS: Mapping[str, Sequence[str]] = {"": FINDINGS, " of five": COMPETITION_FINDINGS}
"""Ending of micro and macro -> the findings that they are of."""


def asserted(labels: Sequence[Mapping[str, int]], doubt: Doubt) -> NDArray[np.bool_]:
    """positive_NL of what `medvl.data.reports.labeler.label_report` returned, columns as in `FINDINGS`."""
    positive = {POSITIVE, UNCERTAIN} if doubt == "positive" else {POSITIVE}
    return np.array([[row.get(name) in positive for name in FINDINGS] for row in labels], dtype=np.bool_)


def findings_block(said_NL: NDArray[np.bool_], meant_NL: NDArray[np.bool_], *, subgroup: str = "") -> MetricGroup:
    """`METRICS` of each finding, micro and macro; `n_positive` counts positives of the references."""
    both_NL, either_NL = (said_NL & meant_NL).astype(float), said_NL.astype(float) + meant_NL
    meant_L, members = meant_NL.sum(axis=0), [[FINDINGS.index(name) for name in names] for names in _SETS.values()]
    sizes = dict(zip(FINDINGS, meant_L.tolist(), strict=True))
    for ending, chosen in zip(_SETS, members, strict=True):
        sizes |= {f"{kind}{ending}": int(meant_L[chosen].sum()) for kind in ("micro", "macro")}
    rows = [
        MetricRow(metric=metric, target=target, subgroup=subgroup, n=len(said_NL), n_positive=positive)
        for target, positive in sizes.items()
        for metric in METRICS
    ]

    def statistic(counts_NR: Array) -> Array:
        both_RL, said_RL, meant_RL, either_RL = (counts_NR.T @ x for x in (both_NL, said_NL, meant_NL, either_NL))
        columns = [_metrics(both_RL, said_RL, meant_RL, either_RL)]
        for chosen in members:
            sums = (x[:, chosen].sum(axis=1, keepdims=True) for x in (both_RL, said_RL, meant_RL, either_RL))
            macro = (mean_over_labels(values_RL[:, chosen]) for values_RL in np.moveaxis(columns[0], 2, 0))
            columns += [_metrics(*sums), np.stack(list(macro), axis=1)[:, None]]
        return np.concatenate(columns, axis=1).reshape(counts_NR.shape[1], -1)

    return MetricGroup(rows, statistic)


def _metrics(both: Array, said: Array, meant: Array, either: Array) -> Array:
    """Precision, recall and F1 in a last axis; `either` is `said` and `meant` added."""
    values = np.stack([both / np.maximum(said, 1), both / np.maximum(meant, 1), 2 * both / np.maximum(either, 1)], -1)
    return np.where(either[..., None] > 0, values, np.nan)
