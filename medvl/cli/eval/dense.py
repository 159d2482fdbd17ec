"""`medvl eval detection` and `medvl eval segmentation`: dense prediction of findings."""

import functools
from pathlib import Path
from typing import Literal

from medvl.cli.eval.options import SmallBatchOptions, open_evaluation, publish_result

_TEXTS = {"none": "no text", "others": "texts of other images"}
_ADVICE = "train a {} on its image encoder with recipes/dense_transfer.py --init-from {} --task {}"


def detection(
    shared: SmallBatchOptions,
    *,
    valid: Path | None = None,
    convention: Literal["medvl", "coco", "voc2007", "voc2012"] = "medvl",
    examples: int = 6,
) -> None:
    """Evaluate detection of findings: average precision over all images, those without boxes included.

    The checkpoint is a detector (recipes/dense_transfer.py); the shards have boxes (rsna, vindr-cxr, chestxdet10, ...).

    Args:
        valid: folder of shards of other patients, on which the score threshold is chosen; without it, no challenge
            score.
        convention: convention of average precision: medvl treats equal scores as one step; coco and voc order them, and
            voc adds a pixel to widths and has its own matching and recalls.
        examples: images with boxes on the page, and as many without.
    """
    from medvl.eval.core.open import open_source
    from medvl.eval.dense.detection import box_detection
    from medvl.eval.dense.detection_page import write_detection_page
    from medvl.models import Detector

    checkpoint = shared.checkpoint
    output = shared.folder(checkpoint, "detection")
    model, source, read = open_evaluation(shared, Detector, _ADVICE.format("detector", checkpoint, "detection"))
    folder = output.settle(manifest=source.fingerprint)
    valid_loader = None if valid is None else read(open_source(valid, [checkpoint]))
    result = box_detection(
        model,
        read(source),
        valid_loader=valid_loader,
        convention=convention,
        resamples=shared.resamples,
        checkpoint=checkpoint,
    )
    page = functools.partial(write_detection_page, result, pixels=source.pixels, examples=examples)
    publish_result(result, folder, page, f"{model.name} ({checkpoint})", source.manifest, options=shared)


def segmentation(
    shared: SmallBatchOptions,
    *,
    valid: Path | None = None,
    empty: Literal["one_if_both_empty", "skip_empty", "lvit"] = "one_if_both_empty",
    side: int | None = None,
    other_texts: tuple[Literal["none", "others"], ...] = ("none", "others"),
    examples: int = 6,
) -> None:
    """Evaluate segmentation of findings: Dice over all images, with a named rule for empty masks.

    The checkpoint is a segmenter (recipes/dense_transfer.py) or LViT (recipes/lvit_qata.py); the shards have masks
    (siim, qata, ...) or boxes (rsna).

    Args:
        valid: folder of shards of other patients, on which thresholds are chosen; without it they are fixed.
        empty: score of an image without a mask: 1 if the prediction is empty too, else 0; or none, such images being
            left out; or smoothed as in LViT's code.
        side: longer side of the images in which masks are compared; default: the published size.
        other_texts: texts to compare with, for a model that reads text: none, or those of other images.
        examples: images with a mask on the page, and as many without.
    """
    from medvl.data.loading.subset import OtherTexts
    from medvl.eval.core.open import open_source
    from medvl.eval.dense.segmentation import mask_segmentation
    from medvl.eval.dense.segmentation_page import write_segmentation_page
    from medvl.models import MaskModel

    checkpoint = shared.checkpoint
    advice = _ADVICE.format("segmenter", checkpoint, "segmentation")
    kind: type[MaskModel] = MaskModel
    output = shared.folder(checkpoint, "segmentation")
    model, source, read = open_evaluation(shared, kind, advice, text=True)
    folder = output.settle(manifest=source.fingerprint)
    compared = other_texts if model.tokenizer is not None else ()
    result = mask_segmentation(
        model,
        read(source),
        other_texts={_TEXTS[name]: read(OtherTexts(source, name)) for name in compared},
        valid_loader=None if valid is None else read(open_source(valid, [checkpoint])),
        empty=empty,
        side=side,
        resamples=shared.resamples,
        keep_maps=examples,
        checkpoint=checkpoint,
    )
    page = functools.partial(write_segmentation_page, result, pixels=source.pixels)
    publish_result(result, folder, page, f"{model.name} ({checkpoint})", source.manifest, options=shared)
