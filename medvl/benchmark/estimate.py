"""What is known of a benchmark before its runs are trained: errors of settings and data, hours and
memory.

Hours are measured ones, else those that the doctor measures. Evaluations take the time of finished
ones: nothing short of an evaluation tells how long it takes.
"""

import contextlib
import dataclasses
import functools
import io
import json
import logging
import multiprocessing
import shlex
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import torch

from medvl.benchmark.execute import checkpoint_of, located, prepare_run
from medvl.benchmark.plan import missing_steps
from medvl.benchmark.settings import Plan, Run, find_references
from medvl.benchmark.store import COST, Cost, Store, is_evaluated, read_evaluation, read_seconds
from medvl.benchmark.tasks import tested_folder
from medvl.common.config_io import from_dict, nearest
from medvl.common.files import write_atomic
from medvl.data import ShardSource
from medvl.data.loading.studies import StudySource
from medvl.data.shards.format import MANIFEST, Manifest
from medvl.data.shards.regions import find_regions
from medvl.errors import ConfigError, MedvlError
from medvl.eval import Results
from medvl.models import System, system
from medvl.models.checkpoint_folder import detector_of, train_manifests

_LATER = ("missing", "not_found")
"""Codes of what the corpora lack until they are made: vocabularies, graphs of entities,
checkpoints of other runs.
"""


def model_errors(plan: Plan, store: Store) -> Mapping[str, str]:
    """Return key -> error of the runs whose model cannot be built; finished runs and data that lack
    are left out.

    Each distinct model is built once, on the meta device.
    """
    error_of: dict[tuple[str, str], str | None] = {}
    errors: dict[str, str] = {}
    for run in plan.runs:
        if store.state(run) == "finished":
            continue
        model = run.system, json.dumps(run.settings["model"], sort_keys=True)
        if model not in error_of:
            error_of[model] = _error(run, store)
        if (error := error_of[model]) is not None:
            errors[run.key] = error
    return errors


def check_data(plan: Plan, store: Store) -> None:
    """Compare the data of a benchmark with those of its finished runs, and look for the sections
    that are matched.

    Data and runs that do not exist yet are left out. Raises ConfigError where a run was trained or
    evaluated on other data than its folders have now, or where no text has a section of
    `evaluation.sections`.
    """
    changed = list(_changed_data(plan, store))
    if changed:
        run, folder, results = changed[0]
        message = f"{run.title}: {results} was made with other data than {folder} has now"
        others = f", and {len(changed) - 1} more results were" if len(changed) > 1 else ""
        advice = "restore the data, give another --out, or remove what was made with the other data"
        raise ConfigError(
            f"{message}{others}; {advice}", "mismatch", field=f"corpora.{run.corpus.name}"
        )
    left = [
        run
        for run in plan.runs
        if store.state(run) == "to do" and {"matching", "reranking"} & {*run.tasks}
    ]
    folders = [Path(pairs) / "test" for pairs in dict.fromkeys(run.corpus.pairs for run in left)]
    _check_sections(
        [path for path in folders if (path / MANIFEST).is_file()], plan.config.evaluation.sections
    )


def _changed_data(plan: Plan, store: Store) -> Iterator[tuple[Run, Path, Path]]:
    """Yield (run, folder of data, what was made with other data) of trainings and evaluations
    that are finished.
    """
    read = functools.cache(
        lambda folder: Manifest.read(folder) if (Path(folder) / MANIFEST).is_file() else None
    )
    for run in plan.runs:
        if not (store.folder(run) / COST).is_file():
            continue
        checkpoint = checkpoint_of(run, store)
        trained = next(iter(train_manifests(checkpoint)), None)
        extra = () if run.family == "report" else run.corpus.extra_train
        present = [read(folder) for folder in (run.train_shards, *extra)]
        shards = [
            shard for manifest in present if manifest is not None for shard in manifest.shards
        ]
        if trained is not None and None not in present and list(trained.shards) != shards:
            yield run, Path(run.train_shards), store.folder(run)
            continue
        for _, task, results in store.evaluations(run):
            evaluation = read_evaluation(results)
            folder = tested_folder(run, task)
            made = evaluation.inputs.get("manifest") if isinstance(evaluation, Results) else None
            if folder is None or made is None or (manifest := read(folder)) is None:
                continue
            if made not in _fingerprints(run, folder, manifest, checkpoint):
                yield run, folder, results


