"""Tables of a benchmark: the survey's table with measured numbers, ranks, costs and failures."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence

from medvl.benchmark.pages.rows import Measurements, SystemRow
from medvl.benchmark.ranks import Measured, Rank, comparable, difference, rank_systems
from medvl.eval.html.tables import Cell, Table

FAMILIES = {
    "dual": "dual-encoder",
    "fusion": "fusion-encoder",
    "records": "masked-record model",
    "report": "report generator",
}
_DASH = "–"
FAILED = "failed"
_WAITING = "to do"
_APART = (
    "the systems have other test items or other references, or predictions that give no resamples, "
    "and are compared as independent"
)


def group_name(measurements: Measurements, group: tuple[str, str]) -> str:
    """Return the name of a corpus and a start, as far as a benchmark has several."""
    config = measurements.plan.config
    several = (len(config.corpora) > 1, len(config.starts) > 1)
    return ", ".join(part for part, shown in zip(group, several, strict=True) if shown)


def titled(title: str, name: str) -> str:
    """Return the title of a section of a group."""
    return f"{title}: {name}" if name else title


def survey_table(
    measurements: Measurements, group: tuple[str, str], rows: Sequence[SystemRow]
) -> Table:
    """Return the table of all systems: what they are, and the first metric of each task."""
    first = _first_columns(measurements, rows)
    lines: list[list[Cell | str]] = [
        [
            row.title,
            FAMILIES[row.family],
            _terms(row),
            _encoders(row),
            row.corpus,
            *_cells(measurements, row, first),
        ]
        for row in rows
        if row.weights == "trained"
    ]
    about = ["family", "losses", "encoders", "corpus"]
    lines += [[name, *[_DASH] * (len(about) + len(first))] for name in measurements.plan.left_out]
    return Table(
        title=titled("All systems", group_name(measurements, group)),
        columns=["system", *about, *first],
        rows=lines,
        caption="The first metric of each task, with 95% intervals over test items and, where "
        "there are several, over "
        "seeds. Losses are the terms that the training logged. A dash: the task does not apply, "
        "or the system takes no "
        "part.",
    )


def family_tables(
    measurements: Measurements, group: tuple[str, str], rows: Sequence[SystemRow]
) -> list[Table]:
    """Return a table of all metrics for each family."""
    tables = []
    for family, title in FAMILIES.items():
        own = [row for row in rows if row.family == family]
        titles = [
            name
            for name in measurements.columns
            if any(name in row.metrics or _has(measurements, row, name) for row in own)
        ]
        if own and titles:
            tables.append(
                Table(
                    title=titled(f"{title.capitalize()}s", group_name(measurements, group)),
                    columns=["system", *titles],
                    rows=[[row.title, *_cells(measurements, row, titles, bar=True)] for row in own],
                    caption=_seeds_caption(measurements),
                )
            )
    return tables


def ranks_of(measurements: Measurements, rows: Sequence[SystemRow]) -> dict[str, dict[str, Rank]]:
    """Return column -> system -> rank, of the trained systems of a group; without columns of
    unequal classes.
    """
    return {
        title: rank_systems(measured, higher_is_better=measurements.columns[title].higher_is_better)
        for title, measured in _ranked(measurements, rows)
        if comparable(measured.values())
    }


def _ranked(
    measurements: Measurements, rows: Sequence[SystemRow]
) -> Iterator[tuple[str, dict[str, Measured]]]:
    """Yield (column, system -> metric) of the columns in which several systems compete."""
    for title, column in measurements.columns.items():
        measured = {
            row.name: row.metrics[title]
            for row in rows
            if row.weights == "trained" and title in row.metrics
        }
        if len(measured) > 1 and not column.is_baseline:
            yield title, measured


def unranked_table(
    measurements: Measurements, group: tuple[str, str], rows: Sequence[SystemRow]
) -> Table | None:
    """Return the columns whose systems have means over different classes, which are not ranked;
    None without any.
    """
    lines: list[list[Cell | str]] = []
    for title, measured in _ranked(measurements, rows):
        if not comparable(measured.values()):
            for over in dict.fromkeys(one.over for one in measured.values()):
                names = [name for name, one in measured.items() if one.over == over]
                lines.append([title, ", ".join(names), "; ".join(sorted(over))])
    if not lines:
        return None
    return Table(
        title=titled("Columns that are not ranked", group_name(measurements, group)),
        columns=["column", "systems", "over"],
        rows=lines,
        caption="Means over different classes do not compare. Evaluate all systems on the same "
        "ones: `--labels` of a "
        "command, or the classes of the corpus's prompts; evaluations that are removed are made "
        "again.",
    )


def ranks_table(
    measurements: Measurements,
    group: tuple[str, str],
    rows: Sequence[SystemRow],
    ranks: Mapping[str, Mapping[str, Rank]],
) -> Table:
    """Return the ranks of all systems in all columns, with their intervals and the mean over
    columns.
    """
    trained = [
        row
        for row in rows
        if row.weights == "trained" and any(row.name in of for of in ranks.values())
    ]

    def mean(row: SystemRow) -> float:
        return statistics.mean(
            (of[row.name].rank - 1) / (len(of) - 1) for of in ranks.values() if row.name in of
        )

    lines: list[list[Cell | str]] = []
    for row in sorted(trained, key=mean):
        cells = [_rank_cell(of.get(row.name)) for of in ranks.values()]
        lines.append([row.name, f"{mean(row):.2f}", *cells])
    return Table(
        title=titled("Ranks", group_name(measurements, group)),
        columns=["system", "mean place", *ranks],
        rows=lines,
        caption="Brackets: the ranks that 95% simultaneous intervals allow. All pairs of "
        "systems of a column are "
        "compared on the same resamples of the test items where their predictions are paired, "
        "and corrected by Holm's "
        "method. The mean place is the mean over the columns of (rank - 1) / (systems - 1): 0 "
        "is first everywhere, 1 "
        "last. It has no interval, and systems of different tasks are not comparable by it.",
    )


def rank_tables(
    measurements: Measurements,
    group: tuple[str, str],
    rows: Sequence[SystemRow],
    ranks: Mapping[str, Mapping[str, Rank]],
) -> list[Table]:
    """Return a table for each column: value, rank and the gap to the best."""
    by_name = {row.name: row for row in rows if row.weights == "trained"}
    tables = []
    for title, of_column in ranks.items():
        lines: list[list[Cell | str]] = [
            [
                name,
                measured_cell(by_name[name].metrics[title], len(by_name[name].runs), bar=True),
                _rank_cell(rank),
            ]
            for name, rank in of_column.items()
        ]
        tables.append(
            Table(
                title=titled(title, group_name(measurements, group)),
                columns=["system", title, "rank"],
                rows=lines,
                caption=_pairing({name: by_name[name].metrics[title].items for name in of_column}),
            )
        )
    return tables


def _pairing(items: Mapping[str, str | None]) -> str:
    """Return which systems are paired: those with the same hash of their test items."""
    same: dict[str, list[str]] = {}
    for name, content in items.items():
        if content is not None:
            same.setdefault(content, []).append(name)
    paired = [names for names in same.values() if len(names) > 1]
    if [len(names) for names in paired] == [len(items)]:
        return "Differences are paired over test items."
    if not paired:
        return f"No differences are paired: {_APART}."
    groups = "; ".join(", ".join(names) for names in paired)
    return f"Differences are paired over test items within: {groups}. The others are not: {_APART}."


def cost_table(
    measurements: Measurements, group: tuple[str, str], rows: Sequence[SystemRow]
) -> Table:
    """Return the cost of each system beside its quality."""
    first = _first_columns(measurements, rows)
    lines = [
        [row.name, *cost_cells(row), *_cells(measurements, row, first)]
        for row in rows
        if row.weights == "trained" and row.costs
    ]
    return Table(
        title=titled("Cost beside quality", group_name(measurements, group)),
        columns=[
            *("system", "device", "parameters, M", "steps", "training, min", "CPU, min"),
            *("memory, GiB", "pairs/s", "evaluations, min", *first),
        ],
        rows=lines,
        caption="Means over seeds. Training: steps times the median time of a step, also where "
        "a run was interrupted. "
        "CPU: processor time of the training process, not known of runs that were resumed. "
        "Memory: peak of the GPU, or "
        "of the process on a CPU. Evaluations that were interrupted: the time of their last part.",
    )


def cost_cells(row: SystemRow) -> list[str]:
    """Return device, parameters, steps, minutes, memory and speed of a row's runs, as means over
    its seeds.
    """

    def mean(name: str, scale: float, digits: int) -> str:
        values = [value for cost in row.costs if (value := getattr(cost, name)) is not None]
        return f"{statistics.mean(values) / scale:.{digits}f}" if values else _DASH

    cpu = [cost.cpu_seconds / 60 for cost in row.costs if not cost.resumed]
    return [
        ", ".join(dict.fromkeys(cost.device for cost in row.costs)),
        mean("parameters", 1e6, 1),
        mean("steps", 1, 0),
        mean("train_seconds", 60, 1),
        f"{statistics.mean(cpu):.1f}" if cpu else _DASH,
        mean("peak_memory_gb", 1, 2),
        mean("pairs_per_second", 1, 0),
        f"{row.evaluation_seconds / 60:.1f}",
    ]


def failures_table(measurements: Measurements) -> Table:
    """Return the runs and evaluations that failed, and the systems that take no part."""
    lines: list[list[Cell | str]] = [
        [failure.title, failure.part, failure.reason, failure.log]
        for failure in measurements.failures
    ]
    lines += [
        [name, "takes no part", reason, ""] for name, reason in measurements.plan.left_out.items()
    ]
    return Table(
        title="Failures",
        columns=["run", "part", "reason", "log"],
        rows=lines,
        caption="--retry-failed repeats the runs and evaluations that failed."
        if measurements.failures
        else "No run failed.",
    )


def refusals_table(measurements: Measurements) -> Table:
    """Return the tasks that do not apply to systems of their family."""
    reasons = dict.fromkeys(
        (row.name, task, reason)
        for row in measurements.rows
        for task, reason in row.refused.items()
    )
    return Table(
        title="Tasks that do not apply",
        columns=["system", "task", "reason"],
        rows=[list(line) for line in reasons],
        caption="These are dashes in the tables."
        if reasons
        else "All tasks applied to all systems of their families.",
    )


def empty_columns_table(measurements: Measurements) -> Table | None:
    """Return the columns of the file that no result has; None without any."""
    reasons = measurements.empty_columns()
    if not reasons:
        return None
    return Table(
        title="Columns without values",
        columns=["column", "reason"],
        rows=[list(line) for line in reasons.items()],
        caption="No result of their tasks has these rows. Correct metric, targets or subgroup "
        "of the column.",
    )


def columns_table(measurements: Measurements) -> Table:
    """Return the task, metric and direction of every column."""
    lines: list[list[Cell | str]] = []
    for title, column in measurements.columns.items():
        over = ", ".join(
            filter(None, [" or ".join(column.targets), column.subgroup.removesuffix(": ")])
        )
        better = _DASH if column.is_baseline else "higher" if column.higher_is_better else "lower"
        lines.append([title, measurements.tasks[title], column.metric, over, better])
    return Table(
        title="Columns",
        columns=["column", "task", "metric", "of", "better"],
        rows=lines,
        caption="Metrics by their names in results.json. AUROC, recall, accuracy and F1 are "
        "fractions of one.",
    )


def measured_cell(measured: Measured, seeds: int, *, bar: bool = False) -> Cell:
    """Return the cell of a metric with its interval; of fewer than `seeds` seeds their number is
    added.
    """
    low, high = measured.interval
    count = len(measured.values)
    text = (
        f"{measured.value:z.3f}"
        if count >= seeds
        else f"{measured.value:z.3f} ({count} of {seeds} seeds)"
    )
    if math.isnan(low):
        return Cell(text=text, interval=(math.nan, measured.value, math.nan))
    return Cell(
        text=text, small=f"[{low:z.3f}, {high:z.3f}]", interval=(low, measured.value, high), bar=bar
    )


def _cells(
    measurements: Measurements, row: SystemRow, titles: Sequence[str], *, bar: bool = False
) -> list[Cell | str]:
    cells: list[Cell | str] = []
    for title in titles:
        if title in row.metrics:
            cells.append(measured_cell(row.metrics[title], len(row.runs), bar=bar))
        else:
            task = measurements.tasks[title]
            cells.append(
                FAILED if task in row.failed else _WAITING if task in row.waiting else _DASH
            )
    return cells


def _first_columns(measurements: Measurements, rows: Sequence[SystemRow]) -> list[str]:
    """Return the first column of each task that a row has."""
    titles = [
        title
        for title in measurements.columns
        if any(_has(measurements, row, title) for row in rows)
    ]
    return list({measurements.tasks[title]: title for title in reversed(titles)}.values())[::-1]


def _has(measurements: Measurements, row: SystemRow, title: str) -> bool:
    return title in row.metrics or measurements.tasks[title] in row.failed


def _rank_cell(rank: Rank | None) -> Cell | str:
    if rank is None:
        return _DASH
    return Cell(text=str(rank.rank), small=f"[{rank.low}, {rank.high}]")


def _terms(row: SystemRow) -> str:
    return ", ".join(dict.fromkeys(term for cost in row.costs for term in cost.terms)) or _DASH


def _encoders(row: SystemRow) -> str:
    model = row.runs[0].settings["model"]
    names = [model.get(name) for name in ("image_encoder", "text_encoder")]
    return " + ".join(str(name) for name in names if name) or _DASH


def _seeds_caption(measurements: Measurements) -> str:
    seeds = len(measurements.plan.config.seeds)
    over = "one seed; intervals are over test items and not over trainings" if seeds == 1 else (
        f"means over {seeds} seeds; intervals are over test items and seeds"
    )  # fmt: skip
    return f"95% intervals: {over}."


# Tables of what the training adds to its start weights, and what other start weights add, with
# paired differences.

_CAPTION = (
    "95% intervals, paired over test items where the predictions allow it; they are not corrected "
    "for the number of comparisons. The tick marks no difference. {seeds}"
)


def gain_tables(measurements: Measurements) -> list[Table]:
    """Return the differences of trained systems from their start weights, and of starts from the
    first one.

    There are none for a benchmark with one start that does not evaluate the weights before the
    training.
    """
    tables: list[Table] = []
    for group, rows in measurements.groups().items():
        title = titled("What training adds to the start weights", group_name(measurements, group))
        tables += _table(measurements, title, _pairs(rows, "trained", rows, "start"))
    first, *others = (start.name for start in measurements.plan.config.starts)
    for (corpus, start), rows in measurements.groups().items():
        if start in others:
            title = titled(f"What the start {start} adds to {first}", corpus)
            before = measurements.groups().get((corpus, first), [])
            tables += _table(measurements, title, _pairs(rows, "trained", before, "trained"))
    return tables


def _pairs(
    rows: Sequence[SystemRow], weights: str, others: Sequence[SystemRow], other_weights: str
) -> list[tuple[SystemRow, SystemRow]]:
    by_name = {row.name: row for row in others if row.weights == other_weights}
    pairs = [
        (row, by_name[row.name]) for row in rows if row.weights == weights and row.name in by_name
    ]
    return [(one, other) for one, other in pairs if one.metrics.keys() & other.metrics.keys()]


def _table(
    measurements: Measurements, title: str, pairs: Sequence[tuple[SystemRow, SystemRow]]
) -> Iterator[Table]:
    titles = [
        name
        for name, column in measurements.columns.items()
        if not column.is_baseline
        and any(name in one.metrics and name in other.metrics for one, other in pairs)
    ]
    if titles:
        one_seed = len(measurements.plan.config.seeds) == 1
        rows: list[list[Cell | str]] = []
        rows += [[one.name, *(_cell(one, other, name) for name in titles)] for one, other in pairs]
        seeds = "The intervals do not cover the training, which has one seed." if one_seed else ""
        yield Table(
            title=title,
            columns=["system", *titles],
            rows=rows,
            caption=_CAPTION.format(seeds=seeds).strip(),
        )


def _cell(one: SystemRow, other: SystemRow, title: str) -> Cell:
    """Return the difference of a metric, with its interval; a dash where one lacks or is over
    other classes.
    """
    both = [row.metrics[title] for row in (one, other) if title in row.metrics]
    if len(both) < 2 or not comparable(both):
        return Cell(text="–")
    gain = difference(one.metrics[title], other.metrics[title])
    value, (low, high) = gain.value, gain.interval
    if math.isnan(low):
        return Cell(text=f"{value:+.3f}", interval=(math.nan, value, math.nan))
    ends = f"[{low:+.3f}, {high:+.3f}]"
    return Cell(
        text=f"{value:+.3f}", small=ends, interval=(low, value, high), bar=True, reference=0.0
    )
