"""The base class of evaluations, what they open, and their tasks and columns in `medvl benchmark`.

An evaluation of one checkpoint on one folder of shards extends `ModelEvaluation`; others extend
`Evaluation`. `medvl eval NAME`, its page, its columns in `medvl benchmark` and its place in `medvl
compare` are made from the class.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from medvl.common.ranks import rank_and_world
from medvl.data.shards.format import Manifest
from medvl.data.shards.source import ShardSource
from medvl.errors import ConfigError, EvaluationError
from medvl.eval.core.metric_rows import MetricGroup, MetricRow, measure
from medvl.eval.core.open import OutputOptions, RunOptions, Setup, open_source
from medvl.eval.core.results import (
    LineFields,
    Lines,
    OutputFolder,
    PageHeader,
    Results,
    ScoredClasses,
    WritePage,
    checkpoint_sha256,
    format_table,
    publish,
)
from medvl.eval.html.page import Page, Section, header_facts, headline, write_page
from medvl.eval.html.tables import Table, metric_cell
from medvl.models.base import System


@dataclasses.dataclass(frozen=True, kw_only=True)
class Column:
    """A column of the table of a benchmark: one metric of a task."""

    title: str
    metric: str
    targets: tuple[str, ...]
    """The first of these that the results have, such as the mean of five findings, else of all."""
    subgroup: str = ""
    """Subgroup of the row, or its beginning, such as "sex: "; empty for all items. A baseline's
    ("baseline: ") is shown and not ranked.
    """
    higher_is_better: bool = True
    baseline: bool = False
    """Whether the row is that of a baseline, which is the same for all systems, also without
    such a subgroup.
    """

    @property
    def is_baseline(self) -> bool:
        """Whether the row is that of a baseline, by its subgroup or its setting."""
        return self.baseline or self.subgroup.startswith("baseline: ")


MEAN = ("macro_competition", "macro")
"""Targets of a mean over findings: over the five of the CheXpert competition, else over all."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A task of `medvl benchmark`: an evaluation with the settings of the benchmark."""

    columns: tuple[Column, ...]
    name: str = ""
    """Name of the task; empty for that of the evaluation."""
    fits: type | tuple[type, ...]
    """Systems whose checkpoints are evaluated."""
    needs: tuple[str, ...] = ()
    """Parts of a corpus, such as phrases, without which the task is left out."""
    data: Literal["pairs", "phrases", "changes", "questions", "choices", "reports"] = "pairs"
    """Part of the corpus that is evaluated on."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Settings of the evaluations of a benchmark."""

    random_start: bool = False
    """Evaluate the weights before the training as well."""
    resamples: int = 1000
    batch: int = 64
    workers: int = 0
    label_shares: tuple[float, ...] = (0.01,)
    """Shares of the training labels of the linear probes."""
    smoothing: float = 0.7
    """Smoothing of grounding maps, in cells."""
    sections: tuple[str, ...] = ("impression",)
    """Sections of the texts that fusion-encoders match and rank."""
    shortlist: int = 16
    """Candidates that a fusion-encoder ranks again."""
    shortlist_system: str = "convirt"
    """Dual-encoder that proposes the candidates."""

    def __post_init__(self) -> None:
        for name, least in {"resamples": 0, "batch": 1, "workers": 0, "shortlist": 1}.items():
            if (value := getattr(self, name)) < least:
                message = f"{name} must be at least {least}, got {value}"
                raise ConfigError(message, "out_of_range", field=name)
        for share in self.label_shares:
            if not 0 < share <= 1:
                message = f"label_shares must be above 0 and at most 1, got {share}"
                raise ConfigError(message, "out_of_range", field="label_shares")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """A trained checkpoint of a benchmark, and what it is evaluated on."""

    system: type[System]
    checkpoint: Path
    """The evaluated checkpoint."""
    origin: Path
    """Checkpoint of the training, whose patients are not evaluated: `checkpoint`, unless that has
    the weights before the training.
    """
    data: Path
    """Folder of the test shards of the task."""
    prompts: str
    """Prompt set of the corpus."""
    sections: tuple[str, ...]
    """Sections of the texts that the system was trained on; empty for all."""
    settings: EvaluationConfig
    model: Callable[[], Any]
    """Function that returns the model of `checkpoint`."""
    other: Callable[[str], Path]
    """Function that returns the checkpoint of another system of the benchmark, by name."""
    finetuned: Callable[[], Path]
    """Function that fine-tunes the checkpoint for the questions of the corpus, and returns the new
    one.
    """

    def labelled(self) -> ShardSource:
        """Open the data. Raises EvaluationError "unsupported" where it has no labels, as corpora of
        texts alone.
        """
        source = open_source(self.data, [self.origin])
        if not source.label_names:
            message = f"{source.folder} has no labels"
            raise EvaluationError(message, "unsupported", field="labels")
        return source


