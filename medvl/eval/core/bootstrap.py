"""Bootstrap intervals, vectorised over resamples and exact.

A resample draws as many items as there are, with replacement. It is held as a count an item, never as a copy of the
data: a statistic takes `counts_NR` (how often resample r drew item n) and returns its value for every resample at once.
With a column of ones it returns the plain value. AUROC, for one, sorts its scores once and then only sums counts.

Rules, the same for every metric:

* Interval: percentiles of the resampled values with linear interpolation, so low <= high for any number of resamples.
* Groups: with `groups` (patients), whole groups are drawn and their items follow; otherwise items are drawn.
* A label with one class only has no value (NaN). A resample in which a class vanishes is left out of that label's
  interval; where fewer than half of the resamples remain the interval is NaN.
* A mean over labels is taken within each resample, over the labels that are defined in it: one draw of the images
  serves all labels, so their dependence is in the interval of the mean.

Shape letters: N items, R resamples, L labels, U groups (units), K values of a statistic.
"""

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from medvl.errors import EvaluationError
from medvl.eval.core.metrics import Array, RankedColumn, check_scores

Statistic = Callable[[Array], Array]
"""counts_NR -> values_RK."""

_BLOCK_ELEMENTS = 2_000_000  # of counts_NR: 16 MB, so that memory does not grow with the number of resamples


@dataclasses.dataclass(frozen=True, slots=True)
class Estimate:
    """Values with their intervals; each array has one entry a value of the statistic."""

    value_K: Array
    low_K: Array
    high_K: Array


def bootstrap(
    statistic: Statistic,
    n: int,
    *,
    resamples: int = 1000,
    seed: int = 0,
    groups: Sequence[Hashable] | None = None,
    level: float = 0.95,
) -> Estimate:
    """A statistic of `n` items with its percentile intervals.

    `statistic` maps counts_NR (float64) to values_RK; `groups` gives each item's group (patient) where groups are to be
    drawn. No resamples: the intervals are NaN. Raises `EvaluationError` on sizes that cannot be resampled.
    """
    if n < 1 or resamples < 0 or not 0 < level < 1:
        raise EvaluationError(
            f"cannot resample {n} items {resamples} times at level {level}: "
            "give at least one item, resamples >= 0 and a level between 0 and 1"
        )
    value_K = statistic(np.ones((n, 1)))[0]
    if resamples == 0:
        empty_K = np.full_like(value_K, np.nan)
        return Estimate(value_K, empty_K, empty_K.copy())
    values_RK = np.concatenate([statistic(counts_NR) for counts_NR in resample_counts(n, resamples, seed, groups)])
    low_K, high_K = percentile_interval(values_RK, level)
    return Estimate(value_K, low_K, high_K)


def bootstrap_indices(n: int, resamples: int = 1000, seed: int = 0) -> NDArray[np.int64]:
    """indices_RN: the items that each resample draws. `bootstrap` counts these very draws."""
    return np.concatenate(list(_index_blocks(n, resamples, seed)))


def resample_counts(n: int, resamples: int, seed: int, groups: Sequence[Hashable] | None = None) -> Iterator[Array]:
    """counts_NR in blocks of resamples: how often each item is drawn. The block size changes nothing in the draws."""
    group_of_N = None if groups is None else _group_numbers(groups, n)
    units = n if group_of_N is None else int(group_of_N.max()) + 1
    for indices_RU in _index_blocks(units, resamples, seed, widest=n):
        rows = len(indices_RU)
        flat = (indices_RU + np.arange(rows)[:, None] * units).ravel()
        counts_RU = np.bincount(flat, minlength=rows * units).reshape(rows, units)
        counts_UR = np.ascontiguousarray(counts_RU.T, dtype=np.float64)
        yield counts_UR if group_of_N is None else counts_UR[group_of_N]


def _index_blocks(n: int, resamples: int, seed: int, widest: int = 0) -> Iterator[NDArray[np.int64]]:
    rng = np.random.default_rng(seed)
    block = max(1, _BLOCK_ELEMENTS // max(n, widest))
    for start in range(0, resamples, block):
        yield rng.integers(0, n, size=(min(block, resamples - start), n))


def _group_numbers(groups: Sequence[Hashable], n: int) -> NDArray[np.int64]:
    if len(groups) != n:
        raise EvaluationError(f"{len(groups)} groups for {n} items: give one group an item")
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(group, len(numbers)) for group in groups])


