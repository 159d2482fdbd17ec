"""Page of text tasks: one table of all tasks beside their baselines, and examples of mistakes."""

import dataclasses
import functools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from medvl.data.text_tasks.tasks import TASKS, RelationText, TextExample
from medvl.encoders.presets import TEXT_PRESETS
from medvl.errors import ConfigError
from medvl.eval.core.metric_rows import MetricGroup, MetricRow
from medvl.eval.core.open import OutputOptions, Setup, resolve_device
from medvl.eval.core.results import (
    LineFields,
    Lines,
    OutputFolder,
    PageHeader,
    Results,
    at_items,
    format_table,
)
from medvl.eval.evaluation import Evaluation, Outcome
from medvl.eval.html.page import (
    Card,
    Cards,
    Deck,
    Page,
    Section,
    header_facts,
    headline,
    write_page,
)
from medvl.eval.html.tables import Cell, Table, metric_cell
from medvl.eval.registry import register_evaluation
from medvl.eval.text_tasks.finetune import FinetuneGrid
from medvl.eval.text_tasks.metrics import entity_spans, mean_over_seeds, summed_metric
from medvl.eval.text_tasks.protocol import (
    PROTOCOL,
    EvaluatedEncoder,
    TextTaskOptions,
    TextTaskResult,
    complete_tasks,
    encoder_by_name,
    encoder_of_checkpoint,
    evaluate_text_tasks,
)

_log = logging.getLogger(__name__)

_LIMITS = (
    "A research evaluation of a language encoder, not for clinical use.",
    "Intervals are over test examples; they do not include the choice of seeds or of training "
    "data.",
    "Test sets with few examples (BIOSSES 20, BioASQ 140) cannot separate encoders of similar "
    "quality.",
)
_NAMES = {
    "entity_f1": "entity F1",
    "macro_word_f1": "macro word F1",
    "micro_f1": "micro F1",
    "pearson": "Pearson",
    "accuracy": "accuracy",
}


def write_text_page(
    result: TextTaskResult, path: str | Path, header: PageHeader, *, examples: int = 5
) -> Path:
    """Write the page as one HTML file and return its path.

    Args:
        result: result of `evaluate_text_tasks`.
        path: path of the file; its folder is created if missing.
        header: display names of model and data, and the date.
        examples: mistakes shown for each task; 0 for none, such as for texts that may not be
            shared.
    """
    results = result.results
    tasks = list(result.runs)
    seeds = " or ".join(map(str, sorted({len(run.metrics) for run in result.runs.values()})))
    headlines = [
        headline(f"{name}, {_NAMES[TASKS[name].metric]}", _main_row(result, name))
        for name in tasks[:3]
    ]
    headlines = [headline(row.target, row) for row in _aggregate(result)[:1]] + headlines
    sections: list[Section] = [_score_table(result), _settings_table(result)]
    if examples:
        sections.append(_mistakes(result, examples))
    page = Page(
        title=f"Text tasks: {header.model}",
        subtitle=f"{header.data}; tasks: {len(tasks)}, seeds: {seeds}",
        headlines=headlines,
        facts=header_facts(results, header, units="documents"),
        sections=sections,
        limits=_LIMITS,
    )
    return write_page(page, path)


def _aggregate(result: TextTaskResult) -> list[MetricRow]:
    return [row for row in result.results.rows if row.metric == "blurb"]


def _main_row(result: TextTaskResult, name: str) -> MetricRow:
    return result.results.row(TASKS[name].metric, name)


def _score_table(result: TextTaskResult) -> Table:
    lines: list[Sequence[Cell | str]] = []
    for name in result.runs:
        metric = TASKS[name].metric
        of_task = [row for row in result.results.rows if row.metric == metric]
        for row in of_task:
            label, _, kind = row.target.partition(": ")
            if label == name:
                lines.append(
                    [
                        name if not kind else f"  {kind}",
                        _NAMES[metric],
                        metric_cell(row, bar=True),
                        f"{row.n:,}",
                    ]
                )
            elif row.target.startswith(f"{name} - "):
                lines.append(
                    [
                        f"  above {row.target.removeprefix(f'{name} - ')}",
                        "difference",
                        metric_cell(row),
                        "",
                    ]
                )
    lines += [[row.target, "BLURB", metric_cell(row), f"{row.n:,}"] for row in _aggregate(result)]
    caption = (
        "The mean over seeds with 95% intervals over test documents, then baselines that "
        "use no encoder."
    )
    return Table(
        title="Scores",
        columns=["", "Metric", "Score", "Test examples"],
        rows=lines,
        caption=caption,
    )


