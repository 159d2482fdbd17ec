"""`medvl regions`: region features beside shards."""

import sys
from pathlib import Path

from medvl.errors import ConfigError


def regions(
    shards: Path,
    detector: str,
    *,
    name: str | None = None,
    weights: str | None = None,
    random_weights: bool = False,
    class_names: Path | None = None,
    image_size: int | None = None,
    max_regions: int = 36,
    min_regions: int | None = None,
    confidence: float = 0.2,
    nms_iou_threshold: float = 0.3,
    batch: int = 8,
    workers: int = 4,
    full_precision: bool = False,
    max_skipped: float = 0.001,
    device: str = "auto",
) -> None:
    """Write region features, boxes and classes of all images beside their shards, once, with a frozen detector.

    Models with image_encoder regions:WIDTH read them (data.regions NAME). The shards stay as they are. Run the same
    command again to resume.

    Args:
        shards: folder of a split, or folder that contains all splits.
        detector: fasterrcnn_resnet50_fpn or another Faster R-CNN of torchvision; grid:ENCODER for the cells of an image
            encoder; or folder of a checkpoint: the boxes of a detector, or the grid of another system's image encoder.
        name: name of the regions, a subfolder of SHARDS/regions; default: from that of the detector.
        weights: weights: for a Faster R-CNN a local file, which also decides the number of classes; for a grid
            a file, a folder, OWNER/NAME@COMMIT, or "published". Detectors without weights are refused.
        random_weights: use random weights, for tests.
        class_names: file with a name of the detector's classes on each line, the background's first.
        image_size: size of the images of grid:ENCODER.
        max_regions: largest number of regions of an image; all images have it (VisualBERT, LXMERT: 36) unless
            --min-regions is given.
        min_regions: smallest number; in between, regions above --confidence are kept (UNITER: 10 to 100).
        confidence: smallest confidence of a region beyond --min-regions.
        nms_iou_threshold: IoU above which the less confident of two boxes of a class is suppressed.
        batch: images that the detector reads at once.
        workers: threads that decode images.
        full_precision: store features as float32 instead of float16.
        max_skipped: budget of unreadable images: below 1 a fraction, else a number.
        device: cpu, cuda, or auto.
    """
    from medvl.data.convert.regions import RegionOptions, write_regions
    from medvl.data.shards.format import split_folders
    from medvl.data.shards.source import ShardSource
    from medvl.eval.core.open import resolve_device
    from medvl.models.downstream.regions.create import create_region_detector
    from medvl.models.downstream.regions.selection import RegionSelection

    options = RegionOptions(batch=batch, workers=workers, full_precision=full_precision, max_skipped=max_skipped)
    opened = create_region_detector(
        detector,
        weights=weights,
        random_weights=random_weights,
        selection=RegionSelection(
            max_regions=max_regions,
            min_regions=min_regions,
            confidence=confidence,
            nms_iou_threshold=nms_iou_threshold,
        ),
        image_size=image_size,
        class_names=None if class_names is None else _read_names(class_names),
        device=resolve_device(device),
    )
    chosen = name or opened.name.replace(":", "-").replace("/", "-")
    for folder in split_folders(shards):
        manifest = write_regions(ShardSource(folder), opened, chosen, options, progress=sys.stderr.isatty())
        classes = f", {len(manifest.class_names)} classes" if manifest.class_names else ""
        print(
            f"Wrote {folder}/regions/{chosen}: {manifest.regions} regions of {manifest.images} images, "
            f"{manifest.skipped} images skipped; image_encoder regions:{manifest.width}{classes}"
        )


def _read_names(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        message = f"cannot read {path} ({type(error).__name__}); expected a name on each line"
        raise ConfigError(message, "unreadable", field="class_names") from error
