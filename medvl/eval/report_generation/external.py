"""Clinical scores by the original tools, from the files that they write: CheXbert, RadGraph,
CXR-Report-Metric, RadEval.

medvl neither contains nor downloads these models. Run a tool on the generated reports and on the
references, in the order of predictions.jsonl, and give its files. Formats:

* CheXbert (stanfordmlgroup/CheXbert, `label.py`): CSV with the column `Report Impression` and the
  14 findings, 1, 0, -1 or empty. The texts must be those of the reports. Rows have the names of
  clinical F1, with the subgroup "CheXbert".
* RadGraph (the package `radgraph` 0.1.18, or PhysioNet's inference code): JSON object with one
  entry for each report, in order: `entities`, number -> `tokens`, `label`, `relations` (list of
  [kind, number]). F1 of a report's set of entities, mean over reports: `mean_radgraph_f1_simple`
  (words and label), `_partial` (and whether there is a relation), `_complete` (and each relation
  with the words that it leads to), as the reward levels of the package.
* CXR-Report-Metric (rajpurkarlab/CXR-Report-Metric): CSV with a row for each report and any of
  `SCORES`; means. RadCliQ-v1 is computed from its parts where the file lacks it.
* RadEval (`RadEval(..., per_sample=True)`): JSON object, metric -> a number for each report.

Metrics of files that name single texts have the floors of all tables: the texts of other patients'
images, and one reference for all images.

Shape letters: N reports, L findings.
"""

import dataclasses
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from medvl.common.files import sha256
from medvl.common.text_files import read_csv_rows, read_text
from medvl.common.untrusted import parse_json
from medvl.data.reports.radeval import open_radeval
from medvl.errors import ConfigError, EvaluationError
from medvl.eval.core.metric_rows import MetricGroup, MetricRow, mean_metrics
from medvl.eval.core.metrics import Array
from medvl.eval.report_generation.metrics import (
    REPORT,
    Uncertain,
    clinical_metrics,
    positive_findings,
    words,
)
from medvl.eval.report_generation.protocol import Floor, GeneratedReport, floors_of
from medvl.schema import FINDINGS

_LOG = logging.getLogger(__name__)
CHEXBERT = "CheXbert"
"""Subgroup of the rows from CheXbert's labels."""
SCORES = ("bleu_score", "bertscore", "semb_score", "radgraph_combined", "RadCliQ-v0", "RadCliQ-v1")
"""Columns of CXR-Report-Metric that are read."""
RADCLIQ = "RadCliQ-v1"
RADCLIQ_PARTS = ("radgraph_combined", "bertscore", "semb_score", "bleu_score")
"""Columns that RadCliQ-v1 is computed from, in the order of the arguments of `radcliq_v1`."""
_SCORE_NAME = re.compile(r"[A-Za-z][\w.@/-]*")
_RADCLIQ_MEAN = (0.53792312, 0.61757256, 0.76479421, 0.44738335)
_RADCLIQ_SCALE = (0.30282584, 0.22430938, 0.25394391, 0.29892717)
_RADCLIQ_WEIGHT = (-0.377083683, -0.3703001, -0.252616218, 4.3e-12)
_RADCLIQ_BIAS = 2.5e-10
_TEXT = "Report Impression"

Annotation = Mapping[str, Any]
"""A report's annotation by RadGraph."""


def chexbert_metrics(
    generated: Path,
    references: Path,
    texts: Sequence[tuple[str, str]],
    uncertain: Uncertain = "negative",
    floors: Mapping[str, Floor] | None = None,
) -> list[MetricGroup]:
    """Return precision, recall and F1 of CheXbert's labels.

    Args:
        generated, references: files of `label.py`.
        texts: (generated text, reference) of each report, which the files must be of.
        uncertain: label of findings that CheXbert calls uncertain.
        floors: baselines by name, which have the same rows.

    Raises EvaluationError where a file is damaged, or of other reports.
    """
    ours_NL, theirs_NL = (
        positive_findings(
            _read_chexbert(path, [pair[side] for pair in texts]),
            uncertain,
        )
        for side, path in enumerate((generated, references))
    )
    groups = [clinical_metrics(ours_NL, theirs_NL, subgroup=CHEXBERT)]
    for name, floor in (floors or {}).items():
        floor_NL = (theirs_NL if floor.of_references else ours_NL)[floor.index_N]
        groups.append(clinical_metrics(floor_NL, theirs_NL, subgroup=f"{CHEXBERT}, {name}"))
    return groups


def radgraph_scores(
    generated: Sequence[Annotation], references: Sequence[Annotation]
) -> dict[str, Array]:
    """Return the F1 of RadGraph's annotations of each report at three levels, by their names."""
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
    return {
        f"radgraph_f1_{name}": np.array(
            [
                _f1(level(ours), level(theirs))
                for ours, theirs in zip(generated, references, strict=True)
            ]
        )
        for name, level in levels.items()
    }


