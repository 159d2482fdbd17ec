"""`medvl eval zero-shot-masks`: segmentation by the maps of a dual-encoder."""

import functools
from pathlib import Path
from typing import Literal

from medvl.cli.eval.options import SmallBatchOptions, open_evaluation, publish_result


def zero_shot_masks(
    shared: SmallBatchOptions,
    *,
    valid: Path | None = None,
    labels: tuple[str, ...] = (),
    maps: Literal["attention", "similarity"] | None = None,
    scale: Literal["unit", "sigmoid", "none"] = "unit",
    smoothing: float = 0.0,
    empty: Literal["one_if_both_empty", "skip_empty", "lvit"] = "one_if_both_empty",
    side: int | None = None,
    examples: int = 6,
) -> None:
    """Evaluate the maps of a dual-encoder as masks of findings: Dice, and AUROC of pixels, without any training.

    The checkpoint is a dual-encoder; the shards have masks (siim, qata, ...) or boxes (rsna).

    Args:
        valid: folder of shards of other patients, on which thresholds are chosen; without it they are 0.5.
        labels: findings; default all that have masks. The text of each is "There is FINDING."
        maps: attention of statements to regions, or similarity with patches; default: the model's own.
        scale: scaling of each map: to 0..1 within its image; by the sigmoid, for log-odds such as RadZero's; or none,
            for maps that are within 0..1 already.
        smoothing: Gaussian smoothing of similarity maps, in cells of the grid.
        empty: score of an image without a mask, as in `medvl eval segmentation`.
        side: longer side of the images in which masks are compared; default: the published size.
        examples: images with a mask on the page, and as many without.
    """
    from medvl.eval.core.open import open_source
    from medvl.eval.dense.segmentation_page import write_segmentation_page
    from medvl.eval.zero_shot_masks import evaluate
    from medvl.models import DualEncoder

    checkpoint = shared.checkpoint
    output = shared.folder(checkpoint, "zero-shot-masks")
    model, source, read = open_evaluation(shared, DualEncoder, "give the checkpoint of a dual-encoder", text=True)
    folder = output.settle(manifest=source.fingerprint)
    result = evaluate.evaluate_zero_shot_masks(
        model,
        read(source),
        valid_loader=None if valid is None else read(open_source(valid, [checkpoint])),
        labels=labels,
        maps=maps,
        scale=scale,
        smoothing=smoothing,
        empty=empty,
        side=side,
        resamples=shared.resamples,
        keep_maps=examples,
        checkpoint=checkpoint,
    )
    page = functools.partial(write_segmentation_page, result, pixels=source.pixels)
    publish_result(result, folder, page, f"{model.name} ({checkpoint})", source.manifest, options=shared)
