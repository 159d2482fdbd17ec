"""Report generation: generated reports against their references.

Protocol "report_generation", version 3:

* Every image with a reference is evaluated; an empty or truncated report stays in every
  denominator.
* n-gram overlap (`nlg_metrics`) and clinical F1 (`clinical_f1`) compare complete, untruncated
  references.
* Where images have labels, the findings of the generated reports are also compared with these
  ("against labels"), and so are the findings that the labeler reads in the references: what a
  perfect generator would score.
* Reports of other decodings of the same model have the same rows, under the name of the decoding.
* Baselines: the same rows with every image paired with the report that was generated for an image
  of another patient, if there is one; and with the one reference that overlaps most with all
  others (`constant_report`) for every image, the floor of n-gram overlap.
* The generated reports minus each baseline, paired by report: "minus" and the baseline's name.
* The perplexity of the references by the model that generates: exp(sum of the losses of all tokens
  / number of tokens, words or bytes), also behind images and prompts of other patients
  (`medvl.eval.report_generation.generate`).
* Repeated sentences and sides, also of the baselines (`medvl.eval.report_generation.metrics`).
* Intervals: the bootstrap resamples patients, with all their reports.
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from medvl.common.text_files import read_json_objects
from medvl.data.loading.sources import Source
from medvl.data.reports.labeler import Conventions, conventions_named, label_report
from medvl.data.reports.sentences import join_texts
from medvl.data.transforms.text import choose_sections
from medvl.errors import EvaluationError
from medvl.eval.core.metric_rows import MetricGroup, mean_metrics, measure, subgroups_of
from medvl.eval.core.metrics import Array
from medvl.eval.core.results import Results, format_table
from medvl.eval.report_generation.metrics import (
    CONTENTS,
    MEANS,
    METRICS,
    PERPLEXITY,
    REPORT,
    WITH_STOPS,
    Cider,
    Uncertain,
    clinical_metrics,
    content_metrics,
    overlap_metrics,
    perplexity_metrics,
    positive_findings,
    read_contents,
    report_scores,
    words,
)
from medvl.schema import ConventionsName

OTHER_IMAGES = "baseline: other images"
"""Subgroup of the rows in which every image has the report generated for one of another patient:
the score without the image.
"""
ONE_REPORT = "baseline: one report"
"""Subgroup of the rows in which every image has the same report."""
MINUS = "minus "
"""Begin of the subgroups of paired differences, before the name of the baseline."""
COMPARED = (
    ("corpus_bleu_4", REPORT),
    ("mean_rouge_l", REPORT),
    ("f1", "micro of five"),
    ("f1", "micro"),
)
"""Metrics and targets of the rows of paired differences."""
AGAINST_LABELS = "against labels"
"""Subgroup of the rows that compare findings with the labels of the images; others have it
behind their name.
"""
REFERENCE = "reference, against labels"
"""Subgroup of the rows that compare the labeler's reading of the references with the labels of
the images.
"""
PROTOCOL = "report_generation"
PROTOCOL_VERSION = 3


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
    labels: Mapping[str, int] | None = None
    """Labels of the image by finding; None if there are none."""
    subgroups: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Attribute -> group of the image (`medvl.eval.core.metric_rows`)."""
    likelihood: Mapping[str, float] | None = None
    """How well the model predicts the reference: its numbers of "tokens", "words" and "bytes", the
    "loss" summed over tokens in nats, and "loss_of_other_image" behind another image. None: the
    likelihood was not computed.
    """


