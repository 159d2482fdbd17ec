"""Several runs of one evaluation side by side, with paired differences from the first.

Two runs can be compared when they went by one protocol on the same data: hashes of all inputs but their own weights
must agree, or whoever compares them says that they may differ. Settings that differ are told.

A difference is paired: both runs are judged on the same draws of the same items (`compare_items`), so that what makes
an item hard for both cancels out. Two intervals that overlap can hide a difference that is certain, and a paired one
shows it. Where the lines of predictions name the patient of an item, patients are drawn, as in each evaluation itself.

Shape letters: R resamples, K rows.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from medvl.errors import EvaluationError
from medvl.eval.compare.predictions import Items, read_items
from medvl.eval.core.bootstrap import bootstrap
from medvl.eval.core.metric_rows import MetricRow
from medvl.eval.core.metrics import Array
from medvl.eval.core.results import Results, read_results

_OWN = frozenset({"checkpoint", "predictions", "vocabulary"})
"""Inputs in which runs differ because they are runs; all others must agree."""
_UNIMPORTANT = frozenset({"resamples", "seed", "autocast"})
"""Settings that change no value, or none by more than rounding."""


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One evaluation on disk."""

    name: str
    folder: Path
    results: Results


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What a report is made of; differences are of each further run minus the first."""

    runs: tuple[Run, ...]
    rows: tuple[str, ...]
    """Names of all rows, in the order of the first run that has them."""
    differences: tuple[Mapping[str, MetricRow], ...]
    """For each run but the first, row name -> the difference, where items could be paired."""
    notes: tuple[str, ...]
    """What does not agree, or could not be paired."""

    @property
    def protocol(self) -> str:
        """Of all runs."""
        return self.runs[0].results.protocol

    def value(self, run: int, name: str) -> MetricRow | None:
        """A run's own row, None where it has none of that name."""
        return next((row for row in self.runs[run].results.rows if row.name == name), None)

    def as_json(self) -> dict[str, Any]:
        """For `comparison.json`: runs, notes, and every row with values and differences."""
        return {
            "protocol": {"name": self.protocol, "version": self.runs[0].results.protocol_version},
            "runs": [{"name": run.name, "inputs": dict(run.results.inputs)} for run in self.runs],
            "notes": list(self.notes),
            "rows": [
                {
                    "name": name,
                    "values": [_numbers(self.value(number, name)) for number in range(len(self.runs))],
                    "differences": [_numbers(of_run.get(name)) for of_run in self.differences],
                }
                for name in self.rows
            ],
        }


def find_runs(paths: Sequence[Path]) -> dict[str, list[Run]]:
    """Protocol -> its evaluations, from results.json files, folders of evaluations, or folders of training runs.

    A folder without a results.json of its own stands for all in `eval/` below it, or beside it where it is a
    checkpoint of a run. Runs are called by what tells their paths apart. Raises EvaluationError.
    """
    found: dict[str, list[tuple[Path, Results]]] = {}
    for path in paths:
        for folder in _folders(path):
            results = read_results(folder)
            found.setdefault(results.protocol, []).append((folder, results))
    runs = {}
    for protocol, entries in found.items():
        names = tell_apart([folder for folder, _ in entries])
        runs[protocol] = [Run(name, *entry) for name, entry in zip(names, entries, strict=True)]
    return runs


def _folders(path: Path) -> list[Path]:
    if path.is_file():
        return [path.parent]
    for place in (path / "results.json", *(base / "eval" for base in (path, path.parent))):
        if place.name == "results.json" and place.is_file():
            return [path]
        within = sorted(file.parent for file in place.glob("*/results.json"))
        if within:
            return within
    raise EvaluationError(f"{path} holds no results.json, nor an eval/ that does: evaluate the run first")


def tell_apart(folders: Sequence[Path]) -> list[str]:
    """A short name for each: its path without the parts that all share."""
    parts = [folder.resolve().parts for folder in folders]
    shortest = min(map(len, parts))
    first = next((n for n in range(shortest) if len({each[n] for each in parts}) > 1), shortest)
    last = next((n for n in range(shortest - first) if len({each[-1 - n] for each in parts}) > 1), 0)
    names = ["/".join(each[first : len(each) - last]) or each[-1] for each in parts]
    return names if len(set(names)) == len(names) else [f"{number} {name}" for number, name in enumerate(names, 1)]


