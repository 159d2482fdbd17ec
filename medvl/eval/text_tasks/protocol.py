"""Evaluation of a text encoder by fine-tuning on text tasks.

Protocol "text_tasks", version 2:

* One linear layer on the last hidden states; the whole encoder is trained with it. Tags are
  predicted at the first piece of each given word; words that were truncated count as the first tag
  (no entity).
* The attention has a dropout of 0.1, whatever the pretraining had; "attention_dropout" of the
  results is its value, None for an encoder without it. The other dropout is the encoder's.
* Learning rate, batch size and epochs are chosen from the grid by the metric on the dev split, with
  the first seed. A grid of one setting is not searched.
* The metric of a task is the mean over the seeds. Seeds change the head, dropout and the order of
  examples; with random weights also the encoder. Its standard deviation over seeds is the row
  "..._sd".
* Baselines without an encoder are rows of their own, from the same training examples.
* "difference" rows compare with a second encoder, or with the best baseline, on the same resamples.
* Intervals: documents are resampled where they are known, else examples. They do not include the
  choice of seeds.
* "blurb" is the mean of the means of BLURB's groups of tasks, within each resample of all test sets
  (`aggregate`).

Letters: N examples, R resamples.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from medvl.common.config_io import check_within
from medvl.common.seeding import seeded
from medvl.data.text_tasks.read import Splits, available_tasks, read_text_task
from medvl.data.text_tasks.tasks import TASKS, RelationText, Split, TextExample, TextTask
from medvl.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from medvl.encoders import TextEncoder, create_text_encoder
from medvl.encoders.pretrained import Pretrained
from medvl.errors import ConfigError, CorpusError, EvaluationError
from medvl.eval.core.metric_rows import MetricGroup, MetricRow, measure
from medvl.eval.core.open import load_model, unsupported_model
from medvl.eval.core.results import Results, checkpoint_sha256
from medvl.eval.text_tasks.finetune import (
    FinetuneGrid,
    FinetuneSettings,
    encode_task,
    finetune,
    predict,
)
from medvl.eval.text_tasks.metrics import (
    Predicted,
    ScoredTask,
    Summed,
    baselines,
    difference,
    mean_over_seeds,
    score_rows,
    summed_metric,
)
from medvl.models.checkpoint_folder import find_checkpoint
from medvl.models.factory import get_tokenizer
from medvl.models.language.base import TextPool

PROTOCOL = "text_tasks"
PROTOCOL_VERSION = 2


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EvaluatedEncoder:
    """A text encoder to fine-tune, with its vocabulary."""

    name: str
    make: Callable[[int], TextEncoder]
    """Seed -> a new encoder; the same weights for every seed unless they are random."""
    tokenizer: Callable[[int], Tokenizer]
    """Maximum length -> tokenizer."""
    max_tokens: int
    attention_dropout: float | None = None
    """Dropout of the attention in fine-tuning; None for a backbone without this setting."""
    sha256: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TextTaskOptions:
    """Settings of the evaluation."""

    grid: FinetuneGrid = dataclasses.field(default_factory=FinetuneGrid)
    seeds: int | None = None
    """fine-tunings with the chosen setting; None for the task's number, `TextTask.seeds`"""
    relation_form: RelationText = "dummies"
    relation_pool: TextPool = "first"
    train_limit: int | None = None
    """maximum number of training examples, from the start; None for all"""
    autocast: torch.dtype | None = None
    resamples: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        check_within(self, "[1, inf)", "seeds", "train_limit")
        if self.relation_pool == "tokens":
            raise ConfigError(
                "relations are read from the first token, mentions or starts", "unknown_name"
            )

    def described(self) -> Mapping[str, Any]:
        """Return the settings as JSON values."""
        return dataclasses.asdict(self) | {"autocast": self.autocast and str(self.autocast)}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TaskRun:
    """Predictions of one encoder on the test split of a task."""

    settings: FinetuneSettings
    dev: float | None
    """Metric of the chosen settings on the dev split; None without a search."""
    predictions: tuple[Predicted, ...]
    """Predictions of each seed."""
    metrics: tuple[Summed, ...]
    cut: int
    """Test words without a token."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TextTaskResult:
    """Results of all tasks, with the test examples and the predictions of each seed."""

    results: Results
    examples: Mapping[str, Sequence[TextExample]]
    runs: Mapping[str, TaskRun]
    others: Mapping[str, TaskRun]
    """Runs of the second encoder, none without one."""
    baselines: Mapping[str, Mapping[str, Predicted]]

    def predictions(self) -> Iterator[Mapping[str, Any]]:
        """Yield one JSON line per test example: task, key, document, label, and the prediction
        of each seed.
        """
        for name, examples in self.examples.items():
            for row, example in enumerate(examples):
                predictions = [predicted[row] for predicted in self.runs[name].predictions]
                yield {
                    "task": name,
                    "key": example.key,
                    "document": example.document,
                    "label": example.label,
                    "predictions": predictions,
                }


def evaluate_text_tasks(
    encoder: EvaluatedEncoder,
    root: Path | str,
    tasks: Sequence[str],
    options: TextTaskOptions | None = None,
    *,
    other: EvaluatedEncoder | None = None,
    device: str = "cpu",
    report: Callable[[str], None] = lambda line: None,
) -> TextTaskResult:
    """Evaluate a text encoder by the protocol of this module.

    Args:
        encoder: fine-tuned on each task.
        root: folder with the data, see `medvl.data.text_tasks.read`.
        tasks: names from `medvl.data.text_tasks.tasks.TASKS`.
        options: settings; default: the paper's rates, batch sizes and numbers of seeds, and 20
            epochs.
        other: a second encoder with the same settings and seeds, for rows of differences, such as
            the same encoder with random weights.
        device: where to train.
        report: called with a line after each fine-tuning and after each task.

    Raises:
        ConfigError: a task is unknown, or the encoder's vocabulary cannot encode it.
        CorpusError: the data of a task is missing or malformed.
        EvaluationError: a task has no training, dev or test examples.
    """
    options = options or TextTaskOptions()
    _check_names(tasks)
    # all, before the first training
    splits_of = {name: _splits(root, TASKS[name], options) for name in tasks}
    examples = {name: splits["test"] for name, splits in splits_of.items()}
    without = {
        name: baselines(TASKS[name], of["train"], of["test"]) for name, of in splits_of.items()
    }
    rows: list[MetricRow] = []
    runs: dict[str, TaskRun] = {}
    others: dict[str, TaskRun] = {}
    scored: dict[str, ScoredTask] = {}
    for name, splits in splits_of.items():
        task = TASKS[name]
        runs[name] = _run(encoder, task, splits, options, torch.device(device), report)
        if other is not None:
            others[name] = _run(other, task, splits, options, torch.device(device), report)
        second = others.get(name)
        rows += _rows(task, splits["test"], runs[name], second, without[name], options)
        scored[name] = ScoredTask(
            metrics=runs[name].metrics,
            other=None if second is None else second.metrics,
            documents=[example.document for example in examples[name]],
        )
        report(f"{name}: {task.metric} {rows_value(rows, task):.3f}, {runs[name].settings}")
    rows += score_rows(scored, resamples=options.resamples, seed=options.seed)
    results = Results(
        protocol=PROTOCOL,
        protocol_version=PROTOCOL_VERSION,
        rows=tuple(rows),
        config={"tasks": list(tasks), **options.described(), **_encoders(encoder, other)},
        inputs={"checkpoint": encoder.sha256, "other": None if other is None else other.sha256},
        details={name: _details(TASKS[name], run, others.get(name)) for name, run in runs.items()},
    )
    return TextTaskResult(
        results=results, examples=examples, runs=runs, others=others, baselines=without
    )


def complete_tasks(root: Path | str, options: TextTaskOptions) -> tuple[list[str], dict[str, str]]:
    """Return the tasks below `root` that can be evaluated, and task -> reason of those that cannot.

    These lack a split or files, or do not have the requested form of relations. Raises CorpusError
    for damaged files.
    """
    complete: list[str] = []
    left_out: dict[str, str] = {}
    for name in available_tasks(root):
        try:
            _splits(root, TASKS[name], options)
        except (ConfigError, CorpusError, EvaluationError) as error:
            if error.code not in ("missing", "not_found", "unsupported"):
                raise
            left_out[name] = str(error)
        else:
            complete.append(name)
    return complete, left_out


def rows_value(rows: Sequence[MetricRow], task: TextTask) -> float:
    """Return the value of a task's main row."""
    return next(row.value for row in rows if row.metric == task.metric and row.target == task.name)


