"""Comparison of several runs of one evaluation, with paired differences from the first.

Runs can be compared if they used the same protocol and the same data: the hashes of all inputs
except their own weights must agree, unless `force` is set. Differing settings are noted.

Differences are paired: both runs are evaluated on the same resamples of the same items
(`medvl.eval.compare.items`), which removes the variation between items that both share. A paired
interval can exclude 0 where two separate intervals overlap. If the predictions name patients,
patients are resampled.

If the predictions name the subgroups of their items (view, sex, age, ...), every metric that they
determine is also compared within each subgroup, whatever the task.

Shape letters: R resamples, K rows.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from medvl.common.hub import HUB_PREFIX
from medvl.errors import EvaluationError
from medvl.eval.compare.items import Items, read_items, with_subgroups
from medvl.eval.core.metric_rows import MetricRow
from medvl.eval.core.metrics import Array, RocCurve, bootstrap, roc_curve
from medvl.eval.core.results import (
    EVALUATIONS,
    SUMMARY_TARGETS,
    Results,
    checkpoint_sha256,
    evaluations_of,
    read_results,
)
from medvl.eval.generation.protocol import IMAGES_OF
from medvl.eval.registry import evaluation_of
from medvl.models.checkpoint_folder import CONFIG, find_checkpoint

_RUN_INPUTS = frozenset(
    {"checkpoint", "encoder", "predictions", "vocabulary", "generator", "other"}
)
"""Inputs that may differ between runs, beside generated images ("images, guidance 3"); all
others must agree.
"""
# settings that do not change values beyond rounding
_IGNORED_SETTINGS = frozenset({"resamples", "seed", "autocast"})


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One evaluation on disk."""

    name: str
    folder: Path
    results: Results


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Runs with their rows, and differences of each further run minus the first."""

    runs: tuple[Run, ...]
    rows: tuple[str, ...]
    """Names of all rows: means first, then in the order of the first run that has them,
    subgroups last.
    """
    differences: tuple[Mapping[str, MetricRow], ...]
    """Row name -> difference for each run except the first; empty if its items cannot be paired."""
    curves: Mapping[str, Mapping[str, RocCurve]]
    """Class -> run -> ROC curve, for protocols whose predictions have scores of classes."""
    notes: tuple[str, ...]
    """Notes on differing inputs and settings, and on runs that cannot be paired."""
    title: str = ""
    """Name on the page; empty for that of the protocol."""

    @property
    def protocol(self) -> str:
        """Protocol of all runs."""
        return self.runs[0].results.protocol

    def value(self, run: int, name: str) -> MetricRow | None:
        """Return the row of a run by name; None if it has none."""
        return next((row for row in self.runs[run].results.rows if row.name == name), None)

    def as_json(self) -> dict[str, Any]:
        """Return runs, notes, and every row with values and differences, for `comparison.json`."""
        return {
            "protocol": {"name": self.protocol, "version": self.runs[0].results.protocol_version},
            **({"title": self.title} if self.title else {}),
            "runs": [{"name": run.name, "inputs": dict(run.results.inputs)} for run in self.runs],
            "notes": list(self.notes),
            "rows": [
                {
                    "name": name,
                    "values": [
                        _numbers(self.value(number, name)) for number in range(len(self.runs))
                    ],
                    "differences": [_numbers(of_run.get(name)) for of_run in self.differences],
                }
                for name in self.rows
            ],
        }


def find_runs(paths: Sequence[Path]) -> dict[str, list[Run]]:
    """Find the evaluations of each protocol in results.json files, folders of evaluations,
    checkpoints or runs.

    A checkpoint or run stands for all evaluations in its folder (`medvl.eval.core.results`). Runs
    are named by the parts of their paths that differ.

    Raises EvaluationError if a path has no evaluation, if two paths lead to the same results.json,
    or if the results in the folder of a checkpoint are of other weights.
    """
    by_protocol: dict[str, list[tuple[Path, Results]]] = {}
    given: dict[Path, Path] = {}
    for path in paths:
        for folder, results in _evaluations(path):
            file = (folder / "results.json").resolve()
            if file in given:
                message = (
                    f"{given[file]} and {path} lead to the same results, {file}; give "
                    f"different evaluations"
                )
                raise EvaluationError(message, "conflict", field="runs")
            given[file] = path
            by_protocol.setdefault(results.protocol, []).append((folder, results))
    runs = {}
    for protocol, entries in by_protocol.items():
        names = short_names([folder for folder, _ in entries])
        runs[protocol] = [Run(name, *entry) for name, entry in zip(names, entries, strict=True)]
    return runs


def _evaluations(path: Path) -> list[tuple[Path, Results]]:
    """Return the evaluations that a path names, with their results."""
    if (path / "results.json").is_file():
        return [(path, read_results(path))]
    if not path.exists() and not str(path).startswith(HUB_PREFIX):
        raise EvaluationError(
            f"{path} does not exist; give a run or an evaluation", "not_found", field="runs"
        )
    if path.is_file() and not evaluations_of(path).is_dir():
        return [(path.parent, read_results(path.parent))]
    known = path.is_file() or (find_checkpoint(path) / CONFIG).is_file()
    places = [evaluations_of(path)] if known else []
    # the last two places are those of earlier versions
    places += [path, *(base / EVALUATIONS for base in (path, path.parent))]
    for place in dict.fromkeys(places):
        folders = sorted(file.parent for file in place.glob("*/results.json"))
        if folders:
            entries = [(folder, read_results(folder)) for folder in folders]
            if known:
                _check_weights(path, entries)
            return entries
    message = f"{path} has no results.json and no eval/ with one; evaluate it first"
    steps = sorted({file.parents[1].name for file in path.glob(f"{EVALUATIONS}/*/*/results.json")})
    if steps:
        message += f", or give one of {', '.join(str(path / EVALUATIONS / step) for step in steps)}"
    raise EvaluationError(message, "not_found")


def _check_weights(path: Path, entries: Sequence[tuple[Path, Results]]) -> None:
    """Raise EvaluationError if results are of other weights than those of the checkpoint in
    whose folder they lie.
    """
    try:
        expected = checkpoint_sha256(path)
    except EvaluationError:
        return  # the weights are gone, the results remain
    for folder, results in entries:
        known = [results.inputs.get("checkpoint"), results.inputs.get("predictions")]
        known += results.config.get("ensemble") or []
        if any(known) and expected not in known:
            message = (
                f"the results in {folder} are of other weights than {path}; evaluate "
                f"{path} again with --replace"
            )
            raise EvaluationError(message, "mismatch", field="runs")


def short_names(folders: Sequence[Path]) -> list[str]:
    """Return a short unique name per folder: its path without the common leading and trailing
    parts.
    """
    parts = [folder.resolve().parts for folder in folders]
    shortest = min(map(len, parts))
    first = next((n for n in range(shortest) if len({each[n] for each in parts}) > 1), shortest)
    last = next(
        (n for n in range(shortest - first) if len({each[-1 - n] for each in parts}) > 1), 0
    )
    names = ["/".join(each[first : len(each) - last]) or each[-1] for each in parts]
    return (
        names
        if len(set(names)) == len(names)
        else [f"{number} {name}" for number, name in enumerate(names, 1)]
    )


def compare(
    runs: Sequence[Run], *, force: bool = False, resamples: int = 1000, seed: int = 0
) -> Comparison:
    """Compare evaluations of one protocol with the first.

    Args:
        runs: one or more runs.
        force: compare runs with differing protocols or inputs, and note the differences.
        resamples: resamples of the paired bootstrap.
        seed: seed of the paired bootstrap.

    Raises:
        EvaluationError: protocols or inputs differ and `force` is not set, or predictions do not
            belong to their results.
    """
    if not runs:
        raise EvaluationError("expected at least one run, got none", "empty", field="runs")
    notes = _disagreements(runs)
    if notes and not force:
        message = (
            f"these runs cannot be compared: {'; '.join(notes)}; evaluate them on the "
            f"same inputs, or use --force"
        )
        raise EvaluationError(message, "mismatch", field="runs")
    notes += _settings(runs)
    items = [read_items(run.folder, run.results) for run in runs]
    settings = {"resamples": resamples, "seed": seed}
    runs = [
        dataclasses.replace(run, results=with_subgroups(run.results, of_run, **settings))
        for run, of_run in zip(runs, items, strict=True)
    ]
    differences: list[Mapping[str, MetricRow]] = []
    for run, own_items in zip(runs[1:], items[1:], strict=True):
        other_means = _means_that_differ(runs[0], run)
        notes += [
            f"{target} of {run.name} is over other classes than of {runs[0].name}"
            for target in other_means
        ]
        paired = _paired(items[0], own_items, resamples, seed, without=other_means)
        if isinstance(paired, str):
            notes.append(f"{run.name} is not paired with {runs[0].name}: {paired}")
        differences.append({} if isinstance(paired, str) else paired)
    if any(differences) and items[0] is not None:
        notes += _unit_notes(items[0], runs[0].results.protocol)
    ordered = sorted((row for run in runs for row in run.results.rows), key=row_order)
    return Comparison(
        runs=tuple(runs),
        rows=tuple(dict.fromkeys(row.name for row in ordered)),
        differences=tuple(differences),
        curves=_curves(runs, items),
        notes=tuple(notes),
    )


def _unit_notes(items: Items, protocol: str) -> list[str]:
    """Return a note where the items name no patients, or another group than the current version
    resamples.
    """
    evaluation = evaluation_of(protocol)
    if evaluation is None or items.unit == evaluation.lines.group:
        return []
    whole = f"each {items.unit} is resampled with all its items"
    resampled = "items are resampled independently" if items.unit is None else whole
    return [
        f"predictions without {evaluation.lines.group}s: {resampled}, so intervals are too narrow"
    ]


def row_order(row: MetricRow) -> int:
    """Return 0 for means over classes, 1 for single classes, 2 for subgroups."""
    return 2 if row.subgroup else int(row.target not in SUMMARY_TARGETS)


def _curves(runs: Sequence[Run], items: Sequence[Items | None]) -> dict[str, dict[str, RocCurve]]:
    curves: dict[str, dict[str, RocCurve]] = {}
    for run, of_run in zip(runs, items, strict=True):
        for name, scores_N, labels_N in of_run.scores if of_run else ():
            curve = roc_curve(scores_N, labels_N, resamples=0)
            if curve is not None:
                curves.setdefault(name, {})[run.name] = curve
    return curves


def _disagreements(runs: Sequence[Run]) -> list[str]:
    first = runs[0].results
    notes = []
    for run in runs[1:]:
        other = run.results
        if (other.protocol, other.protocol_version) != (first.protocol, first.protocol_version):
            notes.append(
                f"{run.name} has protocol {other.protocol} version {other.protocol_version}, "
                f"{runs[0].name} has {first.protocol} version {first.protocol_version}"
            )
        names = sorted({*first.inputs, *other.inputs} - _RUN_INPUTS)
        names = [name for name in names if not name.startswith(IMAGES_OF)]
        differing = [name for name in names if first.inputs.get(name) != other.inputs.get(name)]
        if differing:
            notes.append(f"{run.name} and {runs[0].name} differ in {', '.join(differing)}")
    return notes


def _settings(runs: Sequence[Run]) -> list[str]:
    first = runs[0].results.config
    names = sorted({name for run in runs for name in run.results.config} - _IGNORED_SETTINGS)
    differing = [
        name
        for name in names
        if any(run.results.config.get(name) != first.get(name) for run in runs)
    ]

    def shown(value: object) -> str:
        return "other settings" if isinstance(value, Mapping) else str(value)

    return [
        f"{name}: "
        + ", ".join(f"{shown(run.results.config.get(name))} ({run.name})" for run in runs)
        for name in differing
    ]


def _means_that_differ(first: Run, other: Run) -> list[str]:
    """Return the targets of means that are over other classes in the other run, so that they
    have no difference.
    """
    means, others = (run.results.details.get("means") or {} for run in (first, other))
    return [
        target for target in means if target in others and set(means[target]) != set(others[target])
    ]


def _paired(
    first: Items | None,
    other: Items | None,
    resamples: int,
    seed: int,
    *,
    without: Sequence[str] = (),
) -> dict[str, MetricRow] | str:
    """Return row name -> other minus first, or the reason why the runs cannot be paired.

    Rows of the targets in `without` have no difference, except in subgroups, whose classes are
    their own.
    """
    if first is None or other is None:
        return "one of them has no predictions, or those of an earlier version"
    if first.names != other.names:
        return "their predictions are for different items"
    known = {row.name: row for group in first.metric_groups for row in group.rows}
    left_out = {name for name, row in known.items() if row.target in without and not row.subgroup}
    common = [name for name in first.rows if name in set(other.rows) - left_out]
    columns = [[items.rows.index(name) for name in common] for items in (first, other)]

    def statistic(counts_NR: Array) -> Array:
        of_first = first.statistic(counts_NR)
        of_other = other.statistic(counts_NR)
        return np.asarray(of_other[:, columns[1]] - of_first[:, columns[0]])

    estimate = bootstrap(
        statistic, len(first.names), resamples=resamples, seed=seed, groups=first.groups
    )
    values = zip(common, estimate.value_K, estimate.low_K, estimate.high_K, strict=True)
    return {
        name: dataclasses.replace(known[name], value=float(value), low=float(low), high=float(high))
        for name, value, low, high in values
    }


def _numbers(row: MetricRow | None) -> dict[str, Any] | None:
    return (
        None if row is None else {"value": row.value, "low": row.low, "high": row.high, "n": row.n}
    )