def radgraph_floors(
    generated: Sequence[Annotation],
    references: Sequence[Annotation],
    floors: Mapping[str, Floor],
) -> list[MetricGroup]:
    """Return the mean F1 scores of RadGraph's annotations of baselines."""
    groups = []
    for subgroup, floor in floors.items():
        side = references if floor.of_references else generated
        scores = radgraph_scores([side[row] for row in floor.index_N], references)
        groups += [
            mean_metrics(f"mean_{name}", score_N[:, None], [REPORT], subgroup=subgroup)
            for name, score_N in scores.items()
        ]
    return groups


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


def read_scores(path: Path, reports: int) -> dict[str, Array]:
    """Return the scores of each report by name, from a file of CXR-Report-Metric (CSV) or RadEval
    (JSON).

    Raises EvaluationError where the file is damaged, has no scores, or is of another number of
    reports.
    """
    read = _read_json_scores if path.suffix == ".json" else _read_csv_scores
    scores = read(path)
    for score_N in scores.values():
        _check_count(path, len(score_N), reports, "scores")
    return with_radcliq(scores)


def radeval_scores(
    metrics: Sequence[str], texts: Sequence[tuple[str, str]]
) -> tuple[dict[str, Array], dict[str, str]]:
    """Return the scores of each report by RadEval, and why the other metrics have none.

    Args:
        metrics: names of RadEval, such as bleu, rouge, bertscore, radgraph, f1chexbert, radcliq.
        texts: (generated text, reference) of each report.

    Raises ConfigError where RadEval is not installed.
    """
    scores: dict[str, Array] = {}
    missing: dict[str, str] = {}
    for metric in metrics:
        try:
            score = open_radeval(metric)
        except ConfigError as error:
            if error.code == "not_found":
                raise
            missing[metric] = str(error)
            continue
        metric_values = score([text for text, _ in texts], [reference for _, reference in texts])
        scores |= {name: np.array(values) for name, values in metric_values.items()}
    return with_radcliq(scores), missing


def with_radcliq(scores: dict[str, Array]) -> dict[str, Array]:
    """Return scores with RadCliQ-v1, where they have its parts and not the metric."""
    if RADCLIQ not in scores and all(name in scores for name in RADCLIQ_PARTS):
        radgraph_N, bertscore_N, chexbert_N, bleu2_N = (scores[name] for name in RADCLIQ_PARTS)
        scores[RADCLIQ] = radcliq_v1(
            radgraph_N=radgraph_N, bertscore_N=bertscore_N, chexbert_N=chexbert_N, bleu2_N=bleu2_N
        )
    return scores


def radcliq_v1(
    *, radgraph_N: ArrayLike, bertscore_N: ArrayLike, chexbert_N: ArrayLike, bleu2_N: ArrayLike
) -> NDArray[np.float64]:
    """(N,): RadCliQ-v1 of reports from its parts (Yu et al., Patterns 2023); lower is better.

    A linear regression of the errors that radiologists count: 2.450 - 1.245 RadGraph - 1.651
    BERTScore - 0.995 CheXbert, and nothing for BLEU. Leaderboards print 1 / mean.

    Args:
        radgraph_N: mean of the F1 of entities and of relations of RadGraph.
        bertscore_N: distilroberta-base, layer 5, rescaled, with IDF weights.
        chexbert_N: cosine of CheXbert's vectors (`semb_score`).
        bleu2_N: BLEU-2 of each report.

    Raises EvaluationError where the parts have different numbers of reports.
    """
    parts = [np.asarray(part, float) for part in (radgraph_N, bertscore_N, chexbert_N, bleu2_N)]
    if len({part.shape for part in parts}) > 1:
        shapes = ", ".join(str(part.shape) for part in parts)
        raise EvaluationError(f"expected the parts of equal reports, got {shapes}", "mismatch")
    score_N = np.full(parts[0].shape, _RADCLIQ_BIAS)
    for part, mean, scale, weight in zip(
        parts, _RADCLIQ_MEAN, _RADCLIQ_SCALE, _RADCLIQ_WEIGHT, strict=True
    ):
        score_N += weight * (part - mean) / scale
    return score_N


def inverse_radcliq(score_N: Array) -> MetricGroup:
    """Return 1 / the mean RadCliQ-v1 over reports, as leaderboards print it; higher is better."""

    def statistic(counts_NR: Array) -> Array:
        mean_R1 = (counts_NR.T @ score_N[:, None]) / counts_NR.sum(axis=0)[:, None]
        return np.divide(1.0, mean_R1, out=np.full_like(mean_R1, np.nan), where=mean_R1 != 0)

    row = MetricRow(metric=f"inverse_{RADCLIQ}", target=REPORT, n=len(score_N))
    return MetricGroup([row], statistic)


