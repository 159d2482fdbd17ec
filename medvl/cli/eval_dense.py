"""`medvl eval detection` and `medvl eval segmentation`: a checkpoint and shards in, a table and a page out."""

import functools
from pathlib import Path
from typing import Any, Literal

from medvl.cli.eval_common import default_folder, load_model, open_textless, publish, refuse_seen
from medvl.errors import ConfigError


def detection(
    checkpoint: Path,
    data: Path,
    *,
    valid: Path | None = None,
    out: Path | None = None,
    examples: int = 6,
    resamples: int = 1000,
    batch: int = 32,
    workers: int = 2,
    device: str = "auto",
) -> None:
    """Detection of findings with boxes: average precision over all images, those without boxes included.

    Args:
        checkpoint: folder of a detector's checkpoint, such as runs/rsna-detection/best (recipes/dense_transfer.py).
        data: folder of shards with boxes (rsna, nih-cxr14), of patients that it was not trained on.
        valid: folder of shards of other patients, on which the score threshold is chosen; without it there is no
            challenge score.
        out: gets results.json, predictions.jsonl and index.html; default eval/detection in the checkpoint's run.
        examples: images on the page with boxes, and without.
        resamples: of the bootstrap.
        batch: images at a time.
        workers: loader processes.
        device: auto, cpu or cuda.
    """
    from medvl.eval.core.results import format_table
    from medvl.eval.dense.detection import box_detection as judge
    from medvl.eval.dense.page import write_detection_page
    from medvl.models import Detector

    model = _load(checkpoint, device, Detector)
    loader, valid_loader = _open(model, checkpoint, data, valid, batch, workers)
    result = judge(model, loader, valid_loader=valid_loader, resamples=resamples, checkpoint=checkpoint)
    publish(
        result,
        out or default_folder(checkpoint, "detection"),
        functools.partial(write_detection_page, pixels=loader.source.pixels, examples=examples),
        model=f"{model.name} ({checkpoint})",
        source=loader.source,
        table=format_table(result.results.rows),
    )


def segmentation(
    checkpoint: Path,
    data: Path,
    *,
    valid: Path | None = None,
    empty: Literal["one_if_both_empty", "skip_empty"] = "one_if_both_empty",
    side: int | None = None,
    out: Path | None = None,
    examples: int = 6,
    resamples: int = 1000,
    batch: int = 32,
    workers: int = 2,
    device: str = "auto",
) -> None:
    """Segmentation of findings with masks: Dice over all images, with a named rule for empty masks.

    Args:
        checkpoint: folder of a segmenter's checkpoint, such as runs/siim-segmentation/best.
        data: folder of shards with masks (siim) or boxes (rsna), of patients that it was not trained on.
        valid: folder of shards of other patients, on which thresholds are chosen; without it they are fixed.
        empty: what an image without a mask counts: 1 where nothing is marked and 0 where something is; or nothing.
        side: longer side of the images in which masks are judged; default the published images'.
        out: gets results.json, predictions.jsonl and index.html; default eval/segmentation in the checkpoint's run.
        examples: images on the page with a mask, and without.
        resamples: of the bootstrap.
        batch: images at a time.
        workers: loader processes.
        device: auto, cpu or cuda.
    """
    from medvl.eval.core.results import format_table
    from medvl.eval.dense.page import write_segmentation_page
    from medvl.eval.dense.segmentation import mask_segmentation as judge
    from medvl.models import Segmenter

    model = _load(checkpoint, device, Segmenter)
    loader, valid_loader = _open(model, checkpoint, data, valid, batch, workers)
    result = judge(
        model,
        loader,
        valid_loader=valid_loader,
        empty=empty,
        side=side,
        resamples=resamples,
        keep_maps=examples,
        checkpoint=checkpoint,
    )
    publish(
        result,
        out or default_folder(checkpoint, "segmentation"),
        functools.partial(write_segmentation_page, pixels=loader.source.pixels),
        model=f"{model.name} ({checkpoint})",
        source=loader.source,
        table=format_table(result.results.rows),
    )


def _load(checkpoint: Path, device: str, wanted: type) -> Any:
    model = load_model(checkpoint, device)
    if not isinstance(model, wanted):
        task = {"Detector": "detection", "Segmenter": "segmentation"}[wanted.__name__]
        raise ConfigError(
            f"{checkpoint} is a {model.name}: recipes/dense_transfer.py --init-from {checkpoint} --task {task} makes a "
            f"{wanted.__name__.lower()} of its image encoder"
        )
    return model


def _open(
    model: Any, checkpoint: Path, data: Path, valid: Path | None, batch: int, workers: int
) -> tuple[Any, Any | None]:
    loader = open_textless(model, data, batch, workers)
    refuse_seen(checkpoint, loader.source)
    return loader, None if valid is None else open_textless(model, valid, batch, workers)
