"""Segmentation: does what a model marks cover the masks of the data set, on all images?

Protocol "segmentation", version 1:

* Every image in which somebody looked for masks is judged. What an empty mask counts is a named rule
  (`mask_metrics`); "dice_masked" beside is the Dice of images with a mask alone, and "left_empty" the share of images
  without one in which nothing is marked.
* Masks are judged in pixels of the published image; where `side` is set, of that image made smaller.
* The threshold of probabilities, and the share of an image below which a mask counts as empty, are chosen on validation
  images of other patients and nowhere else. Without such images they are 0.5 and nothing.
* What the model's crop cut off is not marked.
* Where a corpus has boxes and no masks (RSNA), the union of the boxes is the mask.
* Intervals: patients are drawn, with all their images. All rows share the draws.

Shape letters: N images, L labels, T thresholds; H, W pixels of an image.
"""

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from medvl.data.annotations.phrases import published_size
from medvl.data.loading.dense_targets import is_marked, mark_labels, mask_at
from medvl.eval.core.full_pass import check_disjoint_patients, input_hashes, samples_by_key
from medvl.eval.core.interfaces import Loader
from medvl.eval.core.metric_rows import MetricGroup, mean_metrics, measure
from medvl.eval.core.results import Results
from medvl.eval.dense.annotated_images import Dense, MarkedImage, headline_target, judge_images, with_macro
from medvl.eval.dense.mask_metrics import (
    THRESHOLDS,
    Areas,
    EmptyRule,
    MaskThreshold,
    areas_of,
    choose_cut,
    dice,
    left_empty,
    overlap,
    stack,
)

PROTOCOL, PROTOCOL_VERSION = "segmentation", 1
_FIXED = MaskThreshold(threshold=0.5, least_share=0.0)
_SHOWN_SIDE = 384
_TRAINING_SIDE = 256


class Segments(Dense, Protocol):
    """A segmenter, as `medvl.models.Segmenter` is one."""

    def maps(self, image_BCHW: Tensor, sizes: Sequence[tuple[int, int]]) -> list[Tensor]:
        """One (L, H, W) an image: probabilities, NaN where the model was not shown the image."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SegmentedImage(MarkedImage):
    """An image with the areas of its masks."""

    areas: tuple[Areas, ...]
    """Of each label, at every threshold."""
    map_LHW: NDArray[np.float32] | None
    """Every so many pixels of its maps, where it is to be shown."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SegmentationResult:
    """The results, and the images behind them."""

    results: Results
    labels: tuple[str, ...]
    images: tuple[SegmentedImage, ...]
    cuts: Mapping[str, MaskThreshold]
    dice_NL: NDArray[np.float64]
    """Under the rule; NaN where it leaves an image out."""

    def predictions(self) -> Iterator[dict[str, Any]]:
        """One mapping an image: its Dice, and the shares of its pixels that are marked and that are in the mask."""
        for image, dice_L in zip(self.images, self.dice_NL.tolist(), strict=True):
            cut = {label: _at(areas, self.cuts[label]) for label, areas in zip(self.labels, image.areas, strict=True)}
            yield {
                "key": image.sample.key,
                "patient": image.sample.patient,
                "dice": dict(zip(self.labels, dice_L, strict=True)),
                "marked": {label: areas.marked_NT.item() / areas.pixels_N.item() for label, areas in cut.items()},
                "true": {label: areas.true_N.item() / areas.pixels_N.item() for label, areas in cut.items()},
            }


def mask_segmentation(
    model: Segments,
    loader: Loader,
    *,
    valid_loader: Loader | None = None,
    empty: EmptyRule = "one_if_both_empty",
    side: int | None = None,
    resamples: int = 1000,
    seed: int = 0,
    keep_maps: int = 0,
    checkpoint: str | Path | None = None,
) -> SegmentationResult:
    """Judge a segmenter; the protocol is at the top of this module.

    Args:
        model: its labels are judged.
        loader: over samples with masks or boxes, or with empty lists of them.
        valid_loader: over images of other patients, on which thresholds are chosen.
        empty: what an image without a mask counts.
        side: longer side of the images in which masks are judged, where theirs is longer; None is theirs.
        resamples, seed: of the bootstrap.
        keep_maps: as many images with a mask and without one, drawn by the seed, keep their map for the page.
        checkpoint: whose hash goes into the results.

    Raises:
        EvaluationError: there is no image to judge, or the loader or the maps are not whole.
        SplitError: test and validation images share patients.
    """
    inputs, labels = input_hashes(checkpoint, manifest=loader, validation_manifest=valid_loader), model.config.labels
    images, account = segment_images(model, loader, side, _drawn(loader, keep_maps, seed))
    cuts = dict.fromkeys(labels, _FIXED)
    if valid_loader is not None:
        valid, _ = segment_images(model, valid_loader, side)
        check_disjoint_patients((image.sample.patient for image in valid), (image.sample.patient for image in images))
        cuts = _chosen_cuts(_by_label(valid, labels), empty)
    areas_by_label = {label: _at(areas, cuts[label]) for label, areas in _by_label(images, labels).items()}
    blocks, patients = overlap_blocks(areas_by_label, empty), [image.sample.patient for image in images]
    results = Results(
        protocol=PROTOCOL,
        protocol_version=PROTOCOL_VERSION,
        rows=measure(blocks, len(images), resamples=resamples, seed=seed, groups=patients),
        config={
            "labels": list(labels),
            "empty": empty,
            "side": side,
            "cut": "fixed" if valid_loader is None else "chosen on validation images",
            "bootstrap_unit": "patient",
            "resamples": resamples,
            "seed": seed,
        },
        inputs=inputs,
        details=account | _described(images, areas_by_label, cuts, empty),
    )
    return SegmentationResult(
        results=results,
        labels=labels,
        images=tuple(images),
        cuts=cuts,
        dice_NL=np.concatenate([dice(areas, empty) for areas in areas_by_label.values()], axis=1),
    )


