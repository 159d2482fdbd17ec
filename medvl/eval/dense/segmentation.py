"""Segmentation: predicted masks against annotated masks, on all images.

Protocol "segmentation", version 2:

* Every image annotated with masks is evaluated. A named rule (`mask_metrics`) gives the value of
  empty masks; "dice_masked" is the Dice of images with a mask alone, and "left_empty" the share of
  images without one whose prediction is empty.
* Masks are compared in pixels of the published image; if `side` is set, of that image downsampled.
* The probability threshold, and the minimum share of the image below which a mask counts as empty,
  are chosen only on validation images of other patients. Without them they are 0.5 and 0.
* Pixels outside of the model's crop are not in a predicted mask.
* "pixel_auroc" is the AUROC of the pixels of an image with a mask, without a threshold.
* "dice_pooled" and "iou_pooled" count the pixels of all images together.
* For a model that reads text, the Dice without the texts, or with those of other images, is a
  subgroup, and "dice_gain" how much higher Dice is with the images' own texts; thresholds stay
  those chosen with the own texts.
* For a corpus with boxes and no masks (RSNA), the mask is the union of the boxes.
* Intervals: the bootstrap resamples patients, with all their images. All rows share the resamples.

Shape letters: N images, L labels, T thresholds; H, W pixels of an image.
"""

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from medvl.data.annotations import published_size
from medvl.data.loading.dense_targets import annotated_labels, is_annotated, mask_at
from medvl.eval.core.full_pass import Loader, check_disjoint_patients, input_hashes, samples_by_key
from medvl.eval.core.metric_rows import MetricGroup, mean_metrics, measure, subgroups_of
from medvl.eval.core.results import LineFields, Lines, Results, number_table
from medvl.eval.dense import metrics
from medvl.eval.dense.annotated_images import (
    AnnotatedImage,
    DenseModel,
    evaluate_images,
    headline_target,
    with_macro,
)
from medvl.eval.dense.metrics import THRESHOLDS, EmptyRule, MaskAreas, MaskThreshold, dice
from medvl.schema import Batch

PROTOCOL = "segmentation"
PROTOCOL_VERSION = 2
_DEFAULT_THRESHOLD = MaskThreshold(threshold=0.5, min_share=0.0)
_STORED_SIDE = 384
_TRAINING_SIDE = 256


