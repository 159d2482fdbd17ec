"""Measured systems: the runs of a benchmark that differ in the seed only, with their metrics,
costs and failures.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from medvl.benchmark.ranks import Measured, read_resamples
from medvl.benchmark.settings import Plan, Run
from medvl.benchmark.store import COST, Cost, Refusal, Store, Weights, read_evaluation, read_seconds
from medvl.benchmark.tasks import columns_of
from medvl.common.config_io import nearest
from medvl.eval import MetricRow, Results
from medvl.eval.core.results import SUMMARY_TARGETS
from medvl.eval.evaluation import Column

RowName = tuple[str, str, str]
"""Metric, target and subgroup of a row."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
    """A run or an evaluation without a result, because of an error."""

    title: str
    part: str
    """training, evaluations, or the name of a task."""
    reason: str
    log: str
    """File below the benchmark's folder; empty where the run was not started."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SystemRow:
    """A system on one corpus, from one start, with one share of the pairs."""

    name: str
    family: str
    corpus: str
    start: str
    share: float
    weights: Weights
    runs: tuple[Run, ...]
    """The runs of its seeds."""
    metrics: Mapping[str, Measured]
    """Title of a column -> metric."""
    refused: Mapping[str, str]
    """Task -> why it does not apply."""
    failed: frozenset[str]
    """Tasks that failed; all of them where the training did."""
    waiting: frozenset[str]
    """Tasks that are left to do."""
    costs: tuple[Cost, ...]
    evaluation_seconds: float
    results: Mapping[str, frozenset[RowName]] = dataclasses.field(default_factory=dict)
    """Task -> all rows of its results."""

    @property
    def title(self) -> str:
        """Name, that of weights before the training, and how many seeds are trained where not
        all are.
        """
        trained = len(self.costs)
        seeds = f" ({trained} of {len(self.runs)} seeds)" if 0 < trained < len(self.runs) else ""
        return (
            f"{self.name}{seeds}"
            if self.weights == "trained"
            else f"{self.name}, before training{seeds}"
        )

    @property
    def group(self) -> tuple[str, str]:
        """What the rows of one table share: corpus and start."""
        return self.corpus, self.start


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurements:
    """All that the pages show."""

    plan: Plan
    rows: tuple[SystemRow, ...]
    columns: Mapping[str, Column]
    """Title -> column, of the columns that any row has."""
    tasks: Mapping[str, str]
    """Title of a column -> its task."""
    failures: tuple[Failure, ...]

    def empty_columns(self) -> dict[str, str]:
        """Return title -> reason of the columns of the file that no result of their task has a
        row for.
        """
        config = self.plan.config
        reasons = {}
        own = {command.name: command.columns for command in config.commands}
        for task, columns in (*own.items(), *config.columns.items()):
            names = frozenset().union(*(row.results.get(task, frozenset()) for row in self.rows))
            for column in columns if names else ():
                if not any(column.title in row.metrics for row in self.rows):
                    reasons[column.title] = f"{task}: {_lacking(names, column)}"
        return reasons

    def groups(self) -> dict[tuple[str, str], list[SystemRow]]:
        """Return the rows with all pairs by corpus and start."""
        groups: dict[tuple[str, str], list[SystemRow]] = {}
        for row in self.rows:
            if row.share == max(self.plan.config.shares):
                groups.setdefault(row.group, []).append(row)
        return groups


def measure_systems(plan: Plan, store: Store) -> Measurements:
    """Read the results of all runs of a benchmark that have tasks."""
    columns = columns_of(plan.config)
    grouped: dict[tuple[str, str, str, float], list[Run]] = {}
    for run in plan.runs:
        if run.tasks:
            grouped.setdefault((run.name, run.corpus.name, run.start, run.share), []).append(run)
    kinds: tuple[Weights, ...] = (
        ("trained", "start") if plan.config.evaluation.random_start else ("trained",)
    )
    rows = [_row(runs, weights, store, columns) for runs in grouped.values() for weights in kinds]
    tasks = {column.title: task for task, of_task in columns.items() for column in of_task}
    shown = {
        column.title: column
        for task, of_task in columns.items()
        for column in of_task
        if any(column.title in row.metrics or task in row.failed for row in rows)
    }
    return Measurements(
        plan=plan,
        rows=tuple(rows),
        columns=shown,
        tasks=tasks,
        failures=tuple(_failures(plan, store)),
    )


def _row(
    runs: Sequence[Run], weights: Weights, store: Store, columns: Mapping[str, tuple[Column, ...]]
) -> SystemRow:
    first = runs[0]
    metrics = {}
    refused = {}
    failed = set()
    waiting = set()
    seconds = 0.0
    names = {}
    for task in first.tasks:
        folders = [store.evaluation(run, weights, task) for run in runs]
        evaluations = [read_evaluation(folder) for folder in folders]
        if None in evaluations:
            waiting.add(task)
        for one in evaluations:
            if isinstance(one, Refusal):
                if one.failed:
                    failed.add(task)
                else:
                    refused[task] = one.reason
        done = [
            (folder, one)
            for folder, one in zip(folders, evaluations, strict=True)
            if isinstance(one, Results)
        ]
        names[task] = frozenset(
            (row.metric, row.target, row.subgroup) for _, one in done for row in one.rows
        )
        seconds += sum(read_seconds(folder) or 0.0 for folder, _ in done)
        for column in columns[task]:
            measured = _measured(done, column)
            if measured is not None:
                metrics[column.title] = measured
    if all(store.failure(run) for run in runs):
        failed = set(first.tasks)
    costs = tuple(cost for run in runs if (cost := store.cost(run)) is not None)
    return SystemRow(
        name=first.name,
        family=first.family,
        corpus=first.corpus.name,
        start=first.start,
        share=first.share,
        weights=weights,
        runs=tuple(runs),
        metrics=metrics,
        refused=refused,
        failed=frozenset(failed),
        waiting=frozenset(waiting),
        costs=costs,
        evaluation_seconds=seconds / max(1, len(runs)),
        results=names,
    )


def _measured(done: Sequence[tuple[Path, Results]], column: Column) -> Measured | None:
    """Return a column's metric over the seeds that have it."""
    values = []
    errors = []
    resampled = []
    ends = []
    over = set()
    for folder, results in done:
        row = _find(results, column)
        if row is not None and not math.isnan(row.value):
            values.append(row.value)
            errors.append((row.high - row.low) / 3.92)
            ends.append((row.low, row.high))
            resampled.append(read_resamples(folder, row.name))
            over.add(f"{_over(results, row)} ({results.protocol} {results.protocol_version})")
    if not values:
        return None
    return Measured(
        values=tuple(values),
        errors=tuple(errors),
        resampled=tuple(resampled),
        ends=tuple(ends),
        over=frozenset(over),
    )


