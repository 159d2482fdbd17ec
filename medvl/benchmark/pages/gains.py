"""Tables of what the training adds to its start weights, and what other start weights add, with paired differences."""

import math
from collections.abc import Iterator, Sequence

from medvl.benchmark.pages.rows import Measurements, SystemRow
from medvl.benchmark.pages.tables import group_name, titled
from medvl.benchmark.ranks import comparable, difference
from medvl.eval.html.tables import Cell, Table

_CAPTION = (
    "95% intervals, paired over test items where the predictions allow it; they are not corrected for the number of "
    "comparisons. The tick marks no difference. {seeds}"
)


def gain_tables(found: Measurements) -> list[Table]:
    """Return the differences of trained systems from their start weights, and of starts from the first one.

    There are none for a benchmark with one start that does not evaluate the weights before the training.
    """
    tables: list[Table] = []
    for group, rows in found.groups().items():
        title = titled("What training adds to the start weights", group_name(found, group))
        tables += _table(found, title, _pairs(rows, "trained", rows, "start"))
    first, *others = (start.name for start in found.plan.config.starts)
    for (corpus, start), rows in found.groups().items():
        if start in others:
            title = titled(f"What the start {start} adds to {first}", corpus)
            before = found.groups().get((corpus, first), [])
            tables += _table(found, title, _pairs(rows, "trained", before, "trained"))
    return tables


def _pairs(
    rows: Sequence[SystemRow], weights: str, others: Sequence[SystemRow], other_weights: str
) -> list[tuple[SystemRow, SystemRow]]:
    by_name = {row.name: row for row in others if row.weights == other_weights}
    pairs = [(row, by_name[row.name]) for row in rows if row.weights == weights and row.name in by_name]
    return [(one, other) for one, other in pairs if one.metrics.keys() & other.metrics.keys()]


def _table(found: Measurements, title: str, pairs: Sequence[tuple[SystemRow, SystemRow]]) -> Iterator[Table]:
    titles = [
        name
        for name, column in found.columns.items()
        if not column.is_baseline and any(name in one.metrics and name in other.metrics for one, other in pairs)
    ]
    if titles:
        one_seed = len(found.plan.config.seeds) == 1
        rows: list[list[Cell | str]] = []
        rows += [[one.name, *(_cell(one, other, name) for name in titles)] for one, other in pairs]
        seeds = "The intervals do not cover the training, which has one seed." if one_seed else ""
        yield Table(title=title, columns=["system", *titles], rows=rows, caption=_CAPTION.format(seeds=seeds).strip())


def _cell(one: SystemRow, other: SystemRow, title: str) -> Cell:
    """Return the difference of a metric, with its interval; a dash where one lacks or is over other classes."""
    both = [row.metrics[title] for row in (one, other) if title in row.metrics]
    if len(both) < 2 or not comparable(both):
        return Cell(text="–")
    gain = difference(one.metrics[title], other.metrics[title])
    value, (low, high) = gain.value, gain.interval
    if math.isnan(low):
        return Cell(text=f"{value:+.3f}", interval=(math.nan, value, math.nan))
    ends = f"[{low:+.3f}, {high:+.3f}]"
    return Cell(text=f"{value:+.3f}", small=ends, interval=(low, value, high), bar=True, reference=0.0)