class SegmenterModel(DenseModel, Protocol):
    """A segmenter: a `medvl.models.MaskModel`, such as `Segmenter` or `LViT`."""

    def maps(self, batch: Batch, sizes: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Return probabilities (L, H, W) per image, NaN outside of the model's crop."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SegmentedImage(AnnotatedImage):
    """An image with the areas of its masks."""

    areas: tuple[MaskAreas, ...]
    """By label, at every threshold."""
    pixel_auroc_L: NDArray[np.float64]
    """By label; NaN for an image without its mask."""
    map_LHW: NDArray[np.float32] | None
    """Subsampled maps for the page; None for images that are not shown."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SegmentationResult:
    """Results of a segmenter, with the evaluated images."""

    results: Results
    labels: tuple[str, ...]
    images: tuple[SegmentedImage, ...]
    thresholds: Mapping[str, MaskThreshold]
    """By label."""
    dice_NL: NDArray[np.float64]
    """Under the rule for empty masks; NaN for images that it skips."""

    def predictions(self) -> Iterator[dict[str, Any]]:
        """Yield per image its Dice, and the shares of its pixels in the predicted mask, the
        annotated one, and both.

        `read_areas` reads the areas of the masks from these lines.
        """
        for image, dice_L in zip(self.images, self.dice_NL.tolist(), strict=True):
            areas = {
                label: _at(areas, self.thresholds[label])
                for label, areas in zip(self.labels, image.areas, strict=True)
            }
            yield {
                "key": image.sample.key,
                "patient": image.sample.patient,
                "subgroups": subgroups_of(image.sample),
                "pixels": int(image.areas[0].pixels_N.item()),
                "dice": dict(zip(self.labels, dice_L, strict=True)),
                "pixel_auroc": dict(zip(self.labels, image.pixel_auroc_L.tolist(), strict=True)),
                "marked": {
                    label: one.predicted_NT.item() / one.pixels_N.item()
                    for label, one in areas.items()
                },
                "true": {
                    label: one.truth_N.item() / one.pixels_N.item() for label, one in areas.items()
                },
                "both": {
                    label: one.intersection_NT.item() / one.pixels_N.item()
                    for label, one in areas.items()
                },
            }


def mask_segmentation(
    model: SegmenterModel,
    loader: Loader,
    *,
    valid_loader: Loader | None = None,
    other_texts: Mapping[str, Loader] | None = None,
    empty: EmptyRule = "one_if_both_empty",
    side: int | None = None,
    resamples: int = 1000,
    seed: int = 0,
    keep_maps: int = 0,
    checkpoint: str | Path | None = None,
) -> SegmentationResult:
    """Evaluate a segmenter; the module docstring describes the protocol.

    Args:
        model: its labels are evaluated.
        loader: over samples with masks or boxes, or with empty lists of them.
        valid_loader: over images of other patients, for choosing thresholds.
        other_texts: name -> loader over the same images with other texts, for models that read
            text.
        empty: the rule for images without a mask.
        side: maximum of the longer side of the images on which masks are compared; None: the
            published size.
        resamples, seed: number and seed of the bootstrap resamples.
        keep_maps: number of images with a mask, and of images without, whose maps are kept for the
            page (random).
        checkpoint: its hash goes into the results.

    Raises:
        EvaluationError: no image is annotated, the loader is incomplete, or the maps are not
            finite.
        SplitError: test and validation images share patients.
    """
    inputs = input_hashes(checkpoint, manifest=loader, validation_manifest=valid_loader)
    labels = model.config.labels
    images, counts = segment_images(model, loader, side, _sample_keys(loader, keep_maps, seed))
    thresholds = dict.fromkeys(labels, _DEFAULT_THRESHOLD)
    if valid_loader is not None:
        valid, _ = segment_images(model, valid_loader, side)
        check_disjoint_patients(
            (image.sample.patient for image in valid), (image.sample.patient for image in images)
        )
        thresholds = _choose_thresholds(_by_label(valid, labels), empty)
    areas = _at_thresholds(images, thresholds)
    patients = [image.sample.patient for image in images]
    source = "fixed" if valid_loader is None else "chosen on validation images"
    config = {
        "empty": empty,
        "side": side,
        "threshold_source": source,
        "resamples": resamples,
        "seed": seed,
    }
    groups = segmentation_groups(areas, np.stack([image.pixel_auroc_L for image in images]), empty)
    for name, other in (other_texts or {}).items():
        groups += _text_groups(
            name, areas, _at_thresholds(segment_images(model, other, side)[0], thresholds), empty
        )
    results = Results(
        protocol=PROTOCOL,
        protocol_version=PROTOCOL_VERSION,
        rows=measure(groups, len(images), resamples=resamples, seed=seed, groups=patients),
        config=config | {"labels": list(labels), "bootstrap_unit": "patient"},
        inputs=inputs,
        details=counts | _details(images, areas, thresholds, empty),
    )
    return SegmentationResult(
        results=results,
        labels=labels,
        images=tuple(images),
        thresholds=thresholds,
        dice_NL=np.concatenate([dice(one, empty) for one in areas.values()], axis=1),
    )


def segment_images(
    model: SegmenterModel, loader: Loader, side: int | None = None, shown: Collection[str] = ()
) -> tuple[list[SegmentedImage], dict[str, Any]]:
    """Return every annotated image of a loader with its areas at all thresholds, and counts; maps
    for keys in `shown`.

    Raises `EvaluationError`.
    """
    labels = model.config.labels

    def evaluate(batch: Batch, images: Sequence[AnnotatedImage]) -> Iterator[SegmentedImage]:
        sizes = [_limit_side(published_size(image.sample), side) for image in images]
        for image, tensor, size in zip(images, model.maps(batch, sizes), sizes, strict=True):
            map_LHW = tensor.cpu().numpy()
            stride = -(-max(size) // _STORED_SIDE)
            pairs = [
                (map_HW, mask_at(image.sample, label, size))
                for label, map_HW in zip(labels, map_LHW, strict=True)
            ]
            yield SegmentedImage(
                position=image.position,
                sample=image.sample,
                areas=tuple(metrics.mask_areas(*pair, THRESHOLDS) for pair in pairs),
                pixel_auroc_L=np.array([metrics.pixel_auroc(*pair) for pair in pairs]),
                map_LHW=map_LHW[:, ::stride, ::stride].copy()
                if image.sample.key in shown
                else None,
            )

    return evaluate_images(model, loader, "masks", evaluate)


def mask_groups(areas: Mapping[str, MaskAreas], empty: EmptyRule) -> list[MetricGroup]:
    """Return "dice", "iou", "dice_masked", "left_empty", "dice_pooled" and "iou_pooled" of every
    label, each with its mean over labels.
    """
    columns = {
        "dice": [dice(one, empty) for one in areas.values()],
        "iou": [metrics.iou(one, empty) for one in areas.values()],
        "dice_masked": [dice(one, "skip_empty") for one in areas.values()],
        "left_empty": [metrics.left_empty(one) for one in areas.values()],
    }
    means = [
        mean_metrics(metric, np.concatenate(values, axis=1), list(areas))
        for metric, values in columns.items()
    ]
    images = len(next(iter(areas.values())).pixels_N)
    return [with_macro(group, images) for group in [*means, *metrics.pooled_metrics(areas)]]


def segmentation_groups(
    areas: Mapping[str, MaskAreas], pixel_auroc_NL: NDArray[np.float64], empty: EmptyRule
) -> list[MetricGroup]:
    """Return `mask_groups` and "pixel_auroc"."""
    pixel_auroc = mean_metrics("pixel_auroc", pixel_auroc_NL, list(areas))
    return [*mask_groups(areas, empty), with_macro(pixel_auroc, len(pixel_auroc_NL))]


def read_areas(lines: Sequence[Mapping[str, Any]], labels: Sequence[str]) -> dict[str, MaskAreas]:
    """Return label -> areas of the masks of all lines of `SegmentationResult.predictions`."""
    pixels_N = np.array([float(line["pixels"]) for line in lines])

    def areas_N(field: str, label: str) -> NDArray[np.float64]:
        return np.round(np.array([float(line[field][label]) for line in lines]) * pixels_N)

    return {
        label: MaskAreas(
            areas_N("both", label)[:, None],
            areas_N("marked", label)[:, None],
            areas_N("true", label),
            pixels_N,
        )
        for label in labels
    }


def _text_groups(
    name: str, areas: Mapping[str, MaskAreas], others: Mapping[str, MaskAreas], empty: EmptyRule
) -> list[MetricGroup]:
    """Return Dice with other texts, and how much higher it is with the images' own, as subgroup
    `name`.
    """
    own_NL, other_NL = (
        np.concatenate([dice(one, empty) for one in each.values()], axis=1)
        for each in (areas, others)
    )
    columns = {"dice": other_NL, "dice_gain": own_NL - other_NL}
    return [
        with_macro(mean_metrics(metric, values_NL, list(areas), subgroup=name), len(values_NL))
        for metric, values_NL in columns.items()
    ]


def _choose_thresholds(
    areas: Mapping[str, MaskAreas], empty: EmptyRule
) -> dict[str, MaskThreshold]:
    """Return the best threshold of each label; the default one if the rule leaves no image of a
    label.
    """
    choices = {
        label: metrics.choose_mask_threshold(one, THRESHOLDS, empty) for label, one in areas.items()
    }
    return {
        label: _DEFAULT_THRESHOLD if np.isnan(one.threshold) else one
        for label, one in choices.items()
    }


def _details(
    images: Sequence[SegmentedImage],
    areas: Mapping[str, MaskAreas],
    thresholds: Mapping[str, MaskThreshold],
    empty: EmptyRule,
) -> dict[str, Any]:
    return {
        "patients": len({image.sample.patient for image in images}),
        "images_with_mask": {label: int((one.truth_N > 0).sum()) for label, one in areas.items()},
        "empty_prediction_dice": {
            label: _empty_prediction_dice(one, empty) for label, one in areas.items()
        },
        "masks_are_boxes": all("masks" not in image.sample.extra for image in images),
        "mask_thresholds": {label: dataclasses.asdict(one) for label, one in thresholds.items()},
    }


def _empty_prediction_dice(areas: MaskAreas, empty: EmptyRule) -> float:
    """Return the mean Dice of predicting nothing: high if most images are normal, unless these
    are skipped.
    """
    return 0.0 if empty == "skip_empty" else float((areas.truth_N == 0).mean())


def _by_label(images: Sequence[SegmentedImage], labels: Sequence[str]) -> dict[str, MaskAreas]:
    return {
        label: metrics.stack([image.areas[index] for image in images])
        for index, label in enumerate(labels)
    }


def _at_thresholds(
    images: Sequence[SegmentedImage], thresholds: Mapping[str, MaskThreshold]
) -> dict[str, MaskAreas]:
    """Return label -> areas of all images at the label's threshold."""
    return {
        label: _at(one, thresholds[label])
        for label, one in _by_label(images, list(thresholds)).items()
    }


def _at(areas: MaskAreas, threshold: MaskThreshold) -> MaskAreas:
    return areas.drop_small(threshold.min_share).at(THRESHOLDS.index(threshold.threshold))


def _limit_side(size: tuple[int, int], side: int | None) -> tuple[int, int]:
    scale = 1.0 if side is None else min(1.0, side / max(size))
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def _sample_keys(loader: Loader, count: int, seed: int) -> set[str]:
    """Return the keys of `count` random images with a mask and of `count` without."""
    samples = [
        sample
        for _, sample in samples_by_key(loader.source).values()
        if is_annotated(sample, "masks")
    ]
    with_mask = np.array(
        [bool(annotated_labels([sample], "masks")) for sample in samples], np.bool_
    )
    rng = np.random.default_rng(seed)
    groups = [
        rng.permutation(np.flatnonzero(with_mask == value))[:count].tolist()
        for value in (True, False)
    ]
    return {samples[row].key for rows in groups for row in rows}


class SegmentationEval:
    """Dice of a segmenter during training: "segmentation/dice" under the rule,
    "segmentation/dice_masked", ...

    Thresholds are the best ones on these same validation images, whose longer side is limited to
    256 pixels.
    """

    def __init__(self, loader: Loader, *, empty: EmptyRule = "one_if_both_empty") -> None:
        self.loader = loader
        self.empty = empty

    def __call__(self, model: SegmenterModel) -> dict[str, float]:
        """Return the metrics, means over labels, without intervals. Raises `EvaluationError`."""
        images, _ = segment_images(model, self.loader, _TRAINING_SIDE)
        all_areas = _by_label(images, model.config.labels)
        thresholds = _choose_thresholds(all_areas, self.empty)
        areas = _at_thresholds(images, thresholds)
        rows = measure(mask_groups(areas, self.empty), len(images), resamples=0)
        target = headline_target(model.config.labels)
        return {f"segmentation/{row.metric}": row.value for row in rows if row.target == target}


MASK_LINES = LineFields(needs=("pixels",))
"""Fields of the predictions of masks."""


def groups_of_lines(lines: Lines, results: Results) -> list[MetricGroup]:
    """Return the metrics of masks from lines of predictions."""
    labels = results.config["labels"]
    auroc_NL = number_table(lines, "pixel_auroc", labels)
    return segmentation_groups(read_areas(lines, labels), auroc_NL, results.config["empty"])