@dataclasses.dataclass(frozen=True, slots=True)
class ReportResult:
    """Results, with the evaluated reports."""

    results: Results
    reports: Sequence[GeneratedReport]
    others: Mapping[str, Sequence[GeneratedReport]] = dataclasses.field(default_factory=dict)
    """Reports of the same images by other decodings."""
    scores: Mapping[str, Array] = dataclasses.field(default_factory=dict)
    """Scores of each report by other tools, by name."""

    @property
    def conventions(self) -> Conventions:
        """Conventions of the findings."""
        return conventions_named(self.results.config["conventions"])

    def table(self) -> str:
        """Return tables of n-gram overlap and of findings, with the baselines, and the number of
        distinct texts.

        Repeated sentences and sides, perplexity, and the metrics in which full stops are words
        come after the findings.
        """
        with_stops = [row for row in self.results.rows if row.metric.endswith(WITH_STOPS)]
        contents = [row for row in self.results.rows if row.metric in CONTENTS]
        perplexity = [row for row in self.results.rows if row.metric in PERPLEXITY.values()]
        shown_below = (*with_stops, *contents, *perplexity)
        overlap = [
            row for row in self.results.rows if row.metric not in METRICS and row not in shown_below
        ]
        findings = [
            row
            for row in self.results.rows
            if row.metric in METRICS
            and (not row.subgroup or row.target in ("micro", "macro of five"))
        ]
        details = self.results.details
        texts = {"generated": details["distinct"], **details["distinct_others"]}
        counts = ", ".join(f"{count:,} ({name})" for name, count in texts.items())
        distinct = (
            f"distinct texts of {details['reports']:,}: {counts}, "
            f"{details['distinct_references']:,} (references); the commonest generated text: "
            f"{details['commonest']:,} times"
        )
        parts = (overlap, findings, contents, perplexity, with_stops)
        tables = [format_table(rows) for rows in parts if rows]
        cut = details.get("references_cut_in_training")
        lines = (
            [distinct]
            if cut is None
            else [f"references longer than the model's texts: {cut:,}, compared in full", distinct]
        )
        return "\n\n".join([*tables, "\n".join(lines)])

    def predictions(self) -> list[dict[str, Any]]:
        """Return one JSON object per image: the texts, their findings, and the report's own
        scores.
        """
        cider = Cider([words(report.reference) for report in self.reports])
        return [
            {
                **dataclasses.asdict(report),
                **(
                    {
                        "others": {
                            name: of_name[row].generated for name, of_name in self.others.items()
                        }
                    }
                    if self.others
                    else {}
                ),
                "reference_findings": label_report(report.reference, self.conventions),
                "generated_findings": label_report(report.generated, self.conventions),
                **dict(
                    zip(
                        MEANS,
                        report_scores(words(report.generated), words(report.reference), cider),
                        strict=True,
                    )
                ),
                **(
                    {"scores": {name: float(score_N[row]) for name, score_N in self.scores.items()}}
                    if self.scores
                    else {}
                ),
            }
            for row, report in enumerate(self.reports)
        ]


def evaluate_reports(
    reports: Sequence[GeneratedReport],
    *,
    others: Mapping[str, Sequence[GeneratedReport]] | None = None,
    uncertain: Uncertain = "negative",
    conventions: ConventionsName = "chexpert",
    scores: Mapping[str, Array] | None = None,
    extra: Sequence[MetricGroup] = (),
    resamples: int = 1000,
    seed: int = 0,
    config: Mapping[str, Any] | None = None,
    inputs: Mapping[str, str | None] | None = None,
    details: Mapping[str, Any] | None = None,
) -> ReportResult:
    """Evaluate generated reports; the module docstring describes the protocol.

    Args:
        reports: one per image. Leave out images without a reference, and count them in `details`.
        others: reports of the same images, in the same order, by the name of their decoding.
        uncertain: label of findings that a report mentions as uncertain.
        conventions: what the labeler takes as present and as uncertain.
        scores: scores of each of `reports` by other tools, by name; their means are evaluated.
        extra: further metrics of `reports`, such as those of
            `medvl.eval.report_generation.external`.
        resamples, seed: number and seed of the bootstrap resamples.
        config, inputs, details: further entries of the results.

    Raises EvaluationError if there is no report, a reference is empty, other decodings have other
    images, or the conventions are unknown.
    """
    others = dict(others or {})
    rules = conventions_named(conventions, error=EvaluationError)
    if not reports:
        raise EvaluationError(
            "expected reports, got none: use samples with reference texts", "empty"
        )
    empty = [report.key for report in reports if not words(report.reference)]
    if empty:
        raise EvaluationError(
            f"{len(empty)} references are empty, first that of {empty[0]}: leave them out", "empty"
        )
    for name, of_name in others.items():
        if [report.key for report in of_name] != [report.key for report in reports]:
            message = f"expected reports {name!r} of the same images in the same order"
            raise EvaluationError(message, "mismatch", field="others")
    scores = dict(scores or {})
    groups = [*_metric_groups(reports, others, uncertain, rules), *score_metrics(scores), *extra]
    rows = measure(
        groups,
        len(reports),
        resamples=resamples,
        seed=seed,
        groups=[report.patient for report in reports],
    )
    results = Results(
        protocol=PROTOCOL,
        protocol_version=PROTOCOL_VERSION,
        rows=rows,
        config={
            "uncertain": uncertain,
            "conventions": conventions,
            "resamples": resamples,
            "seed": seed,
            **(config or {}),
        },
        inputs=dict(inputs or {}),
        details={**_details(reports, others), **(details or {})},
    )
    return ReportResult(results, reports, others, scores)