def _check_names(tasks: Sequence[str]) -> None:
    for name in tasks:
        if name not in TASKS:
            raise ConfigError(
                f"no task {name!r}; the tasks are {', '.join(TASKS)}", "unknown_name", field="task"
            )


def _splits(root: Path | str, task: TextTask, options: TextTaskOptions) -> Splits:
    splits = dict(read_text_task(root, task, options.relation_form))
    if task.evaluation_only:
        source = read_text_task(root, TASKS[task.evaluation_only], options.relation_form)
        splits = {
            "train": source.get("train", []),
            "dev": source.get("dev", []),
            "test": splits.get("test", []),
        }
    needed: tuple[Split, ...] = ("train", "dev", "test")
    missing = [split for split in needed if not splits.get(split)]
    if missing:
        message = (
            f"{task.name} has no {' and no '.join(missing)} split in {root}; see "
            f"data_cards/blurb.md"
        )
        raise EvaluationError(message, "missing", field="data")
    if (
        task.kind == "relations"
        and options.relation_pool != "first"
        and splits["train"][0].spans is None
    ):
        message = f"{task.name} does not say where its mentions are; use the first token"
        raise ConfigError(message, "unsupported", field="relation_pool")
    if options.train_limit is not None:
        splits["train"] = splits["train"][: options.train_limit]
    return splits


