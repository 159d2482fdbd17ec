"""Report generation: generated reports against their references.

Protocol "report_generation", version 1:

* Every image with a reference is evaluated; an empty or truncated report stays in every denominator.
* n-gram overlap (`nlg_metrics`) and clinical F1 (`clinical_f1`) compare complete, untruncated references.
* Baseline: the same rows with every image paired with the report that was generated for another image.
* Intervals: the bootstrap resamples patients, with all their reports.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from medvl.data.reports.labeler import label_report
from medvl.errors import EvaluationError
from medvl.eval.core.metric_rows import MetricGroup, measure
from medvl.eval.core.results import Results, format_table
from medvl.eval.report_generation.clinical_f1 import METRICS, Uncertain, clinical_metrics, positive_findings
from medvl.eval.report_generation.nlg_metrics import MEANS, overlap_metrics, report_scores, words

OTHER_IMAGES = "baseline: other images"
"""Subgroup of the rows in which every image has the report generated for another one: the score without the image."""
PROTOCOL, PROTOCOL_VERSION = "report_generation", 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GeneratedReport:
    """A report generated for an image, with its reference."""

    key: str
    patient: str
    reference: str
    """Complete reference."""
    generated: str
    """Generated text; empty if nothing was generated."""
    ended: bool = True
    """False if the text was truncated at the maximum length."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReportResult:
    """Results, with the evaluated reports."""

    results: Results
    reports: Sequence[GeneratedReport]

    def table(self) -> str:
        """Return a text table of n-gram overlap and one of findings, each with the baseline."""
        overlap = [row for row in self.results.rows if row.metric not in METRICS]
        findings = [
            row for row in self.results.rows if row.metric in METRICS and (not row.subgroup or row.target == "micro")
        ]
        return "\n\n".join(format_table(rows) for rows in (overlap, findings))

    def predictions(self) -> list[dict[str, Any]]:
        """Return one JSON object per report: both texts, their findings, and the report's own scores."""
        return [
            {
                **dataclasses.asdict(report),
                "reference_findings": label_report(report.reference),
                "generated_findings": label_report(report.generated),
                **dict(zip(MEANS, report_scores(words(report.generated), words(report.reference)), strict=True)),
            }
            for report in self.reports
        ]


def evaluate_reports(
    reports: Sequence[GeneratedReport],
    *,
    uncertain: Uncertain = "negative",
    resamples: int = 1000,
    seed: int = 0,
    config: Mapping[str, Any] | None = None,
    inputs: Mapping[str, str | None] | None = None,
    details: Mapping[str, Any] | None = None,
) -> ReportResult:
    """Evaluate generated reports; the module docstring describes the protocol.

    Args:
        reports: one per image. Leave out images without a reference, and count them in `details`.
        uncertain: label of findings that a report mentions as uncertain.
        resamples, seed: of the bootstrap.
        config, inputs, details: further entries of the results.

    Raises EvaluationError if there is no report, or a reference is empty.
    """
    if not reports:
        raise EvaluationError("expected reports, got none: use samples with reference texts", "empty")
    empty = [report.key for report in reports if not words(report.reference)]
    if empty:
        raise EvaluationError(f"{len(empty)} references are empty, first that of {empty[0]}: leave them out", "empty")
    rows = measure(
        _metric_groups(reports, uncertain),
        len(reports),
        resamples=resamples,
        seed=seed,
        groups=[report.patient for report in reports],
    )
    results = Results(
        protocol=PROTOCOL,
        protocol_version=PROTOCOL_VERSION,
        rows=rows,
        config={"uncertain": uncertain, "resamples": resamples, "seed": seed, **(config or {})},
        inputs=dict(inputs or {}),
        details={**_details(reports), **(details or {})},
    )
    return ReportResult(results, reports)


def _metric_groups(reports: Sequence[GeneratedReport], uncertain: Uncertain) -> list[MetricGroup]:
    references = [report.reference for report in reports]
    reference_NL = positive_findings([label_report(text) for text in references], uncertain)
    groups = []
    shifts = {"": 0, OTHER_IMAGES: len(reports) // 2}  # far, because images of one study are adjacent
    for subgroup, shift in shifts.items():
        generated = [reports[(index + shift) % len(reports)].generated for index in range(len(reports))]
        generated_NL = positive_findings([label_report(text) for text in generated], uncertain)
        groups += overlap_metrics(generated, references, subgroup=subgroup)
        groups.append(clinical_metrics(generated_NL, reference_NL, subgroup=subgroup))
    return groups


def _details(reports: Sequence[GeneratedReport]) -> dict[str, Any]:
    generated = [words(report.generated) for report in reports]
    return {
        "reports": len(reports),
        "patients": len({report.patient for report in reports}),
        "empty": sum(not text for text in generated),
        "truncated": sum(not report.ended for report in reports),
        "distinct": len({tuple(text) for text in generated}),
        "mean_words": sum(map(len, generated)) / len(reports),
        "mean_words_of_references": sum(len(words(report.reference)) for report in reports) / len(reports),
    }