def segment_images(
    model: Segments, loader: Loader, side: int | None = None, shown: Collection[str] = ()
) -> tuple[list[SegmentedImage], dict[str, Any]]:
    """Every image of a loader with the areas of its masks at all thresholds; those with a key in `shown`, with maps.

    Raises `EvaluationError`.
    """
    labels = model.config.labels

    def judge(image_BCHW: Tensor, images: Sequence[MarkedImage]) -> Iterator[SegmentedImage]:
        sizes = [_shrunk(published_size(image.sample), side) for image in images]
        for image, tensor, size in zip(images, model.maps(image_BCHW, sizes), sizes, strict=True):
            map_LHW, every = tensor.cpu().numpy(), -(-max(size) // _SHOWN_SIDE)
            areas = [
                areas_of(map_HW, mask_at(image.sample, label, size), THRESHOLDS)
                for label, map_HW in zip(labels, map_LHW, strict=True)
            ]
            yield SegmentedImage(
                position=image.position,
                sample=image.sample,
                areas=tuple(areas),
                map_LHW=map_LHW[:, ::every, ::every].copy() if image.sample.key in shown else None,
            )

    return judge_images(model, loader, "masks", judge)


def overlap_blocks(areas: Mapping[str, Areas], empty: EmptyRule) -> list[MetricGroup]:
    """Dice and overlap under the rule, Dice where there is a mask, and how often normal images are left alone."""
    columns = {
        "dice": [dice(cut, empty) for cut in areas.values()],
        "iou": [overlap(cut, empty) for cut in areas.values()],
        "dice_masked": [dice(cut, "skip_empty") for cut in areas.values()],
        "left_empty": [left_empty(cut) for cut in areas.values()],
    }
    return [
        with_macro(mean_metrics(metric, np.concatenate(values, axis=1), list(areas)))
        for metric, values in columns.items()
    ]


def _chosen_cuts(areas: Mapping[str, Areas], empty: EmptyRule) -> dict[str, MaskThreshold]:
    """The best cut of each label; the fixed one of a label for which the rule leaves no image."""
    cuts = {label: choose_cut(found, THRESHOLDS, empty) for label, found in areas.items()}
    return {label: _FIXED if np.isnan(cut.threshold) else cut for label, cut in cuts.items()}


def _described(
    images: Sequence[SegmentedImage], areas: Mapping[str, Areas], cuts: Mapping[str, MaskThreshold], empty: EmptyRule
) -> dict[str, Any]:
    return {
        "patients": len({image.sample.patient for image in images}),
        "images_with_mask": {label: int((found.true_N > 0).sum()) for label, found in areas.items()},
        "dice_of_nothing": {label: _of_nothing(found, empty) for label, found in areas.items()},
        "masks_are_boxes": all("masks" not in image.sample.extra for image in images),
        "cuts": {label: dataclasses.asdict(cut) for label, cut in cuts.items()},
    }


def _of_nothing(areas: Areas, empty: EmptyRule) -> float:
    """The mean Dice of marking nothing anywhere: much under the challenge's rule where most images are normal."""
    return float((areas.true_N == 0).mean()) if empty == "one_if_both_empty" else 0.0


def _by_label(images: Sequence[SegmentedImage], labels: Sequence[str]) -> dict[str, Areas]:
    return {label: stack([image.areas[number] for image in images]) for number, label in enumerate(labels)}


def _at(areas: Areas, cut: MaskThreshold) -> Areas:
    return areas.cut(cut.least_share).at(THRESHOLDS.index(cut.threshold))


def _shrunk(size: tuple[int, int], side: int | None) -> tuple[int, int]:
    scale = 1.0 if side is None else min(1.0, side / max(size))
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def _drawn(loader: Loader, each: int, seed: int) -> set[str]:
    """Keys of as many images with a mask and without one."""
    samples = [sample for _, sample in samples_by_key(loader.source).values() if is_marked(sample, "masks")]
    with_mask = np.array([bool(mark_labels([sample], "masks")) for sample in samples], np.bool_)
    rng = np.random.default_rng(seed)
    drawn = [rng.permutation(np.flatnonzero(with_mask == side))[:each].tolist() for side in (True, False)]
    return {samples[row].key for rows in drawn for row in rows}


class SegmentationEval:
    """Dice of a segmenter while it is being trained: "segmentation/dice" under the rule, "segmentation/dice_masked".

    They are those of the best cut of these same validation images, which are judged with a longer side of 256 pixels.
    """

    def __init__(self, loader: Loader, *, empty: EmptyRule = "one_if_both_empty") -> None:
        self.loader, self.empty = loader, empty

    def __call__(self, model: Segments) -> dict[str, float]:
        """The numbers for the model as it is now, means over labels. Raises `EvaluationError`."""
        images, _ = segment_images(model, self.loader, _TRAINING_SIDE)
        areas = _by_label(images, model.config.labels)
        cuts = _chosen_cuts(areas, self.empty)
        cut = {label: _at(found, cuts[label]) for label, found in areas.items()}
        rows = measure(overlap_blocks(cut, self.empty), len(images), resamples=0)
        told = headline_target(model.config.labels)
        return {f"segmentation/{row.metric}": row.value for row in rows if row.target == told}
