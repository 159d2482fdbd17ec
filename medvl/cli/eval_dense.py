"""`medvl eval detection` and `medvl eval segmentation`: dense prediction of findings."""

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from medvl.cli.eval_common import SmallBatchOptions, print_results

if TYPE_CHECKING:
    from medvl.data.loading.loader import Loader
    from medvl.data.shards.source import ShardSource
    from medvl.models.base import System


def detection(shared: SmallBatchOptions, *, valid: Path | None = None, examples: int = 6) -> None:
    """Evaluate detection of findings: average precision over all images, those without boxes included.

    The checkpoint is a detector (recipes/dense_transfer.py); the shards have boxes (rsna, nih-cxr14).

    Args:
        valid: folder of shards of other patients, on which the score threshold is chosen; without it, no challenge
            score.
        examples: images with boxes on the page, and as many without.
    """
    from medvl.eval.core.open import load_model
    from medvl.eval.core.publish import default_folder, publish
    from medvl.eval.core.results import format_table
    from medvl.eval.dense.detection import box_detection
    from medvl.eval.dense.detection_page import write_detection_page
    from medvl.models import Detector

    model = load_model(shared.checkpoint, shared.device)
    if not isinstance(model, Detector):
        raise _other_model(shared.checkpoint, model, "detection", "detector")
    source, loader, valid_loader = _open(model, shared, valid)
    result = box_detection(
        model, loader, valid_loader=valid_loader, resamples=shared.resamples, checkpoint=shared.checkpoint
    )
    paths = publish(
        result.results,
        shared.out or default_folder(shared.checkpoint, "detection"),
        predictions=result.predictions(),
        write_page=functools.partial(write_detection_page, result, pixels=source.pixels, examples=examples),
        model=f"{model.name} ({shared.checkpoint})",
        manifest=source.manifest,
    )
    print_results(format_table(result.results.rows), paths)


def segmentation(
    shared: SmallBatchOptions,
    *,
    valid: Path | None = None,
    empty: Literal["one_if_both_empty", "skip_empty"] = "one_if_both_empty",
    side: int | None = None,
    examples: int = 6,
) -> None:
    """Evaluate segmentation of findings: Dice over all images, with a named rule for empty masks.

    The checkpoint is a segmenter (recipes/dense_transfer.py); the shards have masks (siim) or boxes (rsna).

    Args:
        valid: folder of shards of other patients, on which thresholds are chosen; without it they are fixed.
        empty: score of an image without a mask: 1 if the prediction is empty too, else 0; or leave such images out.
        side: longer side of the images in which masks are compared; default that of the published images.
        examples: images with a mask on the page, and as many without.
    """
    from medvl.eval.core.open import load_model
    from medvl.eval.core.publish import default_folder, publish
    from medvl.eval.core.results import format_table
    from medvl.eval.dense.segmentation import mask_segmentation
    from medvl.eval.dense.segmentation_page import write_segmentation_page
    from medvl.models import Segmenter

    model = load_model(shared.checkpoint, shared.device)
    if not isinstance(model, Segmenter):
        raise _other_model(shared.checkpoint, model, "segmentation", "segmenter")
    source, loader, valid_loader = _open(model, shared, valid)
    result = mask_segmentation(
        model,
        loader,
        valid_loader=valid_loader,
        empty=empty,
        side=side,
        resamples=shared.resamples,
        keep_maps=examples,
        checkpoint=shared.checkpoint,
    )
    paths = publish(
        result.results,
        shared.out or default_folder(shared.checkpoint, "segmentation"),
        predictions=result.predictions(),
        write_page=functools.partial(write_segmentation_page, result, pixels=source.pixels),
        model=f"{model.name} ({shared.checkpoint})",
        manifest=source.manifest,
    )
    print_results(format_table(result.results.rows), paths)


def _other_model(checkpoint: Path, model: "System", task: str, wanted: str) -> Exception:
    from medvl.eval.core.open import unsupported_model

    recipe = f"recipes/dense_transfer.py --init-from {checkpoint} --task {task}"
    return unsupported_model(checkpoint, model, f"train a {wanted} on its image encoder with {recipe}")


def _open(
    model: "System", shared: SmallBatchOptions, valid: Path | None
) -> "tuple[ShardSource, Loader, Loader | None]":
    from medvl.data.shards.source import ShardSource
    from medvl.eval.core.open import open_for_evaluation, open_source

    read = functools.partial(open_for_evaluation, transform=model.transform, batch=shared.batch, workers=shared.workers)
    source = open_source(shared.data, [shared.checkpoint])
    return source, read(source), None if valid is None else read(ShardSource(valid))
