"""Benchmark of the evaluators against plain loops: bootstrap, retrieval, ROC bands.

    python scripts/benchmark_eval.py
    python scripts/benchmark_eval.py --images 5000 --loop-resamples 20

The loop calls scikit-learn's metric per label and resample, as published evaluators do. It is timed
on `--loop-resamples` and scaled to 1,000 resamples; all its values are compared with medvl's. One
core.
"""

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sklearn.metrics import average_precision_score, roc_auc_score

from medvl.eval import bootstrap_auroc, bootstrap_average_precision

# Internals on purpose: parts of the evaluators are timed alone.
from medvl.eval.core import bootstrap
from medvl.eval.core.bootstrap import roc_curve
from medvl.eval.retrieval.image_text import retrieval_ranks
from medvl.schema import Embeddings

RESAMPLES, LABELS = 1000, 14


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--loop-resamples", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    labels_NL = (rng.random((options.images, LABELS)) < 0.2).astype(float)
    scores_NL = rng.normal(size=labels_NL.shape) + labels_NL
    print(
        f"{options.images} images, {LABELS} labels, {RESAMPLES:,} resamples; best of "
        f"{options.repeats}, one core"
    )
    for name, ours, metric, reference in (
        ("AUROC", bootstrap_auroc, "auroc_R", roc_auc_score),
        (
            "average precision",
            bootstrap_average_precision,
            "average_precision_R",
            average_precision_score,
        ),
    ):
        vectorised = best(
            functools.partial(ours, scores_NL, labels_NL, resamples=RESAMPLES), options.repeats
        )
        looped, difference = plain_loop(
            metric, reference, scores_NL, labels_NL, options.loop_resamples
        )
        print(
            f"{name + ' with intervals':34}{vectorised:8.3f} s   scikit-learn loop "
            f"{looped:7.1f} s   "
            f"{looped / vectorised:6.0f} times   largest difference {difference:.1e}"
        )
    band = best(
        lambda: roc_curve(scores_NL[:, 0], labels_NL[:, 0], resamples=RESAMPLES), options.repeats
    )
    print(f"{'ROC band, one label':34}{band:8.3f} s")
    for pairs in (1000, 5000):
        vectors = torch.nn.functional.normalize(
            torch.from_numpy(rng.normal(size=(pairs, 512))).float(), dim=1
        )
        images = texts = Embeddings(vectors)
        ranks = best(
            functools.partial(retrieval_ranks, Cosine(), images, texts, torch.arange(pairs)), 2
        )
        print(f"{f'retrieval ranks, {pairs:,} pairs':34}{ranks:8.3f} s")


class Cosine:
    """Model that only computes cosine similarity."""

    def similarity(self, images: Embeddings, texts: Embeddings) -> torch.Tensor:
        """Return similarity_NM."""
        return images.global_NE @ texts.global_NE.T


def best(function: Callable[[], Any], repeats: int) -> float:
    """Return the seconds of the fastest call."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return min(times)


def plain_loop(
    metric: str,
    reference: Callable[..., float],
    scores_NL: np.ndarray,
    labels_NL: np.ndarray,
    resamples: int,
) -> tuple[float, float]:
    """Return the seconds of 1,000 resamples, and the largest difference from medvl's values."""
    indices_RN = bootstrap.bootstrap_indices(len(scores_NL), resamples)
    started = time.perf_counter()
    loop_RL = [
        [reference(labels_NL[index_N, label], scores_NL[index_N, label]) for label in range(LABELS)]
        for index_N in indices_RN
    ]
    seconds = (time.perf_counter() - started) * RESAMPLES / resamples
    (counts_NR,) = bootstrap.resample_counts(len(scores_NL), resamples, seed=0)
    columns = bootstrap.ranked_columns(scores_NL, labels_NL)
    ours_RL = np.stack([getattr(column, metric)(counts_NR) for column in columns], axis=1)
    return seconds, float(np.abs(ours_RL - np.array(loop_RL)).max())


if __name__ == "__main__":
    main()