def compare(runs: Sequence[Run], *, force: bool = False, resamples: int = 1000, seed: int = 0) -> Comparison:
    """Set evaluations of one protocol side by side; the first is what the others are compared with.

    Args:
        runs: one or more.
        force: compare what went in differently all the same, and tell so.
        resamples, seed: of the paired bootstrap.

    Raises:
        EvaluationError: the runs are of two protocols or versions, or went by other data and `force` does not allow it;
            predictions do not belong to their results.
    """
    if not runs:
        raise EvaluationError("there is no run to report")
    notes = _disagreements(runs)
    if notes and not force:
        raise EvaluationError(
            f"these runs cannot be compared: {'; '.join(notes)}. Evaluate them alike, or say --force to see them side "
            "by side all the same"
        )
    notes += _settings(runs)
    items = [read_items(run.folder, run.results) for run in runs]
    differences: list[Mapping[str, MetricRow]] = []
    for run, mine in zip(runs[1:], items[1:], strict=True):
        paired = _paired(items[0], mine, resamples, seed)
        if isinstance(paired, str):
            notes.append(f"{run.name} is not paired with {runs[0].name}: {paired}")
        differences.append({} if isinstance(paired, str) else paired)
    if any(differences) and items[0] is not None and items[0].groups is None:
        notes.append("predictions do not say whose the items are: single items are drawn, and intervals are too narrow")
    rows = dict.fromkeys(row.name for run in runs for row in run.results.rows)
    return Comparison(runs=tuple(runs), rows=tuple(rows), differences=tuple(differences), notes=tuple(notes))


def _disagreements(runs: Sequence[Run]) -> list[str]:
    first = runs[0].results
    told = []
    for run in runs[1:]:
        other = run.results
        if (other.protocol, other.protocol_version) != (first.protocol, first.protocol_version):
            told.append(
                f"{run.name} went by {other.protocol} version {other.protocol_version}, {runs[0].name} by "
                f"{first.protocol} version {first.protocol_version}"
            )
        names = sorted({*first.inputs, *other.inputs} - _OWN)
        differing = [name for name in names if first.inputs.get(name) != other.inputs.get(name)]
        if differing:
            told.append(f"{run.name} and {runs[0].name} have another {', another '.join(differing)}")
    return told


def _settings(runs: Sequence[Run]) -> list[str]:
    first = runs[0].results.config
    names = sorted({name for run in runs for name in run.results.config} - _UNIMPORTANT)
    differing = [name for name in names if any(run.results.config.get(name) != first.get(name) for run in runs)]

    def told(value: object) -> str:
        return "set otherwise" if isinstance(value, Mapping) else str(value)

    return [
        f"{name}: " + ", ".join(f"{told(run.results.config.get(name))} ({run.name})" for run in runs)
        for name in differing
    ]


def _paired(first: Items | None, other: Items | None, resamples: int, seed: int) -> dict[str, MetricRow] | str:
    """Row name -> other minus first, or why there is none."""
    if first is None or other is None:
        return "one of them has no predictions that could be"
    if first.names != other.names:
        return "their predictions are of other items"
    common = [name for name in first.rows if name in set(other.rows)]
    columns = [[items.rows.index(name) for name in common] for items in (first, other)]

    def statistic(counts_NR: Array) -> Array:
        of_first, of_other = first.statistic(counts_NR), other.statistic(counts_NR)
        return np.asarray(of_other[:, columns[1]] - of_first[:, columns[0]])

    estimate = bootstrap(statistic, len(first.names), resamples=resamples, seed=seed, groups=first.groups)
    known = {row.name: row for block in first.blocks for row in block.rows}
    values = zip(common, estimate.value_K, estimate.low_K, estimate.high_K, strict=True)
    return {
        name: dataclasses.replace(known[name], value=float(value), low=float(low), high=float(high))
        for name, value, low, high in values
    }


def _numbers(row: MetricRow | None) -> dict[str, Any] | None:
    return None if row is None else {"value": row.value, "low": row.low, "high": row.high, "n": row.n}
