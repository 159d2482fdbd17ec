"""Detection: are the boxes that a model draws those of the data set, on all images?

Protocol "detection", version 1:

* Every image in which somebody looked for boxes is judged, whether there is one or not: what is drawn on a normal image
  is a false positive. (Published code of several systems leaves out images without boxes, and images without a
  detection together with their boxes; what that would report stands beside, as "ap_rsna_boxed".)
* "ap_rsna" and "ap_coco" are average precisions over all detections by score (`box_metrics`), averaged over the
  overlaps of the RSNA challenge (0.40 to 0.75) and of COCO (0.50 to 0.95); "ap@0.5" is that of one overlap.
* "challenge_score" is the RSNA challenge's own, and "left_empty" the share of images without a box on which nothing is
  drawn. Both need a score threshold, which is chosen on validation images of other patients and nowhere else.
* Boxes are judged in pixels of the published image. What the model's crop cut off is not found.
* Intervals: patients are drawn, with all their images. All rows share the draws.

Shape letters: N images, L labels, T overlaps, R resamples.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from medvl.data.annotations.phrases import published_size
from medvl.data.loading.dense_targets import boxes_of
from medvl.eval.core.full_pass import check_disjoint_patients, input_hashes
from medvl.eval.core.interfaces import Loader
from medvl.eval.core.metric_rows import MetricGroup, MetricRow, mean_metrics, measure
from medvl.eval.core.metrics import Array
from medvl.eval.core.results import Results
from medvl.eval.dense.annotated_images import Dense, MarkedImage, headline_target, judge_images, with_macro
from medvl.eval.dense.box_metrics import AveragePrecision, Found, Matched, challenge_scores, choose_score, match_boxes

PROTOCOL, PROTOCOL_VERSION = "detection", 1


class Detects(Dense, Protocol):
    """A detector, as `medvl.models.Detector` is one."""

    def detect(self, image_BCHW: Tensor, sizes: Sequence[tuple[int, int]]) -> list[Tensor]:
        """One (L, K, 5) an image: edges in its own pixels and a score, -inf where there is no box."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DetectedImage(MarkedImage):
    """An image with what was found in it."""

    found: tuple[Found, ...]
    """Of each label."""

    def as_json(self, labels: Sequence[str]) -> dict[str, Any]:
        """A line of predictions: boxes by falling score, in pixels of the published image."""
        boxes = [
            {"label": label, "x": left, "y": top, "width": right - left, "height": bottom - top, "score": score}
            for label, found in zip(labels, self.found, strict=True)
            for (left, top, right, bottom), score in zip(found.boxes_D4.tolist(), found.scores_D.tolist(), strict=True)
        ]
        return {"key": self.sample.key, "patient": self.sample.patient, "boxes": boxes}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DetectionResult:
    """The results, and the images behind them."""

    results: Results
    labels: tuple[str, ...]
    images: tuple[DetectedImage, ...]
    thresholds: Mapping[str, float] | None
    """By label, chosen on validation images."""

    def predictions(self) -> Iterator[dict[str, Any]]:
        """One mapping an image."""
        return (image.as_json(self.labels) for image in self.images)


def box_detection(
    model: Detects,
    loader: Loader,
    *,
    valid_loader: Loader | None = None,
    resamples: int = 1000,
    seed: int = 0,
    checkpoint: str | Path | None = None,
) -> DetectionResult:
    """Judge a detector; the protocol is at the top of this module.

    Args:
        model: its labels are judged.
        loader: over samples with boxes, or with empty lists of them.
        valid_loader: over images of other patients, on which score thresholds are chosen; None judges no threshold.
        resamples, seed: of the bootstrap.
        checkpoint: whose hash goes into the results.

    Raises:
        EvaluationError: there is no image to judge, or the loader or the detections are not whole.
        SplitError: test and validation images share patients.
    """
    inputs = input_hashes(checkpoint, manifest=loader, validation_manifest=valid_loader)
    labels = tuple(model.config.labels)
    images, account = detect_images(model, loader)
    matched = matched_by_label(images, labels)
    blocks = [precision_block(matched)]
    thresholds = None
    if valid_loader is not None:
        valid, _ = detect_images(model, valid_loader)
        check_disjoint_patients((i.sample.patient for i in valid), (i.sample.patient for i in images))
        thresholds = {label: choose_score(found) for label, found in matched_by_label(valid, labels).items()}
        blocks += threshold_blocks(matched, thresholds)
    patients = [image.sample.patient for image in images]
    boxes = {label: int(found.boxes_N.sum()) for label, found in matched.items()}
    without = {label: int((found.boxes_N == 0).sum()) for label, found in matched.items()}
    results = Results(
        protocol=PROTOCOL,
        protocol_version=PROTOCOL_VERSION,
        rows=measure(blocks, len(images), resamples=resamples, seed=seed, groups=patients),
        config={"labels": list(labels), "bootstrap_unit": "patient", "resamples": resamples, "seed": seed},
        inputs=inputs,
        details={
            **account,
            "patients": len(set(patients)),
            "boxes": boxes,
            "images_without_box": without,
            "thresholds": thresholds,
        },
    )
    return DetectionResult(results=results, labels=labels, images=tuple(images), thresholds=thresholds)


