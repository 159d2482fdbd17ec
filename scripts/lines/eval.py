"""The bootstrap of evaluations beside a loop over scikit-learn's metric.

The loop calls the metric per label and resample, as published evaluators do. It is timed on a few
resamples and scaled to 1,000; all its values are compared with medvl's. One core.
"""

import time

import numpy as np
from measure.bench import Bench
from measure.line import Line, Report, TableRow, report
from sklearn.metrics import roc_auc_score

from medvl.eval import bootstrap_auroc

# Internal on purpose: resamples are compared one by one.
from medvl.eval.core import metrics

RESAMPLES, LABELS = 1000, 14


def measure_bootstrap(bench: Bench) -> Report:
    """Measure 1,000 resamples of 14 AUROCs of 500 images: the best of several calls."""
    images, looped, repeats = bench.size((500, 50, 5), (40, 2, 1))
    rng = np.random.default_rng(0)
    labels_NL = (rng.random((images, LABELS)) < 0.2).astype(float)
    scores_NL = rng.normal(size=labels_NL.shape) + labels_NL
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        bootstrap_auroc(scores_NL, labels_NL, resamples=RESAMPLES)
        times.append(time.perf_counter() - started)
    seconds, difference = plain_loop(scores_NL, labels_NL, looped)
    figures = {"loop s": seconds, "ours s": min(times), "largest difference": difference}
    return report([], figures)


def plain_loop(scores_NL: np.ndarray, labels_NL: np.ndarray, resamples: int) -> tuple[float, float]:
    """Return the seconds of 1,000 resamples, and the largest difference from medvl's values."""
    indices_RN = metrics.bootstrap_indices(len(scores_NL), resamples)
    started = time.perf_counter()
    loop_RL = [
        [
            roc_auc_score(labels_NL[index_N, label], scores_NL[index_N, label])
            for label in range(LABELS)
        ]
        for index_N in indices_RN
    ]
    seconds = (time.perf_counter() - started) * RESAMPLES / resamples
    (counts_NR,) = metrics.resample_counts(len(scores_NL), resamples, seed=0)
    columns = metrics.ranked_columns(scores_NL, labels_NL)
    ours_RL = np.stack([column.auroc_R(counts_NR) for column in columns], axis=1)
    return seconds, float(np.abs(ours_RL - np.array(loop_RL)).max())


LINES = (
    Line(
        name="bootstrap",
        device="cpu",
        measures="1,000 resamples of 14 AUROCs of 500 images, beside a loop over scikit-learn",
        unit="s",
        rows=(
            TableRow(
                title="1,000 resamples of 14 AUROCs",
                peer="loop over scikit-learn: {loop s:.1f} s",
                ours="{ours s:.3f} s",
            ),
        ),
        seconds=10,
        function=measure_bootstrap,
    ),
)
