"""The pages of detection and of segmentation: the numbers of every label, and what was found over the images."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from medvl.data.annotations.phrases import published_size
from medvl.data.loading.dense_targets import mask_at
from medvl.eval.core.results import Results
from medvl.eval.dense.annotated_images import headline_target
from medvl.eval.dense.detection import DetectedImage, DetectionResult
from medvl.eval.dense.segmentation import SegmentationResult, SegmentedImage
from medvl.eval.html.header import header_facts, headline
from medvl.eval.html.page import (
    Cell,
    Page,
    Picture,
    Pictures,
    Section,
    Strip,
    Table,
    metric_cell,
    thumbnail_uri,
    write_page,
)

Pixels = Callable[[int], NDArray[np.uint8]]
_SIDE = 384
"""Pixels of the longer side of a picture."""
_TRUE, _FOUND = (34, 211, 238), (251, 146, 60)
_SHOWN_WITHOUT_THRESHOLD = 3
"""Boxes of an image that are drawn where no threshold was chosen."""
_DETECTION = {
    "ap_rsna": "mAP, IoU 0.40–0.75",
    "ap_coco": "mAP, IoU 0.50–0.95",
    "ap@0.5": "AP at IoU 0.5",
    "challenge_score": "RSNA's score",
    "left_empty": "Normal left alone",
    "ap_rsna_boxed": "mAP, boxed images only",
}
_SEGMENTATION = {
    "dice": "Dice",
    "iou": "IoU",
    "dice_masked": "Dice, masked images",
    "left_empty": "Normal left alone",
}
_EMPTY = {
    "one_if_both_empty": "1 where nothing is marked, else 0 (all images are judged)",
    "skip_empty": "left out, whatever is marked in them",
}
LIMITS = (
    "A research evaluation, not for clinical use: the decoder is a small one on an encoder that was not trained for "
    "this, so the numbers compare encoders and do not say what could be reached.",
    "Intervals are percentiles of a bootstrap over patients. They hold the chance of the draw, not the judgement of "
    "whoever drew the boxes or masks.",
    "Images on this page belong to the data set and stay under its terms of use.",
)


def write_detection_page(
    result: DetectionResult,
    path: str | Path,
    *,
    model: str,
    data: str,
    date: str | None = None,
    pixels: Pixels | None = None,
    examples: int = 6,
) -> Path:
    """Write the page as one HTML file; its path.

    Args:
        result: what `box_detection` returned.
        path: of the file; its folder is made where it is missing.
        model, data: what they are called in the header.
        date: shown as it stands; the library reads no clock.
        pixels: position -> image, as `loader.source.pixels`; None leaves the images out.
        examples: images with boxes, and without, drawn at random.
    """
    details = result.results.details
    thresholds = details["thresholds"] or {}
    told = ", ".join(f"{label} {value:.3f}" for label, value in thresholds.items()) or "none: no validation images"
    return _write(
        result.results,
        result.labels,
        path,
        title=f"Detection: {model}",
        subtitle=f"{data}: {sum(details['boxes'].values()):,} boxes in {details['images']:,} images",
        names=_DETECTION,
        heads=("ap_rsna", "ap_coco", "challenge_score"),
        facts=_facts(result.results, model, data, date, [("Score threshold", told)]),
        caption="With 95% intervals. All images count: a box drawn on a normal one is a false positive. The last "
        "column leaves images without boxes out, as several published codes do: it is no result, and says by how much "
        "those differ. RSNA's score is the challenge's precision of an image, averaged; it and the share of normal "
        "images on which nothing is drawn are at the score threshold.",
        pictures=None if pixels is None else _boxes_drawn(result, pixels, examples),
    )


def write_segmentation_page(
    result: SegmentationResult,
    path: str | Path,
    *,
    model: str,
    data: str,
    date: str | None = None,
    pixels: Pixels | None = None,
) -> Path:
    """Write the page as one HTML file; its path. Arguments as of `write_detection_page`, the images being those whose
    maps `mask_segmentation` kept."""
    details, config = result.results.details, result.results.config
    cuts = [
        f"{label} from a probability of {cut.threshold:g}, empty below {cut.least_share:.2%} of the image"
        for label, cut in result.cuts.items()
    ]
    facts = [
        ("Empty masks", _EMPTY[config["empty"]]),
        ("Marking nothing", ", ".join(f"Dice {value:.3f}" for value in details["dice_of_nothing"].values())),
        ("Marked", f"{', '.join(cuts)}; {config['cut']}"),
        ("Masks", "the union of boxes" if details["masks_are_boxes"] else "those of the data set"),
    ]
    return _write(
        result.results,
        result.labels,
        path,
        title=f"Segmentation: {model}",
        subtitle=f"{data}: {sum(details['images_with_mask'].values()):,} masks in {details['images']:,} images",
        names=_SEGMENTATION,
        heads=("dice", "dice_masked", "left_empty"),
        facts=_facts(result.results, model, data, date, facts),
        caption="With 95% intervals. Dice and IoU are over all images that the rule for empty masks judges; beside "
        "them the Dice of images with a mask alone, and the share of the others in which nothing is marked.",
        pictures=None if pixels is None else _masks_drawn(result, pixels),
    )


def _write(
    results: Results,
    labels: Sequence[str],
    path: str | Path,
    *,
    title: str,
    subtitle: str,
    names: Mapping[str, str],
    heads: Sequence[str],
    facts: Sequence[tuple[str, str]],
    caption: str,
    pictures: Pictures | None,
) -> Path:
    there = {row.metric for row in results.rows}
    names = {metric: name for metric, name in names.items() if metric in there}
    sections: list[Section] = [_table(results, labels, names, caption)]
    page = Page(
        title=title,
        subtitle=f"{subtitle} of {results.details['patients']:,} patients",
        headlines=[
            headline(names[metric], results.row(metric, headline_target(labels))) for metric in heads if metric in names
        ],
        facts=facts,
        sections=sections if pictures is None or not pictures.strips else [*sections, pictures],
        limits=LIMITS,
    )
    return write_page(page, path)


def _table(results: Results, labels: Sequence[str], names: Mapping[str, str], caption: str) -> Table:
    rows = {(row.metric, row.target): row for row in results.rows}
    targets = [*labels, "macro"] if len(labels) > 1 else list(labels)
    lines: list[Sequence[Cell | str]] = [
        [
            "Mean over labels" if target == "macro" else target,
            *(metric_cell(rows.get((metric, target)), bar=True) for metric in names),
        ]
        for target in targets
    ]
    return Table(title="By label", columns=["", *names.values()], rows=lines, caption=caption)


def _facts(
    results: Results, model: str, data: str, date: str | None, own: Sequence[tuple[str, str]]
) -> list[tuple[str, str]]:
    nobody_looked, unreadable = results.details["nobody_looked"], sum(results.details["unreadable"].values())
    left_out = ("Not judged", f"{nobody_looked:,} images in which nobody looked, {unreadable} unreadable")
    return header_facts(results, model=model, data=data, date=date, units="patients", extra=[*own, left_out])


def _boxes_drawn(result: DetectionResult, pixels: Pixels, examples: int) -> Pictures:
    boxed = np.array([any(len(found.truth_G4) for found in image.found) for image in result.images], np.bool_)
    rng = np.random.default_rng(result.results.config["seed"])
    strips = []
    for title, side in (("With boxes", True), ("Without a box", False)):
        rows = np.flatnonzero(boxed == side)
        drawn = [result.images[row] for row in rng.permutation(rows)[:examples].tolist()]
        pictures = [_box_picture(result, image, pixels(image.position)) for image in drawn]
        if pictures:
            strips.append(
                Strip(title=title, note=f"{len(pictures)} of {len(rows):,}, drawn at random", pictures=pictures)
            )
    return Pictures(
        title="What was found",
        strips=strips,
        caption="Orange: detections at the score threshold or above. Blue: the boxes of the data set.",
    )


def _box_picture(result: DetectionResult, image: DetectedImage, pixels: NDArray[np.uint8]) -> Picture:
    kept = []
    for label, found in zip(result.labels, image.found, strict=True):
        threshold = (result.thresholds or {}).get(label, np.nan)
        scores_D = found.scores_D
        least = np.sort(scores_D)[-_SHOWN_WITHOUT_THRESHOLD:].min(initial=1) if np.isnan(threshold) else threshold
        kept += [(box, score) for box, score in zip(found.boxes_D4, scores_D, strict=True) if score >= least]
    truth = [box for found in image.found for box in found.truth_G4]
    lines = [f"{len(truth)} of the data set, {len(kept)} found"]
    if kept:
        lines.append("scores " + ", ".join(f"{score:.2f}" for _, score in kept))
    drawn_HWC = draw_boxes(pixels, published_size(image.sample), truth, [box for box, _ in kept])
    return Picture(source=thumbnail_uri(drawn_HWC, _SIDE), alternative="an image with boxes", lines=lines)


def draw_boxes(
    pixels: NDArray[np.uint8],
    size: tuple[int, int],
    truth: Sequence[NDArray[np.float64]],
    found: Sequence[NDArray[np.float64]],
) -> NDArray[np.uint8]:
    """The image (H, W, 3) at the size of a picture, with outlines of its boxes and of those that were found.

    Args:
        pixels: (H, W) or (H, W, 3), stored at any size.
        size: (height, width) of the published image, in whose pixels the boxes are: left, top, right, bottom.
        truth, found: boxes.
    """
    import cv2

    drawn_HWC = _picture_of(pixels)
    down, across = drawn_HWC.shape[0] / size[0], drawn_HWC.shape[1] / size[1]
    for boxes, color in ((truth, _TRUE), (found, _FOUND)):
        for left, top, right, bottom in boxes:
            corners = (round(left * across), round(top * down)), (round(right * across) - 1, round(bottom * down) - 1)
            cv2.rectangle(drawn_HWC, *corners, color, 2, cv2.LINE_AA)
    return drawn_HWC


def _masks_drawn(result: SegmentationResult, pixels: Pixels) -> Pictures:
    strips = []
    shown = [(row, image) for row, image in enumerate(result.images) if image.map_LHW is not None]
    for number, label in enumerate(result.labels):
        for told, side in (("with a mask", True), ("without one", False)):
            chosen = [(row, image) for row, image in shown if bool(image.areas[number].true_N.any()) == side]
            pictures = [_mask_picture(result, row, image, number, pixels(image.position)) for row, image in chosen]
            if pictures:
                strips.append(Strip(title=f"{label}, {told}", note="drawn at random", pictures=pictures))
    return Pictures(
        title="What was marked",
        strips=strips,
        caption="Orange: what is marked at the threshold. Blue: the outline of the data set's mask.",
    )


def _mask_picture(
    result: SegmentationResult, row: int, image: SegmentedImage, number: int, pixels: NDArray[np.uint8]
) -> Picture:
    assert image.map_LHW is not None
    label, dice = result.labels[number], result.dice_NL[row, number]
    marked_HW = result.cuts[label](image.map_LHW[number])
    truth_HW = mask_at(image.sample, label, marked_HW.shape)
    lines = [
        "left out by the rule" if np.isnan(dice) else f"Dice {dice:.2f}",
        f"marked {marked_HW.mean():.1%} of the image, mask {truth_HW.mean():.1%}",
    ]
    drawn_HWC = draw_masks(pixels, truth_HW, marked_HW)
    return Picture(source=thumbnail_uri(drawn_HWC, _SIDE), alternative=f"an image with masks of {label}", lines=lines)


def draw_masks(
    pixels: NDArray[np.uint8], truth_HW: NDArray[np.bool_], marked_HW: NDArray[np.bool_]
) -> NDArray[np.uint8]:
    """The image (H, W, 3) at the size of a picture: what is marked in color, and the outline of the true mask.

    Args:
        pixels: (H, W) or (H, W, 3), stored at any size.
        truth_HW, marked_HW: over the whole image, at any size.
    """
    import cv2

    drawn_HWC = _picture_of(pixels)
    size = drawn_HWC.shape[1::-1]
    marked, truth = (
        cv2.resize(mask_HW.astype(np.uint8), size, interpolation=cv2.INTER_NEAREST) for mask_HW in (marked_HW, truth_HW)
    )
    tinted_HWC = 0.55 * drawn_HWC + 0.45 * np.array(_FOUND)
    drawn_HWC = np.where(marked[:, :, None] > 0, tinted_HWC, drawn_HWC).round().astype(np.uint8)
    outlines, _ = cv2.findContours(truth, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_NONE)
    return np.asarray(cv2.drawContours(np.ascontiguousarray(drawn_HWC), outlines, -1, _TRUE, 2, cv2.LINE_AA))


def _picture_of(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """(H, W, 3), the longer side as a picture has it."""
    import cv2

    scale = _SIDE / max(pixels.shape[:2])
    size = (max(1, round(pixels.shape[1] * scale)), max(1, round(pixels.shape[0] * scale)))
    image = cv2.resize(pixels, size, interpolation=cv2.INTER_AREA if scale < 1 else cv2.INTER_CUBIC)
    color_HWC = np.repeat(image[:, :, None], 3, axis=2) if image.ndim == 2 else image
    return np.ascontiguousarray(color_HWC).astype(np.uint8)