def _settings_table(result: TextTaskResult) -> Table:
    rows: list[Sequence[Cell | str]] = []
    for name in result.runs:
        for shown, run in ((name, result.runs[name]), ("  other encoder", result.others.get(name))):
            if run is not None:
                seeds = ", ".join(f"{metric():.3f}" for metric in run.metrics)
                dev = "not searched" if run.dev is None else f"{run.dev:.3f}"
                settings = run.settings
                rows.append(
                    [
                        shown,
                        f"{settings.lr:g}",
                        str(settings.batch),
                        str(settings.epochs),
                        dev,
                        seeds,
                    ]
                )
    return Table(
        title="Fine-tuning",
        columns=["", "Learning rate", "Batch", "Epochs", "Dev", "Test by seed"],
        rows=rows,
        caption="The settings with the best metric on the dev split, from the first seed.",
    )


def _mistakes(result: TextTaskResult, examples: int) -> Cards:
    decks = []
    for name, run in result.runs.items():
        guesses = run.predictions[0]
        wrong = [
            row
            for row, example in enumerate(result.examples[name])
            if guesses[row] != example.label
        ]
        if wrong and TASKS[name].kind != "similarity":
            shown = wrong[:: max(1, len(wrong) // examples)][:examples]
            cards = [_card(result.examples[name][row], guesses[row]) for row in shown]
            decks.append(
                Deck(title=f"{name}: {len(wrong):,} of {len(guesses):,}", cards=cards, good=False)
            )
    return Cards(
        title="Mistakes",
        decks=decks,
        caption="Of the first seed, evenly spaced in the order of the data.",
    )


def _card(example: TextExample, guess: str | float | tuple[str, ...]) -> Card:
    lines = [
        ("Text", _shown(example)),
        ("Label", _label(example, example.label)),
        ("Predicted", _label(example, guess)),
    ]
    return Card(title=example.key, pictures=(), choices=(), lines=lines, tags=())


def _shown(example: TextExample) -> str:
    words = isinstance(example.label, tuple) and len(example.label) == len(example.texts)
    text = " ".join(example.texts) if words else " | ".join(example.texts)
    return text if len(text) <= 240 else text[:239] + "…"


def _label(example: TextExample, label: str | float | tuple[str, ...]) -> str:
    """Return a label as text: of tags the words that have one."""
    if not isinstance(label, tuple):
        return str(label)
    if len(label) != len(example.texts) or len(example.texts) == 1:
        return ", ".join(label) or "none"
    spans = [" ".join(example.texts[start:end]) for start, end in sorted(entity_spans(label))]
    tagged = [word for word, tag in zip(example.texts, label, strict=True) if tag != "O"]
    return ", ".join(spans or tagged) or "none"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextEncoderOptions:
    """The text encoder: give exactly one of --checkpoint and --encoder."""

    checkpoint: Path | None = None
    """folder of a checkpoint of any system with a text encoder"""
    random_weights: bool = False
    """reinitialise the encoder of the checkpoint, as a baseline without pretraining"""
    encoder: str | None = None
    """name of a text encoder, or a folder in Hugging Face's layout"""
    tokenizer: Path | None = None
    """folder of the vocabulary of --encoder; default the published one of a preset"""
    pretrained: bool = False
    """use the published weights of --encoder"""
    text_weights: str | None = None
    """weights of --encoder: a file, a folder with one, or OWNER/NAME@COMMIT on the hub; default
    random ones
    """
    text_arguments: Mapping[str, bool | int | float | str] = dataclasses.field(default_factory=dict)
    """arguments of --encoder, such as num_hidden_layers 3 hidden_size 192"""

    def evaluated_encoder(self, *, random: bool) -> EvaluatedEncoder:
        """Open the encoder, with random weights if `random`.

        Raises ConfigError unless exactly one is given.
        """
        if (self.checkpoint is None) == (self.encoder is None):
            message = "expected --checkpoint or --encoder; give exactly one"
            raise ConfigError(message, "conflict", field="checkpoint")
        if self.checkpoint is not None:
            return encoder_of_checkpoint(self.checkpoint, random=random)
        assert self.encoder is not None, "one of both is given"
        if self.pretrained and self.text_weights is not None:
            message = "expected --pretrained or --text-weights, got both; give one"
            raise ConfigError(message, "conflict", field="text_weights")
        if self.tokenizer is None and self.encoder not in TEXT_PRESETS:
            message = "--encoder needs --tokenizer, the folder of its vocabulary, unless a preset"
            raise ConfigError(message, "missing", field="tokenizer")
        weights = None if random else self.text_weights or self.pretrained
        return encoder_by_name(self.encoder, self.tokenizer, weights, dict(self.text_arguments))


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinetuneOptions:
    """Grid of fine-tuning settings, of which the best one on the dev split is used, and the
    input of the head.
    """

    lrs: tuple[float, ...] = (1e-5, 3e-5, 5e-5)
    """learning rates"""
    batches: tuple[int, ...] = (16, 32)
    """batch sizes"""
    epochs: tuple[int, ...] = (20,)
    """numbers of epochs"""
    seeds: int | None = None
    """fine-tunings with the chosen setting; default as in the paper: ten for BIOSSES, PubMedQA,
    BioASQ, else five
    """
    relation_form: RelationText = "dummies"
    """form of the two mentions in the text of a relation"""
    relation_pool: Literal["first", "mentions", "starts"] = "first"
    """input of the head for a relation: the first token, both mentions, or their first tokens"""
    train_limit: int | None = None
    """maximum number of training examples, from the start; default all"""
    bf16: bool = False
    """use 16-bit matrix products"""

    def settings(self, resamples: int) -> TextTaskOptions:
        """Return the settings of the evaluation."""
        return TextTaskOptions(
            grid=FinetuneGrid(lrs=self.lrs, batches=self.batches, epochs=self.epochs),
            seeds=self.seeds,
            relation_form=self.relation_form,
            relation_pool=self.relation_pool,
            train_limit=self.train_limit,
            autocast=torch.bfloat16 if self.bf16 else None,
            resamples=resamples,
        )


@register_evaluation("text")
@dataclasses.dataclass(frozen=True, kw_only=True)
class TextTasks(Evaluation):
    """Evaluate a text encoder by fine-tuning on BLURB's tasks, MedNLI, RadNLI and sentence
    similarity.

    Learning rate, batch size and epochs are chosen on the dev split; every score is printed beside
    baselines without an encoder. data_cards/blurb.md lists the files of each task.
    """

    # No task of `medvl benchmark`: its data are no shards of a benchmark, and its encoders
    # are fine-tuned. A benchmark adds it as a command (docs/pages/guides/benchmark.md).
    protocols = (PROTOCOL,)
    lines = LineFields(item=("task", "key"), group="document", needs=("label", "document"))
    shared = OutputOptions

    data: Path
    """folder with a folder for each task"""
    task: tuple[str, ...] = ("all",)
    """names of tasks; default all whose folder exists, of which incomplete ones are listed and
    skipped
    """
    compare_random: bool = False
    """also fine-tune the same encoder from random weights, with paired differences"""
    examples: int = 5
    """mistakes of each task on the page; 0 for a page without texts"""
    text: TextEncoderOptions = dataclasses.field(default_factory=TextEncoderOptions)
    """the text encoder"""
    tuning: FinetuneOptions = dataclasses.field(default_factory=FinetuneOptions)
    """grid of the fine-tuning"""

    def output(self, options: OutputOptions) -> OutputFolder:
        """Return the folder of the results of the encoder."""
        name = "text_random" if self.text.random_weights else "text"
        return options.folder(self.text.checkpoint, name, hashed=False)

    def run(self, setup: Setup) -> Outcome:
        """Open the encoder and the tasks, and evaluate."""
        settings = self.tuning.settings(setup.resamples)
        names = self.task
        if names == ("all",):
            complete, left_out = complete_tasks(self.data, settings)
            names = tuple(complete)
            for reason in left_out.values():
                _log.warning("left out: %s", reason)
        if not names:
            message = f"{self.data} has no complete task; see data_cards/blurb.md"
            raise ConfigError(message, "not_found", field="data")
        setup.settle()
        encoder = self.text.evaluated_encoder(random=self.text.random_weights)
        result = evaluate_text_tasks(
            encoder,
            self.data,
            names,
            settings,
            other=self.text.evaluated_encoder(random=True) if self.compare_random else None,
            device=resolve_device(setup.options.device),
            report=_log.info,
        )
        return Outcome(
            result=result,
            model=encoder.name,
            data=self.data.name,
            page=functools.partial(write_text_page, result, examples=self.examples),
            table=format_table(result.results.rows),
        )

    @staticmethod
    def metric_groups(lines: Lines, results: Results) -> list[MetricGroup]:
        """Return the metric of each task, the mean over its seeds."""
        groups = []
        for name in dict.fromkeys(line["task"] for line in lines):
            rows_N = np.array([row for row, line in enumerate(lines) if line["task"] == name])
            task = TASKS[name]
            truth = [_tuple(lines[row]["label"]) for row in rows_N]
            by_seed = zip(*(lines[row]["predictions"] for row in rows_N), strict=True)
            metrics = [
                summed_metric(task, truth, [_tuple(value) for value in of_seed])
                for of_seed in by_seed
            ]
            row = MetricRow(metric=task.metric, target=name, n=len(rows_N))
            groups.append(at_items(mean_over_seeds(metrics, row), rows_N))
        return groups


def _tuple(value: Any) -> Any:
    """Return a label as it was before it became JSON."""
    return tuple(value) if isinstance(value, list) else value