def _fingerprints(run: Run, folder: Path, manifest: Manifest, checkpoint: Path) -> Iterator[str]:
    """Yield the hashes that an evaluation notes for shards: of images, of a detector's regions,
    of whole studies.
    """
    yield manifest.fingerprint
    if (detector := detector_of(checkpoint)) is not None:
        yield ShardSource(folder, regions=find_regions(folder, detector)).fingerprint
    if run.family == "report":
        yield StudySource(ShardSource(folder)).fingerprint


def _check_sections(folders: Sequence[Path], sections: tuple[str, ...]) -> None:
    """Raise ConfigError where no text of a folder has any of the sections, or none of all
    folders has one of them.
    """
    names: set[str] = set()
    for folder in folders:
        source = ShardSource(folder)
        known = set[str]()
        for position in range(len(source)):
            if known.issuperset(sections):
                break
            known |= source.sample(position).sections.keys()
        if not known & {*sections}:
            message = f"no text of {folder} has a section {' or '.join(map(repr, sections))}"
            raise ConfigError(
                f"{message}; {nearest(sections[0], known)}",
                "unknown_name",
                field="evaluation.sections",
            )
        names |= known
    for name in sections if folders else ():
        if name not in names:
            message = (
                f"no text of {', '.join(map(str, folders))} has a section {name!r}; "
                f"{nearest(name, names)}"
            )
            raise ConfigError(message, "unknown_name", field="evaluation.sections")


def _error(run: Run, store: Store) -> str | None:
    cls: type[System] = system(run.system)
    try:
        config = from_dict(cls.Config, located(run, store, run.settings["model"]))
        with torch.device("meta"):
            cls.build(config, pretrained=False, tokenizer=None)
    except MedvlError as error:
        return None if error.code in _LATER else str(error)
    return None


_FILE = "estimates.json"
Estimate = Mapping[str, Any]
"""hours, memory_gb and source, or error."""


def describe_plan(
    plan: Plan,
    store: Store,
    seconds: float,
    errors: Mapping[str, str],
    report: Callable[[str], Any] = print,
) -> str:
    """Return the list of runs with state, hours and memory.

    Args:
        plan: the runs.
        store: the folder of results; what is measured is kept there, in estimates.json.
        seconds: seconds of each of about six measurements of a run that no earlier one estimates; 0
            measures nothing.
        errors: key -> error of runs whose model cannot be built
            (`medvl.benchmark.estimate.model_errors`).
        report: called with lines of progress.
    """
    lines = []
    training = _Total("runs")
    evaluating = _Total("evaluations")
    corpora = {run.corpus.name: run.corpus for run in plan.runs}
    commands = {
        name: missing_steps(corpus, [run for run in plan.runs if run.corpus.name == name])
        for name, corpus in corpora.items()
    }
    known = _known_costs(plan, store)
    evaluations = _EvaluationHours(plan, store)
    for run in plan.runs:
        state = store.state(run)
        measured = run.key not in errors and not commands[run.corpus.name]
        estimate = estimate_run(run, store, known, seconds if measured else 0.0, report)
        parts = [f"wrong settings: {errors[run.key]}" if run.key in errors else _text(estimate)]
        if state == "to do":
            if store.cost(run) is None:
                training.add(estimate.get("hours"))
            own = _Total("of them")
            for hours in evaluations.missing(run):
                own.add(hours)
                evaluating.add(hours)
            parts.append(f"evaluations {own}")
        tasks = ", ".join(run.tasks) or "no tasks"
        described = [f"{run.title}: {Path(run.recipe).stem} {run.preset}, {tasks}", state, *parts]
        lines.append(f"{run.key}  {'; '.join(described)}")
    for name, reason in plan.left_out.items():
        lines.append(f"{'':16}  {name}: left out, {reason}")
    for name, missing in commands.items():
        if missing:
            lines.append(
                f"corpus {name} is made first, by {len(missing)} commands; --dry-run measures "
                f"once it exists:"
            )
            lines += [f"    medvl {shlex.join(arguments)}" for arguments in missing]
    counts = [store.state(run) for run in plan.runs]
    states = ", ".join(
        f"{counts.count(state)} {state}" for state in ("finished", "failed", "to do")
    )
    states += f", {len(errors)} with wrong settings" if errors else ""
    lines.append(f"{len(counts)} runs: {states}. To do, one after the other: training {training};")
    lines.append(f"evaluations {evaluating}, as long as those of finished runs.")
    return "\n".join(lines)


