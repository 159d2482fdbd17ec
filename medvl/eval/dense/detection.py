"""Detection: predicted boxes against annotated boxes, on all images.

Protocol "detection", version 1:

* Every image annotated with boxes is evaluated, also with none: a detection in a normal image is a
  false positive. (Published code of several systems leaves out images without boxes, and images
  without a detection together with their boxes; "ap_rsna_boxed" shows what that would report.)
* "ap_rsna" and "ap_coco" are average precisions over all detections by score (`box_metrics`),
  averaged over the overlap thresholds of the RSNA challenge (0.40 to 0.75) and of COCO (0.50 to
  0.95); "ap@0.5" uses one threshold. Edges, ties and interpolation follow a named convention
  (`box_metrics.AP_CONVENTIONS`): medvl's, in which equal scores are one step, or that of COCO or
  Pascal VOC, in which the order of images decides between equal scores.
* "challenge_score" is that of the RSNA challenge, and "left_empty" the share of images without a
  box that have no detection. Both need a score threshold, which is chosen only on validation images
  of other patients.
* Boxes are compared in pixels of the published image. Boxes outside of the model's crop count as
  missed.
* Intervals: the bootstrap resamples patients, with all their images. All rows share the resamples.

Shape letters: N images, L labels, T overlap thresholds, R resamples, K detections per label (fixed,
padded).
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from medvl.data.annotations import published_size
from medvl.data.loading.dense_targets import boxes_of
from medvl.eval.core.full_pass import Loader, check_disjoint_patients, input_hashes
from medvl.eval.core.metric_rows import MetricGroup, MetricRow, mean_metrics, measure, subgroups_of
from medvl.eval.core.metrics import Array, mean_over_labels
from medvl.eval.core.results import Results
from medvl.eval.dense import metrics
from medvl.eval.dense.annotated_images import (
    AnnotatedImage,
    DenseModel,
    evaluate_images,
    headline_target,
    with_macro,
)
from medvl.eval.dense.metrics import (
    APConvention,
    APConventionName,
    AveragePrecision,
    ImageDetections,
    MatchedDetections,
)
from medvl.schema import Batch

PROTOCOL = "detection"
PROTOCOL_VERSION = 1


class DetectorModel(DenseModel, Protocol):
    """A detector such as `medvl.models.Detector`."""

    def detect(self, batch: Batch, sizes: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Return (L, K, 5) per image: edges in pixels of the published image and a score, -inf
        for padding.
        """


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DetectedImage(AnnotatedImage):
    """An image with its detections."""

    detections: tuple[ImageDetections, ...]
    """By label."""

    def as_json(self, labels: Sequence[str]) -> dict[str, Any]:
        """Return one line of the predictions file: detected boxes by decreasing score, and the
        annotated ones ("true").

        Boxes are in pixels of the published image. `read_detections` reads the line.
        """
        by_label = list(zip(labels, self.detections, strict=True))
        boxes = [
            {**_box(label, edges), "score": score}
            for label, detected in by_label
            for edges, score in zip(
                detected.boxes_D4.tolist(), detected.scores_D.tolist(), strict=True
            )
        ]
        truth = [
            _box(label, edges)
            for label, detected in by_label
            for edges in detected.truth_G4.tolist()
        ]
        names = {
            "key": self.sample.key,
            "patient": self.sample.patient,
            "subgroups": subgroups_of(self.sample),
        }
        return {**names, "position": self.position, "boxes": boxes, "true": truth}


def _box(label: str, edges: Sequence[float]) -> dict[str, Any]:
    left, top, right, bottom = edges
    return {"label": label, "x": left, "y": top, "width": right - left, "height": bottom - top}


