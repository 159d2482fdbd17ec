"""Shared parts of the detection and segmentation pages."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from medvl.data.annotations import published_size
from medvl.data.loading.dense_targets import mask_at
from medvl.data.loading.sources import OtherTexts
from medvl.data.shards.source import ShardSource
from medvl.eval.core.metric_rows import MetricGroup
from medvl.eval.core.open import Setup, SmallBatchOptions
from medvl.eval.core.results import (
    LineFields,
    Lines,
    PageHeader,
    Results,
    WritePage,
    at_items,
    number,
)
from medvl.eval.dense import detection, segmentation
from medvl.eval.dense.annotated_images import headline_target
from medvl.eval.dense.detection import DetectedImage, DetectionResult
from medvl.eval.dense.metrics import APConvention, EmptyRule
from medvl.eval.dense.segmentation import MASK_LINES, SegmentationResult, SegmentedImage
from medvl.eval.evaluation import ModelEvaluation
from medvl.eval.html.page import (
    Page,
    Picture,
    Pictures,
    Pixels,
    Section,
    Strip,
    header_facts,
    headline,
    thumbnail_uri,
    write_page,
)
from medvl.eval.html.tables import Cell, Table, metric_cell
from medvl.eval.registry import register_evaluation
from medvl.models.downstream.dense import MaskModel
from medvl.models.downstream.detector import Detector

SIDE = 384
"""Longer side of a picture, in pixels."""
TRUTH_COLOR = (34, 211, 238)
PREDICTION_COLOR = (251, 146, 60)
LIMITS = (
    "A research evaluation, not for clinical use: a small decoder on an encoder that was not "
    "trained for this task, so "
    "the numbers compare encoders and are not the best that could be reached.",
    "Intervals are percentiles of a bootstrap over patients. They include sampling error, not "
    "disagreement between the annotators of the boxes or masks.",
    "Images on this page belong to the data set and stay under its terms of use.",
)


def write_dense_page(
    results: Results,
    labels: Sequence[str],
    path: str | Path,
    *,
    title: str,
    subtitle: str,
    names: Mapping[str, str],
    headlines: Sequence[str],
    facts: Sequence[tuple[str, str]],
    caption: str,
    pictures: Pictures | None,
    tables: Sequence[Table] = (),
) -> Path:
    """Write a page with a table of the metrics in `names` (metric -> title), `tables` and
    pictures; return its path.
    """
    metrics = {row.metric for row in results.rows}
    names = {metric: name for metric, name in names.items() if metric in metrics}
    sections: list[Section] = [_table(results, labels, names, caption), *tables]
    page = Page(
        title=title,
        subtitle=f"{subtitle} of {results.details['patients']:,} patients",
        headlines=[
            headline(names[metric], results.row(metric, headline_target(labels)))
            for metric in headlines
            if metric in names
        ],
        facts=facts,
        sections=sections if pictures is None or not pictures.strips else [*sections, pictures],
        limits=LIMITS,
    )
    return write_page(page, path)


def _table(
    results: Results, labels: Sequence[str], names: Mapping[str, str], caption: str
) -> Table:
    rows = {(row.metric, row.target): row for row in results.rows if not row.subgroup}
    targets = [*labels, "macro"] if len(labels) > 1 else list(labels)
    lines: list[Sequence[Cell | str]] = [
        [
            "Mean over labels" if target == "macro" else target,
            *(metric_cell(rows.get((metric, target)), bar=True) for metric in names),
        ]
        for target in targets
    ]
    return Table(
        title="Summary by label", columns=["", *names.values()], rows=lines, caption=caption
    )


def dense_facts(
    results: Results, header: PageHeader, extra: Sequence[tuple[str, str]]
) -> list[tuple[str, str]]:
    """Return the header's facts: `extra`, and how many images were left out."""
    not_annotated = results.details["not_annotated"]
    unreadable = sum(results.details["unreadable"].values())
    left_out = ("Left out", f"{not_annotated:,} images without annotation, {unreadable} unreadable")
    return header_facts(results, header, units="patients", extra=[*extra, left_out])


