"""`medvl eval probe`: options of the encoder, the page, and the columns of a benchmark."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from medvl.data.shards.source import ShardSource
from medvl.errors import ConfigError
from medvl.eval.classification.evaluation import LIMITS, facts, sections, subtitle
from medvl.eval.classification.scored_images import ClassificationResult, MeanOptions
from medvl.eval.core.open import (
    OutputOptions,
    Setup,
    open_source,
    resolve_device,
    shown_pixels,
)
from medvl.eval.core.results import (
    Lines,
    OutputFolder,
    PageHeader,
    Results,
    ScoredClasses,
    checkpoint_sha256,
    classes_of_lines,
)
from medvl.eval.evaluation import MEAN, Column, Evaluation, EvaluationConfig, Outcome, Task, Trial
from medvl.eval.html.page import Page, Pixels, headline, write_page
from medvl.eval.html.tables import Cell, Table, metric_cell
from medvl.eval.probing.features import (
    FeatureTable,
    ProbedEncoder,
    encode_features,
)
from medvl.eval.probing.protocol import (
    PROTOCOL,
    ProbeResult,
    linear_probe,
    ordinal_table,
    parse_levels,
    suffix,
)
from medvl.eval.registry import register_evaluation
from medvl.models.dual_encoders.bases.base import DualEncoder
from medvl.models.fusion_encoders.bases.base import FusionModel
from medvl.models.fusion_encoders.mrm import MRM
from medvl.models.report_generators.r2gen import R2Gen


def write_probe_page(
    result: ProbeResult,
    path: str | Path,
    header: PageHeader,
    *,
    pixels: Pixels | None = None,
    examples: int = 3,
) -> Path:
    """Write the page as one HTML file and return its path; arguments as in
    `write_zero_shot_page`.
    """
    page = Page(
        title=f"Linear probe: {header.model}",
        subtitle=subtitle(result, header.data),
        headlines=[_headline(result, fraction) for fraction in result.fractions],
        facts=facts(result, header, extra=_probe_facts(result)),
        sections=[
            summary_table(
                result,
                {suffix(fraction): f"{100 * fraction:g}%" for fraction in result.fractions},
                title="Summary by fraction of the labels",
                caption="Mean over the runs of a fraction with 95% interval over test patients, "
                "and standard deviation (SD) over the runs. The sections below show the first run "
                "of the largest fraction.",
            ),
            *sections(result, pixels, examples),
        ],
        limits=LIMITS,
        findings=result.images.names,
    )
    return write_page(page, path)


def _headline(result: ProbeResult, fraction: float) -> tuple[str, str, str]:
    row = result.results.row(f"auroc{suffix(fraction)}", "macro")
    return headline(f"AUROC, {100 * fraction:g}% of the labels", row)


def _probe_facts(result: ProbeResult) -> list[tuple[str, str]]:
    config = result.results.config
    details = result.results.details
    penalties = ", ".join(f"{value:g}" for value in config["penalties"])
    runs = f"{config['seeds']} per fraction below 100%, nested samples of patients"
    return [
        ("Probe", f"logistic regression on {details['feature_dim']:,} standardised features"),
        ("Penalty", f"selected from {penalties} on validation images"),
        ("Runs", f"{len(details['runs'])}: {runs}"),
        *([("Encoder", details["note"])] if "note" in details else []),
    ]


def summary_table(
    result: ClassificationResult, columns: Mapping[str, str], *, title: str, caption: str
) -> Table:
    """Return the AUROC of every finding, with a column for each suffix of the metric, and one for
    the standard deviation where it has runs.

    Args:
        result: has the rows `auroc{suffix}` and `auroc_sd{suffix}`.
        columns: suffix -> title.
        title: title of the table.
        caption: text below it.
    """
    rows = {(row.metric, row.target): row for row in result.results.rows if not row.subgroup}
    means = {"macro_competition": "Mean of the five competition findings", "macro": "Mean of all"}
    means = {
        target: label
        for target, label in means.items()
        if any((f"auroc{ending}", target) in rows for ending in columns)
    }
    with_runs = {ending for ending in columns if (f"auroc_sd{ending}", "macro") in rows}
    lines: list[Sequence[Cell | str]] = []
    for target, label in {**means, **{name: name for name in result.images.names}}.items():
        cells: list[Cell | str] = [label]
        for ending in columns:
            row = rows.get((f"auroc{ending}", target))
            cells.append(metric_cell(row, reference=0.5, bar=True))
            if ending in with_runs:
                deviation = rows.get((f"auroc_sd{ending}", target))
                unknown = deviation is None or np.isnan(deviation.value)
                cells.append("" if deviation is None or unknown else f"{deviation.value:.3f}")
        lines.append(cells)
    titles = [
        name
        for ending, column in columns.items()
        for name in (f"AUROC, {column}", *(["SD over runs"] if ending in with_runs else []))
    ]
    return Table(
        title=title,
        columns=["", *titles],
        rows=lines,
        strong_rows=len(means),
        one_axis=True,
        caption=caption,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderOptions:
    """The image encoder: give exactly one of --checkpoint and --encoder."""

    checkpoint: Path | None = None
    """folder of a checkpoint of any system with an encoder of images or volumes"""
    random_weights: bool = False
    """reinitialise the encoder of the checkpoint, as a baseline without pretraining"""
    encoder: str | None = None
    """name of an image encoder with random weights, such as resnet50"""
    pretrained: bool = False
    """use the published weights of --encoder"""
    image_weights: str | None = None
    """weights of --encoder: a file, a folder with one, or OWNER/NAME@COMMIT on the hub"""
    image_arguments: Mapping[str, bool | int | float | str | tuple[float, ...]] = dataclasses.field(
        default_factory=dict
    )
    """arguments of --encoder, such as mean 0.5 std 0.5 pad_type same"""
    image_size: int | None = None
    """image size of --encoder, where it can be chosen"""

    def check(self) -> None:
        """Raise ConfigError unless exactly one of both is given."""
        if (self.checkpoint is None) == (self.encoder is None) or (
            self.encoder is not None and self.random_weights
        ):
            message = (
                "expected --checkpoint (with --random-weights for the baseline) or --encoder; "
                "give exactly one"
            )
            raise ConfigError(message, "conflict", field="checkpoint")

    def output(self, options: OutputOptions, task: str) -> OutputFolder:
        """Return the folder of the results of a task, another one for random weights."""
        self.check()
        name = f"{task}_random" if self.random_weights else task
        return options.folder(self.checkpoint, name, hashed=not self.random_weights)

    def probed_encoder(self, setup: Setup) -> ProbedEncoder:
        """Open the encoder on the device. Raises ConfigError as `check`."""
        self.check()
        checkpoint = self.checkpoint
        if checkpoint is not None:
            model = setup.model(checkpoint)
            name = f"{model.name} ({checkpoint})"
            return ProbedEncoder.from_model(model, name=name, random=self.random_weights)
        assert self.encoder is not None, "see check()"
        if self.pretrained and self.image_weights is not None:
            message = "give --pretrained or --image-weights, not both"
            raise ConfigError(message, "conflict", field="image_weights")
        arguments: dict[str, Any] = dict(self.image_arguments)
        if self.image_size is not None:
            arguments["image_size"] = self.image_size
        pretrained = self.image_weights or self.pretrained
        probed = ProbedEncoder.from_name(self.encoder, pretrained=pretrained, **arguments)
        probed.module.to(resolve_device(setup.options.device))
        return probed

    def hashes(self, probed: ProbedEncoder) -> dict[str, str | None]:
        """Return the hashes of the encoder for the results."""
        trained = None if self.random_weights else self.checkpoint
        return {
            "checkpoint": None if trained is None else checkpoint_sha256(trained),
            "encoder": probed.sha256,
        }


class OpenedFeatures(NamedTuple):
    """An encoder, its features of three sets, and the test shards."""

    encoder: ProbedEncoder
    tables: tuple[FeatureTable, ...]
    """Features of training, validation and test."""
    source: ShardSource


def open_features(
    image: EncoderOptions,
    setup: Setup,
    train: Path,
    valid: Path,
    test: Path,
    *,
    cache: Path | None = None,
) -> OpenedFeatures:
    """Encode the images of three folders of shards, or read their features from the cache.

    Decides the folder of the results. Raises SplitError where the encoder was trained on patients
    of the test.

    Args:
        image: the encoder.
        setup: opens shards and loaders.
        train, valid, test: folders of shards.
        cache: folder of cached features; None for `features` beside the folder of the results.
    """
    if image.checkpoint is not None:
        setup.source(test, image.checkpoint)  # the features themselves are of no regions
    probed = image.probed_encoder(setup)
    source = setup.source(test)
    setup.settle(manifest=source.fingerprint)
    tables = tuple(
        encode_features(
            probed, setup.loader(of_split, probed, text=False), cache=cache or setup.features
        )
        for of_split in (open_source(train, synthetic=True), open_source(valid), source)
    )
    return OpenedFeatures(probed, tables, source)


ENCODERS = (DualEncoder, FusionModel, MRM, R2Gen)
"""Systems of `medvl benchmark` whose image encoders are evaluated."""


def inputs_of(trial: Trial) -> dict[str, Any]:
    """Return the encoder and the shards of a trial, as fields of an evaluation of an image encoder.

    Raises EvaluationError "unsupported" where the data has no labels.
    """
    trial.labelled()
    home = trial.data.parent
    return {
        "image": EncoderOptions(checkpoint=trial.checkpoint),
        "train": home / "train",
        "valid": home / "validate",
        "test": trial.data,
    }


@register_evaluation("probe")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Probe(Evaluation):
    """Evaluate an image encoder by a linear probe at fractions of the labels, with intervals and a
    page.
    """

    protocols = (PROTOCOL,)
    divides_batches = True
    tasks = (
        Task(
            fits=ENCODERS,
            columns=(Column(title="probe", metric="auroc", targets=MEAN),),
        ),
    )

    train: Path
    """folder of shards with labels, on which the probe is fitted"""
    valid: Path
    """folder of shards of other patients, on which penalty and thresholds are chosen"""
    test: Path
    """folder of shards of further patients, that the encoder was not trained on"""
    fractions: tuple[float, ...] = (0.01, 0.1, 1.0)
    """fractions of the training patients whose labels are used"""
    seeds: int = 5
    """random subsets per fraction below 1"""
    levels: str | None = None
    """ordinal AUCs of a graded finding instead of the labels, such as
    edema_severity=none,mild,moderate,severe (lowest first) for shards with --category-column
    edema_severity
    """
    cache: Path | None = None
    """folder of cached features; default `features` beside the output folder"""
    image: EncoderOptions = dataclasses.field(default_factory=EncoderOptions)
    """the image encoder"""
    label: MeanOptions = dataclasses.field(default_factory=MeanOptions)
    """labels, thresholds and means"""

    def output(self, options: OutputOptions) -> OutputFolder:
        """Return the folder of the results of the encoder."""
        return self.image.output(options, "probe")

    def run(self, setup: Setup) -> Outcome:
        """Open the data and the encoder, and evaluate."""
        levels = None if self.levels is None else parse_levels(self.levels)
        opened = open_features(
            self.image, setup, self.train, self.valid, self.test, cache=self.cache
        )
        probed = opened.encoder
        source = opened.source
        tables = opened.tables
        if levels is not None:
            tables = tuple(ordinal_table(table, *levels) for table in tables)
        result = linear_probe(
            *tables,
            fractions=self.fractions,
            seeds=self.seeds,
            policy=self.label.policy(),
            threshold_rule=self.label.threshold_rule,
            resamples=setup.resamples,
            smallest_class=self.label.smallest_class,
            inputs=self.image.hashes(probed),
        )
        return Outcome(
            result=result,
            model=probed.name,
            data=source.manifest,
            page=functools.partial(write_probe_page, result, pixels=shown_pixels(source)),
            table=result.table(),
        )

    @staticmethod
    def scored_classes(lines: Lines, results: Results) -> ScoredClasses:
        """Return the scores of the first run of the largest fraction; it is the only run if that is
        the full set.
        """
        full = max(results.config["fractions"]) == 1
        return classes_of_lines(lines, results)._replace(suffix="@100%" if full else "")

    @classmethod
    def columns(cls, task: Task, settings: EvaluationConfig) -> tuple[Column, ...]:
        """Return a column for each share of the labels."""
        shares = [f"{100 * share:g}%" for share in settings.label_shares]
        return tuple(
            Column(title=f"probe, {share}", metric=f"auroc@{share}", targets=MEAN)
            for share in shares
        )

    @classmethod
    def for_trial(cls, task: Task, trial: Trial) -> "Probe":
        """Return the evaluation at the shares of the benchmark."""
        return cls(**inputs_of(trial), fractions=trial.settings.label_shares)
