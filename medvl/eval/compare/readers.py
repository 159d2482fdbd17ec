"""Metric groups of each protocol, recomputed from the lines of its `predictions.jsonl`.

A reader gives the rows that the lines determine: means and other metrics of any items, which can be restricted to some
of them, and scores and labels of classes, whose AUROC has rules of its own for small subgroups. Rows that need more
(gains of a retrieval, calibration, text overlap of baselines) have no paired difference.

Shape letters: N items, L classes, M texts.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from medvl.data.annotations.questions import Question
from medvl.data.text_tasks.tasks import TASKS
from medvl.eval.change.evaluate import change_metrics
from medvl.eval.classification.label_policy import LabelPolicy
from medvl.eval.core.metric_rows import MetricGroup, MetricRow, label_mean_metrics, mean_metrics
from medvl.eval.core.metrics import Array
from medvl.eval.core.results import Results
from medvl.eval.dense.box_metrics import APConvention
from medvl.eval.dense.detection import detection_groups, read_detections
from medvl.eval.dense.segmentation import read_areas, segmentation_groups
from medvl.eval.generation.findings import findings_metrics
from medvl.eval.generation.memorisation import SPACES, too_near_metrics
from medvl.eval.matching.evaluate import COLUMNS, matching_groups
from medvl.eval.report_generation.clinical_f1 import clinical_metrics, positive_findings
from medvl.eval.report_generation.evaluate import AGAINST_LABELS
from medvl.eval.report_generation.nlg_metrics import (
    MEANS,
    REPORT,
    bleu_metrics,
    stop_metrics,
    words,
    words_and_stops,
)
from medvl.eval.retrieval.by_class import precision_metrics
from medvl.eval.retrieval.image_text import rank_groups
from medvl.eval.text_tasks.metrics import mean_over_seeds, summed_metric
from medvl.eval.vqa.baselines import QUESTION_ONLY
from medvl.eval.vqa.evaluate import ACCURACY, GAIN, MODEL, attribute_masks, masked_means, type_masks
from medvl.schema import CHANGES

Line = Mapping[str, Any]
Lines = Sequence[Line]
_NAMES = frozenset({"key", "phrase", "patient", "subgroups", "label"})
"""Fields of a line that are not metrics."""


class Ranked(NamedTuple):
    """Scores and labels of classes."""

    names: list[str]
    scores_NL: Array
    labels_NL: Array
    """1, 0 or NaN."""
    suffix: str = ""
    """Suffix of the metrics in the results, such as "@100%"."""

    def columns(self) -> Iterator[tuple[str, Array, Array]]:
        """Yield (class, scores_N, labels_N) of each class."""
        yield from zip(self.names, self.scores_NL.T, self.labels_NL.T, strict=True)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Reader:
    """Reader of the lines of one protocol."""

    item: tuple[str, ...] = ("key",)
    """Fields that identify an item."""
    group: str = "patient"
    """Field of the bootstrap group."""
    earlier_group: str | None = None
    """Field of the bootstrap group in lines of earlier versions, which do not have `group`."""
    needs: tuple[str, ...] = ()
    """Fields that lines of earlier versions do not have."""
    reference: str = ""
    """Field of what the item is compared with, where the settings of a run choose it."""
    metric_groups: Callable[[Lines, Results], list[MetricGroup]] = lambda lines, results: []
    """Metrics of any items."""
    ranked: Callable[[Lines, Results], Ranked | None] = lambda lines, results: None
    """Scores and labels, whose AUROC and average precision are further metrics."""


def _classes(lines: Lines, results: Results) -> Ranked:
    names = list(lines[0]["scores"])
    return Ranked(names, _table(lines, "scores", names), _table(lines, "labels", names))


def _probe(lines: Lines, results: Results) -> Ranked:
    """Return the scores of the first run of the largest fraction; it is the only run if that is the full set."""
    return _classes(lines, results)._replace(suffix="@100%" if max(results.config["fractions"]) == 1 else "")


def _robust_findings(lines: Lines, results: Results) -> Ranked | None:
    if "findings" not in lines[0]:
        return None
    labels = list(lines[0]["labels"])
    names = [name for name in lines[0]["findings"] if name in labels]
    labels_NL = LabelPolicy(**results.config["policy"]).resolve(_table(lines, "labels", labels), labels).labels_NL
    return Ranked(names, _table(lines, "findings", names), labels_NL[:, [labels.index(name) for name in names]])


def _robust_texts(lines: Lines, results: Results) -> list[MetricGroup]:
    if "texts" not in lines[0]:
        return []
    return matching_groups(np.array([[_number(value) for value in line["texts"]] for line in lines]), decides=False)


def _grounding(lines: Lines, results: Results) -> list[MetricGroup]:
    labels = [line["label"] for line in lines]
    metrics = [field for field in lines[0] if field not in _NAMES]
    return [label_mean_metrics(name, np.array([_number(line[name]) for line in lines]), labels) for name in metrics]


def _retrieval(lines: Lines, results: Results) -> list[MetricGroup]:
    """Return the metrics of images, and of the texts of these images, each drawn with its first image."""
    _, first_M = np.unique([line["text"] for line in lines], return_index=True)
    image_rank_N, text_rank_N = (np.array([int(line[field]) for line in lines]) for field in ("rank", "text_rank"))
    ks: list[int] = results.config["ks"]
    of_texts = rank_groups(text_rank_N[first_M], ks, "text_to_image")
    return [*rank_groups(image_rank_N, ks, "image_to_text"), *(at_items(group, first_M) for group in of_texts)]


def at_items(group: MetricGroup, index_M: Sequence[int] | np.ndarray) -> MetricGroup:
    """Return a group over some of the items for all items; NaN in resamples without any of them."""

    def statistic(counts_NR: Array) -> Array:
        drawn_MR = counts_NR[index_M]
        any_R = drawn_MR.sum(axis=0) > 0
        values_RK = group.statistic(np.where(any_R, drawn_MR, 1.0))
        return np.where(any_R[:, None], values_RK, np.nan)

    return MetricGroup(group.rows, statistic)


def _answers(lines: Lines, results: Results) -> list[MetricGroup]:
    credit_N, floor_N = (
        np.array([_number(line.get(f"{system}_credit")) for line in lines]) for system in (MODEL, QUESTION_ONLY)
    )
    types = type_masks(np.array([bool(line["closed"]) for line in lines]))
    masks = types | attribute_masks([Question.from_json(line) for line in lines])
    groups = [masked_means(ACCURACY, credit_N, masks)]
    return groups if np.isnan(floor_N).all() else [*groups, masked_means(GAIN, credit_N - floor_N, types)]


def _matching(lines: Lines, results: Results) -> list[MetricGroup]:
    scores_N3 = np.array([[_number(line["scores"].get(name)) for name in COLUMNS] for line in lines])
    return matching_groups(scores_N3, decides=any(row.metric == "accuracy" for row in results.rows))


def _reports(lines: Lines, results: Results) -> list[MetricGroup]:
    uncertain = results.config["uncertain"]
    generated_NL, reference_NL = (
        positive_findings([line[f"{side}_findings"] for line in lines], uncertain)
        for side in ("generated", "reference")
    )
    texts = [(line["generated"], line["reference"]) for line in lines]
    groups = [
        bleu_metrics([(words(generated), words(reference)) for generated, reference in texts]),
        *(mean_metrics(name, np.array([[_number(line[name])] for line in lines]), [REPORT]) for name in MEANS),
        *stop_metrics([(words_and_stops(generated), words_and_stops(reference)) for generated, reference in texts]),
        clinical_metrics(generated_NL, reference_NL),
    ]
    if all(line.get("labels") is not None for line in lines):
        labels_NL = positive_findings([line["labels"] for line in lines], uncertain)
        groups.append(clinical_metrics(generated_NL, labels_NL, subgroup=AGAINST_LABELS))
    return groups


def _segmentation(lines: Lines, results: Results) -> list[MetricGroup]:
    labels = results.config["labels"]
    auroc_NL = _table(lines, "pixel_auroc", labels)
    return segmentation_groups(read_areas(lines, labels), auroc_NL, results.config["empty"])


def _detection(lines: Lines, results: Results) -> list[MetricGroup]:
    """Return the metrics of the images in the order of the data, which decides between equal scores."""
    order_N = np.argsort([line["position"] for line in lines])
    labels, convention = results.config["labels"], dict(results.config["convention"])
    convention.pop("name")
    thresholds = results.details["thresholds"]
    known = None if thresholds is None else {label: _number(thresholds[label]) for label in labels}
    images = [read_detections(lines[index], labels) for index in order_N]
    return [at_items(group, order_N) for group in detection_groups(images, labels, APConvention(**convention), known)]


def _change(lines: Lines, results: Results) -> list[MetricGroup]:
    findings = sorted({name for line in lines for name in line["findings"]})
    scores_NLC = np.zeros((len(lines), len(findings), len(CHANGES)))
    truth_NL = np.full(scores_NLC.shape[:2], -1)
    for row, line in enumerate(lines):
        for name, one in line["findings"].items():
            column = findings.index(name)
            scores_NLC[row, column] = [_number(one["scores"][change]) for change in CHANGES]
            truth_NL[row, column] = CHANGES.index(one["label"])
    return [change_metrics(scores_NLC, truth_NL, findings)]


def _hidden_words(lines: Lines, results: Results) -> list[MetricGroup]:
    """Return accuracy and negative log-likelihood of masked prediction, of all words and by kind."""
    kinds = [line["kind"] for line in lines]
    metrics = {field: field.replace("right", "accuracy") for field in lines[0] if field.startswith("right@")}
    return [
        label_mean_metrics(metric, np.array([_number(line[field]) for line in lines]), kinds)
        for field, metric in {**metrics, "nll": "nll"}.items()
    ]


def _class_precision(lines: Lines, results: Results) -> list[MetricGroup]:
    """Return the precision at each k of the classes, in each direction."""
    names, groups = list(results.details["chance"]), []
    for direction in dict.fromkeys(line["direction"] for line in lines):
        rows_Q = np.array([row for row, line in enumerate(lines) if line["direction"] == direction])
        for k in results.config["ks"]:
            found = [lines[row]["precision"][str(k)] for row in rows_Q]
            values_QL = np.array([[_number(of_query.get(name)) for name in names] for of_query in found])
            groups.append(at_items(precision_metrics(k, values_QL, names, direction), rows_Q))
    return groups


def _generated(lines: Lines, results: Results) -> list[MetricGroup]:
    """Return the AUROC of the prompted findings and the share of possible copies, for each folder of images."""
    names, groups = list(lines[0]["logits"]), []
    stated_NL, logits_NL = (_table(lines, field, names) for field in ("stated", "logits"))
    near_NK = np.array([[space in line["too_near"] for space in SPACES] for line in lines])
    set_N = np.array([line["set"] for line in lines])
    like = stated_NL[set_N == next(iter(results.details["images"]))]
    for name in dict.fromkeys(set_N.tolist()):
        rows_N = np.flatnonzero(set_N == name)
        findings = findings_metrics(logits_NL[rows_N], stated_NL[rows_N], names, like=like, name=name)
        groups += [at_items(group, rows_N) for group in (findings, too_near_metrics(near_NK[rows_N], name))]
    return groups


def _text_tasks(lines: Lines, results: Results) -> list[MetricGroup]:
    """Return the metric of each task, the mean over its seeds."""
    groups = []
    for name in dict.fromkeys(line["task"] for line in lines):
        rows_N = np.array([row for row, line in enumerate(lines) if line["task"] == name])
        task, truth = TASKS[name], [_tuple(lines[row]["label"]) for row in rows_N]
        by_seed = zip(*(lines[row]["predictions"] for row in rows_N), strict=True)
        metrics = [summed_metric(task, truth, [_tuple(value) for value in of_seed]) for of_seed in by_seed]
        row = MetricRow(metric=task.metric, target=name, n=len(rows_N))
        groups.append(at_items(mean_over_seeds(metrics, row), rows_N))
    return groups


def _tuple(value: Any) -> Any:
    """Return a label as it was before it became JSON."""
    return tuple(value) if isinstance(value, list) else value


def _table(lines: Lines, field: str, names: Sequence[str]) -> Array:
    return np.array([[_number(line[field][name]) for name in names] for line in lines])


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


_CLASSES = Reader(ranked=_classes)
_PRECISION = Reader(item=("direction", "patient", "query"), metric_groups=_class_precision)
_RANKS = Reader(earlier_group="text", needs=("text_rank",), metric_groups=_retrieval)
_MASKS = Reader(needs=("pixels",), metric_groups=_segmentation)
READERS: Mapping[str, Reader] = {
    "zero_shot": _CLASSES,
    "classification": _CLASSES,
    "linear_probe": Reader(ranked=_probe),
    "robustness": Reader(needs=("labels",), ranked=_robust_findings, metric_groups=_robust_texts),
    "grounding": Reader(item=("key", "phrase"), metric_groups=_grounding),
    "image_text_retrieval": _RANKS,
    "image_text_retrieval_reranked": _RANKS,
    "class_retrieval": _PRECISION,
    "image_retrieval": _PRECISION,
    "image_text_matching": Reader(needs=("patient",), metric_groups=_matching),
    "vqa": Reader(item=("id",), needs=("closed", "model_credit"), metric_groups=_answers),
    "report_generation": Reader(reference="reference", metric_groups=_reports),
    "segmentation": _MASKS,
    "zero_shot_masks": _MASKS,
    "detection": Reader(needs=("true",), metric_groups=_detection),
    "change": Reader(needs=("patient",), metric_groups=_change),
    "text_tasks": Reader(
        item=("task", "key"), group="document", needs=("label", "document"), metric_groups=_text_tasks
    ),
    "image_generation": Reader(item=("set", "file"), needs=("set", "stated"), metric_groups=_generated),
    "masked_prediction": Reader(item=("item",), metric_groups=_hidden_words),
}
"""Protocol -> reader of its lines."""
