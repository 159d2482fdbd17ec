"""HTML page of a report generation: overlap and findings of every decoding, beside its
baselines.
"""

import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from medvl.data.reports.labeler import Conventions, label_report
from medvl.eval.core.metric_rows import MetricRow
from medvl.eval.core.results import PageHeader
from medvl.eval.html.page import Card, Cards, Deck, Page, header_facts, headline, write_page
from medvl.eval.html.tables import Cell, Table, metric_cell
from medvl.eval.report_generation.evaluate import (
    AGAINST_LABELS,
    ONE_REPORT,
    GeneratedReport,
    ReportResult,
)
from medvl.eval.report_generation.metrics import METRICS, REPORT
from medvl.schema import FINDINGS

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
    "correctness, and one report for "
    "all images can have much of it.",
    "Findings are read by a rule-based labeler, in the generated report and, except in the rows "
    "against labels, in its "
    "reference. The consensus of samples is selected by the same labeler.",
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
            f"{details['mean_words_of_references']:.1f})",
        ),
        ("Labels", result.results.config.get("labels", "of the data")),
    ]


def _overlap(rows: dict[tuple[str, str, str], MetricRow]) -> Table:
    subgroups = dict.fromkeys(subgroup for metric, _, subgroup in rows if metric in _OVERLAP)
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
        caption="With 95% intervals. The baselines give every image the report generated for "
        "one of another "
        "patient, and the one reference that fits all images best: a model near them does not "
        "use the image.",
    )


def _findings(rows: dict[tuple[str, str, str], MetricRow]) -> Table:
    subgroups = dict.fromkeys(subgroup for metric, _, subgroup in rows if metric == "f1")
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
    found = functools.partial(_found, conventions=result.conventions)
    read = [(report, found(report.reference), found(report.generated)) for report in result.reports]
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


def _card(report: GeneratedReport, expected: frozenset[str], found: frozenset[str]) -> Card:
    lines = [("Generated", report.generated or "(empty)"), ("Reference", report.reference)]
    for name, findings in (
        ("Both", expected & found),
        ("Missed", expected - found),
        ("Added", found - expected),
    ):
        if findings:
            lines.append((name, ", ".join(sorted(findings))))
    return Card(title=f"Image {report.key[:16]}", pictures=[], choices=[], lines=lines, tags=[])


def _found(text: str, conventions: Conventions) -> frozenset[str]:
    return frozenset(name for name, value in label_report(text, conventions).items() if value == 1)


def _name(subgroup: str) -> str:
    return f"generated, {AGAINST_LABELS}" if subgroup == AGAINST_LABELS else subgroup or "generated"