def estimate_run(
    run: Run,
    store: Store,
    known: Mapping[tuple[Any, ...], Estimate],
    seconds: float,
    report: Callable[[str], Any],
) -> Estimate:
    """Return hours and memory of a run's training: its own, those of another seed, or what the
    doctor measures.
    """
    cost = store.cost(run)
    if cost is not None:
        return _of_cost(cost, "measured")
    if _alike(run) in known:
        return known[_alike(run)]
    path = store.out / _FILE
    estimates: dict[str, Any] = (
        json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    )
    if "hours" not in estimates.get(run.key, {}) and seconds > 0:
        report(f"measuring {run.title}")
        estimates[run.key] = _examine_apart(run, store, seconds)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(estimates, indent=1) + "\n")
    estimate: Estimate = estimates.get(run.key, {})
    return estimate


@dataclasses.dataclass
class _Total:
    """Sum of hours, and the number of those that are not known."""

    what: str
    hours: float = 0.0
    unknown: int = 0

    def add(self, hours: float | None) -> None:
        self.hours += hours or 0.0
        self.unknown += hours is None

    def __str__(self) -> str:
        return f"{self.hours:.2f} h" + (
            f" and {self.unknown} {self.what} without an estimate" if self.unknown else ""
        )


class _EvaluationHours:
    """Hours of the evaluations of a plan, as finished ones of the same task and corpus took.

    Those of the same system count if there are some, else the median of all systems.
    """

    def __init__(self, plan: Plan, store: Store) -> None:
        self._store = store
        self._finished: dict[tuple[str, str], list[tuple[str, float]]] = {}
        for run in plan.runs:
            for _, task, folder in store.evaluations(run):
                if (seconds := read_seconds(folder)) is not None:
                    self._finished.setdefault((run.corpus.name, task), []).append(
                        (run.name, seconds / 3600)
                    )

    def missing(self, run: Run) -> Iterator[float | None]:
        """Yield the hours of each evaluation of a run that is to do; None where none like it has
        finished.
        """
        for _, task, folder in self._store.evaluations(run):
            if not is_evaluated(folder):
                times = self._finished.get((run.corpus.name, task), [])
                same = [hours for name, hours in times if name == run.name]
                yield statistics.median(same or [hours for _, hours in times]) if times else None


def _known_costs(plan: Plan, store: Store) -> dict[tuple[Any, ...], Estimate]:
    costs = ((run, store.cost(run)) for run in plan.runs)
    return {
        _alike(run): _of_cost(cost, "from another run") for run, cost in costs if cost is not None
    }


def _alike(run: Run) -> tuple[Any, ...]:
    """Return what runs of equal cost share."""
    train = run.settings["train"]
    return (
        run.name,
        run.corpus.name,
        run.start,
        train["steps"],
        train["epochs"],
        train["global_batch"],
        run.share,
    )


def _of_cost(cost: Cost, source: str) -> Estimate:
    seconds = cost.train_seconds or cost.wall_seconds
    return {"hours": seconds / 3600, "memory_gb": cost.peak_memory_gb, "source": source}


def _examine_apart(run: Run, store: Store, seconds: float) -> Estimate:
    """Return the estimate of a process of its own, whose peak memory is that of this run alone."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(_examine, run, store, seconds).result()
        except BrokenProcessPool:
            return {"error": "the measurement was killed, probably for lack of memory"}


def _examine(run: Run, store: Store, seconds: float) -> Estimate:
    """Return the doctor's estimate, or why there is none."""
    from medvl.train import examine

    waits = find_references(run.settings)
    if any(not (store.out / "runs" / run.needs[name] / COST).is_file() for name in waits):
        return {"error": f"starts from {', '.join(sorted(waits))}"}
    store.out.mkdir(parents=True, exist_ok=True)
    log = logging.getLogger("medvl")
    level = log.level
    log.setLevel(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            prepared = prepare_run(run, store)
            measured = examine(prepared, seconds)
    except Exception as error:  # a system of another package may raise anything
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    finally:
        log.setLevel(level)
    train = run.settings["train"]
    epoch = -(-prepared.data.train.steps_per_epoch // train["accumulate"])
    steps = min(length for length in (train["steps"], (train["epochs"] or 0) * epoch) if length)
    hours = steps * prepared.data.train.global_batch * train["accumulate"] / measured.rate / 3600
    return {"hours": hours, "memory_gb": measured.peak_gb / 1.073741824, "source": "doctor"}


def _text(estimate: Estimate) -> str:
    if "error" in estimate:
        return f"no estimate: {estimate['error']}"
    if not estimate:
        return "no estimate"
    return f"{estimate['hours']:.2f} h, {estimate['memory_gb']:.1f} GiB ({estimate['source']})"
