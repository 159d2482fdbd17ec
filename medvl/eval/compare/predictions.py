"""Metric groups recomputed from `predictions.jsonl`, to pair runs item by item.

A reader parses the lines of one protocol and gives the rows that they determine. Rows that need more (the other
direction of a retrieval, calibration at thresholds) have no paired difference.

Shape letters: N items, K rows.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from medvl.common.untrusted import parse_json
from medvl.errors import EvaluationError
from medvl.eval.core.metric_rows import MetricGroup, label_mean_metrics, mean_metrics, median_metric, ranking_metrics
from medvl.eval.core.metrics import Array
from medvl.eval.core.results import Results
from medvl.eval.core.subgroup_metrics import subgroup_metrics
from medvl.schema import COMPETITION_FINDINGS

Line = Mapping[str, Any]
_TOLERANCE = 1e-6  # largest difference between a row of results.json and the same row from its predictions


@dataclasses.dataclass(frozen=True, slots=True)
class Items:
    """Items of a run, ordered by name, with the metrics over them."""

    names: tuple[tuple[Any, ...], ...]
    groups: tuple[Any, ...] | None
    """Bootstrap group (patient or text) of each item; None if the lines have none and items are resampled."""
    metric_groups: tuple[MetricGroup, ...]
    scores: tuple[tuple[str, Array, Array], ...] = ()
    """(class, scores_N, labels_N) of each class, for ROC curves."""

    @property
    def rows(self) -> list[str]:
        """Names of the rows, in the order of `statistic`."""
        return [row.name for group in self.metric_groups for row in group.rows]

    def statistic(self, counts_NR: Array) -> Array:
        """Return values_RK with columns as in `rows`."""
        return np.concatenate([group.statistic(counts_NR) for group in self.metric_groups], axis=1)


@dataclasses.dataclass(frozen=True, slots=True)
class _Reader:
    item: tuple[str, ...]  # fields that identify an item
    group: str  # field of the bootstrap group
    metric_groups: Callable[[Sequence[Line], Results], list[MetricGroup]]
    scores: Callable[[Sequence[Line]], tuple[list[str], Array, Array]] | None = None


def read_items(folder: Path, results: Results) -> Items | None:
    """Read the items of an evaluation; None if it has no predictions or its protocol has no reader.

    Raises EvaluationError if the lines are malformed, an item is repeated, or the values differ from the results.
    """
    path, reader = folder / "predictions.jsonl", _READERS.get(results.protocol)
    if reader is None or not path.is_file():
        return None
    try:
        lines = [parse_json(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        named = sorted(
            ((tuple(line[field] for field in reader.item), line) for line in lines), key=lambda pair: pair[0]
        )
        names, lines = tuple(name for name, _ in named), [line for _, line in named]
        groups = tuple(line[reader.group] for line in lines) if all(reader.group in line for line in lines) else None
        scores = () if reader.scores is None else tuple(_columns(*reader.scores(lines)))
        items = Items(names, groups, tuple(reader.metric_groups(lines, results)), scores)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        message = f"{path} is not a predictions file of {results.protocol} ({type(error).__name__})"
        raise EvaluationError(message, "malformed") from error
    if not names or len(set(names)) != len(names):
        raise EvaluationError(f"expected each item once in {path}, got none or duplicates; evaluate again", "malformed")
    _check(items, results, path)
    return items


def _check(items: Items, results: Results, path: Path) -> None:
    """Raise EvaluationError unless the rows of the predictions equal those of the results."""
    expected = {row.name: row.value for row in results.rows}
    values = zip(items.rows, items.statistic(np.ones((len(items.names), 1)))[0].tolist(), strict=True)
    for name, value in values:
        known = expected.get(name, value)
        if not math.isclose(known, value, abs_tol=_TOLERANCE) and not (math.isnan(known) and math.isnan(value)):
            message = f"{path} gives {value:.6f} for {name}, but results.json has {known:.6f}; evaluate again"
            raise EvaluationError(message, "mismatch")


def _scores(lines: Sequence[Line]) -> tuple[list[str], Array, Array]:
    """Return classes, scores_NL and labels_NL."""
    names = list(lines[0]["scores"])
    scores_NL, labels_NL = (
        np.array([[_number(line[field][name]) for name in names] for line in lines]) for field in ("scores", "labels")
    )
    return names, scores_NL, labels_NL


def _columns(names: Sequence[str], scores_NL: Array, labels_NL: Array) -> Iterator[tuple[str, Array, Array]]:
    yield from zip(names, scores_NL.T, labels_NL.T, strict=True)


def _ranking(lines: Sequence[Line], results: Results) -> list[MetricGroup]:
    """Return AUROC and average precision of every class, their means, and AUROC in subgroups."""
    names, scores_NL, labels_NL = _scores(lines)
    both_L = (labels_NL == 1).any(axis=0) & (labels_NL == 0).any(axis=0)
    evaluable = [name for name, both in zip(names, both_L.tolist(), strict=True) if both]
    means = {"macro": evaluable}
    if set(COMPETITION_FINDINGS) <= set(evaluable):
        means["macro_competition"] = list(COMPETITION_FINDINGS)
    metrics = ("auroc", "average_precision")
    overall = [ranking_metrics(metric, scores_NL, labels_NL, names, means=means) for metric in metrics]
    groups = [line.get("subgroups", {}) for line in lines]
    masks_of = {
        attribute: {
            name: np.array([of_line.get(attribute) == name for of_line in groups])
            for name in sorted({of_line[attribute] for of_line in groups if attribute in of_line})
        }
        for attribute in dict.fromkeys(attribute for of_line in groups for attribute in of_line)
    }
    smallest = results.config["smallest_subgroup"] if masks_of else 0
    return [*overall, *subgroup_metrics(scores_NL, labels_NL, names, masks_of, smallest)[0]]


def _grounding(lines: Sequence[Line], results: Results) -> list[MetricGroup]:
    labels = [line["label"] for line in lines]
    metrics = [field for field in lines[0] if field not in ("key", "phrase", "patient", "label")]
    return [label_mean_metrics(name, np.array([_number(line[name]) for line in lines]), labels) for name in metrics]


def _retrieval(lines: Sequence[Line], results: Results) -> list[MetricGroup]:
    """Return image-to-text metrics; the lines have no ranks of texts."""
    rank_N = np.array([float(line["rank"]) for line in lines])
    recalls = [mean_metrics(f"recall@{k}", (rank_N <= k)[:, None].astype(float), ["image_to_text"]) for k in (1, 5, 10)]
    return [*recalls, median_metric("median_rank", rank_N, "image_to_text")]


def _answers(lines: Sequence[Line], results: Results) -> list[MetricGroup]:
    credit_N1 = np.array([[_number(line["model_credit"])] for line in lines])
    return [mean_metrics("accuracy", credit_N1, ["overall"])]


def _hidden_words(lines: Sequence[Line], results: Results) -> list[MetricGroup]:
    """Return the accuracy of masked prediction, of all words and by kind."""
    kinds = [line["kind"] for line in lines]
    names = [field for field in lines[0] if field.startswith("right@")]
    columns = {name: np.array([_number(line[name]) for line in lines]) for name in names}
    return [
        label_mean_metrics(name.replace("right", "accuracy"), column_N, kinds) for name, column_N in columns.items()
    ]


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


_RANKING = _Reader(("key",), "patient", _ranking, _scores)
_RANKS = _Reader(("key",), "text", _retrieval)
_READERS = {
    "zero_shot": _RANKING,
    "classification": _RANKING,
    "grounding": _Reader(("key", "phrase"), "patient", _grounding),
    "image_text_retrieval": _RANKS,
    "image_text_retrieval_reranked": _RANKS,
    "masked_prediction": _Reader(("item",), "patient", _hidden_words),
    "vqa": _Reader(("id",), "patient", _answers),
}
"""Protocol -> reader of its lines."""
