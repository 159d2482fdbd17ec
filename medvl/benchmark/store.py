"""Folder of results: a folder for each run, named by its key, with its weights, cost and
evaluations.

    DIR/runs/KEY/run.json             the run (`medvl.benchmark.plan.Run`)
    DIR/runs/KEY/run/                 checkpoints and metrics.jsonl of the training
    DIR/runs/KEY/cost.json            cost of the finished training
    DIR/runs/KEY/failure.json         why the training failed
    DIR/runs/KEY/trained/TASK-HASH/   results.json and predictions.jsonl, or refusal.json; `start`
                                      beside `trained`
    DIR/results.jsonl                 every metric of every run of the benchmark, a line each

An evaluation's hash is that of its settings, so that other settings repeat the evaluation and not
the training.
"""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from medvl.benchmark.settings import Plan, Run
from medvl.common.config_io import from_dict, to_dict
from medvl.common.files import subfolder, write_atomic
from medvl.common.untrusted import parse_json
from medvl.errors import ConfigError, EvaluationError
from medvl.eval import Results, read_results

Weights = Literal["trained", "start"]
State = Literal["finished", "failed", "to do"]
COST = "cost.json"
FAILURE = "failure.json"
RUN = "run.json"
REFUSAL = "refusal.json"
SECONDS = "seconds.json"
_RESULTS = "results.json"
_PROTOCOL_VERSIONS = {"matching": 2, "retrieval": 3, "reranking": 3, "reports": 3}
"""Versions above 1 of the protocols of tasks: an evaluation of an earlier one is repeated."""
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """Cost of a finished training."""

    parameters: int
    resumed: bool
    wall_seconds: float
    """Time of the process that finished the training."""
    cpu_seconds: float
    steps: int
    pairs_per_second: float | None
    train_seconds: float | None
    """Steps times the median time of a step."""
    peak_memory_gb: float
    device: str
    terms: tuple[str, ...]
    """Terms of the loss."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _FailedTraining:
    error: str


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Reason why an evaluation has no results."""

    reason: str
    failed: bool
    """True for an error, False where the task does not apply to the system."""


@dataclasses.dataclass(frozen=True)
class Store:
    """Folder of a benchmark's results."""

    out: Path

    def folder(self, run: Run) -> Path:
        """Return the folder of a run."""
        return self.out / "runs" / run.key

    def write_runs(self, plan: Plan) -> None:
        """Write the descriptions of the runs, which processes on other machines read."""
        for run in plan.runs:
            path = self.folder(run) / RUN
            text = json.dumps(to_dict(run), indent=1) + "\n"
            if not path.is_file() or path.read_text(encoding="utf-8") != text:
                subfolder(self.out, "runs", run.key)
                write_atomic(path, text)

    def evaluation(self, run: Run, weights: Weights, task: str) -> Path:
        """Return the folder of an evaluation."""
        return self.folder(run) / weights / f"{task}-{_evaluation_hash(run, task)}"

    def evaluations(self, run: Run) -> Iterator[tuple[Weights, str, Path]]:
        """Yield (weights, task, folder) of all evaluations of a run."""
        kinds: tuple[Weights, ...] = (
            ("trained", "start") if run.evaluation.random_start else ("trained",)
        )
        for weights in kinds:
            for task in run.tasks:
                yield weights, task, self.evaluation(run, weights, task)

    def state(self, run: Run) -> State:
        """Return whether a run is finished, with all its evaluations, or has failed."""
        folder = self.folder(run)
        if (folder / FAILURE).is_file():
            return "failed"
        done = (folder / COST).is_file() and all(
            is_evaluated(path) for *_, path in self.evaluations(run)
        )
        return "finished" if done else "to do"

    def failure(self, run: Run) -> str | None:
        """Return why the training of a run failed; None if it did not."""
        path = self.folder(run) / FAILURE
        return read_stored(_FailedTraining, path).error if path.is_file() else None

    def clear_failures(self, run: Run) -> None:
        """Remove the failures of a run and of its evaluations, so that they are repeated."""
        (self.folder(run) / FAILURE).unlink(missing_ok=True)
        for *_, folder in self.evaluations(run):
            refusal = read_evaluation(folder)
            if isinstance(refusal, Refusal) and refusal.failed:
                (folder / REFUSAL).unlink()

    def cost(self, run: Run) -> Cost | None:
        """Return the cost of a trained run."""
        path = self.folder(run) / COST
        return read_stored(Cost, path) if path.is_file() else None

    def write_lines(self, runs: Sequence[Run]) -> Path:
        """Write every metric of every run into results.jsonl."""
        lines = []
        for run in runs:
            about = {
                "run": run.key,
                "system": run.name,
                "corpus": run.corpus.name,
                "seed": run.seed,
            }
            about |= {"start": run.start, "share": run.share}
            for weights, task, folder in self.evaluations(run):
                evaluation = read_evaluation(folder)
                if isinstance(evaluation, Results):
                    rows = (dataclasses.asdict(row) for row in evaluation.rows)
                    lines += [about | {"weights": weights, "task": task} | row for row in rows]
        text = "".join(
            json.dumps({name: _json(value) for name, value in line.items()}) + "\n"
            for line in lines
        )
        return write_atomic(self.out / "results.jsonl", text)