def read_detections(line: Mapping[str, Any], labels: Sequence[str]) -> tuple[ImageDetections, ...]:
    """Return the detections and annotated boxes of each label from a line of
    `DetectionResult.predictions`.
    """

    def boxes_N4(field: str, label: str) -> Array:
        boxes = [box for box in line[field] if box["label"] == label]
        sides_N4 = np.array(
            [[box[side] for side in ("x", "y", "width", "height")] for box in boxes]
        ).reshape(-1, 4)
        return np.concatenate([sides_N4[:, :2], sides_N4[:, :2] + sides_N4[:, 2:]], axis=1).astype(
            np.float64
        )

    scores = {
        label: [box["score"] for box in line["boxes"] if box["label"] == label] for label in labels
    }
    return tuple(
        ImageDetections(
            boxes_N4("boxes", label), np.array(scores[label], np.float64), boxes_N4("true", label)
        )
        for label in labels
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DetectionResult:
    """Results of a detector, with the evaluated images."""

    results: Results
    labels: tuple[str, ...]
    images: tuple[DetectedImage, ...]
    thresholds: Mapping[str, float] | None
    """Score threshold by label, chosen on validation images."""

    def predictions(self) -> Iterator[dict[str, Any]]:
        """Yield one mapping per image for `write_results`."""
        return (image.as_json(self.labels) for image in self.images)


def box_detection(
    model: DetectorModel,
    loader: Loader,
    *,
    valid_loader: Loader | None = None,
    convention: APConventionName = "medvl",
    resamples: int = 1000,
    seed: int = 0,
    checkpoint: str | Path | None = None,
) -> DetectionResult:
    """Evaluate a detector; the module docstring describes the protocol.

    Args:
        model: its labels are evaluated.
        loader: over samples with boxes, or with empty lists of them.
        valid_loader: over images of other patients, for choosing score thresholds; None omits the
            metrics at a threshold.
        convention: convention of average precision; the metrics at a threshold do not depend on it.
        resamples, seed: number and seed of the bootstrap resamples.
        checkpoint: its hash goes into the results.

    Raises:
        EvaluationError: no image is annotated, the loader is incomplete, a detection is not finite,
            or the convention is unknown.
        SplitError: test and validation images share patients.
    """
    rules = metrics.ap_convention(convention)
    inputs = input_hashes(checkpoint, manifest=loader, validation_manifest=valid_loader)
    labels = tuple(model.config.labels)
    images, counts = detect_images(model, loader)
    detections = [image.detections for image in images]
    matched = match_by_label(detections, labels)
    thresholds = None
    if valid_loader is not None:
        valid, _ = detect_images(model, valid_loader)
        check_disjoint_patients(
            (i.sample.patient for i in valid), (i.sample.patient for i in images)
        )
        thresholds = {
            label: metrics.choose_score_threshold(one)
            for label, one in match_by_label([image.detections for image in valid], labels).items()
        }
    groups = detection_groups(detections, labels, rules, thresholds)
    patients = [image.sample.patient for image in images]
    results = Results(
        protocol=PROTOCOL,
        protocol_version=PROTOCOL_VERSION,
        rows=measure(groups, len(images), resamples=resamples, seed=seed, groups=patients),
        config={
            "labels": list(labels),
            "convention": {"name": convention, **dataclasses.asdict(rules)},
            "bootstrap_unit": "patient",
            "resamples": resamples,
            "seed": seed,
        },
        inputs=inputs,
        details=counts
        | {"patients": len(set(patients)), **_box_counts(matched), "thresholds": thresholds},
    )
    return DetectionResult(
        results=results, labels=labels, images=tuple(images), thresholds=thresholds
    )


def _box_counts(matched: Mapping[str, MatchedDetections]) -> dict[str, Any]:
    return {
        "boxes": {label: int(one.boxes_N.sum()) for label, one in matched.items()},
        "images_without_box": {
            label: int((one.boxes_N == 0).sum()) for label, one in matched.items()
        },
    }


def detect_images(
    model: DetectorModel, loader: Loader
) -> tuple[list[DetectedImage], dict[str, Any]]:
    """Return every annotated image of a loader with its detections and boxes, and counts. Raises
    `EvaluationError`.
    """
    labels = model.config.labels

    def evaluate(batch: Batch, images: Sequence[AnnotatedImage]) -> Iterator[DetectedImage]:
        sizes = [published_size(image.sample) for image in images]
        outputs = [tensor.double().cpu().numpy() for tensor in model.detect(batch, sizes)]
        for image, output_LK5, size in zip(images, outputs, sizes, strict=True):
            truth_N5 = boxes_of(image.sample, labels, size)
            by_label = [
                _detections(output_K5, truth_N5[truth_N5[:, 4] == index])
                for index, output_K5 in enumerate(output_LK5)
            ]
            yield DetectedImage(
                position=image.position, sample=image.sample, detections=tuple(by_label)
            )

    return evaluate_images(model, loader, "boxes", evaluate)


def _detections(output_K5: Array, truth_N5: Array) -> ImageDetections:
    valid_K = output_K5[:, 4] != -np.inf
    return ImageDetections(output_K5[valid_K, :4], output_K5[valid_K, 4], truth_N5[:, :4])


def match_by_label(
    images: Sequence[Sequence[ImageDetections]],
    labels: Sequence[str],
    convention: APConvention = metrics.AP_CONVENTIONS["medvl"],
) -> dict[str, MatchedDetections]:
    """Match the detections of each label, given by image and label, with its boxes."""
    return {
        label: metrics.match_boxes([of_image[index] for of_image in images], convention=convention)
        for index, label in enumerate(labels)
    }


def detection_groups(
    images: Sequence[Sequence[ImageDetections]],
    labels: Sequence[str],
    convention: APConvention,
    thresholds: Mapping[str, float] | None,
) -> list[MetricGroup]:
    """Return the average precisions of detections by image and label, and with thresholds the
    metrics at these.
    """
    groups = [precision_group(match_by_label(images, labels, convention))]
    if thresholds is not None:
        groups += threshold_groups(match_by_label(images, labels), thresholds)
    return groups


def precision_group(matched: Mapping[str, MatchedDetections]) -> MetricGroup:
    """Return the average precisions of every label, and their means over labels if there are
    several.

    A label without a box has no average precision and is left out of the mean.
    """
    statistics = {label: AveragePrecision(one) for label, one in matched.items()}
    boxed = {label: (one.boxes_N > 0)[:, None] for label, one in matched.items()}
    boxed_L = np.array([mask_N1.any() for mask_N1 in boxed.values()])
    first = next(iter(matched.values()))
    means = {"ap_rsna": first.overlap_indices("rsna"), "ap_coco": first.overlap_indices("coco")}
    means |= {f"ap@{overlap:g}": [first.overlaps.index(overlap)] for overlap in (0.4, 0.5, 0.75)}

    def of_label(label: str, counts_NR: Array) -> Array:
        values_RT = statistics[label].precision_RT(counts_NR)
        boxed_RT = statistics[label].precision_RT(counts_NR * boxed[label])
        columns = [values_RT[:, indices].mean(axis=1) for indices in means.values()]
        return np.stack([*columns, boxed_RT[:, means["ap_rsna"]].mean(axis=1)], axis=1)

    def statistic(counts_NR: Array) -> Array:
        values_LRM = np.stack([of_label(label, counts_NR) for label in matched])
        if len(matched) > 1:
            means_MR = [
                mean_over_labels(values_RL, boxed_L) for values_RL in values_LRM.transpose(2, 1, 0)
            ]
            values_LRM = np.concatenate([values_LRM, np.stack(means_MR, axis=1)[None]])
        return values_LRM.transpose(1, 2, 0).reshape(counts_NR.shape[1], -1)

    rows = []
    for name in (*means, "ap_rsna_boxed"):
        for label, one in matched.items():
            positive = int((one.boxes_N > 0).sum())
            images = positive if name == "ap_rsna_boxed" else len(one.boxes_N)
            rows.append(MetricRow(metric=name, target=label, n=images, n_positive=positive))
        if len(matched) > 1:
            rows.append(MetricRow(metric=name, target="macro", n=len(first.boxes_N)))
    return MetricGroup(rows, statistic)


def threshold_groups(
    matched: Mapping[str, MatchedDetections], thresholds: Mapping[str, float]
) -> list[MetricGroup]:
    """Return "challenge_score" and "left_empty" of the labels that have a score threshold."""
    used = {label: one for label, one in matched.items() if not np.isnan(thresholds[label])}
    if not used:
        return []
    scores_NL = np.stack(
        [metrics.challenge_scores(one, thresholds[label]) for label, one in used.items()], axis=1
    )
    detected_NL = np.stack(
        [(one.scores_ND >= thresholds[label]).any(axis=1) for label, one in used.items()], axis=1
    )
    boxed_NL = np.stack([one.boxes_N > 0 for one in used.values()], axis=1)
    return [
        with_macro(mean_metrics("challenge_score", scores_NL, list(used)), len(scores_NL)),
        with_macro(
            mean_metrics("left_empty", np.where(boxed_NL, np.nan, ~detected_NL), list(used)),
            len(boxed_NL),
        ),
    ]


class DetectionEval:
    """Average precisions of a detector during training: "detection/ap_rsna", "detection/ap@0.5",
    ...
    """

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def __call__(self, model: DetectorModel) -> dict[str, float]:
        """Return the metrics, means over labels, without intervals. Raises `EvaluationError`."""
        images, _ = detect_images(model, self.loader)
        group = precision_group(
            match_by_label([image.detections for image in images], model.config.labels)
        )
        rows = measure([group], len(images), resamples=0)
        target = headline_target(model.config.labels)
        return {f"detection/{row.metric}": row.value for row in rows if row.target == target}