def detect_images(model: Detects, loader: Loader) -> tuple[list[DetectedImage], dict[str, Any]]:
    """Every image of a loader with its detections and its boxes, and the account of it. Raises `EvaluationError`."""
    labels = model.config.labels

    def judge(image_BCHW: Tensor, images: Sequence[MarkedImage]) -> Iterator[DetectedImage]:
        sizes = [published_size(image.sample) for image in images]
        found = [tensor.double().cpu().numpy() for tensor in model.detect(image_BCHW, sizes)]
        for image, found_LK5, size in zip(images, found, sizes, strict=True):
            truth_N5 = boxes_of(image.sample, labels, size)
            of_labels = [
                _found(found_K5, truth_N5[truth_N5[:, 4] == number]) for number, found_K5 in enumerate(found_LK5)
            ]
            yield DetectedImage(position=image.position, sample=image.sample, found=tuple(of_labels))

    return judge_images(model, loader, "boxes", judge)


def _found(found_K5: Array, truth_N5: Array) -> Found:
    there_K = found_K5[:, 4] != -np.inf
    return Found(found_K5[there_K, :4], found_K5[there_K, 4], truth_N5[:, :4])


def matched_by_label(images: Sequence[DetectedImage], labels: Sequence[str]) -> dict[str, Matched]:
    """What became of the detections of each label."""
    return {label: match_boxes([image.found[number] for image in images]) for number, label in enumerate(labels)}


def precision_block(matched: Mapping[str, Matched]) -> MetricGroup:
    """Average precisions of every label, and their means over labels where there are several."""
    statistics = {label: AveragePrecision(found) for label, found in matched.items()}
    boxed = {label: (found.boxes_N > 0)[:, None] for label, found in matched.items()}
    some = next(iter(matched.values()))
    means = {"ap_rsna": some.of("rsna"), "ap_coco": some.of("coco")}
    means |= {f"ap@{overlap:g}": [some.overlaps.index(overlap)] for overlap in (0.4, 0.5, 0.75)}

    def of_label(label: str, counts_NR: Array) -> Array:
        values_RT = statistics[label].precision_RT(counts_NR)
        of_boxed_RT = statistics[label].precision_RT(counts_NR * boxed[label])
        columns = [values_RT[:, chosen].mean(axis=1) for chosen in means.values()]
        return np.stack([*columns, of_boxed_RT[:, means["ap_rsna"]].mean(axis=1)], axis=1)

    names = [*means, "ap_rsna_boxed"]

    def statistic(counts_NR: Array) -> Array:
        values_LRM = np.stack([of_label(label, counts_NR) for label in matched])
        if len(matched) > 1:
            values_LRM = np.concatenate([values_LRM, values_LRM.mean(axis=0, keepdims=True)])
        return values_LRM.transpose(1, 2, 0).reshape(counts_NR.shape[1], -1)

    rows = []
    for name in names:
        for label, found in matched.items():
            positive = int((found.boxes_N > 0).sum())
            judged = positive if name == "ap_rsna_boxed" else len(found.boxes_N)
            rows.append(MetricRow(metric=name, target=label, n=judged, n_positive=positive))
        if len(matched) > 1:
            rows.append(MetricRow(metric=name, target="macro", n=len(some.boxes_N)))
    return MetricGroup(rows, statistic)


def threshold_blocks(matched: Mapping[str, Matched], thresholds: Mapping[str, float]) -> list[MetricGroup]:
    """The challenge's score, and how often normal images are left alone, of labels that have a threshold."""
    chosen = {label: found for label, found in matched.items() if not np.isnan(thresholds[label])}
    if not chosen:
        return []
    scores_NL = np.stack([challenge_scores(found, thresholds[label]) for label, found in chosen.items()], axis=1)
    drawn_NL = np.stack([(found.scores_ND >= thresholds[label]).any(axis=1) for label, found in chosen.items()], axis=1)
    boxed_NL = np.stack([found.boxes_N > 0 for found in chosen.values()], axis=1)
    return [
        with_macro(mean_metrics("challenge_score", scores_NL, list(chosen))),
        with_macro(mean_metrics("left_empty", np.where(boxed_NL, np.nan, ~drawn_NL), list(chosen))),
    ]


class DetectionEval:
    """Average precisions of a detector while it is being trained: "detection/ap_rsna", "detection/ap@0.5", ..."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def __call__(self, model: Detects) -> dict[str, float]:
        """The numbers for the model as it is now, means over labels. Raises `EvaluationError`."""
        images, _ = detect_images(model, self.loader)
        block = precision_block(matched_by_label(images, model.config.labels))
        rows = measure([block], len(images), resamples=0)
        told = headline_target(model.config.labels)
        return {f"detection/{row.metric}": row.value for row in rows if row.target == told}