def read_run(folder: Path) -> Run:
    """Read the run of a folder. Raises ConfigError where it has none."""
    path = folder / RUN
    if not path.is_file():
        raise ConfigError(
            f"{folder} has no {RUN}; it is not a run of a benchmark", "not_found", field="run"
        )
    return read_stored(Run, path)


def stored_runs(out: Path) -> Iterator[Run]:
    """Yield the runs of a folder of results, without those that cannot be read."""
    for path in sorted(out.glob(f"runs/*/{RUN}")):
        with contextlib.suppress(ConfigError):
            yield read_run(path.parent)


def read_stored(cls: type[_T], path: Path) -> _T:
    """Read a JSON file of the store as a dataclass. Raises ConfigError where it is damaged or of
    another version.
    """
    repeat = "remove it, and the same command makes it anew"
    try:
        return from_dict(cls, parse_json(path.read_bytes()))
    except ValueError as error:
        raise ConfigError(
            f"{path} is damaged ({error}); {repeat}", "malformed", field="out"
        ) from None
    except ConfigError as error:
        message = f"{path} is of another version of medvl ({error}); {repeat}"
        raise ConfigError(message, "version", field="out") from None


def is_evaluated(folder: Path) -> bool:
    """Return whether an evaluation is done, has failed or does not apply."""
    # the seconds are written last
    done = (folder / SECONDS).is_file() and (folder / _RESULTS).is_file()
    return done or (folder / REFUSAL).is_file()


def read_evaluation(folder: Path) -> Results | Refusal | None:
    """Return the results of an evaluation, or why there are none; None where it was not made.

    Raises ConfigError or EvaluationError where a file is damaged or of another version.
    """
    if (folder / REFUSAL).is_file():
        return read_stored(Refusal, folder / REFUSAL)
    try:
        return read_results(folder) if (folder / _RESULTS).is_file() else None
    except EvaluationError as error:
        message = f"{error}; remove {folder}, and the same command evaluates again"
        raise EvaluationError(message, error.code, field="out") from None


def read_seconds(folder: Path) -> float | None:
    """Return the seconds that an evaluation took; None where it has no results."""
    path = folder / SECONDS
    return float(path.read_text(encoding="utf-8")) if path.is_file() else None


def read_records(run_dir: Path) -> list[dict[str, Any]]:
    """Return the records of a training; none where it has not begun. A last line that was cut
    off is left out.
    """
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _evaluation_hash(run: Run, task: str) -> str:
    """Return the hash of the settings that an evaluation depends on, besides the weights."""
    given = to_dict(run.evaluation)
    common = {name: given[name] for name in ("resamples",)}
    own = {
        "grounding": ("smoothing",),
        "probe": ("label_shares",),
        "matching": ("sections",),
        "reranking": ("sections", "shortlist", "shortlist_system"),
    }.get(task, ())
    common |= {name: given[name] for name in own}
    if task == "reranking":
        common["shortlist_run"] = run.needs.get(run.evaluation.shortlist_system)
    if task == "questions":
        common |= {
            "steps": run.budget.steps,
            "finetune_steps": run.budget.finetune_steps,
            "batch": run.budget.batch,
        }
    if task in _PROTOCOL_VERSIONS:
        common["protocol_version"] = _PROTOCOL_VERSIONS[task]
    if task == "reports" and run.corpus.reports == run.corpus.pairs:
        # generators and fusion-encoders compare the same images with other sections
        common["references"] = True
    corpus = to_dict(run.corpus)
    folders = {
        name: value
        for name, value in corpus.items()
        if name not in ("root", "make", "tokenizer", "extra_train")
    }
    relative = {
        name: value.removeprefix(f"{run.corpus.root}/") if isinstance(value, str) else value
        for name, value in folders.items()
    }
    commands = [to_dict(command) for command in run.commands if command.name == task]
    for command in commands:
        del command["columns"]  # what is shown of the results
    read = {
        "zero-shot": ("prompts",),
        "grounding": ("phrases",),
        "change": ("changes",),
        "questions": ("questions", "questions_valid"),
        "multiple-choice": ("choices",),
    }.get(task, ())
    inputs = relative if commands else {name: relative[name] for name in (*read, "pairs")}
    content = json.dumps([task, common, inputs, commands, run.budget.weights], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:8]


def _json(value: Any) -> Any:
    return None if isinstance(value, float) and value != value else value
