"""Evaluation of generated reports: options, run and page of every decoding and baseline."""

import dataclasses
import functools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from medvl.common.files import sha256
from medvl.data.grounded import grounded_text, read_grounded
from medvl.data.loading.sources import Source
from medvl.data.loading.studies import by_study
from medvl.data.privacy import Deidentifier, default_salt_file
from medvl.data.reports.labeler import Conventions, conventions_named, label_report
from medvl.data.shards.format import Manifest
from medvl.errors import ConfigError, EvaluationError
from medvl.eval.core.full_pass import input_hashes
from medvl.eval.core.metric_rows import MetricGroup, MetricRow, mean_metrics
from medvl.eval.core.open import OutputOptions, Setup
from medvl.eval.core.results import LineFields, Lines, OutputFolder, PageHeader, Results, number
from medvl.eval.evaluation import Column, Evaluation, Outcome, Task, Trial
from medvl.eval.html.page import Card, Cards, Deck, Page, header_facts, headline, write_page
from medvl.eval.html.tables import Cell, Table, metric_cell
from medvl.eval.registry import register_evaluation
from medvl.eval.report_generation.external import ExternalOptions
from medvl.eval.report_generation.generate import (
    DecodingOptions,
    add_likelihoods,
    count_cut,
    generate_by_decoding,
    write_studies,
)
from medvl.eval.report_generation.grounded import grounded_metrics, labeler_judge
from medvl.eval.report_generation.metrics import (
    MEANS,
    METRICS,
    REPORT,
    Uncertain,
    bleu_metrics,
    clinical_metrics,
    content_metrics,
    perplexity_metrics,
    positive_findings,
    read_contents,
    stop_metrics,
    words,
    words_and_stops,
)
from medvl.eval.report_generation.protocol import (
    AGAINST_LABELS,
    MINUS,
    ONE_REPORT,
    OTHER_IMAGES,
    PROTOCOL,
    GeneratedReport,
    ReportResult,
    evaluate_reports,
    read_reports,
    references_of,
    score_metrics,
)
from medvl.eval.report_generation.rexrank import (
    RexrankStudy,
    list_source,
    read_rexrank,
    study_reports,
    write_rexrank,
)
from medvl.models.fusion_encoders.medvill import MedViLL
from medvl.models.report_generators.base import ReportGenerator
from medvl.phantom import read_truth
from medvl.schema import FINDINGS, ConventionsName

_log = logging.getLogger(__name__)

_OVERLAP = {
    "corpus_bleu_1": "BLEU-1",
    "corpus_bleu_4": "BLEU-4",
    "mean_rouge_l": "ROUGE-L",
    "mean_meteor_exact_stem": "METEOR, without synonyms",
    "mean_cider_d": "CIDEr-D",
}
_AVERAGES = {
    "micro of five": "F1 of five, micro",
    "macro of five": "F1 of five, macro",
    "micro": "F1, micro",
    "macro": "F1, macro",
}
_LIMITS = (
    "A research evaluation, not for clinical use: overlap of words is not a measure of "
    "correctness, and one report for all images can have much of it.",
    "Findings are read by a rule-based labeler, in the generated report and, except in the rows "
    "against labels, in its reference. The consensus of samples is selected by the same labeler.",
    "Intervals are percentiles of a bootstrap over patients.",
    "Texts on this page belong to the data set and stay under its terms of use.",
)


def write_report_page(
    result: ReportResult, path: str | Path, header: PageHeader, *, examples: int = 4
) -> Path:
    """Write the page as one HTML file and return its path.

    Args:
        result: result of `evaluate_reports` or `report_generation`.
        path: path of the file; its folder is created if missing.
        header: display names of model and data, and the date.
        examples: reports whose findings agree with those of the reference, and reports whose
            findings differ.
    """
    results = result.results
    rows = {(row.metric, row.target, row.subgroup): row for row in results.rows}
    floor = rows["corpus_bleu_1", REPORT, ONE_REPORT]
    page = Page(
        title=f"Report generation: {header.model}",
        subtitle=f"{header.data}: {results.details['reports']:,} reports of "
        f"{results.details['patients']:,} patients",
        headlines=[
            headline("BLEU-1", results.row("corpus_bleu_1", REPORT)),
            headline("BLEU-1 of one report for all", floor),
            headline("F1 of findings, micro", results.row("f1", "micro")),
        ],
        facts=header_facts(results, header, units="patients", extra=_facts(result)),
        sections=[_overlap(rows), _findings(rows), _by_finding(rows), _examples(result, examples)],
        limits=_LIMITS,
        findings=FINDINGS,
    )
    return write_page(page, path)


