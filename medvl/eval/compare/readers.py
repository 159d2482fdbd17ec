"""Metric groups of each protocol, recomputed from the lines of its `predictions.jsonl`.

A reader gives the rows that the lines determine: means and other metrics of any items, which can be
restricted to some of them, and scores and labels of classes, whose AUROC has rules of its own for
small subgroups. Rows that need more (gains of a retrieval, calibration, text overlap of baselines)
have no paired difference.

Shape letters: N items, L classes, M texts.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from medvl.common.text_files import read_text
from medvl.common.untrusted import parse_json
from medvl.data.annotations import Question
from medvl.data.text_tasks.tasks import TASKS
from medvl.errors import EvaluationError
from medvl.eval.change.evaluate import change_metrics
from medvl.eval.classification.scored_images import LabelPolicy
from medvl.eval.core.metric_rows import (
    Masks,
    MetricGroup,
    MetricRow,
    label_mean_metrics,
    mean_metrics,
    measure,
    ranking_metrics,
    subgroup_masks,
    subgroup_metrics,
)
from medvl.eval.core.metrics import Array
from medvl.eval.core.results import Results
from medvl.eval.dense.detection import detection_groups, read_detections
from medvl.eval.dense.metrics import APConvention
from medvl.eval.dense.segmentation import read_areas, segmentation_groups
from medvl.eval.generation.findings import findings_metrics, means_over
from medvl.eval.generation.memorisation import SPACES, too_near_metrics
from medvl.eval.matching import COLUMNS, matching_groups
from medvl.eval.report_generation.evaluate import AGAINST_LABELS
from medvl.eval.report_generation.metrics import (
    MEANS,
    REPORT,
    bleu_metrics,
    clinical_metrics,
    positive_findings,
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
    """Return the scores of the first run of the largest fraction; it is the only run if that is
    the full set.
    """
    return _classes(lines, results)._replace(
        suffix="@100%" if max(results.config["fractions"]) == 1 else ""
    )


def _robust_findings(lines: Lines, results: Results) -> Ranked | None:
    if "findings" not in lines[0]:
        return None
    labels = list(lines[0]["labels"])
    names = [name for name in lines[0]["findings"] if name in labels]
    labels_NL = (
        LabelPolicy(**results.config["policy"])
        .resolve(_table(lines, "labels", labels), labels)
        .labels_NL
    )
    return Ranked(
        names,
        _table(lines, "findings", names),
        labels_NL[:, [labels.index(name) for name in names]],
    )


def _robust_texts(lines: Lines, results: Results) -> list[MetricGroup]:
    if "texts" not in lines[0]:
        return []
    return matching_groups(
        np.array([[_number(value) for value in line["texts"]] for line in lines]), decides=False
    )


def _grounding(lines: Lines, results: Results) -> list[MetricGroup]:
    labels = [line["label"] for line in lines]
    metrics = [field for field in lines[0] if field not in _NAMES]
    return [
        label_mean_metrics(name, np.array([_number(line[name]) for line in lines]), labels)
        for name in metrics
    ]


def _retrieval(lines: Lines, results: Results) -> list[MetricGroup]:
    """Return the metrics of images, and of the texts of these images, each drawn with its first
    image.
    """
    _, first_M = np.unique([line["text"] for line in lines], return_index=True)
    image_rank_N, text_rank_N = (
        np.array([int(line[field]) for line in lines]) for field in ("rank", "text_rank")
    )
    ks: list[int] = results.config["ks"]
    of_texts = rank_groups(text_rank_N[first_M], ks, "text_to_image")
    return [
        *rank_groups(image_rank_N, ks, "image_to_text"),
        *(at_items(group, first_M) for group in of_texts),
    ]


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
        np.array([_number(line.get(f"{system}_credit")) for line in lines])
        for system in (MODEL, QUESTION_ONLY)
    )
    types = type_masks(np.array([bool(line["closed"]) for line in lines]))
    masks = types | attribute_masks([Question.from_json(line) for line in lines])
    groups = [masked_means(ACCURACY, credit_N, masks)]
    return (
        groups
        if np.isnan(floor_N).all()
        else [*groups, masked_means(GAIN, credit_N - floor_N, types)]
    )


def _matching(lines: Lines, results: Results) -> list[MetricGroup]:
    scores_N3 = np.array(
        [[_number(line["scores"].get(name)) for name in COLUMNS] for line in lines]
    )
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
        *(
            mean_metrics(name, np.array([[_number(line[name])] for line in lines]), [REPORT])
            for name in MEANS
        ),
        *stop_metrics(
            [
                (words_and_stops(generated), words_and_stops(reference))
                for generated, reference in texts
            ]
        ),
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
    """Return the metrics of the images in the order of the data, which decides between equal
    scores.
    """
    order_N = np.argsort([line["position"] for line in lines])
    labels = results.config["labels"]
    convention = dict(results.config["convention"])
    convention.pop("name")
    thresholds = results.details["thresholds"]
    known = None if thresholds is None else {label: _number(thresholds[label]) for label in labels}
    images = [read_detections(lines[index], labels) for index in order_N]
    return [
        at_items(group, order_N)
        for group in detection_groups(images, labels, APConvention(**convention), known)
    ]


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
    """Return accuracy and negative log-likelihood of masked prediction, of all words and by
    kind.
    """
    kinds = [line["kind"] for line in lines]
    metrics = {
        field: field.replace("right", "accuracy")
        for field in lines[0]
        if field.startswith("right@")
    }
    return [
        label_mean_metrics(metric, np.array([_number(line[field]) for line in lines]), kinds)
        for field, metric in {**metrics, "nll": "nll"}.items()
    ]


def _class_precision(lines: Lines, results: Results) -> list[MetricGroup]:
    """Return the precision at each k of the classes, in each direction."""
    names = list(results.details["chance"])
    groups = []
    for direction in dict.fromkeys(line["direction"] for line in lines):
        rows_Q = np.array([row for row, line in enumerate(lines) if line["direction"] == direction])
        for k in results.config["ks"]:
            found = [lines[row]["precision"][str(k)] for row in rows_Q]
            values_QL = np.array(
                [[_number(of_query.get(name)) for name in names] for of_query in found]
            )
            groups.append(at_items(precision_metrics(k, values_QL, names, direction), rows_Q))
    return groups


def _generated(lines: Lines, results: Results) -> list[MetricGroup]:
    """Return the AUROC of the prompted findings and the share of possible copies, for each
    folder of images.
    """
    names = list(lines[0]["logits"])
    groups = []
    stated_NL, logits_NL = (_table(lines, field, names) for field in ("stated", "logits"))
    near_NK = np.array([[space in line["too_near"] for space in SPACES] for line in lines])
    set_N = np.array([line["set"] for line in lines])
    like = stated_NL[set_N == next(iter(results.details["images"]))]
    for name in dict.fromkeys(set_N.tolist()):
        rows_N = np.flatnonzero(set_N == name)
        findings = findings_metrics(
            logits_NL[rows_N], stated_NL[rows_N], names, like=like, name=name
        )
        groups += [
            at_items(group, rows_N) for group in (findings, too_near_metrics(near_NK[rows_N], name))
        ]
    return groups


def _text_tasks(lines: Lines, results: Results) -> list[MetricGroup]:
    """Return the metric of each task, the mean over its seeds."""
    groups = []
    for name in dict.fromkeys(line["task"] for line in lines):
        rows_N = np.array([row for row, line in enumerate(lines) if line["task"] == name])
        task = TASKS[name]
        truth = [_tuple(lines[row]["label"]) for row in rows_N]
        by_seed = zip(*(lines[row]["predictions"] for row in rows_N), strict=True)
        metrics = [
            summed_metric(task, truth, [_tuple(value) for value in of_seed]) for of_seed in by_seed
        ]
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
        item=("task", "key"),
        group="document",
        needs=("label", "document"),
        metric_groups=_text_tasks,
    ),
    "image_generation": Reader(
        item=("set", "file"), needs=("set", "stated"), metric_groups=_generated
    ),
    "masked_prediction": Reader(item=("item",), metric_groups=_hidden_words),
}
"""Protocol -> reader of its lines."""


# Items of a run, read from its `predictions.jsonl`, with the metrics over them and over their
# subgroups.
#
# Every line names its item, the bootstrap group of the item (patient) and its "subgroups"
# (attribute -> group), which `medvl.eval.core.metric_rows` gives for an image. `READERS` has the
# metrics of each protocol. The same metrics are computed for each subgroup, from its lines alone,
# if the group has enough items (`smallest_subgroup` of the evaluation, else 10) and, for rows of
# binary labels, as many positives.
#
# Shape letters: N items, R resamples, K rows.

SMALLEST_SUBGROUP = 10
"""Minimum number of items of a subgroup, unless the settings of the evaluation have
`smallest_subgroup`.
"""
_TOLERANCE = (
    1e-6  # largest difference between a row of results.json and the same row from its predictions
)


@dataclasses.dataclass(frozen=True, slots=True)
class Items:
    """Items of a run, ordered by name, with the metrics over them."""

    names: tuple[tuple[Any, ...], ...]
    unit: str | None
    """Field of the bootstrap group, such as "patient"; None if the lines have none and items are
    resampled.
    """
    groups: tuple[Any, ...] | None
    """Bootstrap group of each item; None without a `unit`."""
    metric_groups: tuple[MetricGroup, ...]
    scores: tuple[tuple[str, Array, Array], ...] = ()
    """(class, scores_N, labels_N) of each class, for ROC curves."""
    references: tuple[Any, ...] = ()
    """Reference of each item, of protocols whose runs choose it, such as the sections of a
    report; empty for others.
    """

    @property
    def rows(self) -> list[str]:
        """Names of the rows, in the order of `statistic`."""
        return [row.name for group in self.metric_groups for row in group.rows]

    @property
    def without_subgroups(self) -> tuple[MetricGroup, ...]:
        """Metrics over all items."""
        return tuple(
            group for group in self.metric_groups if not any(row.subgroup for row in group.rows)
        )

    def statistic(self, counts_NR: Array) -> Array:
        """Return values_RK with columns as in `rows`."""
        return np.concatenate([group.statistic(counts_NR) for group in self.metric_groups], axis=1)


def read_items(folder: Path, results: Results) -> Items | None:
    """Read the items of an evaluation.

    None if it has no predictions, its protocol has no reader, or the predictions are of an earlier
    version.

    Raises EvaluationError if the lines are malformed, an item is repeated, or the values differ
    from the results.
    """
    path = folder / "predictions.jsonl"
    reader = READERS.get(results.protocol)
    if reader is None or not path.is_file():
        return None
    try:
        lines = [
            parse_json(line)
            for line in read_text(path, EvaluationError).split("\n")
            if line.strip()
        ]
        if any(field not in line for line in lines for field in reader.needs):
            return None
        named = sorted(
            ((tuple(line[field] for field in reader.item), line) for line in lines),
            key=lambda pair: pair[0],
        )
        names = tuple(name for name, _ in named)
        lines = [line for _, line in named]
        fields = [field for field in (reader.group, reader.earlier_group) if field is not None]
        unit = next((field for field in fields if all(field in line for line in lines)), None)
        groups = None if unit is None else tuple(line[unit] for line in lines)
        ranked = reader.ranked(lines, results)
        scores = () if ranked is None else tuple(ranked.columns())
        references = tuple(line[reader.reference] for line in lines) if reader.reference else ()
        items = Items(
            names,
            unit,
            groups,
            tuple(_metric_groups(reader, lines, results, ranked)),
            scores,
            references,
        )
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        message = f"{path} is not a predictions file of {results.protocol} ({type(error).__name__})"
        raise EvaluationError(message, "malformed") from error
    if not names or len(set(names)) != len(names):
        raise EvaluationError(
            f"expected each item once in {path}, got none or duplicates; evaluate again",
            "malformed",
        )
    _check(items, results, path)
    return items


def with_subgroups(results: Results, items: Items | None, *, resamples: int, seed: int) -> Results:
    """Return the results with the rows of subgroups that their items determine and the results
    do not have.
    """
    if items is None:
        return results
    known = {row.name for row in results.rows}
    missing = [
        _columns(group, chosen)
        for group in items.metric_groups
        if (
            chosen := [
                n for n, row in enumerate(group.rows) if row.subgroup and row.name not in known
            ]
        )
    ]
    further = measure(
        missing, len(items.names), resamples=resamples, seed=seed, groups=items.groups
    )
    return dataclasses.replace(results, rows=(*results.rows, *further))


def _metric_groups(
    reader: Reader, lines: Sequence[Line], results: Results, ranked: Ranked | None
) -> Iterator[MetricGroup]:
    masks_of = subgroup_masks([line.get("subgroups", {}) for line in lines])
    smallest = int(results.config.get("smallest_subgroup", SMALLEST_SUBGROUP))
    if ranked is not None:
        yield from _ranking(ranked, masks_of, smallest, results.details.get("means"))
    yield from reader.metric_groups(lines, results)
    for attribute, masks in masks_of.items():
        for name, mask_N in masks.items():
            rows = np.flatnonzero(mask_N).tolist()
            for group in reader.metric_groups([lines[row] for row in rows], results):
                yield _within(group, rows, f"{attribute}: {name}", smallest)


def _within(group: MetricGroup, rows: Sequence[int], subgroup: str, smallest: int) -> MetricGroup:
    """Return a group over the items of a subgroup for all items, without the rows of too few of
    them.
    """
    kept = [
        number
        for number, row in enumerate(group.rows)
        if not row.subgroup
        and row.n >= smallest
        and (row.n_positive is None or row.n_positive >= smallest)
    ]

    named = [dataclasses.replace(row, subgroup=subgroup) for row in group.rows]
    return _columns(MetricGroup(named, at_items(group, rows).statistic), kept)


def _columns(group: MetricGroup, chosen: Sequence[int]) -> MetricGroup:
    return MetricGroup(
        [group.rows[n] for n in chosen], lambda counts_NR: group.statistic(counts_NR)[:, chosen]
    )


def _ranking(
    ranked: Ranked, masks_of: Masks, smallest: int, known: Mapping[str, Sequence[str]] | None
) -> Iterator[MetricGroup]:
    """Yield AUROC and average precision of every class, their means, and AUROC in subgroups.

    The means are over the classes that the results name (`known`), in earlier versions all with
    both kinds.
    """
    names, scores_NL, labels_NL, suffix = ranked
    means = {"macro": [], **(means_over(names, labels_NL) if known is None else known)}
    for metric in ("auroc", "average_precision"):
        group = ranking_metrics(metric, scores_NL, labels_NL, names, means=means)
        rows = [dataclasses.replace(row, metric=f"{metric}{suffix}") for row in group.rows]
        yield MetricGroup(rows, group.statistic)
    yield from subgroup_metrics(scores_NL, labels_NL, names, masks_of, smallest)[0]


def _check(items: Items, results: Results, path: Path) -> None:
    """Raise EvaluationError unless the rows of the predictions equal those of the results."""
    expected = {row.name: row.value for row in results.rows}
    values = zip(
        items.rows, items.statistic(np.ones((len(items.names), 1)))[0].tolist(), strict=True
    )
    for name, value in values:
        known = expected.get(name, value)
        if not math.isclose(known, value, abs_tol=_TOLERANCE) and not (
            math.isnan(known) and math.isnan(value)
        ):
            message = (
                f"{path} gives {value:.6f} for {name}, but results.json has {known:.6f}; "
                f"evaluate again"
            )
            raise EvaluationError(message, "mismatch")
