"""Output of a comparison of runs: HTML page, plain-text table and JSON."""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path

from medvl.common.files import write_atomic
from medvl.eval.compare.compare import Comparison
from medvl.eval.core.metric_rows import MetricRow
from medvl.eval.core.results import format_table, format_value, to_json
from medvl.eval.html.header import dated
from medvl.eval.html.page import Page, Section, write_page
from medvl.eval.html.tables import Cell, Table, metric_cell

_LIMITS = (
    "Differences are the named run minus the first, on the same resamples of the same items, with 95% intervals. An "
    "arrow marks intervals that exclude 0. With many rows, some intervals exclude 0 by chance.",
    "Paired intervals cover the sampling of test patients. They do not cover the variation of training: another seed "
    "gives other weights.",
)


def write_comparison(comparisons: Sequence[Comparison], folder: str | Path, *, date: str | None = None) -> list[Path]:
    """Write `comparison.json` and `index.html` into a folder, created if missing, and return their paths."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    content = [comparison.as_json() for comparison in comparisons]
    written = write_atomic(folder / "comparison.json", json.dumps(to_json(content), indent=2, allow_nan=False) + "\n")
    names = list(dict.fromkeys(run.name for comparison in comparisons for run in comparison.runs))
    facts = [("Compared with", comparisons[0].runs[0].name)] if len(names) > 1 else []
    for comparison in comparisons:
        for run in comparison.runs:
            weights = run.results.inputs.get("checkpoint")
            facts.append((run.name, f"{comparison.protocol}{f', checkpoint sha256 {weights[:12]}' if weights else ''}"))
        facts += [(f"{_title(comparison.protocol)} differs", note) for note in comparison.notes]
    page = Page(
        title="Comparison of runs",
        subtitle=", ".join(names),
        headlines=[],
        facts=dated(date, facts),
        sections=[section for comparison in comparisons for section in _sections(comparison)],
        limits=_LIMITS,
    )
    return [written, write_page(page, folder / "index.html")]


def format_comparison(comparison: Comparison) -> str:
    """Return every row with the values of all runs and their differences from the first, and notes, as text."""
    rows = []
    for name in comparison.rows:
        for number, run in enumerate(comparison.runs):
            own = comparison.value(number, name)
            rows.append(_renamed(own, name, run.name))
            if number and name in comparison.differences[number - 1]:
                rows.append(_renamed(comparison.differences[number - 1][name], name, f"{run.name} difference"))
    return "\n".join([comparison.protocol, format_table(rows), *comparison.notes])


def _renamed(row: MetricRow | None, name: str, column: str) -> MetricRow:
    """Return a row whose metric is the name of a run, for a table with one column per run."""
    blank = MetricRow(metric=column, target=name)
    return blank if row is None else dataclasses.replace(row, metric=column, target=name, subgroup="")


def _sections(comparison: Comparison) -> list[Section]:
    metrics = list(dict.fromkeys(name.split("/")[0] for name in comparison.rows))
    return [_table(comparison, metric) for metric in metrics]


def _table(comparison: Comparison, metric: str) -> Table:
    names = [name for name in comparison.rows if name.split("/")[0] == metric]
    runs = range(len(comparison.runs))
    values = [row for name in names for number in runs if (row := comparison.value(number, name)) is not None]
    bar = all(math.isnan(row.value) or 0 <= row.low <= row.high <= 1 for row in values if not math.isnan(row.low))
    bar = bar and all(math.isnan(row.value) or 0 <= row.value <= 1 for row in values)
    paired = [number for number in runs[1:] if any(name in comparison.differences[number - 1] for name in names)]
    lines: list[Sequence[Cell | str]] = []
    for name in names:
        own = [comparison.value(number, name) for number in runs]
        differences = [_difference(comparison.differences[number - 1].get(name)) for number in paired]
        count = next((f"{row.n:,}" for row in own if row is not None), "")
        lines.append([name.split("/", 1)[1], *(metric_cell(row, bar=bar) for row in own), *differences, count])
    return Table(
        title=f"{_title(comparison.protocol)}: {metric.replace('_', ' ')}",
        columns=[
            "",
            *(run.name for run in comparison.runs),
            *(f"{comparison.runs[number].name} minus {comparison.runs[0].name}" for number in paired),
            "n",
        ],
        rows=lines,
    )


def _title(protocol: str) -> str:
    return protocol.replace("_", " ").capitalize()


def _difference(row: MetricRow | None) -> Cell:
    if row is None or math.isnan(row.value):
        return Cell(text="–")
    number, _, interval = format_value(row).partition(" ")
    arrow = "▲ " if row.low > 0 else "▼ " if row.high < 0 else ""
    return Cell(text=f"{arrow}{'+' if row.value >= 0 else ''}{number}", small=interval)