def _encoders(encoder: EvaluatedEncoder, other: EvaluatedEncoder | None) -> Mapping[str, Any]:
    return {"attention_dropout": encoder.attention_dropout, "other": other and other.name}


def _run(
    encoder: EvaluatedEncoder,
    task: TextTask,
    splits: Splits,
    options: TextTaskOptions,
    device: torch.device,
    report: Callable[[str], None],
) -> TaskRun:
    tokenizer = encoder.tokenizer(min(task.max_tokens, encoder.max_tokens))
    tagging = task.kind in ("entities", "words")
    pool: TextPool = (
        "tokens" if tagging else options.relation_pool if task.kind == "relations" else "first"
    )
    mentions = pool in ("mentions", "starts")
    encoded = {
        split: encode_task(task, rows, tokenizer, mentions=mentions)
        for split, rows in splits.items()
    }

    def score(settings: FinetuneSettings, seed: int, split: Split) -> tuple[Predicted, Summed]:
        model = finetune(
            lambda: encoder.make(seed),
            encoded["train"],
            settings,
            pool=pool,
            seed=seed,
            device=device,
            autocast=options.autocast,
        )
        predicted = predict(model, encoded[split], autocast=options.autocast)
        metric = summed_metric(task, _labels(splits[split]), predicted)
        report(
            f"{task.name}, {encoder.name}, {settings}, seed {seed}: {task.metric} "
            f"{metric():.3f} on {split}"
        )
        return predicted, metric

    settings, dev = _chosen(list(options.grid), lambda each: score(each, options.seed, "dev")[1]())
    scored = [
        score(settings, options.seed + number, "test")
        for number in range(options.seeds or task.seeds)
    ]
    predictions, metrics = zip(*scored, strict=True)
    return TaskRun(
        settings=settings,
        dev=dev,
        predictions=predictions,
        metrics=metrics,
        cut=encoded["test"].cut,
    )


def _chosen(
    grid: Sequence[FinetuneSettings], dev_metric: Callable[[FinetuneSettings], float]
) -> tuple[FinetuneSettings, float | None]:
    """Return the settings with the best dev metric (undefined counts as worst), the first of
    equals.
    """
    if not grid:
        raise ConfigError("the grid has no settings", "empty", field="grid")
    if len(grid) == 1:
        return grid[0], None
    values = [dev_metric(settings) for settings in grid]
    best = max(
        range(len(grid)), key=lambda index: (values[index] == values[index], values[index], -index)
    )
    return grid[best], values[best]


def _rows(
    task: TextTask,
    test: Sequence[TextExample],
    run: TaskRun,
    other: TaskRun | None,
    without: Mapping[str, Predicted],
    options: TextTaskOptions,
) -> list[MetricRow]:
    def row(target: str) -> MetricRow:
        return MetricRow(metric=task.metric, target=target, n=len(test))

    plain = {
        name: summed_metric(task, _labels(test), predicted) for name, predicted in without.items()
    }
    groups: list[MetricGroup] = [mean_over_seeds(run.metrics, row(task.name))]
    groups += [metric.group(row(f"{task.name}: {name}")) for name, metric in plain.items()]
    best = max(plain, key=lambda name: _defined(plain[name]()))
    groups.append(difference(run.metrics, [plain[best]], row(f"{task.name} - {best}")))
    if other is not None:
        groups.append(mean_over_seeds(other.metrics, row(f"{task.name}: other encoder")))
        groups.append(difference(run.metrics, other.metrics, row(f"{task.name} - other encoder")))
    documents = [example.document for example in test]
    rows = list(
        measure(groups, len(test), resamples=options.resamples, seed=options.seed, groups=documents)
    )
    if len(run.metrics) > 1:
        spread = float(np.std([metric() for metric in run.metrics], ddof=1))
        rows.append(
            MetricRow(
                metric=f"{task.metric}_sd", target=task.name, n=len(run.metrics), value=spread
            )
        )
    return rows