def _facts(result: ReportResult) -> list[tuple[str, str]]:
    details = result.results.details
    counts = {
        "generated": details["distinct"],
        **details["distinct_others"],
        "references": details["distinct_references"],
    }
    distinct = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    return [
        ("Distinct texts", distinct),
        (
            "Generated",
            f"{details['empty']:,} empty, {details['truncated']:,} truncated, "
            f"{details['mean_words']:.1f} words on average (references "
            f"{details['mean_words_of_references']:.1f}); the commonest text "
            f"{details['commonest']:,} times",
        ),
        ("Labels", result.results.config.get("labels", "of the data")),
    ]


def _overlap(rows: dict[tuple[str, str, str], MetricRow]) -> Table:
    subgroups = _subgroups(rows, set(_OVERLAP))
    lines: list[Sequence[Cell | str]] = [
        [
            _name(subgroup),
            *(
                metric_cell(rows[metric, REPORT, subgroup], bar="cider" not in metric)
                for metric in _OVERLAP
            ),
        ]
        for subgroup in subgroups
    ]
    return Table(
        title="Summary: overlap with the references",
        columns=["", *_OVERLAP.values()],
        rows=lines,
        strong_rows=1,
        caption="With 95% intervals. The baselines give every image the report generated for one "
        "of another patient, and the one reference that fits all images best: a model near them "
        "does not use the image.",
    )


def _subgroups(rows: dict[tuple[str, str, str], MetricRow], metrics: set[str]) -> dict[str, None]:
    """Return the subgroups of some metrics; differences are in the terminal's table alone."""
    return dict.fromkeys(
        subgroup
        for metric, _, subgroup in rows
        if metric in metrics and not subgroup.startswith(MINUS)
    )


def _findings(rows: dict[tuple[str, str, str], MetricRow]) -> Table:
    subgroups = _subgroups(rows, {"f1"})
    lines: list[Sequence[Cell | str]] = [
        [
            _name(subgroup),
            *(metric_cell(rows["f1", target, subgroup], bar=True) for target in _AVERAGES),
        ]
        for subgroup in subgroups
    ]
    return Table(
        title="Findings",
        columns=["", *_AVERAGES.values()],
        rows=lines,
        strong_rows=1,
        one_axis=True,
        caption="F1 of the findings that the reports assert, against the labeler's reading of "
        "the references or "
        "against the labels of the images. The labeler's reading of the references against "
        "labels is what a perfect "
        "generator would have.",
    )


def _by_finding(rows: dict[tuple[str, str, str], MetricRow]) -> Table:
    lines: list[Sequence[Cell | str]] = [
        [
            name,
            *(metric_cell(rows[metric, name, ""], bar=True) for metric in METRICS),
            f"{rows['f1', name, ''].n_positive:,}",
        ]
        for name in FINDINGS
    ]
    return Table(
        title="By finding",
        columns=["", *(name.capitalize() for name in METRICS), "In references"],
        rows=lines,
        one_axis=True,
        caption="Of the generated reports, with 95% intervals; the references are read by the "
        "same labeler. F1 is the "
        "harmonic mean of precision and recall.",
    )


def _examples(result: ReportResult, examples: int) -> Cards:
    """Return generated reports beside their references, evenly spaced in the order of the data."""
    decks = []
    find = functools.partial(_found, conventions=result.conventions)
    read = [(report, find(report.reference), find(report.generated)) for report in result.reports]
    for title, good in (
        ("Findings agree with the reference", True),
        ("Findings differ from the reference", False),
    ):
        of_kind = [each for each in read if (each[1] == each[2]) == good]
        places = np.linspace(0, len(of_kind) - 1, min(examples, len(of_kind))).astype(int).tolist()
        cards = [_card(*of_kind[place]) for place in places]
        if cards:
            decks.append(
                Deck(title=f"{title}: {len(of_kind):,} of {len(read):,}", cards=cards, good=good)
            )
    caption = (
        "Evenly spaced in the order of the data. The labeler reads the findings in both texts."
    )
    return Cards(title="Reports", decks=decks, caption=caption)