def _metric_groups(
    reports: Sequence[GeneratedReport],
    others: Mapping[str, Sequence[GeneratedReport]],
    uncertain: Uncertain,
    conventions: Conventions,
) -> list[MetricGroup]:
    references = [report.reference for report in reports]
    decoded = {
        name: [report.generated for report in of_name]
        for name, of_name in {"": reports, **others}.items()
    }
    baselines = {
        name: [(references if floor.of_references else decoded[""])[row] for row in floor.index_N]
        for name, floor in floors_of(reports).items()
    }
    distinct = dict.fromkeys(itertools.chain(references, *decoded.values(), *baselines.values()))
    labels_of = {text: label_report(text, conventions) for text in distinct}
    contents = {text: read_contents(text) for text in distinct}
    of_references = [contents[text] for text in references]

    def positive(texts: Sequence[str]) -> NDArray[np.bool_]:
        return positive_findings([labels_of[text] for text in texts], uncertain)

    groups = []
    of_subgroup = {}
    for subgroup, texts in {**decoded, **baselines}.items():
        of_subgroup[subgroup] = [
            *overlap_metrics(texts, references, subgroup=subgroup),
            clinical_metrics(positive(texts), positive(references), subgroup=subgroup),
            *content_metrics([contents[t] for t in texts], of_references, subgroup=subgroup),
        ]
        groups += of_subgroup[subgroup]
    for name in baselines:
        pairs = zip(of_subgroup[""], of_subgroup[name], strict=True)
        differences = (_difference(ours, floor, f"{MINUS}{name}") for ours, floor in pairs)
        groups += [group for group in differences if group.rows]
    groups += perplexity_metrics([report.likelihood for report in reports], OTHER_IMAGES)
    if all(report.labels is not None for report in reports):
        labels_NL = positive_findings([report.labels or {} for report in reports], uncertain)
        for name, texts in decoded.items():
            subgroup = f"{name}, {AGAINST_LABELS}" if name else AGAINST_LABELS
            groups.append(clinical_metrics(positive(texts), labels_NL, subgroup=subgroup))
        groups.append(clinical_metrics(positive(references), labels_NL, subgroup=REFERENCE))
    return groups


def _difference(ours: MetricGroup, floor: MetricGroup, subgroup: str) -> MetricGroup:
    """Return the metrics of `COMPARED` of two groups with the same rows, one minus the other."""
    columns = [
        column for column, row in enumerate(ours.rows) if (row.metric, row.target) in COMPARED
    ]
    rows = [dataclasses.replace(ours.rows[column], subgroup=subgroup) for column in columns]

    def statistic(counts_NR: Array) -> Array:
        return (ours.statistic(counts_NR) - floor.statistic(counts_NR))[:, columns]

    return MetricGroup(rows, statistic)


def score_metrics(scores: Mapping[str, Array]) -> list[MetricGroup]:
    """Return the means of scores of each report by other tools."""
    return [
        mean_metrics(f"mean_{name}", score_N[:, None], [REPORT]) for name, score_N in scores.items()
    ]


class Floor(NamedTuple):
    """A baseline: which text every report has in place of its own."""

    of_references: bool
    """Whether the texts are references, or generated."""
    index_N: list[int]


def floors_of(reports: Sequence[GeneratedReport]) -> dict[str, Floor]:
    """Return the baselines of reports by the names of their subgroups."""
    floors = {}
    other = other_patients([report.patient for report in reports])
    if other is not None:
        floors[OTHER_IMAGES] = Floor(False, other)
    references = [report.reference for report in reports]
    constant = references.index(constant_report(references))
    return {**floors, ONE_REPORT: Floor(True, [constant] * len(reports))}