def _lacking(names: frozenset[RowName], column: Column) -> str:
    """Return which part of a column no row has, with the nearest name."""
    metrics = {metric for metric, *_ in names}
    if column.metric not in metrics:
        return f"no metric {column.metric!r}; {nearest(column.metric, metrics)}"
    targets = {target for metric, target, _ in names if metric == column.metric}
    if not targets & {*column.targets}:
        return (
            f"no target {' or '.join(column.targets)} of {column.metric}; "
            f"{nearest(column.targets[0], targets)}"
        )
    subgroups = {
        f"{part!r}"
        for metric, target, part in names
        if (metric, target in column.targets) == (column.metric, True)
    }
    return (
        f"no value of {column.metric} in the subgroup {column.subgroup!r}; known: "
        f"{', '.join(sorted(subgroups))}"
    )


def _over(results: Results, row: MetricRow) -> str:
    """Return the target of a row; of a mean over classes with those that have a value, as far as
    rows show them.

    A mean in a subgroup has the classes of its attribute: the groups of a gap differ between
    classes. A metric that is derived from another one, such as auroc_sd, has its classes where it
    has no rows of its own.
    """
    if row.target == "macro":
        derived = row.metric.partition("_")[0]
        for metric, subgroup in ((row.metric, row.subgroup), (row.metric, ""), (derived, "")):
            name = (metric, subgroup.partition(": ")[0])
            rows = [
                one for one in results.rows if (one.metric, one.subgroup.partition(": ")[0]) == name
            ]
            classes = {
                one.target
                for one in rows
                if one.target not in SUMMARY_TARGETS and not math.isnan(one.value)
            }
            if classes:
                return f"macro of {', '.join(sorted(classes))}"
    return row.target


def _find(results: Results, column: Column) -> MetricRow | None:
    """Return the row of the column's first target that the results have; None if they have none."""
    for target in column.targets:
        for row in results.rows:
            fits = row.subgroup.startswith(column.subgroup) if column.subgroup else not row.subgroup
            if fits and (row.metric, row.target) == (column.metric, target):
                return row
    return None


def _failures(plan: Plan, store: Store) -> list[Failure]:
    failures = []
    for run in plan.runs:
        log = f"runs/{run.key}/log.txt"
        log = log if (store.out / log).is_file() else ""
        if (reason := store.failure(run)) is not None:
            part = "evaluations" if (store.folder(run) / COST).is_file() else "training"
            failures.append(Failure(title=run.title, part=part, reason=reason, log=log))
            continue
        for weights, task, folder in store.evaluations(run):
            refusal = read_evaluation(folder)
            if isinstance(refusal, Refusal) and refusal.failed:
                part = task if weights == "trained" else f"{task}, before training"
                failures.append(Failure(title=run.title, part=part, reason=refusal.reason, log=log))
    return failures