def percentile_interval(values_RK: Array, level: float = 0.95) -> tuple[Array, Array]:
    """(low_K, high_K) with linear interpolation, NaN values left out; NaN where fewer than half remain."""
    tail = (1 - level) / 2
    low_K, high_K = np.full((2, values_RK.shape[1]), np.nan)
    for k, values_R in enumerate(values_RK.T):
        defined = values_R[~np.isnan(values_R)]
        if 2 * len(defined) >= len(values_R):
            low_K[k], high_K[k] = np.quantile(defined, (tail, 1 - tail))
    return low_K, high_K


def bootstrap_metric(
    function: Callable[..., ArrayLike],
    *arrays: ArrayLike,
    resamples: int = 1000,
    seed: int = 0,
    groups: Sequence[Hashable] | None = None,
) -> tuple[Array, Array, Array]:
    """Any function of arrays that share their first axis: (value_K, low_K, high_K), with K = 1 for a plain number.

    The function is called once a resample, on copies of the rows drawn (in their original order): for statistics that
    have no form in counts, such as a median. Raises `EvaluationError` when the arrays are of different lengths.
    """
    columns = [np.asarray(array) for array in arrays]
    lengths = {len(column) for column in columns}
    if len(lengths) != 1:
        raise EvaluationError(f"arrays of {sorted(lengths)} rows cannot be resampled together: give one length")
    n = lengths.pop()

    def statistic(counts_NR: Array) -> Array:
        draws = (np.repeat(np.arange(n), counts_N.astype(np.int64)) for counts_N in counts_NR.T)
        return np.array([np.atleast_1d(function(*(column[drawn] for column in columns))) for drawn in draws], float)

    estimate = bootstrap(statistic, n, resamples=resamples, seed=seed, groups=groups)
    return estimate.value_K, estimate.low_K, estimate.high_K


def bootstrap_auroc(
    scores_NL: ArrayLike,
    labels_NL: ArrayLike,
    resamples: int = 1000,
    seed: int = 0,
    groups: Sequence[Hashable] | None = None,
) -> tuple[Array, Array, Array]:
    """Area under the ROC curve a label with its 95 % interval: (auroc_L, low_L, high_L).

    Labels are 1, 0 or NaN (left out); equal scores count a half. All labels share the same resamples, drawn over all N
    rows. See the module's rules for one-class labels. Raises `EvaluationError` on other label values or NaN scores.
    """
    columns = ranked_columns(scores_NL, labels_NL)
    return _bootstrap_columns([column.auroc_R for column in columns], columns[0].n, resamples, seed, groups)


def bootstrap_average_precision(
    scores_NL: ArrayLike,
    labels_NL: ArrayLike,
    resamples: int = 1000,
    seed: int = 0,
    groups: Sequence[Hashable] | None = None,
) -> tuple[Array, Array, Array]:
    """Average precision a label, with the resamples, rules and shapes of `bootstrap_auroc`.

    The sum over recall steps of the precision at that step, equal scores being one step (no interpolation).
    """
    columns = ranked_columns(scores_NL, labels_NL)
    return _bootstrap_columns([column.average_precision_R for column in columns], columns[0].n, resamples, seed, groups)


def _bootstrap_columns(
    columns: Sequence[Statistic], n: int, resamples: int, seed: int, groups: Sequence[Hashable] | None
) -> tuple[Array, Array, Array]:
    def statistic(counts_NR: Array) -> Array:
        return np.stack([column(counts_NR) for column in columns], axis=1)

    estimate = bootstrap(statistic, n, resamples=resamples, seed=seed, groups=groups)
    return estimate.value_K, estimate.low_K, estimate.high_K


def ranked_columns(scores_NL: ArrayLike, labels_NL: ArrayLike) -> list[RankedColumn]:
    """One sorted column a label, after checking shapes, scores and label values."""
    scores, labels = check_scores(scores_NL, labels_NL)
    return [RankedColumn(scores_N, labels_N) for scores_N, labels_N in zip(scores.T, labels.T, strict=True)]


def mean_over_labels(values_RL: Array) -> Array:
    """values_R: the mean within each resample over the labels that are defined in it; NaN where none is."""
    defined_RL = ~np.isnan(values_RL)
    count_R = defined_RL.sum(axis=1)
    total_R = np.where(defined_RL, values_RL, 0.0).sum(axis=1)
    return np.where(count_R > 0, total_R / np.maximum(count_R, 1), np.nan)