def _card(report: GeneratedReport, expected: frozenset[str], generated: frozenset[str]) -> Card:
    lines = [("Generated", report.generated or "(empty)"), ("Reference", report.reference)]
    for name, findings in (
        ("Both", expected & generated),
        ("Missed", expected - generated),
        ("Added", generated - expected),
    ):
        if findings:
            lines.append((name, ", ".join(sorted(findings))))
    return Card(title=f"Image {report.key[:16]}", pictures=[], choices=[], lines=lines, tags=[])


def _found(text: str, conventions: Conventions) -> frozenset[str]:
    return frozenset(name for name, value in label_report(text, conventions).items() if value == 1)


def _name(subgroup: str) -> str:
    return f"generated, {AGAINST_LABELS}" if subgroup == AGAINST_LABELS else subgroup or "generated"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Reports:
    """Reports to evaluate, and their origin."""

    reports: list[GeneratedReport]
    others: dict[str, list[GeneratedReport]] = dataclasses.field(default_factory=dict)
    name: str
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    inputs: Mapping[str, str | None]
    data: Manifest | str
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    groups: Sequence[MetricGroup] = ()
    """Further metrics."""


@register_evaluation("report-generation")
@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportGeneration(Evaluation):
    """Evaluate report generation: n-gram overlap and clinical F1 of generated reports against
    references and labels.

    The checkpoint is an R2Gen, CXRMate, CausalLM, or MedViLL trained with objective "report".
    Greedy search is always evaluated.
    """

    protocols = (PROTOCOL,)
    lines = LineFields(reference="reference")
    tasks = (
        Task(
            name="reports",
            fits=(ReportGenerator, MedViLL),
            data="reports",
            columns=(
                Column(title="report F1", metric="f1", targets=("macro of five", "micro")),
                Column(title="BLEU-4", metric="corpus_bleu_4", targets=("report",)),
            ),
        ),
    )

    data: Path | None = None
    """folder of shards of patients that the model was not trained on"""
    checkpoint: Path | None = None
    """folder of a checkpoint, such as runs/r2gen-iu/best"""
    predictions: Path | None = None
    """reports of another system instead of a checkpoint: JSON lines with key and generated, and
    also reference if --data is not given
    """
    rexrank: Path | None = None
    """reports of another system as ReXrank reads them, instead of a checkpoint: a JSON list of
    studies with model_prediction. Or with a checkpoint: the list of studies that it writes
    reports of, into prediction.json. One row is a study
    """
    images: Path | None = None
    """root of the images of --rexrank, for a checkpoint"""
    sections: tuple[str, ...] = ("findings", "impression")
    """sections of the references; those that the model was trained to generate"""
    phantom_truth: Path | None = None
    """folder of `medvl phantom mimic-cxr` that the shards are from: compare findings with what its
    images show, not with the labels of its reports
    """
    grounded: bool = False
    """the texts have boxes in MAIRA-2's format: also score their sentences against the boxes of
    --predictions, or of the sentences in the shards (padchest-gr)
    """
    uncertain: Uncertain = "negative"
    """label of findings that a report mentions as uncertain"""
    conventions: ConventionsName = "chexpert"
    """what the labeler takes as present and as uncertain: as CheXpert's labeler; as it, with any
    borderline finding as uncertain; or as people who index reports, for whom a probable finding is
    present
    """
    decoding: DecodingOptions = dataclasses.field(default_factory=DecodingOptions)
    """decoding of a checkpoint's reports"""
    external: ExternalOptions = dataclasses.field(default_factory=ExternalOptions)
    """scores by other tools"""

    def output(self, options: OutputOptions) -> OutputFolder:
        """Return the folder of the results of the checkpoint or the file of predictions."""
        given = [
            path for path in (self.checkpoint, self.predictions, self.rexrank) if path is not None
        ]
        answers = self.images is not None and self.predictions is None and len(given) == 2
        if len(given) != 1 and not answers:
            message = (
                "give exactly one of --checkpoint, --predictions and --rexrank, or --checkpoint "
                "and --rexrank with the root of its --images"
            )
            raise ConfigError(message, "conflict", field="checkpoint")
        if self.images is not None and not answers:
            message = "images are those of a list for a checkpoint; give --checkpoint and --rexrank"
            raise ConfigError(message, "conflict", field="images")
        return options.folder(given[0], "report_generation")

    def run(self, setup: Setup) -> Outcome:
        """Generate or read the reports, and evaluate."""
        if self.rexrank is not None:
            written = self._from_rexrank(setup)
        elif self.checkpoint is not None:
            written = self._from_checkpoint(setup)
        else:
            written = self._from_file(setup)
        scores, extra = self.external.read(written.reports, self.uncertain)
        result = evaluate_reports(
            written.reports,
            others=written.others,
            uncertain=self.uncertain,
            conventions=self.conventions,
            scores=scores,
            extra=[*extra, *written.groups],
            resamples=setup.resamples,
            config={"sections": list(self.sections), **written.config},
            inputs={**written.inputs, **self.external.inputs()},
            details=written.details,
        )
        return Outcome(
            result=result,
            model=written.name,
            data=written.data,
            page=functools.partial(write_report_page, result),
            table=result.table(),
        )

    def _from_file(self, setup: Setup) -> _Reports:
        assert self.predictions is not None
        source = None if self.data is None else setup.source(self.data)
        references = None if source is None else references_of(source, self.sections)
        reports = read_reports(self.predictions, references)
        setup.settle()
        reports, groups, details = self._read_boxes(reports)
        return _Reports(
            reports=reports,
            groups=groups,
            details=details,
            name=str(self.predictions),
            inputs={"predictions": sha256(self.predictions)},
            data=str(self.predictions) if source is None else source.manifest,
        )

    def _read_boxes(
        self, reports: list[GeneratedReport]
    ) -> tuple[list[GeneratedReport], list[MetricGroup], dict[str, Any]]:
        """Return reports without boxes, metrics of the boxes, and details."""
        if not self.grounded:
            return reports, [], {}
        ours, theirs = (
            [read_grounded(getattr(report, side)) for report in reports]
            for side in ("generated", "reference")
        )
        judge = labeler_judge(conventions_named(self.conventions, error=EvaluationError))
        plain = [
            dataclasses.replace(report, generated=mine.text, reference=other.text)
            for report, mine, other in zip(reports, ours, theirs, strict=True)
        ]
        dropped = sum(report.dropped_boxes for report in ours)
        return plain, grounded_metrics(ours, theirs, judge), {"dropped_boxes": dropped}

    def _from_rexrank(self, setup: Setup) -> _Reports:
        assert self.rexrank is not None
        studies = read_rexrank(self.rexrank)
        inputs: dict[str, str | None] = {"predictions": sha256(self.rexrank)}
        if self.checkpoint is None:
            setup.settle()
        else:
            inputs = {**input_hashes(self.checkpoint), "manifest": sha256(self.rexrank)}
            setup.settle(manifest=inputs["manifest"])
            studies = read_rexrank(self._answer(setup, studies))
        reports = study_reports(studies, self.sections)
        if not reports:
            message = f"{self.rexrank}: no study has a section {' or '.join(self.sections)}"
            raise EvaluationError(message, "empty", field="sections")
        return _Reports(
            reports=reports,
            name=str(self.checkpoint or self.rexrank),
            config={"unit": "study"},
            inputs=inputs,
            data=str(self.rexrank),
            details={"without_reference": len(studies) - len(reports)},
        )

    def _answer(self, setup: Setup, studies: Mapping[str, RexrankStudy]) -> Path:
        """Write the reports of the checkpoint beside the results; return the file."""
        assert self.checkpoint is not None
        assert self.rexrank is not None
        assert self.images is not None
        model = setup.model(self.checkpoint, (ReportGenerator,), "give the checkpoint of an R2Gen")
        source: Source = list_source(studies, self.images)
        inputs = model.inputs.for_writing
        # Models of one image read the key image of each study.
        source = source if inputs.by_study else by_study(source)
        loader = setup.loader(source, model, inputs=inputs)
        decodings = self.decoding.decodings()
        decoding = decodings.get("beam search", decodings["greedy"])
        texts = write_studies(model, loader, decoding, self.sections)
        folder = setup.folder or Path()
        folder.mkdir(parents=True, exist_ok=True)
        path = write_rexrank(self.rexrank, folder / "prediction.json", texts)
        _log.info("predictions for ReXrank: %s", path)
        return path

    def _from_checkpoint(self, setup: Setup) -> _Reports:
        assert self.checkpoint is not None
        if self.data is None:
            raise ConfigError("a checkpoint needs images; give --data", "missing", field="data")
        decodings = self.decoding.decodings()
        labels = None if self.phantom_truth is None else _truth(self.phantom_truth)
        setup.check(self.checkpoint, (ReportGenerator, MedViLL), "give one that writes reports")
        source = setup.source(self.data, self.checkpoint)
        setup.settle(manifest=source.fingerprint)
        model = setup.model(self.checkpoint)
        loader = setup.loader(source, model, inputs=model.inputs.for_writing)
        generated = generate_by_decoding(
            model,
            loader,
            decodings,
            sections=self.sections,
            labels=labels,
            conventions=self.conventions,
        )
        reports = generated.pop("greedy")
        assert model.tokenizer is not None
        if not self.grounded:
            reports = add_likelihoods(model, loader, reports, self.sections)
        else:
            samples = (source.sample(position) for position in range(len(source)))
            boxed = {sample.key: grounded_text(sample) for sample in samples}
            reports = [
                dataclasses.replace(report, reference=boxed[report.key])
                for report in reports
                if boxed[report.key]
            ]
            generated = {}  # other decodings have references without boxes
        reports, groups, details = self._read_boxes(reports)
        return _Reports(
            reports=reports,
            others=generated,
            groups=groups,
            name=f"{model.name} ({self.checkpoint})",
            config={
                "decodings": {name: dataclasses.asdict(each) for name, each in decodings.items()},
                "labels": "of the data" if labels is None else "ground truth of the phantom",
                "model": model.name,
            },
            inputs=input_hashes(self.checkpoint, manifest=loader),
            data=source.manifest,
            details={
                **details,
                "without_reference": len(loader.source) - len(reports),
                "unreadable": dict(loader.skipped),
                "references_cut_in_training": count_cut(model.tokenizer, reports),
            },
        )

    @staticmethod
    def metric_groups(lines: Lines, results: Results) -> list[MetricGroup]:
        """Return overlap and findings of the reports."""
        uncertain = results.config["uncertain"]
        generated_NL, reference_NL = (
            positive_findings([line[f"{side}_findings"] for line in lines], uncertain)
            for side in ("generated", "reference")
        )
        texts = [(line["generated"], line["reference"]) for line in lines]
        contents = [[read_contents(text) for text in side] for side in zip(*texts, strict=True)]
        pairs = [(words(generated), words(reference)) for generated, reference in texts]
        stops = [
            (words_and_stops(generated), words_and_stops(reference))
            for generated, reference in texts
        ]
        means = [
            mean_metrics(name, np.array([[number(line[name])] for line in lines]), [REPORT])
            for name in MEANS
        ]
        groups = [
            bleu_metrics(pairs),
            *means,
            *perplexity_metrics([line.get("likelihood") for line in lines], OTHER_IMAGES),
            *stop_metrics(stops),
            clinical_metrics(generated_NL, reference_NL),
            *content_metrics(*contents),
            *score_metrics(
                {
                    name: np.array([number(line["scores"][name]) for line in lines])
                    for name in lines[0].get("scores", {})
                }
            ),
        ]
        if all(line.get("labels") is not None for line in lines):
            labels_NL = positive_findings([line["labels"] for line in lines], uncertain)
            groups.append(clinical_metrics(generated_NL, labels_NL, subgroup=AGAINST_LABELS))
        return groups

    @classmethod
    def for_trial(cls, task: Task, trial: Trial) -> "ReportGeneration":
        """Return the evaluation against the sections that the system was trained on."""
        sections = trial.sections or ("findings", "impression")
        return cls(checkpoint=trial.checkpoint, data=trial.data, sections=sections)


def _truth(folder: Path) -> dict[str, dict[str, int]]:
    """Return the ground truth of a phantom by sample key, with the default salt."""
    deid = Deidentifier.from_file(default_salt_file())
    return {
        deid.image(row["dicom_id"]): row["labels"]
        for row in read_truth(folder)
        if "dicom_id" in row
    }