def _labels(examples: Sequence[TextExample]) -> Predicted:
    return [example.label for example in examples]


def _defined(value: float) -> float:
    return value if value == value else -1.0


def _details(task: TextTask, run: TaskRun, other: TaskRun | None = None) -> Mapping[str, Any]:
    described = {
        "metric": task.metric,
        "settings": dataclasses.asdict(run.settings),
        "dev": run.dev,
        "seeds": [metric() for metric in run.metrics],
        "truncated_test_words": run.cut,
    }
    return described if other is None else {**described, "other": _details(task, other)}


# Text encoders for an evaluation: of a checkpoint, by name, or with random weights.

ATTENTION_DROPOUT = 0.1
"""Dropout of the attention in fine-tuning."""
_FIELD = "attention_probs_dropout_prob"


def encoder_of_checkpoint(checkpoint: Path, *, random: bool = False) -> EvaluatedEncoder:
    """Return the text encoder of a checkpoint, or the same encoder with random weights.

    Its attention has `ATTENTION_DROPOUT`, also where it was trained with another, such as 0 for
    packed texts.

    Raises CheckpointError for a checkpoint that cannot be loaded, ConfigError for a system without
    a text encoder or a checkpoint without a vocabulary.
    """
    model = load_model(checkpoint, "cpu")
    encoder = getattr(model, "text_encoder", None)
    if not isinstance(encoder, TextEncoder):
        raise unsupported_model(checkpoint, model, "give a system with a text encoder")
    vocabulary = find_checkpoint(checkpoint) / "tokenizer"
    if not vocabulary.is_dir():
        raise ConfigError(f"{checkpoint} has no vocabulary", "missing", field="checkpoint")
    dropout = _attention_dropout(encoder)
    create = functools.partial(create_text_encoder, **{**encoder.config, **dropout})
    return EvaluatedEncoder(
        name=f"{model.name} ({checkpoint}{', random weights' if random else ''})",
        make=functools.partial(_make, create, None if random else encoder.state_dict()),
        tokenizer=lambda length: load_tokenizer(vocabulary, max_tokens=length),
        max_tokens=encoder.max_tokens,
        attention_dropout=dropout.get(_FIELD),
        sha256=None if random else checkpoint_sha256(checkpoint),
    )


def encoder_by_name(
    name: str,
    vocabulary: Path | None,
    weights: Pretrained | None,
    arguments: Mapping[str, Any] | None = None,
) -> EvaluatedEncoder:
    """Return a text encoder by name.

    Its attention has `ATTENTION_DROPOUT`, unless the arguments have another value.

    Args:
        name: a preset, or a folder in Hugging Face's layout.
        vocabulary: folder of its vocabulary; None for the published one of a preset.
        weights: a file, a folder or those on the hub; True for the published ones of a preset, None
            for random ones.
        arguments: further arguments of `create_text_encoder`.

    Raises ConfigError for unknown names and arguments, WeightsError for weights that are not there
    or do not fit.
    """

    def tokenizer(length: int | None = None) -> Tokenizer:
        if vocabulary is None:
            return get_tokenizer(name, max_tokens=length)
        return load_tokenizer(vocabulary, max_tokens=length)

    known = tokenizer()
    create = functools.partial(
        create_text_encoder,
        name,
        vocab_size=known.vocab_size,
        pad_id=known.pad_id,
        **(arguments or {}),
    )
    with seeded(0):
        first = create(pretrained=weights or False)
    settings = {**_attention_dropout(first), **(arguments or {})}
    create = functools.partial(create, **settings)
    return EvaluatedEncoder(
        name=f"{name}{'' if weights else ', random weights'}",
        make=functools.partial(_make, create, first.state_dict() if weights else None),
        tokenizer=tokenizer,
        max_tokens=first.max_tokens,
        attention_dropout=settings.get(_FIELD),
    )


def _attention_dropout(encoder: TextEncoder) -> dict[str, float]:
    """Return the argument that sets the attention's dropout; none for a backbone without it,
    such as CLIP's.
    """
    return (
        {_FIELD: ATTENTION_DROPOUT}
        if hasattr(getattr(encoder.backbone, "config", None), _FIELD)
        else {}
    )


def _make(
    create: Callable[[], TextEncoder], state: Mapping[str, Any] | None, seed: int
) -> TextEncoder:
    """Return a new encoder with random numbers from the seed, and with these weights if there
    are any.
    """
    with seeded(seed):
        encoder = create()
    if state is not None:
        encoder.load_state_dict(state)
    return encoder