def resize_to_picture(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the image as (H, W, 3) with a longer side of `SIDE` pixels."""
    import cv2

    scale = SIDE / max(pixels.shape[:2])
    size = (max(1, round(pixels.shape[1] * scale)), max(1, round(pixels.shape[0] * scale)))
    image = cv2.resize(pixels, size, interpolation=cv2.INTER_AREA if scale < 1 else cv2.INTER_CUBIC)
    color_HWC = np.repeat(image[:, :, None], 3, axis=2) if image.ndim == 2 else image
    return np.ascontiguousarray(color_HWC).astype(np.uint8)


# HTML page of a detection evaluation: metrics of every label, and detections drawn on images.

_SHOWN_WITHOUT_THRESHOLD = 3  # detections drawn per image and label if there is no score threshold
_BOX_METRICS = {
    "ap_rsna": "mAP, IoU 0.40–0.75",
    "ap_coco": "mAP, IoU 0.50–0.95",
    "ap@0.5": "AP at IoU 0.5",
    "challenge_score": "RSNA score",
    "left_empty": "Normal, no detection",
    "ap_rsna_boxed": "mAP, boxed images only",
}


def write_detection_page(
    result: DetectionResult,
    path: str | Path,
    header: PageHeader,
    *,
    pixels: Pixels | None = None,
    examples: int = 6,
) -> Path:
    """Write the page as one HTML file and return its path; arguments as in `write_zero_shot_page`.

    `result` is from `box_detection`; `examples` is the number of random images with boxes, and
    without.
    """
    details = result.results.details
    thresholds = ", ".join(
        f"{label} {value:.3f}" for label, value in (details["thresholds"] or {}).items()
    )
    return write_dense_page(
        result.results,
        result.labels,
        path,
        title=f"Detection: {header.model}",
        subtitle=f"{header.data}: {sum(details['boxes'].values()):,} boxes in "
        f"{details['images']:,} images",
        names=_BOX_METRICS,
        headlines=("ap_rsna", "ap_coco", "challenge_score"),
        facts=dense_facts(
            result.results,
            header,
            [
                ("Score threshold", thresholds or "none: no validation images"),
                ("Average precision", _convention(result.results.config["convention"])),
            ],
        ),
        caption="With 95% intervals. All images count: a detection in a normal image is a false "
        "positive. The last "
        "column leaves out images without boxes, as several published codes do, for comparison "
        "only. The RSNA score is "
        "the challenge's precision of an image, averaged; it and the share of normal images "
        "without a detection are "
        "computed at the score threshold.",
        pictures=None if pixels is None else _detections(result, pixels, examples),
    )


def _convention(convention: Mapping[str, Any]) -> str:
    recalls = convention["recalls"]
    parts = [
        "widths are right - left" + (" + 1" if convention["edge_pixels"] else ""),
        "equal scores are one step"
        if convention["ties"] == "one_step"
        else "equal scores are steps in order",
        "area under the curve" if recalls == "all" else f"mean over {recalls} recalls",
    ]
    return f"convention {convention['name']}: {', '.join(parts)}"


def _detections(result: DetectionResult, pixels: Pixels, examples: int) -> Pictures:
    boxed = np.array(
        [any(len(one.truth_G4) for one in image.detections) for image in result.images], np.bool_
    )
    rng = np.random.default_rng(result.results.config["seed"])
    strips = []
    for title, value in (("With boxes", True), ("Without boxes", False)):
        rows = np.flatnonzero(boxed == value)
        images = [result.images[row] for row in rng.permutation(rows)[:examples].tolist()]
        pictures = [_detection(result, image, pixels(image.position)) for image in images]
        if pictures:
            strips.append(
                Strip(
                    title=title, note=f"{len(pictures)} of {len(rows):,}, random", pictures=pictures
                )
            )
    return Pictures(
        title="Detections",
        strips=strips,
        caption="Orange: detections at or above the score threshold. Blue: boxes of the data set.",
    )


def _detection(result: DetectionResult, image: DetectedImage, pixels: NDArray[np.uint8]) -> Picture:
    detections = []
    for label, one in zip(result.labels, image.detections, strict=True):
        threshold = (result.thresholds or {}).get(label, np.nan)
        scores_D = one.scores_D
        lowest = (
            np.sort(scores_D)[-_SHOWN_WITHOUT_THRESHOLD:].min(initial=1)
            if np.isnan(threshold)
            else threshold
        )
        detections += [
            (box, score)
            for box, score in zip(one.boxes_D4, scores_D, strict=True)
            if score >= lowest
        ]
    truth = [box for one in image.detections for box in one.truth_G4]
    lines = [f"{len(truth)} in the data set, {len(detections)} detected"]
    if detections:
        lines.append("scores " + ", ".join(f"{score:.2f}" for _, score in detections))
    drawn_HWC = draw_boxes(
        pixels, published_size(image.sample), truth, [box for box, _ in detections]
    )
    return Picture(
        source=thumbnail_uri(drawn_HWC, SIDE),
        alternative=f"radiograph with boxes: {'; '.join(lines)}",
        lines=lines,
    )


def draw_boxes(
    pixels: NDArray[np.uint8],
    size: tuple[int, int],
    truth: Sequence[NDArray[np.float64]],
    predicted: Sequence[NDArray[np.float64]],
) -> NDArray[np.uint8]:
    """Return the image (H, W, 3) at the size of a picture, with the outlines of annotated and
    predicted boxes.

    Args:
        pixels: (H, W) or (H, W, 3), stored at any size.
        size: (height, width) of the published image, in whose pixels the boxes are: left, top,
            right, bottom.
        truth, predicted: boxes.
    """
    import cv2

    drawn_HWC = resize_to_picture(pixels)
    down = drawn_HWC.shape[0] / size[0]
    across = drawn_HWC.shape[1] / size[1]
    for boxes, color in ((truth, TRUTH_COLOR), (predicted, PREDICTION_COLOR)):
        for left, top, right, bottom in boxes:
            corners = (
                (round(left * across), round(top * down)),
                (round(right * across) - 1, round(bottom * down) - 1),
            )
            cv2.rectangle(drawn_HWC, *corners, color, 2, cv2.LINE_AA)
    return drawn_HWC


# HTML page of a segmentation evaluation: metrics of every label, and masks drawn on images.

_MASK_METRICS = {
    "dice": "Dice",
    "iou": "IoU",
    "dice_masked": "Dice, masked images",
    "left_empty": "Normal, empty prediction",
    "pixel_auroc": "AUROC of pixels, masked images",
    "dice_pooled": "Dice, pooled pixels",
    "iou_pooled": "IoU, pooled pixels",
}
_EMPTY = {
    "one_if_both_empty": "1 if the prediction is empty, else 0 (all images are evaluated)",
    "skip_empty": "left out, whatever the prediction",
    "lvit": "Dice 1 and IoU 0 if the prediction is empty, else 0 (LViT's code)",
}


def write_segmentation_page(
    result: SegmentationResult,
    path: str | Path,
    header: PageHeader,
    *,
    pixels: Pixels | None = None,
) -> Path:
    """Write the page as one HTML file and return its path; arguments as in `write_zero_shot_page`.

    `result` is from `mask_segmentation`; images with kept maps are shown.
    """
    details = result.results.details
    config = result.results.config
    thresholds = [
        f"{label}: probability {one.threshold:g}, empty below {one.min_share:.2%} of the image"
        for label, one in result.thresholds.items()
    ]
    facts = [
        ("Empty masks", _EMPTY[config["empty"]]),
        (
            "Empty predictions",
            ", ".join(f"Dice {value:.3f}" for value in details["empty_prediction_dice"].values()),
        ),
        ("Thresholds", f"{', '.join(thresholds)}; {config['threshold_source']}"),
        ("Masks", "the union of boxes" if details["masks_are_boxes"] else "those of the data set"),
    ]
    return write_dense_page(
        result.results,
        result.labels,
        path,
        title=f"Segmentation: {header.model}",
        subtitle=f"{header.data}: {sum(details['images_with_mask'].values()):,} masks in "
        f"{details['images']:,} images",
        names=_MASK_METRICS,
        headlines=("dice", "dice_masked", "left_empty"),
        facts=dense_facts(result.results, header, facts),
        caption="With 95% intervals. Dice and IoU are over all images that the rule for empty "
        "masks includes; also "
        "shown are the Dice of images with a mask alone, the share of the other images whose "
        "prediction is empty, and "
        "both metrics over the pixels of all images together.",
        tables=_texts(result),
        pictures=None if pixels is None else _segmentations(result, pixels),
    )


def _texts(result: SegmentationResult) -> list[Table]:
    """Return the table of Dice with other texts, for a model that reads text."""
    rows = {(row.metric, row.subgroup, row.target): row for row in result.results.rows}
    names = dict.fromkeys(subgroup for _, subgroup, _ in rows if subgroup)
    target = headline_target(result.labels)
    lines: list[Sequence[Cell | str]] = [
        [name, *(metric_cell(rows[metric, name, target]) for metric in ("dice", "dice_gain"))]
        for name in names
    ]
    if not lines:
        return []
    own: list[Cell | str] = ["the image's own text", metric_cell(rows["dice", "", target]), ""]
    return [
        Table(
            title="With other texts",
            columns=["", "Dice", "The image's own text is better by"],
            rows=[own, *lines],
            caption="The same images and thresholds. The difference is taken image by image. A "
            "text that names the "
            "place of a finding contains a part of the answer.",
        )
    ]


def _segmentations(result: SegmentationResult, pixels: Pixels) -> Pictures:
    strips = []
    shown = [(row, image) for row, image in enumerate(result.images) if image.map_LHW is not None]
    for index, label in enumerate(result.labels):
        for title, value in (("with a mask", True), ("without a mask", False)):
            examples = [
                (row, image)
                for row, image in shown
                if bool(image.areas[index].truth_N.any()) == value
            ]
            pictures = [
                _segmentation(result, row, image, index, pixels(image.position))
                for row, image in examples
            ]
            if pictures:
                strips.append(Strip(title=f"{label}, {title}", note="random", pictures=pictures))
    return Pictures(
        title="Predicted masks",
        strips=strips,
        caption="Orange: the predicted mask at the threshold. Blue: the outline of the data "
        "set's mask.",
    )


def _segmentation(
    result: SegmentationResult,
    row: int,
    image: SegmentedImage,
    index: int,
    pixels: NDArray[np.uint8],
) -> Picture:
    assert image.map_LHW is not None
    label = result.labels[index]
    dice = result.dice_NL[row, index]
    predicted_HW = result.thresholds[label](image.map_LHW[index])
    truth_HW = mask_at(image.sample, label, predicted_HW.shape)
    lines = [
        "left out by the rule" if np.isnan(dice) else f"Dice {dice:.2f}",
        f"predicted {predicted_HW.mean():.1%} of the image, mask {truth_HW.mean():.1%}",
    ]
    drawn_HWC = draw_masks(pixels, truth_HW, predicted_HW)
    return Picture(
        source=thumbnail_uri(drawn_HWC, SIDE),
        alternative=f"image with masks of {label}: {'; '.join(lines)}",
        lines=lines,
    )


def draw_masks(
    pixels: NDArray[np.uint8], truth_HW: NDArray[np.bool_], predicted_HW: NDArray[np.bool_]
) -> NDArray[np.uint8]:
    """Return the image (H, W, 3) at the size of a picture, with the predicted mask and the
    annotated mask's outline.

    Args:
        pixels: (H, W) or (H, W, 3), stored at any size.
        truth_HW, predicted_HW: masks of the image, at any size.
    """
    import cv2

    drawn_HWC = resize_to_picture(pixels)
    size = drawn_HWC.shape[1::-1]
    predicted, truth = (
        cv2.resize(mask_HW.astype(np.uint8), size, interpolation=cv2.INTER_NEAREST)
        for mask_HW in (predicted_HW, truth_HW)
    )
    tinted_HWC = 0.55 * drawn_HWC + 0.45 * np.array(PREDICTION_COLOR)
    drawn_HWC = np.where(predicted[:, :, None] > 0, tinted_HWC, drawn_HWC).round().astype(np.uint8)
    outlines, _ = cv2.findContours(truth, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_NONE)
    return np.asarray(
        cv2.drawContours(np.ascontiguousarray(drawn_HWC), outlines, -1, TRUTH_COLOR, 2, cv2.LINE_AA)
    )


_ADVICE = (
    "train a {kind} on its image encoder with recipes/dense_transfer.py --init-from {{}} "
    "--task {task}"
)


@register_evaluation("detection")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Detection(ModelEvaluation):
    """Evaluate detection of findings: average precision over all images, those without boxes
    included.

    The checkpoint is a detector (recipes/dense_transfer.py); the shards have boxes (rsna,
    vindr-cxr, chestxdet10, ...).
    """

    protocols = (detection.PROTOCOL,)
    lines = LineFields(needs=("true",))
    fits = (Detector,)
    advice = _ADVICE.format(kind="detector", task="detection")
    shared = SmallBatchOptions

    valid: Path | None = None
    """folder of shards of other patients, on which the score threshold is chosen; without it, no
    challenge score
    """
    convention: Literal["medvl", "coco", "voc2007", "voc2012"] = "medvl"
    """convention of average precision: medvl treats equal scores as one step; coco and voc order
    them, and voc adds a pixel to widths and has its own matching and recalls
    """
    examples: int = 6
    """images with boxes on the page, and as many without"""

    def evaluate(self, model: Detector, source: ShardSource, setup: Setup) -> DetectionResult:
        """Return the average precision of each finding."""
        return detection.box_detection(
            model,
            setup.loader(source, model, text=False),
            valid_loader=setup.valid_loader(self.valid, model, self.checkpoint, text=False),
            convention=self.convention,
            resamples=setup.resamples,
            checkpoint=self.checkpoint,
        )

    def page(self, result: DetectionResult, source: ShardSource) -> WritePage:
        return functools.partial(
            write_detection_page, result, pixels=source.pixels, examples=self.examples
        )

    @staticmethod
    def metric_groups(lines: Lines, results: Results) -> list[MetricGroup]:
        """Return the metrics of the images in the order of the data, which decides between equal
        scores.
        """
        order_N = np.argsort([line["position"] for line in lines])
        labels = results.config["labels"]
        convention = dict(results.config["convention"])
        convention.pop("name")
        thresholds = results.details["thresholds"]
        known = (
            None if thresholds is None else {label: number(thresholds[label]) for label in labels}
        )
        images = [detection.read_detections(lines[index], labels) for index in order_N]
        groups = detection.detection_groups(images, labels, APConvention(**convention), known)
        return [at_items(group, order_N) for group in groups]


_TEXTS = {"none": "no text", "others": "texts of other images"}


@register_evaluation("segmentation")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Segmentation(ModelEvaluation):
    """Evaluate segmentation of findings: Dice over all images, with a named rule for empty masks.

    The checkpoint is a segmenter (recipes/dense_transfer.py) or LViT (recipes/lvit_qata.py); the
    shards have masks (siim, qata, ...) or boxes (rsna).
    """

    protocols = (segmentation.PROTOCOL,)
    lines = MASK_LINES
    fits = (MaskModel,)
    advice = _ADVICE.format(kind="segmenter", task="segmentation")
    shared = SmallBatchOptions
    metric_groups = staticmethod(segmentation.groups_of_lines)

    valid: Path | None = None
    """folder of shards of other patients, on which thresholds are chosen; without it they are
    fixed
    """
    empty: EmptyRule = "one_if_both_empty"
    """score of an image without a mask: 1 if the prediction is empty too, else 0; or none, such
    images being left out; or smoothed as in LViT's code
    """
    side: int | None = None
    """longer side of the images in which masks are compared; default: the published size"""
    other_texts: tuple[Literal["none", "others"], ...] = ("none", "others")
    """texts to compare with, for a model that reads text: none, or those of other images"""
    examples: int = 6
    """images with a mask on the page, and as many without"""

    def evaluate(self, model: MaskModel, source: ShardSource, setup: Setup) -> SegmentationResult:
        """Return the Dice of each finding."""
        compared = self.other_texts if model.tokenizer is not None else ()
        return segmentation.mask_segmentation(
            model,
            setup.loader(source, model),
            other_texts={
                _TEXTS[name]: setup.loader(OtherTexts(source, name), model) for name in compared
            },
            valid_loader=setup.valid_loader(self.valid, model, self.checkpoint),
            empty=self.empty,
            side=self.side,
            resamples=setup.resamples,
            keep_maps=self.examples,
            checkpoint=self.checkpoint,
        )

    def page(self, result: SegmentationResult, source: ShardSource) -> WritePage:
        return functools.partial(write_segmentation_page, result, pixels=source.pixels)