# What an evaluation reads and returns.


class Result(Protocol):
    """Metric rows and predictions of an evaluation."""

    @property
    def results(self) -> Results:
        """Rows of metrics, with the settings of the protocol."""

    def predictions(self) -> Iterable[Mapping[str, Any]]:
        """Yield one JSON object for each image, question or pair."""


@dataclasses.dataclass(frozen=True, slots=True)
class LineResult:
    """Metric rows that are computed from the lines of the predictions."""

    results: Results
    lines: Lines

    def predictions(self) -> Lines:
        """Return the lines."""
        return self.lines


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What an evaluation returns: a result, and how it is shown."""

    result: Result
    model: str
    """Name of the model on the page."""
    data: Manifest | str
    """Manifest or name of the data on the page."""
    page: WritePage | None = None
    """Writer of the page; None for no page."""
    table: str
    """Table that is printed."""


# The classes.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation(abc.ABC):
    """An evaluation of a model.

    The docstring of a subclass is the help of `medvl eval NAME`. Its documented fields are the
    command's options, beside those of `shared`.
    """

    name: ClassVar[str]
    """Name of the command, which `register_evaluation` sets."""
    protocols: ClassVar[tuple[str, ...]] = ()
    """Names of the protocols in its results, by which `medvl compare` finds it; empty for that of
    the command, with underscores.
    """
    lines: ClassVar[LineFields] = LineFields()
    """Fields of its predictions."""
    tasks: ClassVar[tuple[Task, ...]] = ()
    """Its tasks in `medvl benchmark`."""
    shared: ClassVar[type[OutputOptions]] = RunOptions
    """Options of output and computation."""
    divides_batches: ClassVar[bool] = False
    """Whether it divides the batches among the ranks of torchrun."""

    @abc.abstractmethod
    def output(self, options: OutputOptions) -> OutputFolder:
        """Return the folder of the results. Raises as `OutputOptions.folder`."""

    @abc.abstractmethod
    def run(self, setup: Setup) -> Outcome:
        """Open the model and the data, evaluate, and return the outcome."""

    @staticmethod
    def metric_groups(lines: Lines, results: Results) -> list[MetricGroup]:
        """Return metrics of any items, from their lines in `predictions.jsonl`.

        `medvl compare` computes paired differences, and metrics of subgroups, from them. Rows that
        need more than the lines have no paired difference.
        """
        return []

    @staticmethod
    def scored_classes(lines: Lines, results: Results) -> ScoredClasses | None:
        """Return scores and labels of classes, whose AUROC and average precision are further
        metrics; None without such.
        """
        return None

    @classmethod
    def columns(cls, task: Task, settings: EvaluationConfig) -> tuple[Column, ...]:
        """Return the columns of a task with the settings of a benchmark."""
        return task.columns

    @classmethod
    def for_trial(cls, task: Task, trial: Trial) -> "Evaluation":
        """Return the evaluation of a checkpoint in a benchmark.

        Raises EvaluationError "unsupported" where the system does not support it.
        """
        message = f"expected {cls.__name__} with tasks to define for_trial"
        raise EvaluationError(message, "unsupported", field="task")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelEvaluation(Evaluation):
    """An evaluation of one checkpoint on one folder of shards."""

    fits: ClassVar[tuple[type[System], ...]] = (System,)
    """Systems that it supports."""
    advice: ClassVar[str] = "give the checkpoint of another system"
    """What the error for other systems advises; {} is the checkpoint."""
    title: ClassVar[str] = ""
    """Title of the page; empty for the name."""

    checkpoint: Path
    """folder of a checkpoint, such as runs/convirt/best"""
    data: Path
    """folder of shards of patients that the model was not trained on"""

    @property
    def folder_name(self) -> str:
        """Name of the folder of the results."""
        return self.name.replace("-", "_")

    def output(self, options: OutputOptions) -> OutputFolder:
        """Return the folder of the results of the checkpoint."""
        return options.folder(self.checkpoint, self.folder_name)

    def run(self, setup: Setup) -> Outcome:
        """Open the checkpoint and the shards, and evaluate."""
        setup.check(self.checkpoint, self.fits, self.advice.format(self.checkpoint))
        source = setup.source(self.data, self.checkpoint)
        setup.settle(manifest=source.fingerprint)
        model = setup.model(self.checkpoint)
        result = self.evaluate(model, source, setup)
        return Outcome(
            result=result,
            model=self.model_name(model),
            data=source.manifest,
            page=self.page(result, source),
            table=self.table(result),
        )

    def model_name(self, model: Any) -> str:
        """Return the name of the model on the page."""
        return f"{model.name} ({self.checkpoint})"

    @classmethod
    def for_trial(cls, task: Task, trial: Trial) -> "Evaluation":
        """Return the evaluation of the checkpoint with its defaults."""
        return cls(checkpoint=trial.checkpoint, data=trial.data)

    @abc.abstractmethod
    def evaluate(self, model: Any, source: ShardSource, setup: Setup) -> Any:
        """Return the result: `results` and `predictions()`.

        Args:
            model: a system of `fits`, in eval mode on the device.
            source: the opened shards.
            setup: opens loaders and further models.
        """

    def score_lines(
        self,
        lines: Lines,
        setup: Setup,
        source: ShardSource,
        *,
        version: int = 1,
        config: Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> LineResult:
        """Return a result whose rows are `metric_groups` of the lines, with intervals.

        Args:
            lines: predictions, one for each item, with the fields of `self.lines`.
            setup: has the number of resamples.
            source: the evaluated shards.
            version: version of the protocol, `self.protocols[0]`.
            config: settings that affect the metrics.
            seed: seed of the resamples.
        """
        results = Results(
            protocol=self.protocols[0],
            protocol_version=version,
            rows=(),
            config={**(config or {}), "resamples": setup.resamples, "seed": seed},
            inputs={
                "checkpoint": checkpoint_sha256(self.checkpoint),
                "manifest": source.fingerprint,
            },
        )
        groups = [line[self.lines.group] for line in lines]
        rows = measure(
            self.metric_groups(lines, results),
            len(lines),
            resamples=setup.resamples,
            seed=seed,
            groups=groups,
        )
        return LineResult(dataclasses.replace(results, rows=tuple(rows)), lines)

    def table(self, result: Any) -> str:
        """Return the table that is printed: by default, of all rows."""
        return format_table(result.results.rows)

    def page(self, result: Any, source: ShardSource) -> WritePage | None:
        """Return the writer of the page; None for no page."""
        return functools.partial(self.write_page, result, source)

    def page_sections(self, result: Any, source: ShardSource) -> list[Section]:
        """Return the sections of the page: by default, one table of all rows."""
        rows: Sequence[MetricRow] = result.results.rows
        cells = [(row.name, str(row.n), metric_cell(row, bar=True)) for row in rows]
        return [Table(title="Metrics", columns=("Metric", "n", "Value"), rows=cells)]

    def write_page(self, result: Any, source: ShardSource, path: Path, header: PageHeader) -> Path:
        """Write the page of `page_sections` as one HTML file and return its path."""
        results: Results = result.results
        page = Page(
            title=f"{self.title or self.name}: {header.model}",
            subtitle=header.data,
            headlines=[headline(*one) for one in self.main_rows(results)],
            facts=header_facts(results, header, units="patients"),
            sections=self.page_sections(result, source),
            limits=(),
        )
        return write_page(page, path)

    def main_rows(self, results: Results) -> list[tuple[str, MetricRow]]:
        """Return titles and rows of the headlines: by default, of each column of the tasks."""
        rows = {(row.metric, row.target, row.subgroup): row for row in results.rows}
        columns = [column for task in self.tasks for column in task.columns]
        return [
            (column.title, rows[column.metric, target, column.subgroup])
            for column in columns
            for target in column.targets[:1]
            if (column.metric, target, column.subgroup) in rows
        ]


def run_evaluation(
    evaluation: Evaluation, options: OutputOptions | None = None
) -> tuple[Outcome, list[Path]]:
    """Run an evaluation and write its files.

    Args:
        evaluation: the evaluation with its options, such as
            `ZeroShot(checkpoint=(Path("runs/convirt/best"),), data=Path("shards/test"))`.
        options: output and computation; default those of the command.

    Returns the outcome and the paths of the files; no paths on further ranks of torchrun.

    Raises ConfigError, EvaluationError, CheckpointError, ShardError and SplitError.
    """
    options = options or evaluation.shared()
    setup = Setup(options, evaluation.output(options))
    outcome = evaluation.run(setup)
    if rank_and_world()[0] > 0:
        return outcome, []
    assert setup.folder is not None, "run() decides the folder by setup.settle()"
    paths = publish(
        outcome.result.results,
        setup.folder,
        predictions=outcome.result.predictions(),
        write_page=outcome.page,
        model=outcome.model,
        data=outcome.data,
        replace=options.replace,
    )
    return outcome, paths