def _read_csv_scores(path: Path) -> dict[str, Array]:
    rows = read_csv_rows(path, EvaluationError, field="scores")
    names = [name for name in SCORES if rows and name in rows[0]]
    if not names:
        message = f"{path} has none of the columns {', '.join(SCORES)}"
        raise EvaluationError(message, "missing", field="scores")
    return {name: np.array([_number(row[name], path, name) for row in rows]) for name in names}


def _read_json_scores(path: Path) -> dict[str, Array]:
    """Read the lists of numbers of a JSON object; its other entries are scores of the corpus."""
    text = read_text(path, EvaluationError, field="scores", what="a file of scores")
    try:
        lists = {
            name: np.array(values, float)
            for name, values in parse_json(text, nan=True).items()
            if isinstance(values, list) and _SCORE_NAME.fullmatch(name)
        }
    except (ValueError, TypeError, AttributeError) as error:
        message = (
            f"{path} is not a JSON object of lists of numbers ({type(error).__name__}); write "
            f"RadEval's result with per_sample=True"
        )
        raise EvaluationError(message, "malformed", field="scores") from error
    if not lists or any(score_N.ndim != 1 for score_N in lists.values()):
        message = f"{path} has no list with a number for each report; use per_sample=True"
        raise EvaluationError(message, "missing", field="scores")
    return lists


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


def _check_count(path: Path, count: int, reports: int, field: str) -> None:
    if count != reports:
        message = (
            f"{path}: expected {reports} reports in the order of predictions.jsonl, got {count}"
        )
        raise EvaluationError(message, "mismatch", field=field)


def _with_relations(report: Annotation) -> set[Any]:
    entities = report["entities"]
    entries: set[Any] = set()
    for entity in entities.values():
        if not entity["relations"]:
            entries.add((entity["tokens"], entity["label"]))
        for kind, other in entity["relations"]:
            entries.add(
                (
                    entity["tokens"].lower(),
                    entity["label"],
                    kind,
                    entities[str(other)]["tokens"].lower(),
                )
            )
    return entries


def _f1(generated: Iterable[Any], reference: Iterable[Any]) -> float:
    ours = set(generated)
    theirs = set(reference)
    return 2 * len(ours & theirs) / (len(ours) + len(theirs)) if ours and theirs else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExternalOptions:
    """Scores by other tools, of the reports in the order of predictions.jsonl."""

    chexbert: tuple[Path, Path] | None = None
    """two files of CheXbert's label.py: of the generated reports and of the references"""
    radgraph: tuple[Path, Path] | None = None
    """two files of RadGraph's annotations: of the generated reports and of the references"""
    metric_scores: Path | None = None
    """file of CXR-Report-Metric (CSV), or of RadEval with per_sample=True (JSON)"""
    radeval: tuple[str, ...] = ()
    """metrics of RadEval (`pip install 'medvl[reports]'`), such as radgraph f1chexbert bertscore.
    Those whose weights cannot be had are named
    """

    def read(
        self, reports: Sequence[GeneratedReport], uncertain: Uncertain
    ) -> tuple[dict[str, Array], list[MetricGroup]]:
        """Return the scores of each report by name, and the metrics that are no means of them."""
        texts = [(report.generated, report.reference) for report in reports]
        scores, missing = radeval_scores(self.radeval, texts)
        for reason in missing.values():
            _LOG.warning("%s", reason)
        groups: list[MetricGroup] = []
        floors = {} if self.chexbert is None and self.radgraph is None else floors_of(reports)
        if self.chexbert is not None:
            groups += chexbert_metrics(*self.chexbert, texts, uncertain, floors)
        if self.radgraph is not None:
            ours, theirs = (read_radgraph(path, len(reports)) for path in self.radgraph)
            scores |= radgraph_scores(ours, theirs)
            groups += radgraph_floors(ours, theirs, floors)
        if self.metric_scores is not None:
            scores |= read_scores(self.metric_scores, len(reports))
        if RADCLIQ in scores:
            groups.append(inverse_radcliq(scores[RADCLIQ]))
        return scores, groups

    def inputs(self) -> dict[str, str]:
        """Return the hashes of the files that are read."""
        named = {"chexbert": self.chexbert, "radgraph": self.radgraph}
        hashes = {
            f"{name}_{side}": sha256(path)
            for name, pair in named.items()
            for side, path in zip(("generated", "references"), pair or (), strict=False)
        }
        if self.metric_scores is not None:
            hashes["metric_scores"] = sha256(self.metric_scores)
        return hashes
