"""Zero-shot segmentation: the maps of a dual-encoder for a statement of each finding, against
annotated masks.

Protocol "zero_shot_masks", version 1:

* The map of a finding is that of its phrase, by default `medvl.data.statement` ("There is
  pneumothorax."), as in the evaluation of grounding. It is scaled to 0..1 within its image ("unit";
  a constant map to 0), or its sigmoid is taken ("sigmoid", for maps of log-odds, such as
  RadZero's), or it is kept ("none", for maps that are within 0..1 already).
* Everything else is the protocol "segmentation": a threshold and a minimum share of the image of
  each finding are chosen on validation images of other patients, never on the test images.
  RadZero's published Dice has thresholds of the test images, and counts images with a mask alone:
  compare it with "dice_masked".
* "pixel_auroc" needs no threshold: the AUROC of the pixels of an image with a mask, mean over such
  images.

Shape letters: B images, L labels; H, W pixels.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from medvl.common.config_io import check_choice
from medvl.common.label_names import match_labels
from medvl.data.loading.dense_targets import annotated_labels
from medvl.data.reports.statements import statement
from medvl.data.shards.source import ShardSource
from medvl.errors import EvaluationError
from medvl.eval.core.full_pass import Loader
from medvl.eval.core.open import Setup, SmallBatchOptions
from medvl.eval.core.results import WritePage
from medvl.eval.dense.evaluation import write_segmentation_page
from medvl.eval.dense.metrics import EmptyRule
from medvl.eval.dense.segmentation import (
    MASK_LINES,
    SegmentationResult,
    groups_of_lines,
    mask_segmentation,
)
from medvl.eval.evaluation import ModelEvaluation
from medvl.eval.grounding.heatmaps import Maps, choose_maps, is_constant, phrase_maps
from medvl.eval.registry import register_evaluation
from medvl.models.dual_encoders.bases.base import DualEncoder
from medvl.schema import Batch

PROTOCOL = "zero_shot_masks"
PROTOCOL_VERSION = 1
Scale = Literal["unit", "sigmoid", "none"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MaskLabels:
    """Labels of the masks, in place of a segmenter's configuration."""

    labels: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PhraseSegmenter:
    """A dual-encoder as a segmenter, whose masks are maps of phrases."""

    model: DualEncoder
    config: MaskLabels
    phrases: tuple[str, ...]
    """Phrase of each label."""
    kind: Maps
    scale: Scale = "unit"
    smoothing: float = 0.0

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return self.model.device

    def modules(self) -> Iterator[nn.Module]:
        """Same as `torch.nn.Module.modules`."""
        return self.model.modules()

    @torch.no_grad()
    def maps(self, batch: Batch, sizes: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Return maps (L, H, W) per image, NaN outside of the model's crop."""
        by_label = [
            phrase_maps(
                self.model,
                batch.image_BCHW,
                [phrase] * len(sizes),
                sizes,
                maps=self.kind,
                smoothing=self.smoothing if self.kind == "similarity" else 0.0,
            )
            for phrase in self.phrases
        ]
        return [
            torch.stack([self._scaled(map_HW) for map_HW in of_image])
            for of_image in zip(*by_label, strict=True)
        ]

    def _scaled(self, map_HW: Tensor) -> Tensor:
        if self.scale != "unit":
            return map_HW if self.scale == "none" else map_HW.sigmoid()
        seen = map_HW[~map_HW.isnan()]
        if not seen.numel():
            return map_HW
        if is_constant(seen.cpu().numpy()):
            return torch.where(map_HW.isnan(), map_HW, 0.0)
        low, high = seen.aminmax()
        return (map_HW - low) / (high - low)


def _choose_labels(loader: Loader, labels: Sequence[str]) -> tuple[str, ...]:
    """Return the labels, by default all with a mask. Raises EvaluationError where no sample has
    a mask of one.
    """
    known = annotated_labels(
        [loader.source.sample(position) for position in range(len(loader.source))], "masks"
    )
    label_of = match_labels(labels, known) if labels else dict(zip(known, known, strict=True))
    matches = tuple(label_of.values())
    missing = [name for name in labels if name not in label_of]
    if missing or not matches:
        message = (
            f"no sample has a mask of {', '.join(missing) or 'any finding'}; there are "
            f"{', '.join(known) or 'none'}"
        )
        raise EvaluationError(message, "unknown_name" if known else "empty", field="labels")
    return matches


def evaluate_zero_shot_masks(
    model: DualEncoder,
    loader: Loader,
    *,
    valid_loader: Loader | None = None,
    labels: Sequence[str] = (),
    phrases: Mapping[str, str] | None = None,
    maps: Maps | None = None,
    scale: Scale = "unit",
    smoothing: float = 0.0,
    empty: EmptyRule = "one_if_both_empty",
    side: int | None = None,
    resamples: int = 1000,
    seed: int = 0,
    keep_maps: int = 0,
    checkpoint: str | Path | None = None,
) -> SegmentationResult:
    """Evaluate the maps of a dual-encoder as masks; the module docstring describes the protocol.

    Args:
        model: any dual-encoder whose image encoder has patches.
        loader: over samples with masks or boxes, or with empty lists of them.
        valid_loader: over images of other patients, for choosing thresholds; without it they are
            0.5.
        labels: labels to evaluate; default all that occur in the annotations of `loader`.
        phrases: label -> phrase; default `medvl.data.statement`.
        maps, smoothing: as in `phrase_grounding`.
        scale: see the protocol.
        empty, side, resamples, seed, keep_maps, checkpoint: as in `mask_segmentation`.

    Raises EvaluationError as `phrase_grounding` and `mask_segmentation` do, and SplitError as the
    latter.
    """
    check_choice(scale, get_args(Scale), "scale", error=EvaluationError)
    mask_labels = _choose_labels(loader, labels)
    statements = tuple((phrases or {}).get(name, statement(name)) for name in mask_labels)
    kind = choose_maps(model, maps)
    segmenter = PhraseSegmenter(
        model=model,
        config=MaskLabels(labels=mask_labels),
        phrases=statements,
        kind=kind,
        scale=scale,
        smoothing=smoothing,
    )
    result = mask_segmentation(
        segmenter,
        loader,
        valid_loader=valid_loader,
        empty=empty,
        side=side,
        resamples=resamples,
        seed=seed,
        keep_maps=keep_maps,
        checkpoint=checkpoint,
    )
    settings: dict[str, Any] = {
        "phrases": list(statements),
        "maps": kind,
        "scale": scale,
        "smoothing": smoothing,
    }
    results = dataclasses.replace(
        result.results,
        protocol=PROTOCOL,
        protocol_version=PROTOCOL_VERSION,
        config={**result.results.config, **settings},
    )
    return dataclasses.replace(result, results=results)


@register_evaluation("zero-shot-masks")
@dataclasses.dataclass(frozen=True, kw_only=True)
class ZeroShotMasks(ModelEvaluation):
    """Evaluate the maps of a dual-encoder as masks of findings: Dice, and AUROC of pixels, without
    any training.

    The checkpoint is a dual-encoder; the shards have masks (siim, qata, ...) or boxes (rsna).
    """

    protocols = (PROTOCOL,)
    lines = MASK_LINES
    fits = (DualEncoder,)
    advice = "give the checkpoint of a dual-encoder"
    shared = SmallBatchOptions
    metric_groups = staticmethod(groups_of_lines)

    valid: Path | None = None
    """folder of shards of other patients, on which thresholds are chosen; without it they are
    0.5
    """
    labels: tuple[str, ...] = ()
    """findings; default all that have masks. The text of each is "There is FINDING."
    """
    maps: Literal["attention", "similarity"] | None = None
    """attention of statements to regions, or similarity with patches; default: the model's own"""
    scale: Literal["unit", "sigmoid", "none"] = "unit"
    """scaling of each map: to 0..1 within its image; by the sigmoid, for log-odds such as
    RadZero's; or none, for maps that are within 0..1 already
    """
    smoothing: float = 0.0
    """Gaussian smoothing of similarity maps, in cells of the grid"""
    empty: EmptyRule = "one_if_both_empty"
    """score of an image without a mask, as in `medvl eval segmentation`"""
    side: int | None = None
    """longer side of the images in which masks are compared; default: the published size"""
    examples: int = 6
    """images with a mask on the page, and as many without"""

    @property
    def folder_name(self) -> str:
        """Name of the folder of the results."""
        return "zero-shot-masks"

    def evaluate(self, model: DualEncoder, source: ShardSource, setup: Setup) -> SegmentationResult:
        """Return the Dice of each finding."""
        return evaluate_zero_shot_masks(
            model,
            setup.loader(source, model),
            valid_loader=setup.valid_loader(self.valid, model, self.checkpoint),
            labels=self.labels,
            maps=self.maps,
            scale=self.scale,
            smoothing=self.smoothing,
            empty=self.empty,
            side=self.side,
            resamples=setup.resamples,
            keep_maps=self.examples,
            checkpoint=self.checkpoint,
        )

    def page(self, result: SegmentationResult, source: ShardSource) -> WritePage:
        return functools.partial(write_segmentation_page, result, pixels=source.pixels)