def other_patients(patients: Sequence[str]) -> list[int] | None:
    """Return for each image the index of one of another patient, None where all are of one patient.

    It is the first at or after a distance of half of the images, around the end.
    """
    if len(set(patients)) < 2:
        return None
    count = len(patients)
    others = []
    for index, patient in enumerate(patients):
        steps = range(count // 2, count // 2 + count)
        others.append(
            next(at for step in steps if patients[at := (index + step) % count] != patient)
        )
    return others


def constant_report(references: Sequence[str], candidates: int = 256, most: int = 4000) -> str:
    """Return the reference with the highest corpus BLEU-1 if it were the report of every image.

    The `candidates` most frequent references are compared, on about `most` images at regular
    distances. Choosing on the references of the test set makes this a high floor.
    """
    references = references[:: -(-len(references) // most)]
    counted = Counter(references)
    words_by_text = {text: words(text) for text in counted}
    number = {
        word: index
        for index, word in enumerate(dict.fromkeys(w for ws in words_by_text.values() for w in ws))
    }
    counts_MV = np.zeros((len(counted), len(number)), np.int32)
    for row, of_text in enumerate(words_by_text.values()):
        np.add.at(counts_MV[row], [number[word] for word in of_text], 1)
    times_M = np.array(list(counted.values()))
    mean_words = float(times_M @ counts_MV.sum(axis=1)) / len(references)
    scores = {}
    for text, _ in counted.most_common(candidates):
        ids, times = np.unique([number[word] for word in words_by_text[text]], return_counts=True)
        matches = float(times_M @ np.minimum(counts_MV[:, ids], times).sum(axis=1)) / len(
            references
        )
        length = len(words_by_text[text])
        scores[text] = matches / length * np.exp(min(0.0, 1 - mean_words / length))
    return max(scores, key=scores.__getitem__)


def _details(
    reports: Sequence[GeneratedReport], others: Mapping[str, Sequence[GeneratedReport]]
) -> dict[str, Any]:
    generated = [words(report.generated) for report in reports]
    return {
        "reports": len(reports),
        "patients": len({report.patient for report in reports}),
        "empty": sum(not text for text in generated),
        "truncated": sum(not report.ended for report in reports),
        "distinct": len({tuple(text) for text in generated}),
        "commonest": max(Counter(map(tuple, generated)).values()),
        "distinct_others": {
            name: len({tuple(words(report.generated)) for report in of_name})
            for name, of_name in others.items()
        },
        "distinct_references": len({tuple(words(report.reference)) for report in reports}),
        "mean_words": sum(map(len, generated)) / len(reports),
        "mean_words_of_references": sum(len(words(report.reference)) for report in reports)
        / len(reports),
    }


# Generated reports of any system, read from JSON lines.


class Reference(NamedTuple):
    """The complete report of an image."""

    patient: str
    text: str
    subgroups: Mapping[str, str] = {}
    """Attribute -> group of the image."""


def read_reports(
    path: Path, references: Mapping[str, Reference] | None = None
) -> list[GeneratedReport]:
    """Read lines with `key`, `generated`, and without `references` also `reference`.

    Lines may also have `ended`, and without `references` `patient` and `subgroups`.

    predictions.jsonl of an evaluation is such a file. A reference must be the complete text, as it
    was before any model truncated or tokenized it.

    Args:
        path: the file.
        references: key -> reference, of every report that is evaluated; one without a line is
            empty.

    Raises EvaluationError where a line is malformed, a key is repeated, or one is not in
    `references`.
    """
    reports: dict[str, GeneratedReport] = {}
    texts = {"generated": str} if references is not None else {"generated": str, "reference": str}
    for where, row in read_json_objects(
        path, EvaluationError, {"key": object, **texts}, field="predictions"
    ):
        key = str(row["key"])
        generated = row["generated"]
        if references is None:
            subgroups = row.get("subgroups") or {}
            if not isinstance(subgroups, dict):
                raise EvaluationError(
                    f"{where}: subgroups must be an object", "wrong_type", field="subgroups"
                )
            patient = str(row.get("patient", key))
            reference = row["reference"]
        elif key in references:
            patient, reference, subgroups = references[key]
        else:
            message = f"{where}: the key is of a report that is not in the data"
            raise EvaluationError(message, "malformed", field="key")
        if key in reports:
            raise EvaluationError(f"{where}: {key} has a second report", "conflict", field="key")
        ended = bool(row.get("ended", True))
        reports[key] = GeneratedReport(
            key=key,
            patient=patient,
            reference=reference,
            generated=generated,
            ended=ended,
            labels=row.get("labels"),
            subgroups=subgroups,
        )
    for key, (patient, reference, subgroups) in (references or {}).items():
        missing = GeneratedReport(
            key=key, patient=patient, reference=reference, generated="", subgroups=subgroups
        )
        reports.setdefault(key, missing)
    return list(reports.values())


def references_of(source: Source, sections: tuple[str, ...]) -> dict[str, Reference]:
    """Return key -> complete reference of the samples that have one."""
    references = {}
    for position in range(len(source)):
        sample = source.sample(position)
        text = join_texts(choose_sections(sample.sections, sections))
        if text:
            references[sample.key] = Reference(sample.patient, text, subgroups_of(sample))
    return references
