"""HTML page of a detection evaluation: metrics of every label, and detections drawn on images."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from medvl.data.annotations.phrases import published_size
from medvl.eval.core.publish import PageHeader
from medvl.eval.dense.detection import DetectedImage, DetectionResult
from medvl.eval.dense.page import PREDICTION_COLOR, SIDE, TRUTH_COLOR, dense_facts, resize_to_picture, write_dense_page
from medvl.eval.html.page import Picture, Pictures, Pixels, Strip, thumbnail_uri

_SHOWN_WITHOUT_THRESHOLD = 3  # detections drawn per image and label if there is no score threshold
_NAMES = {
    "ap_rsna": "mAP, IoU 0.40–0.75",
    "ap_coco": "mAP, IoU 0.50–0.95",
    "ap@0.5": "AP at IoU 0.5",
    "challenge_score": "RSNA score",
    "left_empty": "Normal, no detection",
    "ap_rsna_boxed": "mAP, boxed images only",
}


def write_detection_page(
    result: DetectionResult, path: str | Path, header: PageHeader, *, pixels: Pixels | None = None, examples: int = 6
) -> Path:
    """Write the page as one HTML file and return its path; arguments as in `write_zero_shot_page`.

    `result` is from `box_detection`; `examples` is the number of random images with boxes, and without.
    """
    details = result.results.details
    thresholds = ", ".join(f"{label} {value:.3f}" for label, value in (details["thresholds"] or {}).items())
    return write_dense_page(
        result.results,
        result.labels,
        path,
        title=f"Detection: {header.model}",
        subtitle=f"{header.data}: {sum(details['boxes'].values()):,} boxes in {details['images']:,} images",
        names=_NAMES,
        headlines=("ap_rsna", "ap_coco", "challenge_score"),
        facts=dense_facts(
            result.results,
            header,
            [
                ("Score threshold", thresholds or "none: no validation images"),
                ("Average precision", _convention(result.results.config["convention"])),
            ],
        ),
        caption="With 95% intervals. All images count: a detection in a normal image is a false positive. The last "
        "column leaves out images without boxes, as several published codes do, for comparison only. The RSNA score is "
        "the challenge's precision of an image, averaged; it and the share of normal images without a detection are "
        "computed at the score threshold.",
        pictures=None if pixels is None else _pictures(result, pixels, examples),
    )


def _convention(convention: Mapping[str, Any]) -> str:
    recalls = convention["recalls"]
    parts = [
        "widths are right - left" + (" + 1" if convention["edge_pixels"] else ""),
        "equal scores are one step" if convention["ties"] == "one_step" else "equal scores are steps in order",
        "area under the curve" if recalls == "all" else f"mean over {recalls} recalls",
    ]
    return f"convention {convention['name']}: {', '.join(parts)}"


def _pictures(result: DetectionResult, pixels: Pixels, examples: int) -> Pictures:
    boxed = np.array([any(len(one.truth_G4) for one in image.detections) for image in result.images], np.bool_)
    rng = np.random.default_rng(result.results.config["seed"])
    strips = []
    for title, value in (("With boxes", True), ("Without boxes", False)):
        rows = np.flatnonzero(boxed == value)
        images = [result.images[row] for row in rng.permutation(rows)[:examples].tolist()]
        pictures = [_picture(result, image, pixels(image.position)) for image in images]
        if pictures:
            strips.append(Strip(title=title, note=f"{len(pictures)} of {len(rows):,}, random", pictures=pictures))
    return Pictures(
        title="Detections",
        strips=strips,
        caption="Orange: detections at or above the score threshold. Blue: boxes of the data set.",
    )


def _picture(result: DetectionResult, image: DetectedImage, pixels: NDArray[np.uint8]) -> Picture:
    kept = []
    for label, one in zip(result.labels, image.detections, strict=True):
        threshold = (result.thresholds or {}).get(label, np.nan)
        scores_D = one.scores_D
        lowest = np.sort(scores_D)[-_SHOWN_WITHOUT_THRESHOLD:].min(initial=1) if np.isnan(threshold) else threshold
        kept += [(box, score) for box, score in zip(one.boxes_D4, scores_D, strict=True) if score >= lowest]
    truth = [box for one in image.detections for box in one.truth_G4]
    lines = [f"{len(truth)} in the data set, {len(kept)} detected"]
    if kept:
        lines.append("scores " + ", ".join(f"{score:.2f}" for _, score in kept))
    drawn_HWC = draw_boxes(pixels, published_size(image.sample), truth, [box for box, _ in kept])
    return Picture(
        source=thumbnail_uri(drawn_HWC, SIDE), alternative=f"radiograph with boxes: {'; '.join(lines)}", lines=lines
    )


def draw_boxes(
    pixels: NDArray[np.uint8],
    size: tuple[int, int],
    truth: Sequence[NDArray[np.float64]],
    predicted: Sequence[NDArray[np.float64]],
) -> NDArray[np.uint8]:
    """Return the image (H, W, 3) at the size of a picture, with the outlines of annotated and predicted boxes.

    Args:
        pixels: (H, W) or (H, W, 3), stored at any size.
        size: (height, width) of the published image, in whose pixels the boxes are: left, top, right, bottom.
        truth, predicted: boxes.
    """
    import cv2

    drawn_HWC = resize_to_picture(pixels)
    down, across = drawn_HWC.shape[0] / size[0], drawn_HWC.shape[1] / size[1]
    for boxes, color in ((truth, TRUTH_COLOR), (predicted, PREDICTION_COLOR)):
        for left, top, right, bottom in boxes:
            corners = (round(left * across), round(top * down)), (round(right * across) - 1, round(bottom * down) - 1)
            cv2.rectangle(drawn_HWC, *corners, color, 2, cv2.LINE_AA)
    return drawn_HWC
