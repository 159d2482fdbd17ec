"""Judging generated reports against their references: words and findings in common, with intervals."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from medvl.data.reports.labeler import label_report
from medvl.errors import EvaluationError
from medvl.eval.core.metric_rows import MetricGroup, measure
from medvl.eval.core.results import Results, format_table
from medvl.eval.report_generation.clinical_f1 import METRICS, Doubt, asserted, findings_block
from medvl.eval.report_generation.nlg_metrics import MEANS, overlap_blocks, report_scores, words

OTHERS = "baseline: other images"
"""Subgroup of the rows in which each image has the report that was written for another one: what the same writer scores
without looking."""
_VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WrittenReport:
    """What was written for an image, and what should have been."""

    key: str
    patient: str
    reference: str
    """Whole, as the shards hold it."""
    generated: str
    """"" where nothing was written: it stays in every denominator."""
    ended: bool = True
    """False where it was cut at the greatest length."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReportResult:
    """What was found, and what it was found on."""

    results: Results
    reports: Sequence[WrittenReport]

    def table(self) -> str:
        """The overlap of words, then the findings; the baseline beneath each."""
        overlap = [row for row in self.results.rows if row.metric not in METRICS]
        findings = [
            row for row in self.results.rows if row.metric in METRICS and (not row.subgroup or row.target == "micro")
        ]
        return "\n\n".join(format_table(rows) for rows in (overlap, findings))

    def predictions(self) -> list[dict[str, Any]]:
        """One JSON object a report: both texts, what the labeler reads in each, and its own scores."""
        return [
            {
                **dataclasses.asdict(report),
                "reference_findings": label_report(report.reference),
                "generated_findings": label_report(report.generated),
                **dict(zip(MEANS, report_scores(words(report.generated), words(report.reference)), strict=True)),
            }
            for report in self.reports
        ]


def judge_reports(
    reports: Sequence[WrittenReport],
    *,
    doubt: Doubt = "negative",
    resamples: int = 1000,
    seed: int = 0,
    config: Mapping[str, Any] | None = None,
    inputs: Mapping[str, str | None] | None = None,
    details: Mapping[str, Any] | None = None,
) -> ReportResult:
    """Score reports, and beside them the same reports shuffled; intervals are over patients.

    Args:
        reports: one an image. Those without a word in their reference cannot be judged: leave them out and count them.
        doubt: what a finding that a report doubts counts as.
        resamples, seed: of the bootstrap.
        config, inputs, details: what else decided the numbers, for the results.

    Raises EvaluationError when there is no report, or a reference is empty.
    """
    if not reports:
        raise EvaluationError("there is no report to judge: no sample has the text of a reference")
    empty = [report.key for report in reports if not words(report.reference)]
    if empty:
        raise EvaluationError(f"{len(empty)} references hold no word, first that of {empty[0]}: leave them out")
    rows = measure(
        _blocks(reports, doubt),
        len(reports),
        resamples=resamples,
        seed=seed,
        groups=[report.patient for report in reports],
    )
    results = Results(
        protocol="report_generation",
        protocol_version=_VERSION,
        rows=rows,
        config={"doubt": doubt, "resamples": resamples, "seed": seed, **(config or {})},
        inputs=dict(inputs or {}),
        details={**_details(reports), **(details or {})},
    )
    return ReportResult(results, reports)


def _blocks(reports: Sequence[WrittenReport], doubt: Doubt) -> list[MetricGroup]:
    references = [report.reference for report in reports]
    meant_NL = asserted([label_report(text) for text in references], doubt)
    blocks = []
    shifts = {"": 0, OTHERS: len(reports) // 2}  # the images of one study lie side by side
    for subgroup, shift in shifts.items():
        generated = [reports[(place + shift) % len(reports)].generated for place in range(len(reports))]
        said_NL = asserted([label_report(text) for text in generated], doubt)
        blocks += overlap_blocks(generated, references, subgroup=subgroup)
        blocks.append(findings_block(said_NL, meant_NL, subgroup=subgroup))
    return blocks


def _details(reports: Sequence[WrittenReport]) -> dict[str, Any]:
    generated = [words(report.generated) for report in reports]
    return {
        "reports": len(reports),
        "patients": len({report.patient for report in reports}),
        "empty": sum(not text for text in generated),
        "cut": sum(not report.ended for report in reports),
        "distinct": len({tuple(text) for text in generated}),
        "mean_words": sum(map(len, generated)) / len(reports),
        "mean_words_of_references": sum(len(words(report.reference)) for report in reports) / len(reports),
    }
