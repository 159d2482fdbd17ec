"""HTML page of a segmentation evaluation: metrics of every label, and masks drawn on images."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from medvl.data.loading.dense_targets import mask_at
from medvl.eval.core.publish import PageHeader
from medvl.eval.dense.annotated_images import headline_target
from medvl.eval.dense.page import PREDICTION_COLOR, SIDE, TRUTH_COLOR, dense_facts, resize_to_picture, write_dense_page
from medvl.eval.dense.segmentation import SegmentationResult, SegmentedImage
from medvl.eval.html.page import Picture, Pictures, Pixels, Strip, thumbnail_uri
from medvl.eval.html.tables import Cell, Table, metric_cell

_NAMES = {
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
    result: SegmentationResult, path: str | Path, header: PageHeader, *, pixels: Pixels | None = None
) -> Path:
    """Write the page as one HTML file and return its path; arguments as in `write_zero_shot_page`.

    `result` is from `mask_segmentation`; images with kept maps are shown.
    """
    details, config = result.results.details, result.results.config
    thresholds = [
        f"{label}: probability {one.threshold:g}, empty below {one.min_share:.2%} of the image"
        for label, one in result.thresholds.items()
    ]
    facts = [
        ("Empty masks", _EMPTY[config["empty"]]),
        ("Empty predictions", ", ".join(f"Dice {value:.3f}" for value in details["empty_prediction_dice"].values())),
        ("Thresholds", f"{', '.join(thresholds)}; {config['threshold_source']}"),
        ("Masks", "the union of boxes" if details["masks_are_boxes"] else "those of the data set"),
    ]
    return write_dense_page(
        result.results,
        result.labels,
        path,
        title=f"Segmentation: {header.model}",
        subtitle=f"{header.data}: {sum(details['images_with_mask'].values()):,} masks in {details['images']:,} images",
        names=_NAMES,
        headlines=("dice", "dice_masked", "left_empty"),
        facts=dense_facts(result.results, header, facts),
        caption="With 95% intervals. Dice and IoU are over all images that the rule for empty masks includes; also "
        "shown are the Dice of images with a mask alone, the share of the other images whose prediction is empty, and "
        "both metrics over the pixels of all images together.",
        tables=_texts(result),
        pictures=None if pixels is None else _pictures(result, pixels),
    )


def _texts(result: SegmentationResult) -> list[Table]:
    """Return the table of Dice with other texts, for a model that reads text."""
    rows = {(row.metric, row.subgroup, row.target): row for row in result.results.rows}
    names = dict.fromkeys(subgroup for _, subgroup, _ in rows if subgroup)
    target = headline_target(result.labels)
    lines: list[Sequence[Cell | str]] = [
        [name, *(metric_cell(rows[metric, name, target]) for metric in ("dice", "dice_gain"))] for name in names
    ]
    if not lines:
        return []
    own: list[Cell | str] = ["the image's own text", metric_cell(rows["dice", "", target]), ""]
    return [
        Table(
            title="With other texts",
            columns=["", "Dice", "The image's own text is better by"],
            rows=[own, *lines],
            caption="The same images and thresholds. The difference is taken image by image. A text that names the "
            "place of a finding contains a part of the answer.",
        )
    ]


def _pictures(result: SegmentationResult, pixels: Pixels) -> Pictures:
    strips = []
    shown = [(row, image) for row, image in enumerate(result.images) if image.map_LHW is not None]
    for index, label in enumerate(result.labels):
        for title, value in (("with a mask", True), ("without a mask", False)):
            chosen = [(row, image) for row, image in shown if bool(image.areas[index].truth_N.any()) == value]
            pictures = [_picture(result, row, image, index, pixels(image.position)) for row, image in chosen]
            if pictures:
                strips.append(Strip(title=f"{label}, {title}", note="random", pictures=pictures))
    return Pictures(
        title="Predicted masks",
        strips=strips,
        caption="Orange: the predicted mask at the threshold. Blue: the outline of the data set's mask.",
    )


def _picture(
    result: SegmentationResult, row: int, image: SegmentedImage, index: int, pixels: NDArray[np.uint8]
) -> Picture:
    assert image.map_LHW is not None
    label, dice = result.labels[index], result.dice_NL[row, index]
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
    """Return the image (H, W, 3) at the size of a picture, with the predicted mask and the annotated mask's outline.

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
    return np.asarray(cv2.drawContours(np.ascontiguousarray(drawn_HWC), outlines, -1, TRUTH_COLOR, 2, cv2.LINE_AA))
