"""Generalized phrase grounding: boxes for phrases that have none, one or several.

Protocol "generalized_grounding", version 1:

* An item is an image and one of its phrases, with any number of true boxes (`all_phrases_of`).
  Released phrases of MS-CXR all have boxes; sentences of PadChest-GR, findings of Chest ImaGenome,
  and labels of corpora with boxes that were looked for have none if there is nothing to see.
* Predicted boxes are the bounding boxes of the connected regions, by eight neighbours, of the
  pixels that reach a share of the range of the phrase's heat map ("components"). Every box of a
  phrase is left out where its score is below a threshold. A constant map has no box.
* A box's score is the similarity of the image with the phrase ("pair"), or the highest value of the
  map inside of it ("peak").
* Both thresholds are chosen on validation images of other patients: the share of the range by the
  mean F1 of phrases with boxes, then by their overlap; the score by the mean of the shares of right
  decisions about phrases with and without boxes. Without a phrase of either kind there, all boxes
  count.
* Boxes are matched one to one by decreasing score at an IoU of 0.5 (`match_boxes`). Of phrases with
  boxes: "recall", "precision" and "f1" at 0.5, "union_iou" of all predicted with all true boxes,
  and "with_box", the share with any prediction. Precision leaves out phrases without a prediction.
  "without_box" is the share of phrases without boxes that have no prediction, "auroc/presence" that
  of the best score of phrases with boxes against those without.
* "ap@0.5" is the average precision of all boxes over all phrases by score, without the threshold of
  scores. A box of a phrase without boxes is a false positive.
* Target "swapped" is chance: the predictions for another patient's image and phrase.
* Target "mean_place" needs no model: in every image, the boxes around the mean place of the
  finding's boxes in the validation images (`mean_place`); a finding without boxes there has those
  of all findings.
* Intervals: the bootstrap resamples patients, with all their images and phrases. All rows share the
  resamples.

Letters: N items, D predicted boxes of a phrase, G true boxes, R resamples.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from medvl.common.config_io import check_choice
from medvl.data.annotations import all_phrases_of, published_size
from medvl.errors import EvaluationError
from medvl.eval.core.full_pass import FullPass, Loader, check_disjoint_patients, input_hashes
from medvl.eval.core.metric_rows import (
    MetricGroup,
    MetricRow,
    label_mean_metrics,
    mean_metrics,
    measure,
    ranking_metrics,
    subgroups_of,
)
from medvl.eval.core.metrics import Array
from medvl.eval.core.results import Lines, Results
from medvl.eval.dense.metrics import AveragePrecision, ImageDetections, match_boxes
from medvl.eval.grounding.heatmaps import (
    Maps,
    choose_maps,
    is_constant,
    phrase_maps,
    stored_boxes,
)
from medvl.eval.grounding.protocol import Query, find_queries, stored_size
from medvl.models import DualEncoder
from medvl.models.base import evaluating
from medvl.schema import Batch

PROTOCOL = "generalized_grounding"
PROTOCOL_VERSION = 1

Scores = Literal["pair", "peak"]
EXTENTS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Shares of a map's range that validation chooses from."""
_OVERLAP = 0.5
_CELLS = 384
"""Rows and columns into which an image is divided for its mean place."""
_PAIRS = 64
"""Images and phrases that are encoded at once."""
_MEANS = ("recall", "precision", "f1", "union_iou", "with_box", "without_box")
"""Metrics that are means over phrases; the first three are at `_OVERLAP`."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BoxRule:
    """Thresholds of the rule "components"."""

    extent: float
    """Share of a map's range, above its lowest value, that the pixels of a region reach."""
    least_score: float
    """Score below which a box is left out; -inf for none."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BoxedPhrase:
    """An item with its boxes, in pixels of the published image."""

    query: Query
    detections: Mapping[float, ImageDetections]
    """By extent: boxes and scores, by decreasing peak, and the true boxes."""

    def truth(self) -> Array:
        """Return the true boxes (G, 4)."""
        return next(iter(self.detections.values())).truth_G4

    def sides(self) -> Array:
        """Return (4,) width, height, width and height of the published image."""
        height, width = published_size(self.query.sample)
        return np.array([width, height] * 2, np.float64)

    def as_json(self, extent: float) -> dict[str, Any]:
        """Return one line of the predictions file, without the text of the phrase."""
        detections = self.detections[extent]
        sample = self.query.sample
        scores = detections.scores_D.tolist()
        return {
            "key": sample.key,
            "phrase": self.query.phrase_index,
            "patient": sample.patient,
            "subgroups": subgroups_of(sample),
            "label": self.query.phrase.label,
            "boxes": [
                {**box, "score": score}
                for box, score in zip(_sides(detections.boxes_D4), scores, strict=True)
            ],
            "true": _sides(detections.truth_G4),
        }


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GeneralizedResult:
    """Results and items."""

    results: Results
    rule: BoxRule
    items: tuple[BoxedPhrase, ...]

    def predictions(self) -> Iterator[dict[str, Any]]:
        """Yield one mapping per item for `write_results`, with all boxes of the chosen extent."""
        return (item.as_json(self.rule.extent) for item in self.items)


def generalized_grounding(
    model: DualEncoder,
    loader: Loader,
    valid_loader: Loader,
    *,
    maps: Maps | None = None,
    smoothing: float = 0.0,
    scores: Scores = "pair",
    resamples: int = 1000,
    seed: int = 0,
    checkpoint: str | Path | None = None,
) -> GeneralizedResult:
    """Evaluate generalized grounding of a dual-encoder; the module docstring describes the
    protocol.

    Args:
        model: any dual-encoder whose image encoder has patches.
        loader: over samples with phrases, sentences, or boxes by label.
        valid_loader: over images of other patients, for choosing thresholds.
        maps, smoothing: as in `phrase_grounding`.
        scores: "pair" or "peak".
        resamples, seed: number and seed of the bootstrap resamples.
        checkpoint: its hash goes into the results.

    Raises:
        EvaluationError: there is no phrase, no phrase of validation has a box, or as
            `phrase_grounding`.
        SplitError: test and validation images share patients.
    """
    check_choice(scores, get_args(Scores), "scores", error=EvaluationError)
    inputs = input_hashes(checkpoint, manifest=loader, validation_manifest=valid_loader)
    settings = _Settings(model, choose_maps(model, maps), smoothing, scores)
    valid, _ = settings.predict(valid_loader, EXTENTS)
    rule = choose_rule(valid)
    items, unreadable = settings.predict(loader, (rule.extent,))
    patients = [item.query.sample.patient for item in items]
    check_disjoint_patients((item.query.sample.patient for item in valid), patients)
    detections = [item.detections[rule.extent] for item in items]
    labels = [item.query.phrase.label for item in items]
    groups = box_groups(detections, labels, rule.least_score)
    if (partner_N := _other_patients(patients, seed)) is not None:
        groups += _swapped_groups(items, partner_N, rule)
    groups += _place_groups(items, valid)
    metrics = phrase_metrics(detections, rule.least_score)
    results = Results(
        protocol=PROTOCOL,
        protocol_version=PROTOCOL_VERSION,
        rows=measure(groups, len(items), resamples=resamples, seed=seed, groups=patients),
        config={
            "protocol": "generalized",
            "boxes": "components",
            "maps": settings.maps,
            "smoothing": smoothing,
            "scores": scores,
            "extent": rule.extent,
            "least_score": rule.least_score if np.isfinite(rule.least_score) else None,
            "resamples": resamples,
            "seed": seed,
        },
        inputs=inputs,
        details={
            "images": len({item.query.sample.key for item in items}),
            "patients": len(set(patients)),
            "phrases": len(items),
            "phrases_with_boxes": int(np.isfinite(metrics["recall"]).sum()),
            "boxed_without_prediction": int((metrics["with_box"] == 0).sum()),
            "validation_phrases": len(valid),
            "unreadable": unreadable,
        },
    )
    return GeneralizedResult(results=results, rule=rule, items=tuple(items))


@dataclasses.dataclass(frozen=True, slots=True)
class _Settings:
    """What boxes are predicted from."""

    model: DualEncoder
    maps: Maps
    smoothing: float
    scores: Scores

    def predict(
        self, loader: Loader, extents: Sequence[float]
    ) -> tuple[list[BoxedPhrase], Mapping[str, int]]:
        """Return every item of a loader with its boxes at each extent, and the unreadable images.
        Raises EvaluationError.
        """
        queries = find_queries(loader, all_phrases_of)
        items: list[BoxedPhrase] = []
        batches = FullPass(loader)
        with evaluating(self.model):
            for batch in batches:
                pairs = [
                    (row, query)
                    for row, key in enumerate(batch.keys)
                    for query in queries.get(key, ())
                ]
                for start in range(0, len(pairs), _PAIRS):
                    part = pairs[start : start + _PAIRS]
                    items += self._predict_pairs(loader, batch, part, extents)
        if not items:
            message = "no sample has phrases or boxes: use annotated shards (`medvl shards ms-cxr`)"
            raise EvaluationError(message, "empty")
        return items, batches.unreadable

    @torch.no_grad()
    def _predict_pairs(
        self,
        loader: Loader,
        batch: Batch,
        pairs: Sequence[tuple[int, Query]],
        extents: Sequence[float],
    ) -> Iterator[BoxedPhrase]:
        rows = [row for row, _ in pairs]
        queries = [query for _, query in pairs]
        texts = [query.phrase.text for query in queries]
        images = batch.image_BCHW[rows].to(self.model.device, non_blocking=True)
        size_of = {
            query.position: stored_size(loader, query.position, query.sample) for query in queries
        }
        sizes = [size_of[query.position] for query in queries]
        maps = phrase_maps(
            self.model, images, texts, sizes, maps=self.maps, smoothing=self.smoothing
        )
        score_B: list[float | None] = [None] * len(texts)
        if self.scores == "pair":
            embedded = self.model.embed_images(images), self.model.embed_texts(texts)
            score_B = [*self.model.pair_similarity(*embedded).double().tolist()]
        for query, map_HW, score in zip(queries, maps, score_B, strict=True):
            yield _boxed_phrase(query, map_HW, score, extents)


def _boxed_phrase(
    query: Query, tensor: Tensor, score: float | None, extents: Sequence[float]
) -> BoxedPhrase:
    map_HW = tensor.cpu().numpy()
    if np.isinf(map_HW).any() or np.isnan(map_HW).all():
        raise EvaluationError("the model's maps are not finite: check its weights", "nonfinite")
    published = published_size(query.sample)
    scale_4 = np.array([published[1] / map_HW.shape[1], published[0] / map_HW.shape[0]] * 2)
    true = stored_boxes(query.phrase, query.sample, published)
    truth_G4 = np.array(
        [[box.left, box.top, box.left + box.width, box.top + box.height] for box in true]
    ).reshape(-1, 4)
    detections = {}
    for extent in extents:
        boxes_D4, peak_D = map_boxes(map_HW, extent)
        scores_D = peak_D if score is None else np.full(len(peak_D), score)
        detections[extent] = ImageDetections(boxes_D4 * scale_4, scores_D, truth_G4)
    return BoxedPhrase(query=query, detections=detections)


def map_boxes(map_HW: NDArray[np.floating], extent: float) -> tuple[Array, Array]:
    """Return boxes (D, 4), left, top, right and bottom edges in pixels of the map, and the highest
    value in each (D,), by decreasing value.

    A box is around the connected pixels at or above `extent` of the range of the map. Pixels that
    are NaN belong to none.
    """
    seen_HW = np.isfinite(map_HW)
    lowest, highest = float(map_HW[seen_HW].min()), float(map_HW[seen_HW].max())
    if is_constant(map_HW[seen_HW]):
        return np.zeros((0, 4)), np.zeros(0)
    above_HW = seen_HW & (np.nan_to_num(map_HW) >= lowest + extent * (highest - lowest))
    _, region_HW, sides_D5, _ = cv2.connectedComponentsWithStats(
        above_HW.astype(np.uint8), connectivity=8
    )
    peak_D = np.full(len(sides_D5), -np.inf)
    np.maximum.at(peak_D, region_HW[above_HW], map_HW[above_HW])
    order_D = np.argsort(-peak_D[1:], kind="stable")  # the first region is the background
    left_D, top_D, width_D, height_D = sides_D5[1:, :4][order_D].astype(np.float64).T
    boxes_D4 = np.stack([left_D, top_D, left_D + width_D, top_D + height_D], axis=1)
    return boxes_D4, peak_D[1:][order_D]


def choose_rule(items: Sequence[BoxedPhrase]) -> BoxRule:
    """Return the best thresholds for validation items with boxes at several extents. Raises
    EvaluationError where no phrase has a box.
    """

    def quality(extent: float) -> tuple[float, float]:
        values = phrase_metrics([item.detections[extent] for item in items], -np.inf)
        return float(np.nanmean(values["f1"])), float(np.nanmean(values["union_iou"]))

    if not any(item.query.phrase.boxes for item in items):
        message = "no phrase of the validation images has a box: give other shards as valid"
        raise EvaluationError(message, "empty", field="valid")
    extent = max(items[0].detections, key=quality)
    detections = [item.detections[extent] for item in items]
    return BoxRule(extent=extent, least_score=_choose_score(detections))


def _choose_score(detections: Sequence[ImageDetections]) -> float:
    boxed_N = np.array([len(each.truth_G4) > 0 for each in detections])
    if boxed_N.all():
        return -np.inf
    best_N = np.array([each.scores_D.max(initial=-np.inf) for each in detections])
    candidates = np.unique(best_N[np.isfinite(best_N)])
    right = [
        (best_N[boxed_N] >= score).mean() + (best_N[~boxed_N] < score).mean()
        for score in candidates
    ]
    return float(candidates[int(np.argmax(right))]) if right else -np.inf


def phrase_metrics(detections: Sequence[ImageDetections], least_score: float) -> dict[str, Array]:
    """Return the metrics that are means over phrases, (N,) each, NaN where one is not defined."""
    confident = [_with_score(each, least_score) for each in detections]
    matched = match_boxes(confident, (_OVERLAP,))
    hits_N = matched.hits_NDT[:, :, 0].sum(axis=1)
    found_N = np.isfinite(matched.scores_ND).sum(axis=1)
    true_N = matched.boxes_N
    boxed_N = true_N > 0

    def share(
        part_N: NDArray[np.int64], whole_N: NDArray[np.int64], counted_N: NDArray[np.bool_]
    ) -> Array:
        return np.where(counted_N, part_N / np.where(whole_N > 0, whole_N, 1), np.nan)

    return {
        "recall": share(hits_N, true_N, boxed_N),
        "precision": share(hits_N, found_N, boxed_N & (found_N > 0)),
        "f1": share(2 * hits_N, found_N + true_N, boxed_N),
        "union_iou": np.array([union_iou(each.boxes_D4, each.truth_G4) for each in confident]),
        "with_box": np.where(boxed_N, found_N > 0, np.nan),
        "without_box": np.where(boxed_N, np.nan, found_N == 0),
    }


def _with_score(detections: ImageDetections, least_score: float) -> ImageDetections:
    confident_D = detections.scores_D >= least_score
    return ImageDetections(
        detections.boxes_D4[confident_D], detections.scores_D[confident_D], detections.truth_G4
    )


def union_iou(boxes_D4: Array, truth_G4: Array) -> float:
    """Return the IoU of the union of some boxes with the union of the true ones; NaN without a true
    box.
    """
    if not len(truth_G4):
        return float("nan")
    edges = np.concatenate([boxes_D4, truth_G4])
    x_K, y_K = np.unique(edges[:, [0, 2]]), np.unique(edges[:, [1, 3]])
    areas_HW = np.diff(y_K)[:, None] * np.diff(x_K)
    predicted_HW, true_HW = (
        _cells_inside(boxes, x_K[:-1], y_K[:-1]) for boxes in (boxes_D4, truth_G4)
    )
    either = float(areas_HW[predicted_HW | true_HW].sum())
    return float(areas_HW[predicted_HW & true_HW].sum()) / either


def _cells_inside(boxes_D4: Array, left_W: Array, top_H: Array) -> NDArray[np.bool_]:
    inside_HW = np.zeros((len(top_H), len(left_W)), np.bool_)
    for left, top, right, bottom in boxes_D4:
        rows_H = (top_H >= top) & (top_H < bottom)
        inside_HW |= rows_H[:, None] & (left_W >= left) & (left_W < right)
    return inside_HW


def box_groups(
    detections: Sequence[ImageDetections], labels: Sequence[str], least_score: float
) -> list[MetricGroup]:
    """Return the metrics of phrases: overall, as means over findings, for each finding, and by the
    number of true boxes.
    """
    values = phrase_metrics(detections, least_score)
    groups = [label_mean_metrics(_name(metric), values[metric], labels) for metric in _MEANS]
    true_N = np.array([len(each.truth_G4) for each in detections])
    by_number = {"1 box": true_N == 1, "2 boxes": true_N == 2, "3 or more boxes": true_N > 2}
    targets = [target for target, chosen_N in by_number.items() if chosen_N.any()]
    for metric in ("recall", "f1") if targets else ():
        columns = [np.where(by_number[target], values[metric], np.nan) for target in targets]
        groups.append(mean_metrics(_name(metric), np.stack(columns, axis=1), targets))
    lowest = min(itertools.chain.from_iterable(each.scores_D for each in detections), default=0)
    best_N = np.array([each.scores_D.max(initial=lowest - 1) for each in detections])
    boxed_N1 = (true_N > 0).astype(np.float64)[:, None]
    presence = ranking_metrics("auroc", best_N[:, None], boxed_N1, ["presence"])
    return [*groups, presence, _precision_group(detections, "overall")]


def _name(metric: str) -> str:
    return f"{metric}@{_OVERLAP:g}" if metric in _MEANS[:3] else metric


def _precision_group(detections: Sequence[ImageDetections], target: str) -> MetricGroup:
    precision = AveragePrecision(match_boxes(detections, (_OVERLAP,)))
    boxes = sum(len(each.truth_G4) > 0 for each in detections)
    row = MetricRow(metric=f"ap@{_OVERLAP:g}", target=target, n=len(detections), n_positive=boxes)
    return MetricGroup([row], precision.precision_RT)


def _other_patients(patients: Sequence[str], seed: int) -> NDArray[np.int64] | None:
    """Return an item of another patient for each item; None if there is one patient only."""
    if len(set(patients)) < 2:
        return None
    order = np.random.default_rng(seed).permutation(len(patients)).tolist()
    partner_N = np.empty(len(patients), np.int64)
    for place, item in enumerate(order):
        following = (order[(place + step) % len(order)] for step in range(1, len(order)))
        partner_N[item] = next(each for each in following if patients[each] != patients[item])
    return partner_N


def _swapped_groups(
    items: Sequence[BoxedPhrase], partner_N: NDArray[np.int64], rule: BoxRule
) -> list[MetricGroup]:
    swapped = []
    for item, partner in zip(items, partner_N.tolist(), strict=True):
        other = items[partner]
        detections = other.detections[rule.extent]
        boxes_D4 = detections.boxes_D4 * (item.sides() / other.sides())
        swapped.append(ImageDetections(boxes_D4, detections.scores_D, item.truth()))
    values = phrase_metrics(swapped, rule.least_score)
    groups = [mean_metrics(_name(name), values[name][:, None], ["swapped"]) for name in _MEANS]
    return [*groups, _precision_group(swapped, "swapped")]


def _place_groups(items: Sequence[BoxedPhrase], valid: Sequence[BoxedPhrase]) -> list[MetricGroup]:
    """Return the metrics of mean places, for which no score leaves out a phrase."""
    truths: dict[str | None, list[Array]] = {}
    for item in valid:
        truth_G4 = item.truth() / item.sides()
        if len(truth_G4):
            truths.setdefault(item.query.phrase.label, []).append(truth_G4)
            truths.setdefault(None, []).append(truth_G4)
    places = {label: mean_place(each, each) for label, each in truths.items()}
    placed = []
    for item in items:
        boxes_D4 = places.get(item.query.phrase.label, places[None]) * item.sides()
        placed.append(ImageDetections(boxes_D4, np.zeros(len(boxes_D4)), item.truth()))
    values = phrase_metrics(placed, -np.inf)
    names = ("recall", "precision", "f1", "union_iou")
    return [mean_metrics(_name(name), values[name][:, None], ["mean_place"]) for name in names]


def mean_place(truths: Sequence[Array], judges: Sequence[Array]) -> Array:
    """Return the boxes (D, 4) around the mean place of boxes, by the rule "components".

    Args:
        truths: boxes (G, 4) of each image, as shares of its width and height.
        judges: those of the images whose mean F1 chooses the share of the range.
    """
    cover_HW = np.zeros((_CELLS, _CELLS))
    for truth_G4 in truths:
        inside_HW = np.zeros((_CELLS, _CELLS), np.bool_)
        for left, top, right, bottom in (truth_G4 * _CELLS).round().astype(int).tolist():
            inside_HW[top:bottom, left:right] = True
        cover_HW += inside_HW

    def quality(boxes_D4: Array) -> float:
        scores_D = np.zeros(len(boxes_D4))
        detections = [ImageDetections(boxes_D4, scores_D, truth_G4) for truth_G4 in judges]
        return float(np.nanmean(phrase_metrics(detections, -np.inf)["f1"]))

    return max((map_boxes(cover_HW, extent)[0] / _CELLS for extent in EXTENTS), key=quality)


def groups_of_lines(lines: Lines, results: Results) -> list[MetricGroup]:
    """Return the metrics of any items from their lines, without those of swapped images and mean
    places.
    """
    least_score = results.config["least_score"]
    detections = [
        ImageDetections(
            _edges(line["boxes"]),
            np.array([box["score"] for box in line["boxes"]], np.float64),
            _edges(line["true"]),
        )
        for line in lines
    ]
    labels = [line["label"] for line in lines]
    return box_groups(detections, labels, -np.inf if least_score is None else least_score)


def _sides(boxes_D4: Array) -> list[dict[str, float]]:
    return [
        {"x": left, "y": top, "width": right - left, "height": bottom - top}
        for left, top, right, bottom in boxes_D4.tolist()
    ]


def _edges(boxes: Sequence[Mapping[str, float]]) -> Array:
    rows = [
        [box["x"], box["y"], box["x"] + box["width"], box["y"] + box["height"]] for box in boxes
    ]
    return np.array(rows, np.float64).reshape(-1, 4)
