"""Clinical scores by the original tools, from the files that they write: CheXbert, RadGraph,
CXR-Report-Metric.

medvl neither contains nor downloads these models. Run a tool on the generated reports and on the
references, in the order of predictions.jsonl, and give its two files. Formats:

* CheXbert (stanfordmlgroup/CheXbert, `label.py`): CSV with the column `Report Impression` and the
  14 findings, 1, 0, -1 or empty. The texts must be those of the reports. Rows have the names of
  clinical F1, with the subgroup "CheXbert".
* RadGraph (the package `radgraph` 0.1.18, or PhysioNet's inference code): JSON object with one
  entry for each report, in order: `entities`, number -> `tokens`, `label`, `relations` (list of
  [kind, number]). F1 of a report's set of entities, mean over reports: `mean_radgraph_f1_simple`
  (words and label), `_partial` (and whether there is a relation), `_complete` (and each relation
  with the words that it leads to), as the reward levels of the package.
* CXR-Report-Metric (rajpurkarlab/CXR-Report-Metric): CSV with a row for each report and any of
  `SCORES`; means.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from medvl.common.text_files import read_csv_rows, read_text
from medvl.common.untrusted import parse_json
from medvl.errors import EvaluationError
from medvl.eval.core.metric_rows import MetricGroup, mean_metrics
from medvl.eval.report_generation.metrics import (
    REPORT,
    Uncertain,
    clinical_metrics,
    positive_findings,
    words,
)
from medvl.schema import FINDINGS

CHEXBERT = "CheXbert"
"""Subgroup of the rows from CheXbert's labels."""
SCORES = ("bleu_score", "bertscore", "semb_score", "radgraph_combined", "RadCliQ-v0", "RadCliQ-v1")
"""Columns of CXR-Report-Metric that are read."""
_TEXT = "Report Impression"

Annotation = Mapping[str, Any]
"""A report's annotation by RadGraph."""


def chexbert_metrics(
    generated: Path,
    references: Path,
    texts: Sequence[tuple[str, str]],
    uncertain: Uncertain = "negative",
) -> MetricGroup:
    """Return precision, recall and F1 of CheXbert's labels.

    Args:
        generated, references: files of `label.py`.
        texts: (generated text, reference) of each report, which the files must be of.
        uncertain: label of findings that CheXbert calls uncertain.

    Raises EvaluationError where a file is damaged, or of other reports.
    """
    sides = [
        _read_chexbert(path, [pair[side] for pair in texts])
        for side, path in enumerate((generated, references))
    ]
    ours_NL, theirs_NL = (positive_findings(labels, uncertain) for labels in sides)
    return clinical_metrics(ours_NL, theirs_NL, subgroup=CHEXBERT)


def radgraph_metrics(
    generated: Sequence[Annotation], references: Sequence[Annotation]
) -> list[MetricGroup]:
    """Return the three mean F1 scores of RadGraph's annotations."""
    levels: Mapping[str, Callable[[Annotation], set[Any]]] = {
        "simple": lambda report: {
            (entity["tokens"], entity["label"]) for entity in report["entities"].values()
        },
        "partial": lambda report: {
            (entity["tokens"], entity["label"], bool(entity["relations"]))
            for entity in report["entities"].values()
        },
        "complete": _with_relations,
    }
    return [
        mean_metrics(
            f"mean_radgraph_f1_{name}",
            np.array(
                [
                    [_f1(level(ours), level(theirs))]
                    for ours, theirs in zip(generated, references, strict=True)
                ]
            ),
            [REPORT],
        )
        for name, level in levels.items()
    ]


def read_radgraph(path: Path, reports: int) -> list[Annotation]:
    """Read one file of annotations. Raises EvaluationError where it is damaged, or of another
    number of reports.
    """
    try:
        text = read_text(
            path, EvaluationError, field="radgraph", what="a file of RadGraph's annotations"
        )
        entries = list(parse_json(text).values())
        for entry in entries:
            _with_relations(entry)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        message = (
            f"{path} is not a file of RadGraph's annotations ({type(error).__name__}); "
            f"see the docs for its format"
        )
        raise EvaluationError(message, "malformed", field="radgraph") from error
    _check_count(path, len(entries), reports, "radgraph")
    return entries


def report_metric_scores(path: Path, reports: int) -> list[MetricGroup]:
    """Return the means of the scores in a file of CXR-Report-Metric. Raises EvaluationError."""
    rows = read_csv_rows(path, EvaluationError, field="scores")
    found = [name for name in SCORES if rows and name in rows[0]]
    if not found:
        message = f"{path} has none of the columns {', '.join(SCORES)}"
        raise EvaluationError(message, "missing", field="scores")
    _check_count(path, len(rows), reports, "scores")
    groups = []
    for name in found:
        values_N1 = np.array([[_number(row[name], path, name)] for row in rows])
        groups.append(mean_metrics(f"mean_{name}", values_N1, [REPORT]))
    return groups


def _read_chexbert(path: Path, texts: Sequence[str]) -> list[dict[str, int]]:
    rows = read_csv_rows(path, EvaluationError, field="chexbert")
    missing = [name for name in (_TEXT, *FINDINGS) if not rows or name not in rows[0]]
    if missing:
        message = (
            f"{path} lacks the columns {', '.join(missing[:3])}: expected a file of "
            f"CheXbert's label.py"
        )
        raise EvaluationError(message, "missing", field="chexbert")
    _check_count(path, len(rows), len(texts), "chexbert")
    for number, (row, text) in enumerate(zip(rows, texts, strict=True)):
        if words(row[_TEXT]) != words(text):
            message = (
                f"{path}: row {number + 1} is of another text than report {number + 1}; "
                f"keep their order"
            )
            raise EvaluationError(message, "mismatch", field="chexbert")
    return [
        {
            name: int(_number(row[name], path, name))
            for name in FINDINGS
            if row[name].strip() not in ("", "nan")
        }
        for row in rows
    ]


def _number(text: str, path: Path, column: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        message = f"{path}: column {column} must hold numbers, got another value"
        raise EvaluationError(message, "malformed", field=column) from error


def _check_count(path: Path, found: int, reports: int, field: str) -> None:
    if found != reports:
        message = (
            f"{path}: expected {reports} reports in the order of predictions.jsonl, got {found}"
        )
        raise EvaluationError(message, "mismatch", field=field)


def _with_relations(report: Annotation) -> set[Any]:
    entities = report["entities"]
    found: set[Any] = set()
    for entity in entities.values():
        if not entity["relations"]:
            found.add((entity["tokens"], entity["label"]))
        for kind, other in entity["relations"]:
            found.add(
                (
                    entity["tokens"].lower(),
                    entity["label"],
                    kind,
                    entities[str(other)]["tokens"].lower(),
                )
            )
    return found


def _f1(generated: Iterable[Any], reference: Iterable[Any]) -> float:
    ours = set(generated)
    theirs = set(reference)
    return 2 * len(ours & theirs) / (len(ours) + len(theirs)) if ours and theirs else 0.0
